"""Figures of small runs of every study are those that were written down (tests/figures_as_they_are.py)."""

import math
from typing import Any

import pytest

from tests import figures_as_they_are
from tests.figures_as_they_are import NAMES, differences, lines_now, written
from tests.thorough import slow, thorough

# Of 0.2 s or more, but for serving_flover and tiling_schedules, which are looked at every time.
SLOW = {
    "decode_speculation", "serving_ranks", "serving_engines", "decode_published_hits", "serving_scaled",
    "serving_fleets", "serving_tenants", "serving_clients", "decode_crossover_found",
}  # fmt: skip
# Much like others: of one length or of several, of arrivals of one's own, of several prefills or batches.
ALIKE = {
    "serving_prefills", "serving_one_length", "serving_own_arrivals", "serving_spread",
    "decode_speculating_batches",
}  # fmt: skip


def marked(name: str) -> Any:
    marks = [slow] * (name in SLOW) + [thorough] * (name in ALIKE)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", map(marked, NAMES))
def test_figures_are_as_they_were(name: str) -> None:
    found = differences(written(name), lines_now(name))
    assert not found, "\n".join(found[:10])


@pytest.mark.parametrize(
    ("now", "alike"),
    [
        (["row", "a", 1.0 + 1e-11, 2], True),
        (["row", "a", 1.0 + 1e-8, 2], False),
        (["row", "b", 1.0, 2], False),
        (["row", "a", 1.0, 0.0], False),
        (["row", "a", math.nan, 2], False),
        (["row", "a", 1.0], False),
    ],
)
def test_what_differs_is_told(now: list[Any], alike: bool) -> None:
    before = [["row", "a", 1.0, 2]]
    assert (differences(before, [now]) == []) is alike
    assert differences(before, [now, now])[-1] == "1 lines, now 2"


def test_every_file_is_compared() -> None:
    assert {path.stem for path in figures_as_they_are.FOLDER.iterdir()} == set(NAMES)
