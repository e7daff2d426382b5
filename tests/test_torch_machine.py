"""The machine on a CPU against the simulated one: the same programs in the same order, and the same laws.

Times cannot agree, so what is compared is what does not depend on them: per stream the launches, what ran and
what was skipped, replay by replay; flags; publications; items; and that every trace keeps the laws.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from simcore.machine import laws
from simcore.machine.machine import DeadlockError, Machine, MismatchError, Program, Verdict
from simcore.machine.metrics import tokens as tokens_of
from simcore.machine.trace import Trace
from simcore.ops.op import Graph, Op, Publication, Size, fuse, put
from simcore.sim.simulation import Simulation
from simcore.validate.machines import host as host_side
from simcore.validate.machines import launches as device_side
from simcore.validate.machines.cpu.machine import TorchRun, units
from simcore.validate.machines.state import State
from simcore.workload.requests import END
from tests.programs import RandomProgram, meet, random_programs, sends, toy, toy_price, toys
from tests.thorough import examples, slow

torch.set_num_threads(1)
fixed = settings(derandomize=True, database=None)

# Seconds between one look at the clock and the next.
TICK_S = 1e-6


class Clock:
    """A clock that goes on where somebody looks at it or sleeps, and never else."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        self.now_s += TICK_S
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the machine: how busy this computer is, no test may see."""
    ours = Clock()
    for side in (host_side, device_side):
        monkeypatch.setattr(side, "time", ours)
    return ours


A, B, C = toys("a", 2), toys("b", 3), toys("c", 4)


class ToyState(State):
    """Writes down what it was asked to do."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def execute(self, op: Op) -> None:
        self.log.append(("run", op.name, op.shape))

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        for state in states:
            state.log.append(("meet", op.name, len(states)))

    def skip(self, op: Op) -> None:
        self.log.append(("skip", op.name))

    def put(self, publication: Publication, to: Any) -> None:
        to.log.append(("put", publication.signal))


def torch_run(mesh: dict[str, int] | None = None, **how: Any) -> TorchRun:
    mesh = mesh or {"tensor": 1}
    return TorchRun([ToyState() for _ in range(prod(mesh.values()))], mesh=mesh, **how)


def on_torch(program: Callable[[Machine], Program], *, feed: Any = None, **how: Any) -> TorchRun:
    """Runs a program and checks the laws."""
    run = torch_run(**how)
    for (rank, inbox), arrivals in (feed or {}).items():
        run.feed(rank, inbox, arrivals)
    laws.enforce(run.run(program))
    return run


def order(trace: Trace) -> dict[tuple[int, str], list[tuple[Any, ...]]]:
    """What each stream did, op by op. Puts and loops of one rank have no order between streams."""
    found: dict[tuple[int, str], list[tuple[Any, ...]]] = defaultdict(list)
    for span in sorted(trace.spans, key=lambda s: (s.start_s, s.end_s, s.id)):
        state, key = span.state, (span.rank, span.stream)
        if state == "skipped":
            found[key].append((span.graph, state, span.launch, span.replay))
        found[key] += [(span.graph, state, p.op.name, p.op.shape, span.members) for p in span.ops]
    return {key: sorted(log) if key[1] in ("wire", "child") else log for key, log in found.items()}


def same_order(one: Trace, other: Trace) -> None:
    ours, theirs = order(one), order(other)
    assert ours.keys() == theirs.keys()
    for key, log in ours.items():
        # Launch numbers are given as hosts get their turns; per stream they only have to rise.
        assert [_unnumbered(x) for x in log] == [_unnumbered(x) for x in theirs[key]], key


def _unnumbered(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*entry[:2], entry[3]) if entry[1] == "skipped" else entry


def items(trace: Trace) -> Counter[tuple[Any, ...]]:
    return Counter((m.rank, m.inbox, m.received_s is not None) for m in trace.messages)


# -- random programs -----------------------------------------------------------------------------------


