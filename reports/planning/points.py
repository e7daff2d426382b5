"""Reads the run directory of a plan. What is missing is left out; what is invalid is refused."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from simcore.reports.run import (
    csv_cells,
    json_object,
    of_text,
    parsed,
    summary_of,
    typed,
    with_answers,
    with_axes,
    yaml_mapping,
)
from simcore.reports.text import known
from simcore.studies.columns import USUAL_LATENCIES

FILE = "points.csv"
NEEDED = ("label", "verdict")
TEXT = ("device", "label", "strategy", "verdict", "why", "place")
NUMBERS = (
    "point", "devices", "servers", "rate_per_s", "requests", "prompt_tokens", "output_tokens", "best",
    "replicas", "cost_per_hour", "cost_per_million_output_tokens", "joules_per_output_token",
)  # fmt: skip
# Latencies that an objective may mean, and their intervals' ends; a limit's metric comes before them.
LATENCIES = ("e2e_mean_s", "e2e_p50_s")
ENDS = ("low", "high")
# Prefix of the column of a varied field.
VARIED = "vary."
VERDICTS = ("holds", "unsure", "fails")
SUMMARY_TYPES: Mapping[str, type] = {
    "question": str, "limits": list, "objectives": list, "sensitivity": list, "break_even": list,
    "everywhere": list, "metrics": dict,
    "metric": str, "over": str, "field": str, "how_to_run": list,
}  # fmt: skip
# A way of running the best points, and the command of an engine.
WAY_TYPES: Mapping[str, type] = {"point": str, "placed": str, "why_not": str, "commands": list}
COMMAND_TYPES: Mapping[str, Any] = {
    "title": str, "command": str | None, "why_not": str, "router": str, "notes": list,
}  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A metric and its limit; `at_most`: the metric may not be greater, else not less."""

    metric: str
    value: float
    at_most: bool


@dataclass(frozen=True)
class Planned:
    """A plan's directory in memory. `points`: a row for each judged point, with every column that the page
    shows, perhaps without values; `asked`: the plan as asked, `asked_text` the same as text."""

    points: pd.DataFrame
    summary: dict[str, Any]
    limits: tuple[Limit, ...]
    asked: dict[str, Any]
    asked_text: str
    provenance: dict[str, Any]

    @property
    def question(self) -> str:
        """The question from the summary, or else from the plan as asked."""
        return str(self.summary.get("question") or self.asked.get("question") or "")

    @property
    def objectives(self) -> list[str]:
        """What is best, by the names of plan.yaml."""
        return [str(each) for each in self.summary.get("objectives") or ()]

    @property
    def how_to_run(self) -> list[dict[str, Any]]:
        """How engines run the best points, as summary.json has it."""
        return list(self.summary.get("how_to_run") or ())

    @property
    def certainty(self) -> float | None:
        """How sure the verdicts are, if the summary says so."""
        return self.summary.get("certainty")

    @property
    def once(self) -> bool:
        """Whether each point ran once, so that nothing was judged."""
        return "certainty" in self.summary and self.certainty is None

    @property
    def best(self) -> pd.DataFrame:
        """The points that answer: of a grid the Pareto front; none if nothing holds."""
        return self.points[self.points["best"] == 1.0]


def read_plan(folder: Path) -> Planned:
    """Reads a plan's directory. Raises ValueError, one line that names the file, if a file is invalid."""
    no_words: dict[str, Any] = {}
    no_plan: tuple[str, dict[str, Any]] = ("", {})
    no_limits: tuple[Limit, ...] = ()
    summary, limits = parsed(folder / "summary.json", of_text(_summary), (no_words, no_limits))
    text, asked = parsed(folder / "plan.yaml", of_text(yaml_mapping), no_plan)
    nothing = pd.DataFrame(columns=[*TEXT, *NUMBERS])
    more = [str(summary["metric"])] if summary.get("metric") else []
    points = parsed(folder / FILE, of_text(lambda content: _points(content, limits, more)), nothing)
    provenance = parsed(folder / "provenance.json", of_text(json_object), no_words)
    return Planned(points, summary, limits, asked, text, provenance)


def _summary(content: str) -> tuple[dict[str, Any], tuple[Limit, ...]]:
    summary = summary_of(content)
    for key, kind in SUMMARY_TYPES.items():
        if not isinstance(summary.get(key), kind | None):
            raise ValueError(f"{key} is no {kind.__name__}")
    certainty = summary.get("certainty")
    if certainty is not None and (isinstance(certainty, bool) or not known(certainty)):
        raise ValueError(f"certainty {str(certainty)[:40]!r} is no number")
    for way in summary.get("how_to_run") or ():
        _check(way, WAY_TYPES)
        # Earlier versions do not say it.
        _check({"without": "", **way}, {"without": str})
        for command in way["commands"]:
            _check(command, COMMAND_TYPES)
    return summary, tuple(_limit(given) for given in summary.get("limits") or ())


def _check(given: Any, types: Mapping[str, Any]) -> None:
    fitting = isinstance(given, dict) and all(isinstance(given.get(key, ()), types[key]) for key in types)
    if not fitting:
        raise ValueError(f"how_to_run: {str(given)[:60]!r} has not {', '.join(types)}")


def _limit(given: Any) -> Limit:
    limit = (
        Limit(**given) if isinstance(given, dict) and set(given) == {"metric", "value", "at_most"} else None
    )
    if limit is None:
        raise ValueError(f"limits: {str(given)[:60]!r} has no metric, value and at_most")
    if not isinstance(limit.metric, str) or not isinstance(limit.at_most, bool):
        raise ValueError(f"limits: {str(given)[:60]!r} is no limit")
    if isinstance(limit.value, bool) or not known(limit.value):
        raise ValueError(f"limits: {limit.metric[:40]} {str(limit.value)[:40]!r} is no number")
    return limit


def _points(content: str, limits: tuple[Limit, ...], more: Sequence[str]) -> pd.DataFrame:
    cells = with_answers(csv_cells(content), "best")
    metrics = dict.fromkeys([*(limit.metric for limit in limits), *more, *LATENCIES, *USUAL_LATENCIES])
    figures = [name for metric in metrics for name in (metric, *(f"{metric}.{end}" for end in ENDS))]
    numbers = tuple(dict.fromkeys([*NUMBERS, *figures]))
    found = with_axes(cells, NEEDED, TEXT, numbers)
    for word in sorted(set(found["verdict"]) - set(VERDICTS)):
        raise ValueError(f"verdict {word[:40]!r} is none of {', '.join(VERDICTS)}")
    return found.assign(**{name: _varied(cells, name) for name in cells.columns if name.startswith(VARIED)})


def _varied(cells: pd.DataFrame, name: str) -> "pd.Series[Any]":
    """Returns a varied field as numbers if all its values are some, else as text."""
    numbers = pd.to_numeric(cells[name], errors="coerce")
    return typed(cells, *(([], [name]) if numbers.notna().all() else ([name], [])))[name]
