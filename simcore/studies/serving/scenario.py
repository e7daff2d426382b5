"""Scenarios of the study `serving`: arriving requests, strategies, SLOs.

servers of a strategy = devices // ranks
runs = devices * workloads * sum over strategies of their variants * rules of autoscaling * replicas
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, count, single_valued
from simcore.studies.fields import Common
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
Devices = Annotated[int, Field(ge=1, le=1024)]


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


class ServingScenario(Common):
    """Study `serving`: latency and throughput of requests, by strategy, load and number of devices."""

    study: Literal["serving"]
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

    @model_validator(mode="after")
    def _consistent(self) -> "ServingScenario":
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
    """One load on one number of devices: a workload in which every list has one value."""

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
    """Yields every load on every number of devices, in the order of the file's lists."""
    for devices in scenario.devices:
        for workload in single_valued(scenario.workload):
            yield Point(devices, workload)
