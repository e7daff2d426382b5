"""From the cases of a decode scenario to its figures.

speed-up = latency of the baseline / latency, at the same context and batch
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

from simcore.input.files import InputError, enumerated
from simcore.machine import laws, metrics
from simcore.machine.machine import LawError
from simcore.machine.trace import Trace
from simcore.ops.op import Pricer
from simcore.studies.common import Axes, Outcome, Progress, Row
from simcore.studies.decode.answer import answer, fit_warnings, source_warnings, sources, standings
from simcore.studies.decode.cases import cases, does_not_fit, rival_of
from simcore.studies.decode.crossover import crossovers
from simcore.studies.decode.runner import Bench, Case, Result, mesh_of
from simcore.studies.decode.speculation import high_probability_bound, linear_bound, worst_case_bound
from simcore.studies.decode.states import passes, passing_answer, passing_rows, rival_warnings, state_rows
from simcore.studies.decode.timeline import shown_case, timeline

# Relative rounding error of two sums of the same steps.
ROUNDING = 1e-12


def run(bench: Bench, progress: Progress) -> Outcome:
    """Runs a decode scenario. Raises InputError if no case of it fits into memory."""
    wanted = cases(bench)
    reasons = {case: does_not_fit(bench, case) for case in wanted}
    fitting = [case for case in wanted if reasons[case] is None]
    warnings = fit_warnings(reasons)
    if not fitting:
        raise InputError(f"nothing fits; {warnings[0]}")
    bench.run_all(fitting, partial(progress, bench.hardware.doing))
    shown = shown_case(fitting)
    trace = _checked_trace(bench, shown)
    if fitting[0] != shown:
        _checked_trace(bench, fitting[0])
    baseline = {(c.context, c.axes.batch): c for c in fitting if _is_baseline(bench, c)}
    rows: list[Row] = []
    for done, case in enumerate(fitting, 1):
        rows += _rows(bench, case, baseline)
        progress("working out", done, len(fitting))
    crossings = [] if bench.hardware.measured else crossovers(bench, fitting, progress)
    passed = [] if bench.hardware.measured else passes(bench, fitting)
    return Outcome(
        rows=rows + [crossover.row for crossover in crossings] + passing_rows(passed),
        answer=answer(bench, fitting, baseline, crossings) + passing_answer(passed),
        warnings=warnings + rival_warnings(bench, fitting) + source_warnings(bench, fitting),
        baseline=next((case.axes.label for case in baseline.values()), ""),
        hits=list(dict.fromkeys(f"{c.axes.label}: {c.hits.text}" for c in fitting if c.hits)),
        sources=sources(bench, fitting),
        tables={"steps.parquet": _steps(bench, fitting)},
        timeline=timeline(bench, shown) if shown.axes.strategy == "alspec" else [],
        trace=trace,
        standings=standings(bench, fitting),
    )


def _checked_trace(bench: Bench, case: Case) -> Trace:
    """Returns the trace of a case on all its ranks. Raises LawError if a second run gives other bytes, or the
    ranks of a tensor-parallel group are not in lockstep."""
    trace = bench.trace(case)
    if bench.hardware.measured:
        return trace
    with bench.blamed(case):
        if not laws.repeatable(lambda: bench.trace(case), trace):
            raise LawError(f"repeatability: {case.axes.label} gives other bytes when it is run again")
        if not bench.keeps_step(case, trace):
            raise LawError(f"lockstep: the ranks of {case.axes.label} do not all do the same")
    return trace


def _is_baseline(bench: Bench, case: Case) -> bool:
    wanted = bench.scenario.baseline
    return wanted is not None and (case.axes.strategy, case.axes.ranks) == (wanted.kind, wanted.ranks)


def _rows(bench: Bench, case: Case, baseline: Mapping[tuple[int, int], Case]) -> Iterator[Row]:
    axes, result = case.axes, bench.run(case)
    latency_s, layers = result.latency_s, bench.config.layers
    shares = sorted(result.price_shares.items())
    about = ", ".join(f"{name} {share:.0%}" for name, share in shares if share > 0) + f"; {result.interval}"
    yield Row(axes, "token_latency_s", latency_s, "s", result.low_s, result.high_s, about)
    fastest = 1.0 / result.low_s if result.low_s > 0 else None
    yield Row(axes, "tokens_per_s_per_user", 1.0 / latency_s, "1/s", 1.0 / result.high_s, fastest, about)
    if result.standard_error_s is not None:
        yield Row(axes, "standard_error_s", result.standard_error_s, "s", source="of the mean over replicas")
    for kind, seconds in sorted(result.by_kind.items()):
        # Where an op ends and the next begins may differ in the last bit, on some Pythons only.
        if seconds > ROUNDING * latency_s:
            yield Row(axes, "critical_path_s", seconds, "s", op_kind=kind)
    share = result.attention_s / latency_s
    yield Row(axes, "attention_share", share, "")
    yield Row(axes, "non_attention_share", 1.0 - share, "")
    yield Row(axes, "attention_s_per_layer", result.attention_s / layers, "s")
    rest_s = latency_s - result.attention_s - result.outside_s
    yield Row(axes, "non_attention_s_per_layer", rest_s / layers, "s")
    yield _communication(axes, result)
    for source, part in shares:
        yield Row(axes, "price_share", part, "", op_kind=source)
    if axes.strategy == "tensor_parallel":
        # It is no lower bound for speculation: a hit skips reading KV.
        least_s = metrics.read_once_s(
            bench.model(case).read_bytes(case.context), bench.hardware.hbm_bytes_per_s
        )
        yield Row(axes, "read_once_s", least_s, "s", source="weights and KV cache over the datasheet's rate")
    reference = baseline.get((case.context, axes.batch))
    if reference is not None:
        yield Row(axes, "speedup_over_baseline", bench.run(reference).latency_s / latency_s, "x")
    yield from _speculation_rows(bench, case)
    yield from state_rows(bench, case)


def _communication(axes: Axes, result: Result) -> Row:
    inside = sorted(result.by_kind.keys() & metrics.WHOLE_KINDS)
    if inside and axes.ranks > 1:
        why = f"inside {', '.join(inside)}, which the profile has as a whole"
        return Row(axes, "exposed_communication_s", None, "s", source=why)
    seconds = metrics.exposed_communication_s(result.by_kind)
    holds = {"all_gather_matmul": "the projection", "all_reduce_normed": "the residual and the norm"}
    inside = [f"{what} that {kind} holds" for kind, what in holds.items() if kind in result.by_kind]
    source = f"with {enumerated(inside)}" if inside else ""
    return Row(axes, "exposed_communication_s", seconds, "s", source=source)


def _speculation_rows(bench: Bench, case: Case) -> Iterator[Row]:
    axes, result = case.axes, bench.run(case)
    if case.hits is None:
        return
    rival = rival_of(bench, case)
    if rival is not None:
        speedup = bench.run(rival).latency_s / result.latency_s
        yield Row(axes, "speedup_over_tensor_parallel", speedup, "x", source=f"against {rival.axes.label}")
    # A run that meets before the LM head has its host wait for each token: on a card its own time.
    if axes.strategy == "alspec" and case.overlap and not bench.hardware.measured:
        serial = bench.run(replace(case, overlap=False))
        gain_s = serial.latency_s - _exchange_s(bench, case) - result.latency_s
        # The rounding error of two sums of the same steps is no gain.
        gain_s = gain_s if abs(gain_s) > ROUNDING * result.latency_s else 0.0
        yield Row(axes, "overlap_gain_s", gain_s, "s", source="less the exchange at which both groups meet")
    if result.free:
        priced = bench.run(replace(case, free=False))
        why = f"{', '.join(sorted(result.free))} by link and roofline; the profile takes them as free"
        low_s, high_s = priced.low_s, priced.high_s
        yield Row(axes, "latency_if_priced_s", priced.latency_s, "s", low_s, high_s, why)
    extra_s = _verification_s(bench, case)
    # Each kernel is priced by its own measurements, and at long contexts the speculative one may be faster:
    # its extra work takes time then too, but less than the difference between the kernels.
    faster = extra_s < 0.0
    how = "per layer; the speculative kernel is priced below the plain one" if faster else "per layer"
    yield Row(axes, "verification_s", None if faster else extra_s, "s", source=how)
    row = case.hits.published
    if row is not None:
        source = f"ALSpec tables, {row.task} at threshold {row.threshold:g}"
        yield Row(axes, "threshold", row.threshold, "", source=source)
        yield Row(axes, "hits_score", row.score, "", source=source)
        yield Row(axes, "baseline_score", row.baseline_score, "", source=source)
        for name, bound, text in _bounds(bench, row.threshold):
            value = bound if isfinite(bound) else None
            beyond = "" if isfinite(bound) else "; beyond any number"
            yield Row(axes, name, value, "x", source=f"{source}; {text}{beyond}")


def _bounds(bench: Bench, threshold: float) -> Iterator[tuple[str, float, str]]:
    """Yields bounds of an accepted speculation's error, relative to a hidden state of unit norm."""
    layers, given = bench.config.layers, bench.scenario.error_bounds
    worst = worst_case_bound([threshold] * layers, given.alpha, given.beta, given.f_r)
    text = f"App. A.1 with alpha {given.alpha:g}, beta {given.beta:g}, f(R) {given.f_r:g}, delta = threshold"
    if given.alpha == 0.0 and given.beta * given.f_r == 0.0:
        text += ": layers that amplify nothing, so that errors merely add up; no real model is as mild"
    yield "error_bound_worst_case", worst, text
    linear = linear_bound(layers, given.alpha, given.beta, given.f_r, threshold)
    yield "error_bound_linear", linear, "App. A.2: A.1 to first order in alpha and f(R) beta"
    likely = high_probability_bound(threshold, layers, given.c, given.failure_probability)
    text = f"App. A.3 with c {given.c:g}, but for a probability of {given.failure_probability:g}"
    yield "error_bound_high_probability", likely, text


