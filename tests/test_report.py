"""The report: what the page says is what the run directory holds, whatever is missing from it."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from simcore import reports
from simcore.assembly import MODELS, assemble
from simcore.models.decoder import STYLES, Decoder, Style, why_not
from simcore.models.decoder_config import load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.reports import style
from simcore.reports.common import figures as figures_common
from simcore.reports.common import sections as sections_common
from simcore.reports.decode import figures as figures_decode
from simcore.reports.decode import sections as sections_decode
from simcore.reports.run import read_run
from simcore.scenario import load_scenario
from tests.thorough import first, slow, thorough

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
CONTEXTS = (1024, 8192, 32768, 65536, 98304, 131072)
HIT_RATES = (0.5, 0.625, 0.75, 0.875)
LAYERS = 32
AXES = ("strategy", "label", "ranks", "groups", "devices", "context_tokens", "batch", "hit_rate")
COLUMNS = ("study", *AXES, "metric", "op_kind", "value", "low", "high", "unit", "source")

# Seconds of one layer by op kind on 1, 2, 4, 8 ranks, and of what is outside the layers.
LAYER = {
    "matmul": (728e-6, 381e-6, 211e-6, 118e-6),
    "norm": (25e-6, 25e-6, 26e-6, 26e-6),
    "rotary": (31e-6, 21e-6, 16e-6, 13e-6),
    "kv_append": (26e-6, 17e-6, 12.5e-6, 9e-6),
    "activation": (30e-6, 16.5e-6, 15.8e-6, 12e-6),
    "residual": (4.5e-6, 3.2e-6, 3e-6, 3e-6),
    "all_gather": (0.0, 40.5e-6, 44.4e-6, 60e-6),
    "reduce_scatter": (0.0, 41e-6, 49.5e-6, 71e-6),
}
OUTSIDE = {"matmul": (2.186e-3, 1.1e-3, 0.56e-3, 0.29e-3), "sample": (60e-6,) * 4, "embedding": (11e-6,) * 4}


def _attention(ranks: int, context: int) -> float:
    return 52e-6 + 13.5e-9 * context * (1 / ranks + 0.06)


def _kinds(ranks: int, groups: int, context: int, hit_rate: float) -> dict[str, float]:
    """Seconds of a token's critical path by op kind, by the formula of ALSpec's appendix F."""
    at = (1, 2, 4, 8).index(ranks)
    kinds = {kind: LAYERS * seconds[at] for kind, seconds in LAYER.items() if seconds[at]}
    for kind, seconds in OUTSIDE.items():
        kinds[kind] = kinds.get(kind, 0.0) + seconds[at]
    attention = _attention(ranks, context)
    kinds["host"] = 90e-6
    if groups == 1:
        return kinds | {"decode_attention": LAYERS * attention}
    layer = sum(seconds[at] for seconds in LAYER.values())
    hits = math.floor(LAYERS * hit_rate)
    kinds |= {"receive_speculation": hits * 22e-6, "put": hits * 3e-6, "exchange_priority": LAYERS * 9e-6}
    kinds["speculative_attention"] = (LAYERS - hits) * attention * 1.02
    return kinds | {"idle": hits * max(0.0, attention - layer)}


def _variants() -> Iterator[tuple[str, str, int, int, tuple[float, ...]]]:
    for ranks in (1, 2, 4, 8):
        name = f"tensor parallel, {ranks} device{'s' * (ranks > 1)}"
        yield "tensor_parallel", name, ranks, 1, (math.nan,)
    for ranks in (2, 4):
        yield "alspec", f"ALSpec, {ranks}+{ranks} devices", ranks, 2, HIT_RATES


def _case_rows(axes: dict[str, Any], kinds: dict[str, float], baseline: float) -> list[dict[str, Any]]:
    latency = sum(kinds.values())
    far = 0.08 if axes["context_tokens"] > 100_000 else 0.01
    attention = kinds.get("decode_attention", 0.0) + kinds.get("speculative_attention", 0.0)
    exposed = sum(kinds.get(k, 0.0) for k in ("all_gather", "reduce_scatter", "exchange_priority", "put"))
    metrics: list[tuple[str, str, float, str]] = [
        ("token_latency_s", "", latency, "s"),
        ("tokens_per_s_per_user", "", 1 / latency, "1/s"),
        ("attention_share", "", attention / latency, ""),
        ("non_attention_share", "", 1 - attention / latency, ""),
        ("exposed_communication_s", "", exposed, "s"),
        ("speedup_over_baseline", "", baseline / latency, "x"),
        *(("critical_path_s", kind, seconds, "s") for kind, seconds in kinds.items()),
        ("price_share", "published", 0.9 - far, ""),
        ("price_share", "interpolated", 0.1, ""),
        ("price_share", "extrapolated", far, ""),
    ]
    if axes["groups"] > 1:
        metrics.append(("overlap_gain_s", "", 41e-6, "s"))
    source = "extrapolated" if far > 0.05 else "published"
    rows = []
    for metric, kind, value, unit in metrics:
        spread = 0.02 * value if metric == "token_latency_s" else math.nan
        figures = {
            "metric": metric,
            "op_kind": kind,
            "value": value,
            "low": value - spread,
            "high": value + spread,
        }
        rows.append({"study": "decode", **axes, **figures, "unit": unit, "source": source})
    return rows


def _crossover_rows(axes: dict[str, Any]) -> list[dict[str, Any]]:
    none = "ALSpec is ahead everywhere in 1,024..131,072"
    rows = [
        {
            **axes,
            "metric": "crossover_link_latency_s",
            "value": 17e-6,
            "unit": "s",
            "source": "",
            "hit_rate": 0.75,
        }
    ]
    for hit_rate in HIT_RATES:
        value = 21345.0 if hit_rate < 0.6 else math.nan
        row = {**axes, "hit_rate": hit_rate, "metric": "crossover_context_tokens", "value": value}
        rows.append({**row, "unit": "tokens", "source": none if math.isnan(value) else ""})
    for context in (32768, 131072):
        row = {
            **axes,
            "context_tokens": context,
            "metric": "crossover_hit_rate",
            "value": 0.41 - context / 1e6,
        }
        rows.append({**row, "unit": "", "source": ""})
    return [{"study": "decode", "batch": 1, **row} for row in rows]


def _accuracy_rows(axes: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for hit_rate, score, threshold in ((0.5, 71.9, 0.25), (0.75, 71.4, 0.5), (0.875, 69.8, 0.75)):
        common = {"study": "decode", **axes, "hit_rate": hit_rate, "source": f"λ = {threshold}, RULER 32K"}
        rows.append({**common, "metric": "hits_score", "value": score})
        rows.append({**common, "metric": "baseline_score", "value": 72.0})
        rows.append({**common, "metric": "error_bound_worst_case", "value": 3.2e9 * threshold})
        rows.append({**common, "metric": "error_bound_high_probability", "value": 5.6 * threshold})
    return rows


def results() -> pd.DataFrame:
    """Every row of a decode study shaped like ALSpec's Figure 7."""
    return _results().copy()


