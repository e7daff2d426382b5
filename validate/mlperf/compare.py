"""Compares the simulator with MLPerf Inference results: the highest rate at the published limits.

    python -m simcore.validate.mlperf.compare [--data FOLDER] [--half fit|rest|all] [--out rows.csv]

FOLDER (else the environment variable SIMCORE_MLPERF) holds runs_h100_h200_half_a.csv. The program predicts
the valid Server and Interactive rows of Llama 2 70B, Llama 3.1 8B and 405B whose settings were published:

    error = (predicted highest rate - scheduled rate) / scheduled rate

A submitter schedules a rate that passes, so the scheduled rate is a lower bound of what the system carries:
an error above 0 may be the submitter's margin, one well below 0 is the simulator's. The published latencies
say how much margin there was; they stand beside those predicted at the same rate. A third of the rows, drawn
by the seed, may be looked at while the simulator or the assumptions in mlperf.yaml change ("fit"); the rest
are reported apart, and so is 405B, to whose rows nothing is fitted. The search takes minutes a row;
`--estimate` takes seconds, without queues and variation between steps. Exit code 1 if the median error of the
judged rows is not below the bar, or that of 405B's median TPOT.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from simcore.input.files import InputError, unknown_name
from simcore.planning.slo import preset_of
from simcore.validate.mlperf.predict import FIGURES, Predicted, facts, predict_all
from simcore.validate.mlperf.rows import HALVES, MODELS, UNSEEN, Row, half, read_rows
from simcore.validate.program import check_out, markdown, run, write_csv

VARIABLE, FILE = "SIMCORE_MLPERF", "runs_h100_h200_half_a.csv"
# Median error of the judged rows, and of the median TPOT of rows to which nothing is fitted, in percent.
BAR, TPOT_BAR = 10.0, 15.0
# A run whose published percentiles reach this share of a limit was at its limit.
AT_LIMIT = 0.9


@dataclass(frozen=True, slots=True)
class Compared:
    """A published run and its prediction."""

    row: Row
    predicted: Predicted

    @property
    def is_simulated(self) -> bool:
        """Whether the rate was searched, and not only estimated."""
        return bool(self.predicted.at_submitted)

    @property
    def error_pct(self) -> float | None:
        """Signed error of the highest rate, or of its estimate if none was searched; None if none holds."""
        ours = self.predicted
        highest = ours.highest_per_s if self.is_simulated else ours.steady_per_s or None
        return None if highest is None else 100.0 * (highest / self.row.rate_per_s - 1.0)

    @property
    def used(self) -> float:
        """The greatest share of a limit that the published percentiles use."""
        known = preset_of(self.row.limits).limits
        return max(float(getattr(self.row, name)) / limit for name, limit in known.items())

    def latency_pct(self, name: str) -> float:
        """Signed error of a latency at the submitted rate."""
        return 100.0 * (self.predicted.at_submitted[name] / float(getattr(self.row, name)) - 1.0)


def size_of(error_pct: float | None) -> float:
    """Returns the size of an error in percent; of a run at which no rate holds 100."""
    return 100.0 if error_pct is None else abs(error_pct)


def lines(found: Sequence[Compared]) -> Iterator[str]:
    """Yields the printed lines."""
    unseen = [one for one in found if one.row.model in UNSEEN]
    others = [one for one in found if one.row.model not in UNSEEN]
    parts = {
        "looked at": [one for one in others if one.row.is_fit],
        "judged": [one for one in others if not one.row.is_fit],
        f"of {', '.join(sorted(UNSEEN))}, to which nothing is fitted": unseen,
    }
    for name, mine in parts.items():
        if mine:
            yield f"## {len(mine)} rows {name}"
            yield ""
            yield from _table(mine)
            yield ""
            yield from _figures(mine)
            yield ""


def _table(found: Sequence[Compared]) -> Iterator[str]:
    searched = found[0].is_simulated
    more = ["highest /s", *(_short(name) for name in FIGURES), "fails by"] if searched else []
    table: list[list[object]] = [["row", "rate /s", "of the limits", "error", "steady steps /s", *more]]
    for one in sorted(found, key=lambda one: -size_of(one.error_pct)):
        row, ours = one.row, one.predicted
        cells: list[object] = [
            row.label,
            f"{row.rate_per_s:.4g}",
            f"{100.0 * one.used:.0f} %",
            "none" if one.error_pct is None else f"{one.error_pct:+.1f} %",
            f"{ours.steady_per_s:.4g}",
        ]
        if searched:
            pairs = ((getattr(row, name), ours.at_submitted[name]) for name in FIGURES)
            cells += ["none" if ours.highest_per_s is None else f"{ours.highest_per_s:.4g}"]
            cells += [f"{1e3 * theirs:.4g}, {1e3 * mine:.4g}" for theirs, mine in pairs]
            cells += [ours.limited_by]
        table.append(cells)
    yield from markdown(table)


def _short(name: str) -> str:
    latency, of, _ = name.split("_")
    return f"{latency.upper()} {of} ms"


def _figures(found: Sequence[Compared]) -> Iterator[str]:
    yield f"Highest rate: {_errors([one.error_pct for one in found])}"
    if near := [one for one in found if one.used >= AT_LIMIT]:
        of = f"Of {len(near)} rows that use {100 * AT_LIMIT:.0f} % of a limit or more"
        yield f"{of}: {_errors([one.error_pct for one in near])}"
    for name in FIGURES if found[0].is_simulated else ():
        errors = [one.latency_pct(name) for one in found]
        yield f"{_short(name)[:-3]} at the scheduled rate: {_errors(errors)}"


def _errors(errors: Sequence[float | None]) -> str:
    worst = max(errors, key=size_of)
    text = "no rate holds" if worst is None else f"{worst:+.1f} %"
    return f"median {median(map(size_of, errors)):.1f} %, worst {text}"


def _line(one: Compared) -> dict[str, Any]:
    row, ours = one.row, one.predicted
    line: dict[str, Any] = {
        "submitter": row.submitter, "system": row.system, "model": row.model, "scenario": row.scenario,
        "card": row.card, "accelerators": row.accelerators, "fit": int(row.is_fit),
        "rate_per_s": row.rate_per_s, "steady_per_s": ours.steady_per_s,
        "highest_per_s": ours.highest_per_s, "error_pct": one.error_pct,
        "share_of_limits": one.used, "limited_by": ours.limited_by,
    }  # fmt: skip
    for name in FIGURES:
        line |= {name: getattr(row, name), f"predicted_{name}": ours.at_submitted.get(name)}
    return line


def folder_of(given: Path | None, environment: Mapping[str, str]) -> Path:
    """Returns the folder with the table. Raises InputError if none is named or it has no table."""
    words = environment.get(VARIABLE)
    folder = given or (Path(words) if words else None)
    where = "--data" if given else VARIABLE
    if folder is None:
        raise InputError(f"--data: is missing, and {VARIABLE} is not set; the folder with {FILE} is needed")
    if not (folder / FILE).is_file():
        raise InputError(f"{where} {folder}: has no {FILE}; the folder that holds it is needed")
    return folder


def main(
    data: Annotated[Path | None, typer.Option(help=f"the folder with the table; else {VARIABLE}")] = None,
    half_: Annotated[str, typer.Option("--half", help="rows: fit, rest or all")] = "all",
    card: Annotated[str, typer.Option(help="of these cards only, such as 'H200 SXM'")] = "",
    model: Annotated[str, typer.Option(help="of this model only, such as llama-3.1-405b")] = "",
    loaded: Annotated[
        bool, typer.Option("--loaded", help="products as slow as after seconds of nothing else")
    ] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="rates of steps that are all alike, in seconds; no run")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="a CSV file for the rows")] = None,
    seed: Annotated[int, typer.Option(help="by which the rows to look at are drawn")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes; as many as cores, if left out")] = None,
) -> None:
    """Prints how predictions compare with published runs, row by row."""
    check_out(out)
    if half_ not in HALVES:
        raise InputError(f"--half: {unknown_name('half', half_, HALVES)}")
    if card and card not in facts()["cards"]:
        raise InputError(f"--card: {unknown_name('card', card, list(facts()['cards']))}")
    models = sorted({name for name, _ in MODELS.values()})
    if model and model not in models:
        raise InputError(f"--model: {unknown_name('model', model, models)}")
    rows, others = read_rows(folder_of(data, os.environ) / FILE, seed)
    chosen = [
        row for row in half(rows, half_) if card in ("", row.card) and model in ("", MODELS[row.model][0])
    ]
    if not chosen:
        raise InputError(f"--half {half_}: has no row of {model or 'any model'} on {card or 'any card'}")
    typer.echo(f"{len(chosen)} of {len(rows)} usable rows; {others} others are not used")
    found = predict_all(chosen, jobs or os.cpu_count() or 1, _progress, loaded=loaded, search=not estimate)
    every = [Compared(row, ours) for row, ours in zip(chosen, found, strict=True)]
    for line in lines(every):
        typer.echo(line)
    if out is not None:
        write_csv([_line(one) for one in every], out)
    sys.exit(0 if all(error < bar for error, bar in judged(every)) else 1)


def judged(found: Sequence[Compared]) -> Iterator[tuple[float, float]]:
    """Yields median errors with their bars, in percent: of rates, of rows that may not be looked at if there
    are such; of median TPOT of rows to which nothing is fitted."""
    others = [one for one in found if one.row.model not in UNSEEN]
    if mine := [one for one in others if not one.row.is_fit] or others:
        yield median(size_of(one.error_pct) for one in mine), BAR
    if unseen := [one for one in found if one.row.model in UNSEEN and one.is_simulated]:
        yield median(size_of(one.latency_pct("tpot_p50_s")) for one in unseen), TPOT_BAR


def _progress(what: str, done: int, of: int) -> None:
    typer.echo(f"\r{what} {done} of {of}", nl=done == of, err=True)


if __name__ == "__main__":
    run(main)
