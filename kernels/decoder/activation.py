"""Activations of an MLP.

silu(gate) up,  silu(x) = x / (1 + exp(-x))     or, without a gate,  gelu(x) = x Phi(x)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op

# Elements of one program: one 16-byte access a thread if an element has 2 bytes.
BLOCK = 1024


def reference_activation(x: Tensor, up: Tensor | None = None) -> Tensor:
    """As `activation`, in plain torch and in any float dtype."""
    return functional.gelu(x) if up is None else functional.silu(x) * up


@triton.jit
def gated(x, up):
    """silu(x) up, fp32; exp of a number <= 0 does not overflow."""
    small = tl.exp(-tl.abs(x))
    return x * tl.where(x < 0.0, small, 1.0) / (1.0 + small) * up


@triton.jit
def _activation_kernel(
    x_ptr, up_ptr, out_ptr, gate_ptr, x_stride, up_stride, out_stride, width,
    CHAINED: tl.constexpr, HAS_UP: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of a row: program (row, piece)."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_UP:
        up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
        y = gated(x, up)
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    tl.store(out_ptr + row * out_stride + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@launching
def activation(
    x: Tensor,
    up: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    chained: bool = False,
) -> Tensor:
    """Returns silu(x) up of x, up [tokens, width], which may be the halves of one tensor; without `up`,
    gelu(x). Computes in fp32. With a `gate` (int32 [1]) of 0 it writes nothing. `chained`: where the GPU can,
    the launch starts while the one before it ends, and waits. Returns `out`, or a new tensor. Raises
    ValueError if the elements of a row are not contiguous."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device) if out is None else out
    if any(y.stride(-1) != 1 or y.shape != x.shape for y in (x, up, out) if y is not None):
        raise ValueError(f"activation takes rows of {width} contiguous elements")
    _activation_kernel[(tokens, triton.cdiv(width, BLOCK))](
        x, up, out, gate, x.stride(0), 0 if up is None else up.stride(0), out.stride(0), width,
        HAS_UP=up is not None, GATED=gate is not None, BLOCK=BLOCK,
        **launched(4, chained and gpu_of(x).chained),
    )  # fmt: skip
    return out


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["tokens"], op["width"]
    return tuple(random_tensor(op, generator, device, *size) for _ in range(1 + op["gated"]))


def _reference(op: Op, *inputs: Tensor) -> Tensor:
    """silu(gate) up of gate, up [tokens, width] if the op is gated, else gelu of x [tokens, width]."""
    del op
    return reference_activation(*inputs)


def _run(op: Op, *inputs: Tensor) -> Tensor:
    del op
    return activation(*inputs)


ACTIVATION = Kernel(by_device(_run, _reference), _reference, _inputs)
