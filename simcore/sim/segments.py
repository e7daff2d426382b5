"""A graph at given sizes, priced and cut at its collectives.

    graph  ->  local segment | collective | local segment | ...

A local segment takes the sum of its ops' prices; `demand` is the share of memory and arithmetic that the
segment keeps busy while it runs alone (contention.py).
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from simcore.machine.trace import PricedOp
from simcore.ops.op import Floor, Graph, Op, Pricer, Publication, Roofline
from simcore.sim.contention import Demand
from simcore.sim.power import Shares, clock_shares


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Local ops, or one collective. `publications`: each with the seconds of work after which it leaves;
    `arithmetic_s`: its seconds of arithmetic; `clocked_s`: those that the card's clock decides; `waiting_s`:
    those of waiting (`power.clock_shares`); `clocked`: the second's share of each op that has some, by its
    id."""

    ops: tuple[PricedOp, ...]
    seconds: float
    demand: Demand
    collective: bool
    publications: tuple[tuple[float, Publication], ...]
    arithmetic_s: float = 0.0
    clocked_s: float = 0.0
    clocked: Mapping[int, float] = field(default_factory=dict)
    waiting_s: float = 0.0


def slower(segment: Segment, factor: float) -> Segment:
    """A segment in which what the clock decides takes `factor` times as long."""
    if not segment.clocked:
        return segment
    # Layers repeat the same few objects, and so they do here.
    longer: dict[int, PricedOp] = {}
    clocked: dict[int, float] = {}
    for priced in segment.ops:
        share = segment.clocked.get(id(priced), 0.0)
        if share > 0.0 and id(priced) not in longer:
            times = 1.0 + (factor - 1.0) * share
            here = longer[id(priced)] = replace(priced, price=priced.price.times(times))
            clocked[id(here)] = factor * share / times
    ops = tuple([longer.get(id(priced), priced) for priced in segment.ops])
    before = [0.0, *accumulate([priced.price.seconds for priced in segment.ops])]
    after = [0.0, *accumulate([priced.price.seconds for priced in ops])]
    demand = Demand(
        segment.demand.memory * before[-1] / after[-1],
        segment.demand.compute,
        kernels_per_s=segment.demand.kernels_per_s,
    )
    return Segment(
        ops, after[-1], demand, segment.collective,
        tuple([(_moved(at_s, before, after), each) for at_s, each in segment.publications]),
        factor * segment.arithmetic_s, factor * segment.clocked_s, clocked, factor * segment.waiting_s,
    )  # fmt: skip


def _moved(at_s: float, before: list[float], after: list[float]) -> float:
    """Where a moment lies after ops have become longer; `before` and `after`: where each begins, and the
    end."""
    op = min(bisect_right(before, at_s), len(before) - 1) - 1
    whole_s = before[op + 1] - before[op]
    inside = (at_s - before[op]) / whole_s if whole_s > 0.0 else 1.0
    return after[op] + inside * (after[op + 1] - after[op])


# An op at its sizes with its price, its floor, whether it is a collective, and its shares under the clock.
Bound = tuple[PricedOp, Floor, bool, Shares]


