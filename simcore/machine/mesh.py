"""The layout of ranks: a mesh names the axes along which ranks are laid out; the last axis varies fastest.

    rank = sum over axes of coordinate * stride,   stride = product of the sizes of the later axes

>>> mesh = {"group": 2, "tensor": 4}
>>> members(mesh, 5, "tensor"), members(mesh, 5, "group"), along(mesh, 5, "group", 1)
((4, 5, 6, 7), (1, 5), 1)
"""

from collections.abc import Mapping
from math import prod

Mesh = Mapping[str, int]


def _stride(mesh: Mesh, axis: str) -> tuple[int, int]:
    if axis not in mesh:
        return 1, 1
    names = list(mesh)
    return prod(mesh[name] for name in names[names.index(axis) + 1 :]), mesh[axis]


def coordinate(mesh: Mesh, rank: int, axis: str) -> int:
    """A rank's place along an axis; 0 for an axis that the mesh does not have."""
    stride, size = _stride(mesh, axis)
    return rank // stride % size


def along(mesh: Mesh, rank: int, axis: str, offset: int) -> int:
    """The rank `offset` places further along an axis, wrapping around."""
    stride, size = _stride(mesh, axis)
    place = rank // stride % size
    return rank + ((place + offset) % size - place) * stride


def members(mesh: Mesh, rank: int, axis: str) -> tuple[int, ...]:
    """The ranks that meet along an axis, `rank` among them, in order."""
    stride, size = _stride(mesh, axis)
    base = rank - (rank // stride % size) * stride
    return tuple(base + i * stride for i in range(size))
