"""Copies into, within and from caches and buffers, without any computation.

kv_append            cache[position of t] = k[t], v[t]
kv_copy              slot to = slot from
receive_speculation  x = receive buffer
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.checks import check_like, kind
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op

# Elements of one program that copies rows.
BLOCK = 1024


def reference_kv_append(
    k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor, *, lengths: Tensor | None = None
) -> None:
    """As `kv_append`, in plain torch and in any float dtype."""
    for x, to in ((k, k_to), (v, v_to)):
        if lengths is None:
            to.copy_(x)
            continue
        for token, length in enumerate(lengths.tolist()):
            if 1 <= length <= to.shape[2]:
                to[token, :, length - 1] = x[token]


@triton.jit
def _kv_append_kernel(
    k_ptr, v_ptr, k_to_ptr, v_to_ptr, lengths_ptr, gate_ptr,
    k_token, k_head, v_token, v_head, k_to_token, k_to_head, v_to_token, v_to_head, heads, d,
    capacity, k_to_slot, v_to_slot,
    GATED: tl.constexpr, PLACED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """All heads of one token: program (token,). PLACED: where it is written, its length says."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (column < d)
    if PLACED:
        position = tl.load(lengths_ptr + token).to(tl.int64) - 1
        inside = inside & (position >= 0) & (position < capacity)
        k_to_ptr += position * k_to_slot
        v_to_ptr += position * v_to_slot
    k = tl.load(k_ptr + token * k_token + head * k_head + column, mask=inside)
    v = tl.load(v_ptr + token * v_token + head * v_head + column, mask=inside)
    to_k = k_to_ptr + token * k_to_token + head.to(tl.int64) * k_to_head + column
    to_v = v_to_ptr + token * v_to_token + head.to(tl.int64) * v_to_head + column
    tl.store(to_k, k.to(k_to_ptr.dtype.element_ty), mask=inside)
    tl.store(to_v, v.to(v_to_ptr.dtype.element_ty), mask=inside)


@launching
def kv_append(
    k: Tensor,
    v: Tensor,
    k_to: Tensor,
    v_to: Tensor,
    *,
    lengths: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Writes k, v [tokens, kv_heads, head_dim] into views of the cache of that size; tokens and heads may be
    any distance apart. With a `gate` (int32 [1]) of 0 it writes nothing.

    With `lengths` (int32 [tokens], read on the device, the new token included) k_to and v_to are whole caches
    [tokens, kv_heads, capacity, head_dim], and token b goes to position lengths[b] - 1 of its sequence; a
    token without a place there is not written. Raises ValueError if the elements of a head are not
    contiguous.
    """
    tokens, heads, d = k.shape
    places = (k_to.shape[2],) if lengths is not None else ()
    to = (tokens, heads, *places, d)
    fits = all(x.shape == k.shape for x in (k, v)) and all(x.shape == to for x in (k_to, v_to))
    if not fits or any(x.stride(-1) != 1 for x in (k, v, k_to, v_to)):
        raise ValueError(f"kv_append takes heads {tuple(k.shape)} of contiguous elements")
    if lengths is not None:
        check_like("lengths", lengths, (tokens,), torch.int32)
    strides = [stride for x in (k, v, k_to, v_to) for stride in x.stride()[:2]]
    slots = (*places, k_to.stride(2), v_to.stride(2)) if lengths is not None else (0, 0, 0)
    _kv_append_kernel[(tokens,)](
        k, v, k_to, v_to, lengths, gate, *strides, heads, d, *slots,
        GATED=gate is not None, PLACED=lengths is not None,
        HEADS=triton.next_power_of_2(heads), DIM=triton.next_power_of_2(d), num_warps=4,
    )  # fmt: skip


def _append(op: Op, k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor) -> None:
    del op
    kv_append(k, v, k_to, v_to)


def _reference_append(op: Op, k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor) -> None:
    del op
    reference_kv_append(k, v, k_to, v_to)


def _append_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["tokens"], op["kv_heads"], op["head_dim"]
    return tuple(random_tensor(op, generator, device, *size) for _ in range(4))


def kv_copy(op: Op, source: Tensor, target: Tensor) -> None:
    """Copies the cache of `tokens` tokens, `width` elements each, from one view to another."""
    del op
    target.copy_(source)


def _copy_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(random_tensor(op, generator, device, op["tokens"], op["width"]) for _ in range(2))


@triton.jit
def _move_kernel(
    from_ptr, to_ptr, gate_ptr, from_row, to_row, width, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of a row: program (row, piece)."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(from_ptr + row * from_row + column, mask=inside)
    tl.store(to_ptr + row * to_row + column, x.to(to_ptr.dtype.element_ty), mask=inside)


@launching
def move(source: Tensor, target: Tensor, *, gate: Tensor | None = None) -> None:
    """Writes rows source [rows, width] to target, in the target's format; with a `gate` (int32 [1]) of 0 it
    writes nothing. Rows may be any distance apart. Raises ValueError if the elements of a row are not
    contiguous."""
    if source.shape != target.shape or source.dim() != 2 or {source.stride(1), target.stride(1)} != {1}:
        raise ValueError(f"move takes rows of contiguous elements, not {kind(source)} to {kind(target)}")
    rows, width = source.shape
    _move_kernel[(rows, triton.cdiv(width, BLOCK))](
        source, target, gate, source.stride(0), target.stride(0), width,
        GATED=gate is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip


def receive_speculation(op: Op, buffer: Tensor, x: Tensor) -> None:
    """Copies the receive buffer [tokens, width] to x."""
    del op
    x.copy_(buffer)


KV_APPEND = Kernel(by_device(_append, _reference_append), _reference_append, _append_inputs)
KV_COPY = Kernel(kv_copy, kv_copy, _copy_inputs)
RECEIVE_SPECULATION = Kernel(receive_speculation, receive_speculation, _copy_inputs)
