"""What runs on one device at a time: against an exact fluid model; and a burst against its launches."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import exp, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.machine import laws
from simcore.machine.machine import Machine, Overheads, Program, Ticket
from simcore.machine.trace import Trace
from simcore.ops.op import Graph, Publication, Size, put
from simcore.sim.contention import Demand, max_min_rates, max_min_shares, shared_reads
from simcore.sim.sharing import Listed, Piece, SharedDevice
from simcore.sim.simulation import Simulation
from tests.programs import toy, toy_price, toy_roofline, toys
from tests.thorough import examples, slow

fixed = settings(derandomize=True, database=None)

# -- fair shares ---------------------------------------------------------------------------------


@settings(fixed, max_examples=examples(150))
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_shares_are_max_min_fair(demands: list[float]) -> None:
    shares = max_min_shares(demands)
    assert all(share <= demand for share, demand in zip(shares, demands, strict=True))
    assert sum(shares) == pytest.approx(min(1.0, sum(demands)))
    # Whoever gets less than it asks for gets no less than anybody else.
    for share, demand in zip(shares, demands, strict=True):
        assert share >= demand - 1e-12 or share >= max(shares) - 1e-12


@settings(fixed, max_examples=examples(150))
@given(st.lists(st.builds(Demand, st.floats(0.0, 1.0), st.floats(0.0, 1.0)), min_size=1, max_size=5))
def test_rates_overbook_nothing_and_waste_nothing(running: list[Demand]) -> None:
    rates = max_min_rates(running)
    memory = sum(rate * d.memory for rate, d in zip(rates, running, strict=True))
    compute = sum(rate * d.compute for rate, d in zip(rates, running, strict=True))
    assert max(memory, compute) <= 1.0 + 1e-12
    assert all(0.0 < rate <= 1.0 for rate in rates)
    if sum(d.memory for d in running) <= 1.0 and sum(d.compute for d in running) <= 1.0:
        assert rates == [1.0] * len(running)


# -- one device against exact arithmetic ---------------------------------------------------------


@dataclass
class Job:
    """Something that comes at a time, with so much work, and shares of the memory and of arithmetic."""

    comes: Fraction
    work: Fraction
    memory: Fraction
    compute: Fraction


def exact_rates(jobs: Sequence[Job]) -> list[Fraction]:
    """Water-filling by its definition: raise everybody's level until a resource is used up."""
    rates = [Fraction(1)] * len(jobs)
    for demands in ([j.memory for j in jobs], [j.compute for j in jobs]):
        left, open_ = Fraction(1), [i for i, d in enumerate(demands) if d > 0]
        while open_:
            level = left / len(open_)
            modest = [i for i in open_ if demands[i] <= level]
            if not modest:
                for i in open_:
                    rates[i] = min(rates[i], level / demands[i])
                break
            left -= sum(demands[i] for i in modest)
            open_ = [i for i in open_ if i not in modest]
    return rates


def exact_ends(jobs: Sequence[Job]) -> list[Fraction]:
    """When each job ends, to the last digit."""
    now, left, ends = Fraction(0), [job.work for job in jobs], [Fraction(0)] * len(jobs)
    running: list[int] = []
    coming = sorted(range(len(jobs)), key=lambda i: jobs[i].comes)
    while coming or running:
        rates = dict(zip(running, exact_rates([jobs[i] for i in running]), strict=True))
        events = [now + left[i] / rates[i] for i in running]
        until = min([*events, *([jobs[coming[0]].comes] if coming else [])])
        for i in running:
            left[i] -= (until - now) * rates[i]
        now = until
        for i in [i for i in running if left[i] == 0]:
            ends[i] = now
            running.remove(i)
        while coming and jobs[coming[0]].comes == now:
            running.append(coming.pop(0))
    return ends


hundredths = st.integers(1, 30).map(lambda n: Fraction(n, 100))
shares = st.integers(0, 10).map(lambda n: Fraction(n, 10))


