"""The residual stream.

x += y
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op

# Elements of one program: one 16-byte access a thread if an element has 2 bytes.
BLOCK = 1024


def reference_residual(y: Tensor, x: Tensor) -> Tensor:
    """As `residual`, in plain torch and in any float dtype."""
    return x.add_(y)


@triton.jit
def _residual_kernel(
    y_ptr, x_ptr, gate_ptr, y_stride, x_stride, hidden, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """A piece of a row: program (row, piece)."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    y = tl.load(y_ptr + row * y_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * x_stride + columns, (x + y).to(x_ptr.dtype.element_ty), mask=inside)


@launching
def residual(y: Tensor, x: Tensor, *, gate: Tensor | None = None) -> Tensor:
    """Adds y [tokens, hidden] to x in place and returns x. With a `gate` (int32 [1]) of 0 it adds nothing.
    Rows may be any distance apart. Raises ValueError if the elements of a row are not contiguous."""
    if x.stride(-1) != 1 or y.stride(-1) != 1 or x.shape != y.shape:
        raise ValueError("residual takes two tensors of one size, their rows contiguous")
    tokens, hidden = x.shape
    _residual_kernel[(tokens, triton.cdiv(hidden, BLOCK))](
        y, x, gate, y.stride(0), x.stride(0), hidden, GATED=gate is not None, BLOCK=BLOCK, num_warps=4
    )
    return x


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["tokens"], op["hidden"]
    return random_tensor(op, generator, device, *size), random_tensor(op, generator, device, *size)


def _reference(op: Op, y: Tensor, x: Tensor) -> Tensor:
    del op
    return reference_residual(y, x)


def _run(op: Op, y: Tensor, x: Tensor) -> Tensor:
    del op
    return residual(y, x)


RESIDUAL = Kernel(by_device(_run, _reference), _reference, _inputs)
