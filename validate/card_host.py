"""What the verbs of the machine on a card cost (`simcore.machine.Overheads`), measured with its own programs.

    launch_s   = (a loop of launches of a graph of one node)      / launches
    wait_s     = (a loop of launch, mark, wait)                   / rounds - launch_s - the node by itself
    message_s  = (a loop of send, recv)                           / (2 rounds)
    gate_s     = (a skipped launch of MANY nodes - one of ONE)    / (MANY - ONE), by the card's clock

The node by itself is what one more of them takes in a graph, so that launch, node and wait add up to a round.
Medians over runs, the first of which, which captures, is thrown away.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any

from torch import Tensor

from kernels.streams import current_gate
from simcore.machine import Machine, Program
from simcore.ops import Graph, Op, Publication, Work
from simcore.trace import Trace
from validate.card_layer import CudaLayer, Layer
from validate.card_machine import Card

LAUNCHES, RUNS = 200, 5
ONE, MANY = 1, 501


class _Counting:
    """A state whose every op is a kernel of one program that counts up, where its gate lets it."""

    read_on_device: frozenset[str] = frozenset()

    def __init__(self, layer: Layer) -> None:
        self.layer, self.count = layer, layer.zeros(1)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        del stream
        return {}

    def key(self) -> Hashable:
        return 0

    def restore(self, key: Hashable) -> None:
        assert key == 0

    def execute(self, op: Op) -> None:
        del op
        self.layer.verbs.publish(self.count, current_gate())

    def skip(self, op: Op) -> None:
        pass

    def put(self, publication: Publication, to: Any) -> None:
        raise AssertionError(publication.signal)

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        raise AssertionError(op.name)


def host_costs(layer: Layer | None = None) -> dict[str, float]:
    """`Overheads` of this host and card, in seconds."""
    layer = CudaLayer() if layer is None else layer
    card = Card([_Counting(layer)], layer)
    launch_s = median(_looped(card, _launches))
    round_s = median(_looped(card, _rounds))
    message_s = median(_looped(card, _messages)) / 2
    node_s = _more_nodes(card, gated=False)
    return {
        "launch_s": launch_s,
        "wait_s": max(0.0, round_s - launch_s - node_s),
        "message_s": message_s,
        "gate_s": _more_nodes(card, gated=True),
    }


def _nothing(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def _nodes(count: int) -> Graph:
    return Graph(f"{count} nodes", tuple(Op("count", f"{i}", (), "int32", _nothing) for i in range(count)))


def _launches(m: Machine, took_s: list[float]) -> Program:
    graph = _nodes(ONE)
    begun_s = time.perf_counter()
    for _ in range(LAUNCHES):
        ticket = m.launch(graph)
    took_s.append((time.perf_counter() - begun_s) / LAUNCHES)
    yield m.wait(ticket)


def _rounds(m: Machine, took_s: list[float]) -> Program:
    graph = _nodes(ONE)
    yield m.wait(m.launch(graph))
    begun_s = time.perf_counter()
    for i in range(LAUNCHES):
        ticket = m.launch(graph)
        m.mark(f"round {i}", [ticket])
        yield m.wait(ticket)
    took_s.append((time.perf_counter() - begun_s) / LAUNCHES)


def _messages(m: Machine, took_s: list[float]) -> Program:
    begun_s = time.perf_counter()
    for i in range(LAUNCHES):
        m.send("in", i, m.rank)
        yield m.recv("in")
    took_s.append((time.perf_counter() - begun_s) / LAUNCHES)


def _looped(card: Card, program: Callable[[Machine, list[float]], Program]) -> list[float]:
    """Seconds a round of each run but the first."""
    took_s: list[float] = []
    for _ in range(1 + RUNS):
        card.start().run(lambda m: program(m, took_s))
    return took_s[1:]


def _more_nodes(card: Card, *, gated: bool) -> float:
    """What one more node of a launch takes on the card; of one that is skipped, if `gated`."""
    few_s, many_s = ([_spans_s(card, _nodes(n), gated) for _ in range(1 + RUNS)][1:] for n in (ONE, MANY))
    return max(0.0, (median(many_s) - median(few_s)) / (MANY - ONE))


def _spans_s(card: Card, graph: Graph, gated: bool) -> float:
    """Seconds of a launch behind another one, so that no time of the host is in it."""

    def program(m: Machine) -> Program:
        never = m.flag("never")
        when = never.nonzero() if gated else None
        for _ in range(3):
            ticket = m.launch(graph, when=when)
        yield m.wait(ticket)

    trace: Trace = card.start().run(program)
    last = max(trace.spans, key=lambda span: span.id)
    return last.end_s - last.start_s
