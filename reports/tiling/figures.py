"""Figures of the tiling study: data frames in, plotly figures out. This module reads no file.

Figures follow the rules at the head of `decode/figures.py`: light colours, no titles, the page draws the key.
The triangle is Flash Inference's Figure 1, drawn from the areas that the launches of a run cover:

    a launch = inputs [a, b] x outputs [c, d]               a rectangle
             = inputs [a, b] x distances [p, q]             input i goes to outputs i + p .. i + q
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.beside import names_in_pairs
from simcore.reports.common.figures import Axis, Layout, Scale, Variant, hollow, in_rows, laid_out
from simcore.reports.text import (
    duration,
    in_figure,
    interval,
    known,
    lasting,
    milliseconds,
    percent,
    significant,
    times,
    tokens,
)

TRIANGLE_PX, NARROW_TRIANGLE_PX = 420, 340
RARE_BELOW = 0.002
ROW_NAME_AT_MOST = 18
LOG_SCALE_FROM = 4.0
# Room on the right for half of the last label; without it plotly omits the label.
MARGIN = {"l": 56, "r": 24, "t": 12, "b": 48}

# -- colours: the baselines are grey and ochre, Algorithm 1 has a hue for each kind of tile --------------

IMPLEMENTATION: Mapping[str, tuple[str, str]] = {
    "conv": style.RED[1],
    "flash_conv": style.RED[3],
    "fft": style.VIOLET[1],
    "flash_fft": style.VIOLET[3],
}
HUES: Mapping[str, style.Shades] = {
    "lazy": style.GREY,
    "eager": style.OCHRE,
    "fractal": style.BLUE,
    "generic": style.GREEN,
    "relaxed": style.GREEN,
}
SYMBOLS: Mapping[str, str] = {"lazy": "circle", "eager": "square", "fractal": "diamond"}
PLAIN_STRATEGIES = tuple(HUES)


def shades(hue: style.Shades, count: int) -> list[str]:
    """Returns `count` light colours of a hue, up to three from strong to faint; beyond five they repeat."""
    steps = {1: [3], 2: [3, 1], 3: [4, 2, 0]}.get(count, [4, 2, 0, 3, 1])
    return [hue[steps[i % len(steps)]][0] for i in range(count)]


def variants(results: pd.DataFrame) -> list[Variant]:
    """Returns the variants of a run: lazy, eager, Algorithm 1, then its general and its relaxed form."""
    found = common.variants(results, by=())
    rank = {name: i for i, name in enumerate(PLAIN_STRATEGIES)}
    # A mixture of implementations comes last, so that it is drawn over its parts.
    found = sorted(found, key=lambda v: (rank.get(v.strategy, len(rank)), _tiles_of(v) is None))
    coloured: list[Variant] = []
    for strategy in dict.fromkeys(v.strategy for v in found):
        own = [v for v in found if v.strategy == strategy]
        plain = [v for v in own if _tiles_of(v) is None]
        colours = dict(zip([v.label for v in plain], shades(HUES.get(strategy, style.GREEN), len(plain)),
                           strict=True))  # fmt: skip
        for variant in own:
            colour = colours.get(variant.label) or IMPLEMENTATION[_tiles_of(variant) or ""][0]
            coloured.append(replace(variant, colour=colour, symbol=SYMBOLS.get(strategy, "circle")))
    return coloured


def _tiles_of(variant: Variant) -> str | None:
    """Returns the single implementation of a variant's tiles, if its label names it: "fractal, fft"."""
    words = variant.label.replace(" ", "_").split(",_")
    own = [word for word in words if word in IMPLEMENTATION]
    return own[0] if variant.strategy == "fractal" and own else None


# -- axes ----------------------------------------------------------------------------------------------


def log_axis(title: str, values: Sequence[float], room: float = 1.2) -> Layout:
    """Returns a logarithmic axis of all positive values, or one from zero if they are close together; `title`
    ends in its unit: "time (ms)"."""
    return common.positive_axis(title, values, LOG_SCALE_FROM, room)


