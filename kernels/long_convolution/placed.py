"""The ops of one position if the device reads that position.

    cell        out_b = z_b,t + y_b k_0     y_b is written to the level below at t, or is read from there
    next_input  last_b,t = x_b              a_b,(t+1) = x_b + noise_t,b, if there is a position t + 1

A captured graph of these ops is valid at every position, and a single graph that is replayed stays where the
device keeps its most recent work: 256 graphs of a token step, one for each position, took 4.7 % longer in
turn than one of them again and again (an H200; validate/measured/h200_tiling_step_graphs.csv). Matrix
products between the ops read and write tensors that do not move; the next op writes their result to its
place.

Layouts: level, z, a, last [batch, positions, channels], tap [1 or batch, channels], noise [positions, batch,
channels], y, x, out [batch, channels]; position int32 [1]. Sums are made in fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_like, check_written, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.kernel import has_kernel
from simcore.kernels.long_convolution.tensors import FORMATS, wide
from simcore.kernels.long_convolution.triton_rows import check_number

# Channels of a program, and its warps: one number a thread.
BLOCK, WARPS = 128, 4


class Placed(NamedTuple):
    """The implementations of the two ops; see `cell_at` and `next_input_at`."""

    cell: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], None]
    next_input: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


def placed_for(x: Tensor) -> Placed:
    """Returns the kernels if Triton computes with x, else the ops in plain torch."""
    return KERNELS if has_kernel(x) else REFERENCES


@launching
def cell_at(
    y: Tensor, level: Tensor, tap: Tensor, z: Tensor, position: Tensor, out: Tensor, first: bool
) -> None:
    """Writes z at the position, plus y tap, to `out`. Writes y to `level` at the position; the `first` cell
    instead reads y from there and writes it to `y`. Raises ValueError for tensors that do not fit."""
    _check(position, level=level, z=z)
    check_written("out", out, y, level, tap, z)
    check_written("y" if first else "level", y if first else level, tap, z)
    batch, _, channels = level.shape
    for name, x in (("y", y), ("out", out)):
        check_like(name, x, (batch, channels), level.dtype)
    if tuple(z.shape) != tuple(level.shape):
        raise ValueError(f"z {kind(z)} does not fit level {kind(level)}")
    check_like("tap", tap, (1 if tap.shape[0] == 1 else batch, channels), level.dtype)
    _cell_kernel[_grid(level)](
        position, y, level, tap, z, out, level.shape[1], channels,
        y.stride(0), *level.stride()[:2], 0 if tap.shape[0] == 1 else tap.stride(0), *z.stride()[:2],
        out.stride(0), FIRST=first, BLOCK=BLOCK, **_launched(level),
    )  # fmt: skip


@triton.jit
def _cell_kernel(
    position_ptr, y_ptr, level_ptr, tap_ptr, z_ptr, out_ptr, room, channels,
    y_row, level_sequence, level_row, tap_sequence, z_sequence, z_row, out_row,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (batch, blocks of channels), as of the other one."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at, row, column, there = _place(position_ptr, room, channels, BLOCK)
    y_at = y_ptr + row * y_row + column
    level_at = level_ptr + row * level_sequence + at * level_row + column
    z = tl.load(z_ptr + row * z_sequence + at * z_row + column, mask=there).to(tl.float32)
    tap = tl.load(tap_ptr + row * tap_sequence + column, mask=there).to(tl.float32)
    if FIRST:
        y = tl.load(level_at, mask=there)
        tl.store(y_at, y, mask=there)
    else:
        y = tl.load(y_at, mask=there)
        tl.store(level_at, y, mask=there)
    tl.store(out_ptr + row * out_row + column, z + y.to(tl.float32) * tap, mask=there)


@launching
def next_input_at(x: Tensor, last: Tensor, noise: Tensor, position: Tensor, a: Tensor) -> None:
    """Writes x to the last level at the position, and x plus noise to `a` at the position after it, if there
    is one. Raises ValueError for tensors that do not fit."""
    _check(position, last=last, a=a)
    check_written("a", a, x, last, noise)
    check_written("last", last, x, noise)
    batch, room, channels = a.shape
    check_like("x", x, (batch, channels), a.dtype)
    check_like("noise", noise, (room, batch, channels), a.dtype)
    if tuple(last.shape) != tuple(a.shape):
        raise ValueError(f"last {kind(last)} does not fit a {kind(a)}")
    _next_input_kernel[_grid(a)](
        position, x, last, noise, a, room, channels,
        x.stride(0), *last.stride()[:2], *noise.stride()[:2], *a.stride()[:2], BLOCK=BLOCK, **_launched(a),
    )  # fmt: skip


@triton.jit
def _next_input_kernel(
    position_ptr, x_ptr, last_ptr, noise_ptr, a_ptr, room, channels,
    x_row, last_sequence, last_row, noise_row, noise_sequence, a_sequence, a_row,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at, row, column, there = _place(position_ptr, room, channels, BLOCK)
    x = tl.load(x_ptr + row * x_row + column, mask=there)
    tl.store(last_ptr + row * last_sequence + at * last_row + column, x, mask=there)
    there &= at + 1 < room
    noise_at = noise_ptr + at * noise_row + row * noise_sequence + column
    x = x.to(tl.float32) + tl.load(noise_at, mask=there).to(tl.float32)
    tl.store(a_ptr + row * a_sequence + (at + 1) * a_row + column, x, mask=there)


@triton.jit
def _place(position_ptr, room, channels, BLOCK: tl.constexpr):
    """The position, the sequence, some channels, and which of these there are; none beyond all positions."""
    at = tl.load(position_ptr).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return at, tl.program_id(0).to(tl.int64), column, (column < channels) & (at >= 0) & (at < room)


def _grid(x: Tensor) -> tuple[int, int]:
    return x.shape[0], triton.cdiv(x.shape[2], BLOCK)


def _launched(x: Tensor) -> dict[str, int | bool]:
    return launched(WARPS, gpu_of(x).chained)


def _check(position: Tensor, **levels: Tensor) -> None:
    check_number("position", position)
    for name, x in levels.items():
        if x.dim() != 3 or x.dtype not in FORMATS or (x.numel() and x.stride(-1) != 1):
            raise ValueError(
                f"{name} has to be [sequences, positions, channels] in fp32, fp16 or bf16, channels"
                f" contiguous, not {kind(x)}"
            )


# -- references --------------------------------------------------------------------------------------------


def reference_cell_at(
    y: Tensor, level: Tensor, tap: Tensor, z: Tensor, position: Tensor, out: Tensor, first: bool
) -> None:
    """As `cell_at` in plain torch, any float dtype; the host does not wait for the position."""
    if first:
        y.copy_(_row(level, position))
    else:
        level.index_copy_(1, position.long(), y[:, None])
    out.copy_(wide(_row(z, position)) + wide(y) * wide(tap))


def reference_next_input_at(x: Tensor, last: Tensor, noise: Tensor, position: Tensor, a: Tensor) -> None:
    """As `next_input_at` in plain torch."""
    t = position.long()
    last.index_copy_(1, t, x[:, None])
    after = (t + 1).clamp(max=a.shape[1] - 1)
    new = wide(x) + wide(noise.index_select(0, t)[0])
    a.index_copy_(1, after, torch.where(after > t, new.to(a.dtype), _row(a, after))[:, None])


def _row(x: Tensor, position: Tensor) -> Tensor:
    """Returns x [batch, channels] at the position."""
    return x.index_select(1, position.long())[:, 0]


KERNELS = Placed(cell_at, next_input_at)
REFERENCES = Placed(reference_cell_at, reference_next_input_at)
