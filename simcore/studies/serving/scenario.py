"""Scenarios of the study `serving`: arriving requests, strategies, SLOs.

servers of a strategy = devices // ranks, or those of the groups of a fleet
runs = devices * workloads * sum over strategies of their variants * rules of autoscaling * replicas
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from simcore.input.fields import (
    MOST_RUNS,
    Device,
    DeviceChoice,
    FieldError,
    Many,
    OneDevice,
    Strict,
    count,
    single_valued,
)
from simcore.studies.fields import Common, SeveralRanks
from simcore.studies.own import OrOwn, check_labels
from simcore.studies.serving.autoscaling import Autoscaling, FixedFleet, Rule
from simcore.studies.serving.kv_memory import MemoryShare
from simcore.studies.serving.strategies import (
    IterationBatching,
    ServingStrategies,
    ServingStrategy,
    engine_of,
    label,
)
from simcore.workload.spec import ClosedLoop, ConstantLength, OfTenants, Slo, TraceArrivals, Workload

# Most requests of all runs of a scenario together: more are a mistake.
MOST_REQUESTS_IN_ALL = 1_000_000_000
# Most checks of autoscaling in a server's start, or for which a wanted number is kept.
MOST_CHECKS = 10_000
MOST_DEVICES = 1024
Devices = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
MOST_GROUPS = 64


class SharedMemory(Strict):
    """Graphs that run at once share memory and arithmetic fairly."""

    kind: Literal["shared_memory"]
    reuse_s: float = Field(
        default=0.0,
        ge=0.0,
        le=1e6,
        description="an instance that reads its weights g seconds after another spares exp(-g / reuse_s) of"
        " that traffic, s; 0 spares nothing",
    )


class Throughput(Strict):
    """n graphs at once do 1 + gain (n - 1) times what one does."""

    kind: Literal["throughput"]
    gain: float = Field(ge=0.0, le=1.0, description="what each further graph adds, as a share of one alone")


class NoContention(Strict):
    """Every graph runs as if it were alone."""

    kind: Literal["none"]


Contention = SharedMemory | Throughput | NoContention


class SteadyState(Strict):
    """Figures are of the requests that come after the warm-up and until the last one comes."""

    kind: Literal["steady_state"]
    warmup_share: float = Field(
        default=0.1,
        ge=0.0,
        le=0.5,
        description="share of the requests with whose answers the warm-up ends; in a closed loop each client"
        " has had one by then",
    )


class WholeRun(Strict):
    """Figures are of all requests, from the first arrival to the last answer, as benchmarks have them."""

    kind: Literal["whole_run"]


Measure = SteadyState | WholeRun


class ServerGroup(Strict):
    """Servers of a fleet that are alike."""

    device: Device = Field(description="device of these servers, as the field `device` of a scenario")
    servers: Many[Devices] = Field([1], description="number of these servers")
    ranks: SeveralRanks = [1]
    profile: str | None = Field(None, description="a profile of the device, in place of the scenario's")
    link: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="a link of the device, in place of the scenario's"
    )
    strategy: dict[str, Any] = Field(
        {}, description="fields of each strategy that these servers have otherwise, such as max_sequences"
    )

    @property
    def one(self) -> OneDevice:
        """The device of a single-valued group."""
        (one,) = self.device.each()
        return one

    @property
    def devices(self) -> int:
        """Devices of a single-valued group."""
        return self.servers[0] * self.ranks[0]

    def each(self) -> "Iterator[ServerGroup]":
        """Yields the groups that lists make of it; the last field varies fastest."""
        for one in self.device.each():
            device = DeviceChoice(base=one.base, change=dict(one.change), name=one.name)
            yield from single_valued(self.model_copy(update={"device": device}))


# The groups of a fleet, behind one router; every list in them has one value.
Groups = tuple[ServerGroup, ...]


class ServingScenario(Common):
    """Study `serving`: latency and throughput of requests, by strategy, load and number of devices."""

    study: Literal["serving"]
    device: Many[Device] = Field(
        [],
        description="device that it runs on: a name (`simcore devices`), a path to a YAML file, or one with"
        " changed figures; several are ranked; fleets stand in its place",
    )
    fleets: Annotated[
        list[Annotated[list[ServerGroup], Field(min_length=1, max_length=MOST_GROUPS)]],
        Field(max_length=1000),
    ] = Field(
        [],
        description="in place of device and devices: fleets to compare, each a list of groups of servers"
        " behind one router",
    )
    workload: Workload = Field(description="requests: when they come and how long they are")
    strategies: Annotated[
        list[Annotated[ServingStrategies, Field(discriminator="kind"), OrOwn(ServingStrategy)]],
        Field(min_length=1, max_length=1000, description="ways of serving to compare"),
    ]
    devices: Many[Devices] = Field([1], description="devices in all; a strategy's ranks make servers of them")
    routing: Literal["round_robin", "least_loaded", "prefix_aware"] = Field(
        "least_loaded",
        description="which server a request goes to: each in turn, that with fewest open requests, or that"
        " which was sent the longest beginning of its prompt",
    )
    autoscaling: Many[Annotated[Autoscaling, Field(discriminator="kind")]] = Field(
        [FixedFleet(kind="none")],
        description="rule by which servers start and stop, at most as many as devices make; none: all run",
    )
    kv_blocks: Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        None, description="KV blocks (or slots) of a server, in place of the memory that the model leaves"
    )
    memory_share: MemoryShare | None = Field(
        None,
        description="share of the device's memory that weights, activations and KV may take;"
        " by default a strategy's own (its engine's), 0.9 where it has none",
    )
    price_interval: bool | None = Field(
        None,
        description="whether to run the first replica at both ends of the prices' intervals too;"
        " by default, where it has at most 5000 requests",
    )
    contention: Annotated[
        Contention,
        Field(discriminator="kind", description="how graphs that run at once slow each other down"),
    ] = SharedMemory(kind="shared_memory")
    measure: Annotated[
        Measure, Field(discriminator="kind", description="which requests the figures are of")
    ] = SteadyState(kind="steady_state")
    slo: Slo = Field(
        Slo(), description="what a request is promised; goodput counts those that keep all of it"
    )

    @property
    def slos(self) -> "dict[str, Slo]":
        """Returns what each tenant's requests are promised, by its name; empty without tenants."""
        return {one.name: one.slo or self.slo for one in self.workload.tenants}

    @property
    def common_slo(self) -> Slo:
        """Returns what all requests are promised: nothing where tenants differ."""
        several = [*self.slos.values()] or [self.slo]
        alike = {
            name: value
            for name, value in several[0].model_dump().items()
            if all(getattr(one, name) == value for one in several)
        }
        return Slo(**alike)

    @model_serializer(mode="wrap")
    def _by_device_or_fleets(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = whole(self)
        left_out = ("device", "devices") if self.fleets else ("fleets",)
        return {name: value for name, value in found.items() if name not in left_out}

    @property
    def fleets_in_use(self) -> list[tuple[int, Groups]]:
        """The fleets that it runs on, one after the other, each with its place in `fleets`; empty if it runs
        on `device`."""
        return [
            (place, one)
            for place, groups in enumerate(self.fleets)
            for one in product(*(group.each() for group in groups))
        ]

    @model_validator(mode="after")
    def _consistent(self) -> "ServingScenario":
        _check_fleets(self)
        for place, strategy in enumerate(self.strategies):
            _check_ranks(place, strategy, self.devices)
            if isinstance(strategy, IterationBatching):
                _check_one_length(place, self.workload)
        for place, autoscaling in enumerate(self.autoscaling):
            _check_autoscaling(place, autoscaling, self)
        names = [rule.label() for rule in self.rules if rule is not None]
        if twice := [name for name in names if names.count(name) > 1]:
            raise FieldError("autoscaling", f"has a rule twice: {twice[0]}; each may be given once")
        _check_amount(self)
        # The fields that an engine fills in depend on the device, so its labels are checked later.
        placed = enumerate(self.strategies)
        check_labels(((place, one) for place, one in placed if not engine_of(one)), label)
        return self

    @property
    def rules(self) -> list[Rule | None]:
        """The rules of autoscaling, each field with one value; None: all servers run."""
        each = (one for autoscaling in self.autoscaling for one in single_valued(autoscaling))
        return [None if isinstance(one, FixedFleet) else one for one in each]

    @property
    def scales(self) -> bool:
        """Whether servers start and stop in any case."""
        return any(rule is not None for rule in self.rules)


def _check_fleets(scenario: ServingScenario) -> None:
    if not scenario.fleets:
        if not scenario.device:
            raise FieldError("device", "is missing; a device, or fleets in its place, is needed")
        return
    for name in ("device", "devices"):
        if name in scenario.model_fields_set:
            raise FieldError(name, "cannot be given with fleets, whose groups say it; leave it out")
    if scenario.published:
        raise FieldError("published", "cannot be given with fleets: published figures are of one device")
    if scenario.scales:
        raise FieldError("autoscaling", "cannot be given with fleets: servers that start and stop are alike")
    for place, strategy in enumerate(scenario.strategies):
        if strategy.ranks != [1]:
            raise FieldError(
                f"strategies[{place}].ranks",
                f"is {strategy.ranks[0]}; with fleets each group says its own ranks; leave it out",
            )
    number = 0
    for place, groups in enumerate(scenario.fleets):
        most = sum(max(group.servers) * max(group.ranks) for group in groups)
        if most > MOST_DEVICES:
            says = f"makes {most:,} devices; at most {MOST_DEVICES:,} are allowed"
            raise FieldError(f"fleets[{place}]", says)
        number += prod(len(list(group.device.each())) * count(group) for group in groups)
        if number > MOST_RUNS:
            raise FieldError("fleets", f"make over {MOST_RUNS:,} fleets; at most that many are allowed")


def _check_ranks(place: int, strategy: ServingStrategy, devices: list[int]) -> None:
    for ranks in strategy.ranks:
        for of in devices:
            if of % ranks:
                raise FieldError(
                    f"strategies[{place}].ranks",
                    f"is {ranks}; it must divide every value of devices, and {of} is no multiple of it",
                )


def _check_autoscaling(place: int, rule: Autoscaling, scenario: ServingScenario) -> None:
    if isinstance(rule, FixedFleet):
        return
    fewest, where = max(rule.min_servers), f"autoscaling[{place}]"
    for ranks in (ranks for strategy in scenario.strategies for ranks in strategy.ranks):
        if fewest > (servers := min(scenario.devices) // ranks):
            text = f"{min(scenario.devices)} devices make {servers} server{'s' if servers > 1 else ''}"
            raise FieldError(f"{where}.min_servers", f"is {fewest}; {text} of {ranks} ranks at most")
    for name in ("start_s", "keep_s"):
        if (seconds := max(getattr(rule, name))) > MOST_CHECKS * min(rule.check_s):
            most_s = MOST_CHECKS * min(rule.check_s)
            raise FieldError(
                f"{where}.{name}",
                f"is {seconds:g}; at most {MOST_CHECKS:,} check_s, {most_s:g} s, are allowed",
            )


def _check_one_length(place: int, workload: Workload) -> None:
    if isinstance(workload.arrivals, TraceArrivals):
        found = "workload.arrivals is a trace"
    elif workload.tenants:
        found = "workload has tenants"
    elif not isinstance(workload.output_tokens, ConstantLength):
        kind = workload.output_tokens.kind if workload.output_tokens else "missing"
        found = f"workload.output_tokens is {kind}"
    else:
        return
    raise FieldError(
        f"strategies[{place}].kind",
        f"is 'iteration_batching'; it needs output_tokens of kind constant, and {found}",
    )


def _check_amount(scenario: ServingScenario) -> None:
    """Raises FieldError if the lists multiply into too many runs or requests."""
    work = scenario.workload
    variants = sum(map(count, scenario.strategies))
    runs = len(scenario.devices) * count(work) * variants * len(scenario.rules) * scenario.replicas
    runs *= max(1, len(scenario.fleets_in_use))
    if runs > MOST_RUNS:
        raise FieldError(
            "strategies",
            f"make {runs:,} runs with devices, workload and replicas; at most {MOST_RUNS:,} are allowed",
        )
    if work.requests is None:
        return
    requests = runs // len(work.requests) * sum(work.requests)
    if requests > MOST_REQUESTS_IN_ALL:
        raise FieldError(
            "workload.requests",
            f"makes {requests:,} requests in {runs:,} runs; at most {MOST_REQUESTS_IN_ALL:,} are allowed",
        )


# -- what the lists multiply into --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One load on one number of devices: a workload in which every list has one value. `devices`: in all; of
    a fleet, those of its groups."""

    devices: int
    workload: Workload

    @property
    def requests(self) -> int | None:
        """The number of requests; None for all requests of a trace."""
        return self.workload.requests[0] if self.workload.requests else None

    @property
    def rate_per_s(self) -> float | None:
        """The mean rate in the scenario; None for traces, closed loops and tenants' own arrivals."""
        arrivals = self.workload.arrivals
        return None if isinstance(arrivals, TraceArrivals | ClosedLoop | OfTenants) else arrivals.rates[0]

    @property
    def rate_scale(self) -> float:
        """The replay speed of a trace over the recorded one; 1 for other arrivals."""
        arrivals = self.workload.arrivals
        return arrivals.rate_scale[0] if isinstance(arrivals, TraceArrivals) else 1.0

    @property
    def clients(self) -> int | None:
        """The number of clients of a closed loop; None for other arrivals."""
        arrivals = self.workload.arrivals
        return arrivals.clients[0] if isinstance(arrivals, ClosedLoop) else None


def points(scenario: ServingScenario) -> Iterator[Point]:
    """Yields every load on every number of devices, in the order of the file's lists. A scenario of fleets
    has one here."""
    fleets = [sum(group.devices for group in fleet) for _, fleet in scenario.fleets_in_use]
    for devices in fleets or scenario.devices:
        for workload in single_valued(scenario.workload):
            yield Point(devices, workload)
