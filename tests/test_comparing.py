"""Two run directories beside each other, and the list of all: hand-made directories with known figures."""

import csv
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.stats import t

from simcore.reports import build_index, comparison
from simcore.reports.comparing.inputs import differences
from simcore.reports.comparing.matching import judged, matched
from simcore.reports.comparing.sides import Figure, read_side
from simcore.studies.columns import COLUMNS
from tests.command_line import call
from tests.thorough import slow

Row = dict[str, Any]


def row(label: str = "a", strategy: str = "s", metric: str = "e2e_mean_s", **more: Any) -> Row:
    """A row of results.csv of a serving study."""
    value = more.pop("value", 1.0)
    given = {"study": "serving", "device": "h200", "strategy": strategy, "label": label, "devices": 1}
    given |= {"ranks": 1, "requests": 10, "rate_per_s": 8.0, "prompt_tokens": 100.0, "output_tokens": 16.0}
    unit = "s" if metric.endswith("_s") else ""
    ends = {"low": value * 0.99, "high": value * 1.01}
    return {**given, "metric": metric, "value": value, **ends, "unit": unit, "source": "", **more}


SCENARIO: Mapping[str, Any] = {
    "name": "mine",
    "study": "serving",
    "device": "h200",
    "strategies": [{"kind": "s", "slots": [1]}, {"kind": "t"}],
    "workload": {"arrivals": {"rate_per_s": [8.0]}},
}


def written(folder: Path, rows: Sequence[Row], scenario: Mapping[str, Any] = SCENARIO, **origin: Any) -> Path:
    """A run directory."""
    folder.mkdir(parents=True)
    (folder / "scenario.yaml").write_text(yaml.safe_dump(dict(scenario)))
    summary = {"name": scenario["name"], "study": scenario["study"], "answer": "It is a.", "warnings": ["w"]}
    (folder / "summary.json").write_text(json.dumps(summary))
    given = {"machine": "sim", "wall_time_s": 1.0, "device": {"name": "h200"}, "versions": {"numpy": "2"}}
    (folder / "provenance.json").write_text(json.dumps({**given, **origin}))
    in_csv(folder / "results.csv", rows, [*COLUMNS["serving"]])
    return folder


def in_csv(file: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def changed(**fields: Any) -> dict[str, Any]:
    """The scenario with other values of dotted fields, dots written as two underscores."""
    found: dict[str, Any] = json.loads(json.dumps(SCENARIO))
    for path, value in fields.items():
        *parents, last = path.split("__")
        at: Any = found
        for part in parents:
            at = at[int(part)] if part.isdigit() else at[part]
        at[last] = value
    return found


def by_metric(found: Mapping[str, Any]) -> dict[str, Any]:
    return {each["metric"]: each for each in found["rows"]}


# -- what is sure ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "better", "says"),
    [
        ((1.0, 0.9, 1.1), (2.0, 1.9, 2.1), "lower", "worse"),
        ((1.0, 0.9, 1.1), (2.0, 1.9, 2.1), "higher", "better"),
        ((2.0, 1.9, 2.1), (1.0, 0.9, 1.1), "lower", "better"),
        ((1.0, 0.9, 1.1), (2.0, 1.9, 2.1), None, "differs"),
        # Intervals that share their ends share a value.
        ((1.0, 0.9, 1.5), (2.0, 1.5, 2.1), "lower", "no sure difference"),
        ((1.0, None, None), (2.0, 1.9, 2.1), "lower", "no sure difference"),
        ((1.0, 0.5, None), (2.0, 1.9, 2.1), "lower", "no sure difference"),
        ((None, None, None), (2.0, 1.9, 2.1), "lower", "no sure difference"),
        ((1.0, 1.0, 1.0), (1.0 + 1e-12, 1.0 + 1e-12, 1.0 + 1e-12), "lower", "same"),
        ((0.0, 0.0, 0.0), (3.0, 3.0, 3.0), "lower", "worse"),
    ],
)
def test_only_intervals_apart_are_sure(
    a: tuple[float | None, ...], b: tuple[float | None, ...], better: str | None, says: str
) -> None:
    one, other = Figure("m", {}, *a), Figure("m", {}, *b)
    assert judged(one, other, better) == says
    opposite = {"better": "worse", "worse": "better"}
    assert judged(other, one, better) == opposite.get(says, says)


