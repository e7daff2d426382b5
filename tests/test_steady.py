"""The part of a serving run that is measured: queueing theory, laws of rates, overload, closed loops, short
runs; what the answer says where promises are not kept; how many requests a percentile takes.

Mean wait in M/M/1 (Kleinrock, Queueing Systems, volume 1), load rho, mean service time s:  rho s / (1 - rho).
A run of it that starts empty waits less on average, by the requests that came before the queue was there.
"""

import csv
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import binom

from simcore.cli import main
from simcore.studies.columns import WHOLE_RUN
from simcore.studies.common import Outcome
from simcore.studies.published import compare
from simcore.studies.serving import certainty
from simcore.studies.serving.figures import WINDOWED, both, figures, steps_in
from simcore.studies.serving.published import ServingPublished
from simcore.studies.serving.served import Floats, Served, served
from simcore.studies.serving.window import (
    FEWEST,
    NO_ANSWERS,
    TOO_FEW,
    TOO_SHORT,
    Window,
    _grows,
    steady,
    whole_run,
)
from simcore.workload.request_logs import PER_SECOND
from simcore.workload.requests import Journal, Request
from simcore.workload.time_units import doubt
from tests.test_serving import document, outcome, strategy, workload
from tests.test_serving_figures import Case, Promise, batched, concurrent
from tests.thorough import first, slow, thorough

SERVICE_S = 1.0
MOST_ERRORS = 4.0


def queue(arrival_s: Floats, service_s: Floats) -> Case:
    """One server, first come, first served: Lindley's recursion. Answers have one token."""
    case, free_s = Case([], Journal(), 1), 0.0
    for i, (came_s, takes_s) in enumerate(zip(arrival_s.tolist(), service_s.tolist(), strict=True)):
        begun_s = max(free_s, came_s)
        free_s = begun_s + takes_s
        case.requests.append(Request(i, came_s, 10, 1, 1, begun_s, free_s, free_s))
        case.journal.step(0, begun_s, free_s, 1, 0, 1, 10, 1, 0, 1)
    return case


def mm1(load: float, count: int, seed: int) -> Case:
    random = np.random.default_rng([round(100 * load), count, seed])
    gaps = random.exponential(SERVICE_S / load, count)
    return queue(np.cumsum(gaps) - gaps[0], random.exponential(SERVICE_S, count))


def found(case: Case, promise: Promise | None = None, window: Window | None = None) -> dict[str, Any]:
    window = window or steady(case.served)
    values = both(
        case.served, case.steps, kv_limit=12, servers=case.servers, slo=promise or Promise(1e9), window=window
    )
    return {name: value for name, (value, _) in values.items()}


# -- theory ----------------------------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("load", [0.6, 0.8])
def test_the_window_is_nearer_to_theory_than_the_whole_run(load: float) -> None:
    """Over 400 short runs, so that the bias of the start shows: the window's mean wait is within its errors
    of theory, and nearer to it than that of whole runs."""
    runs = [found(mm1(load, 300, seed)) for seed in range(400)]
    theory_s = load * SERVICE_S / (1.0 - load)
    cut, whole = (
        np.array([run[name] for run in runs]) for name in ("queue_mean_s", "queue_mean_s_whole_run")
    )
    error_s = cut.std(ddof=1) / np.sqrt(len(runs))
    assert abs(cut.mean() - theory_s) < abs(whole.mean() - theory_s)
    assert abs(cut.mean() - theory_s) < MOST_ERRORS * error_s


@slow
def test_utilisation_and_offered_rate_are_those_that_were_drawn() -> None:
    runs = [found(mm1(0.7, 400, seed)) for seed in range(200)]
    for name, expected in (("utilisation", 0.7), ("offered_per_s", 0.7), ("request_throughput_per_s", 0.7)):
        values = np.array([run[name] for run in runs])
        assert abs(values.mean() - expected) < MOST_ERRORS * values.std(ddof=1) / np.sqrt(len(values)), name


@pytest.mark.parametrize(("count", "warm"), [(45, 5), (50, 5), (51, 6)])
def test_a_share_of_the_requests_that_is_not_whole_is_rounded_up(count: int, warm: int) -> None:
    """One a second, each answered within half of one: the window begins with the next that comes."""
    case = queue(np.arange(float(count)), np.full(count, 0.5))
    assert steady(case.served, 0.1).begin_s == float(warm)
    assert steady(case.served, 0.0).begin_s == 0.0


