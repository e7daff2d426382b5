"""Captured graphs that share their memory, for they are replayed one after another.

torch.cuda.graph() gives memory back to the driver at each capture, which takes longer than to measure an op.
Here a graph that stays keeps the pool alive, and all others of the same stream take their memory from it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# Its classes of streams are not typed.
CUDA: Any = torch.cuda
# Of the card's memory.
IDLE_SHARE = 0.2


class GraphPool:
    """Memory of the graphs that are captured on one stream, and replayed there or one at a time elsewhere."""

    def __init__(self, stream: Any = None) -> None:
        self.stream: Any = CUDA.Stream() if stream is None else stream
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            self._anchor.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            self._anchor.capture_end()

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """What `call` launches, as a graph; nothing of it runs. It has to have run before, so that all is
        compiled and loaded. Raises what it raises; the pool is of no use then."""
        make_room()
        graph, pool = torch.cuda.CUDAGraph(), self._anchor.pool()
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    call()
                finally:
                    graph.capture_end()
        except BaseException:
            _end(pool)
            raise
        return graph


def make_room() -> None:
    """Before a capture, which cannot do so itself: memory that has been used and lies idle goes back to the
    driver, where it is much, and more than the driver has left: about as much could be asked for."""
    # Nested as they come: to flatten them takes ten times as long.
    held: Any = torch.cuda.memory_stats_as_nested_dict()
    reserved, allocated = (held[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    idle = reserved - allocated
    much = IDLE_SHARE * torch.cuda.get_device_properties(0).total_memory
    if idle > much and idle > torch.cuda.mem_get_info()[0]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _end(pool: Any) -> None:
    """After a capture that failed: its pool would go on recording, so that no later graph could have it."""
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), pool)
