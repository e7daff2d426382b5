"""The graphs that run on one device now, each at its share of it.

    work done by a piece = integral of its rate;  rates change only when a piece comes or goes, or, while
    several run, when one of them passes the boundary between two replays

No clock of its own: whoever drives it says what time it is and asks when to come back. Alone on the
device, a burst of any length therefore needs one event.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from simcore.contention import Demand, Rates
from simcore.ops import Publication

# Work that is this close to a boundary, relative to the time it was reckoned at, has reached it.
ROUNDING = 1e-12


@dataclass(slots=True, eq=False)
class Piece:
    """Local work in progress. `ends[i]` and `demands[i]` belong to replay i: seconds of work after which
    it ends, and what it asks of the device. `progress` collects (time, work) where the rate changes."""

    ends: list[float]
    demands: Sequence[Demand]
    finish: Callable[[], None]
    publish: Callable[[Publication], None]
    publications: deque[tuple[float, Publication]]
    work_s: float = 0.0
    rate: float = 1.0
    progress: list[tuple[float, float]] = field(default_factory=list)

    def replay(self) -> int:
        """Which replay it is in."""
        return min(bisect_right(self.ends, self.work_s), len(self.ends) - 1)

    def target_s(self, alone: bool) -> float:
        """The next point of its work at which something happens."""
        end = self.ends[-1] if alone else self.ends[self.replay()]
        return min(self.publications[0][0], end) if self.publications else end


class SharedDevice:
    """See the head of this file. All times in seconds."""

    def __init__(self, rates: Rates) -> None:
        self.rates = rates
        self.running: list[Piece] = []
        self.updated_s = 0.0

    def start(self, piece: Piece, now_s: float) -> None:
        """Adds a piece; everybody's rate may change."""
        self.advance(now_s)
        piece.progress.append((now_s, 0.0))
        self.running.append(piece)
        self._reprice(now_s)

    def advance(self, now_s: float) -> None:
        """Credits the running pieces with what they did since the last change."""
        elapsed_s = now_s - self.updated_s
        self.updated_s = now_s
        for piece in self.running:
            piece.work_s += elapsed_s * piece.rate

    def stop(self, piece: Piece, now_s: float) -> None:
        """Ends a piece at the first replay boundary that its work has not passed yet."""
        self.advance(now_s)
        reached = bisect_left(piece.ends, piece.work_s - ROUNDING * max(now_s, piece.work_s))
        del piece.ends[reached + 1 :]

    def next_due(self) -> tuple[float, Piece] | None:
        """Seconds until something happens, and to which piece."""
        if not self.running:
            return None
        alone = len(self.running) == 1
        waits = [((p.target_s(alone) - p.work_s) / p.rate, p) for p in self.running]
        delay_s, piece = min(waits, key=lambda wait: wait[0])
        return max(0.0, delay_s), piece

    def arrive(self, due: Piece, now_s: float) -> None:
        """The moment that `next_due` told of has come: publishes and finishes what is due."""
        # Asked before the work is credited: rounding could carry it past the boundary that is due.
        target_s = due.target_s(len(self.running) == 1)
        self.advance(now_s)
        due.work_s = target_s
        finished = []
        for piece in self.running:
            slack = ROUNDING * max(piece.work_s, now_s)
            while piece.publications and piece.publications[0][0] <= piece.work_s + slack:
                piece.publish(piece.publications.popleft()[1])
            boundary = bisect_left(piece.ends, piece.work_s - slack)
            if boundary < len(piece.ends) and piece.ends[boundary] <= piece.work_s + slack:
                piece.work_s = piece.ends[boundary]
            if piece.work_s >= piece.ends[-1]:
                finished.append(piece)
        for piece in finished:
            self.running.remove(piece)
            piece.work_s = piece.ends[-1]
            piece.progress.append((now_s, piece.work_s))
            piece.finish()
        self._reprice(now_s)

    def _reprice(self, now_s: float) -> None:
        if not self.running:
            return
        rates = self.rates([piece.demands[piece.replay()] for piece in self.running])
        for piece, rate in zip(self.running, rates, strict=True):
            if rate != piece.rate:
                if piece.progress[-1][0] < now_s:
                    piece.progress.append((now_s, piece.work_s))
                piece.rate = rate
