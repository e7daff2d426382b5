"""Attention of one query token a sequence, or a few, its work dealt evenly to a fixed number of programs.

    program p of P takes blocks  [p T / P, (p + 1) T / P)  of all T blocks: of all KV heads of all sequences

P is the number of programs, or up to a sixteenth less if heads of equal lengths are then cut alike.

(Stream-K, Osama et al. 2023; for decoding, Lean Attention, Sanovar et al. 2024.) The blocks of a KV head of a
sequence stand side by side, and so do the heads of a sequence. Each program reads all lengths and finds its
blocks itself: the host plans nothing, and however the lengths differ, none of the P programs reads more than
a block more than another. A head that one program attends whole is written at once. Of the others each
program writes its part. The program that ends a head adds few parts to its own, without a trip to memory for
that; many parts are summed by the last programs of the head, as in `split_kv`. A program has at most two
parts: one that ends a head or goes on with it, and one that begins a head. So the workspace is as large for
any batch. A program that adds parts to its own waits for programs before it, whose parts do not wait for it.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_powers
from simcore.kernels.decoder.split_kv import (
    BLOCK_BYTES,
    EMPTY,
    LOADED_AT_ONCE,
    ONE_BY_ONE,
    WARPS,
    Cache,
    Workspace,
    block_added,
    cache_of,
    depth_that_fits,
    group_of,
    load_queries,
    made,
    nothing,
    padded,
    part,
    places,
    query_at,
    seen,
    sizes,
    store_queries,
    sum_parts,
    tile,
    two_added,
    write_log,
    write_part,
)
from simcore.kernels.gpu import Gpu

# Every program holds all lengths: of more sequences than this it would hold too much.
MOST_SEQUENCES = 1024
# So many parts or fewer are summed with several queries at once; words of their tile that a warp holds.
FEW_PARTS, FEW_WORDS = 8, 1024
# The program that ends a head adds up to so many other parts to its own, one after another; none if it cannot
# hold them beside it.
JOINED = 3
# Of more programs the one that takes a block would not be found exactly: see `_program_of`.
MOST_PROGRAMS = 4096
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
        if self.programs > MOST_PROGRAMS:
            raise ValueError(
                f"programs: a layout cannot have {self.programs}; it has to be {MOST_PROGRAMS} or less"
            )
        # `_joined` needs a word for each thread.
        if self.warps > 8:
            raise ValueError(f"warps: a layout cannot have {self.warps}; it has to be 1, 2, 4 or 8")

    def parts(self, kv_heads: int) -> int:
        """Returns the most parts of a head: the heads of a sequence have equally many blocks."""
        return -(-self.programs // kv_heads) + 2


def even_config(*, kv_heads: int, head_dim: int, kv_bytes: int, gpu: Gpu) -> EvenConfig:
    """Returns the layout for a shape; `kv_bytes` an element of K and V.

    One program a multiprocessor. Two, with blocks half as large, would cut twice as many heads, and their
    ends would lie further apart. (Measured on an H100: docs/measurements/kernels.md.)

    >>> even_config(kv_heads=8, head_dim=128, kv_bytes=2, gpu=Gpu())
    EvenConfig(block=64, programs=132, stages=4, warps=4, slices=2, least=2, chained=False, sharers=66)
    """
    programs = gpu.processors
    row_bytes = padded(head_dim) * kv_bytes
    block = max(16, min(128, 2 * BLOCK_BYTES // row_bytes))
    parts = -(-programs // kv_heads) + 2
    # A thread loads four words of a slice at once.
    slices = min(1 << min(4, max(0, parts.bit_length() - 4)), padded(head_dim) // 4)
    stages = depth_that_fits(block * row_bytes, gpu.shared_bytes)
    sharers = max(1, gpu.processors // 2)
    return EvenConfig(block, programs, stages, WARPS, slices, LEAST, gpu.chained, sharers)


def even_shapes(q: Tensor, kv_heads: int, config: EvenConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of a workspace: parts that end a head or go on with it, then parts
    that begin one. A log stands beside each word, so that threads that add parts up need no other thread."""
    rows, d = (2 * config.programs, group_of(q, kv_heads)), q.shape[-1]
    return [(*rows, d), (*rows, padded(d))]


def even_workspace(q: Tensor, kv_heads: int, config: EvenConfig) -> Workspace:
    """Makes a workspace for launches with q [batch, q_heads, d] or [batch, queries, q_heads, d] of any
    batch, and this layout."""
    return made(q, even_shapes(q, kv_heads, config))


