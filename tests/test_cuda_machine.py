"""The machine on a CUDA card against the simulated one: the same programs do the same, in the same order.

On a card that is none (`tests.fake_card`), where what is queued runs in any order that waits allow, and on
the real one (marker `gpu`). What ran is read off the trace and off what the ops themselves wrote down.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simcore.kernels.streams import current_gate
from simcore.machine import laws
from simcore.machine.machine import DeadlockError, LawError, Machine, MismatchError, Program, Verdict
from simcore.machine.trace import Trace
from simcore.ops.op import Graph, Op, Publication, Size, fuse, put
from simcore.sim.simulation import Simulation
from simcore.validate.machines import host as host_side
from simcore.validate.machines.cuda import cuda_api
from simcore.validate.machines.cuda import machine as card_machine
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi, seen_together
from simcore.validate.machines.cuda.machine import DEPTH, Card, CardRun
from simcore.validate.machines.cuda.records import Clocks, OrderError
from simcore.validate.machines.state import CardState
from tests import fake_card
from tests.fake_card import FakeCudaApi
from tests.programs import RandomProgram, meet, random_programs, sends, toy, toy_price, toys
from tests.test_torch_machine import Clock, items, same_order, without_time
from tests.thorough import examples, slow, thorough

fixed = settings(derandomize=True, database=None)
needs_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOTH = ["fake", pytest.param("cuda", marks=needs_card)]
A, B, C = toys("a", 2), toys("b", 3), toys("c", 4)
MANY = 1 << 14


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Of an emulated card alone the clock: how busy this computer is, its test may not see."""
    if kind == "fake":
        ours = Clock()
        monkeypatch.setattr(host_side, "time", ours)
        monkeypatch.setattr(fake_card, "time", ours)


@triton.jit
def _note_kernel(log_ptr, count_ptr, gate_ptr, code, GATED: tl.constexpr, SPIN: tl.constexpr):
    if GATED and tl.load(gate_ptr) == 0:
        return
    # Something to do: a microsecond or so for each round trip.
    seen = 0
    for _ in range(SPIN):
        seen += tl.atomic_add(count_ptr, 0, sem="relaxed")
    place = tl.atomic_add(count_ptr, 1 + seen * 0)
    tl.store(log_ptr + place, code)


def note(log: Tensor, count: Tensor, code: int, rounds: int) -> None:
    """Writes down that an op has run, where its gate lets it."""
    gate = current_gate()
    if log.is_cuda:
        _note_kernel[(1,)](log, count, gate, code, GATED=gate is not None, SPIN=rounds, num_warps=1)
    elif gate is None or gate[0]:
        log[int(count[0])] = code
        count += 1


class ToyCard(CardState):
    """Writes down on the card what it was asked to do."""

    codes: dict[tuple[Any, ...], int] = {}  # noqa: RUF012 - one list for all of them

    def __init__(self, api: Any, rounds: int = 1) -> None:
        self.log_, self.count, self.rounds = api.zeros(MANY), api.zeros(1), rounds

    def _note(self, *what: Any) -> None:
        note(self.log_, self.count, self.codes.setdefault(what, len(self.codes)), self.rounds)

    @property
    def log(self) -> list[tuple[Any, ...]]:
        names = list(self.codes)
        return [names[code] for code in self.log_[: int(self.count)].tolist()]

    def forget(self) -> None:
        with torch.inference_mode():
            self.count.zero_()

    def reset(self) -> None:
        pass

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        del graph
        return frozenset()

    def captured_sizes(self, graph: Graph) -> frozenset[str]:
        return graph.needs - self.device_sizes(graph)

    def sizes(self, stream: str) -> dict[str, Tensor]:
        del stream
        return {}

    def key(self) -> int:
        return 0

    def restore(self, key: Any) -> None:
        assert key == 0

    def execute(self, op: Op) -> None:
        self._note("run", op.name, op.shape)

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        for state in states:
            state._note("meet", op.name, len(states))

    def skip(self, op: Op) -> None:
        pass

    def put(self, publication: Publication, to: Any) -> None:
        to._note("put", publication.signal)


def api_of(kind: str, seed: int = 0) -> Any:
    return TorchCudaApi() if kind == "cuda" else FakeCudaApi(seed)