def few() -> pd.DataFrame:
    """The same at two contexts and two hit rates."""
    rows = results()
    rows = rows[rows["hit_rate"].isna() | rows["hit_rate"].isin([0.5, 0.75])]
    return rows[rows["context_tokens"].isin([1024, 32768]) | rows["context_tokens"].isna()]


@cache
def _results() -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for strategy, label, ranks, groups, rates in _variants():
        axes = {
            "strategy": strategy,
            "label": label,
            "ranks": ranks,
            "groups": groups,
            "devices": ranks * groups,
        }
        for context in CONTEXTS:
            baseline = sum(_kinds(4, 1, context, math.nan).values())
            for rate in rates:
                case = {**axes, "context_tokens": context, "batch": 1, "hit_rate": rate}
                rows += _case_rows(case, _kinds(ranks, groups, context, rate), baseline)
        if groups > 1:
            rows += _crossover_rows(axes) + _accuracy_rows(axes)
    return pd.DataFrame(rows, columns=COLUMNS)


def _span(rank: int, start: float, end: float, name: str, kind: str, state: str = "run") -> dict[str, Any]:
    stream = "wire" if state == "wire" else "main"
    times = {"start_s": start * 1e-6 + 0.5, "end_s": end * 1e-6 + 0.5}
    place = {"rank": rank, "group": rank // 4, "tensor": rank % 4, "stream": stream}
    return {
        "case": "ALSpec, 4+4 devices at 32K",
        **place,
        "name": name,
        "op_kind": kind,
        "state": state,
        **times,
    }


def _layer_ops(rank: int, start: float, state: str) -> list[dict[str, Any]]:
    ops = [("out projection", "matmul", 25), ("reduce-scatter", "reduce_scatter", 25), ("norm", "norm", 13)]
    ops += [("gate, up", "matmul", 79), ("activation", "activation", 16), ("down", "matmul", 68)]
    ops += [("reduce-scatter", "reduce_scatter", 25), ("norm", "norm", 13), ("qkv", "matmul", 39)]
    ops += [("rotary", "rotary", 16), ("append", "kv_append", 12)]
    spans = []
    for name, kind, long in ops:
        length = 2.0 if state == "skipped" else float(long)
        spans.append(_span(rank, start, start + length, name, kind, state))
        start += length
    return spans


def timeline() -> list[dict[str, Any]]:
    """One layer on 4+4 ranks: on a hit the receivers run it, on a miss the senders."""
    spans: list[dict[str, Any]] = []
    for outcome in ("hit", "miss"):
        for rank in range(8):
            own = [_span(rank, 0, 9, "exchange", "exchange_priority")]
            if rank < 4:
                own.append(_span(rank, 9, 190, "attention", "speculative_attention"))
                own.append(_span(rank, 24, 31, "put", "put", "wire"))
                own += _layer_ops(rank, 190, "skipped" if outcome == "hit" else "run")
            else:
                own.append(_span(rank, 9, 31, "receive", "receive_speculation", "waiting"))
                own += _layer_ops(rank, 31, "run")
            end = max(s["end_s"] for s in own) * 1e6 - 500_000
            last = 362.0 if outcome == "hit" else 521.0
            own += [_span(rank, end, last, "wait", "gate", "waiting")] if end < last else []
            own.append(_span(rank, last, last + 9, "exchange", "exchange_priority"))
            spans += [{**span, "outcome": outcome} for span in own]
    return spans


def comparison() -> pd.DataFrame:
    """Compared figures of every role, with errors that a generator of random numbers chose."""
    noise = np.random.default_rng(7)
    rows = []
    for _, case in results().query("metric == 'token_latency_s'").iterrows():
        strategy, far = case["strategy"], case["context_tokens"] > 100_000
        role = "projected" if strategy == "alspec" else "measured" if far else "fitted"
        error = float(noise.normal(0, 0.4 if role == "fitted" else 2.2))
        axes = {k: case[k] for k in ("strategy", "ranks", "groups", "context_tokens", "batch", "hit_rate")}
        reference = case["value"] / (1 + error / 100)
        figures = {
            "metric": "token_latency_s",
            "reference": reference,
            "predicted": case["value"],
            "error_pct": error,
        }
        rows.append({**axes, **figures, "role": role, "source": "ALSpec, Figure 7"})
    return pd.DataFrame(rows)


SUMMARY: dict[str, Any] = {
    "name": "alspec-n150 <script>alert(1)</script>",
    "study": "decode",
    "answer": "On 8 devices ALSpec is 1.14 times as fast as tensor parallelism at 64K tokens, "
    "where 87.5 % of its speculations hit.",
    "notes": ["Device time only: dispatch is not counted, as in the paper."],
    "warnings": ["Prices at 131,072 tokens on 8 ranks are extrapolated from 4 ranks."],
    "hits": {"ALSpec, 4+4 devices": "given rates 0.5 to 0.875, spread evenly over the layers"},
    "price_shares": {"published": 0.86, "interpolated": 0.1, "extrapolated": 0.04},
    "baseline": "tensor parallel, 4 devices",
}
SCENARIO = """name: alspec-n150 <script>alert(1)</script>
study: decode
device: n150
model: llama-3.1-8b
dtype: bfp8
context_tokens: [1024, 8192, 32768, 65536, 98304, 131072]
strategies:
  - {kind: tensor_parallel, ranks: [1, 2, 4, 8]}
  - {kind: alspec, ranks: [2, 4], hits: {kind: rate, value: [0.5, 0.625, 0.75, 0.875]}}
baseline: {kind: tensor_parallel, ranks: 4}
"""
PROVENANCE = {
    "versions": {"simcore": "0.1.0", "python": "3.11.9"},
    "device": "n150",
    "profile": {"name": "n150-alspec", "date": "2025-07-01"},
    "seed": 1,
    "price_sources": ["published: ALSpec, tables 4 to 7", "published: ALSpec, Figure 12"],
    "wall_s": 0.8,
    "laws": {"checked": ["no overlap on one stream", "ranks of a collective start together"], "broken": 0},
}


def write_run(
    run_dir: Path,
    rows: pd.DataFrame | None = None,
    summary: dict[str, Any] | None = None,
    optional: bool = True,
) -> Path:
    """A run directory as the decode study leaves it; `optional` False: results and summary only."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (results() if rows is None else rows).to_csv(run_dir / "results.csv", index=False)
    (run_dir / "summary.json").write_text(
        json.dumps(SUMMARY if summary is None else summary), encoding="utf-8"
    )
    if optional:
        (run_dir / "timeline.json").write_text(json.dumps(timeline()), encoding="utf-8")
        comparison().to_csv(run_dir / "comparison.csv", index=False)
        (run_dir / "scenario.yaml").write_text(SCENARIO, encoding="utf-8")
        (run_dir / "provenance.json").write_text(json.dumps(PROVENANCE), encoding="utf-8")
    return run_dir


# -- the page --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reports.build(write_run(tmp_path_factory.mktemp("run") / "sim"))


def _page_data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def _own_text(page: str) -> str:
    """The page without scripts."""
    return re.sub(r"<script.*?</script>", "", page.replace(get_plotlyjs(), ""), flags=re.DOTALL)


def _traces(page: Path, plot: str, chosen: str) -> dict[str, Any]:
    figure = _page_data(page.read_text(encoding="utf-8"))["plots"][plot]["figures"][chosen]
    return {trace.get("name", ""): trace for trace in figure["data"]}


def test_answer_warning_and_key_figures_open_the_page(everything: Path) -> None:
    text = _own_text(everything.read_text(encoding="utf-8"))
    assert everything.name == "report.html"
    assert SUMMARY["answer"] in text
    assert text.index(str(SUMMARY["warnings"][0])) < text.index('class="tiles"') < text.index("<main>")
    assert 3 <= text.count('class="tile"') <= 5


def test_sections_stand_in_the_order_of_the_argument(everything: Path) -> None:
    text = _own_text(everything.read_text(encoding="utf-8"))
    keys = re.findall(r'<section id="([^"]+)"', text)
    assert keys == [
        "latency",
        "critical-path",
        "timeline",
        "crossover",
        "published",
        "prices",
        "speculation",
        "run",
    ]


@slow
def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    rows = few().replace("ALSpec, 4+4 devices", evil)
    page = reports.build(write_run(tmp_path, rows, SUMMARY | {"answer": evil, "notes": [evil]}))
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    names = {t.get("name") for t in _page_data(text)["plots"]["latency"]["figures"]["0,1"]["data"]}
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in names


def test_nothing_is_loaded_from_anywhere(everything: Path) -> None:
    text = everything.read_text(encoding="utf-8")
    markup = _own_text(text)
    assert not re.findall(r"https?://", markup)
    assert not re.findall(r"<script[^>]*\ssrc=", text.replace(get_plotlyjs(), ""))
    assert re.findall(r"<link[^>]*>", markup) == ['<link rel="icon" href="data:,">']
    assert not re.findall(r"@import|url\(", markup)


@slow
def test_same_directory_same_bytes(everything: Path, tmp_path: Path) -> None:
    assert reports.build(write_run(tmp_path / "elsewhere")).read_bytes() == everything.read_bytes()


# -- what the figures hold -------------------------------------------------------------------------


def _latency(label: str, hit_rate: float) -> pd.DataFrame:
    rows = results()
    chosen = (rows["metric"] == "token_latency_s") & (rows["label"] == label)
    return rows[chosen & (rows["hit_rate"].isna() | (rows["hit_rate"] == hit_rate))]


@pytest.mark.parametrize("label", ["tensor parallel, 8 devices", "ALSpec, 4+4 devices"])
def test_lines_are_the_latencies(everything: Path, label: str) -> None:
    line = _traces(everything, "latency", "0,3")[label]
    rows = _latency(label, 0.75)
    assert line["x"] == rows["context_tokens"].tolist()
    assert line["y"] == pytest.approx((rows["value"] * 1e3).tolist())
    assert [colour == style.HOLLOW[0] for colour in line["marker"]["color"]] == [
        c > 100_000 for c in CONTEXTS
    ]


def test_band_reaches_from_the_fewest_hits_to_the_most(everything: Path) -> None:
    plot = _page_data(everything.read_text(encoding="utf-8"))["plots"]["latency"]
    edges = [t for t in plot["figures"]["0,0"]["data"] if t["legendgroup"] == "ALSpec, 4+4 devices"]
    for edge, hit_rate in zip(edges, (0.875, 0.5), strict=True):
        assert edge["y"] == pytest.approx((_latency("ALSpec, 4+4 devices", hit_rate)["value"] * 1e3).tolist())


def test_parts_sum_to_the_latency(everything: Path) -> None:
    plot = _page_data(everything.read_text(encoding="utf-8"))["plots"]["critical-path"]
    bars = [t for t in plot["figures"]["0,2,2"]["data"] if t["type"] == "bar"]
    names = [name for name in style.PART if name in {bar["name"] for bar in bars}]
    assert [bar["name"] for bar in bars] == names
    for label in ("tensor parallel, 1 device", "ALSpec, 2+2 devices"):
        row = label.replace(", ", ",<br>", 1)
        total = sum(x for bar in bars for x, y in zip(bar["x"], bar["y"], strict=True) if y == row)
        rows = _latency(label, 0.75)
        assert total == pytest.approx(rows.loc[rows["context_tokens"] == 32768, "value"].iloc[0] * 1e3)


def test_rare_parts_stand_together_and_unknown_kinds_are_other() -> None:
    kinds = {"matmul": 0.6, "sample": 0.004, "host": 0.003, "unheard_of": 0.3, "all_reduce": 0.093}
    rows = pd.DataFrame([{"label": "a", "op_kind": k, "value": v} for k, v in kinds.items()])
    parts = figures_decode.by_part(rows).set_index("op_kind")["part"].to_dict()
    assert parts == {
        "matmul": "projections",
        "sample": figures_decode.RARE,
        "host": figures_decode.RARE,
        "unheard_of": "other",
        "all_reduce": "communication",
    }


@thorough
def test_parts_that_miss_the_latency_are_flagged(tmp_path: Path) -> None:
    rows = few()
    rows.loc[rows["op_kind"] == "matmul", "value"] *= 1.1
    text = _own_text(reports.build(write_run(tmp_path, rows, optional=False)).read_text(encoding="utf-8"))
    assert "The parts differ from the latency by up to" in text
    assert "The parts sum to" not in text


def test_timeline_counts_from_the_exchange(everything: Path) -> None:
    bars = _traces(everything, "timeline", "0,1")
    assert min(bars["speculation"]["base"]) == pytest.approx(0.0, abs=1e-6)
    plot = _page_data(everything.read_text(encoding="utf-8"))["plots"]["timeline"]
    drawn = sum(len(trace["x"]) for trace in plot["figures"]["0,1"]["data"])
    assert drawn == len(timeline())
    lanes = plot["figures"]["0,1"]["layout"]["yaxis"]["ticktext"]
    assert lanes[:2] == ["rank 0, sends", "wire"]
    assert len(lanes) == 12
    assert "362 µs" in plot["figures"]["0,0"]["layout"]["annotations"][0]["text"]


def _swapped(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the groups exchanged on a miss, as a run leaves it: who sends changes every time."""
    return [
        {**s, "rank": (s["rank"] + 4) % 8, "group": 1 - s["group"]} if s["outcome"] == "miss" else s
        for s in spans
    ]


def test_both_panes_of_a_layer_have_the_sender_above_who_goes_on() -> None:
    spans = pd.DataFrame([s for s in _swapped(timeline()) if s["tensor"] == 0])
    layout = figures_decode.timeline(spans).layout
    assert list(layout.yaxis.ticktext) == ["group 0, sends", "wire", "group 1, goes on"]
    assert list(layout.yaxis2.ticktext) == ["group 1, sends", "wire", "group 0, goes on"]


def test_what_takes_no_time_has_neither_row_nor_key() -> None:
    spans = pd.DataFrame([s for s in _swapped(timeline()) if s["tensor"] == 0])
    free = spans["op_kind"].isin(["put", "receive_speculation"]) | (spans["state"] == "skipped")
    spans["end_s"] = spans["end_s"].where(~free, spans["start_s"])
    figure = figures_decode.timeline(spans[spans["op_kind"] != "exchange_priority"])
    assert list(figure.layout.yaxis.ticktext) == ["group 0, sends", "group 1, goes on"]
    assert list(figure.layout.yaxis2.ticktext) == ["group 1, sends", "group 0, goes on"]
    assert not {"skipped", "speculation"} & {trace.name for trace in figure.data}


def test_map_is_the_ratio_on_as_many_devices(everything: Path) -> None:
    plot = _page_data(everything.read_text(encoding="utf-8"))["plots"]["speed-up-1"]
    cells = plot["figures"]["0"]["data"][0]
    for row, hit_rate in enumerate(HIT_RATES):
        tensor = _latency("tensor parallel, 8 devices", hit_rate)["value"].to_numpy()
        alspec = _latency("ALSpec, 4+4 devices", hit_rate)["value"].to_numpy()
        assert cells["customdata"][row] == pytest.approx((tensor / alspec).tolist())
        assert cells["z"][row] == pytest.approx(np.log2(tensor / alspec).tolist())
    assert cells["zmin"] == -cells["zmax"]


def test_border_separates_the_cells_around_one() -> None:
    rows = [
        (c, h, r)
        for (c, h), r in zip([(1, 0.5), (2, 0.5), (1, 0.9), (2, 0.9)], [0.8, 0.9, 1.1, 1.2], strict=True)
    ]
    ratio = pd.DataFrame(rows, columns=["context_tokens", "hit_rate", "ratio"])
    border = figures_decode.speed_up_map(ratio, 8, 1.25).data[1]
    assert list(border.y) == [0.5, 0.5, None] * 2
    assert list(border.x) == [-0.5, 0.5, None, 0.5, 1.5, None]


def test_crossovers_give_a_value_or_say_why_there_is_none(everything: Path) -> None:
    text = _own_text(everything.read_text(encoding="utf-8"))
    assert "21,345 tokens" in text
    assert "ALSpec is ahead everywhere in 1,024..131,072" in text


@slow
def test_fitted_figures_never_pass_for_predictions(everything: Path, tmp_path: Path) -> None:
    text = _own_text(everything.read_text(encoding="utf-8"))
    rows = comparison()
    ahead = rows[rows["role"] != "fitted"]
    assert f"{len(ahead)} published figures were predicted without having been used" in text
    points = _traces(everything, "errors", "")["tensor parallelism"]
    drawn = rows[rows["strategy"] == "tensor_parallel"]
    assert points["x"] == pytest.approx(drawn["error_pct"].tolist())
    assert [c == style.HOLLOW[0] for c in points["marker"]["color"]] == (drawn["role"] == "fitted").tolist()
    only = write_run(tmp_path, few())
    rows[rows["role"] == "fitted"].to_csv(only / "comparison.csv", index=False)
    assert "none of them is a prediction" in sections_common.comparison(read_run(only))[0].lead


@slow
def test_extrapolation_above_five_percent_is_flagged(everything: Path, tmp_path: Path) -> None:
    flag = "of the predicted device time is extrapolated"
    assert flag in _own_text(everything.read_text(encoding="utf-8"))
    near = reports.build(write_run(tmp_path, few(), optional=False))
    assert flag not in _own_text(near.read_text(encoding="utf-8"))
    shares = _traces(near, "prices", "")["extrapolated"]
    assert shares["x"] == pytest.approx([4.0] + [1.0] * 6)


def test_scenario_formulas_and_provenance_close_the_page(everything: Path) -> None:
    text = _own_text(everything.read_text(encoding="utf-8"))
    for said in (
        "SFD_R(K)",
        "E2EL − TTFT",
        "versions › python",
        "ranks: [1, 2, 4, 8]",
        "python -m simcore run scenario.yaml",
    ):
        assert said in text


@thorough
def test_the_provenance_is_printed_in_numbers_that_people_read(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, few())
    recorded = {"link": {"bytes_per_s": 50000000000.0, "latency_s": 5.679e-06}, "share": 0.2746438474348996}
    made = {"command": "python -m simcore run x.yaml --set a=1", "device": {"name": "n300"}, **recorded}
    made["formats"] = "weights bfp8, cache bf16"
    (run_dir / "provenance.json").write_text(json.dumps(made), encoding="utf-8")
    text = _own_text(reports.build(run_dir).read_text(encoding="utf-8"))
    for said in ("5 × 10¹⁰", "5.679 × 10⁻⁶", "0.2746<", "n300 · llama-3.1-8b · weights bfp8, cache bf16"):
        assert said in text
    header, footer = text[: text.index("<h1>")], text[text.index("<footer>") :]
    assert "bfp8 ·" not in header
    assert text.count("--set a=1") == 1
    assert ">python -m simcore run scenario.yaml<" in footer


def test_latency_lines_have_no_error_bars_and_intervals_on_hover(everything: Path) -> None:
    traces = _traces(everything, "latency", "0,3").values()
    assert not any("error_y" in trace for trace in traces)
    assert all("90 % interval" in text for trace in traces for text in trace["hovertext"])
    assert "90 % intervals: on hover and in the table." in everything.read_text(encoding="utf-8")


@thorough
def test_latency_with_nothing_free_is_told_of_the_fastest_at_the_longest_context(tmp_path: Path) -> None:
    rows = few()
    priced = rows[(rows["metric"] == "token_latency_s") & (rows["strategy"] == "alspec")]
    priced = priced.assign(metric="latency_if_priced_s", value=priced["value"] + 1e-3)
    best = priced[priced["context_tokens"] == 32768].sort_values("value").iloc[0]
    text = _own_text(
        reports.build(write_run(tmp_path, pd.concat([rows, priced]))).read_text(encoding="utf-8")
    )
    said = f"{best['label']}, 75\u00a0% hits {best['value'] * 1e3:.2f}\u00a0ms at 32K tokens."
    assert f"priced by link and roofline: {said}" in text


@slow
@pytest.mark.parametrize(
    ("roles", "lead", "tile"),
    [
        (
            ["measured"],
            "1 published figure was predicted without having been used, with an error",
            "1 figure,",
        ),
        pytest.param(
            ["measured"] * 2,
            "2 published figures were predicted",
            "2 figures, none of them fitted",
            marks=thorough,
        ),
        pytest.param(["fitted"], "The one figure compared here was used for fitting", "", marks=thorough),
    ],
)
def test_one_figure_is_spoken_of_in_the_singular(
    roles: list[str], lead: str, tile: str, tmp_path: Path
) -> None:
    run_dir = write_run(tmp_path, few())
    comparison().head(len(roles)).assign(role=roles).to_csv(run_dir / "comparison.csv", index=False)
    text = _own_text(reports.build(run_dir).read_text(encoding="utf-8"))
    assert lead in text
    assert tile in text
    assert not re.search(r"\b1 (published )?figures", text)


# -- several batches -------------------------------------------------------------------------------


def _two_batches() -> pd.DataFrame:
    rows = few()
    of_batch_8 = rows.assign(batch=8, value=rows["value"] * 3, low=rows["low"] * 3, high=rows["high"] * 3)
    slower = (of_batch_8["strategy"] == "alspec") & (of_batch_8["metric"] == "token_latency_s")
    of_batch_8.loc[slower, "value"] *= 2
    return pd.concat([rows, of_batch_8])


def test_tiles_are_about_the_context_and_batch_of_the_answer(tmp_path: Path) -> None:
    rows = _two_batches()
    latency = rows[(rows["metric"] == "token_latency_s") & (rows["context_tokens"] == 32768)]
    there = latency[latency["batch"] == 8]
    run = read_run(write_run(tmp_path, rows, optional=False))
    tiles = {tile.means: tile for tile in sections_decode.opening(run).tiles}
    fastest = f"{there['value'].min() * 1e3:.2f}\u00a0ms"
    assert tiles["Fastest token at 32K tokens, batch 8"].value == fastest
    assert "Best of tensor parallelism at 32K tokens, batch 8" in tiles
    against = tiles["ALSpec against tensor parallelism on as many devices, at best"]
    ratio = figures_decode.same_devices_ratio(there.assign(device=""))["ratio"].max()
    assert ratio < 1
    assert against.value == f"{ratio:.2f}×"
    assert against.where.endswith("at 32K tokens, batch 8")


def test_a_batch_is_named_only_where_there_are_several(everything: Path) -> None:
    assert "batch 1" not in _own_text(everything.read_text(encoding="utf-8")).split("<main>")[0]


@thorough
def test_selectors_open_on_the_batch_of_the_answer(tmp_path: Path) -> None:
    page = reports.build(write_run(tmp_path, _two_batches(), optional=False))
    plots = _page_data(page.read_text(encoding="utf-8"))["plots"]
    assert {"latency", "critical-path", "speed-up-0"} <= set(plots)
    for key in ("latency", "critical-path", "speed-up-0", "speed-up-1"):
        assert plots[key]["chosen"][0] == 1


def _crossings(answers: Mapping[Any, float]) -> pd.DataFrame:
    rows = few()
    row = rows[rows["metric"] == "crossover_link_latency_s"].iloc[0]
    made = [
        {**row, "batch": batch, "context_tokens": context, "hit_rate": rate, "value": value, "source": "why"}
        for (batch, context, rate), value in answers.items()
    ]
    others = rows[~rows["metric"].str.startswith("crossover_")]
    return pd.concat([others, others.assign(batch=8), pd.DataFrame(made)])


def _break_even(run_dir: Path, rows: pd.DataFrame) -> tuple[list[list[str]], list[str]]:
    page = _own_text(reports.build(write_run(run_dir, rows, optional=False)).read_text(encoding="utf-8"))
    section = page[page.index('<section id="crossover"') :]
    table = section[section.index("<table") : section.index("</table>")]
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("</thead>")[1].split("<tr>")]
    return [line for line in lines if line], re.findall(r"<th[^>]*>(.*?)</th>", table)


