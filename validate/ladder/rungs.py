"""The error of a prediction rung by rung, so that the cause of an error can be located.

    0 numerics    each kernel against its reference in float64          ||run - reference|| / ||reference||
    1 prices      predicted op times against measured ones, at shapes that were not calibrated
    2 schedules   the simulated machine with the run's own times of ops (and, on a card, of verbs) against
                  the wall clock; on a card also with the times of ops measured one by one
    3 end to end  the simulated machine at predicted prices against the wall clock

    error = 100 (max(predicted, measured) / min(predicted, measured) - 1)        in percent

so that a prediction that is five times too fast is as wrong as one that is five times too slow.

If rung 2 holds and rung 3 does not, the prices are wrong; if rung 2 does not, the schedule or the machine is.
Rungs 1 to 3 are judged by the median error, rung 0 by the worst; rung 1 also by the 95th percentile and rung
3 by the worst, if they have such bounds. Bounds are in bounds.yaml.

Rungs 2 and 3 compare the study's figures that are times, one by one. Rates and the duration of a run are left
out: they follow from the times or from the offered load, and would agree without any prediction. Times below
1 % of the longest of their case are also left out: nothing predicts microseconds of queueing on a shared CPU.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from pydantic.dataclasses import dataclass as checked

from simcore.devices.collectives import crosses_link
from simcore.devices.fit import Fit, fit_two
from simcore.devices.making import condition
from simcore.devices.price import launches_and_floor, summed
from simcore.input.files import STRICT, InputError, Positive, read_yaml, unknown_name, validated
from simcore.kernels.kernel import Kernel, in_double
from simcore.kernels.table import TABLE
from simcore.machine.trace import Trace
from simcore.ops.op import Op, Price, Pricer, Roofline
from simcore.studies.common import Row
from simcore.validate.calibration.cpu_grid import grid
from simcore.validate.machines.cpu.machine import units
from simcore.validate.timing.op_times import op_times, plain

__all__ = [
    "Bounds",
    "Compared",
    "OpPoint",
    "compared",
    "holds",
    "ladder",
    "load_bounds",
    "measured_prices",
    "numeric_error",
    "op_points",
    "prices_of",
    "spread",
]

BOUNDS = Path(__file__).resolve().parents[1] / "bounds.yaml"
RUNGS = ("numerics", "prices", "schedules", "end to end")
ALL = "all"
MEDIAN, P95, WORST = "median_pct", "p95_pct", "worst_pct"
# Shapes of a kind that are tested, evenly spread over the launched ones.
NUMERICS_SHAPES, PRICE_SHAPES = 5, 20
TIMES = "s"
# The state of the caches for ops timed in the run itself.
AS_THE_RUN = "as the run leaves it"
# Times below this share of the longest time of their case are not compared.
LEAST_SHARE = 0.01
# Precision of a mean, duration of the arrivals, and a bound from the datasheet.
NO_PREDICTIONS = frozenset({"standard_error_s", "duration_s", "read_once_s"})
SEED = 0


@checked(frozen=True, config=STRICT)
class Bounds:
    """Bounds in percent: `numerics` by dtype, of the worst error; `prices_p95` of the 95th percentile,
    `end_to_end_worst` of the worst, both optional; the others of the median."""

    numerics: dict[str, Positive]
    prices: Positive
    schedules: Positive
    end_to_end: Positive
    prices_p95: Positive | None = None
    end_to_end_worst: Positive | None = None


def load_bounds(device: str, path: Path = BOUNDS) -> Bounds:
    """Returns the bounds of a device. Raises InputError, one line, if there are none."""
    document = read_yaml(path)
    if not isinstance(document, dict) or device not in document:
        known = document if isinstance(document, dict) else ()
        raise InputError(f"{path}: {unknown_name('device', device, known)}")
    return validated(Bounds, document[device], f"{path}: {device}")


def off_pct(predicted: float, measured: float) -> float:
    """See the head of this file.

    >>> off_pct(1.0, 5.0), off_pct(5.0, 1.0)
    (400.0, 400.0)
    """
    low, high = sorted((predicted, measured))
    return 100.0 * (high / low - 1.0) if low > 0.0 else math.inf


# -- results of the real run -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpPoint:
    """An op that the real run launched: its relative error (None: not tested), its predicted and measured
    time in seconds (median over the run). `held_out`: its shape was not calibrated. `price`: the whole
    prediction; `p10_s`, `p90_s`: the spread of the `n` times; `cache`: the state of the caches."""

    op: Op
    error: float | None
    predicted_s: float
    measured_s: float
    held_out: bool = True
    price: Price | None = None
    p10_s: float | None = None
    p90_s: float | None = None
    n: int | None = None
    cache: str = ""


def op_points(
    traces: Iterable[Trace],
    price: Pricer,
    floor: Roofline,
    *,
    table: Mapping[str, Kernel] = TABLE,
    calibrated: Collection[Op] | None = None,
) -> list[OpPoint]:
    """Returns the data of rungs 0 and 1 from real runs: at most 20 shapes of each kind and dtype, 5 of them
    with their numerical error. `price`: the predicted prices; `calibrated`: the ops to which the prices were
    fitted (default `simcore.validate.calibration.cpu_grid`)."""
    known = {plain(op) for op in (grid(table) if calibrated is None else calibrated)}
    by_kind: dict[tuple[str, str], list[tuple[float, Op, list[float]]]] = {}
    for op, seconds in op_times(traces).items():
        by_kind.setdefault((op.kind, op.dtype), []).append((launches_and_floor(op, floor)[1], op, seconds))
    points = []
    for group in by_kind.values():
        chosen = spread(sorted(group, key=lambda each: each[0]), PRICE_SHAPES)
        tried = {op for _, op, _ in spread(chosen, NUMERICS_SHAPES)}
        for _, op, seconds in chosen:
            error = numeric_error(op, table) if op in tried else None
            points.append(_point(op, error, price(op), seconds, op not in known))
    return points


def _point(op: Op, error: float | None, price: Price, seconds: Sequence[float], held_out: bool) -> OpPoint:
    p10_s, p90_s = (float(value) for value in np.percentile(seconds, (10, 90)))
    times = median(seconds), held_out, price, p10_s, p90_s, len(seconds)
    return OpPoint(op, error, price.seconds, *times, AS_THE_RUN)


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


# -- numerics --------------------------------------------------------------------------------------------


def numeric_error(
    op: Op, table: Mapping[str, Kernel] = TABLE, device: torch.device | str = "cpu"
) -> float | None:
    """Returns the largest relative error of an op's results, also those written in place, against its
    reference in float64; that of its parts if it has no kernel of its own. None if no part has a kernel."""
    errors = [_error(unit, table[unit.kind], device) for unit in units(op) if unit.kind in table]
    return max(errors, default=None)


def _error(op: Op, kernel: Kernel, device: torch.device | str) -> float:
    generator = torch.Generator(device).manual_seed(SEED)
    with torch.inference_mode():
        given = kernel.inputs(op, generator, torch.device(device))
        exact = tuple(map(in_double, given))
        # Tensors that an op writes in place are results too.
        results = [*_tensors(kernel.run(op, *given)), *given]
        truths = [*_tensors(kernel.reference(op, *exact)), *exact]
    for part in kernel.in_parts:
        results[part], truths[part] = results[part].sum(-1), truths[part].sum(-1)
    return max(_relative(x, truth) for x, truth in zip(results, truths, strict=True))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Sequence):
        for each in value:
            yield from _tensors(each)


def _relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    """||x - truth|| / ||truth||; for integers the share of differing numbers. NaN counts as infinite."""
    if truth.is_complex():
        x, truth = torch.view_as_real(x), torch.view_as_real(truth)
    if not truth.is_floating_point():
        return float((x != truth).double().mean()) if truth.numel() else 0.0
    # An infinity in both (the weight of an empty set) is no error.
    both = torch.isinf(truth) & (x.double() == truth)
    wide, truth = (each.double().masked_fill(both, 0.0) for each in (x, truth))
    size, off = float(torch.linalg.vector_norm(truth)), float(torch.linalg.vector_norm(wide - truth))
    error = off / size if size > 0.0 else off
    return math.inf if math.isnan(error) else error


# -- prices of a replay ------------------------------------------------------------------------------------


def measured_prices(traces: Iterable[Trace], floor: Roofline, otherwise: Pricer | None = None) -> Pricer:
    """`prices_of` the op times of real runs."""
    return prices_of(op_times(traces), floor, otherwise)


def prices_of(
    times: Mapping[Op, Sequence[float]], floor: Roofline, otherwise: Pricer | None = None
) -> Pricer:
    """Returns prices for the simulated machine from measured times of plain ops: the mean of each op, with
    the 5th and 95th percentile. Only means add up to the total time, which includes pauses of a shared
    machine.

    An op without times is priced by the measured ops of its kind and dtype, by whatever is closer to them: a
    fit, or `otherwise`, all times as many; a fused op on one rank by its parts, the rest by `otherwise`. The
    prices raise InputError if none of these exists.
    """
    known = {op: _price_of(seconds, launches_and_floor(op, floor)[1]) for op, seconds in times.items()}
    fits = _fits(known, floor)
    levels = {} if otherwise is None else _levels(known, fits, floor, otherwise)

    @lru_cache(maxsize=1 << 16)
    def price(op: Op) -> Price:
        same = plain(op)
        if same in known:
            return known[same]
        level = levels.get((op.kind, condition(op)))
        if level is not None and otherwise is not None:
            return _times_as_many(otherwise(op), level, launches_and_floor(same, floor)[1])
        found = fits.get((op.kind, condition(op))) or fits.get((op.kind, ""))
        if found is not None:
            launches, floor_s = launches_and_floor(same, floor)
            fitted = found.price(launches, floor_s, f"fit to {found.n} measured shapes of {op.kind}")
            # Two constants for many shapes may promise more than the device can do.
            return fitted.longer(max(0.0, floor_s - fitted.seconds))
        if op.parts and not crosses_link(op):
            return summed([price(part) for part in op.parts])
        if otherwise is None:
            raise InputError(f"no {op.kind} was measured, and the replay launches {op.name}")
        return otherwise(op)

    return price


def _price_of(seconds: Sequence[float], floor_s: float) -> Price:
    low_s, high_s = (float(value) for value in np.percentile(seconds, (5, 95)))
    mean_s = fmean(seconds)
    detail = f"mean of {len(seconds)} runs"
    low_s, high_s = min(low_s, mean_s), max(high_s, mean_s)
    return Price(mean_s, low_s, high_s, "measured", detail, cached=mean_s < floor_s)


def _fits(known: Mapping[Op, Price], floor: Roofline) -> dict[tuple[str, str], Fit]:
    """Fits two constants for each kind and dtype, and for each kind over all dtypes."""
    groups: dict[tuple[str, str], list[tuple[int, float, float]]] = {}
    for op, price in known.items():
        if price.seconds > 0.0:
            point = (*launches_and_floor(op, floor), price.seconds)
            for key in ((op.kind, condition(op)), (op.kind, "")):
                groups.setdefault(key, []).append(point)
    return {key: fit_two(points) for key, points in groups.items()}


def _levels(
    known: Mapping[Op, Price], fits: Mapping[tuple[str, str], Fit], floor: Roofline, otherwise: Pricer
) -> dict[tuple[str, str], float]:
    """Returns how many times as long as by other prices ops of a kind and dtype take, in the median, where
    that is closer to what was measured than the fit is: a service has ever new sizes, and its ops are no two
    constants."""
    off: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for op, price in known.items():
        if price.seconds <= 0.0:
            continue
        try:
            usual_s = otherwise(op).seconds
        except InputError:
            continue
        key = op.kind, condition(op)
        fitted_s = fits[key].seconds(*launches_and_floor(op, floor))
        if usual_s > 0.0 and fitted_s > 0.0:
            off.setdefault(key, []).append(
                (math.log(price.seconds / usual_s), abs(math.log(price.seconds / fitted_s)))
            )
    found = dict[tuple[str, str], float]()
    for key, pairs in off.items():
        level = median(usual for usual, _ in pairs)
        if median(abs(usual - level) for usual, _ in pairs) < median(fitted for _, fitted in pairs):
            found[key] = math.exp(level)
    return found


def _times_as_many(price: Price, level: float, floor_s: float) -> Price:
    """Returns a price `level` times as high, but not below the floor."""
    each = (level * x for x in (price.seconds, price.low_s, price.high_s))
    seconds, low_s, high_s = (max(floor_s, x) for x in each)
    early_s = None if price.early_s is None else min(seconds, level * price.early_s)
    detail = f"{level:.3g} times {price.detail}"
    return replace(price, seconds=seconds, low_s=low_s, high_s=high_s, early_s=early_s, detail=detail)


# -- the ladder --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a study, predicted and measured: rows with the same axes and metric that have values."""

    predicted: Row
    measured: Row

    @property
    def label(self) -> str:
        """The case of the figure."""
        return self.measured.axes.label

    @property
    def signed_pct(self) -> float:
        """100 (predicted - measured) / measured."""
        assert self.predicted.value is not None
        assert self.measured.value is not None
        return 100.0 * (self.predicted.value - self.measured.value) / self.measured.value

    @property
    def error_pct(self) -> float:
        """The percentage by which the larger of both exceeds the smaller."""
        assert self.predicted.value is not None
        assert self.measured.value is not None
        return off_pct(self.predicted.value, self.measured.value)


