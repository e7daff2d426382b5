"""Times of products by an engine's own kernels, in those of the profile's prices.

    times = that of the op's rows, on a line between two numbers of rows that were measured

The tables, with their sources, are in `products.yaml`.
"""

from bisect import bisect_left
from collections.abc import Mapping, Set
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from simcore.input.files import STRICT, InputError, read_yaml, validated
from simcore.ops.op import Op

TABLES = Path(__file__).resolve().parent / "products.yaml"
# An engine and version whose op times are public.
Engine = Literal["vllm-0.19"]


@dataclass(frozen=True, config=STRICT)
class Products:
    """One table; `rows` ascend."""

    rows: tuple[int, ...]
    times: tuple[float, ...]
    source: str

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.times) or [*self.rows] != sorted({*self.rows}) or not self.rows:
            raise InputError("rows: have to ascend, with a time each")

    def at(self, rows: int) -> float:
        """Returns the times of a product of so many rows."""
        place = bisect_left(self.rows, rows)
        if place == len(self.rows) or place == 0:
            return self.times[min(place, len(self.rows) - 1)]
        low, high = self.rows[place - 1], self.rows[place]
        share = (rows - low) / (high - low)
        return (1.0 - share) * self.times[place - 1] + share * self.times[place]


@cache
def products() -> Mapping[str, Mapping[str, Products]]:
    """Returns the tables by engine and number format."""
    return validated(_Document, {"engines": read_yaml(TABLES)}, str(TABLES)).engines


@dataclass(frozen=True, config=STRICT)
class _Document:
    engines: dict[str, dict[str, Products]]


def formats_of(engine: str | None) -> Set[str]:
    """Returns the number formats of an engine's table; none for None."""
    return {*products()[engine]} if engine is not None else set()


def product_times(engine: str, op: Op) -> float:
    """Returns by how much an op takes longer by an engine's kernels than by the profile's; 1 if it is no
    product, or none in a format that its table has."""
    table = products()[engine].get(op.dtype) if op.kind == "matmul" else None
    return 1.0 if table is None else table.at(op["m"])
