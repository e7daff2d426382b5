"""Waiting until this host runs as fast as it can.

    pace = median seconds of the last LOOPS plain loops / the least such median so far

A processor that shares its core with other work runs up to 1.8 times as slowly, for a second or so, and so do
the machine's verbs. A processor that has slept is slow at first. Neither belongs to the time of a program. So
the host is kept busy before a timing until its loops are at their pace, for at most PATIENCE_S, and loops
after the timing check that it still is. After RESIGNED waits in vain in a row, the current pace is the host's
pace from then on.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import TypeVar

from simcore.sim.runs import LONG_S

T = TypeVar("T")

STEPS = 10_000
# The first time, longer than a slow spell lasts, the host's best pace is found; each later time the host is
# kept busy for at least AWAKE_S.
FIRST_S, AWAKE_S, PATIENCE_S = 1.5, 0.01, 0.6
RESIGNED = 5
# The most times that a timed act is done; a long one once.
ATTEMPTS = 3
# A single loop may be faster than a processor stays; the median of LOOPS loops may be SLACK times the least
# one.
LOOPS, SLACK = 7, 1.15


class Pace:
    """The pace of a host. `loop` returns the seconds of a plain loop, `clock` the time."""

    def __init__(
        self, loop: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop, self._clock = loop or _loop_s, clock
        self._least_s, self._in_vain = math.inf, 0

    def keeps(self, act: Callable[[], T]) -> tuple[T, bool]:
        """Calls `act` and returns its result and whether the host was at its pace before and after the call.
        If the host was slow only after the call, the call is repeated, at most ATTEMPTS calls in all, and the
        last one counts. After a wait in vain the call is not repeated: no time is left; nor is one that took
        LONG_S or more."""
        for _ in range(ATTEMPTS):
            settled, begun_s = self.settle(), self._clock()
            found = act()
            took_s = self._clock() - begun_s
            kept = settled and self._holds()
            if kept or not settled or took_s >= LONG_S:
                break
        return found, kept

    def _holds(self) -> bool:
        return median(self._loop() for _ in range(LOOPS)) <= SLACK * self._least_s

    def settle(self) -> bool:
        """Keeps the host busy until it is at its pace; returns whether it is."""
        begun_s, last = self._clock(), deque[float](maxlen=LOOPS)
        first = math.isinf(self._least_s)
        awake_s, patience_s = (FIRST_S, 2 * FIRST_S) if first else (AWAKE_S, PATIENCE_S)
        while True:
            last.append(self._loop())
            if len(last) < LOOPS:
                continue
            now_s, busy_s = median(last), self._clock() - begun_s
            self._least_s = min(self._least_s, now_s)
            if now_s <= SLACK * self._least_s and busy_s >= awake_s:
                self._in_vain = 0
                return True
            if busy_s >= patience_s:
                self._in_vain += 1
                if self._in_vain == RESIGNED:
                    self._least_s, self._in_vain = now_s, 0
                return False


def _loop_s() -> float:
    begun_s = time.perf_counter()
    for _ in range(STEPS):
        pass
    return time.perf_counter() - begun_s


@cache
def pace() -> Pace:
    """Returns the pace of this process."""
    return Pace()
