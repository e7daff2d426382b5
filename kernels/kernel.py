"""A kernel of an op kind: the function that runs, its reference, and random inputs."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from simcore.ops.op import Op

DTYPES: Mapping[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

Run = Callable[..., Any]


class Kernel(NamedTuple):
    """How ops of one kind run. Every op passed in is bound (numbers, no symbolic sizes).

    `run(op, *tensors)` is executed and timed; constants of a model may follow the tensors. `reference`
    computes the same in plain torch, in any floating dtype (in float64 it is the truth). `inputs` makes
    random tensors of the op's shape. `in_parts`: the results that are parts of sums, along the last
    dimension: the reference may make other parts of them.
    """

    run: Run
    reference: Run
    inputs: Callable[[Op, torch.Generator, torch.device], tuple[torch.Tensor, ...]]
    in_parts: tuple[int, ...] = ()


def dtype_of(op: Op) -> torch.dtype:
    """Returns the torch dtype of an op. Raises ValueError for a dtype that torch does not compute in."""
    if op.dtype not in DTYPES:
        raise ValueError(f"{op.kind} is in {op.dtype}; kernels run in {', '.join(DTYPES)}")
    return DTYPES[op.dtype]


def has_kernel(x: torch.Tensor) -> bool:
    """Whether Triton computes with x: on a GPU, except fp64, because the kernels sum in fp32."""
    return x.is_cuda and x.dtype != torch.float64


def by_device(cuda: Run, elsewhere: Run) -> Run:
    """Returns a `run` that calls `cuda` if its first tensor `has_kernel`, else `elsewhere`."""

    def run(op: Op, *tensors: Any) -> Any:
        return (cuda if has_kernel(tensors[0]) else elsewhere)(op, *tensors)

    return run


def in_double(x: torch.Tensor) -> torch.Tensor:
    """Copies x in double precision, in which references are the truth; integers keep their dtype."""
    if x.is_complex():
        return x.to(torch.complex128, copy=True)
    return x.to(torch.float64, copy=True) if x.is_floating_point() else x.clone()
