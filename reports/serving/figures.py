"""Figures of the serving study: data frames in, plotly figures out. Nothing here reads a file.

Figures follow the rules at the head of `decode/figures.py`: light colours, no titles, the page draws the key.
Long curves are arrays of 4-byte floats, which plotly writes in a fifth of the space of decimal text.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from simcore.reports import style
from simcore.reports.common.figures import Variant, log_ticks, spaced
from simcore.reports.text import counted, duration, in_figure, known, percent, recorded, significant

LOG_SCALE_FROM = 10.0
SECONDS_FROM = 10.0
CURVE_POINTS = 200
GANTT_ROW_PX = 9
HEIGHT_PX, NARROW_HEIGHT_PX = 400, 320
BAND_REACH = 1.35
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """How a metric is shown: its name on the axis, its unit, and what a value is multiplied with."""

    name: str
    unit: str = ""
    factor: float = 1.0

    @property
    def title(self) -> str:
        """ "TTFT, 99th percentile (ms)"."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float) -> str:
        """A value with its unit."""
        unit = f"\u00a0{self.unit}" if self.unit else ""
        return significant(value * self.factor) + unit


def seconds(name: str, longest: float, seconds_from: float = SECONDS_FROM) -> Scale:
    """A time in milliseconds, or in seconds where the longest is no shorter than that."""
    return Scale(name, "s") if longest >= seconds_from else Scale(name, "ms", 1e3)


def limit_text(limit_s: float) -> str:
    """A limit as it was given, not rounded to so many digits: "500 ms"."""
    scale = seconds("", limit_s)
    return f"{recorded(limit_s * scale.factor)}\u00a0{scale.unit}"


def _values_axis(title: str, values: Sequence[float], top: float = math.inf) -> dict[str, Any]:
    """From zero, or in powers of ten where the values span them. `top`: no value can be above it."""
    shown = [value for value in values if known(value)] or [0.0]
    low, high = min(shown), max(shown)
    if low <= 0 or high / low < LOG_SCALE_FROM:
        return {"title": {"text": title}, "range": [0, min(high * 1.08, top * 1.02) or 1]}
    ticks = log_ticks(low, high)
    if len(ticks) > 9:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    return {
        "title": {
            "text": title.removesuffix(")") + (", log scale)" if title.endswith(")") else " (log scale)")
        },
        "type": "log",
        "range": [math.log10(low / 1.15), math.log10(high * 1.15)],
        "tickvals": ticks,
        "ticktext": [f"{tick:,.12g}" for tick in ticks],
    }


