"""How far the figures of a serving study can be trusted: what was measured of each run, whether it had come
to a steady state, and how many requests a percentile rests on.

    beyond(p, n) = n (1 - p / 100)          expected requests beyond a percentile; `ENOUGH` make it firm
    interval     = [x_(l), x_(u)], the order statistics with P(B < l) <= 2.5 % and P(B < u) >= 97.5 %,
                   B ~ binomial(n, p / 100)

The interval holds for any distribution, of requests that are independent. Requests that wait for each other
are not: there it is too narrow, and replicas say more.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from simcore.studies.serving.figures import PERCENTILES
from simcore.studies.serving.runner import Found
from simcore.studies.serving.served import Floats
from simcore.studies.serving.window import AS_ASKED

# Requests that are expected beyond a percentile before it is taken as firm: 1,000 for p99, 200 for p95.
ENOUGH = 10
LEVEL = 0.95
UPPER = (90, 95, 99)
# Cases that a warning names.
NAMED = 2


def needed(percent: int) -> int:
    """How many requests make a percentile firm.

    >>> [needed(percent) for percent in (50, 90, 95, 99)]
    [20, 100, 200, 1000]
    """
    return math.ceil(ENOUGH * 100 / (100 - percent))


def interval(values: Floats, percent: int) -> tuple[float, float] | None:
    """The 95 % interval of a percentile of values [n], by their order; None where there are too few."""
    # A third of the time that `--help` takes would be the import of SciPy.
    from scipy.special import bdtr, bdtrik  # noqa: PLC0415

    count, share = len(values), percent / 100.0
    tail = (1.0 - LEVEL) / 2.0
    if not count or bdtr(0, count, share) > tail or bdtr(count - 1, count, share) < 1.0 - tail:
        return None
    low = math.floor(bdtrik(tail, count, share))
    high = math.ceil(bdtrik(1.0 - tail, count, share))
    found = np.partition(values, sorted({low, high}))
    return float(found[low]), float(found[high])


def intervals(latencies: Mapping[str, Floats]) -> dict[str, tuple[float, float]]:
    """The intervals of the upper percentiles of latencies, by the names of their figures, where there are
    such."""
    found = {
        f"{name}_p{percent}_s": interval(values, percent)
        for name, values in latencies.items()
        for percent in UPPER
    }
    return {name: ends for name, ends in found.items() if ends is not None}


def requests(one: Found) -> int:
    """How many answered requests a percentile of a case rests on: those of one replica, the one with the
    fewest, for the percentile over replicas is the mean of those of each."""
    return min((count for count in one.measured if count), default=0)


def slowest(one: Found, percent: int = 99) -> str:
    """What a percentile of a case rests on, where that is too little: "the slowest 2 of 200 requests"."""
    count = requests(one)
    if count >= needed(percent):
        return ""
    beyond = max(1, math.floor(count * (100 - percent) / 100.0))
    few = f"the slowest {beyond}" if beyond > 1 else "the slowest one"
    each = " of each replica" if len(one.measured) > 1 else ""
    return f"{few} of {count:,} requests{each}" if count > 1 else f"a single request{each}"


def growing(one: Found) -> bool:
    """Whether ever more requests wait in the windows of most replicas."""
    return 2 * sum(window.growing for window in one.windows) > len(one.windows)


def warnings(found: Sequence[Found], name: Callable[[Found], str]) -> list[str]:
    """What to be warned of, each in one line; `name` says which case one is."""

    def cases(those: Sequence[Found]) -> str:
        named = [name(one) for one in those[:NAMED]]
        named = [text[0].lower() + text[1:] for text in named]
        more = [f"{len(those) - NAMED} more"] if len(those) > NAMED else []
        number = f"{len(those)} of {len(found)} cases" if len(found) > 1 else "this case"
        return f"in {number} ({'; '.join([*named, *more])})"

    told = []
    reasons = dict.fromkeys(
        one.windows[0].whole for one in found if one.windows[0].whole not in ("", AS_ASKED)
    )
    for why in reasons:
        those = [one for one in found if one.windows[0].whole == why]
        text = f"no steady state {cases(those)}: {why}; figures are of the whole run, warm-up and drain in it"
        told.append(text + (", and goodput is left out" if those[0].windows[0].unrated else ""))
    if those := [one for one in found if growing(one)]:
        told.append(
            f"requests seem to come faster than they are answered {cases(those)}: more of them wait"
            " in each third of the time that is measured than before, so these figures depend on how long the"
            " run is"
        )
    if those := [one for one in found if requests(one) and slowest(one)]:
        least = min(those, key=requests)
        weak = [f"p{percent}" for percent in PERCENTILES if requests(least) < needed(percent)]
        number = f"{needed(99):,}"
        number += " in each replica" if len(least.measured) > 1 else ""
        told.append(
            f"too few requests for {' and '.join([', '.join(weak[:-1]), weak[-1]] if weak[1:] else weak)}"
            f" {cases(those)}: p99 rests on {slowest(least)}; {number} that are measured make it firm"
        )
    return told
