"""The answer of a serving study in words: the best strategy and the reason, notes and warnings.

With SLOs, the winner at the heaviest load has the highest attainment; without SLOs, or among strategies with
equal attainment, the lowest mean E2E latency. SLOs count as met if `NEARLY_ALL` of the requests meet all of
them: if no strategy does, the answer says so and names the nearest.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simcore.input.files import enumerated
from simcore.studies.columns import GROUP, TENANT
from simcore.studies.common import Standing, extrapolated, unmeasured
from simcore.studies.serving import certainty
from simcore.studies.serving.figures import over_replicas
from simcore.studies.serving.kv_memory import held_bytes
from simcore.studies.serving.runner import Bench, Case, CaseResult
from simcore.studies.serving.strategies import ContinuousBatching, processes
from simcore.workload.recorded import doubts
from simcore.workload.spec import Slo

# Attainments that differ by less than this count as equal.
SAME = 0.005


def answer(bench: Bench, results: Sequence[CaseResult]) -> str:
    """Returns one sentence: the winner at the heaviest load, its lead, and the reason."""
    here = _heaviest(results)
    if not any(one.value("completed") for one in here):
        requests = here[0].case.axes.requests
        return f"{_load(here[0].case)}, nothing is served: all {requests:,} requests are rejected."
    promises = _promises(bench)
    ranked = _ranked(here, bool(promises))
    best = ranked[0]
    wins = not promises or _kept(best) >= NEARLY_ALL
    told = _alike(ranked) if wins else []
    others = [one for one in ranked[1:] if one.case.axes.label not in told]
    several = _several_counts(results)
    text = f"{_load(best.case)} on {_devices(bench, best.case, several)}, {_verdict(ranked, promises)}"
    if others:
        text += f" ({_next(best, others[0], bool(promises))})"
    text += f"; mean E2E {_time(best, 'e2e_mean_s')}" if promises else ""
    text += _by_tenant(best, bench.scenario.slos)
    text += "" if wins else _elsewhere(best, results)
    text += _unsettled(best)
    text += "; requests seem to come faster than they are answered" if certainty.growing(best) else ""
    return f"{text}; {_tail(bench, best)}."


def _unsettled(best: CaseResult) -> str:
    """Returns a remark if sessions last too long for the run to reach a steady state."""
    axes = best.case.axes
    if axes.arriving == "requests" or not best.windows[0].unrated:
        return ""
    return f"; the run is too short for a steady state at {axes.rate_per_s:.3g} {axes.arriving}/s"


def standings(bench: Bench, results: Sequence[CaseResult]) -> list[Standing]:
    """Returns the best strategy at each load and number of devices."""
    promised = bool(_promises(bench))
    points: dict[Any, list[CaseResult]] = {}
    for one in results:
        points.setdefault(repr(one.case.point), []).append(one)
    best = [_ranked(here, promised)[0] for here in points.values()]
    several = _several_counts(results)
    return [_standing(one, promised, several) for one in best if one.value("completed")]


def _several_counts(results: Sequence[CaseResult]) -> bool:
    """Whether cases differ in their number of devices, so that the answer must name it."""
    return len({one.case.axes.devices for one in results}) > 1


# Columns of results.csv that identify a place of a study.
PLACE = ("devices", "requests", "rate_per_s", "prompt_tokens", "output_tokens")


def _place(one: CaseResult) -> tuple[float, ...]:
    """Returns a key that orders loads by weight and identifies them; at equal weight per device, fewer
    devices count as heavier. Fleets have the load of their router in common, whatever they consist of."""
    axes = one.case.axes
    rate = axes.rate_per_s or 0.0
    devices = 0 if one.case.groups else axes.devices
    return (*_weight(one), -devices, rate, axes.prompt_tokens, axes.output_tokens)


def _standing(one: CaseResult, promised: bool, several: bool) -> Standing:
    axes, e2e_s = one.case.axes, one.value("e2e_mean_s")
    figure = f"takes {_time(one, 'e2e_mean_s')} a request on average"
    if promised:
        figure = f"keeps {_share(one)} of the promises, mean E2E {_time(one, 'e2e_mean_s')}"
    count = (
        f" on {axes.devices} device{'s' if axes.devices > 1 else ''}" if several or axes.devices > 1 else ""
    )
    count = "" if one.case.groups else count
    # Strategies that meet nearly all SLOs count as equal; then the latency decides.
    lost = 0.0 if not promised or _kept(one) >= NEARLY_ALL else 1.0 - _kept(one)
    return Standing(
        at=f"{_load(one.case)}{count}",
        load=_place(one),
        label=axes.label,
        figure=figure,
        rank=(lost, float("inf") if e2e_s is None else e2e_s),
        seconds=e2e_s,
        enough=lost == 0.0,
        where={name: getattr(axes, name) for name in PLACE},
    )


# The share of requests within the SLOs that counts as all.
NEARLY_ALL = 0.99


def _verdict(ranked: Sequence[CaseResult], promises: str) -> str:
    """Returns the best strategy and its result, in words."""
    best, several = ranked[0], len(ranked) > 1
    name, nearly = best.case.axes.label, f"{NEARLY_ALL:.0%} of the requests"
    if not promises:
        return f"{name}{_is_best(ranked)}: a request takes {_time(best, 'e2e_mean_s')} on average"
    if _kept(best) >= NEARLY_ALL:
        return f"{name}{_is_best(ranked)}: {_share(best)} of the requests keep {promises}"
    if not several:
        return f"{name} does not keep {promises} for {nearly}: {_share(best)} get it"
    if not _kept(best):
        return f"none of the {len(ranked)} ways keeps {promises} for any request; the quickest is {name}"
    none = f"none of the {len(ranked)} ways keeps {promises} for {nearly}"
    return f"{none}; the nearest is {name}, with {_share(best)}"


def _alike(ranked: Sequence[CaseResult]) -> list[str]:
    """Returns the labels of those that are as good as the first to the last digit, as where one request runs
    at a time."""
    first, *others = ((one.value("e2e_mean_s"), _kept(one), one.case.axes.label) for one in ranked)
    return [label for *figures, label in others if figures == list(first[:2])]


def _is_best(ranked: Sequence[CaseResult]) -> str:
    if alike := _alike(ranked):
        return f", is as good as {enumerated(alike)}"
    return ", is best" if len(ranked) > 1 else ""


def _tail(bench: Bench, best: CaseResult) -> str:
    """Returns the winner's p99 latencies, and the number of requests behind them if it is small."""
    text = f"p99 TTFT {_time(best, 'ttft_p99_s')}"
    if any(one.tpot_s is not None for one in _slos(bench)) and best.value("tpot_p99_s") is not None:
        text += f", p99 TPOT {_time(best, 'tpot_p99_s')}"
    few = certainty.slowest(best)
    return f"{text} ({few})" if few else text


