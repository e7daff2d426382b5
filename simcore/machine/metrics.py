"""Metrics of traces, as pure functions.

latency of token i    = last mark "token i" of any rank - last mark of token i-1 (or 0)
critical path         = walked back from that mark: each span began because its cause had ended;
                        the pieces add up to the latency
time per op kind      = pieces of the critical path, by kind ("host": the host was busy,
                        "gate": skipped launches and flags, "idle": none of these)
attention share       = critical path in attention kernels / latency
exposed communication = critical path in collectives, exchanges and puts
tokens/s/user         = 1 / latency of a token
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from simcore.machine.trace import Cause, Mark, Span, Trace, distinct, op_events
from simcore.ops.op import SourceKind

K = TypeVar("K")

# Ops before the first layer and after the last.
OUTSIDE_NAMES = frozenset(
    {"embedding", "head_gather", "head_norm", "lm_head", "logits_gather", "sample", "outside_layers"}
)
ATTENTION_KINDS = frozenset({"decode_attention", "speculative_attention", "linear_attention_decode"})
COMMUNICATION_KINDS = frozenset(
    {
        "all_gather",
        "all_reduce",
        "all_reduce_normed",
        "reduce_scatter",
        "exchange_priority",
        "put",
        "all_gather_matmul",
    }
)


@dataclass(frozen=True, slots=True)
class PathPiece:
    """A stretch of a critical path, spent in one op kind of one rank (-1: no device)."""

    kind: str
    name: str
    rank: int
    start_s: float
    end_s: float


# A piece of a path as a plain tuple: kind, name, rank, start_s, end_s.
Stretch = tuple[str, str, int, float, float]


def critical_path(trace: Trace, mark: Mark) -> list[PathPiece]:
    """The critical path from the start of the run to a mark: pieces in order, without gap or overlap."""
    return [PathPiece(*stretch) for stretch in _stretches(trace.by_id(), mark, 0.0)]


def _stretches(spans: Mapping[int, Span], mark: Mark, from_s: float) -> list[Stretch]:
    """The pieces of a critical path that end after `from_s`; the first may begin before it."""
    found: list[Stretch] = []
    cause, now_s = mark.cause, mark.at_s
    while now_s > from_s:
        if cause.at_s < now_s:
            found.append(("idle", "idle", -1, cause.at_s, now_s))
            now_s = cause.at_s
        if cause.host:
            since_s = 0.0 if cause.span is None else spans[cause.span].end_s
            found.append(("host", "host", -1, since_s, now_s))
            cause, now_s = Cause(cause.span, since_s), since_s
        if cause.span is None:
            if now_s > 0.0:
                found.append(("idle", "idle", -1, 0.0, now_s))
            break
        span = spans[cause.span]
        found += reversed(_clipped(span, now_s))
        cause, now_s = span.cause, min(now_s, span.start_s)
    return [stretch for stretch in reversed(found) if stretch[4] > from_s and stretch[4] > stretch[3]]


def _clipped(span: Span, until_s: float) -> list[Stretch]:
    rank = span.rank
    if span.end_s <= until_s:
        return [(kind, name, rank, start, end) for name, kind, start, end in op_events(span) if end > start]
    events = ((name, kind, start, min(end, until_s)) for name, kind, start, end in op_events(span))
    return [(kind, name, rank, start, end) for name, kind, start, end in events if end > start]


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a run: its start and end, and the `stretches` of its critical path, each as kind, name and
    rank of a `PathPiece`, and seconds."""

    index: int
    start_s: float
    end_s: float
    stretches: tuple[tuple[str, str, int, float], ...]

    @property
    def latency_s(self) -> float:
        """Seconds from the token before to this one."""
        return self.end_s - self.start_s

    def by_kind(self) -> dict[str, float]:
        """Seconds of the critical path by op kind."""
        return _sum((kind, seconds) for kind, _, _, seconds in self.stretches)


class Moments(NamedTuple):
    """When a token starts and ends, in seconds of the run."""

    number: int
    start_s: float
    end_s: float


def moments(trace: Trace) -> list[Moments]:
    """The tokens that a run marked, in order."""
    last = _last_marks(trace)
    begun_s = [0.0, *(last[index].at_s for index in sorted(last))]
    starts = zip(sorted(last), begun_s, strict=False)
    return [Moments(index, start_s, last[index].at_s) for index, start_s in starts]


def _last_marks(trace: Trace) -> dict[int, Mark]:
    last: dict[int, Mark] = {}
    for mark in trace.marks:
        word, _, number = mark.name.partition(" ")
        if word == "token" and (int(number) not in last or mark.at_s > last[int(number)].at_s):
            last[int(number)] = mark
    return last


