"""Attention of one query token a sequence, or a few, over its cached tokens, split over the tokens
(Flash-Decoding).

    out = sum_j p_j v_j,   p = softmax(scale q . k_j),   lse = log sum_j exp(scale q . k_j)

over all tokens j of the sequence, or only over its first `sinks` and last `window` tokens (StreamingLLM, Xiao
et al. 2023).

Programs read the lengths on the device and split each sequence's tokens evenly there: the host plans nothing,
and a captured graph stays valid while its sequences grow. See `split_kv` for the parts and their sum, which
the same launch makes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.attention import attend
from simcore.kernels.decoder.checks import check_gate, check_like, check_space, kind
from simcore.kernels.decoder.dealt_parts import (
    MOST_DEALT,
    DealtConfig,
    dealt_config,
    dealt_constants,
    dealt_part,
    dealt_shapes,
)
from simcore.kernels.decoder.split_kv import (
    BLOCK_BYTES,
    LEAST_ROWS,
    MOST_PARTS,
    NUMBER_BYTES,
    WARPS,
    Cache,
    Shares,
    Workspace,
    block_added,
    cache,
    cache_of,
    check_rows,
    depth_beside_others,
    depth_that_fills,
    depth_that_fits,
    group_of,
    kept_space,
    large_block,
    launched,
    load_queries,
    made,
    nothing,
    one_token,
    padded,
    part,
    places,
    query_at,
    seen,
    shapes,
    shares,
    sizes,
    stages,
    store_queries,
    sum_parts,
    write_log,
    write_part,
)
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import PROCESSORS, SHARED_BYTES, Gpu, gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.kernels.streams import shared
from simcore.ops.op import Op

# log2(e): exponents are taken to base 2, as the hardware computes them.
LOG2E = math.log2(math.e)


LAYOUTS = (
    "block: a power of two from 16 on; warps: 1, 2, 4 or 8; slices: a power of two; splits, stages and "
    "sharers: 1 or more"
)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The layout of a launch.

    `block`: tokens at a time; `splits`: programs a KV head and sequence; `stages`: the depth of each
    program's pipeline of blocks; `warps` a program; `slices`: the cuts of a query's columns in the sum of
    parts; `chained`: whether the launch starts while the launch before it ends, and then waits for it;
    `sharers`: the most programs of a KV head that sum, because each holds a place on a multiprocessor while
    it waits."""

    block: int
    splits: int
    stages: int
    warps: int
    slices: int
    chained: bool = False
    sharers: int = 64

    def __post_init__(self) -> None:
        wanted = {
            "block": self.block >= 16 and self.block & (self.block - 1) == 0,
            "warps": self.warps in (1, 2, 4, 8),
            "stages": self.stages >= 1,
            "splits": self.splits >= 1,
            "slices": self.slices >= 1 and self.slices & (self.slices - 1) == 0,
            "sharers": self.sharers >= 1,
        }
        for name, good in wanted.items():
            if not good:
                raise ValueError(f"{name}: a layout cannot have {getattr(self, name)}; {LAYOUTS}")

    def __str__(self) -> str:
        return (
            f"{self.splits} splits, blocks of {self.block}, {self.stages} stages, {self.warps} warps, "
            f"{self.slices} slices{', chained' * self.chained}"
        )


# The limit of a grid's third dimension.
MOST_SEQUENCES = 65535
# So few pairs of a sequence and a KV head, sequences of at most so many tokens, and caches of so few bytes
# are not worth the search for a part.
FEW_PAIRS, SHORT, SMALL_BYTES = 8, 1536, 64 << 20
# Sums of so many parts or fewer take 2 to 3 us less than those of more, below FEW_SPLITS: worth parts of so
# many tokens.
QUICK_SUM, FEW_SPLITS, SHORT_PART = 4, 16, 320
# So many splits with small blocks read a third slower than others.
SLOW_SPLITS = (7, 8)
# Programs that share a multiprocessor where pairs of programs would leave places empty.
CROWDED = 3
# Compile-time constants that only dealt parts have.
DEALT_CONSTANTS = (
    "BATCH", "HEADS", "PORTIONS", "LEAST", "EVEN", "FEW", "FEW_QUERIES", "FEW_SHARES", "FEW_SHARERS"
)  # fmt: skip


