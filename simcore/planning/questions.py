"""The questions of a plan, each a search over its alternatives.

devices    per load: fewest devices at which an alternative holds; another one ends where it cannot do better
cost       the same, by cost per hour
rate       the highest rate at which each alternative holds
strategy   rate, and the alternatives compared in pairs at the scenario's load
grid       every point, judged
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from statistics import fmean
from typing import Any

from simcore.input.files import InputError, nearest, plain
from simcore.planning.alternatives import (
    Alternative,
    alternatives,
    at_load,
    fewest_servers,
    load_of,
    with_field,
    with_load,
    with_servers,
    with_times,
)
from simcore.planning.limits import LATENCY, number_text
from simcore.planning.points import Benches, Point
from simcore.planning.race import MANY, Raced, race, runs_of
from simcore.planning.runs import Ask, Runner
from simcore.planning.searches import (
    MOST_TIMES,
    Fewest,
    Highest,
    Judged,
    Search,
    drive,
    fewest,
    highest,
    is_given_up,
    judge,
    steady,
)
from simcore.planning.verdict import interval
from simcore.planning.whatif import Asked
from simcore.sim.graph_pricer import End
from simcore.studies.columns import split_tenant

# Most devices of a scenario, and values of another searched field.
MOST_DEVICES, MOST_VALUES = 1024, 65_536
# A search for a rate ends where what holds and what does not differ by no more than this, or by COARSEST
# where chance lets verdicts tell no more.
TOLERANCE = 0.01
RATES = (1e-6, 1e6)
DEVICES = "devices"
# Ways that are left out early and told one by one.
MOST_EARLY = 3
# The metric by which question strategy compares in pairs, and after how many looks.
PAIRED, PAIRED_LOOKS = "e2e_mean_s", 2


@dataclass(frozen=True, eq=False)
class Tried:
    """A judged point of an alternative. `value`: of the searched field; `cost_per_hour`: of all its devices
    while servers hold them, None where no price is given."""

    alternative: Alternative
    judged: Judged
    value: float | None
    cost_per_hour: float | None = None

    @property
    def point(self) -> Point:
        """Its point."""
        return self.judged.point


@dataclass(frozen=True, eq=False)
class Answered:
    """What holds of one alternative. `best`: the point that answers, None if none holds; `next_worse`: the
    point one step beyond, which does not hold for sure (beside the fewest devices of all: that of any way of
    running); `likely`: of a rate, where the means alone cross a limit."""

    alternative: Alternative
    best: Tried | None
    next_worse: Tried | None
    likely: float | None = None


@dataclass(frozen=True, eq=False)
class Pair:
    """Two alternatives at one load: by how much `b` has more of a metric than `a`, as a share of `a`'s, with
    its interval."""

    a: Tried
    b: Tried
    metric: str
    more: float
    low: float
    high: float


@dataclass
class PlanResult:
    """All that a plan found. `groups`: the answers by load; `winners`: the best of each group (of a grid: all
    of the Pareto front). By the number of the group: the verdicts on its winner with all op times at the slow
    end of their intervals, and on the point beyond with all at the fast end. `pairs`: of question strategy,
    the winner against each other alternative at the scenario's load; `left_out_early`: which ways were not
    searched in full, in words; `left_out`: what cannot be."""

    tried: list[Tried] = field(default_factory=list)
    groups: list[list[Answered]] = field(default_factory=list)
    winners: list[Tried | None] = field(default_factory=list)
    at_slow_prices: dict[int, Judged] = field(default_factory=dict)
    at_fast_prices: dict[int, Judged] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    left_out_early: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def at_fast_holds(self) -> bool:
        """Whether some point beyond an answer would hold at the fast end."""
        return any(one.holds for one in self.at_fast_prices.values())


def price_of(asked: Asked, point: Point) -> float | None:
    """Returns what the devices of a point cost an hour where all servers run, or None."""
    known = asked.whatif.cost_per_hour
    each = [(known.get(of.name, known.get(of.base)), of.number) for of in point.devices]
    costs = [cost * number for cost, number in each if cost is not None]
    return sum(costs) if len(costs) == len(each) else None


def keeps_up(one: Tried) -> bool:
    """Whether most runs of a point show that it answers as fast as requests come: its queue does not grow. Of
    a single run, which nothing judges, requests have to come for long enough, too."""
    runs = one.judged.runs
    return 2 * sum(run.growing or (run.short and len(runs) == 1) for run in runs) <= len(runs)


def offered_tokens_per_s(one: Tried) -> float | None:
    """Returns the output tokens that are asked for in a second, which come out in the long run; None where
    the load does not say it, or where fewer may come out."""
    axes = one.point.case.axes
    if not axes.rate_per_s or axes.arriving != "requests" or not keeps_up(one):
        return None
    return axes.rate_per_s * axes.output_tokens


def joules_per_token(one: Tried) -> float | None:
    """Returns an upper bound of what the devices of a point take for an output token, J: board power *
    devices * time for which servers hold them / tokens. Hosts and cooling are not in it. None where a
    device's power is unknown.

    Where a point holds, what is asked for comes out; else the tokens that were measured count, and those of
    whole runs with autoscaling.
    """
    power_w = _power_w(one.point)
    if one.point.case.scaling is not None:
        rate = tokens_per_s_held(one.judged)
    else:
        measured = one.judged.mean("output_throughput_tokens_per_s")
        rate = (offered_tokens_per_s(one) if one.judged.holds else None) or measured
    return None if power_w is None or not rate else power_w / rate


def tokens_per_s_held(judged: Judged) -> float | None:
    """Returns the output tokens of the runs of a point with autoscaling over the time for which its servers
    held their devices, times the number of servers: 1/s, as if all had been held for that time. None where no
    run came to its end."""
    case = judged.point.case
    held_s, done = sum(judged.values("server_s")), sum(judged.values("completed"))
    return done * case.axes.output_tokens * case.servers / held_s if held_s and done else None


def share_on(judged: Judged) -> float:
    """Returns the share of the time, mean over its servers, for which a point's servers hold their devices,
    starting up included: 1 without autoscaling, and where no run came to its end."""
    if judged.point.case.scaling is None:
        return 1.0
    mean = judged.mean("mean_servers")
    return 1.0 if mean is None else mean / judged.point.case.servers


def _power_w(point: Point) -> float | None:
    """Returns the most that all devices of a point take, W, or None."""
    each = [(of.hardware.board_power_w, of.number) for of in point.devices]
    powers = [power_w * number for power_w, number in each if power_w is not None]
    return sum(powers) if len(powers) == len(each) else None


def _tried(asked: Asked, alternative: Alternative, judged: Judged, value: float | None) -> Tried:
    price = price_of(asked, judged.point)
    return Tried(alternative, judged, value, None if price is None else price * share_on(judged))


def _in_order(asked: Asked, one: Alternative, judged: Mapping[Any, Judged]) -> dict[Any, Tried]:
    return {value: _tried(asked, one, verdict, value) for value, verdict in sorted(judged.items())}


def ask(asked: Asked, benches: Benches, runner: Runner) -> PlanResult:
    """Answers a plan's question. Raises InputError."""
    if asked.question in ("devices", "cost"):
        return _fewest(asked, benches, runner)
    if asked.searches_rate:
        return _highest(asked, benches, runner)
    return _grid(asked, benches, runner)


