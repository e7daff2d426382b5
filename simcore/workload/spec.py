"""What comes to a server: when requests arrive and how long they are, as a scenario file says it.

    rate_per_s = 1 / interval_s           cv = standard deviation of the gaps / their mean

`simcore/workload/arrivals.py` draws from it. A list in a field multiplies the runs (`Many`).
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

    rate_per_s: Many[Rate] | None = None
    interval_s: Many[Interval] | None = None

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
    """Exponential gaps, the first request at once. `span_intervals`: given that the last request comes after
    so many mean intervals (a Poisson process on that condition), to repeat a draw of known length."""

    kind: Literal["poisson"]
    span_intervals: Annotated[float, Field(gt=0.0, le=1e9)] | None = None


class GammaArrivals(_Paced):
    """Gamma-distributed gaps with a coefficient of variation: 1 is Poisson, above 1 is bursty."""

    kind: Literal["gamma"]
    cv: Annotated[float, Field(ge=0.01, le=100.0)]


class TraceArrivals(Strict):
    """Requests as recorded, with their lengths. `format`: azure (CSV), mooncake (JSONL), vllm (the JSON of
    `vllm bench serve --save-detailed`), table (CSV or Parquet; `columns` name arrival, prompt and output;
    `time_unit` says what arrival counts in, `datetime` for timestamps). `rate_scale` 2 makes time run
    twice as fast; `start_s`, `end_s` are a window of the recorded time, before scaling; `jitter_s` spreads
    requests evenly over so many recorded seconds after their time, for traces that are recorded in bins.
    `hash_block_tokens`: tokens of a block that a hash_id of a mooncake trace stands for."""

    kind: Literal["trace"]
    path: Text
    format: Literal["azure", "mooncake", "vllm", "table"]
    columns: dict[Literal["arrival", "prompt", "output"], Text] = {}
    time_unit: Literal["s", "ms", "us", "ns", "datetime"] = "s"
    rate_scale: Many[Annotated[float, Field(ge=1e-6, le=1e6)]] = [1.0]
    start_s: Time = 0.0
    end_s: Time | None = None
    jitter_s: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    hash_block_tokens: Length = 512


class ClosedLoop(Strict):
    """`clients` that each send their next request `think_s` after the answer to the last."""

    kind: Literal["closed_loop"]
    clients: Many[Annotated[int, Field(ge=1, le=1_000_000)]]
    think_s: Time = 0.0


Arrivals = Annotated[
    ConstantArrivals | PoissonArrivals | GammaArrivals | TraceArrivals | ClosedLoop,
    Field(discriminator="kind"),
]


class ConstantLength(Strict):
    """Always the same number of tokens."""

    kind: Literal["constant"]
    value: Many[Length]


class UniformLength(Strict):
    """Whole numbers from `low` to `high`, both included, equally likely."""

    kind: Literal["uniform"]
    low: Length
    high: Many[Length]

    @model_validator(mode="after")
    def _ordered(self) -> "UniformLength":
        if min(self.high) < self.low:
            raise FieldError("high", f"is {min(self.high)}; at least low, which is {self.low}, is needed")
        return self


class LognormalLength(Strict):
    """Lognormal with this mean and coefficient of variation, rounded, at least 1, at most `max`."""

    kind: Literal["lognormal"]
    mean: Annotated[float, Field(ge=1.0, le=MOST_LENGTH)]
    cv: Annotated[float, Field(gt=0.0, le=100.0)]
    max: Length

    @model_validator(mode="after")
    def _ordered(self) -> "LognormalLength":
        if self.max < self.mean:
            raise FieldError("max", f"is {self.max}; at least mean, which is {self.mean:g}, is needed")
        return self


class EmpiricalLength(Strict):
    """Drawn with replacement from `values`, or from a column of a CSV or Parquet file."""

    kind: Literal["empirical"]
    values: Annotated[list[Length], Field(min_length=1)] | None = None
    path: Text | None = None
    column: Text | None = None

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
    """Conversations. Each has `turns` requests: a turn's prompt is the one before it, its answer, and
    `prompt_tokens` new ones; it comes `think_s` after that answer. All begin with the same
    `shared_prefix_tokens` (a system prompt). A session ends before the turn whose prompt and `max_tokens`
    of answer would be more than `max_context_tokens`. Sessions begin as `arrivals` say, whose rate is
    theirs; `requests` counts turns, of all sessions together, the last of which may be cut short."""

    turns: Lengths
    max_context_tokens: Length
    think_s: Time = 0.0
    shared_prefix_tokens: Annotated[int, Field(ge=0, le=MOST_LENGTH)] = 0


class Workload(Strict):
    """The requests of a run. Lengths are left out where a trace has them. `max_tokens`: what a server
    must reserve for an answer of unknown length (default: the longest that the workload can ask for); longer
    answers are cut there. Of a trace the first `requests` come; lengths that are given replace its own.
    `distinct_prompts`: request i has the prompt of request i modulo so many (by default all differ, but for
    what the hash_ids of a mooncake trace say). `sessions`: requests are turns of conversations, and
    `prompt_tokens` what each turn adds."""

    arrivals: Arrivals
    requests: Many[Annotated[int, Field(ge=1, le=MOST_REQUESTS)]] | None = None
    prompt_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    max_tokens: Length | None = None
    distinct_prompts: Annotated[int, Field(ge=1, le=MOST_REQUESTS)] | None = None
    sessions: Sessions | None = None

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
