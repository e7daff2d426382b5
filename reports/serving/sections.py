"""The serving study: which strategies keep their SLOs, the course of requests in each, and the reasons.

A point is a workload on a number of devices; a case is a strategy at a point. The page omits axes that do not
vary in a run.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from simcore.reports.common import sections as common
from simcore.reports.common.beside import beside
from simcore.reports.common.cases import cases_of
from simcore.reports.common.figures import Scale, Variant, variants
from simcore.reports.common.sections import Row
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import REQUEST_MARK, SERVERS, SESSIONS, Run, extreme
from simcore.reports.serving import figures
from simcore.reports.text import counted, known, listed, percent, recorded, significant, times

AXES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    # Precedes the rate, because it is that rate.
    SESSIONS: ("offered rate (sessions/s)", lambda v: f"{recorded(v)}\u00a0sessions/s"),
    "rate_per_s": ("offered rate (requests/s)", lambda v: f"{recorded(v)}\u00a0requests/s"),
    "devices": ("devices", lambda v: counted(round(v), "device")),
    "requests": ("requests", lambda v: counted(round(v), "request")),
    "prompt_tokens": ("mean prompt (tokens)", lambda v: f"{recorded(v)}\u00a0prompt tokens"),
    "output_tokens": ("mean output (tokens)", lambda v: f"{recorded(v)}\u00a0output tokens"),
}
# In the Parquet files prompt_tokens and output_tokens belong to a single request.
AXIS_IN_FILES = {SESSIONS: "rate_per_s", "prompt_tokens": "prompt_mean", "output_tokens": "output_mean"}
GANTT_REQUESTS = 48
BY_PRICES = "_by_prices"
WHOLE_RUN = "_whole_run"
# Prefix of the source of an interval that does not come from repetitions.
BY_ORDER = "one replica; 95 % interval"
# A metric of one tenant's requests.
TENANT = re.compile(r"tenant\.([^.]+)\.(.+)")
ROWS_SHOWN = 12
SIDE_BY_SIDE = 6
LEVEL_POINTS = 60_000
PERCENTILES = {"mean": "mean", "p50": "median", **{f"p{q}": f"{q}th percentile" for q in (90, 95, 99)}}
LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "end-to-end latency",
    "queue": "time in the queue",
}
OTHER_METRICS: Mapping[str, tuple[str, str, float]] = {
    "request_throughput_per_s": ("answered requests", "requests/s", 1),
    "output_throughput_tokens_per_s": ("output", "tokens/s", 1),
    "total_throughput_tokens_per_s": ("prompt and output", "tokens/s", 1),
    "goodput_per_s": ("goodput", "requests/s", 1),
    "offered_per_s": ("offered", "requests/s", 1),
    "slo_attainment": ("requests within the SLO", "%", 100),
    "slo_attainment_ttft": ("within the SLO of TTFT", "%", 100),
    "slo_attainment_tpot": ("within the SLO of TPOT", "%", 100),
    "slo_attainment_e2e": ("within the SLO of end-to-end latency", "%", 100),
    "utilisation": ("time with a step running", "%", 100),
    "mean_kv_share": ("KV in use, mean", "%", 100),
    "max_kv_share": ("KV in use, most", "%", 100),
    "mean_batch": ("batch, mean", "", 1),
    "max_batch": ("batch, largest", "", 1),
    "mean_queue": ("queue, mean", "", 1),
    "max_queue": ("queue, longest", "", 1),
    "device_hours": ("device hours", "h", 1),
    "device_time_saved": ("device time saved", "%", 100),
    "mean_servers": ("servers, mean", "", 1),
    "max_servers": ("servers, most", "", 1),
    "prefix_hit_share": ("prompt tokens from the cache", "%", 100),
    "speedup": ("speed-up over concurrent instances", "×", 1),
    "overlap": ("overlap of an iteration", "%", 100),
}


Point = tuple[tuple[str, float], ...]  # varied axes with their values
Case = tuple[str, Point]
Columns = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Served:
    """A run of this study with tables that several sections use, each computed once. `given`: the strategies,
    if they are not to be drawn as the results have them."""

    run: Run
    given: Sequence[Variant] = ()

    @cached_property
    def shown(self) -> list[Variant]:
        """The strategies, as every figure shows them."""
        return list(self.given) or variants(self.run.results, by=())

    @cached_property
    def beside(self) -> "Served":
        """The run with its predicted figures beside the measured ones, if it has any."""
        return Served(*beside(self.run, self.shown))

    @cached_property
    def cases(self) -> dict[Case, NDArray[np.intp]]:
        """The rows of each case in the table of requests."""
        return _cases(self, self.run.requests)

    @cached_property
    def points(self) -> list[Point]:
        """The points of the run."""
        return points(self.run.results)

    @cached_property
    def axes(self) -> list[str]:
        """The axes against which figures are drawn."""
        rows = self.run.results
        return [axis for axis in varied(rows) if rows[axis].nunique() > 1]

    @cached_property
    def figures(self) -> dict[Case, dict[Any, Row]]:
        """The rows of each case, points before strategies: metric -> its row."""
        found: dict[Case, dict[Any, Row]] = {}
        rows = self.run.results[self.run.results["value"].notna()]
        for point in self.points:
            own = at(rows, point)
            cases = {label: of.drop_duplicates("metric") for label, of in own.groupby("label")}
            for variant in self.shown:
                records = cases[variant.label].to_dict("records") if variant.label in cases else []
                found[variant.label, point] = {row["metric"]: row for row in records}
        return found

    @cached_property
    def best(self) -> Case:
        """Label and point of the answer. The point is the summary's, or else the one with the heaviest load.
        The label is the summary's best, or else the first in the answer's text, or else the one with the
        highest SLO attainment, or the quickest one."""
        named = self.run.best_at
        given = (p for p in self.points if p and all(a in named and _same([v], named[a]).all() for a, v in p))
        point = next(given, None) or heaviest(self.run.results, self.points)
        rows = self.run.ranked(at(self.run.results, point))
        if (best := str(self.run.summary.get("best") or "")) in set(rows["label"]):
            return best, point
        answer = str(self.run.summary.get("answer") or "")
        said = [(answer.index(v), -len(v), v) for v in rows["label"].unique() if v and v in answer]
        return (min(said)[2] if said else _leader(rows)), point

    @cached_property
    def best_values(self) -> dict[str, float]:
        """The figures of the answer's case, by metric."""
        return {metric: row["value"] for metric, row in self.figures.get(self.best, {}).items()}

    @cached_property
    def scales(self) -> dict[str, Scale]:
        """The scale of each metric; all percentiles of a latency share one unit."""
        rows = self.run.results
        largest = rows.groupby("metric")["value"].max()
        families = {name: name.split("_", 1)[0] for name in largest.index if name.endswith("_s")}
        of_family = largest[largest.index.isin(families)].groupby(families).max()
        return {
            name: scale_of(name, of_family[family] if family in LATENCIES else largest[name])
            for name in largest.index
            for family in [families.get(name, "")]
        }

    def scale(self, metric: str) -> Scale:
        """Returns the scale of a metric, even if the run lacks it."""
        return self.scales.get(metric) or scale_of(metric)

    def dimension(self, having: Iterable[Case]) -> common.Dimension:
        """Returns the points of some cases as a choice that opens on the answer's point."""
        there = {point for _, point in having}
        found = [(point_text(point), point) for point in self.points if point in there]
        return common.opening_on("Workload", found, lambda point: point == self.best[1])

    def at_best(self, point: Point) -> str:
        """Returns a point as text: " at 8 requests/s"."""
        return f" at {point_text(point)}" if point else ""


