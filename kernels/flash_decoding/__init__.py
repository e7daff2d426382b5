"""Attention of one query token a sequence, whole and in parts (Flash-Decoding, Dao et al. 2023).

    part s      o_s = softmax(q K_s^T / sqrt(d)) V_s,   l_s = log sum exp(q K_s^T / sqrt(d))
    combine     out = sum_s exp(l_s - l) o_s,           l = log sum_s exp(l_s)

All parts have the same length, except the last one with tokens, which may be shorter. Parts after it are
empty: their l_s is -inf and they add nothing.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from simcore.kernels.decoder.tensors import random_tensor, wide
from simcore.kernels.kernel import Kernel
from simcore.ops.op import Op


def flash_attention_2(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends from q [batch, q_heads, d] over k, v [batch, kv_heads, context, d]: [batch, q_heads, d]."""
    out, _ = split_attention(op, q, k, v)
    return out[:, :, 0].to(q.dtype)


def split_attention(op: Op, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attends over each part of the context separately: o [batch, q_heads, splits, d], l [batch, q_heads,
    splits], at least fp32. An op without splits has one part."""
    splits = next((int(n) for name, n in op.shape if name == "splits" and isinstance(n, int)), 1)
    batch, heads, d = q.shape
    kv_heads, context = k.shape[1], k.shape[2]
    rows = wide(q).view(batch, kv_heads, heads // kv_heads, d) / math.sqrt(d)
    part = -(-context // splits)
    outputs, logs = [], []
    for start in range(0, splits * part, part):
        keys, values = (wide(x[:, :, start : start + part]) for x in (k, v))
        scores = rows @ keys.transpose(-1, -2)
        log = scores.logsumexp(-1)
        # An empty part has the weight 0, not 0 / 0.
        weights = (scores - log[..., None]).exp() if keys.shape[2] else scores
        outputs.append((weights @ values).reshape(batch, heads, d))
        logs.append(log.reshape(batch, heads))
    return torch.stack(outputs, 2), torch.stack(logs, 2)


def combine_splits(op: Op, outputs: Tensor, logs: Tensor) -> Tensor:
    """Sums the parts: o [batch, q_heads, splits, d] and l [batch, q_heads, splits] to [batch, q_heads, d]."""
    del op
    return (outputs * logs.softmax(-1)[..., None]).sum(2)


def flash_decoding(op: Op, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Runs both: q [batch, q_heads, d] over k, v [batch, kv_heads, context, d] to [batch, q_heads, d]."""
    return combine_splits(op, *split_attention(op, q, k, v)).to(q.dtype)


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    batch, d = op["batch"], op["head_dim"]
    cache = batch, op["kv_heads"], op["context"], d
    q = random_tensor(op, generator, device, batch, op["q_heads"], d)
    return q, *(random_tensor(op, generator, device, *cache) for _ in range(2))


def _partial_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    shape = op["batch"], op["q_heads"], op["splits"]
    outputs = wide(random_tensor(op, generator, device, *shape, op["head_dim"]))
    return outputs, wide(random_tensor(op, generator, device, *shape))


FLASH_DECODING: Mapping[str, Kernel] = {
    "flash_attention_2": Kernel(flash_attention_2, flash_attention_2, _inputs),
    "flash_decoding": Kernel(flash_decoding, flash_decoding, _inputs),
    "split_attention": Kernel(split_attention, split_attention, _inputs),
    "combine_splits": Kernel(combine_splits, combine_splits, _partial_inputs),
}
