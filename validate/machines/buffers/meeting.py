"""How tensor-parallel ranks meet inside captured steps: by kernels that see the memory of all of their cards.

    each collective of each layer has inboxes of its own (`simcore.kernels.collectives`)

So no host and no event stands between a rank's kernels, and a step of all layers is one graph a rank. A rank
that comes first waits on its card. In rehearsals nobody waits (`patience` 0): the host then runs and captures
the steps of one rank after another, and what comes out is not meant to be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from simcore.kernels.collectives import Inboxes, all_gather, all_reduce, inboxes, peers_see_each_other
from simcore.models.decoder import Decoder
from simcore.ops.op import Op
from simcore.validate.machines.buffers.decoder import layer_after
from simcore.validate.machines.state import torch_dtype

# Looks at an inbox before a rank gives up: some seconds.
PATIENCE = 5_000_000
# The collective, and the layer in which it stands.
Site = tuple[str, int]


@dataclass(slots=True, eq=False)
class Meeting:
    """The inboxes of a group's ranks by collective, and how long each rank waits, int32 [1] on its card. A
    rank that gives up writes `code` to `error`, int32 [1] in memory that the host sees."""

    devices: Sequence[torch.device | str]
    sites: dict[Site, Inboxes]
    patience: list[Tensor]
    error: Tensor | None = None
    code: int = 1

    def tell(self, error: Tensor, code: int) -> None:
        """Says where ranks that give up write which code."""
        self.error, self.code = error, code

    def begin(self, rank: int, *, rehearsal: bool) -> None:
        """Sets how long a rank waits; the first one empties all inboxes. Nothing may be under way."""
        for site in self.sites.values() if rank == 0 else ():
            site.clear()
        self.patience[rank].fill_(0 if rehearsal else PATIENCE)

    def all_reduce(self, op: Op, layer: int, rank: int, x: Tensor) -> None:
        """Replaces a rank's x by the sum of all ranks'."""
        all_reduce(
            x, self.sites[op.name, layer], rank,
            patience=self.patience[rank], error=self.error, code=self.code, out=x, chained=True,
        )  # fmt: skip

    def all_reduce_normed(
        self,
        op: Op,
        layer: int,
        rank: int,
        x: Tensor,
        residual: Tensor,
        gain: Tensor,
        eps: float,
        normed: Tensor,
        *,
        gate: Tensor | None = None,
    ) -> None:
        """Adds the sum of all ranks' x to the residual, and norms that; x stays as it is."""
        all_reduce(
            x, self.sites[op.name, layer], rank,
            patience=self.patience[rank], error=self.error, code=self.code, gate=gate,
            residual=residual, gain=gain, eps=eps, normed=normed, chained=True,
        )  # fmt: skip

    def all_gather(self, op: Op, layer: int, rank: int, x: Tensor, out: Tensor) -> None:
        """Puts the columns of all ranks' x side by side."""
        all_gather(
            x, self.sites[op.name, layer], rank,
            patience=self.patience[rank], error=self.error, code=self.code, out=out, chained=True,
        )  # fmt: skip


def meeting(model: Decoder, devices: Sequence[torch.device | str]) -> Meeting:
    """Makes room for the collectives of a model's token, for ranks on these devices. Raises ValueError if two
    of the devices do not see each other's memory, and for a token with fewer than two collectives: between
    two uses of an inbox its ranks have to meet elsewhere."""
    try:
        peers_see_each_other(devices)
    except RuntimeError as error:
        raise ValueError(f"ranks need cards that see each other's memory: {error}") from None
    sites: dict[Site, Inboxes] = {}
    layer, hidden = 0, model.config.hidden
    for op in model.token_step.ops:
        if op.ranks > 1:
            assert (op.name, layer) not in sites, op.name
            if op.kind == "all_gather":
                elements = op["elements"] // op.ranks
            else:
                # Where rows are normed each begins with a word.
                elements = op["elements"] // hidden * (hidden + hidden % 2)
            sites[op.name, layer] = inboxes(devices, elements, torch_dtype(op.dtype))
        layer = layer_after(op, layer)
    if len(sites) < 2:
        raise ValueError("ranks that meet once a token, in one layer alone, are not run on cards")
    patience = [torch.zeros(1, dtype=torch.int32, device=device) for device in devices]
    return Meeting(devices, sites, patience)
