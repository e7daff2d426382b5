"""The embedding.

x[t] = table[ids[t]]
"""

import torch
from torch import Tensor

from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.kernel import Kernel
from simcore.ops.op import Op

# Rows of the table on which `embedding` is timed: so many that a step seldom reads a row twice.
ROWS = 8192


def embedding(op: Op, ids: Tensor, table: Tensor) -> Tensor:
    """Returns rows ids [tokens] of table [vocab, hidden]: [tokens, hidden]."""
    del op
    return table[ids]


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    ids = torch.randint(ROWS, (op["tokens"],), generator=generator, device=device)
    return ids, random_tensor(op, generator, device, ROWS, op["hidden"])


EMBEDDING = Kernel(embedding, embedding, _inputs)
