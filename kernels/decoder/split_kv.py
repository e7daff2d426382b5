"""What the split-KV attention kernels share: a part of the tokens, the sum of parts, and who makes it.

    part s      o_s = softmax(q K_s^T scale) V_s,    l_s = log2 sum exp2(q K_s^T scale log2(e))
    sum         out = sum_s 2^(l_s - l) o_s,         l = log2 sum_s 2^l_s

(Flash-Decoding, Dao et al. 2023.) One program attends over one part for the `GROUP` query heads of one KV
head, so that K and V are read once. Part s takes blocks s, s + splits, s + 2 splits, ... of the tokens: the
programs of a launch then read neighbouring memory at any time, which is worth 3 % of a token over part s
taking a stretch of its own.

Parts are summed in the same launch, by the last `SHARERS` programs of a KV head: a query each, or a slice of
its columns, or several queries where there are few programs. No counter and no fence tell them that a part is
there: the words of a part do it themselves, for memory that waits for a part is filled with EMPTY, which no
result is, and whoever has read a part empties it again for the next launch. (NCCL's LL protocol does the
same.) A program that sums waits for programs of its own KV head only, all but `SHARERS` - 1 of which come
before it in the grid, and GPUs start programs in the order of the grid.

Whoever waits holds a place on a multiprocessor, so a launch needs as many as it has programs that sum, at
most `DecodeConfig.sharers`, and launches at the same time need them together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decoder.checks import kind

# The interpreter runs programs one after another: none may wait for a later one.
ONE_BY_ONE = bool(triton.knobs.runtime.interpret)
# Rows that a matrix instruction takes at least.
LEAST_ROWS = 16
# Numbers that each warp of a program holds at most of the parts that it sums: 64 a thread.
HELD = 2048
# Neighbouring words that a thread loads at once.
LOADED_AT_ONCE = 4
# Bits of no result: the NaN that a GPU's arithmetic makes has another pattern.
EMPTY = tl.constexpr(-1)


class Workspace(NamedTuple):
    """Where the parts of one launch meet. Launches that overlap need one each, and after a launch that was
    broken off a new one is needed: words that nobody took would be taken for the next launch's.

    int32, EMPTY before a launch and again after it: partials [pairs, splits, group, d] and logs [pairs,
    slices, splits, group] hold fp32 results, a pair being a sequence and one of its KV heads.
    """

    partials: Tensor
    logs: Tensor


@dataclass(frozen=True, slots=True)
class Cache:
    """K and V as the kernels take them."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.k.shape[1 if self.table is None else 2]

    @property
    def capacity(self) -> int:
        """Tokens that a sequence may have."""
        return self.k.shape[2] if self.table is None else self.table.shape[1] * self.page

    @property
    def page(self) -> int:
        """Tokens of a page, 0 where the cache is contiguous."""
        return 0 if self.table is None else self.k.shape[1]

    def strides(self) -> tuple[int, ...]:
        """In elements, of K, then of V: sequence or page, head, token. And of the block table: sequence."""
        of: list[int] = []
        for x in (self.k, self.v):
            outer, one, two, _ = x.stride()
            of += (outer, one, two) if self.table is None else (outer, two, one)
        return (*of, 0 if self.table is None else self.table.stride(0))


def cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> Cache:
    """K and V with all that has to fit checked. Raises ValueError naming what does not."""
    if k.shape != v.shape or k.dim() != 4 or k.dtype != v.dtype:
        raise ValueError(f"k and v have to be of one shape and format, not {kind(k)} and {kind(v)}")
    if q.dim() != 3 or q.shape[-1] != k.shape[-1] or 0 in k.shape[1:] or q.shape[1] == 0:
        raise ValueError(
            f"q has to be [batch, q_heads, {k.shape[-1]}], nothing empty, not {kind(q)}, {kind(k)}"
        )
    if q.dtype not in FORMATS or k.dtype not in (*FORMATS, torch.float8_e4m3fn):
        raise ValueError(
            f"attention is in fp16, bf16 or fp32, k and v may be fp8, not {q.dtype} over {k.dtype}"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        raise ValueError("the last dimension of q, k and v has to be contiguous")
    if table is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"{q.shape[0]} queries over {k.shape[0]} sequences")
    for name, x, dimensions in (("lengths", lengths, 1), ("block_table", table, 2)):
        if x is not None and not (
            x.dtype == torch.int32 and x.dim() == dimensions and len(x) == len(q) and x.stride(-1) == 1
        ):
            raise ValueError(
                f"{name} has to be contiguous int32, a row for each of {len(q)} sequences, not {kind(x)}"
            )
    made = Cache(k, v, table, *scales)
    if made.capacity == 0:
        raise ValueError("block_table has no column")
    if q.shape[1] % made.kv_heads:
        raise ValueError(f"{q.shape[1]} query heads are no multiple of {made.kv_heads} KV heads")
    for name, x in (("k_scale", scales[0]), ("v_scale", scales[1])):
        if x is not None and (
            x.dtype != torch.float32 or x.shape != (made.kv_heads,) or not x.is_contiguous()
        ):
            raise ValueError(f"{name} has to be contiguous fp32 [{made.kv_heads}], not {kind(x)}")
    if (scales[0] is None) != (scales[1] is None):
        raise ValueError("k_scale and v_scale go together")
    return made


FORMATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sizes(
    q: Tensor, kv: Cache, *, splits: int, parts: int, slices: int, warps: int, sharers: int
) -> dict[str, int]:
    """The constants that the kernels are compiled for, where `parts` parts of a pair are summed, by as many
    of its programs as there are queries and slices, `sharers` at most."""
    group, d = q.shape[1] // kv.kv_heads, q.shape[2]
    dim = padded(d)
    slices = sliced(parts, dim, slices, warps)
    rows, copies = tile(parts, dim // slices, warps)
    return {
        "GROUP": group,
        "ROWS": max(LEAST_ROWS, int(triton.next_power_of_2(group))),
        "HEAD_DIM": d,
        "DIM": dim,
        "PAGE": kv.page,
        "SPLITS": splits,
        "SHARERS": 1 if ONE_BY_ONE else min(splits, group * slices, sharers),
        "SLICES": slices,
        "PARTS": rows,
        "COPIES": copies,
    }


def stages(wanted: int, kv: Cache) -> int:
    """Blocks on their way, as the compiler counts: it takes one away where addresses are looked up in a
    table."""
    return wanted + (kv.table is not None)


def launched(warps: int, chained: bool) -> dict[str, int | bool]:
    """How a program is started; see DecodeConfig for `chained`."""
    if not chained or ONE_BY_ONE:
        return {"num_warps": warps, "CHAINED": False}
    return {"num_warps": warps, "CHAINED": True, "launch_pdl": True}


def padded(head_dim: int) -> int:
    """Columns of a head's tile: a power of two."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def sliced(parts: int, dim: int, slices: int, warps: int) -> int:
    """Into how many slices the columns of a query are cut, each for a program to sum: as many as asked for,
    or more, so that a program holds its slice of all parts at once.

    >>> sliced(132, 128, 1, 4), sliced(16, 128, 1, 4), sliced(16, 128, 8, 4)
    (4, 1, 8)
    """
    if slices < 1 or slices & (slices - 1) or slices > dim:
        raise ValueError(f"slices have to be a power of two, {dim} at most, not {slices}")
    while triton.next_power_of_2(parts) * dim > slices * HELD * warps:
        slices *= 2
    if slices > dim:
        raise ValueError(f"{parts} parts are too many to sum")
    return slices


def tile(count: int, columns: int, warps: int) -> tuple[int, int]:
    """Parts, and copies of each log, that a program loads to sum `count` parts: so many that no number of a
    tile is in two threads. Else a warp could leave the loop that waits for the parts while another, which
    looked earlier, stays: with each number in one place all warps decide alike.

    >>> tile(132, 32, 4), tile(2, 64, 4)
    ((256, 2), (8, 64))
    """
    threads = LOADED_AT_ONCE * 32 * warps
    parts = max(int(triton.next_power_of_2(count)), threads // columns)
    return parts, max(1, threads // parts)


def room(q: Tensor, kv_heads: int, *, parts: int, slices: int, warps: int) -> Workspace:
    """A workspace for `parts` parts of each pair."""
    return Workspace(*(empty(q, *shape) for shape in shapes(q, kv_heads, parts, slices, warps)))


def shapes(q: Tensor, kv_heads: int, parts: int, slices: int, warps: int) -> list[tuple[int, ...]]:
    """Of the tensors of such a workspace."""
    batch, heads, d = q.shape
    pairs, group = batch * kv_heads, heads // kv_heads
    return [(pairs, parts, group, d), (pairs, sliced(parts, padded(d), slices, warps), parts, group)]


def empty(q: Tensor, *shape: int) -> Tensor:
    """Words for results to come, on the device of q."""
    return torch.full(shape, EMPTY.value, dtype=torch.int32, device=q.device)


@triton.jit
def cache_of(
    k_ptr, v_ptr, sequence, head, stride_k_outer, stride_k_head, stride_v_outer, stride_v_head,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Where K and V of a head begin: of a sequence's, or in pages of all sequences'."""
    k_base, v_base = k_ptr + head.to(tl.int64) * stride_k_head, v_ptr + head.to(tl.int64) * stride_v_head
    if PAGE == 0:
        k_base += sequence.to(tl.int64) * stride_k_outer
        v_base += sequence.to(tl.int64) * stride_v_outer
    return k_base, v_base


@triton.jit
def store_queries(
    out, base, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Writes [GROUP, HEAD_DIM] of out [ROWS, DIM] as the queries of a KV head."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    mask = (rows < GROUP) & (columns < HEAD_DIM)
    tl.store(base + rows * stride_head + columns, out.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_queries(
    q_ptr, stride_head, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr
):
    """The queries of a KV head, [ROWS, DIM], zeros beyond [GROUP, HEAD_DIM]."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    return tl.load(
        q_ptr + rows * stride_head + columns, mask=(rows < GROUP) & (columns < HEAD_DIM), other=0.0
    )


@triton.jit
def _tile(
    base,
    token,
    table_ptr,
    stride_outer,
    stride_token,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Rows of K or V at some tokens, [BLOCK, DIM]."""
    columns = tl.arange(0, DIM)[None, :]
    if PAGE == 0:
        at = token.to(tl.int64) * stride_token
    else:
        at = tl.load(table_ptr + token // PAGE).to(tl.int64) * stride_outer + (token % PAGE) * stride_token
    pointers = base + at[:, None] + columns
    if HEAD_DIM == DIM:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns < HEAD_DIM, other=0.0)


@triton.jit
def nothing(ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """What `block_added` begins with: the highest score of each row, its sums by column of the block (adding
    up over columns is left to the end), and the weighted values."""
    top = tl.full([ROWS], -float("inf"), tl.float32)
    return top, tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def block_added(
    top, sums, out, q, k_base, v_base, table_ptr, token, inside, scale,
    stride_k_outer, stride_k_token, stride_v_outer, stride_v_token,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The running softmax (FlashAttention, Dao et al. 2022) with a block of tokens added: those where
    `inside`."""
    k = _tile(k_base, token, table_ptr, stride_k_outer, stride_k_token, HEAD_DIM, DIM, PAGE).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    scores = tl.where(inside[None, :], scores, -float("inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    v = _tile(v_base, token, table_ptr, stride_v_outer, stride_v_token, HEAD_DIM, DIM, PAGE).to(q.dtype)
    out = tl.dot(weights.to(q.dtype), v, out * shrink[:, None], input_precision="tf32x3")
    return higher, sums * shrink[:, None] + weights, out


@triton.jit
def part(top, sums, out):
    """out [ROWS, DIM] and log [ROWS] of what was added; zeros and -inf where there was no token."""
    total = tl.sum(sums, 1)
    # Without a token top is -inf and stays it.
    total = tl.where(total > 0, total, 1.0)
    return out / total[:, None], top + tl.log2(total)


@triton.jit
def write_part(
    out, log, partials_ptr, logs_ptr, row, log_row, slice_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Writes a part: out at `row` (of all KV heads, parts and queries), log at `log_row` for each slice."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, DIM)[None, :]
    mask = (rows < GROUP)[:, None] & (columns < HEAD_DIM)
    words = out.to(tl.int32, bitcast=True)
    tl.store(partials_ptr + (row + rows)[:, None] * HEAD_DIM + columns, words, mask=mask)
    # Whoever sums a slice empties the log that it has read, so each slice has one of its own.
    slices = tl.arange(0, SLICES)[None, :]
    words = tl.broadcast_to(log.to(tl.int32, bitcast=True)[:, None], [ROWS, SLICES])
    tl.store(logs_ptr + log_row + slices * slice_stride + rows[:, None], words, mask=(rows < GROUP)[:, None])


@triton.jit
def take(at, there):
    """fp32 results at `at`, once all of them are there; leaves EMPTY. Each has to be in one thread only."""
    words = tl.load(at, mask=there, other=0, volatile=True)
    while tl.max((words == EMPTY).to(tl.int32)) == 1:
        words = tl.load(at, mask=there, other=0, volatile=True)
    # The same word may stand in the tile more than once: none is emptied before all are read.
    tl.debug_barrier()
    tl.store(at, tl.full(words.shape, EMPTY, tl.int32), mask=there)
    return words.to(tl.float32, bitcast=True)


@triton.jit
def sum_parts(
    partials_ptr, logs_ptr, row, log_row, first_column,
    COUNT: tl.constexpr, PARTS: tl.constexpr, COPIES: tl.constexpr, ENDS: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Waits for COUNT parts of one query, at rows `row`, `row` + GROUP, ..., and empties them. Their sum, and
    that of the first ENDS of them alone where ENDS > 0, in columns from `first_column` on: [COLUMNS] each; no
    token at all gives zeros. PARTS, COPIES: see `tile`."""
    number = tl.arange(0, PARTS)
    there = number < COUNT
    logs_at = logs_ptr + (log_row + number * GROUP)[:, None] + tl.zeros([1, COPIES], tl.int32)
    logs_there = there[:, None] & (tl.arange(0, COPIES) >= 0)[None, :]
    # Logs come last and are few: whoever waits looks at them, and finds the rest there.
    logs = take(logs_at, logs_there)
    columns = (first_column + tl.arange(0, COLUMNS))[None, :]
    words_at = partials_ptr + (row + number * GROUP)[:, None] * HEAD_DIM + columns
    values = take(words_at, there[:, None] & (columns < HEAD_DIM))
    log = tl.where(there, tl.max(logs, 1), -float("inf"))
    top = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(top == -float("inf"), 0.0, top))
    if ENDS == 0:
        out = tl.sum(weight[:, None] * values, 0) / _positive(tl.sum(weight, 0))
        return out, out
    # Both sums in one reduction: it is waiting for the other warps that costs.
    both = tl.join(weight, tl.where(number < ENDS, weight, 0.0))
    total, ends_total = tl.split(tl.sum(both, 0))
    out, ends = tl.split(tl.sum(both[:, None, :] * values[:, :, None], 0))
    return out / _positive(total), ends / _positive(ends_total)


@triton.jit
def _positive(total):
    """A sum of weights to divide by: where it is 0, so is what is divided."""
    return tl.where(total > 0, total, 1.0)