def card_of(kind: str, mesh: dict[str, int] | None = None, seed: int = 0, **how: Any) -> Card:
    mesh, api = mesh or {"tensor": 1}, api_of(kind, seed)
    states = [ToyCard(api, how.pop("rounds", 1)) for _ in range(prod(mesh.values()))]
    return Card(states, api, mesh=mesh, **how)


def ran(trace: Trace, rank: int) -> Counter[tuple[Any, ...]]:
    """What a rank's ops have to have written down, as the trace has it."""
    found: Counter[tuple[Any, ...]] = Counter()
    for span in trace.spans:
        for op in (p.op for p in span.ops if span.state == "run" and span.rank == rank):
            found["run", op.name, op.shape] += 1
        for op in (p.op for p in span.ops if span.state == "collective" and span.rank == rank):
            if not op.parts:
                found["meet", op.name, len(span.members)] += 1
    return found


def did(card: Card, rank: int) -> Counter[tuple[Any, ...]]:
    return Counter(entry for entry in card.states[rank].log if entry[0] != "put")


def run_twice(
    card: Card, program: Callable[[Machine], Program], *, feed: Any = None, **how: Any
) -> list[CardRun]:
    """As it comes, then from what has been captured; both keep the laws and do on the card what they say."""
    runs = []
    for _ in range(2):
        for state in card.states:
            state.forget()
        run = card.start(**how)
        for (rank, inbox), arrivals in (feed or {}).items():
            run.feed(rank, inbox, arrivals)
        laws.enforce(run.run(program))
        runs.append(run)
    assert runs[1].fresh == 0
    return runs


def both(kind: str, program: Callable[[Machine], Program], *, feed: Any = None, **how: Any) -> list[CardRun]:
    """Runs a program on both machines and compares."""
    outcomes, mesh = how.pop("outcomes", None), how.get("mesh")
    card = card_of(kind, **how)
    runs = run_twice(card, program, feed=feed, outcomes=outcomes)
    simulation = Simulation(
        lambda op: toy_price(op.parts[0] if op.parts else op), mesh=mesh, outcomes=outcomes,
        lockstep=how.get("lockstep", ()),
    )  # fmt: skip
    for (rank, inbox), arrivals in (feed or {}).items():
        simulation.feed(rank, inbox, arrivals)
    simulated = simulation.run(program)
    for run in runs:
        if not how.get("lockstep"):
            same_order(run.trace, simulated)
        assert run.flags == simulation.flags
        assert items(run.trace) == items(simulated)
    return runs


# -- random programs -------------------------------------------------------------------------------------


def run_of(card: Card, program: RandomProgram) -> CardRun:
    run = card.start(outcomes={"odd": lambda key: key % 2 == 1})
    arrivals = tuple((at_s / 1000, item) for at_s, item in program.arrivals)
    for rank in range(len(run.machines)):
        run.feed(rank, "fed", arrivals)
        run.feed(rank, "maybe", arrivals)
    run.run(program.program)
    return run


def same_as_simulated(kind: str, program: RandomProgram, seed: int) -> None:
    program = without_time(program)
    card, simulated = card_of(kind, program.mesh, seed), program.simulate()
    for _ in range(2):
        for state in card.states:
            state.forget()
        run = run_of(card, program)
        assert laws.violations(run.trace) == {}
        same_order(run.trace, simulated)
        assert Counter(m.name for m in run.trace.marks) == Counter(m.name for m in simulated.marks)
        for rank in range(len(card.states)):
            assert did(card, rank) == ran(run.trace, rank)


@settings(fixed, max_examples=examples(150))
@given(program=random_programs(), seed=st.integers(0, 2**16))
def test_random_programs_do_the_same_as_on_the_simulated_machine(program: RandomProgram, seed: int) -> None:
    same_as_simulated("fake", program, seed)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@settings(fixed, max_examples=40)
@given(program=random_programs())
def test_random_programs_do_the_same_on_a_real_card(program: RandomProgram) -> None:
    same_as_simulated("cuda", program, 0)


