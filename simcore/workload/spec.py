"""The workload of a scenario file: when requests arrive and how long they are.

    rate_per_s = 1 / interval_s           cv = standard deviation of the gaps / their mean

`simcore/workload/arrivals.py` draws the requests. A list in a field multiplies the runs (`Many`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from simcore.input.fields import FieldError, Many, Strict
from simcore.input.files import shown
from simcore.workload.clocks import checked as clock_checked

MOST_REQUESTS = 10_000_000
MOST_LENGTH = 10_000_000
MOST_TURNS = 1000
MOST_TENANTS = 100
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
Interval = Annotated[float, Field(ge=1e-6, le=1e6)]
Length = Annotated[int, Field(ge=1, le=MOST_LENGTH)]
Time = Annotated[float, Field(ge=0.0, le=1e9)]
Text = Annotated[str, Field(min_length=1)]
Target = Annotated[float, Field(gt=0.0, le=1e6)]
# A time of day, or a date and a time of day.
Clock = Annotated[str, AfterValidator(clock_checked)]
# How far the sum of shares may be from 1 by rounding.
ROUNDING = 1e-6


class _Paced(Strict):
    """Arrivals at a mean rate, given as a rate or as an interval."""

    rate_per_s: Many[Rate] | None = Field(None, description="mean rate of requests (or of sessions), 1/s")
    interval_s: Many[Interval] | None = Field(
        None, description="mean time between two, s, in place of the rate"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> "_Paced":
        if self.rate_per_s is None and self.interval_s is None:
            raise FieldError("rate_per_s", "is missing; either rate_per_s or interval_s is needed")
        if self.rate_per_s is not None and self.interval_s is not None:
            raise FieldError("interval_s", "is given beside rate_per_s; only one of them is allowed")
        return self

    @property
    def rates(self) -> list[float]:
        """Requests per second, one for each run."""
        return self.rate_per_s or [1.0 / seconds for seconds in self.interval_s or []]


class ConstantArrivals(_Paced):
    """One request every 1/rate seconds, the first at once."""

    kind: Literal["constant"]


class PoissonArrivals(_Paced):
    """Exponential gaps, the first request at once."""

    kind: Literal["poisson"]
    span_intervals: Annotated[float, Field(ge=1e-9, le=1e9)] | None = Field(
        None, description="mean intervals after which the last request comes; by default that is drawn too"
    )


class GammaArrivals(_Paced):
    """Gamma-distributed gaps with a coefficient of variation: 1 is Poisson, above 1 is bursty."""

    kind: Literal["gamma"]
    cv: float = Field(ge=0.01, le=100.0, description="standard deviation of the gaps / their mean")


class TraceArrivals(Strict):
    """Requests as recorded, with their lengths."""

    kind: Literal["trace"]
    path: Text = Field(description="path to the trace, from the folder of the scenario or the current one")
    format: Literal["azure", "mooncake", "vllm", "table"] = Field(
        description="azure: CSV; mooncake: JSONL; vllm: JSON of `vllm bench serve --save-detailed`;"
        " table: any CSV or Parquet, with columns"
    )
    columns: dict[Literal["arrival", "prompt", "output"], Text] = Field(
        {}, description="of a table: the columns of arrival times, prompt tokens and output tokens"
    )
    time_unit: Literal["s", "ms", "us", "ns", "datetime"] = Field(
        "s", description="of a table: what arrivals count in; datetime: they are timestamps"
    )
    rate_scale: Many[Annotated[float, Field(ge=1e-6, le=1e6)]] = Field(
        [1.0], description="how many times as fast as recorded requests come"
    )
    start_s: Time = Field(0.0, description="begin of the window of recorded time that is replayed, s")
    end_s: Time | None = Field(None, description="end of that window, s; by default that of the trace")
    start_clock: Clock | None = Field(
        None,
        description="begin of the window by the clock of a trace with dates, in place of start_s: the first"
        ' "18:20" (or "18:20:30") in it, or "2023-11-16 18:20"',
    )
    end_clock: Clock | None = Field(
        None, description="end of the window likewise, in place of end_s: the first after its begin"
    )
    jitter_s: float = Field(
        0.0,
        ge=0.0,
        le=1e6,
        description="recorded seconds over which requests are spread after their time, for traces in bins",
    )
    hash_block_tokens: Length = Field(512, description="tokens that a hash_id of a mooncake trace stands for")

    @model_validator(mode="after")
    def _one_window(self) -> "TraceArrivals":
        for clock, seconds, given in (
            ("start_clock", "start_s", self.start_s > 0.0),
            ("end_clock", "end_s", self.end_s is not None),
        ):
            if getattr(self, clock) is not None and given:
                raise FieldError(clock, f"is given beside {seconds}; only one of them is allowed")
        return self


class ClosedLoop(Strict):
    """Clients that each send their next request some time after the answer to the last."""

    kind: Literal["closed_loop"]
    clients: Many[Annotated[int, Field(ge=1, le=1_000_000)]] = Field(description="clients that send requests")
    think_s: Time = Field(0.0, description="time from an answer to the client's next request, s")


class OfTenants(Strict):
    """Each tenant has arrivals of its own; they are merged in order of time."""

    kind: Literal["of_tenants"]


Arrivals = Annotated[
    ConstantArrivals | PoissonArrivals | GammaArrivals | TraceArrivals | ClosedLoop | OfTenants,
    Field(discriminator="kind"),
]
OwnArrivals = ConstantArrivals | PoissonArrivals | GammaArrivals | TraceArrivals


class ConstantLength(Strict):
    """Always the same number of tokens."""

    kind: Literal["constant"]
    value: Many[Length] = Field(description="tokens (of turns: how many)")


class UniformLength(Strict):
    """Whole numbers in a range, equally likely."""

    kind: Literal["uniform"]
    low: Length = Field(description="least length, included")
    high: Many[Length] = Field(description="greatest length, included")

    @model_validator(mode="after")
    def _ordered(self) -> "UniformLength":
        if min(self.high) < self.low:
            raise FieldError("high", f"is {min(self.high)}; at least low, which is {self.low}, is needed")
        return self


class LognormalLength(Strict):
    """Lognormal, rounded, at least 1."""

    kind: Literal["lognormal"]
    mean: float = Field(ge=1.0, le=MOST_LENGTH, description="mean length, before it is rounded and cut")
    cv: float = Field(gt=0.0, le=100.0, description="standard deviation / mean")
    max: Length = Field(description="greatest length: longer ones are cut to it")

    @model_validator(mode="after")
    def _ordered(self) -> "LognormalLength":
        if self.max < self.mean:
            raise FieldError("max", f"is {self.max}; at least mean, which is {self.mean:g}, is needed")
        return self


class EmpiricalLength(Strict):
    """Drawn with replacement from values, or from a column of a CSV or Parquet file."""

    kind: Literal["empirical"]
    values: Annotated[list[Length], Field(min_length=1)] | None = Field(
        None, description="lengths that are drawn from"
    )
    path: Text | None = Field(None, description="a CSV or Parquet file in the place of values")
    column: Text | None = Field(None, description="column of that file")

    @model_validator(mode="after")
    def _one_source(self) -> "EmpiricalLength":
        if self.values is None:
            for name in ("path", "column"):
                if getattr(self, name) is None:
                    raise FieldError(name, "is missing; either values, or path and column are needed")
            return self
        for name in ("path", "column"):
            if getattr(self, name) is not None:
                raise FieldError(name, "is given beside values; only one of them is allowed")
        return self


Lengths = Annotated[
    ConstantLength | UniformLength | LognormalLength | EmpiricalLength, Field(discriminator="kind")
]


class Sessions(Strict):
    """Conversations: a turn's prompt is the prompt before it, its answer, and `prompt_tokens` new tokens.
    `arrivals` say when sessions begin; their rate is the rate of sessions."""

    turns: Lengths = Field(description="requests of a session")
    max_context_tokens: Length = Field(
        description="a session ends before the turn whose prompt and max_tokens of answer would be more"
    )
    think_s: Time = Field(0.0, description="time from an answer to the next turn, s")
    shared_prefix_tokens: int = Field(
        0, ge=0, le=MOST_LENGTH, description="tokens that all sessions begin with, such as a system prompt"
    )


class Slo(Strict):
    """What a request is promised, in seconds; by default nothing."""

    ttft_s: Target | None = Field(default=None, description="longest time to its first token, s")
    tpot_s: Target | None = Field(
        default=None, description="longest time per output token after the first, s"
    )
    e2e_s: Target | None = Field(default=None, description="longest time to its last token, s")


def _tenant_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}", name):
        needed = "up to 40 letters, digits, '_' and '-' are allowed, a letter or digit first"
        raise ValueError(f"is {shown(name)}; {needed}")
    return name


class Tenant(Strict):
    """Whose requests some of a workload's are. What a tenant leaves out is as in the workload."""

    name: Annotated[str, AfterValidator(_tenant_name)] = Field(
        description="what results call it: tenant.NAME.ttft_p99_s"
    )
    share: Annotated[float, Field(gt=0.0, le=1.0)] | None = Field(
        None,
        description="share of the requests that workload.arrivals bring; one tenant may leave it out, and"
        " has the rest",
    )
    arrivals: Annotated[OwnArrivals, Field(discriminator="kind")] | None = Field(
        None, description="arrivals of its own, in place of a share"
    )
    prompt_tokens: Lengths | None = Field(
        None, description="lengths of its prompts, by default the workload's or a trace's"
    )
    output_tokens: Lengths | None = Field(
        None, description="lengths of its answers, by default the workload's or a trace's"
    )
    max_tokens: Length | None = Field(
        None, description="as workload.max_tokens, which it is by default, of its answers"
    )
    slo: Slo | None = Field(None, description="what its requests are promised, by default the scenario's slo")


