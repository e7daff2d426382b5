"""What host and device of a real machine give each other: launches, tickets, and what tasks wait for."""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from simcore.machine.machine import Condition, Flag, Setting, Ticket
from simcore.machine.trace import PricedOp
from simcore.ops.op import Graph, Op, Price


@dataclass(frozen=True, slots=True)
class Need:
    """What a task waits for: it goes on once `ready()`, or at `until_s` at the latest."""

    ready: Callable[[], bool]
    until_s: float = inf


# Nothing but its turn.
TURN = Need(lambda: True)
Steps = Generator[Need, None, Any]


@dataclass(slots=True, eq=False, repr=False)
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


@dataclass(slots=True, eq=False, repr=False)
class Stream:
    """A stream of a program's rank: its launches in order, and the task that works them off, while there are
    any. `lanes`: what carries them out, one for each rank that is led."""

    rank: int
    name: str
    lanes: Sequence[Any]
    queue: "deque[Launch]" = field(default_factory=deque)
    task: Task | None = None
    # A text, and what stands in it: put together only where somebody asks.
    waiting_for: tuple[Any, ...] = ("",)

    def start(self, execute: "Callable[[Stream, Launch], Steps]") -> Task:
        """A task that executes its launches, one after the other."""
        self.task = Task(self.what, self._work_off(execute))
        return self.task

    def _work_off(self, execute: "Callable[[Stream, Launch], Steps]") -> Steps:
        while self.queue:
            yield from execute(self, self.queue.popleft())
        self.task = None

    def what(self) -> str:
        """What it waits for, for a deadlock."""
        text, *of = self.waiting_for
        return f"rank {self.rank} stream {self.name}: {text.format(*of)}"


@dataclass(slots=True, eq=False, repr=False)
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


@dataclass(slots=True, eq=False, repr=False)
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


@dataclass(slots=True, eq=False, repr=False)
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
    # When the device had been given the first of it, where the host did that at once; how long it was at it.
    given_s: float | None = None
    took_s: float = 0.0
    # Of that, what it took to write sizes in the device's memory, and how many there were.
    told_s: float = 0.0
    sizes_told: int = 0

    def sizes_at(self, replay: int) -> dict[str, int]:
        """The sizes that a replay reads."""
        by = self.advance
        return {n: value + replay * (1 if by is None else by.get(n, 0)) for n, value in self.sizes.items()}


def measured(op: Op, seconds: float, detail: str, floor_s: float = 0.0) -> PricedOp:
    """An op of a span and what it took; `detail`: by what that is known."""
    return PricedOp(op, Price(seconds, seconds, seconds, "measured", detail), floor_s)


class Device(Protocol):
    """What carries out launches; `working`: what the streams that have work are at."""

    working: list[Task]

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
        return [task.what() for task in self.working]

    def under_way(self) -> bool:
        """Whether something runs that will end by itself."""
        return False

    def declare(self, flag: Flag, initial: int) -> None:
        """A flag of this machine; the first to declare it says what it holds."""

    def value_of(self, flag: Flag) -> int:
        """What a flag holds, as far as the host knows."""

    def moment(self, rank: int) -> Any:
        """Now, on the host of a rank."""

    def waited(self, rank: int, ends: Sequence[Any]) -> None:
        """The host of a rank has waited for some ends."""
        del rank, ends

    def mark(self, rank: int, name: str, since: Any, ends: Sequence[Any]) -> None:
        """Notes a mark: a moment of the host, and the ends of what it named."""

    def woke(self) -> None:
        """Something has come while everything slept."""
