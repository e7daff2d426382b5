"""What a server is asked for, and the journal of how it went: shared by schedules, arrivals and figures.

TTFT = first_token_s - arrival_s        E2E = finish_s - arrival_s
TPOT = (finish_s - first_token_s) / (output_tokens - 1)            (vLLM's formulas)

A schedule fills in the times of a request from its machine's clock, and notes every step in the journal.
No machine is known here.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from math import nan

import numpy as np
from numpy.typing import NDArray

# The inbox that requests come into, and what comes into it when no more will.
REQUESTS = "requests"
END = "end"
# What a prompt is made of: (text, where it ends in tokens), ascending. A text is a number from 0 on, or the
# `own_text` of a request; it stands for its own tokens and all that come before them.
Content = tuple[tuple[int, int], ...]


def own_text(request: int) -> int:
    """The text of a request's answer, and of what is in its prompt alone, by its number: like no other."""
    return -1 - request


# Its constructor is written out for the time that it takes: see trace.py.
@dataclass(slots=True, eq=False, init=False)
class Request:
    """One request. `output_tokens` is where it ends (EOS, or the maximum); `max_tokens` what a server that
    does not know that has to reserve. Times in seconds, NaN while they have not come; `scheduled_s` is
    when its first work was launched. `instance` is the server that took it. A request that no server could
    ever hold is `rejected`. `content` says what its prompt is made of, for servers that keep prompts: texts
    and where each ends, in tokens; what follows the last one is like nothing else (`own_text`).
    `cached_prompt_tokens` of its prompt were in the server's cache when it was first scheduled."""

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
    # What a schedule keeps of it while it runs: tokens generated, tokens cached, and one thing of its own.
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
        self.generated = generated
        self.cached = cached
        self.held = held


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
    `computed` rows that the kernels work on (more than `decoding` where finished requests are computed on),
    `prefill_tokens` prompt tokens and `first_tokens` prompts that end and so give their first token.
    `waiting` requests queue and `kv_used` units of KV (blocks or slots) are held when it starts, `kv_peak`
    just before it ends.
    """

    rows: array = field(default_factory=lambda: array("d"))  # type: ignore[type-arg]
    # Who wants to hear of every answer: clients that go on after it, a router that counts what is open.
    answered: Callable[[Request, float], None] | None = None

    def finish(self, request: Request, at_s: float) -> None:
        """A request has its last token."""
        request.finish_s = at_s
        if self.answered is not None:
            self.answered(request, at_s)

    def reject(self, request: Request, at_s: float) -> None:
        """A request could never be served."""
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
        """Notes one step; without `kv_peak`, it holds what it held at its start all along."""
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
    """Blocks that so many tokens take.

    >>> blocks_for(0, 16), blocks_for(16, 16), blocks_for(17, 16)
    (0, 1, 2)
    """
    return -(-tokens // block)
