"""Numbers in tables by others: each cell read strictly, with one line that says what is wrong."""

import math
from collections.abc import Mapping

from simcore.input.files import InputError


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
