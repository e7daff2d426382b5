"""Filters that depend on data: the next tap, and products of pieces of y with pieces of k as they arrive.

tap    k_t = h_t (1 + tanh p_t)
cell   z_t += y_t k_0 + y_0 k_t                        (at t = 0 both are the same product, which counts once)
tile   z_(n+s) += sum over u + v = s of  y_u k_v + y'_u k'_v,        u, v < side,  s = 0 .. outputs - 1

(Flash Inference, Algorithm 3; van der Hoeven 1997.) The pieces y, k of a tile are of earlier and of the last
positions, y', k' of the last and of earlier ones. The whole product of two pieces has 2 side - 1 entries, for
which an order of 2 side is enough. Layouts: `simcore.kernels.long_convolution.tensors`.
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import Kernel
from simcore.kernels.long_convolution.direct import activations, random_taps
from simcore.kernels.long_convolution.tensors import back, forward, normal, put_back, wide
from simcore.ops.op import Op


def filter_tap(op: Op, p: Tensor, h: Tensor) -> Tensor:
    """The tap of each sequence, [batch, channels], from its projection p of that shape and h [channels]."""
    del op
    return (wide(h) * (1.0 + torch.tanh(wide(p)))).to(p.dtype)


def _tap_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return normal(op, generator, device, op["batch"], op["channels"]), normal(
        op, generator, device, op["channels"]
    )


def _pairs(operands: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], ...]:
    return tuple(zip(operands[::2], operands[1::2], strict=True))


def relaxed_cell(op: Op, *operands: Tensor) -> Tensor:
    """relaxed_cell(op, y_t, k_0, z) or (op, y_t, k_0, y_0, k_t, z): adds the products to z in place; all
    [batch, channels]. Returns z."""
    del op
    *factors, z = operands
    total = wide(z)
    for y, k in _pairs(tuple(factors)):
        total.addcmul_(wide(y), wide(k))
    return put_back(total, z)


def _cell_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(normal(op, generator, device, op["batch"], op["channels"]) for _ in range(5))


def relaxed_tile(op: Op, *operands: Tensor) -> Tensor:
    """relaxed_tile(op, y, k, z) or (op, y, k, y', k', z), by `op["products"]`: adds to z [layers, batch,
    outputs, channels] in place; y, k [layers, batch, side, channels]. Returns z."""
    *factors, z = operands
    order = 2 * op["side"]
    spectra = [forward(x, order) for x in factors]
    product = spectra[0] * spectra[1]
    if op["products"] == 2:
        product.addcmul_(spectra[2], spectra[3])
    return z.add_(back(product, order)[:, :, : op["outputs"]])


def relaxed_tile_by_row(op: Op, *operands: Tensor) -> Tensor:
    """`relaxed_tile` as a direct sum."""
    *factors, z = operands
    side, outputs, total = op["side"], op["outputs"], wide(z)
    for y, k in _pairs(tuple(factors)):
        for u in range(min(side, outputs)):
            last = min(outputs, u + side)
            total[:, :, u:last] += wide(y[:, :, u : u + 1]) * wide(k[:, :, : last - u])
    return put_back(total, z)


def _tile_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    layers, side = op["layers"], op["side"]
    found: list[Tensor] = []
    for _ in range(op["products"]):
        found.append(activations(op, generator, device, layers, side))
        found.append(random_taps(op, generator, device, layers, side, filters=op["batch"]))
    return *found, activations(op, generator, device, layers, op["outputs"])


FILTER_TAP = Kernel(filter_tap, filter_tap, _tap_inputs)
RELAXED_CELL = Kernel(relaxed_cell, relaxed_cell, _cell_inputs)
RELAXED_TILE = Kernel(relaxed_tile, relaxed_tile_by_row, _tile_inputs)
