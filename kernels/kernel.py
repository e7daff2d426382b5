"""What a kernel is to the rest: what runs, what it is checked against, and inputs to try it on."""

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
    """How ops of one kind are carried out; every op given here is bound (numbers, no sizes).

    `run(op, *tensors)` is what is executed and timed, `reference` the same in plain torch, which works in
    any floating dtype (in float64 it is the truth), `inputs` makes random tensors of the op's shape.
    """

    run: Run
    reference: Run
    inputs: Callable[[Op, torch.Generator, torch.device], tuple[torch.Tensor, ...]]


def dtype_of(op: Op) -> torch.dtype:
    """The torch dtype of an op. Raises ValueError for one that torch does not compute in."""
    if op.dtype not in DTYPES:
        raise ValueError(f"{op.kind} is in {op.dtype}; kernels run in {', '.join(DTYPES)}")
    return DTYPES[op.dtype]


def has_kernel(x: torch.Tensor) -> bool:
    """Whether Triton computes with x: on a GPU, but for fp64, which sums in fp32 would not keep."""
    return x.is_cuda and x.dtype != torch.float64


def by_device(cuda: Run, elsewhere: Run) -> Run:
    """A kernel's `run` that goes by its first tensor: `cuda` where that has a kernel, else `elsewhere`."""

    def run(op: Op, *tensors: torch.Tensor) -> Any:
        return (cuda if has_kernel(tensors[0]) else elsewhere)(op, *tensors)

    return run


def in_double(x: torch.Tensor) -> torch.Tensor:
    """A copy of x in double precision, in which references are the truth; whole numbers stay as they are."""
    if x.is_complex():
        return x.to(torch.complex128, copy=True)
    return x.to(torch.float64, copy=True) if x.is_floating_point() else x.clone()
