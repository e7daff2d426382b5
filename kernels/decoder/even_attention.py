"""Attention of one query token a sequence, its work dealt evenly to a fixed number of programs.

    program p of P takes blocks  [p T / P, (p + 1) T / P)  of all T blocks: of all KV heads of all sequences

(Stream-K, Osama et al. 2023; for decoding, Lean Attention, Sanovar et al. 2024.) The blocks of a KV head of a
sequence stand side by side, and so do the heads of a sequence. Each program reads all lengths and finds its
blocks itself: the host plans nothing, and however the lengths differ, no program reads more than a block more
than another. A head that one program attends whole is written at once. Of the others each program writes its
part, and the last programs of a head sum the parts, as in `split_kv`. A program has at most two parts: one
that ends a head or goes on with it, and one that begins a head. So the workspace is as large for any batch.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_powers
from simcore.kernels.decoder.split_kv import (
    BLOCK_BYTES,
    LOADED_AT_ONCE,
    MOST_PARTS,
    ONE_BY_ONE,
    WARPS,
    Cache,
    Workspace,
    block_added,
    cache_of,
    depth_that_fits,
    load_queries,
    made,
    nothing,
    padded,
    part,
    places,
    sizes,
    store_queries,
    sum_parts,
    tile,
    write_part,
)
from simcore.kernels.gpu import Gpu

# Every program holds all lengths: of more sequences than this it would hold too much.
MOST_SEQUENCES = 1024
# So many parts or fewer are summed with several queries at once; words of their tile that a warp holds.
FEW_PARTS, FEW_WORDS = 8, 1024
# Below so many blocks, a program's share is not cut further.
LEAST = 2


@dataclass(frozen=True, slots=True)
class EvenConfig:
    """The layout of a launch: `programs` in all, `least` blocks a program if there are few blocks; the rest
    as in DecodeConfig."""

    block: int
    programs: int
    stages: int
    warps: int
    slices: int
    least: int = LEAST
    chained: bool = False
    sharers: int = 64

    def __post_init__(self) -> None:
        check_powers(self, "block", "slices", "warps")
        least = {"block": 16, "programs": 1, "stages": 1, "least": 1, "sharers": 1}
        for name, bound in least.items():
            if (value := getattr(self, name)) < bound:
                raise ValueError(f"{name}: a layout cannot have {value}; it has to be {bound} or more")
        if self.warps > 8:
            raise ValueError(f"warps: a layout cannot have {self.warps}; it has to be 1, 2, 4 or 8")

    def parts(self, kv_heads: int) -> int:
        """Returns the most parts of a head: the heads of a sequence have equally many blocks."""
        return -(-self.programs // kv_heads) + 2


def even_config(*, kv_heads: int, head_dim: int, kv_bytes: int, gpu: Gpu) -> EvenConfig:
    """Returns the layout for a shape; `kv_bytes` an element of K and V.

    >>> even_config(kv_heads=8, head_dim=128, kv_bytes=2, gpu=Gpu())
    EvenConfig(block=32, programs=264, stages=4, warps=4, slices=4, least=2, chained=False, sharers=66)
    """
    programs, block_bytes = 2 * gpu.processors, BLOCK_BYTES
    if programs // kv_heads > MOST_PARTS:
        programs, block_bytes = gpu.processors - 2, 2 * BLOCK_BYTES
    row_bytes = padded(head_dim) * kv_bytes
    block = max(16, min(128, block_bytes // row_bytes))
    parts = -(-programs // kv_heads) + 2
    # A thread loads four words of a slice at once.
    slices = min(1 << min(4, max(0, parts.bit_length() - 4)), padded(head_dim) // 4)
    stages = depth_that_fits(block * row_bytes, gpu.shared_bytes)
    sharers = max(1, gpu.processors // 2)
    return EvenConfig(block, programs, stages, WARPS, slices, LEAST, gpu.chained, sharers)


def even_shapes(q: Tensor, kv_heads: int, config: EvenConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of a workspace: parts that end a head or go on with it, then parts
    that begin one. A log stands beside each word, so that threads that add parts up need no other thread."""
    group, d = q.shape[1] // kv_heads, q.shape[2]
    rows = 2 * config.programs, group
    return [(*rows, d), (*rows, padded(d))]


def even_workspace(q: Tensor, kv_heads: int, config: EvenConfig) -> Workspace:
    """Makes a workspace for launches with q [batch, q_heads, d] of any batch and this layout."""
    return made(q, even_shapes(q, kv_heads, config))


