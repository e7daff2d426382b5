"""Are two sets of run directories the same to 1e-9? For changes that must not change a figure.

    python -m tests.compare_figures BEFORE AFTER

Both are folders with run directories anywhere below. Prints what differs; exit code 1 where anything does.
Compared are all numbers and words of results.csv and comparison.csv, and all columns of the Parquet tables.
"""

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

WITHIN = 1e-9
# What is smaller than a femtosecond is what sums of seconds leave of a 0.
ROUNDED = 1e-15
# Differences that are printed of a file.
SHOWN = 4


def apart(a: float, b: float) -> float:
    """How far two numbers lie apart, relative to the larger one; numbers that are not there are alike, and so
    are those that are both 0 but for their rounding.

    >>> apart(2.0, 1.0), apart(math.nan, math.nan), apart(1.0, math.nan), apart(-1e-18, 0.0)
    (0.5, 0.0, inf, 0.0)
    """
    if a == b or (math.isnan(a) and math.isnan(b)) or max(abs(a), abs(b)) < ROUNDED:
        return 0.0
    return math.inf if math.isnan(a) != math.isnan(b) else abs(a - b) / max(abs(a), abs(b))


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def csv_differences(before: Path, after: Path) -> Iterator[str]:
    """The cells in which two CSV files differ by more than WITHIN."""
    first, second = (list(csv.reader(path.open(encoding="utf-8", newline=""))) for path in (before, after))
    if len(first) != len(second):
        yield f"{len(first)} lines, then {len(second)}"
        return
    for line, (old, new) in enumerate(zip(first, second, strict=True), 1):
        if len(old) != len(new):
            yield f"line {line}: {len(old)} cells, then {len(new)}"
            continue
        for name, a, b in zip(first[0], old, new, strict=True):
            x, y = _number(a), _number(b)
            known = x is not None and y is not None
            if a != b and not (known and apart(x or 0.0, y or 0.0) <= WITHIN):
                yield f"line {line}, {name}: {a!r}, then {b!r} ({', '.join(old[:7])})"


def table_differences(before: Path, after: Path) -> Iterator[str]:
    """The columns in which two Parquet tables differ by more than WITHIN."""
    first, second = pq.read_table(before), pq.read_table(after)
    if (first.column_names, first.num_rows) != (second.column_names, second.num_rows):
        shapes = [f"{table.num_rows} rows of {table.column_names}" for table in (first, second)]
        yield ", then ".join(shapes)
        return
    for name in first.column_names:
        a, b = (table[name].to_numpy(zero_copy_only=False) for table in (first, second))
        if a.dtype.kind in "fiub":
            with np.errstate(all="ignore"):
                off = np.abs(a.astype(float) - b.astype(float)) / np.maximum(np.abs(a), np.abs(b))
            same = (a == b) | (np.isnan(a.astype(float)) & np.isnan(b.astype(float)))
            worst = float(np.where(same, 0.0, off).max(initial=0.0))
            if not worst <= WITHIN:
                yield f"{name}: {worst:.3g} apart"
        elif not (a == b).all():
            yield f"{name}: other words"


def main(before: Path, after: Path) -> int:
    """Prints the differences of all files below two folders; 1 where there are any."""
    found, different = 0, 0
    for old in sorted(path for path in before.rglob("*") if path.suffix in (".csv", ".parquet")):
        new = after / old.relative_to(before)
        if not new.is_file():
            lines = ["is not there any more"]
        elif old.read_bytes() == new.read_bytes():
            lines = []
        else:
            lines = list((csv_differences if old.suffix == ".csv" else table_differences)(old, new))
        found += 1
        different += bool(lines)
        for text in lines[:SHOWN]:
            print(f"{old.relative_to(before)}: {text}")
        if len(lines) > SHOWN:
            print(f"{old.relative_to(before)}: {len(lines) - SHOWN} more")
    print(f"{found} files, {different} differ by more than {WITHIN:g}")
    return int(different > 0 or not found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
