"""From the cases of a serving scenario to its figures.

speedup            = duration of concurrent instances / duration, same load, same replica (Flover)
measured           = means over time, rates and latencies are of a window (`window.py`); names with the suffix
                     "_whole_run" are of the whole run
mean and interval  = over replicas, 95 % by Student's t
price interval     = the first replica run again with every price at the fast, and at the slow, end of its own
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from simcore.input.fields import single_valued
from simcore.input.files import InputError
from simcore.machine.laws import digest
from simcore.machine.machine import LawError
from simcore.machine.trace import Trace
from simcore.ops.op import SourceKind
from simcore.sim.graph_pricer import End
from simcore.studies.columns import BY_PRICES
from simcore.studies.common import Outcome, Progress, Row, ServingAxes, shares_of
from simcore.studies.own import OwnError, name_of
from simcore.studies.processes import in_processes
from simcore.studies.serving.answer import answer, notes, standings, warnings
from simcore.studies.serving.autoscaling import Rule
from simcore.studies.serving.certainty import intervals
from simcore.studies.serving.figures import Figure, latencies, over_replicas, unseen_gaps_s
from simcore.studies.serving.host_time import NO_HOST_TIME
from simcore.studies.serving.levels import levels
from simcore.studies.serving.replica import figures_of, window_of
from simcore.studies.serving.runner import Bench, Case, CaseResult, Group, NewPrices, Result
from simcore.studies.serving.scenario import Point, points
from simcore.studies.serving.strategies import ServingStrategy, engine_of, host_of, label
from simcore.studies.serving.window import Window, whole_run
from simcore.workload.arrivals import draw
from simcore.workload.drawn import Drawn, mean_output_tokens, mean_prompt_tokens, offered_rate_per_s
from simcore.workload.drawn import requests as drawn_requests
from simcore.workload.requests import Journal

# Requests that are served twice, to check that the run repeats.
REPEATED = 2000
# Runs with more requests are repeated at both ends of the prices' intervals only if the scenario asks for it.
MOST_AT_ENDS = 5000
BASELINE = "concurrent_instances"
# Figures that also get an interval by prices.
PRICED = ("ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p50_s", "duration_s", "goodput_per_s")


def cases(bench: Bench) -> Iterator[Case]:
    """Yields every strategy at every load, in the order of the file."""
    several = len({point.clients for point in points(bench.scenario)}) > 1
    for point in points(bench.scenario):
        drawn = draw(point.workload, bench.scenario.seed, 0)
        for variants, rule in product(_variants(bench), bench.scenario.rules):
            for variant, *own in variants:
                name = _label(variant, own)
                if several and point.clients is not None:
                    name += f", {point.clients:,} client{'s' if point.clients > 1 else ''}"
                if rule is not None:
                    name += f", {rule.label()}"
                each = zip(bench.fleet, own, strict=True)
                groups = tuple(_of_group(point, drawn, group, mine) for group, mine in each)
                axes = _axes(point, drawn, name, variant)
                if bench.fleet:
                    ranks = {group.ranks for group in bench.fleet}
                    axes = replace(axes, ranks=ranks.pop() if len(ranks) == 1 else None)
                yield Case(axes, point, variant, rule, groups)


def _label(variant: ServingStrategy, own: Sequence[ServingStrategy]) -> str:
    """Returns the label of a variant. An engine's settings depend on the device: then those of each group."""
    if own and engine_of(variant):
        return " | ".join(dict.fromkeys(one.label() for one in own))
    return label(variant)


def _variants(bench: Bench) -> list[list[tuple[ServingStrategy, ...]]]:
    """Returns the variants of each strategy, each followed by what it is on the groups of a fleet."""
    scenario = bench.scenario
    every = [scenario.strategies, *(group.strategies(scenario) for group in bench.fleet)]
    return [
        list(zip(*map(single_valued, strategies), strict=True)) for strategies in zip(*every, strict=True)
    ]


