"""Any mixer in the form of Algorithm 2: contributions, their aggregation, and the read of the aggregate.

    cont(y, i, j) = (q_i, w_(j-i) key_i y_i^T)        an element of X = R^state x R^(state x channels)
    agg((q, S), (q', S')) = (q', S + S')              associative; not commutative: the last query stays
    read((q, S)) = q S

    convolution        state 1, q = key = 1, w_lag = k_lag of each channel: the sum of Equation 2
    linear attention   state = rank, q and key projections of y, w_lag = gamma^lag        (causal, with decay)

(Flash Inference, sections 3.1 and 3.2.) If w_(a+b) = w_a w_b, a tile is separable: one sum over its inputs is
spread over its outputs.

    y [layers, batch, positions, channels]    key, query [layers, batch, positions, state]
    S [layers, batch, positions, state, channels]     w [layers, lags, channels or 1], from lag 0 on

Cells and reads have one layer and one position, and neither dimension.
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import Kernel
from simcore.kernels.long_convolution.tensors import normal, put_back, wide
from simcore.ops.op import Op


def generic_cell(op: Op, y: Tensor, key: Tensor, query: Tensor, w: Tensor, s: Tensor, q: Tensor) -> Tensor:
    """x_t = agg(x_t, cont(y, t, t)) in place, x_t = (q, s); w of lag 0, [channels or 1]. Returns s."""
    del op
    q.copy_(query)
    return put_back(wide(s).addcmul_(wide(key)[..., None], wide(y * w)[..., None, :]), s)


def generic_read(op: Op, s: Tensor, q: Tensor) -> Tensor:
    """Returns read(x_t): [batch, channels]."""
    del op
    return (wide(q)[..., None] * wide(s)).sum(-2).to(s.dtype)


def generic_tile(op: Op, y: Tensor, key: Tensor, query: Tensor, w: Tensor, s: Tensor, q: Tensor) -> Tensor:
    """x_j = agg(x_j, the contributions of all `side` inputs to j) in place, for the `outputs` positions j
    behind them; query: of the last input, [layers, batch, state]. Returns s."""
    side, outputs = op["side"], op["outputs"]
    if not op["separable"]:
        return generic_tile_by_row(op, y, key, query, w, s, q)
    q.copy_(query[:, :, None].expand_as(q))
    # The inputs' contributions to the position of the last input, then spread by distance from there.
    there = wide(y) * wide(w[:, :side].flip(1))[:, None]
    total = wide(key).transpose(2, 3) @ there
    further = wide(w[:, 1 : outputs + 1])[:, None, :, None]
    return put_back(wide(s).addcmul_(further, total[:, :, None]), s)


def generic_tile_by_row(
    op: Op, y: Tensor, key: Tensor, query: Tensor, w: Tensor, s: Tensor, q: Tensor
) -> Tensor:
    """`generic_tile` for any w, one input after another."""
    side, outputs, total = op["side"], op["outputs"], wide(s)
    q.copy_(query[:, :, None].expand_as(q))
    for u in range(side):
        at_once = wide(key[:, :, u, :, None]) * wide(y[:, :, u, None, :])
        lags = wide(w[:, side - u : side - u + outputs])
        total.addcmul_(at_once[:, :, None], lags[:, None, :, None])
    return put_back(total, s)


def _cell_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    batch, channels, state = op["batch"], op["channels"], op["state"]
    sizes = ((batch, channels), (batch, state), (batch, state), (channels,))
    found = (normal(op, generator, device, *size) for size in sizes)
    return *found, *_read_inputs(op, generator, device)


def _read_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    batch, channels, state = op["batch"], op["channels"], op["state"]
    return normal(op, generator, device, batch, state, channels), normal(op, generator, device, batch, state)


def _tile_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    layers, batch, channels, state = (op[name] for name in ("layers", "batch", "channels", "state"))
    side, outputs = op["side"], op["outputs"]
    sizes = ((side, channels), (side, state), (state,))
    y, key, query = (normal(op, generator, device, layers, batch, *size) for size in sizes)
    lags = torch.arange(side + outputs, device=device)
    gamma = 1.0 - 0.1 * torch.rand(layers, generator=generator, device=device, dtype=torch.float64)
    w = (gamma[:, None, None] ** lags[:, None]).to(y.dtype)
    if not op["separable"]:
        w = w * normal(op, generator, device, layers, side + outputs, channels)
    s = normal(op, generator, device, layers, batch, outputs, state, channels)
    return y, key, query, w, s, normal(op, generator, device, layers, batch, outputs, state)


GENERIC_CELL = Kernel(generic_cell, generic_cell, _cell_inputs)
GENERIC_READ = Kernel(generic_read, generic_read, _read_inputs)
GENERIC_TILE = Kernel(generic_tile, generic_tile_by_row, _tile_inputs)