def test_values_ratios_and_verdicts_of_two_runs(tmp_path: Path) -> None:
    metrics = {
        "e2e_mean_s": 2.0,
        "goodput_per_s": 0.5,
        "mean_batch": 3.0,
        "ttft_mean_s": 1.005,
        "tpot_mean_s": 1.0,
    }
    a = written(tmp_path / "a", [row(metric=name) for name in metrics])
    b = written(tmp_path / "b", [row(metric=name, value=value) for name, value in metrics.items()])
    found, lines = comparison(a, b)
    rows = by_metric(found)
    assert {name: each["ratio"] for name, each in rows.items()} == metrics
    assert {name: each["verdict"] for name, each in rows.items()} == {
        "e2e_mean_s": "worse",
        "goodput_per_s": "worse",
        "mean_batch": "differs",
        "ttft_mean_s": "no sure difference",
        "tpot_mean_s": "same",
    }
    assert rows["e2e_mean_s"]["a"] == {"value": 1.0, "low": 0.99, "high": 1.01}
    # Sure ones first, the most changed first, and what is the same is no line.
    assert [line.metric for line in lines] == ["E2E mean", "goodput per s", "mean batch", "TTFT mean"]
    assert "worse in 2 and different in 1: E2E mean of a (1.00 s → 2.00 s, 2.00×: worse)" in found["says"]


def test_no_figure_of_two_seeds_of_one_law_is_called_surely_different_often() -> None:
    random, runs, replicas = np.random.default_rng(1), 4000, 3
    draws = random.normal(10.0, 1.0, (2, runs, replicas))
    half = t.ppf(0.975, replicas - 1) * draws.std(axis=2, ddof=1) / math.sqrt(replicas)
    means = draws.mean(axis=2)
    sure = sum(
        judged(
            *(Figure("m", {}, m[i], m[i] - h[i], m[i] + h[i]) for m, h in zip(means, half, strict=True)),
            "lower",
        )
        in ("better", "worse")
        for i in range(runs)
    )
    assert 0.002 < sure / runs < 0.015


# -- what is paired ----------------------------------------------------------------------------------


def test_rows_in_one_run_only_are_counted_and_named(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row("x"), row("y"), row("x", rate_per_s=16.0)])
    b = written(tmp_path / "b", [row("x"), row("z", strategy="u"), row("x", metric="queue_mean_s")])
    found, _ = comparison(a, b)
    assert [each["where"]["label"] for each in found["rows"]] == ["x"]
    assert {(each["where"]["label"], each["where"]["rate_per_s"]) for each in found["only_a"]} == {
        ("y", "8"),
        ("x", "16"),
    }
    assert [each["metric"] for each in found["only_b"]] == ["e2e_mean_s", "queue_mean_s"]
    notes = " ".join(found["notes"])
    assert "2 figures in A only: y, 8/s; x, 16/s" in notes
    assert "2 figures in B only" in notes


def test_numbers_are_keys_by_value(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row(devices="1", rate_per_s="8.0"), row(devices="2", rate_per_s="8.0")])
    b = written(tmp_path / "b", [row(devices="1.0", rate_per_s="8"), row(devices="2.0", rate_per_s="8")])
    found, _ = comparison(a, b)
    assert len(found["rows"]) == 2
    assert not found["only_a"]


