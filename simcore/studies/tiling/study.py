"""From the cases of a tiling scenario to its figures.

speedup_over_lazy        = total of lazy / total, at the same layers, channels, batch and length
mixer_speedup_over_lazy  = mixer's device seconds of lazy / mixer's device seconds
interval of a figure     = the same run with all prices at the fast, and at the slow, end of their own;
                           of a measured figure the least and the largest of its runs, whose run of median
                           total is reported
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from simcore.input.files import InputError
from simcore.machine.laws import digest
from simcore.machine.machine import LawError
from simcore.machine.trace import Trace
from simcore.ops.convolution import MIXER_KINDS
from simcore.ops.op import Op
from simcore.sim.runs import LONG_S
from simcore.studies.common import Outcome, Progress, Row, middle_first, shares_of
from simcore.studies.processes import SHORT_S, in_processes
from simcore.studies.tiling import tables
from simcore.studies.tiling.answer import answer, notes, standings, warnings
from simcore.studies.tiling.cases import Case, cases, memory_of, refusal
from simcore.studies.tiling.figures import CaseResult, Figures, counts, sums, times
from simcore.studies.tiling.launches import seconds_by_kind
from simcore.studies.tiling.runner import Bench, Result
from simcore.studies.tiling.strategies import Fractal

# Most tokens of the run that is repeated as a check, and of runs that are checked launch by launch.
REPEATED, LAUNCH_BY_LAUNCH = 4096, 256
# Cases up to the first length run at both ends of the prices' intervals. For longer cases the ends are sums
# of prices if the device is never idle, since the sum is then the time; else they run, up to the second
# length.
SHORT, MOST_AT_ENDS = 1 << 14, 1 << 17
NEVER_IDLE = 1e-9
BASELINES = {"speedup_over_lazy": "lazy", "speedup_over_lazy_by_layers": "lazy, layer by layer"}
MEASURED, ONE_RUN = "median of {} runs, the least and the largest", "one run"
PREDICTED = "all prices at the fast and at the slow end of their 90 % intervals"
AS_PRICED = "prices as they are"
EXACT = "formulas of the launched ops"


def run(bench: Bench, progress: Progress) -> Outcome:
    """Runs a tiling scenario. Raises InputError if no case of it fits into memory."""
    wanted = list(cases(bench.scenario))
    refused: list[str] = []
    runnable: list[Case] = []
    for case in wanted:
        reason = refusal(case, bench.model(case), bench.device.memory_bytes)
        if reason is not None:
            refused.append(reason)
        else:
            runnable.append(case)
    if not runnable:
        raise InputError(f"nothing can be run; {refused[0]}")
    results, growing = _all_results(bench, runnable, partial(progress, bench.device.doing))
    _check_repeatable(bench, results[0].case)
    for case in {one.case.axes.label: one.case for one in results}.values():
        _check_at_once(bench, case)
    areas, trace = _areas(bench, results)
    shares = shares_of(part for one in results for part in one.sources.items())
    return Outcome(
        rows=[row for one in results for row in _rows(one, results)],
        answer=answer(results),
        warnings=[*refused, *warnings(bench, shares, results)],
        notes=notes(bench, results),
        baseline="lazy" if any(one.case.axes.label == "lazy" for one in results) else "",
        sources=shares,
        tables=_tables(bench, results, areas, growing),
        trace=trace,
        standings=standings(results),
    )


def _all_results(
    bench: Bench, runnable: Sequence[Case], progress: Callable[[int, int], None]
) -> tuple[list[CaseResult], list[dict[str, Any]]]:
    """Returns the results of all cases, computed on several cores, and their growth with the length."""
    # Growth is shown at the first point of a label; longer cases come later.
    longest = max(bench.scenario.tokens)
    grown = {
        case.axes.label: i for i, case in reversed([*enumerate(runnable)]) if case.axes.tokens == longest
    }

    def work(i: int) -> tuple[CaseResult, list[dict[str, Any]]]:
        case = runnable[i]
        results, first = _case_result(bench, case)
        return results, [*tables.growth(bench, case, first)] if grown.get(case.axes.label) == i else []

    count, jobs = len(runnable), bench.device.jobs
    if jobs > 1:
        # Many cases share an order of launches: each is recorded once, before other processes start.
        for case in runnable:
            if bench.full:
                break
            bench.order(case, bench.model(case))
    gave = in_processes(work, count, jobs, lambda done: progress(done, count), SHORT_S)
    results = [replace(one, case=case) for case, (one, _) in zip(runnable, gave, strict=True)]
    return results, [record for _, records in gave for record in records]


def _runs(bench: Bench, case: Case) -> list[Result]:
    """Returns the runs of a case: of one that takes LONG_S or longer no second one."""
    found = [bench.run(case)]
    while bench.device.measured and len(found) < bench.device.repeats and found[0].ended_s[-1] < LONG_S:
        found.append(bench.run(case))
    return found


def _case_result(bench: Bench, case: Case) -> tuple[CaseResult, Result]:
    model, bursts = bench.launches(case)
    measured = bench.device.measured
    results = middle_first(_runs(bench, case), lambda run: float(run.ended_s[-1]))
    first = results[0]
    runs, by_kind = [times(result) for result in results], [result.by_kind for result in results]
    for timed, kinds in [] if measured else _at_price_ends(bench, case, first):
        runs.append(timed)
        by_kind.append(kinds)
    case_result = CaseResult(
        case,
        bench.tiles(case),
        counts(model, bursts),
        runs,
        by_kind,
        memory_of(case, model).total,
        first.sources,
        tables.steps(case, first),
        measured,
        bench.stays(case),
    )
    return case_result, first


def _at_price_ends(bench: Bench, case: Case, result: Result) -> list[tuple[Figures, Mapping[str, float]]]:
    """Returns figures of time, and seconds by kind of op, with all prices at the low and at the high end."""
    asked, length = bench.scenario.price_interval, case.axes.tokens
    idle_s = result.ended_s[-1] - sum(result.by_kind.values())
    summed = asked is None and length > SHORT and idle_s <= NEVER_IDLE * result.ended_s[-1]
    if asked is False or (asked is None and not summed and length > MOST_AT_ENDS):
        return []
    found: list[tuple[Figures, Mapping[str, float]]] = []
    for end in ("low", "high"):
        if summed:
            kinds = seconds_by_kind(bench.launches(case)[1], bench.price(case, end)[1])
            found.append((sums(kinds, sum(kinds.values()), case.generated), kinds))
        else:
            again = bench.run(case, end)
            found.append((times(again), again.by_kind))
    return found


def _check_repeatable(bench: Bench, case: Case) -> None:
    """Raises LawError if a second run gives other bytes."""
    if bench.device.measured:
        return
    few = _cut(case, REPEATED)
    if digest(bench.run(few).trace) != digest(bench.run(few).trace):
        with bench.blamed(case):
            raise LawError(f"repeatability: {case.axes.label} gives other bytes when it is run again")


def _check_at_once(bench: Bench, case: Case) -> None:
    """Raises LawError if the machine, launch by launch, gives other times."""
    if not bench.device.measured:
        bench.check_at_once(_cut(case, LAUNCH_BY_LAUNCH))


def _cut(case: Case, most: int) -> Case:
    """Returns the case with at most `most` generated tokens, and at most half as many of a prompt."""
    prompt = min(case.axes.prompt_tokens, most // 2)
    tokens = min(case.axes.tokens, most + prompt)
    return replace(case, axes=replace(case.axes, tokens=tokens, prompt_tokens=prompt))


# -- rows --------------------------------------------------------------------------------------------


def _rows(one: CaseResult, results: Sequence[CaseResult]) -> Iterator[Row]:
    axes = one.case.axes
    source = _source(one)
    for name, (_, unit) in one.runs[0].items():
        yield _row(one, name, one.values(name), unit, source)
    for metric, baseline in BASELINES.items():
        other = next(
            (b for b in results if b.case.axes.label == baseline and b.case.point == one.case.point), None
        )
        if other is None:
            continue
        yield _ratio(other, one, "total_s", metric, f"against {baseline}; {source}")
        # A single step in one launch has no mixer of its own.
        if metric == "speedup_over_lazy" and all(one.values("mixer_s")) and all(other.values("mixer_s")):
            yield _ratio(other, one, "mixer_s", "mixer_speedup_over_lazy", f"against {baseline}; {source}")
    for name, (value, unit) in one.counts.items():
        yield Row(axes, name, value, unit, value, value, EXACT)
    yield Row(axes, "memory_bytes", one.memory_bytes, "B", one.memory_bytes, one.memory_bytes, "formula")
    for kind in one.by_kind[0]:
        part = "mixer" if kind in MIXER_KINDS else "block"
        values = [run.get(kind, 0.0) for run in one.by_kind]
        yield replace(_row(one, "seconds", values, "s", f"{part}; {source}"), op_kind=kind)


def _source(one: CaseResult) -> str:
    if one.measured:
        return ONE_RUN if len(one.runs) == 1 else MEASURED.format(len(one.runs))
    return PREDICTED if len(one.runs) > 1 else AS_PRICED


def _row(one: CaseResult, name: str, values: Sequence[float], unit: str, source: str) -> Row:
    if len(values) == 1:
        # Without values at the ends there is no interval.
        return Row(one.case.axes, name, values[0], unit, source=source.replace(PREDICTED, AS_PRICED))
    return Row(one.case.axes, name, values[0], unit, min(values), max(values), source)


def _ratio(of: CaseResult, to: CaseResult, name: str, metric: str, source: str) -> Row:
    """Returns the ratio of two cases. Predicted ones are paired at the same end of all prices. Measured runs
    are not paired: the interval is from the least over the largest to the largest over the least."""
    ours, theirs = of.values(name), to.values(name)
    if to.measured and len(ours) == len(theirs) == 1:
        ratios = [ours[0] / theirs[0]]
    elif to.measured:
        ratios = [ours[0] / theirs[0], min(ours) / max(theirs), max(ours) / min(theirs)]
    else:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return _row(to, metric, ratios, "x", source)


# -- tables ------------------------------------------------------------------------------------------


def _areas(bench: Bench, results: Sequence[CaseResult]) -> tuple[list[dict[str, Any]], Trace]:
    """Returns the cells that the launches of each strategy cover in a short run, and the trace of the first
    tiled strategy."""
    areas: list[dict[str, Any]] = []
    traces: dict[str, Trace] = {}
    for one in results:
        label = one.case.axes.label
        if label not in traces:
            short = tables.drawn(one.case)
            traces[label] = bench.trace(short, bench.model(short), [], rows=False)
            areas += tables.covered(short, traces[label])
    tiled = next((one.case.axes.label for one in results if isinstance(one.case.strategy, Fractal)), None)
    return areas, traces[tiled or results[0].case.axes.label]


def _tables(
    bench: Bench,
    results: Sequence[CaseResult],
    areas: Sequence[dict[str, Any]],
    growing: Sequence[dict[str, Any]],
) -> dict[str, Mapping[str, Any]]:
    tiled = {one.case.point: one.case for one in results if isinstance(one.case.strategy, Fractal)}
    prices = [record for case in tiled.values() for record in tables.tiles(bench, case)]
    return {
        "steps.parquet": tables.stacked([one.steps for one in results]),
        "cells.parquet": tables.columns(areas),
        "growth.parquet": tables.columns(growing),
        **({"tiles.parquet": tables.columns(prices)} if prices else {}),
    }


# -- before a run -----------------------------------------------------------------------------------


def launched(bench: Bench) -> Iterator[Op]:
    """Yields the ops that the cases of a scenario launch on a real machine, regardless of their place,
    without running them; ops may come several times."""
    fits = [
        case
        for case in cases(bench.scenario)
        if not refusal(case, bench.model(case), bench.device.memory_bytes)
    ]
    short = {case.axes.label: tables.drawn(case) for case in reversed(fits)}
    for case in (*fits, *short.values()):
        for burst in bench.launches(case)[1]:
            yield from burst.bound()


# -- the tape ----------------------------------------------------------------------------------------

# Positions that are printed, at least as many as two launches compute.
PRINTED = 8


def tape(bench: Bench, record: Any) -> list[str]:
    """Returns the launches of each strategy for its first few positions, as the machine `record` prints
    them."""
    lines: list[str] = []
    seen: set[str] = set()
    for case in cases(bench.scenario):
        if case.axes.label in seen:
            continue
        seen.add(case.axes.label)
        positions = max(PRINTED, 2 * case.tokens_per_launch)
        prompt = min(case.axes.prompt_tokens, PRINTED // 2)
        short = replace(case, axes=replace(case.axes, tokens=positions, prompt_tokens=prompt))
        model = bench.model(short)
        with bench.blamed(case):
            found = record(lambda m, short=short, model=model: short.strategy.program(m, model, []))
        lines += [f"# {case.axes.label}, {positions} positions, {case.axes.layers} layers", *found.lines]
    return lines
