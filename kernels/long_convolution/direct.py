"""Direct sums of contributions: cell, row, column and the square tile.

cell    z_t     += y_t k_0
row     z_t     += sum over the `inputs` positions i before t of  y_i k_(t-i)
column  z_(t+j) += y_t k_j                                        for j = 1 .. outputs
tile    z_(U+v) += sum over u < U of  y_u k_(U+v-u)               for v = 0 .. outputs - 1     (U = side)

All except the cell take their taps from lag 1 on. Layouts: `simcore.kernels.long_convolution.tensors`. On a
GPU the kernels of `triton_rows` and `triton_direct` run.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from simcore.kernels.kernel import Kernel, Run, by_device
from simcore.kernels.long_convolution.tensors import channels_last, normal, put_back, wide
from simcore.kernels.long_convolution.triton_direct import direct_tile as triton_tile
from simcore.kernels.long_convolution.triton_rows import conv_cell as triton_cell
from simcore.kernels.long_convolution.triton_rows import conv_column as triton_column
from simcore.kernels.long_convolution.triton_rows import conv_row as triton_row
from simcore.ops.op import Op

# The tap at lag j of random inputs has the size TAP / (1 + j): sums stay small at any length.
TAP = 0.5


def random_taps(
    op: Op, generator: torch.Generator, device: torch.device, layers: int, lags: int, filters: int = 1
) -> Tensor:
    """Draws decaying taps [layers, filters, lags, channels]."""
    falling = TAP / torch.arange(1, lags + 1, device=device)
    taps = normal(op, generator, device, layers, filters, lags, op["channels"])
    return taps.mul_(falling[:, None])


def activations(
    op: Op, generator: torch.Generator, device: torch.device, layers: int, positions: int
) -> Tensor:
    """Draws random [layers, batch, positions, channels]."""
    return normal(op, generator, device, layers, op["batch"], positions, op["channels"])


# -- one position --------------------------------------------------------------------------------------


def conv_cell(op: Op, y: Tensor, tap: Tensor, z: Tensor) -> Tensor:
    """Adds y [batch, channels] times tap [1 or batch, channels] to z in place; returns z."""
    del op
    return put_back(wide(z).addcmul_(wide(y), wide(tap)), z)


def _cell_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    y, z = activations(op, generator, device, 2, 1)[:, :, 0]
    return y, random_taps(op, generator, device, 1, 1)[0, :, 0], z


def conv_row(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Adds terms of y [layers, batch, inputs, channels] to z [layers, batch, channels], in place."""
    del op
    return z.add_((wide(y) * wide(taps.flip(2))).sum(2))


def row_by_row(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """`conv_row`, one input after another."""
    inputs, total = op["inputs"], wide(z)
    for i in range(inputs):
        total.addcmul_(wide(y[:, :, i]), wide(taps[:, :, inputs - 1 - i]))
    return put_back(total, z)


def _row_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    layers, inputs = op["layers"], op["inputs"]
    y, z = (activations(op, generator, device, layers, n) for n in (inputs, 1))
    return y, random_taps(op, generator, device, layers, inputs), z[:, :, 0]


def conv_column(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Adds terms of y [layers, batch, channels] to z [layers, batch, outputs, channels], in place."""
    del op
    return put_back(wide(z).addcmul_(wide(y)[:, :, None], wide(taps)), z)


def column_by_row(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """`conv_column`, one output after another."""
    total = wide(z)
    for j in range(op["outputs"]):
        total[:, :, j] += wide(y) * wide(taps[:, :, j])
    return put_back(total, z)


def _column_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    layers, outputs = op["layers"], op["outputs"]
    y, z = (activations(op, generator, device, layers, n) for n in (1, outputs))
    return y[:, :, 0], random_taps(op, generator, device, layers, outputs), z


# -- a tile --------------------------------------------------------------------------------------------


def direct_tile(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Adds the terms of y [layers, batch, side, channels] to z [layers, batch, outputs, channels] in place,
    one input after another and without intermediate results; taps at lags 1 to side + outputs - 1."""
    side, outputs = op["side"], op["outputs"]
    y, taps, total = wide(y), wide(taps), wide(z)
    for u in range(side):
        first = side - 1 - u
        total.addcmul_(y[:, :, u : u + 1], taps[:, :, first : first + outputs])
    return put_back(total, z)


def tile_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Returns (y, taps, z) of a tile."""
    layers, side, outputs = op["layers"], op["side"], op["outputs"]
    y, z = (activations(op, generator, device, layers, n) for n in (side, outputs))
    return y, random_taps(op, generator, device, layers, side + outputs - 1), z


def pad(op: Op, y: Tensor) -> Tensor:
    """Pads y [layers, batch, side, channels] with outputs - 1 zeros before and behind, as a framework's
    depthwise convolution takes it: [batch, layers channels, side + 2 outputs - 2]."""
    rows = wide(y).permute(1, 0, 3, 2).flatten(1, 2)
    return functional.pad(rows, (op["outputs"] - 1,) * 2)


def depthwise_conv(op: Op, padded: Tensor, taps: Tensor) -> Tensor:
    """Convolves padded inputs: [layers, batch, outputs, channels]. All sequences share the taps."""
    weight = wide(taps)[:, 0].flip(1).transpose(1, 2).flatten(0, 1)[:, None]
    z = functional.conv1d(padded, weight, groups=len(weight))
    return z.view(len(z), len(taps), op["channels"], -1).permute(1, 0, 3, 2)


def accumulate(op: Op, more: Tensor, z: Tensor) -> Tensor:
    """Adds `more` to z, both [layers, batch, outputs, channels], in place; returns z."""
    del op
    return z.add_(more)


def tile_conv(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """`direct_tile` as three kernels of a framework. Raises ValueError if each sequence has its own filter,
    which a depthwise convolution cannot take."""
    if taps.shape[1] != 1:
        raise ValueError(f"tile_conv needs one filter for all sequences; there are {taps.shape[1]}")
    return accumulate(op, depthwise_conv(op, pad(op, y), taps), z)


def _pad_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return tile_inputs(op, generator, device)[:1]


def _depthwise_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    y, taps, _ = tile_inputs(op, generator, device)
    return pad(op, y), taps


def _accumulate_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    more, z = (activations(op, generator, device, op["layers"], op["outputs"]) for _ in range(2))
    return wide(more), z


def _launch(kernel: Callable[..., Tensor]) -> Run:
    """Makes a `run` of a kernel that learns all from its tensors: y, taps and the tensor it adds to."""
    return lambda op, y, taps, z: kernel(channels_last(y), channels_last(taps), z)


CONV_CELL = Kernel(by_device(_launch(triton_cell), conv_cell), conv_cell, _cell_inputs)
CONV_ROW = Kernel(by_device(_launch(triton_row), conv_row), row_by_row, _row_inputs)
CONV_COLUMN = Kernel(by_device(_launch(triton_column), conv_column), column_by_row, _column_inputs)
TILE_FLASH_CONV = Kernel(by_device(_launch(triton_tile), direct_tile), direct_tile, tile_inputs)
TILE_CONV = Kernel(tile_conv, direct_tile, tile_inputs)
PAD = Kernel(pad, pad, _pad_inputs)
DEPTHWISE_CONV = Kernel(depthwise_conv, depthwise_conv, _depthwise_inputs)
ACCUMULATE = Kernel(accumulate, accumulate, _accumulate_inputs)
