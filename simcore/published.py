"""Published figures to compare predictions with: a CSV, one figure a row.

    device,model,strategy,ranks,groups,context_tokens,batch,hit_rate,metric,value,unit,role,fitted_by,source

`role` is measured, projected or derived; `fitted_by` names the profile that was made from the figure.
"""

import csv
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from simcore.files import InputError, read_text, worst

Empty = BeforeValidator(lambda value: None if value == "" else value)
Rate = Annotated[float, Field(ge=0.0, le=1.0)]
Whole = Annotated[int, Field(ge=1)]
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
    value: Annotated[float, Field(gt=0.0)]
    role: Literal["measured", "projected", "derived"]
    source: str
    unit: str = ""
    hit_rate: Annotated[Rate | None, Empty] = None
    fitted_by: str = ""


def read_published(where: str, path: Path) -> list[Published]:
    """All figures of a file. Raises InputError, naming line, column and what is allowed."""
    try:
        text = read_text(path)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    reader = csv.DictReader(text.splitlines())
    figures = []
    try:
        for row in reader:
            figures.append(_figure(row, f"{where}: {path.name}, line {reader.line_num}"))
    except csv.Error as error:
        raise InputError(f"{where}: {path.name}, line {reader.line_num}: {error}") from None
    if not figures:
        raise InputError(f"{where}: {path.name}: holds no figures")
    return figures


def _figure(row: dict[str, str], where: str) -> Published:
    if None in row or None in row.values():
        raise InputError(f"{where}: has not as many cells as the head of the file")
    try:
        return TypeAdapter(Published).validate_python(row)
    except ValidationError as error:
        fault = worst(error)
        column = str(fault["loc"][0]) if fault["loc"] else "row"
        if fault["type"] == "missing":
            raise InputError(f"{where}: column {column} is missing") from None
        if fault["type"] == "unexpected_keyword_argument":
            raise InputError(f"{where}: {column} is no column of such a file") from None
        message = fault["msg"][0].lower() + fault["msg"][1:]
        raise InputError(f"{where}: {column}: is {fault['input']!r}; {message}") from None