_ONLY_RECORDED = "is missing; only a recorded trace has its own"


class Workload(Strict):
    """The requests of a run."""

    arrivals: Arrivals = Field(
        OfTenants(kind="of_tenants"),
        description="when requests come; left out where each tenant has arrivals of its own",
    )
    requests: Many[Annotated[int, Field(ge=1, le=MOST_REQUESTS)]] | None = Field(
        None,
        description="how many come; of a trace the first ones, by default all; of sessions the turns of all"
        " together, of which the last session may be cut short",
    )
    prompt_tokens: Lengths | None = Field(
        None, description="lengths of prompts, by default a trace's own; of sessions what each turn adds"
    )
    output_tokens: Lengths | None = Field(None, description="lengths of answers, by default a trace's own")
    max_tokens: Length | None = Field(
        None,
        description="tokens that a server reserves for an answer of unknown length; longer ones are cut;"
        " by default the longest that the workload can ask for",
    )
    distinct_prompts: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = Field(
        None,
        description="request i has the prompt of request i modulo so many; by default all differ, but for"
        " what hash_ids of a mooncake trace say",
    )
    sessions: Sessions | None = Field(None, description="requests are turns of conversations; by default not")

    tenants: Annotated[list[Tenant], Field(max_length=MOST_TENANTS)] = Field(
        [],
        description="whose requests they are; each tenant may have lengths, an SLO and arrivals of its own",
    )

    @model_validator(mode="after")
    def _complete(self) -> "Workload":
        if isinstance(self.arrivals, OfTenants) and not self.tenants:
            raise FieldError("arrivals", "is missing; when requests come has to be said")
        if self.requests is None and not self.traces:
            raise FieldError("requests", _ONLY_RECORDED)
        for one in self.processes:
            for name in ("prompt_tokens", "output_tokens"):
                if isinstance(one.arrivals, TraceArrivals) or getattr(self, name) is not None:
                    continue
                lacking = [place for place in one.tenants if getattr(self.tenants[place], name) is None]
                if lacking or not one.tenants:
                    where = f"tenants[{lacking[0]}].{name}" if lacking else name
                    raise FieldError(where, _ONLY_RECORDED)
        return self

    @model_validator(mode="after")
    def _sessions_alone(self) -> "Workload":
        if self.sessions is None:
            return self
        if isinstance(self.arrivals, TraceArrivals | ClosedLoop):
            kind = self.arrivals.kind
            raise FieldError(
                "sessions", f"begin by arrivals of kind constant, poisson or gamma, and these are {kind}"
            )
        for name in ("distinct_prompts", "tenants"):
            if getattr(self, name):
                raise FieldError(name, f"{_is(name)} given beside sessions; only one of them is allowed")
        return self

    @model_validator(mode="after")
    def _of_tenants(self) -> "Workload":
        if self.tenants:
            _check_tenants(self)
            _check_merged(self)
        return self

    @property
    def processes(self) -> "list[Process]":
        """What brings requests: the workload's arrivals, then those of tenants with arrivals of their own."""
        own = [
            Process(one.arrivals, (place,))
            for place, one in enumerate(self.tenants)
            if one.arrivals is not None
        ]
        sharing = tuple(place for place, one in enumerate(self.tenants) if one.arrivals is None)
        return own if isinstance(self.arrivals, OfTenants) else [Process(self.arrivals, sharing), *own]

    @property
    def traces(self) -> list[TraceArrivals]:
        """The recorded arrivals, of the workload and of tenants."""
        return [one.arrivals for one in self.processes if isinstance(one.arrivals, TraceArrivals)]


