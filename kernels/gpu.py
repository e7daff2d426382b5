"""What layouts go by: the GPU on which a tensor lies, or an H200 where it lies on none."""

from typing import NamedTuple

import torch
from torch import Tensor

# An H200's multiprocessors, and the shared memory that a program may have there.
PROCESSORS = 132
SHARED_BYTES = 227 * 1024
# The first compute capability with launches that start before the one before has ended.
HOPPER = 9


class Gpu(NamedTuple):
    """Multiprocessors, shared memory of a program at most, and whether launches can be chained."""

    processors: int = PROCESSORS
    shared_bytes: int = SHARED_BYTES
    chained: bool = False


def gpu_of(x: Tensor) -> Gpu:
    """The GPU where x lies; elsewhere an H200's numbers, and nothing is chained."""
    if not x.is_cuda:
        return Gpu()
    found = torch.cuda.get_device_properties(x.device)
    shared_bytes = getattr(found, "shared_memory_per_block_optin", SHARED_BYTES)
    return Gpu(found.multi_processor_count, shared_bytes, found.major >= HOPPER)
