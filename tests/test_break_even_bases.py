"""Question break_even across scenarios of two studies: closed forms, single runs, bad input."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import simcore
from simcore import cli
from simcore.input.files import InputError
from simcore.planning import break_even
from simcore.planning.plan import Plan, run
from simcore.planning.whatif import load_plan
from simcore.reports import build
from simcore.scenario import Scenario
from simcore.studies.common import Outcome, Row, ServingAxes, TilingAxes
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.tiling.scenario import TilingScenario
from tests.test_planning import silent, written
from tests.thorough import slow

LCSM: dict[str, Any] = {
    "study": "tiling", "device": "h200-sxm", "profile": "none", "dtype": "bf16", "tokens": 16, "batch": 1,
    "model": {"kind": "long_convolution", "layers": 2, "channels": 64},
    "strategies": [{"kind": "fractal"}],
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "study": "serving", "device": "h200-sxm", "profile": "none", "dtype": "bf16", "model": "tiny-llama",
    "workload": {
        "requests": 1, "arrivals": {"kind": "closed_loop", "clients": 1},
        "prompt_tokens": {"kind": "constant", "value": 1},
        "output_tokens": {"kind": "constant", "value": 16},
    },
    "strategies": [{"kind": "continuous_batching"}], "measure": {"kind": "whole_run"},
}  # fmt: skip
PLAN: dict[str, Any] = {
    "name": "two", "question": "break_even", "over": "length", "between": [16, 4096],
    "fields": {
        "length": {"lcsm": "tokens", "attention": "workload.output_tokens.value"},
        "batch": {"lcsm": "batch", "attention": ["workload.requests", "workload.arrivals.clients"]},
    },
    "vary": {"batch": [1, 4]},
    "metric": {"lcsm": "total_s", "attention": "e2e_p50_s_by_prices"},
    "bases": {"lcsm": LCSM, "attention": ATTENTION},
}  # fmt: skip


def answered(folder: Path, jobs: int = 1, **more: Any) -> Plan:
    """The plan above with some fields changed; None leaves one out."""
    plan = {name: value for name, value in copy.deepcopy({**PLAN, **more}).items() if value is not None}
    return run(load_plan(written(folder, plan)), jobs=jobs, progress=silent)


def lcsm_s(tokens: float, batch: int) -> float:
    del batch
    return 2e-3 * tokens


def attention_s(tokens: float, batch: int) -> float:
    return 1e-3 * tokens + 1e-6 * batch * tokens**2


@pytest.fixture
def formulas(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Lets both studies take what both functions above say, with 10 % on either side; returns the runs."""
    ran: list[tuple[str, float, int]] = []

    def tiled(tokens: int, batch: int) -> list[Row]:
        axes = TilingAxes("fractal", "fractal, hybrid", 2, 64, "mlp", tokens, 0, batch, 1, "h200-sxm")
        value = lcsm_s(tokens, batch)
        ran.append(("lcsm", tokens, batch))
        return [Row(axes, "total_s", value, "s", 0.9 * value, 1.1 * value)]

    def rows(scenario: Scenario) -> list[Row]:
        if isinstance(scenario, TilingScenario):
            return [row for batch in scenario.batch for row in tiled(scenario.tokens[0], batch)]
        assert isinstance(scenario, ServingScenario)
        lengths: Any = scenario.workload.output_tokens
        arrivals: Any = scenario.workload.arrivals
        (tokens,), (batch,) = lengths.value, scenario.workload.requests or ()
        assert arrivals.clients == [batch]
        served = ServingAxes("continuous_batching", "cb", 1, 1, batch, None, 1.0, tokens, "h200-sxm")
        value = attention_s(tokens, batch)
        ran.append(("attention", tokens, batch))
        return [
            Row(served, "e2e_p50_s_by_prices", value, "s", 0.9 * value, 1.1 * value),
            Row(served, "output_throughput_tokens_per_s", tokens / value, "tokens/s"),
        ]

    def assembled(scenario: Scenario, where: str, place: Any) -> Any:
        del where, place
        study = SimpleNamespace(run=lambda progress: Outcome(rows(scenario), ""))
        return SimpleNamespace(study=study, warnings=[])

    monkeypatch.setattr(break_even, "assemble", assembled)
    return ran


