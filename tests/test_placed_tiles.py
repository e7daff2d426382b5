"""Tiles, rows and columns at a position that is read on the device, against the same at a given one: in
Triton's interpreter where there is no GPU; and in plain torch in float64."""

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.kernel import has_kernel
from simcore.kernels.long_convolution import placed_tiles, tensors
from simcore.kernels.long_convolution.moved import Moved, added_at, copied_at
from simcore.kernels.long_convolution.placed_tiles import PLACED, column_at, row_at, tile_at
from simcore.kernels.long_convolution.spectral import tile_spectrum
from simcore.kernels.long_convolution.triton_direct import direct_tile, reference_direct_tile
from simcore.kernels.long_convolution.triton_fft import (
    FftConfig,
    fft_tile,
    reference_fft_tile,
    right_angle_spectrum,
)
from simcore.kernels.long_convolution.triton_toeplitz import toeplitz_tile
from simcore.ops import convolution as conv
from simcore.ops.convolution import IMPLEMENTATIONS
from tests.test_triton_convolution import BOUNDS, DEVICE, HAS_GPU, drawn, ints
from tests.thorough import slow

torch.set_num_threads(1)

by_kernels = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
LAYERS, BATCH, CHANNELS = 2, 2, 20


def levels(dtype: torch.dtype, room: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """The levels below and the levels, of one tensor, as a model has them."""
    a = drawn(dtype, LAYERS + 1, BATCH, room, CHANNELS, seed=seed)
    return a[:-1], a[1:]


def truth_of(y: Tensor, taps: Tensor, z: Tensor, side: int, outputs: int, t: int) -> Tensor:
    """All positions of the levels after the tile after t."""
    whole = z.double()
    inputs = y[:, :, t + 1 - side : t + 1].double()
    reference_direct_tile(
        inputs, taps[:, :, 1 : side + outputs].double(), whole[:, :, t + 1 : t + 1 + outputs]
    )
    return whole


def close(found: Tensor, truth: Tensor) -> None:
    bound = BOUNDS.get(found.dtype, 1e-12)
    assert float((found.double() - truth).norm() / truth.norm()) < bound


def tile_op(implementation: conv.Implementation, side: int, outputs: int, dtype: str = "fp32") -> conv.Op:
    return conv.tile(
        implementation, layers=LAYERS, batch=BATCH, channels=CHANNELS, side=side, outputs=outputs, dtype=dtype
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("side", "outputs", "t"), [(1, 1, 0), (4, 4, 11), (8, 3, 15)])
def test_tiles_in_plain_torch(implementation: conv.Implementation, side: int, outputs: int, t: int) -> None:
    y, z = levels(torch.float64, 19)
    taps = drawn(torch.float64, LAYERS, 1, 19, CHANNELS, seed=3)
    op = tile_op(implementation, side, outputs, "fp64")
    truth = truth_of(y, taps, z, side, outputs, t)
    by_fft = op.kind.endswith("fft")
    operand = tile_spectrum(op.kind, taps, side) if by_fft else taps[:, :, 1 : side + outputs]
    tile_at(op, y, operand, z, ints(t))
    torch.testing.assert_close(z, truth)


@by_kernels
@pytest.mark.parametrize("side", [16, 24])
def test_few_layers_are_transformed_at_a_time(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too long for a kernel of its own goes through memory, layer by layer if it is much."""
    taps = drawn(torch.float32, LAYERS, 1, 3 * side, CHANNELS, seed=3).to(DEVICE)
    whole = tile_spectrum("tile_fft", taps, side)
    monkeypatch.setattr(tensors, "MOST_NUMBERS", 1)
    monkeypatch.setattr(placed_tiles, "has_kernel", lambda x: x.dtype != torch.float64)
    torch.testing.assert_close(tile_spectrum("tile_fft", taps, side), whole)
    y, z = (x.to(DEVICE) for x in levels(torch.float32, 3 * side))
    truth = truth_of(y, taps, z, side, side, side + 4)
    tile_at(tile_op("fft", side, side), y, whole, z, ints(side + 4))
    close(z, truth)


@by_kernels
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("side", "outputs", "t"), [(16, 16, 31), (16, 5, 15), (1, 1, 30)])
def test_tiles_by_kernels(
    implementation: conv.Implementation, side: int, outputs: int, t: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not HAS_GPU:
        monkeypatch.setattr(placed_tiles, "has_kernel", lambda x: x.dtype != torch.float64)
    y, z = levels(torch.float32, 48)
    taps = drawn(torch.float32, LAYERS, 1, 48, CHANNELS, seed=3)
    op = tile_op(implementation, side, outputs)
    truth = truth_of(y, taps, z, side, outputs, t)
    operand = taps[:, :, 1 : side + outputs]
    if op.kind == "tile_flash_fft" and side >= 16:
        operand = right_angle_spectrum(taps, side)
    elif op.kind.endswith("fft"):
        operand = tile_spectrum("tile_fft", taps, side)
    tile_at(op, y, operand, z, ints(t))
    close(z, truth)


@by_kernels
@pytest.mark.parametrize("t", [14, 15, 31, 44, 45])
def test_no_tile_reaches_beyond_all_positions(t: int) -> None:
    """The next sequence lies behind a sequence's last position."""
    y, z = levels(torch.float32, 47)
    taps = drawn(torch.float32, LAYERS, 1, 47, CHANNELS, seed=3)
    truth = truth_of(y, taps, z, 16, 2, t) if 15 <= t <= 44 else z.double()
    moved = Moved(ints(t), 15, 44)
    direct_tile(y[:, :, :16], taps[:, :, 1:18], z[:, :, 16:18], moved=moved)
    close(z, truth)


@by_kernels
@pytest.mark.parametrize("fused", [True, False])
@slow
def test_transforms_move_in_one_launch_and_in_three(fused: bool) -> None:
    side, outputs, t = (16, 9, 20) if fused else (16, 16, 27)
    y, z = levels(torch.float32, 48)
    taps = drawn(torch.float32, LAYERS, 1, 48, CHANNELS, seed=3)
    spectrum, expected = right_angle_spectrum(taps, side), z.double()
    inputs = y[:, :, t + 1 - side : t + 1].double()
    reference_fft_tile(inputs, spectrum, expected[:, :, t + 1 : t + 1 + outputs])
    config = FftConfig((4, 4), 16, 4, fused=fused, layers=None if fused else 1)
    moved = Moved(ints(t), side - 1, 48 - 1 - outputs)
    fft_tile(y[:, :, :side], spectrum, z[:, :, side : side + outputs], moved=moved, config=config)
    close(z, expected)


@by_kernels
@slow
def test_products_move() -> None:
    side, outputs, t = 8, 8, 19
    y, z = levels(torch.float32, 40)
    taps = drawn(torch.float32, LAYERS, 1, 40, CHANNELS, seed=3)
    truth = truth_of(y, taps, z, side, outputs, t)
    moved = Moved(ints(t), side - 1, 40 - 1 - outputs)
    toeplitz_tile(y[:, :, :side], taps[:, :, 1:16], z[:, :, side : side + outputs], moved=moved)
    close(z, truth)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=by_kernels), False])
