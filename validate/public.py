"""Predicts every public run that lies in a folder, and judges all of them in one table.

    python -m simcore.validate.public FOLDER [--profile local] [--seed 0] [--estimate] [--out rows.csv]

Tables of runs (CSV, at any depth) are known by their columns: engines under closed loops of clients
(`simcore.validate.engines.rows`), and MLPerf Inference results under Poisson arrivals
(`simcore.validate.mlperf.rows`). Other data are named, in one line, and left. A line of the table is an
engine, a model, a card and a load:

    error = |predicted - measured| / measured, in percent, of each figure that a run has
    fitted = the rows that the constants of the line's predictions were fitted to; these are not judged

MLPerf's rates are searched, minutes a row; with `--estimate` they are those of steps that are all alike, and
there are no latencies.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import typer

from simcore.input.files import InputError, read_cells
from simcore.validate.calibration.records import NAME
from simcore.validate.engines import compare as engines
from simcore.validate.engines import rows as engine_rows
from simcore.validate.mlperf import compare as mlperf
from simcore.validate.mlperf import predict as mlperf_predict
from simcore.validate.mlperf import rows as mlperf_rows
from simcore.validate.program import check_out, markdown, run, write_csv

# Closed loops are told apart by their clients, up to these numbers.
CLIENTS = (8, 32, 128)
# Files of a folder that may hold data.
DATA = (".csv", ".json", ".jsonl", ".parquet")
# The figures of a run, with the name of each in the table.
FIGURES = ("TPOT", "TTFT", "TPOT p99", "TTFT p99", "rate")
MLPERF_NAMES = {
    "tpot_mean_s": "TPOT", "ttft_mean_s": "TTFT", "tpot_p99_s": "TPOT p99", "ttft_p99_s": "TTFT p99",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judged:
    """A run and the signed errors of its figures in percent. `place`: engine, model, card, load; `fitted`:
    the rows that its constants were fitted to, in words."""

    source: str
    name: str
    place: tuple[str, str, str, str]
    fitted: str
    errors: Mapping[str, float]


def tables(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Returns the tables of engines, those of MLPerf, and the other data of a folder. Raises InputError if
    there is no table to judge."""
    if not folder.is_dir():
        raise InputError(f"FOLDER {folder}: is no folder")
    found: tuple[list[Path], list[Path], list[Path]] = ([], [], [])
    for path in sorted(each for each in folder.rglob("*") if each.suffix in DATA):
        head = read_cells(path)[0] if path.suffix == ".csv" else ()
        kinds = (engine_rows.COLUMNS, mlperf_rows.COLUMNS, ())
        found[next(i for i, columns in enumerate(kinds) if {*columns} <= {*head})].append(path)
    if not found[0] and not found[1]:
        raise InputError(f"FOLDER {folder}: has no table with the columns of measured engines or of MLPerf")
    return found


def of_engines(path: Path, profile: str, seed: int, jobs: int | None) -> Iterator[Judged]:
    """Yields the runs of a table of engines that nothing was fitted to."""
    rows, _ = engine_rows.read_rows(path)
    found, _ = engines.compared(rows, profile, seed, jobs)
    counts: dict[str, int] = {}
    for one in found:
        counts[one.row.series.name] = counts.get(one.row.series.name, 0) + one.is_fitted
    for one in found:
        row, series = one.row, one.row.series.fitted_as
        fitted = f"{counts.get(series, 0)} rows of {series}" if counts.get(series) else "nothing"
        if hosts := counts.get(row.series.host_of or ""):
            fitted += f"; its host to {hosts} of {row.series.host_of}"
        place = (row.series.name, row.model, row.card, clients(row.clients))
        if not one.is_fitted:
            yield Judged(path.name, row.id, place, fitted, {"TPOT": one.tpot_pct, "TTFT": one.ttft_pct})


def clients(number: int) -> str:
    """Returns the class of a closed loop's clients.

    >>> clients(8), clients(9), clients(500)
    ('1 to 8 clients', '9 to 32 clients', 'more than 128 clients')
    """
    low = 1
    for most in CLIENTS:
        if number <= most:
            return f"{low} to {most} clients"
        low = most + 1
    return f"more than {CLIENTS[-1]} clients"


def of_mlperf(path: Path, seed: int, jobs: int | None, *, search: bool) -> Iterator[Judged]:
    """Yields the runs of a table of MLPerf results that may not be looked at."""
    rows, _ = mlperf_rows.read_rows(path, seed)
    chosen = [row for row in rows if not row.is_fit and row.card in mlperf_predict.facts()["cards"]]
    found = mlperf_predict.predict_all(chosen, jobs or os.cpu_count() or 1, lambda *_: None, search=search)
    for row, ours in zip(chosen, found, strict=True):
        one = mlperf.Compared(row, ours)
        errors = {"rate": -mlperf.size_of(None) if one.error_pct is None else one.error_pct}
        if one.is_simulated:
            errors |= {MLPERF_NAMES[name]: one.latency_pct(name) for name in mlperf_predict.FIGURES}
        place = (mlperf_predict.ENGINE, row.model, row.card, f"{row.scenario}, Poisson")
        yield Judged(path.name, row.label, place, mlperf_predict.facts()["engine"]["fitted_to"], errors)


def lines(found: Sequence[Judged]) -> Iterator[str]:
    """Yields the table."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for one in sorted(found, key=lambda one: (one.source, one.place)):
        groups.setdefault((one.source, *one.place, one.fitted), []).append(one)
    head = ["table", "engine", "model", "card", "load", "fitted to", "n"]
    table = [[*head, *(f"{name} median, mean" for name in FIGURES)]]
    for place, mine in groups.items():
        table.append([*place, str(len(mine)), *(_cell(mine, name) for name in FIGURES)])
    table.append(["all", *[""] * 5, str(len(found)), *(_cell(found, name) for name in FIGURES)])
    yield from markdown(table)


def _cell(found: Sequence[Judged], name: str) -> str:
    sizes = [abs(one.errors[name]) for one in found if name in one.errors]
    return f"{median(sizes):.1f}, {fmean(sizes):.1f} %" if sizes else ""


def _line(one: Judged) -> dict[str, Any]:
    engine, model, card, load = one.place
    errors = {f"{name} error %": one.errors.get(name) for name in FIGURES}
    about = {"engine": engine, "model": model, "card": card, "load": load, "fitted to": one.fitted}
    return {"table": one.source, "run": one.name, **about, **errors}


def main(
    folder: Annotated[Path, typer.Argument(help="the folder with the tables")],
    profile: Annotated[str, typer.Option(help="of the cards; 'none' for their datasheets")] = NAME,
    seed: Annotated[int, typer.Option(help="by which the fitted rows are drawn")] = 0,
    estimate: Annotated[bool, typer.Option("--estimate", help="MLPerf's rates in seconds; no run")] = False,
    out: Annotated[Path | None, typer.Option(help="a CSV file for all runs")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; as many as cores, if left out")] = None,
) -> None:
    """Prints how predictions compare with all public runs of a folder."""
    check_out(out)
    closed, poisson, others = tables(folder)
    if others:
        names = ", ".join(str(path.relative_to(folder)) for path in others)
        typer.echo(f"not read, for they are no tables of runs that are known: {names}")
    found = [one for path in closed for one in of_engines(path, profile, seed, jobs)]
    found += [one for path in poisson for one in of_mlperf(path, seed, jobs, search=not estimate)]
    for line in lines(found):
        typer.echo(line)
    if out is not None:
        write_csv([_line(one) for one in found], out)


if __name__ == "__main__":
    run(main)
