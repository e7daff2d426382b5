"""simcore from Python gives what the command line gives, and refuses in one line."""

import json
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import simcore
from simcore.api import setting_texts
from simcore.input.files import InputError
from simcore.scenario import set_field
from simcore.studies.columns import COLUMNS
from tests.command_line import call
from tests.thorough import slow, thorough

ROOT = Path(__file__).resolve().parent.parent
SERVING: Mapping[str, Any] = {
    "name": "s",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "workload": {
        "requests": 12,
        "arrivals": {"kind": "poisson", "rate_per_s": 20},
        "prompt_tokens": {"kind": "constant", "value": 100},
        "output_tokens": {"kind": "constant", "value": 8},
    },
    "strategies": [{"kind": "continuous_batching"}],
}
DECODE: Mapping[str, Any] = {
    "name": "d",
    "study": "decode",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "context_tokens": [1024, 4096],
    "strategies": [{"kind": "tensor_parallel", "ranks": [1, 2]}],
}


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@slow
def test_it_gives_what_the_command_line_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(yaml.safe_dump(dict(SERVING)))
    assert call("s.yaml", "--out", "run", "--quiet", "--jobs", "1") == 0
    result = simcore.run("s.yaml", jobs=1)
    assert result.write("again") == Path("again")
    for name in ("results.csv", "requests.parquet", "summary.json", "scenario.yaml"):
        assert Path("run", name).read_bytes() == Path("again", name).read_bytes(), name
    assert json.loads(Path("run/summary.json").read_text())["answer"] == result.answer


@slow
def test_a_frame_has_a_row_for_each_figure() -> None:
    result = simcore.run(DECODE, jobs=1)
    frame = result.frame()
    assert len(frame) == len(result.rows)
    latencies = frame[frame["metric"] == "token_latency_s"]
    assert sorted(latencies["context_tokens"]) == [1024, 1024, 4096, 4096]
    assert (latencies["value"] > 0.0).all()
    assert set(latencies["unit"]) == {"s"}


@slow
def test_requests_are_those_of_a_serving_run() -> None:
    requests = simcore.run(SERVING, jobs=1).requests()
    assert len(requests) == 12
    assert not any(pd.api.types.is_object_dtype(requests[name]) for name in requests)
    assert (requests["label"] == "continuous batching, 2,048 tokens a step").all()
    assert (requests["first_token_s"] <= requests["finish_s"]).all()
    with pytest.raises(InputError, match="study decode has none"):
        simcore.run(DECODE, jobs=1).requests()


@slow
def test_settings_change_fields_and_the_content_stays() -> None:
    before = json.dumps(SERVING)
    result = simcore.run(SERVING, settings=["workload.requests=5"], jobs=1)
    assert len(result.requests()) == 5
    assert json.dumps(SERVING) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"workload.requests": 5, "workload.arrivals.rate_per_s": 1e-5, "name": "1e3"},
        ("workload.requests=5", "workload.arrivals.rate_per_s=1e-5", 'name="1e3"'),
    ],
)
def test_settings_are_values_by_path_or_words(settings: Any) -> None:
    result = simcore.run(SERVING, settings=settings, jobs=1)
    workload: Any = result.scenario.workload  # type: ignore[union-attr]
    assert (workload.requests, workload.arrivals.rate_per_s) == ([5], [1e-5])
    assert result.scenario.name == "1e3"
    # The command that is kept runs the same again.
    assert "settings=['workload.requests=5', " in result.provenance["command"]


@slow
def test_a_text_is_one_setting() -> None:
    frame = simcore.run(DECODE, settings="context_tokens=[2048]", jobs=1).frame()
    assert frame["context_tokens"].max() == 2048


@pytest.mark.parametrize(
    "value", [5, 1e-5, 1e22, True, None, "no", "1e3", 'é: "#[1]', "\U0001f600", [1, {"a": []}]]
)
def test_a_setting_keeps_its_value(value: Any) -> None:
    document: dict[str, Any] = {}
    set_field(document, *setting_texts({"field": value}))
    assert document == {"field": value}
    assert type(document["field"]) is type(value)


