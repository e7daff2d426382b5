"""The event clock of the simulated machine: SimPy's, which goes on without an event where nothing else can
happen meanwhile.

    at now + delay    an event; or at once, where whoever waits is the only one that this moment's event
                      wakes, and the next event comes later than now + delay; or, where others come before,
                      once whoever waits has worked them off himself (`hold`, `reach`)

All give the same times in the same order, since in the latter two cases nobody could tell.
"""

from collections.abc import Generator
from heapq import heappop, heappush
from math import inf
from types import MethodType
from typing import Any

import simpy
from simpy.events import NORMAL, URGENT

Steps = Generator[simpy.Event, Any, Any]
# A place in the order of events: when, of which priority, and the how-manieth.
Place = tuple[float, ...]
NEVER: Place = (inf, inf)
AT_ONCE: Place = (-inf,)
# Before SimPy's urgent ones.
FIRST = -1


class Clock(simpy.Environment):
    """See the head of this file."""

    # Asked for at every turn: a plain attribute in the place of SimPy's property.
    now: float = 0.0

    def __init__(self) -> None:
        super().__init__(0.0)
        # SimPy does so for its own class alone: or they are bound anew each time.
        self.event = MethodType(simpy.Event, self)  # type: ignore[method-assign]
        self.process = MethodType(simpy.Process, self)  # type: ignore[method-assign]
        # Whether an event wakes several just now.
        self._several = False
        # The place of what is held back, which no event may pass.
        self._held: Place = NEVER
        # For whoever waits for what has come already.
        self.past = simpy.Event(self)
        self.past._ok, self.past._value, self.past.callbacks = True, None, None  # type: ignore[assignment]

    def timeout(self, delay: float = 0.0, value: object = None) -> simpy.Timeout:
        """An event that comes after a delay. Raises ValueError where that is negative or NaN."""
        if not delay >= 0.0:
            raise ValueError(f"a delay of {delay} s")
        event = simpy.Timeout.__new__(simpy.Timeout)
        event.env, event.callbacks, event._value = self, [], value
        event._delay, event._ok = delay, True
        heappush(self._queue, (self._now + delay, NORMAL, next(self._eid), event))
        return event

    def passes(self, delay_s: float) -> bool:
        """Goes on by a delay if nothing else can happen until then; else does nothing and returns False."""
        at_s = self._now + delay_s
        if self._several or at_s >= self._held[0] or (self._queue and self._queue[0][0] <= at_s):
            return False
        self._now = self.now = at_s
        return True

    def can_hold(self) -> bool:
        """Whether something may be held back now: nothing is yet, and one alone is awake."""
        return self._held is NEVER and not self._several

    def hold(self, delay_s: float) -> None:
        """What would come after a delay has its place among the events, and is held back; in the place of
        what is held back already. `reach` has to follow."""
        self._held = (self._now + delay_s, NORMAL, next(self._eid))

    def reach(self) -> bool:
        """Works off the events that come before what is held back, and goes there; the last thing that its
        caller does. False where it was let go meanwhile, or where an event failed, which ends the run: it is
        not raised where somebody else happens to wait."""
        failed = False
        try:
            self._work_off()
        except Exception as error:
            failed = True
            event: Any = simpy.Event(self)
            event._ok, event._value = False, error
            self.schedule(event, FIRST)  # type: ignore[arg-type]
        held, self._held = self._held, NEVER
        if failed or held is AT_ONCE:
            return False
        self._now = self.now = held[0]
        return True

    def let_go(self) -> simpy.Event:
        """What is held back comes as an event, in its place."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        place: Any = (*self._held, event)
        heappush(self._queue, place)
        self._held = AT_ONCE
        return event

    def drive(self, steps: Steps) -> None:
        """Runs steps from now on, of which nobody needs to know when they have ended."""
        self._drive(_Driven(self, steps, None))

    def result(self, steps: Steps) -> simpy.Event:
        """Runs steps from now on; what they return comes with the event."""
        ended = self.event()
        self._drive(_Driven(self, steps, ended))
        return ended

    def comes(self, event: simpy.Event, value: object = None, delay_s: float = 0.0) -> None:
        """Lets an event come after a delay; whoever waits for it goes on before this returns if nothing else
        can happen until then, so that this has to be the last thing that its caller does."""
        if self.passes(delay_s):
            event._ok, event._value = True, value
            self._wake(event)
        else:
            self.later(event, delay_s, value)

    def later(self, event: simpy.Event, delay_s: float, value: object = None) -> None:
        """Lets an event come after a delay, whatever happens until then; in its turn, where that is none."""
        if delay_s > 0.0:
            self.timeout(delay_s).callbacks.append(lambda _: self.comes(event, value))
        else:
            event.succeed(value)

    def _wake(self, event: Any) -> None:
        callbacks, event.callbacks = event.callbacks, None
        if len(callbacks) == 1:
            callbacks[0](event)
            return
        self._several = True
        for callback in callbacks:
            callback(event)
        self._several = False

    def _drive(self, driven: "_Driven") -> None:
        start = simpy.Event(self)
        start._ok, start._value = True, None
        start.callbacks = [driven.go_on]
        self.schedule(start, URGENT)

    def run_all(self) -> None:
        """Runs until nothing can happen any more. Raises what a process or other steps raise."""
        self._work_off()

    def _work_off(self) -> None:
        # All events that come before what is held back.
        queue = self._queue
        while queue and queue[0] < self._held:
            first: Any = heappop(queue)
            self._now = self.now = first[0]
            # SimPy's types do not say that an event that has come has no callbacks.
            event = first[3]
            callbacks, event.callbacks = event.callbacks, None
            if len(callbacks) == 1:
                callbacks[0](event)
            else:
                self._several = True
                for callback in callbacks:
                    callback(event)
                self._several = False
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value


class _Driven:
    """Steps on their way: the next are taken when what they wait for has come. It never fails."""

    __slots__ = ("_clock", "_ended", "_send")

    def __init__(self, clock: Clock, steps: Steps, ended: simpy.Event | None) -> None:
        self._clock = clock
        self._send = steps.send
        self._ended = ended

    def go_on(self, event: Any) -> None:
        """The event has come."""
        try:
            while True:
                event = self._send(event._value)
                try:
                    callbacks = event.callbacks
                except AttributeError:
                    raise RuntimeError(f"{event!r} is yielded, which is no wait") from None
                if callbacks is not None:
                    callbacks.append(self.go_on)
                    return
        except StopIteration as end:
            if self._ended is not None:
                self._clock.comes(self._ended, end.value)
