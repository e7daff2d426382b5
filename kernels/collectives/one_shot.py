"""One-shot collectives by pushed words, for ranks whose cards see each other's memory.

    all_reduce   out = x_0 + x_1 + ... + x_{n-1}      in this order, in fp32, rounded once
                 residual += out                      in fp32, rounded once more; only if there is one
                 normed = gain residual / sqrt(mean(residual^2) + eps)      by rows; only with a gain
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

With a gain one program takes whole rows, each as one block, so that it has all squares that it adds up.

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
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.collectives.layout import (
    STORED_AT_ONCE,
    Half,
    Layout,
    check_layout,
    check_part,
    layout_for,
)
from simcore.kernels.collectives.memory import IN_A_WORD, Inboxes, words_of
from simcore.kernels.collectives.words import (
    added,
    empty_words,
    give_up,
    high,
    low,
    own_words,
    packed,
    send_words,
    store_words,
    summed,
    waited_for,
)
from simcore.kernels.decoder.checks import check_gate, check_like, check_written, kind
from simcore.kernels.decoder.norm import EPS, reference_norm
from simcore.kernels.decoder.residual import reference_residual
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import wide
from simcore.kernels.gpu import gpu_of, launching

FORMATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# With whole rows a program has twice the threads.
MOST_ROWS, MOST_WARPS = 16, 16


def rows_layout_for(words: int) -> Layout:
    """Returns the layout for rows of so many words, each of which is one block.

    >>> rows_layout_for(64), rows_layout_for(2048), rows_layout_for(4096)
    (Layout(block=128, warps=1, programs=16), Layout(block=2048, warps=16, programs=16), \
Layout(block=4096, warps=16, programs=16))
    """
    block = max(128, int(triton.next_power_of_2(words)))
    return Layout(block, min(MOST_WARPS, block // (32 * STORED_AT_ONCE)), MOST_ROWS)


def words_of_rows(rows: int, hidden: int, dtype: torch.dtype) -> int:
    """Returns the words that are sent for rows of which each begins with a word.

    >>> words_of_rows(8, 4096, torch.bfloat16), words_of_rows(3, 5, torch.float16)
    (16384, 9)
    """
    return rows * -(-hidden // IN_A_WORD[dtype])


def reference_all_reduce(xs: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the x of all ranks, in plain torch and in any float dtype, on the device of the
    first: in order, in fp32 or more, rounded once."""
    total = wide(xs[0]).clone()
    for x in xs[1:]:
        total += wide(x.to(total.device))
    return total.to(xs[0].dtype)


