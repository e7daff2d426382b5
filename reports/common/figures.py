"""Figures that every study shows: errors against published figures, and sources of prices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

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

ROW_PX = 44


@dataclass(frozen=True)
class Variant:
    """A strategy variant as every figure shows it."""

    label: str
    strategy: str
    devices: float
    colour: str
    symbol: str


def variants(results: pd.DataFrame, by: Sequence[str] = ("devices", "groups", "label")) -> list[Variant]:
    """The strategy variants of a study in the order of `style.STRATEGY`, those of one strategy in the order
    of the columns `by`, which is few devices before many, or else in that of the file."""
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


def spaced(places: Sequence[float], apart: float) -> list[float]:
    """The places of an axis that may carry a label: at least this share of the axis apart, the last
    one always among them."""
    if len(places) < 2 or places[-1] == places[0]:
        return list(places)
    length, kept = places[-1] - places[0], [places[-1]]
    for place in reversed(places[:-1]):
        if (kept[-1] - place) / length >= apart:
            kept.append(place)
    return kept[::-1]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten that lie between two values, or just beyond."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [m * 10.0**d for d in decades for m in (1, 2, 5) if low * 0.8 <= m * 10.0**d <= high * 1.25]


def compared_place(row: pd.Series) -> list[str]:
    """Who and where a compared figure is of: strategy, devices, and whichever other axes the study has."""
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


def _error_hover(row: pd.Series, found: str) -> str:
    said_by = in_figure(f"{row['role']}; {row['source']}")
    who, *where = compared_place(row)
    return "<br>".join(
        [
            f"<b>{in_figure(who)}</b>, {in_figure(row['metric'])}",
            in_figure(", ".join(where)),
            f"published {significant(row['reference'], 4)}, {found} {significant(row['predicted'], 4)}",
            f"<b>{signed_percent(row['error_pct'])}</b>, {said_by}",
        ]
    )


def errors(comparison: pd.DataFrame, roles: Mapping[str, str], found: str = "predicted") -> go.Figure:
    """Error of every compared figure, a row for each role in the order of `roles` (role -> its name).

    `found`: what is compared is "predicted" or "measured". Rows of the role "fitted" are hollow: the
    model has seen those figures.
    """
    figure = go.Figure()
    rows = comparison[comparison["error_pct"].notna()]
    present = [role for role in roles if (rows["role"] == role).any()]
    for strategy, group in rows.groupby("strategy", sort=True):
        colour = style.ramp(str(strategy), 1)[0]
        seen = group["role"] == "fitted"
        figure.add_scatter(
            x=group["error_pct"].tolist(),
            y=[in_figure(roles[role]).replace(", ", ",<br>", 1) for role in group["role"]],
            mode="markers",
            name=in_figure(strategy_name(str(strategy))),
            marker={
                "symbol": style.SYMBOL.get(str(strategy), "circle"),
                "size": 10,
                "opacity": 0.75,
                "color": [style.HOLLOW[0] if s else colour for s in seen],
                "line": {"color": colour, "width": 1.5},
            },
            line={"color": colour},
            hoverinfo="text",
            hovertext=[_error_hover(row, found) for _, row in group.iterrows()],
        )
    reach = max(1.0, float(rows["error_pct"].abs().max())) * 1.1 if len(rows) else 1.0
    figure.add_shape(
        type="line", x0=0, x1=0, y0=0, y1=1, yref="paper", line={"color": style.FAINT_INK[0], "width": 1}
    )
    order = [in_figure(roles[role]).replace(", ", ",<br>", 1) for role in present]
    figure.update_layout(
        height=64 + ROW_PX * max(1, len(present)),
        margin={"l": 8, "r": 12, "t": 4, "b": 48},
        xaxis={"title": {"text": OFF[found]}, "range": [-reach, reach]},
        yaxis={"categoryorder": "array", "categoryarray": order, "range": [len(present) - 0.5, -0.5]},
        meta={"narrow": {"xaxis.nticks": 5}},
    )
    return figure


def price_shares(
    shares: Mapping[str, Mapping[str, float]], title: str = "share of the predicted device time"
) -> go.Figure:
    """Share of the time, or what else the title says, by where it is from: row name -> source -> fraction."""
    figure = go.Figure()
    names = [in_figure(name).replace(", ", ",<br>", 1) for name in shares]
    sources = [s for s in style.PRICE_SOURCE if any(row.get(s, 0) > 0 for row in shares.values())]
    sources += sorted({s for row in shares.values() for s in row} - set(style.PRICE_SOURCE))
    for source in sources:
        values = [row.get(source, 0.0) * 100 for row in shares.values()]
        figure.add_bar(
            orientation="h",
            x=values,
            y=names,
            name=in_figure(source),
            marker={"color": style.PRICE_SOURCE.get(source, style.PART["other"])[0], "line": {"width": 0}},
            hoverinfo="text",
            hovertext=[
                f"<b>{in_figure(name)}</b><br>{in_figure(source)}: {percent(v / 100)}"
                for name, v in zip(shares, values, strict=True)
            ],
        )
    figure.update_layout(
        barmode="stack",
        bargap=0.36,
        height=60 + 40 * max(1, len(names)),
        margin={"l": 8, "r": 16, "t": 4, "b": 48},
        xaxis={"title": {"text": f"{title} (%)"}, "range": [0, 100]},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    return figure