def _of_group(point: Point, drawn: Drawn, group: Group, variant: ServingStrategy) -> Case:
    """Returns the servers of a group of a fleet as a case by themselves."""
    axes = _axes(point, drawn, f"{variant.label()}, {group.name}", variant)
    return Case(replace(axes, devices=group.servers * group.ranks, ranks=group.ranks), point, variant)


def _axes(point: Point, drawn: Drawn, name: str, variant: ServingStrategy) -> ServingAxes:
    return ServingAxes(
        name_of(variant.kind),
        name,
        point.devices,
        variant.ranks[0],
        len(drawn.prompt_tokens),
        offered_rate_per_s(point.workload, drawn),
        mean_prompt_tokens(drawn),
        mean_output_tokens(drawn),
        arriving="requests" if drawn.turns is None else "sessions",
    )


def run(bench: Bench, progress: Progress) -> Outcome:
    """Runs a serving scenario. Raises InputError if no case of it can run."""
    wanted = list(cases(bench))
    refused: dict[str, str] = {}
    runnable: list[Case] = []
    for case in wanted:
        reason = refusal(bench, case)
        if reason is not None:
            refused.setdefault(reason, case.axes.label)
        else:
            runnable.append(case)
    results = _all_results(bench, runnable, partial(progress, bench.hardware.doing))
    if not results:
        raise InputError(f"nothing can be run; {next(iter(refused))}")
    trace = _check_repeatable(bench, results[0])
    bench.keep_prices()
    shares = dict(sorted(shares_of(part for one in results for part in one.sources.items()).items()))
    return Outcome(
        rows=[row for one in results for row in _rows(one, results)],
        answer=answer(bench, results),
        warnings=[*refused, *warnings(bench, results, shares)],
        notes=notes(bench, results),
        baseline=next((one.case.axes.label for one in results if one.case.axes.strategy == BASELINE), ""),
        sources=shares,
        tables={
            "requests.parquet": _stacked([({**_place(one), "replica": 0}, one.requests) for one in results]),
            "levels.parquet": _stacked([(_place(one), one.levels) for one in results]),
        },
        slo=bench.scenario.common_slo.model_dump(),
        trace=trace,
        standings=standings(bench, results),
    )


def refusal(bench: Bench, case: Case) -> str | None:
    """Returns the reason why a case cannot run, or None if it can."""
    reasons = (_refusal_of(own, part) for own, part in bench.parts(case))
    return next((reason for reason in reasons if reason is not None), None)


def _refusal_of(bench: Bench, case: Case) -> str | None:
    """Returns the reason why servers that are alike cannot run, or None if they can."""
    ranks, hardware = case.ranks, bench.hardware
    if ranks > hardware.max_devices:
        most = hardware.max_devices
        return f"{case.axes.label}: {ranks} ranks are more than the {most} that the link connects"
    if hardware.measured and case.axes.devices > hardware.max_devices:
        return f"{case.axes.label}: devices: {case.axes.devices} are more than the one of this machine"
    reason = hardware.usable(ranks)
    # An engine's kernels matter in their formats alone, in which no machine computes.
    if hardware.measured and host_of(case.strategy).in_formats(hardware.multiplied) != NO_HOST_TIME:
        reason = "host: a real machine takes the time of its own host; leave it out, or run on sim"
    if case.scaling is not None:
        reason = _no_scaling(case.scaling, case.servers, measured=hardware.measured) or reason
    if reason is not None:
        return f"{case.axes.label}: {reason}"
    try:
        bench.check_lengths(case)
        bench.room(case, bench.draw(case, 0))
    except OwnError:
        raise
    except InputError as error:
        return str(error)
    except ValueError as error:  # a model that cannot be sharded so
        return f"{case.axes.label}: {error}"
    return None


def _no_scaling(rule: Rule, servers: int, *, measured: bool) -> str | None:
    """Returns the reason why so many servers cannot start and stop by a rule, or None if they can."""
    if measured:
        return "autoscaling: a real machine runs all its servers all the time; kind none is allowed"
    if rule.min_servers[0] > servers:
        return f"autoscaling: min_servers: is {rule.min_servers[0]}; at most {servers} are there"
    return None


