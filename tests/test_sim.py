"""The contract of a machine: tiny programs and the log that each must leave.

Every test asks a `Contract` for its runs, so that another machine can be put through the same tests: a
contract says how to run a program, how long one unit of toy work takes there and how exact its times are.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from simcore.machine import laws
from simcore.machine.machine import DeadlockError, Machine, MismatchError, Overheads, Program, Verdict
from simcore.machine.metrics import critical_path
from simcore.machine.trace import Cause, Trace
from simcore.ops.op import Graph, Publication, Size, fuse, put
from simcore.sim.host import latest
from simcore.sim.simulation import Simulation
from tests.programs import meet, sends, toy, toy_price, toy_roofline, toys

Log = list[tuple[Any, ...]]
Feed = Mapping[tuple[int, str], Iterable[tuple[float, object]]]


@dataclass(frozen=True)
class Contract:
    """A machine that promises to keep the contract; times of logs are in hundredths of a second."""

    simulate: Callable[..., Trace]
    tolerance: float = 1e-9

    def run(self, program: Callable[[Machine], Program], **settings: Any) -> Trace:
        trace = self.simulate(program, **settings)
        laws.enforce(trace)
        return trace

    def same(self, seconds: Iterable[float], hundredths: Iterable[float]) -> bool:
        return list(seconds) == pytest.approx([h / 100 for h in hundredths], rel=self.tolerance, abs=1e-12)

    def logs(self, trace: Trace, expected: Log) -> None:
        """Compares (rank, stream, graph, state, start, end) of all spans, ordered by start, then rank."""
        spans = sorted(trace.spans, key=lambda s: (round(s.start_s, 9), s.rank, s.stream, s.id))
        names = [(s.rank, s.stream, s.graph, s.state) for s in spans]
        assert names == [row[:4] for row in expected]
        assert self.same(
            [t for s in spans for t in (s.start_s, s.end_s)], [t for row in expected for t in row[4:]]
        )


def simulated(program: Callable[[Machine], Program], *, feed: Feed | None = None, **settings: Any) -> Trace:
    simulation = Simulation(toy_price, roofline=toy_roofline, **settings)
    for (rank, inbox), arrivals in (feed or {}).items():
        simulation.feed(rank, inbox, arrivals)
    return simulation.run(program)


@pytest.fixture(params=[Contract(simulated)], ids=["simulated"])
def machine(request: pytest.FixtureRequest) -> Contract:
    contract: Contract = request.param
    return contract


A, B, C = toys("a", 2), toys("b", 3), toys("c", 4)


# -- streams and tickets -------------------------------------------------------------------------


def test_launches_of_one_stream_run_in_order(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        for graph in (B, A, C):
            m.launch(graph)
        yield m.wait()

    trace = machine.run(program)
    machine.logs(
        trace,
        [(0, "main", "b", "run", 0, 3), (0, "main", "a", "run", 3, 5), (0, "main", "c", "run", 5, 9)],
    )


def test_streams_run_side_by_side(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(A)
        m.launch(C, stream="side")
        m.launch(B)
        yield m.wait()

    machine.logs(
        machine.run(program),
        [(0, "main", "a", "run", 0, 2), (0, "side", "c", "run", 0, 4), (0, "main", "b", "run", 2, 5)],
    )


def test_a_launch_starts_after_all_its_tickets(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        short, long = m.launch(A, stream="one"), m.launch(C, stream="two")
        m.launch(B, stream="three", after=[short, long])
        m.launch(B, stream="one", after=[long])
        yield m.wait()

    machine.logs(
        machine.run(program),
        [
            (0, "one", "a", "run", 0, 2),
            (0, "two", "c", "run", 0, 4),
            (0, "one", "b", "run", 4, 7),
            (0, "three", "b", "run", 4, 7),
        ],
    )


def test_an_empty_graph_takes_no_time(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(A)
        ticket = m.launch(Graph("empty", ()))
        yield m.wait(ticket)
        assert machine.same([m.now()], [2])

    machine.run(program)


def test_sizes_are_read_at_the_launch_and_grow_by_one_a_replay(machine: Contract) -> None:
    grows = Graph("grows", (toy("op", Size("n")),))

    def program(m: Machine) -> Program:
        m.launch(grows, sizes={"n": 5})
        m.launch(grows, sizes={"n": 2}, repeat=3)
        yield m.wait()

    machine.logs(
        machine.run(program), [(0, "main", "grows", "run", 0, 5), (0, "main", "grows", "run", 5, 14)]
    )


def test_a_size_that_is_missing_is_refused(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("reads", (toy("op", Size("length")),)), sizes={"width": 1})
        yield m.wait()

    with pytest.raises(ValueError, match=r"reads.*length"):
        machine.run(program)


def test_fewer_than_one_replay_is_refused(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(A, repeat=0)
        yield m.wait()

    with pytest.raises(ValueError, match="repeat is 0"):
        machine.run(program)


# -- the host ------------------------------------------------------------------------------------


def test_decode_of_tiny_graphs_is_bound_by_the_host(machine: Contract) -> None:
    """n launches of graphs that are shorter than a launch take n launches and the last graph."""

    def program(m: Machine) -> Program:
        ticket = m.launch(toys("tiny", 1))
        for _ in range(9):
            ticket = m.launch(toys("tiny", 1))
        yield m.wait(ticket)
        assert machine.same([m.now()], [10 * 5 + 1])

    trace = machine.run(program, overheads=Overheads(launch_s=0.05))
    assert machine.same([s.start_s for s in trace.spans], [5 * (i + 1) for i in range(10)])


@pytest.mark.parametrize("rows", [False, True])
def test_sizes_in_the_memory_of_the_device_are_written_where_they_change(rows: bool) -> None:
    """Of those that kernels read there alone; what only a launch is told costs nothing."""
    grows = Graph("grows", (toy("op", Size("n")),))
    issued_s: list[float] = []

    def program(m: Machine) -> Program:
        for n, other in ((3, 1), (3, 2), (4, 2)):
            ticket = m.launch(grows, sizes={"n": n, "other": other})
            issued_s.append(m.now())
        yield m.wait(ticket)

    costs = Overheads(launch_s=0.05, size_s=0.02)
    simulated(program, overheads=costs, device_sizes=lambda graph: graph.needs & {"n"}, rows=rows)
    assert issued_s == pytest.approx([0.07, 0.12, 0.19])
    issued_s.clear()
    simulated(program, overheads=costs, rows=rows)
    assert issued_s == pytest.approx([0.05, 0.10, 0.15])


@pytest.mark.parametrize("rows", [False, True])
def test_a_launch_takes_the_longer_the_more_kernels_its_graph_has(rows: bool) -> None:
    """An op that stands for many kernels counts as so many; the device has the graph when all are told."""
    many = Graph("many", (toy("one", 1), replace(toy("three", 5), parts=(toy("part", 1),) * 3)))
    at_s = list[float]()

    def program(m: Machine) -> Program:
        for graph in (toys("single", 1), many):
            ticket = m.launch(graph)
            at_s.append(m.now())
            yield m.wait(ticket)
            at_s.append(m.now())

    costs = Overheads(launch_s=0.05, launch_kernel_s=0.01, return_s=0.02)
    simulated(program, overheads=costs, rows=rows)
    # Launches take 0.06 and 0.09; the device has the graph for 0.02 of it, and is done after 0.05 and 0.13.
    assert at_s == pytest.approx([0.06, 0.06, 0.06 + 0.09, 0.06 + 0.13])


@pytest.mark.parametrize("within_s", [0.0, 0.02])
@pytest.mark.parametrize("rows", [False, True])
def test_launches_within_one_cost_the_host_their_kernels(rows: bool, within_s: float) -> None:
    """The call is the first one's; each begins when the host is done with its kernels."""
    graph, at_s = Graph("pair", (toy("a", 10), toy("b", 10))), list[float]()

    def program(m: Machine) -> Program:
        first = m.launch(graph)
        at_s.append(m.now())
        for _ in range(2):
            last = m.launch(graph, within=first)
            at_s.append(m.now())
        yield m.wait(last)
        at_s.append(m.now())

    costs = Overheads(launch_s=0.5, launch_kernel_s=0.3, return_s=0.02, within_s=within_s)
    simulated(program, overheads=costs, rows=rows)
    each = 0.6 + within_s
    # The last one begins when the host has come to it, and is done 0.2 later.
    assert at_s == pytest.approx([1.1, 1.1 + each, 1.1 + 2 * each, 1.3 + 2 * each])


