"""Plans: verdicts against their error, searches against brute force, staffing against Erlang C, and what the
command line says of plans that cannot be."""

import csv
import json
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from math import factorial, inf, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from simcore import cli
from simcore.input.files import InputError
from simcore.planning import alternatives as of_ways
from simcore.planning import answer, points, questions, searches
from simcore.planning import runs as planning_runs
from simcore.planning.alternatives import (
    Alternative,
    _faster,
    alternatives,
    at_load,
    fewest_servers,
    longer,
    with_field,
    with_load,
)
from simcore.planning.limits import LATENCY, Limit, limits, names, of_slo
from simcore.planning.plan import Plan, run
from simcore.planning.points import Benches, Point
from simcore.planning.questions import (
    PlanResult,
    Tried,
    _left_out_early,
    _nearest,
    difference,
    joules_per_token,
    pareto,
)
from simcore.planning.runs import Ask, Finished, Maker, Ran, Runner, simulated
from simcore.planning.searches import (
    ALONE,
    COARSEST,
    LITTLE_HOPE,
    OF_CHANCE,
    PAIRS,
    Highest,
    Judged,
    _by_chance,
    _by_tosses,
    _crossing,
    _hardly_keeps_up,
    _is_hopeless,
    _Looked,
    _told_apart,
    _used,
    drive,
    fewest,
    highest,
    judge,
    judged_by,
    too_few,
)
from simcore.planning.slo import presets
from simcore.planning.store import FILE, Store
from simcore.planning.verdict import Rule, cox_upper, hall_upper, interval, judged, quantile, skewness, upper
from simcore.planning.whatif import QUESTIONS, Linear, Logarithmic, load_plan
from simcore.scenario import parse_scenario
from simcore.studies.serving.figures import LATENCIES
from simcore.studies.serving.scenario import ServingScenario
from simcore.workload.spec import Workload
from tests.thorough import slow, thorough

SEED = 20261126
TTFT = Limit("ttft_p99_s", 1.0, at_most=True)


def silent(doing: str, done: int, total: int) -> None:
    del doing, done, total


# -- verdicts ----------------------------------------------------------------------------------------------


def verdict_of(rule: Rule, values: Sequence[float], limit: float) -> tuple[str, int]:
    for look in rule.looks:
        found = rule.judge(values[:look], limit, at_most=True)
        if found != "unsure":
            return found, look
    return "unsure", rule.most


@slow
@pytest.mark.parametrize("cv", [0.05, 0.5])
def test_a_limit_at_the_mean_is_seldom_said_to_hold(cv: float) -> None:
    """The limit is the mean itself, so that both sure verdicts are wrong: each at most 5 %, and of a skewed
    figure "holds" at most 7 % (Cox's bound is asymptotic), within four standard errors of 3,000 draws."""
    rng, rule, count = np.random.default_rng(SEED), Rule(0.95, 30), 3000
    sigma = sqrt(np.log1p(cv * cv))
    drawn = rng.lognormal(-sigma * sigma / 2.0, sigma, (count, rule.most)).tolist()
    said = [verdict_of(rule, values, 1.0)[0] for values in drawn]
    for verdict, allowed in (("holds", 0.05 if cv < 0.1 else 0.07), ("fails", 0.05)):
        error = sqrt(allowed * (1.0 - allowed) / count)
        assert said.count(verdict) / count <= allowed + 4.0 * error


def test_a_limit_far_away_is_sure_after_few_replicas() -> None:
    rng, rule = np.random.default_rng(SEED), Rule()
    near = rng.normal(1.0, 0.02, (200, 30)).tolist()
    assert {verdict_of(rule, values, 2.0)[0] for values in near} == {"holds"}
    assert {verdict_of(rule, values, 0.5)[0] for values in near} == {"fails"}
    assert np.mean([verdict_of(rule, values, 2.0)[1] for values in near]) < 5.0


def test_students_interval_is_that_of_the_books() -> None:
    """t(0.975, 4) = 2.776; the standard error of 1 .. 5 is sqrt(2.5 / 5)."""
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0], 0.95) or (0.0, 0.0)
    assert (high - low) / 2.0 == pytest.approx(2.776 * sqrt(0.5), rel=1e-3)
    assert (low + high) / 2.0 == pytest.approx(3.0)
    assert interval([1.0], 0.95) is None


def test_coxs_bound_of_equal_logarithms_is_their_mean() -> None:
    assert cox_upper([2.0, 2.0, 2.0], 3.0) == pytest.approx(2.0)
    # exp(m + v / 2) of logarithms 0 and 2: m = 1, v = 2.
    assert cox_upper([1.0, np.exp(2.0)], 0.0) == pytest.approx(np.exp(2.0))


@pytest.mark.parametrize("at_most", [True, False])
def test_a_point_whose_pairs_lie_far_beyond_a_limit_is_hopeless(at_most: bool) -> None:
    """The mean of 24 replicas at a lower value is 10. The first eight here lie 2 above their pairs, and so
    will the others. Without more replicas there, nothing is known about others here."""
    there = [10.0 + 0.1 * (i % 3 - 1) for i in range(24)]
    here = [value + 2.0 + 0.01 * (-1) ** i for i, value in enumerate(there[:PAIRS])]

    def hopeless(limit: float, known: Sequence[float]) -> bool:
        found = cast(Judged, SimpleNamespace(verdicts={"ttft_mean_s": "unsure"}, values=lambda _: here))
        below = cast(Judged, SimpleNamespace(values=lambda _: known))
        return _is_hopeless(found, below, [Limit("ttft_mean_s", limit, at_most)], Rule())

    far, other = (11.5, 12.5) if at_most else (12.5, 11.5)
    assert hopeless(far, there)
    assert not hopeless(other, there)
    assert not hopeless(far, there[:PAIRS])


def test_how_hopeless_a_point_is_goes_by_students_interval_of_its_pairs() -> None:
    """With one degree of freedom less than pairs: a limit between that bound and the next wider one."""
    rule = Rule(most=40)
    there = [1.0 + 0.05 * (-1) ** i for i in range(20)]
    here = [x + 0.3 + 0.01 * (i % 3) for i, x in enumerate(there[:PAIRS])]
    more = [a - b for a, b in zip(here, there, strict=False)]
    each = stdev(more) / sqrt(len(more))
    worst = fmean(there) + fmean(more) + rule.reach(there, at_most=True) * sqrt(len(there) / rule.most)
    bounds = [worst - quantile(rule.error, len(more) - less) * each for less in (1, 2)]
    limit = replace(TTFT, value=fmean(bounds))
    found, below = (
        Judged(point(1), tuple(Ran({TTFT.metric: x}) for x in values), "unsure", {TTFT.metric: "unsure"})
        for values in (here, there)
    )
    assert bounds[1] < bounds[0]
    assert _is_hopeless(found, below, [limit], rule)
    assert not _is_hopeless(found, below, [replace(limit, value=bounds[0] + 1e-6)], rule)


@pytest.mark.parametrize("at_most", [True, False])
def test_without_pairs_a_point_is_hopeless_by_the_interval_of_its_own_mean(at_most: bool) -> None:
    """What that leaves open, and how far from a limit a mean of all replicas has to be."""
    rule, sign = Rule(most=40), 1.0 if at_most else -1.0
    here = [1.0 + 0.05 * (-1) ** i for i in range(ALONE)]
    off = quantile(LITTLE_HOPE, ALONE - 1) * stdev(here) / sqrt(ALONE)
    reach = rule.reach(here, at_most=at_most) * sqrt(ALONE / rule.most)
    bound = fmean(here) + sign * (reach - off)
    found = cast(Judged, SimpleNamespace(verdicts={"m": "unsure"}, values=lambda _: here))
    few = cast(Judged, SimpleNamespace(verdicts={"m": "unsure"}, values=lambda _: here[:-1]))

    def hopeless(of: Judged, limit: float) -> bool:
        return _is_hopeless(of, few, [Limit("m", limit, at_most)], rule)

    assert hopeless(found, bound - sign * 1e-6)
    assert not hopeless(found, bound + sign * 1e-6)
    assert not hopeless(few, bound - sign)


def test_a_point_whose_queue_grows_in_most_runs_hardly_keeps_up() -> None:
    """In 13 of 21 by a chance of 0.192; in 12 by 0.332, too likely. In all of twenty: too few."""
    for growing, count, hardly in ((13, 21, True), (12, 21, False), (20, 20, False), (2, 21, False)):
        runs = tuple(Ran({}, growing=i < growing) for i in range(count))
        assert _hardly_keeps_up(Judged(point(1), runs, "unsure")) == hardly
    assert _by_tosses(6, 8) == 37 / 256


def ends_of(low: Sequence[float], high: Sequence[float], verdict: str = "unsure") -> _Looked:
    """What a search saw of a rate of 1 that holds and of one of 1.2 that does not, by TTFT."""
    names = {TTFT.metric: "holds"}, {TTFT.metric: verdict}
    tried = [
        Judged(point(1), tuple(Ran({TTFT.metric: x}) for x in values), cast(Any, each[TTFT.metric]), each)
        for values, each in zip((low, high), names, strict=True)
    ]
    return _Looked(dict(zip((1.0, 1.2), tried, strict=True)), {1.0: 1, 1.2: 1}, 1.0, 1.2)


@pytest.mark.parametrize("verdict", ["unsure", "fails"])
def test_ends_are_told_apart_by_a_share_of_what_chance_leaves_open(verdict: str) -> None:
    rule, low = Rule(most=40), [1.0 + 0.01 * (-1) ** i for i in range(PAIRS)]
    high = [x + 0.1 for x in low]
    reach = rule.reach(low, at_most=True)
    found = _told_apart(ends_of(low, high, verdict), [TTFT], rule)
    assert found == pytest.approx(OF_CHANCE * reach * log(1.2) / 0.1)
    assert 0.0 < found < COARSEST
    # A metric that the rate hardly moves, or not at all.
    for move in (1e-4, 0.0):
        assert _told_apart(ends_of(low, [x + move for x in low], verdict), [TTFT], rule) == COARSEST


def test_nothing_is_told_of_few_replicas_of_what_holds_and_of_other_requests() -> None:
    rule, low = Rule(most=40), [1.0 + 0.01 * (-1) ** i for i in range(PAIRS)]
    assert _told_apart(ends_of(low, low[:-1]), [TTFT], rule) == 0.0
    assert _told_apart(ends_of(low, low, "holds"), [TTFT], rule) == 0.0
    looked = ends_of(low, low)
    looked.times[1.2] = 2
    assert _told_apart(looked, [TTFT], rule) == 0.0


def test_a_point_is_hopeless_by_any_of_its_limits() -> None:
    """What holds of it, and what lies on its limit, says nothing of the others."""
    there, here = [0.5] * (PAIRS + 1), [0.5] * PAIRS
    figures = {"ttft_p99_s": "holds", "e2e_p99_s": "unsure", "slo_attainment": "unsure"}
    found = cast(Judged, SimpleNamespace(verdicts=figures, values=lambda _: here))
    below = cast(Judged, SimpleNamespace(values=lambda _: there))

    def hopeless(e2e_s: float, share: float) -> bool:
        late, long = Limit("ttft_p99_s", 0.25, at_most=True), Limit("e2e_p99_s", e2e_s, at_most=True)
        kept = Limit("slo_attainment", share, at_most=False)
        return _is_hopeless(found, below, [late, long, kept], Rule())

    assert not hopeless(0.5, 0.5)
    assert hopeless(0.25, 0.5)
    assert hopeless(0.5, 0.75)


def test_what_a_point_uses_of_a_limit_has_what_its_pairs_lack() -> None:
    """Its two replicas are 1 and 3; their pairs elsewhere, 2 and 4, are 2 below the mean of all there, 5."""
    here, there = (
        cast(Judged, SimpleNamespace(verdicts={"m": "unsure"}, values=lambda _, values=values: values))
        for values in ([1.0, 3.0], [2.0, 4.0, 6.0, 8.0])
    )
    limit, rule = Limit("m", 7.0, at_most=True), Rule()
    reach = rule.reach([2.0, 4.0, 6.0, 8.0], at_most=True) * sqrt(4 / rule.most)
    assert _used(here, limit, rule, there) == pytest.approx(log((2.0 + 2.0 + reach) / 7.0))
    reach = rule.reach([1.0, 3.0], at_most=True) * sqrt(2 / rule.most)
    assert _used(here, limit, rule) == pytest.approx(log((2.0 + reach) / 7.0))


@pytest.mark.parametrize(("replicas", "more"), [(3, True), (5, False), (8, False)])
def test_a_value_is_known_better_by_more_replicas_of_as_many_requests(replicas: int, more: bool) -> None:
    def judged_by(count: int) -> Judged:
        return cast(Judged, SimpleNamespace(runs=[None] * count))

    looked = _Looked(tried={2.0: judged_by(5)}, times={2.0: 1})
    assert looked.knows_more(2.0, 1, judged_by(replicas)) is more
    assert not looked.knows_more(2.0, 2, judged_by(replicas))
    assert not looked.knows_more(3.0, 1, judged_by(replicas))


def test_what_a_point_uses_of_a_limit_that_anything_keeps_is_nothing() -> None:
    """Of a share that is zero all of its limit is lacking; where zero is the limit nothing can be."""

    def used(value: float, limit: float) -> float:
        known = cast(Judged, SimpleNamespace(verdicts={"m": "unsure"}, values=lambda _: [value] * 3))
        return _used(known, Limit("m", limit, at_most=False), Rule())

    assert used(0.5, 0.0) == -inf
    assert used(0.0, 0.5) == inf
    assert used(0.25, 0.5) == pytest.approx(log(2.0))


