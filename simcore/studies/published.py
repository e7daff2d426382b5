"""Published figures to compare predictions with: a CSV, one figure a row. Of a decode study:

    device,model,strategy,ranks,groups,context_tokens,batch,hit_rate,metric,value,unit,role,fitted_by,source

`role` is measured, projected or derived; `fitted_by` names what was made from the figure: a profile, or a
constant.
"""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from simcore.input.files import InputError, plain, read_cells, shown, worst

# The line of a CSV file that has its first figure.
FIRST_LINE = 2
Empty = BeforeValidator(lambda value: None if value == "" else value)
Rate = Annotated[float, Field(ge=0.0, le=1.0)]
Whole = Annotated[int, Field(ge=1)]
# No published figure is outside of these in SI units; errors relative to the least are finite.
LEAST, MOST = 1e-18, 1e21
# Metrics of a decode study that a figure may be of.
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


Figure = TypeVar("Figure")


def read_published(where: str, path: Path) -> list[Published]:
    """All figures of a file. Raises InputError, naming line, column and what is allowed."""
    return read_figures(Published, where, path)


def read_figures(kind: type[Figure], where: str, path: Path) -> list[Figure]:
    """All figures of a file, of the pydantic dataclass `kind`. Raises InputError, naming line, column and
    what is allowed."""
    try:
        head, rows = read_cells(path)
    except InputError as error:
        told = str(error).replace(f"{path}: line ", f"{path.name}, line ")
        raise InputError(f"{where}: {told}") from None
    adapter = TypeAdapter(kind)
    figures = []
    for number, row in enumerate(rows, FIRST_LINE):
        line = f"{where}: {path.name}, line {number}"
        figures.append(_figure(adapter, dict(zip(head, row, strict=True)), line))
    if not figures:
        raise InputError(f"{where}: {path.name}: holds no figures")
    return figures


def _figure(adapter: TypeAdapter[Figure], row: dict[str, str], where: str) -> Figure:
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