class Cuts:
    """A cache of the segments of graphs at their sizes. Runs with the same prices may share one. `local`:
    another cache, whose prices differ only for ops that cross a link; it serves all other ops."""

    def __init__(self, price: Pricer, roofline: Roofline, local: "Cuts | None" = None) -> None:
        self._price = price
        self._roofline = roofline
        self._local = local
        # By graph id, whether any op of the graph crosses a link.
        self._crosses: dict[int, bool] = {}
        self._segments: dict[tuple[int, tuple[int, ...]], tuple[Segment, ...]] = {}
        # Ops without run-time sizes, by their id.
        self._bounds: dict[int, Bound] = {}
        self._puts: dict[int, PricedOp] = {}
        self._graphs: dict[int, Graph] = {}

    def of(self, graph: Graph, sizes: Mapping[str, int]) -> tuple[Segment, ...]:
        """The segments of a graph, in order; an empty graph is one segment that takes no time."""
        if self._local is not None:
            crosses = self._crosses.get(id(graph))
            if crosses is None:
                # Kept in both cases, so that its id stays its own: by `_local.of` or below.
                crosses = self._crosses[id(graph)] = any(map(_crosses, graph.ops))
            if not crosses:
                return self._local.of(graph, sizes)
        key = (id(graph), tuple([sizes[name] for name in graph.needs]))
        found = self._segments.get(key)
        if found is None:
            # Kept because new objects could get the ids of a deleted graph and its ops.
            self._keep(graph)
            found = tuple(self._cut(graph, sizes))
            self._segments[key] = found
        return found

    def put(self, publication: Publication) -> PricedOp:
        """The priced put of a publication of a graph that was cut here."""
        found = self._puts.get(id(publication))
        if found is None:
            put = publication.put
            found = self._puts[id(publication)] = PricedOp(put, self._price(put), self._roofline(put).wire_s)
        return found

    def _keep(self, graph: Graph) -> None:
        self._graphs[id(graph)] = graph
        if self._local is not None:
            self._local._keep(graph)

    def _bound(self, op: Op, sizes: Mapping[str, int], here: dict[int, Bound]) -> Bound:
        """An op at its sizes, priced. `here`: the ops of the graph that read sizes, by id."""
        found = self._bounds.get(id(op)) or here.get(id(op))
        if found is None:
            if self._local is not None and not _crosses(op):
                found = self._local._bound(op, sizes, here)
            else:
                found = self._priced(op.at(sizes), sizes, here)
            (here if op.needs else self._bounds)[id(op)] = found
        return found

    def _priced(self, op: Op, sizes: Mapping[str, int], here: dict[int, Bound]) -> Bound:
        bare = op.without_place
        cost = self._price(bare)
        floor = self._roofline(bare).of(cost)

        def of_part(part: Op) -> tuple[float, Floor]:
            priced, least, *_ = self._bound(part, sizes, here)
            return priced.price.seconds, least

        shares = clock_shares(bare, cost.seconds, floor, of_part)
        return PricedOp(op, cost, floor.seconds), floor, op.ranks > 1, shares

    def _cut(self, graph: Graph, sizes: Mapping[str, int]) -> Iterator[Segment]:
        early: dict[int, list[Publication]] = defaultdict(list)
        for publication in graph.publishes:
            early[publication.op].append(publication)
        local: list[Bound] = []
        leaving: list[tuple[float, Publication]] = []
        done_s = 0.0
        # Graphs of many tokens repeat the same op objects.
        here: dict[int, Bound] = {}
        for i, op in enumerate(graph.ops):
            found = self._bound(op, sizes, here)
            priced, _, collective, *_ = found
            if collective:
                if local:
                    yield _local(local, leaving)
                yield Segment((priced,), priced.price.seconds, Demand(0.0, 0.0), True, ())
                local, leaving, done_s = [], [], 0.0
                continue
            if i in early:
                whole_s, early_s = priced.price.seconds, priced.price.early_s
                leaves_s = done_s + (whole_s if early_s is None else min(early_s, whole_s))
                leaving += [(leaves_s, publication) for publication in early[i]]
            local.append(found)
            done_s += priced.price.seconds
        if local or not graph.ops:
            yield _local(local, leaving)


def _crosses(op: Op) -> bool:
    """Whether an op may cross a link: it is a collective, a put, or a fused op."""
    return bool(op.axis or op.parts)


def _local(bound: list[Bound], leaving: list[tuple[float, Publication]]) -> Segment:
    ops = tuple([priced for priced, *_ in bound])
    seconds = sum([priced.price.seconds for priced in ops])
    if seconds <= 0.0:
        return Segment(ops, 0.0, Demand(0.0, 0.0), False, tuple(leaving))
    memory = sum([floor.memory_s for _, floor, *_ in bound]) / seconds
    compute = sum([floor.compute_s for _, floor, *_ in bound]) / seconds
    kernels_per_s = sum([priced.op.kernels for priced in ops]) / seconds
    demand = Demand(min(1.0, memory), min(1.0, compute), kernels_per_s=kernels_per_s)
    arithmetic_s, clocked_s, waiting_s = (
        sum([shares[i] * priced.price.seconds for priced, *_, shares in bound]) for i in range(3)
    )
    clocked = {id(priced): shares[1] for priced, *_, shares in bound if shares[1] > 0.0}
    return Segment(ops, seconds, demand, False, tuple(leaving), arithmetic_s, clocked_s, clocked, waiting_s)
