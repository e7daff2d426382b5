"""Attention in plain torch: the reference of the kernels, and the forms that have no kernel of their own yet.

    out = sum_j p_j v_j,   p = softmax(q . k_j / sqrt(d)),   lse = log sum_j exp(q . k_j / sqrt(d))

paged        each sequence over its own cached tokens
prefill      query i of a prompt over the tokens cached before it and the prompt's tokens up to i
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from simcore.kernels.decoder.tensors import wide
from simcore.ops.op import Op, prompts

# Scores of a prompt that are held at once: 1 GiB in float64. Of 30,000 tokens and 32 heads all would be 214.
MOST_SCORES = 2**27


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attends from q [batch, queries, q_heads, d] over k, v [batch, kv_heads, context, d].

    `mask` [queries, context] is added to the scores; `scale` is 1 / sqrt(d) by default. Returns out, shaped
    as q, and lse [batch, queries, q_heads], both in the format of sums."""
    batch, queries, heads, d = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # Queries of one KV head side by side, so that each key is read once: [batch, kv_heads, group queries, d].
    rows = q.transpose(1, 2).reshape(batch, kv_heads, group * queries, d)
    scores = wide(rows @ k.transpose(-1, -2)) * (d**-0.5 if scale is None else scale)
    if mask is not None:
        scores = scores + mask.repeat(group, 1)
    lse = scores.logsumexp(-1)
    out = wide((scores - lse[..., None]).exp().to(v.dtype) @ v)
    out = out.view(batch, heads, queries, d).transpose(1, 2)
    return out, lse.view(batch, heads, queries).transpose(1, 2)


# K or V of all sequences one after another, [kv_tokens, kv_heads, d], or of each by itself.
Cached = Tensor | Sequence[Tensor]


def paged_attention(
    op: Op, q: Tensor, k: Cached, v: Cached, lengths: Tensor, table: Tensor | None = None
) -> Tensor:
    """Attends from q [sequences, q_heads, d] to [sequences, q_heads, d]. k, v [kv_tokens, kv_heads, d] hold
    the sequences' tokens one after another, lengths [sequences] of each; or they are the tokens of each
    sequence; or with a table [sequences, blocks of one] they are blocks [blocks, block_size, kv_heads, d].
    Runs of equal length that lie together are computed together."""
    del op
    out = torch.empty_like(q)
    if table is not None:
        k, v = (out_of(x, lengths, table) for x in (k, v))
    if not isinstance(k, Tensor):
        for row, (keys, values) in enumerate(zip(k, v, strict=True)):
            mine = [x.transpose(0, 1)[None] for x in (keys, values)]
            out[row] = attend(q[None, row, None], mine[0], mine[1])[0][0, 0].to(q.dtype)
        return out
    assert isinstance(v, Tensor)
    first = token = 0
    for length, count in _runs(lengths.tolist()):
        rows = slice(first, first + count)
        keys, values = (
            x[token : token + count * length].view(count, length, *x.shape[1:]).transpose(1, 2)
            for x in (k, v)
        )
        out[rows] = attend(q[rows, None], keys, values)[0][:, 0].to(q.dtype)
        first, token = first + count, token + count * length
    return out


def out_of(blocks: Cached, lengths: Tensor, table: Tensor) -> list[Tensor]:
    """Returns the tokens of each sequence, [length, kv_heads, d], out of their blocks."""
    assert isinstance(blocks, Tensor)
    found = zip(table.long(), lengths.tolist(), strict=True)
    return [blocks[own].flatten(0, 1)[:length] for own, length in found]


def _runs(lengths: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields (length, how many in a row have it)."""
    for length, same in groupby(lengths):
        yield length, len(list(same))


def prefill_attention(op: Op, q: Tensor, k: Cached, v: Cached, now: Tensor, cached: Tensor) -> Tensor:
    """Attends from q [tokens, q_heads, d], prompt after prompt, to [tokens, q_heads, d]. k, v [kv_tokens,
    kv_heads, d] hold for each prompt first its cached tokens, then its own tokens, or they are those of each
    prompt; now, cached [prompts] count both."""
    del op
    out = torch.empty_like(q)
    row, both = 0, (now + cached).tolist()
    each = [torch.split(x, both) if isinstance(x, Tensor) else x for x in (k, v)]
    for new, before, *mine in zip(now.tolist(), cached.tolist(), *each, strict=True):
        keys, values = (x.transpose(0, 1)[None] for x in mine)
        at_once = max(1, MOST_SCORES // (q.shape[1] * (before + new)))
        for first in range(0, new, at_once):
            count = min(at_once, new - first)
            rows, seen = slice(row + first, row + first + count), before + first + count
            hidden = torch.ones(count, seen, dtype=torch.bool, device=q.device).triu(before + first + 1)
            mask = torch.zeros_like(hidden, dtype=wide(q).dtype).masked_fill_(hidden, -math.inf)
            some = attend(q[None, rows], keys[:, :, :seen], values[:, :, :seen], mask)[0][0]
            out[rows] = some.to(q.dtype)
        row += new
    return out


def evenly(total: int, parts: int) -> list[int]:
    """Splits a total into whole numbers that differ by at most one, the larger ones first.

    >>> evenly(8, 3)
    [3, 3, 2]
    """
    least, more = divmod(total, parts)
    return [least + (part < more) for part in range(parts)]


def prompts_of(op: Op) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the equal prompts that a prefill attention stands for (`op.prompts`), its tokens and cached
    tokens split evenly over them: (tokens now, tokens cached before) of each."""
    tokens, cached = op["tokens"], op["kv_tokens"] - op["tokens"]
    count = prompts(tokens, op["kv_tokens"], op["pairs"])
    return evenly(tokens, count), evenly(cached, count)
