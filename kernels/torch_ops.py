"""The decoding kernels as operators of torch, so that torch.compile and torch.export see through them.

    torch.ops.simcore.decode_attention(q, k, v, lengths, ...)      Triton on a GPU, else the plain reference
    torch.ops.simcore.decode_attention_lse(q, k, v, lengths, ...)  the same, and its log-sum-exp

Each operator has a fake form that only returns shapes. Operators allocate their results at each call, and
have the workspace of their stream. For launches of a captured graph that must not allocate, call the
functions of `simcore.kernels.decoder`, which also take a gate.
"""

from typing import Any

import torch
from torch import Tensor

from simcore.kernels.decoder.activation import activation as triton_activation
from simcore.kernels.decoder.activation import reference_activation
from simcore.kernels.decoder.decode_attention import decode_attention as triton_decode_attention
from simcore.kernels.decoder.decode_attention import reference_decode_attention
from simcore.kernels.decoder.matmul import MOST_ROWS, reference_matmul
from simcore.kernels.decoder.matmul import matmul as triton_matmul
from simcore.kernels.decoder.norm import norm as triton_norm
from simcore.kernels.decoder.norm import reference_norm
from simcore.kernels.decoder.rotary import reference_rotary_append
from simcore.kernels.decoder.rotary import rotary_append as triton_rotary_append
from simcore.kernels.decoder.speculative_attention import decide, reference_speculative_attention
from simcore.kernels.decoder.speculative_attention import (
    speculative_attention as triton_speculative_attention,
)
from simcore.kernels.kernel import has_kernel

Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("simcore::decode_attention", mutates_args=())
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    block_table: Tensor | None = None,
    sinks: int | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`simcore.kernels.decoder.decode_attention`: q [batch, q_heads, d], or [batch, queries, q_heads, d] of
    several query tokens, to a tensor of the same shape."""
    run = triton_decode_attention if has_kernel(q) else reference_decode_attention
    return run(
        q, k, v, lengths, scale=scale, block_table=block_table, sinks=sinks, window=window, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip


@decode_attention.register_fake
def _(q: Tensor, *_: object, **__: object) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("simcore::decode_attention_lse", mutates_args=())
def decode_attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    block_table: Tensor | None = None,
    sinks: int | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `decode_attention`: out, as q, and lse, fp32 and as q without d."""
    run = triton_decode_attention if has_kernel(q) else reference_decode_attention
    lse = _room_for_lse(q)
    out = run(
        q, k, v, lengths, scale=scale, block_table=block_table, sinks=sinks, window=window, k_scale=k_scale,
        v_scale=v_scale, lse=lse,
    )  # fmt: skip
    return out, lse


def _room_for_lse(q: Tensor) -> Tensor:
    return q.new_empty(q.shape[:-1], dtype=torch.float32)


@decode_attention_lse.register_fake
def _(q: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), _room_for_lse(q)


@torch.library.custom_op("simcore::speculative_attention", mutates_args=())
def speculative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    sinks: Tensor,
    window: Tensor,
    threshold: Tensor,
    scale: float | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Five:
    """`simcore.kernels.decoder.speculative_attention`: exact, early [batch, q_heads, d], hits int32 [batch],
    norms fp32 [batch, 2], priority int32 [1]."""
    named: dict[str, Any] = {
        "sinks": sinks, "window": window, "scale": scale,
        "block_table": block_table, "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    if has_kernel(q):
        made = triton_speculative_attention(q, k, v, lengths, **named)
        found = decide(made, threshold)
        return made.exact, made.early, found.hits, found.norms, found.priority
    exact, early, norms, hits = reference_speculative_attention(
        q, k, v, lengths, threshold=threshold, **named
    )
    return exact, early, hits, norms.float(), 2 - 2 * hits.min(0, keepdim=True).values


@speculative_attention.register_fake
def _(q: Tensor, *_: object, **__: object) -> Five:
    batch = q.shape[0]
    hits = q.new_empty(batch, dtype=torch.int32)
    norms = q.new_empty(batch, 2, dtype=torch.float32)
    return torch.empty_like(q), torch.empty_like(q), hits, norms, q.new_empty(1, dtype=torch.int32)


@torch.library.custom_op("simcore::norm", mutates_args=())
def norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMS norm of x [tokens, hidden] times gain [hidden]."""
    return (triton_norm if has_kernel(x) else reference_norm)(x, gain, eps=eps)


@norm.register_fake
def _(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("simcore::matmul", mutates_args=())
def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [m, k] times weight [k, n], in the dtype of the weights; few rows take the Triton kernel if x has
    kernels."""
    few = x.shape[0] <= MOST_ROWS and has_kernel(x)
    return (triton_matmul if few else reference_matmul)(x, weight)


@matmul.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("simcore::activation", mutates_args=())
def activation(x: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(x) up, or gelu(x) without `up`, of x, up [tokens, width]."""
    return (triton_activation if has_kernel(x) else reference_activation)(x, up).contiguous()


@activation.register_fake
def _(x: Tensor, up: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("simcore::rotary_append", mutates_args=("k_cache", "v_cache"))
def rotary_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_heads: int,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`simcore.kernels.decoder.rotary.rotary_append`: q [batch, q_heads, d]; k and v go into the cache."""
    run = triton_rotary_append if has_kernel(qkv) else reference_rotary_append
    q = run(
        qkv, cos, sin, lengths, k_cache, v_cache, q_heads=q_heads, block_table=block_table, k_scale=k_scale,
        v_scale=v_scale,
    )  # fmt: skip
    # An operator must not return a view of its input.
    return q.clone(memory_format=torch.contiguous_format)


@rotary_append.register_fake
def _(
    qkv: Tensor, cos: Tensor, sin: Tensor, lengths: Tensor, k_cache: Tensor, v_cache: Tensor, q_heads: int,
    *_: object, **__: object,
) -> Tensor:  # fmt: skip
    return qkv.new_empty(qkv.shape[0], q_heads, k_cache.shape[-1])
