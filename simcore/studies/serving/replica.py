"""One run of a case reduced to its figures: the measured window, and the figures in it.

With autoscaling, utilisation and the mean share of KV are of the servers that hold their devices.
"""

from collections.abc import Mapping

from simcore.studies.columns import WHOLE_RUN
from simcore.studies.serving.autoscaling import Fleet
from simcore.studies.serving.figures import Figure, both, prefix_hit_share
from simcore.studies.serving.of_groups import of_groups
from simcore.studies.serving.of_tenants import of_tenants
from simcore.studies.serving.runner import Bench, Case, Result
from simcore.studies.serving.scenario import WholeRun
from simcore.studies.serving.window import Window, steady, whole_run


def window_of(bench: Bench, case: Case, result: Result) -> Window:
    """Returns the part of a run that the scenario measures."""
    measure = bench.scenario.measure
    if isinstance(measure, WholeRun):
        return whole_run(result.served)
    return steady(result.served, measure.warmup_share, case.point.clients, result.opens)


def figures_of(bench: Bench, result: Result, case: Case, window: Window) -> Mapping[str, Figure]:
    """Returns every figure of a run by its name."""
    slos = bench.scenario.slos
    journal, kv_limit = result.kv
    found = both(
        result.served,
        journal,
        kv_limit=kv_limit,
        servers=case.servers,
        slo=list(slos.values()) if slos else bench.scenario.slo,
        window=window,
    )
    found |= of_tenants(result.served, window, slos)
    if bench.fleet:
        found |= of_groups(result, window)
    if any(getattr(part.strategy, "prefix_caching", False) for _, part in bench.parts(case)):
        found["prefix_hit_share"] = prefix_hit_share(result.served)
    if result.fleet is not None:
        found |= _of_servers_that_run(found, result.fleet, window, whole_run(result.served))
        found |= held(result.fleet, *result.served.window_s, case.ranks)
    return found


def _of_servers_that_run(
    found: Mapping[str, Figure], fleet: Fleet, window: Window, whole: Window
) -> dict[str, Figure]:
    """Returns the figures that are means over all servers as means over those that hold their devices."""
    scaled: dict[str, Figure] = {}
    for suffix, over in (("", window), (WHOLE_RUN, whole)):
        times = fleet.servers / fleet.mean(over.begin_s, over.end_s)
        for name in ("utilisation", "mean_kv_share"):
            value, unit = found[name + suffix]
            scaled[name + suffix] = (None if value is None else value * times, unit)
    return scaled


def held(fleet: Fleet, begin_s: float, end_s: float, ranks: int) -> dict[str, Figure]:
    """Returns what a run took of its devices, from its first arrival to its last answer."""
    held_s, most_s = fleet.held_s(begin_s, end_s), fleet.servers * (end_s - begin_s)
    return {
        "server_s": (held_s, "s"),
        "device_hours": (held_s * ranks / 3600.0, "h"),
        "device_time_saved": (1.0 - held_s / most_s if most_s > 0.0 else None, ""),
        "mean_servers": (fleet.mean(begin_s, end_s), ""),
        "max_servers": (fleet.most(begin_s, end_s), ""),
        "server_starts": (float(fleet.starts(begin_s, end_s)), ""),
    }
