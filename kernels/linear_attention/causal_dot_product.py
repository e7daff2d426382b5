"""Causal dot product: S = gamma S + k_i^T v_i, out_i = q_i S, row by row, O(N r d) (Algorithm 1)."""

import torch
from torch import Tensor

from simcore.kernels.linear_attention.terms import Result, powers, prepared, zero_state
from simcore.ops.op import Op


def causal_dot_product(
    op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> Result:
    """Returns output [batch, heads, length, dim] and the state after it [batch, heads, rank, dim]."""
    dtype = q.dtype
    q, k, v, state = prepared(q, k, v, state)
    state = zero_state(k, v) if state is None else state.clone()
    # [heads, 1, 1], broadcast over the batch.
    gamma = None if decay is None else powers(decay, torch.ones(1, 1, device=q.device), q.dtype)
    output = torch.empty_like(v)
    for i in range(q.shape[-2]):
        row = slice(i, i + 1)
        if gamma is not None:
            state *= gamma
        state += k[:, :, row].transpose(-1, -2) * v[:, :, row]
        output[:, :, row] = q[:, :, row] @ state
    return output.to(dtype), state