def test_the_nearest_limit_is_that_of_which_most_is_used() -> None:
    """Half of 0.5 s, three quarters of a share of 0.8; neither a limit of zero nor a figure of zero says
    anything."""
    figures = {"ttft_p99_s": 0.25, "e2e_p99_s": 30.0, "slo_attainment": 0.96, "preemptions": 0.0}
    found = Judged(point(1), (Ran(figures),), "holds")
    half, most = Limit("ttft_p99_s", 0.5, at_most=True), Limit("e2e_p99_s", 40.0, at_most=True)
    share = Limit("slo_attainment", 0.72, at_most=False)
    assert found.used([half]) == pytest.approx(0.5)
    assert found.used([half, most]) == found.used([most, half, share]) == pytest.approx(0.75)
    assert found.used([share]) == pytest.approx(0.75)
    assert found.used([replace(half, value=0.0)]) == found.used([replace(share, value=0.0)]) == 0.0
    assert (
        found.used([Limit("preemptions", 2.0, at_most=True), Limit("preemptions", 2.0, at_most=False)]) == 0.0
    )


def test_given_runs_of_few_requests_are_judged_by_their_figures() -> None:
    """Only where a rate is to be kept up do too few requests for a steady state fail."""
    short = [Ran({TTFT.metric: 0.1}, short=True)] * 3
    assert judged_by(point(1), short, [TTFT], Rule()) == "holds"
    (kept_up,) = drive([judge(point(1), [TTFT], Rule(), steady=True)], lambda asks: short[: len(asks)])
    assert (kept_up.verdict, kept_up.short) == ("fails", True)


def test_a_verdict_is_by_chance_if_the_pairs_turn_it() -> None:
    """Three replicas at each of two limits; elsewhere eight are known, whose mean is another. What holds is
    doubted as soon as one limit would be broken, what fails only if each limit it fails by would be kept."""
    late, long = Limit("ttft_p99_s", 1.0, at_most=True), Limit("e2e_p99_s", 1.0, at_most=True)

    def of(verdict: Any, count: int, figure: float, more: Sequence[float] = (0.0, 0.0)) -> Judged:
        """Both have one figure; replicas beyond the third one have more of each."""
        each = [[figure + (i > 2) * one for one in more] for i in range(count)]
        runs = tuple(Ran({late.metric: a, long.metric: b}) for a, b in each)
        return Judged(point(1), runs, verdict, dict.fromkeys((late.metric, long.metric), verdict))

    holds, fails = of("holds", 3, 0.9), of("fails", 3, 1.1)
    for rest, turned in (((0.8, 0.8), True), ((0.8, 0.0), True), ((0.0, 0.8), True), ((0.0, 0.0), False)):
        assert _by_chance(holds, of("fails", 8, 2.0, rest), [late, long]) is turned
    for rest, turned in (((-0.8, -0.8), True), ((-0.8, 0.0), False), ((0.0, -0.8), False)):
        assert _by_chance(fails, of("holds", 8, 0.9, rest), [late, long]) is turned


def test_the_bound_of_two_values_is_students() -> None:
    """The standard error of 3 and 5 is 1. Values that are all equal have none."""
    assert upper([3.0, 5.0], 2.0) == pytest.approx(6.0)
    assert upper([2.5, 2.5, 2.5], 3.0) == 2.5


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [0.5, 0.6, 2.0, 2.1, 2.2], [-1.0, 0.0, 4.0]])
def test_a_bound_has_the_unit_of_its_values(values: list[float]) -> None:
    for unit in (0.25, 8.0, 1000.0):
        assert upper([unit * x for x in values], 3.0) == pytest.approx(unit * upper(values, 3.0))


def test_values_over_many_orders_have_no_bound() -> None:
    """Logarithms 0 and 20: m = 10, v = 200, and a quantile of 5 gives exp(110 + 5 sqrt(100 + 20000))."""
    assert cox_upper([1.0, np.exp(20.0)], 5.0) == inf


def test_equal_values_are_not_skewed() -> None:
    assert skewness([2.0] * 5) == 0.0
    assert skewness([1.0, 2.0, 3.0]) == 0.0
    # By hand: deviations -1, -1, 2 with a standard deviation of the root of 3.
    assert skewness([1.0, 1.0, 4.0]) == pytest.approx(6.0 / 3.0**1.5 * 3.0 / 2.0)


def test_halls_bound_without_skewness_is_students() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert hall_upper(values, 2.0) == pytest.approx(3.0 + 2.0 * sqrt(0.5))
    # A long tail to the right raises the bound by more than Student's, one to the left by less.
    right, left = [1.0, 1.0, 1.0, 1.0, 6.0], [4.0, 4.0, 4.0, 4.0, -1.0]
    half = 2.0 * stdev(right) / sqrt(5.0)
    assert hall_upper(right, 2.0) - 2.0 > half
    assert hall_upper(left, 2.0) - 3.0 < half


@slow
def test_figures_that_no_lognormal_fits_hold_where_they_do() -> None:
    """Values of a gamma distribution with a standard deviation of 1.4 means: their logarithms reach far to
    the left. At a limit that is the mean "holds" is said of at most 5 %, within four standard errors; at 1.3
    means of a tenth at least, where Cox's bound alone says it hardly ever."""
    rng, rule, count = np.random.default_rng(SEED), Rule(0.95, 100), 400
    drawn = rng.gamma(0.5, 2.0, (count, rule.most)).tolist()
    at_mean = sum(verdict_of(rule, values, 1.0)[0] == "holds" for values in drawn) / count
    assert at_mean <= 0.05 + 4.0 * sqrt(0.05 * 0.95 / count)
    held = sum(verdict_of(rule, values, 1.3)[0] == "holds" for values in drawn) / count
    coxs = sum(cox_upper(values, 2.0) < 1.3 for values in drawn) / count
    assert held > 0.1 > coxs


@slow
def test_shares_below_one_hold_no_more_often_than_promised() -> None:
    """What a share lacks to one is skewed: at a limit that is its mean "holds" is said of at most 7 %, within
    four standard errors; of three replicas that all keep everything nothing is said yet."""
    rng, rule, count = np.random.default_rng(SEED), Rule(0.95, 100), 1000
    sigma = sqrt(np.log1p(0.25))
    drawn = 1.0 - 0.02 * rng.lognormal(-sigma * sigma / 2.0, sigma, (count, rule.most))
    held = 0
    for values in drawn.tolist():
        said = (rule.judge(values[:look], 0.98, at_most=False) for look in rule.looks)
        held += next((one for one in said if one != "unsure"), "unsure") == "holds"
    assert held / count <= 0.07 + 4.0 * sqrt(0.07 * 0.93 / count)
    assert rule.judge([1.0] * 3, 0.99, at_most=False) == "unsure"
    assert rule.judge([1.0] * 8, 0.99, at_most=False) == "holds"


def test_equal_values_are_sure_and_single_ones_never() -> None:
    assert judged([1.0, 1.0], 1.0, 0.01, at_most=True) == "holds"
    assert judged([1.0, 1.0], 0.9, 0.01, at_most=True) == "fails"
    assert judged([0.9, 0.9], 0.95, 0.01, at_most=False) == "fails"
    assert judged([1.0], 5.0, 0.01, at_most=True) == "unsure"


def test_errors_of_all_looks_add_up_to_no_more_than_promised() -> None:
    for certainty in (0.8, 0.95, 0.99):
        for most in (2, 3, 4, 30, 100):
            rule = Rule(certainty, most)
            assert rule.looks[-1] == most
            assert sum(rule.error_at(look) for look in rule.looks) < 1.0 - certainty


# -- limits and files --------------------------------------------------------------------------------------


def test_limits_go_by_what_is_better() -> None:
    found = limits({"ttft_p99_s": 0.5, "slo_attainment": 0.99, "max_kv_share": 0.9, "itl_p99.9_s": 0.1}, "x")
    assert [limit.at_most for limit in found] == [True, False, True, True]
    assert of_slo({"ttft_s": 0.5, "tpot_s": None, "e2e_s": 3.0}) == {"ttft_p99_s": 0.5, "e2e_p99_s": 3.0}
    # A share has both ends.
    assert [one.value for one in limits({"slo_attainment": 1.0, "max_kv_share": 0.0}, "x")] == [1.0, 0.0]
    with pytest.raises(InputError, match=r"x: ttft_p98_s: no such metric.*ttft_p9"):
        limits({"ttft_p98_s": 1.0}, "x")


def test_metrics_are_listed_in_order() -> None:
    every = names(["b", "a"])
    assert every == [*names(), *sorted(name for name in every if name.startswith("tenant."))]
    assert names() == sorted(names())


@pytest.mark.parametrize("name", ["slo_attainment", "tenant.a.slo_attainment", "max_kv_share", "utilisation"])
def test_a_share_is_at_most_one(name: str) -> None:
    assert limits({name: 1.0}, "x", ["a"])[0].value == 1.0
    with pytest.raises(InputError, match="a share from 0 to 1 is needed"):
        limits({name: 1.5}, "x", ["a"])


def test_each_preset_names_known_metrics_and_its_source() -> None:
    known = set(names())
    assert presets()
    for preset in presets().values():
        assert preset.source
        assert preset.limits.keys() <= known


def test_ranges_have_both_ends_and_stay_whole() -> None:
    assert Linear(range=[1, 4], points=4).values() == [1, 2, 3, 4]
    assert Linear(range=[0.0, 1.0], points=3).values() == [0.0, 0.5, 1.0]
    assert Logarithmic(log=[1, 64], points=7).values() == [1, 2, 4, 8, 16, 32, 64]
    found = Logarithmic(log=[0.5, 2.0], points=3).values()
    assert found == pytest.approx([0.5, 1.0, 2.0])


BASE: dict[str, Any] = {
    "name": "small",
    "study": "serving",
    "device": "h200-sxm",
    "model": "tiny-llama",
    "profile": "none",
    "overheads": {"launch_s": 2e-3},
    "workload": {
        "requests": 60,
        "arrivals": {"kind": "poisson", "rate_per_s": 200.0},
        "prompt_tokens": {"kind": "uniform", "low": 5, "high": 90},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 9},
    },
    "strategies": [{"kind": "continuous_batching"}],
    "slo": {"ttft_s": 0.05, "e2e_s": 0.2},
}


ON_ONE = {"kind": "continuous_batching", "ranks": 1}
FEW_AT_A_TIME = {**ON_ONE, "max_sequences": 8}


