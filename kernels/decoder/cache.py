"""What only moves: nothing is computed.

kv_append            cache[position of t] = k[t], v[t]
kv_copy              slot to = slot from
receive_speculation  x = receive buffer
"""

import torch
from torch import Tensor

from kernels.decoder.tensors import random_tensor
from kernels.kernel import Kernel
from simcore.ops import Op


def kv_append(op: Op, k: Tensor, v: Tensor, k_to: Tensor, v_to: Tensor) -> None:
    """Writes k, v [tokens, kv_heads, head_dim] into views of the cache of that size."""
    del op
    k_to.copy_(k)
    v_to.copy_(v)


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


KV_APPEND = Kernel(kv_append, kv_append, _append_inputs)
KV_COPY = Kernel(kv_copy, kv_copy, _copy_inputs)
RECEIVE_SPECULATION = Kernel(receive_speculation, receive_speculation, _copy_inputs)
