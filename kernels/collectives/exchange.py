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

from simcore.kernels.collectives.memory import IN_A_WORD, MOST_WORDS, Inboxes, inboxes, words_of
from simcore.kernels.collectives.words import (
    MOST_PROGRAMS,
    STORED_AT_ONCE,
    Half,
    Layout,
    check_part,
    joined,
    sendable,
)
from simcore.kernels.decoder.checks import check_like, check_written, kind
from simcore.kernels.decoder.split_kv import EMPTY, launched
from simcore.kernels.gpu import gpu_of, launching

RANKS = 2
# A block begins with so many words that all are the priority: what follows is still stored several at once.
FLAGS = tl.constexpr(STORED_AT_ONCE)
# Words of the blocks by which inboxes are made, and the most of a block that is chosen here.
MOST_BLOCK = 1024
# A warp takes so many words: few enough for one warp alone, which meets no other at each look.
WORDS_A_WARP = 256


def exchange_layout_for(words: int) -> Layout:
    """Returns the layout for so many words of x, K and V together: one warp a program as long as the programs
    are few.

    >>> exchange_layout_for(2560), exchange_layout_for(20_000)
    (Layout(block=256, warps=1, programs=32), Layout(block=1024, warps=4, programs=32))
    """
    wanted = int(triton.next_power_of_2(triton.cdiv(words, MOST_PROGRAMS)))
    block = max(WORDS_A_WARP, min(MOST_BLOCK, wanted))
    return Layout(block, block // WORDS_A_WARP, MOST_PROGRAMS)


def exchange_inboxes(devices: Sequence[torch.device | str], x: Tensor, k: Tensor) -> Inboxes:
    """Makes the inboxes of an exchange of tensors like x [batch, hidden] and k [batch, kv_heads, capacity, d]
    for ranks on these two devices; see `inboxes`. Nothing is read of x and k: they may be on any device,
    "meta" too. Raises ValueError as `inboxes`, and for another number of devices."""
    if len(devices) != RANKS:
        raise ValueError(f"devices: an exchange is of {RANKS} ranks, not {len(devices)}")
    return inboxes(devices, _room(x, k, MOST_BLOCK), torch.float32)


def _room(x: Tensor, k: Tensor, block: int) -> int:
    """Returns the words that a rank sends at most, in whole blocks. Smaller blocks have room in it, too, if
    they are no fewer than FLAGS of MOST_BLOCK's."""
    own, row = _counted(x, k)
    payload = block - FLAGS.value
    return block * (triton.cdiv(own, payload) + 2 * len(k) * triton.cdiv(row, payload))


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
def _row(row, pieces, ptr, lengths_ptr, capacity, stride_sequence, stride_token):
    """Where the new token of row `row` of a cache begins, and whether it has a place there; x has no
    lengths, and is one row."""
    there = row >= 0
    if lengths_ptr is not None:
        position = tl.load(lengths_ptr + row).to(tl.int64) - 1
        there = (position >= 0) & (position < capacity)
        ptr += row.to(tl.int64) * stride_sequence + position * stride_token
    return ptr, there


@triton.jit
def _place(number, stride_head, DIM: tl.constexpr):
    """Where number `number` of a row is; DIM of 0: they are side by side."""
    if DIM == 0:
        place = number.to(tl.int64)
    else:
        place = (number // DIM).to(tl.int64) * stride_head + number % DIM
    return place


@triton.jit
def _send_rows(
    slot_ptr, priority, patient, first, ptr, lengths_ptr, capacity,
    stride_sequence, stride_token, stride_head, rows, words, count,
    DIM: tl.constexpr, IN_A_WORD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sends this program's blocks of `rows` rows, each of `words` words and `count` numbers; the first of
    them is block `first` of the launch. IN_A_WORD: numbers in a word, where a word is a number if they are
    aligned."""
    programs = tl.num_programs(0)
    pieces = tl.cdiv(words, BLOCK - FLAGS)
    lane = tl.arange(0, BLOCK)
    begin = (tl.program_id(0) + programs - first % programs) % programs
    for block in range(begin, rows * pieces, programs):
        row_ptr, there = _row(block // pieces, pieces, ptr, lengths_ptr, capacity, stride_sequence, stride_token)
        at = block % pieces * (BLOCK - FLAGS) + lane - FLAGS
        inside = there & (lane >= FLAGS)
        low = tl.load(
            row_ptr + _place(at * IN_A_WORD, stride_head, DIM), mask=inside & (at * IN_A_WORD < count), other=0
        )
        if IN_A_WORD == 1:
            own = low
        else:
            high = tl.load(
                row_ptr + _place(at * 2 + 1, stride_head, DIM), mask=inside & (at * 2 + 1 < count), other=0
            )
            own = joined(low, high)
        own = tl.where(lane < FLAGS, priority, sendable(own))
        sent = patient & ((lane < FLAGS) | ((at < words) & (priority != 0)))
        # Written through: the other rank waits for it.
        tl.store(slot_ptr + (first + block) * BLOCK + lane, own, mask=sent, cache_modifier=".wt")
    return first + rows * pieces


@triton.jit
def _looked(ptr, lane, inside):
    """A block as far as it has come; its priority, EMPTY before that is there; and whether any word of it is
    still to come."""
    words = tl.load(ptr + lane, mask=inside, other=0, volatile=True)
    empty = words == EMPTY
    # One sum over the block tells both: 1 if a flag is to come, 2 if another word is, and the priority.
    head = tl.where(empty, 1, words << 2)
    seen = tl.reduce_or(tl.where(lane < FLAGS, head, tl.where(empty, 2, 0)), 0)
    theirs = tl.where((seen & 1) == 1, EMPTY, seen >> 2)
    return words, theirs, (theirs == EMPTY) | ((theirs != 0) & ((seen & 2) != 0))


@triton.jit
def _take_rows(
    slot_ptr, priority, theirs_ptr, patience, blocks, first, ptr, lengths_ptr, capacity,
    stride_sequence, stride_token, stride_head, rows, words, count,
    DIM: tl.constexpr, IN_A_WORD: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Takes this program's blocks of rows, and whether any did not come; `blocks` of the launch in all, the
    rest as for `_send_rows`."""
    programs = tl.num_programs(0)
    pieces = tl.cdiv(words, BLOCK - FLAGS)
    lane = tl.arange(0, BLOCK)
    begin = (tl.program_id(0) + programs - first % programs) % programs
    late = begin < 0
    for block in range(begin, rows * pieces, programs):
        row_ptr, there = _row(block // pieces, pieces, ptr, lengths_ptr, capacity, stride_sequence, stride_token)
        at = block % pieces * (BLOCK - FLAGS) + lane - FLAGS
        inside = (lane < FLAGS) | (at < words)
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
        if (first + block == 0) & (theirs != EMPTY):
            tl.store(theirs_ptr, theirs)
        inside = (lane >= FLAGS) & there & (theirs > priority) & (waiting == 0)
        low_ptr = row_ptr + _place(at * IN_A_WORD, stride_head, DIM)
        tl.store(low_ptr, given.to(ptr.dtype.element_ty), mask=inside & (at * IN_A_WORD < count))
        if IN_A_WORD == 2:
            high_ptr = row_ptr + _place(at * 2 + 1, stride_head, DIM)
            tl.store(high_ptr, (given >> 16).to(tl.int16), mask=inside & (at * 2 + 1 < count))
    return first + rows * pieces, late
