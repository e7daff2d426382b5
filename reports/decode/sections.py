"""The decode study: latency of a token, its parts, and the conditions under which speculation pays."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.common.figures import variants
from simcore.reports.decode import figures
from simcore.reports.page import Definition, Details, Opening, Plot, Section, Table, Tile
from simcore.reports.run import DEVICE, Run, extreme
from simcore.reports.text import (
    duration,
    interval,
    known,
    listed,
    milliseconds,
    percent,
    scientific,
    signed,
    significant,
    times,
    tokens,
)

CASE = ["label", "context_tokens", "batch", "hit_rate"]
SUMS_WITHIN = 1e-3
CROSSOVERS_SHOWN = 14
PLACES_SHOWN = 4


def opening(run: Run) -> Opening:
    """Returns the top of the page with up to five key figures."""
    made = (
        _fastest(run), _best_tensor(run), _gain(run), _communication(run), _of_bound(run),
        common.accuracy(run),
    )  # fmt: skip
    return replace(common.opening(run), tiles=[tile for tile in made if tile])


def sections(run: Run) -> list[Section]:
    """Returns the decode study's sections, in the order of the page."""
    return [
        *_latency(run),
        *_critical_path(run),
        *_timeline(run),
        *_crossover(run),
        *_states(run),
        *common.comparison(run),
        *common.prices(run),
        *_speculation(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Returns the formulas of the metrics that this run has."""
    present = set(run.results["metric"])
    present |= {"crossover"} if any(m.startswith("crossover_") for m in present) else set()
    present |= {"speedup_over_tensor_parallel"} if len(_ratios(run)) else set()
    found = common.formulas("decode", of=present.__contains__)
    found += common.formulas("alspec") if run.results["strategy"].str.startswith("alspec").any() else []
    found += common.formulas("error bounds") if any(m.startswith("error_bound") for m in present) else []
    found += common.share_formula(run) if "price_share" in present else []
    return found + common.error_formulas(run)


# -- choices ---------------------------------------------------------------------------------------


def _values(rows: pd.DataFrame, column: str) -> list[float]:
    return sorted(float(v) for v in rows[column].dropna().unique())


def _batches(run: Run, rows: pd.DataFrame) -> common.Dimension:
    """Returns the batches of these rows as a choice that opens on the batch of the answer."""
    options = [(f"{b:.0f}" if known(b) else "", b) for b in _values(rows, "batch") or [math.nan]]
    _, wanted = _place(run)
    return common.opening_on("Batch", options, lambda batch: batch == wanted)


def _hit_rates(rows: pd.DataFrame) -> list[common.Option]:
    return [(percent(h), h) for h in _values(rows, "hit_rate")]


def _at(rows: pd.DataFrame, column: str, value: float) -> pd.DataFrame:
    chosen: "pd.Series[bool]" = rows[column] == value if known(value) else rows[column].isna()
    return rows[chosen]


# -- key figures -----------------------------------------------------------------------------------


def _place(run: Run) -> tuple[float, float]:
    """Returns the answer's context and batch: the summary's, or else the longest and there the largest."""
    if {"context_tokens", "batch"} <= run.best_at.keys():
        return run.best_at["context_tokens"], run.best_at["batch"]
    rows = run.metric("token_latency_s")
    context = rows["context_tokens"].max()
    return context, _at(rows, "context_tokens", context)["batch"].max()


def _there(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows at the context and batch of the answer."""
    context, batch = _place(run)
    return _at(_at(rows, "context_tokens", context), "batch", batch).reset_index(drop=True)


def _at_place(run: Run) -> str:
    """Returns the answer's context, and its batch if the run has several: " at 128K tokens, batch 8"."""
    context, batch = _place(run)
    several = run.metric("token_latency_s")["batch"].nunique() > 1
    parts = [f"{tokens(context)} tokens"] if known(context) else []
    parts += [f"batch {batch:,.0f}"] if several and known(batch) else []
    return " at " + ", ".join(parts) if parts else ""


def _longest(run: Run) -> pd.DataFrame:
    rows = run.metric("token_latency_s")
    return _there(run, run.ranked(rows[rows["value"] > 0]))


def _beside(run: Run, others: pd.DataFrame) -> pd.DataFrame:
    """Returns the latencies at the place of the answer, with the values of another metric as `other`."""
    others = others[[*CASE, "value"]].rename(columns={"value": "other"})
    return _longest(run).merge(others, on=CASE)


def _where(row: pd.Series) -> str:
    return str(row["label"]) + (f", {percent(row['hit_rate'])} hits" if known(row["hit_rate"]) else "")


def _quickest(rows: pd.DataFrame, means: str) -> Tile:
    best = extreme(rows, rows["value"], largest=False)
    return Tile(milliseconds(best["value"]), means, _where(best))


def _fastest(run: Run) -> Tile | None:
    rows = _longest(run)
    return _quickest(rows, f"Fastest token{_at_place(run)}") if len(rows) else None


def _best_tensor(run: Run) -> Tile | None:
    rows = _longest(run)
    own = rows[rows["strategy"] == "tensor_parallel"].reset_index(drop=True)
    some = 0 < len(own) < len(rows)
    return _quickest(own, f"Best of tensor parallelism{_at_place(run)}") if some else None


def _gain(run: Run) -> Tile | None:
    ratio = _there(run, _ratios(run))
    if ratio.empty:
        return None
    best = extreme(ratio, ratio["ratio"])
    means = "Largest speed-up on as many devices"
    if best["ratio"] < 1:
        means = "ALSpec against tensor parallelism on as many devices, at best"
    return Tile(times(best["ratio"]), means, _where(best) + "," + _at_place(run))


def _communication(run: Run) -> Tile | None:
    rows, exposed = _longest(run), run.metric("exposed_communication_s")
    joined = _beside(run, exposed)
    if joined.empty:
        return None
    best = joined[joined["value"] == rows["value"].min()]
    if best.empty or (best["other"].iloc[0] == 0 and best["devices"].iloc[0] == 1):
        return None
    seconds, of = best["other"].iloc[0], best["value"].iloc[0]
    means = "Exposed communication in the fastest token"
    return Tile(percent(seconds / of, 2), means, f"{milliseconds(seconds)} of {milliseconds(of)}")


def _of_bound(run: Run) -> Tile | None:
    """Returns the least latency (weights and KV cache read once) as a share of the fastest token's."""
    joined = _beside(run, _there(run, _read_once(run)))
    if joined.empty:
        return None
    of, least = joined["value"].iloc[0], joined["other"].iloc[0]
    means = "Of the speed of reading weights and KV once"
    return Tile(percent(least / of, 3), means, f"{milliseconds(least)} of {milliseconds(of)}")


# -- latency ---------------------------------------------------------------------------------------

# Whether measured -> the meaning of a latency's low and high end.
INTERVALS: Mapping[bool, str] = {False: "90 % interval", True: "range of the runs"}
TABLE_METRICS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("tokens_per_s_per_user", "tokens/s per user", lambda v: significant(v, 3)),
    ("speedup_over_baseline", "over baseline", times),
    ("attention_share", "attention", percent),
    ("exposed_communication_s", "exposed communication", duration),
    ("overlap_gain_s", "overlap gain", duration),
    ("latency_if_priced_s", "if nothing is free", milliseconds),
    ("read_once_s", "weights and KV read once", milliseconds),
]

READ_ONCE_NOTE = (
    "Dashed, where one batch is shown: weights and KV cache read once at the memory's datasheet rate, which "
    "no step can beat: what Flash-Decoding's figure calls the upper bound of the speed."
)


def _all_figures(run: Run) -> Table:
    rows, metrics = run.metric("token_latency_s"), []
    for metric, name, show in TABLE_METRICS:
        own = run.metric(metric)[[*CASE, "value"]].drop_duplicates(CASE, keep="last")
        if len(own):
            rows = rows.merge(own.rename(columns={"value": metric}), on=CASE, how="left")
            metrics.append((name, "r", common.shows(metric, show)))
    table = common.tabled(
        rows.to_dict("records"),
        ("strategy", "l", common.field("label")),
        ("context", "r", common.shows("context_tokens", tokens)),
        ("batch", "r", common.if_known("batch", "{:.0f}".format)),
        ("hits", "r", common.if_known("hit_rate", percent)),
        ("ms per token", "r", lambda row: significant(row["value"] * 1e3, 4)),
        (INTERVALS[run.measured], "r", lambda row: interval(row["low"], row["high"], 1e3)),
        *metrics,
        ("source", "l", common.field("source")),
    )
    return common.without_empty_columns(table)


def _if_priced(run: Run) -> list[str]:
    """Describes the fastest case with free ops, with its latency if nothing is free."""
    joined = _beside(run, _there(run, run.metric("latency_if_priced_s")))
    if joined.empty:
        return []
    best = extreme(joined, joined["value"], largest=False)
    latency = f"{_where(best)} {milliseconds(best['other'])}{_at_place(run)}"
    return [f"With what the profile takes as free priced by link and roofline: {latency}."]


def _read_once(run: Run) -> pd.DataFrame:
    """Returns the bounds to draw: none for a single context, or if many lines would hide the latencies."""
    rows = run.metric("read_once_s")
    crowded = rows["label"].nunique() > 1 or rows["context_tokens"].nunique() < 2
    return rows.head(0) if crowded else rows


def _one_line_a_batch(rows: pd.DataFrame) -> bool:
    """Whether lines differ only in their batch."""
    return bool(rows["label"].nunique() < 2 and rows["hit_rate"].isna().all() and rows["batch"].nunique() > 1)


def _latency_notes(run: Run, rows: pd.DataFrame, one_context: bool) -> list[str]:
    notes = []
    if not one_context and rows.groupby("label")["hit_rate"].nunique().gt(1).any():
        notes.append("A band reaches from the fewest hits (upper edge) to the most (lower edge).")
    if rows["source"].str.contains("extrapolated").any():
        notes.append("Hollow: the price is extrapolated beyond what was measured or published.")
    if (rows["low"] < rows["high"]).any():
        of = "Ranges of the runs" if run.measured else "90 % intervals"
        notes.append(f"{of}: on hover and in the table.")
    return [*_if_priced(run), *([" ".join(notes)] if notes else [])]


def _latency(run: Run) -> list[Section]:
    rows = run.metric("token_latency_s")
    if rows.empty:
        return []
    rows = rows.assign(ends=INTERVALS[run.measured])
    shown, bound, rates = variants(run.results), _read_once(run), _hit_rates(rows)
    rival = run.metric("rival_token_latency_s")
    one_context = rows["context_tokens"].nunique() < 2
    dimensions: list[common.Dimension] = [_batches(run, rows)]
    if _one_line_a_batch(rows) and not one_context:
        dimensions = [("Batch", [("all", None), *dimensions[0][1]], 0)]
    if not one_context:
        dimensions.append(("Hit rate", [("all", None), *rates] if len(rates) > 1 else [("", None)], 0))

    def draw(batch: float | None, hit_rate: float | None = None) -> go.Figure:
        if batch is None:
            return figures.latency_by_batch(rows, rival=rival)
        own = _at(rows, "batch", batch)
        if one_context:
            return figures.latency_bars(own, shown)
        second = _at(rival, "batch", batch)
        return figures.latency_over_context(own, shown, _at(bound, "batch", batch), hit_rate, rival=second)

    at = f" at {tokens(rows['context_tokens'].iloc[0])} tokens" if one_context else " against context"
    of = "of one layer, without embedding and LM head" if run.scenario.get("part") == "layer" else ""
    baseline = run.summary.get("baseline")
    words = {
        "at": at,
        "time": of or "from one token to the next, for one user",
        "baseline": f" The baseline is {baseline}." if baseline else "",
    }
    plot = common.plot("latency", f"latency per token{at}, by strategy", dimensions, draw)
    every = f"All {len(rows):,} latencies" if len(rows) > 1 else "The latency"
    details = [Details(f"{every} as a table", table=_all_figures(run))]
    read_once = [] if bound.empty else [READ_ONCE_NOTE]
    second = [] if rival.empty or one_context else [f"Dotted: {rival['source'].iloc[0]}, the second model."]
    notes = [*_latency_notes(run, rows, one_context), *read_once, *second]
    return [common.section("decode", "latency", words, plots=[plot], notes=notes, details=details)]


# -- critical path ---------------------------------------------------------------------------------


def _largest_gap(parts: pd.DataFrame, latency: pd.DataFrame) -> float:
    sums = parts.groupby(CASE, dropna=False, sort=False)["value"].sum().reset_index()
    joined = sums.merge(latency[[*CASE, "value"]], on=CASE, suffixes=("", "_latency"))
    gaps = (joined["value"] - joined["value_latency"]).abs() / joined["value_latency"]
    return float(gaps.max()) if len(gaps) else math.nan


def _critical_path(run: Run) -> list[Section]:
    parts = run.metric("critical_path_s")
    if parts.empty:
        return []
    shown = variants(run.results)
    contexts = [(tokens(c), c) for c in _values(parts, "context_tokens")] or [("", math.nan)]
    rates: list[common.Option] = _hit_rates(parts) or [("", None)]
    dimensions: list[common.Dimension] = [
        _batches(run, parts),
        ("Context", contexts, len(contexts) - 1),
        ("Hit rate", rates, len(rates) - 1),
    ]

    def draw(batch: float, context: float, hit_rate: float | None) -> go.Figure:
        own = _at(_at(parts, "batch", batch), "context_tokens", context)
        return figures.critical_path(figures.at_hit_rate(own, hit_rate), shown)

    gap = _largest_gap(parts, run.metric("token_latency_s"))
    off = f"The parts differ from the latency by up to {percent(gap)}: one of the two is wrong."
    sums = "The parts sum to the latency per token. " if gap <= SUMS_WITHIN else ""
    plot = common.plot("critical-path", "latency per token by kind of op", dimensions, draw)
    words = {"sums": sums, "rare": percent(figures.RARE_BELOW)}
    flags = [off] if gap > SUMS_WITHIN else []
    return [common.section("decode", "critical-path", words, flags=flags, plots=[plot])]


# -- timeline --------------------------------------------------------------------------------------


def _timeline(run: Run) -> list[Section]:
    spans = run.timeline
    spans = spans[spans["start_s"].notna() & spans["end_s"].notna()]
    if spans.empty:
        return []
    cases = [(case, case) for case in dict.fromkeys(spans["case"])]
    several = spans["tensor"].nunique() > 1
    ranks: list[common.Option] = [("one of each group", True), ("all", False)] if several else [("", False)]

    def draw(case: str, one_each: bool) -> go.Figure:
        own = spans[spans["case"] == case]
        return figures.timeline(own[own["tensor"] == own["tensor"].min()] if one_each else own)

    dimensions: list[common.Dimension] = [("Case", cases, 0), ("Ranks", ranks, 0)]
    plot = common.plot("timeline", "timeline of one layer on every rank", dimensions, draw)
    # A run on several devices shows one of them, named in its case.
    which = [f"Shown: {cases[0][0]}."] if len(cases) == 1 and run.results[DEVICE].nunique() > 1 else []
    both = {"hit", "miss"} <= set(spans["outcome"])
    texts = {} if both else {"heading": "One layer on every rank", "lead": ""}
    words = {"zoom": common.ZOOM}
    return [common.section("decode", "timeline", words, plots=[plot], notes=which, **texts)]


# -- crossover -------------------------------------------------------------------------------------


def _ratios(run: Run) -> pd.DataFrame:
    return figures.same_devices_ratio(run.metric("token_latency_s"))


def _maps(run: Run) -> list[Plot]:
    ratio, labels = _ratios(run), [v.label for v in variants(run.results)]
    rows = ratio[ratio["hit_rate"].notna()]
    if rows.empty:
        return []
    limit = max(1.05, rows["ratio"].max(), 1 / rows["ratio"].min())
    plots: list[Plot] = []
    for label in labels:
        own = rows[rows["label"] == label]
        if own[["context_tokens", "hit_rate"]].drop_duplicates().shape[0] < 2:
            continue
        devices = own["devices"].iloc[0]

        def draw(batch: float, own: pd.DataFrame = own, devices: float = devices) -> go.Figure:
            return figures.speed_up_map(_at(own, "batch", batch), devices, limit)

        heading = f"{label}, over tensor parallelism on {devices:.0f} devices"
        key, batches = f"speed-up-{len(plots)}", [_batches(run, own)]
        plots.append(common.plot(key, f"speed-up of {heading}", batches, draw, heading))
    return plots


CROSSOVERS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("crossover_context_tokens", "context", lambda v: f"{tokens(v)} tokens"),
    ("crossover_hit_rate", "hit rate", percent),
    ("crossover_hit_rate_if_priced", "hit rate, nothing free", percent),
    ("crossover_link_latency_s", "link latency", duration),
]


