"""A race of many ways of running for the highest rate: those that are surely worse end after few replicas.

    rate   the scenario's; twice as high while one holds for sure, half while none does; then between the
           highest at which one holds and the least at which none does, until both are CLOSE
    look   3 replicas of each at a rate; those that are not sure go on to 5, and in between to 8, 13 and so on
    out    who fails for sure at a rate at which another one holds for sure, and is worse than that one in
           pairs with the same requests

Both verdicts and the pairs are as sure as the plan asks. What holds at a rate holds below it, as in the
search for the highest: so who is out would not have won that search, but for the errors that the certainty
allows. The others are searched in full. This is successive halving (Karnin et al. 2013), but for who ends:
not the worse half of each round, only those that are surely worse.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt

from simcore.planning.limits import Limit
from simcore.planning.points import Point
from simcore.planning.searches import Judged, Search, judge, together
from simcore.planning.verdict import Rule, interval

# Fewer ways than this are all searched in full.
MANY = 8
# The look after which a way stays unsure at the first rates. Between rates nearer to each other more replicas
# would be needed than a full search takes.
LOOKS, CLOSE = 1, 1.05
# Rates that are tried at most, and those of them before one holds.
MOST_RATES, MOST_DOWN = 40, 5


@dataclass(frozen=True, eq=False)
class Out:
    """Why a way is out: it fails at `value`, at which another one holds, the way at place `by`."""

    value: float
    by: int


@dataclass(eq=False)
class Raced:
    """What a race found, by the place of each way: `out`, who is out; `judged`, all that was tried of it."""

    out: dict[int, Out] = field(default_factory=dict)
    judged: dict[int, dict[float, Judged]] = field(default_factory=dict)


def runs_of(judged: Mapping[float, Judged]) -> int:
    """Returns how many runs a search took."""
    return sum(len(one.runs) for one in judged.values())


def race(
    ways: Sequence[Callable[[float, int], Point]],
    begin: float,
    limits: Sequence[Limit],
    rule: Rule,
    *,
    between: tuple[float, float],
    most_times: int,
) -> Search[Raced]:
    """Races ways of running, each given by its point at a rate with so many times as many requests."""
    found = Raced(judged={i: {} for i in range(len(ways))})
    low, high, value, times, downs, look = 0.0, inf, begin, 1, 0, LOOKS
    for _ in range(MOST_RATES):
        still = [i for i in range(len(ways)) if i not in found.out]
        if len(still) < 2 or high < low * CLOSE:
            break
        while True:
            judged = yield from _at_rate([ways[i](value, times) for i in still], limits, rule, look)
            if times >= most_times or not _short(judged):
                break
            times *= 2
        for i, one in zip(still, judged, strict=True):
            found.judged[i][value] = one
        if holding := [i for i in still if found.judged[i][value].holds]:
            _end(found, still, holding, value, limits, rule)
            low = value
        else:
            high = value
            # What keeps the limits broken at any rate ends in a full search.
            downs += not low
            if downs > MOST_DOWN:
                break
        value = sqrt(low * high) if low > 0.0 and high < inf else 2.0 * low if low else high / 2.0
        # Who is still in is near the edge, where few replicas say little.
        look += low > 0.0 and high < inf
        if not between[0] <= value <= between[1]:
            break
    return found


def _at_rate(points: Sequence[Point], limits: Sequence[Limit], rule: Rule, look: int) -> Search[list[Judged]]:
    most = rule.looks[min(look, len(rule.looks) - 1)]

    def enough(one: Judged) -> bool:
        return len(one.runs) >= most

    return together([judge(point, limits, rule, steady=True, enough=enough) for point in points])


def _short(judged: Sequence[Judged]) -> bool:
    """Whether more requests are needed: of those that do not fail otherwise most had too few."""
    failing = sum(one.verdict == "fails" and not one.short for one in judged)
    return 2 * sum(one.short for one in judged) > len(judged) - failing


def _end(
    race: Raced,
    still: Sequence[int],
    holding: Sequence[int],
    value: float,
    limits: Sequence[Limit],
    rule: Rule,
) -> None:
    """Ends who fails at a rate, and is worse in pairs than the one that holds with the most room."""
    here = {i: race.judged[i][value] for i in still}
    best = min(holding, key=lambda i: here[i].used(limits))
    for i, one in here.items():
        if one.verdict == "fails" and not one.short and _worse(one, here[best], limits, rule):
            race.out[i] = Out(value, best)


def _worse(one: Judged, best: Judged, limits: Sequence[Limit], rule: Rule) -> bool:
    """Whether a point that fails is worse than one that holds in a limit that it fails by, in pairs."""
    failing = [limit for limit in limits if one.verdicts.get(limit.metric) == "fails"]
    for limit in failing:
        pairs = zip(one.values(limit.metric), best.values(limit.metric), strict=False)
        gaps = [a - b if limit.at_most else b - a for a, b in pairs]
        ends = interval(gaps, rule.certainty)
        if (gaps[0] if ends is None else ends[0]) > 0.0:
            return True
    # What fails without a figure (a queue that grows, requests that do not fit) has no pairs.
    return not failing
