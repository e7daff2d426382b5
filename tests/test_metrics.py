"""Figures from traces against the same program run anew, and against what an op says of itself."""

from collections.abc import Mapping
from math import prod
from random import Random

import pytest

from simcore.machine.machine import Machine, Overheads, Program
from simcore.machine.metrics import (
    PathPiece,
    critical_path,
    exposed_communication_s,
    interval,
    price_shares,
    tokens,
)
from simcore.machine.trace import Cause, Mark, Span, Trace
from simcore.ops import op as ops
from simcore.ops.op import Graph, Op, Price, Publication, SourceKind
from simcore.sim.simulation import Simulation
from tests.programs import meet, sends, toy, toys

TOKENS = 4
# Of the price's own time: no two ops have the same, and an end is near the price or far from it.
ENDS = {"low": (0.2, 0.95), "high": (1.05, 4.0)}


def ends_of(op: Op) -> tuple[float, float]:
    """Factors of the low and the high end of an op's price, by its kind and name."""
    draws = Random(f"{op.kind} {op.name}")
    return draws.uniform(*ENDS["low"]), draws.uniform(*ENDS["high"])


def priced(op: Op, end: str) -> Price:
    low, high = ends_of(op)
    seconds = (op["hundredths"] if op.kind == "toy" else op["elements"]) / 100
    at_end = seconds * {"value": 1.0, "low": low, "high": high}[end]
    return Price(at_end, seconds * low, seconds * high, "measured", "toy")


def chain(seed: int) -> list[Graph]:
    """Graphs of local ops and collectives, in which nothing runs beside anything else."""
    draws = Random(seed)

    def op(name: str) -> Op:
        hundredths = draws.randint(0, 9)
        return meet(name, hundredths, 2) if draws.random() < 0.4 else toy(name, hundredths)

    return [
        Graph(f"token {i}", tuple(op(f"op {i} {j}") for j in range(draws.randint(1, 6))))
        for i in range(TOKENS)
    ]


def run_chain(graphs: list[Graph], end: str) -> Trace:
    def program(m: Machine) -> Program:
        for i, graph in enumerate(graphs):
            done = m.launch(graph)
            m.mark(f"token {i}", [done])
            yield m.wait(done)

    costs = Overheads(launch_s=0.003, wait_s=0.002)
    return Simulation(lambda op: priced(op, end), mesh={"tensor": 2}, overheads=costs).run(program)


@pytest.mark.parametrize("seed", range(8))
def test_an_interval_is_the_latency_at_both_ends_where_nothing_overlaps(seed: int) -> None:
    """One op after the other: all at their low ends is the run at low prices, and so of the high ends."""
    graphs = chain(seed)
    run = run_chain(graphs, "value")
    low, high = ([t.latency_s for t in tokens(run_chain(graphs, end))] for end in ("low", "high"))
    found = [interval(run, token) for token in tokens(run)]
    assert [one for one, _ in found] == pytest.approx(low, abs=1e-12)
    assert [other for _, other in found] == pytest.approx(high, abs=1e-12)


def test_the_host_has_no_interval_and_every_op_has_its_own() -> None:
    """By hand: 3 ms of a launch on the host, and two ops of 10 and 20 ms."""
    run = run_chain([toys("op", 1, 2)], "value")
    (token,) = tokens(run)
    (a_low, a_high), (b_low, b_high) = (ends_of(toy(f"op{i}", 1)) for i in range(2))
    expected = 0.003 + 0.01 * a_low + 0.02 * b_low, 0.003 + 0.01 * a_high + 0.02 * b_high
    assert interval(run, token) == pytest.approx(expected)


# -- communication ---------------------------------------------------------------------------------------

WIRE: Mapping[str, Op] = {
    op.kind: op
    for op in (
        ops.all_gather("a", elements=64, ranks=2, axis="tensor", dtype="bf16"),
        ops.all_reduce("b", elements=64, ranks=2, axis="tensor", dtype="bf16"),
        ops.reduce_scatter("c", elements=64, ranks=2, axis="tensor", dtype="bf16"),
        ops.exchange_priority(elements=64, ranks=2, axis="tensor", dtype="bf16"),
        ops.put("d", elements=64, axis="tensor", dtype="bf16"),
    )
}
LOCAL = (
    ops.matmul("m", m=4, n=8, k=8, dtype="bf16"),
    ops.norm("n", tokens=4, hidden=8, dtype="bf16"),
    ops.receive_speculation(tokens=1, width=8, dtype="bf16"),
    ops.sample(tokens=1, vocab=16, dtype="bf16"),
)


def test_what_crosses_a_wire_is_communication_and_nothing_else() -> None:
    seconds = {kind: 2.0**i for i, kind in enumerate(WIRE)}
    others = {op.kind: 100.0 for op in LOCAL}
    assert all(op.work.wire_bytes > 0.0 for op in WIRE.values())
    assert not any(op.work.wire_bytes for op in LOCAL)
    assert exposed_communication_s(seconds | others) == sum(seconds.values())
    for kind, took_s in seconds.items():
        assert exposed_communication_s({kind: took_s, "matmul": 3.0}) == took_s


