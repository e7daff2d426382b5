"""Figures of a comparison: pairs in, plotly figures out. This module reads no file.

Figures follow the rules at the head of `decode/figures.py`: light colours, no titles, the page draws the key.
"""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import figures as common
from simcore.reports.common.figures import Scale, by_text
from simcore.reports.comparing.matching import BETTER, DIFFERS, UNSURE, WORSE, Pair, ratio_interval
from simcore.reports.comparing.sides import Figure
from simcore.reports.comparing.words import interval_text, ratio_text, value_text, verdict_text
from simcore.reports.text import in_figure

COLOURS: Mapping[str, str] = {
    BETTER: style.GREEN[2][0],
    WORSE: style.RED[2][0],
    DIFFERS: style.BLUE[2][0],
    UNSURE: style.GREY[1][0],
}
SAYS: Mapping[str, str] = {BETTER: "B is better", WORSE: "B is worse", DIFFERS: "differs, neither better"}
SYMBOLS: Mapping[str, str] = {BETTER: "circle", WORSE: "square", DIFFERS: "diamond", UNSURE: "circle-open"}
SIDES = (("A", style.GREY[2][0], "circle-open"), ("B", style.BLUE[3][0], "diamond"))
# Ratios beyond this are drawn at the edge of the axis.
FARTHEST = 100.0
# An interval reaches beyond the outermost mark by this factor at most.
LOG_FROM, ROOM, REACH = 20.0, 1.06, 1.5
Named = Sequence[tuple[str, Pair]]


def pair_hover(name: str, pair: Pair) -> str:
    """Returns the text of a pair: its values with their intervals, the ratio, the verdict."""
    return by_text(
        f"<b>{in_figure(name)}</b>",
        *(in_figure(f"{letter}: {_figure_text(each)}") for letter, each in (("A", pair.a), ("B", pair.b))),
        in_figure(f"{ratio_text(pair)}, {verdict_text(pair)}"),
    )


def _figure_text(figure: Figure) -> str:
    ends = interval_text(figure)
    return value_text(figure) + (f" ({ends})" if ends else "")


def ratios(shown: Named) -> go.Figure:
    """Draws the ratio B / A of pairs with their intervals, a row for each, on a logarithmic axis around 1."""
    rows = [(i, name, pair) for i, (name, pair) in enumerate(shown) if pair.ratio and pair.ratio > 0.0]
    axis = _ratio_range([pair for _, _, pair in rows])
    figure = go.Figure()
    for verdict, colour in COLOURS.items():
        own = [(i, name, pair) for i, name, pair in rows if pair.verdict == verdict]
        if not own:
            continue
        at = [_clipped(pair.ratio or 1.0, axis) for _, _, pair in own]
        ends = [ratio_interval(pair) or (x, x) for (_, _, pair), x in zip(own, at, strict=True)]
        bar = {
            "type": "data",
            "array": [max(0.0, _clipped(high, axis) - x) for (_, high), x in zip(ends, at, strict=True)],
            "arrayminus": [max(0.0, x - _clipped(low, axis)) for (low, _), x in zip(ends, at, strict=True)],
            "color": colour,
            "thickness": 1.2,
            "width": 4,
        }
        hover = [pair_hover(name, pair) for _, name, pair in own]
        look = {"size": 10, "symbol": SYMBOLS[verdict]}
        y = [i for i, _, _ in own]
        name = SAYS.get(verdict, verdict)
        figure.add_trace(common.marks(at, y, name, colour, hover, marker=look, error_x=bar))
    common.rule(figure, style.FAINT_INK, x=1.0, width=1)
    return common.in_rows(
        figure,
        len(shown),
        xaxis=common.log_axis("B / A (log scale)", *axis, _ticks(*axis)),
        yaxis=common.rows_axis([_row_name(name) for name, _ in shown]),
        meta={"toggles": True, "narrow": {"xaxis.nticks": 5}},
    )


def _clipped(ratio: float, axis: tuple[float, float]) -> float:
    return min(max(ratio, axis[0]), axis[1])


def _ratio_range(pairs: Sequence[Pair]) -> tuple[float, float]:
    """Returns the ends of the axis: all ratios and 1 are inside, and intervals as far as they do not go far
    beyond."""
    marks = [1.0, *(min(max(pair.ratio or 1.0, 1.0 / FARTHEST), FARTHEST) for pair in pairs)]
    least, most = min(marks) / REACH, max(marks) * REACH
    ends = [end for pair in pairs for end in ratio_interval(pair) or () if end > 0.0]
    low = max(least, min([*marks, *ends]))
    high = min(most, max([*marks, *ends]))
    return low / ROOM, high * ROOM


def _ticks(low: float, high: float) -> list[float]:
    """Returns round ratios between two ends, and 1."""
    for step in (0.01, 0.02, 0.05, 0.1, 0.2):
        first, last = math.ceil(low / step), math.floor(high / step)
        if last - first <= 8:
            return [round(i * step, 10) for i in range(first, last + 1)]
    return common.few_ticks(low, high)


def _row_name(name: str) -> str:
    """Returns the name of a row, broken in two if it is long."""
    if " → " in name:
        return in_figure(name).replace(" → ", " →<br>")
    return common.in_two_lines(name) if len(name) > 30 else in_figure(name)


def beside(shown: Named, scale: Scale) -> go.Figure:
    """Draws the values of a metric in both runs with their intervals, a row for each place."""
    figure = go.Figure()
    values: list[float] = []
    for (letter, colour, symbol), side in zip(SIDES, (0, 1), strict=True):
        own = [(pair.a, pair.b)[side] for _, pair in shown]
        known = [(i, each) for i, each in enumerate(own) if each.value is not None]
        x = [(each.value or 0.0) * scale.factor for _, each in known]
        ends = [(_or(each.low, each.value), _or(each.high, each.value)) for _, each in known]
        values += [*x, *(high * scale.factor for _, high in ends)]
        bar = {
            "type": "data",
            "array": [max(0.0, high * scale.factor - at) for (_, high), at in zip(ends, x, strict=True)],
            "arrayminus": [max(0.0, at - low * scale.factor) for (low, _), at in zip(ends, x, strict=True)],
            "color": colour,
            "thickness": 1.2,
            "width": 4,
        }
        hover = [pair_hover(*shown[i]) for i, _ in known]
        # Beside each other, that neither hides the other.
        y = [i + (-0.12, 0.12)[side] for i, _ in known]
        look = {"size": 9, "symbol": symbol}
        figure.add_trace(common.marks(x, y, letter, colour, hover, marker=look, error_x=bar))
    return common.in_rows(
        figure,
        len(shown),
        xaxis=common.values_axis(scale.title, values, LOG_FROM),
        yaxis=common.rows_axis([_row_name(name) for name, _ in shown]),
        meta={"toggles": True, "narrow": {"xaxis.nticks": 4}},
    )


def _or(end: float | None, value: float | None) -> float:
    return float(end if end is not None else value or 0.0)
