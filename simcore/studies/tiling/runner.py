"""Runs cases of a tiling scenario on one device: one generation each, its laws checked.

    seconds by kind of op  =  sum over all launches of the prices of its ops             (simulated)
                           =  sum over all spans of the times of its ops                 (measured)

Simulated runs are checked: the closed-form sums must equal the busy time of the device. If an order allows
it, the times of all launches are computed at once (`closed_form`), with the simulated machine's results.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.machine import laws
from simcore.machine.machine import LawError
from simcore.machine.trace import Trace
from simcore.models.long_convolution import LongConvolution
from simcore.ops.op import Pricer
from simcore.sim.garbage import no_collections
from simcore.sim.graph_pricer import End, GraphPricer
from simcore.sim.runs import Setup
from simcore.studies.common import TilingAxes
from simcore.studies.hardware import SingleDevice, at_end
from simcore.studies.own import blamed
from simcore.studies.tiling.cases import Case, choice, model_of
from simcore.studies.tiling.closed_form import can_be_worked_out, costs, traced, worked_out
from simcore.studies.tiling.implementations import Choice
from simcore.studies.tiling.launches import Burst, bursts, seconds_by_kind, work
from simcore.studies.tiling.order import Asked, Order, recorded
from simcore.studies.tiling.scenario import TilingScenario
from simcore.studies.tiling.strategies import Fractal

# Relative rounding error of sums of a million numbers.
ROUNDING = 1e-9
# Orders in the cache are dropped once they have more launches in total than this.
MOST_LAUNCHES = 1 << 22
LAW = "device time by kind of op adds up (tiling)"
AT_ONCE = "what is worked out at once is what the machine does launch by launch (tiling)"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The results of one run: the times at which each generated position and the prompt were done, device
    seconds by kind of op, and by source of price."""

    ended_s: NDArray[np.float64]
    begun_s: float
    by_kind: Mapping[str, float]
    sources: Mapping[str, float]
    trace: Trace


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and caches models, launches and prices."""

    scenario: TilingScenario
    device: SingleDevice
    prices: dict[End, tuple[Pricer, GraphPricer]] = field(default_factory=dict)
    models: dict[Case, tuple[LongConvolution, list[Burst]]] = field(default_factory=dict)
    orders: dict[str, list[Order]] = field(default_factory=dict)

    def price(self, case: Case, end: End = "value") -> tuple[Pricer, GraphPricer]:
        """Returns the prices of a case as they are, or at the `low` or `high` end of their intervals, and the
        pricer of graphs."""
        # This drops the prices of another case.
        self.launches(case)
        if end not in self.prices:
            charged = self._charged(case)
            self.prices[end] = at_end(charged, end), GraphPricer(charged, self.device.roofline, end=end)
        return self.prices[end]

    def stays(self, case: Case) -> bool:
        """Whether ops of steps are priced with operands that the step before has left in the cache: if steps
        move less, on average, than stays there."""
        return self.price(case)[0] is not self.device.price

    def _charged(self, case: Case) -> Pricer:
        """Returns the device's prices, with those in the cache for ops of steps. Tiles come too rarely, and a
        prompt's data has long left the cache."""
        price, cached = self.device.price, self.device.in_cache
        if cached is None:
            return price
        model, launched = self.launches(case)
        steps = [burst for burst in launched if "conv_prefill" not in burst.graph.kinds]
        if work(steps, lambda _: True).hbm_bytes > case.generated * self.device.stays_bytes:
            return price
        prices = ((op, cached(op), price(op)) for op in {op.without_place for op in model.step().ops})
        warm = {op: found for op, found, cold in prices if found.seconds != cold.seconds}
        return (lambda op: warm.get(op) or price(op)) if warm else price

    def tiles(self, case: Case) -> Choice:
        """Returns the implementation of each side, by the device's prices for choices."""
        return choice(case, self.device.choose)

    def model(self, case: Case) -> LongConvolution:
        """Returns the model of a case, with its tiles and its step chosen."""
        return model_of(case, self.tiles(case), self.device.choose)

    def launches(self, case: Case) -> tuple[LongConvolution, list[Burst]]:
        """Returns the model of a case and all its launches; cached for the last case."""
        if case not in self.models:
            # The pricers keep the case's graphs: drop both together.
            self.models.clear()
            self.prices.clear()
            model = self.model(case)
            order = self.order(case, model)
            self.models[case] = model, bursts(order, order.made(model))
        return self.models[case]

    def blamed(self, case: Case) -> AbstractContextManager[None]:
        """See `own.blamed`."""
        return blamed(case.strategy, self.scenario.strategies)

    @property
    def full(self) -> bool:
        """Whether the cached orders are dropped when the next one is recorded."""
        known = (order for orders in self.orders.values() for order in orders)
        return sum(len(order.numbers) for order in known) > MOST_LAUNCHES

    def order(self, case: Case, model: LongConvolution) -> Order:
        """Returns the launches and waits of a case, in order; cases with equal schedules share an order."""
        known = self.orders.setdefault(case.axes.label, [])
        found = next((order for order in known if order.holds(model)), None)
        if found is None:
            if self.full:
                self.orders.clear()
            ended: list[float] = []
            asked: Any = Asked(model)
            with no_collections(), self.blamed(case):
                found = recorded(partial(_program, case, asked, ended), ended, asked.read)
            self.orders.setdefault(case.axes.label, []).append(found)
        return found

    def run(self, case: Case, end: End = "value") -> Result:
        """Runs one generation. Raises LawError if a law is broken."""
        with self.blamed(case):
            model, launched = self.launches(case)
        ended: list[float] = []
        trace = self.trace(case, model, ended, end, rows=True)
        if self.device.measured:
            by_kind = _measured_by_kind(trace)
            sources: dict[str, float] = {"measured": sum(by_kind.values())}
        else:
            by_kind = seconds_by_kind(launched, self.price(case, end)[1])
            sources = dict(trace.rows.sources.items())
            _check_sum(case, by_kind, trace)
        first = min(1, case.axes.prompt_tokens)
        if len(ended) != first + case.generated:
            with self.blamed(case):
                raise ValueError(f"ended_s has {len(ended)} moments; {first + case.generated} are needed")
        if not launched:
            with self.blamed(case):
                raise ValueError("program launched nothing")
        return Result(np.array(ended[first:]), ended[0] if first else 0.0, by_kind, sources, trace)

    def trace(
        self, case: Case, model: LongConvolution, ended_s: list[float], end: End = "value", *, rows: bool
    ) -> Trace:
        """Returns the trace of a case; `rows`: with rows of numbers, for long runs. Raises LawError."""
        if rows and not self.device.measured:
            trace = self.at_once(case, model, ended_s, end)
            if trace is not None:
                laws.enforce(trace)
                return trace
        return self.simulated(case, model, ended_s, end, rows=rows)

    def at_once(
        self, case: Case, model: LongConvolution, ended_s: list[float], end: End = "value"
    ) -> Trace | None:
        """Returns the trace of a case, computed for all launches at once, without checking laws; None if its
        order does not allow that."""
        order = self.order(case, model)
        if not can_be_worked_out(order):
            return None
        graphs, overheads = order.made(model), self.device.overheads
        cost = costs(order, graphs, self.price(case, end)[1], overheads, model.device_sizes)
        times = worked_out(order, cost, overheads.wait_s)
        ended_s[:] = np.concatenate(([0.0], times.over_s))[order.ended].tolist()
        return traced(order, graphs, cost, times)

    def check_at_once(self, case: Case) -> None:
        """Raises LawError if the machine, launch by launch, gives other times than `at_once`."""
        model, _ = self.launches(case)
        ended, expected = list[float](), list[float]()
        trace = self.at_once(case, model, ended)
        if trace is None:
            return
        table = self.simulated(case, model, expected, rows=True).rows.table()
        pairs = [(trace.rows.table()[name], column) for name, column in table.items()]
        for found, wanted in [*pairs, (np.array(ended), np.array(expected))]:
            if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=ROUNDING, atol=0.0):
                raise LawError(f"{AT_ONCE}: {case.axes.label}")

    def simulated(
        self, case: Case, model: LongConvolution, ended_s: list[float], end: End = "value", *, rows: bool
    ) -> Trace:
        """Returns the trace of a case, launch by launch on the device's machine. Raises LawError."""
        price, graph_pricer = self.price(case, end)
        strategy = case.strategy
        half = isinstance(strategy, Fractal) and strategy.half_storage[0]
        holds: dict[str, Any] = {"tokens": case.axes.tokens, "half_storage": half}
        setup = Setup(
            model=model,
            price=price,
            roofline=self.device.roofline,
            overheads=self.device.overheads,
            rates=self.device.rates,
            rows=rows,
            graph_pricer=graph_pricer,
            case=repr(case.axes) if rows else "",
            title=_title(case.axes),
            device_sizes=model.device_sizes,
            holds=holds,
        )
        run = self.device.start(setup)
        with self.blamed(case):
            with no_collections():
                trace = run.run(partial(_program, case, model, ended_s))
            laws.enforce(trace)
        return trace


def _title(axes: TilingAxes) -> str:
    model = f"{axes.layers} x {axes.channels} channels"
    return f"{axes.label}, {model}, batch {axes.batch:,}, {axes.tokens:,} tokens"


def _program(case: Case, model: LongConvolution, ended_s: list[float], m: Any) -> Any:
    # A real machine may run the program before the run that counts.
    ended_s.clear()
    return case.strategy.program(m, model, ended_s)


def _check_sum(case: Case, by_kind: Mapping[str, float], trace: Trace) -> None:
    busy_s = float(trace.rows.table()["work_s"].sum())
    sum_s = sum(by_kind.values())
    if abs(busy_s - sum_s) > ROUNDING * max(busy_s, sum_s):
        raise LawError(f"{LAW}: {case.axes.label}: {sum_s} s of {busy_s} s")


def _measured_by_kind(trace: Trace) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in trace.spans:
        for priced, start_s, end_s in span.op_times():
            found[priced.op.kind] = found.get(priced.op.kind, 0.0) + end_s - start_s
    return found
