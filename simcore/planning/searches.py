"""Searches over points, as generators: each yields the runs that it wants and is sent their figures.

    judge    runs replicas of a point until the verdict on all its limits is sure
    fewest   the least whole number at which a point holds: doubled until it holds, then halved in between
    highest  the greatest number at which a point holds: doubled or halved until one holds and one fails, then
             the geometric middle in between, to a tolerance

All points of a plan have the same replicas: the same draws of lengths and of gaps between arrivals, scaled to
the rate (common random numbers). So what holds at a number holds below it (above it), but for chance that
the verdicts bound, and differences between points are those of pairs.

`drive` runs many searches side by side: all runs that they want at a time are one batch for all cores.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import fmean
from typing import Any, TypeVar

from simcore.planning.limits import Limit, metric_text, value_text
from simcore.planning.points import Point
from simcore.planning.runs import Ask, Ran
from simcore.planning.verdict import Rule, Verdict
from simcore.sim.graph_pricer import End

T = TypeVar("T")
Search = Generator[Sequence[Ask], Sequence[Ran], T]


@dataclass(frozen=True, eq=False)
class Judged:
    """A point, its runs and the verdict. `verdicts`: of each limit; `why`: what it fails by, in words, empty
    if it holds."""

    point: Point
    runs: tuple[Ran, ...]
    verdict: Verdict
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether all limits hold for sure."""
        return self.verdict == "holds"

    def values(self, metric: str) -> list[float]:
        """Returns a metric, replica by replica, without replicas that have none."""
        return [value for run in self.runs if (value := run.figures.get(metric)) is not None]

    def mean(self, metric: str) -> float | None:
        """Returns the mean of a metric over replicas."""
        values = self.values(metric)
        return fmean(values) if values else None


def judge(
    point: Point, limits: Sequence[Limit], rule: Rule, end: End = "value", *, steady: bool = False
) -> Search[Judged]:
    """Judges a point. Without limits it holds, after the replicas of the first look. `steady`: it fails where
    too few requests come for a steady state."""
    runs: list[Ran] = []
    found: Judged | None = None
    for look in rule.looks:
        runs += yield [Ask(point, replica, end) for replica in range(len(runs), look)]
        found = _judged(point, runs, limits, rule, steady)
        if found.verdict != "unsure":
            break
    assert found is not None
    return found


def _judged(point: Point, runs: Sequence[Ran], limits: Sequence[Limit], rule: Rule, steady: bool) -> Judged:
    if why := _broken(runs, limits, steady):
        return Judged(point, tuple(runs), "fails", {}, why)
    verdicts: dict[str, Verdict] = {}
    for limit in limits:
        values = [run.figures[limit.metric] or 0.0 for run in runs]
        verdicts[limit.metric] = rule.judge(values, limit.value, at_most=limit.at_most)
    worst: Sequence[Verdict] = ("fails", "unsure")
    for verdict in worst:
        those = [limit for limit in limits if verdicts[limit.metric] == verdict]
        if those:
            return Judged(point, tuple(runs), verdict, verdicts, _says(runs, those))
    return Judged(point, tuple(runs), "holds", verdicts)


def _broken(runs: Sequence[Ran], limits: Sequence[Limit], steady: bool) -> str:
    """Returns why runs fail whatever their figures are; empty if they do not."""
    if fault := next((run.fault for run in runs if run.fault), ""):
        return fault
    if rejected := sum(run.figures.get("rejected") or 0.0 for run in runs):
        return f"{rejected:,.0f} requests do not fit into memory and are rejected"
    if 2 * sum(run.growing for run in runs) > len(runs):
        return "requests come faster than they are answered"
    if steady and 2 * sum(run.short for run in runs) > len(runs):
        return "too few requests come for a steady state (more workload.requests would say more)"
    missing = (limit.metric for limit in limits for run in runs if run.figures.get(limit.metric) is None)
    return next((f"{name}: a replica has none" for name in missing), "")


