"""Checks whether recorded times were written in the unit in which they are read.

    rate = (n - 1) / span            of at least `ENOUGH` requests, as they are read

Times look too slow if they are below `SLOWEST` requests/s, or span more than `LONGEST_S`, or if at least
`ENOUGH_WHOLE` times are all whole seconds (as milliseconds read as seconds are) and below `SLOWEST_WHOLE`.
They look too fast if they are above `FASTEST` requests/s, or if they have fractions of a unit smaller than a
second and span less than `SHORTEST_S`. No rate is impossible, so this only asks.
"""

from collections.abc import Mapping

import numpy as np

from simcore.workload.request_logs import PER_SECOND, Times

UNITS = ("s", "ms", "us", "ns")
ENOUGH, ENOUGH_WHOLE = 20, 1000
SLOWEST, SLOWEST_WHOLE, FASTEST = 0.1, 0.5, 200.0
LONGEST_S, SHORTEST_S = 30 * 86_400.0, 60.0
SPANS: Mapping[str, float] = {
    "days": 86_400.0,
    "hours": 3600.0,
    "min": 60.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
}


def doubt(time_s: Times, unit: str) -> str:
    """A question about the unit of recorded times [n], ascending, in seconds as they were read; empty if the
    unit looks right."""
    count = len(time_s)
    span_s = float(time_s[-1] - time_s[0]) if count else 0.0
    if unit not in UNITS or count < ENOUGH or not span_s:
        return ""
    rate, whole = (count - 1) / span_s, _whole(time_s, unit)
    seconds = whole and unit == "s"
    slow = (
        rate < SLOWEST or span_s > LONGEST_S or (seconds and count >= ENOUGH_WHOLE and rate < SLOWEST_WHOLE)
    )
    fast = rate > FASTEST or (unit != "s" and not whole and span_s < SHORTEST_S)
    other = _other(rate, unit, finer=slow) if slow or fast else ""
    if not other:
        return ""
    times = PER_SECOND[unit] / PER_SECOND[other]
    return (
        f"{count:,} requests come one every {length(1.0 / rate)}, over {length(span_s)}: are its times in"
        f" {unit}? In {other} it is one every {length(times / rate)}, over {length(span_s * times)}"
    )


def _whole(time_s: Times, unit: str) -> bool:
    counted = time_s * PER_SECOND[unit]
    return bool(np.all(np.abs(counted - np.rint(counted)) <= 1e-6 * np.maximum(1.0, counted)))


def _other(rate: float, unit: str, *, finer: bool) -> str:
    """The next unit in which the rate looks right; the next unit at all if there is none."""
    place = UNITS.index(unit)
    others = UNITS[place + 1 :] if finer else UNITS[:place][::-1]
    rates = {other: rate * PER_SECOND[other] / PER_SECOND[unit] for other in others}
    fitting = [other for other in others if SLOWEST <= rates[other] <= FASTEST]
    return next(iter([*fitting, *others]), "")


def length(seconds: float) -> str:
    """A duration as people write it.

    >>> length(0.02), length(7200.0), length(2e5)
    ('20 ms', '2 hours', '2.31 days')
    """
    unit = next((unit for unit, size in SPANS.items() if seconds >= size), "us")
    return f"{seconds / SPANS[unit]:.3g} {unit}"
