"""The host's side of the simulated machine: one rank's verbs, and the tickets they give.

A host's clock runs ahead of the event clock by what its verbs cost; a wait catches up:

    host time after a verb = max(event clock, host time) + cost of the verb

All host loops of a rank share one host thread, and so one clock.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import simpy

from simcore import mesh as layout
from simcore.machine import Condition, Flag, Program, Setting, Ticket, Wait
from simcore.ops import Graph
from simcore.sharing import Piece
from simcore.trace import Cause, Gauge, Mark, Message

if TYPE_CHECKING:
    from simcore.sim import Simulation

Steps = Generator[simpy.Event, Any, Any]
CauseSteps = Generator[simpy.Event, Any, Cause]


def latest(a: Cause, b: Cause) -> Cause:
    """The later of two causes; the first where they are equal."""
    return b if b.at_s > a.at_s else a


def then(event: simpy.Event, action: Callable[[simpy.Event], object]) -> None:
    """Calls `action` when an event comes."""
    assert event.callbacks is not None
    event.callbacks.append(action)  # type: ignore[arg-type]


class SimTicket:
    """A launch or a host loop that will be done; `end` is its last span and when it ended."""

    __slots__ = ("_env", "_event", "end", "ran", "stopper")

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._event: simpy.Event | None = None
        self.stopper: Callable[[], None] | None = None
        self.end: Cause | None = None
        self.ran = 0

    def stop(self) -> None:
        """Ends a repeated launch at its next replay boundary; one that has not begun runs not once."""
        if self.stopper is not None and self.end is None:
            self.stopper()

    def done(self) -> CauseSteps:
        """Waits until it is done."""
        if self.end is None:
            if self._event is None:
                self._event = self._env.event()
            yield self._event
        assert self.end is not None
        return self.end

    def finish(self, end: Cause) -> None:
        """Done: whoever waits goes on."""
        self.end = end
        # What is done cannot be stopped; and ticket and launch no longer hold each other.
        self.stopper = None
        if self._event is not None:
            self._event.succeed()


class SignalTicket:
    """The next publication of `name` by rank `source` that rank `waiter` has not taken yet."""

    __slots__ = ("_signals", "name", "ran", "source", "waiter")

    def __init__(self, signals: "Signals", name: str, source: int, waiter: int) -> None:
        self._signals = signals
        self.name = name
        self.source = source
        self.waiter = waiter
        self.ran = 1

    def stop(self) -> None:
        """A signal cannot be stopped: nothing happens."""

    def done(self) -> CauseSteps:
        """Takes it, once it has come."""
        return self._signals.take(self.name, self.source, self.waiter)


class Signals:
    """Publications by (name, rank), and how many of them each rank has taken."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._published: dict[tuple[str, int], list[Cause]] = defaultdict(list)
        self._taken: dict[tuple[str, int, int], int] = defaultdict(int)
        self._waiting: dict[tuple[str, int], list[simpy.Event]] = defaultdict(list)

    def publish(self, name: str, source: int, cause: Cause) -> None:
        """One more publication has arrived."""
        self._published[name, source].append(cause)
        waiting = self._waiting.pop((name, source), [])
        for event in waiting:
            event.succeed()

    def take(self, name: str, source: int, waiter: int) -> CauseSteps:
        """Waits for the next publication that `waiter` has not taken."""
        turn = self._taken[name, source, waiter]
        self._taken[name, source, waiter] += 1
        while len(self._published[name, source]) <= turn:
            event = self._env.event()
            self._waiting[name, source].append(event)
            yield event
        return self._published[name, source][turn]


@dataclass(slots=True, eq=False)
class Launch:
    """A graph on its way through a stream."""

    id: int
    rank: int
    stream: str
    graph: Graph
    issued: Cause
    after: tuple[SimTicket, ...]
    signals: tuple[SignalTicket, ...]
    sizes: Mapping[str, int]
    repeat: int
    when: Condition | None
    sets: Mapping[Flag, Setting]
    ticket: SimTicket
    stopped: bool = False
    piece: Piece | None = None

    def is_burst(self) -> bool:
        """A burst is priced at once: nothing happens at its inner boundaries."""
        tied = self.when is not None or self.sets or self.signals or self.graph.publishes
        return self.repeat > 1 and not tied and not self.graph.meets