def test_a_sequence_is_given_as_a_whole() -> None:
    graph = Graph("one", (toy("op", 10),))
    wrong = list[str]()

    def within(m: Machine, ticket: object) -> None:
        with pytest.raises(ValueError, match="within has to be the last launch of this rank") as error:
            m.launch(graph, within=ticket)  # type: ignore[arg-type]
        wrong.append(str(error.value))

    def program(m: Machine) -> Program:
        first = m.launch(graph)
        second = m.launch(graph, within=first)
        within(m, second)
        other = m.launch(graph)
        within(m, first)
        m.launch(graph, within=other)
        yield m.wait(other)
        within(m, other)
        third = m.launch(graph)
        yield m.recv("nothing", timeout_s=0.0)
        within(m, third)

    simulated(program)
    assert len(wrong) == 4


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    ("return_s", "start_s", "begins_s"),
    [(0.02, 0.0, 0.03), (0.09, 0.0, 0.0), (0.02, 0.01, 0.04), (0.0, 0.03, 0.08)],
)
def test_a_device_begins_while_its_host_is_still_at_the_launch(
    rows: bool, return_s: float, start_s: float, begins_s: float
) -> None:
    """By return_s, of which no more than a launch counts, and start_s later; the host goes on where it would
    have."""
    graph, at_s = Graph("one", (toy("op", 10),)), list[float]()

    def program(m: Machine) -> Program:
        for _ in range(2):
            ticket = m.launch(graph)
            at_s.append(m.now())
            yield m.wait(ticket)
            at_s.append(m.now())

    costs = Overheads(launch_s=0.05, return_s=return_s, start_s=start_s)
    simulated(program, overheads=costs, rows=rows)
    round_s = begins_s + 0.10
    assert at_s == pytest.approx([0.05, round_s, round_s + 0.05, 2 * round_s])


@pytest.mark.parametrize("rows", [False, True])
def test_a_graph_starts_while_another_one_runs(rows: bool) -> None:
    at_s: list[float] = []

    def program(m: Machine) -> Program:
        tickets = [m.launch(Graph("one", (toy("op", 10),))) for _ in range(3)]
        yield m.wait(*tickets)
        at_s.append(m.now())

    simulated(program, overheads=Overheads(launch_s=0.01, start_s=0.04), rows=rows)
    assert at_s == pytest.approx([0.01 + 0.04 + 3 * 0.10])


