"""Shared by the Triton kernels of linear attention: checks of the tensors, and the decay on the device.

Powers of the decay are taken only with exponents of at least 0. A state is carried on by gamma^n - 1, as S +
(gamma^n - 1) S: with gamma^n itself, rounded, a decay close to 1 would lose digits with every chunk of a long
sequence, all in one direction.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.checks import check_like, check_written, kind
from simcore.kernels.linear_attention.terms import mask, masked_product, state_after, weighed_queries

FORMATS = (torch.float16, torch.bfloat16, torch.float32)
# The most columns of q and k that a kernel takes: a program holds a state of so many rows. Of v a program has
# some columns; nobody has asked for more.
WIDEST, WIDEST_VALUES = 256, 1024


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a call; a step has one token."""

    batch: int
    q_heads: int
    kv_heads: int
    length: int
    rank: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q_heads // self.kv_heads

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Shape of a state."""
        return self.batch, self.kv_heads, self.rank, self.dim

    @property
    def out(self) -> tuple[int, int, int, int]:
        """Shape of an output."""
        return self.batch, self.q_heads, self.length, self.dim


def padded(columns: int) -> int:
    """Returns the columns of a tile: a power of two, as matrix instructions take them."""
    return max(16, int(triton.next_power_of_2(columns)))


def check_widths(rank: int, dim: int) -> None:
    """Raises ValueError for heads that are wider than kernels take: q and k of `rank` columns, v of `dim`."""
    if rank > WIDEST or dim > WIDEST_VALUES:
        most = f"q and k have at most {WIDEST} columns, v {WIDEST_VALUES}"
        raise ValueError(f"{most}; here they have {rank} and {dim}")


def sizes_of(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> Sizes:
    """Returns the sizes of q [batch, q_heads, length, rank], k [batch, kv_heads, length, rank] and v [..,
    dim], decay [kv_heads]. Raises ValueError naming the tensor that does not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        most = WIDEST_VALUES if name == "v" else WIDEST
        if x.dim() != 4 or 0 in x.shape or x.stride(-1) != 1 or x.shape[-1] > most:
            raise ValueError(
                f"{name} has to be [batch, heads, length, {most} at most], nothing empty, the last "
                f"dimension contiguous, not {kind(x)}"
            )
        if x.dtype not in FORMATS or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} has to be fp16, bf16 or fp32, as q and where q is, not {kind(x)}; q is {kind(q)}"
            )
    batch, q_heads, length, rank = q.shape
    kv_heads = k.shape[1]
    if k.shape != (batch, kv_heads, length, rank) or q_heads % kv_heads:
        raise ValueError(f"k has to be [{batch}, a divisor of {q_heads}, {length}, {rank}], not {kind(k)}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v has to be [{batch}, {kv_heads}, {length}, dim], not {kind(v)}")
    if decay is not None and not (
        decay.is_floating_point() and decay.shape == (kv_heads,) and decay.is_contiguous()
    ):
        raise ValueError(f"decay has to be contiguous numbers [{kv_heads}], not {kind(decay)}")
    return Sizes(batch, q_heads, kv_heads, length, rank, v.shape[-1])


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sizes: Sizes,
    state: Tensor | None,
    lengths: Tensor | None,
    out: Tensor | None,
    final_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns `out` and `final_state`, by default new ones, and checks all other tensors. Raises ValueError
    naming the tensor that does not fit."""
    if state is not None:
        check_like("state", state, sizes.state, torch.float32)
    if lengths is not None and not (
        lengths.dtype == torch.int32 and lengths.shape == (sizes.batch,) and lengths.is_contiguous()
    ):
        raise ValueError(f"lengths has to be contiguous int32 [{sizes.batch}], not {kind(lengths)}")
    out = torch.empty(sizes.out, dtype=q.dtype, device=q.device) if out is None else out
    check_like("out", out, sizes.out, q.dtype)
    if final_state is None:
        final_state = torch.empty(sizes.state, dtype=torch.float32, device=q.device)
    check_like("final_state", final_state, sizes.state, torch.float32)
    # Programs read their inputs until the end.
    check_written("out", out, q, k, v)
    check_written("final_state", final_state, state, out)
    return out, final_state


def strides(x: Tensor | None) -> tuple[int, ...]:
    """Returns the strides in elements of all dimensions of [batch, heads, rows, columns] except the last."""
    return (0, 0, 0) if x is None else tuple(x.stride()[:3])


def reference_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes the same as the kernels, out [batch, q_heads, length, dim] and the final state [batch,
    kv_heads, rank, dim], in plain torch and in the format of q, with all scores at once."""
    group = q.shape[1] // k.shape[1]
    heads_decay = None if decay is None else decay.repeat_interleave(group)
    out, last = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(*k.shape[:2], q.shape[-1], v.shape[-1])
    for b in range(len(q)):
        n = q.shape[2] if lengths is None else min(max(int(lengths[b]), 0), q.shape[2])
        before = last[b : b + 1].clone() if state is None else state[b : b + 1].to(q.dtype)
        queries, keys, values = (x[b : b + 1, :, :n] for x in (q, k, v))
        weights = mask(n, heads_decay, q.dtype, q.device)
        inside = masked_product(
            queries, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), weights
        )
        carried = weighed_queries(queries, heads_decay) @ before.repeat_interleave(group, 1)
        out[b, :, :n] = (inside + carried)[0]
        last[b] = state_after(keys, values, decay, before)[0]
    return out, last


# -- on the device -----------------------------------------------------------------------------------------


@triton.jit
def log_decay(decay_ptr, head):
    """log2 of a head's decay, fp32."""
    # A decay of fp64 may be too small for fp32; 0 rows of it still have weight 1.
    return tl.maximum(tl.log2(tl.load(decay_ptr + head).to(tl.float32)), -1e30)


@triton.jit
def shrinkage(log, rows):
    """gamma^rows - 1 of log_decay."""
    power = log * rows
    # Close to 0 by the series of e^x - 1, because the difference would have few digits left.
    x = tl.maximum(power, -0.5) * 0.6931471805599453
    series = 1 + x * (1 / 6) * (1 + x * (1 / 7))
    series = x * (1 + x * (1 / 2) * (1 + x * (1 / 3) * (1 + x * (1 / 4) * (1 + x * (1 / 5) * series))))
    return tl.where(power > -0.5, series, tl.exp2(power) - 1)


@triton.jit
def tile(
    base, start, stride, count, first_column, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FULL_ROWS: tl.constexpr, FULL_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows `start` and on of a head, [ROWS, WIDTH], zeros from row `count` and from column `columns` of the
    matrix on; FULL_...: where there are none of these."""
    row = start + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, WIDTH)[None, :]
    at = base + row.to(tl.int64)[:, None] * stride + column
    inside = row[:, None] < count
    if FULL_ROWS and FULL_COLUMNS:
        return tl.load(at)
    if FULL_ROWS:
        return tl.load(at, mask=column < columns, other=0.0)
    if not FULL_COLUMNS:
        inside &= column < columns
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_tile(x, base, start, stride, count, first_column, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Writes x [ROWS, WIDTH] as rows `start` and on of a head, up to row `count` and column `columns`."""
    row = (start + tl.arange(0, ROWS))[:, None]
    column = first_column + tl.arange(0, WIDTH)[None, :]
    at = base + row.to(tl.int64) * stride + column
    tl.store(at, x.to(base.dtype.element_ty), mask=(row < count) & (column < columns))
