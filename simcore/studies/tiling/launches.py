"""All launches of a schedule, without running it, from which its work is computed.

Launches of a graph that differ in one evenly growing size (a history, a column) are one burst:

    flops, bytes of n launches  =  n (first + last) / 2         both are linear in that size
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simcore.machine.machine import Machine, Program
from simcore.ops.op import Graph, Op, SourceKind, Work
from simcore.sim.bursts import BurstCost
from simcore.sim.graph_pricer import GraphPricer
from simcore.studies.tiling.order import Ints, Order, recorded


@dataclass(frozen=True, eq=False)
class Burst:
    """`count` launches of one graph, each with the sizes of the launch before plus `advance`."""

    graph: Graph
    sizes: Mapping[str, int]
    advance: Mapping[str, int]
    count: int

    @property
    def last(self) -> dict[str, int]:
        """The sizes of the last launch."""
        return {
            name: size + self.advance.get(name, 0) * (self.count - 1) for name, size in self.sizes.items()
        }

    def bound(self) -> Iterator[Op]:
        """Yields the ops of all launches, regardless of their place, with their sizes; each once."""
        for op in self.ops:
            changes = op.needs & self.advance.keys()
            for n in range(self.count if changes else 1):
                yield op.at({name: size + n * self.advance.get(name, 0) for name, size in self.sizes.items()})

    @cached_property
    def ops(self) -> Mapping[Op, int]:
        """The ops of the graph, regardless of their place, with their counts."""
        return Counter(op.without_place for op in self.graph.ops)

    def total(self, of: Callable[[Op], float]) -> Iterator[tuple[Op, float]]:
        """Yields each op with its sum of `of` over all launches; `of` must be linear in the sizes."""
        for op, times in self.ops.items():
            ends = of(op.at(self.sizes)) + of(op.at(self.last))
            yield op, times * self.count * ends / 2.0


def launches(program: Callable[[Machine], Program]) -> list[Burst]:
    """Returns all launches of a schedule, in the order of each graph's first launch."""
    order = recorded(program, [], {})
    return bursts(order, order.made(None))


def bursts(order: Order, graphs: Sequence[Graph]) -> list[Burst]:
    """Returns the launches of an order; `graphs`: its graphs."""
    return [burst for i, graph in enumerate(graphs) for burst in _bursts(order, i, graph)]


def _bursts(order: Order, i: int, graph: Graph) -> Iterator[Burst]:
    """Yields the launches of one graph, by the values of the one size that it reads, if any."""
    if not graph.reads:
        yield Burst(graph, {}, {}, len(order.launches_of[i]))
        return
    (name,) = graph.reads
    values = order.sizes[i][name]
    for start, count, by in _stretches(values):
        yield Burst(graph, {name: int(values[start])}, {name: by} if by else {}, count)


def _stretches(values: Ints) -> Iterator[tuple[int, int, int]]:
    """Yields stretches of evenly growing values: start, count, growth."""
    steps = np.diff(values)
    # Places where a step differs from the step before.
    turns = np.flatnonzero(np.diff(steps)) + 1
    start = 0
    while start < len(values):
        by = int(steps[start]) if start < len(steps) else 0
        later = turns[np.searchsorted(turns, start, side="right") :]
        end = int(later[0]) + 1 if len(later) else len(values)
        yield start, end - start, by
        start = end


def spread(
    order: Order,
    i: int,
    graph: Graph,
    graph_pricer: GraphPricer,
    work_s: NDArray[np.float64],
    floor_s: NDArray[np.float64],
    sources: dict[SourceKind, float],
) -> None:
    """Writes the time and the floor of each launch of an order's graph `i` to its place in `work_s` and
    `floor_s` [launches]; adds the seconds to `sources` by source of price."""
    places = order.launches_of[i]
    for start, ramp in _ramps(order, i, graph, graph_pricer):
        for piece in ramp.pieces:
            first = start + piece.first
            own, grown = places[first : first + piece.count], np.arange(piece.count)
            work_s[own] = piece.cost[0] + piece.growth[0] * grown
            floor_s[own] = piece.cost[1] + piece.growth[1] * grown
        ramp.origin.count(ramp.total_s, ramp.replays, sources)


def _ramps(order: Order, i: int, graph: Graph, graph_pricer: GraphPricer) -> Iterator[tuple[int, BurstCost]]:
    """Yields the prices of a graph's launches, each with its first launch. Sources of prices are determined
    per octave of the size, as in the simulated machine, which prices each launch by itself."""
    if not graph.reads:
        yield 0, graph_pricer.ramp(graph, {}, {}, len(order.launches_of[i]))
        return
    (name,) = graph.reads
    values, grows = order.sizes[i][name], order.advance[i].get(name, 0)
    for begin, count, by in _stretches(values):
        octaves = np.frexp(np.maximum(values[begin : begin + count], 1).astype(np.float64))[1]
        # A size without `advance` is priced at each value by itself.
        cuts = np.flatnonzero(np.diff(octaves)) + 1 if grows else np.arange(1, count)
        ends = [*cuts.tolist(), count]
        for start, end in zip([0, *ends], ends, strict=False):
            advance = {name: by or grows} if grows else {}
            sizes = {name: int(values[begin + start])}
            yield begin + start, graph_pricer.ramp(graph, sizes, advance, end - start)


def work(bursts: Iterable[Burst], of: Callable[[Op], bool]) -> Work:
    """Returns FLOPs and bytes of all ops for which `of` holds, by their formulas."""
    flops = hbm_bytes = 0.0
    for burst in bursts:
        flops += sum(value for op, value in burst.total(lambda op: op.work.flops) if of(op))
        hbm_bytes += sum(value for op, value in burst.total(lambda op: op.work.hbm_bytes) if of(op))
    return Work(flops, hbm_bytes)


def seconds_by_kind(bursts: Iterable[Burst], graph_pricer: GraphPricer) -> dict[str, float]:
    """Returns the device seconds of all launches by kind of op, each op alone on its device."""
    found: dict[str, float] = {}
    for burst in bursts:
        for kind in dict.fromkeys(op.kind for op in burst.graph.ops):
            part = Graph(burst.graph.name, tuple(op for op in burst.graph.ops if op.kind == kind))
            advance = {name: by for name, by in burst.advance.items() if name in part.reads}
            seconds = graph_pricer.ramp(part, burst.sizes, advance, burst.count).total_s
            found[kind] = found.get(kind, 0.0) + seconds
    return found