def test_long_graphs_hide_the_host(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        tickets = [m.launch(toys("long", 7)) for _ in range(4)]
        assert machine.same([m.now()], [4 * 5])
        yield m.wait(*tickets)
        assert machine.same([m.now()], [5 + 4 * 7 + 3])

    machine.run(program, overheads=Overheads(launch_s=0.05, wait_s=0.03))


def test_a_wait_for_what_is_done_costs_only_itself(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        early = m.launch(A)
        yield m.wait(m.launch(C))
        yield m.wait(early)
        assert machine.same([m.now()], [2 + 4 + 3 + 3])

    machine.run(program, overheads=Overheads(wait_s=0.03))


def test_read_gives_the_value_at_the_end_of_a_launch(machine: Contract) -> None:
    seen: list[object] = []

    def program(m: Machine) -> Program:
        flag = m.flag("f", initial=4)
        seen.append((yield m.read(flag, m.launch(A))))
        first, _ = m.launch(A, sets={flag: 5}), m.launch(A, sets={flag: 6})
        seen.append((yield m.read(flag, first)))
        seen.append(m.now())

    machine.run(program, overheads=Overheads(wait_s=0.01))
    assert seen[:2] == [4, 5]
    assert machine.same([seen[2]], [2 + 1 + 2 + 1])


def test_a_read_after_a_signal_takes_one_publication(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        flag = m.flag("f", initial=1)
        m.launch(sends("s", 2, signal="go"))
        assert (yield m.read(flag, m.signal("go"))) == 1
        assert machine.same([m.now()], [2])
        m.launch(sends("s", 2, signal="go"))
        yield m.wait(m.signal("go"))
        assert machine.same([m.now()], [4])

    machine.run(program)


def test_messages_arrive_in_order_and_are_received_once(machine: Contract) -> None:
    got: list[tuple[object, float]] = []

    def program(m: Machine) -> Program:
        if m.rank == 0:
            m.send("in", "a", 1)
            m.send("in", "b", 1)
            yield m.wait(m.launch(C))
            m.send("in", "c", 1)
        else:
            for _ in range(3):
                item = yield m.recv("in")
                got.append((item, m.now()))

    trace = machine.run(program, mesh={"tensor": 2}, overheads=Overheads(message_s=0.01))
    assert [item for item, _ in got] == ["a", "b", "c"]
    # The host sends at 1 and 2; C starts at once on its stream, is issued at 2 and done at 6.
    assert machine.same([at for _, at in got], [2, 3, 8])
    assert [m.received_s is not None for m in trace.messages] == [True] * 3


def test_recv_gives_up_after_its_timeout_and_not_before(machine: Contract) -> None:
    got: list[tuple[object, float]] = []

    def program(m: Machine) -> Program:
        for patience_s in (0.05, 0.02, 0.0, None, 0.0):
            item = yield m.recv("in", timeout_s=patience_s)
            got.append((item, m.now()))

    machine.run(program, feed={(0, "in"): [(0.03, "x"), (0.09, "y"), (0.09, "z")]})
    assert [item for item, _ in got] == ["x", None, None, "y", "z"]
    assert machine.same([at for _, at in got], [3, 5, 5, 9, 9])


def test_what_comes_at_one_moment_is_polled_together() -> None:
    """Not one first, and the others a step later."""
    polled: list[int] = []

    def loop(m: Machine, number: int) -> Program:
        yield m.wait(m.launch(toys("work", 1), stream=str(number)))
        m.send("in", number, m.rank)

    def program(m: Machine) -> Program:
        for number in range(4):
            m.spawn(loop(m, number))
        yield m.recv("in")
        polled.extend(m.poll("in"))

    simulated(program, rates=lambda running: [1.0] * len(running))
    assert len(polled) == 3


def test_a_spawned_loop_runs_beside_its_parent_on_one_host_thread(machine: Contract) -> None:
    def child(m: Machine) -> Program:
        yield m.wait(m.launch(B, stream="child"))
        yield m.wait(m.launch(B, stream="child"))

    def program(m: Machine) -> Program:
        loop = m.spawn(child(m))
        own = m.launch(A)
        yield m.wait(own)
        assert own.ran == 1
        yield m.wait(loop)
        assert loop.ran == 1

    trace = machine.run(program, overheads=Overheads(launch_s=0.01))
    # One thread: the parent's launch costs before the child's first.
    machine.logs(
        trace,
        [(0, "main", "a", "run", 1, 3), (0, "child", "b", "run", 2, 5), (0, "child", "b", "run", 6, 9)],
    )


def test_marks_and_gauges_note_the_moment_and_cost_nothing(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        ticket = m.launch(C)
        m.mark("issued")
        m.mark("done", [ticket])
        m.gauge("slots", 3, 4)
        yield m.wait(ticket)
        assert machine.same([m.now()], [1 + 4])

    trace = machine.run(program, overheads=Overheads(launch_s=0.01))
    assert {mark.name: pytest.approx(mark.at_s) for mark in trace.marks} == {"issued": 0.01, "done": 0.05}
    assert [(g.name, g.value, g.limit, g.at_s) for g in trace.gauges] == [("slots", 3, 4, 0.01)]


# -- flags ---------------------------------------------------------------------------------------


def test_a_launch_that_does_not_hold_costs_a_gate_a_kernel_and_waits_for_no_signal(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        flag = m.flag("f")
        ticket = m.launch(toys("g", 9, 9, 9), when=flag.nonzero(), after=[m.signal("never")], sets={flag: 1})
        m.launch(A, when=flag.zero())
        yield m.wait(ticket)
        assert ticket.ran == 0

    trace = machine.run(program, overheads=Overheads(gate_s=0.01))
    machine.logs(trace, [(0, "main", "g", "skipped", 0, 3), (0, "main", "a", "run", 3, 5)])


def test_flags_that_a_launch_sets_take_its_device_some_time() -> None:
    """Behind its ops, or behind a gate that it does not pass. Ranks read each other's flags all the same, as
    they were when both met."""

    def alone(m: Machine) -> Program:
        flag = m.flag("f")
        m.launch(A, sets={flag: 1})
        m.launch(A, when=flag.zero(), sets={flag: 7})
        yield m.wait(m.launch(A))
        assert (yield m.read(flag, m.launch(A))) == 1

    trace = simulated(alone, overheads=Overheads(gate_s=0.01, flags_s=0.005))
    spans = [(span.state, span.start_s, span.end_s) for span in trace.spans[:4]]
    assert [state for state, *_ in spans] == ["run", "flags", "skipped", "run"]
    took_s = [end_s - start_s for _, start_s, end_s in spans]
    assert took_s == pytest.approx([took_s[0], 0.005, 0.015, took_s[0]])
    assert [start_s for _, start_s, _ in spans[1:]] == pytest.approx([end_s for *_, end_s in spans[:3]])
    laws.enforce(trace)

    def together(m: Machine) -> Program:
        mine, theirs = m.flag("p", initial=m.rank), m.flag("p", rank=1 - m.rank)
        above = m.flag("above")
        meets = Graph("meet", (meet("x", 1, 2),))
        yield m.wait(m.launch(meets, sets={above: mine.above(theirs), mine: 1 - m.rank}))
        assert (yield m.read(above, m.launch(A))) == m.rank

    laws.enforce(simulated(together, mesh={"tensor": 2}, overheads=Overheads(flags_s=0.005)))


def test_a_skipped_launch_takes_the_gate_of_each_kernel() -> None:
    """Of an op that stands for three kernels, three."""
    parts = toys("parts", 1, 1, 1).ops
    graph = Graph("fused", (fuse("toys", "three", parts), *toys("one", 1).ops))

    def program(m: Machine) -> Program:
        never = m.flag("never")
        yield m.wait(m.launch(graph, when=never.nonzero()))

    assert graph.kernels == 4
    assert simulated(program, overheads=Overheads(gate_s=0.01)).end_s == pytest.approx(0.04)


def test_a_launch_that_does_not_hold_still_waits_for_its_tickets(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        other = m.launch(C, stream="side")
        m.launch(A, after=[other], when=m.flag("f").nonzero())
        yield m.wait()

    trace = machine.run(program, overheads=Overheads(gate_s=0.01))
    machine.logs(trace, [(0, "side", "c", "run", 0, 4), (0, "main", "a", "skipped", 4, 5)])


def test_a_launch_that_does_not_hold_publishes_nothing(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(sends("s", 2, signal="go"), when=m.flag("f").nonzero())
        m.launch(sends("s", 5, signal="go"))
        m.launch(A, stream="side", after=[m.signal("go")])
        yield m.wait()

    trace = machine.run(program)
    assert [s.state for s in trace.spans].count("wire") == 1
    assert machine.same([s.start_s for s in trace.spans if s.stream == "side"], [5])


def test_a_condition_is_read_when_the_launch_could_start(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        flag = m.flag("f")
        setter = m.launch(A, stream="side", sets={flag: 1})
        m.launch(B, when=flag.zero())
        m.launch(C, after=[setter], when=flag.nonzero())
        yield m.wait()

    machine.logs(
        machine.run(program),
        [(0, "main", "b", "run", 0, 3), (0, "side", "a", "run", 0, 2), (0, "main", "c", "run", 3, 7)],
    )


def test_sets_are_written_all_at_once(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        one, two = m.flag("one", initial=1), m.flag("two", initial=0)
        yield m.wait(m.launch(A, sets={one: two.nonzero(), two: one.nonzero()}))
        assert (yield m.read(one, m.launch(A))) == 0
        assert (yield m.read(two, m.launch(A))) == 1

    machine.run(program)


def test_flags_of_two_ranks_are_compared_on_both(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        mine = m.flag("p", initial=m.rank)
        theirs = m.flag("p", rank=1 - m.rank)
        above = m.flag("above")
        yield m.wait(m.launch(Graph("meet", (meet("x", 1, 2),)), sets={above: mine.above(theirs)}))
        assert (yield m.read(above, m.launch(A))) == m.rank

    machine.run(program, mesh={"tensor": 2})


def test_a_verdict_is_the_same_for_all_who_take_it(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        flag = m.flag("f")
        values = []
        for i in range(4):
            verdict = Verdict("third", (i, 7), yes=3, no=8)
            values.append((yield m.read(flag, m.launch(A, sets={flag: verdict}))))
        assert values == [8, 8, 3, 8]

    machine.run(program, mesh={"tensor": 2}, outcomes={"third": lambda i, seven: i == 2 and seven == 7})


def test_flags_hold_for_each_replay(machine: Contract) -> None:
    """Each of the replays sets the flag that the next one reads: every other one runs."""

    def program(m: Machine) -> Program:
        turn = m.flag("turn", initial=1)
        m.launch(toys("a", 2), repeat=1, when=turn.nonzero(), sets={turn: 0})
        ticket = m.launch(toys("b", 2), repeat=3, when=turn.zero(), sets={turn: 2})
        yield m.wait(ticket)
        assert ticket.ran == 1

    trace = machine.run(program, overheads=Overheads(gate_s=0.01))
    assert [s.state for s in trace.spans] == ["run", "run", "skipped", "skipped"]


# -- signals and the wire ------------------------------------------------------------------------


def test_an_early_part_leaves_before_the_end(machine: Contract) -> None:
    """10 hundredths of which the early part takes 3, a put of 2: the neighbour starts at 5."""

    def program(m: Machine) -> Program:
        if m.rank == 0:
            m.launch(sends("s", 10, signal="go", put=2, early=30))
        else:
            m.launch(A, after=[m.signal("go", rank=0)])
        yield m.wait()

    machine.logs(
        machine.run(program, mesh={"tensor": 2}),
        [(0, "main", "s", "run", 0, 10), (0, "wire", "s", "wire", 3, 5), (1, "main", "a", "run", 5, 7)],
    )


def test_without_an_early_part_the_end_is_published(machine: Contract) -> None:
    hop = put("hop", elements=1, axis="tensor", dtype="bf16")
    graph = Graph("s", (toy("x", 2), toy("y", 3), toy("z", 4)), (Publication("go", 1, hop),))

    def program(m: Machine) -> Program:
        m.launch(graph)
        yield m.wait(m.signal("go"))
        assert machine.same([m.now()], [2 + 3 + 1])

    machine.run(program)


def test_every_publication_of_an_op_leaves(machine: Contract) -> None:
    hop = put("hop", elements=1, axis="tensor", dtype="bf16")
    graph = Graph("s", (toy("x", 2),), (Publication("one", 0, hop), Publication("two", 0, hop)))

    def program(m: Machine) -> Program:
        m.launch(graph)
        yield m.wait(m.signal("one"))
        assert machine.same([m.now()], [3])
        yield m.wait(m.signal("two"))
        assert machine.same([m.now()], [4])

    machine.run(program)


def test_a_wire_carries_one_put_at_a_time(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(sends("s", 1, signal="go", put=5), stream="one")
        m.launch(sends("t", 3, signal="on", put=5), stream="two")
        yield m.wait()

    machine.logs(
        machine.run(program),
        [
            (0, "one", "s", "run", 0, 1),
            (0, "two", "t", "run", 0, 3),
            (0, "wire", "s", "wire", 1, 6),
            (0, "wire", "t", "wire", 6, 11),
        ],
    )


def test_signals_count(machine: Contract) -> None:
    """Three publications at 4, 8 and 12; four launches on two ranks, each rank counts for itself."""

    def program(m: Machine) -> Program:
        if m.rank == 0:
            m.launch(sends("s", 4, signal="go"), repeat=3)
        else:
            for stream in ("one", "two"):
                m.launch(toys("first", 1), stream=stream, after=[m.signal("go", rank=0)])
            if m.rank == 1:
                m.launch(toys("last", 1), stream="one", after=[m.signal("go", rank=0)])
        yield m.wait()

    trace = machine.run(program, mesh={"tensor": 3})
    starts = {rank: [s.start_s for s in trace.spans if s.rank == rank] for rank in (1, 2)}
    assert machine.same(starts[1], [4, 8, 12])
    assert machine.same(starts[2], [4, 8])


def test_a_signal_that_has_come_is_not_waited_for(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(sends("s", 1, signal="go"))
        m.launch(B)
        m.launch(A, after=[m.signal("go")])
        yield m.wait()

    machine.logs(
        machine.run(program),
        [
            (0, "main", "s", "run", 0, 1),
            (0, "main", "b", "run", 1, 4),
            (0, "wire", "s", "wire", 1, 1),
            (0, "main", "a", "run", 4, 6),
        ],
    )


# -- collectives ---------------------------------------------------------------------------------


def test_a_collective_starts_with_its_last_rank(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("g", (toy("own", 1 + 3 * m.rank), meet("sum", 2, 3), toy("rest", 1))))
        yield m.wait()

    trace = machine.run(program, mesh={"tensor": 3})
    met = [s for s in trace.spans if s.state == "collective"]
    assert [s.rank for s in met] == [0, 1, 2]
    assert machine.same([s.start_s for s in met], [7, 7, 7])
    assert machine.same([s.end_s for s in met], [9, 9, 9])
    assert machine.same([trace.end_s], [10])


def test_collectives_meet_along_their_axis(machine: Contract) -> None:
    """Ranks 0 1 / 2 3: pairs meet along "tensor" first, then columns along "group"."""

    def program(m: Machine) -> Program:
        own = toys("own", 1 + m.rank)
        m.launch(own + Graph("rows", (meet("rows", 1, 2, "tensor"),)))
        m.launch(Graph("columns", (meet("columns", 1, 2, "group"),)))
        yield m.wait()

    trace = machine.run(program, mesh={"group": 2, "tensor": 2})
    met = {(s.graph, s.rank): s for s in trace.spans if s.state == "collective"}
    assert machine.same([met["own+rows", r].start_s for r in range(4)], [2, 2, 4, 4])
    assert machine.same([met["columns", r].start_s for r in range(4)], [5, 5, 5, 5])
    assert [met["columns", r].members for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_other_streams_go_on_while_a_rank_waits_in_a_collective(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("g", (toy("own", 5 * m.rank), meet("sum", 1, 2))))
        m.launch(B, stream="side")
        yield m.wait()

    trace = machine.run(program, mesh={"tensor": 2})
    assert machine.same([s.end_s for s in trace.spans if s.stream == "side"], [3, 3])


@pytest.mark.parametrize("other", [meet("product", 2, 2), meet("sum", 3, 2), meet("sum", 2, 3)])
def test_ranks_that_meet_in_different_collectives_are_refused(machine: Contract, other: Any) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("g", (meet("sum", 2, 2) if m.rank == 0 else other,)))
        yield m.wait()

    with pytest.raises(MismatchError, match=r"sum|product"):
        machine.run(program, mesh={"tensor": 2})


def _missing_rank(m: Machine) -> Program:
    if m.rank == 0:
        yield m.wait(m.launch(Graph("g", (meet("sum", 2, 2),)), stream="side"))


def _missing_signal(m: Machine) -> Program:
    if m.rank == 1:
        m.launch(A, stream="side", after=[m.signal("never", rank=0)])
    yield m.wait()


def _missing_ticket(m: Machine) -> Program:
    if m.rank == 1:
        blocked = m.launch(A, stream="one", after=[m.signal("never", rank=0)])
        m.launch(B, stream="two", after=[blocked])
    yield m.wait()


def _missing_message(m: Machine) -> Program:
    if m.rank == 1:
        yield m.recv("in")


def _missing_message_of_a_loop(m: Machine) -> Program:
    if m.rank == 1:
        m.spawn(_missing_message(m))
    yield m.wait()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (_missing_rank, r"program of rank 0.*rank 0 stream side: all_reduce sum: 1 of 2 ranks"),
        (_missing_signal, r"rank 1 stream side: launch 0 of graph a waits for signal never of rank 0"),
        (_missing_ticket, r"rank 1 stream two: launch 1 of graph b waits for launches before it"),
        (_missing_message, r"program of rank 1"),
        (_missing_message_of_a_loop, r"loop of rank 1"),
    ],
)
def test_a_deadlock_says_who_waits_for_what(machine: Contract, program: Any, says: str) -> None:
    with pytest.raises(DeadlockError, match=says):
        machine.run(program, mesh={"tensor": 2})


# -- repeat and stop -----------------------------------------------------------------------------


def test_a_repeated_launch_pays_the_host_once(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        ticket = m.launch(toys("step", 1), repeat=100)
        yield m.wait(ticket)
        assert ticket.ran == 100
        assert machine.same([m.now()], [5 + 100])

    machine.run(program, overheads=Overheads(launch_s=0.05))


def test_a_flag_is_set_after_each_replay(machine: Contract) -> None:
    """Also of a launch that has nothing else to do between replays: whoever looks after the first sees it."""

    def program(m: Machine) -> Program:
        flag = m.flag("f")
        ticket = m.launch(toys("s", 10), repeat=3, sets={flag: 5}, stream="side")
        yield m.recv("in", timeout_s=0.15)
        seen = m.launch(toys("t", 1), when=flag.nonzero())
        yield m.wait(seen)
        yield m.wait(ticket)
        assert (seen.ran, ticket.ran) == (1, 3)

    machine.run(program)


@pytest.mark.parametrize("signalled", [False, True], ids=["burst", "replay by replay"])
def test_stop_ends_at_the_next_boundary(machine: Contract, signalled: bool) -> None:
    graph = sends("s", 10, signal="go") if signalled else toys("s", 10)

    def program(m: Machine) -> Program:
        ticket = m.launch(graph, repeat=9)
        queued = m.launch(graph, repeat=5)
        yield m.recv("in", timeout_s=0.25)
        ticket.stop()
        queued.stop()
        yield m.wait(queued)
        assert (ticket.ran, queued.ran) == (3, 0)
        assert machine.same([m.now()], [30])

    machine.run(program)


@pytest.mark.parametrize("signalled", [False, True])
def test_a_stop_at_a_boundary_takes_effect_there(machine: Contract, signalled: bool) -> None:
    """Whether or not the replays are a burst."""
    graph = sends("s", 10, signal="go") if signalled else toys("s", 10)

    def program(m: Machine) -> Program:
        ticket = m.launch(graph, repeat=9)
        yield m.recv("in", timeout_s=0.3)
        ticket.stop()
        yield m.wait(ticket)
        assert ticket.ran == 3

    machine.run(program)


def test_a_mark_of_what_never_comes_is_a_deadlock(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.mark("lost", [m.signal("never")])
        yield m.wait()

    with pytest.raises(DeadlockError, match="mark 'lost' of rank 0"):
        machine.run(program)


def test_who_begins_with_what_is_each_ranks_own_affair(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        m.flag("f", rank=m.along("tensor", 1), initial=1)
        yield m.wait()

    with pytest.raises(ValueError, match="flag f: rank 0 cannot say what rank 1 begins with"):
        machine.run(program, mesh={"tensor": 2})


@pytest.mark.parametrize("place", [-1, 1, 2])
def test_an_op_that_is_not_there_publishes_nothing(place: int) -> None:
    away = Publication("go", place, put("p", elements=1, axis="tensor", dtype="bf16"))
    with pytest.raises(ValueError, match="go has to be published by a local op"):
        Graph("g", toys("s", 10).ops, (away,))


def test_a_collective_publishes_nothing() -> None:
    away = Publication("go", 0, put("p", elements=1, axis="tensor", dtype="bf16"))
    with pytest.raises(ValueError, match="go has to be published by a local op"):
        Graph("g", (meet("m", 1, 2),), (away,))


def test_a_stop_of_what_is_done_changes_nothing(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        ticket = m.launch(toys("s", 10), repeat=2)
        yield m.wait(ticket)
        ticket.stop()
        assert ticket.ran == 2

    machine.run(program)


@pytest.mark.parametrize("from_s", [0.0, 0.5])
def test_a_stop_comes_when_the_host_gets_there(machine: Contract, from_s: float) -> None:
    """The host is busy for 2 + 4 launches of 5 before it says stop: at 25 the graph, which began at 5,
    is in its third replay. So it is at any time."""

    def program(m: Machine) -> Program:
        yield m.recv("in", timeout_s=from_s)
        ticket = m.launch(toys("s", 8), repeat=9)
        for _ in range(4):
            m.launch(A, stream="side")
        ticket.stop()
        yield m.wait(ticket)
        assert ticket.ran == 3

    machine.run(program, overheads=Overheads(launch_s=0.05))


def test_a_wait_for_several_ends_with_the_last_in_whatever_order(machine: Contract) -> None:
    """Also where the launch that was made last, and ends first, is named first."""

    def program(m: Machine) -> Program:
        long = m.launch(toys("l", 50), stream="side")
        short = m.launch(toys("s", 1))
        yield m.wait(short, long)
        assert machine.same([m.now()], [50])

    machine.run(program)


def test_a_wait_for_a_launch_and_a_signal_ends_with_the_signal(machine: Contract) -> None:
    def program(m: Machine) -> Program:
        if m.rank:
            m.launch(sends("s", 50, signal="go"))
            yield m.wait()
        else:
            short = m.launch(toys("s", 1))
            yield m.wait(short, m.signal("go", rank=1))
            assert m.now() >= 0.5

    machine.run(program, mesh={"tensor": 2})


# -- contention ----------------------------------------------------------------------------------

MEMORY, COMPUTE = toys("memory", 10, memory=100), toys("compute", 10, compute=100)


def _together(*graphs: Graph) -> Callable[[Machine], Program]:
    def program(m: Machine) -> Program:
        for i, graph in enumerate(graphs):
            m.launch(graph, stream=f"stream {i}")
        yield m.wait()

    return program


@pytest.mark.parametrize("graph", [MEMORY, COMPUTE], ids=["memory", "compute"])
@pytest.mark.parametrize("n", [2, 3])
def test_graphs_bound_by_one_resource_share_it(machine: Contract, graph: Graph, n: int) -> None:
    trace = machine.run(_together(*[graph] * n))
    assert machine.same([s.end_s for s in trace.spans], [10 * n] * n)


def test_graphs_bound_by_different_resources_run_at_full_speed(machine: Contract) -> None:
    assert machine.same([s.end_s for s in machine.run(_together(MEMORY, COMPUTE)).spans], [10, 10])


def test_ranks_do_not_share(machine: Contract) -> None:
    assert machine.same([s.end_s for s in machine.run(_together(MEMORY), mesh={"tensor": 2}).spans], [10, 10])


def test_a_modest_graph_keeps_its_speed(machine: Contract) -> None:
    """20 % of the memory go to the modest one, 80 % are left for the greedy one until the modest ends
    at 10: 8 of its 16 are done, and it ends at 10 + 8."""
    modest, greedy = toys("modest", 10, memory=20), toys("greedy", 16, memory=100)
    assert machine.same([s.end_s for s in machine.run(_together(modest, greedy)).spans], [10, 18])


def test_rates_change_in_mid_way(machine: Contract) -> None:
    """x: 30 of memory from 0 on; y: 10 of memory from 6 on; z: 8 of arithmetic and memory from 12 on.

    0-6 x alone: 6 done. 6-12 x and y at 1/2: x 9, y 3. 12 z comes: thirds; y's last 7 take 21, z's 8
    take 24: at 33 y ends (x 16, z 7). z's last 1 at 1/2 ends at 35 (x 17). x alone: its last 13 end at 48.
    """
    x, y, z = toys("x", 30, memory=100), toys("y", 10, memory=100), toys("z", 8, memory=100, compute=30)

    def program(m: Machine) -> Program:
        m.launch(x)
        yield m.recv("in", timeout_s=0.06)
        m.launch(y, stream="y")
        yield m.recv("in", timeout_s=0.06)
        m.launch(z, stream="z")

    machine.logs(
        machine.run(program),
        [(0, "main", "x", "run", 0, 48), (0, "y", "y", "run", 6, 33), (0, "z", "z", "run", 12, 35)],
    )


def test_an_early_part_is_late_under_contention(machine: Contract) -> None:
    """At half speed the early 4 of 10 are done at 8."""
    early = replace(sends("s", 10, signal="go"), ops=(toy("s", 10, memory=100, early=40),))

    def program(m: Machine) -> Program:
        m.launch(early)
        m.launch(MEMORY, stream="side")
        yield m.wait(m.signal("go"))
        assert machine.same([m.now()], [8])

    machine.run(program)


def test_a_burst_meets_contention_replay_by_replay(machine: Contract) -> None:
    """Replays of 1, 2, 3, ... of memory beside a graph of memory: each end is twice as late, and the
    op of the third replay runs from 6 to 12."""
    grows = Graph("grows", (toy("op", Size("n"), memory=100),))

    def program(m: Machine) -> Program:
        m.launch(grows, sizes={"n": 1}, repeat=4)
        m.launch(toys("memory", 10, memory=100), stream="side")
        yield m.wait()

    trace = machine.run(program)
    burst = next(s for s in trace.spans if s.graph == "grows")
    assert machine.same(
        [t for _, start, end in burst.op_times() for t in (start, end)], [0, 2, 2, 6, 6, 12, 12, 20]
    )


# -- causes and order ----------------------------------------------------------------------------


def test_the_cause_of_a_launch_is_its_host_where_the_stream_was_free_sooner() -> None:
    """Launched at 25, 50, 75 and 100; the stream is free at 0, 50, 62 and 175."""

    def program(m: Machine) -> Program:
        for number, hundredths in enumerate((25, 12, 100, 1)):
            m.launch(toys(f"g{number}", hundredths))
        yield m.wait()

    spans = simulated(program, overheads=Overheads(launch_s=0.25)).spans
    assert [span.graph for span in spans] == ["g0", "g1", "g2", "g3"]
    assert [(span.cause.span, span.cause.host) for span in spans] == [
        (None, True), (spans[0].id, False), (None, True), (spans[2].id, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("looks", "busy", "last"),
    [("waits", 1, "theirs"), ("polls", 1, "theirs"), ("polls", 0, "theirs"), ("polls", 45, "own")],
)
def test_a_message_is_what_its_receiver_has_waited_for_unless_something_came_later(
    looks: str, busy: int, last: str
) -> None:
    """It is sent at 30, when the sender has seen that its graph is done."""

    def program(m: Machine) -> Program:
        if m.rank == 0:
            yield m.wait(m.launch(toys("theirs", 30)))
            m.send("in", "done", 1)
            return
        if busy:
            yield m.wait(m.launch(toys("own", busy)))
        if looks == "waits":
            yield m.recv("in")
        else:
            yield m.recv("never", timeout_s=0.5)
            assert m.poll("in") == ["done"]
        m.launch(toys("next", 5))
        yield m.wait()

    spans = {span.graph: span for span in simulated(program, mesh={"tensor": 2}).spans}
    cause = spans["next"].cause
    assert (cause.span, cause.host) == (spans[last].id, True)


def test_spans_that_end_together_stand_in_the_order_of_their_beginning() -> None:
    """The first is looked at again, when the short one beside it has ended, and still comes first."""

    def program(m: Machine) -> Program:
        m.launch(toys(f"long {m.rank}", 100))
        if m.rank == 0:
            m.launch(toys("short", 25), stream="side")
        yield m.wait()

    trace = simulated(program, mesh={"tensor": 2})
    assert [(span.graph, span.end_s) for span in trace.spans] == [
        ("short", 0.25), ("long 0", 1.0), ("long 1", 1.0),
    ]  # fmt: skip


def test_a_loop_has_ended_when_its_host_has_done_what_it_asked() -> None:
    """It launches, which takes its host half a second, and waits for nothing; meanwhile something comes."""

    def loop(m: Machine) -> Program:
        m.launch(A)
        yield from ()

    def program(m: Machine) -> Program:
        m.mark("over", after=[m.spawn(loop(m))])
        yield m.recv("in")

    trace = simulated(program, overheads=Overheads(launch_s=0.5), feed={(0, "in"): [(0.25, "item")]})
    assert [(mark.name, mark.at_s) for mark in trace.marks] == [("over", 0.5)]


@pytest.mark.parametrize("rows", [False, True])
def test_who_comes_back_from_a_wait_finds_what_came_meanwhile(rows: bool) -> None:
    """Coming back takes from 25 to 75."""

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(toys("g", 25)))
        assert m.now() == 0.75
        assert m.poll("in") == ["item"]

    simulated(program, overheads=Overheads(wait_s=0.5), rows=rows, feed={(0, "in"): [(0.5, "item")]})


@pytest.mark.parametrize("rows", [False, True])
def test_who_receives_what_ends_a_launch_keeps_it_from_none(rows: bool) -> None:
    """One loop receives what another rank sends at 25, and the launch ends at its next boundary."""

    def receives(m: Machine) -> Program:
        assert (yield m.recv("stops")) == "item"

    def program(m: Machine) -> Program:
        if m.rank == 1:
            yield m.recv("never", timeout_s=0.25)
            m.send("stops", "item", 0)
            return
        loop = m.spawn(receives(m))
        ticket = m.launch(toys("s", 10), repeat=9, until="stops")
        yield m.wait(ticket)
        assert ticket.ran == 3
        assert m.now() == pytest.approx(0.3)
        yield m.wait(loop)

    simulated(program, mesh={"tensor": 2}, rows=rows)


def test_of_two_causes_of_one_moment_the_first_counts() -> None:
    assert latest(Cause(1, 0.5), Cause(2, 0.5)).span == 1
    assert latest(Cause(1, 0.5), Cause(2, 0.75)).span == 2


def test_a_stream_goes_on_whatever_its_host_does_when_it_comes_back() -> None:
    """Receiving takes the host from 10 to 60; what is queued begins at 10."""

    def program(m: Machine) -> Program:
        first = m.launch(toys("first", 10))
        m.launch(toys("second", 10))
        yield m.wait(first)
        assert (yield m.recv("in")) == "item"

    trace = simulated(program, overheads=Overheads(message_s=0.5), feed={(0, "in"): [(0.0, "item")]})
    assert [span.start_s for span in trace.spans] == pytest.approx([0.0, 0.1])


@pytest.mark.parametrize("rows", [False, True])
def test_an_item_ends_all_that_wait_for_one_of_its_inbox(rows: bool) -> None:
    """Also a launch of two replays, and one launched when the item was there already."""

    def program(m: Machine) -> Program:
        both = [m.launch(toys(s, 20), stream=s, repeat=n, until="stops") for s, n in (("a", 9), ("b", 2))]
        yield m.wait(*both)
        late = m.launch(toys("late", 20), repeat=9, until="stops")
        yield m.wait(late)
        assert [ticket.ran for ticket in (*both, late)] == [1, 1, 1]

    simulated(program, rows=rows, feed={(0, "stops"): [(0.1, "item")]})


@pytest.mark.parametrize("sender", [0, 1])
def test_what_comes_as_the_last_replay_ends_adds_none(sender: int) -> None:
    """Another rank sends it at that very moment, when it comes back from a wait."""

    def program(m: Machine) -> Program:
        if m.rank == sender:
            yield m.wait(m.launch(toys("first", 25)))
            m.send("stops", "item", 1 - sender)
            return
        ticket = m.launch(toys("s", 25), repeat=2, until="stops", sets={m.flag("f"): 1})
        yield m.wait(ticket)
        assert ticket.ran == 2

    simulated(program, mesh={"tensor": 2}, overheads=Overheads(wait_s=0.25))


def test_a_burst_is_one_span_and_other_replays_are_counted() -> None:
    def program(m: Machine) -> Program:
        m.launch(toys("burst", 10), repeat=2)
        m.launch(toys("replays", 10), repeat=3, sets={m.flag("f"): 1})
        yield m.wait()

    spans = simulated(program).spans
    assert [(span.graph, span.replay) for span in spans] == [
        ("burst", 0), ("replays", 0), ("replays", 1), ("replays", 2),
    ]  # fmt: skip


def test_what_is_stopped_before_its_turn_comes_runs_not_once() -> None:
    def program(m: Machine) -> Program:
        ticket = m.launch(toys("s", 10), repeat=9)
        ticket.stop()
        yield m.wait(ticket)
        assert (ticket.ran, m.now()) == (0, 0.0)

    assert simulated(program).spans == []


@pytest.mark.parametrize("timeout_s", [0.0, 0.5, 1.0])
def test_who_receives_nothing_has_waited_as_long_as_it_said(machine: Contract, timeout_s: float) -> None:
    def program(m: Machine) -> Program:
        assert (yield m.recv("nothing", timeout_s=timeout_s)) is None
        assert machine.same([m.now()], [100 * timeout_s])

    machine.run(program)


def test_however_many_come_at_one_moment_they_are_polled_together() -> None:
    polled: list[int] = []

    def program(m: Machine) -> Program:
        polled.append((yield m.recv("in")))
        polled.extend(m.poll("in"))

    simulated(program, feed={(0, "in"): [(0.5, number) for number in range(9)]})
    assert polled == list(range(9))


@pytest.mark.parametrize("spawned", [False, True])
def test_the_path_to_a_mark_has_no_gaps(spawned: bool) -> None:
    """The host launches until 50, a graph runs until 75, the host launches another one until 125."""

    def works(m: Machine) -> Program:
        yield m.wait(m.launch(toys("g", 25)))
        m.launch(toys("h", 25))

    def program(m: Machine) -> Program:
        if spawned:
            m.mark("here", [m.spawn(works(m))])
            yield m.recv("never", timeout_s=2.0)
        else:
            yield from works(m)
            m.mark("here")

    trace = simulated(program, overheads=Overheads(launch_s=0.5))
    (mark,) = trace.marks
    path = critical_path(trace, mark)
    assert [(piece.kind, piece.start_s, piece.end_s) for piece in path] == [
        ("host", 0.0, 0.5), ("toy", 0.5, 0.75), ("host", 0.75, 1.25),
    ]  # fmt: skip


def test_a_rank_is_along_any_axis_from_itself() -> None:
    def program(m: Machine) -> Program:
        assert m.along("tensor") == m.rank
        yield m.wait()

    simulated(program, mesh={"tensor": 2})


def test_a_collective_along_an_axis_that_is_not_there_is_refused() -> None:
    def program(m: Machine) -> Program:
        yield m.wait(m.launch(Graph("g", (meet("sum", 1, 2, "group"),))))

    with pytest.raises(MismatchError, match="is for 2 ranks; axis 'group' has 1"):
        simulated(program, mesh={"tensor": 2})
