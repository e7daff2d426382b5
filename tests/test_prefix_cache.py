"""The blocks of a prefix cache against plain models of it that share none of its code.

reuse without a limit   a set of the blocks seen so far; a prompt's hits are those it begins with
reuse with one          a list of block contents in order of eviction, walked over from end to end
"""

from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from simcore.schedules.prefix_cache import PrefixCache, identities
from simcore.workload.requests import Content, Request, blocks_for
from tests.thorough import slow

SEEDS = range(15)
BLOCKS = (1, 2, 3, 16)


def request(number: int, content: Content, prompt: int, output: int = 1) -> Request:
    return Request(number, 0.0, prompt, output, output, content=content)


NUMBERS: dict[Any, int] = {}


def tokens_of(asked: Request) -> list[int]:
    """The tokens of a prompt and its answer: a number for all that has to agree, which is the text, those
    before it, and the place."""
    tokens: list[int] = []
    path: tuple[Any, ...] = ()
    ends = [*asked.content, (-1 - asked.id, asked.prompt_tokens + asked.output_tokens)]
    for text, end in ends:
        path = (*path, text)
        tokens += [NUMBERS.setdefault((path, at), len(NUMBERS)) for at in range(len(tokens), end)]
    return tokens


def serve(cache: PrefixCache, asked: Request) -> int:
    """One request from its beginning to its end, alone; how many tokens of its prompt it found."""
    found = cache.lookup(asked)
    have = len(found) * cache.block
    cache.admit(asked, found)
    cache.extend(asked, have, asked.prompt_tokens - have)
    asked.cached = asked.prompt_tokens + asked.output_tokens - 1
    cache.grow(blocks_for(asked.cached, cache.block) - blocks_for(asked.prompt_tokens, cache.block))
    cache.release(asked)
    return have


def family(random: Random, number: int, texts: int) -> list[Request]:
    """Requests whose prompts are paths in a tree of texts: a text is longer than its parent, by chance."""
    ends = {0: 0}
    paths: dict[int, Content] = {0: ()}
    for text in range(1, texts):
        parent = random.randrange(text)
        ends[text] = ends[parent] + random.randint(1, 40)
        paths[text] = (*paths[parent], (text, ends[text]))
    asked = []
    for i in range(number):
        text = random.randrange(1, texts)
        prompt = ends[text] + random.choice([0, 0, random.randint(1, 30)])
        asked.append(request(i, paths[text], prompt, random.randint(1, 40)))
    return asked


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_are_the_same_where_all_tokens_up_to_their_end_are(block: int) -> None:
    for seed in SEEDS:
        asked = family(Random(f"{block} {seed}"), 8, 6)
        named: dict[int, Any] = {}
        meant: dict[Any, int] = {}
        for one in asked:
            tokens = tokens_of(one)
            full = len(tokens) // block
            for i, name in enumerate(identities(one, 0, full, block)):
                content = tuple(tokens[: (i + 1) * block])
                assert named.setdefault(name, content) == content
                assert meant.setdefault(content, name) == name
            middle = full // 2
            split = [*identities(one, 0, middle, block), *identities(one, middle, full, block)]
            assert split == list(identities(one, 0, full, block))


@dataclass
class Walked:
    """A cache as a list of what its free blocks hold, in order of eviction, walked over from end to end. Of
    several copies the one that was computed first is used."""

    total: int
    block: int
    free: list[Any] = field(default_factory=list)
    computed: int = 0

    def __post_init__(self) -> None:
        self.free = [None] * self.total

    def serve(self, asked: Request) -> int:
        """One request, alone, from its beginning to its end."""
        tokens, block = tokens_of(asked), self.block
        held: list[Any] = []
        while (len(held) + 1) * block < asked.prompt_tokens:
            content = tuple(tokens[: (len(held) + 1) * block])
            here = [entry for entry in self.free if entry and entry[1] == content]
            if not here:
                break
            self.free.remove(min(here))
            held.append(min(here))
        found = len(held) * block
        cached = asked.prompt_tokens + asked.output_tokens - 1
        for i in range(len(held), blocks_for(cached, block)):
            self.free.pop(0)
            self.computed += 1
            full = (i + 1) * block <= cached
            held.append((self.computed, tuple(tokens[: (i + 1) * block])) if full else None)
        self.free += reversed(held)
        return found


@pytest.mark.parametrize("block", BLOCKS)
@slow
def test_one_after_the_other_reuses_what_a_plain_lru_does(block: int) -> None:
    hits = 0
    for seed in SEEDS:
        random = Random(f"{block} {seed}")
        asked = family(random, 30, 8)
        longest = max(blocks_for(one.prompt_tokens + one.output_tokens, block) for one in asked)
        total = longest + random.randint(0, 2 * longest)
        cache, walked = PrefixCache(total, block), Walked(total, block)
        for one in asked:
            found = walked.serve(one)
            assert serve(cache, one) == found
            assert cache.free == total
            hits += found
    assert hits > 0


