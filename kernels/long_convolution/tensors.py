"""Shared by the kernels of long convolutions: layouts, the format of sums, random tensors.

    y, z   [layers, batch, positions, channels]        of a block or a cell, which have one layer: no layers
    taps   [layers, 1 or batch, lags, channels]        one filter for all sequences, or one for each

Numbers of 16 bits are stored in 16 bits; sums and transforms are made in fp32.
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import dtype_of
from simcore.ops.op import DTYPE_BYTES, Op

# The formats that kernels take and store.
FORMATS = (torch.float32, torch.float16, torch.bfloat16)


def wide(x: Tensor) -> Tensor:
    """Returns the same numbers in the format of sums: a copy in fp32 of 16-bit numbers."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def put_back(total: Tensor, z: Tensor) -> Tensor:
    """Writes sums made in `wide(z)` into z, unless they are z itself; returns z."""
    return z if total is z else z.copy_(total)


# Of real numbers, those of all layers that are transformed at once: of fp32, 256 MiB.
MOST_NUMBERS = 1 << 26


def forward(x: Tensor, order: int) -> Tensor:
    """The real transform of x over positions, padded or cut to `order`: complex, order / 2 + 1 bins."""
    bins: Tensor = torch.fft.rfft(wide(x), order, dim=2)
    return bins


def back(bins: Tensor, order: int) -> Tensor:
    """Returns the inverse of `forward`, all `order` positions."""
    x: Tensor = torch.fft.irfft(bins, order, dim=2)
    return x


def layers_at_once(layers: int, numbers: int) -> list[slice]:
    """Returns layers of `numbers` each in groups of at least one that have up to MOST_NUMBERS together: what
    lies between transforms of all 36 layers of 768 channels and 131,072 positions would fill a card.

    >>> layers_at_once(3, 4), len(layers_at_once(36, 1 << 27))
    ([slice(0, 3, None)], 36)
    """
    each = max(1, MOST_NUMBERS // numbers)
    return [slice(first, min(first + each, layers)) for first in range(0, layers, each)]


def stored(op: Op) -> torch.dtype:
    """Returns the dtype of an op's stored numbers: fp16 if they are half as long as computed numbers."""
    dtype = dtype_of(op)
    return dtype if op["stored_bytes"] == DTYPE_BYTES[op.dtype] else torch.float16


def normal(
    op: Op, generator: torch.Generator, device: torch.device, *size: int, scale: float = 1.0
) -> Tensor:
    """Normal numbers of standard deviation `scale`, as an op stores them."""
    numbers = torch.randn(*size, generator=generator, device=device, dtype=dtype_of(op))
    return numbers.mul_(scale).to(stored(op))


def channels_last(x: Tensor) -> Tensor:
    """Returns x, or a copy whose channels, the last dimension, are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
