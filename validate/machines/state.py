"""What a real machine asks of the buffers of one rank: which of them an op reads and writes.

What is said here stands for buffers that have nothing else to say: a model of one rank meets nobody.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from simcore.kernels.kernel import DTYPES
from simcore.kernels.table import TABLE
from simcore.ops.op import Graph, Op, Publication


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a number format. Raises ValueError for one that torch does not compute in."""
    if name not in DTYPES:
        raise ValueError(f"the torch machine computes in {', '.join(DTYPES)}, not in {name}")
    return DTYPES[name]


def run_kernel(op: Op, *tensors: Tensor) -> Any:
    """What the kernel of an op gives for some tensors."""
    return TABLE[op.kind].run(op, *tensors)


class State(Protocol):
    """The buffers of one rank, and which of them an op reads and writes. Ops come bound, with numbers for
    all sizes; a fused op comes part by part unless `simcore.kernels.table.TABLE` has its kind."""

    def execute(self, op: Op) -> None:
        """A local op."""

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """A collective: asked once, of the first rank's state, with all states along the axis, in order.
        Raises ValueError for one that these buffers do not know."""
        raise ValueError(f"{op.kind} {op.name}: a {type(self).__name__} meets no other rank")

    def skip(self, op: Op) -> None:
        """An op, local or not, of a launch that its flag skipped: it counts as passed over."""
        del op

    def put(self, publication: Publication, to: Any) -> None:
        """Writes what is published into the buffers of the next rank along the axis of the put. Raises
        ValueError where nothing can be published."""
        raise ValueError(f"{publication.signal}: a {type(self).__name__} publishes nothing")


class CardState(State, Protocol):
    """The buffers of one rank on a card. What ops are captured with is where tensors lie, and what the state
    goes by on the host (`key`: the layer that it has come to, say), which `skip` carries on as `execute`
    does.

    Ops read `simcore.kernels.streams.current_gate`, and leave nothing to later ones where it is 0; `put` and
    `meet` too.
    """

    def reset(self) -> None:
        """As before the first launch of a run."""

    def told(self, graph: Graph) -> frozenset[str]:
        """The sizes that kernels of a graph read in the device's memory (`sizes`)."""
        del graph
        return frozenset()

    def bound(self, graph: Graph) -> frozenset[str]:
        """The sizes that its ops are captured with: at others they are captured anew."""
        return graph.needs - self.told(graph)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """int32 tensors that hold a size for kernels of a stream, all elements the same."""
        del stream
        return {}

    def key(self) -> Hashable:
        """What the next ops go by, apart from the ops themselves."""

    def restore(self, key: Any) -> None:
        """Goes back, or on, to a key."""