@thorough
def test_batches_are_a_column_of_the_break_even_table(tmp_path: Path) -> None:
    places = [(c, h) for c in (1024, 32768) for h in (0.5, 0.75)]
    answers = {(b, c, h): math.nan if b == 1 else 17e-6 for b in (1, 8) for c, h in places}
    lines, head = _break_even(tmp_path / "apart", _crossings(answers))
    assert head == ["break-even", "strategy", "batch", "at", "value", "remark"]
    at = "1K and 32K tokens, 50\u00a0% and 75\u00a0% hits"
    assert [line[2:] for line in lines] == [["1", at, "none", "why"], ["8", at, "17\u00a0µs", "why"]]
    lines, _ = _break_even(tmp_path / "together", _crossings(dict.fromkeys(answers, math.nan)))
    assert [line[2:] for line in lines] == [["1 and 8", at, "none", "why"]]


@thorough
def test_a_row_of_the_break_even_table_names_a_few_places(tmp_path: Path) -> None:
    diagonal = {(1, 1024 * 2**i, 0.5 + i / 100): math.nan for i in range(6)}
    lines, _ = _break_even(tmp_path / "pairs", _crossings(diagonal))
    assert lines[0][3].endswith("and 3 more")
    assert lines[0][3].count(";") == 2
    many = {(1, 1024 * 2**i, 0.5): math.nan for i in range(6)}
    lines, _ = _break_even(tmp_path / "many", _crossings(many))
    assert lines[0][3] == "1K, 2K, 4K and 3 more tokens, 50\u00a0% hits"


