"""Reports of a study on several devices: what is compared is of one device, and the answer's place is shown.

The second device is twice as fast as the first in everything: whatever mixes them is off by a factor of two.
"""

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from simcore import reports
from simcore.reports.common.cases import at
from simcore.reports.common.figures import compared_place
from simcore.reports.decode import figures as figures_decode
from simcore.reports.decode import sections as sections_decode
from simcore.reports.operators import figures as figures_operators
from simcore.reports.operators import sections as sections_operators
from simcore.reports.run import Run, read_run
from simcore.reports.serving import sections as sections_serving
from simcore.reports.text import lasting, milliseconds
from tests.serving_run import write_run
from tests.thorough import slow

SLOW, FAST = "h100-sxm", "h200-sxm"
TIMES = {SLOW: 1.0, FAST: 0.5}
METHODS = {"flash_attention_2": "FlashAttention-2", "flash_decoding": "Flash-Decoding"}
# (batch, tokens) -> milliseconds of each method on the slow device.
PLACES = {(64, 1024): (1.0, 1.5), (1, 65536): (8.0, 2.0)}
Row = dict[str, Any]


def _attention_rows() -> list[Row]:
    rows = []
    for device, faster in TIMES.items():
        for (batch, tokens), taken in PLACES.items():
            for (method, name), took_ms in zip(METHODS.items(), taken, strict=True):
                sizes = {"batch": batch, "q_heads": 16, "kv_heads": 2, "head_dim": 128}
                axes = {"study": "decode_attention", "device": device, "strategy": method, "devices": 1,
                        "label": f"{name}, {device}", **sizes, "context_tokens": tokens}  # fmt: skip
                value = took_ms * 1e-3 * faster
                time = {"metric": "latency_s", "value": value, "unit": "s", "source": "measured: a table"}
                rows += [{**axes, **time}, {**axes, "metric": "out_of_memory", "value": 0.0}]
    return rows


def _attention_run(folder: Path, more: list[Row] | None = None, **summary: Any) -> Run:
    found = pd.DataFrame([*_attention_rows(), *(more or [])])
    columns = ["study", "device", "strategy", "label", "devices", "batch", "q_heads", "kv_heads", "head_dim",
               "context_tokens", "rival", "metric", "value", "low", "high", "unit", "source"]  # fmt: skip
    folder.mkdir()
    found.reindex(columns=columns).to_csv(folder / "results.csv", index=False)
    times = found[found["metric"] == "latency_s"]
    names = ["device", "strategy", "label", "batch", "context_tokens", "metric"]
    # Published are times that are a tenth longer.
    compared = times[names].assign(
        reference=times["value"] * 1.1, predicted=times["value"], error_pct=-100 / 11, role="measured",
        source="Table 1",
    )  # fmt: skip
    compared.to_csv(folder / "comparison.csv", index=False)
    fields = {"name": "two", "study": "decode_attention", "answer": "One is best.", **summary}
    (folder / "summary.json").write_text(json.dumps(fields), encoding="utf-8")
    return read_run(folder)


def test_places_of_both_devices_stand_with_their_own_times(tmp_path: Path) -> None:
    run = _attention_run(tmp_path / "run")
    table = sections_operators._side_by_side(sections_operators.Methods(run))
    assert table.head[:3] == ["place", "device", "FlashAttention-2"]
    assert [row[1] for row in table.rows] == [SLOW, SLOW, FAST, FAST]
    of_slow = next(row for row in table.rows if row[1] == SLOW and row[0].startswith("batch 1 "))
    of_fast = next(row for row in table.rows if row[1] == FAST and row[0].startswith("batch 1 "))
    assert of_slow[2:4] == [lasting(0.008), lasting(0.0088)]
    assert of_fast[2:4] == [lasting(0.004), lasting(0.0044)]