def without_time(program: RandomProgram) -> RandomProgram:
    """The same program, but for what depends on who is faster."""
    steps = [replace(step, patience_s=step.patience_s / 100) for step in program.steps]
    for step in steps:
        step.verb = {"stop": "mark", "maybe": "gauge", "read": "wait"}.get(step.verb, step.verb)
        step.condition = "" if step.condition == "loose" else step.condition
        step.setting = "" if step.setting == "loose" else step.setting
    return replace(program, steps=steps)


def torch_of(program: RandomProgram) -> TorchRun:
    run = torch_run(program.mesh, outcomes={"odd": lambda key: key % 2 == 1})
    arrivals = tuple((at_s / 1000, item) for at_s, item in program.arrivals)
    for rank in range(len(run.machines)):
        run.feed(rank, "fed", arrivals)
        run.feed(rank, "maybe", arrivals)
    run.run(program.program)
    return run


@settings(fixed, max_examples=examples(150))
@given(program=random_programs())
def test_random_programs_do_the_same_as_on_the_simulated_machine(program: RandomProgram) -> None:
    program = without_time(program)
    run, simulated = torch_of(program), program.simulate()
    assert laws.violations(run.trace) == {}
    same_order(run.trace, simulated)
    assert Counter(m.name for m in run.trace.marks) == Counter(m.name for m in simulated.marks)


@settings(fixed, max_examples=examples(150))
@given(program=random_programs())
def test_random_programs_keep_the_laws_whoever_is_faster(program: RandomProgram) -> None:
    steps = [replace(step, patience_s=step.patience_s / 100) for step in program.steps]
    trace = torch_of(replace(program, steps=steps)).trace
    assert laws.violations(trace) == {}
    # One processor: no two spans of whatever stream or rank overlap, but members of one collective.
    spans = sorted(trace.spans, key=lambda s: (s.start_s, s.end_s))
    alone = [s for s in spans if s.collective_id is None and s.state != "wire"]
    assert all(one.end_s <= other.start_s for one, other in pairwise(alone))


@slow
@settings(fixed, max_examples=40)
@given(program=random_programs())
def test_a_critical_path_has_no_gap_and_no_idle_time(program: RandomProgram) -> None:
    program = without_time(program)
    program.arrivals = ()
    program.steps = [s for s in program.steps if s.verb not in ("fed", "mark")]
    run = torch_run(program.mesh, outcomes={"odd": lambda key: key % 2 == 1})

    def marked(m: Machine) -> Program:
        for token in range(2):
            last = m.launch(Graph("g", (toy("x", 1),)))
            m.mark(f"token {token}", [last])
            yield m.wait(last)
        yield from program.program(m)

    trace = run.run(marked)
    for token in tokens_of(trace):
        assert sum(seconds for *_, seconds in token.stretches) == pytest.approx(token.latency_s)
        assert "idle" not in token.by_kind()


# -- what each rule says ---------------------------------------------------------------------------------


def both(program: Callable[[Machine], Program], **how: Any) -> TorchRun:
    """Runs a program on both machines and compares."""
    run = on_torch(program, **how)
    feed = how.pop("feed", None)
    simulation = Simulation(lambda op: toy_price(op.parts[0] if op.parts else op), **how)
    for (rank, inbox), arrivals in (feed or {}).items():
        simulation.feed(rank, inbox, arrivals)
    same_order(run.trace, simulation.run(program))
    assert run.flags == simulation.flags
    assert items(run.trace) == items(simulation.trace)
    return run


def test_launches_wait_for_tickets_and_streams() -> None:
    def program(m: Machine) -> Program:
        short, long = m.launch(A, stream="one"), m.launch(C, stream="two")
        m.launch(B, stream="three", after=[short, long])
        m.launch(B, stream="one", after=[long])
        yield m.wait()

    spans = {(s.stream, s.graph): s for s in both(program).trace.spans}
    assert spans["three", "b"].after == (spans["one", "a"].id, spans["two", "c"].id)
    assert spans["one", "b"].start_s >= spans["two", "c"].end_s


