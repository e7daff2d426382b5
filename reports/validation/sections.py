"""A validation: predicted against measured, rung by rung, so that errors do not cancel unseen.

    0 numerics    kernels against their references
    1 prices      op times of shapes to which nothing was fitted
    2 schedules   the simulator with measured op times, against the wall clock
    3 end to end  predicted prices against the wall clock

A rung holds if the error that it is judged by is within the bound.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import sections as common
from simcore.reports.common.figures import Layout, bars, in_rows, in_two_lines, rows_axis, rule, seconds
from simcore.reports.common.sections import Row
from simcore.reports.page import Details, Opening, Section, Table, Tile
from simcore.reports.run import ERRORS, EVERY_AXIS, Run, extreme
from simcore.reports.text import (
    NOTHING,
    counted,
    in_figure,
    known,
    lasting,
    listed,
    recorded,
    signed_percent,
    significant,
    strategy_name,
)
from simcore.reports.validation import figures

RUNGS: Mapping[str, str] = {"0": "numerics", "1": "prices", "2": "schedules", "3": "end to end"}
WORDS = {True: "passed", False: "failed"}
COLOURS = {True: style.GREEN[2][0], False: style.RED[2][0]}
BARS_AT_MOST = 24
ALL = "all"
LADDER_NOTE = (
    "An error is by how many % the larger of predicted and measured exceeds the smaller. "
    "The dashed line is the bound; a bar is what is judged, a mark the worst, an arrow one beyond the axis."
)
NONE_NOTE = "∞: something took time, and none is predicted of it."
# The largest worst error, as a share of its bound in %, for which the axis makes room.
MOST_SHARE = 400


def opening(run: Run) -> Opening:
    """Returns the top of the page: whether the ladder holds, then the run's own answer."""
    found = common.opening(run)
    tiles = [_tile(str(rung), rows) for rung, rows in judged(run.ladder).groupby("rung", sort=True)]
    return replace(found, answer=" ".join(filter(None, [verdict(run.ladder), found.answer])), tiles=tiles)


def sections(run: Run) -> list[Section]:
    """Returns the ladder, and predicted beside measured figures if any; empty without a ladder."""
    if run.ladder.empty:
        return []
    return [_ladder(run), *prices(run), *_timelines(run), *_measured(run)]