@slow
@settings(fixed, max_examples=examples(100))
@given(program=random_programs(), seed=st.integers(0, 2**16))
def test_random_programs_keep_the_laws_whoever_is_faster(program: RandomProgram, seed: int) -> None:
    steps = [replace(step, patience_s=step.patience_s / 100) for step in program.steps]
    program = replace(program, steps=steps)
    card = card_of("fake", program.mesh, seed)
    run = run_of(card, program)
    assert laws.violations(run.trace) == {}
    for rank in range(len(card.states)):
        assert did(card, rank) == ran(run.trace, rank)


# -- what each rule says -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_launches_wait_for_tickets_and_streams(kind: str) -> None:
    def program(m: Machine) -> Program:
        short, long = m.launch(A, stream="one"), m.launch(C, stream="two")
        m.launch(B, stream="three", after=[short, long])
        m.launch(B, stream="one", after=[long])
        yield m.wait()

    for run in both(kind, program, rounds=20):
        spans = {(s.stream, s.graph): s for s in run.trace.spans}
        assert spans["three", "b"].after == (spans["one", "a"].id, spans["two", "c"].id)
        assert spans["one", "b"].start_s >= spans["two", "c"].end_s
        assert spans["three", "b"].start_s >= spans["two", "c"].end_s


@pytest.mark.parametrize("kind", BOTH)
def test_flags_conditions_and_verdicts(kind: str) -> None:
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

    outcomes = {"third": lambda i, seven: i == 2 and seven == 7}
    both(kind, program, mesh={"tensor": 2}, outcomes=outcomes)
    assert Counter(seen) == {8: 12, 3: 6}


@pytest.mark.parametrize("kind", BOTH)
def test_all_who_met_write_their_flags_before_anybody_goes_on(kind: str) -> None:
    def program(m: Machine) -> Program:
        mine = m.flag("p", initial=m.rank)
        above = m.flag("above")
        for _ in range(20):
            m.launch(A, sets={mine: m.rank})
            met = m.launch(
                Graph("meet", (meet("x", 1, 2),)), sets={above: mine.above(m.flag("p", rank=1 - m.rank))}
            )
            m.launch(A, sets={mine: 5 - 10 * m.rank})
            assert (yield m.read(above, met)) == m.rank

    both(kind, program, mesh={"tensor": 2})


@pytest.mark.parametrize("kind", BOTH)
def test_what_flags_of_others_begin_with_is_known_before_they_are_read(kind: str) -> None:
    def program(m: Machine) -> Program:
        theirs = m.flag("f", rank=m.along("tensor", 1))
        ticket = m.launch(A, when=theirs.above(2))
        m.flag("f", initial=3)
        yield m.wait(ticket)
        assert ticket.ran == 1

    both(kind, program, mesh={"tensor": 2})


@pytest.mark.parametrize("kind", BOTH)
def test_signals_count_and_are_taken_in_turn(kind: str) -> None:
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

    for run in both(kind, program, mesh={"tensor": 3}):
        puts = [entry for entry in run.states[1].log if entry[0] == "put"]
        assert puts == [("put", "go"), ("put", "end")] * 3
        for span in (s for s in run.trace.spans if s.stream == "wire"):
            last = max(s.end_s for s in run.trace.spans if s.launch == span.launch and s.id < span.id)
            if span.cause.host and kind == "cuda":
                # The op had ended before the host had queued what is put on the wire.
                assert span.start_s >= last
                continue
            behind = next(s for s in run.trace.spans if s.id == span.cause.span)
            assert (behind.rank, behind.end_s) == (0, span.start_s)
            assert behind.stream == "main"


@pytest.mark.parametrize("kind", BOTH)
def test_a_gated_launch_takes_a_signal_only_where_it_runs(kind: str) -> None:
    def program(m: Machine) -> Program:
        open_ = m.flag("open", initial=1)
        if m.rank == 0:
            # The taker is queued first, and spins until this one comes.
            yield m.recv("late", timeout_s=0.002)
            yield m.wait(m.launch(sends("s", 1, signal="go"), repeat=2))
            return
        signal = m.signal("go", rank=0)
        one = m.launch(A, after=[signal], when=open_.nonzero(), sets={open_: 0})
        two = m.launch(B, after=[m.signal("go", rank=0)], when=open_.nonzero())
        three = m.launch(C, after=[m.signal("go", rank=0)], when=open_.zero())
        yield m.wait(one, two, three)
        assert (one.ran, two.ran, three.ran) == (1, 0, 1)

    both(kind, program, mesh={"tensor": 2})