def test_flags_conditions_and_verdicts() -> None:
    seen: list[int] = []

    def program(m: Machine) -> Program:
        one, two = m.flag("one", initial=1), m.flag("two")
        theirs = m.flag("one", rank=m.along("tensor", 1))
        skipped = m.launch(A, when=two.nonzero(), after=[m.signal("never")], sets={two: 9})
        m.launch(A, sets={one: two.nonzero(), two: one.nonzero()})
        m.launch(Graph("meet", (meet("x", 1, 2),)), sets={two: one.above(theirs)}, when=two.nonzero())
        for i in range(3):
            verdict = Verdict("third", (i, 7), yes=3, no=8)
            seen.append((yield m.read(one, m.launch(B, sets={one: verdict}))))
        turn = m.flag("turn", initial=1)
        ticket = m.launch(C, repeat=3, when=turn.nonzero(), sets={turn: turn.zero()})
        yield m.wait(ticket)
        assert (skipped.ran, ticket.ran) == (0, 1)

    run = both(program, mesh={"tensor": 2}, outcomes={"third": lambda i, seven: i == 2 and seven == 7})
    assert Counter(seen) == {8: 8, 3: 4}
    assert run.states[0].log.count(("skip", "a0")) == 1  # type: ignore[attr-defined]


def test_all_who_met_write_their_flags_before_anybody_goes_on() -> None:
    def program(m: Machine) -> Program:
        mine = m.flag("p", initial=m.rank)
        above = m.flag("above")
        met = m.launch(
            Graph("meet", (meet("x", 1, 2),)), sets={above: mine.above(m.flag("p", rank=1 - m.rank))}
        )
        m.launch(A, sets={mine: 5 - 10 * m.rank})
        assert (yield m.read(above, met)) == m.rank

    both(program, mesh={"tensor": 2})


def test_signals_count_and_every_publication_leaves_when_its_op_is_done() -> None:
    hop = put("hop", elements=1, axis="tensor", dtype="bf16")
    graph = Graph(
        "s", (toy("x", 2), toy("y", 3), toy("z", 4)), (Publication("go", 1, hop), Publication("end", 2, hop))
    )

    def program(m: Machine) -> Program:
        if m.rank == 0:
            m.launch(graph, repeat=3)
        else:
            for stream in ("one", "two"):
                m.launch(toys("first", 1), stream=stream, after=[m.signal("go", rank=0)])
            m.launch(toys("last", 1), stream="one", after=[m.signal("go", rank=0), m.signal("end", rank=0)])
            yield m.wait(m.signal("end", rank=0))
        yield m.wait()

    run = both(program, mesh={"tensor": 3})
    # The put goes to the next rank after its op, before what stands behind.
    assert run.states[1].log.count(("put", "go")) == 3  # type: ignore[attr-defined]
    for span in (s for s in run.trace.spans if s.rank == 0 and s.stream == "main"):
        away = next(s for s in run.trace.spans if s.stream == "wire" and s.cause.span == span.id)
        times = {priced.op.name: (start, end) for priced, start, end in span.op_times()}
        assert times["y"][1] == pytest.approx(away.start_s, abs=3 * TICK_S)
        assert away.end_s <= times["z"][1]
        assert sum(p.price.seconds for p in span.ops) == pytest.approx(span.progress[-1][1])