# -- laws ------------------------------------------------------------------------------------------------

AREAS = ("utilisation", "mean_batch", "mean_kv_share", "mean_queue", "output_throughput_tokens_per_s",
         "request_throughput_per_s", "total_throughput_tokens_per_s", "goodput_per_s",
         "offered_per_s")  # fmt: skip


def part(case: Case, begin_s: float, end_s: float) -> dict[str, float]:
    """Figures times length: amounts, which add up over windows."""
    came = (case.served.arrival_s >= begin_s) & (case.served.arrival_s < end_s)
    values = found(case, Promise(ttft_s=0.4), Window(begin_s, end_s, came))
    return {name: (values[name] or 0.0) * (end_s - begin_s) for name in AREAS}


@slow
@pytest.mark.parametrize("kind", [batched, concurrent])
def test_what_is_counted_in_windows_adds_up_to_the_whole_run(kind: Callable[[Random], Case]) -> None:
    for seed in range(60):
        random = Random(seed)
        case = kind(random)
        begin_s, end_s = case.served.window_s
        if not end_s > begin_s:
            continue
        # Who is turned away may come after the last answer, and what ends with the run is in it.
        after_s = max(end_s, float(case.served.arrival_s.max())) + 1e-9
        # A step that ends where a window begins is counted there, and once.
        ends_s = [at_s for at_s in case.steps["end_s"].tolist() if begin_s < at_s < end_s]
        at_ends = random.sample(ends_s, min(1, len(ends_s)))
        inner = sorted({*at_ends, *(random.uniform(begin_s, end_s) for _ in range(random.randint(1, 3)))})
        edges = [begin_s, *inner, after_s]
        parts = [part(case, low_s, high_s) for low_s, high_s in pairwise(edges)]
        whole = figures(case.served, case.steps, kv_limit=12, servers=case.servers, slo=Promise(ttft_s=0.4))
        for name in AREAS:
            amount = sum(one[name] for one in parts)
            if name == "offered_per_s":
                assert amount == pytest.approx(len(case.requests))
            else:
                total = (whole[name][0] or 0.0) * (end_s - begin_s)
                assert amount == pytest.approx(total, rel=1e-6, abs=1e-6), name


@slow
def test_goodput_is_the_offered_rate_by_attainment() -> None:
    for seed in range(60):
        random = np.random.default_rng(seed)
        load, count = random.uniform(0.2, 1.4), int(random.integers(FEWEST, 400))
        run = found(mm1(float(load), count, seed), Promise(ttft_s=float(random.uniform(0.5, 5.0))))
        if run["goodput_per_s"] is None:
            assert run["window_requests"] == count
        else:
            assert run["goodput_per_s"] == pytest.approx(run["slo_attainment"] * run["offered_per_s"])


def test_constant_arrivals_give_their_rate_to_the_last_digit() -> None:
    case = queue(np.arange(100) / 40.0, np.full(100, 0.01))
    run = found(case)
    assert (run["slo_attainment"], run["offered_per_s"]) == (1.0, pytest.approx(40.0))
    assert run["goodput_per_s"] == pytest.approx(40.0)
    assert run["request_throughput_per_s"] == pytest.approx(40.0)
    assert run["utilisation"] == pytest.approx(0.4)
    assert run["goodput_per_s_whole_run"] == pytest.approx(100 / (99 / 40.0 + 0.01))


def test_requests_are_followed_beyond_the_window() -> None:
    """The last but one takes 50 s and ends long after the window: left out, the slowest would seem quick."""
    service_s = np.full(100, 0.01)
    service_s[98] = 50.0
    case = queue(np.arange(100.0), service_s)
    window = steady(case.served)
    assert window.end_s == 99.0
    expected = np.percentile([*np.full(np.sum(window.came) - 1, 0.01), 50.0], 99)
    assert found(case)["e2e_p99_s"] == pytest.approx(expected)


# -- overload, closed loops, short runs --------------------------------------------------------------------


