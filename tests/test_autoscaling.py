"""Autoscaling: laws that every rule keeps, and closed forms of what a rule wants.

busy servers of constant load    lambda S      requests a second times seconds of service, while none waits
open requests of constant load   lambda E2E    (Little)
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import ceil, inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simcore.input.files import InputError
from simcore.machine.laws import digest
from simcore.machine.machine import DeadlockError, Machine, Program
from simcore.scenario import parse_scenario
from simcore.sim.runs import span_by_span
from simcore.studies.columns import WHOLE_RUN
from simcore.studies.serving import laws, scaler
from simcore.studies.serving.autoscaling import ByOpenRequests, ByUtilisation, Fleet, Stint
from simcore.studies.serving.offer import least_loaded
from simcore.studies.serving.replica import _of_servers_that_run, figures_of, held
from simcore.studies.serving.runner import Bench, Case, Result
from simcore.studies.serving.scaler import Scaler
from simcore.studies.serving.served import Floats, served
from simcore.studies.serving.study import cases, refusal
from simcore.studies.serving.window import whole_run
from simcore.workload.requests import END, REQUESTS, Request
from tests.test_serving import Document, bench, document, outcome, strategy, workload
from tests.thorough import slow

CLOSE = 1e-9
KINDS = (
    "temporal_fusion",
    "dynamic_batching",
    "concurrent_instances",
    "iteration_batching",
    "continuous_batching",
)


def rule(kind: str = "open_requests", target: float = 2.0, **more: Any) -> Document:
    return {"kind": kind, "target": target, "start_s": 0.5, "check_s": 0.25, **more}


def scaled(*rules: Document, devices: int = 4, **changes: Any) -> Document:
    return document(devices=devices, autoscaling=list(rules), **changes)


def ran(given: Document) -> list[tuple[Case, Result]]:
    table = bench(given)
    return [(case, table.run(case, 0)) for case in cases(table)]


def one(given: Document) -> tuple[Bench, Case, Result, Fleet]:
    table = bench(given)
    (case,) = cases(table)
    result = table.run(case, 0)
    assert result.fleet is not None
    return table, case, result, result.fleet


def at_times(tmp_path: Path, times_s: Sequence[float] | Floats) -> Document:
    """Arrivals at these times."""
    path = tmp_path / "times.csv"
    path.write_text("at\n" + "".join(f"{at_s:.9f}\n" for at_s in times_s), encoding="utf-8")
    columns = {"arrival": "at"}
    return {"kind": "trace", "format": "table", "path": str(path), "columns": columns}


def bursts(tmp_path: Path, count: int = 4, size: int = 40, every_s: float = 8.0) -> Document:
    """Bursts of two seconds with nothing between them: servers start and stop with each."""
    times_s = [burst * every_s + 0.0513 * i for burst in range(count) for i in range(size)]
    return {**workload(0, at_times(tmp_path, times_s), 400, (20, 300)), "requests": None}


# -- the fixed fleet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["least_loaded", "round_robin", "prefix_aware"])
@pytest.mark.parametrize("kind", ["continuous_batching", "dynamic_batching"])
def test_with_as_many_servers_at_least_as_at_most_it_is_the_fixed_fleet_bit_for_bit(
    routing: str, kind: str
) -> None:
    load = workload(60, {"kind": "poisson", "rate_per_s": 60.0}, (20, 400), (3, 60))
    rules = ({"kind": "none"}, rule(min_servers=4), rule("utilisation", 0.5, min_servers=4))
    results = ran(scaled(*rules, workload=load, strategies=[strategy(kind)], routing=routing))
    (_, fixed), *others = results
    assert len(set(fixed.served.instance.tolist())) == 4
    for _, result in others:
        for column in fields(fixed.served):
            same = getattr(fixed.served, column.name), getattr(result.served, column.name)
            np.testing.assert_array_equal(*same)
        for name in fixed.journal:
            np.testing.assert_array_equal(fixed.journal[name], result.journal[name])
        assert digest(fixed.trace) == digest(result.trace)


def test_with_as_many_servers_at_least_as_at_most_every_figure_is_that_of_the_fixed_fleet() -> None:
    rules = ({"kind": "none"}, rule(min_servers=4))
    table = bench(scaled(*rules, workload=workload(60), slo={"ttft_s": 0.05}))
    found = []
    for case in cases(table):
        result = table.run(case, 0)
        found.append(figures_of(table, result, case, whole_run(result.served)))
    assert found[0] == found[1]
    assert found[0]["device_time_saved"] == (0.0, "")


def test_a_scenario_without_autoscaling_has_no_figures_of_it() -> None:
    given = outcome(document(devices=2))
    names = {row.metric for row in given.rows}
    assert not names & {"server_s", "device_hours", "device_time_saved", "mean_servers", "server_starts"}
    assert "servers" not in given.tables["levels.parquet"]


# -- what a rule wants -------------------------------------------------------------------------------------


def service_s() -> float:
    """Seconds that a request takes alone."""
    alone = workload(1, {"kind": "constant", "rate_per_s": 1.0}, 100, 50)
    (_, result), *_ = ran(document(workload=alone, strategies=[strategy("temporal_fusion", 1)]))
    return float(result.served.finish_s[0] - result.served.scheduled_s[0])


@pytest.mark.parametrize("erlangs", [0.9, 2.3, 4.6])
@pytest.mark.parametrize("target", [0.5, 0.7])
def test_constant_load_settles_at_the_servers_that_the_utilisation_implies(
    erlangs: float, target: float
) -> None:
    gap_s = service_s() / erlangs
    load = workload(400, {"kind": "constant", "interval_s": gap_s}, 100, 50)
    by = rule("utilisation", target, start_s=0.0, check_s=20 * gap_s)
    ways = [strategy("temporal_fusion", 1)]
    *_, fleet = one(scaled(by, devices=12, workload=load, strategies=ways))
    settled = fleet.at(np.linspace(200 * gap_s, 395 * gap_s, 100))
    assert set(settled.tolist()) == {float(ceil(erlangs / target))}


@pytest.mark.parametrize("target", [1.0, 2.0, 3.5])
def test_constant_load_settles_at_the_servers_that_the_open_requests_imply(target: float) -> None:
    """Little: the number open is the rate times the time that a request stays."""
    load, check_s = workload(400, {"kind": "constant", "interval_s": 0.01}, 100, 50), 0.0973
    by = rule(target=target, start_s=0.0, check_s=check_s)
    _, _, result, fleet = one(scaled(by, devices=40, workload=load))
    done, open_ = result.served, []
    for at_s in check_s * np.arange(20, 40):
        ready = fleet.server[(fleet.ready_s < at_s) & (fleet.stopped_s >= at_s)]
        there = (done.arrival_s < at_s) & (done.finish_s >= at_s)
        open_.append(int((there & np.isin(done.instance, ready)).sum()))
        taking = (fleet.started_s <= at_s) & (fleet.stopped_s > at_s)
        assert taking.sum() == ceil(open_[-1] / target)
    assert np.mean(open_) == pytest.approx(100.0 * (done.finish_s - done.arrival_s)[200:390].mean(), rel=0.1)


def test_a_step_of_load_is_followed_after_the_start(tmp_path: Path) -> None:
    few, many = np.arange(0.03, 5.0, 0.5), np.arange(5.03, 12.0, 0.01)
    load = {**workload(0, at_times(tmp_path, [*few, *many]), 200, 60), "requests": None}
    _, _, result, fleet = one(scaled(rule(target=4.0, start_s=2.0, check_s=0.25), workload=load))
    assert fleet.at(np.array([4.9])) == [1.0]
    first, done = 1, result.served
    assert fleet.started_s[first] == pytest.approx(5.25, abs=1e-9)
    assert fleet.ready_s[first] == pytest.approx(7.25, abs=1e-9)
    assert set(done.instance[done.arrival_s < 7.25].tolist()) == {0}
    soon = done.instance[(done.arrival_s >= 7.25) & (done.arrival_s < 7.35)]
    assert np.isin(soon, fleet.server[fleet.ready_s == 7.25]).any()


def test_servers_are_kept_for_as_long_as_asked(tmp_path: Path) -> None:
    last_s = {}
    for keep_s in (0.0, 3.0):
        *_, result, fleet = one(scaled(rule(keep_s=keep_s), workload=bursts(tmp_path, 2, every_s=20.0)))
        # The first burst is answered before its servers are stopped.
        quiet_s = float(result.served.finish_s[result.served.arrival_s < 10.0].max())
        stops = fleet.stopped_s[fleet.stopped_s < 10.0]
        assert stops.max() > quiet_s - 0.5
        last_s[keep_s] = stops.max()
    assert last_s[3.0] - last_s[0.0] == pytest.approx(3.0, abs=0.5)


# -- the scaler, against a plain reference -----------------------------------------------------------------


@dataclass
class Load:
    """Requests by the times at which they come and how long each stays."""

    times_s: list[float]
    stays_s: list[float]


def drawn_load(random: Random, longest_s: float, apart_s: float) -> Load:
    """Three bursts; one request of each but the last stays very long."""
    load, now_s = Load([], []), 0.3
    for burst in range(3):
        long = random.randrange(8) if burst < 2 else -1
        for i in range(random.randint(8, 30)):
            now_s += random.expovariate(1.0)
            load.times_s.append(now_s)
            load.stays_s.append(longest_s if i == long else random.expovariate(0.3))
        now_s += random.uniform(0.5, 1.0) * apart_s
    return load


Stints = list[tuple[float, ...]]


def scaled_by_hand(by: Any, servers: int, load: Load) -> tuple[Stints, list[int]]:
    """The stints of servers, check by check with none left out, and the server of each request. Rates and
    numbers are counted anew from the requests at every check."""
    stints = [[i, 0.0, 0.0, inf, inf] for i in range(by.min_servers[0])]
    on: list[int] = []
    wanted: list[tuple[float, int]] = []
    every_s, checked_s = by.check_s[0], 0.0

    def ends_s(i: int) -> float:
        return load.times_s[i] + load.stays_s[i]

    def open_on(server: int, at_s: float) -> int:
        return sum(of == server and ends_s(i) > at_s for i, of in enumerate(on))

    def holding(at_s: float, ready: bool) -> list[list[float]]:
        return [one for one in stints if one[3] == inf and (one[2] <= at_s) == ready]

    def busy_s(server: int, from_s: float, to_s: float) -> float:
        """Of the union of the times that its requests stay."""
        mine = sorted((load.times_s[i], ends_s(i)) for i, of in enumerate(on) if of == server)
        total_s, done_s = 0.0, from_s
        for begin_s, end_s in mine:
            total_s += max(0.0, min(end_s, to_s) - max(begin_s, done_s))
            done_s = max(done_s, min(end_s, to_s))
        return total_s

    def stop(one: list[float], at_s: float) -> None:
        mine = [ends_s(i) for i, of in enumerate(on) if of == one[0]]
        one[3:] = [at_s, max([at_s, *mine])]

    def check(at_s: float) -> None:
        ready = [int(one[0]) for one in holding(at_s, True)]
        if by.kind == "open_requests":
            share = sum(open_on(server, at_s) for server in ready) / by.target[0]
        else:
            share = sum(busy_s(server, checked_s, at_s) for server in ready) / every_s / by.target[0]
        wanted.append((at_s, ceil(share - 1e-9)))
        kept = [n for then_s, n in wanted if then_s > at_s - by.keep_s[0] or then_s == at_s]
        number = min(max([*kept, by.min_servers[0]]), servers)
        starting = holding(at_s, False)
        running = len(ready) + len(starting)
        off = sorted({*range(servers)} - {int(one[0]) for one in stints if one[4] > at_s})
        stints.extend([i, at_s, at_s + by.start_s[0], inf, inf] for i in off[: max(0, number - running)])
        for _ in range(number, running):
            if starting:
                stop(starting.pop(), at_s)
                continue
            there = holding(at_s, True)
            stop(min(there, key=lambda one: (open_on(int(one[0]), at_s), -one[0])), at_s)

    for i, came_s in enumerate([*load.times_s, inf]):
        while checked_s + every_s < came_s:
            check(checked_s + every_s)
            checked_s += every_s
            if i == len(load.times_s) and max(map(ends_s, range(i))) <= checked_s:
                return [tuple(one) for one in stints], on
        free = {int(one[0]): open_on(int(one[0]), came_s) for one in holding(came_s, True)}
        on.append(min(free, key=lambda server: (free[server], server)))
    raise AssertionError


class OnTheClock:
    """A run without machines: sources feed their items in order of time, requests are answered when they have
    stayed as long as they do, and a server's program ends once it has END and nothing open."""

    def __init__(self, by: Any, servers: int, load: Load) -> None:
        self.due: list[tuple[float, int, Callable[[], object]]] = []
        self.number, self.load = count(), load
        self.stopped, self.open_ = [False] * servers, [0] * servers
        self.scaler = Scaler(self, by, range(servers), least_loaded)  # type: ignore[arg-type]
        self.programs = [
            self.scaler.program(SimpleNamespace(rank=rank), partial(self.serve, rank))
            for rank in range(servers)
        ]
        self.requests = [Request(i, at_s, 9, 2, 2) for i, at_s in enumerate(load.times_s)]

    def serve(self, rank: int) -> Any:
        while self.open_[rank] or not self.stopped[rank]:
            yield
        self.stopped[rank] = False

    def at(self, at_s: float, do: Callable[[], object]) -> None:
        heappush(self.due, (at_s, next(self.number), do))

    def feed(self, to: Any, inbox: str, items: Iterator[tuple[float, object]]) -> None:
        def take(item: object) -> None:
            self.deliver(to(item), item)
            wait()

        def wait() -> None:
            if coming := next(items, None):
                self.at(coming[0], partial(take, coming[1]))

        wait()

    def deliver(self, ranks: Sequence[int], item: object) -> None:
        for rank in ranks:
            if isinstance(item, Request):
                item.instance = rank
                self.open_[rank] += 1
                ends_s = item.arrival_s + self.load.stays_s[item.id]
                self.at(ends_s, partial(self.answer, item, ends_s))
            else:
                self.stopped[rank] = True
            next(self.programs[rank], None)

    def answer(self, request: Request, at_s: float) -> None:
        self.open_[request.instance] -= 1
        self.scaler.answered(request, at_s)
        next(self.programs[request.instance], None)

    def run(self) -> tuple[Stints, list[int]]:
        for program in self.programs:
            next(program)
        coming = [(r.arrival_s, r) for r in self.requests]
        self.feed(self.scaler, REQUESTS, iter([*coming, (coming[-1][0], END)]))
        while self.due:
            heappop(self.due)[2]()
        stints = [tuple(getattr(one, f.name) for f in fields(Stint)) for one in self.scaler.stints]
        return stints, [r.instance for r in self.requests]


