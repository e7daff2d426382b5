"""All launches of a schedule, without running it: what its work is reckoned from.

A tiling's order is fixed, so a machine that does nothing but count sees all of it. Launches of a graph that
differ in one size that grows evenly (a history, a column) are one entry:

    flops, bytes of n launches  =  n (first + last) / 2         both are straight lines in that size
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

from simcore.machine import Machine, Program
from simcore.ops import Graph, Op, Work
from simcore.tariff import Tariff


@dataclass(frozen=True, eq=False)
class Burst:
    """`count` launches of one graph, each with the sizes of the one before and `advance`."""

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

    @cached_property
    def ops(self) -> Mapping[Op, int]:
        """The ops of the graph, wherever they work, and how often each is there."""
        return Counter(op.bare for op in self.graph.ops)

    def total(self, of: Callable[[Op], float]) -> Iterator[tuple[Op, float]]:
        """Each op with what it adds up to over all launches, `of` being a straight line in the sizes."""
        for op, times in self.ops.items():
            ends = of(op.at(self.sizes)) + of(op.at(self.last))
            yield op, times * self.count * ends / 2.0


@dataclass
class _Counting:
    """A machine on which a launch takes no time and is kept."""

    rank: int = 0
    world: int = 1
    graphs: dict[int, Graph] = field(default_factory=dict)
    read: dict[int, list[int]] = field(default_factory=dict)

    def now(self) -> float:
        return 0.0

    def launch(self, graph: Graph, *, sizes: Mapping[str, int], **_: Any) -> None:
        # A graph that is gone could leave its id to another one: keep it.
        self.graphs[id(graph)] = graph
        self.read.setdefault(id(graph), []).extend([sizes[name] for name in graph.reads] or [0])

    def wait(self, *_: Any) -> None:
        return None


def launches(program: Callable[[Machine], Program]) -> list[Burst]:
    """All that a schedule launches, in the order in which each graph is launched first."""
    machine = _Counting()
    for _ in program(cast(Machine, machine)):
        pass
    return [burst for key, graph in machine.graphs.items() for burst in _bursts(graph, machine.read[key])]


def _bursts(graph: Graph, values: list[int]) -> Iterator[Burst]:
    """Launches of one graph at these values of the one size that it reads, if it reads any."""
    if not graph.reads:
        yield Burst(graph, {}, {}, len(values))
        return
    (name,) = graph.reads
    start = 0
    while start < len(values):
        by = values[start + 1] - values[start] if start + 1 < len(values) else 0
        end = start + 1
        while end < len(values) and values[end] - values[end - 1] == by:
            end += 1
        yield Burst(graph, {name: values[start]}, {name: by} if by else {}, end - start)
        start = end


def work(bursts: Iterable[Burst], of: Callable[[Op], bool]) -> Work:
    """FLOPs and bytes of all ops that `of` holds for, by their formulas."""
    flops = hbm_bytes = 0.0
    for burst in bursts:
        flops += sum(value for op, value in burst.total(lambda op: op.work.flops) if of(op))
        hbm_bytes += sum(value for op, value in burst.total(lambda op: op.work.hbm_bytes) if of(op))
    return Work(flops, hbm_bytes)


def seconds_by_kind(bursts: Iterable[Burst], tariff: Tariff) -> dict[str, float]:
    """Device seconds of all launches by kind of op, each op alone on its device."""
    found: dict[str, float] = {}
    for burst in bursts:
        for kind in dict.fromkeys(op.kind for op in burst.graph.ops):
            part = Graph(burst.graph.name, tuple(op for op in burst.graph.ops if op.kind == kind))
            advance = {name: by for name, by in burst.advance.items() if name in part.reads}
            seconds = tariff.ramp(part, burst.sizes, advance, burst.count).total_s
            found[kind] = found.get(kind, 0.0) + seconds
    return found
