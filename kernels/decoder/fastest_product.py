"""Whether this project's kernel or cuBLAS takes less time for few rows times a matrix, by measured times.

    r = ours_s / cublas_s     at each measured number of rows, of a matrix [k, n] stored by rows or by columns
    ours where r < 1 at the measured rows on both sides: of [k, n] itself, or of all NEIGHBOURS nearest to it

    in a step, W by rows, of more columns than one tile of CUBLAS_TILE a multiprocessor, up to MOST_UNSTEADY
    rows:  ours where r < UNSTEADY

The times are of an H200, in bf16, and stand for fp16 and for other cards too. Both are compared as they are
launched in captured graphs, W read from memory. A matrix that was not measured lies near others by log k and
log n; where these disagree, cuBLAS is taken, whose time is known to its users.

In a step, cuBLAS's time for such matrices depends on what ran before: its programs take one or two tiles
each, and which multiprocessors get two varies. 12 rows times [4096, 28672] take it up to 10 % longer than
alone, ours no longer (`validate/measured/h200_products_in_steps.csv`). Of matrices with more tiles a
multiprocessor this was not measured.
`product_times.csv` has the times with their birth record; `python -m simcore.validate.benchmarks.products`
measures it anew.
"""

import csv
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from math import log
from pathlib import Path

from simcore.kernels.gpu import PROCESSORS

TIMES = Path(__file__).with_name("product_times.csv")
NEIGHBOURS = 3
# Columns of a tile of cuBLAS with few rows, up to how many rows it has such tiles, and the ratio below which
# ours is then taken in steps.
CUBLAS_TILE, MOST_UNSTEADY, UNSTEADY = 128, 24, 1.06

# Rows and ours over cuBLAS, by rows.
Ratios = Sequence[tuple[int, float]]
Matrix = tuple[int, int]


@cache
def ours_is_faster(
    rows: int, k: int, n: int, *, by_columns: bool, in_step: bool = False, processors: int = PROCESSORS
) -> bool:
    """Returns whether this project's kernel is the faster one for x [rows, k] times W [k, n], by itself or in
    a step; `by_columns`: W's columns are contiguous; `processors`: multiprocessors of the GPU."""
    measured = _measured(TIMES)[by_columns]
    wide = n > CUBLAS_TILE * processors
    unsteady = in_step and not by_columns and wide and rows <= MOST_UNSTEADY
    bound = UNSTEADY if unsteady else 1.0
    if (k, n) in measured:
        return is_below(measured[k, n], rows, bound)

    def apart(matrix: Matrix) -> float:
        return abs(log(matrix[0] / k)) + abs(log(matrix[1] / n))

    return all(is_below(measured[near], rows, bound) for near in sorted(measured, key=apart)[:NEIGHBOURS])


def is_below(ratios: Ratios, rows: int, bound: float = 1.0) -> bool:
    """Returns whether ratios are below `bound` at the measured rows on both sides; beyond all, at the last.

    >>> [is_below([(1, 0.9), (8, 0.95), (16, 1.1)], rows) for rows in (1, 5, 8, 9, 16, 20)]
    [True, True, True, False, False, False]
    """
    above = bisect_left(ratios, rows, key=lambda each: each[0])
    if above < len(ratios) and ratios[above][0] == rows:
        return ratios[above][1] < bound
    sides = ratios[max(0, above - 1) : above + 1]
    return all(ratio < bound for _, ratio in sides)


@cache
def _measured(path: Path) -> Mapping[bool, Mapping[Matrix, Ratios]]:
    """Returns the ratios of each matrix, by whether W is stored by columns."""
    found: dict[bool, dict[Matrix, list[tuple[int, float]]]] = {False: {}, True: {}}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            of = found[row["order"] == "columns"].setdefault((int(row["k"]), int(row["n"])), [])
            of.append((int(row["rows"]), float(row["ours_s"]) / float(row["cublas_s"])))
    return {order: {matrix: sorted(of) for matrix, of in each.items()} for order, each in found.items()}
