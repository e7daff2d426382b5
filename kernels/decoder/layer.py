"""A decoder's layers, token by token, in one captured graph.

    lengths += 1                                                 once a token
    x += o(attention(rotary(qkv(norm(x)))))                      the new k and v go into the cache on the way
    x += down(silu(gate) up),   gate, up = gate_up(norm(x))

Nine launches a layer, or of few sequences eight, without the host: the device reads the lengths and the gate
that skips a launch (ALSpec's skipped computation, Cai et al. 2025, section 4.3). Launches start while the one
before them ends. Products add the residuals before they round, and this project's activate what they compute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.activation import activation, reference_activation
from simcore.kernels.decoder.decode_attention import decode_attention
from simcore.kernels.decoder.matmul import matmul, product, reference_matmul
from simcore.kernels.decoder.norm import norm, reference_norm
from simcore.kernels.decoder.rotary import angles, reference_rotary_append, rotary_append
from simcore.kernels.decoder.speculative_attention import Speculation, speculative_attention
from simcore.kernels.decoder.split_kv import Cache
from simcore.kernels.gpu import gpu_of, launching

# Up to so many rows this project's products are the faster ones in a whole step, or as fast; where launches
# cannot be chained, up to fewer: docs/measurements/kernels.md.
FEW_ROWS, FEW_UNCHAINED = 32, 8


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """A layer's matrices [in, out], which may be stored transposed, and gains [hidden].

    qkv [hidden, (q_heads + 2 kv_heads) d], o [q_heads d, hidden], gate_up [hidden, 2 width], down [width,
    hidden].
    """

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """A layer's k, v [batch, kv_heads, capacity, d], or blocks [blocks, block_size, kv_heads, d]; k_scale,
    v_scale fp32 [kv_heads] of an fp8 cache."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The tensors that the layers of one decoder share, and that a graph reads and writes.

    x [batch, hidden]: the residual stream, before a step the token's embedding, after it the head's input;
    lengths int32 [batch]; block_table int32 [batch, blocks] of a paged cache; cos, sin [positions, d // 2].
    Tensors between two launches: normed as x, qkv, q and heads [batch, q_heads, d], gate_up, inner.
    """

    x: Tensor
    lengths: Tensor
    block_table: Tensor | None
    cos: Tensor
    sin: Tensor
    normed: Tensor
    qkv: Tensor
    q: Tensor
    heads: Tensor
    gate_up: Tensor
    inner: Tensor


# Computes b.heads from b.q and a layer's cache.
Attend = Callable[[Buffers, LayerCache], None]


def layer_buffers(
    weights: LayerWeights,
    cache: LayerCache,
    lengths: Tensor,
    *,
    q_heads: int,
    block_table: Tensor | None = None,
) -> Buffers:
    """Makes buffers for layers of these sizes; lengths int32 [batch] is used as it is, not copied."""
    batch, (hidden, qkv), d = len(lengths), weights.qkv.shape, cache.k.shape[-1]
    wide, width = weights.gate_up.shape[1], weights.down.shape[0]
    kv = Cache(cache.k, cache.v, block_table, cache.k_scale, cache.v_scale)
    device = weights.qkv.device

    def room(*size: int) -> Tensor:
        return torch.empty(*size, dtype=weights.qkv.dtype, device=device)

    q = room(batch, q_heads, d)
    cos, sin = angles(torch.arange(kv.capacity, device=device), d, torch.float32)
    return Buffers(
        x=room(batch, hidden),
        lengths=lengths,
        block_table=block_table,
        cos=cos,
        sin=sin,
        normed=room(batch, hidden),
        qkv=room(batch, qkv),
        q=q,
        heads=torch.empty_like(q),
        gate_up=room(batch, wide),
        inner=room(batch, width),
    )


@triton.jit
def _advance_kernel(lengths_ptr, gate_ptr, batch, GATED: tl.constexpr, BATCH: tl.constexpr):
    """All sequences: one program."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    sequence = tl.arange(0, BATCH)
    inside = sequence < batch
    tl.store(lengths_ptr + sequence, tl.load(lengths_ptr + sequence, mask=inside) + 1, mask=inside)


@launching
def advance(lengths: Tensor, *, gate: Tensor | None = None) -> None:
    """Adds one to lengths int32 [batch]; with a `gate` (int32 [1]) of 0 it does nothing."""
    batch = len(lengths)
    padded = triton.next_power_of_2(batch)
    _advance_kernel[(1,)](lengths, gate, batch, GATED=gate is not None, BATCH=padded, num_warps=1)


def attend(b: Buffers, cache: LayerCache, *, gate: Tensor | None = None) -> None:
    """Runs exact attention: b.heads of b.q over a layer's cache."""
    decode_attention(
        b.q, cache.k, cache.v, b.lengths,
        block_table=b.block_table, k_scale=cache.k_scale, v_scale=cache.v_scale,
        gate=gate, out=b.heads, in_step=True,
    )  # fmt: skip


def speculate(
    b: Buffers,
    cache: LayerCache,
    *,
    sinks: int | Tensor,
    window: int | Tensor,
    into: Speculation,
    gate: Tensor | None = None,
) -> None:
    """Runs speculative attention: the exact result goes into b.heads, all other results into `into`."""
    speculative_attention(
        b.q, cache.k, cache.v, b.lengths,
        block_table=b.block_table, k_scale=cache.k_scale, v_scale=cache.v_scale,
        sinks=sinks, window=window, gate=gate,
        into=into._replace(exact=b.heads),
    )  # fmt: skip


def layer_step(
    b: Buffers,
    weights: LayerWeights,
    cache: LayerCache,
    *,
    gate: Tensor | None = None,
    attend: Attend = attend,
) -> None:
    """Runs a layer for one token of each sequence, counted in lengths[b]: x to x, its k, v into the cache.

    With a `gate` (int32 [1]) of 0 all launches are skipped except attention, which follows the gate of
    `attend`; then products are this project's, as of few sequences; else by whichever is faster (`product`).
    Raises ValueError for a gate and more sequences than such a product has rows.
    """
    few = FEW_ROWS if gpu_of(b.x).chained else FEW_UNCHAINED
    ours = len(b.x) <= few or gate is not None
    own = partial(matmul, gate=gate, chained=True)
    multiply = own if ours else partial(product, chained=True)
    normed = partial(norm, b.x, gate=gate, out=b.normed, chained=True)
    multiply(normed(weights.attn_norm), weights.qkv, out=b.qkv)
    rotary_append(
        b.qkv, b.cos, b.sin, b.lengths, cache.k, cache.v, q_heads=b.q.shape[1], block_table=b.block_table,
        k_scale=cache.k_scale, v_scale=cache.v_scale, gate=gate, out=b.q,
    )  # fmt: skip
    attend(b, cache)
    multiply(b.heads.flatten(1), weights.o, add=b.x, out=b.x)
    normed(weights.mlp_norm)
    if ours:
        own(b.normed, weights.gate_up, activated=True, out=b.inner)
    else:
        multiply(b.normed, weights.gate_up, out=b.gate_up)
        activation(*b.gate_up.chunk(2, 1), out=b.inner, chained=True)
    multiply(b.inner, weights.down, add=b.x, out=b.x)


def step(
    b: Buffers,
    layers: Sequence[tuple[LayerWeights, LayerCache]],
    *,
    gate: Tensor | None = None,
    attend: Attend = attend,
) -> None:
    """Adds one to the lengths and runs one token of each sequence through the layers."""
    advance(b.lengths, gate=gate)
    for weights, cache in layers:
        layer_step(b, weights, cache, gate=gate, attend=attend)


def capture(launch: Callable[[], None], changed: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """Captures the launches of `launch` as a graph on the current device. `launch` runs once before, so that
    its kernels are compiled; the tensors it `changed` are then restored."""
    before = [x.clone() for x in changed]
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        launch()
    torch.cuda.current_stream().wait_stream(aside)
    for x, y in zip(changed, before, strict=True):
        x.copy_(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def reference_layer_step(
    x: Tensor,
    weights: LayerWeights,
    cache: LayerCache,
    lengths: Tensor,
    *,
    q_heads: int,
    attention: Callable[..., Tensor],
    block_table: Tensor | None = None,
) -> Tensor:
    """As `layer_step`, in plain torch and any float dtype: x [batch, hidden] to a new x; k, v into the cache.

    `attention` is called like decode attention.
    """
    at = {"block_table": block_table, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
    cos, sin = angles(torch.arange(int(lengths.max()), device=x.device), cache.k.shape[-1], x.dtype)
    qkv = reference_matmul(reference_norm(x, weights.attn_norm), weights.qkv)
    q = reference_rotary_append(qkv, cos, sin, lengths, cache.k, cache.v, q_heads=q_heads, **at)
    heads = attention(q, cache.k, cache.v, lengths, **at)
    x = reference_matmul(heads.flatten(1), weights.o, add=x)
    gate, up = reference_matmul(reference_norm(x, weights.mlp_norm), weights.gate_up).chunk(2, 1)
    return reference_matmul(reference_activation(gate, up), weights.down, add=x)
