"""Certainty of a serving study's figures: the measured part of each run, whether it reached a steady state,
and the number of requests behind a percentile.

    beyond(p, n) = n (1 - p / 100)          expected requests beyond a percentile; firm from `ENOUGH` on
    interval     = [x_(l), x_(u)], the order statistics with P(B < l) <= 2.5 % and P(B < u) >= 97.5 %,
                   B ~ binomial(n, p / 100)

The interval holds for any distribution, if requests are independent. Requests that wait for each other are
not: then it is too narrow, and replicas give a better one.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from simcore.input.files import enumerated
from simcore.studies.columns import TENANT
from simcore.studies.serving.figures import PERCENTILES
from simcore.studies.serving.runner import CaseResult
from simcore.studies.serving.served import Floats
from simcore.studies.serving.window import AS_ASKED

# Expected requests beyond a firm percentile: 1,000 requests for p99, 200 for p95.
ENOUGH = 10
LEVEL = 0.95
UPPER = (90, 95, 99)
# Cases that a warning names.
NAMED = 2


def needed(percent: float) -> int:
    """Returns the number of requests that make a percentile firm.

    >>> [needed(percent) for percent in (50, 90, 95, 99)]
    [20, 100, 200, 1000]
    """
    return math.ceil(round(ENOUGH * 100 / (100 - percent), 6))


def interval(values: Floats, percent: int) -> tuple[float, float] | None:
    """Returns the 95 % interval of a percentile of values [n], by their order; None if they are too few."""
    # Importing SciPy would be a third of the time of `--help`.
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
    """Returns the intervals of the upper percentiles of latencies, if there are any, by the names of their
    figures."""
    found = {
        f"{name}_p{percent}_s": interval(values, percent)
        for name, values in latencies.items()
        for percent in UPPER
    }
    return {name: ends for name, ends in found.items() if ends is not None}


def requests(one: CaseResult) -> int:
    """Returns the number of answered requests behind a percentile of a case: that of the replica with the
    fewest, since the percentile over replicas is the mean of the replicas' percentiles."""
    return min((count for count in one.measured if count), default=0)


def slowest(one: CaseResult, percent: int = 99) -> str:
    """Returns the requests behind a percentile of a case in words, if they are too few: "the slowest 2 of 200
    requests"."""
    count = requests(one)
    if count >= needed(percent):
        return ""
    # Above rank p (n - 1) / 100, where a percentile is read.
    beyond = math.ceil(round((count - 1) * (100 - percent) / 100.0, 6))
    few = f"the slowest {beyond}" if beyond > 1 else "the slowest one"
    each = " of each replica" if len(one.measured) > 1 else ""
    return f"{few} of {count:,} requests{each}" if count > 1 else f"a single request{each}"


def growing(one: CaseResult) -> bool:
    """Whether the queue grows in the windows of most replicas."""
    return 2 * sum(window.growing for window in one.windows) > len(one.windows)


def warnings(results: Sequence[CaseResult], name: Callable[[CaseResult], str]) -> list[str]:
    """Returns warnings, each in one line; `name`: names a case."""

    def cases(those: Sequence[CaseResult]) -> str:
        named = [name(one) for one in those[:NAMED]]
        named = [text[0].lower() + text[1:] for text in named]
        more = [f"{len(those) - NAMED} more"] if len(those) > NAMED else []
        number = f"{len(those)} of {len(results)} cases" if len(results) > 1 else "this case"
        return f"in {number} ({'; '.join([*named, *more])})"

    lines = []
    reasons = dict.fromkeys(
        one.windows[0].whole for one in results if one.windows[0].whole not in ("", AS_ASKED)
    )
    for why in reasons:
        those = [one for one in results if one.windows[0].whole == why]
        text = f"no steady state {cases(those)}: {why}; figures are of the whole run, warm-up and drain in it"
        lines.append(text + (", and goodput is left out" if those[0].windows[0].unrated else ""))
    if those := [one for one in results if growing(one)]:
        lines.append(
            f"requests seem to come faster than they are answered {cases(those)}: more of them wait"
            " in each third of the time that is measured than before, so these figures depend on how long the"
            " run is"
        )
    if those := [one for one in results if requests(one) and slowest(one)]:
        least = min(those, key=requests)
        weak = [f"p{percent}" for percent in PERCENTILES if requests(least) < needed(percent)]
        number = f"{needed(99):,}"
        number += " in each replica" if len(least.measured) > 1 else ""
        lines.append(
            f"too few requests for {enumerated(weak)}"
            f" {cases(those)}: p99 rests on {slowest(least)}; {number} that are measured make it firm"
        )
    return lines


def few_of_tenants(results: Sequence[CaseResult], tenants: Iterable[str]) -> list[str]:
    """Returns a warning if a tenant has too few requests for a firm 99th percentile of its own."""
    counts = {
        name: min(
            replica[f"{TENANT}.{name}.window_requests"][0] or 0.0
            for one in results
            for replica in one.replicas
        )
        for name in tenants
    }
    few = {name: count for name, count in counts.items() if count < needed(99)}
    if not few:
        return []
    words = ", ".join(f"{name} {count:,.0f}" for name, count in list(few.items())[:NAMED])
    more = f" and {len(few) - NAMED} more" if len(few) > NAMED else ""
    return [
        f"too few requests of tenants for p99 of their own: {words}{more} are measured;"
        f" {needed(99):,} make it firm"
    ]