def by_open(target: float, start_s: float, **more: Any) -> ByOpenRequests:
    return ByOpenRequests(
        kind="open_requests", target=[target], start_s=[start_s], **{"check_s": [1.0], **more}
    )


def by_busy(target: float, start_s: float, **more: Any) -> ByUtilisation:
    return ByUtilisation(kind="utilisation", target=[target], start_s=[start_s], check_s=[1.0], **more)


@pytest.mark.parametrize(
    ("by", "longest_s", "apart_s"),
    [
        (by_open(1.5, 2.5), 40.0, 30.0),
        (by_open(1.0, 0.0, keep_s=[3.0]), 9.0, 9.0),
        (by_busy(0.4, 3.2, min_servers=[2]), 20.0, 25.0),
        (by_busy(0.6, 0.0, keep_s=[2.0]), 150.0, 300.0),
        # The number is kept for longer than checks go on where nothing changes.
        (by_open(1.0, 1.0, keep_s=[99.0]), 9.0, 400.0),
        (by_open(1.0, 1.0, keep_s=[50.0], check_s=[0.5]), 9.0, 200.0),
    ],
    ids=["open", "open and kept", "busy", "busy over a pause", "kept over a pause", "kept, often checked"],
)
@pytest.mark.parametrize("seed", range(3))
def test_servers_start_and_stop_as_the_rule_says(
    by: Any, longest_s: float, apart_s: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaler, "QUIET", 40)
    load = drawn_load(Random(seed), longest_s, apart_s)
    stints, on = OnTheClock(by, 5, load).run()
    expected, expected_on = scaled_by_hand(by, 5, load)
    assert on == expected_on
    assert stints == expected
    assert len(stints) > 3


