"""The paged cache against a model that walks over every sequence and every block.

    tokens of a sequence t     block t // block of its list;  a list is as long as its tokens need, no longer
    new blocks of k iterations = sum over sequences of ceil((c + k) / block) - ceil(c / block)

Both begin empty and are led through the same joins, ends and iterations.
"""

from dataclasses import dataclass, field
from itertools import accumulate, count
from random import Random

import pytest

from simcore.schedules.paged_kv import PagedKv
from simcore.workload.requests import blocks_for
from tests.thorough import slow

BLOCKS = (1, 2, 3, 7, 16, 64, 1000)
SEEDS = range(40)


@dataclass
class Sequence:
    """A sequence that decodes: how many tokens it has cached, in which blocks."""

    cached: int
    blocks: list[int]


@dataclass
class Walked:
    """The cache as a list of free block numbers and a list of blocks for each sequence."""

    total: int
    block: int
    sequences: list[Sequence] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = list(range(self.total))

    def admit(self, cached: int) -> None:
        self.sequences.append(Sequence(0, []))
        self.append(self.sequences[-1], cached)

    def append(self, sequence: Sequence, tokens: int) -> None:
        """Token by token: a new block whenever the last one is full."""
        for _ in range(tokens):
            if sequence.cached == len(sequence.blocks) * self.block:
                sequence.blocks.append(self.free.pop())
            sequence.cached += 1

    def release(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.free.extend(sequence.blocks)

    def needed(self, most: int) -> list[int]:
        """New blocks that 0, 1 .. `most` iterations take."""
        held = [len(sequence.blocks) for sequence in self.sequences]
        counts = []
        for iterations in range(most + 1):
            after = [-(-(s.cached + iterations) // self.block) for s in self.sequences]
            counts.append(sum(after) - sum(held))
        return counts

    def check(self) -> None:
        """No block is held twice or lost, and no sequence holds one too many."""
        taken = [block for sequence in self.sequences for block in sequence.blocks]
        assert sorted([*taken, *self.free]) == list(range(self.total))
        for sequence in self.sequences:
            assert len(sequence.blocks) == blocks_for(sequence.cached, self.block)


def test_blocks_for_is_the_ceiling() -> None:
    for block in BLOCKS:
        assert [blocks_for(tokens, block) for tokens in range(3 * block + 1)] == [
            sum(1 for first in range(0, tokens, block)) for tokens in range(3 * block + 1)
        ]


def assert_same(cache: PagedKv, walked: Walked) -> None:
    walked.check()
    assert cache.free == len(walked.free)
    assert cache.used == walked.total - len(walked.free)
    assert cache.decoding == len(walked.sequences)


def assert_forecasts(cache: PagedKv, walked: Walked, most: int) -> None:
    """Every number of iterations up to `most`: what they take, and how many of them the free blocks last."""
    needed = walked.needed(most)
    assert [cache.needed(k) for k in range(most + 1)] == needed
    lasting = [k for k, blocks in enumerate(needed) if blocks <= len(walked.free)]
    for asked in {0, 1, most // 3, most - 1, most}:
        assert cache.longest(asked) == max(k for k in lasting if k <= asked)


def random_step(random: Random, cache: PagedKv, walked: Walked) -> None:
    """A sequence joins or leaves, or some iterations run."""
    what = random.choice(["join", "join", "leave", "grow", "grow"])
    if what == "join":
        cached = random.randint(0, random.choice([3, 40, 300]))
        if blocks_for(cached, walked.block) <= len(walked.free):
            walked.admit(cached)
            cache.used += blocks_for(cached, walked.block)
            cache.join(cached)
    elif what == "leave" and walked.sequences:
        sequence = random.choice(walked.sequences)
        walked.release(sequence)
        cache.leave(sequence.cached)
    elif what == "grow":
        iterations = cache.longest(random.randint(1, random.choice([1, 5, 200])))
        cache.grow(iterations)
        for sequence in walked.sequences:
            walked.append(sequence, iterations)


@pytest.mark.parametrize("block", BLOCKS)
def test_random_lives_are_those_of_explicit_blocks(block: int) -> None:
    for seed in SEEDS:
        random = Random(f"{block} {seed}")
        total = random.randint(1, random.choice([4, 60, 400]))
        cache, walked = PagedKv(total, block), Walked(total, block)
        for step in range(60):
            random_step(random, cache, walked)
            assert_same(cache, walked)
            if step % 6 == 0:
                assert_forecasts(cache, walked, random.randint(1, 3 * min(block, 40) + 5))
        for sequence in list(walked.sequences):
            walked.release(sequence)
            cache.leave(sequence.cached)
        assert cache.used == cache.decoding == 0
        assert cache.phase == [0] * block


@slow
def test_long_forecasts_are_exact() -> None:
    """As many iterations as an answer has tokens, against the running sum of single iterations."""
    for seed in range(30):
        random = Random(seed)
        block = random.choice(BLOCKS)
        cache = PagedKv(random.randint(100, 3000), block, iteration=random.randint(0, 10**6))
        lengths = [random.randint(0, 3 * block) for _ in range(random.randint(1, 50))]
        for cached in lengths:
            cache.join(cached)
        cache.used = random.randint(0, cache.total)
        each = [sum((c + k) % block == 0 for c in lengths) for k in range(4000)]
        sums = list(accumulate(each, initial=0))
        for iterations in random.sample(range(4001), 50):
            assert cache.needed(iterations) == sums[iterations]
            last = next(k for k in count(iterations, -1) if sums[k] <= cache.free)
            assert cache.longest(iterations) == last


def test_a_cache_without_sequences_lasts_for_ever() -> None:
    cache = PagedKv(3, 16)
    assert (cache.needed(10**9), cache.longest(10**9), cache.free) == (0, 10**9, 3)


def test_a_full_cache_lasts_until_the_first_block_is_needed() -> None:
    """13 tokens in blocks of 16, both blocks taken: three more fit."""
    cache = PagedKv(2, 16, used=2)
    cache.join(13)
    cache.join(15)
    assert (cache.longest(100), cache.needed(1), cache.needed(2)) == (1, 0, 1)
    cache.leave(15)
    assert (cache.longest(100), cache.longest(2), cache.free) == (19, 2, 1)
    cache.grow(19)
    assert (cache.used, cache.longest(1)) == (2, 0)
