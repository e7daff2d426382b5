"""Trains a small decoder on both tasks, from a seed.

    loss = mean cross entropy of the bytes that follow from the prompt (`Prompts.asked`), of both tasks
    rate = peak * min(1, step / warm) * (1 + cos(pi step / steps)) / 2,   AdamW, gradients cut at norm 1

Contexts grow: up to half of the steps from 32 bytes to the longest, as short ones teach the mechanism (find
the byte, give the next) with less work. From then on all are drawn alike. Weights and sums are fp32; on a
card products are bf16. On a CPU the same seed gives the same weights, with as many threads; on a card sums of
gradients may differ in their order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from simcore.models.decoder_config import DecoderConfig
from simcore.validate.hit_rates import tasks
from simcore.validate.hit_rates.network import Network, logits, network, prompt
from simcore.validate.machines.buffers.whole_weights import drawn

# The loss that is reported is the mean of so many last steps.
REPORTED = 50
WARM = 100
BETAS, DECAY = (0.9, 0.98), 0.01


@dataclass(frozen=True, slots=True)
class Training:
    """How a decoder is trained. `contexts`: those that are studied, bytes; `tokens`: about so many bytes of
    each task a step."""

    contexts: tuple[int, ...]
    steps: int
    tokens: int
    rate: float
    seed: int


def decoder_of(layers: int, hidden: int, heads: int) -> DecoderConfig:
    """Returns a byte-level Llama: half as many KV heads as heads (all if odd), an MLP of 3 hidden."""
    return DecoderConfig(
        name="trained",
        hidden=hidden,
        intermediate=3 * hidden,
        layers=layers,
        q_heads=heads,
        kv_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=hidden // heads,
        vocab=tasks.VOCAB,
        tied_embeddings=False,
    )


def context_at(how: Training, step: int) -> int:
    """Returns the context of a step, bytes."""
    shortest, longest = tasks.SHORTEST, max(how.contexts)
    powers = [shortest << i for i in range(32) if shortest << i < longest]
    reach = shortest * (longest / shortest) ** min(1.0, 2.0 * step / how.steps)
    allowed = [size for size in sorted({*powers, *how.contexts}) if size <= reach] or [min(how.contexts)]
    return int(tasks.generator(how.seed, tasks.TRAINING, step).choice(allowed))


def _loss(net: Network, prompts: tasks.Prompts) -> torch.Tensor:
    assert prompts.answers is not None
    ids = torch.cat([torch.from_numpy(x) for x in (prompts.ids, prompts.answers)], 1).to(net.device)
    asked = torch.tensor(prompts.asked, device=net.device)
    found = logits(net, prompt(net, ids[:, :-1])[:, asked])
    return cross_entropy(found.flatten(0, 1).float(), ids[:, asked + 1].flatten())


def trained(
    config: DecoderConfig,
    how: Training,
    device: torch.device,
    say: Callable[[int, float], None] | None = None,
) -> tuple[Network, list[float]]:
    """Returns a trained network in fp32, and the loss of each step, nats a byte. `say` is told of steps."""
    net = network(config, drawn(config, how.seed, device), torch.float32)
    for weight in net.weights:
        weight.requires_grad_()
    made = torch.optim.AdamW(net.weights, lr=how.rate, betas=BETAS, weight_decay=DECAY)
    losses: list[torch.Tensor] = []
    for step in range(how.steps):
        for group in made.param_groups:
            warm = min(1.0, (step + 1) / WARM)
            group["lr"] = how.rate * warm * (1 + math.cos(math.pi * step / how.steps)) / 2
        context = context_at(how, step)
        count = max(1, how.tokens // context)
        made.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            each = [
                _loss(net, draw(tasks.generator(how.seed, tasks.TRAINING, step, number), count, context))
                for number, draw in enumerate(tasks.TASKS.values())
            ]
        loss = torch.stack(each).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(net.weights, 1.0)
        made.step()
        losses.append(loss.detach())
        if say is not None and (step + 1) % 100 == 0:
            say(step + 1, float(losses[-1]))
    return net, torch.stack(losses).tolist() if losses else []
