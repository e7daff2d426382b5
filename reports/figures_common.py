"""Figures that every study shows: errors against published figures, and sources of prices."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from reports import style
from reports.text import in_figure, known, percent, signed_percent, significant, strategy_name, tokens

ROW_PX = 44


def _error_hover(row: pd.Series) -> str:
    where = [f"{tokens(row['context_tokens'])} tokens"] if known(row["context_tokens"]) else []
    where += [f"hits {percent(row['hit_rate'])}"] if known(row["hit_rate"]) else []
    devices = row["ranks"] * (row["groups"] if known(row["groups"]) else 1)
    where += [f"{devices:.0f} devices"] if known(devices) else []
    said_by = in_figure(f"{row['role']}; {row['source']}")
    return "<br>".join(
        [
            f"<b>{in_figure(strategy_name(row['strategy']))}</b>, {in_figure(row['metric'])}",
            in_figure(", ".join(where)),
            f"published {significant(row['reference'], 4)}, predicted {significant(row['predicted'], 4)}",
            f"<b>{signed_percent(row['error_pct'])}</b>, {said_by}",
        ]
    )


def errors(comparison: pd.DataFrame, roles: Mapping[str, str]) -> go.Figure:
    """Error of every compared figure, a row for each role in the order of `roles` (role -> its name).

    Rows of the role "fitted" are hollow: the model has seen those figures.
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
            hovertext=[_error_hover(row) for _, row in group.iterrows()],
        )
    reach = max(1.0, float(rows["error_pct"].abs().max())) * 1.1 if len(rows) else 1.0
    figure.add_shape(
        type="line", x0=0, x1=0, y0=0, y1=1, yref="paper", line={"color": style.FAINT_INK[0], "width": 1}
    )
    order = [in_figure(roles[role]).replace(", ", ",<br>", 1) for role in present]
    figure.update_layout(
        height=64 + ROW_PX * max(1, len(present)),
        margin={"l": 8, "r": 12, "t": 4, "b": 48},
        xaxis={"title": {"text": "error of the prediction (%)"}, "range": [-reach, reach]},
        yaxis={"categoryorder": "array", "categoryarray": order, "range": [len(present) - 0.5, -0.5]},
        meta={"narrow": {"xaxis.nticks": 5}},
    )
    return figure


def price_shares(shares: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Share of predicted device time by where the price is from: row name -> source -> fraction."""
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
        xaxis={"title": {"text": "share of predicted device time (%)"}, "range": [0, 100]},
        yaxis={"autorange": "reversed", "showgrid": False},
    )
    return figure
