"""The host's side of the simulated machine: one rank's verbs, and the tickets that they return.

A host's clock runs ahead of the event clock by the cost of its verbs; a wait catches up:

    host time after a verb      = max(event clock, host time) + cost of the verb
    a launch may begin at         that time - return_s + start_s

All host loops of a rank share one host thread, and so one clock.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import simpy

from simcore.machine import mesh as layout
from simcore.machine.machine import (
    Condition,
    Flag,
    Overheads,
    Program,
    Setting,
    Ticket,
    Wait,
    check_within,
)
from simcore.machine.trace import Cause, Gauge, Mark, Message
from simcore.ops.op import Graph
from simcore.sim.clock import Clock
from simcore.sim.rows import DoneCallback, RowLaunch
from simcore.sim.sharing import Piece

if TYPE_CHECKING:
    from simcore.sim.simulation import Simulation

Steps = Generator[simpy.Event, Any, Any]
CauseSteps = Generator[simpy.Event, Any, Cause]
Item = tuple[Message | None, object, Cause]


def latest(a: Cause, b: Cause) -> Cause:
    """The later of two causes; the first if they are equal."""
    return b if b.at_s > a.at_s else a


def then(event: simpy.Event, action: Callable[[simpy.Event], object]) -> None:
    """Calls `action` when an event comes."""
    assert event.callbacks is not None
    event.callbacks.append(action)  # type: ignore[arg-type]


class SimTicket:
    """The ticket of a launch or a host loop; `end`: its last span and its end time, None until it ends."""

    __slots__ = ("_callbacks", "_env", "end", "on_stop", "ran")

    def __init__(self, env: Clock) -> None:
        self._env = env
        self._callbacks: list[DoneCallback] | None = None
        self.on_stop: Callable[[], None] | None = None
        self.end: Cause | None = None
        self.ran = 0

    def stop(self) -> None:
        """Ends a repeated launch at its next replay boundary; one that has not begun runs no replay."""
        if self.on_stop is not None and self.end is None:
            self.on_stop()

    def wait_done(self) -> CauseSteps:
        """Waits until the ticket is done; returns its end."""
        if self.end is None:
            event = self._env.event()
            self.add_callback(lambda _: self._env.succeed(event))
            yield event
        assert self.end is not None
        return self.end

    def add_callback(self, waiter: DoneCallback) -> None:
        """Calls `waiter` when the ticket is done; it must not be done yet."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(waiter)

    def finish(self, end: Cause) -> None:
        """Marks the ticket as done and calls all waiters."""
        self.end = end
        # A done launch cannot be stopped; and ticket and launch no longer refer to each other.
        self.on_stop = None
        if self._callbacks is not None:
            waiters, self._callbacks = self._callbacks, None
            for waiter in waiters:
                waiter(False)


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
        """Does nothing: a signal cannot be stopped."""

    def wait_done(self) -> CauseSteps:
        """Waits for the publication and takes it; returns its cause."""
        return self._signals.take(self.name, self.source, self.waiter)


class Signals:
    """Publications by (name, rank), with a count of those that each rank has taken."""

    def __init__(self, env: Clock) -> None:
        self._env = env
        self._published: dict[tuple[str, int], list[Cause]] = defaultdict(list)
        self._taken: dict[tuple[str, int, int], int] = defaultdict(int)
        self._waiting: dict[tuple[str, int], list[simpy.Event]] = defaultdict(list)

    def publish(self, name: str, source: int, cause: Cause) -> None:
        """Adds a publication that arrives now; its caller must do nothing after it at this moment."""
        self._published[name, source].append(cause)
        waiting = self._waiting.pop((name, source), ())
        if len(waiting) == 1:
            self._env.succeed_and_run(waiting[0])
            return
        for event in waiting:
            self._env.succeed(event)

    def take(self, name: str, source: int, waiter: int) -> CauseSteps:
        """Waits for the next publication that `waiter` has not taken; returns its cause."""
        turn = self._taken[name, source, waiter]
        self._taken[name, source, waiter] += 1
        while len(self._published[name, source]) <= turn:
            event = self._env.event()
            self._waiting[name, source].append(event)
            yield event
        return self._published[name, source][turn]


