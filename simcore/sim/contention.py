"""How much graphs that run on one device at the same time slow each other down.

Fluid model. A graph that takes s seconds alone, moves b bytes and does f operations keeps a share
d = (b / bandwidth) / s of the memory and (f / peak) / s of the arithmetic busy, and its launches a share of
the host thread. Each resource is divided max-min fairly: no graph gets more than it asks for, and graphs that
ask for more share the remainder. A graph then runs at the rate of its scarcest resource:

    rate = min over resources of allotted / demanded        (1 if it demands nothing)

So two graphs that each keep the memory fully busy run at half speed, and a graph bound by arithmetic runs at
full speed beside one bound by memory. Three laws:

    max_min_rates        the above: no constant
    shared_reads(t, r)   the above, but kernels reach only the share r of the memory's rate, and instances of
                         one model that started within about t seconds of each other find the weights in the
                         cache that the instance before has just read: a gap g to it saves exp(-g / t) of the
                         memory traffic
    ... with tail_overlap_s l    also, kernels of several streams enter the device one after another, first
                         come, first served: a waiting kernel begins when all blocks of the one before have
                         begun, l seconds (the tail of one kernel, the start of the next) before the
                         next kernel of the same stream could. So kernels of a1, a2, .. seconds on n streams
                         go in rounds,
                         one kernel of each stream per round (`in_rounds`):

                             round = a1 + a2 + .. - (n - 1) l        rate_i = a_i / round

                         A kernel shorter than l keeps no other out, and no stream is faster than alone. A
                         step of many small kernels almost stands still beside kernels a hundred times as
                         long. l = infinity is the law above; with l = 0 kernels run strictly in turns
    ... with kernels_between k   also, beside a stream whose work arithmetic bounds (the products of a prompt,
                         some of which have fewer blocks than the device has room for), of each stream that
                         memory bounds k kernels get in between two of its kernels: a round is
                         a1 + k a2 - k l, and the other's rate k a2 / round. No stream gets more than an even
                         share of the memory; where kernels in rounds want more of it than there is, what
                         arithmetic bounds comes first, up to the share FIRST, and the others share the rest
    throughput(c)        n instances together do 1 + c (n - 1) times the work of one, whatever they run

The constants t, r, l, k and c are for calibration (accuracy.contention). Not modelled: which kernels have few
blocks, and so leave room for others (k is their mean), and the interference of collectives (they run at their
own price). A calibrated device may use its own function instead.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, inf, nan
from operator import itemgetter, mul
from typing import Any


# Not frozen, and with a written-out constructor, for speed: see trace.py.
@dataclass(slots=True, init=False)
class Demand:
    """The share of each resource that a graph keeps busy while it runs alone, 0 to 1: of the memory, the
    arithmetic and the host thread. `since_s`: when its stream last began to work; `kernels_per_s`: kernels
    that it launches per second of its time alone. Never changed."""

    memory: float
    compute: float
    launch: float
    since_s: float
    kernels_per_s: float

    def __init__(
        self,
        memory: float,
        compute: float,
        launch: float = 0.0,
        since_s: float = 0.0,
        kernels_per_s: float = 0.0,
    ) -> None:
        self.memory = memory
        self.compute = compute
        self.launch = launch
        self.since_s = since_s
        self.kernels_per_s = kernels_per_s


Rates = Callable[[Sequence[Demand]], list[float]]

# Bounds of the seconds that a kernel takes and leaves, so that no rate is 0.
LONGEST_S, LEAST_S = 1e5, 1e-15
# The rounding error of sums of shares.
ROUNDING = 1e-12
# The share of the memory that streams bound by arithmetic get before all others. An assumption: beside one
# other stream it is what is fair, and beside many what was measured does not reach it.
FIRST = 0.5


def max_min_shares(demands: Sequence[float], capacity: float = 1.0) -> list[float]:
    """Max-min fair division of a capacity.

    >>> max_min_shares([0.2, 0.9, 0.9])
    [0.2, 0.4, 0.4]
    """
    level = _level(demands, capacity)
    return [min(demand, level) for demand in demands]


def _level(demands: Sequence[float], capacity: float) -> float:
    """The most that anyone gets in a max-min fair division; infinite if there is enough for all."""
    if sum(demands) <= capacity:
        return inf
    left, waiting = capacity, len(demands)
    for demand in sorted(demands):
        level = left / waiting
        if demand >= level:
            return level
        left -= demand
        waiting -= 1
    # The sum exceeds the capacity only by rounding.
    return inf


def max_min_rates(running: Sequence[Demand]) -> list[float]:
    """Speed of each running graph relative to running alone, 0 to 1.

    >>> max_min_rates([Demand(1.0, 0.1), Demand(1.0, 0.1)])
    [0.5, 0.5]
    """
    return _rates(running, 1.0)


class Crowd(Sequence[Demand]):
    """The demands of graphs beside each other on a device, in columns, as input of a law. When one demand
    changes, the law's intermediate results for the others stay."""

    __slots__ = ("_demands", "_law", "_stale", "arithmetic", "compute", "even", "launch", "memory", "turns")

    def __init__(self, demands: Iterable[Demand] = ()) -> None:
        self._demands: list[Demand] = []
        self.memory: list[float] = []
        self.compute: list[float] = []
        self.launch: list[float] = []
        # How many are bound by arithmetic.
        self.arithmetic = 0
        # A column for each part of `Turn`; the law's constants; the indices whose turns are out of date.
        self.turns: tuple[list[float], ...] = ([], [], [], [])
        self._law: tuple[float, ...] = ()
        self._stale: list[int] = []
        self.even = _Even()
        for demand in demands:
            self.join(demand)

    def __len__(self) -> int:
        return len(self._demands)

    def __getitem__(self, i: Any) -> Any:
        return self._demands[i]

    def __iter__(self) -> Iterator[Demand]:
        return iter(self._demands)

    def bound_by_arithmetic(self) -> list[int]:
        """The indices of those that are bound by arithmetic."""
        if not self.arithmetic:
            return []
        return [i for i in range(len(self)) if self.compute[i] > self.memory[i]]

    def join(self, demand: Demand) -> None:
        """Adds a demand at the end."""
        self._stale.append(len(self))
        self._demands.append(demand)
        self.arithmetic += demand.compute > demand.memory
        self.memory.append(demand.memory)
        self.compute.append(demand.compute)
        self.launch.append(demand.launch)
        for column in self.turns:
            column.append(0.0)

    def leave(self, i: int) -> None:
        """Removes demand i; those behind it move up."""
        self._stale = [other - (other > i) for other in self._stale if other != i]
        self.arithmetic -= self.compute[i] > self.memory[i]
        self.even.level = nan
        for column in (self._demands, self.memory, self.compute, self.launch, *self.turns):
            del column[i]  # type: ignore[attr-defined]

    def change(self, i: int, demand: Demand) -> None:
        """Replaces demand i."""
        if not self._stale or self._stale[-1] != i:
            self._stale.append(i)
        self.arithmetic += (demand.compute > demand.memory) - (self.compute[i] > self.memory[i])
        self._demands[i] = demand
        self.memory[i], self.compute[i], self.launch[i] = demand.memory, demand.compute, demand.launch

    def work_out(
        self, memory: float, tail_overlap_s: float, bandwidth_share: float, kernels_between: float
    ) -> None:
        """Updates `turns` and `even` by a law, for the demands that have changed."""
        law = memory, tail_overlap_s, bandwidth_share, kernels_between if self.arithmetic else 1.0
        if self._law != law:
            self._law, self._stale, self.even.level = law, list(range(len(self))), nan
        leaves, keeps, reads, computes = self.turns
        for i in self._stale:
            leaves[i], keeps[i], reads[i], computes[i] = _turn(self._demands[i], *law)
        level = memory / len(self)
        if self.even.level != level:
            self.even.level = level
            self.even.begin(self)
        else:
            for i in self._stale:
                self.even.note(self, i)
        self._stale.clear()


