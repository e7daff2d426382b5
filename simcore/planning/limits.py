"""What must hold: limits of metrics, by their names in results.csv.

    ttft_p99_s: 0.5          at most, of a metric that should be small
    slo_attainment: 0.99     at least, of one that should be large
    tenant.chat.ttft_p99_s: 0.5      of the requests of one tenant

Latencies also have percentiles that results.csv has not: `ttft_p99.9_s`, from 50 to 99.9.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from simcore.input.files import InputError, nearest, plain
from simcore.studies.columns import METRICS, TENANT, metric, split_tenant
from simcore.studies.serving.figures import LATENCIES, PERCENTILES, WINDOWED
from simcore.studies.serving.of_tenants import LATENCIES as OWN_LATENCIES
from simcore.studies.serving.of_tenants import WINDOWED as OF_TENANT

STUDY = "serving"
# Percentiles that a limit may name.
ALLOWED = (*PERCENTILES, 99.9)
LATENCY = re.compile(rf"({'|'.join(LATENCIES)})_(mean|p(\d+(?:\.\d+)?))_s")
# From here on four digits round to a power of ten.
LEAST_WHOLE = 9999.5
# What the latencies begin with that each tenant has.
_OF_ITS_OWN = tuple(f"{name}_" for name in OWN_LATENCIES)
# Metrics of which more is neither better nor worse but that something limits: memory, or who pays for starts.
AT_MOST_TOO = ("max_kv_share", "mean_kv_share", "utilisation", "max_batch", "mean_batch", "server_starts")


@dataclass(frozen=True, slots=True)
class Limit:
    """A metric and its limit; `at_most`: the metric may not be greater, else not less."""

    metric: str
    value: float
    at_most: bool

    def text(self) -> str:
        """Returns it in words: "p99 TTFT at most 500 ms"."""
        words = "at most" if self.at_most else "at least"
        return f"{metric_text(self.metric)} {words} {value_text(self.metric, self.value)}"


def names(tenants: Iterable[str] = ()) -> list[str]:
    """Returns the metrics that a limit may name, sorted; `tenants`: the names of the scenario's tenants."""
    known = [
        name
        for name in (*METRICS[STUDY], *WINDOWED)
        if metric(STUDY, name).better is not None or name in AT_MOST_TOO
    ]
    spread = [f"{name}_{of}_s" for name in LATENCIES for of in ("mean", *(f"p{p:g}" for p in ALLOWED))]
    every = {*(name for name in known if name not in {f"{of}_s" for of in LATENCIES}), *spread}
    own = [name for name in every if name in OF_TENANT or name.startswith(_OF_ITS_OWN)]
    return sorted(every) + sorted(f"{TENANT}.{tenant}.{name}" for tenant in tenants for name in own)


def limits(given: Mapping[str, float], where: str, tenants: Iterable[str] = ()) -> tuple[Limit, ...]:
    """Returns limits from a mapping of metrics to values; `tenants`: the names of the scenario's tenants.
    Raises InputError if a metric is unknown, or its limit can never be kept or broken."""
    known = names(tenants)
    for name in given:
        if name not in known:
            raise InputError(f"{where}: {plain(name)}: no such metric{nearest(name, known)}")
        most = greatest(name)
        above = name.endswith("_s")
        if not 0.0 <= given[name] <= most or (given[name] == 0.0 and above):
            number = "a number above 0" if above else "0 or more"
            allowed = f"a share from 0 to {most:g}" if most == 1.0 else number
            raise InputError(f"{where}: {name}: is {given[name]:g}; {allowed} is needed")
    return tuple(Limit(name, value, metric(STUDY, name).better != "higher") for name, value in given.items())


def greatest(name: str) -> float:
    """Returns the greatest value that a metric may have; the least is 0."""
    _, name = split_tenant(name)
    return (
        1.0 if name.startswith("slo_attainment") or name.endswith("_share") or name == "utilisation" else inf
    )


def within(name: str, low: float, high: float) -> tuple[float, float]:
    """Returns an interval of a metric without what the metric cannot be.

    >>> within("ttft_p99_s", -0.1, 0.4), within("slo_attainment", 0.97, 1.02)
    ((0.0, 0.4), (0.97, 1.0))
    """
    return max(low, 0.0), min(high, greatest(name))


def of_slo(slo: Mapping[str, float | None], tenant: str = "") -> dict[str, float]:
    """Returns the limits of an SLO, of all requests or of a tenant's: each latency's 99th percentile."""
    of = f"{TENANT}.{tenant}." if tenant else ""
    held = {name.removesuffix("_s"): value for name, value in slo.items() if value is not None}
    return {f"{of}{name}_p99_s": value for name, value in held.items()}


# -- in words ----------------------------------------------------------------------------------------------


def value_text(metric: str, value: float) -> str:
    """Returns a metric's value with its unit for people: seconds below one in ms."""
    if metric.endswith("_s") and not metric.endswith("per_s"):
        return f"{value * 1e3:.3g} ms" if value < 1.0 else f"{value:.3g} s"
    return number_text(value)


def number_text(value: float) -> str:
    """Returns a number for people: four digits, or all that are whole.

    >>> number_text(12.3456), number_text(9999.7), number_text(31580.3)
    ('12.35', '10,000', '31,580')
    """
    return f"{value:,.0f}" if LEAST_WHOLE <= abs(value) < 1e15 else f"{value:.4g}"


def metric_text(metric: str) -> str:
    """Returns a metric's name for people.

    >>> [metric_text(name) for name in ("ttft_p99_s", "e2e_mean_s", "goodput_per_s", "slo_attainment")]
    ['p99 TTFT', 'mean E2E', 'goodput per s', 'slo attainment']
    >>> metric_text("tenant.chat.ttft_p99_s")
    'p99 TTFT of chat'
    """
    tenant, metric = split_tenant(metric)
    if tenant:
        return f"{metric_text(metric)} of {tenant}"
    parts = metric.removesuffix("_s").split("_") if not metric.endswith("per_s") else metric.split("_")
    if len(parts) == 2 and (parts[1] == "mean" or parts[1][:1] == "p") and parts[1] != "per":
        return f"{parts[1]} {parts[0].upper() if parts[0] != 'queue' else 'queueing'}"
    return " ".join(parts)
