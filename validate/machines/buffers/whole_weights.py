"""The whole weights of a decoder, before they are cut for its ranks, random by a seed.

    in a layer        q, k, v, o, gate, up, down [in, out]; attn_norm, mlp_norm; q_gain, k_gain [head_dim]
                      of linear attention also gate_heads, the gate of its outputs
    outside layers    embedding [vocab, hidden]; head_norm; lm_head [hidden, vocab]

`checkpoint` reads the same from files.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from simcore.kernels.decoder.norm import EPS
from simcore.models.decoder_config import DecoderConfig
from simcore.models.mixers import FULL, STATEFUL

Matrices = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Constants:
    """`eps` of the norms; `frequencies` of the rotary embedding, see `kernels.decoder.rotary.angles`."""

    eps: float = EPS
    frequencies: Tensor | None = None


CONSTANTS = Constants()


class WholeWeights(Protocol):
    """Whole weights, of which a layer exists when it is asked for. `outside` is asked for first, then the
    layers in their order."""

    @property
    def constants(self) -> Constants:
        """The constants of the model."""

    def outside(self) -> Matrices:
        """Returns embedding, last norm and LM head."""

    def layer(self, number: int) -> Matrices:
        """Returns the matrices and gains of a layer."""


def normal(generator: torch.Generator, *size: int, scale: float) -> Tensor:
    """Returns normal numbers of standard deviation `scale`, on the device of the generator."""
    drawn = torch.randn(*size, generator=generator, dtype=torch.float32, device=generator.device)
    return drawn.mul_(scale)


def layer_sizes(config: DecoderConfig, mixer: str = FULL) -> dict[str, tuple[int, int]]:
    """Returns the sizes (in, out) of the matrices of a whole layer with such a mixer, q, k, v apart."""
    hidden, inner = config.hidden, config.intermediate
    sizes = {**_mixer_sizes(config, mixer), "up": (hidden, inner), "down": (inner, hidden)}
    return sizes | ({"gate": (hidden, inner)} if config.gated else {})


def _mixer_sizes(config: DecoderConfig, mixer: str) -> dict[str, tuple[int, int]]:
    hidden, d, own = config.hidden, config.head_dim, config.linear
    if mixer not in STATEFUL or own is None:
        return {
            "q": (hidden, config.q_heads * d),
            "k": (hidden, config.kv_heads * d),
            "v": (hidden, config.kv_heads * d),
            "o": (config.q_heads * d, hidden),
        }
    out = own.heads * own.value_dim
    return {
        "q": (hidden, own.heads * own.key_dim),
        "k": (hidden, own.kv_heads * own.key_dim),
        "v": (hidden, own.kv_heads * own.value_dim),
        **({"gate_heads": (hidden, out)} if own.gated else {}),
        "o": (out, hidden),
    }


def _gain(generator: torch.Generator, size: int) -> Tensor:
    return 1.0 + normal(generator, size, scale=0.1)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Random weights; columns scaled to keep the size of activations."""

    config: DecoderConfig
    generator: torch.Generator
    constants: Constants = CONSTANTS

    def outside(self) -> Matrices:
        config = self.config
        table = normal(self.generator, config.vocab, config.hidden, scale=1.0)
        gain = _gain(self.generator, config.hidden)
        tied = config.tied_embeddings
        head = table.T if tied else normal(self.generator, config.hidden, config.vocab, scale=1.0)
        return {"embedding": table, "head_norm": gain, "lm_head": head * config.hidden**-0.5}

    def layer(self, number: int) -> Matrices:
        hidden, d = self.config.hidden, self.config.head_dim
        found = {
            name: normal(self.generator, *size, scale=size[0] ** -0.5)
            for name, size in layer_sizes(self.config, self.config.layer_mixers[number]).items()
        }
        gains = {"attn_norm": hidden, "mlp_norm": hidden, "q_gain": d, "k_gain": d}
        return found | {name: _gain(self.generator, size) for name, size in gains.items()}


def drawn(config: DecoderConfig, seed: int, device: torch.device | str) -> WholeWeights:
    """Returns weights that are random by a seed and drawn on a device."""
    return _Drawn(config, torch.Generator(device).manual_seed(seed))
