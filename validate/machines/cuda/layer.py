"""What the machine on a CUDA card asks of CUDA: streams, events, captured graphs, memory that the host sees.

Everything is queued and nothing waits, but `synchronize`. Events take the time.
"""

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from simcore.validate.machines.cuda import flag_kernels
from simcore.validate.timing.captures import CUDA, GraphPool

# A kernel that spins for a signal must not stand in the hardware queue of whoever sends it: as many queues as
# there can be. Read when CUDA is initialised.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Call = Callable[[], object]
# torch hands out streams of a ring of so many.
STREAMS_OF_TORCH = 32
# CU_STREAM_NON_BLOCKING: what is on the default stream is not waited for, as on torch's own streams.
NON_BLOCKING = 1
# Looks at the clocks of host and card, of which the one with the least in between counts.
LOOKS = 16


class Layer(Protocol):
    """A device that works off streams; what stands on one runs in order."""

    verbs: Any
    device: torch.device | str

    def stream(self) -> Any:
        """A new stream."""

    def record(self, stream: Any) -> Any:
        """An event that passes when all that is on a stream so far has been done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What is queued on the stream from here on waits for an event."""

    def done(self, event: Any) -> bool:
        """Whether an event has passed."""

    def elapsed_s(self, before: Any, after: Any) -> float:
        """Seconds between two events that have passed."""

    def run(self, stream: Any, call: Call) -> None:
        """Queues what a call launches."""

    def captured(self, stream: Any, call: Call) -> Call:
        """What queues the same again, without Python; the call has been run before."""

    def ints(self, rows: list[list[int]]) -> Tensor:
        """int32 numbers on the device, there before anything is queued."""

    def zeros(self, count: int) -> Tensor:
        """int32 zeros on the device, there before anything is queued."""

    def host_zeros(self, count: int) -> Tensor:
        """int32 zeros that host and device see."""

    def reset(self) -> None:
        """Events may be used again: a new run begins."""

    def synchronize(self) -> None:
        """Waits until all is done."""


class CudaLayer:
    """The current CUDA device."""

    def __init__(self) -> None:
        self.device: torch.device | str = torch.device("cuda", torch.cuda.current_device())
        self.verbs: Any = flag_kernels
        self._streams: dict[int, Any] = {}
        self._pools: dict[int, GraphPool] = {}
        self._current: Any = None
        self._events: list[Any] = []
        self._used = 0
        self._aside = self.stream()

    def stream(self) -> Any:
        """A stream that nobody else of this layer has; beyond those that torch hands out, the driver's. All
        are of one priority, so that none goes before another."""
        for _ in range(STREAMS_OF_TORCH):
            found = CUDA.Stream()
            if found.cuda_stream not in self._streams:
                break
        else:
            found = next(s for s in _drivers_streams() if s.cuda_stream not in self._streams)
        self._streams[found.cuda_stream] = found
        return found

    def record(self, stream: Any) -> Any:
        """An event, made before if there is one left."""
        if self._used == len(self._events):
            self._events.append(CUDA.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """Nothing of the host waits."""
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        """Asks the driver."""
        found: bool = event.query()
        return found

    def elapsed_s(self, before: Any, after: Any) -> float:
        """To half a microsecond, as long as they are not far apart."""
        return 1e-3 * float(before.elapsed_time(after))

    def run(self, stream: Any, call: Call) -> None:
        """On the stream, which stays the current one: changing it takes longer than asking."""
        if self._current is not stream:
            CUDA.set_stream(stream)
            self._current = stream
        call()

    def captured(self, stream: Any, call: Call) -> Call:
        """Captured on the stream itself, so that what libraries keep for a stream is its own."""
        pool = self._pools.get(stream.cuda_stream)
        if pool is None:
            pool = self._pools[stream.cuda_stream] = GraphPool(stream)
        graph = pool.capture(call)
        # It leaves the stream that was current before it.
        self._current = None
        replay: Call = graph.replay
        return replay

    def ints(self, rows: list[list[int]]) -> Tensor:
        """On a stream of their own: others may have kernels that spin, which must not be waited for."""
        with torch.cuda.stream(self._aside):
            found = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self._aside.synchronize()
        return found

    def zeros(self, count: int) -> Tensor:
        """As `ints`."""
        with torch.cuda.stream(self._aside):
            found = torch.zeros(count, dtype=torch.int32, device=self.device)
        self._aside.synchronize()
        return found

    def host_zeros(self, count: int) -> Tensor:
        """Pinned: with one address space for host and card, kernels read and write it where it is."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def reset(self) -> None:
        """Nothing may be under way."""
        self.synchronize()
        self._used = 0

    def synchronize(self) -> None:
        """All streams; and the current one is again what it was for everybody else."""
        torch.cuda.synchronize()
        CUDA.set_stream(CUDA.default_stream())
        self._current = None


# Streams of the driver, which live as long as the process: layers come and go, and take the same ones.
_DRIVERS: list[Any] = []


def _drivers_streams() -> Iterator[Any]:
    """Those that were made before, then new ones. Raises RuntimeError where the driver makes none."""
    yield from _DRIVERS
    driver = ctypes.CDLL("libcuda.so.1")
    while True:
        handle = ctypes.c_void_p()
        code = driver.cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING))
        if code or not handle.value:
            raise RuntimeError(f"--on cuda: the driver makes no more streams (error {code})")
        _DRIVERS.append(CUDA.ExternalStream(handle.value))
        yield _DRIVERS[-1]


def seen_together(layer: Layer, stream: Any) -> tuple[Any, float, float]:
    """An event on an idle stream, when it passed by the host's clock (time.perf_counter), and by how much
    that may be wrong: half of the least time that it took to queue it and to see it pass."""

    def look() -> tuple[Any, float, float]:
        before_s = time.perf_counter()
        event = layer.record(stream)
        while not layer.done(event):
            pass
        half_s = (time.perf_counter() - before_s) / 2
        return event, before_s + half_s, half_s

    return min((look() for _ in range(LOOKS)), key=lambda each: each[2])
