"""Errors of a measured profile's prices at the shapes that its calibration measured to check them.

    python -m simcore.validate.accuracy.profile_checks h200-sxm [--profile local]

    error = 100 (max(price, measured) / min(price, measured) - 1)        in percent

No card is needed. For each kind of op: number of shapes, median, 95th percentile and worst error, and the
shape of the worst. Prices do not use these shapes, but intervals do, so the share inside the intervals would
prove nothing here (`simcore.validate.accuracy.held_out` measures other shapes).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from simcore.devices.fitted import FittedProfile
from simcore.devices.interpolation import Measured
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.validate.accuracy.tables import MEDIAN_PCT, P95_PCT, error_lines, errors_row, is_close, label
from simcore.validate.program import run

Errors = Mapping[str, Sequence[tuple[float, Measured]]]


def by_kind(profile: FittedProfile) -> Errors:
    """Returns errors in percent with their shapes, by kind and dtype."""
    found: dict[str, list[tuple[float, Measured]]] = {}
    for point, off in profile.errors():
        name = label(point.kind, point.dtype, point.dimensions)
        found.setdefault(name, []).append((100.0 * (math.exp(abs(off)) - 1.0), point))
    return found


def main(
    device: Annotated[str, typer.Argument(help="of the catalogue")],
    profile: Annotated[str, typer.Option(help="name, or folder, of a measured profile")] = "local",
) -> None:
    """Prints how far off the prices of a measured profile are."""
    of = load_profile(load_device(device).name, profile)
    found = by_kind(of) if isinstance(of, FittedProfile) else {}
    if not found:
        raise InputError(f"--profile {profile}: has no shapes that were measured to check prices")
    every = [each for group in found.values() for each in group]
    *rows, whole = (
        errors_row(kind, [error for error, _ in group], [point.shape for _, point in group])
        for kind, group in [*sorted(found.items()), ("all", every)]
    )
    for line in error_lines([*rows, whole]):
        typer.echo(line)
    typer.echo(
        f"{sum(map(is_close, rows))} of {len(found)} kinds have a median under {MEDIAN_PCT:g} % and a 95th "
        f"percentile under {P95_PCT:g} %"
    )


if __name__ == "__main__":
    run(main)
