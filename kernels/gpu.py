"""A tensor's GPU: the numbers that layouts depend on (an H200's if it is on no GPU), and launches there."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

# An H200's multiprocessors, and the shared memory that a program may use there.
PROCESSORS = 132
SHARED_BYTES = 227 * 1024
# The first compute capability that can start a launch before the previous launch has ended.
HOPPER = 9


class Gpu(NamedTuple):
    """Multiprocessors, the most shared memory of a program, and whether launches can be chained."""

    processors: int = PROCESSORS
    shared_bytes: int = SHARED_BYTES
    chained: bool = False


def gpu_of(x: Tensor) -> Gpu:
    """Returns the GPU of x; without one, an H200's numbers, not chained."""
    if not x.is_cuda:
        return Gpu()
    found = torch.cuda.get_device_properties(x.device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", SHARED_BYTES)
    return Gpu(found.multi_processor_count, shared_bytes, found.major >= HOPPER)


def _tensors(given: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors of a call, also those in its lists."""
    for each in given:
        yield from (x for x in (each if isinstance(each, list | tuple) else (each,)) if isinstance(x, Tensor))


def launching(launch: Callable[P, T]) -> Callable[P, T]:
    """Makes a function launch on the GPU of its first tensor, whichever is current; else the launch would go
    to a stream of another GPU, which may not even reach that memory. It raises RuntimeError for tensors that
    ask for gradients, because kernels leave none."""

    @wraps(launch)
    def there(*args: P.args, **named: P.kwargs) -> T:
        given = (*args, *named.values())
        if torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(given)):
            name = getattr(launch, "__name__", "this")
            raise RuntimeError(
                f"{name} gives no gradients: call it under torch.no_grad(), or detach its tensors"
            )
        first = next((x for x in _tensors(given) if x.is_cuda), None)
        if first is None or first.device.index == torch.cuda.current_device():
            return launch(*args, **named)
        with torch.cuda.device(first.device):
            return launch(*args, **named)

    return there