Place = tuple[float, float]  # context and hit rate, nan for the axis of the crossover


@dataclass(frozen=True)
class _Crossing:
    """Crossovers of one strategy with the same answer, and the places of the search."""

    name: str
    label: str
    value: str
    remark: str
    batches: tuple[float, ...]
    places: tuple[Place, ...]


def _crossings(run: Run) -> list[_Crossing]:
    """Merges places with the same answer into one entry, and batches with the same places likewise."""
    entries: list[_Crossing] = []
    for metric, name, show in CROSSOVERS:
        rows = run.results[run.results["metric"] == metric]
        texts = [show(value) if known(value) else "none" for value in rows["value"]]
        places = list(zip(rows["context_tokens"], rows["hit_rate"], strict=True))
        rows = rows.assign(
            order=pd.factorize(rows["label"])[0],
            says=texts,
            place=pd.Series(places, rows.index, dtype=object),
        )
        rows = rows.sort_values(["order", "batch"], kind="stable")
        keys = ["label", "batch", "says", "source"]
        found = rows.groupby(keys, dropna=False, sort=False)["place"].agg(tuple).reset_index()
        same = ["label", "says", "source", found["place"].map(str)]
        for _, own in found.groupby(same, sort=False):
            label, says, remark = (str(own[column].iloc[0]) for column in keys if column != "batch")
            batches = tuple(own["batch"].dropna())
            entries.append(_Crossing(name, label, says, remark, batches, own["place"].iloc[0]))
    return entries


