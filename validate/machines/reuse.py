"""Which ops of real runs have their operands in a card's L2 cache, because they used them not long ago.

    reuse distance   bytes that all ops on the card move from the end of one use of the same operands to the
                     end of the next
    stays in cache   median reuse distance <= STAYS * size of the cache

The n-th op of its kind and shape in a graph is taken to use the operands of the n-th one in the graph's
launch before, for example the weights of the same layer. Two limits: layers that are launched one by one
under one graph name count as one layer; an op whose shape grows from launch to launch (a history) is never
found, although it mostly reads what it read before. All ranks share the card; bytes over a link do not count.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from simcore.devices.price import STAYS
from simcore.machine.trace import Span, Trace
from simcore.ops.op import Op
from simcore.validate.timing.op_times import plain


def found_in_cache(trace: Trace, cache_bytes: int) -> frozenset[Op]:
    """Returns the plain ops of a run whose operands stay in a cache of `cache_bytes` bytes."""
    distances = defaultdict[Op, list[float]](list)
    for op, distance in _distances(sorted(trace.spans, key=lambda span: (span.start_s, span.id))):
        distances[op].append(distance)
    return frozenset(op for op, found in distances.items() if median(found) <= STAYS * cache_bytes)


def _distances(spans: Iterable[Span]) -> Iterator[tuple[Op, float]]:
    """Yields the reuse distance of each use except the first."""
    moved, last = 0.0, dict[tuple[int, str, Op, int], float]()
    # Traces share their ops: `plain` is called once for each.
    known = dict[int, tuple[Op, Op, float]]()
    turns = defaultdict[tuple[int, int, int], Counter[Op]](Counter)
    for span in spans:
        turn = turns[span.rank, span.launch, span.replay]
        for priced in span.ops:
            if id(priced.op) not in known:
                known[id(priced.op)] = priced.op, plain(priced.op), priced.op.work.hbm_bytes
            _, op, own = known[id(priced.op)]
            moved += own
            use = span.rank, span.graph, op, turn[op]
            turn[op] += 1
            if use in last:
                yield op, moved - last[use]
            last[use] = moved