@slow
@pytest.mark.parametrize(
    ("load", "low", "high"),
    [
        (0.8, 0.0, 0.01),
        (1.3, 0.9, 1.0),
        # Further from saturation on either side.
        pytest.param(0.5, 0.0, 0.0, marks=thorough),
        pytest.param(3.0, 1, 1, marks=thorough),
    ],
)
def test_a_growing_queue_is_noticed(load: float, low: float, high: float) -> None:
    """In overload nearly always, below it hardly ever."""
    share = np.mean([steady(mm1(load, 1000, seed).served).growing for seed in range(400)])
    assert low <= share <= high


@pytest.mark.parametrize(
    ("waiting", "grows"),
    [
        # Of 900 requests: rises of more than 9, and of more than 1.1 times the root of 1 + 45.
        ((1.0, 23.0, 45.0), True),
        # Of few that wait a rise of little more than 9 is enough, and of 126 one of 12.4.
        ((0.0, 10.0, 20.0), True),
        ((50.0, 63.0, 76.0), True),
        # More than 9, but not more than numbers of 226 vary.
        ((100.0, 113.0, 126.0), False),
        # More than numbers of 14 vary, but less than a hundredth of the requests.
        ((0.0, 7.0, 14.0), False),
        # Twice is asked for.
        ((1.0, 40.0, 45.0), False),
        ((1.0, 6.0, 45.0), False),
        ((20.0, 20.0, 60.0), False),
    ],
)
def test_a_queue_grows_where_it_rises_twice_by_more_than_chance(
    waiting: tuple[float, ...], grows: bool
) -> None:
    """Ten seconds apart, so that so many wait in a third as a request there waits in tens of seconds."""
    arrival_s = np.arange(900) * 10.0
    case = queue(arrival_s, np.full(900, 1e-3))
    waits_s = 10.0 * np.repeat(waiting, 300)
    served = replace(case.served, scheduled_s=arrival_s + waits_s, finish_s=arrival_s + waits_s + 1e-3)
    assert _grows(served, 0.0, 9000.0, 900) is grows


@pytest.mark.parametrize(("each", "grows"), [(3, False), (4, True)])
def test_a_rise_of_as_much_as_a_hundredth_is_not_yet_one(each: int, grows: bool) -> None:
    """Of 300 requests; so many wait through the second third of 3000 s, twice as many through the last."""
    begun_s = np.repeat([2000.0, 3000.0], [each, 2 * each])
    waiting = [
        Request(i, at_s - 1000.0, 9, 1, 1, at_s, at_s, at_s) for i, at_s in enumerate(begun_s.tolist())
    ]
    assert _grows(served(waiting), 0.0, 3000.0, 300) is grows


@slow
@pytest.mark.parametrize("count", [300, 600])
def test_short_runs_below_saturation_give_no_false_alarm(count: int) -> None:
    share = np.mean([steady(mm1(0.8, count, seed).served).growing for seed in range(400)])
    assert share <= 0.01


def test_in_overload_what_is_answered_is_what_the_server_can_do() -> None:
    run = found(mm1(3.0, 10_000, 1))
    answered = run["request_throughput_per_s"] * (run["window_end_s"] - run["window_begin_s"])
    assert run["utilisation"] == pytest.approx(1.0)
    assert run["request_throughput_per_s"] == pytest.approx(1.0, rel=4.0 / answered**0.5)
    assert run["offered_per_s"] == pytest.approx(3.0, rel=4.0 / run["window_requests"] ** 0.5)


def closed_loop(clients: int, rounds: int, takes_s: float) -> Served:
    """Each client sends its next request when its last one is answered, all after the same time; the i-th
    client's first answer comes i ms later than the first client's."""
    requests = [
        Request(client + clients * turn, begun_s, 10, 2, 2, begun_s, begun_s + 0.1, begun_s + takes)
        for client in range(clients)
        for turn in range(rounds)
        for takes in [takes_s + (client * 1e-3 if turn == 0 else 0.0)]
        for begun_s in [0.0 if turn == 0 else takes_s * turn + client * 1e-3]
    ]
    return served(requests)


