"""What a plan's answer hinges on, as a tornado: a row for each factor, the widest swing on top."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common import sections as parts
from simcore.reports.common.figures import by_text
from simcore.reports.page import Section
from simcore.reports.planning.figures import SAYS
from simcore.reports.planning.points import Planned
from simcore.reports.serving.sections import scale_of
from simcore.reports.text import in_figure, known, recorded

Swing = dict[str, Any]
NUMBERS = ("winner", "base")
MAYBE = ("times", "value", "more", "low", "high", "breaks_at")
TEXT = ("factor", "change", "metric", "verdict", "why")


def sensitivity(plan: Planned) -> list[Section]:
    """Returns the section of the swings, a figure for each best point that has some."""
    swings = [_checked(given) for given in plan.summary.get("sensitivity") or ()]
    winners = list(dict.fromkeys(swing["winner"] for swing in swings))
    plots = []
    for winner in winners:
        own = [swing for swing in swings if swing["winner"] == winner]
        title = f"best point {round(winner) + 1}" if len(winners) > 1 else ""
        plots.append(parts.drawn(f"tornado-{round(winner)}", "swings by factor", tornado(own), title))
    if not plots:
        return []
    metric, base = swings[0]["metric"], swings[0]["base"]
    scale = scale_of(metric, base)
    lead = (
        f"{scale.name} of the answer, {scale.text(base)}, with one thing changed at a time: by how much it is"
        " more or less."
    )
    return [parts.section("plan", "sensitivity", {"lead": lead}, plots=plots)]


def _checked(given: Any) -> Swing:
    """Returns a swing of the summary. Raises ValueError if it is none."""
    if not isinstance(given, dict) or not set(given) >= {*NUMBERS, *MAYBE, *TEXT}:
        raise ValueError(f"summary.json: sensitivity: {str(given)[:60]!r} is no swing")
    numbers = all(known(given[name]) for name in NUMBERS)
    maybe = all(given[name] is None or known(given[name]) for name in MAYBE)
    if not numbers or not maybe or given["verdict"] not in SAYS:
        raise ValueError(f"summary.json: sensitivity: {str(given)[:60]!r} is no swing")
    return given


def tornado(swings: Sequence[Swing]) -> go.Figure:
    """Draws a bar for each change from the answer to where the metric goes, in the colour of the verdict."""
    names = list(dict.fromkeys(swing["factor"] for swing in swings))
    figure = go.Figure()
    for verdict, words in SAYS.items():
        own = [swing for swing in swings if swing["verdict"] == verdict and known(swing["more"])]
        if not own:
            continue
        more, low, high = (
            pd.Series([swing[name] for swing in own], dtype=float) * 100.0 for name in ("more", "low", "high")
        )
        figure.add_bar(
            x=more.tolist(),
            y=[names.index(swing["factor"]) for swing in own],
            orientation="h",
            width=0.62,
            name=words,
            marker={"color": style.VERDICT[verdict][0], "line": {"width": 0}},
            error_x=common.whisker(more, low, high, color=style.INK[0], thickness=1.2, width=4),
            customdata=[_hover(swing) for swing in own],
            hovertemplate="%{customdata}<extra></extra>",
        )
    ends = [100.0 * swing[end] for swing in swings for end in ("low", "high") if known(swing[end])]
    reach = max((abs(end) for end in ends), default=1.0) * 1.1 or 1.0
    axis = {
        "title": {"text": "change, %"},
        "range": [max(-reach, min([0.0, *ends]) * 1.15), min(reach, max([0.0, *ends]) * 1.15) or 1.0],
        "zeroline": True,
    }
    rows = common.rows_axis([_row(name, swings) for name in names])
    figure.update_layout(barmode="overlay")
    return common.in_rows(figure, len(names), xaxis=axis, yaxis=rows, meta={"toggles": True})


def _row(name: str, swings: Sequence[Swing]) -> str:
    """Returns the name of a row: the factor, and its changes."""
    changes = [in_figure(swing["change"]) for swing in swings if swing["factor"] == name]
    return f"{in_figure(name)}<br>{', '.join(changes)}"


def _hover(swing: Swing) -> str:
    scale = scale_of(swing["metric"], swing["base"])
    ends = f" ({recorded(100.0 * swing['low'])} to {recorded(100.0 * swing['high'])} %)"
    broken = swing["breaks_at"]
    return by_text(
        f"<b>{in_figure(swing['factor'])}</b> {in_figure(swing['change'])}",
        f"{scale.name} {scale.text(swing['value'])}, {recorded(100.0 * swing['more'])} %{ends}",
        f"<b>{SAYS[swing['verdict']]}</b>",
        f"not sure to hold from x {recorded(float(f'{broken:.3g}'))} on" if known(broken) else "",
        in_figure(swing["why"]),
    )
