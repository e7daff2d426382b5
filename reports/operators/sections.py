"""The studies `linear_attention` and `decode_attention`: the fastest method of an operator in each case.

A setting is the part of a case that is constant along the axis of a figure (batch, decay, heads). A place is
a point of that axis: a length, or a batch and a context if the study gives each batch its own contexts.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.common.cases import Case, at, cases_of
from simcore.reports.common.figures import Axis
from simcore.reports.common.sections import Row
from simcore.reports.operators import figures
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import DEVICE, Run, extreme
from simcore.reports.text import (
    counted,
    interval,
    known,
    lasting,
    of_any_device,
    recorded,
    signed_percent,
    significant,
    size_percent,
    times,
    tokens,
)

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
LONGER = (
    "Lower is better. A method that keeps its time while the batch shrinks and the context grows "
    "uses the whole device with one sequence, too."
)


def opening(run: Run) -> Opening:
    """Returns the top of the page with up to five key figures."""
    of = Methods(run)
    made = (_fastest(of), _ahead(of), common.accuracy(of.published), _same_best(of), _memory_right(run))
    return replace(common.opening(run), tiles=[tile for tile in made if tile])


def sections(run: Run) -> list[Section]:
    """Returns the sections of both studies, in the order of the page."""
    of = Methods(run)
    return [
        *_times(of),
        *_memory(of),
        *_compared(of),
        *common.prices(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Returns the formulas of the metrics that this run has."""
    groups = ["operators", *(["operators, measured"] if run.measured else [])]
    found = common.formulas(*groups, of=set(run.results["metric"]).__contains__)
    return found + common.error_formulas(run)


# -- settings and places ---------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """The layout of a run's cases: the axes of a setting, the column of lengths, and the place of each pair
    (batch, length) if each batch has its own lengths; empty if lengths are the places."""

    axes: tuple[str, ...]
    length: str
    positions: Mapping[tuple[float, float], float]

    def place(self, rows: pd.DataFrame) -> "list[float]":
        """Returns the position of each row on the axis; NaN if the row has no place."""
        if not self.positions:
            return [float(value) for value in rows[self.length]]
        pairs = zip(rows["batch"], rows[self.length], strict=True)
        return [self.positions.get((float(b), float(n)), math.nan) for b, n in pairs]

    def at(self, row: Mapping[Any, Any]) -> str:
        """Returns a row's place and setting as text."""
        batch = f"batch\u00a0{row['batch']:,.0f}" if known(row["batch"]) else ""
        decay = _decay(row["decay"]) if known(row.get("decay")) else ""
        length = figures.length_text(row[self.length]) if known(row[self.length]) else ""
        return ", ".join(part for part in (length, batch, decay) if part)

    def setting(self, row: Any) -> str:
        """Returns a row's setting as text."""
        return setting_text(tuple((axis, row[axis]) for axis in self.axes))

    def axis(self, rows: pd.DataFrame, apart: float = 0.12) -> Axis:
        """Returns the axis of the places of these rows, with labels at least `apart` from each other."""
        if not self.positions:
            return figures.lengths_axis(rows[self.length].dropna().unique().tolist(), apart)
        names = {place: f"{b:,.0f} × {tokens(n)}" for (b, n), place in self.positions.items()}
        return figures.places_axis(names, "batch × context (tokens)")


def _decay(value: float) -> str:
    return "decay" if value else "no decay"


def view(run: Run) -> View:
    """Returns the layout of a run. Batch is part of the place if batches typically have a single length."""
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


def setting_text(setting: Case) -> str:
    """ "batch 16, decay"."""
    return ", ".join(_axis_text(axis, value) for axis, value in setting)


def _heading(setting: Case) -> str:
    """Returns a setting as a heading; names of devices keep their case."""
    text = setting_text(setting)
    return text if setting and setting[0][0] == DEVICE else text.capitalize()


def _axis_text(axis: str, value: Any) -> str:
    if axis == DEVICE:
        return str(value)
    return _decay(value) if axis == "decay" else f"{NAMES[axis]}\u00a0{value:,.0f}"