def _where_searched(places: Sequence[Place], at_most: int | None) -> str:
    """ "50 % and 75 % hits"; "1K and 32K tokens, 50 % hits"; "1K tokens, 50 % hits and 3 more"."""
    contexts = list(dict.fromkeys(c for c, _ in places if known(c)))
    rates = list(dict.fromkeys(h for _, h in places if known(h)))
    if len(places) == max(1, len(contexts)) * max(1, len(rates)):
        parts = [listed((tokens(c) for c in contexts), at_most) + " tokens"] if contexts else []
        parts += [listed((percent(h) for h in rates), at_most) + " hits"] if rates else []
        return ", ".join(parts)
    one_by_one = [_where_searched([place], None) for place in places]
    few = one_by_one[: at_most - 1] if at_most is not None and len(places) > at_most else one_by_one
    rest = len(places) - len(few)
    return "; ".join(few) + (f" and {rest} more" if rest else "")


def _crossover_table(run: Run, entries: Sequence[_Crossing], at_most: int | None) -> Table:
    several = run.results["batch"].nunique() > 1
    table = common.tabled(
        entries,
        ("break-even", "l", lambda entry: entry.name),
        ("strategy", "l", lambda entry: entry.label),
        ("batch", "r", lambda entry: listed(f"{b:,.0f}" for b in entry.batches) if several else ""),
        ("at", "l", lambda entry: _where_searched(entry.places, at_most)),
        ("value", "r", lambda entry: entry.value),
        ("remark", "l", lambda entry: entry.remark),
        wraps=True,
    )
    return common.without_empty_columns(table)


