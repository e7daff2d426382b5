"""One-shot collectives by pushed words, for ranks whose cards see each other's memory.

    all_reduce   out = x_0 + x_1 + ... + x_{n-1}      in this order, in fp32, rounded once
                 residual += out                      in fp32, rounded once more; only if there is one
    all_gather   out [rows, n columns] = x_0 | x_1 | ... | x_{n-1}      side by side

Each rank makes one launch. It packs its x into words of 32 bits, writes them into its slot of every other
rank's inbox, waits for the slots of its own inbox, and adds up or lays side by side what came. All ranks do
so in the same order, so that they get the same bits.

A word is data and flag in one: an inbox is filled with EMPTY, which no word that is sent ever is, and the
program that has read a word empties it again. (NCCL's LL protocol does the same, and so does `split_kv`.)
Words of 32 bits arrive whole, in any order, so neither a fence nor a counter is needed. A word of x that is
EMPTY, whose numbers are all NaN, is sent as another NaN.

Two rules for who launches:

- All ranks launch the same collectives in the same order, each rank on one stream.
- Between two launches with the same inboxes each rank takes part in another collective of the same ranks,
  with other inboxes. A rank that has what the others sent there knows that all have emptied what it sent them
  before. So a program needs two inboxes or more, used in turn. A launch that was gated off does not count,
  nor one of no elements; all ranks have the same gates.

A waiting program holds a place on a multiprocessor, and ranks may share a card. So a launch has few programs.
Each of them first sends all its words, then takes its own, and waits for no other program of its launch. The
next launch of a stream, if it is chained, starts only when nothing is waited for any more: its programs could
take the places of those that others still wait for.

Waiting is bounded. `patience` is how often a program looks at a block of an inbox at most. With a patience of
0 it does not wait and tells of no error, so that kernels can be loaded and captured before there are other
ranks. A launch that gives up sets it to 0, so that those behind it wait no more. Inboxes from which a launch
gave up have to be cleared.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.collectives.memory import IN_A_WORD, Inboxes, words_of
from simcore.kernels.collectives.words import (
    Half,
    Layout,
    check_layout,
    check_part,
    joined,
    layout_for,
    sendable,
)
from simcore.kernels.decoder.checks import check_gate, check_written, kind
from simcore.kernels.decoder.split_kv import EMPTY, launched
from simcore.kernels.decoder.tensors import wide
from simcore.kernels.gpu import gpu_of, launching

FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def reference_all_reduce(xs: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the x of all ranks, in plain torch and in any float dtype, on the device of the
    first: in order, in fp32 or more, rounded once."""
    total = wide(xs[0]).clone()
    for x in xs[1:]:
        total += wide(x.to(total.device))
    return total.to(xs[0].dtype)


def reference_all_gather(xs: Sequence[Tensor]) -> Tensor:
    """Returns the columns of the x of all ranks side by side, on the device of the first."""
    return torch.cat([x.to(xs[0].device) for x in xs], -1)