@slow
def test_costs_of_two_studies_cross_where_they_do(tmp_path: Path, formulas: list[Any]) -> None:
    """2 n = n + b n^2 / 1000 at n = 1000 / b. With 10 % either side attention leads for sure up to where
    1.1 (1 + b n / 1000) = 1.8, and the other from where 0.9 (1 + b n / 1000) = 2.2 on."""
    found = answered(tmp_path)
    assert [lead["settings"] for lead in found.leads] == [{"batch": 1}, {"batch": 4}]
    for lead, batch in zip(found.leads, (1, 4), strict=True):
        assert (lead["before"], lead["after"]) == ("attention", "lcsm")
        assert lead["at"] == pytest.approx(1000 / batch, rel=0.011)
        first, last = (1000 * (end - 1) / batch for end in (1.8 / 1.1, 2.2 / 0.9))
        assert lead["between"] == (pytest.approx(first, rel=0.011), pytest.approx(last, rel=0.011))
    assert found.answer.startswith("With batch 1: attention leads up to length 1,00")
    assert found.answer.count("neither for sure") == 2
    # Both run at the same values, and at every one.
    assert {of[1:] for of in formulas if of[0] == "lcsm"} == {
        of[1:] for of in formulas if of[0] == "attention"
    }
    summary = found.summary()
    assert (summary["metric"], summary["metrics"]) == ("time_s", PLAN["metric"])


@slow
@pytest.mark.usefixtures("formulas")
def test_the_order_of_scenarios_changes_nothing_and_their_names_only_names(tmp_path: Path) -> None:
    found = answered(tmp_path)
    turned = answered(tmp_path, bases={"attention": ATTENTION, "lcsm": LCSM})
    assert turned.answer == found.answer
    assert turned.leads == found.leads

    def renamed(value: Any) -> Any:
        text = json.dumps(value)
        return json.loads(text.replace('"lcsm"', '"zebra"').replace('"attention"', '"ant"'))

    names = {name: renamed(PLAN[name]) for name in ("fields", "metric", "bases")}
    other = answered(tmp_path, **names)
    assert other.answer == found.answer.replace("lcsm", "zebra").replace("attention", "ant")
    assert json.loads(json.dumps(other.leads)) == renamed(found.leads)


@pytest.mark.usefixtures("formulas")
def test_who_leads_everywhere_is_said_to_do_so_for_sure_only_where_it_does(tmp_path: Path) -> None:
    """From 1,100 tokens on the tiling leads, and for sure from 1,444 on."""
    found = answered(tmp_path, between=[1100, 12000], vary=None, fields={"length": PLAN["fields"]["length"]})
    assert found.leads == []
    (first,) = found.summary()["everywhere"]
    ((low, high),) = first["unsure"]
    assert low is None
    assert high == pytest.approx(1000 * (2.2 / 0.9 - 1), rel=0.011)
    assert f"lcsm leads everywhere from length 1,100 to 12,000 (up to {high:,} not for sure)" in found.answer
    narrow = answered(tmp_path, between=[1100, 1200], vary=None, fields={"length": PLAN["fields"]["length"]})
    assert narrow.answer == "lcsm leads everywhere from length 1,100 to 1,200, but nowhere for sure."
    wide = answered(tmp_path, between=[1600, 9000], vary=None, fields={"length": PLAN["fields"]["length"]})
    assert wide.answer == "lcsm leads everywhere from length 1,600 to 9,000."


@pytest.mark.usefixtures("formulas")
def test_metrics_of_different_units_are_not_compared(tmp_path: Path) -> None:
    metric = {"lcsm": "total_s", "attention": "output_throughput_tokens_per_s"}
    with pytest.raises(InputError, match="total_s of lcsm is better lower"):
        answered(tmp_path, metric=metric)
    memory = {"lcsm": "memory_bytes", "attention": "e2e_p50_s_by_prices"}
    with pytest.raises(InputError, match="metric: memory_bytes: no case of this scenario has it"):
        answered(tmp_path, metric=memory)


