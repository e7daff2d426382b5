"""What `make check` leaves out: most of many cases alike (thorough), tests of 0.2 s or more (slow).

`make test` runs both, .ci/run the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough
slow = pytest.mark.slow
_SHARE = 5
# Set by tests/conftest.py, before tests are imported.
_left_out: list[bool] = []


def leave_out(expression: str) -> None:
    """Told which marks a run asks for."""
    _left_out[:] = [True] if "not thorough" in expression else []


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """All values, those behind the first `count` marked as thorough."""
    found = list(values)
    return [*found[:count], *(pytest.param(value, marks=thorough) for value in found[count:])]


def examples(count: int) -> int:
    """So many random examples; a fifth of them where thorough cases are left out."""
    return count // _SHARE if _left_out else count