@dataclass(slots=True)
class _Replica:
    """The results of a replica; `case_result`: the other results of its case, only of the first replica."""

    figures: Mapping[str, Figure]
    window: Window
    measured: int
    sources: dict[SourceKind, float]
    case_result: CaseResult | None
    prices: NewPrices = field(default_factory=dict)


def _all_results(
    bench: Bench, wanted: Sequence[Case], progress: Callable[[int, int], None]
) -> list[CaseResult]:
    """Returns the results of all replicas of all cases, run on several cores.

    The first run with each set of prices finds out which prices are curves. Only then do processes share the
    other runs, so that results do not depend on which process runs which.
    """
    places = [(case, replica) for case in wanted for replica in range(bench.scenario.replicas)]
    seen: set[tuple[int, int, str]] = set()
    first: list[int] = []
    others: list[int] = []
    for i, (case, replica) in enumerate(places):
        ends = ("value", *(_price_ends(bench, case) if not replica else ()))
        prices = {(id(own.prices), part.ranks, end) for own, part in bench.parts(case) for end in ends}
        (others if prices <= seen else first).append(i)
        seen |= prices

    def work(i: int) -> _Replica:
        case, replica = places[i]
        one = _again(bench, case, replica) if replica else _first(bench, case, keep_trace=i == 0)
        return replace(one, prices=bench.new_prices())

    def report_progress(before: int, done: int) -> None:
        progress(before + done, len(places))

    begun = in_processes(lambda i: work(first[i]), len(first), 1, partial(report_progress, 0))
    gave = dict(zip(first, begun, strict=True))
    bench.settle()
    rest = in_processes(
        lambda i: work(others[i]), len(others), bench.hardware.jobs, partial(report_progress, len(first))
    )
    gave.update(zip(others, rest, strict=True))
    results: list[CaseResult] = []
    for i in range(len(places)):
        one = gave[i]
        bench.take_over(one.prices)
        if one.case_result is not None:
            results.append(one.case_result)
        last = results[-1]
        last.replicas.append(one.figures)
        last.windows.append(one.window)
        last.measured.append(one.measured)
        for name, seconds in one.sources.items():
            last.sources[name] = last.sources.get(name, 0.0) + seconds
    return results


def _price_ends(bench: Bench, case: Case) -> tuple[End, ...]:
    """Returns the ends of the prices' intervals at which a case runs too."""
    asked = False if bench.hardware.measured else bench.scenario.price_interval
    short = asked is None and case.axes.requests <= MOST_AT_ENDS
    return ("low", "high") if asked or short else ()


def _again(bench: Bench, case: Case, replica: int) -> _Replica:
    result = bench.run(case, replica)
    window = window_of(bench, case, result)
    sources = dict(result.trace.rows.sources)
    return _Replica(figures_of(bench, result, case, window), window, _answered(result, window), sources, None)


def _first(bench: Bench, case: Case, *, keep_trace: bool) -> _Replica:
    first = bench.run(case, 0)
    served, journal = first.served, first.journal
    between_s = float((served.finish_s - served.first_token_s)[served.finished].sum())
    window = window_of(bench, case, first)
    case_result = CaseResult(
        case,
        [],
        [],
        [],
        {},
        tuple(group.room for group in first.groups),
        first.left_out,
        unseen_gaps_s(served, journal) / between_s if between_s else 0.0,
        _requests(first, window, list(bench.scenario.slos), bench),
        _levels(first, case.servers),
        first.trace if keep_trace else None,
    )
    if bench.scenario.replicas == 1:
        case_result.chance = intervals(latencies(served.only(window.came)))
    for end in _price_ends(bench, case):
        result = bench.run(case, 0, end)
        # The window's requests stay the same if arrivals do not depend on answers.
        waits = case.point.clients is not None or result.opens is not None
        same = window_of(bench, case, result) if waits else window
        case_result.at_price_ends[end] = figures_of(bench, result, case, _placed(same, result))
    figures, sources = figures_of(bench, first, case, window), dict(first.trace.rows.sources)
    return _Replica(figures, window, _answered(first, window), sources, case_result)


