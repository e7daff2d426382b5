"""A validation: predicted against measured, rung by rung, so that errors never cancel unseen.

    0 numerics    kernels against their references
    1 prices      op times of shapes that nothing was fitted to
    2 schedules   the simulator fed with measured op times, against the wall clock
    3 end to end  predicted prices against the wall clock

A rung holds where the error that its bound is about stays under the bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports import style
from simcore.reports.common import sections as common
from simcore.reports.common.figures import ROW_PX
from simcore.reports.page import Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import ERRORS, EVERY_AXIS, Run, extreme
from simcore.reports.text import (
    NOTHING,
    counted,
    in_figure,
    known,
    listed,
    recorded,
    signed_percent,
    significant,
    strategy_name,
)
from simcore.reports.tiling.figures import lasting
from simcore.reports.validation import figures

RUNGS: Mapping[str, str] = {"0": "numerics", "1": "prices", "2": "schedules", "3": "end to end"}
WORDS = {True: "passed", False: "failed"}
COLOURS = {True: style.GREEN[2][0], False: style.RED[2][0]}
BARS_AT_MOST = 24
ALL = "all"
PRICES_NOTE = (
    "Hollow marks are shapes that prices were fitted to: no evidence. Errors are by how many % the larger of "
    "predicted and measured exceeds the smaller. Bars, where there is room, are the 90 % interval of the "
    "price (upright) and what 80 % of the measured times lie in (level)."
)
TIMELINES_NOTE = (
    "Each timeline begins with its first launch; where it is empty the device waits for its host. On a wide "
    "screen, drag along the time axis to zoom; double-click to return. trace.json.gz (measured) and "
    "predicted_trace.json.gz open in Perfetto."
)


def opening(run: Run) -> Opening:
    """The top of the page: whether the ladder holds, then what the run itself says."""
    found = common.opening(run)
    tiles = [_tile(str(rung), rows) for rung, rows in judged(run.ladder).groupby("rung", sort=True)]
    return replace(found, answer=" ".join(filter(None, [verdict(run.ladder), found.answer])), tiles=tiles)


def sections(run: Run) -> list[Section]:
    """The ladder, and predicted beside measured where the run has both; nothing where there is no ladder."""
    if run.ladder.empty:
        return []
    return [_ladder(run), *prices(run), *_timelines(run), *_measured(run)]


def judged(ladder: pd.DataFrame) -> pd.DataFrame:
    """The rows that have to pass; all others are what those are made of."""
    return ladder[ladder["passed"].notna()]


def rung_name(rung: str) -> str:
    """ "1 prices"."""
    number = rung.removesuffix(".0")
    return f"{number} {RUNGS[number]}" if number in RUNGS else number


def verdict(ladder: pd.DataFrame) -> str:
    """Whether all rungs hold, and which do not."""
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


def _judged_by(row: Mapping[Any, Any]) -> tuple[str, float]:
    """What a row is judged by; where it does not say, the worst error of a kernel, the median of all else."""
    numeric = str(row["rung"]).removesuffix(".0") == "0"
    column = row.get("judged_by") or ("worst_pct" if numeric else "median_pct")
    return ERRORS[column], row[column]


def _tile(rung: str, rows: pd.DataFrame) -> Tile:
    records = rows.to_dict("records")
    failed = [row for row in records if not row["passed"]]
    # What has failed is what is shown; of several rows of one error the largest.
    name, _ = _judged_by((failed or records)[0])
    largest = max(error for word, error in map(_judged_by, failed or records) if word == name)
    where = f"{name} error {_pct(largest)}" if known(largest) else "nothing was compared"
    return Tile(WORDS[bool(rows["passed"].all())], f"Rung {rung_name(rung)}", where)


# -- the ladder ------------------------------------------------------------------------------------


def _table(ladder: pd.DataFrame) -> Table:
    lines = [
        [
            rung_name(row["rung"]),
            _of(row),
            f"{row['n']:,.0f}" if known(row["n"]) else "",
            *(_pct(row[name]) or _beyond(row) for name in ("median_pct", "p95_pct", "worst_pct")),
            _pct(row["bound_pct"]),
            WORDS[bool(row["passed"])] if known(row["passed"]) else "",
        ]
        for row in ladder.to_dict("records")
    ]
    head = ["rung", "of", "n", "median error", "95 %", "worst", "bound", "verdict"]
    return common.without_empty_columns(Table(head, lines, "llrrrrrl"))


def _beyond(row: Mapping[Any, Any]) -> str:
    """An error that is no number, as that of what was predicted to take no time."""
    return "∞" if known(row["n"]) and row["n"] > 0 else ""


def _of(row: Mapping[Any, Any]) -> str:
    parts = ("" if row["label"] == ALL else row["label"], row["what"])
    return ", ".join(part for part in parts if part)


def _row_name(row: Mapping[Any, Any]) -> str:
    return f"{in_figure(rung_name(row['rung']))}<br>{in_figure(_of(row))}"


def _hover(row: Mapping[Any, Any]) -> str:
    errors = [f"{name} {_pct(row[column])}" for column, name in ERRORS.items() if known(row[column])]
    return f"<b>{_row_name(row)}</b><br>{', '.join(errors)}<br>bound {_pct(row['bound_pct'])}"


def _bars(records: Sequence[Mapping[Any, Any]]) -> list[go.Bar]:
    bars = []
    for passed, word in WORDS.items():
        own = [(place, row) for place, row in enumerate(records) if row["passed"] == passed]
        if own:
            bars.append(go.Bar(
                orientation="h", name=word, marker={"color": COLOURS[passed], "line": {"width": 0}},
                width=0.5, y=[place for place, _ in own], hoverinfo="text",
                hovertext=[_hover(row) for _, row in own],
                x=[100 * _judged_by(row)[1] / row["bound_pct"] for _, row in own],
            ))  # fmt: skip
    return bars


def against_bounds(ladder: pd.DataFrame) -> go.Figure:
    """Errors as a share of their bound: a bar for what is judged, green or red, a mark for the worst.

    Rungs differ in what their bounds are, so only shares of them may stand on one axis.
    """
    records = ladder[ladder["bound_pct"] > 0].to_dict("records")
    # Names may repeat; places do not.
    places = list(range(len(records)))
    figure = go.Figure(_bars(records))
    worst = [100 * row["worst_pct"] / row["bound_pct"] for row in records]
    mark = {"symbol": "diamond-open", "size": 9, "color": style.INK[0], "line": {"width": 1.5}}
    figure.add_scatter(
        x=worst, y=places, mode="markers", name="worst", marker=mark, hoverinfo="text",
        hovertext=[_hover(row) for row in records],
    )  # fmt: skip
    line = {"color": style.INK[0], "width": 1.5, "dash": "dash"}
    figure.add_shape(type="line", x0=100, x1=100, y0=0, y1=1, yref="paper", line=line)
    # A few wild ones would leave no room for the rest; the table has them.
    bars = [100 * _judged_by(row)[1] / row["bound_pct"] for row in records]
    reach = max(
        [120.0, *(v * 1.05 for v in bars if known(v)), *(v * 1.05 for v in worst if known(v) and v < 400)]
    )
    return figure.update_layout(
        height=70 + ROW_PX * max(1, len(records)),
        margin={"l": 8, "r": 12, "t": 4, "b": 48},
        xaxis={
            "title": {"text": "error as a share of its bound (%)"},
            "range": [-0.01 * reach, reach],
            "nticks": 6,
        },
        yaxis={
            "tickvals": places,
            "ticktext": [_row_name(row) for row in records],
            "range": [len(records) - 0.5, -0.5],
            "showgrid": False,
        },
        meta={"narrow": {"xaxis.nticks": 4}},
    )


def _ladder(run: Run) -> Section:
    rows = judged(run.ladder)
    bounded, parts = rows[rows["bound_pct"] > 0], run.ladder[run.ladder["passed"].isna()]
    flags = [_broken(row) for row in rows[rows["passed"] == 0].to_dict("records")]
    plots = []
    if 0 < len(bounded) <= BARS_AT_MOST:
        figure = against_bounds(bounded)
        plots = [Plot("ladder", "errors of every rung as a share of their bounds", {(): figure})]
    return Section(
        key="ladder",
        heading="The ladder: predicted against measured",
        short="Ladder",
        lead=f"{verdict(run.ladder)} Each rung adds one source of error: numbers, prices of single ops, the "
        "schedule with measured prices, all together.",
        flags=flags,
        plots=plots,
        table=_table(rows),
        notes=["An error is by how many % the larger of predicted and measured exceeds the smaller. "
            "The dashed line is the bound; a bar is what is judged, a mark the worst."] if plots else [],
        details=[Details("What each rung is made of", table=_table(parts))] if len(parts) else [],
    )  # fmt: skip


def _broken(row: Mapping[Any, Any]) -> str:
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
    """By how many % the larger of predicted and measured exceeds the smaller, as the ladder has it."""
    pair = rows[["predicted_s", "measured_s"]]
    return 100.0 * (pair.max(axis=1) / pair.min(axis=1) - 1.0)


def error_table(rows: pd.DataFrame) -> Table:
    """Errors by kind and number format: of held-out shapes alone, those of others only counted. An interval
    that 90 % of the measured times should be in is one that says how sure a price is."""
    lines = []
    for (kind, dtype), group in rows.groupby(["kind", "dtype"], sort=True):
        own = group[group["held_out"] == 1.0].reset_index(drop=True)
        line = [str(kind).replace("_", " "), str(dtype), f"{len(own):,}"]
        if len(own):
            worst = extreme(own, own["off_pct"])
            bounded = own[own["low_s"].notna() & own["high_s"].notna()]
            inside = bounded["measured_s"].between(bounded["low_s"], bounded["high_s"]).sum()
            p95 = np.percentile(own["off_pct"], 95, method="inverted_cdf")
            line += [_pct(own["off_pct"].median()), _pct(float(p95)), _pct(worst["off_pct"])]
            line += [figures.share(int(inside), len(bounded)), worst["shape"]]
        else:
            line += [NOTHING] * 3 + ["", ""]
        calibrated = len(group) - len(own)
        lines.append([*line[:3], f"{calibrated:,}" if calibrated else "", *line[3:]])
    head = ["op", "format", "held-out shapes", "calibrated", "median error", "95 %", "worst"]
    return common.without_empty_columns(
        Table([*head, "in the 90 % interval", "worst at"], lines, "llrrrrrrl")
    )


def prices(run: Run) -> list[Section]:
    """Predicted against measured times of single ops, and how far off each kind is."""
    rows = run.prices[(run.prices["predicted_s"] > 0) & (run.prices["measured_s"] > 0)]
    if rows.empty:
        return []
    rows = rows.assign(
        off_pct=_off_pct(rows), hover=[figures.price_hover(row) for row in rows.to_dict("records")]
    )
    bound = _bound(run, "1")
    kinds = sorted(set(rows["kind"]))
    every: list[common.Option] = [("all", kinds)] if len(kinds) > 1 else []
    options: common.Dimension = ("Op", [*every, *((kind.replace("_", " "), [kind]) for kind in kinds)], 0)
    views = common.views([options], lambda of: figures.scatter(rows[rows["kind"].isin(of)], bound))
    held_out = rows[rows["held_out"] == 1.0]
    return [
        Section(
            key="op-prices",
            heading="Prices of single ops",
            short="Op prices",
            lead=_prices_lead(held_out),
            plots=[Plot("op-prices", "predicted over measured times of single ops", **views)],
            table=error_table(rows),
            notes=[PRICES_NOTE],
        )
    ]


def _bound(run: Run, rung: str) -> float:
    """The bound of a rung's median error; not a number where it has none."""
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
    """One case as predicted above the same as measured."""
    traces = run.traces
    blocks = {"predicted": traces.predicted, "measured": traces.measured}
    if any(rows.empty for rows in blocks.values()):
        return []
    shown = figures.window(blocks)
    ratio = 100.0 * (shown.lasts_s["predicted"] / shown.lasts_s["measured"] - 1.0)
    capped = "" if shown.whole else f" Only the first {lasting(shown.end_s)} are drawn; all is in the traces."
    return [
        Section(
            key="timelines",
            heading="The same run, predicted and measured",
            short="Timelines",
            lead=f"{traces.title}: {lasting(shown.lasts_s['predicted'])} predicted, "
            f"{lasting(shown.lasts_s['measured'])} measured ({signed_percent(ratio)}).{capped}",
            plots=[
                Plot("timelines", "timeline as predicted, and as measured", {(): figures.timelines(shown)})
            ],
            notes=[TIMELINES_NOTE],
        )
    ]