def test_units_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formulas: list[Any]) -> None:
    del formulas
    known: Callable[..., Any] = break_even.assemble

    def in_ms(scenario: Scenario, where: str, place: Any) -> Any:
        parts = known(scenario, where, place)
        outcome = parts.study.run(silent)
        if scenario.study == "tiling":
            outcome.rows = [Row(row.axes, row.metric, row.value, "ms") for row in outcome.rows]
        return SimpleNamespace(study=SimpleNamespace(run=lambda progress: outcome), warnings=[])

    monkeypatch.setattr(break_even, "assemble", in_ms)
    with pytest.raises(InputError, match="metric: lcsm has ms, attention has s; one unit is needed"):
        answered(tmp_path)


SMALL: dict[str, Any] = {"between": [16, 64], "vary": {"batch": [2]}}


@slow
def test_figures_are_those_of_single_runs(tmp_path: Path) -> None:
    found = answered(tmp_path, **SMALL)
    assert not any("too few requests" in warning for warning in found.warnings)
    alone = simcore.run({**LCSM, "name": "l", "tokens": 64, "batch": 2})
    (tiled,) = (row for row in alone.rows if row["metric"] == "total_s")
    workload = {
        **ATTENTION["workload"], "requests": 2, "arrivals": {"kind": "closed_loop", "clients": 2},
        "output_tokens": {"kind": "constant", "value": 64},
    }  # fmt: skip
    alone = simcore.run({**ATTENTION, "name": "a", "workload": workload})
    (served,) = (row for row in alone.rows if row["metric"] == "e2e_p50_s_by_prices")
    last = {line["label"]: line for line in found.lines if line["vary.length"] == 64}
    for label, row in (("lcsm", tiled), ("attention", served)):
        assert tuple(last[label][f"time_s{end}"] for end in ("", ".low", ".high")) == (
            row["value"], row["low"], row["high"],
        )  # fmt: skip


@slow
def test_several_ways_of_one_scenario_keep_their_names(tmp_path: Path) -> None:
    several = {**LCSM, "strategies": [{"kind": "fractal"}, {"kind": "lazy"}]}
    found = answered(tmp_path, **SMALL, bases={"lcsm": several, "attention": ATTENTION})
    labels = {line["label"] for line in found.lines}
    assert labels == {"lcsm, fractal, hybrid", "lcsm, lazy", "attention"}


@slow
def test_numbers_of_devices_tell_cases_apart(tmp_path: Path) -> None:
    """A list of devices makes cases that differ in nothing else."""
    attention = copy.deepcopy({**ATTENTION, "devices": [1, 2]})
    attention["workload"] |= {"requests": 4, "arrivals": {"kind": "closed_loop", "clients": 4}}
    fields = {"length": PLAN["fields"]["length"]}
    found = answered(tmp_path, vary=None, fields=fields, bases={"lcsm": LCSM, "attention": attention})
    labels = ["attention, 1 device", "attention, 2 devices", "lcsm"]
    for value in {line["vary.length"] for line in found.lines}:
        here = [line for line in found.lines if line["vary.length"] == value]
        assert sorted(line["label"] for line in here) == labels
        assert {line["label"]: line["devices"] for line in here} == dict(zip(labels, (1, 2, 1), strict=True))


@slow
def test_a_point_of_the_plan_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path, {**PLAN, **SMALL})
    result = CliRunner().invoke(cli.app, ["plan", "plan.yaml", "--jobs", "1"])
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "two" / "plan"
    points = json.loads((folder / "points.json").read_text())
    assert [one["point"] for one in points] == [*range(1, len(points) + 1)]
    assert len(json.loads((folder / "scenarios.json").read_text())) == len(points)
    for label, metric in PLAN["metric"].items():
        (one,) = (each for each in points if each["label"] == label and each["vary.length"] == 64)
        result = CliRunner().invoke(cli.app, ["run", str(folder), "--point", str(one["point"]), "--json"])
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["results"]
        assert [row["value"] for row in rows if row["metric"] == metric] == [one["time_s"]]
    page = build(folder).read_text("utf-8")
    assert "total_s of lcsm, e2e_p50_s_by_prices of attention along length" in page
    # The plan as it is written down there gives the same answer.
    again = run(load_plan(folder / "plan.yaml"), jobs=1, progress=silent)
    assert again.answer == json.loads((folder / "summary.json").read_text())["answer"]


