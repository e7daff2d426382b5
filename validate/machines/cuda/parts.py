"""Objects by which the machine on a card follows its work: streams of ranks, tickets, arrivals."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.validate.machines.cuda.cuda_api import CudaApi
from simcore.validate.machines.cuda.memory import StreamLog
from simcore.validate.machines.cuda.plan import Plan, Stage
from simcore.validate.machines.cuda.records import Record
from simcore.validate.machines.launches import Launch, Need, Steps, Stream


@dataclass(slots=True, eq=False)
class RankStream:
    """A lane: a CUDA stream of one rank and the last work queued on it."""

    rank: int
    name: str
    state: Any
    stream: Any
    buffers: dict[Hashable, Any] = field(default_factory=dict)
    last: Record | None = None
    # The event behind all queued work; the last event that is known to have passed.
    tail: Any = None
    passed: Any = None
    flags_seen: int = 0

    def reset(self) -> None:
        """Resets the lane to the start of a run."""
        self.last = self.tail = self.passed = None
        self.flags_seen = 0


@dataclass(slots=True, eq=False)
class CardTicket:
    """A launch's ticket. `ends`: the event behind its last replay by rank; `records`: the last of each."""

    api: CudaApi
    replays: int = 0
    stopped: bool = False
    issued: bool = False
    gates: list[tuple[StreamLog, int]] = field(default_factory=list)
    ends: dict[int, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    _done: bool = False

    @property
    def ran(self) -> int:
        """How many replays ran; valid after a wait for the ticket."""
        return sum(log.at(place) for log, place in self.gates) if self.gates else self.replays

    @property
    def end(self) -> "CardTicket | None":
        """The ticket itself once it is done, else None."""
        return self if self.is_done() else None

    def stop(self) -> None:
        """Queues no more replays; a launch of which nothing has been queued runs no replay."""
        self.stopped = self.stopped or not self.issued

    def queued(self, records: Sequence[Record]) -> None:
        """Notes that all its work has been queued, each rank's up to its record."""
        self.ends |= {record.rank: record.after for record in records}
        self.records += records
        self.issued = True

    def is_done(self) -> bool:
        """Whether all its work has been queued and has ended."""
        if not self._done and self.issued:
            self._done = all(self.api.done(event) for event in self.ends.values())
        return self._done

    def done(self) -> Steps:
        """Waits until the ticket is done; returns it."""
        if not self.is_done():
            yield Need(self.is_done)
        return self


@dataclass(slots=True, eq=False)
class Arrival:
    """A rank's arrival at a collective: `events` behind all work on its lanes; `waited`: what it waited for;
    `heads`: the first records of this replay, filled in there."""

    stream: Stream
    launch: Launch
    plan: Plan
    stage: Stage
    replay: int
    gate: tuple[StreamLog, int] | None
    heads: list[Record | None]
    waited: tuple[Any, ...]
    events: list[Any] = field(default_factory=list)

    @property
    def writes_flags(self) -> bool:
        """Whether its flags are written at the end of this collective."""
        return self.plan.writes_flags_in_collective and self.stage is self.plan.stages[-1]