def even_constants(q: Tensor, kv: Cache, config: EvenConfig) -> dict[str, int]:
    """Returns the compile-time constants of the kernel."""
    parts = config.parts(kv.kv_heads)
    found = sizes(q, kv, splits=parts, slices=config.slices, warps=config.warps, sharers=config.sharers)
    del found["SPLITS"]
    if found["COLUMNS"] < LOADED_AT_ONCE.value:
        raise ValueError(
            f"slices: a layout cannot have {config.slices} for {parts} parts of {q.shape[-1]} columns"
        )
    # Few parts: as many queries in one tile as each warp holds easily.
    queries = FEW_WORDS * config.warps // (FEW_PARTS * found["DIM"])
    queries = max(1, min(int(triton.next_power_of_2(found["GROUP"])), queries))
    shares = triton.cdiv(found["GROUP"], queries)
    words = found["ROWS"] * found["DIM"]
    return {
        **found,
        "BATCH": int(triton.next_power_of_2(len(q))),
        "HEADS": kv.kv_heads,
        "PROGRAMS": config.programs,
        "LEAST_BLOCKS": config.least,
        "JOINED": JOINED if q.dim() == 3 or words <= FEW_WORDS * config.warps else 0,
        "FEW": tile(FEW_PARTS, queries * found["DIM"], config.warps),
        "FEW_QUERIES": queries,
        "FEW_SHARES": shares,
        "FEW_SHARERS": 1 if ONE_BY_ONE else min(shares, config.sharers),
    }


@triton.jit
def _blocks(length, reach, capacity, BLOCK: tl.constexpr, WINDOWED: tl.constexpr):
    """Of a sequence: its tokens, those attended, `reach` at most where WINDOWED, and their blocks."""
    length = tl.maximum(tl.minimum(length, capacity), 0)
    attended = length
    if WINDOWED:
        attended = tl.minimum(length, reach)
    return length, attended, tl.cdiv(attended, BLOCK)