# -- what may be missing ---------------------------------------------------------------------------


def _degenerate() -> dict[str, pd.DataFrame]:
    rows = results()
    empty = few().assign(hit_rate=math.nan).drop_duplicates(["label", "context_tokens", "metric", "op_kind"])
    holes = few()
    holes.loc[holes.index % 3 == 0, ["value", "low", "high"]] = math.nan
    batches = few()
    return {
        "one context": rows[rows["context_tokens"] == 32768],
        "one strategy": few().query("label == 'ALSpec, 4+4 devices'"),
        "no ALSpec": few().query("strategy == 'tensor_parallel'"),
        "no hit rates": empty,
        "holes": holes,
        "several batches": pd.concat([batches, batches.assign(batch=8, value=batches["value"] * 3)]),
        "one latency": rows[rows["metric"] == "token_latency_s"].head(1),
        "no values": rows.assign(value=math.nan).head(20),
        "no rows": rows.head(0),
    }


@slow
@pytest.mark.parametrize("case", first(2, _degenerate()))
def test_a_page_comes_of_whatever_is_there(case: str, tmp_path: Path) -> None:
    page = reports.build(write_run(tmp_path, _degenerate()[case], optional=False))
    text = page.read_text(encoding="utf-8")
    shown = _page_data(text)["plots"]
    assert SUMMARY["answer"] in text
    assert "NaN" not in json.dumps(shown)
    assert ">nan<" not in _own_text(text)
    for plot in shown.values():
        assert ",".join(map(str, plot["chosen"])) in plot["figures"]


