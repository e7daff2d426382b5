"""Prices of graphs at given sizes: each group of ops is priced once for each value of the sizes it reads.

    group      the ops of a graph that read the same sizes, each with its count
    cost       of a group at its sizes: seconds at the value and at both ends of the interval, the floor,
               memory and arithmetic at the datasheet's rates
    stretches  of a group while one size grows: lines, in octaves of that size (bursts.py)

A group is identified by its ops and not by its graph, and one price of an op gives the value and both ends of
the interval: so runs of one study share all groups (`PricedGroups`), and the cache on disk is by group
(kept.py).
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from simcore.ops.op import Floor, Graph, Op, Pricer, Roofline, SourceKind
from simcore.sim.bursts import (
    NOTHING,
    Bends,
    BurstCost,
    Cost,
    Curve,
    Origin,
    Piece,
    Shares,
    Straight,
    lines,
    pieces_of,
)
from simcore.sim.power import clock_shares

End = Literal["value", "low", "high"]
ENDS: tuple[End, ...] = get_args(End)
SOURCES: tuple[SourceKind, ...] = get_args(SourceKind)
# Sizes of steps that mix prefill and decode hardly ever repeat: a cache this large is emptied.
MOST_KNOWN = 1 << 15
# The octave (bursts.Lines) by which `settle_by_probes` decides, and all other sizes there: tokens from
# 131,072 on, of a number of sequences that profiles hardly measure: between measured points prices bend.
PROBED, OTHERS = 18, 37
# Seconds at each end, floor, memory, arithmetic at the datasheet's rates; at each end the seconds that count
# as arithmetic (power.py), those that the clock decides, and those of waiting; for each source its seconds at
# each end.
PricedEnds = tuple[tuple[float, ...], tuple[tuple[SourceKind, tuple[float, ...]], ...]]
# Seconds of arithmetic, those that the clock decides, of waiting.
UnderClock = tuple[float, float, float]
Key = tuple[int, ...]
# The name of the size that grows, and the values of all sizes, with 0 for the growing one.
Along = tuple[str, Key]
# Key of stretches: `Along`, the end, the octave, and whether they are lines close to a curve.
Place = tuple[str, Key, End, int, bool]


@dataclass(slots=True)
class Known:
    """The known prices of a group: `costs` by the values of the sizes that it `reads`, and its stretches in
    `lines`. `packed`: stretches still as numbers [lines, 10] as in `straight`, because a run needs few."""

    reads: tuple[str, ...]
    costs: dict[Key, PricedEnds] = field(default_factory=dict)
    lines: dict[Place, list[Straight] | None] = field(default_factory=dict)
    packed: dict[Place, NDArray[np.float64]] = field(default_factory=dict)

    def unpack(self, place: Place) -> None:
        """Moves stretches from `packed` to `lines`, if they are there."""
        if place in self.packed:
            self.lines[place] = [straight(line) for line in self.packed.pop(place).tolist()]

    def add(self, other: "Known") -> None:
        """Adds the prices that another process has found."""
        self.costs.update(other.costs)
        self.lines.update(other.lines)


@dataclass(slots=True, eq=False)
class Group:
    """Ops that read the same sizes, each with its count in a graph. `sampled`: costs at sizes that were
    priced only to find stretches; `fresh`: prices found since `PricedGroups.fresh` was last called."""

    name: str
    ops: tuple[tuple[Op, int], ...]
    known: Known
    fresh: Known
    sampled: dict[Key, PricedEnds] = field(default_factory=dict)

    @property
    def reads(self) -> tuple[str, ...]:
        """The sizes that its ops read, by name."""
        return self.known.reads


class PricedGroups:
    """The groups of all graphs priced so far, for one rank of one device. `known`: prices of groups from an
    earlier run, by group name."""

    def __init__(self, price: Pricer, roofline: Roofline, known: Mapping[str, Known] | None = None) -> None:
        self._price = price
        self._roofline = roofline
        self._known = dict(known or {})
        # Whether `add` has added prices that an earlier run had not found.
        self.grown = False
        self._groups: dict[str, Group] = {}
        self._of_graph: dict[int, list[Group]] = {}
        self._graphs: dict[int, Graph] = {}

    def of(self, graph: Graph) -> list[Group]:
        """The groups of a graph."""
        found = self._of_graph.get(id(graph))
        if found is None:
            # The graph is kept because a new object could get the id of a deleted one.
            self._graphs[id(graph)] = graph
            found = self._of_graph[id(graph)] = [self._group(*each) for each in _grouped(graph)]
        return found

    def _group(self, reads: tuple[str, ...], ops: tuple[tuple[Op, int], ...]) -> Group:
        name = hashlib.sha256(repr((reads, [(_text(op), count) for op, count in ops])).encode()).hexdigest()
        found = self._groups.get(name)
        if found is None:
            known = self._known.setdefault(name, Known(reads))
            found = self._groups[name] = Group(name, ops, known, Known(reads))
        return found

    @property
    def known(self) -> Mapping[str, Known]:
        """The known prices of each group, by group name."""
        return self._known

    def fresh(self) -> dict[str, Known]:
        """The prices found since the last call, by group name."""
        found = {name: group.fresh for name, group in self._groups.items()}
        for group in self._groups.values():
            group.fresh = Known(group.reads)
        return {name: each for name, each in found.items() if each.costs or each.lines}

    def add(self, found: Mapping[str, Known]) -> None:
        """Adds the prices that another process has found."""
        self.grown |= bool(found)
        for name, each in found.items():
            self._known.setdefault(name, Known(each.reads)).add(each)

    def cost(self, group: Group, key: Key) -> PricedEnds:
        """The cost of a group at the values of the sizes that it reads."""
        costs = group.known.costs
        found = costs.get(key)
        if found is None:
            if len(costs) >= MOST_KNOWN:
                costs.clear()
                group.fresh.costs.clear()
            found = costs[key] = self._cost(group, dict(zip(group.reads, key, strict=True)))
            group.fresh.costs[key] = found
        return found

    def lines(self, group: Group, end: End, along: Along, octave: int, curved: bool) -> list[Straight] | None:
        """The stretches of a group's cost while one size grows, see `bursts.Lines`."""
        name, others = along
        there = (name, others, end, octave, curved)
        known = group.known.lines
        if there not in known:
            group.known.unpack(there)
        if there not in known:
            place, number = group.reads.index(name), ENDS.index(end)
            before, after = others[:place], others[place + 1 :]

            def cost(size: int) -> Cost:
                return _at(self._sample(group, (*before, size, *after)), number)

            known[there] = group.fresh.lines[there] = lines(cost, octave, curved)
        return known[there]

    def _sample(self, group: Group, key: Key) -> PricedEnds:
        found = group.known.costs.get(key) or group.sampled.get(key)
        if found is None:
            if len(group.sampled) >= MOST_KNOWN:
                group.sampled.clear()
            found = group.sampled[key] = self._cost(group, dict(zip(group.reads, key, strict=True)))
        return found

    def _of_part(self, part: Op) -> tuple[float, Floor]:
        price = self._price(part)
        return price.seconds, self._roofline(part).of(price)

    def _cost(self, group: Group, sizes: Mapping[str, int]) -> PricedEnds:
        value_s = low_s = high_s = least_s = memory_s = compute_s = 0.0
        arithmetic_s, clocked_s, waiting_s = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        shares: dict[SourceKind, list[float]] = {}
        for op, count in group.ops:
            here = op.at(sizes)
            price = self._price(here)
            floor = self._roofline(here).of(price)
            taken = count * price.seconds, count * price.low_s, count * price.high_s
            value_s, low_s, high_s = value_s + taken[0], low_s + taken[1], high_s + taken[2]
            memory_s += count * floor.memory_s
            compute_s += count * floor.compute_s
            for i, seconds in enumerate((price.seconds, price.low_s, price.high_s)):
                arithmetic, clocked, waiting = clock_shares(here, seconds, floor, self._of_part)
                arithmetic_s[i] += arithmetic * taken[i]
                clocked_s[i] += clocked * taken[i]
                waiting_s[i] += waiting * taken[i]
            # An assumed price may be faster than the datasheet allows (law 6).
            if price.source != "assumed":
                least_s += count * floor.seconds
            known = shares.setdefault(price.source, [0.0, 0.0, 0.0])
            for i in range(len(ENDS)):
                known[i] += taken[i]
        by_source = tuple([(source, tuple(shares[source])) for source in SOURCES if source in shares])
        under_clock = (*arithmetic_s, *clocked_s, *waiting_s)
        return (value_s, low_s, high_s, least_s, memory_s, compute_s, *under_clock), by_source


