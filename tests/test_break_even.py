"""Question break_even: where the lead passes, of lines whose crossings are known, and against single runs."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import simcore
from simcore import cli, rundir
from simcore.input.files import InputError
from simcore.planning import break_even
from simcore.planning.break_even import Case, answer_of, grid, short, sweep
from simcore.planning.plan import run
from simcore.planning.whatif import Asked, load_plan
from simcore.reports import build
from tests.test_planning import BASE, silent, written
from tests.thorough import slow

DECODE: dict[str, Any] = {
    "name": "tiny", "study": "decode", "device": "h200-sxm", "profile": "none", "model": "llama-3.1-8b",
    "context_tokens": 64, "strategies": [{"kind": "tensor_parallel", "ranks": [1, 2]}],
}  # fmt: skip
RATE = "workload.arrivals.rate_per_s"
Lines = Mapping[str, Callable[[float], float]]


def asked(folder: Path, **more: Any) -> Asked:
    """A plan of a decode scenario along its batch."""
    plan = {"base": DECODE, "question": "break_even", "over": "batch", "between": [1.0, 5.0], **more}
    return load_plan(written(folder, plan))


def drawn(monkeypatch: pytest.MonkeyPatch, lines: Lines, half: float = 0.0, places: int = 1) -> list[float]:
    """Lets each case be a line along the field, in some places; returns the values that were run."""
    ran: list[float] = []

    def cases(
        of: Asked, settings: Any, value: float, jobs: int, warnings: dict[str, None]
    ) -> tuple[Case, ...]:
        del of, settings, jobs, warnings
        ran.append(value)
        return tuple(
            Case(label, "d", 1, "s", (("context", place),), y, y - half, y + half)
            for place in range(places)
            for label, y in ((label, line(value) + place) for label, line in lines.items())
        )

    monkeypatch.setattr(break_even, "_cases", cases)
    return ran


def test_lines_cross_where_they_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """a = x, b = 4.3 - x, c = 1.2: a leads up to 1.2, c up to 3.1, then b."""
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 4.3 - x, "c": lambda x: 1.2})
    (swept,) = sweep(asked(tmp_path), 1, silent)
    assert [(lead.before, lead.after) for lead in swept.leads] == [("a", "c"), ("c", "b")]
    assert [lead.at for lead in swept.leads] == pytest.approx([1.2, 3.1], abs=0.04)
    assert {name: first.label for name, first in swept.first.items()} == {"": "a"}
    assert "a leads up to batch 1.2" in answer_of(asked(tmp_path), [swept])


def test_between_intervals_that_overlap_neither_leads_for_sure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x and 6 - x cross at 3; with half intervals of 0.5 they overlap from 2.5 to 3.5, with 5 everywhere."""
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 6.0 - x}, 0.5)
    ((lead,),) = (one.leads for one in sweep(asked(tmp_path), 1, silent))
    assert lead.at == pytest.approx(3.0, abs=0.04)
    assert lead.between == (pytest.approx(2.5, abs=0.05), pytest.approx(3.5, abs=0.05))
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 6.0 - x}, 5.0)
    ((lead,),) = (one.leads for one in sweep(asked(tmp_path), 1, silent))
    assert lead.between == (None, None)
    assert "from the first value to the last neither for sure" in answer_of(
        asked(tmp_path), sweep(asked(tmp_path), 1, silent)
    )


def test_of_a_metric_that_should_be_great_the_greatest_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 6.0 - x}, 0.5)
    ((lead,),) = (one.leads for one in sweep(asked(tmp_path, metric="tokens_per_s_per_user"), 1, silent))
    assert (lead.before, lead.after, lead.at) == ("b", "a", pytest.approx(3.0, abs=0.04))
    assert lead.between == (pytest.approx(2.5, abs=0.05), pytest.approx(3.5, abs=0.05))