@pytest.mark.parametrize("kind", BOTH)
def test_collectives_meet_along_their_axis_and_fused_ops_part_by_part(kind: str) -> None:
    parts = (meet("gather", 1, 2), toy("own", 3))
    fused = Graph("fused", (fuse("both", "both", parts), toy("rest", 1)))

    def program(m: Machine) -> Program:
        m.launch(toys("own", 1 + m.rank) + Graph("rows", (meet("rows", 1, 2, "tensor"),)))
        m.launch(Graph("columns", (meet("columns", 1, 2, "group"),)), stream="side")
        yield m.wait(m.launch(fused))

    for run in both(kind, program, mesh={"group": 2, "tensor": 2}):
        logs = [state.log for state in run.states]
        assert all(("meet", "gather", 2) in log and ("run", "own", parts[1].shape) in log for log in logs)
        met = {(s.graph, s.rank): s.members for s in run.trace.spans if s.state == "collective"}
        assert [met["columns", r] for r in range(4)] == [(0, 2), (1, 3), (0, 2), (1, 3)]


@pytest.mark.parametrize("other", [meet("product", 2, 2), meet("sum", 3, 2), meet("sum", 2, 3)])
def test_ranks_that_meet_in_different_collectives_are_refused(other: Op) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("g", (meet("sum", 2, 2) if m.rank == 0 else other,)))
        yield m.wait()

    with pytest.raises(MismatchError, match=r"sum|product"):
        card_of("fake", {"tensor": 2}).start().run(program)


@pytest.mark.parametrize("kind", BOTH)
def test_sizes_grow_from_replay_to_replay(kind: str) -> None:
    graph = Graph("grows", (toy("op", Size("n"), early=7), toy("fixed", Size("m"))))

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(graph, sizes={"n": 2, "m": 4}, repeat=3))
        yield m.wait(m.launch(graph, sizes={"n": 2, "m": 4}, advance={"n": 5}, repeat=3))

    for run in both(kind, program):
        ops = [p.op for s in run.trace.spans for p in s.ops]
        assert [op["hundredths"] for op in ops if op.name == "op"] == [2, 3, 4, 2, 7, 12]
        total = sum(s.progress[-1][1] for s in run.trace.spans)
        assert run.trace.rows.sources["measured"] == pytest.approx(total)


class ToyWithSize(ToyCard):
    """Reads how long its op is from the card's memory: what it notes is the number that stands there."""

    def __init__(self, api: Any) -> None:
        super().__init__(api)
        self.number = api.zeros(1)

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        return graph.needs & {"n"}

    def sizes(self, stream: str) -> dict[str, Tensor]:
        del stream
        return {"n": self.number}

    def execute(self, op: Op) -> None:
        del op
        if self.log_.is_cuda:
            _number_kernel[(1,)](self.log_, self.count, self.number, num_warps=1)
        else:
            self.log_[int(self.count[0])] = self.number[0]
            self.count += 1


@triton.jit
def _number_kernel(log_ptr, count_ptr, number_ptr):
    tl.store(log_ptr + tl.atomic_add(count_ptr, 1), tl.load(number_ptr))


@pytest.mark.parametrize("kind", BOTH)
def test_what_kernels_read_on_the_card_is_captured_once_for_all_sizes(kind: str) -> None:
    graph, api = Graph("grows", (toy("op", Size("n")),)), api_of(kind)
    state = ToyWithSize(api)
    card = Card([state], api)

    def program(m: Machine) -> Program:
        m.launch(graph, sizes={"n": 5}, repeat=4)
        m.launch(graph, sizes={"n": 40}, advance={"n": 7}, repeat=3)
        m.launch(graph, sizes={"n": 40})
        yield m.wait(m.launch(graph, sizes={"n": 40}))

    expected = [5, 6, 7, 8, 40, 47, 54, 40, 40]
    for fresh in (1, 0):
        state.forget()
        run = card.start()
        trace = run.run(program)
        laws.enforce(trace)
        assert run.fresh == fresh
        assert state.log_[: int(state.count)].tolist() == expected
        assert [p.op["hundredths"] for s in trace.spans for p in s.ops] == expected


