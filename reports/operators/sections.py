"""The studies `linear_attention` and `decode_attention`: which method of an operator is fastest where.

A setting is what is equal along the axis of a figure (batch, decay, heads); a place is a point of that axis:
a length, or a batch and a context where a study gives each batch its own.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.operators import figures
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import DEVICE, Run, extreme
from simcore.reports.text import (
    counted,
    interval,
    known,
    of_any_device,
    recorded,
    signed_percent,
    significant,
    size_percent,
    times,
    tokens,
)
from simcore.reports.tiling.figures import lasting

LATENCY, MEMORY, OUT = "latency_s", "memory_bytes", "out_of_memory"
NOT_RANKED = "not_ranked"
AXES = (DEVICE, "batch", "decay", "heads", "q_heads", "kv_heads", "rank", "dim", "head_dim")
NAMES = {
    "batch": "batch", "heads": "heads", "q_heads": "query heads", "kv_heads": "KV heads", "rank": "rank",
    "dim": "dimension", "head_dim": "head dimension",
}  # fmt: skip
PANELS_AT_MOST = 6
HOLLOW: Mapping[str, str] = {"predicted": "; hollow marks were used for fitting", "measured": ""}
FITTED_TOO = "figures used for fitting among them"
MEASURED_TIME = Definition(
    "Time of a call",
    "latency = end of the call − its start, on the wall clock",
    "Of several runs the median; low and high: the least and the largest.",
)
FORMULAS: Sequence[tuple[str, Definition]] = [
    (
        LATENCY,
        Definition(
            "Time of a call",
            "latency = host time of the launch + seconds of the op\n"
            "seconds = launches · kernel_s + roofline floor / efficiency",
            "The second line where prices were fitted: two constants a method, kernel_s and efficiency.",
        ),
    ),
    (
        MEMORY,
        Definition(
            "Memory",
            "inputs + output + temporaries",
            "Counted by formula; out of memory: more than the device has.",
        ),
    ),
    (
        "crossover_tokens",
        Definition(
            "Crossover",
            "the length at which the times of two methods are equal",
            "Searched between lengths of the study at which both fit into memory.",
        ),
    ),
    (
        "splits",
        Definition(
            "Splits",
            "the number of pieces of the context that makes the sum of split, merge and launch cheapest",
            "Flash-Decoding attends to all pieces at once and merges them by their log-sum-exp.",
        ),
    ),
]


def opening(run: Run) -> Opening:
    """The top of the page with up to five key figures."""
    made = (_fastest(run), _ahead(run), common.accuracy(_latencies(run)), _same_best(run), _memory_right(run))
    return replace(common.opening(run), tiles=[tile for tile in made if tile])


def sections(run: Run) -> list[Section]:
    """The sections of both studies, in the order of the page."""
    return [
        *_times(run),
        *_memory(run),
        *_compared(run),
        *common.prices(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Formulas of the metrics that this run has, and of no others."""
    present = set(run.results["metric"])
    told = {**dict(FORMULAS), **({LATENCY: MEASURED_TIME} if run.measured else {})}
    found = [definition for metric, definition in told.items() if metric in present]
    return found + common.error_formulas(run)


# -- settings and places ---------------------------------------------------------------------------

Setting = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class View:
    """How the cases of a run are laid out: the axes of a setting, the column of lengths, and the names of
    the places by (batch, length) where a batch has its own; empty where lengths are the places."""

    axes: tuple[str, ...]
    length: str
    places: Mapping[tuple[float, float], float]

    def place(self, rows: pd.DataFrame) -> "list[float]":
        """Where on the axis each row is; NaN for a row of no place."""
        if not self.places:
            return [float(value) for value in rows[self.length]]
        pairs = zip(rows["batch"], rows[self.length], strict=True)
        return [self.places.get((float(b), float(n)), math.nan) for b, n in pairs]

    def at(self, row: Mapping[Any, Any]) -> str:
        """A row's place and setting in words."""
        batch = f"batch\u00a0{row['batch']:,.0f}" if known(row["batch"]) else ""
        decay = _decay(row["decay"]) if known(row.get("decay")) else ""
        length = figures.length_text(row[self.length]) if known(row[self.length]) else ""
        return ", ".join(part for part in (length, batch, decay) if part)

    def axis(self, rows: pd.DataFrame, apart: float = 0.12) -> tuple[dict[str, Any], dict[str, Any]]:
        """The axis of the places of these rows, with labels so far `apart` from each other."""
        if not self.places:
            return figures.lengths_axis(rows[self.length].dropna().unique().tolist(), apart)
        names = {place: f"{b:,.0f} × {tokens(n)}" for (b, n), place in self.places.items()}
        return figures.places_axis(names, "batch × context (tokens)")


