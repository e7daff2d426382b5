"""A comparison in words: values with units, places, and the sentences that say what differs."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcore.reports.comparing.inputs import ASKED, CODE, NONE, NOT_GIVEN, PRICED, Difference, differences
from simcore.reports.comparing.matching import (
    BETTER,
    DIFFERS,
    LABEL,
    OF_METRIC,
    SAME,
    STRATEGY,
    UNSURE,
    WORSE,
    Matched,
    Pair,
    matched,
)
from simcore.reports.comparing.sides import FEWEST_DEVICES, HIGHEST_RATE, RUN, Figure, Side
from simcore.reports.text import GLUE, NOTHING, counted, lasting, listed, percent, recorded, times, tokens

# Fields that a sentence names at most, and characters of a value in it.
MOST_NAMED, LONGEST_VALUE = 3, 44
NO_INTERVAL = "no interval"
BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


@dataclass(frozen=True)
class Compared:
    """Two runs, compared."""

    a: Side
    b: Side
    inputs: Sequence[Difference]
    figures: Matched

    @property
    def main(self) -> list[Pair]:
        """The pairs without those of whole runs and by prices, which say the same once more."""
        return [pair for pair in self.figures.pairs if not pair.variant]

    @property
    def identical(self) -> bool:
        """Whether neither inputs nor figures differ."""
        found = self.figures
        same = all(pair.verdict == SAME for pair in found.pairs)
        return same and not (self.inputs or found.only_a or found.only_b)


def compared(a: Side, b: Side) -> Compared:
    """Compares two sides of the same study and kind."""
    return Compared(a, b, differences(a, b), matched(a, b))


# -- values and places ---------------------------------------------------------------------------------


def value_text(figure: Figure) -> str:
    """Returns the value of a figure with its unit."""
    if figure.word:
        return figure.word
    return amount(figure.value, figure.unit)


def amount(value: float | None, unit: str) -> str:
    """Returns a number with its unit.

    >>> [plain_spaces(amount(*each)) for each in ((0.0534, "s"), (2.5e9, "B"), (8.0, "1/s"), (None, ""))]
    ['53.4 ms', '2.5 GB', '8/s', '–']
    """
    if value is None:
        return NOTHING
    if unit == "s" and value:
        return lasting(value)
    if unit == "B":
        name, size = next(((n, s) for n, s in BYTES if abs(value) >= s), ("B", 1.0))
        return f"{recorded(value / size)}{GLUE}{name}"
    return f"{recorded(float(value))}{'/s' if unit == '1/s' else f'{GLUE}{unit}'.rstrip()}"


def interval_text(figure: Figure) -> str:
    """Returns the interval of a figure, or empty."""
    if figure.low is None or figure.high is None or figure.low == figure.high:
        return ""
    return f"{amount(figure.low, figure.unit)} to {amount(figure.high, figure.unit)}"


def ratio_text(pair: Pair) -> str:
    """Returns B / A: with three digits near 1, else as times."""
    ratio = pair.ratio
    if ratio is None:
        return NOTHING
    if pair.verdict != SAME and abs(ratio - 1.0) < 0.005:
        return f"{1.0 + math.copysign(max(abs(ratio - 1.0), 1e-5), ratio - 1.0):.5f}×"
    return times(ratio) if 0.01 <= abs(ratio) < 1e4 else f"{recorded(ratio)}×"


def verdict_text(pair: Pair) -> str:
    """Returns the verdict, and why it is not sure."""
    return f"{UNSURE}: {NO_INTERVAL}" if pair.verdict == UNSURE and not pair.has_intervals else pair.verdict


def metric_text(name: str, where: Mapping[str, str]) -> str:
    """Returns a metric in words.

    >>> metric_text("ttft_p99_s", {}), metric_text("critical_path_s", {"op_kind": "matmul"})
    ('TTFT p99', 'critical path: matmul')
    """
    first, _, rest = name.partition("_")
    if first in ("ttft", "tpot", "itl", "e2e"):
        first = first.upper()
    words = f"{first} {rest.replace('_', ' ')}".strip()
    seconds = words.endswith(" s") and not words.endswith(" per s")
    words = words.removesuffix(" s") if seconds else words
    if words.startswith("ladder "):
        words = f"error of the ladder, {words.removeprefix('ladder ').removesuffix(' pct')}"
    kind, rival = where.get("op_kind"), where.get("rival")
    return words + (f": {kind}" if kind else "") + (f" against {rival}" if rival else "")


def place_text(column: str, value: str) -> str:
    """Returns a value of a key column in words.

    >>> place_text("rate_per_s", "8"), place_text("context_tokens", "4096"), place_text("batch", "2")
    ('8/s', '4K tokens', 'batch 2')
    """
    name = column.removeprefix("vary.").replace("_", " ")
    try:
        number = float(value)
    except ValueError:
        return value if column in ("label", "device", "what") else f"{name} {value}"
    if column in COUNTED and number == round(number):
        return counted(round(number), COUNTED[column])
    return PLACES[column](number) if column in PLACES else f"{name} {recorded(number)}"


COUNTED = {"devices": "device", "ranks": "rank", "groups": "group", "requests": "request"}
PLACES: Mapping[str, Callable[[float], str]] = {
    "rate_per_s": lambda v: f"{recorded(v)}/s",
    **dict.fromkeys(("context_tokens", "length", "tokens"), lambda v: f"{tokens(v)} tokens"),
    "hit_rate": lambda v: f"{percent(v)} hits",
    "prompt_tokens": lambda v: f"{recorded(v)} prompt tokens",
    "output_tokens": lambda v: f"{recorded(v)} output tokens",
}


class Places:
    """The words for places: of columns that tell the figures of a run apart."""

    def __init__(self, figures: Matched) -> None:
        one = [*(pair.a.where for pair in figures.pairs), *(each.where for each in figures.only_a)]
        other = [*(pair.b.where for pair in figures.pairs), *(each.where for each in figures.only_b)]
        self.columns = [*dict.fromkeys([*_telling(one), *_telling(other)])]

    def text(self, where: Mapping[str, str], across: Mapping[str, tuple[str, str]] | None = None) -> str:
        """Returns the place of a figure. Of a label that differs, both are given."""
        labels = {"label": " → ".join(across["label"])} if across and "label" in across else {}
        whole = {**where, **labels}
        return ", ".join(place_text(name, whole[name]) for name in self.columns if name in whole)


def _telling(every: Sequence[Mapping[str, str]]) -> list[str]:
    """Returns the columns that tell places apart: the label, and each that says more than those before it."""
    values: dict[str, set[str]] = {}
    for where in every:
        for name, value in where.items():
            values.setdefault(name, set()).add(value)
    several = [name for name in values if len(values[name]) > 1 and name not in NOT_IN_PLACES]
    kept = [LABEL] if LABEL in values else []
    apart = _apart(every, kept)
    for name in several:
        if (more := _apart(every, [*kept, name])) > apart:
            kept, apart = [*kept, name], more
    return kept


NOT_IN_PLACES = (STRATEGY, LABEL, *OF_METRIC)


def _apart(every: Sequence[Mapping[str, str]], columns: Sequence[str]) -> int:
    return len({tuple(where.get(name) for name in columns) for where in every})


# -- sentences -----------------------------------------------------------------------------------------


def sentence(compared: Compared) -> str:
    """Returns in one or two sentences what differs, and what that does."""
    if compared.identical:
        count = counted(len(compared.figures.pairs), "figure")
        return f"Both runs are identical: the same inputs, and the same value for {count}."
    return f"{_inputs(compared)} {_effect(compared)}"


def _inputs(compared: Compared) -> str:
    if not compared.inputs:
        return "No input differs of those that the directories record."
    asked = [each for each in compared.inputs if each.of == ASKED]
    # Fields with a value in both runs say more than those with a default in one.
    asked.sort(key=lambda each: NONE in (each.a, each.b) or NOT_GIVEN in (each.a, each.b))
    groups = [_named(each) for each in asked[:MOST_NAMED]]
    more = len(asked) - MOST_NAMED
    groups += [counted(more, "more field")] if more > 0 else []
    machine = next((each for each in compared.inputs if each.field == "machine"), None)
    groups += [_named(machine)] if machine else []
    priced = [each for each in compared.inputs if each.of == PRICED]
    if priced:
        source = next(
            (each for each in priced if each.field.endswith(("origin", "profile.source"))), priced[0]
        )
        groups.append(f"prices ({_short(source.a)} → {_short(source.b)})")
    code = [each for each in compared.inputs if each.of == CODE]
    if code:
        versions = [each for each in code if ".".join(each.field.split(".")[:-1]) == "versions"]
        groups.append(
            _versions(versions) if versions else f"code ({_short(code[0].a)} → {_short(code[0].b)})"
        )
    groups = groups or [_named(each) for each in compared.inputs[:MOST_NAMED]]
    return f"B differs from A in {listed(groups)}."


def _versions(differing: Sequence[Difference]) -> str:
    names = [f"{each.field.rpartition('.')[2]} {each.a} → {each.b}" for each in differing[:2]]
    more = f", {len(differing) - 2} more" if len(differing) > 2 else ""
    return f"versions ({', '.join(names)}{more})"


def _named(each: Difference) -> str:
    return f"{each.field} ({_short(each.a)} → {_short(each.b)})"


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 1]}…"


def _effect(compared: Compared) -> str:
    pairs = compared.main
    if not pairs:
        return "No figure is in both."
    counts = Counter(pair.verdict for pair in pairs)
    if counts[SAME] == len(pairs):
        return f"{_all(len(pairs))} same."
    surely = [
        f"{words} in {counts[verdict]:,}"
        for verdict, words in ((BETTER, "better"), (WORSE, "worse"), (DIFFERS, "different"))
        if counts[verdict]
    ]
    if not surely:
        changed = len(pairs) - counts[SAME]
        be = "is" if changed == 1 else "are"
        return f"No figure of {len(pairs):,} in both differs for sure; {changed:,} {be} not the same."
    of = f"Of {counted(len(pairs), 'figure')} in both, B is surely {listed(surely)}"
    if preferred := principal(compared):
        return f"{of}: {_pair_text(compared, preferred)}."
    first = next((pair for pair in pairs if pair.verdict in (BETTER, WORSE)), pairs[0])
    return f"{of}: most of all {_pair_text(compared, first)}."


def principal(compared: Compared) -> Pair | None:
    """Returns the most changed figure of a metric that a sentence prefers; None if none differs for sure."""
    return next((pair for pair in compared.main if pair.sure and pair.metric in PRINCIPAL), None)


# Metrics that a sentence prefers, if they differ for sure.
PRINCIPAL = (
    "e2e_mean_s", "e2e_p99_s", "ttft_p99_s", "tpot_p99_s", "slo_attainment", "goodput_per_s",
    "token_latency_s", "latency_s", "total_s", HIGHEST_RATE, FEWEST_DEVICES,
)  # fmt: skip


def _all(count: int) -> str:
    return "The one figure in both is the" if count == 1 else f"All {count:,} figures in both are the"


def _pair_text(compared: Compared, pair: Pair) -> str:
    where = Places(compared.figures).text(pair.where)
    of = f" of {where}" if where else ""
    ratio = f", {ratio_text(pair)}" if pair.ratio is not None else ""
    metric = metric_text(pair.metric, pair.where)
    return f"{metric}{of} ({value_text(pair.a)} → {value_text(pair.b)}{ratio}: {pair.verdict})"


def notes(compared: Compared) -> list[str]:
    """Returns what else is to be known of the comparison, a sentence each."""
    figures, places = compared.figures, Places(compared.figures)
    sentences = []
    for name, values in figures.across.items():
        if name != "rival":
            shown = "; ".join(f"{a or NOTHING} → {b or NOTHING}" for a, b in values[:MOST_NAMED])
            more = f"; {len(values) - MOST_NAMED} more" if len(values) > MOST_NAMED else ""
            sentences.append(f"Figures are paired across {name}: {shown}{more}.")
    both = {places.text(pair.where) for pair in figures.pairs}
    for letter, only in (("A", figures.only_a), ("B", figures.only_b)):
        if only:
            names = list(dict.fromkeys(places.text(each.where) for each in only))
            if both.issuperset(names):
                # Their places are in both runs, the metrics are not.
                names = list(dict.fromkeys(metric_text(each.metric, each.where) for each in only))
            more = f"; {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
            sentences.append(
                f"{counted(len(only), 'figure')} in {letter} only: {'; '.join(names[:MOST_NAMED])}{more}."
            )
    for letter, side in (("A", compared.a), ("B", compared.b)):
        if side.lacks:
            sentences.append(f"{letter} has no {listed(side.lacks)}: what these say is not compared.")
    for own, other, letter in ((compared.a, compared.b, "A"), (compared.b, compared.a, "B")):
        missing = [name for name in other.columns if name not in own.columns and own.figures]
        if missing and own.kind == RUN:
            sentences.append(f"{letter} has no column {listed(missing)}: it is of an older version.")
    unsure = [pair for pair in compared.main if pair.verdict == UNSURE and not pair.has_intervals]
    if unsure:
        count = counted(len(unsure), "figure")
        sentences.append(f"{count} without an interval: no difference of theirs is sure.")
    variants = 0 if compared.identical else len(figures.pairs) - len(compared.main)
    if variants:
        sentences.append(
            f"{counted(variants, 'figure')} of whole runs and by prices are in --json and on the page."
        )
    return sentences


# -- as data -------------------------------------------------------------------------------------------


def as_data(compared: Compared) -> dict[str, Any]:
    """Returns the comparison as JSON's types."""
    return {
        "says": plain_spaces(sentence(compared)),
        "identical": compared.identical,
        "a": _side(compared.a),
        "b": _side(compared.b),
        "inputs": [
            {"field": each.field, "of": each.of, "a": each.a, "b": each.b} for each in compared.inputs
        ],
        "paired_across": {
            name: [list(pair) for pair in pairs] for name, pairs in compared.figures.across.items()
        },
        "notes": [plain_spaces(each) for each in notes(compared)],
        "rows": [_row(pair) for pair in compared.figures.pairs],
        "only_a": [_alone(figure) for figure in compared.figures.only_a],
        "only_b": [_alone(figure) for figure in compared.figures.only_b],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "folder": str(side.folder),
        "name": side.name,
        "study": side.study,
        "kind": side.kind,
        "machine": side.machine,
        "answer": side.answer,
        "warnings": list(side.warnings),
    }


