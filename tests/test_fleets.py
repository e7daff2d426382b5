"""Fleets: servers of different devices or settings behind one router.

two equal groups     = one group of both, to the bit
round robin          each server is a queue of its own:  end_i = max(arrival_i, end_(i-1)) + s
                     (Lindley's recursion with a constant time of service s, another on each kind of ranks)
order of groups      renames servers, nothing else
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from simcore.assembly import Place, assemble
from simcore.cli import app
from simcore.input.files import InputError
from simcore.machine import laws
from simcore.machine.laws import digest
from simcore.machine.machine import LawError, Machine, MismatchError, Overheads, Program
from simcore.machine.trace import Trace
from simcore.ops.op import Floor, Graph, Op, Price
from simcore.planning import remote_runs
from simcore.planning.alternatives import alternatives
from simcore.planning.plan import Plan
from simcore.planning.plan import run as answered
from simcore.planning.points import Benches
from simcore.planning.runs import Ask, settle, simulated
from simcore.planning.whatif import load_plan
from simcore.scenario import parse_scenario, resolved
from simcore.sim.contention import alone
from simcore.sim.simulation import RankKind, Simulation
from simcore.sim.tape import record
from simcore.studies.columns import metric
from simcore.studies.serving import laws as serving_laws
from simcore.studies.serving import offer
from simcore.studies.serving.replica import figures_of
from simcore.studies.serving.runner import Bench, Case, Result
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.study import cases, refusal
from simcore.studies.serving.window import whole_run
from simcore.studies.several_devices import SeveralDevices
from simcore.workload.requests import END, Request
from tests.programs import meet, toy_price, toy_roofline, toys
from tests.test_serving import Document, bench, document, outcome, strategy, value, workload
from tests.thorough import first, slow, thorough

CLOSE = 1e-9
ROUTINGS = ("least_loaded", "round_robin", "prefix_aware")


def h200(servers: int = 1, **more: Any) -> Document:
    return {"device": "h200-sxm", "servers": servers, **more}


def h100(servers: int = 1, **more: Any) -> Document:
    return {"device": "h100-sxm", "servers": servers, **more}


def fleet(*groups: Document, **changes: Any) -> Document:
    """A scenario of one fleet."""
    given = document(fleets=[list(groups)], **changes)
    return {name: of for name, of in given.items() if name not in ("device", "devices")}


def ran(given: Document) -> list[tuple[Bench, Case, Result]]:
    table = bench(given)
    return [(table, case, table.run(case, 0)) for case in cases(table)]


def one(given: Document) -> tuple[Bench, Case, Result]:
    (found,) = ran(given)
    return found


def figures(table: Bench, case: Case, result: Result) -> dict[str, Any]:
    found = figures_of(table, result, case, whole_run(result.served))
    return {name: figure for name, figure in found.items() if not name.startswith("group.")}


# -- ranks of several kinds on one machine -----------------------------------------------------------------


def times(factor: float) -> Callable[[Op], Price]:
    def price(op: Op) -> Price:
        found = toy_price(op)
        seconds = factor * found.seconds
        return replace(found, seconds=seconds, low_s=seconds, high_s=seconds)

    return price


def other(factor: float = 1.0, **more: Any) -> RankKind:
    """Ranks on which all takes so many times as long."""
    of = {"mesh": {"tensor": 1}, "roofline": lambda op: Floor(0.0, 0.0, 0.0), "overheads": Overheads()}
    return RankKind(price=times(factor), **{"rates": alone, **of, **more})


def served_by(
    groups: Sequence[RankKind], arrivals_s: Sequence[float], **first: Any
) -> dict[int, list[tuple[float, float]]]:
    """Begin and end of each service, by rank; items go round all ranks in turn."""
    simulation = Simulation(toy_price, roofline=toy_roofline, others=groups, **first)
    ranks, graph = len(simulation.machines), toys("serve", 100)
    found: dict[int, list[tuple[float, float]]] = {rank: [] for rank in range(ranks)}

    def program(m: Machine) -> Program:
        while (item := (yield m.recv("work"))) != END:
            done = m.launch(graph)
            yield m.wait(done)
            found[m.rank].append((item, m.now()))

    for rank in range(ranks):
        mine = [(at_s, at_s) for at_s in arrivals_s[rank::ranks]]
        simulation.feed(rank, "work", [*mine, (arrivals_s[-1], END)])
    laws.enforce(simulation.run(program))
    return found


def lindley(arrivals_s: Sequence[float], service_s: float) -> list[float]:
    ends: list[float] = []
    for at_s in arrivals_s:
        ends.append(max(at_s, ends[-1] if ends else 0.0) + service_s)
    return ends


@pytest.mark.parametrize("rows", [False, True])
def test_ranks_of_each_kind_are_queues_with_their_own_time_of_service(rows: bool) -> None:
    """Loads of 0.9, 0.45 and 0 of the three kinds, one of which takes no time at all."""
    gaps = np.random.default_rng(1).exponential(1.0 / 3.6, 400)
    arrivals_s = np.cumsum(gaps).tolist()
    found = served_by([other(0.5), other(0.0, mesh={"server": 2})], arrivals_s, rows=rows, rates=alone)
    for rank, service_s in enumerate((1.0, 0.5, 0.0, 0.0)):
        ends = lindley(arrivals_s[rank::4], service_s)
        assert [end_s for _, end_s in found[rank]] == pytest.approx(ends, rel=CLOSE)
    waits = [[end_s - at_s for at_s, end_s in found[rank]] for rank in range(4)]
    assert max(waits[0]) > 2.0
    assert min(waits[1]) == pytest.approx(0.5, rel=CLOSE)
    assert max(waits[3]) < CLOSE


@pytest.mark.parametrize("rows", [False, True])
def test_hosts_of_each_kind_have_costs_of_their_own(rows: bool) -> None:
    slow = Overheads(launch_s=0.25, wait_s=0.5, message_s=0.125)
    found = served_by([other(1.0, overheads=slow)], [1.0, 1.0], rows=rows)
    assert found[0][0][1] == pytest.approx(2.0, rel=CLOSE)
    assert found[1][0][1] == pytest.approx(2.0 + 0.25 + 0.5 + 0.125, rel=CLOSE)


def test_ranks_see_the_mesh_of_their_kind_and_meet_their_like() -> None:
    seen: list[tuple[int, int, int, int, int]] = []

    def program(m: Machine) -> Program:
        size = m.mesh["tensor"]
        place = m.coordinate("server"), m.coordinate("tensor"), m.along("tensor", 1)
        seen.append((m.rank, size, *place))
        yield m.wait(m.launch(Graph("meet", (meet("sum", 100 * size, size),))))

    others = [other(1.0, mesh={"server": 2, "tensor": 3})]
    trace = Simulation(toy_price, mesh={"server": 1, "tensor": 2}, others=others).run(program)
    laws.enforce(trace)
    assert sorted(seen) == [
        (0, 2, 0, 0, 1), (1, 2, 0, 1, 0),
        (2, 3, 0, 0, 3), (3, 3, 0, 1, 4), (4, 3, 0, 2, 2),
        (5, 3, 1, 0, 6), (6, 3, 1, 1, 7), (7, 3, 1, 2, 5),
    ]  # fmt: skip
    assert {span.members for span in trace.spans} == {(0, 1), (2, 3, 4), (5, 6, 7)}
    assert {span.rank: span.end_s for span in trace.spans} == pytest.approx(
        {rank: 2.0 if rank < 2 else 3.0 for rank in range(8)}
    )


def test_a_collective_must_be_as_large_as_the_axis_of_its_own_kind() -> None:
    """The op is the same object on both kinds, and fits only the first."""
    graph = Graph("meet", (meet("sum", 100, 2),))

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(graph))

    with pytest.raises(MismatchError, match=r"is for 2 ranks; axis 'tensor' has 3"):
        Simulation(toy_price, mesh={"tensor": 2}, others=[other(mesh={"tensor": 3})]).run(program)


def test_lockstep_simulates_the_first_rank_of_each_group_of_each_kind() -> None:
    others = [other(mesh={"server": 2, "tensor": 4})]
    seen: list[int] = []

    def program(m: Machine) -> Program:
        seen.append(m.rank)
        size = m.mesh["tensor"]
        yield m.wait(m.launch(Graph("meet", (meet("sum", 100, size),))))

    mesh = {"server": 1, "tensor": 2}
    trace = Simulation(toy_price, mesh=mesh, others=others, lockstep=["tensor"]).run(program)
    assert seen == [0, 2, 6]
    assert {span.members for span in trace.spans} == {(0,), (2,), (6,)}


def test_graphs_share_a_device_by_the_law_of_its_kind() -> None:
    def program(m: Machine) -> Program:
        both = [m.launch(toys(name, 100, memory=100), stream=name) for name in ("a", "b")]
        yield m.wait(*both)

    kind = other(1.0, rates=alone, roofline=toy_roofline)
    trace = Simulation(toy_price, roofline=toy_roofline, others=[kind]).run(program)
    ends = {(span.rank, span.stream): span.end_s for span in trace.spans}
    assert ends == pytest.approx({(0, "a"): 2.0, (0, "b"): 2.0, (1, "a"): 1.0, (1, "b"): 1.0})


@pytest.mark.parametrize("rows", [False, True])
def test_no_op_is_faster_than_the_roofline_of_its_own_kind(rows: bool) -> None:
    def broken(factor: float) -> Trace:
        kind = other(factor, roofline=lambda op: Floor(0.5, 0.0, 0.0))
        graph = toys("serve", 100)

        def program(m: Machine) -> Program:
            yield m.wait(m.launch(graph))

        return Simulation(toy_price, others=[kind], rows=rows).run(program)

    laws.enforce(broken(0.5))
    with pytest.raises(LawError, match="roofline"):
        laws.enforce(broken(0.4))


# -- equal groups, and their order -------------------------------------------------------------------------


@slow
@pytest.mark.parametrize("routing", first(1, ROUTINGS))
@pytest.mark.parametrize("kind", ["continuous_batching", "dynamic_batching", "concurrent_instances"])
def test_equal_groups_are_one_group_bit_for_bit(routing: str, kind: str) -> None:
    load = workload(60, {"kind": "poisson", "rate_per_s": 90.0}, (20, 400), (3, 60))
    given = {"workload": load, "strategies": [strategy(kind)], "routing": routing, "slo": {"ttft_s": 0.02}}
    whole = one({**document(devices=3), **given})
    for groups in ([h200(3)], [h200(2), h200()], [h200(), h200(), h200()]):
        table, case, result = one(fleet(*groups, **given))
        for column in fields(result.served):
            same = getattr(whole[2].served, column.name), getattr(result.served, column.name)
            np.testing.assert_array_equal(*same)
        assert digest(result.trace) == digest(whole[2].trace)
        assert figures(table, case, result) == figures(*whole)


@slow
def test_equal_groups_of_two_ranks_are_one_group_bit_for_bit() -> None:
    load = workload(40, {"kind": "poisson", "rate_per_s": 90.0}, (20, 400), (3, 60))
    ways = [strategy("continuous_batching", ranks=2)]
    whole = one(document(devices=4, workload=load, strategies=ways))
    table, case, result = one(
        fleet(h200(ranks=2), h200(ranks=2), workload=load, strategies=[strategy("continuous_batching")])
    )
    assert digest(result.trace) == digest(whole[2].trace)
    assert figures(table, case, result) == figures(*whole)
    assert (case.axes.devices, case.axes.ranks, case.servers) == (4, 2, 2)


@slow
def test_the_order_of_groups_renames_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent by their number, so that each goes to the same device in either order."""
    groups = [h200(2, ranks=2), h100(1)]
    load = workload(60, {"kind": "poisson", "rate_per_s": 90.0}, (20, 400), (3, 60))
    found = []
    for order, names in ((groups, (0, 1, 2)), (groups[::-1], (1, 2, 0))):
        choose = lambda request, open_requests, names=names: names[request.id % 3]  # noqa: E731
        monkeypatch.setattr(offer, "choice", lambda routing, kv_tokens, choose=choose: choose)
        found.append(one(fleet(*order, workload=load)))
    (_, _, ours), (_, _, theirs) = found
    rank = np.array([1, -1, 3, -1, 0])[ours.served.instance]
    assert set(ours.served.instance.tolist()) == {0, 2, 4}
    np.testing.assert_array_equal(rank, theirs.served.instance)
    for column in fields(ours.served):
        if column.name != "instance":
            same = getattr(ours.served, column.name), getattr(theirs.served, column.name)
            np.testing.assert_allclose(*same, rtol=CLOSE, equal_nan=True)
    first, second = (figures(*each) for each in found)
    for name, (number, _) in first.items():
        assert (second[name][0] is None) == (number is None), name
        assert second[name][0] == (None if number is None else pytest.approx(number, rel=1e-8)), name


