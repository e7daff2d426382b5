"""The decoding step's record of chosen tokens: each id is written into a list.

chosen[length - first] = id        if the list has that place
"""

import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.gpu import launching


def reference_note(ids: Tensor, lengths: Tensor, first: int, chosen: Tensor) -> None:
    """As `note`, in plain torch."""
    for row, length in enumerate(lengths.tolist()):
        if 0 <= length - first < len(chosen):
            chosen[length - first, row] = ids[row]


@triton.jit
def _note_kernel(
    ids_ptr, lengths_ptr, chosen_ptr, gate_ptr, first, batch, tokens, GATED: tl.constexpr, BATCH: tl.constexpr
):
    """All sequences: one program."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    row = tl.arange(0, BATCH)
    inside = row < batch
    token = tl.load(lengths_ptr + row, mask=inside, other=0).to(tl.int64) - first
    inside = inside & (token >= 0) & (token < tokens)
    tl.store(chosen_ptr + token * batch + row, tl.load(ids_ptr + row, mask=inside, other=0), mask=inside)


@launching
def note(ids: Tensor, lengths: Tensor, first: int, chosen: Tensor, *, gate: Tensor | None = None) -> None:
    """Writes ids [batch] to chosen [tokens, batch], contiguous, at row lengths[b] - `first` (lengths int32
    [batch], read on the device). With a `gate` (int32 [1]) of 0 it writes nothing. Raises ValueError for
    other shapes."""
    tokens, batch = chosen.shape
    if ids.shape != (batch,) or lengths.shape != (batch,) or not chosen.is_contiguous():
        raise ValueError(f"ids and lengths have to be [{batch}], chosen contiguous")
    _note_kernel[(1,)](
        ids, lengths, chosen, gate, first, batch, tokens,
        GATED=gate is not None, BATCH=triton.next_power_of_2(batch), num_warps=1,
    )  # fmt: skip
