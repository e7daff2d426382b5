"""Figures, levels and laws of a serving run, against references that go request by request and time by time.

The references know the definitions only: every level is looked at between any two neighbouring times at
which something happens, so a mean over time is a sum over these pieces.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.machine.machine import LawError
from simcore.studies.serving import laws
from simcore.studies.serving.figures import (
    PERCENTILES,
    both,
    figures,
    over_replicas,
    unseen_gaps_s,
    weighted_percentiles,
)
from simcore.studies.serving.laws import Run
from simcore.studies.serving.levels import levels
from simcore.studies.serving.served import Occupancy, Served, Steps, served
from simcore.studies.serving.window import Window, whole_run
from simcore.workload.requests import STEP, Journal, Request
from tests.thorough import examples, first, slow

NAMES = {
    *(f"{name}_mean_s" for name in ("ttft", "tpot", "itl", "e2e", "queue")),
    *(f"{name}_p{p}_s" for name in ("ttft", "tpot", "itl", "e2e", "queue") for p in (50, 90, 95, 99)),
    *("request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s"),
    *("goodput_per_s", "slo_attainment", "slo_attainment_ttft", "slo_attainment_tpot", "slo_attainment_e2e"),
    *("duration_s", "utilisation", "mean_batch", "max_batch", "mean_queue", "max_queue"),
    *("mean_kv_share", "max_kv_share", "preemptions", "waited_for_kv", "rejected", "completed"),
    *("iterations", "overlap"),
}
KV_LIMIT = 12


@dataclass(frozen=True)
class Promise:
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


@dataclass
class Case:
    requests: list[Request]
    journal: Journal
    servers: int

    @property
    def served(self) -> Served:
        return served(self.requests)

    @property
    def steps(self) -> Steps:
        return self.journal.table()

    @property
    def rows(self) -> list[dict[str, float]]:
        table = self.journal.table()
        return [{name: float(table[name][i]) for name in STEP} for i in range(len(table["start_s"]))]

    def figures(self, slo: Promise | None = None) -> dict[str, tuple[float | None, str]]:
        return figures(self.served, self.steps, kv_limit=KV_LIMIT, servers=self.servers, slo=slo)

    def value(self, name: str, slo: Promise | None = None) -> float | None:
        return self.figures(slo)[name][0]

    def run(self) -> Run:
        stayed = [r for r in self.requests if not r.rejected]
        counted = Occupancy([r.arrival_s for r in stayed], [r.finish_s for r in stayed])
        return Run(self.served, self.steps, KV_LIMIT, occupancy=counted)


# -- runs: a server that batches, one that runs instances at a time, and steps scattered at random --------


def some_requests(random: Random, servers: int) -> list[Request]:
    requests, now_s = [], random.choice([0.0, 3.0])
    for i in range(random.randint(1, 14)):
        now_s += random.choice([0.0, random.expovariate(3.0)])
        output = random.choice([1, random.randint(1, 9)])
        request = Request(i, now_s, random.randint(1, 50), output, 10, instance=random.randrange(servers))
        request.rejected = random.random() < 0.15
        request.preemptions = 0 if request.rejected else random.choice([0, 0, 2])
        request.waited_for_kv = 0 if request.rejected else random.choice([0, 1])
        requests.append(request)
    return requests


def batched(random: Random) -> Case:
    case = Case([], Journal(), random.randint(1, 3))
    case.requests = some_requests(random, case.servers)
    for server in range(case.servers):
        waiting = [r for r in case.requests if r.instance == server and not r.rejected]
        running: list[Request] = []
        now_s = 0.0
        while waiting or running:
            if not running:
                now_s = max(now_s, waiting[0].arrival_s)
            came = [r for r in waiting if r.arrival_s <= now_s][: 4 - len(running)]
            waiting = [r for r in waiting if r not in came]
            end_s = now_s + random.uniform(0.01, 0.3)
            held = len(running) + len(came)
            replays = 1 if came else random.randint(1, min(r.output_tokens - r.generated for r in running))
            decoding = 0 if came else held
            tokens = sum(r.prompt_tokens for r in came)
            case.journal.step(server, now_s, end_s, replays, decoding, held, tokens, len(came), 0, held)
            for request in came:
                request.scheduled_s, request.first_token_s = now_s, end_s
            for request in came or running:
                request.generated += replays
                request.finish_s = end_s
            running = [r for r in [*running, *came] if r.generated < r.output_tokens]
            now_s = end_s + random.choice([0.0, 0.0, 0.02])
    return case


def concurrent(random: Random) -> Case:
    case = Case([], Journal(), random.randint(1, 2))
    case.requests = some_requests(random, case.servers)
    for server in range(case.servers):
        free_s = [0.0] * random.randint(1, 4)
        for request in case.requests:
            if request.instance != server or request.rejected:
                continue
            place = free_s.index(min(free_s))
            start_s = max(free_s[place], request.arrival_s)
            request.scheduled_s = start_s
            first_s = request.first_token_s = start_s + random.uniform(0.01, 0.3)
            replays = request.output_tokens - 1
            end_s = request.finish_s = first_s + 0.1 * replays
            case.journal.step(server, start_s, first_s, 1, 0, 1, request.prompt_tokens, 1, 0, place + 1)
            if replays:
                case.journal.step(server, first_s, end_s, replays, 1, 1, 0, 0, 0, place + 1)
            free_s[place] = end_s
    return case


def scattered(random: Random) -> Case:
    """Times on a coarse grid, so that many are the same; steps of no duration and beyond the last finish."""
    case = Case([], Journal(), random.randint(1, 3))
    case.requests = some_requests(random, case.servers)

    def later_s(than_s: float) -> float:
        return than_s + random.randint(0, 6) / 4

    for request in case.requests:
        request.arrival_s = later_s(1.0)
        if not request.rejected:
            request.scheduled_s = later_s(request.arrival_s)
            request.first_token_s = later_s(request.scheduled_s)
            request.finish_s = later_s(request.first_token_s) if request.output_tokens > 1 else (
                request.first_token_s
            )  # fmt: skip
    for _ in range(random.randint(0, 15)):
        start_s = later_s(0.5)
        case.journal.step(
            random.randrange(case.servers), start_s, later_s(start_s), random.randint(1, 5),
            random.randint(0, 4), 4, random.randint(0, 9), random.randint(0, 2), 0,
            random.randint(0, KV_LIMIT),
        )  # fmt: skip
    return case


KINDS = [batched, concurrent, scattered]
EACH = pytest.mark.parametrize("kind", KINDS)
SEEDS = range(60)


def cases(kind: Callable[[Random], Case], seeds: Sequence[int] = SEEDS) -> list[Case]:
    return [kind(Random(seed)) for seed in seeds]


# -- references ------------------------------------------------------------------------------------------


def queue_at(case: Case, t: float) -> int:
    return sum(r.arrival_s <= t < r.scheduled_s for r in case.requests if not r.rejected)


def running_at(case: Case, t: float) -> list[dict[str, float]]:
    return [row for row in case.rows if row["start_s"] <= t < row["end_s"]]


def kv_at(case: Case, t: float) -> float:
    """Units of all servers."""
    held = 0.0
    for server in {row["instance"] for row in running_at(case, t)}:
        begun = [row for row in case.rows if row["instance"] == server and row["start_s"] <= t]
        held += max(enumerate(begun), key=lambda item: (item[1]["start_s"], item[0]))[1]["kv_used"]
    return held


def tokens_at(case: Case, t: float) -> float:
    tokens = 0.0
    for row in case.rows:
        if row["end_s"] <= t:
            tokens += row["replays"] * row["decoding"] + row["first_tokens"]
        elif row["start_s"] <= t:
            passed = (t - row["start_s"]) / (row["end_s"] - row["start_s"])
            tokens += row["replays"] * row["decoding"] * passed
    return tokens


def over_time(case: Case, level: Callable[[Case, float], float], start_s: float, end_s: float) -> float:
    """The integral of a level."""
    times = {start_s, end_s}
    for row in case.rows:
        times |= {row["start_s"], row["end_s"]}
    for r in case.requests:
        times |= {t for t in (r.arrival_s, r.scheduled_s) if math.isfinite(t)}
    inside = sorted(t for t in times if start_s <= t <= end_s)
    return sum((b - a) * level(case, (a + b) / 2) for a, b in pairwise(inside))


def highest(case: Case, level: Callable[[Case, float], float]) -> float:
    times = sorted(
        {row["start_s"] for row in case.rows}
        | {row["end_s"] for row in case.rows}
        | {t for r in case.requests for t in (r.arrival_s, r.scheduled_s) if math.isfinite(t)}
    )
    return max((level(case, (a + b) / 2) for a, b in pairwise(times)), default=0)


def linear(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def nearest(values: Sequence[float], percent: int) -> float:
    return sorted(values)[-(-percent * len(values) // 100) - 1]


def by_hand(case: Case, slo: Promise | None) -> dict[str, float | None]:
    done = [r for r in case.requests if not r.rejected]
    start_s = min(r.arrival_s for r in case.requests)
    end_s = max((r.finish_s for r in done), default=start_s)
    duration_s = end_s - start_s

    def per(amount: float, divisor: float) -> float | None:
        return amount / divisor if divisor > 0 else None

    found: dict[str, float | None] = {"duration_s": duration_s}
    samples = {
        "ttft": [r.first_token_s - r.arrival_s for r in done],
        "tpot": [(r.finish_s - r.first_token_s) / (r.output_tokens - 1) for r in done if r.output_tokens > 1],
        "e2e": [r.finish_s - r.arrival_s for r in done],
        "queue": [r.scheduled_s - r.arrival_s for r in done],
    }
    for name, sample in samples.items():
        found[f"{name}_mean_s"] = mean(sample) if sample else None
        for p in PERCENTILES:
            found[f"{name}_p{p}_s"] = linear(sample, p) if sample else None
    gaps: list[float] = []
    for row in case.rows:
        number = int(row["replays"] * row["decoding"])
        gaps += [(row["end_s"] - row["start_s"]) / row["replays"]] * number
    for p in PERCENTILES:
        found[f"itl_p{p}_s"] = nearest(gaps, p) if gaps else None
    between_s = sum(r.finish_s - r.first_token_s for r in done)
    found["itl_mean_s"] = per(between_s, sum(r.output_tokens - 1 for r in done))

    outputs, prompts = sum(r.output_tokens for r in done), sum(r.prompt_tokens for r in done)
    found["request_throughput_per_s"] = per(len(done), duration_s)
    found["output_throughput_tokens_per_s"] = per(outputs, duration_s)
    found["total_throughput_tokens_per_s"] = per(outputs + prompts, duration_s)

    good = {"ttft": 0, "tpot": 0, "e2e": 0, "all": 0}
    promise = slo or Promise()
    for r in done:
        tpot_s = (r.finish_s - r.first_token_s) / (r.output_tokens - 1) if r.output_tokens > 1 else 0.0
        kept = {
            "ttft": promise.ttft_s is None or r.first_token_s - r.arrival_s <= promise.ttft_s,
            "tpot": promise.tpot_s is None or tpot_s <= promise.tpot_s,
            "e2e": promise.e2e_s is None or r.finish_s - r.arrival_s <= promise.e2e_s,
        }
        for name, keeps in {**kept, "all": all(kept.values())}.items():
            good[name] += keeps
    for name in ("ttft", "tpot", "e2e"):
        asked = getattr(promise, f"{name}_s") is not None
        found[f"slo_attainment_{name}"] = good[name] / len(case.requests) if asked else None
    asked = promise != Promise()
    found["slo_attainment"] = good["all"] / len(case.requests) if asked else None
    found["goodput_per_s"] = per(good["all"], duration_s) if asked else None

    def servers_running(case: Case, t: float) -> int:
        return len({row["instance"] for row in running_at(case, t)})

    def batch(case: Case, t: float) -> float:
        return sum(row["decoding"] for row in running_at(case, t))

    found["utilisation"] = per(over_time(case, servers_running, start_s, end_s), duration_s * case.servers)
    found["mean_batch"] = per(over_time(case, batch, start_s, end_s), duration_s)
    found["max_batch"] = highest(case, batch)
    found["mean_queue"] = per(over_time(case, queue_at, start_s, end_s), duration_s)
    found["max_queue"] = highest(case, queue_at)
    held = over_time(case, kv_at, start_s, end_s)
    found["mean_kv_share"] = per(held, duration_s * case.servers * KV_LIMIT)
    found["max_kv_share"] = max((row["kv_used"] for row in case.rows), default=0.0) / KV_LIMIT
    found["preemptions"] = sum(r.preemptions for r in case.requests)
    found["waited_for_kv"] = len([r for r in case.requests if r.waited_for_kv])
    found["rejected"], found["completed"] = len(case.requests) - len(done), len(done)
    giving = [row for row in case.rows if row["decoding"] > 0 or row["first_tokens"] > 0]
    iterations = found["iterations"] = sum(row["replays"] for row in giving)
    tokens = sum(row["replays"] * row["decoding"] + row["first_tokens"] for row in giving)
    found["overlap"] = per(tokens, iterations * len(case.requests))
    return found


# -- figures ---------------------------------------------------------------------------------------------


def close(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


@slow
@EACH
@pytest.mark.parametrize(
    "slo",
    first(2, [None, Promise(0.4, 0.11, 1.5), Promise(), Promise(ttft_s=0.3), Promise(tpot_s=0.1, e2e_s=2.0)]),
)
def test_every_figure_is_that_of_the_slow_reference(
    kind: Callable[[Random], Case], slo: Promise | None
) -> None:
    for case in cases(kind):
        found, expected = case.figures(slo), by_hand(case, slo)
        assert set(found) == set(expected) == NAMES
        for name, value in expected.items():
            assert found[name][0] == (value if value is None else close(value)), name
        assert {name for name, (_, unit) in found.items() if unit == "s"} == {
            name for name in NAMES if name.endswith("_s") and not name.endswith("per_s")
        }


@slow
@EACH
def test_every_level_is_that_of_the_slow_reference(kind: Callable[[Random], Case]) -> None:
    for case in cases(kind, range(25)):
        columns = levels(case.served, case.steps, kv_limit=KV_LIMIT, servers=case.servers, most=41)
        assert list(columns) == ["t_s", "queue", "batch", "kv_share", "tokens"]
        assert len(columns["t_s"]) <= 41
        for i, t in enumerate(columns["t_s"].tolist()):
            assert columns["queue"][i] == queue_at(case, t)
            assert columns["batch"][i] == sum(row["decoding"] for row in running_at(case, t))
            assert columns["kv_share"][i] == close(kv_at(case, t) / KV_LIMIT / case.servers)
            assert columns["tokens"][i] == close(tokens_at(case, t))


@pytest.mark.parametrize("kind", [batched, concurrent])
def test_levels_span_the_run_and_end_with_all_tokens(kind: Callable[[Random], Case]) -> None:
    for case in cases(kind):
        columns = levels(case.served, case.steps, kv_limit=KV_LIMIT, servers=case.servers)
        first_s, last_s = case.served.window_s
        if last_s > first_s:
            assert len(columns["t_s"]) == 400
            assert (columns["t_s"][0], columns["t_s"][-1]) == (first_s, last_s)
            assert columns["queue"][-1] == columns["batch"][-1] == columns["kv_share"][-1] == 0.0
            assert columns["tokens"][-1] == sum(r.output_tokens for r in case.requests if not r.rejected)
            assert (np.diff(columns["tokens"]) >= -1e-9).all()


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=30))
def test_weighted_percentiles_are_those_of_the_whole_sample(pairs: list[tuple[int, int]]) -> None:
    values, weights = np.array([float(v) for v, _ in pairs]), np.array([w for _, w in pairs])
    whole = np.repeat(values, weights).tolist()
    assert weighted_percentiles(values, weights) == tuple(nearest(whole, p) for p in PERCENTILES)


def test_the_mean_gap_has_what_no_step_accounts_for() -> None:
    """Two tokens 0.1 s apart, then one 0.7 s later, of which a step of 0.1 s is seen."""
    case = Case([Request(0, 0.0, 5, 3, 3, 0.0, 0.2, 1.0)], Journal(), 1)
    case.journal.step(0, 0.0, 0.2, 1, 0, 1, 5, 1, 0, 1)
    case.journal.step(0, 0.2, 0.3, 1, 1, 1, 0, 0, 0, 1)
    case.journal.step(0, 0.9, 1.0, 1, 1, 1, 0, 0, 0, 1)
    assert case.value("itl_mean_s") == close(0.4)
    assert case.value("itl_p99_s") == close(0.1)
    assert unseen_gaps_s(case.served, case.steps) == close(0.6)


def test_steps_that_only_prefill_are_no_iterations() -> None:
    """A prompt in two chunks, then 4 iterations of 2 requests: 5 iterations, 9 tokens, 2 requests."""
    case = Case([Request(i, 0.0, 5, 5, 5, 0.0, 1.0, 3.0) for i in range(2)], Journal(), 1)
    case.journal.step(0, 0.0, 0.5, 1, 0, 1, 3, 0, 0, 1)
    case.journal.step(0, 0.5, 1.0, 1, 0, 1, 2, 1, 0, 1)
    case.journal.step(0, 1.0, 3.0, 4, 2, 2, 0, 0, 0, 1)
    assert case.value("iterations") == 5.0
    assert case.value("overlap") == close(9 / 5 / 2)


# -- edges -----------------------------------------------------------------------------------------------


def test_one_request() -> None:
    case = Case([Request(0, 2.0, 7, 3, 3, 2.0, 2.5, 3.5)], Journal(), 1)
    case.journal.step(0, 2.0, 2.5, 1, 0, 1, 7, 1, 0, 3)
    case.journal.step(0, 2.5, 3.5, 2, 1, 1, 0, 0, 0, 3)
    found = {name: value for name, (value, _) in case.figures(Promise(e2e_s=1.5)).items()}
    assert {found[f"ttft_{of}_s"] for of in ("mean", "p50", "p99")} == {0.5}
    assert {found[f"{name}_p90_s"] for name in ("tpot", "itl")} == {0.5}
    assert (found["utilisation"], found["slo_attainment"], found["max_queue"]) == (1.0, 1.0, 0.0)
    assert (found["mean_kv_share"], found["mean_batch"]) == (0.25, close(2 / 3))
    assert laws.violations(case.run()) == {}


def test_all_rejected() -> None:
    case = Case([Request(i, float(i), 7, 3, 3, rejected=True) for i in range(3)], Journal(), 2)
    found = case.figures(Promise(1.0, 1.0, 1.0))
    nothing = {name for name, (value, _) in found.items() if value is None}
    assert {name for name in NAMES if name.startswith(("ttft", "tpot", "itl", "e2e", "queue_"))} <= nothing
    assert {"goodput_per_s", "utilisation", "mean_queue", "overlap"} <= nothing
    assert found["slo_attainment"][0] == found["slo_attainment_ttft"][0] == 0.0
    assert (found["rejected"][0], found["completed"][0], found["duration_s"][0]) == (3.0, 0.0, 0.0)
    columns = levels(case.served, case.steps, kv_limit=KV_LIMIT, servers=2)
    assert {name: column.tolist() for name, column in columns.items()} == {name: [0.0] for name in columns}
    assert found["max_kv_share"][0] == 0.0
    assert laws.violations(case.run()) == {}


def test_answers_of_one_token_have_no_gaps_and_keep_every_promise_about_them() -> None:
    case = Case([Request(i, 0.0, 7, 1, 1, 0.0, 1.0, 1.0) for i in range(2)], Journal(), 1)
    case.journal.step(0, 0.0, 1.0, 1, 0, 2, 14, 2, 0, 2)
    found = case.figures(Promise(tpot_s=1e-9))
    assert {found[f"{name}_{of}_s"][0] for name in ("tpot", "itl") for of in ("mean", "p99")} == {None}
    assert (found["slo_attainment"][0], found["goodput_per_s"][0]) == (1.0, 2.0)
    assert laws.violations(case.run()) == {}


def test_no_duration_and_no_requests() -> None:
    case = Case([Request(0, 1.0, 7, 2, 2, 1.0, 1.0, 1.0)], Journal(), 1)
    case.journal.step(0, 1.0, 1.0, 1, 1, 1, 7, 1, 0, 1)
    found = case.figures(Promise(1.0, 1.0, 1.0))
    assert {found[name][0] for name in ("goodput_per_s", "utilisation", "mean_batch")} == {None}
    assert found["e2e_p50_s"][0] == found["duration_s"][0] == found["max_batch"][0] == 0.0
    assert levels(case.served, case.steps, kv_limit=1, servers=1)["tokens"].tolist() == [2.0]
    assert laws.violations(case.run()) == {}
    # Nor where the clock begins, where nothing is left to rounding.
    begin = Case([Request(0, 0.0, 7, 2, 2, 0.0, 0.0, 0.0)], Journal(), 1)
    begin.journal.step(0, 0.0, 0.0, 1, 1, 1, 7, 1, 0, 1)
    assert laws.violations(begin.run()) == {}
    none = Case([], Journal(), 1)
    assert set(none.figures()) == NAMES
    assert {len(c) for c in levels(none.served, none.steps, kv_limit=1, servers=1).values()} == {0}
    assert laws.violations(none.run()) == {}


# -- replicas --------------------------------------------------------------------------------------------


def test_the_interval_over_replicas_is_students() -> None:
    """4.302653 is the 97.5 % quantile of Student's t with 2 degrees of freedom, 12.706205 with 1."""
    replicas = [{"a_s": (value, "s"), "b": (other, ""), "c": (None, "")} for value, other in
                [(11.0, None), (12.0, 25.0), (13.0, 27.0)]]  # fmt: skip
    found = over_replicas(replicas)
    half = 4.302652729911275 / math.sqrt(3)
    assert found["a_s"] == (12.0, close(12.0 - half), close(12.0 + half))
    assert found["b"] == (26.0, close(26.0 - 12.706204736174698), close(26.0 + 12.706204736174698))
    assert found["c"] == (None, None, None)
    assert over_replicas(replicas[:1])["a_s"] == (11.0, None, None)
    assert over_replicas(replicas[:1] * 4)["a_s"] == (11.0, 11.0, 11.0)
    assert over_replicas([]) == {}
    assert over_replicas([{"a_s": (value, "s")} for value in (0.0, 1.0)])["a_s"][1] == 0.0
    either = over_replicas([{"a": (value, "")} for value in (-1.0, 1.0)])["a"]
    assert either == (0.0, close(-12.706204736174698), close(12.706204736174698))


