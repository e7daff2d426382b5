"""Crossovers of methods by number of tokens, and the fastest method at each length.

    gain(tokens) = latency of one - latency of the other,   crossover = tokens at which it changes its sign

The search is between neighbours of the scenario's lengths at which both fit into memory (`common.crossing`).
Methods that never differ by more than TIED do not cross: one kernel may serve two of them, at prices that
were measured twice. The first of them to lead stands for both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from simcore.studies.common import BY_DATASHEET, Crossing, OperatorAxes, Row, crossing
from simcore.studies.operators.runner import Bench

# Share of a latency.
TIED = 0.01


@dataclass(frozen=True, slots=True)
class Lead:
    """A method that is fastest from `first` to `last` tokens of a scenario's grid; `passes`: tokens at which
    it passes the lead before it, None for the first lead or if unknown."""

    label: str
    first: int
    last: int
    passes: float | None


def settings(cases: Sequence[OperatorAxes]) -> dict[OperatorAxes, list[OperatorAxes]]:
    """Returns the cases by their setting, all axes except method and tokens, in order."""
    found: dict[OperatorAxes, list[OperatorAxes]] = {}
    for case in cases:
        found.setdefault(replace(case, length=None, strategy="", label=""), []).append(case)
    return found


def crossovers(bench: Bench, cases: Sequence[OperatorAxes]) -> Iterator[Row]:
    """Yields a row for each place at which one method passes another; its axes are of the method that is
    faster below, its `rival` is the method that is faster above."""
    for members in settings(cases).values():
        by_method: dict[str, dict[int | None, OperatorAxes]] = {case.strategy: {} for case in members}
        for case, _ in ranked(bench, members):
            by_method[case.strategy][case.length] = case
        for ours, theirs in combinations(by_method.values(), 2):
            yield from _between(bench, ours, theirs)


def _between(
    bench: Bench, ours: dict[int | None, OperatorAxes], theirs: dict[int | None, OperatorAxes]
) -> Iterator[Row]:
    # The lengths at which both can be ranked.
    grid = sorted(tokens for tokens in ours.keys() & theirs.keys() if tokens is not None)
    if len(grid) < 2:
        return
    one, other = ours[grid[0]], theirs[grid[0]]
    if all(_tied(bench.seconds(ours[tokens]), bench.seconds(theirs[tokens])) for tokens in grid):
        return
    where = _search(bench, one, other, grid)
    unit, searched = "tokens", f"{grid[0]:,} to {grid[-1]:,} tokens"
    behind = not where.ahead_at_low
    for place in where.crossings:
        below, above = (one, other) if behind else (other, one)
        text = f"{below.label} is faster below, {above.label} from there on ({searched})"
        axes = replace(below, length=None, rival=above.strategy)
        yield Row(axes, "crossover_tokens", float(place), unit, source=text)
        behind = not behind


def _tied(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= TIED * min(one_s, other_s)


def _search(bench: Bench, one: OperatorAxes, other: OperatorAxes, grid: Sequence[int]) -> Crossing:
    """Returns the places where `other` becomes faster than `one`, or slower."""

    def gain(tokens: float) -> float:
        return bench.seconds(replace(one, length=round(tokens))) - bench.seconds(
            replace(other, length=round(tokens))
        )

    return crossing(gain, grid, whole=True)


def not_ranked(bench: Bench, cases: Sequence[OperatorAxes]) -> set[OperatorAxes]:
    """Returns the cases priced by the datasheet while others of the same setting and length were measured:
    kernels reach only a part of a datasheet's rates, so these cases look faster than they are."""
    out: set[OperatorAxes] = set()
    for members in settings(cases).values():
        prices = {case: bench.run(case).price for case in members}
        sources = {case: price.source for case, price in prices.items() if price is not None}
        seen = {case.length for case, source in sources.items() if source != BY_DATASHEET}
        out |= {case for case, source in sources.items() if source == BY_DATASHEET and case.length in seen}
    return out


def ranked(bench: Bench, cases: Sequence[OperatorAxes]) -> list[tuple[OperatorAxes, float]]:
    """Returns the cases that fit and can be ranked, each with its latency in seconds."""
    out = not_ranked(bench, cases)
    found = [(case, bench.run(case).latency_s) for case in cases if case not in out]
    return [(case, latency_s) for case, latency_s in found if latency_s is not None]


def never_ranked(bench: Bench, cases: Sequence[OperatorAxes]) -> list[str]:
    """Returns the labels of the methods without any case that can be ranked."""
    out, others = not_ranked(bench, cases), {case.label for case, _ in ranked(bench, cases)}
    return list(dict.fromkeys(case.label for case in cases if case in out and case.label not in others))


def fastest(bench: Bench, members: Sequence[OperatorAxes]) -> list[tuple[OperatorAxes, float]]:
    """Returns the fastest of the cases of one setting that can be ranked at each length, shortest first, with
    its latency in seconds; of methods that are tied at all lengths always the same one."""
    at: dict[int, dict[str, tuple[OperatorAxes, float]]] = {}
    for case, latency_s in ranked(bench, members):
        assert case.length is not None
        at.setdefault(case.length, {})[case.strategy] = case, latency_s
    found: list[tuple[OperatorAxes, float]] = []
    for tokens in sorted(at):
        best = min(at[tokens].values(), key=lambda each: each[1])
        before = found[-1][0].strategy if found else best[0].strategy
        alike = before in at[tokens] and all(
            _tied(here[before][1], here[best[0].strategy][1])
            for here in at.values()
            if before in here and best[0].strategy in here
        )
        found.append(at[tokens][before] if alike else best)
    return found


def leads(bench: Bench, members: Sequence[OperatorAxes]) -> list[Lead]:
    """Returns the leads among the cases of one setting that can be ranked, shortest lengths first."""
    found: list[Lead] = []
    before: OperatorAxes | None = None
    for case, _ in fastest(bench, members):
        tokens = case.length or 0
        if found and case.label == found[-1].label:
            found[-1] = replace(found[-1], last=tokens)
        else:
            found.append(Lead(case.label, tokens, tokens, _passes(bench, before, case)))
        before = case
    return found


def _passes(bench: Bench, before: OperatorAxes | None, case: OperatorAxes) -> float | None:
    """Returns the tokens at which a method passes the lead of the length below; None if there is none, runs
    are measured, or one of the two does not fit at both lengths."""
    if bench.device.measured or before is None or before.length is None or case.length is None:
        return None
    low = before.length
    if not all(bench.fits(c) for c in (replace(before, length=case.length), replace(case, length=low))):
        return None
    return _search(bench, before, case, [low, case.length]).at
