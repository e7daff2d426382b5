"""Block-based: inside a block as vanilla, all rows before the block through the state (Algorithm 2).

out_[t] = (q_[t] k_[t]^T o M) v_[t] + (gamma^(i+1) q_i)_[t] S_[t-1]
S_[t]   = gamma^B S_[t-1] + (gamma^(B-1-j) k_j)_[t]^T v_[t]
"""

import torch
from torch import Tensor

from simcore.kernels.linear_attention.terms import (
    Result,
    mask,
    masked_product,
    prepared,
    state_after,
    weighed_queries,
    zero_state,
)
from simcore.ops.op import Op


def block_based(
    op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> Result:
    """Returns output [batch, heads, length, dim] and the state after it; blocks of op["block"] rows."""
    dtype, length, block = q.dtype, q.shape[-2], op["block"]
    q, k, v, state = prepared(q, k, v, state)
    state = zero_state(k, v) if state is None else state
    weights = mask(min(block, length), decay, q.dtype, q.device)
    output = torch.empty_like(v)
    for start in range(0, length, block):
        rows = slice(start, start + block)
        queries, keys, values = q[:, :, rows], k[:, :, rows], v[:, :, rows]
        n = queries.shape[-2]
        inside = masked_product(queries, keys, values, weights[..., :n, :n])
        output[:, :, rows] = inside + weighed_queries(queries, decay) @ state
        state = state_after(keys, values, decay, state)
    return output.to(dtype), state