def powers_axis(title: str, places: Sequence[float], apart: float = 0.05) -> Axis:
    """Returns a logarithmic axis of lengths or sides, and its settings to overwrite on a narrow screen;
    labels are at least the share `apart` of the axis from each other."""
    logs = [math.log10(place) for place in places]
    pad = 0.04 * (logs[-1] - logs[0]) or 0.1
    named = f"{title}, log scale" if "(" not in title else common.log_title(title)
    return common.places_axis(named, logs, 10, (apart, 0.16), pad, lambda place: tokens(round(place)))


def positions_axis(length: float) -> dict[str, Any]:
    """Returns an axis of positions from 0 to the length, with a label at every quarter."""
    quarters = [round(length * i / 4) for i in range(5)]
    return {
        "title": {"text": "position (tokens)"},
        "range": [0, length],
        "tickvals": quarters,
        "ticktext": ["0", *(tokens(place) for place in quarters[1:])],
    }


def _rows(figure: go.Figure, labels: Sequence[str], **layout: Any) -> go.Figure:
    names, texts = ([row_name(label) for label in own] for own in (labels, names_in_pairs(labels)))
    ticks = {} if names == texts else {"tickvals": names, "ticktext": texts}
    return in_rows(figure, len(labels), yaxis=common.named_axis(names, **ticks), **layout)


def row_name(label: str) -> str:
    """A label in as few lines as its parts need.

    >>> row_name("fractal, fft, half stored, in sequence from 64")
    'fractal, fft,<br>half stored,<br>in sequence from 64'
    """
    lines: list[str] = []
    for part in in_figure(label).split(", "):
        if lines and len(lines[-1]) + len(part) < ROW_NAME_AT_MOST:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return ",<br>".join(lines)


# -- the triangle --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of launch in the triangle: its name and its light colour."""

    name: str
    colour: str


CELL = Kind("the position itself", style.RED[2][0])
PLAIN_KINDS: Mapping[str, Kind] = {
    "conv_row": Kind("history of a position", style.GREY[2][0]),
    "conv_column": Kind("all that a position gives", style.OCHRE[2][0]),
    "conv_prefill": Kind("prompt", style.GREEN[2][0]),
    "conv_carry": Kind("carry into the second half", style.VIOLET[2][0]),
}


def kind_of(op_kind: str, side: int) -> Kind:
    """Returns the kind of a launch in the triangle; tiles differ by their side."""
    if op_kind.endswith("_cell") or op_kind == "token_step":
        return CELL
    if op_kind in PLAIN_KINDS:
        return PLAIN_KINDS[op_kind]
    low = 1 << (side.bit_length() - 1)
    name = f"tile of side {side}" if side == low else f"tile of side {low} to {2 * low - 1}"
    return Kind(name, style.BLUE[min(4, side.bit_length() - 1)][0])


def outline(cell: Mapping[Any, Any], last: int) -> tuple[list[float], list[float]]:
    """Returns the corners (inputs, outputs) of an area: a rectangle, or the steps of a parallelogram cut off
    after output `last`. A contribution takes the square of half a position around it."""
    first, end = int(cell["first_input"]), int(cell["last_input"])
    if known(cell["first_lag"]):
        low, high = int(cell["first_lag"]), int(cell["last_lag"])
        inputs = [i for i in range(first, end + 1) if i + low <= last]
        tops, bottoms = ([i + low for i in inputs], [min(last, i + high) for i in inputs])
    else:
        inputs = [first, end] if end > first else [first]
        tops, bottoms = ([int(cell["first_output"])] * len(inputs), [int(cell["last_output"])] * len(inputs))
    there = [(x, top - 0.5) for i, top in zip(inputs, tops, strict=True) for x in (i - 0.5, i + 0.5)]
    back = [(x, low + 0.5) for i, low in zip(inputs, bottoms, strict=True) for x in (i - 0.5, i + 0.5)]
    corners = [*there, *back[::-1]]
    return [x for x, _ in corners], [y for _, y in corners]


def _span(first: float, last: float) -> str:
    return f"{first:.0f}" if first == last else f"{first:.0f} to {last:.0f}"


