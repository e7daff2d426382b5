"""One run of a case reduced to its figures: the measured window, and the figures in it."""

from collections.abc import Mapping

from simcore.studies.serving.figures import Figure, both, prefix_hit_share
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
    found = both(
        result.served,
        result.journal,
        kv_limit=result.room.limit,
        servers=case.servers,
        slo=list(slos.values()) if slos else bench.scenario.slo,
        window=window,
    )
    found |= of_tenants(result.served, window, slos)
    if getattr(case.strategy, "prefix_caching", False):
        found["prefix_hit_share"] = prefix_hit_share(result.served)
    return found