# Per second of a graph's time alone: leaves, the share in which other streams' kernels may begin, over how
# many of its kernels are in a round; keeps, the rest over leaves; reads, the share in which it keeps the
# memory busy or all others out; computes, likewise for the arithmetic.
Turn = tuple[float, float, float, float]


def _turn(
    demand: Demand, memory: float, tail_overlap_s: float, bandwidth_share: float, kernels_between: float
) -> Turn:
    take = 1.0
    if memory != bandwidth_share:
        # Kernels that find their operands in the cache are shorter by the time of those reads.
        take = max(LEAST_S, 1.0 - demand.memory * (1.0 / bandwidth_share - 1.0 / memory))
    leave = _leave(take, demand.kernels_per_s, tail_overlap_s)
    # While a kernel keeps the others out, they neither read nor compute.
    keep = take - tail_overlap_s * demand.kernels_per_s
    in_round = 1.0 if demand.compute > demand.memory else kernels_between
    keeps, reads = in_round * (take - leave) / leave, max(demand.memory / memory, keep)
    return leave / in_round, keeps, reads, max(demand.compute, keep)


@dataclass(slots=True)
class _Even:
    """If no graph gets more of the memory than `level`: the rates, and rate times leaves, reads and computes
    of each turn."""

    level: float = nan
    rates: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)

    def begin(self, crowd: Crowd) -> None:
        """Computes the values of all demands."""
        level, (leaves, _, reads, computes) = self.level, crowd.turns
        self.rates = [level / memory if memory > level else 1.0 for memory in crowd.memory]
        self.left = list(map(mul, self.rates, leaves))
        self.read = list(map(mul, self.rates, reads))
        self.computed = list(map(mul, self.rates, computes))

    def note(self, crowd: Crowd, i: int) -> None:
        """Computes the values of demand i."""
        memory, (leaves, _, reads, computes) = crowd.memory[i], crowd.turns
        self.rates[i] = rate = self.level / memory if memory > self.level else 1.0
        self.left[i], self.read[i], self.computed[i] = rate * leaves[i], rate * reads[i], rate * computes[i]