# -- servers of different speed ----------------------------------------------------------------------------


def at_times(path: Path, times_s: Sequence[float]) -> Document:
    path.write_text("at\n" + "".join(f"{at_s!r}\n" for at_s in times_s), encoding="utf-8")
    arrivals = {"kind": "trace", "format": "table", "path": str(path), "columns": {"arrival": "at"}}
    return {**workload(0, arrivals, 300, 40), "requests": None}


@pytest.mark.parametrize("mixed", [[h200(), h100()], [h200(), h200(ranks=2)], [h100(ranks=4), h200()]])
def test_in_turn_each_server_is_a_queue_of_its_own(mixed: list[Document], tmp_path: Path) -> None:
    """The same figures as separate runs of every second arrival, each on its own device."""
    gaps = np.random.default_rng(7).integers(1, 60, 40)
    times_s = [float(t) / 1000.0 for t in np.cumsum(gaps)]
    load = at_times(tmp_path / "all.csv", times_s)
    whole = one(fleet(*mixed, workload=load, routing="round_robin"))[2].served
    ends = []
    for place, group in enumerate(mixed):
        thin = at_times(tmp_path / f"{place}.csv", [t - times_s[place] for t in times_s[place::2]])
        alone_ = one(fleet(group, workload=thin))[2].served
        mine = whole.instance == np.unique(whole.instance)[place]
        # The end of all requests, which a host takes notice of, comes with the last one of all.
        before = whole.finish_s[mine] < whole.arrival_s[mine][-1]
        assert before.sum() > 10
        for name in ("scheduled_s", "first_token_s", "finish_s"):
            # Times are shown from the first arrival on.
            ours = getattr(whole, name)[mine] - whole.arrival_s[mine]
            theirs = getattr(alone_, name) - alone_.arrival_s
            np.testing.assert_allclose(ours[before], theirs[before], rtol=1e-9, atol=1e-12)
        ends.append(whole.finish_s[mine] - whole.arrival_s[mine])
    assert abs(ends[0].mean() / ends[1].mean() - 1.0) > 0.1