def _grouped(groups: Iterable[str]) -> list[list[int]]:
    """Returns the places of each group in a list of groups."""
    places: dict[str, list[int]] = {}
    for i, group in enumerate(groups):
        places.setdefault(group, []).append(i)
    return list(places.values())


def beyond(group: Sequence[Answered], winner: Tried | None) -> Tried | None:
    """Returns the point one step beyond the winner of a group."""
    return next((one.next_worse for one in group if one.best is winner), None)


# -- devices and cost ---------------------------------------------------------------------------------------


def _fewest(asked: Asked, benches: Benches, runner: Runner) -> PlanResult:
    over = asked.whatif.over or DEVICES
    on_devices = over == DEVICES
    if asked.question == "cost" and not on_devices:
        raise InputError(f"{asked.file}: over: question cost searches devices")
    known = alternatives(asked, benches, any_devices=on_devices)
    every = known.every
    groups = _grouped(one.group for one in every)
    if not on_devices and any(len(places) > 1 for places in groups):
        raise InputError(
            f"{asked.file}: over: {plain(over)}: is searched in one way of running, not in several"
        )
    if asked.question == "cost":
        if any(one.point.case.scaling is not None for one in every):
            says = "question cost searches servers that run all the time; question grid takes objective"
            raise InputError(f"{asked.file}: autoscaling: {says}: lowest_cost")
        _check_prices(asked, every)
    best: dict[Any, float] = {}

    def unit(one: Alternative) -> float:
        """What one more step of an alternative costs, in devices or in money."""
        if not on_devices:
            return 1.0
        price = price_of(asked, one.point) if asked.question == "cost" else None
        ranks, devices = one.point.case.ranks, one.point.case.axes.devices
        return ranks * (1.0 if price is None else price / devices)

    def search(one: Alternative) -> Any:
        least, most = map(int, asked.whatif.between or (1, MOST_DEVICES if on_devices else MOST_VALUES))
        between = least, most
        if on_devices:
            ranks = one.point.case.ranks
            between = max(ceil(least / ranks), fewest_servers(one.point)), most // ranks

        def at(number: int, times: int) -> Point:
            if on_devices:
                return with_servers(benches, one, number, times)
            return with_field(asked, benches, one, over, number, times)

        def enough() -> int | None:
            bound = best.get(one.group)
            if bound is None or unit(one) == 0.0:
                return None
            return max(1, ceil(bound / unit(one) - 1e-9))

        # A trace is the load itself, not what stands for a rate.
        most_times = None if one.point.scenario.workload.traces else MOST_TIMES
        result = yield from fewest(at, between, asked.limits, asked.rule, enough, most_times=most_times)
        if result.number is not None:
            best[one.group] = min(best.get(one.group, float("inf")), result.number * unit(one))
        return result

    results: list[Fewest] = drive([search(one) for one in every], runner)
    if not any(result.judged for result in results):
        least, most = asked.whatif.between or (1, MOST_DEVICES)
        raise InputError(f"{asked.file}: between: no server has {least} to {most} devices")
    plan_result = PlanResult(left_out=known.left_out)
    answers: list[Answered] = []
    for one, result in zip(every, results, strict=True):
        tried = _in_order(asked, one, result.judged)
        plan_result.tried += tried.values()
        good = None if result.number is None else tried[result.number]
        below = [number for number in tried if result.number is None or number < result.number]
        answers.append(Answered(one, good, tried[max(below)] if below else None))
    for places in groups:
        group, winner = _won(asked, [answers[i] for i in places], on_devices)
        plan_result.groups.append(group)
        plan_result.winners.append(winner)
    _judge_at_price_ends(asked, benches, plan_result, runner)
    return plan_result


