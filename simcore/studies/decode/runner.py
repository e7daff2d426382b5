"""Runs cases of a decode scenario on one device.

result of a case = sum over its draws of weight * result of the run, per token
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from statistics import mean, stdev
from typing import Any

from simcore.machine import laws, metrics
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.decoder import GROUP, TENSOR, Decoder
from simcore.models.decoder_config import DecoderConfig
from simcore.ops.op import Pricer, SourceKind
from simcore.schedules.alspec import alspec
from simcore.schedules.alspec_pipelined import alspec_pipelined
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.sim import contention
from simcore.sim.garbage import no_collections
from simcore.sim.runs import Setup
from simcore.sim.segments import Cuts
from simcore.studies.common import Axes, middle_first, student_t
from simcore.studies.decode.scenario import DecodeScenario, DecodeStrategy
from simcore.studies.decode.speculation import HitPattern
from simcore.studies.hardware import Hardware
from simcore.studies.own import blamed
from simcore.studies.processes import SHORT_S, in_processes

# Most sets of prices in the cache: a search over link latencies uses hundreds.
MOST_CUTS = 64


@dataclass(frozen=True, slots=True)
class HitRow:
    """A line of ALSpec's Tables 1 and 2: hit rate and score of a task at a threshold."""

    task: str
    threshold: float
    hit_rate: float
    score: float
    baseline_score: float


