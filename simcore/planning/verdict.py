"""Whether a figure keeps a limit: a test of its mean over replicas, after a few of them and again after more.

    t      = (limit - mean) sqrt(n) / s
    holds  t > q, and exp(m + v / 2 + q sqrt(v / n + v^2 / (2 (n - 1)))) < limit
    fails  t < -q
    n, mean, s   replicas so far, their mean and standard deviation;   m, v   mean and variance of logarithms
    q            Student's quantile, n - 1 degrees of freedom, at 1 - the error of this look
    error        EARLY of (1 - certainty) / 2 at each look but the last, (1 - certainty) / 2 at the last
    P(a wrong "holds") <= sum of the errors of all looks < 1 - certainty                  (Bonferroni)

The second condition is Cox's upper bound of a lognormal mean (Land 1972). A percentile near saturation is
skewed to the right: a few replicas then often miss the slow ones, and Student's test alone calls too many
systems good. Where logarithms are skewed to the left by more than NORMAL standard errors, no lognormal fits,
and Cox's bound is far too high: then, from HALLS_FROM replicas on, Hall's bound takes its place, which knows
the skewness k of the values (Hall 1992):

    mean - s w < limit,   w = 3 / k ((1 + k (-q / sqrt(n) - k / (6 n)))^(1/3) - 1)

The last look is that of the two-sided interval that reports show.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import cbrt, exp, inf, log, sqrt
from statistics import fmean, stdev, variance
from typing import Literal

Verdict = Literal["holds", "fails", "unsure"]
LOOKS = (3, 5, 8, 13, 21, 34, 55)
# Share of the last look's error that each earlier look takes.
EARLY = 0.08
# A skewness is told by fewer values than this only badly.
HALLS_FROM, NORMAL = 13, 2.0


@dataclass(frozen=True, slots=True)
class Rule:
    """When to look, and how sure to be. `certainty`: between 0.5 and 1; `most`: replicas at most, 2 or more.

    >>> Rule(0.95, 30).looks
    (3, 5, 8, 13, 21, 30)
    """

    certainty: float = 0.95
    most: int = 30

    @property
    def looks(self) -> tuple[int, ...]:
        """After how many replicas the test is made."""
        return (*(look for look in LOOKS if look < self.most), self.most)

    @property
    def error(self) -> float:
        """Error of the last look, to one side."""
        return (1.0 - self.certainty) / 2.0

    def error_at(self, count: int) -> float:
        """Returns the error that the look after `count` replicas may make."""
        return self.error * (1.0 if count >= self.most else EARLY)

    def judge(self, values: Sequence[float], limit: float, *, at_most: bool) -> Verdict:
        """Returns whether the mean of values [replicas] keeps a limit: is at most `limit`, else at least."""
        return judged(values, limit, self.error_at(len(values)), at_most=at_most)

    def reach(self, values: Sequence[float], *, at_most: bool) -> float:
        """Returns how far from a limit the mean of values [replicas], two or more, has to be so that a last
        look at them is sure."""
        wanted = quantile(self.error, len(values) - 1)
        half = wanted * stdev(values) / sqrt(len(values))
        if at_most and min(values) > 0.0:
            return max(half, upper(values, wanted) - fmean(values))
        return half


def judged(values: Sequence[float], limit: float, error: float, *, at_most: bool) -> Verdict:
    """Returns the verdict of one look with a given error to each side. Equal values are sure at once.

    >>> judged([1.0, 1.1, 0.9], 5.0, 0.01, at_most=True), judged([1.0, 1.1, 0.9], 1.02, 0.01, at_most=True)
    ('holds', 'unsure')
    """
    count = len(values)
    if count < 2:
        return "unsure"
    room, spread = (limit - fmean(values)) * (1.0 if at_most else -1.0), stdev(values)
    if spread == 0.0:
        return "holds" if room >= 0.0 else "fails"
    wanted = quantile(error, count - 1)
    t = room * sqrt(count) / spread
    if t < -wanted:
        return "fails"
    # A figure that should be large is a share or a rate, which has no long tail upwards near its limit.
    skewed = at_most and min(values) > 0.0 and limit > 0.0
    if t > wanted and (not skewed or upper(values, wanted) < limit):
        return "holds"
    return "unsure"


def upper(values: Sequence[float], wanted: float) -> float:
    """Returns the upper bound of the mean of positive values that may be skewed; `wanted`: the quantile."""
    count = len(values)
    if count >= HALLS_FROM and skewness([log(one) for one in values]) < -NORMAL * sqrt(6.0 / count):
        return hall_upper(values, wanted)
    return cox_upper(values, wanted)


def hall_upper(values: Sequence[float], wanted: float) -> float:
    """Returns the upper bound of a mean by Hall's transformation; `wanted`: the quantile."""
    count, skew = len(values), skewness(values)
    if skew == 0.0:
        return fmean(values) + stdev(values) * wanted / sqrt(count)
    inner = 1.0 + skew * (-wanted / sqrt(count) - skew / (6.0 * count))
    return fmean(values) - stdev(values) * 3.0 / skew * (cbrt(inner) - 1.0)


def skewness(values: Sequence[float]) -> float:
    """Returns the skewness of a sample of three or more values, without bias for a normal one; 0 of equal
    values."""
    count, mean, spread = len(values), fmean(values), stdev(values)
    if spread == 0.0:
        return 0.0
    cubes = sum(((one - mean) / spread) ** 3 for one in values)
    return cubes * count / ((count - 1) * (count - 2))


def cox_upper(values: Sequence[float], wanted: float) -> float:
    """Returns the upper bound of the mean of positive, lognormal values; `wanted`: the quantile."""
    logs = [log(value) for value in values]
    count, spread = len(logs), variance(logs)
    half = wanted * sqrt(spread / count + spread * spread / (2.0 * (count - 1)))
    power = fmean(logs) + spread / 2.0 + half
    return exp(power) if power < 700.0 else inf


def interval(values: Sequence[float], certainty: float) -> tuple[float, float] | None:
    """Returns the two-sided Student interval of the mean of values [replicas]; None of a single one."""
    if len(values) < 2:
        return None
    half = quantile((1.0 - certainty) / 2.0, len(values) - 1) * stdev(values) / sqrt(len(values))
    mean = fmean(values)
    return mean - half, mean + half


@cache
def quantile(error: float, freedom: int) -> float:
    """Returns Student's quantile that is passed with probability `error`."""
    # Importing SciPy would be a third of the time of `--help`.
    from scipy.special import stdtrit  # noqa: PLC0415

    return float(stdtrit(freedom, 1.0 - error))
