"""The buffers of one rank's layers of linear attention on a card: none of them moves.

    projected [batch, q k v gate]   turned, wide [batch, heads + kv_heads, ..]   heads [batch, heads dim]
    states [layers] of [batch, heads, rank, dim], updated in place

The token is at position lengths - 1, which kernels read on the card. A run begins with the states that were
drawn: `reset` copies them back.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from simcore.kernels.decoder.activation import activation
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.rotary import rotary
from simcore.models.decoder_config import DecoderConfig
from simcore.ops.op import Op
from simcore.validate.machines.buffers.linear import LinearPart
from simcore.validate.machines.state import run_kernel


class CardLinear:
    """One rank's layers of linear attention for the graphs of `models.decoder.Decoder`. `begins`: the states
    before the first token. Raises ValueError for values narrower than keys, which rotary embedding splits."""

    def __init__(
        self, config: DecoderConfig, part: int, parts: int, batch: int, dtype: torch.dtype,
        begins: Sequence[Tensor], device: torch.device | str,
    ) -> None:  # fmt: skip
        self.part = LinearPart(config, part, parts)
        own = self.part.own
        if own.inputs == "rotary" and own.value_dim < own.key_dim:
            raise ValueError(f"--on cuda: {config.name} has values narrower than its keys")

        def room(*size: int) -> Tensor:
            return torch.zeros(batch, *size, dtype=dtype, device=device)

        every = own.heads + own.kv_heads
        self.projected, self.turned = room(own.projected), room(every, own.key_dim)
        self.heads = room(own.heads * own.value_dim)
        self.begins = [state.to(device) for state in begins]
        self.states = [state.clone() for state in self.begins]
        self.decays = [
            self.part.decay(layer, torch.device(device)).float() if self.part.stateful(layer) else None
            for layer in range(config.layers)
        ]
        self._wide: Tensor | None = None
        self.ones: dict[int, Tensor] = {}

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

    def mix(self, op: Op, layer: int) -> None:
        """Adds the new tokens to a layer's states, and reads the outputs."""
        qk = self.turned if self._wide is None else self._wide
        operands = self.part.operands(qk, self.part.split(self.projected)[1])
        out = run_kernel(op, *operands, self.states[layer], self.decays[layer])
        self.heads.copy_(out.flatten(1))

    def norm(self, op: Op, eps: float) -> None:
        """Norms the outputs, head by head or all heads at once."""
        columns = op["hidden"]
        if columns not in self.ones:
            self.ones[columns] = torch.ones(columns, dtype=self.heads.dtype, device=self.heads.device)
        rows = self.heads.view(-1, columns)
        rows.copy_(norm(rows, self.ones[columns], eps=eps))

    def gate(self, op: Op) -> None:
        """Multiplies the outputs by their gate."""
        gate = self.part.split(self.projected)[2]
        if op.kind == "activation":
            self.heads.copy_(activation(gate, self.heads))
        else:
            self.heads.mul_(gate)
