"""Prices of a device by prices measured on another: scaled by the resource that limits each op on each.

    seconds = p (1 + x^n (R^n - 1))^(1/n) + a (kernel_s here / kernel_s there - 1)
    R = work here / work there          x = min(1, work there / p)          n = 1.5

p is the measured price on the other device. `work` is the time for which the op keeps its limiting resource
busy, at the rates that kernels reach (`Efficiency`): the longer of memory and arithmetic, or a collective's
alpha-beta seconds. So ops bound by memory scale with the bandwidths, ops bound by arithmetic with the peaks,
and ops that take far longer than their work, with time in launches and latency, hardly at all; of such time,
a = min((1 - x) p, kernels kernel_s) scales with the cost of a kernel in a graph. If two devices have equal
figures, prices are equal, and no larger figure makes an op slower: 1 <= t(R = 1) / t(R) <= 1 / R.

Kinds measured on operands that the ops before them had just written (column `cache` of a profile) work in the
L2 cache as far as they fit (`STAYS`): they take the same time with another memory.

n is the only constant. It was chosen by half of 3,114 op times of an H100
(validate/measured/h100_held_out.csv, h100_held_out_as_h200.csv) against the profile of an H200, and judged
by the other half: 3.9 % off in the median, 13 % in the 95th percentile; for decoders' kinds 3.0 and 11 %.
With the higher launch cost of an H100's kernels (kernel_s of its catalogue file, fitted to the first half)
it is 2.6 and 18 %, for decoders' 2.3 and 12. Scaling all of p by the ratio of the floors was 29 and 42 % off.

A price that was measured, or lies between measurements, has the source "carried" here. Its interval is that
of p, widened (logarithms, in quadrature) by the errors of those H100 times: 0.89 to 1.10 held nine in ten.
They cover R up to 1.43; for R further from 1, the logarithms are assumed to grow in proportion to log R.
"""

import math
from collections.abc import Set
from dataclasses import replace
from functools import lru_cache

from simcore.devices.collectives import collective_seconds, crosses_link
from simcore.devices.fit import MOST_FACTOR
from simcore.devices.price import MEMO, STAYS, pricer, roofline
from simcore.devices.spec import DeviceSpec, Link
from simcore.ops.op import Floor, Op, Price, Pricer, SourceKind

# Sources of prices seen on the measured device, which become "carried" on another.
SEEN: tuple[SourceKind, ...] = ("measured", "published", "interpolated")
SOFT = 1.5
# Range of nine in ten times of an H100 over prices carried over from an H200; ratio of their bandwidths.
CARRIED_LOW, CARRIED_HIGH, TRIED_RATIO = 0.89, 1.10, 4.8 / 3.35


def carried(
    there: Pricer,
    measured_on: DeviceSpec,
    here: DeviceSpec,
    *,
    link_there: Link | None = None,
    link: Link | None = None,
    as_written: Set[str] = frozenset(),
    same_card: bool = False,
) -> Pricer:
    """Returns prices on `here` by the prices `there` on `measured_on`; links default to the devices' own.
    `as_written`: kinds whose operands were in the cache; `same_card`: `here` is the measured card with some
    figures changed, so that prices which do not depend on these stay. Raises the errors of these prices, of
    `roofline` and of `collective_seconds`."""
    floor_there = roofline(measured_on, link=link_there)
    floor_here, own = roofline(here, link=link), pricer(here, link=link)
    stays_bytes = STAYS * measured_on.l2_bytes

    @lru_cache(maxsize=MEMO)
    def price(op: Op) -> Price:
        if crosses_link(op):
            return _collective(op)
        found = there(op)
        if found.source == "assumed":
            return found
        if op.kind in as_written and op.work.hbm_bytes <= stays_bytes:
            return _scaled(found, op, 0.0, 0.0, cached=True)
        return _scaled(found, op, _work_s(floor_there(op), measured_on), _work_s(floor_here(op), here))

    def _collective(op: Op) -> Price:
        by_link = own(op)
        try:
            found = there(op)
        except ValueError:  # more ranks than the link there connects
            return by_link
        if found.source not in SEEN:
            return by_link
        alpha_beta_s, _ = collective_seconds(op, link_there or measured_on.link())
        return _scaled(found, op, alpha_beta_s, by_link.seconds)

    def _scaled(found: Price, op: Op, before_s: float, after_s: float, cached: bool = False) -> Price:
        bounded = replace(found, cached=found.cached or cached)
        p, floor_s = found.seconds, floor_here(op).of(bounded).seconds
        ratio = after_s / before_s if before_s else 1.0
        launches = here.kernel_s / measured_on.kernel_s if measured_on.kernel_s else 1.0
        if ratio == launches == 1.0 and same_card:
            # An op served by the cache may take less than the floor of a slower memory.
            return found if p >= floor_here(op).of(found).seconds else bounded
        share = min(1.0, before_s / p) if p else 0.0
        launch_s = min((1.0 - share) * p, op.kernels * measured_on.kernel_s)
        times = (1.0 + share**SOFT * (ratio**SOFT - 1.0)) ** (1.0 / SOFT)
        seconds = max(floor_s, p * times + launch_s * (launches - 1.0))
        return replace(
            bounded,
            seconds=seconds,
            low_s=max(min(seconds, floor_s), seconds * _wider(found.low_s, p, CARRIED_LOW, ratio)),
            high_s=seconds * _wider(found.high_s, p, CARRIED_HIGH, ratio),
            source="carried" if found.source in SEEN else found.source,
            detail=f"{seconds / p if p else 1.0:.3g} times that on {measured_on.name}: {found.detail}",
            early_s=None if found.early_s is None or not p else found.early_s * seconds / p,
        )

    return price


def _work_s(floor: Floor, spec: DeviceSpec) -> float:
    """Returns the seconds for which an op's limiting resource is busy, at the rates that kernels reach."""
    compute_s = floor.compute_s / spec.flops_efficiency.value
    memory_s = floor.memory_s / spec.hbm_efficiency.value
    return max(compute_s, memory_s) + floor.wire_s


def _wider(end_s: float, p: float, tried: float, ratio: float) -> float:
    """Returns the end of a carried price's interval over its middle."""
    own = abs(math.log(end_s / p)) if p and end_s else math.log(MOST_FACTOR)
    further = max(1.0, abs(math.log(ratio)) / math.log(TRIED_RATIO))
    wide = min(math.hypot(own, math.log(tried) * further), math.log(MOST_FACTOR))
    return math.exp(math.copysign(wide, math.log(tried)))