def _answered(result: Result, window: Window) -> int:
    return int((window.came & result.served.finished).sum())


def _placed(window: Window, result: Result) -> Window:
    """Returns the window for another run of the same requests: the same, or that whole run."""
    if not window.whole:
        return window
    return whole_run(result.served, window.whole, unrated=window.unrated)


def _check_repeatable(bench: Bench, result: CaseResult) -> Trace:
    """Returns the trace of a case. Raises LawError if a second run, of its first requests at least, gives
    other bytes."""
    assert result.trace is not None
    if bench.hardware.measured:
        return result.trace
    few = result.case.axes.requests <= REPEATED
    first = result.trace if few else bench.run(result.case, 0, most=REPEATED).trace
    if digest(bench.run(result.case, 0, most=REPEATED).trace) != digest(first):
        with bench.blamed(result.case):
            raise LawError(f"repeatability: {result.case.axes.label} gives other bytes when it is run again")
    return result.trace


def _rows(one: CaseResult, results: Sequence[CaseResult]) -> Iterator[Row]:
    axes, count = one.case.axes, len(one.replicas)
    rooms = {float(room.kv_tokens) for room in one.rooms}
    if len(rooms) == 1:
        room = rooms.pop()
        # All replicas have the same room.
        end = room if count > 1 else None
        yield Row(axes, "kv_tokens", room, "tokens", end, end, "KV cache of a server")
    else:
        yield Row(axes, "kv_tokens", None, "tokens", source="the servers' KV caches differ")
    if any(room.states for room in one.rooms):
        text = "each as long as the longest request, with its states"
        held = float(min(room.sequences for room in one.rooms))
        end = held if count > 1 else None
        yield Row(axes, "sequences_held", held, "", end, end, text)
    source = f"95 % interval over {count} replicas" if count > 1 else "one replica"
    for name, (value, low, high) in over_replicas(one.replicas).items():
        unit = one.replicas[0][name][1]
        if name in one.chance:
            text = f"one replica; 95 % interval by the order of {one.measured[0]:,} requests, if independent"
            yield Row(axes, name, value, unit, *one.chance[name], text)
        else:
            yield Row(axes, name, value, unit, low, high, source if value is not None else "there is none")
    baseline = next((b for b in results if b.case.axes.strategy == BASELINE and _same_load(b, one)), None)
    if baseline is not None:
        speedups = [
            {"speedup": (_ratio(theirs["duration_s"][0], ours["duration_s"][0]), "x")}
            for theirs, ours in zip(baseline.replicas, one.replicas, strict=True)
        ]
        value, low, high = over_replicas(speedups)["speedup"]
        yield Row(axes, "speedup", value, "x", low, high, f"duration against {baseline.case.axes.label}")
    for name in PRICED if one.at_price_ends else ():
        ends = [values[name][0] for values in (one.replicas[0], *one.at_price_ends.values())]
        known = [value for value in ends if value is not None]
        if known:
            text = "first replica, all prices at the fast and at the slow end of their 90 % intervals"
            value, unit = one.replicas[0][name]
            low, high, share = min(known), max(known), host_of(one.case.strategy).within(name)
            if share and value:
                text += f", and its engine off by {100 * share:.3g} % as where it was fitted"
                low, high = widened(value, low, high, share)
            yield Row(axes, f"{name}{BY_PRICES}", value, unit, low, high, text)


def widened(value: float, low: float, high: float, share: float) -> tuple[float, float]:
    """Returns an interval about a value with an independent error of that share: logarithms add up in
    quadrature.

    >>> [round(end, 3) for end in widened(1.0, 1.0, 1.0, 0.25)]
    [0.8, 1.25]
    """
    more = math.log1p(share)
    down, up = (math.log(value / low) if low > 0.0 else math.inf), math.log(high / value)
    return value * math.exp(-math.hypot(down, more)), value * math.exp(math.hypot(up, more))