def even_constants(q: Tensor, kv: Cache, config: EvenConfig) -> dict[str, int]:
    """Returns the compile-time constants of the kernel."""
    parts = config.parts(kv.kv_heads)
    found = sizes(q, kv, splits=parts, slices=config.slices, warps=config.warps, sharers=config.sharers)
    del found["SPLITS"]
    if found["COLUMNS"] < LOADED_AT_ONCE.value:
        raise ValueError(
            f"slices: a layout cannot have {config.slices} for {parts} parts of {q.shape[2]} columns"
        )
    # Few parts: as many queries in one tile as each warp holds easily.
    queries = FEW_WORDS * config.warps // (FEW_PARTS * found["DIM"])
    queries = max(1, min(int(triton.next_power_of_2(found["GROUP"])), queries))
    shares = triton.cdiv(found["GROUP"], queries)
    return {
        **found,
        "BATCH": int(triton.next_power_of_2(len(q))),
        "HEADS": kv.kv_heads,
        "PROGRAMS": config.programs,
        "LEAST_BLOCKS": config.least,
        "FEW": tile(FEW_PARTS, queries * found["DIM"], config.warps),
        "FEW_QUERIES": queries,
        "FEW_SHARES": shares,
        "FEW_SHARERS": 1 if ONE_BY_ONE else min(shares, config.sharers),
    }


@triton.jit
def _blocks(length, sinks, window, capacity, BLOCK: tl.constexpr, WINDOWED: tl.constexpr):
    """Of a sequence: its tokens, those attended, and their blocks."""
    length = tl.maximum(tl.minimum(length, capacity), 0)
    attended = length
    if WINDOWED:
        attended = tl.minimum(length, sinks + window)
    return length, attended, tl.cdiv(attended, BLOCK)


@triton.jit
def _place(at, ends, blocks, numbers, HEADS: tl.constexpr):
    """Where block `at` of all blocks is: the sequence, its blocks, the head, and the head's first block."""
    sequence = tl.sum((ends <= at).to(tl.int32))
    count = tl.sum(tl.where(numbers == sequence, blocks, 0))
    before = tl.sum(tl.where(numbers < sequence, blocks, 0)) * HEADS
    head = (at - before) // count
    return sequence, count, head, before + head * count