def opening(run: Run) -> Opening:
    """Returns the top of the page with up to six key figures."""
    return replace(common.opening(run), tiles=[*_tiles(Served(run)), *filter(None, [common.accuracy(run)])])


def sections(run: Run) -> list[Section]:
    """Returns the serving study's sections, in the order of the page."""
    of = Served(run)
    levels = _thin_levels(of.beside)
    return [
        *_compared(of),
        *_distributions(of),
        *_trends(of),
        *_over_time(of.beside, levels, "tokens", TOKENS),
        *_gantt(of),
        *_over_time(of.beside, levels, "levels", _levels_shown(run)),
        *_slo(of),
        *_tenants(of),
        *_flover(of),
        *_published(run),
        *common.prices(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Returns the formulas of the metrics that this run has."""
    present = set(run.results["metric"])
    of_window = ["serving, of a window"] if "window_begin_s" in present else []
    found = common.formulas("latencies of serving", of=lambda n: any(m.startswith(f"{n}_") for m in present))
    found += common.formulas("serving", *of_window, of=present.__contains__)
    found += common.formulas("serving, repeated") if _repeated(run.results) else []
    found += common.share_formula(run) if run.summary.get("price_shares") else []
    return found + common.error_formulas(run)


def scale_of(metric: str, largest: float = 0.0) -> Scale:
    """Returns the scale of a metric by its name and its largest value."""
    metric, largest = metric.removesuffix(WHOLE_RUN), largest if known(largest) else 0.0
    if own := TENANT.fullmatch(metric):
        scale = scale_of(own[2], largest)
        return replace(scale, name=f"{scale.name}, {own[1]}")
    latency = re.fullmatch(r"(\w+)_(mean|p50|p90|p95|p99)_s", metric)
    if latency and latency[1] in LATENCIES:
        return figures.seconds(f"{LATENCIES[latency[1]]}, {PERCENTILES[latency[2]]}", largest)
    if metric in OTHER_METRICS:
        return Scale(*OTHER_METRICS[metric])
    name = metric.removesuffix("_s").replace("_", " ")
    return figures.seconds(name, largest) if metric.endswith("_s") else Scale(name)


# -- points and cases ------------------------------------------------------------------------------


def varied(rows: pd.DataFrame) -> tuple[str, ...]:
    """Returns the axes along which these rows differ, without axes determined by earlier ones."""
    kept: list[str] = []
    # Published figures have no column of sessions.
    axes = [axis for axis in AXES if axis in rows.columns]
    apart, places = 1, rows[axes].drop_duplicates()
    for axis in axes:
        count = len(places[[*kept, axis]].drop_duplicates())
        if count > apart:
            kept, apart = [*kept, axis], count
    return tuple(kept)


def points(rows: pd.DataFrame) -> list[Point]:
    """Returns the points of these rows, in the order of their axes."""
    return [*cases_of(rows, varied(rows), unknown=True)] or [()]


def _same(column: Any, value: float) -> NDArray[np.bool_]:
    # A value from a CSV file may differ in its last digit from the one in a Parquet file.
    values = np.asarray(column, dtype=float)
    same: NDArray[np.bool_] = np.isclose(values, value, rtol=1e-6, atol=0.0, equal_nan=True)
    return same


def at(rows: pd.DataFrame, point: Point) -> pd.DataFrame:
    """Returns the rows at a point."""
    chosen = np.ones(len(rows), dtype=bool)
    for axis, value in point:
        chosen &= _same(rows[axis], value)
    return rows[chosen]


def point_text(point: Point) -> str:
    """ "8 requests/s, 2 devices"."""
    return ", ".join(AXES[axis][1](value) if known(value) else f"no {AXES[axis][0]}" for axis, value in point)


def _cases(of: Served, frame: pd.DataFrame) -> dict[Case, NDArray[np.intp]]:
    """Returns label and point of the results -> positions of the case's rows in a frame of a Parquet file."""
    found: dict[Case, NDArray[np.intp]] = {}
    labels = set(of.run.results["label"])
    names = [AXIS_IN_FILES.get(axis, axis) for axis, _ in of.points[0]]
    groups = frame.groupby(["label", *names], dropna=False, observed=True, sort=False)
    for rows in map(np.asarray, groups.indices.values()):
        first = frame.iloc[rows[0]]
        place = [float(first[name]) for name in names]
        for point in of.points:
            if first["label"] in labels and all(_same(v, w) for v, (_, w) in zip(place, point, strict=True)):
                found[str(first["label"]), point] = rows
    return found


def _repeated(rows: pd.DataFrame) -> bool:
    """Whether some intervals come from repetitions; a single run has others, by the order of its requests."""
    alone = rows["source"].astype(str).str.startswith(BY_ORDER)
    return bool(((rows["low"] < rows["high"]) & ~alone).any())


# -- key figures -----------------------------------------------------------------------------------


def heaviest(rows: pd.DataFrame, every: Sequence[Point]) -> Point:
    """Returns the point with the most tokens a second for each device, or else with the most requests."""
    length = rows["prompt_tokens"].fillna(0.0) + rows["output_tokens"].fillna(0.0)
    load = (rows["rate_per_s"].fillna(0.0) * length / rows["devices"].fillna(1.0)).round(9)
    last = rows.assign(load=load).sort_values(["load", "requests"], kind="stable").tail(1)
    return next((point for point in every if len(at(last, point))), every[-1])


def _leader(rows: pd.DataFrame) -> str:
    for metric, largest in (("slo_attainment", True), ("e2e_mean_s", False), ("duration_s", False)):
        own = rows[(rows["metric"] == metric) & rows["value"].notna()]
        if len(own):
            return str(extreme(own, own["value"], largest)["label"])
    return ""


TILES = (
    ("ttft_p99_s", "TTFT, 99th percentile"),
    ("tpot_p50_s", "TPOT, median"),
    ("tpot_p99_s", "TPOT, 99th percentile"),
    ("goodput_per_s", "Goodput"),
    ("output_throughput_tokens_per_s", "Output"),
)


def _tiles(of: Served) -> list[Tile]:
    values, (label, point) = of.best_values, of.best
    where = ", ".join(part for part in (label, point_text(point)) if part)
    share, offered = (values.get(name, math.nan) for name in ("slo_attainment", "offered_per_s"))
    kept = f"{percent(share)} of requests keep every SLO" if known(share) else where
    kept += f", of {significant(offered)} a second offered" if known(share) and known(offered) else ""
    return [
        Tile(scale_of(m, values[m]).text(values[m]), means, kept if m == "goodput_per_s" else where)
        for m, means in TILES
        if m in values
    ]


# -- strategies side by side -----------------------------------------------------------------------

MAIN = (
    ("ttft_p50_s", "TTFT p50"), ("ttft_p99_s", "TTFT p99"), ("tpot_p50_s", "TPOT p50"),
    ("tpot_p99_s", "TPOT p99"), ("e2e_p50_s", "E2E p50"), ("e2e_p99_s", "E2E p99"),
    ("output_throughput_tokens_per_s", "output"), ("goodput_per_s", "goodput"),
    ("slo_attainment", "within SLO"), ("utilisation", "utilisation"),
    ("mean_servers", "servers"), ("device_time_saved", "device time saved"),
)  # fmt: skip
MORE = (
    ("itl_p50_s", "ITL p50"), ("itl_p99_s", "ITL p99"), ("queue_p50_s", "queued p50"),
    ("queue_p99_s", "queued p99"), ("request_throughput_per_s", "requests"), ("duration_s", "duration"),
    ("mean_batch", "batch, mean"), ("max_batch", "batch, most"), ("mean_queue", "queue, mean"),
    ("max_queue", "queue, most"), ("mean_kv_share", "KV, mean"), ("max_kv_share", "KV, most"),
    ("prefix_hit_share", "prompts cached"), ("waited_for_kv", "waited for KV"),
    ("preemptions", "preempted"), ("rejected", "rejected"), ("completed", "finished"),
)  # fmt: skip


def with_interval(row: Row, scale: Scale) -> str:
    """Returns "12.3 ± 0.4"; an asymmetric interval is given in full."""
    value = significant(row["value"] * scale.factor)
    low, high = row["low"], row["high"]
    if not (known(low) and known(high)) or low == high:
        return value
    half = (high - low) / 2
    if half <= 1e-4 * abs(row["value"]):
        return value
    if abs(row["value"] - low - half) <= 0.02 * half:
        return f"{value} ± {significant(half * scale.factor, 1)}"
    return f"{value} ({significant(low * scale.factor)} to {significant(high * scale.factor)})"


def _column(of: Served, metric: str, name: str) -> common.Column:
    scale = of.scale(metric)

    def says(case: Case) -> str:
        row = of.figures[case].get(metric)
        return with_interval(row, scale) if row else ""

    return f"{name} ({scale.unit})" if scale.unit else name, "r", says


def _table(of: Served, columns: Columns, at_points: Sequence[Point]) -> Table:
    """Returns a row for each case, grouped by point."""
    metrics = {metric for metric, _ in columns}
    cases = [
        case
        for case, known_ones in of.figures.items()
        if case[1] in at_points and metrics & known_ones.keys()
    ]
    place = [("workload", "l", lambda case: point_text(case[1]))] if len(at_points) > 1 else []
    shown = [_column(of, metric, name) for metric, name in columns]
    table = common.tabled(cases, ("strategy", "l", lambda case: case[0]), *place, *shown)
    return common.without_empty_columns(table)


def _side_by_side(of: Served, columns: Columns, point: Point) -> Table:
    """Returns a column for each strategy and a row for each metric; if too wide, a row for each strategy."""
    table = _table(of, columns, [point])
    if len(table.rows) > SIDE_BY_SIDE:
        return table
    lines = [[name, *(row[i] for row in table.rows)] for i, name in enumerate(table.head)]
    head, *rest = lines or [[""]]
    return Table(["", *head[1:]], rest, "l" + "r" * len(table.rows), wraps=True)


def _interval_note(run: Run) -> list[str]:
    if run.results["source"].astype(str).str.startswith(BY_ORDER).any():
        return [
            "± or a range of a percentile: 95 % interval by the order of its requests, as if these were"
            " independent."
        ]
    count = run.scenario.get("replicas")
    if count == 1 or not _repeated(run.results):
        return []
    over = f" over {count} repetitions with other seeds" if isinstance(count, int) else ""
    return [f"±: half of the 95 % interval{over}."]


WINDOW = (
    ("window_begin_s", "from"), ("window_end_s", "to"), ("window_requests", "requests"),
    ("offered_per_s", "offered"), ("goodput_per_s", "goodput"), (f"goodput_per_s{WHOLE_RUN}", "whole run"),
    ("slo_attainment", "within SLO"), (f"slo_attainment{WHOLE_RUN}", "whole run"),
    ("ttft_p99_s", "TTFT p99"), (f"ttft_p99_s{WHOLE_RUN}", "whole run"),
    ("tpot_p99_s", "TPOT p99"), (f"tpot_p99_s{WHOLE_RUN}", "whole run"),
    ("output_throughput_tokens_per_s", "output"),
    (f"output_throughput_tokens_per_s{WHOLE_RUN}", "whole run"),
)  # fmt: skip


def _measured_note(of: Served) -> list[str]:
    """Describes the measured part of the runs, and the part cut off in the answer's run."""
    values, (label, _) = of.best_values, of.best
    if "window_requests" not in values:
        return []
    every, measured = of.figures[of.best]["window_requests"]["requests"], values["window_requests"]
    if measured >= every:
        return [
            f"Figures of {label} are of the whole run: all {every:,.0f} requests, with warm-up and drain."
        ]
    begin_s, end_s = values["window_begin_s"], values["window_end_s"]
    drain_s = values["duration_s"] - end_s
    return [
        f"Warm-up and drain are cut. {label[:1].upper()}{label[1:]}: figures are of the {measured:,.0f} of"
        f" {every:,.0f} requests that come from {significant(begin_s)} s, when the first ones have been"
        f" answered, until the last arrival at {significant(end_s)} s; the {significant(drain_s)} s after it"
        " count for no rate."
    ]


def _compared(of: Served) -> list[Section]:
    _, point = of.best
    main = _side_by_side(of, MAIN, point)
    if not main.rows:
        return []
    # Intervals of figures due to the intervals of prices, if the run has them.
    priced = [name for name in dict.fromkeys(of.run.results["metric"]) if name.endswith(BY_PRICES)]
    windowed = len(of.run.metric("window_begin_s")) > 0
    tables: list[tuple[str, Columns, bool]] = [
        ("All {} cases", MAIN, len(of.points) > 1),
        ("Queue, batch, KV and the rest", MORE, True),
        ("What is measured of each run, beside the whole run", WINDOW, windowed),
        (
            "With all prices at the fast and at the slow end of their intervals (first repetition)",
            [(name, scale_of(name.removesuffix(BY_PRICES)).name) for name in priced],
            bool(priced),
        ),
    ]
    made = [(title, _table(of, columns, of.points)) for title, columns, asked in tables if asked]
    notes = [*_measured_note(of), *_interval_note(of.run)]
    details = [Details(title.format(len(table.rows)), table=table) for title, table in made if table.rows]
    where = {"where": of.at_best(point)}
    return [common.section("serving", "strategies", where, table=main, notes=notes, details=details)]


# -- distributions ---------------------------------------------------------------------------------

SAMPLES: Sequence[tuple[str, str, str]] = [
    ("TTFT", "ttft_s", "time to first token"),
    ("TPOT", "tpot_s", "time per output token"),
    ("E2E", "e2e_s", "end-to-end latency"),
]


def _latencies(requests: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Returns the seconds of every request by the name of their SLO, NaN if it has none."""
    columns = ("arrival_s", "first_token_s", "finish_s", "output_tokens")
    arrival, first, finish, count = (requests[name].to_numpy(dtype=float) for name in columns)
    per_token = (finish - first) / np.where(count > 1, count - 1, np.nan)
    return {"ttft_s": first - arrival, "tpot_s": per_token, "e2e_s": finish - arrival}


def _bound(run: Run, name: str) -> float | None:
    return _limit(run.summary.get("slo") or run.scenario.get("slo"), name)


def _limit(slo: Any, name: str) -> float | None:
    bound = slo.get(name) if isinstance(slo, dict) else None
    return float(bound) if bound is not None and known(bound) else None


def _of_which_repetitions(run: Run) -> str:
    if run.requests["replica"].nunique() > 1:
        return "All repetitions together"
    return "The first repetition" if _repeated(run.results) else "All requests"


def _distributions(of: Served) -> list[Section]:
    if not of.cases:
        return []
    both, latencies = of.beside, _latencies(of.beside.run.requests)
    counted_in = both.run.requests[REQUEST_MARK].to_numpy() != 0.0
    cases = {case: rows[counted_in[rows]] for case, rows in both.cases.items()}

    def draw(sample: tuple[str, str], point: Point) -> go.Figure:
        name, title = sample
        own = {label: latencies[name][rows] for (label, there), rows in cases.items() if there == point}
        return figures.distributions(own, both.shown, title, _bound(of.run, name))

    samples = [(text, (name, title)) for text, name, title in SAMPLES]
    dimensions = [("Latency", samples, 0), of.dimension(cases)]
    plot = common.plot("distributions", "distribution of latencies", dimensions, draw)
    cut = "" if counted_in.all() else ", warm-up and drain"
    which = {"repetitions": _of_which_repetitions(of.run), "cut": cut}
    return [common.section("serving", "distributions", which, plots=[plot])]


# -- metrics against varied axes -------------------------------------------------------------------

TRENDS = (
    ("TTFT p99", "ttft_p99_s"), ("TPOT p50", "tpot_p50_s"), ("TPOT p99", "tpot_p99_s"),
    ("goodput", "goodput_per_s"),
    ("output", "output_throughput_tokens_per_s"), ("duration", "duration_s"), ("speed-up", "speedup"),
)  # fmt: skip


def _others(rows: pd.DataFrame, axis: str, wanted: Point) -> common.Dimension:
    """Returns the points of the other axes, constant while one axis varies."""
    axes = [name for name in varied(rows) if name != axis]
    found = [(point_text(p), p) for p in cases_of(rows, axes, unknown=True) or [()]]
    best = tuple((name, value) for name, value in wanted if name != axis)
    return common.opening_on("At", found, lambda point: point == best)


def _axis_name(axis: str) -> str:
    return AXES[axis][0].split(" (", 1)[0]


def _trend(of: Served, axis: str, metrics: Sequence[common.Option]) -> Plot:
    run, (title, text) = of.run, AXES[axis]
    places = sorted(run.results[axis].dropna().unique())

    def draw(metric: str, point: Point) -> go.Figure:
        scale, rows = of.scale(metric), at(run.metric(metric), point)
        top = scale.factor if scale.unit == "%" else math.inf
        return figures.against(rows[rows[axis].notna()], of.shown, (axis, title), places, scale, text, top)

    dimensions = [("Metric", metrics, 0), _others(run.results, axis, of.best[1])]
    name = _axis_name(axis)
    return common.plot(f"against-{axis}", f"metrics against {name}", dimensions, draw, f"Against {name}")


def _trends(of: Served) -> list[Section]:
    metrics = [(name, metric) for name, metric in TRENDS if len(of.run.metric(metric))]
    if not metrics or not of.axes:
        return []
    plots = [_trend(of.beside, axis, metrics) for axis in of.axes]
    plots = [replace(plot, heading="") for plot in plots] if len(plots) == 1 else plots
    notes = ["A band is the 95 % interval over repetitions."] if _repeated(of.run.results) else []
    names = {"axes": listed(map(_axis_name, of.axes))}
    return [common.section("serving", "trends", names, plots=plots, notes=notes)]


# -- over time -------------------------------------------------------------------------------------

TOKENS = (("", ("tokens", Scale("tokens generated so far"))),)
LEVELS = (
    ("queue", ("queue", Scale("waiting requests"))),
    ("batch", ("batch", Scale("requests in a step"))),
    ("KV use", ("kv_share", Scale("KV in use", "%", 100.0))),
)
SERVERS_LEVEL = ("servers", (SERVERS, Scale("servers that hold their devices")))


def _levels_shown(run: Run) -> tuple[common.Option, ...]:
    return (*LEVELS, SERVERS_LEVEL) if SERVERS in run.levels else LEVELS


def _thinned(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """Returns at most `most` rows, including the first and the last."""
    rows = rows.sort_values("t_s", kind="stable")
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))]


def _thin_levels(of: Served) -> dict[Case, pd.DataFrame]:
    cases = _cases(of, of.run.levels)
    most = max(50, min(400, LEVEL_POINTS // max(1, len(cases))))
    return {case: _thinned(of.run.levels.iloc[rows], most) for case, rows in cases.items()}


def _over_time(
    of: Served, levels: Mapping[Case, pd.DataFrame], key: str, shown_levels: Sequence[common.Option]
) -> list[Section]:
    if not levels:
        return []

    def draw(level: tuple[str, Scale], point: Point) -> go.Figure:
        own = {label: rows for (label, there), rows in levels.items() if there == point}
        return figures.over_time(own, of.shown, *level, steps=key != "tokens")

    dimensions = [("Level", shown_levels, 0), of.dimension(levels)]
    described = " and ".join(level[1].name for _, level in shown_levels)
    plot = common.plot(key, f"{described} over time", dimensions, draw)
    return [common.section("serving", key, {"zoom": common.ZOOM}, plots=[plot])]


# -- one bar for each request ----------------------------------------------------------------------


def _window(requests: pd.DataFrame, rows: NDArray[np.intp]) -> tuple[pd.DataFrame, int]:
    """Returns requests of the first repetition from the middle of the run, and the number of all."""
    replica = requests["replica"].to_numpy()[rows]
    rows = rows[replica == replica.min()] if np.isfinite(replica).any() else rows
    rows = rows[np.argsort(requests["arrival_s"].to_numpy()[rows], kind="stable")]
    first = max(0, (len(rows) - GANTT_REQUESTS) // 2)
    return requests.iloc[rows[first : first + GANTT_REQUESTS]], len(rows)


def _gantt(of: Served) -> list[Section]:
    if not of.cases:
        return []
    windows = {case: _window(of.run.requests, rows) for case, rows in of.cases.items()}
    present, (best, _) = {label for label, _ in windows}, of.best
    labels = [variant.label for variant in of.shown if variant.label in present]

    def draw(label: str, point: Point) -> go.Figure:
        own, _ = windows.get((label, point), (of.run.requests.head(0), 0))
        return figures.gantt(own)

    opens = labels.index(best) if best in present else 0
    dimensions = [("Strategy", [(label, label) for label in labels], opens), of.dimension(of.cases)]
    plot = common.plot("requests", "requests over time", dimensions, draw)
    cut = any(count > GANTT_REQUESTS for _, count in windows.values())
    some = f"{GANTT_REQUESTS} requests from the middle of the run" if cut else "All requests"
    return [common.section("serving", "requests", {"some": some, "zoom": common.ZOOM}, plots=[plot])]


# -- attainment of the SLO -------------------------------------------------------------------------

SLOS = (("every SLO", "slo_attainment", ""), ("TTFT", "slo_attainment_ttft", "ttft_s"),
        ("TPOT", "slo_attainment_tpot", "tpot_s"), ("E2E", "slo_attainment_e2e", "e2e_s"))  # fmt: skip


def _promises(run: Run) -> list[tuple[str, str]]:
    """Returns (metric, name and limit as text) of every SLO of the run."""
    found = []
    for name, metric, bound in SLOS:
        limit = _bound(run, bound)
        more = f" ≤ {figures.limit_text(limit)}" if limit is not None else ""
        if len(run.metric(metric)):
            found.append((metric, name + more))
    return found


def _slo(of: Served) -> list[Section]:
    promises = _promises(of.run)
    if not promises:
        return []
    plot = _slo_against(of, promises, of.axes[0]) if of.axes else _slo_alone(of, promises)
    single = listed(text for metric, text in promises if metric != "slo_attainment")
    lead = f"Objectives: {single}." if len(promises) > 1 else ""
    return [common.section("serving", "slo", lead=lead, plots=[plot])]


def _slo_alone(of: Served, promises: Sequence[tuple[str, str]]) -> Plot:
    rows = pd.concat([of.run.metric(metric).assign(place=text) for metric, text in promises])
    figure = figures.attainment(rows, of.shown, [text for _, text in promises], "")
    return common.drawn("slo", "share of requests within each SLO", figure)


def _slo_against(of: Served, promises: Sequence[tuple[str, str]], axis: str) -> Plot:
    title = AXES[axis][0]

    def draw(metric: str, point: Point) -> go.Figure:
        rows = at(of.run.metric(metric), point).sort_values(axis, kind="stable")
        rows = rows.assign(place=[recorded(value) for value in rows[axis]])
        return figures.attainment(rows, of.shown, list(dict.fromkeys(rows["place"])), title)

    objectives = [(text, metric) for metric, text in promises]
    dimensions = [("Objective", objectives, 0), _others(of.run.results, axis, of.best[1])]
    return common.plot("slo", f"share of requests within the SLO against {title}", dimensions, draw)


# -- tenants ---------------------------------------------------------------------------------------

OF_TENANT = (
    ("offered_per_s", "offered"), ("ttft_p50_s", "TTFT p50"), ("ttft_p99_s", "TTFT p99"),
    ("tpot_p50_s", "TPOT p50"), ("tpot_p99_s", "TPOT p99"), ("e2e_p99_s", "E2E p99"),
    ("goodput_per_s", "goodput"), ("slo_attainment", "within SLO"), ("rejected", "rejected"),
)  # fmt: skip


def _tenants(of: Served) -> list[Section]:
    found = (TENANT.fullmatch(metric) for metric in of.run.results["metric"].unique())
    tenants = list(dict.fromkeys(own[1] for own in found if own))
    if not tenants:
        return []
    _, point = of.best
    cases = [(label, name) for label, there in of.figures if there == point for name in tenants]

    def column(metric: str, head: str) -> common.Column:
        rows = {case: of.figures[case[0], point].get(f"tenant.{case[1]}.{metric}") for case in cases}
        scale = scale_of(metric, max((row["value"] for row in rows.values() if row), default=0.0))

        def says(case: tuple[str, str]) -> str:
            row = rows[case]
            return with_interval(row, scale) if row else ""

        return f"{head} ({scale.unit})" if scale.unit else head, "r", says

    promised = _promised(of.run)
    table = common.tabled(
        cases,
        ("strategy", "l", lambda case: case[0]),
        ("tenant", "l", lambda case: case[1]),
        ("promised", "l", lambda case: promised.get(case[1], "")),
        *(column(*each) for each in OF_TENANT),
    )
    table = common.without_empty_columns(table)
    return [common.section("serving", "tenants", {"where": of.at_best(point)}, table=table)]


def _promised(run: Run) -> dict[str, str]:
    """Returns what each tenant is promised, in words, as the scenario says."""
    workload = run.scenario.get("workload")
    given = workload.get("tenants") if isinstance(workload, dict) else None
    found: dict[str, str] = {}
    for tenant in given if isinstance(given, list) else ():
        if isinstance(tenant, dict):
            slo = tenant.get("slo") or run.scenario.get("slo")
            limits = [(name, _limit(slo, bound)) for name, _, bound in SLOS if bound]
            words = [f"{name} ≤ {figures.limit_text(limit)}" for name, limit in limits if limit is not None]
            found[str(tenant.get("name"))] = ", ".join(words)
    return found


# -- Flover's figures ------------------------------------------------------------------------------


def _fastest_lead(of: Served) -> str:
    ahead = of.run.metric("speedup")
    ahead = ahead[ahead["strategy"] != "concurrent_instances"]
    if ahead.empty:
        return ""
    best = extreme(ahead, ahead["value"])
    place = next((p for p in of.points if len(at(ahead.loc[[best.name]], p))), ())
    where = f"{best['label']}{of.at_best(place)}"
    if best["value"] <= 1:
        return f"None is faster than concurrent instances; closest: {where}, at {times(best['value'])}."
    return f"Up to {times(best['value'])} the speed of concurrent instances: {where}."


FLOVER = (
    ("duration_s", "duration"), ("speedup", "speed-up"), ("iterations", "iterations"), ("overlap", "overlap"),
)  # fmt: skip


def _flover(of: Served) -> list[Section]:
    run, (_, point) = of.run, of.best
    if not (run.results["strategy"] == "concurrent_instances").any() or run.metric("iterations").empty:
        return []
    whole = _table(of.beside, FLOVER, of.points)
    if len(whole.rows) <= ROWS_SHOWN:
        short, hidden, where = whole, [], ""
    else:
        short, where = _table(of.beside, FLOVER, [point]), of.at_best(point)
        hidden = [Details(f"All {len(whole.rows)} cases", table=whole)]
    words, lead = {"where": where}, _fastest_lead(of)
    return [common.section("serving", "flover", words, lead=lead, table=short, details=hidden)]


# -- predicted against published -------------------------------------------------------------------


def _published(run: Run) -> list[Section]:
    """Returns the section of every study, preceded by figures of published values and predictions."""
    rows = run.comparison[run.comparison["reference"].notna() & run.comparison["predicted"].notna()]
    found = common.comparison(run)
    if rows.empty or not found:
        return found
    rows = rows.assign(label=rows["label"].where(rows["label"] != "", rows["strategy"]))
    shown = variants(pd.concat([run.results, rows]).reset_index(drop=True), by=())
    axes = varied(rows)
    axis = (axes[0], AXES[axes[0]][0]) if axes else ("label", "")
    largest = rows[["predicted", "reference"]].max(axis=1).groupby(rows["metric"]).max()

    def draw(metric: str, point: Point) -> go.Figure:
        own = at(rows[rows["metric"] == metric], point)
        return figures.compared(own, shown, axis, scale_of(metric, largest[metric]), run.times_are)

    metrics = [(scale_of(metric).name, metric) for metric in dict.fromkeys(rows["metric"])]
    dimensions = [("Metric", metrics, 0), _others(rows, axis[0], ())]
    name = f"ublished and {run.times_are}"
    plot = common.plot("compared", f"p{name}", dimensions, draw, f"P{name}")
    errors = [replace(other, heading="Errors") for other in found[0].plots]
    return [replace(found[0], plots=[plot, *errors]), *found[1:]]
