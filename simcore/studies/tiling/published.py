"""Published ranges of speed-ups to compare predictions with: a CSV, one range a row.

device,label,metric,low,high,unit,role,source

error_pct  =  0 inside the range, else 100 * (predicted - nearest end) / nearest end
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from simcore.input.files import InputError
from simcore.studies.common import Row, TilingAxes
from simcore.studies.published import PublishedValue, Role

Metric = Literal["speedup_over_lazy", "mixer_speedup_over_lazy"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class TilingPublished:
    """A range that `metric` of `label` is said to be in at all points. Raises InputError where it is none."""

    device: str
    label: str
    metric: Metric
    low: PublishedValue
    high: PublishedValue
    role: Role
    source: str
    unit: str = ""

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InputError(f"low <= high does not hold: {self.low}, {self.high}")

    def nearest(self, value: float) -> float:
        """The value itself inside the range, else its nearest end."""
        return min(max(value, self.low), self.high)


def compare(
    rows: Iterable[Row], published: Sequence[TilingPublished]
) -> tuple[list[dict[str, Any]], list[TilingPublished]]:
    """A line of comparison.csv for each prediction that a range is said to hold for; and the ranges that no
    prediction is of."""
    mine = [row for row in rows if isinstance(row.axes, TilingAxes) and row.value is not None]
    lines = []
    alone = []
    for figure in published:
        own = [row for row in mine if (row.axes.label, row.metric) == (figure.label, figure.metric)]
        lines += [_line(figure, row) for row in own]
        alone += [] if own else [figure]
    return lines, alone


def _line(figure: TilingPublished, row: Row) -> dict[str, Any]:
    assert isinstance(row.axes, TilingAxes)
    assert row.value is not None
    nearest = figure.nearest(row.value)
    return {
        "strategy": row.axes.strategy,
        "label": row.axes.label,
        "layers": row.axes.layers,
        "channels": row.axes.channels,
        "tokens": row.axes.tokens,
        "batch": row.axes.batch,
        "metric": row.metric,
        "reference": nearest,
        "reference_low": figure.low,
        "reference_high": figure.high,
        "predicted": row.value,
        "error_pct": 100.0 * (row.value - nearest) / nearest,
        "role": figure.role,
        "source": figure.source,
    }


def inside(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Predictions beside each published range, in words: how many are inside it."""
    found = []
    for source in dict.fromkeys((line["metric"], line["source"]) for line in lines):
        own = [line for line in lines if (line["metric"], line["source"]) == source]
        within = sum(line["error_pct"] == 0.0 for line in own)
        values = [line["predicted"] for line in own]
        low, high = own[0]["reference_low"], own[0]["reference_high"]
        told = f"{source[0]}: {min(values):.3g} to {max(values):.3g} predicted, median {median(values):.3g}"
        if low < high:
            told += f"; {within} of {len(own)} are inside the published {low:g} to {high:g}"
        else:
            told += f"; published is {low:g}"
        found.append(f"{told} ({source[1]})")
    return found