def tokens(trace: Trace) -> list[Token]:
    """The tokens that a run marked, in order."""
    last = _last_marks(trace)
    found: list[Token] = []
    start_s = 0.0
    spans = trace.by_id() if last else {}
    for index in sorted(last):
        mark = last[index]
        path = [
            (kind, name, rank, end_s - (begin_s if begin_s > start_s else start_s))
            for kind, name, rank, begin_s, end_s in _stretches(spans, mark, start_s)
        ]
        found.append(Token(index, start_s, mark.at_s, tuple(path)))
        start_s = mark.at_s
    return found


# A token, or its moments.
Timed = TypeVar("Timed", Token, Moments)


def after_first(found: Sequence[Timed]) -> Sequence[Timed]:
    """The tokens whose mean is the time of a token: all that end after the first, if there are any. The first
    one of a run waits for its hosts, which are ahead of their devices later."""
    return [token for token in found if token.end_s > found[0].end_s] or found


def attention_s(token: Token) -> float:
    """Seconds of a token's critical path in attention kernels."""
    return sum([seconds for kind, _, _, seconds in token.stretches if kind in ATTENTION_KINDS])


def outside_layers_s(token: Token) -> float:
    """Seconds of a token's critical path before the first and after the last layer."""
    return sum([seconds for _, name, _, seconds in token.stretches if name in OUTSIDE_NAMES])


def read_once_s(read_bytes: float, hbm_bytes_per_s: float) -> float:
    """The least seconds of a token: its reads (weights and KV cache, once) at the memory's datasheet rate.
    The inverse is the upper bound in Flash-Decoding's figure (Dao et al. 2023)."""
    return read_bytes / hbm_bytes_per_s


# Kinds that are priced as a whole and may contain collectives.
WHOLE_KINDS = frozenset({"non_attention", "outside_layers"})


def exposed_communication_s(by_kind: Mapping[str, float]) -> float:
    """Seconds of the critical path in collectives, exchanges and puts; a projection fused with its all-gather
    counts in full."""
    return sum(seconds for kind, seconds in by_kind.items() if kind in COMMUNICATION_KINDS)


def assumed_free(trace: Trace) -> frozenset[str]:
    """Names of the ops of a run that are assumed to take no time, and "early part" if a speculative attention
    is priced to deliver its early part at once."""
    found: set[str] = set()
    for span in trace.spans:
        for priced in distinct(span.ops):
            if priced.price.source == "assumed" and priced.price.seconds == 0.0:
                found.add(priced.op.name)
            if priced.price.early_s == 0.0:
                found.add("early part")
    return frozenset(found)


def price_shares(trace: Trace) -> dict[SourceKind, float]:
    """Shares of the predicted device time by source of the price."""
    seconds = _sum((p.price.source, p.price.seconds) for span in trace.spans for p in span.ops)
    total = sum(seconds.values())
    return {source: part / total for source, part in sorted(seconds.items())} if total else {}


def interval(trace: Trace, token: Token) -> tuple[float, float]:
    """The low and high end of a token's latency: every op of its critical path at the low or high end of its
    price's interval (as if all errors had one sign, so the interval is wide)."""
    return intervals(trace, [token])[0]


def intervals(trace: Trace, tokens: Sequence[Token]) -> list[tuple[float, float]]:
    """The intervals of several tokens of a run. An op with several prices in the run counts with the last."""
    ends = _relative_intervals(trace)
    found: list[tuple[float, float]] = []
    for token in tokens:
        low = high = 0.0
        for kind, name, rank, seconds in token.stretches:
            below, above = ends.get((rank, kind, name), (1.0, 1.0))
            low += below * seconds
            high += above * seconds
        found.append((low, high))
    return found


def _relative_intervals(trace: Trace) -> dict[tuple[int, str, str], tuple[float, float]]:
    """By rank, kind and name of an op: the low and high end of its last price, divided by the price."""
    ends: dict[tuple[int, str, str], tuple[float, float]] = {}
    for span in reversed(trace.spans):
        for priced in distinct(span.ops[::-1]):
            key = (span.rank, priced.op.kind, priced.op.name)
            if key not in ends and (seconds := priced.price.seconds) > 0.0:
                ends[key] = (priced.price.low_s / seconds, priced.price.high_s / seconds)
    return ends


def _sum(pairs: Iterable[tuple[K, float]]) -> dict[K, float]:
    total: dict[K, float] = defaultdict(float)
    for key, value in pairs:
        total[key] += value
    return dict(total)
