"""Processes that share the weights of a model, each with a real machine of its own, and what is said to them.

    host of a run                            worker "instance 3 of rank 0": process, memory, streams, graphs
      pool.begin           -- Begin  -->     machine.start(setup).run(...), which captures first
                           <-- READY --
      launch               -- Order  -->     m.launch(...)
      its ticket is done   <-- Ended --      m.wait(...)
      end of the run       -- FINISH -->
      spans of the trace   <-- Told  --      by the worker's own clocks, on `time.perf_counter`

torch sends tensors of a card as handles (CUDA IPC), and those of a CPU as shared memory: weights are there
once. All processes of a host read one monotonic clock. A worker that ends early is a `WorkerError` that names
it. When the process that started a worker ends, however that is, the worker ends too.
"""

import gc
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from multiprocessing import connection, parent_process, resource_tracker
from select import select
from typing import Any, NamedTuple, Protocol

import torch.multiprocessing

from simcore.input.files import InputError
from simcore.machine.machine import Machine, Overheads, Program, Ticket
from simcore.machine.trace import Trace
from simcore.ops.op import Op, Price
from simcore.sim.runs import Run, Setup
from simcore.sim.simulation import no_floor
from simcore.validate.machines.launches import Need, Steps
from simcore.workload.requests import Batch, Request

READY, FINISH = "ready", "finish"
# If this environment variable is set, a worker prints where an error of it arose.
TRACEBACK = "SIMCORE_TRACEBACK"
# Queues of a card that the context of a process takes. A card has so many channels for all processes, and a
# worker's one stream needs one. With the driver's own number some of sixteen workers are told that memory
# is out, and others take up to 36 s to begin (validate/measured/h200_processes.csv).
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
# Seconds that workers have to end by themselves before they are killed.
LEAVING_S = 5.0
# Of a request, in the order of its constructor. A compiled class loses them where it is pickled.
REQUEST = tuple(each.name for each in fields(Request))


class WorkerError(RuntimeError):
    """A worker ended before its work did; the message names it. `of_process`: it is no fault of the code."""

    of_process = True


class Instance(Protocol):
    """A machine in a worker, made there with the shared weights. `by_op`: whether it times each op."""

    by_op: bool

    def start(self, setup: Setup) -> Run:
        """Makes a run."""

    def answer(self, request: Request) -> list[int]:
        """Returns the ids that a request of the last run was given so far."""

    @property
    def described(self) -> Mapping[str, Any]:
        """What is worth recording of the runs so far."""


# Makes the machine of a worker of the weights; a function that other processes can import.
Maker = Callable[[Any], Instance]


class Begin(NamedTuple):
    """Begins a run. The fields are those of `Setup`."""

    model: object
    mesh: Mapping[str, int]
    holds: Mapping[str, Any]
    case: str
    title: str


class Order(NamedTuple):
    """A launch, by its number. `graph`: an attribute of the model. `prompts`, `decoding`, `moved` as in
    `Batch`, with the ids of `requests`, which are values in the order of `REQUEST`; `finished`: (id,
    finish_s) of earlier ones that have ended."""

    launch: int
    graph: str
    stream: str
    sizes: Mapping[str, int]
    advance: Mapping[str, int] | None
    repeat: int
    requests: Sequence[tuple[Any, ...]]
    prompts: Sequence[tuple[int, int, int]]
    decoding: Sequence[tuple[int, int]]
    moved: Sequence[int]
    slot_tokens: int | None
    finished: Sequence[tuple[int, float]]


class Stop(NamedTuple):
    """Ends a launch at its next replay boundary."""

    launch: int


class Ask(NamedTuple):
    """Asks for the answer of a request that the worker computed last; a list of ids comes back."""

    request: int


class Ended(NamedTuple):
    """A launch has ended after `ran` replays; the worker saw it at `at_s` (time.perf_counter)."""

    launch: int
    ran: int
    at_s: float


class Replay(NamedTuple):
    """A replay of a launch from `start_s` to `end_s` (time.perf_counter); `op_s`: the seconds of each op, or
    none."""

    launch: int
    replay: int
    start_s: float
    end_s: float
    op_s: tuple[float, ...]


