"""Causal linear attention with decay by chunks (Lightning Attention 2, Qin et al. 2024, section 3.2); without
a decay the causal dot product.

    out_[t] = (q_[t] k_[t]^T o M) v_[t] + (gamma^(i+1) q_i)_[t] S_[t-1]      M_ij = gamma^(i-j) where j <= i
    S_[t]   = gamma^C S_[t-1] + k_[t]^T (gamma^(C-1-j) v_j)_[t]              chunks of C rows

A program has a query head and some columns of v, and goes through chunks one after another with these columns
of the state in registers. It keeps the state's transpose and makes the transpose of the outputs: as the left
operand of a product, a state then stays in the registers in which it is summed.

If there are fewer such programs than the GPU has places, the sequence is cut into groups of chunks as well.
If the groups are few, each makes the state before it alone: it sums all rows before it, and is the shorter
the later it begins. If they are many, a first launch makes the sum k^T v of each group, in pieces, and the
program that makes a group's outputs adds up the sums of the groups before it. If they are very many, a launch
in between adds the sums up. k and v are then read twice, the second time from the L2 cache if the sequence is
short. Such sums skip rows that a state has forgotten: rows with a weight below 2^-40.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import PROCESSORS, gpu_of, launching
from simcore.kernels.linear_attention.triton_tensors import (
    Sizes,
    log_decay,
    outputs,
    padded,
    shrinkage,
    sizes_of,
    store_tile,
    strides,
    tile,
)

# Groups whose sums are addressed within 31 bits.
MOST_GROUPS = 8192
# With more groups alone, the last group would do hardly more than sum; beyond so many rows, the rows that all
# groups read no longer stay in the cache.
MOST_ALONE, LONGEST_ALONE = 4, 16384


@dataclass(frozen=True, slots=True)
class ChunkedConfig:
    """The layout of a call.

    `chunk`: rows at a time; `columns` of v a program; `groups` of the sequence, if possible; `stages`: chunks
    in flight in each program; `warps` a program; `chained`: whether launches start while the launch before
    ends, for which they then wait; `pieces`: the parts in which the sum of a group is made; `summed`: the
    most groups that a program adds up, more are added up by a launch in between; `alone`: whether each group
    makes the state before it alone, in one launch without sums of groups; `copied`: whether descriptors copy
    rows where possible: not with `lengths`, in fp32, or of tensors that are not `is_copied`."""

    chunk: int
    columns: int
    groups: int
    stages: int
    warps: int
    chained: bool = False
    summed: int = 8
    alone: bool = False
    copied: bool = False
    pieces: int = 1

    def __post_init__(self) -> None:
        wanted = {
            "chunk": _is_size(self.chunk),
            "columns": _is_size(self.columns),
            "groups": 1 <= self.groups <= MOST_GROUPS,
            "stages": self.stages >= 2,
            "warps": self.warps in (1, 2, 4, 8),
            "pieces": 1 <= self.pieces * self.groups <= MOST_GROUPS,
            "summed": self.summed >= 1,
        }
        for name, good in wanted.items():
            if not good:
                raise ValueError(
                    f"{name}: a layout cannot have {getattr(self, name)}; chunk, columns: a power of two "
                    "from 16 on; warps: 1, 2, 4 or 8; stages: 2 or more; groups, and the pieces of all: 1 "
                    f"to {MOST_GROUPS}; summed: 1 or more"
                )

    def rows(self, length: int, copied: bool = False) -> int:
        """Rows of a group: whole chunks, and in several groups whole pieces of whole tiles of `summing`."""
        unit = self.summing(copied)[0] * self.pieces if self.groups > 1 and not self.alone else self.chunk
        return int(triton.cdiv(length, self.groups * unit)) * unit

    def summing(self, copied: bool) -> tuple[int, int]:
        """Rows that are summed at a time if nothing else is made of them, and the number of such tiles in
        flight; more if copies take no registers."""
        if copied and self.chunk <= LARGEST_SUMMED // SUMMED_CHUNKS:
            return self.chunk * SUMMED_CHUNKS, SUMMED_STAGES
        return self.chunk, self.stages


def _is_size(count: int) -> bool:
    return count >= 16 and count & (count - 1) == 0


# The fewest rows for which a group is worth the state before it.
LEAST_ROWS = 256
# One program of WIDE columns and WIDE_WARPS warps with MOST_STAGES chunks in flight reads as fast as a
# multiprocessor can. Older GPUs, whose launches are not chained, have room for only two of these chunks.
WIDE, WIDE_WARPS, NARROWER, MOST_STAGES = 128, 8, 64, 4
# Below this M of a product Triton uses other instructions than wgmma. See `chunked_config`.
NARROW = 32
# Chunks that are summed at a time if nothing else is made of them and copies take no registers.
SUMMED_CHUNKS, SUMMED_STAGES, LARGEST_SUMMED = 2, 3, 128
# Elements of the state of a program of the launch in between.
SCANNED = 256
# Few groups without the last one do not fill a GPU: their sums are made in pieces, of at least so many rows.
PIECES, PIECED_GROUPS, LEAST_PIECE = 4, 4, 1024
# The time to sum a chunk, in times of a chunk with outputs. Groups end together if each is shorter than the
# group before it by this share.
SUM_SHARE = 0.4
# A state forgets rows with weights below 2 to the minus this.
BITS_KEPT = tl.constexpr(40.0)
LOG_KEPT = tl.constexpr(math.log2(1.0 - SUM_SHARE))


def chunked_config(
    sizes: Sizes,
    *,
    element_bytes: int,
    aligned: bool = True,
    processors: int = PROCESSORS,
    chained: bool = True,
) -> ChunkedConfig:
    """Returns the layout for a shape on a GPU of so many multiprocessors; `aligned`: whether rows of 16-bit
    q, k and v are copied to shared memory as they are, 16 bytes at a time.

    Many columns a program, because other programs would read the same q and k again, and L2 is not much
    faster than memory; fewer if the sequence is not long and the heads do not fill a GPU. As many groups as
    fill it.

    If rows cannot be copied as they are, Triton 3.6 puts them into one place of shared memory for all chunks.
    With asynchronous products, states were then wrong on an H200, so the columns are too few for such
    products.

    >>> config = chunked_config(Sizes(1, 32, 32, 8192, 128, 128), element_bytes=2)
    >>> config.columns, config.groups, config.alone
    (64, 2, True)
    >>> config = chunked_config(Sizes(1, 32, 32, 100_000, 128, 128), element_bytes=2)
    >>> config.columns, config.groups, config.alone
    (128, 4, False)
    """
    rank, dim = padded(sizes.rank), padded(sizes.dim)
    pairs = sizes.batch * sizes.q_heads
    chunk, stages, warps = 64, 3, 4
    if element_bytes == 4:
        # Products of fp32 take three times the registers.
        chunk, columns = 16, min(NARROW, 4096 // rank)
    elif not aligned or rank > WIDE or dim < 2 * NARROW:
        columns, stages = NARROW, 3 if rank <= WIDE else 2
    elif dim < WIDE or (
        pairs * triton.cdiv(sizes.dim, NARROWER) <= processors and sizes.length <= LONGEST_ALONE
    ):
        columns, stages = NARROWER, MOST_STAGES if chained else 2
    else:
        columns, warps, stages = WIDE, WIDE_WARPS, MOST_STAGES if chained else 2
    columns = max(16, min(columns, dim))
    programs = pairs * triton.cdiv(sizes.dim, columns)
    groups = max(1, min(processors // programs, sizes.length // LEAST_ROWS))
    alone = 1 < groups <= MOST_ALONE and sizes.length <= LONGEST_ALONE
    pieced = 1 < groups <= PIECED_GROUPS and sizes.length >= groups * PIECES * LEAST_PIECE
    pieces = PIECES if pieced and not alone else 1
    return ChunkedConfig(
        chunk, columns, groups, stages, warps, chained, alone=alone, copied=chained, pieces=pieces
    )


def config_for(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> ChunkedConfig:
    """Returns the layout for these tensors on their device."""
    gpu = gpu_of(q)
    return chunked_config(
        sizes,
        element_bytes=q.element_size(),
        aligned=all(aligned(x) for x in (q, k, v)),
        processors=gpu.processors,
        chained=gpu.chained,
    )


def aligned(x: Tensor) -> bool:
    """Whether Triton knows that all rows begin at multiples of 16 bytes and are such multiples long."""
    return x.data_ptr() % 16 == 0 and not any(n % 16 for n in (*x.stride()[:3], x.shape[3]))


@launching
def chunked_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    state: Tensor | None = None,
    *,
    lengths: Tensor | None = None,
    out: Tensor | None = None,
    final_state: Tensor | None = None,
    config: ChunkedConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns out [batch, q_heads, length, dim] and the state after it, fp32 [batch, kv_heads, rank, dim].

    q [batch, q_heads, length, rank], k [batch, kv_heads, length, rank], v [batch, kv_heads, length, dim] in
    fp16, bf16 or fp32, any strides except the last, which is 1; q_heads a multiple of kv_heads. decay
    [kv_heads] in (0, 1], which is not checked here; state: the final state after an earlier part of the
    sequence. Of sequence b the first lengths[b] (int32, on the device) rows count, its other outputs are 0.
    Sums are made in fp32, but states and scores enter products in the format of q: in fp16 they have to stay
    below 65504. Rows whose weight in a state is below 2^-40 may be left out of it; the layout decides which.

    Raises ValueError for tensors that do not fit together.
    """
    sizes = sizes_of(q, k, v, decay)
    out, final_state = outputs(q, k, v, sizes, state, lengths, out, final_state)
    config = config or config_for(q, k, v, sizes)
    if config.columns > NARROW and q.element_size() == 2 and not all(aligned(x) for x in (q, k, v)):
        raise ValueError(
            f"config has {config.columns} columns; at most {NARROW} of rows that do not begin and end at "
            "multiples of 16 bytes"
        )
    copied = config.copied and lengths is None and all(is_copied(x) for x in (q, k, v, out))
    rows = config.rows(sizes.length, copied)
    groups = triton.cdiv(sizes.length, rows)
    alone = config.alone and groups > 1
    sums, scanned = None, not config.alone and groups - 1 > config.summed
    pieces = 1 if scanned else config.pieces
    if groups > 1 and not alone:
        sums = _sums_of_groups(
            k, v, decay, state, lengths, sizes, config, rows // pieces, (groups - 1) * pieces, pieces,
            scanned, copied,
        )  # fmt: skip
    summed, summed_stages = config.summing(copied)
    _outputs_kernel[_grid(sizes, config, groups, sizes.q_heads)](
        *_sources(q, k, v, out, rows=config.chunk, columns=config.columns, copied=copied),
        *(_sources(k, v, rows=summed, columns=config.columns, copied=copied) if alone else (None, None)),
        decay, state, final_state, lengths, sums,
        sizes.length, rows, groups,
        *strides(q), *strides(k), *strides(v), *strides(out), *strides(state), *strides(final_state),
        STAGES=config.stages, HEADS=sizes.q_heads, GROUP=sizes.group, SCANNED=scanned, PIECES=pieces,
        ALONE=alone, COPIED=copied, SUMMED=summed, SUMMED_STAGES=summed_stages,
        **_constants(sizes, config), **launched(config.warps, config.chained),
    )  # fmt: skip
    return out, final_state


