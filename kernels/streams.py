"""Buffers that the launches of one stream share, because these launches run one after another.

A captured graph cannot grow a buffer, and a zeroed buffer made inside a capture costs a launch at each
replay. Code that captures graphs for one stream therefore opens `one_stream`, runs each graph's calls once
before the capture, and keeps the buffers as long as the graphs:

    with one_stream(buffers): ...

The buffers may include results of a launch (the norms of a speculation). These hold until the
next such launch of the stream.

Launches may also depend on a word in device memory, which their kernels read first:

    with gated(word): ...

Words through which the programs of a launch tell each other something, and which the launch leaves as it
found them, are made once for a stream, and once for each captured graph: `words`.
"""

import ctypes
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Buffers = dict[Hashable, Any]
_of_stream: ContextVar[Buffers | None] = ContextVar("buffers of a stream", default=None)
_gate: ContextVar[Tensor | None] = ContextVar("gate of a launch", default=None)


@contextmanager
def one_stream(buffers: Buffers) -> Iterator[None]:
    """Launches inside, captured or not, all run on one stream; `buffers` holds the tensors they share."""
    token = _of_stream.set(buffers)
    try:
        yield
    finally:
        _of_stream.reset(token)


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """Returns the stream's shared buffer of this key; outside of `one_stream`, a new one.

    The key has to name everything that `make` depends on, including the owner and the device."""
    buffers = _of_stream.get()
    if buffers is None:
        return make()
    if key not in buffers:
        buffers[key] = make()
    found: T = buffers[key]
    return found


@contextmanager
def gated(gate: Tensor | None) -> Iterator[None]:
    """Launches inside do nothing if the gate (int32 [1], read on the device) is 0; with None they always
    run."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def current_gate() -> Tensor | None:
    """Returns the gate of launches made here."""
    return _gate.get()


# -- words ---------------------------------------------------------------------------------------------------

# By device, stream and captured graph; and what they are for.
_words: Buffers = {}
# Where words are kept that were too few for a later launch: graphs may still use them.
OUTGROWN = "outgrown words"


def words(device: torch.device, of: str, count: int, value: int) -> Tensor:
    """Returns int32 words, `count` or more, that the launches of the current stream share: `value` before the
    first of them, and as it was after each, where it matters. They are made where there are none, or too few,
    and stay as long as the process, or as the buffers of `one_stream`. A captured graph has its own, since
    graphs of one stream may be replayed on several, unless `one_stream` rules that out: replays inside are on
    streams that asked for the words. `of`: what they are for, always with the same value."""
    buffers: Buffers | None = _of_stream.get()
    place: Hashable = device
    if buffers is None:
        stream = torch.cuda.current_stream(device)
        captured = torch.cuda.is_current_stream_capturing()
        graph = _captured(stream.cuda_stream) if captured else 0
        buffers, place = _words, (stream.device_index, stream.cuda_stream, graph)
    key = "words", place, of
    held = buffers.get(key)
    if held is None or len(held) < count:
        if held is not None:
            buffers.setdefault(OUTGROWN, []).append(held)
        held = buffers[key] = _made(device, 1 << max(0, count - 1).bit_length(), value)
    if buffers is not _words:
        # Their memory may come back before the launches that use them have ended: it is of another stream.
        held.record_stream(torch.cuda.current_stream(device))
    found: Tensor = held
    return found


def _made(device: torch.device, count: int, value: int) -> Tensor:
    """Fills words at once, beside what the current thread captures, or allocates to the pool of a graph: in a
    thread and on a stream of their own."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(_filled, device, count, value).result()


def _filled(device: torch.device, count: int, value: int) -> Tensor:
    _enter(device)
    # While any thread captures, others may otherwise wait for no stream.
    _called("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))
    stream = _private_stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        made = torch.full((count,), value, dtype=torch.int32, device=device)
    stream.synchronize()
    return made


def _enter(device: torch.device) -> None:
    """Makes the context of torch on a device that of the current thread, which may have none yet."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _called("cuDeviceGet", ctypes.byref(number), device.index)
    _called("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
    _called("cuCtxSetCurrent", context)


@cache
def _private_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nobody else gets: torch hands its own out in turn, one that is captured among them."""
    handle = ctypes.c_void_p()
    _called("cuStreamCreate", ctypes.byref(handle), NON_BLOCKING)
    return torch.cuda.ExternalStream(handle.value, device)  # type: ignore[no-untyped-call]


def _captured(stream: int) -> int:
    """Returns the number of the capture that a stream is in."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    into = ctypes.byref(status), ctypes.byref(number)
    _called("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *into, None, None, None)
    return number.value


# CU_STREAM_CAPTURE_MODE_RELAXED and CU_STREAM_NON_BLOCKING of CUDA's driver API.
RELAXED, NON_BLOCKING = 2, 1


def _called(name: str, *arguments: Any) -> None:
    """Calls CUDA's driver API, for what torch does not hand through. Raises RuntimeError."""
    if failed := getattr(_driver(), name)(*arguments):
        raise RuntimeError(f"{name}: CUDA error {failed}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
