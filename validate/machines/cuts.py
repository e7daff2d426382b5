"""Cuts graphs into segments at their collectives, and matches the ranks that meet in a collective."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.kernels.table import TABLE
from simcore.machine import mesh as layout
from simcore.machine.machine import MismatchError
from simcore.ops.op import Graph, Op, Publication
from simcore.sim.simulation import WAITS_FOR_RANKS
from simcore.validate.machines.host import HostSide
from simcore.validate.machines.launches import Need, Steps, Stream


def units(op: Op) -> Iterator[Op]:
    """Yields the ops of an op that run one by one: itself, or the parts of a fused op without a kernel."""
    if not op.parts or op.kind in TABLE:
        yield op
        return
    for part in op.parts:
        yield from units(part)


def run_collective(states: Sequence[Any], op: Op) -> None:
    """Runs a collective, or the parts of a fused one, on the states of a group."""
    for unit in units(op):
        if unit.ranks > 1:
            states[0].meet(unit, states)
        else:
            for state in states:
                state.execute(unit)


def skip_ops(state: Any, ops: Iterable[Op]) -> None:
    """Makes a state pass over ops."""
    for op in ops:
        for unit in units(op):
            state.skip(unit)


@dataclass(frozen=True, slots=True)
class Segment:
    """Bound ops between two collectives, or one collective; `leaving`: publications by index of their op."""

    ops: tuple[Op, ...]
    collective: bool = False
    leaving: Mapping[int, Sequence[Publication]] = field(default_factory=dict)


def segments(graph: Graph, sizes: Mapping[str, int]) -> Iterator[Segment]:
    """Yields the segments of a graph in order; a graph without ops has one segment, without ops."""
    leaves: dict[int, list[Publication]] = defaultdict(list)
    for publication in graph.publishes:
        leaves[publication.op].append(publication)
    local: list[Op] = []
    leaving: dict[int, Sequence[Publication]] = {}
    for i, op in enumerate(op.at(sizes) for op in graph.ops):
        if op.ranks > 1:
            if local:
                yield Segment(tuple(local), leaving=leaving)
            yield Segment((op,), collective=True)
            local, leaving = [], {}
            continue
        if i in leaves:
            leaving[len(local)] = leaves[i]
        local.append(op)
    if local or not graph.ops:
        yield Segment(tuple(local), leaving=leaving)


@dataclass(slots=True, eq=False)
class Rendezvous:
    """A collective: what each arrived rank brought, and the end of each rank once the collective has run."""

    op: Op
    members: tuple[int, ...]
    arrived: dict[int, Any] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)


class CollectiveMatcher:
    """Matches collectives: along an axis, on streams of one name, the n-th one of each rank is the same."""

    def __init__(self, host: HostSide) -> None:
        self._host = host
        self._rendezvous_of: dict[tuple[str, str, tuple[int, ...]], list[Rendezvous]] = defaultdict(list)
        self._turns: dict[tuple[str, str, int], int] = defaultdict(int)

    def members(self, rank: int, axis: str) -> tuple[int, ...]:
        """Returns the ranks that a rank's host meets along an axis: in lockstep only the rank itself."""
        return (rank,) if axis in self._host.lockstep else layout.members(self._host.mesh, rank, axis)

    def joins(self, rank: int, op: Op) -> bool:
        """Whether a rank has to wait for others in a collective."""
        return len(self.members(rank, op.axis)) > 1

    def groups(self, rendezvous: Rendezvous) -> list[tuple[tuple[int, ...], dict[int, int]]]:
        """Returns the groups of ranks that run one collective together, each with its ranks' leaders."""
        leader_of = {r: leader for leader in rendezvous.arrived for r in self._host.followers[leader]}
        axis, mesh = rendezvous.op.axis, self._host.mesh
        groups = dict.fromkeys(layout.members(mesh, rank, axis) for rank in leader_of)
        return [(group, {rank: leader_of[rank] for rank in group}) for group in groups]

    def meet(self, op: Op, stream: Stream, brings: Any, hold: Callable[[Rendezvous], None]) -> Steps:
        """Brings a stream's rank to a collective; the last rank calls `hold`, the others wait. Returns its
        end. Raises MismatchError if the others are in another collective or the axis has another size."""
        rendezvous = self._next(op, stream.name, stream.rank)
        rendezvous.arrived[stream.rank] = brings
        there = len(rendezvous.arrived)
        stream.waiting_for = WAITS_FOR_RANKS, op, there, len(rendezvous.members)
        if there == len(rendezvous.members):
            hold(rendezvous)
        else:
            yield Need(lambda: bool(rendezvous.ends))
        return rendezvous.ends[stream.rank]

    def _next(self, op: Op, stream: str, rank: int) -> Rendezvous:
        size = self._host.mesh.get(op.axis, 1)
        if size != op.ranks:
            raise MismatchError(f"{op.kind} {op.name} is for {op.ranks} ranks; axis {op.axis!r} has {size}")
        members = self.members(rank, op.axis)
        turn = self._turns[op.axis, stream, rank]
        self._turns[op.axis, stream, rank] += 1
        known = self._rendezvous_of[op.axis, stream, members]
        if turn == len(known):
            known.append(Rendezvous(op, members))
        other = known[turn].op
        if (other.kind, other.name, other.shape, other.dtype) != (op.kind, op.name, op.shape, op.dtype):
            raise MismatchError(
                f"rank {rank} comes to {op.kind} {op.name}, others are in {other.kind} {other.name}"
            )
        return known[turn]
