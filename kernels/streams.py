"""Buffers that the launches of one stream share, because these launches run one after another.

A captured graph cannot grow a buffer, and a zeroed buffer made inside a capture costs a launch at each
replay. Code that captures graphs for one stream therefore opens `one_stream`, runs each graph's calls once
before the capture, and keeps the buffers as long as the graphs:

    with one_stream(buffers): ...

The buffers may include results of a launch (the norms and verdicts of a speculation). These hold until the
next such launch of the stream.

Launches may also depend on a word in device memory, which their kernels read first:

    with gated(word): ...
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

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


def is_one_stream() -> bool:
    """Whether `one_stream` is open here."""
    return _of_stream.get() is not None


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
