"""Queues the stages of launches on a card: a stage runs and is captured the first time, then it is replayed.

A captured stage depends on the addresses of its tensors and on the keys of its ranks' states on the host
(`CardState.key`); the key after it is kept with it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from simcore.kernels.streams import gated, one_stream
from simcore.machine import mesh as layout
from simcore.ops.op import Op, Publication
from simcore.validate.machines.cuda.cuda_api import CudaApi
from simcore.validate.machines.cuda.memory import Memory, StreamLog
from simcore.validate.machines.cuda.parts import RankStream
from simcore.validate.machines.cuda.plan import Plan, Stage
from simcore.validate.machines.cuts import run_collective, skip_ops, units
from simcore.validate.machines.launches import Launch, Stream

# Makes the calls that are captured one after another; called only for stages not yet captured.
Nodes = Callable[[], list[Callable[[], object]]]


class StageQueue:
    """Queues stages. `max_polls`: how often a launch looks for its signal before it gives up; `captures`: how
    many stages were captured."""

    def __init__(
        self, api: CudaApi, memory: Memory, mesh: layout.Mesh, states: Sequence[Any], max_polls: int
    ) -> None:
        self.api, self.memory, self.mesh, self.states, self.max_polls = api, memory, mesh, states, max_polls
        self.captures = 0

    def queue(
        self,
        lane: RankStream,
        plan: Plan,
        which: Hashable,
        states: Sequence[Any],
        nodes: Nodes,
        ops: Sequence[Op],
    ) -> None:
        """Replays a stage, or runs and captures it if it has not been captured."""
        keys = tuple([state.key() for state in states])
        if plan.changes:
            self.api.run(lane.stream, _call(lane, states, keys, nodes()))
            skip_ops(states[0], ops)
            return
        found = plan.captured.get(_place(lane, plan, which, keys))
        if found is None:
            self.api.run(lane.stream, _call(lane, states, keys, nodes()))
            found = self.capture(lane, plan, which, states, nodes, ops)
        else:
            self.api.run(lane.stream, found[0])
        if states:
            states[0].restore(found[1])

    def captured(
        self, lane: RankStream, plan: Plan, which: Hashable, states: Sequence[Any]
    ) -> tuple[Callable[[], object], Hashable] | None:
        """Returns the replay of a stage and the first state's key after it, if the stage is captured."""
        return plan.captured.get(_place(lane, plan, which, tuple([state.key() for state in states])))

    def capture(
        self,
        lane: RankStream,
        plan: Plan,
        which: Hashable,
        states: Sequence[Any],
        nodes: Nodes,
        ops: Sequence[Op],
    ) -> tuple[Callable[[], object], Hashable]:
        """Returns the replay of a stage and the first state's key after its ops; captures it only once."""
        keys = tuple([state.key() for state in states])
        key = _place(lane, plan, which, keys)
        if key not in plan.captured:
            made = nodes()
            replay: Callable[[], object] = _nothing
            if made:
                # torch warns of a graph without nodes.
                replay = self.api.captured(lane.stream, _call(lane, states, keys, made))
                self.captures += 1
            plan.captured[key] = replay, None
            if states:
                skip_ops(states[0], ops)
                plan.captured[key] = replay, states[0].key()
                states[0].restore(keys[0])
        return plan.captured[key]

    def nodes(
        self, lane: RankStream, launch: Launch, log: StreamLog | None, plan: Plan, stage: Stage
    ) -> list[Callable[[], object]]:
        """Returns the calls that launch a local stage, in order."""
        nodes = self.head(lane, log, plan, launch) if stage.gates and log is not None else []
        gate = log.memory.gate if log is not None and plan.gated else None
        if stage.publication is not None:
            nodes.append(partial(self._put, lane, stage.publication, gate))
        if stage.ops:
            nodes.append(partial(executed, lane.state, stage.ops, gate))
        if stage.writes_flags and log is not None:
            nodes.append(self.write_flags(log, plan))
        return nodes

    def head(
        self, lane: RankStream, log: StreamLog, plan: Plan, launch: Launch | None
    ) -> list[Callable[[], object]]:
        """Returns the calls that launch the gate and the waits for signals behind it."""
        memory, verbs, count = self.memory, self.api.verbs, len(plan.signals)
        when = None if launch is None else launch.when
        nodes: list[Callable[[], object]] = [
            partial(verbs.gate, memory.flags, log.memory, memory.slots, when, count)
        ]
        for i, (name, source, code) in enumerate(plan.signals):
            published = memory.counter("published", name, source)
            taken = memory.counter("taken", name, source, lane.rank)
            nodes.append(
                partial(
                    verbs.take, published, taken, log.memory, memory.error,
                    back=count - i, code=code, most=self.max_polls,
                )
            )  # fmt: skip
        return nodes

    def write_flags(self, log: StreamLog, plan: Plan) -> Callable[[], object]:
        """Returns the call that writes the flags of a launch."""
        memory, verbs = self.memory, self.api.verbs
        return partial(
            verbs.write_flags, memory.flags, memory.seen, log.memory, plan.settings, gated=plan.gated
        )

    def _put(self, lane: RankStream, publication: Publication, gate: Tensor | None) -> None:
        other = layout.along(self.mesh, lane.rank, publication.put.axis, 1)
        with gated(gate):
            lane.state.put(publication, self.states[other])
        self.api.verbs.publish(self.memory.counter("published", publication.signal, lane.rank), gate)

    def alone(self, stream: Stream, plan: Plan, which: Hashable, nodes: Nodes) -> None:
        """Queues nodes on the first rank's lane only. It waits for the lanes in lockstep, and they for it:
        flags are written after all work, and the shared gate not before all of them have read it."""
        leader, others = stream.lanes[0], stream.lanes[1:]
        for lane in others:
            if lane.tail is not None:
                self.api.wait(leader.stream, lane.tail)
        self.queue(leader, plan, which, (), nodes, ())
        event = leader.tail = self.api.record(leader.stream)
        for lane in others:
            self.api.wait(lane.stream, event)
            lane.tail = event


