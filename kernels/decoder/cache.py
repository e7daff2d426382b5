"""What only moves: nothing is computed.

kv_append            cache[position of t] = k[t], v[t]
kv_copy              slot to = slot from
receive_speculation  x = receive buffer
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decoder.tensors import random_tensor
from kernels.kernel import Kernel, by_device
from simcore.ops import Op


def reference_kv_append(k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor) -> None:
    """As `kv_append`, in plain torch and any float dtype."""
    k_to.copy_(k)
    v_to.copy_(v)


@triton.jit
def _kv_append_kernel(
    k_ptr, v_ptr, k_to_ptr, v_to_ptr, gate_ptr,
    k_token, k_head, v_token, v_head, k_to_token, k_to_head, v_to_token, v_to_head, heads, d,
    GATED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """All heads of one token: program (token,)."""
    if GATED and tl.load(gate_ptr) == 0:
        return
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    inside = (head < heads) & (column < d)
    k = tl.load(k_ptr + token * k_token + head * k_head + column, mask=inside)
    v = tl.load(v_ptr + token * v_token + head * v_head + column, mask=inside)
    to_k = k_to_ptr + token * k_to_token + head.to(tl.int64) * k_to_head + column
    to_v = v_to_ptr + token * v_to_token + head.to(tl.int64) * v_to_head + column
    tl.store(to_k, k.to(k_to_ptr.dtype.element_ty), mask=inside)
    tl.store(to_v, v.to(v_to_ptr.dtype.element_ty), mask=inside)


def kv_append(k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor, *, gate: Tensor | None = None) -> None:
    """Writes k, v [tokens, kv_heads, head_dim] into views of the cache of that size, with a `gate` (int32
    [1]) of 0 not; tokens and heads may lie any distance apart. Raises ValueError for elements of a head that
    lie apart."""
    if any(x.stride(-1) != 1 or x.shape != k.shape for x in (k, v, k_to, v_to)):
        raise ValueError(f"kv_append takes heads {tuple(k.shape)} of contiguous elements")
    tokens, heads, d = k.shape
    strides = [stride for x in (k, v, k_to, v_to) for stride in x.stride()[:2]]
    _kv_append_kernel[(tokens,)](
        k, v, k_to, v_to, gate, *strides, heads, d,
        GATED=gate is not None, HEADS=triton.next_power_of_2(heads), DIM=triton.next_power_of_2(d),
        num_warps=4,
    )  # fmt: skip


def _append(op: Op, k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor) -> None:
    del op
    kv_append(k, v, k_to, v_to)


def _reference_append(op: Op, k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor) -> None:
    del op
    reference_kv_append(k, v, k_to, v_to)


def _append_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["tokens"], op["kv_heads"], op["head_dim"]
    return tuple(random_tensor(op, generator, device, *size) for _ in range(4))


def kv_copy(op: Op, source: Tensor, target: Tensor) -> None:
    """Copies the cache of `tokens` tokens, `width` elements each, from one view to another."""
    del op
    target.copy_(source)


def _copy_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(random_tensor(op, generator, device, op["tokens"], op["width"]) for _ in range(2))


def receive_speculation(op: Op, buffer: Tensor, x: Tensor) -> None:
    """Takes the receive buffer [tokens, width] as x."""
    del op
    x.copy_(buffer)


KV_APPEND = Kernel(by_device(_append, _reference_append), _reference_append, _append_inputs)
KV_COPY = Kernel(kv_copy, kv_copy, _copy_inputs)
RECEIVE_SPECULATION = Kernel(receive_speculation, receive_speculation, _copy_inputs)
