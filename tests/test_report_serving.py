"""The serving study's page: it says what the run directory holds, whatever is missing from it."""

import base64
import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from simcore import reports
from simcore.reports import style
from simcore.reports.common.figures import Scale, Variant
from simcore.reports.run import read_run
from simcore.reports.serving import figures as figures_serving
from simcore.reports.serving import sections as sections_serving
from simcore.reports.text import significant
from tests.serving_run import SERVERS, SLO, SUMMARY, write_run
from tests.thorough import first, slow, thorough

LABELS = [server.label for server in SERVERS]
RATES = (4.0, 8.0, 16.0)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("serving") / "sim", requests=80)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Path:
    return reports.build(run_dir)


def _data(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def _words(page: Path) -> str:
    text = page.read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)


def _traces(page: Path, plot: str, chosen: str) -> dict[str, dict[str, Any]]:
    figure = _data(page)["plots"][plot]["figures"][chosen]
    return {t["name"]: t for t in figure["data"] if t.get("showlegend") is not False}


def _array(values: Any) -> list[float]:
    """An array of a figure, which may be in plotly's binary form."""
    if isinstance(values, Mapping):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"]).tolist()
    return list(values)


def _value(run_dir: Path, label: str, metric: str, rate: float) -> float:
    rows = read_run(run_dir).metric(metric)
    rows = rows[(rows["label"] == label) & (rows["rate_per_s"] == rate)]
    return float(rows["value"].iloc[0])


# -- the page --------------------------------------------------------------------------------------


def test_sections_stand_in_the_order_of_the_argument(page: Path) -> None:
    keys = re.findall(r'<section id="([^"]+)"', _words(page))
    assert keys == [
        "strategies", "distributions", "trends", "tokens", "requests", "levels", "slo", "flover",
        "published", "prices", "run",
    ]  # fmt: skip


@slow
def test_the_answer_and_its_tiles_open_the_page(page: Path, run_dir: Path) -> None:
    words = _words(page)
    assert SUMMARY["answer"] in words
    assert words.index(SUMMARY["warnings"][0]) < words.index('class="tiles"') < words.index("<main>")
    tiles = {tile.means: tile for tile in sections_serving.opening(read_run(run_dir)).tiles}
    best = LABELS[3]
    ttft = _value(run_dir, best, "ttft_p99_s", 16.0) * 1e3
    assert tiles["TTFT, 99th percentile"].value == f"{significant(ttft)}\u00a0ms"
    assert best in tiles["TPOT, median"].where
    assert "16\u00a0requests/s" in tiles["TPOT, median"].where
    assert set(tiles) == {
        "TTFT, 99th percentile", "TPOT, median", "TPOT, 99th percentile", "Goodput", "Output",
        "Median error against published",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        (f"Use {LABELS[0]}, not {LABELS[1]}.", LABELS[0]),
        ("None is named.", LABELS[3]),
    ],
)
def test_tiles_are_about_the_strategy_of_the_answer(
    answer: str, label: str, run_dir: Path, tmp_path: Path
) -> None:
    for file in run_dir.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "summary.json").write_text(json.dumps({**SUMMARY, "answer": answer}), encoding="utf-8")
    tile = sections_serving.opening(read_run(tmp_path)).tiles[0]
    assert tile.where == f"{label}, 16\u00a0requests/s"


def test_nothing_is_loaded_from_anywhere(page: Path) -> None:
    words = _words(page)
    assert not re.findall(r"https?://|@import|url\(", words)


@thorough
def test_same_directory_same_bytes(run_dir: Path, page: Path) -> None:
    first = page.read_bytes()
    assert reports.build(run_dir).read_bytes() == first


def test_every_strategy_has_one_colour_in_all_figures(page: Path) -> None:
    colours: dict[str, set[str]] = {}
    for key in ("distributions", "against-rate_per_s", "tokens", "levels", "slo"):
        for figure in _data(page)["plots"][key]["figures"].values():
            for trace in figure["data"]:
                own = trace["marker"] if trace["type"] == "bar" else trace["line"]
                colours.setdefault(trace["name"], set()).add(own["color"])
    assert {label: len(colours[label]) for label in LABELS} == dict.fromkeys(LABELS, 1)
    assert len({next(iter(colours[label])) for label in LABELS}) == len(LABELS)