def test_figures_pair_across_a_key_that_has_one_value_in_each_run(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row(), row("b", rate_per_s=8.0)])
    b = written(tmp_path / "b", [row(rate_per_s=30.0, value=2.0), row("b", rate_per_s=30.0)])
    found, _ = comparison(a, b)
    assert found["paired_across"] == {"rate_per_s": [["8", "30"]]}
    assert sorted(each["ratio"] for each in found["rows"]) == [1.0, 2.0]


def test_figures_do_not_pair_across_several_values_but_the_mean_lengths(tmp_path: Path) -> None:
    rates = (8.0, 16.0), (10.0, 20.0)
    a, b = (
        written(tmp_path / name, [row(rate_per_s=rate) for rate in own])
        for name, own in zip("ab", rates, strict=True)
    )
    found, _ = comparison(a, b)
    assert (len(found["rows"]), len(found["only_a"]), len(found["only_b"])) == (0, 2, 2)
    assert "No figure is in both." in found["says"]
    a, b = (
        written(tmp_path / f"drawn{i}", [row(output_tokens=each) for each in own])
        for i, own in enumerate(((96.1, 224.3), (225.0, 95.2)))
    )
    found, _ = comparison(a, b)
    pairs = {tuple(pair) for pair in found["paired_across"]["output_tokens"]}
    assert pairs == {("96.1", "95.2"), ("224.3", "225")}


def test_the_one_strategy_of_its_kind_that_is_called_otherwise_is_paired(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row("16 slots"), row("t", strategy="t")])
    b = written(tmp_path / "b", [row("32 slots", value=2.0), row("t", strategy="t")])
    found, _ = comparison(a, b)
    assert found["paired_across"] == {"label": [["16 slots", "32 slots"]]}
    assert len(found["rows"]) == 2
    # Of two of a kind nobody knows which is which.
    c = written(tmp_path / "c", [row("32 slots"), row("64 slots"), row("t", strategy="t")])
    found, _ = comparison(a, c)
    assert (len(found["rows"]), len(found["only_a"]), len(found["only_b"])) == (1, 1, 2)


def test_the_device_at_a_labels_end_is_no_part_of_it(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row("x")])
    b = written(tmp_path / "b", [row("x, h200"), row("x, h100", device="h100")])
    found, _ = comparison(a, b)
    assert [each["where"]["device"] for each in found["rows"]] == ["h200"]
    assert [each["where"]["device"] for each in found["only_b"]] == ["h100"]


# -- what differs in the inputs ------------------------------------------------------------------------


def test_inputs_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row()])
    scenario = changed(workload__arrivals__rate_per_s=[30.0], strategies__0__slots=[4], name="other")
    b = written(tmp_path / "b", [row()], scenario, machine="cpu", versions={"numpy": "3"}, wall_time_s=9.0)
    found, _ = comparison(a, b)
    assert {(each["field"], each["a"], each["b"], each["of"]) for each in found["inputs"]} == {
        ("workload.arrivals.rate_per_s", "8", "30", "asked"),
        ("strategies.0.slots", "1", "4", "asked"),
        ("machine", "sim", "cpu", "machine"),
        ("versions.numpy", "2", "3", "code"),
    }
    for part in ("rate_per_s (8 → 30)", "slots (1 → 4)", "machine (sim → cpu)", "numpy 2 → 3"):
        assert part in found["says"]


def test_a_strategy_more_differs_in_nothing_else(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row()])
    more = [{"kind": "new"}, *SCENARIO["strategies"]]
    b = written(tmp_path / "b", [row()], changed(strategies=more))
    (one,) = differences(read_side(a), read_side(b))
    assert (one.field, one.a, one.b) == ("strategies.0", "not given", "{kind: new}")


def test_a_new_field_without_a_value_is_no_difference(tmp_path: Path) -> None:
    a, b = written(tmp_path / "a", [row()]), written(tmp_path / "b", [row()], changed(profile=None))
    assert differences(read_side(a), read_side(b)) == []


