"""The record of a run: spans, messages, gauges and marks, and the Chrome trace of them.

A span is one stretch of one stream of one rank: the local ops of a graph between two collectives, one
collective, a put on the wire, or a launch that its flag skipped. It keeps

    cause       the last thing that it waited for: a span and a time, and whether the host came between
    progress    (time, seconds of work done) pairs, from which the time of every op inside follows,
                also if other graphs slowed it down

so a critical path can be walked back from any span to the start of the run.
"""

import gzip
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from simcore.ops.op import Op, Price, SourceKind

State = Literal["run", "collective", "wire", "skipped", "flags"]


@dataclass(frozen=True, slots=True)
class PricedOp:
    """An op without run-time sizes, its price, and the least that it can take, in seconds."""

    op: Op
    price: Price
    floor_s: float


def distinct(ops: tuple[PricedOp, ...]) -> Iterable[PricedOp]:
    """Each object among ops once, in order of first appearance: layers repeat the same few objects."""
    return {id(priced): priced for priced in ops}.values() if len(ops) > 1 else ops


# A run has millions of these, so they are not frozen, and their constructors are written out: in the compiled
# core they take a tenth of the time of a generated one. Treat them as immutable.
@dataclass(slots=True, init=False)
class Cause:
    """Why a span, a mark or a host action started when it did: its predecessor on the critical path is span
    `span` (None: the start of the run), at `at_s`. If `host`, the host was busy since that span ended."""

    span: int | None
    at_s: float
    host: bool

    def __init__(self, span: int | None, at_s: float, host: bool = False) -> None:
        self.span = span
        self.at_s = at_s
        self.host = host


@dataclass(slots=True, init=False)
class Span:
    """A stretch of one stream; see the head of this file. Times in seconds."""

    id: int
    launch: int
    rank: int
    stream: str
    graph: str
    state: State
    issued_s: float
    start_s: float
    end_s: float
    cause: Cause
    after: tuple[int, ...]
    ops: tuple[PricedOp, ...]
    progress: tuple[tuple[float, float], ...]
    collective_id: int | None
    members: tuple[int, ...]
    replay: int

    def __init__(
        self,
        id: int,
        launch: int,
        rank: int,
        stream: str,
        graph: str,
        state: State,
        issued_s: float,
        start_s: float,
        end_s: float,
        cause: Cause,
        after: tuple[int, ...],
        ops: tuple[PricedOp, ...],
        progress: tuple[tuple[float, float], ...],
        collective_id: int | None = None,
        members: tuple[int, ...] = (),
        replay: int = 0,
    ) -> None:
        self.id = id
        self.launch = launch
        self.rank = rank
        self.stream = stream
        self.graph = graph
        self.state = state
        self.issued_s = issued_s
        self.start_s = start_s
        self.end_s = end_s
        self.cause = cause
        self.after = after
        self.ops = ops
        self.progress = progress
        self.collective_id = collective_id
        self.members = members
        self.replay = replay

    def op_times(self) -> Iterator[tuple[PricedOp, float, float]]:
        """Each op with its start and end, in seconds: the times at which its part of the work was done."""
        if len(self.ops) == 1:
            yield self.ops[0], self.start_s, self.end_s
            return
        if len(self.progress) == 2:
            yield from self._at_one_rate()
            return
        done_s, start_s, last = 0.0, self.start_s, len(self.ops) - 1
        steps = iter(zip(self.progress, self.progress[1:], strict=False))
        (t0, w0), (t1, w1) = next(steps, ((start_s, 0.0), (self.end_s, 0.0)))
        for i, priced in enumerate(self.ops):
            done_s += priced.price.seconds
            while done_s > w1 and (step := next(steps, None)) is not None:
                (t0, w0), (t1, w1) = step
            share = (done_s - w0) / (w1 - w0) if w1 > w0 else 1.0
            end_s = self.end_s if i == last else min(t0 + share * (t1 - t0), self.end_s)
            yield priced, start_s, end_s
            start_s = end_s

    def _at_one_rate(self) -> Iterator[tuple[PricedOp, float, float]]:
        """The same if the rate never changed, which is nearly always so."""
        (t0, w0), (t1, w1) = self.progress
        work_s, took_s, whole_s = w1 - w0, t1 - t0, self.end_s
        done_s, start_s, last = 0.0, self.start_s, self.ops[-1:]
        for priced in self.ops[:-1]:
            done_s += priced.price.seconds
            end_s = t0 + ((done_s - w0) / work_s if work_s > 0.0 else 1.0) * took_s
            end_s = min(end_s, whole_s)
            yield priced, start_s, end_s
            start_s = end_s
        for priced in last:
            yield priced, start_s, whole_s


@dataclass(slots=True, init=False)
class Message:
    """An item that arrived in an inbox; `received_s` is None while it queues."""

    id: int
    rank: int
    inbox: str
    arrived_s: float
    received_s: float | None

    def __init__(
        self, id: int, rank: int, inbox: str, arrived_s: float, received_s: float | None = None
    ) -> None:
        self.id = id
        self.rank = rank
        self.inbox = inbox
        self.arrived_s = arrived_s
        self.received_s = received_s