def test_every_colour_of_a_figure_has_a_dark_partner(page: Path) -> None:
    data = _data(page)
    used = set(re.findall(r'"(#[0-9a-f]{6}|rgba\([^)]*\))"', json.dumps(data["plots"])))
    assert used <= set(data["dark"])
    lights = [light for shades in {id(s): s for s in style.STRATEGY.values()}.values() for light, _ in shades]
    assert len(set(lights)) == len(lights)


def test_formulas_are_those_of_the_metrics_that_the_page_has(page: Path, run_dir: Path) -> None:
    words = _words(page)
    for said in (
        "tpot = (e2e − ttft) / (output tokens − 1)",
        "goodput = requests that meet every SLO / duration",
        "duration(concurrent instances) / duration",
        "t(0.975, R − 1)",
        "continuous_batching, token_budget",
    ):
        assert said in words
    run = read_run(run_dir)
    few = run.results[run.results["metric"].str.startswith("ttft")].assign(low=math.nan, high=math.nan)
    terms = [d.term for d in sections_serving.formulas(type(run)(**{**vars_of(run), "results": few}))]
    assert terms == ["Time to first token (TTFT)", "Share of a price source", "Error of a prediction"]


def vars_of(run: Any) -> dict[str, Any]:
    return {name: getattr(run, name) for name in run.__dataclass_fields__}


# -- what the figures hold -------------------------------------------------------------------------


@slow
def test_table_is_the_results_with_their_intervals(run_dir: Path) -> None:
    table = sections_serving.sections(read_run(run_dir))[0].table
    assert table is not None
    label = LABELS[1]
    row = next(row for row in table.rows if row[0].startswith("goodput"))
    value = _value(run_dir, label, "goodput_per_s", 16.0)
    cell = row[list(table.head).index(label)]
    assert cell.split(" ± ")[0] == significant(value)
    assert " ± " in cell
    *names, servers, saved = [name for _, name in sections_serving.MAIN]
    assert [row[0].split(" (")[0] for row in table.rows] == names
    # Only with autoscaling.
    assert (servers, saved) == ("servers", "device time saved")


def test_distributions_are_those_of_the_requests(page: Path, run_dir: Path) -> None:
    requests = pd.read_parquet(run_dir / "requests.parquet")
    own = requests[(requests["label"] == LABELS[0]) & (requests["rate_per_s"] == 8.0)]
    ttft = np.sort((own["first_token_s"] - own["arrival_s"]).to_numpy()) * 1e3
    line = _traces(page, "distributions", "0,1")[LABELS[0]]
    scale = 1e3 if max(_array(line["x"])) < ttft.max() / 2 else 1.0
    assert _array(line["x"]) == pytest.approx((ttft / scale).tolist(), rel=1e-5)
    assert _array(line["y"])[-1] == 100
    slo = next(t for name, t in _traces(page, "distributions", "1,0").items() if name.startswith("SLO"))
    # Predicted lines are dashed.
    assert slo["line"]["dash"] == "dot"
    assert slo["x"] == pytest.approx([SLO["tpot_s"] * 1e3] * 2)
    assert not any(name.startswith("SLO") for name in _traces(page, "distributions", "2,0"))


def test_a_curve_of_many_requests_is_their_quantiles() -> None:
    values = np.random.default_rng(1).exponential(1.0, 100_000)
    x, y = figures_serving.curve(values)
    assert len(x) == len(y) == figures_serving.CURVE_POINTS
    shares = [float((values <= v * (1 + 1e-6)).mean()) * 100 for v in x]
    assert shares == pytest.approx(y.tolist(), abs=0.002)
    some, share = figures_serving.curve(np.array([3.0, math.nan, 1.0]))
    assert (some.tolist(), share.tolist()) == ([1.0, 3.0], [50.0, 100.0])


@slow
def test_trends_are_the_results_and_bands_their_intervals(page: Path, run_dir: Path) -> None:
    figure = _data(page)["plots"]["against-rate_per_s"]["figures"]["1,0"]
    band, line = (
        next(t for t in figure["data"] if t["name"] == LABELS[0] and (t.get("fill") == fill))
        for fill in ("toself", None)
    )
    values = [_value(run_dir, LABELS[0], "tpot_p50_s", rate) * 1e3 for rate in RATES]
    assert line["x"] == list(RATES)
    assert line["y"] == pytest.approx(values)
    rows = read_run(run_dir).metric("tpot_p50_s")
    rows = rows[rows["label"] == LABELS[0]]
    assert band["y"][:3] == pytest.approx((rows["high"] * 1e3).tolist())
    assert "95 % interval" in line["hovertext"][0]