# -- nothing is lost, and all is counted ------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_is_lost_while_servers_start_and_stop(tmp_path: Path, kind: str) -> None:
    load = bursts(tmp_path)
    if kind == "iteration_batching":
        load = workload(160, {"kind": "gamma", "rate_per_s": 6.0, "cv": 6.0}, 400, 200)
    given = scaled(rule(), workload=load, strategies=[strategy(kind, 4)])
    _, case, result, fleet = one(given)
    done = result.served
    assert done.finished.all()
    assert len(set(done.id.tolist())) == len(done) == 160
    # Servers did come and go, and so did requests on them.
    assert len(fleet.started_s) > 3
    assert len(set(done.instance.tolist())) > 1
    assert fleet.at(done.arrival_s).min() >= 1.0
    assert fleet.at(done.arrival_s).max() <= case.servers


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": workload(60, {"kind": "closed_loop", "clients": 12, "think_s": 0.1}, 200, (20, 200))},
        {"workload": workload(60, {"kind": "poisson", "rate_per_s": 4.0}, 60, 40, sessions={
            "turns": {"kind": "uniform", "low": 1, "high": 5}, "think_s": 0.5, "max_context_tokens": 4096})},
        {"devices": 8, "strategies": [{**strategy("continuous_batching"), "ranks": 2}]},
        {"devices": 1},
    ],
    ids=["closed loop", "sessions", "two ranks", "one server"],
)  # fmt: skip
@pytest.mark.parametrize("by", [rule(target=1.0), rule("utilisation", 0.6)], ids=["open", "busy"])
def test_every_kind_of_load_is_served_to_its_end(changes: Document, by: Document) -> None:
    result = one(scaled(by, **{"workload": workload(60, prompt=200, output=100), **changes}))[2]
    assert result.served.finished.all()
    assert len(result.served) == 60


