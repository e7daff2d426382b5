"""`run --on cpu`, `calibrate` and `validate` as a user calls them, with models small enough for a second."""

import csv
import gzip
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from simcore import terminal
from simcore.input.files import InputError
from simcore.scenario import load_scenario, resolved
from simcore.validate.calibration import cpu as calibration
from tests.command_line import call
from tests.thorough import slow, thorough

ROOT = Path(__file__).resolve().parent.parent
TILING: dict[str, Any] = {
    "name": "tiny",
    "study": "tiling",
    "device": "a100-sxm-80gb",
    "model": {"kind": "long_convolution", "layers": [1, 2], "channels": 8},
    "tokens": 48,
    "dtype": "fp32",
    "strategies": [{"kind": "lazy"}, {"kind": "fractal", "half_storage": [False, True]}],
    "on_cpu": {"device": "cpu", "profile": "none"},
}


def written(folder: Path, **changes: Any) -> str:
    file = folder / "x.yaml"
    file.write_text(yaml.safe_dump({**TILING, **changes}))
    return str(file)


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def traced(folder: Path, name: str) -> tuple[str, list[str]]:
    """The title of a Chrome trace, and the names of its ops in order."""
    with gzip.open(folder / name, "rt") as file:
        tree = json.load(file)
    events = sorted((e for e in tree["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
    return tree["otherData"]["title"], [event["name"] for event in events]


@thorough
def test_a_measured_speedup_is_the_ratio_of_the_totals_beside_it(tmp_path: Path) -> None:
    assert call("run", written(tmp_path), "--on", "cpu", "--out", str(tmp_path / "run")) == 0
    found = rows(tmp_path / "run", "results.csv")
    value = {(r["label"], r["layers"], r["metric"]): float(r["value"]) for r in found if not r["op_kind"]}
    labels = {(label, layers) for label, layers, metric in value if metric == "speedup_over_lazy"}
    assert len(labels) == 6
    for label, layers in labels:
        ratio = value["lazy", layers, "total_s"] / value[label, layers, "total_s"]
        assert value[label, layers, "speedup_over_lazy"] == pytest.approx(ratio)
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert record["machine"] == "cpu"
    assert {"date", "processor", "threads", "runs", "cache"} <= set(record)
    assert "repeatability" not in record["laws_checked"]


@slow
def test_a_validation_compares_like_with_like(tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert call("validate", written(tmp_path), "--out", str(out)) in (0, 1)
    compared = rows(out, "comparison.csv")
    assert {row["layers"] for row in compared} == {"1", "2"}
    measured = {
        (r["label"], r["layers"], r["metric"]): r["value"]
        for r in rows(out, "results.csv")
        if not r["op_kind"]
    }
    predicted = {
        (r["label"], r["layers"], r["metric"]): r["value"]
        for r in rows(out, "predicted_results.csv")
        if not r["op_kind"]
    }
    for row in compared:
        assert row["reference"] == measured[row["label"], row["layers"], row["metric"]]
        assert row["predicted"] == predicted[row["label"], row["layers"], row["metric"]]
    priced = rows(out, "prices.csv")
    assert {"conv_row", "matmul"} <= {row["kind"] for row in priced}
    for row in priced:
        assert float(row["p10_s"]) <= float(row["measured_s"]) <= float(row["p90_s"])
        assert float(row["low_s"]) <= float(row["predicted_s"]) <= float(row["high_s"])
        assert row["shape"]
        assert int(row["n"]) > 0
    measured_case, predicted_case = (traced(out, f"{name}trace.json.gz") for name in ("", "predicted_"))
    assert measured_case[0] == predicted_case[0]
    assert measured_case[0].startswith(("lazy", "fractal"))
    assert "8 channels, batch 1, 48 tokens" in measured_case[0]
    # On two streams the simulated machine may begin in another order.
    assert sorted(measured_case[1]) == sorted(predicted_case[1])
    judged = [row for row in rows(out, "ladder.csv") if row["passed"]]
    assert {row["rung"] for row in judged} == {"0", "1", "2", "3"}
    assert all(row["passed"] == "True" for row in judged if row["rung"] == "0")


DECODE: dict[str, Any] = {
    "name": "tiny-layer",
    "study": "decode",
    "device": "cpu",
    "profile": "none",
    "model": "tiny-llama",
    "part": "layer",
    "dtype": "fp32",
    "batch": 2,
    "context_tokens": 32,
    "tokens": 3,
    "strategies": [{"kind": "tensor_parallel"}],
}


@slow
def test_a_layer_alone_runs_as_it_is_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(DECODE))
    out = tmp_path / "run"
    assert call("validate", str(file), "--out", str(out)) in (0, 1)
    measured, predicted = (traced(out, name) for name in ("trace.json.gz", "predicted_trace.json.gz"))
    assert measured == predicted
    assert measured[0] == "tensor parallel, 1 device, batch 2, 32 tokens of context"
    assert measured[1].count("attention") == 3
    assert not {"embedding", "lm_head", "sample", "head_norm"} & set(measured[1])
    # A bound by the datasheet is no prediction.
    assert "read_once_s" not in {row["metric"] for row in rows(out, "comparison.csv")}
    table = capsys.readouterr().out.partition("report:")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert "2 schedules" in table


def test_what_has_an_infinite_error_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    rung = {"rung": 3, "name": "end to end", "what": "times", "n": 9, "passed": True}
    rung |= {"median_pct": 2.0, "p95_pct": math.inf, "worst_pct": math.inf, "bound_pct": 3.0}
    none = [
        {"metric": f"queue_p{i}_s", "label": "fusion, 32 slots", "predicted": 0.0} for i in (50, 90, 95, 99)
    ]
    some = {"metric": "e2e_p50_s", "label": "fusion, 32 slots", "predicted": 1.0, "replayed": None}
    for comparison, said in (
        (
            [some, *none],
            "inf: took time, and none is predicted: queue_p50_s of fusion, 32 slots;"
            " queue_p90_s of fusion, 32 slots; queue_p95_s of fusion, 32 slots; 1 more",
        ),
        (
            [some, {**some, "replayed": 0.0}],
            "inf: took time, and none is predicted: e2e_p50_s of fusion, 32 slots",
        ),
        ([some], None),
    ):
        terminal.show_rungs([rung], comparison, [], Path("run"))
        lines = capsys.readouterr().out.splitlines()
        assert [line for line in lines if line.startswith("inf:")] == ([said] if said else [])


@thorough
def test_a_broken_bound_ends_with_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = tmp_path / "bounds.yaml"
    numerics = dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 1000.0)
    tight.write_text(
        yaml.safe_dump({"cpu": {"numerics": numerics, "prices": 1e-9, "schedules": 1e9, "end_to_end": 1e9}})
    )
    from simcore.validate.ladder import rungs as ladder  # noqa: PLC0415

    load = ladder.load_bounds
    monkeypatch.setattr(ladder, "load_bounds", lambda device: load(device, tight))
    out = tmp_path / "run"
    assert call("validate", written(tmp_path), "--out", str(out)) == 1
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        ({}, ["--set", "dtype=int4"], "dtype: is 'int4'"),
        ({"on_cpu": {}}, [], "device: is 'a100-sxm-80gb'; --on cpu runs on device: cpu"),
        ({"on_cpu": {"device": "cpu", "nosuch": 3}}, [], "on_cpu: nosuch: no such field"),
        ({"on_cpu": [1]}, [], "on_cpu: "),
        ({"on_cpu": {"tokens.x": 3}}, [], "on_cpu: tokens.x"),
        ({}, ["--set", "on_cpu.tokens=3"], "--set on_cpu"),
    ],
)
def test_what_cannot_be_run_here_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: list[str], says: str
) -> None:
    out = tmp_path / "run"
    assert call("run", written(tmp_path, **changes), "--on", "cpu", "--out", str(out), *words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert says in lines[0]
    assert not out.exists()


def test_a_wrong_name_is_told_with_its_file_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path)
    assert call("validate", file, "--set", "profile=nope", "--out", str(tmp_path / "run")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {file}: profile: unknown profile of cpu 'nope'")


def test_on_cpu_is_checked_wherever_a_scenario_runs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="on_cpu: strategies"):
        load_scenario(Path(written(tmp_path, on_cpu={"strategies": []})))


@pytest.mark.parametrize("device", ["a6000/leetdecoding-tables", "n150/alspec-tables"])
def test_no_calibration_replaces_what_others_published(device: str) -> None:
    folder = ROOT / "devices" / "profiles" / device
    with pytest.raises(InputError, match="no calibration"):
        calibration.calibrate("cpu", folder, True, lambda *_: None, shapes=())


def test_every_scenario_with_an_on_cpu_is_right_there() -> None:
    files = [file for file in (ROOT / "scenarios").rglob("*.yaml") if "on_cpu" in file.read_text()]
    assert len(files) >= 5
    for file in files:
        assert resolved(load_scenario(file, on="cpu"))["device"] == "cpu"


@pytest.mark.parametrize("command", ["run", "validate"])
def test_nothing_is_measured_that_no_report_could_show(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without plotly a run on a real machine ends before it begins."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    for name in [name for name in sys.modules if name.startswith("simcore.reports")]:
        monkeypatch.delitem(sys.modules, name)
    out = tmp_path / "out"
    assert call(command, written(tmp_path), "--on", "cpu", "--out", str(out)) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line] == [
        "error: reports need the package plotly, which is not installed"
    ]
    assert not out.exists()