def judged(ladder: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows that must pass; the other rows are their parts."""
    return ladder[ladder["passed"].notna()]


def rung_name(rung: str) -> str:
    """ "1 prices"."""
    number = rung.removesuffix(".0")
    return f"{number} {RUNGS[number]}" if number in RUNGS else number


def verdict(ladder: pd.DataFrame) -> str:
    """States whether all rungs hold, and which do not."""
    rungs = judged(ladder).groupby("rung", sort=True)
    failed = [rung_name(str(rung)) for rung, rows in rungs if not rows["passed"].all()]
    if failed:
        return f"Not within {'its' if len(failed) == 1 else 'their'} bounds: rung {listed(failed)}."
    return f"All {counted(len(rungs), 'rung')} of the ladder hold: what each is judged by is in its bound."


def _pct(value: float) -> str:
    if not known(value):
        return ""
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}\u00a0%".replace("-", "−")
    return f"{significant(value, 3)}\u00a0%"


def _judged_by(row: Row) -> tuple[str, float]:
    """Returns the error by which a row is judged; if the row does not name it, the worst for kernels,
    otherwise the median."""
    numeric = str(row["rung"]).removesuffix(".0") == "0"
    column = row.get("judged_by") or ("worst_pct" if numeric else "median_pct")
    return ERRORS[column], row[column]


def _tile(rung: str, rows: pd.DataFrame) -> Tile:
    records = rows.to_dict("records")
    failed = [row for row in records if not row["passed"]]
    # Shows the failed rows; among several rows of one error the largest.
    name, _ = _judged_by((failed or records)[0])
    largest = max(error for word, error in map(_judged_by, failed or records) if word == name)
    where = f"{name} error {_pct(largest)}" if known(largest) else "nothing was compared"
    return Tile(WORDS[bool(rows["passed"].all())], f"Rung {rung_name(rung)}", where)


# -- the ladder ------------------------------------------------------------------------------------


def _error(column: str) -> Callable[[Row], str]:
    return lambda row: _pct(row[column]) or _beyond(row)


def _table(ladder: pd.DataFrame) -> Table:
    table = common.tabled(
        ladder.to_dict("records"),
        ("rung", "l", lambda row: rung_name(row["rung"])),
        ("of", "l", _of),
        ("n", "r", common.if_known("n", "{:,.0f}".format)),
        ("median error", "r", _error("median_pct")),
        ("95 %", "r", _error("p95_pct")),
        ("worst", "r", _error("worst_pct")),
        ("bound", "r", common.shows("bound_pct", _pct)),
        ("verdict", "l", common.if_known("passed", lambda passed: WORDS[bool(passed)])),
    )
    return common.without_empty_columns(table)


def _beyond(row: Row) -> str:
    """Describes an error that is not finite, as for a prediction of no time."""
    return "∞" if _compared(row) else ""


def _compared(row: Row) -> bool:
    return bool(known(row["n"]) and row["n"] > 0)


def _of(row: Row) -> str:
    parts = ("" if row["label"] == ALL else row["label"], row["what"])
    return ", ".join(part for part in parts if part)


def _row_name(row: Row) -> str:
    return f"{in_figure(rung_name(row['rung']))}<br>{in_figure(_of(row))}"


def _hover(row: Row) -> str:
    errors = [f"{name} {_pct(row[column])}" for column, name in ERRORS.items() if known(row[column])]
    return f"<b>{_row_name(row)}</b><br>{', '.join(errors)}<br>bound {_pct(row['bound_pct'])}"


def against_bounds(ladder: pd.DataFrame) -> go.Figure:
    """Draws errors as a share of their bound: a bar for each judged error, green or red, a mark for the
    worst, or an arrow at the end of the axis if that is beyond.

    Bounds differ between rungs, so only shares of them can share an axis.
    """
    records = ladder[ladder["bound_pct"] > 0].to_dict("records")
    hover = [_hover(row) for row in records]
    shares = [100 * _judged_by(row)[1] / row["bound_pct"] for row in records]
    worst = [100 * row["worst_pct"] / row["bound_pct"] for row in records]
    figure = go.Figure()
    for passed, word in WORDS.items():
        # Names may repeat; places do not.
        places = [place for place, row in enumerate(records) if row["passed"] == passed]
        if places:
            x, texts = [shares[place] for place in places], [hover[place] for place in places]
            figure.add_trace(bars(x, places, word, COLOURS[passed], texts, width=0.5))
    mark = {"symbol": "diamond-open", "size": 9, "color": style.INK[0], "line": {"width": 1.5}}
    hover_look: Layout = {"name": "worst", "hoverinfo": "text", "hovertext": hover}
    figure.add_scatter(x=worst, y=list(range(len(records))), mode="markers", marker=mark, **hover_look)
    rule(figure, style.INK, x=100, width=1.5, dash="dash")
    # A few outliers would leave no room for the rest; the table shows them.
    seen = [*filter(known, shares), *(value for value in worst if known(value) and value < MOST_SHARE)]
    reach = max([120.0, *(value * 1.05 for value in seen)])
    ends = enumerate(zip(records, worst, strict=True))
    far = [place for place, (row, end) in ends if (end > reach if known(end) else _compared(row))]
    if far:
        arrow = {**mark, "symbol": "triangle-right"}
        looks = {**hover_look, "name": "worst, beyond the axis", "hovertext": [hover[at] for at in far]}
        figure.add_scatter(x=[0.985 * reach] * len(far), y=far, mode="markers", marker=arrow, **looks)
    axis = {"text": "error as a share of its bound (%)"}
    return _in_rows(figure, [_row_name(row) for row in records], axis, [-0.01 * reach, reach])


def _in_rows(
    figure: go.Figure, names: Sequence[str], title: Layout, reach: Sequence[float], **more: Any
) -> go.Figure:
    x_axis, meta = {"title": title, "range": reach, "nticks": 6}, {"narrow": {"xaxis.nticks": 4}}
    y_axis = rows_axis(names)
    return in_rows(figure, len(names), foot_px=70, xaxis=x_axis, yaxis=y_axis, meta=meta, **more)


def _ladder(run: Run) -> Section:
    rows = judged(run.ladder)
    bounded, parts = rows[rows["bound_pct"] > 0], run.ladder[run.ladder["passed"].isna()]
    flags = [_broken(row) for row in rows[rows["passed"] == 0].to_dict("records")]
    plots = []
    if 0 < len(bounded) <= BARS_AT_MOST:
        figure = against_bounds(bounded)
        plots = [common.drawn("ladder", "errors of every rung as a share of their bounds", figure)]
    details = [Details("What each rung is made of", table=_table(parts))] if len(parts) else []
    shown = {"flags": flags, "plots": plots, "table": _table(rows), "details": details}
    endless = any(
        _compared(row) and not known(row[name]) for row in rows.to_dict("records") for name in ERRORS
    )
    notes = [LADDER_NOTE] * bool(plots) + [NONE_NOTE] * endless
    return common.section("validation", "ladder", {"verdict": verdict(run.ladder)}, notes=notes, **shown)


def _broken(row: Row) -> str:
    if not known(row["bound_pct"]):
        return f"Rung {rung_name(row['rung'])}: {_of(row)} has no bound."
    if not row["n"]:
        return f"Rung {rung_name(row['rung'])}: nothing was compared of {_of(row)}."
    name, error = _judged_by(row)
    said = f"{name} {_pct(error)}" if known(error) else "an error that is no number"
    return (
        f"Rung {rung_name(row['rung'])}: {_of(row)} misses its bound of {_pct(row['bound_pct'])} with {said}."
    )


# -- prices of single ops --------------------------------------------------------------------------


def _off_pct(rows: pd.DataFrame) -> "pd.Series[float]":
    """Returns by how many % the larger of predicted and measured exceeds the smaller, as in the ladder."""
    pair = rows[["predicted_s", "measured_s"]]
    return 100.0 * (pair.max(axis=1) / pair.min(axis=1) - 1.0)


Group = tuple[tuple[str, str], pd.DataFrame, pd.DataFrame]  # kind and format, held-out shapes, all shapes


def _of_held_out(show: Callable[[pd.DataFrame], str], otherwise: str = NOTHING) -> Callable[[Group], str]:
    return lambda group: show(group[1]) if len(group[1]) else otherwise


def _calibrated(group: Group) -> str:
    count = len(group[2]) - len(group[1])
    return f"{count:,}" if count else ""


def _p95(rows: pd.DataFrame) -> str:
    return _pct(float(np.percentile(rows["off_pct"], 95, method="inverted_cdf")))


def _inside(rows: pd.DataFrame) -> str:
    bounded = rows[rows["low_s"].notna() & rows["high_s"].notna()]
    inside = bounded["measured_s"].between(bounded["low_s"], bounded["high_s"]).sum()
    return figures.share(int(inside), len(bounded))


def error_table(rows: pd.DataFrame) -> Table:
    """Returns errors by kind and number format, of held-out shapes only; other shapes are only counted. The
    interval of a price should contain 90 % of the measured times."""
    groups = [
        (key, group[group["held_out"] == 1.0].reset_index(drop=True), group)
        for key, group in rows.groupby(["kind", "dtype"], sort=True)
    ]
    table = common.tabled(
        groups,
        ("op", "l", lambda group: str(group[0][0]).replace("_", " ")),
        ("format", "l", lambda group: str(group[0][1])),
        ("held-out shapes", "r", lambda group: f"{len(group[1]):,}"),
        ("calibrated", "r", _calibrated),
        ("median error", "r", _of_held_out(lambda own: _pct(own["off_pct"].median()))),
        ("95 %", "r", _of_held_out(_p95)),
        ("worst", "r", _of_held_out(lambda own: _pct(own["off_pct"].max()))),
        ("in the 90 % interval", "r", _of_held_out(_inside, "")),
        ("worst at", "l", _of_held_out(lambda own: str(extreme(own, own["off_pct"])["shape"]), "")),
    )
    return common.without_empty_columns(table)


def prices(run: Run) -> list[Section]:
    """Shows predicted against measured times of single ops, and the error of each kind."""
    rows = run.prices[(run.prices["predicted_s"] > 0) & (run.prices["measured_s"] > 0)]
    if rows.empty:
        return []
    rows = rows.assign(
        off_pct=_off_pct(rows), hover=[figures.price_hover(row) for row in rows.to_dict("records")]
    )
    bound, kinds = _bound(run, "1"), sorted(set(rows["kind"]))
    every: list[common.Option] = [("all", kinds)] if len(kinds) > 1 else []
    options: common.Dimension = ("Op", [*every, *((kind.replace("_", " "), [kind]) for kind in kinds)], 0)

    def draw(of: list[str]) -> go.Figure:
        return figures.scatter(rows[rows["kind"].isin(of)], bound)

    plot = common.plot("op-prices", "predicted over measured times of single ops", [options], draw)
    lead = _prices_lead(rows[rows["held_out"] == 1.0])
    return [common.section("validation", "op-prices", lead=lead, plots=[plot], table=error_table(rows))]


def _bound(run: Run, rung: str) -> float:
    """Returns the bound of a rung's median error; NaN if it has none."""
    rows = judged(run.ladder).to_dict("records")
    own = [row for row in rows if str(row["rung"]).startswith(rung) and _judged_by(row)[0] == "median"]
    return float(own[0]["bound_pct"]) if own else math.nan


def _prices_lead(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "Every shape that ran had been calibrated: nothing here is a prediction."
    worst = extreme(rows.reset_index(drop=True), rows["off_pct"])
    return (
        f"{counted(len(rows), 'shape')} to which no price was fitted: half of them within "
        f"{_pct(rows['off_pct'].median())}, the worst off by {_pct(worst['off_pct'])} "
        f"({worst['kind'].replace('_', ' ')}, {lasting(worst['measured_s'])})."
    )


# -- timelines -------------------------------------------------------------------------------------


def _timelines(run: Run) -> list[Section]:
    """Shows one case predicted above the same case measured."""
    traces = run.traces
    blocks = {"predicted": traces.predicted, "measured": traces.measured}
    if any(rows.empty for rows in blocks.values()):
        return []
    shown = figures.window(blocks)
    ratio = 100.0 * (shown.lasts_s["predicted"] / shown.lasts_s["measured"] - 1.0)
    capped = "" if shown.whole else f" Only the first {lasting(shown.end_s)} are drawn; all is in the traces."
    words = {name: lasting(seconds) for name, seconds in shown.lasts_s.items()}
    words |= {"title": traces.title, "ratio": signed_percent(ratio), "capped": capped, "zoom": common.ZOOM}
    figure = figures.timelines(shown)
    plot = common.drawn("timelines", "timeline as predicted, and as measured", figure)
    return [common.section("validation", "timelines", words, plots=[plot])]


# -- seconds beside seconds ------------------------------------------------------------------------


def side_by_side(rows: pd.DataFrame, names: Sequence[str]) -> go.Figure:
    """Draws predicted and measured seconds of each case, a pair of bars with the name of the case. `rows`:
    compared figures in seconds."""
    longest = float(rows[["predicted", "reference"]].max().max())
    scale, figure = seconds("time", longest, 1.0), go.Figure()
    pairs = (("predicted", "predicted", style.BLUE[3][0]), ("reference", "measured", style.GREY[1][0]))
    for column, name, colour in pairs:
        hover = [
            f"<b>{in_figure(of)}</b><br>{name} {lasting(value)}<br>{signed_percent(error)}"
            for of, value, error in zip(names, rows[column], rows["error_pct"], strict=True)
        ]
        figure.add_trace(bars(rows[column] * scale.factor, list(range(len(rows))), name, colour, hover))
    reach, shown = [0, longest * scale.factor * 1.05 or 1], [in_two_lines(name) for name in names]
    return _in_rows(figure, shown, {"text": scale.title}, reach, barmode="group", bargap=0.3)


def _names(rows: pd.DataFrame) -> "pd.Series[str]":
    """Returns the label of each row with the axes that vary."""
    apart = [name for name in EVERY_AXIS.compared_numbers if name not in ("low", "high")]
    apart = [name for name in apart if rows[name].nunique() > 1]

    def name(row: Row) -> str:
        axes = [f"{axis.replace('_', ' ')} {recorded(row[axis])}" for axis in apart if known(row[axis])]
        return ", ".join([str(row["label"]) or strategy_name(row["strategy"]), *axes])

    return pd.Series([name(row) for row in rows.to_dict("records")], index=rows.index, dtype=object)


def _over(rows: pd.DataFrame, names: Sequence[str], bound_pct: float) -> go.Figure:
    """Draws predicted over measured seconds of cases, if there are too many for bars."""
    found = pd.DataFrame({
        "kind": [str(of) or strategy_name(s) for of, s in zip(rows["label"], rows["strategy"], strict=True)],
        "predicted_s": rows["predicted"], "low_s": rows["low"], "high_s": rows["high"],
        "measured_s": rows["reference"], "p10_s": np.nan, "p90_s": np.nan, "held_out": 1.0,
        "name": names,
    })  # fmt: skip
    found = found[(found["predicted_s"] > 0) & (found["measured_s"] > 0)]
    hover = [figures.case_hover(row["name"], row) for row in found.to_dict("records")]
    return figures.scatter(found.assign(hover=hover), bound_pct)


def _measured(run: Run) -> list[Section]:
    rows = run.comparison[run.comparison[["reference", "predicted"]].notna().all(axis=1)]
    rows = rows[rows["role"].str.startswith("measured")].reset_index(drop=True)
    if rows.empty:
        return []
    names = _names(rows)
    times = rows[rows["metric"].str.endswith("_s") & ~rows["metric"].str.endswith("_per_s")]

    def draw(metric: str) -> go.Figure:
        own = times[times["metric"] == metric]
        shown = names[own.index].tolist()
        return side_by_side(own, shown) if len(own) <= BARS_AT_MOST else _over(own, shown, _bound(run, "3"))

    metrics = [(m.removesuffix("_s").replace("_", " "), m) for m in dict.fromkeys(times["metric"])]
    plots = [common.plot("measured", "predicted and measured times", [("Time", metrics, 0)], draw)]
    table = common.tabled(
        rows.assign(name=names).to_dict("records"),
        ("strategy", "l", common.field("name")),
        ("figure", "l", common.field("metric")),
        ("predicted", "r", common.shows("predicted", recorded)),
        ("measured", "r", common.shows("reference", recorded)),
        ("error", "r", common.shows("error_pct", signed_percent)),
    )
    details = [Details(f"All {counted(len(rows), 'figure')}", table=table)]
    shown = plots if metrics else []
    return [common.section("validation", "measured", plots=shown, details=details)]
