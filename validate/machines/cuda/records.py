"""Makes the trace of a run on a card, after all queued work has ended and its events have times.

    host time of an event = first look + (event - first) (last look - first look) / (last - first)

The clocks of host and card, of each card its own, are looked at together before and after a run and are
assumed to drift evenly in between. No event passes before the host queued it: if some seem to, the looks were
wrong, and all events pass later by the largest of these errors.

A span starts when the last thing that it waited for has ended, if that was after the host had queued it: the
card's time between two graphs is then part of the later graph, as its time between two nodes is part of an
op's measured time. Otherwise a span starts when the host had queued it, or when the card came to it after
that; its host caused the time before. A graph's time is shared out among its ops (`machines.shares`).

Records refer to each other, so none of these classes has a repr: a traceback would print each record with all
records before it, over and over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.machine.trace import Cause, Mark, PricedOp, Span, Trace
from simcore.machine.trace import State as SpanState
from simcore.ops.op import Graph, Publication
from simcore.sim.host import latest
from simcore.validate.machines.cuda.cuda_api import CudaApi
from simcore.validate.machines.cuda.memory import StreamLog
from simcore.validate.machines.launches import WAITED, Launch, TorchTicket, measured
from simcore.validate.machines.shares import EXCHANGE, SharedOut, Shares

# Events further apart than this are timed from an event in between: the driver has single precision.
NEAR_S = 0.25
# Two events are compared, each timed to a quarter of this.
TICK_S = 2e-6
SHARED, ALONE = "its share of a graph's time", "a graph of this op alone"


class OrderError(RuntimeError):
    """A card began work before the end of work that it had to wait for: a fault of the machine."""


@dataclass(slots=True, eq=False, repr=False)
class HostMoment:
    """A moment on the host of a rank; `since`: the ends that the host had waited for last."""

    rank: int
    at_s: float
    since: tuple[Any, ...] | None = None


@dataclass(slots=True, eq=False, repr=False)
class Taken:
    """A publication that a rank took; the log at `place` gives its number."""

    name: str
    source: int
    log: StreamLog
    place: int


@dataclass(slots=True, eq=False, repr=False)
class Record:
    """One queued stretch of one stream of one rank: ops `first` to `first + count - 1` of a launch's graph at
    `sizes`, between two events. `before` is None if it starts at the end of the work before it. The host
    queued it from `queued_from_s` to `queued_at_s`. `gate`: the log entry that says whether it ran, one for
    all records of its replay; `head`: the first of these; `until_s`: the end of all of them if they were
    skipped. `waited`: what it waited for besides the record `earlier` of its stream; for a collective, what
    all its ranks did."""

    id: int
    launch: Launch
    rank: int
    stream: str
    state: SpanState
    replay: int
    first: int
    count: int
    sizes: Mapping[str, int]
    queued_from_s: float
    queued_at_s: float
    after: Any
    before: Any = None
    earlier: "Record | None" = None
    waited: tuple[Any, ...] = ()
    gate: tuple[StreamLog, int] | None = None
    head: "Record | None" = None
    publication: Publication | None = None
    # The graphs of launches captured as one, each with the log entry of its gate, if it has one.
    parts: "tuple[tuple[Graph, tuple[StreamLog, int] | None], ...]" = ()
    collective_id: int | None = None
    members: tuple[int, ...] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    until_s: float = 0.0
    cause: Cause = field(default_factory=lambda: Cause(None, 0.0))
    skipped: bool = False

    @property
    def name(self) -> str:
        """Its graph's name; of several captured as one, the first one's, and how many are behind it."""
        more = len(self.parts) - 1
        return self.launch.graph.name + (f" and {more} behind it" if more > 0 else "")

    def shown(self) -> "Record":
        """Returns the record that a trace shows for it: for a skipped replay, the first record."""
        return self.head if self.skipped and self.head is not None else self


class _Clock:
    """Times of one card's events in seconds since the run began, but for how much later all pass. `first`,
    `last`: (event, host's seconds), together wrong by at most `clock_error_s`; a difference of the clocks
    that this explains is no drift."""

    def __init__(
        self, api: CudaApi, first: tuple[Any, float], last: tuple[Any, float], clock_error_s: float
    ) -> None:
        self.api, self.first = api, first
        self._near, self._near_s = first[0], 0.0
        self._known: dict[int, float] = {}
        self._rate = 1.0
        card_s, host_s = self.on_card(last[0]), last[1] - first[1]
        if card_s > 0.0 and abs(host_s - card_s) > clock_error_s:
            self._rate = host_s / card_s

    def on_card(self, event: Any) -> float:
        """Returns the seconds from the first look to an event, by the card's clock."""
        found = self._known.get(id(event))
        if found is None:
            apart_s = self.api.elapsed_s(self._near, event)
            found = self._known[id(event)] = self._near_s + apart_s
            if abs(apart_s) > NEAR_S:
                self._near, self._near_s = event, found
        return found

    def at(self, event: Any) -> float:
        """Returns the time of an event in seconds since the run began."""
        return self.first[1] + self._rate * self.on_card(event)


class Clocks:
    """Times of events in seconds since the run began, each by the clock of its card. `first`, `last`: a look
    at each card's, (event, host's seconds); a card's two are wrong by at most `clock_error_s` together."""

    def __init__(
        self,
        api: CudaApi,
        first: Sequence[tuple[Any, float]],
        last: Sequence[tuple[Any, float]],
        clock_error_s: float,
    ) -> None:
        self.api, self.clock_error_s = api, clock_error_s
        self._of = {
            api.where(before[0]): _Clock(api, before, after, clock_error_s)
            for before, after in zip(first, last, strict=True)
        }
        self._only = next(iter(self._of.values())) if len(self._of) == 1 else None
        self._later_s = 0.0

    def at(self, event: Any) -> float:
        """Returns the time of an event in seconds since the run began."""
        clock = self._only or self._of[self.api.where(event)]
        return clock.at(event) + self._later_s

    def move(self, seconds: float) -> None:
        """Makes all events pass later by `seconds`, but at most by twice the possible error of the looks at
        the clocks: once for the looks, once for the drift."""
        self._later_s += min(seconds, 2.0 * self.clock_error_s)


@dataclass(slots=True, eq=False, repr=False)
class Resolver:
    """Makes spans and marks of records; `published`: the records of each signal that ran, in order."""

    trace: Trace
    clocks: Clocks
    shared: SharedOut
    published: dict[tuple[str, int], list[Record]] = field(default_factory=dict)
    _collectives: dict[int, tuple[float, float, Cause]] = field(default_factory=dict)
    # When the last rank's host issued the launch of a collective.
    _issued_s: dict[int, float] = field(default_factory=dict)

    def resolve(self, records: Sequence[Record]) -> None:
        """Appends the spans of all records to the trace."""
        for record in records:
            record.skipped = record.gate is not None and record.gate[0].at(record.gate[1]) == 0
        self.clocks.move(max((self._early_s(record) for record in records), default=0.0))
        for record in records:
            if record.collective_id is not None:
                issued_s = self._issued_s.get(record.collective_id, 0.0)
                self._issued_s[record.collective_id] = max(issued_s, record.launch.issued_s)
            record.end_s = max(0.0, self.clocks.at(record.after))
        for record in records:
            if record.publication is not None and not record.skipped:
                key = (record.publication.signal, record.rank)
                self.published.setdefault(key, []).append(record)
        for wires in self.published.values():
            wires.sort(key=lambda record: (record.end_s, record.id))
        for record in records:
            self._place(record)
        for record in records:
            if record.shown() is record:
                self.trace.spans.append(self._span(record))
        self.trace.spans.sort(key=lambda span: (span.end_s, span.id))
        measured_s = sum(p.price.seconds for span in self.trace.spans for p in span.ops)
        self.trace.rows.sources["measured"] = measured_s

    def _early_s(self, record: Record) -> float:
        """Returns by how much a record's events seem to pass before the host began to queue them, or 0. The
        looks at the clocks are wrong by at least that: by a time slice if other processes use the card."""
        ends_s = record.queued_from_s - self.clocks.at(record.after)
        if record.before is None:
            return max(0.0, ends_s + (0.0 if record.skipped else self._floor_s(record)))
        return max(0.0, ends_s, record.queued_from_s - self.clocks.at(record.before))

    def cause(self, moment: Any) -> Cause:
        """Returns a moment of any kind as a cause: of several ends, and of a launch's records, the last."""
        match moment:
            case HostMoment():
                return Cause(self.cause(moment.since).span, moment.at_s, host=True)
            case Taken():
                turn = moment.log.at(moment.place)
                wires = self.published.get((moment.name, moment.source), [])
                return self.cause(wires[turn]) if 0 <= turn < len(wires) else Cause(None, 0.0)
            case Record():
                return Cause(moment.shown().id, moment.end_s)
            case TorchTicket():
                return self.cause(moment.end)
            case None:
                return Cause(None, 0.0)
            case _:
                found = moment if isinstance(moment, tuple) else moment.records
                ends = [self.cause(end) for end in found]
                return max(ends, key=lambda cause: cause.at_s, default=Cause(None, 0.0))

    def mark(self, rank: int, name: str, moments: Sequence[Any]) -> None:
        """Records a mark at the latest of some moments."""
        cause = max((self.cause(moment) for moment in moments), key=lambda each: each.at_s)
        self.trace.marks.append(Mark(rank, name, cause.at_s, cause))

    def _place(self, record: Record) -> None:
        """Sets start, end and cause of a record."""
        if record.head is not None and record.skipped:
            # A skipped replay is one span.
            record.head.until_s = max(record.head.until_s, record.end_s)
            return
        if record.collective_id is not None and record.collective_id in self._collectives:
            record.start_s, record.end_s, record.cause = self._collectives[record.collective_id]
            return
        device, issued_s = self._last_waited(record), record.launch.issued_s
        if record.collective_id is not None:
            issued_s = self._issued_s[record.collective_id]
        if device.span is not None and device.at_s >= max(record.queued_at_s, issued_s):
            record.start_s, record.cause = device.at_s, device
        else:
            came_s = record.queued_from_s if record.before is None else self.clocks.at(record.before)
            earliest_s = max(came_s, device.at_s, issued_s)
            # If a graph takes long to queue, the card may begin it while the host still does.
            record.start_s = max(earliest_s, min(record.queued_at_s, record.end_s - self._floor_s(record)))
            record.cause = Cause(self.cause(record.launch.since).span, record.start_s, host=True)
        record.end_s = max(record.end_s, record.start_s)
        if record.collective_id is not None:
            self._collectives[record.collective_id] = record.start_s, record.end_s, record.cause

    def _last_waited(self, record: Record) -> Cause:
        """Returns the last end of all that a record waited for. Raises OrderError if the card did not wait
        for it: the trace would otherwise show what was intended."""
        began_s = record.end_s if record.before is None else self.clocks.at(record.before)
        last = Cause(None, 0.0)
        for each in (*record.waited, record.earlier):
            cause = self.cause(each)
            if isinstance(each, Taken):
                # A publication is sent a little before the event behind it.
                cause = Cause(cause.span, min(cause.at_s, began_s))
            last = latest(last, cause)
        # The host's times do not count: they are by another clock.
        if last.span is not None and not last.host and began_s < last.at_s - TICK_S:
            raise OrderError(
                f"rank {record.rank} stream {record.stream}: graph {record.name} began"
                f" {1e6 * (last.at_s - began_s):.1f} us before span {last.span}, which it waits for, ended"
            )
        return last

    def _span(self, record: Record) -> Span:
        launch, end_s = record.launch, max(record.end_s, record.until_s)
        took_s = end_s - record.start_s
        ops = () if record.skipped else self._priced(record, took_s)
        progress = ((record.start_s, 0.0), (end_s, took_s))
        after = tuple([c.span for t in launch.after if (c := self.cause(t)).span is not None])
        return Span(
            record.id, launch.id, record.rank, record.stream, record.name,
            "skipped" if record.skipped else record.state, launch.issued_s, record.start_s, end_s,
            record.cause, after, ops, progress, None if record.skipped else record.collective_id,
            () if record.skipped else record.members, record.replay,
        )  # fmt: skip

    def _ops_of(self, record: Record) -> Shares:
        if record.publication is not None:
            return self.shared.between([record.publication.put])
        if record.parts:
            ran = [graph for graph, gate in record.parts if gate is None or gate[0].at(gate[1])]
            return self.shared.together(ran, record.sizes, record.end_s - record.start_s)
        return self.shared.of(record.launch.graph, record.first, record.count, record.sizes)

    def _floor_s(self, record: Record) -> float:
        """Returns the least time of a record's local ops, 0 for other records."""
        return self._ops_of(record)[1] if record.state == "run" else 0.0

    def _priced(self, record: Record, took_s: float) -> tuple[PricedOp, ...]:
        ops, floor_s = self._ops_of(record)
        detail = ALONE if len(ops) == 1 else SHARED
        # A share is not its op's own time: the time of all ops is compared with the sum of their floors.
        floor_s = floor_s if record.state == "run" else 0.0
        waits = EXCHANGE if record.parts else None
        return tuple(
            [
                measured(op, took_s * share, WAITED if op.kind == waits else detail, floor_s * share)
                for op, share in ops
            ]
        )
