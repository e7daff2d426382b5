"""Points of a plan: single cases of serving scenarios, each with the bench that runs it.

Points whose scenarios differ only in `FREE` fields share models and prices.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from simcore.assembly import Place, assemble, versions
from simcore.input.fields import DeviceChoice
from simcore.input.files import InputError
from simcore.scenario import resolved
from simcore.sim.kept import code_digest
from simcore.studies.hardware import Hardware
from simcore.studies.serving.autoscaling import FixedFleet
from simcore.studies.serving.engines.presets import pinned, with_engines
from simcore.studies.serving.runner import Bench, Case
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.study import cases, refusal
from simcore.workload.spec import ConstantArrivals, ConstantLength, TraceArrivals

# Fields that neither the model nor the prices of its ops depend on.
FREE = frozenset(
    {
        "name",
        "seed",
        "workload",
        "strategies",
        "devices",
        "routing",
        "autoscaling",
        "kv_blocks",
        "memory_share",
    }
    | {"price_interval", "contention", "measure", "slo", "replicas", "published"}
)
# Fields that no run depends on.
IDLE = frozenset({"name", "replicas", "price_interval", "published"})
FORMAT = 4


class Devices(NamedTuple):
    """Devices that are alike: their name for people, that of their kind without changes, their number."""

    name: str
    base: str
    number: int
    hardware: Hardware


@dataclass(frozen=True, eq=False)
class Point:
    """A case with its bench. `device`: its name for people, or that of its fleet; `where`: what its scenario
    is called in messages; `fleet`: the place of its fleet there."""

    bench: Bench
    case: Case
    scenario: ServingScenario
    device: str
    where: str = "scenario"
    fleet: int = 0

    @property
    def devices(self) -> list[Devices]:
        """Its devices, those that are alike together."""
        if self.bench.fleet:
            return [
                Devices(one.bench.hardware.name, one.base, one.servers * one.ranks, one.bench.hardware)
                for one in self.bench.fleet
            ]
        (one,) = self.scenario.devices_in_use
        return [Devices(self.device, one.base, self.case.axes.devices, self.bench.hardware)]

    @cached_property
    def key(self) -> str | None:
        """All that its runs go by, but replica and prices' end, as a digest; None if that is not known."""
        kept = [bench.hardware.kept for bench in self.bench.benches]
        code, own = code_digest(), ":" in self.case.strategy.kind
        keys = [store.key for store in kept if store is not None]
        if len(keys) < len(kept) or code is None or own:
            return None
        fields = {name: value for name, value in resolved(self.scenario).items() if name not in IDLE}
        goes_by = [FORMAT, code, versions(), keys, repr(self.bench.config), fields, _files(fields)]
        words = json.dumps(goes_by, sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()

    @property
    def same_in_every_run(self) -> bool:
        """Whether nothing of its requests is drawn, so that one replica is as good as many: a recorded trace,
        or constant arrivals, with recorded or constant lengths."""
        workload = self.scenario.workload
        arrivals, lengths = workload.arrivals, (workload.prompt_tokens, workload.output_tokens)
        if isinstance(arrivals, TraceArrivals):
            drawn = arrivals.jitter_s > 0.0
        else:
            drawn = not isinstance(arrivals, ConstantArrivals)
        own = ":" in self.case.strategy.kind
        varied = any(not isinstance(each, ConstantLength | None) for each in lengths)
        return not (drawn or own or varied or workload.tenants or workload.sessions)


def _files(fields: Any) -> list[Any]:
    """Returns size and time of change of each file that a scenario's workload names."""
    if isinstance(fields, dict):
        here: list[Any] = []
        if isinstance(fields.get("path"), str):
            about = Path(fields["path"]).stat()
            here = [[fields["path"], about.st_size, about.st_mtime_ns]]
        return here + [each for value in fields.values() for each in _files(value)]
    if isinstance(fields, list):
        return [each for value in fields for each in _files(value)]
    return []


class Benches:
    """Puts scenarios together, and keeps what points have in common."""

    def __init__(self, where: str, jobs: int) -> None:
        self.where = where
        self.place = Place(jobs=jobs)
        self._known: dict[str, tuple[Bench, str]] = {}
        self.warnings: dict[str, None] = {}
        # The name of the link of each device.
        self.links: dict[str, str] = {}
        self.origins: list[dict[str, Any]] = []

    def points(self, scenario: ServingScenario) -> list[Point]:
        """Returns the cases of a scenario, in its order; devices in the order of the list. Raises InputError,
        ModelError."""
        return [
            Point(bench, case, _single(alone, case), device, self.where, place)
            for place, alone in _by_device(scenario)
            for bench, device in [self._bench(alone, place)]
            for case in cases(bench)
        ]

    def at(self, point: Point, **changes: Any) -> Point:
        """Returns a point with other `FREE` fields of its scenario. Raises InputError."""
        scenario = point.scenario.model_copy(update=changes)
        bench = point.bench.of(scenario)
        (case,) = cases(bench)
        return Point(bench, case, scenario, point.device, point.where, point.fleet)

    def link_of(self, point: Point) -> str | None:
        """Returns the name of the link between the ranks of a server, None with a single rank, and in a
        fleet, whose groups have links of their own."""
        alone = point.bench.fleet or point.case.ranks == 1
        return None if alone else self.links.get(point.device)

    def close(self) -> None:
        """Saves the prices for other runs."""
        for bench, _ in self._known.values():
            bench.keep_prices()

    def every(self) -> list[Bench]:
        """Returns one bench of each set of prices."""
        return [bench for bench, _ in self._known.values()]

    def _bench(self, scenario: ServingScenario, place: int) -> tuple[Bench, str]:
        fields = {name: value for name, value in resolved(scenario).items() if name not in FREE}
        key = json.dumps(fields, sort_keys=True)
        if key not in self._known:
            parts = assemble(scenario, self.where, self.place, first_fleet=place)
            self.warnings.update(dict.fromkeys(parts.warnings))
            self.origins.append(dict(parts.described))
            study: Any = parts.study
            self._known[key] = study.bench, study.device
            if (link := parts.described["link"]) is not None:
                self.links[study.device] = link["name"]
        bench, device = self._known[key]
        if scenario.fleets:
            return bench.of(pinned(scenario)), device
        (one,) = scenario.devices_in_use
        try:
            whole = with_engines(scenario, one.base, bench.hardware.memory_bytes)
        except InputError as error:
            raise InputError(f"{self.where}: {error}") from None
        return bench.of(whole), device


def _by_device(scenario: ServingScenario) -> list[tuple[int, ServingScenario]]:
    """Returns a scenario for each of its devices, or fleets, with its place in the list of these."""
    if scenario.fleets:
        every = scenario.fleets_in_use
        return [(place, scenario.model_copy(update={"fleets": [list(groups)]})) for place, groups in every]
    return [
        (
            place,
            scenario.model_copy(
                update={"device": [DeviceChoice(base=one.base, change=dict(one.change), name=one.name)]}
            ),
        )
        for place, one in enumerate(scenario.devices_in_use)
    ]


def _single(scenario: ServingScenario, case: Case) -> ServingScenario:
    """Returns the scenario of one case alone."""
    return scenario.model_copy(
        update={
            "devices": [case.point.devices],
            "workload": case.point.workload,
            "strategies": [case.strategy],
            "autoscaling": [case.scaling or FixedFleet(kind="none")],
        }
    )


def why_not(point: Point) -> str | None:
    """Returns why a point cannot run, or None."""
    return refusal(point.bench, point.case)
