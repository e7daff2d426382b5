"""Files of measured rows and summaries of errors, shared by the programs of this folder."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from simcore.input.files import InputError, read_cells, validated
from simcore.validate.benchmarks.cases import BORN
from simcore.validate.program import aligned

T = TypeVar("T")

Birth = Mapping[str, str]
# Bars of prices by kind of op: the median and the 95th percentile of their errors, in percent.
MEDIAN_PCT, P95_PCT = 3.0, 10.0
MOST_DECODED = 512


def read_rows(path: Path, kind: type[T]) -> tuple[list[T], list[Birth]]:
    """Returns the lines of a CSV file as a `kind`, and the birth record of each.

    `kind` is a pydantic dataclass that converts strings to numbers; columns for fields with defaults are not
    read. Raises InputError if a line or column is missing, or a value is wrong.
    """
    head, lines = read_cells(path)
    names = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
    for name in (*names, *BORN):
        if name not in head:
            raise InputError(f"{path}: has no column {name}")
    if not lines:
        raise InputError(f"{path}: has no line")
    rows, births = list[T](), list[Birth]()
    for number, cells in enumerate(lines, 2):
        line = dict(zip(head, cells, strict=True))
        rows.append(validated(kind, {name: line[name] for name in names}, f"{path}: line {number}"))
        births.append({name: line[name] for name in BORN})
    return rows, births


def label(kind: str, dtype: str, shape: Mapping[str, int]) -> str:
    """Returns the group in which an op is judged; products of prompts and of decode steps are separate."""
    prompts = " of prompts" if kind == "matmul" and shape["m"] > MOST_DECODED else ""
    return f"{kind} {dtype}{prompts}"


def errors_row(kind: str, errors_pct: Sequence[float], shapes: Sequence[str]) -> dict[str, Any]:
    """Summarizes the errors of a kind, with the shape of the worst."""
    worst_pct = max(errors_pct)
    return {
        "kind": kind,
        "n": len(errors_pct),
        "median_pct": median(errors_pct),
        "p95_pct": float(np.percentile(errors_pct, 95)),
        "worst_pct": worst_pct,
        "worst_shape": shapes[errors_pct.index(worst_pct)],
    }


def is_close(row: Mapping[str, Any]) -> bool:
    """Whether the prices of a kind meet the bars."""
    return bool(row["median_pct"] < MEDIAN_PCT and row["p95_pct"] < P95_PCT)


def error_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the printed table; rows may have `covered`, the share inside intervals."""
    table = [["kind", "n", "median", "p95", "worst", "inside", "worst shape"]]
    for row in rows:
        pcts = (f"{row[f'{name}_pct']:.2f} %" for name in ("median", "p95", "worst"))
        inside = f"{row['covered']:.0%}" if "covered" in row else "-"
        table.append([row["kind"], str(row["n"]), *pcts, inside, row["worst_shape"]])
    yield from aligned(table)