def test_collectives_meet_along_their_axis_and_fused_ops_part_by_part() -> None:
    parts = (meet("gather", 1, 2), toy("own", 3))
    fused = Graph("fused", (fuse("both", "both", parts), toy("rest", 1)))

    def program(m: Machine) -> Program:
        m.launch(toys("own", 1 + m.rank) + Graph("rows", (meet("rows", 1, 2, "tensor"),)))
        m.launch(Graph("columns", (meet("columns", 1, 2, "group"),)), stream="side")
        yield m.wait(m.launch(fused))

    run = both(program, mesh={"group": 2, "tensor": 2})
    logs = [state.log for state in run.states]  # type: ignore[attr-defined]
    assert all(("meet", "gather", 2) in log and ("run", "own", parts[1].shape) in log for log in logs)
    met = {(s.graph, s.rank): s.members for s in run.trace.spans if s.state == "collective"}
    assert [met["columns", r] for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [op.name for op in units(fused.ops[0])] == ["gather", "own"]


@pytest.mark.parametrize("other", [meet("product", 2, 2), meet("sum", 3, 2), meet("sum", 2, 3)])
def test_ranks_that_meet_in_different_collectives_are_refused(other: Op) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("g", (meet("sum", 2, 2) if m.rank == 0 else other,)))
        yield m.wait()

    with pytest.raises(MismatchError, match=r"sum|product"):
        on_torch(program, mesh={"tensor": 2})


def test_sizes_grow_from_replay_to_replay() -> None:
    graph = Graph("grows", (toy("op", Size("n"), early=7), toy("fixed", Size("m"))))

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(graph, sizes={"n": 2, "m": 4}, repeat=3))
        yield m.wait(m.launch(graph, sizes={"n": 2, "m": 4}, advance={"n": 5}, repeat=3))

    run = both(program)
    ops = [p.op for s in run.trace.spans for p in s.ops]
    assert [op["hundredths"] for op in ops if op.name == "op"] == [2, 3, 4, 2, 7, 12]
    assert [op["hundredths"] for op in ops if op.name == "fixed"] == [4, 5, 6, 4, 4, 4]
    assert run.trace.rows.sources["measured"] == pytest.approx(
        sum(s.progress[-1][1] for s in run.trace.spans)
    )


class Slow(ToyState):
    """Takes two milliseconds an op."""

    def __init__(self, run: list[TorchRun]) -> None:
        super().__init__()
        self.run = run

    def execute(self, op: Op) -> None:
        super().execute(op)
        until_s = self.run[0].now() + 0.002
        while self.run[0].now() < until_s:
            pass


def slow_run(world: int = 1, **how: Any) -> TorchRun:
    runs: list[TorchRun] = []
    runs.append(TorchRun([Slow(runs) for _ in range(world)], **how))
    return runs[0]


def test_stop_and_until_end_at_a_boundary_but_until_lets_one_run() -> None:
    run = slow_run()

    def program(m: Machine) -> Program:
        ticket, queued = m.launch(A, repeat=10**6), m.launch(A, repeat=5)
        yield m.recv("in", timeout_s=0.011)
        ticket.stop()
        queued.stop()
        yield m.wait(queued)
        assert 1 <= ticket.ran <= 8
        assert queued.ran == 0
        burst = m.launch(A, repeat=10**6, until="fed")
        other = m.launch(A, repeat=3, until="fed", stream="side")
        yield m.wait(burst, other)
        assert 1 <= burst.ran < 20
        late = m.launch(A, repeat=9, until="fed")
        yield m.wait(late)
        assert late.ran == 1
        m.launch(A)
        queued = m.launch(A, repeat=9, until="own")
        m.send("own", "before it began", 0)
        yield m.wait(queued)
        assert queued.ran == 1
        assert m.poll("fed") == ["item"]
        assert m.poll("fed") == []

    run.feed(0, "fed", [(0.035, "item")])
    laws.enforce(run.run(program))
    assert run.fed_s == [0.035]
    durations = [s.end_s - s.start_s for s in run.trace.spans]
    assert all(d >= 0.002 for d in durations)


