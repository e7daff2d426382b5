"""The host's side of a real machine: programs, inboxes, feeds and marks, whatever device carries out
launches.

    host loops go on while they can, then the device does; else the host sleeps until something is due,
    or looks again at once while the device is busy

All host loops of all ranks share one thread, and the wall clock is the only one: what a verb costs is what it
takes. A device (`Device`) is given launches and says how it goes on; which of them there is, no program sees.
"""

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol, cast

from kernels.table import TABLE
from simcore import mesh as layout
from simcore.machine import Condition, Flag, Machine, Program, Setting, Ticket, Wait
from simcore.ops import Graph, Op, Publication
from simcore.requests import END
from simcore.sim import DeadlockError, MismatchError, Route
from simcore.trace import Gauge, Message, Trace


class State(Protocol):
    """The buffers of one rank, and which of them an op reads and writes. Ops come bound, with numbers for
    all sizes; a fused op comes part by part unless `kernels.table.TABLE` has its kind."""

    def execute(self, op: Op) -> None:
        """A local op."""

    def meet(self, op: Op, states: Sequence["State"]) -> None:
        """A collective: asked once, of the first rank's state, with all states along the axis, in order."""

    def skip(self, op: Op) -> None:
        """An op, local or not, of a launch that its flag skipped: it counts as passed over."""

    def put(self, publication: Publication, to: "State") -> None:
        """Writes what is published into the buffers of the next rank along the axis of the put."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a task waits for: it goes on once `ready()`, or at `until_s` at the latest."""

    ready: Callable[[], bool]
    until_s: float = inf


# Nothing but its turn.
TURN = Need(lambda: True)
Steps = Generator[Need, None, Any]


@dataclass(slots=True, eq=False)
class Task:
    """A host loop, a mark or a stream that is being worked off; `what` says which, for a deadlock."""

    what: Callable[[], str]
    steps: Steps
    need: Need = TURN

    def go_on(self) -> bool:
        """Takes it to its next wait. False where it has come to its end."""
        try:
            self.need = next(self.steps)
        except StopIteration:
            return False
        return True


@dataclass(slots=True, eq=False)
class TorchTicket:
    """A launch or a host loop that will be done; `end` is what its device makes of its end."""

    ran: int = 0
    end: Any = None
    stopped: bool = False

    def stop(self) -> None:
        """Ends a repeated launch at its next replay boundary; one that has not begun runs not once."""
        self.stopped = self.stopped or self.end is None

    def done(self) -> Steps:
        """Waits until it is done."""
        if self.end is None:
            yield Need(lambda: self.end is not None)
        return self.end


class Waitable(Ticket, Protocol):
    """A ticket of a real machine."""

    def done(self) -> Steps:
        """Waits until it is done, and gives what its device makes of its end."""


@dataclass(slots=True, eq=False)
class SignalTicket:
    """The next publication of `name` by rank `source` that rank `waiter` has not taken yet."""

    device: "Device"
    name: str
    source: int
    waiter: int
    ran: int = 1

    def stop(self) -> None:
        """A signal cannot be stopped: nothing happens."""

    def done(self) -> Steps:
        """Takes it, once it has come."""
        return self.device.take(self)


@dataclass(slots=True, eq=False)
class Launch:
    """A graph on its way through a stream."""

    id: int
    rank: int
    stream: str
    graph: Graph
    issued_s: float
    after: tuple[Any, ...]
    signals: tuple[SignalTicket, ...]
    sizes: Mapping[str, int]
    advance: Mapping[str, int] | None
    repeat: int
    when: Condition | None
    sets: Mapping[Flag, Setting]
    ticket: Any
    # What its host had waited for last when it issued it, as its device puts it.
    since: Any = None
    # What it runs until has come: it ends at its next boundary, but runs once.
    curtailed: bool = False

    def sizes_at(self, replay: int) -> dict[str, int]:
        """The sizes that a replay reads."""
        by = self.advance
        return {n: value + replay * (1 if by is None else by.get(n, 0)) for n, value in self.sizes.items()}


