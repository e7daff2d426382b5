"""Building blocks of figures, and the figures of every study: errors and sources of prices.

Figures follow the rules at the head of `decode/figures.py`. Texts passed in are already HTML-safe.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from simcore.reports import style
from simcore.reports.run import DEVICE
from simcore.reports.text import (
    counted,
    in_figure,
    known,
    percent,
    recorded,
    signed_percent,
    significant,
    strategy_name,
    tokens,
)

HEIGHT_PX, NARROW_HEIGHT_PX, ROW_PX = 400, 320, 44
TICKS_AT_MOST = 9
# Plotly places the names of rows left of the axis itself; they need no margin.
ROWS_MARGIN = {"l": 8, "r": 12, "t": 4, "b": 48}
Layout = dict[str, Any]
Axis = tuple[Layout, Layout]  # an axis, and its settings to overwrite on a narrow screen
Lane = tuple[float, str]  # rank and stream


@dataclass(frozen=True)
class Variant:
    """A strategy variant, and how every figure draws it."""

    label: str
    strategy: str
    devices: float
    colour: str
    symbol: str
    dash: str | None = None

    @property
    def name(self) -> str:
        """The label, escaped for plotly."""
        return in_figure(self.label)


@dataclass(frozen=True)
class Scale:
    """How a metric is shown: its name on the axis, its unit, and the factor from value to unit."""

    name: str
    unit: str = ""
    factor: float = 1.0

    @property
    def title(self) -> str:
        """ "TTFT, 99th percentile (ms)"."""
        return f"{self.name} ({self.unit})" if self.unit else self.name

    def text(self, value: float) -> str:
        """Returns a value with its unit."""
        unit = f"\u00a0{self.unit}" if self.unit else ""
        return significant(value * self.factor) + unit


def seconds(name: str, longest: float, seconds_from: float) -> Scale:
    """Returns the scale of a time: seconds if the longest is at least `seconds_from`, else milliseconds."""
    return Scale(name, "s") if longest >= seconds_from else Scale(name, "ms", 1e3)


def variants(results: pd.DataFrame, by: Sequence[str] = ("devices", "groups", "label")) -> list[Variant]:
    """Returns the strategy variants of a study in the order of `style.STRATEGY`. Variants of one strategy are
    sorted by the columns `by`, by default from few devices to many."""
    rows = results[results["label"] != ""].drop_duplicates(["strategy", "label"])
    rank = {name: i for i, name in enumerate(style.STRATEGY)}
    order = rows["strategy"].map(lambda name: rank.get(name, len(rank)))
    rows = rows.assign(order=order).sort_values(["order", "strategy", *by], kind="stable")
    found: list[Variant] = []
    hues = style.hues(dict.fromkeys(rows["strategy"]))
    for strategy, group in rows.groupby("strategy", sort=False):
        colours = style.ramp(str(strategy), len(group), hues[str(strategy)])
        symbol = style.SYMBOL.get(str(strategy), "circle")
        for (_, row), colour in zip(group.iterrows(), colours, strict=True):
            found.append(Variant(row["label"], row["strategy"], row["devices"], colour, symbol))
    return found


def of_variants(rows: pd.DataFrame, shown: Sequence[Variant]) -> Iterator[tuple[Variant, pd.DataFrame]]:
    """Yields each variant that has rows, with its rows."""
    for variant in shown:
        own = rows[rows["label"] == variant.label]
        if len(own):
            yield variant, own


# -- axes ------------------------------------------------------------------------------------------


def spaced(places: Sequence[float], apart: float) -> list[float]:
    """Returns the places of an axis that get a label. Neighbours are at least this share of the axis apart,
    and the last place always has a label."""
    if len(places) < 2 or places[-1] == places[0]:
        return list(places)
    length, kept = places[-1] - places[0], [places[-1]]
    for place in reversed(places[:-1]):
        if (kept[-1] - place) / length >= apart:
            kept.append(place)
    return kept[::-1]


def log_ticks(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times the powers of ten between two values, or just beyond them."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [m * 10.0**d for d in decades for m in (1, 2, 5) if low * 0.8 <= m * 10.0**d <= high * 1.25]


def whole_decades(ticks: Sequence[float]) -> list[float]:
    """Returns the ticks that are powers of ten."""
    return [tick for tick in ticks if f"{tick:e}".startswith("1")]


def log_title(title: str) -> str:
    """ "time (ms, log scale)"."""
    return f"{title[:-1]}, log scale)" if title.endswith(")") else f"{title} (log scale)"


def log_axis(title: str, low: float, high: float, ticks: Sequence[float], text: str = ",.12g") -> Layout:
    """Returns a logarithmic axis from `low` to `high`."""
    return {
        "title": {"text": title},
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": list(ticks),
        "ticktext": [format(tick, text) for tick in ticks],
    }


def few_ticks(low: float, high: float) -> list[float]:
    """Returns ticks of a logarithmic axis, at most `TICKS_AT_MOST`."""
    ticks = log_ticks(low, high)
    ticks = whole_decades(ticks) if len(ticks) > TICKS_AT_MOST else ticks
    return ticks[:: math.ceil(len(ticks) / TICKS_AT_MOST)]


def values_axis(title: str, values: Iterable[float], log_from: float, top: float = math.inf) -> Layout:
    """Returns an axis from zero, or a logarithmic one if the largest value is at least `log_from` times the
    smallest. `top`: upper bound of the values."""
    shown = [value for value in values if known(value)] or [0.0]
    low, high = min(shown), max(shown)
    if low <= 0 or high / low < log_from:
        return {"title": {"text": title}, "range": [0, min(high * 1.08, top * 1.02) or 1]}
    return log_axis(log_title(title), low / 1.15, high * 1.15, few_ticks(low, high))


def positive_axis(title: str, values: Iterable[float], log_from: float, room: float = 1.2) -> Layout:
    """Returns such an axis of the positive values; a logarithmic one exceeds them by the factor `room`."""
    shown = [value for value in values if known(value) and value > 0] or [1.0]
    if max(shown) < log_from * min(shown):
        return {"title": {"text": title}, "range": [0, max(shown) * 1.08]}
    low, high = min(shown) / room, max(shown) * room
    return log_axis(log_title(title), low, high, few_ticks(low, high))


def places_axis(
    title: str, at: Sequence[float], base: float, apart: tuple[float, float], pad: float,
    text: Callable[[float], str],
) -> Axis:  # fmt: skip
    """Returns an axis with labels at places: their logarithms to `base`, or the places themselves if `base`
    is 0. `apart`: least distance of labels on wide and narrow screens; `pad`: the axis beyond both ends."""
    unit = math.log10(base) if base else 1.0
    wide, narrow = ([base**place if base else place for place in spaced(at, share)] for share in apart)
    axis = {
        "title": {"text": title},
        "type": "log" if base else "linear",
        "range": [(at[0] - pad) * unit, (at[-1] + pad) * unit],
        "tickvals": wide,
        "ticktext": [text(place) for place in wide],
    }
    return axis, {"xaxis.tickvals": narrow, "xaxis.ticktext": [text(place) for place in narrow]}


def rows_axis(names: Sequence[str]) -> Layout:
    """Returns a vertical axis of rows from top to bottom; names may repeat."""
    ticks = {"tickvals": list(range(len(names))), "ticktext": list(names)}
    return {**ticks, "range": [max(1, len(names)) - 0.5, -0.5], "showgrid": False}


def named_axis(names: Sequence[str], **more: Any) -> Layout:
    """Returns a vertical axis of rows from top to bottom; traces refer to rows by name."""
    last = {"range": [len(names) - 0.5, -0.5]}
    return {"categoryorder": "array", "categoryarray": list(names), **last, "showgrid": False, **more}


def in_two_lines(label: str) -> str:
    """Returns a label as the name of a row, with a line break at its first comma."""
    return in_figure(label).replace(", ", ",<br>", 1)


# -- layouts ---------------------------------------------------------------------------------------


def laid_out(
    figure: go.Figure, narrow: Layout | None = None, meta: Layout | None = None, **layout: Any
) -> go.Figure:
    """Lays out a figure whose lines the key switches off. `narrow`: overwrites for a narrow screen."""
    narrow = {"height": NARROW_HEIGHT_PX, **(narrow or {})}
    meta = {"toggles": True, "narrow": narrow, **(meta or {})}
    return figure.update_layout(**{"height": HEIGHT_PX, "meta": meta, **layout})


def in_rows(figure: go.Figure, rows: int, *, foot_px: int = 64, **layout: Any) -> go.Figure:
    """Lays out a figure of `rows` rows, as high as they need."""
    height = foot_px + ROW_PX * max(1, rows)
    return figure.update_layout(**{"height": height, "margin": ROWS_MARGIN, **layout})


def rule(
    figure: go.Figure, pair: tuple[str, str], *, x: float | None = None, y: float = 0.0, **line: Any
) -> None:
    """Draws a line across the figure, vertical at `x` or horizontal at `y`, in the light colour of a pair."""
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    level = {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}
    figure.add_shape(type="line", line={"color": pair[0], **line}, **(level if x is None else ends))


def once_in_key(figure: go.Figure) -> None:
    """Shows only the first trace of each group in the key."""
    seen: set[str] = set()
    for trace in figure.data:
        group = trace.legendgroup or trace.name
        trace.showlegend = group not in seen
        seen.add(group)


def by_text(*lines: str) -> str:
    """Joins the lines of a hover text and drops empty ones."""
    return "<br>".join(line for line in lines if line)


# -- traces ----------------------------------------------------------------------------------------


def small(values: Any) -> NDArray[np.float32]:
    """Converts numbers to 4 bytes each, a fifth of the space of decimal text in plotly's output."""
    return np.asarray(values, dtype=np.float32)


