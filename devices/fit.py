"""Two constants per kind of op, fitted to measured or published times.

    seconds = launches * kernel_s + floor_s / efficiency

`floor_s` is what the datasheet allows at least (`simcore.devices.price.roofline`), `launches` how many
kernels the time covers (1 for a plain op, the parts of a fused one). Both constants are fitted at once, by
least squares of the relative error, with neither below 0 (Lawson and Hanson 1974, non-negative least
squares):

    minimise  sum_i ((launches_i * kernel_s + floor_i * x - seconds_i) / seconds_i)^2,   x = 1 / efficiency

Relative, for times span five powers of ten and a small op counts as much as a large one.

The interval is about the logarithms r_i of seconds_i / fitted_i: their 5th and 95th percentile, which of few
points miss the tails, and at least those of a normal distribution of the same size. Both are widened by what
Student's t with n - 2 degrees of freedom says of one more observation:

    s = sqrt(sum r_i^2 / (n - 2))        k = t(0.95, n - 2) / z(0.95) * sqrt(1 + 2 / n)
    low = exp(-k max(-r_05, z s))        high = exp(k max(r_95, z s))

Of draws from a log-normal error 89 to 92 % then lie inside, of 3 points as of 60.
Of one or two points nothing is left over to judge by: the interval is then a factor of 2 either way, assumed.

Where prices were checked by n times that they were not made of, nothing has to be assumed of how the errors
e_i are distributed (split conformal prediction, Lei et al. 2018): one more like them is smaller in size than
the k-th of theirs in k of n + 1 cases, and the interval is

    high = 1 / low = exp(|e|_k),   k = 0.9 (n + 1)      between two of them in proportion

These n were timed by the process that timed what prices are made of. Another one, minutes later, finds the
times of a kind all a little longer or all a little shorter, of which the e_i say nothing:

    high = 1 / low = exp(sqrt(|e|_k^2 + ANOTHER_TIME^2))
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import InputError
from simcore.ops.op import Price, SourceKind

# Where the floor does not show in the times at all, 1 / efficiency is 0: kept finite, for files and sums.
LEAST_SLOPE = 1e-6
# The interval of a fit that passes through all its points.
ASSUMED_FACTOR = 2.0
# No interval is wider than this, whatever the residuals: it has said by then that nothing is known.
MOST_FACTOR = 1e3
# So far beyond the fitted floors the interval still holds.
TRUSTED_REACH = 4.0
Z_95 = 1.6448536269514722
# How much of what comes lies in an interval. Of fewer checks none is large enough for that.
COVERED, LEAST_CHECKS = 0.9, 9
# By how much (a logarithm) nine in ten kinds of op differ at most in their medians from one calibration of a
# card to the next: 32 kinds, H200, 10 minutes apart, 23 November 2026
# (validate/measured/h200_two_calibrations.csv); of three pairs before that one 0.2 to 0.5 %. Another card is
# further off: 1.9 %.
ANOTHER_TIME = 0.0057


@dataclass(frozen=True, slots=True)
class Fit:
    """Two constants and how far to trust them. `low`, `high`: 90 % interval of seconds / fitted seconds; `n`
    points, whose floors were `least_floor_s` to `most_floor_s`."""

    kernel_s: float
    efficiency: float
    low: float
    high: float
    n: int
    least_floor_s: float
    most_floor_s: float

    def seconds(self, launches: int, floor_s: float) -> float:
        """The fitted time: launches * kernel_s + floor_s / efficiency."""
        return launches * self.kernel_s + floor_s / self.efficiency

    def reach(self, floor_s: float) -> float:
        """How many times a floor lies outside the fitted ones; 1 inside."""
        if self.least_floor_s <= floor_s <= self.most_floor_s:
            return 1.0
        outer, inner = sorted(
            (floor_s, self.least_floor_s if floor_s < self.least_floor_s else self.most_floor_s)
        )
        return inner / outer if outer > 0.0 else math.inf

    def price(self, launches: int, floor_s: float, detail: str) -> Price:
        """The price of an op; "interpolated" where its floor is among the fitted ones, else "extrapolated".

        Never below the floor, that what a device cannot do is not predicted of it. More than 4 times outside
        the fitted floors, both ends of the interval are raised to the power 1 + ln(reach / 4).
        """
        reach = self.reach(floor_s)
        power = 1.0 + math.log(min(reach, MOST_FACTOR) / TRUSTED_REACH) if reach > TRUSTED_REACH else 1.0
        fitted_s = self.seconds(launches, floor_s)
        seconds = max(floor_s, fitted_s)
        low_s, high_s = ends(fitted_s, floor_s, self.low**power, self.high**power)
        where = "" if reach == 1.0 else f", floor {reach:.3g} times outside the fitted ones"
        source: SourceKind = "interpolated" if reach == 1.0 else "extrapolated"
        return Price(seconds, low_s, high_s, source, f"{detail}{where}")


def ends(fitted_s: float, least_s: float, low: float, high: float) -> tuple[float, float]:
    """The interval of a fitted time, none of which is below the least: `low`, `high` times it."""
    seconds = max(least_s, fitted_s)
    low_s = min(seconds, max(least_s, fitted_s * max(low, 1.0 / MOST_FACTOR)))
    return low_s, max(seconds, fitted_s * min(high, MOST_FACTOR))


def fit_two(points: Sequence[tuple[int, float, float]]) -> Fit:
    """The fit to (launches, floor_s, seconds) points; see the head of this file.

    One point, or several of one floor, cannot tell the constants apart: the time is then put into either.
    Raises InputError where there is no point, or one is not finite, has a floor below 0 or no time.
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
    """kernel_s and 1 / efficiency of points [n, 3]."""
    # Half of the time that `--help` takes would be the import of SciPy, which only fits need.
    from scipy.optimize import nnls  # noqa: PLC0415

    rows = table[:, :2] / table[:, 2:]
    # Columns differ by powers of ten, and nnls compares them with one tolerance.
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0.0] = 1.0
    found, _ = nnls(rows / scale, np.ones(len(table)))
    kernel_s, slope = found / scale
    return float(kernel_s), max(float(slope), LEAST_SLOPE)


def interval(residuals: NDArray[np.float64]) -> tuple[float, float]:
    """low and high of log ratios [n], widened for few of them."""
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
    """low and high of the log ratios [n] of times to prices that were not made of them, n at least
    LEAST_CHECKS.

    >>> low, high = checked_interval(np.log([1.0, 1.1, 0.98, 1.2, 1.0, 1.03, 1 / 1.3, 1.0, 1.0]))
    >>> round(1 / low, 3), round(high, 3)
    (1.3, 1.3)
    """
    widest = float(np.quantile(np.abs(errors), COVERED, method="weibull"))
    high = math.exp(min(math.log(MOST_FACTOR), math.hypot(widest, ANOTHER_TIME)))
    return 1.0 / high, high