@thorough
def test_one_context_is_drawn_as_bars(tmp_path: Path) -> None:
    page = reports.build(write_run(tmp_path, _degenerate()["one context"], optional=False))
    bars = _traces(page, "latency", "0")
    assert {trace["type"] for trace in bars.values()} == {"bar"}
    assert bars["ALSpec, 4+4 devices"]["x"] == pytest.approx(
        [
            _latency("ALSpec, 4+4 devices", h).query("context_tokens == 32768")["value"].iloc[0] * 1e3
            for h in HIT_RATES
        ]
    )


@thorough
def test_without_summary_the_scenario_names_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, few())
    (tmp_path / "summary.json").unlink()
    text = reports.build(tmp_path).read_text(encoding="utf-8")
    assert "<title>alspec-n150 &lt;script&gt;" in text
    assert read_run(tmp_path).study == "decode"


@slow
def test_a_study_without_figures_of_its_own_has_a_page(tmp_path: Path) -> None:
    page = reports.build(write_run(tmp_path, few(), SUMMARY | {"study": "another"}))
    assert set(_page_data(page.read_text(encoding="utf-8"))["plots"]) == {"errors", "prices"}


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no results\.csv"):
        reports.build(tmp_path)


BROKEN = {
    "no columns of ours": ("results.csv", "a,b\n1,2\n"),
    "empty results": ("results.csv", ""),
    "a word for a number": ("results.csv", None),
    "bytes": ("results.csv", b"\xff\xfe\x00\x80"),
    "comparison without our columns": ("comparison.csv", "hello\n"),
    "comparison cut off": ("comparison.csv", comparison().to_csv(index=False)[:-40]),
    "summary is no JSON": ("summary.json", "{"),
    "summary is a list": ("summary.json", "[1]"),
    "warnings are a number": ("summary.json", '{"warnings": 3}'),
    "timeline is an object": ("timeline.json", "{}"),
    "timeline of strings": ("timeline.json", '["a"]'),
    "spans without times": ("timeline.json", '[{"case": "a"}]'),
    "timeline of bytes": ("timeline.json", b"\x80"),
    "provenance is a number": ("provenance.json", "3"),
    "provenance holds NaN": ("provenance.json", '{"a": NaN}'),
    "scenario is no YAML": ("scenario.yaml", "a: [1\nb: {"),
    "scenario is a word": ("scenario.yaml", "hello"),
}