def test_items_time_out_and_arrive_while_the_machine_sleeps_and_while_it_is_busy() -> None:
    run, got = slow_run(2), list[tuple[object, float]]()

    def program(m: Machine) -> Program:
        if m.rank == 1:
            item = yield m.recv("in")
            m.send("back", item, 0)
            return
        for patience_s in (0.004, 0.0, None):
            item = yield m.recv("in", timeout_s=patience_s)
            got.append((item, m.now()))
        m.send("in", "pass", 1)
        busy = m.launch(toys("busy", *[1] * 5))
        assert (yield m.recv("back")) == "pass"
        yield m.wait(busy)
        assert m.poll("in") == ["y", "z"]

    run.feed(0, "in", [(0.01, "x"), (0.013, "y"), (0.0131, "z")])
    trace = run.run(program)
    laws.enforce(trace)
    assert [item for item, _ in got] == [None, None, "x"]
    assert 0.004 <= got[0][1] <= got[1][1] < 0.01 <= got[2][1]
    assert [m.arrived_s for m in trace.messages if m.inbox == "in" and m.rank == 0] == [0.01, 0.013, 0.0131]


def test_items_go_where_a_route_says_and_are_made_up_as_they_are_asked_for() -> None:
    made: list[int] = []

    def coming() -> Any:
        for i in range(3):
            made.append(i)
            yield 0.001 * i, i

    def program(m: Machine) -> Program:
        for _ in range(2 - m.rank):
            item = yield m.recv("in")
            assert item % 2 == m.rank
            assert made[-1] <= item + 1

    run = torch_run({"tensor": 2})
    run.feed(lambda item: (int(str(item)) % 2,), "in", coming())
    run.run(program)


def test_who_asked_first_is_given_first_and_streams_take_turns() -> None:
    got: list[tuple[int, object]] = []

    def asks(m: Machine, number: int) -> Program:
        got.append((number, (yield m.recv("in"))))

    def program(m: Machine) -> Program:
        loops = [m.spawn(asks(m, number)) for number in range(3)]
        first, second = m.launch(A, repeat=3), m.launch(B, stream="side", repeat=3)
        yield m.wait(first, second)
        for item in "xyz":
            m.send("in", item, 0)
        yield m.wait(*loops)

    run = on_torch(program)
    assert got == [(0, "x"), (1, "y"), (2, "z")]
    assert [s.graph for s in run.trace.spans] == ["a", "b"] * 3


def test_after_a_sleep_a_path_begins_with_what_came() -> None:
    def program(m: Machine) -> Program:
        yield m.wait(m.launch(A))
        yield m.recv("in")
        yield m.wait(m.launch(B))
        yield m.wait(m.launch(C))

    run = on_torch(program, feed={(0, "in"): [(0.01, "x")]})
    a, b, c = run.trace.spans
    assert (a.cause.span, b.cause.span, c.cause.span) == (None, None, b.id)


def test_a_spawned_loop_runs_beside_its_parent() -> None:
    def child(m: Machine) -> Program:
        yield m.wait(m.launch(B, stream="child"))
        yield m.wait(m.launch(B, stream="child"))

    def program(m: Machine) -> Program:
        loop = m.spawn(child(m))
        yield m.wait(m.launch(A))
        yield m.wait(loop)
        assert loop.ran == 1

    both(program)