def is_copied(x: Tensor) -> bool:
    """Whether a descriptor can copy tiles of x: 16-bit rows that are `aligned`, no stride of 0."""
    return x.element_size() == 2 and aligned(x) and min(x.stride()) > 0


def _sources(*tensors: Tensor, rows: int, columns: int, copied: bool) -> list[Any]:
    """Returns tensors as the kernels take them, so many rows at a time: the first half whole, the second half
    (v and out, or v) in blocks of so many `columns`."""
    if not copied:
        return list(tensors)
    whole = len(tensors) // 2
    widths = [padded(x.shape[3]) for x in tensors[:whole]] + [columns] * (len(tensors) - whole)
    return [
        TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, width])
        for x, width in zip(tensors, widths, strict=True)
    ]


def _grid(sizes: Sizes, config: ChunkedConfig, groups: int, heads: int) -> tuple[int]:
    return (sizes.batch * groups * heads * triton.cdiv(sizes.dim, config.columns),)


def _constants(sizes: Sizes, config: ChunkedConfig) -> dict[str, int]:
    return {
        "RANK_USED": sizes.rank,
        "DIM_USED": sizes.dim,
        "RANK": padded(sizes.rank),
        "DIM": triton.cdiv(sizes.dim, config.columns) * config.columns,
        "CHUNK": config.chunk,
        "COLUMNS": config.columns,
    }


