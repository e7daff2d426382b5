"""The specification: the explicit sum in float64, pair by pair.

    out_i = gamma^(i+1) q_i S + sum_(j <= i) gamma^(i-j) (q_i . k_j) v_j

It shares no code with the methods, so that they can be checked against it.
"""

import torch
from torch import Tensor


def naive(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and final state in float64; q, k [batch, heads, length, rank], v [.., dim], decay [heads]."""
    q, k, v = q.double(), k.double(), v.double()
    batch, heads, length, rank = q.shape
    gamma = torch.ones(heads, dtype=torch.float64, device=q.device) if decay is None else decay.double()
    before = torch.zeros(batch, heads, rank, v.shape[-1], dtype=torch.float64, device=q.device)
    before = before if state is None else state.double()
    rows = []
    for i in range(length):
        rest = torch.arange(i, -1, -1, device=q.device)
        weights = (gamma[:, None] ** rest) * torch.einsum("bhr,bhjr->bhj", q[:, :, i], k[:, :, : i + 1])
        start = torch.einsum("bhr,bhrd->bhd", q[:, :, i], before) * gamma[:, None] ** (i + 1)
        rows.append(start + torch.einsum("bhj,bhjd->bhd", weights, v[:, :, : i + 1]))
    left = gamma[:, None] ** torch.arange(length - 1, -1, -1, device=q.device)
    last = torch.einsum("hj,bhjr,bhjd->bhrd", left, k, v)
    return torch.stack(rows, 2), last + before * gamma[:, None, None] ** length
