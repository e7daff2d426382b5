"""The answer and the warnings of a decode study, in words."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from simcore.studies.common import MOST_EXTRAPOLATED, Standing, shares_of, unmeasured
from simcore.studies.decode.crossover import Crossover
from simcore.studies.decode.runner import Bench, Case

# The first and last tokens that ALSpec's Tables 1 and 2 speculate on (section 5.1).
PUBLISHED_CHUNK = 128


def answer(
    bench: Bench,
    fitting: Sequence[Case],
    baseline: Mapping[tuple[int, int], Case],
    crossovers: Sequence[Crossover],
) -> str:
    """Returns one sentence: the winner at the longest context and the largest batch there, its lead, and
    where the lead ends."""
    context = max(case.context for case in fitting)
    batch = max(case.axes.batch for case in fitting if case.context == context)
    here = [c for c in fitting if (c.context, c.axes.batch) == (context, batch)]
    best = min(here, key=lambda case: bench.run(case).latency_s)
    several = f" and batch {batch:,}" if batch > 1 or len(bench.scenario.batch) > 1 else ""
    alone = len({case.axes.label for case in here}) == 1
    priced = _if_priced(bench, best, fitting)
    flipped = priced is not None and context in priced[1]
    verdict = "is fastest, if what its profile takes as free is so:" if flipped else "is fastest:"
    text = (
        f"At {context:,} tokens of context{several}, {_named(best)} on {bench.hardware.name}"
        f" {'takes' if alone else verdict} {bench.run(best).latency_s * 1e3:.2f} ms a token"
        f"{' for one layer' if bench.scenario.part == 'layer' else ''}"
    )
    text += _against(bench, best, here, baseline.get((context, batch)))
    text += _where_it_ends(bench, fitting, best, crossovers)
    if priced is not None:
        text += f"; {priced[0] * 1e3:.2f} ms with nothing free"
        text += f", and behind tensor parallelism at {_tokens(priced[1])}" if priced[1] else ""
    return f"{text}."


def standings(bench: Bench, fitting: Sequence[Case]) -> list[Standing]:
    """Returns the fastest case at each context and batch."""
    best: dict[tuple[int, int], Case] = {}
    for case in fitting:
        place = case.context, case.axes.batch
        if place not in best or bench.run(case).latency_s < bench.run(best[place]).latency_s:
            best[place] = case
    return [_standing(bench, best[place]) for place in sorted(best)]


def _standing(bench: Bench, case: Case) -> Standing:
    latency_s, batch = bench.run(case).latency_s, case.axes.batch
    return Standing(
        at=f"At {case.context:,} tokens of context and batch {batch:,}",
        load=(case.context, batch),
        label=_named(case),
        figure=f"takes {latency_s * 1e3:.3g} ms a token",
        rank=(latency_s,),
        seconds=latency_s,
        where={"context_tokens": case.context, "batch": batch},
    )


def _named(case: Case) -> str:
    rate = "" if case.axes.hit_rate is None else f" with {case.axes.hit_rate:.1%} hits"
    return f"{case.axes.label}{rate}"


def _against(bench: Bench, best: Case, here: Sequence[Case], reference: Case | None) -> str:
    others = [case for case in here if case.axes.label != best.axes.label]
    if reference is None or reference == best:
        reference = min(others, key=lambda case: bench.run(case).latency_s, default=None)
    if reference is None:
        return ""
    ratio = bench.run(reference).latency_s / bench.run(best).latency_s
    close = ratio < 1.005
    return f", {'hardly faster than' if close else f'{ratio:.2f}x the speed of'} {_named(reference)}"


def _if_priced(bench: Bench, best: Case, fitting: Sequence[Case]) -> tuple[float, list[int]] | None:
    """Returns the latency of a speculative winner with its free ops priced, and the contexts at which tensor
    parallelism, with its free ops priced too, is faster. None if nothing of speculation is free."""
    if best.hits is None or not bench.run(best).free_speculation:
        return None

    def latency_s(case: Case) -> float:
        return bench.run(replace(case, free=False)).latency_s

    same = [
        case
        for case in fitting
        if (case.axes.label, case.hits, case.axes.batch) == (best.axes.label, best.hits, best.axes.batch)
    ]
    lost = []
    for case in same:
        place = (case.context, case.axes.batch)
        rivals = [c for c in fitting if c.hits is None and (c.context, c.axes.batch) == place]
        if rivals and min(map(latency_s, rivals)) < latency_s(case):
            lost.append(case.context)
    return latency_s(best), lost


def _tokens(contexts: Sequence[int]) -> str:
    return ", ".join(f"{context:,}" for context in sorted(contexts)) + " tokens"


def _where_it_ends(bench: Bench, fitting: Sequence[Case], best: Case, crossovers: Sequence[Crossover]) -> str:
    """Returns the contexts at which another strategy is faster, and the crossings found, in words."""
    label, ends = best.axes.label, []
    winners: dict[int, str] = {}
    for context in sorted({case.context for case in fitting if case.axes.batch == best.axes.batch}):
        same = [c for c in fitting if (c.context, c.axes.batch) == (context, best.axes.batch)]
        winners[context] = min(same, key=lambda case: bench.run(case).latency_s).axes.label
    lost = [context for context, winner in winners.items() if winner != label]
    if lost:
        ends.append(f"at {max(lost):,} tokens {winners[max(lost)]} is faster")
    elif len(winners) > 1 and len({case.axes.label for case in fitting}) > 1:
        ends.append(f"it leads from {min(winners):,} tokens on")
    ends += _break_even(best, crossovers)
    return "".join(f"; {end}" for end in ends)


def sources(bench: Bench, fitting: Sequence[Case]) -> dict[str, float]:
    """Returns the share of the predicted time of all cases by source of its price."""
    results = map(bench.run, fitting)
    parts = ((name, share * r.latency_s) for r in results for name, share in r.price_shares.items())
    return dict(sorted(shares_of(parts).items()))


def _break_even(best: Case, crossovers: Sequence[Crossover]) -> list[str]:
    """Returns the hit rate below which tensor parallelism is faster, if there is exactly one, in words; and
    the same with nothing free."""
    axes = replace(best.axes, hit_rate=None)
    rates = {
        crossover.row.metric: crossover.row.value
        for crossover in crossovers
        if crossover.row.axes == axes and crossover.where is not None and crossover.where.turns_once_to_ahead
    }
    plain, priced = rates.get("crossover_hit_rate"), rates.get("crossover_hit_rate_if_priced")
    if plain is None:
        return []
    bracket = "" if priced is None else f" ({priced:.0%} with nothing free)"
    return [f"below {plain:.0%} hits{bracket} tensor parallelism on as many devices is faster"]


def fit_warnings(reasons: Mapping[Case, str | None]) -> list[str]:
    """Returns warnings of cases that do not fit into memory, each strategy from its smallest such context
    on."""
    first: dict[tuple[str, int], Case] = {}
    for case in sorted(reasons, key=lambda case: case.context):
        if reasons[case]:
            first.setdefault((case.axes.label, case.axes.batch), case)
    together: dict[tuple[int, int, str | None], list[str]] = {}
    for (label, batch), case in first.items():
        together.setdefault((case.context, batch, reasons[case]), []).append(label)
    return [
        f"does not fit into memory from {context:,} tokens on{'' if batch == 1 else f' at batch {batch:,}'}"
        f" ({reason}): {'; '.join(labels)}"
        for (context, batch, reason), labels in together.items()
    ]


def source_warnings(bench: Bench, fitting: Sequence[Case]) -> list[str]:
    """Returns warnings about prices: extrapolated, unmeasured, assumed free; and about speculations: with
    published hit rates of another chunk, and over a whole context."""
    found = []
    far = [(bench.run(case).price_shares.get("extrapolated", 0.0), case) for case in fitting]
    worst, case = max(far, key=lambda pair: pair[0])
    if worst > MOST_EXTRAPOLATED:
        count = sum(share > MOST_EXTRAPOLATED for share, _ in far)
        found.append(
            f"{count} of {len(far)} runs take more than {MOST_EXTRAPOLATED:.0%} of their device time from"
            f" extrapolated prices; most: {worst:.0%} ({case.axes.label}, {case.context:,} tokens)"
        )
    found += unmeasured(sources(bench, fitting), bench.hardware.name)
    free = sorted(frozenset().union(*(bench.run(case).free_speculation for case in fitting)))
    if free:
        names = ", ".join(free)
        found.append(f"the profile takes as free: {names} (latency_if_priced_s has them priced)")
    speculate = [case for case in fitting if case.hits is not None]
    if whole := [case for case in speculate if 2 * case.chunk >= case.context]:
        chunk, context = whole[0].chunk, whole[0].context
        found.append(
            f"{len(whole)} of {len(speculate)} speculating runs attend early over all of their context, as"
            f" {chunk:,} tokens at each end of {context:,}: that is never wrong, whatever their hits say"
        )
    chunks = {case.chunk for case in speculate if case.hits is not None and case.hits.published}
    if chunks - {PUBLISHED_CHUNK}:
        found.append(
            f"the published hit rates hold for chunks of {PUBLISHED_CHUNK} tokens, not"
            f" {', '.join(map(str, sorted(chunks - {PUBLISHED_CHUNK})))}"
        )
    return found