@settings(fixed, max_examples=examples(150))
@given(st.lists(st.builds(Job, hundredths, hundredths, shares, shares), min_size=1, max_size=5))
def test_ends_are_those_of_the_exact_fluid_model(jobs: list[Job]) -> None:
    def loop(m: Machine, number: int, job: Job) -> Program:
        yield m.recv("never", timeout_s=float(job.comes))
        graph = toys(
            f"job {number}", int(job.work * 100), memory=int(job.memory * 100), compute=int(job.compute * 100)
        )
        yield m.wait(m.launch(graph, stream=graph.name))

    def program(m: Machine) -> Program:
        yield m.wait(*[m.spawn(loop(m, i, job)) for i, job in enumerate(jobs)])

    trace = Simulation(toy_price, roofline=toy_roofline).run(program)
    ends = {span.graph: span.end_s for span in trace.spans}
    expected = [float(end) for end in exact_ends(jobs)]
    assert [ends[f"job {i}"] for i in range(len(jobs))] == pytest.approx(expected, rel=1e-9)


# -- boundaries between replays ------------------------------------------------------------------


@slow
@pytest.mark.parametrize("compute", [False, True])
def test_a_boundary_is_passed_once_whatever_rounding_does(compute: bool) -> None:
    """Replays of 7 hundredths at any share of the memory beside a graph that takes the rest: none of
    them is swallowed when its boundary comes while the other still runs."""
    for share in range(1, 101):
        for length in (1, 3, 7):
            burst = toys("burst", length, memory=100, compute=100 if compute else 0)
            beside = toys("beside", 100, memory=share)

            def program(m: Machine, burst: Graph = burst, beside: Graph = beside) -> Program:
                m.launch(beside, stream="side")
                ticket = m.launch(burst, repeat=3)
                yield m.wait(ticket)

            trace = Simulation(toy_price, roofline=toy_roofline).run(program)
            rate = float(
                exact_rates(
                    [
                        Job(*(Fraction(1),) * 4),
                        Job(Fraction(1), Fraction(1), Fraction(share, 100), Fraction(0)),
                    ]
                )[0]
            )
            span = next(span for span in trace.spans if span.graph == "burst")
            ends = [end for _, _, end in span.op_times()]
            assert ends == pytest.approx([(i + 1) * length / 100 / rate for i in range(3)], rel=1e-9), share


def test_alone_a_burst_of_any_length_is_one_event() -> None:
    device, finished = SharedDevice(max_min_rates), []
    ends = [0.1 * (i + 1) for i in range(1000)]
    work = Listed(ends, [Demand(1.0, 0.0)] * 1000)
    piece = Piece(work, lambda: finished.append(True), print, deque())
    device.start(piece, 0.0)
    due = device.next_due()
    assert due[0] == ends[-1]
    device.arrive(due[1], due[0])
    assert finished
    assert not device.running


# -- a burst is its launches ---------------------------------------------------------------------

SLACK = 1e-9