def _won(asked: Asked, group: list[Answered], on_devices: bool) -> tuple[list[Answered], Tried | None]:
    """Returns the answers of a group and the best of them, beside which stands the nearest smaller one."""
    holding = [one.best for one in group if one.best is not None]
    ranks = [(_steps(asked, one), tightness(asked, one), i) for i, one in enumerate(holding)]
    winner = holding[min(ranks)[2]] if ranks else None
    if winner is None or asked.question != "devices" or not on_devices:
        return group, winner
    nearest = _nearest(group, winner)
    return [replace(one, next_worse=nearest) if one.best is winner else one for one in group], winner


def _nearest(group: Sequence[Answered], winner: Tried) -> Tried | None:
    """Returns the point with the most devices fewer than the winner's, of any way of running; one that may
    hold before one that does not."""
    devices = winner.point.case.axes.devices
    smaller = [one.next_worse for one in group if one.next_worse is not None]
    smaller = [one for one in smaller if one.point.case.axes.devices < devices]

    def near(one: Tried) -> tuple[int, bool]:
        return one.point.case.axes.devices, one.judged.verdict == "unsure"

    return max(smaller, key=near, default=None)


def _steps(asked: Asked, one: Tried) -> float:
    # `_fewest` refuses several ways of running where another field is searched: nothing to choose there.
    if asked.question == "cost" and one.cost_per_hour is not None:
        return one.cost_per_hour
    return float(one.point.case.axes.devices)


def _check_prices(asked: Asked, every: Sequence[Alternative]) -> None:
    used = [of for alternative in every for of in alternative.point.devices]
    names, titles = {of.base for of in used}, {of.name for of in used}
    for name in asked.whatif.cost_per_hour:
        if name not in names | titles:
            known = nearest(name, sorted(names))
            raise InputError(f"{asked.file}: cost_per_hour.{plain(name)}: is no device of this plan{known}")
    for alternative in every:
        if price_of(asked, alternative.point) is None:
            priced = asked.whatif.cost_per_hour.keys()
            missing = next(of.base for of in alternative.point.devices if not {of.name, of.base} & priced)
            needed = "what one costs an hour, in any currency; a plan with `base:` has this field"
            raise InputError(f"{asked.file}: cost_per_hour.{missing}: is missing; {needed}")


