"""The report of the tiling study and of a validation: figures and sentences say what the files hold.

The run directory is made here, with the files and columns of the study; its times are formulas and predict
nothing: lazy pays t at position t, eager L - t, Algorithm 1 a tile of the side that divides t.
"""

import base64
import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from plotly.offline import get_plotlyjs

from simcore import reports
from simcore.reports import style
from simcore.reports.common.figures import Variant
from simcore.reports.run import read_run
from simcore.reports.tiling import figures as figures_tiling
from simcore.reports.tiling import sections as sections_tiling
from simcore.reports.validation import sections as sections_validation
from tests.thorough import first, slow, thorough

SMALL = 32
IMPLEMENTATIONS = ("conv", "flash_conv", "fft", "flash_fft")
VARIANTS = (
    ("lazy", "lazy"),
    ("lazy", "lazy, layer by layer"),
    ("eager", "eager"),
    ("fractal", "fractal, flash_conv"),
    ("fractal", "fractal, flash_fft"),
    ("fractal", "fractal, hybrid"),
    ("fractal", "fractal, hybrid, half stored"),
    ("relaxed", "relaxed"),
)
COLUMNS = ("study", "strategy", "label", "layers", "channels", "block", "tokens", "prompt_tokens", "batch",
           "devices", "metric", "op_kind", "value", "low", "high", "unit", "source")  # fmt: skip
Case = dict[str, Any]


def _tile_s(implementation: str, side: int, case: Case) -> float:
    """Seconds of one tile of all layers: the direct ways grow with the square of the side, FFTs do not."""
    lanes = case["layers"] * case["batch"] * case["channels"]
    unit = {"conv": 3e-6, "flash_conv": 2e-6, "fft": 4e-5, "flash_fft": 3e-5}[implementation]
    if implementation.endswith("conv"):
        return float(unit + lanes * side * side * 4e-14 * (1 + (implementation == "conv")))
    return float(unit + lanes * side * (2 + math.log2(side)) * 3e-12 * (1 + (implementation == "fft")))


def _cheapest(side: int, case: Case) -> str:
    return min(IMPLEMENTATIONS, key=lambda name: _tile_s(name, side, case))


def _mixer_s(label: str, t: int, case: Case) -> float:
    row = case["layers"] * case["batch"] * case["channels"] * 2e-12
    if label.startswith("lazy"):
        return float((1e-5 if label == "lazy" else 6e-5) + row * t)
    if label == "eager":
        return float(1e-5 + row * (case["tokens"] - t))
    side = (t + 1) & -(t + 1)
    name = next((n for n in IMPLEMENTATIONS if label.endswith(n)), _cheapest(side, case))
    return _tile_s(name, side, case) * (2 if label == "relaxed" else 1)


def _latencies(label: str, case: Case) -> np.ndarray[Any, Any]:
    return _known_latencies(label, tuple(case.items()))


@cache
def _known_latencies(label: str, items: tuple[tuple[str, Any], ...]) -> np.ndarray[Any, Any]:
    case = dict(items)
    block = case["layers"] * 1.2e-5
    return np.array([block + _mixer_s(label, t, case) for t in range(case["tokens"])])


def _work(label: str, tokens: int, case: Case) -> float:
    lanes = float(case["layers"] * case["batch"] * case["channels"])
    return lanes * (tokens * (tokens + 1.0) if label[0] in "le" else tokens * 12 * math.log2(tokens) ** 2)


