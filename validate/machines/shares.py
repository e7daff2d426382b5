"""Shares out the time of a graph among its ops, in proportion to their times alone.

    share = time alone / sum of the times alone of the graph's ops        1 / ops, where nothing is known

Where several launches are one graph, a rank may wait in it for most of its time: what is more than the times
alone is shared out among the exchanges of priorities.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.ops.op import Graph, Op, Pricer, Roofline

# Ops, each with its share of a time, and the sum of their floors.
Shares = tuple[tuple[tuple[Op, float], ...], float]
# The kind of op in which the groups of a speculation meet.
EXCHANGE = "exchange_priority"


@dataclass(slots=True, eq=False)
class SharedOut:
    """The bound ops of graphs, each with its share of the graph's time, and the sum of their floors; kept
    from run to run. `same`: returns the graph that stands for all equal graphs; it is kept, so its id stays
    valid. `weight`: the time of an op alone."""

    same: Callable[[Graph], Graph]
    roofline: Roofline
    weight: Pricer | Roofline
    _known: dict[Any, Any] = field(default_factory=dict)

    def of(self, graph: Graph, first: int, count: int, sizes: Mapping[str, int]) -> Shares:
        """Returns the shares of ops `first` to `first + count - 1` of a graph at some sizes."""
        key = (id(self.same(graph)), first, count, tuple(sizes.items()))
        if key not in self._known:
            self._known[key] = self.between([op.at(sizes) for op in graph.ops[first : first + count]])
        found: Shares = self._known[key]
        return found

    def together(self, graphs: Sequence[Graph], sizes: Mapping[str, int], took_s: float) -> Shares:
        """Returns the shares of all ops of several graphs, captured as one that took `took_s`."""
        ops = [op for graph in graphs for op in self._bound(graph, sizes)]
        bare = [op.without_place for op in ops]
        alone_s = [max(0.0, self.weight(op).seconds) for op in bare]
        meets = sum(op.kind == EXCHANGE for op in ops)
        waited_s = max(0.0, took_s - sum(alone_s)) / max(1, meets)
        each_s = [s + (waited_s if op.kind == EXCHANGE else 0.0) for op, s in zip(ops, alone_s, strict=True)]
        total_s, floor_s = sum(each_s), sum(self.roofline(op).seconds for op in bare)
        shares = [s / total_s if total_s > 0.0 else 1.0 / len(ops) for s in each_s]
        return tuple(zip(ops, shares, strict=True)), floor_s

    def _bound(self, graph: Graph, sizes: Mapping[str, int]) -> tuple[Op, ...]:
        key = ("bound", id(self.same(graph)), tuple(sizes.items()))
        if key not in self._known:
            self._known[key] = tuple(op.at(sizes) for op in graph.ops)
        found: tuple[Op, ...] = self._known[key]
        return found

    def between(self, ops: Sequence[Op]) -> Shares:
        """Returns the shares of bound ops."""
        bare = [op.without_place for op in ops]
        weights = [1.0] if len(ops) == 1 else [max(0.0, self.weight(op).seconds) for op in bare]
        total, floor_s = sum(weights), sum(self.roofline(op).seconds for op in bare)
        shares = [each / total if total > 0.0 else 1.0 / len(ops) for each in weights]
        return tuple(zip(ops, shares, strict=True)), floor_s
