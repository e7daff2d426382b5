"""Tests that share a card, in as many processes as run them: most beside each other, some with none beside.

    shared      every test that is marked `gpu`
    exclusive   those of them that ask for the fixture `whole_card`: what they measure, others would disturb

Two files are locked, the second one, the door, only while somebody waits for the first: who wants the card
for itself is not overtaken for ever by those who share it. Processes that are none of these tests are not
kept away.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def card_lock(*, alone: bool, folder: Path | None = None) -> Iterator[None]:
    """Holds the card, alone or beside others, while its block runs; waits until it may."""
    place = folder or Path(tempfile.gettempdir())
    names = (place / f"simcore-tests-{os.getuid()}.{name}" for name in ("card", "door"))
    card, door = (os.open(name, os.O_RDWR | os.O_CREAT, 0o600) for name in names)
    try:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(card, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
    finally:
        os.close(card)
        os.close(door)
