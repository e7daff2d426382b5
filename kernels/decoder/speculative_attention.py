"""Attention that gives the part of its first and last tokens early, and in the end that part's error.

    early  = attention over the first `sinks` and the last `window` tokens
    exact  = attention over all tokens, of the early parts and the rest
    hit    = ||early - exact|| < threshold ||exact||, over all heads of a sequence

(ALSpec, Cai et al. 2025, Algorithm 3, section 4.1 and Appendices B and D.)

As in Algorithm 3, the first worker of a KV head (or the first few, for long ends) begins with the early
tokens and writes their result into a receive buffer, which may be in another card's memory. It counts the
result in at the receiver, and goes on with its share of the rest, which is smaller by as much and is added to
the early part. The result of the ends is kept for the programs that make the exact sum, so the norms need no
second read of the data. Each of these programs leaves its part of the norms as words: a verdict over all
heads would be one more trip to memory at the end of the launch. Who needs it first sums them (`decide`), here
or, if the words are in its memory, on another card: hits, and the priority of Algorithm 2, 0 if all sequences
hit, else 2. Sizes and threshold are read on the device. Parts and their sum, and words: see `split_kv`.
"""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.attention import attend
from simcore.kernels.decoder.checks import check_gate, check_like, check_patience, check_space
from simcore.kernels.decoder.decode_attention import (
    LOG2E,
    MOST_SEQUENCES,
    DecodeConfig,
    ends_of,
    inputs,
    shares_of,
    split_config_for,
    tokens_of,
    whole_lengths,
)
from simcore.kernels.decoder.split_kv import (
    ONE_BY_ONE,
    WARPS,
    block_added,
    cache,
    cache_of,
    empty,
    kept_space,
    launched,
    load_queries,
    nothing,
    part,
    places,
    shapes,
    sizes,
    stages,
    store_queries,
    sum_parts,
    take,
    tile,
    two_added,
    write_part,
    write_words,
)
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.kernels.streams import shared
from simcore.ops.op import Op

# Rounds of blocks that other programs read while a worker writes out the early part: memory is busy then, and
# the worker's stores have to arrive before it counts them in.
ROUNDS_ALONE = 3
# The same if several workers wait for each other.
ROUNDS_TOGETHER = 10
# Words of norms that a verdict takes at once.
NORMS_AT_ONCE = 4096
# A program of at least LONG_TOKENS tokens can wait for others at the ends, some 10 us, without ending last.
# It then takes TOKENS_A_WORKER tokens of the ends.
LONG_TOKENS, TOKENS_A_WORKER = 4096, 256
# Parts of workers that one program can hold for their sum.
MOST_WORKERS = 32


class Speculation(NamedTuple):
    """The results of a launch.

    exact, early [batch, q_heads, d]; arrived int32 [batch]: the queries of a sequence whose early part has
    arrived, zero before a launch, so the receiver sets it to zero again; norms int32 [batch, 2, parts]: words
    whose sums as fp32 are ||early - exact||^2 and ||exact||^2, EMPTY before a launch and once taken.
    """

    exact: Tensor
    early: Tensor
    arrived: Tensor
    norms: Tensor


class Verdict(NamedTuple):
    """hits int32 [batch]; norms fp32 [batch, 2]: ||early - exact||^2 and ||exact||^2; priority int32 [1]: 0
    if all sequences hit, else 2."""

    hits: Tensor
    norms: Tensor
    priority: Tensor


class SpeculativeWorkspace(NamedTuple):
    """As `Workspace`: for all parts; for the result of the ends [batch, q_heads, d]; for the parts of several
    workers at the ends, shaped as for all parts with one slice."""

    partials: Tensor
    logs: Tensor
    ends: Tensor
    worker_partials: Tensor
    worker_logs: Tensor


def speculation(q: Tensor, kv_heads: int, config: DecodeConfig) -> Speculation:
    """Makes room for the results of launches with q [batch, q_heads, d] and this layout."""
    arrived = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    norms = empty(q, *_norms_shape(q, kv_heads, config))
    return Speculation(torch.empty_like(q), torch.empty_like(q), arrived, norms)


