"""One rank of a tensor-parallel group may stand for all: then each token ends at the same instant."""

from dataclasses import replace
from pathlib import Path

import pytest

from simcore.assembly import assemble
from simcore.machine import metrics
from simcore.machine.machine import Machine, MismatchError, Program
from simcore.machine.trace import Mark
from simcore.ops.op import Graph
from simcore.scenario import load_scenario
from simcore.sim.simulation import Simulation
from simcore.studies import decode
from simcore.studies.decode import Bench
from tests.programs import meet, toy_price, toys
from tests.thorough import slow, thorough

ROOT = Path(__file__).resolve().parent.parent


def bench(file: str, *settings: str) -> tuple[Bench, list[decode.Case]]:
    path = ROOT / "scenarios" / file
    parts = assemble(load_scenario(path, settings), str(path))
    return parts.study.bench, decode.cases(parts.study.bench)


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("papers/alspec_h100_table3.yaml", ["context_tokens=32768"]),
        pytest.param("alspec.yaml", ["context_tokens=131070", "tokens=2"], marks=thorough),
        pytest.param(
            "h200/alspec_long_context.yaml",
            ["context_tokens=131072", "tokens=2", "batch=2"],
            marks=thorough,
        ),
    ],
)
def test_all_ranks_simulated_end_each_token_when_one_does(file: str, settings: list[str]) -> None:
    runs, cases = bench(file, *settings)
    checked = [case for case in cases if not decode.does_not_fit(runs, case)]
    assert len(checked) >= 2
    assert all(runs.keeps_step(case, runs.trace(case)) for case in checked)


@slow
def test_the_critical_path_of_one_rank_is_that_of_all() -> None:
    runs, cases = bench("h200/alspec_long_context.yaml", "context_tokens=131072")
    case = next(case for case in cases if case.axes.strategy == "alspec" and case.axes.ranks == 4)
    (whole,) = metrics.tokens(runs.trace(case))
    hits = case.hits
    assert hits is not None
    one = runs._run(case, hits.draws[-1][1])
    assert one.by_kind == pytest.approx(whole.by_kind())


def test_only_the_first_of_ranks_in_lockstep_is_simulated() -> None:
    graph = Graph("g", (*toys("a", 3).ops, meet("m", 2, 4)))

    def program(m: Machine) -> Program:
        ticket = m.launch(graph)
        yield m.wait(ticket)
        assert m.now() == pytest.approx(0.05)

    trace = Simulation(toy_price, mesh={"tensor": 4}, lockstep=["tensor"]).run(program)
    assert {span.rank for span in trace.spans} == {0}


@pytest.mark.parametrize("lockstep", [[], ["tensor"]])
def test_a_graph_whose_ranks_meet_is_a_row_where_one_stands_for_all(lockstep: list[str]) -> None:
    graph = Graph("g", (*toys("a", 3).ops, meet("m", 2, 4)))

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(graph))

    trace = Simulation(toy_price, mesh={"tensor": 4}, lockstep=lockstep, rows=True).run(program)
    assert trace.rows.table()["end_s"].tolist() == ([pytest.approx(0.05)] if lockstep else [])
    assert [span.rank for span in trace.spans if span.state == "collective"] == (
        [] if lockstep else [0, 1, 2, 3]
    )


def test_a_collective_for_another_number_of_ranks_is_refused_all_the_same() -> None:
    def program(m: Machine) -> Program:
        yield m.wait(m.launch(Graph("g", (meet("m", 2, 2),))))

    with pytest.raises(MismatchError, match="is for 2 ranks; axis 'tensor' has 4"):
        Simulation(toy_price, mesh={"tensor": 4}, lockstep=["tensor"]).run(program)


@slow
def test_a_latency_alone_is_that_of_the_whole_result() -> None:
    """Also at another latency of the link, where what is local is priced once for all of them."""
    runs, cases = bench("h200/alspec_long_context.yaml", "context_tokens=8192")
    other, _ = bench("h200/alspec_long_context.yaml", "context_tokens=8192")
    shown = {case.axes.label: case for case in cases}
    assert len(shown) == 10
    for case in shown.values():
        for link_latency_s in (None, 1e-7, 4e-5):
            there = replace(case, link_latency_s=link_latency_s)
            assert runs.latency_s(there) == other.run(there).latency_s > 0.0


@slow
def test_paths_of_tokens_are_stretches_of_the_critical_path() -> None:
    runs, cases = bench("h200/alspec_long_context.yaml", "context_tokens=8192", "tokens=3")
    for case in {case.axes.strategy: case for case in cases}.values():
        trace = runs.trace(case)
        # Of marks at the same moment the first counts.
        last: dict[str, Mark] = {}
        for mark in trace.marks:
            if mark.name not in last or mark.at_s > last[mark.name].at_s:
                last[mark.name] = mark
        for token in metrics.tokens(trace):
            path = metrics.critical_path(trace, last[f"token {token.index}"])
            expected = [
                (piece.kind, piece.name, piece.rank, piece.end_s - max(piece.start_s, token.start_s))
                for piece in path
                if piece.end_s > token.start_s
            ]
            assert list(token.stretches) == expected
            assert sum(seconds for *_, seconds in expected) == pytest.approx(token.latency_s, rel=1e-9)
            low_s, high_s = metrics.interval(trace, token)
            assert (low_s, high_s) == metrics.intervals(trace, [token, token])[1]
            assert low_s < token.latency_s < high_s
        assert metrics.moments(trace) == [
            (token.index, token.start_s, token.end_s) for token in metrics.tokens(trace)
        ]
