"""Requests, and the journal of a server's steps: shared by schedules, arrivals and metrics.

TTFT = first_token_s - arrival_s        E2E = finish_s - arrival_s
TPOT = (finish_s - first_token_s) / (output_tokens - 1)            (vLLM's formulas)

A schedule sets the times of a request from its machine's clock, and records every step in the journal. This
file knows no machine.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# The inbox of requests, and the item in it that says that no more will come.
REQUESTS = "requests"
END = "end"
# The content of a prompt: (text, end in tokens), ascending. A text is a number from 0 on, or the `own_text`
# of a request; it identifies its own tokens and all tokens before them.
Content = tuple[tuple[int, int], ...]


def own_text(request: int) -> int:
    """The text of a request's answer and of the unshared part of its prompt: no other request has it."""
    return -1 - request


# Its constructor is written out for speed: see trace.py.
@dataclass(slots=True, eq=False, init=False)
class Request:
    """One request. `output_tokens`: the length of its answer (until EOS or the maximum); `max_tokens`: what a
    server that does not know that length must reserve. Times in seconds, NaN until known; `scheduled_s`: when
    its first work was launched. `instance`: the server that took it. `rejected`: the server could never hold
    it. `content`: the content of its prompt, for prefix caching: texts and where each ends, in tokens; the
    tokens after the last text are unique (`own_text`). `cached_prompt_tokens`: prompt tokens in the server's
    cache when the request was first scheduled. `waited_for_kv`: whether it was next and found no room in the
    KV cache, 0 or 1."""

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    scheduled_s: float
    first_token_s: float
    finish_s: float
    preemptions: int
    instance: int
    rejected: bool
    content: Content
    cached_prompt_tokens: int
    waited_for_kv: int
    # A schedule's state of the request: tokens generated, tokens cached, and a number of the schedule's own.
    generated: int
    cached: int
    held: int

    def __init__(
        self,
        id: int,
        arrival_s: float,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int,
        scheduled_s: float = nan,
        first_token_s: float = nan,
        finish_s: float = nan,
        preemptions: int = 0,
        instance: int = 0,
        rejected: bool = False,
        content: Content = (),
        cached_prompt_tokens: int = 0,
        waited_for_kv: int = 0,
        generated: int = 0,
        cached: int = 0,
        held: int = 0,
    ) -> None:
        self.id = id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.max_tokens = max_tokens
        self.scheduled_s = scheduled_s
        self.first_token_s = first_token_s
        self.finish_s = finish_s
        self.preemptions = preemptions
        self.instance = instance
        self.rejected = rejected
        self.content = content
        self.cached_prompt_tokens = cached_prompt_tokens
        self.waited_for_kv = waited_for_kv
        self.generated = generated
        self.cached = cached
        self.held = held


class Batch(NamedTuple):
    """Whose tokens a launch computes, for machines with KV caches; its sizes have only totals, by which it is
    priced.

    `prompts`: (request, tokens computed now, tokens cached before). `decoding`: (request, tokens cached
    before), one token each; in replay i of a burst, i more are cached, but at most `slot_tokens` - 1.
    `moved`: requests whose slots of `slot_tokens` tokens are copied."""

    prompts: Sequence[tuple[Request, int, int]] = ()
    decoding: Sequence[tuple[Request, int]] = ()
    moved: Sequence[Request] = ()
    slot_tokens: int | None = None


# Columns of a journal's rows, in order.
STEP = (
    "instance",
    "start_s",
    "end_s",
    "replays",
    "decoding",
    "computed",
    "prefill_tokens",
    "first_tokens",
    "waiting",
    "kv_used",
    "kv_peak",
)


@dataclass(slots=True)
class Journal:
    """Every step of every instance, as rows of numbers.

    A step is one launch: `replays` iterations in which `decoding` requests get a token each, out of
    `computed` rows that the kernels compute (more than `decoding` if finished requests are still computed),
    with `prefill_tokens` prompt tokens and `first_tokens` requests that get the first token after their
    prefill. `waiting` requests queue and `kv_used` units of KV (blocks or slots) are held when the step
    starts, `kv_peak` just before it ends.
    """

    rows: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    # Called with every request that ends: by closed-loop clients, and by a router that counts open requests.
    answered: Callable[[Request, float], None] | None = None

    def finish(self, request: Request, at_s: float) -> None:
        """Ends a request, which has its last token."""
        request.finish_s = at_s
        if self.answered is not None:
            self.answered(request, at_s)

    def reject(self, request: Request, at_s: float) -> None:
        """Rejects a request that could never be served."""
        request.rejected = True
        if self.answered is not None:
            self.answered(request, at_s)

    def step(
        self,
        instance: int,
        start_s: float,
        end_s: float,
        replays: int,
        decoding: int,
        computed: int,
        prefill_tokens: int,
        first_tokens: int,
        waiting: int,
        kv_used: int,
        kv_peak: int | None = None,
    ) -> None:
        """Records one step; `kv_peak` is `kv_used` unless given."""
        self.rows.extend(
            (
                instance, start_s, end_s, replays, decoding, computed, prefill_tokens, first_tokens, waiting,
                kv_used, kv_used if kv_peak is None else kv_peak,
            )
        )  # fmt: skip

    def table(self) -> dict[str, NDArray[np.float64]]:
        """The columns of `STEP`, each [steps]."""
        rows = np.frombuffer(self.rows, dtype=np.float64).reshape(-1, len(STEP))
        return {name: rows[:, i] for i, name in enumerate(STEP)}


def blocks_for(tokens: int, block: int) -> int:
    """How many blocks hold `tokens` tokens.

    >>> blocks_for(0, 16), blocks_for(16, 16), blocks_for(17, 16)
    (0, 1, 2)
    """
    return -(-tokens // block)
