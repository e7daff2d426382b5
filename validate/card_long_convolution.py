"""A long-convolution model on a card: the buffers of `long_convolution_state` there, at addresses that stay.

Where an op works (its position) belongs to what its graph is captured with, so that a generation of L tokens
has L graphs of steps and as many of tiles. Outputs stay where the last level has them.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.kernel import DTYPES
from kernels.streams import current_gate
from simcore.long_convolution import LongConvolution
from simcore.ops import Op, Publication
from validate.long_convolution_state import LongConvolutionState, parameters


class CardLongConvolutionState:
    """All levels of one model; see the head of this file. Raises ValueError for a number format that torch
    does not compute in."""

    read_on_device: frozenset[str] = frozenset()

    def __init__(self, model: LongConvolution, seed: int, device: torch.device | str = "cuda") -> None:
        if model.dtype not in DTYPES:
            raise ValueError(f"the torch machine computes in {', '.join(DTYPES)}, not in {model.dtype}")
        drawn = parameters(model, seed, DTYPES[model.dtype]).to(device)
        self.inner = LongConvolutionState(model, drawn, outputs_stay=True)

    @property
    def outputs(self) -> Tensor:
        """Those of the last level, [positions, batch, channels]."""
        return self.inner.a[-1].transpose(0, 1)

    def reset(self) -> None:
        """As before the first position."""
        self.inner.reset()

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """None is read on the device."""
        del stream
        return {}

    def key(self) -> Hashable:
        """Ops say themselves where they work."""
        return 0

    def restore(self, key: Hashable) -> None:
        """Nothing changes."""
        assert key == 0

    def execute(self, op: Op) -> None:
        """Any op of the model's graphs. Raises ValueError where it would have to read a gate."""
        if current_gate() is not None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} reads no gate")
        self.inner.execute(op)

    def skip(self, op: Op) -> None:
        """Nothing is noted."""

    def put(self, publication: Publication, to: Any) -> None:
        """A tiling publishes nothing. Raises ValueError."""
        self.inner.put(publication, to)

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """A tiling has no collectives. Raises ValueError."""
        self.inner.meet(op, states)