def test_far_ends_go_by_ratios_and_whole_ones_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grid([1, 10_000]) == [1, 10, 100, 1000, 10_000]
    assert grid([0.0, 1.0]) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert grid([1, 3]) == [1, 2, 3]
    ran = drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 777.0})
    ((lead,),) = (one.leads for one in sweep(asked(tmp_path, between=[1, 10_000]), 1, silent))
    assert lead.at == pytest.approx(777, rel=0.01)
    assert all(isinstance(value, int) for value in ran)
    # Ten halvings at most between two neighbours, for the lead and for the two ends of what is not sure.
    assert len(ran) < 5 + 3 * 10


def test_each_place_has_a_lead_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 6.0 - x}, places=2)
    (swept,) = sweep(asked(tmp_path), 1, silent)
    assert [lead.place for lead in swept.leads] == ["context 0", "context 1"]


def test_what_cannot_run_everywhere_leads_where_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The better one runs up to 2.2 only; the second place has nothing that runs at the first value."""

    def cases(of: Asked, settings: Any, value: float, *others: Any) -> tuple[Case, ...]:
        del of, settings, others
        lines = [("a", 0, 1.0)] * (value <= 2.2) + [("b", 0, 2.0)]
        lines += [("a", 1, value), ("b", 1, 7.0 - value)] if value > 1.5 else []
        return tuple(Case(label, "d", 1, "s", (("context", place),), y, y, y) for label, place, y in lines)

    monkeypatch.setattr(break_even, "_cases", cases)
    (swept,) = sweep(asked(tmp_path), 1, silent)
    assert [(lead.place, lead.before, lead.after) for lead in swept.leads] == [
        ("context 0", "a", "b"),
        ("context 1", "a", "b"),
    ]
    assert [lead.at for lead in swept.leads] == pytest.approx([2.2, 3.5], abs=0.05)
    assert (swept.first["context 1"].since, swept.first["context 1"].until) == (2.0, 5.0)


def test_without_intervals_both_ends_are_the_crossing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for between in ([1024, 131072], [1.0, 5.0], [0.1, 90.0]):
        edge = (between[0] * between[1]) ** 0.5 * 1.1
        drawn(monkeypatch, {"a": lambda x: x, "b": lambda x, e=edge: e})
        ((lead,),) = (one.leads for one in sweep(asked(tmp_path, between=between), 1, silent))
        assert lead.between == (lead.at, lead.at)


def test_what_never_changes_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: x + 1.0})
    every = sweep(asked(tmp_path), 1, silent)
    assert answer_of(asked(tmp_path), every) == "a leads everywhere from batch 1 to 5."


@pytest.mark.parametrize("after", ["a", "b"])
def test_values_in_between_at_which_nothing_runs_are_said(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs from 2.3 to 3.7, but at another place; beyond, the same case leads, or another one."""

    def cases(of: Asked, settings: Any, value: float, *others: Any) -> tuple[Case, ...]:
        del of, settings, others
        lines = [("c", 1, 1.0), ("d", 1, 1.0)]
        if not 2.3 < value < 3.7:
            first = "a" if value < 3.0 else after
            lines += [(label, 0, 1.0 + (label != first)) for label in "ab"]
        return tuple(Case(label, "d", 1, "s", (("context", place),), y, y, y) for label, place, y in lines)

    monkeypatch.setattr(break_even, "_cases", cases)
    (swept,) = sweep(asked(tmp_path), 1, silent)
    answer = answer_of(asked(tmp_path), [swept])
    assert "context 1: c and d are equal everywhere from batch 1 to 5." in answer
    rows = {row["place"]: row["in_words"] for row in break_even.everywhere_of(asked(tmp_path), [swept])}
    assert rows.pop("context 1") == "c (equal: d)"
    if after == "a":
        assert (
            "context 0: a leads wherever anything runs from batch 1 to 5; nothing runs at batch 3." in answer
        )
        assert rows == {"context 0": "a; nothing runs at batch 3"}
    else:
        assert "context 0: a leads up to batch 2.3" in answer
        assert ", then b; nothing runs at batch 3." in answer
        assert rows == {}


