"""Convolutions by FFT: the square tile with cached spectra, and stretches of any length.

    tile      z_(U+v) += irfft(rfft(y, 2U) K)[U + v],   K = rfft(k_0 .. k_(2U-1)),   v < U = side
    span      z_n = irfft(rfft(y, N) rfft(k, N))[n],    N = span_order(inputs, outputs)

In a cyclic convolution of order 2U, the entries from U on equal those of the plain one: the last index of the
plain one is 3U - 2, which wraps to U - 2 (Flash Inference, App. C). A carry needs no tap at lag 0, so it
reads one lag later and wraps in the same order as a prompt. Layouts:
`simcore.kernels.long_convolution.tensors`.
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import Kernel, has_kernel
from simcore.kernels.long_convolution.direct import accumulate, activations, direct_tile, random_taps
from simcore.kernels.long_convolution.tensors import back, channels_last, forward, layers_at_once, wide
from simcore.kernels.long_convolution.triton_fft import (
    fft_tile,
    is_transformed,
    reference_fft_tile,
    right_angle_spectrum,
)
from simcore.ops.convolution import span_order
from simcore.ops.op import Op

# -- tiles ---------------------------------------------------------------------------------------------


def spectrum(taps: Tensor, side: int) -> Tensor:
    """Returns the spectrum that tiles of a side cache: the transform of order 2 side of the taps from lag 0
    on (lags beyond a short filter are 0), complex [layers, 1 or batch, side + 1, channels]."""
    layers, filters, _, channels = taps.shape
    parts = layers_at_once(layers, filters * channels * 2 * side)
    found = forward(taps[parts[0], :, : 2 * side], 2 * side)
    if len(parts) == 1:
        return found
    every = found.new_empty(layers, *found.shape[1:])
    every[parts[0]] = found
    for part in parts[1:]:
        every[part] = forward(taps[part, :, : 2 * side], 2 * side)
    return every


def tile_spectrum(kind: str, taps: Tensor, side: int) -> Tensor:
    """Returns the spectrum that tiles of an op's kind and of a side cache of the taps [layers, 1 or batch,
    lags, channels] from lag 0 on: the `right_angle_spectrum` if a kernel takes it, else the `spectrum`."""
    fused = kind == "tile_flash_fft" and is_transformed(side) and has_kernel(taps)
    return right_angle_spectrum(taps, side) if fused else spectrum(taps, side)


def rfft(op: Op, y: Tensor) -> Tensor:
    """Returns the transform of y [layers, batch, side, channels], padded: complex, side + 1 bins."""
    return forward(y, 2 * op["side"])


def spectrum_product(op: Op, transformed: Tensor, cached: Tensor) -> Tensor:
    """Multiplies bin by bin: complex [layers, batch, side + 1, channels]."""
    del op
    return transformed * cached


def irfft(op: Op, product: Tensor) -> Tensor:
    """Transforms back to [layers, batch, 2 side, channels]."""
    return back(product, 2 * op["side"])


def tile_fft(op: Op, y: Tensor, cached: Tensor, z: Tensor) -> Tensor:
    """Adds the terms of y [layers, batch, side, channels] to z [layers, batch, outputs, channels] in place,
    by the cached spectrum of the taps; returns z."""
    for part in fft_parts(op, y):
        more = outputs_by_fft(op, y[part], cached[part])
        accumulate(op, more, z[part])
    return z


def fft_parts(op: Op, y: Tensor) -> list[slice]:
    """Returns the layers of a tile that are transformed at once."""
    layers, batch, _, channels = y.shape
    return layers_at_once(layers, batch * channels * 2 * op["side"])


def outputs_by_fft(op: Op, y: Tensor, cached: Tensor) -> Tensor:
    """Returns the terms of y [layers, batch, side, channels] at a tile's outputs, [layers, batch, outputs,
    channels]; all layers at once."""
    both = irfft(op, spectrum_product(op, rfft(op, y), cached))
    return both.narrow(2, op["side"], op["outputs"])


def tile_of_spectrum(op: Op, y: Tensor, cached: Tensor, z: Tensor) -> Tensor:
    """`tile_fft` as a direct sum, with the taps of the spectrum."""
    side = op["side"]
    taps = back(cached, 2 * side)
    return direct_tile(op, y, taps[:, :, 1 : side + op["outputs"]], z)


def tile_flash_fft(op: Op, y: Tensor, cached: Tensor, z: Tensor) -> Tensor:
    """`tile_fft`, by one kernel if `tile_spectrum` has cached that kernel's spectrum. Elsewhere the fused op
    runs the same as `tile_fft`: on a CPU small intermediate results stay in the caches."""
    return tile_fft(op, y, cached, z) if cached.is_complex() else fft_tile(channels_last(y), cached, z)


def flash_tile_of_spectrum(op: Op, y: Tensor, cached: Tensor, z: Tensor) -> Tensor:
    """`tile_flash_fft` in plain torch."""
    return tile_of_spectrum(op, y, cached, z) if cached.is_complex() else reference_fft_tile(y, cached, z)


def _tile_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    layers, side, outputs = op["layers"], op["side"], op["outputs"]
    y, z = (activations(op, generator, device, layers, n) for n in (side, outputs))
    return y, tile_spectrum(op.kind, random_taps(op, generator, device, layers, 2 * side), side), z


def _rfft_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return _tile_inputs(op, generator, device)[:1]


def _product_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    y, cached, _ = _tile_inputs(op, generator, device)
    return rfft(op, y), cached


def _irfft_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return (spectrum_product(op, *_product_inputs(op, generator, device)),)


# -- stretches -----------------------------------------------------------------------------------------


def _span(op: Op, y: Tensor, taps: Tensor) -> Tensor:
    order = span_order(op["inputs"], op["outputs"])
    return back(forward(y, order) * forward(taps, order), order)


def conv_prefill(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Adds the terms of a prompt y [1, batch, inputs, channels] to z [1, batch, outputs, channels], both from
    position 0 on, in place; taps at lags 0 to outputs - 1. Returns z."""
    return z.add_(_span(op, y, taps)[:, :, : op["outputs"]])


