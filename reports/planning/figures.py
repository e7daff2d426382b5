"""Figures of a plan: points in, plotly figures out. This module reads no file.

Figures follow the rules at the head of `decode/figures.py`: light colours, no titles, the page draws the key.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import Layout, Scale, by_text
from simcore.reports.common.sections import Row
from simcore.reports.planning.axes import COST, PLACE, WAY, Axis, Laid
from simcore.reports.planning.points import Limit
from simcore.reports.text import NOTHING, counted, in_figure, known, recorded

LOG_FROM, LOG_METRIC_FROM, SIZE, NAMED = 3.0, 10.0, 13, 4
# A bar of an interval reaches beyond the highest value by this factor at most, and never below the axis.
REACH = 1.35
SAYS: Mapping[str, str] = {"holds": "holds", "unsure": "not sure", "fails": "fails"}
SYMBOLS: Mapping[str, str] = {"holds": "circle", "unsure": "diamond", "fails": "square-open"}
LINE_SYMBOLS = ("circle", "square", "diamond")
DASHES = (None, "dot", "dashdot")
# What the id of a point's row in the table begins with: a click on a mark leads there.
POINT = "point-"


@dataclass(frozen=True)
class Limited:
    """A limited metric and how it is shown."""

    limit: Limit
    scale: Scale

    @property
    def text(self) -> str:
        """The limit in words: "at most 500 ms"."""
        value = f"{recorded(self.limit.value * self.scale.factor)}\u00a0{self.scale.unit}".rstrip()
        return f"{'at most' if self.limit.at_most else 'at least'} {value}"

    def value_text(self, row: Row) -> str:
        """Returns the metric of a point with its interval."""
        metric = self.limit.metric
        if not known(row[metric]):
            return f"{self.scale.name} {NOTHING}"
        low, high = row[f"{metric}.low"], row[f"{metric}.high"]
        ends = f" ({self.scale.text(low)} to {self.scale.text(high)})" if known(low) and known(high) else ""
        return f"{self.scale.name} {self.scale.text(row[metric])}{ends}, {self.text}"


def point_hover(row: Row, axes: Sequence[Axis], limited: Sequence[Limited]) -> str:
    """Returns the text of a point: where it is, its verdict, its limited metrics."""
    places = ", ".join(axis.text(row[axis.column]) for axis in axes if known(row[axis.column]))
    replicas = f" after {counted(round(row['replicas']), 'replica')}" if known(row["replicas"]) else ""
    name = row["label"] or row[WAY]
    return by_text(
        f"<b>{in_figure(name)}</b>" if name else "",
        in_figure(places),
        f"<b>{SAYS[row['verdict']]}</b>{replicas}",
        *(in_figure(each.value_text(row)) for each in limited),
        in_figure(COST.text(row[COST.column])) if known(row[COST.column]) else "",
        in_figure(row["why"]),
    )


def across_axis(axis: Axis, values: Sequence[float], apart: float = 0.05) -> common.Axis:
    """Returns the horizontal axis of some values: logarithmic if they are positive and far apart. `apart`:
    least distance of labels, as a share of the axis."""
    places = sorted({*values})
    log = places[0] > 0 and places[-1] / places[0] >= LOG_FROM
    at = [math.log10(place) for place in places] if log else places
    pad = 0.05 * (at[-1] - at[0]) or 0.1
    title = common.log_title(axis.title) if log else axis.title
    return common.places_axis(title, at, 10 if log else 0, (apart, 0.13), pad, _short)


def _short(value: float) -> str:
    whole = math.isclose(value, round(value), rel_tol=1e-9)
    return recorded(round(value) if whole else float(f"{value:.3g}"))


# -- what holds ------------------------------------------------------------------------------------


def verdicts(of: Laid, limited: Sequence[Limited]) -> go.Figure:
    """Draws a mark for the verdict on each point, a row for each place. Points that answer have a ring."""
    axes = [axis for axis in (of.across, of.rows) if axis]
    rows = {place: i for i, place in enumerate(of.places)}
    figure = go.Figure()
    for verdict, symbol in SYMBOLS.items():
        own = of.points[of.points["verdict"] == verdict]
        if own.empty:
            continue
        colour = style.VERDICT[verdict][0]
        hover = [point_hover(row, axes, limited) for row in own.to_dict("records")]
        look: Layout = {"marker": {"size": SIZE, "symbol": symbol}, "customdata": own["point"].tolist()}
        y = own[PLACE].map(rows)
        figure.add_trace(common.marks(own[of.across.column], y, SAYS[verdict], colour, hover, **look))
    best = of.points[of.points["best"] == 1.0]
    if len(best):
        at = {"x": best[of.across.column].tolist(), "y": best[PLACE].map(rows).tolist()}
        ring = {"size": SIZE + 9, "symbol": "circle-open", "color": style.INK[0], "line": {"width": 2}}
        figure.add_scatter(**at, mode="markers", marker=ring, name="the answer", hoverinfo="skip")
    x_axis, narrow = across_axis(of.across, of.points[of.across.column].tolist())
    names = [common.in_two_lines(place) for place in rows]
    meta = {"toggles": True, "links": POINT, "narrow": narrow}
    return common.in_rows(figure, len(rows), xaxis=x_axis, yaxis=common.rows_axis(names), meta=meta)


# -- against the limits ----------------------------------------------------------------------------


def against(of: Laid, shown: Laid, limited: Limited) -> go.Figure:
    """Draws a limited metric with its intervals against the first axis, a line for each place of `shown`, and
    the limit. Every figure of a choice has the colours and the axes of all points, `of`."""
    metric, factor = limited.limit.metric, limited.scale.factor
    y_axis = common.values_axis(limited.scale.title, _reach(of.points, limited), LOG_METRIC_FROM)
    floor = 10 ** y_axis["range"][0] if y_axis.get("type") == "log" else 0.0
    axes = [axis for axis in (of.across, of.rows) if axis]
    looks, figure = _looks(of), go.Figure()
    for place in shown.places:
        own = shown.points[(shown.points[PLACE] == place) & shown.points[metric].notna()]
        own = own.sort_values(of.across.column, kind="stable")
        if own.empty:
            continue
        colour, symbol, dash = looks[place]
        low = (own[f"{metric}.low"] * factor).clip(lower=floor)
        high = (own[f"{metric}.high"] * factor).clip(upper=_top(y_axis))
        value = own[metric] * factor
        bar = common.whisker(value, low, high, color=colour, thickness=1.2, width=4)
        hover = [point_hover(row, axes, [limited]) for row in own.to_dict("records")]
        look: Layout = {"symbol": symbol, "dash": dash, "size": 7, "error_y": bar}
        x = own[of.across.column]
        figure.add_trace(common.dotted(x, value, in_figure(place), colour, hover, **look))
    x_axis, narrow = across_axis(of.across, of.points[of.across.column].tolist(), 0.1)
    figure.add_trace(_limit(limited, x_axis))
    return common.laid_out(figure, narrow, xaxis=x_axis, yaxis=y_axis)


def _limit(limited: Limited, x_axis: Layout) -> go.Scatter:
    ends = [10**end if x_axis["type"] == "log" else end for end in x_axis["range"]]
    at = limited.limit.value * limited.scale.factor
    line = {"color": style.INK[0], "width": 1.5, "dash": "dash"}
    name = f"limit, {limited.text}"
    return go.Scatter(x=ends, y=[at, at], mode="lines", name=name, line=line, hoverinfo="skip")


def _reach(points: pd.DataFrame, limited: Limited) -> list[float]:
    """Returns the values that the axis includes: every mean, the limit, and the ends of intervals unless they
    are far beyond."""
    metric, factor = limited.limit.metric, limited.scale.factor
    values = [*(points[metric] * factor).dropna(), limited.limit.value * factor]
    beyond = (points[f"{metric}.high"] * factor).clip(upper=max(values) * REACH)
    return values + beyond.dropna().tolist()


def _top(axis: Layout) -> float:
    end = axis["range"][1]
    return float(10**end if axis.get("type") == "log" else end)


def _looks(of: Laid) -> dict[str, tuple[str, str, str | None]]:
    """Returns colour, symbol and dash of each place: a hue for each way, a shade for each row's value."""
    ranks, levels = {way: i for i, way in enumerate(of.ways)}, of.levels
    hues, found = style.LINE_HUES, {}
    for row in of.points.drop_duplicates(PLACE).to_dict("records"):
        rank = ranks[row[WAY]]
        hue, turn = hues[rank % len(hues)], rank // len(hues)
        level = levels.index(row[of.rows.column]) if of.rows else 0
        colour = style.ramp("", max(1, len(levels)), hue)[level]
        symbol, dash = LINE_SYMBOLS[(level + turn) % len(LINE_SYMBOLS)], DASHES[turn % len(DASHES)]
        found[row[PLACE]] = colour, symbol, dash
    return found


