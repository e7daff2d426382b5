"""How a card's memory is taken, so that where it lies does not decide what is measured.

Of memory that a process had given back to the driver and taken again with cudaMalloc, kernels that read two
tensors at once (K and V) read some pairs 12 % more slowly, and single tensors at times as well; of memory
that was taken once, as a service takes it, or mapped piece by piece into one range of addresses, none
(validate/measured/h200_placement.csv). What measures gives memory back between shapes and cases.
"""

import os
import sys
from typing import Any

import torch

# By either name a user has said how memory is to be taken.
SETTINGS = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
IN_SEGMENTS = "expandable_segments:True"


def take_memory_in_segments() -> str:
    """What this process takes of a card's memory from now on comes in segments that grow, whose pieces are
    mapped anew when they have been given back; not so where the user has said otherwise, or where drivers do
    not. Gives how it comes."""
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