class Device(Protocol):
    """What carries out launches."""

    def ticket(self) -> Any:
        """A ticket for a launch."""

    def take(self, signal: SignalTicket) -> Steps:
        """A host waits for a publication, and gives what is known of its end."""

    def submit(self, launch: Launch) -> None:
        """Queues a launch on its stream."""

    def go_on(self) -> bool:
        """Does the next thing that can be done. False where there is none."""

    def waiting(self) -> list[str]:
        """What has been queued and cannot go on, in words; empty where all has been done or is under way."""

    def under_way(self) -> bool:
        """Whether something runs that will end by itself."""

    def declare(self, flag: Flag, initial: int) -> None:
        """A flag of this machine; the first to declare it says what it holds."""

    def value_of(self, flag: Flag) -> int:
        """What a flag holds, as far as the host knows."""

    def moment(self, rank: int) -> Any:
        """Now, on the host of a rank."""

    def waited(self, rank: int, end: Any) -> None:
        """The host of a rank has waited for an end."""

    def mark(self, rank: int, name: str, since: Any, ends: Sequence[Any]) -> None:
        """Notes a mark: a moment of the host, and the ends of what it named."""

    def woke(self) -> None:
        """Something has come while everything slept."""


@dataclass(slots=True, eq=False)
class Source:
    """Items that are fed: the next one, and when it comes."""

    to: int | Route
    inbox: str
    left: Iterator[tuple[float, object]]
    next: tuple[float, object] | None = None

    def advance(self) -> None:
        """Asks for the next item, which may have been made up only now."""
        self.next = next(self.left, None)


