"""What a serving step needs to know of its rows, and what it keeps: by the device, without the host.

    row i of a sequence s with r rows and n tokens, those of the step included, i = row - starts[s]:

    sequences[row] = s,   lengths[row] = n - r + i + 1,   ids[row] = known[slots[s], n - r + i]
    last_rows[s] = starts[s + 1] - 1

    tables[s] = tables of all[slots[s]]

    after the choice: known[slots[s], n] = id of s, where s has come to its end; n += 1 for the next step

All tokens, of prompts and of answers, lie in one array `known` [slots, capacity]. So a step reads what the
step before it has chosen, and the host can be steps behind. In the names of kernels for decoding, row_lengths
are the `lengths` of a batch in which each row is a sequence of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_like, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of, launching

# Rows, or sequences, of one program.
BLOCK, WARPS = 128, 4


class StepRows(NamedTuple):
    """Of a step: int32 [rows] `sequences` (0 for padding), `lengths` (the row's position + 1; 0 for padding),
    `ids` [rows], in the format of `known` (0 for padding), and int32 [sequences] `last_rows` (0 or a row of
    another sequence for one without rows)."""

    sequences: Tensor
    lengths: Tensor
    ids: Tensor
    last_rows: Tensor


def step_room(rows: int, sequences: int, known: Tensor) -> StepRows:
    """Makes room for `step_rows`, which writes all of it, on the device of `known`."""

    def room(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(count, dtype=dtype, device=known.device)

    return StepRows(room(rows), room(rows), room(rows, known.dtype), room(sequences))


def reference_step_rows(
    starts: Tensor, lengths: Tensor, slots: Tensor, known: Tensor, *, out: StepRows
) -> StepRows:
    """As `step_rows`, in plain torch, row by row."""
    for x in out:
        x.zero_()
    firsts = starts.tolist()
    for s, (length, slot) in enumerate(zip(lengths.tolist(), slots.tolist(), strict=True)):
        out.last_rows[s] = max(0, firsts[s + 1] - 1)
        for row in range(firsts[s], firsts[s + 1]):
            position = length - firsts[s + 1] + row
            out.sequences[row], out.lengths[row] = s, position + 1
            if 0 <= position < known.shape[1]:
                out.ids[row] = known[slot, position]
    return out


@triton.jit
def _step_rows_kernel(
    starts_ptr, lengths_ptr, slots_ptr, known_ptr,
    sequences_ptr, row_lengths_ptr, ids_ptr, last_rows_ptr,
    rows, sequences, capacity, known_row,
    CHAINED: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows, and the sequences of the same numbers: program (piece,). STEPS: halvings that tell
    `sequences` apart."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ends = tl.load(starts_ptr + 1 + row, mask=row < sequences, other=1)
    tl.store(last_rows_ptr + row, tl.maximum(ends - 1, 0), mask=row < sequences)
    used = row < tl.load(starts_ptr + sequences)
    # The last sequence that begins at a row or before it; those without rows begin where the next one does.
    low, above = tl.zeros_like(row), tl.zeros_like(row) + sequences
    for _ in range(STEPS):
        middle = (low + above) // 2
        begun = tl.load(starts_ptr + middle) <= row
        low, above = tl.where(begun, middle, low), tl.where(begun, above, middle)
    end = tl.load(starts_ptr + low + 1, mask=used, other=0)
    position = tl.load(lengths_ptr + low, mask=used, other=0) - end + row
    tl.store(sequences_ptr + row, tl.where(used, low, 0), mask=row < rows)
    tl.store(row_lengths_ptr + row, tl.where(used, position + 1, 0), mask=row < rows)
    slot = tl.load(slots_ptr + low, mask=used, other=0).to(tl.int64)
    is_known = used & (position >= 0) & (position < capacity)
    ids = tl.load(known_ptr + slot * known_row + position, mask=is_known, other=0)
    tl.store(ids_ptr + row, ids, mask=row < rows)


@launching
def step_rows(starts: Tensor, lengths: Tensor, slots: Tensor, known: Tensor, *, out: StepRows) -> StepRows:
    """Tells of each row of a step its sequence, its length and its token, and of each sequence its last row.

    On the device: starts int32 [sequences + 1], the first row of each sequence, from 0 on, and the end of the
    last; lengths int32 [sequences], tokens of each, the rows of this step included; slots int32 [sequences],
    its row of known [slots, capacity] (int32 or int64). A sequence may have no row; rows from
    starts[sequences] on are padding. A position that `known` does not have gives the token 0. Fills `out`,
    made by `step_room`, and returns it. Raises ValueError for tensors that do not fit."""
    sequences, rows = _check(starts, lengths, slots, known), len(out.sequences)
    for name, x, count, dtype in (
        ("sequences", out.sequences, rows, torch.int32),
        ("lengths of rows", out.lengths, rows, torch.int32),
        ("ids", out.ids, rows, known.dtype),
        ("last_rows", out.last_rows, sequences, torch.int32),
    ):
        check_like(name, x, (count,), dtype)
    _step_rows_kernel[(triton.cdiv(max(rows, sequences), BLOCK),)](
        starts, lengths, slots, known, *out,
        rows, sequences, known.shape[1], known.stride(0),
        STEPS=(sequences - 1).bit_length(), BLOCK=BLOCK, **launched(WARPS, gpu_of(known).chained),
    )  # fmt: skip
    return out


@triton.jit
def _step_tables_kernel(
    tables_ptr, slots_ptr, out_ptr, blocks, tables_row,
    CHAINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of the table of a sequence: program (sequence, piece)."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    entries = tl.load(tables_ptr + slot * tables_row + place, mask=place < blocks, other=0)
    tl.store(out_ptr + sequence.to(tl.int64) * blocks + place, entries, mask=place < blocks)


@launching
def step_tables(tables: Tensor, slots: Tensor) -> Tensor:
    """Returns the block tables of a step's sequences, int32 [sequences, blocks]: rows `slots`, int32
    [sequences], of `tables` [slots, blocks]. torch's `index_select` takes up to 9 us of a card for 12 short
    rows. Raises ValueError for tensors that do not fit."""
    if tables.dim() != 2 or tables.dtype != torch.int32 or tables.stride(1) != 1 or not tables.shape[1]:
        raise ValueError(f"tables have to be [slots, blocks], rows contiguous, int32, not {kind(tables)}")
    check_like("slots", slots, (len(slots),), torch.int32)
    count, blocks = len(slots), tables.shape[1]
    out = torch.empty(count, blocks, dtype=torch.int32, device=tables.device)
    if count:
        _step_tables_kernel[(count, triton.cdiv(blocks, BLOCK))](
            tables, slots, out, blocks, tables.stride(0),
            BLOCK=BLOCK, **launched(1, gpu_of(tables).chained),
        )  # fmt: skip
    return out


def _check(starts: Tensor, lengths: Tensor, slots: Tensor, known: Tensor) -> int:
    """Returns the number of sequences. Raises ValueError naming the tensor that does not fit."""
    if lengths.dim() != 1 or not len(lengths):
        raise ValueError(f"lengths has to be [sequences], one or more, not {kind(lengths)}")
    sequences = len(lengths)
    for name, x, count in (("starts", starts, 1), ("lengths", lengths, 0), ("slots", slots, 0)):
        check_like(name, x, (sequences + count,), torch.int32)
    if known.dim() != 2 or known.dtype not in (torch.int32, torch.int64) or known.stride(1) != 1:
        raise ValueError(
            f"known has to be [slots, capacity], rows contiguous, int32 or int64, not {kind(known)}"
        )
    return sequences


def reference_keep_chosen(
    ids: Tensor,
    starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    ends: Tensor,
    known: Tensor,
    *,
    advance: bool = False,
) -> None:
    """As `keep_chosen`, in plain torch, sequence by sequence."""
    for s, (length, slot, ended) in enumerate(
        zip(lengths.tolist(), slots.tolist(), ends.tolist(), strict=True)
    ):
        if starts[s] == starts[s + 1]:
            continue
        if ended and 0 <= length < known.shape[1]:
            known[slot, length] = ids[s]
        lengths[s] += advance


@triton.jit
def _keep_chosen_kernel(
    ids_ptr, starts_ptr, lengths_ptr, slots_ptr, ends_ptr, known_ptr, sequences, capacity, known_row,
    CHAINED: tl.constexpr, ADVANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some sequences: program (piece,)."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    sequence = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = sequence < sequences
    begin = tl.load(starts_ptr + sequence, mask=inside, other=0)
    used = inside & (tl.load(starts_ptr + sequence + 1, mask=inside, other=0) > begin)
    length = tl.load(lengths_ptr + sequence, mask=used, other=0)
    slot = tl.load(slots_ptr + sequence, mask=used, other=0).to(tl.int64)
    ended = tl.load(ends_ptr + sequence, mask=used, other=0) != 0
    kept = used & ended & (length >= 0) & (length < capacity)
    ids = tl.load(ids_ptr + sequence, mask=kept, other=0)
    tl.store(known_ptr + slot * known_row + length, ids.to(known_ptr.dtype.element_ty), mask=kept)
    if ADVANCE:
        tl.store(lengths_ptr + sequence, length + 1, mask=used)


@launching
def keep_chosen(
    ids: Tensor,
    starts: Tensor,
    lengths: Tensor,
    slots: Tensor,
    ends: Tensor,
    known: Tensor,
    *,
    advance: bool = False,
) -> None:
    """Writes the token chosen behind each sequence's last row, ids int64 [sequences], to known[slots[s],
    lengths[s]], the place of its next token.

    starts, lengths, slots, known: see `step_rows`. ends int32 [sequences], on the device: 0 where a prompt is
    not at its end with this step, so that its next token is known already; nothing is then written, nor for a
    sequence without rows or without room. `advance`: adds one to the lengths of sequences with rows
    afterwards, so that with one row each the same graph is the next step too. Raises ValueError for tensors
    that do not fit."""
    sequences = _check(starts, lengths, slots, known)
    check_like("ids", ids, (sequences,), torch.int64)
    check_like("ends", ends, (sequences,), torch.int32)
    _keep_chosen_kernel[(triton.cdiv(sequences, BLOCK),)](
        ids, starts, lengths, slots, ends, known, sequences, known.shape[1], known.stride(0),
        ADVANCE=advance, BLOCK=BLOCK, **launched(WARPS, gpu_of(known).chained),
    )  # fmt: skip
