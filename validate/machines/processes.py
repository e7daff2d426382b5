"""Runs whose streams are processes of their own, which share the model's weights (`machines.workers`).

    the program of a run, on one host  ->  launch on "instance 3"  ->  the worker that holds "instance 3"

The schedule is the one that all machines run. A launch is a small message that tells whose tokens are
computed. So one host decides, and each stream is a process with its own CUDA context, KV cache, captured
graphs and host. Times in the trace are by the clocks of the workers.

Launches here wait for nothing on the device and decide nothing there: instances are independent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan, prod
from typing import Any

from simcore.input.files import InputError
from simcore.machine.machine import Flag, Machine, Program
from simcore.machine.trace import Cause, Mark, PricedOp, Span, Trace
from simcore.ops.op import Graph
from simcore.sim.runs import Setup
from simcore.validate.machines.host import HostSide
from simcore.validate.machines.launches import Device, Launch, SignalTicket, Steps, TorchTicket, measured
from simcore.validate.machines.shares import SharedOut
from simcore.validate.machines.workers import (
    FINISH,
    REQUEST,
    Ask,
    Begin,
    Ended,
    Maker,
    Order,
    Pool,
    Replay,
    Stop,
    Told,
    Worker,
)
from simcore.workload.requests import Batch, Request

# Each has libraries and, on a card, a context of its own: some 0.5 GB of memory.
MOST_WORKERS = 64
# The longest wait for what workers say, s.
LOOK_S = 1.0
TIMED, SHARED = "wall clock of its process", "its share of a graph's time, by the clock of its process"


@dataclass(slots=True, eq=False, repr=False)
class _Ticket:
    """The ticket of a launch; see `TorchTicket`. `worker`: that which has the launch `number`."""

    worker: Worker | None = None
    number: int = -1
    ran: int = 0
    end: Cause | None = None

    def stop(self) -> None:
        """Asks the worker to end the launch at its next replay boundary."""
        if self.worker is not None and self.end is None:
            self.worker.send(Stop(self.number))

    # Waiting for it is as for any ticket of a host loop.
    done = TorchTicket.done


class ProcessRun(Device):
    """One run of one program whose streams are the workers of a pool; the verbs of `sim.runs.Run`. `ended`
    gets what each worker says of itself, by its name; `failed` is called before an error leaves `run`."""

    def __init__(
        self,
        pool: Pool,
        setup: Setup,
        ended: Callable[[Mapping[str, Any]], object],
        failed: Callable[[], object],
    ) -> None:
        self._pool, self._setup, self._ended, self._failed = pool, setup, ended, failed
        self.working = []
        self._host = host = HostSide(self, dict(setup.mesh), ())
        self.trace, self.fed_s, self.now, self.feed = host.trace, host.fed_s, host.now, host.feed
        self._launches: dict[int, Launch] = {}
        self._under_way = 0
        self._shared = SharedOut(lambda graph: graph, setup.roofline, setup.price)

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs a program on every rank until all are done. Raises WorkerError, or InputError, if a worker
        ends before; there are then no workers left."""
        try:
            self._pool.begin({key: self._begin(key[1]) for key in self._pool.workers})
            self._host.run(program)
            for worker in self._pool.workers.values():
                worker.send(FINISH)
            told: dict[str, Told] = self._pool.gather()
        except BaseException:
            self._failed()
            raise
        for each in told.values():
            self._record(each.replays)
        self.trace.spans.sort(key=lambda span: (span.end_s, span.id))
        self._ended({name: each.described for name, each in told.items()})
        return self.trace

    def answer(self, request: Request) -> list[int]:
        """Returns the ids that a request was given, while the run goes on and its instance has not begun
        another."""
        worker = next(each for each in self._pool.workers.values() if request.id in each.sent)
        worker.send(Ask(request.id))
        while not isinstance(said := worker.receive(), list):
            self._hear(said)
        return said

    def _begin(self, stream: str) -> Begin:
        """Returns the run of one worker: it holds one instance."""
        setup, holds = self._setup, dict(self._setup.holds)
        del holds["processes"]
        holds |= {
            "room_tokens": holds["room_tokens"] // len(holds["streams"]),
            "step_rows": 1,
            "step_tokens": holds["longest_prompt"],
            "streams": [stream],
        }
        title = f"{setup.title}, {stream}"
        return Begin(setup.model, dict.fromkeys(setup.mesh, 1), holds, setup.case, title)

    # -- the interface for the host's side ---------------------------------------------------------------

    def ticket(self) -> _Ticket:
        """Makes a ticket for a launch."""
        return _Ticket()

    def submit(self, launch: Launch) -> None:
        """Sends a launch to the worker of its stream. Raises ValueError for one that more than its stream
        decides about."""
        worker = self._pool.workers.get((launch.rank, launch.stream))
        tied = launch.after or launch.signals or launch.when or launch.sets or launch.within or launch.watches
        own = getattr(self._setup.model, launch.graph.name, None) is launch.graph
        if worker is None or tied or launch.batch is None or not own:
            raise ValueError(
                f"graph {launch.graph.name} on {launch.stream}: streams in processes of their own take the"
                " model's graphs, with a batch, that wait for nothing; a strategy's `streams` names them"
            )
        launch.ticket.worker, launch.ticket.number = worker, launch.id
        self._launches[launch.id] = launch
        self._under_way += 1
        worker.send(_order(launch, worker))

    def go_on(self) -> bool:
        """Takes what workers have said. Returns whether there was anything."""
        return self._take(0.0)

    def under_way(self) -> bool:
        """Whether workers are busy; waits until one says something, or the host has something to do."""
        busy = self._under_way > 0
        if busy:
            self._take(max(0.0, min(self._host.due_s - self.now(), LOOK_S)))
        return busy

    def rest(self, seconds: float) -> None:
        """Waits; the end of a worker is noticed."""
        self._take(seconds)

    def _take(self, timeout_s: float) -> bool:
        took = False
        for _, said in self._pool.said(timeout_s):
            self._hear(said)
            took = True
        return took

    def _hear(self, said: Ended) -> None:
        ticket = self._launches[said.launch].ticket
        ticket.ran, ticket.end = said.ran, Cause(None, said.at_s - self._host.origin_s)
        self._under_way -= 1

    def moment(self, rank: int) -> Cause:
        """Returns the present moment."""
        del rank
        return Cause(None, self.now(), host=True)

    def mark(self, rank: int, name: str, since: Cause, ends: Sequence[Cause]) -> None:
        """Records a mark at the latest of these moments."""
        cause = max((since, *ends), key=lambda each: each.at_s)
        self.trace.marks.append(Mark(rank, name, cause.at_s, cause))

    def take(self, signal: SignalTicket) -> Steps:
        """Raises ValueError: nothing is published here."""
        raise ValueError(f"{signal.name}: streams in processes of their own publish nothing")

    def declare(self, flag: Flag, initial: int) -> None:
        """Raises ValueError: there is no memory for flags that all streams see."""
        raise ValueError(f"{flag.name}: streams in processes of their own have no flags")

    def value_of(self, flag: Flag) -> int:
        """Raises ValueError, as `declare`."""
        raise ValueError(f"{flag.name}: streams in processes of their own have no flags")

    def woke(self) -> None:
        """Does nothing: moments have no span as their cause."""
        return

    # -- records -----------------------------------------------------------------------------------------

    def _record(self, replays: Sequence[Replay]) -> None:
        """Appends the spans of a worker, each caused by its host after the span before it."""
        last: int | None = None
        sources = self.trace.rows.sources
        for each in replays:
            launch, id_ = self._launches[each.launch], len(self.trace.spans)
            start_s, end_s = (at_s - self._host.origin_s for at_s in (each.start_s, each.end_s))
            ops = self._ops(launch.graph, launch.sizes_at(each.replay), end_s - start_s, each.op_s)
            cause, progress = Cause(last, start_s, host=True), ((start_s, 0.0), (end_s, end_s - start_s))
            self.trace.spans.append(
                Span(
                    id_, launch.id, launch.rank, launch.stream, launch.graph.name, "run", launch.issued_s,
                    start_s, end_s, cause, (), ops, progress, replay=each.replay,
                )
            )  # fmt: skip
            sources["measured"] = sources.get("measured", 0.0) + sum(one.price.seconds for one in ops)
            last = id_

    def _ops(
        self, graph: Graph, sizes: Mapping[str, int], took_s: float, op_s: Sequence[float]
    ) -> tuple[PricedOp, ...]:
        """Returns the ops of a replay with their times: the worker's, or shares of the replay's time."""
        shares, floor_s = self._shared.of(graph, 0, len(graph.ops), sizes)
        if not op_s:
            return tuple([measured(op, took_s * share, SHARED, floor_s * share) for op, share in shares])
        roofline = self._setup.roofline
        return tuple(
            [
                measured(op, seconds, TIMED, roofline(op.without_place).seconds)
                for (op, _), seconds in zip(shares, op_s, strict=True)
            ]
        )


