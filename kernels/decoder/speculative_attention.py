"""Attention that gives out its first and last tokens' part early, and says in the end how far off that was.

    early  = attention over the first `sinks` and the last `window` tokens
    exact  = attention over all tokens, of the early parts and the rest
    hit    = ||early - exact|| < threshold ||exact||, over all heads of a sequence

(ALSpec, Cai et al. 2025, Algorithm 3, section 4.1 and Appendices B and D.)

As in Algorithm 3, the first worker of a KV head (or the first few, for long ends) begins with the early
tokens, writes what they give into a receive buffer, which may lie in another card's memory, counts it in
where the receiver waits, and goes on with its share of the rest, which is so much smaller. Early parts then
count in the exact sum like any other. Whoever makes that sum has both at hand, so the norms cost no second
look at the data. The last program of a sequence adds them up and decides; the last of all sets the priority
of Algorithm 2: 0 where all sequences hit, else 2. Sizes and threshold are read on the device. Parts and their
sum: see `split_kv`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.decoder.attention import attend
from kernels.decoder.checks import check_gate, check_like, check_space
from kernels.decoder.decode_attention import (
    LOG2E,
    MOST_SEQUENCES,
    DecodeConfig,
    config_for,
    ends_of,
    inputs,
    tokens_of,
)
from kernels.decoder.split_kv import (
    ONE_BY_ONE,
    block_added,
    cache,
    cache_of,
    empty,
    launched,
    load_queries,
    nothing,
    part,
    shapes,
    sizes,
    stages,
    store_queries,
    sum_parts,
    take,
    tile,
    write_part,
)
from kernels.kernel import Kernel, by_device
from simcore.ops import Op

# Blocks that others read while a worker gives the early part away: memory is busy then, and its stores have
# to be there before it counts them in.
ROUNDS_TO_GIVE = tl.constexpr(3)
# Tokens of the ends for each worker: several have to wait for each other, which takes longer than to read
# these.
TOKENS_A_WORKER = 2048


class Speculation(NamedTuple):
    """What a launch leaves.

    exact, early [batch, q_heads, d]; arrived int32 [batch]: queries of a sequence whose early part is there,
    zero when a launch begins, so set to zero again by whoever takes it; hits int32 [batch]; norms fp32
    [batch, 2]: ||early - exact||^2 and ||exact||^2; priority int32 [1]: 0 where all sequences hit, else 2.
    """

    exact: Tensor
    early: Tensor
    arrived: Tensor
    hits: Tensor
    norms: Tensor
    priority: Tensor


class SpeculativeWorkspace(NamedTuple):
    """As `Workspace`: for all parts, for the early ones alone, for the norms of each slice [batch, 2, slices]
    and for verdicts [batch]."""

    partials: Tensor
    logs: Tensor
    early_partials: Tensor
    early_logs: Tensor
    norms: Tensor
    verdicts: Tensor


def speculation(q: Tensor) -> Speculation:
    """Room for what a launch with q [batch, q_heads, d] leaves."""
    batch = q.shape[0]

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=q.device)

    norms = zeros(batch, 2, dtype=torch.float32)
    return Speculation(torch.empty_like(q), torch.empty_like(q), zeros(batch), zeros(batch), norms, zeros(1))


def speculative_workspace(
    q: Tensor, kv_heads: int, config: DecodeConfig, workers: int = 1
) -> SpeculativeWorkspace:
    """A workspace for launches with q [batch, q_heads, d], this layout and so many workers for the ends."""
    return SpeculativeWorkspace(*(empty(q, *shape) for shape in _shapes(q, kv_heads, config, workers)))


def _shapes(q: Tensor, kv_heads: int, config: DecodeConfig, workers: int) -> list[tuple[int, ...]]:
    """Of the tensors of a workspace."""
    parts = shapes(q, kv_heads, workers + config.splits, config.slices, config.warps)
    early = shapes(q, kv_heads, workers, 1, config.warps)
    batch, slices = q.shape[0], q.shape[1] * parts[1][1]
    return [*parts, *early, (batch, 2, slices), (batch,)]


def _check_room(into: Speculation, q: Tensor) -> None:
    batch = len(q)
    check_like("exact", into.exact, q.shape, q.dtype)
    check_like("early", into.early, q.shape, q.dtype)
    check_like("arrived", into.arrived, (batch,), torch.int32)
    check_like("hits", into.hits, (batch,), torch.int32)
    check_like("priority", into.priority, (1,), torch.int32)
    check_like("norms", into.norms, (batch, 2), torch.float32)
    if not into.norms.is_contiguous():
        raise ValueError("norms have to be contiguous")


def early_workers(early_tokens: int, config: DecodeConfig) -> int:
    """How many programs of a KV head should share so many early tokens."""
    return max(1, min(config.splits, early_tokens // TOKENS_A_WORKER))


def speculative_attention(
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
    gate: Tensor | None = None,
    into: Speculation | None = None,
    space: SpeculativeWorkspace | None = None,
    config: DecodeConfig | None = None,
    workers: int | None = None,
) -> Speculation:
    """Attention as `decode_attention`, with what the first `sinks` and last `window` tokens alone give early.

    sinks, window, threshold: numbers, or int32, int32 and fp32 tensors of one element, read on the device
    whenever the launch runs. `workers`: programs of a KV head that begin with the ends; by `early_workers`
    where sinks and window are numbers, else 1. `into.early` and `into.arrived` may lie in another card's
    memory. Raises ValueError for tensors that do not fit together.
    """
    kv = cache(q, k, v, lengths, block_table, (k_scale, v_scale))
    check_gate(gate)
    if q.dtype == torch.float64 or not 0 < len(q) <= MOST_SEQUENCES:
        raise ValueError(f"1 to {MOST_SEQUENCES} sequences, and no fp64: this sums in fp32")
    config = config or config_for(q, kv)
    if workers is None:
        known = isinstance(sinks, int) and isinstance(window, int)
        workers = early_workers(min(int(sinks) + int(window), kv.capacity), config) if known else 1
    if not 1 <= workers <= config.splits:
        raise ValueError(
            f"workers have to be 1 to {config.splits}, as many as there are splits, not {workers}"
        )
    batch = q.shape[0]
    into = into or speculation(q)
    _check_room(into, q)
    space = space or speculative_workspace(q, kv.kv_heads, config, workers)
    check_space(space, _shapes(q, kv.kv_heads, config, workers))
    constants = sizes(
        q, kv, splits=config.splits, parts=workers + config.splits, slices=config.slices, warps=config.warps,
        sharers=config.sharers,
    )  # fmt: skip
    early_parts, early_copies = tile(workers, constants["DIM"], config.warps)
    # As many words as there are, or as `tile` wants them.
    least, _ = tile(1, 1, config.warps)
    _speculative_attention_kernel[(config.splits, kv.kv_heads, batch)](
        q, k, v, lengths, block_table, k_scale, v_scale, gate, *into, *space,
        (q.shape[-1] ** -0.5 if scale is None else scale) * LOG2E,
        _on_device(sinks, torch.int32, q), _on_device(window, torch.int32, q),
        _on_device(threshold, torch.float32, q), kv.capacity,
        *q.stride()[:2], *into.exact.stride()[:2], *into.early.stride()[:2], *kv.strides(),
        BLOCK=config.block, STAGES=stages(config.stages, kv),
        WORKERS=workers, EARLY_SHARERS=1 if ONE_BY_ONE else workers,
        EARLY_PARTS=early_parts, EARLY_COPIES=early_copies,
        SCALED=k_scale is not None, GATED=gate is not None,
        KV_HEADS=kv.kv_heads, BATCH=batch,
        NORMS=max(least, triton.next_power_of_2(2 * space.norms.shape[2])),
        VERDICTS=max(least, triton.next_power_of_2(batch)),
        **constants,
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return into


def _on_device(value: float | Tensor, dtype: torch.dtype, q: Tensor) -> Tensor:
    """A number as a tensor of one element; filled on the device, so that a launch with numbers can be
    captured."""
    if not isinstance(value, Tensor):
        if not value >= 0:
            raise ValueError(f"sinks, window and threshold have to be 0 or more, not {value}")
        return torch.full((1,), min(value, torch.iinfo(torch.int32).max), dtype=dtype, device=q.device)
    if value.dtype != dtype or value.numel() != 1:
        raise ValueError(
            f"sinks and window have to be int32, threshold fp32, of one element each, not {value.dtype}"
        )
    return value


@triton.jit
def _verdict(
    norms_words_ptr, verdicts_ptr, hits_ptr, norms_ptr, priority_ptr, threshold_ptr, sequence,
    SLOTS: tl.constexpr, NORMS: tl.constexpr, BATCH: tl.constexpr, VERDICTS: tl.constexpr,
):  # fmt: skip
    """Decides about a sequence once all its norms are there; for the last sequence, about all."""
    slot = tl.arange(0, NORMS)
    squares = take(norms_words_ptr + sequence * 2 * SLOTS + slot, slot < 2 * SLOTS)
    first = slot < SLOTS
    off, size = tl.split(
        tl.sum(tl.join(tl.where(first, squares, 0.0), tl.where(first | (slot >= 2 * SLOTS), 0.0, squares)), 0)
    )
    threshold = tl.load(threshold_ptr)
    # Equal is right, whatever the threshold: a sequence of no token must not count as a miss.
    hit = ((off < threshold * threshold * size) | (off == 0)).to(tl.int32)
    tl.store(norms_ptr + 2 * sequence, off)
    tl.store(norms_ptr + 2 * sequence + 1, size)
    tl.store(hits_ptr + sequence, hit)
    if BATCH > 1:
        tl.store(verdicts_ptr + sequence, hit)
        if sequence == BATCH - 1:
            other = tl.arange(0, VERDICTS)
            hits = take(verdicts_ptr + other, other < BATCH).to(tl.int32, bitcast=True)
            tl.store(priority_ptr, 2 - 2 * tl.min(tl.where(other < BATCH, hits, 1), 0))
    else:
        tl.store(priority_ptr, 2 - 2 * hit)


@triton.jit
def _speculative_attention_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, k_scale_ptr, v_scale_ptr, gate_ptr,
    exact_ptr, early_ptr, arrived_ptr, hits_ptr, norms_ptr, priority_ptr,
    partials_ptr, logs_ptr, early_partials_ptr, early_logs_ptr, norms_words_ptr, verdicts_ptr,
    scale, sinks_ptr, window_ptr, threshold_ptr, capacity,
    stride_q_sequence, stride_q_head, stride_exact_sequence, stride_exact_head, stride_early_sequence,
    stride_early_head,
    stride_k_outer, stride_k_head, stride_k_token, stride_v_outer, stride_v_head, stride_v_token,
    stride_table,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, SCALED: tl.constexpr, GATED: tl.constexpr,
    CHAINED: tl.constexpr,
    KV_HEADS: tl.constexpr, BATCH: tl.constexpr, NORMS: tl.constexpr, VERDICTS: tl.constexpr,
    WORKERS: tl.constexpr, EARLY_SHARERS: tl.constexpr, EARLY_PARTS: tl.constexpr,
    EARLY_COPIES: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
    SLICES: tl.constexpr, SHARERS: tl.constexpr, PARTS: tl.constexpr, COPIES: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv_heads, batch). The first WORKERS parts are early, part WORKERS + s is the rest of
    split s."""
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
    q = load_queries(q_base, stride_q_head, GROUP, ROWS, HEAD_DIM, DIM)
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
    row, log_row = pair * (WORKERS + SPLITS) * GROUP, pair * SLICES * (WORKERS + SPLITS) * GROUP
    top, sums, out = nothing(ROWS, BLOCK, DIM)
    if split < WORKERS:
        for start in tl.range(split * BLOCK, early, WORKERS * BLOCK, num_stages=STAGES):
            index = start + tl.arange(0, BLOCK)
            # Beyond the end the last token is read again: what stands behind it may be anything.
            token = tl.minimum(index, early - 1)
            token += tl.where(token < sinks, 0, rest)
            top, sums, out = block_added(
                top, sums, out, q, k_base, v_base, table_ptr, token, index < early, scale,
                stride_k_outer, stride_k_token, stride_v_outer, stride_v_token, HEAD_DIM, DIM, PAGE,
            )  # fmt: skip
        out, log = part(top, sums, out)
        write_part(
            out * v_scale, log, partials_ptr, logs_ptr, row + split * GROUP, log_row + split * GROUP,
            (WORKERS + SPLITS) * GROUP, GROUP, ROWS, HEAD_DIM, DIM, SLICES,
        )  # fmt: skip
        early_base = early_ptr + sequence.to(tl.int64) * stride_early_sequence
        early_base += head * GROUP * stride_early_head
        if WORKERS == 1:
            store_queries(out * v_scale, early_base, stride_early_head, GROUP, ROWS, HEAD_DIM, DIM)
            _count_in(arrived_ptr + sequence, GROUP)
        else:
            early_row = pair * WORKERS * GROUP
            write_part(
                out * v_scale, log, early_partials_ptr, early_logs_ptr, early_row + split * GROUP,
                early_row + split * GROUP, 0, GROUP, ROWS, HEAD_DIM, DIM, 1,
            )  # fmt: skip
            if split >= WORKERS - EARLY_SHARERS:
                _give_early(
                    early_base, stride_early_head, arrived_ptr + sequence, early_partials_ptr, early_logs_ptr,
                    early_row, split - (WORKERS - EARLY_SHARERS),
                    WORKERS, EARLY_SHARERS, EARLY_PARTS, EARLY_COPIES, GROUP, HEAD_DIM, DIM,
                )  # fmt: skip
        top, sums, out = nothing(ROWS, BLOCK, DIM)
    # While the workers are busy with the early tokens, the others share out as many rounds of the rest among
    # them; then all do. So all end together, which matters: programs get equal shares of the bandwidth.
    rounds = tl.cdiv(tl.cdiv(early, BLOCK), WORKERS) + tl.where(early > 0, ROUNDS_TO_GIVE, 0)
    blocks, dealt = tl.cdiv(rest, BLOCK), rounds * (SPLITS - WORKERS)
    before = tl.cdiv(tl.maximum(blocks - (split - WORKERS), 0), max(SPLITS - WORKERS, 1))
    before = tl.where(split < WORKERS, 0, tl.minimum(rounds, before))
    turns = before + tl.cdiv(tl.maximum(blocks - dealt - split, 0), SPLITS)
    for turn in tl.range(0, turns, num_stages=STAGES):
        own = turn * (SPLITS - WORKERS) + split - WORKERS
        number = tl.where(turn < before, own, dealt + (turn - before) * SPLITS + split)
        index = number * BLOCK + tl.arange(0, BLOCK)
        token = sinks + tl.minimum(index, rest - 1)
        top, sums, out = block_added(
            top, sums, out, q, k_base, v_base, table_ptr, token, index < rest, scale,
            stride_k_outer, stride_k_token, stride_v_outer, stride_v_token, HEAD_DIM, DIM, PAGE,
        )  # fmt: skip
    out, log = part(top, sums, out)
    write_part(
        out * v_scale, log, partials_ptr, logs_ptr, row + (WORKERS + split) * GROUP,
        log_row + (WORKERS + split) * GROUP, (WORKERS + SPLITS) * GROUP, GROUP, ROWS, HEAD_DIM, DIM, SLICES,
    )  # fmt: skip
    if split >= SPLITS - SHARERS:
        exact_base = (
            exact_ptr + sequence.to(tl.int64) * stride_exact_sequence + head * GROUP * stride_exact_head
        )
        for share in range(split - (SPLITS - SHARERS), GROUP * SLICES, SHARERS):
            query, cut = share // SLICES, share % SLICES
            first_column = cut * (DIM // SLICES)
            exact, speculated = sum_parts(
                partials_ptr, logs_ptr, row + query, log_row + cut * (WORKERS + SPLITS) * GROUP + query,
                first_column, WORKERS + SPLITS, PARTS, COPIES, WORKERS, GROUP, HEAD_DIM, DIM // SLICES,
            )  # fmt: skip
            off, size = tl.split(
                tl.sum(tl.join((speculated - exact) * (speculated - exact), exact * exact), 0)
            )
            slot = norms_words_ptr + (sequence * 2 * KV_HEADS + head) * GROUP * SLICES + share
            tl.store(slot, off.to(tl.int32, bitcast=True))
            tl.store(slot + KV_HEADS * GROUP * SLICES, size.to(tl.int32, bitcast=True))
            columns = first_column + tl.arange(0, DIM // SLICES)
            exact = exact.to(exact_ptr.dtype.element_ty)
            tl.store(exact_base + query * stride_exact_head + columns, exact, mask=columns < HEAD_DIM)
        if (split == SPLITS - 1) & (head == KV_HEADS - 1):
            _verdict(
                norms_words_ptr, verdicts_ptr, hits_ptr, norms_ptr, priority_ptr, threshold_ptr, sequence,
                KV_HEADS * GROUP * SLICES, NORMS, BATCH, VERDICTS,
            )  # fmt: skip


@triton.jit
def _give_early(
    early_base, stride_early_head, arrived_ptr, partials_ptr, logs_ptr, row, member,
    WORKERS: tl.constexpr, EARLY_SHARERS: tl.constexpr, PARTS: tl.constexpr, COPIES: tl.constexpr,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Sums the early parts of every EARLY_SHARERS-th query and gives them to the receiver."""
    columns = tl.arange(0, DIM)
    for query in range(member, GROUP, EARLY_SHARERS):
        early, _ = sum_parts(
            partials_ptr, logs_ptr, row + query, row + query, 0,
            WORKERS, PARTS, COPIES, 0, GROUP, HEAD_DIM, DIM,
        )  # fmt: skip
        early = early.to(early_base.dtype.element_ty)
        tl.store(early_base + query * stride_early_head + columns, early, mask=columns < HEAD_DIM)
        _count_in(arrived_ptr, 1)


@triton.jit
def _count_in(arrived_ptr, queries):
    """Tells the receiver that so many queries have been stored."""
    tl.debug_barrier()
    # The receiver may be another card: they have to be there, for all of the system, before the count.
    tl.atomic_add(arrived_ptr, queries, sem="release", scope="sys")


def receive(early: Tensor, arrived: Tensor, x: Tensor, *, gate: Tensor | None = None) -> None:
    """Waits on the device until all queries of each sequence have arrived, takes early [batch, q_heads, d] as
    x [batch, q_heads * d] and sets arrived [batch] to zero again (Algorithm 3, the receiver)."""
    batch, width = x.shape
    if (
        early.shape[0] != batch
        or early.numel() != x.numel()
        or not (early.is_contiguous() and x.is_contiguous())
    ):
        raise ValueError(f"x has to be contiguous with as many elements as early, {tuple(early.shape)}")
    _receive_kernel[(batch,)](
        early, arrived, x, gate, width, QUERIES=early.shape[1], BLOCK=4096, GATED=gate is not None
    )


@triton.jit
def _receive_kernel(
    early_ptr, arrived_ptr, x_ptr, gate_ptr, width,
    QUERIES: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (batch)."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    sequence = tl.program_id(0)
    there = tl.atomic_add(arrived_ptr + sequence, 0, sem="acquire", scope="sys")
    while there < QUERIES:
        there = tl.atomic_add(arrived_ptr + sequence, 0, sem="acquire", scope="sys")
    row = sequence.to(tl.int64) * width
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(early_ptr + row + at, mask=at < width, cache_modifier=".cg")
        tl.store(x_ptr + row + at, values, mask=at < width)
    tl.debug_barrier()
    tl.store(arrived_ptr + sequence, 0)


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
    [batch, 2] as wide as sums are made, hits int32 [batch]."""
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
    # Equal is right, whatever the threshold.
    hits = (norms[:, 0] < float(threshold) ** 2 * norms[:, 1]) | (norms[:, 0] == 0)
    return exact.to(q.dtype), early.to(q.dtype), norms, hits.to(torch.int32)


# -- the op ----------------------------------------------------------------------------------------------


def _run(op: Op, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    lengths = torch.full(q.shape[:1], op["context"], dtype=torch.int32, device=q.device)
    # What is a hit is not this op's to say: the norms go on.
    made = speculative_attention(q, k, v, lengths, sinks=op["chunk"], window=op["chunk"], threshold=0.0)
    return made.exact, made.early, made.norms.T


def _reference(op: Op, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [batch, q_heads, d] over k, v [batch, kv_heads, context, d], the first and last `chunk` tokens first:
    exact and speculated [batch, q_heads, d], and the squared norms [2, batch] of their difference and of the
    exact one, over the heads that are here.

        out = sigmoid(lse_1 - lse_2) out_1 + sigmoid(lse_2 - lse_1) out_2    over two sets of tokens apart
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
    norms = torch.stack((speculated - exact, exact)).square().sum((-1, -2, -3))
    return exact[:, 0].to(q.dtype), speculated[:, 0].to(q.dtype), norms


SPECULATIVE_ATTENTION = Kernel(by_device(_run, _reference), _reference, inputs)