def _decay(value: float) -> str:
    return "decay" if value else "no decay"


def view(run: Run) -> View:
    """The layout of a run: a batch that has hardly any lengths of its own is part of the place."""
    rows = run.results[run.results["metric"].isin([LATENCY, OUT])]
    length = "context_tokens" if run.study == "decode_attention" else "length"
    varied = tuple(axis for axis in AXES if axis in rows and rows[axis].nunique() > 1)
    pairs = rows[["batch", length]].dropna().drop_duplicates()
    per_batch = pairs.groupby("batch")[length].nunique() if len(pairs) else pd.Series(dtype=float)
    if "batch" in varied and per_batch.median() < 2:
        pairs = pairs.sort_values([length, "batch"], ascending=[True, False], kind="stable")
        order = {(float(b), float(n)): float(i) for i, (b, n) in enumerate(pairs.to_numpy())}
        return View(tuple(axis for axis in varied if axis != "batch"), length, order)
    return View(varied, length, {})


def settings(rows: pd.DataFrame, shown: View) -> list[Setting]:
    """The settings of these rows, in the order of their axes."""
    axes = [axis for axis in shown.axes if axis in rows.columns]
    if not axes:
        return [()] if len(rows) else []
    places = rows[axes].dropna().drop_duplicates().sort_values(axes, kind="stable")
    return [
        tuple((axis, v if axis == DEVICE else float(v)) for axis, v in zip(axes, place, strict=True))
        for place in places.itertuples(index=False)
    ]


def at(rows: pd.DataFrame, setting: Setting) -> pd.DataFrame:
    """The rows of a setting, as far as the frame has its axes."""
    chosen = np.ones(len(rows), dtype=bool)
    for axis, value in setting:
        if axis in rows.columns and rows[axis].notna().any():
            chosen &= (rows[axis] == value).to_numpy()
    return rows[chosen]


def setting_text(setting: Setting) -> str:
    """ "batch 16, decay"."""
    return ", ".join(_axis_text(axis, value) for axis, value in setting)


def _heading(setting: Setting) -> str:
    """A setting as a heading: the names of devices stay as they are."""
    text = setting_text(setting)
    return text if setting and setting[0][0] == DEVICE else text.capitalize()


def _axis_text(axis: str, value: Any) -> str:
    if axis == DEVICE:
        return str(value)
    return _decay(value) if axis == "decay" else f"{NAMES[axis]}\u00a0{value:,.0f}"


def _placed(rows: pd.DataFrame, shown: View) -> pd.DataFrame:
    words = [shown.at(row) for row in rows.to_dict("records")]
    rows = rows.assign(place=shown.place(rows), at=pd.Series(words, index=rows.index, dtype=object))
    return rows[rows["place"].notna()]


def _latency_rows(run: Run, shown: View) -> pd.DataFrame:
    """Latencies with their place and, where there are, the splits that were chosen."""
    rows = _placed(run.metric(LATENCY), shown)
    keys = ["strategy", *shown.axes, "place"]
    splits = _placed(run.metric("splits"), shown)[[*keys, "value"]].rename(columns={"value": "splits"})
    return rows.merge(splits.drop_duplicates(keys), on=keys, how="left")


def _out_rows(run: Run, shown: View) -> pd.DataFrame:
    """What runs out of memory, with the remark of its latency that is not there."""
    out = _placed(run.metric(OUT), shown)
    out = out[out["value"] > 0]
    missing = run.results[(run.results["metric"] == LATENCY) & run.results["value"].isna()]
    keys = ["strategy", *shown.axes, "place"]
    told = _placed(missing, shown)[[*keys, "source"]].drop_duplicates(keys)
    return out.drop(columns="source").merge(told, on=keys, how="left").fillna({"source": ""})


def _latencies(run: Run) -> Run:
    """The run with its compared latencies alone."""
    run = common.without_fitted(run)
    rows = run.comparison[run.comparison["metric"] == LATENCY]
    return replace(run, comparison=rows.reset_index(drop=True))


# -- key figures -----------------------------------------------------------------------------------