# -- laws ------------------------------------------------------------------------------------------------

Breaks = Callable[[Run], Iterator[Run]]
BREAKS: list[tuple[str, Breaks]] = []


def breaks(law: str) -> Callable[[Breaks], Breaks]:
    def note(mutation: Breaks) -> Breaks:
        BREAKS.append((law, mutation))
        return mutation

    return note


def with_request(run: Run, i: int, **values: Any) -> Run:
    columns = {}
    for name, value in values.items():
        columns[name] = getattr(run.served, name).copy()
        columns[name][i] = value
    return replace(run, served=replace(run.served, **columns))


def with_step(run: Run, i: int, name: str, value: float) -> Run:
    column = np.array(run.journal[name])
    column[i] = value
    return replace(run, journal={**run.journal, name: column})


def finished(run: Run) -> list[int]:
    return [int(i) for i in np.flatnonzero(run.served.finished)]


@breaks("conservation")
def lost_request(run: Run) -> Iterator[Run]:
    for i in finished(run):
        yield with_request(run, i, finish_s=math.nan)


@breaks("conservation")
def request_that_came_twice(run: Run) -> Iterator[Run]:
    for i in range(1, len(run.served)):
        yield with_request(run, i, id=run.served.id[i - 1])


@breaks("conservation")
def request_both_rejected_and_served(run: Run) -> Iterator[Run]:
    for i in finished(run):
        yield with_request(run, i, rejected=True)
    for i in np.flatnonzero(run.served.rejected).tolist():
        yield with_request(run, i, scheduled_s=run.served.arrival_s[i])


