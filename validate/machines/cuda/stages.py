"""Stages of launches on their way to a card: run and captured where they come first, then replayed.

What a stage is captured with is where its tensors lie and what the states of its ranks go by on the host
(`CardState.key`); what it leaves them at is noted with it.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from simcore.kernels.streams import gated, one_stream
from simcore.machine import mesh as layout
from simcore.ops.op import Op, Publication
from simcore.validate.machines.cuda.layer import Layer
from simcore.validate.machines.cuda.memory import Memory, Notes
from simcore.validate.machines.cuda.parts import Lane
from simcore.validate.machines.cuda.plan import Plan, Stage
from simcore.validate.machines.cuts import met, skipped, units
from simcore.validate.machines.launches import Launch, Stream

# What is captured one after the other, made only where it has not been captured.
Nodes = Callable[[], list[Callable[[], object]]]


class StageQueue:
    """Queues stages. `looks`: how often a launch looks for its signal before it gives up; `captures` counts
    the stages that were captured."""

    def __init__(
        self, layer: Layer, memory: Memory, mesh: layout.Mesh, states: Sequence[Any], looks: int
    ) -> None:
        self.layer, self.memory, self.mesh, self.states, self.looks = layer, memory, mesh, states, looks
        self.captures = 0

    def queue(
        self,
        lane: Lane,
        plan: Plan,
        which: Hashable,
        states: Sequence[Any],
        nodes: Nodes,
        ops: Sequence[Op],
    ) -> None:
        """Replays a stage, or runs and captures it where it comes for the first time."""
        keys = tuple([state.key() for state in states])
        found = plan.captured.get((which, lane.rank, lane.name, keys))
        if found is None:
            self.layer.run(lane.stream, _call(lane, states, keys, nodes()))
            found = self.capture(lane, plan, which, states, nodes, ops)
        else:
            self.layer.run(lane.stream, found[0])
        if states:
            states[0].restore(found[1])

    def capture(
        self,
        lane: Lane,
        plan: Plan,
        which: Hashable,
        states: Sequence[Any],
        nodes: Nodes,
        ops: Sequence[Op],
    ) -> tuple[Callable[[], object], Hashable]:
        """A stage as it is replayed, and what the first state's key is after its ops; captured once."""
        keys = tuple([state.key() for state in states])
        key = (which, lane.rank, lane.name, keys)
        if key not in plan.captured:
            made = nodes()
            replay: Callable[[], object] = _nothing
            if made:
                # torch warns of a graph without nodes.
                replay = self.layer.captured(lane.stream, _call(lane, states, keys, made))
                self.captures += 1
            plan.captured[key] = replay, None
            if states:
                skipped(states[0], ops)
                plan.captured[key] = replay, states[0].key()
                states[0].restore(keys[0])
        return plan.captured[key]

    def nodes(
        self, lane: Lane, launch: Launch, notes: Notes | None, plan: Plan, stage: Stage
    ) -> list[Callable[[], object]]:
        """What a local stage launches, in order."""
        nodes = self.head(lane, notes, plan, launch) if stage.gates and notes is not None else []
        gate = notes.words.gate if notes is not None and plan.gated else None
        if stage.publication is not None:
            nodes.append(partial(self._put, lane, stage.publication, gate))
        if stage.ops:
            nodes.append(partial(_executed, lane.state, stage.ops, gate))
        if stage.settles and notes is not None:
            nodes.append(self.settle(notes, plan))
        return nodes

    def head(self, lane: Lane, notes: Notes, plan: Plan, launch: Launch | None) -> list[Callable[[], object]]:
        """The gate, and the signals that are waited for behind it."""
        memory, verbs, count = self.memory, self.layer.verbs, len(plan.signals)
        when = None if launch is None else launch.when
        nodes: list[Callable[[], object]] = [
            partial(verbs.gate, memory.flags, notes.words, memory.slots, when, count)
        ]
        for i, (name, source, code) in enumerate(plan.signals):
            published = memory.counter("published", name, source)
            taken = memory.counter("taken", name, source, lane.rank)
            nodes.append(
                partial(
                    verbs.take, published, taken, notes.words, memory.error,
                    back=count - i, code=code, most=self.looks,
                )
            )  # fmt: skip
        return nodes

    def settle(self, notes: Notes, plan: Plan) -> Callable[[], object]:
        """What writes the flags of a launch."""
        memory, verbs = self.memory, self.layer.verbs
        return partial(verbs.settle, memory.flags, memory.seen, notes.words, plan.settings, gated=plan.gated)

    def _put(self, lane: Lane, publication: Publication, gate: Tensor | None) -> None:
        other = layout.along(self.mesh, lane.rank, publication.put.axis, 1)
        with gated(gate):
            lane.state.put(publication, self.states[other])
        self.layer.verbs.publish(self.memory.counter("published", publication.signal, lane.rank), gate)

    def alone(self, stream: Stream, plan: Plan, which: Hashable, nodes: Nodes) -> None:
        """Something of the first rank that those which it leads wait for. It waits for them too: flags are
        written after all, and their gate, which is its own, not before they have read it."""
        leader, others = stream.lanes[0], stream.lanes[1:]
        for lane in others:
            if lane.tail is not None:
                self.layer.wait(leader.stream, lane.tail)
        self.queue(leader, plan, which, (), nodes, ())
        event = leader.tail = self.layer.record(leader.stream)
        for lane in others:
            self.layer.wait(lane.stream, event)
            lane.tail = event


def _call(
    lane: Lane, states: Sequence[Any], keys: Sequence[Hashable], nodes: Sequence[Callable[[], object]]
) -> Callable[[], None]:
    """What a lane's stream is given: some nodes, with states as they are now."""

    def call() -> None:
        with _as(states, keys), one_stream(lane.buffers):
            for node in nodes:
                node()

    return call


def _nothing() -> None:
    """What a stage without ops launches."""


def fill(tensor: Tensor, value: int) -> None:
    """Writes a number into all of a tensor."""
    tensor.fill_(value)


def _executed(state: Any, ops: Sequence[Op], gate: Tensor | None) -> None:
    with gated(gate):
        for op in ops:
            for unit in units(op):
                state.execute(unit)


def met_behind(gate: Tensor | None, states: Sequence[Any], op: Op) -> None:
    """A collective of the states of a group, behind a gate."""
    with gated(gate):
        met(states, op)


@contextmanager
def _as(states: Sequence[Any], keys: Sequence[Hashable]) -> Iterator[None]:
    """States as they were when these were their keys; afterwards as they are now."""
    now = [state.key() for state in states]
    for state, key in zip(states, keys, strict=True):
        state.restore(key)
    try:
        yield
    finally:
        for state, key in zip(states, now, strict=True):
            state.restore(key)