def _places_axis(title: str, places: Sequence[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """An axis with its labels at these places, and what to overwrite of it on a narrow screen."""
    log = places[0] > 0 and places[-1] / places[0] >= LOG_SCALE_FROM
    at = [math.log10(place) for place in places] if log else list(places)
    pad = 0.03 * (at[-1] - at[0]) or 0.1

    def ticks(apart: float) -> list[float]:
        return [10**place if log else place for place in spaced(at, apart)]

    wide, narrow = ticks(0.05), ticks(0.13)
    axis = {
        "type": "log" if log else "linear",
        "range": [at[0] - pad, at[-1] + pad],
        "tickvals": wide,
        "ticktext": [recorded(tick) for tick in wide],
        "title": {"text": title},
    }
    return axis, {"xaxis.tickvals": narrow, "xaxis.ticktext": [recorded(tick) for tick in narrow]}


def _small(values: Any) -> NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


def _layout(figure: go.Figure, narrow: Mapping[str, Any] | None = None, **layout: Any) -> go.Figure:
    meta = {
        "toggles": True,
        "narrow": {"height": NARROW_HEIGHT_PX, **(narrow or {})},
        **layout.pop("meta", {}),
    }
    return figure.update_layout(height=layout.pop("height", HEIGHT_PX), meta=meta, **layout)


# -- distributions ---------------------------------------------------------------------------------


def curve(values: Floats, points: int = CURVE_POINTS) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Empirical distribution function: (values, percent of all that are no larger), at most so many points.

    A sample of n has the steps k/n; of a larger one these are its quantiles at evenly spaced shares.
    """
    ordered = np.sort(values[np.isfinite(values)])
    if not len(ordered):
        return _small([]), _small([])
    ranks = np.unique(np.linspace(1, len(ordered), min(points, len(ordered))).round().astype(int))
    return _small(ordered[ranks - 1]), _small(100 * ranks / len(ordered))


def distributions(
    samples: Mapping[str, Floats], shown: Sequence[Variant], name: str, bound_s: float | None
) -> go.Figure:
    """Distribution of a latency for each variant, with its SLO as a dashed line. `samples`: label -> s."""
    curves = {v.label: curve(samples[v.label]) for v in shown if len(samples.get(v.label, ()))}
    ends = [float(x[i]) for x, _ in curves.values() if len(x) for i in (0, len(x) // 50, -1)]
    scale = seconds(name, max(ends, default=0.0))
    figure = go.Figure()
    for variant in shown:
        if variant.label in curves:
            x, y = curves[variant.label]
            line = {"color": variant.colour, "width": 2, "shape": "hv"}
            figure.add_scatter(
                x=x * np.float32(scale.factor), y=y, mode="lines", name=in_figure(variant.label), line=line,
                hovertemplate=f"<b>{in_figure(variant.label)}</b><br>%{{y:.3g}} % within %{{x:.4g}} "
                f"{scale.unit}<extra></extra>",
            )  # fmt: skip
    if known(bound_s):
        ends.append(float(bound_s or 0.0))
        at, slo = ends[-1] * scale.factor, f"SLO, {recorded(ends[-1] * scale.factor)}\u00a0{scale.unit}"
        line = {"color": style.INK[0], "width": 1.5, "dash": "dash"}
        figure.add_scatter(x=[at, at], y=[0, 100], mode="lines", name=slo, line=line, hoverinfo="skip")
    x_axis = _values_axis(scale.title, [end * scale.factor for end in ends])
    y_axis = {"title": {"text": "share of requests (%)"}, "range": [0, 101]}
    return _layout(figure, {"xaxis.nticks": 5}, xaxis=x_axis, yaxis=y_axis)


# -- a metric against an axis ----------------------------------------------------------------------


def _band(rows: pd.DataFrame, variant: Variant, axis: str, factor: float, floor: float) -> list[go.Scatter]:
    rows = rows[rows["low"].notna() & rows["high"].notna()]
    if len(rows) < 2:
        return []
    low, high = (rows["low"] * factor).clip(lower=floor), rows["high"] * factor
    drawn = go.Scatter(
        x=[*rows[axis], *rows[axis][::-1]],
        y=[*high, *low[::-1]],
        mode="lines",
        fill="toself",
        fillcolor=style.faint(variant.colour),
        line={"width": 0, "color": variant.colour},
        name=in_figure(variant.label),
        legendgroup=variant.label,
        showlegend=False,
        hoverinfo="skip",
    )
    return [drawn]


def _bounds(row: pd.Series, scale: Scale) -> str:
    if not (known(row["low"]) and known(row["high"])) or row["low"] == row["high"]:
        return ""
    return f"<br>95 % interval: {scale.text(row['low'])} to {scale.text(row['high'])}"


def _line(
    rows: pd.DataFrame, variant: Variant, axis: str, scale: Scale, axis_text: Callable[[float], str]
) -> go.Scatter:
    return go.Scatter(
        x=rows[axis].tolist(),
        y=(rows["value"] * scale.factor).tolist(),
        name=in_figure(variant.label),
        legendgroup=variant.label,
        mode="lines+markers",
        line={"color": variant.colour, "width": 2},
        marker={"symbol": variant.symbol, "size": 8, "color": variant.colour},
        hoverinfo="text",
        hovertext=[
            f"<b>{in_figure(variant.label)}</b>, {axis_text(row[axis])}"
            f"<br>{in_figure(scale.name)}: {scale.text(row['value'])}{_bounds(row, scale)}"
            for _, row in rows.iterrows()
        ],
    )


def _reach(rows: pd.DataFrame, factor: float) -> list[float]:
    """What the value axis has to hold: every value, and of the intervals what is not far beyond them."""
    values = (rows["value"] * factor).tolist()
    highest = max((value for value in values if known(value)), default=0.0)
    beyond = (rows["high"] * factor).clip(upper=highest * BAND_REACH)
    return values + beyond.dropna().tolist()


def against(
    rows: pd.DataFrame,
    shown: Sequence[Variant],
    axis: tuple[str, str],
    places: Sequence[float],
    scale: Scale,
    axis_text: Callable[[float], str],
    top: float = math.inf,
) -> go.Figure:
    """A metric against an axis (column, title) with these places, a line and the band of its interval for
    each variant. It may have no row: no case has a goodput without a steady state."""
    column, title = axis
    reach = _reach(rows, scale.factor)
    y_axis = _values_axis(scale.title, reach, top)
    floor = 10 ** y_axis["range"][0] if y_axis.get("type") == "log" else 0.0
    rows = rows.sort_values(column, kind="stable")
    figure = go.Figure()
    own = [(variant, rows[rows["label"] == variant.label]) for variant in shown]
    for variant, lines in own:
        figure.add_traces(_band(lines, variant, column, scale.factor, floor))
    for variant, lines in own:
        if len(lines):
            figure.add_trace(_line(lines, variant, column, scale, axis_text))
    x_axis, narrow = _places_axis(title, places)
    if rows.empty:
        figure.add_annotation(
            x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, text="not known here"
        )
    return _layout(figure, narrow, xaxis=x_axis, yaxis=y_axis)


# -- over time -------------------------------------------------------------------------------------


def over_time(
    levels: Mapping[str, pd.DataFrame],
    shown: Sequence[Variant],
    column: str,
    scale: Scale,
    steps: bool = True,
) -> go.Figure:
    """A level over time, a line for each variant. `levels`: label -> rows with t_s and the level."""
    ends = [float(own["t_s"].max()) for own in levels.values() if len(own)]
    clock = seconds("time since the start", max(ends, default=0.0), 1.0)
    highest = max((float(own[column].max()) for own in levels.values() if len(own)), default=0.0)
    figure = go.Figure()
    for variant in shown:
        own = levels.get(variant.label)
        if own is None or own[column].isna().all():
            continue
        figure.add_scatter(
            x=_small(own["t_s"] * clock.factor),
            y=_small(own[column] * scale.factor),
            mode="lines",
            name=in_figure(variant.label),
            line={"color": variant.colour, "width": 1.75, "shape": "hv" if steps else "linear"},
            hovertemplate=f"<b>{in_figure(variant.label)}</b><br>%{{y:,.4g}} {scale.unit} after %{{x:.4g}} "
            f"{clock.unit}<extra></extra>",
        )
    y_axis = {"title": {"text": scale.title}, "range": [0, highest * scale.factor * 1.06 or 1]}
    x_axis = {"title": {"text": clock.title}, "range": [0, max(ends, default=1.0) * clock.factor]}
    meta = {"zooms": ["xaxis"]}
    return _layout(figure, {"xaxis.nticks": 5}, height=340, xaxis=x_axis, yaxis=y_axis, meta=meta)


# -- one bar a request -----------------------------------------------------------------------------

# Name, from, until, and a colour of its own: shades of a strategy's hue can be the same.
STAGES = (
    ("waiting", "arrival_s", "scheduled_s", style.OCHRE[0][0]),
    ("prompt, to the first token", "scheduled_s", "first_token_s", style.INK[0]),
    ("generating", "first_token_s", "finish_s", style.BLUE[2][0]),
)


def _stage_hover(row: dict[Any, Any], stage: int, long: float) -> str:
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
    return go.Bar(
        orientation="h",
        base=((own[start] - zero_s) * clock.factor).round(4).tolist(),
        x=(lengths * clock.factor).round(4).tolist(),
        y=own["row"].tolist(),
        width=0.78,
        name=name,
        marker={"color": colour, "line": {"width": 0}},
        hoverinfo="text",
        hovertext=[
            _stage_hover(row, stage, long) for row, long in zip(own.to_dict("records"), lengths, strict=True)
        ],
    )


def gantt(rows: pd.DataFrame) -> go.Figure:
    """One bar a request, in the order of arrival: waiting, then its prompt, then its tokens (Flover,
    Figure 1). `rows`: requests of one case."""
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
        figure.add_scatter(
            x=x, y=refused["row"].tolist(), mode="markers", name="rejected", marker=mark, hoverinfo="text",
            hovertext=text,
        )  # fmt: skip
    length = (end_s - start_s) * clock.factor
    kept = spaced([float(i) for i in range(len(rows))], 0.1)
    y_axis = {
        "title": {"text": "request"},
        "range": [len(rows) - 0.4, -0.6],
        "tickvals": kept,
        "ticktext": [f"{rows['request'].iloc[int(i)]:.0f}" for i in kept],
        "showgrid": False,
    }
    height = 90 + GANTT_ROW_PX * max(10, len(rows))
    figure.update_layout(
        barmode="overlay",
        height=height,
        xaxis={"title": {"text": clock.title}, "range": [-0.008 * length, length * 1.01 or 1]},
        yaxis=y_axis,
        meta={"zooms": ["xaxis"], "narrow": {"xaxis.nticks": 5}},
    )
    return figure


# -- who keeps the SLO -----------------------------------------------------------------------------


def attainment(rows: pd.DataFrame, shown: Sequence[Variant], places: Sequence[str], title: str) -> go.Figure:
    """Share of requests within the SLO: a group of bars for each place, a bar for each variant. `rows`: with
    `place` (one of `places`), label, value, low, high."""
    figure = go.Figure()
    for variant in shown:
        own = rows[rows["label"] == variant.label]
        if own.empty:
            continue
        above, below = (own["high"].clip(upper=1.0) - own["value"], own["value"] - own["low"].clip(lower=0.0))
        figure.add_bar(
            x=[in_figure(place) for place in own["place"]],
            y=(own["value"] * 100).tolist(),
            error_y={
                "type": "data",
                "array": (above.fillna(0.0) * 100).tolist(),
                "arrayminus": (below.fillna(0.0) * 100).tolist(),
                "color": style.FAINT_INK[0],
                "thickness": 1,
                "width": 3,
            },
            name=in_figure(variant.label),
            marker={"color": variant.colour, "line": {"width": 0}},
            hoverinfo="text",
            hovertext=[
                f"<b>{in_figure(variant.label)}</b>, {in_figure(row['place'])}"
                f"<br>{percent(row['value'])} of requests{_bounds(row, Scale('', '%', 100.0))}"
                for _, row in own.iterrows()
            ],
        )
    return _layout(
        figure,
        bargap=0.28,
        bargroupgap=0.06,
        height=320,
        xaxis={
            "title": {"text": title},
            "type": "category",
            "categoryorder": "array",
            "categoryarray": [in_figure(place) for place in places],
            "showgrid": False,
        },
        yaxis={"title": {"text": "requests within the SLO (%)"}, "range": [0, 102]},
    )


# -- predicted against published -------------------------------------------------------------------


def _published_points(
    rows: pd.DataFrame, variant: Variant, axis: str, scale: Scale, found: str
) -> go.Scatter:
    fitted = rows["role"] == "fitted"
    return go.Scatter(
        x=rows[axis].tolist(),
        y=(rows["reference"] * scale.factor).tolist(),
        mode="markers",
        name=f"{in_figure(variant.label)}, published",
        legendgroup=variant.label,
        marker={
            "symbol": "circle",
            "size": 9,
            "color": [style.HOLLOW[0] if hollow else variant.colour for hollow in fitted],
            "line": {"color": variant.colour, "width": 1.75},
        },
        line={"color": variant.colour},
        hoverinfo="text",
        hovertext=[
            f"<b>{in_figure(variant.label)}</b><br>published {scale.text(row['reference'])}, {found} "
            f"{scale.text(row['predicted'])}<br>{in_figure(row['role'])}; {in_figure(row['source'])}"
            for _, row in rows.iterrows()
        ],
    )


def compared(
    rows: pd.DataFrame,
    shown: Sequence[Variant],
    axis: tuple[str, str],
    scale: Scale,
    found: str = "predicted",
) -> go.Figure:
    """What is `found` (predicted or measured) as lines with the bands of their intervals, published figures
    as marks, against an axis (column, title). A column of text has no lines. `rows`: compared figures of one
    metric."""
    column, title = axis
    rows = rows.assign(value=rows["predicted"])
    named = not pd.api.types.is_numeric_dtype(rows[column])
    y_axis = _values_axis(
        scale.title, _reach(rows, scale.factor) + (rows["reference"] * scale.factor).tolist()
    )
    floor = 10 ** y_axis["range"][0] if y_axis.get("type") == "log" else 0.0
    figure = go.Figure()
    for variant in shown:
        own = rows[rows["label"] == variant.label]
        own = own if named else own.sort_values(column, kind="stable")
        if own.empty:
            continue
        figure.add_traces([] if named else _band(own, variant, column, scale.factor, floor))
        line = _line(own, variant, column, scale, str)
        mode, mark = ("markers", {"symbol": "diamond", "size": 9}) if named else ("lines", {})
        line.update(mode=mode, marker=mark, name=f"{in_figure(variant.label)}, {found}")
        line.update(legendgroup=f"{variant.label}, {found}", hoverinfo="skip", hovertext=None)
        figure.add_traces([line, _published_points(own, variant, column, scale, found)])
    if named:
        return _layout(figure, xaxis={"title": {"text": title}, "showgrid": False}, yaxis=y_axis)
    x_axis, narrow = _places_axis(title, sorted(rows[column].unique()))
    return _layout(figure, narrow, xaxis=x_axis, yaxis=y_axis)
