"""Writes the results of a run into its run directory: whole or not at all.

    scenario.yaml  results.csv  schema.json  comparison.csv  summary.json  provenance.json  trace.json.gz
    report.html
    and, as the study has them,  steps.parquet  timeline.json  requests.parquet  levels.parquet
    tiles.parquet  cells.parquet  growth.parquet
and of a validation  ladder.csv  prices.csv  predicted_trace.json.gz  predicted_results.csv
                     predicted_steps.parquet  predicted_requests.parquet  predicted_levels.parquet
and of a plan        plan.yaml  points.csv  points.parquet  points.json  scenarios.json, with summary,
                     provenance and report

Everything is written into a temporary neighbour first, which then replaces the directory; only an empty
directory or one that a run has written before is replaced.
"""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from simcore.input.drafts import draft_of, folder_draft
from simcore.input.files import InputError
from simcore.machine.trace import write_chrome_trace
from simcore.studies.columns import COLUMNS, schema
from simcore.studies.common import Outcome, flat

# A directory with this file and no files besides FILES was written by a run.
MARK = "provenance.json"
RESULTS = "results.csv"
# Files of every run; a report can be built from fewer.
EVERY_RUN = ("summary.json", "scenario.yaml", RESULTS, MARK)
POINTS = "points.csv"
EVERY_PLAN = ("summary.json", "plan.yaml", POINTS, MARK)
TRACE = "trace.json.gz"
# Of a validation, files of this prefix are predicted, those without it measured.
PREDICTED = "predicted_"
PREDICTED_TABLES = ("steps.parquet", "requests.parquet", "levels.parquet")
FILES = frozenset(
    {
        "scenario.yaml",
        RESULTS,
        "schema.json",
        "comparison.csv",
        "steps.parquet",
        "requests.parquet",
        "levels.parquet",
        "tiles.parquet",
        "cells.parquet",
        "growth.parquet",
        "ladder.csv",
        "prices.csv",
        TRACE,
        *(PREDICTED + name for name in (RESULTS, TRACE, *PREDICTED_TABLES)),
        "timeline.json",
        "summary.json",
        "report.html",
        MARK,
    }
)

# The scenario of each point of a plan, in the order of its rows.
SCENARIOS = "scenarios.json"
PLAN_FILES = frozenset({"plan.yaml", POINTS, "points.parquet", "points.json", SCENARIOS})


def check_target(target: Path) -> None:
    """Raises InputError if a run directory cannot be written at `target`."""
    try:
        _check_target(target)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        # pathlib raises RuntimeError for a circle of links and ValueError for a null byte.
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--out {target}: cannot be written: {reason}") from None


def _check_target(target: Path) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"--out {target}: is a file or a link; a directory is needed")
    if target.resolve() == Path.cwd() or target.resolve() in Path.cwd().parents:
        raise InputError(f"--out {target}: is the current directory, or holds it, and cannot be replaced")
    inside = {path.name for path in target.iterdir()} if target.is_dir() else set()
    if inside and (MARK not in inside or not all(map(_ours, inside))):
        raise InputError(f"--out {target}: holds other files; an empty directory or an earlier run is needed")
    if os.path.ismount(target):
        raise InputError(f"--out {target}: is a mount point, and cannot be replaced")
    parent = next(path for path in target.absolute().parents if path.exists())
    if not parent.is_dir():
        raise InputError(f"--out {target}: {parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {target}: {parent} cannot be written to")


def page_at(out: Path, name: str) -> Path:
    """Returns where a page goes that is no run's own: a file, or `name` in a folder. Raises InputError if the
    folder is a run directory, which no run could replace any more."""
    page = out if out.suffix == ".html" and not out.is_dir() else out / name
    if (page.parent / MARK).exists():
        raise InputError(f"--out {out}: {page.parent} is a run directory; another folder or file is needed")
    return page


@contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yields a temporary directory that becomes `target` if the block succeeds and is removed if not. Raises
    InputError if `target` cannot be written."""
    check_target(target)
    try:
        with folder_draft(target, _ours) as draft:
            yield draft
    except OSError as error:
        raise InputError(f"--out {target}: cannot be written: {error.strerror or error}") from None


def _ours(name: str) -> bool:
    """Whether this is the name of a run's file or of its draft."""
    return not {name, draft_of(name)}.isdisjoint(FILES | PLAN_FILES)


