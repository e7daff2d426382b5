"""Climbs the validation ladder with a scenario: runs it on this machine, replays it, predicts it, compares.

measured    the torch machine, on the wall clock
replayed    the simulated machine with the op times of the run                    rung 2
            and, on a card, with the host's times of verbs there, case by case
predicted   the simulated machine at the prices of the device's profile           rung 3

A run on a card times whole graphs; the time of a graph is split among its ops in proportion to their prices.
Afterwards ops are also measured one by one. A second replay uses these times, the extra time of a decoder's
kernels in graphs (`in_graph_s`) and the start time of graphs (`start_s`); the same bound applies. The run's
own times include the effects of kernels on each other, so a replay of a sequence with them only shows that
the schedule adds up. The second replay shows whether separately measured ops and verbs explain the whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any, Protocol

from simcore.assembly import Parts, Place, assemble
from simcore.devices.price import roofline
from simcore.devices.spec import load_device
from simcore.machine.machine import Overheads
from simcore.machine.trace import Trace
from simcore.ops.op import Op, Price, Pricer, Roofline
from simcore.scenario import Scenario
from simcore.sim.power import PowerLimit
from simcore.sim.runs import Run, Setup, Start, span_by_span
from simcore.studies.common import FIGURE, Outcome, Progress, Row, Standing, flat, of_whole_runs
from simcore.studies.fields import HostOverheads
from simcore.validate.ladder.recorded import longest, price_rows, simulated_too
from simcore.validate.ladder.rungs import Bounds, OpPoint, compared, holds, ladder, measured_prices, op_points
from simcore.validate.machines.here import Real
from simcore.validate.timing.op_times import plain

ROLE = "measured on this machine"
# Places that a warning names.
FEW = 3
# Figures that split the time of a graph among its ops; on a card they are not measured.
SPLIT = frozenset({"attention_s_per_layer", "non_attention_s_per_layer", "mixer_s", "block_s"})
# Fields that a comparison has in other columns, or not at all.
DROPPED = frozenset({*FIGURE, "study", "op_kind"})


@dataclass(frozen=True)
class Climb:
    """The result: the measured run, its rungs, predicted and measured figures, prices and times of ops.
    `predicted`: the outcome at predicted prices, with the trace of the case whose measured trace the outcome
    has."""

    parts: Parts
    outcome: Outcome
    place: Place
    rungs: list[dict[str, Any]]
    comparison: list[dict[str, Any]]
    prices: list[dict[str, Any]]
    predicted: Outcome

    @property
    def holds(self) -> bool:
        """Whether every judged rung has passed."""
        return holds(self.rungs)


class Measuring(Protocol):
    """A real machine that starts runs and keeps their traces."""

    started: dict[str, list[Trace]]

    @property
    def traces(self) -> list[Trace]:
        """The reported run of each case."""

    @property
    def described(self) -> dict[str, Any]:
        """The machine's entries in a provenance."""

    def host_costs(self, case: str) -> Mapping[str, float]:
        """Returns the costs of verbs on this machine in a case (`machine.Overheads`), as far as op times do
        not include them."""

    def cap_times(self, limit: PowerLimit, price: Pricer) -> float:
        """Measures by how much this machine's power cap is lower than that of the card of the law, whose
        prices these are."""

    def start(self, setup: Setup) -> Run:
        """See `simcore.sim.runs.Start`."""


@dataclass(frozen=True)
class OpTimes:
    """Op times and their prices; prices for a replay with these times, and for ops that no run had; warnings.
    `saved_s`: by trace and op, without place and name, the seconds by which these prices are too high."""

    points: list[OpPoint]
    prices: Pricer
    warnings: list[str] = field(default_factory=list)
    saved_s: Sequence[Mapping[Op, float]] = ()


# (traces, predicted prices, roofline, progress) -> op times.
Ops = Callable[[Sequence[Trace], Pricer, Roofline, Progress], OpTimes]


def in_the_run(traces: Sequence[Trace], price: Pricer, floor: Roofline, progress: Progress) -> OpTimes:
    """Returns the op times of the run itself, without separate measurements."""
    del progress
    return OpTimes(op_points(traces, price, floor), price)


