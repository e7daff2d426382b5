"""Rows, columns, cells and direct tiles of a long convolution against float64: in Triton's interpreter where
there is no GPU, small; else compiled, also in captured graphs."""

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.layer import capture
from simcore.kernels.decoder.split_kv import EMPTY, ONE_BY_ONE
from simcore.kernels.long_convolution.triton_direct import (
    DirectConfig,
    direct_config,
    direct_tile,
    reference_direct_tile,
)
from simcore.kernels.long_convolution.triton_rows import (
    ColumnConfig,
    RowConfig,
    conv_cell,
    conv_column,
    conv_row,
    reference_conv_cell,
    reference_conv_column,
    reference_conv_row,
    row_config,
    row_config_for,
    row_space,
)
from tests.thorough import first, slow, thorough

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# What a kernel may be off, of the norm of the truth.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter does not compute in bf16 as a GPU does.
DTYPES = list(BOUNDS) if HAS_GPU else [torch.float32, torch.float16]
Launch = Callable[..., Tensor]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def drawn(dtype: torch.dtype, *size: int, seed: int = 0, more: int = 0) -> Tensor:
    """Normal numbers in the middle of a larger tensor of NaN, so that what is read beyond shows: a margin of
    `more` in every dimension."""
    numbers = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    around = torch.full([n + 2 * more for n in size], math.nan, dtype=dtype, device=DEVICE)
    inner = around[tuple(slice(more, more + n) for n in size)]
    inner.copy_(numbers)
    return inner


def around(x: Tensor) -> Tensor:
    """All that x is a view of."""
    return x if x._base is None else x._base


def ints(value: int) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=DEVICE)


def same(launch: Launch, reference: Launch, y: Tensor, taps: Tensor, z: Tensor) -> None:
    """The kernel adds to z what the reference adds to it in float64, and writes nothing beside it."""
    # NaN would stay NaN whatever is added to it.
    base = around(z).nan_to_num_(nan=7.0)
    before, truth = base.clone(), z.double()
    reference(y.double(), taps.double(), truth)
    assert launch(y, taps, z) is z
    assert float((z.double() - truth).norm() / truth.norm()) < BOUNDS[z.dtype]
    before.as_strided(z.shape, z.stride(), z.storage_offset()).copy_(z)
    assert torch.equal(before, base)


SIZES = [
    # layers, batch, filters, positions, channels, margin
    (1, 1, 1, 1, 1, 0),
    (2, 1, 1, 13, 20, 1),
    (2, 2, 2, 7, 33, 2),
    pytest.param(1, 3, 1, 19, 33, 2, marks=thorough),
    pytest.param(1, 2, 1, 5, 300, 0, marks=thorough),
]
dtypes = pytest.mark.parametrize("dtype", DTYPES)
sizes = pytest.mark.parametrize(("layers", "batch", "filters", "positions", "channels", "more"), SIZES)


@dtypes
@sizes
def test_row(
    layers: int, batch: int, filters: int, positions: int, channels: int, more: int, dtype: torch.dtype
) -> None:
    y = drawn(dtype, layers, batch, positions, channels, more=more)
    taps = drawn(dtype, layers, filters, positions, channels, seed=1, more=more)
    z = drawn(dtype, layers, batch, channels, seed=2, more=more)
    same(conv_row, reference_conv_row, y, taps, z)


@slow
@dtypes
@pytest.mark.parametrize("parts", first(2, [(1, 1, 1), (5, 4, 2), (2, 1, 1), (9, 8, 4)]))
def test_row_in_parts(parts: tuple[int, int, int], dtype: torch.dtype) -> None:
    config = RowConfig(4, 32, 2, *parts)
    y, taps = drawn(dtype, 1, 3, 41, 40, more=1), drawn(dtype, 1, 1, 41, 40, seed=1)
    space = row_space(y, config)
    z = drawn(dtype, 1, 3, 40, seed=2, more=1)
    for _ in range(2):
        same(lambda *x: conv_row(*x, config=config, space=space), reference_conv_row, y, taps, z)
        assert (space == EMPTY.value).all()


