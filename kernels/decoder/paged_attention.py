"""Attention of decoding sequences and of prompts over a paged cache: as a card that serves launches them, and
in plain torch.

    out = sum_j p_j v_j,   p = softmax(q . k_j / sqrt(d)),   each sequence over its own tokens j

An op says how many tokens all sequences have together, and how many the longest, not how many each has. So
inputs on a card are of decoding sequences whose lengths differ as those of requests served together do
(`lengths_of`), and of prompts of equal length (`prompts_of`). They lie in blocks in any order, in a table
with room for longer ones: the price is that of a serving step, not the lower one of equal lengths side by
side.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, cycle, pairwise

import torch
from torch import Tensor

from simcore.kernels.decoder.attention import evenly, out_of, paged_attention, prefill_attention, prompts_of
from simcore.kernels.decoder.decode_attention import decode_attention
from simcore.kernels.decoder.ragged_attention import ragged_attention
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op, longest, says_longest, spread_to

# Tokens of a block: a block of keys then lies in one of them and takes one look-up.
PAGE = 128
# Room for tokens of each sequence, at least.
ROOM = 4096
# By how much of their mean lengths beside the longest differ from it at most (as in `ops.op.spread_to`).
UNLIKE = 0.8


def _paged_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    sequences, d = op["sequences"], op["head_dim"]
    q = random_tensor(op, generator, device, sequences, op["q_heads"], d)
    if device.type != "cuda":
        cache = op["kv_tokens"], op["kv_heads"], d
        lengths = torch.tensor(evenly(op["kv_tokens"], sequences), device=device)
        return q, *(random_tensor(op, generator, device, *cache) for _ in range(2)), lengths
    return q, *in_blocks(op, lengths_of(op), generator, device)


def in_blocks(
    op: Op, lengths: Sequence[int], generator: torch.Generator, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns random K and V of sequences of these lengths in blocks, the lengths, and the table."""
    table = _table(lengths)
    return *_blocks(op, table, generator, device), _on(device, lengths), table.to(device)


def _prefill_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    d = op["head_dim"]
    q = random_tensor(op, generator, device, op["tokens"], op["q_heads"], d)
    now, cached = prompts_of(op)
    if device.type != "cuda":
        cache = op["kv_tokens"], op["kv_heads"], d
        split = (torch.tensor(part) for part in (now, cached))
        return q, *(random_tensor(op, generator, device, *cache) for _ in range(2)), *split
    lengths = [a + b for a, b in zip(now, cached, strict=True)]
    table, starts = _table(lengths), _on(device, [0, *accumulate(now)])
    return q, *_blocks(op, table, generator, device), starts, _on(device, lengths), table.to(device)


def _on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _blocks(op: Op, table: Tensor, generator: torch.Generator, device: torch.device) -> Iterator[Tensor]:
    """Yields random K and V of all blocks of a table, [blocks, PAGE, kv_heads, d]."""
    size = int(table.max()) + 1, PAGE, op["kv_heads"], op["head_dim"]
    yield from (random_tensor(op, generator, device, *size) for _ in range(2))


def _table(lengths: Sequence[int]) -> Tensor:
    """Returns a table of blocks in any order, int32 [sequences, blocks], with room for longer sequences, as
    a service has; block 0, which is no sequence's, where there are none."""
    blocks = [-(-length // PAGE) for length in lengths]
    table = torch.zeros(len(lengths), max(ROOM // PAGE, *blocks), dtype=torch.int32)
    order = 1 + torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0))
    for row, own in zip(table, torch.split(order, blocks), strict=True):
        row[: len(own)] = own
    return table


def spread(total: int, parts: int) -> list[int]:
    """Splits a total into whole numbers as unlike as the lengths of requests that are served together: about
    evenly from a fifth of the mean to nine fifths, in any order, each 1 at least.

    >>> spread(100, 4), spread(4, 4), spread(90, 1)
    ([11, 20, 39, 30], [1, 1, 1, 1], [90])
    """
    ends = [spread_to(total - parts, part, parts) for part in range(parts + 1)]
    return _in_any_order([1 + end - before for before, end in pairwise(ends)])


def lengths_of(op: Op) -> list[int]:
    """Returns the lengths of the sequences of a `paged_attention`, in any order, with exactly its tokens and
    its longest, each 1 at least. Where it does not say the longest, they are spread evenly (`spread`)."""
    total, parts = op["kv_tokens"], op["sequences"]
    if not says_longest(dict(op.shape)):
        return spread(total, parts)
    most = longest(total, parts, op["over_mean"])
    return _in_any_order([*_below(total - most, parts - 1, most), most])


def _below(total: int, parts: int, most: int) -> list[int]:
    """Splits a total into whole numbers from 1 to `most` that rise evenly, from a fifth of their mean to nine
    fifths, or from and to nearer ones where nine fifths are above `most`.

    >>> _below(100, 4, 90), _below(100, 4, 30), _below(100, 4, 25), _below(0, 0, 5)
    ([11, 20, 30, 39], [20, 24, 26, 30], [25, 25, 25, 25], [])
    """
    if not parts:
        return []
    last = (parts - 1) / parts
    unlike = min(UNLIKE, (most * parts / total - 1.0) / last) if last else 0.0
    spare = total - parts
    ends = [round(spare * part / parts * (1.0 + unlike * (part / parts - 1.0))) for part in range(parts + 1)]
    lengths = [1 + end - before for before, end in pairwise(ends)]
    # Rounded up, a number may be beyond the most, and another has room for it.
    beyond = sum(max(0, length - most) for length in lengths)
    lengths = [min(length, most) for length in lengths]
    for i in cycle(range(parts)):
        if not beyond:
            break
        more = int(lengths[i] < most)
        lengths[i], beyond = lengths[i] + more, beyond - more
    return lengths


def _in_any_order(lengths: Sequence[int]) -> list[int]:
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0))
    return [lengths[i] for i in order.tolist()]


def _in_blocks(op: Op, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """`paged_attention` as a card that serves launches it."""
    del op
    return decode_attention(q, k, v, lengths, block_table=table)


def _prompts_in_blocks(
    op: Op, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Tensor, table: Tensor
) -> Tensor:
    """`prefill_attention` as a card that serves launches it."""
    del op
    return ragged_attention(q, k, v, starts, lengths, table)


def _reference_of_prompts(op: Op, q: Tensor, k: Tensor, v: Tensor, *where: Tensor) -> Tensor:
    """`prefill_attention` over tokens one after another, or in blocks: `where` is (now, cached), or (starts,
    lengths, table)."""
    if len(where) == 2:
        return prefill_attention(op, q, k, v, *where)
    starts, lengths, table = where
    keys, values = (out_of(x, lengths, table) for x in (k, v))
    now = starts.diff()
    return prefill_attention(op, q, keys, values, now, lengths - now)


PAGED_ATTENTION = Kernel(by_device(_in_blocks, paged_attention), paged_attention, _paged_inputs)
PREFILL_ATTENTION = Kernel(
    by_device(_prompts_in_blocks, _reference_of_prompts), _reference_of_prompts, _prefill_inputs
)