def climb(
    scenario: Scenario,
    where: str,
    *,
    on: str,
    repeats: int,
    bounds: Bounds,
    progress: Progress,
    real: Measuring | None = None,
    ops: Ops = in_the_run,
    device: str | None = None,
) -> Climb:
    """Runs a scenario for `device` (default `on`) in all three ways, on the CPU unless a `real` machine is
    given. Raises the errors of the runs."""
    floor = roofline(load_device(device or on))
    real = real or Real(repeats)
    place = Place(on, real.start, repeats)
    parts = assemble(scenario, where, place)
    # Cards of a kind differ: a service near saturation is predicted for this one.
    price = parts.price()
    cap_times = 1.0 if parts.power is None else real.cap_times(parts.power, price)
    outcome = parts.study.run(progress)
    if cap_times != 1.0:
        cap = f"this card's power cap is {1.0 / cap_times:.3f} times that in the profile"
        outcome.notes.append(
            f"{cap}, by products under load: predictions here count with it, a run on sim does not"
        )
    alone = ops(real.traces, price, floor, progress)
    points, prices = alone.points, alone.prices
    outcome.warnings = [*outcome.warnings, *alone.warnings]
    reported = [case for case in real.started if case]
    saved = dict(zip(reported, alone.saved_s, strict=True)) if alone.saved_s else {}

    def replay(
        scenario: Scenario, prices: Pricer, saved: Mapping[str, Mapping[Op, float]], *, alone: bool = False
    ) -> tuple[list[Row], dict[str, str]]:
        costs = _Costs(real.host_costs, _of_replays(scenario.overheads), saved)
        again = assemble(
            scenario, where, Place("replay", costs.start, prices=prices, alone=alone, cap_times=cap_times)
        )
        return of_whole_runs(again.study.run(progress).rows), costs.described

    # The times of the run include the start of graphs and the extra time of kernels in them.
    bare = scenario.model_copy(
        update={
            "overheads": scenario.overheads.model_copy(
                update={"in_graph_s": 0.0, "in_step_s": 0.0, "start_s": 0.0}
            )
        }
    )
    replayed, described = replay(bare, measured_prices(real.traces, floor, prices), {})
    one_by_one = None if ops is in_the_run else replay(scenario, prices, saved, alone=True)[0]
    place = replace(place, described=lambda: {**real.described, "replayed_with": described})
    at_prices = assemble(scenario, where, Place(cap_times=cap_times)).study.run(progress)
    predicted = of_whole_runs(at_prices.rows)
    outcome.warnings = [*outcome.warnings, *other_best(outcome.standings, at_prices.standings)]
    measured = [row for row in of_whole_runs(outcome.rows) if ops is in_the_run or row.metric not in SPLIT]
    rungs = ladder(points, predicted, replayed, measured, bounds, one_by_one=one_by_one)

    def simulate(start: Start) -> Outcome:
        return assemble(scenario, where, Place("predicted", start, cap_times=cap_times)).study.run(progress)

    case, outcome.trace = longest(real.started)
    at_prices.trace_title, at_prices.trace = simulated_too(case, simulate)
    outcome.trace_title = at_prices.trace_title
    figures = list(_comparison(scenario.study, predicted, replayed, measured))
    return Climb(parts, outcome, place, rungs, figures, list(price_rows(points)), at_prices)


def other_best(measured: Sequence[Standing], predicted: Sequence[Standing]) -> list[str]:
    """Returns a warning where another strategy is best by prediction than by measurement: a ladder whose
    rungs hold does not say that its prediction chooses well."""
    best = {each.at: each.label for each in predicted}
    others = [
        f"{each.at[:1].lower()}{each.at[1:]} {best[each.at]!r}, measured {each.label!r}".strip()
        for each in measured
        if best.get(each.at, each.label) != each.label
    ]
    places = f" in {len(others)} of {len(measured)} places" if len(measured) > 1 else ""
    more = f"; {len(others) - FEW} more" if len(others) > FEW else ""
    return [f"another strategy is best by prediction{places}: {'; '.join(others[:FEW])}{more}"] * bool(others)


@dataclass
class _Costs:
    """Starts runs on the simulated machine with the real machine's costs of verbs in the same case; costs
    that the scenario gives take precedence. `saved_s`: by case, as in OpTimes; `used`: by case."""

    of: Callable[[str], Mapping[str, float]]
    given: Mapping[str, float]
    saved_s: Mapping[str, Mapping[Op, float]]
    used: dict[str, Overheads] = field(default_factory=dict)

    def start(self, setup: Setup) -> Run:
        """See `simcore.sim.runs.Start`."""
        overheads = replace(setup.overheads, **{**self.of(setup.case), **self.given})
        if setup.case:
            self.used[setup.case] = overheads
        price = _less(setup.price, self.saved_s.get(setup.case, {}))
        return span_by_span(replace(setup, price=price, overheads=overheads))

    @property
    def described(self) -> dict[str, str]:
        """Median, minimum and maximum over all cases in seconds, for provenances."""
        each = [asdict(overheads) for overheads in self.used.values()]
        names = each[0] if each else ()
        values = {name: [costs[name] for costs in each] for name in names}
        return {name: f"{median(x):.3g} ({min(x):.3g} to {max(x):.3g})" for name, x in values.items()}


def _of_replays(overheads: HostOverheads) -> dict[str, float]:
    """Returns the scenario's costs of verbs for replays. A run's launch times include their kernels, so
    `launch_kernel_s` counts only if the scenario also gives `launch_s`."""
    said = overheads.given()
    return said if "launch_s" in said else {k: v for k, v in said.items() if k != "launch_kernel_s"}


def _less(price: Pricer, saved_s: Mapping[Op, float]) -> Pricer:
    if not saved_s:
        return price

    @cache
    def shorter(op: Op) -> Price:
        return price(op).longer(-saved_s.get(plain(op), 0.0))

    return shorter


def _comparison(
    study: str, predicted: Sequence[Row], replayed: Sequence[Row], measured: Sequence[Row]
) -> Iterator[dict[str, Any]]:
    """Yields rung 3, figure by figure, as rows of comparison.csv, with the replayed value of rung 2."""
    again = {(row.axes, row.metric): row.value for row in replayed}
    for pair in compared(predicted, measured):
        yield {
            **{name: value for name, value in flat(study, pair.measured).items() if name not in DROPPED},
            "reference": pair.measured.value,
            "predicted": pair.predicted.value,
            "low": pair.predicted.low,
            "high": pair.predicted.high,
            "replayed": again.get((pair.predicted.axes, pair.predicted.metric)),
            "error_pct": pair.signed_pct,
            "role": ROLE,
            "source": "wall clock",
        }
