"""The real machine on a CPU: the same programs as on the simulated one, with real tensors, on the wall clock.

    op i of a span takes  stamp i+1 - stamp i         0 s = the start of the run
    a span starts when    issued, stream free, tickets done, signals arrived, last rank there, processor free

A small cooperative scheduler: host programs (`machines.host`) go on while they can. Then, of the streams that
can go on, the stream that has waited longest runs a replay, or its part until the next collective with other
ranks. Otherwise the machine sleeps until the next arrival or timeout.

Streams and ranks run one after another on one processor: nothing overlaps, and the latency of a run is the
sum over all ranks (`ONE_AFTER_ANOTHER` says so in provenances). So the cause of a span is the span before it
on the processor, with the host busy in between. Each replay of a burst is a span of its own, because other
streams may run between two replays.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import cast

import torch

from simcore.machine import mesh as layout
from simcore.machine.machine import Condition, Flag, Machine, Program, Setting, Verdict, holds
from simcore.machine.trace import Cause, Mark, PricedOp, Span, Trace
from simcore.machine.trace import State as SpanState
from simcore.ops.op import Graph, Publication, Roofline
from simcore.sim.host import latest
from simcore.sim.simulation import WAITS_FOR_EARLIER, WAITS_FOR_SIGNAL, Outcomes, no_floor
from simcore.validate.machines.cuts import (
    CollectiveMatcher,
    Rendezvous,
    Segment,
    run_collective,
    segments,
    skip_ops,
    units,
)
from simcore.validate.machines.host import HostSide, mesh_of
from simcore.validate.machines.launches import (
    TURN,
    Device,
    Launch,
    Need,
    SignalTicket,
    Steps,
    Stream,
    Task,
    TorchTicket,
    measured,
)
from simcore.validate.machines.state import State

__all__ = ["ONE_AFTER_ANOTHER", "State", "TorchRun", "one_thread", "units"]

BY_CLOCK = "wall clock"
ONE_AFTER_ANOTHER = "streams and ranks ran one after another, on one thread"


def one_thread() -> None:
    """Makes torch compute on one thread: ops of small models are too short to be split, and if other
    processes use the cores, threads that wait for each other lose more than they gain, milliseconds an op."""
    torch.set_num_threads(1)


class TorchRun(Device):
    """All ranks of one real machine; the verbs of `simcore.sim.simulation.Simulation`.

    `states`: one a rank, in the order of `mesh` (left out: all along "tensor"). `outcomes`: by verdict name,
    the function that decides a key. `lockstep` names axes along which only the first rank's host runs the
    program; each of its launches runs on all ranks, as a driver's launches run on its workers. `roofline`:
    the least time of a local op here, for law 6. Items that are due after all programs and launches have
    ended do not arrive. Raises ValueError if there are not as many states as ranks.
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
        self.mesh = mesh_of(states, mesh)
        self.states = list(states)
        self.flags: dict[Flag, int] = {}
        self._host = host = HostSide(self, self.mesh, lockstep)
        self.trace, self.machines, self.fed_s = host.trace, host.machines, host.fed_s
        self.now, self.feed = host.now, host.feed
        # Publications by (name, rank), and how many of them each rank has taken.
        self._published: dict[tuple[str, int], list[Cause]] = defaultdict(list)
        self._taken: dict[tuple[str, int, int], int] = defaultdict(int)
        self._outcomes = outcomes or {}
        self._roofline = roofline
        self.working: list[Task] = []
        self._streams: dict[tuple[int, str], Stream] = {}
        self._collectives = CollectiveMatcher(self._host)
        self._segments: dict[int, tuple[Graph, tuple[int, ...], tuple[Segment, ...]]] = {}
        self._ids = itertools.count()
        # The last span on the processor, and its end.
        self._last, self._last_s = cast(int | None, None), 0.0

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs one program on every rank (of ranks in lockstep: on the first) until all are done.

        Raises DeadlockError if something still waits when nothing can happen any more.
        """
        with torch.inference_mode():
            self._host.run(program)
        self.trace.spans[:] = sorted(map(self._floored, self.trace.spans), key=lambda s: (s.end_s, s.id))
        return self.trace

    def _floored(self, span: Span) -> Span:
        """Returns a span with the least times of its ops, which are looked up after the run."""
        if span.state != "run":
            return span
        ops = tuple([PricedOp(o.op, o.price, self._roofline(o.op.without_place).seconds) for o in span.ops])
        return replace(span, ops=ops)

    # -- the interface for the host's side ------------------------------------------------------------

    def ticket(self) -> TorchTicket:
        """Makes a ticket for a launch."""
        return TorchTicket()

    def take(self, signal: SignalTicket) -> Steps:
        """Waits for the next publication that a rank has not taken; returns its end."""
        published = self._published[signal.name, signal.source]
        key = signal.name, signal.source, signal.waiter
        turn = self._taken[key]
        self._taken[key] += 1
        if len(published) <= turn:
            yield Need(lambda: len(published) > turn)
        return published[turn]

    def declare(self, flag: Flag, initial: int) -> None:
        """Declares a flag and its first value."""
        self.flags.setdefault(flag, initial)

    def value_of(self, flag: Flag) -> int:
        """Returns the present value of a flag."""
        return self.flags.get(flag, 0)

    def moment(self, rank: int) -> Cause:
        """Returns the present moment: the host has been busy since the last span ended."""
        del rank
        return Cause(self._last, self.now(), host=True)

    def mark(self, rank: int, name: str, since: Cause, ends: Sequence[Cause]) -> None:
        """Records a mark at the latest of these moments."""
        cause = reduce(latest, ends, since)
        self.trace.marks.append(Mark(rank, name, cause.at_s, cause))

    def woke(self) -> None:
        """Forgets the last span: it is not the cause of what runs after an arrival."""
        self._last = None

    # -- launches ----------------------------------------------------------------------------------

    def submit(self, launch: Launch) -> None:
        """Queues a launch; its stream executes its launches in order."""
        rank, name = launch.rank, launch.stream
        stream = self._streams.get((rank, name))
        if stream is None:
            stream = self._streams[rank, name] = Stream(rank, name, self._host.followers[rank])
        stream.queue.append(launch)
        if stream.task is None:
            self.working.append(stream.start(self._execute))

    def go_on(self) -> bool:
        """Advances the stream that has waited longest. Streams that met others keep their places, so that all
        of them have written their flags before any of them does more."""
        task = next((task for task in self.working if task.need.ready()), None)
        if task is None:
            return False
        self.working.remove(task)
        if task.go_on():
            self.working.append(task)
        return True

    def _execute(self, stream: Stream, launch: Launch) -> Steps:
        stream.waiting_for = WAITS_FOR_EARLIER, launch
        for ticket in launch.after:
            yield from ticket.done()
        end: Cause | None = None
        for replay in range(launch.repeat):
            yield TURN
            if launch.ticket.stopped or (replay > 0 and launch.curtailed):
                break
            found = self._cut(launch.graph, launch.sizes_at(replay))
            if launch.when is not None and not holds(launch.when, self.value_of):
                end = [self._skip_on(rank, launch, found, replay) for rank in stream.lanes][-1]
                continue
            for signal in launch.signals:
                stream.waiting_for = WAITS_FOR_SIGNAL, launch, signal
                yield from signal.done()
            for rank in stream.lanes:
                self.states[rank].begin(launch.batch, launch.sizes_at(replay), replay)
            after_collective = False
            for segment in found:
                if after_collective:
                    yield TURN
                # Turns come between replays and after collectives with others: all ranks there go on alike.
                after_collective = segment.collective and self._collectives.joins(launch.rank, segment.ops[0])
                if segment.collective:
                    brings = launch, replay
                    end = yield from self._collectives.meet(segment.ops[0], stream, brings, self._hold)
                else:
                    end = [self._run_on(rank, launch, segment, replay) for rank in stream.lanes][-1]
            launch.ticket.ran += 1
            self._write_flags(launch.sets)
        launch.ticket.end = end or self.moment(launch.rank)

    def _cut(self, graph: Graph, sizes: Mapping[str, int]) -> tuple[Segment, ...]:
        """Returns the segments of a graph at given sizes; ranks that run the same graph share them."""
        key = tuple(sizes[name] for name in sorted(graph.needs))
        found = self._segments.get(id(graph))
        if found is None or found[1] != key:
            # Kept with the graph: otherwise another graph could get its id.
            found = self._segments[id(graph)] = graph, key, tuple(segments(graph, sizes))
        return found[2]

    def _run_on(self, rank: int, launch: Launch, segment: Segment, replay: int) -> Cause:
        """Runs local ops, on the rank of a launch or on a rank in lockstep with it."""
        id_, state, cause = next(self._ids), self.states[rank], self.moment(rank)
        start_s = end_s = begun_s = cause.at_s
        done_s, progress, ops = 0.0, [(start_s, 0.0)], []
        for i, op in enumerate(segment.ops):
            for unit in units(op):
                state.execute(unit)
            end_s = self.now()
            ops.append(measured(op, end_s - begun_s, BY_CLOCK))
            done_s += end_s - begun_s
            progress.append((end_s, done_s))
            begun_s = end_s
            for publication in segment.leaving.get(i, ()):
                self._put(rank, launch, publication, Cause(id_, end_s), replay)
                begun_s = self.now()
        times = start_s, end_s
        return self._record(rank, launch, replay, "run", cause, times, ops, id_=id_, progress=tuple(progress))

    def _put(self, rank: int, launch: Launch, publication: Publication, cause: Cause, replay: int) -> None:
        put = publication.put
        start_s = self.now()
        to = layout.along(self.mesh, rank, put.axis, 1)
        self.states[rank].put(publication, self.states[to])
        times = start_s, self.now()
        ops = [measured(put, times[1] - start_s, BY_CLOCK)]
        end = self._record(rank, launch, replay, "wire", cause, times, ops)
        self._published[publication.signal, rank].append(end)

    def _skip_on(self, rank: int, launch: Launch, found: Sequence[Segment], replay: int) -> Cause:
        cause = self.moment(rank)
        skip_ops(self.states[rank], (op for segment in found for op in segment.ops))
        return self._record(rank, launch, replay, "skipped", cause, (cause.at_s, self.now()), [])

    # -- ranks that meet, flags ----------------------------------------------------------------------

    def _hold(self, rendezvous: Rendezvous) -> None:
        """Runs the collective of each group of ranks along the axis; the last rank has arrived."""
        for group, leader_of in self._collectives.groups(rendezvous):
            cause, states, id_ = self.moment(0), [self.states[rank] for rank in group], next(self._ids)
            run_collective(states, rendezvous.op)
            times = cause.at_s, self.now()
            ops = [measured(rendezvous.op, times[1] - times[0], BY_CLOCK)]
            for rank in group:
                launch, replay = rendezvous.arrived[leader_of[rank]]
                rendezvous.ends[leader_of[rank]] = self._record(
                    rank, launch, replay, "collective", cause, times, ops, collective_id=id_, members=group
                )

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
        rank: int,
        launch: Launch,
        replay: int,
        state: SpanState,
        cause: Cause,
        times: tuple[float, float],
        ops: Sequence[PricedOp],
        *,
        id_: int | None = None,
        progress: tuple[tuple[float, float], ...] = (),
        collective_id: int | None = None,
        members: tuple[int, ...] = (),
    ) -> Cause:
        """Appends a span and returns its end; without `progress` its work is done at one rate."""
        id_ = next(self._ids) if id_ is None else id_
        after = tuple(t.end.span for t in launch.after if t.end is not None and t.end.span is not None)
        span = Span(
            id_, launch.id, rank, "wire" if state == "wire" else launch.stream, launch.graph.name, state,
            launch.issued_s, *times, cause, after, tuple(ops),
            progress or ((times[0], 0.0), (times[1], times[1] - times[0])), collective_id, members, replay,
        )  # fmt: skip
        self.trace.spans.append(span)
        sources = self.trace.rows.sources
        sources["measured"] = sources.get("measured", 0.0) + sum(priced.price.seconds for priced in ops)
        if times[1] >= self._last_s:
            self._last, self._last_s, self._host.slept = id_, times[1], False
        return Cause(id_, times[1])