def _case_rows(label: str, strategy: str, case: Case) -> list[dict[str, Any]]:
    latency, lazy = _latencies(label, case), _latencies("lazy", case)
    block = case["layers"] * 1.2e-5 * case["tokens"]
    total, mixer = latency.sum(), latency.sum() - block
    spread = {"low": 0.9, "high": 1.2}
    figures: list[tuple[str, str, float, dict[str, float]]] = [
        ("total_s", "", total * 1.02, spread),
        ("mixer_s", "", mixer, {}),
        ("block_s", "", block, {}),
        ("token_p50_s", "", float(np.median(latency)), {}),
        ("token_max_s", "", latency.max(), {}),
        ("tokens_per_s", "", case["tokens"] * case["batch"] / total, {}),
        ("speedup_over_lazy", "", lazy.sum() / total, spread),
        ("mixer_speedup_over_lazy", "", (lazy.sum() - block) / mixer, spread),
        ("mixer_flops", "", _work(label, case["tokens"], case), {}),
        ("memory_bytes", "", 2.0e6 * case["tokens"] / (2 if "half" in label else 1), {}),
        ("launches", "", 2.0 * case["tokens"], {}),
        ("seconds", "matmul", block, {}),
        ("seconds", "conv_cell", mixer, {}),
    ]
    axes = {"study": "tiling", "strategy": strategy, "label": label, **case, "prompt_tokens": 0, "devices": 1}
    return [
        {**axes, "block": "mlp", "metric": metric, "op_kind": kind, "value": value, "unit": "", "source": "",
         **{end: value * share for end, share in ends.items()}}
        for metric, kind, value, ends in figures
    ]  # fmt: skip


def _areas(label: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int] | None, tuple[int, int]]]:
    """(op kind, inputs, outputs or None, distances) of 32 positions, in the order of launches."""
    for t in range(SMALL):
        side, here = (t + 1) & -(t + 1), (t, t)
        if label.startswith("lazy") and t:
            yield "conv_row", (0, t - 1), here, (0, 0)
        yield "conv_cell", here, here, (0, 0)
        if label == "eager" and t + 1 < SMALL:
            yield "conv_column", here, (t + 1, SMALL - 1), (0, 0)
        if label.startswith("fractal") and t + 1 < SMALL:
            yield "tile_flash_conv", (t + 1 - side, t), (t + 1, min(SMALL - 1, t + side)), (0, 0)
        if label == "relaxed" and t:
            yield "relaxed_tile", (0, t - 1), None, (SMALL - t, SMALL - t)


def cells(labels: Sequence[str]) -> pd.DataFrame:
    """cells.parquet of the study."""
    rows = []
    for label in labels:
        for launch, (kind, inputs, outputs, lags) in enumerate(_areas(label)):
            to = outputs or (math.nan, math.nan)
            apart = (math.nan, math.nan) if outputs else lags
            places = ("first_input", "last_input", "first_output", "last_output", "first_lag", "last_lag")
            area = dict(zip(places, (*inputs, *to, *apart), strict=True))
            rows.append({"label": label, "launch": launch, "graph": f"graph {launch}", "op_kind": kind,
                         "layer": 1, **area, "start_s": launch * 1e-5})  # fmt: skip
    return pd.DataFrame(rows)


def _steps(label: str, case: Case) -> pd.DataFrame:
    latency = _latencies(label, case)
    frame = pd.DataFrame({"token": range(len(latency)), "end_s": latency.cumsum(), "latency_s": latency})
    return frame.assign(label=label, **case)


def _tiles(case: Case) -> Iterator[dict[str, Any]]:
    side = 1
    while side < case["tokens"]:
        for name in IMPLEMENTATIONS:
            seconds = _tile_s(name, side, case)
            ends = {"low_s": 0.9 * seconds, "high_s": 1.1 * seconds}
            chosen = name == _cheapest(side, case)
            yield {**case, "side": side, "implementation": name, "seconds": seconds, **ends, "chosen": chosen}
        side *= 2


def _growth(label: str, case: Case) -> Iterator[dict[str, Any]]:
    tokens = 256
    while tokens <= 131072:
        work = _work(label, tokens, case)
        yield {**case, "label": label, "tokens": tokens, "mixer_flops": work, "mixer_hbm_bytes": work * 2,
               "memory_bytes": 2e6 * tokens, "total_s": 1e-3 * tokens + work * 1e-13}  # fmt: skip
        tokens *= 2


SUMMARY: dict[str, Any] = {
    "name": "flash inference",
    "study": "tiling",
    "answer": "fractal, hybrid is fastest: it does small tiles directly and large ones by FFT.",
    "notes": ["Synthetic numbers."],
    "warnings": ["Prices of FFTs are extrapolated."],
    "price_shares": {"roofline": 0.9, "assumed": 0.1},
}
SCENARIO = "name: flash inference\nstudy: tiling\ndevice: a100-sxm-80gb\nbatch: [1, 8]\ntokens: 512\n"


