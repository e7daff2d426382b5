"""Where the lead passes from one case to another: the metric of every case along a field, and a table."""

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common import sections as parts
from simcore.reports.common.figures import Scale, by_text
from simcore.reports.page import Section, Tile
from simcore.reports.planning.axes import Axis, field_name
from simcore.reports.planning.figures import DASHES, LINE_SYMBOLS, LOG_METRIC_FROM, across_axis
from simcore.reports.planning.points import VARIED, Planned
from simcore.reports.serving.sections import scale_of
from simcore.reports.text import in_figure, known, recorded

QUESTION, MOST_TILES = "break_even", 4
OVER_LEADER, AS_IT_IS = "over the leader's", "as it is"
ONE_REPLICA = "One replica has no interval; more replicas of the scenario would give one."
Lead = dict[str, Any]


def leads(plan: Planned) -> list[Section]:
    """Returns the section of a plan that asks for break-even values."""
    over, metric = plan.summary.get("over"), plan.summary.get("metric")
    column = f"{VARIED}{over}"
    if not over or column not in plan.points or metric not in plan.points or plan.points.empty:
        return []
    found = [_checked(given) for given in plan.summary.get("break_even") or ()]
    points = plan.points.assign(group=_groups(plan.points, column))
    groups = [(name or "all", name) for name in dict.fromkeys(points["group"])]
    field = str(plan.summary.get("field") or field_name(column))
    axis = Axis(column, field, recorded)

    def draw(group: str, shown: str) -> go.Figure:
        own = [lead for lead in found if _group_of(lead) == group]
        here = points[points["group"] == group]
        return drawn(here, axis, str(metric), own, over_leader=shown == OVER_LEADER)

    # Over orders of magnitude, lines that differ by percents lie on each other.
    wide = points[metric].min() > 0.0 and points[metric].max() >= LOG_METRIC_FROM * points[metric].min()
    shown = [(text, text) for text in ((OVER_LEADER, AS_IT_IS) if wide else (AS_IT_IS,))]
    choices = [("With", groups, 0), ("Shown", shown, 0)]
    plot = parts.plot("break-even", f"{_compared(plan)} along {over}", choices, draw)
    rows = [*found, *_everywhere(plan)]
    table = parts.tabled(
        rows,
        ("with", "l", _group_of),
        ("before", "l", lambda lead: lead["before"]),
        ("then", "l", lambda lead: lead["after"]),
        ("from", "r", lambda lead: recorded(lead["at"])),
        ("neither for sure", "l", _unsure),
    )
    table = parts.without_empty_columns(table)
    overlap = "; between the two values in the last column they overlap" if any(map(_overlaps, rows)) else ""
    notes = [ONE_REPLICA] if any(row.get("chance") for row in rows) else []
    words = {"field": field, "overlap": overlap}
    table_of = table if rows else None
    return [parts.section("plan", "break-even", words, plots=[plot], table=table_of, notes=notes)]


def _compared(plan: Planned) -> str:
    """Returns the metric that leads, of several scenarios that of each."""
    each = plan.summary.get("metrics") or {}
    return ", ".join(f"{name} of {base}" for base, name in each.items()) or str(plan.summary.get("metric"))


def tiles(plan: Planned) -> list[Tile]:
    """Returns where the lead passes first with each setting."""
    found = [_checked(given) for given in plan.summary.get("break_even") or ()]
    field = str(plan.summary.get("field") or "value")
    return [
        Tile(_in_full(lead["at"]), f"{field} from which {lead['after']} leads", _group_of(lead))
        for lead in found[:MOST_TILES]
    ]


def _checked(given: Any) -> Lead:
    """Returns a lead of the summary. Raises ValueError if it is none."""
    reason = f"summary.json: break_even: {str(given)[:60]!r} is no change of the lead"
    if not isinstance(given, dict) or not {"settings", "place", "before", "after", "at", "between"} <= set(
        given
    ):
        raise ValueError(reason)
    if not isinstance(given["settings"], dict) or not known(given["at"]) or not _is_stretch(given["between"]):
        raise ValueError(reason)
    return given


def _in_full(value: float) -> str:
    return recorded(value if isinstance(value, int) else float(f"{value:.3g}"))