@pytest.mark.parametrize("kind", BOTH)
def test_stop_and_until_end_soon_but_until_lets_one_run(kind: str) -> None:
    card = card_of(kind, rounds=200)

    def program(m: Machine) -> Program:
        ticket, queued = m.launch(A, repeat=10**6), m.launch(A, repeat=5)
        yield m.recv("in", timeout_s=0.01)
        ticket.stop()
        queued.stop()
        yield m.wait(queued)
        assert 1 <= ticket.ran < 10**6
        assert queued.ran == 0
        burst = m.launch(A, repeat=10**6, until="fed")
        other = m.launch(A, repeat=3, until="fed", stream="side")
        yield m.wait(burst, other)
        assert 1 <= burst.ran < 10**6
        late = m.launch(A, repeat=9, until="fed")
        yield m.wait(late)
        assert late.ran == 1
        m.launch(A)
        queued = m.launch(A, repeat=9, until="own")
        m.send("own", "after it began", 0)
        yield m.wait(queued)
        assert 1 <= queued.ran <= DEPTH
        assert m.poll("fed") == ["item"]
        assert m.poll("fed") == []

    for run in run_twice(card, program, feed={(0, "fed"): [(0.035, "item")]}):
        assert run.fed_s == [0.035]


class Busy(FakeCudaApi):
    """One whose every stretch of work takes TOOK_S by a clock, one after another."""

    TOOK_S = 4e-3

    def __init__(self, ours: Clock) -> None:
        super().__init__()
        self.time, self.free_s = ours, 0.0

    def run(self, stream: Any, call: Callable[[], object]) -> None:
        self.free_s = max(self.free_s, self.time.perf_counter()) + self.TOOK_S
        call()

    def record(self, stream: Any) -> fake_card.FakeEvent:
        return fake_card.FakeEvent(max(self.free_s, self.time.perf_counter()))

    def done(self, event: fake_card.FakeEvent) -> bool:
        assert event.passed_s is not None
        return event.passed_s <= self.time.perf_counter()

    def synchronize(self) -> None:
        self.time.sleep(max(0.0, self.free_s - self.time.now_s))


@slow
def test_an_item_waits_for_the_replay_that_runs_and_for_no_further_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next one is queued when the present one is nearly over, without a gap between them."""
    ours = Clock()
    for module in (host_side, cuda_api):
        monkeypatch.setattr(module, "time", ours)
    api, waits_s = Busy(ours), list[float]()
    card = Card([ToyCard(api)], api)
    at_s = [0.0303 + 0.0257 * i for i in range(15)]

    def program(m: Machine) -> Program:
        waits_s.clear()
        for item_s in at_s:
            yield m.wait(m.launch(A, repeat=10**6, until="fed"))
            waits_s.append(m.now() - item_s)
            assert len(m.poll("fed")) == 1

    for run in run_twice(card, program, feed={(0, "fed"): [(each, "item") for each in at_s]}):
        spans = sorted(run.trace.spans, key=lambda span: span.start_s)
        gaps_s = [b.start_s - a.end_s for a, b in pairwise(spans) if b.replay > 1]
        # Who comes while the next one is queued already waits for that, too.
        assert sum(wait_s < 1.02 * Busy.TOOK_S for wait_s in waits_s) >= 12
        assert max(gaps_s) < 0.05 * Busy.TOOK_S


class Held(Busy):
    """One whose host needs QUEUES_S to queue a stretch, and at every twentieth a millisecond more: before it,
    or when it looks at its end."""

    QUEUES_S, HELD_S, AT = 2.5e-4, 1e-3, 20

    def __init__(self, ours: Clock, looking: bool) -> None:
        super().__init__(ours)
        self.looking, self.queued, self.looked = looking, 0, 0
        # By how much each was queued before it could begin, s.
        self.leads_s = list[float]()

    def _held_s(self, looking: bool) -> float:
        return self.HELD_S if looking is self.looking and self.queued % self.AT == 0 else 0.0

    def run(self, stream: Any, call: Callable[[], object]) -> None:
        self.queued += 1
        self.time.sleep(self.QUEUES_S + self._held_s(False))
        self.leads_s.append(max(0.0, self.free_s - self.time.now_s))
        super().run(stream, call)

    def done(self, event: fake_card.FakeEvent) -> bool:
        if super().done(event):
            return True
        if self._held_s(True) and self.looked != self.queued and event.passed_s is not None:
            # Until after the end, which is so noticed late.
            self.looked = self.queued
            self.time.sleep(event.passed_s - self.time.now_s + self.HELD_S)
        return super().done(event)


def bursts_of_held(monkeypatch: pytest.MonkeyPatch, *, looking: bool) -> Iterator[tuple[Held, CardRun]]:
    """Yields twice a run of a burst of some hundred replays, and the card with what it noted of it."""
    ours = Clock()
    for module in (host_side, cuda_api):
        monkeypatch.setattr(module, "time", ours)
    api = Held(ours, looking)
    card = Card([ToyCard(api)], api)

    def program(m: Machine) -> Program:
        api.leads_s.clear()
        yield m.wait(m.launch(A, repeat=10**6, until="fed"))
        assert len(m.poll("fed")) == 1

    for run in run_twice(card, program, feed={(0, "fed"): [(100.5 * Busy.TOOK_S, "item")]}):
        yield api, run


@slow
def test_a_host_that_notices_an_end_late_queues_the_others_no_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an item may end is queued as late as can be, also then."""
    for api, _ in bursts_of_held(monkeypatch, looking=True):
        early = [lead_s for lead_s in api.leads_s[3:] if lead_s > 5e-4]
        assert len(api.leads_s) >= 90
        assert (api.looked > 0, len(early)) == (True, 0)


