"""Figures of the decode study: data frames in, plotly figures out. This module reads no file.

Figures carry light colours, no titles (headings are HTML) and no legend (the page's script draws it).
`layout.meta` holds settings for that script which plotly lacks: `narrow` (layout paths to overwrite on a
small screen), `toggles` (the key switches lines off) and `zooms` (axes that may be zoomed).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import ROW_PX, Cells, Lane, Layout, Variant, hollow, spaced
from simcore.reports.run import DEVICE
from simcore.reports.text import (
    in_figure,
    interval,
    known,
    milliseconds,
    percent,
    significant,
    times,
    tokens,
)

LOG_SCALE_FROM = 4.0
RARE_BELOW = 0.01
RARE = "parts below 1 %"
ATTENTION = ("speculative_attention", "decode_attention")
SHORTEST_SPAN_S = 1e-12
# The hue of lines that stand for batches.
BATCHES_AS = "alspec"
READ_ONCE = "weights and KV read once"
CELLS_WITH_NUMBERS = (10, 12)
LANE_PX, HEADING_PX = 26, 34


def at_hit_rate(rows: pd.DataFrame, hit_rate: float | None) -> pd.DataFrame:
    """Returns the rows of one hit rate and of strategies that do not speculate; None: all rows."""
    return rows if hit_rate is None else rows[rows["hit_rate"].isna() | (rows["hit_rate"] == hit_rate)]


def _over_context(figure: go.Figure, latency: pd.DataFrame, bound: Sequence[float] = ()) -> go.Figure:
    """Lays out latencies against context. `bound`: other values in ms that the axis must include."""
    logs = [math.log2(context) for context in sorted(latency["context_tokens"].unique())]
    pad = max(0.03 * (logs[-1] - logs[0]), 0.1)
    x_axis, narrow = common.places_axis("context (tokens)", logs, 2, (0.045, 0.11), pad, tokens)
    y_axis = _latency_axis([*(latency["value"] * 1e3), *bound])
    narrow = {**narrow, "height": 340}
    return common.laid_out(figure, narrow, xaxis=x_axis, yaxis=y_axis, height=440)


def _latency_axis(values: Sequence[float]) -> Layout:
    low, high = min(values), max(values)
    if low <= 0 or high / low < LOG_SCALE_FROM:
        return {"title": {"text": "latency per token (ms)"}, "range": [0, high * 1.08]}
    title, ticks = "latency per token (ms, log scale)", common.log_ticks(low, high)
    return common.log_axis(title, low / 1.12, high * 1.12, ticks, "g")


def _latency_hover(rows: pd.DataFrame) -> list[str]:
    hover = []
    for row in rows.to_dict("records"):
        hits = f", hits {percent(row['hit_rate'])}" if known(row["hit_rate"]) else ""
        bounds = interval(row["low"], row["high"], 1e3)
        lines = [
            f"<b>{in_figure(row['label'])}</b>",
            f"{tokens(row['context_tokens'])} tokens{hits}",
            f"{milliseconds(row['value'])} per token",
            f"{row.get('ends', '90 % interval')}: {bounds} ms" if bounds else "",
            in_figure(row["source"]),
        ]
        hover.append(common.by_text(*lines))
    return hover


def _latency_line(rows: pd.DataFrame, variant: Variant) -> go.Scatter:
    fill = hollow(variant.colour, rows["source"].str.contains("extrapolated"))
    line = {"color": variant.colour, "width": 2}
    look: Layout = {"mode": "lines+markers", "marker": {"symbol": variant.symbol}, "line": line, "fill": fill}
    x, y, hover = rows["context_tokens"], rows["value"] * 1e3, _latency_hover(rows)
    return common.marks(x, y, variant.name, variant.colour, hover, legendgroup=variant.label, **look)


def _latency_band(rows: pd.DataFrame, variant: Variant) -> list[go.Scatter]:
    """Returns a band from the fewest hits to the most; only its two edges are data."""
    rates = rows["hit_rate"].dropna()
    ends = [rows[rows["hit_rate"] == rate] for rate in (rates.max(), rates.min())]
    span = f"{percent(rates.min())} to {percent(rates.max())} hits"
    traces = []
    for fill, edge in zip((None, "tonexty"), ends, strict=True):
        line = _latency_line(edge, variant)
        line.update(name=f"{variant.name}, {span}", showlegend=fill is not None)
        line.update(line={"width": 1.25}, marker={"size": 6})
        if fill:
            line.update(fill=fill, fillcolor=style.faint(variant.colour))
        traces.append(line)
    return traces


def _read_once(rows: pd.DataFrame) -> go.Scatter:
    """Returns the least latency: weights and KV cache read once."""
    rows = rows.sort_values("context_tokens", kind="stable")
    contexts = rows["context_tokens"]
    hover = [
        f"<b>{READ_ONCE}</b><br>{tokens(context)} tokens: {milliseconds(value)}"
        for context, value in zip(contexts, rows["value"], strict=True)
    ]
    y, colour = rows["value"] * 1e3, style.RED[2][0]
    line = {"color": colour, "width": 1.5, "dash": "dash"}
    look: Layout = {"mode": "lines", "line": line, "marker": None, "legendgroup": READ_ONCE}
    return common.dotted(contexts, y, READ_ONCE, colour, hover, **look)


def _rival(rows: pd.DataFrame, name: str, colour: str) -> go.Scatter:
    """Returns the second model's latency; rival_token_latency_s rows of one line."""
    rows = rows.sort_values("context_tokens", kind="stable")
    contexts, y = rows["context_tokens"], rows["value"] * 1e3
    hover = [
        common.by_text(
            f"<b>{in_figure(name)}</b>", f"{tokens(context)} tokens", f"{milliseconds(value)} per token"
        )
        for context, value in zip(contexts, rows["value"], strict=True)
    ]
    return common.dotted(contexts, y, name, colour, hover, size=4, dash="dot")