def tightness(asked: Asked, one: Tried) -> float:
    """Returns how near a point is to its nearest limit: the greatest share of a limit that is used."""
    return one.judged.used(asked.limits)


def _most_times(point: Point) -> int:
    """Returns how many times as many requests a point may take: a trace has those that were recorded."""
    return 1 if point.scenario.workload.traces else MOST_TIMES


def _judge_at_price_ends(asked: Asked, benches: Benches, result: PlanResult, runner: Runner) -> None:
    """Judges the winners with all prices at the slow end of their intervals, and what is one step beyond with
    all prices at the fast end; what is given up by pairs with the prices' own values stays unsure."""
    pairs = enumerate(zip(result.groups, result.winners, strict=True))
    worse = {i: beyond(group, winner) for i, (group, winner) in pairs}
    slow = [(i, winner) for i, winner in enumerate(result.winners) if winner is not None]
    fast = [
        (i, one)
        for i, one in worse.items()
        if one is not None and result.winners[i] is not None and not one.judged.short
    ]

    def at_end(one: Tried, end: End) -> Search[Judged]:
        def enough(found: Judged, times: int = 1) -> bool:
            return times == 1 and is_given_up(found, one.judged, asked.limits, asked.rule)

        if not one.judged.steady:
            return (yield from judge(one.point, asked.limits, asked.rule, end, enough=enough))
        found, _ = yield from steady(
            partial(with_times, benches, one.point),
            asked.limits,
            asked.rule,
            end=end,
            most_times=_most_times(one.point),
            enough=enough,
        )
        return found

    searches = [at_end(one, "high") for _, one in slow] + [at_end(one, "low") for _, one in fast]
    judged = drive(searches, runner)
    result.at_slow_prices = {i: one for (i, _), one in zip(slow, judged, strict=False)}
    result.at_fast_prices = {i: one for (i, _), one in zip(fast, judged[len(slow) :], strict=True)}


# -- rates --------------------------------------------------------------------------------------------------


def _highest(asked: Asked, benches: Benches, runner: Runner) -> PlanResult:
    known = alternatives(asked, benches, any_devices=False)
    every = known.every
    begins = [load_of(one.point.scenario.workload, asked.where) for one in every]

    def search(one: Alternative, begin: float) -> Any:
        return highest(
            lambda value, times: with_load(benches, one, value, times),
            begin,
            asked.limits,
            asked.rule,
            tolerance=TOLERANCE,
            between=RATES,
            most_times=_most_times(one.point),
        )

    # Rates are searched, so that alternatives which differ in nothing else of the load belong together.
    groups = _grouped(repr(at_load(one.point.scenario.workload, 1.0)) for one in every)
    out = _raced(asked, benches, every, begins, groups, runner)
    still = [i for i in range(len(every)) if i not in out]
    searched: list[Highest] = drive([search(every[i], begins[i]) for i in still], runner)
    results = out | dict(zip(still, searched, strict=True))
    plan_result = PlanResult(left_out=known.left_out)
    if out:
        plan_result.left_out_early = _left_out_early(every, results, list(out), still)
    answers: list[Answered] = []
    for i, one in enumerate(every):
        result = results[i]
        tried = _in_order(asked, one, result.judged)
        plan_result.tried += tried.values()
        if i in out:
            answers.append(Answered(one, None, tried[result.fails]))
            continue
        good = None if result.holds is None else tried[result.holds]
        above = [value for value in tried if result.holds is None or value > result.holds]
        answers.append(Answered(one, good, tried[min(above)] if above else None, result.likely))
    for places in groups:
        group = [answers[i] for i in places]
        holding = [one.best for one in group if one.best is not None]
        winner = max(holding, key=lambda one: one.value or 0.0, default=None)
        plan_result.groups.append(group)
        plan_result.winners.append(winner)
        if asked.question == "strategy" and winner is not None:
            # The searches have begun there.
            there = [
                next(t for t in plan_result.tried if t.alternative is every[i] and t.value == begins[i])
                for i in places
            ]
            plan_result.pairs += _pairs(asked, benches, winner, there, runner)
    _judge_at_price_ends(asked, benches, plan_result, runner)
    return plan_result