def test_a_closed_loop_is_warm_once_each_client_has_its_first_answer() -> None:
    of = closed_loop(30, 10, 5.0)
    window = steady(of, clients=30)
    assert (window.begin_s, window.end_s) == (pytest.approx(5.029), pytest.approx(45.029))
    assert window.came.sum() == pytest.approx(30 * 8, abs=1)
    assert steady(closed_loop(30, 1, 5.0), clients=30).whole
    assert steady(closed_loop(30, 2, 5.0), clients=30).whole
    # Of 80 requests the first four are answered just when the middle one comes.
    times = [(float(i), 40.0 if i < 4 else i + 0.1) for i in range(80)]
    half = steady(
        served([Request(i, at, 9, 2, 2, at, at, end) for i, (at, end) in enumerate(times)]), clients=4
    )
    assert (bool(half.whole), half.begin_s) == (False, 40.0)
    late = steady(closed_loop(100, 2, 5.0), clients=150)
    assert late.whole == NO_ANSWERS
    assert not late.unrated
    # Of fewer than 20 the number is the reason.
    assert [steady(closed_loop(n, 1, 5.0), clients=n).whole for n in (19, 20)] == [TOO_FEW, NO_ANSWERS]


def test_short_runs_are_measured_whole_and_have_no_goodput() -> None:
    for count in (1, 2, FEWEST, FEWEST + 1):
        case = queue(np.arange(count) / 40.0, np.full(count, 0.01))
        window, run = steady(case.served), found(case)
        assert window.whole == TOO_FEW
        assert run["window_requests"] == count
        assert run["goodput_per_s"] is None
        assert run["goodput_per_s_whole_run"] is not None
        assert all(run[name] == run[name + WHOLE_RUN] for name in WINDOWED if name != "goodput_per_s")


@pytest.mark.parametrize(("count", "whole"), [(23, TOO_FEW), (24, "")])
def test_as_many_requests_as_are_needed_are_a_window(count: int, whole: str) -> None:
    """One a second, each answered at once: without the three of the warm-up and the last one, 19 come, or 20
    are enough."""
    window = steady(queue(np.arange(float(count)), np.full(count, 0.01)).served, 2.1 / count)
    assert (window.whole, bool(window.unrated)) == (whole, bool(whole))
    assert window.came.sum() == (count if whole else 20)


@pytest.mark.parametrize(("takes_s", "whole"), [(23.0, ""), (23.5, TOO_SHORT)])
def test_a_window_may_be_as_short_as_a_request_is_served(takes_s: float, whole: str) -> None:
    """Of 23 s, without a warm-up: the last of 24 requests comes then."""
    alike = [Request(i, float(i), 9, 1, 1, float(i), i + takes_s, i + takes_s) for i in range(24)]
    assert steady(served(alike), 0.0).whole == whole


def test_a_window_says_how_long_and_how_full_it_is() -> None:
    """One request each 0.1 s, served for 2 s, in the second half of the window for 2 s e^0.25, which fills in
    its first 2.6 s of 89 s. A closed loop, and a whole run, say nothing."""
    arrival_s = 0.1 * np.arange(2001)
    for later, filling in ((2.0, 0.0), (2.0 * math.exp(0.25), 0.25)):
        # Of 200 s the first 22 are the warm-up: 200 requests are answered then.
        takes_s = np.where(arrival_s < 111.0, 2.0, later)
        alike = [
            Request(i, came_s, 9, 1, 1, came_s, came_s + each_s, came_s + each_s)
            for i, (came_s, each_s) in enumerate(zip(arrival_s.tolist(), takes_s.tolist(), strict=True))
        ]
        window = steady(served(alike))
        assert window.turnovers == pytest.approx(178.0 / ((2.0 + later) / 2.0), rel=1e-2)
        assert window.filling == pytest.approx(filling, abs=1e-2)
        looped = steady(served(alike), clients=20)
        assert not looped.whole
        assert (looped.turnovers, looped.filling) == (math.inf, 0.0)
        assert (whole_run(served(alike)).turnovers, whole_run(served(alike)).filling) == (math.inf, 0.0)


def test_every_gap_between_tokens_is_in_one_of_several_windows() -> None:
    """A step that begins where one window ends and the next begins is in the next."""
    steps = mm1(0.8, 40, 3).steps
    edges = [0.0, *steps["start_s"][[7, 20, 31]].tolist(), 1e9]
    for count, low_s, high_s in zip((7, 13, 11, 9), edges[:-1], edges[1:], strict=True):
        assert len(steps_in(steps, Window(low_s, high_s, np.ones(0, np.bool_)))["start_s"]) == count


