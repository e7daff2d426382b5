"""Heat maps of a plan: what stands in a cell, how it is coloured, and the line around what holds."""

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.reports.common.figures import Scale
from simcore.reports.planning.maps import Cell, Shaded, outline
from tests.test_report_planning import Row, page_of, plots_of, point, written
from tests.thorough import slow

BUDGET = "vary.strategies.0.token_budget"
MAP, SHARE = "map-ttft_p99_s", "map-slo_attainment"
RATES, BUDGETS = (4.0, 8.0, 16.0), (512.0, 2048.0, 4096.0)


def cell(number: int, rate: float, budget: float, verdict: str = "holds", **more: Any) -> Row:
    return point("a", 2, rate, verdict, point=number, **{"vary.rate": rate, BUDGET: budget, **more})


def grid() -> list[Row]:
    """Three rates by three budgets: at 4 all hold, at 8 the lowest is unsure, at 16 all fail, and two have no
    TTFT or are missing."""
    verdicts = {4.0: ("holds",) * 3, 8.0: ("unsure", "holds", "holds"), 16.0: ("fails",) * 3}
    places = [(rate, budget, verdicts[rate][i]) for rate in RATES for i, budget in enumerate(BUDGETS)]
    rows = [cell(i + 1, *place, best=i == 4) for i, place in enumerate(places)]
    rows[6] |= {"ttft_p99_s": "", "ttft_p99_s.low": "", "ttft_p99_s.high": ""}
    return rows[:-1]


def traces(folder: Path, key: str = MAP, choice: str = "0") -> dict[str, Any]:
    """The traces of a map by name; the cells by their type, outlines without their ground."""
    data = plots_of(page_of(folder))[key][choice]["data"]
    return {
        trace.get("name", trace["type"]): trace for trace in data if trace.get("showlegend") is not False
    } | {
        "cells": data[0],
        "texts": next((trace for trace in data if trace.get("mode") == "text"), None),
    }


def test_a_cell_has_its_value_its_point_and_the_command_for_it(tmp_path: Path) -> None:
    found = traces(written(tmp_path, "grid", grid()))["cells"]
    assert found["text"] == [["200", "400", ""], ["200", "400", "800"], ["200", "400", ""]]
    assert found["customdata"] == [[1, 4, 7], [2, 5, 8], [3, 6, None]]
    assert "python -m simcore run . --point 5" in found["hovertext"][1][1]
    page = page_of(tmp_path)
    assert {int(n) for n in re.findall(r'<tr id="point-(\d+)">', page)} == set(range(1, 9))


@slow
def test_colour_is_the_distance_from_the_limit_in_factors_of_two(tmp_path: Path) -> None:
    found = traces(written(tmp_path, "grid", grid()))["cells"]["z"]
    # Limit 500 ms: 200, 400 and 800 ms; nothing where there is no TTFT or no point.
    own = [math.log2(500 / ms) for ms in (200, 400, 800)]
    assert found[1] == pytest.approx(own)
    assert found[0][:2] == pytest.approx(own[:2])
    assert found[0][2] is None
    assert found[2][2] is None


@slow
def test_of_a_share_what_it_lacks_to_one_counts(tmp_path: Path) -> None:
    found = traces(written(tmp_path, "grid", grid()), SHARE)["cells"]
    # 95 % where 90 % are asked for: half as much is missing.
    assert found["z"][0] == pytest.approx([1.0, 1.0, 1.0])


def test_what_holds_is_within_a_line_what_is_unsure_within_dashes(tmp_path: Path) -> None:
    found = traces(written(tmp_path, "grid", grid()))
    assert sides(found["holds for sure"]) == sides_of({(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)})
    assert sides(found["not sure"]) == sides_of({(1, 0)})
    assert found["holds for sure"]["line"]["dash"] == "solid"
    assert found["not sure"]["line"]["dash"] == "dash"
    (x,), (y,) = found["the answer"]["x"], found["the answer"]["y"]
    assert (round(x), round(y)) == (1, 1)


def test_without_limits_the_usual_latencies_have_maps_from_their_median(tmp_path: Path) -> None:
    folder = written(tmp_path, "grid", grid(), limits=[], objectives=[], certainty=None)
    page = page_of(folder)
    assert [name for name in plots_of(page) if name.startswith("map-")] == [MAP]
    assert ("Over two fields" in page, "Where it holds" in page) == (True, False)
    table = page[page.index("8 points") :]
    assert ("TTFT, 99th percentile" in table, ">verdict<" in table) == (True, False)
    found = traces(folder)
    # Of eight points seven have a TTFT: three of 200 ms, three of 400, one of 800.
    assert found["cells"]["z"][1] == pytest.approx([1.0, 0.0, -1.0])
    assert set(found) == {"cells", "texts", "the answer"}


@slow
def test_a_cell_without_its_metric_says_so_in_words(tmp_path: Path) -> None:
    texts = traces(written(tmp_path, "grid", grid()))["texts"]
    assert (texts["x"], texts["y"], texts["text"], texts["customdata"]) == ([2], [0], ["fails"], [7])


@slow
def test_the_key_of_the_colours_is_in_values(tmp_path: Path) -> None:
    rows = grid()
    rows[5]["ttft_p99_s"] = 0.01
    bar = plots_of(page_of(written(tmp_path, "grid", rows)))[MAP]["0"]["layout"]["coloraxis"]["colorbar"]
    assert bar["ticktext"] == ["2,000", "1,000", "500<br>limit", "250", "125<br>or better"]


