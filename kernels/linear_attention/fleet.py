"""FleetAttention: the sum over columns b_i, c_i of q and k of b_i * sums(c_i * v), in O(N r d).

`sums` is the running sum with decay (LeetDecoding, equation 5 and appendix C.1). Algorithm 5 carries l^i from
one block of rows to the next; l^i is row i of the state.
"""

import torch
from torch import Tensor

from simcore.kernels.linear_attention.terms import Result, decayed, powers, prepared, zero_state
from simcore.ops.op import Op


def fleet(
    op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> Result:
    """Returns output [batch, heads, length, dim] and the state after it [batch, heads, rank, dim]."""
    dtype = q.dtype
    q, k, v, state = prepared(q, k, v, state)
    state = zero_state(k, v) if state is None else decayed(state, decay, 1)
    output, last = torch.zeros_like(v), torch.empty_like(state)
    for i in range(q.shape[-1]):
        summands = k[..., i : i + 1] * v
        summands[:, :, 0] += state[:, :, i]
        sums = running_sums(summands, decay)
        output += q[..., i : i + 1] * sums
        last[:, :, i] = sums[:, :, -1]
    return output.to(dtype), last


def running_sums(x: Tensor, decay: Tensor | None) -> Tensor:
    """Returns y_i = gamma y_(i-1) + x_i over the rows of x [batch, heads, length, dim].

    With a decay by doubling (Hillis and Steele 1986): after the pass at distance s, y_i holds 2 s rows.
    """
    if decay is None:
        return x.cumsum(-2)
    distance = 1
    while distance < x.shape[-2]:
        weight = powers(decay, torch.full((1, 1), distance, device=x.device), x.dtype)
        x = torch.cat((x[:, :, :distance], x[:, :, distance:] + weight * x[:, :, :-distance]), -2)
        distance *= 2
    return x
