"""The real machine on a CPU: the same programs as on the simulated one, with real tensors, on the wall clock.

    op i of a span takes  stamp i+1 - stamp i         0 s = the start of the run
    a span starts when    issued, stream free, tickets done, signals come, last rank there, processor free

A small cooperative scheduler: host programs go on while they can, then of the streams that can go on the one
that waited longest does a replay, or as much of one as stands before the next meeting with other ranks, else
the machine sleeps until the next arrival or timeout.

Streams and ranks run one after another on the one processor: nothing overlaps here, and the latency of a
run is the sum of what all ranks do (`ONE_AFTER_ANOTHER` says so for provenances). What a span waited for
last is therefore the span before it on the processor, with the host busy in between; its cause says that.
Each replay of a burst is a span of its own, for other streams may run between two of them.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod
from typing import Any, Protocol, cast

import torch

from kernels.table import TABLE
from simcore import mesh as layout
from simcore.machine import Condition, Flag, Machine, Program, Setting, Ticket, Verdict, Wait, holds
from simcore.ops import Graph, Op, Price, Publication, Roofline
from simcore.requests import END
from simcore.sim import DeadlockError, MismatchError, Outcomes, Route, no_floor
from simcore.trace import Cause, Gauge, Mark, Message, PricedOp, Span, Trace
from simcore.trace import State as SpanState

ONE_AFTER_ANOTHER = "streams and ranks ran one after another, on one thread"


def one_thread() -> None:
    """Lets torch compute on one thread: ops of small models are too short to be shared out, and where others
    want the cores, threads that wait for each other cost more than they save, by milliseconds an op."""
    torch.set_num_threads(1)


class State(Protocol):
    """The buffers of one rank, and which of them an op reads and writes. Ops come bound, with numbers for
    all sizes; a fused op comes part by part unless `kernels.table.TABLE` has its kind."""

    def execute(self, op: Op) -> None:
        """A local op."""

    def meet(self, op: Op, states: Sequence["State"]) -> None:
        """A collective: asked once, of the first rank's state, with all states along the axis, in order."""

    def skip(self, op: Op) -> None:
        """An op, local or not, of a launch that its flag skipped: it counts as passed over."""

    def put(self, publication: Publication, to: "State") -> None:
        """Writes what is published into the buffers of the next rank along the axis of the put."""


@dataclass(frozen=True, slots=True)
class _Need:
    """What a task waits for: it goes on once `ready()`, or at `until_s` at the latest."""

    ready: Callable[[], bool]
    until_s: float = inf


# Nothing but its turn.
_TURN = _Need(lambda: True)
_Steps = Generator[_Need, None, Any]


@dataclass(slots=True, eq=False)
class _Task:
    """A host loop, a mark or a stream that is being worked off; `what` says which, for a deadlock."""

    what: Callable[[], str]
    steps: _Steps
    need: _Need = _TURN

    def go_on(self) -> bool:
        """Takes it to its next wait. False where it has come to its end."""
        try:
            self.need = next(self.steps)
        except StopIteration:
            return False
        return True


@dataclass(slots=True, eq=False)
class TorchTicket:
    """A launch or a host loop that will be done; `end` is its last span and when it ended."""

    ran: int = 0
    end: Cause | None = None
    stopped: bool = False

    def stop(self) -> None:
        """Ends a repeated launch at its next replay boundary; one that has not begun runs not once."""
        self.stopped = self.stopped or self.end is None

    def done(self) -> _Steps:
        """Waits until it is done."""
        if self.end is None:
            yield _Need(lambda: self.end is not None)
        return self.end