def test_places_of_lists_are_named_as_in_messages() -> None:
    document: dict[str, Any] = {"strategies": [{"ranks": 1}, {"ranks": 1, "hits": {"value": [0, 1]}}]}
    for setting in ("strategies[1].ranks=[2]", "strategies[1].hits.value[0]=0.5", "strategies.0.ranks=4"):
        set_field(document, setting)
    assert document == {"strategies": [{"ranks": 4}, {"ranks": [2], "hits": {"value": [0.5, 1]}}]}
    with pytest.raises(InputError, match="2 is no place in a list of 2"):
        set_field(document, "strategies[2].ranks=1")


@slow
def test_two_runs_are_compared_figure_by_figure() -> None:
    one = simcore.run(DECODE, jobs=1)
    other = simcore.run(DECODE, settings=["context_tokens=[4096, 8192]"], jobs=1)
    both = simcore.compare(one, other)
    latency = both[both["metric"] == "token_latency_s"].set_index(["label", "context_tokens"])
    for label in ("tensor parallel, 1 device", "tensor parallel, 2 devices"):
        assert latency.loc[(label, 4096), "ratio"] == 1.0
        assert pd.isna(latency.loc[(label, 1024), "b"])
        assert pd.isna(latency.loc[(label, 8192), "a"])
    with pytest.raises(InputError, match="studies decode and serving"):
        simcore.compare(one, simcore.run(SERVING, jobs=1))


@slow
@pytest.mark.parametrize("document", [DECODE, SERVING])
def test_a_result_and_a_run_directory_are_compared(document: Mapping[str, Any], tmp_path: Path) -> None:
    one = simcore.run(document, jobs=1)
    other = simcore.run(document, settings=["device=h100-sxm"], jobs=1)
    folder = other.write(tmp_path / "run")
    pd.testing.assert_frame_equal(simcore.compare(one, folder), simcore.compare(one, other))
    pd.testing.assert_frame_equal(simcore.compare(str(folder), one), simcore.compare(other, one))
    pd.testing.assert_frame_equal(simcore.compare(folder, folder), simcore.compare(other, other))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no run directory: results.csv is missing"),
        ("", "results.csv: has not the columns"),
        ("study,value\nserving,1\n", "results.csv: has not the columns"),
        (
            ",".join(COLUMNS["decode"]) + "\ndecode" + ",x" * (len(COLUMNS["decode"]) - 1),
            "results.csv: ranks: 'x' is no number",
        ),
    ],
)
def test_a_folder_that_is_no_runs_is_not_compared(content: str | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "results.csv").write_text(content)
    with pytest.raises(InputError, match=says):
        simcore.compare(simcore.run(DECODE, jobs=1), tmp_path)


@pytest.mark.parametrize("given", [None, 5, {"name": "d"}])
def test_what_is_no_run_is_not_compared(given: Any) -> None:
    with pytest.raises(InputError, match=r"compare: b is .*; a result, or a run directory's path, is needed"):
        simcore.compare(simcore.run(DECODE, jobs=1), given)


@slow
def test_runs_on_one_device_each_are_compared_whatever_it_is() -> None:
    one = simcore.run(DECODE, jobs=1)
    both = simcore.compare(one, simcore.run(DECODE, settings=["device=h100-sxm"], jobs=1))
    latency = both[both["metric"] == "token_latency_s"]
    assert len(latency) == 4
    assert (latency["ratio"] > 1.0).all()


@thorough
def test_the_script_of_the_documents_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "docs" / "from_python.py"))
    assert "report.html" in capsys.readouterr().out


