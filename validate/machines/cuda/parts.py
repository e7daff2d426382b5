"""What the machine on a card keeps of its streams and launches: lanes, tickets, arrivals at meetings."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from simcore.validate.machines.cuda.layer import Layer
from simcore.validate.machines.cuda.memory import Notes
from simcore.validate.machines.cuda.plan import Plan, Stage
from simcore.validate.machines.cuda.records import Record
from simcore.validate.machines.launches import Launch, Need, Steps, Stream


@dataclass(slots=True, eq=False)
class Lane:
    """A stream of one rank: where it is, and what was queued on it last."""

    rank: int
    name: str
    state: Any
    stream: Any
    buffers: dict[Hashable, Any] = field(default_factory=dict)
    last: Record | None = None
    # The event behind all that was queued; one that is known to have passed.
    tail: Any = None
    passed: Any = None
    flags_seen: int = 0

    def reset(self) -> None:
        """As at the start of a run."""
        self.last = self.tail = self.passed = None
        self.flags_seen = 0


@dataclass(slots=True, eq=False)
class CardTicket:
    """A launch. `ends`: by rank the event behind its last replay; `records`: its last ones, for the trace."""

    layer: Layer
    replays: int = 0
    stopped: bool = False
    issued: bool = False
    gates: list[tuple[Notes, int]] = field(default_factory=list)
    ends: dict[int, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    _done: bool = False

    @property
    def ran(self) -> int:
        """How many replays ran; once it has been waited for."""
        return sum(notes.at(place) for notes, place in self.gates) if self.gates else self.replays

    @property
    def end(self) -> "CardTicket | None":
        """None as long as it is not done."""
        return self if self.is_done() else None

    def stop(self) -> None:
        """No replay is queued any more; one that nothing has been queued of runs not once."""
        self.stopped = self.stopped or not self.issued

    def is_done(self) -> bool:
        """Whether all has been queued and has ended."""
        if not self._done and self.issued:
            self._done = all(self.layer.done(event) for event in self.ends.values())
        return self._done

    def done(self) -> Steps:
        """Waits until it is done."""
        if not self.is_done():
            yield Need(self.is_done)
        return self


@dataclass(slots=True, eq=False)
class Arrival:
    """What a rank brings to a meeting: `events` behind all that is on its lanes; what it `waited` for; the
    first records of this replay (`heads`), which are filled in."""

    stream: Stream
    launch: Launch
    plan: Plan
    stage: Stage
    replay: int
    gate: tuple[Notes, int] | None
    heads: list[Record | None]
    waited: tuple[Any, ...]
    events: list[Any] = field(default_factory=list)

    @property
    def settles(self) -> bool:
        """Whether its flags are written when this meeting ends."""
        return self.plan.settles_in_meeting and self.stage is self.plan.stages[-1]
