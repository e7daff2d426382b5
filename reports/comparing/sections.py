"""The page of a comparison: what differs, both answers, what changed most, every figure of both runs."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from simcore.reports.common import sections as common
from simcore.reports.common.figures import Scale
from simcore.reports.comparing import figures
from simcore.reports.comparing.inputs import Difference
from simcore.reports.comparing.matching import BETTER, DIFFERS, SAME, WORSE, Pair
from simcore.reports.comparing.sides import Figure, Side
from simcore.reports.comparing.words import (
    Compared,
    Places,
    interval_text,
    metric_text,
    notes,
    principal,
    ratio_text,
    sentence,
    value_text,
    verdict_text,
)
from simcore.reports.page import Details, Opening, Plot, Section, Table, Tile
from simcore.reports.text import counted

# Rows of a figure, metrics to choose from, and lines of a table at most.
MOST_ROWS, MOST_METRICS, MOST_LINES = 24, 40, 4000
LONGEST_VALUE = 300
SCALES = (("s", 1.0, 1.0), ("ms", 1e-3, 1e3), ("µs", 1e-6, 1e6))


def opening(compared: Compared) -> Opening:
    """Returns the top of the page."""
    a, b = compared.a, compared.b
    one = a.name if a.name == b.name else f"{a.name} and {b.name}"
    words = ["comparison", f"{b.study} study" if b.kind == "run" else f"plans, {b.study} study"]
    return Opening(
        name=f"{one}: A beside B",
        about=" · ".join(words),
        answer=sentence(compared),
        tiles=_tiles(compared),
        again="The same two directories give the same page to the byte.",
    )


def sections(compared: Compared) -> list[Section]:
    """Returns the sections, in the order of the page."""
    return [
        _runs(compared),
        *_inputs(compared),
        *_changes(compared),
        *_beside(compared),
        *_figures(compared),
        _asked(compared),
    ]


def _tiles(compared: Compared) -> list[Tile]:
    every = compared.main
    counts = [
        (BETTER, "Better in B, for sure"),
        (WORSE, "Worse in B, for sure"),
        (DIFFERS, "Differ for sure"),
    ]
    tiles = [
        Tile(f"{sum(pair.verdict == verdict for pair in every):,}", means)
        for verdict, means in counts
        if any(pair.verdict == verdict for pair in every) or verdict != DIFFERS
    ]
    same = sum(pair.verdict == SAME for pair in every)
    unsure = len(every) - same - sum(pair.sure for pair in every)
    tiles += [Tile(f"{unsure:,}", "No sure difference"), Tile(f"{same:,}", "The same in both")]
    only = len(compared.figures.only_a), len(compared.figures.only_b)
    return [*tiles, Tile(f"{only[0]:,} and {only[1]:,}", "Only in A, only in B")] if any(only) else tiles


# -- both runs -----------------------------------------------------------------------------------------


def _runs(compared: Compared) -> Section:
    rows = [
        ("directory", *(str(each.folder) for each in (compared.a, compared.b))),
        ("name", compared.a.name, compared.b.name),
        ("machine", compared.a.machine, compared.b.machine),
        ("device", _device(compared.a), _device(compared.b)),
        ("answer", compared.a.answer or "none", compared.b.answer or "none"),
        ("warnings", *(" — ".join(each.warnings) or "none" for each in (compared.a, compared.b))),
    ]
    return common.section("comparison", "both", table=Table(["", "A", "B"], rows, wraps=True))


def _device(side: Side) -> str:
    device = side.origin.get("device.name") or side.inputs.get("device") or ""
    titles = [name.partition(": ")[0] for name in side.origin if ": " in name]
    return ", ".join(dict.fromkeys(titles)) or str(device)


def _inputs(compared: Compared) -> list[Section]:
    if not compared.inputs:
        return []

    def cut(text: str) -> str:
        return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"

    rows: list[Difference] = list(compared.inputs)
    table = common.tabled(
        rows,
        ("field", "l", lambda each: each.field),
        ("A", "l", lambda each: cut(each.a)),
        ("B", "l", lambda each: cut(each.b)),
        ("of", "l", lambda each: each.of),
        wraps=True,
    )
    lead = f"{counted(len(rows), 'field differs', 'fields differ')}; all others are the same."
    return [common.section("comparison", "inputs", {"lead": lead}, table=table)]


# -- figures -------------------------------------------------------------------------------------------


def _changes(compared: Compared) -> list[Section]:
    """Shows of each metric the pair that changed most."""
    places = Places(compared.figures)
    first: dict[str, Pair] = {}
    for pair in compared.main:
        if pair.verdict != SAME and pair.ratio is not None and pair.ratio > 0.0:
            first.setdefault(metric_text(pair.metric, pair.where), pair)
    if not first:
        return []
    shown = [
        (f"{name}, {places.text(pair.where)}".rstrip(", "), pair)
        for name, pair in [*first.items()][:MOST_ROWS]
    ]
    plot = common.drawn("ratios", "ratio of B to A of each metric, the most changed first", _ratios(shown))
    more = len(first) - len(shown)
    not_drawn = [f"{counted(more, 'metric')} that changed less are not drawn."] if more > 0 else []
    return [common.section("comparison", "changes", plots=[plot], notes=not_drawn)]


def _ratios(shown: Sequence[tuple[str, Pair]]) -> go.Figure:
    return figures.ratios(shown)


def _beside(compared: Compared) -> list[Section]:
    """Shows a metric in both runs at every place; the reader picks the metric."""
    places = Places(compared.figures)
    groups: dict[str, list[tuple[str, Pair]]] = {}
    for pair in compared.main:
        if pair.a.value is not None or pair.b.value is not None:
            name = places.text(pair.where, pair.across) or "the run"
            groups.setdefault(metric_text(pair.metric, pair.where), []).append((name, pair))
    if not groups:
        return []
    options = [(name, (name, own)) for name, own in [*groups.items()][:MOST_METRICS]]

    def draw(option: tuple[str, list[tuple[str, Pair]]]) -> go.Figure:
        name, own = option
        return figures.beside(own[:MOST_ROWS], scale_of(name, [pair for _, pair in own]))

    preferred = principal(compared)
    opens = metric_text(preferred.metric, preferred.where) if preferred else options[0][0]
    dimension = common.opening_on("Metric", options, lambda option: option[0] == opens)
    plot: Plot = common.plot("beside", "a metric in both runs", [dimension], draw)
    most = max(len(own) for _, (_, own) in options)
    not_drawn = [f"At most {MOST_ROWS} places are drawn, the most changed ones."] if most > MOST_ROWS else []
    return [common.section("comparison", "beside", plots=[plot], notes=not_drawn)]


def scale_of(name: str, pairs: Sequence[Pair]) -> Scale:
    """Returns the scale of a metric: times in the unit that suits the longest."""
    unit = pairs[0].b.unit
    values = [abs(each.value) for pair in pairs for each in (pair.a, pair.b) if each.value is not None]
    largest = max(values, default=0.0)
    if unit == "s" and largest:
        shown, _, factor = next((each for each in SCALES if largest >= each[1]), SCALES[-1])
        return Scale(name, shown, factor)
    if unit == "B" and largest >= 1e6:
        return Scale(name, "GB", 1e-9) if largest >= 1e9 else Scale(name, "MB", 1e-6)
    return Scale(name, unit)


# -- tables --------------------------------------------------------------------------------------------


def _figures(compared: Compared) -> list[Section]:
    places, pairs = Places(compared.figures), compared.figures.pairs
    table = common.without_empty_columns(
        common.tabled(
            pairs[:MOST_LINES],
            ("metric", "l", lambda pair: metric_text(pair.metric, pair.where)),
            ("where", "l", lambda pair: places.text(pair.where, pair.across)),
            ("A", "r", lambda pair: value_text(pair.a)),
            ("interval", "r", lambda pair: interval_text(pair.a)),
            ("B", "r", lambda pair: value_text(pair.b)),
            ("interval", "r", lambda pair: interval_text(pair.b)),
            ("B / A", "r", ratio_text),
            ("B is", "l", verdict_text),
        )
    )
    more = len(pairs) - MOST_LINES
    sentences = [*notes(compared), *([f"{more:,} more figures are in --json."] if more > 0 else [])]
    details = [Details(f"{counted(len(pairs), 'figure')} in both, the most changed first", table=table)]
    for letter, only in (("A", compared.figures.only_a), ("B", compared.figures.only_b)):
        if only:
            title = f"{counted(len(only), 'figure')} in {letter} only"
            details.append(Details(title, table=_alone(only[:MOST_LINES], places)))
    return [common.section("comparison", "figures", details=details, notes=sentences)]


def _alone(only: Sequence[Figure], places: Places) -> Table:
    return common.tabled(
        only,
        ("metric", "l", lambda each: metric_text(each.metric, each.where)),
        ("where", "l", lambda each: places.text(each.where)),
        ("value", "r", value_text),
        ("interval", "r", interval_text),
    )


def _asked(compared: Compared) -> Section:
    texts: Mapping[str, Side] = {"A": compared.a, "B": compared.b}
    what = "plan.yaml" if compared.a.kind == "plan" else "scenario.yaml"
    details = [
        Details(f"{what} of {letter}, {side.folder}", text=side.text)
        for letter, side in texts.items()
        if side.text
    ]
    return common.section("comparison", "asked", details=details)