def test_bars_of_a_request_are_its_times(page: Path, run_dir: Path) -> None:
    requests = pd.read_parquet(run_dir / "requests.parquet")
    own = requests[(requests["label"] == LABELS[2]) & (requests["rate_per_s"] == 16.0)]
    own = own[own["replica"] == 0].sort_values("arrival_s").iloc[16:64]
    where = [v.label for v in sections_serving.Served(read_run(run_dir)).shown].index(LABELS[2])
    bars = _traces(page, "requests", f"{where},2")
    done = own[own["status"] == "finished"]
    assert len(own) == sections_serving.GANTT_REQUESTS
    assert bars["waiting"]["x"] == pytest.approx((done["scheduled_s"] - done["arrival_s"]).tolist(), abs=1e-4)
    assert bars["generating"]["x"] == pytest.approx(
        (done["finish_s"] - done["first_token_s"]).tolist(), abs=1e-4
    )
    assert bars["waiting"]["base"][0] == pytest.approx(done["arrival_s"].iloc[0] - own["arrival_s"].iloc[0])
    assert len(bars["rejected"]["x"] if "rejected" in bars else []) == len(own) - len(done)


def test_levels_are_thinned_and_keep_their_ends(page: Path, run_dir: Path) -> None:
    levels = pd.read_parquet(run_dir / "levels.parquet")
    own = levels[(levels["label"] == LABELS[0]) & (levels["rate_per_s"] == 4.0)]
    line = _traces(page, "tokens", "0,0")[LABELS[0]]
    assert _array(line["y"])[-1] == own["tokens"].iloc[-1]
    assert len(_array(line["x"])) == len(own)
    thin = sections_serving._thinned(own, 50)
    assert len(thin) == 50
    assert thin["t_s"].iloc[[0, -1]].tolist() == own["t_s"].iloc[[0, -1]].tolist()
    kv = _traces(page, "levels", "2,0")[LABELS[0]]
    assert max(_array(kv["y"])) == pytest.approx(own["kv_share"].max() * 100)


@thorough
def test_bars_of_the_slo_are_shares_of_requests(page: Path, run_dir: Path) -> None:
    bars = _traces(page, "slo", "1,0")
    shares = [_value(run_dir, LABELS[1], "slo_attainment_ttft", rate) * 100 for rate in RATES]
    assert bars[LABELS[1]]["x"] == ["4", "8", "16"]
    assert bars[LABELS[1]]["y"] == pytest.approx(shares)
    assert "TTFT ≤ 500\u00a0ms and TPOT ≤ 20\u00a0ms" in _words(page)


def test_published_figures_stand_beside_predictions(page: Path, run_dir: Path) -> None:
    compared = read_run(run_dir).comparison
    own = compared[(compared["label"] == LABELS[0]) & (compared["metric"] == "duration_s")]
    metrics = list(dict.fromkeys(compared["metric"]))
    traces = _traces(page, "compared", f"{metrics.index('duration_s')},0")
    assert traces[f"{LABELS[0]}, published"]["y"] == pytest.approx(own["reference"].tolist())
    assert traces[f"{LABELS[0]}, predicted"]["y"] == pytest.approx(own["predicted"].tolist())
    hollow = traces[f"{LABELS[2]}, published"]["marker"]["color"]
    assert hollow == [style.HOLLOW[0]] * 3


@thorough
def test_flovers_figures_need_concurrent_instances(tmp_path: Path) -> None:
    without = write_run(tmp_path, rates=(8.0,), requests=12, servers=SERVERS[:2])
    assert 'id="flover"' not in _words(reports.build(without))


# -- what may be missing, and what may vary --------------------------------------------------------


def _without_goodput(run_dir: Path, rate_per_s: float) -> Path:
    """Nothing settles at this rate."""
    rows = pd.read_csv(run_dir / "results.csv")
    gone = (rows["metric"] == "goodput_per_s") & (rows["rate_per_s"] == rate_per_s)
    assert gone.any()
    rows[~gone].to_csv(run_dir / "results.csv", index=False)
    return run_dir