def compared(predicted: Iterable[Row], measured: Iterable[Row]) -> list[Compared]:
    """Pairs the figures that both have, by axes and metric; the head of this file says which count."""
    theirs = {(row.axes, row.metric): row for row in measured if _counts(row)}
    longest: dict[Any, float] = {}
    for row in theirs.values():
        longest[row.axes] = max(longest.get(row.axes, 0.0), row.value or 0.0)
    found = []
    for row in predicted:
        other = theirs.get((row.axes, row.metric))
        if other is None or not _counts(row) or not other.value:
            continue
        if other.value >= LEAST_SHARE * longest[row.axes]:
            found.append(Compared(row, other))
    return found


def _counts(row: Row) -> bool:
    figure = row.unit == TIMES and not row.op_kind and row.metric not in NO_PREDICTIONS
    return figure and row.value is not None


def ladder(
    points: Sequence[OpPoint],
    predicted: Sequence[Row],
    replayed: Sequence[Row],
    measured: Sequence[Row],
    bounds: Bounds,
    *,
    one_by_one: Sequence[Row] | None = None,
) -> list[dict[str, Any]]:
    """Returns the rungs as rows: rung, label, what, n, median_pct, p95_pct, worst_pct, bound_pct, passed, and
    `judged_by`: the error to which the bound applies. `one_by_one`: replayed with op times measured
    separately.

    Each rung begins with its judged rows; its parts follow without bounds (`passed` is None). A rung without
    comparisons has n = 0 and did not pass.
    """
    return [
        *_numerics(points, bounds),
        *_prices(points, bounds),
        *_figures(2, compared(replayed, measured), bounds.schedules),
        *_one_by_one(one_by_one, measured, bounds.schedules),
        *_figures(3, compared(predicted, measured), bounds.end_to_end, bounds.end_to_end_worst),
    ]


