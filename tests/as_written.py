"""Lines that were written down and reviewed, against lines as they are now; or written anew.

SIMCORE_UPDATE_TAPES=1 python -m pytest tests/test_tapes.py      writes those of a test file anew
"""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

UPDATE = "SIMCORE_UPDATE_TAPES"


def are_as_written(path: Path, lines: Sequence[str]) -> None:
    """Fails with what differs; a file that is not there has no line."""
    if os.environ.get(UPDATE):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    expected = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if list(lines) != expected:
        diff = "\n".join(difflib.unified_diff(expected, list(lines), path.name, "now", lineterm="", n=2))
        pytest.fail(f"{diff}\n\nMeant? Then write it anew by {UPDATE}=1, and review the change.")