@pytest.mark.parametrize("filters", [1, 2])
def test_row_of_so_many_last_inputs(filters: int) -> None:
    y, taps = drawn(torch.float32, 2, 2, 30, 20), drawn(torch.float32, 2, filters, 30, 20, seed=1)
    for inputs in (0, 17, 99):
        z = drawn(torch.float32, 2, 2, 20, seed=2, more=1)
        same(
            lambda *x, n=inputs: conv_row(*x, inputs=ints(n)),
            lambda *x, n=inputs: reference_conv_row(*x, inputs=n),
            y, taps, z,
        )  # fmt: skip


@pytest.mark.parametrize("inputs", [None, 7])
def test_row_at_a_position(inputs: int | None) -> None:
    taps = drawn(torch.float32, 1, 1, 30, 20, seed=1)
    for position in (0, 16, 29):
        y, z = (drawn(torch.float32, 1, 2, 30, 20, seed=seed, more=1) for seed in (0, 2))
        y[:, :, position:] = math.nan
        same(
            lambda *x, t=position: conv_row(
                *x, position=ints(t), inputs=None if inputs is None else ints(inputs)
            ),
            lambda *x, t=position: reference_conv_row(*x, position=t, inputs=inputs),
            y, taps, z,
        )  # fmt: skip


@slow
def test_a_row_is_always_the_same() -> None:
    """A sum in parts is in a fixed order: bit by bit the same whenever it is made."""
    y, taps = drawn(torch.float32, 2, 1, 500, 64), drawn(torch.float32, 2, 1, 500, 64, seed=1)
    found = [conv_row(y, taps, drawn(torch.float32, 2, 1, 64, seed=2)) for _ in range(3)]
    assert all(torch.equal(found[0], z) for z in found)


@dtypes
@sizes
def test_column(
    layers: int, batch: int, filters: int, positions: int, channels: int, more: int, dtype: torch.dtype
) -> None:
    y = drawn(dtype, layers, batch, channels, more=more)
    taps = drawn(dtype, layers, filters, positions, channels, seed=1, more=more)
    z = drawn(dtype, layers, batch, positions, channels, seed=2, more=more)
    same(conv_column, reference_conv_column, y, taps, z)


@slow
def test_column_of_so_many_first_outputs() -> None:
    y, taps = drawn(torch.float32, 2, 2, 20), drawn(torch.float32, 2, 2, 30, 20, seed=1)
    config = ColumnConfig(4, 32, 1)
    for outputs in (0, 17, 99):
        z = drawn(torch.float32, 2, 2, 30, 20, seed=2, more=1)
        same(
            lambda *x, n=outputs: conv_column(*x, outputs=ints(n), config=config),
            lambda *x, n=outputs: reference_conv_column(*x, outputs=n),
            y, taps, z,
        )  # fmt: skip


@slow
@pytest.mark.parametrize("outputs", first(1, [7, None]))
def test_column_at_a_position(outputs: int | None) -> None:
    taps = drawn(torch.float32, 1, 1, 30, 20, seed=1)
    for position in (0, 16, 29):
        y, z = (drawn(torch.float32, 1, 2, 30, 20, seed=seed, more=1) for seed in (0, 2))
        same(
            lambda *x, t=position: conv_column(
                *x, position=ints(t), outputs=None if outputs is None else ints(outputs)
            ),
            lambda *x, t=position: reference_conv_column(*x, position=t, outputs=outputs),
            y, taps, z,
        )  # fmt: skip


@dtypes
@pytest.mark.parametrize(("batch", "filters", "channels"), [(1, 1, 1), (3, 1, 70), (3, 3, 300)])
def test_cell(batch: int, filters: int, channels: int, dtype: torch.dtype) -> None:
    y = drawn(dtype, batch, channels, more=1)
    tap = drawn(dtype, filters, channels, seed=1, more=2)
    z = drawn(dtype, batch, channels, seed=2, more=3)
    same(conv_cell, reference_conv_cell, y, tap, z)