@triton.jit
def _own_words(x_ptr, at, count, WHOLE: tl.constexpr, HALVES: tl.constexpr):
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
def _low(words, FORMAT: tl.constexpr):
    """The first or only number of each word, in fp32."""
    if FORMAT.is_fp32():
        numbers = words.to(tl.float32, bitcast=True)
    else:
        numbers = words.to(tl.int16).to(FORMAT, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def _high(words, FORMAT: tl.constexpr):
    """The second number of each word, in fp32."""
    return (words >> 16).to(tl.int16).to(FORMAT, bitcast=True).to(tl.float32)


@triton.jit
def _packed(low, high, FORMAT: tl.constexpr):
    """Words of numbers in fp32, each rounded."""
    if FORMAT.is_fp32():
        words = low.to(tl.int32, bitcast=True)
    else:
        first = low.to(FORMAT).to(tl.int16, bitcast=True)
        second = high.to(FORMAT).to(tl.int16, bitcast=True)
        words = joined(first, second)
    return words


@triton.jit
def _store_words(out_ptr, at, words, count, WHOLE: tl.constexpr, HALVES: tl.constexpr):
    """Writes words `at` of a tensor like x. `count`, WHOLE: see `_own_words`."""
    if WHOLE:
        tl.store(out_ptr + at, words, mask=at < count // HALVES)
    else:
        tl.store(out_ptr + 2 * at, words.to(tl.int16), mask=2 * at < count)
        tl.store(out_ptr + 2 * at + 1, (words >> 16).to(tl.int16), mask=2 * at + 1 < count)


@triton.jit
def _place(number, columns, source, RANKS: tl.constexpr):
    """Where number `number` of a rank's x lies in what is gathered."""
    return (number // columns).to(tl.int64) * (RANKS * columns) + source * columns + number % columns


@triton.jit(do_not_specialize=["rank", "code"])
def _one_shot_kernel(
    x_ptr, out_ptr, residual_ptr, inbox_ptr, addresses_ptr, patience_ptr, error_ptr, gate_ptr,
    rank, words, room, count, columns, code,
    RANKS: tl.constexpr, SUMS: tl.constexpr, FORMAT: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr,
    SENDS: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Any number of programs, which take the blocks of `words` in turn. x, out and residual are of words if
    WHOLE, else of halves; `count` elements of x, `columns` of its rows."""
    if CHAINED:
        gdc_wait()
    if gate_ptr is not None and tl.load(gate_ptr) == 0:
        return
    first = tl.program_id(0) * BLOCK
    step = tl.num_programs(0) * BLOCK
    if SENDS:
        for start in range(first, words, step):
            at = start + tl.arange(0, BLOCK)
            own = _own_words(x_ptr, at, count, WHOLE, HALVES)
            for further in tl.static_range(1, RANKS):
                # Each rank begins with another one, so that no link is everybody's first.
                inbox = tl.load(addresses_ptr + (rank + further) % RANKS).to(tl.pointer_type(tl.int32))
                inbox = tl.multiple_of(inbox, 16)
                # Written through: peers wait for it.
                tl.store(inbox + rank * room + at, own, mask=at < words, cache_modifier=".wt")
    if TAKES:
        patience = tl.load(patience_ptr)
        late = 0
        for start in range(first, words, step):
            at = start + tl.arange(0, BLOCK)
            inside = at < words
            # These loads are done while others' words are on their way.
            own = _own_words(x_ptr, at, count, WHOLE, HALVES)
            if residual_ptr is not None:
                before = _own_words(residual_ptr, at, count, WHOLE, HALVES)
            found, waiting = _looked(inbox_ptr, at, inside, rank, room, RANKS)
            looks = 1
            while (waiting == 1) & (looks < patience):
                found, waiting = _looked(inbox_ptr, at, inside, rank, room, RANKS)
                looks += 1
            late = tl.maximum(late, waiting)
            if CHAINED and start + step >= words:
                gdc_launch_dependents()
            for source in tl.static_range(RANKS):
                empty = tl.full([BLOCK], EMPTY, tl.int32)
                tl.store(inbox_ptr + source * room + at, empty, mask=inside & (source != rank))
            if SUMS:
                given = tl.where(rank == 0, own, found[0])
                low = _low(given, FORMAT)
                high = low
                if HALVES == 2:
                    high = _high(given, FORMAT)
                for source in tl.static_range(1, RANKS):
                    given = tl.where(source == rank, own, found[source])
                    low += _low(given, FORMAT)
                    if HALVES == 2:
                        high += _high(given, FORMAT)
                total = _packed(low, high, FORMAT)
                if out_ptr is not None:
                    _store_words(out_ptr, at, total, count, WHOLE, HALVES)
                if residual_ptr is not None:
                    low = _low(before, FORMAT) + _low(total, FORMAT)
                    high = low
                    if HALVES == 2:
                        high = _high(before, FORMAT) + _high(total, FORMAT)
                    after = _packed(low, high, FORMAT)
                    _store_words(residual_ptr, at, after, count, WHOLE, HALVES)
            else:
                for source in tl.static_range(RANKS):
                    given = tl.where(source == rank, own, found[source])
                    if WHOLE:
                        to = _place(at, columns // HALVES, source, RANKS)
                        tl.store(out_ptr + to, given, mask=at < count // HALVES)
                    else:
                        to = _place(2 * at, columns, source, RANKS)
                        tl.store(out_ptr + to, given.to(tl.int16), mask=2 * at < count)
                        to = _place(2 * at + 1, columns, source, RANKS)
                        tl.store(out_ptr + to, (given >> 16).to(tl.int16), mask=2 * at + 1 < count)
        if (late == 1) & (patience > 0):
            # What comes behind it on this card would wait in vain, too.
            tl.store(patience_ptr, 0)
            if error_ptr is not None:
                tl.store(error_ptr, code)


@launching
def all_reduce(
    x: Tensor,
    inboxes: Inboxes,
    rank: int,
    *,
    patience: Tensor,
    error: Tensor | None = None,
    code: int = 1,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    half: Half = "both",
    layout: Layout | None = None,
    chained: bool = False,
) -> Tensor:
    """Sums the contiguous x of all ranks, of one shape: returns `out`, by default a new tensor like x, the
    same bits on all ranks; it may be x itself. With a `residual` like x the sum is added to that in place, as
    `kernels.decoder.residual` would; then `out` is written only if it is given, and residual is returned.

    `inboxes`: with room for x, the same on all ranks; rules at the head of this file. patience int32 [1], on
    the device: how often to look before giving up, 0 not to wait. After giving up all results are garbage,
    and with a patience above 0 that is set to 0, and `code` is written to `error`, int32 [1] on the device or
    pinned. With a `gate`
    (int32 [1]) of 0 nothing at all is done. `half`: "send" writes to the others' inboxes and returns x;
    "take" does the rest. `chained`: where the GPU can, the launch starts while the one before still ends.

    Raises ValueError naming what does not fit."""
    _check_like_x("out", out, x)
    _check_like_x("residual", residual, x)
    if residual is not None:
        check_written("residual", residual, x, out)
    if out is None and residual is None and half != "send":
        out = torch.empty_like(x)
    _launch(
        x,
        inboxes,
        rank,
        patience,
        error,
        code,
        gate,
        out,
        residual,
        half,
        layout,
        chained,
        columns=1,
        sums=True,
    )
    if half == "send":
        return x
    return residual if residual is not None else _given(out, x)


@launching
def all_gather(
    x: Tensor,
    inboxes: Inboxes,
    rank: int,
    *,
    patience: Tensor,
    error: Tensor | None = None,
    code: int = 1,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    half: Half = "both",
    layout: Layout | None = None,
    chained: bool = False,
) -> Tensor:
    """Lays the columns of all ranks' contiguous x [rows, columns] side by side: returns `out` [rows, ranks
    columns], contiguous, by default new. Numbers are what they were in x to the bit, but for some NaNs.

    The rest is as for `all_reduce`. Raises ValueError naming what does not fit."""
    if x.dim() != 2:
        raise ValueError(f"x has to be [rows, columns], not {kind(x)}")
    wanted = (x.shape[0], inboxes.ranks * x.shape[1])
    if out is None and half != "send":
        out = x.new_empty(wanted)
    if out is not None:
        if tuple(out.shape) != wanted or out.dtype != x.dtype or not out.is_contiguous():
            raise ValueError(f"out has to be contiguous {x.dtype} {list(wanted)}, not {kind(out)}")
        check_written("out", out, x)
    columns = x.shape[1]
    _launch(
        x,
        inboxes,
        rank,
        patience,
        error,
        code,
        gate,
        out,
        None,
        half,
        layout,
        chained,
        columns=columns,
        sums=False,
    )
    return x if half == "send" else _given(out, x)


def _given(out: Tensor | None, x: Tensor) -> Tensor:
    return x if out is None else out


def _check_like_x(name: str, given: Tensor | None, x: Tensor) -> None:
    if given is not None and (
        given.shape != x.shape
        or given.dtype != x.dtype
        or not given.is_contiguous()
        or given.device != x.device
    ):
        raise ValueError(f"{name} has to be contiguous {kind(x)}, where x is, not {kind(given)}")


def _check(x: Tensor, inboxes: Inboxes) -> None:
    """Raises ValueError naming what does not fit."""
    if x.dtype not in FORMATS or not x.is_contiguous():
        raise ValueError(f"x has to be contiguous fp32, bf16 or fp16, not {kind(x)}")
    if words_of(x.numel(), x.dtype) > inboxes.room:
        raise ValueError(f"inboxes have room for {inboxes.room} words of each rank, too few for x, {kind(x)}")


def _launch(
    x: Tensor,
    inboxes: Inboxes,
    rank: int,
    patience: Tensor,
    error: Tensor | None,
    code: int,
    gate: Tensor | None,
    out: Tensor | None,
    residual: Tensor | None,
    half: Half,
    layout: Layout | None,
    chained: bool,
    *,
    columns: int,
    sums: bool,
) -> None:
    _check(x, inboxes)
    words = words_of(x.numel(), x.dtype)
    layout = layout or layout_for(words)
    check_layout(layout)
    check_part(x, inboxes, rank, patience, error, half)
    check_gate(gate)
    if not x.numel():
        return
    halves = IN_A_WORD[x.dtype]
    tensors = (x, out, residual)
    # Rows that end within a word are gathered number by number, and so is what begins within one.
    whole = (columns if not sums else x.numel()) % halves == 0 and all(
        each is None or each.data_ptr() % 4 == 0 for each in tensors
    )
    integers = torch.int32 if whole else torch.int16
    _one_shot_kernel[(min(layout.programs, triton.cdiv(words, layout.block)),)](
        *(None if each is None else each.view(-1).view(integers) for each in tensors),
        inboxes.words[rank], inboxes.addresses[rank], patience, error, gate,
        rank, words, inboxes.room, x.numel(), columns, code,
        RANKS=inboxes.ranks, SUMS=sums, FORMAT=FORMATS[x.dtype], HALVES=halves, WHOLE=whole,
        SENDS=half != "take", TAKES=half != "send", BLOCK=layout.block,
        **launched(layout.warps, chained and gpu_of(x).chained),
    )  # fmt: skip
