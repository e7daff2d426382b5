"""What an answer hinges on: its best points again with one thing changed at a time.

more      = metric with the change / metric without - 1, by pairs of replicas with the same requests
breaks_at = the multiple of a factor from which on the point does not hold for sure: by bisection between 1
            and the multiple that was tried, to 1 / 2^STEPS of the way
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import expm1, log, sqrt
from statistics import fmean
from typing import Any

from simcore.input.files import InputError
from simcore.models.errors import ModelError
from simcore.planning.factors import RELIEF, Factor, Puts, factors, resources
from simcore.planning.limits import Limit, metric_text
from simcore.planning.points import Benches, Point, why_not
from simcore.planning.questions import PlanResult, Tried, beyond, difference, tightness
from simcore.planning.runs import Ask, Ran, Runner
from simcore.planning.searches import Judged, Search, drive, judge, judged_by
from simcore.planning.verdict import Rule, interval
from simcore.planning.whatif import Asked
from simcore.scenario import parse_scenario, put, resolved
from simcore.sim.graph_pricer import End
from simcore.studies.serving.scenario import ServingScenario

# Replicas of a changed point at most: a swing matters if few show it.
REPLICAS, STEPS = 8, 3
# Best points that are looked at: of a Pareto front the first ones.
MOST_WINNERS = 4
# The factor of the prices' own intervals, and its two ends.
PRICES = "op times (90 % intervals)"
ENDS: tuple[tuple[End, str], ...] = (("low", "fast end"), ("high", "slow end"))


@dataclass(frozen=True, eq=False)
class Swing:
    """A change of a best point. `times`: the multiple of the factor, None of prices; `value`, `more`, `low`,
    `high`: the metric, and by how much it is more than without the change, as a share, with its interval;
    None where there is none. `breaks_at`: see above."""

    winner: int
    factor: str
    change: str
    times: float | None
    metric: str
    base: float
    value: float | None
    more: float | None
    low: float | None
    high: float | None
    verdict: str
    why: str
    breaks_at: float | None = None


def sensitivity(asked: Asked, result: PlanResult, benches: Benches, runner: Runner) -> list[Swing]:
    """Returns the swings of the best points, the widest first, by winner."""
    swings: list[Swing] = []
    with _unwarned(benches):
        for number, winner in enumerate(result.winners):
            if winner is not None and number < MOST_WINNERS:
                swings += _swings(asked, number, winner, benches, runner)
    return swings


def tightest(asked: Asked, one: Tried) -> Limit | None:
    """Returns the limit that a point is nearest to; None without limits."""
    alone = [(tightness(replace(asked, limits=(limit,)), one), limit) for limit in asked.limits]
    return max(alone, key=lambda each: each[0])[1] if alone else None


@dataclass(frozen=True, eq=False)
class _Change:
    """A change to look at, and the search that does."""

    factor: str
    words: str
    times: float | None
    search: Search[tuple[Judged, float | None]]


def _swings(asked: Asked, number: int, winner: Tried, benches: Benches, runner: Runner) -> list[Swing]:
    limit = tightest(asked, winner) or Limit("e2e_mean_s", 0.0, at_most=True)
    rule = Rule(asked.whatif.certainty, min(REPLICAS, asked.rule.most))
    changes = _changes(asked, winner, benches, rule)
    count = 1 if winner.point.same_in_every_run else rule.most
    runs = runner([Ask(winner.point, replica) for replica in range(count)])
    full = replace(winner.judged, runs=tuple(runs))
    results = drive([change.search for change in changes], runner)
    found = [
        _swing(asked, number, change, limit, full, judged, breaks_at)
        for change, (judged, breaks_at) in zip(changes, results, strict=True)
    ]
    swings = [swing for swing in found if swing is not None]
    widest: dict[str, float] = {}
    for swing in swings:
        widest[swing.factor] = max(widest.get(swing.factor, 0.0), abs(swing.more or 0.0))
    return sorted(swings, key=lambda swing: -widest[swing.factor])


def _swing(
    asked: Asked,
    number: int,
    change: _Change,
    limit: Limit,
    full: Judged,
    judged: Judged,
    breaks_at: float | None,
) -> Swing | None:
    """Returns by how much a change moves a limit's metric; None if that is zero or unknown without it."""
    mean = full.mean(limit.metric)
    if not mean:
        return None
    gap = difference(full, judged, limit.metric, asked.whatif.certainty)
    more, low, high = (None, None, None) if gap is None else (each / mean for each in gap)
    return Swing(
        number, change.factor, change.words, change.times, limit.metric, mean, judged.mean(limit.metric),
        more, low, high, judged.verdict, judged.why, breaks_at,
    )  # fmt: skip


