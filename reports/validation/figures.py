"""Figures of a validation: data frames in, plotly figures out. This module reads no file.

scatter     predicted over measured seconds of single ops, both axes alike: the diagonal is a right price,
            and the band around it holds where measured / (1 + bound) <= predicted <= measured (1 + bound)
timelines   one case predicted above the same case measured, each from its first launch on one axis
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import Lane, Layout
from simcore.reports.text import in_figure, known, lasting, percent, signed_percent, significant

SCATTER_PX, NARROW_SCATTER_PX = 440, 360
TICKS_AT_LEAST = 4
# Least ratio of the ends of an axis, for kinds whose times are all alike.
LEAST_REACH = 6.0
# With more points there is no room for interval bars.
BARS_AT_MOST = 40
# Ops and lanes of one timeline.
EVENTS_AT_MOST, LANES_AT_MOST = 400, 12
LANE_PX, HEADING_PX = 40, 30
OTHER = "other"
OWN_COLOURS = (
    style.RED[2], style.VIOLET[2], style.GREEN[2], style.OCHRE[2], style.BLUE[3], style.RED[0],
    style.VIOLET[0], style.GREEN[0],
)  # fmt: skip


def looks(kinds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Returns the name in the key and the light colour of each kind of op: the part of a decoder, or its own
    name; the last kinds share an entry if colours run out."""
    found, own = {}, iter(OWN_COLOURS)
    for kind in dict.fromkeys(kinds):
        part = style.PART_OF_KIND.get(kind)
        if part is not None:
            found[kind] = (part, style.PART[part][0])
        elif (colour := next(own, None)) is not None:
            found[kind] = (kind.replace("_", " "), colour[0])
        else:
            found[kind] = (OTHER, style.PART[OTHER][0])
    return found


# -- prices ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """Both axes of a scatter: seconds times `factor` in `unit`, from `low` to `high`."""

    unit: str
    factor: float
    low: float
    high: float

    def axis(self, title: str) -> Layout:
        ticks = common.few_ticks(self.low, self.high)
        if len(ticks) < TICKS_AT_LEAST:
            decade = 10.0 ** math.floor(math.log10(self.low))
            every = [m * d for d in (decade, 10 * decade) for m in range(1, 10)]
            ticks = [tick for tick in every if self.low <= tick <= self.high]
        return common.log_axis(f"{title} ({self.unit}, log scale)", self.low, self.high, ticks)


def _scale(rows: pd.DataFrame) -> _Scale:
    times = pd.concat([rows["predicted_s"], rows["measured_s"]])
    unit, factor = ("ms", 1e3) if times.median() >= 1e-3 else ("µs", 1e6)
    low, high = float(times.min()) * factor, float(times.max()) * factor
    room = max(1.25, math.sqrt(LEAST_REACH * low / high))
    return _Scale(unit, factor, low / room, high * room)


def scatter(rows: pd.DataFrame, bound_pct: float) -> go.Figure:
    """Draws predicted over measured times. `rows`: positive seconds, their intervals, a kind and the hover
    text; rows that are not held out are hollow. Interval bars appear if there is room."""
    scale = _scale(rows)
    figure = go.Figure(_band(scale, bound_pct))
    ends = [scale.low, scale.high]
    line = {"color": style.FAINT_INK[0], "width": 1.2, "dash": "dash"}
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line=line, name="predicted as measured", hoverinfo="skip"
    )
    of = looks(rows["kind"].value_counts().index.tolist())
    names = rows["kind"].map(lambda kind: of[kind][0])
    for name in dict.fromkeys(names):
        own = rows[names == name]
        for held_out in (1.0, 0.0):
            part = own[own["held_out"] == held_out]
            if len(part):
                colour = of[part["kind"].iloc[0]][1]
                figure.add_trace(_points(part, name, colour, scale, len(rows) <= BARS_AT_MOST))
    common.once_in_key(figure)
    return figure.update_layout(
        height=SCATTER_PX,
        margin={"l": 64, "r": 20, "t": 8, "b": 52},
        xaxis=scale.axis("measured"),
        yaxis=scale.axis("predicted"),
        meta={"toggles": True, "narrow": {"height": NARROW_SCATTER_PX, "xaxis.nticks": 5}},
    )