def decode_config(
    *,
    batch: int,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    capacity: int,
    kv_bytes: int,
    processors: int = PROCESSORS,
    shared_bytes: int = SHARED_BYTES,
    chained: bool = True,
) -> DecodeConfig:
    """Returns the layout for a shape on a GPU of so many multiprocessors; `kv_bytes` an element of K, V.

    Two programs a multiprocessor, each with three blocks of 8 KB of K and V in flight, keep memory busy, and
    do so until the end if all read equally much: as many splits as fit into one wave. If a head would be
    split into more than MOST_PARTS parts, one program a multiprocessor with blocks twice as large reads
    nearly as fast and leaves half as much to sum; two multiprocessors then stay free. (Measured on an H200:
    docs/measurements/kernels.md.)

    >>> shape = {"batch": 1, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "kv_bytes": 2}
    >>> print(decode_config(**shape, capacity=8192))
    32 splits, blocks of 32, 4 stages, 4 warps, 4 slices, chained
    >>> print(decode_config(**shape, capacity=1024))
    16 splits, blocks of 64, 4 stages, 4 warps, 2 slices, chained
    >>> print(decode_config(batch=1, q_heads=4, kv_heads=1, head_dim=128, capacity=131072, kv_bytes=2))
    130 splits, blocks of 64, 4 stages, 4 warps, 16 slices, chained
    """
    if min(batch, q_heads, kv_heads, head_dim, capacity, kv_bytes) < 1 or q_heads % kv_heads:
        raise ValueError(
            f"no layout for {batch} sequences, {q_heads}/{kv_heads} heads of {head_dim}, {capacity} tokens"
        )
    pairs, group = batch * kv_heads, q_heads // kv_heads
    splits, block_bytes = 2 * processors // pairs, BLOCK_BYTES
    # Two programs that sum many queries together take longer than one program without a sum.
    alone = splits == 2 and group > 2
    if splits > MOST_PARTS or alone:
        splits, block_bytes = (processors - 2) // pairs, 2 * BLOCK_BYTES
    elif splits == 7:
        block_bytes = 2 * BLOCK_BYTES
    elif splits == 8:
        splits, block_bytes = processors // pairs, 4 * BLOCK_BYTES
    row_bytes = padded(head_dim) * kv_bytes
    block, large = max(16, min(128, block_bytes // row_bytes)), large_block(head_dim, kv_bytes)
    splits, block = _fitted(max(1, splits), block, large, capacity, pairs, group)
    slices = 1 << min(4, max(0, splits.bit_length() - 4))
    depth = depth_that_fits(block * row_bytes, shared_bytes)
    return DecodeConfig(block, splits, depth, WARPS, slices, chained, max(1, processors // 2))


def _fitted(splits: int, block: int, large: int, capacity: int, pairs: int, group: int) -> tuple[int, int]:
    """Returns the splits and the block for sequences of up to `capacity` tokens: fewer splits, in blocks of
    up to `large` tokens, where these are short."""
    splits, many = _nearly_a_power(splits), pairs > FEW_PAIRS
    block = max(block, large) if splits * large > capacity else block
    # One block a program and no further one; two of many queries, whose sum takes longer.
    least = 2 * large if many and group > 4 else large
    if splits * least > capacity:
        splits = max(1, capacity // least)
        splits = splits if splits > FEW_SPLITS else _power_below(splits)
    if QUICK_SUM < splits < FEW_SPLITS and many and capacity <= QUICK_SUM * SHORT_PART:
        splits = QUICK_SUM
    return splits, max(block, large) if splits in SLOW_SPLITS else block


def _power_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _nearly_a_power(splits: int) -> int:
    """Returns the power of two below if that is up to a sixteenth less: sums are made in tiles of powers of
    two.

    >>> [_nearly_a_power(splits) for splits in (5, 16, 17, 18, 33, 34, 35, 130)]
    [5, 16, 16, 18, 32, 32, 35, 130]
    """
    power = _power_below(splits)
    return power if splits * 16 <= power * 17 and splits <= MOST_PARTS + 4 else splits


def _in_large_blocks(config: DecodeConfig, kv: Cache, gpu: Gpu) -> DecodeConfig:
    """Returns a layout with which CROWDED programs share a multiprocessor: fewer places stay empty where
    programs do not fill whole waves of two."""
    head_dim, kv_bytes = kv.k.shape[-1], kv.k.element_size()
    block = large_block(head_dim, kv_bytes)
    stages = depth_beside_others(block, head_dim, kv_bytes, gpu.shared_bytes, CROWDED)
    return replace(config, block=block, stages=stages)


def is_crowded(pairs: int, processors: int = PROCESSORS) -> bool:
    """Whether so many pairs of a sequence and a KV head, each one program, would leave places empty, two to a
    multiprocessor: a fifth of whole waves, a quarter of a single one.

    >>> [is_crowded(pairs) for pairs in (132, 133, 197, 198, 264, 272, 422, 423)]
    [False, True, True, False, False, True, True, False]
    """
    resident = 2 * processors
    whole_waves = -(-pairs // resident) * resident
    return 2 * pairs > resident and 20 * pairs < (15 if pairs <= resident else 16) * whole_waves


def config_for(q: Tensor, kv: Cache) -> DecodeConfig | DealtConfig:
    """Returns the layout for these tensors on their device. A single sequence, few pairs, short sequences and
    small caches are split alike, because finding a part takes a program 1 to 3 us. Others are cut by their
    lengths."""
    pairs, token_bytes = len(q) * kv.kv_heads, 2 * q.shape[-1] * kv.k.element_size()
    gpu, few = gpu_of(q), len(q) == 1 or pairs <= FEW_PAIRS
    if few or len(q) > MOST_DEALT or kv.capacity <= longest_split(pairs, token_bytes):
        config = split_config_for(q, kv)
        return _in_large_blocks(config, kv, gpu) if is_crowded(pairs, gpu.processors) else config
    return dealt_config(
        head_dim=q.shape[-1],
        kv_bytes=kv.k.element_size(),
        gpu=gpu,
        pairs=pairs,
        capacity=kv.capacity,
        paged=kv.table is not None,
    )


def config_in_step(q: Tensor, kv: Cache) -> DecodeConfig | DealtConfig:
    """Returns the layout of `config_for` for a launch that starts while a product ends. Programs then take
    their places one after another, and a multiprocessor that is free early would take more than its share:
    where sequences are split alike, each program has too much in flight for that. It stays as it is where
    launches are not chained, with a block table, whose look-ups take stages of their own, and with many or
    wide queries, which need memory too."""
    config, gpu = config_for(q, kv), gpu_of(q)
    if isinstance(config, DealtConfig) or not config.chained or kv.table is not None:
        return config
    if group_of(q, kv.kv_heads) > LEAST_ROWS or q.element_size() > min(NUMBER_BYTES):
        return config
    programs = config.splits * len(q) * kv.kv_heads
    block_bytes = config.block * padded(q.shape[-1]) * kv.k.element_size()
    each = -(-programs // gpu.processors)
    return replace(config, stages=depth_that_fills(config.stages, block_bytes, gpu.shared_bytes, each))


def longest_split(pairs: int, token_bytes: int) -> int:
    """Returns the longest capacity up to which many pairs of a sequence and a KV head are split alike;
    `token_bytes`: of K and V of a KV head.

    >>> longest_split(16, 512), longest_split(17 * 8, 512)
    (8192, 1536)
    """
    return max(SHORT, SMALL_BYTES // (pairs * token_bytes))


def split_config_for(q: Tensor, kv: Cache) -> DecodeConfig:
    """Returns the layout for these tensors that splits all sequences alike, as speculative attention does."""
    return decode_config(**_sizes_of(q, kv))


def _sizes_of(q: Tensor, kv: Cache) -> dict[str, Any]:
    """Returns the arguments of `decode_config` for these tensors on their device."""
    gpu = gpu_of(q)
    return {
        "batch": q.shape[0],
        "q_heads": math.prod(q.shape[1:-1]),
        "kv_heads": kv.kv_heads,
        "head_dim": q.shape[-1],
        "capacity": kv.capacity,
        "kv_bytes": kv.k.element_size(),
        "processors": gpu.processors,
        "shared_bytes": gpu.shared_bytes,
        "chained": gpu.chained,
    }


def workspace(q: Tensor, kv_heads: int, config: DecodeConfig | DealtConfig) -> Workspace:
    """Makes a workspace for launches with q [batch, q_heads, d] or [batch, queries, q_heads, d] and this
    layout."""
    return made(q, _shapes(q, kv_heads, config))


def _shapes(q: Tensor, kv_heads: int, config: DecodeConfig | DealtConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of a workspace; nothing is summed of a single split."""
    if isinstance(config, DealtConfig):
        return dealt_shapes(q, kv_heads, config)
    if config.splits == 1:
        return [(0,), (0,)]
    return shapes(q, kv_heads, config.splits, shares_of(q, kv_heads, config).slices)


def shares_of(q: Tensor, kv_heads: int, config: DecodeConfig) -> Shares:
    """Returns the shares of the sum for q with this layout."""
    return shares(group_of(q, kv_heads), q.shape[-1], config.splits, config.slices, config.warps)


@launching
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    block_table: Tensor | None = None,
    sinks: int | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    space: Workspace | None = None,
    config: DecodeConfig | DealtConfig | None = None,
    in_step: bool = False,
) -> Tensor:
    """Attends from q [batch, q_heads, d] over each sequence's first lengths [batch] (int32) tokens.

    q may be [batch, queries, q_heads, d], of up to 8 query tokens of each sequence: the last ones of its
    `lengths`, in the cache already. Query token t of T then attends lengths - (T - 1 - t) tokens; its window
    ends there.

    k, v: [batch, kv_heads, capacity, d], or in pages [blocks, block_size, kv_heads, d] with block_table
    [batch, blocks of a sequence] (int32). They may be fp8, with k_scale and v_scale (fp32 [kv_heads]): value
    = stored * scale. `scale` is 1/sqrt(d) by default. With `sinks` or `window` only the first `sinks`
    and last `window` tokens are attended. gate (int32 [1]): if it is 0 on the device, the launch does
    nothing. lse (contiguous fp32, as q without d) is filled with the natural logarithm of sum_j exp(scale q .
    k_j), by which results over several sets of tokens can be joined. space: see Workspace; by default that of
    the stream, so that the call is one launch. config: the layout, by default that of `config_for`, or with
    `in_step` that of `config_in_step`; a DealtConfig cuts sequences into parts by their lengths. Returns out,
    as q; it is 0, and lse -inf, for a query that attends no token or whose tokens all score -inf.

    Raises ValueError for tensors that do not fit together.
    """
    one = one_token(q)
    kv = cache(one, k, v, lengths, block_table, (k_scale, v_scale))
    check_gate(gate)
    if min(sinks or 0, window or 0) < 0:
        raise ValueError(f"sinks and window have to be 0 or more, not {sinks}, {window}")
    if q.dtype == torch.float64 or len(q) > MOST_SEQUENCES:
        raise ValueError(f"at most {MOST_SEQUENCES} sequences, and no fp64: this sums in fp32")
    tokens = math.prod(q.shape[1:-2])
    if tokens > 1:
        check_rows(q, kv.kv_heads)
    if not len(q):
        return torch.empty_like(q) if out is None else out
    config = config or (config_in_step if in_step else config_for)(q, kv)
    out = torch.empty_like(q) if out is None else out
    check_like("out", out, tuple(q.shape), q.dtype)
    _check_lse(lse, q)
    # Without the dimension of one query token.
    q, into = (one, one_token(out)) if tokens == 1 else (q, out)
    wanted = _shapes(q, kv.kv_heads, config)
    space = space or Workspace(*kept_space(q, wanted))
    check_space(space, wanted)
    windowed = sinks is not None or window is not None
    grid, constants = _dealt(q, kv, config) if isinstance(config, DealtConfig) else _split(q, kv, config)
    _decode_attention_kernel[grid](
        q, k, v, into, lse, lengths, block_table, k_scale, v_scale, gate, *space,
        (q.shape[-1] ** -0.5 if scale is None else scale) * LOG2E,
        min(sinks or 0, kv.capacity), min(window or 0, kv.capacity), kv.capacity, len(q),
        *_query_strides(q), *_query_strides(into), *kv.strides(),
        QUERY_TOKENS=tokens, BLOCK=config.block, STAGES=stages(config.stages, kv),
        WINDOWED=windowed, SCALED=k_scale is not None, GATED=gate is not None,
        **constants,
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return out


def _query_strides(x: Tensor) -> tuple[int | None, ...]:
    """Strides in elements of sequences, query tokens (None without this dimension) and heads."""
    return x.stride(0), x.stride(1) if x.dim() == 4 else None, x.stride(-2)


def _check_lse(lse: Tensor | None, q: Tensor) -> None:
    """Raises ValueError for an lse that is not contiguous fp32 of the shape of q without its last
    dimension."""
    if lse is None:
        return
    if lse.dtype != torch.float32 or lse.shape != q.shape[:-1] or not lse.is_contiguous():
        raise ValueError(f"lse has to be contiguous fp32 {list(q.shape[:-1])}, not {kind(lse)}")


def _split(q: Tensor, kv: Cache, config: DecodeConfig) -> tuple[tuple[int, ...], dict[str, int]]:
    """Returns the grid and the compile-time constants of a launch that splits all sequences alike."""
    constants = sizes(
        q, kv, splits=config.splits, slices=config.slices, warps=config.warps, sharers=config.sharers
    )
    unused = {"DEALT": False, **dict.fromkeys(DEALT_CONSTANTS, 0)}
    return (config.splits, kv.kv_heads, len(q)), {**constants, **unused}


def _dealt(q: Tensor, kv: Cache, config: DealtConfig) -> tuple[tuple[int, ...], dict[str, int]]:
    """Returns the grid and the compile-time constants of a launch whose parts are `dealt_parts`."""
    if len(q) > MOST_DEALT:
        raise ValueError(f"at most {MOST_DEALT} sequences are dealt in parts, not {len(q)}")
    longest = -(-kv.capacity // config.block)
    pairs = len(q) * kv.kv_heads
    # Parts that run at once have half as many blocks at least.
    parts = max(config.even, -(-longest // ((config.least + 1) // 2)))
    programs = min(config.programs(pairs), pairs * parts)
    return (programs,), {**dealt_constants(q, kv, config), "DEALT": True}


@triton.jit
def _decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr, gate_ptr,
    partials_ptr, logs_ptr,
    scale, sinks, window, capacity, batch,
    stride_q_sequence, stride_q_token, stride_q_head, stride_out_sequence, stride_out_token, stride_out_head,
    stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, stride_table,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
    GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, SPLITS: tl.constexpr,
    SHARES: tl.constexpr, SHARERS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr,
    DEALT: tl.constexpr, BATCH: tl.constexpr, HEADS: tl.constexpr, PORTIONS: tl.constexpr,
    LEAST: tl.constexpr, EVEN: tl.constexpr,
    FEW: tl.constexpr, FEW_QUERIES: tl.constexpr, FEW_SHARES: tl.constexpr, FEW_SHARERS: tl.constexpr,
    PAGE: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv_heads, batch), or where DEALT (programs,) with at most SPLITS parts a head."""
    if CHAINED:
        gdc_wait()
        # The next launch may take its places now, and waits there for the end of this launch.
        gdc_launch_dependents()
    if GATED and tl.load(gate_ptr) == 0:
        return
    # A block of a whole number to a page lies in one of them, unless windows shift it.
    ONE_PAGE: tl.constexpr = PAGE > 0 and PAGE % BLOCK == 0 and not WINDOWED
    # The windows of all query tokens together.
    reach = sinks + window + (QUERY_TOKENS - 1)
    if DEALT:
        heads = HEADS
        sequence, head, split, splits = dealt_part(
            tl.program_id(0), lengths_ptr, batch, reach, capacity,
            BLOCK, WINDOWED, BATCH, HEADS, PORTIONS, LEAST, SPLITS, EVEN,
        )  # fmt: skip
        if sequence >= batch:
            return
    else:
        split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        splits = SPLITS
        heads = tl.num_programs(1)
    length = tl.minimum(tl.load(lengths_ptr + sequence), capacity)
    attended = length
    turn = length
    if WINDOWED:
        attended = tl.minimum(length, reach)
        turn = tl.minimum(length, sinks)
    of_head: tl.constexpr = GROUP // QUERY_TOKENS
    q_base = q_ptr + sequence.to(tl.int64) * stride_q_sequence + head * of_head * stride_q_head
    q = load_queries(q_base, stride_q_token, stride_q_head, GROUP, QUERY_TOKENS, ROWS, HEAD_DIM, DIM)
    k_base, v_base = cache_of(
        k_ptr, v_ptr, sequence, head, stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, PAGE
    )
    if PAGE > 0:
        table_ptr += sequence.to(tl.int64) * stride_table
    if SCALED:
        scale *= tl.load(k_scale_ptr + head)
    top, sums, out = nothing(ROWS, BLOCK, DIM)
    for start in tl.range(split * BLOCK, attended, splits * BLOCK, num_stages=STAGES):
        index = start + tl.arange(0, BLOCK)
        # Past the end the last token is read again, because the memory behind it may hold anything.
        token = tl.minimum(index, attended - 1)
        token += tl.where(token < turn, 0, length - attended)
        inside = seen(index, token, attended, length, sinks, window, GROUP, QUERY_TOKENS, ROWS, WINDOWED)
        top, sums, out = block_added(
            top, sums, out, q, k_base, v_base, table_ptr, token, inside, scale,
            stride_k_outer, stride_v_outer, K_TOKEN, V_TOKEN, WIDE, HEAD_DIM, DIM, PAGE, start, ONE_PAGE,
        )  # fmt: skip
    out, log = part(top, sums, out)
    if SCALED:
        out *= tl.load(v_scale_ptr + head)
    out_base = out_ptr + sequence.to(tl.int64) * stride_out_sequence + head * of_head * stride_out_head
    if splits == 1:
        store_queries(
            out, out_base, stride_out_token, stride_out_head, GROUP, QUERY_TOKENS, ROWS, HEAD_DIM, DIM
        )
        queries = tl.arange(0, ROWS)
        write_log(log, lse_ptr, sequence, head, heads, queries, queries < GROUP, GROUP, QUERY_TOKENS)
    else:
        if DEALT:
            row = (tl.program_id(0) - split).to(tl.int64) * GROUP
        else:
            row = (sequence * heads + head).to(tl.int64) * splits * GROUP
        write_part(
            out, log, partials_ptr, logs_ptr, row + split * GROUP, GROUP, ROWS, HEAD_DIM, DIM, SLICES
        )  # fmt: skip
        if DEALT:
            if splits <= FEW:
                _sum_of_head(
                    partials_ptr, logs_ptr, out_base, lse_ptr, row, split, splits,
                    tl.minimum(splits, FEW_SHARERS), sequence, head, heads, stride_out_token, stride_out_head,
                    FEW_SHARES, FEW, FEW_QUERIES, DIM, 1, SLICES, GROUP, QUERY_TOKENS, HEAD_DIM, DIM,
                )  # fmt: skip
            else:
                _sum_of_head(
                    partials_ptr, logs_ptr, out_base, lse_ptr, row, split, splits,
                    tl.minimum(splits, SHARERS), sequence, head, heads, stride_out_token, stride_out_head,
                    SHARES, PARTS, QUERIES, COLUMNS, SLICES, SLICES, GROUP, QUERY_TOKENS, HEAD_DIM, DIM,
                )  # fmt: skip
        else:
            _sum_of_head(
                partials_ptr, logs_ptr, out_base, lse_ptr, row, split, splits,
                SHARERS, sequence, head, heads, stride_out_token, stride_out_head,
                SHARES, PARTS, QUERIES, COLUMNS, SLICES, SLICES, GROUP, QUERY_TOKENS, HEAD_DIM, DIM,
            )  # fmt: skip


@triton.jit
def _sum_of_head(
    partials_ptr, logs_ptr, out_base, lse_ptr, row, split, splits, sharers, sequence, head, heads,
    stride_out_token, stride_out_head,
    SHARES: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, LOG_SLICES: tl.constexpr,
    GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Sums the shares of a KV head that fall to one of its last `sharers` programs; its parts begin at `row`.
    LOG_SLICES: the slices that parts' logs were written for, as many as SLICES or more."""
    if split >= splits - sharers:
        for share in range(split - (splits - sharers), SHARES, sharers):
            query, first_column = share // SLICES * QUERIES, share % SLICES * COLUMNS
            whole, _, total_log = sum_parts(
                partials_ptr, logs_ptr, partials_ptr, None, row, 0, query, first_column, splits,
                PARTS, False, GROUP, HEAD_DIM, QUERIES, COLUMNS, LOG_SLICES, DIM // LOG_SLICES,
            )  # fmt: skip
            queries, columns = places(query, first_column, QUERIES, COLUMNS)
            tl.store(
                out_base
                + query_at(queries, stride_out_token, stride_out_head, GROUP, QUERY_TOKENS)
                + columns,
                whole.to(out_base.dtype.element_ty),
                mask=(queries < GROUP) & (columns < HEAD_DIM),
            )
            there = (queries < GROUP) & (columns == 0)
            write_log(total_log, lse_ptr, sequence, head, heads, queries, there, GROUP, QUERY_TOKENS)


def reference_decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    block_table: Tensor | None = None,
    sinks: int | None = None,
    window: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """As `decode_attention`, sequence by sequence in plain torch; any float dtype, float64 is the truth. lse
    too may be of any float dtype."""
    kv = cache(one_token(q), k, v, lengths, block_table, (k_scale, v_scale))
    windowed = sinks is not None or window is not None
    queries = q if q.dim() == 4 else q[:, None]
    out, tokens = torch.zeros_like(queries), queries.shape[1]
    logs = q.new_full(queries.shape[:-1], -math.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    for sequence, length in enumerate(lengths.tolist()):
        for token, end in enumerate(range(length - tokens + 1, length + 1)):
            kept = ends_of(max(0, end), sinks or 0, window or 0) if windowed else range(end)
            if len(kept):
                keys, values = tokens_of(kv, sequence, kept, q.dtype)
                row = queries[sequence, token].to(keys.dtype)
                found, log = attend(row[None, None], keys, values, scale=scale)
                out[sequence, token], logs[sequence, token] = found[0, 0].to(q.dtype), log[0, 0]
    if lse is not None:
        lse.copy_(logs.view(q.shape[:-1]))
    return out.view(q.shape)


def ends_of(length: int, sinks: int, window: int) -> list[int]:
    """Returns the first `sinks` and last `window` of so many tokens, each once.

    >>> ends_of(6, 1, 2), ends_of(3, 2, 2)
    ([0, 4, 5], [0, 1, 2])
    """
    sinks = min(sinks, length)
    return [*range(sinks), *range(max(sinks, length - window), length)]


def tokens_of(kv: Cache, sequence: int, tokens: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns K and V of some tokens of a sequence, [1, kv_heads, tokens, d] each, in the format of sums,
    with scales applied."""
    at = torch.tensor(tokens, dtype=torch.int64, device=kv.k.device)
    found = []
    for x, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        if kv.table is None:
            rows = x[sequence, :, at]
        else:
            rows = x[kv.table[sequence, at // kv.page].long(), at % kv.page].transpose(0, 1)
        rows = rows.to(torch.promote_types(dtype, torch.float32))
        found.append((rows if scale is None else rows * scale[:, None, None].to(rows.dtype))[None])
    return found[0], found[1]


# -- the op ----------------------------------------------------------------------------------------------


def whole_lengths(op: Op, q: Tensor) -> Tensor:
    """Returns the context of an op as the length of each sequence, int32 [batch]."""
    batch, context = len(q), op["context"]
    return shared(
        ("lengths", q.device, batch, context),
        lambda: torch.full((batch,), context, dtype=torch.int32, device=q.device),
    )


def _run(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return decode_attention(q, k, v, whole_lengths(op, q))


def _reference(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends from q [batch, q_heads, d] over k, v [batch, kv_heads, context, d] to [batch, q_heads, d]."""
    del op
    return attend(q[:, None], k, v)[0][:, 0].to(q.dtype)


def inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Draws random q, k and v of an attention over a whole context."""
    batch, d = op["batch"], op["head_dim"]
    cached = batch, op["kv_heads"], op["context"], d
    q = random_tensor(op, generator, device, batch, op["q_heads"], d)
    return q, *(random_tensor(op, generator, device, *cached) for _ in range(2))


DECODE_ATTENTION = Kernel(by_device(_run, _reference), _reference, inputs)
