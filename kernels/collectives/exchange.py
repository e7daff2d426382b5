"""ALSpec's exchange between the two ranks of a pair: priorities, and the right x, K and V for who lacks them.

    theirs = q                                      the other rank's priority, p the own one
    x, k[:, :, length - 1], v[:, :, length - 1] = the other rank's      if q > p

(ALSpec, Cai et al. 2025, Algorithm 2; K and V are kept consistent by its footnote 2.) A priority is 2 where
the right x is, 1 where a speculated x was continued from, 0 where a rank is idle. An idle rank has nothing to
send but that. The other one sends its x and the new token's K and V of this layer, whoever needs them: it
cannot know.

Words are sent and taken as in `one_shot`, whose rules hold here, too: an exchange is one of the collectives
that take their inboxes in turn, whatever the priorities are. What differs is that a block of an inbox begins
with the priority:

    block of an inbox     q, ..., q (FLAGS words) | words of x, of K or of V, EMPTY if q is 0

So one look shows whether the rest of a block will come, and programs do not wait for each other. A program
writes over no other numbers than those that it has sent itself, after it has sent them. Both ranks have the
same shapes and layout.

With a patience of 0 a launch does nothing at all.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.collectives.layout import (
    MOST_PROGRAMS,
    STORED_AT_ONCE,
    Half,
    Layout,
    check_layout,
    check_part,
)
from simcore.kernels.collectives.memory import IN_A_WORD, Inboxes, inboxes, words_of
from simcore.kernels.collectives.words import give_up, joined, sendable
from simcore.kernels.decoder.checks import check_like, check_written, kind
from simcore.kernels.decoder.split_kv import EMPTY, launched
from simcore.kernels.gpu import gpu_of, launching

RANKS = 2
# A block begins with so many words that all are the priority: what follows is still stored several at once.
FLAGS = tl.constexpr(STORED_AT_ONCE)
MOST_PRIORITY = tl.constexpr(2)
# Words of a block at most, and of a warp: of few words one warp takes all of a block, and meets no other warp
# at each look.
MOST_BLOCK, WORDS_A_WARP = 1024, 256


def exchange_layout_for(words: int) -> Layout:
    """Returns the layout for so many words of x, K and V together: one warp a program as long as the programs
    are few.

    >>> exchange_layout_for(2560), exchange_layout_for(20_000)
    (Layout(block=256, warps=1, programs=32), Layout(block=1024, warps=4, programs=32))
    """
    wanted = int(triton.next_power_of_2(triton.cdiv(words, MOST_PROGRAMS)))
    block = max(WORDS_A_WARP, min(MOST_BLOCK, wanted))
    return Layout(block, block // WORDS_A_WARP, MOST_PROGRAMS)


def exchange_inboxes(
    devices: Sequence[torch.device | str], x: Tensor, k: Tensor, layout: Layout | None = None
) -> Inboxes:
    """Makes the inboxes of an exchange of tensors like x [batch, hidden] and k [batch, kv_heads, capacity, d]
    for ranks on these two devices, as `inboxes` does. Nothing is read of x and k: they may be anywhere, on
    "meta" too. Raises ValueError as `inboxes` does, and for another number of devices."""
    if len(devices) != RANKS:
        raise ValueError(f"devices: an exchange is of {RANKS} ranks, not {len(devices)}")
    blocks, layout = _blocks(x, k, layout)
    return inboxes(devices, blocks * layout.block, torch.float32)


def _blocks(x: Tensor, k: Tensor, layout: Layout | None) -> tuple[int, Layout]:
    """Returns the number of blocks of x, K and V together, and the layout, by default that of their words."""
    own, row = _counted(x, k)
    layout = layout or exchange_layout_for(own + 2 * len(k) * row)
    check_layout(layout)
    payload = layout.block - FLAGS.value
    return triton.cdiv(own, payload) + 2 * len(k) * triton.cdiv(row, payload), layout


def _counted(x: Tensor, k: Tensor) -> tuple[int, int]:
    """Returns the words of x, and those of K of a sequence's new token: as many as of V."""
    return words_of(x.numel(), x.dtype), words_of(k.shape[1] * k.shape[3], k.dtype)