class Launch:
    """One launch of a graph, recorded in spans."""

    __slots__ = (
        "advance", "after", "graph", "id", "issued", "piece", "rank", "repeat", "sets", "signals", "sizes",
        "stopped", "stream", "ticket", "until", "when",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        rank: int,
        stream: str,
        graph: Graph,
        issued: Cause,
        after: tuple[SimTicket, ...],
        signals: tuple[SignalTicket, ...],
        sizes: Mapping[str, int],
        advance: Mapping[str, int] | None,
        repeat: int,
        until: str | None,
        when: Condition | None,
        sets: Mapping[Flag, Setting],
        ticket: SimTicket,
    ) -> None:
        self.id = id
        self.rank = rank
        self.stream = stream
        self.graph = graph
        self.issued = issued
        self.after = after
        self.signals = signals
        self.sizes = sizes
        self.advance = advance
        self.repeat = repeat
        self.until = until
        self.when = when
        self.sets = sets
        self.ticket = ticket
        self.stopped = False
        self.piece: Piece | None = None

    @property
    def is_done(self) -> bool:
        """Whether the launch has ended."""
        return self.ticket.end is not None

    def is_plain(self) -> bool:
        """Whether nothing happens between its replays and ops except collectives."""
        return not (self.when is not None or self.sets or self.signals or self.graph.publishes)

    def is_burst(self) -> bool:
        """Whether several replays run as one piece of work, since nothing happens between them."""
        return self.repeat > 1 and self.is_plain() and not self.graph.meets

    def sizes_at(self, replay: int) -> Mapping[str, int]:
        """The sizes that a replay reads."""
        if not replay:
            return self.sizes
        by = self.advance
        return {
            name: value + replay * (1 if by is None else by.get(name, 0))
            for name, value in self.sizes.items()
        }