def _at(priced: PricedEnds, number: int) -> Cost:
    """The cost at end number `number` of ENDS."""
    numbers = priced[0]
    return (numbers[number], numbers[3], numbers[4], numbers[5])


def _under_clock(priced: Sequence[PricedEnds], number: int) -> UnderClock:
    """The seconds of groups that count as arithmetic, at end number `number` of ENDS, those that the clock
    decides, and those of waiting."""
    arithmetic_s = clocked_s = waiting_s = 0.0
    for numbers, _ in priced:
        arithmetic_s, clocked_s = arithmetic_s + numbers[6 + number], clocked_s + numbers[9 + number]
        waiting_s += numbers[12 + number]
    return arithmetic_s, clocked_s, waiting_s


@dataclass(slots=True, eq=False)
class _Priced:
    """A graph priced at the sizes that do not grow: its fixed groups cost `cost`, its growing groups
    `curves`. `line`: if there is one curve, the stretch used last, plus `cost`. `under_clock`: see
    `bursts.BurstCost`."""

    cost: Cost
    under_clock: UnderClock
    curves: list[tuple[Curve, str, SourceKind]]
    origin: Origin
    line: Straight

    def pieces(self, sizes: Mapping[str, int], advance: Mapping[str, int], replays: int) -> list[Piece]:
        """The pieces of a burst."""
        if len(self.curves) == 1:
            # Nearly always: one size grows, on one stretch.
            curve, name, _ = self.curves[0]
            size, by, line = sizes[name], advance[name], self.line
            if not line.start <= size <= line.end:
                self.line = line = curve.at(size).beside(self.cost)
            if line.start <= size + (replays - 1) * by <= line.end:
                return [line.piece(size, by, replays)]
            return self._bent(curve, size, by, replays)
        elif not self.curves:
            return [Piece(0, replays, 0.0, self.cost, NOTHING)]
        return pieces_of(self.cost, self.curves, sizes, advance, replays)

    def _bent(self, curve: Curve, size: int, by: int, replays: int) -> list[Piece]:
        """The pieces of a burst over several stretches of one curve."""
        pieces: list[Piece] = []
        done, before_s = 0, 0.0
        while done < replays:
            stretch = curve.at(size)
            count = min(replays - done, stretch.replays(size, by))
            piece = stretch.beside(self.cost).piece(size, by, count)
            piece.first, piece.before_s = done, before_s
            pieces.append(piece)
            before_s += piece.work_s(count)
            done, size = done + count, size + count * by
        return pieces


