"""Linear attention of a serving step: chunks of prompts and decoding sequences, each from its own state.

    row i of a sequence with r rows in this step and n tokens, those of the step included:

    S = gamma S + k_i^T v_i,   out_i = q_i S        S before its first token: zeros, whatever its place holds

Rows of a sequence are neighbours, as in `decoder.ragged_attention`. States lie at places of their own:
sequence s has states[slots[s]]. The device reads starts, lengths and slots, and grids depend on shapes alone:
one captured graph serves all steps of up to so many rows and sequences.

`served_step` is the kernel of `triton_step`, for sequences of one row. `served_chunks` goes through the rows
of a sequence as `triton_chunked` does, CHUNK at a time, with some columns of the state in registers. States,
scores and weighed values of fp32 enter products in two parts of 16 bits, the second being what the first
leaves: else an answer would depend on where a prompt is cut, by the rounding to bf16.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_like, check_written, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.linear_attention.triton_chunked import NARROW, WIDE, what_is_left
from simcore.kernels.linear_attention.triton_step import config_for, step_kernel
from simcore.kernels.linear_attention.triton_tensors import (
    FORMATS,
    Sizes,
    check_widths,
    log_decay,
    padded,
    store_tile,
    tile,
)

# Rows at a time; of fp32 fewer.
CHUNK, CHUNK_FP32 = 64, 16


def _sizes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    lengths: Tensor,
    decay: Tensor,
    out: Tensor,
) -> Sizes:
    """Returns the sizes of a call; `kv_heads` are those of states. Raises ValueError naming the tensor that
    does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.stride(-1) != 1 or x.dtype not in FORMATS or x.dtype != q.dtype:
            raise ValueError(f"{name} has to be [rows, heads, columns], rows contiguous, not {kind(x)}")
    (rows, heads, rank), kv_heads, dim = q.shape, k.shape[1], v.shape[-1]
    check_widths(rank, dim)
    check_like("k", k, (rows, kv_heads, rank), q.dtype)
    check_like("v", v, (rows, kv_heads, dim), q.dtype)
    if heads % kv_heads:
        raise ValueError(f"k has {kv_heads} heads, no divisor of q's {heads}")
    check_like("states", states, (len(states), heads, rank, dim), torch.float32)
    for name, x in (("slots", slots), ("lengths", lengths)):
        check_like(name, x, (len(slots),), torch.int32)
    check_like("decay", decay, (heads,), torch.float32)
    check_like("out", out, (rows, heads, dim), q.dtype)
    check_written("out", out, q, k, v)
    return Sizes(len(slots), heads, heads, rows, rank, dim)


