"""Reads a run directory: whatever is missing becomes empty, so that figures never ask twice, and whatever
is garbage is refused, so that no page is made of it."""

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import yaml

TEXT = ("study", "strategy", "label", "metric", "op_kind", "unit", "source")
NUMBERS = ("ranks", "groups", "devices", "context_tokens", "batch", "hit_rate", "value", "low", "high")
COMPARED_TEXT = ("strategy", "metric", "role", "source")
COMPARED_NUMBERS = (
    "ranks", "groups", "context_tokens", "batch", "hit_rate", "reference", "predicted", "error_pct",
)  # fmt: skip
SPAN_TEXT = ("case", "outcome", "stream", "name", "op_kind", "state")
SPAN_NUMBERS = ("rank", "group", "tensor", "start_s", "end_s")
SUMMARY_TYPES: Mapping[str, type] = {"answer": str, "warnings": list, "notes": list, "price_shares": dict}
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Run:
    """A run directory in memory. Frames always have their columns, perhaps no rows."""

    results: pd.DataFrame
    comparison: pd.DataFrame
    timeline: pd.DataFrame
    summary: dict[str, Any]
    scenario_text: str
    scenario: dict[str, Any]
    provenance: dict[str, Any]

    @property
    def study(self) -> str:
        """Which study this is: the summary's word, or else the scenario's, or else the results'."""
        in_results = next((s for s in self.results["study"] if s), "")
        return str(self.summary.get("study") or self.scenario.get("study") or in_results)

    @property
    def name(self) -> str:
        """The scenario's name."""
        return str(self.summary.get("name") or self.scenario.get("name") or "unnamed run")

    def metric(self, name: str) -> pd.DataFrame:
        """The rows of one metric that have a value, in the order of the file."""
        rows = self.results[(self.results["metric"] == name) & self.results["value"].notna()]
        return rows.reset_index(drop=True)


def extreme(rows: pd.DataFrame, by: "pd.Series[float]", largest: bool = True) -> "pd.Series[Any]":
    """The first row where `by` is largest, or smallest; `rows` is not empty."""
    return rows.iloc[int(by.to_numpy().argmax() if largest else by.to_numpy().argmin())]


def _typed(frame: pd.DataFrame, text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
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


def _table(content: str, text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
    head, *lines = list(csv.reader(content.splitlines(keepends=True), strict=True)) or [[]]
    if len(set(head)) < len(head):
        raise ValueError("has a column twice")
    for number, line in enumerate(lines, start=2):
        if len(line) != len(head):
            raise ValueError(f"row {number} has {len(line)} of {len(head)} fields")
    cells = [[cell or None for cell in line] for line in lines]
    return _typed(pd.DataFrame(cells, columns=head, dtype=object), text, numbers)


def _no_constant(name: str) -> None:
    raise ValueError(f"holds {name}")


def _object(content: str) -> dict[str, Any]:
    tree = json.loads(content, parse_constant=_no_constant)
    if not isinstance(tree, dict):
        raise ValueError("holds no JSON object")
    return tree


def _summary(content: str) -> dict[str, Any]:
    summary = _object(content)
    for key, kind in SUMMARY_TYPES.items():
        if not isinstance(summary.get(key), kind | None):
            raise ValueError(f"{key} is no {kind.__name__}")
    return summary


def _spans(content: str) -> pd.DataFrame:
    spans = json.loads(content, parse_constant=_no_constant)
    if not isinstance(spans, list) or not all(isinstance(span, dict) for span in spans):
        raise ValueError("holds no list of spans")
    columns = (*SPAN_TEXT, *SPAN_NUMBERS)
    missing = sorted({name for span in spans for name in columns if name not in span})
    if missing:
        raise ValueError(f"has spans without {', '.join(missing)}")
    return _typed(pd.DataFrame(spans, columns=columns, dtype=object), SPAN_TEXT, SPAN_NUMBERS)


def _scenario(content: str) -> tuple[str, dict[str, Any]]:
    scenario = yaml.safe_load(content)
    if not isinstance(scenario, dict):
        raise ValueError("holds no mapping")
    return content, scenario


def _read(path: Path, parse: Callable[[str], Parsed], otherwise: Parsed) -> Parsed:
    """A file's content, or `otherwise` where there is no such file. Raises ValueError, with one line
    that names the file, where it is not what it should be."""
    if not path.exists():
        return otherwise
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, csv.Error, yaml.YAMLError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"{path}: {' '.join(str(reason).split())}") from None


def read_run(run_dir: Path) -> Run:
    """Reads every file that a report shows. Raises FileNotFoundError where results.csv is missing and
    ValueError where a file is not what it should be."""
    results = run_dir / "results.csv"
    if not results.exists():
        raise FileNotFoundError(f"{run_dir} holds no results.csv: it is not a run directory")

    def table(name: str, text: Sequence[str], numbers: Sequence[str]) -> pd.DataFrame:
        nothing = pd.DataFrame(columns=[*text, *numbers], dtype=object)
        return _read(run_dir / name, lambda c: _table(c, text, numbers), _typed(nothing, text, numbers))

    no_scenario: tuple[str, dict[str, Any]] = ("", {})
    text, scenario = _read(run_dir / "scenario.yaml", _scenario, no_scenario)
    return Run(
        results=table("results.csv", TEXT, NUMBERS),
        comparison=table("comparison.csv", COMPARED_TEXT, COMPARED_NUMBERS),
        timeline=_read(run_dir / "timeline.json", _spans, _spans("[]")),
        summary=_read(run_dir / "summary.json", _summary, {}),
        scenario_text=text,
        scenario=scenario,
        provenance=_read(run_dir / "provenance.json", _object, {}),
    )
