"""Greedy decoding with attention-level speculation (ALSpec, Cai et al. 2025, Algorithm 1 and section 2).

    early = attention over the first and the last `chunk` tokens          exact = attention over all tokens
    dynamic    early where ||early - exact|| < lambda ||exact||, over all heads of a sequence, else exact
    static     early in the layers that the dynamic way takes early in more than 80 % of its tokens at this
               lambda, in prompts that are drawn for this choice; exact in the others

The paper's static models (its Figure 2) take attention sink "at a layer iff the likelihood to approximate
that layer is greater than p = 0.8 in Figure 3b", whose shares are of needles in a haystack. Which lambda they
go by it does not say: here each lambda has its own choice, by needles of the same context. Figure 3 itself is
of the dynamic way; lambda 0 is the unchanged model, lambda infinity attention sink in all layers.

Prompts are computed exactly but for their last token, with which decoding begins. K and V of a decoded token
follow from what was taken before, as they do in Algorithm 2. The rule is the paper's, strict: at lambda 0
nothing is accepted. `kernels.decoder.speculative_attention` also takes results that are equal. In bf16 the
scores of both results are rounded alike.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from simcore.kernels.decoder.attention import attend
from simcore.kernels.decoder.decode_attention import ends_of
from simcore.validate.hit_rates.network import Network, prompt, room, step

# A layer is static if more than this share of its tokens is accepted.
STATIC_SHARE = 0.8


def both(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Attends from q [batch, 1, q_heads, d] over k, v [batch, kv_heads, tokens, d]; returns exact and early,
    shaped as q, in the format of sums."""
    kept = torch.tensor(ends_of(k.shape[2], chunk, chunk), device=k.device)
    return attend(q, k, v)[0], attend(q, k[:, :, kept], v[:, :, kept])[0]


def squares(exact: Tensor, early: Tensor) -> Tensor:
    """Returns ||early - exact||^2 and ||exact||^2 over all heads, [..., 2], of results [..., 1, heads, d]."""
    return torch.stack((early - exact, exact), -4).square().sum((-1, -2, -3))


def accepted(norms: Tensor, threshold: float) -> Tensor:
    """Returns which of norms [..., 2] are hits at a lambda. What is not a number is none."""
    return norms[..., 0] < threshold**2 * norms[..., 1]


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """Of some prompts: `ids` [prompts, tokens]; `early` bool [prompts, tokens, layers], where the early
    result was taken; `norms` [prompts, tokens, layers, 2], the squares that it was judged by."""

    ids: Tensor
    early: Tensor
    norms: Tensor


# (layer, norms [batch, 2]) -> which sequences take the early result, bool [batch]
Choice = Callable[[int, Tensor], Tensor]


def dynamic(threshold: float) -> Choice:
    """Accepts by the norms."""
    return lambda layer, norms: accepted(norms, threshold)


def static(layers: frozenset[int]) -> Choice:
    """Accepts always in these layers, never in others."""
    return lambda layer, norms: torch.full_like(norms[:, 0], layer in layers, dtype=torch.bool)


def static_layers(early: Tensor) -> frozenset[int]:
    """Returns the layers of a static choice by where the dynamic way accepted [prompts, tokens, layers]."""
    shares = early.double().mean((0, 1)).tolist()
    return frozenset(layer for layer, share in enumerate(shares) if share > STATIC_SHARE)


@torch.inference_mode()
def decode(
    net: Network, ids: Tensor, tokens: int, chunk: int, choices: list[Choice], batch: int
) -> list[Decoded]:
    """Decodes `tokens` tokens after each of some prompts ids [prompts, context], once by each choice, `batch`
    prompts at a time. A prompt is computed once: decoding writes behind it only."""
    found = [_batch(net, part, tokens, chunk, choices) for part in torch.split(ids.to(net.device), batch)]
    return [
        Decoded(*(torch.cat([getattr(x, name) for x in each]) for name in ("ids", "early", "norms")))
        for each in zip(*found, strict=True)
    ]


def _batch(net: Network, ids: Tensor, tokens: int, chunk: int, choices: list[Choice]) -> list[Decoded]:
    context = ids.shape[1]
    caches = room(net, len(ids), context - 1 + tokens)
    prompt(net, ids[:, :-1], caches)
    found = []
    for choice in choices:
        token, steps = ids[:, -1], list[tuple[Tensor, Tensor, Tensor]]()
        for number in range(tokens):
            seen: list[tuple[Tensor, Tensor]] = []

            def attention(
                layer: int,
                q: Tensor,
                k: Tensor,
                v: Tensor,
                seen: list[tuple[Tensor, Tensor]] = seen,
                choice: Choice = choice,
            ) -> Tensor:
                exact, early = both(q, k, v, chunk)
                norms = squares(exact, early)
                taken = choice(layer, norms)
                seen.append((taken, norms))
                return torch.where(taken[:, None, None, None], early, exact)

            token = step(net, token, context - 1 + number, caches, attention).argmax(-1)
            taken, norms = (torch.stack(parts, 1) for parts in zip(*seen, strict=True))
            steps.append((token, taken, norms))
        found.append(Decoded(*(torch.stack(parts, 1) for parts in zip(*steps, strict=True))))
    return found