def _best(rows: pd.DataFrame, column: str = "value") -> dict[tuple[Any, ...], pd.Series]:
    """(setting and place) -> the fastest row there."""
    axes = [axis for axis in AXES if axis in rows.columns and rows[axis].notna().any()]
    rows = rows[rows[column].notna()]
    return {
        key if isinstance(key, tuple) else (key,): extreme(group, group[column], largest=False)
        for key, group in rows.groupby([*axes, "place"], sort=True)
    }


def _ranked(run: Run, rows: pd.DataFrame, shown: View) -> pd.DataFrame:
    """The rows that can be ranked with the others of their place and setting: of those of other devices
    `Run.ranked` says more."""
    keys = ["label", *shown.axes, "place"]
    out = _placed(run.metric(NOT_RANKED), shown)[keys].drop_duplicates().assign(out=True)
    joined = rows.merge(out, on=keys, how="left")
    return joined[~joined["out"].eq(True)].drop(columns="out").reset_index(drop=True)


def _fastest(run: Run) -> Tile | None:
    shown = view(run)
    rows = run.ranked(_ranked(run, _latency_rows(run, shown), shown))
    if rows.empty:
        return None
    last = _where_answered(run, rows, shown)
    best = extreme(last, last["value"], largest=False)
    return Tile(lasting(best["value"]), f"Fastest at {best['at']}", str(best["label"]))


def _where_answered(run: Run, rows: pd.DataFrame, shown: View) -> pd.DataFrame:
    """The rows at the place that the answer is about: that of the summary, or else the most tokens and the
    largest batch."""
    there = at(rows, tuple((name, value) for name, value in run.best_at.items()))
    if run.best_at and len(there):
        return there.reset_index(drop=True)
    longest = rows[rows[shown.length] == rows[shown.length].max()]
    found: pd.DataFrame = longest[longest["batch"] == longest["batch"].max()].reset_index(drop=True)
    return found


def _ahead(run: Run) -> Tile | None:
    """How far the methods are apart at a place of one device, where there are two of them."""
    shown = view(run)
    rows = _ranked(run, _latency_rows(run, shown), shown)
    if rows["strategy"].nunique() != 2:
        return None
    groups = [g for _, g in rows.groupby([*shown.axes, "place"], sort=True) if len(g) > 1]
    if not groups:
        return None
    ratios = [float(g["value"].max() / g["value"].min()) for g in groups]
    widest = groups[int(np.argmax(ratios))].reset_index(drop=True)
    slow, fast = extreme(widest, widest["value"]), extreme(widest, widest["value"], largest=False)
    means = f"{fast['label']} over {slow['label']}, at most"
    return Tile(f"{significant(max(ratios))}×", means, str(fast["at"]))


def _agreement(run: Run) -> tuple[int, int]:
    """At how many places the method predicted to be fastest is the published one, and of how many."""
    shown = view(run)
    rows = _placed(_latencies(run).comparison, shown)
    if rows.empty:
        return 0, 0
    real, said = _best(rows, "reference"), _best(rows, "predicted")
    counts = rows.groupby([a for a in AXES if a in rows and rows[a].notna().any()] + ["place"])["strategy"]
    several = {k if isinstance(k, tuple) else (k,) for k, n in counts.nunique().items() if n > 1}
    same = [real[key]["strategy"] == said[key]["strategy"] for key in real if key in several]
    return sum(same), len(same)


def _same_best(run: Run) -> Tile | None:
    same, of = _agreement(run)
    means = f"Places where the method {run.found} fastest is the published one"
    return Tile(f"{same} of {of}", means, "" if run.measured else FITTED_TOO) if of else None


def _memory_right(run: Run) -> Tile | None:
    rows = run.comparison[run.comparison["metric"] == OUT]
    if rows["reference"].nunique() < 2:
        return None
    right = int((rows["error_pct"] == 0).sum())
    return Tile(f"{right} of {len(rows)}", "Cells out of memory, or not, as published", "")


# -- times -----------------------------------------------------------------------------------------


