"""The buffers of one rank's layers of linear attention on a card.

    projected [rows, q k v gate]   turned [rows, heads + kv_heads, ..]   heads [rows, heads dim]
    states [layers] of [slots, heads, rank, dim], updated in place

Where one batch decodes, none of them moves, and a run begins with the states that were drawn: `reset` copies
them back. In steps that serve, rows are as many as the step has, and each layer has memory of its own
(`take`). A row is at position lengths - 1, which kernels read on the card.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simcore.kernels.decoder.activation import activation
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.rotary import rotary
from simcore.kernels.linear_attention.triton_served import served_chunks, served_step
from simcore.kernels.linear_attention.triton_tensors import check_widths
from simcore.models.decoder_config import DecoderConfig
from simcore.ops.op import Op
from simcore.validate.machines.buffers.linear import LinearPart
from simcore.validate.machines.state import run_kernel


class CardLinear:
    """One rank's layers of linear attention for the graphs of `models.decoder.Decoder` and of
    `models.served_decoder.ServedDecoder`. `begins`: the states before the first token, of `batch` sequences
    that decode, or of all slots. Raises ValueError for values narrower than keys, which rotary embedding
    splits."""

    def __init__(
        self, config: DecoderConfig, part: int, parts: int, batch: int, dtype: torch.dtype,
        begins: Sequence[Tensor], device: torch.device | str,
    ) -> None:  # fmt: skip
        self.part = LinearPart(config, part, parts)
        own = self.part.own
        if own.inputs == "rotary" and own.value_dim < own.key_dim:
            raise ValueError(f"{config.name} has values narrower than its keys")
        check_widths(max(map(own.rank, config.layer_mixers)), own.value_dim)
        if dtype == torch.float64:
            raise ValueError(f"{config.name} has states: a card keeps them in fp32, not in fp64")
        self.take(torch.zeros(batch, own.projected, dtype=dtype, device=device))
        # Sequences that decode have their own order, and tokens before this one.
        self.slots = torch.arange(batch, dtype=torch.int32, device=device)
        self.seen = torch.full_like(self.slots, 2)
        self.begins = [state.to(device) for state in begins]
        self.states = [state.clone() for state in self.begins] if batch else self.begins
        self.decays = [
            self.part.decay(layer, torch.device(device)).float() if self.part.stateful(layer) else None
            for layer in range(config.layers)
        ]
        self.ones: dict[int, Tensor] = {}

    def take(self, projected: Tensor) -> None:
        """Goes on with rows of a layer, in memory of their own."""
        own = self.part.own
        self.projected = projected
        self.turned = projected.new_empty(len(projected), own.heads + own.kv_heads, own.key_dim)
        self.heads = projected.new_empty(len(projected), own.heads * own.value_dim)
        self._wide: Tensor | None = None

    def reset(self) -> None:
        """Restores the states before the first token."""
        for state, begins in zip(self.states, self.begins, strict=True):
            state.copy_(begins)

    def turn(self, op: Op, angles: tuple[Tensor, Tensor], lengths: Tensor) -> None:
        """Turns q and k of the new tokens."""
        own = self.part.own
        columns = (own.heads + 2 * own.kv_heads) * own.key_dim
        rotary(
            self.projected[:, :columns], *angles, q_heads=op["q_heads"], kv_heads=op["kv_heads"],
            lengths=lengths, out=self.turned,
        )  # fmt: skip
        self._wide = None

    def silu(self, op: Op) -> None:
        """Activates q and k."""
        qk = self.part.split(self.projected)[0]
        self.turned.copy_(run_kernel(op, qk))
        self._wide = None

    def widen(self, op: Op, lengths: Tensor) -> None:
        """Makes q and k of the new tokens twice as wide."""
        cos, sin = self.part.angles(lengths - 1, self.turned.dtype)
        self._wide = run_kernel(op, self.turned, cos, sin)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """q and k together [rows, heads + kv_heads, rank], v [rows, kv_heads, dim]."""
        return self.turned if self._wide is None else self._wide, self.part.split(self.projected)[1]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [rows, heads, rank], and k and v [rows, kv_heads, ..] as they are."""
        (qk, v), heads = self.parts, self.part.own.heads
        return qk[:, :heads], qk[:, heads:], v

    @property
    def out(self) -> Tensor:
        """The outputs, [rows, heads, dim]."""
        return self.heads.view(len(self.heads), self.part.own.heads, -1)

    def mix(self, layer: int, slots: Tensor | None = None, lengths: Tensor | None = None) -> None:
        """Adds a token of each sequence, its row, to a layer's states, and reads the outputs; left out: of
        the batch that decodes. `lengths`: see `served_step`."""
        slots, lengths = self.slots if slots is None else slots, self.seen if lengths is None else lengths
        served_step(*self.qkv, self.states[layer], slots, lengths, self.decay(layer), self.out)

    def mix_chunks(self, layer: int, slots: Tensor, starts: Tensor, lengths: Tensor) -> None:
        """The same for all rows of each sequence, see `served_chunks`."""
        served_chunks(*self.qkv, self.states[layer], slots, starts, lengths, self.decay(layer), self.out)

    def decay(self, layer: int) -> Tensor:
        """The decays of a layer's heads. Raises ValueError for a layer without a state."""
        found = self.decays[layer]
        if found is None:
            raise ValueError(f"layer {layer} has no state")
        return found

    def norm(self, op: Op, eps: float) -> None:
        """Norms the outputs in place, head by head or all heads at once."""
        columns = op["hidden"]
        if columns not in self.ones:
            self.ones[columns] = torch.ones(columns, dtype=self.heads.dtype, device=self.heads.device)
        rows = self.heads.view(-1, columns)
        norm(rows, self.ones[columns], eps=eps, out=rows)

    def gate(self, op: Op) -> None:
        """Multiplies the outputs by their gate, in place."""
        gate = self.part.split(self.projected)[2]
        if op.kind == "activation":
            activation(gate, self.heads, out=self.heads)
        else:
            self.heads.mul_(gate)
