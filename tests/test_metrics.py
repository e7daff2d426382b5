"""Figures from traces against the same program run anew, and against what an op says of itself."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from random import Random

import pytest

from simcore.machine.machine import Machine, Overheads, Program
from simcore.machine.metrics import (
    PathPiece,
    Token,
    assumed_free,
    attention_s,
    critical_path,
    exposed_communication_s,
    interval,
    outside_layers_s,
    price_shares,
    tokens,
)
from simcore.machine.trace import Cause, Mark, PricedOp, Span, Trace, distinct
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
    free = of_ops([("a", 0.0, "assumed")])
    assert price_shares(Trace([free])) == {}


def of_ops(
    spelled: Sequence[tuple[str, float, SourceKind]], number: int = 0, early_s: float | None = None
) -> Span:
    """A span of ops of (name, seconds, source), whose prices go from half to three times the seconds, or to
    four times in the spans after span 0."""
    above = 4.0 if number else 3.0
    ops = tuple(
        PricedOp(toy(name, 0), Price(s, s / 2, s * above, source, "toy", early_s=early_s), 0.0)
        for name, s, source in spelled
    )
    whole_s = sum(s for _, s, _ in spelled)
    when = (0.0, 0.0, whole_s)
    progress = ((0.0, 0.0), (whole_s, whole_s))
    return Span(number, number, 0, "main", "g", "run", *when, Cause(None, 0.0), (), ops, progress)


def test_what_is_assumed_to_take_no_time_is_named_and_nothing_else() -> None:
    spelled: list[tuple[str, float, SourceKind]] = [
        ("free", 0.0, "assumed"), ("assumed", 1.0, "assumed"), ("measured", 0.0, "measured")
    ]  # fmt: skip
    assert assumed_free(Trace([of_ops(spelled)])) == {"free"}
    assert assumed_free(Trace([of_ops(spelled[1:2])])) == set()
    assert assumed_free(Trace([of_ops(spelled[1:], early_s=0.0)])) == {"early part"}
    assert assumed_free(Trace([of_ops(spelled[1:], early_s=0.5)])) == set()


def test_an_op_with_several_prices_counts_with_the_interval_of_the_last() -> None:
    """By name: one op of 1 s to 3 s in span 0, to 4 s in span 1; and twice in a span, 8 s to 10 s at last."""
    token = Token(0, 0.0, 2.0, (("toy", "a", 0, 2.0),))
    spans = [of_ops([("a", 1.0, "measured")], number) for number in range(2)]
    assert interval(Trace(spans), token) == (1.0, 8.0)
    assert interval(Trace(spans[::-1]), token) == (1.0, 6.0)
    last = PricedOp(toy("a", 0), Price(8.0, 8.0, 10.0, "measured", "toy"), 0.0)
    twice = replace(spans[0], ops=(*spans[0].ops, last))
    assert interval(Trace([twice]), token) == (2.0, 2.5)


def test_each_of_a_few_ops_is_seen_once() -> None:
    one, other = of_ops([("a", 1.0, "measured"), ("b", 1.0, "measured")]).ops
    assert list(distinct((one, one))) == [one]
    assert list(distinct((other, one, other))) == [other, one]


def test_a_path_has_no_piece_of_no_time() -> None:
    """By hand: the host took no time after span 0, nor span 1; span 2 has an op of no time in its middle."""
    spans = [
        skipped(0, 0.0, 1.5, Cause(None, 0.0)),
        skipped(1, 1.5, 1.5, Cause(0, 1.5, host=True)),
        replace(
            of_ops([("a", 1.0, "measured"), ("b", 0.0, "measured"), ("c", 2.0, "measured")], 2),
            start_s=1.5, end_s=4.5, cause=Cause(1, 1.5), progress=((1.5, 0.0), (4.5, 3.0)),
        ),
    ]  # fmt: skip
    mark = Mark(0, "token 0", 4.5, Cause(2, 4.5))
    path = critical_path(Trace(spans, marks=[mark]), mark)
    assert [(piece.name, piece.start_s, piece.end_s) for piece in path] == [
        ("graph 0", 0.0, 1.5), ("a", 1.5, 2.5), ("c", 2.5, 4.5)
    ]  # fmt: skip


def test_a_token_has_no_share_in_what_ended_when_it_began() -> None:
    """Both tokens come of one span; the first is there when the first of its two ops ends."""
    span = of_ops([("a", 1.0, "measured"), ("b", 2.0, "measured")])
    marks = [Mark(0, f"token {i}", at_s, Cause(0, at_s)) for i, at_s in enumerate((1.0, 3.0))]
    first, second = tokens(Trace([span], marks=marks))
    assert (first.stretches, second.stretches) == ((("toy", "a", 0, 1.0),), (("toy", "b", 0, 2.0),))


def test_attention_and_what_lies_outside_of_layers_are_told_by_kind_and_by_name() -> None:
    stretches = (
        ("decode_attention", "attention", 0, 1.0),
        ("speculative_attention", "attention", 0, 2.0),
        ("matmul", "qkv", 0, 4.0),
        ("matmul", "lm_head", 0, 8.0),
        ("norm", "head_norm", 0, 16.0),
        ("idle", "idle", -1, 32.0),
    )
    token = Token(0, 0.0, 63.0, stretches)
    assert (attention_s(token), outside_layers_s(token)) == (3.0, 24.0)


def test_of_marks_of_a_token_at_one_time_the_first_counts() -> None:
    """Rank 0 skipped a graph until then, rank 1 stood idle."""
    spans = [skipped(0, 0.0, 1.0, Cause(None, 0.0))]
    marks = [Mark(0, "token 0", 1.0, Cause(0, 1.0)), Mark(1, "token 0", 1.0, Cause(None, 0.0))]
    assert [t.by_kind() for t in tokens(Trace(spans, marks=marks))] == [{"gate": 1.0}]
    assert [t.by_kind() for t in tokens(Trace(spans, marks=marks[::-1]))] == [{"idle": 1.0}]


def test_ranks_of_a_mesh_are_all_of_them() -> None:
    mesh = {"tensor": 2, "group": 3}
    publication = Publication("late", 0, ops.put("hop", elements=1, axis="tensor", dtype="bf16"))
    graph = Graph("g", (toy("a", 1),), (publication,))

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(graph))

    spans = Simulation(lambda op: priced(op, "value"), mesh=mesh).run(program).spans
    assert {span.rank for span in spans} == set(range(prod(mesh.values())))