@slow
def test_the_faster_server_gets_more_where_open_requests_decide() -> None:
    load = workload(200, {"kind": "poisson", "rate_per_s": 60.0}, (20, 400), (20, 200))
    slow = {"base": "h200-sxm", "change": {"hbm_bytes_per_s": {"times": 0.25}}, "name": "slow"}
    found = {}
    for routing in ("least_loaded", "round_robin"):
        table, case, result = one(fleet(h200(), {"device": slow}, workload=load, routing=routing))
        every = figures_of(table, result, case, whole_run(result.served))
        found[routing] = [every[f"group.{number}.request_share"][0] for number in (1, 2)]
        assert sum(found[routing]) == pytest.approx(1.0, abs=1e-12)
        assert found[routing][0] == (result.served.instance == 0).mean()
    assert found["round_robin"] == [0.5, 0.5]
    assert found["least_loaded"][0] > 0.6


# -- memory and settings of each group ---------------------------------------------------------------------


@slow
def test_each_server_has_the_room_and_the_settings_of_its_group() -> None:
    groups = [h200(), h100(2, strategy={"max_sequences": 2, "block_tokens": 32})]
    load = workload(40, {"kind": "poisson", "rate_per_s": 200.0}, 200, 40)
    table, case, result = one(fleet(*groups, workload=load))
    every = figures_of(table, result, case, whole_run(result.served))
    for number, device in ((1, "h200-sxm"), (2, "h100-sxm")):
        ways = [strategy("continuous_batching", 2 if number == 2 else 256)]
        alone_ = outcome(document(device=device, workload=load, strategies=ways))
        tokens = every[f"group.{number}.kv_tokens"][0]
        assert tokens == pytest.approx(value(alone_, "kv_tokens"), abs=32)
    assert [one_.room.block_tokens for one_ in result.groups] == [16, 32]
    most = {rank: result.journal["decoding"][result.journal["instance"] == rank].max() for rank in range(3)}
    assert most[0] > 2 == most[1] == most[2]
    assert 0.0 < every["max_kv_share"][0] <= 1.0
    shares = [every[f"group.{number}.max_kv_share"][0] for number in (1, 2)]
    assert every["max_kv_share"][0] == pytest.approx(max(shares))
    weighted = [every[f"group.{number}.mean_kv_share"][0] * size for number, size in ((1, 1), (2, 2))]
    assert every["mean_kv_share"][0] == pytest.approx(sum(weighted) / 3)
    busy = [every[f"group.{number}.utilisation"][0] * size for number, size in ((1, 1), (2, 2))]
    assert every["utilisation"][0] == pytest.approx(sum(busy) / 3)