@dataclass
class Burst:
    """Replays of one stream: what each costs, when it is launched and when it is stopped."""

    size: int
    grows: bool
    fixed: int
    memory: int
    compute: int
    times: int
    comes: int
    stopped: int | None

    def graph(self, name: str) -> Graph:
        first = toy("first", Size("n") if self.grows else self.size, memory=self.memory, compute=self.compute)
        return Graph(name, (first, toy("second", self.fixed, memory=100 - self.memory // 2)))


bursts = st.builds(
    Burst,
    size=st.integers(0, 5),
    grows=st.booleans(),
    fixed=st.integers(0, 4),
    memory=st.sampled_from([0, 50, 90, 97, 100]),
    compute=st.sampled_from([0, 30, 99, 100]),
    times=st.integers(1, 9),
    comes=st.integers(0, 20),
    stopped=st.none() | st.integers(0, 60),
)


def run_bursts(streams: Sequence[Sequence[Burst]], whole: bool) -> tuple[Trace, list[list[int]]]:
    """Launched whole (`repeat`), or one by one with sizes that grow; and how many replays ran of each."""
    ran = [[0] * len(queue) for queue in streams]

    def stop(m: Machine, burst: Burst, tickets: Sequence[Ticket]) -> Program:
        # An irrational part, so that a stop never falls on a boundary.
        yield m.recv("never", timeout_s=((burst.stopped or 0) + sqrt(2) / 10) / 100)
        for ticket in tickets:
            ticket.stop()

    def queue(m: Machine, number: int, todo: Sequence[Burst]) -> Program:
        launched: list[Sequence[Ticket]] = []
        for i, burst in enumerate(todo):
            yield m.recv("never", timeout_s=burst.comes / 100)
            graph, stream = burst.graph(f"{number}.{i}"), f"stream {number}"
            if whole:
                tickets = [m.launch(graph, stream=stream, sizes={"n": burst.size}, repeat=burst.times)]
            else:
                tickets = [
                    m.launch(graph, stream=stream, sizes={"n": burst.size + k}) for k in range(burst.times)
                ]
            if burst.stopped is not None:
                m.spawn(stop(m, burst, tickets))
            launched.append(tickets)
        for i, tickets in enumerate(launched):
            yield m.wait(*tickets)
            ran[number][i] = sum(ticket.ran for ticket in tickets)

    def program(m: Machine) -> Program:
        yield m.wait(*[m.spawn(queue(m, i, todo)) for i, todo in enumerate(streams)])

    return Simulation(toy_price, roofline=toy_roofline).run(program), ran


def replay_ends(trace: Trace) -> dict[str, list[float]]:
    """End of every replay (of its two ops) by graph, in order."""
    ends: dict[str, list[float]] = {}
    for span in sorted(trace.spans, key=lambda span: span.launch):
        times = [end for _, _, end in span.op_times()]
        ends.setdefault(span.graph, []).extend(times[1::2])
    return ends


@slow
def test_a_burst_equals_its_launches_one_by_one() -> None:
    stopped: list[bool] = []

    @settings(fixed, max_examples=examples(400))
    @given(st.lists(st.lists(bursts, min_size=1, max_size=2), min_size=1, max_size=3))
    def check(streams: list[list[Burst]]) -> None:
        trace, ran = run_bursts(streams, whole=True)
        reference, expected = run_bursts(streams, whole=False)
        assert ran == expected
        ends, right = replay_ends(trace), replay_ends(reference)
        assert ends.keys() == right.keys()
        # Equal times are in particular in the same order.
        for name, times in ends.items():
            assert times == pytest.approx(right[name], rel=SLACK, abs=1e-12)
        assert laws.violations(trace) == laws.violations(reference) == {}
        for queue, counts in zip(streams, ran, strict=True):
            stopped.extend(count < burst.times for burst, count in zip(queue, counts, strict=True))

    check()
    assert sum(stopped) > examples(50)
    assert stopped.count(False) > examples(50)


@pytest.mark.parametrize("at", [0, 5, 10, 15, 20, 25, 30, 99])
def test_how_many_ran_of_a_burst_that_is_stopped(at: int) -> None:
    """Replays of 10: a stop at 15 lets the second one end, one at 10 only the first. A burst behind another
    one runs not once."""

    def program(m: Machine) -> Program:
        first, second = m.launch(toys("a", 10), repeat=4), m.launch(toys("b", 10), repeat=4)
        yield m.recv("never", timeout_s=at / 100)
        first.stop()
        second.stop()
        yield m.wait(second)
        ends = min(4, max(1, -(-at // 10)))
        after = 0 if at < 40 else 4
        assert (first.ran, second.ran) == (ends, after)
        assert m.now() == pytest.approx(max(at, 10 * (ends + after)) / 100)

    Simulation(toy_price).run(program)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(("kernel_s", "slower"), [(0.0, 1.0), (0.01, 2.0), (0.03, 2.0)])
def test_streams_share_the_thread_that_launches_their_kernels(
    kernel_s: float, slower: float, rows: bool
) -> None:
    """Graphs of 0.04 that take a host half of that are launched side by side; what it takes for their two
    kernels makes that all of it, or more, and then each of two gets every other turn."""
    overheads = Overheads(launch_s=0.02, launch_kernel_s=kernel_s)

    def program(m: Machine) -> Program:
        tickets = [m.launch(toys(name, 2, 2), stream=name, repeat=50) for name in ("one", "two")]
        yield m.wait(*tickets)
        # The second begins a launch later; alone, each takes 2.
        assert m.now() == pytest.approx(2.0 * slower, rel=0.05)

    Simulation(toy_price, overheads=overheads, rows=rows).run(program)


@pytest.mark.parametrize("begins_s", [0.0, 0.25])
def test_a_piece_is_noted_once_a_moment(begins_s: float) -> None:
    """Both begin at the same time and slow each other down from it on, and the longer one is alone later."""

    def program(m: Machine) -> Program:
        yield m.recv("never", timeout_s=begins_s)
        both = [m.launch(toys(name, n, memory=100), stream=name) for name, n in (("a", 10), ("b", 30))]
        yield m.wait(*both)

    trace = Simulation(toy_price, roofline=toy_roofline, rates=max_min_rates).run(program)
    progress = {span.graph: [now_s for now_s, _ in span.progress] for span in trace.spans}
    assert progress == {
        "a": pytest.approx([begins_s, begins_s + 0.2]),
        "b": pytest.approx([begins_s, begins_s + 0.2, begins_s + 0.4]),
    }


def test_work_of_no_time_is_over_when_it_has_published() -> None:
    device, said = SharedDevice(max_min_rates), list[str]()
    hop = Publication("go", 0, put("hop", elements=1, axis="tensor", dtype="bf16"))
    work = Listed([0.0], [Demand(0.0, 0.0)])
    piece = Piece(work, lambda: said.append("ends"), lambda _: said.append("publishes"), deque([(0.0, hop)]))
    device.start(piece, 0.0)
    device.arrive(piece, 0.0)
    assert said == ["publishes", "ends"]
    assert not device.running


# -- since when a stream works -------------------------------------------------------------------


def _goes_on(m: Machine) -> Program:
    m.launch(toys("first", 25), stream="a")
    m.launch(toys("a", 50, memory=100), stream="a")
    m.launch(toys("b", 100, memory=100), stream="b")
    yield m.wait()


def _begins_again(m: Machine) -> Program:
    m.launch(toys("b", 100, memory=100), stream="b")
    m.launch(toys("first", 25), stream="a")
    yield m.recv("never", timeout_s=0.375)
    m.launch(toys("a", 25, memory=100), stream="a")
    yield m.wait()


def _goes_on_as_its_host_sees(m: Machine) -> Program:
    yield m.recv("never", timeout_s=0.5)
    for _ in range(2):
        yield m.wait(m.launch(toys("first", 25), stream="a"))
    m.launch(toys("a", 25, memory=100), stream="a")
    m.launch(toys("b", 25, memory=100), stream="b")
    yield m.wait()


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("program", "begins_s", "work_s", "apart_s"),
    [
        (_goes_on, 0.25, 0.5, 0.0),
        (_begins_again, 0.375, 0.25, 0.375),
        (_goes_on_as_its_host_sees, 1.0, 0.25, 0.5),
    ],
)
def test_reads_are_shared_by_streams_that_began_to_work_together(
    program: Callable[[Machine], Program], begins_s: float, work_s: float, apart_s: float, rows: bool
) -> None:
    """A stream works since it last was idle, however many launches ago. Two that only read, and began so far
    apart, find exp(-apart / reuse) of what one of them reads in the cache, and each goes on at half the rate
    that this leaves: 1 / (2 - that)."""
    simulation = Simulation(toy_price, roofline=toy_roofline, rates=shared_reads(0.5), rows=rows)
    trace = simulation.run(program)
    if rows:
        table = trace.rows.table()
        (end_s,) = table["end_s"][table["graph"] == trace.rows.graphs["a"]].tolist()
    else:
        (end_s,) = [span.end_s for span in trace.spans if span.graph == "a"]
    assert end_s == pytest.approx(begins_s + work_s * (2.0 - exp(-apart_s / 0.5)), rel=1e-9)