# -- seconds beside seconds ------------------------------------------------------------------------


def side_by_side(rows: pd.DataFrame, names: Sequence[str]) -> go.Figure:
    """Predicted and measured seconds of each case, a pair of bars with the name of the case. `rows`: compared
    figures in seconds."""
    longest = float(rows[["predicted", "reference"]].max().max())
    scale, unit = (1.0, "s") if longest >= 1 else (1e3, "ms")
    places = list(range(len(rows)))
    figure = go.Figure()
    pairs = (("predicted", "predicted", style.BLUE[3][0]), ("reference", "measured", style.GREY[1][0]))
    for column, name, colour in pairs:
        figure.add_bar(
            orientation="h", name=name, marker={"color": colour, "line": {"width": 0}}, hoverinfo="text",
            x=(rows[column] * scale).tolist(), y=places,
            hovertext=[
                f"<b>{in_figure(of)}</b><br>{name} {lasting(value)}<br>{signed_percent(error)}"
                for of, value, error in zip(names, rows[column], rows["error_pct"], strict=True)
            ],
        )  # fmt: skip
    return figure.update_layout(
        barmode="group",
        bargap=0.3,
        height=70 + ROW_PX * max(1, len(rows)),
        margin={"l": 8, "r": 12, "t": 4, "b": 48},
        xaxis={"title": {"text": f"time ({unit})"}, "range": [0, longest * scale * 1.05 or 1], "nticks": 6},
        yaxis={
            "tickvals": places,
            "ticktext": [in_figure(name).replace(", ", ",<br>", 1) for name in names],
            "range": [len(rows) - 0.5, -0.5],
            "showgrid": False,
        },
        meta={"narrow": {"xaxis.nticks": 4}},
    )