def _crossover(run: Run) -> list[Section]:
    plots, every = _maps(run), _crossings(run)
    if not plots and not every:
        return []
    first = [entry for entry in every if entry.name == CROSSOVERS[0][1]]
    few = every if len(every) <= CROSSOVERS_SHOWN else (first or every)[:CROSSOVERS_SHOWN]
    table, whole = _crossover_table(run, few, PLACES_SHOWN), _crossover_table(run, every, None)
    count = int(run.results["metric"].isin([metric for metric, _, _ in CROSSOVERS]).sum())
    hidden = [Details(f"All {count:,} crossovers", table=whole)] if table.rows != whole.rows else []
    texts = {} if plots else {"lead": ""}
    shown = table if few else None
    return [common.section("decode", "crossover", plots=plots, table=shown, details=hidden, **texts)]


# -- states beside KV ------------------------------------------------------------------------------


def _states(run: Run) -> list[Section]:
    """Returns the memory of a model with states by context, and the time of a layer by its mixer."""
    rows = run.results[run.results["metric"].isin(STATES)]
    if rows.empty:
        return []
    layers = run.metric("layer_s")
    mixers = list(dict.fromkeys(layers["op_kind"]))
    lines = []
    place = ["label", "batch", "context_tokens"]
    for label, batch, context in rows[place].drop_duplicates().itertuples(index=False):
        own = rows[(rows[place] == [label, batch, context]).all(axis=1)]
        values = dict(zip(own["metric"], own["value"], strict=True))
        here = layers[(layers[place] == [label, batch, context]).all(axis=1)]
        by_mixer = dict(zip(here["op_kind"], here["value"], strict=True))
        cells = [_state_cell(name, values.get(name)) for name in STATES]
        lines.append(
            [str(label), f"{batch:,.0f}", tokens(context), *cells]
            + [duration(by_mixer[mixer]) if mixer in by_mixer else "" for mixer in mixers]
        )
    held = run.metric("rival_sequences_held")
    second = str(held["source"].iloc[0]) if len(held) else ""
    names = [name.format(rival=second) for name in STATES.values()]
    heads = ["", "batch", "context", *names, *(f"a layer of {_plain(mixer)}" for mixer in mixers)]
    align = "l" + "r" * (len(heads) - 1)
    if rows["label"].nunique() < 2:
        heads, lines, align = heads[1:], [line[1:] for line in lines], align[1:]
    table = common.without_empty_columns(Table(heads, lines, align))
    passing = run.results[(run.results["metric"] == "passes_rival_at_tokens")]
    said = passing[["batch", "source"]].dropna().itertuples(index=False)
    notes = list(dict.fromkeys(f"At batch {batch:,.0f} {text}." for batch, text in said if text))
    return [common.section("decode", "states", table=table, notes=notes)]


