"""How a study runs a program on any machine.

A study describes the run (`Setup`) and gets a `Run` that performs it: the simulated machine, or a real one,
which uses the tensors of the model and the wall clock instead of prices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from simcore.machine.machine import Machine, Overheads, Program
from simcore.machine.mesh import Mesh
from simcore.machine.trace import Trace
from simcore.ops.op import Pricer, Roofline
from simcore.sim.contention import Rates, max_min_rates
from simcore.sim.graph_pricer import GraphPricer
from simcore.sim.power import PowerLimit
from simcore.sim.segments import Cuts
from simcore.sim.simulation import DeviceSizes, Outcomes, RankKind, Route, Simulation, no_device_sizes

# A measured run that takes so long, in seconds, counts by itself: what disturbs a run is short beside it.
LONG_S = 10.0


class Run(Protocol):
    """One run of one program on all ranks of a machine; see Simulation."""

    trace: Trace
    fed_s: list[float]

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs the program on every rank until all are done."""

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One run of a study. `case` names it: runs of the same case do the same, and one of them is reported;
    it is empty for a run that is only drawn. `title`: the name for people. `model`: the model that the
    program's graphs come from. `holds`: how large a real machine's buffers must be, in numbers that the study
    knows (`context`, `tokens`, `kv_tokens`, ...). `warmup_launches`: how many launches a real machine ignores
    before it measures verbs and ops. The other fields are those of Simulation."""

    model: object
    price: Pricer
    roofline: Roofline
    overheads: Overheads
    mesh: Mesh = field(default_factory=lambda: {"tensor": 1})
    outcomes: Outcomes = field(default_factory=dict)
    rates: Rates = max_min_rates
    lockstep: Sequence[str] = ()
    rows: bool = False
    graph_pricer: GraphPricer | None = None
    cuts: Cuts | None = None
    device_sizes: DeviceSizes = no_device_sizes
    power: PowerLimit | None = None
    others: Sequence[RankKind] = ()
    case: str = ""
    title: str = ""
    holds: Mapping[str, Any] = field(default_factory=dict)
    warmup_launches: int = 0


Start = Callable[[Setup], Run]


def simulated(setup: Setup) -> Run:
    """Makes a Run on the simulated machine."""
    return Simulation(
        setup.price,
        mesh=setup.mesh,
        roofline=setup.roofline,
        overheads=setup.overheads,
        outcomes=setup.outcomes,
        rates=setup.rates,
        lockstep=setup.lockstep,
        rows=setup.rows,
        graph_pricer=setup.graph_pricer,
        cuts=setup.cuts,
        device_sizes=setup.device_sizes,
        power=setup.power,
        others=setup.others,
    )


def span_by_span(setup: Setup) -> Run:
    """Makes a Run on the simulated machine that records spans, as a real machine does, even if its study
    keeps rows."""
    return simulated(replace(setup, rows=False, graph_pricer=None))
