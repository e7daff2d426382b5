"""Laws that hold in every run, simulated or real. Each law reads a trace and lists its violations.

1  conservation   an arrived message is received once or still queues; messages of an inbox keep their order
2  causality      nothing starts before it was issued, before its tickets are done, before its cause
3  one at a time  spans of one stream of one rank do not overlap
4  together       the ranks of a collective start and end together, all of them
5  clock          times are finite, not negative, and never run back
6  roofline       no op is faster than the datasheet allows (except ops with an assumed price; ops measured to
                  find their operands in a cache have no memory bound)
7  capacity       no gauge exceeds its limit
8  repeatability  the same run gives the same bytes (`repeatable`, which needs two runs)

Laws 2, 3, 5 and 6 hold for launches recorded as rows (`Trace.rows`) as whole launches.

Times that are equal except for rounding, 1e-9 of the later time, count as equal.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import inf, isfinite
from typing import TypeVar

import numpy as np

from simcore.machine.machine import LawError
from simcore.machine.trace import Message, Span, Trace

ROUNDING = 1e-9
MOST_PER_LAW = 3
T = TypeVar("T")


def _before(earlier_s: float, later_s: float) -> bool:
    """Whether one time is before another by more than rounding."""
    # The first comparison is nearly always false, and cheap.
    return earlier_s < later_s and earlier_s < later_s - ROUNDING * max(1e-3, abs(later_s))


def conservation(trace: Trace) -> Iterator[str]:
    """Law 1."""
    inboxes: dict[tuple[int, str], list[Message]] = defaultdict(list)
    for i, message in enumerate(trace.messages):
        if message.id != i:
            yield f"message {message.id} stands where message {i} should: one was lost or came twice"
        inboxes[message.rank, message.inbox].append(message)
    for (rank, inbox), messages in inboxes.items():
        for earlier, later in pairwise(messages):
            if later.received_s is not None and (
                earlier.received_s is None or _before(later.received_s, earlier.received_s)
            ):
                yield f"rank {rank} inbox {inbox}: message {later.id} overtook {earlier.id}"


def causality(trace: Trace) -> Iterator[str]:
    """Law 2."""
    spans = trace.by_id()
    for span in trace.spans:
        start_s, cause = span.start_s, span.cause
        at_s = cause.at_s
        if _before(start_s, span.issued_s):
            yield f"span {span.id} starts at {start_s}, before it was issued at {span.issued_s}"
        if _before(start_s, at_s):
            yield f"span {span.id} starts at {start_s}, before its cause at {at_s}"
        if cause.span is not None and not cause.host:
            before = spans.get(cause.span)
            if before is None or _before(at_s, before.start_s):
                yield f"span {span.id} has a cause that had not begun"
        for ticket in span.after:
            if ticket not in spans or _before(span.start_s, spans[ticket].end_s):
                yield f"span {span.id} starts before span {ticket}, which it waits for, has ended"
    for message in trace.messages:
        if message.received_s is not None and _before(message.received_s, message.arrived_s):
            yield f"message {message.id} was received before it came"


def one_at_a_time(trace: Trace) -> Iterator[str]:
    """Law 3."""
    streams: dict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in trace.spans:
        streams[span.rank, span.stream].append(span)
    for (rank, stream), spans in streams.items():
        spans.sort(key=lambda span: (span.start_s, span.end_s, span.id))
        for first, second in pairwise(spans):
            if _before(second.start_s, first.end_s):
                yield f"rank {rank} stream {stream}: spans {first.id} and {second.id} overlap"


def together(trace: Trace) -> Iterator[str]:
    """Law 4."""
    collectives: dict[int, list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.collective_id is not None:
            collectives[span.collective_id].append(span)
    for id_, spans in collectives.items():
        if sorted(span.rank for span in spans) != sorted(spans[0].members):
            yield f"collective {id_}: ranks {spans[0].members} should meet"
        for span in spans[1:]:
            for one_s, other_s in ((span.start_s, spans[0].start_s), (span.end_s, spans[0].end_s)):
                if _before(one_s, other_s) or _before(other_s, one_s):
                    yield f"collective {id_}: ranks {span.rank} and {spans[0].rank} are not together"


def clock(trace: Trace) -> Iterator[str]:
    """Law 5."""
    for span in trace.spans:
        progress = span.progress
        # A chain of comparisons is false for NaN, and fast: this law checks every span of every run.
        if not (0.0 <= span.issued_s < inf and 0.0 <= span.start_s < inf and 0.0 <= span.end_s < inf):
            yield f"span {span.id} has a time that is negative or not finite"
        if _before(span.end_s, span.start_s):
            yield f"span {span.id} ends at {span.end_s}, before its start at {span.start_s}"
        if len(progress) == 2:
            (t0, w0), (t1, w1) = progress
            if 0.0 <= t0 <= t1 < inf and w0 <= w1 < inf:
                continue
        for (t0, w0), (t1, w1) in pairwise(progress):
            if not (0.0 <= t0 <= t1 < inf and w0 <= w1 < inf) and not _runs_on((t0, w0), (t1, w1)):
                yield f"span {span.id}: time or work runs back"


def _runs_on(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether time and work do not run back by more than rounding."""
    finite = all(isfinite(x) and x >= 0.0 for x in (*one, *other))
    return finite and not _before(other[0], one[0]) and not _before(other[1], one[1])


