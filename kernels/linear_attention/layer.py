"""What a decoder's layer of linear attention launches besides what other layers do.

    decode   a token of each sequence: q, k [sequences, heads, rank], v [.., dim], states in place
    prompts  a chunk of each prompt, by chunks from its state to the next, in place
    lrpe     [x cos, x sin] of each head
    silu, product

A state is fp32, or fp64 beside numbers in fp64: [heads, rank, dim] of each sequence.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import nan

import torch
from torch import Tensor
from torch.nn import functional

from simcore.kernels.kernel import Kernel, Run, dtype_of
from simcore.kernels.linear_attention.dispatch import by_tensors, step_by_tensors
from simcore.kernels.linear_attention.lightning import lightning
from simcore.kernels.linear_attention.step import step
from simcore.kernels.linear_attention.triton_served import reference_served_chunks, served_chunks
from simcore.ops.linear_attention import linear_attention
from simcore.ops.linear_layer import PROMPTS, prompts_of
from simcore.ops.op import Op

_CHUNKED = by_tensors("lightning", lightning)


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of states beside numbers in `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def _decode(op: Op, q: Tensor, k: Tensor, v: Tensor, states: Tensor, decay: Tensor) -> Tensor:
    """Returns out [sequences, heads, dim]; updates states [sequences, heads, rank, dim]."""
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    return step_by_tensors(op, q, k, v, states, decay)[0].squeeze(2)


def _reference_decode(op: Op, q: Tensor, k: Tensor, v: Tensor, states: Tensor, decay: Tensor) -> Tensor:
    q, k, v = (x.unsqueeze(2) for x in (q, k, v))
    return step(op, q, k, v, states, decay)[0].squeeze(2)


def _prompts(
    op: Op, q: Tensor, k: Tensor, v: Tensor, states: Sequence[Tensor], now: Tensor, decay: Tensor
) -> Tensor:
    """Returns out [tokens, heads, dim] of prompts that stand one after another, `now` [prompts] tokens of
    each; updates the state [heads, rank, dim] of each, where it is."""
    return _each(_CHUNKED, op, q, k, v, states, now, decay)


def _reference_prompts(
    op: Op, q: Tensor, k: Tensor, v: Tensor, states: Sequence[Tensor], now: Tensor, decay: Tensor
) -> Tensor:
    return _each(lightning, op, q, k, v, states, now, decay)


def _each(
    run: Run, op: Op, q: Tensor, k: Tensor, v: Tensor, states: Sequence[Tensor], now: Tensor, decay: Tensor
) -> Tensor:
    outputs, first = [], 0
    for tokens, state in zip(now.tolist(), states, strict=True):
        rows = slice(first, first + tokens)
        own = linear_attention(
            "lightning", batch=1, heads=op["heads"], length=tokens, rank=op["rank"], dim=op["dim"],
            dtype=op.dtype, decay=True,
        )  # fmt: skip
        each = (x[rows].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out, after = run(own, *each, decay, state.unsqueeze(0))
        state.copy_(after[0])
        outputs.append(out[0].transpose(0, 1))
        first += tokens
    return torch.cat(outputs)


def _served(op: Op, *tensors: Tensor) -> Tensor:
    """As a step that serves computes prompts; see `served_chunks`."""
    del op
    return served_chunks(*tensors)


def _reference_served(op: Op, *tensors: Tensor) -> Tensor:
    del op
    reference_served_chunks(*tensors)
    return tensors[-1]


def lrpe(op: Op, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns [tokens, heads, 2 d] of x, cos and sin [tokens, heads, d]."""
    del op
    return torch.cat((x * cos, x * sin), -1)


def silu(op: Op, x: Tensor) -> Tensor:
    """Returns x sigmoid(x)."""
    del op
    return functional.silu(x)


def product(op: Op, x: Tensor, y: Tensor) -> Tensor:
    """Returns x y, element by element."""
    del op
    return x * y


def _random(op: Op, generator: torch.Generator, device: torch.device, *size: int) -> Tensor:
    return torch.randn(size, generator=generator, dtype=dtype_of(op), device=device)


def _rows(op: Op, tokens: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    heads, rank = op["heads"], op["rank"]
    q, k = (_random(op, generator, device, tokens, heads, rank) for _ in range(2))
    return q, k * rank**-0.5, _random(op, generator, device, tokens, heads, op["dim"])


def _states(op: Op, count: int, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    size = (count, op["heads"], op["rank"], op["dim"])
    state = torch.randn(size, generator=generator, dtype=state_dtype(dtype_of(op)), device=device)
    return state, 1.0 - 0.1 * torch.rand(op["heads"], generator=generator, device=device)


def _decode_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    rows = _rows(op, op["batch"], generator, device)
    return *rows, *_states(op, op["batch"], generator, device)


def _tokens_of(op: Op) -> list[int]:
    """Returns the tokens of each prompt."""
    count = prompts_of(op)
    least, more = divmod(op["tokens"], count)
    return [least + (i < more) for i in range(count)]


def _prompt_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    now = _tokens_of(op)
    states, decay = _states(op, len(now), generator, device)
    return *_rows(op, op["tokens"], generator, device), states, torch.tensor(now), decay


def _served_inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Prompts that have a state, of a token before."""
    now = _tokens_of(op)
    states, decay = _states(op, len(now), generator, device)
    slots = torch.arange(len(now), dtype=torch.int32)
    starts = torch.tensor([0, *accumulate(now)], dtype=torch.int32)
    lengths = torch.tensor(now, dtype=torch.int32) + 1
    q, k, v = _rows(op, op["tokens"], generator, device)
    where = (each.to(device) for each in (slots, starts, lengths))
    return q, k, v, states, *where, decay, torch.full_like(q[..., :1], nan).repeat(1, 1, op["dim"])


def _wide(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor]:
    return (_random(op, generator, device, op["tokens"], op["width"]),)


def _two_wide(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    return *_wide(op, generator, device), *_wide(op, generator, device)


def _turned(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    x, angles = (each.unsqueeze(1) for each in _two_wide(op, generator, device))
    return x, angles.cos(), angles.sin()


LAYER: Mapping[str, Kernel] = {
    "linear_attention_decode": Kernel(_decode, _reference_decode, _decode_inputs),
    "linear_attention_prompts": Kernel(_prompts, _reference_prompts, _prompt_inputs),
    "lrpe": Kernel(lrpe, lrpe, _turned),
    "silu": Kernel(silu, silu, _wide),
    "product": Kernel(product, product, _two_wide),
}
# What a card launches for an op in place of the table's function, which asks the device for the prompts.
ON_A_CARD: Mapping[str, Kernel] = {PROMPTS: Kernel(_served, _reference_served, _served_inputs)}
