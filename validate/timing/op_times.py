"""The times of ops in real runs, whatever called them."""

from collections.abc import Iterable
from dataclasses import replace

from simcore.machine.trace import Trace
from simcore.ops.op import Op


def plain(op: Op) -> Op:
    """Returns an op without its place and its name in the model: all that its time depends on."""
    return replace(op.bare, name="")


def op_times(traces: Iterable[Trace]) -> dict[Op, list[float]]:
    """Returns the seconds of each op in real runs, by the op without place and name. Leaves out warm-up
    launches; skipped launches have no ops."""
    found: dict[Op, list[float]] = {}
    for trace in traces:
        for span in trace.spans:
            for priced in span.ops if span.launch >= trace.warmup_launches else ():
                found.setdefault(plain(priced.op), []).append(priced.price.seconds)
    return found
