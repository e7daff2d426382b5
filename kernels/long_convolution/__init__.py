"""Kernels of long convolutions, in every tiling of Flash Inference: op kind -> kernel.

Each adds in place to its last argument, or returns a new tensor; its docstring gives its arguments. The parts
of the tiles that a framework runs as several kernels are included.
"""

from collections.abc import Mapping

from simcore.kernels.kernel import Kernel
from simcore.kernels.long_convolution.blocks import GATE, NEXT_INPUT
from simcore.kernels.long_convolution.direct import (
    ACCUMULATE,
    CONV_CELL,
    CONV_COLUMN,
    CONV_ROW,
    DEPTHWISE_CONV,
    PAD,
    TILE_CONV,
    TILE_FLASH_CONV,
)
from simcore.kernels.long_convolution.generic import GENERIC_CELL, GENERIC_READ, GENERIC_TILE
from simcore.kernels.long_convolution.relaxed import FILTER_TAP, RELAXED_CELL, RELAXED_TILE
from simcore.kernels.long_convolution.spectral import (
    CONV_CARRY,
    CONV_PREFILL,
    IRFFT,
    RFFT,
    SPECTRUM_PRODUCT,
    TILE_FFT,
    TILE_FLASH_FFT,
)
from simcore.kernels.long_convolution.token_step import TOKEN_STEP

LONG_CONVOLUTION: Mapping[str, Kernel] = {
    "conv_cell": CONV_CELL,
    "conv_row": CONV_ROW,
    "conv_column": CONV_COLUMN,
    "gate": GATE,
    "next_input": NEXT_INPUT,
    "token_step": TOKEN_STEP,
    "tile_conv": TILE_CONV,
    "tile_flash_conv": TILE_FLASH_CONV,
    "tile_fft": TILE_FFT,
    "tile_flash_fft": TILE_FLASH_FFT,
    "pad": PAD,
    "depthwise_conv": DEPTHWISE_CONV,
    "accumulate": ACCUMULATE,
    "rfft": RFFT,
    "spectrum_product": SPECTRUM_PRODUCT,
    "irfft": IRFFT,
    "conv_prefill": CONV_PREFILL,
    "conv_carry": CONV_CARRY,
    "filter_tap": FILTER_TAP,
    "relaxed_cell": RELAXED_CELL,
    "relaxed_tile": RELAXED_TILE,
    "generic_cell": GENERIC_CELL,
    "generic_read": GENERIC_READ,
    "generic_tile": GENERIC_TILE,
}
