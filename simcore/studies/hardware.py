"""A device as a study needs it: prices, memory, overheads."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

from simcore.machine.machine import Overheads
from simcore.models.decoder import Dtypes, Style
from simcore.ops.op import Op, Price, Pricer, Roofline
from simcore.sim.contention import Rates, max_min_rates
from simcore.sim.kept import KeptPrices
from simcore.sim.power import PowerLimit
from simcore.sim.runs import Start, simulated


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device; simcore.assembly makes it.

    `price(ranks, link_latency_s, free)`: prices at a tensor-parallel rank count, at another start-up
    latency of the link if one is given, and with or without the times that the profile assumes.
    `link_latency_s`: the link's own, s; None if a profile prices collectives. `max_devices`: how
    many the link connects. `usable(ranks)`: the reason why the profile lacks this rank count, or None.
    `chunk`: tokens of the first and of the last part that a speculative attention attends over early.
    `memory_bandwidth_share`: the share of the datasheet's memory rate that kernels reach, with prices as they
    are ("value") and at the ends of their intervals ("low" prices reach most, "high" ones least).
    `tail_overlap_s`: seconds of each kernel in which one of another stream may begin. `kernels_between`:
    in services, kernels of a stream bound by memory between two of one bound by arithmetic.
    `contention_error`: factor by which concurrent graphs may be faster, by end; 1 if only that share is
    known.
    `parts`: only attention and the rest of a layer are priced; `whole`: only whole iterations are.
    `start`: starts programs there; `repeats`: runs per case, of which the median counts (times on a real
    machine vary: `measured`). `hbm_bytes_per_s`: the datasheet's. `processors`: units that run the blocks of
    a kernel. `jobs`: the most processes that simulate. `kept`: the store of graph prices for other runs.
    `power`: the limit of its power, None if nothing is known of it.
    `of_our_schedule`: names of those `overheads` that a calibration measured of this project's own schedule.
    `multiplies`: the number formats that it multiplies; none: all.
    `normed_sums`: whether a sum over ranks takes the residual and the norm behind it along.
    `vendor`: who makes it, empty if unknown; `board_power_w`: most that one takes, W, None if unknown.
    """

    name: str
    price: Callable[[int, float | None, bool], Pricer]
    roofline: Roofline
    overheads: Overheads
    memory_bytes: float
    hbm_bytes_per_s: float
    max_devices: int
    link_latency_s: float | None
    style: Callable[[int], Style]
    usable: Callable[[int], str | None]
    dtypes: Dtypes
    chunk: int
    parts: bool
    memory_bandwidth_share: Mapping[str, float]
    contention_error: Mapping[str, float]
    whole: bool = False
    tail_overlap_s: float = inf
    kernels_between: float = 1.0
    start: Start = simulated
    repeats: int = 1
    processors: int = 0
    jobs: int = 1
    kept: KeptPrices | None = None
    power: PowerLimit | None = None
    of_our_schedule: Collection[str] = ()
    multiplies: Collection[str] = ()
    normed_sums: bool = False
    vendor: str = ""
    board_power_w: float | None = None

    @property
    def multiplied(self) -> Dtypes:
        """The number formats in which weights are multiplied here."""
        return self.dtypes.multiplied(self.multiplies) if self.multiplies else self.dtypes

    @property
    def measured(self) -> bool:
        """Whether times are measured, not predicted."""
        return self.start is not simulated

    @property
    def doing(self) -> str:
        """The word for a run here in progress lines."""
        return "measuring" if self.measured else "simulating"


@dataclass(frozen=True, slots=True)
class SingleDevice:
    """A device as a study of a single device needs it. `choose`: the prices that choose between
    implementations; `price`: the prices of the run. `in_cache`: prices of ops whose operands are in the L2
    cache, which keeps `stays_bytes` until they are used again; None if not measured. `profile`: the name of
    the fits in use, or None; `rates`: the law by which graphs slow each other down; `start`, `repeats`,
    `jobs`, `power` as in Hardware."""

    name: str
    price: Pricer
    choose: Pricer
    roofline: Roofline
    overheads: Overheads
    memory_bytes: float
    in_cache: Pricer | None = None
    stays_bytes: float = 0.0
    profile: str | None = None
    rates: Rates = max_min_rates
    start: Start = simulated
    repeats: int = 1
    jobs: int = 1
    power: PowerLimit | None = None

    @property
    def measured(self) -> bool:
        """Whether times are measured, not predicted."""
        return self.start is not simulated

    @property
    def doing(self) -> str:
        """The word for a run here in progress lines."""
        return "measuring" if self.measured else "simulating"


def at_end(price: Pricer, end: str) -> Pricer:
    """Returns prices as they are ("value"), or all at the `low` or the `high` end of their intervals."""
    if end == "value":
        return price

    def priced(op: Op) -> Price:
        found = price(op)
        return replace(found, seconds=found.low_s if end == "low" else found.high_s)

    return priced