def _numbers(figure: Figure) -> dict[str, Any]:
    ends = {"low": figure.low, "high": figure.high}
    return {"value": figure.word} if figure.word else {"value": figure.value, **ends}


def _row(pair: Pair) -> dict[str, Any]:
    return {
        "metric": pair.metric,
        "unit": pair.b.unit,
        "where": dict(pair.where),
        "across": {name: list(values) for name, values in pair.across.items()},
        "a": _numbers(pair.a),
        "b": _numbers(pair.b),
        "ratio": pair.ratio,
        "better_is": pair.better,
        "verdict": pair.verdict,
    }


def _alone(figure: Figure) -> dict[str, Any]:
    return {"metric": figure.metric, "unit": figure.unit, "where": dict(figure.where), **_numbers(figure)}


def plain_spaces(text: str) -> str:
    """Returns a text with ordinary spaces between numbers and units."""
    return text.replace(GLUE, " ")


@dataclass(frozen=True)
class Line:
    """A line of the terminal's table: one metric, where it changed most."""

    metric: str
    where: str
    a: str
    b: str
    ratio: str
    sure: str


def lines(compared: Compared) -> list[Line]:
    """Returns a line for each metric that differs, the most changed first: its most changed figure, and in
    how many of its places it is better or worse for sure."""
    groups: dict[str, list[Pair]] = {}
    for pair in compared.main:
        groups.setdefault(metric_text(pair.metric, pair.where), []).append(pair)
    places = Places(compared.figures)
    return [
        Line(
            name,
            plain_spaces(places.text(pairs[0].where)),
            plain_spaces(value_text(pairs[0].a)),
            plain_spaces(value_text(pairs[0].b)),
            ratio_text(pairs[0]),
            _sure(pairs),
        )
        for name, pairs in groups.items()
        if pairs[0].verdict != SAME
    ]


def _sure(pairs: Sequence[Pair]) -> str:
    """Returns in how many places B is better or worse for sure: "better in 2, worse in 1 of 8"."""
    counts = Counter(pair.verdict for pair in pairs)
    verdicts = [word for word in (BETTER, WORSE, DIFFERS) if counts[word]]
    if not verdicts or len(pairs) == 1:
        return pairs[0].verdict
    return f"{', '.join(f'{word} in {counts[word]}' for word in verdicts)} of {len(pairs)}"