def _norms_shape(q: Tensor, kv_heads: int, config: DecodeConfig) -> tuple[int, ...]:
    return len(q), 2, kv_heads * shares_of(q, kv_heads, config).count


def verdict(batch: int, device: torch.device) -> Verdict:
    """Makes room for the verdict on so many sequences."""
    hits, priority = (torch.zeros(count, dtype=torch.int32, device=device) for count in (batch, 1))
    return Verdict(hits, torch.zeros(batch, 2, dtype=torch.float32, device=device), priority)


def speculative_workspace(q: Tensor, kv_heads: int, config: DecodeConfig) -> SpeculativeWorkspace:
    """Makes a workspace for launches with q [batch, q_heads, d] and this layout."""
    return SpeculativeWorkspace(*(empty(q, *shape) for shape in _shapes(q, kv_heads, config)))


def _shapes(q: Tensor, kv_heads: int, config: DecodeConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of the tensors of a workspace."""
    shared = shares_of(q, kv_heads, config)
    parts = shapes(q, kv_heads, config.splits, shared.slices)
    workers = shapes(q, kv_heads, config.splits, 1)
    return [*parts, tuple(q.shape), *workers]


def _check_room(into: Speculation, q: Tensor, norms: tuple[int, ...]) -> None:
    check_like("exact", into.exact, q.shape, q.dtype)
    check_like("early", into.early, q.shape, q.dtype)
    check_like("arrived", into.arrived, (len(q),), torch.int32)
    check_like("norms", into.norms, norms, torch.int32)
    _check_contiguous(into.norms)


def _check_contiguous(norms: Tensor) -> None:
    if not norms.is_contiguous():
        raise ValueError("norms have to be contiguous")


def _decided_together(batch: int, parts: int, warps: int) -> tuple[int, int]:
    """Returns on how many sequences is decided at once, and the tile's words for each: all their norms, two a
    part, are taken at once."""
    words = int(triton.next_power_of_2(2 * parts))
    together = max(1, min(NORMS_AT_ONCE // words, int(triton.next_power_of_2(batch))))
    return together, max(words, tile(1, together, warps))


def early_workers(early_tokens: int, capacity: int, config: DecodeConfig) -> int:
    """Returns how many programs of a KV head should share so many early tokens.

    Several workers wait for each other, which takes some 10 us. So one worker reads all early tokens if these
    are no more than its share of the tokens, except in long sequences, in which several give the early part
    much sooner. If one worker would hold up the other programs, so many workers share the ends that they are
    done with them after half of their time.

    >>> config = DecodeConfig(block=32, splits=32, stages=4, warps=4, slices=4)
    >>> [early_workers(256, n, config) for n in (8192, 32768, 131072)]
    [1, 1, 1]
    >>> [early_workers(1024, n, config) for n in (8192, 32768, 131072)]
    [8, 1, 4]
    """
    each = max(1, capacity // config.splits)
    if early_tokens > each:
        wanted = triton.cdiv(2 * early_tokens, each)
    else:
        wanted = early_tokens // TOKENS_A_WORKER if each >= LONG_TOKENS else 1
    return max(1, min(config.splits, MOST_WORKERS, int(wanted)))


@launching
def speculative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    sinks: int | Tensor,
    window: int | Tensor,
    scale: float | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    gate: Tensor | None = None,
    into: Speculation | None = None,
    space: SpeculativeWorkspace | None = None,
    config: DecodeConfig | None = None,
    workers: int | None = None,
) -> Speculation:
    """Attends as `decode_attention`, with an early result of the first `sinks` and last `window` tokens, and
    leaves what `decide` decides by.

    sinks, window: numbers, or int32 tensors of one element, read on the device whenever the launch runs.
    `workers`: programs of a KV head that begin with the ends; by default from `early_workers` if sinks and
    window are numbers, else 1. `into.early`, `into.arrived` and `into.norms` may be in another card's memory.
    Raises ValueError for tensors that do not fit together.
    """
    kv = cache(q, k, v, lengths, block_table, (k_scale, v_scale))
    check_gate(gate)
    if q.dtype == torch.float64 or not 0 < len(q) <= MOST_SEQUENCES:
        raise ValueError(f"1 to {MOST_SEQUENCES} sequences, and no fp64: this sums in fp32")
    config = config or split_config_for(q, kv)
    if workers is None:
        known = isinstance(sinks, int) and isinstance(window, int)
        most = min(int(sinks) + int(window), kv.capacity) if known else 0
        workers = early_workers(most, kv.capacity, config)
    most_workers = min(config.splits, MOST_WORKERS)
    if not 1 <= workers <= most_workers:
        raise ValueError(
            f"workers have to be 1 to {most_workers}, at most one a split and {MOST_WORKERS}, not {workers}"
        )
    into = into or speculation(q, kv.kv_heads, config)
    _check_room(into, q, _norms_shape(q, kv.kv_heads, config))
    wanted = _shapes(q, kv.kv_heads, config)
    space = space or SpeculativeWorkspace(*kept_space(q, wanted))
    check_space(space, wanted)
    constants = sizes(
        q, kv, splits=config.splits, slices=config.slices, warps=config.warps, sharers=config.sharers
    )
    group = q.shape[1] // kv.kv_heads
    _speculative_attention_kernel[(config.splits, kv.kv_heads, len(q))](
        q, k, v, lengths, block_table, k_scale, v_scale, gate, *into, *space,
        (q.shape[-1] ** -0.5 if scale is None else scale) * LOG2E,
        _on_device(sinks, torch.int32, q.device), _on_device(window, torch.int32, q.device), kv.capacity,
        *q.stride()[:2], *into.exact.stride()[:2], *into.early.stride()[:2], *kv.strides(),
        BLOCK=config.block, STAGES=stages(config.stages, kv),
        WORKERS=workers, ROUNDS=ROUNDS_ALONE if workers == 1 else ROUNDS_TOGETHER,
        GIVERS=1 if ONE_BY_ONE else min(workers, group, config.sharers),
        WORKER_PARTS=tile(workers, constants["DIM"], config.warps),
        SCALED=k_scale is not None, GATED=gate is not None,
        KV_HEADS=kv.kv_heads,
        **constants,
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return into


@launching
def decide(
    made: Speculation,
    threshold: float | Tensor,
    *,
    gate: Tensor | None = None,
    into: Verdict | None = None,
) -> Verdict:
    """Takes the norms that a launch left, waiting for those that are still to come from another card, and
    decides on hits: all in one program, in a fixed order. It takes them once: without a launch before it, or
    after one that its gate skipped, it waits for ever; and the next launch comes after it, if it writes the
    same words. `threshold`: a number, or an fp32 tensor of one element, read on the device. `gate`: that of
    the launch; with one of 0 nothing is taken. Raises ValueError for tensors that do not fit together."""
    check_gate(gate)
    (batch, _, parts), device = made.norms.shape, made.norms.device
    check_like("norms", made.norms, (batch, 2, parts), torch.int32)
    _check_contiguous(made.norms)
    into = into or verdict(batch, device)
    check_like("hits", into.hits, (batch,), torch.int32)
    check_like("priority", into.priority, (1,), torch.int32)
    check_like("norms", into.norms, (batch, 2), torch.float32)
    _check_contiguous(into.norms)
    together, words = _decided_together(batch, parts, WARPS)
    _decide_kernel[(1,)](
        made.norms, gate, *into, _on_device(threshold, torch.float32, device), batch,
        PARTS=parts, WORDS=words, TOGETHER=together, GATED=gate is not None,
        **launched(WARPS, gpu_of(made.norms).chained),
    )  # fmt: skip
    return into


def _on_device(value: float | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a number as a tensor of one element; filled on the device, so that a launch with numbers can be
    captured."""
    if not isinstance(value, Tensor):
        if not value >= 0:
            raise ValueError(f"sinks, window and threshold have to be 0 or more, not {value}")
        least = min(value, torch.iinfo(torch.int32).max)
        return shared(
            ("number", device, dtype, least), lambda: torch.full((1,), least, dtype=dtype, device=device)
        )
    if value.dtype != dtype or value.numel() != 1:
        raise ValueError(
            f"sinks and window have to be int32, threshold fp32, of one element each, not {value.dtype}"
        )
    return value


@triton.jit
def _decide_kernel(
    words_ptr, gate_ptr, hits_ptr, norms_ptr, priority_ptr, threshold_ptr, batch,
    PARTS: tl.constexpr, WORDS: tl.constexpr, TOGETHER: tl.constexpr, GATED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: TOGETHER sequences at a time."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if GATED and tl.load(gate_ptr) == 0:
        return
    threshold = tl.load(threshold_ptr)
    word, all_hit = tl.arange(0, WORDS)[None, :], 1
    for group in range(0, tl.cdiv(batch, TOGETHER)):
        sequence = group * TOGETHER + tl.arange(0, TOGETHER)
        inside = sequence < batch
        places_ptr = words_ptr + sequence.to(tl.int64)[:, None] * (2 * PARTS) + word
        squares = take(places_ptr, inside[:, None] & (word < 2 * PARTS))
        first = word < PARTS
        others = tl.where(first | (word >= 2 * PARTS), 0.0, squares)
        off, size = tl.reduce((tl.where(first, squares, 0.0), others), 1, two_added)
        # Equal results are a hit at any threshold: a sequence without tokens must not count as a miss.
        hit = ((off < threshold * threshold * size) | (off == 0)).to(tl.int32)
        tl.store(norms_ptr + 2 * sequence, off, mask=inside)
        tl.store(norms_ptr + 2 * sequence + 1, size, mask=inside)
        tl.store(hits_ptr + sequence, hit, mask=inside)
        all_hit = tl.minimum(all_hit, tl.min(tl.where(inside, hit, 1), 0))
    tl.store(priority_ptr, 2 - 2 * all_hit)


@triton.jit
def _speculative_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr, gate_ptr,
    exact_ptr, early_ptr, arrived_ptr, norms_ptr,
    partials_ptr, logs_ptr, ends_ptr, worker_partials_ptr, worker_logs_ptr,
    scale, sinks_ptr, window_ptr, capacity,
    stride_q_sequence, stride_q_head, stride_exact_sequence, stride_exact_head, stride_early_sequence,
    stride_early_head,
    stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, stride_table,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
    CHAINED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WORKERS: tl.constexpr, ROUNDS: tl.constexpr, GIVERS: tl.constexpr,
    WORKER_PARTS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    SHARES: tl.constexpr, SHARERS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, PARTS: tl.constexpr,
    PAGE: tl.constexpr, K_TOKEN: tl.constexpr, V_TOKEN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv_heads, batch). The first WORKERS splits begin with the ends."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if GATED and tl.load(gate_ptr) == 0:
        return
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + sequence), capacity), 0)
    sinks = tl.maximum(tl.minimum(tl.load(sinks_ptr), length), 0)
    early = sinks + tl.maximum(tl.minimum(tl.load(window_ptr), length - sinks), 0)
    rest = length - early
    q_base = q_ptr + sequence.to(tl.int64) * stride_q_sequence + head * GROUP * stride_q_head
    q = load_queries(q_base, None, stride_q_head, GROUP, 1, ROWS, HEAD_DIM, DIM)
    k_base, v_base = cache_of(
        k_ptr, v_ptr, sequence, head, stride_k_outer, stride_k_head, stride_v_outer, stride_v_head, PAGE
    )
    if PAGE > 0:
        table_ptr += sequence.to(tl.int64) * stride_table
    v_scale = 1.0
    if SCALED:
        scale *= tl.load(k_scale_ptr + head)
        v_scale = tl.load(v_scale_ptr + head)
    pair = (sequence * KV_HEADS + head).to(tl.int64)
    row, ends_row = pair * SPLITS * GROUP, pair * GROUP
    # While the workers read the ends, the other programs take as many rounds of the rest; then all programs
    # do. So all end together, which matters because programs get equal shares of the bandwidth.
    rounds = tl.cdiv(tl.cdiv(early, BLOCK), WORKERS) + tl.where(early > 0, ROUNDS, 0)
    blocks, dealt = tl.cdiv(rest, BLOCK), rounds * (SPLITS - WORKERS)
    before = tl.cdiv(tl.maximum(blocks - (split - WORKERS), 0), max(SPLITS - WORKERS, 1))
    before = tl.where(split < WORKERS, 0, tl.minimum(rounds, before))
    turns = before + tl.cdiv(tl.maximum(blocks - dealt - split, 0), SPLITS)
    top, sums, out = nothing(ROWS, BLOCK, DIM)
    ends = out
    if split < WORKERS:
        for start in tl.range(split * BLOCK, early, WORKERS * BLOCK, num_stages=STAGES):
            index = start + tl.arange(0, BLOCK)
            # Past the end the last token is read again, because the memory behind it may hold anything.
            token = tl.minimum(index, early - 1)
            token += tl.where(token < sinks, 0, rest)
            top, sums, out = block_added(
                top, sums, out, q, k_base, v_base, table_ptr, token, index < early, scale,
                stride_k_outer, stride_v_outer, K_TOKEN, V_TOKEN, WIDE, HEAD_DIM, DIM, PAGE,
            )  # fmt: skip
        ends, ends_log = part(top, sums, out)
        ends *= v_scale
        if WORKERS == 1:
            write_words(ends, ends_ptr, ends_row, GROUP, ROWS, HEAD_DIM, DIM)
        else:
            write_part(
                ends, ends_log, worker_partials_ptr, worker_logs_ptr, (pair * WORKERS + split) * GROUP,
                GROUP, ROWS, HEAD_DIM, DIM, 1,
            )  # fmt: skip
        if turns > 0:
            _give(
                ends, early_ptr, stride_early_sequence, stride_early_head, arrived_ptr, ends_ptr,
                worker_partials_ptr, worker_logs_ptr, sequence, head, pair, split,
                WORKERS, GIVERS, WORKER_PARTS, GROUP, ROWS, HEAD_DIM, DIM,
            )  # fmt: skip
    for turn in tl.range(0, turns, num_stages=STAGES):
        own = turn * (SPLITS - WORKERS) + split - WORKERS
        number = tl.where(turn < before, own, dealt + (turn - before) * SPLITS + split)
        index = number * BLOCK + tl.arange(0, BLOCK)
        token = sinks + tl.minimum(index, rest - 1)
        top, sums, out = block_added(
            top, sums, out, q, k_base, v_base, table_ptr, token, index < rest, scale,
            stride_k_outer, stride_v_outer, K_TOKEN, V_TOKEN, WIDE, HEAD_DIM, DIM, PAGE,
        )  # fmt: skip
    out, log = part(top, sums, out)
    write_part(
        out * v_scale, log, partials_ptr, logs_ptr, row + split * GROUP, GROUP, ROWS, HEAD_DIM, DIM, SLICES
    )  # fmt: skip
    # A worker without a share of the rest gives the ends only after its part is written, so that no program
    # waits for that part meanwhile.
    if (split < WORKERS) & (turns == 0):
        _give(
            ends, early_ptr, stride_early_sequence, stride_early_head, arrived_ptr, ends_ptr,
            worker_partials_ptr, worker_logs_ptr, sequence, head, pair, split,
            WORKERS, GIVERS, WORKER_PARTS, GROUP, ROWS, HEAD_DIM, DIM,
        )  # fmt: skip
    if split >= SPLITS - SHARERS:
        exact_base = (
            exact_ptr + sequence.to(tl.int64) * stride_exact_sequence + head * GROUP * stride_exact_head
        )
        for share in range(split - (SPLITS - SHARERS), SHARES, SHARERS):
            query, first_column = share // SLICES * QUERIES, share % SLICES * COLUMNS
            exact, speculated, _ = sum_parts(
                partials_ptr, logs_ptr, ends_ptr, None, row, ends_row, query, first_column, SPLITS,
                PARTS, True, GROUP, HEAD_DIM, QUERIES, COLUMNS, SLICES, COLUMNS,
            )  # fmt: skip
            miss = speculated - exact
            off, size = tl.reduce((miss * miss, exact * exact), 0, two_added)
            word_ptr = norms_ptr + (sequence * 2 * KV_HEADS + head) * SHARES + share
            tl.store(word_ptr, off.to(tl.int32, bitcast=True))
            tl.store(word_ptr + KV_HEADS * SHARES, size.to(tl.int32, bitcast=True))
            queries, columns = places(query, first_column, QUERIES, COLUMNS)
            tl.store(
                exact_base + queries * stride_exact_head + columns,
                exact.to(exact_ptr.dtype.element_ty),
                mask=(queries < GROUP) & (columns < HEAD_DIM),
            )