def comparison() -> pd.DataFrame:
    """Two predictions of which a range is published, one of them outside."""
    place = {"strategy": "fractal", "label": "fractal, hybrid", "layers": 18, "channels": 256, "tokens": 512}
    figures = [
        {"batch": 1, "reference": 3.0, "predicted": 3.3, "error_pct": 10.0, "role": "measured"},
        {"batch": 8, "reference": 3.0, "predicted": 3.0, "error_pct": 0.0, "role": "measured"},
    ]
    ends = {"reference_low": 1.5, "reference_high": 3.0}
    more = {**ends, "metric": "speedup_over_lazy", "source": "Figure 2"}
    rows = [{**place, **figure, **more} for figure in figures]
    return pd.DataFrame(rows)


def write_run(
    run_dir: Path,
    *,
    batches: Sequence[int] = (1, 8),
    layers: Sequence[int] = (18,),
    tokens: int = 512,
    variants: Sequence[tuple[str, str]] = VARIANTS,
    optional: bool = True,
) -> Path:
    """A run directory as the tiling study leaves it; `optional` False: results and summary only."""
    cases = [{"layers": m, "channels": 256, "tokens": tokens, "batch": b} for m in layers for b in batches]
    rows = [
        row for case in cases for strategy, label in variants for row in _case_rows(label, strategy, case)
    ]
    run_dir.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows, columns=COLUMNS).to_csv(run_dir / "results.csv", index=False)
    (run_dir / "summary.json").write_text(json.dumps(SUMMARY), encoding="utf-8")
    if optional:
        labels = [label for _, label in variants]
        cells(labels).to_parquet(run_dir / "cells.parquet")
        steps = [_steps(label, case) for case in cases for label in labels]
        pd.concat(steps).to_parquet(run_dir / "steps.parquet")
        pd.DataFrame([t for case in cases for t in _tiles(case)]).to_parquet(run_dir / "tiles.parquet")
        growth = [row for case in cases for label in labels for row in _growth(label, case)]
        pd.DataFrame(growth).to_parquet(run_dir / "growth.parquet")
        comparison().to_csv(run_dir / "comparison.csv", index=False)
        (run_dir / "scenario.yaml").write_text(SCENARIO, encoding="utf-8")
        (run_dir / "provenance.json").write_text(json.dumps({"seed": 1}), encoding="utf-8")
    return run_dir


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reports.build(write_run(tmp_path_factory.mktemp("run") / "sim"))


def _data(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found.group(1))
    return data


def _text(page: Path) -> str:
    own = page.read_text(encoding="utf-8").replace(get_plotlyjs(), "")
    return re.sub(r"<script.*?</script>", "", own, flags=re.DOTALL)


def _traces(page: Path, plot: str, chosen: str) -> dict[str, Any]:
    figure = _data(page)["plots"][plot]["figures"][chosen]
    return {trace.get("name", ""): trace for trace in figure["data"]}


def _numbers(values: Any) -> np.ndarray[Any, Any]:
    if isinstance(values, dict):
        return np.frombuffer(base64.b64decode(values["bdata"]), dtype=values["dtype"])
    return np.asarray(values, dtype=float)


# -- the page --------------------------------------------------------------------------------------


def test_sections_stand_in_the_order_of_the_argument(everything: Path) -> None:
    keys = re.findall(r'<section id="([^"]+)"', _text(everything))
    assert keys == ["triangle", "cumulative", "latency", "tiles", "shares", "sweep", "growth", "figures",
                    "published", "prices", "run"]  # fmt: skip


def test_key_figures_are_of_the_largest_case(everything: Path, tmp_path: Path) -> None:
    run = read_run(everything.parent)
    tiles = {tile.means: tile for tile in sections_tiling.opening(run).tiles}
    rows = run.results[(run.results["batch"] == 8) & (run.results["label"] == "fractal, hybrid")]
    value = rows.loc[rows["metric"] == "speedup_over_lazy", "value"].iloc[0]
    assert tiles["Speed-up over lazy, end to end"].value == f"{value:.2f}×"
    assert tiles["Time of the whole generation"].where == "fractal, hybrid, batch\u00a08"
    assert tiles["Speed-ups inside the published 1.5 to 3×"].value == "1 of 2"
    alone = read_run(write_run(tmp_path, batches=(1,), optional=False))
    assert sections_tiling.opening(alone).tiles[0].where == "fractal, hybrid"


