"""The kernels that a scenario launches on a card, known beforehand: the simulated machine launches the same.

A kernel is compiled at its first launch, for a second or more, and a run launches one after another. Known
beforehand, all are compiled in parallel (`simcore.validate.timing.compile_ahead`).
"""

import time
from collections.abc import Hashable, Iterable
from typing import Any

from simcore.assembly import Place, assemble
from simcore.devices.interpolation import TILES
from simcore.kernels.long_convolution.placed_tiles import power_from
from simcore.kernels.table import TABLE
from simcore.machine.trace import Trace
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.linear_layer import DECODE, PROMPTS
from simcore.ops.op import Op
from simcore.scenario import Scenario
from simcore.sim.runs import Run, Setup, simulated, span_by_span
from simcore.studies import tiling
from simcore.studies.common import Progress
from simcore.studies.tiling.scenario import TilingScenario
from simcore.validate.machines.buffers.cuda_served import captured_ops
from simcore.validate.machines.cuts import units
from simcore.validate.timing.compile_ahead import Try, as_compiled, launch
from simcore.validate.timing.op_times import op_times, plain

# The longest wait for kernels; kernels still missing then are compiled at their launch.
MOST_S = 600.0
# Dimensions of rows and columns that grow from position to position.
GROWING = ("inputs", "outputs")
# Kinds of op that a step which serves runs otherwise than alone.
SERVED = frozenset({"rotary", "kv_append", "paged_attention", "prefill_attention", DECODE, PROMPTS})


def compile_for(scenario: Scenario, where: str, progress: Progress, tried: Try | None = None) -> None:
    """Compiles the kernels that a scenario launches; `tried`: a function that launches an op once. Raises
    InputError or ModelError with one line."""
    ops = [*{_captured(op): op for op in launched(scenario, where, progress)}.values()]
    until_s = time.perf_counter() + MOST_S
    # Each side has kernels of its own, and a scenario need not have a smaller tile of it.
    compiled = as_compiled(ops, lambda op: op, until_s, tried or launch, whatever=TILES)
    for done, _ in enumerate(compiled):
        progress("compiling for op", done, len(ops))
    progress("compiling for op", len(ops), len(ops))


def _captured(op: Op) -> Hashable:
    """Returns what tells the kernels of ops apart, as far as it is known: rows and columns of as many
    programs are the same."""
    if op.kind not in ("conv_row", "conv_column"):
        return op
    return (
        op.kind,
        op.dtype,
        tuple((name, power_from(op[name]) if name in GROWING else op[name]) for name, _ in op.shape),
    )


def launched(scenario: Scenario, where: str, progress: Progress) -> list[Op]:
    """Returns the ops with kernels that a scenario launches on the simulated machine, each once, wherever it
    runs. Raises InputError or ModelError with one line."""
    found: dict[Op, None] = {}
    last: list[Trace] = []

    def add(ops: Iterable[Op]) -> None:
        every = (plain(unit) for op in ops for unit in units(op))
        found.update(dict.fromkeys(op for op in every if op.kind in TABLE))

    def take() -> None:
        add(op_times(last))
        last.clear()

    if isinstance(scenario, TilingScenario):
        # Known from its order, without a run of 100,000 tokens.
        study: Any = assemble(scenario, where).study
        add(tiling.launched(study.bench))
        return list(found)

    def start(setup: Setup) -> Run:
        if isinstance(setup.model, ServedDecoder):
            # A card serves with rounded sizes.
            steps = [plain(unit) for op in captured_ops(setup.model, setup.holds) for unit in units(op)]
            found.update(dict.fromkeys(op for op in steps if op.kind in TABLE and op.kind not in SERVED))
            return simulated(setup)
        # The traces of all cases may not fit into memory together.
        take()
        run = span_by_span(setup)
        last.append(run.trace)
        return run

    assemble(scenario, where, Place("launched", start)).study.run(progress)
    take()
    return list(found)
