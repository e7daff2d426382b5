"""What the benchmark of tiles compares with, and what it makes of the times."""

from dataclasses import asdict, replace

import pytest
import torch
from torch import Tensor

from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import Bar, Compared, Row, Times
from simcore.validate.benchmarks.convolution import (
    LINES,
    TILE_GOALS,
    TILES,
    Operands,
    Tile,
    by_column,
    by_convolution,
    by_row,
    by_sum,
    by_transform,
    drawn,
    line_truth,
    tile_truth,
    turned,
)


def operands(inputs: int, lags: int, outputs: int) -> Operands:
    return drawn(2, 5, inputs, lags, outputs, torch.Generator().manual_seed(inputs))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_the_truth_is_the_sum_as_it_stands() -> None:
    one = operands(6, 12, 6)
    expected = one.before.double()
    for v in range(6):
        for u in range(6):
            expected[:, :, v] += one.y[:, :, u].double() * one.taps[:, :, 6 + v - u].double()
    assert error(tile_truth(one), expected) < 1e-14


@pytest.mark.parametrize("side", [1, 4, 16, 64])
def test_torch_has_three_ways_to_a_tile(side: int) -> None:
    one = operands(side, 2 * side, side)
    expected = tile_truth(one)
    filters = (
        (by_transform, torch.fft.rfft(one.taps, dim=2)),
        (by_convolution, turned(one.taps)),
        (by_sum, one.taps),
    )
    for add, k in filters:
        assert error(add(one.y, k, one.before.clone()), expected) < 1e-5


def test_torch_makes_positions_of_the_baselines() -> None:
    lazy, eager = operands(30, 31, 1), operands(1, 31, 30)
    assert error(by_row(lazy.y, lazy.taps, lazy.z), line_truth("lazy", lazy)) < 1e-6
    assert error(by_column(eager.y, eager.taps, eager.z), line_truth("eager", eager)) < 1e-6


def test_bytes_are_counted_once() -> None:
    tile = next(of for of in TILES if of.side == 256 and of.layers == 18)
    assert tile.hbm_bytes == 4 * 18 * 256 * (256 + 512 + 2 * 256)
    lazy, eager = LINES[0], LINES[6]
    assert (lazy.kind, eager.kind) == ("lazy", "eager")
    assert lazy.hbm_bytes == 4 * 18 * 256 * 2 * 1024
    assert eager.hbm_bytes == 4 * 18 * 256 * 3 * 1024


def compared(side: int, ours_us: float, peer_us: float, floor_us: float) -> Compared:
    of = Tile(18, 256, side)
    row = Row(
        op="tile", implementation="ours, tf32", version="simcore", shape=asdict(of), hbm_bytes=of.hbm_bytes,
        error=1e-4, error_bar=1e-3,
    )  # fmt: skip

    def timed(row: Row, us: float) -> Row:
        return replace(row, times=Times(*[1e-6 * us] * 3, 10, *[1e-6 * us] * 2))

    peer = replace(row, implementation="FFT", version="torch")
    return Compared(str(of), timed(row, ours_us), [timed(peer, peer_us)], 1e-6 * floor_us)


def tile_bars(found: list[Compared]) -> list[Bar]:
    return [goal.bar(found) for goal in TILE_GOALS]


def test_bars_go_by_side_and_by_the_worst() -> None:
    good = [compared(16, 2, 2.1, 1), compared(256, 10, 26, 4)]
    good += [compared(1024, 30, 90, 11), compared(4096, 100, 160, 80)]
    assert [bar.met for bar in tile_bars(good)] == [True] * 4
    assert tile_bars([*good, compared(64, 10, 24, 9)])[1].met is False
    assert tile_bars([*good, compared(8192, 10, 14, 9)])[2].met is False
    assert tile_bars([*good, compared(512, 31, 90, 10)])[3].met is False
    assert tile_bars([*good, compared(1, 2.0, 1.9, 1)])[0].met is False
    assert [bar.met for bar in tile_bars([])] == [None] * 4


def test_a_line_names_each_way() -> None:
    line = str(compared(64, 5.0, 13.0, 2.5))
    assert line == "18 x 256, side 64: 2.60 times as fast, 2.00 of the floor; tf32 5.0, FFT 13.0"
    assert cases.file_name("NVIDIA H200", "tiles", "convolution") == "h200_convolution_kernels_tiles.csv"
