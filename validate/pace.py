"""Waiting until this host runs as fast as it can.

    pace = seconds of a plain loop / the least that it has taken of late

A processor that shares its core with somebody else's work runs up to 1.8 times as slowly, for a second or so,
and then what a verb of the machine costs does too. A processor that has slept is slow at first. Neither is
what a program takes, so before what counts the host is kept busy until its loops are at their pace; where it
stays slow for PATIENCE_S, that is how fast it is from then on.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from statistics import median

STEPS = 10_000
# The first time, for longer than it is slow at a time, it is looked for what the host can do; each time it is
# busy for AWAKE_S at least.
FIRST_S, AWAKE_S, PATIENCE_S = 1.5, 0.01, 2.0
# Of so many loops the median may take so many times the least.
LOOPS, SLACK = 7, 1.15


class Pace:
    """The pace of a host. `loop` gives the seconds of a plain loop, `clock` the time."""

    def __init__(
        self, loop: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop, self._clock = loop or _loop_s, clock
        self._least_s = math.inf

    def settle(self) -> bool:
        """Keeps the host busy until it is at its pace; gives whether it is."""
        begun_s, last = self._clock(), deque[float](maxlen=LOOPS)
        awake_s = AWAKE_S if math.isfinite(self._least_s) else FIRST_S
        while True:
            last.append(self._loop())
            self._least_s = min(self._least_s, last[-1])
            busy_s, settled = self._clock() - begun_s, median(last) <= SLACK * self._least_s
            if settled and busy_s >= awake_s:
                return True
            if busy_s >= PATIENCE_S:
                self._least_s = median(last)
                return False


def _loop_s() -> float:
    begun_s = time.perf_counter()
    for _ in range(STEPS):
        pass
    return time.perf_counter() - begun_s


@cache
def pace() -> Pace:
    """Of this process."""
    return Pace()