def written(folder: Path, document: Any, name: str = "plan.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def planned(folder: Path, document: Any, question: str | None = None, jobs: int = 1) -> Plan:
    return run(load_plan(written(folder, document), question), jobs=jobs, progress=silent)


def test_values_are_put_together_as_asked(tmp_path: Path) -> None:
    vary = {"seed": [1, 2, 3], "devices": [1, 2, 4]}

    def settings(**more: Any) -> list[dict[str, Any]]:
        return list(load_plan(written(tmp_path, {"base": BASE, "vary": vary, **more})).settings(0))

    assert len(settings()) == 9
    assert settings(together="zip") == [
        dict(zip(vary, pair, strict=True)) for pair in zip(*vary.values(), strict=True)
    ]
    sampled = {
        "base": BASE,
        "vary": {
            "seed": {"range": [0, 99], "points": 2},
            "workload.arrivals.rate_per_s": {"log": [1.0, 100.0], "points": 2},
        },
        "together": "latin_hypercube",
        "points": 10,
    }
    found = list(load_plan(written(tmp_path, sampled)).settings(3))
    # Each tenth of either range is hit once.
    assert sorted(int(each["seed"] / 99.0 * 9.999) for each in found) == list(range(10))
    rates = [np.log10(each["workload.arrivals.rate_per_s"]) / 2.0 for each in found]
    assert sorted(int(10 * rate) for rate in rates) == list(range(10))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vary": {"devcies": [1, 2]}}, "devcies"),
        ({"vary": {"devices": {"range": [1, 2]}}}, "points"),
        ({"vary": {"devices": []}}, "vary"),
        ({"vary": {"devices": [1, 2, 2]}}, "has 2 twice"),
        ({"vary": {"replicas": [1, 2]}}, "vary.replicas: changes no point"),
        ({"base": {**BASE, "slo": {}}, "constraints": {"slo_attainment": 0.9}}, "the base has none"),
        ({"constraints": {"ttft_p99": 1.0}}, "ttft_p99_s"),
        ({"slo": "mlperf/llama2"}, "mlperf/llama2-70b/server"),
        ({"slo": "mlperf/llama2-70b/server", "constraints": {"ttft_p99_s": 1.0}}, "slo: is given beside"),
        ({"together": "zip", "vary": {"devices": [1, 2], "seed": [1, 2, 3]}}, "zip needs"),
        ({"together": "latin_hypercube", "vary": {"devices": [1, 2]}}, "points: is missing"),
        ({"points": 4}, "latin_hypercube only"),
        ({"vary": {"seed": {"range": [1], "points": 3}}}, "[first, last]"),
        ({"vary": {"seed": {"log": [0, 3], "points": 3}}}, "above 0"),
        ({"vary": {"devices": [1, 2]}}, "is what question devices searches"),
        ({"vary": {"workload.arrivals.rate_per_s": [1.0]}, "question": "rate"}, "question rate searches"),
        ({"vary": {"device": ["h200-xsm"]}}, "vary.device: "),
        ({"constraints": {"ttft_p99_s": -1.0}}, "a number above 0"),
        ({"constraints": {"server_starts": -1}}, "server_starts: is -1; 0 or more is needed"),
        ({"constraints": {"goodput_per_s": 0}}, "goodput_per_s: is 0; a number above 0 is needed"),
        ({"base": {**BASE, "devices": 0}}, "devices: is 0; a whole number, 1 or more, is needed"),
        ({"base": {**BASE, "devices": [1, "two"]}}, "devices: is 'two'; a whole number, 1 or more"),
        ({"base": {**BASE, "slo": {"ttft_s": "soon"}}}, "slo.ttft_s: is 'soon'; a number above 0 is needed"),
        ({"constraints": {"slo_attainment": 2.0}}, "a share from 0 to 1"),
        ({"certainty": 1.0}, "certainty"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": 1}, "replicas: is 1; question devices needs 2 to 10000"),
        (
            {"replicas": 1, "question": "grid"},
            "replicas: is 1; a grid with limits (constraints, slo) needs 2",
        ),
        (
            {"replicas": 1, "question": "grid", "sensitivity": True, "base": {**BASE, "slo": {}}},
            "replicas: is 1; with sensitivity 2 to 10000 are needed",
        ),
        ({"objective": ["fastest"]}, "objective: is 'fastest'; fewest_devices, "),
        ({"objective": "lowest_enrgy"}, "objective: is 'lowest_enrgy'; fewest_devices, "),
        ({"objective": []}, "objective: is []; fewest_devices, "),
        ({"question": "price"}, "question"),
        ({"base": "nowhere.yaml"}, "nowhere.yaml"),
        ({"base": {**BASE, "slo": {}}, "question": "rate"}, "constraints: are missing"),
        ({"base": {**BASE, "study": "decode"}, "question": "rate"}, "study"),
        ({"base": {**BASE, "study": ["serving"]}}, "study: is ['serving']"),
        ({"question": "cost"}, "cost_per_hour.h200-sxm: is missing"),
        ({"question": "cost", "cost_per_hour": {"h2000": 3.0}}, "h2000: is no device of this plan"),
        (
            {
                "question": "cost",
                "cost_per_hour": {"h2000": 3.0},
                "vary": {"device": ["h200-sxm", "a100-sxm-80gb"]},
            },
            "did you mean 'h200-sxm'? (allowed: a100-sxm-80gb, h200-sxm)",
        ),
        ({"question": "devices", "over": "strategies.0.slots"}, "slots"),
        ({"question": "devices", "between": [4, 1]}, "between"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    change: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, {"base": BASE, "question": "devices", **change})
    result = CliRunner().invoke(cli.app, ["plan", str(path)])
    assert isinstance(result.exception, InputError)
    assert says in str(result.exception)
    assert len(str(result.exception)) < 400
    assert [each.name for each in tmp_path.iterdir()] == ["plan.yaml"]


# -- searches ----------------------------------------------------------------------------------------------


def point(number: float, times: int = 1) -> Any:
    """What stands for a point in a search: its figure is all that is read."""
    return SimpleNamespace(number=number, times=times, same_in_every_run=False)


def answered(figure: Any, noise: float = 0.0) -> Any:
    """Runs that have a figure by the point's number, the same noise in each replica at every number."""

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        asked.extend(asks)
        return [
            Ran({TTFT.metric: figure(ask.point.number) * (1.0 + noise * (-1) ** ask.replica)}) for ask in asks
        ]

    asked: list[Ask] = []
    ran.asked = asked  # type: ignore[attr-defined]
    return ran


def test_the_fewest_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(100):
        need = int(rng.integers(1, 200))
        ran = answered(lambda number, need=need: need / number - 1e-9)
        (found,) = drive([fewest(point, (1, 128), [TTFT], Rule())], ran)
        assert found.number == (need if need <= 128 else None)
        # A doubling and a halving for each binary digit.
        assert len(found.judged) <= 2 * need.bit_length() + 1


def test_a_search_ends_where_another_one_is_as_good() -> None:
    ran = answered(lambda number: 40.0 / number)
    (found,) = drive([fewest(point, (1, 1000), [TTFT], Rule(), lambda: 20)], ran)
    assert (found.number, found.cut) == (None, 20)
    assert max(found.judged) == 19
    (whole,) = drive([fewest(point, (1, 30), [TTFT], Rule(), lambda: 50)], ran)
    assert (whole.number, whole.cut) == (None, None)
    assert max(whole.judged) == 30


def test_the_highest_rate_is_within_its_tolerance() -> None:
    rng = np.random.default_rng(SEED)
    for _ in range(100):
        edge, begin = (float(10.0 ** rng.uniform(-3, 4)) for _ in range(2))
        ran = answered(lambda number, edge=edge: number / edge, 1e-4)
        search = highest(point, begin, [TTFT], Rule(), tolerance=0.02, between=(1e-6, 1e6))
        (found,) = drive([search], ran)
        assert found.holds is not None
        assert edge / 1.025 <= found.holds <= edge


def test_a_point_near_the_edge_is_left_unsure_when_more_would_move_it_little() -> None:
    """Noise of a fifth, and a slope of eight: from some 30 replicas on more of them move the answer by less
    than 1 %, though a point within half a percent of the edge stays unsure after 100. The answer keeps the
    tolerance twice, of the bracket and of what was left."""
    edge = 7.3
    ran = answered(lambda number: (number / edge) ** 8, 0.2)
    (found,) = drive([highest(point, 1.0, [TTFT], Rule(most=100), tolerance=0.01, between=(1e-6, 1e6))], ran)
    assert found.holds is not None
    assert edge / 1.021 <= found.holds <= edge
    assert max(len(one.runs) for one in found.judged.values()) < 100
    assert any(one.verdict == "unsure" for one in found.judged.values())
    (alone,) = drive([judge(point(edge * 0.999), [TTFT], Rule(most=100))], ran)
    assert (alone.verdict, len(alone.runs)) == ("unsure", 100)


def test_what_holds_at_last_has_had_34_replicas() -> None:
    """Three would do where figures hardly vary; a slow one may be missing among so few."""
    for most, wanted in ((100, 34), (20, 20)):
        search = highest(point, 1.0, [TTFT], Rule(most=most), tolerance=0.01, between=(1e-6, 1e6))
        (found,) = drive([search], answered(lambda number: number / 7.3, 1e-4))
        assert found.holds is not None
        assert len(found.judged[found.holds].runs) == wanted
        assert min(len(one.runs) for one in found.judged.values() if one.holds) == 3


@thorough
def test_a_rate_that_too_few_requests_show_gets_more(tmp_path: Path) -> None:
    """All 60 requests at once are served in time: that says nothing of such a rate, kept up. The answer is
    that of many requests, within the 5 % that the longer run's percentiles differ by."""
    one = {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": 1}]}
    many = {**one, "workload": {**one["workload"], "requests": 480}}
    few, enough = (planned(tmp_path, {"base": base, "replicas": 5}, "rate") for base in (one, many))
    rates = [next(line["rate_per_s"] for line in plan.lines if line["best"]) for plan in (few, enough)]
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
    assert max(line["requests"] for line in few.lines) > 60


@pytest.mark.parametrize("power", [1.0, 4.0, 100.0])
@pytest.mark.parametrize("edge", [4.1, 4.7, 5.3, 7.9])
def test_near_the_edge_a_line_says_where_to_look(edge: float, power: float) -> None:
    """Two points bracket by a factor of two, two halvings come within the factor of 1.3, and of a power law a
    line knows the edge: one point there and two to close the bracket, where halvings take five."""
    ran = answered(lambda number: (number / edge) ** power, 1e-4)
    search = highest(point, 4.0, [TTFT], Rule(), tolerance=0.01, between=(1e-6, 1e6))
    (found,) = drive([search], ran)
    assert found.holds is not None
    assert edge / 1.0105 <= found.holds <= edge
    assert len(found.judged) <= 2 + 2 + 3


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_in_another_unit_the_same_points_are_looked_at(unit: float) -> None:
    ran = answered(lambda number: unit * (number / 4.7) ** 3.0, 1e-4)
    limit = replace(TTFT, value=unit * TTFT.value)
    search = highest(point, 4.0, [limit], Rule(), tolerance=0.01, between=(1e-6, 1e6))
    (found,) = drive([search], ran)
    assert found.holds is not None
    assert 4.7 / 1.0105 <= found.holds <= 4.7
    assert len(found.judged) <= 2 + 2 + 3


@pytest.mark.parametrize("fault", ["a law is broken", ""])
def test_what_fails_without_a_figure_ends_a_search_too(fault: str) -> None:
    """Above 5 runs break off, or have none of the limited figure; replicas differ below."""

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        found = []
        for ask in asks:
            number: Any = ask.point.number  # type: ignore[attr-defined]
            value = (number / 8.0) ** 2.0 * (1.0 + 0.01 * (-1) ** ask.replica)
            found.append(Ran({TTFT.metric: value}) if number <= 5.0 else Ran({}, fault=fault))
        return found

    (found,) = drive(
        [highest(point, 1.0, [TTFT], Rule(), tolerance=0.01, between=(1e-6, 1e6))],
        ran,
    )
    assert found.holds is not None
    assert found.fails is not None
    assert 5.0 / 1.0105 <= found.holds <= 5.0 < found.fails


def test_a_verdict_that_was_doubted_is_not_taken_again_from_fewer_replicas() -> None:
    """At 2 a point holds after 3 replicas and fails after 8; either is by chance beside its neighbour, which
    has had more of them: without a memory the search would go from one to the other for ever."""
    lucky = [0.98, 0.9801, 0.9802, *[1.45] * 5, *[1.0] * 5]
    known = {1.0: [*[1.4, 0.6] * 4, *[0.2] * 5], 2.0: lucky, 4.0: [0.9, 1.0, 1.1, *lucky[3:]]}
    asked = 0

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        nonlocal asked
        asked += len(asks)
        assert asked < 1000
        return [
            Ran({TTFT.metric: known.get(ask.point.number, [1.5] * 99)[ask.replica]})  # type: ignore[attr-defined]
            for ask in asks
        ]

    search = highest(point, 1.0, [TTFT], Rule(0.5, 13), tolerance=1.0, between=(1.0, 4.0))
    (found,) = drive([search], ran)
    assert found.holds == 1.0
    assert len(found.judged[2.0].runs) == 13


FIRST_BAD = [0.8, 0.95, 1.1, *(0.3 + 0.01 * i for i in range(27))]


def test_what_other_requests_show_makes_no_verdict_doubtful() -> None:
    """At 1 three unlucky replicas come before five good ones. At 2 twice as many requests are needed, of
    which three replicas are sure to fail: they are no pairs of those at 1, and none is asked for again."""
    asked: list[Ask] = []

    def run_of(ask: Ask) -> Ran:
        asked.append(ask)
        one: Any = ask.point
        if one.number < 1.5:
            return Ran({TTFT.metric: FIRST_BAD[ask.replica]})
        return Ran({TTFT.metric: 0.1 if one.times == 1 else 1.1 + 1e-3 * ask.replica}, short=one.times == 1)

    search = highest(point, 1.0, [TTFT], Rule(), tolerance=1.0, between=(0.1, 10.0))
    (found,) = drive([search], lambda asks: [run_of(ask) for ask in asks])
    assert (found.holds, found.fails) == (1.0, 2.0)
    assert len(found.judged[1.0].runs) > 3
    there: list[Any] = [ask.point for ask in asked]
    assert [one.number for one in there if one.number > 1.5 and one.times == 2] == [2.0] * 3


LUCKY, UNLUCKY = [0.98, 0.9801, 0.9802], [1.02, 1.0201, 1.0202]


@pytest.mark.parametrize(
    ("known", "tolerance", "tried", "holds"),
    [
        # 1 holds by three lucky replicas, which their pairs at 2 show to be so: then nothing holds yet.
        (
            {0.5: [0.1], 1.0: [*LUCKY, 1.45], 2.0: [0.9, 1.0, 1.1, 1.45], 4.0: [9.0]},
            1.0,
            {0.5, 1.0, 2.0},
            0.5,
        ),
        # 2 fails by three unlucky ones, which their pairs in between show to be so: then nothing fails yet.
        (
            {1.0: [0.99, 0.9901, 0.9902, 0.99], 1.42: [1.1, 1.0, 0.9, 0.55], 2.0: [*UNLUCKY, 0.55]},
            0.42,
            {1.0, 1.42, 2.0, 2.84, 4.0},
            2.0,
        ),
    ],
)
def test_a_search_whose_end_was_chance_goes_on_beyond_it(
    known: dict[float, list[float]], tolerance: float, tried: set[float], holds: float
) -> None:
    """The last figure given is that of all further replicas; what is not given takes far too long."""

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        points: list[Any] = [ask.point for ask in asks]
        every = [next((known[v] for v in known if v == pytest.approx(one.number)), [9.0]) for one in points]
        return [
            Ran({TTFT.metric: values[min(ask.replica, len(values) - 1)]})
            for ask, values in zip(asks, every, strict=True)
        ]

    search = highest(point, 1.0, [TTFT], Rule(0.5, 13), tolerance=tolerance, between=(0.01, 100.0))
    (found,) = drive([search], ran)
    assert found.holds == holds
    assert sorted(found.judged) == pytest.approx(sorted(tried))


def test_where_lines_creep_halves_go_on() -> None:
    """A metric that is flat up to the edge and leaps there: lines alone would go on by 1 % at a time."""
    edge = 5.2
    ran = answered(lambda number: 0.99 if number < edge else 50.0, 1e-4)
    search = highest(point, 4.4, [TTFT], Rule(), tolerance=0.001, between=(1e-6, 1e6))
    (found,) = drive([search], ran)
    assert found.holds is not None
    assert edge / 1.0011 <= found.holds <= edge
    # Nine halvings from the factor of two, and two lines for every one of them.
    assert len(found.judged) <= 2 + 9 * 3


@pytest.mark.parametrize("power", [0.5, 2.0, 8.0])
def test_where_means_cross_is_told_beside_what_is_sure(power: float) -> None:
    """Noise of a quarter, whose mean is nothing: what is sure lies below the edge, by much where a metric is
    flat; the means cross at the edge, within the half percent that a line between neighbours leaves."""
    edge = 7.3
    ran = answered(lambda number: (number / edge) ** power, 0.25)
    search = highest(point, 1.0, [TTFT], Rule(most=100), tolerance=0.01, between=(1e-6, 1e6))
    (found,) = drive([search], ran)
    assert found.holds is not None
    assert found.likely == pytest.approx(edge, rel=0.005)
    assert found.holds <= found.likely


def test_where_means_cross_is_told_by_runs_of_one_length() -> None:
    """Shorter runs at 1.06 were within the limit, where those as long as at 1.00 are over it from 1.02 on; if
    none as long is over it, a shorter one that is counts, and says nothing if it is not."""
    values = {1.0: (0.98, 4), 1.01: (0.99, 4), 1.03: (1.01, 4), 1.06: (0.97, 2), 1.2: (1.18, 4)}

    def crossing(left_out: set[float]) -> float:
        looked = _Looked(low=1.0)
        for value, (mean, times) in values.items():
            if value not in left_out:
                runs = tuple(Ran({TTFT.metric: mean}) for _ in range(3))
                looked.tried[value] = Judged(point(value), runs, "holds" if value == 1.0 else "unsure")
                looked.times[value] = times
        (found,) = drive([_crossing(point, looked, [TTFT], Rule())], answered(lambda number: number - 0.02))
        return float(found)

    assert crossing(set()) == pytest.approx(1.02, rel=0.001)
    assert crossing({1.03, 1.2}) == 1.0
    values[1.06] = (1.04, 2)
    assert crossing({1.03, 1.2}) == pytest.approx(1.02, rel=0.002)


@pytest.mark.parametrize(("beyond", "by"), [(1.01, 1.4), (1.2, 1.2)])
def test_where_means_cross_few_replicas_yield_to_many_beyond(beyond: float, by: float) -> None:
    """Eight replicas at 1.2 are over the limit by chance, a hundred at 1.4 by less: their line counts. It
    does not if the hundred are farther over the limit than the lower end is below it."""
    means = {1.0: (0.98, 100), 1.2: (1.02, 8), 1.4: (beyond, 100)}
    looked = _Looked(low=1.0, times=dict.fromkeys(means, 1))
    for value, (mean, count) in means.items():
        verdict: Any = "holds" if value == 1.0 else "unsure"
        runs = tuple(Ran({TTFT.metric: mean}) for _ in range(count))
        looked.tried[value] = Judged(point(value), runs, verdict)
    steep = log(means[by][0] / 0.98) / log(by)
    ran = answered(lambda number: 0.98 * number**steep)
    (found,) = drive([_crossing(point, looked, [TTFT], Rule())], ran)
    assert found == pytest.approx(0.98 ** (-1.0 / steep), rel=1e-6)


def test_a_queue_that_grows_in_some_runs_fails_only_if_chance_does_not_do_so() -> None:
    """With 0.2 and 0.8 of all runs growing both verdicts are sure after some; three alone say nothing."""
    for share, verdict in ((0.2, "holds"), (0.8, "fails")):
        rng = np.random.default_rng(SEED)
        grows = rng.random(30) < share

        def ran(asks: Sequence[Ask], grows: Any = grows) -> list[Ran]:
            return [Ran({TTFT.metric: 0.1}, growing=bool(grows[ask.replica])) for ask in asks]

        (found,) = drive([judge(point(1), [TTFT], Rule())], ran)
        assert (found.verdict, 3 < len(found.runs) <= 30) == (verdict, True)


@pytest.mark.parametrize(("short", "of", "verdict"), [(1, 2, "holds"), (1, 3, "holds"), (2, 3, "fails")])
def test_too_few_requests_in_most_runs_fail(short: int, of: int, verdict: str) -> None:
    def ran(asks: Sequence[Ask]) -> list[Ran]:
        return [Ran({TTFT.metric: 0.1}, short=ask.replica < short) for ask in asks]

    (found,) = drive([judge(point(1), [TTFT], Rule(0.95, of), steady=True)], ran)
    assert (found.verdict, len(found.runs)) == (verdict, of)


@pytest.mark.parametrize(
    ("filling", "short"),
    [
        # Three need a mean of 6.96 standard errors for one in a hundred; here five of them, and ten.
        ([0.1 - 0.02 * sqrt(3), 0.1, 0.1 + 0.02 * sqrt(3)], False),
        ([0.1 - 0.01 * sqrt(3), 0.1, 0.1 + 0.01 * sqrt(3)], True),
        ([0.019, 0.02, 0.0209], False),
        ([-0.1, -0.1, -0.1], False),
        ([0.5], True),
        ([0.01], False),
        ([0.1, 0.1], True),
    ],
)
def test_a_server_that_fills_for_sure_has_too_few_requests(filling: list[float], short: bool) -> None:
    """A single run stands for all."""
    runs = [Ran({TTFT.metric: 0.1}, filling=each) for each in filling]
    assert too_few(runs) is short
    assert judged_by(point(1), runs, [TTFT], Rule(), steady=True) == ("fails" if short else "holds")
    assert judged_by(point(1), runs, [TTFT], Rule()) == "holds"


@pytest.mark.parametrize("long", [1, 2])
def test_what_fills_in_long_runs_is_overloaded(long: int) -> None:
    """More requests would show the same; that it fills a little may be the draws of few replicas."""
    slightly = [Ran({TTFT.metric: 0.1}, filling=0.1, long=True)] * 2
    assert judged_by(point(1), slightly, [TTFT], Rule(most=2), steady=True) == "holds"
    runs = [Ran({TTFT.metric: 0.1}, filling=0.3, long=i < long) for i in range(2)]
    (found,) = drive([judge(point(1), [TTFT], Rule(most=2), steady=True)], lambda asks: runs)
    assert (found.verdict, found.short) == ("fails", long < 2)
    assert ("faster than they are answered" in found.why) == (long == 2)
    assert judged_by(point(1), runs, [TTFT], Rule(most=2)) == "holds"


@pytest.mark.parametrize(
    ("errors", "most", "verdict"),
    [
        pytest.param(
            10.0, 30, "unsure", id="one in a hundred needs 6.96 standard errors, one in a thousand 22.3"
        ),
        pytest.param(30.0, 30, "fails", id="surely"),
        pytest.param(10.0, 3, "fails", id="nobody looks on"),
        pytest.param(5.0, 3, "holds", id="by chance"),
    ],
)
def test_what_may_fill_by_chance_is_looked_at_again(errors: float, most: int, verdict: str) -> None:
    apart = 0.3 * sqrt(3) / errors
    runs = [Ran({TTFT.metric: 0.1}, filling=0.3 + i * apart, long=True) for i in (-1, 0, 1)]
    assert judged_by(point(1), runs, [TTFT], Rule(most=most), steady=True) == verdict


@slow
@pytest.mark.parametrize(
    ("question", "kind"),
    [("devices", "poisson"), pytest.param("rate", "poisson", marks=thorough), ("rate", "constant")],
)
def test_how_many_requests_a_scenario_has_does_not_move_an_answer(
    tmp_path: Path, question: str, kind: str
) -> None:
    """Servers near saturation fill for long: in runs of 50 requests some do that do not in longer ones."""
    load = {**BASE["workload"], "arrivals": {"kind": kind, "rate_per_s": 1000.0}}
    if kind == "constant":
        load |= {"prompt_tokens": {"kind": kind, "value": 48}, "output_tokens": {"kind": kind, "value": 6}}
    found = []
    for requests in (50, 800):
        base = {**BASE, "workload": {**load, "requests": requests}, "strategies": [FEW_AT_A_TIME]}
        asked = {"base": base, "constraints": {"ttft_p99_s": 0.05}, "replicas": 13, "question": question}
        (line,) = (line for line in planned(tmp_path, asked).lines if line["best"])
        found.append(line["devices" if question == "devices" else "rate_per_s"])
    assert found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize(("growing", "verdict"), [(6, "holds"), (7, "unsure")])
def test_a_queue_that_grows_in_few_runs_may_do_so_by_chance(growing: int, verdict: str) -> None:
    """Of 21 fair coins 15 or more are heads in 3.9 % of all cases, and 14 or more in 9.5 %: one in twenty
    lies between them. After the last look most runs decide."""
    runs = [Ran({TTFT.metric: 0.1}, growing=i < growing) for i in range(21)]
    assert judged_by(point(1), runs, [TTFT], Rule()) == verdict
    assert judged_by(point(1), runs, [TTFT], Rule(most=21)) == "holds"


def test_at_most_1024_times_as_many_requests_are_taken_for_a_steady_state() -> None:
    """As the documents say."""
    ran: dict[int, None] = {}

    def made(asks: Sequence[Ask]) -> list[Ran]:
        ran.update({cast(Any, ask.point).times: None for ask in asks})
        return [Ran({TTFT.metric: 0.1}, short=True) for _ in asks]

    drive([highest(point, 1.0, [TTFT], Rule(), tolerance=0.02, between=(1.0, 1.0))], made)
    assert list(ran) == [2**i for i in range(11)]


def test_what_is_the_same_in_every_run_is_searched_by_one_run_of_each_point() -> None:
    """Also in between, where above the edge there is no figure; a share that may be zero limits nothing."""
    asked: list[Ask] = []

    def at(number: float, times: int) -> Any:
        return SimpleNamespace(number=number, times=times, same_in_every_run=True)

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        asked.extend(asks)
        late = [cast(Any, ask.point).number / 8.0 for ask in asks]
        return [
            Ran({TTFT.metric: x, "slo_attainment": 0.5})
            if x <= 5.0 / 8.0
            else Ran({}, fault="a law is broken")
            for x in late
        ]

    limited = [TTFT, Limit("slo_attainment", 0.0, at_most=False)]
    (found,) = drive([highest(at, 1.0, limited, Rule(), tolerance=0.05, between=(1e-3, 1e3))], ran)
    assert found.holds is not None
    assert 5.0 / 1.051 <= found.holds <= found.likely <= 5.0 * 1.05
    assert {ask.replica for ask in asked} == {0}


def test_requests_that_never_suffice_end_the_search() -> None:
    """However many requests come, they are too few from 5 on: that fails, by its own words."""
    most: list[int] = []

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        points: list[Any] = [ask.point for ask in asks]
        most.extend(one.times for one in points)
        return [Ran({TTFT.metric: 0.1}, short=one.number > 5.0) for one in points]

    search = highest(point, 1.0, [TTFT], Rule(), tolerance=0.02, between=(1e-3, 1e3), most_times=8)
    (found,) = drive([search], ran)
    assert found.holds == pytest.approx(5.0, rel=0.021)
    assert max(most) == 8
    assert "too few requests" in found.judged[min(v for v in found.judged if v > 5.0)].why


def test_a_begin_far_beyond_capacity_is_no_end() -> None:
    """Beyond 50 requests are too few for a steady state, and take as long at any rate."""

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        points: list[Any] = [ask.point for ask in asks]
        slow = [7.0 if one.number > 50.0 else one.number / 5.0 for one in points]
        return [
            Ran({TTFT.metric: figure}, short=one.number > 50.0)
            for one, figure in zip(points, slow, strict=True)
        ]

    search = highest(point, 1e5, [TTFT], Rule(), tolerance=0.02, between=(1e-3, 1e6))
    (found,) = drive([search], ran)
    assert found.holds == pytest.approx(5.0, rel=0.03)


def test_nothing_holds_at_any_rate() -> None:
    """What does not change with the rate is given up after one halving; what does is halved on."""
    for figure, tried in ((lambda number: 2.0, 2), (lambda number: 2.0 + number, 8)):
        search = highest(point, 1.0, [TTFT], Rule(), tolerance=0.02, between=(1e-3, 1e3))
        (found,) = drive([search], answered(figure))
        assert found.holds is None
        assert len(found.judged) == pytest.approx(tried, abs=2)


def test_what_comes_nearer_to_its_limit_with_each_halving_is_halved_on() -> None:
    """Half a percent above the limit, and less by 0.15 % at each half of the rate."""
    ran = answered(lambda number: 1.005 * float(number) ** (0.0015 / log(2.0)))
    (found,) = drive([highest(point, 1.0, [TTFT], Rule(), tolerance=0.02, between=(1e-6, 1e6))], ran)
    assert found.holds is not None
    assert found.holds == pytest.approx(2.0 ** -(log(1.005) / 0.0015), rel=0.02)


def test_a_metric_that_is_zero_below_the_edge_is_halved_to_it() -> None:
    """Of nothing there is no logarithm, and so no line to the edge."""

    def figure(number: float) -> float:
        assert number > 0.0, "no number at all"
        return 0.0 if number < 5.0 else 2.0

    search = highest(point, 1.0, [TTFT], Rule(), tolerance=0.02, between=(1e-6, 1e6))
    (found,) = drive([search], answered(figure))
    assert found.holds is not None
    assert found.fails is not None
    assert found.holds < 5.0 <= found.fails <= found.holds * 1.021
    assert found.holds <= found.likely <= found.fails


def test_searches_side_by_side_find_what_they_find_alone() -> None:
    edges = [3, 17, 64]
    alone = [
        drive([fewest(point, (1, 128), [TTFT], Rule())], answered(lambda n, e=e: e / n - 1e-9))[0].number
        for e in edges
    ]

    def ran(asks: Sequence[Ask]) -> list[Ran]:
        return [Ran({TTFT.metric: ask.point.number}) for ask in asks]

    def at(edge: int) -> Any:
        return lambda number, times: point(edge / number - 1e-9)

    together = drive([fewest(at(edge), (1, 128), [TTFT], Rule()) for edge in edges], ran)
    assert [found.number for found in together] == alone == edges


def test_faults_and_overload_fail_whatever_the_figures_are() -> None:
    good = {TTFT.metric: 0.1}
    for ran, why in [
        (Ran({}, fault="no room"), "no room"),
        (Ran(good, growing=True), "faster than they are answered"),
        (Ran({**good, "rejected": 2.0}), "rejected"),
        (Ran({TTFT.metric: None}), "has none"),
    ]:
        (found,) = drive([judge(point(1), [TTFT], Rule())], lambda asks, ran=ran: [ran] * len(asks))
        assert found.verdict == "fails"
        assert why in found.why


def test_the_front_has_what_nothing_beats() -> None:
    rng = np.random.default_rng(SEED)
    values = rng.integers(0, 6, (40, 2)).tolist()
    tried: list[Any] = [SimpleNamespace(a=a, b=b) for a, b in values]
    front = {(one.a, one.b) for one in pareto(tried, [("a", lambda one: one.a), ("b", lambda one: one.b)])}
    every = {(a, b) for a, b in values}
    assert front == {
        one for one in every if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in every)
    }
    assert len(pareto(tried, [("a", lambda one: one.a)])) == 1


# -- whole plans -------------------------------------------------------------------------------------------


@slow
def test_devices_are_those_of_an_exhaustive_search(tmp_path: Path) -> None:
    """Servers of four places that a step's 2 ms of the host make slow."""
    load = {**BASE["workload"], "arrivals": {"kind": "poisson", "rate_per_s": 1000.0}, "requests": 120}
    one = {"kind": "continuous_batching", "ranks": 1, "max_sequences": 4}
    document = {
        "base": {**BASE, "strategies": [one], "workload": load},
        "constraints": {"ttft_p99_s": 0.02},
        "replicas": 12,
    }
    plan = planned(tmp_path, document, "devices")
    best = next(line for line in plan.lines if line["best"])
    assert best["devices"] > 2
    every = [best["devices"] - 1, best["devices"], best["devices"] + 1]
    lines = planned(tmp_path, {**document, "vary": {"devices": every}}, "grid").lines
    assert [line["verdict"] == "holds" for line in lines] == [False, True, True]
    assert lines[1]["ttft_p99_s"] == best["ttft_p99_s"]
    assert plan.answer.startswith(f"{best['devices']} h200-sxm")


@slow
def test_a_plan_is_the_same_by_one_process_and_by_two(tmp_path: Path) -> None:
    document = {"base": BASE, "vary": {"devices": [1, 2], "seed": [1, 2]}, "replicas": 5}
    one, two = (planned(tmp_path, document, "grid", jobs=jobs) for jobs in (1, 2))
    assert one.lines == two.lines
    assert one.summary() == two.summary()


@slow
def test_a_plan_that_was_ended_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after five runs: the second time makes the others only, and finds the same."""
    document = {"base": BASE, "vary": {"seed": [1, 2, 3]}, "replicas": 5}
    whole = planned(tmp_path, document, "grid")
    monkeypatch.setenv("SIMCORE_CACHE", str(tmp_path / "cache"))
    made: list[Ask] = []
    with monkeypatch.context() as patch:
        original = planning_runs.simulated
        patch.setattr(planning_runs, "simulated", lambda ask: ended_by(ask, made, original))
        with pytest.raises(KeyboardInterrupt):
            planned(tmp_path, document, "grid")
    again = planned(tmp_path, document, "grid")
    assert (again.known, again.simulated) == (5, whole.simulated - 5)
    assert again.lines == whole.lines
    third = planned(tmp_path, document, "grid")
    assert (third.known, third.simulated) == (whole.simulated, 0)
    assert third.lines == whole.lines


def ended_by(ask: Ask, made: list[Ask], original: Any) -> Ran:
    if len(made) == 5:
        raise KeyboardInterrupt
    made.append(ask)
    ran: Ran = original(ask)
    return ran


def test_what_is_the_same_in_every_run_is_run_once(tmp_path: Path) -> None:
    """Constant arrivals and lengths: a second replica of it would be the first one again."""
    even = {"arrivals": {"kind": "constant", "rate_per_s": 200.0}}
    for lengths, runs in (
        ({"kind": "constant", "value": 8}, 1),
        ({"kind": "uniform", "low": 7, "high": 9}, 3),
    ):
        workload = {**BASE["workload"], **even, "prompt_tokens": lengths}
        workload["output_tokens"] = {"kind": "constant", "value": 4}
        plan = planned(tmp_path, {"base": {**BASE, "workload": workload}, "question": "grid"})
        (tried,) = plan.result.tried
        assert (tried.judged.verdict, len(tried.judged.runs)) == ("holds", runs)
        assert ("the same in every run" in plan.answer) == (runs == 1)


@slow
def test_a_grid_without_limits_may_run_each_point_once(tmp_path: Path) -> None:
    """Its figures are those of the first of several replicas, as many requests as the scenario says."""
    base = {name: value for name, value in BASE.items() if name != "slo"}
    document = {"base": base, "vary": {"devices": [1, 2]}, "question": "grid"}
    once, twice = (planned(tmp_path, {**document, "replicas": count}) for count in (1, 2))
    assert once.simulated == 2
    for one, several in zip(once.result.tried, twice.result.tried, strict=True):
        assert one.judged.runs[0].figures == several.judged.runs[0].figures
        assert one.point.case.axes.requests == base["workload"]["requests"]
    assert "by one run" in once.answer
    assert once.summary()["certainty"] is None
    assert once.notes == ["each point ran once, so nothing is judged"]


@pytest.mark.parametrize("models", [["tiny-llama", "tiny-hybrid"], ["tiny-hybrid", "tiny-llama"]])
def test_an_answer_names_a_varied_model(models: list[str], tmp_path: Path) -> None:
    base = {**BASE, "slo": {}}
    vary = {"model": models}
    plan = planned(tmp_path, {"base": base, "vary": vary, "question": "grid", "replicas": 1})
    assert f" is 1 h200-sxm (continuous batching, 2,048 tokens a step, {models[0]}) at " in plan.answer
    alone = planned(tmp_path, {"base": base, "question": "grid", "replicas": 1})
    assert "(continuous batching, 2,048 tokens a step) at " in alone.answer


@slow
def test_a_queue_that_grows_in_one_run_is_no_verdict(tmp_path: Path) -> None:
    """Beyond what the server answers by far: the point runs, and a note says so."""
    load = {**BASE["workload"], "arrivals": {"kind": "poisson", "rate_per_s": 1000.0}, "requests": 400}
    base = {**BASE, "workload": load, "slo": {}, "strategies": [FEW_AT_A_TIME]}
    plan = planned(tmp_path, {"base": base, "question": "grid", "replicas": 1})
    (tried,) = plan.result.tried
    assert (tried.judged.verdict, tried.judged.runs[0].growing) == ("holds", True)
    of = "in 1 of 1 points requests came faster than they were answered"
    assert plan.notes == [f"each point ran once, so nothing is judged; {of}"]


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        ("highest_rate", "best by highest rate is"),
        ("lowest_energy", "best by lowest energy is"),
        ("fewest_devices", "best by fewest devices, the first of 2 that are alike, is"),
        (["highest_rate", "fewest_devices"], "best is"),
    ],
)
def test_a_map_answers_with_what_keeps_up(objective: str | list[str], says: str, tmp_path: Path) -> None:
    """Beyond what the server answers, energy goes by the tokens that come out, not by those asked for."""
    base = {**BASE, "slo": {}, "strategies": [FEW_AT_A_TIME]}
    base["workload"] = {**BASE["workload"], "requests": 400}
    vary = {"workload.arrivals.rate_per_s": [4.0, 1000.0]}
    asked = {"base": base, "vary": vary, "question": "grid", "replicas": 1, "objective": objective}
    plan = planned(tmp_path, asked)
    assert [line["rate_per_s"] for line in plan.lines if line["best"]] == [4.0]
    assert f"; {says} 1 h200-sxm" in plan.answer
    slow, fast = (one for one in plan.result.tried)
    power_w = slow.point.bench.hardware.board_power_w or 0.0
    offered = 4.0 * slow.point.case.axes.output_tokens
    came_out = fast.judged.mean("output_throughput_tokens_per_s") or 0.0
    assert came_out < 0.9 * 1000.0 * fast.point.case.axes.output_tokens
    assert joules_per_token(slow) == pytest.approx(power_w / offered)
    assert joules_per_token(fast) == pytest.approx(power_w / came_out)


CONSTANT = {"kind": "constant", "value": 8}
TRACE = {"kind": "trace", "path": "some.csv", "format": "azure"}


@pytest.mark.parametrize(
    ("workload", "kind", "same"),
    [
        ({"arrivals": TRACE}, "continuous_batching", True),
        ({"arrivals": {**TRACE, "jitter_s": 0.1}}, "continuous_batching", False),
        ({"arrivals": TRACE}, "own.py:schedule", False),
        ({"arrivals": TRACE, "output_tokens": {"kind": "uniform", "low": 1, "high": 2}}, "eager", False),
        (
            {
                "arrivals": {"kind": "constant", "rate_per_s": 1.0},
                "prompt_tokens": CONSTANT,
                "output_tokens": CONSTANT,
            },
            "eager",
            True,
        ),
        (
            {
                "arrivals": {"kind": "poisson", "rate_per_s": 1.0},
                "prompt_tokens": CONSTANT,
                "output_tokens": CONSTANT,
            },
            "eager",
            False,
        ),
        (
            {
                "arrivals": {"kind": "constant", "rate_per_s": 1.0},
                "tenants": [
                    {"name": name, "share": 0.5, "prompt_tokens": CONSTANT, "output_tokens": CONSTANT}
                    for name in "ab"
                ],
            },
            "eager",
            False,
        ),
        (
            {
                "arrivals": {"kind": "constant", "rate_per_s": 1.0},
                "prompt_tokens": CONSTANT,
                "output_tokens": CONSTANT,
                "sessions": {
                    "turns": {"kind": "uniform", "low": 1, "high": 3},
                    "think_s": 0.5,
                    "shared_prefix_tokens": 3,
                    "max_context_tokens": 400,
                },
            },
            "eager",
            False,
        ),
    ],
)
def test_runs_are_all_the_same_where_nothing_is_drawn(workload: Any, kind: str, same: bool) -> None:
    scenario: Any = SimpleNamespace(workload=Workload.model_validate({"requests": 10, **workload}))
    case: Any = SimpleNamespace(strategy=SimpleNamespace(kind=kind))
    bench: Any = None
    assert Point(bench, case, scenario, "some").same_in_every_run == same


def serving(**fields: Any) -> ServingScenario:
    scenario = parse_scenario({**BASE, **fields}, "plan")
    assert isinstance(scenario, ServingScenario)
    return scenario


def test_changes_of_a_device_in_another_order_are_the_same_device() -> None:
    """Prices are made, and told of, once."""
    change = {"hbm_bytes_per_s": 4e12, "flops_per_s": {"times": 2}}
    benches = Benches("plan", 1)
    for each in (change, dict(reversed(change.items()))):
        benches.points(serving(device={"base": "h200-sxm", "change": each, "name": "faster"}))
    assert (len(benches.every()), len(benches.origins)) == (1, 1)


def test_a_run_goes_by_its_trace_as_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has grown, or was written since, has other runs; the same one has the same."""
    monkeypatch.setenv("SIMCORE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:00:{i:02}.0000000,{5 + i},4" for i in range(8)]

    def key() -> str:
        workload = {"requests": 6, "arrivals": {"kind": "trace", "path": str(path), "format": "azure"}}
        (one,) = Benches("plan", 1).points(serving(workload=workload))
        assert one.key is not None
        return one.key

    def write(count: int, written_s: int) -> str:
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows[:count]]) + "\n")
        os.utime(path, (written_s, written_s))
        return key()

    first = write(7, 1000)
    assert key() == first
    assert len({first, write(8, 1000), write(7, 2000)}) == 3
    assert write(7, 1000) == first