@slow
def test_a_host_that_was_held_up_once_is_late_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap before one replay is none of its time: else each that follows would be queued as late."""
    for _, run in bursts_of_held(monkeypatch, looking=False):
        spans = sorted(run.trace.spans, key=lambda span: span.start_s)
        late = [b for a, b in pairwise(spans) if b.start_s - a.end_s > 0.02 * Busy.TOOK_S]
        assert len(spans) >= 95
        assert len(late) in (4, 5)


class Beside(Busy):
    """One whose streams run at once: stretches on "side" take SIDE of TOOK_S, others LONGER beside them."""

    SIDE, LONGER = 3.3, 2.5

    def __init__(self, ours: Clock) -> None:
        super().__init__(ours)
        self.side: Any = None
        self.free_of: dict[int, float] = {}

    def run(self, stream: Any, call: Callable[[], object]) -> None:
        now_s, side_s = self.time.perf_counter(), self.free_of.get(id(self.side), 0.0)
        begins_s = max(now_s, self.free_of.get(id(stream), 0.0))
        took = self.SIDE if stream is self.side else self.LONGER if begins_s < side_s else 1.0
        self.free_of[id(stream)] = begins_s + took * self.TOOK_S
        self.free_s = max(self.free_of.values())
        call()

    def record(self, stream: Any) -> fake_card.FakeEvent:
        return fake_card.FakeEvent(max(self.free_of.get(id(stream), 0.0), self.time.perf_counter()))


@slow
def test_beside_work_of_another_stream_an_item_waits_for_no_further_replay_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replays take longer then, so the time of the one before does not say when the present one ends."""
    ours = Clock()
    for module in (host_side, cuda_api):
        monkeypatch.setattr(module, "time", ours)
    api, waits_s = Beside(ours), list[float]()
    card = Card([ToyCard(api)], api)
    api.side = card.lane(0, "side").stream

    def program(m: Machine) -> Program:
        waits_s.clear()
        for i in range(9):
            burst = m.launch(A, repeat=10**6, until="fed")
            yield m.recv("nothing", timeout_s=(2.0 + 0.37 * i) * Busy.TOOK_S)
            yield m.wait(m.launch(A, stream="side"))
            ended_s = m.now()
            m.send("fed", "item", 0)
            yield m.wait(burst)
            waits_s.append(m.now() - ended_s)
            assert len(m.poll("fed")) == 1

    for _ in run_twice(card, program):
        assert max(waits_s) < 1.02 * Beside.LONGER * Busy.TOOK_S
        # Whoever comes when the present one is nearly over hardly waits.
        assert sum(wait_s < 0.3 * Busy.TOOK_S for wait_s in waits_s) == 3


