"""The kernels of long convolutions and linear attention as operators of torch, for torch.compile and export.

    torch.ops.simcore.linear_attention(q, k, v, decay, state)      Triton on a GPU, else the plain reference
    torch.ops.simcore.direct_tile(y, taps, z)

Each operator has a fake form that only returns shapes. The operators of long convolutions add to z in place.
Operators allocate their workspaces at each call; for launches of a captured graph that must not allocate,
call the functions themselves.
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import has_kernel
from simcore.kernels.linear_attention.triton_chunked import chunked_linear_attention
from simcore.kernels.linear_attention.triton_step import linear_attention_step as triton_step
from simcore.kernels.linear_attention.triton_step import reference_linear_attention_step
from simcore.kernels.linear_attention.triton_tensors import reference_linear_attention
from simcore.kernels.long_convolution.triton_direct import direct_tile as triton_direct_tile
from simcore.kernels.long_convolution.triton_direct import reference_direct_tile
from simcore.kernels.long_convolution.triton_fft import fft_tile as triton_fft_tile
from simcore.kernels.long_convolution.triton_fft import reference_fft_tile
from simcore.kernels.long_convolution.triton_rows import conv_column as triton_conv_column
from simcore.kernels.long_convolution.triton_rows import conv_row as triton_conv_row
from simcore.kernels.long_convolution.triton_rows import reference_conv_column, reference_conv_row

Two = tuple[Tensor, Tensor]


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states and sums."""
    return torch.promote_types(dtype, torch.float32)


@torch.library.custom_op("simcore::linear_attention", mutates_args=())
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    lengths: Tensor | None = None,
) -> Two:
    """`simcore.kernels.linear_attention.triton_chunked`: q [batch, q_heads, length, rank], k, v of kv_heads;
    out [batch, q_heads, length, dim] and the final state [batch, kv_heads, rank, dim]."""
    if has_kernel(q):
        return chunked_linear_attention(q, k, v, decay, state, lengths=lengths)
    wide = summed_in(q.dtype)
    given = None if state is None else state.to(wide)
    out, last = reference_linear_attention(q.to(wide), k.to(wide), v.to(wide), decay, given, lengths=lengths)
    return out.to(q.dtype), last


@linear_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> Two:
    last = q.new_empty(*k.shape[:2], q.shape[-1], v.shape[-1], dtype=summed_in(q.dtype))
    return q.new_empty(*q.shape[:3], v.shape[-1]), last


@torch.library.custom_op("simcore::linear_attention_step", mutates_args=("state",))
def linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None
) -> Tensor:
    """One token: q [batch, q_heads, rank] to [batch, q_heads, dim]; updates state [batch, kv_heads, rank,
    dim] in place."""
    return (triton_step if has_kernel(q) else reference_linear_attention_step)(q, k, v, state, decay)


@linear_attention_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[-1])


@torch.library.custom_op("simcore::direct_tile", mutates_args=("z",))
def direct_tile(y: Tensor, taps: Tensor, z: Tensor) -> None:
    """`simcore.kernels.long_convolution.triton_direct`: adds a square tile to z by direct sums; taps from lag
    1 on."""
    (triton_direct_tile if has_kernel(y) else reference_direct_tile)(y, taps, z)


@direct_tile.register_fake
def _(y: Tensor, taps: Tensor, z: Tensor) -> None:
    return None


@torch.library.custom_op("simcore::fft_tile", mutates_args=("z",))
def fft_tile(y: Tensor, spectrum: Tensor, z: Tensor) -> None:
    """`simcore.kernels.long_convolution.triton_fft`: adds a square tile to z by the right-angle spectrum of
    the taps."""
    (triton_fft_tile if has_kernel(y) else reference_fft_tile)(y, spectrum, z)


@fft_tile.register_fake
def _(y: Tensor, spectrum: Tensor, z: Tensor) -> None:
    return None


@torch.library.custom_op("simcore::conv_row", mutates_args=("z",))
def conv_row(y: Tensor, taps: Tensor, z: Tensor) -> None:
    """`simcore.kernels.long_convolution.triton_rows`: adds the terms of all inputs y to one position z; taps
    from lag 1 on."""
    (triton_conv_row if has_kernel(y) else reference_conv_row)(y, taps, z)


@conv_row.register_fake
def _(y: Tensor, taps: Tensor, z: Tensor) -> None:
    return None


@torch.library.custom_op("simcore::conv_column", mutates_args=("z",))
def conv_column(y: Tensor, taps: Tensor, z: Tensor) -> None:
    """`simcore.kernels.long_convolution.triton_rows`: adds the terms of one input y to all positions z; taps
    from lag 1 on."""
    (triton_conv_column if has_kernel(y) else reference_conv_column)(y, taps, z)


@conv_column.register_fake
def _(y: Tensor, taps: Tensor, z: Tensor) -> None:
    return None