def test_server_seconds_are_the_integral_of_the_number_that_runs(tmp_path: Path) -> None:
    table, case, result, fleet = one(scaled(rule(), workload=bursts(tmp_path)))
    found = figures_of(table, result, case, whole_run(result.served))
    begin_s, end_s = result.served.window_s
    inside = [at_s for at_s in [*fleet.started_s, *fleet.freed_s] if begin_s < at_s < end_s]
    edges = np.array(sorted({begin_s, end_s, *inside}))
    middle = (edges[1:] + edges[:-1]) / 2.0
    running = [sum(s <= t < e for s, e in zip(fleet.started_s, fleet.freed_s, strict=True)) for t in middle]
    total = float((np.diff(edges) * running).sum())
    assert len(set(running)) > 2
    assert found["server_s"][0] == pytest.approx(total, rel=CLOSE)
    assert found["device_hours"][0] == pytest.approx(total / 3600.0, rel=CLOSE)
    assert found["mean_servers"][0] == pytest.approx(total / (end_s - begin_s), rel=CLOSE)
    assert found["device_time_saved"][0] == pytest.approx(1.0 - total / (4 * (end_s - begin_s)), rel=CLOSE)
    assert found["max_servers"][0] == max(running)
    np.testing.assert_array_equal(fleet.at(middle), running)