def prefill_by_row(op: Op, y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """`conv_prefill`, one input after another."""
    outputs = op["outputs"]
    for i in range(min(op["inputs"], outputs)):
        z[:, :, i:] += wide(y[:, :, i : i + 1]) * wide(taps[:, :, : outputs - i])
    return z


def conv_carry(op: Op, taps: Tensor, y: Tensor) -> Tensor:
    """Replaces the first `outputs` positions of y [1, batch, inputs, channels] by the sums of its terms at
    the `outputs` positions behind y, and the rest by 0; returns y. Taps at lags 1 to inputs + outputs - 1."""
    inputs, outputs = op["inputs"], op["outputs"]
    z = _span(op, y, taps)[:, :, inputs - 1 : inputs - 1 + outputs]
    y[:, :, :outputs] = z
    y[:, :, outputs:] = 0
    return y


def carry_by_row(op: Op, taps: Tensor, y: Tensor) -> Tensor:
    """`conv_carry`, one output after another."""
    inputs, outputs = op["inputs"], op["outputs"]
    rows = [(wide(y) * wide(taps[:, :, j : j + inputs].flip(2))).sum(2, keepdim=True) for j in range(outputs)]
    y.zero_()
    y[:, :, :outputs] = torch.cat(rows, 2)
    return y


def _prefill_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    y, z = (activations(op, generator, device, 1, n) for n in (op["inputs"], op["outputs"]))
    return y, random_taps(op, generator, device, 1, op["outputs"]), z


def _carry_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    inputs, outputs = op["inputs"], op["outputs"]
    taps = random_taps(op, generator, device, 1, inputs + outputs - 1)
    return taps, activations(op, generator, device, 1, inputs)


TILE_FFT = Kernel(tile_fft, tile_of_spectrum, _tile_inputs)
TILE_FLASH_FFT = Kernel(tile_flash_fft, flash_tile_of_spectrum, _tile_inputs)
RFFT = Kernel(rfft, rfft, _rfft_inputs)
SPECTRUM_PRODUCT = Kernel(spectrum_product, spectrum_product, _product_inputs)
IRFFT = Kernel(irfft, irfft, _irfft_inputs)
CONV_PREFILL = Kernel(conv_prefill, prefill_by_row, _prefill_inputs)
CONV_CARRY = Kernel(conv_carry, carry_by_row, _carry_inputs)
