"""The square tile as products of Toeplitz and Hankel matrices against the sum as it stands, in float64."""

import math
import random

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.long_convolution.triton_toeplitz import (
    PRECISIONS,
    Precision,
    ToeplitzConfig,
    reference_direct_tile,
    toeplitz_config,
    toeplitz_tile,
)
from tests.thorough import first, slow

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
BARS = {"tf32x3": 1e-5, "tf32": 1e-3, "bf16": 1e-2}
STORED = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def drawn(dtype: torch.dtype, *size: int, seed: int, more: int) -> Tensor:
    """Normal numbers in the middle of a larger tensor of NaN: a margin of `more` in every dimension."""
    around = torch.full([n + 2 * more for n in size], math.nan, dtype=dtype, device=DEVICE)
    inner = around[tuple(slice(more, more + n) for n in size)]
    return inner.copy_(torch.randn(*size, generator=torch.Generator().manual_seed(seed)))


def check(
    side: int,
    outputs: int,
    channels: int,
    precision: Precision = "tf32x3",
    *,
    layers: int = 1,
    batch: int = 1,
    filters: int = 1,
    more: int = 1,
    dtype: torch.dtype = torch.float32,
    config: ToeplitzConfig | None = None,
) -> float:
    """The kernel adds to z what the reference adds to it in float64, and writes nothing beside it."""
    y = drawn(dtype, layers, batch, side, channels, seed=1, more=more)
    taps = drawn(dtype, layers, filters, side + outputs - 1, channels, seed=2, more=more)
    z = drawn(dtype, layers, batch, outputs, channels, seed=3, more=more)
    base = z if z._base is None else z._base
    # NaN would stay NaN whatever is added to it.
    before, truth = base.nan_to_num_(nan=7.0).clone(), z.double()
    reference_direct_tile(y.double(), taps.double(), truth)
    assert toeplitz_tile(y, taps, z, precision=precision, config=config) is z
    off = float((z.double() - truth).norm() / truth.norm())
    assert off < BARS[precision] + STORED[dtype]
    before.as_strided(z.shape, z.stride(), z.storage_offset()).copy_(z)
    assert torch.equal(before, base)
    return off


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sides", first(1, [(16, 16), (64, 64), (64, 37), (128, 128)]))
def test_a_tile_is_the_sum_as_it_stands(sides: tuple[int, int], precision: Precision) -> None:
    check(*sides, 8, precision)


@pytest.mark.parametrize("sides", first(3, [(1, 1), (7, 5), (33, 20), (71, 71), (80, 1)]))
def test_any_side_will_do(sides: tuple[int, int]) -> None:
    check(*sides, 3, more=2)


@slow
def test_a_long_side_has_several_blocks_of_outputs_and_rounds() -> None:
    check(260, 260, 2, "tf32")


@pytest.mark.parametrize("filters", first(1, [2, 1]))
@pytest.mark.parametrize("dtype", first(1, [torch.float16, torch.float32]))
def test_sequences_and_layers(filters: int, dtype: torch.dtype) -> None:
    check(24, 21, 9, layers=2, batch=2, filters=filters, dtype=dtype)


@pytest.mark.parametrize("precision", first(1, PRECISIONS))
@pytest.mark.parametrize("channels", first(1, [2, 4]))
@pytest.mark.parametrize(("width", "rows"), [(8, 8), (8, 16), (16, 8), (16, 16)])
def test_any_layout_makes_the_same(width: int, rows: int, channels: int, precision: Precision) -> None:
    check(48, 41, 4, precision, config=ToeplitzConfig(width, rows, channels, 1))


def test_tf32_is_rounded_not_cut_off() -> None:
    # Cut off, both factors would lose 3e-4 of their size on average, in one direction.
    assert check(96, 64, 4, "tf32") < 4e-4


def test_the_layout_goes_by_side_outputs_and_precision() -> None:
    assert toeplitz_config(side=128, outputs=128).rows == 16
    assert toeplitz_config(side=512, outputs=64).rows == 8
    assert toeplitz_config(side=256, outputs=256, precision="bf16").channels == 4


def test_what_does_not_fit_is_said() -> None:
    def x(*size: int) -> Tensor:
        return torch.zeros(size, device=DEVICE)

    y, taps, z = x(2, 3, 4, 8), x(2, 1, 7, 8), x(2, 3, 4, 8)
    precision: str = "fp64"
    for message, launch in {
        "y has to be": lambda: toeplitz_tile(y.double(), taps, z),
        "channels contiguous": lambda: toeplitz_tile(y.transpose(2, 3), taps, z),
        "taps have": lambda: toeplitz_tile(y, x(2, 1, 6, 8), z),
        "z float32": lambda: toeplitz_tile(y, taps, x(2, 2, 4, 8)),
        "side 4": lambda: toeplitz_tile(y, x(2, 1, 8, 8), x(2, 3, 5, 8)),
        "other memory": lambda: toeplitz_tile(y, taps, y),
        "precision is 'fp64'": lambda: toeplitz_tile(y, taps, z, precision=precision),  # type: ignore[arg-type]
        "at most 1024": lambda: toeplitz_tile(x(1, 1, 1025, 4), x(1, 1, 1026, 4), x(1, 1, 2, 4)),
        "power of two": lambda: ToeplitzConfig(12, 8),
        "8 or 16 rows": lambda: ToeplitzConfig(32, 8),
        "2 or 4 channels": lambda: ToeplitzConfig(8, 8, 1),
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            launch()
        assert "\n" not in str(raised.value)
    for nothing in (x(0, 3, 4, 8), x(2, 0, 4, 8), x(2, 3, 4, 0)):
        empty = nothing.new_zeros((nothing.shape[0], 1, 7, nothing.shape[3]))
        toeplitz_tile(nothing, empty, nothing.clone())


class TestGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize("seed", range(60))
    def test_random_shapes(self, seed: int, precision: Precision) -> None:
        draw = random.Random(seed)
        side, batch = draw.choice([16, 32, 64, 128, 256, 512, draw.randint(1, 600)]), draw.randint(1, 4)
        config = None
        if draw.random() < 0.5:
            config = ToeplitzConfig(*(draw.choice(sizes) for sizes in ((8, 16), (8, 16), (2, 4), (1, 2, 4))))
        check(
            side,
            draw.choice([side, draw.randint(1, side)]),
            draw.choice([1, 16, 100, 256, 771]),
            precision,
            layers=draw.randint(1, 5),
            batch=batch,
            filters=draw.choice([1, batch]),
            more=draw.choice([0, 0, 4, 5]),
            dtype=draw.choice(list(STORED)),
            config=config,
        )

    @pytest.mark.parametrize("precision", PRECISIONS)
    @pytest.mark.parametrize(("layers", "channels"), [(18, 256), (36, 768)])
    def test_models(self, layers: int, channels: int, precision: Precision) -> None:
        for side in (16, 32, 64, 128, 256, 512, 1024):
            check(side, side, channels, precision, layers=layers, more=0)