def reference_normed_sum(xs: Sequence[Tensor], residual: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """Adds the sum of the x of all ranks to a residual in place; returns its RMS norm by rows, times gain."""
    total = reference_all_reduce(xs).to(residual.device)
    return reference_norm(reference_residual(total, residual), gain, eps=eps)


def reference_all_gather(xs: Sequence[Tensor]) -> Tensor:
    """Returns the columns of the x of all ranks side by side, on the device of the first."""
    return torch.cat([x.to(xs[0].device) for x in xs], -1)


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
            own = own_words(x_ptr, at, count, WHOLE, HALVES)
            send_words(own, addresses_ptr, at, at < words, rank, room, RANKS)
    if TAKES:
        patience = tl.load(patience_ptr)
        late = 0
        for start in range(first, words, step):
            at = start + tl.arange(0, BLOCK)
            inside = at < words
            # These loads are done while others' words are on their way.
            own = own_words(x_ptr, at, count, WHOLE, HALVES)
            if residual_ptr is not None:
                before = own_words(residual_ptr, at, count, WHOLE, HALVES)
            found, waiting = waited_for(inbox_ptr, at, inside, rank, room, patience, RANKS)
            late = tl.maximum(late, waiting)
            if CHAINED and start + step >= words:
                gdc_launch_dependents()
            empty_words(inbox_ptr, at, inside, rank, room, RANKS, BLOCK)
            if SUMS:
                total = summed(own, found, rank, RANKS, FORMAT, HALVES)
                if out_ptr is not None:
                    store_words(out_ptr, at, total, count, WHOLE, HALVES)
                if residual_ptr is not None:
                    after = added(before, total, FORMAT, HALVES)
                    store_words(residual_ptr, at, after, count, WHOLE, HALVES)
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
            give_up(patience_ptr, error_ptr, code)


@triton.jit(do_not_specialize=["rank", "code"])
def _normed_sum_kernel(
    x_ptr, out_ptr, residual_ptr, normed_ptr, gain_ptr,
    inbox_ptr, addresses_ptr, patience_ptr, error_ptr, gate_ptr,
    rank, rows, words, room, hidden, eps, code,
    RANKS: tl.constexpr, FORMAT: tl.constexpr, HALVES: tl.constexpr, WHOLE: tl.constexpr,
    SENDS: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Any number of programs, which take the rows in turn. x, out, residual and normed are of words if WHOLE,
    else of halves; `hidden` numbers of a row in `words` words, BLOCK of them or fewer."""
    if CHAINED:
        gdc_wait()
    if gate_ptr is not None and tl.load(gate_ptr) == 0:
        return
    columns = tl.arange(0, BLOCK)
    inside = columns < words
    width = hidden // HALVES if WHOLE else hidden
    if SENDS:
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            own = own_words(x_ptr + row * width, columns, hidden, WHOLE, HALVES)
            send_words(own, addresses_ptr, row * words + columns, inside, rank, room, RANKS)
    if TAKES:
        patience = tl.load(patience_ptr)
        late = 0
        for row in range(tl.program_id(0), rows, tl.num_programs(0)):
            at = row * words + columns
            # These loads are done while others' words are on their way.
            own = own_words(x_ptr + row * width, columns, hidden, WHOLE, HALVES)
            before = own_words(residual_ptr + row * width, columns, hidden, WHOLE, HALVES)
            first = tl.load(gain_ptr + HALVES * columns, mask=HALVES * columns < hidden, other=0.0)
            if HALVES == 2:
                second = tl.load(gain_ptr + 2 * columns + 1, mask=2 * columns + 1 < hidden, other=0.0)
            found, waiting = waited_for(inbox_ptr, at, inside, rank, room, patience, RANKS)
            late = tl.maximum(late, waiting)
            if CHAINED and row + tl.num_programs(0) >= rows:
                gdc_launch_dependents()
            empty_words(inbox_ptr, at, inside, rank, room, RANKS, BLOCK)
            total = summed(own, found, rank, RANKS, FORMAT, HALVES)
            if out_ptr is not None:
                store_words(out_ptr + row * width, columns, total, hidden, WHOLE, HALVES)
            after = added(before, total, FORMAT, HALVES)
            store_words(residual_ptr + row * width, columns, after, hidden, WHOLE, HALVES)
            # As the norm reads it: rounded. Beyond the row there are zeros.
            lows = low(after, FORMAT)
            highs = lows
            squares = lows * lows
            if HALVES == 2:
                highs = high(after, FORMAT)
                squares += highs * highs
            scale = tl.rsqrt(tl.sum(squares, axis=0) / hidden + eps)
            lows = lows * scale * first.to(tl.float32)
            if HALVES == 2:
                highs = highs * scale * second.to(tl.float32)
            normed = packed(lows, highs, FORMAT)
            store_words(normed_ptr + row * width, columns, normed, hidden, WHOLE, HALVES)
        if (late == 1) & (patience > 0):
            give_up(patience_ptr, error_ptr, code)


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
    gain: Tensor | None = None,
    eps: float = EPS,
    normed: Tensor | None = None,
    half: Half = "both",
    layout: Layout | None = None,
    chained: bool = False,
) -> Tensor:
    """Sums the contiguous x of all ranks, of one shape: returns `out`, by default a new tensor like x, the
    same bits on all ranks; it may be x itself. With a `residual` like x the sum is added to that in place, as
    `kernels.decoder.residual` would; then `out` is written only if it is given, and residual is returned.

    With a `gain` [hidden], x being [rows, hidden], the norm of the new residual is written to `normed`, by
    default a new tensor like x, and returned. It is that of `kernels.decoder.norm` but for the order in which
    squares are added up, so within a rounding; the same bits on all ranks. All ranks give a gain, or none, in
    both halves. Inboxes then need room for `words_of_rows`, and `layout` has a block of a row or more.

    `inboxes`: with room for x, the same on all ranks; rules at the head of this file. patience int32 [1], on
    the device: how often to look before giving up, 0 not to wait. After giving up all results are garbage,
    and with a patience above 0 that is set to 0, and `code` is written to `error`, int32 [1] on the device or
    pinned. With a `gate` (int32 [1]) of 0 nothing at all is done. `half`: "send" writes to the others'
    inboxes and returns x; "take" does the rest. `chained`: where the GPU can, the launch starts while the one
    before still ends.

    Raises ValueError naming what does not fit."""
    _check_like_x("out", out, x)
    _check_like_x("residual", residual, x)
    if residual is not None:
        check_written("residual", residual, x, out)
    part = _Part(inboxes, rank, patience, error, code, gate, half, chained)
    if gain is not None or normed is not None:
        return _normed_sum(x, part, out, residual, gain, eps, normed, layout)
    if out is None and residual is None and half != "send":
        out = torch.empty_like(x)
    _launch(x, part, out, residual, layout, columns=1, sums=True)
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
    part = _Part(inboxes, rank, patience, error, code, gate, half, chained)
    _launch(x, part, out, None, layout, columns=x.shape[1], sums=False)
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


class _Part(NamedTuple):
    """A rank's part of any collective, as `all_reduce` takes it."""

    inboxes: Inboxes
    rank: int
    patience: Tensor
    error: Tensor | None
    code: int
    gate: Tensor | None
    half: Half
    chained: bool

    @property
    def does(self) -> dict[str, bool]:
        """Whether its kernel sends, and whether it takes."""
        return {"SENDS": self.half != "take", "TAKES": self.half != "send"}


def _check(x: Tensor, words: int, part: _Part) -> None:
    """Raises ValueError naming what does not fit; `words` are sent to each rank."""
    room = part.inboxes.room
    if words > room:
        raise ValueError(f"inboxes have room for {room} words of each rank, too few for x, {kind(x)}")
    check_part(x, part.inboxes, part.rank, part.patience, part.error, part.half)
    check_gate(part.gate)


def _check_format(x: Tensor) -> None:
    if x.dtype not in FORMATS or not x.is_contiguous():
        raise ValueError(f"x has to be contiguous fp32, bf16 or fp16, not {kind(x)}")


def _integers(of_words: bool, tensors: Sequence[Tensor | None]) -> tuple[bool, list[Tensor | None]]:
    """Returns whether tensors, whose rows are `of_words`, can be read as whole words, and the integers of
    each: words, or else halves."""
    whole = of_words and all(each is None or each.data_ptr() % 4 == 0 for each in tensors)
    integers = torch.int32 if whole else torch.int16
    return whole, [None if each is None else each.view(-1).view(integers) for each in tensors]


def _launch(
    x: Tensor,
    part: _Part,
    out: Tensor | None,
    residual: Tensor | None,
    layout: Layout | None,
    *,
    columns: int,
    sums: bool,
) -> None:
    _check_format(x)
    words = words_of(x.numel(), x.dtype)
    _check(x, words, part)
    layout = layout or layout_for(words)
    check_layout(layout)
    if not x.numel():
        return
    inboxes, halves = part.inboxes, IN_A_WORD[x.dtype]
    # Rows that end within a word are gathered number by number, and so is what begins within one.
    whole, integers = _integers((columns if not sums else x.numel()) % halves == 0, (x, out, residual))
    _one_shot_kernel[(min(layout.programs, triton.cdiv(words, layout.block)),)](
        *integers,
        inboxes.words[part.rank], inboxes.addresses[part.rank], part.patience, part.error, part.gate,
        part.rank, words, inboxes.room, x.numel(), columns, part.code,
        RANKS=inboxes.ranks, SUMS=sums, FORMAT=FORMATS[x.dtype], HALVES=halves, WHOLE=whole,
        BLOCK=layout.block, **part.does,
        **launched(layout.warps, part.chained and gpu_of(x).chained),
    )  # fmt: skip


def _normed_sum(
    x: Tensor,
    part: _Part,
    out: Tensor | None,
    residual: Tensor | None,
    gain: Tensor | None,
    eps: float,
    normed: Tensor | None,
    layout: Layout | None,
) -> Tensor:
    _check_format(x)
    if gain is None or residual is None or x.dim() != 2:
        raise ValueError(f"normed: a norm takes a gain, a residual and x [rows, hidden], not {kind(x)}")
    rows, hidden = x.shape
    check_like("gain", gain, (hidden,), gain.dtype)
    _check_like_x("normed", normed, x)
    if normed is None:
        normed = torch.empty_like(x)
    check_written("normed", normed, residual, out)
    words = words_of_rows(rows, hidden, x.dtype)
    _check(x, words, part)
    layout = layout or rows_layout_for(words // max(1, rows))
    check_layout(layout)
    if layout.block * rows < words:
        raise ValueError(f"layout: {layout} has fewer words of a block than x of a row, {kind(x)}")
    if x.numel():
        inboxes, halves = part.inboxes, IN_A_WORD[x.dtype]
        whole, integers = _integers(hidden % halves == 0, (x, out, residual, normed))
        _normed_sum_kernel[(min(layout.programs, rows),)](
            *integers, gain,
            inboxes.words[part.rank], inboxes.addresses[part.rank], part.patience, part.error, part.gate,
            part.rank, rows, words // rows, inboxes.room, hidden, eps, part.code,
            RANKS=inboxes.ranks, FORMAT=FORMATS[x.dtype], HALVES=halves, WHOLE=whole,
            BLOCK=layout.block, **part.does,
            **launched(layout.warps, part.chained and gpu_of(x).chained),
        )  # fmt: skip
    return x if part.half == "send" else normed
