"""Times of the ops of real runs on a card, one by one, and prices for the simulated machine from them.

    isolated times      each op alone, cold, in captured graphs             simcore.validate.timing.cuda_times
    in a case           less by cold - warm, for ops whose operands are in the L2 cache there
                                                                            simcore.validate.machines.reuse
    between two shapes  log t = log t1 + (log t2 - log t1) (log x - log x1) / (log x2 - log x1)
                        if both differ from the op only in dimension x, one of them smaller, one larger
    beside one shape    t = t1 floor / floor1, if x differs from x1 by a share below NEAR

Collectives are not kernels that can be measured alone: their times are those in the runs.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from simcore.devices.making import Point, shape_text
from simcore.devices.price import launches_and_floor
from simcore.devices.profile import NO_PROFILE, has_profile, load_profile
from simcore.devices.spec import load_device
from simcore.kernels.kernel import Kernel
from simcore.machine.trace import Trace
from simcore.ops.op import Op, Price, Pricer, Roofline
from simcore.studies.common import Progress
from simcore.validate.benchmarks.timing import Card, one_line
from simcore.validate.ladder.climb import Ops, OpTimes
from simcore.validate.ladder.rungs import (
    NUMERICS_SHAPES,
    PRICE_SHAPES,
    OpPoint,
    numeric_error,
    prices_of,
    spread,
)
from simcore.validate.machines.cuts import units
from simcore.validate.machines.reuse import found_in_cache
from simcore.validate.timing.card_kernels import HELD, ON_CARDS
from simcore.validate.timing.cuda_times import FAILURES, go_on, measured
from simcore.validate.timing.op_times import op_times, plain

# The most measured shapes of a kind: more than are shown, because a replay takes its prices from them.
MOST_SHAPES = 64
# The relative difference below which two sizes are neighbours.
NEAR = 0.02

Measure = Callable[[Kernel, Op], Point]
# Kind, shape and dtype.
Shape = tuple[str, str, str]


@dataclass
class Isolated:
    """The results: points by op, reasons of failures by op, and the times of all ops in the runs."""

    floor: Roofline
    points: dict[Op, Point] = field(default_factory=dict)
    failed: dict[Op, str] = field(default_factory=dict)
    in_runs: Mapping[Op, Sequence[float]] = field(default_factory=dict)

    def op_points(
        self, price: Pricer, device: torch.device | str, known: Collection[Shape] = ()
    ) -> list[OpPoint]:
        """Returns rungs 0 and 1: at most 20 shapes of each kind and dtype, 5 of them with their numerical
        error. `known`: shapes to which prices were fitted, which are not held out."""
        found = []
        for group in _groups(self.points, self.floor).values():
            chosen = spread(group, PRICE_SHAPES)
            tried = {*spread(chosen, NUMERICS_SHAPES)}
            for op in chosen:
                error = self._error(op, device) if op in tried else None
                point, predicted = self.points[op], price(op)
                held_out, spread_s = shape_of(op) not in known, (point.p10_s, point.p90_s)
                times = predicted.seconds, point.median_s, held_out, predicted, *spread_s, point.runs
                found.append(OpPoint(op, error, *times, point.cache))
        return found

    def prices(self, otherwise: Pricer) -> Pricer:
        """Returns prices for the simulated machine; see the head of this file. An op to which none of its
        rules applies is priced by a fit to its kind, or by `otherwise`."""
        times = {op: [point.median_s] for op, point in self.points.items()}
        times |= {op: list(seconds) for op, seconds in self.in_runs.items() if op.ranks > 1 and seconds}
        fitted = prices_of(times, self.floor, otherwise)

        @lru_cache(maxsize=1 << 16)
        def price(op: Op) -> Price:
            same = plain(op)
            if same in times or same.parts:
                return fitted(op)
            found = priced_between(same, self._alike(same), self.floor)
            if found is None:
                return fitted(op)
            return replace(found, cached=found.seconds < self.floor(same).seconds)

        return price

    def saved_s(self, trace: Trace, cache_bytes: int) -> Mapping[Op, float]:
        """Returns by how many seconds ops of a run are faster than alone because their operands are in a
        cache of `cache_bytes` bytes."""
        found = ((op, self.points[op]) for op in found_in_cache(trace, cache_bytes) if op in self.points)
        return {op: point.median_s - point.warm_s for op, point in found if point.warm_s is not None}

    def warnings(self) -> Iterator[str]:
        """Yields the warnings."""
        if self.failed:
            op, reason = next(iter(self.failed.items()))
            yield (
                f"{len(self.failed)} shapes could not be measured alone or held against a reference; the"
                f" first: {op.kind} {shape_text(op)}: {reason}"
            )

    def _alike(self, op: Op) -> Iterator[tuple[Op, float]]:
        for other, point in self.points.items():
            if (other.kind, other.dtype) == (op.kind, op.dtype):
                yield other, point.median_s

    def _error(self, op: Op, device: torch.device | str) -> float | None:
        try:
            return numeric_error(op, HELD, device)
        except FAILURES as error:
            self.failed[op] = f"numerics: {one_line(error)}"
            go_on()
            return None


def measure_alone(
    traces: Iterable[Trace],
    floor: Roofline,
    card: Card,
    progress: Progress,
    *,
    table: Mapping[str, Kernel] = ON_CARDS,
    measure: Measure | None = None,
) -> Isolated:
    """Measures the distinct local ops of real runs on this card, at most MOST_SHAPES per kind and dtype."""
    by_card = measure or (lambda kernel, op: measured(kernel, op, floor, card))
    in_runs = op_times(traces)
    single = {plain(unit): None for op in in_runs for unit in units(op) if unit.ranks == 1}
    wanted = [
        op
        for group in _groups((op for op in single if op.kind in table), floor).values()
        for op in spread(group, MOST_SHAPES)
    ]
    found = Isolated(floor, in_runs=in_runs)
    for done, op in enumerate(wanted):
        progress("ops one by one", done, len(wanted))
        try:
            found.points[op] = by_card(table[op.kind], op)
        except FAILURES as error:
            found.failed[op] = one_line(error)
            go_on()
    progress("ops one by one", len(wanted), len(wanted))
    return found


def _groups(ops: Iterable[Op], floor: Roofline) -> dict[tuple[str, str], list[Op]]:
    """Groups ops by kind and dtype, each group sorted by floor."""
    found: dict[tuple[str, str], list[Op]] = {}
    for op in sorted(ops, key=lambda each: launches_and_floor(each, floor)[1]):
        found.setdefault((op.kind, op.dtype), []).append(op)
    return found


def priced_between(op: Op, measured: Iterable[tuple[Op, float]], floor: Roofline) -> Price | None:
    """Returns the price of an op from times (seconds) of ops that differ from it in only one dimension; see
    the head of this file. None if no such op applies."""
    by_name: dict[str, list[tuple[float, Op, float]]] = {}
    for other, seconds in measured:
        name = _unlike(op, other)
        if name is not None and seconds > 0.0 and min(op[name], other[name]) > 0:
            by_name.setdefault(name, []).append((float(other[name]), other, seconds))
    for name, others in by_name.items():
        x = float(op[name])
        low = max((each for each in others if each[0] < x), key=lambda each: each[0], default=None)
        high = min((each for each in others if each[0] > x), key=lambda each: each[0], default=None)
        if low and high:
            share = math.log(x / low[0]) / math.log(high[0] / low[0])
            seconds = low[2] * (high[2] / low[2]) ** share
            return _interpolated(seconds, f"between {name} {low[0]:.0f} and {high[0]:.0f}")
        only = low or high
        if only and abs(x / only[0] - 1.0) < NEAR:
            ratio = launches_and_floor(op, floor)[1] / launches_and_floor(only[1], floor)[1]
            return _interpolated(only[2] * ratio, f"beside {name} {only[0]:.0f}")
    return None


def _unlike(op: Op, other: Op) -> str | None:
    """Returns the dimension in which two ops of a kind differ if there is only one, else None."""
    if [name for name, _ in op.shape] != [name for name, _ in other.shape]:
        return None
    found = [one[0] for one, two in zip(op.shape, other.shape, strict=True) if one != two]
    return found[0] if len(found) == 1 else None


def _interpolated(seconds: float, detail: str) -> Price:
    return Price(seconds, seconds, seconds, "interpolated", detail)


def one_by_one(
    release: Callable[[], None],
    card: Card,
    known: Collection[Shape] = (),
    device: torch.device | str = "cuda",
) -> Ops:
    """Returns the function that measures op times for a climb on a card: it calls `release`, which frees the
    memory of the run there, then measures the ops."""

    def ops(traces: Sequence[Trace], price: Pricer, floor: Roofline, progress: Progress) -> OpTimes:
        release()
        found = measure_alone(traces, floor, card, progress)
        points = found.op_points(price, device, known)
        saved = [found.saved_s(trace, card.l2_bytes) for trace in traces]
        return OpTimes(points, found.prices(price), list(found.warnings()), saved)

    return ops


def shape_of(op: Op) -> Shape:
    """Returns all that identifies an op's shape."""
    return op.kind, shape_text(op), op.dtype


def calibrated(device: str, profile: str | None) -> frozenset[Shape]:
    """Returns the shapes to which a profile of a device was fitted (None: the default profile)."""
    name = load_device(device).default_profile if profile is None else profile
    if name is None or (profile is None and not has_profile(device, name)) or name == NO_PROFILE:
        return frozenset()
    points = getattr(load_profile(device, name), "points", ())
    return frozenset((each.kind, each.shape, each.dtype) for each in points if each.role == "fit")


def card_here() -> Card:
    """Returns this card as `cuda_times.measured` needs it: without rates, which only calibrations need."""
    properties: Any = torch.cuda.get_device_properties(0)
    return Card(int(properties.L2_cache_size), int(properties.multi_processor_count), 0.0, "", 0.0)
