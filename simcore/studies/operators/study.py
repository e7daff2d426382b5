"""From the cases of an operator study to its figures.

slowdown over the fastest = latency / least latency of any method at the same setting and tokens
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from simcore.input.files import InputError
from simcore.machine import laws
from simcore.machine.machine import LawError
from simcore.ops.op import Graph
from simcore.schedules.one_launch import one_launch
from simcore.studies.common import NOT_RANKED, OperatorAxes, Outcome, Progress, Row
from simcore.studies.operators.answer import answer, standings, warnings
from simcore.studies.operators.crossovers import crossovers, never_ranked, not_ranked, ranked
from simcore.studies.operators.data_set import data_set_rows
from simcore.studies.operators.published import LATENCY, OUT_OF_MEMORY
from simcore.studies.operators.runner import Bench, Result
from simcore.studies.processes import SHORT_S, in_processes


def run(bench: Bench, progress: Progress) -> Outcome:
    """Runs an operator study. Raises InputError if no case fits into the device's memory."""
    cases = list(bench.cases())
    results = in_processes(
        lambda i: bench.run(cases[i]),
        len(cases),
        bench.device.jobs,
        lambda done: progress(bench.device.doing, done, len(cases)),
        SHORT_S,
    )
    bench.results.update(zip(cases, results, strict=True))
    fitting = [case for case in cases if bench.run(case).latency_s is not None]
    if not fitting:
        raise InputError(
            f"nothing fits into the {bench.device.memory_bytes / 1e9:.0f} GB of {bench.device.name}"
        )
    shown = _shown(bench, fitting)
    trace = bench.trace(shown)
    if not bench.device.measured and not laws.repeatable(lambda: bench.trace(shown), trace):
        raise LawError(f"repeatability: {shown.label} gives other bytes when it is run again")
    out = not_ranked(bench, cases)
    least: dict[tuple[Any, ...], float] = {}
    for case, latency_s in ranked(bench, cases):
        least[_place(case)] = min(latency_s, least.get(_place(case), latency_s))
    rows = [row for case in cases for row in _rows(bench, case, least, ranked=case not in out)]
    rows += data_set_rows(bench)
    progress("crossovers", 0, 1)
    # Measured runs give no latencies between their lengths.
    rows += [] if bench.device.measured else crossovers(bench, cases)
    progress("crossovers", 1, 1)
    return Outcome(
        rows=rows,
        answer=answer(bench, cases),
        warnings=warnings(bench, cases),
        sources=_sources(bench, fitting),
        trace=trace,
        standings=standings(bench, cases),
        unranked=never_ranked(bench, cases),
    )


def _shown(bench: Bench, fitting: Sequence[OperatorAxes]) -> OperatorAxes:
    """Returns the case whose trace is kept: the fastest at the most tokens and the largest batch."""
    tokens = max(case.length or 0 for case in fitting)
    batch = max(case.batch for case in fitting if case.length == tokens)
    here = [case for case in fitting if (case.length, case.batch) == (tokens, batch)]
    return min(here, key=lambda case: bench.run(case).latency_s or 0.0)


def _place(case: OperatorAxes) -> tuple[Any, ...]:
    """Returns the place of a case, which compared cases share."""
    return case.batch, case.length, case.decay


def _rows(
    bench: Bench, case: OperatorAxes, least: dict[tuple[Any, ...], float], *, ranked: bool
) -> Iterator[Row]:
    result = bench.run(case)
    yield _latency(bench, case, result)
    if not ranked:
        yield Row(case, NOT_RANKED, 1.0, "", source="by the datasheet alone; others were measured here")
    yield Row(case, "memory_bytes", result.memory_bytes, "B", source="inputs, output and temporaries")
    yield Row(case, OUT_OF_MEMORY, float(result.latency_s is None), "")
    yield Row(case, "flops", result.op.work.flops, "")
    yield Row(
        case, "hbm_bytes", result.op.work.hbm_bytes, "B", source="of each launch, read and written once"
    )
    yield Row(case, "launches", float(len(result.op.parts) or 1), "")
    if any(name == "splits" for name, _ in result.op.shape):
        given = getattr(bench.scenario, "splits", "auto")
        source = "the cheapest" if given == "auto" else "given"
        yield Row(case, "splits", float(result.op["splits"]), "", source=source)
    if result.latency_s is not None and (fastest_s := least.get(_place(case))) is not None:
        yield Row(case, "slowdown_over_fastest", result.latency_s / fastest_s, "x")


def _latency(bench: Bench, case: OperatorAxes, result: Result) -> Row:
    if result.price is None:
        have = f"{bench.device.memory_bytes / 1e9:.0f} GB"
        return Row(case, LATENCY, None, "s", source=f"takes {result.memory_bytes / 1e9:.1f} of {have}")
    source = f"{result.price.source}: {result.price.detail}"
    return Row(case, LATENCY, result.latency_s, "s", result.low_s, result.high_s, source)


def _sources(bench: Bench, fitting: Sequence[OperatorAxes]) -> dict[str, float]:
    """Returns the shares by source of price, in the mean of the cases: times of methods differ too much to be
    added up."""
    found: dict[str, float] = {}
    for case in fitting:
        for (source, _), share in bench.sources(case).items():
            found[source] = found.get(source, 0.0) + share / len(fitting)
    return dict(sorted(found.items()))


def tape(bench: Bench, record: Callable[..., Any]) -> list[str]:
    """Returns the launches of each method in its first case, as the machine `record` prints them."""
    lines: list[str] = []
    seen: set[str] = set()
    for case in bench.cases():
        if case.strategy in seen:
            continue
        seen.add(case.strategy)
        op = bench.op(case)
        found = record(lambda m, op=op: one_launch(m, Graph(op.name, op.parts or (op,)), [], launches=1))
        lines += [f"# {case.label}, {case.length:,} tokens", *found.lines]
    return lines