def write(
    folder: Path,
    study: str,
    scenario: Mapping[str, Any],
    outcome: Outcome,
    comparison: Sequence[Mapping[str, Any]],
    provenance: Mapping[str, Any],
) -> None:
    """Writes all files of a run except its report."""
    document = yaml.safe_dump(dict(scenario), sort_keys=False, allow_unicode=True)
    (folder / "scenario.yaml").write_text(document, encoding="utf-8", errors="backslashreplace")
    _write_results(folder / RESULTS, study, outcome)
    metrics = ((row.metric, row.unit) for row in outcome.rows)
    _write_json(folder / "schema.json", schema(study, metrics, outcome.tables))
    if comparison:
        _write_csv(folder / "comparison.csv", comparison, tuple(comparison[0]))
    for name, columns in outcome.tables.items():
        _write_parquet(folder / name, columns)
    if outcome.timeline:
        _write_json(folder / "timeline.json", outcome.timeline)
    _write_json(folder / "summary.json", _summary(study, scenario, outcome))
    left_out = write_chrome_trace(outcome.trace, folder / TRACE, title=outcome.trace_title)
    _write_json(folder / MARK, {**provenance, "trace_events_left_out": left_out})


def write_validation(
    folder: Path,
    study: str,
    rungs: Sequence[Mapping[str, Any]],
    prices: Sequence[Mapping[str, Any]],
    predicted: Outcome,
) -> None:
    """Writes the validation ladder of a run, the prices of its ops with their measured times, and what was
    predicted: results, the tables of requests and steps, and, if it has a title, the trace."""
    _write_csv(folder / "ladder.csv", rungs, tuple(rungs[0]))
    if prices:
        _write_csv(folder / "prices.csv", prices, tuple(prices[0]))
    _write_results(folder / (PREDICTED + RESULTS), study, predicted)
    for name in PREDICTED_TABLES:
        if name in predicted.tables:
            _write_parquet(folder / (PREDICTED + name), predicted.tables[name])
    if predicted.trace_title:
        write_chrome_trace(predicted.trace, folder / (PREDICTED + TRACE), title=predicted.trace_title)


def write_plan(
    folder: Path,
    plan: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    provenance: Mapping[str, Any],
    scenarios: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Writes all files of a plan except its report: the plan as asked, its judged points three times, for
    people, for data frames and for scripts, and the scenario of each point."""
    document = yaml.safe_dump(dict(plan), sort_keys=False, allow_unicode=True)
    (folder / "plan.yaml").write_text(document, encoding="utf-8", errors="backslashreplace")
    columns = tuple(dict.fromkeys(name for point in points for name in point))
    _write_csv(folder / POINTS, points, columns)
    _write_json(folder / "points.json", list(points))
    if scenarios:
        _write_json(folder / SCENARIOS, list(scenarios))
    of_points = {name: _column([point.get(name) for point in points]) for name in columns}
    _write_parquet(folder / "points.parquet", of_points)
    _write_json(folder / "summary.json", summary)
    _write_json(folder / MARK, provenance)


def _column(values: list[Any]) -> list[Any]:
    """Returns values as a column of a table holds them: those of a varied field may be of several kinds, and
    are text then."""
    kinds = {type(value) for value in values if value is not None}
    if not kinds & {dict, list} and (len(kinds) <= 1 or kinds == {int, float}):
        return values
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]


def _summary(study: str, scenario: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    return {
        "name": scenario["name"],
        "study": study,
        "answer": outcome.answer,
        "notes": outcome.notes,
        "warnings": outcome.warnings,
        "hits": outcome.hits,
        "price_shares": outcome.sources,
        "baseline": outcome.baseline,
        "slo": outcome.slo,
        "unranked": outcome.unranked,
        "best": outcome.best,
        "best_at": dict(outcome.best_at),
    }


def _write_results(path: Path, study: str, outcome: Outcome) -> None:
    _write_csv(path, [flat(study, row) for row in outcome.rows], [*COLUMNS[study]])


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    # Arrow takes longer to import than everything that `--help` needs.
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    # Arrow takes no path that is not UTF-8.
    with path.open("wb") as file:
        pq.write_table(pa.table(dict(columns)), file)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
