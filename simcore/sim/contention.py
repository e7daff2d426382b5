"""How much graphs that run on one device at the same time slow each other down.

Fluid model. A graph that takes s seconds alone and has to move b bytes and do f operations keeps a
share d = (b / bandwidth) / s of the memory and (f / peak) / s of the arithmetic busy, and its launches a
share of the host's thread. Each resource is divided max-min fairly: nobody gets more than it asks for, and
what the modest leave over goes to the greedy. A graph then runs at the rate of its scarcest resource:

    rate = min over resources of allotted / demanded        (1 where it demands nothing)

So two graphs that each keep the memory fully busy run at half speed, and one that is bound by
arithmetic runs beside one that is bound by memory at full speed. What is known ends there. Three laws:

    max_min_rates        the above: no constant
    shared_reads(t, r)   the above with the share r of the memory's rate that kernels reach, and instances of
                         one model that started within about t seconds of each other find the weights in the
                         cache that the one before has just read: a gap g to it saves exp(-g / t) of the
                         memory traffic
    ... with leaves_s l  besides, kernels of several streams get in one after another, first come, first
                         served: one that waits begins when all blocks of the one before have begun, l seconds
                         (its end, the other's start) before that one could follow itself. So kernels of
                         a1, a2, .. seconds on n streams go in rounds, one of each a round (`in_rounds`):

                             round = a1 + a2 + .. - (n - 1) l        rate_i = a_i / round

                         What is shorter than l keeps nobody out, and nobody is faster than alone. A step of
                         many small kernels all but stands still beside kernels of a hundred times their
                         length. l = infinity is the law above; with l = 0 kernels run strictly in turns
    throughput(c)        n instances together do 1 + c (n - 1) times what one does, whatever they run

The constants t, r, l and c are for calibration (accuracy.contention). Not modelled: kernels of few blocks,
beside which others find room (a long kernel is taken to fill the device), and the interference of
collectives (they run at their own price). A calibrated device may put its own function in the place of
these.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, inf, nan
from operator import itemgetter, mul
from typing import Any


# Not frozen, and written out, for the time that it takes: see trace.py.
@dataclass(slots=True, init=False)
class Demand:
    """Share of each resource that a graph keeps busy while it runs alone, 0 to 1: of the memory, the
    arithmetic and the host's thread. `since_s`: when its stream last began to work; `kernels_per_s`: how many
    kernels it launches in a second of its time alone. Nobody changes it."""

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

# Bounds of what a kernel takes and leaves, in seconds, so that nobody's rate is nothing.
LONGEST_S, LEAST_S = 1e5, 1e-15
# What sums of shares may be off by.
ROUNDING = 1e-12


def max_min_shares(demands: Sequence[float], capacity: float = 1.0) -> list[float]:
    """Max-min fair division of a capacity.

    >>> max_min_shares([0.2, 0.9, 0.9])
    [0.2, 0.4, 0.4]
    """
    level = _level(demands, capacity)
    return [min(demand, level) for demand in demands]


def _level(demands: Sequence[float], capacity: float) -> float:
    """What nobody gets more of in a max-min fair division; infinite where there is enough for all."""
    if sum(demands) <= capacity:
        return inf
    left, waiting = capacity, len(demands)
    for demand in sorted(demands):
        level = left / waiting
        if demand >= level:
            return level
        left -= demand
        waiting -= 1
    # The sum exceeds the capacity by its rounding only.
    return inf


def max_min_rates(running: Sequence[Demand]) -> list[float]:
    """Speed of each running graph relative to running alone, 0 to 1.

    >>> max_min_rates([Demand(1.0, 0.1), Demand(1.0, 0.1)])
    [0.5, 0.5]
    """
    return _rates(running, 1.0)


class Crowd(Sequence[Demand]):
    """What graphs beside each other ask of a device, in columns, for a law to go over. Where one asks for
    something else, what a law makes of the others stays."""

    __slots__ = ("_demands", "_law", "_stale", "compute", "even", "launch", "memory", "turns")

    def __init__(self, demands: Iterable[Demand] = ()) -> None:
        self._demands: list[Demand] = []
        self.memory: list[float] = []
        self.compute: list[float] = []
        self.launch: list[float] = []
        # Leaves, keeps, reads and computes (`Turn`), a column each; by what law; whose no longer hold.
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

    def join(self, demand: Demand) -> None:
        """One more, the last from here on."""
        self._stale.append(len(self))
        self._demands.append(demand)
        self.memory.append(demand.memory)
        self.compute.append(demand.compute)
        self.launch.append(demand.launch)
        for column in self.turns:
            column.append(0.0)

    def leave(self, i: int) -> None:
        """One less; those behind it move up."""
        self._stale = [other - (other > i) for other in self._stale if other != i]
        self.even.level = nan
        for column in (self._demands, self.memory, self.compute, self.launch, *self.turns):
            del column[i]  # type: ignore[attr-defined]

    def change(self, i: int, demand: Demand) -> None:
        """One asks for something else."""
        if not self._stale or self._stale[-1] != i:
            self._stale.append(i)
        self._demands[i] = demand
        self.memory[i], self.compute[i], self.launch[i] = demand.memory, demand.compute, demand.launch

    def work_out(self, memory: float, leaves_s: float, reach: float) -> None:
        """Works out `turns` and `even` of whoever asks for something else than before, by a law."""
        law = memory, leaves_s, reach
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


# By second of its time alone: how much of it others may begin in; the rest, over that; the share in which it
# keeps the memory, or everybody, busy; likewise the arithmetic.
Turn = tuple[float, float, float, float]


def _turn(demand: Demand, memory: float, leaves_s: float, reach: float) -> Turn:
    take = 1.0
    if memory != reach:
        # Kernels that find their operands in the cache are shorter by what they need not read.
        take = max(LEAST_S, 1.0 - demand.memory * (1.0 / reach - 1.0 / memory))
    leave = _leave(take, demand.kernels_per_s, leaves_s)
    # While one keeps the others out, they neither read nor compute.
    keep = take - leaves_s * demand.kernels_per_s
    return leave, (take - leave) / leave, max(demand.memory / memory, keep), max(demand.compute, keep)


@dataclass(slots=True)
class _Even:
    """If nobody gets more of the memory than `level`: rates, and what is then asked of each turn."""

    level: float = nan
    rates: list[float] = field(default_factory=list)
    left: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)

    def begin(self, crowd: Crowd) -> None:
        """Works out those of all."""
        level, (leaves, _, reads, computes) = self.level, crowd.turns
        self.rates = [level / memory if memory > level else 1.0 for memory in crowd.memory]
        self.left = list(map(mul, self.rates, leaves))
        self.read = list(map(mul, self.rates, reads))
        self.computed = list(map(mul, self.rates, computes))

    def note(self, crowd: Crowd, i: int) -> None:
        """Works out those of one."""
        memory, (leaves, _, reads, computes) = crowd.memory[i], crowd.turns
        self.rates[i] = rate = self.level / memory if memory > self.level else 1.0
        self.left[i], self.read[i], self.computed[i] = rate * leaves[i], rate * reads[i], rate * computes[i]


def _even_rates(crowd: Crowd) -> list[float] | None:
    """Rates where an even share of the memory is all that holds anybody back, which is the usual case: then
    they hang on nobody else's demand. None where it is not so."""
    even, (leaves, keeps, _, _) = crowd.even, crowd.turns
    if min(crowd.memory) < even.level or sum(crowd.compute) > 1.0 or sum(crowd.launch) > 1.0:
        return None
    free = 1.0 / (1.0 + sum(keeps))
    if free > min(leaves) or free < max(even.left):
        return None
    # Even shares are all there is but for their rounding.
    if sum(even.read) > 1.0 + ROUNDING or sum(even.computed) > 1.0 + ROUNDING:
        return None
    return even.rates.copy()