class SimMachine:
    """One rank of a Simulation; implements `simcore.machine.Machine`."""

    def __init__(self, simulation: "Simulation", rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.mesh: layout.Mesh = simulation.mesh
        self._sim = simulation
        self._env = simulation.env
        # What the host waited for last: where the path that leads to its next launch comes from.
        self._host = Cause(None, 0.0, host=True)
        self._busy_until_s = 0.0
        self._items: dict[str, deque[tuple[Message, object, Cause]]] = defaultdict(deque)
        self._receivers: dict[str, deque[simpy.Event]] = defaultdict(deque)

    def now(self) -> float:
        """The time on this host's clock: the event clock, or later while the host is busy."""
        return max(float(self._env.now), self._busy_until_s)

    def _spend(self, seconds: float) -> float:
        self._busy_until_s = self.now() + seconds
        return self._busy_until_s

    def _catch_up(self) -> Steps:
        yield self._env.timeout(max(0.0, self._busy_until_s - self._env.now))

    def along(self, axis: str, offset: int = 0) -> int:
        """The rank `offset` places further along `axis`, around the end."""
        return layout.along(self.mesh, self.rank, axis, offset)

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`."""
        return layout.coordinate(self.mesh, self.rank, axis)

    def launch(
        self,
        graph: Graph,
        *,
        stream: str = "main",
        after: Sequence[Ticket] = (),
        sizes: Mapping[str, int] | None = None,
        repeat: int = 1,
        when: Condition | None = None,
        sets: Mapping[Flag, Setting] | None = None,
    ) -> Ticket:
        """Queues a graph; see Machine. Raises ValueError where a size is missing or repeat is below 1."""
        given = dict(sizes or {})
        if missing := graph.reads - given.keys():
            raise ValueError(
                f"graph {graph.name} needs sizes that its launch does not give: {sorted(missing)}"
            )
        if repeat < 1:
            raise ValueError(f"graph {graph.name}: repeat is {repeat}; 1 is the least")
        issued = Cause(self._host.span, self._spend(self._sim.overheads.launch_s), host=True)
        ticket = SimTicket(self._env)
        tickets = tuple(t for t in after if isinstance(t, SimTicket))
        signals = tuple(t for t in after if isinstance(t, SignalTicket))
        launch = Launch(
            self._sim.next_launch(), self.rank, stream, graph, issued, tickets, signals, given, repeat,
            when, dict(sets or {}), ticket,
        )  # fmt: skip
        ticket.stopper = lambda: self._at_host_time(lambda: self._sim.stop(launch))
        self._sim.submit(launch)
        return ticket

    def _at_host_time(self, action: Callable[[], None]) -> None:
        """Now, or when the event clock has come to where this host's clock is."""
        if self._busy_until_s <= self._env.now:
            action()
        else:
            then(self._env.timeout(self._busy_until_s - self._env.now), lambda _: action())

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """A flag of this rank or of another. Raises ValueError where the latter is given a value."""
        flag = Flag(name, self.rank if rank is None else rank)
        if flag.rank == self.rank:
            self._sim.flags.setdefault(flag, initial)
        elif initial:
            raise ValueError(f"flag {name}: rank {self.rank} cannot say what rank {rank} begins with")
        return flag

    def signal(self, name: str, rank: int | None = None) -> Ticket:
        """The next publication of `name` by `rank` that this rank has not taken yet."""
        return SignalTicket(self._sim.signals, name, self.rank if rank is None else rank, self.rank)

    def wait(self, *tickets: Ticket) -> Wait:
        """Blocks the host until all tickets are done."""
        return self._env.process(self._wait(tickets))

    def _wait(self, tickets: Sequence[Ticket]) -> Steps:
        for ticket in tickets:
            self._go_on_after((yield from _done(ticket)))
        self._spend(self._sim.overheads.wait_s)
        yield from self._catch_up()

    def _go_on_after(self, end: Cause) -> None:
        if end.at_s >= self.now():
            self._host = Cause(end.span, end.at_s, host=True)

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """The host gets a flag's value once `after` is done."""
        return self._env.process(self._read(flag, after))

    def _read(self, flag: Flag, after: Ticket) -> Steps:
        end = yield from _done(after)
        value = self._sim.value_of(flag)
        self._go_on_after(end)
        yield from self._wait([])
        return value

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """The next item of an inbox, or None after `timeout_s`."""
        return self._env.process(self._recv(inbox, timeout_s))

    def _recv(self, inbox: str, timeout_s: float | None) -> Steps:
        yield from self._catch_up()
        if not self._items[inbox]:
            came = self._env.event()
            self._receivers[inbox].append(came)
            limit = [] if timeout_s is None else [self._env.timeout(timeout_s)]
            yield self._env.any_of([came, *limit])
            if not came.triggered:
                self._receivers[inbox].remove(came)
                return None
            message, item, cause = cast(tuple[Message, object, Cause], came.value)
            self._host = cause
        else:
            message, item, _ = self._items[inbox].popleft()
        message.received_s = self._env.now
        self._spend(self._sim.overheads.message_s)
        yield from self._catch_up()
        return item

    def send(self, inbox: str, item: object, rank: int) -> None:
        """Puts an item into the inbox of a rank's host, when this host's clock gets there."""
        at_s = self._spend(self._sim.overheads.message_s)
        cause = Cause(self._host.span, at_s, host=True)
        receiver = self._sim.machines[rank]
        then(
            self._env.timeout(max(0.0, at_s - self._env.now)),
            lambda _: receiver.deliver(inbox, item, cause),
        )

    def deliver(self, inbox: str, item: object, cause: Cause) -> None:
        """An item comes into an inbox of this rank now."""
        message = Message(len(self._sim.trace.messages), self.rank, inbox, self._env.now)
        self._sim.trace.messages.append(message)
        if self._receivers[inbox]:
            self._receivers[inbox].popleft().succeed((message, item, cause))
        else:
            self._items[inbox].append((message, item, cause))

    def spawn(self, program: Program) -> Ticket:
        """One more host loop, on the same host thread."""
        ticket = SimTicket(self._env)

        def loop() -> Steps:
            yield from self._sim.host(self, program)
            ticket.ran = 1
            ticket.finish(Cause(self._host.span, self._env.now, host=True))

        self._sim.loops.append((self.rank, "loop", self._env.process(loop())))
        return ticket

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """Notes when the host has come here and the tickets are done."""
        marking = self._mark(name, after, Cause(self._host.span, self.now(), host=True))
        self._sim.loops.append((self.rank, f"mark {name!r}", self._env.process(marking)))

    def _mark(self, name: str, after: Sequence[Ticket], now: Cause) -> Steps:
        cause = now
        for ticket in after:
            cause = latest(cause, (yield from _done(ticket)))
        self._sim.trace.marks.append(Mark(self.rank, name, cause.at_s, cause))

    def gauge(self, name: str, value: float, limit: float) -> None:
        """Notes a level and its limit."""
        self._sim.trace.gauges.append(Gauge(self.rank, name, self.now(), value, limit))


def _done(ticket: Ticket) -> CauseSteps:
    assert isinstance(ticket, SimTicket | SignalTicket)
    return ticket.done()
