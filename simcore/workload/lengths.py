"""Draws the lengths of prompts, answers and sessions that a workload describes.

lognormal  exp(mu + sigma z), sigma^2 = ln(1 + cv^2), mu = ln(mean) - sigma^2 / 2
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from simcore.input.files import InputError
from simcore.workload.request_logs import Tokens, read_lengths
from simcore.workload.spec import ConstantLength, EmpiricalLength, Lengths, LognormalLength, UniformLength

T = TypeVar("T")


def only(name: str, values: Sequence[T] | None) -> T:
    """The only value of a list of alternatives. Raises ValueError if there are several."""
    if values is None or len(values) != 1:
        raise ValueError(f"{name} must have exactly one value here, got {values!r}")
    return values[0]


def stamp(path: str) -> tuple[int, int] | None:
    """The modification time and size of a file, which identify its state; None if it cannot be read."""
    try:
        state = Path(path).stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def longest(lengths: Lengths, name: str) -> int:
    """The greatest length that can be drawn; `name`: the field of the workload. Raises InputError."""
    if isinstance(lengths, ConstantLength):
        return only("value", lengths.value)
    if isinstance(lengths, UniformLength):
        return only("high", lengths.high)
    if isinstance(lengths, LognormalLength):
        return lengths.max
    return int(_values(lengths, name).max())


def sample(lengths: Lengths, count: int, random: np.random.Generator, name: str) -> Tokens:
    """Draws lengths [count]. Raises InputError if a file of lengths cannot be read."""
    if isinstance(lengths, ConstantLength):
        return np.full(count, only("value", lengths.value), dtype=np.int64)
    if isinstance(lengths, UniformLength):
        return random.integers(lengths.low, only("high", lengths.high), count, dtype=np.int64, endpoint=True)
    if isinstance(lengths, LognormalLength):
        variance = math.log1p(lengths.cv**2)
        drawn = random.lognormal(math.log(lengths.mean) - variance / 2.0, math.sqrt(variance), count)
        return np.clip(np.rint(drawn), 1, lengths.max).astype(np.int64)
    values = _values(lengths, name)
    return values[random.integers(0, len(values), count)]


def _values(lengths: EmpiricalLength, name: str) -> Tokens:
    if lengths.path is None or lengths.column is None:
        return np.array(lengths.values, dtype=np.int64)
    try:
        return _read_lengths(lengths.path, stamp(lengths.path), lengths.column)
    except InputError as error:
        raise InputError(f"workload.{name}.path: {error}") from None


@lru_cache(maxsize=4)
def _read_lengths(path: str, stamp: tuple[int, int] | None, column: str) -> Tokens:
    return read_lengths(Path(path), column)
