"""The inputs of a product of 8 bits.

y = x s, rounded to fp8 (e4m3), at most its largest number, with one scale s for all

Engines have this kernel before products whose inputs the op before does not write in 8 bits
(`simcore.models.decoder.Decoder`, `quantized`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.tensors import LARGEST_FP8, in_fp8
from simcore.kernels.gpu import launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op

# Elements of one program: two 16-byte accesses a thread.
BLOCK = 2048


def reference_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """As `quantize`, in plain torch and from any float dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return in_fp8(wide * scale.to(wide.dtype))


@triton.jit
def _quantize_kernel(
    x_ptr, y_ptr, scale_ptr, stride, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A piece of a row: program (row, piece)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.clamp(x * tl.load(scale_ptr), -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@launching
def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """Returns x [tokens, width] times `scale` (fp32 [1]) in fp8, [tokens, width]. Rows may be any distance
    apart. Raises ValueError if the elements of a row are not contiguous."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError("quantize takes rows whose elements are contiguous")
    tokens, width = x.shape
    y = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    _quantize_kernel[(tokens, triton.cdiv(width, BLOCK))](
        x, y, scale, x.stride(0), width, LARGEST=LARGEST_FP8.value, BLOCK=BLOCK, num_warps=4
    )
    return y


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    x = torch.randn(op["tokens"], op["width"], generator=generator, device=device).to(torch.bfloat16)
    # A power of two: nothing is rounded before the number becomes fp8.
    return x, torch.full((1,), 0.25, device=device)


def _reference(op: Op, x: Tensor, scale: Tensor) -> Tensor:
    del op
    return reference_quantize(x, scale)


def _run(op: Op, x: Tensor, scale: Tensor) -> Tensor:
    del op
    return quantize(x, scale)


QUANTIZE = Kernel(by_device(_run, _reference), _reference, _inputs)