def test_the_law_of_capacity_goes_by_the_server() -> None:
    """What fits on the larger server is too much for the smaller one."""
    result = one(fleet(h200(), h100()))[2]
    limits = [group.room.limit for group in result.groups]
    assert limits[0] > limits[1]
    for rank, broken in ((0, False), (1, True)):
        peak = np.where(result.journal["instance"] == rank, float(limits[1] + 1), result.journal["kv_peak"])
        journal, limit = replace(result, journal={**result.journal, "kv_peak": peak}).kv
        run = serving_laws.Run(result.served, journal, limit)
        assert bool(list(serving_laws.capacity(run))) is broken


def test_the_law_of_turns_goes_by_the_server() -> None:
    load = workload(60, {"kind": "poisson", "rate_per_s": 300.0}, (20, 400), (3, 60))
    shortest = {"order": "shortest_first", "max_sequences": 2}
    _, _, result = one(fleet(h200(strategy=shortest), h200(strategy={"max_sequences": 2}), workload=load))
    run = serving_laws.Run(result.served, result.journal, 1e9, out_of_turn={0})
    assert not list(serving_laws.in_turn(run))
    assert list(serving_laws.in_turn(replace(run, out_of_turn={1})))
    assert list(serving_laws.in_turn(replace(run, out_of_turn=())))