def test_a_put_that_is_waited_for_is_exposed() -> None:
    """An op of 20 ms publishes at its end, 50 ms of wire follow, then an op of 10 ms on the other side."""
    run = Simulation(lambda op: priced(op, "value"), mesh={"tensor": 1})

    def program(m: Machine) -> Program:
        m.launch(sends("first", 2, signal="there", put=5))
        last = m.launch(toys("second", 1), after=[m.signal("there")])
        m.mark("token 0", [last])
        yield m.wait(last)

    (token,) = tokens(run.run(program))
    assert token.latency_s == pytest.approx(0.08)
    assert exposed_communication_s(token.by_kind()) == pytest.approx(0.05)


# -- paths and shares ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_path_has_neither_gaps_nor_overlaps_and_ends_at_its_mark(seed: int) -> None:
    run = run_chain(chain(seed), "value")
    for mark in run.marks:
        path = critical_path(run, mark)
        assert all(piece.end_s > piece.start_s for piece in path)
        assert path[0].start_s == 0.0
        assert path[-1].end_s == mark.at_s
        assert [a.end_s for a in path[:-1]] == pytest.approx([b.start_s for b in path[1:]], abs=1e-15)
    for token in tokens(run):
        assert sum(token.by_kind().values()) == pytest.approx(token.latency_s)


def skipped(number: int, start_s: float, end_s: float, cause: Cause) -> Span:
    """A span without ops, which a path shows as a gate."""
    when = (start_s, start_s, end_s)
    return Span(number, number, 0, "main", f"graph {number}", "skipped", *when, cause, (), (), ())


def test_between_a_cause_and_what_it_began_a_path_idles_on_no_device() -> None:
    """By hand: span 1 begins 2 s after the end of span 0, and is marked 1 s after its own."""
    spans = [skipped(0, 0.5, 1.5, Cause(None, 0.25)), skipped(1, 3.5, 4.5, Cause(0, 1.5))]
    mark = Mark(0, "token 0", 5.5, Cause(1, 4.5))
    trace = Trace(spans, marks=[mark])
    path = critical_path(trace, mark)
    expected = [
        ("idle", 0.0, 0.25),
        ("idle", 0.25, 0.5),
        ("gate", 0.5, 1.5),
        ("idle", 1.5, 3.5),
        ("gate", 3.5, 4.5),
        ("idle", 4.5, 5.5),
    ]
    assert [(piece.kind, piece.start_s, piece.end_s) for piece in path] == expected
    assert {(piece.kind, piece.rank) for piece in path} == {("idle", -1), ("gate", 0)}
    (token,) = tokens(trace)
    assert token.by_kind() == {"idle": 3.5, "gate": 2.0}


def test_a_host_is_busy_on_no_device_from_what_it_waited_for() -> None:
    """By hand: before the first launch the host is busy from the start, then from the end of span 0 on."""
    spans = [
        skipped(0, 0.5, 1.5, Cause(None, 0.5, host=True)),
        skipped(1, 3.5, 4.5, Cause(0, 3.5, host=True)),
    ]
    mark = Mark(0, "token 0", 4.5, Cause(1, 4.5))
    path = critical_path(Trace(spans, marks=[mark]), mark)
    host = [piece for piece in path if piece.kind == "host"]
    assert host == [PathPiece("host", "host", -1, 0.0, 0.5), PathPiece("host", "host", -1, 1.5, 3.5)]
    assert [piece.end_s for piece in path] == [0.5, 1.5, 3.5, 4.5]


def test_shares_of_prices_are_of_the_seconds_that_each_source_gave() -> None:
    sources: tuple[SourceKind, ...] = ("measured", "roofline", "published")

    def price(op: Op) -> Price:
        seconds = op["hundredths"] / 100
        return Price(seconds, seconds, seconds, sources[int(op.name[-1]) % len(sources)], "toy")

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(toys("op", 1, 2, 5, 4, 0, 3)))

    found = price_shares(Simulation(price).run(program))
    assert list(found) == sorted(found)
    assert found == pytest.approx({"measured": 5 / 15, "roofline": 2 / 15, "published": 8 / 15})
    assert price_shares(Trace()) == {}


def test_ranks_of_a_mesh_are_all_of_them() -> None:
    mesh = {"tensor": 2, "group": 3}
    publication = Publication("late", 0, ops.put("hop", elements=1, axis="tensor", dtype="bf16"))
    graph = Graph("g", (toy("a", 1),), (publication,))

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(graph))

    spans = Simulation(lambda op: priced(op, "value"), mesh=mesh).run(program).spans
    assert {span.rank for span in spans} == set(range(prod(mesh.values())))
