"""The decode study: how long a token takes, what it consists of, and when speculation pays."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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

FORMULAS: Sequence[tuple[str, Definition]] = [
    (
        "token_latency_s",
        Definition(
            "Latency per token (TPOT)",
            "latency = (end of the last token − start of the run) / tokens",
            "A token ends when it is sampled and, with speculation, verified. No prefill is in it, so it is "
            "comparable with vLLM's TPOT = (E2EL − TTFT) / (tokens − 1).",
        ),
    ),
    ("tokens_per_s_per_user", Definition("Tokens per second and user", "1 / latency")),
    (
        "read_once_s",
        Definition(
            "Weights and KV read once",
            "(bytes of the weights that a step reads + bytes of the KV cache) / memory bytes per second",
            "By the datasheet; of the embedding only rows are read. A bound, not a prediction.",
        ),
    ),
    (
        "critical_path_s",
        Definition(
            "Critical path",
            "latency = Σ over op kinds of the seconds that the token's critical path spends in that kind",
            "Walked back from the end of a token: each op to the one thing it waited for last. "
            "Time in which nothing on the path ran is host, gate or idle.",
        ),
    ),
    ("attention_share", Definition("Share of attention", "critical-path seconds in attention ops / latency")),
    (
        "non_attention_share",
        Definition("Share of all other ops", "critical-path seconds in the other ops / latency"),
    ),
    (
        "latency_if_priced_s",
        Definition(
            "Latency if nothing is free",
            "latency with every op that the profile assumes to take no time priced by link and roofline",
            "Exchange of priorities, the put of the speculated attention, its receipt, the sum of the norms, "
            "the early part of attention. Host and gate costs are those of the run.",
        ),
    ),
    (
        "attention_s_per_layer",
        Definition(
            "Attention and the rest, per layer",
            "attention: critical-path seconds in attention / layers\n"
            "the rest:  (latency − attention − embedding and head) / layers",
        ),
    ),
    (
        "verification_s",
        Definition(
            "Verification",
            "speculative attention and the sum of its norms over the ranks − plain attention, per layer",
            "ALSpec, section 3.4. None where the speculative kernel is the faster of the two, as measured.",
        ),
    ),
    (
        "exposed_communication_s",
        Definition("Exposed communication", "critical-path seconds in collectives, exchanges and puts"),
    ),
    (
        "speedup_over_baseline",
        Definition(
            "Speed-up over the baseline",
            "latency of the baseline / latency, at the same context and batch",
        ),
    ),
    (
        "speedup_over_tensor_parallel",
        Definition(
            "Speed-up on the same devices",
            "latency(tensor parallelism on d devices) / latency(ALSpec on d devices)",
            "Same context and batch; d = ranks × groups.",
        ),
    ),
    (
        "overlap_gain_s",
        Definition(
            "Gain of the last layer's overlap",
            "latency with both groups meeting before the LM head − latency with the last layer overlapped",
            "The paper's formula leaves out that the last layer's attention overlaps what follows it "
            "(ALSpec, appendix F, footnote 6).",
        ),
    ),
    (
        "crossover",
        Definition(
            "Crossover",
            "the context, hit rate or link latency at which latency(ALSpec) = latency(tensor parallelism)",
            "On as many devices, all else equal, searched within the range of the study.",
        ),
    ),
]
APPENDIX_F = [
    Definition(
        "Tensor parallelism, by the paper's formula",
        "latency = fixed + N · (per_layer + FD(K))",
        "ALSpec, appendix F. N layers; per_layer: a layer without attention; fixed: embedding and head; "
        "FD(K): flash decode over K tokens.",
    ),
    Definition(
        "ALSpec, by the paper's formula",
        "latency = fixed + ⌊N·r⌋ · (SFD_R(K) + max(SFD_S(K) − SFD_R(K), per_layer))\n"
        "                + ⌈N·(1 − r)⌉ · (per_layer + SFD_S(K))",
        "ALSpec, appendix F. r: hit rate; SFD_S and SFD_R: speculative flash decode of the sender and of "
        "the receiver. Rounding down the hits makes it an upper bound.",
    ),
]
BOUNDS = [
    Definition(
        "Worst-case error bound",
        "ε ≤ Σ over layers i of (1 + α)^(N−i+1) · (1 + f(R)·β)^(N−i) · δ_i",
        "ALSpec, equation 1; δ_i: the largest accepted difference in layer i.",
    ),
    Definition("High-probability error bound", "ε grows with √N instead of with N", "ALSpec, appendix A.3."),
    Definition("Verification", "accepted where ‖speculated − exact‖₂ < λ · ‖exact‖₂", "ALSpec, section 3.2."),
]


def opening(run: Run) -> Opening:
    """The top of the page with up to five key figures."""
    made = (
        _fastest(run), _best_tensor(run), _gain(run), _communication(run), _of_bound(run),
        common.accuracy(run),
    )  # fmt: skip
    return replace(common.opening(run), tiles=[tile for tile in made if tile])


def sections(run: Run) -> list[Section]:
    """The decode study's sections, in the order of the page."""
    return [
        *_latency(run),
        *_critical_path(run),
        *_timeline(run),
        *_crossover(run),
        *common.comparison(run),
        *common.prices(run),
        *_speculation(run),
        common.as_run(run, formulas(run)),
    ]


