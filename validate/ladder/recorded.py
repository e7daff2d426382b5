"""The other results of a validation: price and time of each op, and one case measured and simulated.

The case is the longest measured one, because its timeline shows most. It is simulated again span by span,
even if its study otherwise keeps only rows of numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.machine.trace import Trace
from simcore.ops.op import Op, Size
from simcore.sim.runs import Run, Setup, span_by_span
from simcore.studies.common import middle_first
from simcore.validate.ladder.rungs import OpPoint


@dataclass
class Keeping:
    """Starts simulated runs whose traces have spans, and keeps the trace of one case."""

    case: str
    title: str = ""
    kept: Trace = field(default_factory=Trace)

    def start(self, setup: Setup) -> Run:
        """See `simcore.sim.runs.Start`."""
        run = span_by_span(setup)
        if setup.case == self.case:
            self.kept, self.title = run.trace, setup.title
        return run


def longest(started: Mapping[str, Sequence[Trace]]) -> tuple[str, Trace]:
    """Returns the longest case and its run of median length. Raises ValueError if there is none."""
    shown = {
        case: middle_first(traces, lambda trace: trace.end_s)[0] for case, traces in started.items() if case
    }
    case = max(shown, key=lambda case: shown[case].end_s)
    return case, shown[case]


def simulated_too(case: str, simulate: Callable[[Callable[[Setup], Run]], object]) -> tuple[str, Trace]:
    """Returns the title of a case and its trace on the simulated machine; `simulate` runs the study on
    machines that the given function starts."""
    keeping = Keeping(case)
    simulate(keeping.start)
    return keeping.title, keeping.kept


def price_rows(points: Iterable[OpPoint]) -> Iterator[dict[str, Any]]:
    """Yields rows of prices.csv, times in seconds. Low and high bound the price's 90 % interval, p10 and p90
    the spread of `n` measurements."""
    for point in points:
        op, price = point.op, point.price
        yield {
            "kind": op.kind,
            "shape": shape_words(op),
            "dtype": op.dtype,
            "predicted_s": point.predicted_s,
            "low_s": price and price.low_s,
            "high_s": price and price.high_s,
            "source": price.source if price else "",
            "measured_s": point.measured_s,
            "p10_s": point.p10_s,
            "p90_s": point.p90_s,
            "n": point.n,
            "held_out": point.held_out,
            "cache": point.cache,
        }


def shape_words(op: Op) -> str:
    """ "m 8, n 4096, k 4096"."""
    return ", ".join(f"{name} {value.name if isinstance(value, Size) else value}" for name, value in op.shape)
