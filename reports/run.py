"""Reads a run directory: whatever is missing becomes empty, so that figures never ask twice."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _typed(frame: pd.DataFrame, text: tuple[str, ...], numbers: tuple[str, ...]) -> pd.DataFrame:
    frame = frame.reindex(columns=[*text, *numbers])
    words = {name: frame[name].astype(object).where(frame[name].notna(), "").map(str) for name in text}
    figures = {name: pd.to_numeric(frame[name], errors="coerce").astype(float) for name in numbers}
    return pd.DataFrame({**words, **figures})


def _csv(path: Path) -> pd.DataFrame:
    if not path.exists() or not path.read_text(encoding="utf-8").strip():
        return pd.DataFrame()
    return pd.read_csv(path, dtype=str, keep_default_na=True)


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_run(run_dir: Path) -> Run:
    """Reads every file that a report shows. Raises FileNotFoundError where results.csv is missing."""
    results = run_dir / "results.csv"
    if not results.exists():
        raise FileNotFoundError(f"{run_dir} holds no results.csv: it is not a run directory")
    scenario = run_dir / "scenario.yaml"
    text = scenario.read_text(encoding="utf-8") if scenario.exists() else ""
    loaded = yaml.safe_load(text) if text else None
    return Run(
        results=_typed(_csv(results), TEXT, NUMBERS),
        comparison=_typed(_csv(run_dir / "comparison.csv"), COMPARED_TEXT, COMPARED_NUMBERS),
        timeline=_typed(pd.DataFrame(_json(run_dir / "timeline.json") or []), SPAN_TEXT, SPAN_NUMBERS),
        summary=_json(run_dir / "summary.json") or {},
        scenario_text=text,
        scenario=loaded if isinstance(loaded, dict) else {},
        provenance=_json(run_dir / "provenance.json") or {},
    )
