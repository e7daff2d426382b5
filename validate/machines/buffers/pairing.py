"""How the two groups of a speculation meet inside captured tokens: each rank and its copy in the other one.

    exchange   priorities; residual stream and the layer's new K and V of the rank of higher priority
    early      the early part of an attention, written into the memory of the rank that goes on with it

(ALSpec, Cai et al. 2025, Algorithms 2 and 3.) Each layer has inboxes of its own, so that between two uses of
one its ranks meet in another (`simcore.kernels.collectives`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simcore.kernels.collectives import Inboxes, exchange, exchange_inboxes
from simcore.kernels.decoder.decode_attention import split_config_for
from simcore.kernels.decoder.speculative_attention import (
    decide,
    receive,
    speculation,
    speculative_attention,
    verdict,
)
from simcore.kernels.decoder.split_kv import EMPTY, Cache
from simcore.models.decoder import Decoder
from simcore.validate.machines.buffers.meeting import EARLY_PART, PRIORITY, Waiting, check_peers
from simcore.validate.machines.state import Told, torch_dtype

# Where hits are drawn, the verdict of the data decides nothing, at whichever threshold.
THRESHOLD = 0.3


@dataclass(slots=True, eq=False)
class Pairing:
    """A pair of ranks: its inboxes by layer. `early` [batch, q_heads, d], `arrived` int32 [batch]: by rank of
    the pair, in its memory, what the other one's attention gives early."""

    inboxes: Sequence[Inboxes]
    early: Sequence[Tensor]
    arrived: Sequence[Tensor]

    def clear(self) -> None:
        """Makes all as before the first token. Nothing may be under way."""
        for each in self.inboxes:
            each.clear()
        for arrived in self.arrived:
            arrived.zero_()


class Speculating:
    """One rank's part of a speculation: rank `place` of a pair. q, heads [batch, q_heads, d]: the queries of
    its attention, and where their exact results go; k: a layer's cache."""

    def __init__(self, pairing: Pairing, place: int, q: Tensor, heads: Tensor, k: Tensor) -> None:
        self.pairing, self.place, other = pairing, place, 1 - place
        self.config = split_config_for(q, Cache(k, k, None, None, None))
        own = speculation(q, k.shape[1], self.config)
        early, arrived = pairing.early[other], pairing.arrived[other]
        self.made = own._replace(exact=heads, early=early, arrived=arrived)
        self.verdict = verdict(len(q), q.device)

    def clear(self) -> None:
        """Makes all as before the first token; the first rank of the pair, what both send through."""
        self.made.norms.fill_(EMPTY.value)
        if self.place == 0:
            self.pairing.clear()

    def exchange(
        self, layer: int, x: Tensor, k: Tensor, v: Tensor, lengths: Tensor, told: Told, by: Waiting
    ) -> None:
        """Tells the other rank of this one's priority, and takes its x, K and V if its priority is higher."""
        inboxes = self.pairing.inboxes[layer]
        exchange(
            x, k, v, lengths, told.own, told.theirs, inboxes, self.place, **by.named(PRIORITY), chained=True
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, chunk: int, gate: Tensor | None
    ) -> None:
        """Attends exactly; gives the other rank early what its first and last `chunk` tokens make; then sums
        how far that was off, over the heads of this rank."""
        speculative_attention(
            q, k, v, lengths, sinks=chunk, window=chunk, gate=gate, into=self.made, config=self.config
        )
        decide(self.made, THRESHOLD, gate=gate, into=self.verdict)

    def receive(self, x: Tensor, by: Waiting, gate: Tensor | None) -> None:
        """Waits for the early part of the other rank's attention, and takes it as x."""
        early, arrived = self.pairing.early[self.place], self.pairing.arrived[self.place]
        receive(early, arrived, x, gate=gate, **by.named(EARLY_PART), chained=True)


def pairing(model: Decoder, devices: Sequence[torch.device | str], caches: Sequence[Tensor]) -> Pairing:
    """Makes room for a pair of ranks on two devices, or on one twice; `caches`: K of a layer of each. Raises
    ValueError if the devices do not see each other's memory, for formats of cache and activations that
    differ, for models whose MLP reads what attention reads, and for fewer than two layers: between two uses
    of an inbox its ranks have to meet elsewhere."""
    config, act = model.config, torch_dtype(model.dtypes.activation)
    if config.layers < 2 or config.parallel_residual:
        raise ValueError("ranks in pairs run models of 2 layers or more, whose MLP follows attention")
    if any(cache.dtype != act for cache in caches):
        raise ValueError("dtypes.kv: ranks in pairs keep the cache in the format of the activations")
    check_peers(devices)
    assert isinstance(model.batch, int)
    shape = model.batch, config.q_heads // model.ranks, config.head_dim
    early = [torch.zeros(shape, dtype=act, device=device) for device in devices]
    arrived = [torch.zeros(model.batch, dtype=torch.int32, device=device) for device in devices]
    x = torch.empty(model.batch, config.hidden, dtype=act, device="meta")
    # One more for behind the last layer.
    inboxes = [exchange_inboxes(devices, x, caches[0]) for _ in range(config.layers + 1)]
    return Pairing(inboxes, early, arrived)
