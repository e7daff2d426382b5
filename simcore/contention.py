"""How much graphs that run on one device at the same time slow each other down.

Fluid model. A graph that takes s seconds alone and has to move b bytes and do f operations keeps a
share d = (b / bandwidth) / s of the memory and (f / peak) / s of the arithmetic busy. Each resource is
divided max-min fairly: nobody gets more than it asks for, and what the modest leave over goes to the
greedy. A graph then runs at the rate of its scarcest resource:

    rate = min over resources of allotted / demanded        (1 where it demands nothing)

So two graphs that each keep the memory fully busy run at half speed, and one that is bound by
arithmetic runs beside one that is bound by memory at full speed. Not modelled: cache thrash, the
interference of launches, collectives (they run at their own price). A calibrated device may put its
own function in the place of `max_min_rates`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Demand:
    """Share of each resource that a graph keeps busy while it runs alone, 0 to 1."""

    memory: float
    compute: float


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
    if len(running) == 1:
        return [1.0]
    rates = [1.0] * len(running)
    for demands in ([d.memory for d in running], [d.compute for d in running]):
        if sum(demands) > 1.0:
            for i, share in enumerate(max_min_shares(demands)):
                if demands[i] > 0.0:
                    rates[i] = min(rates[i], share / demands[i])
    return rates