@triton.jit
def even_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr, gate_ptr,
    partials_ptr, logs_ptr,
    scale, sinks, window, capacity, batch,
    stride_q_sequence, stride_q_head, stride_out_sequence, stride_out_head,
    stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, stride_table,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
    BATCH: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr, LEAST_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SHARES: tl.constexpr, SHARERS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr,
    FEW: tl.constexpr, FEW_QUERIES: tl.constexpr, FEW_SHARES: tl.constexpr, FEW_SHARERS: tl.constexpr,
    PAGE: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (programs,)."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if GATED and tl.load(gate_ptr) == 0:
        return
    program = tl.program_id(0)
    numbers = tl.arange(0, BATCH)
    lengths = tl.load(lengths_ptr + numbers, mask=numbers < batch, other=0)
    lengths, _attended, blocks = _blocks(lengths, sinks, window, capacity, BLOCK, WINDOWED)
    ends = tl.cumsum(blocks, 0) * HEADS
    total = tl.sum(blocks) * HEADS
    programs = tl.minimum(PROGRAMS, tl.cdiv(total, LEAST_BLOCKS))
    none = tl.zeros([], tl.int64)
    for sequence in range(program, batch, PROGRAMS):
        if tl.load(lengths_ptr + sequence) <= 0 or (WINDOWED and sinks + window == 0):
            for head in range(HEADS):
                base = out_ptr + (none + sequence) * stride_out_sequence + head * GROUP * stride_out_head
                store_queries(
                    tl.zeros([ROWS, DIM], tl.float32), base, stride_out_head, GROUP, ROWS, HEAD_DIM, DIM
                )
    if program >= programs:
        return
    begin = (program.to(tl.int64) * total // programs).to(tl.int32)
    end = ((program.to(tl.int64) + 1) * total // programs).to(tl.int32)
    at = begin
    while at < end:
        sequence, count, head, first = _place(at, ends, blocks, numbers, HEADS)
        length = tl.load(lengths_ptr + sequence)
        length, tokens, _all = _blocks(length, sinks, window, capacity, BLOCK, WINDOWED)
        turn = length
        if WINDOWED:
            turn = tl.minimum(length, sinks)
        from_block = at - first
        to_block = tl.minimum(count, end - first)
        q_base = q_ptr + sequence.to(tl.int64) * stride_q_sequence + head * GROUP * stride_q_head
        q = load_queries(q_base, stride_q_head, GROUP, ROWS, HEAD_DIM, DIM)
        k_base, v_base = cache_of(
            k_ptr, v_ptr, sequence, head, stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, PAGE
        )
        table = table_ptr
        if PAGE > 0:
            table += sequence.to(tl.int64) * stride_table
        factor = scale
        if SCALED:
            factor *= tl.load(k_scale_ptr + head)
        top, sums, out = nothing(ROWS, BLOCK, DIM)
        for start in tl.range(from_block * BLOCK, to_block * BLOCK, BLOCK, num_stages=STAGES):
            index = start + tl.arange(0, BLOCK)
            # Past the end the last token is read again, because the memory behind it may hold anything.
            token = tl.minimum(index, tokens - 1)
            token += tl.where(token < turn, 0, length - tokens)
            top, sums, out = block_added(
                top, sums, out, q, k_base, v_base, table, token, index < tokens, factor,
                stride_k_outer, stride_v_outer, K_TOKEN, V_TOKEN, WIDE, HEAD_DIM, DIM, PAGE,
            )  # fmt: skip
        out, log = part(top, sums, out)
        if SCALED:
            out *= tl.load(v_scale_ptr + head)
        if from_block == 0 and to_block == count:
            base = out_ptr + sequence.to(tl.int64) * stride_out_sequence + head * GROUP * stride_out_head
            store_queries(out, base, stride_out_head, GROUP, ROWS, HEAD_DIM, DIM)
        else:
            row = (program + tl.where(from_block == 0, PROGRAMS, 0)).to(tl.int64) * GROUP
            write_part(
                out, log, partials_ptr, logs_ptr, row, GROUP, ROWS, HEAD_DIM, DIM, DIM // LOADED_AT_ONCE
            )
        at = first + to_block
    # The head that this program ended or went on with, then the one that it began: the first has come.
    for which in range(2):
        sequence, count, head, first = _place(begin if which == 0 else end - 1, ends, blocks, numbers, HEADS)
        begins = ((first.to(tl.int64) + 1) * programs - 1) // total
        last = (((first + count).to(tl.int64) * programs - 1) // total).to(tl.int32)
        parts = last - begins.to(tl.int32) + 1
        # At both places the same head: once is enough.
        if parts > 1 and not (which == 1 and first <= begin):
            base = out_ptr + sequence.to(tl.int64) * stride_out_sequence + head * GROUP * stride_out_head
            if parts <= FEW:
                _sum(
                    partials_ptr, logs_ptr, base, stride_out_head, begins * GROUP, parts, last - program,
                    FEW_SHARERS, FEW_SHARES, FEW, FEW_QUERIES, DIM, 1, PROGRAMS, GROUP, HEAD_DIM, DIM,
                )  # fmt: skip
            else:
                _sum(
                    partials_ptr, logs_ptr, base, stride_out_head, begins * GROUP, parts, last - program,
                    SHARERS, SHARES, PARTS, QUERIES, COLUMNS, SLICES, PROGRAMS, GROUP, HEAD_DIM, DIM,
                )  # fmt: skip


@triton.jit
def _sum(
    partials_ptr, logs_ptr, base, stride_head, row, parts, behind,
    SHARERS: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr, SLICES: tl.constexpr,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Sums the shares of a head that fall to the program `behind` its last one; the parts begin at `row`."""
    sharers = tl.minimum(parts, SHARERS)
    if behind < sharers:
        for share in range(behind, SHARES, sharers):
            query, first_column = share // SLICES * QUERIES, share % SLICES * COLUMNS
            whole, _ = sum_parts(
                partials_ptr, logs_ptr, partials_ptr, row + PROGRAMS * GROUP, row, 0, query, first_column,
                parts, PARTS, False, GROUP, HEAD_DIM, QUERIES, COLUMNS, DIM // LOADED_AT_ONCE, LOADED_AT_ONCE,
            )  # fmt: skip
            queries, columns = places(query, first_column, QUERIES, COLUMNS)
            tl.store(
                base + queries * stride_head + columns,
                whole.to(base.dtype.element_ty),
                mask=(queries < GROUP) & (columns < HEAD_DIM),
            )
