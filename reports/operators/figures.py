"""Figures of the studies of single operators: data frames in, plotly figures out. This module reads no file.

Figures follow the rules at the head of `decode/figures.py`. A method keeps its hue in all figures; as
separate torch ops it is dashed. Predictions are lines, published figures marks, hollow if the model was
fitted to them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import Axis, Layout, hollow, laid_out
from simcore.reports.run import DEVICE
from simcore.reports.text import (
    in_figure,
    interval,
    known,
    lasting,
    milliseconds,
    of_any_device,
    recorded,
    signed_percent,
    significant,
    strategy_name,
    tokens,
)
from simcore.reports.tiling.figures import log_axis, powers_axis

# Distance between two rows of texts above a figure.
CROSSING_ROW_PX = 14
Look = tuple[str, str, str]  # light colour, dash, symbol
LOOKS: Mapping[str, Look] = {
    "vanilla": (style.GREY[3][0], "solid", "circle"),
    "block_based": (style.OCHRE[2][0], "solid", "square"),
    "causal_dot_product": (style.RED[3][0], "solid", "diamond"),
    "causal_dot_product_torch": (style.RED[1][0], "dash", "diamond"),
    "recursion": (style.GREEN[2][0], "solid", "square"),
    "lightning": (style.VIOLET[3][0], "solid", "circle"),
    "lightning_torch": (style.VIOLET[1][0], "dash", "circle"),
    "fleet": (style.BLUE[4][0], "solid", "diamond"),
    "fleet_torch": (style.BLUE[1][0], "dash", "diamond"),
    "fleet_modify": (style.BLUE[2][0], "dot", "diamond"),
    "flash_attention_2": (style.GREY[3][0], "solid", "circle"),
    "flash_decoding": (style.BLUE[3][0], "solid", "diamond"),
}
# Looks of methods from outside, in turn.
OTHER_LOOKS: Sequence[Look] = [
    (style.GREEN[4][0], "dash", "circle"),
    (style.RED[4][0], "dot", "square"),
    (style.OCHRE[4][0], "dash", "diamond"),
]
# Shares of an axis' height: from the longest time to the first cross, and from cross to cross.
ROOM_ABOVE, STEP_ABOVE = 0.09, 0.026


def looks(strategies: Sequence[str]) -> dict[str, Look]:
    """Returns the look of each method, known or not, in the order of `LOOKS`."""
    rank = {name: i for i, name in enumerate(LOOKS)}
    ordered = sorted(dict.fromkeys(strategies), key=lambda name: (rank.get(name, len(rank)), name))
    others = [name for name in ordered if name not in LOOKS]
    own = {name: OTHER_LOOKS[i % len(OTHER_LOOKS)] for i, name in enumerate(others)}
    return {name: LOOKS.get(name) or own[name] for name in ordered}


def _name(rows: pd.DataFrame) -> str:
    return in_figure(str(rows["label"].iloc[0]) or strategy_name(str(rows["strategy"].iloc[0])))


def _method(rows: pd.DataFrame) -> str:
    """Returns the name of a method without its device."""
    first = rows.iloc[0]
    return in_figure(of_any_device(str(first["label"]), str(first[DEVICE]))) or _name(rows)


def places_axis(names: Mapping[float, str], title: str) -> Axis:
    """Returns an axis of named places, and its settings to overwrite on a narrow screen."""
    places = list(names)
    words = {place: in_figure(name).replace(" × ", "<br>× ") for place, name in names.items()}
    few = places[:: max(1, math.ceil(len(places) / 4))]
    axis = {
        "title": {"text": title},
        "tickvals": places,
        "ticktext": list(words.values()),
        "range": [min(places, default=0) - 0.4, max(places, default=1) + 0.4],
    }
    return axis, {"xaxis.tickvals": few, "xaxis.ticktext": [words[place] for place in few]}


# -- times ---------------------------------------------------------------------------------------------


def _hover(row: Mapping[Any, Any], times_are: str) -> str:
    bounds = interval(row["low"], row["high"], 1e3)
    lines = [
        f"<b>{in_figure(row['label'])}</b>, {in_figure(row['at'])}",
        f"{times_are} {lasting(row['value'])}{f' ({bounds} ms)' if bounds else ''}",
        in_figure(row["source"]),
        *([f"{row['splits']:.0f} splits"] if known(row.get("splits")) else []),
    ]
    return "<br>".join(line for line in lines if line)


def _run_times(rows: pd.DataFrame, look: Look, times_are: str, marks: bool) -> go.Scatter:
    colour, dash, symbol = look
    hover = [_hover(row, times_are) for row in rows.to_dict("records")]
    drawn: Layout = {"dash": dash, "symbol": symbol, "size": 7, "mode": "lines+markers" if marks else "lines"}
    name, y = _name(rows), rows["value"] * 1e3
    return common.dotted(rows["place"], y, name, colour, hover, legendgroup=name, **drawn)


def _published(rows: pd.DataFrame, look: Look, name: str, times_are: str) -> go.Scatter:
    colour, _, symbol = look
    hover = [
        f"<b>{name}</b>, {in_figure(row['at'])}<br>published {lasting(row['reference'])}, {times_are} "
        f"{lasting(row['predicted'])}: {signed_percent(row['error_pct'])}<br>"
        f"{in_figure(row['role'])}; {in_figure(row['source'])}"
        for row in rows.to_dict("records")
    ]
    drawn: Layout = {"marker": {"symbol": symbol}, "line": None, "legendgroup": name, "showlegend": False}
    fill = hollow(colour, rows["role"] == "fitted")
    return common.marks(rows["place"], rows["reference"] * 1e3, name, colour, hover, fill=fill, **drawn)


def _crosses(out: pd.DataFrame, shown: Mapping[str, Look], ends: Sequence[float]) -> list[go.Scatter]:
    """Returns a cross for each method that runs out of memory, above all times; crosses of one place are
    stacked. `ends`: powers of ten at which the axis of the times ends."""
    height = ends[1] - ends[0]
    made: list[go.Scatter] = []
    taken: dict[float, int] = {}
    for strategy, (colour, _, _) in shown.items():
        own = out[out["strategy"] == strategy]
        if own.empty:
            continue
        heights = []
        for place in own["place"]:
            taken[place] = taken.get(place, -1) + 1
            heights.append(10 ** (ends[1] + height * (ROOM_ABOVE + STEP_ABOVE * taken[place])))
        pairs = zip(own["at"], own["source"], strict=True)
        hover = [
            f"<b>{_name(own)}</b>, {in_figure(at)}<br>out of memory<br>{in_figure(why)}" for at, why in pairs
        ]
        drawn: Layout = {
            "marker": {"symbol": "x-thin"},
            "rim": 2,
            "legendgroup": _name(own),
            "showlegend": False,
        }
        mark = common.marks(own["place"], heights, _name(own), colour, hover, cliponaxis=False, **drawn)
        made.append(mark)
    return made


def method_times(
    rows: pd.DataFrame,
    out: pd.DataFrame,
    published: pd.DataFrame,
    crossings: Mapping[float, str],
    axis: Axis,
    times_are: str = "predicted",
) -> go.Figure:
    """Draws the time of each method over places: lines of the run, marks published, crosses out of memory,
    and a line at every crossing of the fastest (place -> text).

    `rows`: strategy, label, place, at (the place in words), value, low, high, source, optionally splits;
    `out`: rows without a value; `published`: the same places with reference, predicted, error_pct, role,
    source. `times_are`: "predicted" or "measured".
    """
    shown = looks([*rows["strategy"], *out["strategy"]])
    figure = go.Figure()
    for strategy, look in shown.items():
        own = rows[rows["strategy"] == strategy].sort_values("place", kind="stable")
        beside = published[published["strategy"] == strategy]
        if len(own):
            figure.add_trace(_run_times(own, look, times_are, marks=beside.empty))
        if len(own) and len(beside):
            figure.add_trace(_published(beside, look, _name(own), times_are))
    times_ms = [*(rows["value"] * 1e3), *(published["reference"] * 1e3)]
    y_axis = log_axis("time of a call (ms)", times_ms, room=1.3)
    if len(out) and y_axis.get("type") == "log":
        _out_of_memory(figure, _crosses(out, shown, y_axis["range"]), y_axis)
    # Neighbours can be close, so their texts alternate between two rows.
    for i, (place, text) in enumerate(sorted(crossings.items())):
        _crossing(figure, place, text, i % 2 * CROSSING_ROW_PX, log=axis[0].get("type") == "log")
    margin = {"l": 56, "r": 26, "t": 10 + 16 * min(len(crossings), 2), "b": 48}
    return laid_out(figure, axis[1], xaxis=axis[0], yaxis=y_axis, margin=margin)


def _out_of_memory(figure: go.Figure, crosses: Sequence[go.Scatter], axis: Layout) -> None:
    """Draws the crosses with a line between them and the times, and makes room for them."""
    figure.add_traces(crosses)
    low, high = axis["range"]
    highest = max(math.log10(y) for trace in crosses for y in trace.y)
    axis["range"] = [low, highest + (high - low) * STEP_ABOVE]
    border = 10 ** (high + (high - low) * ROOM_ABOVE / 3)
    common.rule(figure, style.FAINT_INK, y=border, width=1, dash="dot")
    font = {"size": 11, "color": style.FAINT_INK[0]}
    at = {"x": 0, "xref": "paper", "xanchor": "left", "y": math.log10(border), "yanchor": "bottom"}
    figure.add_annotation(text="out of memory", showarrow=False, font=font, **at)


def _crossing(figure: go.Figure, place: float, text: str, above_px: int, log: bool) -> None:
    common.rule(figure, style.INK, x=place, width=1, dash="dash")
    at = {"x": math.log10(place) if log else place, "y": 1, "yref": "paper", "yanchor": "bottom"}
    figure.add_annotation(text=in_figure(text), yshift=above_px, showarrow=False, font={"size": 11}, **at)


def lengths_axis(lengths: Sequence[float], apart: float = 0.12) -> Axis:
    """Returns the axis of lengths, in powers of two."""
    return powers_axis("length (tokens)", sorted(lengths) or [1.0], apart)


# -- memory --------------------------------------------------------------------------------------------


def memory(rows: pd.DataFrame, axis: Axis) -> go.Figure:
    """Draws peak memory of each method over places, with a cross if it exceeds the device's memory. `rows`:
    strategy, label, place, at, value, out (whether it runs out of memory)."""
    figure, (size, unit) = go.Figure(), (1e9, "GB") if rows["value"].max() >= 1e9 else (1e6, "MB")
    for strategy, (colour, dash, symbol) in looks(list(rows["strategy"])).items():
        own = rows[(rows["strategy"] == strategy) & (rows["value"] > 0)].sort_values("place", kind="stable")
        if own.empty:
            continue
        mark = {
            "symbol": ["x-thin" if out else symbol for out in own["out"]],
            "size": [9 if out else 6 for out in own["out"]],
            "color": colour,
            "line": {"color": colour, "width": [2 if out else 0 for out in own["out"]]},
        }
        hover = [
            f"<b>{_name(own)}</b>, {in_figure(at)}<br>{significant(value / size)} {unit}"
            f"{', out of memory' if out else ''}"
            for at, value, out in zip(own["at"], own["value"], own["out"], strict=True)
        ]
        y, name = own["value"] / size, _name(own)
        figure.add_trace(common.dotted(own["place"], y, name, colour, hover, dash=dash, marker=mark))
    y_axis = log_axis(f"memory ({unit})", (rows["value"] / size).tolist())
    margin = {"l": 56, "r": 26, "t": 10, "b": 48}
    return laid_out(figure, axis[1], xaxis=axis[0], yaxis=y_axis, margin=margin)


# -- errors --------------------------------------------------------------------------------------------


def errors(
    comparison: pd.DataFrame,
    roles: Mapping[str, str],
    place: Callable[[Any], str],
    times_are: str = "predicted",
) -> go.Figure:
    """Draws the error of every compared figure by role, in the looks of the methods; `place`: returns the
    place of a row as text."""
    figure = common.errors(comparison, roles, times_are)
    rows = comparison[comparison["error_pct"].notna()]
    shown = looks(list(rows["strategy"]))
    for trace, (strategy, group) in zip(figure.data, rows.groupby("strategy", sort=True), strict=True):
        colour, _, symbol = shown[str(strategy)]
        fill = hollow(colour, group["role"] == "fitted")
        trace.update(name=_method(group), line={"color": colour})
        trace.marker.update(symbol=symbol, size=8, color=fill, line={"color": colour, "width": 1.5})
        trace.hovertext = [
            f"<b>{in_figure(row['label']) or _name(group)}</b>, {in_figure(place(row))}<br>published "
            f"{_time(row['reference'])}, "
            f"{times_are} {_time(row['predicted'])}<br><b>{signed_percent(row['error_pct'])}</b>, "
            f"{in_figure(row['source'])}"
            for row in group.to_dict("records")
        ]
    return figure


def _time(value: float) -> str:
    return milliseconds(value) if known(value) else recorded(value)


def length_text(value: float) -> str:
    """Returns a length as text: "2K tokens"."""
    return f"{tokens(value)}\u00a0tokens"
