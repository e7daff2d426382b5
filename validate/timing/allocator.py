"""Allocation of a card's memory such that its placement does not decide the measured times.

After a process had returned memory to the driver and taken it again with cudaMalloc, kernels that read two
tensors at once (K and V) read some pairs 12 % more slowly, and at times single tensors too. None was slower
in memory that was taken once, as in a service, or that was mapped piece by piece into one range of addresses
(validate/measured/h200_placement.csv). Measurements return memory between shapes and cases.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Environment variables by which a user sets the allocator.
SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
IN_SEGMENTS, IN_BLOCKS = "expandable_segments:True", "expandable_segments:False"


def take_memory_in_segments() -> str:
    """Makes this process take a card's memory from now on in segments that grow, and maps their pieces anew
    after they have been returned. Does nothing if the user has set the allocator, or if the platform's
    drivers cannot. Returns the way in which memory is taken."""
    said = next((name for name in SETTINGS if name in os.environ), None)
    if said is not None:
        return f"as {said} says"
    if sys.platform != "linux":
        return "as the driver gives it"
    _set(IN_SEGMENTS)
    return "in segments that grow"


@contextmanager
def memory_for_others() -> Iterator[None]:
    """Inside, a card's memory is taken in blocks that another process can open by a handle (CUDA IPC); memory
    in segments would need rights over that process. Then as `take_memory_in_segments`."""
    ours = sys.platform == "linux" and not any(name in os.environ for name in SETTINGS)
    if ours:
        _set(IN_BLOCKS)
    try:
        yield
    finally:
        if ours:
            _set(IN_SEGMENTS)


def _set(setting: str) -> None:
    made: Any = torch._C
    # The name in torch 2.13, which warns of the older one.
    by_name = getattr(made, "_accelerator_setAllocatorSettings", None)
    settings: Any = torch.cuda.memory
    (by_name or settings._set_allocator_settings)(setting)
