"""Rows, columns and tiles of a long convolution at a position that the device reads.

    row      z_t     += sum over i of  y_i k_(t-i)                  t the position, since <= i < t
    column   z_(t+j) += y_t k_j                                     for j = 1 .. positions - 1 - t
    tile     z_(t+1+v) += sum over u < U of  y_(t+1-U+u) k_(U+v-u)  for v = 0 .. outputs - 1     (U = side)

y and z are all positions of the levels below and of the levels, [layers, batch, positions, channels];
position int32 [1]. A captured tile serves all positions. A row or a column has programs for `most` inputs or
outputs; its graph serves all positions that have no more. On a GPU the kernels of the table run, moved; a
framework's kernels on copies (`moved`). Elsewhere, and in fp64, the same runs on rows that are selected by
index, and the host does not wait for the position.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from simcore.kernels.kernel import Run, has_kernel
from simcore.kernels.long_convolution.direct import (
    TILE_CONV,
    TILE_FLASH_CONV,
    activations,
    depthwise_conv,
    pad,
    random_taps,
)
from simcore.kernels.long_convolution.moved import Moved, added_at, copied_at
from simcore.kernels.long_convolution.spectral import (
    TILE_FFT,
    TILE_FLASH_FFT,
    fft_parts,
    outputs_by_fft,
    tile_spectrum,
)
from simcore.kernels.long_convolution.tensors import wide
from simcore.kernels.long_convolution.triton_direct import direct_tile
from simcore.kernels.long_convolution.triton_fft import fft_tile
from simcore.kernels.long_convolution.triton_rows import conv_column, conv_row
from simcore.ops.op import Op

__all__ = ["PLACED", "PlacedKernel", "column_at", "power_from", "row_at", "tile_at"]


class PlacedKernel(NamedTuple):
    """How a kind of op runs at a position on the device: `run(op, y, operand, z, position)`, the operand taps
    or a spectrum. `inputs`: random tensors for that, of an op's shape."""

    run: Run
    inputs: Callable[[Op, torch.Generator, torch.device], tuple[Tensor, ...]]


# -- rows and columns --------------------------------------------------------------------------------------


def row_at(y: Tensor, taps: Tensor, z: Tensor, position: Tensor, *, most: int, since: int = 0) -> None:
    """Adds the row of the position, of at most `most` inputs from position `since` on; taps [layers, 1 or
    batch, lags, channels] from lag 1 on."""
    end = min(since + most, taps.shape[2])
    if has_kernel(y):
        conv_row(y[:, :, :end], taps[:, :, :end], z, position=position, since=since)
        return
    t = position.long()
    lag = t - torch.arange(since, end, device=y.device)
    weights = taps.index_select(2, (lag - 1).clamp(0, taps.shape[2] - 1))
    terms = wide(y[:, :, since:end]) * wide(weights) * (lag > 0)[:, None]
    z.index_add_(2, t, terms.sum(2, keepdim=True).to(z.dtype))


def column_at(y: Tensor, taps: Tensor, z: Tensor, position: Tensor, *, most: int) -> None:
    """Adds the column of the position, of at most `most` outputs; taps as in `row_at`."""
    if has_kernel(y):
        conv_column(y, taps, z, position=position, most=most)
        return
    first, room = max(0, z.shape[2] - most), z.shape[2]
    t = position.long()
    lag = torch.arange(first, room, device=y.device) - t
    weights = taps.index_select(2, (lag - 1).clamp(0, taps.shape[2] - 1))
    terms = wide(y.index_select(2, t)) * wide(weights) * (lag > 0)[:, None]
    later = z[:, :, first:]
    later.copy_(wide(later) + terms)


def power_from(n: int) -> int:
    """Returns the least power of two from n on: for so many inputs or outputs a captured graph has programs.

    >>> [power_from(n) for n in (1, 2, 3, 8, 9)]
    [1, 2, 4, 8, 16]
    """
    return 1 << (n - 1).bit_length()


def _row(op: Op, y: Tensor, taps: Tensor, z: Tensor, position: Tensor) -> None:
    row_at(y, taps, z, position, most=power_from(op["inputs"]))


def _column(op: Op, y: Tensor, taps: Tensor, z: Tensor, position: Tensor) -> None:
    column_at(y, taps, z, position, most=power_from(op["outputs"]))


# -- tiles -------------------------------------------------------------------------------------------------