class Told(NamedTuple):
    """What a worker says at the end of a run."""

    replays: list[Replay]
    described: Mapping[str, Any]


class Failed(NamedTuple):
    """What a worker says of its error before it ends. `refused`: the input is at fault."""

    says: str
    refused: bool


# -- in a worker -------------------------------------------------------------------------------------------


def _work(pipe: Any, make: Maker) -> None:
    """Gets weights, and performs runs until None comes, or the process at the other end has gone."""
    # Ctrl-C comes to all processes of a terminal; the one that started this one then ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_parent()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            machine = make(pipe.recv())
            while (begin := pipe.recv()) is not None:
                pipe.send(_WorkerRun(pipe, machine, begin).told())
            # Else the memory of weights that are gone would stay taken in the process that made them.
            del machine
            gc.collect()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            refused = isinstance(error, InputError)
            pipe.send(Failed(str(error) if refused else f"{type(error).__name__}: {error}", refused))
            if TRACEBACK in os.environ:
                traceback.print_exc()


def _end_with_parent() -> None:
    """Ends this process as soon as the one that started it has ended."""
    parent = parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (connection.wait([sentinel]), os._exit(1)), daemon=True).start()


def _unpriced(op: Op) -> Price:
    """No price: the host of a run prices and shares out what workers time."""
    del op
    return Price(0.0, 0.0, 0.0, "assumed", "")


class _WorkerRun:
    """One run of a worker: its program launches what it is told to."""

    def __init__(self, pipe: Any, machine: Instance, begin: Begin) -> None:
        self.pipe, self.machine, self.begin = pipe, machine, begin
        # The numbers of launches in the order in which they came; those that have not ended.
        self.came: list[int] = []
        self.open: dict[int, Ticket] = {}
        self.known: dict[int, Request] = {}
        self.origin_s = 0.0

    def told(self) -> Told:
        """Performs the run."""
        model, mesh, holds, case, title = self.begin
        setup = Setup(model, _unpriced, no_floor, Overheads(), mesh, holds=holds, case=case, title=title)
        trace: Trace = self.machine.start(setup).run(self._program)
        replays = [
            Replay(
                self.came[span.launch], span.replay, self.origin_s + span.start_s, self.origin_s + span.end_s,
                tuple(priced.price.seconds for priced in span.ops) if self.machine.by_op else (),
            )
            for span in trace.spans
        ]  # fmt: skip
        return Told(replays, self.machine.described)

    def _program(self, m: Machine) -> Program:
        self.origin_s = time.perf_counter() - m.now()
        self.pipe.send(READY)
        while (said := (yield self._next())) != FINISH:
            match said:
                case Order():
                    self._launch(m, said)
                case Stop(launch) if launch in self.open:
                    self.open[launch].stop()
                case Ask(request):
                    self.pipe.send(self.machine.answer(self.known[request]))

    def _next(self) -> Steps:
        """Waits for what is said next. Nothing else can happen where no launch is under way."""
        if self.open:
            yield Need(lambda: not self.open or bool(select([self.pipe], [], [], 0.0)[0]))
        return self.pipe.recv()

    def _launch(self, m: Machine, order: Order) -> None:
        for id_, finish_s in order.finished:
            self.known.pop(id_).finish_s = finish_s
        of = {values[0]: self._known(values) for values in order.requests}
        batch = Batch(
            [(of[id_], tokens, first) for id_, tokens, first in order.prompts],
            [(of[id_], cached) for id_, cached in order.decoding],
            [of[id_] for id_ in order.moved],
            order.slot_tokens,
        )
        self.came.append(order.launch)
        ticket = self.open[order.launch] = m.launch(
            getattr(self.begin.model, order.graph), stream=order.stream, sizes=order.sizes,
            advance=order.advance, repeat=order.repeat, batch=lambda: batch,
        )  # fmt: skip
        m.spawn(self._follow(m, order.launch, ticket))

    def _known(self, values: Sequence[Any]) -> Request:
        """Returns the one object of a request here, with its values of now: buffers remember it."""
        request = self.known.setdefault(values[0], Request(*values))
        for name, value in zip(REQUEST, values, strict=True):
            setattr(request, name, value)
        return request

    def _follow(self, m: Machine, launch: int, ticket: Ticket) -> Program:
        yield m.wait(ticket)
        del self.open[launch]
        self.pipe.send(Ended(launch, ticket.ran, time.perf_counter()))


