"""A plan's answer in words: what holds, how sure that is, and what would change it."""

from collections.abc import Callable, Sequence

from simcore.planning.limits import Limit, metric_text, number_text, value_text
from simcore.planning.questions import (
    DEVICES,
    RATES,
    Answered,
    PlanResult,
    Tried,
    beyond,
    joules_per_token,
    objectives,
    offered_tokens_per_s,
    share_on,
    tokens_per_s_held,
)
from simcore.planning.searches import Judged
from simcore.planning.whatif import Asked
from simcore.studies.common import ServingAxes

# A rate that differs by less from the one that is sure is not told.
WORTH_SAYING = 1.005
# Loads that an answer says in full; the table has all.
MOST_LISTED = 4
# Ends what is said of a point that is unsure.
MORE = "; more replicas would tell"
# Shares from which on the KV cache is full, and devices busy all the time.
FULL_KV, FULL_TIME = 0.98, 0.95
# Share of the requests from which on many waited for KV memory.
MANY_WAITED = 0.01


def answer(asked: Asked, result: PlanResult) -> str:
    """Returns the answer."""
    says = {"devices": _devices, "cost": _cost, "rate": _rate, "strategy": _rate, "grid": _grid}
    return says[asked.question](asked, result)


def _by_load(asked: Asked, result: PlanResult, says: Callable[[Tried, str], str]) -> str:
    """Returns a sentence for each load, that of a winner by `says`, and what is beyond it. Of several loads
    the first has the limits, and what all have in common stands at the end."""
    sentences: list[str] = []
    slow = [result.at_slow_prices.get(i) for i in range(len(result.groups))]
    alike = len(slow) > 1 and all(one is not None and one.holds for one in slow) and not result.at_fast_holds
    for i, (group, winner) in enumerate(zip(result.groups, result.winners, strict=True)):
        load = _load(group[0].alternative.point.case.axes)
        if winner is None:
            sentences.append(
                f"Nothing that was tried keeps {_limits(asked.limits)} at {load}.{_closest(asked, group)}"
            )
            continue
        reached = _reached(asked.limits, winner.judged, brief=bool(sentences))
        beyond_it = _beyond(asked, group, winner, brief=len(result.groups) > 1)
        prices = "" if alike else _prices(asked, result, i)
        sentences.append(f"{says(winner, load)} with {reached}{_sure(asked, winner)}.{beyond_it}{prices}")
    end = " With all op times at the slow end of their 90 % intervals these hold too." if alike else ""
    return _joined(sentences) + end


def _devices(asked: Asked, result: PlanResult) -> str:
    return _by_load(asked, result, lambda winner, load: f"{_needed(asked, winner)} {load}")


def _needed(asked: Asked, winner: Tried) -> str:
    if asked.whatif.over not in (None, DEVICES):
        return f"{asked.whatif.over} {winner.value:g} carries"
    return f"{devices(winner)} {_carry(winner)}"


def _carry(one: Tried) -> str:
    return "carries" if one.point.case.axes.devices == 1 else "carry"


def _cost(asked: Asked, result: PlanResult) -> str:
    def says(winner: Tried, load: str) -> str:
        return f"Cheapest for {load}: {devices(winner)}, {', '.join(_costs(winner))},"

    return _by_load(asked, result, says)


def _rate(asked: Asked, result: PlanResult) -> str:
    sentences = []
    for i, (group, winner) in enumerate(zip(result.groups, result.winners, strict=True)):
        axes = group[0].alternative.point.case.axes
        of = (
            f"With {axes.prompt_tokens:,.0f} and {axes.output_tokens:,.0f} tokens: "
            if len(result.groups) > 1
            else ""
        )
        sentences.append(of + _of_rate(asked, result, i, group, winner))
    return _joined(sentences) + _compared(result)


def _of_rate(
    asked: Asked, result: PlanResult, i: int, group: Sequence[Answered], winner: Tried | None
) -> str:
    if winner is None:
        return f"Nothing that was tried keeps {_limits(asked.limits)} at any rate.{_closest(asked, group)}"
    worse = beyond(group, winner)
    says = (
        f"{devices(winner)} {_carry(winner)} up to {_load(winner.point.case.axes)} with"
        f" {_reached(asked.limits, winner.judged)}{_sure(asked, winner)}."
    )
    if worse is not None:
        reason = limiting(worse.judged, winner.judged)
        says += f" {_load(worse.point.case.axes)} {_fails(worse.judged, reason)}."
    if winner.value is not None and winner.value >= RATES[1]:
        says += " The search ends there."
    likely = next((one.likely for one in group if one.best is winner), None)
    if likely is not None and winner.value is not None and likely > winner.value * WORTH_SAYING:
        says += f" The means alone cross a limit at {_at_rate(winner, likely)}."
    others = sorted(
        (one.best for one in group if one.best is not None and one.best is not winner),
        key=lambda one: -(one.value or 0.0),
    )
    if others:
        kinds = {one.point.device for one in (winner, *others)}
        named = devices if len(kinds) > 1 else _way
        names = [f"{named(one)}: {_load(one.point.case.axes)}" for one in others[:MOST_LISTED]]
        says += f" Others: {'; '.join(names)}."
    return says + _prices(asked, result, i)