def _call(
    lane: RankStream, states: Sequence[Any], keys: Sequence[Hashable], nodes: Sequence[Callable[[], object]]
) -> Callable[[], None]:
    """Returns the call that runs nodes on a lane's stream, with states at these keys."""

    def call() -> None:
        with _as(states, keys), one_stream(lane.buffers):
            for node in nodes:
                node()

    return call


def _place(lane: RankStream, plan: Plan, which: Hashable, keys: tuple[Hashable, ...]) -> Hashable:
    """Returns where a plan keeps the capture of a stage of a lane, with states at these keys."""
    return which, lane.rank, plan.home or lane.name, keys


def keys_after(lane: RankStream, plan: Plan) -> list[Hashable]:
    """Returns the keys of a lane's state after each stage of a plain plan, from its present key on, as far as
    the stages are captured with them."""
    found, key = list[Hashable](), lane.state.key()
    for stage in plan.stages:
        captured = plan.captured.get(_place(lane, plan, stage.index, (key,)))
        if captured is None:
            break
        _, key = captured
        found.append(key)
    return found


def _nothing() -> None:
    """The replay of a stage without nodes."""


def fill(tensor: Tensor, value: int) -> None:
    """Writes a number into all elements of a tensor."""
    tensor.fill_(value)


def executed(state: Any, ops: Sequence[Op], gate: Tensor | None) -> None:
    """Runs ops on a state, behind a gate."""
    with gated(gate):
        state.execute_all([unit for op in ops for unit in units(op)])


def run_collective_behind(gate: Tensor | None, states: Sequence[Any], op: Op) -> None:
    """Runs a collective of the states of a group, behind a gate."""
    with gated(gate):
        run_collective(states, op)


@contextmanager
def _as(states: Sequence[Any], keys: Sequence[Hashable]) -> Iterator[None]:
    """Sets states to these keys inside, and back to their present keys afterwards."""
    now = [state.key() for state in states]
    for state, key in zip(states, keys, strict=True):
        state.restore(key)
    try:
        yield
    finally:
        for state, key in zip(states, now, strict=True):
            state.restore(key)