def test_a_server_that_is_too_small_refuses_the_case() -> None:
    table = bench(fleet(h200(), {"device": "a6000"}, model="qwen3-32b"))
    (reason,) = [refusal(table, case) for case in cases(table)]
    why = "weights and activations do not fit into the memory of a6000"
    assert reason == f"continuous batching, 2,048 tokens a step, 1 a6000: {why}"


# -- a study of fleets -------------------------------------------------------------------------------------


SMALL = workload(30, {"kind": "poisson", "rate_per_s": 60.0}, 100, (3, 30))


@slow
def test_fleets_are_ranked_and_each_says_what_its_groups_do() -> None:
    given = fleet(workload=SMALL, slo={"e2e_s": 9.0})
    given["fleets"] = [[h200(), h100(2, ranks=[1, 2])], [h100(2)]]
    parts = assemble(parse_scenario(given, "x"), "x")
    assert isinstance(parts.study, SeveralDevices)
    found = parts.study.run(lambda *_: None)
    names = ["1 h200-sxm + 2 h100-sxm", "1 h200-sxm + 2 h100-sxm TP2", "2 h100-sxm"]
    assert [*dict.fromkeys(row.axes.device for row in found.rows)] == names
    axes = {row.axes.device: row.axes for row in found.rows}
    assert [(axes[name].devices, axes[name].ranks) for name in names] == [(3, 1), (5, None), (2, 1)]
    assert "At 60 requests/s, " in found.answer
    assert all(name in found.answer for name in names)
    (note,) = [note for note in found.notes if note.startswith(f"{names[0]}: At") and "share of" in note]
    assert "1 h200-sxm " in note
    assert "2 h100-sxm " in note
    table = found.tables["requests.parquet"]
    of = list(zip(table["label"].to_pylist(), table["group"].to_pylist(), strict=True))
    mine = [group for label, group in of if label.endswith(f", {names[1]}")]
    (share,) = [
        row.value
        for row in found.rows
        if row.axes.device == names[1] and row.metric == "group.2.request_share"
    ]
    measured = [m for m, (label, _) in zip(table["measured"].to_pylist(), of, strict=True)
                if label.endswith(f", {names[1]}")]  # fmt: skip
    taken = [group for group, counts in zip(mine, measured, strict=True) if counts]
    assert share == taken.count("2 h100-sxm TP2") / len(taken)
    assert 0.0 < share < 1.0
    assert metric("serving", "group.2.utilisation").meaning.endswith("of group 2 of the fleet")


def test_a_fleet_is_described_by_its_devices() -> None:
    parts = assemble(parse_scenario(fleet(h200(), h100(2)), "x"), "x")
    assert parts.described["device"]["name"] == "1 h200-sxm + 2 h100-sxm"
    assert list(parts.described["devices"]) == ["h200-sxm", "h100-sxm"]
    assert parts.described["basis"] == "datasheet"


def test_an_engine_has_its_settings_on_each_device() -> None:
    """vLLM's default takes more tokens a step on devices of 70 GiB or more."""
    ways = [{"kind": "continuous_batching", "engine": "vllm"}]
    table = bench(fleet(h200(), {"device": "a6000"}, strategies=ways))
    (case,) = cases(table)
    budgets = [part.strategy.token_budget[0] for part in case.groups]  # type: ignore[attr-defined]
    assert budgets[0] > budgets[1]
    assert f"{budgets[0]:,} tokens" in case.axes.label
    assert f"{budgets[1]:,} tokens" in case.axes.label