def formulas(run: Run) -> list[Definition]:
    """Formulas of the metrics that this run has, and of no others."""
    present = set(run.results["metric"])
    present |= {"crossover"} if any(m.startswith("crossover_") for m in present) else set()
    present |= {"speedup_over_tensor_parallel"} if len(_ratios(run)) else set()
    found = [definition for metric, definition in FORMULAS if metric in present]
    if run.results["strategy"].str.startswith("alspec").any():
        found += APPENDIX_F
    if any(m.startswith("error_bound") for m in present):
        found += BOUNDS
    found += [common.share_formula(run)] if "price_share" in present else []
    return found + common.error_formulas(run)


# -- choices ---------------------------------------------------------------------------------------


def _values(rows: pd.DataFrame, column: str) -> list[float]:
    return sorted(float(v) for v in rows[column].dropna().unique())


def _batches(run: Run, rows: pd.DataFrame) -> common.Dimension:
    """The batches of these rows; opens on the one that the answer is about."""
    found = _values(rows, "batch") or [math.nan]
    _, wanted = _place(run)
    opens = found.index(wanted) if wanted in found else len(found) - 1
    return "Batch", [(f"{b:.0f}" if known(b) else "", b) for b in found], opens


def _hit_rates(rows: pd.DataFrame) -> list[common.Option]:
    return [(percent(h), h) for h in _values(rows, "hit_rate")]


def _at(rows: pd.DataFrame, column: str, value: float) -> pd.DataFrame:
    chosen: "pd.Series[bool]" = rows[column] == value if known(value) else rows[column].isna()
    return rows[chosen]


# -- key figures -----------------------------------------------------------------------------------


def _place(run: Run) -> tuple[float, float]:
    """The context and batch that the answer is about: those of the summary, or else the longest context, the
    largest batch there."""
    if {"context_tokens", "batch"} <= run.best_at.keys():
        return run.best_at["context_tokens"], run.best_at["batch"]
    rows = run.metric("token_latency_s")
    context = rows["context_tokens"].max()
    return context, _at(rows, "context_tokens", context)["batch"].max()