def _at_rate(winner: Tried, value: float) -> str:
    """Returns the rate at another value of what a search for a rate changes."""
    axes = winner.point.case.axes
    assert winner.value is not None
    rate = value if axes.rate_per_s is None else axes.rate_per_s * value / winner.value
    return f"{number_text(rate)} {axes.arriving}/s"


def _compared(result: PlanResult) -> str:
    """Returns how the winner compares in pairs; what its interval leaves open is said to be open."""
    if not result.pairs:
        return ""
    kinds = {one.point.device for pair in result.pairs for one in (pair.a, pair.b)}
    named, best = devices if len(kinds) > 1 else _way, result.pairs[0].a
    pairs = []
    for pair in result.pairs[:MOST_LISTED]:
        ends = f"{pair.low * 100:+.3g} to {pair.high * 100:+.3g} %"
        open_ = ", so that neither is better for sure" if pair.low <= 0.0 <= pair.high else ""
        pairs.append(f"{named(pair.b)} {pair.more * 100:+.3g} % ({ends}{open_})")
    than = f"beside {named(best)} at {_load(best.point.case.axes)}"
    return f" Mean E2E {than}, in pairs with the same requests: {'; '.join(pairs)}."


def _grid(asked: Asked, result: PlanResult) -> str:
    holding, several = [one for one in result.tried if one.judged.holds], len(result.tried) > 1
    best = [one for one in result.winners if one is not None]
    if not best:
        (group,) = result.groups
        sure = " for sure" if any(one.judged.verdict == "unsure" for one in result.tried) else ""
        keeps = f"None of {len(result.tried):,} points keeps" if several else "The one point does not keep"
        none = f"{keeps} {_limits(asked.limits)}{sure}"
        return f"{none}.{_closest(asked, group)}"
    count = f"{len(holding):,} of {len(result.tried):,} points" if several else "The one point"
    keeps = "keep" if several else "keeps"
    held = f" {keeps} {_limits(asked.limits)}" if asked.limits else " can run"
    first = best[0]
    if len(best) == 1:
        by = "" if asked.limits else _best_by(asked, holding, first)
        of = f"best{by} is {devices(first)} at {_load(first.point.case.axes)}"
        wanted = _of_objectives(asked, first)
        reached = [] if wanted and not asked.limits else [_reached(asked.limits, first.judged)]
        return f"{count}{held}; {of}, with {' and '.join([*reached, *wanted])}{_sure(asked, first)}."
    names = "; ".join(f"{devices(one)} at {_load(one.point.case.axes)}" for one in best[:MOST_LISTED])
    more = f" and {len(best) - MOST_LISTED} more" if len(best) > MOST_LISTED else ""
    return f"{count}{held}; {len(best)} of them are on the Pareto front: {names}{more}."


def _best_by(asked: Asked, holding: Sequence[Tried], first: Tried) -> str:
    """Returns what the objective is, if there is one, and how many points are as good in it: where nothing is
    limited, often all."""
    if len(objectives(asked)) > 1:
        return ""
    ((name, value),) = objectives(asked)
    alike = sum(value(one) == value(first) for one in holding)
    ties = f", the first of {alike:,} that are alike," if alike > 1 else ""
    return f" by {name.replace('_', ' ')}{ties}"


def _of_objectives(asked: Asked, one: Tried) -> list[str]:
    """Returns a point's cost and its energy, each if it is an objective."""
    wanted = {name for name, _ in objectives(asked)}
    joules = joules_per_token(one) if "lowest_energy" in wanted else None
    energy = [] if joules is None else [f"at most {joules:.3g} J per output token"]
    costs = _costs(one) if "lowest_cost" in wanted else []
    return [*([f"a cost of {', '.join(costs)}"] if costs else []), *energy]


def _costs(one: Tried) -> list[str]:
    """Returns what a point costs, where that is known: "12 an hour", "0.5 per million output tokens"."""
    per_million = cost_per_million(one)
    each = [] if per_million is None else [f"{per_million:.3g} per million output tokens"]
    return [] if one.cost_per_hour is None else [f"{one.cost_per_hour:.6g} an hour", *each]


# -- parts of sentences -------------------------------------------------------------------------------------


def devices(one: Tried) -> str:
    """Returns the devices of a point in words: "12 h200-sxm (3 servers of 4, continuous batching)"."""
    axes = one.point.case.axes
    if one.point.bench.fleet:
        return f"{one.point.device} ({_way(one)})"
    servers, ranks = one.point.case.servers, one.point.case.ranks
    shape = f"{servers} server{'s' if servers > 1 else ''} of {ranks}, " if ranks > 1 else ""
    return f"{axes.devices:,} {one.point.device} ({shape}{_way(one)})"


