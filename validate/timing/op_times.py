"""The times of ops: in real runs, whatever called them, and one by one."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from simcore.devices.making import Point
from simcore.devices.price import launches_and_floor
from simcore.machine.trace import Trace
from simcore.ops.op import Op, Roofline
from simcore.validate.machines.launches import WAITED


def plain(op: Op) -> Op:
    """Returns an op without its place and its name in the model: all that its time depends on."""
    return replace(op.without_place, name="")


def op_times(traces: Iterable[Trace]) -> dict[Op, list[float]]:
    """Returns the seconds of each op in real runs, by the op without place and name; none of ops of which
    nobody knows how long others were waited for in them. Leaves out warm-up launches; skipped launches have
    no ops."""
    found: dict[Op, list[float]] = {}
    for trace in traces:
        for span in trace.spans:
            for priced in span.ops if span.launch >= trace.warmup_launches else ():
                seconds = found.setdefault(plain(priced.op), [])
                if priced.price.detail != WAITED:
                    seconds.append(priced.price.seconds)
    return found


def point_of(op: Op, floor: Roofline, seconds: Sequence[float], cache: str) -> Point:
    """Returns the point of an op from the seconds of its runs; `cache`: where its operands come from."""
    p10_s, median_s, p90_s = (float(value) for value in np.percentile(seconds, (10, 50, 90)))
    launches, floor_s = launches_and_floor(op, floor)
    return Point(op, launches, floor_s, median_s, p10_s, p90_s, len(seconds), cache)