class SimMachine:
    """One rank of a Simulation; implements `simcore.machine.machine.Machine`. `mesh`, `overheads`: of the
    ranks of its kind, the first of which is rank `first`."""

    def __init__(
        self,
        simulation: "Simulation",
        rank: int,
        world: int,
        mesh: layout.Mesh,
        first: int,
        overheads: Overheads,
    ) -> None:
        self.rank = rank
        self.world = world
        self.mesh: layout.Mesh = mesh
        self._first = first
        self._overheads = overheads
        self._sim = simulation
        self._env = simulation.env
        # The end of what the host waited for last: the cause of its next launch.
        self._host = Cause(None, 0.0, host=True)
        self._busy_until_s = 0.0
        # A launch not yet given to the device: if the host waits for it at once, it may need no event.
        self.deferred: RowLaunch | None = None
        # The last launch that began a captured sequence, unless the host has waited since.
        self._leader: object = None
        self._along: dict[tuple[str, int], int] = {}
        # The sizes now in the device's memory.
        self._device_sizes: dict[str, int] = {}
        self._items: dict[str, deque[Item]] = defaultdict(deque)
        self._watched: dict[str, list[Launch | RowLaunch]] = {}
        self._receivers: dict[str, deque[simpy.Event]] = defaultdict(deque)

    def now(self) -> float:
        """The time on this host's clock, in seconds: the event clock's, or later while the host is busy."""
        now_s: float = self._env.now
        return now_s if now_s > self._busy_until_s else self._busy_until_s

    def _spend(self, seconds: float) -> float:
        now_s: float = self._env.now
        busy_s = self._busy_until_s
        self._busy_until_s = busy_s = (now_s if now_s > busy_s else busy_s) + seconds
        return busy_s

    def _catch_up(self) -> Steps:
        left_s = max(0.0, self._busy_until_s - self._env.now)
        if not self._env.try_advance(left_s):
            yield self._env.timeout(left_s)

    def along(self, axis: str, offset: int = 0) -> int:
        """The rank `offset` places further along `axis`, wrapping around."""
        found = self._along.get((axis, offset))
        if found is None:
            along = layout.along(self.mesh, self.rank - self._first, axis, offset)
            found = self._along[axis, offset] = self._first + along
        return found

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`; 0 for an axis that the mesh does not have."""
        return layout.coordinate(self.mesh, self.rank - self._first, axis)

    def launch(
        self,
        graph: Graph,
        *,
        stream: str = "main",
        after: Sequence[Ticket] = (),
        sizes: Mapping[str, int] | None = None,
        advance: Mapping[str, int] | None = None,
        repeat: int = 1,
        until: str | None = None,
        when: Condition | None = None,
        sets: Mapping[Flag, Setting] | None = None,
        batch: Callable[[], Any] | None = None,
        within: Ticket | None = None,
    ) -> Ticket:
        """Queues a graph; see Machine. Raises ValueError if a size is missing or `repeat` is below 1, and
        as `check_within`."""
        check_within(graph, within, self._leader, repeat)
        if repeat < 1:
            raise ValueError(f"graph {graph.name}: repeat is {repeat}; 1 is the least")
        if self.deferred is not None:
            self.submit_deferred()
        given = {} if sizes is None else sizes
        sim = self._sim
        if until is not None and self._items[until]:
            repeat = 1
        info = sim.info(graph, self.rank)
        size_update_s = self._size_update_s(info.device_sizes, given) if info.device_sizes else 0.0
        busy_s, now_s = self._busy_until_s, self._env.now
        whole_s, back_s = info.launch_s, info.back_s
        if within is not None:
            # The call is the first launch's, and the device has the graph already.
            whole_s, back_s = self._overheads.within_launch_s(graph.kernels), 0.0
        host_s = whole_s + size_update_s
        if batch is not None:
            costs, sequences = self._overheads, given.get("sequences", 0)
            host_s += costs.batch_s + costs.sequence_s * sequences
            if given.get("prompt_tokens"):
                host_s += costs.prompt_s + costs.each_prompt_s * (given.get("rows", sequences) - sequences)
        self._busy_until_s = busy_s = (now_s if now_s > busy_s else busy_s) + host_s
        issued_s = busy_s - back_s
        tickets: Any = ()
        if after:
            tickets = tuple([t for t in after if not isinstance(t, SignalTicket)])
        if info.closed and when is None and sets is None and len(tickets) == len(after):
            row = RowLaunch(sim, self.rank, stream, info, issued_s, tickets, given, advance, repeat, until)
            if tickets:
                self._submit_row(row)
            else:
                self.deferred = row
            self._leader = self._leader if within is not None else row
            return row
        if not given.keys() >= graph.needs:
            missing = graph.needs.difference(given)
            raise ValueError(
                f"graph {graph.name} needs sizes that its launch does not give: {sorted(missing)}"
            )
        ticket = SimTicket(self._env)
        signals = tuple([t for t in after if isinstance(t, SignalTicket)]) if after else ()
        launch = Launch(
            sim.next_launch(), self.rank, stream, graph, Cause(self._host.span, issued_s, True),
            tickets, signals, given, advance, repeat, until, when, sets or {}, ticket,
        )  # fmt: skip
        ticket.on_stop = partial(self._stop, launch)
        self.watch(launch)
        sim.submit(launch)
        self._leader = self._leader if within is not None else ticket
        return ticket

    def submit_deferred(self) -> None:
        """Gives the deferred launch to the device, because the host does not wait for it at once."""
        deferred, self.deferred = self.deferred, None
        if deferred is not None:
            self._submit_row(deferred)

    def _submit_row(self, row: RowLaunch) -> None:
        self.watch(row)
        self._sim.submit_row(row)

    def watch(self, launch: Launch | RowLaunch) -> None:
        """Ends a launch when an item arrives in its inbox `until`; drops the launches that are done."""
        inbox = launch.until
        if inbox is not None and launch.repeat > 1:
            others = [other for other in self._watched.get(inbox, ()) if not other.is_done]
            self._watched[inbox] = [*others, launch]

    def _size_update_s(self, device_sizes: frozenset[str], sizes: Mapping[str, int]) -> float:
        """Seconds that the host needs to write the changed sizes that a graph reads to the device's memory;
        of a burst only the first replay's, because the host does nothing between replays."""
        fresh = 0
        for name in device_sizes:
            if name in sizes and self._device_sizes.get(name) != sizes[name]:
                self._device_sizes[name] = sizes[name]
                fresh += 1
        return fresh * self._overheads.size_s

    def _stop(self, launch: Launch) -> None:
        self.at_host_time(lambda: self._sim.stop(launch))

    def at_host_time(self, action: Callable[[], None]) -> None:
        """Runs `action` when the event clock reaches this host's clock, which may be now."""
        if self._busy_until_s <= self._env.now:
            action()
        else:
            self._env.call(self._busy_until_s - self._env.now, action)

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """A flag of this rank or of another. Raises ValueError if another rank's flag is given a value."""
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
        """Returns a wait that ends when all tickets are done and the host has seen it."""
        self._leader, deferred = None, self.deferred
        if deferred is not None:
            if len(tickets) == 1 and tickets[0] is deferred:
                self.deferred = None
                if self._sim.try_run_inline(deferred):
                    return self._resume_now()
                if deferred.host_event is not None:
                    return deferred.host_event
                self._submit_row(deferred)
            else:
                self.submit_deferred()
        if len(tickets) == 1 and isinstance(tickets[0], RowLaunch) and tickets[0].end is None:
            return self.waits_for(tickets[0])
        if any(isinstance(ticket, SignalTicket) for ticket in tickets):
            return self._env.result(self._wait(tickets), last=True)
        waited = cast(Sequence[SimTicket | RowLaunch], tickets)
        event = self._env.event()
        missing = [ticket for ticket in waited if ticket.end is None]
        left = len(missing)

        def one_less(_: bool) -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._resume(event, waited)

        if not missing:
            one_less(False)
        for ticket in missing:
            ticket.add_callback(one_less)
        return event

    def waits_for(self, launch: RowLaunch) -> simpy.Event:
        """Returns the event that resumes the host after a launch that is not done yet."""
        event = self._env.event()
        launch.add_callback(partial(self._resume, event, (launch,)))
        return event

    def _resume(self, event: simpy.Event, waited: Sequence[Any], last: bool = False) -> None:
        """Resumes the host after the time that it needs to see that its tickets are done. `last`: see
        `DoneCallback`."""
        if not self._sim.rows:
            for ticket in waited:
                assert ticket.end is not None
                self._set_host_cause(ticket.end)
        env, delay_s = self._env, self._resume_delay_s()
        if last:
            env.succeed_and_run(event, None, delay_s)
        else:
            env.succeed_after(event, delay_s)

    def _resume_now(self) -> Wait:
        # The launch that the host waited for has ended just now.
        env, delay_s = self._env, self._resume_delay_s()
        if env.try_advance(delay_s):
            return env.already_come
        event = env.event()
        env.succeed_after(event, delay_s)
        return event

    def _resume_delay_s(self) -> float:
        # Seconds until the host has seen that its tickets are done.
        wait_s, now_s = self._overheads.wait_s, self._env.now
        if wait_s > 0.0 or self._busy_until_s > now_s:
            return self._spend(wait_s) - now_s
        return 0.0

    def _wait(self, tickets: Sequence[Ticket]) -> Steps:
        for ticket in tickets:
            self._set_host_cause((yield from _done(ticket)))
        self._spend(self._overheads.wait_s)
        yield from self._catch_up()

    def _set_host_cause(self, end: Cause) -> None:
        if end.at_s >= self.now():
            self._host = Cause(end.span, end.at_s, host=True)

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """Returns a wait that gives the flag's value when `after` is done."""
        self._leader = None
        self.submit_deferred()
        return self._env.result(self._read(flag, after), last=True)

    def _read(self, flag: Flag, after: Ticket) -> Steps:
        end = yield from _done(after)
        value = self._sim.value_of(flag)
        self._set_host_cause(end)
        yield from self._wait([])
        return value

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """Returns a wait that gives the next item of an inbox, or None after `timeout_s`."""
        self._leader = None
        self.submit_deferred()
        return self._env.result(self._recv(inbox, timeout_s), last=True)

    def _recv(self, inbox: str, timeout_s: float | None) -> Steps:
        yield from self._catch_up()
        if self._items[inbox]:
            message, item, _ = self._items[inbox].popleft()
        elif timeout_s == 0.0 and self._env.try_advance(0.0):
            return None
        else:
            came = self._env.event()
            self._receivers[inbox].append(came)
            limit = () if timeout_s is None else (self._env.timeout(timeout_s),)
            # Also for one event: an item of the same moment is then in the inbox, for the next poll.
            yield self._any_of(came, *limit)
            if not came.triggered:
                self._receivers[inbox].remove(came)
                return None
            message, item, cause = cast(Item, came.value)
            self._host = cause
        if message is not None:
            message.received_s = self._env.now
        self._spend(self._overheads.message_s)
        yield from self._catch_up()
        return item

    def _any_of(self, *events: simpy.Event) -> simpy.Event:
        """Returns an event that comes with the first of these events."""
        either = self._env.event()
        for event in events:
            then(event, lambda _: None if either.triggered else self._env.succeed_and_run(either))
        return either

    def poll(self, inbox: str) -> list[Any]:
        """Takes all items that are in an inbox now."""
        waiting = self._items[inbox]
        if not waiting:
            return []
        found = []
        if self._sim.rows:
            # Rows record neither causes nor messages.
            found = [item for _, item, _ in waiting]
            waiting.clear()
            self._spend(self._overheads.message_s * len(found))
            return found
        for message, item, cause in waiting:
            if message is not None:
                message.received_s = self._env.now
            self._host = latest(self._host, cause)
            found.append(item)
        waiting.clear()
        self._spend(self._overheads.message_s * len(found))
        return found

    def send(self, inbox: str, item: object, rank: int) -> None:
        """Puts an item into the inbox of a rank, at the time of this host's clock."""
        self.submit_deferred()
        at_s = self._spend(self._overheads.message_s)
        cause = Cause(self._host.span, at_s, host=True)
        receiver = self._sim.machines[rank]
        self._env.call(
            max(0.0, at_s - self._env.now), lambda: receiver.deliver(inbox, item, cause, last=True)
        )

    def deliver(self, inbox: str, item: object, cause: Cause, *, last: bool = False) -> None:
        """Puts an item into an inbox of this rank now. `last`: its caller does nothing after it at this
        moment."""
        message = None
        if not self._sim.rows:
            message = Message(len(self._sim.trace.messages), self.rank, inbox, self._env.now)
            self._sim.trace.messages.append(message)
        if receivers := self._receivers[inbox]:
            if last and inbox not in self._watched:
                self._env.succeed_and_run(receivers.popleft(), (message, item, cause))
                return
            self._env.succeed(receivers.popleft(), (message, item, cause))
        else:
            self._items[inbox].append((message, item, cause))
        if inbox in self._watched:
            for launch in self._watched.pop(inbox):
                self._sim.interrupt(launch)

    def spawn(self, program: Program) -> Ticket:
        """Starts one more host loop on the same host thread."""
        self.submit_deferred()
        ticket = SimTicket(self._env)

        def loop() -> Steps:
            yield from self._sim.host(self, program)
            ticket.ran = 1
            ticket.finish(Cause(self._host.span, self._env.now, host=True))

        self._sim.watch(self.rank, "loop", loop())
        return ticket

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """Records the time at which the host is here and the tickets are done."""
        self.submit_deferred()
        marking = self._mark(name, after, Cause(self._host.span, self.now(), host=True))
        self._sim.watch(self.rank, f"mark {name!r}", marking)

    def _mark(self, name: str, after: Sequence[Ticket], now: Cause) -> Steps:
        cause = now
        for ticket in after:
            cause = latest(cause, (yield from _done(ticket)))
        self._sim.trace.marks.append(Mark(self.rank, name, cause.at_s, cause))

    def gauge(self, name: str, value: float, limit: float) -> None:
        """Records a level and its limit."""
        self._sim.trace.gauges.append(Gauge(self.rank, name, self.now(), value, limit))


def _done(ticket: Ticket) -> CauseSteps:
    return cast(SimTicket | SignalTicket | RowLaunch, ticket).wait_done()
