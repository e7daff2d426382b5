"""Predicted figures beside the measured ones of a validation: in the same axes, each under its own name."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from simcore import reports, rundir
from simcore.machine.trace import Trace
from simcore.reports.common.beside import beside, names_in_pairs, pairs
from simcore.reports.common.figures import variants
from simcore.reports.run import read_run
from simcore.reports.serving import sections as sections_serving
from simcore.reports.tiling import sections as sections_tiling
from simcore.studies.common import Outcome
from tests import serving_run, test_report_tiling
from tests.thorough import slow

LABEL = serving_run.SERVERS[0].label
FASTER = 0.5
OF_SERVING, OF_TILING = ("requests", "levels"), ("steps",)


def predicted(run_dir: Path, tables: tuple[str, ...], times: tuple[str, ...]) -> Path:
    """A copy of a run as measured, beside which everything is predicted to take half of the time."""
    copy = run_dir.parent / "beside"
    shutil.copytree(run_dir, copy)
    (copy / "provenance.json").write_text('{"machine": "cpu"}', encoding="utf-8")
    results = pd.read_csv(copy / "results.csv")
    seconds = results["metric"].str.endswith("_s") & ~results["metric"].str.endswith("_per_s")
    results.loc[seconds, ["value", "low", "high"]] *= FASTER
    results.to_csv(copy / "predicted_results.csv", index=False)
    for name in tables:
        rows = pd.read_parquet(copy / f"{name}.parquet")
        found = {column: rows[column] * FASTER for column in times if column in rows.columns}
        rows.assign(**found).to_parquet(copy / f"predicted_{name}.parquet")
    return copy


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("serving") / "run"
    return serving_run.write_run(run_dir, rates=(4.0, 8.0), requests=24, replicas=1)


@pytest.fixture(scope="module")
def served_beside(served: Path) -> Path:
    times = ("t_s", "arrival_s", "scheduled_s", "first_token_s", "finish_s")
    copy = predicted(served, OF_SERVING, times)
    # What is predicted of tokens is another number, so that neither line passes for the other.
    levels = pd.read_parquet(copy / "predicted_levels.parquet")
    levels.assign(tokens=levels["tokens"] + 7).to_parquet(copy / "predicted_levels.parquet")
    return copy


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_report_tiling.write_run(tmp_path_factory.mktemp("tiling") / "run")


@pytest.fixture(scope="module")
def tiled_beside(tiled: Path) -> Path:
    return predicted(tiled, OF_TILING, ("end_s", "latency_s"))


@pytest.fixture(scope="module")
def of_served(served: Path) -> list[Any]:
    return sections_serving.sections(read_run(served))


@pytest.fixture(scope="module")
def of_served_beside(served_beside: Path) -> list[Any]:
    return sections_serving.sections(read_run(served_beside))


@pytest.fixture(scope="module")
def of_tiled_beside(tiled_beside: Path) -> list[Any]:
    return sections_tiling.sections(read_run(tiled_beside))


def drawn(sections: list[Any], key: str, chosen: tuple[int, ...]) -> Mapping[str, Any]:
    """The traces of a plot with an entry in the key, by name."""
    figure = next(p for s in sections for p in s.plots if p.key == key).figures[chosen]
    return {trace.name: trace for trace in figure.data if trace.showlegend is not False}


# -- serving ---------------------------------------------------------------------------------------


def test_the_predicted_line_ends_with_the_predicted_tokens(
    served_beside: Path, of_served_beside: list[Any]
) -> None:
    found = drawn(of_served_beside, "tokens", (0, 1))
    assert len(found) == 2 * len(serving_run.SERVERS)
    for word, name in (("measured", "levels"), ("predicted", "predicted_levels")):
        levels = pd.read_parquet(served_beside / f"{name}.parquet")
        own = levels[(levels["label"] == LABEL) & (levels["rate_per_s"] == 8.0)]
        line = found[f"{LABEL}, {word}"]
        assert line.y[-1] == own["tokens"].iloc[-1]
        assert line.x[-1] == pytest.approx(own["t_s"].iloc[-1])


@pytest.mark.parametrize(
    ("key", "chosen"), [("tokens", (0, 0)), ("distributions", (2, 0)), ("levels", (1, 0)),
                        ("against-rate_per_s", (0, 0))]
)  # fmt: skip
def test_predicted_lines_are_dashed_in_the_colour_of_the_measured(
    key: str, chosen: tuple[int, ...], of_served: list[Any], of_served_beside: list[Any]
) -> None:
    alone, both = (drawn(sections, key, chosen) for sections in (of_served, of_served_beside))
    assert len(both) == 2 * len(alone) == 2 * len(serving_run.SERVERS)
    for label, line in alone.items():
        solid, dashed = (both[f"{label}, {word}"] for word in ("measured", "predicted"))
        assert (line.line.dash, solid.line.dash, dashed.line.dash) == (None, None, "dash")
        assert line.line.color == solid.line.color == dashed.line.color
        assert np.asarray(solid.y) == pytest.approx(np.asarray(line.y))


def test_a_trend_has_the_predicted_figures(of_served_beside: list[Any]) -> None:
    line = drawn(of_served_beside, "against-rate_per_s", (0, 0))
    solid, dashed = (np.asarray(line[f"{LABEL}, {word}"].y) for word in ("measured", "predicted"))
    assert dashed == pytest.approx(solid * FASTER)


# -- tiling ----------------------------------------------------------------------------------------


@slow
def test_time_by_position_is_predicted_beside_measured(tiled: Path, of_tiled_beside: list[Any]) -> None:
    alone = drawn(sections_tiling.sections(read_run(tiled)), "cumulative", (1,))
    both = drawn(of_tiled_beside, "cumulative", (1, 0))
    assert len(both) == 2 * len(alone) == 2 * len(test_report_tiling.VARIANTS)
    for label, line in alone.items():
        assert both[f"{label}, measured"].y[-1] == pytest.approx(line.y[-1])
        assert both[f"{label}, predicted"].y[-1] == pytest.approx(line.y[-1] * FASTER)
        assert both[f"{label}, predicted"].line.dash == "dash"


def test_a_strategy_can_be_shown_alone(of_tiled_beside: list[Any]) -> None:
    plots = {plot.key: plot for section in of_tiled_beside for plot in section.plots}
    _, strategies = plots["latency"].choices
    assert strategies.options[0] == "all"
    assert len(strategies.options) == 1 + len(test_report_tiling.VARIANTS)
    # Of noisy lines the answer's are shown first.
    opened = strategies.options[strategies.chosen]
    assert opened != "all"
    found = drawn(of_tiled_beside, "latency", (1, strategies.chosen))
    assert list(found) == [f"{opened}, measured", f"{opened}, predicted"]
    assert plots["cumulative"].choices[1].chosen == 0


def test_speed_ups_and_shares_have_a_row_for_each(of_tiled_beside: list[Any]) -> None:
    shares = next(section for section in of_tiled_beside if section.key == "shares")
    for plot in shares.plots:
        axis = plot.figures[1,].layout.yaxis
        assert len(axis.categoryarray) == 2 * len(test_report_tiling.VARIANTS)
        assert axis.ticktext[:2] == ("lazy, measured", "predicted")
    assert "of a predicted one with all prices" in shares.notes[0]
    hover = drawn(of_tiled_beside, "speed-ups", (1,))["mixer only"].hovertext
    for word, ends in (("measured", "fastest runs"), ("predicted", "with all prices")):
        own = [text for text in hover if f", {word}<" in text]
        assert len(own) == len(hover) / 2
        assert all(ends in text for text in own if len(text.split("<br>")) > 2)
        assert any(ends in text for text in own)


# -- every study -----------------------------------------------------------------------------------


def test_nothing_is_added_where_nothing_is_predicted(served: Path) -> None:
    run = read_run(served)
    shown = variants(run.results, by=())
    both, lines = beside(run, shown)
    assert both is run
    assert lines == shown
    assert pairs(shown, lines, shown[0].label) == []


def test_only_a_row_below_its_own_is_called_predicted() -> None:
    labels = ["a, measured", "a, predicted", "b, predicted", "a, measured", "b, predicted"]
    assert names_in_pairs(labels) == ["a, measured", "predicted", *labels[2:]]
    assert names_in_pairs(["lazy", "eager"]) == ["lazy", "eager"]


@pytest.mark.parametrize("name", ["predicted_results.csv", "predicted_levels.parquet"])
def test_no_page_is_made_of_garbage(name: str, served_beside: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(served_beside, copy)
    (copy / name).write_bytes(b"garbage")
    with pytest.raises(ValueError, match=name):
        reports.build(copy)


def test_a_validation_keeps_what_was_predicted(tmp_path: Path) -> None:
    tables = {"steps.parquet": {"token": [0, 1]}, "cells.parquet": {"launch": [0]}}
    outcome = Outcome([], "", tables=tables, trace=Trace([]), trace_title="a case")
    rundir.write_validation(tmp_path, "tiling", [{"rung": 0}], [], outcome)
    names = {path.name for path in tmp_path.iterdir()}
    added = {"predicted_results.csv", "predicted_steps.parquet", "predicted_trace.json.gz"}
    assert names == {"ladder.csv", *added}
    assert names <= rundir.FILES
    assert pd.read_parquet(tmp_path / "predicted_steps.parquet")["token"].tolist() == [0, 1]
