"""Published figures of servers to compare predictions with: a CSV, one figure a row.

    device,model,strategy,label,devices,ranks,requests,rate_per_s,prompt_tokens,output_tokens,metric,value,unit,
    role,fitted_by,source

`role` and `fitted_by` as in `simcore/studies/published.py`.
"""

from math import isclose
from typing import Annotated, ClassVar

from pydantic import AfterValidator, ConfigDict
from pydantic.dataclasses import dataclass

from simcore.input.fields import kinds_of
from simcore.input.files import Positive, unknown_name
from simcore.studies.common import Row, ServingAxes
from simcore.studies.own import is_own
from simcore.studies.published import Empty, PublishedValue, Role, Whole
from simcore.studies.serving.strategies import ServingStrategies

# Rates computed as 1 / interval differ in the last bits.
SAME = 1e-6
# The place of a figure; the same fields are in its axes.
PLACE = ("devices", "ranks", "requests", "rate_per_s", "prompt_tokens", "output_tokens")
# Metrics of published figures: latencies of requests by statistic, and figures of a run.
LATENCIES = ("ttft", "tpot", "itl", "e2e", "queue")
STATISTICS = ("mean", "p50", "p90", "p95", "p99")
RUN_METRICS = (
    *("request_throughput_per_s", "output_throughput_tokens_per_s", "total_throughput_tokens_per_s"),
    *("goodput_per_s", "slo_attainment", "slo_attainment_ttft", "slo_attainment_tpot", "slo_attainment_e2e"),
    *("duration_s", "utilisation", "mean_batch", "max_batch", "mean_queue", "max_queue"),
    *("mean_kv_share", "max_kv_share", "preemptions", "waited_for_kv", "rejected", "completed"),
    *("iterations", "overlap", "speedup", "prefix_hit_share"),
)
METRICS = (*(f"{name}_{what}_s" for name in LATENCIES for what in STATISTICS), *RUN_METRICS)


def _strategy(kind: str) -> str:
    if not is_own(kind) and kind not in kinds_of(ServingStrategies):
        raise ValueError(unknown_name("strategy", kind, kinds_of(ServingStrategies)))
    return kind


def _metric(name: str) -> str:
    if name not in METRICS:
        raise ValueError(unknown_name("metric", name, METRICS))
    return name


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class ServingPublished:
    """One figure of a server, in SI units. `rate_per_s` is the mean rate of arrivals, in requests per second;
    `prompt_tokens` and `output_tokens` are mean lengths. An empty field matches any value, and an empty
    `label` every variant of the strategy."""

    device: str
    model: str
    strategy: Annotated[str, AfterValidator(_strategy)]
    devices: Whole
    ranks: Whole
    metric: Annotated[str, AfterValidator(_metric)]
    value: PublishedValue
    role: Role
    source: str
    label: str = ""
    requests: Annotated[Whole | None, Empty] = None
    rate_per_s: Annotated[Positive | None, Empty] = None
    prompt_tokens: Annotated[Positive | None, Empty] = None
    output_tokens: Annotated[Positive | None, Empty] = None
    unit: str = ""
    fitted_by: str = ""
    columns: ClassVar = ("strategy", "label", *PLACE)

    def __str__(self) -> str:
        return f"{self.strategy}, {self.metric}, {self.source}"

    @property
    def metrics(self) -> tuple[str, ...]:
        """See Published."""
        return (self.metric,)

    def is_of(self, axes: ServingAxes) -> bool:
        """See Published."""
        if self.strategy != axes.strategy or self.label not in ("", axes.label):
            return False
        return all(_same(getattr(self, name), getattr(axes, name)) for name in PLACE)

    def beside(self, row: Row) -> dict[str, float | None]:
        """See Published."""
        return {"reference": self.value, "predicted": row.value, "low": row.low, "high": row.high}


def _same(said: float | None, here: float | None) -> bool:
    return said is None or (here is not None and isclose(said, here, rel_tol=SAME))