def test_the_page_opens_on_a_case_that_every_strategy_has(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, tokens=64, variants=VARIANTS[:6:5])
    rows = pd.read_csv(run_dir / "results.csv")
    rows[(rows["batch"] == 1) | (rows["label"] == "lazy")].to_csv(run_dir / "results.csv", index=False)
    opening = sections_tiling.opening(read_run(run_dir))
    assert opening.tiles[0].where == "fractal, hybrid, batch\u00a01"


@thorough
def test_same_directory_same_bytes_and_nothing_is_loaded(everything: Path, tmp_path: Path) -> None:
    assert reports.build(write_run(tmp_path / "again")).read_bytes() == everything.read_bytes()
    assert not re.findall(r"https?://|@import|url\(", _text(everything))


def test_every_colour_of_a_figure_has_a_dark_partner(everything: Path) -> None:
    data = _data(everything)
    used = set(re.findall(r'"(#[0-9a-f]{6}|rgba\([^)]*\))"', json.dumps(data["plots"])))
    assert used - {"rgba(0,0,0,0)"} <= set(data["dark"])


# -- the triangle ----------------------------------------------------------------------------------


def _covered(figure: Any) -> np.ndarray[Any, Any]:
    """How many areas cover the middle of each square: crossings of a ray from there, an odd number inside."""
    count = np.zeros((SMALL, SMALL), dtype=int)
    for trace in figure["data"]:
        if trace["type"] != "scatter":
            continue
        x, y = np.asarray(trace["x"]), np.asarray(trace["y"])
        i, j = np.indices(count.shape)[..., None]
        upright = (x == np.roll(x, -1)) & (x > i)
        between = (np.minimum(y, np.roll(y, -1)) < j) & (np.maximum(y, np.roll(y, -1)) > j)
        count += (upright & between).sum(axis=-1) % 2
    return count


@pytest.mark.parametrize("label", ["lazy", "eager", "fractal, hybrid"])
def test_areas_cover_every_contribution_once(label: str) -> None:
    inputs, outputs = np.indices((SMALL, SMALL))
    figure = figures_tiling.triangle(cells([label])).to_plotly_json()
    assert (_covered(figure) == (inputs <= outputs)).all()


def test_parallelograms_end_with_the_last_output() -> None:
    cell = {"first_input": 2, "last_input": 6, "first_lag": 1, "last_lag": 3}
    x, y = figures_tiling.outline(cell, last=7)
    inputs, outputs = np.indices((SMALL, SMALL))
    wanted = (
        (inputs >= 2) & (inputs <= 6) & (outputs - inputs >= 1) & (outputs - inputs <= 3) & (outputs <= 7)
    )
    assert (_covered({"data": [{"type": "scatter", "x": x, "y": y}]}) == wanted).all()


def test_hovering_names_the_launch(everything: Path) -> None:
    figures = [p["figures"][""] for k, p in _data(everything)["plots"].items() if k.startswith("triangle")]
    said = [trace["text"] for figure in figures for trace in figure["data"] if "text" in trace]
    assert any("launch 31: graph 31" in text and "side 16<br>inputs 0 to 15 to outputs 16 to 31" in text
               for text in said)  # fmt: skip
    assert any("to the positions 30 later" in text for text in said)


def test_tiles_are_told_apart_by_their_side() -> None:
    kinds = [figures_tiling.kind_of("tile_fft", side) for side in (1, 2, 4, 8, 16)]
    assert len({kind.colour for kind in kinds}) == 5
    assert figures_tiling.kind_of("conv_cell", 1).colour not in {kind.colour for kind in kinds}


# -- over positions --------------------------------------------------------------------------------


def test_time_by_position_ends_with_the_whole_generation(everything: Path) -> None:
    case = {"layers": 18, "channels": 256, "tokens": 512, "batch": 8}
    lines = _traces(everything, "cumulative", "1")
    assert len(lines) == len(VARIANTS)
    for label, line in lines.items():
        assert _numbers(line["x"])[-1] == 511
        assert _numbers(line["y"])[-1] == pytest.approx(_latencies(label, case).sum() * 1e3, rel=1e-5)