@breaks("conservation")
def token_too_many_or_too_few(run: Run) -> Iterator[Run]:
    for i in finished(run):
        for more in (-1, 1):
            yield with_request(run, i, output_tokens=run.served.output_tokens[i] + more)


@breaks("causality")
def effect_before_its_cause(run: Run) -> Iterator[Run]:
    s = run.served
    for i in finished(run):
        yield with_request(run, i, arrival_s=s.scheduled_s[i] + 1e-3)
        yield with_request(run, i, scheduled_s=s.first_token_s[i] + 1e-3)
        yield with_request(run, i, first_token_s=s.finish_s[i] + 1e-3)


@breaks("clock")
def time_that_is_no_time(run: Run) -> Iterator[Run]:
    for i in finished(run):
        for wrong in (math.nan, math.inf, -1.0):
            yield with_request(run, i, arrival_s=wrong)
            yield with_request(run, i, first_token_s=wrong)
    # Who is turned away has come all the same.
    for i in np.flatnonzero(run.served.rejected).tolist():
        for wrong in (math.nan, math.inf, -1.0):
            yield with_request(run, i, arrival_s=wrong)
    for i in range(len(run.journal["start_s"])):
        for wrong in (math.nan, math.inf, -1.0):
            yield with_step(run, i, "start_s", wrong)
            yield with_step(run, i, "end_s", wrong)