def test_a_batch_that_is_there_at_once_has_no_steady_state() -> None:
    case = queue(np.arange(200) * 1e-6, np.full(200, 0.5))
    assert steady(case.served).whole == TOO_SHORT
    assert found(case)["request_throughput_per_s"] == pytest.approx(2.0)
    case = queue(np.zeros(200), np.full(200, 0.5))
    assert steady(case.served).whole == TOO_FEW
    # Nothing is offered at a rate there, beside which goodput would mislead.
    assert found(case)["goodput_per_s"] == pytest.approx(2.0)


def test_all_rejected_and_nothing() -> None:
    for count in (0, 1, 40):
        case = Case([Request(i, float(i), 7, 3, 3, rejected=True) for i in range(count)], Journal(), 2)
        run = found(case)
        assert run["ttft_p99_s"] is None
        assert run["slo_attainment"] == (0.0 if count else None)
        assert run["goodput_per_s"] in (0.0, None)
        assert run["rejected"] == count


def test_the_order_of_requests_does_not_matter() -> None:
    case = mm1(0.8, 200, 1)
    turned = Case(case.requests[::-1], case.journal, 1)
    assert found(case) == {name: pytest.approx(value) for name, value in found(turned).items()}


# -- scenarios -------------------------------------------------------------------------------------------


def by_label(of: Outcome, metric: str) -> dict[str, float | None]:
    return {row.axes.label: row.value for row in of.rows if row.metric == metric}


@slow
@pytest.mark.parametrize("seed", first(2, range(6)))
def test_all_promises_kept_is_a_goodput_of_what_is_offered(seed: int) -> None:
    """Drawn arrivals, rates, lengths and strategies; where goodput is known and all promises are kept, it is
    the rate that was offered, within what chance does to a rate of so many requests."""
    random = Random(seed)
    rate_per_s = random.choice([3.0, 10.0, 30.0])
    arrivals: dict[str, Any] = {
        "kind": random.choice(["poisson", "constant", "gamma"]),
        "rate_per_s": rate_per_s,
    }
    arrivals |= {"cv": 2.0} if arrivals["kind"] == "gamma" else {}
    requests = random.choice([60, 200, 400])
    ways = [
        strategy("continuous_batching", 64),
        strategy("temporal_fusion", 16),
        strategy("dynamic_batching", 8),
    ]
    of = outcome(
        document(
            workload=workload(requests, arrivals, (20, 400), (2, 60)),
            strategies=ways,
            slo={"ttft_s": random.choice([0.05, 2.0]), "tpot_s": 0.05},
            seed=seed,
        )
    )
    goodput, offered, kept = (
        by_label(of, name) for name in ("goodput_per_s", "offered_per_s", "slo_attainment")
    )
    known = [label for label in goodput if goodput[label] is not None]
    assert known
    for label in known:
        ours, theirs, share = goodput[label], offered[label], kept[label]
        assert ours is not None
        assert theirs is not None
        assert share is not None
        assert ours == pytest.approx(share * theirs)
        spread = {"poisson": 1.0, "constant": 0.0, "gamma": 2.0}[arrivals["kind"]]
        measured = by_label(of, "window_requests")[label]
        assert measured
        assert abs(theirs / rate_per_s - 1.0) <= 4.0 * spread / np.sqrt(measured) + 1e-6


@slow
def test_measure_says_what_is_measured(tmp_path: Path) -> None:
    load = workload(100, {"kind": "poisson", "rate_per_s": 20.0}, 100, 20)
    plain = outcome(document(workload=load))
    asked = outcome(document(workload=load, measure={"kind": "whole_run"}))
    late = outcome(document(workload=load, measure={"kind": "steady_state", "warmup_share": 0.4}))
    label = plain.rows[0].axes.label
    assert by_label(asked, "window_requests")[label] == 100
    assert (
        (by_label(plain, "window_requests")[label] or 0)
        > (by_label(late, "window_requests")[label] or 0)
        > 20
    )
    for name in ("ttft_p99_s", "goodput_per_s", "utilisation"):
        assert by_label(asked, name) == by_label(plain, name + WHOLE_RUN) == by_label(asked, name + WHOLE_RUN)
    assert not any("steady state" in text for text in asked.warnings)


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        ({"kind": "steady"}, "measure.kind"),
        ({"kind": "steady_state", "warmup_share": 0.6}, "measure.warmup_share"),
        ({"kind": "steady_state", "warmup_share": float("nan")}, "measure.warmup_share"),
        ({"kind": "whole_run", "warmup_share": 0.1}, "measure.warmup_share"),
        ("whole_run", "measure"),
    ],
)
def test_a_bad_measure_is_one_line(measure: Any, said: str) -> None:
    with pytest.raises(Exception, match=said):
        outcome(document(measure=measure))