@slow
def test_a_map_for_each_value_of_a_third_field_with_the_same_colours(tmp_path: Path) -> None:
    rows = [
        cell(i + 1, rate, budget, **{"vary.kind": kind, "ttft_p99_s": 0.1 * (i + 1)})
        for i, (kind, rate, budget) in enumerate(
            (kind, rate, budget) for kind in "xy" for rate in RATES for budget in BUDGETS
        )
    ]
    plots = plots_of(page_of(written(tmp_path, "grid", rows)))[MAP]
    assert [plots[key]["data"][0]["customdata"][0][0] for key in ("0", "1")] == [1, 10]
    axes = [plots[key]["layout"]["coloraxis"] for key in ("0", "1")]
    assert axes[0] == axes[1]


@slow
def test_an_objective_has_a_map_unless_an_axis_says_it(tmp_path: Path) -> None:
    # Energy differs along both axes, the rate is one of them; the least that holds is 9 J, at point 2.
    energy = [12.0, 9.0, 10.0, 6.0, 18.0, 36.0, 5.0, 4.0]
    rows = [{**row, "joules_per_output_token": j} for row, j in zip(grid(), energy, strict=True)]
    goals = ["highest_rate", "lowest_energy"]
    plots = plots_of(page_of(written(tmp_path, "grid", rows, objectives=goals)))
    assert {key for key in plots if key.startswith("map-")} == {MAP, SHARE, "map-joules_per_output_token"}
    z = plots["map-joules_per_output_token"]["0"]["data"][0]["z"]
    assert (z[1][0], z[1][1], z[2][1]) == pytest.approx((0.0, -1.0, -2.0))
    assert z[0][1] == pytest.approx(math.log2(9 / 6))


@slow
@pytest.mark.parametrize("count", [1, 3])
def test_points_that_fill_no_grid_have_no_map(count: int, tmp_path: Path) -> None:
    # A diagonal, as `together: zip` makes it, or a single row.
    rows = [cell(i + 1, RATES[i], BUDGETS[min(i, count - 1)]) for i in range(3)]
    assert "map-" not in str([*plots_of(page_of(written(tmp_path, "grid", rows)))])


@slow
def test_numbers_are_left_out_where_cells_are_too_small(tmp_path: Path) -> None:
    rows = [cell(31 * i + j + 1, 1.0 + i, 512.0 + j) for i in range(3) for j in range(31)]
    found = traces(written(tmp_path, "grid", rows))["cells"]
    assert "texttemplate" not in found
    assert len(found["z"]) == 31


# -- the outline and the scale -----------------------------------------------------------------------------

Side = frozenset[tuple[float, float]]


def sides(line: dict[str, Any]) -> list[Side]:
    """The sides of a drawn line, sorted."""
    ends = list(zip(line["x"], line["y"], strict=True))
    return sorted((frozenset(pair) for pair in pairwise(ends) if (None, None) not in pair), key=sorted)


def sides_of(cells: set[Cell]) -> list[Side]:
    """The sides that one cell of a set has and no other."""
    every = [side for cell in cells for side in _around(cell)]
    return sorted((side for side in every if every.count(side) == 1), key=sorted)


def _around(cell: Cell) -> Iterator[Side]:
    x, y = cell
    corners = [(x - 0.5, y - 0.5), (x + 0.5, y - 0.5), (x + 0.5, y + 0.5), (x - 0.5, y + 0.5)]
    return (frozenset(pair) for pair in pairwise([*corners, corners[0]]))


@slow
@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4))))
def test_an_outline_is_every_side_without_a_neighbour_once_in_closed_lines(cells: set[Cell]) -> None:
    x, y = outline(cells)
    assert sides({"x": x, "y": y}) == sides_of(cells)
    lines = [[]] if x else []
    for at in zip(x, y, strict=True):
        lines.append([]) if at == (None, None) else lines[-1].append(at)
    assert all(line[0] == line[-1] for line in lines)


SHADES = [
    Shaded("m", Scale("m"), 0.5, "limit", at_most=True),
    Shaded("m", Scale("m"), 0.5, "limit", at_most=False),
    Shaded("m", Scale("m", "%", 100.0), 0.9, "limit", at_most=False, lacks=True),
]


@pytest.mark.parametrize("shaded", SHADES)
@given(st.floats(0.01, 0.98))
def test_the_scale_gives_back_the_value_and_is_zero_at_the_limit(shaded: Shaded, value: float) -> None:
    assert shaded.better(shaded.neutral) == 0.0
    assert shaded.value(shaded.better(value)) == pytest.approx(value)
    assert (shaded.better(value) > 0) == (
        value < shaded.neutral if shaded.at_most else value > shaded.neutral
    )


def test_zero_and_all_are_at_the_ends() -> None:
    most, least, share = SHADES
    assert (most.better(0.0), least.better(0.0), share.better(1.0)) == (math.inf, -math.inf, math.inf)
    nothing = Shaded("m", Scale("m"), 0.0, "limit", at_most=True)
    assert (nothing.better(0.0), nothing.better(0.1)) == (0.0, -math.inf)