def test_a_written_scenario_is_read_again() -> None:
    given = fleet(h200(strategy={"max_sequences": 8}), h100(2, ranks=[1, 2]))
    first = parse_scenario(given, "x")
    written = resolved(first)
    assert not {"device", "devices"} & written.keys()
    assert resolved(parse_scenario(written, "x")) == written
    assert len(first.fleets_in_use) == 2  # type: ignore[union-attr]
    assert "fleets" not in resolved(parse_scenario(document(), "x"))


@slow
def test_the_command_line_writes_a_run_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = fleet(h200(), h100(2, ranks=2), workload=SMALL)
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(given), encoding="utf-8")
    found = CliRunner().invoke(app, ["run", "fleet.yaml", "--set", "fleets.0.1.servers=1"])
    assert found.exit_code == 0, found.output
    folder = tmp_path / "runs/small/sim"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "1 h200-sxm + 1 h100-sxm TP2" in page
    result = CliRunner().invoke(app, ["export", str(folder), "--out", "bench.json"])
    assert result.exit_code == 0, result.output


@slow
def test_a_tape_has_each_group() -> None:
    lines = assemble(parse_scenario(fleet(h200(), h100(ranks=2)), "x"), "x").study.tape(record)
    heads = [line for line in lines if line.startswith("#")]
    assert ["1 h200-sxm" in head for head in heads] == [True, False]
    assert "1 h100-sxm TP2" in heads[1]


# -- plans -------------------------------------------------------------------------------------------------


def planned(tmp_path: Path, base: Document, **fields_: Any) -> Plan:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"base": base, "replicas": 3, **fields_}), encoding="utf-8")
    return answered(load_plan(path), jobs=1, progress=lambda *_: None)


@slow
def test_a_grid_of_fleets_sums_costs_and_power_over_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMCORE_CACHE", "none")
    plan = planned(
        tmp_path,
        fleet(h200(), h100(2), workload=SMALL),
        question="grid",
        vary={"fleets.0.1.servers": [1, 3]},
        objective=["lowest_cost", "lowest_latency"],
        constraints={"server_starts": 0, "mean_servers": 100},
        cost_per_hour={"h200-sxm": 3.5, "h100-sxm": 2.0},
    )
    # All servers run all the time.
    assert [one.judged.mean("mean_servers") for one in plan.result.tried] == [2.0, 4.0]
    assert [line["verdict"] for line in plan.lines] == ["holds", "holds"]
    lines = {line["devices"]: line for line in plan.lines}
    assert {n: line["cost_per_hour"] for n, line in lines.items()} == {2: 5.5, 4: 9.5}
    assert [line["servers"] for line in lines.values()] == [2, 4]
    assert lines[2]["device"] == "1 h200-sxm + 1 h100-sxm"
    joules = {n: line["joules_per_output_token"] for n, line in lines.items()}
    # Both have a TDP of 700 W, and as many tokens are asked for.
    assert joules[4] / joules[2] == pytest.approx(2.0)
    assert "no command" in plan.how[0]["why_not"]


@thorough
def test_a_rate_is_searched_on_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMCORE_CACHE", "none")
    load = workload(20, {"kind": "constant", "rate_per_s": 60.0}, 2000, 20)

    def rate(*groups: Document) -> tuple[Plan, float]:
        plan = planned(tmp_path, fleet(*groups, workload=load, slo={"ttft_s": 0.5}), question="rate")
        (winner,) = plan.result.winners
        assert winner is not None
        return plan, winner.value

    plan, both = rate(h200(), h100())
    assert plan.answer.startswith("1 h200-sxm + 1 h100-sxm (continuous batching")
    assert plan.gains
    # One server of each kind carries more than two of the slower kind, and less than two of the faster one.
    assert rate(h100(2))[1] < both < rate(h200(2))[1]


@slow
def test_a_worker_elsewhere_makes_the_same_run() -> None:
    given = fleet(h200(), h100(2, ranks=2), h200(strategy={"max_sequences": 2}), workload=SMALL)
    scenario = parse_scenario(given, "x")
    assert isinstance(scenario, ServingScenario)
    (point,) = Benches("x", 1).points(scenario)
    for end in ("value", "high"):
        ask = Ask(point, 3, end)  # type: ignore[arg-type]
        settle(ask)
        gave = remote_runs.make(remote_runs.common(point), remote_runs.piece("a", ask))
        assert (gave.ran, gave.refused) == (simulated(ask), "")
        point.bench.take_over(remote_runs.from_plain(gave.prices))


