"""Measures the costs of the verbs of the machine on a card (`machine.Overheads`) with its own programs.

    launch_kernel_s = (launches of rounds of SOME nodes - of ONE) / ((SOME - ONE) / 2)
    launch_s        = a launch of rounds of ONE node - its launch_kernel_s
    return_s, size_s            their mean times in both of these
    start_s         = a graph of ONE node from its launch by the host on - a node of one of SOME
    wait_s          = a wait behind SOME nodes (a host may arrive after ONE is done)
    message_s       = (a loop of send, recv)                      / (2 rounds)
    gate_s          = (a skipped launch of MANY nodes - of ONE)   / (MANY - ONE), by the card's clock
    flags_s         = a launch that sets a flag - the same without, by the card's clock

The first six come from `rounds`, most of them separated by the card machine's `verbs_of`: a launch of one
node that was not launched for ROUNDS rounds, like a tile at its position, and a wait; a launch of more nodes,
the same each time, which reads a size; a mark; a wait, as for a token. Relaunching a graph at once is
faster: 26 us, with waits between 27, with another graph before each wait 29.5; runs of decoders and tilings
take 33 to 34 plus the time of their kernels (an H200's host). Graphs are built once, as in models, because a
host's first look at a graph takes longer the more ops it has. Values are medians over runs in turns without
the first run, which captures. Costs beyond SOME nodes are unknown: a first launch of twenty thousand takes a
host 3 ms.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, partial
from statistics import fmean, median
from typing import Any

from torch import Tensor

from simcore.kernels.streams import current_gate
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.ops.op import Graph, Op, Publication, Size, Work
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.validate.machines.state import CardState
from simcore.validate.timing.pace import pace

ROUNDS, MESSAGES, RUNS = 100, 200, 9
ONE, SOME, MANY = 1, 201, 501
ROUND = "round"
WITH_LAUNCHES = "launch_s", "return_s", "size_s"
GRAPH_S = "graph_s"


class _Counting(CardState):
    """A state whose every op is a kernel of one program that increments a counter if its gate is open.
    `round`: the launches' size, in the card's memory."""

    def __init__(self, api: CudaApi) -> None:
        self.api, self.count, self.round = api, api.zeros(1), api.zeros(1)

    def reset(self) -> None:
        """The counter goes on."""

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        return graph.needs

    def captured_sizes(self, graph: Graph) -> frozenset[str]:
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
        self.api.verbs.publish(self.count, current_gate())

    def skip(self, op: Op) -> None:
        pass

    def put(self, publication: Publication, to: Any) -> None:
        raise AssertionError(publication.signal)

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        raise AssertionError(op.name)


def counting_card(api: CudaApi) -> Card:
    """Returns a card of one rank on which every op increments a counter."""
    return Card([_Counting(api)], api)


def host_costs(api: CudaApi | None = None) -> dict[str, float]:
    """Returns `Overheads` of this host and card, in seconds. Raises ValueError if no wait can be timed."""
    card = counting_card(TorchCudaApi() if api is None else api)
    turns = [(_verbs(card, ONE), _verbs(card, SOME), _messages_s(card)) for _ in range(1 + RUNS)][1:]
    names = *WITH_LAUNCHES, GRAPH_S
    few = {name: median(verbs[name] for verbs, _, _ in turns) for name in names}
    many = {name: median(verbs[name] for _, verbs, _ in turns) for name in names}
    waits_s = [verbs["wait_s"] for _, verbs, _ in turns if "wait_s" in verbs]
    if not waits_s:
        raise ValueError(f"this host is too slow to wait for a graph of {SOME} nodes")
    # One of the two launches of a round has ONE node in both kinds of rounds.
    kernel_s = max(0.0, (many["launch_s"] - few["launch_s"]) / ((SOME - ONE) / 2))
    launch_s = max(0.0, few["launch_s"] - ONE * kernel_s)
    return {
        "launch_s": launch_s,
        "launch_kernel_s": kernel_s,
        "return_s": min(launch_s, fmean((few["return_s"], many["return_s"]))),
        "start_s": max(0.0, few[GRAPH_S] - ONE * (many[GRAPH_S] - few[GRAPH_S]) / (SOME - ONE)),
        "size_s": fmean((few["size_s"], many["size_s"])),
        "wait_s": median(waits_s),
        "message_s": median(message_s for *_, message_s in turns),
        "gate_s": _gate_s(card),
        "flags_s": _flags_s(card),
    }


def _nothing(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def _nodes(count: int) -> Graph:
    return Graph(f"{count} nodes", tuple(Op("count", f"{i}", (), "int32", _nothing) for i in range(count)))


@cache
def _seldom(i: int) -> Graph:
    """Returns ONE node in a graph of its own."""
    return Graph(f"of round {i}", _nodes(ONE).ops)


@cache
def _reads_size(count: int) -> Graph:
    """Returns a graph of `count` nodes, the last of which reads a size."""
    last = Op("count", "reads size", ((ROUND, Size(ROUND)),), "int32", _nothing)
    return _nodes(count - 1) + Graph("reads size", (last,))


def rounds(m: Machine, *, nodes: int) -> Program:
    """The program of rounds; see the head of this file."""
    graph = _reads_size(nodes)
    for i in range(ROUNDS):
        yield m.wait(m.launch(_seldom(i)))
        ticket = m.launch(graph, sizes={ROUND: i})
        m.mark(f"round {i}", [ticket])
        yield m.wait(ticket)


def _verbs(card: Card, nodes: int) -> Mapping[str, float]:
    """Returns the times of verbs and of their graph in a run of rounds of such graphs, at the host's pace."""
    trace, _ = pace().keeps(lambda: card.start().run(partial(rounds, nodes=nodes)))
    name = _reads_size(nodes).name
    graph_s = median(span.end_s - span.start_s for span in trace.spans if span.graph == name)
    return {**trace.verbs, GRAPH_S: graph_s}