def test_identical_runs_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (written(tmp_path / name, [row(), row("b", value=3.0)]) for name in "ab")
    assert call("compare", str(a), str(b)) == 0
    said = capsys.readouterr().out
    assert "Both runs are identical: the same inputs, and the same value for 2 figures." in said
    assert comparison(a, b)[0]["identical"] is True
    # One figure that differs is enough.
    c = written(tmp_path / "c", [row(), row("b", value=3.0001)])
    found, _ = comparison(a, c)
    assert found["identical"] is False
    assert found["says"].startswith("No input differs of those that the directories record. No figure of 2")


# -- plans and validations ---------------------------------------------------------------------------------


def planned(folder: Path, rates: Mapping[float, str], question: str = "rate") -> Path:
    """A plan's directory: rate -> verdict."""
    folder.mkdir()
    base = {"study": "serving", "device": "h200"}
    (folder / "plan.yaml").write_text(yaml.safe_dump({"base": base, "question": question}))
    summary = {"name": "p", "study": "plan", "question": question, "answer": "So many."}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "provenance.json").write_text(
        json.dumps({"machine": "sim", "devices": [{"device": {"name": "h"}}]})
    )
    rows: list[Row] = [
        {
            "device": "h200",
            "label": "a",
            "strategy": "s",
            "devices": 1,
            "rate_per_s": rate,
            "verdict": verdict,
        }
        | {"best": False, "replicas": 3, "ttft_p99_s": rate / 100.0}
        | {"ttft_p99_s.low": rate / 110.0, "ttft_p99_s.high": rate / 90.0}
        for rate, verdict in rates.items()
    ]
    in_csv(folder / "points.csv", rows, list(rows[0]))
    return folder


def test_plans_are_compared_by_points_verdicts_and_how_far_they_come(tmp_path: Path) -> None:
    a = planned(tmp_path / "a", {8.0: "holds", 16.0: "holds", 17.0: "fails"})
    b = planned(tmp_path / "b", {8.0: "holds", 16.0: "fails", 9.0: "unsure"})
    rows = comparison(a, b)[0]["rows"]
    reached = next(each for each in rows if each["metric"] == "highest_rate_that_holds")
    # It holds at 16 and fails at 17 in A; it holds at 8 and fails at 16, above 9 that is unsure, in B.
    assert (reached["a"], reached["b"]) == (
        {"value": 16.0, "low": 16.0, "high": 17.0},
        {"value": 8.0, "low": 8.0, "high": 16.0},
    )
    assert reached["verdict"] == "no sure difference"
    c = planned(tmp_path / "c", {8.0: "holds", 15.0: "fails"})
    rows = comparison(a, c)[0]["rows"]
    assert next(each for each in rows if each["metric"] == "highest_rate_that_holds")["verdict"] == "worse"
    verdicts = {
        each["where"]["rate_per_s"]: each["verdict"]
        for each in comparison(a, b)[0]["rows"]
        if each["metric"] == "verdict"
    }
    assert verdicts == {"8": "same", "16": "worse"}


def test_a_validations_ladder_is_compared(tmp_path: Path) -> None:
    folders = [written(tmp_path / name, [row()]) for name in "ab"]
    for folder, median in zip(folders, (2.0, 3.0), strict=True):
        rung = {"rung": "1", "what": "prices", "label": "", "median_pct": median, "p95_pct": "inf"}
        in_csv(folder / "ladder.csv", [rung], list(rung))
    rows = by_metric(comparison(*folders)[0])
    assert rows["ladder_median_pct"]["ratio"] == 1.5
    # A rung has no interval.
    assert rows["ladder_median_pct"]["verdict"] == "no sure difference"


# -- what cannot be compared -------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert call(*words) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 320
    return said


