"""A Llama in plain torch, by the project's names of weights: whole prompts at once, and token by token.

    x += o(attention(q, k, v)),   q, k turned by their positions       (q, k, v from x, normed)
    x += down(silu(gate) up)                                           (gate, up from x, normed)
    logits = lm_head x, normed

A step of a token leaves it to its caller what a layer's attention gives: exact, early, or one of them for
each sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from simcore.kernels.decoder.norm import reference_norm
from simcore.kernels.decoder.rotary import angles
from simcore.models.decoder_config import DecoderConfig
from simcore.validate.machines.buffers.whole_weights import Constants, Matrices, WholeWeights

# (layer, q [batch, 1, q_heads, d], k, v [batch, kv_heads, tokens, d]) -> [batch, 1, q_heads, d]
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """The weights of a decoder on one device, in one number format, as `whole_weights` names them."""

    config: DecoderConfig
    constants: Constants
    outside: Matrices
    layers: tuple[Matrices, ...]

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.outside["embedding"].device

    @property
    def dtype(self) -> torch.dtype:
        """The number format of its weights."""
        return self.outside["embedding"].dtype

    @property
    def weights(self) -> list[Tensor]:
        """All weights, in a fixed order."""
        return [tensor for part in (self.outside, *self.layers) for tensor in part.values()]


def network(config: DecoderConfig, weights: WholeWeights, dtype: torch.dtype) -> Network:
    """Returns a network of whole weights in a number format."""

    def cast(part: Matrices) -> Matrices:
        return {name: tensor.to(dtype) for name, tensor in part.items()}

    outside = cast(weights.outside())
    layers = tuple(cast(weights.layer(number)) for number in range(config.layers))
    return Network(config, weights.constants, outside, layers)


def in_format(net: Network, dtype: torch.dtype) -> Network:
    """Returns a network with the same weights in another format, without gradients."""
    parts = [{k: v.detach().to(dtype) for k, v in part.items()} for part in (net.outside, *net.layers)]
    return Network(net.config, net.constants, parts[0], tuple(parts[1:]))


@dataclass(frozen=True, slots=True, eq=False)
class Caches:
    """K and V of each layer, [batch, kv_heads, capacity, d]."""

    k: list[Tensor]
    v: list[Tensor]


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns heads [batch, tokens, heads, d] turned by cos, sin [tokens, d // 2]."""
    half = heads.shape[-1] // 2
    a, b, rest = torch.split(heads, [half, half, heads.shape[-1] - 2 * half], -1)
    c, s = cos[:, None].to(heads.dtype), sin[:, None].to(heads.dtype)
    return torch.cat((a * c - b * s, b * c + a * s, rest), -1)


def _qkv(net: Network, layer: Matrices, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q [batch, tokens, q_heads, d], k, v [batch, kv_heads, tokens, d] of x [batch, tokens,
    hidden]."""
    d = net.config.head_dim
    y = reference_norm(x, layer["attn_norm"], eps=net.constants.eps)
    q, k, v = ((y @ layer[name]).view(*x.shape[:2], -1, d) for name in "qkv")
    cos, sin = angles(positions, d, torch.float32, net.constants.frequencies)
    return _turned(q, cos, sin), _turned(k, cos, sin).transpose(1, 2), v.transpose(1, 2)


def _after(net: Network, layer: Matrices, x: Tensor, heads: Tensor) -> Tensor:
    """Returns x after a layer whose attention gave heads [batch, tokens, q_heads, d]."""
    x = x + heads.to(x.dtype).flatten(-2) @ layer["o"]
    y = reference_norm(x, layer["mlp_norm"], eps=net.constants.eps)
    return x + (silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]


def logits(net: Network, x: Tensor) -> Tensor:
    """Returns logits [..., vocab] of x [..., hidden]."""
    return reference_norm(x, net.outside["head_norm"], eps=net.constants.eps) @ net.outside["lm_head"]


def prompt(net: Network, ids: Tensor, caches: Caches | None = None) -> Tensor:
    """Computes ids [batch, tokens] at once, under a causal mask; returns x [batch, tokens, hidden] after the
    last layer. With caches K and V are kept in their first places."""
    x = net.outside["embedding"][ids]
    positions = torch.arange(ids.shape[1], device=net.device)
    for number, layer in enumerate(net.layers):
        q, k, v = _qkv(net, layer, x, positions)
        if caches is not None:
            caches.k[number][:, :, : k.shape[2]] = k
            caches.v[number][:, :, : v.shape[2]] = v
        heads = scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)
        x = _after(net, layer, x, heads.transpose(1, 2))
    return x


def room(net: Network, batch: int, capacity: int) -> Caches:
    """Makes caches for so many sequences and tokens."""
    size = batch, net.config.kv_heads, capacity, net.config.head_dim
    k, v = ([torch.zeros(size, dtype=net.dtype, device=net.device) for _ in net.layers] for _ in range(2))
    return Caches(k, v)


def step(net: Network, ids: Tensor, position: int, caches: Caches, attention: Attention) -> Tensor:
    """Computes one token ids [batch] of each sequence, at a position, whose K and V it keeps; returns logits
    [batch, vocab]. All that comes before has to be in the caches."""
    x = net.outside["embedding"][ids][:, None]
    positions = torch.full((1,), position, device=net.device)
    for number, layer in enumerate(net.layers):
        q, k, v = _qkv(net, layer, x, positions)
        for cache, new in ((caches.k[number], k), (caches.v[number], v)):
            cache[:, :, position : position + 1] = new
        length = position + 1
        heads = attention(number, q, caches.k[number][:, :, :length], caches.v[number][:, :, :length])
        x = _after(net, layer, x, heads)
    return logits(net, x[:, 0])
