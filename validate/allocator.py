"""How a card's memory is taken, so that where it lies does not decide what is measured.

Memory that a process has given back and takes again with cudaMalloc is put together from pieces. Kernels that
read two such tensors at once (K and V) were 12 % slower then, at the same addresses, in about half of all
cases, and those that read one of them at times as well; out of memory that was taken once, or mapped piece by
piece into one range of addresses, they never were (validate/measured/h200_placement.csv). A service takes its
memory once, and vLLM maps its own; what measures makes room between shapes and cases.
"""

import os
import sys
from typing import Any

import torch

# By either name a user has said how memory is to be taken.
SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
IN_SEGMENTS = "expandable_segments:True"


def take_memory_in_segments() -> str:
    """From now on this process's memory of a card comes in segments that grow, and what is given back is
    mapped anew; not so where the user has said otherwise, or where drivers do not. Gives how it comes."""
    said = next((name for name in SETTINGS if name in os.environ), None)
    if said is not None:
        return f"as {said} says"
    if sys.platform != "linux":
        return "as the driver gives it"
    made: Any = torch._C
    # Its name in torch 2.13, which warns of the older one.
    by_name = getattr(made, "_accelerator_setAllocatorSettings", None)
    settings: Any = torch.cuda.memory
    (by_name or settings._set_allocator_settings)(IN_SEGMENTS)
    return "in segments that grow"
