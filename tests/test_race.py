"""Of many ways of running those that are surely worse end early: the winner is that of full searches, for
fewer runs."""

from collections.abc import Sequence
from functools import partial
from math import inf, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simcore.planning.limits import Limit
from simcore.planning.plan import Plan
from simcore.planning.race import MANY, Raced, race
from simcore.planning.runs import Ask, Ran
from simcore.planning.searches import Highest, drive, highest
from simcore.planning.verdict import Rule
from tests.test_planning import BASE, SEED, planned
from tests.thorough import first, slow, thorough

TTFT, TPOT = Limit("ttft_p99_s", 1.0, at_most=True), Limit("tpot_p99_s", 1.0, at_most=True)
SLO = Limit("slo_attainment", 0.9, at_most=False)
BETWEEN = (1e-6, 1e6)
RULE = Rule(most=100)


def point(way: int, rate: float, times: int = 1) -> Any:
    """What stands for a point: a way at a rate."""
    return SimpleNamespace(way=way, rate=rate, times=times, same_in_every_run=False)


class Ways:
    """Ways by the rates at which their latency reaches one; noise that all share at a replica, and noise of
    their own. `asked`: the runs that were made, each once."""

    def __init__(
        self, edges: Sequence[float], slopes: Sequence[float], shared: float, own: float, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self.edges, self.slopes = edges, slopes
        self.shared = rng.lognormal(-shared * shared / 2.0, shared, RULE.most).tolist()
        self.own = rng.lognormal(-own * own / 2.0, own, (len(edges), RULE.most)).tolist()
        self.asked: set[tuple[int, float, int]] = set()

    @property
    def points(self) -> list[Any]:
        return [partial(point, way) for way in range(len(self.edges))]

    def __call__(self, asks: Sequence[Ask]) -> list[Ran]:
        return [self.ran(ask.point, ask.replica) for ask in asks]

    def value(self, way: int, rate: float, replica: int) -> float:
        mean = (rate / self.edges[way]) ** self.slopes[way]
        return float(mean * self.shared[replica] * self.own[way][replica])

    def ran(self, at: Any, replica: int) -> Ran:
        self.asked.add((at.way, at.rate, replica))
        value = self.value(at.way, at.rate, replica)
        return Ran({TTFT.metric: value, TPOT.metric: 0.5, SLO.metric: max(0.0, 1.0 - 0.1 * value)})

    def race(self, begin: float = 1.0, limits: Sequence[Limit] = (TTFT,), rule: Rule = RULE) -> Raced:
        (found,) = drive([race(self.points, begin, limits, rule, between=BETWEEN, most_times=1)], self)
        return found

    def winner(self, ways: Sequence[int]) -> int:
        """The way that full searches of some ways find the best."""
        points, more = self.points, {"tolerance": 0.01, "between": BETWEEN, "most_times": 1}
        found: list[Highest] = drive([highest(points[i], 1.0, [TTFT], RULE, **more) for i in ways], self)  # type: ignore[arg-type]
        return max(zip(ways, found, strict=True), key=lambda pair: pair[1].holds or 0.0)[0]


def random_ways(rng: np.random.Generator, seed: int, spread: float) -> Ways:
    count = int(rng.integers(MANY, 20))
    edges = (10.0 ** rng.uniform(-1, 2) * rng.lognormal(0.0, spread, count)).tolist()
    return Ways(edges, rng.uniform(1.0, 8.0, count).tolist(), *rng.uniform(0.0, 0.3, 2).tolist(), seed)


@slow
@pytest.mark.parametrize(
    ("spread", "plans", "share"),
    [
        pytest.param(0.1, 4, 0.8, marks=thorough),
        (0.5, 4, 0.5),
        pytest.param(0.02, 60, 1.25, marks=thorough),
        pytest.param(0.1, 60, 0.7, marks=thorough),
        pytest.param(0.5, 60, 0.4, marks=thorough),
    ],
)
def test_the_winner_is_that_of_full_searches_for_fewer_runs(spread: float, plans: int, share: float) -> None:
    """Random ways, near each other and far apart: the same winner in 95 % of the plans at least. Ways within
    2 % of each other are told apart by full searches alone, so that a race adds to them."""
    rng, same, early, full = np.random.default_rng(SEED), [], 0, 0
    for seed in range(plans):
        ways = random_ways(rng, seed, spread)
        every = list(range(len(ways.edges)))
        wins = ways.winner(every)
        full += len(ways.asked)
        ways.asked.clear()
        out = ways.race().out
        same.append(ways.winner([i for i in every if i not in out]) == wins)
        early += len(ways.asked)
    assert np.mean(same) >= 0.95
    assert early < share * full


@slow
@pytest.mark.parametrize("certainty", first(1, [0.7, 0.95]))
def test_a_way_that_is_as_good_is_seldom_out(certainty: float) -> None:
    """All ways have the same edge, so that each that is out is so by a wrong verdict. Looks before the last
    may err half as often as the last, to one side: at most so many are out, within two standard errors of
    240. At 70 % some are."""
    rule = Rule(certainty, RULE.most)
    found = [Ways([10.0] * 12, [4.0] * 12, 0.2, 0.2, seed).race(rule=rule) for seed in range(20)]
    out = sum(len(one.out) for one in found) / 240
    error = (1.0 - certainty) / 2.0 / 2.0
    assert out <= error + 2.0 * sqrt(error * (1.0 - error) / 240)
    assert out > 0.0 or certainty > 0.9


def test_who_is_worse_ends_where_it_fails_and_a_better_one_holds() -> None:
    ways = Ways([1.5, 3.0, 20.0, 6.0, 19.9], [4.0] * 5, 0.05, 0.02, 1)
    found = ways.race()
    assert set(found.out) == {0, 1, 3}
    for i, out in found.out.items():
        assert ways.edges[i] < out.value <= ways.edges[out.by]
        assert found.judged[i][out.value].verdict == "fails"
        assert found.judged[out.by][out.value].holds
    # Who is out is not run again.
    assert max(found.judged[0]) == found.out[0].value < max(found.judged[2])


def test_curves_that_cross_are_judged_where_one_of_them_fails() -> None:
    """The flat one is far worse at low rates, but holds at the highest."""
    ways = Ways([8.0, 50.0], [8.0, 0.2], 0.05, 0.02, 2)
    assert ways.value(1, 1.0, 0) > 10.0 * ways.value(0, 1.0, 0)
    assert set(ways.race().out) == {0}


def test_a_failure_that_the_pairs_do_not_confirm_ends_nobody() -> None:
    """Way 0 holds after 3 replicas; way 1 fails after 5, but is no worse in those that both have."""
    here = [[0.98, 0.9801, 0.9802], [0.9, 0.95, 1.2, 1.6, 1.6]]

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        return [Ran({TTFT.metric: here[ask.point.way][ask.replica]}) for ask in asks]

    def raced() -> Raced:
        ways: list[Any] = [partial(point, 0), partial(point, 1)]
        search = race(ways, 1.0, [TTFT], Rule(0.5, 5), between=(1.0, 1.0), most_times=1)
        found: Raced = drive([search], ran)[0]
        return found

    found = raced()
    assert found.judged[0][1.0].holds
    assert found.judged[1][1.0].verdict == "fails"
    assert found.out == {}
    here[1][:2] = [1.2, 1.25]
    assert set(raced().out) == {1}


@pytest.mark.parametrize("begin", [0.01, 1.0, 300.0])
def test_where_the_race_begins_does_not_matter(begin: float) -> None:
    ways = Ways([2.0, 10.0, 11.0, 30.0], [4.0] * 4, 0.05, 0.02, 3)
    assert set(ways.race(begin).out) == {0, 1, 2}


def test_shares_should_be_large_and_limits_that_all_keep_end_nobody() -> None:
    ways = Ways([2.0, 10.0, 30.0], [4.0] * 3, 0.05, 0.02, 3)
    assert set(ways.race(limits=[TPOT, SLO]).out) == {0, 1}
    assert ways.race(limits=[TPOT]).out == {}


def test_where_nothing_holds_the_race_soon_ends() -> None:
    ways = Ways([1e-9] * 9, [1.0] * 9, 0.0, 0.01, 4)
    assert ways.race().out == {}
    assert len(ways.asked) <= 9 * 3 * 7
    assert Ways([inf] * 9, [1.0] * 9, 0.0, 0.01, 4).race().out == {}


def test_too_few_requests_become_more_before_anyone_ends() -> None:
    """With fewer than eight times the requests, runs that keep the limit are of no steady state."""

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        found = []
        for ask in asks:
            at: Any = ask.point
            value = at.rate / (4.0, 40.0)[at.way] * (1.0 + 0.01 * (-1) ** ask.replica)
            found.append(Ran({TTFT.metric: value}, short=at.times < 8))
        return found

    ways: list[Any] = [partial(point, 0), partial(point, 1)]
    (found,) = drive([race(ways, 1.0, [TTFT], Rule(), between=BETWEEN, most_times=64)], ran)
    assert set(found.out) == {0}
    assert found.judged[1][1.0].point.times == 8
    (short,) = drive([race(ways, 1.0, [TTFT], Rule(), between=BETWEEN, most_times=4)], ran)
    assert short.out == {}


# -- plans -------------------------------------------------------------------------------------------------

BATCHES = [1, 2, 3, 4, 5, 6, 7, 8]


def plan_of(batches: Sequence[int], **more: Any) -> dict[str, Any]:
    strategy = {"kind": "dynamic_batching", "window_s": 0.01, "max_batch": 4}
    base = {**BASE, "devices": 1, "strategies": [strategy]}
    vary = {"strategies.0.max_batch": list(batches)}
    return {"base": base, "vary": vary, "certainty": 0.8, "replicas": 3, **more}


def of_race(plan: Plan) -> list[str]:
    """A plan's notes but for how many requests its points have."""
    return [note for note in plan.notes if not note.startswith("for a steady state")]


@slow
def test_a_plan_says_who_was_left_out_early(tmp_path: Path) -> None:
    found = planned(tmp_path, plan_of(BATCHES), "rate")
    first, *others = of_race(found)
    assert first.startswith("left out early: ")
    assert f"of {len(BATCHES)} ways of running" in first
    assert all("(limit " in note or "faster than" in note for note in others)
    # Every way has its points in the table; the answer is of those that were searched in full.
    assert {line["vary.strategies.0.max_batch"] for line in found.lines} == set(BATCHES)
    (group,) = found.result.groups
    ended = [one for one in group if one.best is None]
    assert str(len(ended)) in first
    assert all(one.next_worse is not None and one.next_worse.judged.verdict == "fails" for one in ended)


@thorough
@pytest.mark.parametrize("question", ["rate", "strategy"])
def test_a_plan_that_leaves_out_early_has_the_winner_of_one_that_does_not(
    question: str, tmp_path: Path
) -> None:
    early = planned(tmp_path, plan_of(BATCHES), question)
    full = planned(tmp_path, plan_of(BATCHES, leave_out_early=False), question)
    one, other = (found.result.winners[0] for found in (early, full))
    assert one is not None
    assert other is not None
    assert (one.alternative.settings, one.value) == (other.alternative.settings, other.value)
    assert of_race(full) == []
    assert len(early.lines) < len(full.lines)
    assert len(early.result.pairs) == len(full.result.pairs)


@slow
def test_few_ways_are_all_searched_in_full(tmp_path: Path) -> None:
    found = planned(tmp_path, plan_of([1, 8]), "rate")
    assert of_race(found) == []
    assert all(one.best is not None for one in found.result.groups[0])