@dtypes
@pytest.mark.parametrize(
    ("side", "outputs", "batch", "filters", "channels"),
    [
        (1, 1, 1, 1, 1),
        (2, 2, 1, 1, 40),
        (4, 3, 3, 1, 64),
        (16, 16, 1, 1, 64),
        (13, 7, 2, 2, 33),
        pytest.param(64, 64, 1, 1, 20, marks=thorough),
        pytest.param(35, 31, 2, 1, 5, marks=thorough),
    ],
)
def test_direct_tile(
    side: int, outputs: int, batch: int, filters: int, channels: int, dtype: torch.dtype
) -> None:
    y = drawn(dtype, 1, batch, side, channels, more=1)
    taps = drawn(dtype, 1, filters, side + outputs - 1, channels, seed=1, more=2)
    z = drawn(dtype, 1, batch, outputs, channels, seed=2, more=1)
    same(direct_tile, reference_direct_tile, y, taps, z)


@slow
@pytest.mark.parametrize("sums", [2, 4])
@pytest.mark.parametrize("layout", first(1, [(2, 2), (1, 1), (4, 1)]))
def test_direct_tile_in_any_layout(sums: int, layout: tuple[int, int]) -> None:
    config = DirectConfig(sums, *layout, 32)
    for side, outputs in ((8, 8), (7, 5)):
        y, taps = drawn(torch.float32, 1, 3, side, 40), drawn(torch.float32, 1, 1, side + outputs - 1, 40)
        z = drawn(torch.float32, 1, 3, outputs, 40, seed=2, more=1)
        same(lambda *x: direct_tile(*x, config=config), reference_direct_tile, y, taps, z)