def _there(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows at the context and batch that the answer is about."""
    context, batch = _place(run)
    return _at(_at(rows, "context_tokens", context), "batch", batch).reset_index(drop=True)


def _at_place(run: Run) -> str:
    """That context, and the batch where the run has several: " at 128K tokens, batch 8"."""
    context, batch = _place(run)
    several = run.metric("token_latency_s")["batch"].nunique() > 1
    parts = [f"{tokens(context)} tokens"] if known(context) else []
    parts += [f"batch {batch:,.0f}"] if several and known(batch) else []
    return " at " + ", ".join(parts) if parts else ""


def _longest(run: Run) -> pd.DataFrame:
    rows = run.metric("token_latency_s")
    return _there(run, run.ranked(rows[rows["value"] > 0]))


def _where(row: pd.Series) -> str:
    return str(row["label"]) + (f", {percent(row['hit_rate'])} hits" if known(row["hit_rate"]) else "")


def _fastest(run: Run) -> Tile | None:
    rows = _longest(run)
    if rows.empty:
        return None
    best = extreme(rows, rows["value"], largest=False)
    return Tile(milliseconds(best["value"]), f"Fastest token{_at_place(run)}", _where(best))


def _best_tensor(run: Run) -> Tile | None:
    rows = _longest(run)
    own = rows[rows["strategy"] == "tensor_parallel"]
    if own.empty or len(own) == len(rows):
        return None
    best = extreme(own, own["value"], largest=False)
    return Tile(milliseconds(best["value"]), f"Best of tensor parallelism{_at_place(run)}", _where(best))


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
    rows = _longest(run)
    exposed = run.metric("exposed_communication_s")
    if rows.empty or exposed.empty:
        return None
    best = rows.iloc[[int(rows["value"].to_numpy().argmin())]]
    joined = best.merge(exposed, on=CASE, suffixes=("", "_exposed"))
    if joined.empty:
        return None
    seconds, of = joined["value_exposed"].iloc[0], joined["value"].iloc[0]
    if seconds == 0 and joined["devices"].iloc[0] == 1:
        return None
    means = "Exposed communication in the fastest token"
    return Tile(percent(seconds / of, 2), means, f"{milliseconds(seconds)} of {milliseconds(of)}")


def _of_bound(run: Run) -> Tile | None:
    """What share of the speed of reading weights and KV cache once the fastest token reaches."""
    rows, bound = _longest(run), _there(run, _read_once(run))
    joined = rows.merge(bound, on=CASE, suffixes=("", "_bound"))
    if joined.empty:
        return None
    of, least = joined["value"].iloc[0], joined["value_bound"].iloc[0]
    means = "Of the speed of reading weights and KV once"
    return Tile(percent(least / of, 3), means, f"{milliseconds(least)} of {milliseconds(of)}")


# -- latency ---------------------------------------------------------------------------------------

# Measured or not -> what the low and the high end of a latency are.
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


def _case(row: pd.Series) -> tuple[Any, ...]:
    return tuple(row[name] if isinstance(row[name], str) or known(row[name]) else None for name in CASE)


def _all_figures(run: Run) -> Table:
    latency = run.metric("token_latency_s")
    found = {m: {_case(r): r["value"] for _, r in run.metric(m).iterrows()} for m, _, _ in TABLE_METRICS}
    metrics = [entry for entry in TABLE_METRICS if found[entry[0]]]
    lines = []
    for _, row in latency.iterrows():
        key = _case(row)
        more = [show(found[m].get(key, math.nan)) for m, _, show in metrics]
        batch = f"{row['batch']:.0f}" if known(row["batch"]) else ""
        hits = percent(row["hit_rate"]) if known(row["hit_rate"]) else ""
        bounds = interval(row["low"], row["high"], 1e3)
        value = significant(row["value"] * 1e3, 4)
        lines.append(
            [row["label"], tokens(row["context_tokens"]), batch, hits, value, bounds, *more, row["source"]]
        )
    head = [
        "strategy",
        "context",
        "batch",
        "hits",
        "ms per token",
        INTERVALS[run.measured],
        *(n for _, n, _ in metrics),
        "source",
    ]
    return common.without_empty_columns(Table(head, lines, "lrrrrr" + "r" * len(metrics)))


def _if_priced(run: Run) -> list[str]:
    """What the fastest of the cases that take something as free needs where nothing is."""
    priced = _there(run, run.metric("latency_if_priced_s"))
    joined = _longest(run).merge(priced, on=CASE, suffixes=("", "_priced"))
    if joined.empty:
        return []
    best = extreme(joined, joined["value"], largest=False)
    latency = f"{_where(best)} {milliseconds(best['value_priced'])}{_at_place(run)}"
    return [f"With what the profile takes as free priced by link and roofline: {latency}."]


def _read_once(run: Run) -> pd.DataFrame:
    """The bounds that are drawn: none where there is one context, and a line for each of many variants would
    hide what it bounds."""
    rows = run.metric("read_once_s")
    crowded = rows["label"].nunique() > 1 or rows["context_tokens"].nunique() < 2
    return rows.head(0) if crowded else rows


def _one_line_a_batch(rows: pd.DataFrame) -> bool:
    """Whether batches are all that tells one line from another."""
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
    shown = variants(run.results)
    one_context = rows["context_tokens"].nunique() < 2
    rates = _hit_rates(rows)
    every = [("all" if len(rates) > 1 else "", None)]
    dimensions: list[common.Dimension] = [_batches(run, rows)]
    if _one_line_a_batch(rows) and not one_context:
        _, options, _ = dimensions[0]
        dimensions = [("Batch", [("all", None), *options], 0)]
    if not one_context:
        dimensions.append(("Hit rate", [*every, *(rates if len(rates) > 1 else [])], 0))

    bound = _read_once(run)

    def draw(batch: float | None, hit_rate: float | None = None) -> go.Figure:
        if batch is None:
            return figures.latency_by_batch(rows)
        own = _at(rows, "batch", batch)
        if one_context:
            return figures.latency_bars(own, shown)
        return figures.latency_over_context(own, shown, _at(bound, "batch", batch), hit_rate)

    at = f" at {tokens(rows['context_tokens'].iloc[0])} tokens" if one_context else " against context"
    of = "of one layer, without embedding and LM head" if run.scenario.get("part") == "layer" else ""
    lead = f"Time {of or 'from one token to the next, for one user'}. Lower is better."
    baseline = run.summary.get("baseline")
    every_latency = f"All {len(rows):,} latencies" if len(rows) > 1 else "The latency"
    return [
        Section(
            key="latency",
            heading=f"Latency per token{at}",
            short="Latency",
            lead=f"{lead} The baseline is {baseline}." if baseline else lead,
            plots=[Plot("latency", f"latency per token{at}, by strategy", **common.views(dimensions, draw))],
            notes=[*_latency_notes(run, rows, one_context), *([] if bound.empty else [READ_ONCE_NOTE])],
            details=[Details(f"{every_latency} as a table", table=_all_figures(run))],
        )
    ]


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
    dimensions = [
        _batches(run, parts),
        ("Context", contexts, len(contexts) - 1),
        ("Hit rate", rates, len(rates) - 1),
    ]

    def draw(batch: float, context: float, hit_rate: float | None) -> go.Figure:
        own = _at(_at(parts, "batch", batch), "context_tokens", context)
        return figures.critical_path(figures.at_hit_rate(own, hit_rate), shown)

    gap = _largest_gap(parts, run.metric("token_latency_s"))
    off = f"The parts differ from the latency by up to {percent(gap)}: one of the two is wrong."
    sums = "The parts sum to the latency per token."
    rare = f"Parts below {percent(figures.RARE_BELOW)} of every bar stand together."
    return [
        Section(
            key="critical-path",
            heading="What a token's time is spent on",
            short="Critical path",
            lead="Only the critical path counts: what overlaps it costs nothing and is not shown.",
            flags=[off] if gap > SUMS_WITHIN else [],
            plots=[
                Plot("critical-path", "latency per token by kind of op", **common.views(dimensions, draw))
            ],
            notes=[f"{sums} {rare}" if gap <= SUMS_WITHIN else rare],
        )
    ]


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

    both = {"hit", "miss"} <= set(spans["outcome"])
    described = (
        "The receiving group runs ahead on the speculated attention. On a hit its result counts and the "
        "sender skips what follows; on a miss the sender runs all of it itself."
    )
    dimensions: list[common.Dimension] = [("Case", cases, 0), ("Ranks", ranks, 0)]
    # Of several devices one is shown, and its case says which.
    which = [f"Shown: {cases[0][0]}."] if len(cases) == 1 and run.results[DEVICE].nunique() > 1 else []
    return [
        Section(
            key="timeline",
            heading="One layer on every rank" if not both else "One layer on every rank, hit and miss",
            short="One layer",
            lead=described if both else "",
            plots=[Plot("timeline", "timeline of one layer on every rank", **common.views(dimensions, draw))],
            notes=[*which, "On a wide screen, drag along the time axis to zoom; double-click to return."],
        )
    ]


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
        key = f"speed-up-{len(plots)}"
        plots.append(
            Plot(key, f"speed-up of {heading}", heading=heading, **common.views([_batches(run, own)], draw))
        )
    return plots


CROSSOVERS: Sequence[tuple[str, str, Callable[[float], str]]] = [
    ("crossover_context_tokens", "context", lambda v: f"{tokens(v)} tokens"),
    ("crossover_hit_rate", "hit rate", percent),
    ("crossover_hit_rate_if_priced", "hit rate, nothing free", percent),
    ("crossover_link_latency_s", "link latency", duration),
]


Place = tuple[float, float]  # context and hit rate, nan where the crossover is not at one


@dataclass(frozen=True)
class _Crossing:
    """Crossovers of one strategy with the same answer, and where they were searched."""

    name: str
    label: str
    value: str
    remark: str
    batches: tuple[float, ...]
    places: tuple[Place, ...]


def _crossings(run: Run) -> list[_Crossing]:
    """Places with the same answer share an entry, and so do batches with the same places."""
    entries: list[_Crossing] = []
    for metric, name, show in CROSSOVERS:
        rows = run.results[run.results["metric"] == metric]
        found: dict[tuple[str, float | None, str, str], list[Place]] = {}
        for label, batch in itertools.product(dict.fromkeys(rows["label"]), _sorted_batches(rows)):
            own = _at(rows[rows["label"] == label], "batch", batch)
            for _, row in own.iterrows():
                value = show(row["value"]) if known(row["value"]) else "none"
                key = (label, batch if known(batch) else None, value, row["source"])
                found.setdefault(key, []).append((row["context_tokens"], row["hit_rate"]))
        together: dict[tuple[str, str, str, str], list[tuple[float | None, list[Place]]]] = {}
        for (label, number, value, remark), places in found.items():
            same = (label, value, remark, str(places))
            together.setdefault(same, []).append((number, places))
        for (label, value, remark, _), members in together.items():
            batches = tuple(number for number, _ in members if number is not None)
            entries.append(_Crossing(name, label, value, remark, batches, tuple(members[0][1])))
    return entries


def _sorted_batches(rows: pd.DataFrame) -> list[float]:
    return [*_values(rows, "batch"), *([math.nan] if rows["batch"].isna().any() else [])]


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
    lines = [
        [
            entry.name,
            entry.label,
            listed(f"{b:,.0f}" for b in entry.batches) if several else "",
            _where_searched(entry.places, at_most),
            entry.value,
            entry.remark,
        ]
        for entry in entries
    ]
    head = ["break-even", "strategy", "batch", "at", "value", "remark"]
    return replace(common.without_empty_columns(Table(head, lines, "llrlr")), wraps=True)


def _crossover(run: Run) -> list[Section]:
    plots, every = _maps(run), _crossings(run)
    if not plots and not every:
        return []
    first = [entry for entry in every if entry.name == CROSSOVERS[0][1]]
    few = every if len(every) <= CROSSOVERS_SHOWN else (first or every)[:CROSSOVERS_SHOWN]
    table = _crossover_table(run, few, PLACES_SHOWN)
    whole = _crossover_table(run, every, None)
    count = int(run.results["metric"].isin([metric for metric, _, _ in CROSSOVERS]).sum())
    hidden = table.rows != whole.rows
    lead = (
        "Cells give the speed-up of ALSpec over tensor parallelism on as many devices: blue where ALSpec is "
        "faster, brown where tensor parallelism is, a line where both take as long."
    )
    return [
        Section(
            key="crossover",
            heading="When speculation pays",
            short="Crossover",
            lead=lead if plots else "",
            plots=plots,
            table=table if few else None,
            details=[Details(f"All {count:,} crossovers", table=whole)] if hidden else [],
        )
    ]


# -- accuracy of speculation -----------------------------------------------------------------------


def _scores(run: Run) -> Table | None:
    score, baseline = run.metric("hits_score"), run.metric("baseline_score")
    if score.empty:
        return None
    compared = {_case(row): row["value"] for _, row in baseline.iterrows()}
    lines = []
    for _, row in score.iterrows():
        base = compared.get(_case(row), math.nan)
        change = signed(row["value"] - base, 2) if known(base) else ""
        hits = percent(row["hit_rate"]) if known(row["hit_rate"]) else ""
        lines.append(
            [row["label"], hits, significant(row["value"]), significant(base), change, row["source"]]
        )
    unique = [list(line) for line in dict.fromkeys(tuple(line) for line in lines)]
    return common.without_empty_columns(
        Table(
            ["strategy", "hits", "score", "without speculation", "change", "threshold and task"],
            unique,
            "lrrrr",
        )
    )


def _bounds(run: Run) -> list[list[str]]:
    lines = []
    for metric, name in (
        ("error_bound_worst_case", "worst case"),
        ("error_bound_high_probability", "high probability"),
    ):
        for _, row in run.metric(metric).iterrows():
            lines.append([name, _where(row), scientific(row["value"]), row["source"]])
    given = run.summary.get("bounds")
    if given:
        lines += [[path, "", value, ""] for path, value in common.flat(given)]
    return [list(line) for line in dict.fromkeys(tuple(line) for line in lines)]


def _speculation(run: Run) -> list[Section]:
    scores, bounds = _scores(run), _bounds(run)
    hits = run.summary.get("hits")
    if not hits and not scores and not bounds:
        return []
    described = [f"{path}: {text}" if path else text for path, text in common.flat(hits)] if hits else []
    lead = (
        ""
        if scores or bounds
        else "This run takes its hit rates as given; it says nothing of the task's score."
    )
    bound_table = common.without_empty_columns(
        Table(["bound on the output's error", "at", "value", "remark"], bounds, "llr")
    )
    return [
        Section(
            key="speculation",
            heading="How accurate the speculation is",
            short="Accuracy",
            lead=lead,
            table=scores,
            notes=[f"Hits: {text}" for text in described],
            details=[Details("Error bounds", table=bound_table, opened=True)] if bounds else [],
        )
    ]
