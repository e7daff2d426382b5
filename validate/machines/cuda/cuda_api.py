"""The CUDA calls of the machine on a card: streams, events, captured graphs, memory that the host sees.

Work is queued without waiting, except in `synchronize`, `reset`, `ints` and `zeros`. Events record times.
"""

import ctypes
import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any, Protocol

import torch
from torch import Tensor

from simcore.validate.machines.cuda import flag_kernels
from simcore.validate.timing.captures import CUDA, GraphPool

# A kernel that spins for a signal must not share a hardware queue with the kernel that sends it, so there are
# as many queues as possible. CUDA reads this when it is initialised.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Call = Callable[[], object]
# torch returns streams from a ring of this size.
STREAMS_OF_TORCH = 32
# CU_STREAM_NON_BLOCKING: no waiting for work on the default stream, as with torch's own streams.
NON_BLOCKING = 1
# Looks at the clocks of host and card, of which the shortest counts.
LOOKS = 16


class CudaApi(Protocol):
    """The calls to a device with streams; the work on one stream runs in order."""

    verbs: Any
    device: torch.device | str

    def stream(self, device: torch.device | str | None = None) -> Any:
        """Makes a new stream on a device; by default on the first one."""

    def where(self, event: Any) -> Hashable:
        """Returns the device on whose streams an event was recorded: each has its own clock."""

    def record(self, stream: Any) -> Any:
        """Returns an event that passes when all work on a stream so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """Makes the work that is queued on the stream from now on wait for an event."""

    def done(self, event: Any) -> bool:
        """Whether an event has passed."""

    def elapsed_s(self, before: Any, after: Any) -> float:
        """Returns the seconds between two events that have passed."""

    def run(self, stream: Any, call: Call) -> None:
        """Queues the launches of a call on a stream."""

    def aside(self, stream: Any) -> Executor:
        """Returns what runs calls one after another beside the host's thread: those that queue work on a
        stream, of which a graph of many kernels holds up its thread for a while."""

    def captured(self, stream: Any, call: Call) -> Call:
        """Returns a call that queues the same launches again, without Python; `call` has run before."""

    def ints(self, rows: list[list[int]], device: torch.device | str | None = None) -> Tensor:
        """Returns int32 numbers on a device, by default the first one, written before anything else is
        queued."""

    def zeros(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Returns int32 zeros on a device, as `ints`."""

    def host_zeros(self, count: int) -> Tensor:
        """Returns int32 zeros that host and device see."""

    def reset(self) -> None:
        """Begins a new run: events may be used again."""

    def synchronize(self) -> None:
        """Waits until all work is done."""


@dataclass(slots=True, eq=False)
class _Events:
    """The events of one device: one that was recorded there cannot be recorded elsewhere."""

    made: list[Any] = field(default_factory=list)
    used: int = 0
    lock: Lock = field(default_factory=Lock)

    def next(self) -> Any:
        with self.lock:
            if self.used == len(self.made):
                self.made.append(CUDA.Event(enable_timing=True))
            self.used += 1
            return self.made[self.used - 1]


