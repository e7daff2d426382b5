"""Rotary embedding of q and k, and the append of the new k and v to the cache (RoFormer, Su et al. 2021).

    (a, b) -> (a cos - b sin, b cos + a sin),   a, b the halves of a head
    angle = position base^(-2i/d) for pair i

The last element of a head of odd size is not turned. An fp8 cache holds k / k_scale, v / v_scale of each
head, clamped to the format's range.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_gate, check_like, kind
from simcore.kernels.decoder.split_kv import cache as check_cache
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import LARGEST_FP8, in_fp8, random_tensor, wide
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device, dtype_of
from simcore.ops.op import Op

BASE = 10_000.0
# Heads of one program that only turns heads.
HEADS = 8


def frequencies_of(head_dim: int, base: float = BASE) -> Tensor:
    """Returns the angle of each pair of a head at position 1: fp64 [head_dim // 2]."""
    half = head_dim // 2
    return base ** (-torch.arange(half, dtype=torch.float64) / max(1, half))


def angles(
    positions: Tensor, head_dim: int, dtype: torch.dtype, frequencies: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of the angles of positions [tokens]: [tokens, head_dim // 2] each. `frequencies`:
    the angles at position 1, if others than those of `BASE`."""
    frequencies = frequencies_of(head_dim) if frequencies is None else frequencies
    turn = positions.to(torch.float64)[:, None] * frequencies.to(positions.device)
    return turn.cos().to(dtype), turn.sin().to(dtype)


# -- heads alone -----------------------------------------------------------------------------------------


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [tokens, heads, d] turned by the angles of each token."""
    half = heads.shape[-1] // 2
    a, b = heads[..., :half], heads[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c - b * s, b * c + a * s, heads[..., 2 * half :]), -1)


def reference_rotary(
    qkv: Tensor, cos: Tensor, sin: Tensor, *, q_heads: int, kv_heads: int, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `rotary`, in plain torch and in any float dtype."""
    if lengths is not None:
        position = (lengths.long() - 1).clamp(0, len(cos) - 1)
        cos, sin = cos[position], sin[position]
    heads = qkv.view(len(qkv), q_heads + 2 * kv_heads, -1)
    turned = _turned(heads[:, : q_heads + kv_heads], cos, sin)
    return turned[:, :q_heads], turned[:, q_heads:], heads[:, q_heads + kv_heads :]


@triton.jit
def _turn(from_ptr, from_at, to_ptr, to_at, c, s, inside, HALF: tl.constexpr):
    """Turns pairs (a, b), HALF elements apart, from one place to another."""
    a = tl.load(from_ptr + from_at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(from_ptr + from_at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(to_ptr + to_at, (a * c - b * s).to(to_ptr.dtype.element_ty), mask=inside)
    tl.store(to_ptr + to_at + HALF, (b * c + a * s).to(to_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_kernel(
    qkv_ptr, cos_ptr, sin_ptr, lengths_ptr, out_ptr, gate_ptr,
    heads, qkv_stride, cos_stride, sin_stride, positions,
    GATED: tl.constexpr, PLACED: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some heads of q and k of one token: program (token, piece). Out [tokens, heads, D] is contiguous."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    is_head, is_pair = head < heads, pair < D // 2
    angle = token
    if PLACED:
        position = tl.load(lengths_ptr + token) - 1
        angle = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
    c = tl.load(cos_ptr + angle * cos_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + angle * sin_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    at = head[:, None] * D + pair[None, :]
    inside = is_head[:, None] & is_pair[None, :]
    from_ptr, to_ptr = qkv_ptr + token * qkv_stride, out_ptr + token * heads * D
    _turn(from_ptr, at, to_ptr, at, c[None, :], s[None, :], inside, D // 2)
    if D % 2 == 1:
        last = head * D + D - 1
        tl.store(to_ptr + last, tl.load(from_ptr + last, mask=is_head), mask=is_head)


@launching
def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    q_heads: int,
    kv_heads: int,
    lengths: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [tokens, (q_heads + 2 kv_heads) d] into heads and turns the heads of q and k by the angles
    of each token (cos, sin [tokens, d // 2]).

    Returns q [tokens, q_heads, d], k and v [tokens, kv_heads, d]; v is a view of qkv; q and k are views of
    `out` [tokens, q_heads + kv_heads, d], contiguous, if given. With `lengths` (int32 [tokens], read on the
    device, the new token included) cos and sin are the angles of all positions [positions, d // 2], and token
    b is at lengths[b] - 1. With a `gate` (int32 [1]) of 0 q and k are not written. Raises ValueError for
    tensors that do not fit."""
    tokens, heads = len(qkv), q_heads + kv_heads
    check_gate(gate)
    if qkv.dim() != 2 or qkv.stride(-1) != 1 or qkv.shape[1] % (heads + kv_heads):
        raise ValueError(
            f"qkv has to be rows of {q_heads} + 2 * {kv_heads} heads, contiguous, not {kind(qkv)}"
        )
    half = qkv.shape[1] // (heads + kv_heads) // 2
    for name, x in (("cos", cos), ("sin", sin)):
        check_like(name, x, (tokens if lengths is None else len(cos), half), cos.dtype)
    if lengths is not None:
        check_like("lengths", lengths, (tokens,), torch.int32)
    split = qkv.view(tokens, heads + kv_heads, -1)
    d = split.shape[-1]
    turned = torch.empty(tokens, heads, d, dtype=qkv.dtype, device=qkv.device) if out is None else out
    check_like("out", turned, (tokens, heads, d), qkv.dtype)
    if not turned.is_contiguous():
        raise ValueError("out has to be contiguous")
    _rotary_kernel[(tokens, triton.cdiv(heads, HEADS))](
        qkv, cos, sin, lengths, turned, gate,
        heads, qkv.stride(0), cos.stride(0), sin.stride(0), len(cos),
        GATED=gate is not None, PLACED=lengths is not None, D=d, HEADS=HEADS,
        PAIRS=triton.next_power_of_2(max(1, d // 2)), num_warps=4,
    )  # fmt: skip
    return turned[:, :q_heads], turned[:, q_heads:], split[:, heads:]


# -- heads, and the cache --------------------------------------------------------------------------------


def _stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns x [batch, kv_heads, d] as a cache of a dtype stores it."""
    x = wide(x)
    x = x if scale is None else x / scale[:, None]
    return in_fp8(x) if dtype == torch.float8_e4m3fn else x.to(dtype)


def reference_rotary_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_heads: int,
    block_table: Tensor | None = None,
    sequences: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """As `rotary_append`, in plain torch and in any float dtype."""
    kv_heads = k_cache.shape[1 if block_table is None else 2]
    position = (lengths.long() - 1).clamp(0, len(cos) - 1)
    q, k, v = reference_rotary(qkv, cos[position], sin[position], q_heads=q_heads, kv_heads=kv_heads)
    capacity = k_cache.shape[2] if block_table is None else block_table.shape[1] * k_cache.shape[1]
    table_rows = range(len(qkv)) if sequences is None else sequences.tolist()
    for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        for b, length in enumerate(lengths.tolist()):
            if not 1 <= length <= capacity:
                continue
            stored = _stored(x[b], scale, cache.dtype)
            if block_table is None:
                cache[b, :, length - 1] = stored
            else:
                block, slot = divmod(length - 1, cache.shape[1])
                cache[int(block_table[table_rows[b], block]), slot] = stored
    return q


@triton.jit
def _quantized(x, scale_ptr, head, SCALED: tl.constexpr, FP8: tl.constexpr):
    """x as a cache holds it, still in fp32."""
    if SCALED:
        x = tl.div_rn(x, tl.load(scale_ptr + head) + tl.zeros_like(x))
    if FP8:
        x = tl.minimum(tl.maximum(x, -LARGEST_FP8), LARGEST_FP8)
    return x


@triton.jit
def _rotary_append_kernel(
    qkv_ptr, cos_ptr, sin_ptr, lengths_ptr, sequences_ptr, table_ptr, q_ptr, k_ptr, v_ptr,
    k_scale_ptr, v_scale_ptr, gate_ptr, kv_heads, capacity, positions,
    qkv_stride, table_stride, cos_stride, sin_stride, q_stride,
    k_outer, k_head, k_token, v_outer, v_head, v_token,
    CHAINED: tl.constexpr, GATED: tl.constexpr, PLACED: tl.constexpr, PAGE: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    D: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One KV head of one new token with its query heads: program (token, KV head). PAGE: tokens of a block, 0
    without a block table. PLACED: the token's row of the table is read, else it is the token's own."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return
    HALF: tl.constexpr = D // 2
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    position = tl.load(lengths_ptr + token) - 1
    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    row = tl.minimum(tl.maximum(position, 0), positions - 1).to(tl.int64)
    c = tl.load(cos_ptr + row * cos_stride + pair, mask=is_pair, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + row * sin_stride + pair, mask=is_pair, other=0.0).to(tl.float32)

    member = tl.arange(0, GROUP_PADDED)
    is_member = member < GROUP
    first = qkv_ptr + token * qkv_stride
    queries, to_queries = first + head * GROUP * D, q_ptr + token * q_stride + head * GROUP * D
    at = member[:, None] * D + pair[None, :]
    _turn(queries, at, to_queries, at, c[None, :], s[None, :], is_member[:, None] & is_pair[None, :], HALF)
    if D % 2 == 1:
        last = member * D + D - 1
        tl.store(to_queries + last, tl.load(queries + last, mask=is_member), mask=is_member)

    # A token without a place leaves the cache unchanged.
    if (position < 0) | (position >= capacity):
        return
    outer, slot = token, position.to(tl.int64)
    if PAGE > 0:
        sequence = token
        if PLACED:
            sequence = tl.load(sequences_ptr + token).to(tl.int64)
        outer = tl.load(table_ptr + sequence * table_stride + position // PAGE).to(tl.int64)
        slot = (position % PAGE).to(tl.int64)
    to_k = k_ptr + outer * k_outer + head * k_head + slot * k_token
    to_v = v_ptr + outer * v_outer + head * v_head + slot * v_token
    key = first + (kv_heads * GROUP + head) * D
    value = key + kv_heads * D
    a = tl.load(key + pair, mask=is_pair, other=0.0).to(tl.float32)
    b = tl.load(key + HALF + pair, mask=is_pair, other=0.0).to(tl.float32)
    turned_a = _quantized(a * c - b * s, k_scale_ptr, head, SCALED, FP8)
    turned_b = _quantized(b * c + a * s, k_scale_ptr, head, SCALED, FP8)
    tl.store(to_k + pair, turned_a.to(k_ptr.dtype.element_ty), mask=is_pair)
    tl.store(to_k + HALF + pair, turned_b.to(k_ptr.dtype.element_ty), mask=is_pair)
    column = tl.arange(0, DIM)
    if D % 2 == 1:
        is_last = column == D - 1
        stays = tl.load(key + column, mask=is_last, other=0.0).to(tl.float32)
        stays = _quantized(stays, k_scale_ptr, head, SCALED, FP8)
        tl.store(to_k + column, stays.to(k_ptr.dtype.element_ty), mask=is_last)
    v = tl.load(value + column, mask=column < D, other=0.0).to(tl.float32)
    v = _quantized(v, v_scale_ptr, head, SCALED, FP8)
    tl.store(to_v + column, v.to(v_ptr.dtype.element_ty), mask=column < D)


@launching
def rotary_append(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    q_heads: int,
    block_table: Tensor | None = None,
    sequences: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Turns q and k of the new token of each sequence and writes its k and v into the cache.

    qkv [batch, (q_heads + 2 kv_heads) d]; cos, sin [positions, d // 2] of all positions; lengths int32
    [batch] on the device, the new token included: it is at position lengths[b] - 1. Caches [batch, kv_heads,
    capacity, d], or with a block_table int32 [batch, max_blocks] blocks [blocks, block_size, kv_heads, d], in
    any dtype that can store the numbers; k_scale, v_scale fp32 [kv_heads]: stored = value / scale. A sequence
    of length 0, or longer than its cache, writes no k and v. With `sequences` int32 [batch], on the device,
    row b of qkv is a token of sequence sequences[b], whose row of the block_table [any number, max_blocks] it
    goes by; several tokens of a sequence, of different lengths[b], are then appended at once. With a `gate`
    (int32 [1]) of 0 nothing is written. Returns q [batch, q_heads, d], in `out` if given. Raises ValueError
    for tensors that do not fit."""
    paged = block_table is not None
    batch, d = len(qkv), k_cache.shape[-1]
    kv_heads, page = (k_cache.shape[2], k_cache.shape[1]) if paged else (k_cache.shape[1], 0)
    capacity = block_table.shape[1] * page if block_table is not None else k_cache.shape[2]
    if qkv.shape[1] != (q_heads + 2 * kv_heads) * d or q_heads % kv_heads:
        raise ValueError(f"qkv of {qkv.shape[1]} columns is not {q_heads} + 2 * {kv_heads} heads of {d}")
    out = torch.empty(batch, q_heads, d, dtype=qkv.dtype, device=qkv.device) if out is None else out
    check_gate(gate)
    rows = None
    if sequences is not None:
        if block_table is None:
            raise ValueError("sequences, which name rows of a block_table, come with one")
        check_like("sequences", sequences, (batch,), torch.int32)
        rows = batch, len(block_table)
    check_cache(out, k_cache, v_cache, lengths, block_table, (k_scale, v_scale), rows)
    check_like("out", out, (batch, q_heads, d), qkv.dtype)
    for name, x in (("cos", cos), ("sin", sin)):
        check_like(name, x, (len(cos), d // 2), cos.dtype)
    if qkv.stride(-1) != 1 or (q_heads > 1 and out.stride(1) != d):
        raise ValueError("rows of qkv and of out have to be contiguous")
    # The strides of: sequence or block, head, token.
    order = (0, 2, 1) if paged else (0, 1, 2)
    group = q_heads // kv_heads
    _rotary_append_kernel[(batch, kv_heads)](
        qkv, cos, sin, lengths, sequences, block_table, out, k_cache, v_cache, k_scale, v_scale, gate,
        kv_heads, capacity, len(cos),
        qkv.stride(0), 0 if block_table is None else block_table.stride(0), cos.stride(0), sin.stride(0),
        out.stride(0), *(k_cache.stride(i) for i in order), *(v_cache.stride(i) for i in order),
        GATED=gate is not None, PLACED=sequences is not None, PAGE=page, SCALED=k_scale is not None,
        FP8=k_cache.dtype == torch.float8_e4m3fn,
        GROUP=group, GROUP_PADDED=triton.next_power_of_2(group),
        D=d, DIM=triton.next_power_of_2(d), PAIRS=triton.next_power_of_2(max(1, d // 2)),
        **launched(2, gpu_of(qkv).chained),
    )  # fmt: skip
    return out


# -- the op ----------------------------------------------------------------------------------------------


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    tokens, heads = op["tokens"], op["q_heads"] + 2 * op["kv_heads"]
    qkv = random_tensor(op, generator, device, tokens, heads * op["head_dim"])
    positions = torch.randint(4096, (tokens,), generator=generator, device=device)
    return qkv, *angles(positions, op["head_dim"], dtype_of(op))


def _reference(op: Op, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turns qkv [tokens, (q_heads + 2 kv_heads) head_dim] by cos and sin [tokens, head_dim // 2]: q [tokens,
    q_heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
    return reference_rotary(qkv, cos, sin, q_heads=op["q_heads"], kv_heads=op["kv_heads"])


def _run(op: Op, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return rotary(qkv, cos, sin, q_heads=op["q_heads"], kv_heads=op["kv_heads"])


ROTARY = Kernel(by_device(_run, _reference), _reference, _inputs)
