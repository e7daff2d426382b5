"""Shared by the split-KV attention kernels: a part of the tokens, the sum of parts, and which programs sum.

    part s      o_s = softmax(q K_s^T scale) V_s,    l_s = log2 sum exp2(q K_s^T scale log2(e))
    sum         out = sum_s 2^(l_s - l) o_s,         l = log2 sum_s 2^l_s

(Flash-Decoding, Dao et al. 2023.) One program attends over one part for the `GROUP` queries of one KV head,
those of its query heads for all query tokens, so that K and V are read once. Part s takes blocks s, s +
splits, s + 2 splits, ... of the tokens: the programs of a launch then read neighbouring memory at any time,
which saves 3 % of a token compared to a contiguous stretch for each part.

The last `SHARERS` programs of a KV head sum the parts in the same launch: a query each, or a slice of its
columns, or several queries if there are few parts. No counter and no fence tells them that a part has
arrived. The words of a part do: memory that waits for a part is filled with EMPTY, a value that no result
has, and the program that has read a part empties it again for the next launch. (NCCL's LL protocol does the
same.) A program that sums waits only for programs of its own KV head. All of these except `SHARERS` - 1 come
before it in the grid, and GPUs start programs in grid order.

A waiting program holds a place on a multiprocessor. So a launch needs as many places as it has programs that
sum, at most `sharers` of its layout, and concurrent launches need theirs together.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.checks import kind
from simcore.kernels.gpu import gpu_of
from simcore.kernels.streams import words

# The interpreter runs programs one after another: no program may wait for a later one.
ONE_BY_ONE = bool(triton.knobs.runtime.interpret)
# Bytes of K of a block if two programs share a multiprocessor; with one program a multiprocessor, twice that.
BLOCK_BYTES = 8 * 1024
# Above this many parts, the sum costs more than a second program a multiprocessor gains.
MOST_PARTS = 64
STAGES, WARPS = 4, 4
# Stages at most: of small blocks more say nothing to memory, and take long to compile.
MOST_STAGES = 8
# Shared memory that a program needs besides its blocks.
SPARE_BYTES = 8 * 1024
# A matrix instruction takes at least so many rows.
LEAST_ROWS = 16
# Query tokens of a sequence, and the queries of a KV head for several tokens: a program holds them all.
MOST_QUERY_TOKENS, MOST_ROWS = 8, 128
# Bytes of shared memory that a number of a query takes at most, in formats of two bytes and of four.
NUMBER_BYTES = {2: 6, 4: 16}
# Words of the summed parts that each warp of a program holds at most: 64 a thread, and as many logs.
HELD = 2048
# Parts that a thread may hold of one column.
FEW_PARTS = 8
# Neighbouring words that a thread loads at once.
LOADED_AT_ONCE = tl.constexpr(4)
# One in so many parts is polled while most are still to come; of fewer parts a larger share, of so many all.
LOOKED_AT = tl.constexpr(8)
# A bit pattern that no result has: the NaN of a GPU's arithmetic has another pattern.
EMPTY = tl.constexpr(-1)
# Below all scores but -inf.
LOWEST = tl.constexpr(-3e38)
# Logs are to base 2 in here, and natural ones outside.
LN2 = tl.constexpr(math.log(2))
# Tensors of a kept workspace begin at multiples of so many words.
ALIGNED = 64


class Workspace(NamedTuple):
    """The memory through which the parts of one launch are summed.

    Launches that overlap need a workspace each; a call without one has that of its stream (`kept_space`).
    After an aborted launch a new one is needed: the next launch would take the words left in the old one for
    its own.

    int32, EMPTY before a launch and again after it: partials [pairs, splits, group, d] and logs [pairs,
    splits, group, slices copies] hold fp32 results. A pair is a sequence and one of its KV heads; group: see
    `group_of`; copies: see `write_part`. Of `dealt_parts` there is a row for each program.
    """

    partials: Tensor
    logs: Tensor


@dataclass(frozen=True, slots=True)
class Cache:
    """K and V in the form that the kernels take."""

    k: Tensor
    v: Tensor
    table: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def kv_heads(self) -> int:
        """The number of KV heads."""
        return self.k.shape[1 if self.table is None else 2]

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""
        return self.k.shape[2] if self.table is None else self.table.shape[1] * self.page

    @property
    def page(self) -> int:
        """Tokens of a page, 0 for a contiguous cache."""
        return 0 if self.table is None else self.k.shape[1]

    def strides(self) -> tuple[int, ...]:
        """Strides in elements, of K, then of V: sequence or page, head; then of the block table: sequence."""
        head = 1 if self.table is None else 2
        of = (x.stride(dim) for x in (self.k, self.v) for dim in (0, head))
        return (*of, 0 if self.table is None else self.table.stride(0))

    def token_strides(self) -> tuple[int, int]:
        """Strides of a token in elements, of K and of V."""
        token = 2 if self.table is None else 1
        return self.k.stride(token), self.v.stride(token)


def one_token(q: Tensor) -> Tensor:
    """Returns the queries of each sequence's first query token, [batch, q_heads, d], of q of that shape or
    [batch, queries, q_heads, d]. Raises ValueError for no query token or too many."""
    if q.dim() != 4:
        return q
    if not 1 <= q.shape[1] <= MOST_QUERY_TOKENS:
        raise ValueError(
            f"q has to be [batch, 1 to {MOST_QUERY_TOKENS} query tokens, q_heads, d], not {kind(q)}"
        )
    return q[:, 0]


def group_of(q: Tensor, kv_heads: int) -> int:
    """Returns the queries of a KV head: of its query heads, for all query tokens. q: see `one_token`."""
    return math.prod(q.shape[1:-1]) // kv_heads


def check_rows(q: Tensor, kv_heads: int) -> None:
    """Raises ValueError for q [batch, queries, q_heads, d] if a program cannot hold a KV head's queries."""
    group, d = group_of(q, kv_heads), q.shape[-1]
    room = gpu_of(q).shared_bytes // NUMBER_BYTES[q.element_size()]
    if group > MOST_ROWS or rows_of(group) * padded(d) > room:
        tokens = q.shape[1]
        raise ValueError(
            f"q: {tokens} query tokens of {group // tokens} heads a KV head, of {d} numbers, are too many; "
            f"a program holds {MOST_ROWS} queries and {room} numbers at most"
        )