# -- in the process of the run -----------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Worker:
    """A process and the pipe to it. `sent`: the requests that it knows, by id."""

    name: str
    process: Any
    pipe: Any
    sent: dict[int, Request] = field(default_factory=dict)

    def send(self, said: object) -> None:
        """Sends something. Raises WorkerError if the worker has ended."""
        try:
            self.pipe.send(said)
        except (BrokenPipeError, ConnectionResetError):
            # It may have said why.
            while True:
                self.receive()

    def receive(self) -> Any:
        """Returns what the worker says next. Raises WorkerError if it has ended, InputError if it refuses."""
        try:
            said = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerError(f"{self.name}: its process {self.process.pid} {self._how()}") from None
        if isinstance(said, Failed):
            raise (InputError if said.refused else WorkerError)(f"{self.name}: {said.says}")
        return said

    def _how(self) -> str:
        self.process.join(LEAVING_S)
        code = self.process.exitcode
        if code is None:
            return "closed its pipe"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}, as where memory is short"
        return f"ended with exit code {code}"


class Pool:
    """Workers that share weights, by what they hold: (rank, stream). The weights stay until `close`."""

    def __init__(self, make: Maker, weights: Any, keys: Sequence[tuple[int, str]]) -> None:
        self.workers: dict[tuple[int, str], Worker] = {}
        self.weights = weights
        context = torch.multiprocessing.get_context("spawn")
        try:
            for rank, stream in keys:
                ours, theirs = context.Pipe()
                name = f"{stream} of rank {rank}"
                process = context.Process(target=_work, args=(theirs, make), name=name, daemon=True)
                with _no_interrupts(), _one_queue():
                    process.start()
                theirs.close()
                self.workers[rank, stream] = Worker(name, process, ours)
            # Not before all have been started: each takes seconds until it reads.
            for worker in self.workers.values():
                worker.send(weights)
        except BaseException:
            # One that still imports would be waited for, and reads half a message.
            self.close(leaving_s=0.0)
            raise

    def begin(self, begins: Mapping[tuple[int, str], Begin]) -> None:
        """Begins a run on each worker; returns once all are ready for launches."""
        for key, begin in begins.items():
            self.workers[key].sent.clear()
            self.workers[key].send(begin)
        self.gather()

    def gather(self) -> dict[str, Any]:
        """Returns what each worker says next, by its name."""
        found: dict[str, Any] = {}
        while len(found) < len(self.workers):
            found |= {worker.name: said for worker, said in self.said(None)}
        return {worker.name: found[worker.name] for worker in self.workers.values()}

    def said(self, timeout_s: float | None) -> Iterator[tuple[Worker, Any]]:
        """Yields what workers have said, after a wait of `timeout_s` at most (None: until one says
        something) if none has. Raises as `Worker.receive`."""
        # Others of its kind wait for whole milliseconds.
        by_pipe = {worker.pipe: worker for worker in self.workers.values()}
        for pipe in select(list(by_pipe), [], [], timeout_s)[0]:
            yield by_pipe[pipe], by_pipe[pipe].receive()

    def close(self, leaving_s: float = LEAVING_S) -> None:
        """Ends all workers: those that have not ended by themselves in so many seconds are killed. With 0
        they are not asked to."""
        for worker in self.workers.values():
            with suppress(OSError):
                if leaving_s:
                    worker.pipe.send(None)
            worker.pipe.close()
        until_s = time.perf_counter() + leaving_s
        for worker in self.workers.values():
            worker.process.join(max(0.0, until_s - time.perf_counter()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self.workers.clear()
        self.weights = None


@contextmanager
def _one_queue() -> Iterator[None]:
    """Processes that start inside take one queue of a card, unless the user says how many. The driver reads
    that before a process runs any code of ours."""
    if QUEUES in os.environ:
        yield
        return
    os.environ[QUEUES] = "1"
    try:
        yield
    finally:
        del os.environ[QUEUES]


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """A process that is started inside never gets a Ctrl-C, not even before it could ignore it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # It would be started by the first process, and lets signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
