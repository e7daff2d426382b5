"""Predicts services that ran on a card before, by today's prices and schedules, beside their times.

    python -m simcore.validate.accuracy.served_loads [FILE] [--profile local]

FILE has a row for each latency of each load (validate/measured/h200_serving_loads.csv, the default): `set`,
what `run scenarios/h200/serving.yaml --on cuda --set ...` was given, rate and metric, and what was measured;
`cap_times`, how many times lower the card's power cap was than that of the profile's card, as `validate`
measures it, empty where it was not. `--add RUN` appends those of a run's folder first, with `--cap-times`.

    error = by how much the larger of predicted and measured exceeds the smaller (- if that is predicted)

Latencies are of all requests of a run. Exit 1 where the median of all latencies is 5 % or more, one of them
12 % or more, or a duration, by which requests per second differ, 3 % or more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from simcore.assembly import Parts, Place, assemble
from simcore.input.files import InputError, plain
from simcore.input.shipped import found as shipped
from simcore.scenario import load_scenario
from simcore.studies.common import ServingAxes, of_whole_runs
from simcore.validate import cells
from simcore.validate.accuracy.recorded_loads import CAP, DATE, add
from simcore.validate.cells import FIRST_LINE, positive
from simcore.validate.program import markdown, run

MEASURED = Path(__file__).resolve().parents[1] / "measured" / "h200_serving_loads.csv"
SCENARIO, DURATION, BETWEEN = "h200/serving", "duration_s", "; "
NEEDED = ("set", "rate_per_s", "metric", "measured")
MEDIAN_PCT, WORST_PCT, DURATION_PCT = 5.0, 12.0, 3.0
BROKEN = 1
# How many times lower a card's power cap may be than that of the profile's card.
CAPS = 0.5, 2.0
# What a run was given, how many times lower its card's cap was, and its date.
OfRun = tuple[str, float | None, str]


@dataclass(frozen=True, slots=True)
class Latency:
    """One measured latency, or the duration, of a load, in seconds. `set`: KEY=VALUE with "; " between;
    `cap_times`: how many times lower the card's power cap was, None if not measured; `date_utc`: of its
    run."""

    set: str
    rate_per_s: float
    metric: str
    measured_s: float
    cap_times: float | None = None
    date_utc: str = ""

    @property
    def of_run(self) -> OfRun:
        """What its run was given, on which card, and when."""
        return self.set, self.cap_times, self.date_utc


@dataclass(frozen=True, slots=True)
class Judged:
    """A latency and its prediction, in seconds."""

    latency: Latency
    predicted_s: float

    @property
    def pct(self) -> float:
        """By how much the larger exceeds the smaller, negative where the prediction is the smaller."""
        ratio = self.predicted_s / self.latency.measured_s
        return 100.0 * (ratio - 1.0 if ratio >= 1.0 else 1.0 - 1.0 / ratio)


def read_latencies(path: Path) -> list[Latency]:
    """Returns the rows of a file. Raises InputError."""
    found = []
    for where, line in cells.lines(path, NEEDED):
        rate, seconds = (positive(where, line, name) for name in ("rate_per_s", "measured"))
        cap_times = _cap(f"{where}: {CAP}", positive(where, line, CAP)) if line.get(CAP) else None
        found.append(Latency(line["set"], rate, line["metric"], seconds, cap_times, line.get(DATE) or ""))
    if not found:
        raise InputError(f"{path}: has no row")
    lines_of: dict[tuple[OfRun, float, str], int] = {}
    for number, row in enumerate(found, FIRST_LINE):
        first = lines_of.setdefault((row.of_run, row.rate_per_s, row.metric), number)
        if first != number:
            raise InputError(f"{path}: line {number}: is the load and metric of line {first} again")
    with_latency = {(row.of_run, row.rate_per_s) for row in found if row.metric != DURATION}
    for number, row in enumerate(found, FIRST_LINE):
        if (row.of_run, row.rate_per_s) not in with_latency:
            raise InputError(f"{path}: line {number}: no latency is given at {row.rate_per_s:g} requests/s")
    # All of a run together, load after load.
    runs = {given: i for i, given in enumerate(dict.fromkeys(row.of_run for row in found))}
    return sorted(found, key=lambda row: (runs[row.of_run], row.rate_per_s))


def _cap(where: str, times: float) -> float:
    if not CAPS[0] <= times <= CAPS[1]:
        raise InputError(f"{where}: is {times:g}; {CAPS[0]:g} to {CAPS[1]:g} is allowed")
    return times


def _assembled(settings: Sequence[str], cap_times: float = 1.0) -> Parts:
    file = shipped(Path(SCENARIO))
    return assemble(load_scenario(file, settings), str(file), Place(cap_times=cap_times))


def predicted(rows: Sequence[Latency], profile: str) -> Iterator[Judged]:
    """Yields the rows with their predictions: all loads of one `set` in one run. Raises InputError if a
    setting is no scenario's, or a load or a metric is not in its results."""
    for (given, cap_times, _), own in groupby(rows, key=lambda row: row.of_run):
        try:
            parts = _assembled([*given.split(BETWEEN), f"profile={profile}"], cap_times or 1.0)
            results = of_whole_runs(parts.study.run(lambda *_: None).rows)
        except InputError as error:
            raise InputError(f"set: {plain(given)}: {error}") from None
        values = {
            (f"{row.axes.rate_per_s:.6g}", row.metric): row.value
            for row in results
            if isinstance(row.axes, ServingAxes) and row.axes.rate_per_s is not None
        }
        for row in own:
            rate = f"{row.rate_per_s:.6g}"
            found = values.get((rate, row.metric))
            if found is None or not found > 0.0:
                what = f"{row.metric} at {rate} requests/s"
                raise InputError(f"metric, rate_per_s: {what} is not in the results of its set")
            yield Judged(row, found)


