"""Random streams of a workload: one for each purpose, keyed by seed, replica and purpose.

They are counter-based: other lengths do not change the arrivals, another rate only stretches them, and
replicas share no random number.
"""

from typing import Literal, NamedTuple

import numpy as np

Purpose = Literal["arrivals", "prompt_tokens", "output_tokens", "jitter", "turns", "tenants", "lead"]


class Streams(NamedTuple):
    """The streams of one replica. `part`: several arrivals, or lengths, of one workload have one each."""

    seed: int
    replica: int
    part: int = 0

    def of(self, purpose: Purpose) -> np.random.Generator:
        """The random generator for one purpose, at its start."""
        return stream(self.seed, self.replica, purpose, self.part)


def stream(seed: int, replica: int, purpose: Purpose, part: int = 0) -> np.random.Generator:
    """The random generator for one purpose. Replicas are 2^192 counts apart in the same Philox sequence,
    parts 2^128. Raises ValueError unless seed and replica are unsigned integers of 64 bits."""
    for name, value in (("seed", seed), ("replica", replica)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name} must be an integer from 0 to 2^64 - 1, got {value!r}")
    word = int.from_bytes(purpose.encode()[:8])
    key = np.array([seed, word], dtype=np.uint64)
    counter = np.array([0, 0, part, replica], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))
