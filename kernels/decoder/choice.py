"""The greedy choice of a decoding step: the token of each sequence, and its embedding.

id = argmax(logits), the lowest of equals, NaN above all;  x = table[id]

A row of logits is split into parts, so that all programs together read at once. Each leaves one word: the
largest logit, as an integer of the same order, above the lowest place that has it. The last program of a row
takes the largest word, and copies the row of the table.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_gate, check_like, check_written, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.kernels.streams import words
from simcore.ops.op import Op

# Logits that a program reads at once, and at least; elements of a row of the table that it copies at once.
BLOCK = 2048
WARPS = 4
# Infinity's bits in fp32: more, the sign left out, are NaN.
INFINITY = tl.constexpr(0x7F800000)


def reference_choose(logits: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """As `choose`, in plain torch: ids int64 [batch], and their rows of the table."""
    ids = logits.argmax(-1)
    return ids, None if table is None else table[ids]


@triton.jit
def _choose_kernel(
    logits_ptr, word_ptr, counter_ptr, ids_ptr, table_ptr, x_ptr, gate_ptr,
    vocab, hidden, parts, logits_row, table_row, x_row,
    CHAINED: tl.constexpr, GATED: tl.constexpr, EMBEDS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one row: program (row, part). PARTS: `parts` padded."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.cdiv(vocab, BLOCK)
    least: tl.constexpr = -(2**63)
    best = tl.full((BLOCK,), least, dtype=tl.int64)
    for block in range(part * blocks // parts, (part + 1) * blocks // parts):
        place = block * BLOCK + tl.arange(0, BLOCK)
        inside = place < vocab
        x = tl.load(logits_ptr + row * logits_row + place, mask=inside, other=0.0).to(tl.float32)
        bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
        is_number = (bits & 0x7FFFFFFF) <= INFINITY
        bits = tl.where(is_number, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
        word = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
        best = tl.maximum(best, tl.where(inside, word, least))
    largest = tl.max(best, axis=0)
    if parts > 1:
        tl.store(word_ptr + row * parts + part, largest)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel") < parts - 1:
            return
        tl.store(counter_ptr + row, 0)
        each = tl.arange(0, PARTS)
        # Other programs wrote the words: read past the cache of this multiprocessor.
        every = tl.load(word_ptr + row * parts + each, mask=each < parts, other=least, cache_modifier=".cg")
        largest = tl.max(every, axis=0)
    token = 0x7FFFFFFF - (largest & 0x7FFFFFFF)
    tl.store(ids_ptr + row, token)
    if EMBEDS:
        for block in range(0, tl.cdiv(hidden, BLOCK)):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < hidden
            copied = tl.load(table_ptr + token * table_row + column, mask=inside)
            tl.store(x_ptr + row * x_row + column, copied, mask=inside)


@launching
def choose(
    logits: Tensor,
    *,
    table: Tensor | None = None,
    x: Tensor | None = None,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    chained: bool = False,
) -> Tensor:
    """Returns the greedy tokens of logits [batch, vocab], as torch.argmax does: int64 [batch], in `out` if
    given. With a `table` [vocab, hidden] their rows are copied to x [batch, hidden], which has its format.
    With a `gate` (int32 [1]) of 0 nothing is written. `chained`: where the GPU can, the launch starts while
    the one before it ends, and waits. Raises ValueError for tensors that do not fit."""
    if logits.dim() != 2 or logits.stride(-1) != 1 or not logits.shape[1] or not logits.is_floating_point():
        raise ValueError(f"logits have to be [batch, vocab], rows contiguous, not {kind(logits)}")
    if logits.element_size() > 4:
        raise ValueError(f"logits are compared in fp32, which would round {logits.dtype}")
    batch, vocab = logits.shape
    if (table is None) != (x is None):
        raise ValueError("a table and x, which gets its rows, are given together")
    out = torch.empty(batch, dtype=torch.int64, device=logits.device) if out is None else out
    check_like("out", out, (batch,), torch.int64)
    check_gate(gate)
    hidden = 0
    if table is not None and x is not None:
        hidden = table.shape[1]
        check_like("table", table, (vocab, hidden), table.dtype)
        check_like("x", x, (batch, hidden), table.dtype)
        check_written("x", x, table, logits)
    if not batch:
        return out
    gpu = gpu_of(logits)
    parts = max(1, min(triton.cdiv(vocab, BLOCK), gpu.processors // batch))
    held, counters = _space(logits.device, batch, parts)
    _choose_kernel[(batch, parts)](
        logits, held, counters, out, table, x, gate,
        vocab, hidden, parts, logits.stride(0), 0 if table is None else table.stride(0),
        0 if x is None else x.stride(0),
        GATED=gate is not None, EMBEDS=table is not None,
        PARTS=triton.next_power_of_2(parts), BLOCK=BLOCK,
        **launched(WARPS, chained and gpu.chained),
    )  # fmt: skip
    return out


def _space(device: torch.device, batch: int, parts: int) -> tuple[Tensor, Tensor]:
    """Returns int64 [batch parts] for what parts find, and a counter a row: zero before and after."""
    if device.type != "cuda":
        return (
            torch.empty(batch * parts, dtype=torch.int64, device=device),
            torch.zeros(batch, dtype=torch.int32, device=device),
        )
    found = words(device, "largest logits", 2 * batch * parts, 0).view(torch.int64)
    return found, words(device, "counters of logits", batch, 0)


# -- the op ----------------------------------------------------------------------------------------------


def _reference(op: Op, logits: Tensor) -> Tensor:
    """Returns ids [tokens] of the largest of logits [tokens, vocab]."""
    del op
    return reference_choose(logits)[0]


def _run(op: Op, logits: Tensor) -> Tensor:
    del op
    return choose(logits)


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return (random_tensor(op, generator, device, op["tokens"], op["vocab"]),)


SAMPLE = Kernel(by_device(_run, _reference), _reference, _inputs)
