"""Attention of sequences of different lengths over a paged cache: as a card that serves launches it, and in
plain torch.

    out = sum_j p_j v_j,   p = softmax(q . k_j / sqrt(d)),   each sequence over its own tokens j

An op says how many tokens all sequences have together, not how many each has. So its inputs on a card are of
lengths that differ as those of requests served together do (`spread`), in blocks in any order, in a table
with room for longer ones: the price is that of a serving step, not the lower one of equal lengths.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from simcore.kernels.decoder.attention import evenly, paged_attention
from simcore.kernels.decoder.decode_attention import decode_attention
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op

# Tokens of a block: a block of keys then lies in one of them and takes one look-up.
PAGE = 128
# Room for tokens of each sequence, at least.
ROOM = 4096
# By how much of their mean lengths differ from it at most.
UNLIKE = 0.8


def _paged_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    sequences, d = op["sequences"], op["head_dim"]
    q = random_tensor(op, generator, device, sequences, op["q_heads"], d)
    if device.type != "cuda":
        cache = op["kv_tokens"], op["kv_heads"], d
        lengths = torch.tensor(evenly(op["kv_tokens"], sequences), device=device)
        return q, *(random_tensor(op, generator, device, *cache) for _ in range(2)), lengths
    lengths = torch.tensor(spread(op["kv_tokens"], sequences), dtype=torch.int32)
    table = _table(lengths.tolist())
    size = int(table.max()) + 1, PAGE, op["kv_heads"], d
    blocks = (random_tensor(op, generator, device, *size) for _ in range(2))
    return q, *blocks, lengths.to(device), table.to(device)


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
    shares = [1.0 + UNLIKE * ((2 * part + 1) / parts - 1.0) for part in range(parts)]
    spare = total - parts
    ends = [round(spare * end / parts) for end in accumulate(shares)]
    lengths = [1 + end - before for before, end in pairwise([0, *ends])]
    return [lengths[i] for i in torch.randperm(parts, generator=torch.Generator().manual_seed(0)).tolist()]


def _in_blocks(op: Op, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """`paged_attention` as a card that serves launches it."""
    del op
    return decode_attention(q, k, v, lengths, block_table=table)


PAGED_ATTENTION = Kernel(by_device(_in_blocks, paged_attention), paged_attention, _paged_inputs)
