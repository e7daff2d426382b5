"""The report of the studies of single operators: figures and sentences say what the files hold.

Times here are formulas and predict nothing: one method is quadratic in the length, two are linear; the
quadratic one takes memory of that order and runs out of it.
"""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from simcore import reports
from simcore.reports import style
from simcore.reports.operators import figures as figures_operators
from simcore.reports.operators import sections as sections_operators
from simcore.reports.run import read_run
from tests.thorough import first, slow, thorough

LENGTHS = (128, 512, 2048, 8192)
METHODS = {"vanilla": "vanilla", "lightning": "Lightning Attention 2", "lightning_torch": "Lightning (torch)"}
MEMORY_BYTES = 4e9
Row = dict[str, Any]


def _seconds(method: str, batch: int, length: int) -> float:
    if method == "vanilla":
        return 2e-5 + 1e-9 * length * length * batch
    return (1e-4 if method == "lightning" else 9e-4) + 2e-7 * length * batch


def _bytes(method: str, batch: int, length: int) -> float:
    return batch * length * (length * 64.0 if method == "vanilla" else 4096.0)


def _axes(method: str, batch: int, length: float, decay: int) -> Row:
    sizes = {"heads": 32, "length": length, "rank": 128, "dim": 128, "decay": decay, "devices": 1}
    return {
        "study": "linear_attention",
        "strategy": method,
        "label": METHODS[method],
        "batch": batch,
        **sizes,
    }


def results() -> pd.DataFrame:
    """results.csv of a study of linear attention: two batches, with and without decay."""
    rows: list[Row] = []
    for decay, batch, method, length in itertools.product((0, 1), (1, 16), METHODS, LENGTHS):
        axes, memory = _axes(method, batch, length, decay), _bytes(method, batch, length)
        fits = memory <= MEMORY_BYTES
        seconds = _seconds(method, batch, length) if fits else math.nan
        source = "interpolated: a fit" if fits else f"takes {memory / 1e9:.1f} of 4 GB"
        ends = {"low": seconds * 0.9, "high": seconds * 1.1, "unit": "s", "source": source}
        rows.append({**axes, "metric": "latency_s", "value": seconds, **ends})
        rows.append({**axes, "metric": "memory_bytes", "value": memory})
        rows.append({**axes, "metric": "out_of_memory", "value": float(not fits)})
    # Vanilla and Lightning meet where 2e-5 + 1e-9 n^2 = 1e-4 + 2e-7 n.
    meet = (2e-7 + math.sqrt(4e-14 + 4e-9 * 8e-5)) / 2e-9
    text = "vanilla is faster below, Lightning Attention 2 from there on"
    for decay in (0, 1):
        axes = _axes("vanilla", 1, math.nan, decay)
        more = {"metric": "crossover_tokens", "value": meet, "unit": "tokens", "source": text}
        rows.append({**axes, "rival": "lightning", **more})
    return pd.DataFrame(rows).reindex(columns=[*rows[0], "rival"])


def comparison() -> pd.DataFrame:
    """comparison.csv: times off by what random numbers chose, every second length fitted; memory beside."""
    noise, rows = np.random.default_rng(5), []
    for row in results().to_dict("records"):
        if row["metric"] not in ("latency_s", "out_of_memory") or row["decay"]:
            continue
        place = {name: row[name] for name in ("strategy", "label", "batch", "length", "decay", "metric")}
        place["source"] = f"Table {3 if row['batch'] == 1 else 5}, {row['label']}"
        if row["metric"] == "out_of_memory":
            rows.append({**place, "reference": row["value"], "predicted": row["value"], "error_pct": 0.0,
                         "role": "measured"})  # fmt: skip
        elif row["value"] == row["value"]:
            error = float(noise.normal(0, 8))
            role = "fitted" if row["length"] in (128, 2048) else "measured"
            rows.append({**place, "reference": row["value"] / (1 + error / 100), "predicted": row["value"],
                         "error_pct": error, "role": role})  # fmt: skip
    return pd.DataFrame(rows)


SUMMARY: Row = {
    "name": "leetdecoding",
    "study": "linear_attention",
    "answer": "Lightning Attention 2 is fastest from 401 tokens on.",
    "warnings": ["vanilla runs out of memory"],
    "price_shares": {"interpolated": 0.99, "extrapolated": 0.01},
}


