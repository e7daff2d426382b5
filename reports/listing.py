"""The list of all run directories below a folder: index.html, sorted and searched by a small script.

A run directory is a folder with provenance.json. One whose files cannot be read is listed as broken, with the
reason. Folders whose names begin with a dot, such as drafts of runs that are being written, are passed over;
so are links, which may lead in circles.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from simcore.input.drafts import write_text
from simcore.input.files import InputError
from simcore.reports.page import render_index
from simcore.reports.run import SIMULATED, json_object, of_text, parsed, summary_of

MARK, PAGE = "provenance.json", "index.html"
PLAN_POINTS, LADDER = "points.csv", "ladder.csv"
# Folders below the given one at most, and characters of an answer.
MOST_FOLDERS, LONGEST_ANSWER = 100_000, 600


@dataclass(frozen=True)
class Entry:
    """A run directory of the list. `at`: when it was written, by the clock of its files, in seconds since
    1970; `link`: the address of its report, or empty; `broken`: why it cannot be read, or empty."""

    folder: str
    at: float
    name: str = ""
    what: str = ""
    machine: str = ""
    device: str = ""
    answer: str = ""
    warnings: int = 0
    link: str = ""
    broken: str = ""

    @property
    def date(self) -> str:
        """When it was written, in UTC."""
        return datetime.fromtimestamp(self.at, UTC).strftime("%Y-%m-%d %H:%M")


def build_index(folder: Path) -> tuple[Path, list[Entry]]:
    """Writes DIR/index.html, whole or not at all; returns its path and what it lists, the newest first.
    Raises InputError if the folder cannot be listed or written."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is no folder; name the folder that run directories are in")
    if (folder / MARK).exists():
        raise InputError(f"{folder}: is itself a run directory; name the folder that it is in")
    entries = sorted((_entry(folder, each) for each in _run_folders(folder)), key=lambda e: (-e.at, e.folder))
    page = folder / PAGE
    write_text(page, render_index(folder.resolve().name, entries))
    return page, entries


def _run_folders(folder: Path) -> Iterator[Path]:
    for seen, (here, inside, files) in enumerate(os.walk(folder), start=1):
        if seen > MOST_FOLDERS:
            raise InputError(f"{folder}: has more than {MOST_FOLDERS:,} folders; name one further down")
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        if MARK in files:
            # A run directory holds no others.
            inside[:] = []
            yield Path(here)


def _entry(top: Path, folder: Path) -> Entry:
    place = folder.relative_to(top).as_posix()
    at = (folder / MARK).lstat().st_mtime
    page = folder / "report.html"
    link = quote(os.fsencode(f"{place}/report.html")) if page.is_file() else ""
    try:
        origin = parsed(folder / MARK, of_text(json_object), _nothing())
        summary = parsed(folder / "summary.json", of_text(summary_of), _nothing())
    except ValueError as error:
        reason = str(error).removeprefix(f"{folder}/")
        return Entry(place, at, name=folder.name, link=link, broken=reason)
    lacks = [] if summary else ["summary.json"]
    if not any((folder / name).is_file() for name in ("results.csv", PLAN_POINTS, LADDER)):
        lacks.append("results.csv")
    if not link:
        lacks.append("report.html")
    answer = str(summary.get("answer") or "")
    return Entry(
        folder=place,
        at=at,
        name=str(summary.get("name") or folder.name),
        what=_what(folder, summary),
        machine=str(origin.get("machine") or SIMULATED),
        device=_device(origin),
        answer=answer if len(answer) <= LONGEST_ANSWER else f"{answer[: LONGEST_ANSWER - 1]}…",
        warnings=len(summary.get("warnings") or ()),
        link=link,
        broken=f"without {', '.join(lacks)}" if lacks else "",
    )


def _nothing() -> dict[str, Any]:
    return {}


def _what(folder: Path, summary: dict[str, Any]) -> str:
    """Returns the study of a run, or the question of a plan."""
    study = str(summary.get("study") or "")
    if (folder / PLAN_POINTS).exists():
        return f"plan: {summary.get('question') or 'unknown'}"
    return f"validation: {study}" if (folder / LADDER).exists() else study.replace("_", " ")


def _device(origin: dict[str, Any]) -> str:
    several = origin.get("devices")
    if isinstance(several, list):
        names = [each.get("device") for each in several if isinstance(each, dict)]
        return ", ".join(dict.fromkeys(_name(each) for each in names))
    return _name(origin.get("device"))


def _name(device: Any) -> str:
    return str(device.get("name") or "") if isinstance(device, dict) else str(device or "")
