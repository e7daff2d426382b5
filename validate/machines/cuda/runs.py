"""Runs a study's programs on the CUDA card of this machine: one `Card` for each case, first runs discarded.

A service runs once, because its requests come once. Before that, all steps that are captured are rehearsed.

First runs compile, fill caches and capture. More are discarded until those that capture nothing have taken
WARM_S. They are rehearsals: of a long run one does, which launches each graph a few hundred times. At first a
card's clocks are low, and launches take twice as long. The next runs count; before each the host is kept busy
until it is at its pace (`pace`), as it is when it decodes all the time. The states of a case are reset before
each run. Each rank of a mesh has its card.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from simcore.input.files import InputError
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Pricer
from simcore.sim.power import PowerLimit
from simcore.sim.runs import Run, Setup
from simcore.sim.simulation import Route
from simcore.validate.benchmarks.timing import one_line, version_of
from simcore.validate.calibration.cuda_host import host_costs
from simcore.validate.calibration.cuda_power import cap_times
from simcore.validate.machines.buffers.cuda_served import rehearsal
from simcore.validate.machines.buffers.decoder import Weights
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card, CardRun
from simcore.validate.machines.cuda.states import CardStates
from simcore.validate.machines.here import operands_of, reported
from simcore.validate.machines.processes import Apart
from simcore.validate.timing.allocator import take_memory_in_segments
from simcore.validate.timing.cuda_times import FAILURES
from simcore.validate.timing.pace import pace
from simcore.workload.requests import Request

# Seconds by the names of `machine.Overheads`.
Costs = Mapping[str, float]
# Runs a program once, or rehearses it; returns the run and its seconds.
Once = Callable[[bool], tuple[CardRun, float]]
# The most discarded runs that capture, and the seconds that discarded runs without captures take together.
MOST_WARM_UPS, WARM_S = 3, 0.05
# A run shorter than this counts right after other runs, which take this long together.
SHORT_S = 5e-3
# Services share what is rehearsed.
SERVICES = "services"
# What is recorded of each process, where instances are processes.
OF_EACH = "prepared", "captured", "host"


@dataclass(slots=True, eq=False)
class _Case:
    """A card with the states of a case; `warm`: titles of runs for which it is warmed up, or SERVICES;
    `run_s`: time of a warm-up run."""

    key: Any
    card: Card
    warm: set[str] = field(default_factory=set)
    run_s: float = math.inf

    @property
    def joined(self) -> bool:
        """Whether ranks wait for each other inside captured stages."""
        return any(state.joined for state in self.card.states)

    def reset(self) -> None:
        """Resets the states to the start of a run."""
        with torch.inference_mode():
            for state in self.card.states:
                state.reset()
        self.card.api.synchronize()


class CountedRun:
    """A run that counts, with its host at its pace if possible; before the first run of each strategy
    of a case, some that do not count (`_warm_up`). A finished run no longer refers to its case: otherwise it
    would keep the case's memory from the next one. `ended` gets the run, whether its host was at its pace,
    and the seconds of first runs."""

    def __init__(
        self,
        case: _Case,
        start: Callable[[bool], CardRun],
        title: str,
        ended: Callable[[CardRun, bool, float], None],
        rehearse: Callable[[Machine], Program] | None = None,
    ) -> None:
        self._ended, self._title = ended, title
        self._held: tuple[_Case, Callable[[bool], CardRun]] | None = case, start
        self.trace, self.fed_s = Trace(), list[float]()
        self._feeds: list[tuple[int | Route, str, Iterable[tuple[float, object]]]] = []
        self.rehearse = rehearse
        self._live: CardRun | None = None

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """See `runs.Run`. Raises InputError if the card has too little memory, or if graphs are still
        captured in the run that counts."""
        assert self._held is not None, "a run runs once"
        (case, start), self._held = self._held, None

        rehearse = self.rehearse

        def once(
            rehearsal: bool, runs: Callable[[Machine], Program] = rehearse or program
        ) -> tuple[CardRun, float]:
            """Runs or rehearses a program from the start of the case; returns the run and its seconds."""
            case.reset()
            # A program for rehearsals is short, and its requests want what is computed.
            run, begun_s = start(rehearsal and rehearse is None), time.perf_counter()
            if runs is program:
                self._live = run
                for feed in self._feeds:
                    run.feed(*feed)
            run.run(runs)
            return run, time.perf_counter() - begun_s

        with _memory_of(self._title):
            begun_s = time.perf_counter()
            # Another strategy on the same states needs other captures; those that serve are rehearsed by one
            # program. Ranks that wait for each other cannot capture in a run that counts.
            warm_for = self._title if rehearse is None else SERVICES
            if (warm_for not in case.warm or case.joined) and _warm_up(case, once):
                case.warm.add(warm_for)
            first_runs_s = time.perf_counter() - begun_s
            if rehearse is None:
                run, at_pace = pace().keeps(lambda: self._attempt(case, once))
            else:
                # Requests come once.
                at_pace = pace().settle()
                run = once(False, program)[0]
                at_pace = at_pace and not run.fresh
        self.trace, self._live = run.trace, None
        self.fed_s += run.fed_s
        self._ended(run, at_pace, first_runs_s)
        return run.trace

    def _attempt(self, case: _Case, once: Once) -> CardRun:
        # A short run comes right after others: the first launch of a host that did other work before takes
        # ten times as long as its second.
        until_s = time.perf_counter() + SHORT_S
        while case.run_s < SHORT_S and time.perf_counter() < until_s:
            once(False)
        run, _ = once(False)
        if run.fresh:
            raise InputError(
                f"--on cuda: {self._title}: {run.fresh} graphs were captured in the run that counts, after"
                " others before it; its times would be those of capturing"
            )
        return run

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """See `runs.Run`. Raises InputError where discarded runs are of the same program: they would take the
        items."""
        if self.rehearse is None:
            raise InputError(f"--on cuda: nothing is fed into {inbox!r} on a card yet")
        if self._live is not None:
            self._live.feed(to, inbox, arrivals)
        else:
            self._feeds.append((to, inbox, arrivals))


def _warm_up(case: _Case, once: Once) -> bool:
    """Makes runs that do not count; returns whether one of them captured nothing, as the next will not."""
    captured, warm_s, case.run_s = 0, 0.0, math.inf
    while captured < MOST_WARM_UPS and warm_s < WARM_S:
        run, run_s = once(True)
        if run.passed_over:
            # Of a long run all is captured, and the card has worked.
            case.run_s = run_s
            return True
        if run.fresh:
            captured += 1
        else:
            case.run_s = run_s
            warm_s += run_s
    if case.joined:
        # In rehearsals ranks do not wait for each other.
        case.run_s = once(False)[1]
    return warm_s > 0.0


@contextmanager
def _memory_of(title: str) -> Iterator[None]:
    """Raises InputError if the card's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        held, kept = (f"{size / 1e9:.1f} GB" for size in _held_bytes())
        words = " ".join(str(error).split()).partition(". GPU")[0]
        raise InputError(f"--on cuda: {title}: {words}; {held} are in use, {kept} kept") from None


