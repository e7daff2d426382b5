"""Runs cases of a decode scenario on one device.

result of a case = sum over its draws of weight * what the run gave, per token
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

from simcore import laws, metrics
from simcore.machine import Machine, Overheads, Program
from simcore.models import GROUP, TENSOR, Decoder, DecoderConfig, Dtypes, Style
from simcore.ops import Pricer, Roofline
from simcore.scenario import DecodeScenario
from simcore.schedules.alspec import alspec
from simcore.schedules.alspec_pipelined import alspec_pipelined
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.sim import Simulation
from simcore.speculation import HitPattern
from simcore.study import Axes
from simcore.trace import Trace


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a study has to know of the device, put together where the scenario is resolved.

    `price(ranks, link_latency_s)`: prices at a tensor-parallel rank count, and at another start-up
    latency of the link if one is given. `link_latency_s`: the link's own, None where collectives are
    priced by a profile. `max_devices`: how many the link connects. `usable(ranks)`: why
    the device's profile cannot serve so many ranks, or None. `chunk`: tokens of the first and of the
    last part that a speculative attention attends over early.
    """

    name: str
    price: Callable[[int, float | None], Pricer]
    roofline: Roofline
    overheads: Overheads
    memory_bytes: float
    max_devices: int
    link_latency_s: float | None
    style: Callable[[int], Style]
    usable: Callable[[int], str | None]
    dtypes: Dtypes
    chunk: int
    parts: bool


@dataclass(frozen=True, slots=True)
class HitRow:
    """A line of ALSpec's Tables 1 and 2: what a threshold does to a task."""

    task: str
    threshold: float
    hit_rate: float
    score: float
    baseline_score: float


@dataclass(frozen=True, slots=True)
class Hits:
    """One value of a strategy's hits: its mean rate, and the runs to take, each with its weight."""

    rate: float
    draws: tuple[tuple[float, HitPattern], ...]
    random: bool
    text: str
    published: HitRow | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the study; its axes name a context."""

    axes: Axes
    hits: Hits | None
    chunk: int
    overlap: bool = True
    link_latency_s: float | None = None

    @property
    def context(self) -> int:
        """Cached tokens when the first token is decoded."""
        assert self.axes.context_tokens is not None
        return self.axes.context_tokens


@dataclass(frozen=True, slots=True)
class Result:
    """What the runs of a case gave, averaged by weight. Seconds per token."""

    latency_s: float
    low_s: float
    high_s: float
    interval: str
    by_kind: Mapping[str, float]
    attention_s: float
    outside_s: float
    price_shares: Mapping[str, float]
    tokens: tuple[metrics.Token, ...]


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and remembers what they gave."""

    scenario: DecodeScenario
    config: DecoderConfig
    hardware: Hardware
    results: dict[Case, Result] = field(default_factory=dict)

    def model(self, case: Case) -> Decoder:
        """The model, sharded as a case needs it."""
        ranks = case.axes.ranks
        return Decoder(
            self.config,
            ranks=ranks,
            batch=case.axes.batch,
            dtypes=self.hardware.dtypes,
            style=self.hardware.style(ranks),
            chunk=case.chunk,
            parts=self.hardware.parts,
        )

    def program(self, case: Case) -> Callable[[Machine], Program]:
        """The schedule of a case, ready to be run on any machine."""
        model, axes = self.model(case), case.axes
        arguments: dict[str, Any] = {"tokens": self.scenario.tokens, "context": case.context}
        if axes.strategy == "tensor_parallel":
            return lambda m: tensor_parallel(m, model, **arguments)
        if axes.strategy == "alspec":
            return lambda m: alspec(m, model, overlap_last_layer=case.overlap, **arguments)
        return lambda m: alspec_pipelined(m, model, **arguments)

    def run(self, case: Case) -> Result:
        """The result of a case, simulated once."""
        if case not in self.results:
            draws = case.hits.draws if case.hits else ((1.0, no_hits),)
            self.results[case] = _average([(w, *self._simulate(case, p)) for w, p in draws], case)
        return self.results[case]

    def repeatable(self, case: Case) -> bool:
        """Law 8 on one case: simulated again, it leaves the same bytes."""
        return laws.repeatable(lambda: self.trace(case))

    def trace(self, case: Case) -> Trace:
        """What a case leaves behind, at its last draw. Simulated anew: hundreds of traces are not kept."""
        pattern = case.hits.draws[-1][1] if case.hits else no_hits
        return self._simulate(case, pattern)[0]

    def _simulate(self, case: Case, pattern: HitPattern) -> tuple[Trace, list[metrics.Token]]:
        simulation = Simulation(
            self.hardware.price(case.axes.ranks, case.link_latency_s),
            mesh=mesh_of(case.axes),
            roofline=self.hardware.roofline,
            overheads=self.hardware.overheads,
            outcomes={"hit": pattern},
        )
        trace = simulation.run(self.program(case))
        laws.enforce(trace)
        return trace, metrics.tokens(trace)


def mesh_of(axes: Axes) -> dict[str, int]:
    """How the ranks of a strategy are laid out."""
    if axes.strategy == "tensor_parallel":
        return {TENSOR: axes.ranks}
    return {GROUP: axes.groups, TENSOR: axes.ranks}


def no_hits(token: int, layer: int) -> bool:
    """The hits of a strategy that does not speculate."""
    del token, layer
    return False


def _student_t(freedom: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    # A third of the time that `--help` takes would be the import of SciPy, which only this needs.
    from scipy.special import stdtrit  # noqa: PLC0415

    return float(stdtrit(freedom, 0.975))


def _average(runs: Sequence[tuple[float, Trace, list[metrics.Token]]], case: Case) -> Result:
    by_kind: dict[str, float] = defaultdict(float)
    shares: dict[str, float] = defaultdict(float)
    latencies, lows, highs, attention_s, outside_s = [], 0.0, 0.0, 0.0, 0.0
    for weight, trace, tokens in runs:
        latencies.append(mean(token.latency_s for token in tokens))
        for token in tokens:
            part = weight / len(tokens)
            for kind, seconds in token.by_kind().items():
                by_kind[kind] += part * seconds
            low_s, high_s = metrics.interval(trace, token)
            lows, highs = lows + part * low_s, highs + part * high_s
            attention_s += part * metrics.attention_s(token)
            outside_s += part * metrics.outside_layers_s(token)
        for source, share in metrics.price_shares(trace).items():
            shares[source] += weight * share
    latency_s = sum(run[0] * latency for run, latency in zip(runs, latencies, strict=True))
    low_s, high_s, interval = lows, highs, "90 % price interval"
    if case.hits is not None and case.hits.random and len(runs) > 1:
        half = _student_t(len(runs) - 1) * stdev(latencies) / math.sqrt(len(runs))
        low_s, high_s, interval = latency_s - half, latency_s + half, f"95 % over {len(runs)} replicas"
    return Result(
        latency_s, low_s, high_s, interval, dict(by_kind), attention_s, outside_s, dict(shares),
        tuple(runs[-1][2]),
    )  # fmt: skip