@pytest.mark.parametrize("half", [0.0, 0.5, 50.0])
def test_equal_cases_are_said_to_be_equal(
    half: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wide their intervals are. A third one, 0.8 behind, is behind for sure up to half of that."""
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: x}, half)
    every = sweep(asked(tmp_path), 1, silent)
    assert answer_of(asked(tmp_path), every) == "a and b are equal everywhere from batch 1 to 5."
    (row,) = break_even.everywhere_of(asked(tmp_path), every)
    assert (row["label"], row["in_words"], row["unsure"]) == ("a", "a (equal: b)", ())
    drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: x, "c": lambda x: x + 0.8}, half)
    sure = "" if half < 0.4 else ", but nowhere for sure"
    assert answer_of(asked(tmp_path), sweep(asked(tmp_path), 1, silent)) == (
        f"a and b are equal everywhere from batch 1 to 5 and lead{sure}."
    )


FLAT = 2.6


@pytest.mark.parametrize(
    ("lines", "leads", "equal"),
    [
        ({"a": lambda x: x, "b": lambda x: max(x, FLAT)}, [], (FLAT, None)),
        ({"b": lambda x: max(x, FLAT), "a": lambda x: x}, [], (FLAT, None)),
        ({"b": lambda x: max(x, FLAT), "a": lambda x: FLAT}, [], (None, FLAT)),
        ({"a": lambda x: max(0.0, x - 3.4), "b": lambda x: max(0.0, 1.6 - x)}, [3.4], (1.6, 3.4)),
        ({"b": lambda x: max(0.0, 1.6 - x), "a": lambda x: max(0.0, x - 3.4)}, [3.4], (1.6, 3.4)),
    ],
)
def test_cases_that_are_equal_on_a_stretch_are_said_to_be_so_there(
    lines: Lines, leads: list[float], equal: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In either order of the cases a leads first, for sure where both are not equal."""
    drawn(monkeypatch, lines)
    (swept,) = sweep(asked(tmp_path), 1, silent)
    assert [lead.at for lead in swept.leads] == pytest.approx(leads, abs=0.04)
    assert [lead.between for lead in swept.leads] == [pytest.approx(equal, abs=0.04)] * len(leads)
    (first,) = swept.first.values()
    assert (first.label, first.unsure) == ("a", ())
    (one,) = first.equal
    assert set(one.labels) == {"a", "b"}
    (stretch,) = one.stretches
    assert stretch == tuple(end if end is None else pytest.approx(end, abs=0.04) for end in equal)
    answer = answer_of(asked(tmp_path), [swept])
    assert answer.startswith("a leads up to" if leads else "a leads everywhere from batch 1 to 5. ")
    assert answer.count("are equal") == 1


def test_cases_that_only_touch_at_a_value_are_not_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x and 6 - x cross at 3, which is run, and at which the second one is the first in the list."""
    for lines in ({"a": lambda x: x, "b": lambda x: 6.0 - x}, {"b": lambda x: 6.0 - x, "a": lambda x: x}):
        drawn(monkeypatch, lines)
        (swept,) = sweep(asked(tmp_path), 1, silent)
        (lead,), (first,) = swept.leads, swept.first.values()
        assert (lead.before, lead.after, lead.at, lead.between) == ("a", "b", 3.0, (3.0, 3.0))
        assert first.equal == ()


def test_values_of_a_field_are_said_with_their_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate, also of sessions, and seconds, of which those below one are milliseconds."""
    sessions = {"turns": {"kind": "constant", "value": 2}, "gap_s": {"kind": "constant", "value": 1.0}}
    latency = "device.change.links.nvlink.latency_s"
    for workload, over, one, ends in (
        (BASE["workload"], RATE, "{} requests/s", "1 to 5 requests/s"),
        ({**BASE["workload"], "sessions": sessions}, RATE, "{} sessions/s", "1 to 5 sessions/s"),
        (BASE["workload"], latency, "latency {} s", "latency 1 s to 5 s"),
        (BASE["workload"], "devices", "devices {}", "devices 1 to 5"),
    ):
        plan = asked(tmp_path, base={**BASE, "workload": workload}, over=over)
        drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: x + 1.0})
        assert answer_of(plan, sweep(plan, 1, silent)) == f"a leads everywhere from {ends}."
        drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: 6.0 - x})
        ((lead,),) = (swept.leads for swept in sweep(plan, 1, silent))
        at = one.format(f"{lead.at:.3g}")
        assert answer_of(plan, sweep(plan, 1, silent)) == f"a leads up to {at}, then b."
    plan = asked(tmp_path, base=BASE, over="devices", vary={latency: [0.002], RATE: [7]})
    assert answer_of(plan, sweep(plan, 1, silent)).startswith("With latency 2 ms, 7 requests/s: a leads up")