STATES: Mapping[str, str] = {
    "kv_bytes": "KV",
    "state_bytes": "states",
    "sequences_held": "sequences held",
    "rival_sequences_held": "{rival} holds",
    "speedup_over_rival": "speed-up over {rival}",
}


def _state_cell(name: str, value: float | None) -> str:
    if value is None or not known(value):
        return ""
    if name.endswith("_bytes"):
        return f"{value / 2**30:,.3g} GiB"
    return times(value) if name == "speedup_over_rival" else f"{value:,.0f}"


def _plain(mixer: str) -> str:
    return mixer.replace("_", " ").replace("lrpe", "LRPE")


# -- accuracy of speculation -----------------------------------------------------------------------


def _unique(table: Table) -> Table:
    """Returns the table with each line once."""
    lines = dict.fromkeys(tuple(row) for row in table.rows)
    return common.without_empty_columns(replace(table, rows=[list(line) for line in lines]))


def _scores(run: Run) -> Table | None:
    score = run.metric("hits_score")
    if score.empty:
        return None
    baseline = run.metric("baseline_score")[[*CASE, "value"]].drop_duplicates(CASE, keep="last")
    rows = score.merge(baseline.rename(columns={"value": "base"}), on=CASE, how="left")
    rows = rows.assign(change=rows["value"] - rows["base"])
    table = common.tabled(
        rows.to_dict("records"),
        ("strategy", "l", common.field("label")),
        ("hits", "r", common.if_known("hit_rate", percent)),
        ("score", "r", common.shows("value", significant)),
        ("without speculation", "r", common.shows("base", significant)),
        ("change", "r", common.if_known("change", lambda change: signed(change, 2))),
        ("threshold and task", "l", common.field("source")),
    )
    return _unique(table)