def test_other_studies_and_kinds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a", [row()])
    b = written(tmp_path / "b", [row(study="decode")], {**SCENARIO, "study": "decode"})
    error = refused(capsys, "compare", str(a), str(b))
    assert "is a run of study serving" in error
    assert "is a run of study decode; two of the same are needed" in error
    refused(capsys, "compare", str(a), str(b), "--out", str(tmp_path / "new" / "page.html"))
    assert not (tmp_path / "new").exists()
    refused(capsys, "compare", str(a), str(a), "--out", str(a / "results.csv" / "page.html"))
    plan = planned(tmp_path / "p", {8.0: "holds"})
    assert "is a plan of study serving" in refused(capsys, "compare", str(a), str(plan))


def test_broken_directories_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = written(tmp_path / "a", [row()])
    assert "is no run directory: results.csv is missing" in refused(capsys, "compare", str(a), str(tmp_path))
    for i, (file, content, says) in enumerate(
        (
            (
                "results.csv",
                "study,label\nserving,a\n",
                "results.csv: has no column metric, value; run it again",
            ),
            ("results.csv", "metric,value\ne2e_mean_s,nan\n", "value: 'nan' is no finite number"),
            ("results.csv", "metric,value\ne2e_mean_s\n", "results.csv: row 2 has 1 of 2 fields"),
            ("results.csv", "", "has no column metric, value"),
            ("provenance.json", "{", "provenance.json"),
            ("summary.json", "[]", "summary.json: holds no JSON object"),
            ("scenario.yaml", "- 1\n", "scenario.yaml: holds no mapping"),
            ("scenario.yaml", "a: [", "scenario.yaml"),
        )
    ):
        b = written(tmp_path / f"b{i}", [row()])
        (b / file).write_text(content)
        assert says in refused(capsys, "compare", str(a), str(b)), file


def test_an_older_directory_is_compared_by_what_it_has(tmp_path: Path) -> None:
    a = written(tmp_path / "a", [row(), row(metric="ttft_mean_s")])
    columns = [name for name in COLUMNS["serving"] if name not in ("device", "ranks", "low", "high")]
    in_csv(a / "results.csv", [row(), row(metric="ttft_mean_s")], columns)
    (a / "summary.json").unlink()
    (a / "provenance.json").unlink()
    b = written(tmp_path / "b", [row(value=2.0), row(metric="ttft_mean_s")])
    for one, other, ratio in ((a, b, 2.0), (b, a, 0.5)):
        found, _ = comparison(one, other)
        assert by_metric(found)["e2e_mean_s"]["ratio"] == ratio
        assert by_metric(found)["e2e_mean_s"]["verdict"] == "no sure difference"
        assert not found["only_a"]
        notes = " ".join(found["notes"])
        assert "has no summary.json and provenance.json" in notes
        assert "has no column device and ranks: it is of an older version" in notes


# -- what is written ---------------------------------------------------------------------------------------


@slow
def test_the_table_fits_and_the_page_has_both_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    long = "continuous batching, 2,048 tokens a step, and some words <b>more</b>"
    metrics = ("e2e_mean_s", "output_throughput_tokens_per_s", "slo_attainment", "mean_queue")
    a = written(tmp_path / "a", [row(long, metric=name) for name in metrics])
    b = written(tmp_path / "b", [row(long, metric=name, value=0.0123) for name in metrics])
    page = tmp_path / "pages" / "both.html"
    assert call("compare", str(a), str(b), "--out", str(page)) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines()[:-1])) <= 100
    assert "better" in said
    content = page.read_text("utf-8")
    assert str(a) in content
    assert str(b) in content
    assert "<b>more</b>" not in content.replace("\\u003c", "")
    data = re.search(r'id="report-data">(.*?)</script>', content, re.DOTALL)
    assert data
    figures = json.loads(data[1])["plots"]
    assert set(figures) == {"ratios", "beside"}
    beside = figures["beside"]["figures"]["0"]["data"]
    assert [trace["name"] for trace in beside] == ["A", "B"]
    first = content
    assert call("compare", str(a), str(b), "--out", str(page)) == 0
    assert page.read_text("utf-8") == first