def _band(scale: _Scale, bound_pct: float) -> list[go.Scatter]:
    if not known(bound_pct):
        return []
    by, x = 1.0 + bound_pct / 100.0, [scale.low, scale.high]
    name = f"within the bound of {significant(bound_pct, 3)}\u00a0%"
    edge = [x[0] * by, x[1] * by, x[1] / by, x[0] / by]
    return [common.area([*x, *x[::-1]], edge, name, style.FAINT_INK[0])]


def _points(rows: pd.DataFrame, name: str, colour: str, scale: _Scale, bars: bool) -> go.Scatter:
    sides = {"error_y": ("predicted_s", "low_s", "high_s"), "error_x": ("measured_s", "p10_s", "p90_s")}
    ends: Layout = {"symmetric": False, "width": 0, "thickness": 1, "color": colour}
    whiskers: Layout = {}
    for axis, columns in sides.items() if bars else ():
        value, low, high = (rows[column] for column in columns)
        whiskers[axis] = common.whisker(value, low, high, scale.factor, **ends)
    x, y = rows["measured_s"] * scale.factor, rows["predicted_s"] * scale.factor
    mark: Layout = {"symbol": "circle", "opacity": 0.85}
    fill = colour if rows["held_out"].iloc[0] else style.HOLLOW[0]
    hover, look = rows["hover"].tolist(), {"marker": mark, "legendgroup": name, **whiskers}
    return common.marks(x, y, name, colour, hover, fill=fill, **look)


def _spread(low: float, high: float) -> str:
    return f" ({lasting(low)} to {lasting(high)})" if known(low) and known(high) and low < high else ""


def price_hover(row: Mapping[Any, Any]) -> str:
    """Returns the hover text of the price of an op."""
    times = f", {row['n']:,.0f} times" if known(row["n"]) else ""
    cache = f", cache {row['cache']}" if row["cache"] else ""
    off = 100.0 * (row["predicted_s"] / row["measured_s"] - 1.0)
    role = "held out" if row["held_out"] else "calibrated: no evidence"
    return "<br>".join(
        [
            f"<b>{in_figure(row['kind'])}</b>, {in_figure(row['dtype'])}",
            in_figure(row["shape"]),
            f"predicted {lasting(row['predicted_s'])}{_spread(row['low_s'], row['high_s'])}"
            f"{', ' if row['source'] else ''}{in_figure(row['source'])}",
            f"measured {lasting(row['measured_s'])}{_spread(row['p10_s'], row['p90_s'])}{times}"
            f"{in_figure(cache)}",
            f"<b>{signed_percent(off)}</b>, {role}",
        ]
    )


def case_hover(name: str, row: Mapping[Any, Any]) -> str:
    """Returns the hover text of a figure of a case."""
    return "<br>".join(
        [
            f"<b>{in_figure(name)}</b>",
            f"predicted {lasting(row['predicted_s'])}{_spread(row['low_s'], row['high_s'])}",
            f"measured {lasting(row['measured_s'])}",
            f"<b>{signed_percent(100.0 * (row['predicted_s'] / row['measured_s'] - 1.0))}</b>",
        ]
    )


