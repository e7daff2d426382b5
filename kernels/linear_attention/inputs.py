"""Random tensors of the shape of a linear attention: q, k, v (for a step also its state), and decays if any.

Keys are scaled by rank^-1/2 and decays lie between 0.9 and 1, so that half-precision sums stay small.
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import dtype_of
from simcore.ops.op import Op


def _normal(op: Op, length: int, width: int, generator: torch.Generator, device: torch.device) -> Tensor:
    shape = (op["batch"], op["heads"], length, width)
    return torch.randn(shape, generator=generator, dtype=dtype_of(op), device=device)


def _tokens(op: Op, length: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    q = _normal(op, length, op["rank"], generator, device)
    k = _normal(op, length, op["rank"], generator, device) * op["rank"] ** -0.5
    return q, k, _normal(op, length, op["dim"], generator, device)


def _decays(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    if not op["decay"]:
        return ()
    return (1.0 - 0.1 * torch.rand(op["heads"], generator=generator, device=device),)


def inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Returns (q, k, v), and decay if the op has one: the arguments of all methods."""
    return *_tokens(op, op["length"], generator, device), *_decays(op, generator, device)


def step_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Returns (q, k, v, state), and decay if the op has one."""
    state = _normal(op, op["rank"], op["dim"], generator, device)
    return *_tokens(op, 1, generator, device), state, *_decays(op, generator, device)