def _crossings(run: Run, rows: pd.DataFrame, setting: Setting, shown: View) -> dict[float, str]:
    """Lengths at which the fastest method changes: the crossovers of neighbours that are fastest in turn."""
    if shown.places:
        return {}
    crossover = at(run.metric("crossover_tokens"), setting)
    ranked = _ranked(run, rows, shown)
    fastest = [extreme(g, g["value"], largest=False) for _, g in ranked.groupby("place", sort=True)]
    found = {}
    for one, other in pairwise(fastest):
        own = crossover[
            (crossover["strategy"] == one["strategy"]) & (crossover["rival"] == other["strategy"])
        ]
        own = own[(own["value"] >= one["place"]) & (own["value"] <= other["place"])]
        if one["strategy"] != other["strategy"] and len(own):
            place = float(own["value"].iloc[0])
            found[place] = f"{place:,.0f}"
    return found


def _published(run: Run, setting: Setting, shown: View) -> pd.DataFrame:
    return at(_placed(_latencies(run).comparison, shown), setting)


def _panel(run: Run, shown: View, setting: Setting) -> go.Figure:
    rows, out = at(_latency_rows(run, shown), setting), at(_out_rows(run, shown), setting)
    both = pd.concat([rows, out]) if len(out) else rows
    crossings = _crossings(run, rows, setting, shown)
    published = _published(run, setting, shown)
    return figures.method_times(rows, out, published, crossings, shown.axis(both), run.found)


def _panels(run: Run, shown: View, found: Sequence[Setting]) -> list[Plot]:
    describes = "time of each method over lengths"
    if len(found) > PANELS_AT_MOST:
        options: common.Dimension = ("Setting", [(setting_text(s), s) for s in found], 0)
        return [Plot("times", describes, **common.views([options], lambda s: _panel(run, shown, s)))]
    return [
        Plot(f"times-{i}", f"{describes}: {setting_text(setting)}", {(): _panel(run, shown, setting)},
             heading=_heading(setting))
        for i, setting in enumerate(found)
    ]  # fmt: skip


def _best_table(run: Run, shown: View, found: Sequence[Setting]) -> Table:
    """The fastest method at each place, a column a setting."""
    rows = _ranked(run, _latency_rows(run, shown), shown)
    names = dict(zip(shown.place(rows), _place_names(rows, shown), strict=True))
    lines = []
    for place in sorted(names):
        cells = []
        for setting in found:
            own = at(rows[rows["place"] == place], setting).reset_index(drop=True)
            best = extreme(own, own["value"], largest=False) if len(own) else None
            cells.append(f"{best['label']}, {lasting(best['value'])}" if best is not None else "nothing fits")
        lines.append([names[place], *cells])
    head = ["context" if shown.places else "length", *(setting_text(s) or "fastest" for s in found)]
    return Table(head, lines, "r" if not shown.places else "l")


def _place_names(rows: pd.DataFrame, shown: View) -> list[str]:
    if shown.places:
        return [
            f"batch {b:,.0f} × {tokens(n)}" for b, n in zip(rows["batch"], rows[shown.length], strict=True)
        ]
    return [tokens(n) for n in rows[shown.length]]


def _side_by_side(run: Run, shown: View) -> Table:
    """Every place of every setting with the times of all methods, the splits, and the published times
    beside."""
    rows, published = _latency_rows(run, shown), _placed(_latencies(run).comparison, shown)
    ranked = _ranked(run, rows, shown)
    labels = _method_names(rows)
    methods = [(strategy, labels[strategy]) for strategy in figures.looks(list(rows["strategy"]))]
    lines = []
    for _, group in rows.groupby([*shown.axes, "place"], sort=True):
        first = group.iloc[0]
        cells = []
        for strategy, _ in methods:
            own = group[group["strategy"] == strategy]
            real = at(published, tuple((a, first[a]) for a in shown.axes))
            real = real[(real["strategy"] == strategy) & (real["place"] == first["place"])]
            cells += [lasting(own["value"].iloc[0]) if len(own) else ""]
            cells += [lasting(real["reference"].iloc[0]) if len(real) else ""]
            cells += [signed_percent(real["error_pct"].iloc[0]) if len(real) else ""]
        splits = group["splits"].dropna()
        setting = tuple((axis, first[axis]) for axis in shown.axes)
        both = at(ranked[ranked["place"] == first["place"]], setting)["value"]
        ratio = times(both.max() / both.min()) if len(both) > 1 else ""
        chosen = recorded(int(splits.iloc[0])) if len(splits) else ""
        place = _place_names(group, shown)[0]
        lines.append([place, setting_text(setting), *cells, chosen, ratio])
    heads = [text for _, label in methods for text in (label, "published", "error")]
    head = ["place", "setting" if set(shown.axes) - {DEVICE} else "device", *heads]
    head += ["splits", "slowest over fastest"]
    return common.without_empty_columns(Table(head, lines, "ll" + "r" * (len(heads) + 2)))


