"""What a profile that was measured says of itself, whatever it was measured on: its name, birth and notes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from simcore.devices.fitted import Birth
from simcore.devices.making import Point
from simcore.devices.profile import PROFILES

NAME = "local"


def profile_path(device: str) -> Path:
    """Where the profile of a calibration belongs."""
    return PROFILES / device / NAME


def measured_on(processor: str, date: str, on: str, quick: bool, shapes: int) -> str:
    """Where a profile is from, to readers on any machine: the processor, and the day of an ISO `date`."""
    day = date.partition("T")[0]
    return f"measured on one {processor}, {day}: calibrate --on {on}{' --quick' * quick}, {shapes} shapes"


def birth_of(
    points: Sequence[Point],
    processor: str,
    versions: Mapping[str, str],
    rates: Mapping[str, float],
    threads: int | None = None,
) -> Birth:
    """The record of a measurement that ends now; `threads`: torch's, if left out."""
    return Birth(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=processor,
        threads=threads or torch.get_num_threads(),
        versions=dict(versions),
        points=len(points),
        runs=min(point.runs for point in points),
        spread=median(point.spread for point in points),
        rates=dict(rates),
    )


def what_is_odd(points: Sequence[Point], kinds: Collection[str]) -> Iterator[str]:
    """What a reader should know: kinds without a fit, and shapes that beat the datasheet."""
    if missing := sorted({*kinds} - {point.op.kind for point in points}):
        yield f"not measured, priced by the roofline: {', '.join(missing)}"
    if fast := sum(point.median_s < point.floor_s for point in points):
        yield f"{fast} of {len(points)} shapes were faster than the device's figures allow"