@pytest.mark.parametrize("case", first(8, BROKEN))
def test_no_page_is_made_of_garbage(case: str, tmp_path: Path) -> None:
    name, content = BROKEN[case]
    run_dir = write_run(tmp_path, few())
    if content is None:
        content = (run_dir / name).read_text(encoding="utf-8")
        content = content.replace(",1024.0,", ",long,", 1)
    (run_dir / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(name)) as raised:
        reports.build(run_dir)
    assert "\n" not in str(raised.value)
    assert not (run_dir / "report.html").exists()


@pytest.mark.parametrize("name", ["results.csv", "summary.json", "timeline.json", "scenario.yaml"])
def test_a_folder_in_the_place_of_a_file_is_named(name: str, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, few())
    (run_dir / name).unlink()
    (run_dir / name).mkdir()
    with pytest.raises(ValueError, match=re.escape(name)):
        reports.build(run_dir)


# -- colours ---------------------------------------------------------------------------------------


def test_every_colour_of_a_figure_has_a_dark_partner(everything: Path) -> None:
    data = _page_data(everything.read_text(encoding="utf-8"))
    used = set(re.findall(r'"(#[0-9a-f]{6}|rgba\([^)]*\))"', json.dumps(data["plots"])))
    assert used - {"rgba(0,0,0,0)"} <= set(data["dark"])
    assert len(set(data["dark"])) == len(style.dark_partners())


