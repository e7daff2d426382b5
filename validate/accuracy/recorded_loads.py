"""Rows of `served_loads` out of the folder of a run that a card has made.

set, rate_per_s, metric, measured   what `--set` gave, and each latency of all requests of a load, s
cap_times                           how many times lower the card's power cap was than the profile's, if known
the other columns                   the birth record, from the run's provenance
"""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

from simcore.input.files import InputError, read_cells
from simcore.studies.columns import WHOLE_RUN
from simcore.validate import cells
from simcore.validate.program import write_csv

SCENARIO, OPTION, BETWEEN, DURATION = "h200/serving", "--set", "; ", "duration_s"
METRICS = tuple(f"{name}_{of}_s" for of in ("mean", "p50", "p95", "p99") for name in ("ttft", "tpot", "e2e"))
CAP, DATE = "cap_times", "date_utc"
COLUMNS = (
    "set", "rate_per_s", "metric", "measured", "cache_state", "host", "device", "torch", "triton", DATE,
    CAP,
)  # fmt: skip


def rows_of(folder: Path, cap_times: float | None = None) -> list[dict[str, Any]]:
    """Returns the rows of a run's folder; `cap_times`: of its card, if known. Raises InputError if it is none
    of `h200/serving` on a card."""
    file = folder / "provenance.json"
    try:
        born = json.loads(file.read_text(encoding="utf-8"))
        words = shlex.split(born["command"])
        birth = {
            "cache_state": born["cache"].partition(";")[0].replace("the run itself", "the run"),
            "host": born["host"], "device": born["card"],
            "torch": born["torch"], "triton": born["triton"], DATE: born["date"],
            CAP: "" if cap_times is None else f"{cap_times:.6g}",
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: is no record of a run on a card: {error}") from None
    if not any(word == SCENARIO or word.endswith(f"/{SCENARIO}.yaml") for word in words):
        raise InputError(f"{file}: command: is of another scenario than h200/serving")
    given = [value for name, value in pairwise(words) if name == OPTION]
    given += [word.removeprefix(f"{OPTION}=") for word in words if word.startswith(f"{OPTION}=")]
    found = []
    for _, line in cells.lines(folder / "results.csv", ("metric", "rate_per_s", "value")):
        name = line["metric"]
        metric = name.removesuffix(WHOLE_RUN)
        if name == DURATION or (name != metric and metric in METRICS):
            figure = {"rate_per_s": line["rate_per_s"], "metric": metric, "measured": line["value"]}
            found.append({"set": BETWEEN.join(given), **figure, **birth})
    if not found:
        raise InputError(f"{folder / 'results.csv'}: has no latency of a whole run")
    return found


def add(folders: list[Path], file: Path, cap_times: float | None = None) -> None:
    """Appends the rows of runs to a file, or makes it; `cap_times`: of their card, if known. Raises
    InputError for a file of other columns, or one that has such a load."""
    kept: list[dict[str, Any]] = []
    if file.exists():
        head, lines = read_cells(file)
        if tuple(head) != COLUMNS:
            raise InputError(f"{file}: its columns should be {', '.join(COLUMNS)}")
        kept = [dict(zip(head, line, strict=True)) for line in lines]
    for folder in folders:
        found = rows_of(folder, cap_times)
        again = {(row["set"], row[DATE]) for row in kept} & {(row["set"], row[DATE]) for row in found}
        if again:
            sets = ", ".join(given for given, _ in again)
            raise InputError(f"--add {folder}: {file} has loads of this set already: {sets}")
        kept += found
    write_csv(kept, file)
