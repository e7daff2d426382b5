"""Turns of conversations: how long their prompts are, and what they have in common.

    prompt_k = shared + (new_1 + answer_1) + .. + (new_k-1 + answer_k-1) + new_k

Turn k begins with all of turn k - 1 and its answer. A session ends before the turn whose prompt would be
longer than there is room for.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simcore.workload.requests import Content, own_text

# The text with which all sessions begin.
SHARED_TEXT = 0

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Turns of sessions, one session after the other. `opens` [n]: which are the first of one; each other one
    comes `think_s` after the answer to the one before it. All begin with `shared_tokens`."""

    opens: Bools
    think_s: float
    shared_tokens: int

    def first(self, most: int) -> "Turns":
        """The first so many of them."""
        return replace(self, opens=self.opens[:most])


def laid_out(
    turns: Ints, new: Ints, answers: Ints, shared_tokens: int, longest_prompt: int
) -> tuple[Bools, Ints, Ints]:
    """Which turns open a session, their prompt tokens and their answers', each [of the turns that are left].

    `turns` [sessions] says how many each would have; `new` and `answers` [sum of turns] are tokens.

    >>> opens, prompts, _ = laid_out(np.array([2, 3]), np.full(5, 10), np.full(5, 7), 100, 130)
    >>> prompts.tolist(), opens.tolist()
    ([110, 127, 110, 127], [True, False, True, False])
    """
    begins = np.concatenate(([0], np.cumsum(turns)[:-1]))
    before = np.concatenate(([0], np.cumsum(new + answers)[:-1]))
    prompts = shared_tokens + before - np.repeat(before[begins], turns) + new
    opens = np.zeros(len(new), dtype=np.bool_)
    opens[begins] = True
    kept = prompts <= longest_prompt
    return opens[kept], prompts[kept], answers[kept]


def turn_contents(turns: Turns, prompt_tokens: Ints, answer_tokens: Ints) -> Iterator[Content]:
    """What the prompts are made of: text 0 is what all share; what a turn adds is its request's own text, as
    its answer is. Requests have the numbers of the turns."""
    start: Content = ((SHARED_TEXT, turns.shared_tokens),) if turns.shared_tokens else ()
    content = start
    lengths = zip(turns.opens.tolist(), prompt_tokens.tolist(), answer_tokens.tolist(), strict=True)
    for number, (opens, prompt, answer) in enumerate(lengths):
        content = start if opens else content
        yield content
        content = (*content, (own_text(number), prompt + answer))
