"""Reads a run directory. A missing file becomes an empty frame, so that figures need no check for it. An
invalid file is refused, so that no page shows garbage."""

import csv
import gzip
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from pyarrow import parquet

from simcore.input.files import MOST_TEXT, check_plain, parse_yaml, plain, read_text

TEXT = ("study", "strategy", "label", "metric", "unit", "source")
# The device of a row; runs from before several devices were possible lack it.
DEVICE = "device"
NUMBERS = ("value", "low", "high")
SESSIONS = "sessions_per_s"
COMPARED_TEXT = ("strategy", "metric", "role", "source")
COMPARED_NUMBERS = ("reference", "predicted", "error_pct")
# If a range is published, `reference` is its nearest end.
COMPARED_RANGE = ("reference_low", "reference_high")
REQUEST_TEXT = ("label", "status")
REQUEST_NUMBERS = (
    "devices", "requests", "rate_per_s", "prompt_mean", "output_mean", "replica", "request", "arrival_s",
    "scheduled_s", "first_token_s", "finish_s", "prompt_tokens", "output_tokens", "preemptions",
)  # fmt: skip
# Whether the figures include a request; older files lack this column.
REQUEST_MARK = "measured"
LEVEL_TEXT = ("label",)
LEVEL_NUMBERS = (
    "devices", "requests", "rate_per_s", "prompt_mean", "output_mean", "t_s", "queue", "batch", "kv_share",
    "tokens",
)  # fmt: skip
# A column of levels only with autoscaling.
SERVERS = "servers"
TILING_CASE = ("layers", "channels", "tokens", "batch")
# File of the tiling study -> its columns of text and of numbers.
TILING_FILES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "steps": (("label",), (*TILING_CASE, "token", "end_s", "latency_s")),
    "tiles": (("implementation",), (*TILING_CASE, "side", "seconds", "low_s", "high_s", "chosen")),
    "cells": (
        ("label", "graph", "op_kind"),
        ("launch", "layer", "first_input", "last_input", "first_output", "last_output", "first_lag",
         "last_lag", "start_s"),
    ),
    "growth": (("label",), (*TILING_CASE, "mixer_flops", "mixer_hbm_bytes", "memory_bytes", "total_s")),
}  # fmt: skip
LADDER_TEXT = ("rung", "label", "what", "judged_by")
# The error by which a rung of the ladder is judged -> its name on the page; older files do not state it.
ERRORS = {"median_pct": "median", "p95_pct": "95 %", "worst_pct": "worst"}
LADDER_NUMBERS = ("n", "median_pct", "p95_pct", "worst_pct", "bound_pct", "passed")
PRICE_TEXT = ("kind", "shape", "dtype", "source", "cache")
PRICE_NUMBERS = ("predicted_s", "low_s", "high_s", "measured_s", "p10_s", "p90_s", "n", "held_out")
EVENT_TEXT = ("stream", "name", "op_kind", "state")
EVENT_NUMBERS = ("rank", "start_s", "end_s")
SPAN_TEXT = ("case", "outcome", "stream", "name", "op_kind", "state")
SPAN_NUMBERS = ("rank", "group", "tensor", "start_s", "end_s")
SIMULATED = "sim"
# Prefix of the files of a validation that are predicted; those without it are measured.
PREDICTED = "predicted_"
SUMMARY_TYPES: Mapping[str, type] = {
    "name": str, "study": str, "answer": str, "warnings": list, "notes": list,
    "price_shares": dict, "baseline": str, "slo": dict, "unranked": list, "best": str, "best_at": dict,
}  # fmt: skip
UNREADABLE = (
    OSError, EOFError, KeyError, ValueError, TypeError, AttributeError, csv.Error, zlib.error, yaml.YAMLError,
    pa.ArrowException, RecursionError,
)  # fmt: skip
# Most bytes of a Parquet file, its rows, bytes of a trace, and characters of an error message.
MOST_PARQUET, MOST_ROWS, MOST_TRACE, LONGEST_REASON = 4_000_000_000, 20_000_000, 256_000_000, 150
Parsed = TypeVar("Parsed")
Names = tuple[str, ...]