def test_thinned_latencies_keep_the_slowest_token_of_every_stretch() -> None:
    case = {"layers": 18, "channels": 256, "tokens": 1024, "batch": 8}
    steps = _steps("fractal, fft", case)
    variant = Variant("fractal, fft", "fractal", 1, style.BLUE[3][0], "diamond")
    figure = figures_tiling.latency_over_position(steps, [variant], most=64)
    latency = steps["latency_s"].to_numpy().reshape(64, 16)
    assert np.asarray(figure.data[0].y) == pytest.approx(latency.max(axis=1) * 1e3, rel=1e-6)
    assert figure.layout.yaxis.type == "log"


@thorough
def test_strategies_that_cover_alike_share_a_triangle(tmp_path: Path) -> None:
    write_run(tmp_path, batches=(1,), tokens=64, variants=VARIANTS[2:6])
    rows = cells([label for _, label in VARIANTS[2:6]])
    carried = (rows["label"] == "fractal, hybrid") & (rows["launch"] == 31)
    rows.assign(op_kind=rows["op_kind"].where(~carried, "conv_carry")).to_parquet(tmp_path / "cells.parquet")
    section = sections_tiling.sections(read_run(tmp_path))[0]
    assert [plot.heading for plot in section.plots] == [
        f"{name}: 63 launches with mixer work"
        for name in ("eager", "fractal, flash_conv; flash_fft", "fractal, hybrid")
    ]


def test_marks_are_hollow_outside_the_published_range(everything: Path) -> None:
    marks = _traces(everything, "ranges", "")["predicted"]
    assert marks["x"] == [3.3, 3.0]
    assert [colour == style.HOLLOW[0] for colour in marks["marker"]["color"]] == [True, False]
    assert "the range that the paper states: end to end 1 of 2." in _text(everything)


# -- tiles, shares, growth, sweeps -----------------------------------------------------------------


def test_front_is_the_cheapest_and_rings_are_what_hybrid_takes(everything: Path) -> None:
    traces = _traces(everything, "tiles", "0")
    case = {"layers": 18, "channels": 256, "tokens": 512, "batch": 1}
    sides = [2**i for i in range(9)]
    cheapest = [_tile_s(_cheapest(side, case), side, case) * 1e3 for side in sides]
    assert traces["Pareto front"]["x"] == sides
    assert traces["Pareto front"]["y"] == pytest.approx(cheapest)
    assert traces["taken by hybrid"]["y"] == pytest.approx(cheapest)


def test_stretches_of_hybrid_are_put_in_words() -> None:
    tiles = pd.DataFrame(
        {"side": [1, 2, 4, 8], "implementation": ["a", "a", "b", "b"], "chosen": [1, 1, 1, 0]}
    )
    assert sections_tiling._choices(tiles) == "a from side 1 to 2, b at side 4"


def test_shares_sum_to_the_whole(everything: Path) -> None:
    figure = _data(everything)["plots"]["shares"]["figures"]["1"]
    bars = [trace for trace in figure["data"] if trace["type"] == "bar"]
    assert [bar["name"] for bar in bars] == ["mixer", "blocks", "waiting for the host"]
    run = read_run(everything.parent)
    rows = run.metric("total_s")
    totals = rows[rows["batch"] == 8].set_index("label")["value"]
    shown = [v.label for v in figures_tiling.variants(run.results)]
    wanted = [totals[label] * 1e3 for label in shown]
    assert np.sum([bar["x"] for bar in bars], axis=0) == pytest.approx(wanted)
    assert figure["layout"]["xaxis"]["title"]["text"].endswith("(ms)")


def test_speed_ups_have_the_intervals_of_the_prices(everything: Path) -> None:
    mark = _traces(everything, "speed-ups", "1")["mixer only"]
    x = np.asarray(mark["x"])
    assert np.asarray(mark["error_x"]["array"]) == pytest.approx(x * 0.2)
    assert np.asarray(mark["error_x"]["arrayminus"]) == pytest.approx(x * 0.1)


