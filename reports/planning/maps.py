"""Heat maps of a plan's points over two numbers: how far a metric is from its limit, and what holds.

Colour is the distance in factors of two: blue keeps the limit, brown breaks it. What holds is outlined, so
that no colour is needed to see it: for sure by a line, else by dashes. Where nothing is limited, colours are
of the usual latencies, from the median of all points. This module reads no file.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import Layout, Scale
from simcore.reports.common.sections import Row
from simcore.reports.planning.axes import WAY, Axis, Laid
from simcore.reports.planning.figures import POINT, SAYS, Limited, point_hover
from simcore.reports.text import in_figure, known, recorded

Cell = tuple[int, int]
# Beyond factors of four nothing more is to be seen; below those of 1.4 noise would be.
MOST, LEAST = 2.0, 0.5
# Columns up to which two maps stand beside each other, and cells up to which they have numbers.
FEW_COLUMNS, NUMBERED = 8, (20, 30)
CELL_PX, MAP_PX, FOOT_PX = (24, 44), 460, 132
# Of all cells this share has a point at least: else the points are no grid.
FILLED = 0.5


@dataclass(frozen=True)
class Shaded:
    """What colours a map: a column of the points and the value of the neutral colour, its limit, that of the
    best point that holds, or the middle one (`of` says which). `at_most`: less is better; `lacks`: what
    counts is how much a share lacks to one."""

    column: str
    scale: Scale
    neutral: float
    of: str
    at_most: bool
    lacks: bool = False

    def better(self, value: float) -> float:
        """Returns by how many factors of two a value is better than the neutral one."""
        small, large = (value, self.neutral) if self.at_most else (self.neutral, value)
        if self.lacks:
            small, large = 1.0 - value, 1.0 - self.neutral
        if small <= 0.0 or large <= 0.0:
            return math.inf if small < large else 0.0 if small == large else -math.inf
        return math.log2(large / small)

    def value(self, better: float) -> float:
        """Returns the value that is better than the neutral one by so many factors of two."""
        if self.lacks:
            return 1.0 - (1.0 - self.neutral) * math.pow(2.0, -better)
        return self.neutral * math.pow(2.0, -better if self.at_most else better)


def of_limit(limited: Limited) -> Shaded:
    """Returns what colours the map of a limited metric."""
    limit, scale = limited.limit, limited.scale
    lacks = not limit.at_most and scale.unit == "%" and limit.value < 1.0
    return Shaded(limit.metric, scale, limit.value, "limit", limit.at_most, lacks)


def of_objective(axis: Axis, scale: Scale, whole: Laid, *, at_most: bool) -> Shaded | None:
    """Returns what colours the map of an objective; None if nothing holds, or if one of the axes alone says
    what it is."""
    values = whole.points[axis.column]
    held = values[(whole.points["verdict"] == "holds") & values.notna()]
    distinct = [whole.points.groupby([WAY, place])[axis.column].nunique() for place in _placed(whole)]
    if held.empty or min(int(each.max()) for each in distinct) < 2:
        return None
    return Shaded(axis.column, scale, float(held.min() if at_most else held.max()), "best", at_most)


def of_figure(column: str, scale: Scale, whole: Laid) -> Shaded:
    """Returns what colours the map of a latency that no limit judges: the median of all is neutral."""
    return Shaded(column, scale, float(whole.points[column].median()), "middle", at_most=True)


def _placed(of: Laid) -> list[str]:
    return [axis.column for axis in (of.across, of.rows) if axis]


def is_grid(of: Laid) -> bool:
    """Whether the points fill a grid over two numbers, so that a map shows more than a few cells."""
    if of.rows is None:
        return False
    columns, rows = (of.points[name].nunique() for name in _placed(of))
    most = int(of.points.groupby(WAY)["verdict"].count().max())
    return columns > 1 and rows > 1 and most > FILLED * columns * rows


def is_wide(of: Laid) -> bool:
    """Whether a map needs the whole width of the page."""
    return bool(of.points[of.across.column].nunique() > FEW_COLUMNS)


def heat_map(whole: Laid, shown: Laid, shaded: Shaded, limited: Sequence[Limited]) -> go.Figure:
    """Draws one way's points as cells. Every figure of a choice has the cells and the colours of all points,
    `whole`."""
    assert whole.rows is not None
    columns, rows = (sorted({*whole.points[name].tolist()}) for name in _placed(whole))
    cells: dict[Cell, Row] = {}
    for row in shown.points.to_dict("records"):
        at = columns.index(row[whole.across.column]), rows.index(row[whole.rows.column])
        cells.setdefault(at, row)
    hover = {at: _hover(row, whole, shaded, limited) for at, row in cells.items()}
    reach, beyond = _reach(whole, shaded)
    numbered = len(columns) <= NUMBERED[0] and len(rows) <= NUMBERED[1]
    sizes = (len(columns), len(rows))
    figure = go.Figure(_coloured(cells, sizes, shaded, reach, hover, numbered=numbered))
    _mark_cells(figure, cells, shaded, hover, OUTLINES if limited else {})
    names = [_names(columns), _names(rows)]
    narrow = _cells_axis(names[0], "", 0.12)
    cell_px = min(CELL_PX[1], max(CELL_PX[0], MAP_PX // len(rows)))
    return figure.update_layout(
        height=FOOT_PX + max(2, len(rows)) * cell_px,
        margin={"l": 8, "r": 10, "t": 8, "b": 48},
        xaxis=_cells_axis(names[0], whole.across.title, 0.045),
        yaxis=_cells_axis(names[1], whole.rows.title, 0.05),
        coloraxis=_colours(shaded, reach, beyond, cell_px * max(2, len(rows))),
        meta={"toggles": True, "links": POINT, "narrow": {f"xaxis.{k}": narrow[k] for k in TICKS}},
    )


TICKS = ("tickvals", "ticktext")


def _hover(row: Row, whole: Laid, shaded: Shaded, limited: Sequence[Limited]) -> str:
    axes = [axis for axis in (whole.across, whole.rows) if axis]
    value = row[shaded.column]
    is_shown = shaded.column in {each.limit.metric for each in limited} or not known(value)
    said = "" if is_shown else in_figure(f"{shaded.scale.name} {shaded.scale.text(value)}")
    number = row["point"]
    run = f"python -m simcore run . --point {round(number)}" if known(number) else ""
    return common.by_text(point_hover(row, axes, limited), said, run)


def _reach(whole: Laid, shaded: Shaded) -> tuple[float, tuple[bool, bool]]:
    """Returns the factors of two of the strongest colours, and whether a value is beyond them: of worse ones,
    of better ones."""
    found = [shaded.better(value) for value in whole.points[shaded.column] if known(value)]
    reach = min(MOST, max([LEAST, *(abs(one) for one in found)]))
    return reach, (min(found, default=0.0) < -reach, max(found, default=0.0) > reach)


def _coloured(
    cells: Mapping[Cell, Row],
    sizes: Cell,
    shaded: Shaded,
    reach: float,
    hover: Mapping[Cell, str],
    *,
    numbered: bool,
) -> go.Heatmap:
    def table(of: Callable[[Cell], object], empty: object = None) -> list[list[object]]:
        return [[of((i, j)) if (i, j) in cells else empty for i in range(sizes[0])] for j in range(sizes[1])]

    def colour(at: Cell) -> float | None:
        value = cells[at][shaded.column]
        return min(reach, max(-reach, shaded.better(value))) if known(value) else None

    def text(at: Cell) -> str:
        value = cells[at][shaded.column]
        return replace(shaded.scale, unit="").text(value) if known(value) and numbered else ""

    numbers = {"texttemplate": "%{text}", "text": table(text, "")} if numbered else {}
    # Numbers without a size of their own become as large as the cell allows.
    size = {"textfont": {"size": 12}} if numbered and sizes[0] <= FEW_COLUMNS else {}
    return go.Heatmap(
        x=list(range(sizes[0])),
        y=list(range(sizes[1])),
        z=table(colour),
        customdata=table(lambda at: _number(cells[at])),
        hovertext=table(hover.__getitem__, ""),
        hoverinfo="text",
        hoverongaps=False,
        coloraxis="coloraxis",
        xgap=1,
        ygap=1,
        showlegend=False,
        **numbers,
        **size,
    )


def _number(row: Row) -> int | None:
    return round(row["point"]) if known(row["point"]) else None


OUTLINES: Mapping[str, tuple[str, str]] = {
    "unsure": ("not sure", "dash"),
    "holds": ("holds for sure", "solid"),
}


def _mark_cells(
    figure: go.Figure,
    cells: Mapping[Cell, Row],
    shaded: Shaded,
    hover: Mapping[Cell, str],
    outlines: Mapping[str, tuple[str, str]],
) -> None:
    """Adds the outlines, what fails without a figure, and where the answer is."""
    for verdict, (name, dash) in outlines.items():
        inside = {at for at, row in cells.items() if row["verdict"] == verdict}
        if not inside:
            continue
        x, y = outline(inside)
        line = {"x": x, "y": y, "mode": "lines", "name": name, "hoverinfo": "skip", "cliponaxis": False}
        ground = {"color": style.HOLLOW[0], "width": 6}
        figure.add_scatter(**line, line=ground, legendgroup=name, showlegend=False)
        figure.add_scatter(**line, line={"color": style.INK[0], "width": 2.5, "dash": dash}, legendgroup=name)
    blank = [at for at, row in cells.items() if not known(row[shaded.column])]
    _text(figure, blank, [SAYS[cells[at]["verdict"]] for at in blank], hover, cells)
    best = [at for at, row in cells.items() if row["best"] == 1.0]
    if best:
        look = {"size": 9, "symbol": "diamond", "line": {"color": style.HOLLOW[0], "width": 1.5}}
        at = {"x": [x + 0.36 for x, _ in best], "y": [y + 0.3 for _, y in best]}
        figure.add_scatter(
            **at, mode="markers", name="the answer", marker={**look, "color": style.INK[0]}, hoverinfo="skip"
        )


def _text(
    figure: go.Figure,
    places: Sequence[Cell],
    texts: Sequence[str],
    hover: Mapping[Cell, str],
    cells: Mapping[Cell, Row],
) -> None:
    if not places:
        return
    figure.add_scatter(
        x=[x for x, _ in places],
        y=[y for _, y in places],
        mode="text",
        text=texts,
        textfont={"size": 11, "color": style.INK[0]},
        customdata=[_number(cells[at]) for at in places],
        hovertext=[hover[at] for at in places],
        hoverinfo="text",
        showlegend=False,
    )


def outline(cells: set[Cell]) -> tuple[list[float | None], list[float | None]]:
    """Returns the closed lines around cells of side one, by their centres; None parts the lines.

    >>> outline({(0, 0)})
    ([-0.5, 0.5, 0.5, -0.5, -0.5], [-0.5, -0.5, 0.5, 0.5, -0.5])
    """
    # Sides without a neighbour, with the cell to their left: each corner has as many that end as begin.
    begins: dict[Cell, list[Cell]] = {}
    for x, y in sorted(cells):
        for (dx, dy), start, end in SIDES:
            if (x + dx, y + dy) not in cells:
                begins.setdefault((x + start[0], y + start[1]), []).append((x + end[0], y + end[1]))
    xs: list[float | None] = []
    ys: list[float | None] = []
    while begins:
        first = at = min(begins)
        line = [first]
        while not (at == first and len(line) > 1):
            ends = begins[at]
            at, old = ends.pop(), at
            if not ends:
                del begins[old]
            line.append(at)
        parted: list[float | None] = [None] if xs else []
        xs += [*parted, *(x - 0.5 for x, _ in line)]
        ys += [*parted, *(y - 0.5 for _, y in line)]
    return xs, ys


# The neighbour across each side of a cell, and the corners where the side begins and ends, against the clock.
SIDES: Sequence[tuple[Cell, Cell, Cell]] = (
    ((0, -1), (0, 0), (1, 0)),
    ((1, 0), (1, 0), (1, 1)),
    ((0, 1), (1, 1), (0, 1)),
    ((-1, 0), (0, 1), (0, 0)),
)


def _names(values: Sequence[float]) -> list[str]:
    return [recorded(value if value == round(value) else float(f"{value:.3g}")) for value in values]


def _cells_axis(names: Sequence[str], title: str, apart: float) -> Layout:
    kept = [round(at) for at in common.spaced(list(range(len(names))), apart)]
    return {
        "title": {"text": title},
        "tickvals": kept,
        "ticktext": [names[at] for at in kept],
        "showgrid": False,
        "range": [-0.5, len(names) - 0.5],
    }


def _colours(shaded: Shaded, reach: float, beyond: tuple[bool, bool], map_px: int) -> Layout:
    """Returns the scale of colours with its key below the map, in values."""
    at = [share * reach for share in (-1.0, -0.5, 0.0, 0.5, 1.0)]
    texts = [replace(shaded.scale, unit="").text(shaded.value(one)) for one in at]
    texts[2] = f"{texts[2]}<br>{shaded.of}"
    texts[0] += "<br>or worse" * beyond[0]
    texts[4] += "<br>or better" * beyond[1]
    bar = {
        "orientation": "h",
        "y": -70.0 / map_px,
        "yanchor": "top",
        "thickness": 10,
        "outlinewidth": 0,
        "len": 0.86,
        # A mark at the very end is lost to rounding.
        "tickvals": [0.999 * one for one in at],
        "ticktext": texts,
        "tickfont": {"size": 11},
    }
    scale = [[i / 4, light] for i, (light, _) in enumerate(style.DIVERGING)]
    return {"cmin": -reach, "cmax": reach, "colorscale": scale, "colorbar": bar}