def test_utilisation_is_of_the_servers_that_hold_their_devices(tmp_path: Path) -> None:
    table, case, result, fleet = one(scaled(rule(), workload=bursts(tmp_path)))
    window = whole_run(result.served)
    found = figures_of(table, result, case, window)
    busy_s = 0.0
    for server in range(4):
        own = result.journal["instance"] == server
        busy_s += float((result.journal["end_s"] - result.journal["start_s"])[own].sum())
    assert found["utilisation"][0] == pytest.approx(busy_s / fleet.held_s(window.begin_s, window.end_s))


def test_a_stopped_server_answers_what_it_has_and_takes_nothing_more(tmp_path: Path) -> None:
    # Long answers, of which few are open at a time, behind a burst of short ones.
    given = scaled(rule(target=4.0), workload=bursts(tmp_path, 4, 16, 3.0))
    given["workload"]["output_tokens"] = {"kind": "empirical", "values": [20, 20, 20, 900]}
    _, _, result, fleet = one(given)
    done, drained = result.served, 0
    for server, ready_s, stopped_s, freed_s in zip(
        fleet.server, fleet.ready_s, fleet.stopped_s, fleet.freed_s, strict=True
    ):
        if stopped_s == inf or stopped_s < ready_s:
            continue
        own = (done.instance == server) & (done.arrival_s >= ready_s) & (done.arrival_s <= freed_s)
        assert (done.arrival_s[own] <= stopped_s).all()
        if freed_s > stopped_s:
            drained += 1
            assert done.finish_s[own].max() == pytest.approx(freed_s, abs=CLOSE)
    assert drained


