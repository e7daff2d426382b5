"""Processor sharing on one device: graphs that run at the same time, each at its rate.

    work done by a piece = integral of its rate;  rates change only when a piece starts or ends, or, while
    several run, when one of them reaches replays with another demand on the device

Only the pieces whose rate changes are updated; the times at which the others are due stay.

The device is passive: the caller passes the time and asks for the next moment at which something happens. So
a burst of any length that is alone on the device needs one event.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import inf, nan
from typing import Any, Protocol

from simcore.ops.op import Publication
from simcore.sim.contention import Crowd, Demand, Rates

# Work this close to a boundary, relative to the time or the work, has reached it.
ROUNDING = 1e-12
IDLE = Demand(0.0, 0.0)


class Replays(Protocol):
    """The work of a launch, replay after replay, in seconds of work alone on the device."""

    @property
    def replays(self) -> int:
        """The number of replays."""

    @property
    def total_s(self) -> float:
        """The work of all replays."""

    def end_s(self, replay: int) -> float:
        """The work after which a replay ends."""

    def replay_at(self, work_s: float) -> int:
        """The replay that runs after `work_s` of work."""

    def demand_at(self, work_s: float) -> tuple[float, Demand]:
        """The demand after `work_s` of work, preceded by the work until which that demand stays."""

    def truncate(self, replays: int) -> None:
        """Keeps only the first `replays` replays."""


class Listed:
    """Replays whose ends and demands are listed one by one."""

    __slots__ = ("_demands", "_ends")

    def __init__(self, ends: list[float], demands: Sequence[Demand]) -> None:
        self._ends = ends
        self._demands = demands

    @property
    def replays(self) -> int:
        """The number of replays."""
        return len(self._ends)

    @property
    def total_s(self) -> float:
        """The work of all replays."""
        return self._ends[-1]

    def end_s(self, replay: int) -> float:
        """The work after which a replay ends."""
        return self._ends[replay]

    def replay_at(self, work_s: float) -> int:
        """The replay that runs after `work_s` of work."""
        return min(bisect_right(self._ends, work_s), len(self._ends) - 1)

    def demand_at(self, work_s: float) -> tuple[float, Demand]:
        """The end and the demand of the replay that runs after `work_s` of work."""
        replay = self.replay_at(work_s)
        return self._ends[replay], self._demands[replay]

    def truncate(self, replays: int) -> None:
        """Keeps only the first `replays` replays."""
        del self._ends[replays:]


class Execution(Protocol):
    """Work that runs on a device: `work_s` seconds of its `work` were done at `at_s`, and since then it runs
    at `rate` times its speed alone. Beside other work, `demand` is its demand until it has done `next_s` of
    work or publishes. `records_progress`: whether it records when its rate changes."""

    at_s: float
    work_s: float
    rate: float
    demand: Demand
    next_s: float
    begun_s: float

    @property
    def records_progress(self) -> bool:
        """Whether it records when its rate changes."""

    @property
    def arithmetic_s(self) -> float:
        """Seconds of arithmetic in its work (power.py)."""

    @property
    def others_s(self) -> float:
        """Seconds of other work in its work (power.py)."""

    @property
    def work(self) -> Any:
        """Its replays (`Replays`)."""

    @property
    def publications(self) -> deque[tuple[float, Publication]]:
        """Its publications, each with the seconds of work after which it leaves."""

    def record_progress(self, now_s: float, *, once: bool = False) -> None:
        """Records the work done by now: at its start, its end and each change of rate. `once`: does nothing
        if this moment is recorded already."""

    def publish(self, publication: Publication) -> None:
        """Publishes now."""

    def finish(self) -> None:
        """Tells that its work is done."""

    def finish_last(self) -> None:
        """As `finish`, if its caller does nothing after it at this moment."""


class Piece:
    """The work of a launch on a device. `progress`: (time, work) at each change of rate. `last` is called
    instead of `finish` if the caller does nothing after it at this moment."""

    __slots__ = (
        "arithmetic_s",
        "at_s",
        "begun_s",
        "demand",
        "finish",
        "last",
        "next_s",
        "others_s",
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
        self.at_s = self.work_s = self.next_s = self.begun_s = 0.0
        self.arithmetic_s = self.others_s = 0.0
        self.rate = 1.0
        self.demand = IDLE
        self.progress: list[tuple[float, float]] = []
        self.records_progress = True

    def finish_last(self) -> None:
        """As `finish`, if its caller does nothing after it at this moment."""
        (self.last or self.finish)()

    def record_progress(self, now_s: float, *, once: bool = False) -> None:
        """Records the work done by now. `once`: does nothing if this moment is recorded already."""
        if not once or self.progress[-1][0] < now_s:
            self.progress.append((now_s, self.work_s))


class SharedDevice:
    """See the head of this file. All times in seconds."""

    __slots__ = ("_crowd", "_dues_s", "_rates", "rates", "running")

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.running: list[Execution] = []
        # While several pieces run: their demands, their rates, and when something happens to each.
        self._crowd = Crowd()
        self._rates: list[float] = []
        self._dues_s: list[float] = []

    def start(self, piece: Execution, now_s: float) -> None:
        """Adds a piece; all rates may change."""
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
        # Work that has just reached the end of a replay has not passed it.
        self.truncate(piece, piece.work.replay_at(max(0.0, piece.work_s - slack)) + 1)

    def truncate(self, piece: Execution, replays: int) -> None:
        """Keeps only the first `replays` replays of a piece."""
        piece.work.truncate(replays)
        if len(self.running) > 1 and piece in self.running:
            i = self.running.index(piece)
            _look_ahead(piece)
            self._crowd.change(i, piece.demand)
            self._dues_s[i] = _due_s(piece)

    def next_due(self) -> tuple[float, Execution]:
        """When something happens next, and to which piece; at least one must be running."""
        first = self.running[0]
        if len(self.running) == 1:
            return first.at_s + max(0.0, (_target_s(first) - first.work_s) / first.rate), first
        due_s = min(self._dues_s)
        return due_s, self.running[self._dues_s.index(due_s)]

    def arrive(self, due: Execution, now_s: float) -> None:
        """Publishes and finishes what is due of a piece, at the time that `next_due` returned."""
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
        """Removes the only piece, which is done; the caller must call its `finish`."""
        self.running.clear()
        _end(piece, now_s)

    def _arrive_beside_others(self, due: Execution, now_s: float) -> None:
        # Not computed from rate and time: rounding could carry the work past the point that is due.
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
        """Computes all rates, and the due times of the pieces whose rate changes."""
        running, before = self.running, self._rates
        if len(running) < 2:
            # The demand of a piece that runs alone is not needed.
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
    """Sets the rate of a piece from now on; the piece records a change."""
    _update_progress(piece, now_s)
    if rate != piece.rate:
        if piece.records_progress:
            piece.record_progress(now_s, once=True)
        piece.rate = rate


def _update_progress(piece: Execution, now_s: float) -> None:
    """Adds the work that a piece has done since its last update."""
    piece.work_s += (now_s - piece.at_s) * piece.rate
    piece.at_s = now_s


def _due_s(piece: Execution) -> float:
    """When something happens to a piece that runs beside others."""
    return piece.at_s + max(0.0, (piece.next_s - piece.work_s) / piece.rate)


def _end(piece: Execution, now_s: float) -> None:
    piece.work_s, piece.at_s = piece.work.total_s, now_s
    piece.record_progress(now_s)


def _slack_s(piece: Execution, now_s: float) -> float:
    return ROUNDING * max(piece.work_s, now_s)


def _target_s(piece: Execution) -> float:
    """The seconds of work at which something happens next to a piece that runs alone."""
    end_s: float = piece.work.total_s
    return min(piece.publications[0][0], end_s) if piece.publications else end_s


def _look_ahead(piece: Execution) -> None:
    """Sets the demand of a piece now, and the seconds of work until which it stays."""
    piece.next_s, piece.demand = piece.work.demand_at(piece.work_s)
    if piece.publications:
        piece.next_s = min(piece.publications[0][0], piece.next_s)


def _snap_to_boundary(piece: Execution, now_s: float) -> None:
    """Moves work that is within rounding of the end of its demand to that end."""
    end_s = piece.work.demand_at(piece.work_s)[0]
    if end_s <= piece.work_s + _slack_s(piece, now_s):
        piece.work_s = end_s