def _cell_hover(cell: Mapping[Any, Any], side: int) -> str:
    if known(cell["first_lag"]):
        goes = f"to the positions {_span(cell['first_lag'], cell['last_lag'])} later"
    else:
        goes = f"to outputs {_span(cell['first_output'], cell['last_output'])}"
    when = f"<br>starts at {duration(cell['start_s'])}" if known(cell["start_s"]) else ""
    tile = "" if cell["op_kind"] in PLAIN_KINDS or cell["op_kind"].endswith("_cell") else f", side {side}"
    graph, kind = in_figure(cell["graph"]), in_figure(cell["op_kind"])
    return (
        f"<b>launch {cell['launch']:.0f}: {graph}</b><br>{kind}{tile}"
        f"<br>inputs {_span(cell['first_input'], cell['last_input'])} {goes}{when}"
    )


def _area(cell: Mapping[Any, Any], last: int) -> go.Scatter:
    side = int(cell["last_input"] - cell["first_input"]) + 1
    kind = kind_of(str(cell["op_kind"]), side)
    x, y = outline(cell, last)
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        fill="toself",
        fillcolor=kind.colour,
        line={"width": 1, "color": style.HOLLOW[0]},
        name=kind.name,
        legendgroup=kind.name,
        hoveron="fills",
        hoverinfo="text",
        text=_cell_hover(cell, side),
    )


def triangle(cells: pd.DataFrame) -> go.Figure:
    """Draws the launch of each contribution: input positions across, output positions down (Flash Inference,
    Figure 1). `cells`: the areas of one strategy and layer; the hover text names the launch."""
    last = int(cells[["last_input", "last_output"]].max().max()) if len(cells) else 0
    areas = [_area(cell, last) for cell in cells.to_dict("records")]
    order = [CELL.name, *(kind.name for kind in PLAIN_KINDS.values())]
    sides = sorted(
        {a.name for a in areas if a.name not in order}, key=lambda name: (int(name.split()[3]), name)
    )
    keys = {name: i for i, name in enumerate([*order, *sides])}
    swatches = [_swatch(area) for area in {a.name: a for a in areas}.values()]
    for area in areas:
        area.showlegend = False
    figure = go.Figure([*sorted(swatches, key=lambda s: keys[s.name]), *areas])
    ticks = list(range(0, last + 1, 4 if last < 40 else 8))
    axis: dict[str, Any] = {"tickvals": ticks, "showgrid": False, "constrain": "domain"}
    figure.update_layout(
        height=TRIANGLE_PX,
        margin={"l": 48, "r": 8, "t": 4, "b": 48},
        xaxis={**axis, "title": {"text": "input position"}, "range": [-0.8, last + 0.8]},
        yaxis={**axis, "title": {"text": "output position"}, "range": [last + 0.8, -0.8], "scaleanchor": "x"},
        meta={"narrow": {"height": NARROW_TRIANGLE_PX}},
    )
    return figure


def _swatch(area: go.Scatter) -> go.Bar:
    """Returns an entry of the key; bars have a box of their colour there."""
    marker = {"color": area.fillcolor, "line": {"width": 0}}
    return go.Bar(x=[None], y=[None], name=area.name, marker=marker, hoverinfo="skip")


# -- over positions ------------------------------------------------------------------------------------


def _stretches(rows: pd.DataFrame, most: int) -> list[np.ndarray[Any, Any]]:
    """Returns row numbers in at most `most` stretches of equal length."""
    return [part for part in np.array_split(np.arange(len(rows)), min(most, max(1, len(rows)))) if len(part)]


def cumulative(steps: pd.DataFrame, shown: Sequence[Variant], most: int) -> go.Figure:
    """Draws the time since the start at which each position is done, a line of at most `most` points for each
    variant (Flash Inference, Figures 2a and 2b). `steps`: of one case."""
    longest = float(steps["end_s"].max())
    scale = common.seconds("time since the start", longest, 1.0)
    figure = go.Figure()
    for variant, own in common.of_variants(steps.sort_values("token", kind="stable"), shown):
        last = own.iloc[[part[-1] for part in _stretches(own, most)]]
        template = f"position %{{x:,.0f}} done after %{{y:,.4g}} {scale.unit}"
        figure.add_trace(common.line(last["token"], last["end_s"] * scale.factor, variant, template))
    y_axis = {"title": {"text": scale.title}, "range": [0, longest * scale.factor * 1.04 or 1]}
    x_axis = positions_axis(float(steps["token"].max()) + 1)
    return laid_out(figure, margin=MARGIN, xaxis=x_axis, yaxis=y_axis)