def _same_load(a: CaseResult, b: CaseResult) -> bool:
    same = a.case.point == b.case.point and a.case.axes.ranks == b.case.axes.ranks
    return same and a.case.scaling == b.case.scaling


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


# -- tables ------------------------------------------------------------------------------------------


def _place(one: CaseResult) -> dict[str, Any]:
    axes = one.case.axes
    return {
        "label": axes.label,
        "strategy": axes.strategy,
        "devices": axes.devices,
        "ranks": axes.ranks,
        "requests": axes.requests,
        "rate_per_s": np.nan if axes.rate_per_s is None else axes.rate_per_s,
        "prompt_mean": axes.prompt_tokens,
        "output_mean": axes.output_tokens,
    }


def _requests(result: Result, window: Window, tenants: Sequence[str], bench: Bench) -> dict[str, Any]:
    """Returns the requests of a run, as columns; `measured`: whether they came in its window; `tenant` only
    if there are `tenants`, by name; `group` only of a fleet."""
    served = result.served
    ends = np.array([group.ranks.stop for group in result.groups])
    names_of = np.array([group.name for group in result.groups], dtype=object)
    names = (
        *("instance", "arrival_s", "scheduled_s", "first_token_s", "finish_s", "prompt_tokens"),
        *("output_tokens", "preemptions", "cached_prompt_tokens"),
    )
    return {
        "request": served.id,
        **({"tenant": np.array(tenants, dtype=object)[served.tenant]} if tenants else {}),
        **({"group": names_of[np.searchsorted(ends, served.instance, "right")]} if bench.fleet else {}),
        **{name: getattr(served, name) for name in names},
        "status": np.where(served.rejected, "rejected", "finished"),
        "measured": window.came,
    }


def _levels(result: Result, servers: int) -> dict[str, Any]:
    """Returns the levels of a run over time, as columns; with autoscaling the number of servers too."""
    journal, kv_limit = result.kv
    found: dict[str, Any] = dict(levels(result.served, journal, kv_limit=kv_limit, servers=servers))
    if result.fleet is not None:
        found["servers"] = result.fleet.at(found["t_s"])
    return found


def _stacked(parts: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Concatenates tables, each with its place repeated in every row; places are dictionary-encoded first."""
    # Arrow takes longer to import than everything that `--help` needs.
    import pyarrow as pa  # noqa: PLC0415

    lengths = [len(next(iter(columns.values()))) for _, columns in parts]
    which = np.repeat(np.arange(len(parts), dtype=np.int32), lengths)
    stacked: dict[str, Any] = {}
    for name in parts[0][0]:
        # Servers of a fleet may differ in their ranks, and then there are none.
        values = pa.array([place[name] for place, _ in parts], pa.int64() if name == "ranks" else None)
        stacked[name] = pa.DictionaryArray.from_arrays(pa.array(which), values).dictionary_decode()
    for name in parts[0][1]:
        stacked[name] = np.concatenate([columns[name] for _, columns in parts])
    return stacked


# -- the tape ----------------------------------------------------------------------------------------

MOST_PRINTED = 4


def tape(bench: Bench, record: Any) -> list[str]:
    """Returns the launches of each strategy for the first few requests, all there from the start, as the
    machine `record` prints them."""
    lines: list[str] = []
    seen: set[str] = set()
    for case in cases(bench):
        if case.axes.label in seen or refusal(bench, case) is not None:
            continue
        seen.add(case.axes.label)
        for own, part in bench.parts(case):
            drawn = own.draw(part, 0)
            room = own.room(part, drawn)
            few = [r for r, _ in zip(drawn_requests(drawn), range(MOST_PRINTED), strict=False)]
            for request in few:
                request.arrival_s = 0.0
            with own.blamed(part):
                found = record(
                    lambda m, own=own, part=part, room=room: own.program(part, room, m, Journal()),
                    mesh={"server": 1, "tensor": part.ranks},
                    inbox=few,
                )
            lines += [f"# {part.axes.label}, {len(few)} requests at once", *found.lines]
    return lines
