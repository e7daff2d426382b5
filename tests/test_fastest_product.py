"""Which product is chosen for few rows: by measured times, ours only where all that is near says so."""

import csv
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

from simcore.kernels.decoder import fastest_product
from simcore.kernels.decoder.fastest_product import TIMES, ours_is_faster
from simcore.kernels.decoder.matmul import MOST_ROWS, is_of_cublas, product

HEAD = "k,n,order,rows,ours_s,cublas_s"


@pytest.fixture
def times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of times of its own."""
    path = tmp_path / "times.csv"
    monkeypatch.setattr(fastest_product, "TIMES", path)
    ours_is_faster.cache_clear()
    yield path
    ours_is_faster.cache_clear()


def write(path: Path, *rows: tuple[int, int, str, int, float]) -> None:
    lines = [f"{k},{n},{order},{count},{ratio},1.0" for k, n, order, count, ratio in rows]
    path.write_text("\n".join([HEAD, *lines]) + "\n")


def test_a_measured_product_is_the_faster_one() -> None:
    with TIMES.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({(row["k"], row["n"], row["order"], row["rows"]) for row in rows}) == len(rows)
    for row in Random(1).sample(rows, 200):
        shape = int(row["rows"]), int(row["k"]), int(row["n"])
        chosen = ours_is_faster(*shape, by_columns=row["order"] == "columns")
        assert chosen == (float(row["ours_s"]) < float(row["cublas_s"]))


def test_every_time_has_its_birth() -> None:
    with TIMES.open(newline="") as file:
        assert all(row["device"] and row["torch"] and row["date_utc"] for row in csv.DictReader(file))


def test_between_measured_rows_both_sides_count(times: Path) -> None:
    write(times, (64, 64, "rows", 1, 0.9), (64, 64, "rows", 8, 0.95), (64, 64, "rows", 16, 1.1))
    found = [ours_is_faster(rows, 64, 64, by_columns=False) for rows in (1, 4, 8, 9, 16, 64)]
    assert found == [True, True, True, False, False, False]


def test_in_a_step_ours_may_take_longer_where_cublas_is_unsteady(times: Path) -> None:
    """Of more than one tile of 128 columns for each of 132 multiprocessors, and of up to 24 rows."""
    many, few = 128 * 132 + 1, 128 * 132
    alike = [(64, n, "rows", rows, 1.05) for n in (many, few) for rows in (8, 32)]
    write(times, *alike, (64, 2 * many, "rows", 8, 1.07))

    def ours(rows: int, n: int, *, in_step: bool = True, processors: int = 132) -> bool:
        return ours_is_faster(rows, 64, n, by_columns=False, in_step=in_step, processors=processors)

    assert [ours(rows, many) for rows in (8, 24, 25, 32)] == [True, True, False, False]
    assert [ours(8, few), ours(8, many, in_step=False), ours(8, 2 * many)] == [False] * 3
    assert ours(8, few, processors=131)
    write(times, (64, many, "columns", 8, 1.05))
    ours_is_faster.cache_clear()
    fastest_product._measured.cache_clear()
    assert not ours_is_faster(8, 64, many, by_columns=True, in_step=True)


def test_orders_of_memory_have_times_of_their_own(times: Path) -> None:
    write(times, (64, 64, "rows", 1, 0.9), (64, 64, "columns", 1, 1.1))
    assert ours_is_faster(1, 64, 64, by_columns=False)
    assert not ours_is_faster(1, 64, 64, by_columns=True)


def test_of_a_new_matrix_the_nearest_ones_have_to_agree(times: Path) -> None:
    near = [(64, 64, "rows", 1, 0.9), (64, 128, "rows", 1, 0.9), (128, 64, "rows", 1, 0.9)]
    far = (8192, 8192, "rows", 1, 2.0)
    write(times, *near, far)
    assert ours_is_faster(1, 80, 80, by_columns=False)
    fastest_product._measured.cache_clear()
    ours_is_faster.cache_clear()
    write(times, *near[:2], (128, 64, "rows", 1, 1.01), far)
    assert not ours_is_faster(1, 80, 80, by_columns=False)


def test_many_rows_are_cublas_s_and_few_ours_without_a_card() -> None:
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16)
    assert not is_of_cublas(MOST_ROWS, weight)
    assert is_of_cublas(MOST_ROWS + 1, weight)


def test_nothing_is_added_to_a_product_of_fp8_weights() -> None:
    x, weight = torch.ones(2, 16), torch.ones(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="nothing is added"):
        product(x, weight, add=torch.ones(2, 16))