def _names(rows: pd.DataFrame) -> "pd.Series[str]":
    """The label of each row with whichever axes vary."""
    apart = [name for name in EVERY_AXIS.compared_numbers if name not in ("low", "high")]
    apart = [name for name in apart if rows[name].nunique() > 1]

    def name(row: Mapping[Any, Any]) -> str:
        axes = [f"{axis.replace('_', ' ')} {recorded(row[axis])}" for axis in apart if known(row[axis])]
        return ", ".join([str(row["label"]) or strategy_name(row["strategy"]), *axes])

    return pd.Series([name(row) for row in rows.to_dict("records")], index=rows.index, dtype=object)


def _over(rows: pd.DataFrame, names: Sequence[str], bound_pct: float) -> go.Figure:
    """Predicted over measured seconds of cases, too many for bars."""
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

    metrics = list(dict.fromkeys(times["metric"]))
    options: common.Dimension = ("Time", [(m.removesuffix("_s").replace("_", " "), m) for m in metrics], 0)
    plot = Plot("measured", "predicted and measured times", **common.views([options], draw))
    lines = [
        [name, row["metric"], recorded(row["predicted"]), recorded(row["reference"]),
         signed_percent(row["error_pct"])]
        for name, row in zip(names, rows.to_dict("records"), strict=True)
    ]  # fmt: skip
    table = Table(["strategy", "figure", "predicted", "measured", "error"], lines, "llrrr")
    return [
        Section(
            key="measured",
            heading="Predicted beside measured",
            short="Measured",
            lead="A pair of bars of one length is a prediction that holds; of many cases, a mark on the "
            "diagonal.",
            plots=[plot] if metrics else [],
            details=[Details(f"All {counted(len(lines), 'figure')}", table=table)],
        )
    ]
