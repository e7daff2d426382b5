"""Finished runs kept on disk, so that a plan that was ended goes on where it stopped.

file     plans.sqlite3 in the folder of the cache (`simcore/sim/kept.py`); SIMCORE_CACHE=none keeps nothing
key      sha256 of all that a run goes by: scenario, model, replica, prices, code, versions; of recorded files
         their size and time of change
value    JSON

Each result is written as soon as it is there. A store that is broken or cannot be written is left alone: then
runs are made again.
"""

import json
import sqlite3
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 1
FILE = f"plans-{FORMAT}.sqlite3"
# The oldest results beyond this number are dropped: a result takes some kilobytes.
MOST_RESULTS = 100_000
# Most keys of a query: SQLite takes 999 variables at least.
AT_ONCE = 500


class Store:
    """Results by key."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None
        if folder is not None:
            with suppress(sqlite3.Error, OSError):
                folder.mkdir(parents=True, exist_ok=True)
                self._file = _opened(folder / FILE)

    def load(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns the results that are known."""
        found: dict[str, Any] = {}
        wanted = list(keys)
        if self._file is None:
            return found
        with suppress(sqlite3.Error, ValueError):
            for i in range(0, len(wanted), AT_ONCE):
                part = wanted[i : i + AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = self._file.execute(f"SELECT key, value FROM results WHERE key IN ({marks})", part)
                found.update((key, json.loads(value)) for key, value in rows)
        return found

    def save(self, key: str, value: Any) -> None:
        """Keeps a result."""
        if self._file is not None:
            with suppress(sqlite3.Error), self._file:
                words = "INSERT OR REPLACE INTO results (key, value) VALUES (?, ?)"
                self._file.execute(words, (key, json.dumps(value)))

    def close(self) -> None:
        """Closes the file, and drops the oldest results where there are too many."""
        if self._file is not None:
            oldest = "DELETE FROM results WHERE number <= (SELECT MAX(number) FROM results) - ?"
            with suppress(sqlite3.Error), self._file:
                self._file.execute(oldest, (MOST_RESULTS,))
            self._file.close()
            self._file = None


def _opened(path: Path) -> sqlite3.Connection:
    """Opens a store; a file that is none is replaced. Raises sqlite3.Error, OSError."""
    for last in (False, True):
        file = sqlite3.connect(path, timeout=10.0)
        try:
            # A write then waits for no disk: a killed process loses nothing, only a power failure may.
            file.execute("PRAGMA journal_mode=WAL")
            file.execute("PRAGMA synchronous=NORMAL")
            with file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS results"
                    " (number INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT UNIQUE, value TEXT NOT NULL)"
                )
        except sqlite3.DatabaseError as error:
            file.close()
            if last or isinstance(error, sqlite3.OperationalError):
                raise
            path.unlink(missing_ok=True)
        else:
            return file
    raise AssertionError