@triton.jit
def _programs(total, heads, PROGRAMS: tl.constexpr, LEAST_BLOCKS: tl.constexpr):
    """How many programs share `total` blocks of `heads` heads: fewer than there are, if heads of equal
    lengths are then cut into equal parts, or not at all, and at most one in sixteen stays idle."""
    programs = tl.maximum(tl.minimum(PROGRAMS, tl.cdiv(total, LEAST_BLOCKS)), 1)
    heads = tl.maximum(heads, 1)
    rounds = tl.cdiv(heads, programs)
    alike = tl.where(heads % rounds == 0, heads // rounds, 0)
    alike = tl.where(heads <= programs, programs // heads * heads, alike)
    return tl.where(alike * 16 >= programs * 15, alike, programs)


@triton.jit
def _begin(program, share, rest, programs):
    """The first block of a program: program T / P, where T = share P + rest."""
    return program * share + program * rest // programs


@triton.jit
def _program_of(block, total, share, rest, programs):
    """The program that takes a block. Of MOST_PROGRAMS, the fraction in fp32 is off by one at most."""
    near = (block.to(tl.float32) / total.to(tl.float32) * programs).to(tl.int32)
    near = tl.minimum(near, programs - 1)
    near -= (_begin(near, share, rest, programs) > block).to(tl.int32)
    return near + (_begin(near + 1, share, rest, programs) <= block).to(tl.int32)


@triton.jit
def even_attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr, gate_ptr,
    partials_ptr, logs_ptr,
    scale, sinks, window, capacity, batch,
    stride_q_sequence, stride_q_token, stride_q_head, stride_out_sequence, stride_out_token, stride_out_head,
    stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, stride_table,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
    WINDOWED: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
    BATCH: tl.constexpr, HEADS: tl.constexpr, PROGRAMS: tl.constexpr, LEAST_BLOCKS: tl.constexpr,
    JOINED: tl.constexpr,
    GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
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
    # The windows of all query tokens together.
    reach = sinks + window + (QUERY_TOKENS - 1)
    _length, _attended, blocks = _blocks(lengths, reach, capacity, BLOCK, WINDOWED)
    ends = tl.cumsum(blocks, 0) * HEADS
    total, heads = tl.reduce((blocks * HEADS, (blocks > 0).to(tl.int32) * HEADS), 0, two_added)
    programs = _programs(total, heads, PROGRAMS, LEAST_BLOCKS)
    none = tl.zeros([], tl.int64)
    queries = tl.arange(0, ROWS)
    of_head: tl.constexpr = GROUP // QUERY_TOKENS
    if heads < batch * HEADS:
        for sequence in range(program, batch, PROGRAMS):
            if tl.load(lengths_ptr + sequence) <= 0 or (WINDOWED and reach == 0):
                for head in range(HEADS):
                    base = (
                        out_ptr + (none + sequence) * stride_out_sequence + head * of_head * stride_out_head
                    )
                    store_queries(
                        tl.zeros([ROWS, DIM], tl.float32), base, stride_out_token, stride_out_head,
                        GROUP, QUERY_TOKENS, ROWS, HEAD_DIM, DIM,
                    )  # fmt: skip
                    nothing_there = tl.full([ROWS], -float("inf"), tl.float32)
                    write_log(
                        nothing_there, lse_ptr, none + sequence, head, HEADS, queries, queries < GROUP,
                        GROUP, QUERY_TOKENS,
                    )  # fmt: skip
    if program >= programs or total == 0:
        return
    share, rest = total // programs, total % programs
    begin = _begin(program, share, rest, programs)
    at = _begin(program + 1, share, rest, programs)
    # Known behind the loop too, which every program here enters.
    sequence, head, first, count = at, at, at, at
    # A head that begins before this block has too many parts to be joined.
    earliest = _begin(tl.maximum(program - JOINED, 0), share, rest, programs)
    # Heads from the last to the first: so the part that begins a head is there long before the program that
    # ends the head, which comes to it last, asks for it.
    while at > begin:
        sequence, before = tl.reduce(
            ((ends < at).to(tl.int32), tl.where(ends < at, blocks * HEADS, 0)), 0, two_added
        )
        length = tl.load(lengths_ptr + sequence)
        length, tokens, count = _blocks(length, reach, capacity, BLOCK, WINDOWED)
        head = (at - 1 - before) // count
        first = before + head * count
        turn = length
        if WINDOWED:
            turn = tl.minimum(length, sinks)
        from_block = tl.maximum(begin - first, 0)
        to_block = at - first
        q_base = q_ptr + sequence.to(tl.int64) * stride_q_sequence + head * of_head * stride_q_head
        q = load_queries(q_base, stride_q_token, stride_q_head, GROUP, QUERY_TOKENS, ROWS, HEAD_DIM, DIM)
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
            inside = seen(index, token, tokens, length, sinks, window, GROUP, QUERY_TOKENS, ROWS, WINDOWED)
            top, sums, out = block_added(
                top, sums, out, q, k_base, v_base, table, token, inside, factor,
                stride_k_outer, stride_v_outer, K_TOKEN, V_TOKEN, WIDE, HEAD_DIM, DIM, PAGE,
            )  # fmt: skip
        out, log = part(top, sums, out)
        if SCALED:
            out *= tl.load(v_scale_ptr + head)
        base = out_ptr + sequence.to(tl.int64) * stride_out_sequence + head * of_head * stride_out_head
        if from_block == 0 and to_block == count:
            store_queries(
                out, base, stride_out_token, stride_out_head, GROUP, QUERY_TOKENS, ROWS, HEAD_DIM, DIM
            )
            write_log(log, lse_ptr, sequence, head, HEADS, queries, queries < GROUP, GROUP, QUERY_TOKENS)
        elif JOINED > 0 and to_block == count and first >= earliest:
            begins = _program_of(first, total, share, rest, programs)
            joined, logs = _joined(
                out, log, partials_ptr, logs_ptr, begins, program, PROGRAMS, GROUP, ROWS, HEAD_DIM, DIM
            )
            store_queries(
                joined, base, stride_out_token, stride_out_head, GROUP, QUERY_TOKENS, ROWS, HEAD_DIM, DIM
            )
            if lse_ptr is not None:
                # The same in all columns.
                log = tl.max(logs, 1)
                write_log(log, lse_ptr, sequence, head, HEADS, queries, queries < GROUP, GROUP, QUERY_TOKENS)
        else:
            row = (program + tl.where(from_block == 0, PROGRAMS, 0)).to(tl.int64) * GROUP
            write_part(
                out, log, partials_ptr, logs_ptr, row, GROUP, ROWS, HEAD_DIM, DIM, DIM // LOADED_AT_ONCE
            )
        at = tl.maximum(first, begin)
    # What came last is the head that this program ended or went on with. The program that began it does not
    # sum: it would wait for others after its last block.
    if first < begin:
        begins = _program_of(first, total, share, rest, programs)
        last = _program_of(first + count - 1, total, share, rest, programs)
        parts = last - begins + 1
        base = out_ptr + sequence.to(tl.int64) * stride_out_sequence + head * of_head * stride_out_head
        row = begins.to(tl.int64) * GROUP
        if parts > JOINED + 1 and parts <= FEW:
            _sum(
                partials_ptr, logs_ptr, base, stride_out_token, stride_out_head, lse_ptr, sequence, head,
                row, parts, last - program,
                FEW_SHARERS, FEW_SHARES, FEW, FEW_QUERIES, DIM, 1, PROGRAMS, HEADS, GROUP, QUERY_TOKENS,
                HEAD_DIM, DIM,
            )  # fmt: skip
        if parts > FEW:
            _sum(
                partials_ptr, logs_ptr, base, stride_out_token, stride_out_head, lse_ptr, sequence, head,
                row, parts, last - program,
                SHARERS, SHARES, PARTS, QUERIES, COLUMNS, SLICES, PROGRAMS, HEADS, GROUP, QUERY_TOKENS,
                HEAD_DIM, DIM,
            )  # fmt: skip


@triton.jit
def _joined(
    out, log, partials_ptr, logs_ptr, begins, program,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """The sum of a part, which ends a head, and of those of the programs from `begins` on, each taken as soon
    as it is there; and its log, in each column. The part itself needs no trip to memory."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, DIM)[None, :]
    counted = tl.broadcast_to(rows < GROUP, [ROWS, DIM])
    there = counted & (columns < HEAD_DIM)
    empty = tl.full([ROWS, DIM], EMPTY, tl.int32)
    # 256 words or more and 8 warps or fewer: each word is in one thread, as `tile` has it. The maximum over
    # all words ends after all are read, so that none is emptied before.
    top = tl.broadcast_to(log[:, None], [ROWS, DIM])
    total = tl.full([ROWS, DIM], 1.0, tl.float32)
    for other in range(begins, program):
        row = (other + tl.where(other == begins, PROGRAMS, 0)).to(tl.int64) * GROUP
        logs_at = logs_ptr + (row + rows) * DIM + columns
        words_at = partials_ptr + (row + rows) * HEAD_DIM + columns
        logs = tl.load(logs_at, mask=counted, other=0, volatile=True)
        words = tl.load(words_at, mask=there, other=0, volatile=True)
        while tl.max(((logs == EMPTY) | (words == EMPTY)).to(tl.int32)) == 1:
            logs = tl.load(logs_at, mask=counted, other=0, volatile=True)
            words = tl.load(words_at, mask=there, other=0, volatile=True)
        tl.store(logs_at, empty, mask=counted)
        tl.store(words_at, empty, mask=there)
        its = logs.to(tl.float32, bitcast=True)
        higher = tl.maximum(its, top)
        shrink, weight = tl.exp2(top - higher), tl.exp2(its - higher)
        out = out * shrink + words.to(tl.float32, bitcast=True) * weight
        total = total * shrink + weight
        top = higher
    return out / total, top + tl.log2(total)


@triton.jit
def _sum(
    partials_ptr, logs_ptr, base, stride_token, stride_head, lse_ptr, sequence, head, row, parts, behind,
    SHARERS: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr, QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr, SLICES: tl.constexpr,
    PROGRAMS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, QUERY_TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Sums the shares of a head that fall to the program `behind` its last one; the parts begin at `row`."""
    sharers = tl.minimum(parts - 1, SHARERS)
    if behind < sharers:
        for share in range(behind, SHARES, sharers):
            query, first_column = share // SLICES * QUERIES, share % SLICES * COLUMNS
            whole, _, total_log = sum_parts(
                partials_ptr, logs_ptr, partials_ptr, row + PROGRAMS * GROUP, row, 0, query, first_column,
                parts, PARTS, False, GROUP, HEAD_DIM, QUERIES, COLUMNS, DIM // LOADED_AT_ONCE, LOADED_AT_ONCE,
            )  # fmt: skip
            queries, columns = places(query, first_column, QUERIES, COLUMNS)
            tl.store(
                base + query_at(queries, stride_token, stride_head, GROUP, QUERY_TOKENS) + columns,
                whole.to(base.dtype.element_ty),
                mask=(queries < GROUP) & (columns < HEAD_DIM),
            )
            there = (queries < GROUP) & (columns == 0)
            write_log(total_log, lse_ptr, sequence, head, HEADS, queries, there, GROUP, QUERY_TOKENS)
