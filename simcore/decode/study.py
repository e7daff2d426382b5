"""From the cases of a decode scenario to its figures and its answer.

speed-up = latency of the baseline / latency, at the same context and batch
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from simcore import metrics
from simcore.decode.bench import Bench, Case, HitRow, mesh_of, no_hits
from simcore.decode.cases import cases, does_not_fit, rival_of
from simcore.decode.crossover import crossovers
from simcore.decode.timeline import shown_case, timeline
from simcore.files import InputError
from simcore.laws import LawError
from simcore.speculation import high_probability_bound, worst_case_bound
from simcore.study import Outcome, Row

Progress = Callable[[int, int], None]


def run(bench: Bench, tables: Sequence[HitRow], progress: Progress) -> Outcome:
    """Runs a decode scenario. Raises InputError where nothing of it can be run."""
    wanted = cases(bench, tables)
    reasons = {case: does_not_fit(bench, case) for case in wanted}
    fitting = [case for case in wanted if reasons[case] is None]
    warnings = _fit_warnings(reasons)
    if not fitting:
        raise InputError(f"{bench.scenario.name}: nothing fits; {warnings[0]}")
    for done, case in enumerate(fitting):
        progress(done, len(fitting))
        bench.run(case)
    progress(len(fitting), len(fitting))
    if not bench.repeatable(fitting[0]):
        raise LawError(f"repeatability: {fitting[0].axes.label} gives other bytes when it is run again")
    baseline = {(c.context, c.axes.batch): c for c in fitting if _is_baseline(bench, c)}
    rows = [row for case in fitting for row in _rows(bench, case, baseline)]
    crossings = crossovers(bench, fitting)
    shown = shown_case(fitting)
    return Outcome(
        rows=rows + crossings,
        answer=_answer(bench, fitting, baseline, crossings),
        warnings=warnings + _source_warnings(bench, fitting),
        baseline=next((case.axes.label for case in baseline.values()), ""),
        hits=list(dict.fromkeys(f"{c.axes.label}: {c.hits.text}" for c in fitting if c.hits)),
        sources=_sources(bench, fitting),
        steps=[step for case in fitting for step in _steps(bench, case)],
        timeline=timeline(bench, shown) if shown.axes.strategy == "alspec" else [],
        trace=bench.trace(shown),
    )


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
    for kind, seconds in sorted(result.by_kind.items()):
        yield Row(axes, "critical_path_s", seconds, "s", op_kind=kind)
    share = result.attention_s / latency_s
    yield Row(axes, "attention_share", share, "")
    yield Row(axes, "non_attention_share", 1.0 - share, "")
    yield Row(axes, "attention_s_per_layer", result.attention_s / layers, "s")
    rest_s = latency_s - result.attention_s - result.outside_s
    yield Row(axes, "non_attention_s_per_layer", rest_s / layers, "s")
    yield Row(axes, "exposed_communication_s", metrics.exposed_communication_s(result.by_kind), "s")
    for source, part in shares:
        yield Row(axes, "price_share", part, "", op_kind=source)
    reference = baseline.get((case.context, axes.batch))
    if reference is not None:
        yield Row(axes, "speedup_over_baseline", bench.run(reference).latency_s / latency_s, "x")
    yield from _speculation_rows(bench, case)


def _speculation_rows(bench: Bench, case: Case) -> Iterator[Row]:
    axes, result = case.axes, bench.run(case)
    if case.hits is None:
        return
    rival = rival_of(bench, case)
    if rival is not None:
        speedup = bench.run(rival).latency_s / result.latency_s
        yield Row(axes, "speedup_over_tensor_parallel", speedup, "x", source=f"against {rival.axes.label}")
    if axes.strategy == "alspec" and case.overlap:
        serial = bench.run(replace(case, overlap=False))
        yield Row(axes, "overlap_gain_s", serial.latency_s - result.latency_s, "s")
    yield Row(axes, "verification_s", _verification_s(bench, case), "s", source="per layer")
    row = case.hits.published
    if row is not None:
        source = f"ALSpec tables, {row.task} at threshold {row.threshold:g}"
        yield Row(axes, "threshold", row.threshold, "", source=source)
        yield Row(axes, "hits_score", row.score, "", source=source)
        yield Row(axes, "baseline_score", row.baseline_score, "", source=source)
        for name, bound, text in _bounds(bench, row.threshold):
            yield Row(axes, name, bound, "x", source=f"{source}; {text}")


def _bounds(bench: Bench, threshold: float) -> Iterator[tuple[str, float, str]]:
    """What an accepted speculation may do to the output, relative to a hidden state of unit norm."""
    layers, given = bench.config.layers, bench.scenario.error_bounds
    worst = worst_case_bound([threshold] * layers, given.alpha, given.beta, given.f_r)
    text = f"App. A.1 with alpha {given.alpha:g}, beta {given.beta:g}, f(R) {given.f_r:g}, delta = threshold"
    yield "error_bound_worst_case", worst, text
    likely = high_probability_bound(threshold, layers, given.c, given.failure_probability)
    text = f"App. A.3 with c {given.c:g}, but for a probability of {given.failure_probability:g}"
    yield "error_bound_high_probability", likely, text


def _verification_s(bench: Bench, case: Case) -> float:
    """What a layer's speculative attention costs beyond a plain one (ALSpec section 3.4)."""
    model, price = bench.model(case), bench.hardware.price(case.axes.ranks, case.link_latency_s)
    sizes = {"context": case.context}
    speculative = sum(price(op.at(sizes)).seconds for op in model.speculate.ops)
    return speculative - sum(price(op.at(sizes)).seconds for op in model.attend.ops)


