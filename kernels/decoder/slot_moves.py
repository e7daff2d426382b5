"""Moves of cache slots, in one launch for the K and V of all layers.

    cache[to] = cache[from]        for each move (from, to) and each cache;  the first lengths[from] tokens

`simcore.schedules.shuffle` decides the moves (Flover, Yao et al. 2023, Algorithm 3). They go from slots
outside of a window into free slots within it, no slot twice. So no slot is both read and written, and all
moves run at the same time, in any order.

The device reads the moves and their number, and the grid does not depend on them, so a captured graph stays
valid. Elements are copied as words, whatever their dtype.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.checks import kind
from simcore.kernels.gpu import gpu_of, launching

# Words that a program copies at once: four 16-byte accesses a thread.
BLOCK, WARPS = 4096, 8
# Programs that a multiprocessor runs at a time.
PROGRAMS = 8
# Bytes of the widest access.
ACCESS = 16


@dataclass(frozen=True, slots=True, eq=False)
class SlotCaches:
    """Caches of one shape [slots, ..., tokens, ...], made by `slot_caches`.

    `table` int64 [caches]: their addresses, on their device. A slot has `runs` stretches of memory of
    `capacity` tokens of `token_words` words of `word_bytes` each; slots are `slot_words` apart. `aligned`:
    whether all of these are multiples of 16 bytes. `held`: the caches, kept alive as long as this object.
    """

    table: Tensor
    slots: int
    runs: int
    capacity: int
    token_words: int
    slot_words: int
    word_bytes: int
    aligned: bool
    held: tuple[Tensor, ...]


def slot_caches(caches: Sequence[Tensor] | Tensor, *, token_dim: int = 2) -> SlotCaches:
    """Prepares caches, a list or one tensor [caches, slots, ...], for `slot_moves`; call it before a capture.

    Each cache is [slots, ...] with its tokens along `token_dim`, such as [slots, kv_heads, capacity,
    head_dim], and a slot is contiguous. Raises ValueError if the caches differ in layout or a slot is not
    contiguous.
    """
    held = tuple(caches)
    if not held or held[0].dim() <= token_dim or token_dim < 1 or not held[0].numel():
        raise ValueError(f"caches have to be [slots, ...] with tokens along dimension {token_dim}")
    first = held[0]
    for x in held:
        if (x.shape, x.dtype, x.stride(0), x.device) != (
            first.shape, first.dtype, first.stride(0), first.device,
        ):  # fmt: skip
            raise ValueError(f"caches have to be alike; there are {kind(first)} and {kind(x)}")
        if not x[0].is_contiguous():
            raise ValueError(f"caches: a slot of {kind(x)} is not contiguous")
    token_bytes = math.prod(first.shape[token_dim + 1 :]) * first.element_size()
    slot_bytes = first.stride(0) * first.element_size()
    together = math.gcd(ACCESS, token_bytes, slot_bytes, *(x.data_ptr() for x in held))
    word = min(4, together)
    return SlotCaches(
        torch.tensor([x.data_ptr() for x in held], dtype=torch.int64, device=first.device),
        first.shape[0],
        math.prod(first.shape[1:token_dim]),
        first.shape[token_dim],
        token_bytes // word,
        slot_bytes // word,
        word,
        together == ACCESS,
        held,
    )


def programs_for(caches: SlotCaches, most_moves: int) -> int:
    """Returns the number of programs to launch: as many as a GPU runs at a time, at most one a block."""
    run_blocks = -(-caches.capacity * caches.token_words // BLOCK)
    blocks = most_moves * len(caches.table) * caches.runs * run_blocks
    return max(1, min(gpu_of(caches.table).processors * PROGRAMS, blocks))


@launching
def slot_moves(caches: SlotCaches, moves: Tensor, count: Tensor, *, lengths: Tensor | None = None) -> None:
    """Makes the first `count` (int32 [1]) of moves (int32 [most, 2]: from slot, to slot) in all caches.

    With lengths [slots] (int32) it copies only the first lengths[from] tokens of a slot. The device reads all
    of them. No slot may be both read and written, or written twice. A move from or to a slot that does not
    exist is skipped. Raises ValueError for tensors that do not fit together.
    """
    if moves.dtype != torch.int32 or moves.dim() != 2 or moves.shape[1] != 2 or not moves.is_contiguous():
        raise ValueError(f"moves have to be contiguous int32 [most, 2], not {kind(moves)}")
    if count.dtype != torch.int32 or count.numel() != 1:
        raise ValueError(f"count has to be int32 of one element, not {kind(count)}")
    if lengths is not None and (
        lengths.dtype != torch.int32 or tuple(lengths.shape) != (caches.slots,) or not lengths.is_contiguous()
    ):
        raise ValueError(f"lengths have to be contiguous int32 [{caches.slots}], not {kind(lengths)}")
    if not len(moves):
        return
    _slot_moves_kernel[(programs_for(caches, len(moves)),)](
        caches.table, moves, count, lengths, len(moves), caches.slots, len(caches.table), caches.runs,
        caches.capacity, caches.token_words, caches.slot_words,
        WORD=8 * caches.word_bytes, ALIGNED=caches.aligned, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def _slot_moves_kernel(
    table_ptr, moves_ptr, count_ptr, lengths_ptr,
    most, slots, caches, runs, capacity, token_words, slot_words,
    WORD: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Any number of programs, which take the blocks in turn."""
    run_words = tl.cast(capacity, tl.int64) * token_words
    run_blocks = tl.cdiv(run_words, BLOCK)
    move_blocks = run_blocks * runs * caches
    moves = tl.minimum(tl.load(count_ptr), most)
    for block in range(tl.program_id(0).to(tl.int64), moves * move_blocks, tl.num_programs(0)):
        move, rest = block // move_blocks, block % move_blocks
        cache, rest = rest // (run_blocks * runs), rest % (run_blocks * runs)
        run, first = rest // run_blocks, rest % run_blocks * BLOCK
        source, target = tl.load(moves_ptr + 2 * move), tl.load(moves_ptr + 2 * move + 1)
        real = (source >= 0) & (source < slots) & (target >= 0) & (target < slots)
        words = run_words
        if lengths_ptr is not None:
            words = tl.minimum(tl.load(lengths_ptr + source, mask=real, other=0), capacity) * token_words
        if real & (first < words):
            base = tl.load(table_ptr + cache).to(tl.pointer_type(tl.core.get_int_dtype(WORD, True)))
            if ALIGNED:
                base = tl.multiple_of(base, 16)
            base += run * run_words
            at = first + tl.arange(0, BLOCK)
            found = tl.load(base + source.to(tl.int64) * slot_words + at, mask=at < words)
            tl.store(base + target.to(tl.int64) * slot_words + at, found, mask=at < words)


def reference_slot_moves(
    caches: Sequence[Tensor] | Tensor,
    moves: Sequence[tuple[int, int]],
    *,
    lengths: Sequence[int] | None = None,
    token_dim: int = 2,
) -> None:
    """As `slot_moves`, in plain torch and in any format, move by move."""
    for cache in caches:
        for source, target in moves:
            tokens = cache.shape[token_dim] if lengths is None else lengths[source]
            to, of = (cache[slot].narrow(token_dim - 1, 0, tokens) for slot in (target, source))
            to.copy_(of)
