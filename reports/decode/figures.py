"""Figures of the decode study: data frames in, plotly figures out. Nothing here reads a file.

Figures carry light colours, no titles (headings are HTML) and no legend (the page's script draws it).
`layout.meta` tells that script what plotly cannot: `narrow` (layout paths to overwrite on a small
screen), `toggles` (the key switches lines off) and `zooms` (axes that may be zoomed).
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common.figures import ROW_PX, Variant, log_ticks, spaced
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
# The hue of lines that are batches.
BATCHES_AS = "alspec"
READ_ONCE = "weights and KV read once"
CELLS_WITH_NUMBERS = (10, 12)
LANE_PX, HEADING_PX, FOOT_PX = 26, 34, 52


def at_hit_rate(rows: pd.DataFrame, hit_rate: float | None) -> pd.DataFrame:
    """Rows of one hit rate, with those of strategies that do not speculate; None: all rows."""
    return rows if hit_rate is None else rows[rows["hit_rate"].isna() | (rows["hit_rate"] == hit_rate)]


def _context_axis(contexts: Sequence[float]) -> tuple[dict[str, Any], dict[str, Any]]:
    logs = [math.log2(c) for c in contexts]
    pad = max(0.03 * (logs[-1] - logs[0]), 0.1)
    ends = [(logs[0] - pad) * math.log10(2), (logs[-1] + pad) * math.log10(2)]

    def ticks(apart: float) -> list[float]:
        return [2**place for place in spaced(logs, apart)]

    wide, narrow = ticks(0.045), ticks(0.11)
    axis = {
        "type": "log",
        "range": ends,
        "tickvals": wide,
        "ticktext": [tokens(v) for v in wide],
        "title": {"text": "context (tokens)"},
    }
    on_narrow = {"xaxis.tickvals": narrow, "xaxis.ticktext": [tokens(v) for v in narrow]}
    return axis, on_narrow


def _latency_axis(values: Sequence[float]) -> dict[str, object]:
    low, high = min(values), max(values)
    if low <= 0 or high / low < LOG_SCALE_FROM:
        return {"title": {"text": "latency per token (ms)"}, "range": [0, high * 1.08]}
    ticks = log_ticks(low, high)
    return {
        "title": {"text": "latency per token (ms, log scale)"},
        "type": "log",
        "range": [math.log10(low / 1.12), math.log10(high * 1.12)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _hover(row: pd.Series, value: str, bounds: str) -> str:
    hits = f", hits {percent(row['hit_rate'])}" if known(row["hit_rate"]) else ""
    lines = [
        f"<b>{in_figure(row['label'])}</b>",
        f"{tokens(row['context_tokens'])} tokens{hits}",
        f"{value} per token",
        *([f"{row.get('ends', '90 % interval')}: {bounds} ms"] if bounds else []),
    ]
    return "<br>".join([*lines, *([in_figure(row["source"])] if row["source"] else [])])


def _latency_hover(rows: pd.DataFrame) -> list[str]:
    return [
        _hover(row, milliseconds(row["value"]), interval(row["low"], row["high"], 1e3))
        for _, row in rows.iterrows()
    ]


def _latency_line(rows: pd.DataFrame, variant: Variant) -> go.Scatter:
    guessed = rows["source"].str.contains("extrapolated")
    return go.Scatter(
        x=rows["context_tokens"].tolist(),
        y=(rows["value"] * 1e3).tolist(),
        name=in_figure(variant.label),
        legendgroup=variant.label,
        mode="lines+markers",
        line={"color": variant.colour, "width": 2},
        marker={
            "symbol": variant.symbol,
            "size": 8,
            "color": [style.HOLLOW[0] if g else variant.colour for g in guessed],
            "line": {"color": variant.colour, "width": 1.5},
        },
        hoverinfo="text",
        hovertext=_latency_hover(rows),
    )


def _latency_band(rows: pd.DataFrame, variant: Variant) -> list[go.Scatter]:
    """From the fewest hits to the most; its two edges are data, the area between them is not."""
    rates = rows["hit_rate"].dropna()
    ends = [rows[rows["hit_rate"] == rate] for rate in (rates.max(), rates.min())]
    span = f"{percent(rates.min())} to {percent(rates.max())} hits"
    traces = []
    for fill, edge in zip((None, "tonexty"), ends, strict=True):
        line = _latency_line(edge, variant)
        line.update(name=f"{in_figure(variant.label)}, {span}", showlegend=fill is not None)
        line.update(line={"width": 1.25}, marker={"size": 6})
        if fill:
            line.update(fill=fill, fillcolor=style.faint(variant.colour))
        traces.append(line)
    return traces


def _read_once(rows: pd.DataFrame) -> go.Scatter:
    """The least latency: weights and KV cache read once."""
    rows = rows.sort_values("context_tokens", kind="stable")
    return go.Scatter(
        x=rows["context_tokens"].tolist(), y=(rows["value"] * 1e3).tolist(), mode="lines", name=READ_ONCE,
        legendgroup=READ_ONCE, hoverinfo="text",
        line={"color": style.RED[2][0], "width": 1.5, "dash": "dash"},
        hovertext=[f"<b>{READ_ONCE}</b><br>{tokens(c)} tokens: {milliseconds(v)}"
                   for c, v in zip(rows["context_tokens"], rows["value"], strict=True)],
    )  # fmt: skip


def latency_over_context(
    latency: pd.DataFrame, shown: Sequence[Variant], read_once: pd.DataFrame, hit_rate: float | None = None
) -> go.Figure:
    """Latency per token against context, a line for each variant; hit_rate None: a band from the
    fewest hits to the most. `latency`: token_latency_s rows of one batch; `ends`, where it has that column:
    what the low and the high end are. `read_once`: read_once_s rows, drawn as they are."""
    figure = go.Figure()
    rows = at_hit_rate(latency, hit_rate).sort_values(["context_tokens", "hit_rate"], kind="stable")
    for variant in shown:
        own = rows[rows["label"] == variant.label]
        if own.empty:
            continue
        if own["hit_rate"].nunique() > 1:
            figure.add_traces(_latency_band(own, variant))
        else:
            figure.add_trace(_latency_line(own, variant))
    figure.add_traces([_read_once(own) for _, own in read_once.groupby("label", sort=False)])
    x_axis, narrow = _context_axis(sorted(latency["context_tokens"].unique()))
    y_axis = _latency_axis([*(latency["value"] * 1e3), *(read_once["value"] * 1e3)])
    meta = {"toggles": True, "narrow": {**narrow, "height": 340}}
    figure.update_layout(xaxis=x_axis, yaxis=y_axis, height=440, meta=meta)
    return figure


def latency_by_batch(latency: pd.DataFrame) -> go.Figure:
    """Latency per token of one variant against context, a line for each batch. `latency`: token_latency_s
    rows."""
    figure = go.Figure()
    rows = latency.sort_values("context_tokens", kind="stable")
    batches = sorted(rows["batch"].unique())
    symbols = itertools.cycle(("circle", "diamond", "square"))
    for batch, colour, symbol in zip(batches, style.ramp(BATCHES_AS, len(batches)), symbols, strict=False):
        own = rows[rows["batch"] == batch]
        figure.add_trace(_latency_line(own, Variant(f"batch {batch:,.0f}", "", 1, colour, symbol)))
    x_axis, narrow = _context_axis(sorted(latency["context_tokens"].unique()))
    y_axis = _latency_axis((latency["value"] * 1e3).tolist())
    meta = {"toggles": True, "narrow": {**narrow, "height": 340}}
    return figure.update_layout(xaxis=x_axis, yaxis=y_axis, height=440, meta=meta)


def _row_name(label: str, more: str = "") -> str:
    return in_figure(label).replace(", ", ",<br>", 1) + (f",<br>{more}" if more else "")


def _rows_layout(
    figure: go.Figure,
    count: int,
    longest: float,
    row_px: int = ROW_PX,
    y: Mapping[str, object] | None = None,
    **more: object,
) -> None:
    figure.update_layout(
        height=64 + row_px * max(count, 1),
        bargap=0.34,
        margin={"l": 8, "r": 12, "t": 4, "b": 48},
        xaxis={"title": {"text": "latency per token (ms)"}, "range": [0, longest * 1.15 or 1], "nticks": 6},
        yaxis={"autorange": "reversed", "showgrid": False, **(y or {})},
        meta={"narrow": {"xaxis.range": [0, longest * 1.32 or 1], "xaxis.nticks": 4}},
        **more,
    )


def latency_bars(latency: pd.DataFrame, shown: Sequence[Variant]) -> go.Figure:
    """Latency per token where there is only one context: a bar for each variant and hit rate."""
    figure = go.Figure()
    names = 0
    for variant in shown:
        own = latency[latency["label"] == variant.label].sort_values("hit_rate", kind="stable")
        rates = [f"{percent(h)} hits" if known(h) else "" for h in own["hit_rate"]]
        guessed = own["source"].str.contains("extrapolated")
        names += len(own)
        figure.add_bar(
            orientation="h",
            x=(own["value"] * 1e3).tolist(),
            y=[_row_name(variant.label, rate) for rate in rates],
            name=in_figure(variant.label),
            showlegend=False,
            marker={
                "color": [style.HOLLOW[0] if g else variant.colour for g in guessed],
                "line": {"color": variant.colour, "width": 1.5},
            },
            text=[milliseconds(v) for v in own["value"]],
            textposition="outside",
            cliponaxis=False,
            hoverinfo="text",
            hovertext=_latency_hover(own),
        )
    three_lines = bool(latency["hit_rate"].notna().any())
    longest = float(latency["value"].max() * 1e3) if len(latency) else 0.0
    _rows_layout(figure, names, longest, ROW_PX + 12 * three_lines)
    return figure


def by_part(critical_path: pd.DataFrame) -> pd.DataFrame:
    """Critical-path rows with the part of the token that each op kind belongs to; parts that are
    below 1 % of every variant's latency stand together."""
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
    return go.Bar(
        orientation="h",
        x=[sum(s for _, s in kinds) * 1e3 for kinds in kinds_of.values()],
        y=[_row_name(label) for label in kinds_of],
        name=part,
        marker={"color": style.PART[part][0], "line": {"width": 0}},
        hoverinfo="text",
        hovertext=[_part_hover(label, part, kinds, totals[label]) for label, kinds in kinds_of.items()],
        textposition="none",
    )