def _elsewhere(best: CaseResult, results: Sequence[CaseResult]) -> str:
    """Returns the cases that meet the SLOs with more devices or at a lighter load, or else the nearest one
    with more devices, in words."""
    axes, point = best.case.axes, best.case.point
    more = [
        one
        for one in results
        if one.case.axes.devices > axes.devices and one.case.point.workload == point.workload
    ]
    text = ""
    if enough := [one for one in more if _kept(one) >= NEARLY_ALL]:
        least = min(enough, key=lambda one: (one.case.axes.devices, -_kept(one)))
        text = f"; {least.case.axes.devices} devices keep {_share(least)} ({least.case.axes.label})"
    elif more:
        nearest = max(more, key=_kept)
        text = f"; nor do more devices: {nearest.case.axes.devices} keep {_share(nearest)}"
        text += f" ({nearest.case.axes.label})"
    lighter = [one for one in results if _lighter(one, best) and _kept(one) >= NEARLY_ALL]
    if lighter:
        most = max(lighter, key=lambda one: (_rate(one), _kept(one)))
        load = _load(most.case)
        text += f"; {load[0].lower()}{load[1:]} {most.case.axes.label} keeps {_share(most)}"
    return text


def _rate(one: CaseResult) -> float:
    """Returns the weight of a load among loads of the same requests: its clients or its rate."""
    return float(one.case.point.clients or one.case.axes.rate_per_s or 0.0)


def _lighter(one: CaseResult, than: CaseResult) -> bool:
    """Whether a case has the same devices and requests at a lower rate or with fewer clients."""
    if one.case.point.devices != than.case.point.devices or not _rate(one) < _rate(than):
        return False
    ours, theirs = ({**vars(of.case.point.workload), "arrivals": None} for of in (one, than))
    return ours == theirs