@thorough
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("kind", BOTH)
def test_items_time_out_and_arrive_while_the_machine_sleeps_and_while_it_is_busy(kind: str) -> None:
    got = list[tuple[object, float]]()

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
        while m.now() < 0.014:
            yield m.recv("nothing", timeout_s=0.001)
        assert m.poll("in") == ["y", "z"]

    feed = {(0, "in"): [(0.01, "x"), (0.013, "y"), (0.0131, "z")]}
    run_twice(card_of(kind, {"tensor": 2}), program, feed=feed)
    assert [item for item, _ in got] == [None, None, "x"] * 2


@pytest.mark.parametrize("kind", BOTH)
def test_a_spawned_loop_runs_beside_its_parent(kind: str) -> None:
    def child(m: Machine) -> Program:
        yield m.wait(m.launch(B, stream="child"))
        yield m.wait(m.launch(B, stream="child"))

    def program(m: Machine) -> Program:
        loop = m.spawn(child(m))
        yield m.wait(m.launch(A))
        yield m.wait(m.launch(A, after=[loop]))
        assert loop.ran == 1

    both(kind, program)


@pytest.mark.parametrize("kind", BOTH)
def test_ranks_in_lockstep_do_what_the_first_is_told(kind: str) -> None:
    def program(m: Machine) -> Program:
        turn = m.flag("turn", initial=1)
        graph = toys("own", 1) + Graph("sum", (meet("sum", 1, 2, "tensor"),))
        m.launch(sends("s", 1, signal="go"), repeat=2)
        ticket = m.launch(graph, repeat=2, after=[m.signal("go")], when=m.flag("f").zero())
        m.launch(A, when=m.flag("f").nonzero())
        m.launch(B, repeat=3, when=turn.nonzero(), sets={turn: turn.zero()})
        m.launch(graph, when=turn.nonzero(), sets={turn: 7})
        m.launch(Graph("all", (meet("all", 1, 2, "server"),)), sets={turn: turn.zero()})
        yield m.wait(ticket)
        assert m.coordinate("tensor") == 0

    for run in both(kind, program, mesh={"server": 2, "tensor": 2}, lockstep=("tensor",)):
        for rank in range(4):
            ours = [x for x in run.states[rank].log if x[0] != "put"]
            other = [x for x in run.states[0].log if x[0] != "put"]
            assert ours == other
            assert [x[1] for x in ours].count("b0") == 1
            assert [x[1] for x in ours].count("sum") == 2
            assert [x for x in run.states[rank].log if x[0] == "put"] == [("put", "go")] * 2
        met = {(s.graph, s.rank): s.members for s in run.trace.spans if s.state == "collective"}
        assert met == {
            ("own+sum", 0): (0, 1), ("own+sum", 1): (0, 1), ("own+sum", 2): (2, 3), ("own+sum", 3): (2, 3),
            ("all", 0): (0, 2), ("all", 1): (1, 3), ("all", 2): (0, 2), ("all", 3): (1, 3),
        }  # fmt: skip


# -- what is refused, and who waits for ever -----------------------------------------------------------------


def _missing_rank(m: Machine) -> Program:
    if m.rank == 0:
        yield m.wait(m.launch(Graph("g", (meet("sum", 2, 2),)), stream="side"))


def _missing_signal(m: Machine) -> Program:
    if m.rank == 1:
        m.launch(A, stream="side", after=[m.signal("never", rank=0)])
    yield m.wait()


def _missing_signal_behind_a_gate(m: Machine) -> Program:
    if m.rank == 1:
        m.launch(A, stream="side", after=[m.signal("never", rank=0)], when=m.flag("f").zero())
    yield m.wait()


def _unsent_signal(m: Machine) -> Program:
    """What would send it is queued, and skipped: the card alone can find out."""
    if m.rank == 0:
        yield m.wait(m.launch(sends("s", 1, signal="go"), when=m.flag("f").nonzero()))
        return
    m.launch(A, stream="side", after=[m.signal("go", rank=0)])
    yield m.wait()


def _missing_message(m: Machine) -> Program:
    if m.rank == 1:
        yield m.recv("in")


