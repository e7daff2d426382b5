"""Computes begin and end of all launches of an order at once, as the simulated machine does with one host and
one stream.

    a launch begins     max(its host has issued it, the one before has ended)
    a wait is over      max(host's clock, end of the launch that it waits for) + wait_s

The launches between two waits are a block. Its times follow from one number, its lag: for how long the stream
is busy after the block begins. So all lags are first assumed to be 0, each block gives the lag of the next,
and blocks with a wrong lag are computed again until no lag changes: usually a lag has no effect beyond the
next wait. Longer chains are followed block by block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simcore.machine.machine import Overheads
from simcore.machine.trace import ROW, Rows, Trace
from simcore.ops.op import Graph, SourceKind
from simcore.sim.graph_pricer import GraphPricer
from simcore.sim.simulation import DeviceSizes
from simcore.studies.tiling.launches import spread
from simcore.studies.tiling.order import Order

Seconds = NDArray[np.float64]
# Most array places per launch: blocks of very different lengths are not put side by side.
MOST_PLACES = 8
# Most sweeps over all blocks at once; then blocks are computed one after the other.
MOST_SWEEPS = 24
# Lags that differ by no more than this, relative to the time of the block before, count as equal: if the
# stream is never idle they are differences of the same sums, each rounded.
ROUNDING = 1e-15


@dataclass(frozen=True, slots=True, eq=False)
class Costs:
    """Times of each launch [launches]: `host_s` of its host, of which the last `back_s` follow the issue;
    `work_s` of the device; `floor_s`: the least; `sources`: device seconds by source of price."""

    host_s: Seconds
    back_s: Seconds
    work_s: Seconds
    floor_s: Seconds
    sources: Mapping[SourceKind, float]


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """Times at which each launch was issued, began and ended [launches], and each wait was over [waits]."""

    issued_s: Seconds
    start_s: Seconds
    end_s: Seconds
    over_s: Seconds


def can_be_worked_out(order: Order) -> bool:
    """Whether an order has only plain launches and waits, and its blocks are about equally long."""
    launches, blocks = len(order.numbers), len(order.waits) + 1
    even = blocks * int(_lengths(order).max()) <= MOST_PLACES * (launches + blocks)
    return order.plain and launches > 0 and even


def _lengths(order: Order) -> NDArray[np.int64]:
    return np.diff(order.waits, prepend=0, append=len(order.numbers))


def costs(
    order: Order,
    graphs: Sequence[Graph],
    graph_pricer: GraphPricer,
    overheads: Overheads,
    device_sizes: DeviceSizes,
) -> Costs:
    """Returns the costs of the launches of an order; `graphs`: its graphs. Raises the prices' errors."""
    launches = len(order.numbers)
    work_s, floor_s = np.empty(launches), np.empty(launches)
    sources: dict[SourceKind, float] = {}
    for i, graph in enumerate(graphs):
        spread(order, i, graph, graph_pricer, work_s, floor_s, sources)
    launch_s = [overheads.whole_launch_s(graph.kernels) for graph in graphs]
    back_s = [seconds - overheads.begins_s(seconds) for seconds in launch_s]
    host_s = np.array(launch_s)[order.numbers]
    if overheads.size_s:
        host_s = host_s + overheads.size_s * _size_updates(order, graphs, device_sizes)
    return Costs(host_s, np.array(back_s)[order.numbers], work_s, floor_s, sources)


def _size_updates(order: Order, graphs: Sequence[Graph], device_sizes: DeviceSizes) -> NDArray[np.int64]:
    """Returns the number of sizes that each launch writes to the device: sizes that differ from their last
    written values."""
    found = np.zeros(len(order.numbers), np.int64)
    read = [device_sizes(graph) for graph in graphs]
    for name in sorted(frozenset().union(*read)):
        among = [i for i, names in enumerate(read) if name in names and name in order.sizes[i]]
        if not among:
            continue
        places = np.concatenate([order.launches_of[i] for i in among])
        values = np.concatenate([order.sizes[i][name] for i in among])
        in_order = np.argsort(places)
        fresh = np.diff(values[in_order], prepend=0) != 0
        fresh[0] = True
        found[places[in_order]] += fresh
    return found