def _way(one: Tried) -> str:
    label, model = one.point.case.axes.label, one.alternative.settings.get("model")
    ranks = one.point.case.axes.ranks or 1
    way = label.removesuffix(f", TP{ranks}") if ranks > 1 else label
    return f"{way}, {model}" if isinstance(model, str) else way


def _load(axes: ServingAxes) -> str:
    if axes.rate_per_s is None:
        return "the closed loop"
    return f"{number_text(axes.rate_per_s)} {axes.arriving}/s"


def _limits(limits: Sequence[Limit]) -> str:
    return " and ".join(limit.text() for limit in limits) or "the limits"


def _reached(limits: Sequence[Limit], judged: Judged, *, brief: bool = False) -> str:
    """Returns what a point reaches of each limited metric, beside its limit unless `brief`."""
    words = []
    for limit in limits:
        mean = judged.mean(limit.metric)
        if mean is not None:
            allowed = "" if brief else f" (limit {value_text(limit.metric, limit.value)})"
            words.append(f"{metric_text(limit.metric)} {value_text(limit.metric, mean)}{allowed}")
    return " and ".join(words) or "no limit"


def _sure(asked: Asked, one: Tried) -> str:
    if len(one.judged.runs) == 1:
        return ", the same in every run" if one.judged.point.same_in_every_run else ", by one run"
    return f", {asked.whatif.certainty * 100:.4g} % sure after {len(one.judged.runs)} replicas"


def _beyond(asked: Asked, group: Sequence[Answered], winner: Tried, *, brief: bool) -> str:
    worse = beyond(group, winner)
    if worse is None:
        return ""
    says = _fails(worse.judged)
    return f" {_number(asked, worse)} {says.partition(':')[0] if brief else says}."


def _number(asked: Asked, one: Tried) -> str:
    """Returns the value that a question searches, in words: devices, a rate, or another field's number."""
    if asked.searches_rate:
        return _load(one.point.case.axes)
    return f"{one.point.case.axes.devices if asked.whatif.over in (None, DEVICES) else one.value:,.0f}"


def _fails(judged: Judged, reason: str = "") -> str:
    if judged.holds:
        return "holds"
    if judged.short:
        more = "" if judged.point.scenario.workload.traces else " (more workload.requests would say more)"
        return f"is not known to hold: {judged.why}{more}"
    if judged.verdict == "fails":
        return f"would not do: {judged.why}{reason}"
    return f"is not sure to hold: {judged.why}{reason}{MORE if len(judged.runs) > 1 else ''}"


def _closest(asked: Asked, group: Sequence[Answered]) -> str:
    """Returns why the point that came next to holding does not hold; one that may hold goes before."""
    worse = [one.next_worse for one in group if one.next_worse is not None]
    unsure = [one for one in worse if one.judged.verdict == "unsure"]
    if unsure:
        near = min(unsure, key=lambda one: one.judged.used(asked.limits))
        return f" {devices(near)} {_fails(near.judged)}."
    return f" {devices(worse[0])} {_fails(worse[0].judged)}." if worse else ""


def limiting(worse: Judged, best: Judged) -> str:
    """Returns what runs out at a point, by its own figures, and does not where another one holds."""

    def is_full(judged: Judged) -> bool:
        share = judged.mean("max_kv_share")
        short = judged.mean("preemptions") and share is not None and share > FULL_KV
        waited, served = judged.mean("waited_for_kv"), judged.mean("completed")
        return bool(short) or bool(waited and served and waited > MANY_WAITED * served)

    def is_busy(judged: Judged) -> bool:
        busy = judged.mean("utilisation")
        return busy is not None and busy > FULL_TIME

    if is_full(worse) and not is_full(best):
        return "; the KV cache is full"
    return "; the devices are busy all the time" if is_busy(worse) and not is_busy(best) else ""


def _prices(asked: Asked, result: PlanResult, i: int) -> str:
    slow, fast, winner = result.at_slow_prices.get(i), result.at_fast_prices.get(i), result.winners[i]
    says = ""
    if slow is not None:
        held = "it holds too" if slow.holds else f"that {_fails(slow)}"
        says = f" With all op times at the slow end of their 90 % intervals {held}."
    worse = beyond(result.groups[i], winner)
    if fast is not None and fast.holds and worse is not None:
        says += f" With all at the fast end {_number(asked, worse)} would hold."
    return says


def cost_per_million(one: Tried) -> float | None:
    """Returns the cost of a million output tokens at the rate that comes, or None; with autoscaling of those
    of whole runs."""
    if one.point.case.scaling is None:
        rate, share = offered_tokens_per_s(one) or one.judged.mean("output_throughput_tokens_per_s"), 1.0
    else:
        rate, share = tokens_per_s_held(one.judged), share_on(one.judged)
    cost = one.cost_per_hour
    return None if cost is None or not rate else cost / share / (rate * 3600.0) * 1e6


def _joined(sentences: Sequence[str]) -> str:
    more = (
        f" ({len(sentences) - MOST_LISTED} more loads in the table)" if len(sentences) > MOST_LISTED else ""
    )
    return " ".join(sentences[:MOST_LISTED]) + more
