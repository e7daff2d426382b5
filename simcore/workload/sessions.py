"""Turns of conversations: the lengths of their prompts, and the prefixes that they share.

    prompt_k = shared + (new_1 + answer_1) + .. + (new_k-1 + answer_k-1) + new_k

The prompt of turn k begins with the prompt of turn k - 1 and its answer. A session ends before the turn whose
prompt would be longer than the room.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from simcore.workload.requests import Content, own_text

# The text of the prefix of all sessions.
SHARED_TEXT = 0

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """Turns of sessions, one session after another. `opens` [n]: whether a turn is the first of its session;
    each other turn comes `think_s` after the answer to the turn before. All prompts begin with the same
    `shared_tokens` tokens."""

    opens: Bools
    think_s: float
    shared_tokens: int

    def first(self, most: int) -> "Turns":
        """Only the first `most` turns."""
        return replace(self, opens=self.opens[:most])


def laid_out(
    turns: Ints, new: Ints, answers: Ints, shared_tokens: int, longest_prompt: int
) -> tuple[Bools, Ints, Ints]:
    """Whether each turn opens a session, its prompt tokens and its answer tokens, each [turns that are kept].

    `turns` [sessions]: how many turns each session would have; `new` and `answers` [sum of turns] are tokens.

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
    """The content of each prompt: text 0 is the shared prefix; the tokens that a turn adds and its answer are
    the request's own text. Requests are numbered like the turns."""
    start: Content = ((SHARED_TEXT, turns.shared_tokens),) if turns.shared_tokens else ()
    content = start
    lengths = zip(turns.opens.tolist(), prompt_tokens.tolist(), answer_tokens.tolist(), strict=True)
    for number, (opens, prompt, answer) in enumerate(lengths):
        content = start if opens else content
        yield content
        content = (*content, (own_text(number), prompt + answer))