@dataclass(frozen=True, slots=True)
class Hits:
    """One value of a strategy's hits: its mean rate, and its runs, each with a weight. `way`: how hits come,
    in a few words."""

    rate: float
    draws: tuple[tuple[float, HitPattern], ...]
    random: bool
    text: str
    published: HitRow | None = None
    way: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """One point of the study; its axes name a context.

    `free`: ops that the profile assumes to take no time take none; else link and roofline price them.
    `own`: a user's own strategy, or None.
    """

    axes: Axes
    hits: Hits | None
    chunk: int
    overlap: bool = True
    link_latency_s: float | None = None
    free: bool = True
    own: DecodeStrategy | None = field(default=None, compare=False, repr=False)

    @property
    def context(self) -> int:
        """Cached tokens when the first token is decoded."""
        assert self.axes.context_tokens is not None
        return self.axes.context_tokens

    @property
    def draws(self) -> tuple[tuple[float, HitPattern], ...]:
        """The runs of the case, each with its weight; one run without hits if it does not speculate."""
        return self.hits.draws if self.hits else ((1.0, no_hits),)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one simulation, or of several averaged by weight. Seconds per token, of all tokens after
    the first (`metrics.after_first`). `interval`: the meaning of low and high, in words; `free`: ops that
    were assumed to take no time; `tokens`: of the last simulation; `standard_error_s`: of the mean over
    replicas of random hits."""

    latency_s: float
    low_s: float
    high_s: float
    by_kind: Mapping[str, float]
    attention_s: float
    outside_s: float
    price_shares: Mapping[SourceKind, float]
    free: frozenset[str]
    tokens: tuple[metrics.Token, ...]
    interval: str = "90 % price interval"
    standard_error_s: float | None = None

    @property
    def free_speculation(self) -> frozenset[str]:
        """The free ops except sampling, which every strategy has."""
        return self.free - {"sample"}


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and caches the results. `hits`: the lines of ALSpec's tables
    for its model; `rival`: the same of a second model, if the scenario names one."""

    scenario: DecodeScenario
    config: DecoderConfig
    hardware: Hardware
    hits: Sequence[HitRow] = ()
    rival: "Bench | None" = None
    results: dict[Case, Result] = field(default_factory=dict)
    runs: dict[tuple[Case, HitPattern], Result] = field(default_factory=dict)
    latencies_s: dict[tuple[Case, HitPattern], float] = field(default_factory=dict)
    models: dict[tuple[int, int, int], Decoder] = field(default_factory=dict)
    cuts: dict[Pricer, Cuts] = field(default_factory=dict)

    def model(self, case: Case) -> Decoder:
        """Returns the model, sharded as a case needs it."""
        ranks, batch = case.axes.ranks, case.axes.batch
        key = (ranks, batch, case.chunk)
        if key not in self.models:
            self.models[key] = Decoder(
                self.config,
                ranks=ranks,
                batch=batch,
                dtypes=self.hardware.dtypes,
                style=self.hardware.style(ranks),
                chunk=case.chunk,
                parts=self.hardware.parts,
                outside=self.scenario.part == "model",
                normed_sums=self.hardware.normed_sums,
            )
        return self.models[key]

    def program(self, case: Case) -> Callable[[Machine], Program]:
        """Returns the schedule of a case, for any machine."""
        model, axes = self.model(case), case.axes
        arguments: dict[str, Any] = {"tokens": self.scenario.tokens, "context": case.context}
        own = case.own
        if own is not None:
            return lambda m: own.program(m, model, **arguments)
        if axes.strategy == "tensor_parallel":
            return lambda m: tensor_parallel(m, model, **arguments)
        if axes.strategy == "alspec":
            return lambda m: alspec(m, model, overlap_last_layer=case.overlap, **arguments)
        return lambda m: alspec_pipelined(m, model, **arguments)

    def run(self, case: Case) -> Result:
        """Returns the result of a case; no simulation runs twice."""
        if case not in self.results:
            self.results[case] = _average([(w, self._run(case, p)) for w, p in case.draws], case)
        return self.results[case]

    def run_all(self, cases: Sequence[Case], progress: Callable[[int, int], None]) -> None:
        """Makes the runs of all these cases, each once, on several cores."""
        wanted = {(_same(case), pattern): (case, pattern) for case in cases for _, pattern in case.draws}
        each = [*wanted.values()]

        def done(count: int) -> None:
            progress(count, len(each))

        gave = in_processes(lambda i: self._run(*each[i]), len(each), self.hardware.jobs, done, SHORT_S)
        self.runs.update(zip(wanted, gave, strict=True))

    def latency_s(self, case: Case) -> float:
        """Returns the latency of a case, without computing the rest of its result."""
        if case in self.results or self.hardware.measured:
            return self.run(case).latency_s
        return sum(weight * self._latency_s(case, pattern) for weight, pattern in case.draws)

    def _latency_s(self, case: Case, pattern: HitPattern) -> float:
        key = _same(case), pattern
        if key in self.runs:
            return self.runs[key].latency_s
        if key not in self.latencies_s:
            moments = metrics.moments(self._simulate(case, pattern, lockstep=(TENSOR,)))
            counted = metrics.after_first(moments)
            self.latencies_s[key] = mean(token.end_s - token.start_s for token in counted)
        return self.latencies_s[key]

    def _run(self, case: Case, pattern: HitPattern) -> Result:
        key = _same(case), pattern
        if key not in self.runs:
            repeats = range(self.hardware.repeats)
            with self.blamed(case):
                traces = [self._simulate(case, pattern, lockstep=(TENSOR,)) for _ in repeats]
                if case.own and (marked := len(metrics.moments(traces[0]))) != self.scenario.tokens:
                    raise ValueError(f"{marked} tokens are marked; {self.scenario.tokens} are needed")
            self.runs[key] = _middle([_summary(trace) for trace in traces])
        return self.runs[key]

    def trace(self, case: Case) -> Trace:
        """Returns the trace of a case at its last draw. It is simulated anew, since traces are not kept."""
        with self.blamed(case):
            return self._simulate(case, case.draws[-1][1])

    def blamed(self, case: Case) -> AbstractContextManager[None]:
        """See `own.blamed`."""
        return blamed(case.own, self.scenario.strategies)

    def keeps_step(self, case: Case, trace: Trace) -> bool:
        """Whether `run` may simulate one rank of a tensor-parallel group for all: tokens end at the same
        times in the trace of all ranks as with one."""
        whole = [end_s for _, _, end_s in metrics.moments(trace)]
        return whole == [token.end_s for token in self._run(case, case.draws[-1][1]).tokens]

    def _simulate(self, case: Case, pattern: HitPattern, lockstep: Sequence[str] = ()) -> Trace:
        price = self.hardware.price(case.axes.ranks, case.link_latency_s, case.free)
        setup = Setup(
            model=self.model(case),
            price=price,
            cuts=self._cuts(case),
            mesh=mesh_of(case.axes),
            roofline=self.hardware.roofline,
            overheads=self.hardware.overheads,
            outcomes={"hit": pattern},
            rates=contention.shared_reads(
                0.0,
                self.hardware.memory_bandwidth_share["value"],
                self.hardware.tail_overlap_s,
            ),
            lockstep=lockstep,
            # For figures one rank of a group is simulated or driven; for a shown trace, all ranks.
            case=repr(case) if lockstep and self.hardware.measured else "",
            title=_title(case.axes),
            device_sizes=self.model(case).device_sizes,
            power=self.hardware.power,
            holds={"context": case.context, "tokens": self.scenario.tokens},
        )
        with no_collections():
            trace = self.hardware.start(setup).run(self.program(case))
            laws.enforce(trace)
        return trace

    def _cuts(self, case: Case) -> Cuts:
        """Returns the costs of graphs at the prices of a case."""
        ranks, latency_s, free = case.axes.ranks, case.link_latency_s, case.free
        price, local = self.hardware.price(ranks, latency_s, free), None
        if latency_s is not None:
            local = self._cuts(replace(case, link_latency_s=None))
        found = self.cuts.pop(price, None) or Cuts(price, self.hardware.roofline, local)
        # The least recently used set is dropped.
        if len(self.cuts) >= MOST_CUTS:
            del self.cuts[next(iter(self.cuts))]
        self.cuts[price] = found
        return found