def _run(folder: Path, case: str) -> Path:
    def written(**kwargs: Any) -> Path:
        return write_run(folder, **{"requests": 20, **kwargs})

    if case == "results only":
        return written(optional=False)
    if case in ("closed loop", "no values", "no rows"):
        run_dir = written(rates=(8.0,))
        rows = pd.read_csv(run_dir / "results.csv")
        changed = {"closed loop": rows.assign(rate_per_s=math.nan), "no values": rows.assign(value=math.nan),
                   "no rows": rows.head(0)}[case]  # fmt: skip
        changed.to_csv(run_dir / "results.csv", index=False)
        for name in ("requests", "levels"):
            frame = pd.read_parquet(run_dir / f"{name}.parquet")
            frame.assign(rate_per_s=math.nan).to_parquet(run_dir / f"{name}.parquet", index=False)
        return run_dir
    return {
        "one rate": lambda: written(rates=(8.0,)),
        "one replica": lambda: written(replicas=1),
        "one strategy": lambda: written(servers=SERVERS[2:3]),
        "one request": lambda: written(requests=1),
        "two axes": lambda: written(rates=(4.0, 16.0), devices=(1, 2)),
        "two axes, one with no goodput": lambda: _without_goodput(
            written(rates=(4.0, 16.0), devices=(1, 2)), 16.0
        ),
        "devices": lambda: written(rates=(4.0,), devices=(1, 2, 4)),
    }[case]()


CASES = ("results only", "closed loop", "no values", "no rows", "one rate", "one replica", "one strategy",
         "one request", "two axes", "two axes, one with no goodput", "devices")  # fmt: skip


@pytest.mark.parametrize("case", first(1, CASES))
@slow
def test_a_page_comes_of_whatever_is_there(case: str, tmp_path: Path) -> None:
    page = reports.build(_run(tmp_path, case))
    plots = _data(page)["plots"]
    assert "NaN" not in json.dumps(plots)
    assert ">nan<" not in _words(page)
    for plot in plots.values():
        assert ",".join(map(str, plot["chosen"])) in plot["figures"]
    expected = {"closed loop": {"distributions", "levels"}, "devices": {"against-devices"},
                "two axes": {"against-devices", "against-rate_per_s"},
                "two axes, one with no goodput": {"against-devices", "against-rate_per_s"}}  # fmt: skip
    assert expected.get(case, set()) <= set(plots)


def test_an_axis_that_follows_from_another_is_none() -> None:
    rows = pd.DataFrame(
        {"rate_per_s": [4, 8, 4, 8], "devices": [1, 1, 2, 2], "requests": [40, 80, 40, 80],
         "prompt_tokens": [512.0] * 4, "output_tokens": [math.nan] * 4}
    )  # fmt: skip
    assert sections_serving.varied(rows) == ("rate_per_s", "devices")
    assert [sections_serving.point_text(p) for p in sections_serving.points(rows)][:2] == [
        "4\u00a0requests/s, 1 device",
        "4\u00a0requests/s, 2 devices",
    ]


@slow
def test_the_page_opens_on_the_heaviest_load_of_a_device(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, rates=(4.0, 16.0), devices=(1, 4), requests=10))
    _, point = sections_serving.Served(run).best
    assert sections_serving.point_text(point) == "16\u00a0requests/s, 1 device"


@thorough
def test_intervals_of_prices_are_a_table_of_their_own(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, rates=(8.0,), requests=10)
    rows = pd.read_csv(run_dir / "results.csv")
    by = rows[rows["metric"] == "ttft_p99_s"].assign(metric="ttft_p99_s_by_prices", low=0.001, high=9.0)
    pd.concat([rows, by]).to_csv(run_dir / "results.csv", index=False)
    assert "at the fast and at the slow end" in _words(reports.build(run_dir))


def test_a_value_of_a_csv_file_is_found_in_a_parquet_file() -> None:
    rows = pd.DataFrame({"rate_per_s": [0.1 + 0.2, math.nan]})
    assert len(sections_serving.at(rows, (("rate_per_s", 0.3),))) == 1
    assert len(sections_serving.at(rows, (("rate_per_s", math.nan),))) == 1