def latency_over_position(steps: pd.DataFrame, shown: Sequence[Variant], most: int) -> go.Figure:
    """Draws the latency of tokens over position, the slowest of each stretch (Flash Inference, Figure 3b).
    `steps`: of one case."""
    figure = go.Figure()
    timed = steps[steps["latency_s"] > 0].sort_values("token", kind="stable")
    # Predicted lines would be hidden behind the spikes of measured ones.
    for variant, own in common.of_variants(timed, sorted(shown, key=lambda variant: variant.dash or "")):
        latency = own["latency_s"].to_numpy()
        slowest = own.iloc[[part[int(latency[part].argmax())] for part in _stretches(own, most)]]
        # Spikes of single implementations are behind those of their mixture.
        look: Layout = {"width": 1.25, "opacity": 1.0 if _tiles_of(variant) is None else 0.5}
        template = "position %{x:,.0f}: %{y:,.4g} ms"
        figure.add_trace(common.line(slowest["token"], slowest["latency_s"] * 1e3, variant, template, **look))
    x_axis = positions_axis(float(steps["token"].max()) + 1)
    y_axis = log_axis("latency of a token (ms)", (timed["latency_s"] * 1e3).tolist())
    return laid_out(figure, margin=MARGIN, xaxis=x_axis, yaxis=y_axis)


# -- tiles ---------------------------------------------------------------------------------------------


def _tile_hover(row: Mapping[Any, Any]) -> str:
    bounds = interval(row["low_s"], row["high_s"], 1e3)
    chosen = "<br>hybrid takes this one" if row["chosen"] else ""
    return (
        f"<b>{in_figure(row['implementation'])}</b>, side {tokens(row['side'])}<br>"
        f"{milliseconds(row['seconds'])} for all layers{f' ({bounds} ms)' if bounds else ''}{chosen}"
    )


def tile_costs(tiles: pd.DataFrame) -> go.Figure:
    """Draws the time of one tile of all layers by its side, a line for each implementation.

    As Flash Inference's Figure 3a. The cheapest at each side form the Pareto front; hybrid's choices are
    ringed. `tiles`: of one case."""
    rows = tiles[tiles["seconds"] > 0].sort_values("side", kind="stable")
    rows = rows.assign(ms=rows["seconds"] * 1e3)
    figure, front = go.Figure(), rows.groupby("side", sort=True)["ms"].min()
    at = {"x": front.index.tolist(), "y": front.tolist(), "mode": "lines", "name": "Pareto front"}
    figure.add_scatter(**at, line={"color": style.faint(style.INK[0]), "width": 11}, hoverinfo="skip")
    names = [name for name in IMPLEMENTATION if (rows["implementation"] == name).any()]
    for name in names + sorted(set(rows["implementation"].astype(str)) - set(IMPLEMENTATION)):
        own = rows[rows["implementation"] == name]
        colour = IMPLEMENTATION.get(name, style.FAINT_INK)[0]
        hover = [_tile_hover(row) for row in own.to_dict("records")]
        figure.add_trace(common.dotted(own["side"], own["ms"], in_figure(name), colour, hover))
    chosen = rows[rows["chosen"] > 0]
    if len(chosen):
        ring = {"symbol": "circle-open", "size": 13, "color": style.INK[0], "line": {"width": 1.75}}
        at = {"x": chosen["side"].tolist(), "y": chosen["ms"].tolist(), "mode": "markers"}
        figure.add_scatter(**at, name="taken by hybrid", marker=ring, hoverinfo="skip")
    axis, narrow = powers_axis("side of the tile (positions)", sorted(rows["side"].unique()) or [1.0])
    y_axis = log_axis("time of one tile, all layers (ms)", rows["ms"].tolist(), room=1.6)
    return laid_out(figure, narrow, margin=MARGIN, xaxis=axis, yaxis=y_axis)


# -- shares and speed-ups ------------------------------------------------------------------------------

PARTS: Sequence[tuple[str, str, str]] = [
    ("mixer_s", "mixer", style.PART["attention"][0]),
    ("block_s", "blocks", style.PART["layers besides attention"][0]),
    ("rest_s", "waiting for the host", style.PART["host"][0]),
]


def _share_hover(label: str, name: str, value: float, total: float) -> str:
    share = f", {percent(value / total)} of {lasting(total)}" if total else ""
    return f"<b>{in_figure(label)}</b><br>{name}: {lasting(value)}{share}"


