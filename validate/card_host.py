"""What the verbs of the machine on a card cost (`simcore.machine.Overheads`), measured with its own programs.

    launch_s   = (a loop of launches of a graph of one node) / launches
    return_s   = from when the device has been given a graph of such a loop to the end of its launch
    wait_s     = (a loop of launch, mark, wait) / rounds - max(launch_s, launch_s - return_s + the node)
    size_s     = (the same of a graph that reads a size, which goes up, less the former) / rounds
    message_s  = (a loop of send, recv)                           / (2 rounds)
    gate_s     = (a skipped launch of MANY nodes - one of ONE)    / (MANY - ONE), by the card's clock

The node is what one more of them takes in a graph. A round on the simulated machine is then as long as it was
here: a launch, or until the card has done what it was given, and the wait. Where launches whose ends nobody
waits for take longer, for the card has to catch up, launch_s is what a round leaves of it. Medians over runs
in turns, the first of which, which capture, are thrown away.
"""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor

from kernels.streams import current_gate
from simcore.machine import Machine, Program
from simcore.ops import Graph, Op, Publication, Size, Work
from simcore.trace import Trace
from validate.card_layer import CudaLayer, Layer
from validate.card_machine import Card
from validate.pace import pace

LAUNCHES, RUNS = 200, 9
ONE, MANY = 1, 501
ROUND = "round"


class _Counting:
    """A state whose every op is a kernel of one program that counts up, where its gate lets it. `round`:
    what launches are told, in the card's memory."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.count, self.round = layer, layer.zeros(1), layer.zeros(1)

    def told(self, graph: Graph) -> frozenset[str]:
        return graph.needs

    def bound(self, graph: Graph) -> frozenset[str]:
        del graph
        return frozenset()

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        del stream
        return {ROUND: self.round}

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
    loops = _launches, partial(_rounds, _nodes(ONE)), partial(_rounds, _told()), _messages
    turns = [[_looped(card, loop) for loop in loops] for _ in range(1 + RUNS)][1:]
    free_s, round_s, told_s, there_and_back_s = (
        median(took_s for took_s, _ in each) for each in zip(*turns, strict=True)
    )
    return_s = median(verbs["return_s"] for _, (_, verbs), *_ in turns)
    return {
        **round_costs(free_s, round_s, return_s, _more_nodes(card, gated=False)),
        "size_s": max(0.0, told_s - round_s),
        "message_s": there_and_back_s / 2,
        "gate_s": _more_nodes(card, gated=True),
    }


def round_costs(free_s: float, round_s: float, return_s: float, node_s: float) -> dict[str, float]:
    """What launch and wait cost, by the head of this file: `free_s` a launch of a loop without waits."""
    launch_s = min(free_s, max(0.0, round_s - node_s))
    return_s = min(return_s, launch_s)
    busy_s = max(launch_s, launch_s - return_s + node_s)
    return {"launch_s": launch_s, "return_s": return_s, "wait_s": max(0.0, round_s - busy_s)}


def _nothing(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def _nodes(count: int) -> Graph:
    return Graph(f"{count} nodes", tuple(Op("count", f"{i}", (), "int32", _nothing) for i in range(count)))


def _told() -> Graph:
    return Graph("told", (Op("count", "0", ((ROUND, Size(ROUND)),), "int32", _nothing),))


def _launches(m: Machine, took_s: list[float]) -> Program:
    graph = _nodes(ONE)
    begun_s = time.perf_counter()
    for _ in range(LAUNCHES):
        ticket = m.launch(graph)
    took_s.append((time.perf_counter() - begun_s) / LAUNCHES)
    yield m.wait(ticket)


def _rounds(graph: Graph, m: Machine, took_s: list[float]) -> Program:
    yield m.wait(m.launch(graph, sizes={ROUND: LAUNCHES}))
    begun_s = time.perf_counter()
    for i in range(LAUNCHES):
        ticket = m.launch(graph, sizes={ROUND: i})
        m.mark(f"round {i}", [ticket])
        yield m.wait(ticket)
    took_s.append((time.perf_counter() - begun_s) / LAUNCHES)


def _messages(m: Machine, took_s: list[float]) -> Program:
    begun_s = time.perf_counter()
    for i in range(LAUNCHES):
        m.send("in", i, m.rank)
        yield m.recv("in")
    took_s.append((time.perf_counter() - begun_s) / LAUNCHES)


def _looped(
    card: Card, program: Callable[[Machine, list[float]], Program]
) -> tuple[float, Mapping[str, float]]:
    """Seconds a round of one run, of a host at its pace, and what its verbs took one by one."""
    took_s: list[float] = []
    pace().settle()
    run = card.start()
    run.run(lambda m: program(m, took_s))
    return took_s[0], run.trace.verbs


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
