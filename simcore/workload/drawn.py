"""The requests of one run as arrays, and as `Request`s one after another."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from simcore.workload.requests import Content, Request
from simcore.workload.sessions import Turns, turn_contents
from simcore.workload.spec import ClosedLoop, Workload

_CHUNK = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class Tenants:
    """Whose requests they are. `of` [n]: the place of each one's tenant in the workload; `max_tokens`: by
    place, the most output tokens that a tenant can ask for."""

    of: NDArray[np.int16]
    max_tokens: tuple[int, ...]

    def first(self, most: int) -> "Tenants":
        """Only the first `most` requests."""
        return replace(self, of=self.of[:most])


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The requests of one run, in order of arrival; each array is [n].

    `arrival_s` ascends from 0 for the first request, and is None in a closed loop. Every request has at least
    one prompt and one output token, at most `max_tokens` of output and `longest_prompt` of prompt: the most
    that the workload can ask for, drawn or not. `left_out` recorded requests had no prompt or no output
    tokens (for example failed ones) and are not simulated. `rate_per_s`: see `offered_rate_per_s`. Shared
    prompts: with `distinct`, request i has the prompt of request i modulo `distinct`; `hash_ids` [n] name the
    blocks of prompts, of `hash_block_tokens` tokens; `turns`: the turns of sessions, one session after
    another; all but the first turn of each have no time yet (NaN). If all three are None, all prompts differ.
    `tenants`: whose requests they are, None if the workload has none. `lead_s`: how long after the begin of a
    trace's window its first request comes, at the speed of the replay.
    """

    arrival_s: NDArray[np.float64] | None
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    max_tokens: int
    longest_prompt: int
    left_out: int = 0
    rate_per_s: float | None = None
    distinct: int | None = None
    hash_ids: list[tuple[int, ...]] | None = None
    hash_block_tokens: int = 512
    turns: Turns | None = None
    tenants: Tenants | None = None
    lead_s: float = 0.0

    @property
    def shared_text(self) -> bool:
        """Whether prompts may begin alike."""
        return not (self.turns is None and self.distinct is None and self.hash_ids is None)

    def first(self, most: int) -> "Drawn":
        """Only the first `most` requests."""
        arrival_s = None if self.arrival_s is None else self.arrival_s[:most]
        return replace(
            self,
            arrival_s=arrival_s,
            prompt_tokens=self.prompt_tokens[:most],
            output_tokens=self.output_tokens[:most],
            turns=None if self.turns is None else self.turns.first(most),
            tenants=None if self.tenants is None else self.tenants.first(most),
        )


def contents(drawn: Drawn) -> Iterator[Content]:
    """The content of each prompt, one after another; empty if all prompts differ."""
    if drawn.turns is not None:
        yield from turn_contents(drawn.turns, drawn.prompt_tokens, drawn.output_tokens)
    elif drawn.distinct is not None:
        for number, prompt in enumerate(drawn.prompt_tokens.tolist()):
            yield ((number % drawn.distinct, prompt),)
    elif drawn.hash_ids is not None:
        block = drawn.hash_block_tokens
        for hash_ids, prompt in zip(drawn.hash_ids, drawn.prompt_tokens.tolist(), strict=False):
            # A prompt that the workload made shorter is the beginning of the recorded one.
            ends = range(block, prompt + block, block)
            yield tuple((text, min(end, prompt)) for text, end in zip(hash_ids, ends, strict=False))
    else:
        yield from repeat((), len(drawn.prompt_tokens))


def requests(drawn: Drawn) -> Iterator[Request]:
    """Yields the requests one after another. `arrival_s` is NaN if it is not known before the run: in a
    closed loop, and for all turns of a session except the first."""
    content, most = contents(drawn), longest_answers(drawn)
    for start in range(0, len(drawn.prompt_tokens), _CHUNK):
        part = slice(start, start + _CHUNK)
        prompts = drawn.prompt_tokens[part].tolist()
        outputs = drawn.output_tokens[part].tolist()
        times = [math.nan] * len(prompts) if drawn.arrival_s is None else drawn.arrival_s[part].tolist()
        rows = zip(times, prompts, outputs, strict=True)
        for number, (time_s, prompt, output) in enumerate(rows, start):
            yield Request(number, time_s, prompt, output, next(most), content=next(content))


def longest_answers(drawn: Drawn) -> Iterator[int]:
    """The answer tokens that a server must reserve for each request, one after another."""
    if drawn.tenants is None:
        yield from repeat(drawn.max_tokens, len(drawn.prompt_tokens))
    else:
        yield from map(drawn.tenants.max_tokens.__getitem__, drawn.tenants.of.tolist())


def offered_rate_per_s(workload: Workload, drawn: Drawn) -> float | None:
    """Requests per second that arrive, served or not: the given rate, or (n - 1) / span of a trace, by
    recorded times over rate_scale, so that replicas with other jitter have the same rate. For sessions it is
    the rate at which they open, because the rate of turns is an outcome. None in a closed loop, whose rate is
    also an outcome, and if all recorded requests have the same time."""
    return None if isinstance(workload.arrivals, ClosedLoop) else drawn.rate_per_s


def mean_prompt_tokens(drawn: Drawn) -> float:
    """The mean length of the drawn prompts, in tokens."""
    return float(drawn.prompt_tokens.mean())


def mean_output_tokens(drawn: Drawn) -> float:
    """The mean length of the drawn outputs, in tokens."""
    return float(drawn.output_tokens.mean())
