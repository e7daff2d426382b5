"""Published figures to compare predictions with: a CSV, one figure a row. Of a decode study:

    device,model,strategy,ranks,groups,context_tokens,batch,hit_rate,metric,value,unit,role,fitted_by,source

`role` is measured, projected or derived; `fitted_by` names the profile or constant that was fitted to the
figure.

    error_pct  =  100 * (predicted - reference) / reference        100 * predicted, of a reference of 0
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from simcore.input.files import InputError, plain, read_cells, shown, worst
from simcore.studies.common import Axes, Row, of_whole_runs

# The line of a CSV file with its first figure.
FIRST_LINE = 2
Empty = BeforeValidator(lambda value: None if value == "" else value)
Rate = Annotated[float, Field(ge=0.0, le=1.0)]
Whole = Annotated[int, Field(ge=1)]
# All published figures are within these in SI units; errors relative to the least are finite.
LEAST, MOST = 1e-18, 1e21
# Metrics of a decode study that a published figure may have.
Metric = Literal[
    "token_latency_s",
    "tokens_per_s_per_user",
    "attention_s_per_layer",
    "non_attention_s_per_layer",
    "exposed_communication_s",
    "speedup_over_baseline",
    "speedup_over_tensor_parallel",
    "attention_share",
]
Role = Literal["measured", "projected", "derived"]


def _in_range(value: float) -> float:
    if not LEAST <= value <= MOST:
        raise ValueError(f"a number from {LEAST:g} to {MOST:g} is needed")
    return value


PublishedValue = Annotated[float, AfterValidator(_in_range)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Published:
    """One figure, in SI units. `hit_rate` is None for strategies that do not speculate."""

    device: str
    model: str
    strategy: Literal["tensor_parallel", "alspec", "alspec_pipelined"]
    ranks: Whole
    groups: Whole
    context_tokens: Whole
    batch: Whole
    metric: Metric
    value: PublishedValue
    role: Role
    source: str
    unit: str = ""
    hit_rate: Annotated[Rate | None, Empty] = None
    fitted_by: str = ""
    columns: ClassVar = ("strategy", "label", "ranks", "groups", "context_tokens", "batch", "hit_rate")

    def __str__(self) -> str:
        return f"{self.strategy}, ranks {self.ranks}, {self.context_tokens:,} tokens, {self.metric}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the rows that the figure is compared with."""
        return (self.metric,)

    def is_of(self, axes: Axes) -> bool:
        """Whether the figure is of this case: of all its variants, since no figure gives chunk or overlap."""
        return self.context_tokens == axes.context_tokens and _place(self) == _place(axes)

    def beside(self, row: Row) -> dict[str, float | None]:
        """Returns the reference and the prediction for a line of comparison.csv."""
        return {"reference": self.value, "predicted": row.value}


def _place(of: Axes | Published) -> tuple[Any, ...]:
    rate = None if of.hit_rate is None else round(of.hit_rate, 9)
    return (of.strategy, of.ranks, of.groups, of.context_tokens, of.batch, rate)


F = TypeVar("F")


def compare(
    rows: Iterable[Row], figures: Sequence[F], fitted: AbstractSet[str] = frozenset()
) -> tuple[list[dict[str, Any]], list[F]]:
    """Returns a line of comparison.csv for each row that a figure matches, and the figures without a row.

    A study's class of figures gives a figure's metrics and cases (`metrics`, `is_of(axes)`), the columns of
    the axes in a line (`columns`) and its values for a row (`beside(row)`), as `Published` does. Figures are
    of whole runs, as benchmark clients measure them, even if a scenario measures a window. A figure to which
    a profile or constant in `fitted` was fitted has the role "fitted": agreement with it is no evidence.
    """
    named: dict[str, list[Row]] = {}
    for row in of_whole_runs(rows) if figures else ():
        if row.value is not None and not row.op_kind:
            named.setdefault(row.metric, []).append(row)
    lines, alone = [], list[F]()
    for figure in figures:
        own: Any = figure
        here = [row for metric in own.metrics for row in named.get(metric, ()) if own.is_of(row.axes)]
        lines += [_line(own, row, fitted) for row in here]
        alone += [] if here else [figure]
    return lines, alone


def _line(figure: Any, row: Row, fitted: AbstractSet[str]) -> dict[str, Any]:
    said = figure.beside(row)
    is_fitted = figure.fitted_by in fitted and row.metric == figure.metric
    return {
        **{name: getattr(row.axes, name) for name in figure.columns},
        "metric": row.metric,
        **said,
        # A flag, such as out_of_memory, may be 0; other figures are never.
        "error_pct": 100.0 * (said["predicted"] - said["reference"]) / (said["reference"] or 1.0),
        "role": "fitted" if is_fitted and figure.fitted_by else figure.role,
        "source": figure.source,
    }


def read_figures(kind: type[F], where: str, path: Path) -> list[F]:
    """Reads all figures of a file, as the pydantic dataclass `kind`. Raises InputError with line, column and
    the allowed values."""
    try:
        head, rows = read_cells(path)
    except InputError as error:
        reason = str(error).replace(f"{path}: line ", f"{path.name}, line ")
        raise InputError(f"{where}: {reason}") from None
    adapter = TypeAdapter(kind)
    figures = []
    for number, row in enumerate(rows, FIRST_LINE):
        line = f"{where}: {path.name}, line {number}"
        figures.append(_figure(adapter, dict(zip(head, row, strict=True)), line))
    if not figures:
        raise InputError(f"{where}: {path.name}: holds no figures")
    return figures


def _figure(adapter: TypeAdapter[F], row: dict[str, str], where: str) -> F:
    try:
        return adapter.validate_python(row)
    except ValidationError as error:
        fault = worst(error)
        column = str(fault["loc"][0]) if fault["loc"] else "row"
        if fault["type"] == "missing":
            raise InputError(f"{where}: column {column} is missing") from None
        if fault["type"] == "unexpected_keyword_argument":
            raise InputError(f"{where}: {plain(column)} is no column of such a file") from None
        message = fault["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        raise InputError(f"{where}: {column}: is {shown(fault['input'])}; {message}") from None