def write_run(run_dir: Path, rows: pd.DataFrame | None = None, compared: pd.DataFrame | None = None) -> Path:
    """A run directory as the study of linear attention leaves it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (results() if rows is None else rows).to_csv(run_dir / "results.csv", index=False)
    found = comparison() if compared is None else compared
    if len(found):
        found.to_csv(run_dir / "comparison.csv", index=False)
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY), encoding="utf-8")
    return run_dir


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reports.build(write_run(tmp_path_factory.mktemp("run") / "sim"))


def _data(page: Path) -> Row:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: Row = json.loads(found.group(1))
    return data


def _text(page: Path) -> str:
    own = page.read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    return re.sub(r"<script.*?</script>", "", own, flags=re.DOTALL)


def _cells(text: str, key: str) -> list[list[str]]:
    """The first table of a section, as rows of text."""
    section = text[text.index(f'<section id="{key}"') :]
    body = section[section.index("<tbody>") : section.index("</tbody>")]
    return [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in body.split("<tr>")[1:]]


def _panel(page: Path, number: int) -> Row:
    figure: Row = _data(page)["plots"][f"times-{number}"]["figures"][""]
    return figure


def test_sections_and_panels(everything: Path) -> None:
    text = _text(everything)
    keys = re.findall(r'<section id="([^"]+)"', text)
    assert keys == ["times", "memory", "published", "prices", "run"]
    headings = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert [h.replace("\u00a0", " ") for h in headings] == [
        "Batch 1, no decay", "Batch 1, decay", "Batch 16, no decay", "Batch 16, decay",
    ]  # fmt: skip


@slow
def test_same_directory_same_bytes_and_nothing_is_loaded(everything: Path, tmp_path: Path) -> None:
    assert reports.build(write_run(tmp_path)).read_bytes() == everything.read_bytes()
    assert not re.findall(r"https?://|@import|url\(", _text(everything))
    data = _data(everything)
    used = set(re.findall(r'"(#[0-9a-f]{6}|rgba\([^)]*\))"', json.dumps(data["plots"])))
    assert used - {"rgba(0,0,0,0)"} <= set(data["dark"])


def test_lines_are_predicted_and_marks_published(everything: Path) -> None:
    traces = [t for t in _panel(everything, 0)["data"] if t["name"] == METHODS["lightning"]]
    line, marks = traces
    assert line["mode"] == "lines"
    assert line["y"] == pytest.approx([_seconds("lightning", 1, n) * 1e3 for n in LENGTHS])
    rows = comparison().query("strategy == 'lightning' and batch == 1 and metric == 'latency_s'")
    assert marks["y"] == pytest.approx((rows["reference"] * 1e3).tolist())
    assert [c == style.HOLLOW[0] for c in marks["marker"]["color"]] == [True, False, True, False]


def test_without_published_figures_lines_have_marks(everything: Path) -> None:
    traces = [t for t in _panel(everything, 1)["data"] if t["name"] == METHODS["lightning"]]
    assert [t["mode"] for t in traces] == ["lines+markers"]


def test_a_cross_above_all_times_is_out_of_memory(everything: Path) -> None:
    figure = _panel(everything, 2)
    crosses = [t for t in figure["data"] if t.get("marker", {}).get("symbol") == "x-thin"]
    assert [(t["name"], t["x"]) for t in crosses] == [("vanilla", [2048.0, 8192.0])]
    highest = max(y for t in figure["data"] if t not in crosses for y in t["y"])
    assert min(crosses[0]["y"]) > highest
    assert math.log10(max(crosses[0]["y"])) < figure["layout"]["yaxis"]["range"][1]
    assert "takes 4.3 of 4 GB" in crosses[0]["hovertext"][0]
    assert figure["layout"]["annotations"][0]["text"] == "out of memory"


def test_the_crossing_of_the_fastest_is_a_line_with_its_length(everything: Path) -> None:
    layout = _panel(everything, 0)["layout"]
    where = results().query("metric == 'crossover_tokens'")["value"].iloc[0]
    lines = [s["x0"] for s in layout["shapes"] if s.get("yref") == "paper"]
    assert lines == [pytest.approx(where)]
    note = next(a for a in layout["annotations"] if a["text"] != "out of memory")
    assert (note["text"], note["x"]) == (f"{where:,.0f}", pytest.approx(math.log10(where)))
    assert not [s for s in _panel(everything, 2)["layout"]["shapes"] if s.get("yref") == "paper"]


def test_the_fastest_method_of_each_length_is_in_the_table(everything: Path) -> None:
    rows = _cells(_text(everything), "times")
    assert [row[0] for row in rows] == ["128", "512", "2K", "8K"]
    assert rows[0][1].startswith("vanilla, 36.4")
    assert rows[3][1].startswith("Lightning Attention 2, 1.74")


def test_errors_are_told_by_method_fitted_ones_apart(everything: Path) -> None:
    rows = {row[0]: row[1:] for row in _cells(_text(everything), "published")}
    own = comparison().query("strategy == 'vanilla' and metric == 'latency_s'")
    ahead = own[own["role"] != "fitted"]["error_pct"].abs()
    assert rows["vanilla"][0] == str(len(ahead))
    assert rows["vanilla"][1] == f"{ahead.median():.1f}\u00a0%"
    assert rows["vanilla"][3] == str((own["role"] == "fitted").sum())
    assert rows["vanilla"][6] == "8 of 8"


def test_figures_of_memory_are_no_errors_of_times(everything: Path) -> None:
    run = read_run(everything.parent)
    tiles = {tile.means: tile for tile in sections_operators.opening(run).tiles}
    ahead = comparison().query("metric == 'latency_s' and role != 'fitted'")["error_pct"].abs()
    assert tiles["Median error against published"].value == f"{ahead.median():.1f}\u00a0%"
    assert tiles["Cells out of memory, or not, as published"].value == "24 of 24"
    points = _data(everything)["plots"]["errors"]["figures"][""]["data"]
    assert sum(len(t["x"]) for t in points) == (comparison()["metric"] == "latency_s").sum()


@thorough
def test_wrong_memory_is_told(tmp_path: Path) -> None:
    rows = comparison()
    wrong = (rows["metric"] == "out_of_memory") & (rows["strategy"] == "lightning") & (rows["length"] == 128)
    rows.loc[wrong & (rows["batch"] == 1), ["reference", "error_pct"]] = [1.0, -100.0]
    text = _text(reports.build(write_run(tmp_path, compared=rows))).replace("\u00a0", " ")
    assert (
        "Lightning Attention 2 at 128 tokens, batch 1, no decay is predicted to fit, but is published" in text
    )


def test_memory_has_crosses_where_it_is_too_much(everything: Path) -> None:
    plot = _data(everything)["plots"]["memory"]
    assert plot["chosen"] == [2]
    line = next(t for t in plot["figures"]["2"]["data"] if t["name"] == "vanilla")
    assert line["marker"]["symbol"] == ["circle", "circle", "x-thin", "x-thin"]
    assert line["y"] == pytest.approx([_bytes("vanilla", 16, n) / 1e9 for n in LENGTHS])


def test_methods_of_ones_own_have_looks_that_differ() -> None:
    found = figures_operators.looks(["mine", "vanilla", "yours"])
    assert list(found) == ["vanilla", "mine", "yours"]
    assert len(set(found.values())) == 3


# -- decode attention ------------------------------------------------------------------------------

SHAPES = ((256, 256), (16, 4096), (1, 65536), (1, 131072))


def _decode_run(run_dir: Path, published: bool = True) -> Path:
    rows, compared = [], []
    for batch, context in SHAPES:
        sizes = {"batch": batch, "q_heads": 16, "kv_heads": 2, "head_dim": 128, "context_tokens": context}
        for method, label in (
            ("flash_attention_2", "FlashAttention-2"),
            ("flash_decoding", "Flash-Decoding"),
        ):
            split = method == "flash_decoding"
            seconds = 6e-5 if split else 3e-4 + 3e-8 * context
            axes = {"study": "decode_attention", "strategy": method, "label": label, "devices": 1, **sizes}
            rows.append({**axes, "metric": "latency_s", "value": seconds, "unit": "s"})
            rows.append({**axes, "metric": "out_of_memory", "value": 0.0})
            rows += [{**axes, "metric": "splits", "value": 108.0 // batch}] * split
            place = {"strategy": method, "label": label, "batch": batch, "context_tokens": context}
            figures = {
                "reference": seconds * 0.8,
                "predicted": seconds,
                "error_pct": 25.0,
                "role": "measured",
            }
            compared.append({**place, "metric": "latency_s", **figures, "source": "a table"})
    columns = [*rows[0], "low", "high", "rival", "source"]
    write_run(
        run_dir, pd.DataFrame(rows).reindex(columns=columns), pd.DataFrame(compared if published else [])
    )
    (run_dir / "summary.json").write_text(
        json.dumps({**SUMMARY, "study": "decode_attention"}), encoding="utf-8"
    )
    return run_dir


@slow
def test_a_batch_with_a_context_of_its_own_is_a_place(tmp_path: Path) -> None:
    page = reports.build(_decode_run(tmp_path))
    axis = _panel(page, 0)["layout"]["xaxis"]
    assert axis["ticktext"] == ["256<br>× 256", "16<br>× 4K", "1<br>× 64K", "1<br>× 128K"]
    rows = _cells(_text(page), "times")
    assert rows[1] == ["batch 16 × 4K", "423\u00a0µs", "338\u00a0µs", "+25.0\u00a0%", "60.0\u00a0µs",
                       "48.0\u00a0µs", "+25.0\u00a0%", "6", "7.05×"]  # fmt: skip
    line = next(t for t in _panel(page, 0)["data"] if t["name"] == "Flash-Decoding")
    assert "6 splits" in line["hovertext"][1]


def test_how_far_two_methods_are_apart_is_a_key_figure(tmp_path: Path) -> None:
    run = read_run(_decode_run(tmp_path))
    tiles = {tile.means: tile.value for tile in sections_operators.opening(run).tiles}
    widest = (3e-4 + 3e-8 * 131072) / 6e-5
    assert tiles["Flash-Decoding over FlashAttention-2, at most"] == f"{widest:.1f}×"
    assert tiles["Places where the method predicted fastest is the published one"] == "4 of 4"


# -- what may be missing ---------------------------------------------------------------------------


def _degenerate() -> dict[str, pd.DataFrame]:
    rows = results()
    return {
        "one length": rows[rows["length"] == 512],
        "one method": rows[rows["strategy"] == "lightning"],
        "one setting": rows[(rows["batch"] == 1) & (rows["decay"] == 0)],
        "times only": rows[rows["metric"] == "latency_s"],
        "nothing fits": rows[
            (rows["strategy"] == "vanilla") & (rows["length"] == 8192) & (rows["batch"] == 16)
        ],
        "many settings": pd.concat([rows.assign(heads=heads) for heads in (8, 16)]),
        "no rows": rows.head(0),
    }


@pytest.mark.parametrize("case", first(2, _degenerate()))
@slow
def test_a_page_comes_of_whatever_is_there(case: str, tmp_path: Path) -> None:
    page = reports.build(write_run(tmp_path, _degenerate()[case], compared=pd.DataFrame()))
    plots = _data(page)["plots"]
    assert "NaN" not in json.dumps(plots)
    assert ">nan<" not in _text(page)
    assert SUMMARY["answer"] in _text(page)
    if case == "many settings":
        assert len(plots["times"]["figures"]) == 8


@slow
def test_decode_attention_without_published_figures(tmp_path: Path) -> None:
    page = reports.build(_decode_run(tmp_path, published=False))
    assert 'id="published"' not in _text(page)
    assert [t["mode"] for t in _panel(page, 0)["data"]] == ["lines+markers"] * 2


def test_results_of_another_study_are_refused(tmp_path: Path) -> None:
    rows = results().drop(columns="decay")
    with pytest.raises(ValueError, match=r"results\.csv: has no decay"):
        reports.build(write_run(tmp_path, rows))


# -- measured ------------------------------------------------------------------------------------------


def _all_words(page: Path) -> str:
    return _text(page) + json.dumps(_data(page)["plots"], ensure_ascii=False)


@thorough
def test_a_measured_page_claims_no_prediction(everything: Path, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    (run_dir / "provenance.json").write_text('{"machine": "cpu", "threads": 1}', encoding="utf-8")
    text, predicted = _all_words(reports.build(run_dir)), _all_words(everything)
    for claim in ("kernel_s", "roofline floor", "Lines are predictions", "used for fitting"):
        assert claim in predicted
        assert claim not in text
    assert re.findall(r".{20}[Pp]redict.{20}", text.replace("Measured, not predicted, on cpu", "")) == []
    assert "latency = end of the call − its start, on the wall clock" in text
    assert "Lines are measured, marks are published." in text


@slow
@pytest.mark.parametrize("machine", first(1, ["sim", "cpu"]))
def test_sources_are_shares_of_cases(machine: str, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    (run_dir / "provenance.json").write_text(json.dumps({"machine": machine}), encoding="utf-8")
    page = reports.build(run_dir)
    assert "Of the cases, 99\u00a0% interpolated and 1\u00a0% extrapolated." in _text(page)
    axis = _data(page)["plots"]["prices"]["figures"][""]["layout"]["xaxis"]
    assert axis["title"]["text"] == "share of the cases (%)"
