"""The serving study: which way of serving keeps its promises, how requests fare in it, and why.

A point is a workload on so many devices; a case is a strategy at a point. Axes that do not vary in a run are
not spoken of.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from simcore.reports.common import sections as common
from simcore.reports.common.figures import Variant, variants
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import REQUEST_MARK, SESSIONS, Run, extreme
from simcore.reports.serving import figures
from simcore.reports.serving.figures import Scale
from simcore.reports.text import counted, known, listed, percent, recorded, significant, times

AXES: Mapping[str, tuple[str, Callable[[float], str]]] = {
    # Before the rate, which it is.
    SESSIONS: ("offered rate (sessions/s)", lambda v: f"{recorded(v)}\u00a0sessions/s"),
    "rate_per_s": ("offered rate (requests/s)", lambda v: f"{recorded(v)}\u00a0requests/s"),
    "devices": ("devices", lambda v: counted(round(v), "device")),
    "requests": ("requests", lambda v: counted(round(v), "request")),
    "prompt_tokens": ("mean prompt (tokens)", lambda v: f"{recorded(v)}\u00a0prompt tokens"),
    "output_tokens": ("mean output (tokens)", lambda v: f"{recorded(v)}\u00a0output tokens"),
}
# In the Parquet files prompt_tokens and output_tokens are those of one request.
AXIS_IN_FILES = {SESSIONS: "rate_per_s", "prompt_tokens": "prompt_mean", "output_tokens": "output_mean"}
GANTT_REQUESTS = 48
BY_PRICES = "_by_prices"
WHOLE_RUN = "_whole_run"
# How the source of an interval begins that is no interval over repetitions.
BY_ORDER = "one replica; 95 % interval"
ROWS_SHOWN = 12
SIDE_BY_SIDE = 6
LEVEL_POINTS = 60_000
ZOOM = "On a wide screen, drag along the time axis to zoom; double-click to return."
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
    "prefix_hit_share": ("prompt tokens from the cache", "%", 100),
    "speedup": ("speed-up over concurrent instances", "×", 1),
    "overlap": ("overlap of an iteration", "%", 100),
}

LATENCY_FORMULAS: Sequence[tuple[str, Definition]] = [
    (
        "ttft",
        Definition("Time to first token (TTFT)", "ttft = first token − arrival", "One a request; vLLM's."),
    ),
    (
        "tpot",
        Definition(
            "Time per output token (TPOT)",
            "tpot = (e2e − ttft) / (output tokens − 1)",
            "One a request, none where it has one output token; vLLM's.",
        ),
    ),
    (
        "itl",
        Definition(
            "Inter-token latency (ITL)",
            "itl = time of a token − time of the token before it",
            "Pooled over all tokens of all requests, so that long answers count more than in TPOT; vLLM's.",
        ),
    ),
    ("e2e", Definition("End-to-end latency (E2EL)", "e2e = last token − arrival", "One a request; vLLM's.")),
    ("queue", Definition("Time in the queue", "queue = launch of a request's first work − its arrival")),
]
FORMULAS: Sequence[tuple[str, Definition]] = [
    (
        "duration_s",
        Definition(
            "Duration",
            "duration = finish of the last request − arrival of the first",
            "Flover's total latency. It is the denominator of every rate below.",
        ),
    ),
    ("request_throughput_per_s", Definition("Request throughput", "finished requests / duration")),
    (
        "output_throughput_tokens_per_s",
        Definition("Output throughput", "Σ output tokens of the finished requests / duration"),
    ),
    (
        "total_throughput_tokens_per_s",
        Definition("Total throughput", "Σ (prompt + output tokens) of the finished requests / duration"),
    ),
    (
        "goodput_per_s",
        Definition(
            "Goodput",
            "goodput = requests that meet every SLO / duration",
            "Requests per second, as in vLLM's benchmark: over the same duration as the throughput.",
        ),
    ),
    (
        "slo_attainment",
        Definition(
            "SLO attainment",
            "slo_attainment = requests that meet every SLO / requests",
            "Of TTFT, TPOT or E2EL alone: those that meet this one. A rejected request meets none.",
        ),
    ),
    (
        "utilisation",
        Definition("Utilisation", "Σ seconds in which a step runs / duration", "Mean over the servers."),
    ),
    (
        "mean_kv_share",
        Definition("KV in use", "blocks or slots held / blocks or slots there are", "Mean weighted by time."),
    ),
    (
        "prefix_hit_share",
        Definition(
            "Prefix hit share",
            "Σ prompt tokens found in a cache / Σ prompt tokens, of the finished requests",
            "Counted when a request is first scheduled; only where prefixes are cached.",
        ),
    ),
    (
        "iterations",
        Definition(
            "Iterations", "iterations = Σ replays over the steps", "Steps that only prefill do not count."
        ),
    ),
    (
        "overlap",
        Definition(
            "Overlap",
            "overlap = mean requests in an iteration / requests",
            "The share that runs at once; Flover's.",
        ),
    ),
    (
        "speedup",
        Definition(
            "Speed-up",
            "speedup = duration(concurrent instances) / duration",
            "At the same workload; Flover's.",
        ),
    ),
]
# Of runs that measure a window, in the place of those above.
WINDOW_FORMULAS: Mapping[str, Definition] = {
    "duration_s": Definition(
        "Duration",
        "duration = finish of the last request − arrival of the first",
        "Flover's total latency. It is the length of the window where the whole run is measured.",
    ),
    "window_begin_s": Definition(
        "Window",
        "window = first arrival after the first requests have been answered … last arrival",
        "The first requests: a tenth (warmup_share), in a closed loop at least one of each client; it begins"
        " no later than with the middle request. Latencies and attainment are of the requests that come in"
        " it, each followed to its end; rates and means over time are over its length. Largest values, counts"
        " and duration are of the whole run, and so is what ends in _whole_run in results.csv.",
    ),
    "offered_per_s": Definition("Offered rate", "offered = requests that come in the window / its length"),
    "request_throughput_per_s": Definition(
        "Request throughput", "requests that finish in the window / its length"
    ),
    "output_throughput_tokens_per_s": Definition(
        "Output throughput", "tokens that are generated in the window / its length"
    ),
    "total_throughput_tokens_per_s": Definition(
        "Total throughput",
        "(tokens that are generated + prompt tokens of the answers that begin) in the window / its length",
    ),
    "goodput_per_s": Definition(
        "Goodput",
        "goodput = requests that come in the window and meet every SLO / its length",
        "The offered rate by the SLO attainment. Of the whole run: those that meet every SLO / duration, as"
        " in vLLM's benchmark.",
    ),
    "slo_attainment": Definition(
        "SLO attainment",
        "slo_attainment = requests that meet every SLO / requests, of those that come in the window",
        "Of TTFT, TPOT or E2EL alone: those that meet this one. A rejected request meets none.",
    ),
    "utilisation": Definition(
        "Utilisation", "Σ seconds in which a step runs / length of the window", "Mean over the servers."
    ),
}
INTERVAL = Definition(
    "95 % interval",
    "mean ± t(0.975, R − 1) · s / √R",
    "Over R repetitions with other seeds; s: their standard deviation, t: Student's.",
)


def opening(run: Run) -> Opening:
    """The top of the page with up to six key figures."""
    return replace(common.opening(run), tiles=[*_tiles(run), *filter(None, [common.accuracy(run)])])


def sections(run: Run) -> list[Section]:
    """The serving study's sections, in the order of the page."""
    cases, levels = _cases(run, run.requests), _thin_levels(run)
    return [
        *_compared(run),
        *_distributions(run, cases),
        *_trends(run),
        *_tokens(run, levels),
        *_gantt(run, cases),
        *_levels(run, levels),
        *_slo(run),
        *_flover(run),
        *_published(run),
        *common.prices(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Formulas of the metrics that this run has, and of no others."""
    present = set(run.results["metric"])
    found = [d for name, d in LATENCY_FORMULAS if any(m.startswith(f"{name}_") for m in present)]
    of_window = WINDOW_FORMULAS if "window_begin_s" in present else {}
    every = {**dict(FORMULAS), **of_window}
    found += [definition for metric, definition in every.items() if metric in present]
    found += [INTERVAL] if _repeated(run.results) else []
    found += [common.share_formula(run)] if run.summary.get("price_shares") else []
    return found + common.error_formulas(run)


def scale_of(metric: str, values: "pd.Series[float]") -> Scale:
    """How a metric is shown, by its name and its largest value."""
    metric = metric.removesuffix(WHOLE_RUN)
    latency = re.fullmatch(r"(\w+)_(mean|p50|p90|p95|p99)_s", metric)
    largest = float(values.max()) if len(values) else 0.0
    if latency and latency[1] in LATENCIES:
        return figures.seconds(f"{LATENCIES[latency[1]]}, {PERCENTILES[latency[2]]}", largest)
    if metric in OTHER_METRICS:
        return Scale(*OTHER_METRICS[metric])
    name = metric.removesuffix("_s").replace("_", " ")
    return figures.seconds(name, largest) if metric.endswith("_s") else Scale(name)


def _scale(run: Run, metric: str) -> Scale:
    """The same unit for all figures of a latency, whichever percentile they are."""
    family = metric.split("_", 1)[0]
    names = run.results["metric"]
    own = (
        names.str.startswith(f"{family}_") & names.str.endswith("_s")
        if family in LATENCIES
        else names == metric
    )
    return scale_of(metric, run.results.loc[own, "value"])


# -- points and cases ------------------------------------------------------------------------------

Point = tuple[tuple[str, float], ...]  # varied axes with their values
Case = tuple[str, Point]


def varied(rows: pd.DataFrame) -> tuple[str, ...]:
    """The axes along which these rows differ, without those that follow from the ones before them."""
    kept: list[str] = []
    # Published figures say nothing of sessions.
    axes = [axis for axis in AXES if axis in rows.columns]
    apart, places = 1, rows[axes].drop_duplicates()
    for axis in axes:
        count = len(places[[*kept, axis]].drop_duplicates())
        if count > apart:
            kept, apart = [*kept, axis], count
    return tuple(kept)


def points(rows: pd.DataFrame) -> list[Point]:
    """The points of these rows, in the order of their axes."""
    axes = list(varied(rows))
    if not axes:
        return [()]
    places = rows[axes].drop_duplicates().sort_values(axes)
    return [tuple(zip(axes, map(float, place), strict=True)) for place in places.itertuples(index=False)]


def _same(column: Any, value: float) -> NDArray[np.bool_]:
    # A value that went through a CSV file may differ in its last digit from the one in a Parquet file.
    values = np.asarray(column, dtype=float)
    same: NDArray[np.bool_] = np.isclose(values, value, rtol=1e-6, atol=0.0, equal_nan=True)
    return same


def at(rows: pd.DataFrame, point: Point) -> pd.DataFrame:
    """The rows at a point."""
    chosen = np.ones(len(rows), dtype=bool)
    for axis, value in point:
        chosen &= _same(rows[axis], value)
    return rows[chosen]


def point_text(point: Point) -> str:
    """ "8 requests/s, 2 devices"."""
    return ", ".join(AXES[axis][1](value) if known(value) else f"no {AXES[axis][0]}" for axis, value in point)


def _groups(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[NDArray[np.intp]]:
    """Positions of the rows that are equal in these columns; NaN is equal to NaN."""
    code = np.zeros(len(frame), dtype=np.int64)
    for name in columns:
        codes, values = pd.factorize(frame[name])
        code = code * (len(values) + 1) + codes + 1
    order = np.argsort(code, kind="stable")
    yield from (part for part in np.split(order, np.flatnonzero(np.diff(code[order])) + 1) if len(part))


def _cases(run: Run, frame: pd.DataFrame) -> dict[Case, NDArray[np.intp]]:
    """Label and point of the results -> positions of the case's rows in a frame of a Parquet file."""
    found: dict[Case, NDArray[np.intp]] = {}
    every, labels = points(run.results), set(run.results["label"])
    axes = [axis for axis, _ in every[0]] if every else []
    names = [AXIS_IN_FILES.get(axis, axis) for axis in axes]
    for rows in _groups(frame, ["label", *names]):
        first = frame.iloc[rows[0]]
        place = [float(first[name]) for name in names]
        for point in every:
            if first["label"] in labels and all(_same(v, w) for v, (_, w) in zip(place, point, strict=True)):
                found[str(first["label"]), point] = rows
    return found


def _shown(run: Run) -> list[Variant]:
    return variants(run.results, by=())


def _points(run: Run, having: set[Point] | None = None) -> common.Dimension:
    """The points of the run, opening on the one that the answer is about."""
    found = [p for p in points(run.results) if having is None or p in having]
    _, wanted = _best(run)
    opens = found.index(wanted) if wanted in found else len(found) - 1
    return "Workload", [(point_text(p), p) for p in found], opens


def _repeated(rows: pd.DataFrame) -> bool:
    """Whether intervals are those of repetitions: one run has some, too, by the order of its requests."""
    alone = rows["source"].astype(str).str.startswith(BY_ORDER)
    return bool(((rows["low"] < rows["high"]) & ~alone).any())


# -- key figures -----------------------------------------------------------------------------------


def _heaviest(rows: pd.DataFrame) -> Point:
    """The point with the most tokens a second for each device, or else with the most requests."""
    every = points(rows)
    length = rows["prompt_tokens"].fillna(0.0) + rows["output_tokens"].fillna(0.0)
    load = (rows["rate_per_s"].fillna(0.0) * length / rows["devices"].fillna(1.0)).round(9)
    heaviest = rows.assign(load=load).sort_values(["load", "requests"], kind="stable").tail(1)
    return next((point for point in every if len(at(heaviest, point))), every[-1] if every else ())


def _best(run: Run) -> tuple[str, Point]:
    """Label and point that the answer is about: the point of the summary, or else the one with the heaviest
    load, and there the strategy that the summary names, or that the answer names first, or else the one that
    keeps the most promises, or is the quickest."""
    point = _given(run) or _heaviest(run.results)
    rows = run.ranked(at(run.results, point))
    if (best := str(run.summary.get("best") or "")) in set(rows["label"]):
        return best, point
    answer = str(run.summary.get("answer") or "")
    named = [(answer.index(v), -len(v), v) for v in rows["label"].unique() if v and v in answer]
    return (min(named)[2] if named else _leader(rows)), point


def _given(run: Run) -> Point:
    """The point that the summary names; () where it names none, or none of the run's."""
    named = run.best_at
    return next(
        (
            point
            for point in points(run.results)
            if point and all(axis in named and _same([v], named[axis]).all() for axis, v in point)
        ),
        (),
    )


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


def _tiles(run: Run) -> list[Tile]:
    label, point = _best(run)
    where = ", ".join(part for part in (label, point_text(point)) if part)
    rows = at(run.results, point)
    rows = rows[(rows["label"] == label) & rows["value"].notna()]
    values = dict(zip(rows["metric"], rows["value"], strict=True))
    found = []
    for metric, means in TILES:
        if metric in values:
            scale = scale_of(metric, pd.Series([values[metric]]))
            share = values.get("slo_attainment", math.nan)
            more = f"{percent(share)} of requests keep every SLO" if known(share) else ""
            offered = values.get("offered_per_s", math.nan)
            more += f", of {significant(offered)} a second offered" if known(offered) else ""
            kept = metric == "goodput_per_s" and known(share)
            found.append(Tile(scale.text(values[metric]), means, more if kept else where))
    return found


# -- strategies side by side -----------------------------------------------------------------------

MAIN = (
    ("ttft_p50_s", "TTFT p50"), ("ttft_p99_s", "TTFT p99"), ("tpot_p50_s", "TPOT p50"),
    ("tpot_p99_s", "TPOT p99"), ("e2e_p50_s", "E2E p50"), ("e2e_p99_s", "E2E p99"),
    ("output_throughput_tokens_per_s", "output"), ("goodput_per_s", "goodput"),
    ("slo_attainment", "within SLO"), ("utilisation", "utilisation"),
)  # fmt: skip
MORE = (
    ("itl_p50_s", "ITL p50"), ("itl_p99_s", "ITL p99"), ("queue_p50_s", "queued p50"),
    ("queue_p99_s", "queued p99"), ("request_throughput_per_s", "requests"), ("duration_s", "duration"),
    ("mean_batch", "batch, mean"), ("max_batch", "batch, most"), ("mean_queue", "queue, mean"),
    ("max_queue", "queue, most"), ("mean_kv_share", "KV, mean"), ("max_kv_share", "KV, most"),
    ("prefix_hit_share", "prompts cached"),
    ("preemptions", "preempted"), ("rejected", "rejected"), ("completed", "finished"),
)  # fmt: skip
Columns = Sequence[tuple[str, str]]


def _with_interval(row: pd.Series, scale: Scale) -> str:
    """ "12.3 ± 0.4"; an interval that is not even about its middle in full."""
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


def _table(run: Run, columns: Columns, at_points: Sequence[Point]) -> Table:
    """A row a case, those of a point together."""
    scales = {metric: _scale(run, metric) for metric, _ in columns}
    several = len(at_points) > 1
    lines = []
    for point, variant in itertools.product(at_points, _shown(run)):
        rows = at(run.results, point)
        rows = rows[(rows["label"] == variant.label) & rows["value"].notna()].drop_duplicates("metric")
        cells = {row["metric"]: _with_interval(row, scales[row["metric"]]) for _, row in rows.iterrows()
                 if row["metric"] in scales}  # fmt: skip
        if cells:
            place = [point_text(point)] if several else []
            lines.append([variant.label, *place, *(cells.get(metric, "") for metric, _ in columns)])
    units = {metric: f" ({scale.unit})" if scale.unit else "" for metric, scale in scales.items()}
    head = ["strategy", *(["workload"] if several else []), *(name + units[m] for m, name in columns)]
    return common.without_empty_columns(Table(head, lines, ("ll" if several else "l") + "r" * len(columns)))


def _side_by_side(run: Run, columns: Columns, point: Point) -> Table:
    """A column a strategy, a row a metric; a row a strategy where that would be too wide."""
    table = _table(run, columns, [point])
    if len(table.rows) > SIDE_BY_SIDE:
        return table
    lines = [[name, *(row[i] for row in table.rows)] for i, name in enumerate(table.head)]
    head, *rest = lines or [[""]]
    return Table(["", *head[1:]], rest, "l" + "r" * len(table.rows), wraps=True)


def _interval_note(run: Run) -> list[str]:
    if run.results["source"].astype(str).str.startswith(BY_ORDER).any():
        return [
            "± of a percentile: 95 % interval by the order of its requests, as if these were independent."
        ]
    if not _repeated(run.results):
        return []
    count = run.scenario.get("replicas")
    if count == 1:
        return []
    over = f" over {count} repetitions with other seeds" if isinstance(count, int) else ""
    return [f"±: half of the 95 % interval{over}."]


def _by_prices(run: Run, every: Sequence[Point]) -> list[Details]:
    """What the intervals of the prices make of the figures, where a run has tried them."""
    metrics = [name for name in dict.fromkeys(run.results["metric"]) if name.endswith(BY_PRICES)]
    if not metrics:
        return []
    columns = [(name, _metric_name(name.removesuffix(BY_PRICES))) for name in metrics]
    summary = "With all prices at the fast and at the slow end of their intervals (first repetition)"
    return [Details(summary, table=_table(run, columns, every))]


WINDOW = (
    ("window_begin_s", "from"), ("window_end_s", "to"), ("window_requests", "requests"),
    ("offered_per_s", "offered"), ("goodput_per_s", "goodput"), (f"goodput_per_s{WHOLE_RUN}", "whole run"),
    ("slo_attainment", "within SLO"), (f"slo_attainment{WHOLE_RUN}", "whole run"),
    ("ttft_p99_s", "TTFT p99"), (f"ttft_p99_s{WHOLE_RUN}", "whole run"),
    ("tpot_p99_s", "TPOT p99"), (f"tpot_p99_s{WHOLE_RUN}", "whole run"),
    ("output_throughput_tokens_per_s", "output"),
    (f"output_throughput_tokens_per_s{WHOLE_RUN}", "whole run"),
)  # fmt: skip


def _measured_note(run: Run) -> list[str]:
    """What was measured of the runs, and what was cut of the one that the answer is about."""
    label, point = _best(run)
    rows = at(run.results, point)
    rows = rows[(rows["label"] == label) & rows["value"].notna()]
    values = dict(zip(rows["metric"], rows["value"], strict=True))
    if "window_requests" not in values:
        return []
    every, measured = float(rows["requests"].max()), values["window_requests"]
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


def _compared(run: Run) -> list[Section]:
    every, (_, point) = points(run.results), _best(run)
    main = _side_by_side(run, MAIN, point)
    if not main.rows:
        return []
    whole = _table(run, MAIN, every)
    more = _table(run, MORE, every)
    where = f" at {point_text(point)}" if point else ""
    details = [Details(f"All {len(whole.rows)} cases", table=whole)] if len(every) > 1 else []
    details += [Details("Queue, batch, KV and the rest", table=more)] if len(more.rows) else []
    if len(run.metric("window_begin_s")):
        summary = "What is measured of each run, beside the whole run"
        details.append(Details(summary, table=_table(run, WINDOW, every)))
    details += _by_prices(run, every)
    return [
        Section(
            key="strategies",
            heading=f"Strategies side by side{where}",
            short="Strategies",
            table=main,
            notes=[*_measured_note(run), *_interval_note(run)],
            details=details,
        )
    ]


# -- distributions ---------------------------------------------------------------------------------

SAMPLES: Sequence[tuple[str, str, str]] = [
    ("TTFT", "ttft_s", "time to first token"),
    ("TPOT", "tpot_s", "time per output token"),
    ("E2E", "e2e_s", "end-to-end latency"),
]


def _latencies(requests: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Seconds of every request by the name of their SLO, NaN where it has none."""
    columns = ("arrival_s", "first_token_s", "finish_s", "output_tokens")
    arrival, first, finish, count = (requests[name].to_numpy(dtype=float) for name in columns)
    per_token = (finish - first) / np.where(count > 1, count - 1, np.nan)
    return {"ttft_s": first - arrival, "tpot_s": per_token, "e2e_s": finish - arrival}


def _bound(run: Run, name: str) -> float | None:
    bounds = run.summary.get("slo") or run.scenario.get("slo")
    bound = bounds.get(name) if isinstance(bounds, dict) else None
    return float(bound) if bound is not None and known(bound) else None


def _of_which_repetitions(run: Run) -> str:
    if run.requests["replica"].nunique() > 1:
        return "All repetitions together"
    return "The first repetition" if _repeated(run.results) else "All requests"


def _distributions(run: Run, cases: Mapping[Case, NDArray[np.intp]]) -> list[Section]:
    if not cases:
        return []
    shown, latencies = _shown(run), _latencies(run.requests)
    measured = run.requests[REQUEST_MARK].to_numpy() != 0.0
    cut = not measured.all()
    cases = {case: rows[measured[rows]] for case, rows in cases.items()}

    def draw(sample: tuple[str, str], point: Point) -> go.Figure:
        name, title = sample
        own = {label: latencies[name][rows] for (label, there), rows in cases.items() if there == point}
        return figures.distributions(own, shown, title, _bound(run, name))

    samples = [(text, (name, title)) for text, name, title in SAMPLES]
    dimensions: list[common.Dimension] = [("Latency", samples, 0), _points(run, {p for _, p in cases})]
    return [
        Section(
            key="distributions",
            heading="How long requests wait, and how many of them",
            short="Distributions",
            lead="Share of requests that are served within a time: further left is better.",
            plots=[Plot("distributions", "distribution of latencies", **common.views(dimensions, draw))],
            notes=[
                f"{_of_which_repetitions(run)}; rejected requests{', warm-up and drain' if cut else ''}"
                " are left out."
            ],
        )
    ]


# -- metrics against what varies -------------------------------------------------------------------

TRENDS = (
    ("TTFT p99", "ttft_p99_s"), ("TPOT p50", "tpot_p50_s"), ("TPOT p99", "tpot_p99_s"),
    ("goodput", "goodput_per_s"),
    ("output", "output_throughput_tokens_per_s"), ("duration", "duration_s"), ("speed-up", "speedup"),
)  # fmt: skip


def _others(rows: pd.DataFrame, axis: str, wanted: Point) -> common.Dimension:
    """What is held while an axis varies: the points of all other axes."""
    axes = [name for name in varied(rows) if name != axis]
    held = rows[axes].drop_duplicates().sort_values(axes) if axes else pd.DataFrame(index=[0])
    found: list[Point] = [
        tuple(zip(axes, map(float, place), strict=True)) for place in held.itertuples(index=False)
    ]
    best = tuple((name, value) for name, value in wanted if name != axis)
    return "At", [(point_text(p), p) for p in found], found.index(best) if best in found else len(found) - 1


def _trend(run: Run, axis: str, metrics: Sequence[common.Option]) -> Plot:
    shown, (title, text) = _shown(run), AXES[axis]
    places = sorted(run.results[axis].dropna().unique())

    def draw(metric: str, point: Point) -> go.Figure:
        every = run.metric(metric)
        scale = _scale(run, metric)
        top = scale.factor if scale.unit == "%" else math.inf
        rows = at(every, point)
        return figures.against(rows[rows[axis].notna()], shown, (axis, title), places, scale, text, top)

    others = _others(run.results, axis, _best(run)[1])
    dimensions: list[common.Dimension] = [("Metric", metrics, 0), others]
    name = title.split(" (", 1)[0]
    views = common.views(dimensions, draw)
    return Plot(f"against-{axis}", f"metrics against {name}", heading=f"Against {name}", **views)


def _trends(run: Run) -> list[Section]:
    metrics = [(name, metric) for name, metric in TRENDS if len(run.metric(metric))]
    axes = [axis for axis in varied(run.results) if run.results[axis].nunique() > 1]
    if not metrics or not axes:
        return []
    names = listed(AXES[axis][0].split(" (", 1)[0] for axis in axes)
    plots = [_trend(run, axis, metrics) for axis in axes]
    repeated = _repeated(run.results)
    return [
        Section(
            key="trends",
            heading=f"Against {names}",
            short="Trends",
            plots=[replace(plot, heading="") for plot in plots] if len(plots) == 1 else plots,
            notes=["A band is the 95 % interval over repetitions."] if repeated else [],
        )
    ]


# -- over time -------------------------------------------------------------------------------------

LEVELS = (
    ("queue", ("queue", Scale("waiting requests"))),
    ("batch", ("batch", Scale("requests in a step"))),
    ("KV use", ("kv_share", Scale("KV in use", "%", 100.0))),
)


def _thinned(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most so many rows, the first and the last among them."""
    rows = rows.sort_values("t_s", kind="stable")
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(int))]


def _thin_levels(run: Run) -> dict[Case, pd.DataFrame]:
    cases = _cases(run, run.levels)
    most = max(50, min(400, LEVEL_POINTS // max(1, len(cases))))
    return {case: _thinned(run.levels.iloc[rows], most) for case, rows in cases.items()}


def _over_time(
    run: Run, levels: Mapping[Case, pd.DataFrame], key: str, shown_levels: Sequence[common.Option]
) -> Plot:
    shown = _shown(run)

    def draw(level: tuple[str, Scale], point: Point) -> go.Figure:
        own = {label: rows for (label, there), rows in levels.items() if there == point}
        return figures.over_time(own, shown, *level, steps=key != "tokens")

    dimensions: list[common.Dimension] = [("Level", shown_levels, 0), _points(run, {p for _, p in levels})]
    described = " and ".join(level[1].name for _, level in shown_levels)
    return Plot(key, f"{described} over time", **common.views(dimensions, draw))


def _tokens(run: Run, levels: Mapping[Case, pd.DataFrame]) -> list[Section]:
    if not levels:
        return []
    plot = _over_time(run, levels, "tokens", [("", ("tokens", Scale("tokens generated so far")))])
    return [
        Section(
            key="tokens",
            heading="Tokens generated over time",
            short="Tokens",
            lead="All requests together: the steeper, the higher the throughput.",
            plots=[plot],
            notes=["The first repetition (as Flover's Figure 7)."],
        )
    ]


def _levels(run: Run, levels: Mapping[Case, pd.DataFrame]) -> list[Section]:
    if not levels:
        return []
    return [
        Section(
            key="levels",
            heading="Queue, batch and KV cache over time",
            short="Levels",
            lead="Where the queue grows until the last arrival, requests seem to come faster than is served.",
            plots=[_over_time(run, levels, "levels", LEVELS)],
            notes=[f"The first repetition. {ZOOM}"],
        )
    ]


# -- one bar a request -----------------------------------------------------------------------------


def _window(requests: pd.DataFrame, rows: NDArray[np.intp]) -> tuple[pd.DataFrame, int]:
    """Requests of the first repetition that stand side by side in the middle of the run, and of how many."""
    replica = requests["replica"].to_numpy()[rows]
    rows = rows[replica == replica.min()] if np.isfinite(replica).any() else rows
    rows = rows[np.argsort(requests["arrival_s"].to_numpy()[rows], kind="stable")]
    first = max(0, (len(rows) - GANTT_REQUESTS) // 2)
    return requests.iloc[rows[first : first + GANTT_REQUESTS]], len(rows)


def _gantt(run: Run, cases: Mapping[Case, NDArray[np.intp]]) -> list[Section]:
    if not cases:
        return []
    windows = {case: _window(run.requests, rows) for case, rows in cases.items()}
    present = {label for label, _ in windows}
    shown = [variant for variant in _shown(run) if variant.label in present]

    def draw(variant: Variant, point: Point) -> go.Figure:
        own, _ = windows.get((variant.label, point), (run.requests.head(0), 0))
        return figures.gantt(own)

    opens = [variant.label for variant in shown].index(_best(run)[0]) if _best(run)[0] in present else 0
    strategies: common.Dimension = ("Strategy", [(v.label, v) for v in shown], opens)
    views = common.views([strategies, _points(run, {p for _, p in cases})], draw)
    cut = any(count > GANTT_REQUESTS for _, count in windows.values())
    some = f"{GANTT_REQUESTS} requests from the middle of the run" if cut else "All requests"
    return [
        Section(
            key="requests",
            heading="What becomes of each request",
            short="Requests",
            lead="A bar a request: how long it waits, how long its prompt takes, and how long its tokens.",
            plots=[Plot("requests", "requests over time", **views)],
            notes=[f"{some}, first repetition (as Flover's Figure 1). {ZOOM}"],
        )
    ]  # fmt: skip


# -- who keeps the SLO -----------------------------------------------------------------------------

SLOS = (("every SLO", "slo_attainment", ""), ("TTFT", "slo_attainment_ttft", "ttft_s"),
        ("TPOT", "slo_attainment_tpot", "tpot_s"), ("E2E", "slo_attainment_e2e", "e2e_s"))  # fmt: skip


def _promises(run: Run) -> list[tuple[str, str]]:
    """(metric, what it takes) of every SLO of the run."""
    found = []
    for name, metric, bound in SLOS:
        limit = _bound(run, bound)
        more = f" ≤ {figures.limit_text(limit)}" if limit is not None else ""
        if len(run.metric(metric)):
            found.append((metric, name + more))
    return found


def _slo(run: Run) -> list[Section]:
    promises = _promises(run)
    if not promises:
        return []
    axes = [axis for axis in varied(run.results) if run.results[axis].nunique() > 1]
    plot = _slo_against(run, promises, axes[0]) if axes else _slo_alone(run, promises)
    return [
        Section(
            key="slo",
            heading="Who keeps the service-level objectives",
            short="SLO",
            lead=f"Objectives: {listed(text for metric, text in promises if metric != 'slo_attainment')}."
            if len(promises) > 1
            else "",
            plots=[plot],
        )
    ]


def _slo_alone(run: Run, promises: Sequence[tuple[str, str]]) -> Plot:
    rows = pd.concat([run.metric(metric).assign(place=text) for metric, text in promises])
    figure = figures.attainment(rows, _shown(run), [text for _, text in promises], "")
    return Plot("slo", "share of requests within each SLO", {(): figure})


def _slo_against(run: Run, promises: Sequence[tuple[str, str]], axis: str) -> Plot:
    title = AXES[axis][0]

    def draw(metric: str, point: Point) -> go.Figure:
        rows = at(run.metric(metric), point).sort_values(axis, kind="stable")
        rows = rows.assign(place=[recorded(value) for value in rows[axis]])
        return figures.attainment(rows, _shown(run), list(dict.fromkeys(rows["place"])), title)

    options: common.Dimension = ("Objective", [(text, metric) for metric, text in promises], 0)
    views = common.views([options, _others(run.results, axis, _best(run)[1])], draw)
    return Plot("slo", f"share of requests within the SLO against {title}", **views)


# -- Flover's figures ------------------------------------------------------------------------------


def _fastest_lead(run: Run, every: Sequence[Point]) -> str:
    ahead = run.metric("speedup")
    ahead = ahead[ahead["strategy"] != "concurrent_instances"]
    if ahead.empty:
        return ""
    best = extreme(ahead, ahead["value"])
    place = next((p for p in every if len(at(ahead.loc[[best.name]], p))), ())
    where = f"{best['label']}{' at ' + point_text(place) if place else ''}"
    if best["value"] <= 1:
        return f"None is faster than concurrent instances; closest: {where}, at {times(best['value'])}."
    return f"Up to {times(best['value'])} the speed of concurrent instances: {where}."


def _flover(run: Run) -> list[Section]:
    if not (run.results["strategy"] == "concurrent_instances").any() or run.metric("iterations").empty:
        return []
    every, (_, point) = points(run.results), _best(run)
    columns = (("duration_s", "duration"), ("speedup", "speed-up"), ("iterations", "iterations"),
               ("overlap", "overlap"))  # fmt: skip
    whole = _table(run, columns, every)
    short = whole if len(whole.rows) <= ROWS_SHOWN else _table(run, columns, [point])
    where = f" at {point_text(point)}" if short is not whole and point else ""
    hidden = [Details(f"All {len(whole.rows)} cases", table=whole)] if short is not whole else []
    return [
        Section(
            key="flover",
            heading=f"Against concurrent instances{where}",
            short="Speed-up",
            lead=_fastest_lead(run, every),
            table=short,
            notes=["Flover's figures: the more requests share an iteration, the fewer there are."],
            details=hidden,
        )
    ]


# -- predicted against published -------------------------------------------------------------------


def _published(run: Run) -> list[Section]:
    """What every study has, with the published figures and the predictions before it."""
    rows = run.comparison[run.comparison["reference"].notna() & run.comparison["predicted"].notna()]
    found = common.comparison(run)
    if rows.empty or not found:
        return found
    rows = rows.assign(label=rows["label"].where(rows["label"] != "", rows["strategy"]))
    shown = variants(pd.concat([run.results, rows]).reset_index(drop=True), by=())
    axes = varied(rows)
    axis = (axes[0], AXES[axes[0]][0]) if axes else ("label", "")
    largest = {metric: own[["predicted", "reference"]].max(axis=1) for metric, own in rows.groupby("metric")}

    def draw(metric: str, point: Point) -> go.Figure:
        own = at(rows[rows["metric"] == metric], point)
        return figures.compared(own, shown, axis, scale_of(metric, largest[metric]), run.found)

    metrics = [(_metric_name(metric), metric) for metric in dict.fromkeys(rows["metric"])]
    dimensions: list[common.Dimension] = [("Metric", metrics, 0), _others(rows, axis[0], ())]
    plot = Plot("compared", f"published and {run.found}", heading=f"Published and {run.found}",
                **common.views(dimensions, draw))  # fmt: skip
    errors = [replace(other, heading="Errors") for other in found[0].plots]
    return [replace(found[0], plots=[plot, *errors]), *found[1:]]


def _metric_name(metric: str) -> str:
    return scale_of(metric, pd.Series(dtype=float)).name