def test_published_times_stand_beside_those_of_their_device(tmp_path: Path) -> None:
    run = _attention_run(tmp_path / "run")
    of = sections_operators.Methods(run)
    for setting in of.settings:
        published = at(of.compared, setting)
        assert set(published["device"]) == {dict(setting)["device"]}
        assert len(published) == len(PLACES) * len(METHODS)


def test_errors_are_counted_by_method_and_device(tmp_path: Path) -> None:
    run = _attention_run(tmp_path / "run")
    (section,) = sections_operators._compared(sections_operators.Methods(run))
    assert section.table is not None
    assert [row[:2] for row in section.table.rows] == [
        [f"{name}, {device}", str(len(PLACES))] for name in METHODS.values() for device in TIMES
    ]
    rows = run.comparison
    figure = figures_operators.errors(rows, {"measured": "measured"}, lambda row: "here")
    assert [trace.name for trace in figure.data] == list(METHODS.values())
    hover = figure.data[0].hovertext
    assert all(row["label"] in text for row, text in zip(rows[rows["strategy"] == "flash_attention_2"]
               .to_dict("records"), hover, strict=True))  # fmt: skip


def test_a_method_is_ahead_of_the_other_on_one_device(tmp_path: Path) -> None:
    run = _attention_run(tmp_path / "run")
    tile = sections_operators._ahead(sections_operators.Methods(run))
    assert tile is not None
    assert tile.value == "4.00×"
    assert tile.means == f"Flash-Decoding, {SLOW} over FlashAttention-2, {SLOW}, at most"


def _not_ranked(method: str, tokens: int) -> list[Row]:
    return [
        {**row, "metric": "not_ranked", "value": 1.0}
        for row in _attention_rows()
        if row["metric"] == "latency_s" and row["strategy"] == method and row["context_tokens"] == tokens
    ]


def test_what_rows_say_is_not_ranked_is_not_ranked_there_alone(tmp_path: Path) -> None:
    """The text of the source says nothing of it; the row does."""
    run = _attention_run(tmp_path / "run", _not_ranked("flash_decoding", 65536))
    table = sections_operators._best_table(sections_operators.Methods(run))
    assert table.rows == [
        [
            "batch 64 × 1K",
            f"FlashAttention-2, {SLOW}, {lasting(0.001)}",
            f"FlashAttention-2, {FAST}, {lasting(0.0005)}",
        ],
        [
            "batch 1 × 64K",
            f"FlashAttention-2, {SLOW}, {lasting(0.008)}",
            f"FlashAttention-2, {FAST}, {lasting(0.004)}",
        ],
    ]
    ahead = sections_operators._ahead(sections_operators.Methods(run))
    assert ahead is not None
    assert ahead.value == "1.50×"


def test_a_device_that_is_not_ranked_still_has_a_fastest_method(tmp_path: Path) -> None:
    out = [f"{name}, {FAST}" for name in METHODS.values()]
    run = _attention_run(tmp_path / "run", unranked=out)
    table = sections_operators._best_table(sections_operators.Methods(run))
    assert [row[2] for row in table.rows] == [
        f"FlashAttention-2, {FAST}, {lasting(0.0005)}", f"Flash-Decoding, {FAST}, {lasting(0.001)}"
    ]  # fmt: skip
    fastest = sections_operators._fastest(sections_operators.Methods(run))
    assert fastest is not None
    assert fastest.where == f"Flash-Decoding, {SLOW}"


def test_the_fastest_is_told_where_the_answer_is(tmp_path: Path) -> None:
    run = _attention_run(tmp_path / "run", best_at={"context_tokens": 1024, "batch": 64})
    fastest = sections_operators._fastest(sections_operators.Methods(run))
    assert fastest is not None
    assert (fastest.value, fastest.where) == (lasting(0.0005), f"FlashAttention-2, {FAST}")


@slow
def test_the_page_of_two_devices_is_built(tmp_path: Path) -> None:
    _attention_run(tmp_path / "run")
    page = reports.build(tmp_path / "run").read_text(encoding="utf-8")
    assert f">{SLOW}<" in page
    assert SLOW.capitalize() not in page


