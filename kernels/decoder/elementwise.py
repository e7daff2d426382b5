"""What is done element by element, or row by row.

norm        y = gain x / sqrt(mean(x^2) + eps)                                           (RMS norm)
rotary      (a, b) -> (a cos - b sin, b cos + a sin),  a, b the halves of a head; angle = position *
            base^(-2i/d) for pair i                                          (RoFormer, Su et al. 2021)
activation  silu(gate) up,  silu(x) = x / (1 + exp(-x))     or, without a gate,  gelu(x) = x Phi(x)
residual    x += y
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.decoder.tensors import random_tensor, wide
from kernels.kernel import Kernel, dtype_of
from simcore.ops import Op

EPS = 1e-6
BASE = 10_000.0


def norm(op: Op, x: Tensor, gain: Tensor) -> Tensor:
    """RMS norm of x [tokens, hidden] by rows, times gain [hidden] or [tokens, hidden]."""
    del op
    y = wide(x)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + EPS) * gain).to(x.dtype)


def _norm_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    x = random_tensor(op, generator, device, op["tokens"], op["hidden"])
    return x, 1.0 + random_tensor(op, generator, device, op["hidden"], scale=0.1)


def angles(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of positions [tokens]: [tokens, head_dim // 2] each."""
    half = head_dim // 2
    pairs = torch.arange(half, device=positions.device, dtype=torch.float64)
    turn = positions.to(torch.float64)[:, None] * BASE ** (-pairs / max(1, half))
    return turn.cos().to(dtype), turn.sin().to(dtype)


def rotary(op: Op, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [tokens, (q_heads + 2 kv_heads) head_dim] into heads and turns those of q and k by the
    angles of each token (cos, sin [tokens, head_dim // 2]); the last element of an odd head stays.
    Gives q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim]."""
    q, kv, d = op["q_heads"], op["kv_heads"], op["head_dim"]
    heads = qkv.view(-1, q + 2 * kv, d)
    turned, half = heads[:, : q + kv], d // 2
    a, b = turned[..., :half], turned[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    turned = torch.cat((a * c - b * s, b * c + a * s, turned[..., 2 * half :]), -1)
    return turned[:, :q], turned[:, q:], heads[:, q + kv :]


def _rotary_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    tokens, heads = op["tokens"], op["q_heads"] + 2 * op["kv_heads"]
    qkv = random_tensor(op, generator, device, tokens, heads * op["head_dim"])
    positions = torch.randint(4096, (tokens,), generator=generator, device=device)
    return qkv, *angles(positions, op["head_dim"], dtype_of(op))


def activation(op: Op, *inputs: Tensor) -> Tensor:
    """silu(gate) up of gate, up [tokens, width] where the op is gated, else gelu of x [tokens, width]."""
    if op["gated"]:
        gate, up = inputs
        return functional.silu(gate) * up
    (x,) = inputs
    return functional.gelu(x)


def _activation_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["tokens"], op["width"]
    return tuple(random_tensor(op, generator, device, *size) for _ in range(1 + op["gated"]))


def residual(op: Op, y: Tensor, x: Tensor) -> Tensor:
    """Adds y [tokens, hidden] to x in place; gives x."""
    del op
    return x.add_(y)


def _residual_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["tokens"], op["hidden"]
    return random_tensor(op, generator, device, *size), random_tensor(op, generator, device, *size)


NORM = Kernel(norm, norm, _norm_inputs)
ROTARY = Kernel(rotary, rotary, _rotary_inputs)
ACTIVATION = Kernel(activation, activation, _activation_inputs)
RESIDUAL = Kernel(residual, residual, _residual_inputs)
