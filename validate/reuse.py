"""Which ops of real runs find their operands in the L2 cache of a card: those that used them not long ago.

    reuse distance   bytes that all ops of a rank move from the end of one use of the same operands to the end
                     of the next
    stays            median reuse distance <= STAYS * size of the cache

The n-th op of its kind and shape in a replay of a graph uses what the n-th one of the replay before it did:
weights, say, of the same layer. What a rank moves by way of other cards counts as nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from devices.price import STAYS
from simcore.ops import Op
from simcore.trace import Span, Trace
from validate.traces import plain


def found_in_cache(traces: Iterable[Trace], cache_bytes: int) -> frozenset[Op]:
    """Ops, without place and name, whose operands stay in a cache of so many bytes from use to use."""
    distances = defaultdict[Op, list[float]](list)
    for trace in traces:
        ranks = defaultdict[int, list[Span]](list)
        for span in trace.spans:
            ranks[span.rank].append(span)
        for spans in ranks.values():
            for op, distance in _distances(sorted(spans, key=lambda span: (span.start_s, span.id))):
                distances[op].append(distance)
    return frozenset(op for op, found in distances.items() if median(found) <= STAYS * cache_bytes)


def _distances(spans: Iterable[Span]) -> Iterator[tuple[Op, float]]:
    """The reuse distance of each use but the first."""
    moved, last = 0.0, dict[tuple[Op, int], float]()
    # Traces share their ops: each is made plain once.
    known = dict[int, tuple[Op, Op, float]]()
    turns = defaultdict[tuple[int, int], Counter[Op]](Counter)
    for span in spans:
        turn = turns[span.launch, span.replay]
        for priced in span.ops:
            if id(priced.op) not in known:
                known[id(priced.op)] = priced.op, plain(priced.op), priced.op.work.hbm_bytes
            _, op, own = known[id(priced.op)]
            moved += own
            use = op, turn[op]
            turn[op] += 1
            if use in last:
                yield op, moved - last[use]
            last[use] = moved