@launching
def served_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    lengths: Tensor,
    decay: Tensor,
    out: Tensor,
) -> Tensor:
    """Computes a token of each sequence s, row s; returns `out`. Updates states fp32 [slots, heads, rank,
    dim].

    q [rows, heads, rank], k [rows, kv_heads, rank], v [rows, kv_heads, dim], heads a multiple of kv_heads,
    out [rows, heads, dim]; rows as many as sequences or more. On the device, int32 [sequences]: slots;
    lengths, the tokens of each, this one included: 0 for a sequence that has none here, of which nothing is
    read or written. decay fp32 [heads]. Raises ValueError for tensors that do not fit together."""
    sizes = _sizes(q, k, v, states, slots, lengths, decay, out)
    if len(q) < sizes.batch:
        raise ValueError(f"{len(q)} rows of {sizes.batch} sequences")
    config = config_for(q, sizes)
    blocks = triton.cdiv(sizes.dim, config.columns)
    step_kernel[(blocks * sizes.kv_heads * sizes.batch,)](
        q, k, v, states, decay, out, slots, lengths,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *states.stride()[:3], *out.stride()[:2],
        RANK_USED=sizes.rank, DIM_USED=sizes.dim, RANK=padded(sizes.rank), COLUMNS=config.columns,
        BLOCKS=blocks, HEADS=sizes.kv_heads, GROUP=1, SHARED=sizes.kv_heads // k.shape[1],
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return out


@launching
def served_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    decay: Tensor,
    out: Tensor,
) -> Tensor:
    """Computes all rows of each sequence, starts[s] .. starts[s + 1] - 1; returns `out`. starts int32
    [sequences + 1], ascending; lengths: the tokens of each, its rows here included. Rows of no sequence are
    not written. Others as in `served_step`."""
    sizes = _sizes(q, k, v, states, slots, lengths, decay, out)
    check_like("starts", starts, (sizes.batch + 1,), torch.int32)
    narrow, rank = q.element_size() == 2, padded(sizes.rank)
    columns = max(16, min(NARROW, padded(sizes.dim), NARROW if narrow else 4096 // rank))
    blocks = triton.cdiv(sizes.dim, columns)
    chained = gpu_of(q).chained
    _chunks_kernel[(blocks * sizes.kv_heads * sizes.batch,)](
        q, k, v, states, decay, out, slots, starts, lengths,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *states.stride()[:3], *out.stride()[:2],
        RANK_USED=sizes.rank, DIM_USED=sizes.dim, RANK=rank, CHUNK=CHUNK if narrow else CHUNK_FP32,
        COLUMNS=columns, BLOCKS=blocks, HEADS=sizes.kv_heads, SHARED=sizes.kv_heads // k.shape[1],
        STAGES=3 if rank <= WIDE else 2, IN_PARTS=narrow,
        **launched(4 if rank <= WIDE else 8, chained),
    )  # fmt: skip
    return out


@triton.jit
def _added(sums, x, y, IN_PARTS: tl.constexpr):
    """sums + x y of x [m, k] in fp32 and y [k, n] in the format of the model."""
    high = x.to(y.dtype)
    sums = tl.dot(high, y, sums, input_precision="tf32x3")
    if IN_PARTS:
        sums = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, sums)
    return sums


@triton.jit
def _chunks_kernel(
    q_ptr, k_ptr, v_ptr, states_ptr, decay_ptr, out_ptr, slots_ptr, starts_ptr, lengths_ptr,
    stride_q_row, stride_q_head, stride_k_row, stride_k_head, stride_v_row, stride_v_head,
    stride_state_slot, stride_state_head, stride_state_row, stride_out_row, stride_out_head,
    RANK_USED: tl.constexpr, DIM_USED: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr,
    STAGES: tl.constexpr, IN_PARTS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the outputs of a head of a sequence. Grid (blocks * heads * sequences,), blocks fastest."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0)
    sequence = at // (BLOCKS * HEADS)
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    if begin >= end:
        return
    head, column = (at // BLOCKS % HEADS).to(tl.int64), at % BLOCKS * COLUMNS
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    # A sequence that begins here has no state: nothing of its place is read.
    known = tl.where(tl.load(lengths_ptr + sequence) > end - begin, RANK_USED, 0)
    states_ptr += slot * stride_state_slot + head * stride_state_head
    q_ptr += head * stride_q_head
    k_ptr += head // SHARED * stride_k_head
    v_ptr += head // SHARED * stride_v_head
    out_ptr += head * stride_out_head
    log = log_decay(decay_ptr, head)
    # Rows of a chunk's k come first, as in all tensors made of them; states are transposed.
    index = tl.arange(0, CHUNK)
    distance = index[None, :] - index[:, None]
    weights = tl.where(distance >= 0, tl.exp2(tl.maximum(distance, 0) * log), 0.0)
    carried = tl.exp2((index + 1) * log)
    state = tl.trans(
        tile(states_ptr, 0, stride_state_row, known, column, DIM_USED, RANK, COLUMNS, False, False)
    )  # fmt: skip
    for start in tl.range(begin, end, CHUNK, num_stages=STAGES):
        q = tile(q_ptr, start, stride_q_row, end, 0, RANK_USED, CHUNK, RANK, False, RANK_USED == RANK)
        k = tile(k_ptr, start, stride_k_row, end, 0, RANK_USED, CHUNK, RANK, False, RANK_USED == RANK)
        v = tile(v_ptr, start, stride_v_row, end, column, DIM_USED, CHUNK, COLUMNS, False, False)
        scores = tl.dot(k, tl.trans(q), input_precision="tf32x3") * weights
        out = _added(tl.zeros([COLUMNS, CHUNK], tl.float32), state, tl.trans(q), IN_PARTS)
        out *= carried[None, :]
        high = scores.to(v.dtype)
        out = tl.dot(tl.trans(v), high, out, input_precision="tf32x3")
        if IN_PARTS:
            out = tl.dot(tl.trans(v), (scores - high.to(tl.float32)).to(v.dtype), out)
        left, shrink = what_is_left(tl.minimum(end - start, CHUNK), log, CHUNK)
        weighed = tl.trans(v.to(tl.float32) * left[:, None])
        state = _added(state + state * shrink, weighed, k, IN_PARTS)
        store_tile(tl.trans(out), out_ptr, start, stride_out_row, end, column, DIM_USED, CHUNK, COLUMNS)
    store_tile(
        tl.trans(state), states_ptr, 0, stride_state_row, RANK_USED, column, DIM_USED, RANK, COLUMNS
    )  # fmt: skip


def reference_served_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    decay: Tensor,
    out: Tensor,
) -> Tensor:
    """As `served_chunks`, row by row in plain torch and in the format of the states."""
    group, firsts = q.shape[1] // k.shape[1], starts.tolist()
    for s, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        rows = range(firsts[s], firsts[s + 1])
        if rows and length == len(rows):
            states[slot] = 0.0
        for row in rows:
            key, value = (x[row].to(states.dtype).repeat_interleave(group, 0) for x in (k, v))
            states[slot] *= decay.to(states.dtype)[:, None, None]
            states[slot] += key.unsqueeze(-1) * value.unsqueeze(-2)
            out[row] = torch.einsum("hr,hrd->hd", q[row].to(states.dtype), states[slot]).to(out.dtype)
    return out
