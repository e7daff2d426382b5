"""Published ranges of speed-ups to compare predictions with: a CSV, one range a row.

device,label,metric,low,high,unit,role,source

error_pct  =  0 inside the range, else 100 * (predicted - nearest end) / nearest end
"""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from simcore.input.files import InputError
from simcore.studies.common import Row, TilingAxes
from simcore.studies.published import PublishedValue, Role

Metric = Literal["speedup_over_lazy", "mixer_speedup_over_lazy"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class TilingPublished:
    """The published range of `metric` of `label`, at all points. Raises InputError if low is above high."""

    device: str
    label: str
    metric: Metric
    low: PublishedValue
    high: PublishedValue
    role: Role
    source: str
    unit: str = ""
    fitted_by: ClassVar = ""
    columns: ClassVar = ("strategy", "label", "layers", "channels", "tokens", "batch")

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise InputError(f"low <= high does not hold: {self.low}, {self.high}")

    def __str__(self) -> str:
        return f"{self.label}, {self.metric}, {self.source}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """See Published."""
        return (self.metric,)

    def is_of(self, axes: TilingAxes) -> bool:
        """See Published."""
        return axes.label == self.label

    def beside(self, row: Row) -> dict[str, float | None]:
        """See Published. The reference is the value itself inside the range, else its nearest end."""
        assert row.value is not None
        nearest = min(max(row.value, self.low), self.high)
        ends = {"reference_low": self.low, "reference_high": self.high}
        return {"reference": nearest, **ends, "predicted": row.value}


def inside(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the predictions with each published range, in words, and how many are inside it."""
    found = []
    for source in dict.fromkeys((line["metric"], line["source"]) for line in lines):
        own = [line for line in lines if (line["metric"], line["source"]) == source]
        within = sum(line["error_pct"] == 0.0 for line in own)
        values = [line["predicted"] for line in own]
        low, high = own[0]["reference_low"], own[0]["reference_high"]
        text = f"{source[0]}: {min(values):.3g} to {max(values):.3g} predicted, median {median(values):.3g}"
        if low < high:
            text += f"; {within} of {len(own)} are inside the published {low:g} to {high:g}"
        else:
            text += f"; published is {low:g}"
        found.append(f"{text} ({source[1]})")
    return found