def test_runs_of_unknown_code_are_not_known_by_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMCORE_CACHE", str(tmp_path / "cache"))
    (one,) = Benches("plan", 1).points(serving())

    def key(kind: str) -> str | None:
        strategy: Any = SimpleNamespace(kind=kind)
        return replace(one, case=replace(one.case, strategy=strategy)).key

    assert key(one.case.strategy.kind) is not None
    assert key("own.py:schedule") is None
    monkeypatch.setattr(points, "code_digest", lambda: None)
    assert key(one.case.strategy.kind) is None


def test_runs_are_kept_by_their_keys_but_for_faults() -> None:
    class Made:
        def make(self, asks: Sequence[Ask], finished: Finished) -> None:
            for i, one in enumerate(asks):
                finished(i, Ran({}, fault="a law is broken" if one.replica else ""))

    saved: list[str] = []
    store = SimpleNamespace(load=lambda keys: {}, save=lambda key, ran: saved.append(key))
    runner = Runner(cast(Maker, Made()), cast(Store, store), silent)
    (one,) = Benches("plan", 1).points(serving())
    for key in ("some", None):
        # What a point keeps of its key.
        asked = replace(one)
        vars(asked)["key"] = key
        runner([Ask(asked, replica) for replica in (0, 1)])
    assert saved == ["some/0/value"]


