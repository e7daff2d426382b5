"""Several instances of one decoder on a card, each on a stream of its own: who shares what.

    graph of instance i  = the decoder's token, its ops placed at (instance i)
    stream of instance i = "instance i"

Each has activations and a KV cache of its own. Weights are those of one model that all read, as the strategy
`concurrent_instances` has it (`own_weights` False), or everybody's own. Layers alone (no embedding, no LM
head), so that a token ends where the next one begins, and one captured graph does for all of them.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor

from simcore.models.decoder import Decoder
from simcore.ops.op import Graph, Op, Publication, placed
from simcore.validate.machines.buffers.cuda_decoder import CardDecoderState

INSTANCE = "instance"


@dataclass(frozen=True)
class Instances:
    """So many instances of a decoder of one rank. Raises ValueError for one that is not of layers alone."""

    decoder: Decoder
    count: int
    own_weights: bool = False

    def __post_init__(self) -> None:
        if self.decoder.outside or self.decoder.ranks != 1 or self.count < 1:
            raise ValueError("instances are one or more, of layers alone, on one rank")

    @property
    def sets(self) -> int:
        """How many sets of weights there are."""
        return self.count if self.own_weights else 1

    def graph(self, instance: int) -> Graph:
        """A token of one instance. Size: context."""
        return _graph(self.decoder.token_step, instance)

    @staticmethod
    def stream(instance: int) -> str:
        """Its stream."""
        return f"{INSTANCE} {instance}"


@cache
def _graph(step: Graph, instance: int) -> Graph:
    ops = tuple(placed(op, instance=instance) for op in step.ops)
    return replace(step, name=f"{step.name} {instance}", ops=ops)


class CardInstancesState:
    """The states of all instances as one rank's; see the head of this file. Sizes of a stream that is none of
    theirs are those of the first."""

    def __init__(self, states: Sequence[CardDecoderState]) -> None:
        self.states = tuple(states)
        self._of_stream = {Instances.stream(i): state for i, state in enumerate(self.states)}

    def reset(self) -> None:
        """All as before the first token."""
        for state in self.states:
            state.reset()

    def told(self, graph: Graph) -> frozenset[str]:
        """As of one of them."""
        return self.states[0].told(graph)

    def bound(self, graph: Graph) -> frozenset[str]:
        """As of one of them."""
        return self.states[0].bound(graph)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """Each instance has lengths of its own."""
        return self._of_stream.get(stream, self.states[0]).sizes(stream)

    def key(self) -> Hashable:
        """The layers that they have come to."""
        return tuple([state.key() for state in self.states])

    def restore(self, key: Hashable) -> None:
        """Goes to these layers."""
        assert isinstance(key, tuple)
        for state, layer in zip(self.states, key, strict=True):
            state.restore(layer)

    def execute(self, op: Op) -> None:
        """An op of the instance that it is placed at."""
        self._state(op).execute(op.without_place)

    def skip(self, op: Op) -> None:
        """On to what comes after an op."""
        self._state(op).skip(op)

    def put(self, publication: Publication, to: Any) -> None:
        """Raises ValueError: they publish nothing."""
        raise ValueError(f"--on cuda: {publication.signal} is not published on a card")

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Raises ValueError: they meet nobody."""
        raise ValueError(f"--on cuda: {op.kind} {op.name}: instances meet nobody")

    def _state(self, op: Op) -> CardDecoderState:
        return self.states[op.where(INSTANCE)]
