"""Waiting for a host that runs slowly: what counts begins at its pace, or after a while all the same."""

from collections.abc import Callable, Iterator
from itertools import repeat

import pytest

from simcore.validate.timing import pace
from simcore.validate.timing.pace import Pace

FAST_S, SLOW_S = 1e-3, 1.6e-3


class _Host:
    """One whose loops take what `taken` says, on a clock that only they move."""

    def __init__(self, taken: Callable[[float], float]) -> None:
        self.now_s, self._taken = 0.0, taken

    def loop(self) -> float:
        took_s = self._taken(self.now_s)
        self.now_s += took_s
        return took_s

    def pace(self) -> Pace:
        return Pace(self.loop, lambda: self.now_s)


def _settled_at(host: _Host, of: Pace) -> tuple[bool, float]:
    begun_s = host.now_s
    return of.settle(), host.now_s - begun_s


def test_a_host_at_its_pace_is_only_kept_awake() -> None:
    """The first time it is looked at for longer."""
    host = _Host(lambda now_s: FAST_S)
    of = host.pace()
    assert _settled_at(host, of) == (True, pytest.approx(pace.FIRST_S, abs=1.01 * FAST_S))
    assert _settled_at(host, of) == (True, pytest.approx(pace.AWAKE_S, abs=1.01 * FAST_S))


def test_what_counts_waits_until_a_slow_host_is_fast_again() -> None:
    """By the median of the last loops: half of them and one more are fast then."""
    until_s = pace.FIRST_S + 0.4
    host = _Host(lambda now_s: SLOW_S if pace.FIRST_S < now_s < until_s else FAST_S)
    of = host.pace()
    of.settle()
    settled, _ = _settled_at(host, of)
    assert settled
    assert host.now_s == pytest.approx(until_s + (pace.LOOPS // 2 + 1) * FAST_S, abs=SLOW_S)


def test_a_host_that_stays_slow_is_waited_for_some_times() -> None:
    """Then that is its pace."""
    host = _Host(lambda now_s: SLOW_S if now_s > pace.FIRST_S else FAST_S)
    of = host.pace()
    of.settle()
    for _ in range(pace.RESIGNED):
        assert _settled_at(host, of) == (False, pytest.approx(pace.PATIENCE_S, abs=SLOW_S))
    assert _settled_at(host, of) == (True, pytest.approx(pace.LOOPS * SLOW_S, abs=SLOW_S))


def test_one_fast_loop_is_no_pace() -> None:
    """A processor that is twice as fast for a millisecond does not keep everybody waiting ever after."""

    def taken() -> Iterator[float]:
        yield from [FAST_S] * 20
        yield FAST_S / 2
        yield from repeat(FAST_S)

    loops = taken()
    host = _Host(lambda now_s: next(loops))
    of = host.pace()
    of.settle()
    assert _settled_at(host, of) == (True, pytest.approx(pace.AWAKE_S, abs=1.01 * FAST_S))


def test_one_slow_loop_among_fast_ones_is_not_waited_for() -> None:
    """An interrupt is no other tenant."""

    def taken() -> Iterator[float]:
        while True:
            yield from [FAST_S] * 9
            yield 5 * SLOW_S

    loops = taken()
    host = _Host(lambda now_s: next(loops))
    of = host.pace()
    of.settle()
    settled, took_s = _settled_at(host, of)
    assert settled
    assert took_s < pace.AWAKE_S + 6 * SLOW_S


def test_what_is_timed_while_its_host_turns_slow_is_done_again() -> None:
    """Until it has been waited for in vain: then that counts."""
    slow_s = (10.0, 10.8)
    host = _Host(lambda now_s: SLOW_S if slow_s[0] < now_s < slow_s[1] else FAST_S)
    of, ended_s = host.pace(), list[float]()

    def act() -> int:
        host.now_s += 1.0
        ended_s.append(host.now_s)
        return len(ended_s)

    assert of.keeps(act) == (1, True)
    # Begun while it is fast and over while it is not; begun again when that is over.
    host.now_s = 9.5
    assert of.keeps(act) == (3, True)
    assert slow_s[0] < ended_s[1] < slow_s[1] < ended_s[2] - 1.0
    # The same, but it stays slow: done again after as long as it may wait, and no third time.
    slow_s = (host.now_s + 0.5, 1e9)
    assert of.keeps(act) == (5, False)
    # As often as it may, where it is slow only when it is over.
    host = _Host(lambda now_s: SLOW_S if int(now_s) % 2 else FAST_S)
    of, host.now_s = host.pace(), 20.0
    of.settle()
    ended_s.clear()

    def into_slow() -> int:
        host.now_s = 1.5 + 2 * (host.now_s // 2)
        ended_s.append(host.now_s)
        return len(ended_s)

    assert of.keeps(into_slow) == (pace.ATTEMPTS, False)


def test_what_takes_long_is_not_done_again() -> None:
    """A slow spell is short beside it."""
    host = _Host(lambda now_s: SLOW_S if now_s > pace.LONG_S else FAST_S)
    of, calls = host.pace(), list[float]()

    def act() -> None:
        calls.append(host.now_s)
        host.now_s += pace.LONG_S

    assert of.keeps(act) == (None, False)
    assert len(calls) == 1
