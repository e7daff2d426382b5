"""What a plan's answer may hinge on: fields of a scenario, each at other multiples of its value.

    load, lengths         workload, by `LOAD` and `LENGTH`
    burstiness            standard deviation of the gaps between arrivals / their mean; 1 is Poisson
    prompts that differ   by `HIT_RATE`: fewer different prompts hit a prefix cache more often
    memory, arithmetic    of the device, by `RATE`; links by `LINK`
    host                  its time a launch, by `HOST`

A multiple below one and one above it are tried: differences as large as people are wrong by.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Puts = Mapping[str, Any]
# The multiples that are tried.
Ends = tuple[float, float]
LOAD, LENGTH, RATE = (0.9, 1.1), (0.8, 1.2), (0.9, 1.1)
LINK, LATENCY, HOST, CV, HIT_RATE = (0.8, 1.2), (0.5, 2.0), (0.5, 2.0), (0.5, 2.0), (0.5, 2.0)
# By how much a resource is better where it is asked what limits.
RELIEF = 1.25
ARRIVALS, DEVICE = "workload.arrivals", "device.change"


@dataclass(frozen=True)
class Factor:
    """A field or several that an answer may hinge on. `low`, `high`: the multiples that are tried; `puts`:
    the values of fields, by dotted path, at a multiple."""

    name: str
    low: float
    high: float
    puts: Callable[[float], Puts]


def factors(document: Mapping[str, Any], link: str | None) -> list[Factor]:
    """Returns the factors of a scenario with one case and one device. `document`: its fields, all defaults
    written out; `link`: the name of the link that its servers use, None if they use none."""
    workload = document["workload"]
    own = any(tenant.get("arrivals") for tenant in workload.get("tenants") or ())
    found = [] if own else [*_arrivals(workload["arrivals"])]
    for name, words in (("prompt_tokens", "prompts' lengths"), ("output_tokens", "answers' lengths")):
        if (given := workload.get(name)) is not None and _scales(given):
            found.append(_of_lengths(name, words, given))
    if (count := workload.get("distinct_prompts")) is not None:
        found.append(
            Factor(
                "prompts that differ",
                *HIT_RATE,
                lambda times: {"workload.distinct_prompts": max(1, round(count * times))},
            )
        )
    return found + _of_hardware(document, link, (RATE, RATE, LINK, LATENCY, HOST))


def resources(document: Mapping[str, Any], link: str | None) -> list[Factor]:
    """Returns what may limit a scenario, each a quarter better at its `high`. See `factors`."""
    more, less = (1.0, RELIEF), (1.0, 1.0 / RELIEF)
    return [*_of_hardware(document, link, (more, more, more, less, less)), _room(document)]


def _of_hardware(document: Mapping[str, Any], link: str | None, ends: Sequence[Ends]) -> list[Factor]:
    """Returns the factors of the device. `ends`: of memory, arithmetic, the link's rate and latency, and the
    host, in this order."""
    memory, arithmetic, rate, latency, host = ends
    figures = [
        ("memory bandwidth", memory, "hbm_bytes_per_s"),
        ("arithmetic", arithmetic, "flops_per_s"),
        *([("link bandwidth", rate, f"links.{link}.bytes_per_s")] if link else []),
        *([("link latency", latency, f"links.{link}.latency_s")] if link else []),
        ("host time", host, "overheads"),
    ]
    return [_of_device(name, of, figure, document) for name, of, figure in figures]


def _room(document: Mapping[str, Any]) -> Factor:
    """Returns the room for KV as a factor where the scenario gives it, else the device's memory."""
    blocks = document.get("kv_blocks")
    if blocks is None:
        return _of_device("device memory", (1.0, RELIEF), "memory_bytes", document)
    return Factor("room for KV", 1.0, RELIEF, lambda times: {"kv_blocks": round(blocks * times)})


def _change(device: Any) -> Mapping[str, Any]:
    given: Mapping[str, Any] = device.get("change", {}) if isinstance(device, dict) else {}
    return given


def _arrivals(arrivals: Mapping[str, Any]) -> list[Factor]:
    kind = arrivals["kind"]
    if kind == "trace":
        (speed,) = arrivals["rate_scale"]
        return [Factor("load", *LOAD, lambda times: {f"{ARRIVALS}.rate_scale": speed * times})]
    if kind == "closed_loop":
        (clients,) = arrivals["clients"]
        return [
            Factor("clients", *LOAD, lambda times: {f"{ARRIVALS}.clients": max(1, round(clients * times))})
        ]
    if kind not in ("constant", "poisson", "gamma"):
        # Tenants have arrivals of their own.
        return []
    (rate,) = arrivals["rate_per_s"] or [1.0 / arrivals["interval_s"][0]]

    def faster(times: float) -> Puts:
        return {f"{ARRIVALS}.rate_per_s": rate * times, f"{ARRIVALS}.interval_s": None}

    cv = {"poisson": 1.0, "gamma": arrivals.get("cv")}.get(kind)
    if cv is None or arrivals.get("span_intervals") is not None:
        return [Factor("load", *LOAD, faster)]

    def burstier(times: float) -> Puts:
        return {ARRIVALS: {"kind": "gamma", "rate_per_s": rate, "cv": cv * times}}

    return [Factor("load", *LOAD, faster), Factor("burstiness", *CV, burstier)]


def _scales(lengths: Mapping[str, Any]) -> bool:
    return lengths["kind"] != "empirical" or lengths.get("values") is not None


def _of_lengths(name: str, words: str, given: Mapping[str, Any]) -> Factor:
    path = f"workload.{name}"

    def scaled(times: float) -> Puts:
        def longer(value: Any) -> Any:
            if isinstance(value, list):
                return [longer(each) for each in value]
            return max(1, round(value * times)) if isinstance(value, int) else max(1.0, value * times)

        kept = ("kind", "cv")
        return {
            path: {
                key: value if key in kept or value is None else longer(value) for key, value in given.items()
            }
        }

    return Factor(words, *LENGTH, scaled)


def _of_device(name: str, ends: Ends, figure: str, document: Mapping[str, Any]) -> Factor:
    """Returns a figure of the device as a factor; of a fleet, that of all its devices."""

    def changed(device: Any, times: float) -> Puts:
        change = _change(device)
        before = change.get(figure, {"times": 1.0})
        if isinstance(before, Mapping):
            value: Any = {"times": before["times"] * times}
        else:
            value = before * times
        return {**change, figure: value}

    def of_group(group: Mapping[str, Any], times: float) -> Puts:
        device = group["device"]
        given = device if isinstance(device, dict) else {"base": device}
        return {**group, "device": {**given, "change": changed(device, times)}}

    def scaled(times: float) -> Puts:
        if fleets := document.get("fleets"):
            return {"fleets": [[of_group(group, times) for group in groups] for groups in fleets]}
        return {DEVICE: changed(document["device"], times)}

    return Factor(name, *ends, scaled)