def test_slopes_are_those_of_long_texts(everything: Path) -> None:
    lengths = [2.0**i for i in range(8, 18)]
    assert sections_tiling.slope(lengths, [n**2 for n in lengths]) == pytest.approx(2.0)
    bent = [n if n < 1024 else n**3 / 1024**2 for n in lengths]
    assert sections_tiling.slope(lengths, bent) == pytest.approx(3.0)
    assert sections_tiling.slope([256.0, 512.0], [1.0, 2.0]) == pytest.approx(1.0)
    assert math.isnan(sections_tiling.slope([256.0], [1.0]))
    section = _text(everything).split('<section id="growth"')[1]
    lazy = next(line for line in section.split("<tr>") if ">lazy</td>" in line)
    assert re.findall(r">([\d.]+)</td>", lazy)[:2] == ["2.000", "2.000"]


@thorough
def test_every_case_of_a_sweep_has_its_number(tmp_path: Path) -> None:
    page = reports.build(
        write_run(
            tmp_path, batches=(1, 2), layers=(18, 36), tokens=256, variants=VARIANTS[4:6] + VARIANTS[:1]
        )
    )
    shown = [v.label for v in figures_tiling.variants(read_run(tmp_path).results) if v.label != "lazy"]
    plot = _data(page)["plots"]["sweep"]
    assert plot["chosen"] == [0, shown.index("fractal, hybrid")]
    figure = plot["figures"][f"0,{shown.index('fractal, hybrid')}"]
    rows = read_run(tmp_path).metric("speedup_over_lazy").query("label == 'fractal, hybrid'")
    wanted = rows.sort_values(["layers", "batch"])["value"].to_numpy().reshape(2, 2)
    assert np.asarray(figure["data"][0]["z"]) == pytest.approx(np.log2(wanted))
    assert figure["layout"]["yaxis"]["ticktext"] == ["18 layers", "36 layers"]


# -- what may be missing ---------------------------------------------------------------------------


@pytest.mark.parametrize("missing", first(2, ["", "all", "steps", "tiles", "cells", "growth"]))
@slow
def test_a_page_comes_of_whatever_is_there(missing: str, tmp_path: Path) -> None:
    write_run(tmp_path, batches=(1,), tokens=64, variants=VARIANTS[:3], optional=missing != "all")
    if missing and missing != "all":
        (tmp_path / f"{missing}.parquet").unlink()
    page = reports.build(tmp_path)
    text = json.dumps(_data(page)["plots"])
    assert "NaN" not in text
    assert ">nan<" not in _text(page)
    assert SUMMARY["answer"] in _text(page)
    sections = {"steps": "cumulative", "tiles": "tiles", "cells": "triangle", "growth": "growth"}
    for name, key in sections.items():
        assert (f'<section id="{key}"' in _text(page)) == (missing not in (name, "all"))


@pytest.mark.parametrize("name", ["steps", "tiles", "cells", "growth"])
def test_no_page_is_made_of_garbage(name: str, tmp_path: Path) -> None:
    write_run(tmp_path, batches=(1,), tokens=64)
    pd.DataFrame({"a": [1]}).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=rf"{name}\.parquet: has no"):
        reports.build(tmp_path)


# -- a validation ----------------------------------------------------------------------------------

LADDER = pd.DataFrame(
    [
        ("0", "all", "kernels in fp32", 40, 1e-12, 2e-12, 3e-12, 1e-6, True),
        ("0", "matmul", "fp32", 40, 1e-12, 2e-12, 3e-12, None, None),
        ("1", "all", "held-out shapes", 12, 8.0, 20.0, 31.0, 30.0, True),
        ("2", "all", "times and rates", 1, 4.0, 4.0, 4.0, 30.0, True),
        ("3", "all", "times and rates", 1, 61.0, 61.0, 61.0, 50.0, False),
        ("3", "lazy", "times and rates", 1, 61.0, 61.0, 61.0, None, None),
    ],
    columns=["rung", "label", "what", "n", "median_pct", "p95_pct", "worst_pct", "bound_pct", "passed"],
)


def _validated(run_dir: Path, ladder: pd.DataFrame) -> Path:
    ladder.to_csv(run_dir / "ladder.csv", index=False)
    return reports.build(run_dir)