def _sums_of_groups(
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    state: Tensor | None,
    lengths: Tensor | None,
    sizes: Sizes,
    config: ChunkedConfig,
    rows: int,
    count: int,
    pieces: int,
    scanned: bool,
    copied: bool,
) -> Tensor:
    """Returns what each of the first `count` pieces of `rows` rows adds to the state at its end, fp32
    [batch * kv_heads, count, padded rank, padded dim]; `pieces`: of a group. If `scanned`, returns the state
    at its end instead, with one piece a group. A piece that is forgotten where the next group begins is not
    written."""
    constants, (chunk, stages) = _constants(sizes, config), config.summing(copied)
    pairs, size = sizes.batch * sizes.kv_heads, constants["RANK"] * constants["DIM"]
    sums = torch.empty(
        (pairs, count, constants["RANK"], constants["DIM"]), dtype=torch.float32, device=k.device
    )
    _sums_kernel[_grid(sizes, config, count, sizes.kv_heads)](
        *_sources(k, v, rows=chunk, columns=config.columns, copied=copied), decay, lengths, sums,
        sizes.length, rows, count, *strides(k), *strides(v),
        STAGES=stages, HEADS=sizes.kv_heads, PIECES=pieces, COPIED=copied,
        **constants | {"CHUNK": chunk},
        **launched(config.warps, config.chained),
    )  # fmt: skip
    if scanned:
        _scan_kernel[(size // SCANNED, pairs)](
            sums, decay, state, lengths, sizes.length, rows, count, *strides(state), sizes.rank, sizes.dim,
            RANK=constants["RANK"], DIM=constants["DIM"], BLOCK=SCANNED, HEADS=sizes.kv_heads,
            **launched(2, config.chained),
        )  # fmt: skip
    return sums


@triton.jit
def _length_of(lengths_ptr, sequence, length):
    """Rows of a sequence that count."""
    if lengths_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(lengths_ptr + sequence), 0), length)
    return length


