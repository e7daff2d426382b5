"""Buffers that launches of one stream share, for they run one after another.

A captured graph cannot grow a buffer, and one that is made inside a capture costs a launch whenever it has to
be zero. Whoever captures graphs for one stream says so, runs each once before it is captured, and keeps what
is made there as long as the graphs:

    with one_stream(buffers): ...

What a launch leaves may be among them (the norms and verdicts of a speculation): it holds until the next such
launch of the stream.

Launches may also hang on a word in device memory, which their kernels read first:

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
    """Launches inside, captured or not, all run on one stream; what they share is in `buffers`."""
    token = _of_stream.set(buffers)
    try:
        yield
    finally:
        _of_stream.reset(token)


def shared(key: Hashable, make: Callable[[], T]) -> T:
    """What launches of this stream share by this key; made anew where nobody has said that they are of one.
    The key has to say all that `make` goes by, whose it is and the device too."""
    buffers = _of_stream.get()
    if buffers is None:
        return make()
    if key not in buffers:
        buffers[key] = make()
    found: T = buffers[key]
    return found


def is_one_stream() -> bool:
    """Whether somebody has said so."""
    return _of_stream.get() is not None


@contextmanager
def gated(gate: Tensor | None) -> Iterator[None]:
    """Launches inside do nothing where the gate (int32 [1], read on the device) is 0; None: they always
    run."""
    token = _gate.set(gate)
    try:
        yield
    finally:
        _gate.reset(token)


def current_gate() -> Tensor | None:
    """The gate of the launches that are made here."""
    return _gate.get()
