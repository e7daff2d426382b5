"""The tiling study: how a long convolution is decoded, what each order of its contributions costs, and why.

A case is a model, a batch and a length; what does not vary in a run is not spoken of.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.common.figures import Variant
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import Run, extreme
from simcore.reports.serving.figures import Scale
from simcore.reports.text import (
    counted,
    interval,
    known,
    milliseconds,
    percent,
    recorded,
    scientific,
    signed_percent,
    significant,
    times,
    times_of,
    tokens,
)
from simcore.reports.tiling import figures

AXES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "layers": ("layers", lambda v: counted(round(v), "layer")),
    "channels": ("channels", lambda v: counted(round(v), "channel")),
    "block": ("block", lambda v: f"{v} blocks"),
    "tokens": ("tokens", lambda v: f"{tokens(v)}\u00a0tokens"),
    "prompt_tokens": ("prompt", lambda v: f"prompt of {tokens(v)}"),
    "batch": ("batch", lambda v: f"batch\u00a0{v:,.0f}"),
    "devices": ("devices", lambda v: counted(round(v), "device")),
}
POINTS_OF_ALL = 60_000
SLOPE_FROM = 1024
TILES_ROWS_SHOWN = 12
PLACE = Definition(
    "Positions and layers",
    "z_l,t = Σ over i ≤ t of a_(l−1),i · k_l,(t−i)",
    "Flash Inference, section 2.1. The mixer sums contributions of inputs i to outputs t; in which order and "
    "in which launches is the strategy.",
)
FORMULAS: Sequence[tuple[str, Definition]] = [
    ("total_s", Definition("Time of the whole generation", "end of the last token − start of the run")),
    (
        "tokens_per_s",
        Definition("Tokens per second", "generated tokens · batch / time of the whole generation"),
    ),
    (
        "token_p50_s",
        Definition(
            "Latency of a token",
            "end of the token − end of the token before it",
            "What is launched after a token and not waited for is paid by a later one.",
        ),
    ),
    (
        "mixer_s",
        Definition(
            "Mixer and blocks",
            "Σ seconds of the ops of a kind, over all launches",
            "Mixer: all contributions of one position to another. Blocks: MLP or gates, and the next input.",
        ),
    ),
    (
        "speedup_over_lazy",
        Definition(
            "Speed-up over lazy",
            "time(lazy) / time",
            "Of the whole generation, or of the mixer's seconds alone. Lazy does the histories of all layers "
            "in one launch; low and high: with prices at the ends of their intervals.",
        ),
    ),
    (
        "speedup_over_lazy_by_layers",
        Definition("Speed-up over lazy, layer by layer", "time(lazy, a launch a layer) / time"),
    ),
    (
        "mixer_flops",
        Definition(
            "Mixer work",
            "lazy, eager:  B · c · L · (L + 1)\nAlgorithm 1:  Σ over q of 2^(P−1−q) · T(2^q, 2^q),  L = 2^P",
            "Flash Inference, Theorem 2: L/2 tiles of side 1, L/4 of side 2, … one of side L/2 a layer.",
        ),
    ),
    (
        "memory_bytes",
        Definition(
            "Memory",
            "activations + filters + weights + temporaries",
            "By formula: at its peak, of one device.",
        ),
    ),
    (
        "activation_positions_per_token",
        Definition("Activations read and written", "positions of activations that are moved / tokens"),
    ),
]
PREDICTED_TILES = (
    "Predicted, not measured: these are the prices by which hybrid chooses, not times of this run. "
)
ENDS: Mapping[str, str] = {
    "predicted": "with all prices at either end of their intervals",
    "measured": "of the slowest and the fastest runs",
}
MEASURED_SPEED_UP = Definition(
    "Speed-up over lazy",
    "time(lazy) / time",
    "Of the whole generation, or of the mixer's seconds alone, each of its median run. Lazy does the "
    "histories of all layers in one launch; low and high: of the runs that make it least and largest.",
)
SLOPE = Definition(
    "Slope", "least squares of log₂ value against log₂ tokens", f"From {SLOPE_FROM:,} tokens, if so many."
)


def opening(run: Run) -> Opening:
    """The top of the page with up to six key figures."""
    return replace(common.opening(run), tiles=[*_tiles(run), *filter(None, [_inside(run)])])


def sections(run: Run) -> list[Section]:
    """The tiling study's sections, in the order of the page."""
    return [
        *_triangle(run),
        *_cumulative(run),
        *_latency(run),
        *_tile_costs(run),
        *_shares(run),
        *_sweep(run),
        *_growth(run),
        *_all_figures(run),
        *_published(run),
        *common.prices(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Formulas of the metrics that this run has, and of no others."""
    present = set(run.results["metric"])
    told = {**dict(FORMULAS), **({"speedup_over_lazy": MEASURED_SPEED_UP} if run.measured else {})}
    found = [PLACE, *(definition for metric, definition in told.items() if metric in present)]
    found += [SLOPE] if len(run.growth) else []
    found += [common.share_formula(run)] if run.summary.get("price_shares") else []
    return found + common.error_formulas(run)


# -- cases -----------------------------------------------------------------------------------------

Case = tuple[tuple[str, Any], ...]  # axes that vary in the run, with their values


def _axes(run: Run) -> list[str]:
    return [axis for axis in AXES if run.results.loc[run.results["label"] != "", axis].nunique() > 1]


def cases_of(frame: pd.DataFrame, axes: Sequence[str]) -> list[Case]:
    """The cases of a frame in the order of their axes; axes that it does not have are left out."""
    own = [axis for axis in axes if axis in frame.columns]
    if not own:
        return [()] if len(frame) else []
    places = frame[own].dropna().drop_duplicates().sort_values(own, kind="stable")
    return [tuple(zip(own, place, strict=True)) for place in places.itertuples(index=False, name=None)]


def at(frame: pd.DataFrame, case: Case) -> pd.DataFrame:
    """The rows of a case, as far as the frame has its axes."""
    chosen = np.ones(len(frame), dtype=bool)
    for axis, value in case:
        if axis in frame.columns:
            chosen &= (frame[axis] == value).to_numpy()
    return frame[chosen]


def case_text(case: Case) -> str:
    """ "36 layers, 64K tokens, batch 8"."""
    return ", ".join(AXES[axis][1](value) for axis, value in case)


def _answered(run: Run) -> Case:
    """The case that is shown first: of those that most strategies have (some may not fit into memory) the
    longest, of those the largest model, of those the largest batch."""
    rows = run.metric("total_s")
    every, order = cases_of(rows, _axes(run)), ("tokens", "layers", "channels", "batch")

    def size(case: Case) -> tuple[float, ...]:
        values = dict(case)
        return at(rows, case)["label"].nunique(), *(float(values.get(axis, 0.0)) for axis in order)

    return max(every, key=size, default=())


def _dimension(run: Run, frame: pd.DataFrame) -> common.Dimension:
    """The cases of a frame, opening on the one that the answer is about."""
    found = cases_of(frame, _axes(run))
    wanted = dict(_answered(run))
    opens = [i for i, case in enumerate(found) if all(wanted.get(axis) == value for axis, value in case)]
    return "Case", [(case_text(case), case) for case in found], opens[0] if opens else len(found) - 1


def _value(rows: pd.DataFrame, label: str, metric: str) -> float:
    own = rows[(rows["label"] == label) & (rows["metric"] == metric) & (rows["op_kind"] == "")]
    return float(own["value"].iloc[0]) if len(own) else math.nan


# -- key figures -----------------------------------------------------------------------------------


def _best(run: Run, rows: pd.DataFrame) -> str:
    """The strategy that the answer names first, or else the quickest."""
    answer = str(run.summary.get("answer") or "")
    total = run.ranked(rows[(rows["metric"] == "total_s") & rows["value"].notna()])
    if total.empty:
        return ""
    fastest = str(extreme(total, total["value"], largest=False)["label"])
    named = [v for v in total["label"].unique() if v and v in answer and v.partition(",")[0] != "lazy"]
    return fastest if fastest in answer or not named else max(named, key=len)


def _tiles(run: Run) -> list[Tile]:
    case = _answered(run)
    rows = at(run.results, case)
    label = _best(run, rows)
    where = ", ".join(part for part in (label, case_text(case)) if part)
    found = {name: _value(rows, label, name) for name in dict.fromkeys(rows["metric"])}
    slowest, middle = found.get("token_max_s", math.nan), found.get("token_p50_s", math.nan)
    lazy = _value(rows, "lazy", "total_s")
    against = f"lazy takes {figures.lasting(lazy)}" if known(lazy) and label != "lazy" else ""
    made = [
        (figures.lasting(found.get("total_s", math.nan)), "Time of the whole generation", where),
        (times(found.get("speedup_over_lazy", math.nan)), "Speed-up over lazy, end to end", against),
        (times(found.get("mixer_speedup_over_lazy", math.nan)), "Speed-up of the mixer alone", ""),
        (milliseconds(slowest), "Slowest token", f"median {milliseconds(middle)}" if known(middle) else ""),
    ]
    return [Tile(value, means, more) for value, means, more in made if any(c.isdigit() for c in value)]


# -- the triangle ----------------------------------------------------------------------------------


def _areas(cells: pd.DataFrame) -> bytes:
    """What is equal for strategies that cover the triangle alike, whatever their tiles are computed by."""
    places = [
        "launch",
        *(f"{end}_{what}" for what in ("input", "output", "lag") for end in ("first", "last")),
    ]
    kinds = ",".join("tile" if str(kind).startswith("tile_") else str(kind) for kind in cells["op_kind"])
    return cells[places].fillna(-1.0).to_numpy().tobytes() + kinds.encode()


def _triangle(run: Run) -> list[Section]:
    labels = [v.label for v in figures.variants(run.results)]
    present = list(dict.fromkeys(run.cells["label"].astype(str)))
    labels = [label for label in labels if label in present] + [p for p in present if p not in labels]
    if not labels:
        return []
    alike: dict[bytes, list[str]] = {}
    for label in labels:
        alike.setdefault(_areas(run.cells[run.cells["label"] == label]), []).append(label)
    plots = []
    for number, same in enumerate(alike.values()):
        own = run.cells[run.cells["label"] == same[0]]
        count = counted(own["launch"].nunique(), "launch", "launches")
        name = "; ".join([same[0], *(label.removeprefix(f"{same[0].split(',')[0]}, ") for label in same[1:])])
        plots.append(
            Plot(
                f"triangle-{number}",
                f"which launch accounts for which contribution: {name}",
                {(): figures.triangle(own)},
                heading=f"{name}: {count} with mixer work",
            )
        )
    last = run.cells[["last_input", "last_output"]].max().max()
    return [
        Section(
            key="triangle",
            heading="Which launch accounts for which contribution",
            short="Triangle",
            lead="Every contribution of an input to an output is a square of the triangle; an outlined area "
            "is done by one op. Fewer and squarer areas are cheaper: point at one to see its launch.",
            plots=plots,
            notes=[
                f"A run of {last + 1:.0f} positions, first layer, as the strategies launched it (Flash "
                "Inference, Figure 1). Outputs run downwards; no area may begin before its inputs are known."
            ],
        )
    ]


# -- over positions --------------------------------------------------------------------------------


def _points(run: Run) -> int:
    lines = len(run.steps[["label", "layers", "channels", "tokens", "batch"]].drop_duplicates())
    return max(96, min(512, POINTS_OF_ALL // max(1, lines)))


def _over_positions(
    run: Run, key: str, describes: str, draw: Callable[[pd.DataFrame, Sequence[Variant], int], go.Figure]
) -> Plot:
    shown, most = figures.variants(run.results), _points(run)
    views = common.views([_dimension(run, run.steps)], lambda case: draw(at(run.steps, case), shown, most))
    return Plot(key, describes, **views)


def _cumulative(run: Run) -> list[Section]:
    if run.steps.empty:
        return []
    plot = _over_positions(run, "cumulative", "time since the start over position", figures.cumulative)
    return [
        Section(
            key="cumulative",
            heading="Time by position",
            short="Cumulative",
            lead="How long it takes to get to a position: where a line is straight, each token costs the "
            "same; where it bends upwards, a token costs more the more have been before it.",
            plots=[plot],
            notes=["As Flash Inference's Figures 2a and 2b."],
        )
    ]


def _latency(run: Run) -> list[Section]:
    if not (run.steps["latency_s"] > 0).any():
        return []
    plot = _over_positions(run, "latency", "latency of a token over position", figures.latency_over_position)
    return [
        Section(
            key="latency",
            heading="Latency of each token",
            short="Latency",
            lead="Tilings pay for large tiles at few positions: a spike is a token that waits for one. Lazy "
            "is slowest at the end, eager at the start.",
            plots=[plot],
            notes=[
                "Of every stretch of positions the slowest token is drawn (as Flash Inference's Figure 3b)."
            ],
        )
    ]


# -- tiles -----------------------------------------------------------------------------------------


def _choices(tiles: pd.DataFrame) -> str:
    """What hybrid takes: "flash_conv up to side 64, flash_fft from 128"."""
    chosen = tiles[tiles["chosen"] > 0].sort_values("side", kind="stable")
    stretches: list[tuple[str, float, float]] = []
    for name, side in zip(chosen["implementation"].astype(str), chosen["side"], strict=True):
        if stretches and stretches[-1][0] == name:
            stretches[-1] = (name, stretches[-1][1], side)
        else:
            stretches.append((name, side, side))
    parts = [
        f"{name} at side {tokens(low)}"
        if low == high
        else f"{name} from side {tokens(low)} to {tokens(high)}"
        for name, low, high in stretches
    ]
    return ", ".join(parts)


def _priced_by(run: Run) -> str:
    """Whose prices the tiles have."""
    profile = run.provenance.get("profile")
    name = profile.get("name") if isinstance(profile, dict) else profile
    if not run.measured:
        return "this run"
    return f"the profile {name}" if name else "datasheet and roofline"


def _tile_costs(run: Run) -> list[Section]:
    tiles = run.tiles[run.tiles["seconds"] > 0]
    if tiles.empty:
        return []
    dimension = _dimension(run, tiles)
    views = common.views([dimension], lambda case: figures.tile_costs(at(tiles, case)))
    opened = dimension[1][dimension[2]]
    taken = _choices(at(tiles, opened[1]))
    where = f", at {opened[0]}," if len(dimension[1]) > 1 else ""
    hybrid = f" Hybrid takes{where} {taken}." if taken else ""
    warned = PREDICTED_TILES if run.measured else ""
    lines = [[text, _choices(at(tiles, case))] for text, case in dimension[1]]
    table = Table(["case", "what hybrid takes"], lines)
    return [
        Section(
            key="tiles",
            heading="What a tile is predicted to cost" if run.measured else "What a tile costs",
            short="Tiles",
            lead=f"{warned}The broad line is the cheapest way for each side.{hybrid}",
            plots=[Plot("tiles", "time of a tile by its side and implementation", **views)],
            notes=[f"One tile of all layers in one launch, by the prices of {_priced_by(run)}; the "
                   "interval of a price is shown on hover (as Flash Inference's Figure 3a)."],
            details=[Details("What hybrid takes in every case", table=table)] if len(lines) > 1 else [],
        )
    ]  # fmt: skip


# -- shares and speed-ups --------------------------------------------------------------------------


def _parts(rows: pd.DataFrame, shown: Sequence[Variant]) -> dict[str, dict[str, float]]:
    found = {}
    for variant in shown:
        mixer, block, total = (_value(rows, variant.label, m) for m in ("mixer_s", "block_s", "total_s"))
        if known(mixer) and known(block):
            rest = total - mixer - block if known(total) else 0.0
            found[variant.label] = {"mixer_s": mixer, "block_s": block, "rest_s": max(0.0, rest)}
    return found


def _by_kind(run: Run) -> list[Details]:
    rows = at(run.metric("seconds"), _answered(run))
    rows = rows[(rows["op_kind"] != "") & (rows["value"] > 0)]
    if rows.empty:
        return []
    sums = rows.groupby("label")["value"].sum()
    lines = [
        [
            row["label"],
            row["op_kind"],
            figures.lasting(row["value"]),
            percent(row["value"] / sums[row["label"]]),
        ]
        for _, row in rows.sort_values(["label", "value"], ascending=[True, False], kind="stable").iterrows()
    ]
    case = case_text(_answered(run))
    summary = f"Device time by kind of op{f', {case}' if case else ''}"
    return [Details(summary, table=Table(["strategy", "op", "seconds", "share"], lines, "llrr"))]


def _speed_lead(run: Run) -> str:
    rows = at(run.metric("speedup_over_lazy"), _answered(run))
    rows = rows[rows["strategy"] != "lazy"].reset_index(drop=True)
    if rows.empty:
        return ""
    best = extreme(rows, rows["value"])
    mixer = _value(at(run.results, _answered(run)), best["label"], "mixer_speedup_over_lazy")
    more = f" end to end and {times(mixer)} in the mixer alone" if known(mixer) else " end to end"
    faster = f"{best['label']} is {times(best['value'])} as fast as lazy{more}"
    return f"{faster}: what the mixer saves is bounded by the blocks, which no tiling changes."


def _shares(run: Run) -> list[Section]:
    shown = figures.variants(run.results)
    dimension = _dimension(run, run.results[run.results["label"] != ""])
    plots = []
    if len(_parts(at(run.results, _answered(run)), shown)):
        views = common.views([dimension], lambda case: figures.shares(_parts(at(run.results, case), shown)))
        plots.append(Plot("shares", "mixer and blocks by strategy", heading="Mixer and blocks", **views))
    speed = run.results[run.results["metric"].isin([metric for metric, _, _ in figures.SPEED_UPS])]
    if (speed["value"] > 0).any():
        views = common.views(
            [dimension], lambda case: figures.speed_ups(at(speed, case), shown, ENDS[run.found])
        )
        plots.append(Plot("speed-ups", "speed-up over lazy", heading="Speed-up over lazy", **views))
    if not plots:
        return []
    return [
        Section(
            key="shares",
            heading="What the time consists of",
            short="Shares",
            lead=_speed_lead(run),
            plots=plots,
            notes=[f"A bar across a mark: the speed-up {ENDS[run.found]}."]
            if (speed["low"] < speed["high"]).any()
            else [],
            details=_by_kind(run),
        )
    ]


# -- a sweep ---------------------------------------------------------------------------------------


def _map(rows: pd.DataFrame, axes: Sequence[str], limit: float) -> go.Figure:
    """One metric of one strategy: the batch (or else the last axis) across, all others down."""
    across = "batch" if "batch" in axes else axes[-1]
    down = [axis for axis in axes if axis != across]
    columns, lines = cases_of(rows, [across]), cases_of(rows, down)
    values = []
    for line in lines:
        own = [at(at(rows, line), column)["value"] for column in columns]
        values.append([float(v.iloc[0]) if len(v) else math.nan for v in own])
    names = [case_text(line).replace(", ", " · ") for line in lines]
    shown = [f"{column[0][1]:,.0f}" if across != "block" else str(column[0][1]) for column in columns]
    return figures.speed_up_map(values, (names, shown), ("", AXES[across][0]), limit)


def _sweep_lead(run: Run, axes: Sequence[str]) -> str:
    label = _best(run, at(run.results, _answered(run)))
    rows = run.metric("speedup_over_lazy")
    rows = rows[rows["label"] == label]
    if rows.empty:
        return ""
    every = run.metric("mixer_speedup_over_lazy")
    mixer = every.loc[every["label"] == label, "value"]
    more = f", in the mixer alone {times_of(mixer)}" if len(mixer) else ""
    named = [AXES[axis][0] for axis in axes]
    over = f"Over {counted(len(rows), 'case')} ({', '.join(named)})"
    return f"{over}, {label} is {times_of(rows['value'])} as fast as lazy, end to end{more}."


def _sweep(run: Run) -> list[Section]:
    axes = _axes(run)
    names = {"speedup_over_lazy": "end to end", "mixer_speedup_over_lazy": "mixer only"}
    metrics = [(text, metric) for metric, text in names.items() if len(run.metric(metric))]
    shown = [v for v in figures.variants(run.results) if v.label != "lazy"]
    shown = [v for v in shown if (run.metric("speedup_over_lazy")["label"] == v.label).any()]
    if not axes or not metrics or not shown:
        return []
    best = _best(run, at(run.results, _answered(run)))
    limits = {
        m: 2 ** max(0.5, float(np.abs(np.log2(run.metric(m)["value"].where(lambda v: v > 0))).max()))
        for _, m in metrics
    }

    def draw(metric: str, label: str) -> go.Figure:
        rows = run.metric(metric)
        return _map(rows[rows["label"] == label], axes, limits[metric])

    opens = [i for i, v in enumerate(shown) if v.label == best]
    labels: common.Dimension = ("Strategy", [(v.label, v.label) for v in shown], opens[0] if opens else 0)
    views = common.views([("Speed-up", metrics, 0), labels], draw)
    return [
        Section(
            key="sweep",
            heading="Speed-up over lazy in every case",
            short="Sweep",
            lead=_sweep_lead(run, axes),
            plots=[Plot("sweep", "speed-up over lazy in every case", **views)],
            notes=["Blue: faster than lazy; brown: slower."],
        )
    ]


# -- growth ----------------------------------------------------------------------------------------

GROWTH: Sequence[tuple[str, str, tuple[tuple[float, str], ...]]] = [
    ("mixer_flops", "mixer work", ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))),
    ("mixer_hbm_bytes", "bytes moved by the mixer", ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))),
    ("memory_bytes", "memory", ((1e9, "GB"), (1e6, "MB"))),
    ("total_s", "time of the generation", ((1.0, "s"), (1e-3, "ms"))),
]


def slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Least squares of log2 value against log2 length, from `SLOPE_FROM` on where two or more are as long;
    NaN where there are fewer than two."""
    known_ones = [(n, v) for n, v in zip(lengths, values, strict=True) if known(n) and known(v) and v > 0]
    long = [(n, v) for n, v in known_ones if n >= SLOPE_FROM]
    used = long if len({n for n, _ in long}) > 1 else known_ones
    if len({n for n, _ in used}) < 2:
        return math.nan
    x, y = np.log2(np.asarray(used)).T
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def _growth_scale(metric: str, values: "pd.Series[float]") -> Scale:
    name, units = next((name, units) for m, name, units in GROWTH if m == metric)
    largest = float(values.max()) if len(values) else 0.0
    size, unit = next((pair for pair in units if largest >= 10 * pair[0]), units[-1])
    return Scale(name, unit, 1 / size)


def _slopes(run: Run, shown: Sequence[Variant], case: Case) -> Table:
    rows, lines = at(run.growth, case), []
    for variant in shown:
        own = rows[rows["label"] == variant.label].sort_values("tokens", kind="stable")
        found = [slope(own["tokens"].tolist(), own[metric].tolist()) for metric, _, _ in GROWTH]
        if any(known(value) for value in found):
            lines.append([variant.label, *(f"{value:.3f}" if known(value) else "" for value in found)])
    head = ["grows with the length to the power of", *(name for _, name, _ in GROWTH)]
    return common.without_empty_columns(Table(head, lines, "l" + "r" * len(GROWTH)))


def _growth_dimension(run: Run) -> common.Dimension:
    # Here the length is the axis, so it is not part of the case.
    axes = [axis for axis in _axes(run) if axis != "tokens"]
    found, wanted = cases_of(run.growth, axes), dict(_answered(run))
    opens = [i for i, case in enumerate(found) if all(wanted.get(axis) == value for axis, value in case)]
    return "Case", [(case_text(case), case) for case in found], opens[0] if opens else len(found) - 1


def _growth(run: Run) -> list[Section]:
    metrics = [(name, metric) for metric, name, _ in GROWTH if (run.growth[metric] > 0).any()]
    if not metrics or run.growth["tokens"].nunique() < 2:
        return []
    shown, dimension = figures.variants(run.results), _growth_dimension(run)
    scales = {metric: _growth_scale(metric, run.growth[metric]) for _, metric in metrics}

    def draw(metric: str, case: Case) -> go.Figure:
        return figures.growth(at(run.growth, case), shown, metric, scales[metric])

    views = common.views([("Against length", metrics, 0), dimension], draw)
    text, case = dimension[1][dimension[2]]
    slopes = _slopes(run, shown, case)
    whose = f"Slopes of {text}, f" if text else "F"
    return [
        Section(
            key="growth",
            heading="Growth with the length",
            short="Growth",
            lead="The steeper a line, the worse it fares with long texts: work that is quadratic in the "
            "length has the slope 2, work that is linear 1.",
            plots=[Plot("growth", "work, bytes, memory and time against length", **views)],
            table=slopes if slopes.rows else None,
            notes=[f"{whose}itted from {SLOPE_FROM:,} tokens on, by least squares of the logarithms."]
            if slopes.rows
            else [],
        )
    ]


# -- predicted against published -------------------------------------------------------------------

COMPARED: Mapping[str, str] = {"speedup_over_lazy": "end to end", "mixer_speedup_over_lazy": "mixer only"}


def _ranges(run: Run) -> dict[str, pd.DataFrame]:
    """Metric -> compared figures of which a range is published."""
    rows = run.comparison[
        run.comparison[["reference_low", "reference_high", "predicted"]].notna().all(axis=1)
    ]
    return {metric: rows[rows["metric"] == metric] for metric in COMPARED if (rows["metric"] == metric).any()}


def _range_text(rows: pd.DataFrame) -> str:
    low, high = rows["reference_low"].min(), rows["reference_high"].max()
    return f"{low:g} to {high:g}×" if low < high else f"about {low:g}×"


def _inside(run: Run) -> Tile | None:
    """How many of the end-to-end speed-ups are inside the published range; else the median error."""
    found = _ranges(run).get("speedup_over_lazy")
    if found is None:
        return common.accuracy(run)
    value = f"{(found['error_pct'] == 0).sum()} of {len(found)}"
    return Tile(value, f"Speed-ups inside the published {_range_text(found)}", "end to end")


def _range_table(found: Mapping[str, pd.DataFrame], word: str) -> Table:
    lines = []
    for metric, own in found.items():
        ends = dict.fromkeys((times(own["predicted"].min()), times(own["predicted"].max())))
        inside = f"{(own['error_pct'] == 0).sum()} of {len(own)}"
        sources = "; ".join(dict.fromkeys(own["source"]))
        lines.append([COMPARED[metric], _range_text(own), " to ".join(ends), inside, sources])
    return Table(["speed-up over lazy", "published", word, "inside", "source"], lines, "lrrrl")


def _published(run: Run) -> list[Section]:
    """Speed-ups beside the ranges that are published for them; what every study has where there are none."""
    found = _ranges(run)
    if not found:
        return common.comparison(run)
    rows = pd.concat(list(found.values()))
    axes = [axis for axis in _axes(run) if axis in rows.columns]

    def place(row: Mapping[Any, Any]) -> str:
        return ", ".join([str(row["label"]), *filter(None, [case_text(tuple((a, row[a]) for a in axes))])])

    every = [[COMPARED[row["metric"]], place(row), times(row["predicted"]), signed_percent(row["error_pct"])]
             for row in rows.to_dict("records")]  # fmt: skip
    details = Table(["speed-up", "case", run.found, "beyond the range"], every, "llrr")
    things = "measurements" if run.measured else "predictions"
    names = {metric: COMPARED[metric] for metric in found}
    said = [
        f"{COMPARED[metric]} {(own['error_pct'] == 0).sum()} of {len(own)}" for metric, own in found.items()
    ]
    return [
        Section(
            key="published",
            heading=f"{run.found.capitalize()} against published",
            short="Against published",
            lead=f"{things.capitalize()} inside the range that the paper states: {', '.join(said)}.",
            plots=[Plot("ranges", f"{run.found} speed-ups and their published ranges",
                        {(): figures.ranges(rows, names, place, run.found)})],
            table=_range_table(found, run.found),
            notes=[f"The band is what is published for all cases together; marks are {things}, hollow "
                   "where they are outside of it."],
            details=[Details(f"All {len(rows)} {things}", table=details)],
        )
    ]  # fmt: skip


# -- everything as a table -------------------------------------------------------------------------


def _gb(value: float) -> str:
    return f"{significant(value / 1e9)}\u00a0GB" if known(value) else ""


METRICS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("total_s", "whole generation", figures.lasting),
    ("speedup_over_lazy", "over lazy", times),
    ("mixer_speedup_over_lazy", "mixer over lazy", times),
    ("speedup_over_lazy_by_layers", "over lazy, layer by layer", times),
    ("mixer_speedup_over_lazy_by_layers", "mixer over lazy, layer by layer", times),
    ("token_p50_s", "token, median", milliseconds),
    ("token_p99_s", "token, 99 %", milliseconds),
    ("token_max_s", "token, slowest", milliseconds),
    ("tokens_per_s", "tokens/s", lambda v: significant(v, 3)),
    ("mixer_s", "mixer", figures.lasting),
    ("block_s", "blocks", figures.lasting),
    ("mixer_flops", "mixer FLOPs", scientific),
    ("flops", "FLOPs", scientific),
    ("mixer_hbm_bytes", "mixer bytes", _gb),
    ("hbm_bytes", "bytes moved", _gb),
    ("memory_bytes", "memory", _gb),
    ("launches", "launches", recorded),
    ("activation_positions_per_token", "positions moved per token", lambda v: significant(v, 3)),
]


def _cell(rows: pd.DataFrame, metric: str, column: str) -> float:
    return float(rows[column].get(metric, math.nan))


def _table(run: Run, cases: Sequence[Case]) -> Table:
    """A row a strategy and case; the time of the whole with its interval."""
    several, lines = len(cases) > 1, []
    for case in cases:
        rows = at(run.results, case)
        rows = rows[(rows["op_kind"] == "") & rows["value"].notna()]
        for variant in figures.variants(run.results):
            own = rows[rows["label"] == variant.label].drop_duplicates("metric").set_index("metric")
            if own.empty:
                continue
            cells = [show(_cell(own, m, "value")) if m in own.index else "" for m, _, show in METRICS]
            low, high = (_cell(own, "total_s", end) for end in ("low", "high"))
            bounds = interval(low, high)
            place = [case_text(case)] if several else []
            lines.append([variant.label, *place, cells[0], bounds, *cells[1:]])
    names = [name for _, name, _ in METRICS]
    bounds_are = "fastest to slowest (s)" if run.measured else "interval (s)"
    head = ["strategy", *(["case"] if several else []), names[0], bounds_are, *names[1:]]
    align = ("ll" if several else "l") + "r" * (len(METRICS) + 1)
    return common.without_empty_columns(Table(head, lines, align))


def _all_figures(run: Run) -> list[Section]:
    every = cases_of(run.results[run.results["label"] != ""], _axes(run))
    table = _table(run, [_answered(run)])
    if not table.rows:
        return []
    case = case_text(_answered(run))
    details = []
    if len(every) > 1:
        whole = _table(run, every)
        details = [Details(f"All {len(whole.rows)} rows of {len(every)} cases", table=whole)]
    return [
        Section(
            key="figures",
            heading=f"All figures{f': {case}' if case else ''}",
            short="All figures",
            table=table,
            details=details,
        )
    ]