@thorough
def test_names_are_escaped_everywhere(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    server = type(SERVERS[0])("temporal_fusion", evil, 4, 0.01)
    page = reports.build(write_run(tmp_path, rates=(8.0,), requests=10, servers=[server]))
    assert "<script>alert" not in page.read_text(encoding="utf-8")
    names = {t["name"] for t in _data(page)["plots"]["tokens"]["figures"]["0,0"]["data"]}
    assert names == {"&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;"}


BROKEN = {
    "requests are text": ("requests.parquet", b"hello"),
    "requests are empty": ("requests.parquet", b""),
    "levels without columns": ("levels.parquet", pd.DataFrame({"a": [1]})),
    "words for numbers": ("levels.parquet", ("t_s", "soon")),
    "bytes for words": ("levels.parquet", ("label", b"\xff")),
    "nothing for words": ("requests.parquet", ("label", None)),
    "results of another study": ("results.csv", b"study,strategy,label,metric,value,low,high,unit,source\n"),
    "comparison without labels": ("comparison.csv", b"strategy,metric,reference,predicted,error_pct\n"),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_no_page_is_made_of_garbage(case: str, tmp_path: Path) -> None:
    name, content = BROKEN[case]
    path = write_run(tmp_path, rates=(8.0,), requests=5) / name
    if isinstance(content, tuple):
        content = pd.read_parquet(path).assign(**dict([content]))
    path.write_bytes(content) if isinstance(content, bytes) else content.to_parquet(path)
    with pytest.raises(ValueError, match=re.escape(name)) as raised:
        reports.build(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "report.html").exists()


def test_axes_are_logarithmic_where_values_span_decades() -> None:
    rows = pd.DataFrame(
        {"label": "a", "devices": [1, 64], "value": [0.01, 2.0], "low": math.nan, "high": math.nan}
    )
    scale = Scale("TTFT", "s")
    variant = Variant("a", "temporal_fusion", 1, "#155f9e", "circle")
    figure = figures_serving.against(rows, [variant], ("devices", "devices"), [1, 64], scale, str)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    near = figures_serving.against(
        rows.assign(value=[1.0, 2.0], devices=[1, 2]), [variant], ("devices", "devices"), [1, 2], scale, str
    )
    assert near.layout.yaxis.range[0] == 0


# -- measured ------------------------------------------------------------------------------------------


@thorough
def test_a_measured_page_claims_no_prediction(run_dir: Path, page: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cpu"
    shutil.copytree(run_dir, copy)
    (copy / "provenance.json").write_text('{"machine": "cpu", "threads": 1}', encoding="utf-8")
    # What prices at their ends make of a run is not there for a measured one.
    results = pd.read_csv(copy / "results.csv")
    results[~results["metric"].str.endswith("_by_prices")].to_csv(copy / "results.csv", index=False)
    text, predicted = (
        _words(p) + json.dumps(_data(p)["plots"], ensure_ascii=False) for p in (reports.build(copy), page)
    )
    assert "Of the predicted device time" in predicted
    assert "Of the device time" in text
    assert re.findall(r".{20}[Pp]redict.{20}", text.replace("Measured, not predicted, on cpu", "")) == []


@pytest.mark.parametrize("theme", [0, 1])
def test_what_becomes_of_a_request_has_a_colour_for_each_stage(theme: int) -> None:
    """Waiting, prompt and tokens differ by colour and in the key, whatever the strategy's own hue."""
    row = {"request": 0, "arrival_s": 0.0, "scheduled_s": 1.0, "first_token_s": 2.0, "finish_s": 4.0,
           "prompt_tokens": 8, "output_tokens": 4, "preemptions": 0, "status": "finished"}  # fmt: skip
    bars = figures_serving.gantt(pd.DataFrame([row])).data
    assert [(bar.name, bar.base[0], bar.x[0]) for bar in bars] == [
        ("waiting", 0.0, 1.0), ("prompt, to the first token", 1.0, 1.0), ("generating", 2.0, 2.0),
    ]  # fmt: skip
    dark = style.dark_partners()
    shown = [dark[bar.marker.color] if theme else bar.marker.color for bar in bars]
    lightness = [[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in shown]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert math.dist(lightness[one], lightness[other]) > 80
    assert all(bar.showlegend is not False for bar in bars)