def _rates(
    running: Sequence[Demand], memory: float, leaves_s: float = inf, reach: float = 1.0
) -> list[float]:
    """Rates where the memory serves `memory` times its datasheet's rate, of which `reach` is no reuse."""
    if len(running) == 1:
        return [1.0]
    crowd = running if isinstance(running, Crowd) else Crowd(running)
    if leaves_s == inf:
        return _fair_rates(crowd, memory)
    crowd.work_out(memory, leaves_s, reach)
    even = _even_rates(crowd)
    if even is not None:
        return even
    leaves, keeps, reads, computes = crowd.turns
    free = _free(leaves, keeps)
    rates = [
        free / leave if free < leave * rate else rate
        for rate, leave in zip(_fair_rates(crowd, memory), leaves, strict=True)
    ]
    for busy in (reads, computes):
        asked = list(map(mul, rates, busy))
        level = _level(asked, 1.0)
        if level < inf:
            rates = [r * level / a if a > level else r for r, a in zip(rates, asked, strict=True)]
    return rates


def _fair_rates(crowd: Crowd, memory: float) -> list[float]:
    """Rates where nobody keeps others out."""
    rates = [1.0] * len(crowd)
    for demands, capacity in ((crowd.memory, memory), (crowd.compute, 1.0), (crowd.launch, 1.0)):
        level = _level(demands, capacity)
        if level < inf:
            rates = [
                level / demand if demand * rate > level else rate
                for rate, demand in zip(rates, demands, strict=True)
            ]
    return rates


