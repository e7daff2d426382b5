"""The tiling study: methods to decode a long convolution, the cost of each order of contributions, and
reasons.

A case is a model, a batch and a length; the page omits axes that do not vary in a run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.common.beside import beside, pairs
from simcore.reports.common.cases import Case, at, cases_of
from simcore.reports.common.figures import Scale, Variant
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import Run, extreme
from simcore.reports.text import (
    counted,
    interval,
    known,
    lasting,
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
PREDICTED_TILES = (
    "Predicted, not measured: these are the prices by which hybrid chooses, not times of this run. "
)
ENDS: Mapping[str, str] = {
    "predicted": "with all prices at either end of their intervals",
    "measured": "of the slowest and the fastest runs",
}


def opening(run: Run) -> Opening:
    """Returns the top of the page with up to six key figures."""
    return replace(common.opening(run), tiles=[*_tiles(run), *filter(None, [_inside(run)])])


def sections(run: Run) -> list[Section]:
    """Returns the tiling study's sections, in the order of the page."""
    return [
        *_triangle(run),
        *_over_positions(run, "cumulative", "time since the start", "end_s", figures.cumulative),
        *_over_positions(
            run, "latency", "latency of a token", "latency_s", figures.latency_over_position, noisy=True
        ),
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
    """Returns the formulas of the metrics that this run has."""
    groups = ["tiling", *(["tiling, measured"] if run.measured else [])]
    found = common.formulas("long convolution")
    found += common.formulas(*groups, of=set(run.results["metric"]).__contains__)
    found += common.formulas("growth") if len(run.growth) else []
    found += common.share_formula(run) if run.summary.get("price_shares") else []
    return found + common.error_formulas(run)


# -- cases -----------------------------------------------------------------------------------------


def _labelled(run: Run) -> pd.DataFrame:
    return run.results[run.results["label"] != ""]


def _axes(run: Run) -> list[str]:
    rows = _labelled(run)
    return [axis for axis in AXES if rows[axis].nunique() > 1]


def case_text(case: Case) -> str:
    """ "36 layers, 64K tokens, batch 8"."""
    return ", ".join(AXES[axis][1](value) for axis, value in case)


def _answered(run: Run) -> Case:
    """Returns the case shown first: among the cases of most strategies (some may not fit into memory) the
    longest, then the largest model, then the largest batch."""
    rows = run.metric("total_s")
    every, order = cases_of(rows, _axes(run)), ("tokens", "layers", "channels", "batch")

    def size(case: Case) -> tuple[float, ...]:
        values = dict(case)
        return at(rows, case)["label"].nunique(), *(float(values.get(axis, 0.0)) for axis in order)

    return max(every, key=size, default=())


def _dimension(run: Run, frame: pd.DataFrame, axes: Sequence[str] | None = None) -> common.Dimension:
    """Returns the cases of a frame along some or all axes as a choice that opens on the answer's case."""
    wanted = dict(_answered(run))
    found = [(case_text(case), case) for case in cases_of(frame, _axes(run) if axes is None else axes)]
    return common.opening_on("Case", found, lambda case: all(wanted.get(a) == value for a, value in case))


def _value(rows: pd.DataFrame, label: str, metric: str) -> float:
    own = rows[(rows["label"] == label) & (rows["metric"] == metric) & (rows["op_kind"] == "")]
    return float(own["value"].iloc[0]) if len(own) else math.nan


# -- key figures -----------------------------------------------------------------------------------


def _best(run: Run, rows: pd.DataFrame) -> str:
    """Returns the strategy that the answer names first, or else the quickest."""
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
    against = f"lazy takes {lasting(lazy)}" if known(lazy) and label != "lazy" else ""
    made = [
        (lasting(found.get("total_s", math.nan)), "Time of the whole generation", where),
        (times(found.get("speedup_over_lazy", math.nan)), "Speed-up over lazy, end to end", against),
        (times(found.get("mixer_speedup_over_lazy", math.nan)), "Speed-up of the mixer alone", ""),
        (milliseconds(slowest), "Slowest token", f"median {milliseconds(middle)}" if known(middle) else ""),
    ]
    return [Tile(value, means, more) for value, means, more in made if any(c.isdigit() for c in value)]


# -- the triangle ----------------------------------------------------------------------------------


def _areas(cells: pd.DataFrame) -> bytes:
    """Returns a key of the areas that a strategy covers, independent of the implementation of its tiles."""
    places = [
        "launch",
        *(f"{end}_{what}" for what in ("input", "output", "lag") for end in ("first", "last")),
    ]
    kinds = ",".join("tile" if str(kind).startswith("tile_") else str(kind) for kind in cells["op_kind"])
    return cells[places].fillna(-1.0).to_numpy().tobytes() + kinds.encode()


def _triangle(run: Run) -> list[Section]:
    present = dict.fromkeys(run.cells["label"].astype(str))
    if not present:
        return []
    known_ones = [v.label for v in figures.variants(run.results) if v.label in present]
    labels = list(dict.fromkeys([*known_ones, *present]))
    alike: dict[bytes, list[str]] = {}
    for label in labels:
        alike.setdefault(_areas(run.cells[run.cells["label"] == label]), []).append(label)
    plots: list[Plot] = []
    for first, *others in alike.values():
        own = run.cells[run.cells["label"] == first]
        count = counted(own["launch"].nunique(), "launch", "launches")
        name = "; ".join([first, *(label.removeprefix(f"{first.split(',')[0]}, ") for label in others)])
        described, figure = f"which launch accounts for which contribution: {name}", figures.triangle(own)
        heading = f"{name}: {count} with mixer work"
        plots.append(common.drawn(f"triangle-{len(plots)}", described, figure, heading))
    last = run.cells[["last_input", "last_output"]].max().max()
    return [common.section("tiling", "triangle", {"positions": f"{last + 1:.0f}"}, plots=plots)]


# -- over positions --------------------------------------------------------------------------------


Draw = Callable[[pd.DataFrame, Sequence[Variant], int], go.Figure]


def _over_positions(
    run: Run, key: str, what: str, column: str, draw: Draw, *, noisy: bool = False
) -> list[Section]:
    """Shows a figure over positions. With predictions beside them, strategies can be shown alone; if their
    lines are `noisy`, the answer's is at first."""
    if not (run.steps[column] > 0).any():
        return []
    alone = figures.variants(run.results)
    both, shown = beside(run, alone)
    steps = both.steps
    lines = len(steps[["label", "layers", "channels", "tokens", "batch"]].drop_duplicates())
    most = max(96, min(512, POINTS_OF_ALL // lines))
    best = _best(run, at(run.results, _answered(run))) if noisy else ""
    dimensions = [_dimension(run, run.steps), *pairs(alone, shown, best)]

    def drawn(case: Case, lines: Sequence[Variant] = shown) -> go.Figure:
        return draw(at(steps, case), lines, most)

    plot = common.plot(key, f"{what} over position", dimensions, drawn)
    return [common.section("tiling", key, plots=[plot])]


# -- tiles -----------------------------------------------------------------------------------------


def _choices(tiles: pd.DataFrame) -> str:
    """Returns hybrid's choices: "flash_conv up to side 64, flash_fft from 128"."""
    chosen = tiles[tiles["chosen"] > 0].sort_values("side", kind="stable")
    stretches: list[tuple[str, float, float]] = []
    for name, side in zip(chosen["implementation"].astype(str), chosen["side"], strict=True):
        if stretches and stretches[-1][0] == name:
            stretches[-1] = (name, stretches[-1][1], side)
        else:
            stretches.append((name, side, side))
    return ", ".join(
        f"{name} at side {tokens(low)}"
        if low == high
        else f"{name} from side {tokens(low)} to {tokens(high)}"
        for name, low, high in stretches
    )


def _priced_by(run: Run) -> str:
    """Returns the source of the tiles' prices."""
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
    _, options, opens = dimension
    text, case = options[opens]
    taken, where = _choices(at(tiles, case)), f", at {text}," if len(options) > 1 else ""
    words = {
        "is": "is predicted to cost" if run.measured else "costs",
        "warned": PREDICTED_TILES if run.measured else "",
        "hybrid": f" Hybrid takes{where} {taken}." if taken else "",
        "priced_by": _priced_by(run),
    }
    describes = "time of a tile by its side and implementation"
    plot = common.plot("tiles", describes, [dimension], lambda case: figures.tile_costs(at(tiles, case)))
    choices = ("what hybrid takes", "l", lambda option: _choices(at(tiles, option[1])))
    table = common.tabled(options, ("case", "l", lambda option: option[0]), choices)
    details = [Details("What hybrid takes in every case", table=table)] if len(options) > 1 else []
    return [common.section("tiling", "tiles", words, plots=[plot], details=details)]


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
    rows = rows.sort_values(["label", "value"], ascending=[True, False], kind="stable")
    table = common.tabled(
        rows.to_dict("records"),
        ("strategy", "l", common.field("label")),
        ("op", "l", common.field("op_kind")),
        ("seconds", "r", lambda row: lasting(row["value"])),
        ("share", "r", lambda row: percent(row["value"] / sums[row["label"]])),
    )
    case = case_text(_answered(run))
    return [Details(f"Device time by kind of op{f', {case}' if case else ''}", table=table)]


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
    both, shown = beside(run, figures.variants(run.results))
    dimensions, plots = [_dimension(run, _labelled(run))], []
    ends = {variant.label: ENDS["predicted" if variant.dash else run.times_are] for variant in shown}
    speed = both.results[both.results["metric"].isin([metric for metric, _, _ in figures.SPEED_UPS])]

    def parts(case: Case) -> go.Figure:
        return figures.shares(_parts(at(both.results, case), shown))

    def speed_ups(case: Case) -> go.Figure:
        return figures.speed_ups(at(speed, case), shown, ends)

    if len(_parts(at(both.results, _answered(run)), shown)):
        described = "mixer and blocks by strategy"
        plots.append(common.plot("shares", described, dimensions, parts, "Mixer and blocks"))
    if (speed["value"] > 0).any():
        name = "Speed-up over lazy"
        plots.append(common.plot("speed-ups", "speed-up over lazy", dimensions, speed_ups, name))
    if not plots:
        return []
    means = "; of a predicted one ".join(dict.fromkeys(ends.values()))
    notes = [f"A bar across a mark: the speed-up {means}."] if (speed["low"] < speed["high"]).any() else []
    parts_of = {"plots": plots, "notes": notes, "details": _by_kind(run)}
    return [common.section("tiling", "shares", lead=_speed_lead(run), **parts_of)]


# -- a sweep ---------------------------------------------------------------------------------------


def _map(rows: pd.DataFrame, axes: Sequence[str], limit: float) -> go.Figure:
    """Draws one metric of one strategy: the batch (or else the last axis) across, all other axes down."""
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

    opens = [v.label for v in shown].index(best) if best in {v.label for v in shown} else 0
    labels: common.Dimension = ("Strategy", [(v.label, v.label) for v in shown], opens)
    dimensions = [("Speed-up", metrics, 0), labels]
    plot = common.plot("sweep", "speed-up over lazy in every case", dimensions, draw)
    return [common.section("tiling", "sweep", lead=_sweep_lead(run, axes), plots=[plot])]


# -- growth ----------------------------------------------------------------------------------------

GROWTH: Sequence[tuple[str, str, tuple[tuple[float, str], ...]]] = [
    ("mixer_flops", "mixer work", ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))),
    ("mixer_hbm_bytes", "bytes moved by the mixer", ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"))),
    ("memory_bytes", "memory", ((1e9, "GB"), (1e6, "MB"))),
    ("total_s", "time of the generation", ((1.0, "s"), (1e-3, "ms"))),
]


def slope(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Returns the least-squares slope of log2 value against log2 length, over lengths from `SLOPE_FROM` on if
    there are at least two; NaN with fewer than two lengths."""
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
    found, rows = {}, at(run.growth, case).sort_values("tokens", kind="stable")
    for variant in shown:
        own = rows[rows["label"] == variant.label]
        slopes = {m: slope(own["tokens"].tolist(), own[m].tolist()) for m, _, _ in GROWTH}
        if any(map(known, slopes.values())):
            found[variant.label] = slopes
    metrics = [(name, "r", _in_slopes(found, metric)) for metric, name, _ in GROWTH]
    head = ("grows with the length to the power of", "l", str)
    return common.without_empty_columns(common.tabled(found, head, *metrics))


def _in_slopes(found: Mapping[str, Mapping[str, float]], metric: str) -> Callable[[str], str]:
    return lambda label: f"{found[label][metric]:.3f}" if known(found[label][metric]) else ""


def _growth(run: Run) -> list[Section]:
    metrics = [(name, metric) for metric, name, _ in GROWTH if (run.growth[metric] > 0).any()]
    if not metrics or run.growth["tokens"].nunique() < 2:
        return []
    # Length is the axis here, so it is no part of a case.
    dimension = _dimension(run, run.growth, [axis for axis in _axes(run) if axis != "tokens"])
    shown = figures.variants(run.results)
    scales = {metric: _growth_scale(metric, run.growth[metric]) for _, metric in metrics}

    def draw(metric: str, case: Case) -> go.Figure:
        return figures.growth(at(run.growth, case), shown, metric, scales[metric])

    dimensions = [("Against length", metrics, 0), dimension]
    plot = common.plot("growth", "work, bytes, memory and time against length", dimensions, draw)
    text, case = dimension[1][dimension[2]]
    slopes = _slopes(run, shown, case)
    whose = f"Slopes of {text}, f" if text else "F"
    fitted = f"{whose}itted from {SLOPE_FROM:,} tokens on, by least squares of the logarithms."
    parts = {"table": slopes, "notes": [fitted]} if slopes.rows else {}
    return [common.section("tiling", "growth", plots=[plot], **parts)]


# -- predicted against published -------------------------------------------------------------------

COMPARED: Mapping[str, str] = {"speedup_over_lazy": "end to end", "mixer_speedup_over_lazy": "mixer only"}


def _ranges(run: Run) -> dict[str, pd.DataFrame]:
    """Returns metric -> compared figures with a published range."""
    rows = run.comparison[
        run.comparison[["reference_low", "reference_high", "predicted"]].notna().all(axis=1)
    ]
    return {metric: rows[rows["metric"] == metric] for metric in COMPARED if (rows["metric"] == metric).any()}


def _range_text(rows: pd.DataFrame) -> str:
    low, high = rows["reference_low"].min(), rows["reference_high"].max()
    return f"{low:g} to {high:g}×" if low < high else f"about {low:g}×"


def _inside_text(rows: pd.DataFrame) -> str:
    return f"{(rows['error_pct'] == 0).sum()} of {len(rows)}"


def _inside(run: Run) -> Tile | None:
    """Returns the number of end-to-end speed-ups inside the published range, or else the median error."""
    found = _ranges(run).get("speedup_over_lazy")
    if found is None:
        return common.accuracy(run)
    return Tile(_inside_text(found), f"Speed-ups inside the published {_range_text(found)}", "end to end")


def _range_table(found: Mapping[str, pd.DataFrame], word: str) -> Table:
    return common.tabled(
        found.values(),
        ("speed-up over lazy", "l", lambda own: COMPARED[own["metric"].iloc[0]]),
        ("published", "r", _range_text),
        (word, "r", lambda own: times_of(own["predicted"])),
        ("inside", "r", _inside_text),
        ("source", "l", lambda own: "; ".join(dict.fromkeys(own["source"]))),
    )


def _published(run: Run) -> list[Section]:
    """Shows speed-ups beside their published ranges; without ranges, the section of every study."""
    found = _ranges(run)
    if not found:
        return common.comparison(run)
    rows = pd.concat(list(found.values()))
    axes = [axis for axis in _axes(run) if axis in rows.columns]

    def place(row: Mapping[Any, Any]) -> str:
        return ", ".join([str(row["label"]), *filter(None, [case_text(tuple((a, row[a]) for a in axes))])])

    every = common.tabled(
        rows.to_dict("records"),
        ("speed-up", "l", lambda row: COMPARED[row["metric"]]),
        ("case", "l", place),
        (run.times_are, "r", lambda row: times(row["predicted"])),
        ("beyond the range", "r", lambda row: signed_percent(row["error_pct"])),
    )
    things = "measurements" if run.measured else "predictions"
    names = {metric: COMPARED[metric] for metric in found}
    words = {
        "times_are": run.times_are.capitalize(),
        "Things": things.capitalize(),
        "things": things,
        "said": ", ".join(f"{COMPARED[metric]} {_inside_text(own)}" for metric, own in found.items()),
    }
    figure = figures.ranges(rows, names, place, run.times_are)
    plot = common.drawn("ranges", f"{run.times_are} speed-ups and their published ranges", figure)
    details = [Details(f"All {len(rows)} {things}", table=every)]
    table = _range_table(found, run.times_are)
    return [common.section("tiling", "published", words, plots=[plot], table=table, details=details)]


# -- everything as a table -------------------------------------------------------------------------


def _gb(value: float) -> str:
    return f"{significant(value / 1e9)}\u00a0GB" if known(value) else ""


METRICS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("total_s", "whole generation", lasting),
    ("speedup_over_lazy", "over lazy", times),
    ("mixer_speedup_over_lazy", "mixer over lazy", times),
    ("speedup_over_lazy_by_layers", "over lazy, layer by layer", times),
    ("mixer_speedup_over_lazy_by_layers", "mixer over lazy, layer by layer", times),
    ("token_p50_s", "token, median", milliseconds),
    ("token_p99_s", "token, 99 %", milliseconds),
    ("token_max_s", "token, slowest", milliseconds),
    ("tokens_per_s", "tokens/s", lambda v: significant(v, 3)),
    ("mixer_s", "mixer", lasting),
    ("block_s", "blocks", lasting),
    ("mixer_flops", "mixer FLOPs", scientific),
    ("flops", "FLOPs", scientific),
    ("mixer_hbm_bytes", "mixer bytes", _gb),
    ("hbm_bytes", "bytes moved", _gb),
    ("memory_bytes", "memory", _gb),
    ("launches", "launches", recorded),
    ("activation_positions_per_token", "positions moved per token", lambda v: significant(v, 3)),
]


def _table(run: Run, cases: Sequence[Case]) -> Table:
    """Returns a row for each strategy and case; the time of the whole with its interval."""
    found = []
    for case in cases:
        rows = at(run.results, case)
        rows = rows[(rows["op_kind"] == "") & rows["value"].notna()]
        for variant in figures.variants(run.results):
            own = rows[rows["label"] == variant.label].drop_duplicates("metric").set_index("metric")
            if len(own):
                found.append((variant.label, case_text(case), own.to_dict("index")))
    first, *others = [(name, "r", _in_cell(metric, show)) for metric, name, show in METRICS]
    place = [("case", "l", lambda cell: cell[1])] if len(cases) > 1 else []
    bounds = ("fastest to slowest (s)" if run.measured else "interval (s)", "r", _total_bounds)
    strategy = ("strategy", "l", lambda cell: cell[0])
    return common.without_empty_columns(common.tabled(found, strategy, *place, first, bounds, *others))


Cell = tuple[str, str, Mapping[Any, Mapping[Any, float]]]  # strategy, case, metric -> value, low, high


def _in_cell(metric: str, show: Callable[[float], str]) -> Callable[[Cell], str]:
    return lambda cell: show(cell[2][metric]["value"]) if metric in cell[2] else ""


def _total_bounds(cell: Cell) -> str:
    total = cell[2].get("total_s")
    return interval(total["low"], total["high"]) if total else ""


def _all_figures(run: Run) -> list[Section]:
    every = cases_of(_labelled(run), _axes(run))
    table = _table(run, [_answered(run)])
    if not table.rows:
        return []
    case, details = case_text(_answered(run)), []
    if len(every) > 1:
        whole = _table(run, every)
        details = [Details(f"All {len(whole.rows)} rows of {len(every)} cases", table=whole)]
    words = {"case": f": {case}" if case else ""}
    return [common.section("tiling", "figures", words, table=table, details=details)]
