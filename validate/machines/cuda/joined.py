"""Queues the launches of ranks that meet by kernels: what a host gives before it waits goes as one graph.

    kept -> (a wait, a mark, another sequence) -> sent to a thread a lane -> queued on all lanes -> its end

Threads, because a graph of many kernels holds up whoever queues it, for a while, or until its card has room;
and the ranks of other cards wait meanwhile. What is captured anew is queued by the host itself, with nothing
else on the way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from simcore.ops.op import Graph
from simcore.sim.simulation import Outcomes
from simcore.validate.machines.cuda.memory import Memory
from simcore.validate.machines.cuda.parts import RankStream
from simcore.validate.machines.cuda.records import Record
from simcore.validate.machines.cuda.sequences import SequencePlan, nodes, runs_of, sequence_plan, sizes_of
from simcore.validate.machines.cuda.stages import StageQueue
from simcore.validate.machines.launches import Launch, Stream

SEQUENCE = "sequence"


class _Sent(NamedTuple):
    """A sequence on its way: what queues it on lanes, its launches, and the records of lanes."""

    queueing: list[Future[float]]
    launches: Sequence[Launch]
    records: list[Record]


@dataclass(eq=False)
class JoinedQueue:
    """The sequences of one run. `known`: plans of earlier sequences, by their beginning; `same`: returns the
    graph that stands for its equals; `stream_of`: the stream of a rank; `make_ready`: makes a lane ready for
    a launch at some sizes; `records`: where records go, numbered by `ids`."""

    memories: Sequence[Memory]
    stages: StageQueue
    known: dict[Any, list[SequencePlan]]
    same: Callable[[Graph], Graph]
    outcomes: Outcomes
    now: Callable[[], float]
    stream_of: Callable[[int, str], Stream]
    make_ready: Callable[[RankStream, Launch, Mapping[str, int]], None]
    records: list[Record]
    ids: Iterator[int]
    _kept: dict[int, list[Launch]] = field(default_factory=dict)
    _sent: list[_Sent] = field(default_factory=list)

    @property
    def is_busy(self) -> bool:
        """Whether sequences are on their way."""
        return bool(self._sent)

    def keep(self, launch: Launch) -> None:
        """Keeps a launch until its host waits or begins another sequence."""
        self._kept.setdefault(launch.rank, []).append(launch)

    def go_on(self) -> bool:
        """Sends what is kept, and finishes what is queued. Returns whether there was any."""
        went_on = self._finish() or bool(self._kept)
        for rank in tuple(self._kept):
            self.settle(rank)
        return went_on

    def settle(self, rank: int) -> None:
        """Sends what the host of a rank has given since it waited last."""
        for launches in runs_of(self._kept.pop(rank, ())):
            begun_s = self.now()
            self._send(launches)
            launches[0].took_s += self.now() - begun_s

    def wait(self) -> None:
        """Waits until all that is sent is queued, or has failed."""
        for sent in self._sent:
            wait(sent.queueing)

    def _send(self, launches: Sequence[Launch]) -> None:
        """Sends launches to the lanes of all ranks in lockstep."""
        first, sizes = launches[0], sizes_of(launches)
        stream = self.stream_of(first.rank, first.stream)
        plan = self._plan(stream, launches, sizes)
        verdicts = [bool(self.outcomes[x.name](*x.key)) for x in plan.verdicts_of(launches)]
        sent = _Sent([], launches, [])
        known = [self.stages.captured(lane, plan.plan, SEQUENCE, [lane.state]) for lane in stream.lanes]
        if None in known:
            self.wait()
            self._finish()
        for lane, captured in zip(stream.lanes, known, strict=True):
            record = self._record(lane, launches, plan, sizes, verdicts)
            sent.records.append(record)
            if captured is None:
                self._queue(lane, record, partial(self._capture, lane, plan))
                continue
            replay, key = captured
            lane.state.restore(key)
            queue = partial(self._queue, lane, record, partial(self.stages.api.run, lane.stream, replay))
            if None in known:
                queue()
            else:
                sent.queueing.append(self.stages.api.aside(lane.stream).submit(queue))
        self.records += sent.records
        self._sent.append(sent)

    def _record(
        self,
        lane: RankStream,
        launches: Sequence[Launch],
        plan: SequencePlan,
        sizes: Mapping[str, int],
        verdicts: list[bool],
    ) -> Record:
        """Gives a lane its verdicts and takes places of its log; returns the record of the sequence there."""
        first = launches[0]
        log = self.memories[lane.rank].log(lane.rank, lane.name)
        gates = plan.gates_from(log, log.reserve_entries(plan.gates))
        log.give(verdicts)
        if lane.rank == first.rank:
            for launch, gate in zip(launches, gates, strict=True):
                launch.ticket.gates += [gate] if gate is not None else []
        own = {id(launch.ticket) for launch in launches}
        waited = tuple([x for launch in launches for x in launch.after if id(x) not in own])
        return Record(
            next(self.ids), first, lane.rank, first.stream, "run", 0, 0, len(plan.parts[0].ops), sizes,
            0.0, 0.0, None, waited=waited,
            gate=gates[0] if len(gates) == 1 else None,
            parts=tuple([(part.graph, gate) for part, gate in zip(plan.parts, gates, strict=True)]),
        )  # fmt: skip

    def _capture(self, lane: RankStream, plan: SequencePlan) -> None:
        memory = self.memories[lane.rank]
        log = memory.log(lane.rank, lane.name)
        made = partial(nodes, self.stages.api, memory, log, lane, plan)
        self.stages.queue(lane, plan.plan, SEQUENCE, [lane.state], made, plan.ops)

    def _queue(self, lane: RankStream, record: Record, queue: Callable[[], object]) -> float:
        """Queues a sequence on one lane. Returns the seconds of that."""
        api = self.stages.api
        with torch.inference_mode():
            record.queued_from_s, record.earlier = self.now(), lane.last
            self.make_ready(lane, record.launch, record.sizes)
            record.before = api.record(lane.stream)
            queue()
            record.queued_at_s = self.now()
            record.after = lane.tail = api.record(lane.stream)
            lane.last = record
            return self.now() - record.queued_from_s

    def _finish(self) -> bool:
        """Finishes launches that are queued on all their lanes. Returns whether there were any. Raises what
        a thread has raised, though others may still be held up by that."""
        for sent in self._sent:
            for each in sent.queueing:
                if each.done():
                    each.result()
        ended = [sent for sent in self._sent if all(each.done() for each in sent.queueing)]
        for sent in ended:
            # A launch takes as long as that of its first rank; that of another may have failed meanwhile.
            took_s = [each.result() for each in sent.queueing]
            sent.launches[0].took_s += sum(took_s[:1])
            for launch in sent.launches:
                launch.ticket.replays += 1
                launch.ticket.queued(sent.records)
            self._sent.remove(sent)
        return bool(ended)

    def _plan(self, stream: Stream, launches: Sequence[Launch], sizes: Mapping[str, int]) -> SequencePlan:
        first, state = launches[0], stream.lanes[0].state
        plans = self.known[first.rank, first.stream, id(self.same(first.graph)), len(launches)]
        found = next((plan for plan in plans if plan.fits(launches, sizes)), None)
        if found is None:
            found = sequence_plan(launches, sizes, self.same, state, self.stages.mesh)
            plans.append(found)
        return found