def _says(runs: Sequence[Ran], limits: Sequence[Limit]) -> str:
    def one(limit: Limit) -> str:
        mean = fmean(run.figures[limit.metric] or 0.0 for run in runs)
        allowed = value_text(limit.metric, limit.value)
        return f"{metric_text(limit.metric)} {value_text(limit.metric, mean)} (limit {allowed})"

    return "; ".join(map(one, limits))


# -- whole numbers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fewest:
    """The least number that holds, None if none does; `judged`: every number that was tried, with its
    point's verdict; `cut`: the search ended at this bound, which another search had reached."""

    number: int | None
    judged: Mapping[int, Judged]
    cut: int | None = None


def fewest(
    at: Callable[[int], Point],
    between: tuple[int, int],
    limits: Sequence[Limit],
    rule: Rule,
    enough: Callable[[], int | None] = lambda: None,
) -> Search[Fewest]:
    """Searches the least number that holds. `enough`: from this number on another search is as good, so that
    the search may end there."""
    least, most = between
    tried: dict[int, Judged] = {}
    failing, number = least - 1, least
    while True:
        bound = enough()
        top = most if bound is None else min(most, bound - 1)
        if failing >= top:
            return Fewest(None, tried, bound if top < most else None)
        number = min(number, top)
        tried[number] = yield from judge(at(number), limits, rule)
        if tried[number].holds:
            break
        failing, number = number, 2 * number
    while number - failing > 1:
        middle = (number + failing) // 2
        tried[middle] = yield from judge(at(middle), limits, rule)
        if tried[middle].holds:
            number = middle
        else:
            failing = middle
    return Fewest(number, tried)


# -- rates -------------------------------------------------------------------------------------------------

# Doublings to either side before a search gives up.
MOST_DOUBLINGS = 40


@dataclass(frozen=True, eq=False)
class Highest:
    """The greatest value that holds for sure, and the least that fails for sure; None where there is none.
    `judged`: all values that were tried."""

    holds: float | None
    fails: float | None
    judged: Mapping[float, Judged]


def highest(
    at: Callable[[float], Point],
    begin: float,
    limits: Sequence[Limit],
    rule: Rule,
    *,
    tolerance: float,
    between: tuple[float, float],
) -> Search[Highest]:
    """Searches the greatest value that holds, from `begin`, to a relative tolerance."""
    tried: dict[float, Judged] = {}
    low, high = None, None
    value = begin
    for _ in range(MOST_DOUBLINGS):
        tried[value] = yield from judge(at(value), limits, rule, steady=True)
        if tried[value].holds:
            low = value
            value = min(2.0 * value, between[1])
        else:
            high = value
            value = max(value / 2.0, between[0])
        if (low is not None and high is not None) or value in tried:
            break
    if low is None or high is None:
        return Highest(low, _surely_failing(tried), tried)
    while high > low * (1.0 + tolerance):
        value = sqrt(low * high)
        tried[value] = yield from judge(at(value), limits, rule, steady=True)
        if tried[value].holds:
            low = value
        else:
            high = value
    return Highest(low, _surely_failing(tried), tried)


def _surely_failing(tried: Mapping[float, Judged]) -> float | None:
    return min((value for value, one in tried.items() if one.verdict == "fails"), default=None)


# -- side by side --------------------------------------------------------------------------------------------


def drive(searches: Sequence[Search[Any]], run: Callable[[Sequence[Ask]], Sequence[Ran]]) -> list[Any]:
    """Runs searches side by side, and returns their results in their order."""
    results: list[Any] = [None] * len(searches)
    wants: dict[int, Sequence[Ask]] = {}

    def go_on(i: int, found: Sequence[Ran] | None) -> None:
        try:
            wants[i] = next(searches[i]) if found is None else searches[i].send(found)
        except StopIteration as ended:
            results[i] = ended.value
            wants.pop(i, None)

    for i in range(len(searches)):
        go_on(i, None)
    while wants:
        batch = list(wants.items())
        found = run([ask for _, asks in batch for ask in asks])
        place = 0
        for i, asks in batch:
            go_on(i, found[place : place + len(asks)])
            place += len(asks)
    return results
