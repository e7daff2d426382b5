"""Shared by the decoder's kernels: the format of sums, and random tensors."""

import torch

from simcore.kernels.kernel import dtype_of
from simcore.ops.op import Op


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns the same numbers in the format of sums: fp32 for 16-bit numbers."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def random_tensor(
    op: Op, generator: torch.Generator, device: torch.device, *size: int, scale: float = 1.0
) -> torch.Tensor:
    """Draws normal numbers of standard deviation `scale` in the dtype of an op."""
    dtype = dtype_of(op)
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    numbers = torch.randn(*size, generator=generator, device=device, dtype=drawn)
    return numbers.mul_(scale).to(dtype)