def _raced(
    asked: Asked,
    benches: Benches,
    every: Sequence[Alternative],
    begins: Sequence[float],
    groups: Sequence[Sequence[int]],
    runner: Runner,
) -> dict[int, Highest]:
    """Returns which of many alternatives end early, each with what was tried of it."""
    many = [places for places in groups if len(places) >= MANY and len({begins[i] for i in places}) == 1]
    if not asked.whatif.leave_out_early or not many:
        return {}

    def contest(places: Sequence[int]) -> Any:
        return race(
            [partial(with_load, benches, every[i]) for i in places],
            begins[places[0]],
            asked.limits,
            asked.rule,
            between=RATES,
            most_times=_most_times(every[places[0]].point),
        )

    raced: list[Raced] = drive([contest(places) for places in many], runner)
    return {
        places[i]: Highest(None, out.value, one.judged[i])
        for places, one in zip(many, raced, strict=True)
        for i, out in one.out.items()
    }


def _left_out_early(
    every: Sequence[Alternative], results: Mapping[int, Highest], out: Sequence[int], still: Sequence[int]
) -> list[str]:
    """Returns how many alternatives were left out early, what that spared, and why some were."""
    taken, full = (sum(runs_of(results[i].judged) for i in places) for places in (out, still))
    spared = max(0, round(full / len(still)) * len(out) - taken)
    notes = [
        f"left out early: {len(out):,} of {len(every):,} ways of running, which fail for sure at a rate at"
        f" which another one holds; that took {taken:,} runs, about {spared:,} fewer than full searches"
    ]
    for i in out[:MOST_EARLY]:
        value = results[i].fails
        assert value is not None
        judged = results[i].judged[value]
        axes = judged.point.case.axes
        rate = "" if axes.rate_per_s is None else f" at {number_text(axes.rate_per_s)} {axes.arriving}/s"
        notes.append(f"left out early: {axes.label}, {_number_of(axes.devices)}{rate}: {judged.why}")
    return notes


def _number_of(devices: int) -> str:
    return f"{devices:,} device{'s' if devices > 1 else ''}"


def _pairs(
    asked: Asked, benches: Benches, winner: Tried, there: Sequence[Tried], runner: Runner
) -> list[Pair]:
    """Compares the winner with the others at the scenario's load, by replicas with the same requests."""
    # Pairs need the same requests: some points may have had more of them, for a steady state.
    times = max(times_of(t.alternative, t.judged) for t in there)
    points = [with_load(benches, t.alternative, t.value or 0.0, times) for t in there]
    once = all(point.same_in_every_run for point in points)
    count = 1 if once else asked.rule.looks[:PAIRED_LOOKS][-1]
    runs = runner([Ask(point, replica) for point in points for replica in range(count)])
    full = [
        replace(t, judged=replace(t.judged, point=point, runs=tuple(runs[i * count : (i + 1) * count])))
        for i, (t, point) in enumerate(zip(there, points, strict=True))
    ]
    best = next(t for t in full if t.alternative is winner.alternative)
    pairs = []
    for other in full:
        base = best.judged.mean(PAIRED)
        same = other.value == best.value
        known = difference(best.judged, other.judged, PAIRED, asked.whatif.certainty)
        if other is not best and same and base and known is not None:
            pairs.append(Pair(best, other, PAIRED, *(each / base for each in known)))
    return pairs


# -- grid ---------------------------------------------------------------------------------------------------