def _same(case: Case) -> Case:
    """Returns the key of a case's runs, without its hits: the same counted patterns occur at many rates, and
    a run depends only on its pattern."""
    label = case.axes.label if case.own else ""
    return replace(case, hits=None, axes=replace(case.axes, hit_rate=None, label=label))


def _title(axes: Axes) -> str:
    hits = "" if axes.hit_rate is None else f", {axes.hit_rate:.1%} hits"
    return f"{axes.label}, batch {axes.batch:,}, {axes.context_tokens:,} tokens of context{hits}"


def mesh_of(axes: Axes) -> dict[str, int]:
    """Returns the mesh of a strategy's ranks."""
    if axes.groups == 1:
        return {TENSOR: axes.ranks}
    return {GROUP: axes.groups, TENSOR: axes.ranks}


def no_hits(token: int, layer: int) -> bool:
    """The hit pattern of a strategy that does not speculate."""
    del token, layer
    return False


def _summary(trace: Trace) -> Result:
    tokens = metrics.tokens(trace)
    counted = metrics.after_first(tokens)
    by_kind: dict[str, float] = defaultdict(float)
    for token in counted:
        for kind, seconds in token.by_kind().items():
            by_kind[kind] += seconds / len(counted)
    intervals = metrics.intervals(trace, counted)
    return Result(
        mean(token.latency_s for token in counted),
        mean(low_s for low_s, _ in intervals),
        mean(high_s for _, high_s in intervals),
        dict(by_kind),
        mean(metrics.attention_s(token) for token in counted),
        mean(metrics.outside_layers_s(token) for token in counted),
        metrics.price_shares(trace),
        metrics.assumed_free(trace),
        tuple(tokens),
    )


def _middle(results: Sequence[Result]) -> Result:
    """Returns the run of median latency among several of a case, with the fastest and the slowest as its
    interval."""
    middle = middle_first(results, lambda result: result.latency_s)[0]
    if len(results) == 1:
        return middle
    each = [result.latency_s for result in results]
    text = f"fastest and slowest of {len(results)} runs"
    return replace(middle, low_s=min(each), high_s=max(each), interval=text)


def _average(runs: Sequence[tuple[float, Result]], case: Case) -> Result:
    def weighted(value: Callable[[Result], float]) -> float:
        return sum(weight * value(run) for weight, run in runs)

    kinds = dict.fromkeys(kind for _, run in runs for kind in run.by_kind)
    sources = dict.fromkeys(source for _, run in runs for source in run.price_shares)
    average = Result(
        weighted(lambda run: run.latency_s),
        weighted(lambda run: run.low_s),
        weighted(lambda run: run.high_s),
        {kind: sum(w * run.by_kind.get(kind, 0.0) for w, run in runs) for kind in kinds},
        weighted(lambda run: run.attention_s),
        weighted(lambda run: run.outside_s),
        {name: sum(w * run.price_shares.get(name, 0.0) for w, run in runs) for name in sources},
        frozenset().union(*(run.free for _, run in runs)),
        runs[-1][1].tokens,
        runs[-1][1].interval,
    )
    if case.hits is None or not case.hits.random or len(runs) == 1:
        return average
    spread_s = stdev(run.latency_s for _, run in runs)
    half_s = student_t(len(runs) - 1) * spread_s / math.sqrt(len(runs))
    low_s, high_s = average.low_s - half_s, average.high_s + half_s
    error_s = spread_s / math.sqrt(len(runs))
    interval = f"90 % price interval, widened by 95 % over {len(runs)} replicas"
    return replace(average, low_s=low_s, high_s=high_s, interval=interval, standard_error_s=error_s)
