"""The buffers of whole prompts through a model with states on a card, by a method of its linear attention.

    rows       batch prompts of `length` random ids, one after another, as a serving step has them
    method     the kernel of the op's kind, from states of zeros, as on the CPU (`prompts.by_method`)
    others     as in a step that serves (`cuda_served`)

Each launch computes the same prompts from the beginning: what it reads is on the card once and for all.
"""

from collections.abc import Mapping
from typing import Any

import torch

from simcore.kernels.decoder.choice import choose
from simcore.kernels.decoder.paged_attention import PAGE
from simcore.models.prompt import Prompt
from simcore.models.served_decoder import step_sizes
from simcore.ops.op import Op
from simcore.validate.machines.buffers.cuda_served import ALONE, Cache, CardServedState, Key, rounded
from simcore.validate.machines.buffers.decoder import Weights
from simcore.validate.machines.buffers.prompts import by_method, check_prompt, model_of, whole_prompts
from simcore.validate.machines.state import CardState


class CardPromptState(CardState):
    """The buffers for the launches of `prompt.op`; `served`: those of its rows. Raises InputError as
    `check_prompt`, and ValueError for a model that a card does not run."""

    def __init__(self, prompt: Prompt, weights: Weights, seed: int, device: torch.device | str) -> None:
        check_prompt(prompt)
        self.prompt, count = prompt, prompt.batch
        most, positions = rounded(count, ALONE), prompt.length + PAGE
        turns = weights.constants.frequencies
        model = model_of(prompt)
        cache = Cache(
            model, prompt.tokens, positions, most, count, seed, device, turns, keeps_states=False
        )  # fmt: skip
        self.served = CardServedState(model, weights, cache, count)
        sizes = step_sizes(0, 0, [(prompt.length, 0)] * count, count)
        write = self.served.begin(whole_prompts(prompt), sizes, 0)
        assert write is not None
        write()
        # The head reads a row of each prompt, and none of padding.
        self._first: Key = (0, count, False)
        self.reset()

    def reset(self) -> None:
        """Goes to the first launch."""
        self.served.restore(self._first)

    def begin(self, batch: Any, sizes: Mapping[str, int], replay: int) -> None:
        """Notes that the next launch computes all prompts."""
        del batch, sizes, replay
        self.reset()

    def key(self) -> Key:
        """Returns the key of the rows' state."""
        return self.served.key()

    def restore(self, key: Key) -> None:
        """Sets it."""
        self.served.restore(key)

    def execute(self, op: Op) -> None:
        """Runs a launch of the prompt: a method whole, other launches one by one."""
        served = self.served
        if op.kind.startswith("linear_attention_"):
            own = served.linear
            assert own is not None
            operands = own.part.operands(*own.parts)
            own.heads = by_method(op, operands, own.decay(served.layer))
        elif op.kind == "sample":
            # Nobody goes on from here.
            choose(served.buffers["logits"])
        else:
            served.execute(op)
            if op.kind == "embedding" and self.prompt.all_logits:
                served.every_row_ends()
            return
        served.skip(op)

    def skip(self, op: Op) -> None:
        """Passes over a launch."""
        self.served.skip(op)