def _even_rates(crowd: Crowd) -> list[float] | None:
    """Rates if an even share of the memory is the only limit, which is the usual case: each rate then depends
    on the graph's own demand. Else None."""
    even, (leaves, keeps, _, _) = crowd.even, crowd.turns
    if min(crowd.memory) < even.level or sum(crowd.compute) > 1.0 or sum(crowd.launch) > 1.0:
        return None
    free = 1.0 / (1.0 + sum(keeps))
    if free > min(leaves) or free < max(even.left):
        return None
    # Even shares add up to the whole except for rounding.
    if sum(even.read) > 1.0 + ROUNDING or sum(even.computed) > 1.0 + ROUNDING:
        return None
    return even.rates.copy()


def _rates(
    running: Sequence[Demand],
    memory: float,
    tail_overlap_s: float = inf,
    bandwidth_share: float = 1.0,
    kernels_between: float = 1.0,
) -> list[float]:
    """Rates if the memory serves `memory` times its datasheet's rate; without reuse, `bandwidth_share`."""
    if len(running) == 1:
        return [1.0]
    crowd = running if isinstance(running, Crowd) else Crowd(running)
    if tail_overlap_s == inf:
        return _fair_rates(crowd, memory)
    crowd.work_out(memory, tail_overlap_s, bandwidth_share, kernels_between)
    even = _even_rates(crowd)
    if even is not None:
        return even
    leaves, keeps, reads, computes = crowd.turns
    free = _free(leaves, keeps)
    rates = [
        free / leave if free < leave * rate else rate
        for rate, leave in zip(_fair_rates(crowd, memory), leaves, strict=True)
    ]
    first = crowd.bound_by_arithmetic() if kernels_between != 1.0 else []
    return _within(_within(rates, reads, first), computes, [])


def _within(rates: list[float], busy: Sequence[float], first: Sequence[int]) -> list[float]:
    """Rates by which nothing gets more of a resource, of which each keeps `busy` busy, than is fair: what the
    graphs `first` ask for comes first, up to FIRST and beyond that what the others leave."""
    asked = list(map(mul, rates, busy))
    level = _level(asked, 1.0)
    if level == inf:
        return rates
    levels = [level] * len(rates)
    if first:
        mine = [asked[i] for i in first]
        others = [each for i, each in enumerate(asked) if i not in first]
        most = max(FIRST, 1.0 - sum(others))
        levels = [_level(others, 1.0 - min(sum(mine), most))] * len(rates)
        for i in first:
            levels[i] = _level(mine, most)
    each = zip(rates, asked, levels, strict=True)
    return [rate * level / ask if ask > level else rate for rate, ask, level in each]


def _fair_rates(crowd: Crowd, memory: float) -> list[float]:
    """Rates if no kernel keeps others out."""
    rates = [1.0] * len(crowd)
    for demands, capacity in ((crowd.memory, memory), (crowd.compute, 1.0), (crowd.launch, 1.0)):
        level = _level(demands, capacity)
        if level < inf:
            rates = [
                level / demand if demand * rate > level else rate
                for rate, demand in zip(rates, demands, strict=True)
            ]
    return rates


def _leave(take: float, kernels_per_s: float, tail_overlap_s: float) -> float:
    """The share of a stream's time alone in which its kernels keep no others out."""
    most = max(LEAST_S, tail_overlap_s)
    return min(take, max(most / LONGEST_S, most * kernels_per_s))