# A stretch without sizes.
NOWHERE = Straight(0, -1, NOTHING, NOTHING)


@dataclass(slots=True)
class _Plan:
    """How a graph is priced while certain sizes grow: groups with a fixed cost (`stays`), groups that grow
    with a size (`grows`). `known`: by the sizes that do not grow, which `key` takes out of all sizes.
    `one_by_one`: whether a group reads several growing sizes."""

    graph: Graph
    stays: list[Group]
    grows: list[tuple[Group, str]]
    key: Callable[[Mapping[str, int]], Any]
    one_by_one: bool
    known: dict[Any, _Priced] = field(default_factory=dict)


class GraphPricer:
    """Prices of graphs at given sizes, for one rank, at one `end` of their intervals. Runs on the same device
    may share `groups`, or a whole GraphPricer."""

    def __init__(
        self, price: Pricer, roofline: Roofline, *, end: End = "value", groups: PricedGroups | None = None
    ) -> None:
        self._groups = groups or PricedGroups(price, roofline)
        self._end: End = end
        self._number = ENDS.index(end)
        self._plans: dict[tuple[int, tuple[str, ...]], _Plan] = {}
        # By graph and group, whether its prices are curves; and the curves, also by `Along`.
        self._bends: dict[tuple[int, int], Bends] = {}
        self._curves: dict[tuple[int, int, Along], Curve] = {}
        self._settled = False
        self._probes = False

    def settle(self) -> None:
        """From here on a price depends on its sizes alone and no longer on the prices read before it."""
        self._settled = True
        for bends in self._bends.values():
            bends.settled = True

    def settle_by_probes(self) -> None:
        """From the start, a price depends on its sizes alone: one octave (`PROBED`) says whether prices are
        curves. To be called before the first price is read."""
        self._settled = self._probes = True

    def ramp(
        self, graph: Graph, sizes: Mapping[str, int], advance: Mapping[str, int] | None, replays: int
    ) -> BurstCost:
        """The work of `replays` replays. Raises the errors of the prices."""
        if advance is None:
            advance = dict.fromkeys(graph.reads, 1) if replays > 1 else {}
        elif 0 in advance.values():
            advance = {name: by for name, by in advance.items() if by}
        key = (id(graph), tuple(advance))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(graph, advance)
        if plan.one_by_one:
            return self._one_by_one(plan, sizes, advance, replays)
        fixed = plan.key(sizes)
        priced = plan.known.get(fixed)
        if priced is None:
            if len(plan.known) >= MOST_KNOWN:
                plan.known.clear()
            priced = plan.known[fixed] = self._priced(plan, sizes)
        pieces = priced.pieces(sizes, advance, replays)
        return BurstCost(pieces, priced.origin, *priced.under_clock)

    def _plan(self, graph: Graph, advance: Mapping[str, int]) -> _Plan:
        groups = self._groups.of(graph)
        growing = set(advance)
        stays = [group for group in groups if not growing.intersection(group.reads)]
        grows = [(group, sorted(growing.intersection(group.reads))) for group in groups if group not in stays]
        together = any(len(names) > 1 for _, names in grows)
        fixed = sorted(graph.reads - growing)
        key = itemgetter(*fixed) if fixed else _no_key
        return _Plan(graph, stays, [(group, names[0]) for group, names in grows], key, together)

    def _priced(self, plan: _Plan, sizes: Mapping[str, int]) -> _Priced:
        seconds = least_s = memory_s = compute_s = 0.0
        shares: dict[SourceKind, float] = {}
        stays = [self._fixed(group, sizes) for group in plan.stays]
        for priced in stays:
            cost, parts = _at(priced, self._number), self._shares(priced)
            seconds, least_s = seconds + cost[0], least_s + cost[1]
            memory_s, compute_s = memory_s + cost[2], compute_s + cost[3]
            for source, of_source_s in parts:
                shares[source] = shares.get(source, 0.0) + of_source_s
        curves = [
            (self._curve(plan.graph, group, name, sizes), name, self._source(group, name, sizes))
            for group, name in plan.grows
        ]
        origin = Origin(tuple(shares.items()), curves[0][2] if curves else None)
        cost = (seconds, least_s, memory_s, compute_s)
        return _Priced(cost, _under_clock(stays, self._number), curves, origin, NOWHERE)

    def _one_by_one(
        self, plan: _Plan, sizes: Mapping[str, int], advance: Mapping[str, int], replays: int
    ) -> BurstCost:
        """The work of a burst priced replay by replay: several sizes of one group grow at once, and its price
        may not be linear in them."""
        pieces, before_s, now = [], 0.0, dict(sizes)
        under_clock = _under_clock([self._fixed(group, now) for group in plan.stays], self._number)
        for replay in range(replays):
            costs = [
                _at(self._fixed(group, now), self._number)
                for group in (*plan.stays, *(group for group, _ in plan.grows))
            ]
            cost = (
                sum(c[0] for c in costs),
                sum(c[1] for c in costs),
                sum(c[2] for c in costs),
                sum(c[3] for c in costs),
            )
            pieces.append(Piece(replay, 1, before_s, cost, NOTHING))
            before_s += cost[0]
            now = {name: size + advance.get(name, 0) for name, size in now.items()}
        group, name = plan.grows[0]
        return BurstCost(pieces, Origin((), self._source(group, name, sizes)), *under_clock)

    def _fixed(self, group: Group, sizes: Mapping[str, int]) -> PricedEnds:
        return self._groups.cost(group, tuple([sizes[name] for name in group.reads]))

    def _shares(self, priced: PricedEnds) -> Shares:
        return tuple([(source, seconds[self._number]) for source, seconds in priced[1]])

    def _curve(self, graph: Graph, group: Group, name: str, sizes: Mapping[str, int]) -> Curve:
        along = name, tuple([0 if other == name else sizes[other] for other in group.reads])
        key = (id(graph), id(group), along)
        curve = self._curves.get(key)
        if curve is None:
            bends = self._bends.get(key[:2])
            if bends is None:
                curved = self._probes and self._bends_at_probe(group, name)
                bends = self._bends[key[:2]] = Bends(curved=curved, settled=self._settled)
            curve = self._curves[key] = Curve(partial(self._groups.lines, group, self._end, along), bends)
        return curve

    def _bends_at_probe(self, group: Group, name: str) -> bool:
        along = name, tuple([0 if other == name else OTHERS for other in group.reads])
        return self._groups.lines(group, self._end, along, PROBED, False) is None

    def _source(self, group: Group, name: str, sizes: Mapping[str, int]) -> SourceKind:
        """The source of most of a growing group's price, read at the power of two at or below the size."""
        there = {other: sizes[other] for other in group.reads}
        there[name] = 1 << max(1, sizes[name]).bit_length() >> 1
        shares = self._shares(self._fixed(group, there))
        return max(shares, key=lambda share: share[1])[0]


