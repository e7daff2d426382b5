"""What a scenario launches on a card, known before it runs there: the simulated machine launches the same.

A kernel is compiled for a second or more where it is first launched, and a run launches one after the other;
known beforehand, all are compiled side by side (`simcore.validate.timing.compile_ahead`).
"""

import time

from simcore.assembly import Place, assemble
from simcore.kernels.table import TABLE
from simcore.machine.trace import Trace
from simcore.ops.op import Op
from simcore.scenario import Scenario
from simcore.sim.runs import Run, Setup, span_by_span
from simcore.studies.common import Progress
from simcore.validate.machines.cuts import units
from simcore.validate.timing.compile_ahead import Try, as_compiled
from simcore.validate.timing.op_times import op_times, plain

# For so long kernels are waited for; what is missing then is compiled where it is launched.
MOST_S = 600.0


def compile_for(scenario: Scenario, where: str, progress: Progress, tried: Try | None = None) -> None:
    """Has compiled what a scenario launches; `tried`: what launches an op once. Raises InputError or
    ModelError with one line."""
    ops = launched(scenario, where, progress)
    until_s = time.perf_counter() + MOST_S
    for done, _ in enumerate(as_compiled(ops, lambda op: op, until_s, tried)):
        progress("compiling for op", done, len(ops))
    progress("compiling for op", len(ops), len(ops))


def launched(scenario: Scenario, where: str, progress: Progress) -> list[Op]:
    """Ops with kernels that a scenario launches on the simulated machine, each once, wherever it works.
    Raises InputError or ModelError with one line."""
    found: dict[Op, None] = {}
    last: list[Trace] = []

    def take() -> None:
        ops = [plain(unit) for op in op_times(last) for unit in units(op)]
        found.update(dict.fromkeys(op for op in ops if op.kind in TABLE))
        last.clear()

    def start(setup: Setup) -> Run:
        # Traces of all cases may not have room beside each other.
        take()
        run = span_by_span(setup)
        last.append(run.trace)
        return run

    assemble(scenario, where, Place("launched", start)).study.run(progress)
    take()
    return list(found)