@dataclass(frozen=True)
class Axes:
    """The columns that identify cases of a study in results and comparison, besides those of every study."""

    text: Names = ()
    numbers: Names = ()
    compared_text: Names = ()
    compared_numbers: Names = ()


AXES: Mapping[str, Axes] = {
    "decode": Axes(
        text=("op_kind",),
        numbers=("ranks", "groups", "devices", "context_tokens", "batch", "hit_rate"),
        compared_numbers=("ranks", "groups", "context_tokens", "batch", "hit_rate"),
    ),
    "serving": Axes(
        numbers=("devices", "ranks", "requests", "rate_per_s", "prompt_tokens", "output_tokens"),
        compared_text=("label",),
        compared_numbers=(
            "devices", "ranks", "requests", "rate_per_s", "prompt_tokens", "output_tokens", "low", "high",
        ),
    ),
    "tiling": Axes(
        text=("op_kind", "block"),
        numbers=("layers", "channels", "tokens", "prompt_tokens", "batch", "devices"),
        compared_text=("label",),
        compared_numbers=("layers", "channels", "tokens", "batch"),
    ),
    "linear_attention": Axes(
        text=("rival",),
        numbers=("batch", "heads", "length", "rank", "dim", "decay", "devices"),
        compared_text=("label",),
        compared_numbers=("batch", "length", "decay"),
    ),
    "prompt": Axes(
        text=("rival",),
        numbers=("batch", "heads", "length", "rank", "dim", "decay", "devices"),
        compared_text=("label",),
        compared_numbers=("batch", "length", "decay"),
    ),
    "decode_attention": Axes(
        text=("rival",),
        numbers=("batch", "q_heads", "kv_heads", "head_dim", "context_tokens", "devices"),
        compared_text=("label",),
        compared_numbers=("batch", "context_tokens"),
    ),
}  # fmt: skip


def _of_every_study(part: str) -> Names:
    return tuple(dict.fromkeys(name for axes in AXES.values() for name in getattr(axes, part)))


EVERY_AXIS = Axes(*(_of_every_study(part.name) for part in fields(Axes)))


@dataclass(frozen=True)
class Tables:
    """Figures of a run, and what they are of. Frames always have their columns, possibly no rows; axes of
    other studies are columns without values. `requests` and `levels` belong to the serving study, `steps` to
    the tiling study."""

    results: pd.DataFrame
    requests: pd.DataFrame
    levels: pd.DataFrame
    steps: pd.DataFrame