class TorchCudaApi:
    """The calls to the CUDA devices of this machine, through torch and the driver. `device`: the current one
    when it was made, that of all that names none."""

    def __init__(self) -> None:
        self._first = torch.device("cuda", torch.cuda.current_device())
        self.device: torch.device | str = self._first
        self.verbs: Any = flag_kernels
        self._streams: dict[int, Any] = {}
        self._pools: dict[int, GraphPool] = {}
        # The stream that each thread has made its current one.
        self._threads = local()
        self._asides: dict[int, ThreadPoolExecutor] = {}
        self._events: dict[int, _Events] = {}
        self._aside: dict[torch.device, Any] = {}

    def stream(self, device: torch.device | str | None = None) -> Any:
        """Makes a stream that this api does not have yet: one of torch's, then one of the driver's. All
        have the same priority, so that none goes before another."""
        wanted = torch.device(device or self._first)
        with torch.cuda.device(wanted):
            for _ in range(STREAMS_OF_TORCH):
                found = CUDA.Stream()
                if found.cuda_stream not in self._streams:
                    break
            else:
                found = next(s for s in _drivers_streams() if s.cuda_stream not in self._streams)
        self._streams[found.cuda_stream] = found
        self._events.setdefault(found.device.index, _Events())
        return found

    def record(self, stream: Any) -> Any:
        """Records an event, if possible one that was made before."""
        event = self._events[stream.device_index].next()
        event.record(stream)
        return event

    def where(self, event: Any) -> int:
        """Asks the event."""
        found: int = event.device.index
        return found

    def wait(self, stream: Any, event: Any) -> None:
        """Makes the stream wait; the host does not wait."""
        stream.wait_event(event)

    def done(self, event: Any) -> bool:
        """Asks the driver."""
        found: bool = event.query()
        return found

    def elapsed_s(self, before: Any, after: Any) -> float:
        """Returns seconds, exact to half a microsecond if the events are not far apart."""
        return 1e-3 * float(before.elapsed_time(after))

    def run(self, stream: Any, call: Call) -> None:
        """Runs the call on the stream and leaves it current: setting it takes longer than comparing."""
        if getattr(self._threads, "current", None) is not stream:
            CUDA.set_stream(stream)
            self._threads.current = stream
        call()

    def aside(self, stream: Any) -> ThreadPoolExecutor:
        """Makes a thread for each stream; torch lets others run while it launches a graph."""
        key = stream.cuda_stream
        if key not in self._asides:
            self._asides[key] = ThreadPoolExecutor(1, thread_name_prefix="stream")
        return self._asides[key]

    def captured(self, stream: Any, call: Call) -> Call:
        """Captures on the stream itself, so that the memory of libraries for each stream is its own."""
        pool = self._pools.get(stream.cuda_stream)
        if pool is None:
            pool = self._pools[stream.cuda_stream] = GraphPool(stream)
        graph = pool.capture(call)
        # The capture sets torch's current stream back to the one before it.
        self._threads.current = None
        replay: Call = graph.replay
        return replay

    def ints(self, rows: list[list[int]], device: torch.device | str | None = None) -> Tensor:
        """Writes on a separate stream: others may have spinning kernels, which must not be waited for."""
        return self._made_aside(lambda at: torch.tensor(rows, dtype=torch.int32, device=at), device)

    def zeros(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """As `ints`."""
        return self._made_aside(lambda at: torch.zeros(count, dtype=torch.int32, device=at), device)

    def _made_aside(
        self, make: Callable[[torch.device], Tensor], device: torch.device | str | None
    ) -> Tensor:
        at = torch.device(device or self._first)
        if at not in self._aside:
            self._aside[at] = self.stream(at)
        with torch.cuda.stream(self._aside[at]):
            found = make(at)
        self._aside[at].synchronize()
        return found

    def host_zeros(self, count: int) -> Tensor:
        """Pinned: host and card have one address space, so kernels read and write it in place."""
        return torch.zeros(count, dtype=torch.int32, pin_memory=True)

    def reset(self) -> None:
        """Waits until all work is done; events are then used again."""
        self.synchronize()
        for events in self._events.values():
            events.used = 0

    def synchronize(self) -> None:
        """Waits for all streams; torch's current stream is then the default one of the first device, for all
        other code."""
        for index in self._events:
            torch.cuda.synchronize(index)
        CUDA.set_stream(CUDA.default_stream(self._first))
        self._threads.current = None


# Streams of the driver, kept as long as the process: one api after another takes the same ones.
_DRIVERS: list[Any] = []


def _drivers_streams() -> Iterator[Any]:
    """Yields streams of the current device made before, then new ones. Raises RuntimeError if the driver
    makes none."""
    yield from (each for each in _DRIVERS if each.device_index == torch.cuda.current_device())
    driver = ctypes.CDLL("libcuda.so.1")
    while True:
        handle = ctypes.c_void_p()
        code = driver.cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING))
        if code or not handle.value:
            raise RuntimeError(f"--on cuda: the driver makes no more streams (error {code})")
        _DRIVERS.append(CUDA.ExternalStream(handle.value))
        yield _DRIVERS[-1]


def seen_together(api: CudaApi, stream: Any) -> tuple[Any, float, float]:
    """Returns an event on an idle stream, the host's time (time.perf_counter) when it passed, and the error
    of that time: half of the least time from queueing it until it was seen to have passed."""

    def look() -> tuple[Any, float, float]:
        before_s = time.perf_counter()
        event = api.record(stream)
        while not api.done(event):
            pass
        half_s = (time.perf_counter() - before_s) / 2
        return event, before_s + half_s, half_s

    return min((look() for _ in range(LOOKS)), key=lambda each: each[2])