class _Fast:
    """Finds the spans that keep law 6 because their ops' prices do and they ran no faster than priced."""

    def __init__(self) -> None:
        # By id of a PricedOp, which the trace keeps: whether the price is assumed or at least the floor.
        self._priced_enough: dict[int, bool] = {}

    def enough(self, span: Span) -> bool:
        """Whether each op of a span takes at least its price, and the price at least its floor; if not, the
        ops must be checked one by one."""
        if len(span.progress) != 2:
            return False
        (t0, w0), (t1, w1) = span.progress
        if not (t0 == span.start_s and t1 == span.end_s and w0 == 0.0):
            return False
        known, work_s = self._priced_enough, 0.0
        for priced in span.ops:
            enough = known.get(id(priced))
            if enough is None:
                price = priced.price
                enough = price.source == "assumed" or price.seconds >= priced.floor_s
                known[id(priced)] = enough
            if not enough:
                return False
            work_s += priced.price.seconds
        # The rounding of whole times is far below the slack of the law.
        slack_s = ROUNDING * 1e-3 / 4.0
        return work_s <= w1 + slack_s and t1 - t0 >= w1 - slack_s


def roofline(trace: Trace) -> Iterator[str]:
    """Law 6."""
    fast = _Fast()
    for span in trace.spans:
        if fast.enough(span):
            continue
        for priced, start_s, end_s in span.op_times():
            if priced.price.source == "assumed":
                continue
            if end_s - start_s < priced.floor_s - ROUNDING * max(1e-3, end_s):
                yield (
                    f"span {span.id}: {priced.op.kind} {priced.op.name} takes {end_s - start_s:.3e} s,"
                    f" the roofline is {priced.floor_s:.3e} s"
                )


def rows(trace: Trace) -> Iterator[str]:
    """Laws 2, 3, 5 and 6 for launches recorded as rows."""
    table = trace.rows.table()
    names = ("issued_s", "ready_s", "start_s", "end_s", "work_s", "floor_s")
    if not all(np.isfinite(table[name]).all() and (table[name] >= 0.0).all() for name in names):
        yield "a launch has a time that is negative or not finite"
        return
    start_s, end_s = table["start_s"], table["end_s"]
    slack_s = ROUNDING * np.maximum(1e-3, end_s)
    took_s = end_s - start_s
    for broken, text in (
        (start_s < table["issued_s"] - slack_s, "starts before it was issued"),
        (start_s < table["ready_s"] - slack_s, "starts before what it waits for has ended"),
        (took_s < table["work_s"] - slack_s, "takes less than its work does alone on the device"),
        (table["work_s"] < table["floor_s"] * (1.0 - ROUNDING), "is faster than its roofline"),
    ):
        yield from (f"launch {table['launch'][i]:.0f} {text}" for i in np.flatnonzero(broken)[:MOST_PER_LAW])
    order = np.lexsort((end_s, start_s, table["stream"], table["rank"]))
    same = np.ones(max(0, len(order) - 1), np.bool_)
    for name in ("stream", "rank"):
        same &= np.diff(table[name][order]) == 0.0
    overlaps = same & (start_s[order][1:] < (end_s - slack_s)[order][:-1])
    for i in np.flatnonzero(overlaps)[:MOST_PER_LAW]:
        one, other = table["launch"][order[i]], table["launch"][order[i + 1]]
        yield f"launches {one:.0f} and {other:.0f} of one stream overlap"


def capacity(trace: Trace) -> Iterator[str]:
    """Law 7."""
    for gauge in trace.gauges:
        if not gauge.value <= gauge.limit:
            yield f"rank {gauge.rank}: {gauge.name} is {gauge.value}, above {gauge.limit}, at {gauge.at_s} s"


LAWS: Mapping[str, Callable[[Trace], Iterator[str]]] = {
    "conservation": conservation,
    "causality": causality,
    "one at a time": one_at_a_time,
    "together": together,
    "clock": clock,
    "roofline": roofline,
    "capacity": capacity,
    "rows": rows,
}


def broken_laws(laws: Mapping[str, Callable[[T], Iterator[str]]], of: T) -> dict[str, list[str]]:
    """The laws that a run breaks, each with its violations (empty: all hold)."""
    found = {name: list(law(of)) for name, law in laws.items()}
    return {name: broken for name, broken in found.items() if broken}


def violations(trace: Trace) -> dict[str, list[str]]:
    """The laws that a trace breaks, each with its violations (empty: all hold)."""
    return broken_laws(LAWS, trace)


def enforce(trace: Trace) -> None:
    """Raises LawError if a trace breaks a law."""
    broken = violations(trace)
    if broken:
        lines = [
            f"{name}: {'; '.join(found[:MOST_PER_LAW])}"
            + (f" and {len(found) - MOST_PER_LAW} more" if len(found) > MOST_PER_LAW else "")
            for name, found in broken.items()
        ]
        raise LawError("; ".join(lines))


def digest(trace: Trace) -> str:
    """A fingerprint of the spans, messages, gauges, marks and rows of a trace, to the last bit."""
    state = hashlib.sha256()
    for record in (*trace.spans, *trace.messages, *trace.gauges, *trace.marks):
        state.update(repr(record).encode())
    state.update(trace.rows.numbers.tobytes())
    return state.hexdigest()


def repeatable(run: Callable[[], Trace], first: Trace | None = None) -> bool:
    """Law 8: whether two runs leave the same bytes. `first`: the trace of the first run, if there is one."""
    return digest(run() if first is None else first) == digest(run())