def _changes(asked: Asked, winner: Tried, benches: Benches, rule: Rule) -> list[_Change]:
    """Returns the changes of a best point that can be, each with its search."""

    def judged(point: Point, end: End = "value") -> Search[Judged]:
        return judge(point, asked.limits, rule, end, steady=winner.judged.steady)

    document = resolved(winner.point.scenario)
    found = []
    for factor in factors(document, benches.link_of(winner.point)):

        def at(times: float, factor: Factor = factor) -> Point | None:
            return changed(asked, benches, document, factor.puts(times))

        for times in (factor.low, factor.high):
            if (point := at(times)) is not None:
                search = _until_broken(point, times, at, judged, winner.judged.holds)
                found.append(_Change(factor.name, f"x {times:g}", times, search))
    ends = [_Change(PRICES, words, None, _alone(judged(winner.point, end))) for end, words in ENDS]
    return found + ends


@dataclass(frozen=True)
class Gain:
    """What a point beyond the answer gains from a resource that is RELIEF times as good. `metric`: that of
    the limit which it is nearest to; `more`, `low`, `high`: geometric mean of that metric's ratio over pairs
    of replicas, less 1, with its interval; `verdict`: on the point with it; `better`: lower or higher."""

    resource: str
    metric: str
    more: float
    low: float
    high: float
    verdict: str
    better: str


def limiting(asked: Asked, result: PlanResult, benches: Benches, runner: Runner) -> list[Gain]:
    """Returns what the point beyond the first winner gains from each resource, the most first: what gains
    most is what limits there."""
    for group, winner in zip(result.groups, result.winners, strict=True):
        worse = beyond(group, winner)
        if winner is not None and worse is not None and not worse.judged.short:
            return _gains(asked, worse, benches, runner)
    return []


def _gains(asked: Asked, worse: Tried, benches: Benches, runner: Runner) -> list[Gain]:
    limit, count = tightest(asked, worse), min(REPLICAS, asked.rule.most)
    assert limit is not None
    if worse.point.same_in_every_run:
        count = 1
    document = resolved(worse.point.scenario)
    names, points = [""], [worse.point]
    with _unwarned(benches):
        for factor in resources(document, benches.link_of(worse.point)):
            if (point := changed(asked, benches, document, factor.puts(factor.high))) is not None:
                names.append(factor.name)
                points.append(point)
        runs = runner([Ask(point, replica) for point in points for replica in range(count)])
    before, *after = (runs[i * count : (i + 1) * count] for i in range(len(points)))
    rule, better = Rule(asked.whatif.certainty, max(2, count)), "lower" if limit.at_most else "higher"
    gains = [
        Gain(
            name,
            limit.metric,
            *ends,
            judged_by(point, those, asked.limits, rule, steady=worse.judged.steady),
            better,
        )
        for name, point, those in zip(names[1:], points[1:], after, strict=True)
        if (ends := _ratio(before, those, limit.metric, rule)) is not None
    ]
    sign = 1.0 if limit.at_most else -1.0
    return sorted(gains, key=lambda gain: sign * gain.more)


def _ratio(
    before: Sequence[Ran], after: Sequence[Ran], metric: str, rule: Rule
) -> tuple[float, float, float] | None:
    """Returns the geometric mean of a metric's ratio over pairs, less 1, with its interval."""
    pairs = [(a.figures.get(metric), b.figures.get(metric)) for a, b in zip(before, after, strict=True)]
    logs = [log(b / a) for a, b in pairs if a and b]
    if len(before) == len(logs) == 1:
        return (expm1(logs[0]),) * 3
    ends = interval(logs, rule.certainty)
    return None if ends is None else (expm1(fmean(logs)), expm1(ends[0]), expm1(ends[1]))