def _slos(bench: Bench) -> list[Slo]:
    """Returns the SLO of each tenant, else that of all requests."""
    return [*bench.scenario.slos.values()] or [bench.scenario.slo]


def _by_tenant(best: CaseResult, tenants: Iterable[str]) -> str:
    """Returns the share of each tenant's requests that keep its SLO, in words."""
    shares = [(name, f"{TENANT}.{name}.slo_attainment") for name in tenants]
    said = [f"{name} {_share(best, metric)}" for name, metric in shares if best.value(metric) is not None]
    return f"; by tenant: {', '.join(said)}" if said else ""


def _promises(bench: Bench) -> str:
    """Returns the SLOs in words; empty if there are none."""
    slos = _slos(bench)
    if any(one != slos[0] for one in slos):
        return "what their tenants are promised"
    limits = slos[0].model_dump()
    words = [f"{name[:-2].upper()} {seconds(limit)}" for name, limit in limits.items() if limit is not None]
    return enumerated(words)


def _next(best: CaseResult, other: CaseResult, promised: bool) -> str:
    """Returns the next best strategy, its distance and the reason, in words."""
    name = other.case.axes.label
    decided = "e2e_mean_s"
    if promised and abs(_kept(best) - _kept(other)) >= SAME:
        text, decided = f"{_share(other)} with {name}", "slo_attainment"
    elif promised:
        text = f"as many with {name}, mean E2E {_time(other, 'e2e_mean_s')}"
    else:
        text = f"{_time(other, 'e2e_mean_s')} with {name}"
    chance = ", which chance may have done" if _too_close(best, other, decided) else ""
    return text + _why(best, other) + chance


def _too_close(best: CaseResult, other: CaseResult, figure: str) -> bool:
    """Whether the replicas leave open which of two cases is ahead in a figure: the interval of their paired
    differences contains zero. False if no pair differs."""
    pairs = zip(best.replicas, other.replicas, strict=True)
    both = [(ours[figure][0], theirs[figure][0]) for ours, theirs in pairs]
    lost = [{"lost": (b - a, "")} for a, b in both if a is not None and b is not None]
    if not any(difference for each in lost for difference, _ in each.values()):
        return False
    _, low, high = over_replicas(lost)["lost"]
    return low is not None and high is not None and low <= 0.0 <= high


def _heaviest(results: Sequence[CaseResult]) -> list[CaseResult]:
    """Returns the cases at the load with most tokens per second and device."""
    heaviest = max(results, key=_weight).case.point
    return [one for one in results if one.case.point == heaviest]


def _weight(one: CaseResult) -> tuple[float, float, float]:
    """Returns the weight of a case's load: tokens per second and device (of fleets: and fleet), clients,
    requests."""
    axes = one.case.axes
    tokens = axes.prompt_tokens + axes.output_tokens
    clients = one.case.point.clients or 0
    devices = 1 if one.case.groups else axes.devices
    return (axes.rate_per_s or 0.0) * tokens / devices, clients, axes.requests


def _ranked(here: Sequence[CaseResult], promised: bool) -> list[CaseResult]:
    """Returns the cases, best first: cases with nearly the best attainment by latency, then the others by
    attainment."""
    most = max(_kept(one) for one in here) if promised else 0.0

    def rank(one: CaseResult) -> tuple[float, float]:
        behind = most - _kept(one) if promised else 0.0
        latency_s = one.value("e2e_mean_s")
        return (0.0 if behind < SAME else behind), float("inf") if latency_s is None else latency_s

    return sorted(here, key=rank)


def _kept(one: CaseResult) -> float:
    return one.value("slo_attainment") or 0.0


def _load(case: Case) -> str:
    axes = case.axes
    if case.point.clients is not None:
        clients = case.point.clients
        return f"With {clients:,} client{'s' if clients > 1 else ''} in a closed loop"
    if axes.rate_per_s is None:
        return f"With {axes.requests:,} request{'s' if axes.requests > 1 else ''} at once"
    return f"At {axes.rate_per_s:.3g} {axes.arriving}/s"


def _devices(bench: Bench, case: Case, several: bool) -> str:
    if bench.fleet:
        return bench.name
    count = case.axes.devices
    return bench.hardware.name if count == 1 and not several else f"{count} {bench.hardware.name}"


