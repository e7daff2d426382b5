"""Published figures of single operators: a CSV, one figure a row.

    device,model,method,batch,heads,kv_heads,length,rank,dim,decay,metric,value,unit,role,fitted_by,source

`length` is the tokens, of decode attention the cached ones. Linear attention has rank and decay (0 or 1),
decode attention kv_heads; the others are empty or left out, and so is `model`. `metric` is latency_s, or
out_of_memory (1: the method ran out of it). Every figure says something of memory: one with a latency fits.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from simcore.studies.common import OperatorAxes, Row
from simcore.studies.published import Empty, PublishedValue, Role, Whole, read_figures

OUT_OF_MEMORY = "out_of_memory"
LATENCY = "latency_s"
Metric = Literal["latency_s", "out_of_memory"]
# What tells cases apart, in a figure and in axes alike.
PLACE = ("batch", "heads", "kv_heads", "length", "rank", "dim", "decay")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class OperatorPublished:
    """One cell of a table, in seconds."""

    device: str
    method: str
    batch: Whole
    heads: Whole
    length: Whole
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


def read_operator_published(where: str, path: Path) -> list[OperatorPublished]:
    """All figures of a file. Raises InputError, naming line, column and what is allowed."""
    return read_figures(OperatorPublished, where, path)


def compare(
    rows: Iterable[Row], published: Sequence[OperatorPublished], profile: str | None
) -> tuple[list[dict[str, Any]], list[OperatorPublished]]:
    """Predictions beside published figures, and the figures that no case is of: a line for its memory, and
    one for its latency where there are both. The error of out_of_memory, 0 or 1, is 100 times the difference.
    A figure that several tables print counts once.
    """
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if isinstance(row.axes, OperatorAxes) and row.axes.length is not None:
            found.setdefault((row.axes.strategy, *_place(row.axes)), {})[row.metric] = row
    lines: list[dict[str, Any]] = []
    alone = []
    for figure in _each_once(published):
        here = found.get((figure.method, *_place(figure)))
        if here is None:
            alone.append(figure)
            continue
        ran_out = float(figure.metric == OUT_OF_MEMORY)
        said = here[OUT_OF_MEMORY].value
        assert said is not None
        lines.append(_line(figure, here[OUT_OF_MEMORY], ran_out, 100.0 * (said - ran_out), figure.role))
        latency_s = here[LATENCY].value
        if not ran_out and latency_s is not None:
            error_pct = 100.0 * (latency_s - figure.value) / figure.value
            fitted = profile is not None and figure.fitted_by == profile
            role = "fitted" if fitted else figure.role
            lines.append(_line(figure, here[LATENCY], figure.value, error_pct, role))
    return lines, alone


def _each_once(published: Iterable[OperatorPublished]) -> list[OperatorPublished]:
    """The figures, with one that is printed again (same method, place, metric and value) joined to the first:
    its source names both, and it is fitted where either is."""
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


def _named(axes: OperatorAxes) -> tuple[str, ...]:
    """The columns of the axes, as the study of the operator calls them."""
    linear = ("batch", "heads", "length", "rank", "dim", "decay")
    return linear if axes.kv_heads is None else ("batch", "q_heads", "kv_heads", "head_dim", "context_tokens")


def _line(
    figure: OperatorPublished, row: Row, reference: float, error_pct: float, role: str
) -> dict[str, Any]:
    axes = row.axes
    assert isinstance(axes, OperatorAxes)
    return {
        "strategy": axes.strategy,
        "label": axes.label,
        **{name: getattr(axes, name) for name in _named(axes)},
        "metric": row.metric,
        "reference": reference,
        "predicted": row.value,
        "error_pct": error_pct,
        "role": role,
        "source": figure.source,
    }