@breaks("clock")
def step_that_runs_back(run: Run) -> Iterator[Run]:
    for i in range(len(run.journal["start_s"])):
        yield with_step(run, i, "end_s", run.journal["start_s"][i] - 1e-3)


@breaks("capacity")
def more_kv_than_there_is(run: Run) -> Iterator[Run]:
    for i in range(len(run.journal["start_s"])):
        for wrong in (KV_LIMIT + 1.0, -1.0, math.nan):
            yield with_step(run, i, "kv_used", wrong)
            yield with_step(run, i, "kv_peak", wrong)


@breaks("in turn")
def overtaking(run: Run) -> Iterator[Run]:
    s = run.served
    for server in set(s.instance.tolist()):
        mine = [i for i in finished(run) if s.instance[i] == server]
        for i, j in pairwise(mine):
            if s.arrival_s[i] < s.arrival_s[j]:
                late_s = s.scheduled_s[j] + 1e-3
                yield with_request(run, i, scheduled_s=late_s)


@breaks("Little")
def staying_other_than_counted(run: Run) -> Iterator[Run]:
    if run.served.rejected.any():
        return
    for i in finished(run):
        yield with_request(run, i, finish_s=run.served.finish_s[i] + 1e-3)
        yield with_request(run, i, arrival_s=run.served.arrival_s[i] - 1e-3)


