"""Recursion: each half alone, then q_2 (k_1^T v_1) added to the later one, O(N log N) (Algorithms 3, 4).

A base case of at most op["block"] rows is the causal dot product, or, with a decay, the masked product.
"""

import torch
from torch import Tensor

from simcore.kernels.linear_attention.causal_dot_product import causal_dot_product
from simcore.kernels.linear_attention.terms import (
    Result,
    mask,
    masked_product,
    prepared,
    state_after,
    weighed_keys,
    weighed_queries,
)
from simcore.ops.op import Op


def recursion(
    op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> Result:
    """Returns output [batch, heads, length, dim] and the state after it [batch, heads, rank, dim]."""
    dtype = q.dtype
    q, k, v, state = prepared(q, k, v, state)
    output = torch.empty_like(v)
    _fill(op, q, k, v, decay, output)
    if state is not None:
        output += weighed_queries(q, decay) @ state
    return output.to(dtype), state_after(k, v, decay, state)


def _fill(op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, output: Tensor) -> None:
    rows = q.shape[-2]
    if rows <= op["block"]:
        if decay is None:
            output.copy_(causal_dot_product(op, q, k, v)[0])
        else:
            output.copy_(masked_product(q, k, v, mask(rows, decay, q.dtype, q.device)))
        return
    half = rows // 2
    earlier, later = (slice(None), slice(None), slice(half)), (slice(None), slice(None), slice(half, None))
    _fill(op, q[earlier], k[earlier], v[earlier], decay, output[earlier])
    _fill(op, q[later], k[later], v[later], decay, output[later])
    state = weighed_keys(k[earlier], decay).transpose(-1, -2) @ v[earlier]
    output[later] += weighed_queries(q[later], decay) @ state