def test_names_of_fields_say_what_they_are() -> None:
    assert short("device.change.links.nvlink.latency_s.times") == "latency s times"
    assert short("workload.output_tokens.value") == "output tokens value"


@slow
def test_at_the_crossing_both_take_as_long(tmp_path: Path) -> None:
    """More devices lead once reading the weights takes longer than the collectives: where a link's latency is
    searched, a run at the crossing has both within the 2 % that the bisection leaves."""
    path = "device.change.links.nvlink.latency_s"
    plan = {
        "base": DECODE, "question": "break_even", "over": path, "between": [1e-9, 1e-3],
    }  # fmt: skip
    found = run(load_plan(written(tmp_path, plan)), jobs=1, progress=silent)
    (lead,) = found.leads
    assert (lead["before"], lead["after"]) == ("tensor parallel, 2 devices", "tensor parallel, 1 device")
    alone = simcore.run({**DECODE, "device": {"base": "h200-sxm", "change": {path[14:]: lead["at"]}}})
    one, two = (row["value"] for row in alone.rows if row["metric"] == "token_latency_s")
    assert one == pytest.approx(two, rel=0.02)
    by_value = {line[f"vary.{path}"]: line["label"] for line in found.lines if line["best"]}
    assert all((label == lead["before"]) == (value < lead["at"]) for value, label in by_value.items())


