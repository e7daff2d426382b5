"""Shared by the methods: powers of the decay, and the two ends of a run of tokens.

    carried_i  gamma^(i+1) q_i S                      the share of an earlier state in output i
    state      gamma^N S + sum_j gamma^(N-1-j) k_j^T v_j   the state after N tokens

All exponents are at least 0, so that nothing overflows however strong the decay is. Weights are computed in
float64 and rounded once. `decay` is [heads], or None for 1; q and k are [batch, heads, length, rank], v is
[batch, heads, length, dim], states are [batch, heads, rank, dim].
"""

import torch
from torch import Tensor

Result = tuple[Tensor, Tensor]  # output, final state


def accumulated_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums: float32 for half-precision numbers, else the numbers' own."""
    return torch.promote_types(dtype, torch.float32)


def powers(decay: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns decay[h] ** exponents, [heads, *exponents.shape]."""
    bases = decay.double().reshape(-1, *[1] * exponents.dim())
    return (bases**exponents).to(dtype)


def _weighed(x: Tensor, decay: Tensor, exponents: Tensor) -> Tensor:
    """Returns row i of x [batch, heads, length, n] times decay ** exponents[i]."""
    return x * powers(decay, exponents, x.dtype).unsqueeze(-1)


def weighed_queries(q: Tensor, decay: Tensor | None) -> Tensor:
    """Returns gamma^(i+1) q_i: row i is weighed with the share left of the state before the first row."""
    if decay is None:
        return q
    return _weighed(q, decay, torch.arange(1, q.shape[-2] + 1, device=q.device))


def weighed_keys(k: Tensor, decay: Tensor | None) -> Tensor:
    """Returns gamma^(N-1-j) k_j: row j is weighed with its share left at the last row."""
    if decay is None:
        return k
    return _weighed(k, decay, torch.arange(k.shape[-2] - 1, -1, -1, device=k.device))


def decayed(state: Tensor, decay: Tensor | None, rows: int) -> Tensor:
    """Returns gamma^rows S."""
    if decay is None:
        return state
    # Made on the device: a capture cannot copy from the host.
    return state * powers(decay, torch.full((1, 1), rows, device=state.device), state.dtype)


def state_after(k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor | None) -> Tensor:
    """Returns the state after all rows of k and v, from `state` (None: zero) before the first."""
    new = weighed_keys(k, decay).transpose(-1, -2) @ v
    return new if state is None else new + decayed(state, decay, k.shape[-2])


def mask(rows: int, decay: Tensor | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns gamma^(i-j) where j <= i, else 0: [rows, rows], or [heads, rows, rows] with a decay."""
    if decay is None:
        return torch.ones(rows, rows, dtype=dtype, device=device).tril()
    row = torch.arange(rows, device=device)
    distance = (row.unsqueeze(-1) - row).clamp(min=0)
    return powers(decay, distance, dtype).tril()


def masked_product(q: Tensor, k: Tensor, v: Tensor, weights: Tensor) -> Tensor:
    """Returns (q k^T o weights) v."""
    return ((q @ k.transpose(-1, -2)) * weights) @ v


def zero_state(k: Tensor, v: Tensor) -> Tensor:
    """Returns S before any token."""
    return torch.zeros(*k.shape[:-2], k.shape[-1], v.shape[-1], dtype=k.dtype, device=k.device)


def prepared(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Converts all to the dtype of sums."""
    dtype = accumulated_in(q.dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), None if state is None else state.to(dtype)