def reference_exchange(
    xs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    lengths: Sequence[Tensor],
    priorities: Sequence[int],
) -> None:
    """As `exchange` for both ranks at once, in plain torch and in any dtype: of two different priorities the
    rank of the lower takes what the other one has."""
    if priorities[0] == priorities[1]:
        return
    giver = int(priorities[1] > priorities[0])
    taker = 1 - giver
    xs[taker].copy_(xs[giver])
    for caches in (ks, vs):
        places = zip(*(lengths[rank].tolist() for rank in (giver, taker)), strict=True)
        for sequence, (source, target) in enumerate(places):
            there = 1 <= source <= caches[giver].shape[2]
            token = caches[giver][sequence, :, source - 1] if there else torch.zeros(())
            if 1 <= target <= caches[taker].shape[2]:
                caches[taker][sequence, :, target - 1] = token.to(caches[taker].device)


@triton.jit
def _row(rows, row, lengths_ptr, capacity):
    """Where the new token of row `row` begins, and whether it has a place in the cache; x has no lengths, and
    is one row. rows: a pointer, then the strides of a row, of a token and of a head."""
    ptr, there = rows[0], row >= 0
    if lengths_ptr is not None:
        position = tl.load(lengths_ptr + row).to(tl.int64) - 1
        there = (position >= 0) & (position < capacity)
        ptr += row.to(tl.int64) * rows[1] + position * rows[2]
    return ptr, there


