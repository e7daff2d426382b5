"""Attention of a serving step: prompt chunks and decoding sequences side by side, over a paged cache.

    row i of a sequence with r rows in this step and n tokens in the cache, those of the step included:

    out = sum_j p_j v_j,   p = softmax(q . k_j / sqrt(d)),   over its tokens j = 0 .. n - r + i

Rows of a sequence are neighbours: sequence s has rows starts[s] .. starts[s + 1] - 1. A chunk of a prompt has
a row a token, a decoding sequence has one. The device reads starts, lengths and the table, and the grid
depends on shapes alone: one captured graph serves all steps of up to so many rows and sequences.

One program attends from a tile of rows, with all query heads of one KV head, over the cache, block by block
with a running softmax (FlashAttention 2, Dao 2023). Tile t of B rows belongs to the last sequence s with

    starts[s] // B + s <= t

Sequence s then has a tile for each B rows that it may have, and at most one more; finding s takes one load
and one count. Rows behind starts[sequences] are padding: a sequence of no tokens, whose result is 0.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.attention import attend
from simcore.kernels.decoder.checks import check_like, check_powers, check_written, kind
from simcore.kernels.decoder.decode_attention import LOG2E, tokens_of
from simcore.kernels.decoder.split_kv import (
    LEAST_ROWS,
    LOWEST,
    Cache,
    cache,
    cached_rows,
    group_of,
    launched,
    padded,
)
from simcore.kernels.gpu import gpu_of, launching

# Bytes of a block of K, and of a tile of queries.
BLOCK_BYTES, TILE_BYTES = 16 * 1024, 32 * 1024
# Queries of a tile at most: two warp groups multiply 64 each. Of fp32, which takes three products, fewer.
MOST_QUERIES, MOST_WIDE = 128, 32
# Up to so many rows, tiles of half as many queries are as fast or faster.
FEW_ROWS = 1024
# Tokens of a block are looked up one by one, but a page holds whole rows of a matrix instruction.
PAGE_OF = 16
# The limit of a grid's second dimension.
MOST_TILES = 65535


@dataclass(frozen=True, slots=True)
class RaggedConfig:
    """The layout of a launch.

    `queries`: of a tile, query heads times rows; `block`: tokens at a time; `stages`: blocks that a program
    reads or computes with at a time; `warps` a program; `narrow`: whether sequences of few queries, as
    decoding ones, take tiles of LEAST_ROWS queries; `masked`: whether all blocks are masked, in one loop, or
    only those at the diagonal, in a loop after that of the others."""

    queries: int
    block: int
    stages: int
    warps: int
    narrow: bool = True
    masked: bool = False

    def __post_init__(self) -> None:
        check_powers(self, "queries", "block", "warps")
        for name, least in (("queries", LEAST_ROWS), ("block", LEAST_ROWS), ("stages", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: a layout cannot have {getattr(self, name)}; {least} at least")

    def __str__(self) -> str:
        return (
            f"{self.queries} queries, blocks of {self.block}, {self.stages} stages, {self.warps} warps"
            f"{', narrow' * self.narrow}{', masked' * self.masked}"
        )


def ragged_config(rows: int, *, head_dim: int, q_bytes: int, kv_bytes: int) -> RaggedConfig:
    """Returns the layout for so many rows of heads of this size; `q_bytes`, `kv_bytes` an element of q and of
    K, V. Those of 128 numbers of two bytes were the fastest on an H200, or within 4 % of it.

    >>> print(ragged_config(512, head_dim=128, q_bytes=2, kv_bytes=2))
    64 queries, blocks of 64, 3 stages, 4 warps, narrow
    >>> print(ragged_config(2048, head_dim=128, q_bytes=2, kv_bytes=2))
    128 queries, blocks of 128, 2 stages, 8 warps, narrow
    >>> print(ragged_config(2048, head_dim=256, q_bytes=2, kv_bytes=1))
    64 queries, blocks of 32, 3 stages, 8 warps, narrow
    """
    # K and V of fewer bytes than q are widened on their way.
    row_bytes = padded(head_dim) * max(q_bytes, kv_bytes)
    block = max(LEAST_ROWS, min(128, BLOCK_BYTES // row_bytes))
    if q_bytes > 2:
        return RaggedConfig(min(MOST_WIDE, block), min(MOST_WIDE, block), 2, 4)
    queries = min(MOST_QUERIES, max(64, TILE_BYTES // row_bytes))
    if queries < MOST_QUERIES:
        return RaggedConfig(queries, block, 3, 8)
    if rows <= FEW_ROWS:
        return RaggedConfig(queries // 2, block, 3, 4)
    return RaggedConfig(queries, min(128, 2 * block), 2, 8)


def tiles(rows: int, sequences: int, rows_of_tile: int) -> int:
    """Returns the tiles that so many rows of so many sequences may take, those of padding included.

    >>> tiles(512, 8, 32), tiles(1, 1, 32)
    (25, 2)
    """
    return rows // rows_of_tile + sequences + 1


@launching
def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    config: RaggedConfig | None = None,
) -> Tensor:
    """Attends causally from q [rows, q_heads, d], rows of a sequence side by side, over a paged cache.

    k, v: blocks [blocks, block_size, kv_heads, d], block_size a multiple of 16; they may be fp8, with k_scale
    and v_scale (fp32 [kv_heads]): value = stored * scale. On the device, int32: starts [sequences + 1], the
    first row of each sequence, ascending, and the end of the last; lengths [sequences], the tokens of each in
    the cache, its rows of this step included; block_table [sequences, max_blocks]. Entries of the table
    behind a sequence's tokens are not read, nor is the memory of blocks behind its last token.

    A sequence may have no row. Returns out, as q, in `out` if given; it is 0 for padding, the rows from
    starts[sequences] on, and for a row that attends no token; rows before starts[0] stay as they are. config:
    the layout, by default that of `ragged_config`. Raises ValueError for tensors that do not fit together.
    """
    kv = _checked(q, k, v, starts, lengths, block_table, (k_scale, v_scale))
    if q.dtype == torch.float64:
        raise ValueError("no fp64: this sums in fp32")
    out = torch.empty_like(q) if out is None else out
    check_like("out", out, tuple(q.shape), q.dtype)
    check_written("out", out, q)
    if not len(q):
        return out
    d, group = q.shape[-1], group_of(q, kv.kv_heads)
    config = config or ragged_config(len(q), head_dim=d, q_bytes=q.element_size(), kv_bytes=k.element_size())
    if group > config.queries:
        raise ValueError(f"queries: a tile of {config.queries} holds no row of {group} heads a KV head")
    count = tiles(len(q), len(lengths), config.queries // group)
    if count > MOST_TILES:
        raise ValueError(f"at most {MOST_TILES} tiles, not {count}: {len(q)} rows are too many")
    k_token, v_token = kv.token_strides()
    # The compiler shares its stages out evenly between the look-up of addresses and the reading of blocks.
    compiled_stages = 2 * config.stages - 1
    _ragged_attention_kernel[(kv.kv_heads, count)](
        q, k, v, out, starts, lengths, block_table, k_scale, v_scale,
        d**-0.5 * LOG2E, len(q), len(lengths), kv.capacity,
        *q.stride()[:2], *out.stride()[:2], *kv.strides(),
        SEQUENCES=triton.next_power_of_2(len(lengths) + 1), SCALED=k_scale is not None,
        GROUP=group, QUERIES=config.queries, BLOCK=config.block, STAGES=compiled_stages,
        NARROW=LEAST_ROWS if config.narrow and group <= LEAST_ROWS < config.queries else 0,
        MASKED=config.masked, HEAD_DIM=d, DIM=padded(d), PAGE=kv.page, K_TOKEN=k_token, V_TOKEN=v_token,
        **launched(config.warps, gpu_of(q).chained),
    )  # fmt: skip
    return out


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    scales: tuple[Tensor | None, Tensor | None],
) -> Cache:
    """Returns the cache. Raises ValueError naming the tensor that does not fit."""
    if lengths.dim() != 1 or not len(lengths):
        raise ValueError(f"lengths has to be [sequences], one or more, not {kind(lengths)}")
    kv = cache(q, k, v, lengths, block_table, scales, (len(lengths), len(lengths)))
    if kv.page % PAGE_OF:
        raise ValueError(f"blocks of {kv.page} tokens are no multiple of {PAGE_OF}")
    check_like("starts", starts, (len(lengths) + 1,), torch.int32)
    return kv


@triton.jit
def _ragged_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr,
    scale, rows, sequences, capacity,
    q_row, q_head, out_row, out_head, k_outer, k_head, v_outer, v_head, table_row,
    CHAINED: tl.constexpr, SEQUENCES: tl.constexpr, SCALED: tl.constexpr,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    NARROW: tl.constexpr, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr,
):  # fmt: skip
    """A tile of rows and a KV head: program (KV head, tile). SEQUENCES: `sequences` + 1, padded."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    ROWS: tl.constexpr = QUERIES // GROUP
    # Programs start in grid order. The last tiles of a prompt are the longest, and prompts stand behind
    # decoding sequences: what takes long starts first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    each = tl.arange(0, SEQUENCES)
    start = tl.load(starts_ptr + each, mask=each <= sequences, other=0)
    sequence = tl.sum(((start // ROWS + each <= tile) & (each <= sequences)).to(tl.int32)) - 1
    if sequence < 0:
        return
    # The last entry is where padding begins, the sequence without tokens.
    begin = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1, mask=sequence < sequences, other=rows)
    first = (tile - begin // ROWS - sequence) * ROWS
    if first >= end - begin:
        return
    length = tl.minimum(tl.load(lengths_ptr + sequence, mask=sequence < sequences, other=0), capacity)
    head = tl.program_id(0)
    if SCALED:
        scale *= tl.load(k_scale_ptr + head)
    row = begin + first
    q_ptr += row.to(tl.int64) * q_row + head * GROUP * q_head
    out_ptr += row.to(tl.int64) * out_row + head * GROUP * out_head
    k_ptr += head.to(tl.int64) * k_head
    v_ptr += head.to(tl.int64) * v_head
    table_ptr += sequence.to(tl.int64) * table_row
    v_scale = 1.0
    if SCALED:
        v_scale = tl.load(v_scale_ptr + head)
    # The tile's rows, and the tokens that the first of them attends.
    count, attended = tl.minimum(end - row, ROWS), length - (end - row) + 1
    if NARROW > 0 and count * GROUP <= NARROW:
        _tile_attended(
            q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, scale, v_scale, count, attended,
            q_row, q_head, out_row, out_head, k_outer, v_outer,
            GROUP, NARROW, BLOCK, STAGES, MASKED, HEAD_DIM, DIM, PAGE, K_TOKEN, V_TOKEN,
        )  # fmt: skip
    else:
        _tile_attended(
            q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, scale, v_scale, count, attended,
            q_row, q_head, out_row, out_head, k_outer, v_outer,
            GROUP, QUERIES, BLOCK, STAGES, MASKED, HEAD_DIM, DIM, PAGE, K_TOKEN, V_TOKEN,
        )  # fmt: skip


@triton.jit
def _tile_attended(
    q_ptr, k_ptr, v_ptr, out_ptr, table_ptr, scale, v_scale, count, attended,
    q_row, q_head, out_row, out_head, k_outer, v_outer,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr,
):  # fmt: skip
    """Attends from `count` rows, the first of which attends `attended` tokens, each other one more than the
    row before it. Query heads of a row are neighbours in the tile."""
    query, column = tl.arange(0, QUERIES), tl.arange(0, DIM)[None, :]
    row, member = query // GROUP, query % GROUP
    there = (row < count)[:, None] & (column < HEAD_DIM)
    q = tl.load(q_ptr + (row * q_row + member * q_head)[:, None] + column, mask=there, other=0.0)
    limit, end = attended + row, attended + count - 1
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total, out = tl.zeros([QUERIES], tl.float32), tl.zeros([QUERIES, DIM], tl.float32)
    # Blocks that all rows attend whole.
    whole = 0
    if not MASKED:
        whole = tl.maximum(attended, 0) // BLOCK * BLOCK
        for block in tl.range(0, whole, BLOCK, num_stages=STAGES):
            top, total, out = _block_added(
                top, total, out, q, k_ptr, v_ptr, table_ptr, block, limit, end, scale, k_outer, v_outer,
                False, BLOCK, HEAD_DIM, DIM, PAGE, K_TOKEN, V_TOKEN,
            )  # fmt: skip
    for block in tl.range(whole, end, BLOCK, num_stages=STAGES):
        top, total, out = _block_added(
            top, total, out, q, k_ptr, v_ptr, table_ptr, block, limit, end, scale, k_outer, v_outer,
            True, BLOCK, HEAD_DIM, DIM, PAGE, K_TOKEN, V_TOKEN,
        )  # fmt: skip
    # Without a token the sum is 0, as its numerator.
    out *= (v_scale / tl.where(total > 0, total, 1.0))[:, None]
    to = out_ptr + (row * out_row + member * out_head)[:, None] + column
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def _block_added(
    top, total, out, q, k_ptr, v_ptr, table_ptr, block, limit, end, scale, k_outer, v_outer,
    MASKED: tl.constexpr, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr,
):  # fmt: skip
    """The running softmax with the tokens from `block` on added; where MASKED, of each query those before its
    `limit`, [QUERIES], all of which are before `end`. top: the highest scores, to base 2 and scaled."""
    token = block + tl.arange(0, BLOCK)
    # Past the end the last token is read again, because the memory behind it may hold anything.
    at = tl.minimum(token, end - 1) if MASKED else token
    k = cached_rows(
        k_ptr, at, table_ptr, k_outer, K_TOKEN, False, HEAD_DIM, DIM, PAGE, block, PAGE % BLOCK == 0
    ).to(q.dtype)  # fmt: skip
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if MASKED:
        scores = tl.where(token[None, :] < limit[:, None], scores, -float("inf"))
    # Scores that all are -inf leave a number to take differences from.
    higher = tl.maximum(tl.maximum(top, tl.max(scores, 1) * scale), LOWEST)
    shrink = tl.exp2(top - higher)
    weights = tl.exp2(scores * scale - higher[:, None])
    v = cached_rows(
        v_ptr, at, table_ptr, v_outer, V_TOKEN, False, HEAD_DIM, DIM, PAGE, block, PAGE % BLOCK == 0
    ).to(q.dtype)  # fmt: skip
    out = tl.dot(weights.to(q.dtype), v, out * shrink[:, None], input_precision="tf32x3")
    return higher, total * shrink + tl.sum(weights, 1), out


def reference_ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """As `ragged_attention`, sequence by sequence in plain torch; any float dtype, float64 is the truth. Rows
    before starts[0] are 0."""
    kv = _checked(q, k, v, starts, lengths, block_table, (k_scale, v_scale))
    out, ends = torch.zeros_like(q), starts.tolist()
    for sequence, length in enumerate(lengths.clamp(0, kv.capacity).tolist()):
        begin, end = ends[sequence : sequence + 2]
        rows = end - begin
        if not rows or not length:
            continue
        keys, values = tokens_of(kv, sequence, range(length), q.dtype)
        place = torch.arange(length - rows, length, device=q.device)[:, None]
        hidden = torch.arange(length, device=q.device)[None, :] > place
        mask = torch.zeros_like(hidden, dtype=keys.dtype).masked_fill_(hidden, -math.inf)
        found = attend(q[None, begin:end].to(keys.dtype), keys, values, mask)[0][0]
        # Rows that attend no token.
        out[begin:end] = found.nan_to_num(nan=0.0) if rows > length else found
    return out