def assert_sound(cache: PrefixCache, running: list[Request]) -> None:
    """Every block is held by those who have it, or is free; what is known can be found."""
    held = Counter([block for one in running for block in cache.tables[one.id]] + cache.growing)
    ever = range(len(cache.holders))
    assert cache.holders == [held[block] for block in ever]
    assert set(cache.queue) == {block for block in ever if block not in held}
    assert len(held) + cache.free == cache.total
    known = {block: name for block, name in enumerate(cache.known_as) if name is not None}
    found = [(at, name) for name, at in cache.where.items()]
    found += [(at, name) for name, copies in cache.copies.items() for at in copies]
    assert len(found) == len(known)
    assert dict(found) == known


@slow
def test_random_lives_lose_no_block_and_share_only_what_is_the_same() -> None:
    """Prompts in chunks beside each other, which end or are sent back at any time."""
    copied = shared = 0
    for seed in SEEDS:
        random = Random(seed)
        block = random.choice(BLOCKS)
        asked = family(random, 25, 6)
        total = 2 * max(blocks_for(one.prompt_tokens + one.output_tokens, block) for one in asked)
        cache = PrefixCache(total, block)
        running: list[Request] = []
        contents: dict[int, Any] = {}
        while asked or running:
            ends = running and random.random() < 0.2
            if ends or not step(random, cache, asked, running, contents):
                if not running:
                    continue
                one = running.pop(random.randrange(len(running)))
                cache.release(one)
                if one.generated < one.output_tokens and random.random() < 0.5:
                    one.cached = 0
                    asked.append(one)
            copied += len(cache.copies)
            shared += sum(holders > 1 for holders in cache.holders)
            assert_sound(cache, running)
        assert cache.free == total
    assert copied > 0
    assert shared > 0


def step(
    random: Random, cache: PrefixCache, asked: list[Request], running: list[Request], contents: dict[int, Any]
) -> bool:
    """Somebody begins or goes on with a prompt; False where blocks are too few."""
    if asked and random.random() < 0.4:
        one = asked[-1]
        found = cache.lookup(one)
        tokens = tokens_of(one)
        assert len(found) * cache.block < one.prompt_tokens + one.generated
        for i, at in enumerate(found):
            assert contents[at] == tuple(tokens[: (i + 1) * cache.block])
        have = len(found) * cache.block
        chunk = random.randint(1, one.prompt_tokens + one.generated - have)
        if blocks_for(have + chunk, cache.block) - len(found) + cache.unreferenced(found) > cache.free:
            return False
        running.append(asked.pop())
        cache.admit(one, found)
        one.cached = have
        extend(cache, one, chunk, contents)
        return True
    prompts = [one for one in running if one.cached < one.prompt_tokens + one.generated]
    if prompts:
        one = random.choice(prompts)
        chunk = random.randint(1, one.prompt_tokens + one.generated - one.cached)
        if blocks_for(one.cached + chunk, cache.block) - len(cache.tables[one.id]) > cache.free:
            return False
        extend(cache, one, chunk, contents)
    return True


def extend(cache: PrefixCache, one: Request, chunk: int, contents: dict[int, Any]) -> None:
    cache.extend(one, one.cached, chunk)
    one.cached += chunk
    tokens = tokens_of(one)
    for i in range(one.cached // cache.block):
        contents[cache.tables[one.id][i]] = tuple(tokens[: (i + 1) * cache.block])


def test_two_that_compute_the_same_at_once_have_a_copy_each() -> None:
    cache = PrefixCache(4, 4)
    alike = [request(i, ((7, 8),), 8) for i in range(2)]
    for one in alike:
        cache.admit(one, [])
        cache.extend(one, 0, 4)
    for one in alike:
        cache.extend(one, 4, 4)
        one.cached = 8
    assert cache.free == 0
    assert [cache.release(one) for one in alike] == [2, 2]
    # Of both copies the one that was computed first is used, and taken out of the queue.
    third = request(2, ((7, 8),), 9)
    assert cache.lookup(third) == [0, 2]
    cache.admit(third, cache.lookup(third))
    cache.extend(third, 8, 1)
    # What was taken was at the head: the end of the first one's copy is in use, so the second's is gone.
    assert cache.copies == {next(identities(third, 0, 1, 4)): [1]}
    third.cached = 9
    assert cache.release(third) == 3
