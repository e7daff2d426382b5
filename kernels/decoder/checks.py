"""Checks of the tensors passed to a decoder's kernels: one line names the tensor that does not fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

# Of 32 threads each: a program has at most 1024 threads.
MOST_WARPS = 32


def kind(x: Tensor) -> str:
    """Returns a tensor's format and shape for messages."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def check_like(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises ValueError unless a tensor has this shape and format and its last dimension is contiguous."""
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype or (x.dim() and x.stride(-1) != 1):
        raise ValueError(
            f"{name} has to be {dtype} {list(shape)}, the last dimension contiguous, not {kind(x)}"
        )


def check_written(name: str, x: Tensor, *read: Tensor | None) -> None:
    """Raises ValueError if a tensor that a launch writes has several elements in one place, or begins where a
    tensor begins that other programs still `read`."""
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise ValueError(f"{name} has several elements in one place, strides {x.stride()}")
    if x.numel() and any(other is not None and other.data_ptr() == x.data_ptr() for other in read):
        raise ValueError(f"{name} has to be other memory than what is read")


def check_powers(layout: object, *names: str) -> None:
    """Raises ValueError if one of a layout's sizes is no power of two, or it has too many warps."""
    for name in names:
        value = getattr(layout, name)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise ValueError(f"{name}: a layout cannot have {value}; it has to be a power of two")
        if name == "warps" and value > MOST_WARPS:
            raise ValueError(f"warps: a layout cannot have {value}; a program has at most {MOST_WARPS}")


def check_space(space: Sequence[Tensor], wanted: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a workspace was made for another shape or layout."""
    if [tuple(x.shape) for x in space] != [tuple(shape) for shape in wanted]:
        raise ValueError("the workspace was made for another shape or layout")


def check_gate(gate: Tensor | None) -> None:
    """Raises ValueError for a gate that is not one int32."""
    if gate is not None and (gate.dtype != torch.int32 or gate.numel() != 1):
        raise ValueError(f"a gate has to be int32 of one element, not {kind(gate)}")


def check_patience(x: Tensor, patience: Tensor | None, error: Tensor | None) -> None:
    """Raises ValueError unless both are int32 of one element, patience where x is."""
    for name, word in (("patience", patience), ("error", error)):
        if word is not None and (word.dtype != torch.int32 or word.numel() != 1):
            raise ValueError(f"{name} has to be int32 of one element, not {kind(word)}")
    if patience is not None and patience.device != x.device:
        raise ValueError(f"patience has to be on {x.device}, not on {patience.device}")
