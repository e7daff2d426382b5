"""The square tile by right-angle transforms against the direct sum in float64."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.long_convolution.triton_fft import (
    FftConfig,
    fft_config,
    fft_space,
    fft_tile,
    reference_fft_tile,
    right_angle_spectrum,
)
from tests.thorough import first, slow, thorough

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BAR = 1e-5
LONGEST_SUM = 512
STORED = {torch.float32: 0.0, torch.float16: 2e-3, torch.bfloat16: 1e-2}

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def direct(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """z_v + sum_u y_u k_(U+v-u) in float64, as it stands."""
    y, taps, total = y.double(), taps.double(), z.double()
    side, outputs = y.shape[2], z.shape[2]
    for u in range(side):
        total += y[:, :, u : u + 1] * taps[:, :, side - u : side - u + outputs]
    return total


def by_transform(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """The same by a transform in float64 so long that nothing wraps: the sum takes minutes of long sides."""
    side, outputs = y.shape[2], z.shape[2]
    bins = torch.fft.rfft(y.double(), 4 * side, dim=2) * torch.fft.rfft(taps.double(), 4 * side, dim=2)
    return z.double() + torch.fft.irfft(bins, 4 * side, dim=2)[:, :, side : side + outputs]


def drawn(
    seed: int,
    layers: int,
    batch: int,
    filters: int,
    side: int,
    outputs: int,
    channels: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, taps from lag 0 on, and z, a view of a buffer whose other places are NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE)

    room = torch.full((layers, batch, side + outputs, channels + 3), math.nan, device=DEVICE, dtype=dtype)
    room[:, :, :side, :channels] = normal(layers, batch, side, channels)
    room[:, :, side:, :channels] = normal(layers, batch, outputs, channels)
    held = room[..., :channels]
    return held[:, :, :side], normal(layers, filters, 2 * side, channels), held[:, :, side:]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check(
    seed: int,
    side: int,
    dtype: torch.dtype = torch.float32,
    config: FftConfig | None = None,
    *,
    least: int = 1,
) -> float:
    rng = np.random.default_rng(seed)
    layers, batch = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    filters = batch if rng.random() < 0.3 else 1
    outputs, channels = int(rng.integers(1, side + 1)), int(rng.integers(least, 8 * least + 1))
    y, taps, z = drawn(seed, layers, batch, filters, side, outputs, channels, dtype)
    expected = (direct if side <= LONGEST_SUM else by_transform)(y, taps, z)
    beside = z._base
    assert beside is not None
    outside = torch.isnan(beside).sum()
    found = fft_tile(y, right_angle_spectrum(taps, side), z, config=config)
    assert found is z
    assert torch.isnan(beside).sum() == outside
    off = error(z, expected)
    assert off < BAR + STORED[dtype]
    return off


@slow
@pytest.mark.parametrize("side", first(2, [16, 64, 32, 128, 256, 512]))
def test_a_tile_is_the_direct_sum(side: int) -> None:
    check(side, side)


@slow
@pytest.mark.parametrize("dtype", [torch.float16])
def test_numbers_may_be_stored_in_half(dtype: torch.dtype) -> None:
    check(5, 64, dtype)


@pytest.mark.parametrize("order", first(2, [2, 16, 8, 32]))
def test_a_transform_in_registers_is_exact_to_rounding(order: int) -> None:
    """Constants are known to fp64, and a factor of 1 or i is no product."""
    y, taps, z = drawn(order, 1, 1, 1, 8 * order, 8 * order, 3, torch.float32)
    expected = direct(y, taps, z)
    config = FftConfig((order, 8), 8, 4)
    assert error(fft_tile(y, right_angle_spectrum(taps, 8 * order), z, config=config), expected) < 1e-6


@slow
@pytest.mark.parametrize("factors", first(1, [(2, 4, 8), (8, 2, 4), (4, 8, 4), (2, 2, 2)]))
def test_three_factors_make_the_same(factors: tuple[int, ...]) -> None:
    check(sum(factors), math.prod(factors), config=FftConfig(factors, 4, 2))


@pytest.mark.parametrize("factors", first(1, [(4, 8), (16, 32), (32, 4)]))
def test_three_launches_make_the_same(factors: tuple[int, ...]) -> None:
    check(sum(factors), math.prod(factors), config=FftConfig(factors, 8, 4, fused=False))


@thorough
def test_three_launches_may_take_some_layers_at_a_time() -> None:
    y, taps, z = drawn(3, 3, 2, 1, 32, 21, 9, torch.float32)
    expected = direct(y, taps, z)
    config = FftConfig((4, 8), 8, 4, fused=False, layers=2)
    assert fft_space(y, config).shape[0] == 2
    assert error(fft_tile(y, right_angle_spectrum(taps, 32), z, config=config), expected) < 1e-6


@thorough
def test_long_sides_are_as_exact_as_short_ones() -> None:
    """Twiddle factors of high powers are no powers of what was rounded before."""
    y, taps, z = drawn(4, 1, 1, 1, 512, 512, 2, torch.float32)
    expected = direct(y, taps, z)
    config = FftConfig((64, 8), 2, 1, fused=False)
    assert error(fft_tile(y, right_angle_spectrum(taps, 512), z, config=config), expected) < 6e-7


def test_the_truth_of_long_sides_is_the_direct_sum() -> None:
    y, taps, z = drawn(5, 2, 3, 1, 128, 77, 5, torch.float32)
    assert error(by_transform(y, taps, z), direct(y, taps, z)) < 1e-13


def test_the_reference_is_the_direct_sum() -> None:
    y, taps, z = drawn(1, 2, 2, 1, 48, 31, 5, torch.float32)
    expected = direct(y, taps, z)
    assert error(reference_fft_tile(y, right_angle_spectrum(taps, 48), z.clone()), expected) < 1e-6


def test_a_short_filter_ends_in_zeros() -> None:
    y, taps, z = drawn(2, 1, 1, 1, 32, 32, 4, torch.float32)
    short = taps[:, :, :40]
    expected = direct(y, torch.nn.functional.pad(short, (0, 0, 0, 24)), z)
    assert error(fft_tile(y, right_angle_spectrum(short, 32), z), expected) < 1e-5


@pytest.mark.parametrize("side", [64, 256, 2048, 4096, 16384])
def test_layouts_multiply_to_the_side(side: int) -> None:
    config = fft_config(side)
    assert math.prod(config.factors) == side
    assert config.warps <= 32


class Small(NamedTuple):
    """A small tile: made when it is asked for, since a card's memory is no test's to take before it runs."""

    y: Tensor
    taps: Tensor
    z: Tensor

    @property
    def spectrum(self) -> Tensor:
        return right_angle_spectrum(self.taps, 32)

    def tile(self, **changed: Tensor) -> tuple[Tensor, ...]:
        """The arguments of a tile, some of them changed."""
        given = {"y": self.y, "spectrum": self.spectrum, "z": self.z} | changed
        return given["y"], given["spectrum"], given["z"]


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("y has to be", lambda s: s.tile(y=s.y.double())),
        ("y has to be", lambda s: s.tile(y=s.y[0])),
        ("y has to be", lambda s: s.tile(y=s.y.transpose(2, 3))),
        ("z has to be", lambda s: s.tile(z=s.z[:, :1])),
        ("z has to be", lambda s: s.tile(z=s.z.double())),
        ("z has to be", lambda s: s.tile(z=s.z[:, :, :0])),
        ("spectrum has to be", lambda s: s.tile(spectrum=s.spectrum[..., :3, :])),
        ("spectrum has to be", lambda s: s.tile(spectrum=s.spectrum.double())),
        ("spectrum has to be", lambda s: s.tile(spectrum=torch.fft.rfft(s.taps, dim=2))),
        ("power of two", lambda s: (s.y[:, :, :31], right_angle_spectrum(s.taps, 31), s.z)),
    ],
)
def test_what_does_not_fit_is_refused(words: str, wrong: Callable[[Small], tuple[Tensor, ...]]) -> None:
    with pytest.raises(ValueError, match=words) as raised:
        fft_tile(*wrong(Small(*drawn(1, 1, 2, 1, 32, 20, 4, torch.float32))))
    assert "\n" not in str(raised.value)


def test_layouts_and_space_of_other_tiles_are_refused() -> None:
    small = Small(*drawn(1, 1, 2, 1, 32, 20, 4, torch.float32))
    with pytest.raises(ValueError, match=r"a layout of .16, 16. for a side of 32"):
        fft_tile(*small.tile(), config=fft_config(256))
    with pytest.raises(ValueError, match="space has to be"):
        fft_tile(*small.tile(), config=FftConfig((4, 8), 8, 4, fused=False), space=small.y)


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("side", [1 << power for power in range(4, 15)])
def test_sides_on_the_gpu(side: int, dtype: torch.dtype) -> None:
    for seed in range(10):
        check(1000 * side + seed, side, dtype, least=16)


@gpu
@needs_gpu
def test_a_captured_tile_reads_what_is_there_when_it_runs() -> None:
    y, taps, z = drawn(9, 2, 1, 1, 4096, 4096, 40, torch.float32)
    spectrum, space = right_angle_spectrum(taps, 4096), fft_space(y, fft_config(4096))
    fft_tile(y, spectrum, z.clone(), space=space)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fft_tile(y, spectrum, z, space=space)
    for seed in range(3):
        fresh_y, _, fresh_z = drawn(seed, 2, 1, 1, 4096, 4096, 40, torch.float32)
        y.copy_(fresh_y)
        z.copy_(fresh_z)
        expected = by_transform(y, taps, z)
        graph.replay()
        assert error(z, expected) < BAR