@breaks("Little")
def coming_without_going(run: Run) -> Iterator[Run]:
    assert run.occupancy is not None
    came_s, went_s = run.occupancy.came_s, run.occupancy.went_s
    yield replace(run, occupancy=Occupancy(came_s[1:], went_s))
    yield replace(run, occupancy=Occupancy(came_s, went_s[1:]))


@breaks("decoding")
def decoding_of_requests_that_are_not_there(run: Run) -> Iterator[Run]:
    for i in range(len(run.journal["start_s"])):
        yield with_step(run, i, "decoding", 1000.0)


@cache
def good() -> list[Any]:
    """Runs that break no law."""
    return [kind(Random(seed)).run() for kind in (batched, concurrent) for seed in range(40)]


@pytest.mark.parametrize(("law", "mutation"), BREAKS, ids=[mutation.__name__ for _, mutation in BREAKS])
def test_a_broken_run_is_caught_by_its_law(law: str, mutation: Breaks) -> None:
    tried = 0
    for run in good():
        for broken, _ in zip(mutation(run), range(9), strict=False):
            tried += 1
            assert law in laws.violations(broken)
            with pytest.raises(LawError, match=law):
                laws.enforce(broken)
    assert tried >= 40


def test_good_runs_break_no_law_and_rounding_does_not_either() -> None:
    for run in good():
        laws.enforce(run)
        s = run.served
        rounded = replace(s, arrival_s=s.arrival_s * (1 + 1e-12), finish_s=s.finish_s * (1 - 1e-12))
        assert laws.violations(replace(run, served=rounded)) == {}
        steps = {**run.journal, "end_s": run.journal["end_s"] * (1 + 1e-12)}
        assert laws.violations(replace(run, journal=steps)) == {}