LENGTH, BATCH, METRIC = PLAN["fields"]["length"], PLAN["fields"]["batch"], PLAN["metric"]


def of_length(**own: Any) -> dict[str, Any]:
    """The plan's fields with another `length`."""
    return {"fields": {"length": own, "batch": BATCH}}


def of_bases(**own: Any) -> dict[str, Any]:
    """The plan's scenarios with another one."""
    return {"bases": {**PLAN["bases"], **own}}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"base": LCSM}, "base: is given beside bases; only one of them is allowed"),
        ({"bases": None, "metric": None, "fields": None}, "base: is missing; a scenario is needed, or bases"),
        ({"bases": {}}, "base: is missing; a scenario is needed, or bases"),
        ({"bases": []}, "bases: is []; a mapping of fields is needed"),
        ({"bases": {1: LCSM, 2: ATTENTION}}, "bases.1: is 1; text is needed"),
        ({"bases": {"lcsm": LCSM}}, "bases: has one scenario; several are needed, or base"),
        ({"bases": {"a.b": LCSM, "c": ATTENTION}}, "bases.a.b: is 'a.b'; letters"),
        (of_bases(attention="nowhere"), "bases.attention: nowhere: no such file or example"),
        (of_bases(attention=3), "bases.attention: is 3; a file, an example's name"),
        (of_bases(lcsm={**LCSM, "study": "tilin"}), "bases.lcsm: study: is 'tilin'"),
        ({"question": "rate"}, "bases: is of no use to question rate; leave it out"),
        ({"metric": None}, "metric: is missing; studies serving and tiling need one for each of bases"),
        ({"metric": {"lcsm": "total_s"}}, "metric: says nothing of attention; each of bases is needed"),
        ({"metric": {**METRIC, "lcms": "total_s"}}, "metric.lcms: no such base; did you mean 'lcsm'?"),
        ({"metric": {**METRIC, "lcsm": "totals"}}, "metric.lcsm: totals: is none of study tiling"),
        ({"metric": 3}, "metric: is 3; a metric, or one for each of bases, is needed"),
        ({"metric": "total_s"}, "metric: total_s: is none of study serving that can lead"),
        ({"over": "lenght"}, "over: 'lenght' is no name of fields; did you mean 'length'? (allowed: length)"),
        ({"vary": {"bacht": [1]}}, "vary.bacht: 'bacht' is no name of fields; did you mean 'batch'?"),
        ({"over": "seed"}, "fields.length: is neither over nor in vary (allowed: batch, seed)"),
        ({"fields": 3}, "fields: is 3; a mapping of fields is needed"),
        ({"fields": {"length": LENGTH}}, "vary: attention: batch: no such field"),
        (of_length(lcsm="tokens"), "fields.length: says nothing of attention; each of bases is needed"),
        (of_length(**{**LENGTH, "lcsm": "tokenz"}), "fields.length.lcsm: tokenz: no such field; did you"),
        (of_length(**{**LENGTH, "lcsm": 3}), "fields.length.lcsm: is 3; a dotted path"),
        (of_length(**BATCH), "fields.length: sets batch of lcsm, and so does fields.batch"),
        ({"between": [0, 64]}, "between: lcsm: tokens: is 0; 1 to 4,194,304 is allowed"),
        ({"between": [16, 1e13]}, "between: is [16, 10000000000000.0]; [first, last], two numbers"),
        ({"vary": {"batch": [1, 0]}}, "vary.batch: lcsm: is 0; 1 to 65,536 is allowed"),
        ({"vary": {"batch": [1, "x"]}}, "vary.batch: lcsm: is 'x'; a whole number is needed"),
        (
            {"vary": {"batch": [1], "tokens": [8]}},
            "fields.length: sets tokens of lcsm, and so does vary.tokens",
        ),
        (
            {**of_bases(lcsm={**LCSM, "batch": [1, 2]}), "fields": {"length": LENGTH}, "vary": {}},
            "bases.lcsm: has several places (batch 1; batch 2): one is compared; a name of fields lets it",
        ),
    ],
)
@pytest.mark.usefixtures("formulas")
def test_what_cannot_be_asked_is_one_line(more: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        answered(tmp_path, **more)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
