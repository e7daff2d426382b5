"""The host's side of a real machine, for any device: programs, inboxes, feeds and marks.

    host loops go on while they can, then the device does; else the host sleeps until something is due,
    or looks again at once while the device is busy

All host loops of all ranks share one thread. The wall clock is the only clock: a verb costs the time that it
takes. A device (`Device`) executes the launches; no program sees which device it is.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any, cast

from simcore.machine import mesh as layout
from simcore.machine.machine import (
    Condition,
    DeadlockError,
    Flag,
    Machine,
    Program,
    Setting,
    Ticket,
    Wait,
    check_within,
)
from simcore.machine.trace import Gauge, Message, Trace
from simcore.ops.op import Graph
from simcore.sim.simulation import Route
from simcore.validate.machines.launches import (
    Device,
    Launch,
    Need,
    SignalTicket,
    Steps,
    Task,
    TorchTicket,
    Waitable,
)
from simcore.workload.requests import END


@dataclass(slots=True, eq=False)
class Source:
    """A feed of items: the next item and its time of arrival (inf: there is none)."""

    to: int | Route
    inbox: str
    left: Iterator[tuple[float, object]]
    at_s: float = inf
    item: object = None

    def advance(self) -> bool:
        """Takes the next item, which the iterator may make only now. Returns False if there is none."""
        self.at_s, self.item = next(self.left, (inf, None))
        return self.at_s < inf


def mesh_of(states: Sequence[Any], mesh: layout.Mesh | None) -> layout.Mesh:
    """Returns the mesh of the ranks; if left out, all along "tensor". Raises ValueError if there are not as
    many states as ranks."""
    found = dict(mesh or {"tensor": len(states)})
    if prod(found.values()) != len(states):
        raise ValueError(f"{len(states)} states for a mesh of {prod(found.values())} ranks")
    return found


class HostSide:
    """The host programs of all ranks on one thread; `device` executes their launches.

    `lockstep` names axes along which all ranks do what the first rank is told. Items that are due after all
    programs and launches have ended are not delivered.
    """

    def __init__(self, device: Device, mesh: layout.Mesh, lockstep: Sequence[str]) -> None:
        self.device = device
        self.mesh, world = mesh, prod(mesh.values())
        self.trace = Trace()
        # The time at which each item was due, without END.
        self.fed_s: list[float] = []
        self.lockstep = tuple(axis for axis in lockstep if axis in mesh)
        self.machines = [RealMachine(self, rank, world) for rank in range(world)]
        # Ranks whose host program has had its first turn.
        self.begun: set[int] = set()
        self.slept = False
        self.followers: dict[int, list[int]] = defaultdict(list)
        for rank in range(world):
            self.followers[self._leader(rank)].append(rank)
        self._origin: float | None = None
        self._hosts: list[Task] = []
        self._sources: list[Source] = []
        self._launches = itertools.count()

    def now(self) -> float:
        """Returns the seconds since the run began; 0 before."""
        return 0.0 if self._origin is None else time.perf_counter() - self._origin

    @property
    def origin_s(self) -> float:
        """The start of the run by time.perf_counter."""
        assert self._origin is not None
        return self._origin

    def run(self, program: Callable[[Machine], Program]) -> None:
        """Runs one program on every rank (of ranks in lockstep: on the first) until all are done.

        Raises DeadlockError if something still waits when nothing can happen any more.
        """
        for rank in self.followers:
            self.watch(f"program of rank {rank}", self._first(rank, program))
        self._work()
        stuck = [*(task.what() for task in self._hosts), *self.device.waiting()]
        if stuck:
            raise DeadlockError("nothing can happen any more, and these still wait: " + "; ".join(stuck))

    def _first(self, rank: int, program: Callable[[Machine], Program]) -> Steps:
        steps = self.host(program(self.machines[rank]))
        if self._origin is None:
            # The run begins with the first turn of a program.
            self._origin = time.perf_counter()
        try:
            need = next(steps)
        except StopIteration:
            return
        finally:
            self.begun.add(rank)
        yield need
        yield from steps

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times (seconds, ascending): that of rank `to`, or of the ranks
        that `to` returns for an item as it arrives. If the processor is busy then, the item arrives later."""
        source = Source(to, inbox, iter(arrivals))
        if source.advance():
            self._sources.append(source)

    def watch(self, what: str, steps: Steps) -> None:
        """Adds a host loop or a mark that has to end."""
        self._hosts.append(Task(lambda: what, steps))

    def host(self, program: Program) -> Steps:
        """Returns the steps of a program; each wait that it yields is steps too, made by its machine."""
        result = None
        while True:
            try:
                wait = program.send(result)
            except StopIteration:
                return
            result = yield from wait

    def next_launch(self) -> int:
        """Returns the number of the next launch."""
        return next(self._launches)

    def _leader(self, rank: int) -> int:
        """Returns the first of the ranks that are in lockstep with a rank."""
        for axis in self.lockstep:
            rank = layout.along(self.mesh, rank, axis, -layout.coordinate(self.mesh, rank, axis))
        return rank

    # -- the loop ------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            self._deliver()
            if self._go_on_hosts() or self.device.go_on():
                continue
            if self.device.under_way():
                continue
            if not self._hosts and not self.device.waiting():
                return
            due_s = self.due_s
            if due_s == inf:
                return
            self.slept = True
            self.device.rest(max(0.0, due_s - self.now()))

    @property
    def due_s(self) -> float:
        """When the next item arrives, or a host loop waits no longer; inf if there is none."""
        due_s = min((task.need.until_s for task in self._hosts), default=inf)
        return min([due_s, *(source.at_s for source in self._sources)])

    def _deliver(self) -> None:
        """Delivers all items that are due, in order of time."""
        while due := [source for source in self._sources if source.at_s <= self.now()]:
            source = min(due, key=lambda each: each.at_s)
            at_s, item = source.at_s, source.item
            if item != END:
                self.fed_s.append(at_s)
            if self.slept:
                self.slept = False
                self.device.woke()
            ranks = (source.to,) if isinstance(source.to, int) else source.to(item)
            for rank in ranks:
                self.machines[rank].deliver(source.inbox, item, at_s)
            if not source.advance():
                self._sources.remove(source)

    def _go_on_hosts(self) -> bool:
        went_on = False
        for task in tuple(self._hosts):
            if task.need.ready() or self.now() >= task.need.until_s:
                went_on = True
                if not task.go_on():
                    self._hosts.remove(task)
        return went_on


