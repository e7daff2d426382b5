"""How tensor-parallel ranks meet inside captured tokens: by kernels that see the memory of all their cards.

    each collective of each layer has inboxes of its own (`simcore.kernels.collectives`)

So no host and no event stands between a rank's kernels, and a token is one graph a rank. A rank that comes
first waits on its card. In rehearsals nobody waits (`patience` 0): the host then runs and captures the tokens
of one rank after another, and what comes out is not meant to be read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from simcore.kernels.collectives import Inboxes, all_gather, all_reduce, inboxes, peers_see_each_other
from simcore.models.decoder import Decoder
from simcore.ops.op import Op
from simcore.validate.machines.buffers.decoder import layer_after
from simcore.validate.machines.cuts import units
from simcore.validate.machines.state import torch_dtype

# Looks at an inbox before a rank gives up: some seconds.
PATIENCE = 5_000_000
# What a rank waits for.
SUMS, PRIORITY, EARLY_PART = WAITS = (
    "waits for others in a collective",
    "waits for the priority of the other group",
    "waits for the early part of the other group's attention",
)
# The collective, and the layer in which it stands.
Site = tuple[str, int]


@dataclass(slots=True, eq=False)
class Waiting:
    """How long a rank waits for others: `patience` int32 [1] on its card. If it gives up, it writes the code
    of what it waits for to `error`, int32 [1] in memory that the host sees. `who`: the rank, in words."""

    patience: Tensor
    who: str
    error: Tensor | None = None
    codes: dict[str, int] = field(default_factory=dict)

    def named(self, what: str) -> dict[str, Any]:
        """These as arguments of a kernel that waits for something."""
        return {"patience": self.patience, "error": self.error, "code": self.codes.get(what, 1)}

    def begin(self, *, rehearsal: bool, error: Tensor, code: Callable[[str], int]) -> None:
        """Begins a run: sets how long a rank waits, and where it tells that it gave up."""
        if self.error is not error:
            self.error, self.codes = error, {what: code(f"{self.who} {what}") for what in WAITS}
        self.patience.fill_(0 if rehearsal else PATIENCE)


@dataclass(slots=True, eq=False)
class Meeting:
    """The inboxes of a group's ranks by collective."""

    sites: dict[Site, Inboxes] = field(default_factory=dict)

    def clear(self) -> None:
        """Empties all inboxes. Nothing may be under way."""
        for site in self.sites.values():
            site.clear()

    def all_reduce(
        self, op: Op, layer: int, rank: int, x: Tensor, by: Waiting, gate: Tensor | None = None
    ) -> None:
        """Replaces a rank's x by the sum of all ranks'."""
        all_reduce(x, self.sites[op.name, layer], rank, **by.named(SUMS), gate=gate, out=x, chained=True)

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
        by: Waiting,
        *,
        gate: Tensor | None = None,
    ) -> None:
        """Adds the sum of all ranks' x to the residual, and norms that; x stays as it is."""
        all_reduce(
            x, self.sites[op.name, layer], rank, **by.named(SUMS), gate=gate,
            residual=residual, gain=gain, eps=eps, normed=normed, chained=True,
        )  # fmt: skip

    def all_gather(
        self, op: Op, layer: int, rank: int, x: Tensor, out: Tensor, by: Waiting, gate: Tensor | None = None
    ) -> None:
        """Puts the columns of all ranks' x side by side."""
        all_gather(x, self.sites[op.name, layer], rank, **by.named(SUMS), gate=gate, out=out, chained=True)


def check_peers(devices: Sequence[torch.device | str]) -> None:
    """Lets the devices of ranks see each other's memory. Raises ValueError if two of them cannot."""
    try:
        peers_see_each_other(devices)
    except RuntimeError as error:
        raise ValueError(f"ranks need cards that see each other's memory: {error}") from None


def meeting(model: Decoder, devices: Sequence[torch.device | str], *, speculates: bool = False) -> Meeting:
    """Makes room for the collectives of a model's token, for ranks on these devices; `speculates`: its
    attentions may be speculative ones. Raises ValueError if two of the devices do not see each other's
    memory, and for a token with fewer than two collectives: between two uses of an inbox its ranks have to
    meet elsewhere."""
    check_peers(devices)
    found, layer = Meeting(), 0
    for op in (unit for whole in model.token_step.ops for unit in units(whole)):
        beside = model.speculate.ops if speculates and op.kind == "decode_attention" else ()
        for each in (op, *beside):
            if each.ranks > 1:
                assert (each.name, layer) not in found.sites, each.name
                room = _elements(each, model.config.hidden)
                found.sites[each.name, layer] = inboxes(devices, room, torch_dtype(each.dtype))
        layer = layer_after(op, layer)
    if len(found.sites) < 2:
        raise ValueError("ranks that meet once a token, in one layer alone, are not run on cards")
    return found


def _elements(op: Op, hidden: int) -> int:
    """Returns of how many elements of a rank an inbox has to hold the words."""
    elements: int = op["elements"]
    if op.kind == "all_gather":
        return elements // op.ranks
    # Where rows are normed each begins with a word.
    return elements + -(-elements // hidden) * (hidden % 2)