def _with_hover(x: Any, y: Any, name: str, hover: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of every trace that has a hover text for each point."""
    x, y = (values.tolist() if isinstance(values, pd.Series) else values for values in (x, y))
    return {"x": x, "y": y, "name": name, "hoverinfo": "text", "hovertext": hover}


def hollow(colour: str, which: Iterable[Any]) -> list[str]:
    """Returns a colour for each mark; marks in `which` are hollow."""
    return [style.HOLLOW[0] if empty else colour for empty in which]


def line(
    x: Any, y: Any, variant: Variant, template: str, *, width: float = 2, shape: str | None = None,
    opacity: float | None = None,
) -> go.Scatter:  # fmt: skip
    """Returns a line of many points for a variant; `template` makes the hover text of each point."""
    return go.Scatter(
        x=small(x),
        y=small(y),
        mode="lines",
        name=variant.name,
        line={"color": variant.colour, "width": width, "shape": shape, "dash": variant.dash},
        opacity=opacity,
        hovertemplate=f"<b>{variant.name}</b><br>{template}<extra></extra>",
    )


def dotted(
    x: Any, y: Any, name: str, colour: str, hover: Sequence[str], *, symbol: str | None = None,
    size: float = 6, dash: str | None = None, **more: Any,
) -> go.Scatter:  # fmt: skip
    """Returns a line with a mark and a text at every point."""
    marker = {"size": size, "color": colour, "symbol": symbol}
    look = {"mode": "lines+markers", "line": {"color": colour, "width": 2, "dash": dash}, "marker": marker}
    return go.Scatter(**_with_hover(x, y, name, hover) | look | more)


def marks(
    x: Any, y: Any, name: str, colour: str, hover: Sequence[str], *, fill: Any = None,
    rim: float = 1.5, marker: Mapping[str, Any] | None = None, **more: Any,
) -> go.Scatter:  # fmt: skip
    """Returns marks with a rim of their colour and a text for each; `fill`: colour inside, if it differs."""
    inside = {"color": colour if fill is None else fill, "line": {"color": colour, "width": rim}}
    look = {"mode": "markers", "line": {"color": colour}, "marker": {"size": 8, **inside, **(marker or {})}}
    return go.Scatter(**_with_hover(x, y, name, hover) | look | more)


def bars(x: Any, y: Any, name: str, colour: str, hover: Sequence[str], **more: Any) -> go.Bar:
    """Returns horizontal bars with a text for each."""
    look = {"orientation": "h", "marker": {"color": colour, "line": {"width": 0}}}
    return go.Bar(**_with_hover(x, y, name, hover) | look | more)


def area(x: Sequence[float], y: Sequence[float], name: str, colour: str, **more: Any) -> go.Scatter:
    """Returns an area in a see-through colour."""
    look = {"mode": "lines", "fill": "toself", "fillcolor": style.faint(colour)}
    edge = {"line": {"width": 0, "color": colour}, "hoverinfo": "skip"}
    return go.Scatter(**{"x": x, "y": y, "name": name} | look | edge | more)


def bar_sums(totals: Sequence[float], names: Sequence[str], texts: Sequence[str]) -> go.Scatter:
    """Returns the sums of stacked bars as text at their ends."""
    return go.Scatter(
        x=totals, y=names, mode="text", text=[f" {text}" for text in texts], textposition="middle right",
        cliponaxis=False, showlegend=False, hoverinfo="skip",
    )  # fmt: skip


def whisker(
    value: "pd.Series[float]",
    low: "pd.Series[float]",
    high: "pd.Series[float]",
    factor: float = 1.0,
    **look: Any,
) -> Layout:
    """Returns the bar of an interval through a mark, without length if an end is unknown."""
    above, below = ((end * factor).clip(lower=0).fillna(0.0).tolist() for end in (high - value, value - low))
    return {"type": "data", "array": above, "arrayminus": below, **look}


# -- timelines and maps ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A timeline: its heading, the names of its lanes, its rows, and the function that makes bars of the rows
    on a given vertical axis."""

    heading: str
    lanes: Mapping[Lane, str]
    rows: pd.DataFrame
    bars: Callable[[pd.DataFrame, Mapping[Lane, str], str], Sequence[go.Bar]]


def timelines(blocks: Sequence[Block], lane_px: int, heading_px: int, x_axis: Layout) -> go.Figure:
    """Draws timelines below each other on one time axis, with a lane for every rank and stream."""
    foot_px = 52
    inner = sum(lane_px * max(1, len(block.lanes)) + heading_px for block in blocks)
    figure, top = go.Figure(), 1.0
    for number, block in enumerate(blocks, start=1):
        suffix = "" if number == 1 else str(number)
        figure.add_traces(block.bars(block.rows, block.lanes, f"y{suffix}"))
        head, top = top - heading_px / inner, top - (heading_px + lane_px * max(1, len(block.lanes))) / inner
        domain = {"domain": [max(0.0, top), min(1.0, head)], "anchor": "x"}
        axis = {**rows_axis(list(block.lanes.values())), **domain}
        figure.update_layout({f"yaxis{suffix}": axis})
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": head, "xanchor": "left", "yanchor": "bottom"}
        figure.add_annotation(text=block.heading, showarrow=False, **at)
    once_in_key(figure)
    return figure.update_layout(
        barmode="overlay",
        height=inner + foot_px,
        margin={"l": 8, "r": 12, "t": 0, "b": foot_px},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis={**x_axis, "anchor": f"y{len(blocks)}" if len(blocks) > 1 else "y"},
        meta={"zooms": ["xaxis"], "narrow": {"xaxis.nticks": 5}},
    )


def spans(rows: pd.DataFrame, name: str, axis: str, hover: Sequence[str], **more: Any) -> go.Bar:
    """Returns the bars of a timeline. `rows` has the numbers start, took and lane."""
    inside = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    at = {"base": rows["start"].tolist(), "legendgroup": name, "yaxis": axis}
    return bars(rows["took"], rows["lane"], name, "", hover, **at, **inside, **more)


Cells = Sequence[Sequence[float]]


def speed_up_cells(
    values: Cells, hover: Sequence[Sequence[str]], text: Callable[[float], str], **more: Any
) -> go.Heatmap:
    """Draws speed-ups as a map: blue above 1, brown below, on a logarithmic scale."""
    rows, columns = len(hover), len(hover[0]) if hover else 0
    return go.Heatmap(
        x=list(range(columns)),
        y=list(range(rows)),
        z=[[math.log2(v) if known(v) and v > 0 else None for v in line] for line in values],
        text=[[text(v) if known(v) else "" for v in line] for line in values],
        hovertext=hover,
        hoverinfo="text",
        colorscale=[[i / 4, light] for i, (light, _) in enumerate(style.DIVERGING)],
        xgap=2,
        ygap=2,
        **more,
    )


# -- predicted against published, and sources of prices --------------------------------------------


def compared_place(row: Mapping[Any, Any]) -> list[str]:
    """Returns the place of a compared figure: strategy, devices, and the study's other axes."""
    devices = row["devices"]
    if not known(devices):
        devices = row["ranks"] * (row["groups"] if known(row["groups"]) else 1)
    parts = [str(row["label"] or strategy_name(row["strategy"]))]
    parts += [str(row[DEVICE])] if row.get(DEVICE) and not row["label"] else []
    parts += [counted(round(devices), "device")] if known(devices) else []
    parts += [f"{tokens(row['context_tokens'])} tokens"] if known(row["context_tokens"]) else []
    parts += [f"{percent(row['hit_rate'])} hits"] if known(row["hit_rate"]) else []
    parts += [f"{recorded(row['rate_per_s'])} requests/s"] if known(row["rate_per_s"]) else []
    parts += [counted(round(row["requests"]), "request")] if known(row["requests"]) else []
    lengths = [recorded(row[name]) for name in ("prompt_tokens", "output_tokens") if known(row[name])]
    return [part for part in (*parts, " + ".join(lengths) + " tokens" if lengths else "") if part]


OFF: Mapping[str, str] = {
    "predicted": "error of the prediction (%)",
    "measured": "distance from published (%)",
}


def _error_hover(row: Mapping[Any, Any], times_are: str) -> str:
    who, *where = compared_place(row)
    said_by = f"{row['role']}; {row['source']}"
    return "<br>".join(
        [
            f"<b>{in_figure(who)}</b>, {in_figure(row['metric'])}",
            in_figure(", ".join(where)),
            f"published {significant(row['reference'], 4)}, {times_are} {significant(row['predicted'], 4)}",
            f"<b>{signed_percent(row['error_pct'])}</b>, {in_figure(said_by)}",
        ]
    )


def errors(comparison: pd.DataFrame, roles: Mapping[str, str], times_are: str = "predicted") -> go.Figure:
    """Draws the error of every compared figure, a row for each role in the order of `roles` (role -> its
    name).

    `times_are`: whether the compared figures are "predicted" or "measured". Rows of the role "fitted" are
    hollow, because the model was fitted to these figures.
    """
    figure = go.Figure()
    rows = comparison[comparison["error_pct"].notna()]
    names = {role: in_two_lines(name) for role, name in roles.items() if (rows["role"] == role).any()}
    for strategy, group in rows.groupby("strategy", sort=True):
        colour = style.ramp(str(strategy), 1)[0]
        look = {"symbol": style.SYMBOL.get(str(strategy), "circle"), "size": 10, "opacity": 0.75}
        figure.add_trace(
            marks(
                group["error_pct"],
                [names[role] for role in group["role"]],
                in_figure(strategy_name(str(strategy))),
                colour,
                [_error_hover(row, times_are) for row in group.to_dict("records")],
                fill=hollow(colour, group["role"] == "fitted"),
                marker=look,
            )
        )
    reach = max(1.0, float(rows["error_pct"].abs().max())) * 1.1 if len(rows) else 1.0
    rule(figure, style.FAINT_INK, x=0, width=1)
    return in_rows(
        figure,
        len(names),
        xaxis={"title": {"text": OFF[times_are]}, "range": [-reach, reach]},
        yaxis=named_axis(list(names.values()), showgrid=None),
        meta={"narrow": {"xaxis.nticks": 5}},
    )


def price_shares(
    shares: Mapping[str, Mapping[str, float]], title: str = "share of the predicted device time"
) -> go.Figure:
    """Draws the share of the time, or of the title's quantity, by source: row name -> source -> fraction."""
    figure = go.Figure()
    sources = [s for s in style.PRICE_SOURCE if any(row.get(s, 0) > 0 for row in shares.values())]
    sources += sorted({s for row in shares.values() for s in row} - set(style.PRICE_SOURCE))
    for source in sources:
        values = {name: row.get(source, 0.0) * 100 for name, row in shares.items()}
        hover = [
            f"<b>{in_figure(name)}</b><br>{in_figure(source)}: {percent(v / 100)}"
            for name, v in values.items()
        ]
        colour = style.PRICE_SOURCE.get(source, style.PART["other"])[0]
        names = [in_two_lines(name) for name in shares]
        figure.add_trace(bars(list(values.values()), names, in_figure(source), colour, hover))
    return figure.update_layout(
        barmode="stack",
        bargap=0.36,
        height=60 + 40 * max(1, len(shares)),
        margin={"l": 8, "r": 16, "t": 4, "b": 48},
        xaxis={"title": {"text": f"{title} (%)"}, "range": [0, 100]},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
