"""How well two calibrations of a card agree: the same shapes, measured twice.

    python -m validate.two_calibrations DIR DIR

By kind of op: how many shapes both have, the median of second / first, and between what the middle 90 % of
them lie. Shapes that a card cannot tell apart (`devices.corrected.coordinates`) count as the same.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from devices.fitted import FittedProfile
from devices.profile import load_profile
from simcore.files import InputError, read_yaml
from validate.program import run

MOST_OFF = 0.02


def ratios(first: FittedProfile, second: FittedProfile) -> dict[str, list[float]]:
    """second / first at the shapes that both have, by kind and dtype."""
    known = {point.place: point.median_s for point in first.points}
    found: dict[str, list[float]] = {}
    for point in second.points:
        before_s = known.get(point.place)
        if before_s is not None:
            found.setdefault(f"{point.kind} {point.dtype}", []).append(point.median_s / before_s)
    return found


def lines(found: Mapping[str, list[float]]) -> Iterator[str]:
    """The table for people, all kinds together last."""
    yield f"{'kind':40} {'n':>5} {'median':>8} {'middle 90 %':>18}"
    every = [ratio for each in found.values() for ratio in each]
    for kind, each in [*sorted(found.items()), ("all", every)]:
        low, middle, high = np.percentile(each, (5, 50, 95))
        yield f"{kind:40} {len(each):>5} {middle:>8.4f} {low:>8.4f} to {high:.4f}"


def main(
    first: Annotated[Path, typer.Argument(help="the folder of a profile")],
    second: Annotated[Path, typer.Argument(help="another of the same device")],
) -> None:
    """Compares two measured profiles of one device; exit 1 where a kind's median is off by over 2 %."""
    one, other = _read(first), _read(second)
    if one.device != other.device:
        raise InputError(f"{second}: is of {other.device}, {first} of {one.device}")
    found = ratios(one, other)
    if not found:
        raise InputError(f"{second}: has no shape that {first} has")
    for line in lines(found):
        typer.echo(line)
    off = [kind for kind, each in found.items() if abs(float(np.median(each)) - 1.0) > MOST_OFF]
    if off:
        typer.echo(f"off by more than {100 * MOST_OFF:g} %: {', '.join(sorted(off))}")
        raise typer.Exit(1)


def _read(folder: Path) -> FittedProfile:
    document = read_yaml(folder / "profile.yaml")
    device = document.get("device") if isinstance(document, dict) else None
    profile = load_profile(str(device), str(folder.absolute()))
    if not isinstance(profile, FittedProfile) or not profile.points:
        raise InputError(f"{folder}: has no measured shapes")
    return profile


if __name__ == "__main__":
    run(main)
