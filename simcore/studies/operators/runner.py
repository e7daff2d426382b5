"""Runs cases of an operator study on one device.

latency  = host time until the device has the launch + price of the op, at least the host's launch time
           (simulated; `seconds` computes it from prices alone)
fits     = memory_bytes of the op, or of the model with its prompts, <= memory of the device
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from simcore.machine import laws
from simcore.machine.trace import Trace
from simcore.models.decoder_config import DecoderConfig
from simcore.models.operators import LABELS, linear_attention_op
from simcore.models.prompt import PROMPT_LABELS, Prompt
from simcore.ops import flash_decoding as ops_flash_decoding
from simcore.ops import linear_attention as ops_linear_attention
from simcore.ops.op import Graph, Op, Price, SourceKind
from simcore.schedules.one_launch import UNCOUNTED, one_launch
from simcore.sim.runs import Setup
from simcore.studies.common import OperatorAxes, middle_first
from simcore.studies.hardware import SingleDevice
from simcore.studies.operators.scenario import LinearAttentionScenario, OperatorScenario, PromptScenario


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one case. `latency_s` is None if it does not fit into memory."""

    latency_s: float | None
    low_s: float | None
    high_s: float | None
    memory_bytes: float
    price: Price | None
    op: Op


@dataclass(frozen=True, slots=True)
class _Launched:
    """A run, the mean latency of its counted launches, and the op's mean price in them."""

    trace: Trace
    latency_s: float
    price: Price


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and caches the results. `processors`: number of blocks that
    the device runs concurrently; `config`: the model whose prompts they are, None for single operators."""

    scenario: OperatorScenario
    device: SingleDevice
    processors: int
    config: DecoderConfig | None = None
    results: dict[OperatorAxes, Result] = field(default_factory=dict)
    prices: dict[OperatorAxes, float] = field(default_factory=dict)

    def cases(self) -> Iterator[OperatorAxes]:
        """Yields all cases: settings outermost, then methods, then tokens; of decode attention points, then
        methods."""
        scenario = self.scenario
        if isinstance(scenario, PromptScenario):
            yield from self._prompts(scenario)
            return
        if isinstance(scenario, LinearAttentionScenario):
            for decay in scenario.decay:
                for batch in scenario.batch:
                    for method in scenario.methods:
                        for length in scenario.length:
                            yield OperatorAxes(
                                method,
                                LABELS[method],
                                batch,
                                scenario.heads,
                                length,
                                scenario.dim,
                                rank=scenario.rank,
                                decay=int(decay),
                            )
            return
        heads, dim = scenario.q_heads, scenario.head_dim
        for batch, context in scenario.points:
            for method in scenario.methods:
                yield OperatorAxes(
                    method, LABELS[method], batch, heads, context, dim, kv_heads=scenario.kv_heads
                )

    def _prompts(self, scenario: PromptScenario) -> Iterator[OperatorAxes]:
        assert self.config is not None
        assert self.config.linear is not None
        own = self.config.linear
        for batch in scenario.batch:
            for method in scenario.methods:
                for length in scenario.lengths:
                    yield OperatorAxes(
                        method,
                        PROMPT_LABELS[method],
                        batch,
                        own.heads,
                        length,
                        own.value_dim,
                        rank=own.key_dim,
                        decay=1,
                    )

    def _prompt(self, case: OperatorAxes) -> Prompt:
        scenario = self.scenario
        assert isinstance(scenario, PromptScenario)
        assert self.config is not None
        assert case.length is not None
        return Prompt(
            self.config,
            case.strategy,
            case.batch,
            case.length,
            scenario.dtype,
            scenario.mask_by_rows,
            scenario.states,
            scenario.all_logits,
        )

    def op(self, case: OperatorAxes) -> Op:
        """Returns the op of a case; Flash-Decoding with its splits chosen, if they are not given."""
        assert case.length is not None
        if isinstance(self.scenario, PromptScenario):
            return self._prompt(case).op
        if isinstance(self.scenario, LinearAttentionScenario):
            assert case.rank is not None
            return linear_attention_op(
                case.strategy,
                batch=case.batch,
                heads=case.heads,
                length=case.length,
                rank=case.rank,
                dim=case.dim,
                dtype=self.scenario.dtype,
                decay=bool(case.decay),
                mask_by_rows=self.scenario.mask_by_rows,
                states=self.scenario.states,
            )
        assert case.kv_heads is not None
        op = ops_flash_decoding.method_op(
            case.strategy,
            batch=case.batch,
            q_heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.dim,
            context=case.length,
            dtype=self.scenario.dtype,
        )
        if case.strategy != "flash_decoding":
            return op
        return ops_flash_decoding.with_splits(op, self._splits(op))

    def _splits(self, op: Op) -> int:
        given = getattr(self.scenario, "splits", "auto")
        if given != "auto":
            return int(given)
        return ops_flash_decoding.split_count(op, self.device.choose, self.processors)

    def fits(self, case: OperatorAxes) -> bool:
        """Whether the device's memory holds a case."""
        return self.memory_bytes(case) <= self.device.memory_bytes

    def memory_bytes(self, case: OperatorAxes) -> float:
        """Returns the peak device memory of a case, bytes."""
        if isinstance(self.scenario, PromptScenario):
            return self._prompt(case).memory_bytes
        return memory_bytes(self.op(case))

    def run(self, case: OperatorAxes) -> Result:
        """Returns the result of a case, the median run of several; no case runs twice."""
        if case not in self.results:
            op, needed = self.op(case), self.memory_bytes(case)
            if needed <= self.device.memory_bytes:
                model, repeats = self._model(case, op), range(self.device.repeats)
                runs = [self._launched(op, model, repr(case), _title(case)) for _ in repeats]
                # The median run comes first: its latency is the result, and a replay takes its op times.
                self.results[case] = _result(middle_first(runs, lambda run: run.trace.end_s), op, needed)
            else:
                self.results[case] = Result(None, None, None, needed, None, op)
        return self.results[case]

    def seconds(self, case: OperatorAxes) -> float:
        """Returns the latency of a case that fits, as `run` does: from prices alone, but by a simulation
        where launches slow down those that follow, at a card's power cap."""
        if case not in self.prices:
            op, costs = self.op(case), self.device.overheads
            if self.device.power is not None:
                known = self.results.get(case)
                ran_s = known.latency_s if known else None
                self.prices[case] = ran_s or self._launched(op, self._model(case, op), "").latency_s
            else:
                launch_s = costs.whole_launch_s(op.kernels)
                self.prices[case] = max(launch_s, costs.begins_s(launch_s) + self.device.price(op).seconds)
        return self.prices[case]

    def sources(self, case: OperatorAxes) -> Mapping[tuple[SourceKind, str], float]:
        """Returns the shares of a fitting case's time by source of price and kind of op: of a simulated whole
        model by its launches, else all of it."""
        found, op = self.run(case).price, self.op(case)
        assert found is not None
        if self.config is None or self.device.measured:
            return {(found.source, op.kind): 1.0}
        known = {id(part): self.device.price(part) for part in op.parts}
        total_s = sum(known[id(part)].seconds for part in op.parts)
        shares: dict[tuple[SourceKind, str], float] = defaultdict(float)
        for part in op.parts:
            price = known[id(part)]
            shares[price.source, part.kind] += price.seconds / total_s
        return shares

    def trace(self, case: OperatorAxes) -> Trace:
        """Returns the trace of a case."""
        op = self.op(case)
        return self._launched(op, self._model(case, op), "").trace

    def _model(self, case: OperatorAxes, op: Op) -> object:
        """Returns what a real machine computes with: a whole model's prompt, or the op alone."""
        return self._prompt(case) if isinstance(self.scenario, PromptScenario) else op

    def _launched(self, op: Op, model: object, name: str, title: str = "") -> _Launched:
        device, graph, begun_s = self.device, Graph(op.name, (op,)), list[float]()
        setup = Setup(
            model,
            device.price,
            device.roofline,
            device.overheads,
            power=device.power,
            case=name,
            title=title,
            warmup_launches=UNCOUNTED,
        )
        trace = device.start(setup).run(lambda m: one_launch(m, graph, begun_s))
        laws.enforce(trace)
        took_s = [mark.at_s - at_s for at_s, mark in zip(begun_s, trace.marks, strict=True)]
        prices = [priced.price for span in trace.spans[UNCOUNTED:] for priced in span.ops]
        mean_s = fmean(price.seconds for price in prices)
        mean = prices[-1].times(mean_s / prices[-1].seconds) if prices[-1].seconds else prices[-1]
        return _Launched(trace, fmean(took_s[UNCOUNTED:]), mean)


def _title(case: OperatorAxes) -> str:
    decay = ", with decay" if case.decay else ""
    return f"{case.label}, batch {case.batch:,}, {case.length:,} tokens{decay}"


def memory_bytes(op: Op) -> float:
    """Returns the peak device memory of an op of either study, bytes."""
    linear = op.kind.startswith("linear_attention")
    return ops_linear_attention.memory_bytes(op) if linear else ops_flash_decoding.memory_bytes(op)


def _result(runs: Sequence[_Launched], op: Op, needed: float) -> Result:
    """Returns the result of the first run; if there are several, with the least and the largest latency as
    interval."""
    latency_s, price = runs[0].latency_s, runs[0].price
    # The rest of the latency is the host's, which has no interval of its own.
    host_s = latency_s - price.seconds
    if len(runs) > 1:
        each = [run.latency_s for run in runs]
        price = replace(price, detail=f"{price.detail}; median, least and largest of {len(runs)} runs")
        return Result(latency_s, min(each), max(each), needed, price, op)
    return Result(latency_s, host_s + price.low_s, host_s + price.high_s, needed, price, op)
