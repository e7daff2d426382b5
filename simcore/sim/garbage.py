"""Python's garbage collection, off for a while: where it would walk over all that is live again and again
(hundreds of thousands of requests or launches), or stop the clock amid a measurement of short ops; and where
nothing leaves cycles behind."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """No collection inside; as it was afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
