"""The buffers of whole prompts through a model with states, by a method of computing its linear attention.

    rows       batch prompts of `length` random ids, one after another
    method     q, k, v as [batch, heads, length, ..]: the kernel of the op's kind, from states of zeros
    others     as a step of a served model that computes these prompts whole

Each launch computes the same prompts from the beginning.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from simcore.input.files import InputError
from simcore.models.decoder import Dtypes
from simcore.models.mixers import SLIDING
from simcore.models.prompt import ORIGINAL, Prompt
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op
from simcore.validate.machines.buffers.served import ServedState, served_states
from simcore.validate.machines.state import State, run_kernel
from simcore.workload.requests import Batch, Request


@dataclass(eq=False, repr=False)
class PromptState(State):
    """The buffers of one rank for the launches of `prompt.op`; `served`: those of its rows."""

    prompt: Prompt
    served: ServedState

    def begin(self, batch: Any, sizes: Mapping[str, int], replay: int) -> None:
        """Notes that the next launch computes all prompts."""
        del batch, sizes, replay
        tokens = self.prompt.tokens
        totals = {"tokens": tokens, "rows": self.prompt.batch, "prompt_tokens": tokens, "prompt_kv": tokens}
        self.served.take_back_answers()
        self.served.begin(whole_prompts(self.prompt), totals, 0)
        if self.prompt.all_logits:
            self.served.body.last_rows = None

    def execute(self, op: Op) -> None:
        """Runs a launch of the prompt: a method whole, other launches one by one."""
        if not op.kind.startswith("linear_attention_"):
            self.served.execute(op)
            return
        body = self.served.body
        operands = body.linear_operands()
        decay = body.linear.decay(body.layer, operands[0].device)
        body.buffers["heads"] = by_method(op, operands, decay).to(body.activation)

    def skip(self, op: Op) -> None:
        """Passes over a launch."""
        self.served.skip(op)


def by_method(op: Op, operands: Iterable[Tensor], decay: Tensor) -> Tensor:
    """Returns the outputs [rows, heads dim] of a method of linear attention, of q, k, v [rows, heads, ..]."""
    shape = op["batch"], op["length"]
    q, k, v = (x.reshape(*shape, *x.shape[1:]).transpose(1, 2) for x in operands)
    out: Tensor = run_kernel(op, q, k, v, decay)[0]
    return out.transpose(1, 2).reshape(op["batch"] * op["length"], -1)


def whole_prompts(prompt: Prompt) -> Batch:
    """Returns the requests of a prompt's sequences, each computed whole."""
    length = prompt.length
    return Batch([(Request(i, 0.0, length, 1, 1), length, 0) for i in range(prompt.batch)], [])


def model_of(prompt: Prompt) -> ServedDecoder:
    """Returns the model whose step computes a prompt."""
    return ServedDecoder(prompt.config, dtypes=Dtypes(prompt.dtype, prompt.dtype, prompt.dtype))


def check_prompt(prompt: Prompt) -> None:
    """Raises ValueError for a method that is no op of its own, InputError for layers that attend in a window:
    the kernels here do not know of it."""
    if SLIDING in prompt.config.layer_mixers:
        name = prompt.config.name
        raise InputError(f"model: {name} has layers of {SLIDING}; prompts through them are only priced")
    if prompt.method == ORIGINAL:
        raise ValueError(f"{ORIGINAL}: a model's published code is priced, and not run here")


def prompt_state(prompt: Prompt, seed: int) -> PromptState:
    """Returns the buffers of a prompt. Raises as `check_prompt`."""
    check_prompt(prompt)
    (served,) = served_states(model_of(prompt), {}, seed, prompt.tokens)
    return PromptState(prompt, served)
