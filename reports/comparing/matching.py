"""Pairs the figures of two runs, and says which differ for sure.

Figures are paired by what identifies them: metric and key columns. If all figures of a strategy have one
value in a key column, in the one run another than in the other, that column is an input that differs, and
they are paired across it; so is a label, if it is the only one of its kind of strategy without a partner. The
mean lengths of prompts and answers follow from the seed: if none is in both runs, they pair in their order.

sure       = the intervals of both figures have no value in common
better     = sure, and on the side of A that the metric calls better
ratio      = B / A
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from simcore.reports.comparing.sides import (
    FEWEST_DEVICES,
    HIGHEST_RATE,
    LADDER_ERRORS,
    Figure,
    Side,
)
from simcore.studies.columns import BY_PRICES, METRICS, WHOLE_RUN, metric

BETTER, WORSE, DIFFERS, UNSURE, SAME = "better", "worse", "differs", "no sure difference", "same"
RANKS = {BETTER: 0, WORSE: 0, DIFFERS: 1, UNSURE: 2, SAME: 3}
# Columns that belong to the metric, not to the case.
OF_METRIC = ("op_kind", "rival")
# Columns that are outcomes of a seed.
DRAWN = ("prompt_tokens", "output_tokens")
LABEL, STRATEGY = "label", "strategy"
SAME_WITHIN = 1e-9
# Directions of metrics that no study lists.
DIRECTIONS: Mapping[str, str] = {
    HIGHEST_RATE: "higher",
    FEWEST_DEVICES: "lower",
    "cost_per_hour": "lower",
    "cost_per_million_output_tokens": "lower",
    **{f"ladder_{name}": "lower" for name in LADDER_ERRORS},
}
VERDICTS = {"fails": 0, "holds": 1}

Key = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Pair:
    """A figure in both runs. `where`: what identifies it in B; `across`: key columns that differ, with both
    values; `variant`: of the whole run, or by prices, beside the figure itself."""

    a: Figure
    b: Figure
    across: Mapping[str, tuple[str, str]]
    better: str | None
    verdict: str
    variant: bool

    @property
    def metric(self) -> str:
        """The metric's name."""
        return self.b.metric

    @property
    def where(self) -> Mapping[str, str]:
        """What identifies it in B."""
        return self.b.where

    @property
    def ratio(self) -> float | None:
        """B / A; None if there is none."""
        if self.a.value is None or self.b.value is None:
            return None
        if math.isclose(self.a.value, self.b.value, rel_tol=SAME_WITHIN):
            return 1.0
        ratio = self.b.value / self.a.value if self.a.value else math.inf
        return ratio if math.isfinite(ratio) else None

    @property
    def change(self) -> float:
        """How far the ratio is from 1, by its logarithm; infinite from or to 0, or to the other sign."""
        if self.verdict == SAME or (self.a.value is None and not self.a.word):
            return 0.0
        return abs(math.log(self.ratio)) if self.ratio and self.ratio > 0.0 else math.inf

    @property
    def sure(self) -> bool:
        """Whether the figures differ for sure."""
        return self.verdict in (BETTER, WORSE, DIFFERS)

    @property
    def has_intervals(self) -> bool:
        """Whether both figures have an interval, or are verdicts."""
        return bool(self.a.word) or (_interval(self.a) is not None and _interval(self.b) is not None)


@dataclass(frozen=True)
class Matched:
    """The figures of two runs, paired: the most changed first. `only_a`, `only_b`: those in one run;
    `across`: key columns over which figures were paired, with both values."""

    pairs: Sequence[Pair]
    only_a: Sequence[Figure]
    only_b: Sequence[Figure]
    across: Mapping[str, Sequence[tuple[str, str]]]


def matched(a: Side, b: Side) -> Matched:
    """Pairs the figures of two sides."""
    study = b.study or a.study
    moves = _moves(a, b)
    left: dict[tuple[Key, int], tuple[Figure, dict[str, tuple[str, str]]]] = {}
    seen: Counter[Key] = Counter()
    for figure in a.figures:
        moved = moves(figure)
        key = _key(figure, {**figure.where, **{name: to for name, (_, to) in moved.items()}})
        left[key, seen[key]] = figure, {n: pair for n, pair in moved.items() if pair[0] != pair[1]}
        seen[key] += 1
    pairs, only_b, used = [], [], Counter[Key]()
    across: dict[str, dict[tuple[str, str], None]] = {}
    for figure in b.figures:
        key = _key(figure, figure.where)
        partner = left.pop((key, used[key]), None)
        used[key] += 1
        if partner is None:
            only_b.append(figure)
            continue
        pairs.append(_pair(study, partner[0], figure, partner[1]))
        for name, values in partner[1].items():
            across.setdefault(name, {})[values] = None
    only_a = [figure for figure, _ in left.values()]
    ordered = sorted(pairs, key=lambda pair: (pair.variant, RANKS[pair.verdict], -pair.change))
    return Matched(ordered, only_a, only_b, {name: [*values] for name, values in across.items()})


def _key(figure: Figure, where: Mapping[str, str]) -> Key:
    places = sorted((name, value) for name, value in where.items() if name != STRATEGY and value)
    return (("metric", figure.metric), ("unit", figure.unit), *places)


# -- across what differs -------------------------------------------------------------------------------