def test_the_order_of_arrival_is_asked_only_where_it_is_kept() -> None:
    run = next(broken for run in good() for broken in overtaking(run))
    assert "in turn" in laws.violations(run)
    assert "in turn" not in laws.violations(replace(run, out_of_turn=set(run.served.instance.tolist())))


def test_kv_grows_evenly_inside_a_step() -> None:
    case = Case([Request(0, 0.0, 7, 5, 5, 0.0, 0.5, 4.0)], Journal(), 1)
    case.journal.step(0, 0.0, 4.0, 4, 1, 1, 0, 0, 0, 2, KV_LIMIT)
    assert case.value("max_kv_share") == 1.0
    assert case.value("mean_kv_share") == close((2 + KV_LIMIT) / 2 / KV_LIMIT)
    columns = levels(case.served, case.steps, kv_limit=KV_LIMIT, servers=1, most=5)
    expected = [2 + (KV_LIMIT - 2) * i / 4 for i in range(4)]
    np.testing.assert_allclose(columns["kv_share"][:4] * KV_LIMIT, expected)


def test_kv_of_a_window_is_the_mean_of_what_is_held_in_it() -> None:
    """A server holds evenly more from 2 to 10 units in the 4 s of a step that begins at 1 s, then 5 units for
    no time at all, 5 to 9 in 2 s, and 4 to 8 in half a second."""
    requests = [Request(0, 1.0, 7, 9, 9, 1.0, 5.0, 7.5)]
    case = Case(requests, Journal(), 1)
    case.journal.step(0, 1.0, 5.0, 4, 1, 1, 0, 0, 0, 2, 10)
    case.journal.step(0, 5.0, 5.0, 1, 1, 1, 0, 0, 0, 5, 5)
    case.journal.step(0, 5.0, 7.0, 4, 1, 1, 0, 0, 0, 5, 9)
    case.journal.step(0, 7.0, 7.5, 1, 1, 1, 0, 0, 0, 4, 8)

    def held(begin_s: float, end_s: float) -> float | None:
        window = Window(begin_s, end_s, np.ones(1, np.bool_))
        found = figures(case.served, case.steps, kv_limit=KV_LIMIT, servers=1, slo=None, window=window)
        return found["mean_kv_share"][0]

    for begin_s, end_s in ((1.0, 5.0), (1.5, 4.5), (2.0, 3.0), (4.0, 5.0)):
        assert held(begin_s, end_s) == close((begin_s + end_s) / KV_LIMIT)
    assert held(5.0, 7.0) == close((5 + 9) / 2 / KV_LIMIT)
    assert held(7.25, 7.5) == close(7 / KV_LIMIT)
    # Over a boundary: the areas of both parts by the length of all.
    assert held(3.0, 6.0) == close((8 * 2 + 6 * 1) / 3 / KV_LIMIT)


