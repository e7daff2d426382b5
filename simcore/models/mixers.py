"""What mixes the tokens of a layer: softmax attention over a KV cache, or linear attention with a state.

    full_attention         attends over every cached token: the cache grows token by token
    sliding_attention      attends over the last tokens of a window, which is all that it keeps
    linear_attention       S = gamma S + k^T v, out = q S: heads * rank * dim * 4 bytes at any context
    linear_attention_lrpe  the same with q and k of twice the width (TransNormerLLM's first layer)

A hybrid names one for each layer (`layer_types` of a Hugging Face config).
"""

from dataclasses import dataclass
from math import exp, log
from typing import Literal

from simcore.ops.linear_layer import state_bytes

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR, LRPE = "linear_attention", "linear_attention_lrpe"
# The layers with a state.
STATEFUL = (LINEAR, LRPE)


@dataclass(frozen=True, slots=True)
class LinearMixer:
    """The linear attention of a model's layers.

    `heads` of queries and states; `kv_heads` of keys and values, each of which serves heads / kv_heads heads;
    `key_dim` and `value_dim`: widths of a head. `gated`: the output is multiplied by a projection of the
    layer's input. `inputs`: what is done to q and k (rotary embedding, or silu); `norm`: whether outputs are
    normed head by head (RetNet's group norm) or over all heads at once (TransNormerLLM's SimpleRMSNorm);
    `decays`: of heads, see there.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    gated: bool = True
    inputs: Literal["rotary", "silu"] = "rotary"
    norm: Literal["head", "layer"] = "head"
    decays: Literal["retnet", "slopes"] = "retnet"

    @property
    def gate_activated(self) -> bool:
        """Whether the gate goes through silu (RetNet), or is multiplied as it is (TransNormerLLM)."""
        return self.inputs == "rotary"

    @property
    def projected(self) -> int:
        """Columns of the projection of a layer's input: q, k, v and the gate."""
        keys, values = self.heads * self.key_dim, self.heads * self.value_dim
        kv = self.kv_heads * (self.key_dim + self.value_dim)
        return keys + kv + (values if self.gated else 0)

    def rank(self, kind: str) -> int:
        """The width of a head's queries and keys as the state sees them."""
        return self.key_dim * (2 if kind == LRPE else 1)

    def state_bytes(self, kind: str) -> float:
        """Bytes of the state of one sequence in a layer of this kind."""
        return state_bytes(self.heads, self.rank(kind), self.value_dim)


def decays(mixer: LinearMixer, layer: int, layers: int) -> list[float]:
    """The decay of each head in a layer, in (0, 1).

    retnet  1 - e, with log e evenly spaced from log 1/32 to log 1/512 over the heads, in every layer
    slopes  exp(-s), s = 2^(-8 (h + 1) / heads) (1 - layer / (layers - 1) + 1e-5): TransNormerLLM, section
            3.1, whose last layer hardly forgets
    """
    if mixer.decays == "retnet":
        first, last = log(1 / 32), log(1 / 512)
        step = (last - first) / max(1, mixer.heads - 1)
        return [1.0 - exp(first + head * step) for head in range(mixer.heads)]
    share = 1.0 - layer / max(1, layers - 1) + 1e-5
    return [exp(-(2.0 ** (-8.0 * (head + 1) / mixer.heads)) * share) for head in range(mixer.heads)]