@dataclass(slots=True, eq=False)
class _Receiver:
    """A host that waits for an item; `item`: the item once it has arrived."""

    item: tuple[Message, object] | None = None


class RealMachine:
    """One rank of a real machine; implements `simcore.machine.machine.Machine`."""

    def __init__(self, host: HostSide, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.mesh: layout.Mesh = host.mesh
        self._host = host
        self._device = host.device
        self._items: dict[str, deque[tuple[Message, object]]] = defaultdict(deque)
        self._receivers: dict[str, deque[_Receiver]] = defaultdict(deque)
        self._watched: dict[str, list[Launch]] = defaultdict(list)
        # See `check_within`.
        self._leader: object = None

    def now(self) -> float:
        """Returns the seconds since the run began."""
        return self._host.now()

    def along(self, axis: str, offset: int = 0) -> int:
        """The rank `offset` places further along `axis`, wrapping around."""
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
        advance: Mapping[str, int] | None = None,
        repeat: int = 1,
        until: str | None = None,
        when: Condition | None = None,
        sets: Mapping[Flag, Setting] | None = None,
        batch: Callable[[], Any] | None = None,
        within: Ticket | None = None,
    ) -> Ticket:
        """Queues a graph; see Machine. Raises ValueError if a size is missing or `repeat` is below 1, and as
        `check_within`."""
        check_within(graph, within, self._leader, repeat)
        if within is None:
            self._device.settle(self.rank)
        issued_s = self.now()
        if repeat < 1:
            raise ValueError(f"graph {graph.name}: repeat is {repeat}; 1 is the least")
        given = {} if sizes is None else sizes
        if missing := graph.needs - given.keys():
            raise ValueError(
                f"graph {graph.name} needs sizes that its launch does not give: {sorted(missing)}"
            )
        if until is not None and self._items[until]:
            repeat = 1
        signals = tuple([t for t in after if isinstance(t, SignalTicket)])
        tickets = tuple([t for t in after if not isinstance(t, SignalTicket)])
        launch = Launch(
            self._host.next_launch(), self.rank, stream, graph, issued_s, tickets, signals, given, advance,
            repeat, when, sets or {}, self._device.ticket(), within,
        )  # fmt: skip
        if batch is not None:
            begun_s = self.now()
            launch.batch = batch()
            launch.batch_s = self.now() - begun_s
        if until is not None and repeat > 1:
            launch.watches = True
            others = [other for other in self._watched[until] if other.ticket.end is None]
            self._watched[until] = [*others, launch]
        self._device.submit(launch)
        launch.took_s += self.now() - issued_s
        ticket: Ticket = launch.ticket
        self._leader = self._leader if within is not None else ticket
        return ticket

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """A flag of this rank or of another. Raises ValueError if another rank's flag is given a value."""
        flag = Flag(name, self.rank if rank is None else rank)
        if flag.rank == self.rank:
            self._device.declare(flag, initial)
        elif initial:
            raise ValueError(f"flag {name}: rank {self.rank} cannot say what rank {rank} begins with")
        return flag

    def signal(self, name: str, rank: int | None = None) -> Ticket:
        """The next publication of `name` by `rank` that this rank has not taken yet."""
        return SignalTicket(self._device, name, self.rank if rank is None else rank, self.rank)

    def wait(self, *tickets: Ticket) -> Wait:
        """Blocks the host until all tickets are done."""
        self._leader = None
        self._device.settle(self.rank)
        ends = []
        for ticket in tickets:
            ends.append((yield from _done(ticket)))
        self._device.waited(self.rank, ends)

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """Waits until `after` is done and returns the flag's value."""
        self._leader = None
        self._device.settle(self.rank)
        self._device.waited(self.rank, [(yield from _done(after))])
        return self._device.value_of(flag)

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """Waits for the next item of an inbox and returns it, or None after `timeout_s`."""
        self._leader = None
        self._device.settle(self.rank)
        if self._items[inbox]:
            return self._taken(self._items[inbox].popleft())
        receiver = _Receiver()
        self._receivers[inbox].append(receiver)
        until_s = inf if timeout_s is None else self.now() + timeout_s
        yield Need(lambda: receiver.item is not None, until_s)
        if receiver.item is None:
            self._receivers[inbox].remove(receiver)
            return None
        return self._taken(receiver.item)

    def _taken(self, came: tuple[Message, object]) -> object:
        message, item = came
        message.received_s = self.now()
        return item

    def poll(self, inbox: str) -> list[Any]:
        """Takes all items that are in an inbox now."""
        found = [self._taken(came) for came in self._items[inbox]]
        self._items[inbox].clear()
        return found

    def send(self, inbox: str, item: object, rank: int) -> None:
        """Puts an item into the inbox of a rank's host."""
        self._host.machines[rank].deliver(inbox, item, self.now())

    def deliver(self, inbox: str, item: object, at_s: float) -> None:
        """Puts an item that arrived at `at_s` into an inbox of this rank."""
        messages = self._host.trace.messages
        message = Message(len(messages), self.rank, inbox, at_s)
        messages.append(message)
        if receivers := self._receivers[inbox]:
            receivers.popleft().item = message, item
        else:
            self._items[inbox].append((message, item))
        for launch in self._watched.pop(inbox, ()):
            launch.curtailed = True

    def spawn(self, program: Program) -> Ticket:
        """Starts one more host loop on the same host thread."""
        ticket, host = TorchTicket(), self._host

        def loop() -> Steps:
            yield from host.host(program)
            ticket.ran = 1
            ticket.end = host.device.moment(self.rank)

        host.watch(f"loop of rank {self.rank}", loop())
        return ticket

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """Records the time at which the host is here and the tickets are done."""
        self._device.settle(self.rank)
        since = self._device.moment(self.rank)
        self._host.watch(f"mark {name!r} of rank {self.rank}", self._mark(name, after, since))

    def _mark(self, name: str, after: Sequence[Ticket], since: Any) -> Steps:
        ends = []
        for ticket in after:
            ends.append((yield from _done(ticket)))
        self._device.mark(self.rank, name, since, ends)

    def gauge(self, name: str, value: float, limit: float) -> None:
        """Records a level and its limit."""
        self._host.trace.gauges.append(Gauge(self.rank, name, self.now(), value, limit))


def _done(ticket: Ticket) -> Steps:
    return cast(Waitable, ticket).done()
