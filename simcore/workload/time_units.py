"""Whether recorded times were written in the unit that they are read in.

    rate = (n - 1) / span            of at least `ENOUGH` requests, as they are read

Times look too slow below `SLOWEST` requests/s, or below `SLOWEST_WHOLE` where all are whole seconds, as
milliseconds that are read as seconds are, or over `LONGEST_S`; too fast above `FASTEST` requests/s, or where
fractions of a unit smaller than a second fit into `SHORTEST_S`. No rate is impossible, so this asks and never
refuses.
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
    """What makes one doubt the unit of recorded times [n], ascending seconds as they were read; empty where
    nothing does."""
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
    """The next unit in which the rate is none that one doubts; the next one, where there is no such."""
    place = UNITS.index(unit)
    others = UNITS[place + 1 :] if finer else UNITS[:place][::-1]
    rates = {other: rate * PER_SECOND[other] / PER_SECOND[unit] for other in others}
    fitting = [other for other in others if SLOWEST <= rates[other] <= FASTEST]
    return next(iter([*fitting, *others]), "")


def length(seconds: float) -> str:
    """A length of time as people write it.

    >>> length(0.02), length(7200.0), length(2e5)
    ('20 ms', '2 hours', '2.31 days')
    """
    unit = next((unit for unit, size in SPANS.items() if seconds >= size), "us")
    return f"{seconds / SPANS[unit]:.3g} {unit}"