def latency_over_context(
    latency: pd.DataFrame,
    shown: Sequence[Variant],
    read_once: pd.DataFrame,
    hit_rate: float | None = None,
    *,
    rival: pd.DataFrame,
) -> go.Figure:
    """Draws latency per token against context, a line for each variant. hit_rate None: a band from the fewest
    hits to the most. `latency`: token_latency_s rows of one batch; its optional column `ends` names the
    interval from low to high. `read_once`: read_once_s rows, drawn unchanged. `rival`: rival_token_latency_s
    rows of the batch, dotted."""
    figure = go.Figure()
    rows = at_hit_rate(latency, hit_rate).sort_values(["context_tokens", "hit_rate"], kind="stable")
    for variant, own in common.of_variants(rows, shown):
        if own["hit_rate"].nunique() > 1:
            figure.add_traces(_latency_band(own, variant))
        else:
            figure.add_trace(_latency_line(own, variant))
    several = rival["label"].nunique() > 1
    for variant, own in common.of_variants(rival, shown):
        of = f", {variant.name}" if several else ""
        figure.add_trace(_rival(own, f"{own['source'].iloc[0]}{of}", variant.colour))
    figure.add_traces([_read_once(own) for _, own in read_once.groupby("label", sort=False)])
    return _over_context(figure, latency, [*(read_once["value"] * 1e3), *(rival["value"] * 1e3)])


def latency_by_batch(latency: pd.DataFrame, *, rival: pd.DataFrame) -> go.Figure:
    """Draws a variant's latency per token against context, a line for each batch; token_latency_s rows, and
    dotted rival_token_latency_s rows."""
    figure = go.Figure()
    rows = latency.sort_values("context_tokens", kind="stable")
    batches = sorted(rows["batch"].unique())
    symbols = itertools.cycle(("circle", "diamond", "square"))
    for batch, colour, symbol in zip(batches, style.ramp(BATCHES_AS, len(batches)), symbols, strict=False):
        own = rows[rows["batch"] == batch]
        figure.add_trace(_latency_line(own, Variant(f"batch {batch:,.0f}", "", 1, colour, symbol)))
        other = rival[rival["batch"] == batch]
        if len(other):
            figure.add_trace(_rival(other, f"{other['source'].iloc[0]}, batch {batch:,.0f}", colour))
    return _over_context(figure, latency, (rival["value"] * 1e3).tolist())