def _messages_s(card: Card) -> float:
    """Returns the seconds of a message, with a host at its pace."""
    took_s: list[float] = []

    def program(m: Machine) -> Program:
        begun_s = time.perf_counter()
        for i in range(MESSAGES):
            m.send("in", i, m.rank)
            yield m.recv("in")
        took_s.append(time.perf_counter() - begun_s)

    pace().keeps(lambda: card.start().run(program))
    return took_s[-1] / (2 * MESSAGES)


def _gate_s(card: Card) -> float:
    """Returns the card's time for one more node of a skipped launch."""
    few_s, many_s = (
        [_behind_s(card, _nodes(n), skipped=True) for _ in range(1 + RUNS)][1:] for n in (ONE, MANY)
    )
    return max(0.0, (median(many_s) - median(few_s)) / (MANY - ONE))


def _flags_s(card: Card) -> float:
    """Returns the card's time for writing the flag that a launch sets, by the kernel of ranks that share
    their flags; ranks on cards of their own have one that also evaluates the next gate."""
    plain_s, sets_s = (
        [_behind_s(card, _nodes(ONE), sets=sets) for _ in range(1 + RUNS)][1:] for sets in (False, True)
    )
    return max(0.0, median(sets_s) - median(plain_s))


def _behind_s(card: Card, graph: Graph, *, skipped: bool = False, sets: bool = False) -> float:
    """Returns the seconds of a launch queued behind others, so that they include no time of the host;
    `skipped`: by its gate, `sets`: it sets a flag."""

    def program(m: Machine) -> Program:
        never, flag = m.flag("never"), m.flag("set")
        for _ in range(3):
            ticket = m.launch(
                graph, when=never.nonzero() if skipped else None, sets={flag: 1} if sets else None
            )
        yield m.wait(ticket)

    trace: Trace = card.start().run(program)
    last = max(trace.spans, key=lambda span: span.id)
    return last.end_s - last.start_s