def _no_key(sizes: Mapping[str, int]) -> tuple[()]:
    """The key if all sizes grow."""
    del sizes
    return ()


def straight(numbers: list[float]) -> Straight:
    """Makes a stretch from ten numbers: first and last size, first cost, slope."""
    start, end, c0, c1, c2, c3, m0, m1, m2, m3 = numbers
    return Straight(int(start), int(end), (c0, c1, c2, c3), (m0, m1, m2, m3))


def _grouped(graph: Graph) -> Iterator[tuple[tuple[str, ...], tuple[tuple[Op, int], ...]]]:
    # `bare` ops do not say which layer they are in: equal ops of all layers are counted together.
    counted: dict[frozenset[str], dict[Op, int]] = {}
    for op, count in Counter(op.without_place for op in graph.ops).items():
        counted.setdefault(op.reads, {})[op] = count
    for reads, ops in counted.items():
        yield tuple(sorted(reads)), tuple(ops.items())


def _text(op: Op) -> str:
    """A text that identifies an op and is the same in every process."""
    shape = [
        (name, value if isinstance(value, int) else (value.name, value.scale, value.more, value.most))
        for name, value in op.shape
    ]
    parts = [_text(part) for part in op.parts]
    return repr((op.kind, op.name, shape, op.dtype, op.axis, op.formula.__qualname__, parts))