@triton.jit
def _place(number, stride_head, DIM: tl.constexpr):
    """Where number `number` of a row is; DIM of 0: they are side by side."""
    place = number.to(tl.int64)
    if DIM > 0:
        place = (number // DIM).to(tl.int64) * stride_head + number % DIM
    return place


@triton.jit
def _begin(first):
    """The first of this program's blocks, counted from block `first` of the launch: programs take all blocks
    in turn."""
    programs = tl.num_programs(0)
    return (tl.program_id(0) + programs - first % programs) % programs


@triton.jit
def _send_rows(
    rows, sizes, lengths_ptr, capacity, first, slot_ptr, priority, patience,
    DIM: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sends this program's blocks of some rows, the first of which is block `first` of the launch; returns
    the block behind them. sizes: how many rows, and the words and numbers of each. NUMBERS: so many make a
    word; a word itself is the number where it can be."""
    programs, pieces, lane = tl.num_programs(0), tl.cdiv(sizes[1], BLOCK - FLAGS), tl.arange(0, BLOCK)
    for block in range(_begin(first), sizes[0] * pieces, programs):
        ptr, there = _row(rows, block // pieces, lengths_ptr, capacity)
        at = block % pieces * (BLOCK - FLAGS) + lane - FLAGS
        number, there = at * NUMBERS, there & (lane >= FLAGS)
        own = tl.load(ptr + _place(number, rows[3], DIM), mask=there & (number < sizes[2]), other=0)
        if NUMBERS == 2:
            after = there & (number + 1 < sizes[2])
            own = joined(own, tl.load(ptr + _place(number + 1, rows[3], DIM), mask=after, other=0))
        own = tl.where(lane < FLAGS, priority, sendable(own))
        sent = (patience != 0) & ((lane < FLAGS) | ((priority != 0) & (at < sizes[1])))
        # Written through: the other rank waits for it.
        tl.store(slot_ptr + (first + block) * BLOCK + lane, own, mask=sent, cache_modifier=".wt")
    return first + sizes[0] * pieces


@triton.jit
def _looked(ptr, lane, inside):
    """A block as far as it has come; its priority, EMPTY until all flags are there; and whether any word is
    still to come."""
    words = tl.load(ptr + lane, mask=inside, other=0, volatile=True)
    is_flag = lane < FLAGS
    # EMPTY is below all priorities.
    theirs = tl.min(tl.where(is_flag, words, MOST_PRIORITY), 0)
    missing = tl.max(tl.where(is_flag, 0, (words == EMPTY).to(tl.int32)), 0)
    return words, theirs, (theirs == EMPTY) | ((theirs != 0) & (missing == 1))


@triton.jit
def _take_rows(
    rows, sizes, lengths_ptr, capacity, first, blocks, slot_ptr, priority, theirs_ptr, patience,
    DIM: tl.constexpr, NUMBERS: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Takes this program's blocks of some rows; returns the block behind them, and whether any did not come.
    `blocks`: how many the launch has; the rest as for `_send_rows`."""
    programs, pieces, lane = tl.num_programs(0), tl.cdiv(sizes[1], BLOCK - FLAGS), tl.arange(0, BLOCK)
    late = tl.program_id(0) < 0
    for block in range(_begin(first), sizes[0] * pieces, programs):
        ptr, there = _row(rows, block // pieces, lengths_ptr, capacity)
        at = block % pieces * (BLOCK - FLAGS) + lane - FLAGS
        inside = (lane < FLAGS) | (at < sizes[1])
        from_ptr = slot_ptr + (first + block) * BLOCK
        given, theirs, waiting = _looked(from_ptr, lane, inside)
        looks = 1
        while waiting & (looks < patience):
            given, theirs, waiting = _looked(from_ptr, lane, inside)
            looks += 1
        late = late | waiting
        if CHAINED and first + block + programs >= blocks:
            gdc_launch_dependents()
        tl.store(from_ptr + lane, tl.full([BLOCK], EMPTY, tl.int32), mask=inside)
        if (first + block == 0) & (waiting == 0):
            tl.store(theirs_ptr, theirs)
        taken = (waiting == 0) & (theirs > priority) & there & (lane >= FLAGS)
        number, own = at * NUMBERS, given.to(rows[0].dtype.element_ty)
        tl.store(ptr + _place(number, rows[3], DIM), own, mask=taken & (number < sizes[2]))
        if NUMBERS == 2:
            after = taken & (number + 1 < sizes[2])
            tl.store(ptr + _place(number + 1, rows[3], DIM), (given >> 16).to(tl.int16), mask=after)
    return first + sizes[0] * pieces, late


@triton.jit(do_not_specialize=["rank", "code", "batch"])
def _exchange_kernel(
    x_ptr, k_ptr, v_ptr, lengths_ptr, priority_ptr, theirs_ptr,
    inbox_ptr, addresses_ptr, patience_ptr, error_ptr,
    rank, room, blocks, code, batch, words, count, row_words, row_count, capacity,
    k_row, k_token, k_head, v_row, v_token, v_head,
    DIM: tl.constexpr, X_NUMBERS: tl.constexpr, KV_NUMBERS: tl.constexpr,
    SENDS: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Any number of programs, which take the `blocks` of x, K and V in turn. `words` and `count` are those of
    x, row_words and row_count of a sequence's K; DIM: the numbers of a head."""
    if CHAINED:
        gdc_wait()
    patience, priority = tl.load(patience_ptr), tl.load(priority_ptr)
    x, x_sizes = (x_ptr, 0, 0, 0), (1, words, count)
    k, v = (k_ptr, k_row, k_token, k_head), (v_ptr, v_row, v_token, v_head)
    sizes = (batch, row_words, row_count)
    if SENDS:
        slot = tl.load(addresses_ptr + 1 - rank).to(tl.pointer_type(tl.int32)) + rank * room
        slot = tl.multiple_of(slot, 16)
        first = _send_rows(x, x_sizes, None, 0, 0, slot, priority, patience, 0, X_NUMBERS, BLOCK)
        for cache in tl.static_range(2):
            rows = k if cache == 0 else v
            first = _send_rows(
                rows, sizes, lengths_ptr, capacity, first, slot, priority, patience, DIM, KV_NUMBERS, BLOCK
            )
    if TAKES and patience != 0:
        slot = inbox_ptr + (1 - rank) * room
        first, late = _take_rows(
            x, x_sizes, None, 0, 0, blocks, slot, priority, theirs_ptr, patience, 0, X_NUMBERS, BLOCK, CHAINED
        )
        for cache in tl.static_range(2):
            rows = k if cache == 0 else v
            first, later = _take_rows(
                rows, sizes, lengths_ptr, capacity, first, blocks, slot, priority, theirs_ptr, patience,
                DIM, KV_NUMBERS, BLOCK, CHAINED,
            )  # fmt: skip
            late = late | later
        if late:
            give_up(patience_ptr, error_ptr, code)


@launching
def exchange(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    priority: Tensor,
    theirs: Tensor,
    inboxes: Inboxes,
    rank: int,
    *,
    patience: Tensor,
    error: Tensor | None = None,
    code: int = 1,
    half: Half = "both",
    layout: Layout | None = None,
    chained: bool = False,
) -> None:
    """Tells the other rank the own `priority`, 0, 1 or 2, and writes the other's to `theirs`, both int32 [1]
    on the device. Where that is above the own one, it takes the other's x and new token's K and V in place of
    the own ones.

    x [batch, hidden], contiguous; k, v [batch, kv_heads, capacity, d]: whole caches of one layer, tokens and
    heads any distance apart. The new token of sequence b is at lengths[b] - 1 (int32 [batch], read on the
    device, the same on both ranks); one without a place there is not written. Numbers are those of the other
    rank to the bit, but for some NaNs. `inboxes`: from `exchange_inboxes`, the same on both ranks, as is the
    layout; rules at the head of `one_shot`. `patience`, `error`, `code`, `chained`: as for `all_reduce`, but
    with a patience of 0 nothing at all is done. `half`: "send" writes to the other's inbox, "take" does the
    rest.

    Raises ValueError naming what does not fit."""
    _check(x, k, v, lengths, priority, theirs)
    if inboxes.ranks != RANKS:
        raise ValueError(f"inboxes: an exchange is of {RANKS} ranks, not {inboxes.ranks}")
    blocks, layout = _blocks(x, k, layout)
    check_part(x, inboxes, rank, patience, error, half)
    if blocks * layout.block > inboxes.room:
        raise ValueError(f"inboxes have room for {inboxes.room} words, too few for {kind(x)} and {kind(k)}")
    own, row = _counted(x, k)
    whole, whole_caches = _whole(x.view(-1)), _whole(k) and _whole(v)
    x_numbers, numbers = (1 if each else 2 for each in (whole, whole_caches))
    flat, k, v = _integers(x.view(-1), whole), _integers(k, whole_caches), _integers(v, whole_caches)
    heads, d = k.shape[1], k.shape[3]
    _exchange_kernel[(min(layout.programs, blocks),)](
        flat, k, v, lengths, priority, theirs,
        inboxes.words[rank], inboxes.addresses[rank], patience, error,
        rank, inboxes.room, blocks, code, len(x), own, flat.numel(), row, heads * d, k.shape[2],
        *(each.stride(dim) for each in (k, v) for dim in (0, 2, 1)),
        DIM=d, X_NUMBERS=x_numbers, KV_NUMBERS=numbers,
        SENDS=half != "take", TAKES=half != "send", BLOCK=layout.block,
        **launched(layout.warps, chained and gpu_of(x).chained),
    )  # fmt: skip


def _whole(x: Tensor) -> bool:
    """Whether x can be taken as words of 32 bits, each of one number or of two neighbours."""
    in_a_word = IN_A_WORD[x.dtype]
    sizes = (x.shape[-1], *x.stride()[:-1])
    return not any(size % in_a_word for size in sizes) and x.data_ptr() % 4 == 0


def _integers(x: Tensor, whole: bool) -> Tensor:
    return x.view(torch.int32 if whole else torch.int16)


def _check(x: Tensor, k: Tensor, v: Tensor, lengths: Tensor, priority: Tensor, theirs: Tensor) -> None:
    """Raises ValueError naming what does not fit."""
    if x.dim() != 2 or x.dtype not in IN_A_WORD or not x.is_contiguous() or not x.numel():
        raise ValueError(f"x has to be contiguous fp32, bf16 or fp16 [batch, hidden], not {kind(x)}")
    if k.dim() != 4 or len(k) != len(x) or k.dtype not in IN_A_WORD or not k.numel():
        raise ValueError(f"k has to be fp32, bf16 or fp16 [{len(x)}, kv_heads, capacity, d], not {kind(k)}")
    for name, cache, other in (("k", k, v), ("v", v, k)):
        check_like(name, cache, k.shape, k.dtype)
        check_written(name, cache, x, other)
    check_like("lengths", lengths, (len(x),), torch.int32)
    for name, word in (("priority", priority), ("theirs", theirs)):
        check_like(name, word, (1,), torch.int32)
    check_written("theirs", theirs, priority)
    for name, given in (("k", k), ("v", v), ("lengths", lengths), ("priority", priority), ("theirs", theirs)):
        if given.device != x.device:
            raise ValueError(f"{name} has to be on {x.device}, not on {given.device}")
