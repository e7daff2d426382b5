"""The elementwise ops of a long-convolution model between two mixers.

gate        z *= g,   g a projection of the level below                            (Flash Inference, 2.3)
next_input  x = a + noise                                                          (section 4)
"""

import torch
from torch import Tensor

from simcore.kernels.kernel import Kernel
from simcore.kernels.long_convolution.tensors import normal
from simcore.ops.op import Op


def gate(op: Op, g: Tensor, z: Tensor) -> Tensor:
    """Multiplies z by g, of the same shape [..., channels], in place; returns z."""
    del op
    return z.mul_(g)


def next_input(op: Op, a: Tensor, noise: Tensor) -> Tensor:
    """Returns the last level a [rows, channels] plus noise of the same shape."""
    del op
    return a + noise


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    size = op["rows"], op["channels"]
    return normal(op, generator, device, *size), normal(op, generator, device, *size)


GATE = Kernel(gate, gate, _inputs)
NEXT_INPUT = Kernel(next_input, next_input, _inputs)
