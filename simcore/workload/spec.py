"""The workload of a scenario file: when requests arrive and how long they are.

    rate_per_s = 1 / interval_s           cv = standard deviation of the gaps / their mean

`simcore/workload/arrivals.py` draws the requests. A list in a field multiplies the runs (`Many`).
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from simcore.input.fields import FieldError, Many, Strict

MOST_REQUESTS = 10_000_000
MOST_LENGTH = 10_000_000
MOST_TURNS = 1000
Rate = Annotated[float, Field(ge=1e-6, le=1e6)]
Interval = Annotated[float, Field(ge=1e-6, le=1e6)]
Length = Annotated[int, Field(ge=1, le=MOST_LENGTH)]
Time = Annotated[float, Field(ge=0.0, le=1e9)]
Text = Annotated[str, Field(min_length=1)]


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
    span_intervals: Annotated[float, Field(gt=0.0, le=1e9)] | None = Field(
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
    jitter_s: float = Field(
        0.0,
        ge=0.0,
        le=1e6,
        description="recorded seconds over which requests are spread after their time, for traces in bins",
    )
    hash_block_tokens: Length = Field(512, description="tokens that a hash_id of a mooncake trace stands for")


class ClosedLoop(Strict):
    """Clients that each send their next request some time after the answer to the last."""

    kind: Literal["closed_loop"]
    clients: Many[Annotated[int, Field(ge=1, le=1_000_000)]] = Field(description="clients that send requests")
    think_s: Time = Field(0.0, description="time from an answer to the client's next request, s")


Arrivals = Annotated[
    ConstantArrivals | PoissonArrivals | GammaArrivals | TraceArrivals | ClosedLoop,
    Field(discriminator="kind"),
]


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


class Workload(Strict):
    """The requests of a run."""

    arrivals: Arrivals = Field(description="when requests come")
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

    @model_validator(mode="after")
    def _complete(self) -> "Workload":
        if not isinstance(self.arrivals, TraceArrivals):
            for name in ("requests", "prompt_tokens", "output_tokens"):
                if getattr(self, name) is None:
                    raise FieldError(name, "is missing; only a recorded trace has its own")
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
        if self.distinct_prompts is not None:
            raise FieldError("distinct_prompts", "is given beside sessions; only one of them is allowed")
        return self