def _missing_mark(m: Machine) -> Program:
    m.mark("lost", [m.signal("never")])
    yield m.wait()


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    ("program", "says"),
    [
        (_missing_rank, r"program of rank 0.*rank 0 stream side: all_reduce sum: 1 of 2 ranks"),
        (_missing_signal, r"rank 1 stream side: launch 0 of graph a waits for signal never of rank 0"),
        (_missing_signal_behind_a_gate, r"stream side: launch 0 of graph a waits for signal never of rank 0"),
        (_unsent_signal, r"rank 1 stream side: graph a waits for signal go of rank 0"),
        (_missing_message, r"program of rank 1"),
        (_missing_mark, r"mark 'lost' of rank 0"),
    ],
)
def test_a_deadlock_says_who_waits_for_what(kind: str, program: Any, says: str) -> None:
    card = card_of(kind, {"tensor": 2}, patience_s=0.001)
    with pytest.raises(DeadlockError, match=says):
        card.start().run(program)


@pytest.mark.parametrize(
    ("how", "says"),
    [({"repeat": 0}, "repeat is 0"), ({"sizes": {"width": 1}}, r"reads.*length")],
)
def test_launches_that_cannot_be_are_refused(how: Any, says: str) -> None:
    def program(m: Machine) -> Program:
        m.launch(Graph("reads", (toy("op", Size("length")),)), **how)
        yield m.wait()

    with pytest.raises(ValueError, match=says):
        card_of("fake").start().run(program)


def test_a_state_for_every_rank() -> None:
    api = FakeCudaApi()
    with pytest.raises(ValueError, match="1 states for a mesh of 2 ranks"):
        Card([ToyCard(api)], api, mesh={"tensor": 2})


@pytest.mark.parametrize("off_s", [-0.02, -0.001, 0.0, 0.003])
def test_looks_at_both_clocks_may_be_wrong(monkeypatch: pytest.MonkeyPatch, off_s: float) -> None:
    """A card that others use shows its clock late; what it did is still in its order, and behind its host."""
    looks = iter([off_s, 0.5 * off_s] * 2)

    def off(api: CudaApi, stream: Any) -> tuple[Any, float, float]:
        event, at_s, half_s = seen_together(api, stream)
        return event, at_s + next(looks), half_s + abs(off_s)

    monkeypatch.setattr(card_machine, "seen_together", off)

    def program(m: Machine) -> Program:
        for _ in range(5):
            first = m.launch(A)
            met = m.launch(Graph("meet", (meet("x", 1, 2),)), after=[first])
            if m.rank:
                yield m.wait(first)
            yield m.wait(met)

    for run in run_twice(card_of("fake", {"tensor": 2}), program):
        spans = [span for span in run.trace.spans if span.rank == 0]
        assert [span.start_s for span in spans] == sorted(span.start_s for span in spans)
        assert all(span.start_s >= span.issued_s for span in spans)


def test_each_card_has_a_clock_of_its_own() -> None:
    """Events (card, its seconds) of two cards whose clocks differ, and one of which runs twice as fast."""

    class Two:
        def where(self, event: tuple[int, float]) -> int:
            return event[0]

        def elapsed_s(self, before: tuple[int, float], after: tuple[int, float]) -> float:
            assert before[0] == after[0]
            return after[1] - before[1]

    api: Any = Two()
    first = [((0, 5.0), 1.0), ((1, 100.0), 1.5)]
    last = [((0, 7.0), 3.0), ((1, 104.0), 3.5)]
    clocks, events = Clocks(api, first, last, 1e-3), [(0, 6.0), (1, 101.0), (1, 103.0)]
    assert [clocks.at(event) for event in events] == pytest.approx([2.0, 2.0, 3.0])
    clocks.move(1.0)
    assert [clocks.at(event) for event in events] == pytest.approx([2.002, 2.002, 3.002])


def test_a_clock_that_is_more_off_than_looking_says_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(api: CudaApi, stream: Any) -> tuple[Any, float, float]:
        event, at_s, _ = seen_together(api, stream)
        return event, at_s - 5.0, 1e-6

    monkeypatch.setattr(card_machine, "seen_together", off)

    def program(m: Machine) -> Program:
        for _ in range(3):
            yield m.wait(m.launch(A))

    with pytest.raises((LawError, OrderError)):
        run_twice(card_of("fake"), program)
