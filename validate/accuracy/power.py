"""Holds the law by which arithmetic takes longer under load (`simcore.sim.power`) to products on a card.

    python -m simcore.validate.accuracy.power --out rows.csv                 measures this card, 90 s
    python -m simcore.validate.accuracy.power --out rows.csv --fit           and writes its constants
    python -m simcore.validate.accuracy.power --measured rows.csv            judges rows again, without a card

    error = predicted / measured - 1 of the time of a product that takes a share of each period

Rows are as `simcore.validate.calibration.power_fit` describes them, and were measured by `cuda_power`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer

from simcore.assembly import law_of
from simcore.devices.fitted import LimitedPower, write_law
from simcore.devices.price import pricer
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.sim.power import PowerLimit
from simcore.validate import cells
from simcore.validate.accuracy.contention import fitted_profile, folder_of, of_one_card
from simcore.validate.benchmarks.timing import birth, measure_card
from simcore.validate.calibration import cuda_power
from simcore.validate.calibration.cuda import this_card
from simcore.validate.calibration.power_fit import (
    MEDIAN_PCT,
    WORST_PCT,
    OffError,
    Row,
    UnlimitedError,
    beginning,
    errors,
    limited_power,
    read_rows,
    series_of,
    steady,
)
from simcore.validate.program import check_out, markdown, run, write_csv

BORN = ("device", "driver", "torch", "triton", "date_utc")
BROKEN = 1
# A product of a beginning has slowed down once it takes this much longer.
SLOW = 1.08


def lines(rows: Sequence[Row], limit: PowerLimit) -> Iterator[str]:
    """Yields the printed tables: steady cases, and when products slow down after a beginning."""
    found = [("format", "beside", "period, ms", "share of products", "times as long", "by the law", "error")]
    for row in rows:
        if row.kind == "steady":
            times = steady(limit, row)
            found.append((
                row.dtype, row.beside, f"{1e3 * row.period_s:.1f}", f"{row.share:.1%}", f"{row.times:.3f}",
                f"{times:.3f}", f"{100 * (times / row.times - 1):+.1f} %",
            ))  # fmt: skip
    yield from markdown(found)
    yield ""
    begun = [
        ("beginning after", f"{SLOW:g} times as long after, ms", "by the law", "in the end", "by the law")
    ]
    for own in series_of(rows):
        ours = beginning(limit, own)
        last = len(own) // 3
        begun.append((
            own[0].beside, _slow_after(own, [row.times for row in own]), _slow_after(own, ours),
            f"{median(row.times for row in own[-last:]):.3f}", f"{median(ours[-last:]):.3f}",
        ))  # fmt: skip
    yield from markdown(begun)


def _slow_after(rows: Sequence[Row], times: Sequence[float]) -> str:
    # The first product finds a cache of others.
    found = [row.at_s for row, each in zip(rows[1:], times[1:], strict=True) if each >= SLOW]
    return f"{1e3 * found[0]:.0f}" if found else "-"


def _births(path: Path) -> list[dict[str, str]]:
    return [{name: line[name] for name in BORN} for _, line in cells.lines(path, BORN)]


def main(
    profile: Annotated[str, typer.Option(help="whose constants are judged, or --fit writes")] = "local",
    out: Annotated[Path | None, typer.Option(help="where to write all rows, as CSV")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="fit the constants, write them into the profile")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="a fourth of the cases, 30 s")] = False,
    from_: Annotated[
        Path | None, typer.Option("--measured", help="rows of an earlier run, in place of a card")
    ] = None,
    device: Annotated[str | None, typer.Option(help="of the catalogue; needed with --measured alone")] = None,
) -> None:
    """Measures products under load, and compares; exit 1 if the median error is 2 % or more or the largest
    6 % or more."""
    check_out(out)
    name = _device(device, from_, quick)
    known = fitted_profile(name, profile)
    if from_ is None:
        price = pricer(load_device(name), profile=known)
        rows = cuda_power.rows_here(price, quick=quick, say=partial(typer.echo, err=True))
        born = {key: str(value) for key, value in asdict(birth(measure_card(lambda text: None))).items()}
        births = [{key: born[key] for key in BORN}] * len(rows)
    else:
        rows, births = read_rows(from_), _births(from_)
        if fit:
            of_one_card(births, known, str(from_))
    if out is not None:
        write_csv([{**asdict(row), **own} for row, own in zip(rows, births, strict=True)], out)
    found = _fitted(rows, births[0]) if fit else known.power
    if found is None:
        raise InputError(f"--profile {profile}: has no constants of limited power; --fit makes some")
    limit = law_of(found)
    for line in lines(rows, limit):
        typer.echo(line)
    typer.echo(
        f"law: arithmetic {limit.arithmetic:.3f}, others {limit.others:.3f}, idle {limit.idle:.3f} of the"
        f" limit, over {1e3 * limit.over_s:.0f} ms; fitted {'to these rows' if fit else f'on {found.date}'}"
    )
    off = [100.0 * abs(error) for error in errors(limit, rows)]
    typer.echo(f"error: median {median(off):.2f} %, largest {max(off):.2f} % of {len(off)} cases")
    if median(off) >= MEDIAN_PCT or max(off) >= WORST_PCT:
        raise typer.Exit(BROKEN)
    if fit:
        folder = folder_of(name, profile)
        write_law(found, folder)
        typer.echo(f"written into {folder / 'profile.yaml'}")


def _device(named: str | None, measured: Path | None, quick: bool) -> str:
    """Returns the catalogue's device. Raises InputError if options do not go together."""
    if quick and measured is not None:
        raise InputError("--quick: is for a card, not for rows of --measured")
    if named is not None and measured is None:
        raise InputError("--device: is for rows of --measured; a card that is measured is known")
    if measured is not None and named is None and not torch.cuda.is_available():
        raise InputError("--device: is needed with --measured where there is no card")
    return load_device(named).name if named else this_card()


def _fitted(rows: Sequence[Row], born: Mapping[str, str]) -> LimitedPower:
    """Returns constants of the rows; ends the program with 1 if they do not follow the law."""
    try:
        return limited_power(rows, born["device"], born["date_utc"])
    except (OffError, UnlimitedError) as error:
        typer.echo(f"--fit: {error}; nothing was written")
        raise typer.Exit(BROKEN) from None
    except ValueError as error:
        raise InputError(f"--fit: {error}") from None


if __name__ == "__main__":
    run(main)