@dataclass(frozen=True)
class Methods:
    """A run of these studies with tables that several sections use, each computed once."""

    run: Run

    @cached_property
    def view(self) -> View:
        """The layout of its cases."""
        return view(self.run)

    @cached_property
    def settings(self) -> list[Case]:
        """The settings of its times, in the order of their axes."""
        rows = self.run.results
        return cases_of(rows[rows["metric"].isin([LATENCY, OUT])], self.view.axes)

    @cached_property
    def latencies(self) -> pd.DataFrame:
        """Latencies with their place and, if the run has them, the chosen splits."""
        rows = self.placed(self.run.metric(LATENCY))
        return self.beside(rows, self.run.metric("splits"), "strategy", splits="value")

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The latencies that can be ranked within place and setting; `Run.ranked` does so across devices."""
        joined = self.beside(self.latencies, self.run.metric(NOT_RANKED), "label", out="metric")
        return joined[joined["out"].isna()].drop(columns="out").reset_index(drop=True)

    @cached_property
    def out(self) -> pd.DataFrame:
        """Cases that run out of memory, with the remark of their missing latency."""
        out = self.placed(self.run.metric(OUT))
        missing = self.run.results[(self.run.results["metric"] == LATENCY) & self.run.results["value"].isna()]
        out = out[out["value"] > 0].drop(columns="source")
        return self.beside(out, missing, "strategy", source="source").fillna({"source": ""})

    @cached_property
    def published(self) -> Run:
        """The run with its compared latencies only."""
        run = common.without_fitted(self.run)
        rows = run.comparison[run.comparison["metric"] == LATENCY]
        return replace(run, comparison=rows.reset_index(drop=True))

    @cached_property
    def compared(self) -> pd.DataFrame:
        """Compared latencies with their place."""
        return self.placed(self.published.comparison)

    def placed(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Returns the rows that have a place, with the place as number and text."""
        words = [self.view.at(row) for row in rows.to_dict("records")]
        at_words = pd.Series(words, index=rows.index, dtype=object)
        rows = rows.assign(place=self.view.place(rows), at=at_words)
        return rows[rows["place"].notna()]

    def beside(self, rows: pd.DataFrame, others: pd.DataFrame, by: str, **named: str) -> pd.DataFrame:
        """Adds columns of other rows (name -> their name) with the same place and setting, and the same
        strategy or label."""
        keys = [by, *self.view.axes, "place"]
        own = self.placed(others)[[*keys, *named.values()]].drop_duplicates(keys)
        return rows.merge(own.rename(columns={v: k for k, v in named.items()}), on=keys, how="left")


# -- key figures -----------------------------------------------------------------------------------


def _keys(rows: pd.DataFrame) -> list[str]:
    """Returns the columns that identify setting and place of these rows."""
    return [*(axis for axis in AXES if axis in rows.columns and rows[axis].notna().any()), "place"]


def _best(rows: pd.DataFrame, column: str = "value") -> dict[tuple[Any, ...], str]:
    """Returns (setting and place) -> the fastest method there."""
    rows = rows[rows[column].notna()]
    first = rows.loc[rows.groupby(_keys(rows), sort=True)[column].idxmin()]
    return dict(zip(first[_keys(rows)].itertuples(index=False, name=None), first["strategy"], strict=True))


def _fastest(of: Methods) -> Tile | None:
    rows = of.run.ranked(of.ranked)
    if rows.empty:
        return None
    last = _where_answered(of, rows)
    best = extreme(last, last["value"], largest=False)
    return Tile(lasting(best["value"]), f"Fastest at {best['at']}", str(best["label"]))