def _verification_s(bench: Bench, case: Case) -> float:
    """Returns the seconds of a layer's speculative attention beyond a plain one (ALSpec section 3.4)."""
    model, price = bench.model(case), _price(bench, case)
    sizes = {"context": case.context}
    speculative = sum(price(op.at(sizes)).seconds for op in model.speculate.ops)
    return speculative - sum(price(op.at(sizes)).seconds for op in model.attend.ops)


def _exchange_s(bench: Bench, case: Case) -> float:
    price = _price(bench, case)
    return sum(price(op).seconds for op in bench.model(case).exchange(case.axes.groups).ops)


def _price(bench: Bench, case: Case) -> Pricer:
    return bench.hardware.price(case.axes.ranks, case.link_latency_s, case.free)


def _steps(bench: Bench, fitting: Sequence[Case]) -> dict[str, list[Any]]:
    """Returns the begin and end of each token of each case, as columns."""
    steps = [(case.axes, token) for case in fitting for token in bench.run(case).tokens]
    place = ("label", "context_tokens", "batch", "hit_rate")
    return {
        **{name: [getattr(axes, name) for axes, _ in steps] for name in place},
        "token": [token.index for _, token in steps],
        "start_s": [token.start_s for _, token in steps],
        "end_s": [token.end_s for _, token in steps],
    }


def tape(bench: Bench, record: Callable[..., Any]) -> list[str]:
    """Returns the launches of each strategy at the first context and batch, as the machine `record` prints
    them."""
    lines: list[str] = []
    seen: set[str] = set()
    for case in cases(bench):
        if case.axes.label in seen:
            continue
        seen.add(case.axes.label)
        with bench.blamed(case):
            found = record(bench.program(case), mesh=mesh_of(case.axes), outcomes={"hit": case.draws[0][1]})
        lines += [f"# {case.axes.label}, {case.context:,} tokens", *found.lines]
    return lines