# -- timelines -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The visible part of two timelines: events in seconds since the first of each, cut at `end_s`, with the
    number and the length of all."""

    blocks: Mapping[str, pd.DataFrame]
    end_s: float
    events: Mapping[str, int]
    lasts_s: Mapping[str, float]

    @property
    def whole(self) -> bool:
        """Whether the window includes everything."""
        return all(len(rows) == self.events[name] for name, rows in self.blocks.items())


def window(blocks: Mapping[str, pd.DataFrame], most: int = EVENTS_AT_MOST) -> Window:
    """Returns the longest first stretch in which no block has more than `most` events."""
    moved = {}
    for name, rows in blocks.items():
        begun_s = rows["start_s"].min()
        times = {"start_s": rows["start_s"] - begun_s, "end_s": rows["end_s"] - begun_s}
        moved[name] = rows.assign(**times).sort_values(["start_s", "end_s"], kind="stable")
    lasts = {name: float(rows["end_s"].max()) for name, rows in moved.items()}
    full = [float(rows["start_s"].iloc[most]) for rows in moved.values() if len(rows) > most]
    end_s = min(full, default=max(lasts.values(), default=0.0))
    shown = {name: rows[rows["start_s"] < end_s] for name, rows in moved.items()}
    cut = {name: rows.assign(end_s=rows["end_s"].clip(upper=end_s)) for name, rows in shown.items()}
    return Window(cut, end_s, {name: len(rows) for name, rows in moved.items()}, lasts)


def timelines(shown: Window) -> go.Figure:
    """Draws blocks below each other on one time axis: a lane for every rank and stream, colours by kind."""
    factor, unit = (1e3, "ms") if shown.end_s >= 1e-3 else (1e6, "µs")
    every = pd.concat(shown.blocks.values())
    took = every.assign(took=every["end_s"] - every["start_s"]).groupby("op_kind")["took"].sum()
    of = looks(took.sort_values(ascending=False).index.tolist())

    def bars(rows: pd.DataFrame, lanes: Mapping[Lane, str], axis: str) -> list[go.Bar]:
        return _bars(rows, lanes, of, axis, factor, unit)

    blocks = []
    for name, rows in shown.blocks.items():
        count, whole = len(rows), shown.events[name]
        busy = f"{count:,} ops" + ("" if count == whole else f" of {whole:,}")
        text = f"<b>{name}</b>: {lasting(shown.lasts_s[name])} in all, {busy} shown"
        blocks.append(common.Block(text, _lanes(rows), rows, bars))
    x_axis = {
        "title": {"text": f"time since the first launch ({unit})"},
        "range": [0.0, shown.end_s * factor * 1.01 or 1.0],
    }
    return common.timelines(blocks, LANE_PX, HEADING_PX, x_axis)


def _lanes(rows: pd.DataFrame) -> dict[Lane, str]:
    """Returns (rank, stream) of each lane with its name, without lanes for which there is no room."""
    keys = sorted(set(zip(rows["rank"], rows["stream"], strict=True)))[:LANES_AT_MOST]
    several = len({rank for rank, _ in keys}) > 1
    return {
        (rank, stream): in_figure(f"rank {rank:.0f}, {stream}" if several else stream)
        for rank, stream in keys
    }


def _bars(
    rows: pd.DataFrame,
    lanes: Mapping[Lane, str],
    of: Mapping[str, tuple[str, str]],
    axis: str,
    factor: float,
    unit: str,
) -> list[go.Bar]:
    places = {key: place for place, key in enumerate(lanes)}
    at = [places.get(key, -1) for key in zip(rows["rank"], rows["stream"], strict=True)]
    times = {"start": rows["start_s"] * factor, "took": (rows["end_s"] - rows["start_s"]) * factor}
    rows = rows.assign(lane=at, look=[of[kind][0] for kind in rows["op_kind"]], **times)
    rows = rows[rows["lane"] >= 0]
    order, colours = [*style.PART, *(name for name, _ in of.values())], dict(of.values())
    bars = []
    for look in sorted(set(rows["look"]), key=order.index):
        own = rows[rows["look"] == look]
        marker = {"color": colours[look], "line": {"width": 0}}
        text = [in_figure(name) for name in own["name"]]
        hover = [_event_hover(row, factor, unit) for row in own.to_dict("records")]
        bars.append(common.spans(own, look, axis, hover, width=0.8, marker=marker, text=text))
    return bars


def _event_hover(row: Mapping[Any, Any], factor: float, unit: str) -> str:
    start, end = (significant(row[name] * factor, 4) for name in ("start_s", "end_s"))
    state = "" if row["state"] == "run" else f", {in_figure(row['state'])}"
    return (
        f"<b>{in_figure(row['name'])}</b>, rank {row['rank']:.0f}, {in_figure(row['stream'])}"
        f"<br>{in_figure(row['op_kind'])}{state}"
        f"<br>{start} to {end} {unit} ({lasting(row['end_s'] - row['start_s'])})"
    )


def share(part: int, of: int) -> str:
    """ "18 of 20 (90 %)"."""
    return f"{part:,} of {of:,} ({percent(part / of)})" if of else ""
