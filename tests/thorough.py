"""Cases that `make check` leaves out: it runs the first of many alike, the whole suite all of them."""

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """All values, those behind the first `count` marked as thorough."""
    found = list(values)
    return [*found[:count], *(pytest.param(value, marks=thorough) for value in found[count:])]
