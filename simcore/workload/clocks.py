"""Times of a recorded trace by its own clock.

    18:20, 18:20:30          the first such time of day at or after a moment
    2023-11-16 18:20         that moment

Times are as the file has them, in UTC where they have a time zone.
"""

import re
from datetime import UTC, datetime, timedelta

from simcore.input.files import shown

_DAY = re.compile(r"(?:(\d{4}-\d{2}-\d{2})[ T])?(\d{2}:\d{2}(?::\d{2})?)")
NEEDED = 'a time such as "18:20", "18:20:30" or "2023-11-16 18:20" is needed'
_1970 = datetime(1970, 1, 1, tzinfo=UTC)


def checked(text: str) -> str:
    """Returns a time. Raises ValueError if it is none."""
    try:
        _parsed(text)
    except ValueError:
        raise ValueError(f"is {shown(text)}; {NEEDED}") from None
    return text


def seconds_after(text: str, begin_ns: int, after_s: float = 0.0) -> float:
    """Returns how long after a trace's first request, `begin_ns` since 1970, a time is; of a time of day, the
    first that is `after_s` or more after it. Negative for a date before it.

    >>> seconds_after("00:01", 30 * 10**9), seconds_after("00:00:20", 30 * 10**9)
    (30.0, 86390.0)
    >>> seconds_after("00:01", 30 * 10**9, after_s=31.0), seconds_after("1970-01-01 00:00", 30 * 10**9)
    (86430.0, -30.0)
    """
    moment, dated = _parsed(text)
    at_ns = (moment - _1970) // timedelta(microseconds=1) * 1000
    day_ns = 86_400 * 10**9
    if not dated:
        least_ns = begin_ns + round(after_s * 1e9)
        at_ns += -(-(least_ns - at_ns) // day_ns) * day_ns
    return (at_ns - begin_ns) / 1e9


def _parsed(text: str) -> tuple[datetime, bool]:
    """Returns a moment, on the first day of 1970 for a time of day, and whether it has a date. Raises
    ValueError."""
    found = _DAY.fullmatch(text)
    if found is None:
        raise ValueError(text)
    day, time = found.groups()
    moment = datetime.fromisoformat(f"{day or '1970-01-01'} {time}").replace(tzinfo=UTC)
    return moment, day is not None