@pytest.mark.parametrize(("since", "t", "most"), [(0, 1, 1), (0, 9, 16), (3, 9, 8), (0, 19, 32)])
def test_rows(kernels: bool, since: int, t: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels and not HAS_GPU:
        monkeypatch.setattr(placed_tiles, "has_kernel", lambda x: True)
    y, z = levels(torch.float32 if kernels else torch.float64, 20)
    taps = drawn(y.dtype, LAYERS, 1, 20, CHANNELS, seed=3)
    truth = z.double()
    lags = taps[:, :, 1 : t - since + 1].flip(2).double()
    truth[:, :, t] += (y[:, :, since:t].double() * lags).sum(2)
    row_at(y, taps[:, :, 1:], z, ints(t), most=most, since=since)
    close(z, truth)


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=by_kernels), False])
@pytest.mark.parametrize(("t", "most"), [(0, 19), (11, 8), (18, 1), (19, 1)])
def test_columns(kernels: bool, t: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels and not HAS_GPU:
        monkeypatch.setattr(placed_tiles, "has_kernel", lambda x: True)
    y, z = levels(torch.float32 if kernels else torch.float64, 20)
    taps = drawn(y.dtype, LAYERS, 1, 20, CHANNELS, seed=3)
    truth = z.double()
    truth[:, :, t + 1 :] += y[:, :, t : t + 1].double() * taps[:, :, 1 : 20 - t].double()
    column_at(y, taps[:, :, 1:], z, ints(t), most=most)
    close(z, truth)


@by_kernels
def test_copies_move() -> None:
    x = drawn(torch.float16, 2, 1, 9, 40)
    out = torch.zeros(2, 1, 4, 40, dtype=torch.float16, device=DEVICE)
    copied_at(x[:, :, :4], out, Moved(ints(7), 3, 8))
    assert torch.equal(out, x[:, :, 4:8])
    expected = x.clone()
    expected[:, :, 2:6] = (expected[:, :, 2:6].float() + out.float()).half()
    added_at(out, x[:, :, :4], Moved(ints(5), 3, 8))
    assert torch.equal(x, expected)


@pytest.mark.parametrize("kind", PLACED)
def test_random_inputs_fit(kind: str) -> None:
    shape = {"layers": 1, "batch": 1, "channels": 4}
    op: conv.Op
    if kind == "conv_row":
        op = conv.conv_row(**shape, inputs=5, dtype="fp64")
    elif kind == "conv_column":
        op = conv.conv_column(**shape, outputs=5, dtype="fp64")
    else:
        name = kind.removeprefix("tile_")
        op = conv.tile(name, **shape, side=4, outputs=4, dtype="fp64")  # type: ignore[arg-type]
    generator = torch.Generator(DEVICE).manual_seed(0)
    tensors = PLACED[kind].inputs(op, generator, DEVICE)
    before = tensors[2].clone()
    assert not has_kernel(before)
    PLACED[kind].run(op, *tensors)
    written = (tensors[2] != before).any(dim=(0, 1, 3)).nonzero().ravel().tolist()
    position = int(tensors[3])
    if kind == "conv_row":
        # Five inputs are before it.
        assert written == [position] == [5]
    elif kind == "conv_column":
        assert written == [*range(position + 1, position + 6)]
    else:
        assert written == [4, 5, 6, 7]


def test_positions_that_are_none_are_refused() -> None:
    y, z = levels(torch.float32, 20)
    taps = drawn(torch.float32, LAYERS, 1, 20, CHANNELS, seed=3)[:, :, 1:2]
    for moved, text in (
        (Moved(torch.zeros(1, device=DEVICE), 0, 5), "position has to be int32"),
        (Moved(ints(0), 5, 4), "are none"),
    ):
        with pytest.raises(ValueError, match=text):
            direct_tile(y[:, :, :1], taps, z[:, :, 1:2], moved=moved)
    with pytest.raises(ValueError, match="alike"):
        copied_at(y, z[:, :, :3].clone(), Moved(ints(0), 0, 5))
