"""The page of a plan: its answer, what holds and how near the limits, what it costs, and all that was tried.

Everything is drawn along the columns that vary (see `axes.py`).
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.common.figures import Scale
from simcore.reports.common.sections import Row
from simcore.reports.page import Details, Opening, Plot, Section, Table, Tile
from simcore.reports.planning import figures, leads, maps
from simcore.reports.planning.axes import (
    COST,
    DEVICES,
    ENERGY,
    LOAD,
    RATE,
    WAY,
    Axis,
    Laid,
    field_name,
    laid,
    parted,
    varied_axes,
)
from simcore.reports.planning.figures import Limited
from simcore.reports.planning.points import LATENCIES, VARIED, Planned
from simcore.reports.planning.tornado import sensitivity
from simcore.reports.serving.sections import scale_of, with_interval
from simcore.reports.text import counted, known, listed, percent, recorded
from simcore.studies.columns import USUAL_LATENCIES

ABOUT: Mapping[str, str] = {
    "devices": "plan: fewest devices",
    "cost": "plan: lowest cost",
    "rate": "plan: highest rate",
    "strategy": "plan: best strategy",
    "grid": "plan: every point of a grid",
    "break_even": "plan: where the lead passes",
}
MOST_ROWS, MOST_LINES, MOST_TILES, MOST_MAPS = 24, 8, 4, 24
PER_MILLION = "cost_per_million_output_tokens"
AGAIN = "The same plan, seed and device profile give the same answer to the byte."


@dataclass(frozen=True)
class Shown:
    """A plan with what several sections use, each computed once."""

    plan: Planned

    @cached_property
    def laid(self) -> Laid | None:
        """The points as figures lay them out."""
        return laid(self.plan)

    @cached_property
    def limited(self) -> list[Limited]:
        """The limited metrics that some point has."""
        points = self.plan.points
        return [
            Limited(limit, scale_of(limit.metric, max(points[limit.metric].max(), limit.value)))
            for limit in self.plan.limits
            if points[limit.metric].notna().any()
        ]

    @cached_property
    def usual(self) -> dict[str, Scale]:
        """The latencies that are shown where nothing is limited and that some point has, and their scales."""
        points = self.plan.points
        known_ones = [name for name in USUAL_LATENCIES if points[name].notna().any()]
        return {name: scale_of(name, points[name].max()) for name in known_ones}

    @cached_property
    def priced(self) -> bool:
        """Whether some point has a cost."""
        return bool(self.plan.points[COST.column].notna().any())

    @cached_property
    def objectives(self) -> list[Axis]:
        """The objectives as axes, those that go across first: rates and latencies, then devices and costs. A
        cost that is no objective comes last."""
        latencies = [each.limit.metric for each in self.limited if each.limit.metric.endswith("_s")]
        known_ones = [name for name in (*latencies, *LATENCIES) if self.plan.points[name].notna().any()]
        axes = {
            **{"highest_rate": RATE, "fewest_devices": DEVICES},
            **{"lowest_cost": COST, "lowest_energy": ENERGY},
        }
        if known_ones:
            scale = scale_of(known_ones[0], float(self.plan.points[known_ones[0]].max()))
            axes["lowest_latency"] = Axis(
                known_ones[0], scale.name, lambda v: f"{scale.name} {scale.text(v)}"
            )
        order = ["highest_rate", "lowest_latency", "fewest_devices", "lowest_cost", "lowest_energy"]
        wanted = [name for name in order if name in self.plan.objectives]
        if self.priced and len(wanted) < 2:
            wanted = ["highest_rate" if self.varies(RATE) else "lowest_latency", "lowest_cost"]
        return [axes[name] for name in wanted if name in axes]

    def varies(self, axis: Axis) -> bool:
        """Whether points differ on an axis."""
        return self.plan.points[axis.column].nunique() > 1


def opening(plan: Planned) -> Opening:
    """Returns the top of the page."""
    return Opening(
        name=str(plan.summary.get("name") or "plan"),
        about=_about(plan),
        answer=str(plan.summary.get("answer") or ""),
        warnings=[str(each) for each in plan.summary.get("warnings") or ()],
        tiles=leads.tiles(plan) if plan.question == leads.QUESTION else _tiles(Shown(plan)),
        command="python -m simcore plan plan.yaml" if plan.asked_text else "",
        again=AGAIN,
    )


def sections(plan: Planned) -> list[Section]:
    """Returns the sections, in the order of the page."""
    of = Shown(plan)
    if plan.question == leads.QUESTION:
        return [*leads.leads(plan), *_asked(plan)]
    return [
        *(*_holds(of), *_maps(of), *_against(of), *_trade_off(of), *sensitivity(plan)),
        *(*_how_to_run(plan), *_points(of), *_prices(plan), *_asked(plan)),
    ]


def _about(plan: Planned) -> str:
    base = plan.asked.get("base")
    model = str(base.get("model") or "") if isinstance(base, dict) else ""
    devices = listed([name for name in dict.fromkeys(plan.points["device"]) if name], 3)
    return " · ".join(part for part in (ABOUT.get(plan.question, "plan"), devices, model) if part)


# -- how to run it ---------------------------------------------------------------------------------

MOST_WAYS = 4


def _how_to_run(plan: Planned) -> list[Section]:
    """Shows the commands of the best points, each whole, so that it can be copied."""
    ways = plan.how_to_run
    details, notes = [], []
    for way in ways[:MOST_WAYS]:
        of = f", {way['point']}" if len(ways) > 1 else ""
        commands = [each for each in way["commands"] if each["command"]]
        for each in commands:
            placed = f", {way['placed']}" if way["placed"] else ""
            details.append(Details(f"{each['title']}{of}{placed}", text=each["command"], opened=True))
        for router in dict.fromkeys(each["router"] for each in commands if each["router"]):
            details.append(Details(f"Router in front of the servers{of}", text=router, opened=True))
        why = [way["why_not"], way.get("without", ""), *(each["why_not"] for each in way["commands"])]
        notes += [f"{text[0].upper()}{text[1:]}." for text in why if text]
        notes += [f"{each['title']}: {note}." for each in way["commands"] for note in each["notes"]]
    if len(ways) > MOST_WAYS:
        notes.append(f"{len(ways) - MOST_WAYS} more ways are in summary.json.")
    if not (details or notes):
        return []
    words = {"point": ways[0]["point"] if len(ways) == 1 else "the best points"}
    return [common.section("plan", "how", words, notes=[*dict.fromkeys(notes)], details=details)]


# -- key figures -----------------------------------------------------------------------------------


def _tiles(of: Shown) -> list[Tile]:
    """Returns what answers and how sure that is; if it is one point, also its cost and limited metrics."""
    every, best = of.plan.points, of.plan.best.to_dict("records")
    found = [tile for row in best for tile in _answer_tiles(of.plan.question, row, several=len(best) > 1)]
    tiles = found[: MOST_TILES - 1] or [
        Tile(
            f"{(every['verdict'] == 'holds').sum()} of {len(every)}",
            "Points that ran" if of.plan.once else "Points that hold",
        )
    ]
    if len(best) == 1:
        tiles += _figures_of(of, best[0])
    elif best and not found:
        tiles.append(Tile(str(len(best)), "Points on the Pareto front"))
    if of.plan.certainty is not None:
        replicas = [round(row["replicas"]) for row in best if known(row["replicas"])]
        after = f"after {counted(max(replicas), 'replica')} at most" if replicas else ""
        tiles.append(Tile(percent(of.plan.certainty), "Certainty asked for", after))
    return tiles[:MOST_TILES]


def _figures_of(of: Shown, row: Row) -> list[Tile]:
    """Returns the cost of a point, and its limited metrics beside their limits."""
    costs = known(row[COST.column]) and of.plan.question != "cost"
    tiles = [Tile(recorded(row[COST.column]), "Cost an hour", _per_million(row))] if costs else []
    for each in of.limited:
        value = row[each.limit.metric]
        if known(value):
            own = replace(each, scale=scale_of(each.limit.metric, max(value, each.limit.value)))
            tiles.append(Tile(own.scale.text(value), own.scale.name, f"limit: {own.text}"))
    return tiles


# Question -> the axis of its answer, and what the answer is.
ANSWERED_BY: Mapping[str, tuple[Axis, str]] = {
    "devices": (DEVICES, "Fewest devices that hold"),
    "cost": (COST, "Lowest cost that holds"),
    "rate": (RATE, "Highest rate that holds"),
    "strategy": (RATE, "Highest rate that holds"),
}


def _answer_tiles(question: str, row: Row, *, several: bool) -> list[Tile]:
    axis, means = ANSWERED_BY.get(question, (DEVICES, ""))
    if not means or not known(row[axis.column]):
        return []
    where = ", ".join(part for part in (str(row["label"]), _load(row) if several else "") if part)
    return [Tile(axis.text(row[axis.column]), means, where)]


def _per_million(row: Row) -> str:
    each = row[PER_MILLION]
    return f"{recorded(each)} per million output tokens" if known(each) else ""


# -- figures ---------------------------------------------------------------------------------------


def _left_out(of: Laid, most: int) -> list[str]:
    """Returns a note on the ways that a figure of at most `most` places leaves out."""
    ways = len(of.ways) if len(of.places) > most else 0
    if ways <= most:
        return []
    return [f"Of {ways:,} ways of running the {most} are drawn that answer or hold most often."]


def _holds(of: Shown) -> list[Section]:
    laid_out = of.laid
    if laid_out is None or of.plan.once:
        return []
    name, options = parted(laid_out, MOST_ROWS)
    verdicts = of.plan.points["verdict"].value_counts()
    parts = [
        f"{verdicts[key]:,} {one if verdicts[key] == 1 else many}"
        for key, (one, many) in WORDS.items()
        if key in verdicts
    ]
    lead = f"Of {counted(len(of.plan.points), 'point')}, {listed(parts)}."
    wanted = _answers(options)

    def draw(shown: Laid) -> go.Figure:
        return figures.verdicts(shown, of.limited)

    plot = common.plot("holds", "verdict on every point", [common.opening_on(name, options, wanted)], draw)
    notes = [*_left_out(laid_out, MOST_ROWS), *_sure(of.plan)]
    return [common.section("plan", "holds", {"lead": lead}, plots=[plot], notes=notes)]


# What is said of one point and of several.
WORDS: Mapping[str, tuple[str, str]] = {
    "holds": ("holds", "hold"),
    "unsure": ("is not sure", "are not sure"),
    "fails": ("fails", "fail"),
}


def _answers(options: list[common.Option]) -> Callable[[Laid], bool]:
    """Returns whether a layout has a point that answers."""
    return lambda shown: bool((shown.points["best"] == 1.0).any())


def _sure(plan: Planned) -> list[str]:
    if plan.certainty is None:
        return []
    return [
        f"A point holds or fails if that is {percent(plan.certainty)} sure, by the spread of its replicas."
    ]


def _against(of: Shown) -> list[Section]:
    whole = of.laid
    if whole is None or not of.limited or not len(whole.points):
        return []
    plots = [_limit_plot(whole, each) for each in of.limited]
    sure = "" if of.plan.certainty is None else f"{percent(of.plan.certainty)} "
    notes = [f"Bars are {sure}intervals of the mean over replicas.", *_left_out(whole, MOST_LINES)]
    return [common.section("plan", "limits", plots=plots, notes=notes)]


def _limit_plot(whole: Laid, limited: Limited) -> Plot:
    name, options = parted(whole, MOST_LINES)
    key, title = f"limit-{limited.limit.metric.replace('.', '_')}", limited.scale.name

    def draw(shown: Laid) -> go.Figure:
        return figures.against(whole, shown, limited)

    dimension = common.opening_on(name, options, _answers(options))
    return common.plot(key, f"{title} against {whole.across.title}", [dimension], draw, title)


# What a map with limits shows besides.
OUTLINED = ": what holds in all limits for sure has a line around it, what is not sure dashes"


def _maps(of: Shown) -> list[Section]:
    """Shows each limited metric and each objective over two numbers, where the points fill a grid of them;
    without limits the usual latencies."""
    whole = laid(of.plan, longest=True)
    if whole is None or not maps.is_grid(whole):
        return []
    usual = [maps.of_figure(name, scale, whole) for name, scale in of.usual.items()]
    shades = [maps.of_limit(each) for each in of.limited] or usual
    drawn = {shaded.column for shaded in shades}
    others = [axis for axis in of.objectives if axis.column not in drawn]
    shades += [shaded for axis in others if (shaded := _objective_shades(of, whole, axis)) is not None]
    if not shades:
        return []
    ways = whole.ways
    options = [(way, whole.only(whole.points[WAY] == way)) for way in ways[:MOST_MAPS]]
    dimension = common.opening_on("way of running", options, _answers(options))
    plots = []
    for shaded in shades:

        def draw(shown: Laid, shaded: maps.Shaded = shaded) -> go.Figure:
            return maps.heat_map(whole, shown, shaded, of.limited)

        title, key = shaded.scale.title, f"map-{shaded.column.replace('.', '_')}"
        plots.append(common.plot(key, f"map of {title}", [dimension], draw, title))
    left = f"Of {len(ways):,} ways of running the {MOST_MAPS} are drawn that answer or hold most often."
    notes = [left] if len(ways) > MOST_MAPS else []
    words = {"across": whole.across.title, "rows": whole.rows.title if whole.rows else ""}
    words["outlined"] = OUTLINED if of.limited else ""
    key = "maps" if of.limited else "figure-maps"
    return [common.section("plan", key, words, plots=plots, notes=notes, wide=maps.is_wide(whole))]


def _objective_shades(of: Shown, whole: Laid, axis: Axis) -> maps.Shaded | None:
    timed = axis.column.endswith("_s") and axis is not RATE
    scale = scale_of(axis.column, of.plan.points[axis.column].max()) if timed else Scale(axis.title)
    return maps.of_objective(axis, scale, whole, at_most=axis is not RATE)


def _trade_off(of: Shown) -> list[Section]:
    whole, pairs = of.laid, list(itertools.combinations(of.objectives, 2))
    held = of.plan.points["verdict"] == "holds"
    if whole is None or not pairs or not held.any():
        return []
    front = len(pairs) == 1 and len(of.plan.objectives) == 2
    options = [(f"{x.title} and {y.title}", (x, y)) for x, y in pairs]

    def draw(pair: tuple[Axis, Axis]) -> go.Figure:
        return figures.trade_off(whole, *pair, of.limited, front=front)

    plot = common.plot("trade-off", "points that hold, by two objectives", [("Axes", options, 0)], draw)
    words = {
        "front": "No other point is better than those of the front in one and as good in the other." * front
    }
    return [common.section("plan", "trade-off", words, plots=[plot])]


# -- the table -------------------------------------------------------------------------------------


def _points(of: Shown) -> list[Section]:
    rows = of.plan.points.sort_values("best", ascending=False, kind="stable").to_dict("records")
    if not rows:
        return []
    several = of.plan.points["device"].nunique() > 1
    loads = [axis for axis in LOAD if of.varies(axis)]
    same = _load(rows[0], [axis for axis in LOAD if axis not in loads])
    columns: list[common.Column] = [
        ("point", "r", common.if_known("point", recorded_whole)),
        ("way", "l", common.field("label")),
        *([("device", "l", common.field("device"))] if several else []),
        ("devices", "r", common.if_known("devices", recorded_whole)),
        ("servers", "r", common.if_known("servers", recorded_whole)),
        ("load", "l", lambda row: _load(row, loads)),
        *_varied_columns(of.plan),
        *([] if of.plan.once else [("verdict", "l", lambda row: figures.SAYS[row["verdict"]])]),
        ("replicas", "r", common.if_known("replicas", recorded_whole)),
        *(
            [_limited_column(each) for each in of.limited]
            or [_usual_column(*each) for each in of.usual.items()]
        ),
        ("cost an hour", "r", common.if_known(COST.column, recorded)),
        ("per million output tokens", "r", common.if_known(PER_MILLION, recorded)),
        ("J per output token, at most", "r", common.if_known(ENERGY.column, recorded)),
        ("why", "l", common.field("why")),
    ]
    table = common.without_empty_columns(common.tabled(rows, *columns))
    numbers = [row["point"] for row in rows]
    if all(known(number) for number in numbers):
        table = replace(table, ids=[f"{figures.POINT}{round(number)}" for number in numbers])
    best = int((of.plan.points["best"] == 1.0).sum())
    first = f", {'that' if best == 1 else 'those'} of the answer first" if best else ""
    summary = f"{counted(len(rows), 'point')}{first}"
    words = {"same": f"The same at every point: {same}." if same else ""}
    return [common.section("plan", "points", words, details=[Details(summary, table=table)])]


def recorded_whole(value: float) -> str:
    """Returns a whole number as text."""
    return f"{round(value):,}"


def _load(row: Row, axes: Sequence[Axis] = LOAD) -> str:
    return ", ".join(axis.text(row[axis.column]) for axis in axes if known(row[axis.column]))


def _varied_columns(plan: Planned) -> list[common.Column]:
    """Returns the varied fields that no other column of the table shows."""
    elsewhere = {axis.column for axis in (*LOAD, DEVICES)}
    numbers = [axis for axis in varied_axes(plan) if axis.column not in elsewhere]
    texts = [n for n in plan.points.columns if n.startswith(VARIED) and plan.points[n].dtype != float]
    return [
        *((axis.title, "r", common.if_known(axis.column, recorded)) for axis in numbers),
        *((field_name(name), "l", common.field(name)) for name in texts),
    ]


def _limited_column(each: Limited) -> common.Column:
    metric, scale = each.limit.metric, each.scale

    def says(row: Row) -> str:
        ends = {"low": row[f"{metric}.low"], "high": row[f"{metric}.high"]}
        return with_interval({"value": row[metric], **ends}, scale) if known(row[metric]) else ""

    return scale.title, "r", says


def _usual_column(name: str, scale: Scale) -> common.Column:
    return scale.title, "r", common.if_known(name, replace(scale, unit="").text)


# -- prices and the plan as asked ------------------------------------------------------------------


def _prices(plan: Planned) -> list[Section]:
    given = plan.summary.get("price_shares") or {}
    whole = {str(name): float(share) for name, share in given.items() if known(share)}
    if not whole:
        return []
    flags = common.extrapolated(whole.get("extrapolated", 0.0), "runs of the answer", PRICED)
    return [common.sources({"the answer": whole}, PRICED, flags=flags)]


PRICED = "predicted device time"


def _asked(plan: Planned) -> list[Section]:
    """Shows plan.yaml, what the answer was made with, and the prices of each device."""
    details = []
    if plan.asked_text:
        details.append(Details("plan.yaml, with every default written out", text=plan.asked_text))
    made = {key: value for key, value in plan.provenance.items() if key != "devices"}
    table = Table(["made with", ""], [list(row) for row in common.flat(made)]) if made else None
    several = plan.provenance.get("devices")
    for own in several if isinstance(several, list) else ():
        device = own.get("device") if isinstance(own, dict) else None
        name = str(device.get("name") or "a device") if isinstance(device, dict) else "a device"
        rows = [list(row) for row in common.flat(own)]
        details.append(Details(f"Figures and prices of {name}", table=Table([name, ""], rows)))
    notes = [str(note) for note in plan.summary.get("notes") or ()]
    if not (details or table or notes):
        return []
    return [common.section("plan", "asked", table=table, notes=notes, details=details)]