@pytest.mark.parametrize("together", [1, 3])
def test_requests_at_even_times_are_offered_at_their_rate(together: int) -> None:
    """So many come every half second: as many gaps as groups but the last, which no gap follows."""
    times = [3.0 + 0.5 * (i // together) for i in range(6 * together)]
    case = Case([Request(i, t, 7, 1, 1, t, 9.0, 9.0) for i, t in enumerate(times)], Journal(), 1)
    window = whole_run(case.served)
    found = both(case.served, case.steps, kv_limit=KV_LIMIT, servers=1, slo=None, window=window)
    assert found["offered_per_s"] == (close(2.0 * together), "1/s")


def test_the_message_of_a_broken_law_names_the_first_and_counts_the_rest() -> None:
    case = Case([Request(i, 1.0, 7, 1, 1, 0.0, 2.0, 2.0) for i in range(9)], Journal(), 1)
    case.journal.step(0, 1.0, 2.0, 1, 0, 9, 63, 9, 0, 9)
    text = "causality: request 0 has its scheduled_s before its arrival_s; .*request 2 .*and 6 more"
    with pytest.raises(LawError, match=text):
        laws.enforce(case.run())
    assert "more" not in " ".join(laws.causality(Case(case.requests[:3], case.journal, 1).run()))


def test_the_one_that_was_overtaken_is_named() -> None:
    """Of four that come one a second, the third is scheduled after the fourth, but not after the first."""
    times = [(0.0, 5.0), (1.0, 6.0), (2.0, 8.0), (3.0, 7.0)]
    case = Case([Request(i, at, 7, 1, 1, s, 9.0, 9.0) for i, (at, s) in enumerate(times)], Journal(), 1)
    assert list(laws.in_turn(case.run())) == ["request 2 was scheduled after one that came later"]


@pytest.mark.parametrize(("tokens", "named"), [((7, 7, 9, 8), []), ((7, 7, 9, 9), [3]), ((9, 9, 8, 9), [3])])
def test_only_a_shorter_prompt_overtakes_one_that_is_late(tokens: tuple[int, ...], named: list[int]) -> None:
    """The third of four is scheduled after the fourth, which may be if it is longer."""
    times = [(0.0, 5.0), (1.0, 6.0), (2.0, 8.0), (3.0, 7.0)]
    requests = [
        Request(i, at, count, 1, 1, s, 9.0, 9.0)
        for i, ((at, s), count) in enumerate(zip(times, tokens, strict=True))
    ]
    run = replace(Case(requests, Journal(), 1).run(), late={0})
    says = "was scheduled before an earlier one no longer than it"
    assert list(laws.in_turn(run)) == [f"request {i} {says}" for i in named]


def test_kv_in_shares_of_what_servers_hold_is_at_most_what_was_held() -> None:
    case = Case([Request(0, 0.0, 7, 2, 2, 0.0, 1.0, 2.0)], Journal(), 1)
    case.journal.step(0, 1.0, 2.0, 1, 1, 1, 7, 1, 0, 0.25, 0.5)  # type: ignore[arg-type]
    found = figures(case.served, case.steps, kv_limit=1.0, servers=1, slo=None)
    assert found["max_kv_share"][0] == 0.5
    assert laws.violations(replace(case.run(), kv_limit=1.0)) == {}


def test_a_step_may_hold_no_kv_at_all() -> None:
    case = Case([Request(0, 0.0, 7, 1, 1, 0.0, 1.0, 1.0)], Journal(), 1)
    case.journal.step(0, 0.0, 1.0, 1, 0, 1, 7, 1, 0, 0, 0)
    assert laws.violations(case.run()) == {}


def test_late_on_the_clock_rounding_is_that_of_the_clock() -> None:
    """Half a year on, the next number of seconds is 2e-9 later."""
    begin_s, end_s = 1.6e7, 1.6e7 + 1e-3
    case = Case([Request(0, begin_s, 7, 2, 2, begin_s, begin_s, end_s)], Journal(), 1)
    case.journal.step(0, begin_s, begin_s, 1, 0, 1, 7, 1, 0, 1)
    case.journal.step(0, begin_s, math.nextafter(end_s, math.inf), 1, 1, 1, 0, 0, 0, 1)
    assert laws.violations(case.run()) == {}


def test_the_last_token_of_a_prompt_is_never_taken_from_a_cache() -> None:
    case = Case([Request(0, 0.0, 7, 1, 1, 0.0, 1.0, 1.0)], Journal(), 1)
    case.journal.step(0, 0.0, 1.0, 1, 0, 1, 7, 1, 0, 1)
    for cached, broken in ((-1, True), (0, False), (6, False), (7, True), (8, True)):
        case.requests[0].cached_prompt_tokens = cached
        assert ("reuse" in laws.violations(case.run())) is broken
