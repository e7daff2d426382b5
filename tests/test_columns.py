"""What schema.json says of a run's tables is what stands in them, and all of that has a meaning."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

import simcore
from simcore import rundir
from simcore.scenario import resolved
from simcore.studies.columns import COLUMNS, METRICS, TABLES, metric
from simcore.studies.common import FIGURE, Axes, OperatorAxes, ServingAxes, TilingAxes
from tests.figures_as_they_are import SCENARIOS, written
from tests.thorough import first, slow

SPLITS: Mapping[str, Any] = {
    "name": "s",
    "study": "decode_attention",
    "device": "h200-sxm",
    "batch": [1, 64],
    "context_tokens": [1024, 65_536],
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
}
RUNS: Mapping[str, Mapping[str, Any]] = {
    **{
        name: SCENARIOS[name]
        for name in (
            "serving_flover",
            "tiling_prompt",
            "linear_attention",
            "decode_speculation",
            "serving_sessions",
            "serving_datasheet",
        )
    },
    "decode_attention": SPLITS,
}
READ = {"integer": int, "number": float, "text": str}


def arrow_type(kind: pa.DataType) -> str:
    """A type of Arrow in the words of schema.json."""
    if pa.types.is_dictionary(kind):
        return arrow_type(kind.value_type)
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        return "integer"
    return "number" if pa.types.is_floating(kind) else "text"


@slow
@pytest.mark.parametrize("name", first(3, RUNS))
def test_the_schema_of_a_run_is_that_of_its_tables(name: str, tmp_path: Path) -> None:
    result = simcore.run(RUNS[name], jobs=1)
    study = result.scenario.study
    rundir.write(tmp_path, study, resolved(result.scenario), result.outcome, [], {})
    schema = json.loads((tmp_path / "schema.json").read_text())
    assert schema["study"] == study
    assert schema["columns"].keys() == {"results.csv", *(path.name for path in tmp_path.glob("*.parquet"))}
    for columns in schema["columns"].values():
        assert all(column["meaning"] for column in columns)
    with (tmp_path / "results.csv").open(newline="") as file:
        head, *lines = csv.reader(file)
    assert [column["name"] for column in schema["columns"]["results.csv"]] == head
    for column, values in zip(schema["columns"]["results.csv"], zip(*lines, strict=True), strict=True):
        for value in filter(None, values):
            READ[column["type"]](value)
    for file in tmp_path.glob("*.parquet"):
        found = [(field.name, arrow_type(field.type)) for field in parquet.read_schema(file)]
        columns = schema["columns"][file.name]
        # Whole numbers of which some are missing are written as numbers.
        assert [column["name"] for column in columns] == [name for name, _ in found]
        for column, (_, kind) in zip(columns, found, strict=True):
            assert column["type"] == kind or (column["type"], kind) == ("integer", "number"), column
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    assert [(one["name"], one["unit"]) for one in schema["metrics"]] == [
        *dict.fromkeys((row["metric"], row["unit"]) for row in rows)
    ]
    for one in schema["metrics"]:
        assert one["meaning"]
        assert one["better"] in ("lower", "higher", None)


def test_every_metric_of_the_figures_that_are_written_down_is_described() -> None:
    for name, scenario in SCENARIOS.items():
        study = scenario["study"]
        names = {line[0] for line in written(name) if len(line) > 1 and not isinstance(line[1], str)}
        assert names
        assert [one for one in sorted(names) if not metric(study, one).meaning] == [], name


def test_what_is_said_of_a_metric_comes_of_its_name() -> None:
    of = metric("serving", "ttft_p99_s")
    assert (of.better, of.meaning[-17:]) == ("lower", ", 99th percentile")
    assert metric("serving", "ttft_p99_s_whole_run").meaning.startswith(f"{of.meaning}, of the whole run")
    assert metric("serving", "ttft_p99_s_by_prices").meaning.startswith(f"{of.meaning}, of the first replica")
    assert metric("serving", "output_throughput_tokens_per_s").better == "higher"
    assert metric("tiling", "token_max_s").meaning.endswith(", greatest")
    assert metric("tiling", "of_their_own").meaning == ""


def test_columns_are_fields_of_the_axes_and_of_a_row() -> None:
    axes = {
        "decode": Axes,
        "serving": ServingAxes,
        "tiling": TilingAxes,
        "linear_attention": OperatorAxes,
        "decode_attention": OperatorAxes,
        "prompt": OperatorAxes,
    }
    assert axes.keys() == COLUMNS.keys() == METRICS.keys()
    assert TABLES.keys() < axes.keys()
    for study, columns in COLUMNS.items():
        own = columns.keys() - {*FIGURE} - {"study", "metric", "op_kind"}
        assert [name for name in sorted(own) if not hasattr(axes[study], name)] == []
