"""How many times as long products take by an engine's own kernels as by the profile's.

    factor = that of the op's rows, on a line between two numbers of rows that were measured

The tables, with their sources and what is assumed, are in `products.yaml`.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic.dataclasses import dataclass

from simcore.input.files import STRICT, InputError, read_yaml, validated
from simcore.ops.op import Op, Price

TABLES = Path(__file__).resolve().parent / "products.yaml"
# Engines and versions whose op times are public, or whose kernels are those of one.
Measured = Literal["vllm-0.19", "sglang-0.5"]


@dataclass(frozen=True, config=STRICT)
class Products:
    """One table; `rows` ascend. `low`, `high`: the middle 80 % of matrices, in shares of a factor."""

    rows: tuple[int, ...]
    factors: tuple[float, ...]
    low: float
    high: float
    source: str

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.factors) or [*self.rows] != sorted({*self.rows}) or not self.rows:
            raise InputError("rows: have to ascend, with a factor each")
        if not 0.0 < self.low <= 1.0 <= self.high:
            raise InputError(f"low, high: are {self.low:g}, {self.high:g}; 0 < low <= 1 <= high is needed")

    def at(self, rows: int) -> float:
        """Returns the factor of a product of so many rows."""
        return float(np.interp(rows, self.rows, self.factors))


@cache
def products() -> Mapping[str, Mapping[str, Products]]:
    """Returns the tables by engine and number format."""
    return validated(_Document, {"engines": read_yaml(TABLES)}, str(TABLES)).engines


@dataclass(frozen=True, config=STRICT)
class _Document:
    engines: dict[str, dict[str, Products]]


def formats_measured(engine: str | None) -> Set[str]:
    """Returns the number formats of an engine's table; none for None."""
    return {*products()[engine]} if engine is not None else set()


def by_engine(engine: str, op: Op, price: Price) -> Price:
    """Returns the price of an op by an engine's kernels, from that by the profile's; the same if it is no
    product, or none in a format that its table has."""
    table = products()[engine].get(op.dtype) if op.kind == "matmul" else None
    if table is None:
        return price
    found = price.times(table.at(op["m"]))
    return replace(
        found,
        low_s=table.low * found.low_s,
        high_s=table.high * found.high_s,
        source="published" if price.source in ("measured", "interpolated") else price.source,
        detail=f"times as long as {engine}'s; {price.detail}",
    )