def _held_bytes() -> tuple[int, int]:
    """Returns the bytes of tensors on the card, and the bytes reserved for tensors."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


@dataclass(slots=True)
class CardInstance:
    """The machine of a process that shares the weights of a served model with others (`machines.workers`)."""

    card: "RealCard"
    by_op: bool = False

    def start(self, setup: Setup) -> Run:
        """Makes a run on the card."""
        # Its trace goes to the process that asked for it.
        self.card.started.clear()
        return self.card.start(setup)

    def answer(self, request: Request) -> list[int]:
        """Returns the ids that a request was given, as long as others have not taken its place."""
        return self.card.answer(request)

    @property
    def described(self) -> Mapping[str, Any]:
        """How its runs were prepared, the pace of its host, and the memory that its process holds besides the
        shared weights."""
        said = {name: said for name, said in self.card.described.items() if name in OF_EACH}
        held, kept = _held_bytes()
        return {**said, "held": f"{held / 1e9:.2f} GB in tensors, {kept / 1e9:.2f} GB kept for them"}


def card_instance(weights: Weights) -> CardInstance:
    """Returns the machine of a process on the card of this machine, with the weights of another one."""
    card = this_machine(1)
    card.states.given = weights
    return CardInstance(card)


@dataclass
class RealCard:
    """Starts runs on a card and keeps the traces of each case, which is run `repeats` times. `api` makes
    the api of a `Card`; `at_pace`: whether the host was at its pace before and after each run that counts
    (`simcore.validate.timing.pace`); `captured`: graphs captured in them; `memory`: how the card's memory is
    taken, in words. `compiling_s`: time of compiling beforehand; `first_runs_s`: time of first runs, which
    compile the rest, capture and warm up; `operands`: where those of the last run come from, in words;
    `apart`: runs of several processes."""

    repeats: int
    states: CardStates
    api: Callable[[], CudaApi] = TorchCudaApi
    started: dict[str, list[Trace]] = field(default_factory=dict)
    at_pace: list[bool] = field(default_factory=list)
    captured: int = 0
    memory: str = ""
    compiling_s: float = 0.0
    first_runs_s: float = 0.0
    power_cap: str = ""
    operands: str = operands_of(None)
    apart: Apart = field(default_factory=lambda: Apart(card_instance))
    _case: _Case | None = field(default=None)
    _in_loops: Costs | None = field(default=None)

    @property
    def traces(self) -> list[Trace]:
        """Same as `simcore.validate.machines.here.reported`."""
        return reported(self.started)

    @property
    def described(self) -> dict[str, Any]:
        """The birth record of the runs here, for provenances."""
        runs = len(self.at_pace)
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "card": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
            "torch": str(torch.__version__),
            "triton": version_of("triton"),
            "cuda": torch.version.cuda,
            "runs": f"{self.repeats} a case, the median counts, of a service and of a long run one; first"
            " runs were thrown away",
            "cache": "as the run itself leaves it; launches of an operator go round as many sets of operands"
            " as the L2 cache has no room for",
            "how": f"captured graphs on streams, each rank on its card; {self.operands}",
            **({"memory": self.memory} if self.memory else {}),
            **({"card_power_cap": self.power_cap} if self.power_cap else {}),
            **({"prepared": self._prepared} if runs else {}),
            **({"captured": f"{self.captured} graphs in runs that count"} if self.captured else {}),
            **({"host": f"at its pace before and after {sum(self.at_pace)} of {runs} runs"} if runs else {}),
            **({**self.apart.described, "mps": _mps()} if self.apart.described else {}),
        }

    @property
    def _prepared(self) -> str:
        first = f"first runs, which capture, took {self.first_runs_s:.3g} s"
        return f"compiled in {self.compiling_s:.3g} s; {first}"

    def host_costs(self, case: str) -> Costs:
        """Returns the times of verbs in the reported run of a case; for verbs that it did not use, their
        times in a loop (`simcore.validate.calibration.cuda_host`)."""
        if self._in_loops is None:
            self._in_loops = host_costs(self.api())
        runs = self.started.get(case)
        traces = reported({case: runs}) if runs else []
        return {**self._in_loops, **traces[0].verbs} if traces else self._in_loops

    def cap_times(self, limit: PowerLimit, price: Pricer) -> float:
        """Measures by how much this card's power cap is lower than that of the card of the law, whose prices
        these are; 1 where that cannot be measured."""
        self.release()
        try:
            found = cap_times(limit, price)
            self.power_cap = f"{1.0 / found:.3f} times that in the profile, by products under load"
        except FAILURES as error:
            found, self.power_cap = 1.0, f"not measured: {one_line(error)}"
        _collect()
        return found

    def start(self, setup: Setup) -> Run:
        """Makes a run on the case's card, with its buffers reset; in processes of its own if its strategy
        says so."""
        self.operands = operands_of(setup.model)
        title = setup.title or setup.case or "this case"
        if setup.holds.get("processes"):
            return self._start_apart(setup, title)
        self.apart.close()
        case = self._case_of(setup, title)

        def begin(rehearsal: bool) -> CardRun:
            return case.card.start(
                outcomes=setup.outcomes,
                roofline=setup.roofline,
                weight=setup.price,
                warmup_launches=setup.warmup_launches,
                rehearsal=rehearsal,
            )

        traces = self.started.setdefault(setup.case, [])

        def ended(run: CardRun, at_pace: bool, first_runs_s: float) -> None:
            traces.append(run.trace)
            self.at_pace.append(at_pace)
            self.captured += run.fresh
            self.first_runs_s += first_runs_s

        return CountedRun(case, begin, title, ended, _rehearsal_of(setup))

    def _start_apart(self, setup: Setup, title: str) -> Run:
        """Makes a run of several processes; this one keeps on the card only their weights."""
        model = setup.model
        assert isinstance(model, ServedDecoder)

        def weights() -> Weights:
            self.release()
            with _memory_of(title):
                found = self.states.weights_for_others(model)
            # Frees the memory in which they were drawn.
            _collect()
            return found

        run = self.apart.start(setup, weights)
        self.started.setdefault(setup.case, []).append(run.trace)
        return run

    def answer(self, request: Request) -> list[int]:
        """Returns the ids that a request of the last service was given, as long as others have not taken its
        place."""
        assert self._case is not None
        found: list[int] = self._case.card.states[0].cache.answer(request)
        return found

    def release(self) -> None:
        """Frees all that is on the card."""
        self.apart.close()
        self._case = None
        self.states.forget()
        _collect()

    def _case_of(self, setup: Setup, title: str) -> _Case:
        """Returns the last case if it is the same, else a new one: two may not fit into memory together."""
        # The same for equal set-ups, whether or not one of them is reported.
        holds = tuple(sorted(setup.holds.items()))
        mesh = dict(setup.mesh)
        lockstep = tuple(axis for axis in setup.lockstep if mesh.get(axis, 1) > 1)
        key = (setup.model, tuple(mesh.items()), holds, lockstep)
        if self._case is None or self._case.key != key:
            self._case = None
            _collect()
            with _memory_of(title):
                card = Card(self.states.of(setup), self.api(), mesh=mesh, lockstep=lockstep)
            # Frees the memory in which states were drawn, before small lasting objects are put there.
            _collect()
            self._case = _Case(key, card)
        return self._case


def _mps() -> str:
    """Returns whether CUDA's Multi-Process Service runs, in words."""
    pipes = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    runs = (pipes / "control").exists()
    return "runs: kernels of several processes at once" if runs else "does not run: processes take turns"


def _rehearsal_of(setup: Setup) -> Callable[[Machine], Program] | None:
    """Returns a program that captures what a run needs which cannot be run twice: one that serves."""
    model, holds = setup.model, setup.holds
    if not isinstance(model, ServedDecoder):
        return None
    return lambda m: rehearsal(m, model, holds)


def _collect() -> None:
    """Returns memory to the driver: that of captured graphs, which are in reference cycles, and cuBLAS's 32
    MiB for each stream that it has used, which would keep the gigabytes around them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        clear: Any = torch._C._cuda_clearCublasWorkspaces
        clear()
        # Weights that other processes shared, once these have let go of them.
        cuda: Any = torch.cuda
        cuda.ipc_collect()
        torch.cuda.empty_cache()


def this_machine(repeats: int, compiling_s: float = 0.0) -> RealCard:
    """Returns the card of this machine; `compiling_s`: what was spent to compile for it."""
    properties: Any = torch.cuda.get_device_properties(0)
    memory, states = take_memory_in_segments(), CardStates(int(properties.L2_cache_size))
    return RealCard(repeats, states, memory=memory, compiling_s=compiling_s)