def test_a_page_goes_into_a_folder_and_never_into_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = written(tmp_path / "a", [row()])
    assert call("compare", str(a), str(a), "--out", str(tmp_path / "pages")) == 0
    assert (tmp_path / "pages" / "compare.html").is_file()
    capsys.readouterr()
    before = sorted(a.iterdir())
    for out in (a, a / "x.html"):
        assert "is a run directory" in refused(capsys, "compare", str(a), str(a), "--out", str(out))
    assert sorted(a.iterdir()) == before
    assert call("compare", str(a), str(a), "--json") == 0
    assert json.loads(capsys.readouterr().out)["identical"] is True


def test_the_order_of_the_runs_only_turns_ratios_and_verdicts(tmp_path: Path) -> None:
    a = read_side(written(tmp_path / "a", [row(), row("b"), row("c")]))
    b = read_side(written(tmp_path / "b", [row(value=2.0), row("b", value=1.005), row("d", strategy="u")]))
    there, back = matched(a, b), matched(b, a)
    assert [pair.ratio for pair in there.pairs] == pytest.approx(
        [1 / pair.ratio for pair in back.pairs if pair.ratio]
    )
    assert [pair.change for pair in there.pairs] == pytest.approx([pair.change for pair in back.pairs])
    assert there.only_a == back.only_b


# -- the list ----------------------------------------------------------------------------------------------


def test_runs_are_listed_newest_first_with_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for at, name in enumerate(("old", "new & <odd>", "deep/er/mid")):
        folder = written(tmp_path / name, [row()])
        (folder / "report.html").write_text("")
        os.utime(folder / "provenance.json", (1e9 + (0, 200, 100)[at],) * 2)
    written(tmp_path / ".draft-0123abcd", [row()])
    (tmp_path / "no run").mkdir()
    page, entries = build_index(tmp_path)
    assert [entry.folder for entry in entries] == ["new & <odd>", "deep/er/mid", "old"]
    one = entries[0]
    assert (one.name, one.what, one.machine, one.device, one.warnings) == (
        "mine",
        "serving",
        "sim",
        "h200",
        1,
    )
    assert (one.date, one.answer, one.broken) == ("2001-09-09 01:50", "It is a.", "")
    content = page.read_text("utf-8")
    assert 'href="new%20%26%20%3Codd%3E/report.html"' in content
    assert "new &amp; &lt;odd&gt;" in content
    assert call("index", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{page}: 3 runs\n"
    assert page.read_text("utf-8") == content
    assert "http" not in re.sub(r"http[^ ]*w3.org[^ ]*", "", content)


def test_broken_runs_are_listed_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("bare", "garbage", "half", "typed"):
        written(tmp_path / name, [row()])
    (tmp_path / "bare" / "summary.json").unlink()
    (tmp_path / "garbage" / "provenance.json").write_bytes(b"\xff\x00")
    (tmp_path / "half" / "summary.json").write_text('{"name": "ha')
    (tmp_path / "typed" / "summary.json").write_text('{"name": "typed", "warnings": 3}')
    broken = {entry.folder: entry.broken for entry in build_index(tmp_path)[1]}
    assert broken["bare"] == "without summary.json, report.html"
    assert broken["garbage"].startswith("provenance.json: ")
    assert broken["half"].startswith("summary.json: ")
    assert broken["typed"] == "summary.json: warnings is no list"
    assert call("index", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'index.html'}: 4 runs, 4 of them broken\n"


def test_what_cannot_be_listed_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", [row()])
    assert "is itself a run directory" in refused(capsys, "index", str(run))
    assert "is no folder" in refused(capsys, "index", str(tmp_path / "nothing"))
    (tmp_path / "index.html").mkdir()
    assert "is a directory; a file is needed" in refused(capsys, "index", str(tmp_path))
    assert not (run / "index.html").exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert call("index", str(empty)) == 0
    assert "0 runs" in capsys.readouterr().out
