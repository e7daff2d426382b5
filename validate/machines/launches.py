"""Objects that the host and the device of a real machine share: launches, tickets, tasks and their waits."""

import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from simcore.machine.machine import Condition, Flag, Setting, Ticket
from simcore.machine.trace import PricedOp
from simcore.ops.op import Graph, Op, Price

# How an op was measured in which its rank waited for others, in a graph with others.
WAITED = "what a graph of launches takes beyond its ops' times alone: its rank waits for the other group"


@dataclass(frozen=True, slots=True)
class Need:
    """The wait of a task: the task continues once `ready()` is true, or at `until_s` at the latest."""

    ready: Callable[[], bool]
    until_s: float = inf


# Ready at once: the task only waits for its turn.
TURN = Need(lambda: True)
Steps = Generator[Need, None, Any]


@dataclass(slots=True, eq=False, repr=False)
class Task:
    """A host loop, a mark or a stream with work; `what` describes it for a deadlock message."""

    what: Callable[[], str]
    steps: Steps
    need: Need = TURN

    def go_on(self) -> bool:
        """Runs the task until its next wait. Returns False if the task has ended."""
        try:
            self.need = next(self.steps)
        except StopIteration:
            return False
        return True


@dataclass(slots=True, eq=False, repr=False)
class Stream:
    """A stream of a program's rank: its launches in order and, while there are any, the task that executes
    them. `lanes`: for each rank in lockstep, its own first, where the launches run (a rank, or a
    `RankStream`)."""

    rank: int
    name: str
    lanes: Sequence[Any]
    queue: "deque[Launch]" = field(default_factory=deque)
    task: Task | None = None
    # A template and its arguments, put together only when needed.
    waiting_for: tuple[Any, ...] = ("",)

    def start(self, execute: "Callable[[Stream, Launch], Steps]") -> Task:
        """Starts a task that executes the launches one after another."""
        self.task = Task(self.what, self._work_off(execute))
        return self.task

    def _work_off(self, execute: "Callable[[Stream, Launch], Steps]") -> Steps:
        while self.queue:
            yield from execute(self, self.queue.popleft())
        self.task = None

    def what(self) -> str:
        """Returns the text that says what the stream waits for, for a deadlock message."""
        text, *of = self.waiting_for
        return f"rank {self.rank} stream {self.name}: {text.format(*of)}"


@dataclass(slots=True, eq=False, repr=False)
class TorchTicket:
    """The ticket of a launch or a host loop; `end`: as its device records it, None until it is done."""

    ran: int = 0
    end: Any = None
    stopped: bool = False

    def stop(self) -> None:
        """Ends a repeated launch at its next replay boundary; a launch that has not begun runs no replay."""
        self.stopped = self.stopped or self.end is None

    def done(self) -> Steps:
        """Waits until the ticket is done; returns its end."""
        if self.end is None:
            yield Need(lambda: self.end is not None)
        return self.end


class Waitable(Ticket, Protocol):
    """A ticket of a real machine."""

    def done(self) -> Steps:
        """Waits until the ticket is done; returns its end as its device records it."""


@dataclass(slots=True, eq=False, repr=False)
class SignalTicket:
    """The next publication of `name` by rank `source` that rank `waiter` has not taken yet."""

    device: "Device"
    name: str
    source: int
    waiter: int
    ran: int = 1

    def stop(self) -> None:
        """Does nothing: a signal cannot be stopped."""

    def done(self) -> Steps:
        """Waits for the publication and takes it; returns its end."""
        return self.device.take(self)


@dataclass(slots=True, eq=False, repr=False)
class Launch:
    """One launch of a graph."""

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
    # The launch with which it is captured, if its program says so.
    within: Any = None
    # Whose tokens it computes (`workload.requests.Batch`), if its program says so.
    batch: Any = None
    # What its host had waited for last before the launch, as its device records it.
    since: Any = None
    # Whether it watches an inbox, and an item has arrived there: then it ends at the next replay boundary,
    # but runs at least once.
    watches: bool = False
    curtailed: bool = False
    # When its first local stage had been queued (None: not yet); the seconds of the launch call.
    queued_at_s: float | None = None
    took_s: float = 0.0
    # Seconds of that for saying whose tokens it computes.
    batch_s: float = 0.0
    # Seconds of that for writing sizes to the device's memory, and the number of these sizes.
    size_write_s: float = 0.0
    sizes_written: int = 0

    def sizes_at(self, replay: int) -> dict[str, int]:
        """Returns the sizes that a replay reads."""
        by = self.advance
        return {n: value + replay * (1 if by is None else by.get(n, 0)) for n, value in self.sizes.items()}


def measured(op: Op, seconds: float, detail: str, floor_s: float = 0.0) -> PricedOp:
    """Returns an op of a span with its measured time; `detail`: how the time was measured."""
    return PricedOp(op, Price(seconds, seconds, seconds, "measured", detail), floor_s)


class Device(Protocol):
    """The device that executes launches; `working`: the tasks of the streams that have work."""

    working: list[Task]

    def ticket(self) -> Any:
        """Makes a ticket for a launch."""

    def take(self, signal: SignalTicket) -> Steps:
        """Waits, for a host, for a publication and takes it; returns its end."""

    def submit(self, launch: Launch) -> None:
        """Queues a launch on its stream."""

    def settle(self, rank: int) -> None:
        """Queues what a rank's host has given and its device has kept together until now."""
        del rank

    def go_on(self) -> bool:
        """Does the work that can be done next. Returns False if there is none."""

    def waiting(self) -> list[str]:
        """Returns what each stream that has work waits for; empty if all work is done or under way."""
        return [task.what() for task in self.working]

    def under_way(self) -> bool:
        """Whether the device still runs work that ends by itself."""
        return False

    def rest(self, seconds: float) -> None:
        """Waits so long at most, where nothing else can happen."""
        time.sleep(seconds)

    def declare(self, flag: Flag, initial: int) -> None:
        """Declares a flag of this machine; the first declaration sets its value."""

    def value_of(self, flag: Flag) -> int:
        """Returns the value of a flag, as far as the host knows it."""

    def moment(self, rank: int) -> Any:
        """Returns the present moment on the host of a rank."""

    def waited(self, rank: int, ends: Sequence[Any]) -> None:
        """Notes that the host of a rank has waited for these ends."""
        del rank, ends

    def mark(self, rank: int, name: str, since: Any, ends: Sequence[Any]) -> None:
        """Records a mark: the host's moment `since`, and the ends of the mark's tickets."""

    def woke(self) -> None:
        """Notes that an item has arrived while the host slept."""