@slow
def test_a_report_is_one_file(tmp_path: Path) -> None:
    page = simcore.run(DECODE, jobs=1).report(tmp_path / "of/no/folder/yet/page.html")
    assert [path.name for path in page.parent.iterdir()] == ["page.html"]
    assert "tensor parallel" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "words", "says"),
    [
        ({**DECODE, "context": 3}, {}, "scenario: context: no such field"),
        ({**DECODE, "device": "h2000"}, {}, "h200"),
        (DECODE, {"on": "gpu"}, "on: gpu: no such machine"),
        (DECODE, {"jobs": 0}, "jobs: is 0"),
        ("nowhere.yaml", {}, "nowhere.yaml"),
        ("quickstartt", {}, "quickstartt: no such file or example; did you mean 'quickstart'?"),
        ({**DECODE, "seed": np.zeros((2, 2))}, {}, "scenario: seed: is numpy's float64, of shape (2, 2); "),
        (
            {**DECODE, "seed": np.datetime64(1, "ns")},
            {},
            "scenario: seed: is numpy's datetime64[ns], of shape ()",
        ),
        ({**DECODE, "seed": ITSELF}, {}, "scenario: holds itself"),
        (DECODE, {"settings": {"seed": [np.zeros((2, 2))]}}, "settings: seed.0: is numpy's float64"),
        (DECODE, {"settings": np.zeros((2, 2))}, "settings: is array([[0., 0.], [0., 0.]]); KEY=VALUE"),
        (pd.DataFrame({"a": [1, 2]}), {}, "scenario: is a 0 1 1 2; a path"),
        (None, {}, "scenario: is None; a path, the name of an example, or a dict of fields is needed"),
        (5, {}, "scenario: is 5; a path"),
        ([], {}, "scenario: is []; a path"),
        (b"quickstart", {}, "scenario: is b'quickstart'; a path"),
        (DECODE, {"settings": ["x"]}, "--set x: KEY=VALUE"),
        (DECODE, {"settings": "x"}, "--set x: KEY=VALUE"),
        (DECODE, {"settings": [5]}, "settings: holds 5; KEY=VALUE"),
        (DECODE, {"settings": [None]}, "settings: holds None; KEY=VALUE"),
        (DECODE, {"settings": None}, "settings: is None; KEY=VALUE"),
        (DECODE, {"settings": 5}, "settings: is 5; KEY=VALUE"),
        (DECODE, {"settings": {"a=b": 5}}, "settings: 'a=b' is no path of a field"),
        (DECODE, {"settings": {5: 5}}, "settings: 5 is no path of a field"),
        (DECODE, {"settings": {"seed": float("nan")}}, "settings: seed: is nan"),
        (DECODE, {"settings": {"seed": {1}}}, "settings: seed: is {1}"),
        (DECODE, {"settings": {"sed": 5}}, "sed: no such field"),
    ],
)
def test_what_is_wrong_is_one_line(given: Any, words: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        simcore.run(given, **words)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@slow
def test_numpy_values_are_those_of_python() -> None:
    given = {
        **DECODE,
        "context_tokens": np.array([1024, 4096]),
        "seed": np.int64(3),
        "strategies": [{"kind": np.str_("tensor_parallel"), "ranks": [np.int32(1), 2]}],
        "overheads": {"launch_s": np.float32(0.5)},
    }
    own = {
        **DECODE,
        "seed": 3,
        "strategies": [{"kind": "tensor_parallel", "ranks": [1, 2]}],
        "overheads": {"launch_s": 0.5},
    }
    result = simcore.run(given, jobs=1)
    assert result.scenario == simcore.run(own, jobs=1).scenario
    changed = {
        "context_tokens": np.arange(1, 3) * 1024,
        "seed": np.int64(4),
        "strategies.0.ranks": np.array(2),
    }
    assert simcore.run(DECODE, settings=changed, jobs=1).scenario.seed == 4
    assert isinstance(given["context_tokens"], np.ndarray)


def test_one_list_in_two_places_is_two_lists() -> None:
    strategies = [{"kind": "tensor_parallel", "ranks": ranks} for ranks in [[1]] * 2]
    result = simcore.run({**DECODE, "strategies": strategies}, settings={"strategies.1.ranks.0": 2}, jobs=1)
    assert sorted(result.frame()["ranks"].unique()) == [1, 2]


@pytest.mark.parametrize("bases", [{"base": SERVING}, {"bases": {"a": SERVING, "b": DECODE}}])
def test_a_plan_is_no_scenario(bases: dict[str, Any], tmp_path: Path) -> None:
    plan = {**bases, "question": "break_even"}
    file = tmp_path / "p.yaml"
    file.write_text(json.dumps(plan))
    for given, where in ((plan, "scenario"), (file, str(file))):
        with pytest.raises(InputError) as raised:
            simcore.run(given)
        assert f"{where}: is a plan, which `plan` answers: python -m simcore plan " in str(raised.value)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        simcore.runn  # noqa: B018


def test_importing_it_imports_nothing_that_is_slow() -> None:
    program = "import sys, simcore; print(sorted({'numpy', 'pandas', 'simpy', 'pydantic'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("times", [2, 3])
def test_a_strategy_that_is_given_again_is_named(times: int) -> None:
    document = {**DECODE, "strategies": [{"kind": "tensor_parallel", "ranks": 2}] * times}
    with pytest.raises(InputError, match="strategies: tensor parallel, 2 devices is given twice"):
        simcore.run(document, jobs=1)
