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
    ... with leaves_s l  besides, a kernel holds the multiprocessors while it waits: of the time in which a
                         graph keeps neither memory nor arithmetic busy (its price over its floor), l seconds
                         a kernel are its start and its end, which leave the device to others; for the rest,

                             held = max(0, 1 - max(memory / r, compute) - l * kernels a second)

                         nobody else computes or reads. l = infinity holds nothing, which is the law above;
                         with l = 0 graphs that are far from both bounds run in turns
    throughput(c)        n instances together do 1 + c (n - 1) times what one does, whatever they run

The constants t, r, l and c are for calibration (`validate.contention`). Not modelled: the interference of
collectives (they run at their own price). A calibrated device may put its own function in the place of
these.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf


@dataclass(frozen=True, slots=True)
class Demand:
    """Share of each resource that a graph keeps busy while it runs alone, 0 to 1: of the memory, the
    arithmetic and the host's thread. `since_s`: when its stream last began to work; `kernels_per_s`: how many
    kernels it launches in a second of its time alone."""

    memory: float
    compute: float
    launch: float = 0.0
    since_s: float = 0.0
    kernels_per_s: float = 0.0


Rates = Callable[[Sequence[Demand]], list[float]]


def max_min_shares(demands: Sequence[float], capacity: float = 1.0) -> list[float]:
    """Max-min fair division of a capacity.

    >>> max_min_shares([0.2, 0.9, 0.9])
    [0.2, 0.4, 0.4]
    """
    shares = [0.0] * len(demands)
    left = capacity
    order = sorted(range(len(demands)), key=lambda i: demands[i])
    for served, i in enumerate(order):
        shares[i] = min(demands[i], left / (len(order) - served))
        left -= shares[i]
    return shares


def max_min_rates(running: Sequence[Demand]) -> list[float]:
    """Speed of each running graph relative to running alone, 0 to 1.

    >>> max_min_rates([Demand(1.0, 0.1), Demand(1.0, 0.1)])
    [0.5, 0.5]
    """
    return _rates(running, 1.0)


def _rates(
    running: Sequence[Demand], memory: float, leaves_s: float = inf, reach: float = 1.0
) -> list[float]:
    """Rates where the memory serves `memory` times its datasheet's rate, of which `reach` is no reuse."""
    if len(running) == 1:
        return [1.0]
    rates = [1.0] * len(running)
    held = [held_share(d, leaves_s, reach) for d in running]
    # Seconds of the device, of which the memory works off `memory` times as much.
    _limit(rates, [d.memory + h * memory for d, h in zip(running, held, strict=True)], memory)
    _limit(rates, [d.compute + h for d, h in zip(running, held, strict=True)], 1.0)
    _limit(rates, [d.launch for d in running], 1.0)
    return rates


def held_share(demand: Demand, leaves_s: float, reach: float = 1.0) -> float:
    """The share of its time alone in which a graph only waits and yet lets nobody else have the
    multiprocessors, 0 to 1; `leaves_s`: seconds a kernel that are not so; `reach`: the share of
    the memory's rate at which it is busy all the time.

    >>> held_share(Demand(0.5, 0.1, kernels_per_s=1000), 0.00025)
    0.25
    """
    if leaves_s == inf:
        return 0.0
    idle = 1.0 - max(demand.memory / reach, demand.compute)
    return max(0.0, idle - leaves_s * demand.kernels_per_s)


def _limit(rates: list[float], demands: Sequence[float], capacity: float) -> None:
    if sum(demands) > capacity:
        for i, share in enumerate(max_min_shares(demands, capacity)):
            if demands[i] > 0.0:
                rates[i] = min(rates[i], share / demands[i])


def shared_reads(reuse_s: float, reach: float = 1.0, leaves_s: float = inf) -> Rates:
    """The law that reckons with weights found in the cache; `reuse_s` 0 is `max_min_rates`. `reach`: the
    share of the datasheet's memory rate that kernels reach, beyond which several together do not get either.
    `leaves_s`: seconds of each kernel that leave the device to others though it neither reads nor computes.

    >>> both = [Demand(1.0, 0.0, since_s=0.0), Demand(1.0, 0.0, since_s=0.0)]
    >>> shared_reads(0.01)(both)
    [1.0, 1.0]
    """

    def rates(running: Sequence[Demand]) -> list[float]:
        if len(running) == 1 or reuse_s == 0.0:
            return _rates(running, reach, leaves_s, reach)
        order = sorted(running, key=lambda demand: demand.since_s)
        read = order[0].memory
        for before, demand in pairwise(order):
            read += demand.memory * (1.0 - exp((before.since_s - demand.since_s) / reuse_s))
        asked = sum(demand.memory for demand in running)
        return _rates(running, reach * asked / read if read > 0.0 else reach, leaves_s, reach)

    return rates


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
