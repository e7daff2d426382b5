"""Launches priced in closed form, for runs of millions of steps: each is one object, one row of the trace and
at most one event.

    ends at  begun_s + work / rate        begun_s = max(issued_s, stream free, tickets done)

The same rules as in `simulation.py`, for launches inside which nothing happens: no flag, no signal, no put,
and collectives only among ranks in lockstep. One rule differs: here such a collective is part of the launch's
work and other streams slow it down; in `simulation.py` it always takes its price.
"""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import simpy

from simcore.machine.trace import Cause
from simcore.ops.op import Publication
from simcore.sim.bursts import BurstCost
from simcore.sim.sharing import IDLE

if TYPE_CHECKING:
    from simcore.sim.host import CauseSteps, SimTicket
    from simcore.sim.simulation import LaunchInfo, Simulation

# Called when a ticket is done; with True if its caller does nothing after it at this moment (see clock.py).
DoneCallback = Callable[[bool], None]
_NOTHING_LEAVES: deque[tuple[float, Publication]] = deque()


class RowLaunch:
    """A launch, its ticket and its work on the device in one object."""

    __slots__ = (
        "_callbacks",
        "_sim",
        "advance",
        "after",
        "at_s",
        "begun_s",
        "demand",
        "end",
        "graph",
        "host_event",
        "id",
        "info",
        "issued_s",
        "lane",
        "next_s",
        "on_done",
        "ran",
        "rank",
        "rate",
        "ready_s",
        "repeat",
        "sizes",
        "stopped",
        "stream",
        "until",
        "work",
        "work_s",
    )  # fmt: skip
    # It publishes nothing.
    publications: ClassVar[deque[tuple[float, Publication]]] = _NOTHING_LEAVES
    records_progress: ClassVar[bool] = False

    def __init__(
        self,
        sim: "Simulation",
        rank: int,
        stream: str,
        info: "LaunchInfo",
        issued_s: float,
        after: "tuple[SimTicket | RowLaunch, ...]",
        sizes: Mapping[str, int],
        advance: Mapping[str, int] | None,
        repeat: int,
        until: str | None,
    ) -> None:
        self._sim = sim
        self.id = sim.next_launch()
        self.rank = rank
        self.stream = stream
        self.info = info
        self.graph = info.graph
        self.issued_s = issued_s
        self.after = after
        self.sizes = sizes
        self.advance = advance
        self.repeat = repeat
        self.until = until
        self.end: Cause | None = None
        self.ran = 0
        self.work: BurstCost | None = None
        self._callbacks: list[DoneCallback] | None = None
        # The event that its host waits for, if the end became an event while the host waited inline.
        self.host_event: simpy.Event | None = None

    def reset_for(self, lane: Any) -> None:
        """Sets the state of its execution to that of a start on stream `lane`."""
        self.lane = lane
        self.at_s = self.work_s = self.next_s = self.ready_s = self.begun_s = 0.0
        self.rate = 1.0
        self.demand = IDLE
        self.stopped = False
        self.on_done: Callable[[], None] | None = None

    # -- as a ticket ---------------------------------------------------------------------------------

    @property
    def is_done(self) -> bool:
        """Whether the launch has ended."""
        return self.end is not None

    def stop(self) -> None:
        """Ends the launch at its next replay boundary; one that has not begun runs no replay."""
        if self.end is None:
            machine = self._sim.machines[self.rank]
            machine.submit_deferred()
            machine.at_host_time(partial(self._sim.stop_row, self))

    def wait_done(self) -> "CauseSteps":
        """Waits until the launch is done; returns its end."""
        if self.end is None:
            event = self._sim.env.event()
            self.add_callback(lambda _: self._sim.env.succeed(event))
            yield event
        assert self.end is not None
        return self.end

    def add_callback(self, waiter: DoneCallback) -> None:
        """Calls `waiter` when the launch is done; it must not be done yet."""
        self._sim.schedule_end(self)
        if self._callbacks is None:
            self._callbacks = [waiter]
        else:
            self._callbacks.append(waiter)

    # -- as a piece of work --------------------------------------------------------------------------

    @property
    def arithmetic_s(self) -> float:
        """Seconds of arithmetic in its work."""
        return 0.0 if self.work is None else self.work.arithmetic_under_load_s

    @property
    def others_s(self) -> float:
        """Seconds of other work in its work."""
        return 0.0 if self.work is None else self.work.others_under_load_s

    def record_progress(self, now_s: float, *, once: bool = False) -> None:
        """Does nothing: a row does not say when the rate changed."""

    def publish(self, publication: Publication) -> None:
        """Raises AssertionError: a launch in closed form publishes nothing."""
        raise AssertionError(f"a launch in closed form publishes nothing, not {publication.signal}")

    def finish(self) -> None:
        """Ends the launch now: writes its row, calls its waiters, lets its stream go on."""
        self._sim.end_row(self)
        waiters, self._callbacks = self._callbacks, None
        if waiters is not None:
            for waiter in waiters:
                waiter(False)
        if self.on_done is not None:
            self.on_done()

    def finish_last(self) -> None:
        """As `finish`, if its caller does nothing after it at this moment: an only waiter may run at once."""
        waiters, go_on = self._callbacks, self.on_done
        if waiters is None or len(waiters) > 1 or go_on is None or go_on is not self.lane.go_on:
            self.finish()
            return
        self._sim.end_row(self)
        self._callbacks = None
        go_on()
        waiters[0](True)
