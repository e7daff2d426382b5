"""Tiles at a position that the device reads: one captured graph of a tile serves all positions.

    y, z of a tile after position t   =   those of the tile after `origin`, t - origin rows further in memory

Kernels that sum or transform in registers move their pointers. What a framework runs as several kernels reads
tensors of its own: `copied_at` copies the inputs there, and `added_at` adds the result. Tiles of any kind:
`simcore.kernels.long_convolution.placed_tiles`. Layouts: `simcore.kernels.long_convolution.tensors`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_written, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of, launching

# Numbers of a program of a copy, and its warps: eight a thread. Its channels where a transform has left
# neighbouring positions in neighbouring places.
NUMBERS, WARPS, TURNED = 1024, 4, 32


class Moved(NamedTuple):
    """Where a launch works: y and z are given for position `origin`; the launch works at the `position`
    (int32 [1]) that it reads on the device, so many rows further. Nothing is done outside `origin` to
    `last`."""

    position: Tensor
    origin: int
    last: int


def check_moved(moved: Moved | None) -> None:
    """Raises ValueError for a position that is not one int32, or for an empty range of positions."""
    if moved is None:
        return
    if moved.position.dtype != torch.int32 or moved.position.numel() != 1:
        raise ValueError(f"position has to be int32 of one element, not {kind(moved.position)}")
    if not 0 <= moved.origin <= moved.last:
        raise ValueError(f"positions from {moved.origin} to {moved.last} are none")


def moved_arguments(moved: Moved | None) -> tuple[Tensor | None, int, int]:
    """Returns the arguments of a kernel: pointer, origin, last."""
    return (None, 0, 0) if moved is None else (moved.position, moved.origin, moved.last)


@triton.jit
def rows_further(position_ptr, origin, last):
    """How many rows further a launch works, int64: never outside the tensors, whatever the position is."""
    at = tl.load(position_ptr)
    return (tl.minimum(tl.maximum(at, origin), last) - origin).to(tl.int64)


@triton.jit
def is_elsewhere(position_ptr, origin, last):
    """Whether there is nothing to do at the position."""
    at = tl.load(position_ptr)
    return (at < origin) | (at > last)


# -- copies ------------------------------------------------------------------------------------------------


@launching
def copied_at(y: Tensor, out: Tensor, moved: Moved) -> Tensor:
    """Copies y [layers, batch, rows, channels], moved, to `out` of the same shape; returns `out`. Raises
    ValueError for tensors that do not fit."""
    _launch(y, out, moved, adds=False)
    return out


@launching
def added_at(more: Tensor, z: Tensor, moved: Moved) -> Tensor:
    """Adds `more`, of any strides, to z, moved, both [layers, batch, rows, channels], in fp32; returns z.
    Raises ValueError for tensors that do not fit."""
    _launch(more, z, moved, adds=True)
    return z


def _launch(x: Tensor, out: Tensor, moved: Moved, *, adds: bool) -> None:
    check_moved(moved)
    check_written("what is written", out, x)
    if x.dim() != 4 or x.shape != out.shape or out.stride(-1) != 1:
        raise ValueError(
            f"{kind(x)} and {kind(out)} have to be alike, of four dimensions; channels contiguous"
        )
    layers, batch, rows, channels = x.shape
    width = min(NUMBERS if x.stride(-1) == 1 else TURNED, triton.next_power_of_2(channels))
    each = NUMBERS // width
    grid = triton.cdiv(rows, each) * triton.cdiv(channels, width), batch, layers
    _copy_kernel[grid](
        x, out, *moved, rows, channels, *x.stride(), *out.stride()[:3],
        ROWS=each, WIDTH=width, ADDS=adds, **launched(WARPS, gpu_of(x).chained),
    )  # fmt: skip


@triton.jit(do_not_specialize=["origin", "last"])
def _copy_kernel(
    x_ptr, out_ptr, position_ptr, origin, last, rows, channels,
    x_layer, x_sequence, x_row, x_channel, out_layer, out_sequence, out_row,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows * blocks of channels, batch, layers). ADDS: out is moved, else x."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if is_elsewhere(position_ptr, origin, last):
        return
    further = rows_further(position_ptr, origin, last)
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    across = tl.cdiv(channels, WIDTH)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    column = (tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH))[None, :]
    there = (row < rows) & (column < channels)
    x_at = x_ptr + layer * x_layer + sequence * x_sequence + column * x_channel
    out_at = out_ptr + layer * out_layer + sequence * out_sequence + column
    if ADDS:
        out_at += (row + further) * out_row
        x = tl.load(x_at + row * x_row, mask=there, other=0.0).to(tl.float32)
        x += tl.load(out_at, mask=there, other=0.0).to(tl.float32)
    else:
        out_at += row * out_row
        x = tl.load(x_at + (row + further) * x_row, mask=there, other=0.0)
    tl.store(out_at, x.to(out_ptr.dtype.element_ty), mask=there)
