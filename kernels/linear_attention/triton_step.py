"""One token of linear attention with decay: reads the state once and writes it once.

S = gamma S + k^T v in place,   out = q S
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_like, check_powers, check_written, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.linear_attention.triton_tensors import Sizes, padded, sizes_of

# Numbers of the state of a program: 32 in each of 256 threads. Fewer, on a GPU that is not full, until two
# programs a multiprocessor (of an H200) read; never fewer columns than a line of 64 bytes.
NUMBERS = 8192
PROGRAMS = 264
LEAST_COLUMNS = 16


@dataclass(frozen=True, slots=True)
class StepConfig:
    """The layout of a step: `columns` of the state a program, a power of two, `warps` a program; whether
    launches are `chained`: started while the launch before ends, for which they then wait."""

    columns: int
    warps: int
    chained: bool = False

    def __post_init__(self) -> None:
        check_powers(self, "columns", "warps")


def step_config(sizes: Sizes, *, chained: bool = True) -> StepConfig:
    """Returns the layout for a shape.

    >>> print(step_config(Sizes(1, 32, 32, 1, 128, 128)))
    StepConfig(columns=16, warps=2, chained=True)
    >>> print(step_config(Sizes(64, 32, 32, 1, 128, 128)))
    StepConfig(columns=64, warps=8, chained=True)
    """
    rank, dim = padded(sizes.rank), padded(sizes.dim)
    columns = max(LEAST_COLUMNS, min(dim, NUMBERS // rank))
    pairs = sizes.batch * sizes.kv_heads
    while columns > LEAST_COLUMNS and pairs * triton.cdiv(sizes.dim, columns) < PROGRAMS:
        columns //= 2
    return StepConfig(columns, max(1, min(8, rank * columns // 1024)), chained)


def config_for(q: Tensor, sizes: Sizes) -> StepConfig:
    """Returns the layout for these tensors on their device."""
    return step_config(sizes, chained=gpu_of(q).chained)


def reference_linear_attention_step(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None
) -> Tensor:
    """As `linear_attention_step`, in plain torch and in the format of the state."""
    if decay is not None:
        state *= decay.to(state.dtype)[:, None, None]
    state += k.to(state.dtype).unsqueeze(-1) * v.to(state.dtype).unsqueeze(-2)
    group = q.shape[1] // k.shape[1]
    return torch.einsum("bhr,bhrd->bhd", q.to(state.dtype), state.repeat_interleave(group, 1)).to(q.dtype)


@launching
def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    decay: Tensor | None = None,
    *,
    out: Tensor | None = None,
    config: StepConfig | None = None,
) -> Tensor:
    """Returns out [batch, q_heads, dim] of one more token; updates state, fp32 [batch, kv_heads, rank, dim],
    in place.

    q [batch, q_heads, rank], k [batch, kv_heads, rank], v [batch, kv_heads, dim] in fp16, bf16 or fp32, any
    strides except the last, which is 1; q_heads a multiple of kv_heads. decay [kv_heads] in (0, 1], which is
    not checked here. Raises ValueError for tensors that do not fit together.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3:
            raise ValueError(f"{name} has to be [batch, heads, columns], not {kind(x)}")
    sizes = sizes_of(q.unsqueeze(2), k.unsqueeze(2), v.unsqueeze(2), decay)
    check_like("state", state, sizes.state, torch.float32)
    shape = sizes.batch, sizes.q_heads, sizes.dim
    out = torch.empty(shape, dtype=q.dtype, device=q.device) if out is None else out
    check_like("out", out, shape, q.dtype)
    check_written("out", out, q, k, v)
    check_written("state", state)
    config = config or config_for(q, sizes)
    blocks = triton.cdiv(sizes.dim, config.columns)
    step_kernel[(blocks * sizes.kv_heads * sizes.batch,)](
        q, k, v, state, decay, out, None, None,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *state.stride()[:3], *out.stride()[:2],
        RANK_USED=sizes.rank, DIM_USED=sizes.dim, RANK=padded(sizes.rank), COLUMNS=config.columns,
        BLOCKS=blocks, HEADS=sizes.kv_heads, GROUP=sizes.group, SHARED=1,
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return out


@triton.jit
def step_kernel(
    q_ptr, k_ptr, v_ptr, state_ptr, decay_ptr, out_ptr, slots_ptr, lengths_ptr,
    stride_q_sequence, stride_q_head, stride_k_sequence, stride_k_head, stride_v_sequence, stride_v_head,
    stride_state_sequence, stride_state_head, stride_state_row, stride_out_sequence, stride_out_head,
    RANK_USED: tl.constexpr, DIM_USED: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the state of one KV head of one sequence. Grid (blocks * heads * batch,), blocks fastest.
    SHARED heads of states, of a query head each, have one key and value; slots, lengths: `triton_served`."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0)
    head = (at // BLOCKS % HEADS).to(tl.int64)
    sequence = (at // (BLOCKS * HEADS)).to(tl.int64)
    place, rows_known = sequence, RANK_USED
    if lengths_ptr is not None:
        length = tl.load(lengths_ptr + sequence)
        if length == 0:
            return
        place = tl.load(slots_ptr + sequence).to(tl.int64)
        rows_known = tl.where(length > 1, RANK_USED, 0)
    row = tl.arange(0, RANK)
    column = at % BLOCKS * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, column_inside = row < RANK_USED, column < DIM_USED
    state_base = state_ptr + place * stride_state_sequence + head * stride_state_head
    state_at = state_base + row.to(tl.int64)[:, None] * stride_state_row + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    k_base = k_ptr + sequence * stride_k_sequence + head // SHARED * stride_k_head
    v_base = v_ptr + sequence * stride_v_sequence + head // SHARED * stride_v_head
    q_base = q_ptr + sequence * stride_q_sequence + head * GROUP * stride_q_head
    # All loads are in flight before any result is used: a small step is mostly one trip to memory.
    decay = 1.0
    if decay_ptr is not None:
        decay = tl.load(decay_ptr + head).to(tl.float32)
    state = tl.load(state_at, mask=inside & (row < rows_known)[:, None], other=0.0)
    k = tl.load(k_base + row, mask=row_inside, other=0.0)
    v = tl.load(v_base + column, mask=column_inside, other=0.0)
    next_q = tl.load(q_base + row, mask=row_inside, other=0.0)
    state = state * decay + k.to(tl.float32)[:, None] * v.to(tl.float32)[None, :]
    tl.store(state_at, state, mask=inside)
    out_base = out_ptr + sequence * stride_out_sequence + head * GROUP * stride_out_head
    for query in range(GROUP):
        q = next_q.to(tl.float32)
        more = row_inside & (query + 1 < GROUP)
        next_q = tl.load(q_base + (query + 1) * stride_q_head + row, mask=more, other=0.0)
        out = tl.sum(q[:, None] * state, 0)
        tl.store(
            out_base + query * stride_out_head + column, out.to(out_ptr.dtype.element_ty), mask=column_inside
        )