def _rows(figure: go.Figure, count: int, longest: float, more_px: int = 0, **layout: Any) -> go.Figure:
    """Lays out rows of bars, each `more_px` higher than the default row."""
    axis = {"title": {"text": "latency per token (ms)"}, "range": [0, longest * 1.15 or 1], "nticks": 6}
    meta = {"narrow": {"xaxis.range": [0, longest * 1.32 or 1], "xaxis.nticks": 4}}
    y_axis = {"autorange": "reversed", "showgrid": False}
    height = 64 + (ROW_PX + more_px) * max(count, 1)
    look: Layout = {"height": height, "bargap": 0.34, "xaxis": axis, "yaxis": y_axis, "meta": meta}
    return common.in_rows(figure, count, **{**look, **layout})


def latency_bars(latency: pd.DataFrame, shown: Sequence[Variant]) -> go.Figure:
    """Draws latency per token at a single context: a bar for each variant and hit rate."""
    figure, names = go.Figure(), 0
    for variant in shown:
        own = latency[latency["label"] == variant.label].sort_values("hit_rate", kind="stable")
        rates = [f",<br>{percent(h)} hits" if known(h) else "" for h in own["hit_rate"]]
        y = [f"{common.in_two_lines(variant.label)}{rate}" for rate in rates]
        names += len(own)
        fill = hollow(variant.colour, own["source"].str.contains("extrapolated"))
        look = {
            "marker": {"color": fill, "line": {"color": variant.colour, "width": 1.5}},
            "showlegend": False,
        }
        texts = {
            "text": [milliseconds(v) for v in own["value"]],
            "textposition": "outside",
            "cliponaxis": False,
        }
        hover = _latency_hover(own)
        bar = common.bars(own["value"] * 1e3, y, variant.name, variant.colour, hover, **look, **texts)
        figure.add_trace(bar)
    three_lines = bool(latency["hit_rate"].notna().any())
    longest = float(latency["value"].max() * 1e3) if len(latency) else 0.0
    return _rows(figure, names, longest, 12 * three_lines)


def by_part(critical_path: pd.DataFrame) -> pd.DataFrame:
    """Adds to critical-path rows the part of the token of each op kind; merges the parts that are below 1 %
    of every variant's latency."""
    rows = critical_path.assign(
        part=critical_path["op_kind"].map(lambda k: style.PART_OF_KIND.get(k, "other"))
    )
    if rows.empty:
        return rows
    sums: dict[tuple[str, str], float] = {}
    totals: dict[str, float] = {}
    for label, part, value in zip(rows["label"], rows["part"], rows["value"].fillna(0.0), strict=True):
        sums[label, part] = sums.get((label, part), 0.0) + value
        totals[label] = totals.get(label, 0.0) + value
    large = {part for (label, part), value in sums.items() if value >= RARE_BELOW * (totals[label] or 1.0)}
    rare = set(rows["part"]) - large
    return rows.assign(part=rows["part"].where(~rows["part"].isin(rare), RARE))


Kinds = list[tuple[str, float]]


def _part_hover(label: str, part: str, kinds: Kinds, total: float) -> str:
    seconds = sum(s for _, s in kinds)
    share = f" ({percent(seconds / total)})" if total else ""
    lines = [f"<b>{in_figure(label)}</b>", f"{in_figure(part)}: {milliseconds(seconds)}{share}"]
    if len(kinds) > 1 or kinds[0][0] != part:
        lines += [f"   {in_figure(k)} {milliseconds(s)}" for k, s in sorted(kinds, key=lambda k: -k[1])]
    return "<br>".join(lines)


def _part_bar(part: str, kinds_of: Mapping[str, Kinds], totals: Mapping[str, float]) -> go.Bar:
    hover = [_part_hover(label, part, kinds, totals[label]) for label, kinds in kinds_of.items()]
    x = [sum(s for _, s in kinds) * 1e3 for kinds in kinds_of.values()]
    y = [common.in_two_lines(label) for label in kinds_of]
    return common.bars(x, y, part, style.PART[part][0], hover, textposition="none")