def test_ranks_in_lockstep_do_what_the_first_is_told() -> None:
    def program(m: Machine) -> Program:
        graph = toys("own", 1) + Graph("sum", (meet("sum", 1, 2, "tensor"),))
        m.launch(sends("s", 1, signal="go"))
        ticket = m.launch(graph, repeat=2, after=[m.signal("go")], when=m.flag("f").zero())
        m.launch(A, when=m.flag("f").nonzero())
        m.launch(Graph("all", (meet("all", 1, 2, "server"),)))
        yield m.wait(ticket)
        assert m.coordinate("tensor") == 0

    mesh = {"server": 2, "tensor": 2}

    def program_of_all(m: Machine) -> Program:
        m.launch(sends("s", 1, signal="go"))
        graph = toys("own", 1) + Graph("sum", (meet("sum", 1, 2, "tensor"),))
        for _ in range(2):
            m.launch(graph)
        m.launch(Graph("empty", (toy("a0", 2),)), when=m.flag("f").nonzero())
        yield m.wait(m.launch(Graph("all", (meet("all", 1, 2, "server"),))))

    def once(m: Machine) -> Program:
        m.launch(sends("s", 1, signal="go"), repeat=2)
        yield from program(m)

    led, all_ = on_torch(once, mesh=mesh, lockstep=("tensor",)), on_torch(program_of_all, mesh=mesh)
    for rank in range(4):
        ours = [x for x in led.states[rank].log if x[0] != "put"]  # type: ignore[attr-defined]
        theirs = [x for x in all_.states[rank].log if x[0] != "put"]  # type: ignore[attr-defined]
        assert ours[2:] == theirs
        puts = [x for x in led.states[rank].log if x[0] == "put"]  # type: ignore[attr-defined]
        assert puts == [("put", "go")] * 3
    met = {(s.graph, s.rank): s.members for s in led.trace.spans if s.state == "collective"}
    assert met == {
        ("own+sum", 0): (0, 1), ("own+sum", 1): (0, 1), ("own+sum", 2): (2, 3), ("own+sum", 3): (2, 3),
        ("all", 0): (0, 2), ("all", 1): (1, 3), ("all", 2): (0, 2), ("all", 3): (1, 3),
    }  # fmt: skip


# -- what is refused, and who waits for ever ----------------------------------------------------------------


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


def _missing_mark(m: Machine) -> Program:
    m.mark("lost", [m.signal("never")])
    yield m.wait()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (_missing_rank, r"program of rank 0.*rank 0 stream side: all_reduce sum: 1 of 2 ranks"),
        (_missing_signal, r"rank 1 stream side: launch 0 of graph a waits for signal never of rank 0"),
        (_missing_ticket, r"rank 1 stream two: launch 1 of graph b waits for launches before it"),
        (_missing_message, r"program of rank 1"),
        (_missing_message_of_a_loop, r"loop of rank 1"),
        (_missing_mark, r"mark 'lost' of rank 0"),
    ],
)
def test_a_deadlock_says_who_waits_for_what(program: Any, says: str) -> None:
    with pytest.raises(DeadlockError, match=says):
        on_torch(program, mesh={"tensor": 2})


@pytest.mark.parametrize(
    ("how", "says"),
    [({"repeat": 0}, "repeat is 0"), ({"sizes": {"width": 1}}, r"reads.*length")],
)
def test_launches_that_cannot_be_are_refused(how: Any, says: str) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("reads", (toy("op", Size("length")),)), **how)
        yield m.wait()

    with pytest.raises(ValueError, match=says):
        on_torch(program)


def test_who_begins_with_what_is_each_ranks_own_affair() -> None:
    def program(m: Machine) -> Program:
        m.flag("f", rank=m.along("tensor", 1), initial=1)
        yield m.wait()

    with pytest.raises(ValueError, match="flag f: rank 0 cannot say what rank 1 begins with"):
        on_torch(program, mesh={"tensor": 2})


def test_a_state_for_every_rank() -> None:
    with pytest.raises(ValueError, match="1 states for a mesh of 2 ranks"):
        TorchRun([ToyState()], mesh={"tensor": 2})


def test_whoever_counts_what_comes_reads_the_list_of_the_run() -> None:
    """A study holds the list, from before the run, in which a machine notes when items came."""

    def program(m: Machine) -> Program:
        for _ in range(3):
            yield m.recv("fed")

    run = torch_run()
    came_s = run.fed_s
    run.feed(0, "fed", [(0.0, "a"), (0.001, "b"), (0.002, END)])
    run.run(program)
    assert came_s == [0.0, 0.001]
    assert run.fed_s is came_s