def _share(one: CaseResult, metric: str = "slo_attainment") -> str:
    share = one.value(metric)
    if share is None:
        return "none"
    # Rounding must not turn a share into 0 or 100 %.
    if 0.9995 <= share < 1.0:
        return "over 99.9%"
    return "under 0.1%" if 0.0 < share < 0.0005 else f"{share:.1%}"


def _time(one: CaseResult, name: str) -> str:
    value = one.value(name)
    return "no time" if value is None else seconds(value)


def seconds(value: float) -> str:
    """Returns a time in the usual notation.

    >>> seconds(0.0123), seconds(2.5), seconds(0.0)
    ('12.3 ms', '2.5 s', '0 ms')
    """
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"


def _why(best: CaseResult, other: CaseResult) -> str:
    """Returns where the next best loses most time, in words: waiting, the first token, or further tokens."""
    parts = {
        "wait": ("queue_mean_s", 1.0),
        "prefill": ("ttft_mean_s", 1.0),
        "decode": ("tpot_mean_s", max(0.0, best.case.axes.output_tokens - 1.0)),
    }

    def lost_s(name: str, times: float) -> float:
        ours, theirs = best.value(name), other.value(name)
        return 0.0 if ours is None or theirs is None else (theirs - ours) * times

    lost = {part: lost_s(*of) for part, of in parts.items()}
    lost["prefill"] -= lost["wait"]
    part = max(lost, key=lambda name: lost[name])
    if lost[part] <= 0.0:
        return ""
    if part == "wait":
        ours, theirs = _time(best, "queue_mean_s"), _time(other, "queue_mean_s")
        return f", whose requests wait {theirs} for their turn, not {ours}" if ours != theirs else ""
    if part == "prefill":
        return ", whose first tokens come later once their prompts are begun"
    ours, theirs = _time(best, "tpot_mean_s"), _time(other, "tpot_mean_s")
    return f", whose tokens take {theirs} each, not {ours}" if ours != theirs else ""


def notes(bench: Bench, results: Sequence[CaseResult]) -> list[str]:
    """Returns the notes that a reader of the figures needs."""
    lines = ["figures are means over replicas; requests and levels over time are those of the first one"]
    rooms = {one.case.axes.label: one for one in results}
    for name, one in rooms.items():
        several = len({*one.rooms}) > 1
        of = [f"{group.name}, " for group in bench.fleet] if several else [""]
        lines += [f"{each}{name}: {room} a server" for each, room in zip(of, one.rooms, strict=False)]
    lines += [_by_group(bench, one) for one in results if len(bench.fleet) > 1]
    for one in results:
        share = one.value("prefix_hit_share") if "prefix_hit_share" in one.replicas[0] else None
        if share is not None:
            lines.append(
                f"{_load(one.case)}, {one.case.axes.label}: {share:.1%} of the prompt tokens come from"
                " the cache and are not computed"
            )
    lines += _autoscaled(results)
    if bench.scenario.replicas == 1:
        lines.append("one replica: no interval says how far chance goes; set replicas")
    return lines


def _by_group(bench: Bench, one: CaseResult) -> str:
    """Returns what each group of a fleet does, in words."""
    each = []
    for number, group in enumerate(bench.fleet, 1):
        share, busy = (one.value(f"{GROUP}.{number}.{name}") for name in ("request_share", "utilisation"))
        if share is not None and busy is not None:
            each.append(f"{group.name} {share:.1%} (busy {busy:.0%})")
    return f"{_load(one.case)}, {one.case.axes.label}: share of the requests: {', '.join(each) or 'none'}"


def _autoscaled(results: Sequence[CaseResult]) -> list[str]:
    """Returns what each rule of autoscaling spares and loses, against all servers all the time."""
    return [
        f"{_load(one.case)}, {one.case.axes.label}: {_spared(one)}{_lost(one, results)}"
        for one in results
        if one.case.scaling is not None
    ]


def _spared(one: CaseResult) -> str:
    saved, mean, hours = (one.value(name) for name in ("device_time_saved", "mean_servers", "device_hours"))
    if saved is None or mean is None or hours is None:
        return "the run takes no time"
    held = f"{mean:.3g} of {one.case.servers} servers, {hours:.3g} device hours"
    return f"{saved:.1%} of the device time saved ({held})"


