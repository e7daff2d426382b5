"""The torch machine's time besides kernels: for a launch, for a wait, and for finding an op's operands.

Launch and wait come from ops that do nothing, from pairs of runs with a single difference:

    op_s      one more op in a graph
    launch_s  one more of many queued launches, less its op
    wait_s    a wait for each launch instead of only the last

The operands come from small models of every study: the time of their ops in a run, less the known time of the
kernel alone; for each kind the median over its shapes. States look up buffers, cut views and convert number
formats in Python, so one constant for each kind is enough.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import median

import torch

from simcore.kernels.table import TABLE
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import load_config
from simcore.models.long_convolution import LongConvolution
from simcore.models.served_decoder import ServedDecoder, decode_sizes, step_sizes
from simcore.ops.convolution import IMPLEMENTATIONS
from simcore.ops.op import Graph, Op, Pricer, Work
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.lazy import lazy
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.validate.machines.buffers.decoder import decoder_states
from simcore.validate.machines.buffers.long_convolution import long_convolution_state
from simcore.validate.machines.buffers.served import served_states
from simcore.validate.machines.cpu.machine import State, TorchRun
from simcore.validate.timing.op_times import op_times

MODEL = Path(__file__).resolve().parents[2] / "scenarios" / "models" / "tiny-llama.json"
# Launches of one run that measures host costs, and repetitions.
LAUNCHES, REPEATS = 200, 5


class _Idle:
    """A rank on which ops do nothing."""

    def begin(self, batch: object, sizes: object, replay: int) -> None:
        """Does nothing."""

    def execute(self, op: Op) -> None:
        """Does nothing."""

    def meet(self, op: Op, states: object) -> None:
        """Does nothing."""

    def skip(self, op: Op) -> None:
        """Does nothing."""

    def put(self, publication: object, to: object) -> None:
        """Does nothing."""


def _no_work(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


NOTHING = Op("nothing", "nothing", (), "fp32", _no_work)


def host_costs() -> tuple[float, float, float]:
    """Returns op_s, launch_s and wait_s of the torch machine (see the head of this file), each at least 0."""
    one, many = Graph("one", (NOTHING,)), Graph("many", (NOTHING,) * (LAUNCHES + 1))

    def queued(graph: Graph, launches: int) -> Callable[[Machine], Program]:
        def program(m: Machine) -> Program:
            yield m.wait([m.launch(graph) for _ in range(launches)][-1])

        return program

    def waited(m: Machine) -> Program:
        for _ in range(LAUNCHES):
            yield m.wait(m.launch(one))

    single_s = _median_s(queued(one, 1))
    op_s = max(0.0, (_median_s(queued(many, 1)) - single_s) / LAUNCHES)
    queued_s = _median_s(queued(one, LAUNCHES))
    launch_s = max(0.0, (queued_s - single_s) / (LAUNCHES - 1) - op_s)
    wait_s = max(0.0, (_median_s(waited) - queued_s) / LAUNCHES)
    return op_s, launch_s, wait_s


def _median_s(program: Callable[[Machine], Program]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        run = TorchRun([_Idle()])
        begun_s = time.perf_counter()
        run.run(program)
        seconds.append(time.perf_counter() - begun_s)
    return median(seconds[1:])


# -- operands ----------------------------------------------------------------------------------------------


def operand_costs(price: Pricer, traces: Iterable[Trace] | None = None) -> dict[str, float]:
    """Returns, by kind of op, the seconds of a run beyond `price`, the time of the kernel alone; at least 0.
    `traces`: real runs (default: small models of every study)."""
    over: dict[str, list[float]] = {}
    for op, seconds in op_times(sample_runs() if traces is None else traces).items():
        if op.kind in TABLE:
            over.setdefault(op.kind, []).append(median(seconds) - price(op).seconds)
    return {kind: max(0.0, median(each)) for kind, each in over.items()}


def sample_runs() -> Iterator[Trace]:
    """Yields runs of small models on the torch machine."""
    for weights in ("fp32", "bf16"):
        dtypes = Dtypes(weights, weights)
        yield from (_decoded(dtypes), _served(dtypes))
    for implementation in IMPLEMENTATIONS:
        tiles = tuple((1 << power, implementation) for power in range(6))
        model = LongConvolution(layers=2, channels=64, tokens=33, dtype="fp32", tiles=tiles)
        yield _convolved(model, fractal_tiling)
    yield from (_convolved(model, schedule) for schedule in (lazy, eager))


def _run(states: list[State], program: Callable[[Machine], Program]) -> Trace:
    return TorchRun(states, mesh={"tensor": 1}).run(program)


def _decoded(dtypes: Dtypes) -> Trace:
    model = Decoder(load_config(MODEL), batch=2, dtypes=dtypes)
    states = decoder_states(model, {"tensor": 1}, 0, 64, 16)
    return _run([*states], lambda m: tensor_parallel(m, model, tokens=16, context=64))


def _served(dtypes: Dtypes) -> Trace:
    model = ServedDecoder(load_config(MODEL), 1, dtypes)

    def program(m: Machine) -> Program:
        for _ in range(3):
            for tokens in (16, 64):
                sizes = step_sizes(0, 0, [(tokens, 0)], 1)
                yield m.wait(m.launch(model.prefill, sizes=sizes))
                sizes = step_sizes(2, 2 * tokens, [(tokens, 0)], 1)
                yield m.wait(m.launch(model.mixed, sizes=sizes))
                yield m.wait(m.launch(model.move, sizes={"tokens": tokens}))
            for sequences in (1, 2, 4):
                yield m.wait(m.launch(model.decode, sizes=decode_sizes(sequences, 64 * sequences)))

    return _run([*served_states(model, {"tensor": 1}, 0, 1024)], program)


def _convolved(model: LongConvolution, schedule: Callable[..., Program]) -> Trace:
    state = long_convolution_state(model, dtype=torch.float32)
    return _run([state], lambda m: schedule(m, model, []))
