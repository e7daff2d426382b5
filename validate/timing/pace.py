"""Waiting until this host runs as fast as it can.

    pace = median seconds of the last LOOPS plain loops / the least that such a median has been

A processor that shares its core with somebody else's work runs up to 1.8 times as slowly, for a second or so,
and then what a verb of the machine costs does too. A processor that has slept is slow at first. Neither is
what a program takes, so before what counts the host is kept busy until its loops are at their pace, for
PATIENCE_S at most, and after it they say whether it still is. Where it was slow RESIGNED times in a row, that
is how fast it is from then on.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from statistics import median
from typing import TypeVar

T = TypeVar("T")

STEPS = 10_000
# The first time, for longer than it is slow at a time, it is looked for what the host can do; each time it is
# busy for AWAKE_S at least.
FIRST_S, AWAKE_S, PATIENCE_S = 1.5, 0.01, 0.6
RESIGNED = 5
# How often what is timed is done at most.
ATTEMPTS = 3
# One loop may be faster than a processor stays; the median of so many may take so many times the least one.
LOOPS, SLACK = 7, 1.15


class Pace:
    """The pace of a host. `loop` gives the seconds of a plain loop, `clock` the time."""

    def __init__(
        self, loop: Callable[[], float] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._loop, self._clock = loop or _loop_s, clock
        self._least_s, self._in_vain = math.inf, 0

    def keeps(self, act: Callable[[], T]) -> tuple[T, bool]:
        """Does what is timed, and gives what it gives and whether the host was at its pace before and after
        it. Where it was slow only afterwards it is done again, ATTEMPTS times in all, and the last one
        counts; where it was waited for in vain, that is all the time that there is."""
        for _ in range(ATTEMPTS):
            settled = self.settle()
            found = act()
            kept = settled and self._holds()
            if kept or not settled:
                break
        return found, kept

    def _holds(self) -> bool:
        return median(self._loop() for _ in range(LOOPS)) <= SLACK * self._least_s

    def settle(self) -> bool:
        """Keeps the host busy until it is at its pace; gives whether it is."""
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
    """Of this process."""
    return Pace()