@dataclass(frozen=True)
class Run(Tables):
    """A run directory in memory. `tiles`, `cells` and `growth` belong to the tiling study; `ladder`,
    `prices`, `traces` and `predicted` to a validation, whose own tables are measured."""

    comparison: pd.DataFrame
    timeline: pd.DataFrame
    tiles: pd.DataFrame
    cells: pd.DataFrame
    growth: pd.DataFrame
    ladder: pd.DataFrame
    prices: pd.DataFrame
    traces: "Traces"
    predicted: Tables
    summary: dict[str, Any]
    scenario_text: str
    scenario: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def study(self) -> str:
        """The study's name from the summary, or else from the scenario, or else from the results."""
        return _study(self.summary, self.scenario, self.results)

    @property
    def name(self) -> str:
        """The scenario's name."""
        return str(self.summary.get("name") or self.scenario.get("name") or "unnamed run")

    @property
    def machine(self) -> str:
        """The source of the times: "sim", or the name of the device on which they were measured."""
        return str(self.provenance.get("machine") or SIMULATED)

    @property
    def measured(self) -> bool:
        """Whether the times are measured instead of predicted."""
        return self.machine != SIMULATED

    @property
    def times_are(self) -> str:
        """The word for the times: "predicted" or "measured"."""
        return "measured" if self.measured else "predicted"

    @property
    def best_at(self) -> dict[str, float]:
        """The case of the answer, by columns of the results, NaN if it has no value there; empty if the
        summary does not name it."""
        given = self.summary.get("best_at") or {}
        return {str(name): float("nan" if value is None else value) for name, value in given.items()}

    def ranked(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns the rows without the labels that the summary lists as unranked: their prices rest on
        another basis than most prices do."""
        out = [str(label) for label in self.summary.get("unranked") or ()]
        return rows[~rows["label"].isin(out)].reset_index(drop=True)

    def metric(self, name: str) -> pd.DataFrame:
        """Returns the rows of one metric that have a value, in the order of the file."""
        rows = self._of_metric.get(name)
        return self.results.head(0) if rows is None else rows

    @cached_property
    def _of_metric(self) -> dict[Any, pd.DataFrame]:
        groups = self.results[self.results["value"].notna()].groupby("metric", sort=False)
        return {name: rows.reset_index(drop=True) for name, rows in groups}


@dataclass(frozen=True)
class Traces:
    """One case of a validation, predicted and measured: one event for each op."""

    title: str = ""
    predicted: pd.DataFrame = field(default_factory=lambda: _nothing(EVENT_TEXT, EVENT_NUMBERS))
    measured: pd.DataFrame = field(default_factory=lambda: _nothing(EVENT_TEXT, EVENT_NUMBERS))


def _study(summary: Mapping[str, Any], scenario: Mapping[str, Any], results: pd.DataFrame) -> str:
    in_results = next((s for s in results.get("study", ()) if s), "")
    return str(summary.get("study") or scenario.get("study") or in_results)


def extreme(rows: pd.DataFrame, by: "pd.Series[float]", largest: bool = True) -> "pd.Series[Any]":
    """Returns the first row with the largest, or smallest, value of `by`. `rows` must not be empty."""
    return rows.iloc[int(by.to_numpy().argmax() if largest else by.to_numpy().argmin())]


def typed(frame: pd.DataFrame, text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    """Returns columns of text, empty where unknown, and of numbers. Raises ValueError if one is wrong."""
    missing = [name for name in (*text, *numbers) if name not in frame.columns]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    words = {name: frame[name].astype(object).where(frame[name].notna(), "").map(str) for name in text}
    return pd.DataFrame({**words, **{name: _numbers(frame[name]) for name in numbers}})


def _numbers(column: "pd.Series[Any]") -> "pd.Series[float]":
    figures = pd.to_numeric(column, errors="coerce").astype(float)
    wrong = column[(column.notna() & figures.isna()) | np.isinf(figures)]
    if len(wrong):
        raise ValueError(f"{column.name} {str(wrong.iloc[0])[:40]!r} is no number")
    return figures


def csv_cells(content: str) -> pd.DataFrame:
    """Returns the cells of a CSV file, None where empty. Raises ValueError if rows differ in length."""
    head, *lines = list(csv.reader(content.splitlines(keepends=True), strict=True)) or [[]]
    if len(set(head)) < len(head):
        raise ValueError("has a column twice")
    for number, line in enumerate(lines, start=2):
        if len(line) != len(head):
            raise ValueError(f"row {number} has {len(line)} of {len(head)} fields")
    cells = [[cell or None for cell in line] for line in lines]
    return pd.DataFrame(cells, columns=head, dtype=object)


def with_axes(cells: pd.DataFrame, needed: Sequence[str], text: Names, numbers: Names) -> pd.DataFrame:
    """Returns typed columns; of the axes only the `needed` ones must exist."""
    there = [[name for name in names if name in cells.columns or name in needed] for names in (text, numbers)]
    return _unknown(cells.index, text, numbers).assign(
        **{str(name): column for name, column in typed(cells, *there).items()}
    )


def _results(cells: pd.DataFrame, axes: Axes, *, sessions: bool = False) -> pd.DataFrame:
    needed = (*TEXT, *NUMBERS, *axes.text, *axes.numbers)
    found = with_axes(cells, needed, (*TEXT, DEVICE, *EVERY_AXIS.text), (*EVERY_AXIS.numbers, *NUMBERS))
    # The files have one rate; it is the rate of sessions if requests are the turns of sessions.
    return found.assign(**{SESSIONS: found["rate_per_s"] if sessions else np.nan})


def _comparison(cells: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    needed = (*COMPARED_TEXT, *COMPARED_NUMBERS, *axes.compared_text, *axes.compared_numbers)
    text = (*COMPARED_TEXT, DEVICE, *EVERY_AXIS.compared_text)
    numbers = (*EVERY_AXIS.compared_numbers, *COMPARED_NUMBERS, *COMPARED_RANGE)
    return with_axes(cells, needed, text, numbers)


def _no_constant(name: str) -> None:
    raise ValueError(f"holds {name}")


def _document(content: str) -> Any:
    return json.loads(content, parse_constant=_no_constant, parse_float=_finite)


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"holds {plain(digits)}")
    return number


def json_object(content: str) -> dict[str, Any]:
    """Returns a JSON object. Raises ValueError if it is none, or holds a number that is not finite."""
    tree = _document(content)
    if not isinstance(tree, dict):
        raise ValueError("holds no JSON object")
    return tree


def _ladder(content: str) -> pd.DataFrame:
    # The error of a value that is not finite is infinite; the page shows no number for it.
    cells = with_answers(csv_cells(content).replace({"inf": None}), "passed")
    if "judged_by" not in cells.columns:
        cells = cells.assign(judged_by="")
    found = typed(cells, LADDER_TEXT, LADDER_NUMBERS)
    for word in set(found["judged_by"]) - {"", *ERRORS}:
        raise ValueError(f"judged_by {word[:40]!r} is none of {', '.join(ERRORS)}")
    return found


def with_answers(cells: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns the cells with a column of True and False, if it exists, converted to 1 and 0."""
    if name not in cells.columns:
        return cells
    answers = {"true": 1.0, "false": 0.0}
    return cells.assign(**{name: [answers.get(str(v).strip().lower(), v) for v in cells[name]]})


def _prices(content: str) -> pd.DataFrame:
    return typed(with_answers(csv_cells(content), "held_out"), PRICE_TEXT, PRICE_NUMBERS)


def _events(path: Path) -> tuple[str, pd.DataFrame]:
    """Returns the title of a Chrome trace, and its events."""
    check_plain(path, MOST_TEXT)
    with gzip.open(path, "rb") as file:
        # A few compressed bytes may expand to any size.
        content = file.read(MOST_TRACE + 1)
    if len(content) > MOST_TRACE:
        raise ValueError(f"holds more than {MOST_TRACE:,} bytes")
    tree = json_object(content.decode("utf-8"))
    events = tree["traceEvents"]
    streams = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if (e["ph"], e["name"]) == ("M", "thread_name")
    }
    rows = [
        {
            "stream": streams[e["pid"], e["tid"]],
            "name": e["name"],
            "op_kind": e["cat"],
            "state": e["args"].get("state", "run"),
            "rank": e["pid"],
            "start_s": e["ts"] * 1e-6,
            "end_s": (e["ts"] + e["dur"]) * 1e-6,
        }
        for e in events
        if e["ph"] == "X"
    ]
    frame = pd.DataFrame(rows, columns=[*EVENT_TEXT, *EVENT_NUMBERS], dtype=object)
    return str(tree.get("otherData", {}).get("title", "")), typed(frame, EVENT_TEXT, EVENT_NUMBERS)