# -- decode ----------------------------------------------------------------------------------------


def _decode_rows() -> pd.DataFrame:
    rows = []
    for device, faster in TIMES.items():
        for strategy, ranks, groups, rate, took_ms in (
            ("tensor_parallel", 4, 1, math.nan, 6.0),
            ("alspec", 2, 2, 0.5, 4.0),
            ("alspec", 2, 2, 0.875, 3.0),
        ):
            for context in (1024, 8192):
                taken = took_ms * 1e-3 * faster * (1 if context == 1024 else 2)
                rows.append({"study": "decode", "device": device, "strategy": strategy, "label":
                             f"{strategy}, {device}", "ranks": ranks, "groups": groups, "devices": 4,
                             "context_tokens": context, "batch": 1, "hit_rate": rate, "op_kind": "",
                             "metric": "token_latency_s", "value": taken, "low": math.nan, "high": math.nan,
                             "unit": "s", "source": "measured"})  # fmt: skip
    return pd.DataFrame(rows)


def _decode_run(folder: Path, **summary: Any) -> Run:
    folder.mkdir()
    _decode_rows().to_csv(folder / "results.csv", index=False)
    fields = {"name": "two", "study": "decode", "answer": "One is best.", **summary}
    (folder / "summary.json").write_text(json.dumps(fields), encoding="utf-8")
    return read_run(folder)


def test_speculation_is_compared_on_the_same_device(tmp_path: Path) -> None:
    run = _decode_run(tmp_path / "run")
    ratio = figures_decode.same_devices_ratio(run.metric("token_latency_s"))
    assert len(ratio) == 8
    assert sorted(ratio["ratio"].unique().round(9)) == [1.5, 2.0]
    gain = sections_decode._gain(run)
    assert gain is not None
    assert gain.value == "2.00×"
    figures = [next(iter(plot.figures.values())) for plot in sections_decode._maps(run)]
    cells = [value for figure in figures for line in figure.data[0].customdata for value in line]
    assert sorted(round(value, 9) for value in cells) == [1.5] * 4 + [2.0] * 4


def test_the_decode_page_is_about_the_place_of_the_answer(tmp_path: Path) -> None:
    run = _decode_run(tmp_path / "run", best_at={"context_tokens": 1024, "batch": 1})
    tiles = {tile.means: tile for tile in sections_decode.opening(run).tiles}
    assert tiles["Fastest token at 1K tokens"].value == milliseconds(0.0015)


def test_a_compared_figure_without_label_has_its_device() -> None:
    axes = ("ranks", "groups", "devices", "context_tokens", "hit_rate", "rate_per_s", "requests")
    row = pd.Series(dict.fromkeys((*axes, "prompt_tokens", "output_tokens"), math.nan), dtype=object)
    row["label"], row["strategy"], row["device"] = "", "tensor_parallel", FAST
    assert compared_place(row)[1] == FAST


# -- serving ---------------------------------------------------------------------------------------


@slow
def test_the_serving_page_is_about_the_place_of_the_answer(tmp_path: Path) -> None:
    """Heavier loads that only one device manages are not what the answer is about."""
    folder = write_run(tmp_path / "sim", requests=40)
    label = str(read_run(folder).results["label"].iloc[0])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    first = read_run(folder).results.iloc[0]
    axes = ("devices", "requests", "prompt_tokens", "output_tokens")
    summary |= {"best": label, "best_at": {"rate_per_s": 4.0, **{name: float(first[name]) for name in axes}}}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    run = read_run(folder)
    found, point = sections_serving.Served(run).best
    assert (found, dict(point)["rate_per_s"]) == (label, 4.0)
    assert (
        dict(sections_serving.heaviest(run.results, sections_serving.points(run.results)))["rate_per_s"]
        == 16.0
    )


@pytest.mark.parametrize("value", ["fast", True, [1]])
def test_a_place_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError, match=r"summary\.json: best_at 'batch' is no number"):
        _decode_run(tmp_path / "run", best_at={"batch": value})
