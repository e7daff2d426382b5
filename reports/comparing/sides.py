"""Reads a run directory as one side of a comparison: its answer, its inputs and its figures.

inputs     dotted field of the scenario or the plan as resolved, and of the provenance -> value
figures    rows of results.csv, of a plan the columns of points.csv, of a validation also its ladder

A plan's points are where its search led, which is seldom the same place twice. So a plan also has, of every
way of running, the highest rate or the fewest devices that hold; the next point that fails ends the interval.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simcore.input.files import InputError, plain
from simcore.reports.run import (
    SIMULATED,
    csv_cells,
    json_object,
    of_text,
    parsed,
    summary_of,
    yaml_mapping,
)
from simcore.reports.text import of_any_device
from simcore.studies.columns import OF_FIGURE

RUN, PLAN = "run", "plan"
RESULTS, POINTS, LADDER, MARK = "results.csv", "points.csv", "ladder.csv", "provenance.json"
# Columns without which a row is no figure, and a point none of a plan.
NEEDED: Mapping[str, tuple[str, ...]] = {RESULTS: ("metric", "value"), POINTS: ("label", "verdict")}
INTERVAL = ("low", "high")
# Columns of a plan's points that tell them apart, besides those of varied fields.
PLACE = (
    "device", "label", "strategy", "devices", "ranks", "servers", "rate_per_s", "requests", "prompt_tokens",
    "output_tokens",
)  # fmt: skip
VARIED = "vary."
NO_FIGURES = ("point", "verdict", "best", "replicas", "why")
RATES = ("rate", "strategy")
HIGHEST_RATE, FEWEST_DEVICES, VERDICT = "highest_rate_that_holds", "fewest_devices_that_hold", "verdict"
LADDER_ERRORS = ("median_pct", "p95_pct", "worst_pct")
# Entries of the provenance that are inputs; the others are outcomes, or repeat the scenario.
ORIGIN = (
    "machine", "processor", "threads", "torch", "basis", "origin", "formats", "code", "event_loop",
    "device.name", "profile.", "link.", "overheads.", "versions.",
)  # fmt: skip
NO_ORIGIN = (".source", ".description", ".sources")
# Fields that no figure depends on; those of `on_cpu` stand in their places when it is used.
IDLE = ("name", "on_cpu")
PRICES = ("device.name", "profile.", "link.", "overheads.", "basis", "origin")

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Figure:
    """A figure of a run. `where`: what identifies it besides its metric, column -> value, without empty
    ones; `word`: its value if it is no number."""

    metric: str
    where: Mapping[str, str]
    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    word: str = ""


@dataclass(frozen=True)
class Side:
    """A run directory as one side of a comparison. `inputs`: dotted field -> value of the scenario or plan,
    `origin` the same of the provenance; `columns`: those that identify a figure."""

    folder: Path
    kind: str
    study: str
    name: str
    answer: str
    warnings: tuple[str, ...]
    inputs: Mapping[str, Any]
    origin: Mapping[str, Any]
    figures: Sequence[Figure]
    columns: tuple[str, ...]
    text: str = ""
    lacks: tuple[str, ...] = field(default_factory=tuple)

    @property
    def machine(self) -> str:
        """Where it ran."""
        return str(self.origin.get("machine") or SIMULATED)

    @property
    def what(self) -> str:
        """ "a run of study serving"."""
        return f"a {self.kind} of study {plain(self.study) or 'unknown'}"


def read_side(folder: Path) -> Side:
    """Reads a run directory. Raises InputError, one line, if it is none, or lacks what a comparison needs."""
    kind = PLAN if (folder / POINTS).exists() else RUN
    file = POINTS if kind == PLAN else RESULTS
    if not (folder / file).exists():
        raise InputError(f"{folder}: is no run directory: {file} is missing")
    try:
        return _read(folder, kind, file)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from None


def _read(folder: Path, kind: str, file: str) -> Side:
    nothing: dict[str, Any] = {}
    asked = "plan.yaml" if kind == PLAN else "scenario.yaml"
    text, document = parsed(folder / asked, of_text(yaml_mapping), ("", nothing))
    summary = parsed(folder / "summary.json", of_text(summary_of), nothing)
    origin = parsed(folder / MARK, of_text(json_object), nothing)
    none: list[dict[str, str]] = []
    rows = parsed(folder / file, of_text(lambda content: _rows(content, NEEDED[file])), none)
    scenario = document.get("base") if kind == PLAN else document
    scenario = scenario if isinstance(scenario, dict) else {}
    of_rows = next((row["study"] for row in rows if row.get("study")), "")
    study = scenario.get("study") or ("" if kind == PLAN else summary.get("study")) or of_rows
    figures, columns = _of_plan(rows, summary, document, folder) if kind == PLAN else _of_run(rows, folder)
    figures += _of_ladder(folder)
    every = (asked, "summary.json", MARK)
    return Side(
        folder=folder,
        kind=kind,
        study=str(study),
        name=str(summary.get("name") or document.get("name") or folder.name),
        answer=str(summary.get("answer") or ""),
        warnings=tuple(str(each) for each in summary.get("warnings") or ()),
        inputs=_asked(document),
        origin=_origin(origin),
        figures=figures,
        columns=columns,
        text=text,
        lacks=tuple(name for name in every if not (folder / name).exists()),
    )


# -- rows ------------------------------------------------------------------------------------------


def _rows(content: str, needed: Sequence[str]) -> list[dict[str, str]]:
    """Returns the rows of a CSV file, empty cells as "". Raises ValueError if it lacks a needed column."""
    cells = csv_cells(content)
    if missing := [name for name in needed if name not in cells.columns]:
        raise ValueError(f"has no column {', '.join(missing)}; run it again")
    return [
        {name: str(cell or "") for name, cell in zip(cells.columns, line, strict=True)}
        for line in cells.itertuples(index=False, name=None)
    ]


def _number(row: Mapping[str, str], name: str, file: Path) -> float | None:
    text = row.get(name, "")
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{file}: {plain(name)}: {plain(text)!r} is no finite number")
    return number


def same_text(text: str) -> str:
    """Returns a cell such that equal numbers are equal texts.

    >>> same_text("1"), same_text("1.0"), same_text("0.50"), same_text("nan"), same_text("mlp")
    ('1', '1', '0.5', 'nan', 'mlp')
    """
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:.12g}" if math.isfinite(number) else text


def _where(row: Mapping[str, str], columns: Iterable[str]) -> dict[str, str]:
    found = {name: same_text(row[name]) for name in columns if row.get(name)}
    if "label" in found and "device" in found:
        found["label"] = of_any_device(found["label"], found["device"])
    return found


def _of_run(rows: Sequence[Mapping[str, str]], folder: Path) -> tuple[list[Figure], tuple[str, ...]]:
    file = folder / RESULTS
    columns = tuple(name for name in (rows[0] if rows else ()) if name not in {*OF_FIGURE, "study", "metric"})
    figures = [
        Figure(
            row["metric"],
            _where(row, columns),
            _number(row, "value", file),
            _number(row, "low", file),
            _number(row, "high", file),
            row.get("unit", ""),
        )
        for row in rows
    ]
    return figures, columns


def _of_ladder(folder: Path) -> list[Figure]:
    """Returns the errors of a validation's rungs; none of any other run."""
    file = folder / LADDER
    none: list[dict[str, str]] = []
    rows = parsed(file, of_text(lambda content: _rows(content, ("rung", "what"))), none)
    return [
        Figure(f"ladder_{name}", _where(row, ("rung", "label", "what")), _number(row, name, file), unit="%")
        for row in rows
        for name in LADDER_ERRORS
        if row.get(name) not in ("", "inf", None)
    ]