def test_published_figures_are_compared_with_the_whole_run() -> None:
    load = workload(100, {"kind": "constant", "rate_per_s": 20.0}, 100, 20)
    rows = outcome(document(workload=load)).rows
    figure = ServingPublished(
        device="d", model="m", strategy="continuous_batching", label="", devices=1, ranks=1,
        requests=None, rate_per_s=None, prompt_tokens=None, output_tokens=None,
        metric="output_throughput_tokens_per_s", value=1.0, unit="1/s", role="measured", fitted_by="",
        source="s",
    )  # fmt: skip
    (line,), _ = compare(rows, [figure], frozenset())
    found = {row.metric: row.value for row in rows}
    assert line["predicted"] == found["output_throughput_tokens_per_s_whole_run"]
    assert line["predicted"] != found["output_throughput_tokens_per_s"]


# -- the answer ------------------------------------------------------------------------------------------


def answered(slo: dict[str, float], rates: Sequence[float] = (30.0,), **changes: Any) -> Outcome:
    load = workload(200, {"kind": "poisson", "rate_per_s": list(rates)}, 100, 60)
    ways = [strategy("concurrent_instances", 4), strategy("continuous_batching", 64)]
    return outcome(document(**{"workload": load, "strategies": ways, "slo": slo, **changes}))


@slow
def test_where_promises_are_kept_the_answer_says_by_whom() -> None:
    text = answered({"ttft_s": 1.0, "tpot_s": 0.05}).answer
    assert "continuous batching, 2,048 tokens a step, up to 64, is best: 100.0% of the requests keep" in text
    assert "p99 TTFT" in text
    assert "p99 TPOT" in text
    assert "p99 TPOT" not in answered({"ttft_s": 1.0}).answer


@pytest.mark.parametrize("slo", [{}, {"ttft_s": 1.0}])
def test_strategies_that_do_the_same_are_as_good(slo: dict[str, float]) -> None:
    load = workload(1, {"kind": "constant", "rate_per_s": 1.0}, 100, 60)
    ways = [strategy("concurrent_instances", 2), strategy("concurrent_instances", 1)]
    text = answered(slo, workload=load, strategies=ways).answer
    assert "concurrent instances, up to 2, is as good as concurrent instances, up to 1: " in text
    assert text.count("concurrent instances, up to 1") == 1


@slow
def test_where_no_way_keeps_its_promises_the_answer_names_the_nearest_not_the_first() -> None:
    of = answered({"ttft_s": 0.0065})
    kept = by_label(of, "slo_attainment")
    best = max(kept, key=lambda label: kept[label] or 0.0)
    assert 0.0 < (kept[best] or 0.0) < 0.99
    assert best != next(iter(kept))
    assert f"none of the 2 ways keeps TTFT 6.5 ms for 99% of the requests; the nearest is {best}" in of.answer
    none = answered({"ttft_s": 1e-6}).answer
    assert "none of the 2 ways keeps TTFT 0.001 ms for any request; the quickest is continuous" in none
    one = answered({"ttft_s": 1e-6}, strategies=[strategy("continuous_batching", 64)])
    assert "does not keep TTFT 0.001 ms for 99% of the requests" in one.answer


@slow
def test_a_lighter_load_that_is_kept_is_named() -> None:
    text = answered({"ttft_s": 0.2}, (5.0, 10.0, 2000.0)).answer
    assert "none of the 2 ways" in text
    assert "; at 10 requests/s continuous batching" in text


@slow
def test_more_devices_are_named_where_they_keep_it_or_come_nearest() -> None:
    load = workload(300, {"kind": "constant", "rate_per_s": 100.0}, 100, 200)
    of = outcome(
        document(
            workload=load,
            strategies=[strategy("temporal_fusion", 32)],
            devices=[1, 2, 8],
            slo={"ttft_s": 0.3},
        )
    )
    assert "does not keep TTFT 300 ms" in of.answer
    assert "; 8 devices keep" in of.answer or "; 2 devices keep" in of.answer
    never = outcome(
        document(
            workload=load, strategies=[strategy("temporal_fusion", 32)], devices=[1, 2], slo={"e2e_s": 0.01}
        )
    )
    assert "nor do more devices: 2 keep 0.0%" in never.answer


