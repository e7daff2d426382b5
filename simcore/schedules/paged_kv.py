"""Counts the blocks of a paged KV cache without a loop over sequences (PagedAttention, Kwon et al. 2023).

A sequence with c cached tokens holds ceil(c / block) blocks. Each decoding sequence grows by a token per
iteration, so t - c of a sequence stays the same modulo `block`. `phase` counts the sequences by that number;
a sequence needs a new block in the iterations t that are equal to it modulo `block`:

    new blocks in iterations t .. t + k - 1  =  sum over j < k of phase[(t + j) mod block]

A model with layers of linear attention also holds a state for each sequence, of one size at any length:
`state` blocks of the same pool, from when the sequence is admitted until it leaves or is preempted. A model
of such layers alone has no K and V: its blocks are states, as long as the longest sequence.
"""

from dataclasses import dataclass, field

from simcore.workload.requests import blocks_for


@dataclass(slots=True)
class PagedKv:
    """The cache of one server: `total` blocks of `block` tokens, of which `used` are held. `iteration`:
    decode iterations so far; `state`: the blocks of a sequence besides those of its tokens."""

    total: int
    block: int
    used: int = 0
    iteration: int = 0
    decoding: int = 0
    phase: list[int] = field(default_factory=list)
    state: int = 0

    def __post_init__(self) -> None:
        self.phase = [0] * self.block

    @property
    def free(self) -> int:
        """How many blocks no sequence holds."""
        return self.total - self.used

    def join(self, cached: int) -> None:
        """Adds a decoding sequence with `cached` cached tokens, whose blocks are counted already."""
        self.decoding += 1
        self.phase[(self.iteration - cached) % self.block] += 1

    def leave(self, cached: int, freed: int | None = None) -> None:
        """Removes a decoding sequence with `cached` cached tokens and frees its blocks; only `freed` of them,
        if other sequences hold the rest."""
        self.decoding -= 1
        self.phase[(self.iteration - cached) % self.block] -= 1
        self.used -= blocks_for(cached, self.block) if freed is None else freed

    def needed(self, iterations: int) -> int:
        """New blocks that the next `iterations` decode iterations take."""
        if iterations == 1:
            return self.phase[self.iteration % self.block]
        rounds, rest = divmod(iterations, self.block)
        at = self.iteration
        return rounds * self.decoding + sum([self.phase[(at + j) % self.block] for j in range(rest)])

    def longest(self, iterations: int) -> int:
        """How many decode iterations, at most `iterations`, the free blocks last for."""
        if (
            self.decoding * (iterations // self.block + 1) <= self.free
            or self.needed(iterations) <= self.free
        ):
            return iterations
        low, high = 0, iterations
        while high - low > 1:
            middle = (low + high) // 2
            if self.needed(middle) <= self.free:
                low = middle
            else:
                high = middle
        return low

    def grow(self, iterations: int) -> None:
        """Takes the blocks of `iterations` decode iterations, which have run."""
        self.used += self.needed(iterations)
        self.iteration += iterations
