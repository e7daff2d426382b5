"""What a program does with the words that ranks send each other: send its own, wait for those of the others,
empty the inbox, add up.

    a word = one number of fp32, or two neighbouring numbers of bf16 or fp16, the first in the low half

`one_shot` says why words are used in this way.
"""

import triton
import triton.language as tl

from simcore.kernels.decoder.split_kv import EMPTY

# In the place of a word that would be EMPTY: as an fp32 number NaN, and so are both halves of it.
NAN_WORD = tl.constexpr(0x7FFFFFFF)


@triton.jit
def joined(low, high):
    """Words of two halves each, int16."""
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def sendable(words):
    """The words, none of which is EMPTY."""
    return tl.where(words == EMPTY, NAN_WORD, words)


@triton.jit
def own_words(x_ptr, at, count, WHOLE: tl.constexpr, HALVES: tl.constexpr):
    """Words `at` of x, as they are sent: 0 beyond it. WHOLE: x is of words, each of HALVES numbers, else of
    halves; `count` numbers in all."""
    if WHOLE:
        words = tl.load(x_ptr + at, mask=at < count // HALVES, other=0)
    else:
        low = tl.load(x_ptr + 2 * at, mask=2 * at < count, other=0)
        high = tl.load(x_ptr + 2 * at + 1, mask=2 * at + 1 < count, other=0)
        words = joined(low, high)
    return sendable(words)


@triton.jit
def store_words(out_ptr, at, words, count, WHOLE: tl.constexpr, HALVES: tl.constexpr):
    """Writes words `at` of a tensor like x. `count`, WHOLE: see `own_words`."""
    if WHOLE:
        tl.store(out_ptr + at, words, mask=at < count // HALVES)
    else:
        tl.store(out_ptr + 2 * at, words.to(tl.int16), mask=2 * at < count)
        tl.store(out_ptr + 2 * at + 1, (words >> 16).to(tl.int16), mask=2 * at + 1 < count)


@triton.jit
def send_words(own, addresses_ptr, at, inside, rank, room, RANKS: tl.constexpr):
    """Writes words into the slot of a rank in the inboxes of all others, those `inside`."""
    for further in tl.static_range(1, RANKS):
        # Each rank begins with another one, so that no link is everybody's first.
        inbox = tl.load(addresses_ptr + (rank + further) % RANKS).to(tl.pointer_type(tl.int32))
        inbox = tl.multiple_of(inbox, 16)
        # Written through: peers wait for it.
        tl.store(inbox + rank * room + at, own, mask=inside, cache_modifier=".wt")


@triton.jit
def _looked(inbox_ptr, at, inside, rank, room, RANKS: tl.constexpr):
    """What has come from each rank by now, 0 for the own one; and whether any word is still to come."""
    found = ()
    waiting = at < 0
    for source in tl.static_range(RANKS):
        words = tl.load(
            inbox_ptr + source * room + at, mask=inside & (source != rank), other=0, volatile=True
        )
        waiting = waiting | (words == EMPTY)
        found = found + (words,)  # type: ignore[assignment]  # noqa: RUF005 (Triton unpacks none)
    return found, tl.max(waiting.to(tl.int32), 0)


@triton.jit
def waited_for(inbox_ptr, at, inside, rank, room, patience, RANKS: tl.constexpr):
    """What came from each rank, 0 for the own one, after at most `patience` looks; and 1 if words are missing
    even then."""
    found, waiting = _looked(inbox_ptr, at, inside, rank, room, RANKS)
    looks = 1
    while (waiting == 1) & (looks < patience):
        found, waiting = _looked(inbox_ptr, at, inside, rank, room, RANKS)
        looks += 1
    return found, waiting


@triton.jit
def empty_words(inbox_ptr, at, inside, rank, room, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Empties words `at` of an inbox for the next launch that uses it."""
    for source in tl.static_range(RANKS):
        empty = tl.full([BLOCK], EMPTY, tl.int32)
        tl.store(inbox_ptr + source * room + at, empty, mask=inside & (source != rank))


@triton.jit
def give_up(patience_ptr, error_ptr, code):
    """Says that words did not come, and lets nothing behind wait for more."""
    # What comes behind it on this card would wait in vain, too.
    tl.store(patience_ptr, 0)
    if error_ptr is not None:
        tl.store(error_ptr, code)


@triton.jit
def low(words, FORMAT: tl.constexpr):
    """The first or only number of each word, in fp32."""
    if FORMAT.is_fp32():
        numbers = words.to(tl.float32, bitcast=True)
    else:
        numbers = words.to(tl.int16).to(FORMAT, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def high(words, FORMAT: tl.constexpr):
    """The second number of each word, in fp32."""
    return (words >> 16).to(tl.int16).to(FORMAT, bitcast=True).to(tl.float32)


@triton.jit
def packed(lows, highs, FORMAT: tl.constexpr):
    """Words of numbers in fp32, each rounded. `highs` are not read where a word is one number."""
    if FORMAT.is_fp32():
        words = lows.to(tl.int32, bitcast=True)
    else:
        words = joined(
            lows.to(FORMAT).to(tl.int16, bitcast=True), highs.to(FORMAT).to(tl.int16, bitcast=True)
        )
    return words


@triton.jit
def summed(own, found, rank, RANKS: tl.constexpr, FORMAT: tl.constexpr, HALVES: tl.constexpr):
    """Words of the sum of all ranks' numbers: in the order of ranks, in fp32, rounded once."""
    given = tl.where(rank == 0, own, found[0])
    lows = low(given, FORMAT)
    highs = lows
    if HALVES == 2:
        highs = high(given, FORMAT)
    for source in tl.static_range(1, RANKS):
        given = tl.where(source == rank, own, found[source])
        lows += low(given, FORMAT)
        if HALVES == 2:
            highs += high(given, FORMAT)
    return packed(lows, highs, FORMAT)


@triton.jit
def added(words, more, FORMAT: tl.constexpr, HALVES: tl.constexpr):
    """Words of the sums of two words' numbers: in fp32, rounded once."""
    lows = low(words, FORMAT) + low(more, FORMAT)
    highs = lows
    if HALVES == 2:
        highs = high(words, FORMAT) + high(more, FORMAT)
    return packed(lows, highs, FORMAT)