class _Blocks:
    """The launches of each block side by side: arrays [place in its block, block]."""

    def __init__(self, order: Order, cost: Costs, wait_s: float) -> None:
        lengths = _lengths(order)
        self.count, self.wait_s = len(lengths), wait_s
        first = np.concatenate(([0], order.waits))
        place = np.arange(lengths.max(initial=0))[:, None]
        self.there = place < lengths
        # Places without a launch issue nothing and take no time.
        which = np.where(self.there, first + place, 0)
        self.host_s = np.where(self.there, cost.host_s[which], 0.0)
        self.back_s = np.where(self.there, cost.back_s[which], np.inf)
        self.work_s = np.where(self.there, cost.work_s[which], 0.0)
        waited = np.concatenate((order.waited, [-1])) - first
        self.waited = place == waited

    def took(self, lag_s: Seconds, which: NDArray[np.int64]) -> tuple[Seconds, Seconds]:
        """Returns the seconds from the beginning of some blocks to that of the next, and the next's lag."""
        host_s, free_s = np.zeros(len(lag_s)), lag_s
        seen_s = np.full(len(lag_s), -np.inf)
        parts = (self.host_s, self.back_s, self.work_s, self.waited)
        for host, back, work, waited in zip(*(part[:, which] for part in parts), strict=True):
            host_s = host_s + host
            free_s = np.maximum(free_s, host_s - back) + work
            seen_s = np.where(waited, free_s, seen_s)
        took_s = np.maximum(host_s, seen_s) + self.wait_s
        return took_s, free_s - took_s

    def lags(self) -> tuple[Seconds, Seconds]:
        """Returns the lag and the time of each block."""
        lag_s, took_s = np.zeros(self.count), np.zeros(self.count)
        which = np.arange(self.count)
        for _ in range(MOST_SWEEPS):
            took_s[which], next_s = self.took(lag_s[which], which)
            after = which + 1
            by_s = np.abs(next_s - lag_s[np.minimum(after, self.count - 1)])
            changed = (after < self.count) & (by_s > ROUNDING * took_s[which])
            which = after[changed]
            if not len(which):
                return lag_s, took_s
            lag_s[which] = next_s[changed]
        self._one_by_one(lag_s, took_s, which)
        return lag_s, took_s

    def _one_by_one(self, lag_s: Seconds, took_s: Seconds, which: NDArray[np.int64]) -> None:
        """Follows each chain of changed lags from its beginning until a lag does not change."""
        done = 0
        rows = range(len(self.host_s))
        host, back, work = (part.T.tolist() for part in (self.host_s, self.back_s, self.work_s))
        waited = self.waited.T.tolist()
        for start in which.tolist():
            block = max(start, done)
            if block > start:
                continue
            while True:
                host_s, free_s, seen_s = 0.0, float(lag_s[block]), -np.inf
                for i in rows:
                    host_s += host[block][i]
                    free_s = max(free_s, host_s - back[block][i]) + work[block][i]
                    if waited[block][i]:
                        seen_s = free_s
                took_s[block] = max(host_s, seen_s) + self.wait_s
                next_s = free_s - took_s[block]
                block += 1
                if block == self.count or abs(next_s - lag_s[block]) <= ROUNDING * took_s[block - 1]:
                    break
                lag_s[block] = next_s
            done = block


def worked_out(order: Order, cost: Costs, wait_s: float) -> Times:
    """Returns the times of all launches and waits of an order for which `can_be_worked_out` holds."""
    blocks = _Blocks(order, cost, wait_s)
    lag_s, took_s = blocks.lags()
    over_s = np.cumsum(took_s)
    begins_s = np.concatenate(([0.0], over_s[:-1]))
    shape = blocks.there.shape
    issued_s, start_s, end_s = np.empty(shape), np.empty(shape), np.empty(shape)
    host_s, free_s = begins_s.copy(), begins_s + lag_s
    for i in range(shape[0]):
        host_s += blocks.host_s[i]
        issued_s[i] = host_s - blocks.back_s[i]
        start_s[i] = np.maximum(free_s, issued_s[i])
        free_s = end_s[i] = start_s[i] + blocks.work_s[i]
    there = blocks.there.T
    return Times(issued_s.T[there], start_s.T[there], end_s.T[there], over_s[:-1])


def traced(order: Order, graphs: Sequence[Graph], cost: Costs, times: Times) -> Trace:
    """Returns the trace that the simulated machine gives for such a run with rows of numbers."""
    launches = len(order.numbers)
    rows = Rows()
    if launches:
        rows.streams["main"] = 0
    for graph in graphs:
        rows.graphs.setdefault(graph.name, len(rows.graphs))
    named = np.array([rows.graphs[graph.name] for graph in graphs], np.float64)
    table = np.zeros((launches, len(ROW)))
    columns: dict[str, ArrayLike] = {
        "launch": np.arange(launches),
        "graph": named[order.numbers],
        "issued_s": times.issued_s,
        "ready_s": np.concatenate(([0.0], times.end_s))[:-1],
        "start_s": times.start_s,
        "end_s": times.end_s,
        "work_s": cost.work_s,
        "floor_s": cost.floor_s,
        "replays": 1.0,
    }
    for name, values in columns.items():
        table[:, ROW.index(name)] = values
    rows.numbers.frombytes(table.tobytes())
    rows.sources.update(cost.sources)
    return Trace(rows=rows)