@slow
def test_a_growing_queue_is_warned_of() -> None:
    of = outcome(
        document(
            workload=workload(400, {"kind": "constant", "rate_per_s": 60.0}, 100, 60),
            strategies=[strategy("temporal_fusion", 4)],
        )
    )
    assert any("come faster than they are answered in this case" in text for text in of.warnings)
    assert "come faster than they are answered" in of.answer


# -- percentiles -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 6, 30, 59, 100, 367, 400, 2000])
@pytest.mark.parametrize("percent", [10, 50, 90, 95, 99])
def test_intervals_of_percentiles_are_those_of_the_binomial(count: int, percent: int) -> None:
    values = np.random.default_rng(count).permutation(np.arange(1.0, count + 1.0))
    ranks = np.arange(count + 1)
    below = binom.cdf(ranks - 1, count, percent / 100)  # P(B < rank)
    low, high = ranks[below <= 0.025], ranks[below >= 0.975]
    ends = certainty.interval(values, percent)
    if not len(high) or not low[-1]:
        assert ends is None
    else:
        assert ends == (low[-1], high[0])


def test_intervals_hold_as_often_as_they_say() -> None:
    random = np.random.default_rng(5)
    runs = [certainty.interval(random.exponential(1.0, 1000), 99) for _ in range(1000)]
    inside = np.mean([ends is not None and ends[0] <= np.log(100.0) <= ends[1] for ends in runs])
    assert 0.94 <= inside <= 1.0


@slow
def test_few_requests_for_a_percentile_are_told() -> None:
    few = answered({"ttft_s": 1.0})
    assert any(text.startswith("too few requests for") and "p99 rests on" in text for text in few.warnings)
    (counted,) = re.findall(r"\(the slowest (\w+) of (\d+) requests", few.answer)
    count = int(counted[1])
    assert 100 < count < 200
    assert counted[0] == str(int((np.arange(count) > np.percentile(np.arange(count), 99)).sum()))
    load = workload(1300, {"kind": "poisson", "rate_per_s": 30.0}, 100, 5)
    many = outcome(document(workload=load, slo={"ttft_s": 1.0}))
    assert not any("too few" in text for text in many.warnings)
    assert "slowest" not in many.answer
    (row,) = [row for row in many.rows if row.metric == "ttft_p99_s"]
    assert row.low is not None
    assert row.value is not None
    assert row.high is not None
    assert row.low <= row.value <= row.high


def run_of(*measured: int, name: str = "A", growing: bool = False, **of_window: Any) -> Any:
    """What warnings look at of a case: so many requests measured in each replica."""
    window = SimpleNamespace(**{"whole": "", "unrated": False, "growing": growing, **of_window})
    return SimpleNamespace(name=name, measured=measured, windows=[window] * len(measured))


def warned(*found: Any) -> list[str]:
    return certainty.warnings(found, lambda one: f"Case {one.name}")


def test_a_warning_says_in_which_cases_and_of_how_many() -> None:
    fine = run_of(5000)
    assert warned(fine) == []
    grows = [run_of(5000, name=name, growing=True) for name in "BCD"]
    one, two, four = (
        [re.search(r"in [^(]*\(case [^)]*\)", text).group() for text in warned(*found)]  # type: ignore[union-attr]
        for found in (grows[:1], [*grows[:1], fine], [fine, *grows])
    )
    assert one == ["in this case (case B)"]
    assert two == ["in 1 of 2 cases (case B)"]
    assert four == ["in 3 of 4 cases (case B; case C; 1 more)"]
    assert "in 2 of 2 cases (case B; case C)" in warned(*grows[:2])[0]
    for growing, warns in ((1, False), (2, True)):
        some = run_of(5000, 5000, 5000)
        some.windows = [*grows[0].windows * growing, *fine.windows * (3 - growing)]
        assert bool(warned(some)) is warns
    half = run_of(5000, 5000)
    half.windows = [*grows[0].windows, *fine.windows]
    assert warned(half) == []
    late, unrated = (run_of(5000, name="E", whole=TOO_FEW, unrated=unrated) for unrated in (False, True))
    (text,) = warned(fine, late)
    assert text.startswith(f"no steady state in 1 of 2 cases (case E): {TOO_FEW}; figures are of the whole")
    assert [", and goodput is left out" in warned(each)[0] for each in (late, unrated)] == [False, True]