def test_price_shares_keep_an_unknown_source() -> None:
    figure = figures_common.price_shares({"all": {"published": 0.5, "guessed": 0.5}})
    assert [bar.name for bar in figure.data] == ["published", "guessed"]


# -- measured ------------------------------------------------------------------------------------------

MACHINE = {
    "machine": "cpu",
    "processor": "AMD EPYC",
    "threads": 1,
    "torch": "2.13.0+cpu",
    "how": "one op after another",
    "date": "2026-11-21",
    "runs": "5 of each case",
}


def _all_words(page: Path) -> str:
    """What a page says, with all that its figures say."""
    text = page.read_text(encoding="utf-8")
    return _own_text(text) + json.dumps(_page_data(text)["plots"], ensure_ascii=False)


@slow
def test_a_measured_page_claims_no_prediction(tmp_path: Path) -> None:
    predicted = _all_words(reports.build(write_run(tmp_path / "sim", few())))
    run_dir = write_run(tmp_path / "cpu", few())
    (run_dir / "provenance.json").write_text(json.dumps(MACHINE), encoding="utf-8")
    text = _all_words(reports.build(run_dir))
    for claim in ("Of the predicted device time", "90 % interval", "error of the prediction", "to the byte"):
        assert claim in predicted
        assert claim not in text
    assert re.findall(r".{20}[Pp]redict.{20}", text.replace("Measured, not predicted, on cpu", "")) == []
    for said in (
        "Measured against published",
        "Of the device time",
        "range of the runs",
        "another run gives",
    ):
        assert said in text
        assert said not in predicted
    assert "python -m simcore run scenario.yaml --on cpu" in text
    assert "--on" not in predicted


