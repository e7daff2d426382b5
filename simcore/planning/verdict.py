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

Values that should be large are turned: of a share, what it lacks to one. Where one of them is zero or less,
the bound is Hall's. The last look is that of the two-sided interval that reports show.
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
# With fewer values a skewness is little more than chance.
HALLS_FROM, NORMAL = 13, 2.0
# So many equal values are sure where they should be large.
SURE_OF_EQUAL = 8


@dataclass(frozen=True, slots=True)
class Rule:
    """When to look, and how sure to be. `certainty`: between 0.5 and 1; `most`: replicas at most, 1 where
    nothing has to be sure.

    >>> Rule(0.95, 30).looks
    (3, 5, 8, 13, 21, 30)
    """

    certainty: float = 0.95
    most: int = 30

    @property
    def once(self) -> bool:
        """Whether each point runs once, so that nothing is judged of requests that are drawn."""
        return self.most == 1

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
        return _reach(values, quantile(self.error, len(values) - 1), at_most=at_most)

    def ends(self, values: Sequence[float], *, at_most: bool) -> tuple[float, float]:
        """Returns between which values the mean of values [replicas], two or more, lies by this look: a limit
        between them leaves it unsure."""
        wanted, mean = quantile(self.error_at(len(values)), len(values) - 1), fmean(values)
        good = wanted * stdev(values) / sqrt(len(values))
        bad = _reach(values, wanted, at_most=at_most)
        return (mean - good, mean + bad) if at_most else (mean - bad, mean + good)


def _reach(values: Sequence[float], wanted: float, *, at_most: bool) -> float:
    """Returns how far to the bad side the mean of values may lie; `wanted`: the quantile."""
    half = wanted * stdev(values) / sqrt(len(values))
    turned, _ = _turned(values, 1.0, at_most=at_most)
    return max(half, upper(turned, wanted) - fmean(turned))


def judged(values: Sequence[float], limit: float, error: float, *, at_most: bool) -> Verdict:
    """Returns the verdict of one look with a given error to each side. Equal values are sure at once.

    >>> judged([1.0, 1.1, 0.9], 5.0, 0.01, at_most=True), judged([1.0, 1.1, 0.9], 1.02, 0.01, at_most=True)
    ('holds', 'unsure')
    """
    count = len(values)
    if count < 2:
        return "unsure"
    values, limit = _turned(values, limit, at_most=at_most)
    room, spread = limit - fmean(values), stdev(values)
    if spread == 0.0:
        # Shares are often whole in some replicas and not in the next.
        few = 2 < count < SURE_OF_EQUAL and not at_most
        return "fails" if room < 0.0 else "unsure" if few else "holds"
    wanted = quantile(error, count - 1)
    t = room * sqrt(count) / spread
    if t < -wanted:
        return "fails"
    return "holds" if t > wanted and upper(values, wanted) < limit else "unsure"


def _turned(values: Sequence[float], limit: float, *, at_most: bool) -> tuple[Sequence[float], float]:
    """Returns values and a limit of which less is better: of a share what lacks to one."""
    if at_most:
        return values, limit
    whole = 1.0 if limit <= 1.0 and max(values) <= 1.0 else 0.0
    return [whole - value for value in values], whole - limit


def upper(values: Sequence[float], wanted: float) -> float:
    """Returns the upper bound of the mean of values that may be skewed; `wanted`: the quantile. Hall's is of
    any values, Cox's of positive ones."""
    count = len(values)
    if count < 3 or stdev(values) == 0.0:
        return fmean(values) + wanted * stdev(values) / sqrt(count)
    if min(values) <= 0.0:
        return hall_upper(values, wanted)
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
