"""What a user asks of the study `serving`: requests that come, ways of serving them, what they promise.

servers of a strategy = devices // ranks
runs = devices * workloads * sum over strategies of their variants * replicas
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from simcore.input.fields import MOST_RUNS, FieldError, Many, Strict, count, single_valued
from simcore.studies.fields import Common, Ranks
from simcore.workload.spec import ClosedLoop, ConstantLength, TraceArrivals, Workload

# Requests of all runs of a scenario together: beyond them a number was mistaken.
MOST_REQUESTS_IN_ALL = 1_000_000_000
Places = Annotated[int, Field(ge=1, le=65_536)]
Devices = Annotated[int, Field(ge=1, le=1024)]
Target = Annotated[float, Field(gt=0.0, le=1e6)]
MemoryShare = Annotated[float, Field(gt=0.0, le=1.0)]
Taken = Annotated[float, Field(ge=0.0, le=1e18)]


class TemporalFusion(Strict):
    """Requests join a running batch at the next iteration, in one of `slots` places (Flover). `shuffle`:
    those that run are kept together, so that no finished one is computed on."""

    kind: Literal["temporal_fusion"]
    slots: Many[Places] = [32]
    shuffle: Many[bool] = [True]
    ranks: Many[Ranks] = [1]


class DynamicBatching(Strict):
    """Requests wait until `max_batch` are there or the first has waited `window_s`; a batch ends together."""

    kind: Literal["dynamic_batching"]
    window_s: Many[Annotated[float, Field(ge=0.0, le=1e6)]]
    max_batch: Many[Places] = [32]
    ranks: Many[Ranks] = [1]


class ConcurrentInstances(Strict):
    """Each request runs by itself, up to `max_instances` at a time on one server."""

    kind: Literal["concurrent_instances"]
    max_instances: Many[Places] = [32]
    ranks: Many[Ranks] = [1]


class IterationBatching(Strict):
    """Requests join a running batch between iterations, up to `max_batch`; for answers of one length."""

    kind: Literal["iteration_batching"]
    max_batch: Many[Places] = [32]
    ranks: Many[Ranks] = [1]


class KvMemory(Strict):
    """What of a device a server may fill with KV (formulas in kv_memory.py). `share_of`: the
    share is of all its memory (`total`, vLLM), of what is free before the model is there (`free`, SGLang) or
    of what the model leaves (`rest`, TensorRT-LLM). `driver_bytes`: held before the engine looks what is
    free; `reserve_bytes`: taken by libraries while it runs; both with `group_` for ranks of a group. `peak`:
    activations of the largest step (`widest_step`), of the run that vLLM profiles (`profile_run`) or `none`.
    `splits_embedding`: ranks hold a part of it each, not all of it."""

    share: MemoryShare = 0.9
    share_of: Literal["total", "free", "rest"] = "total"
    driver_bytes: Taken = 0.0
    group_driver_bytes: Taken = 0.0
    reserve_bytes: Taken = 0.0
    group_reserve_bytes: Taken = 0.0
    peak: Literal["widest_step", "profile_run", "none"] = "widest_step"
    splits_embedding: bool = False


class ContinuousBatching(Strict):
    """Each step takes up to `token_budget` tokens, of prompts in chunks and of answers, for at most
    `max_sequences` requests, whose KV cache is kept in blocks of `block_tokens`. `order`: who is next.
    `prefill`: prompts in chunks beside answers (`chunked`, as vLLM), not cut (`whole`, as TensorRT-LLM), or
    in steps of their own (`first`, as SGLang). New prompts wait up to `wait_steps` steps for others, unless a
    step with them has `wait_tokens` tokens. `ahead`: so many steps are decided while one runs, as engines do
    that overlap their host's work with the device's. `prefix_caching`: what a prompt begins with is not
    computed again where its blocks are known from before (`sessions`, `distinct_prompts`, hash_ids).
    `engine`: whose defaults (engines/catalog) stand for the fields that are not given; `memory`: what
    its KV cache may take."""

    kind: Literal["continuous_batching"]
    engine: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    token_budget: Many[Annotated[int, Field(ge=1, le=10_000_000)]] = [2048]
    max_sequences: Many[Places] = [256]
    block_tokens: Annotated[int, Field(ge=1, le=65_536)] = 16
    order: Many[Literal["fcfs", "shortest_first"]] = ["fcfs"]
    prefill: Many[Literal["chunked", "whole", "first"]] = ["chunked"]
    wait_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    wait_tokens: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    ahead: Annotated[int, Field(ge=0, le=1000)] = 0
    prefix_caching: bool = False
    memory: KvMemory = KvMemory()
    ranks: Many[Ranks] = [1]

    @model_serializer(mode="wrap")
    def _as_said(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # What is not said is the engine's, which depends on the device: a default in its place would be said.
        found: dict[str, Any] = whole(self)
        said = found if self.engine is None else self.model_fields_set
        return {name: value for name, value in found.items() if name in said}

    @model_validator(mode="after")
    def _waits_for_tokens(self) -> "ContinuousBatching":
        if self.wait_steps and not self.wait_tokens:
            raise FieldError("wait_tokens", "is 0, which no prompt waits for; wait_steps wants 1 or more")
        if self.wait_tokens and not self.wait_steps:
            raise FieldError("wait_steps", "is 0, so that no prompt waits; wait_tokens wants 1 or more")
        return self


ServingStrategy = (
    TemporalFusion | DynamicBatching | ConcurrentInstances | IterationBatching | ContinuousBatching
)


class Slo(Strict):
    """What a request is promised, in seconds: until its first token, for each further one, in all."""

    ttft_s: Target | None = None
    tpot_s: Target | None = None
    e2e_s: Target | None = None


class SharedMemory(Strict):
    """Graphs that run at once share memory and arithmetic fairly. `reuse_s`: an instance that reads its
    weights a gap g after another spares exp(-g / reuse_s) of that traffic; 0 spares nothing."""

    kind: Literal["shared_memory"]
    reuse_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0


class Throughput(Strict):
    """n graphs at once do 1 + gain (n - 1) times what one does."""

    kind: Literal["throughput"]
    gain: Annotated[float, Field(ge=0.0, le=1.0)]


class NoContention(Strict):
    """Every graph runs as if it were alone."""

    kind: Literal["none"]


Contention = SharedMemory | Throughput | NoContention


class SteadyState(Strict):
    """Figures are of the requests that come once the first `warmup_share` of them (of a closed loop, at least
    one of each client) have been answered, and until the last one comes; see window.py."""

    kind: Literal["steady_state"]
    warmup_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.1


class WholeRun(Strict):
    """Figures are of all requests, from the first arrival to the last answer, as benchmarks have them."""

    kind: Literal["whole_run"]


Measure = SteadyState | WholeRun


class ServingScenario(Common):
    """Study `serving`: latency and throughput of requests, by strategy, load and number of devices."""

    study: Literal["serving"]
    workload: Workload
    strategies: Annotated[
        list[Annotated[ServingStrategy, Field(discriminator="kind")]], Field(min_length=1, max_length=1000)
    ]
    devices: Many[Devices] = [1]
    routing: Literal["round_robin", "least_loaded", "prefix_aware"] = "least_loaded"
    kv_blocks: Annotated[int, Field(ge=1, le=2**40)] | None = Field(
        None, description="KV blocks (or slots) of a server, in place of the memory that the model leaves"
    )
    memory_share: MemoryShare | None = Field(
        None,
        description="of the device's memory, that weights, activations and KV may take;"
        " by default a strategy's own (its engine's), 0.9 where it has none",
    )
    price_interval: bool | None = Field(
        None,
        description="whether to run the first replica at both ends of the prices' intervals too;"
        " by default, where it has at most 5000 requests",
    )
    contention: Annotated[Contention, Field(discriminator="kind")] = SharedMemory(kind="shared_memory")
    measure: Annotated[Measure, Field(discriminator="kind")] = SteadyState(kind="steady_state")
    slo: Slo = Slo()

    @model_validator(mode="after")
    def _consistent(self) -> "ServingScenario":
        for place, strategy in enumerate(self.strategies):
            _check_ranks(place, strategy, self.devices)
            if isinstance(strategy, IterationBatching):
                _check_one_length(place, self.workload)
        _check_amount(self)
        check_distinct(self)
        return self


def _check_ranks(place: int, strategy: ServingStrategy, devices: list[int]) -> None:
    for ranks in strategy.ranks:
        for of in devices:
            if of % ranks:
                raise FieldError(
                    f"strategies[{place}].ranks",
                    f"is {ranks}; it must divide every value of devices, and {of} is no multiple of it",
                )


def _check_one_length(place: int, workload: Workload) -> None:
    if isinstance(workload.arrivals, TraceArrivals):
        found = "workload.arrivals is a trace"
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
    """Raises FieldError where the lists multiply into more than anybody waits for."""
    work = scenario.workload
    variants = sum(map(count, scenario.strategies))
    runs = len(scenario.devices) * count(work) * variants * scenario.replicas
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


def check_distinct(scenario: ServingScenario) -> None:
    """Raises FieldError where two strategies have a variant in common: it would be counted twice."""
    seen: dict[tuple[str, ...], int] = {}
    for place, strategy in enumerate(scenario.strategies):
        # Where an engine is named, a default is not the value that the field will have.
        given = sorted(strategy.model_fields_set) if getattr(strategy, "engine", None) else []
        for variant in serving_variants(strategy):
            first = seen.setdefault((repr(variant), *given), place)
            if first != place:
                raise FieldError(
                    f"strategies[{place}]",
                    f"is given twice: strategies[{first}] has the same {strategy.kind}",
                )


# -- what the lists multiply into --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Point:
    """One load on one number of devices: a workload in which every list has one value."""

    devices: int
    workload: Workload

    @property
    def requests(self) -> int | None:
        """How many requests come; None where all of a trace do."""
        return self.workload.requests[0] if self.workload.requests else None

    @property
    def rate_per_s(self) -> float | None:
        """The mean rate that was asked for; None for traces and closed loops."""
        arrivals = self.workload.arrivals
        return None if isinstance(arrivals, TraceArrivals | ClosedLoop) else arrivals.rates[0]

    @property
    def rate_scale(self) -> float:
        """How many times as fast as recorded a trace is replayed; 1 for anything else."""
        arrivals = self.workload.arrivals
        return arrivals.rate_scale[0] if isinstance(arrivals, TraceArrivals) else 1.0

    @property
    def clients(self) -> int | None:
        """How many clients a closed loop has; None for anything else."""
        arrivals = self.workload.arrivals
        return arrivals.clients[0] if isinstance(arrivals, ClosedLoop) else None


def points(scenario: ServingScenario) -> Iterator[Point]:
    """Every load on every number of devices, in the order of the file's lists."""
    for devices in scenario.devices:
        for workload in single_valued(scenario.workload):
            yield Point(devices, workload)


def serving_variants(strategy: ServingStrategy) -> Iterator[ServingStrategy]:
    """Copies of a strategy in which every list has one value, the last field varying fastest."""
    yield from single_valued(strategy)