@slow
@pytest.mark.parametrize("missing", first(1, [None, "processor", "date", "runs", "torch", "threads", "how"]))
def test_a_measured_page_says_on_what(missing: str | None, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, few(), optional=False)
    made = {key: value for key, value in MACHINE.items() if key != missing}
    (run_dir / "provenance.json").write_text(json.dumps(made), encoding="utf-8")
    text = sections_common.machine_text(read_run(run_dir))
    assert text.startswith("Measured, not predicted, on cpu: ")
    assert text in _own_text(reports.build(run_dir).read_text(encoding="utf-8"))
    parts = {**MACHINE, "threads": "threads: 1", "runs": "runs: 5 of each case"}
    for key in ("processor", "threads", "torch", "how", "date", "runs"):
        assert (str(parts[key]) in text) == (key != missing)
    (run_dir / "provenance.json").write_text('{"machine": "sim"}', encoding="utf-8")
    assert sections_common.machine_text(read_run(run_dir)) == ""


@slow
def test_what_was_measured_was_not_fitted(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, few())
    (run_dir / "provenance.json").write_text(json.dumps(MACHINE), encoding="utf-8")
    (section,) = sections_common.comparison(read_run(run_dir))
    assert "beside what was measured: " in section.lead
    assert section.notes == []
    assert section.table is not None
    assert [row[0] for row in section.table.rows if "fitted" in row[0]] == [sections_common.SEEN]
    assert section.details[0].table is not None
    assert section.details[0].table.head[4] == "measured"


# -- every kind of op has a part -----------------------------------------------------------------


def _kinds(decoder: Decoder) -> Iterator[str]:
    graphs = [
        decoder.token_step, decoder.embed, decoder.before, decoder.attend, decoder.after, decoder.head,
        decoder.speculate, decoder.speculate_ahead, decoder.receive, decoder.exchange(2),
    ]  # fmt: skip
    for graph in graphs:
        for op in graph.ops:
            yield op.kind
            # A real machine runs the parts of a fused op one by one.
            yield from (part.kind for part in op.parts)
        yield from (published.put.kind for published in graph.publishes)


@pytest.mark.parametrize("style_of_ranks", STYLES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_kind_of_op_of_any_decoder_has_a_part(ranks: int, style_of_ranks: Style) -> None:
    configs = [load_config(path) for path in sorted(MODELS.glob("*.json"))]
    # What a critical path holds besides ops.
    kinds = {"host", "gate", "idle"}
    for config in (config for config in configs if not why_not(config, ranks)):
        if config.linear:
            # Nothing is speculated about models with states.
            kinds |= Decoder(config, ranks=ranks, style=style_of_ranks).token_step.kinds
        for parts in (False, True) if not config.linear else ():
            kinds |= set(_kinds(Decoder(config, ranks=ranks, style=style_of_ranks, parts=parts)))
        served = ServedDecoder(config, ranks=ranks, style=style_of_ranks)
        graphs = (served.decode, served.prefill, served.mixed, served.move)
        kinds |= {op.kind for graph in graphs for op in graph.ops}
    assert not kinds - style.PART_OF_KIND.keys()
    assert {style.PART_OF_KIND[kind] for kind in kinds} <= style.PART.keys() - {"other"}
    fused = style_of_ranks == "fused_gather" and ranks > 1
    assert ("all_gather_matmul" in kinds) == fused


@slow
@pytest.mark.parametrize(
    "name",
    [
        "alspec",
        "papers/alspec_h100_table3",
        "h200/decode_step",
        "h200/decoder_layer",
    ],
)
def test_nothing_of_a_shipped_scenarios_token_is_other(name: str) -> None:
    path = SCENARIOS / f"{name}.yaml"
    parts = assemble(load_scenario(path, ("context_tokens=1024", "batch=1")), str(path))
    outcome = parts.study.run(lambda doing, done, total: None)
    rows = [
        {"label": row.axes.label, "op_kind": row.op_kind, "value": row.value}
        for row in outcome.rows
        if row.metric == "critical_path_s"
    ]
    found = figures_decode.by_part(pd.DataFrame(rows))
    assert len(found)
    assert "other" not in set(found["part"])


def test_parts_are_told_apart_in_both_themes() -> None:
    for theme in (0, 1):
        colours = [pair[theme] for pair in style.PART.values()]
        assert len(set(colours)) == len(colours)
