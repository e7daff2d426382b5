"""Runs a study's programs on the CPU of this machine: the torch machine, with the buffers of the model.

All ops run one after another, whatever their stream or rank; times are by the wall clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from simcore.input.files import InputError
from simcore.kernels.kernel import DTYPES as FORMATS
from simcore.kernels.table import TABLE
from simcore.machine.trace import Trace
from simcore.models.decoder import Decoder
from simcore.models.long_convolution import LongConvolution
from simcore.models.prompt import ORIGINAL, PROMPT_METHODS, Prompt
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op, Pricer
from simcore.scenario import Scenario
from simcore.sim.power import PowerLimit
from simcore.sim.runs import Run, Setup
from simcore.studies.common import middle_first
from simcore.studies.operators.scenario import PromptScenario
from simcore.validate.calibration.cpu import processor
from simcore.validate.machines.buffers.decoder import Weights, decoder_states, shards
from simcore.validate.machines.buffers.long_convolution import long_convolution_state
from simcore.validate.machines.buffers.prompts import prompt_state
from simcore.validate.machines.buffers.served import ServedState, served_states
from simcore.validate.machines.cpu.machine import ONE_AFTER_ANOTHER, TorchRun, one_thread
from simcore.validate.machines.processes import Apart, ProcessRun
from simcore.validate.machines.state import State, run_kernel
from simcore.workload.requests import Request

SEED = 0


def operands_of(model: object) -> str:
    """Returns where the operands of a model's ops come from, for a birth record."""
    drawn = f"operands random, by seed {SEED}"
    if not isinstance(model, Decoder | ServedDecoder):
        return drawn
    directory = model.config.weights
    return f"{drawn}, but weights read from {directory.resolve()}" if directory else f"{drawn}, weights too"


class OperatorState(State):
    """Random inputs of one operator, which has run once on them already: a run times the operator alone."""

    def __init__(self, op: Op) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.inputs = TABLE[op.kind].inputs(op, generator, torch.device("cpu"))
        self.execute(op)

    def execute(self, op: Op) -> None:
        """Runs the operator on its inputs."""
        run_kernel(op, *self.inputs)


def states(setup: Setup) -> Sequence[State]:
    """Returns the buffers of each rank for the model of a set-up. Raises TypeError for an unknown model."""
    model, holds = setup.model, setup.holds
    match model:
        case Decoder():
            return decoder_states(model, setup.mesh, SEED, holds["context"], holds["tokens"])
        case ServedDecoder():
            return served_states(model, setup.mesh, SEED, holds["kv_tokens"], holds["shared_text"])
        case LongConvolution():
            half = bool(holds.get("half_storage"))
            dtype = COMPUTED[model.dtype]
            return [long_convolution_state(model, seed=SEED, dtype=dtype, half_storage=half)]
        case Op():
            return [OperatorState(model)]
        case Prompt():
            return [prompt_state(model, SEED)]
        case _:
            raise TypeError(f"no buffers are known for a {type(model).__name__}")


# How long convolutions are computed: in half precision a CPU has no FFT and few fast kernels.
COMPUTED = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.float32,
    "fp16": torch.float32,
}


def check_formats(scenario: Scenario, where: str, device: str = "the CPU") -> None:
    """Raises InputError for a number format in which torch does not compute here."""
    given = {"dtype": getattr(scenario, "dtype", None)}
    given |= {f"dtypes.{name}": dtype for name, dtype in getattr(scenario, "dtypes", {}).items()}
    for field_, dtype in given.items():
        if dtype is not None and dtype not in FORMATS:
            allowed = ", ".join(FORMATS)
            raise InputError(f"{where}: {field_}: is {dtype!r}; on {device} {allowed} are allowed")


def check_prompts(scenario: Scenario, where: str, device: str = "the CPU") -> None:
    """Raises InputError for a way of computing prompts that is priced alone."""
    if isinstance(scenario, PromptScenario) and ORIGINAL in scenario.methods:
        allowed = ", ".join(method for method in PROMPT_METHODS if method != ORIGINAL)
        raise InputError(
            f"{where}: methods[{scenario.methods.index(ORIGINAL)}]: {ORIGINAL}, a model's published code, is"
            f" priced and not run; on {device} {allowed} are allowed"
        )


@dataclass
class CpuInstance:
    """The machine of a process that shares the weights of a served model with others (`machines.workers`)."""

    weights: Weights
    by_op: bool = True
    _states: Sequence[ServedState] = ()

    def __post_init__(self) -> None:
        one_thread()

    def start(self, setup: Setup) -> Run:
        """Makes a run with a KV cache of its own."""
        model, holds = setup.model, setup.holds
        assert isinstance(model, ServedDecoder)
        self._states = served_states(model, setup.mesh, SEED, holds["kv_tokens"], weights=[self.weights])
        return TorchRun(self._states, mesh=setup.mesh)

    def answer(self, request: Request) -> list[int]:
        """Returns the ids that a request was given so far."""
        return self._states[0].answers[request.id]

    @property
    def described(self) -> Mapping[str, Any]:
        """Nothing: all is as in other runs."""
        return {}


def shared_weights(model: object) -> Weights:
    """Returns the weights of a served model on one rank. Raises TypeError for another model."""
    if not isinstance(model, ServedDecoder):
        raise TypeError(f"a {type(model).__name__} is not held by several processes")
    (found,) = shards(model.config, model.dtypes, 1, model.style, SEED)
    return found


@dataclass
class Real:
    """Starts runs on the torch machine and keeps the traces of each case, which is run `repeats` times;
    `operands`: where those of the last one come from, in words; `apart`: runs of several processes."""

    repeats: int = 1
    started: dict[str, list[Trace]] = field(default_factory=dict)
    operands: str = operands_of(None)
    apart: Apart = field(default_factory=lambda: Apart(CpuInstance))

    def __post_init__(self) -> None:
        one_thread()

    @property
    def traces(self) -> list[Trace]:
        """Same as `reported`."""
        return reported(self.started)

    @property
    def described(self) -> dict[str, Any]:
        """The birth record of the runs here, for provenances."""
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "processor": processor(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "runs": f"{self.repeats} a case, the median counts; a replica of a service runs once",
            "cache": "as the run itself leaves it; an operator has run once before",
            "how": f"{ONE_AFTER_ANOTHER}; {self.operands}",
            **self.apart.described,
        }

    def host_costs(self, case: str) -> Mapping[str, float]:
        """Returns no costs: on a CPU the times of ops include the host's share."""
        del case
        return {}

    def cap_times(self, limit: PowerLimit, price: Pricer) -> float:
        """Returns 1: no CPU's cap is known to differ."""
        del limit, price
        return 1.0

    def start(self, setup: Setup) -> Run:
        """Makes a run with buffers of its own, in processes of its own if its strategy says so."""
        self.operands = operands_of(setup.model)
        run: ProcessRun | TorchRun
        if setup.holds.get("processes"):
            run = self.apart.start(setup, lambda: shared_weights(setup.model))
        else:
            run = TorchRun(
                states(setup),
                mesh=setup.mesh,
                outcomes=setup.outcomes,
                lockstep=setup.lockstep,
                roofline=setup.roofline,
            )
        run.trace.warmup_launches = setup.warmup_launches
        self.started.setdefault(setup.case, []).append(run.trace)
        return run


def reported(started: Mapping[str, Sequence[Trace]]) -> list[Trace]:
    """Returns the trace of the run of median length of each case: the run that is reported. Leaves out runs
    that are only drawn."""
    cases = [traces for case, traces in started.items() if case]
    return [middle_first(traces, lambda trace: trace.end_s)[0] for traces in cases]