def test_a_fault_that_only_a_worker_meets_has_the_words_of_the_process_that_asks(tmp_path: Path) -> None:
    """The device of the second fleet is gone when the worker puts it together."""
    card = tmp_path / "card.yaml"
    four = {"name": "card", "memory_bytes": 141e9, "hbm_bytes_per_s": 4e12, "flops_per_s": {"bf16": 9e14}}
    card.write_text(yaml.safe_dump(four))
    given = fleet(workload=SMALL)
    given["fleets"] = [[h200()], [h200(), {"device": str(card)}]]
    scenario: Any = parse_scenario(given, "plan.yaml")
    point = Benches("plan.yaml", 1).points(scenario)[-1]
    ask = Ask(point, 0)
    settle(ask)
    shared, sent = remote_runs.common(point), pickle.loads(remote_runs.piece("a", ask))
    card.unlink()
    with pytest.raises(InputError) as error:
        Benches("plan.yaml", 1).points(scenario)
    says = str(error.value)
    assert says.startswith("plan.yaml: fleets[1][1].device: ")
    gave = remote_runs.make(shared, pickle.dumps(replace(sent, files={})))
    assert gave.refused == f"says: {says}"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"question": "devices"}, "fleets: say their servers, which question devices searches"),
        ({"question": "cost", "cost_per_hour": {"h200-sxm": 1.0}}, "fleets: say their servers"),
        (
            {"question": "grid", "objective": "lowest_cost", "cost_per_hour": {"h200-sxm": 1.0}},
            "cost_per_hour.h100-sxm: is missing",
        ),
        (
            {"question": "grid", "vary": {"fleets.0.1.device": ["h100-sxm", "h30"]}},
            "plan.yaml: vary.fleets.0.1.device: unknown device 'h30'",
        ),
        (
            {"question": "grid", "vary": {"fleets": [[[h200()], [h100(), {"device": "h20"}]]]}},
            "plan.yaml: base: fleets[1][1].device: unknown device 'h20'",
        ),
        (
            {"question": "grid", "vary": {"fleets.0.1.strategy.token_budgets": [64, 128]}},
            "plan.yaml: vary: fleets[0][1].strategy.token_budgets: no such field; did you mean",
        ),
        (
            {"question": "grid", "vary": {"fleets.0.1.strategy": [{"token_budget": 64}, {"X": 1}]}},
            "plan.yaml: vary: fleets[0][1].strategy.X: no such field (allowed: ",
        ),
        (
            {"question": "grid", "vary": {"fleets.0.1.strategy.token_budget": [64, "many"]}},
            "plan.yaml: vary.fleets.0.1.strategy.token_budget: is 'many'; a whole number is needed",
        ),
        (
            {
                "question": "grid",
                "vary": {"fleets.0.1.strategy": [{"token_budget": 64}, {"token_budget": -3}]},
            },
            "plan.yaml: vary.fleets.0.1.strategy.token_budget: is -3; 1 to 10,000,000 is allowed",
        ),
    ],
)
def test_what_a_plan_of_a_fleet_cannot_say_is_one_line(tmp_path: Path, more: Document, says: str) -> None:
    with pytest.raises(InputError) as error:
        planned(tmp_path, fleet(h200(), h100(), slo={"ttft_s": 1.0}), **more)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


# -- bad input ---------------------------------------------------------------------------------------------

