"""Compares two calibrations of a card: the same shapes, measured twice.

    python -m simcore.validate.accuracy.two_calibrations DIR DIR [--out rows.csv]

For each kind of op: the number of common shapes, the median of second / first, and the range of its middle
90 %. Shapes that a card cannot tell apart (`simcore.devices.interpolation.coordinates`) count as equal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from simcore.devices.fitted import FittedProfile
from simcore.devices.profile import load_profile
from simcore.input.files import InputError, read_yaml
from simcore.terminal import BROKEN
from simcore.validate.program import aligned, check_out, run, write_csv

MOST_OFF = 0.02

Row = dict[str, Any]


def ratios(first: FittedProfile, second: FittedProfile) -> dict[str, list[float]]:
    """Returns second / first at the common shapes, by kind and dtype."""
    known = {point.place: point.median_s for point in first.points}
    found: dict[str, list[float]] = {}
    for point in second.points:
        before_s = known.get(point.place)
        if before_s is not None:
            found.setdefault(f"{point.kind} {point.dtype}", []).append(point.median_s / before_s)
    return found


def rows(found: Mapping[str, list[float]], first: FittedProfile, second: FittedProfile) -> list[Row]:
    """Returns a row for each kind and a last one for all, with both profiles' birth records."""
    every = [ratio for each in found.values() for ratio in each]
    born = {f"{name}_{key}": value for name, of in (("first", first), ("second", second))
            for key, value in _born(of).items()}  # fmt: skip
    made = list[Row]()
    for kind, each in [*sorted(found.items()), ("all", every)]:
        low, middle, high = (float(value) for value in np.percentile(each, (5, 50, 95)))
        made.append({"kind": kind, "n": len(each), "median": middle, "p5": low, "p95": high, **born})
    return made


def _born(profile: FittedProfile) -> Row:
    if profile.birth is None:
        return {"source": profile.source}
    birth = profile.birth
    return {"source": profile.source, "date": birth.date, "device": birth.processor, **birth.versions}


def main(
    first: Annotated[Path, typer.Argument(help="the folder of a profile")],
    second: Annotated[Path, typer.Argument(help="another of the same device")],
    out: Annotated[Path | None, typer.Option(help="where to write the rows, as CSV")] = None,
) -> None:
    """Compares two measured profiles of one device; exit 1 where a kind's median is off by over 2 %."""
    check_out(out)
    one, other = _read(first), _read(second)
    if one.device != other.device:
        raise InputError(f"{second}: is of {other.device}, {first} of {one.device}")
    found = ratios(one, other)
    if not found:
        raise InputError(f"{second}: has no shape that {first} has")
    table = rows(found, one, other)
    if out is not None:
        write_csv(table, out)
    cells = [(f"{row[name]:.4f}" for name in ("median", "p5", "p95")) for row in table]
    lines = [[row["kind"], str(row["n"]), *each] for row, each in zip(table, cells, strict=True)]
    for line in aligned([["kind", "n", "median", "p5", "p95"], *lines]):
        typer.echo(line)
    off = [row["kind"] for row in table if row["kind"] in found and abs(row["median"] - 1.0) > MOST_OFF]
    if off:
        typer.echo(f"off by more than {100 * MOST_OFF:g} %: {', '.join(sorted(off))}")
        raise typer.Exit(BROKEN)


def _read(folder: Path) -> FittedProfile:
    document = read_yaml(folder / "profile.yaml")
    device = document.get("device") if isinstance(document, dict) else None
    profile = load_profile(str(device), str(folder.absolute()))
    if not isinstance(profile, FittedProfile) or not profile.points:
        raise InputError(f"{folder}: has no measured shapes")
    return profile


if __name__ == "__main__":
    run(main)
