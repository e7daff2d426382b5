"""The event clock of the simulated machine: SimPy's, which advances without an event if nothing else can
happen meanwhile.

    at now + delay    an event; or at once (`try_advance`), if one process alone is awake and the next event
                      comes later than now + delay; or, if others come before, after the waiting process has
                      run them itself (`hold_end`, `run_to_held_end`)

All three give the same times in the same order.

`succeed_and_run` may run the waiting process before it returns, and so may functions with `last=True`: their
caller must do nothing after them at that moment.
"""

from collections.abc import Callable, Generator
from heapq import heappop, heappush
from math import inf
from typing import Any

import simpy
from simpy.events import NORMAL, PENDING, URGENT

Steps = Generator[simpy.Event, Any, Any]
# A place in the order of events: time, priority, number.
Place = tuple[float, ...]
NEVER: Place = (inf, inf)
AT_ONCE: Place = (-inf,)
# A priority before SimPy's URGENT.
FIRST = -1


class Call:
    """An action at its time: as an event with one callback, but in a third of the time."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action = action


class Clock:
    """See the head of this file. `simpy` is the environment of its events, whose queue the clock runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.simpy = simpy.Environment(0.0)
        self._queue: list[Any] = self.simpy._queue
        self._number = self.simpy._eid
        # Whether an event with several callbacks is running them now.
        self._several = False
        # The held place: events behind it do not run.
        self._held: Place = NEVER
        # Yielded if a wait is over already.
        self.already_come = self.event()
        self.already_come._ok, self.already_come._value, self.already_come.callbacks = True, None, None  # type: ignore[assignment]

    def event(self) -> simpy.Event:
        """An event that has not come."""
        return simpy.Event(self.simpy)

    def process(self, steps: Steps) -> simpy.Process:
        """Starts steps as a process of SimPy: an event, which comes when the steps have ended."""
        return simpy.Process(self.simpy, steps)

    def timeout(self, delay: float = 0.0, value: object = None) -> simpy.Event:
        """An event that comes after a delay. Raises ValueError if the delay is negative or NaN."""
        event = self.event()
        event._ok, event._value = True, value
        self._push(delay, NORMAL, event)
        return event

    def call(self, delay_s: float, action: Callable[[], object]) -> None:
        """Calls `action` after a delay, in its turn. Raises ValueError if the delay is negative or NaN."""
        self._push(delay_s, NORMAL, Call(action))

    def _push(self, delay_s: float, priority: int, due: object) -> None:
        if not delay_s >= 0.0:
            raise ValueError(f"a delay of {delay_s} s")
        heappush(self._queue, (self.now + delay_s, priority, next(self._number), due))

    def _at(self, at_s: float) -> None:
        # SimPy schedules the events of its processes by its own clock.
        self.now = at_s
        self.simpy._now = at_s

    def try_advance(self, delay_s: float) -> bool:
        """Advances by a delay if nothing else can happen until then; else does nothing and returns False."""
        at_s = self.now + delay_s
        if self._several or (self._held is not NEVER and at_s >= self._held[0]):
            return False
        if self._queue:
            next_s: float = self._queue[0][0]
            if next_s <= at_s:
                return False
        self._at(at_s)
        return True

    def can_hold_end(self) -> bool:
        """Whether an end may be held now: no other is held, and one process alone is awake."""
        return self._held is NEVER and not self._several

    def hold_end(self, delay_s: float) -> None:
        """Reserves a place among the events, a delay from now; replaces a held place. The caller must call
        `run_to_held_end` next."""
        self._held = (self.now + delay_s, NORMAL, next(self._number))

    def run_to_held_end(self) -> bool:
        """Runs the events before the held place and advances to it; its caller must do nothing after it at
        this moment. Returns False if the place was released meanwhile, or if an event failed: the error ends
        the run instead of being raised in the process that happens to wait here."""
        failed = False
        try:
            self._work_off()
        except Exception as error:
            failed = True
            event = self.event()
            event._ok, event._value = False, error
            self._push(0.0, FIRST, event)
        held, self._held = self._held, NEVER
        if failed or held is AT_ONCE:
            return False
        self._at(held[0])
        return True

    def release_held(self, action: Callable[[], object]) -> None:
        """Puts an event with an action in the held place, which is no longer held."""
        place: Any = (*self._held, Call(action))
        heappush(self._queue, place)
        self._held = AT_ONCE

    def drive(self, steps: Steps) -> None:
        """Starts steps now; nothing waits for their end."""
        self._drive(_Driven(self, steps, None))

    def result(self, steps: Steps, *, last: bool = False) -> simpy.Event:
        """Starts steps now; the returned event comes with their result. `last`: see the head of this file."""
        ended = self.event()
        driven = _Driven(self, steps, ended)
        if last and self.try_advance(0.0):
            driven.begin()
        else:
            self._drive(driven)
        return ended

    def succeed_and_run(self, event: simpy.Event, value: object = None, delay_s: float = 0.0) -> None:
        """Triggers an event after a delay; the process that waits for it runs before this returns, if nothing
        else can happen until then. Its caller must do nothing after it at this moment."""
        if self.try_advance(delay_s):
            event._ok, event._value = True, value
            self._wake(event)
        else:
            self.succeed_after(event, delay_s, value)

    def succeed_after(self, event: simpy.Event, delay_s: float, value: object = None) -> None:
        """Triggers an event after a delay, in its turn."""
        if delay_s > 0.0:
            self.call(delay_s, lambda: self.succeed_and_run(event, value))
        else:
            self.succeed(event, value)

    def succeed(self, event: simpy.Event, value: object = None) -> None:
        """Triggers an event now, in its turn; a third of the time of SimPy's `event.succeed`. Raises
        RuntimeError if the event has come already."""
        if event._value is not PENDING:
            raise RuntimeError(f"{event} has already been triggered")
        event._ok, event._value = True, value
        self._push(0.0, NORMAL, event)

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
        self._push(0.0, URGENT, Call(driven.begin))

    def run_all(self) -> None:
        """Runs until no event is left. Raises the errors of processes and other steps."""
        self._work_off()

    def _work_off(self) -> None:
        # All events before the held place.
        queue = self._queue
        while queue and (self._held is NEVER or queue[0] < self._held):
            first: Any = heappop(queue)
            self._at(first[0])
            event = first[3]
            if isinstance(event, Call):
                event.action()
                continue
            # SimPy's types do not say that the callbacks of a past event are None.
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
    """Runs steps: sends them the value of each event that they yield, when the event comes. An error of the
    steps ends the run; their event `ended` never fails."""

    __slots__ = ("_clock", "_ended", "_send")

    def __init__(self, clock: Clock, steps: Steps, ended: simpy.Event | None) -> None:
        self._clock = clock
        self._send = steps.send
        self._ended = ended

    def begin(self) -> None:
        """Takes the first steps."""
        self.go_on(self._clock.already_come)

    def go_on(self, event: Any) -> None:
        """Takes the next steps, since the event has come."""
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
                self._clock.succeed_and_run(self._ended, end.value)