def _traces(run_dir: Path) -> "Traces":
    """Reads both timelines if the predicted one exists; a trace without it is for Perfetto only."""
    nothing = "", _nothing(EVENT_TEXT, EVENT_NUMBERS)
    title, predicted = parsed(run_dir / f"{PREDICTED}trace.json.gz", _events, nothing)
    if predicted.empty:
        return Traces()
    _, measured = parsed(run_dir / "trace.json.gz", _events, nothing)
    return Traces(title, predicted, measured)


def summary_of(content: str) -> dict[str, Any]:
    """Returns the content of summary.json. Raises ValueError if a field is of the wrong type."""
    summary = json_object(content)
    for key, kind in SUMMARY_TYPES.items():
        if not isinstance(summary.get(key), kind | None):
            raise ValueError(f"{key} is no {kind.__name__}")
    for key in ("best_at", "price_shares"):
        for name, value in (summary.get(key) or {}).items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{key} {name[:40]!r} is no number")
    return summary


def _spans(content: str) -> pd.DataFrame:
    spans = _document(content)
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise ValueError("holds no list of spans")
    columns = (*SPAN_TEXT, *SPAN_NUMBERS)
    missing = sorted({name for span in spans for name in columns if name not in span})
    if missing:
        raise ValueError(f"has spans without {', '.join(missing)}")
    return typed(pd.DataFrame(spans, columns=columns, dtype=object), SPAN_TEXT, SPAN_NUMBERS)


