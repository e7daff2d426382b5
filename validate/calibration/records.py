"""What is kept of measured ops, and what a profile of them says of itself, whatever it was measured on."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from simcore.devices.fitted import Birth
from simcore.devices.interpolation import Role, Took
from simcore.devices.making import Point, shape_text
from simcore.devices.price import launches_and_floor
from simcore.devices.profile import PROFILES
from simcore.input.files import Count
from simcore.ops.op import Op, Roofline

NAME = "local"

# Kind, shape and dtype of an op.
Key = tuple[str, str, str]


def key_of(op: Op) -> Key:
    """Which line of a file an op has."""
    return op.kind, shape_text(op), op.dtype


@checked(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Kept:
    """A measured op as a line of a file has it; see `simcore.devices.making.Point`."""

    kind: str
    shape: str
    dtype: str
    median_s: Took
    p10_s: Took
    p90_s: Took
    n: Count
    cache: str
    warm_s: Took | None = None
    role: Role = "fit"

    @property
    def key(self) -> Key:
        """Which op it is of."""
        return self.kind, self.shape, self.dtype

    def point(self, op: Op, floor: Roofline) -> Point:
        """The point of the op that it is of."""
        launches, floor_s = launches_and_floor(op, floor)
        times = self.median_s, self.p10_s, self.p90_s, self.n
        return Point(op, launches, floor_s, *times, self.cache, self.warm_s, self.role)


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