@dataclass(frozen=True, slots=True)
class Process:
    """Arrivals, and the places of the tenants whose requests they bring; none of a workload without."""

    arrivals: ConstantArrivals | PoissonArrivals | GammaArrivals | TraceArrivals | ClosedLoop
    tenants: tuple[int, ...]


def shares(workload: Workload, tenants: Sequence[int]) -> list[float]:
    """Returns the shares of tenants that share the workload's arrivals, by their places."""
    given = [workload.tenants[place].share for place in tenants]
    rest = 1.0 - sum(share for share in given if share is not None)
    return [rest if share is None else share for share in given]


def _is(name: str) -> str:
    return "are" if name.endswith("s") else "is"


def _check_tenants(workload: Workload) -> None:
    """Raises FieldError if tenants have the same name, or shares that make no whole."""
    tenants, base = workload.tenants, not isinstance(workload.arrivals, OfTenants)
    names = [one.name for one in tenants]
    for place, one in enumerate(tenants):
        if one.name in names[:place]:
            raise FieldError(f"tenants[{place}].name", f"is {one.name!r}, as that of a tenant before it")
        if one.arrivals is not None and one.share is not None:
            raise FieldError(
                f"tenants[{place}].share", "is given beside arrivals; only one of them is allowed"
            )
        if one.arrivals is None and not base:
            needed = "is missing; arrivals of the workload or of this tenant are needed"
            raise FieldError(f"tenants[{place}].arrivals", needed)
    sharing = [place for place, one in enumerate(tenants) if one.arrivals is None]
    if not base:
        return
    if not sharing:
        raise FieldError("arrivals", "are given, but each tenant has arrivals of its own; leave one out")
    silent = [place for place in sharing if tenants[place].share is None]
    given = sum(tenants[place].share or 0.0 for place in sharing)
    if len(silent) > 1:
        raise FieldError(f"tenants[{silent[1]}].share", "is missing; only one tenant may have the rest")
    if silent and given >= 1.0 - ROUNDING:
        raise FieldError(
            f"tenants[{silent[0]}].share",
            f"is missing, and the others have {given:g}: nothing is left for it",
        )
    if not silent and abs(given - 1.0) > ROUNDING:
        raise FieldError("tenants", f"have shares that sum to {given:g}; 1 is needed")


def _check_merged(workload: Workload) -> None:
    """Raises FieldError if the processes of a workload with tenants cannot be merged."""
    if workload.distinct_prompts is not None:
        raise FieldError("distinct_prompts", "is given beside tenants; only one of them is allowed")
    processes = workload.processes
    if len(processes) == 1:
        return
    for one in processes:
        where = f"tenants[{one.tenants[0]}].arrivals" if one is not processes[0] else "arrivals"
        if isinstance(one.arrivals, ClosedLoop):
            raise FieldError(where, "are a closed_loop, which is not merged with the arrivals of tenants")
        if isinstance(one.arrivals, PoissonArrivals) and one.arrivals.span_intervals is not None:
            raise FieldError(f"{where}.span_intervals", "is given, and these arrivals are merged with others")
    if len({one.hash_block_tokens for one in workload.traces}) > 1:
        raise FieldError("tenants", "have traces of different hash_block_tokens; one number is needed")