def test_a_server_that_starts_again_has_nothing_in_its_cache(tmp_path: Path) -> None:
    given = scaled(rule(), workload={**bursts(tmp_path), "distinct_prompts": 1})
    given["strategies"] = [{**strategy("continuous_batching"), "prefix_caching": True}]
    _, _, result, fleet = one(given)
    done, firsts = result.served, 0
    for server, ready_s, freed_s in zip(fleet.server, fleet.ready_s, fleet.freed_s, strict=True):
        own = np.flatnonzero((done.instance == server) & (done.arrival_s >= ready_s))
        own = own[done.arrival_s[own] < freed_s]
        if len(own):
            firsts += server > 0
            assert done.cached_prompt_tokens[own[np.argmin(done.scheduled_s[own])]] == 0
    assert firsts > 3
    assert done.cached_prompt_tokens.max() > 0


def test_checks_pause_while_nothing_comes(tmp_path: Path) -> None:
    """A hundred million checks are in the gap; they would take minutes."""
    given = scaled(rule(start_s=0.05, check_s=0.01), workload=bursts(tmp_path, 2, every_s=1e6))
    given["workload"]["output_tokens"] = {"kind": "constant", "value": 200}
    result, fleet = one(given)[2:]
    assert result.served.finished.all()
    # Both bursts are followed alike.
    starts_s = fleet.started_s[fleet.started_s > 0.0]
    first, second = starts_s[starts_s < 1e5], starts_s[starts_s > 1e5] - 1e6
    assert len(first) == len(second) > 0
    # A request that comes with a check is seen by this one or by the next.
    np.testing.assert_allclose(first, second, atol=0.011)


@slow
def test_an_outcome_says_what_is_spared_and_what_is_lost(tmp_path: Path) -> None:
    given = scaled({"kind": "none"}, rule(target=[2.0, 8.0]), workload=bursts(tmp_path), slo={"ttft_s": 0.03})
    found = outcome(given)
    saved = {row.axes.label: row.value or 0.0 for row in found.rows if row.metric == "device_time_saved"}
    fixed, two, eight = saved
    assert saved[fixed] == 0.0 < saved[two] <= saved[eight] < 1.0
    assert two.endswith("autoscaled to 2 open requests, 0.5 s to start, a check each 0.25 s")
    notes = [note for note in found.notes if "device time saved" in note]
    assert len(notes) == 2
    assert all("of the requests keep the SLOs instead of" in note for note in notes)
    assert set(found.tables["levels.parquet"]) >= {"servers"}


# -- the law, and bad input --------------------------------------------------------------------------------


def test_the_law_of_fleets_finds_what_breaks_it(tmp_path: Path) -> None:
    _, case, result, fleet = one(scaled(rule(), workload=bursts(tmp_path)))
    whole = laws.Run(result.served, result.journal, result.room.limit, fleet=fleet, ranks=case.axes.ranks)
    assert not list(laws.fleet(whole))

    def broken(**columns: Any) -> str:
        return " ".join(laws.fleet(replace(whole, fleet=replace(fleet, **columns))))

    assert "takes none" in broken(ready_s=fleet.ready_s + 1.0)
    assert "takes none" in broken(stopped_s=fleet.stopped_s.clip(max=1.0))
    assert "after its server was off" in broken(freed_s=fleet.freed_s.clip(max=1.0))
    assert "before its server is off" in broken(freed_s=np.full(len(fleet.freed_s), inf))
    assert "is off" in broken(server=np.zeros(len(fleet.server)))