@triton.jit
def _give(
    ends, early_ptr, stride_early_sequence, stride_early_head, arrived_ptr, ends_ptr,
    worker_partials_ptr, worker_logs_ptr, sequence, head, pair, split,
    WORKERS: tl.constexpr, GIVERS: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Gives what the ends made, ends [ROWS, DIM], to the receiver. Of several workers the last GIVERS wait
    for the others' parts and sum them, a query each, also for whoever compares that with the exact sum."""
    base = early_ptr + sequence.to(tl.int64) * stride_early_sequence + head * GROUP * stride_early_head
    if WORKERS == 1:
        store_queries(ends, base, None, stride_early_head, GROUP, 1, ROWS, HEAD_DIM, DIM)
        _count_in(arrived_ptr + sequence, GROUP)
    elif split >= WORKERS - GIVERS:
        columns = tl.arange(0, DIM)
        for query in range(split - (WORKERS - GIVERS), GROUP, GIVERS):
            early, _, _ = sum_parts(
                worker_partials_ptr, worker_logs_ptr, worker_partials_ptr, None, pair * WORKERS * GROUP, 0,
                query, 0, WORKERS, PARTS, False, GROUP, HEAD_DIM, 1, DIM, 1, DIM,
            )  # fmt: skip
            words = ends_ptr + (pair * GROUP + query) * HEAD_DIM + columns
            tl.store(words, early.to(tl.int32, bitcast=True), mask=columns < HEAD_DIM)
            early = early.to(base.dtype.element_ty)
            tl.store(base + query * stride_early_head + columns, early, mask=columns < HEAD_DIM)
            _count_in(arrived_ptr + sequence, 1)


@triton.jit
def _count_in(arrived_ptr, queries):
    """Tells the receiver that so many queries have been stored."""
    tl.debug_barrier()
    # The receiver may be on another card: the stores have to be visible to the whole system before the count.
    tl.atomic_add(arrived_ptr, queries, sem="release", scope="sys")


@launching
def receive(
    early: Tensor,
    arrived: Tensor,
    x: Tensor,
    *,
    gate: Tensor | None = None,
    patience: Tensor | None = None,
    error: Tensor | None = None,
    code: int = 1,
    chained: bool = False,
) -> None:
    """Waits on the device until all queries of each sequence have arrived, copies early [batch, q_heads, d]
    to x [batch, q_heads * d] and sets arrived [batch] to zero again (Algorithm 3, the receiver).

    Without `patience` it waits as long as it takes. patience int32 [1], on the device: how often to look
    before giving up. With 0 nothing at all is done, so that the launch can be loaded and captured before
    there is a sender. A sequence that is given up is neither copied nor set to zero; patience is set to 0,
    so that launches behind it wait no more, and `code` is written to `error`, int32 [1] on the device or
    pinned. `chained`: where the GPU can, the launch starts while the one before still ends, and the next one
    as soon as nothing is waited for any more. Raises ValueError for tensors that do not fit."""
    batch, width = x.shape
    if (
        early.shape[0] != batch
        or early.numel() != x.numel()
        or not (early.is_contiguous() and x.is_contiguous())
    ):
        raise ValueError(f"x has to be contiguous with as many elements as early, {tuple(early.shape)}")
    check_patience(x, patience, error)
    _receive_kernel[(batch,)](
        early, arrived, x, gate, patience, error, width, code,
        QUERIES=early.shape[1], BLOCK=4096, GATED=gate is not None,
        **launched(WARPS, chained and gpu_of(x).chained),
    )  # fmt: skip


@triton.jit(do_not_specialize=["code"])
def _receive_kernel(
    early_ptr, arrived_ptr, x_ptr, gate_ptr, patience_ptr, error_ptr, width, code,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (batch)."""
    if CHAINED:
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return
    if patience_ptr is not None and tl.load(patience_ptr) == 0:
        return
    sequence = tl.program_id(0)
    there = _all_arrived(arrived_ptr + sequence, patience_ptr, QUERIES)
    if CHAINED:
        gdc_launch_dependents()
    if patience_ptr is not None and not there:
        # What comes behind it on this card would wait in vain, too.
        tl.store(patience_ptr, 0)
        if error_ptr is not None:
            tl.store(error_ptr, code)
        return
    row = sequence.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(early_ptr + row + at, mask=at < width, cache_modifier=".cg")
        tl.store(x_ptr + row + at, values, mask=at < width)
    tl.debug_barrier()
    tl.store(arrived_ptr + sequence, 0)


@triton.jit
def _all_arrived(arrived_ptr, patience_ptr, QUERIES: tl.constexpr):
    """Waits until so many queries have arrived; whether they have, by the last look."""
    found = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="sys")
    if patience_ptr is None:
        while found < QUERIES:
            found = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="sys")
    else:
        patience, looks = tl.load(patience_ptr), 1
        while (found < QUERIES) & (looks < patience):
            found = tl.atomic_add(arrived_ptr, 0, sem="acquire", scope="sys")
            looks += 1
    return found >= QUERIES


def reference_speculative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    sinks: int | Tensor,
    window: int | Tensor,
    threshold: float | Tensor,
    scale: float | None = None,
    block_table: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `speculative_attention` in plain torch, in any float dtype: exact, early [batch, q_heads, d], norms
    [batch, 2] in the format of sums, hits int32 [batch]."""
    kv = cache(q, k, v, lengths, block_table, (k_scale, v_scale))
    whole = q.to(torch.promote_types(q.dtype, torch.float32))
    exact, early = torch.zeros_like(whole), torch.zeros_like(whole)
    for sequence, length in enumerate(lengths.tolist()):
        parts = (exact, range(length)), (early, ends_of(length, int(sinks), int(window)))
        for out, kept in parts:
            if len(kept):
                keys, values = tokens_of(kv, sequence, kept, q.dtype)
                out[sequence] = attend(whole[None, sequence, None], keys, values, scale=scale)[0][0, 0]
    norms = torch.stack((early - exact, exact), 1).square().sum((-1, -2))
    # Equal results are a hit at any threshold.
    hits = (norms[:, 0] < float(threshold) ** 2 * norms[:, 1]) | (norms[:, 0] == 0)
    return exact.to(q.dtype), early.to(q.dtype), norms, hits.to(torch.int32)


# -- the op ----------------------------------------------------------------------------------------------


def _run(op: Op, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # The op does not decide on hits: it passes the parts of norms on.
    chunk, lengths = op["chunk"], whole_lengths(op, q)
    config = split_config_for(q, cache(q, k, v, lengths, None, (None, None)))
    room = partial(speculation, q, k.shape[1], config)
    into = shared(("speculation", q.device, q.shape, q.dtype, k.shape[1], config), room)
    made = speculative_attention(q, k, v, lengths, sinks=chunk, window=chunk, into=into, config=config)
    return made.exact, made.early, made.norms.view(torch.float32).transpose(0, 1)


def _reference(op: Op, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Attends from q [batch, q_heads, d] over k, v [batch, kv_heads, context, d], first over the first and
    last `chunk` tokens: exact and speculated [batch, q_heads, d], and the squared norms [2, batch, parts] of
    their difference and of the exact result, over this rank's heads: here in one part.

        out = sigmoid(lse_1 - lse_2) out_1 + sigmoid(lse_2 - lse_1) out_2    over two disjoint sets of tokens
    """
    chunk, context = op["chunk"], k.shape[2]
    if 2 * chunk >= context:
        exact, _ = attend(q[:, None], k, v)
        speculated = exact
    else:
        keys, values = (torch.cat((x[:, :, :chunk], x[:, :, context - chunk :]), 2) for x in (k, v))
        speculated, lse = attend(q[:, None], keys, values)
        between = slice(chunk, context - chunk)
        rest, rest_lse = attend(q[:, None], k[:, :, between], v[:, :, between])
        share = torch.sigmoid(lse - rest_lse)[..., None]
        exact = share * speculated + (1.0 - share) * rest
    norms = torch.stack((speculated - exact, exact)).square().sum((-1, -2, -3))[..., None]
    return exact[:, 0].to(q.dtype), speculated[:, 0].to(q.dtype), norms


# The third result, the norms.
SPECULATIVE_ATTENTION = Kernel(by_device(_run, _reference), _reference, inputs, in_parts=(2,))
