"""Two constants per kind of op, fitted to measured or published times.

    seconds = launches * kernel_s + floor_s / efficiency

`floor_s` is the least time by the datasheet (`simcore.devices.price.roofline`), `launches` the number of
kernels in the time (1 for a plain op, the parts of a fused one). Both constants are fitted together, by
least squares of the relative error, with neither below 0 (Lawson and Hanson 1974, non-negative least
squares):

    minimise  sum_i ((launches_i * kernel_s + floor_i * x - seconds_i) / seconds_i)^2,   x = 1 / efficiency

The error is relative because times span five powers of ten, and a small op counts as much as a large one.

The interval is from the logarithms r_i of seconds_i / fitted_i: their 5th and 95th percentile, which miss the
tails if points are few, and at least those of a normal distribution of the same size. Both are widened by
Student's t with n - 2 degrees of freedom for one more observation:

    s = sqrt(sum r_i^2 / (n - 2))        k = t(0.95, n - 2) / z(0.95) * sqrt(1 + 2 / n)
    low = exp(-k max(-r_05, z s))        high = exp(k max(r_95, z s))

For a log-normal error, 89 to 92 % of draws then lie inside, with 3 points as with 60.
One or two points leave no residuals: the interval is then assumed to be a factor of 2 either way.

If n check times exist that no fit uses, the errors e_i need no assumed distribution (split conformal
prediction, Lei et al. 2018): one more such error is smaller in size than the k-th smallest in k of n + 1
cases, and the interval is

    high = 1 / low = exp(|e|_k),   k = 0.9 (n + 1)      between two of them in proportion

The same process measured the check times and the fitted times. Another process, minutes later, measures all
times of a kind a little longer or all a little shorter, which the e_i do not show:

    high = 1 / low = exp(sqrt(|e|_k^2 + ANOTHER_TIME^2))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import InputError
from simcore.ops.op import Price, SourceKind

# If times do not depend on the floor, 1 / efficiency is fitted as 0: this keeps efficiency finite.
LEAST_SLOPE = 1e-6
# The interval of a fit to one or two points, which it passes through.
ASSUMED_FACTOR = 2.0
# No interval is wider than this: by then the time is unknown anyway.
MOST_FACTOR = 1e3
# The interval holds up to this factor outside the fitted floors.
TRUSTED_REACH = 4.0
Z_95 = 1.6448536269514722
# Coverage of an interval, and the fewest checks that allow it.
COVERED, LEAST_CHECKS = 0.9, 9
# The most (a logarithm) by which the medians of nine in ten kinds of op differ between two calibrations of a
# card: 32 kinds, H200, 10 minutes apart, 23 November 2026 (validate/measured/h200_two_calibrations.csv); in
# three pairs before, 0.2 to 0.5 %. Another card differs more: 1.9 %.
ANOTHER_TIME = 0.0057


@dataclass(frozen=True, slots=True)
class Fit:
    """Two constants and their validity. `low`, `high`: 90 % interval of seconds / fitted seconds; `n` points,
    with floors from `least_floor_s` to `most_floor_s`."""

    kernel_s: float
    efficiency: float
    low: float
    high: float
    n: int
    least_floor_s: float
    most_floor_s: float

    def seconds(self, launches: int, floor_s: float) -> float:
        """Returns the fitted time: launches * kernel_s + floor_s / efficiency."""
        return launches * self.kernel_s + floor_s / self.efficiency

    def reach(self, floor_s: float) -> float:
        """Returns the factor by which a floor is outside the fitted floors; 1 inside."""
        if self.least_floor_s <= floor_s <= self.most_floor_s:
            return 1.0
        outer, inner = sorted(
            (floor_s, self.least_floor_s if floor_s < self.least_floor_s else self.most_floor_s)
        )
        return inner / outer if outer > 0.0 else math.inf

    def price(self, launches: int, floor_s: float, detail: str) -> Price:
        """Returns the price of an op; "interpolated" if its floor is within the fitted floors, else
        "extrapolated".

        It is never below the floor, so that no impossible time is predicted. More than 4 times outside the
        fitted floors, both ends of the interval are raised to the power 1 + ln(reach / 4).
        """
        reach = self.reach(floor_s)
        power = 1.0 + math.log(min(reach, MOST_FACTOR) / TRUSTED_REACH) if reach > TRUSTED_REACH else 1.0
        fitted_s = self.seconds(launches, floor_s)
        seconds = max(floor_s, fitted_s)
        low_s, high_s = interval_of(fitted_s, floor_s, self.low**power, self.high**power)
        where = "" if reach == 1.0 else f", floor {reach:.3g} times outside the fitted ones"
        source: SourceKind = "interpolated" if reach == 1.0 else "extrapolated"
        return Price(seconds, low_s, high_s, source, f"{detail}{where}")


def interval_of(fitted_s: float, least_s: float, low: float, high: float) -> tuple[float, float]:
    """Returns the interval of a fitted time, `low` to `high` times it, with no end below `least_s`."""
    seconds = max(least_s, fitted_s)
    low_s = min(seconds, max(least_s, fitted_s * max(low, 1.0 / MOST_FACTOR)))
    return low_s, max(seconds, fitted_s * min(high, MOST_FACTOR))


def fit_two(points: Sequence[tuple[int, float, float]]) -> Fit:
    """Fits (launches, floor_s, seconds) points; see the head of this file.

    One point, or several with one floor, cannot separate the constants: either may then take the time.
    Raises InputError if there is no point, or one is not finite, has a floor below 0 or no time.
    """
    if not points:
        raise InputError("a fit needs at least one point")
    for launches, floor_s, seconds in points:
        if launches < 1 or not (0.0 <= floor_s < math.inf) or not (0.0 < seconds < math.inf):
            raise InputError(
                f"a fit takes launches >= 1, floor_s >= 0 and seconds > 0: {(launches, floor_s, seconds)}"
            )
    table = np.asarray(points, dtype=np.float64)
    kernel_s, slope = _constants(table)
    fitted_s = table[:, 0] * kernel_s + table[:, 1] * slope
    low, high = interval(np.log(table[:, 2] / np.maximum(fitted_s, np.finfo(np.float64).tiny)))
    floors = table[:, 1]
    return Fit(kernel_s, 1.0 / slope, low, high, len(points), float(floors.min()), float(floors.max()))


def _constants(table: NDArray[np.float64]) -> tuple[float, float]:
    """Returns kernel_s and 1 / efficiency of points [n, 3]."""
    # Importing SciPy would be half of the time of `--help`, and only fits need it.
    from scipy.optimize import nnls  # noqa: PLC0415

    rows = table[:, :2] / table[:, 2:]
    # Columns differ by powers of ten, and nnls compares them with one tolerance.
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = nnls(rows / scale, np.ones(len(table)))
    kernel_s, slope = found / scale
    return float(kernel_s), max(float(slope), LEAST_SLOPE)


def interval(residuals: NDArray[np.float64]) -> tuple[float, float]:
    """Returns low and high of log ratios [n], wider if n is small."""
    n = len(residuals)
    if n <= 2:
        return 1.0 / ASSUMED_FACTOR, ASSUMED_FACTOR
    from scipy.special import stdtrit  # noqa: PLC0415

    widened = float(stdtrit(n - 2, 0.95)) / Z_95 * math.sqrt(1.0 + 2.0 / n)
    normal = Z_95 * math.sqrt(float((residuals**2).sum()) / (n - 2))
    below, above = (float(value) for value in np.quantile(residuals, (0.05, 0.95)))
    most = math.log(MOST_FACTOR)
    low = math.exp(-min(most, widened * max(-below, normal)))
    return low, math.exp(min(most, widened * max(above, normal)))


def checked_interval(errors: NDArray[np.float64]) -> tuple[float, float]:
    """Returns low and high from log ratios [n] of check times to prices that do not use them, n at least
    LEAST_CHECKS.

    >>> low, high = checked_interval(np.log([1.0, 1.1, 0.98, 1.2, 1.0, 1.03, 1 / 1.3, 1.0, 1.0]))
    >>> round(1 / low, 3), round(high, 3)
    (1.3, 1.3)
    """
    widest = float(np.quantile(np.abs(errors), COVERED, method="weibull"))
    high = math.exp(min(math.log(MOST_FACTOR), math.hypot(widest, ANOTHER_TIME)))
    return 1.0 / high, high