BAD: list[tuple[Document, str]] = [
    ({"fleets": 3}, "fleets: is 3; a list is needed"),
    ({"fleets": [h200()]}, "fleets[0]: is {"),
    ({"fleets": [[]]}, "fleets[0]: is []; at least one value is needed"),
    ({"fleets": []}, "device: is missing; a device, or fleets in its place, is needed"),
    ({"fleets": [[{"servers": 2}]]}, "fleets[0][0].device: is missing"),
    ({"fleets": [[{"devise": "h200-sxm"}]]}, "fleets[0][0].devise: no such field; did you mean 'device'?"),
    ({"fleets": [[h200(0)]]}, "fleets[0][0].servers: is 0"),
    ({"fleets": [[h200(-1)]]}, "fleets[0][0].servers: is -1"),
    ({"fleets": [[h200(float("nan"))]]}, "fleets[0][0].servers: is nan"),  # type: ignore[arg-type]
    ({"fleets": [[h200(10**9)]]}, "fleets[0][0].servers: is 1000000000"),
    ({"fleets": [[h200(ranks=0)]]}, "fleets[0][0].ranks: is 0"),
    ({"fleets": [[h200(1000, ranks=2)]]}, "fleets[0]: makes 2,000 devices; at most 1,024"),
    ({"fleets": [[h200([1, 1000], ranks=2)]]}, "fleets[0]: makes 2,000 devices"),  # type: ignore[arg-type]
    ({"fleets": [[h200(1000, ranks=[1, 2])]]}, "fleets[0]: makes 2,000 devices"),
    ({"fleets": [[h200(1000), h100(25)]]}, "fleets[0]: makes 1,025 devices"),
    ({"fleets": [3 * [h200(list(range(1, 101)))]]}, "fleets: make over 20,000"),  # type: ignore[arg-type]
    ({"fleets": [[{"device": "h20-sxm"}]]}, "fleets[0][0].device: unknown device 'h20-sxm'; did"),
    ({"fleets": [[h200()], [h100(), {"device": "h20"}]]}, "fleets[1][1].device: unknown device 'h20'"),
    ({"fleets": [[h200([1, 2])], [h200(link="x")]]}, "fleets[1][0].link: h200-sxm: unknown link"),  # type: ignore[arg-type]
    ({"fleets": [[h200(profile="x")]]}, "fleets[0][0].profile: unknown profile"),
    ({"fleets": [[h200(link="x")]]}, "fleets[0][0].link: h200-sxm: unknown link"),
    ({"fleets": [[h200()], [h200()]]}, "fleets: 1 h200-sxm is given twice"),
    (
        {"fleets": [[h200(), h200(strategy={"max_sequence": 1})]]},
        "fleets[0][1].strategy.max_sequence: no such field; did you",
    ),
    ({"fleets": [[h200(strategy={"ranks": 2})]]}, "strategy.ranks: no such field"),
    ({"fleets": [[h200(strategy={"max_sequences": 0})]]}, "fleets[0][0].strategy.max_sequences: is 0"),
    ({"fleets": [[h200(strategy={"max_sequences": [1, 2]})]]}, "strategy: makes other variants"),
    ({"device": "h200-sxm"}, "device: cannot be given with fleets"),
    ({"devices": 2}, "devices: cannot be given with fleets"),
    ({"published": ["alspec_table3"]}, "published: cannot be given with fleets"),
    ({"autoscaling": {"kind": "open_requests", "target": 2}}, "autoscaling: cannot be given with fleets"),
    ({"strategies": [strategy("continuous_batching", ranks=2)]}, "strategies[0].ranks: is 2; with fleets"),
]


def test_a_fleet_may_have_as_many_devices_as_a_scenario() -> None:
    found: Any = parse_scenario(fleet(h200(1000), h100(24)), "x")
    assert sum(group.devices for group in found.fleets[0]) == 1024


@slow
def test_a_scenario_may_have_as_many_fleets_as_runs() -> None:
    """A hundred numbers of servers of one kind by two hundred of another."""
    for most, allowed in ((200, True), (201, False)):
        given = fleet(h200([*range(1, 101)]), h100([*range(1, most + 1)]))  # type: ignore[arg-type]
        if allowed:
            parse_scenario(given, "x")
        else:
            with pytest.raises(InputError, match="fleets: make over 20,000 fleets"):
                parse_scenario(given, "x")


@pytest.mark.parametrize(("changes", "says"), BAD)
def test_each_fault_of_a_fleet_is_one_line(changes: Document, says: str) -> None:
    with pytest.raises(InputError) as error:
        assemble(parse_scenario({**fleet(h200(), h100()), **changes}, "x"), "x")
    assert says in str(error.value)
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


def test_a_real_machine_refuses_fleets() -> None:
    place = Place(name="cpu", start=lambda setup: pytest.fail("it started"))
    with pytest.raises(InputError, match=r"^x: fleets: are simulated; --on cpu runs on one device$"):
        assemble(parse_scenario(fleet(h200(), h100()), "x"), "x", place)


def test_requests_are_what_a_router_counts() -> None:
    """A router of a fleet counts by server, not by rank."""
    to = offer.router("least_loaded", [0, 1, 5], [100, 100, 100])
    sent = [list(to(Request(i, 0.0, 5, 1, 1))) for i in range(4)]
    assert sent == [[0], [1], [5], [0]]


def test_a_grid_takes_fleets_whose_groups_differ_in_ranks(tmp_path: Path) -> None:
    """What servers are, a fleet says: none is taken away to see whether it can run."""
    path = tmp_path / "plan.yaml"
    document = {"base": fleet(h200(), h100(2, ranks=2)), "question": "grid"}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    asked = load_plan(path)
    (only,) = alternatives(asked, Benches("x", 1), any_devices=False).every
    assert (only.point.case.axes.devices, only.point.case.axes.ranks) == (5, None)