@slow
def test_a_run_has_a_figure_for_every_limit_that_may_be_named() -> None:
    (one,) = Benches("plan", 1).points(serving())
    figures = simulated(Ask(one, 0)).figures
    assert {name for name in names() if LATENCY.fullmatch(name)} <= set(figures)
    for name in LATENCIES:
        ends = [figures[f"{name}_{of}_s"] for of in ("p50", "p99", "p99.9")]
        assert None not in ends
        assert sorted(ends) == ends  # type: ignore[type-var]


def test_progress_counts_runs_that_are_made_among_all_that_were_asked_for() -> None:
    """Two batches, of which some are known: what is done never falls behind it, and ends at all."""

    class Made:
        def make(self, asks: Sequence[Ask], finished: Finished) -> None:
            for i in range(len(asks)):
                finished(i, Ran({}))

    reported: list[tuple[str, int, int]] = []
    runner = Runner(cast(Maker, Made()), Store(None), lambda *said: reported.append(said))
    axes = SimpleNamespace(requests=5)
    one: Any = SimpleNamespace(key="some", case=SimpleNamespace(axes=axes))
    for replicas in (2, 5):
        runner([Ask(one, replica) for replica in range(replicas)])
    assert reported == [("run", done, total) for done, total in ((1, 2), (2, 2), (3, 5), (4, 5), (5, 5))]
    assert (runner.simulated, runner.requests) == (5, 25)