def _everywhere(plan: Planned) -> list[Lead]:
    """Returns who leads at every value, as leads that pass nowhere. Raises ValueError if it is invalid."""
    found = []
    for given in plan.summary.get("everywhere") or ():
        of_words = isinstance(given, dict) and all(
            isinstance(given.get(key), str) for key in ("place", "label")
        )
        unsure = given.get("unsure") if of_words else None
        if not isinstance(unsure, list) or not all(_is_stretch(one) for one in unsure):
            raise ValueError(f"summary.json: everywhere: {str(given)[:60]!r} is no case that leads")
        if not isinstance(given.get("settings"), dict):
            raise ValueError(f"summary.json: everywhere: {str(given)[:60]!r} has no settings")
        found.append(
            {**given, "before": given.get("in_words", given["label"]), "after": "the same", "at": None}
        )
    return found


def _is_stretch(given: Any) -> bool:
    return isinstance(given, list) and len(given) == 2 and all(end is None or known(end) for end in given)


def _named(path: str, value: Any) -> str:
    return f"{field_name(VARIED + path)} {recorded(value)}"


def _group_of(lead: Lead) -> str:
    settings = [_named(path, value) for path, value in lead["settings"].items()]
    return ", ".join(part for part in (*settings, lead["place"]) if part)


def _groups(points: pd.DataFrame, column: str) -> list[str]:
    """Returns what the cases of each row share: the varied fields, and their place in the run."""
    varied = [name for name in points.columns if name.startswith(VARIED) and name != column]
    rows = points.to_dict("records")
    return [
        ", ".join(
            [_named(name.removeprefix(VARIED), _plain(row[name])) for name in varied]
            + ([row["place"]] if row.get("place") else [])
        )
        for row in rows
    ]


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole(value: float) -> str:
    return recorded(_plain(value))


def _overlaps(lead: Lead) -> list[Any]:
    """Returns between which values intervals overlap; those of single replicas have no interval to do so."""
    stretches = lead["unsure"] if "unsure" in lead else [lead["between"]]
    return [one for one in stretches if not lead.get("chance") or one[0] != one[1] or one[0] is None]


def _unsure(lead: Lead) -> str:
    words = " and ".join(
        f"{'first' if low is None else recorded(low)} to {'last' if high is None else recorded(high)}"
        for low, high in _overlaps(lead)
    )
    return words or ("no interval" if lead.get("chance") else "")


def drawn(
    points: pd.DataFrame, axis: Axis, metric: str, found: list[Lead], *, over_leader: bool = False
) -> go.Figure:
    """Draws the metric of each case with its interval, and a line where the lead passes. `over_leader`: the
    metric over that of the case that leads at the same value."""
    scale = scale_of(metric, float(points[metric].max()))
    if over_leader:
        scale = Scale(f"{scale.name} / the leader's")
        leading = points[points["best"] == 1.0].drop_duplicates(axis.column).set_index(axis.column)[metric]
        by = points[axis.column].map(leading)
        figures = (metric, f"{metric}.low", f"{metric}.high")
        points = points.assign(**{name: points[name] / by for name in figures})
    figure = go.Figure()
    labels = list(dict.fromkeys(points["label"]))
    for i, label in enumerate(labels):
        own = points[points["label"] == label].sort_values(axis.column, kind="stable")
        value = own[metric] * scale.factor
        low, high = own[f"{metric}.low"] * scale.factor, own[f"{metric}.high"] * scale.factor
        colour = style.LINE_HUES[i % len(style.LINE_HUES)][1][0]
        hover = [
            by_text(
                f"<b>{in_figure(label)}</b>", f"{axis.title} {_whole(x)}", f"{scale.name} {scale.text(y)}"
            )
            for x, y in zip(own[axis.column], own[metric], strict=True)
        ]
        bar = common.whisker(value, low, high, color=colour, thickness=1.2, width=4)
        symbol = LINE_SYMBOLS[i % len(LINE_SYMBOLS)]
        dash = DASHES[(i // len(style.LINE_HUES)) % len(DASHES)]
        x, name = own[axis.column], in_figure(label)
        figure.add_trace(common.dotted(x, value, name, colour, hover, error_y=bar, symbol=symbol, dash=dash))
    x_axis, narrow = across_axis(axis, points[axis.column].tolist(), 0.1)
    ends = [*(points[f"{metric}.high"] * scale.factor), *(points[metric] * scale.factor)]
    for lead in found:
        common.rule(figure, style.FAINT_INK, x=lead["at"], dash="dot", width=1.5)
    y_axis = common.values_axis(scale.title, ends, LOG_METRIC_FROM)
    return common.laid_out(figure, narrow, xaxis=x_axis, yaxis=y_axis)
