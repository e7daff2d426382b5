"""Figures of the serving study: data frames in, plotly figures out. This module reads no file.

Figures follow the rules at the head of `decode/figures.py`: light colours, no titles, the page draws the key.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import Layout, Scale, Variant, hollow, laid_out, small, spaced
from simcore.reports.text import counted, duration, in_figure, known, percent, recorded

LOG_SCALE_FROM = 10.0
SECONDS_FROM = 10.0
CURVE_POINTS = 200
GANTT_ROW_PX = 9
BAND_REACH = 1.35
FEW_TICKS: Layout = {"xaxis.nticks": 5}
Floats = NDArray[np.float64]


def seconds(name: str, longest: float, seconds_from: float = SECONDS_FROM) -> Scale:
    """Returns the scale of a time: seconds if the longest is at least `seconds_from`, else milliseconds."""
    return common.seconds(name, longest, seconds_from)


def limit_text(limit_s: float) -> str:
    """Returns a limit as given, without rounding: "500 ms"."""
    scale = seconds("", limit_s)
    return f"{recorded(limit_s * scale.factor)}\u00a0{scale.unit}"


def _values_axis(scale: Scale, values: Sequence[float], top: float = math.inf) -> Layout:
    return common.values_axis(scale.title, values, LOG_SCALE_FROM, top)


def _places_axis(title: str, places: Sequence[float]) -> common.Axis:
    log = places[0] > 0 and places[-1] / places[0] >= LOG_SCALE_FROM
    at = [math.log10(place) for place in places] if log else list(places)
    pad = 0.03 * (at[-1] - at[0]) or 0.1
    return common.places_axis(title, at, 10 if log else 0, (0.05, 0.13), pad, recorded)


# -- distributions ---------------------------------------------------------------------------------


def curve(values: Floats, points: int = CURVE_POINTS) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the empirical distribution function, (values, percent of values no larger), at most `points`
    points.

    A sample of n has the steps k/n; a larger sample is represented by quantiles at evenly spaced shares.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return small([]), small([])
    ranks = np.unique(np.linspace(1, len(ordered), min(points, len(ordered))).round().astype(int))
    return small(ordered[ranks - 1]), small(100 * ranks / len(ordered))


def distributions(
    samples: Mapping[str, Floats], shown: Sequence[Variant], name: str, bound_s: float | None
) -> go.Figure:
    """Draws each variant's distribution of a latency; the SLO is a dotted line. `samples`: label -> s."""
    curves = {v.label: curve(samples[v.label]) for v in shown if len(samples.get(v.label, ()))}
    ends = [float(x[i]) for x, _ in curves.values() if len(x) for i in (0, len(x) // 50, -1)]
    scale = seconds(name, max(ends, default=0.0))
    figure = go.Figure()
    template = f"%{{y:.3g}} % within %{{x:.4g}} {scale.unit}"
    for variant in shown:
        if variant.label in curves:
            x, y = curves[variant.label]
            figure.add_trace(common.line(x * np.float32(scale.factor), y, variant, template, shape="hv"))
    if known(bound_s):
        ends.append(float(bound_s or 0.0))
        at, slo = ends[-1] * scale.factor, f"SLO, {recorded(ends[-1] * scale.factor)}\u00a0{scale.unit}"
        line = {"color": style.INK[0], "width": 1.5, "dash": "dot"}
        figure.add_scatter(x=[at, at], y=[0, 100], mode="lines", name=slo, line=line, hoverinfo="skip")
    y_axis = {"title": {"text": "share of requests (%)"}, "range": [0, 101]}
    x_axis = _values_axis(scale, [end * scale.factor for end in ends])
    return laid_out(figure, FEW_TICKS, xaxis=x_axis, yaxis=y_axis)


# -- a metric against an axis ----------------------------------------------------------------------


def _band(rows: pd.DataFrame, variant: Variant, axis: str, factor: float, floor: float) -> list[go.Scatter]:
    rows = rows[rows["low"].notna() & rows["high"].notna()]
    if len(rows) < 2:
        return []
    low, high = (rows["low"] * factor).clip(lower=floor), rows["high"] * factor
    x, y = [*rows[axis], *rows[axis][::-1]], [*high, *low[::-1]]
    return [common.area(x, y, variant.name, variant.colour, legendgroup=variant.label, showlegend=False)]


def _bounds(row: Mapping[Any, Any], scale: Scale) -> str:
    if not (known(row["low"]) and known(row["high"])) or row["low"] == row["high"]:
        return ""
    return f"<br>95 % interval: {scale.text(row['low'])} to {scale.text(row['high'])}"


def _line(
    rows: pd.DataFrame, variant: Variant, axis: str, scale: Scale, axis_text: Callable[[float], str]
) -> go.Scatter:
    hover = [
        f"<b>{variant.name}</b>, {axis_text(row[axis])}"
        f"<br>{in_figure(scale.name)}: {scale.text(row['value'])}{_bounds(row, scale)}"
        for row in rows.to_dict("records")
    ]
    look: Layout = {"size": 8, "symbol": variant.symbol, "dash": variant.dash, "legendgroup": variant.label}
    y = rows["value"] * scale.factor
    return common.dotted(rows[axis], y, variant.name, variant.colour, hover, **look)


def _reach(rows: pd.DataFrame, factor: float) -> list[float]:
    """Returns the values that the axis must include: every value, and interval ends unless far beyond."""
    values = (rows["value"] * factor).tolist()
    highest = max((value for value in values if known(value)), default=0.0)
    beyond = (rows["high"] * factor).clip(upper=highest * BAND_REACH)
    return values + beyond.dropna().tolist()


def _floor(axis: Layout) -> float:
    """Returns the lowest value of an axis."""
    return 10 ** axis["range"][0] if axis.get("type") == "log" else 0.0


def against(
    rows: pd.DataFrame,
    shown: Sequence[Variant],
    axis: tuple[str, str],
    places: Sequence[float],
    scale: Scale,
    axis_text: Callable[[float], str],
    top: float = math.inf,
) -> go.Figure:
    """Draws a metric against an axis (column, title) with these places, a line and the band of its interval
    for each variant. Rows may be empty: without a steady state no case has a goodput."""
    column, title = axis
    y_axis = _values_axis(scale, _reach(rows, scale.factor), top)
    rows = rows.sort_values(column, kind="stable")
    figure = go.Figure()
    for variant, own in common.of_variants(rows, shown):
        figure.add_traces(_band(own, variant, column, scale.factor, _floor(y_axis)))
    for variant, own in common.of_variants(rows, shown):
        figure.add_trace(_line(own, variant, column, scale, axis_text))
    x_axis, narrow = _places_axis(title, places)
    if rows.empty:
        middle = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper"}
        figure.add_annotation(**middle, showarrow=False, text="not known here")
    return laid_out(figure, narrow, xaxis=x_axis, yaxis=y_axis)


# -- over time -------------------------------------------------------------------------------------


def over_time(
    levels: Mapping[str, pd.DataFrame],
    shown: Sequence[Variant],
    column: str,
    scale: Scale,
    steps: bool = True,
) -> go.Figure:
    """Draws a level over time, a line for each variant. `levels`: label -> rows with t_s and the level."""
    ends = [float(own["t_s"].max()) for own in levels.values() if len(own)]
    clock = seconds("time since the start", max(ends, default=0.0), 1.0)
    highest = max((float(own[column].max()) for own in levels.values() if len(own)), default=0.0)
    figure = go.Figure()
    template, look = f"%{{y:,.4g}} {scale.unit} after %{{x:.4g}} {clock.unit}", "hv" if steps else "linear"
    for variant in shown:
        own = levels.get(variant.label)
        if own is None or own[column].isna().all():
            continue
        x, y = own["t_s"] * clock.factor, own[column] * scale.factor
        figure.add_trace(common.line(x, y, variant, template, width=1.75, shape=look))
    y_axis = {"title": {"text": scale.title}, "range": [0, highest * scale.factor * 1.06 or 1]}
    x_axis = {"title": {"text": clock.title}, "range": [0, max(ends, default=1.0) * clock.factor]}
    return laid_out(figure, FEW_TICKS, {"zooms": ["xaxis"]}, height=340, xaxis=x_axis, yaxis=y_axis)


# -- one bar for each request ----------------------------------------------------------------------

# Name, start, end, and a fixed colour, because shades of a strategy's hue can be equal.
STAGES = (
    ("waiting", "arrival_s", "scheduled_s", style.OCHRE[0][0]),
    ("prompt, to the first token", "scheduled_s", "first_token_s", style.INK[0]),
    ("generating", "first_token_s", "finish_s", style.BLUE[2][0]),
)


def _stage_hover(row: Mapping[Any, Any], stage: int, long: float) -> str:
    name, long_text = f"<b>request {row['request']:.0f}</b>", duration(long)
    again = f", preempted {counted(int(row['preemptions']), 'time')}" if row["preemptions"] > 0 else ""
    return [
        f"{name}<br>waits {long_text}",
        f"{name}<br>{row['prompt_tokens']:,.0f} prompt tokens in {long_text}",
        f"{name}<br>{row['output_tokens']:,.0f} tokens, the last {long_text} after the first{again}",
    ][stage]


def _stage_bar(rows: pd.DataFrame, stage: int, clock: Scale, zero_s: float) -> go.Bar:
    name, start, end, colour = STAGES[stage]
    own = rows[rows[start].notna() & rows[end].notna()]
    lengths = own[end] - own[start]
    stages = zip(own.to_dict("records"), lengths, strict=True)
    hover = [_stage_hover(row, stage, long) for row, long in stages]
    base = ((own[start] - zero_s) * clock.factor).round(4).tolist()
    x = (lengths * clock.factor).round(4)
    return common.bars(x, own["row"], name, colour, hover, base=base, width=0.78)


def gantt(rows: pd.DataFrame) -> go.Figure:
    """Draws one bar for each request in order of arrival: waiting, then prefill, then decode (Flover, Figure
    1). `rows`: requests of one case."""
    start_s = float(rows["arrival_s"].min()) if len(rows) else 0.0
    end_s = float(rows[["arrival_s", "finish_s"]].max().max()) if len(rows) else 1.0
    clock = seconds("time since the first arrival shown", end_s - start_s, 1.0)
    rows = rows.sort_values("arrival_s", kind="stable").assign(row=range(len(rows)))
    figure = go.Figure([_stage_bar(rows, stage, clock, start_s) for stage in range(len(STAGES))])
    refused = rows[rows["status"] == "rejected"]
    if len(refused):
        mark = {"symbol": "diamond-open", "size": 7, "color": style.INK[0]}
        x = ((refused["arrival_s"] - start_s) * clock.factor).tolist()
        text = [f"<b>request {number:.0f}</b><br>rejected" for number in refused["request"]]
        hover_look = {"name": "rejected", "hoverinfo": "text", "hovertext": text}
        figure.add_scatter(x=x, y=refused["row"].tolist(), mode="markers", marker=mark, **hover_look)
    length = (end_s - start_s) * clock.factor
    kept = spaced([float(i) for i in range(len(rows))], 0.1)
    y_axis = {
        "title": {"text": "request"},
        "range": [len(rows) - 0.4, -0.6],
        "tickvals": kept,
        "ticktext": [f"{rows['request'].iloc[int(i)]:.0f}" for i in kept],
        "showgrid": False,
    }
    return figure.update_layout(
        barmode="overlay",
        height=90 + GANTT_ROW_PX * max(10, len(rows)),
        xaxis={"title": {"text": clock.title}, "range": [-0.008 * length, length * 1.01 or 1]},
        yaxis=y_axis,
        meta={"zooms": ["xaxis"], "narrow": FEW_TICKS},
    )


# -- attainment of the SLO -------------------------------------------------------------------------


def attainment(rows: pd.DataFrame, shown: Sequence[Variant], places: Sequence[str], title: str) -> go.Figure:
    """Draws the share of requests within the SLO: a group of bars for each place, a bar for each variant.
    `rows`: with `place` (one of `places`), label, value, low, high."""
    figure, scale = go.Figure(), Scale("", "%", 100.0)
    for variant, own in common.of_variants(rows, shown):
        above, below = (own["high"].clip(upper=1.0) - own["value"], own["value"] - own["low"].clip(lower=0.0))
        ends = {"array": (above.fillna(0.0) * 100).tolist(), "arrayminus": (below.fillna(0.0) * 100).tolist()}
        whisker = {"type": "data", **ends, "color": style.FAINT_INK[0], "thickness": 1, "width": 3}
        hover = [
            f"<b>{variant.name}</b>, {in_figure(row['place'])}"
            f"<br>{percent(row['value'])} of requests{_bounds(row, scale)}"
            for row in own.to_dict("records")
        ]
        x, upright = [in_figure(place) for place in own["place"]], {"orientation": None, "error_y": whisker}
        figure.add_trace(common.bars(x, own["value"] * 100, variant.name, variant.colour, hover, **upright))
    category = {"type": "category", "categoryorder": "array", "showgrid": False}
    x_axis = {"title": {"text": title}, **category, "categoryarray": [in_figure(place) for place in places]}
    y_axis = {"title": {"text": "requests within the SLO (%)"}, "range": [0, 102]}
    return laid_out(figure, bargap=0.28, bargroupgap=0.06, height=320, xaxis=x_axis, yaxis=y_axis)


# -- predicted against published -------------------------------------------------------------------


def _published_points(
    rows: pd.DataFrame, variant: Variant, axis: str, scale: Scale, times_are: str
) -> go.Scatter:
    hover = [
        f"<b>{variant.name}</b><br>published {scale.text(row['reference'])}, {times_are} "
        f"{scale.text(row['predicted'])}<br>{in_figure(row['role'])}; {in_figure(row['source'])}"
        for row in rows.to_dict("records")
    ]
    look: Layout = {"marker": {"symbol": "circle", "size": 9}, "rim": 1.75, "legendgroup": variant.label}
    fill, y = hollow(variant.colour, rows["role"] == "fitted"), rows["reference"] * scale.factor
    name = f"{variant.name}, published"
    return common.marks(rows[axis], y, name, variant.colour, hover, fill=fill, **look)


def _run_figures(rows: pd.DataFrame, variant: Variant, axis: str, scale: Scale, times_are: str) -> go.Scatter:
    named = not pd.api.types.is_numeric_dtype(rows[axis])
    mark = {"symbol": "diamond" if named else variant.symbol, "size": 9 if named else 8}
    return go.Scatter(
        x=rows[axis].tolist(),
        y=(rows["value"] * scale.factor).tolist(),
        mode="markers" if named else "lines",
        name=f"{variant.name}, {times_are}",
        legendgroup=f"{variant.label}, {times_are}",
        line={"color": variant.colour, "width": 2},
        marker={**mark, "color": variant.colour},
        hoverinfo="skip",
    )


def compared(
    rows: pd.DataFrame,
    shown: Sequence[Variant],
    axis: tuple[str, str],
    scale: Scale,
    times_are: str = "predicted",
) -> go.Figure:
    """Draws the run's figures as lines with the bands of their intervals, published figures as marks, against
    an axis (column, title). An axis of text has no lines. `rows`: compared figures of one metric;
    `times_are`: "predicted" or "measured"."""
    column, title = axis
    rows = rows.assign(value=rows["predicted"])
    named = not pd.api.types.is_numeric_dtype(rows[column])
    y_axis = _values_axis(scale, _reach(rows, scale.factor) + (rows["reference"] * scale.factor).tolist())
    figure = go.Figure()
    rows = rows if named else rows.sort_values(column, kind="stable")
    for variant, own in common.of_variants(rows, shown):
        figure.add_traces([] if named else _band(own, variant, column, scale.factor, _floor(y_axis)))
        line = _run_figures(own, variant, column, scale, times_are)
        figure.add_traces([line, _published_points(own, variant, column, scale, times_are)])
    if named:
        return laid_out(figure, xaxis={"title": {"text": title}, "showgrid": False}, yaxis=y_axis)
    x_axis, narrow = _places_axis(title, sorted(rows[column].unique()))
    return laid_out(figure, narrow, xaxis=x_axis, yaxis=y_axis)