def critical_path(parts: pd.DataFrame, shown: Sequence[Variant]) -> go.Figure:
    """Draws the parts of a token's latency: one stacked bar for each variant.

    `parts`: critical_path_s rows of one context, batch and hit rate. The end of a bar is their sum.
    """
    rows = by_part(parts)
    kinds: dict[str, dict[str, Kinds]] = {part: {} for part in style.PART}
    totals = {v.label: 0.0 for v in shown if (rows["label"] == v.label).any()}
    for label, part, kind, value in zip(
        rows["label"], rows["part"], rows["op_kind"], rows["value"], strict=True
    ):
        if value != 0 and label in totals:
            kinds[part].setdefault(label, []).append((kind, value))
            totals[label] += value
    figure = go.Figure([_part_bar(part, of, totals) for part, of in kinds.items() if of])
    order = [common.in_two_lines(label) for label in totals]
    ends = [total * 1e3 for total in totals.values()]
    figure.add_trace(common.bar_sums(ends, order, [milliseconds(total) for total in totals.values()]))
    y_axis = {"autorange": "reversed", "showgrid": False, "categoryorder": "array", "categoryarray": order}
    longest = max(totals.values(), default=0.0) * 1e3
    return _rows(figure, len(totals), longest, barmode="stack", yaxis=y_axis)


# -- one layer on every rank -----------------------------------------------------------------------


