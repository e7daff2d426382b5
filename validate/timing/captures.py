"""Captured graphs that share their memory, because they are replayed one after another.

torch.cuda.graph() returns memory to the driver at each capture, which takes longer than to measure an op.
Here one graph stays and keeps the pool alive, and all other graphs of the same stream take their memory from
it.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

# The stream classes of torch.cuda are not typed.
CUDA: Any = torch.cuda
# A share of the card's memory.
IDLE_SHARE = 0.2


class GraphPool:
    """Memory of the graphs captured on one stream, replayed there or one at a time elsewhere."""

    def __init__(self, stream: Any = None) -> None:
        self.stream: Any = CUDA.Stream() if stream is None else stream
        self._anchor = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            self._anchor.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device="cuda")
            self._anchor.capture_end()

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """Captures the launches of `call` as a graph without running them. `call` has to have run before, so
        that all is compiled and loaded. Raises any error of `call`; the pool is then unusable."""
        with torch.cuda.device(self.stream.device):
            return self._captured(call)

    def _captured(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
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
    """Frees memory before a capture, which cannot free any itself: used and now idle memory goes back to the
    driver if it is more than IDLE_SHARE of the card and more than the driver has free, because a capture
    could ask for about as much."""
    # Nested as they come: flattening the statistics takes ten times as long.
    held: Any = torch.cuda.memory_stats_as_nested_dict()
    reserved, allocated = (held[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
    idle = reserved - allocated
    card = torch.cuda.current_device()
    much = IDLE_SHARE * torch.cuda.get_device_properties(card).total_memory
    if idle > much and idle > torch.cuda.mem_get_info()[0]:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _end(pool: Any) -> None:
    """Ends a pool after a failed capture: it would go on recording, so that no later graph could use it."""
    end: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with suppress(RuntimeError):
            end(torch.cuda.current_device(), pool)
