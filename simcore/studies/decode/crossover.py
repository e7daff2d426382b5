"""Crossovers of attention-level speculation on n devices and tensor parallelism on the same n.

gain(x) = latency of tensor parallelism - latency of ALSpec,   crossover = x at which it changes its sign
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

from simcore.studies.common import Axes, Crossing, Row, crossing
from simcore.studies.decode.cases import rival_of
from simcore.studies.decode.runner import Bench, Case, Hits
from simcore.studies.decode.speculation import balanced, hit_draws
from simcore.studies.processes import SHORT_S, in_processes

# Grids of the search: hit rates from none to all, link latencies from 0.1 us to 1 ms.
RATE_GRID = (0.0, 0.5, 1.0)
LATENCY_GRID_S = (1e-7, 1e-5, 1e-3)


@dataclass(frozen=True, slots=True)
class Crossover:
    """A crossing that a scenario asks for: its row, whose `source` says in words where ALSpec is ahead, and
    the places where the gain changes its sign (None: no search was possible)."""

    row: Row
    where: Crossing | None = None


def crossovers(
    bench: Bench, fitting: Sequence[Case], progress: Callable[[str, int, int], None]
) -> list[Crossover]:
    """Returns the crossings that a scenario asks for."""
    found: list[Crossover] = []
    speculative = [case for case in fitting if case.hits is not None and rival_of(bench, case) is not None]
    for axis in bench.scenario.crossover:
        report_progress = partial(progress, f"crossovers in {axis}:")
        if axis == "link_latency_s":
            found += _in_latency(bench, speculative, report_progress)
            continue
        search = {"context_tokens": _over_context, "hit_rate": _over_rate}[axis]
        for done, crossover in enumerate(search(bench, speculative), 1):
            found.append(crossover)
            report_progress(done, len(speculative))
    return found


def _in_latency(
    bench: Bench, speculative: Sequence[Case], progress: Callable[[int, int], None]
) -> list[Crossover]:
    """Returns the crossings in link latency, which need by far the most runs, computed on several cores.
    Cases with the same rival are one piece, so that no run of the rival is made in two processes."""
    groups: dict[Case | None, list[int]] = {}
    for i, case in enumerate(speculative):
        groups.setdefault(rival_of(bench, case), []).append(i)
    pieces = [*groups.values()]

    def work(i: int) -> list[Crossover]:
        return [*_over_latency(bench, [speculative[place] for place in pieces[i]])]

    def done(count: int) -> None:
        progress(count, len(pieces))

    gave = in_processes(work, len(pieces), bench.hardware.jobs, done, SHORT_S)
    places = [place for piece in pieces for place in piece]
    found = [crossover for crossovers in gave for crossover in crossovers]
    return [crossover for _, crossover in sorted(zip(places, found, strict=True), key=itemgetter(0))]


def _gain(bench: Bench, case: Case) -> float:
    """Returns the seconds by which a speculative case is faster than its rival."""
    rival = rival_of(bench, case)
    assert rival is not None
    return bench.latency_s(rival) - bench.latency_s(case)


def _at(case: Case, context: int) -> Case:
    return replace(case, axes=replace(case.axes, context_tokens=context))


def _over_context(bench: Bench, speculative: Sequence[Case]) -> Iterator[Crossover]:
    # One search per strategy, up to its longest context that fits.
    longest = {
        replace(case.axes, context_tokens=None): case
        for case in sorted(speculative, key=lambda case: case.context)
    }
    for axes, case in longest.items():
        contexts = (c for c in sorted(bench.scenario.context_tokens) if c <= case.context)
        grid = [c for c in contexts if rival_of(bench, _at(case, c)) is not None]
        if len(grid) < 2:
            why = "it takes two contexts at which both fit"
            yield Crossover(Row(axes, "crossover_context_tokens", None, "tokens", source=why))
            continue

        def gain(context: float, case: Case = case) -> float:
            return _gain(bench, _at(case, round(context)))

        where = crossing(gain, grid, whole=True)
        text = _phrase(where, "tokens", f"{grid[0]:,} to {grid[-1]:,} tokens")
        yield Crossover(Row(axes, "crossover_context_tokens", where.at, "tokens", source=text), where)


def _over_rate(bench: Bench, speculative: Sequence[Case]) -> Iterator[Crossover]:
    seen: set[Axes] = set()
    for case in speculative:
        axes = replace(case.axes, hit_rate=None)
        if axes in seen:
            continue
        seen.add(axes)
        if case.hits is None or case.hits.random:
            why = "hits are drawn at random: give a rate that is counted"
            yield Crossover(Row(axes, "crossover_hit_rate", None, "", source=why))
            continue
        yield _in_rate(bench, case, axes, "crossover_hit_rate", free=True)
        if bench.run(case).free_speculation:
            yield _in_rate(bench, case, axes, "crossover_hit_rate_if_priced", free=False)


def _in_rate(bench: Bench, case: Case, axes: Axes, metric: str, *, free: bool) -> Crossover:
    def gain(rate: float) -> float:
        draws = tuple(balanced(hit_draws(rate, bench.config.layers, "fractional")))
        hits = Hits(rate, draws, False, "")
        return _gain(bench, replace(case, free=free, hits=hits, axes=replace(case.axes, hit_rate=rate)))

    where = crossing(gain, RATE_GRID)
    text = _phrase(where, "", "0 % to 100 % hits")
    return Crossover(Row(axes, metric, where.at, "", source=text), where)


def _over_latency(bench: Bench, speculative: Sequence[Case]) -> Iterator[Crossover]:
    for case in speculative:
        if bench.hardware.link_latency_s is None:
            fixed = "the profile fixes what collectives take"
            yield Crossover(Row(case.axes, "crossover_link_latency_s", None, "s", source=fixed))
            continue

        def gain(latency_s: float, case: Case = case) -> float:
            return _gain(bench, replace(case, link_latency_s=latency_s))

        # Latencies are nearly linear in that of a message.
        where = crossing(gain, LATENCY_GRID_S, straight=True)
        text = _phrase(where, "s", "0.1 us to 1 ms")
        yield Crossover(Row(case.axes, "crossover_link_latency_s", where.at, "s", source=text), where)


def _phrase(where: Crossing, unit: str, searched: str) -> str:
    if not where.crossings:
        return f"ALSpec is {'ahead' if where.ahead_at_low else 'behind'} everywhere from {searched}"
    at = [_shown(place, unit) for place in where.crossings]
    # Between the first and the second place, the third and the fourth, and so on, the lead is the opposite
    # of that at the low end.
    spans = [f"from {low} to {high}" for low, high in zip(at[::2], at[1::2], strict=False)]
    spans += [f"from {at[-1]} on"] if len(at) % 2 else []
    return f"ALSpec is {'behind' if where.ahead_at_low else 'ahead'} {' and '.join(spans)} ({searched})"


def _shown(place: float, unit: str) -> str:
    return {"tokens": f"{place:,.0f} tokens", "s": f"{place * 1e6:.3g} us", "": f"{place:.1%} hits"}[unit]