@triton.jit
def _place(groups, HEADS: tl.constexpr, BLOCKS: tl.constexpr):
    """Block of columns, head, group and sequence of a program: those that read the same rows run together."""
    at = tl.program_id(0)
    rest = at // (BLOCKS * HEADS)
    return at % BLOCKS, at // BLOCKS % HEADS, rest % groups, rest // groups


@triton.jit
def _head(base, sequence, head, stride_sequence, stride_head):
    """Where the rows of a head begin."""
    return base + sequence.to(tl.int64) * stride_sequence + head.to(tl.int64) * stride_head


@triton.jit
def _rows(
    source, sequence, head, stride_sequence, stride_head, stride_row, start, count, column, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, FULL_ROWS: tl.constexpr, FULL_COLUMNS: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """`tile` of a head. COPIED: source is a descriptor, by which one thread has all of it copied to shared
    memory, with zeros beyond the tensor's end, while no other is busy with where it lies."""
    if COPIED:
        return tl.reshape(source.load([sequence, head, start, column]), (ROWS, WIDTH))
    else:
        base = _head(source, sequence, head, stride_sequence, stride_head)
        return tile(base, start, stride_row, count, column, columns, ROWS, WIDTH, FULL_ROWS, FULL_COLUMNS)


@triton.jit
def _first_row(group, groups, length, rows, UNIT: tl.constexpr, ALONE: tl.constexpr):
    """Of a group. One that makes the state before it by itself, UNIT rows at a time, is the shorter the later
    it begins."""
    if ALONE:
        units = tl.cdiv(length, UNIT)
        part = (1 - tl.exp2(group * LOG_KEPT)) / (1 - tl.exp2(groups * LOG_KEPT))
        return tl.where(group < groups, (units * part + 0.5).to(tl.int32), units) * UNIT
    else:
        return group * rows


@triton.jit
def what_is_left(count, log, CHUNK: tl.constexpr):
    """By the end of a chunk of `count` rows: gamma^(count-1-j) of row j; gamma^count - 1 of all before."""
    return tl.exp2(tl.maximum(count - 1 - tl.arange(0, CHUNK), 0) * log), shrinkage(log, count)


@triton.jit
def _remembered(log):
    """Rows that a state has not forgotten: the last one at least, whose weight is 1."""
    return (1.0 / tl.maximum(-log, 1e-7) * BITS_KEPT).to(tl.int32) + 1


@triton.jit
def _state_after(state, k, v, left, shrink, DECAY: tl.constexpr):
    """The state's transpose [COLUMNS, RANK] after a chunk k [CHUNK, RANK], v [CHUNK, COLUMNS]; left, shrink:
    `what_is_left`."""
    if DECAY:
        v = (v.to(tl.float32) * left[:, None]).to(v.dtype)
        state += state * shrink
    return tl.dot(tl.trans(v), k, state, input_precision="tf32x3")


@triton.jit
def _summed_up(
    state, k_source, v_source, sequence, head, column, log, first, end, count,
    stride_k_sequence, stride_k_head, stride_k_row, stride_v_sequence, stride_v_head, stride_v_row,
    RANK_USED: tl.constexpr, DIM_USED: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, DECAY: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    """The state's transpose after rows `first` up to `end`, whole chunks, of which nothing else is made: the
    last first, by the weights that they have at the end, of which the last `count` count."""
    left, _ = what_is_left(CHUNK, log, CHUNK)
    rows = end - first
    if DECAY:
        state += state * shrinkage(log, rows)
        rows = tl.minimum(rows, tl.cdiv(count, CHUNK) * CHUNK)
    for after in tl.range(0, rows, CHUNK, num_stages=STAGES):
        start = end - after - CHUNK
        k = _rows(
            k_source, sequence, head, stride_k_sequence, stride_k_head, stride_k_row, start, end, 0,
            RANK_USED, CHUNK, RANK, True, RANK_USED == RANK, COPIED,
        )  # fmt: skip
        v = _rows(
            v_source, sequence, head, stride_v_sequence, stride_v_head, stride_v_row, start, end, column,
            DIM_USED, CHUNK, COLUMNS, True, DIM_USED == DIM, COPIED,
        )  # fmt: skip
        if DECAY:
            v = (v.to(tl.float32) * left[:, None]).to(v.dtype)
            state += tl.dot(tl.trans(v), k, input_precision="tf32x3") * tl.exp2(after * log)
        else:
            state = tl.dot(tl.trans(v), k, state, input_precision="tf32x3")
    return state


@triton.jit
def _sums_kernel(
    k_ptr, v_ptr, decay_ptr, lengths_ptr, sums_ptr,
    length, rows, groups,
    stride_k_sequence, stride_k_head, stride_k_row, stride_v_sequence, stride_v_head, stride_v_row,
    RANK_USED: tl.constexpr, DIM_USED: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, HEADS: tl.constexpr,
    PIECES: tl.constexpr, COPIED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """The sum of one piece of one KV head in COLUMNS of v; all its rows are there. See `_place`; PIECES: of a
    group."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    block, head, group, sequence = _place(groups, HEADS, DIM // COLUMNS)
    DECAY: tl.constexpr = decay_ptr is not None
    end = (group + 1) * rows
    if lengths_ptr is not None and end > _length_of(lengths_ptr, sequence, length):
        # No row comes after this group: its sum is not needed.
        return
    log, kept = 0.0, rows
    if DECAY:
        log = log_decay(decay_ptr, head)
        kept = _remembered(log) - (PIECES - 1 - group % PIECES) * rows
        if kept <= 0:
            return
    state = _summed_up(
        tl.zeros([COLUMNS, RANK], tl.float32), k_ptr, v_ptr, sequence, head, block * COLUMNS, log,
        group * rows, end, kept, stride_k_sequence, stride_k_head, stride_k_row, stride_v_sequence,
        stride_v_head, stride_v_row, RANK_USED, DIM_USED, RANK, DIM, CHUNK, COLUMNS, STAGES, DECAY, COPIED,
    )  # fmt: skip
    at = ((sequence * HEADS + head).to(tl.int64) * groups + group) * (RANK * DIM)
    store_tile(tl.trans(state), sums_ptr + at, 0, DIM, RANK, block * COLUMNS, DIM, RANK, COLUMNS)


@triton.jit
def _scan_kernel(
    sums_ptr, decay_ptr, state_ptr, lengths_ptr, length, rows, groups,
    stride_sequence, stride_head, stride_row, rank, dim,
    RANK: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Puts the state by the end of each group in the place of its sum. Grid (blocks of the state, pairs)."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums_ptr += pair.to(tl.int64) * groups * (RANK * DIM)
    state = tl.zeros([BLOCK], tl.float32)
    if state_ptr is not None:
        row, column = index // DIM, index % DIM
        state_ptr += (pair // HEADS).to(tl.int64) * stride_sequence
        state_ptr += (pair % HEADS).to(tl.int64) * stride_head
        inside = (row < rank) & (column < dim)
        state = tl.load(state_ptr + row.to(tl.int64) * stride_row + column, mask=inside, other=0.0)
    shrink = 0.0
    if decay_ptr is not None:
        shrink = shrinkage(log_decay(decay_ptr, pair % HEADS), rows)
    # Only full groups: a state after any other group is not needed.
    full = tl.minimum(groups, _length_of(lengths_ptr, pair // HEADS, length) // rows)
    for group in tl.range(0, full, num_stages=8):
        at = sums_ptr + index + tl.full([BLOCK], RANK * DIM, tl.int64) * group
        state += state * shrink + tl.load(at)
        tl.store(at, state)


@triton.jit
def _state_before(
    sums_ptr, decay_ptr, state_ptr, pair, head, group, groups, rows, any_row, sequence, block, log,
    stride_sequence, stride_head, stride_row,
    RANK_USED: tl.constexpr, DIM_USED: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr, SCANNED: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state [RANK, COLUMNS] before a group that has any row, from what is not forgotten there: see
    `_sums_of_groups`."""
    state = tl.zeros([RANK, COLUMNS], tl.float32)
    column = block * COLUMNS
    first = 0
    if SCANNED:
        first = tl.maximum(group - 1, 0)
    if state_ptr is not None and (not SCANNED or group == 0):
        base = _head(state_ptr, sequence, head, stride_sequence, stride_head)
        state += tile(base, 0, stride_row, RANK_USED, column, DIM_USED, RANK, COLUMNS, False, False)
    if sums_ptr is not None:
        shrink, rows = 0.0, rows // PIECES
        if decay_ptr is not None:
            shrink = shrinkage(log, rows)
            if not SCANNED:
                first = tl.maximum(group * PIECES * rows - _remembered(log), 0) // rows
                state += state * shrinkage(log, first * rows)
        sums_ptr += pair.to(tl.int64) * (groups - 1) * (PIECES * RANK * DIM)
        at = tl.arange(0, RANK)[:, None] * DIM + column + tl.arange(0, COLUMNS)[None, :]
        for earlier in tl.range(first, tl.where(any_row, group * PIECES, 0), num_stages=STAGES):
            state += state * shrink + tl.load(sums_ptr + at + earlier * (RANK * DIM))
    return state


@triton.jit
def _outputs_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, many_k_ptr, many_v_ptr, decay_ptr, state_ptr, final_ptr, lengths_ptr,
    sums_ptr, length, rows, groups,
    stride_q_sequence, stride_q_head, stride_q_row, stride_k_sequence, stride_k_head, stride_k_row,
    stride_v_sequence, stride_v_head, stride_v_row, stride_out_sequence, stride_out_head, stride_out_row,
    stride_state_sequence, stride_state_head, stride_state_row,
    stride_final_sequence, stride_final_head, stride_final_row,
    RANK_USED: tl.constexpr, DIM_USED: tl.constexpr, RANK: tl.constexpr, DIM: tl.constexpr,
    CHUNK: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, SUMMED: tl.constexpr,
    SUMMED_STAGES: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ALONE: tl.constexpr,
    SCANNED: tl.constexpr, PIECES: tl.constexpr, COPIED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the outputs of one group of rows of one query head. See `_place`; COPIED: `_rows`. SUMMED
    rows at a time are summed up where groups are ALONE, for which k and v are `many_...`; `rows` then is of
    no use."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    block, q_head, group, sequence = _place(groups, HEADS, DIM // COLUMNS)
    head, column = q_head // GROUP, block * COLUMNS
    DECAY: tl.constexpr = decay_ptr is not None
    count = _length_of(lengths_ptr, sequence, length)
    first = _first_row(group, groups, length, rows, SUMMED, ALONE)
    end = tl.minimum(_first_row(group + 1, groups, length, rows, SUMMED, ALONE), length)
    last = tl.minimum(end, count)

    # Rows of a chunk's k come first, as in all tensors made of them.
    index = tl.arange(0, CHUNK)
    distance = index[None, :] - index[:, None]
    log = 0.0
    if DECAY:
        log = log_decay(decay_ptr, head)
        weights = tl.where(distance >= 0, tl.exp2(tl.maximum(distance, 0) * log), 0.0)
        carried = tl.exp2((index + 1) * log)

    state = _state_before(
        sums_ptr, decay_ptr, state_ptr, sequence * (HEADS // GROUP) + head, head, group, groups, rows,
        first < last, sequence, block, log, stride_state_sequence, stride_state_head, stride_state_row,
        RANK_USED, DIM_USED, RANK, DIM, COLUMNS, SCANNED, PIECES,
        # Several states in flight, if two take no more shared memory than the chunks do.
        STAGES if 8 * RANK * COLUMNS <= 2 * STAGES * CHUNK * (2 * RANK + COLUMNS) else 1,
    )  # fmt: skip
    state = tl.trans(state)
    if ALONE:
        before = tl.where(first < last, first, 0)
        state = _summed_up(
            state, many_k_ptr, many_v_ptr, sequence, head, column, log, 0, before,
            _remembered(log) if DECAY else before,
            stride_k_sequence, stride_k_head, stride_k_row, stride_v_sequence, stride_v_head, stride_v_row,
            RANK_USED, DIM_USED, RANK, DIM, SUMMED, COLUMNS, SUMMED_STAGES, DECAY, COPIED,
        )  # fmt: skip
    left_of_whole, shrink_of_whole = what_is_left(CHUNK, log, CHUNK)
    for start in tl.range(first, last, CHUNK, num_stages=STAGES):
        q = _rows(
            q_ptr, sequence, q_head, stride_q_sequence, stride_q_head, stride_q_row, start, last, 0,
            RANK_USED, CHUNK, RANK, False, RANK_USED == RANK, COPIED,
        )  # fmt: skip
        k = _rows(
            k_ptr, sequence, head, stride_k_sequence, stride_k_head, stride_k_row, start, last, 0,
            RANK_USED, CHUNK, RANK, False, RANK_USED == RANK, COPIED,
        )  # fmt: skip
        v = _rows(
            v_ptr, sequence, head, stride_v_sequence, stride_v_head, stride_v_row, start, last, column,
            DIM_USED, CHUNK, COLUMNS, False, DIM_USED == DIM, COPIED,
        )  # fmt: skip
        scores = tl.dot(k, tl.trans(q), input_precision="tf32x3")
        out = tl.dot(state.to(q.dtype), tl.trans(q), input_precision="tf32x3")
        if DECAY:
            scores *= weights
            out *= carried[None, :]
        else:
            scores = tl.where(distance >= 0, scores, 0.0)
        out = tl.dot(tl.trans(v), scores.to(v.dtype), out, input_precision="tf32x3")
        left_here, shrink_here = left_of_whole, shrink_of_whole
        if last - start < CHUNK:
            left_here, shrink_here = what_is_left(last - start, log, CHUNK)
        state = _state_after(state, k, v, left_here, shrink_here, DECAY)
        # Stored while the product before is still being computed.
        if COPIED:
            rows_out = tl.reshape(tl.trans(out).to(q.dtype), (1, 1, CHUNK, COLUMNS))
            out_ptr.store([sequence, q_head, start, column], rows_out)
        else:
            out_base = _head(out_ptr, sequence, q_head, stride_out_sequence, stride_out_head)
            store_tile(tl.trans(out), out_base, start, stride_out_row, end, column, DIM_USED, CHUNK, COLUMNS)
    if lengths_ptr is not None:
        out_base = _head(out_ptr, sequence, q_head, stride_out_sequence, stride_out_head)
        nothing = tl.zeros([CHUNK, COLUMNS], tl.float32)
        for start in range(tl.maximum(first, tl.cdiv(count, CHUNK) * CHUNK), end, CHUNK):
            store_tile(nothing, out_base, start, stride_out_row, end, column, DIM_USED, CHUNK, COLUMNS)
    # The group with the last row writes the final state; without rows, the first group.
    row = tl.maximum(count - 1, 0)
    if (first <= row) & (row < end) & (q_head % GROUP == 0):
        final_base = _head(final_ptr, sequence, head, stride_final_sequence, stride_final_head)
        store_tile(
            tl.trans(state), final_base, 0, stride_final_row, RANK_USED, column, DIM_USED, RANK, COLUMNS
        )  # fmt: skip