def _where_answered(of: Methods, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows at the place of the answer, from the summary, or else those with the longest length
    and its largest batch."""
    there = at(rows, tuple(of.run.best_at.items()))
    if of.run.best_at and len(there):
        return there.reset_index(drop=True)
    length = rows[of.view.length]
    longest = rows[length == length.max()]
    found: pd.DataFrame = longest[longest["batch"] == longest["batch"].max()].reset_index(drop=True)
    return found


def _ahead(of: Methods) -> Tile | None:
    """Returns the largest ratio between the methods at one place, if there are exactly two methods."""
    rows = of.ranked
    if rows["strategy"].nunique() != 2:
        return None
    groups = [g for _, g in rows.groupby([*of.view.axes, "place"], sort=True) if len(g) > 1]
    if not groups:
        return None
    ratios = [float(g["value"].max() / g["value"].min()) for g in groups]
    widest = groups[int(np.argmax(ratios))].reset_index(drop=True)
    slow, fast = extreme(widest, widest["value"]), extreme(widest, widest["value"], largest=False)
    means = f"{fast['label']} over {slow['label']}, at most"
    return Tile(f"{significant(max(ratios))}×", means, str(fast["at"]))


def _agreement(of: Methods) -> tuple[int, int]:
    """Returns the number of places whose predicted fastest method is the published one, and of all places."""
    rows = of.compared
    if rows.empty:
        return 0, 0
    rows = rows[rows.groupby(_keys(rows))["strategy"].transform("nunique") > 1]
    real, said = _best(rows, "reference"), _best(rows, "predicted")
    same = [real[key] == said[key] for key in real]
    return sum(same), len(same)


def _same_best(of: Methods) -> Tile | None:
    same, every = _agreement(of)
    means = f"Places where the method {of.run.times_are} fastest is the published one"
    return Tile(f"{same} of {every}", means, "" if of.run.measured else FITTED_TOO) if every else None


def _memory_right(run: Run) -> Tile | None:
    rows = run.comparison[run.comparison["metric"] == OUT]
    if rows["reference"].nunique() < 2:
        return None
    right = int((rows["error_pct"] == 0).sum())
    return Tile(f"{right} of {len(rows)}", "Cells out of memory, or not, as published", "")


# -- times -----------------------------------------------------------------------------------------


def _crossings(of: Methods, setting: Case) -> dict[float, str]:
    """Returns lengths at which the fastest method changes: crossovers of methods fastest in turn."""
    if of.view.positions:
        return {}
    crossover = at(of.run.metric("crossover_tokens"), setting)
    places = at(of.ranked, setting).groupby("place", sort=True)
    fastest, found = [extreme(rows, rows["value"], largest=False) for _, rows in places], {}
    for one, other in pairwise(fastest):
        pair = (crossover["strategy"] == one["strategy"]) & (crossover["rival"] == other["strategy"])
        own = crossover[pair & crossover["value"].between(one["place"], other["place"])]
        if one["strategy"] != other["strategy"] and len(own):
            place = float(own["value"].iloc[0])
            found[place] = f"{place:,.0f}"
    return found


def _panel(of: Methods, setting: Case) -> go.Figure:
    rows, out, published = (at(rows, setting) for rows in (of.latencies, of.out, of.compared))
    axis = of.view.axis(pd.concat([rows, out]) if len(out) else rows)
    return figures.method_times(rows, out, published, _crossings(of, setting), axis, of.run.times_are)


def _panels(of: Methods) -> list[Plot]:
    describes, plots = "time of each method over lengths", []
    if len(of.settings) > PANELS_AT_MOST:
        options: common.Dimension = ("Setting", [(setting_text(s), s) for s in of.settings], 0)
        return [common.plot("times", describes, [options], lambda setting: _panel(of, setting))]
    for i, setting in enumerate(of.settings):
        text = f"{describes}: {setting_text(setting)}"
        plots.append(common.drawn(f"times-{i}", text, _panel(of, setting), _heading(setting)))
    return plots


def _best_table(of: Methods) -> Table:
    """Returns the fastest method at each place, a column for each setting."""
    rows = of.ranked
    names = dict(zip(rows["place"], _place_names(rows, of.view), strict=True))

    def best_at(place: float, setting: Case) -> str:
        own = at(rows[rows["place"] == place], setting).reset_index(drop=True)
        if own.empty:
            return "nothing fits"
        best = extreme(own, own["value"], largest=False)
        return f"{best['label']}, {lasting(best['value'])}"

    place = ("context", "l") if of.view.positions else ("length", "r")
    bests = [(setting_text(s) or "fastest", "l", partial(best_at, setting=s)) for s in of.settings]
    return common.tabled(sorted(names), (*place, names.__getitem__), *bests)


def _place_names(rows: pd.DataFrame, shown: View) -> list[str]:
    batches = [f"batch {batch:,.0f} × " if shown.positions else "" for batch in rows["batch"]]
    return [f"{batch}{tokens(n)}" for batch, n in zip(batches, rows[shown.length], strict=True)]


Beside = tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]  # of one place: found, published, ranked


def _method_columns(strategy: str, label: str) -> list[common.Column]:
    def own(rows: pd.DataFrame, column: str, show: Callable[[float], str]) -> str:
        values = rows.loc[rows["strategy"] == strategy, column]
        return show(values.iloc[0]) if len(values) else ""

    return [
        (label, "r", lambda place: own(place[0], "value", lasting)),
        ("published", "r", lambda place: own(place[1], "reference", lasting)),
        ("error", "r", lambda place: own(place[1], "error_pct", signed_percent)),
    ]


def _chosen(place: Beside) -> str:
    splits = place[0]["splits"].dropna()
    return recorded(int(splits.iloc[0])) if len(splits) else ""


def _ratio(place: Beside) -> str:
    both = place[2]["value"]
    return times(both.max() / both.min()) if len(both) > 1 else ""


def _side_by_side(of: Methods) -> Table:
    """Returns every place of every setting with the methods' times, the splits, and the published times."""
    rows, shown, places = of.latencies, of.view, []
    axes = [*shown.axes, "place"]
    for _, group in rows.groupby(axes, sort=True):
        case = tuple((axis, group[axis].iloc[0]) for axis in axes)
        places.append((group, at(of.compared, case), at(of.ranked, case)))
    labels = _method_names(rows)
    methods = [_method_columns(name, labels[name]) for name in figures.looks(list(rows["strategy"]))]
    setting = "setting" if set(shown.axes) - {DEVICE} else "device"
    table = common.tabled(
        places,
        ("place", "l", lambda place: _place_names(place[0], shown)[0]),
        (setting, "l", lambda place: shown.setting(place[0].iloc[0])),
        *(column for method in methods for column in method),
        ("splits", "r", _chosen),
        ("slowest over fastest", "r", _ratio),
    )
    return common.without_empty_columns(table)


def _method_names(rows: pd.DataFrame) -> dict[str, str]:
    """Returns strategy -> name of the method without its device."""
    names = map(of_any_device, rows["label"], rows[DEVICE])
    return dict(zip(rows["strategy"], names, strict=True))


def _crossover_table(of: Methods) -> list[Details]:
    run, shown = of.run, of.view
    rows = pd.concat([run.metric("crossover_tokens"), run.metric("faster_below_tokens")])
    if rows.empty:
        return []
    table = common.tabled(
        rows.sort_values([*shown.axes, "value"], kind="stable").to_dict("records"),
        ("setting", "l", shown.setting),
        ("tokens", "r", common.shows("value", "{:,.0f}".format)),
        ("what changes", "l", common.field("source")),
    )
    return [Details(f"All {counted(len(rows), 'crossover')}", table=common.without_empty_columns(table))]


def _all_times(of: Methods) -> list[Details]:
    run, shown = of.run, of.view
    rows = run.results[run.results["metric"] == LATENCY]
    bounds, source = ("least to largest (ms)", "source") if run.measured else ("interval (ms)", "price")
    table = common.tabled(
        rows.to_dict("records"),
        ("method", "l", common.field("label")),
        ("at", "l", shown.at),
        ("time", "r", lambda row: lasting(row["value"]) if known(row["value"]) else "out of memory"),
        (bounds, "r", lambda row: interval(row["low"], row["high"], 1e3)),
        (source, "l", common.field("source")),
    )
    every = f"All {counted(len(rows), 'case')} as a table"
    return [Details(every, table=common.without_empty_columns(table))]


def _times(of: Methods) -> list[Section]:
    run, places = of.run, of.view.positions
    if run.metric(LATENCY).empty or not of.settings:
        return []
    notes = []
    if len(of.published.comparison):
        lines = "measured" if run.measured else "predictions"
        notes.append(f"Lines are {lines}, marks are published{HOLLOW[run.times_are]}.")
    if len(of.out):
        notes.append("A cross above the dotted line: the method runs out of memory.")
    if not places and len(run.metric("crossover_tokens")):
        notes.append("A dashed line: the length at which another method becomes the fastest.")
    parts = {
        "plots": _panels(of),
        "table": _side_by_side(of) if places else _best_table(of),
        "notes": [" ".join(notes)] if notes else [],
        "details": [*_crossover_table(of), *_all_times(of)],
        **({"lead": LONGER} if places else {}),
    }
    axis = "context" if run.study == "decode_attention" else "length"
    return [common.section("operators", "times", {"axis": axis}, **parts)]


# -- memory ----------------------------------------------------------------------------------------


def _memory(of: Methods) -> list[Section]:
    rows = of.placed(of.run.metric(MEMORY))
    if rows.empty:
        return []
    rows = of.beside(rows, of.out, "strategy", out="metric")
    rows = rows.assign(out=rows["out"].notna())
    found = cases_of(rows, of.view.axes)

    def draw(setting: Case) -> go.Figure:
        own = at(rows, setting)
        return figures.memory(own, of.view.axis(own, 0.05))

    # Opens on the setting in which most methods run out of memory.
    opens = int(np.argmax([int(at(rows, setting)["out"].sum()) for setting in found]))
    options = [("Setting", [(setting_text(s), s) for s in found], opens)]
    plot = common.plot("memory", "memory of each method", options, draw)
    more = " A cross: more than the device has." if rows["out"].any() else ""
    return [common.section("operators", "memory", {"out": more}, plots=[plot])]


# -- predicted against published -------------------------------------------------------------------


def _errors_of(rows: pd.DataFrame) -> tuple[str, str, str]:
    if rows.empty:
        return "", "", ""
    sizes = rows["error_pct"].abs()
    return str(len(rows)), size_percent(sizes.median()), signed_percent(extreme(rows, sizes)["error_pct"])


def error_table(rows: pd.DataFrame, memory: pd.DataFrame, by: str, times_are: str = "predicted") -> Table:
    """Returns count, median and worst error of each method (or table): first of predictions, then of fitted
    figures; then the number of cells that run out of memory, or not, as published."""
    lines = []
    for key in dict.fromkeys([*rows[by], *memory[by]]):
        own, cells = rows[rows[by] == key], memory[memory[by] == key]
        fitted = own["role"] == common.FITTED
        right = f"{int((cells['error_pct'] == 0).sum())} of {len(cells)}" if len(cells) else ""
        lines.append([key, *_errors_of(own[~fitted]), *_errors_of(own[fitted]), right])
    head = ["", times_are, "median", "worst", "fitted", "median", "worst", "memory as published"]
    return common.without_empty_columns(Table(head, lines, "lrrrrrrr"))


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """Names each row by its label, or else by its method."""
    return rows.assign(name=rows["label"].where(rows["label"] != "", rows["strategy"]))


def _table_of(source: str) -> str:
    """Returns the table of a figure; the first one if several tables print it."""
    first = source.partition("; ")[0]
    return first.rpartition(",")[0] or first


def _judged(row: Row) -> str:
    if row["metric"] == LATENCY:
        return signed_percent(row["error_pct"])
    return "right" if row["error_pct"] == 0 else "wrong"


def _said(column: str) -> Callable[[Row], str]:
    fits = {True: "out of memory", False: "fits"}
    return lambda row: lasting(row[column]) if row["metric"] == LATENCY else fits[bool(row[column])]


def _every(rows: pd.DataFrame, shown: View, times_are: str) -> Table:
    return common.tabled(
        _named(rows).to_dict("records"),
        ("method", "l", common.field("name")),
        ("at", "l", shown.at),
        ("published", "r", _said("reference")),
        (times_are, "r", _said("predicted")),
        ("error", "r", _judged),
        ("role", "l", common.field("role")),
        ("source", "l", common.field("source")),
    )


def _wrong_memory(run: Run, shown: View) -> list[str]:
    rows = run.comparison[(run.comparison["metric"] == OUT) & (run.comparison["error_pct"] != 0)]
    return [
        f"Memory: {row['label']} at {shown.at(row)} is {'counted' if run.measured else 'predicted'} to "
        f"{'run out of it' if row['predicted'] else 'fit'}, but is published as "
        f"{'out of it' if row['reference'] else 'fitting'} ({row['source']})."
        for row in rows.to_dict("records")
    ]


def _roles(rows: pd.DataFrame) -> dict[str, str]:
    """Returns role -> its name; fitted figures are last."""
    ordered = sorted(dict.fromkeys(rows["role"]), key=lambda role: role == common.FITTED)
    return {role: common.ROLES.get(role, role) for role in ordered}


def _compared(of: Methods) -> list[Section]:
    run, only, shown = of.run, of.published, of.view
    found = common.comparison(only)
    rows = only.comparison[only.comparison["error_pct"].notna()]
    memory = run.comparison[run.comparison["metric"] == OUT]
    if not found:
        return []
    # Whether a method fits is a finding only if some do not.
    memory = memory if memory["reference"].nunique() > 1 else memory.head(0)
    order = {name: i for i, name in enumerate(figures.looks(list(rows["strategy"])))}
    ordered = rows.assign(rank=rows["strategy"].map(order)).sort_values("rank", kind="stable")
    tables, cells = (frame.assign(source=frame["source"].map(_table_of)) for frame in (rows, memory))
    by_table = error_table(tables, cells, "source", run.times_are)
    figure = figures.errors(rows, _roles(rows), shown.at, run.times_are)
    every = pd.concat([rows, memory]) if len(memory) else rows
    table = _every(every, shown, run.times_are)
    details = [Details("By table", table=by_table)] if len(by_table.rows) > 1 else []
    return [
        replace(
            found[0],
            plots=[common.drawn("errors", f"error of every {run.times_are} time, by role", figure)],
            table=error_table(_named(ordered), _named(memory), "name", run.times_are),
            notes=[*found[0].notes, *_wrong_memory(run, shown)],
            details=[*details, Details(f"All {len(every):,} compared figures", table=table)],
        )
    ]
