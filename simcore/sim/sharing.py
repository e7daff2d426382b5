"""Processor sharing on one device: graphs that run at once, each at its rate.

    work done by a piece = integral of its rate;  rates change only when a piece comes or goes, or, while
    several run, when one of them comes to replays that ask something else of the device

Only pieces whose rate changes are reckoned anew; when the others are due is known.

It is passive: the caller passes the time and asks for the next moment at which something happens. A burst of
any length that is alone on the device therefore needs one event.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, Protocol

from simcore.ops.op import Publication
from simcore.sim.contention import Crowd, Demand, Rates

# Work that is this close to a boundary, relative to the time it was reckoned at, has reached it.
ROUNDING = 1e-12
IDLE = Demand(0.0, 0.0)


class Replays(Protocol):
    """The work of a launch: how its replays follow each other, in seconds of work alone on the device."""

    @property
    def replays(self) -> int:
        """How many there are."""

    @property
    def total_s(self) -> float:
        """Work of all of them."""

    def end_s(self, replay: int) -> float:
        """Work after which a replay ends."""

    def replay_at(self, work_s: float) -> int:
        """The replay that is at work once so much is done."""

    def demand_at(self, work_s: float) -> tuple[float, Demand]:
        """What it asks of the device once so much is done, and the work up to which it asks just that."""

    def truncate(self, replays: int) -> None:
        """Leaves out all but the first so many."""


class Listed:
    """Replays whose ends and demands are listed one by one."""

    __slots__ = ("_demands", "_ends")

    def __init__(self, ends: list[float], demands: Sequence[Demand]) -> None:
        self._ends = ends
        self._demands = demands

    @property
    def replays(self) -> int:
        """How many there are."""
        return len(self._ends)

    @property
    def total_s(self) -> float:
        """Work of all of them."""
        return self._ends[-1]

    def end_s(self, replay: int) -> float:
        """Work after which a replay ends."""
        return self._ends[replay]

    def replay_at(self, work_s: float) -> int:
        """The replay that is at work once so much is done."""
        return min(bisect_right(self._ends, work_s), len(self._ends) - 1)

    def demand_at(self, work_s: float) -> tuple[float, Demand]:
        """The replay that is at work: its end, and what it asks of the device."""
        replay = self.replay_at(work_s)
        return self._ends[replay], self._demands[replay]

    def truncate(self, replays: int) -> None:
        """Leaves out all but the first so many."""
        del self._ends[replays:]


class Execution(Protocol):
    """What runs on a device: `work_s` seconds of its `work` were done at `at_s`, and since then it runs at
    `rate` of its speed alone. Beside others, it asks `demand` of the device until `next_s` of its work, or
    until something leaves it there. `records_progress`: whether it notes where its rate changes."""

    at_s: float
    work_s: float
    rate: float
    demand: Demand
    next_s: float

    @property
    def records_progress(self) -> bool:
        """Whether it notes where its rate changes."""

    @property
    def work(self) -> Any:
        """Its replays (`Replays`)."""

    @property
    def publications(self) -> deque[tuple[float, Publication]]:
        """What leaves it, and after how much work."""

    def record_progress(self, now_s: float, *, once: bool = False) -> None:
        """Its rate changes, it begins or it ends now; `once`: unless that is noted of this moment."""

    def publish(self, publication: Publication) -> None:
        """Something leaves it now."""

    def finish(self) -> None:
        """Its work is done."""

    def finish_last(self) -> None:
        """Its work is done, and this is the last thing that its caller does."""


class Piece:
    """Launched work in progress. `progress` collects (time, work) where the rate changes. `last` is called in
    the place of `finish` where that is the last thing that its caller does."""

    __slots__ = (
        "at_s",
        "demand",
        "finish",
        "last",
        "next_s",
        "progress",
        "publications",
        "publish",
        "rate",
        "records_progress",
        "work",
        "work_s",
    )  # fmt: skip

    def __init__(
        self,
        work: Replays,
        finish: Callable[[], None],
        publish: Callable[[Publication], None],
        publications: deque[tuple[float, Publication]],
        last: Callable[[], None] | None = None,
    ) -> None:
        self.work = work
        self.finish = finish
        self.publish = publish
        self.publications = publications
        self.last = last
        self.at_s = self.work_s = self.next_s = 0.0
        self.rate = 1.0
        self.demand = IDLE
        self.progress: list[tuple[float, float]] = []
        self.records_progress = True

    def finish_last(self) -> None:
        """Its work is done, and this is the last thing that its caller does."""
        (self.last or self.finish)()

    def record_progress(self, now_s: float, *, once: bool = False) -> None:
        """Its rate changes, it begins or it ends now; `once`: unless that is noted of this moment."""
        if not once or self.progress[-1][0] < now_s:
            self.progress.append((now_s, self.work_s))


class SharedDevice:
    """See the head of this file. All times in seconds."""

    __slots__ = ("_crowd", "_dues_s", "_rates", "rates", "running")

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.running: list[Execution] = []
        # Of several pieces: what they ask for, at which rates they run, and when something happens to each.
        self._crowd = Crowd()
        self._rates: list[float] = []
        self._dues_s: list[float] = []

    def start(self, piece: Execution, now_s: float) -> None:
        """Adds a piece; the rates of all may change."""
        running = self.running
        if len(running) == 1:
            _update_progress(running[0], now_s)
        piece.at_s = now_s
        piece.record_progress(now_s)
        running.append(piece)
        if len(running) > 1:
            for other in running if len(running) == 2 else (piece,):
                _look_ahead(other)
                self._crowd.join(other.demand)
                self._rates.append(nan)
                self._dues_s.append(inf)
            self._update_rates(now_s)

    def withdraw(self, piece: Execution) -> None:
        """Removes a piece that has not begun; does nothing unless it is the only one."""
        if self.running == [piece]:
            self.running.clear()

    def stop(self, piece: Execution, now_s: float) -> None:
        """Ends a piece at the first replay boundary that its work has not passed yet."""
        _update_progress(piece, now_s)
        slack = ROUNDING * max(now_s, piece.work_s)
        # Work that has just come to the end of a replay has not passed it.
        self.truncate(piece, piece.work.replay_at(max(0.0, piece.work_s - slack)) + 1)

    def truncate(self, piece: Execution, replays: int) -> None:
        """Leaves out all but the first so many replays of a piece."""
        piece.work.truncate(replays)
        if len(self.running) > 1 and piece in self.running:
            i = self.running.index(piece)
            _look_ahead(piece)
            self._crowd.change(i, piece.demand)
            self._dues_s[i] = _due_s(piece)

    def next_due(self) -> tuple[float, Execution]:
        """When something happens, and to which piece; one at least is running."""
        first = self.running[0]
        if len(self.running) == 1:
            return first.at_s + max(0.0, (_target_s(first) - first.work_s) / first.rate), first
        due_s = min(self._dues_s)
        return due_s, self.running[self._dues_s.index(due_s)]

    def arrive(self, due: Execution, now_s: float) -> None:
        """The moment that `next_due` told of has come: publishes and finishes what is due."""
        if len(self.running) > 1:
            self._arrive_beside_others(due, now_s)
            return
        if due.publications:
            due.work_s, due.at_s = _target_s(due), now_s
            self._publish(due, now_s)
            if due.work_s + _slack_s(due, now_s) < due.work.total_s:
                return
        self.end_alone(due, now_s)
        due.finish()

    def end_alone(self, piece: Execution, now_s: float) -> None:
        """The only piece is done; the caller has to finish it."""
        self.running.clear()
        _end(piece, now_s)

    def _arrive_beside_others(self, due: Execution, now_s: float) -> None:
        # Not what its rate makes of the time: rounding could carry it past what is due.
        due.work_s, due.at_s = due.next_s, now_s
        if due.publications:
            self._publish(due, now_s)
        i = self.running.index(due)
        if due.work_s + _slack_s(due, now_s) >= due.work.total_s:
            self._remove(i)
            _end(due, now_s)
            due.finish()
        else:
            before = due.demand
            _snap_to_boundary(due, now_s)
            _look_ahead(due)
            if due.demand is not before:
                self._crowd.change(i, due.demand)
            self._dues_s[i] = _due_s(due)
        self._update_rates(now_s)

    def _publish(self, piece: Execution, now_s: float) -> None:
        while piece.publications and piece.publications[0][0] <= piece.work_s + _slack_s(piece, now_s):
            piece.publish(piece.publications.popleft()[1])

    def _remove(self, i: int) -> None:
        del self.running[i]
        if self._dues_s:
            self._crowd.leave(i)
            del self._dues_s[i], self._rates[i]

    def _update_rates(self, now_s: float) -> None:
        """Works out anew when something happens to those whose rate is another than before."""
        running, before = self.running, self._rates
        if len(running) < 2:
            # Alone, a piece is asked nothing.
            self._crowd, self._rates, self._dues_s = Crowd(), [], []
            for piece in running:
                _set_rate(piece, 1.0, now_s)
            return
        self._rates = rates = self.rates(self._crowd)
        for i, rate in enumerate(rates):
            if rate != before[i]:
                piece = running[i]
                _set_rate(piece, rate, now_s)
                self._dues_s[i] = _due_s(piece)


def _set_rate(piece: Execution, rate: float, now_s: float) -> None:
    """A piece runs at a rate from now on; it notes that where it is another."""
    _update_progress(piece, now_s)
    if rate != piece.rate:
        if piece.records_progress:
            piece.record_progress(now_s, once=True)
        piece.rate = rate


def _update_progress(piece: Execution, now_s: float) -> None:
    """Adds what a piece has done since that was reckoned last."""
    piece.work_s += (now_s - piece.at_s) * piece.rate
    piece.at_s = now_s


def _due_s(piece: Execution) -> float:
    """When something happens to a piece beside others."""
    return piece.at_s + max(0.0, (piece.next_s - piece.work_s) / piece.rate)


def _end(piece: Execution, now_s: float) -> None:
    piece.work_s, piece.at_s = piece.work.total_s, now_s
    piece.record_progress(now_s)


def _slack_s(piece: Execution, now_s: float) -> float:
    return ROUNDING * max(piece.work_s, now_s)


def _target_s(piece: Execution) -> float:
    """The next point of the work of a piece that runs alone at which something happens."""
    end_s: float = piece.work.total_s
    return min(piece.publications[0][0], end_s) if piece.publications else end_s


def _look_ahead(piece: Execution) -> None:
    """What a piece asks of the device now, and up to where."""
    piece.next_s, piece.demand = piece.work.demand_at(piece.work_s)
    if piece.publications:
        piece.next_s = min(piece.publications[0][0], piece.next_s)


def _snap_to_boundary(piece: Execution, now_s: float) -> None:
    """Work that is within rounding of where something changes has come to it."""
    end_s = piece.work.demand_at(piece.work_s)[0]
    if end_s <= piece.work_s + _slack_s(piece, now_s):
        piece.work_s = end_s
