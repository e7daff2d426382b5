"""What a decoder's kernels check of the tensors that they are given: one line says what does not fit."""

from collections.abc import Sequence

import torch
from torch import Tensor


def kind(x: Tensor) -> str:
    """A tensor's format and shape, as messages name them."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_like(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError where what a launch writes to is not of this shape and format, its last dimension
    contiguous."""
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype or (x.dim() and x.stride(-1) != 1):
        raise ValueError(
            f"{name} has to be {dtype} {list(shape)}, the last dimension contiguous, not {kind(x)}"
        )


def check_space(space: Sequence[Tensor], wanted: Sequence[Sequence[int]]) -> None:
    """Raises ValueError where a workspace has been made for another shape or layout."""
    if [tuple(x.shape) for x in space] != [tuple(shape) for shape in wanted]:
        raise ValueError("the workspace was made for another shape or layout")


def check_gate(gate: Tensor | None) -> None:
    """Raises ValueError for a gate that is not one int32."""
    if gate is not None and (gate.dtype != torch.int32 or gate.numel() != 1):
        raise ValueError(f"a gate has to be int32 of one element, not {kind(gate)}")