def _of_plan(
    rows: Sequence[Mapping[str, str]], summary: Mapping[str, Any], asked: Mapping[str, Any], folder: Path
) -> tuple[list[Figure], tuple[str, ...]]:
    file = folder / POINTS
    names = list(rows[0]) if rows else []
    columns = tuple(name for name in names if name in PLACE or name.startswith(VARIED))
    ends = {f"{name}.{end}" for name in names for end in INTERVAL}
    metrics = [name for name in names if name not in {*columns, *ends, *NO_FIGURES}]
    figures = _reached(rows, columns, str(summary.get("question") or asked.get("question") or ""), file)
    for row in rows:
        where = _where(row, columns)
        figures.append(Figure(VERDICT, where, None, word=row["verdict"]))
        for name in metrics:
            value = _number(row, name, file)
            low, high = (_number(row, f"{name}.{end}", file) for end in INTERVAL)
            if value is not None:
                figures.append(Figure(name, where, value, low, high, unit_of(name)))
    return figures, columns


def unit_of(metric: str) -> str:
    """Returns the unit of a plan's metric, which its name ends with.

    >>> unit_of("ttft_p99_s"), unit_of("goodput_per_s"), unit_of("output_throughput_tokens_per_s")
    ('s', '1/s', 'tokens/s')
    """
    if metric.endswith("tokens_per_s"):
        return "tokens/s"
    return "1/s" if metric.endswith("_per_s") else "s" if metric.endswith("_s") else ""