def _leave(take: float, kernels_per_s: float, leaves_s: float) -> float:
    """The share of its time alone in which a stream's kernels keep nobody out."""
    most = max(LEAST_S, leaves_s)
    return min(take, max(most / LONGEST_S, most * kernels_per_s))


def _free(leaves: Sequence[float], keeps: Sequence[float]) -> float:
    """The share x of time in which nobody is kept out (`in_rounds`); `keeps` is over leaves."""
    free = 1.0 / (1.0 + sum(keeps))
    if free <= min(leaves):
        return free
    order = sorted(zip(leaves, keeps, strict=True))
    # Seconds that those from each place in the order on keep others out, by second in which nobody is: summed
    # from the end, for the first are larger by many powers of ten.
    slowed = list(accumulate([kept for _, kept in reversed(order)]))
    full = free = 0.0
    for leave, kept in order:
        free = (1.0 - full) / (1.0 + slowed.pop())
        if free <= leave:
            break
        full += kept * leave
    return free


def in_rounds(takes: Sequence[float], kernels_per_s: Sequence[float], leaves_s: float) -> list[float]:
    """Rates of streams whose kernels get in one after another. `takes`: the share of their time alone that
    kernels take (1: all of it); `kernels_per_s`: how many they are in a second alone.

    Of the time alone, kernels keep others out but for leaves_s each: keeps = takes - leaves, with
    leaves = min(takes, leaves_s kernels_per_s). In the share x of time in which nobody is kept out all get in
    equally many kernels:

        rate_i = min(1, x / leaves_i)        x + sum of rate_i keeps_i = 1

    so that each is done or kept out by others all the time, unless it runs as if alone.

    Kernels of 60 and 20 us; a round takes 60 + 20 - 16:

    >>> [round(rate, 9) for rate in in_rounds([1.0, 1.0], [1 / 60e-6, 1 / 20e-6], 16e-6)]
    [0.9375, 0.3125]
    """
    leaves = [_leave(take, each, leaves_s) for take, each in zip(takes, kernels_per_s, strict=True)]
    free = _free(leaves, [(take - leave) / leave for take, leave in zip(takes, leaves, strict=True)])
    return [1.0 if free >= leave else free / leave for leave in leaves]


def shared_reads(reuse_s: float, reach: float = 1.0, leaves_s: float = inf) -> Rates:
    """The law that reckons with weights found in the cache; `reuse_s` 0 is `max_min_rates`. `reach`: the
    share of the datasheet's memory rate that kernels reach, beyond which several together do not get either.
    `leaves_s`: seconds of each kernel in which another stream's may begin.

    >>> both = [Demand(1.0, 0.0, since_s=0.0), Demand(1.0, 0.0, since_s=0.0)]
    >>> shared_reads(0.01)(both)
    [1.0, 1.0]
    """

    def rates(running: Sequence[Demand]) -> list[float]:
        if len(running) == 1 or reuse_s == 0.0:
            return _rates(running, reach, leaves_s, reach)
        order = sorted([(demand.since_s, demand.memory) for demand in running], key=itemgetter(0))
        before_s, read = order[0]
        for since_s, memory in order[1:]:
            read += memory * (1.0 - exp((before_s - since_s) / reuse_s))
            before_s = since_s
        asked = sum([demand.memory for demand in running])
        return _rates(running, reach * asked / read if read > 0.0 else reach, leaves_s, reach)

    return rates


def off_by(law: Rates, factor: float) -> Rates:
    """A law by which whoever is slowed down runs `factor` times as fast as `law` says, but no faster than
    alone.

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
    """No contention: everybody runs as if alone."""
    return [1.0] * len(running)
