"""Runs cases of an operator study on one device.

latency  = host time until the device has it + price of the op, but no less than the host's launch
           (simulated; `seconds` asks prices alone)
fits     = memory_bytes(op) <= memory of the device
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from simcore.machine import laws
from simcore.machine.trace import Trace
from simcore.models.operators import LABELS, linear_attention_op
from simcore.ops import flash_decoding as ops_flash_decoding
from simcore.ops import linear_attention as ops_linear_attention
from simcore.ops.op import Graph, Op, Price
from simcore.schedules.one_launch import UNCOUNTED, one_launch
from simcore.sim.runs import Setup
from simcore.studies.common import OperatorAxes, middle_first
from simcore.studies.hardware import SingleDevice
from simcore.studies.operators.scenario import LinearAttentionScenario, OperatorScenario


@dataclass(frozen=True, slots=True)
class Result:
    """What one case gave. `latency_s` is None where it does not fit into memory."""

    latency_s: float | None
    low_s: float | None
    high_s: float | None
    memory_bytes: float
    price: Price | None
    op: Op


@dataclass(frozen=True, slots=True)
class _Launched:
    """A run, the mean latency of its launches after the first, and what the op took in the last."""

    trace: Trace
    latency_s: float
    price: Price


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and remembers what they gave. `processors`: how many blocks
    it runs side by side."""

    scenario: OperatorScenario
    device: SingleDevice
    processors: int
    results: dict[OperatorAxes, Result] = field(default_factory=dict)
    prices: dict[OperatorAxes, float] = field(default_factory=dict)

    def cases(self) -> Iterator[OperatorAxes]:
        """All points of the scenario: settings outermost, then methods, then tokens."""
        scenario = self.scenario
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

    def op(self, case: OperatorAxes) -> Op:
        """What a case launches; Flash-Decoding with its splits chosen, if they are not given."""
        assert case.length is not None
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

    def fits(self, op: Op) -> bool:
        """Whether the device's memory holds an op's tensors and temporaries."""
        return memory_bytes(op) <= self.device.memory_bytes

    def run(self, case: OperatorAxes) -> Result:
        """The result of a case, the median run of several; no case is run twice."""
        if case not in self.results:
            op = self.op(case)
            needed = memory_bytes(op)
            if needed <= self.device.memory_bytes:
                runs = [self._launched(op, repr(case), _title(case)) for _ in range(self.device.repeats)]
                # The run whose op times a replay takes, and whose trace is shown.
                self.results[case] = _result(middle_first(runs, lambda run: run.trace.end_s), op, needed)
            else:
                self.results[case] = Result(None, None, None, needed, None, op)
        return self.results[case]

    def seconds(self, case: OperatorAxes) -> float:
        """The latency of a case that fits, from prices alone: what `run` simulates."""
        if case not in self.prices:
            op, costs = self.op(case), self.device.overheads
            launch_s = costs.whole_launch_s(op.kernels)
            self.prices[case] = max(launch_s, costs.begins_s(launch_s) + self.device.price(op).seconds)
        return self.prices[case]

    def trace(self, case: OperatorAxes) -> Trace:
        """What a case leaves behind."""
        return self._launched(self.op(case), "").trace

    def _launched(self, op: Op, name: str, title: str = "") -> _Launched:
        device, graph, begun_s = self.device, Graph(op.name, (op,)), list[float]()
        setup = Setup(
            op,
            device.price,
            device.roofline,
            device.overheads,
            case=name,
            title=title,
            warmup_launches=UNCOUNTED,
        )
        trace = device.start(setup).run(lambda m: one_launch(m, graph, begun_s))
        laws.enforce(trace)
        took_s = [mark.at_s - at_s for at_s, mark in zip(begun_s, trace.marks, strict=True)]
        (priced,) = trace.spans[-1].ops
        return _Launched(trace, fmean(took_s[UNCOUNTED:]), priced.price)


def _title(case: OperatorAxes) -> str:
    decay = ", with decay" if case.decay else ""
    return f"{case.label}, batch {case.batch:,}, {case.length:,} tokens{decay}"


def memory_bytes(op: Op) -> float:
    """Most bytes of device memory that an op of either study has in use at once."""
    linear = op.kind.startswith("linear_attention")
    return ops_linear_attention.memory_bytes(op) if linear else ops_flash_decoding.memory_bytes(op)


def _result(runs: Sequence[_Launched], op: Op, needed: float) -> Result:
    """What the first of several runs gave; of several, the least and the largest latency are the interval."""
    latency_s, price = runs[0].latency_s, runs[0].price
    # All but the op itself is the host's: certain, as far as its overheads are.
    host_s = latency_s - price.seconds
    if len(runs) > 1:
        each = [run.latency_s for run in runs]
        price = replace(price, detail=f"{price.detail}; median, least and largest of {len(runs)} runs")
        return Result(latency_s, min(each), max(each), needed, price, op)
    return Result(latency_s, host_s + price.low_s, host_s + price.high_s, needed, price, op)