def test_layouts_fit_a_gpu() -> None:
    """Whatever the shape: those who sum the parts of a row leave places for others, hold what they sum in
    registers, and tiles have as many warps as a program may have."""
    draw = random.Random(1)
    for _ in range(300):
        layers, batch, n, channels = (
            draw.randint(1, most) for most in (40, 20, 1 << draw.randint(0, 17), 1000)
        )
        shared = draw.random() < 0.5
        row = row_config(layers=layers, batch=batch, inputs=n, channels=channels, bytes=4, shared=shared)
        groups = layers * -(-batch // row.sequences) * -(-channels // row.channels)
        assert row.sharers == 1 or (row.sharers - 1) * groups < 132
        assert 1 <= row.sharers <= min(row.splits, row.slices)
        assert row.sequences * row.channels % row.slices == 0
        assert row.splits == 1 or row.splits * row.sequences * row.channels // row.slices <= 2048 * row.warps
        tile = direct_config(layers=layers, batch=batch, outputs=n, channels=channels)
        assert tile.warps in (1, 2, 4)


def test_what_does_not_fit_is_said() -> None:
    def x(*size: int) -> Tensor:
        return torch.zeros(size, device=DEVICE)

    y, taps, z = x(2, 3, 4, 8), x(2, 1, 4, 8), x(2, 3, 8)
    tile = x(2, 3, 4, 8), x(2, 1, 7, 8), x(2, 3, 4, 8)
    together = replace(row_config_for(y, taps), sequences=2)
    for message, launch in {
        "taps": lambda: conv_row(y, x(2, 2, 4, 8), z),
        "z float32": lambda: conv_row(y, taps, x(2, 3, 9)),
        "z has to be": lambda: conv_row(y.double(), taps.double(), z.double()),
        "y has to be": lambda: conv_row(y.half(), taps, z),
        "channels contiguous": lambda: conv_row(y.transpose(2, 3), x(2, 1, 8, 4), x(2, 3, 4)),
        "inputs": lambda: conv_row(y, taps, z, inputs=torch.zeros(1)),
        "position": lambda: conv_row(y, taps, y.clone(), position=torch.zeros(2, dtype=torch.int32)),
        "space": lambda: conv_row(y, taps, z, space=torch.zeros(4)),
        "config": lambda: conv_row(y, x(2, 3, 4, 8), z, config=together),
        "outputs": lambda: conv_column(z, taps, y, outputs=torch.zeros(1)),
        "y float32": lambda: conv_column(y, taps, y.clone()),
        "other memory": lambda: conv_row(y, taps, y, position=torch.zeros(1, dtype=torch.int32)),
        "in one place": lambda: conv_row(y, taps, x(1, 3, 8).expand(2, 3, 8)),
        "tap": lambda: conv_cell(x(3, 4), x(4), x(3, 4)),
        "side 4": lambda: direct_tile(tile[0], x(2, 1, 8, 8), x(2, 3, 5, 8)),
        "taps have": lambda: direct_tile(tile[0], x(2, 1, 6, 8), tile[2]),
    }.items():
        with pytest.raises(ValueError, match=message):
            launch()
    for nothing in (x(0, 3, 4, 8), x(2, 0, 4, 8), x(2, 3, 4, 0)):
        sums = nothing[:, :, 0]
        conv_row(nothing, nothing, sums)
        conv_column(sums, nothing, nothing)


# -- on a GPU ----------------------------------------------------------------------------------------------


class TestGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("seed", range(150))
    def test_random_shapes(self, seed: int) -> None:
        draw = random.Random(seed)
        dtype = draw.choice(DTYPES)
        layers, batch, channels = draw.randint(1, 5), draw.randint(1, 9), draw.choice([1, 16, 100, 256, 770])
        filters, positions = draw.choice([1, batch]), draw.randint(1, 1 << draw.randint(0, 12))
        more = draw.choice([0, 0, 4, 5])
        y = drawn(dtype, layers, batch, positions, channels, more=more)
        taps = drawn(dtype, layers, filters, positions, channels, seed=1, more=more)
        z = drawn(dtype, layers, batch, positions, channels, seed=2, more=more)
        same(conv_row, reference_conv_row, y, taps, drawn(dtype, layers, batch, channels, seed=3, more=more))
        same(conv_column, reference_conv_column, drawn(dtype, layers, batch, channels, seed=3), taps, z)
        side, t = draw.randint(1, 100), draw.randint(0, positions - 1)
        outputs = draw.choice([side, draw.randint(1, side)])
        same(
            direct_tile,
            reference_direct_tile,
            drawn(dtype, layers, batch, side, channels, more=more),
            drawn(dtype, layers, filters, side + outputs - 1, channels, seed=1, more=more),
            drawn(dtype, layers, batch, outputs, channels, seed=2, more=more),
        )
        same(
            lambda *x: conv_row(*x, position=ints(t)),
            lambda *x: reference_conv_row(*x, position=t),
            y, taps, z,
        )  # fmt: skip

    @pytest.mark.parametrize(("layers", "channels"), [(18, 256), (36, 768)])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_models(self, layers: int, channels: int, dtype: torch.dtype) -> None:
        for n in (64, 1024, 5000):
            y, taps = drawn(dtype, layers, 1, n, channels), drawn(dtype, layers, 1, n, channels, seed=1)
            same(conv_row, reference_conv_row, y, taps, drawn(dtype, layers, 1, channels, seed=2))
        for side in (1, 4, 16, 64):
            y, z = (drawn(dtype, layers, 1, side, channels, seed=seed) for seed in (0, 2))
            taps = drawn(dtype, layers, 1, 2 * side - 1, channels, seed=1)
            same(direct_tile, reference_direct_tile, y, taps, z)

    def test_a_captured_row_reads_its_position_whenever_it_runs(self) -> None:
        y, z = (drawn(torch.float32, 4, 2, 600, 256, seed=seed) for seed in (0, 2))
        taps = drawn(torch.float32, 4, 1, 600, 256, seed=1)
        position = ints(1)
        space = row_space(y, row_config_for(y, taps))
        graph = capture(lambda: conv_row(y, taps, z, position=position, space=space), [z])
        for t in (0, 5, 333, 599):
            position.fill_(t)
            same(
                lambda *x: (graph.replay(), x[2])[1],
                lambda *x, t=t: reference_conv_row(*x, position=t),
                y, taps, z,
            )  # fmt: skip
            assert (space == EMPTY.value).all()
