"""Shared by the decoder's kernels: the format of sums, fp8, and random tensors."""

import torch
import triton.language as tl

from simcore.kernels.kernel import dtype_of
from simcore.ops.op import Op

# The largest number of fp8 (e4m3fn), which has no infinity to round to: torch turns what is beyond into NaN.
LARGEST_FP8 = tl.constexpr(448.0)


def in_fp8(x: torch.Tensor) -> torch.Tensor:
    """Returns numbers in fp8, what is beyond its largest as that."""
    return x.clamp(-LARGEST_FP8.value, LARGEST_FP8.value).to(torch.float8_e4m3fn)


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
