"""Switches Python's garbage collection off for a while: where it would walk over hundreds of thousands of
live requests or launches again and again, or interrupt a measurement of short ops. Only for code that leaves
no reference cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """No collection inside the block; the former state afterwards."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