def test_ranks_of_a_server_have_the_link_of_their_device() -> None:
    strategy = {"kind": "continuous_batching", "ranks": [1, 2]}
    scenario = parse_scenario({**BASE, "devices": 2, "strategies": [strategy]}, "plan")
    assert isinstance(scenario, ServingScenario)
    benches = Benches("plan", 1)
    points = benches.points(scenario)
    assert [(point.case.ranks, benches.link_of(point)) for point in points] == [(1, None), (2, "nvlink")]


@slow
def test_what_can_not_be_is_left_out_and_counted(tmp_path: Path) -> None:
    strategy = {"kind": "continuous_batching", "ranks": 2}
    document = {"base": {**BASE, "strategies": [strategy]}, "vary": {"devices": [1, 2, 3]}, "replicas": 3}
    plan = planned(tmp_path, document, "grid")
    assert [line["devices"] for line in plan.lines] == [2]
    assert len([note for note in plan.notes if "must divide" in note]) == 2


@pytest.mark.parametrize(
    ("vary", "says"),
    [
        ({"devices": [1, 0]}, "vary.devices: is 0; 1 to 1,024 is allowed"),
        ({"strategies.0.ranks": [1, "x"]}, "vary.strategies.0.ranks: is 'x'; a whole number is needed"),
        ({"device": ["h200-sxm", "h300"]}, "vary.device: unknown device 'h300'"),
        ({"divices": [1]}, "vary: divices: no such field; did you mean 'devices'?"),
    ],
)
def test_a_value_that_no_field_takes_is_refused_among_good_ones(vary: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        planned(tmp_path, {"base": BASE, "vary": vary, "replicas": 3}, "grid")
    assert says in str(error.value)


@slow
def test_pairs_are_narrower_than_what_they_are_made_of(tmp_path: Path) -> None:
    """Two budgets at the same requests: the interval of their difference is at most half of that without."""
    strategy = {"kind": "continuous_batching", "token_budget": [64, 2048]}
    document = {"base": {**BASE, "strategies": [strategy]}, "replicas": 10, "certainty": 0.95}
    plan = planned(tmp_path, {**document, "vary": {"seed": [1]}, "constraints": {"e2e_mean_s": 1e-9}}, "grid")
    assert len(plan.lines) == 2
    a, b = (one.judged for one in plan.result.tried)
    _, low, high = difference(a, b, "e2e_mean_s", 0.95) or (0.0, 0.0, 0.0)
    apart = [interval(each.values("e2e_mean_s"), 0.95) or (0.0, 0.0) for each in (a, b)]
    unpaired = sqrt(sum(((end - begin) / 2.0) ** 2 for begin, end in apart))
    assert (high - low) / 2.0 < unpaired / 2.0


@thorough
def test_the_winner_of_a_strategy_is_compared_with_each_other_one(tmp_path: Path) -> None:
    """At the scenario's load, relative to the winner, by the same requests."""
    strategy = {"kind": "continuous_batching", "token_budget": [64, 2048]}
    document = {"base": {**BASE, "strategies": [strategy]}, "constraints": {"e2e_mean_s": 0.1}, "replicas": 5}
    found = planned(tmp_path, document, "strategy").result
    (winner,) = found.winners
    assert winner is not None
    assert {pair.a.alternative for pair in found.pairs} == {winner.alternative}
    (group,) = found.groups
    others = {one.alternative for one in group} - {winner.alternative}
    assert {pair.b.alternative for pair in found.pairs} == others
    for pair in found.pairs:
        known = difference(pair.a.judged, pair.b.judged, pair.metric, 0.95)
        base = pair.a.judged.mean(pair.metric)
        assert known is not None
        assert base is not None
        assert (pair.more, pair.low, pair.high) == tuple(each / base for each in known)


def test_beside_the_fewest_devices_stands_the_nearest_number_of_any_way() -> None:
    def tried(devices: int, verdict: Any) -> Any:
        at = SimpleNamespace(case=SimpleNamespace(axes=SimpleNamespace(devices=devices)))
        return SimpleNamespace(point=at, judged=SimpleNamespace(verdict=verdict), devices=devices)

    def nearest(winner: int, *others: tuple[int, Any]) -> Any:
        group: Any = [
            SimpleNamespace(next_worse=None if one is None else tried(*one)) for one in (None, *others)
        ]
        return _nearest(group, tried(winner, "holds"))

    assert nearest(2) is None
    assert nearest(2, (1, "unsure")).devices == 1
    assert nearest(12, (8, "unsure"), (10, "fails"), (12, "fails"), (16, "unsure")).devices == 10
    both = nearest(12, (10, "fails"), (10, "unsure"))
    assert (both.devices, both.judged.verdict) == (10, "unsure")


def test_the_next_smaller_number_may_do_if_any_does_at_fast_prices() -> None:
    holds, fails = (Judged(point(1), (), verdict) for verdict in ("holds", "fails"))  # type: ignore[arg-type]
    assert PlanResult(at_fast_prices={0: fails, 1: holds}).at_fast_holds
    assert not PlanResult(at_fast_prices={0: fails, 1: fails}).at_fast_holds
    assert not PlanResult().at_fast_holds


def test_of_ways_that_cannot_be_the_first_is_told(tmp_path: Path) -> None:
    base = {**BASE, "devices": 4, "strategies": [{"kind": "continuous_batching", "ranks": 1}]}
    with pytest.raises(InputError, match=r"^[^ ]*: base: strategies\[0\].ranks: is 3;"):
        planned(tmp_path, {"base": base, "vary": {"strategies.0.ranks": [3, 5]}}, "grid")


def test_tenants_without_arrivals_of_their_own_go_by_the_load_of_all() -> None:
    lengths = {"prompt_tokens": CONSTANT, "output_tokens": CONSTANT}
    workload = Workload.model_validate(
        {
            "requests": 10,
            "arrivals": {"kind": "of_tenants"},
            "tenants": [
                {"name": "a", "arrivals": {"kind": "poisson", "rate_per_s": 3.0}, **lengths},
                {"name": "b", "arrivals": {"kind": "constant", "interval_s": 0.5}, **lengths},
            ],
        }
    )
    faster = at_load(workload, 4.0, 3)
    assert [one.arrivals.rates[0] for one in faster.tenants] == [12.0, 8.0]  # type: ignore[union-attr]
    assert (faster.requests, faster.arrivals) == ([30], workload.arrivals)
    assert _faster(None, 2.0) is None


def test_a_longer_load_has_as_many_times_the_requests_and_the_span() -> None:
    arrivals = {"kind": "poisson", "rate_per_s": 3.0, "span_intervals": 20.0}
    lengths = {"prompt_tokens": CONSTANT, "output_tokens": CONSTANT}
    workload = Workload.model_validate({"requests": 10, "arrivals": arrivals, **lengths})
    for load, times in ((at_load(workload, 6.0), 1), (at_load(workload, 6.0, 3), 3)):
        assert load.requests == [10 * times]
        assert load.arrivals.span_intervals == 20.0 * times  # type: ignore[union-attr]
        assert load.arrivals.rates == [6.0]  # type: ignore[union-attr]
    benches = Benches("plan", 1)
    (one,) = benches.points(serving())
    axes = with_load(benches, Alternative(one, {}, {}), 50.0).case.axes
    assert (axes.requests, axes.rate_per_s) == (60, 50.0)


def test_a_trace_has_no_more_requests_not_even_beside_other_arrivals() -> None:
    lengths = {"prompt_tokens": CONSTANT, "output_tokens": CONSTANT}
    drawn = {"kind": "poisson", "rate_per_s": 1.0}

    def more(arrivals: Any, *tenants: Any) -> bool:
        own = [{"name": f"n{i}", "arrivals": each, **lengths} for i, each in enumerate(tenants)]
        given = {"requests": 10, "arrivals": arrivals, "tenants": own} | ({} if own else lengths)
        return not Workload.model_validate(given).traces

    of_tenants = {"kind": "of_tenants"}
    assert more(drawn)
    assert more(of_tenants, drawn, drawn)
    assert not more(TRACE)
    assert not more(of_tenants, drawn, TRACE)


def test_difference_of_pairs_is_that_of_the_replicas() -> None:
    def of(values: Sequence[float]) -> Judged:
        return Judged(point(1), tuple(Ran({"x": value}) for value in values), "holds")

    mean, low, high = difference(of([1.0, 2.0, 4.0]), of([1.5, 2.5, 4.5]), "x", 0.95) or (0.0, 0.0, 0.0)
    assert (mean, low, high) == (0.5, 0.5, 0.5)
    assert difference(of([1.0]), of([2.0]), "x", 0.95) is None
    same = [replace(of([x]), point=SimpleNamespace(same_in_every_run=True)) for x in (1.0, 2.0)]
    assert difference(same[0], same[1], "x", 0.95) == (1.0, 1.0, 1.0)
    # Where one of them is drawn there is an interval, and where they have nothing in common no difference.
    drawn, once = of([1.0, 3.0]), replace(same[0], runs=of([2.0, 6.0]).runs)
    for a, b in ((drawn, once), (replace(once, runs=drawn.runs), of([2.0, 6.0]))):
        mean, low, high = difference(a, b, "x", 0.95) or (0.0, 0.0, 0.0)
        assert [mean, fmean([low, high])] == pytest.approx([2.0, 2.0])
        assert low < mean < high
    assert difference(drawn, same[0], "y", 0.95) is difference(same[0], same[1], "y", 0.95) is None


def test_replicas_without_a_figure_make_no_pair() -> None:
    a, b = (
        Judged(point(1), tuple(Ran({"x": value}) for value in values), "holds")
        for values in ([1.0, None, 3.0, 4.0], [2.0, 5.0, None, 5.0])
    )
    assert difference(a, b, "x", 0.95) == difference(a, b, "x", 0.5) == (1.0, 1.0, 1.0)


# -- Erlang C ----------------------------------------------------------------------------------------------

MEAN_TOKENS = 40


def erlang_wait_s(servers: int, rate_per_s: float, service_s: float) -> float:
    """The mean wait of M/M/c (Erlang's C formula); infinite beyond its capacity."""
    offered = rate_per_s * service_s
    if offered >= servers:
        return float("inf")
    last = offered**servers / factorial(servers) / (1.0 - offered / servers)
    all_busy = last / (sum(offered**k / factorial(k) for k in range(servers)) + last)
    return all_busy * service_s / (servers - offered)


def staffing(servers: int, load: float, *, seed: int, requests: int) -> dict[str, Any]:
    """A capacity question of M/M/c whose answer is `servers` by Erlang's formula: they are busy for a share
    `load`, and the limit of the mean wait lies between theirs and that of one less."""
    slices = (np.arange(2_000) + 0.5) / 2_000
    tokens = [max(1, round(each)) for each in (-MEAN_TOKENS * np.log1p(-slices)).tolist()]
    service_s = float(np.mean(tokens)) * (5.8 / 512)
    rate_per_s = load * servers / service_s
    less_s, wait_s = (erlang_wait_s(number, rate_per_s, service_s) for number in (servers - 1, servers))
    return {
        "question": "devices",
        "over": "strategies.0.max_instances",
        "between": [1, 16],
        "constraints": {"queue_mean_s": wait_s * 2.0 if less_s == float("inf") else sqrt(less_s * wait_s)},
        "base": {
            "name": "erlang", "study": "serving", "device": "a100-sxm-80gb", "model": "gpt-j-6b",
            "profile": "flover-gptj", "contention": {"kind": "none"}, "seed": seed,
            "workload": {
                "requests": requests,
                "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
                "prompt_tokens": {"kind": "constant", "value": 1},
                "output_tokens": {"kind": "empirical", "values": tokens},
            },
            "strategies": [{"kind": "concurrent_instances", "max_instances": 1}],
            "overheads": {"launch_s": 0.0, "launch_kernel_s": 0.0, "size_s": 0.0, "return_s": 0.0},
        },
    }  # fmt: skip


@slow
@pytest.mark.parametrize("case", [0, pytest.param(2, marks=thorough)])
def test_staffing_is_that_of_erlang_c(case: int, tmp_path: Path) -> None:
    """Requests whose services are exponential (the middles of 2,000 slices), on instances that do not slow
    each other down; the limit lies in the middle between the waits of two numbers of servers."""
    rng = np.random.default_rng(SEED + case)
    need, load = int(rng.integers(2, 8)), float(rng.uniform(0.6, 0.8))
    plan = planned(tmp_path, staffing(need, load, seed=int(rng.integers(1, 1000)), requests=600))
    (best,) = [one for one in plan.result.winners if one is not None]
    assert best.value == need


# -- the store ---------------------------------------------------------------------------------------------


def test_a_store_gives_back_what_it_was_given(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save("a", [{"x": 0.1}, False, "", {}])
    store.save("a", [{"x": 1 / 3}, False, "", {}])
    store.close()
    assert Store(tmp_path).load(["a", "b"]) == {"a": [{"x": 1 / 3}, False, "", {}]}


def test_a_broken_store_is_made_again_and_none_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all" * 100)
    store = Store(tmp_path)
    assert store.load(["a"]) == {}
    store.save("a", 1)
    store.close()
    assert sqlite3.connect(tmp_path / FILE).execute("SELECT count(*) FROM results").fetchone() == (1,)
    nowhere = Store(None)
    nowhere.save("a", 1)
    assert nowhere.load(["a"]) == {}
    blocked = Store(tmp_path / FILE / "below")
    assert blocked.load(["a"]) == {}


def test_a_store_that_cannot_be_made_again_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def execute(self, words: str) -> None:
            raise sqlite3.DatabaseError(words)

        def close(self) -> None:
            pass

    monkeypatch.setattr(sqlite3, "connect", lambda path, timeout: Broken())
    store = Store(tmp_path)
    store.save("a", 1)
    assert store.load(["a"]) == {}


def test_a_store_makes_the_folders_above_it(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    store = Store(folder)
    store.save("a", 1)
    store.close()
    assert Store(folder).load(["a"]) == {"a": 1}


# -- the command line --------------------------------------------------------------------------------------


@slow
def test_the_command_line_writes_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": 1}]})
    words = ["plan", str(path), "--question", "devices", "--json", "--jobs", "1"]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    folder = tmp_path / "runs" / "small" / "plan_devices"
    assert {each.name for each in folder.iterdir()} == {
        *("plan.yaml", "points.csv", "points.json", "points.parquet", "summary.json", "provenance.json"),
        *("scenarios.json", "report.html"),
    }
    assert json.loads((folder / "points.json").read_text()) == said["points"]
    assert said["answer"] in json.loads((folder / "summary.json").read_text())["answer"]
    # The page shows the provenance, and that has the time which the run took.
    differ = ("provenance.json", "report.html")
    before = {each.name: each.read_bytes() for each in folder.iterdir() if each.name not in differ}
    assert CliRunner().invoke(cli.app, words).exit_code == 0
    assert before == {
        each.name: (folder / each.name).read_bytes() for each in folder.iterdir() if each.name in before
    }


def test_settings_are_of_the_plan_or_of_its_scenario(tmp_path: Path) -> None:
    path = written(tmp_path, {"base": BASE, "vary": {"seed": [1, 2]}})
    settings = ["certainty=0.8", "name=other", "slo.ttft_s=0.25", "workload.requests=7"]
    asked = load_plan(path, "rate", settings)
    assert (asked.whatif.certainty, asked.name, asked.document["workload"]["requests"]) == (0.8, "other", 7)
    assert asked.limits[0].value == 0.25
    plain = load_plan(written(tmp_path, BASE, "base.yaml"), None, ["name=third", "question=rate"])
    assert (plain.name, plain.question) == ("third", "rate")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("questoin=rate", "--set questoin: no such field; did you mean 'question'? (allowed: name, base"),
        (
            "constraint.ttft_p99_s=1",
            "--set constraint.ttft_p99_s: no such field; did you mean 'constraints'",
        ),
        ("replica=3", "--set replica: no such field; did you mean 'replicas'?"),
        ("routin=round_robin", "--set routin: no such field; did you mean 'routing'?"),
        ("constraints.ttft_p9_s=1", "constraints: ttft_p9_s: no such metric; did you mean 'ttft_p99_s'?"),
        ("question=brek_even", "question: is 'brek_even'; did you mean 'break_even'?"),
        ("=3", "--set =3: KEY=VALUE is needed"),
    ],
)
@pytest.mark.parametrize("alone", [False, True])
def test_a_setting_that_is_misspelt_is_one_line(
    setting: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, alone: bool
) -> None:
    """In a plan, and of a scenario that is asked a question."""
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, BASE if alone else {"base": BASE, "question": "rate"})
    with pytest.raises(InputError) as error:
        load_plan(path.relative_to(tmp_path), "rate" if alone else None, [setting])
    assert says in str(error.value)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_a_named_base_has_its_fields_set_by_their_own_names(tmp_path: Path) -> None:
    path = written(tmp_path, {"base": "quickstart", "question": "rate"})
    assert load_plan(path, None, ["workload.requests=7"]).document["workload"]["requests"] == 7
    with pytest.raises(InputError) as error:
        load_plan(path, None, ["base.workload.requests=7"])
    assert str(error.value).endswith("whose fields are set without it: --set workload.requests=...")