# -- trade-off -------------------------------------------------------------------------------------


def trade_off(of: Laid, x: Axis, y: Axis, limited: Sequence[Limited], *, front: bool) -> go.Figure:
    """Draws the points that hold by two objectives; points at one place are one mark. The points that answer
    have a mark of their own, and a line if they are the front of these two objectives."""
    held = of.points[(of.points["verdict"] == "holds") & of.points[[x.column, y.column]].notna().all(axis=1)]
    figure = go.Figure()
    others, best = held[held["best"] != 1.0], held[held["best"] == 1.0]
    if len(others):
        colour, (xs, ys, hover) = style.VERDICT["holds"][0], _stacked(others, x, y, limited)
        look = {"size": 9, "opacity": 0.55}
        figure.add_trace(common.marks(xs, ys, "holds", colour, hover, marker=look))
    if len(best):
        name = "the Pareto front" if front else "the answer"
        more: Layout = {} if front else {"mode": "markers"}
        stacked = _stacked(best, x, y, limited)
        figure.add_trace(
            common.dotted(*stacked[:2], name, style.INK[0], stacked[2], symbol="diamond", size=11, **more)
        )
    x_axis, narrow = across_axis(x, held[x.column].tolist() or [1.0])
    heights = sorted({*held[y.column]})
    y_axis = common.values_axis(y.title, heights, LOG_METRIC_FROM)
    if len(heights) <= common.TICKS_AT_MOST:
        y_axis |= {"tickvals": heights, "ticktext": [_short(height) for height in heights]}
    return common.laid_out(figure, narrow, xaxis=x_axis, yaxis=y_axis)


def _stacked(
    rows: pd.DataFrame, x: Axis, y: Axis, limited: Sequence[Limited]
) -> tuple[list[float], list[float], list[str]]:
    """Returns the places of points by two axes, and a text for each place: of one point in full, of several
    their names."""
    stacks: dict[tuple[float, float], list[Row]] = {}
    for row in rows.sort_values([x.column, y.column], kind="stable").to_dict("records"):
        stacks.setdefault((row[x.column], row[y.column]), []).append(row)
    hover = [
        point_hover(own[0], (x, y), limited)
        if len(own) == 1
        else by_text(
            in_figure(f"{x.text(place[0])}, {y.text(place[1])}: {counted(len(own), 'point')}"),
            *(in_figure(row[PLACE]) for row in own[:NAMED]),
            f"and {len(own) - NAMED} more" if len(own) > NAMED else "",
        )
        for place, own in stacks.items()
    ]
    return [place[0] for place in stacks], [place[1] for place in stacks], hover