def _order(launch: Launch, worker: Worker) -> Order:
    """Returns a launch as it is sent; notes which requests the worker knows."""
    batch: Batch = launch.batch
    here = {request.id: request for request, *_ in batch.prompts}
    here |= {request.id: request for request, _ in batch.decoding}
    here |= {request.id: request for request in batch.moved}
    finished = [
        (id_, request.finish_s)
        for id_, request in worker.sent.items()
        if id_ not in here and not isnan(request.finish_s)
    ]
    for id_, _ in finished:
        del worker.sent[id_]
    worker.sent |= here
    return Order(
        launch.id,
        launch.graph.name,
        launch.stream,
        dict(launch.sizes),
        None if launch.advance is None else dict(launch.advance),
        launch.repeat,
        [tuple([getattr(request, name) for name in REQUEST]) for request in here.values()],
        [(request.id, tokens, first) for request, tokens, first in batch.prompts],
        [(request.id, cached) for request, cached in batch.decoding],
        [request.id for request in batch.moved],
        batch.slot_tokens,
        finished,
    )


@dataclass(slots=True)
class Apart:
    """Starts runs whose streams are processes, and keeps these for the next run with the same model and
    streams. `make`: makes the machine of a worker; `described`: what workers said of their last run."""

    make: Maker
    described: dict[str, Any] = field(default_factory=dict)
    _key: object = None
    _pool: Pool | None = None

    def start(self, setup: Setup, weights: Callable[[], Any]) -> ProcessRun:
        """Makes a run. `weights`: makes those that workers share, called only for new workers. Raises
        InputError for servers of several ranks, and for more processes than MOST_WORKERS."""
        # No more instances run at once than there are requests.
        streams = setup.holds["streams"][: setup.holds["step_rows"]]
        keys = [(rank, stream) for rank in range(prod(setup.mesh.values())) for stream in streams]
        if any(setup.mesh.get(axis, 1) > 1 for axis in setup.lockstep):
            raise InputError(f"{setup.title}: ranks: a process holds one rank; 1 is allowed")
        if len(keys) > MOST_WORKERS:
            raise InputError(
                f"{setup.title}: max_instances: {len(keys)} processes; at most {MOST_WORKERS} are started"
            )
        if self._pool is None or self._key != (setup.model, keys):
            self.close()
            self._pool, self._key = Pool(self.make, weights(), keys), (setup.model, keys)
        return ProcessRun(self._pool, setup, self._note, self.close)

    def close(self) -> None:
        """Ends all workers, so that their memory is free."""
        if self._pool is not None:
            self._pool.close()
        self._pool, self._key = None, None

    def _note(self, found: Mapping[str, Any]) -> None:
        count = f"{len(found)}, one an instance, beside each other, with shared weights"
        each = {name: said for name, said in found.items() if said}
        self.described = {"processes": count, **({"of_each": each} if each else {})}
