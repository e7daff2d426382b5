"""The graphs that run on one device now, each at its share of it.

    work done by a piece = integral of its rate;  rates change only when a piece comes or goes, or, while
    several run, when one of them comes to replays that ask something else of the device

No clock of its own: whoever drives it says what time it is and asks when to come back. Alone on the
device, a burst of any length therefore needs one event.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Protocol

from simcore.contention import Demand, Rates
from simcore.ops import Publication

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

    def around(self, work_s: float) -> tuple[float, Demand]:
        """What it asks of the device once so much is done, and the work up to which it asks just that."""

    def shorten(self, replays: int) -> None:
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

    def around(self, work_s: float) -> tuple[float, Demand]:
        """The replay that is at work: its end, and what it asks of the device."""
        replay = self.replay_at(work_s)
        return self._ends[replay], self._demands[replay]

    def shorten(self, replays: int) -> None:
        """Leaves out all but the first so many."""
        del self._ends[replays:]


class Work(Protocol):
    """What runs on a device: `work_s` seconds of its `work` are done, at `rate` of its speed alone. Beside
    others, it asks `demand` of the device until `next_s` of its work, or until something leaves it there.
    `notes`: whether it notes where its rate changes."""

    work_s: float
    rate: float
    demand: Demand
    next_s: float

    @property
    def notes(self) -> bool:
        """Whether it notes where its rate changes."""

    @property
    def work(self) -> Any:
        """Its replays (`Replays`)."""

    @property
    def publications(self) -> deque[tuple[float, Publication]]:
        """What leaves it, and after how much work."""

    def note(self, now_s: float, *, once: bool = False) -> None:
        """Its rate changes, it begins or it ends now; `once`: unless that is noted of this moment."""

    def publish(self, publication: Publication) -> None:
        """Something leaves it now."""

    def finish(self) -> None:
        """Its work is done."""


@dataclass(slots=True, eq=False)
class Piece:
    """Work in progress. `progress` collects (time, work) where the rate changes."""

    work: Replays
    finish: Callable[[], None]
    publish: Callable[[Publication], None]
    publications: deque[tuple[float, Publication]]
    # What `finish` lets come, for whoever would rather do so himself.
    done: Any = None
    work_s: float = 0.0
    rate: float = 1.0
    demand: Demand = IDLE
    next_s: float = 0.0
    progress: list[tuple[float, float]] = field(default_factory=list)
    notes: ClassVar[bool] = True

    def note(self, now_s: float, *, once: bool = False) -> None:
        """Its rate changes, it begins or it ends now; `once`: unless that is noted of this moment."""
        if not once or self.progress[-1][0] < now_s:
            self.progress.append((now_s, self.work_s))


class SharedDevice:
    """See the head of this file. All times in seconds."""

    __slots__ = ("_first", "rates", "running", "updated_s")

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.running: list[Work] = []
        self.updated_s = 0.0
        # Of several pieces, when something happens to which, where nothing has changed since rates were.
        self._first: tuple[float, Work] | None = None

    def start(self, piece: Work, now_s: float) -> None:
        """Adds a piece; everybody's rate may change."""
        if self.running:
            self.advance(now_s)
        else:
            self.updated_s = now_s
        piece.note(now_s)
        self.running.append(piece)
        self._first = None
        if len(self.running) > 1:
            for other in self.running if len(self.running) == 2 else (piece,):
                _look_ahead(other)
            self._reprice(now_s)

    def advance(self, now_s: float) -> None:
        """Credits the running pieces with what they did since the last change."""
        elapsed_s = now_s - self.updated_s
        self.updated_s = now_s
        self._first = None
        for piece in self.running:
            piece.work_s += elapsed_s * piece.rate

    def leave(self, piece: Work) -> None:
        """Takes a piece away of which nothing has run, if it is there."""
        if piece in self.running:
            self.running.remove(piece)
            self._first = None

    def stop(self, piece: Work, now_s: float) -> None:
        """Ends a piece at the first replay boundary that its work has not passed yet."""
        self.advance(now_s)
        slack = ROUNDING * max(now_s, piece.work_s)
        work = piece.work
        replay = work.replay_at(max(0.0, piece.work_s - slack))
        # Work that has just come to the end of a replay has not passed it.
        if replay > 0 and work.end_s(replay - 1) >= piece.work_s - slack:
            replay -= 1
        self.shorten(piece, replay + 1)

    def shorten(self, piece: Work, replays: int) -> None:
        """Leaves out all but the first so many replays of a piece."""
        piece.work.shorten(replays)
        self._first = None
        if len(self.running) > 1:
            _look_ahead(piece)

    def next_due(self) -> tuple[float, Work]:
        """Seconds until something happens, and to which piece; one at least is running."""
        first = self.running[0]
        if len(self.running) == 1:
            return max(0.0, (_target_s(first) - first.work_s) / first.rate), first
        if self._first is not None:
            return self._first
        least_s = inf
        for piece in self.running:
            delay_s = (piece.next_s - piece.work_s) / piece.rate
            if delay_s < least_s:
                least_s, first = delay_s, piece
        return max(0.0, least_s), first

    def arrive(self, due: Work, now_s: float) -> None:
        """The moment that `next_due` told of has come: publishes and finishes what is due."""
        alone = len(self.running) == 1
        if alone and not due.publications:
            self.end_alone(due, now_s)
            due.finish()
            return
        # Asked before the work is credited: rounding could carry it past the boundary that is due.
        target_s = _target_s(due) if alone else due.next_s
        elapsed_s = now_s - self.updated_s
        self.updated_s = now_s
        finished = []
        for piece in self.running:
            work_s = target_s if piece is due else piece.work_s + elapsed_s * piece.rate
            piece.work_s = work_s
            slack = ROUNDING * (work_s if work_s > now_s else now_s)
            # Most have come to nothing: only what rate they run at changes.
            if not alone and work_s + slack < piece.next_s:
                continue
            while piece.publications and piece.publications[0][0] <= work_s + slack:
                piece.publish(piece.publications.popleft()[1])
            _snap(piece, slack, alone)
            if piece.work_s >= piece.work.total_s:
                finished.append(piece)
            elif not alone:
                _look_ahead(piece)
        for piece in finished:
            self.running.remove(piece)
            piece.work_s = piece.work.total_s
            piece.note(now_s)
            piece.finish()
        self._reprice(now_s)

    def end_alone(self, piece: Work, now_s: float) -> None:
        """All of the only piece is done; whoever asks has to finish it."""
        self.running.clear()
        self.updated_s = now_s
        piece.work_s = piece.work.total_s
        piece.note(now_s)

    def _reprice(self, now_s: float) -> None:
        running = self.running
        self._first = None
        if not running:
            return
        rates = self.rates([piece.demand for piece in running])
        least_s, first = inf, running[0]
        for piece, rate in zip(running, rates, strict=True):
            if rate != piece.rate:
                if piece.notes:
                    piece.note(now_s, once=True)
                piece.rate = rate
            delay_s = (piece.next_s - piece.work_s) / rate
            if delay_s < least_s:
                least_s, first = delay_s, piece
        if len(running) > 1:
            self._first = max(0.0, least_s), first


def _target_s(piece: Work) -> float:
    """The next point of the work of a piece that runs alone at which something happens."""
    end_s: float = piece.work.total_s
    return min(piece.publications[0][0], end_s) if piece.publications else end_s


def _look_ahead(piece: Work) -> None:
    """What a piece asks of the device now, and up to where."""
    piece.next_s, piece.demand = piece.work.around(piece.work_s)
    if piece.publications:
        piece.next_s = min(piece.publications[0][0], piece.next_s)


def _snap(piece: Work, slack: float, alone: bool) -> None:
    """Work that is within `slack` of where something changes has come to it; alone, nothing does but at its
    end."""
    work = piece.work
    if piece.work_s + slack >= work.total_s:
        piece.work_s = max(piece.work_s, work.total_s)
        return
    if alone:
        return
    end_s = work.around(piece.work_s)[0]
    if end_s <= piece.work_s + slack:
        piece.work_s = end_s