@contextmanager
def _unwarned(benches: Benches) -> Iterator[None]:
    """Forgets warnings and origins of changed devices: they say nothing of the answer."""
    warnings, origins = dict(benches.warnings), list(benches.origins)
    try:
        yield
    finally:
        benches.warnings, benches.origins = warnings, origins


def _alone(search: Search[Judged]) -> Search[tuple[Judged, float | None]]:
    return (yield from search), None


def _until_broken(
    point: Point,
    times: float,
    at: Callable[[float], Point | None],
    judged: Callable[[Point], Search[Judged]],
    holds: bool,
) -> Search[tuple[Judged, float | None]]:
    """Judges a changed point. Where the best one holds and this one does not, searches where that begins."""
    found = yield from judged(point)
    if not holds or found.holds:
        return found, None
    good, bad = 1.0, times
    for _ in range(STEPS):
        middle = sqrt(good * bad)
        between = at(middle)
        if between is None:
            break
        if (yield from judged(between)).holds:
            good = middle
        else:
            bad = middle
    return found, bad


def changed(asked: Asked, benches: Benches, document: Mapping[str, Any], puts: Puts) -> Point | None:
    """Returns the point of a scenario with other values of fields; None if it cannot be."""
    fields = copy.deepcopy(dict(document))
    try:
        for path, value in puts.items():
            put(fields, path, value, f"{asked.where}: {path}")
        scenario = parse_scenario(fields, asked.where)
        assert isinstance(scenario, ServingScenario)
        points = benches.points(scenario)
    except (InputError, ModelError):
        return None
    return points[0] if len(points) == 1 and why_not(points[0]) is None else None


# -- in words ----------------------------------------------------------------------------------------------

# Factors that an answer names, and the least change that it does.
MOST_NAMED, WORTH_NAMING = 3, 0.005


def hinges(swings: Sequence[Swing]) -> str:
    """Returns what the first best point hinges on, and what breaks it, in a sentence each."""
    first = [swing for swing in swings if swing.winner == min(one.winner for one in swings)]
    if not first:
        return ""
    # A swing whose interval has the zero in it may be none.
    sure = [
        one
        for one in first
        if one.low is not None and one.high is not None and one.low * one.high > 0.0
        if abs(one.more or 0.0) >= WORTH_NAMING
    ]
    names = list(dict.fromkeys(swing.factor for swing in sure))[:MOST_NAMED]
    words = [f"{name} ({', '.join(_swung(one) for one in sure if one.factor == name)})" for name in names]
    hinges_on = f" {metric_text(first[0].metric)} hinges most on {'; '.join(words)}." if words else ""
    broken = [_broken(swing) for swing in first if swing.breaks_at is not None]
    return hinges_on + (f" It would no longer hold for sure with {'; '.join(broken)}." if broken else "")


def limits_beyond(gains: Sequence[Gain]) -> str:
    """Returns what limits beyond the answer, in a sentence."""
    if not gains:
        return ""
    name, times = metric_text(gains[0].metric), f"{RELIEF:g} times as good"
    # A gain whose interval has the zero in it may be none.
    sign = 1.0 if gains[0].better == "lower" else -1.0
    sure = [gain for gain in gains if gain.low * gain.high > 0.0 and sign * gain.more < 0.0]
    if not sure:
        return f" No single resource limits beyond: made {times}, none changes {name} for sure."
    first, *others = (f"{gain.more * 100:+.3g} %" for gain in sure[:MOST_NAMED])
    more = [f"{gain.resource} by {by}" for gain, by in zip(sure[1:], others, strict=False)]
    first_limit = f" What limits beyond is {sure[0].resource}: made {times}, it changes {name} by {first}"
    return f"{'; '.join([first_limit, *more])}."


def _swung(swing: Swing) -> str:
    return f"{swing.change}: {(swing.more or 0.0) * 100:+.3g} %"


def _broken(swing: Swing) -> str:
    assert swing.breaks_at is not None
    return f"{swing.factor} x {swing.breaks_at:.3g}"