def _steps(bench: Bench, case: Case) -> Iterator[dict[str, Any]]:
    axes = case.axes
    for token in bench.run(case).tokens:
        yield {
            "label": axes.label,
            "context_tokens": axes.context_tokens,
            "batch": axes.batch,
            "hit_rate": axes.hit_rate,
            "token": token.index,
            "start_s": token.start_s,
            "end_s": token.end_s,
        }


def _sources(bench: Bench, fitting: Sequence[Case]) -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for case in fitting:
        result = bench.run(case)
        for source, share in result.price_shares.items():
            total[source] += share * result.latency_s
    whole = sum(total.values())
    return {source: seconds / whole for source, seconds in sorted(total.items())} if whole else {}


def _fit_warnings(reasons: Mapping[Case, str | None]) -> list[str]:
    """One line for each context and batch at which something does not fit."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for case, reason in reasons.items():
        if reason:
            found.setdefault((case.context, case.axes.batch), {})[case.axes.label] = reason
    return [
        f"at {context:,} tokens{'' if batch == 1 else f' and batch {batch:,}'} these do not fit into memory: "
        + "; ".join(f"{label} ({reason})" for label, reason in labels.items())
        for (context, batch), labels in found.items()
    ]


def _source_warnings(bench: Bench, fitting: Sequence[Case], most: float = 0.05) -> list[str]:
    found = []
    far = [(bench.run(case).price_shares.get("extrapolated", 0.0), case) for case in fitting]
    worst, case = max(far, key=lambda pair: pair[0])
    if worst > most:
        count = sum(share > most for share, _ in far)
        found.append(
            f"{count} of {len(far)} runs take more than {most:.0%} of their device time from extrapolated"
            f" prices; most: {worst:.0%} ({case.axes.label}, {case.context:,} tokens)"
        )
    unmeasured = _sources(bench, fitting).get("roofline", 0.0)
    if unmeasured > 0.5:
        found.append(
            f"{unmeasured:.0%} of the device time is priced by datasheet and roofline, not by measurements of"
            f" {bench.hardware.name}"
        )
    return found


def _answer(
    bench: Bench, fitting: Sequence[Case], baseline: Mapping[tuple[int, int], Case], found: Sequence[Row]
) -> str:
    context = max(case.context for case in fitting)
    batch = max(case.axes.batch for case in fitting if case.context == context)
    here = [c for c in fitting if (c.context, c.axes.batch) == (context, batch)]
    best = min(here, key=lambda case: bench.run(case).latency_s)
    latency_s = bench.run(best).latency_s
    rate = "" if best.axes.hit_rate is None else f" with {best.axes.hit_rate:.1%} hits"
    text = (
        f"At {context:,} tokens of context{'' if batch == 1 else f' and batch {batch}'}, {best.axes.label}"
        f" of {bench.hardware.name}{rate} is fastest: {latency_s * 1e3:.2f} ms a token"
    )
    text += _against(bench, best, here, baseline.get((context, batch)))
    ends = _where_it_ends(bench, fitting, best, found)
    return f"{text}{ends}."


def _against(bench: Bench, best: Case, here: Sequence[Case], reference: Case | None) -> str:
    latency_s = bench.run(best).latency_s
    if reference is not None and reference != best:
        return f", {bench.run(reference).latency_s / latency_s:.2f}x the speed of {reference.axes.label}"
    others = [case for case in here if case.axes.label != best.axes.label]
    if not others:
        return ""
    second = min(others, key=lambda case: bench.run(case).latency_s)
    return f", {bench.run(second).latency_s / latency_s:.2f}x the speed of {second.axes.label}"


def _where_it_ends(bench: Bench, fitting: Sequence[Case], best: Case, found: Sequence[Row]) -> str:
    """At which contexts another one is faster, and where the search for crossings found an end."""
    label, ends = best.axes.label, []
    winners: dict[int, str] = {}
    for context in sorted({case.context for case in fitting if case.axes.batch == best.axes.batch}):
        same = [c for c in fitting if (c.context, c.axes.batch) == (context, best.axes.batch)]
        winners[context] = min(same, key=lambda case: bench.run(case).latency_s).axes.label
    lost = [context for context, winner in winners.items() if winner != label]
    if lost:
        ends.append(f"at {max(lost):,} tokens {winners[max(lost)]} is faster")
    elif len(winners) > 1:
        ends.append(f"it is the fastest from {min(winners):,} tokens on")
    for row in found:
        here = (row.axes.label, row.axes.batch, row.axes.context_tokens)
        if (
            row.metric == "crossover_hit_rate"
            and here == (label, best.axes.batch, best.context)
            and row.value
        ):
            ends.append(f"below {row.value:.0%} hits tensor parallelism on as many devices overtakes it")
    return "".join(f"; {end}" for end in ends)


def tape(bench: Bench, tables: Sequence[HitRow], record: Callable[..., Any]) -> list[str]:
    """What each strategy launches at the first context and batch, on the machine that prints."""
    lines: list[str] = []
    seen: set[str] = set()
    for case in cases(bench, tables):
        if case.axes.label in seen:
            continue
        seen.add(case.axes.label)
        pattern = case.hits.draws[0][1] if case.hits else no_hits
        found = record(bench.program(case), mesh=mesh_of(case.axes), outcomes={"hit": pattern})
        lines += [f"# {case.axes.label}, {case.context:,} tokens", *found.lines]
    return lines