ERROR_BOUNDS = {
    "error_bound_worst_case": "worst case",
    "error_bound_high_probability": "high probability",
}


def _bounds(run: Run) -> Table:
    rows = pd.concat([run.metric(metric) for metric in ERROR_BOUNDS])
    given = run.summary.get("bounds")
    lines = [[path, "", value, ""] for path, value in common.flat(given)] if given else []
    table = common.tabled(
        (row for _, row in rows.iterrows()),
        ("bound on the output's error", "l", lambda row: ERROR_BOUNDS[row["metric"]]),
        ("at", "l", _where),
        ("value", "r", common.shows("value", scientific)),
        ("remark", "l", common.field("source")),
    )
    return _unique(replace(table, rows=[*table.rows, *lines]))


def _speculation(run: Run) -> list[Section]:
    scores, bounds, hits = _scores(run), _bounds(run), run.summary.get("hits")
    if not hits and not scores and not bounds.rows:
        return []
    described = [f"{path}: {text}" if path else text for path, text in common.flat(hits)] if hits else []
    texts = {"lead": ""} if scores or bounds.rows else {}
    notes = [f"Hits: {text}" for text in described]
    details = [Details("Error bounds", table=bounds, opened=True)] if bounds.rows else []
    return [common.section("decode", "speculation", table=scores, notes=notes, details=details, **texts)]
