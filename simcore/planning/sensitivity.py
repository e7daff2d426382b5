"""What an answer hinges on: its best points again with one thing changed at a time.

more      = metric with the change / metric without - 1, by pairs of replicas with the same requests
breaks_at = the multiple of a factor from which on the point does not hold for sure: by bisection between 1
            and the multiple that was tried, to 1 / 2^STEPS of the way
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

from simcore.input.files import InputError
from simcore.models.errors import ModelError
from simcore.planning.factors import Factor, Puts, factors
from simcore.planning.limits import Limit, metric_text
from simcore.planning.points import Benches, Point, why_not
from simcore.planning.questions import Found, Tried, difference, tightness
from simcore.planning.runs import Ask, Runner
from simcore.planning.searches import Judged, Search, drive, judge
from simcore.planning.verdict import Rule
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


def sensitivity(asked: Asked, found: Found, benches: Benches, runner: Runner) -> list[Swing]:
    """Returns the swings of the best points, the widest first, by winner."""
    swings: list[Swing] = []
    # A changed device's warnings say nothing of the answer.
    warnings, origins = dict(benches.warnings), list(benches.origins)
    for number, winner in enumerate(found.winners):
        if winner is not None and number < MOST_WINNERS:
            swings += _swings(asked, number, winner, benches, runner)
    benches.warnings, benches.origins = warnings, origins
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
    limit = tightest(asked, winner)
    metric = limit.metric if limit is not None else "e2e_mean_s"
    rule = Rule(asked.whatif.certainty, min(REPLICAS, asked.rule.most))
    changes = _changes(asked, winner, benches, rule)
    runs = runner([Ask(winner.point, replica) for replica in range(rule.most)])
    full = replace(winner.judged, runs=tuple(runs))
    results = drive([change.search for change in changes], runner)
    mean = full.mean(metric)
    if not mean:
        return []
    swings = []
    for change, (judged, breaks_at) in zip(changes, results, strict=True):
        gap = difference(full, judged, metric, asked.whatif.certainty)
        more, low, high = (None, None, None) if gap is None else (each / mean for each in gap)
        swings.append(
            Swing(
                number, change.factor, change.words, change.times, metric, mean, judged.mean(metric),
                more, low, high, judged.verdict, judged.why, breaks_at,
            )
        )  # fmt: skip
    widest: dict[str, float] = {}
    for swing in swings:
        widest[swing.factor] = max(widest.get(swing.factor, 0.0), abs(swing.more or 0.0))
    return sorted(swings, key=lambda swing: -widest[swing.factor])


def _changes(asked: Asked, winner: Tried, benches: Benches, rule: Rule) -> list[_Change]:
    """Returns the changes of a best point that can be, each with its search."""
    steady = asked.question in ("rate", "strategy")

    def judged(point: Point, end: End = "value") -> Search[Judged]:
        return judge(point, asked.limits, rule, end, steady=steady)

    document = resolved(winner.point.scenario)
    link = benches.links.get(winner.point.device) if winner.point.case.axes.ranks > 1 else None
    found = []
    for factor in factors(document, link):

        def at(times: float, factor: Factor = factor) -> Point | None:
            return changed(asked, benches, document, factor.puts(times))

        for times in (factor.low, factor.high):
            if (point := at(times)) is not None:
                search = _until_broken(point, times, at, judged, winner.judged.holds)
                found.append(_Change(factor.name, f"x {times:g}", times, search))
    ends = [_Change(PRICES, words, None, _alone(judged(winner.point, end))) for end, words in ENDS]
    return found + ends


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

# Factors that an answer names.
MOST_NAMED = 3


def hinges(swings: Sequence[Swing]) -> str:
    """Returns what the first best point hinges on, and what breaks it, in a sentence each."""
    first = [swing for swing in swings if swing.winner == min(one.winner for one in swings)]
    if not first:
        return ""
    # A swing whose interval has the zero in it may be none.
    sure = [one for one in first if one.low is not None and one.high is not None and one.low * one.high > 0.0]
    names = list(dict.fromkeys(swing.factor for swing in sure))[:MOST_NAMED]
    words = [f"{name} ({', '.join(_swung(one) for one in sure if one.factor == name)})" for name in names]
    told = f" {metric_text(first[0].metric)} hinges most on {'; '.join(words)}." if words else ""
    broken = [_broken(swing) for swing in first if swing.breaks_at is not None]
    return told + (f" It would no longer hold for sure with {'; '.join(broken)}." if broken else "")


def _swung(swing: Swing) -> str:
    return f"{swing.change}: {(swing.more or 0.0) * 100:+.3g} %"


def _broken(swing: Swing) -> str:
    assert swing.breaks_at is not None
    return f"{swing.factor} x {swing.breaks_at:.3g}"