def rows_of(group: int) -> int:
    """Returns the rows of a tile of so many queries: a power of two."""
    return max(LEAST_ROWS, int(triton.next_power_of_2(group)))


def cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    table: Tensor | None,
    scales: tuple[Tensor | None, Tensor | None],
    rows: tuple[int, int] | None = None,
) -> Cache:
    """Checks K and V and returns them as a Cache. `rows`: those of lengths and of the table, by default one
    for each of q. Raises ValueError naming the tensor that does not fit."""
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
    of_lengths, of_table = rows or (len(q), len(q))
    for name, x, dimensions, wanted in (
        ("lengths", lengths, 1, of_lengths), ("block_table", table, 2, of_table),
    ):  # fmt: skip
        if x is not None and not (
            x.dtype == torch.int32 and x.dim() == dimensions and len(x) == wanted and x.stride(-1) == 1
        ):
            raise ValueError(
                f"{name} has to be contiguous int32, a row for each of {wanted} sequences, not {kind(x)}"
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


@dataclass(frozen=True, slots=True)
class Shares:
    """The split of the sum of a KV head's queries: `count` shares, each of `queries` queries, or of one of
    `slices` slices of the columns of a query."""

    count: int
    queries: int
    slices: int


def shares(group: int, head_dim: int, parts: int, slices: int, warps: int) -> Shares:
    """Returns the shares of a sum of so many parts.

    As many slices as asked for, or more, so that a program holds its share of all parts at once; several
    queries a share if parts are few, so that each thread has all parts of its columns and need not wait for
    other threads. Raises ValueError for slices that are no power of two or more than columns, and for more
    parts than can be summed.

    >>> shares(4, 128, 132, 1, 4), shares(8, 128, 16, 8, 4)
    (Shares(count=16, queries=1, slices=4), Shares(count=64, queries=1, slices=8))
    >>> shares(8, 128, 4, 1, 4), shares(5, 128, 4, 1, 4)
    (Shares(count=2, queries=4, slices=1), Shares(count=2, queries=4, slices=1))
    """
    dim = padded(head_dim)
    if slices < 1 or slices & (slices - 1) or slices > dim:
        raise ValueError(f"slices have to be a power of two, {dim} at most, not {slices}")
    while triton.next_power_of_2(parts) * dim > slices * HELD * warps:
        slices *= 2
    if slices > dim:
        raise ValueError(f"{parts} parts are too many to sum")
    queries = 1
    while slices == 1 and parts <= FEW_PARTS and queries < group and 2 * queries * dim <= _threads(warps):
        queries *= 2
    return Shares(triton.cdiv(group, queries) * slices, queries, slices)


def _threads(warps: int) -> int:
    """Returns how many numbers the threads of a program load at once."""
    return int(LOADED_AT_ONCE.value) * 32 * warps


def sizes(q: Tensor, kv: Cache, *, splits: int, slices: int, warps: int, sharers: int) -> dict[str, int]:
    """Returns the compile-time constants of the kernels. The parts of a pair are summed by as many of its
    programs as there are shares, at most `sharers`. Raises ValueError if these cannot all wait at a time."""
    group, d = group_of(q, kv.kv_heads), q.shape[-1]
    dim = padded(d)
    shared = shares(group, d, splits, slices, warps)
    columns = dim // shared.slices
    waiting, processors = min(splits, shared.count, sharers), gpu_of(q).processors
    if waiting > processors:
        raise ValueError(f"sharers: {waiting} programs of a head would wait; {processors} surely run at once")
    return {
        "GROUP": group,
        "ROWS": rows_of(group),
        "HEAD_DIM": d,
        "DIM": dim,
        "PAGE": kv.page,
        # Known to the compiler, these cost no arithmetic before the first load.
        "K_TOKEN": kv.token_strides()[0],
        "V_TOKEN": kv.token_strides()[1],
        "WIDE": kv.capacity * max(kv.token_strides()) >= 1 << 31,
        "SPLITS": splits,
        "SHARES": shared.count,
        "SHARERS": 1 if ONE_BY_ONE else waiting,
        "QUERIES": shared.queries,
        "COLUMNS": columns,
        "SLICES": shared.slices,
        "PARTS": tile(splits, shared.queries * columns, warps),
    }


def large_block(head_dim: int, kv_bytes: int) -> int:
    """Returns the tokens of a block if one program has a multiprocessor, or few large blocks are on their
    way; `kv_bytes` an element of K and V."""
    return max(16, min(128, 2 * BLOCK_BYTES // (padded(head_dim) * kv_bytes)))


def depth_beside_others(block: int, head_dim: int, kv_bytes: int, shared_bytes: int, programs: int) -> int:
    """Returns the pipeline stages with which so many programs share a multiprocessor's memory; at least 2."""
    return depth_that_fits(block * padded(head_dim) * kv_bytes, shared_bytes // programs)


def depth_that_fits(block_bytes: int, shared_bytes: int) -> int:
    """Returns the pipeline stages whose blocks of K and V, of so many bytes each, fit a program's shared
    memory; at least 2."""
    depth = STAGES
    while depth > 2 and not _fit(1, depth, block_bytes, shared_bytes):
        depth -= 1
    return depth


def depth_that_fills(depth: int, block_bytes: int, shared_bytes: int, programs: int) -> int:
    """Returns the fewest pipeline stages, `depth` or more, with which so many programs leave no room for
    another in a multiprocessor's memory, or as many as fit, MOST_STAGES at most.

    >>> [depth_that_fills(4, 8192, 227 * 1024, programs) for programs in (1, 2, 4)]
    [8, 6, 4]
    """
    while depth < MOST_STAGES and _fit(programs + 1, depth, block_bytes, shared_bytes):
        if not _fit(programs, depth + 1, block_bytes, shared_bytes):
            break
        depth += 1
    return depth


def _fit(programs: int, depth: int, block_bytes: int, shared_bytes: int) -> bool:
    """Whether so many programs fit a multiprocessor's memory; the last stage has no blocks of its own."""
    return programs * (2 * (depth - 1) * block_bytes + SPARE_BYTES) <= shared_bytes


def stages(wanted: int, kv: Cache) -> int:
    """Returns the pipeline stages to ask the compiler for: one more with a block table, because the compiler
    then takes one away for the look-up of addresses."""
    return wanted + (kv.table is not None)


@lru_cache(maxsize=1)
def _is_able() -> bool:
    return ONE_BY_ONE or torch.cuda.is_available()


def launched(warps: int, chained: bool) -> dict[str, int | bool]:
    """Returns the launch options of a program; see DecodeConfig for `chained`. Raises RuntimeError if no
    kernel can run."""
    if not _is_able():
        raise RuntimeError("kernels need a CUDA device, or TRITON_INTERPRET=1 before they are imported")
    if not chained or ONE_BY_ONE:
        return {"num_warps": warps, "CHAINED": False}
    return {"num_warps": warps, "CHAINED": True, "launch_pdl": True}


def padded(head_dim: int) -> int:
    """Returns the columns of a head's tile: a power of two, at least 16."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def tile(count: int, columns: int, warps: int) -> int:
    """Returns the rows that a program loads to sum `count` parts in `columns`: so many that no number of a
    tile is in two threads. Otherwise a warp could leave the loop that waits for the parts while another warp,
    which polled earlier, stays; with each number in one thread all warps decide alike.

    >>> tile(132, 32, 4), tile(2, 64, 4)
    (256, 8)
    """
    return max(int(triton.next_power_of_2(count)), _threads(warps) // columns)


def made(q: Tensor, wanted: Sequence[tuple[int, ...]]) -> Workspace:
    """Makes a workspace of these shapes on the device of q."""
    return Workspace(*(empty(q, *shape) for shape in wanted))


def kept_space(q: Tensor, wanted: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Returns a workspace's tensors of these shapes in words that belong to the device of q and its stream;
    without a GPU, new ones."""
    if not q.is_cuda:
        return [empty(q, *shape) for shape in wanted]
    # Compilers load more at once from addresses that are multiples of 16 bytes.
    starts = [0, *accumulate(-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in wanted)]
    every = words(q.device, "attention", starts[-1], EMPTY.value)
    return [
        every[start : start + math.prod(shape)].view(shape)
        for start, shape in zip(starts, wanted, strict=False)
    ]


def shapes(q: Tensor, kv_heads: int, parts: int, slices: int) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of such a workspace."""
    return of_rows(q, (len(q) * kv_heads, parts, group_of(q, kv_heads)), slices)


def of_rows(q: Tensor, rows: tuple[int, ...], slices: int) -> list[tuple[int, ...]]:
    """Returns the shapes of parts and of their logs, a row for each query of each part; copies of logs: see
    `write_part`."""
    d = q.shape[-1]
    return [(*rows, d), (*rows, slices * min(LOADED_AT_ONCE.value, padded(d) // slices))]


def empty(q: Tensor, *shape: int) -> Tensor:
    """Makes words that wait for results, on the device of q."""
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
def query_at(query, stride_token, stride_head, GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr):
    """Where queries of a KV head lie, from its first on: those of the first query token, then the next's."""
    if QUERY_TOKENS == 1:
        at = query * stride_head
    else:
        of_head: tl.constexpr = GROUP // QUERY_TOKENS
        at = query // of_head * stride_token + query % of_head * stride_head
    return at


@triton.jit
def store_queries(
    out, base, stride_token, stride_head,
    GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """Writes [GROUP, HEAD_DIM] of out [ROWS, DIM] as the queries of a KV head."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    mask = (rows < GROUP) & (columns < HEAD_DIM)
    at = query_at(rows, stride_token, stride_head, GROUP, QUERY_TOKENS)
    tl.store(base + at + columns, out.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_queries(
    q_ptr, stride_token, stride_head,
    GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
):  # fmt: skip
    """The queries of a KV head, [ROWS, DIM], zeros beyond [GROUP, HEAD_DIM]."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    at = query_at(rows, stride_token, stride_head, GROUP, QUERY_TOKENS)
    return tl.load(q_ptr + at + columns, mask=(rows < GROUP) & (columns < HEAD_DIM), other=0.0)


@triton.jit
def seen(
    index, token, attended, length, sinks, window,
    GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr, ROWS: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Whether queries attend the tokens of a block, [BLOCK] if there is one query token, else [ROWS, BLOCK].
    `index`: the tokens' places among those `attended` by any query; `token`: those in the sequence of
    `length` tokens. For query token t of T the sequence ends T - 1 - t tokens earlier, and so does its
    window."""
    inside = index < attended
    if QUERY_TOKENS > 1:
        end = length - (QUERY_TOKENS - 1) + tl.arange(0, ROWS) // (GROUP // QUERY_TOKENS)
        end, at = end[:, None], token[None, :]
        inside = inside[None, :] & (at < end)
        if WINDOWED:
            inside = inside & ((at < sinks) | (at >= end - window))
    return inside


@triton.jit
def cached_rows(
    base, token, table_ptr, stride_outer,
    TOKEN: tl.constexpr, WIDE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    first=0, ONE_PAGE: tl.constexpr = False,
):  # fmt: skip
    """Rows of K or V at some tokens, [BLOCK, DIM]. ONE_PAGE: all of them are in the page of token `first`."""
    columns = tl.arange(0, DIM)[None, :]
    if PAGE == 0:
        at = (token.to(tl.int64) if WIDE else token) * TOKEN
    elif ONE_PAGE:
        at = tl.load(table_ptr + first // PAGE).to(tl.int64) * stride_outer + (token % PAGE) * TOKEN
    else:
        at = tl.load(table_ptr + token // PAGE).to(tl.int64) * stride_outer + (token % PAGE) * TOKEN
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
    stride_k_outer, stride_v_outer,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, WIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, first=0, ONE_PAGE: tl.constexpr = False,
):  # fmt: skip
    """The running softmax (FlashAttention, Dao et al. 2022) with a block of tokens added: those where
    `inside`, [BLOCK] or [ROWS, BLOCK]. `first`, ONE_PAGE: see `cached_rows`."""
    k = cached_rows(
        k_base, token, table_ptr, stride_k_outer, K_TOKEN, WIDE, HEAD_DIM, DIM, PAGE, first, ONE_PAGE
    ).to(q.dtype)  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    if len(inside.shape) == 1:
        inside = inside[None, :]
    scores = tl.where(inside, scores, -float("inf"))
    # A block of tokens that all score -inf leaves a number to take differences from.
    higher = tl.maximum(tl.maximum(top, tl.max(scores, 1)), LOWEST)
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores - higher[:, None])
    v = cached_rows(
        v_base, token, table_ptr, stride_v_outer, V_TOKEN, WIDE, HEAD_DIM, DIM, PAGE, first, ONE_PAGE
    ).to(q.dtype)  # fmt: skip
    out = tl.dot(weights.to(q.dtype), v, out * shrink[:, None], input_precision="tf32x3")
    return higher, sums * shrink[:, None] + weights, out


@triton.jit
def part(top, sums, out):
    """out [ROWS, DIM] and log [ROWS] of what was added; zeros, and a log below all others, where there was no
    token or all score -inf."""
    total = tl.sum(sums, 1)
    # Without a token, top stays -inf.
    total = tl.where(total > 0, total, 1.0)
    return out / total[:, None], top + tl.log2(total)


@triton.jit
def write_log(
    log, lse_ptr, sequence, head, heads, query, there, GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr
):
    """Writes the logs to base 2 of queries of a KV head as natural ones, -inf where there was no token or all
    score -inf, `there` in lse [batch, queries, q_heads]; nothing if `lse_ptr` is None."""
    if lse_ptr is not None:
        log = tl.where(log <= LOWEST, -float("inf"), log * LN2)
        of_head = GROUP // QUERY_TOKENS
        base = lse_ptr + sequence.to(tl.int64) * heads * GROUP + head * of_head
        tl.store(base + query_at(query, heads * of_head, 1, GROUP, QUERY_TOKENS), log, mask=there)


@triton.jit
def write_part(
    out, log, partials_ptr, logs_ptr, row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Writes a part from `row` on (of all KV heads, parts and queries)."""
    write_words(out, partials_ptr, row, GROUP, ROWS, HEAD_DIM, DIM)
    # One copy a slice, because the program that sums a slice empties the words it has read; and as many
    # copies as a thread loads at once, so that each thread has the log that it needs.
    COPIES: tl.constexpr = SLICES * min(LOADED_AT_ONCE, DIM // SLICES)
    logs = tl.broadcast_to(log[:, None], [ROWS, COPIES])
    write_words(logs, logs_ptr, row, GROUP, ROWS, COPIES, COPIES)


@triton.jit
def write_words(
    out, words_ptr, row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Writes [GROUP, HEAD_DIM] of out [ROWS, DIM] from `row` on, for others to take."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    mask = (rows < GROUP) & (columns < HEAD_DIM)
    tl.store(words_ptr + (row + rows) * HEAD_DIM + columns, out.to(tl.int32, bitcast=True), mask=mask)


@triton.jit
def take(at, there):
    """fp32 results at `at`, each once, as soon as all are there; leaves EMPTY. See `tile` for the shape."""
    words = tl.load(at, mask=there, other=0, volatile=True)
    while tl.max((words == EMPTY).to(tl.int32)) == 1:
        words = tl.load(at, mask=there, other=0, volatile=True)
    tl.store(at, tl.full(words.shape, EMPTY, tl.int32), mask=there)
    return words.to(tl.float32, bitcast=True)


@triton.jit
def places(query, first_column, QUERIES: tl.constexpr, COLUMNS: tl.constexpr):
    """The queries and columns of a share, [QUERIES * COLUMNS] each."""
    at = tl.arange(0, QUERIES * COLUMNS)
    return query + at // COLUMNS, first_column + at % COLUMNS


@triton.jit
def sum_parts(
    partials_ptr, logs_ptr, ends_ptr, first_row, row, ends_row, query, first_column, count,
    PARTS: tl.constexpr, ENDS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Waits for `count` parts of a share and empties them; the group's first query is at rows `row`, `row` +
    GROUP, ... of the parts, that of the first part at `first_row` unless this is None. Their sum at `places`,
    [QUERIES * COLUMNS], zeros for no token at all, and its log; and between them, where ENDS, what is to be
    compared with the sum, the group's first at `ends_row` (else `ends_ptr` and `ends_row` are not used).
    PARTS: see `tile`; WIDTH: the columns of a slice of logs, COLUMNS or fewer."""
    which, column = places(query, first_column, QUERIES, COLUMNS)
    number, which, column = tl.arange(0, PARTS)[:, None], which[None, :], column[None, :]
    counted = (number < count) & (which < GROUP)
    there = counted & (column < HEAD_DIM)
    part_row = row + number * GROUP + which
    if first_row is not None:
        part_row = tl.where(number == 0, first_row + which, part_row)
    words_at = partials_ptr + part_row * HEAD_DIM + column
    # Spread over threads like the parts' columns, although the logs are few words.
    at = tl.arange(0, QUERIES * COLUMNS)
    COPIES: tl.constexpr = min(LOADED_AT_ONCE, WIDTH)
    logs_at = logs_ptr + part_row * (SLICES * COPIES) + column // WIDTH * COPIES + (at % COPIES)[None, :]
    # One row of a tile like the parts', so that here too each number is in one thread.
    ends_at = ends_ptr + (ends_row + which) * HEAD_DIM + column + 0 * number
    ends_there = (number == 0) & (which < GROUP) & (column < HEAD_DIM)
    if ENDS:
        # All loads at once: one round trip to memory.
        logs = tl.load(logs_at, mask=counted, other=0, volatile=True)
        words = tl.load(words_at, mask=there, other=0, volatile=True)
        ends = tl.load(ends_at, mask=ends_there, other=0, volatile=True)
        while tl.max(((logs == EMPTY) | (words == EMPTY) | (ends == EMPTY)).to(tl.int32)) == 1:
            logs = tl.load(logs_at, mask=counted, other=0, volatile=True)
            words = tl.load(words_at, mask=there, other=0, volatile=True)
            ends = tl.load(ends_at, mask=ends_there, other=0, volatile=True)
    else:
        # First poll a few words, other ones for each share: many programs wait here, and programs that still
        # read need the bandwidth.
        share = query + first_column // COLUMNS
        EVERY: tl.constexpr = max(1, min(LOOKED_AT, PARTS // LOOKED_AT))
        few = counted & (at == 0)[None, :] & (number % EVERY == share % EVERY)
        waiting = tl.max((tl.load(logs_at, mask=few, other=0, volatile=True) == EMPTY).to(tl.int32))
        while waiting == 1:
            waiting = tl.max((tl.load(logs_at, mask=few, other=0, volatile=True) == EMPTY).to(tl.int32))
        logs = tl.load(logs_at, mask=counted, other=0, volatile=True)
        words = tl.load(words_at, mask=there, other=0, volatile=True)
        while tl.max(((logs == EMPTY) | (words == EMPTY)).to(tl.int32)) == 1:
            logs = tl.load(logs_at, mask=counted, other=0, volatile=True)
            words = tl.load(words_at, mask=there, other=0, volatile=True)
    # The tile holds the same log more than once: none may be emptied before all are read.
    tl.debug_barrier()
    empty = tl.full(words.shape, EMPTY, tl.int32)
    tl.store(logs_at, empty, mask=counted)
    tl.store(words_at, empty, mask=there)
    log = tl.where(counted, logs.to(tl.float32, bitcast=True), -float("inf"))
    top = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(top == -float("inf"), 0.0, top)[None, :])
    values = weight * words.to(tl.float32, bitcast=True)
    # All sums in one reduction: the wait for the other warps is the cost.
    if ENDS:
        tl.store(ends_at, empty, mask=ends_there)
        ends_values = ends.to(tl.float32, bitcast=True)
        total, out, compared = tl.reduce((weight, values, ends_values), 0, _three_added)
    else:
        total, out = tl.reduce((weight, values), 0, two_added)
        compared = out
    # If the sum of weights is 0, the weighted values are 0 too.
    total = tl.where(total > 0, total, 1.0)
    return out / total, compared, top + tl.log2(total)


@triton.jit
def two_added(a, b, other_a, other_b):
    """Combines two reductions at once."""
    return a + other_a, b + other_b


@triton.jit
def _three_added(a, b, c, other_a, other_b, other_c):
    return a + other_a, b + other_b, c + other_c
