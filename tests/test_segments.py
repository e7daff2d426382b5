"""Segments of graphs are kept by the ids of graphs: of one that is gone nothing may be left to another."""

from dataclasses import replace
from gc import collect
from weakref import ref

import pytest

from simcore.ops import op as ops
from simcore.ops.op import Floor, Graph, Op, Price, Pricer, Publication
from simcore.sim.contention import Demand
from simcore.sim.segments import Cuts
from tests.thorough import slow


def price(op: Op) -> Price:
    seconds = 1.0 if op.ranks > 1 else op["tokens"] * 1e-6
    return Price(seconds, seconds, seconds, "measured", "a table")


def roofline(op: Op) -> Floor:
    del op
    return Floor(0.0, 0.0, 0.0)


@pytest.mark.parametrize("local", [False, True])
def test_a_graph_that_is_gone_leaves_its_segments_to_no_other(local: bool) -> None:
    """A new graph often gets the id of the last one, and its ops those of the last one's."""
    shared = Cuts(price, roofline)
    cuts = Cuts(price, roofline, shared) if local else shared
    for tokens in range(1, 200):
        graph = Graph("step", (ops.norm("norm", tokens=tokens, hidden=8, dtype="bf16"),))
        (segment,) = cuts.of(graph, {})
        assert segment.seconds == pytest.approx(tokens * 1e-6)
        del graph, segment


@slow
def test_graphs_stay_as_long_as_anything_is_kept_by_their_ids() -> None:
    """Of a graph without links the shared prices too, whose run may be over."""
    shared = Cuts(price, roofline)
    cuts = Cuts(price, roofline, shared)
    norm = ops.norm("norm", tokens=1, hidden=8, dtype="bf16")
    reduce = ops.all_reduce("sum", elements=8, ranks=2, axis="tensor", dtype="bf16")
    graphs = [Graph("alone", (norm,)), Graph("mixed", (norm, reduce))]
    there = [ref(graph) for graph in graphs]
    for graph in graphs:
        cuts.of(graph, {})
    del graph, graphs
    collect()
    assert all(graph() is not None for graph in there)
    del cuts
    collect()
    assert all(graph() is not None for graph in there)


def test_a_graph_that_crosses_a_link_is_no_other_that_does_not() -> None:
    """Whether a graph crosses a link is kept too."""
    cuts = Cuts(price, roofline, Cuts(price, roofline))
    for tokens in range(1, 200):
        crosses = tokens % 2 == 0
        reduce = ops.all_reduce("sum", elements=8, ranks=2, axis="tensor", dtype="bf16")
        alone = ops.norm("norm", tokens=tokens, hidden=8, dtype="bf16")
        graph = Graph("step", (reduce if crosses else alone,))
        (segment,) = cuts.of(graph, {})
        assert (segment.collective, segment.seconds) == (
            crosses,
            pytest.approx(1.0 if crosses else tokens * 1e-6),
        )
        del graph, segment, reduce, alone


@pytest.mark.parametrize(
    ("memory_s", "compute_s", "demand"), [(3.0, 4.0, (1.0, 1.0)), (0.5, 0.25, (0.25, 0.125))]
)
def test_no_graph_keeps_more_of_a_resource_busy_than_there_is(
    memory_s: float, compute_s: float, demand: tuple[float, float]
) -> None:
    """Also where prices are lower than floors, as they may be from a cache: of two ops of a second each."""
    two = tuple(ops.norm(name, tokens=1_000_000, hidden=8, dtype="bf16") for name in ("a", "b"))
    cuts = Cuts(price, lambda op: Floor(compute_s / 2.0, memory_s / 2.0, 0.0))
    (segment,) = cuts.of(Graph("step", two), {})
    assert segment.seconds == pytest.approx(2.0)
    assert (segment.demand.memory, segment.demand.compute) == demand


def test_what_takes_no_time_asks_for_nothing() -> None:
    """Whatever its floor says: it must not slow down what runs beside it, not even for an instant."""
    free = Cuts(lambda _: Price(0.0, 0.0, 0.0, "assumed", "free"), lambda _: Floor(2.0, 3.0, 0.0))
    ahead = Graph("free", (ops.norm("norm", tokens=1, hidden=8, dtype="bf16"),))
    for graph in (ahead, Graph("empty", ())):
        (segment,) = free.of(graph, {})
        assert (segment.seconds, segment.demand) == (0.0, Demand(0.0, 0.0))


def test_a_publication_leaves_by_the_time_since_the_last_collective() -> None:
    """Each segment's work counts from its own beginning: 2 and 3 microseconds before the op that publishes,
    which takes 5 and has no early part."""
    alone = [ops.norm(f"norm{n}", tokens=n, hidden=8, dtype="bf16") for n in (2, 3, 5)]
    reduce = ops.all_reduce("sum", elements=8, ranks=2, axis="tensor", dtype="bf16")
    put = ops.put("put", elements=8, axis="tensor", dtype="bf16")
    for before in ((), (alone[0], reduce)):
        graph_ops = (*before, *alone)
        published = Publication("s", len(graph_ops) - 1, put)
        *_, last = Cuts(price, roofline).of(Graph("step", graph_ops, (published,)), {})
        ((leaves_s, publication),) = last.publications
        assert publication is published
        assert leaves_s == pytest.approx(10e-6)


def test_runs_share_all_prices_but_those_of_links() -> None:
    """Each op is priced once: by the run's own prices if it crosses a link, fused or not, else by the shared
    ones, which later runs find."""
    norm, other = (ops.norm(name, tokens=1, hidden=8, dtype="bf16") for name in ("norm", "other"))
    reduce = ops.all_reduce("sum", elements=8, ranks=2, axis="tensor", dtype="bf16")
    fused = replace(norm, name="fused", parts=(norm, other))
    graphs = (Graph("mixed", (norm, norm, reduce, fused, norm)), Graph("alone", (other, norm)))
    asked: dict[str, list[str]] = {"shared": [], "first": [], "second": []}

    def priced(run: str, takes_s: float) -> Pricer:
        def price(op: Op) -> Price:
            asked[run].append(op.name)
            return Price(takes_s, takes_s, takes_s, "measured", "a table")

        return price

    shared = Cuts(priced("shared", 1.0), roofline)
    for run, takes_s in (("first", 10.0), ("second", 20.0)):
        cuts = Cuts(priced(run, takes_s), roofline, shared)
        for _ in range(2):
            found = [[segment.seconds for segment in cuts.of(graph, {})] for graph in graphs]
            assert found == [[2.0, takes_s, takes_s + 1.0], [2.0]]
    assert asked == {"shared": ["norm", "other"], "first": ["sum", "fused"], "second": ["sum", "fused"]}
