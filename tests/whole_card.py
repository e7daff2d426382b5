"""Tests that share a card, in as many processes as run them: most beside each other, some with none beside.

    shared      every test that is marked `gpu`
    exclusive   those of them that ask for the fixture `whole_card`: what they measure, others would disturb

Two files are locked, the second one, the door, only while somebody waits for the first: who wants the card
for itself is not overtaken for ever by those who share it. Processes that are none of these tests are not
kept away: they are seen by what they do to the time of the same work done again and again.
"""

import fcntl
import itertools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

# A card of one's own takes equally long for the same work, but for this factor, however often it is done; one
# that others use gives them slices of milliseconds in between.
ROUNDS, KERNELS, ALIKE = 24, 1500, 1.25


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


def others_use_it() -> bool:
    """Whether other processes work on the current CUDA device now."""
    x, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(KERNELS):
            x.add_(1.0)
    graph.replay()
    torch.cuda.synchronize()
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(ROUNDS + 1)]
    ends[0].record()
    for end in ends[1:]:
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    took_ms = [before.elapsed_time(end) for before, end in itertools.pairwise(ends)]
    return max(took_ms) > ALIKE * min(took_ms)
