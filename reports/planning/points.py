"""Reads the run directory of a plan; what is missing is left out, what is garbage is refused."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from simcore.input.files import parse_yaml, read_text

FILE = "points.csv"


@dataclass(frozen=True)
class Planned:
    """A plan's directory in memory. `points`: a row for each judged point; `asked`: the plan as asked."""

    points: pd.DataFrame
    summary: dict[str, Any]
    asked: dict[str, Any]
    provenance: dict[str, Any]


def read_plan(folder: Path) -> Planned:
    """Reads a plan's directory. Raises ValueError, OSError."""

    def mapping(name: str, parse: Any) -> dict[str, Any]:
        path = folder / name
        found = parse(read_text(path)) if path.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"{path}: holds no mapping")
        return found

    points = pd.read_csv(folder / FILE, float_precision="round_trip")
    return Planned(
        points,
        mapping("summary.json", json.loads),
        mapping("plan.yaml", lambda text: parse_yaml(text, "plan.yaml")),
        mapping("provenance.json", json.loads),
    )