def critical_path(parts: pd.DataFrame, shown: Sequence[Variant]) -> go.Figure:
    """What a token's latency consists of: one stacked bar for each variant.

    `parts`: critical_path_s rows of one context, batch and hit rate. The bar's end is their sum.
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
    order = [_row_name(label) for label in totals]
    figure.add_scatter(
        x=[total * 1e3 for total in totals.values()],
        y=order,
        mode="text",
        text=[f" {milliseconds(total)}" for total in totals.values()],
        textposition="middle right",
        cliponaxis=False,
        hoverinfo="skip",
        showlegend=False,
    )
    categories = {"categoryorder": "array", "categoryarray": order}
    _rows_layout(figure, len(totals), max(totals.values(), default=0.0) * 1e3, barmode="stack", y=categories)
    return figure


# -- one layer on every rank -----------------------------------------------------------------------


def _segment(spans: pd.DataFrame) -> tuple[pd.DataFrame, float]:
    """Spans that take time, in microseconds since the first priority exchange, and how long the
    segment is."""
    exchanges = spans.loc[spans["op_kind"] == "exchange_priority", "start_s"]
    start = exchanges.min() if len(exchanges) else spans["start_s"].min()
    end = exchanges.max() if len(exchanges) and exchanges.max() > start else spans["end_s"].max()
    times_us = {"start": (spans["start_s"] - start) * 1e6, "end": (spans["end_s"] - start) * 1e6}
    seen = spans["end_s"] - spans["start_s"] > SHORTEST_SPAN_S
    return spans.assign(**times_us)[seen], float((end - start) * 1e6)


def _sender(spans: pd.DataFrame) -> float:
    """The group that attends first: it sends its speculation, and the others go on with it."""
    attends = spans[spans["op_kind"].isin(ATTENTION) & (spans["state"] == "run")]
    if attends.empty:
        return math.nan
    return float(attends["group"].iloc[int(attends["start_s"].to_numpy().argmin())])


def _lanes(spans: pd.DataFrame) -> list[tuple[tuple[float, str], str]]:
    """(rank, stream) of every lane with its name, top to bottom: who sends, its wire, who goes on."""
    one_each, sender = spans["tensor"].nunique() < 2, _sender(spans)
    keys = spans[["group", "tensor", "rank", "lane"]].drop_duplicates()
    keys = keys.assign(below=keys["lane"] != "main", receives=keys["group"] != sender)
    keys = keys.sort_values(["receives", "group", "tensor", "rank", "below", "lane"], kind="stable")
    lanes = []
    for _, key in keys.iterrows():
        rank = f"group {key['group']:.0f}" if one_each else f"rank {key['rank']:.0f}"
        if known(sender):
            rank += ", goes on" if key["receives"] else ", sends"
        lanes.append(((key["rank"], key["lane"]), in_figure(key["lane"]) if key["below"] else rank))
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
        for _, s in spans.iterrows()
    ]


def _span_traces(spans: pd.DataFrame, lanes: Mapping[tuple[float, str], int], axis: str) -> list[go.Bar]:
    spans = spans.assign(part=spans["op_kind"].map(lambda k: style.PART_OF_KIND.get(k, "other")))
    plain = ~spans["state"].isin(["skipped", "waiting"])
    spans = spans.assign(look=spans["state"].where(~plain, spans["part"]))
    order = [*style.PART, "skipped", "waiting"]
    traces = []
    for look in sorted(spans["look"].unique(), key=order.index):
        own = spans[spans["look"] == look]
        name, marker = _look(look if look in style.PART else "other", look)
        traces.append(
            go.Bar(
                orientation="h",
                base=own["start"].tolist(),
                x=(own["end"] - own["start"]).tolist(),
                y=[lanes[key] for key in zip(own["rank"], own["lane"], strict=True)],
                width=[0.42 if state == "wire" else 0.74 for state in own["state"]],
                name=name,
                legendgroup=name,
                marker=marker,
                text=[in_figure(n) if look in style.PART else "" for n in own["name"]],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                hoverinfo="text",
                hovertext=_span_hover(own),
                yaxis=axis,
            )
        )
    return traces


def _outcomes(spans: pd.DataFrame) -> list[str]:
    present = [o for o in ("hit", "miss") if (spans["outcome"] == o).any()]
    return present + sorted(set(spans["outcome"]) - {"hit", "miss"})


def _lane_axis(names: Sequence[str], bottom: float, top: float) -> dict[str, Any]:
    return {
        "domain": [max(0.0, bottom), min(1.0, top)],
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - 0.5, -0.5],
        "showgrid": False,
        "anchor": "x",
    }


def timeline(spans: pd.DataFrame) -> go.Figure:
    """One layer, from one priority exchange to the next, a lane for every rank and its wire, who sends
    above who goes on; a hit above a miss on one time axis (ALSpec Figure 6). `spans`: of one case."""
    spans = spans.assign(lane=spans["stream"].where(spans["state"] != "wire", "wire"))
    blocks = [(o, *_segment(spans[spans["outcome"] == o])) for o in _outcomes(spans)]
    blocks = [block for block in blocks if len(block[1])]
    lanes = [_lanes(rows) for _, rows, _ in blocks]
    inner = sum(LANE_PX * len(own) + HEADING_PX for own in lanes)
    figure, top = go.Figure(), 1.0
    for number, ((outcome, rows, length), own) in enumerate(zip(blocks, lanes, strict=True), start=1):
        suffix = "" if number == 1 else str(number)
        figure.add_traces(_span_traces(rows, {key: i for i, (key, _) in enumerate(own)}, f"y{suffix}"))
        head, top = top - HEADING_PX / inner, top - (HEADING_PX + LANE_PX * len(own)) / inner
        figure.update_layout({f"yaxis{suffix}": _lane_axis([name for _, name in own], top, head)})
        text = f"<b>{in_figure(outcome)}</b>: {significant(length, 3)} µs to the next exchange"
        at = {"xref": "paper", "yref": "paper", "x": 0, "y": head, "xanchor": "left", "yanchor": "bottom"}
        figure.add_annotation(text=text, showarrow=False, **at)
    _once_in_key(figure)
    first = min((float(rows["start"].min()) for _, rows, _ in blocks), default=0.0)
    last = max((float(rows["end"].max()) for _, rows, _ in blocks), default=1.0)
    figure.update_layout(
        barmode="overlay",
        height=inner + FOOT_PX,
        margin={"l": 8, "r": 12, "t": 0, "b": FOOT_PX},
        uniformtext={"mode": "hide", "minsize": 10},
        xaxis={
            "title": {"text": "time since the priority exchange (µs)"},
            "range": [first - 0.005 * (last - first), last + 0.01 * (last - first)],
            "anchor": f"y{len(blocks)}" if len(blocks) > 1 else "y",
        },
        meta={"zooms": ["xaxis"], "narrow": {"xaxis.nticks": 5}},
    )
    return figure


def _once_in_key(figure: go.Figure) -> None:
    seen: set[str] = set()
    for trace in figure.data:
        trace.showlegend = trace.legendgroup not in seen
        seen.add(trace.legendgroup)


# -- where speculation pays ------------------------------------------------------------------------


def same_devices_ratio(latency: pd.DataFrame) -> pd.DataFrame:
    """Speed-up of each speculating variant over tensor parallelism on as many devices.

    In: token_latency_s rows. Out: label, device, devices, context_tokens, batch, hit_rate, ratio; no rows
    where tensor parallelism did not run on as many of the same device.
    """
    keys = [DEVICE, "devices", "context_tokens", "batch"]
    latency = latency[latency["value"] > 0]
    tensor = latency[latency["strategy"] == "tensor_parallel"].drop_duplicates(keys)[[*keys, "value"]]
    others = latency[latency["strategy"].str.startswith("alspec")]
    joined = others.merge(tensor, on=keys, suffixes=("", "_tensor"))
    joined = joined.assign(ratio=joined["value_tensor"] / joined["value"])
    return joined[["label", *keys, "hit_rate", "ratio"]]


def _break_even(values: "Cells") -> list[go.Scatter]:
    """The border between cells where either is faster. It follows the cells' edges, since where it
    runs within a cell is not known, and so it crosses no number."""
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


Cells = Sequence[Sequence[float]]


def _cells(values: Cells, rates: Sequence[float], contexts: Sequence[float], against: str) -> go.Heatmap:
    hover = [
        [
            f"{tokens(c)} tokens, hits {percent(h)}<br><b>{times(v)}</b> {against}"
            for c, v in zip(contexts, row, strict=True)
        ]
        for h, row in zip(rates, values, strict=True)
    ]
    return go.Heatmap(
        x=list(range(len(contexts))),
        y=list(range(len(rates))),
        z=[[math.log2(v) if known(v) else None for v in row] for row in values],
        customdata=[[v if known(v) else None for v in row] for row in values],
        text=[[f"{v:.2f}" if known(v) else "" for v in row] for row in values],
        textfont={"size": 12},
        hovertext=hover,
        hoverinfo="text",
        colorscale=[[i / 4, light] for i, (light, _) in enumerate(style.DIVERGING)],
        xgap=2,
        ygap=2,
        showlegend=False,
    )


def _map_axis(names: Sequence[str], title: str, apart: float) -> dict[str, Any]:
    kept = [int(v) for v in spaced(list(range(len(names))), apart)]
    return {
        "title": {"text": title},
        "tickvals": kept,
        "ticktext": [names[i] for i in kept],
        "showgrid": False,
        "range": [-0.5, len(names) - 0.5],
    }


def speed_up_map(ratio: pd.DataFrame, devices: float, limit: float) -> go.Figure:
    """Speed-up over tensor parallelism on as many devices, by context and hit rate; break-even is
    the neutral colour and a line. `ratio`: `same_devices_ratio` of one variant and batch; `limit`:
    the ratio of the strongest colour, the same for all maps of a page."""
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