class HostSide:
    """All ranks' host programs on one thread; `device` carries out what they launch.

    `lockstep` names axes whose ranks do what the first of them is told. What would come once all programs
    have ended comes no more.
    """

    def __init__(self, device: Device, mesh: layout.Mesh, world: int, lockstep: Sequence[str]) -> None:
        self.device = device
        self.mesh = mesh
        self.trace = Trace()
        # When each item came, the end left out.
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
        """Seconds since the run began; 0 before that."""
        return 0.0 if self._origin is None else time.perf_counter() - self._origin

    @property
    def origin_s(self) -> float:
        """When the run began, by the wall clock."""
        assert self._origin is not None
        return self._origin

    def run(self, program: Callable[[Machine], Program]) -> None:
        """Runs one program on every rank (of those in lockstep: on the first) until all are done.

        Raises DeadlockError if something still waits when nothing can happen any more.
        """
        for rank in self.followers:
            self.watch(f"program of rank {rank}", self._first(rank, program))
        self._origin = time.perf_counter()
        self._work()
        stuck = [*(task.what() for task in self._hosts), *self.device.waiting()]
        if stuck:
            raise DeadlockError("nothing can happen any more, and these still wait: " + "; ".join(stuck))

    def _first(self, rank: int, program: Callable[[Machine], Program]) -> Steps:
        steps = self.host(program(self.machines[rank]))
        try:
            need = next(steps)
        except StopIteration:
            return
        finally:
            self.begun.add(rank)
        yield need
        yield from steps

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times (seconds, ascending): of a rank, or of those that `to` says
        for an item when it comes. An item that comes while the processor is busy is noticed later."""
        source = Source(to, inbox, iter(arrivals))
        source.advance()
        self._sources.append(source)

    def watch(self, what: str, steps: Steps) -> None:
        """Runs a host loop or a mark that has to come to its end."""
        self._hosts.append(Task(lambda: what, steps))

    def host(self, program: Program) -> Steps:
        """A program as steps: what it yields are waits, made by its machine."""
        result = None
        while True:
            try:
                wait = program.send(result)
            except StopIteration:
                return
            result = yield from wait

    def next_launch(self) -> int:
        """A number for the next launch."""
        return next(self._launches)

    def _leader(self, rank: int) -> int:
        """The first of the ranks that are in lockstep with a rank."""
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
            due_s = min((task.need.until_s for task in self._hosts), default=inf)
            due_s = min([due_s, *(source.next[0] for source in self._sources if source.next)])
            if due_s == inf:
                return
            self.slept = True
            time.sleep(max(0.0, due_s - self.now()))

    def _deliver(self) -> None:
        """All items whose time has come, in its order."""
        while due := [s for s in self._sources if s.next is not None and s.next[0] <= self.now()]:
            source = min(due, key=lambda s: cast(tuple[float, object], s.next)[0])
            at_s, item = cast(tuple[float, object], source.next)
            if item != END:
                self.fed_s.append(at_s)
            if self.slept:
                self.slept = False
                self.device.woke()
            ranks = (source.to,) if isinstance(source.to, int) else source.to(item)
            for rank in ranks:
                self.machines[rank].deliver(source.inbox, item, at_s)
            source.advance()
        if any(source.next is None for source in self._sources):
            self._sources = [source for source in self._sources if source.next is not None]

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
    """A host that waits for an item; `item` once it has come."""

    item: tuple[Message, object] | None = None


class RealMachine:
    """One rank of a real machine; implements `simcore.machine.Machine`."""

    def __init__(self, host: HostSide, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self.mesh: layout.Mesh = host.mesh
        self._host = host
        self._device = host.device
        self._items: dict[str, deque[tuple[Message, object]]] = defaultdict(deque)
        self._receivers: dict[str, deque[_Receiver]] = defaultdict(deque)
        self._watched: dict[str, list[Launch]] = defaultdict(list)

    def now(self) -> float:
        """Seconds since the run began."""
        return self._host.now()

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
        advance: Mapping[str, int] | None = None,
        repeat: int = 1,
        until: str | None = None,
        when: Condition | None = None,
        sets: Mapping[Flag, Setting] | None = None,
    ) -> Ticket:
        """Queues a graph; see Machine. Raises ValueError where a size is missing or repeat is below 1."""
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
            self._host.next_launch(), self.rank, stream, graph, self.now(), tickets, signals, given, advance,
            repeat, when, sets or {}, self._device.ticket(),
        )  # fmt: skip
        if until is not None and repeat > 1:
            others = [other for other in self._watched[until] if other.ticket.end is None]
            self._watched[until] = [*others, launch]
        self._device.submit(launch)
        ticket: Ticket = launch.ticket
        return ticket

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """A flag of this rank or of another. Raises ValueError where the latter is given a value."""
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
        for ticket in tickets:
            self._device.waited(self.rank, (yield from _done(ticket)))

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """The host gets a flag's value once `after` is done."""
        self._device.waited(self.rank, (yield from _done(after)))
        return self._device.value_of(flag)

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """The next item of an inbox, or None after `timeout_s`."""
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
        """All items that have come and were not taken yet."""
        found = [self._taken(came) for came in self._items[inbox]]
        self._items[inbox].clear()
        return found

    def send(self, inbox: str, item: object, rank: int) -> None:
        """Puts an item into the inbox of a rank's host."""
        self._host.machines[rank].deliver(inbox, item, self.now())

    def deliver(self, inbox: str, item: object, at_s: float) -> None:
        """An item has come into an inbox of this rank at `at_s`."""
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
        """One more host loop, on the same host thread."""
        ticket, host = TorchTicket(), self._host

        def loop() -> Steps:
            yield from host.host(program)
            ticket.ran = 1
            ticket.end = host.device.moment(self.rank)

        host.watch(f"loop of rank {self.rank}", loop())
        return ticket

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """Notes when the host has come here and the tickets are done."""
        since = self._device.moment(self.rank)
        self._host.watch(f"mark {name!r} of rank {self.rank}", self._mark(name, after, since))

    def _mark(self, name: str, after: Sequence[Ticket], since: Any) -> Steps:
        ends = []
        for ticket in after:
            ends.append((yield from _done(ticket)))
        self._device.mark(self.rank, name, since, ends)

    def gauge(self, name: str, value: float, limit: float) -> None:
        """Notes a level and its limit."""
        self._host.trace.gauges.append(Gauge(self.rank, name, self.now(), value, limit))


