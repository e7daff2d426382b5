"""FleetAttention (LeetDecoding, Algorithm 5): for each column b_j of q and c_j of k the running sum of c_j v
with decay, times b_j.

    l_i = gamma l_(i-1) + c_ij v_i,    out_i = sum_j b_ij l_i      l before the first row: row j of the state

A program has some columns of v of a query head and goes through blocks of rows. In a block it takes some of
the columns j at a time, makes their running sums by a scan over the rows, and adds up b_ij l_i over j in
registers. So it writes the output once, as the only program, and never reads it. A block carries on to the
next the last l of each j, which is row j of the state; no other program has it either.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.checks import check_powers
from simcore.kernels.gpu import launching
from simcore.kernels.linear_attention.triton_tensors import (
    outputs,
    sizes_of,
    store_tile,
    strides,
    tile,
)


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """The layout of a call, in powers of two: `rows` at a time, `ranks` columns of q and k at a time,
    `columns` of v a program, `warps` a program."""

    rows: int
    ranks: int
    columns: int
    warps: int

    def __post_init__(self) -> None:
        check_powers(self, "rows", "ranks", "columns", "warps")


def fleet_config() -> FleetConfig:
    """Returns the layout for any shape: 4096 running sums at a time, 32 in each of 128 threads."""
    return FleetConfig(rows=16, ranks=16, columns=16, warps=4)


@launching
def fleet_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    config: FleetConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out [batch, q_heads, length, dim] and the state after it, fp32 [batch, kv_heads, rank, dim].

    q [batch, q_heads, length, rank], k [batch, kv_heads, length, rank], v [batch, kv_heads, length, dim] in
    fp16, bf16 or fp32, any strides except the last, which is 1; q_heads a multiple of kv_heads. decay
    [kv_heads] in (0, 1], which is not checked here; state: the final state after an earlier part of the
    sequence. Of sequence b the first lengths[b] (int32, on the device) rows count, its other outputs are 0.
    All is computed in fp32.

    Raises ValueError for tensors that do not fit together.
    """
    sizes = sizes_of(q, k, v, decay)
    out, final_state = outputs(q, k, v, sizes, state, lengths, out, final_state)
    config = config or fleet_config()
    # Each query head carries its own state, although the states of a group are equal.
    shape = sizes.batch, sizes.q_heads, sizes.rank, sizes.dim
    carried = torch.zeros(shape, dtype=torch.float32, device=q.device)
    if state is not None:
        carried.copy_(state.repeat_interleave(sizes.group, 1))
    _fleet_kernel[(triton.cdiv(sizes.dim, config.columns), sizes.q_heads, sizes.batch)](
        q, k, v, out, carried, decay, lengths, sizes.length,
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(carried), sizes.rank, sizes.dim,
        GROUP=sizes.group, ROWS=config.rows, RANKS=config.ranks, COLUMNS=config.columns,
        num_warps=config.warps,
    )  # fmt: skip
    final_state.copy_(carried[:, :: sizes.group])
    return out, final_state


@triton.jit
def _carried_on(weight, sum_, later_weight, later_sum):
    """Two stretches of rows as one: what is left of a sum before it, and the sum of its own rows."""
    return weight * later_weight, later_sum + later_weight * sum_


@triton.jit
def _fleet_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, carried_ptr, decay_ptr, lengths_ptr, length,
    stride_q_sequence, stride_q_head, stride_q_row, stride_k_sequence, stride_k_head, stride_k_row,
    stride_v_sequence, stride_v_head, stride_v_row, stride_out_sequence, stride_out_head, stride_out_row,
    stride_carried_sequence, stride_carried_head, stride_carried_row, rank, dim,
    GROUP: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the outputs of a query head. Grid (blocks of columns, q_heads, batch)."""
    column, q_head = tl.program_id(0) * COLUMNS, tl.program_id(1).to(tl.int64)
    head, sequence = q_head // GROUP, tl.program_id(2).to(tl.int64)
    count = length
    if lengths_ptr is not None:
        count = tl.minimum(tl.maximum(tl.load(lengths_ptr + sequence), 0), length)
    gamma = 1.0
    DECAY: tl.constexpr = decay_ptr is not None
    if DECAY:
        gamma = tl.load(decay_ptr + head).to(tl.float32)
    q_base = q_ptr + sequence * stride_q_sequence + q_head * stride_q_head
    k_base = k_ptr + sequence * stride_k_sequence + head * stride_k_head
    v_base = v_ptr + sequence * stride_v_sequence + head * stride_v_head
    out_base = out_ptr + sequence * stride_out_sequence + q_head * stride_out_head
    carried_base = carried_ptr + sequence * stride_carried_sequence + q_head * stride_carried_head
    row = tl.arange(0, ROWS)
    for start in range(0, count, ROWS):
        v = tile(v_base, start, stride_v_row, count, column, dim, ROWS, COLUMNS, False, False).to(tl.float32)
        here = tl.minimum(count - start, ROWS)
        # Rows past the end add nothing, and no sum decays in them.
        weights = tl.where(row < here, gamma, 1.0)[:, None, None] + tl.zeros(
            [ROWS, RANKS, COLUMNS], tl.float32
        )
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, rank, RANKS):
            b = tile(q_base, start, stride_q_row, count, first, rank, ROWS, RANKS, False, False)
            c = tile(k_base, start, stride_k_row, count, first, rank, ROWS, RANKS, False, False)
            before = tile(
                carried_base, first, stride_carried_row, rank, column, dim, RANKS, COLUMNS, False, False
            )
            summands = c.to(tl.float32)[:, :, None] * v[:, None, :]
            # The carried state is a part of the first row's sum.
            summands += tl.where(row == 0, gamma, 0.0)[:, None, None] * before[None, :, :]
            if DECAY:
                _, sums = tl.associative_scan((weights, summands), 0, _carried_on)
            else:
                sums = tl.cumsum(summands, 0)
            out += tl.sum(b.to(tl.float32)[:, :, None] * sums, 1)
            after = tl.sum(tl.where((row == ROWS - 1)[:, None, None], sums, 0.0), 0)
            # All threads have read the state before it is overwritten.
            tl.debug_barrier()
            store_tile(
                after, carried_base, first, stride_carried_row, rank, column, dim, RANKS, COLUMNS
            )  # fmt: skip
        # The state is written before other threads read it in the next block.
        tl.debug_barrier()
        store_tile(out, out_base, start, stride_out_row, length, column, dim, ROWS, COLUMNS)
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(tl.cdiv(count, ROWS) * ROWS, length, ROWS):
        store_tile(nothing, out_base, start, stride_out_row, length, column, dim, ROWS, COLUMNS)
