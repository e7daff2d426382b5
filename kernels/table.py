"""Which kernel computes an op: by its kind, `run` on the device and `reference` in plain torch.

    TABLE[op.kind].run(op, *tensors)        op bound: all its dimensions are numbers

Each family of ops keeps its kernels in a package of its own. They are put together when first asked for, so
that whoever wants one family does not import the others.
"""

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec

from kernels.kernel import Kernel, dtype_of

__all__ = ["FAMILIES", "TABLE", "Kernel", "dtype_of"]

# Family -> the name of its kernels by op kind.
FAMILIES: Mapping[str, str] = {
    "kernels.decoder": "DECODER",
    "kernels.long_convolution": "LONG_CONVOLUTION",
    "kernels.linear_attention": "LINEAR_ATTENTION",
}


class _Table(Mapping[str, Kernel]):
    """The kernels of all families that are there."""

    @cached_property
    def _kernels(self) -> dict[str, Kernel]:
        found: dict[str, Kernel] = {}
        for module, name in FAMILIES.items():
            if find_spec(module) is not None:
                found |= getattr(import_module(module), name)
        return found

    def __getitem__(self, kind: str) -> Kernel:
        return self._kernels[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)


TABLE: Mapping[str, Kernel] = _Table()
