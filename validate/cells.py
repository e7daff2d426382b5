"""Numbers in tables by others: each cell read strictly, with one line that says what is wrong."""

import math
from collections.abc import Collection, Mapping
from pathlib import Path

from simcore.input.files import InputError, read_cells

# The line of a file after its head.
FIRST_LINE = 2


def lines(path: Path, needed: Collection[str]) -> list[tuple[str, dict[str, str]]]:
    """Returns the lines of a CSV file, each with its place for messages. Raises InputError if a needed column
    is missing."""
    head, rows = read_cells(path)
    for name in needed:
        if name not in head:
            raise InputError(f"{path}: has no column {name}")
    each = enumerate(rows, FIRST_LINE)
    return [(f"{path}: line {number}", dict(zip(head, row, strict=True))) for number, row in each]


def positive(where: str, line: Mapping[str, str], name: str) -> float:
    """Returns a cell as a finite number above 0. Raises InputError."""
    try:
        value = float(line[name] or "nan")
    except ValueError:
        value = math.nan
    if not (value > 0.0 and math.isfinite(value)):
        raise InputError(f"{where}: {name}: {line[name]!r} is no number above 0")
    return value


def count(where: str, line: Mapping[str, str], name: str) -> int:
    """Returns a cell as a whole number above 0. Raises InputError."""
    value = positive(where, line, name)
    if value != int(value):
        raise InputError(f"{where}: {name}: {line[name]!r} is no whole number")
    return int(value)