@slow
def test_few_requests_behind_a_percentile_are_a_warning(tmp_path: Path) -> None:
    plan = planned(tmp_path, {"base": BASE, "vary": {"seed": [1]}, "replicas": 3}, "grid")
    assert any("too few requests for p99" in warning for warning in plan.warnings)
    many = {**BASE, "slo": {}}
    held = {"constraints": {"e2e_mean_s": 1.0}, "vary": {"seed": [1]}, "replicas": 3}
    assert not any("too few" in each for each in planned(tmp_path, {"base": many, **held}, "grid").warnings)


@slow
def test_a_point_has_a_report_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run alone, a point has the figures of its first replica in the plan."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {"base": BASE, "question": "grid", "vary": {"devices": [1, 2]}, "replicas": 2})
    for words in (["plan", "plan.yaml"], ["run", "runs/small/plan", "--point", "2"]):
        assert CliRunner().invoke(cli.app, [*words, "--jobs", "1"]).exit_code == 0
    (point,) = [p for p in json.loads(Path("runs/small/plan/points.json").read_text()) if p["point"] == 2]
    assert point["devices"] == 2
    assert Path("runs/small-2/sim/report.html").is_file()
    with Path("runs/small-2/sim/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (alone,) = [float(row["value"]) for row in rows if row["metric"] == "e2e_p99_s"]
    assert point["e2e_p99_s.low"] < alone < point["e2e_p99_s.high"]
    for words, says in (
        (["run", "runs/small/plan", "--point", "3"], "--point 3: no such point (1 to 2)"),
        (["run", "runs/small/plan", "--point", "0"], "--point 0: no such point (1 to 2)"),
        (["run", "runs", "--point", "1"], "runs: is no run directory of a plan"),
    ):
        assert says in str(CliRunner().invoke(cli.app, words).exception)


def test_a_plan_is_no_scenario(tmp_path: Path) -> None:
    path = written(tmp_path, {"base": BASE, "question": "rate"})
    result = CliRunner().invoke(cli.app, ["run", str(path)])
    assert "is a plan" in str(result.exception)


def test_the_command_line_names_every_question() -> None:
    assert cli.QUESTIONS.split("|") == list(QUESTIONS)


def test_a_question_without_a_name_is_refused(tmp_path: Path) -> None:
    """Also where the file has one, or fields that vary."""
    for more in ({}, {"question": "devices"}, {"vary": {"devices": [1, 2]}}):
        path = written(tmp_path, {"base": BASE, **more})
        result = CliRunner().invoke(cli.app, ["plan", str(path), "--question="])
        says = f"--question '': no such question (allowed: {', '.join(QUESTIONS)})"
        assert isinstance(result.exception, InputError)
        assert str(result.exception) == says


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["slos"])
    assert ended.value.code == 0
    assert "mlperf/llama3.1-8b/server" in capsys.readouterr().out


@slow
def test_servers_that_a_rule_keeps_are_the_fewest_that_are_tried(tmp_path: Path) -> None:
    rule = {"kind": "open_requests", "target": 8, "min_servers": 3, "start_s": 1}
    base = {**BASE, "autoscaling": [rule], "strategies": [{"kind": "continuous_batching", "ranks": 1}]}
    plan = planned(tmp_path, {"base": base, "question": "devices"})
    assert min(line["devices"] for line in plan.lines) == 3
    with pytest.raises(InputError, match="autoscaling: question cost searches servers that run all the time"):
        planned(tmp_path, {"base": base, "question": "cost", "cost_per_hour": {"h200-sxm": 3.0}})


RULE = {"kind": "open_requests", "target": 2, "start_s": 0.02, "check_s": 0.01}
SCALED: dict[str, Any] = {
    **BASE,
    "devices": 4,
    "autoscaling": RULE,
    "strategies": [{"kind": "continuous_batching", "ranks": 1}],
}


@slow
def test_energy_and_cost_are_of_the_time_for_which_servers_hold_their_devices(tmp_path: Path) -> None:
    """Power and price of a device, against the device hours of each run over its duration. As many output
    tokens are asked for with autoscaling as without."""
    plan = planned(
        tmp_path,
        {
            "base": SCALED,
            "question": "grid",
            "vary": {"autoscaling.kind": ["none", "open_requests"]},
            "objective": ["lowest_energy", "lowest_cost"],
            "constraints": {"server_starts": 100},
            "cost_per_hour": {"h200-sxm": 3.0},
            "replicas": 3,
        },
    )
    always, scaled = plan.result.tried
    held = [ran.figures["device_hours"] for ran in scaled.judged.runs]
    took = [ran.figures["duration_s"] for ran in scaled.judged.runs]
    on = fmean((a or 0.0) * 3600.0 / (b or 1.0) for a, b in zip(held, took, strict=True))
    assert 1.0 < on < 3.0
    fixed, own = plan.lines
    assert fixed["cost_per_hour"] == 12.0
    assert own["cost_per_hour"] == pytest.approx(3.0 * on)
    held_s = fmean(ran.figures["server_s"] or 0.0 for ran in scaled.judged.runs)
    tokens = BASE["workload"]["requests"] * scaled.point.case.axes.output_tokens
    assert own["joules_per_output_token"] == pytest.approx(700.0 * held_s / tokens)
    assert own["cost_per_million_output_tokens"] == pytest.approx(3.0 * held_s / 3600.0 / tokens * 1e6)
    assert own["joules_per_output_token"] < fixed["joules_per_output_token"]
    assert [line["best"] for line in plan.lines] == [False, True]
    assert scaled.judged.mean("server_starts") != 0.0
    assert (always.judged.mean("server_starts"), always.judged.mean("mean_servers")) == (0.0, 4.0)


@slow
@pytest.mark.parametrize("limits", [{}, {"e2e_p99_s": 10.0}])
def test_the_answer_of_the_lowest_cost_says_the_cost(limits: dict[str, float], tmp_path: Path) -> None:
    asked = {"question": "grid", "objective": "lowest_cost", "cost_per_hour": {"h200-sxm": 3.0}}
    base = {**BASE, "slo": {}}
    plan = planned(tmp_path, {"base": base, **asked, "vary": {"devices": [2, 1]}, "constraints": limits})
    (best,) = [line for line in plan.lines if line["best"]]
    a_million = best["cost_per_million_output_tokens"]
    costs = f"a cost of 3 an hour, {a_million:.3g} per million output tokens, 95 % sure after"
    assert a_million == pytest.approx(3.0 / 3600.0 / (200.0 * 5.5) * 1e6, rel=0.05)
    assert (f" and {costs}" if limits else f", with {costs}") in plan.answer


def test_a_kind_that_varies_to_none_leaves_nothing_of_the_others(tmp_path: Path) -> None:
    """Of autoscaling as a mapping or in a list, with fields of other kinds given or varied too."""
    for given, path in (({**RULE}, "autoscaling"), ([{**RULE}], "autoscaling.0")):
        vary = {f"{path}.kind": ["none", "open_requests"], f"{path}.target": [2, 4]}
        document = {"base": {**SCALED, "autoscaling": given}, "question": "grid", "vary": vary}
        asked = load_plan(written(tmp_path, document))
        found = alternatives(asked, Benches("plan", 1), any_devices=False)
        rules = [one.point.case.scaling for one in found.every]
        assert [rule and (rule.target, rule.check_s) for rule in rules] == [
            None,
            ([2.0], [0.01]),
            ([4.0], [0.01]),
        ]
        # Without a rule the target counts for nothing: one point in place of two.
        assert list(found.left_out.values()) == [1]
        assert [one.settings[f"{path}.target"] for one in found.every] == [None, 2, 4]
        assert "the same as one before" in next(iter(found.left_out))


