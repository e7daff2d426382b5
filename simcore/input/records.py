"""Checks the columns of a file of records: each fault names the file, the column and the record, from 1."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import InputError, shown


def checked_times(values: NDArray[Any], name: str, path: Path) -> NDArray[Any]:
    """Returns `values` [n] if each is a finite number from 0 on. Raises InputError."""
    good = (values >= 0) & (values < np.inf)
    if not good.all():
        refuse(int(np.argmin(good)), values, name, path, "a number, at least 0")
    return values


def from_list(values: Sequence[object], name: str, path: Path) -> NDArray[Any]:
    """A list from JSON as an array of numbers. Raises InputError if a value is no number."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths in it
        array = np.empty((0, 0))
    if array.ndim == 1 and array.dtype.kind in "iuf":
        return array
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) >= 2**63:
            refuse(index, values, name, path, "a number")
    raise InputError(f"{path}: {name}: must be a list of numbers")


def refuse(index: int, values: Any, name: str, path: Path, allowed: str) -> NoReturn:
    """Raises InputError with the line about value `index`, which is not allowed."""
    got = shown(str(values[index]))
    raise InputError(f"{path}: record {index + 1}: {name} must be {allowed}, got {got}")