def test_a_server_begins_again_once_it_is_off_each_time() -> None:
    stints = [Stint(0, 0.0, 0.0, 1.0, 2.0), Stint(0, 3.0, 3.0, 4.0, 9.0), Stint(0, 5.0, 5.0)]
    run = laws.Run(served([]), {}, 1.0, fleet=Fleet.of(1, stints))
    assert list(laws.fleet(run)) == ["stint 2 begins before its server is off"]


def test_a_mean_that_is_not_there_is_none_of_the_servers_that_run_either() -> None:
    fleet, window = Fleet.of(2, [Stint(0, 0.0, 0.0)]), whole_run(served([]))
    names = [f"{name}{of}" for name in ("utilisation", "mean_kv_share") for of in ("", WHOLE_RUN)]
    for value, expected in ((None, None), (0.25, 0.5)):
        found = _of_servers_that_run(dict.fromkeys(names, (value, "")), fleet, window, window)
        assert found == dict.fromkeys(names, (expected, ""))


def test_a_rule_is_called_by_what_is_not_as_by_default() -> None:
    def said(**given: Any) -> str:
        return ByOpenRequests(kind="open_requests", target=[2.0], **given).label()

    assert said() == "autoscaled to 2 open requests"
    assert said(start_s=[120.0], check_s=[20.0]).endswith("requests, 120 s to start, a check each 20 s")
    assert said(min_servers=[2], keep_s=[1.0]).endswith("requests, at least 2, kept 1 s")


@pytest.mark.parametrize("target", [0.1, 0.3, 0.7, 1.0])
def test_no_server_more_is_wanted_by_rounding(target: float) -> None:
    """Of what keeps a number of servers exactly that busy, in binary some quotients are above that number."""
    shares = [(number * target, number) for number in range(1, 60)]
    assert any(share / target != number for share, number in shares) or target == 1.0
    for share, number in shares:
        assert by_busy(target, 0.0).wanted(0, 3.0 * share, 3.0) == number
        assert by_busy(target, 0.0).wanted(0, 3.0 * share + 1e-6, 3.0) == number + 1


def test_what_a_run_takes_of_its_devices_is_of_its_time_alone() -> None:
    """From its first arrival on, of two ranks a server: 8 of 12 server-seconds."""
    fleet = Fleet.of(2, [Stint(0, 0.0, 0.0), Stint(1, 4.0, 4.5, 5.5, 6.0)])
    found = {name: value for name, (value, _) in held(fleet, 2.0, 8.0, 2).items()}
    assert found["server_s"] == 8.0
    assert found["device_hours"] == pytest.approx(16.0 / 3600.0)
    assert found["device_time_saved"] == pytest.approx(1.0 / 3.0)
    assert found["mean_servers"] == pytest.approx(8.0 / 6.0)
    assert (found["max_servers"], found["server_starts"]) == (2.0, 1.0)
    assert held(fleet, 2.0, 2.0, 2)["device_time_saved"][0] is None
    assert held(fleet, 2.0, 2.25, 2)["device_time_saved"][0] == 0.5


def test_means_of_a_fleet() -> None:
    fleet = Fleet.of(3, [Stint(0, 0.0, 0.0), Stint(1, 2.0, 3.0, 5.0, 6.0)])
    assert fleet.held_s(0.0, 10.0) == 14.0
    assert fleet.mean(0.0, 10.0) == 1.4
    assert fleet.mean(7.0, 9.0) == 1.0
    assert fleet.mean(3.0, 3.0) == 2.0
    assert (fleet.most(0.0, 10.0), fleet.most(7.0, 10.0), fleet.starts(0.0, 10.0)) == (2.0, 1.0, 1)
    # What begins or ends just there was there.
    assert (fleet.most(0.0, 2.0), fleet.most(6.0, 9.0), fleet.starts(0.0, 2.0)) == (2.0, 2.0, 1)
    assert Fleet.fixed(3).mean(0.1, 0.7) == 3.0
    # Whoever is there from the begin to the end counts as one, whatever rounding does to a sum of times.
    for number, end_s in ((6, 1.1), (7, 0.4)):
        assert Fleet.fixed(number).mean(0.0, end_s) == number
        until = Fleet.of(number, [Stint(i, 0.0, 0.0, end_s, end_s) for i in range(number)])
        assert until.mean(0.0, end_s) == number