def yaml_mapping(content: str) -> tuple[str, dict[str, Any]]:
    """Returns a YAML document as text and as a mapping. Raises ValueError if it is none."""
    scenario = parse_yaml(content, "")
    if not isinstance(scenario, dict):
        raise ValueError("holds no mapping")
    return content, scenario


def _names(path: Path) -> set[str]:
    """Returns the columns of a Parquet file."""
    check_plain(path, MOST_PARQUET)
    # Arrow accepts no path that is not UTF-8.
    with path.open("rb") as file:
        return set(parquet.read_schema(file).names)


def _parquet(path: Path, text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    """Reads some columns of a Parquet file; text as categories, because a file may have a million rows."""
    there = _names(path)
    missing = [name for name in (*text, *numbers) if name not in there]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    with path.open("rb") as opened, parquet.ParquetFile(opened, read_dictionary=list(text)) as file:
        if file.metadata.num_rows > MOST_ROWS:
            raise ValueError(f"has {file.metadata.num_rows:,} rows")
        frame = file.read(columns=[*text, *numbers]).to_pandas()
    words = {name: frame[name].astype("category") for name in text}
    for name, column in words.items():
        wrong = [each for each in column.cat.categories if not isinstance(each, str)]
        if wrong or column.hasnans:
            raise ValueError(
                f"{name} {str(wrong[0])[:40]!r} is no text" if wrong else f"{name} is missing in a row"
            )
    return pd.DataFrame({**words, **{name: _numbers(frame[name]) for name in numbers}})


def _requests(path: Path) -> pd.DataFrame:
    """Reads the requests; in files without the mark, figures include all of them."""
    if REQUEST_MARK in _names(path):
        return _parquet(path, REQUEST_TEXT, (*REQUEST_NUMBERS, REQUEST_MARK))
    return _parquet(path, REQUEST_TEXT, REQUEST_NUMBERS).assign(**{REQUEST_MARK: 1.0})


def _levels(path: Path) -> pd.DataFrame:
    """Reads the levels over time; the number of servers too, where they start and stop."""
    servers = (SERVERS,) if SERVERS in _names(path) else ()
    return _parquet(path, LEVEL_TEXT, (*LEVEL_NUMBERS, *servers))


def parsed(path: Path, parse: Callable[[Path], Parsed], otherwise: Parsed) -> Parsed:
    """Parses a file; returns `otherwise` if the file does not exist. Raises ValueError, one line that names
    the file, if its content is invalid."""
    if not path.is_symlink() and not path.exists():
        return otherwise
    try:
        return parse(path)
    except UNREADABLE as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        text = " ".join(str(reason).split()).removeprefix(f"{path}: ").removeprefix(": ")
        raise ValueError(f"{path}: {plain(text, LONGEST_REASON)}") from None


def of_text(parse: Callable[[str], Parsed]) -> Callable[[Path], Parsed]:
    """Returns the parser of a file from the parser of its text."""
    return lambda path: parse(read_text(path, MOST_TEXT))


def _nothing(text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    return _unknown(pd.RangeIndex(0), text, numbers)


def _unknown(index: "pd.Index[Any]", text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    """Returns typed columns without values."""
    word, figure = pd.Series("", index, dtype=object).map(str), pd.Series(np.nan, index)
    return pd.DataFrame({**dict.fromkeys(text, word), **dict.fromkeys(numbers, figure)})


def read_run(run_dir: Path) -> Run:
    """Reads every file that a report shows. A validation needs no results.csv. Raises FileNotFoundError if
    results.csv and ladder.csv are missing, and ValueError if a file is invalid."""
    if not any((run_dir / name).exists() for name in ("results.csv", "ladder.csv")):
        raise FileNotFoundError(f"{run_dir} holds no results.csv: it is not a run directory")
    no_scenario: tuple[str, dict[str, Any]] = ("", {})
    no_words: dict[str, Any] = {}
    text, scenario = parsed(run_dir / "scenario.yaml", of_text(yaml_mapping), no_scenario)
    summary = parsed(run_dir / "summary.json", of_text(summary_of), no_words)

    def results(content: str) -> pd.DataFrame:
        cells = csv_cells(content)
        load = scenario.get("workload")
        sessions = isinstance(load, dict) and load.get("sessions") is not None
        return _results(cells, AXES.get(_study(summary, scenario, cells), Axes()), sessions=sessions)

    no_results = _results(pd.DataFrame(columns=[*TEXT, *NUMBERS], dtype=object), Axes())
    read = parsed(run_dir / "results.csv", of_text(results), no_results)
    axes = AXES.get(_study(summary, scenario, read), Axes())
    is_tiling = _study(summary, scenario, read) == "tiling"

    def of_tilings(name: str, prefix: str = "") -> pd.DataFrame:
        # Other studies have steps with other columns.
        columns, path = TILING_FILES[name], run_dir / f"{prefix}{name}.parquet"
        nothing = _nothing(*columns)
        return parsed(path, lambda p: _parquet(p, *columns), nothing) if is_tiling else nothing

    def tables(prefix: str, results: pd.DataFrame) -> dict[str, pd.DataFrame]:
        no_requests = _nothing(REQUEST_TEXT, (*REQUEST_NUMBERS, REQUEST_MARK))
        no_levels = _nothing(LEVEL_TEXT, LEVEL_NUMBERS)
        return {
            "results": results,
            "requests": parsed(run_dir / f"{prefix}requests.parquet", _requests, no_requests),
            "levels": parsed(run_dir / f"{prefix}levels.parquet", _levels, no_levels),
            "steps": of_tilings("steps", prefix),
        }

    predicted = parsed(run_dir / f"{PREDICTED}results.csv", of_text(results), no_results)
    compared = _comparison(pd.DataFrame(columns=[*COMPARED_TEXT, *COMPARED_NUMBERS], dtype=object), Axes())
    return Run(
        **tables("", read),
        comparison=parsed(
            run_dir / "comparison.csv", of_text(lambda c: _comparison(csv_cells(c), axes)), compared
        ),
        timeline=parsed(run_dir / "timeline.json", of_text(_spans), _spans("[]")),
        tiles=of_tilings("tiles"),
        cells=of_tilings("cells"),
        growth=of_tilings("growth"),
        ladder=parsed(run_dir / "ladder.csv", of_text(_ladder), _nothing(LADDER_TEXT, LADDER_NUMBERS)),
        prices=parsed(run_dir / "prices.csv", of_text(_prices), _nothing(PRICE_TEXT, PRICE_NUMBERS)),
        traces=_traces(run_dir),
        predicted=Tables(**tables(PREDICTED, predicted)),
        summary=summary,
        scenario_text=text,
        scenario=scenario,
        provenance=parsed(run_dir / "provenance.json", of_text(json_object), {}),
    )