@dataclass(frozen=True, slots=True)
class Gauge:
    """A level that must not exceed its limit (KV slots in use)."""

    rank: int
    name: str
    at_s: float
    value: float
    limit: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment that a program marked: when its host was there and the tickets in `after` were done."""

    rank: int
    name: str
    at_s: float
    cause: Cause


# Columns of a trace's rows, in order.
ROW = (
    "launch",
    "rank",
    "stream",
    "graph",
    "issued_s",
    "ready_s",
    "start_s",
    "end_s",
    "work_s",
    "floor_s",
    "replays",
)


@dataclass(slots=True)
class Rows:
    """Launches of long runs, each a row of numbers instead of a span: `ready_s` is when its stream was free
    and its tickets done, `work_s` what its replays take alone on the device, `floor_s` the least that they
    can take. Rows give streams and graphs by number: `streams` and `graphs` map names to numbers. `sources`:
    seconds of work by source of the price."""

    numbers: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    streams: dict[str, int] = field(default_factory=dict)
    graphs: dict[str, int] = field(default_factory=dict)
    sources: dict[SourceKind, float] = field(default_factory=dict)

    def table(self) -> dict[str, NDArray[np.float64]]:
        """The columns of `ROW`, each [launches]."""
        rows = np.frombuffer(self.numbers, dtype=np.float64).reshape(-1, len(ROW))
        return {name: rows[:, i] for i, name in enumerate(ROW)}


@dataclass(slots=True)
class Trace:
    """The whole record of one run of one program. `verbs`: seconds that the verbs took on the host of a real
    machine, by the names of `machine.Overheads`; `warmup_launches`: how many launches come before the ones
    that count as measurements of verbs and ops."""

    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    gauges: list[Gauge] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    rows: Rows = field(default_factory=Rows)
    verbs: dict[str, float] = field(default_factory=dict)
    warmup_launches: int = 0

    def by_id(self) -> dict[int, Span]:
        """The spans by id."""
        return {span.id: span for span in self.spans}

    @property
    def end_s(self) -> float:
        """The time at which the last span ended, in seconds; 0 without spans."""
        return max((span.end_s for span in self.spans), default=0.0)


def op_events(span: Span) -> Iterator[tuple[str, str, float, float]]:
    """(name, kind, start_s, end_s) of each op of a span, or of the span itself if it was skipped or writes
    flags."""
    if span.state in ("skipped", "flags"):
        yield span.graph, "gate", span.start_s, span.end_s
        return
    for priced, start, end in span.op_times():
        op = priced.op
        yield op.name, op.kind, start, end


COMPRESSION = 4


def write_chrome_trace(trace: Trace, path: Path, limit: int = 200_000, title: str = "") -> int:
    """Writes a gzipped Chrome trace (opens in Perfetto), a process per rank and a thread per stream.

    Writes at most `limit` events; the name of the last event says how many were left out. `title`: the title
    in the file. Returns the number of events left out.
    """
    streams = sorted({(span.rank, span.stream) for span in trace.spans})
    threads = {key: i for i, key in enumerate(streams)}
    events: list[dict[str, object]] = []
    for (rank, stream), thread in threads.items():
        events.append(_metadata("process_name", rank, thread, f"rank {rank}"))
        events.append(_metadata("thread_name", rank, thread, stream))
    left_out = 0
    for span in trace.spans:
        for name, kind, start_s, end_s in op_events(span):
            if len(events) >= limit:
                left_out += 1
                continue
            args: dict[str, object] = {"graph": span.graph, "state": span.state, "launch": span.launch}
            events.append(
                _event(span.rank, threads[span.rank, span.stream], name, kind, start_s, end_s, args)
            )
    rows = list(_row_events(trace.rows, limit - len(events)))
    events += _row_names(trace.rows, len(rows))
    left_out += len(trace.rows.numbers) // len(ROW) - len(rows)
    texts = [*map(json.dumps, events), *rows]
    if left_out:
        note = f"{left_out} events left out"
        texts.append(json.dumps({"ph": "i", "pid": 0, "tid": 0, "ts": 0, "s": "g", "name": note}))
    # mtime 0, so that the same run writes the same bytes. The best compression takes three times as long.
    with (
        path.open("wb") as raw,
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="", compresslevel=COMPRESSION) as file,
    ):
        about = {"displayTimeUnit": "ns", **({"otherData": {"title": title}} if title else {})}
        file.write(f'{{"traceEvents": [{", ".join(texts)}], {json.dumps(about)[1:]}'.encode())
    return left_out


def _row_names(rows: Rows, most: int) -> list[dict[str, object]]:
    """The names of the streams of the first `most` rows."""
    streams = list(rows.streams)
    numbers = np.frombuffer(rows.numbers, dtype=np.float64).reshape(-1, len(ROW))[:most]
    ranks = [(int(rank), int(stream)) for rank, stream in np.unique(numbers[:, 1:3], axis=0)]
    events = [_metadata("process_name", rank, stream, f"rank {rank}") for rank, stream in ranks]
    return events + [_metadata("thread_name", rank, stream, streams[stream]) for rank, stream in ranks]


def _row_events(rows: Rows, most: int) -> Iterator[str]:
    """The events of the first `most` rows, as JSON, written by hand because there may be many."""
    names = [json.dumps(name) for name in rows.graphs]
    numbers = np.frombuffer(rows.numbers, dtype=np.float64).reshape(-1, len(ROW))[: max(0, most)]
    for launch, rank, stream, graph, _, _, start_s, end_s, _, _, replays in numbers.tolist():
        name = names[int(graph)]
        yield (
            f'{{"ph": "X", "pid": {int(rank)}, "tid": {int(stream)}, "name": {name}, "cat": {name}, '
            f'"ts": {start_s * 1e6!r}, "dur": {(end_s - start_s) * 1e6!r}, '
            f'"args": {{"launch": {int(launch)}, "replays": {int(replays)}}}}}'
        )


def _event(
    rank: int, thread: int, name: str, kind: str, start_s: float, end_s: float, args: dict[str, object]
) -> dict[str, object]:
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "pid": rank, "tid": thread, "name": name, "cat": kind, **times, "args": args}


def _metadata(name: str, rank: int, thread: int, value: str) -> dict[str, object]:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": {"name": value}}