def _segment(spans: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Returns the spans that take time, in microseconds since the first priority exchange, and the length of
    the segment in microseconds."""
    exchanges = spans.loc[spans["op_kind"] == "exchange_priority", "start_s"]
    start = exchanges.min() if len(exchanges) else spans["start_s"].min()
    end = exchanges.max() if len(exchanges) and exchanges.max() > start else spans["end_s"].max()
    times_us = {"start": (spans["start_s"] - start) * 1e6, "end": (spans["end_s"] - start) * 1e6}
    seen = spans["end_s"] - spans["start_s"] > SHORTEST_SPAN_S
    return spans.assign(**times_us)[seen], float((end - start) * 1e6)


def _sender(spans: pd.DataFrame) -> float:
    """Returns the group that attends first. The other groups continue with its speculation."""
    attends = spans[spans["op_kind"].isin(ATTENTION) & (spans["state"] == "run")]
    if attends.empty:
        return math.nan
    return float(attends["group"].iloc[int(attends["start_s"].to_numpy().argmin())])


def _lanes(spans: pd.DataFrame) -> dict[Lane, str]:
    """Returns (rank, stream) of every lane with its name, top to bottom: sender, its wire, receivers."""
    one_each, sender = spans["tensor"].nunique() < 2, _sender(spans)
    keys = spans[["group", "tensor", "rank", "stream"]].drop_duplicates()
    keys = keys.assign(below=keys["stream"] != "main", receives=keys["group"] != sender)
    keys = keys.sort_values(["receives", "group", "tensor", "rank", "below", "stream"], kind="stable")
    lanes = {}
    for key in keys.to_dict("records"):
        rank = f"group {key['group']:.0f}" if one_each else f"rank {key['rank']:.0f}"
        if known(sender):
            rank += ", goes on" if key["receives"] else ", sends"
        lanes[key["rank"], key["stream"]] = in_figure(key["stream"]) if key["below"] else rank
    return lanes


def _look(part: str, state: str) -> tuple[str, dict[str, object]]:
    ink = style.FAINT_INK[0]
    if state == "skipped":
        pattern = {"shape": "/", "fgcolor": ink, "fillmode": "overlay", "size": 5, "solidity": 0.25}
        return "skipped", {"color": style.faint(ink), "line": {"width": 0}, "pattern": pattern}
    if state == "waiting":
        return "waiting", {"color": "rgba(0,0,0,0)", "line": {"color": ink, "width": 1}}
    return part, {"color": style.PART[part][0], "line": {"width": 0}}


def _span_hover(spans: pd.DataFrame) -> list[str]:
    return [
        f"<b>{in_figure(s['name'] or s['op_kind'])}</b>, rank {s['rank']:.0f} of group {s['group']:.0f}"
        f"<br>{in_figure(s['op_kind'])}, {in_figure(s['state'])}"
        f"<br>{significant(s['start'], 4)} to {significant(s['end'], 4)} µs"
        f" ({significant(s['end'] - s['start'], 3)} µs)"
        for s in spans.to_dict("records")
    ]


def _span_traces(spans: pd.DataFrame, lanes: Mapping[Lane, str], axis: str) -> list[go.Bar]:
    places = {key: place for place, key in enumerate(lanes)}
    lane = [places[key] for key in zip(spans["rank"], spans["stream"], strict=True)]
    part = spans["op_kind"].map(lambda k: style.PART_OF_KIND.get(k, "other"))
    plain = ~spans["state"].isin(["skipped", "waiting"])
    spans = spans.assign(
        lane=lane, took=spans["end"] - spans["start"], look=spans["state"].where(~plain, part)
    )
    order = [*style.PART, "skipped", "waiting"]
    traces = []
    for look in sorted(spans["look"].unique(), key=order.index):
        own = spans[spans["look"] == look]
        name, marker = _look(look if look in style.PART else "other", look)
        width = [0.42 if state == "wire" else 0.74 for state in own["state"]]
        text = [in_figure(n) if look in style.PART else "" for n in own["name"]]
        hover = _span_hover(own)
        traces.append(common.spans(own, name, axis, hover, width=width, marker=marker, text=text))
    return traces


def _outcomes(spans: pd.DataFrame) -> list[str]:
    present = [o for o in ("hit", "miss") if (spans["outcome"] == o).any()]
    return present + sorted(set(spans["outcome"]) - {"hit", "miss"})


def timeline(spans: pd.DataFrame) -> go.Figure:
    """Draws one layer, from one priority exchange to the next, with a lane for every rank and its wire,
    sender above receivers; a hit above a miss on one time axis (ALSpec Figure 6). `spans`: of one case."""
    spans = spans.assign(stream=spans["stream"].where(spans["state"] != "wire", "wire"))
    found = [(outcome, *_segment(spans[spans["outcome"] == outcome])) for outcome in _outcomes(spans)]
    blocks, seen = [], pd.concat([rows for _, rows, _ in found]) if found else pd.DataFrame()
    for outcome, rows, length in found:
        if len(rows):
            text = f"<b>{in_figure(outcome)}</b>: {significant(length, 3)} µs to the next exchange"
            blocks.append(common.Block(text, _lanes(rows), rows, _span_traces))
    first, last = (seen["start"].min(), seen["end"].max()) if len(seen) else (0.0, 1.0)
    x_axis = {
        "title": {"text": "time since the priority exchange (µs)"},
        "range": [first - 0.005 * (last - first), last + 0.01 * (last - first)],
    }
    return common.timelines(blocks, LANE_PX, HEADING_PX, x_axis)


# -- speed-up of speculation -----------------------------------------------------------------------


def same_devices_ratio(latency: pd.DataFrame) -> pd.DataFrame:
    """Returns the speed-up of each speculating variant over tensor parallelism on as many devices.

    In: token_latency_s rows. Out: label, device, devices, context_tokens, batch, hit_rate, ratio; no rows if
    tensor parallelism did not run on as many of the same device.
    """
    keys = [DEVICE, "devices", "context_tokens", "batch"]
    latency = latency[latency["value"] > 0]
    tensor = latency[latency["strategy"] == "tensor_parallel"].drop_duplicates(keys)[[*keys, "value"]]
    others = latency[latency["strategy"].str.startswith("alspec")]
    joined = others.merge(tensor, on=keys, suffixes=("", "_tensor"))
    joined = joined.assign(ratio=joined["value_tensor"] / joined["value"])
    return joined[["label", *keys, "hit_rate", "ratio"]]


def _break_even(values: Cells) -> list[go.Scatter]:
    """Returns the border between cells where speculation is faster and where it is slower. The border follows
    the edges of cells, because its course within a cell is unknown; so it crosses no number."""
    xs: list[float | None] = []
    ys: list[float | None] = []
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            right = line[column + 1] if column + 1 < len(line) else math.nan
            above = values[row + 1][column] if row + 1 < len(values) else math.nan
            if known(value) and known(right) and (value >= 1) != (right >= 1):
                xs += [column + 0.5, column + 0.5, None]
                ys += [row - 0.5, row + 0.5, None]
            if known(value) and known(above) and (value >= 1) != (above >= 1):
                xs += [column - 0.5, column + 0.5, None]
                ys += [row + 0.5, row + 0.5, None]
    line_style = {"color": style.INK[0], "width": 2.5}
    drawn = go.Scatter(x=xs, y=ys, mode="lines", line=line_style, hoverinfo="skip", name="break-even")
    return [drawn] if xs else []


def _cells(values: Cells, rates: Sequence[float], contexts: Sequence[float], against: str) -> go.Heatmap:
    hover = [
        [
            f"{tokens(c)} tokens, hits {percent(h)}<br><b>{times(v)}</b> {against}"
            for c, v in zip(contexts, row, strict=True)
        ]
        for h, row in zip(rates, values, strict=True)
    ]
    data = [[v if known(v) else None for v in row] for row in values]
    look = {"customdata": data, "textfont": {"size": 12}, "showlegend": False}
    return common.speed_up_cells(values, hover, lambda v: f"{v:.2f}", **look)


def _map_axis(names: Sequence[str], title: str, apart: float) -> Layout:
    kept = [int(v) for v in spaced(list(range(len(names))), apart)]
    return {
        "title": {"text": title},
        "tickvals": kept,
        "ticktext": [names[i] for i in kept],
        "showgrid": False,
        "range": [-0.5, len(names) - 0.5],
    }


def speed_up_map(ratio: pd.DataFrame, devices: float, limit: float) -> go.Figure:
    """Draws speed-up over tensor parallelism on as many devices, by context and hit rate; break-even is the
    neutral colour and a line. `ratio`: `same_devices_ratio` of one variant and batch; `limit`: the ratio of
    the strongest colour, the same for all maps of a page."""
    grid = ratio.pivot_table(index="hit_rate", columns="context_tokens", values="ratio", dropna=False)
    rates, contexts = (axis.to_numpy(dtype=float).tolist() for axis in (grid.index, grid.columns))
    values = [[float(v) for v in row] for row in grid.to_numpy(dtype=float)]
    numbers = len(contexts) <= CELLS_WITH_NUMBERS[0] and len(rates) <= CELLS_WITH_NUMBERS[1]
    cells = _cells(values, rates, contexts, f"over tensor parallelism on {devices:.0f} devices")
    cells.update(zmin=-math.log2(limit), zmax=math.log2(limit), showscale=not numbers)
    cells.update(texttemplate="%{text}") if numbers else cells.update(colorbar=_ratio_bar(limit))
    figure = go.Figure([cells, *_break_even(values)])
    names = [tokens(c) for c in contexts]
    narrow = _map_axis(names, "", 0.12)
    figure.update_layout(
        height=90 + max(2, min(len(rates), 12)) * 48 + (0 if numbers else 70),
        margin={"l": 8, "r": 8, "t": 8, "b": 48},
        xaxis=_map_axis(names, "context (tokens)", 0.06),
        yaxis=_map_axis([f"{h * 100:.4g}" for h in rates], "hit rate (%)", 0.08),
        meta={"narrow": {"xaxis.tickvals": narrow["tickvals"], "xaxis.ticktext": narrow["ticktext"]}},
    )
    return figure


def _ratio_bar(limit: float) -> dict[str, object]:
    marks = [1 / limit, math.sqrt(1 / limit), 1.0, math.sqrt(limit), limit]
    return {
        "orientation": "h",
        "y": -0.24,
        "yanchor": "top",
        "thickness": 10,
        "outlinewidth": 0,
        "tickvals": [math.log2(m) for m in marks],
        "ticktext": [times(m) for m in marks],
        "title": {"text": "speed-up over tensor parallelism", "side": "bottom"},
    }
