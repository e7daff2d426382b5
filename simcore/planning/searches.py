"""Searches over points, as generators: each yields the runs that it wants and is sent their figures.

    judge    runs replicas of a point until the verdict on all its limits is sure
    steady   the same, with twice as many requests where too few come for a steady state
    fewest   the least whole number at which a point holds: doubled until it holds, then halved in between
    highest  the greatest number at which a point holds: doubled or halved until one holds and one fails, then
             in between, to a tolerance: the geometric middle, and near the edge where a line crosses the
             limit

All points of a plan have the same replicas: the same draws of lengths and of gaps between arrivals, scaled to
the rate (common random numbers). So what holds at a number holds below it (above it), but for chance that
the verdicts bound, and differences between points are those of pairs.

`drive` runs many searches side by side: all runs that they want at a time are one batch for all cores.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import comb, inf, log, sqrt
from statistics import fmean, stdev
from typing import Any, TypeVar

from simcore.planning.limits import Limit, metric_text, value_text, within
from simcore.planning.points import Point
from simcore.planning.runs import Ask, Ran
from simcore.planning.verdict import Rule, Verdict, quantile
from simcore.sim.graph_pricer import End

T = TypeVar("T")
Search = Generator[Sequence[Ask], Sequence[Ran], T]


@dataclass(frozen=True, eq=False)
class Judged:
    """A point, its runs and the verdict. `verdicts`: of each limit; `why`: what it fails by, in words, empty
    if it holds; `short`: it fails because too few requests come for a steady state; `steady`: whether it was
    judged as a load that is kept up."""

    point: Point
    runs: tuple[Ran, ...]
    verdict: Verdict
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    why: str = ""
    short: bool = False
    steady: bool = False

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

    def used(self, limits: Sequence[Limit]) -> float:
        """Returns the greatest share of a limit that means use."""
        shares = [0.0]
        for limit in limits:
            mean = self.mean(limit.metric)
            if mean is not None and mean > 0.0 and limit.value > 0.0:
                shares.append(mean / limit.value if limit.at_most else limit.value / mean)
        return max(shares)


def _never(found: Judged) -> bool:
    del found
    return False


def judge(
    point: Point,
    limits: Sequence[Limit],
    rule: Rule,
    end: End = "value",
    *,
    steady: bool = False,
    enough: Callable[[Judged], bool] = _never,
    doubtful: Callable[[Judged], bool] = _never,
) -> Search[Judged]:
    """Judges a point. Without limits it holds, after the replicas of the first look. `steady`: it fails where
    too few requests come for a steady state; `enough`: whether a point may be left unsure; `doubtful`:
    whether one that is sure is looked at once more."""
    runs: list[Ran] = []
    found: Judged | None = None
    # Runs that are all the same need no second one.
    for look in (1,) if point.same_in_every_run else rule.looks:
        runs += yield [Ask(point, replica, end) for replica in range(len(runs), look)]
        found = _judged(point, runs, limits, rule, steady)
        if enough(found) if found.verdict == "unsure" else not doubtful(found):
            break
    assert found is not None
    return found


# At most so many times as many requests as a scenario has, for a steady state.
MOST_TIMES = 1024


def _never_either(found: Judged, times: int) -> bool:
    del found, times
    return False


def _of_times(question: Callable[[Judged, int], bool], times: int, found: Judged) -> bool:
    return question(found, times)


def steady(
    at: Callable[[int], Point],
    limits: Sequence[Limit],
    rule: Rule,
    *,
    end: End = "value",
    times: int = 1,
    most_times: int = MOST_TIMES,
    enough: Callable[[Judged, int], bool] = _never_either,
    doubtful: Callable[[Judged, int], bool] = _never_either,
) -> Search[tuple[Judged, int]]:
    """Judges a point in steady state, see `judge`; returns with how many times as many requests as well.
    `at`: the point with so many times as many; `times`: how many to begin with; `most_times`: at most."""
    while True:
        found = yield from judge(
            at(times),
            limits,
            rule,
            end,
            steady=True,
            enough=partial(_of_times, enough, times),
            doubtful=partial(_of_times, doubtful, times),
        )
        if not found.short or times >= most_times:
            return found, times
        times *= 2


def judged_by(
    point: Point, runs: Sequence[Ran], limits: Sequence[Limit], rule: Rule, *, steady: bool = False
) -> Verdict:
    """Returns the verdict on a point by given runs; `steady`: see `judge`."""
    return _judged(point, runs, limits, rule, steady).verdict


def _judged(point: Point, runs: Sequence[Ran], limits: Sequence[Limit], rule: Rule, steady: bool) -> Judged:
    verdict = partial(Judged, point, tuple(runs), steady=steady)
    if why := _broken(runs, limits):
        return verdict("fails", {}, why)
    verdicts: dict[str, Verdict] = {}
    for limit in limits:
        values = [run.figures[limit.metric] or 0.0 for run in runs] * (2 if len(runs) == 1 else 1)
        verdicts[limit.metric] = rule.judge(values, limit.value, at_most=limit.at_most)
    failing, unsure = (
        [limit for limit in limits if verdicts[limit.metric] == verdict] for verdict in ("fails", "unsure")
    )
    kept_up = "holds" if rule.once and not point.same_in_every_run else _kept_up(runs, rule)
    fills = steady and _are_long(runs) and _fills(runs, GROWN, BY_CHANCE)
    if kept_up == "fails" or (fills and (len(runs) >= rule.most or _fills(runs, GROWN, SURELY))):
        return verdict("fails", verdicts if failing else {}, OVERLOAD)
    if failing:
        return verdict("fails", verdicts, _says(runs, failing))
    # A server that is empty at first is faster than in steady state: what breaks a limit breaks it there too.
    if steady and too_few(runs):
        return verdict("fails", verdicts, TOO_FEW, short=True)
    if unsure or kept_up == "unsure" or fills:
        why = _says(runs, unsure, rule) if unsure else PERHAPS_OVERLOAD
        return verdict("unsure", verdicts, why)
    return verdict("holds", verdicts)


def _kept_up(runs: Sequence[Ran], rule: Rule) -> Verdict:
    """Returns whether requests are answered as fast as they come: not where the queue grows in most runs.
    Before the last look that takes a majority that chance makes no more often than a look may err; for most
    runs without growth, than CHANCE, since limits have to hold for sure there too."""
    count, growing = len(runs), sum(run.growing for run in runs)
    if growing == 0:
        return "holds"
    most: Verdict = "fails" if 2 * growing > count else "holds"
    if count >= rule.most or count == 1:
        return most
    by_chance = _by_tosses(max(growing, count - growing), count)
    return most if by_chance <= (CHANCE if most == "holds" else rule.error_at(count)) else "unsure"


def too_few(runs: Sequence[Ran]) -> bool:
    """Whether a load that is kept up needs more requests to be judged: most runs are short, or the server
    fills in windows that are not long."""
    return 2 * sum(run.short for run in runs) > len(runs) or (
        not _are_long(runs) and _fills(runs, SLIGHT, BY_CHANCE)
    )


def _are_long(runs: Sequence[Ran]) -> bool:
    return all(run.long for run in runs)


def _fills(runs: Sequence[Ran], least: float, by_chance: float) -> bool:
    """Whether more requests are there in the second halves of windows for sure, and by more than `least`.
    `by_chance`: how often a server that does not fill may seem to."""
    filling = [run.filling for run in runs]
    mean = fmean(filling)
    if mean <= least or len(runs) < 2:
        # A single run is one that every replica would repeat.
        return mean > least
    return mean * sqrt(len(runs)) > quantile(by_chance, len(runs) - 1) * stdev(filling)


def _by_tosses(least: int, count: int) -> float:
    """Returns the probability of so many heads or more in as many tosses of a coin.

    >>> _by_tosses(0, 2), _by_tosses(1, 2), _by_tosses(2, 2)
    (1.0, 0.75, 0.25)
    """
    return sum(comb(count, number) for number in range(least, count + 1)) / 2.0**count


def _hardly_keeps_up(found: Judged) -> bool:
    """Whether the queue grows in more runs than chance would let it, LITTLE_HOPE, if it grew in half of them
    after all."""
    count, growing = len(found.runs), sum(run.growing for run in found.runs)
    return count >= ALONE and 2 * growing > count and _by_tosses(growing, count) <= LITTLE_HOPE


CHANCE = 0.05
# A server that fills by less hardly changes a verdict; and how often one that does not fill may seem to: the
# second where more replicas can tell.
SLIGHT, BY_CHANCE, SURELY = 0.02, 0.01, 0.001
# At 1 % more than a server can answer, its long window fills by 0.3.
GROWN = 0.2
OVERLOAD = "requests come faster than they are answered"
# An upper end so many times the mean says no more than that few replicas vary widely.
FAR = 100.0
PERHAPS_OVERLOAD = "the queue grows in some replicas and not in others"
TOO_FEW = "too few requests come for a steady state"


def _broken(runs: Sequence[Ran], limits: Sequence[Limit]) -> str:
    """Returns why runs fail whatever their figures are; empty if they do not."""
    if fault := next((run.fault for run in runs if run.fault), ""):
        return fault
    if rejected := sum(run.figures.get("rejected") or 0.0 for run in runs):
        return f"{rejected:,.0f} requests do not fit into memory and are rejected"
    missing = (limit.metric for limit in limits for run in runs if run.figures.get(limit.metric) is None)
    return next((f"{name}: a replica has none" for name in missing), "")


def _says(runs: Sequence[Ran], limits: Sequence[Limit], rule: Rule | None = None) -> str:
    """Returns what the means are beside their limits. `rule`: of a look that leaves them unsure, with the
    ends that it leaves."""

    def one(limit: Limit) -> str:
        name, values = limit.metric, [run.figures[limit.metric] or 0.0 for run in runs]
        mean, allowed = value_text(name, fmean(values)), value_text(name, limit.value)
        if rule is None or len(runs) < 2:
            return f"{metric_text(name)} {mean} (limit {allowed})"
        low, high = within(name, *rule.ends(values, at_most=limit.at_most))
        most = "much more" if high > FAR * fmean(values) else value_text(name, high)
        ends = "the same" if low == high else f"{value_text(name, low)} to {most}"
        return f"{metric_text(name)} {mean} ({ends} after {len(runs)} replicas; limit {allowed})"

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
    at: Callable[[int, int], Point],
    between: tuple[int, int],
    limits: Sequence[Limit],
    rule: Rule,
    enough: Callable[[], int | None] = lambda: None,
    *,
    most_times: int | None = MOST_TIMES,
) -> Search[Fewest]:
    """Searches the least number that holds. `at`: the point of a number with so many times as many requests;
    `enough`: from this number on another search is as good, so that the search may end there; `most_times`:
    how many times as many at most, for a steady state, None if the requests are those that count."""
    least, most = between
    tried: dict[int, Judged] = {}
    failing, number, times = least - 1, least, 1

    def judged(number: int) -> Search[Judged]:
        nonlocal times
        if most_times is None:
            tried[number] = yield from judge(at(number, 1), limits, rule)
        else:
            # Too few for a steady state at one number are likely to be too few at the next.
            tried[number], times = yield from steady(
                partial(at, number), limits, rule, times=times, most_times=most_times
            )
        return tried[number]

    while True:
        bound = enough()
        top = most if bound is None else min(most, bound - 1)
        if failing >= top:
            return Fewest(None, tried, bound if top < most else None)
        number = min(number, top)
        if (yield from judged(number)).holds:
            break
        failing, number = number, 2 * number
    while number - failing > 1:
        middle = (number + failing) // 2
        if (yield from judged(middle)).holds:
            number = middle
        else:
            failing = middle
    return Fewest(number, tried)


# -- rates -------------------------------------------------------------------------------------------------

# Neighbours further from each other than this get a point between them, of so many replicas; so many, where
# nothing is known of the upper one but that its queue grows.
CLOSE, ENOUGH, HALVINGS = 1.01, 34, 6
# Fewer pairs say little of how much their differences vary.
PAIRS = 8
# A logarithm of a share of a limit that is no change.
FLAT = 1e-3
# A point without pairs is given up after so many replicas, before which it may fail for sure. Nothing is lost
# but some of the rate where it would hold.
ALONE, LITTLE_HOPE = 21, 0.2
# A bracket is narrow enough at this share of what chance leaves open, and no wider than this.
OF_CHANCE, COARSEST = 0.25, 0.04
# Doublings to either side before a search gives up.
MOST_DOUBLINGS = 40
# Until one point holds and one fails, others may stay unsure after this look: the search comes back to them.
BRACKETS = 3
# Two points within this factor of each other have a line between them that says where the edge is. Rounding
# of a bracket's factor.
NEAR, ROUNDING = 1.3, 1e-9


@dataclass(frozen=True, eq=False)
class Highest:
    """The greatest value that holds for sure, and the least that fails for sure; None where there is none.
    `judged`: all values that were tried; `likely`: where the means alone cross a limit."""

    holds: float | None
    fails: float | None
    judged: Mapping[float, Judged]
    likely: float | None = None


@dataclass
class _Looked:
    """What a search for the highest value has seen: verdicts, and with how many times as many requests; the
    greatest value that holds and the least above it that does not. `least`: what holds is looked at until it
    has had so many replicas."""

    tried: dict[float, Judged] = field(default_factory=dict)
    times: dict[float, int] = field(default_factory=dict)
    low: float | None = None
    high: float | None = None
    least: int = 0

    def knows_more(self, value: float, times: int, found: Judged) -> bool:
        """Whether a value was judged by more replicas of as many requests before."""
        return self.times.get(value) == times and len(found.runs) < len(self.tried[value].runs)

    def note(self, value: float) -> bool:
        """Makes a judged value an end of the bracket; returns whether it holds."""
        if self.tried[value].holds:
            self.low = value
        else:
            self.high = value
        return self.tried[value].holds

    def move(self) -> None:
        """Makes the greatest value that holds, and the least above it that does not, the ends."""
        self.low = max((value for value, one in self.tried.items() if one.holds), default=None)
        above = (value for value, one in self.tried.items() if not one.holds)
        self.high = min((value for value in above if self.low is None or value > self.low), default=None)


def highest(
    at: Callable[[float, int], Point],
    begin: float,
    limits: Sequence[Limit],
    rule: Rule,
    *,
    tolerance: float,
    between: tuple[float, float],
    most_times: int = MOST_TIMES,
) -> Search[Highest]:
    """Searches the greatest value that holds, from `begin`, to a relative tolerance. `at`: the point of a
    value with so many times as many requests; `most_times`: how many times at most."""
    looked = _Looked()

    def judged(value: float, times: int) -> Search[None]:
        def enough(found: Judged, times: int) -> bool:
            if looked.knows_more(value, times, found):
                return False
            low = looked.low
            if looked.high is None:
                return len(found.runs) >= rule.looks[min(BRACKETS, len(rule.looks) - 1)]
            if low is None or low == value:
                return False
            if looked.times[low] != times:
                # Longer runs have other figures: they are no pairs.
                return is_given_up(found, found, limits, rule)
            below = looked.tried[low]
            return is_given_up(found, below, limits, rule) or _within(
                tolerance, value, found, low, below, limits, rule
            )

        def doubtful(found: Judged, times: int) -> bool:
            if looked.knows_more(value, times, found):
                # A verdict that was doubted stays so, else a search could go round for ever.
                return True
            if found.holds and len(found.runs) < looked.least:
                return True
            other = looked.high if found.holds else looked.low
            # Pairs have the same requests.
            if other is None or other == value or looked.times[other] != times:
                return False
            return _by_chance(found, looked.tried[other], limits)

        looked.tried[value], looked.times[value] = yield from steady(
            partial(at, value),
            limits,
            rule,
            times=times,
            most_times=most_times,
            enough=enough,
            doubtful=doubtful,
        )

    while True:
        yield from _bracket(looked, judged, begin, between, limits)
        low, high = looked.low, looked.high
        if low is None or high is None:
            return Highest(low, _surely_failing(looked.tried), looked.tried)
        yield from _narrow(looked, judged, tolerance, limits, rule)
        if looked.low is None:
            continue
        if not (yield from _ends_moved(looked, judged, limits, rule)):
            break
    low = looked.low
    assert low is not None
    times = looked.times[low]
    likely = yield from _crossing(lambda value: at(value, times), looked, limits, rule)
    return Highest(low, _surely_failing(looked.tried), looked.tried, likely)


Look = Callable[[float, int], Search[None]]


def _bracket(
    looked: _Looked, judged: Look, begin: float, between: tuple[float, float], limits: Sequence[Limit]
) -> Search[None]:
    """Doubles or halves the value until one holds and one fails; there may be none such."""
    tried, value = looked.tried, begin
    if tried:
        value = (
            min(2.0 * max(tried), between[1]) if looked.high is None else max(min(tried) / 2.0, between[0])
        )
    for _ in range(MOST_DOUBLINGS):
        if (looked.low is not None and looked.high is not None) or value in tried:
            return
        before = None if looked.low is not None else tried.get(min(tried, default=0.0))
        yield from judged(value, looked.times[looked.low] if looked.low is not None else 1)
        found = tried[value]
        if before is not None and looked.high is not None and _as_bad(found, before, limits):
            # What keeps the limits broken has nothing to do with the value.
            return
        if found.verdict != "unsure":
            looked.note(value)
        if looked.high is None:
            value = min((2.0 if found.holds else sqrt(2.0)) * value, between[1])
        elif looked.low is None:
            value = max(min(tried) / 2.0, between[0])


def _narrow(
    looked: _Looked, judged: Look, tolerance: float, limits: Sequence[Limit], rule: Rule
) -> Search[None]:
    """Brings the ends of a bracket within a tolerance of each other."""
    same, last = 0, False
    assert looked.low is not None
    assert looked.high is not None
    while looked.high > looked.low * (1.0 + tolerance) * (1.0 + ROUNDING):
        low, high, times = looked.low, looked.high, looked.times[looked.low]
        guess = None if same > 1 else _guess(looked, limits, rule)
        value = sqrt(low * high) if guess is None else guess
        value = max(min(value, high / (1.0 + tolerance)), low * (1.0 + tolerance))
        if high <= low * NEAR:
            # Too few for a steady state there are likely to be too few here.
            times = max(times, looked.times[high])
        yield from judged(value, times)
        held = looked.note(value)
        same = same + 1 if guess is not None and held == last else 0
        last = held
        if looked.high <= looked.low * NEAR and looked.tried[looked.high].verdict == "unsure":
            # `_told_apart` needs pairs, which cost less than one more point at the edge.
            yield from _low_has(looked, judged, limits, min(PAIRS, rule.most))
            if looked.low is None:
                return
        # Nearer to each other, ends say less of how much a value moves a metric.
        tolerance = max(tolerance, _told_apart(looked, limits, rule))


def _low_has(looked: _Looked, judged: Look, limits: Sequence[Limit], count: int) -> Search[None]:
    """Gives the lower end of a bracket, and what holds from now on, so many replicas."""
    looked.least = max(looked.least, count)
    low = looked.low
    assert low is not None
    at_low = looked.tried[low]
    if limits and len(at_low.runs) < looked.least and not at_low.point.same_in_every_run:
        yield from judged(low, looked.times[low])
        looked.move()


def _told_apart(looked: _Looked, limits: Sequence[Limit], rule: Rule) -> float:
    """Returns by how much values may differ before verdicts say more than chance lets them: OF_CHANCE of the
    step that moves a metric as far as its mean has to be from the limit. Of the metrics that do not hold the
    least; COARSEST at most, and 0 where nothing is known."""
    low, high = looked.low, looked.high
    assert low is not None
    assert high is not None
    at_low, at_high = looked.tried[low], looked.tried[high]
    if looked.times[low] != looked.times[high]:
        return 0.0
    found = [COARSEST]
    for limit in limits:
        if at_high.verdicts.get(limit.metric) in ("unsure", "fails"):
            here, there = at_low.values(limit.metric), at_high.values(limit.metric)
            if min(len(here), len(there)) < PAIRS:
                return 0.0
            slope = _slope(here, there, high / low)
            reach = rule.reach(here, at_most=limit.at_most)
            found.append(OF_CHANCE * reach / slope if slope > 0.0 else COARSEST)
    return min(found) if len(found) > 1 else 0.0


def _ends_moved(looked: _Looked, judged: Look, limits: Sequence[Limit], rule: Rule) -> Search[bool]:
    """Judges the ends of a narrow bracket by as much as is known of each other, and what holds by ENOUGH
    replicas: few often miss the slow ones. Returns whether one of the ends is another now."""
    low, high, times = looked.low, looked.high, looked.times
    assert low is not None
    assert high is not None
    yield from _low_has(looked, judged, limits, min(ENOUGH, rule.most))
    at_low, at_high, alike = looked.tried[low], looked.tried[high], times[low] == times[high]
    if at_low.holds and (times[low] < times[high] or (alike and _by_chance(at_low, at_high, limits))):
        # More requests say more of a steady state.
        yield from judged(low, times[high])
    elif at_low.holds and alike and _by_chance(at_high, at_low, limits):
        yield from judged(high, times[low])
    looked.move()
    return (looked.low, looked.high) != (low, high)


def _slope(below: Sequence[float], above: Sequence[float], factor: float) -> float:
    """Returns how far the means of pairs are apart, for each e-fold of a value that differs by a factor."""
    both = min(len(below), len(above))
    return abs(fmean(above[:both]) - fmean(below[:both])) / log(factor)


def _shift(here: Sequence[float], there: Sequence[float]) -> float:
    """Returns what the replicas of `here` lack, in another point, to the mean of all that are known there."""
    return fmean(there) - fmean(there[: len(here)])


def _by_chance(found: Judged, other: Judged, limits: Sequence[Limit]) -> bool:
    """Whether a point fails, or holds, only because its few replicas are worse, or better, than all that are
    known at another value: with what its pairs there lack to the mean of all, it would not."""
    keeps = []
    for limit in limits:
        # What fails without a figure fails by no chance.
        if not found.holds and found.verdicts.get(limit.metric) != "fails":
            continue
        here, there = found.values(limit.metric), other.values(limit.metric)
        mean = fmean(here) + (_shift(here, there) if len(here) < len(there) else 0.0)
        keeps.append(mean <= limit.value if limit.at_most else mean >= limit.value)
    return bool(keeps) and all(keeps) != found.holds


def is_given_up(found: Judged, below: Judged, limits: Sequence[Limit], rule: Rule) -> bool:
    """Whether a point may be left unsure, as its queue grows or its figures are hopeless; see below."""
    return _hardly_keeps_up(found) or _is_hopeless(found, below, limits, rule)


def _is_hopeless(found: Judged, below: Judged, limits: Sequence[Limit], rule: Rule) -> bool:
    """Whether a point will not hold for sure after all replicas either: by another point, a lower value or
    other prices, that has had more of them, and what its few differ from their pairs there; else by its own
    mean, where the chance that it holds is LITTLE_HOPE at most."""
    for limit in limits:
        here, there = found.values(limit.metric), below.values(limit.metric)
        paired = len(here) < len(there)
        if found.verdicts.get(limit.metric) != "unsure" or len(here) < (PAIRS if paired else ALONE):
            continue
        if paired:
            more, error = [a - b for a, b in zip(here, there, strict=False)], rule.error
        else:
            more, there, error = here, here, LITTLE_HOPE
        off = quantile(error, len(more) - 1) * stdev(more) / sqrt(len(more))
        reach = rule.reach(there, at_most=limit.at_most) * sqrt(len(there) / rule.most)
        mean = fmean(here) + _shift(here, there)
        if mean - off + reach > limit.value if limit.at_most else mean + off - reach < limit.value:
            return True
    return False


def _as_bad(found: Judged, before: Judged, limits: Sequence[Limit]) -> bool:
    """Whether a point at half the value comes no nearer to the limits, both in steady state: far beyond what
    is answered a batch may take as long at any rate."""
    if any(run.short for run in (*found.runs, *before.runs)):
        return False
    here, there = _share(found.runs, limits), _share(before.runs, limits)
    return not found.holds and inf not in (here, there) and there - here < FLAT


def _crossing(
    at: Callable[[float], Point], looked: _Looked, limits: Sequence[Limit], rule: Rule
) -> Search[float]:
    """Returns the value at which the means cross a limit, at least the one that holds: on lines between
    neighbours, with one more point where these are far from each other. Runs of another length have other
    figures: such a point counts only where it is over a limit and none as long is. On worlds whose edge is
    known that came nearer to it than by all points (tests/test_planning_tapes.py)."""
    low, tried, times = looked.low, looked.tried, looked.times
    assert low is not None
    pairs = tried[low].runs
    shares = {
        value: _share(one.runs, limits, pairs)
        for value, one in tried.items()
        if value >= low and times[value] == times[low]
    }
    shares = _without_outdone(low, shares, {value: len(tried[value].runs) for value in shares})
    below = max((value for value, share in shares.items() if share < 0.0), default=low)
    if below == max(shares):
        others = {value: _share(one.runs, limits) for value, one in tried.items() if value > below}
        shares |= {value: share for value, share in others.items() if share >= 0.0}
    above = min((value for value in shares if value > below), default=None)
    if above is None or not shares[low] < 0.0:
        return low
    for _ in range(HALVINGS):
        if above <= below * CLOSE:
            break
        straight = shares[above] < inf
        middle = _on_line(below, above, shares)
        point = at(middle)
        # On a line this point decides: it has as many replicas as what holds.
        count = len(pairs) if straight else min(ENOUGH, rule.most)
        count = 1 if point.same_in_every_run else count
        runs = yield [Ask(point, replica) for replica in range(count)]
        shares[middle] = _share(runs, limits, pairs)
        below, above = (middle, above) if shares[middle] < 0.0 else (below, middle)
        if straight:
            break
    return _on_line(below, above, shares)


def _without_outdone(
    low: float, shares: Mapping[float, float], counts: Mapping[float, int]
) -> dict[float, float]:
    """Returns the shares without those of few replicas, where a point beyond, no farther over the limit than
    `low` is below it, has had over twice as many: of a metric that hardly depends on the value, few say
    little."""
    sure = [value for value, share in shares.items() if value > low and abs(share) <= -shares[low]]
    return {
        value: share
        for value, share in shares.items()
        if value == low or not any(one > value and counts[one] > 2 * counts[value] for one in sure)
    }


def _on_line(below: float, above: float, shares: Mapping[float, float]) -> float:
    if below == above:
        # Means that lie on the limit there lay below it by other replicas.
        return above
    if shares[above] == inf or shares[below] == -inf:
        return sqrt(below * above)
    way = shares[below] / (shares[below] - shares[above])
    return float(below * (above / below) ** way)


def _share(runs: Sequence[Ran], limits: Sequence[Limit], pairs: Sequence[Ran] = ()) -> float:
    """Returns the logarithm of the greatest share of a limit that means use; infinite where a run has none,
    or the queue grows in most. `pairs`: runs of a point with as many requests; where they are more, means are
    theirs and what pairs differ by."""

    def mean(of: Callable[[Ran], float]) -> float:
        here, there = [of(run) for run in runs], [of(run) for run in pairs]
        return fmean(here) + (_shift(here, there) if len(there) > len(here) else 0.0)

    if 2.0 * mean(lambda run: run.growing) > 1.0:
        return inf
    shares = [-inf]
    for limit in limits:
        if any(run.figures.get(limit.metric) is None for run in (*runs, *pairs)):
            return inf
        used = mean(lambda run, name=limit.metric: run.figures[name] or 0.0)  # type: ignore[misc]
        if used > 0.0 and limit.value > 0.0:
            shares.append(log(used / limit.value) * (1.0 if limit.at_most else -1.0))
    return max(shares)


def _guess(looked: _Looked, limits: Sequence[Limit], rule: Rule) -> float | None:
    """Returns where a point stops to hold for sure, by a line between one that holds and one near it that
    does not; None if there is no such line."""
    low, high, tried = looked.low, looked.high, looked.tried
    assert low is not None
    assert high is not None
    alike = looked.times[low] == looked.times[high]
    if high > low * NEAR:
        return None
    at_low, at_high = tried[low], tried[high]
    if _hardly_keeps_up(at_high):
        # Metrics there say nothing of where the queue begins to grow.
        return None
    below = max((_used(at_low, limit, rule) for limit in limits), default=0.0)
    above = max((_used(at_high, limit, rule, at_low if alike else None) for limit in limits), default=0.0)
    if above <= 0.0:
        # The point above may well hold.
        return high
    known = -inf < below < 0.0 and above < inf
    return low * (high / low) ** (below / (below - above)) if known else None


def _used(judged: Judged, limit: Limit, rule: Rule, pairs: Judged | None = None) -> float:
    """Returns the logarithm of how much of a limit a point uses, if its mean is as bad as it may be after all
    replicas; infinite where nothing is known. `pairs`: a point that may have had more replicas."""
    values = judged.values(limit.metric)
    if not judged.verdicts or len(values) < 2:
        return inf
    mean, spread = fmean(values), values
    if pairs is not None and len(values) < len(others := pairs.values(limit.metric)):
        mean, spread = mean + _shift(values, others), others
    reach = rule.reach(spread, at_most=limit.at_most) * sqrt(len(spread) / rule.most)
    worst = mean + (reach if limit.at_most else -reach)
    if worst <= 0.0 or limit.value <= 0.0:
        return inf if worst <= 0.0 and not limit.at_most else -inf
    share = worst / limit.value if limit.at_most else limit.value / worst
    return log(share)


def _within(
    tolerance: float,
    value: float,
    found: Judged,
    low: float,
    holding: Judged,
    limits: Sequence[Limit],
    rule: Rule,
) -> bool:
    """Whether all that is unsure of a point moves the greatest value that holds by less than a tolerance, by
    what the metrics gain from a lower value, which holds, to this one."""
    if "unsure" not in found.verdicts.values():
        # What is unsure is whether the queue grows.
        return False
    for limit in limits:
        if found.verdicts[limit.metric] == "unsure":
            here, there = found.values(limit.metric), holding.values(limit.metric)
            if rule.reach(here, at_most=limit.at_most) >= tolerance * _slope(there, here, value / low):
                return False
    return True


def _surely_failing(tried: Mapping[float, Judged]) -> float | None:
    return min((value for value, one in tried.items() if one.verdict == "fails"), default=None)


# -- side by side --------------------------------------------------------------------------------------------


def drive(searches: Sequence[Search[Any]], run: Callable[[Sequence[Ask]], Sequence[Ran]]) -> list[Any]:
    """Runs searches side by side, and returns their results in their order."""
    every, found = together(searches), None
    try:
        while True:
            asks = next(every) if found is None else every.send(found)
            found = run(asks)
    except StopIteration as ended:
        results: list[Any] = ended.value
        return results


def together(searches: Sequence[Search[Any]]) -> Search[list[Any]]:
    """Makes one search of several: what all want at a time is one batch. Returns their results in their
    order."""
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
        found = yield [ask for _, asks in batch for ask in asks]
        place = 0
        for i, asks in batch:
            go_on(i, found[place : place + len(asks)])
            place += len(asks)
    return results