def test_a_ladder_alone_is_a_page(tmp_path: Path) -> None:
    page = _validated(tmp_path, LADDER)
    text = _text(page)
    assert "Not within its bounds: rung 3 end to end." in text
    assert "times and rates misses its bound of 50.0\u00a0% with median 61.0\u00a0%." in text
    assert ">matmul, fp32</td>" in text.split("What each rung is made of")[1]
    words = re.findall(r">(passed|failed)</td>", text)
    assert words == ["passed", "passed", "passed", "failed"]
    bars = _traces(page, "ladder", "")
    assert bars["failed"]["x"] == pytest.approx([122.0])
    assert bars["passed"]["marker"]["color"] != bars["failed"]["marker"]["color"]
    assert bars["worst"]["x"] == pytest.approx([3e-4, 100 * 31 / 30, 100 * 4 / 30, 122.0])


def test_a_ladder_that_holds_says_so(tmp_path: Path) -> None:
    text = _text(_validated(tmp_path, LADDER.head(4)))
    assert "All 3 rungs of the ladder hold" in text
    assert "misses its bound" not in text


@slow
def test_predicted_stands_beside_measured(tmp_path: Path) -> None:
    rows = comparison().drop(columns=["reference_low", "reference_high"])
    rows = rows.assign(metric="total_s", role="measured on this machine", reference=[2.0, 0.5])
    rows = rows.assign(predicted=[3.0, 0.4])
    write_run(tmp_path, batches=(1,), tokens=64, optional=False)
    rows.to_csv(tmp_path / "comparison.csv", index=False)
    page = _validated(tmp_path, LADDER)
    bars = _traces(page, "measured", "0")
    names = _data(page)["plots"]["measured"]["figures"]["0"]["layout"]["yaxis"]["ticktext"]
    assert names == ["fractal,<br>hybrid, batch 1", "fractal,<br>hybrid, batch 8"]
    assert '<section id="published"' not in _text(page)
    assert bars["predicted"]["x"] == pytest.approx([3.0, 0.4])
    assert bars["measured"]["x"] == pytest.approx([2.0, 0.5])


@pytest.mark.parametrize("content", ["a,b\n1,2\n", LADDER.to_csv(index=False).replace("True", "perhaps", 1)])
def test_no_ladder_is_made_of_garbage(content: str, tmp_path: Path) -> None:
    (tmp_path / "ladder.csv").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"ladder\.csv"):
        reports.build(tmp_path)


def test_an_infinite_error_fails_and_is_no_number(tmp_path: Path) -> None:
    ladder = LADDER.head(1).assign(median_pct=np.inf, p95_pct=np.inf, worst_pct=np.inf, passed=False)
    text = _text(_validated(tmp_path, ladder))
    assert "kernels in fp32 misses its bound of 1.0e−06\u00a0% with an error that is no number." in text


def test_small_errors_are_not_rounded_to_zero() -> None:
    assert sections_validation._pct(3e-12) == "3.0e−12\u00a0%"
    assert sections_validation._pct(0.0) == "0\u00a0%"


# -- measured ------------------------------------------------------------------------------------------


@thorough
def test_a_measured_page_predicts_tiles_alone(everything: Path, tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, batches=(1, 8))
    made = {"machine": "cpu", "threads": 1, "profile": {"name": "local"}}
    (run_dir / "provenance.json").write_text(json.dumps(made), encoding="utf-8")
    page = reports.build(run_dir)
    text, predicted = (
        _text(p) + json.dumps(_data(p)["plots"], ensure_ascii=False) for p in (page, everything)
    )
    for claim in ("by the prices of this run", "prices at either end", "prices at the ends", "the predicted"):
        assert claim in predicted
        assert claim not in text
    for own in ("Measured, not predicted, on cpu", "is predicted to cost", sections_tiling.PREDICTED_TILES):
        assert own in text
        assert own not in predicted
        text = text.replace(own, "")
    assert re.findall(r".{20}[Pp]redict.{20}", text) == []
    assert "by the prices of the profile local" in text
    assert "the speed-up of the slowest and the fastest runs" in text


@thorough
def test_in_a_ladder_nothing_measured_passes_for_published(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, batches=(1,))
    (run_dir / "provenance.json").write_text('{"machine": "cpu"}', encoding="utf-8")
    text = _text(_validated(run_dir, LADDER))
    assert "python -m simcore validate scenario.yaml --on cpu" in text
    assert "Predicted beside measured" in text
    assert "published" not in text.replace("published: []", "")
