"""The real machine on a CPU: the same programs as on the simulated one, with real tensors, on the wall clock.

    op i of a span takes  stamp i+1 - stamp i         0 s = the start of the run
    a span starts when    issued, stream free, tickets done, signals come, last rank there, processor free

A small cooperative scheduler: host programs (`host_side`) go on while they can, then of the streams that can
go on the one that waited longest does a replay, or as much of one as stands before the next meeting with
other ranks, else the machine sleeps until the next arrival or timeout.

Streams and ranks run one after another on the one processor: nothing overlaps here, and the latency of a
run is the sum of what all ranks do (`ONE_AFTER_ANOTHER` says so for provenances). What a span waited for
last is therefore the span before it on the processor, with the host busy in between; its cause says that.
Each replay of a burst is a span of its own, for other streams may run between two of them.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

import torch

from simcore.machine import mesh as layout
from simcore.machine.machine import Condition, Flag, Machine, Program, Setting, Verdict, holds
from simcore.machine.trace import Cause, Mark, PricedOp, Span, Trace
from simcore.machine.trace import State as SpanState
from simcore.ops.op import Graph, Op, Price, Publication, Roofline
from simcore.sim.simulation import Outcomes, Route, no_floor
from simcore.validate.machines.cuts import Meeting, Meetings, Segment, segments, units
from simcore.validate.machines.host import HostSide
from simcore.validate.machines.launches import (
    TURN,
    Launch,
    Need,
    SignalTicket,
    State,
    Steps,
    Task,
    TorchTicket,
)

__all__ = ["ONE_AFTER_ANOTHER", "State", "TorchRun", "one_thread", "units"]

ONE_AFTER_ANOTHER = "streams and ranks ran one after another, on one thread"


def one_thread() -> None:
    """Lets torch compute on one thread: ops of small models are too short to be shared out, and where others
    want the cores, threads that wait for each other cost more than they save, by milliseconds an op."""
    torch.set_num_threads(1)


@dataclass(slots=True)
class _Signals:
    """Publications by (name, rank), and how many of them each rank has taken."""

    published: dict[tuple[str, int], list[Cause]] = field(default_factory=lambda: defaultdict(list))
    taken: dict[tuple[str, int, int], int] = field(default_factory=lambda: defaultdict(int))

    def take(self, name: str, source: int, waiter: int) -> Steps:
        """Waits for the next publication that `waiter` has not taken."""
        turn = self.taken[name, source, waiter]
        self.taken[name, source, waiter] += 1
        published = self.published[name, source]
        if len(published) <= turn:
            yield Need(lambda: len(published) > turn)
        return published[turn]


@dataclass(slots=True, eq=False)
class _Stream:
    rank: int
    name: str
    queue: deque[Launch] = field(default_factory=deque)
    working: bool = False
    waiting_for: str = ""


class TorchRun:
    """All ranks of one real machine; the verbs of `simcore.sim.simulation.Simulation`.

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
        self.flags: dict[Flag, int] = {}
        self._host = HostSide(self, self.mesh, world, lockstep)
        self.trace, self.machines, self.fed_s = self._host.trace, self._host.machines, self._host.fed_s
        self._signals = _Signals()
        self._outcomes = outcomes or {}
        self._roofline = roofline
        self._working: deque[Task] = deque()
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._meetings = Meetings(self._host)
        self._segments: dict[int, tuple[Graph, tuple[int, ...], tuple[Segment, ...]]] = {}
        self._ids = itertools.count()
        # The last span on the processor.
        self._last, self._last_s = cast(int | None, None), 0.0

    def now(self) -> float:
        """Seconds since the run began; 0 before that."""
        return self._host.now()

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs one program on every rank (of those in lockstep: on the first) until all are done.

        Raises DeadlockError if something still waits when nothing can happen any more.
        """
        with torch.inference_mode():
            self._host.run(program)
        self.trace.spans[:] = sorted(map(self._floored, self.trace.spans), key=lambda s: (s.end_s, s.id))
        return self.trace

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times; see `HostSide.feed`."""
        self._host.feed(to, inbox, arrivals)

    def _floored(self, span: Span) -> Span:
        """A span with the least that its ops can take, looked up once the clock has stopped."""
        if span.state != "run":
            return span
        ops = tuple([PricedOp(o.op, o.price, self._roofline(o.op.bare).seconds) for o in span.ops])
        return replace(span, ops=ops)

    # -- what the host's side asks of it --------------------------------------------------------------

    def ticket(self) -> TorchTicket:
        """A ticket for a launch."""
        return TorchTicket()

    def take(self, signal: SignalTicket) -> Steps:
        """Waits for the next publication that a rank has not taken."""
        return self._signals.take(signal.name, signal.source, signal.waiter)

    def waiting(self) -> list[str]:
        """What the streams wait for that have work."""
        return [task.what() for task in self._working]

    def under_way(self) -> bool:
        """Nothing is: what runs has ended when it returns."""
        return False

    def declare(self, flag: Flag, initial: int) -> None:
        """A flag, and what it holds at first."""
        self.flags.setdefault(flag, initial)

    def value_of(self, flag: Flag) -> int:
        """What a flag holds now."""
        return self.flags.get(flag, 0)

    def moment(self, rank: int) -> Cause:
        """Now: the processor had the last span until it ended, then the host."""
        del rank
        return Cause(self._last, self.now(), host=True)

    def waited(self, rank: int, ends: Sequence[Cause]) -> None:
        """Nothing: what comes next on the processor is caused by what was there before."""

    def mark(self, rank: int, name: str, since: Cause, ends: Sequence[Cause]) -> None:
        """Notes a mark at the latest of these."""
        cause = since
        for end in ends:
            cause = end if end.at_s > cause.at_s else cause
        self.trace.marks.append(Mark(rank, name, cause.at_s, cause))

    def woke(self) -> None:
        """From here on the machine is busy with what has come, not with what it did before."""
        self._last = None

    # -- launches ----------------------------------------------------------------------------------

    def submit(self, launch: Launch) -> None:
        """Queues a launch; its stream works it off in order."""
        stream = self._streams.setdefault((launch.rank, launch.stream), _Stream(launch.rank, launch.stream))
        stream.queue.append(launch)
        if not stream.working:
            stream.working = True
            what = f"rank {stream.rank} stream {stream.name}: "
            self._working.append(Task(lambda: what + stream.waiting_for, self._work_off(stream)))

    def go_on(self) -> bool:
        """The stream that waited longest goes on. Those that met others keep their places, so that all of
        them have written their flags before any of them does more."""
        task = next((task for task in self._working if task.need.ready()), None)
        if task is None:
            return False
        self._working.remove(task)
        if task.go_on():
            self._working.append(task)
        return True

    def _work_off(self, stream: _Stream) -> Steps:
        while stream.queue:
            yield from self._execute(stream, stream.queue.popleft())
        stream.working = False

    def _execute(self, stream: _Stream, launch: Launch) -> Steps:
        of = f"launch {launch.id} of graph {launch.graph.name}"
        stream.waiting_for = f"{of} waits for launches before it"
        for ticket in launch.after:
            yield from ticket.done()
        end: Cause | None = None
        for replay in range(launch.repeat):
            yield TURN
            if launch.ticket.stopped or (replay > 0 and launch.curtailed):
                break
            found = self._cut(launch.graph, launch.sizes_at(replay))
            if launch.when is not None and not holds(launch.when, self.value_of):
                end = self._skip(launch, found, replay)
                continue
            for signal in launch.signals:
                stream.waiting_for = f"{of} waits for signal {signal.name} of rank {signal.source}"
                yield from signal.done()
            met = False
            for segment in found:
                if met:
                    yield TURN
                # Streams take turns between replays, and where ranks met, so that all of them go on alike.
                met = segment.collective and len(self._meetings.members(launch.rank, segment.ops[0].axis)) > 1
                if segment.collective:
                    end = yield from self._meet(stream, launch, segment.ops[0], replay)
                else:
                    end = self._run(launch, segment, replay)
            launch.ticket.ran += 1
            self._write_flags(launch.sets)
        launch.ticket.end = end or self.moment(launch.rank)

    def _cut(self, graph: Graph, sizes: Mapping[str, int]) -> tuple[Segment, ...]:
        """A graph at given sizes, cut where ranks meet; ranks that run the same one share it."""
        key = tuple(sizes[name] for name in sorted(graph.needs))
        found = self._segments.get(id(graph))
        if found is None or found[1] != key:
            # With the graph itself: one that is gone could leave its id to another one.
            found = self._segments[id(graph)] = graph, key, tuple(segments(graph, sizes))
        return found[2]

    def _run(self, launch: Launch, segment: Segment, replay: int) -> Cause:
        """Local ops, on the rank of a launch and on all that are in lockstep with it."""
        return [self._run_on(r, launch, segment, replay) for r in self._host.followers[launch.rank]][-1]

    def _run_on(self, rank: int, launch: Launch, segment: Segment, replay: int) -> Cause:
        id_, state, cause = next(self._ids), self.states[rank], self.moment(rank)
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

    def _put(self, rank: int, launch: Launch, publication: Publication, cause: Cause, replay: int) -> None:
        put = publication.put
        start_s = self.now()
        to = layout.along(self.mesh, rank, put.axis, 1)
        self.states[rank].put(publication, self.states[to])
        end_s = self.now()
        times, ops = (start_s, end_s), [_measured(put, end_s - start_s)]
        progress = [(start_s, 0.0), (end_s, end_s - start_s)]
        id_ = next(self._ids)
        end = self._record(id_, rank, launch, "wire", "wire", times, cause, ops, progress, replay)
        self._signals.published[publication.signal, rank].append(end)

    def _skip(self, launch: Launch, found: Sequence[Segment], replay: int) -> Cause:
        ends = []
        for rank in self._host.followers[launch.rank]:
            cause = self.moment(rank)
            for unit in (u for segment in found for op in segment.ops for u in units(op)):
                self.states[rank].skip(unit)
            times = (cause.at_s, self.now())
            progress = [(times[0], 0.0), (times[1], times[1] - times[0])]
            id_ = next(self._ids)
            ends.append(
                self._record(id_, rank, launch, launch.stream, "skipped", times, cause, [], progress, replay)
            )
        return ends[-1]

    # -- ranks that meet, flags ----------------------------------------------------------------------

    def _meet(self, stream: _Stream, launch: Launch, op: Op, replay: int) -> Steps:
        meeting = self._meetings.next(op, stream.name, launch.rank)
        meeting.arrived[launch.rank] = launch, replay
        there = len(meeting.arrived)
        stream.waiting_for = f"{op.kind} {op.name}: {there} of {len(meeting.members)} ranks are there"
        if meeting.is_full:
            self._hold(meeting)
        else:
            yield Need(lambda: bool(meeting.ends))
        return meeting.ends[launch.rank]

    def _hold(self, meeting: Meeting) -> None:
        """The last rank is there: each group of ranks along the axis does the collective."""
        for group, leader_of in self._meetings.groups(meeting):
            cause, states, id_ = self.moment(0), [self.states[rank] for rank in group], next(self._ids)
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

    def _record(
        self,
        id_: int,
        rank: int,
        launch: Launch,
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
            self._last, self._last_s, self._host.slept = id_, times[1], False
        return Cause(id_, times[1])


def _measured(op: Op, seconds: float) -> PricedOp:
    return PricedOp(op, Price(seconds, seconds, seconds, "measured", "wall clock"), 0.0)