def _free(leaves: Sequence[float], keeps: Sequence[float]) -> float:
    """The share x of time in which no kernel is kept out (`in_rounds`); `keeps` is divided by leaves."""
    free = 1.0 / (1.0 + sum(keeps))
    if free <= min(leaves):
        return free
    order = sorted(zip(leaves, keeps, strict=True))
    # The sum of `keeps` from each place in the order on: summed from the end, because the first terms are
    # larger by many powers of ten.
    slowed = list(accumulate([kept for _, kept in reversed(order)]))
    full = free = 0.0
    for leave, kept in order:
        free = (1.0 - full) / (1.0 + slowed.pop())
        if free <= leave:
            break
        full += kept * leave
    return free


def in_rounds(
    takes: Sequence[float],
    kernels_per_s: Sequence[float],
    tail_overlap_s: float,
    in_a_round: Sequence[float] | None = None,
) -> list[float]:
    """Rates of streams whose kernels enter the device one after another. `takes`: the share of a stream's
    time alone that its kernels take (1: all of it); `kernels_per_s`: its kernels per second alone;
    `in_a_round`: how many of its kernels are in a round (1 of each, if left out).

    Each kernel keeps others out except for tail_overlap_s: keeps = takes - leaves, with
    leaves = min(takes, tail_overlap_s kernels_per_s). In the share x of time in which no kernel is kept out,
    all streams start as many kernels as they have in a round, n:

        rate_i = min(1, x n_i / leaves_i)        x + sum of rate_i keeps_i = 1

    so each stream runs or is kept out by others all the time, unless it runs as if alone.

    Kernels of 60 and 20 us; a round takes 60 + 20 - 16:

    >>> [round(rate, 9) for rate in in_rounds([1.0, 1.0], [1 / 60e-6, 1 / 20e-6], 16e-6)]
    [0.9375, 0.3125]
    """
    counts = [1.0] * len(takes) if in_a_round is None else in_a_round
    leaves = [_leave(take, each, tail_overlap_s) for take, each in zip(takes, kernels_per_s, strict=True)]
    keeps = [n * (take - leave) / leave for take, leave, n in zip(takes, leaves, counts, strict=True)]
    leaves = [leave / n for leave, n in zip(leaves, counts, strict=True)]
    free = _free(leaves, keeps)
    return [1.0 if free >= leave else free / leave for leave in leaves]


def shared_reads(
    reuse_s: float,
    bandwidth_share: float = 1.0,
    tail_overlap_s: float = inf,
    kernels_between: float = 1.0,
) -> Rates:
    """The law for weights found in the cache (see the head of this file); `reuse_s` 0 means no reuse.
    `bandwidth_share`: the share of the datasheet's memory rate that kernels reach, alone or together.
    `tail_overlap_s`: seconds of each kernel in which another stream's kernel may begin. `kernels_between`:
    kernels of a stream bound by memory between two of a stream bound by arithmetic.

    >>> both = [Demand(1.0, 0.0, since_s=0.0), Demand(1.0, 0.0, since_s=0.0)]
    >>> shared_reads(0.01)(both)
    [1.0, 1.0]
    """

    def rates(running: Sequence[Demand]) -> list[float]:
        if len(running) == 1 or reuse_s == 0.0:
            return _rates(running, bandwidth_share, tail_overlap_s, bandwidth_share, kernels_between)
        order = sorted([(demand.since_s, demand.memory) for demand in running], key=itemgetter(0))
        before_s, read = order[0]
        for since_s, memory in order[1:]:
            read += memory * (1.0 - exp((before_s - since_s) / reuse_s))
            before_s = since_s
        asked = sum([demand.memory for demand in running])
        return _rates(
            running,
            bandwidth_share * asked / read if read > 0.0 else bandwidth_share,
            tail_overlap_s,
            bandwidth_share,
            kernels_between,
        )

    return rates


def off_by(law: Rates, factor: float) -> Rates:
    """A law by which slowed graphs run `factor` times as fast as `law` says, but no faster than alone.

    >>> off_by(max_min_rates, 1.2)([Demand(1.0, 0.0), Demand(1.0, 0.0)])
    [0.6, 0.6]
    """

    def rates(running: Sequence[Demand]) -> list[float]:
        return [min(1.0, factor * rate) if rate < 1.0 else rate for rate in law(running)]

    return law if factor == 1.0 else rates


def throughput(gain: float) -> Rates:
    """The law 1 + gain (n - 1) for the throughput of n instances.

    >>> throughput(0.05)([Demand(1.0, 0.0)] * 5)
    [0.24, 0.24, 0.24, 0.24, 0.24]
    """

    def rates(running: Sequence[Demand]) -> list[float]:
        n = len(running)
        return [min(1.0, (1.0 + gain * (n - 1)) / n)] * n

    return rates


def alone(running: Sequence[Demand]) -> list[float]:
    """No contention: each graph runs as if alone."""
    return [1.0] * len(running)
