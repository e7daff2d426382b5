"""What real runs took: the times of their ops, whatever called them."""

from collections.abc import Iterable
from dataclasses import replace

from simcore.machine.trace import Trace
from simcore.ops.op import Op


def plain(op: Op) -> Op:
    """An op wherever it works and whatever it is called in its model: what its time depends on."""
    return replace(op.bare, name="")


def op_times(traces: Iterable[Trace]) -> dict[Op, list[float]]:
    """Seconds of each op in real runs, by the op without place and name; none of what was skipped, or of
    launches that do not count."""
    found: dict[Op, list[float]] = {}
    for trace in traces:
        for span in trace.spans:
            for priced in span.ops if span.launch >= trace.warmup_launches else ():
                found.setdefault(plain(priced.op), []).append(priced.price.seconds)
    return found