@slow
def test_points_that_are_the_same_are_on_the_page_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    vary = {"autoscaling.kind": ["open_requests", "none"], "autoscaling.target": [2, 4]}
    written(tmp_path, {"base": SCALED, "question": "grid", "vary": vary, "replicas": 2})
    result = CliRunner().invoke(cli.app, ["plan", "plan.yaml", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").glob("*/plan")
    points = json.loads((folder / "points.json").read_text())
    assert [point["vary.autoscaling.target"] for point in points] == [2, 4, None]
    (note,) = json.loads((folder / "summary.json").read_text())["notes"]
    assert note.startswith("left out, 1 of them: the same as one before")
    assert (folder / "report.html").is_file()


@slow
def test_where_nothing_holds_for_sure_the_nearest_that_may_hold_is_named(tmp_path: Path) -> None:
    """Three replicas are too few to be sure of means near the limit, and of three equal shares."""
    plan = planned(
        tmp_path,
        {
            "base": SCALED,
            "question": "grid",
            "vary": {"autoscaling.kind": ["none", "open_requests"], "autoscaling.target": [2, 8]},
            "constraints": {"device_time_saved": 0.69},
            "replicas": 3,
        },
    )
    assert [line["verdict"] for line in plan.lines] == ["fails", "unsure", "unsure"]
    way = "continuous batching, 2,048 tokens a step, autoscaled to 8 open requests"
    none, nearest = plan.answer.split(". 4 h200-sxm ")
    assert none == "None of 3 points keeps device time saved at least 0.69 for sure"
    assert nearest.startswith(f"({way}, ")
    says = "is not sure to hold: device time saved 0.75 (the same after 3 replicas; limit 0.69)"
    assert nearest.endswith(f"{says}; more replicas would tell.")


@pytest.mark.parametrize("value", [None, "nine"])
def test_a_kind_that_is_none_of_autoscaling_is_one_line(value: Any, tmp_path: Path) -> None:
    vary = {"autoscaling.kind": [value, "open_requests"]}
    with pytest.raises(InputError, match=r"vary\.autoscaling\.kind: is .*none, open_requests, utilisation"):
        planned(tmp_path, {"base": SCALED, "question": "grid", "vary": vary})


def test_rules_that_keep_few_servers_or_as_many_as_may_be_are_tried_beside_each_other(
    tmp_path: Path,
) -> None:
    rule = {"kind": "open_requests", "target": 8, "min_servers": [1, 3, 1024], "start_s": 1}
    strategy = {"kind": "continuous_batching", "ranks": 1}
    base = {**BASE, "autoscaling": [rule], "strategies": [strategy]}
    asked = load_plan(written(tmp_path, {"base": base, "question": "devices"}))
    found = alternatives(asked, Benches("plan", 1), any_devices=True)
    assert [fewest_servers(one.point) for one in found.every] == [1, 3, 1024]
    assert found.left_out == {}


def test_a_way_fits_if_the_servers_that_its_rule_keeps_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at has three servers of each number of ranks."""
    looked: list[tuple[int | None, int]] = []

    def none(one: Point) -> None:
        looked.append((one.case.ranks, one.case.axes.devices))

    monkeypatch.setattr(of_ways, "why_not", none)
    rule = {"kind": "open_requests", "target": 8, "min_servers": 3, "start_s": 1}
    strategy = {"kind": "continuous_batching", "ranks": [1, 2, 4]}
    base = {**BASE, "autoscaling": [rule], "strategies": [strategy]}
    asked = load_plan(written(tmp_path, {"base": base, "question": "devices"}))
    alternatives(asked, Benches("plan", 1), any_devices=True)
    assert looked == [(1, 3), (2, 6), (4, 12)]


def test_devices_between_which_no_server_lies_are_named(tmp_path: Path) -> None:
    base = {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": 4}]}
    with pytest.raises(InputError, match="between: no server has 2 to 3 devices"):
        planned(tmp_path, {"base": base, "question": "devices", "between": [2, 3]})


def test_a_field_is_searched_at_each_load_of_a_scenario_alone(tmp_path: Path) -> None:
    arrivals = {"kind": "poisson", "rate_per_s": [100.0, 200.0]}
    strategy = {"kind": "continuous_batching", "ranks": 1}
    base = {**BASE, "workload": {**BASE["workload"], "arrivals": arrivals}, "strategies": [strategy]}
    over = "strategies.0.token_budget"
    asked = load_plan(written(tmp_path, {"base": base, "question": "devices", "over": over}))
    benches = Benches("plan", 1)
    found = alternatives(asked, benches, any_devices=False).every
    cases = [with_field(asked, benches, one, over, 77).case for one in found]
    assert [case.axes.rate_per_s for case in cases] == [100.0, 200.0]


@pytest.mark.parametrize(
    ("field", "value"), [("strategies", None), ("strategies", 5), ("autoscaling", 5), ("autoscaling", "none")]
)
def test_a_scenario_that_cannot_be_read_is_one_line_where_devices_are_searched_too(
    field: str, value: Any, tmp_path: Path
) -> None:
    base = {name: of for name, of in BASE.items() if name != field}
    if value is not None:
        base[field] = value
    with pytest.raises(InputError, match=field):
        planned(tmp_path, {"base": base, "question": "devices"})


@pytest.mark.parametrize("several", [False, True])
def test_servers_that_a_rule_keeps_are_no_hindrance_where_devices_are_searched(
    several: bool, tmp_path: Path
) -> None:
    """A rule beside the question, as a mapping or in a list, asks for two servers of each number of ranks."""
    rule = {"kind": "open_requests", "target": 8, "min_servers": 2}
    base = {**BASE, "autoscaling": [rule] if several else rule}
    asked = load_plan(written(tmp_path, {"base": base, "question": "devices"}))
    every = alternatives(asked, Benches("plan", 1), any_devices=True).every
    assert {one.point.case.axes.ranks for one in every} >= {1, 2}


def test_ranks_that_have_no_small_multiple_in_common_are_tried_beside_each_other(tmp_path: Path) -> None:
    """560 devices are the fewest that 5, 7 and 16 divide, of 1,024 that a scenario may have."""
    base = {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": [1, 5, 7, 16]}]}
    asked = load_plan(written(tmp_path, {"base": base, "question": "devices"}))
    found = alternatives(asked, Benches("plan", 1), any_devices=True)
    assert [one.point.case.ranks for one in found.every] == [1]
    assert sum(found.left_out.values()) == 3


def test_a_field_is_searched_in_one_way_of_running_at_every_load(tmp_path: Path) -> None:
    """One way at the first load, two at the second."""
    ways = [{"kind": "continuous_batching", "ranks": 1, "token_budget": tokens} for tokens in (64, 2048)]
    vary = {"strategies": [ways[:1], ways], "workload.arrivals.rate_per_s": [100.0, 200.0]}
    asked = {"question": "devices", "over": "strategies.0.max_sequences", "vary": vary, "together": "zip"}
    with pytest.raises(InputError, match="is searched in one way of running, not in several"):
        planned(tmp_path, {"base": BASE, **asked})


def test_a_closed_loop_among_other_loads_has_no_rate_to_be_highest(tmp_path: Path) -> None:
    loads = [{"kind": "poisson", "rate_per_s": 100.0}, {"kind": "closed_loop", "clients": 4}]
    asked = {"question": "grid", "objective": "highest_rate", "vary": {"workload.arrivals": loads}}
    with pytest.raises(InputError, match="is highest_rate, and a closed loop has no rate"):
        planned(tmp_path, {"base": BASE, **asked})


def test_pairs_are_run_once_only_where_all_of_them_are_the_same_in_every_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else as often as two looks take."""
    monkeypatch.setattr(questions, "with_load", lambda benches, one, value, times: one.point)

    def runs(*same: bool, most: int = 30) -> set[int]:
        asked: Any = SimpleNamespace(rule=Rule(most=most), whatif=SimpleNamespace(certainty=0.95))
        case = SimpleNamespace(axes=SimpleNamespace(requests=10))
        points: list[Any] = [SimpleNamespace(case=case, same_in_every_run=each) for each in same]
        tried = [
            Tried(cast(Alternative, SimpleNamespace(point=at)), Judged(at, (), "holds"), 1.0) for at in points
        ]

        def ran(asks: Sequence[Ask]) -> list[Ran]:
            return [Ran({questions.PAIRED: 1.0 + ask.replica}) for ask in asks]

        pairs = questions._pairs(asked, cast(Benches, None), tried[0], tried, cast(Runner, ran))
        assert [pair.b.alternative for pair in pairs] == [one.alternative for one in tried[1:]]
        return {len(one.judged.runs) for pair in pairs for one in (pair.a, pair.b)}

    assert runs(True, True) == {1}
    assert runs(False, False) == runs(True, False) == runs(False, True) == {Rule(most=30).looks[1]}
    assert runs(False, False, most=2) == {2}


def test_what_leaving_out_early_spared_is_never_less_than_nothing() -> None:
    """Two ways out, of 3 runs each, and one in full: of 10 runs that is 14 spared, of 2 runs none."""

    def note(full: int) -> str:
        axes = SimpleNamespace(label="some", devices=1, rate_per_s=None)
        at: Any = SimpleNamespace(case=SimpleNamespace(axes=axes))

        def of(runs: int) -> Highest:
            return Highest(None, 1.0, {1.0: Judged(at, (Ran({}),) * runs, "fails")})

        results = {0: of(3), 1: of(full), 2: of(3)}
        return _left_out_early([cast(Alternative, None)] * 3, results, [0, 2], [1])[0]

    assert "took 6 runs, about 14 fewer than" in note(10)
    assert "took 6 runs, about 0 fewer than" in note(2)


@slow
def test_a_load_is_kept_up_in_every_question(tmp_path: Path) -> None:
    """60 requests at 10,000 a second are there before the first is answered: no question takes them for such
    a rate, kept up. So there are about as many devices as the rate of one goes into it: a queue that hardly
    grows is seen in longer runs only."""
    arrivals = {"kind": "poisson", "rate_per_s": 1e4}
    base = {**BASE, "workload": {**BASE["workload"], "arrivals": arrivals}, "strategies": [FEW_AT_A_TIME]}
    asked = {"base": base, "constraints": {"ttft_p99_s": 1.0}, "replicas": 3}
    rate = planned(tmp_path, {**asked, "question": "rate"})
    (most,) = (line["rate_per_s"] for line in rate.lines if line["best"])
    (line,) = planned(tmp_path, {**asked, "question": "grid"}).lines
    assert (line["verdict"], line["requests"] > 60) == ("fails", True)
    devices = planned(tmp_path, {**asked, "question": "devices"})
    (number,) = (line["devices"] for line in devices.lines if line["best"])
    assert number * most / 1e4 == pytest.approx(1.2, abs=0.25)
    (note,) = (note for note in devices.notes if "steady state" in note)
    assert "more requests than workload.requests" in note


@pytest.mark.parametrize("as_tenant", [False, True])
def test_requests_that_last_take_their_span_along(as_tenant: bool) -> None:
    """Twice as many in the same time would be twice the load."""
    arrivals = {"kind": "poisson", "rate_per_s": 3.0, "span_intervals": 30.0}
    lengths = {"prompt_tokens": CONSTANT, "output_tokens": CONSTANT}
    document: dict[str, Any] = {"requests": 30, "arrivals": arrivals, **lengths}
    if as_tenant:
        own = {"name": "a", "arrivals": arrivals, **lengths}
        document = {"requests": 30, "arrivals": {"kind": "of_tenants"}, "tenants": [own]}
    more = longer(Workload.model_validate(document), 4)
    of = more.tenants[0].arrivals if as_tenant else more.arrivals
    assert (more.requests, getattr(of, "span_intervals", None)) == ([120], 120.0)


@thorough
def test_what_too_few_requests_come_for_has_no_ends_of_prices(tmp_path: Path) -> None:
    """Prices have nothing to do with that: faster ones would not help, and nothing limits."""
    arrivals = {"kind": "poisson", "rate_per_s": 1e4}
    workload = {**BASE["workload"], "requests": 2, "arrivals": arrivals}
    base = {**BASE, "workload": workload, "devices": 16, "strategies": [ON_ONE]}
    asked = {"base": base, "question": "rate", "constraints": {"ttft_p99_s": 10.0}, "replicas": 3}
    plan = planned(tmp_path, asked)
    (worse,) = (one.next_worse for one in plan.result.groups[0])
    assert worse is not None
    assert worse.judged.short
    assert (plan.result.at_fast_prices, plan.gains) == ({}, [])
    assert "is not known to hold: too few requests come" in plan.answer
    assert "fast end" not in plan.answer


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"preemptions": 3.0, "max_kv_share": 0.99}, "; the KV cache is full"),
        ({"preemptions": 3.0, "max_kv_share": 0.9}, ""),
        ({"waited_for_kv": 2.0, "max_kv_share": 0.5}, "; the KV cache is full"),
        ({"waited_for_kv": 1.0}, ""),
        ({"utilisation": 0.96}, "; the devices are busy all the time"),
    ],
)
def test_what_runs_out_is_said_where_a_point_that_holds_has_it(figures: dict[str, float], says: str) -> None:
    """Of 100 requests more than one has to wait for memory that is kept for answers."""

    def judged(**own: float) -> Any:
        point: Any = None
        ran: Any = SimpleNamespace(figures={"completed": 100.0, **own})
        return searches.Judged(point, (ran,), "fails")

    assert answer.limiting(judged(**figures), judged()) == says
    assert answer.limiting(judged(**figures), judged(**figures)) == ""
