"""Figures of each tenant's requests: pure functions of the requests of a run.

    tenant.NAME.METRIC     METRIC of the requests of tenant NAME alone, by the formulas of `figures.py`

Which SLO counts is each tenant's own. Figures that no request has by itself (gaps between tokens, generated
tokens, batches, memory) are of all tenants together.
"""

from collections.abc import Mapping
from dataclasses import replace

from simcore.studies.columns import TENANT, WHOLE_RUN
from simcore.studies.serving.figures import (
    PERCENTILES,
    Figure,
    Slo,
    attainment,
    latencies,
    offered_per_s,
    spreads,
)
from simcore.studies.serving.served import Served
from simcore.studies.serving.window import Window, whole_run

LATENCIES = ("ttft", "tpot", "e2e", "queue")
# Figures of a window, and of the whole run only.
WINDOWED = (
    *(f"{name}_{of}_s" for name in LATENCIES for of in ("mean", *(f"p{percent}" for percent in PERCENTILES))),
    *("slo_attainment_ttft", "slo_attainment_tpot", "slo_attainment_e2e", "slo_attainment", "goodput_per_s"),
)
COUNTED = ("offered_per_s", "window_requests", "completed", "rejected")


def of_tenants(served: Served, window: Window, slos: Mapping[str, Slo]) -> dict[str, Figure]:
    """Returns the figures of all tenants by their names; `slos`: by tenant, in the order of the workload."""
    found: dict[str, Figure] = {}
    whole = whole_run(served)
    for place, (name, slo) in enumerate(slos.items()):
        mine = served.tenant == place
        own = served.only(mine)
        measured = replace(window, came=window.came[mine])
        figures = _windowed(own, measured, slo)
        if window.unrated:
            figures["goodput_per_s"] = (None, "1/s")
        for metric, figure in _windowed(own, replace(whole, came=whole.came[mine]), slo).items():
            figures[f"{metric}{WHOLE_RUN}"] = figure
        figures["offered_per_s"] = (offered_per_s(own, measured), "1/s")
        figures["window_requests"] = (float(measured.came.sum()), "")
        figures["completed"] = (float(own.finished.sum()), "")
        figures["rejected"] = (float(own.rejected.sum()), "")
        found |= {f"{TENANT}.{name}.{metric}": figure for metric, figure in figures.items()}
    return found


def _windowed(own: Served, window: Window, slo: Slo) -> dict[str, Figure]:
    came = own.only(window.came)
    took_s = latencies(came)
    return {**spreads(took_s), **attainment(came, took_s, slo, window.length_s)}
