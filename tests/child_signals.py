"""Signals of processes that a test starts."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def child_signals(of: Mapping[int, Any]) -> Iterator[None]:
    """Processes that are started inside begin with these handlers, by signal (`signal.SIG_DFL` or `SIG_IGN`):
    a shell that runs tests in the background has its children ignore what Ctrl-C sends, nohup hang-ups."""
    kept = {number: signal.signal(number, how) for number, how in of.items()}
    try:
        yield
    finally:
        for number, how in kept.items():
            signal.signal(number, how)
