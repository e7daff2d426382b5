"""The greedy choice.

id[t] = the first v with the largest logits[t, v]
"""

import torch
from torch import Tensor

from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.kernel import Kernel
from simcore.ops.op import Op


def sample(op: Op, logits: Tensor) -> Tensor:
    """Returns ids [tokens] of the largest of logits [tokens, vocab]."""
    del op
    return logits.argmax(-1)


def _sample_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    return (random_tensor(op, generator, device, op["tokens"], op["vocab"]),)


SAMPLE = Kernel(sample, sample, _sample_inputs)
