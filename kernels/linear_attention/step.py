"""One token of linear attention: S = gamma S + k^T v in place, out = q S. The same work at any position."""

import torch
from torch import Tensor

from simcore.kernels.linear_attention.terms import Result, powers
from simcore.ops.op import Op


def step(op: Op, q: Tensor, k: Tensor, v: Tensor, state: Tensor, decay: Tensor | None = None) -> Result:
    """Returns output [batch, heads, 1, dim] and `state`, updated in place in its own dtype."""
    if decay is not None:
        state *= powers(decay, torch.ones(1, 1, device=state.device), state.dtype)
    state += k.to(state.dtype).transpose(-1, -2) * v.to(state.dtype)
    return (q.to(state.dtype) @ state).to(q.dtype), state