@pytest.mark.parametrize(
    ("by", "said"),
    [
        ({"kind": "queue", "target": 4}, "kind"),
        ({"kind": "open_requests"}, "target"),
        (rule(target=0.0), "target"),
        (rule(target=float("nan")), "target"),
        (rule("utilisation", 1.5), "target"),
        (rule(min_servers=0), "min_servers"),
        (rule(min_servers=5), r"min_servers: is 5; 4 devices make 4 servers of 1 ranks at most"),
        (rule(check_s=0.0), "check_s"),
        (rule(start_s=-1.0), "start_s"),
        (rule(keep_s=1e6), r"keep_s: is 1e\+06; at most 10,000 check_s, 2500 s, are allowed"),
        (rule(min_servers=[1, 5]), r"min_servers: is 5; 4 devices make 4 servers of 1 ranks at most"),
        (rule(start_s=[1.0, 2501.0]), r"start_s: is 2501; at most 10,000 check_s, 2500 s, are allowed"),
        (rule(keep_s=1e6, check_s=[0.5, 40.0]), r"at most 10,000 check_s, 5000 s, are allowed"),
        (rule(keep_s=6e3, check_s=[0.5, 40.0]), r"keep_s: is 6000; at most 10,000 check_s, 5000 s, are"),
        (rule(starts=3), "starts"),
        ({"kind": "none", "target": 3}, "target"),
    ],
)
def test_bad_input_is_refused_in_one_line(by: Document, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        parse_scenario(scaled(by), "test")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300
    assert "autoscaling" in str(refused.value)


def test_the_fewest_servers_fit_on_the_fewest_devices() -> None:
    given = scaled(rule(min_servers=5)) | {"devices": [8, 4]}
    with pytest.raises(InputError, match="min_servers: is 5; 4 devices make 4 servers"):
        parse_scenario(given, "test")


def test_a_start_may_take_ten_thousand_checks() -> None:
    found: Any = parse_scenario(scaled(rule(start_s=2500.0)), "test")
    assert found.rules[0].start_s == [2500.0]


def test_a_rule_given_twice_is_refused() -> None:
    with pytest.raises(InputError, match="autoscaling: has a rule twice: autoscaled to 2 open requests"):
        parse_scenario(scaled(rule(target=[2.0, 4.0]), rule(target=2.0)), "test")


def test_a_server_that_never_answers_is_a_deadlock_and_no_endless_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def idle(m: Machine) -> Program:
        while True:
            yield m.recv(REQUESTS)

    table = bench(scaled(rule()))
    monkeypatch.setattr(table, "program", lambda case, room, m, journal: idle(m))
    with pytest.raises(DeadlockError):
        table.run(next(cases(table)), 0)


def test_a_case_with_fewer_servers_than_the_least_is_refused() -> None:
    table = bench(scaled(rule(min_servers=3)))
    (case,) = cases(table)
    assert refusal(table, case) is None
    few = replace(case, axes=replace(case.axes, devices=2))
    assert "autoscaling: min_servers: is 3; at most 2 are there" in (refusal(table, few) or "")


def test_a_real_machine_refuses() -> None:
    table = bench(scaled(rule(), devices=1))
    real = replace(table, hardware=replace(table.hardware, start=span_by_span))
    assert real.hardware.measured
    (case,) = cases(real)
    assert "a real machine runs all its servers all the time" in (refusal(real, case) or "")


def test_a_real_machine_runs_on_the_devices_that_it_has() -> None:
    table = bench(scaled({"kind": "none"}, devices=1))
    real = replace(table, hardware=replace(table.hardware, start=span_by_span, max_devices=1))
    (case,) = cases(real)
    assert refusal(real, case) is None
    two = replace(case, axes=replace(case.axes, devices=2))
    assert "more than the one of this machine" in (refusal(real, two) or "")
