"""Records of measured ops, and a profile's description of its origin, for any device."""

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
    """Returns the key of an op's line in a file."""
    return op.kind, shape_text(op), op.dtype


@checked(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Kept:
    """A measured op as a line of a file; see `simcore.devices.making.Point`."""

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
        """The key of its op."""
        return self.kind, self.shape, self.dtype

    def point(self, op: Op, floor: Roofline) -> Point:
        """Returns the point of its op."""
        launches, floor_s = launches_and_floor(op, floor)
        times = self.median_s, self.p10_s, self.p90_s, self.n
        return Point(op, launches, floor_s, *times, self.cache, self.warm_s, self.role)


def profile_path(device: str) -> Path:
    """Returns the path of a calibration's profile."""
    return PROFILES / device / NAME


def measured_on(processor: str, date: str, on: str, quick: bool, shapes: int) -> str:
    """Describes a profile's origin for readers anywhere: the processor, and the day of an ISO `date`."""
    day = date.partition("T")[0]
    return f"measured on one {processor}, {day}: calibrate --on {on}{' --quick' * quick}, {shapes} shapes"


def birth_of(
    points: Sequence[Point],
    processor: str,
    versions: Mapping[str, str],
    rates: Mapping[str, float],
    threads: int | None = None,
) -> Birth:
    """Returns the record of a measurement that ends now; `threads`: default torch's."""
    return Birth(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        processor=processor,
        threads=threads or torch.get_num_threads(),
        versions=dict(versions),
        points=len(points),
        # Without points costs of verbs alone were measured.
        runs=min(point.runs for point in points) if points else None,
        spread=median(point.spread for point in points) if points else None,
        rates=dict(rates),
    )


def what_is_odd(points: Sequence[Point], kinds: Collection[str]) -> Iterator[str]:
    """Yields notes for the reader: kinds without a fit, and shapes faster than the datasheet allows."""
    if missing := sorted({*kinds} - {point.op.kind for point in points}):
        yield f"not measured, priced by the roofline: {', '.join(missing)}"
    if fast := sum(point.median_s < point.floor_s for point in points):
        yield f"{fast} of {len(points)} shapes were faster than the device's figures allow"
