"""Vanilla: all scores, the mask, the product. (q k^T o M) v, in O(N^2) (LeetDecoding, equation 4)."""

from torch import Tensor

from simcore.kernels.linear_attention.terms import (
    Result,
    mask,
    masked_product,
    prepared,
    state_after,
    weighed_queries,
)
from simcore.ops.op import Op


def vanilla(
    op: Op, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> Result:
    """Returns output [batch, heads, length, dim] and the state after it [batch, heads, rank, dim]."""
    dtype = q.dtype
    q, k, v, state = prepared(q, k, v, state)
    output = masked_product(q, k, v, mask(q.shape[-2], decay, q.dtype, q.device))
    if state is not None:
        output = output + weighed_queries(q, decay) @ state
    return output.to(dtype), state_after(k, v, decay, state)
