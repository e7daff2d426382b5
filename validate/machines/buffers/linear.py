"""What a rank that computes layers of linear attention holds besides other layers' buffers.

    projected  [q | k | v | gate] of a row, heads one after another
    qk         q and k after rotary embedding, or silu and LRPE: [rows, heads + kv_heads, rank]
    heads      outputs [rows, heads dim], normed and gated in place

Keys and values of a head serve heads / kv_heads queries. A state is of one sequence, [heads, rank, dim].
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from simcore.kernels.linear_attention.layer import state_dtype
from simcore.models.decoder_config import DecoderConfig
from simcore.models.mixers import LRPE, STATEFUL, LinearMixer, decays

# LRPE's base (Qin et al. 2023), and RetNet's rotary embedding's.
BASE = 10_000.0


@dataclass(frozen=True, slots=True, eq=False)
class LinearPart:
    """The linear attention of a model's layers with the heads of rank `part` of `parts`."""

    config: DecoderConfig
    part: int
    parts: int

    @property
    def own(self) -> LinearMixer:
        """The mixer with this rank's heads. Raises ValueError for a model without one."""
        found = self.config.linear
        if found is None:
            raise ValueError(f"{self.config.name} has no layer of linear attention")
        return replace(found, heads=found.heads // self.parts, kv_heads=found.kv_heads // self.parts)

    def stateful(self, layer: int) -> bool:
        """Whether a layer has a state."""
        return self.config.layer_mixers[layer] in STATEFUL

    def decay(self, layer: int, device: torch.device) -> Tensor:
        """The decays of this rank's heads in a layer, fp64 [heads]."""
        assert self.config.linear is not None
        every = decays(self.config.linear, layer, self.config.layers)
        heads = self.own.heads
        mine = every[self.part * heads : (self.part + 1) * heads]
        return torch.tensor(mine, dtype=torch.float64, device=device)

    def split(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns views: q and k together [rows, heads + kv_heads, key_dim], v [rows, kv_heads, value_dim],
        the gate [rows, ..]."""
        own, rows = self.own, len(projected)
        keys, values = (own.heads + own.kv_heads) * own.key_dim, own.kv_heads * own.value_dim
        qk = projected[:, :keys].reshape(rows, -1, own.key_dim)
        v = projected[:, keys : keys + values].reshape(rows, -1, own.value_dim)
        return qk, v, projected[:, keys + values :]

    def for_rotary(self, projected: Tensor) -> Tensor:
        """Returns what `rotary` takes as q, k, v of one width. It passes its v through; v may be of another
        width here, and is not taken from there."""
        qk = self.split(projected)[0]
        return torch.cat((qk, qk[:, self.own.heads :]), 1).flatten(1)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """LRPE's cos and sin for q and k, [positions, heads + kv_heads, key_dim] each."""
        own, whole = self.own, self.config.linear
        assert whole is not None
        width = whole.heads * whole.key_dim
        places = torch.arange(width, dtype=torch.float64, device=positions.device)
        theta = (BASE ** (-2.0 / width * places)).view(whole.heads, -1)
        mine = theta[self.part * own.heads : (self.part + 1) * own.heads]
        both = torch.cat((mine, mine[:: own.heads // own.kv_heads]))
        turn = positions.to(torch.float64)[:, None, None] * both
        return turn.cos().to(dtype), turn.sin().to(dtype)

    def operands(self, qk: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v with a key and a value for each head."""
        own = self.own
        group, k = own.heads // own.kv_heads, qk[:, own.heads :]
        k, v = (x.repeat_interleave(group, 1) if group > 1 else x for x in (k, v))
        return qk[:, : own.heads], k, v

    def states(self, sequences: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Tensor]:
        """Returns states of zeros of some sequences, [sequences, heads, rank, dim] for each layer that has
        one, and nothing for others. `dtype`: of the activations."""
        if self.config.linear is None:
            return []
        own, kinds = self.own, self.config.layer_mixers
        sizes = [
            (sequences, own.heads, own.rank(kind), own.value_dim) if kind in STATEFUL else (0,)
            for kind in kinds
        ]
        return [torch.zeros(size, dtype=state_dtype(dtype), device=device) for size in sizes]

    def turns(self, layer: int) -> bool:
        """Whether a layer's q and k become twice as wide."""
        return self.config.layer_mixers[layer] == LRPE


def drawn_states(
    config: DecoderConfig, part: int, parts: int, batch: int, dtype: torch.dtype, seed: int
) -> list[Tensor]:
    """Returns the states of one rank before its first token, random by a seed: slices of the same whole ones
    for any number of ranks."""
    whole = LinearPart(config, 0, 1).states(batch, dtype)
    normal_states(whole, torch.Generator().manual_seed(seed + 2))
    return [state.chunk(parts, 1)[part].contiguous() if state.dim() > 1 else state for state in whole]


def normal_states(states: Sequence[Tensor], generator: torch.Generator) -> None:
    """Fills states with random numbers, as sequences that nobody computed have them."""
    for state in states:
        state.copy_(torch.randn(state.shape, generator=generator, dtype=torch.float32))