def _reached(
    rows: Sequence[Mapping[str, str]], columns: Sequence[str], question: str, file: Path
) -> list[Figure]:
    """Returns how far each way of running comes: the highest rate or the fewest devices that hold."""
    rates = question in RATES
    if not rates and question not in ("devices", "cost"):
        return []
    # A search for a rate takes as many requests as a steady state needs, and draws their lengths.
    drawn = ("requests", "prompt_tokens", "output_tokens")
    across, beside = ("rate_per_s", drawn) if rates else ("devices", ("servers",))
    ways: dict[Key, dict[str, list[float]]] = {}
    for row in rows:
        at = _number(row, across, file)
        if at is not None:
            place = _where(row, [name for name in columns if name not in (across, *beside)])
            ways.setdefault(tuple(place.items()), {}).setdefault(row["verdict"], []).append(at)
    found = []
    for way, verdicts in ways.items():
        held, failed = verdicts.get("holds", []), verdicts.get("fails", [])
        if not held:
            continue
        best = max(held) if rates else min(held)
        beyond = [at for at in failed if (at > best if rates else at < best)]
        # Without a point beyond that fails it is not known how far it would go.
        end = (min(beyond) if rates else max(beyond)) if beyond else None
        if not rates and end is None and best == 1:
            end = 0.0
        low, high = (best, end) if rates else (None if end is None else end + 1, best)
        if end is None:
            low = high = None
        metric, unit = (HIGHEST_RATE, "1/s") if rates else (FEWEST_DEVICES, "")
        found.append(Figure(metric, dict(way), best, low, high, unit))
    return found


# -- inputs ----------------------------------------------------------------------------------------


def _asked(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a scenario or plan, but those that no figure depends on."""
    found = {key: value for key, value in document.items() if key not in IDLE}
    if isinstance(base := found.get("base"), dict):
        found["base"] = {key: value for key, value in base.items() if key not in IDLE}
    return found


def _origin(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a provenance that are inputs, by dotted field."""
    tree = dict(provenance)
    several = tree.pop("devices", None)
    if isinstance(several, list):
        several = {str(_name(own)): own for own in several if isinstance(own, dict)}
    found = {name: value for name, value in dotted(tree).items() if _is_origin(name)}
    for device, own in several.items() if isinstance(several, dict) else ():
        if isinstance(own, dict):
            parts = {name: value for name, value in dotted(own).items() if _is_origin(name)}
            found |= {f"{device}: {name}": value for name, value in parts.items()}
    return found


def _name(own: Mapping[str, Any]) -> str:
    device = own.get("device")
    return str(device.get("title") or device.get("name")) if isinstance(device, dict) else "a device"


def _is_origin(name: str) -> bool:
    kept = any(name == each or (each.endswith(".") and name.startswith(each)) for each in ORIGIN)
    return kept and (name == "profile.source" or not name.endswith(NO_ORIGIN))


def dotted(tree: Any, path: str = "") -> dict[str, Any]:
    """Flattens nested mappings: dotted field -> value.

    >>> dotted({"a": {"b": 1, "c": [2, 3]}, "d": {}})
    {'a.b': 1, 'a.c': [2, 3], 'd': {}}
    """
    if isinstance(tree, dict) and tree:
        return {
            name: value
            for key, part in tree.items()
            for name, value in dotted(part, f"{path}.{key}" if path else str(key)).items()
        }
    return {path: tree}
