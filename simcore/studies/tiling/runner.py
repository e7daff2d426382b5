"""Runs cases of a tiling scenario on one device: one generation each, its laws checked.

    seconds by kind of op  =  sum over all launches of the prices of its ops             (simulated)
                           =  sum over all spans of what its ops took                    (measured)

Simulated runs are in closed form, launch by launch; what they sum up to has to be what the device was busy.
Where an order allows it all launches are worked out at once (`closed_form`), which gives what the simulated
machine gives.
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

# Sums of a million rounded numbers agree to so much.
ROUNDING = 1e-9
# Orders of more launches than these, together, are not all remembered.
MOST_LAUNCHES = 1 << 22
LAW = "device time by kind of op adds up (tiling)"
AT_ONCE = "what is worked out at once is what the machine does launch by launch (tiling)"


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one run left behind: when each generated position was done, when the prompt was, device seconds by
    kind of op, and by source of price."""

    ended_s: NDArray[np.float64]
    begun_s: float
    by_kind: Mapping[str, float]
    sources: Mapping[str, float]
    trace: Trace


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and remembers models, launches and prices."""

    scenario: TilingScenario
    device: SingleDevice
    prices: dict[End, tuple[Pricer, GraphPricer]] = field(default_factory=dict)
    models: dict[Case, tuple[LongConvolution, list[Burst]]] = field(default_factory=dict)
    orders: dict[str, list[Order]] = field(default_factory=dict)

    def price(self, case: Case, end: End = "value") -> tuple[Pricer, GraphPricer]:
        """Prices of a case as they are, or at the `low` or `high` end of their intervals; what is known of
        them."""
        # What is known of another case is forgotten.
        self.launches(case)
        if end not in self.prices:
            charged = self._charged(case)
            self.prices[end] = at_end(charged, end), GraphPricer(charged, self.device.roofline, end=end)
        return self.prices[end]

    def stays(self, case: Case) -> bool:
        """Whether ops of steps find in the cache what the step before has used, and are priced so: where less
        than stays there is moved from step to step, in the mean."""
        return self.price(case)[0] is not self.device.price

    def _charged(self, case: Case) -> Pricer:
        """The device's prices, but of ops of steps those in the cache. Tiles come too seldom; what a prompt
        has used is long gone."""
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
        """The implementation of each side, by the prices that choices are made by."""
        return choice(case, self.device.choose)

    def model(self, case: Case) -> LongConvolution:
        """The model of a case, with its tiles chosen."""
        return model_of(case, self.tiles(case))

    def launches(self, case: Case) -> tuple[LongConvolution, list[Burst]]:
        """The model of a case and all that it launches; of the last case that was asked for, it is known."""
        if case not in self.models:
            # Tariffs know graphs by what they are, and keep them: forget both with the case.
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
        """Whether orders are forgotten when the next one is recorded."""
        known = (order for orders in self.orders.values() for order in orders)
        return sum(len(order.numbers) for order in known) > MOST_LAUNCHES

    def order(self, case: Case, model: LongConvolution) -> Order:
        """What a case launches and waits for, in order; cases whose schedules do the same share it."""
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
        """One generation. Raises LawError where a law is broken."""
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
        """What a case did; `rows`: launches as rows of numbers, for long runs. Raises LawError."""
        if rows and not self.device.measured:
            trace = self.at_once(case, model, ended_s, end)
            if trace is not None:
                laws.enforce(trace)
                return trace
        return self.simulated(case, model, ended_s, end, rows=rows)

    def at_once(
        self, case: Case, model: LongConvolution, ended_s: list[float], end: End = "value"
    ) -> Trace | None:
        """What a case does, all launches at once, its laws not checked; None where its order is too involved
        for that."""
        order = self.order(case, model)
        if not can_be_worked_out(order):
            return None
        graphs, overheads = order.made(model), self.device.overheads
        cost = costs(order, graphs, self.price(case, end)[1], overheads, model.told)
        times = worked_out(order, cost, overheads.wait_s)
        ended_s[:] = np.concatenate(([0.0], times.over_s))[order.ended].tolist()
        return traced(order, graphs, cost, times)

    def check_at_once(self, case: Case) -> None:
        """Raises LawError where the machine, launch by launch, gives other times than `at_once`."""
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
        """What a case did, launch by launch on the device's machine. Raises LawError."""
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
            device_sizes=model.told,
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
    # A real machine may run it before the run that counts.
    ended_s.clear()
    return case.strategy.program(m, model, ended_s)


def _check_sum(case: Case, by_kind: Mapping[str, float], trace: Trace) -> None:
    busy_s = float(trace.rows.table()["work_s"].sum())
    told_s = sum(by_kind.values())
    if abs(busy_s - told_s) > ROUNDING * max(busy_s, told_s):
        raise LawError(f"{LAW}: {case.axes.label}: {told_s} s of {busy_s} s")


def _measured_by_kind(trace: Trace) -> dict[str, float]:
    found: dict[str, float] = {}
    for span in trace.spans:
        for priced, start_s, end_s in span.op_times():
            found[priced.op.kind] = found.get(priced.op.kind, 0.0) + end_s - start_s
    return found
