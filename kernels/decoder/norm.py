"""RMS norm of rows (Zhang and Sennrich 2019), with an optional addition of a residual before it.

x += y                                       (only with a residual)
out = gain x / sqrt(mean(x^2) + eps)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_gate, check_like, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import random_tensor, wide
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.ops.op import Op

EPS = 1e-6
# A whole row is held in registers: so many elements a thread, at most 16 warps.
ELEMENTS = 16
WARPS = 16


def reference_norm(x: Tensor, gain: Tensor, *, residual: Tensor | None = None, eps: float = EPS) -> Tensor:
    """As `norm`, in plain torch and in any float dtype."""
    if residual is not None:
        x.add_(residual)
    y = wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gain).to(x.dtype)


@triton.jit
def _norm_kernel(
    x_ptr, y_ptr, gain_ptr, out_ptr, gate_ptr,
    x_stride, y_stride, gain_stride, out_stride, hidden, eps,
    CHAINED: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: program (row,)."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    gain = tl.load(gain_ptr + row * gain_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        y = tl.load(y_ptr + row * y_stride + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * x_stride + columns, x, mask=inside)
    wider = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wider * wider, axis=0) / hidden + eps)
    out = (wider * scale * gain).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + columns, out, mask=inside)


@launching
def norm(
    x: Tensor,
    gain: Tensor,
    *,
    residual: Tensor | None = None,
    eps: float = EPS,
    gate: Tensor | None = None,
    out: Tensor | None = None,
    chained: bool = False,
) -> Tensor:
    """Returns the RMS norm of x [tokens, hidden] by rows, times gain [hidden] or [tokens, hidden], summed in
    fp32.

    A `residual`, shaped as x, is first added to x in place. Rows may be any distance apart. With a `gate`
    (int32 [1]) of 0 nothing is written. `chained`: where the GPU can, the launch starts while the one before
    it ends, and waits. Returns `out`, or a new tensor. Raises ValueError if the elements of a row are not
    contiguous.
    """
    if x.dim() != 2 or x.stride(-1) != 1:
        raise ValueError(f"norm takes [tokens, hidden], rows contiguous, not {kind(x)}")
    tokens, hidden = x.shape
    out = torch.empty_like(x) if out is None else out
    check_gate(gate)
    check_like("out", out, x.shape, x.dtype)
    check_like("gain", gain, x.shape if gain.dim() == 2 else (hidden,), gain.dtype)
    if residual is not None:
        check_like("residual", residual, x.shape, residual.dtype)
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(tokens,)](
        x, residual, gain, out, gate,
        x.stride(0), 0 if residual is None else residual.stride(0), gain.stride(0) if gain.dim() == 2 else 0,
        out.stride(0), hidden, eps,
        ADD=residual is not None, GATED=gate is not None, BLOCK=block,
        **launched(min(WARPS, max(1, block // (32 * ELEMENTS))), chained and gpu_of(x).chained),
    )  # fmt: skip
    return out


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    x = random_tensor(op, generator, device, op["tokens"], op["hidden"])
    return x, 1.0 + random_tensor(op, generator, device, op["hidden"], scale=0.1)


def _reference(op: Op, x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    del op
    return reference_norm(x, gain, eps=eps)


def _run(op: Op, x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    del op
    return norm(x, gain, eps=eps)


NORM = Kernel(by_device(_run, _reference), _reference, _inputs)
