"""Prompts whose answers stand in them, in bytes: associative recall, and a needle in a haystack.

    recall    fillers and pairs  k v  in any order, then  ? k1 v1 k2 v2 ... kq        answer  vq
    needle    fillers with  # v1 v2 v3 v4  at a depth that is uniform, then  #        answer  v1 v2 v3 v4

Keys of a prompt differ, and so do the values of a needle. Keys, values and fillers are bytes of three kinds,
so that `solved` reads the answer from the prompt. Random ids have no answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

VOCAB = 256
ASK, MARK = ord("?"), ord("#")
KEYS = np.frombuffer(bytes(range(65, 91)) + bytes(range(97, 123)), np.uint8).astype(np.int64)
VALUES = np.arange(128, 192)
FILLERS = np.arange(192, 256)
# A pair stands in so many bytes, and there are no more pairs than half of the keys.
BYTES_A_PAIR, MOST_PAIRS = 4, 26
QUERIES, NEEDLE = 4, 4
# A recall has QUERIES keys to ask for.
SHORTEST = 32
# What prompts are for; each purpose has random numbers of its own.
TRAINING, HELD_OUT, CHOOSING = 0, 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Prompts:
    """`ids` [prompts, context]; `answers` [prompts, tokens], what should follow, or None where nothing does
    (then `tokens` are decoded); `asked`: the positions in ids and answers whose next byte follows from the
    prompt, which training learns."""

    ids: Ids
    answers: Ids | None
    asked: tuple[int, ...]
    tokens: int


def generator(seed: int, purpose: int, *which: int) -> np.random.Generator:
    """Returns random numbers that depend on all of these and on nothing else."""
    return np.random.default_rng([seed, purpose, *which])


def _distinct(rng: np.random.Generator, rows: int, count: int, of: Ids) -> Ids:
    """Returns rows of `count` elements of `of`, each at most once in a row."""
    order: Ids = rng.random((rows, len(of))).argsort(1)[:, :count]
    return of[order]


def recall(rng: np.random.Generator, prompts: int, context: int) -> Prompts:
    """Draws prompts of associative recall, `context` bytes each, at least `SHORTEST`."""
    body = context - 2 * QUERIES
    pairs = min(MOST_PAIRS, body // BYTES_A_PAIR)
    keys = _distinct(rng, prompts, pairs, KEYS)
    values = rng.choice(VALUES, (prompts, pairs))
    ids = rng.choice(FILLERS, (prompts, context))
    # Each pair is one of `body - pairs` places in a row; a pair before it moves it by one byte more.
    places = _distinct(rng, prompts, pairs, np.arange(body - pairs))
    places.sort(1)
    places += np.arange(pairs)
    np.put_along_axis(ids, places, keys, 1)
    np.put_along_axis(ids, places + 1, values, 1)
    queried = _distinct(rng, prompts, QUERIES, np.arange(pairs))
    asked = body + 1 + 2 * np.arange(QUERIES)
    ids[:, body] = ASK
    ids[:, asked] = np.take_along_axis(keys, queried, 1)
    found = np.take_along_axis(values, queried, 1)
    ids[:, asked[:-1] + 1] = found[:, :-1]
    return Prompts(ids, found[:, -1:], tuple(asked.tolist()), 1)


def needle(rng: np.random.Generator, prompts: int, context: int) -> Prompts:
    """Draws haystacks of `context` bytes, at least `SHORTEST`, with a needle each."""
    ids = rng.choice(FILLERS, (prompts, context))
    values = _distinct(rng, prompts, NEEDLE, VALUES)
    depths = rng.integers(0, depths_of(context), (prompts, 1))
    np.put_along_axis(ids, depths, np.full((prompts, 1), MARK), 1)
    np.put_along_axis(ids, depths + 1 + np.arange(NEEDLE), values, 1)
    ids[:, -1] = MARK
    return Prompts(ids, values, tuple(range(context - 1, context - 1 + NEEDLE)), NEEDLE)


def depths_of(context: int) -> int:
    """Returns how many places a needle may begin at: it ends before the byte that asks for it."""
    return context - 1 - NEEDLE


def random_ids(rng: np.random.Generator, prompts: int, context: int, vocab: int, tokens: int) -> Prompts:
    """Draws ids without a meaning, after which `tokens` are decoded."""
    return Prompts(rng.integers(0, vocab, (prompts, context)), None, (), tokens)


def solved(ids: Ids) -> list[int]:
    """Returns the answer to a prompt [context], read from it by its rules. Raises ValueError where there is
    none.

    >>> solved(np.array([*b"A", 130, *b"B", 131, *b"?B", 131, *b"A"]))
    [130]
    """
    plain: list[int] = ids.tolist()
    if plain[-1] == MARK:
        first = plain.index(MARK)
        return plain[first + 1 : first + 1 + NEEDLE]
    body = plain[: plain.index(ASK)]
    return [body[body.index(plain[-1]) + 1]]


# The needle is first: by it static layers are chosen.
TASKS: Mapping[str, Callable[[np.random.Generator, int, int], Prompts]] = {"needle": needle, "recall": recall}