def _lost(one: CaseResult, results: Sequence[CaseResult]) -> str:
    """Returns the SLO attainment or, without SLOs, the latency beside that of the same case with all servers,
    in words; empty if there is no such case."""
    fixed = next(
        (other for other in results if other.case.scaling is None and _same_but_scaling(one, other)), None
    )
    if fixed is None:
        return ""
    if fixed.value("slo_attainment") is None:
        return f"; p99 E2E {_time(one, 'e2e_p99_s')} instead of {_time(fixed, 'e2e_p99_s')}"
    return f"; {_share(one)} of the requests keep the SLOs instead of {_share(fixed)}"


def _same_but_scaling(one: CaseResult, other: CaseResult) -> bool:
    ours, theirs = one.case, other.case
    return ours.point == theirs.point and repr(ours.strategy) == repr(theirs.strategy)


def _beyond_memory(bench: Bench, results: Sequence[CaseResult]) -> list[str]:
    """Returns a warning if a scenario gives a server more KV blocks than the device's memory holds."""
    if bench.scenario.kv_blocks is None:
        return []
    lines: dict[str, None] = {}
    for place, own in enumerate(bench.benches):
        needed = [
            (held_bytes(one.rooms[place], model) + model.weight_bytes, part.axes.label)
            for one in results
            for part in (bench.parts(one.case)[place][1],)
            for model in (own.model(part.ranks),)
        ]
        most, name = max(needed)
        have = own.hardware.memory_bytes
        if most > have:
            text = f"they and the weights take {most / 1e9:,.0f} GB, and {own.hardware.name} has"
            lines[f"kv_blocks: {name}: {text} {have / 1e9:.0f}"] = None
    return list(lines)


def _as_streams(bench: Bench, results: Sequence[CaseResult]) -> list[str]:
    """Returns a warning where streams that are processes of their own are predicted."""
    names = dict.fromkeys(one.case.axes.label for one in results if processes(one.case.strategy))
    if bench.hardware.measured or not names:
        return []
    return [
        f"{'; '.join(names)}: predicted as streams of one process; what processes take beyond that (messages,"
        " turns on a card) is not modelled, --on cuda measures it"
    ]


def warnings(bench: Bench, results: Sequence[CaseResult], shares: Mapping[str, float]) -> list[str]:
    """Returns warnings: rejected requests, recomputed work, unmeasured prices, unreliable figures."""
    lines = []
    for one in results:
        name, place, requests = one.case.axes.label, _load(one.case), one.case.axes.requests
        turned_away = one.value("rejected")
        if turned_away:
            of = f"{turned_away:.0f} of {requests:,} requests"
            room = f"a KV cache of {max(room.kv_tokens for room in one.rooms):,} tokens"
            lines.append(f"{place}, {name}: {of} fit on no server with {room}: rejected")
        again, waited = one.value("preemptions"), one.value("waited_for_kv")
        if again and again > 0.01 * requests:
            lines.append(
                f"{place}, {name}: {again:.0f} preemptions; KV memory is short, and work is done twice"
            )
        elif waited and waited > 0.01 * requests:
            strategy = one.case.strategy
            keeps = isinstance(strategy, ContinuousBatching) and strategy.reserve is not None
            why = ", where room is kept for answers as long as workload.max_tokens" if keeps else ""
            lines.append(f"{place}, {name}: {waited:,.0f} of {requests:,} requests waited for KV memory{why}")
    lines += certainty.warnings(results, lambda one: f"{_load(one.case)}, {one.case.axes.label}")
    lines += certainty.few_of_tenants(results, bench.scenario.slos)
    workloads = {id(one.case.point.workload): one.case.point.workload for one in results}
    lines += list(dict.fromkeys(doubt for workload in workloads.values() for doubt in doubts(workload)))
    lines += _beyond_memory(bench, results)
    lines += _as_streams(bench, results)
    left_out = max(one.left_out for one in results)
    if left_out:
        lines.append(f"{left_out:,} recorded requests without prompt or answer are left out")
    lines += unmeasured(shares, bench.name)
    unseen, name = max((one.unseen_gaps, one.case.axes.label) for one in results)
    if unseen > 0.05:
        lines.append(
            f"percentiles of ITL leave out {unseen:.0%} of the time between tokens, in which requests stood"
            f" still ({name}); the mean has it in"
        )
    return lines + extrapolated(shares)