@dataclass(slots=True)
class _Signals:
    """Publications by (name, rank), and how many of them each rank has taken."""

    published: dict[tuple[str, int], list[Cause]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def take(self, name: str, source: int, waiter: int) -> _Steps:
        """Waits for the next publication that `waiter` has not taken."""
        turn = self.taken[name, source, waiter]
        self.taken[name, source, waiter] += 1
        published = self.published[name, source]
        if len(published) <= turn:
            yield _Need(lambda: len(published) > turn)
        return published[turn]


@dataclass(slots=True, eq=False)
class _SignalTicket:
    signals: _Signals
    name: str
    source: int
    waiter: int
    ran: int = 1

    def stop(self) -> None:
        """A signal cannot be stopped: nothing happens."""

    def done(self) -> _Steps:
        """Takes it, once it has come."""
        return self.signals.take(self.name, self.source, self.waiter)


@dataclass(slots=True, eq=False)
class _Launch:
    id: int
    rank: int
    stream: str
    graph: Graph
    issued_s: float
    after: tuple[TorchTicket, ...]
    signals: tuple[_SignalTicket, ...]
    sizes: Mapping[str, int]
    advance: Mapping[str, int] | None
    repeat: int
    when: Condition | None
    sets: Mapping[Flag, Setting]
    ticket: TorchTicket
    # What it runs until has come: it ends at its next boundary, but runs once.
    curtailed: bool = False

    def sizes_at(self, replay: int) -> dict[str, int]:
        """The sizes that a replay reads."""
        by = self.advance
        return {n: value + replay * (1 if by is None else by.get(n, 0)) for n, value in self.sizes.items()}


@dataclass(slots=True, eq=False)
class _Stream:
    rank: int
    name: str
    queue: deque[_Launch] = field(default_factory=deque)
    working: bool = False
    waiting_for: str = ""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Bound ops between two collectives, or one collective; what is published after which of them."""

    ops: tuple[Op, ...]
    collective: bool = False
    leaving: Mapping[int, Sequence[Publication]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Meeting:
    op: Op
    arrived: dict[int, tuple[_Launch, int]] = field(default_factory=dict)
    ends: dict[int, Cause] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Source:
    """Items that are fed: the next one, and when it comes."""

    to: int | Route
    inbox: str
    left: Iterator[tuple[float, object]]
    next: tuple[float, object] | None = None

    def advance(self) -> None:
        """Asks for the next item, which may have been made up only now."""
        self.next = next(self.left, None)


def units(op: Op) -> Iterator[Op]:
    """What of an op is executed one by one: itself, or the parts of a fused one that has no kernel."""
    if not op.parts or op.kind in TABLE:
        yield op
        return
    for part in op.parts:
        yield from units(part)


class TorchRun:
    """All ranks of one real machine; the verbs of `simcore.sim.Simulation`.

    `states`: one a rank, in the order of `mesh` (left out: all along "tensor"). `outcomes` gives, by verdict
    name, what is decided for a key. `lockstep` names axes whose ranks do what the first of them is told: its
    host runs the program, and each of its launches runs on all of them, as a driver has it with its workers.
    `roofline`: the least that a local op can take here, for law 6. What would come once all programs have
    ended comes no more. Raises ValueError where there are not as many states as ranks.
    """

    def __init__(
        self,
        states: Sequence[State],
        *,
        mesh: layout.Mesh | None = None,
        outcomes: Outcomes | None = None,
        lockstep: Sequence[str] = (),
        roofline: Roofline = no_floor,
    ) -> None:
        self.mesh: layout.Mesh = dict(mesh or {"tensor": len(states)})
        world = prod(self.mesh.values())
        if world != len(states):
            raise ValueError(f"{len(states)} states for a mesh of {world} ranks")
        self.states = list(states)
        self.trace = Trace()
        self.signals = _Signals()
        self.flags: dict[Flag, int] = {}
        self.machines = [TorchMachine(self, rank, world) for rank in range(world)]
        # When each item came, the end left out.
        self.fed_s: list[float] = []
        self._lockstep = tuple(axis for axis in lockstep if axis in self.mesh)
        self._outcomes = outcomes or {}
        self._roofline = roofline
        self._origin: float | None = None
        self._hosts: list[_Task] = []
        self._working: deque[_Task] = deque()
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._sources: list[_Source] = []
        self._meetings: dict[tuple[str, str, tuple[int, ...]], list[_Meeting]] = defaultdict(list)
        self._met: dict[tuple[str, str, int], int] = defaultdict(int)
        self._segments: dict[int, tuple[Graph, tuple[int, ...], tuple[_Segment, ...]]] = {}
        self._followers: dict[int, list[int]] = defaultdict(list)
        for rank in range(world):
            self._followers[self._leader(rank)].append(rank)
        self._ids, self._launches = itertools.count(), itertools.count()
        # The last span on the processor, and whether the machine has slept since.
        self._last, self._last_s, self._slept = cast(int | None, None), 0.0, False

    # -- programs ----------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the run began; 0 before that."""
        return 0.0 if self._origin is None else time.perf_counter() - self._origin

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs one program on every rank (of those in lockstep: on the first) until all are done.

        Raises DeadlockError if something still waits when nothing can happen any more.
        """
        for rank in self._followers:
            machine = self.machines[rank]
            self.watch(f"program of rank {rank}", self.host(program(machine)))
        self._origin = time.perf_counter()
        with torch.inference_mode():
            self._work()
        stuck = [task.what() for task in (*self._hosts, *self._working)]
        if stuck:
            raise DeadlockError("nothing can happen any more, and these still wait: " + "; ".join(stuck))
        self.trace.spans[:] = sorted(map(self._floored, self.trace.spans), key=lambda s: (s.end_s, s.id))
        return self.trace

    def _floored(self, span: Span) -> Span:
        """A span with the least that its ops can take, looked up once the clock has stopped."""
        if span.state != "run":
            return span
        ops = tuple([PricedOp(o.op, o.price, self._roofline(o.op.bare).seconds) for o in span.ops])
        return replace(span, ops=ops)

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times (seconds, ascending): of a rank, or of those that `to` says
        for an item when it comes. An item that comes while the processor is busy is noticed later."""
        source = _Source(to, inbox, iter(arrivals))
        source.advance()
        self._sources.append(source)

    def watch(self, what: str, steps: _Steps) -> None:
        """Runs a host loop or a mark that has to come to its end."""
        self._hosts.append(_Task(lambda: what, steps))

    def host(self, program: Program) -> _Steps:
        """A program as steps: what it yields are waits, made by its machine."""
        result = None
        while True:
            try:
                wait = program.send(result)
            except StopIteration:
                return
            result = yield from wait

    def _work(self) -> None:
        while True:
            self._deliver()
            if self._go_on_hosts() or self._go_on_stream():
                continue
            if not self._hosts and not self._working:
                return
            due_s = min((task.need.until_s for task in self._hosts), default=inf)
            due_s = min([due_s, *(source.next[0] for source in self._sources if source.next)])
            if due_s == inf:
                return
            self._slept = True
            time.sleep(max(0.0, due_s - self.now()))

    def _deliver(self) -> None:
        """All items whose time has come, in its order."""
        while due := [s for s in self._sources if s.next is not None and s.next[0] <= self.now()]:
            source = min(due, key=lambda s: cast(tuple[float, object], s.next)[0])
            at_s, item = cast(tuple[float, object], source.next)
            if item != END:
                self.fed_s.append(at_s)
            if self._slept:
                # From here on the machine is busy with what has come, not with what it did before.
                self._last, self._slept = None, False
            ranks = (source.to,) if isinstance(source.to, int) else source.to(item)
            for rank in ranks:
                self.machines[rank].deliver(source.inbox, item, at_s)
            source.advance()
        if any(source.next is None for source in self._sources):
            self._sources = [source for source in self._sources if source.next is not None]

    def _go_on_hosts(self) -> bool:
        went_on = False
        for task in tuple(self._hosts):
            if task.need.ready() or self.now() >= task.need.until_s:
                went_on = True
                if not task.go_on():
                    self._hosts.remove(task)
        return went_on

    def _go_on_stream(self) -> bool:
        """The stream that waited longest goes on. Those that met others keep their places, so that all of
        them have written their flags before any of them does more."""
        task = next((task for task in self._working if task.need.ready()), None)
        if task is None:
            return False
        self._working.remove(task)
        if task.go_on():
            self._working.append(task)
        return True

    # -- launches ----------------------------------------------------------------------------------

    def submit(self, launch: _Launch) -> None:
        """Queues a launch; its stream works it off in order."""
        stream = self._streams.setdefault((launch.rank, launch.stream), _Stream(launch.rank, launch.stream))
        stream.queue.append(launch)
        if not stream.working:
            stream.working = True
            what = f"rank {stream.rank} stream {stream.name}: "
            self._working.append(_Task(lambda: what + stream.waiting_for, self._work_off(stream)))

    def _work_off(self, stream: _Stream) -> _Steps:
        while stream.queue:
            yield from self._execute(stream, stream.queue.popleft())
        stream.working = False

    def _execute(self, stream: _Stream, launch: _Launch) -> _Steps:
        of = f"launch {launch.id} of graph {launch.graph.name}"
        stream.waiting_for = f"{of} waits for launches before it"
        for ticket in launch.after:
            yield from ticket.done()
        end: Cause | None = None
        for replay in range(launch.repeat):
            yield _TURN
            if launch.ticket.stopped or (replay > 0 and launch.curtailed):
                break
            segments = self._cut(launch.graph, launch.sizes_at(replay))
            if launch.when is not None and not holds(launch.when, self.value_of):
                end = self._skip(launch, segments, replay)
                continue
            for signal in launch.signals:
                stream.waiting_for = f"{of} waits for signal {signal.name} of rank {signal.source}"
                yield from signal.done()
            met = False
            for segment in segments:
                if met:
                    yield _TURN
                # Streams take turns between replays, and where ranks met, so that all of them go on alike.
                met = segment.collective and len(self._members(launch.rank, segment.ops[0].axis)) > 1
                if segment.collective:
                    end = yield from self._meet(stream, launch, segment.ops[0], replay)
                else:
                    end = self._run(launch, segment, replay)
            launch.ticket.ran += 1
            self._write_flags(launch.sets)
        launch.ticket.end = end or self._cause()

    def _cut(self, graph: Graph, sizes: Mapping[str, int]) -> tuple[_Segment, ...]:
        """A graph at given sizes, cut where ranks meet; ranks that run the same one share it."""
        key = tuple(sizes[name] for name in sorted(graph.needs))
        found = self._segments.get(id(graph))
        if found is None or found[1] != key:
            # With the graph itself: one that is gone could leave its id to another one.
            found = self._segments[id(graph)] = graph, key, tuple(_segments(graph, sizes))
        return found[2]

    def _run(self, launch: _Launch, segment: _Segment, replay: int) -> Cause:
        """Local ops, on the rank of a launch and on all that are in lockstep with it."""
        return [self._run_on(r, launch, segment, replay) for r in self._followers[launch.rank]][-1]

    def _run_on(self, rank: int, launch: _Launch, segment: _Segment, replay: int) -> Cause:
        id_, state, cause = next(self._ids), self.states[rank], self._cause()
        start_s = end_s = begun_s = cause.at_s
        done_s, progress, ops = 0.0, [(start_s, 0.0)], []
        for i, op in enumerate(segment.ops):
            for unit in units(op):
                state.execute(unit)
            end_s = self.now()
            ops.append(_measured(op, end_s - begun_s))
            done_s += end_s - begun_s
            progress.append((end_s, done_s))
            begun_s = end_s
            for publication in segment.leaving.get(i, ()):
                self._put(rank, launch, publication, Cause(id_, end_s), replay)
                begun_s = self.now()
        times = (start_s, end_s)
        return self._record(id_, rank, launch, launch.stream, "run", times, cause, ops, progress, replay)

    def _put(self, rank: int, launch: _Launch, publication: Publication, cause: Cause, replay: int) -> None:
        put = publication.put
        start_s = self.now()
        to = layout.along(self.mesh, rank, put.axis, 1)
        self.states[rank].put(publication, self.states[to])
        end_s = self.now()
        times, ops = (start_s, end_s), [_measured(put, end_s - start_s)]
        progress = [(start_s, 0.0), (end_s, end_s - start_s)]
        id_ = next(self._ids)
        end = self._record(id_, rank, launch, "wire", "wire", times, cause, ops, progress, replay)
        self.signals.published[publication.signal, rank].append(end)

    def _skip(self, launch: _Launch, segments: Sequence[_Segment], replay: int) -> Cause:
        ends = []
        for rank in self._followers[launch.rank]:
            cause = self._cause()
            for unit in (u for segment in segments for op in segment.ops for u in units(op)):
                self.states[rank].skip(unit)
            times = (cause.at_s, self.now())
            progress = [(times[0], 0.0), (times[1], times[1] - times[0])]
            id_ = next(self._ids)
            ends.append(
                self._record(id_, rank, launch, launch.stream, "skipped", times, cause, [], progress, replay)
            )
        return ends[-1]

    # -- ranks that meet, flags ----------------------------------------------------------------------

    def _meet(self, stream: _Stream, launch: _Launch, op: Op, replay: int) -> _Steps:
        members = self._members(launch.rank, op.axis)
        meeting = self._meeting(op, stream, launch.rank, members)
        meeting.arrived[launch.rank] = launch, replay
        there = len(meeting.arrived)
        stream.waiting_for = f"{op.kind} {op.name}: {there} of {len(members)} ranks are there"
        if there == len(members):
            self._hold(meeting)
        else:
            yield _Need(lambda: bool(meeting.ends))
        return meeting.ends[launch.rank]

    def _members(self, rank: int, axis: str) -> tuple[int, ...]:
        return (rank,) if axis in self._lockstep else layout.members(self.mesh, rank, axis)

    def _meeting(self, op: Op, stream: _Stream, rank: int, members: tuple[int, ...]) -> _Meeting:
        """The n-th collective of a rank along an axis, on a stream, meets the n-th of each other rank."""
        size = self.mesh.get(op.axis, 1)
        if size != op.ranks:
            raise MismatchError(f"{op.kind} {op.name} is for {op.ranks} ranks; axis {op.axis!r} has {size}")
        turn = self._met[op.axis, stream.name, rank]
        self._met[op.axis, stream.name, rank] += 1
        meetings = self._meetings[op.axis, stream.name, members]
        if turn == len(meetings):
            meetings.append(_Meeting(op))
        other = meetings[turn].op
        if (other.kind, other.name, other.shape, other.dtype) != (op.kind, op.name, op.shape, op.dtype):
            raise MismatchError(
                f"rank {rank} comes to {op.kind} {op.name}, others are in {other.kind} {other.name}"
            )
        return meetings[turn]

    def _hold(self, meeting: _Meeting) -> None:
        """The last rank is there: each group of ranks along the axis does the collective."""
        leader_of = {r: leader for leader in meeting.arrived for r in self._followers[leader]}
        axis = meeting.op.axis
        for group in dict.fromkeys(layout.members(self.mesh, rank, axis) for rank in leader_of):
            cause, states, id_ = self._cause(), [self.states[rank] for rank in group], next(self._ids)
            for unit in units(meeting.op):
                if unit.ranks > 1:
                    states[0].meet(unit, states)
                else:
                    for state in states:
                        state.execute(unit)
            times = (cause.at_s, self.now())
            ops = [_measured(meeting.op, times[1] - times[0])]
            progress = [(times[0], 0.0), (times[1], times[1] - times[0])]
            for rank in group:
                launch, replay = meeting.arrived[leader_of[rank]]
                meeting.ends[leader_of[rank]] = self._record(
                    next(self._ids), rank, launch, launch.stream, "collective", times, cause, ops, progress,
                    replay, id_, group,
                )  # fmt: skip

    def _leader(self, rank: int) -> int:
        """The first of the ranks that are in lockstep with a rank."""
        for axis in self._lockstep:
            rank = layout.along(self.mesh, rank, axis, -layout.coordinate(self.mesh, rank, axis))
        return rank

    def value_of(self, flag: Flag) -> int:
        """What a flag holds now."""
        return self.flags.get(flag, 0)

    def _write_flags(self, sets: Mapping[Flag, Setting]) -> None:
        if sets:
            self.flags.update({flag: self._evaluate(setting) for flag, setting in sets.items()})

    def _evaluate(self, setting: Setting) -> int:
        if isinstance(setting, Condition):
            return int(holds(setting, self.value_of))
        if isinstance(setting, Verdict):
            return setting.yes if self._outcomes[setting.name](*setting.key) else setting.no
        return setting

    # -- records -----------------------------------------------------------------------------------

    def _cause(self) -> Cause:
        """Why something starts now: the processor had the last span until it ended, then the host."""
        return Cause(self._last, self.now(), host=True)

    def _record(
        self,
        id_: int,
        rank: int,
        launch: _Launch,
        stream: str,
        state: SpanState,
        times: tuple[float, float],
        cause: Cause,
        ops: Sequence[PricedOp],
        progress: Sequence[tuple[float, float]],
        replay: int,
        meeting: int | None = None,
        members: tuple[int, ...] = (),
    ) -> Cause:
        after = tuple(t.end.span for t in launch.after if t.end is not None and t.end.span is not None)
        span = Span(
            id_, launch.id, rank, stream, launch.graph.name, state, launch.issued_s, *times, cause, after,
            tuple(ops), tuple(progress), meeting, members, replay,
        )  # fmt: skip
        self.trace.spans.append(span)
        sources = self.trace.rows.sources
        sources["measured"] = sources.get("measured", 0.0) + sum(priced.price.seconds for priced in ops)
        if times[1] >= self._last_s:
            self._last, self._last_s, self._slept = id_, times[1], False
        return Cause(id_, times[1])

    def next_launch(self) -> int:
        """A number for the next launch."""
        return next(self._launches)


def _measured(op: Op, seconds: float) -> PricedOp:
    return PricedOp(op, Price(seconds, seconds, seconds, "measured", "wall clock"), 0.0)


def _segments(graph: Graph, sizes: Mapping[str, int]) -> Iterator[_Segment]:
    """The segments of a graph, in order; an empty graph is one without ops."""
    leaves: dict[int, list[Publication]] = defaultdict(list)
    for publication in graph.publishes:
        leaves[publication.op].append(publication)
    local: list[Op] = []
    leaving: dict[int, Sequence[Publication]] = {}
    for i, op in enumerate(op.at(sizes) for op in graph.ops):
        if op.ranks > 1:
            if local:
                yield _Segment(tuple(local), leaving=leaving)
            yield _Segment((op,), collective=True)
            local, leaving = [], {}
            continue
        if i in leaves:
            leaving[len(local)] = leaves[i]
        local.append(op)
    if local or not graph.ops:
        yield _Segment(tuple(local), leaving=leaving)


@dataclass(slots=True, eq=False)
class _Receiver:
    """A host that waits for an item; `item` once it has come."""

    item: tuple[Message, object] | None = None


class TorchMachine:
    """One rank of a TorchRun; implements `simcore.machine.Machine`."""

    def __init__(self, run: TorchRun, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.mesh: layout.Mesh = run.mesh
        self._run = run
        self._items: dict[str, deque[tuple[Message, object]]] = defaultdict(deque)
        self._receivers: dict[str, deque[_Receiver]] = defaultdict(deque)
        self._watched: dict[str, list[_Launch]] = defaultdict(list)

    def now(self) -> float:
        """Seconds since the run began."""
        return self._run.now()

    def along(self, axis: str, offset: int = 0) -> int:
        """The rank `offset` places further along `axis`, around the end."""
        return layout.along(self.mesh, self.rank, axis, offset)

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`."""
        return layout.coordinate(self.mesh, self.rank, axis)

    def launch(
        self,
        graph: Graph,
        *,
        stream: str = "main",
        after: Sequence[Ticket] = (),
        sizes: Mapping[str, int] | None = None,
        advance: Mapping[str, int] | None = None,
        repeat: int = 1,
        until: str | None = None,
        when: Condition | None = None,
        sets: Mapping[Flag, Setting] | None = None,
    ) -> Ticket:
        """Queues a graph; see Machine. Raises ValueError where a size is missing or repeat is below 1."""
        if repeat < 1:
            raise ValueError(f"graph {graph.name}: repeat is {repeat}; 1 is the least")
        given = {} if sizes is None else sizes
        if missing := graph.needs - given.keys():
            raise ValueError(
                f"graph {graph.name} needs sizes that its launch does not give: {sorted(missing)}"
            )
        if until is not None and self._items[until]:
            repeat = 1
        tickets = tuple([t for t in after if isinstance(t, TorchTicket)])
        signals = tuple([t for t in after if isinstance(t, _SignalTicket)])
        launch = _Launch(
            self._run.next_launch(), self.rank, stream, graph, self.now(), tickets, signals, given, advance,
            repeat, when, sets or {}, TorchTicket(),
        )  # fmt: skip
        if until is not None and repeat > 1:
            others = [other for other in self._watched[until] if other.ticket.end is None]
            self._watched[until] = [*others, launch]
        self._run.submit(launch)
        return launch.ticket

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """A flag of this rank or of another. Raises ValueError where the latter is given a value."""
        flag = Flag(name, self.rank if rank is None else rank)
        if flag.rank == self.rank:
            self._run.flags.setdefault(flag, initial)
        elif initial:
            raise ValueError(f"flag {name}: rank {self.rank} cannot say what rank {rank} begins with")
        return flag

    def signal(self, name: str, rank: int | None = None) -> Ticket:
        """The next publication of `name` by `rank` that this rank has not taken yet."""
        return _SignalTicket(self._run.signals, name, self.rank if rank is None else rank, self.rank)

    def wait(self, *tickets: Ticket) -> Wait:
        """Blocks the host until all tickets are done."""
        for ticket in tickets:
            yield from _done(ticket)

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """The host gets a flag's value once `after` is done."""
        yield from _done(after)
        return self._run.value_of(flag)

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """The next item of an inbox, or None after `timeout_s`."""
        if self._items[inbox]:
            return self._taken(self._items[inbox].popleft())
        receiver = _Receiver()
        self._receivers[inbox].append(receiver)
        until_s = inf if timeout_s is None else self.now() + timeout_s
        yield _Need(lambda: receiver.item is not None, until_s)
        if receiver.item is None:
            self._receivers[inbox].remove(receiver)
            return None
        return self._taken(receiver.item)

    def _taken(self, came: tuple[Message, object]) -> object:
        message, item = came
        message.received_s = self.now()
        return item

    def poll(self, inbox: str) -> list[Any]:
        """All items that have come and were not taken yet."""
        found = [self._taken(came) for came in self._items[inbox]]
        self._items[inbox].clear()
        return found

    def send(self, inbox: str, item: object, rank: int) -> None:
        """Puts an item into the inbox of a rank's host."""
        self._run.machines[rank].deliver(inbox, item, self.now())

    def deliver(self, inbox: str, item: object, at_s: float) -> None:
        """An item has come into an inbox of this rank at `at_s`."""
        message = Message(len(self._run.trace.messages), self.rank, inbox, at_s)
        self._run.trace.messages.append(message)
        if receivers := self._receivers[inbox]:
            receivers.popleft().item = message, item
        else:
            self._items[inbox].append((message, item))
        for launch in self._watched.pop(inbox, ()):
            launch.curtailed = True

    def spawn(self, program: Program) -> Ticket:
        """One more host loop, on the same host thread."""
        ticket, run = TorchTicket(), self._run

        def loop() -> _Steps:
            yield from run.host(program)
            ticket.ran = 1
            ticket.end = run._cause()

        run.watch(f"loop of rank {self.rank}", loop())
        return ticket

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """Notes when the host has come here and the tickets are done."""
        self._run.watch(f"mark {name!r} of rank {self.rank}", self._mark(name, after, self._run._cause()))

    def _mark(self, name: str, after: Sequence[Ticket], cause: Cause) -> _Steps:
        for ticket in after:
            end: Cause = yield from _done(ticket)
            cause = end if end.at_s > cause.at_s else cause
        self._run.trace.marks.append(Mark(self.rank, name, cause.at_s, cause))

    def gauge(self, name: str, value: float, limit: float) -> None:
        """Notes a level and its limit."""
        self._run.trace.gauges.append(Gauge(self.rank, name, self.now(), value, limit))


def _done(ticket: Ticket) -> _Steps:
    assert isinstance(ticket, TorchTicket | _SignalTicket)
    return ticket.done()
