"""What the ops of one position do where that position is read on the device.

    cell        out_b   = z_b,t + y_b,t k_0            and y_b,t once more, where it lies still
    store       z_b,t   = x_b            or            x_b g_b
    next_input  a_b,(t+1) = last_b,t + noise_t,b       as far as there is a position t + 1

A captured graph of them is right at every position, and one graph that is replayed stays where the device
keeps what it has just run: 256 graphs of a token step, one for each position, took 4.7 % longer by turns than
one of them again and again (an H200; validate/measured/h200_tiling_step_graphs.csv). Matrix products between
them read and write tensors that do not move.

Layouts: y, z, a, last [batch, positions, channels], tap [1 or batch, channels], noise [positions, batch,
channels], x, g, out [batch, channels]; position int32 [1]. Sums are made in fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.decoder.checks import check_like, check_written, kind
from kernels.decoder.split_kv import launched
from kernels.gpu import gpu_of
from kernels.kernel import has_kernel
from kernels.long_convolution.tensors import FORMATS, wide
from kernels.long_convolution.triton_rows import check_number

# Channels of a program, and its warps: a number for each thread.
BLOCK, WARPS = 128, 4


class Placed(NamedTuple):
    """How the three are carried out; see the head of this file. Each writes what it is given last."""

    cell: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
    store: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    next_input: Callable[[Tensor, Tensor, Tensor, Tensor], None]


def placed_for(x: Tensor) -> Placed:
    """By kernels where Triton computes with x, else in plain torch."""
    return KERNELS if has_kernel(x) else REFERENCES


def cell_at(y: Tensor, tap: Tensor, z: Tensor, position: Tensor, still: Tensor, out: Tensor) -> None:
    """Writes z + y tap at the position to `out`, and y there to `still`. Raises ValueError for tensors that
    do not fit."""
    _check(position, y=y, z=z)
    check_written("out", out, y, tap, z, still)
    check_written("still", still, y, tap, z)
    batch, _, channels = y.shape
    for name, x in (("still", still), ("out", out)):
        check_like(name, x, (batch, channels), y.dtype)
    if tuple(z.shape) != tuple(y.shape) or tuple(tap.shape) not in ((1, channels), (batch, channels)):
        raise ValueError(f"z {kind(z)} and tap {kind(tap)} do not fit y {kind(y)}")
    _cell_kernel[_grid(y)](
        position, y, tap, z, still, out, channels,
        *y.stride()[:2], 0 if tap.shape[0] == 1 else tap.stride(0), *z.stride()[:2],
        still.stride(0), out.stride(0), BLOCK=BLOCK, **_launched(y),
    )  # fmt: skip


@triton.jit
def _cell_kernel(
    position_ptr, y_ptr, tap_ptr, z_ptr, still_ptr, out_ptr, channels,
    y_sequence, y_row, tap_sequence, z_sequence, z_row, still_row, out_row,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (batch, blocks of channels), as of the other two."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at, row, column, there = _place(position_ptr, channels, BLOCK)
    y = tl.load(y_ptr + row * y_sequence + at * y_row + column, mask=there)
    z = tl.load(z_ptr + row * z_sequence + at * z_row + column, mask=there).to(tl.float32)
    tap = tl.load(tap_ptr + row * tap_sequence + column, mask=there).to(tl.float32)
    tl.store(still_ptr + row * still_row + column, y, mask=there)
    tl.store(out_ptr + row * out_row + column, z + y.to(tl.float32) * tap, mask=there)


def store_at(x: Tensor, factor: Tensor | None, position: Tensor, z: Tensor) -> None:
    """Writes x, or its product with a factor, to the position of z. Raises ValueError for tensors that do not
    fit."""
    _check(position, z=z)
    check_written("z", z, x, factor)
    for name, given in (("x", x), ("factor", factor)):
        if given is not None:
            check_like(name, given, (z.shape[0], z.shape[2]), z.dtype)
    by = x if factor is None else factor
    _store_kernel[_grid(z)](
        position, x, by, z, z.shape[2], x.stride(0), by.stride(0), *z.stride()[:2],
        TIMES=factor is not None, BLOCK=BLOCK, **_launched(z),
    )  # fmt: skip


@triton.jit
def _store_kernel(
    position_ptr, x_ptr, factor_ptr, z_ptr, channels, x_row, factor_row, z_sequence, z_row,
    TIMES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at, row, column, there = _place(position_ptr, channels, BLOCK)
    x = tl.load(x_ptr + row * x_row + column, mask=there).to(tl.float32)
    if TIMES:
        x *= tl.load(factor_ptr + row * factor_row + column, mask=there).to(tl.float32)
    tl.store(z_ptr + row * z_sequence + at * z_row + column, x, mask=there)


def next_input_at(last: Tensor, noise: Tensor, position: Tensor, a: Tensor) -> None:
    """Writes the last level at the position, and noise, to the position of `a` after it, if there is one.
    Raises ValueError for tensors that do not fit."""
    _check(position, last=last, a=a)
    check_written("a", a, last, noise)
    batch, room, channels = a.shape
    if tuple(last.shape) != tuple(a.shape) or tuple(noise.shape) != (room, batch, channels):
        raise ValueError(f"last {kind(last)} and noise {kind(noise)} do not fit a {kind(a)}")
    _next_input_kernel[_grid(a)](
        position, last, noise, a, room, channels,
        *last.stride()[:2], *noise.stride()[:2], *a.stride()[:2], BLOCK=BLOCK, **_launched(a),
    )  # fmt: skip


@triton.jit
def _next_input_kernel(
    position_ptr, last_ptr, noise_ptr, a_ptr, room, channels,
    last_sequence, last_row, noise_row, noise_sequence, a_sequence, a_row,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at, row, column, there = _place(position_ptr, channels, BLOCK)
    there &= at + 1 < room
    x = tl.load(last_ptr + row * last_sequence + at * last_row + column, mask=there).to(tl.float32)
    x += tl.load(noise_ptr + at * noise_row + row * noise_sequence + column, mask=there).to(tl.float32)
    tl.store(a_ptr + row * a_sequence + (at + 1) * a_row + column, x, mask=there)


@triton.jit
def _place(position_ptr, channels, BLOCK: tl.constexpr):
    """The position, the sequence, some channels, and which of these there are."""
    at = tl.load(position_ptr).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return at, tl.program_id(0).to(tl.int64), column, column < channels


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
    y: Tensor, tap: Tensor, z: Tensor, position: Tensor, still: Tensor, out: Tensor
) -> None:
    """As `cell_at` in plain torch, any float dtype; nothing of the host waits for the position."""
    here = _row(y, position)
    still.copy_(here)
    out.copy_(wide(_row(z, position)) + wide(here) * wide(tap))


def reference_store_at(x: Tensor, factor: Tensor | None, position: Tensor, z: Tensor) -> None:
    """As `store_at` in plain torch."""
    new = x if factor is None else (wide(x) * wide(factor)).to(z.dtype)
    z.index_copy_(1, position.long(), new[:, None])


def reference_next_input_at(last: Tensor, noise: Tensor, position: Tensor, a: Tensor) -> None:
    """As `next_input_at` in plain torch."""
    t = position.long()
    after = (t + 1).clamp(max=a.shape[1] - 1)
    new = wide(_row(last, position)) + wide(noise.index_select(0, t)[0])
    kept = torch.where(after > t, new.to(a.dtype), _row(a, after))
    a.index_copy_(1, after, kept[:, None])


def _row(x: Tensor, position: Tensor) -> Tensor:
    """x [batch, channels] at the position."""
    return x.index_select(1, position.long())[:, 0]


KERNELS = Placed(cell_at, store_at, next_input_at)
REFERENCES = Placed(reference_cell_at, reference_store_at, reference_next_input_at)