@slow
def test_the_command_line_writes_the_leads_and_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = "device.change.links.nvlink.latency_s"
    plan = {"base": DECODE, "question": "break_even", "over": path, "between": [1e-9, 1e-3]}
    written(tmp_path, {**plan, "vary": {"context_tokens": [64, 128]}})
    result = CliRunner().invoke(cli.app, ["plan", "plan.yaml", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "tiny" / "plan"
    summary = json.loads((folder / "summary.json").read_text())
    assert [lead["settings"] for lead in summary["break_even"]] == [
        {"context_tokens": 64}, {"context_tokens": 128},
    ]  # fmt: skip
    page = build(folder).read_text("utf-8")
    assert "Who leads" in page
    assert "tensor parallel, 1 device" in page


@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=slow)])
def test_one_replica_has_no_interval_and_says_so(
    replicas: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One strategy leads everywhere. With more replicas there are intervals."""
    monkeypatch.chdir(tmp_path)
    strategies = [{"kind": "continuous_batching", "ranks": 1, "token_budget": [64, 2048]}]
    base = {**BASE, "strategies": strategies, "replicas": replicas, "price_interval": False}
    plan = {"base": base, "question": "break_even", "over": RATE, "between": [1, 4000]}
    written(tmp_path, plan)
    result = CliRunner().invoke(cli.app, ["plan", "plan.yaml", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").glob("*/plan")
    summary, page = json.loads((folder / "summary.json").read_text()), (folder / "report.html").read_text()
    alone = replicas == 1
    assert (
        "one replica has no interval; more `replicas` of the scenario would give one" in summary["answer"]
    ) == alone
    assert ("no interval" in result.stdout) == alone
    assert ("One replica has no interval" in page, "no interval<" in page) == (alone, alone)


@slow
def test_a_note_names_the_last_column_only_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for half, overlap in ((0.0, False), (0.75, True)):
        drawn(monkeypatch, {"a": lambda x: x, "b": lambda x: x + 1.0}, half)
        found = run(asked(tmp_path), jobs=1, progress=silent)
        folder = tmp_path / f"{half}"
        folder.mkdir()
        rundir.write_plan(
            folder, found.asked.as_asked(), found.lines, found.summary(), found.provenance("", 0.0)
        )
        page = build(folder).read_text("utf-8")
        assert "Bars are the intervals of the prices" in page
        assert ("the two values in the last column" in page) == overlap
        assert ("neither for sure" in page) == overlap


@slow
def test_a_combination_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    """Three ranks do not divide 32 heads; a context of 200,000 tokens is longer than the model's."""
    vary = {"strategies.0.ranks": [[1, 2], 3], "context_tokens": [64, 200_000]}
    plan = {"base": DECODE, "question": "break_even", "over": "batch", "between": [1, 2], "vary": vary}
    found = run(load_plan(written(tmp_path, plan)), jobs=1, progress=silent)
    assert len(found.notes) == 3
    assert {line["vary.context_tokens"] for line in found.lines} == {64}


def test_a_plan_with_every_default_written_out_is_asked_again(tmp_path: Path) -> None:
    first = asked(tmp_path)
    again = load_plan(written(tmp_path, first.as_asked()))
    assert again.as_asked() == first.as_asked()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"over": None}, "over: is missing; question break_even needs it"),
        ({"between": [2, 2]}, "between: is [2, 2]; first < last is needed"),
        ({"between": [5, 1]}, "between: is [5, 1]; first <= last is needed"),
        ({"between": [1, float("nan")]}, "two numbers up to 1e+12, is needed"),
        ({"metric": "token_latency"}, "metric: token_latency: is none of study decode that can lead"),
        ({"vary": {"batch": [1, 2]}}, "vary.batch: is what question break_even searches; leave it out"),
        ({"over": "bathc"}, "over: bathc: no such field; did you mean 'batch'?"),
        ({"over": "strategies.0.rank"}, "over: strategies[0].rank: no such field; did you mean 'ranks'?"),
        ({"over": "strategies.9.ranks"}, "over: strategies.9.ranks: 9 is no place in a list of 1"),
        ({"between": 0}, "between: is 0; [first, last], two numbers"),
        ({"between": [0, 4]}, "between: batch: is 0; 1 to 1,000,000 is allowed"),
        ({"vary": {"context_tokens": [64, 0]}}, "vary.context_tokens: is 0; 1 to 100,000,000 is allowed"),
        ({"vary": {"model": ["llama-3.1-8b", "lama"]}}, "vary.model: unknown model 'lama'"),
        ({"vary": {"device": ["h200-sxm", "h300"]}}, "vary.device: unknown device 'h300'"),
        ({"vary": {"strategies.0.ranks": [1, "x"]}}, "vary.strategies.0.ranks: is 'x'; a whole number"),
        ({"vary": {"strategies.0.kind": ["tensor_parallel", "tp"]}}, "vary.strategies.0.kind: is 'tp'"),
        ({"vary": {"device.change.hbm_bytes_per_second": [-1]}}, "hbm_bytes_per_second"),
        ({"fields": {"batch": {"a": "batch"}}}, "fields.batch: is said by base, and this plan has no bases"),
        ({"objective": "lowest_cost"}, "objective: is of no use to question break_even; leave it out"),
        ({"objective": ["fewest_devices"]}, "objective: is of no use to question break_even"),
        ({"cost_per_hour": {"h200-sxm": 3.0}}, "cost_per_hour: is of no use to question break_even"),
        ({"question": "devices"}, "question devices is of study serving; break_even is of any"),
        ({"base": {**DECODE, "study": "decod"}}, "study: is 'decod'; one of decode"),
    ],
)
def test_what_cannot_be_asked_is_one_line(more: Any, says: str, tmp_path: Path) -> None:
    plan = {"base": DECODE, "question": "break_even", "over": "batch", "between": [1, 4], **more}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({k: v for k, v in plan.items() if v is not None}))
    with pytest.raises(InputError) as error:
        run(load_plan(tmp_path / "plan.yaml"), jobs=1, progress=silent)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