def tile_at(op: Op, y: Tensor, operand: Tensor, z: Tensor, position: Tensor) -> None:
    """Adds the tile after the position. operand: taps [layers, 1 or batch, side + outputs - 1, channels] from
    lag 1 on, or the spectrum of a tile by FFT. Nothing is done where no whole tile ends at the position."""
    side, outputs, room = op["side"], op["outputs"], y.shape[2]
    run = _BY_KERNELS[op.kind] if has_kernel(y) else partial(_by_index, _TABLE[op.kind])
    run(op, y, operand, z, Moved(position, side - 1, room - 1 - outputs))


def _views(op: Op, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inputs and outputs of the first tile."""
    side, outputs = op["side"], op["outputs"]
    return y.narrow(2, 0, side), z.narrow(2, side, outputs)


def _direct(op: Op, y: Tensor, taps: Tensor, z: Tensor, moved: Moved) -> None:
    inputs, sums = _views(op, y, z)
    direct_tile(inputs, taps, sums, moved=moved)


def _flash_fft(op: Op, y: Tensor, cached: Tensor, z: Tensor, moved: Moved) -> None:
    if cached.is_complex():
        _fft(op, y, cached, z, moved)
        return
    inputs, sums = _views(op, y, z)
    fft_tile(inputs, cached, sums, moved=moved)


def _copied(op: Op, y: Tensor, moved: Moved) -> Tensor:
    inputs = y.narrow(2, 0, op["side"])
    return copied_at(inputs, inputs.new_empty(inputs.shape), moved)


def _fft(op: Op, y: Tensor, cached: Tensor, z: Tensor, moved: Moved) -> None:
    for part in fft_parts(op, y):
        more = outputs_by_fft(op, _copied(op, y[part], moved), cached[part])
        added_at(more, _views(op, y[part], z[part])[1], moved)


def _framework_conv(op: Op, y: Tensor, taps: Tensor, z: Tensor, moved: Moved) -> None:
    more = depthwise_conv(op, pad(op, _copied(op, y, moved)), taps)
    added_at(more, _views(op, y, z)[1], moved)


def _by_index(run: Run, op: Op, y: Tensor, operand: Tensor, z: Tensor, moved: Moved) -> None:
    """Runs the table's function on selected rows."""
    after = moved.position.long() + 1
    inputs = y.index_select(2, after - op["side"] + torch.arange(op["side"], device=y.device))
    places = after + torch.arange(op["outputs"], device=y.device)
    sums = z.index_select(2, places)
    run(op, inputs, operand, sums)
    z.index_copy_(2, places, sums)


_BY_KERNELS: Mapping[str, Callable[..., None]] = {
    "tile_conv": _framework_conv,
    "tile_flash_conv": _direct,
    "tile_fft": _fft,
    "tile_flash_fft": _flash_fft,
}
_TABLE: Mapping[str, Run] = {
    "tile_conv": TILE_CONV.run,
    "tile_flash_conv": TILE_FLASH_CONV.run,
    "tile_fft": TILE_FFT.run,
    "tile_flash_fft": TILE_FLASH_FFT.run,
}


# -- inputs ------------------------------------------------------------------------------------------------


def _inputs(
    op: Op, generator: torch.Generator, device: torch.device, positions: int, at: int
) -> tuple[Tensor, ...]:
    """Returns y and z of so many positions, and a position."""
    y, z = (activations(op, generator, device, op["layers"], positions) for _ in range(2))
    return y, z, torch.full((1,), at, dtype=torch.int32, device=device)


def _tile_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    side, outputs = op["side"], op["outputs"]
    y, z, position = _inputs(op, generator, device, side + outputs, side - 1)
    if op.kind.endswith("fft"):
        taps = random_taps(op, generator, device, op["layers"], 2 * side)
        return y, tile_spectrum(op.kind, taps, side), z, position
    return y, random_taps(op, generator, device, op["layers"], side + outputs - 1), z, position


def _line_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Of a row, whose inputs are all before the position, or of a column, whose outputs are all behind it;
    there is room for as many as programs are launched for."""
    row = op.kind == "conv_row"
    count = op["inputs"] if row else op["outputs"]
    lags = power_from(count)
    y, z, position = _inputs(op, generator, device, lags + 1, count if row else lags - count)
    return y, random_taps(op, generator, device, op["layers"], lags), z, position


PLACED: Mapping[str, PlacedKernel] = {
    "conv_row": PlacedKernel(_row, _line_inputs),
    "conv_column": PlacedKernel(_column, _line_inputs),
    **{kind: PlacedKernel(tile_at, _tile_inputs) for kind in _TABLE},
}