def shares(seconds: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Draws the parts of the whole generation: a stacked bar for each variant. `seconds`: label -> part -> s,
    in the order of the rows."""
    totals = {label: sum(own.values()) for label, own in seconds.items()}
    names, longest = [row_name(label) for label in totals], max(totals.values(), default=0.0)
    scale = common.seconds("time of the whole generation", longest, 1.0)
    figure = go.Figure()
    for part, name, colour in PARTS:
        values = {label: own.get(part, 0.0) for label, own in seconds.items()}
        if max(values.values(), default=0.0) < RARE_BELOW * longest:
            continue
        hover = [_share_hover(label, name, value, totals[label]) for label, value in values.items()]
        figure.add_trace(common.bars([v * scale.factor for v in values.values()], names, name, colour, hover))
    ends = [total * scale.factor for total in totals.values()]
    figure.add_trace(common.bar_sums(ends, names, [lasting(total) for total in totals.values()]))
    longest *= scale.factor
    axis = {"title": {"text": scale.title}, "range": [0, longest * 1.12 or 1], "nticks": 6}
    meta = {"narrow": {"xaxis.range": [0, longest * 1.3 or 1], "xaxis.nticks": 4}}
    return _rows(figure, list(seconds), barmode="stack", bargap=0.34, xaxis=axis, meta=meta)


SPEED_UPS: Sequence[tuple[str, str, str]] = [
    ("speedup_over_lazy", "end to end", style.BLUE[3][0]),
    ("mixer_speedup_over_lazy", "mixer only", style.OCHRE[2][0]),
]


def speed_ups(rows: pd.DataFrame, shown: Sequence[Variant], ends: Mapping[str, str]) -> go.Figure:
    """Draws the speed-up over lazy with its interval: end to end, and of the mixer alone (Flash Inference,
    Figure 2). `rows`: results of one case; `ends`: label -> what the ends of an interval are."""
    rows = rows[rows["value"] > 0]
    labels = [v.label for v in shown if (rows["label"] == v.label).any()]
    figure, reach = go.Figure(), [1.0]
    for metric, name, colour in SPEED_UPS:
        own = rows[(rows["metric"] == metric) & rows["label"].isin(labels)]
        if own.empty:
            continue
        low, high = own["low"].fillna(own["value"]), own["high"].fillna(own["value"])
        reach += [*own["value"], *low[low > 0], *high]
        bar = common.whisker(own["value"], low, high, thickness=1.25, color=colour, width=4)
        mark = {"size": 10, "color": colour, "symbol": "diamond" if "mixer" in metric else "circle"}
        hover = [_speed_up_hover(row, name, ends[row["label"]]) for row in own.to_dict("records")]
        y = [row_name(label) for label in own["label"]]
        look: Layout = {"marker": {**mark, "line": None}, "error_x": bar}
        figure.add_trace(common.marks(own["value"], y, name, colour, hover, **look))
    common.rule(figure, style.INK, x=1, width=1, dash="dot")
    return _rows(figure, labels, **_speed_axis(reach))


def _speed_axis(values: Sequence[float]) -> dict[str, Any]:
    """Returns the axis of speed-ups, with half of its labels on a narrow screen."""
    axis = log_axis("speed-up over lazy (×)", values)
    narrow = {f"xaxis.{part}": axis[part][::2] for part in ("tickvals", "ticktext") if part in axis}
    return {"xaxis": axis, "meta": {"narrow": {**narrow, "xaxis.title.text": "speed-up over lazy (×)"}}}


def _speed_up_hover(row: Mapping[Any, Any], name: str, ends: str) -> str:
    bounds = interval(row["low"], row["high"])
    interval_line = f"<br>{bounds} {ends}" if bounds else ""
    return f"<b>{in_figure(row['label'])}</b><br>{name}: {times(row['value'])}{interval_line}"


# -- published ranges -----------------------------------------------------------------------------------


def ranges(
    rows: pd.DataFrame, names: Mapping[str, str], place: Callable[[Any], str], times_are: str = "predicted"
) -> go.Figure:
    """Draws predictions as marks on the published range of each metric, a row for each metric.

    Marks are filled inside the range and hollow outside. `rows`: compared figures; `names`: metric -> its
    name; `place`: returns the place of a row."""
    figure, colour = go.Figure(), style.BLUE[3][0]
    for metric, name in names.items():
        own = rows[rows["metric"] == metric]
        low, high = float(own["reference_low"].min()), float(own["reference_high"].max())
        published = f"published {f'{low:g}×' if low == high else f'{low:g} to {high:g}×'}"
        hover = [
            f"<b>{in_figure(place(row))}</b><br>{times_are} {times(row['predicted'])}, {published}"
            f"<br>{in_figure(row['source'])}"
            for row in own.to_dict("records")
        ]
        figure.add_trace(_range(low, high, name))
        look: Layout = {
            "fill": hollow(colour, own["error_pct"] != 0),
            "marker": {"size": 10},
            "showlegend": False,
        }
        figure.add_trace(common.marks(own["predicted"], [name] * len(own), times_are, colour, hover, **look))
    ends = rows[["reference_low", "reference_high", "predicted"]].to_numpy(dtype=float).ravel().tolist()
    return _rows(figure, list(names.values()), **_speed_axis([*ends, 1.0]))


def _range(low: float, high: float, name: str) -> go.Scatter:
    mark = {"symbol": "line-ns", "size": 18, "line": {"color": style.INK[0], "width": 2}}
    look = {
        "line": {"color": style.faint(style.INK[0]), "width": 16},
        "marker": mark,
        "mode": "lines+markers",
    }
    legend = {"name": "published", "legendgroup": "published", "hoverinfo": "skip", "showlegend": False}
    return go.Scatter(x=[low, high], y=[name, name], **look, **legend)


# -- growth --------------------------------------------------------------------------------------------


def growth(rows: pd.DataFrame, shown: Sequence[Variant], metric: str, scale: Scale) -> go.Figure:
    """Draws a figure of the whole generation against its length, both logarithmic. `rows`: of one case."""
    rows = rows[(rows[metric] > 0) & rows["tokens"].notna()].sort_values("tokens", kind="stable")
    figure, quantity = go.Figure(), in_figure(scale.name)
    for variant, own in common.of_variants(rows, shown):
        hover = [
            f"<b>{variant.name}</b>, {tokens(length)} tokens<br>{quantity}: {scale.text(value)}"
            for length, value in zip(own["tokens"], own[metric], strict=True)
        ]
        y, symbol = own[metric] * scale.factor, variant.symbol
        line = common.dotted(own["tokens"], y, variant.name, variant.colour, hover, symbol=symbol)
        figure.add_trace(line)
    axis, narrow = powers_axis("length (tokens)", sorted(rows["tokens"].unique()) or [1.0])
    y_axis = log_axis(scale.title, (rows[metric] * scale.factor).tolist())
    return laid_out(figure, narrow, margin=MARGIN, xaxis=axis, yaxis=y_axis)


# -- a sweep -------------------------------------------------------------------------------------------


def speed_up_map(
    values: Sequence[Sequence[float]],
    names: tuple[Sequence[str], Sequence[str]],
    titles: tuple[str, str],
    limit: float,
) -> go.Figure:
    """Draws the speed-up over lazy for every case of a sweep.

    `values` by row and column, `names` of the rows and of the columns, `titles` of both axes; `limit`: the
    speed-up of the strongest colour."""
    rows, columns = ([in_figure(name) for name in own] for own in names)
    down, across = titles
    hover = [
        [
            f"{row}<br>{in_figure(across)} {column}: <b>{times(value)}</b>"
            for column, value in zip(columns, line, strict=True)
        ]
        for row, line in zip(rows, values, strict=True)
    ]
    ends = {"zmin": -math.log2(limit), "zmax": math.log2(limit), "showscale": False}
    cells = common.speed_up_cells(values, hover, significant, texttemplate="%{text}", **ends)
    x_axis = {"title": {"text": across}, "tickvals": list(range(len(columns))), "ticktext": columns}
    return go.Figure(cells).update_layout(
        height=76 + 34 * max(2, len(rows)),
        margin={"l": 8, "r": 8, "t": 4, "b": 48},
        xaxis={"showgrid": False, **x_axis},
        yaxis={"title": {"text": down}, **common.rows_axis(rows)},
    )