class _Moves:
    """Says how the key columns of a figure of A are called in B."""

    def __init__(self, labels: Mapping[str, str], columns: Mapping[str, Mapping[str, Mapping[str, str]]]):
        self._labels, self._columns = labels, columns

    def __call__(self, figure: Figure) -> dict[str, tuple[str, str]]:
        """Returns column -> values in A and B, of those that have another value there."""
        label = figure.where.get(LABEL, "")
        moved = {LABEL: (label, self._labels[label])} if label in self._labels else {}
        if (rival := figure.where.get("rival")) in self._labels:
            moved["rival"] = str(rival), self._labels[str(rival)]
        for name, values in self._columns.get(label, {}).items():
            own = figure.where.get(name, "")
            # A column that A's files lack has one value in B.
            if own in values:
                moved[name] = own, values[own]
        return moved


def _moves(a: Side, b: Side) -> _Moves:
    left, right = _by_label(a.figures), _by_label(b.figures)
    labels = _paired_labels(left, right)
    missing = [name for name in b.columns if name not in a.columns]
    columns: dict[str, dict[str, dict[str, str]]] = {}
    for label, figures in left.items():
        others = right.get(labels.get(label, label), [])
        for name in dict.fromkeys([*a.columns, *b.columns]):
            if name in (LABEL, STRATEGY, *OF_METRIC):
                continue
            one, other = _values(figures, name), _values(others, name)
            if moved := _moved(name, one, other):
                columns.setdefault(label, {})[name] = moved
            elif name in missing and len(other) == 1:
                columns.setdefault(label, {})[name] = {"": other[0]}
            elif name not in b.columns and len(one) == 1:
                columns.setdefault(label, {})[name] = {one[0]: ""}
    return _Moves(labels, columns)


def _by_label(figures: Iterable[Figure]) -> dict[str, list[Figure]]:
    found: dict[str, list[Figure]] = {}
    for figure in figures:
        found.setdefault(figure.where.get(LABEL, ""), []).append(figure)
    return found


def _paired_labels(
    left: Mapping[str, Sequence[Figure]], right: Mapping[str, Sequence[Figure]]
) -> dict[str, str]:
    """Returns label in A -> label in B, of strategies that are called otherwise there."""

    def alone(labels: Iterable[str], of: Mapping[str, Sequence[Figure]]) -> dict[str, str]:
        kinds: dict[str, list[str]] = {}
        for label in labels:
            kinds.setdefault(of[label][0].where.get(STRATEGY, ""), []).append(label)
        return {kind: own[0] for kind, own in kinds.items() if len(own) == 1}

    own, other = [label for label in left if label], [label for label in right if label]
    if len(own) == len(other) == 1 and own != other:
        return {own[0]: other[0]}
    ones = alone((label for label in own if label not in right), left)
    others = alone((label for label in other if label not in left), right)
    return {ones[kind]: others[kind] for kind in ones if kind in others}


def _values(figures: Iterable[Figure], name: str) -> list[str]:
    return [*dict.fromkeys(value for figure in figures if (value := figure.where.get(name)))]


def _moved(name: str, one: Sequence[str], other: Sequence[str]) -> dict[str, str]:
    """Returns the values of a column in A -> those in B, if figures are paired across it."""
    if set(one) & set(other) or len(one) != len(other):
        return {}
    if len(one) == 1:
        return {one[0]: other[0]}
    if name in DRAWN:
        return dict(zip(sorted(one, key=float), sorted(other, key=float), strict=True))
    return {}


# -- what is sure --------------------------------------------------------------------------------------


def _pair(study: str, a: Figure, b: Figure, across: Mapping[str, tuple[str, str]]) -> Pair:
    better = DIRECTIONS.get(b.metric) or (metric(study, b.metric).better if study in METRICS else None)
    variant = b.metric.endswith((WHOLE_RUN, BY_PRICES))
    return Pair(a, b, across, better, judged(a, b, better), variant)


def judged(a: Figure, b: Figure, better: str | None) -> str:
    """Returns how B differs from A. `better`: whether "lower" or "higher" is, or None."""
    if a.word or b.word:
        return _judged_words(a.word, b.word)
    if a.value is None or b.value is None:
        return SAME if a.value is b.value else UNSURE
    if math.isclose(a.value, b.value, rel_tol=SAME_WITHIN):
        return SAME
    one, other = _interval(a), _interval(b)
    if one is None or other is None or (other[0] <= one[1] and one[0] <= other[1]):
        return UNSURE
    return DIFFERS if better is None else BETTER if (b.value < a.value) == (better == "lower") else WORSE


def _judged_words(a: str, b: str) -> str:
    """Returns how the verdict on a point differs."""
    if a == b:
        return SAME
    if a not in VERDICTS or b not in VERDICTS:
        return UNSURE
    return BETTER if VERDICTS[b] > VERDICTS[a] else WORSE


def _interval(figure: Figure) -> tuple[float, float] | None:
    """Returns the interval of a figure, its value in it; None without one."""
    if figure.low is None or figure.high is None or figure.value is None:
        return None
    return min(figure.low, figure.value), max(figure.high, figure.value)


def ratio_interval(pair: Pair) -> tuple[float, float] | None:
    """Returns the least and the greatest ratio by both intervals; None without them, or from 0."""
    one, other = _interval(pair.a), _interval(pair.b)
    if one is None or other is None or one[0] <= 0.0 or other[0] < 0.0:
        return None
    ends = other[0] / one[1], other[1] / one[0]
    return ends if all(map(math.isfinite, ends)) and all(x <= y for x, y in pairwise(ends)) else None
