"""Projections and the embedding.

matmul     y[m, n] = sum_k x[m, k] W[k, n]
embedding  x[t] = table[ids[t]]
"""

import torch
from torch import Tensor

from kernels.decoder.tensors import random_tensor
from kernels.kernel import Kernel
from simcore.ops import Op

# Rows of the table that `embedding` is timed on: enough that a step seldom reads one twice.
ROWS = 8192


def matmul(op: Op, x: Tensor, weight: Tensor) -> Tensor:
    """x [m, k] times weight [k, n], in the dtype of the weights: [m, n]."""
    del op
    return x.to(weight.dtype) @ weight


def _matmul_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    x = random_tensor(op, generator, device, op["m"], op["k"])
    return x, random_tensor(op, generator, device, op["k"], op["n"], scale=op["k"] ** -0.5)


def embedding(op: Op, ids: Tensor, table: Tensor) -> Tensor:
    """Rows ids [tokens] of table [vocab, hidden]: [tokens, hidden]."""
    del op
    return table[ids]


def _embedding_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    ids = torch.randint(ROWS, (op["tokens"],), generator=generator, device=device)
    return ids, random_tensor(op, generator, device, ROWS, op["hidden"])


MATMUL = Kernel(matmul, matmul, _matmul_inputs)
EMBEDDING = Kernel(embedding, embedding, _embedding_inputs)