def lines(found: Sequence[Judged]) -> Iterator[str]:
    """Yields the printed tables: one for each run, with a row for each load."""
    for run_of, of_run in groupby(found, key=lambda one: one.latency.of_run):
        table = [("requests/s", "latencies", "median", "worst", "which", "duration")]
        for rate, each in groupby(of_run, key=lambda one: one.latency.rate_per_s):
            own = list(each)
            latencies = [one for one in own if one.latency.metric != DURATION]
            worst = max(latencies, key=lambda one: abs(one.pct))
            duration = next((f"{one.pct:+.1f} %" for one in own if one.latency.metric == DURATION), "-")
            table.append((
                f"{rate:.4g}", str(len(latencies)), f"{median(abs(one.pct) for one in latencies):.1f} %",
                f"{worst.pct:+.1f} %", worst.latency.metric.removesuffix("_s"), duration,
            ))  # fmt: skip
        yield _named(run_of)
        yield ""
        yield from markdown(table)
        yield ""


def _named(run_of: OfRun) -> str:
    """Returns what a run was given, and in words when and on which card it was, as far as that is known."""
    given, cap_times, date_utc = run_of
    cap = "" if cap_times is None else f"its card's power cap {cap_times:.3f} times lower"
    words = ", ".join(filter(None, (date_utc[:16], cap)))
    return f"{given} ({words})" if words else given


def figures(found: Sequence[Judged]) -> dict[str, float]:
    """Returns the median and the largest error of latencies, and the largest of durations, in percent."""
    errors = [abs(one.pct) for one in found if one.latency.metric != DURATION]
    durations = [abs(one.pct) for one in found if one.latency.metric == DURATION]
    return {"median": median(errors), "worst": max(errors), "duration": max(durations, default=0.0)}


def over(found: Sequence[Judged]) -> Iterator[str]:
    """Yields the loads with a figure over its bar, and the worst one of each."""
    for (run_of, rate), each in groupby(found, key=lambda one: (one.latency.of_run, one.latency.rate_per_s)):
        bad = [one for one in each if abs(one.pct) >= _bar_pct(one.latency)]
        if bad:
            worst = max(bad, key=lambda one: abs(one.pct))
            metric = worst.latency.metric.removesuffix("_s")
            yield f"{rate:.4g} requests/s, {metric} {worst.pct:+.1f} %: {_named(run_of)}"


def _bar_pct(latency: Latency) -> float:
    return DURATION_PCT if latency.metric == DURATION else WORST_PCT


def _predicted_all(file: Path, profile: str) -> list[Judged]:
    return list(predicted(read_latencies(file), profile))


def _with_added(folders: list[Path], file: Path, cap_times: float | None, profile: str) -> list[Judged]:
    """Adds runs to a file and predicts all of it; what cannot be predicted is not added."""
    before = file.read_bytes() if file.exists() else None
    try:
        add(folders, file, cap_times)
        return _predicted_all(file, profile)
    except BaseException:
        if before is not None:
            file.write_bytes(before)
        else:
            file.unlink(missing_ok=True)
        raise


def main(
    file: Annotated[Path, typer.Argument(help="the measured latencies")] = MEASURED,
    profile: Annotated[str, typer.Option(help="prices")] = "local",
    added: Annotated[
        list[Path] | None, typer.Option("--add", help="folder of a run on a card, appended to FILE first")
    ] = None,
    cap_times: Annotated[
        float | None,
        typer.Option(help="of --add: how many times lower its card's power cap was"),
    ] = None,
) -> None:
    """Predicts measured services anew; exit 1 where a bar is missed."""
    if cap_times is not None and not added:
        raise InputError("--cap-times: is of --add only")
    if cap_times is not None:
        _cap("--cap-times", cap_times)
    found = _with_added(added, file, cap_times, profile) if added else _predicted_all(file, profile)
    for line in lines(found):
        typer.echo(line)
    off = figures(found)
    typer.echo(
        f"{len(found)} figures: latencies median {off['median']:.1f} %, worst {off['worst']:.1f} %; durations"
        f" at most {off['duration']:.1f} %"
    )
    if off["median"] >= MEDIAN_PCT or off["worst"] >= WORST_PCT or off["duration"] >= DURATION_PCT:
        bars = f"a median of {MEDIAN_PCT:g} %, a worst of {WORST_PCT:g} %, durations of {DURATION_PCT:g} %"
        typer.echo(f"missed: all have to be under {bars}")
        for line in over(found):
            typer.echo(f"over a bar: {line}")
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(main)