def _done(ticket: Ticket) -> Steps:
    return cast(Waitable, ticket).done()


# -- graphs, cut where something happens, and ranks that meet ----------------------------------------------


def units(op: Op) -> Iterator[Op]:
    """What of an op is executed one by one: itself, or the parts of a fused one that has no kernel."""
    if not op.parts or op.kind in TABLE:
        yield op
        return
    for part in op.parts:
        yield from units(part)


@dataclass(frozen=True, slots=True)
class Segment:
    """Bound ops between two collectives, or one collective; what is published after which of them."""

    ops: tuple[Op, ...]
    collective: bool = False
    leaving: Mapping[int, Sequence[Publication]] = field(default_factory=dict)


def segments(graph: Graph, sizes: Mapping[str, int]) -> Iterator[Segment]:
    """The segments of a graph, in order; an empty graph is one without ops."""
    leaves: dict[int, list[Publication]] = defaultdict(list)
    for publication in graph.publishes:
        leaves[publication.op].append(publication)
    local: list[Op] = []
    leaving: dict[int, Sequence[Publication]] = {}
    for i, op in enumerate(op.at(sizes) for op in graph.ops):
        if op.ranks > 1:
            if local:
                yield Segment(tuple(local), leaving=leaving)
            yield Segment((op,), collective=True)
            local, leaving = [], {}
            continue
        if i in leaves:
            leaving[len(local)] = leaves[i]
        local.append(op)
    if local or not graph.ops:
        yield Segment(tuple(local), leaving=leaving)


@dataclass(slots=True, eq=False)
class Meeting:
    """Ranks in a collective: what each of those that have come brought, and the end of each, once held."""

    op: Op
    members: tuple[int, ...]
    arrived: dict[int, Any] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)

    @property
    def is_full(self) -> bool:
        """Whether all are there."""
        return len(self.arrived) == len(self.members)


class Meetings:
    """Which collective of a rank meets which of others: the n-th along an axis, on a stream, the n-th."""

    def __init__(self, host: HostSide) -> None:
        self._host = host
        self._held: dict[tuple[str, str, tuple[int, ...]], list[Meeting]] = defaultdict(list)
        self._met: dict[tuple[str, str, int], int] = defaultdict(int)

    def members(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks whose hosts a rank meets: of those in lockstep, the first stands for all."""
        return (rank,) if axis in self._host.lockstep else layout.members(self._host.mesh, rank, axis)

    def groups(self, meeting: Meeting) -> list[tuple[tuple[int, ...], dict[int, int]]]:
        """The ranks that do one collective together, group by group, and whose host told each of them."""
        leader_of = {r: leader for leader in meeting.arrived for r in self._host.followers[leader]}
        axis, mesh = meeting.op.axis, self._host.mesh
        groups = dict.fromkeys(layout.members(mesh, rank, axis) for rank in leader_of)
        return [(group, {rank: leader_of[rank] for rank in group}) for group in groups]

    def next(self, op: Op, stream: str, rank: int) -> Meeting:
        """The meeting that a rank comes to. Raises MismatchError where the others are in another one."""
        size = self._host.mesh.get(op.axis, 1)
        if size != op.ranks:
            raise MismatchError(f"{op.kind} {op.name} is for {op.ranks} ranks; axis {op.axis!r} has {size}")
        members = self.members(rank, op.axis)
        turn = self._met[op.axis, stream, rank]
        self._met[op.axis, stream, rank] += 1
        meetings = self._held[op.axis, stream, members]
        if turn == len(meetings):
            meetings.append(Meeting(op, members))
        other = meetings[turn].op
        if (other.kind, other.name, other.shape, other.dtype) != (op.kind, op.name, op.shape, op.dtype):
            raise MismatchError(
                f"rank {rank} comes to {op.kind} {op.name}, others are in {other.kind} {other.name}"
            )
        return meetings[turn]