def _method_names(rows: pd.DataFrame) -> dict[str, str]:
    """Strategy -> the name of the method, on whichever device."""
    names = map(of_any_device, rows["label"], rows[DEVICE])
    return dict(zip(rows["strategy"], names, strict=True))


def _crossover_table(run: Run, shown: View) -> list[Details]:
    rows = pd.concat([run.metric("crossover_tokens"), run.metric("faster_below_tokens")])
    if rows.empty:
        return []
    axes = list(shown.axes)
    rows = rows.sort_values([*axes, "value"], kind="stable")
    lines = [
        [setting_text(tuple((a, row[a]) for a in axes)), f"{row['value']:,.0f}", row["source"]]
        for _, row in rows.iterrows()
    ]
    table = common.without_empty_columns(Table(["setting", "tokens", "what changes"], lines, "lrl"))
    return [Details(f"All {counted(len(lines), 'crossover')}", table=table)]


def _all_times(run: Run, shown: View) -> list[Details]:
    rows = run.results[run.results["metric"] == LATENCY]
    lines = [
        [row["label"], shown.at(row), lasting(row["value"]) if known(row["value"]) else "out of memory",
         interval(row["low"], row["high"], 1e3), row["source"]]
        for row in rows.to_dict("records")
    ]  # fmt: skip
    told = ("least to largest (ms)", "source") if run.measured else ("interval (ms)", "price")
    table = common.without_empty_columns(Table(["method", "at", "time", *told], lines, "llrr"))
    return [Details(f"All {counted(len(lines), 'case')} as a table", table=table)]


def _times(run: Run) -> list[Section]:
    shown = view(run)
    rows = run.metric(LATENCY)
    found = settings(run.results[run.results["metric"].isin([LATENCY, OUT])], shown)
    if rows.empty or not found:
        return []
    compared, out = len(_latencies(run).comparison) > 0, len(_out_rows(run, shown)) > 0
    lines = "measured" if run.measured else "predictions"
    notes = [f"Lines are {lines}, marks are published{HOLLOW[run.found]}."] if compared else []
    notes += ["A cross above the dotted line: the method runs out of memory."] if out else []
    if not shown.places and len(run.metric("crossover_tokens")):
        notes.append("A dashed line: the length at which another method becomes the fastest.")
    table = _side_by_side(run, shown) if shown.places else _best_table(run, shown, found)
    what = "context" if run.study == "decode_attention" else "length"
    return [
        Section(
            key="times",
            heading=f"Time of each method against {what}",
            short="Times",
            lead="Lower is better, and a steeper line is worse for long texts: a slope of 1 is linear in the "
            "length, of 2 quadratic." if not shown.places else
            "Lower is better. A method that keeps its time while the batch shrinks and the context grows "
            "uses the whole device with one sequence, too.",
            plots=_panels(run, shown, found),
            table=table,
            notes=[" ".join(notes)] if notes else [],
            details=[*_crossover_table(run, shown), *_all_times(run, shown)],
        )
    ]  # fmt: skip


# -- memory ----------------------------------------------------------------------------------------


def _memory(run: Run) -> list[Section]:
    shown = view(run)
    rows = _placed(run.metric(MEMORY), shown)
    if rows.empty:
        return []
    keys = ["strategy", *shown.axes, "place"]
    out = _out_rows(run, shown)[keys].drop_duplicates().assign(out=True)
    rows = rows.merge(out, on=keys, how="left")
    rows["out"] = rows["out"].eq(True)
    found = settings(rows, shown)

    def draw(setting: Setting) -> go.Figure:
        own = at(rows, setting)
        return figures.memory(own, shown.axis(own, 0.05))

    # The setting in which most methods run out of it says most.
    crowded = [int(at(rows, setting)["out"].sum()) for setting in found]
    opens = int(np.argmax(crowded))
    views = common.views([("Setting", [(setting_text(s), s) for s in found], opens)], draw)
    more = " A cross: more than the device has." if rows["out"].any() else ""
    return [
        Section(
            key="memory",
            heading="Memory of each method",
            short="Memory",
            lead=f"Inputs, output and temporaries of one call, by formula.{more}",
            plots=[Plot("memory", "memory of each method", **views)],
        )
    ]


# -- predicted against published -------------------------------------------------------------------