def _grid(asked: Asked, benches: Benches, runner: Runner) -> PlanResult:
    known = alternatives(asked, benches, any_devices=False)
    every = known.every
    _check_objectives(asked, every)
    rates = {one.point.case.axes.rate_per_s for one in every}

    def search(one: Alternative) -> Search[Judged]:
        more = not one.point.scenario.workload.traces
        if asked.rule.once or (not more and len(rates) == 1):
            # A trace is the load itself, unless it is replayed at several speeds; one run is no steady state.
            return (yield from judge(one.point, asked.limits, asked.rule))
        found, _ = yield from steady(
            partial(with_times, benches, one.point),
            asked.limits,
            asked.rule,
            times=least.get(one.group, 1) if more else 1,
            most_times=MOST_TIMES if more else 1,
        )
        return found

    least: dict[str, int] = {}
    judged = drive([search(one) for one in every], runner)
    # Points are compared with each other: those of one load by as many requests.
    for one, found in zip(every, judged, strict=True):
        least[one.group] = max(least.get(one.group, 1), times_of(one, found))
    again = [
        i
        for i, one in enumerate(every)
        # More requests take nothing from what breaks a limit.
        if judged[i].verdict != "fails" and times_of(one, judged[i]) < least[one.group]
    ]
    for i, found in zip(again, drive([search(every[i]) for i in again], runner), strict=True):
        judged[i] = found
    tried = [_tried(asked, one, verdict, None) for one, verdict in zip(every, judged, strict=True)]
    result = PlanResult(tried=tried, left_out=known.left_out)
    result.groups.append(
        [
            Answered(one.alternative, one, None) if one.judged.holds else Answered(one.alternative, None, one)
            for one in tried
        ]
    )
    holding = [one for one in tried if one.judged.holds]
    # Of points that nothing judged those answer first that keep up.
    answering = [one for one in holding if keeps_up(one)] if asked.rule.once else []
    front = pareto(answering or holding, objectives(asked))
    result.winners += front or [None]
    return result


def times_of(alternative: Alternative, judged: Judged) -> int:
    """Returns how many times as many requests a judged point had as its scenario has."""
    return judged.point.case.axes.requests // alternative.point.case.axes.requests


def _check_objectives(asked: Asked, every: Sequence[Alternative]) -> None:
    names = [name for name, _ in objectives(asked)]
    if "lowest_cost" in names:
        _check_prices(asked, every)
    if "lowest_energy" in names:
        for point in (one.point for one in every):
            for of in point.devices:
                if of.hardware.board_power_w is not None:
                    continue
                needed = f"{of.name}'s board_power_w, W, which its device file does not give"
                raise InputError(f"{asked.file}: objective: lowest_energy needs {needed}")
    if "highest_rate" in names and any(one.point.case.axes.rate_per_s is None for one in every):
        raise InputError(f"{asked.file}: objective: is highest_rate, and a closed loop has no rate")


Objective = tuple[str, Callable[[Tried], float | None]]


def objectives(asked: Asked) -> list[Objective]:
    """Returns the objectives of a plan, each with its value at a point, of which less is better."""
    given = asked.whatif.objective
    held = (limit.metric for limit in asked.limits)
    latency = next((name for name in held if re.fullmatch(LATENCY, split_tenant(name)[1])), "e2e_mean_s")

    def rate(one: Tried) -> float | None:
        offered = one.point.case.axes.rate_per_s
        return None if offered is None else -offered

    known: Mapping[str, Callable[[Tried], float | None]] = {
        "fewest_devices": lambda one: float(one.point.case.axes.devices),
        "lowest_cost": lambda one: one.cost_per_hour,
        "highest_rate": rate,
        "lowest_latency": lambda one: one.judged.mean(latency),
        "lowest_energy": joules_per_token,
    }
    names = [given] if isinstance(given, str) else list(given)
    return [(name, known[name]) for name in names]


def pareto(tried: Sequence[Tried], wanted: Sequence[Objective]) -> list[Tried]:
    """Returns the points than which none is better in one objective and as good in all others; of equal ones
    the first. With one objective that is the best one."""
    rated = [(one, [value(one) for _, value in wanted]) for one in tried]
    known = [(one, [v for v in values if v is not None]) for one, values in rated]
    full = [(one, values) for one, values in known if len(values) == len(wanted)]

    def beaten(place: int) -> bool:
        values = full[place][1]
        return any(
            all(a <= b for a, b in zip(other, values, strict=True)) and (other != values or i < place)
            for i, (_, other) in enumerate(full)
        )

    return [one for place, (one, _) in enumerate(full) if not beaten(place)]


# -- pairs --------------------------------------------------------------------------------------------------


def difference(a: Judged, b: Judged, metric: str, certainty: float) -> tuple[float, float, float] | None:
    """Returns the mean of b - a over the replicas that both have, and its interval; None without two of
    them. Both have the same draws, so that most of what varies is common to both."""
    pairs = [
        (one.figures.get(metric), other.figures.get(metric))
        for one, other in zip(a.runs, b.runs, strict=False)
    ]
    gaps = [other - one for one, other in pairs if one is not None and other is not None]
    if gaps and a.point.same_in_every_run and b.point.same_in_every_run:
        return gaps[0], gaps[0], gaps[0]
    ends = interval(gaps, certainty)
    return None if ends is None else (fmean(gaps), *ends)
