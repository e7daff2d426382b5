"""How well two runs of a service predict its third: `calibrate --from`, on triples of measured engines' rows.

    python -m simcore.validate.engines.triples FILE [--profile local] [--out runs.csv] [--seed 0] [--most 40]

FILE is a table as `simcore.validate.engines.compare` takes it. A service is an engine's series, a model, a
card and a number of ranks. Of each service with three rows or more the seed draws three; two of them are
what a user has measured, and the constants that `calibrate --from` fits to these two predict the third:

    error = |predicted - measured| / measured        of TPOT and of TTFT, one a triple

Of more services than `--most` the seed draws as many. The output says by engine how large the errors are in
the median, and which share of triples is within 5 % (TPOT) and 15 % (TTFT). Exit code 1 if a median is not.
"""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from simcore.validate.calibration.records import NAME
from simcore.validate.calibration.service import HeldBack, Times, fitted
from simcore.validate.engines.predict import predictions
from simcore.validate.engines.rows import Row, read_rows
from simcore.validate.program import check_out, markdown, run, write_csv

# Within what TPOT and TTFT of a third run are to be, in percent.
BARS = {"TPOT": 5.0, "TTFT": 15.0}


def triples(rows: Sequence[Row], seed: int, most: int) -> list[list[Row]]:
    """Draws three rows of each service that has as many, of at most so many services, by a seed; the last of
    the three is predicted."""
    services: dict[tuple[str, str, str, int], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.id):
        services.setdefault((row.series.name, row.model, row.card, row.ranks), []).append(row)
    enough = sorted(key for key, mine in services.items() if len(mine) >= 3)
    kept = sorted(random.Random(f"{seed}").sample(enough, min(most, len(enough))))
    return [random.Random(f"{seed} {key}").sample(services[key], 3) for key in kept]


def held_back(triple: Sequence[Row], profile: str) -> HeldBack:
    """Fits constants to the first two rows of a triple and predicts the third."""
    *known, last = triple
    with predictions(1) as predicted:

        def predict(tasks: Any) -> list[Times]:
            return [Times(one.ttft_s, one.tpot_s) for one in predicted(tasks, profile)]

        host = fitted(known, predict).alone()
        (times,) = predict([(last, host)])
    return HeldBack(last.label, last.times, times, host)


def lines(found: Sequence[tuple[Sequence[Row], HeldBack]]) -> Iterator[str]:
    """Yields the printed table."""
    groups: dict[str, list[HeldBack]] = {}
    for triple, one in found:
        groups.setdefault(triple[-1].series.name, []).append(one)
    head = ["series", "n"]
    for name, bar in BARS.items():
        head += [f"{name} median", f"within {bar:g} %"]
    table = [head, *([name, *_cells(mine)] for name, mine in groups.items())]
    yield from markdown([*table, ["all", *_cells([one for _, one in found])]])


def _cells(found: Sequence[HeldBack]) -> list[str]:
    cells = [str(len(found))]
    for name, bar in BARS.items():
        sizes = _sizes(found, name)
        within = 100.0 * fmean(size <= bar for size in sizes)
        cells += [f"{median(sizes):.1f} %", f"{within:.0f} %"]
    return cells


def _sizes(found: Sequence[HeldBack], name: str) -> list[float]:
    return [abs(one.tpot_pct if name == "TPOT" else one.ttft_pct) for one in found]


def _line(triple: Sequence[Row], one: HeldBack) -> dict[str, Any]:
    first, second, third = (row.label for row in triple)
    return {
        "fitted to": f"{first}; {second}", "predicted": third, "TPOT error %": one.tpot_pct,
        "TTFT error %": one.ttft_pct, "constants": str(one.host),
    }  # fmt: skip


def main(
    file: Annotated[Path, typer.Argument(help="the table of measured runs")],
    profile: Annotated[str, typer.Option(help="of the cards; 'none' for their datasheets")] = NAME,
    out: Annotated[Path | None, typer.Option(help="a CSV file for the triples")] = None,
    seed: Annotated[int, typer.Option(help="by which triples are drawn")] = 0,
    most: Annotated[int, typer.Option(min=1, help="services at most")] = 40,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; as many as cores, if left out")] = None,
) -> None:
    """Prints how well two runs of each service predict a third."""
    check_out(out)
    chosen = triples(read_rows(file)[0], seed, most)
    if not chosen:
        typer.echo("no service has three rows")
        sys.exit(1)
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        every = list(zip(chosen, pool.map(partial(held_back, profile=profile), chosen), strict=True))
    for line in lines(every):
        typer.echo(line)
    if out is not None:
        write_csv([_line(*each) for each in every], out)
    found = [one for _, one in every]
    sys.exit(int(any(median(_sizes(found, name)) > bar for name, bar in BARS.items())))


if __name__ == "__main__":
    run(main)