def _errors_of(rows: pd.DataFrame) -> list[str]:
    if rows.empty:
        return ["", "", ""]
    worst = extreme(rows, rows["error_pct"].abs())["error_pct"]
    return [str(len(rows)), size_percent(rows["error_pct"].abs().median()), signed_percent(worst)]


def error_table(
    rows: pd.DataFrame, memory: pd.DataFrame, by: str, names: Mapping[str, str], found: str = "predicted"
) -> Table:
    """Count, median and worst error of each method (or table): what was predicted, then what was fitted, then
    how many cells are out of memory, or not, as published."""
    lines = []
    for key in dict.fromkeys([*rows[by], *memory[by]]):
        own, cells = rows[rows[by] == key], memory[memory[by] == key]
        fitted = own["role"] == common.FITTED
        right = f"{int((cells['error_pct'] == 0).sum())} of {len(cells)}" if len(cells) else ""
        lines.append([names.get(key, key), *_errors_of(own[~fitted]), *_errors_of(own[fitted]), right])
    return common.without_empty_columns(
        Table(
            ["", found, "median", "worst", "fitted", "median", "worst", "memory as published"],
            lines,
            "lrrrrrrr",
        )
    )


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with who each is of: its label, or else its method."""
    return rows.assign(name=rows["label"].where(rows["label"] != "", rows["strategy"]))


def _table_of(source: str) -> str:
    """The table of a figure; of one that several tables print, the first."""
    first = source.partition("; ")[0]
    return first.rpartition(",")[0] or first


def _every(rows: pd.DataFrame, shown: View, found: str) -> Table:
    lines = []
    for row in rows.to_dict("records"):
        is_time = row["metric"] == LATENCY
        say = lasting if is_time else (lambda v: "out of memory" if v else "fits")
        error = signed_percent(row["error_pct"]) if is_time else "right" if row["error_pct"] == 0 else "wrong"
        name = row["label"] or row["strategy"]
        lines.append([name, shown.at(row), say(row["reference"]), say(row["predicted"]), error, row["role"],
                      row["source"]])  # fmt: skip
    return Table(["method", "at", "published", found, "error", "role", "source"], lines, "llrrr")


def _wrong_memory(run: Run, shown: View) -> list[str]:
    rows = run.comparison[(run.comparison["metric"] == OUT) & (run.comparison["error_pct"] != 0)]
    return [
        f"Memory: {row['label']} at {shown.at(row)} is {'counted' if run.measured else 'predicted'} to "
        f"{'run out of it' if row['predicted'] else 'fit'}, but is published as "
        f"{'out of it' if row['reference'] else 'fitting'} ({row['source']})."
        for row in rows.to_dict("records")
    ]


def _roles(rows: pd.DataFrame) -> dict[str, str]:
    """Role -> its name; what was fitted stands last."""
    ordered = sorted(dict.fromkeys(rows["role"]), key=lambda role: role == common.FITTED)
    return {role: common.ROLES.get(role, role) for role in ordered}


def _compared(run: Run) -> list[Section]:
    only, shown = _latencies(run), view(run)
    found = common.comparison(only)
    rows = only.comparison[only.comparison["error_pct"].notna()]
    memory = run.comparison[run.comparison["metric"] == OUT]
    if not found:
        return []
    # Which methods fit is a finding only where some did not.
    memory = memory if memory["reference"].nunique() > 1 else memory.head(0)
    order = {name: i for i, name in enumerate(figures.looks(list(rows["strategy"])))}
    ordered = rows.assign(rank=rows["strategy"].map(order)).sort_values("rank", kind="stable")
    tables, cells = (frame.assign(source=frame["source"].map(_table_of)) for frame in (rows, memory))
    by_table = error_table(tables, cells, "source", {}, run.found)
    figure = figures.errors(rows, _roles(rows), shown.at, run.found)
    plot = Plot("errors", f"error of every {run.found} time, by role", {(): figure})
    every = pd.concat([rows, memory]) if len(memory) else rows
    details = [Details("By table", table=by_table)] if len(by_table.rows) > 1 else []
    return [
        replace(
            found[0],
            plots=[plot],
            table=error_table(_named(ordered), _named(memory), "name", {}, run.found),
            notes=[*found[0].notes, *_wrong_memory(run, shown)],
            details=[
                *details,
                Details(f"All {len(every):,} compared figures", table=_every(every, shown, run.found)),
            ],
        )
    ]
