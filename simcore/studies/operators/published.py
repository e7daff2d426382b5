"""Published figures of single operators: a CSV, one figure a row.

    device,model,method,batch,heads,kv_heads,length,rank,dim,decay,metric,value,unit,role,fitted_by,source

`length` is the number of tokens, for decode attention of cached tokens; empty for a whole data set. Linear
attention has rank and decay (0 or 1), decode attention kv_heads; the others are empty or left out, and so is
`model`, but of prompts. `metric` is latency_s, dataset_s, or out_of_memory (1: the method ran out of it). A
figure with a time means that the method fits.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from simcore.studies.common import OperatorAxes, Row
from simcore.studies.published import Empty, PublishedValue, Role, Whole

OUT_OF_MEMORY = "out_of_memory"
LATENCY = "latency_s"
DATA_SET = "dataset_s"
Metric = Literal["latency_s", "dataset_s", "out_of_memory"]
# Fields that tell cases apart, in figures and in axes.
PLACE = ("batch", "heads", "kv_heads", "length", "rank", "dim", "decay")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class OperatorPublished:
    """One cell of a table, in seconds."""

    device: str
    method: str
    batch: Whole
    heads: Whole
    length: Annotated[Whole | None, Empty]
    dim: Whole
    metric: Metric
    value: PublishedValue
    role: Role
    source: str
    kv_heads: Annotated[Whole | None, Empty] = None
    rank: Annotated[Whole | None, Empty] = None
    decay: Annotated[Annotated[int, Field(ge=0, le=1)] | None, Empty] = None
    unit: str = ""
    model: str = ""
    fitted_by: str = ""

    def __str__(self) -> str:
        return f"{self.method}, batch {self.batch}, {self.source}"

    @property
    def columns(self) -> tuple[str, ...]:
        """See Published; with the names of the operator's study."""
        linear = ("batch", "heads", "length", "rank", "dim", "decay")
        decode = ("batch", "q_heads", "kv_heads", "head_dim", "context_tokens")
        return ("strategy", "label", *(linear if self.kv_heads is None else decode))

    @property
    def metrics(self) -> tuple[str, ...]:
        """See Published. A method with a time did not run out of memory."""
        return tuple(dict.fromkeys((OUT_OF_MEMORY, self.metric)))

    def is_of(self, axes: OperatorAxes) -> bool:
        """See Published."""
        return self.method == axes.strategy and _place(self) == _place(axes)

    def beside(self, row: Row) -> dict[str, float | None]:
        """See Published."""
        ran_out = float(self.metric == OUT_OF_MEMORY)
        return {"reference": ran_out if row.metric == OUT_OF_MEMORY else self.value, "predicted": row.value}


def each_once(published: Iterable[OperatorPublished]) -> list[OperatorPublished]:
    """Returns the figures without repeats: a figure printed again (same method, place, metric and value) is
    joined to the first, whose source names both; it is fitted if either is."""
    once: dict[tuple[Any, ...], OperatorPublished] = {}
    for figure in published:
        key = (figure.device, figure.method, *_place(figure), figure.metric, figure.value)
        first = once.get(key)
        once[key] = (
            figure
            if first is None
            else replace(
                first,
                fitted_by=first.fitted_by or figure.fitted_by,
                source="; ".join(dict.fromkeys((first.source, figure.source))),
            )
        )
    return list(once.values())


def _place(of: OperatorAxes | OperatorPublished) -> tuple[Any, ...]:
    return tuple(getattr(of, name) for name in PLACE)
