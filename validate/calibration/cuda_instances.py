"""Several instances of one decoder on a card, each on its own stream, and the memory that they share.

    graph of instance i  = the decoder's token, its ops placed at (instance i)
    stream of instance i = "instance i"

Each instance has its own activations and KV cache. Weights are shared, as in the strategy
`concurrent_instances` (`own_weights` False), or each instance has its own. A model has layers only (no
embedding, no LM head), so a token ends where the next one begins, and one captured graph serves all tokens.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from simcore.models.decoder import Decoder
from simcore.ops.op import Graph, Op, Publication, placed
from simcore.validate.machines.buffers.cuda_decoder import CardDecoderState
from simcore.validate.machines.state import CardState

INSTANCE = "instance"


@dataclass(frozen=True)
class Instances:
    """`count` instances of a decoder of one rank. Raises ValueError unless the decoder has layers only."""

    decoder: Decoder
    count: int
    own_weights: bool = False

    def __post_init__(self) -> None:
        if self.decoder.outside or self.decoder.ranks != 1 or self.count < 1:
            raise ValueError("instances are one or more, of layers alone, on one rank")

    @property
    def sets(self) -> int:
        """The number of sets of weights."""
        return self.count if self.own_weights else 1

    def graph(self, instance: int) -> Graph:
        """Returns the graph of a token of one instance. Size: context."""
        return _graph(self.decoder.token_step, instance)

    @staticmethod
    def stream(instance: int) -> str:
        """Returns the stream of an instance."""
        return f"{INSTANCE} {instance}"


@cache
def _graph(step: Graph, instance: int) -> Graph:
    ops = tuple(placed(op, instance=instance) for op in step.ops)
    return replace(step, name=f"{step.name} {instance}", ops=ops)


class CardInstancesState(CardState):
    """The states of all instances as the state of one rank; see the head of this file. Other streams have the
    sizes of the first instance."""

    def __init__(self, states: Sequence[CardDecoderState]) -> None:
        self.states = tuple(states)
        self._of_stream = {Instances.stream(i): state for i, state in enumerate(self.states)}

    def reset(self) -> None:
        """Resets all instances to their state before the first token."""
        for state in self.states:
            state.reset()

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        """Same as for one instance."""
        return self.states[0].device_sizes(graph)

    def captured_sizes(self, graph: Graph) -> frozenset[str]:
        """Same as for one instance."""
        return self.states[0].captured_sizes(graph)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """Returns the sizes of the stream's instance, which has its own lengths."""
        return self._of_stream.get(stream, self.states[0]).sizes(stream)

    def key(self) -> Hashable:
        """Returns the current layers of the instances."""
        return tuple([state.key() for state in self.states])

    def restore(self, key: Hashable) -> None:
        """Sets these layers."""
        assert isinstance(key, tuple)
        for state, layer in zip(self.states, key, strict=True):
            state.restore(layer)

    def execute(self, op: Op) -> None:
        """Runs an op of the instance at its place."""
        self._state(op).execute(op.without_place)

    def skip(self, op: Op) -> None:
        """Continues after an op."""
        self._state(op).skip(op)

    def put(self, publication: Publication, to: Any) -> None:
        """Raises ValueError: instances publish nothing."""
        raise ValueError(f"--on cuda: {publication.signal} is not published on a card")

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Raises ValueError: instances have no collectives."""
        raise ValueError(f"--on cuda: {op.kind} {op.name}: instances meet nobody")

    def _state(self, op: Op) -> CardDecoderState:
        return self.states[op.where(INSTANCE)]