def test_a_warning_of_few_requests_is_of_the_case_and_the_replica_with_the_fewest() -> None:
    """Ten beyond p95 are 200 requests, ten beyond p90 are 100."""
    for count, weak in ((199, "p95 and p99"), (200, "p99"), (999, "p99"), (99, "p90, p95 and p99")):
        (text,) = warned(run_of(5000), run_of(count + 7), run_of(count), run_of(count + 90))
        assert text.startswith(f"too few requests for {weak} in ")
        assert f" of {count} requests; 1,000 that are measured make it firm" in text
    assert warned(run_of(1000)) == []
    for of in ((400, 150), (400, 150, 0)):
        (text,) = warned(run_of(*of))
        assert "the slowest 2 of 150 requests of each replica; 1,000 in each replica that" in text
    (text,) = warned(run_of(1))
    assert "p99 rests on a single request; 1,000 that are measured" in text


def test_the_tenants_with_too_few_requests_are_named() -> None:
    def few(**counts: float) -> list[str]:
        fewer, more = (
            {f"tenant.{name}.window_requests": (times * count, "") for name, count in counts.items()}
            for times in (1.0, 2.0)
        )
        found: Any = [SimpleNamespace(replicas=[more, fewer]), SimpleNamespace(replicas=[more])]
        return certainty.few_of_tenants(found, counts)

    assert few(a=1000.0, b=2000.0) == []
    (text,) = few(a=1000.0, b=999.0)
    assert ": b 999 are measured; 1,000 make it firm" in text
    (text,) = few(a=1.0, b=0.0, c=1000.0, d=3.0)
    assert ": a 1, b 0 and 1 more are measured" in text


@pytest.mark.usefixtures("without_report")
def test_the_terminal_has_p99_tpot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(document(workload=workload(60, None, 100, 20), slo={"tpot_s": 0.03})))
    with pytest.raises(SystemExit, match="0"):
        main([str(file), "--out", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert "TPOT p50, p99" in said
    with (tmp_path / "run" / "results.csv").open() as lines:
        names = {row["metric"] for row in csv.DictReader(lines)}
    assert {"tpot_p99_s", "tpot_p99_s_whole_run", "window_begin_s", "offered_per_s"} <= names


# -- units of recorded times -------------------------------------------------------------------------------


@pytest.mark.parametrize("rate_per_s", [0.3, 3.0, 50.0])
@pytest.mark.parametrize("wrote", ["s", "ms", "us"])
@pytest.mark.parametrize("read", ["s", "ms", "us"])
def test_times_of_another_unit_are_doubted_and_the_right_ones_are_not(
    rate_per_s: float, wrote: str, read: str
) -> None:
    seconds = np.cumsum(np.random.default_rng(1).exponential(1.0 / rate_per_s, 5000))
    seconds -= seconds[0]
    digits = {"s": 3, "ms": 0, "us": 0}[wrote]
    said = doubt(np.round(seconds * PER_SECOND[wrote], digits) / PER_SECOND[read], read)
    assert (said == "") == (wrote == read)
    if said:
        assert f"in {read}? In " in said


@slow
def test_seconds_that_are_milliseconds_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("at,p,o\n" + "".join(f"{1_700_000_000_000 + 20_000 * i // 7},50,5\n" for i in range(200)))
    table = {"kind": "trace", "path": str(path), "format": "table",
             "columns": {"arrival": "at", "prompt": "p", "output": "o"}}  # fmt: skip
    said = [text for text in outcome(document(workload={"arrivals": table})).warnings if "time_unit" in text]
    assert len(said) == 1
    assert "200 requests come one every 47.6 min" in said[0]
    assert "In ms it is one every 2.86 s" in said[0]
    right = outcome(document(workload={"arrivals": {**table, "time_unit": "ms"}}))
    assert not any("time_unit" in text for text in right.warnings)


def test_whole_run_takes_any_run() -> None:
    assert whole_run(served([])).length_s == 0.0
    assert not steady(served([])).unrated
    window = whole_run(mm1(0.8, 30, 1).served)
    assert (window.growing, window.unrated, bool(window.whole)) == (False, False, True)