def holds(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether every judged rung has passed."""
    return all(row["passed"] is not False for row in rows)


def _numerics(points: Sequence[OpPoint], bounds: Bounds) -> Iterator[dict[str, Any]]:
    tried = [(point.op, 100.0 * point.error) for point in points if point.error is not None]
    dtypes = sorted({op.dtype for op, _ in tried})
    if not tried:
        yield _row(0, ALL, "kernels", [], None, by=WORST)
    for dtype in dtypes:
        errors = [error for op, error in tried if op.dtype == dtype]
        # A dtype without a bound is not skipped; it fails.
        bound = bounds.numerics.get(dtype)
        yield _row(0, ALL, f"kernels in {dtype}", errors, bound, by=WORST)
    for kind, dtype in sorted({(op.kind, op.dtype) for op, _ in tried}):
        yield _row(0, kind, dtype, [e for op, e in tried if (op.kind, op.dtype) == (kind, dtype)])


def _prices(points: Sequence[OpPoint], bounds: Bounds) -> Iterator[dict[str, Any]]:
    tried = [
        (point.op, off_pct(point.predicted_s, point.measured_s))
        for point in points
        if point.held_out and point.measured_s > 0.0
    ]
    errors = [error for _, error in tried]
    yield _row(1, ALL, "held-out shapes", errors, bounds.prices, by=MEDIAN)
    if bounds.prices_p95 is not None:
        yield _row(1, ALL, "held-out shapes, 95th percentile", errors, bounds.prices_p95, by=P95)
    for kind, dtype in sorted({(op.kind, op.dtype) for op, _ in tried}):
        yield _row(1, kind, dtype, [e for op, e in tried if (op.kind, op.dtype) == (kind, dtype)])


def _figures(
    rung: int, pairs: Sequence[Compared], bound: float, worst: float | None = None
) -> Iterator[dict[str, Any]]:
    errors = [pair.error_pct for pair in pairs]
    yield _row(rung, ALL, "times", errors, bound, by=MEDIAN)
    if worst is not None:
        yield _row(rung, ALL, "times, the worst", errors, worst, by=WORST)
    groups: tuple[Callable[[Compared], tuple[str, str]], ...] = (
        lambda pair: (pair.label, "times"),
        lambda pair: (ALL, pair.measured.metric),
    )
    for key in groups:
        for label, what in dict.fromkeys(key(pair) for pair in pairs):
            yield _row(rung, label, what, [pair.error_pct for pair in pairs if key(pair) == (label, what)])


def _one_by_one(
    replayed: Sequence[Row] | None, measured: Sequence[Row], bound: float
) -> Iterator[dict[str, Any]]:
    """Yields rung 2 with ops that take their separately measured times."""
    if replayed is not None:
        errors = [pair.error_pct for pair in compared(replayed, measured)]
        yield _row(2, ALL, "times, ops one by one", errors, bound, by=MEDIAN)


def _row(
    rung: int,
    label: str,
    what: str,
    errors: Sequence[float],
    bound: float | None = None,
    *,
    by: str = "",
) -> dict[str, Any]:
    """Returns one row; it is judged if `by` names one of its errors, and fails if nothing was compared."""
    figures = {
        MEDIAN: median(errors) if errors else None,
        P95: _p95(errors),
        WORST: max(errors, default=None),
    }
    found = figures.get(by)
    passed = found is not None and bound is not None and found <= bound
    return {
        "rung": rung,
        "name": RUNGS[rung],
        "label": label,
        "what": what,
        "n": len(errors),
        **figures,
        "bound_pct": bound,
        "judged_by": by,
        "passed": passed if by else None,
    }


def _p95(errors: Sequence[float]) -> float | None:
    """Returns the least error that at least 95 % of the errors do not exceed; without interpolation, so an
    infinite error does not affect it."""
    return float(np.percentile(errors, 95, method="inverted_cdf")) if errors else None
