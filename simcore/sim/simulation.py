"""The simulated machine: SimPy runs the programs that hardware runs, at the prices of a device model.

    launch starts  = max(issued by its host, stream free, tickets done, signals arrived, last rank arrived)
    launch takes   = sum of its ops' prices / its rate on the device (sharing.py, contention.py)

The event clock drives the host programs and one process per busy stream. A host's own clock runs ahead of the
event clock: each verb adds its cost to the host's clock, and the next wait catches up. A burst (`repeat`)
without flags, signals and collectives is one event, however long.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import simpy

from simcore.machine import mesh as layout
from simcore.machine.machine import (
    Condition,
    DeadlockError,
    Flag,
    Machine,
    MismatchError,
    Overheads,
    Program,
    Setting,
    Verdict,
    holds,
)
from simcore.machine.trace import Cause, PricedOp, Span, State, Trace
from simcore.ops.op import Floor, Graph, Op, Pricer, Publication, Roofline
from simcore.sim.bursts import BurstCost, Origin
from simcore.sim.clock import Clock
from simcore.sim.contention import Demand, Rates, max_min_rates
from simcore.sim.graph_pricer import GraphPricer
from simcore.sim.host import CauseSteps, Launch, Signals, SimMachine, Steps, latest, then
from simcore.sim.power import Alone, Begun, Load, PowerLimit
from simcore.sim.rows import RowLaunch
from simcore.sim.segments import Cuts, Segment, slower
from simcore.sim.sharing import Execution, Listed, Piece, SharedDevice
from simcore.workload.requests import END

# How many origins of prices are summed apart before the sums go into the trace.
MOST_SOURCE_TOTALS = 1 << 12
Route = Callable[[object], Sequence[int]]
Outcomes = Mapping[str, Callable[..., bool]]
DeviceSizes = Callable[[Graph], frozenset[str]]


# What a stream may wait for: texts for DeadlockError.
WAITS_FOR_EARLIER = "launch {0.id} of graph {0.graph.name} waits for launches before it"
WAITS_FOR_SIGNAL = "launch {0.id} of graph {0.graph.name} waits for signal {1.name} of rank {1.source}"
WAITS_FOR_RANKS = "{0.kind} {0.name}: {1} of {2} ranks are there"


def _each_alone(work: BurstCost) -> Iterable[Alone]:
    """The replays of a burst as the power of a card counts them."""
    arithmetic_s, clocked_s, waiting_s = work.arithmetic_s, work.clocked_s, work.waiting_s
    if work.replays == 1:
        return [(arithmetic_s, clocked_s, waiting_s, work.total_s)]
    ends = itertools.chain((0.0,), map(work.end_s, range(work.replays)))
    steps = itertools.pairwise(ends)
    return ((arithmetic_s, clocked_s, waiting_s, end_s - begin_s) for begin_s, end_s in steps)


def _work_of(replays: Sequence[Segment]) -> tuple[float, float]:
    """The seconds of arithmetic and of other work of segments."""
    arithmetic_s = sum([each.arithmetic_s for each in replays])
    return arithmetic_s, sum([each.seconds - each.waiting_s for each in replays]) - arithmetic_s


def no_device_sizes(graph: Graph) -> frozenset[str]:
    """Returns no names: no graph reads a size in the device's memory."""
    del graph
    return frozenset()


def no_floor(op: Op) -> Floor:
    """The roofline of a device without a datasheet: bounds of 0."""
    del op
    return Floor(0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class _Stream:
    rank: int
    name: str
    number: int
    queue: deque[Launch | RowLaunch] = field(default_factory=deque)
    working: bool = False
    free: Cause = field(default_factory=lambda: Cause(None, 0.0))
    since_s: float = 0.0
    # A template and its arguments.
    waiting_for: tuple[Any, ...] = ("a launch that never ends",)
    go_on: Callable[[], None] = field(init=False)

    def waits_for(self) -> str:
        """The text that says what the stream waits for."""
        text, *filled = self.waiting_for
        return str(text).format(*filled)


@dataclass(slots=True, eq=False)
class LaunchInfo:
    """What all launches of a graph have in common. `launch_s`: host time of one launch, of which `back_s`
    comes after the device may begin; `device_sizes`: sizes that the host writes to the device's memory, empty
    if writing costs nothing; `closed`: whether a launch without flags and signals is priced in closed form;
    `number`: the number of the graph's name in rows, -1 unless `closed`."""

    graph: Graph
    launch_s: float
    back_s: float
    device_sizes: frozenset[str]
    closed: bool
    number: int


@dataclass(slots=True, eq=False)
class _SourceTotal:
    """The sum of the work whose prices come from one origin; `longer_s`: what it takes more under load."""

    origin: Origin
    total_s: float = 0.0
    longer_s: float = 0.0
    replays: int = 0


class _Demands(Sequence[Demand]):
    """The demands of segments, computed when read: only while several pieces share the device."""

    def __init__(self, segments: Sequence[Segment], demand: Callable[[Segment], Demand]) -> None:
        self._segments = segments
        self._demand = demand

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, i: Any) -> Any:
        return self._demand(self._segments[i])


@dataclass(frozen=True, slots=True, eq=False)
class RankKind:
    """Ranks of another kind than those before them: fields as of Simulation."""

    price: Pricer
    mesh: layout.Mesh
    roofline: Roofline
    overheads: Overheads
    rates: Rates
    graph_pricer: GraphPricer | None = None
    cuts: Cuts | None = None
    device_sizes: DeviceSizes = no_device_sizes
    power: PowerLimit | None = None


@dataclass(slots=True, eq=False)
class _Ranks:
    """The ranks of a kind, from rank `first` on. `infos`: by id of a graph; `checked_collectives`: those, by
    id, whose `ranks` equals the size of their axis."""

    first: int
    mesh: layout.Mesh
    overheads: Overheads
    device_sizes: DeviceSizes
    graph_pricer: GraphPricer
    cuts: Cuts
    infos: dict[int, LaunchInfo] = field(default_factory=dict)
    checked_collectives: dict[int, Op] = field(default_factory=dict)


class _Rendezvous:
    __slots__ = ("arrived", "event", "id", "latest", "op", "start_s")

    def __init__(self, id: int, op: Op, event: simpy.Event) -> None:
        self.id = id
        self.op = op
        self.event = event
        self.arrived: list[int] = []
        self.latest = Cause(None, 0.0)
        self.start_s = 0.0


class Simulation:
    """All ranks of one simulated machine.

    `price` returns the cost of an op, `roofline` the least it can cost; `overheads` are the costs of the
    verbs; `outcomes` maps the name of a verdict to the function that decides a key; `mesh` as in Machine.

    `lockstep` names axes whose ranks do the same at the same time: only the first rank along each is
    simulated and stands for the others. The caller answers for that. Collectives along such an axis start
    when the simulated rank arrives.

    `rows`: for long runs. Launches without flags and signals whose collectives meet only ranks in lockstep
    are priced in closed form (bursts.py) and recorded as rows of numbers (`Trace.rows`) instead of spans;
    messages are not recorded. `graph_pricer` (for rows) and `cuts` (for spans): caches of the same prices,
    filled by an earlier run.

    `device_sizes` returns the sizes that kernels of a graph read in the device's memory; hosts write them
    (`Overheads.size_s`).

    `power`: the limit of the devices' power, by which arithmetic takes longer under load (power.py).

    `others`: kinds of ranks that come after those of `mesh`, each with a mesh of its own. Ranks are numbered
    through; a collective meets ranks of one kind, and programs may send to any rank.
    """

    def __init__(
        self,
        price: Pricer,
        *,
        mesh: layout.Mesh | None = None,
        roofline: Roofline = no_floor,
        overheads: Overheads | None = None,
        outcomes: Outcomes | None = None,
        rates: Rates = max_min_rates,
        lockstep: Sequence[str] = (),
        rows: bool = False,
        graph_pricer: GraphPricer | None = None,
        cuts: Cuts | None = None,
        device_sizes: DeviceSizes = no_device_sizes,
        power: PowerLimit | None = None,
        others: Sequence[RankKind] = (),
    ) -> None:
        self.env = Clock()
        self.trace = Trace()
        first = RankKind(
            price, mesh or {"tensor": 1}, roofline, overheads or Overheads(), rates, graph_pricer, cuts,
            device_sizes, power,
        )  # fmt: skip
        # By rank: the ranks of its kind, its device, and what that has done lately if its power is limited.
        self._kinds: list[_Ranks] = []
        self._devices: list[SharedDevice] = []
        self._loads: list[Load | None] = []
        for kind in (first, *others):
            self._add(kind)
        self.signals = Signals(self.env)
        self.flags: dict[Flag, int] = {}
        # The rank and the name of each host loop or mark that has not ended.
        self.loops: dict[simpy.Process, tuple[int, str]] = {}
        world = len(self._kinds)
        self.machines = [
            SimMachine(self, rank, world, kind.mesh, kind.first, kind.overheads)
            for rank, kind in enumerate(self._kinds)
        ]
        # When each item was fed, without END.
        self.fed_s: list[float] = []
        self._lockstep = frozenset(lockstep)
        self.rows = rows
        self._outcomes = outcomes or {}
        self._alarms = [0] * world
        # The launch whose host runs the events before its end inline.
        self._held: RowLaunch | None = None
        # How many streams of each rank are busy.
        self._working = [0] * world
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._rendezvous_of: dict[tuple[str, str, tuple[int, ...]], list[_Rendezvous]] = defaultdict(list)
        self._groups: dict[tuple[int, str], tuple[int, ...]] = {}
        self._turns: dict[tuple[str, str, int], int] = defaultdict(int)
        self._wire_free: dict[int, Cause] = defaultdict(lambda: Cause(None, 0.0))
        self._source_totals: dict[int, _SourceTotal] = {}
        self._ids = itertools.count()
        self._launches = itertools.count()

    def _add(self, kind: RankKind) -> None:
        """Adds the ranks of a kind after those that are there."""
        ranks = _Ranks(
            len(self._kinds), dict(kind.mesh), kind.overheads, kind.device_sizes,
            kind.graph_pricer or GraphPricer(kind.price, kind.roofline),
            kind.cuts or Cuts(kind.price, kind.roofline),
        )  # fmt: skip
        for _ in range(prod(ranks.mesh.values())):
            self._kinds.append(ranks)
            self._devices.append(SharedDevice(kind.rates))
            self._loads.append(Load(kind.power) if kind.power is not None else None)

    # -- programs ----------------------------------------------------------------------------------

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs the program on every rank until all are done.

        Raises DeadlockError if something still waits when no event is left.
        """
        running = [m for m in self.machines if not any(m.coordinate(axis) for axis in self._lockstep)]
        hosts = [self.env.result(self.host(m, program(m))) for m in running]
        self.env.run_all()
        self._count_sources()
        stuck = [f"program of rank {m.rank}" for m, h in zip(running, hosts, strict=True) if not h.triggered]
        working = [stream for stream in self._streams.values() if stream.working]
        stuck += [f"{what} of rank {rank}" for rank, what in self.loops.values()]
        deferred = [m.deferred for m in self.machines if m.deferred is not None]
        stuck += [f"launch {one.id} of graph {one.graph.name}, which its host kept back" for one in deferred]
        stuck += [f"rank {s.rank} stream {s.name}: {s.waits_for()}" for s in working]
        if stuck:
            raise DeadlockError("nothing can happen any more, and these still wait: " + "; ".join(stuck))
        self.trace.spans.sort(key=lambda span: (span.end_s, span.id))
        return self.trace

    def feed(self, to: int | Route, inbox: str, arrivals: Iterable[tuple[float, object]]) -> None:
        """Puts items into an inbox at given times (seconds, ascending). `to`: the receiving rank, or a
        function that returns the receiving ranks of an item when it arrives."""

        def source() -> Steps:
            env, machines, fed = self.env, self.machines, self.fed_s.append
            for at_s, item in arrivals:
                # All items of one instant are delivered before any host acts on them.
                if at_s > env.now:
                    yield env.timeout(at_s - env.now)
                now_s = env.now
                if item != END:
                    fed(now_s)
                cause = Cause(None, now_s, True)
                if isinstance(to, int):
                    machines[to].deliver(inbox, item, cause)
                else:
                    for rank in to(item):
                        machines[rank].deliver(inbox, item, cause)

        self.env.drive(source())

    def watch(self, rank: int, what: str, steps: Steps) -> None:
        """Runs a host loop or a mark; one that never ends is a deadlock."""
        process = self.env.process(steps)
        self.loops[process] = rank, what
        then(process, lambda _: self.loops.pop(process))

    def host(self, machine: "SimMachine", program: Program) -> Steps:
        """Runs a program, then waits until the host's clock is reached."""
        result = yield from program
        machine.submit_deferred()
        left_s = max(0.0, machine.now() - self.env.now)
        if not self.env.try_advance(left_s):
            yield self.env.timeout(left_s)
        return result

    # -- launches ----------------------------------------------------------------------------------

    def submit(self, launch: Launch) -> None:
        """Queues a launch on its stream, which runs launches in order."""
        self._queue(self._stream(launch.rank, launch.stream), launch)

    def info(self, graph: Graph, rank: int) -> LaunchInfo:
        """Returns what all launches of a graph on ranks of one kind have in common."""
        kind = self._kinds[rank]
        found = kind.infos.get(id(graph))
        if found is None:
            overheads, names = kind.overheads, self.trace.rows.graphs
            launch_s = overheads.whole_launch_s(graph.kernels)
            alone = not graph.publishes and all(axis in self._lockstep for axis in graph.axes)
            # The graph is kept here because a new object could get the id of a deleted one.
            found = kind.infos[id(graph)] = LaunchInfo(
                graph,
                launch_s,
                launch_s - overheads.begins_s(launch_s),
                kind.device_sizes(graph) if overheads.size_s else frozenset(),
                self.rows and alone,
                names.setdefault(graph.name, len(names)) if self.rows and alone else -1,
            )
        return found

    def _stream(self, rank: int, name: str) -> _Stream:
        stream = self._streams.get((rank, name))
        if stream is None:
            numbers = self.trace.rows.streams
            stream = _Stream(rank, name, numbers.setdefault(name, len(numbers)))
            stream.go_on = partial(self._go_on, stream)
            self._streams[rank, name] = stream
        return stream

    def _queue(self, stream: _Stream, launch: Launch | RowLaunch) -> None:
        stream.queue.append(launch)
        if not stream.working:
            self._set_working(stream, True)
            self.env.drive(self._work_off(stream))

    def _set_working(self, stream: _Stream, working: bool) -> None:
        if stream.working != working:
            stream.working = working
            self._working[stream.rank] += 1 if working else -1

    def _go_on(self, stream: _Stream) -> None:
        """Runs what was queued meanwhile, or marks the stream as idle."""
        if stream.queue:
            self.env.drive(self._work_off(stream))
        else:
            stream.working = False
            self._working[stream.rank] -= 1

    def _work_off(self, stream: _Stream) -> Steps:
        while stream.queue:
            launch = stream.queue.popleft()
            if isinstance(launch, RowLaunch):
                yield from self._row(stream, launch)
            else:
                yield from self._execute(stream, launch)
        self._set_working(stream, False)

    def _execute(self, stream: _Stream, launch: Launch) -> Steps:
        left_s = launch.issued.at_s - self.env.now
        if left_s > 0.0 and not self.env.try_advance(left_s):
            yield self.env.timeout(left_s)
        cause = launch.issued if launch.issued.at_s > stream.free.at_s else stream.free
        stream.waiting_for = (WAITS_FOR_EARLIER, launch)
        for ticket in launch.after:
            cause = latest(cause, (yield from ticket.wait_done()))
        if self.env.now > stream.free.at_s:
            stream.since_s = self.env.now
        burst = launch.is_burst()
        for replay in itertools.count():
            # A stop at this very instant counts before the replay, as inside a burst.
            if replay and not self.env.try_advance(0.0):
                yield self.env.timeout(0.0)
            # Read in each round: an item in the inbox `until` may have lowered `repeat`.
            if launch.stopped or replay >= (1 if burst else launch.repeat):
                break
            if launch.when is not None and not holds(launch.when, self.value_of):
                cause = yield from self._skip(stream, launch, cause, replay)
                continue
            for signal in launch.signals:
                stream.waiting_for = (WAITS_FOR_SIGNAL, launch, signal)
                cause = latest(cause, (yield from signal.wait_done()))
            if burst:
                cause = yield from self._burst(stream, launch, cause)
            else:
                cause = yield from self._replay(stream, launch, cause, replay)
            if launch.sets:
                cause = yield from self._set(stream, launch, cause, replay)
        stream.free = cause
        launch.ticket.finish(cause)

    # -- launches in closed form ---------------------------------------------------------------------

    def try_run_inline(self, launch: RowLaunch) -> bool:
        """Advances the clock to the end of a launch without an event, if it can; its caller must do nothing
        after it at this moment. Returns False if the end has to be an event (`launch.host_event`, if the
        launch has begun)."""
        stream, rank, env = self._stream(launch.rank, launch.stream), launch.rank, self.env
        if stream.working or self._working[rank] or self._devices[rank].running:
            return False
        work = launch.work = self._cost(launch)
        # The host has done nothing since the launch, so `issued_s` is not before now.
        now_s, start_s = env.now, launch.issued_s
        if not env.try_advance(start_s - now_s + work.total_s):
            return env.can_hold_end() and self._run_inline_past_others(stream, launch)
        launch.lane = stream
        launch.ready_s, launch.begun_s = stream.free.at_s, start_s
        if start_s > launch.ready_s:
            stream.since_s = start_s
        self.end_row(launch)
        return True

    def _run_inline_past_others(self, stream: _Stream, launch: RowLaunch) -> bool:
        """Runs the events before the end of a launch and advances to its end. Returns False if the end became
        an event."""
        launch.reset_for(stream)
        self.machines[launch.rank].watch(launch)
        self._held = launch
        self._begin_at_once(stream, launch)
        reached = self.env.run_to_held_end()
        self._held = None
        if not reached:
            return False
        self._devices[launch.rank].end_alone(launch, self.env.now)
        self.end_row(launch)
        stream.go_on()
        return True

    def schedule_end(self, launch: RowLaunch) -> None:
        """Makes the end of a held launch an event, because more than its host may now depend on it."""
        if launch is not self._held:
            return
        self._held = None
        rank = launch.rank
        launch.host_event = self.machines[rank].waits_for(launch)
        self.env.release_held(partial(self._ring, rank, self._alarms[rank], launch))

    def submit_row(self, launch: RowLaunch) -> None:
        """Queues a launch in closed form; begins it now if its stream is free and its tickets are done."""
        stream = self._stream(launch.rank, launch.stream)
        launch.reset_for(stream)
        if stream.working or (launch.after and any(ticket.end is None for ticket in launch.after)):
            self._queue(stream, launch)
            return
        self._begin_at_once(stream, launch)

    def _cost(self, launch: RowLaunch) -> BurstCost:
        """The work of a launch that begins as soon as its host has issued it."""
        pricer, load = self._kinds[launch.rank].graph_pricer, self._loads[launch.rank]
        work = pricer.ramp(launch.graph, launch.sizes, launch.advance, launch.repeat)
        if load is not None and work.clocked_s > 0.0:
            at_s, running = max(launch.issued_s, self.env.now), self._under_way(launch.rank)
            if work.arithmetic_s <= 0.0 and load.is_cool(at_s, running):
                return work
            factors = load.factors(_each_alone(work), at_s, running)
            if max(factors) > 1.0:
                work.slow(factors)
        return work

    def _under_way(self, rank: int) -> list[Begun]:
        """The launches that run on a device, with their seconds of arithmetic and of other work until now."""
        now_s, found = self.env.now, []
        for piece in self._devices[rank].running:
            whole_s = piece.work.total_s
            if piece.begun_s < now_s and whole_s > 0.0:
                done_s = piece.work_s + (now_s - piece.at_s) * piece.rate
                done = min(1.0, done_s / whole_s)
                found.append((piece.begun_s, done * piece.arithmetic_s, done * piece.others_s))
        return found

    def _begin_at_once(self, stream: _Stream, launch: RowLaunch) -> None:
        """Begins a launch on an idle stream; at its end the stream runs what was queued meanwhile."""
        self._set_working(stream, True)
        launch.on_done = stream.go_on
        self._begin(stream, launch)

    def _begin(self, stream: _Stream, launch: RowLaunch) -> None:
        """Starts a launch when its host has issued it; its stream is free and its tickets are done."""
        work = launch.work
        if work is None:
            work = launch.work = self._cost(launch)
        free_s = ready_s = stream.free.at_s
        for ticket in launch.after:
            if ticket.end is not None and ticket.end.at_s > ready_s:
                ready_s = ticket.end.at_s
        now_s = self.env.now
        start_s = max(launch.issued_s, now_s)
        launch.ready_s, launch.begun_s = ready_s, start_s
        if start_s > free_s:
            stream.since_s = start_s
        self._with_demand(launch, work)
        rank, device = launch.rank, self._devices[launch.rank]
        if not device.running and self._working[rank] == 1:
            # No other launch can begin before it, so the device may know already of a start after now.
            device.start(launch, start_s)
            self._alarm(rank, start_s - now_s + work.total_s, launch)
        elif start_s > now_s:
            self.env.call(start_s - now_s, partial(self._begin_later, launch))
        else:
            self._add_to_device(launch)

    def _add_to_device(self, launch: RowLaunch) -> None:
        if launch.end is None:
            self._start(launch.rank, launch)

    def _begin_later(self, launch: RowLaunch) -> None:
        """Starts a launch whose host had issued it before it could begin, at the clock of now."""
        planned = launch.work
        if launch.end is None and planned is not None and self._loads[launch.rank] is not None:
            launch.work = self._with_demand(launch, self._cost(launch))
            # An item in the inbox `until` may have come meanwhile.
            launch.work.truncate(planned.replays)
        self._add_to_device(launch)

    def _with_demand(self, launch: RowLaunch, work: BurstCost) -> BurstCost:
        """Tells work what its demand on the device depends on."""
        work.since_s = launch.lane.since_s
        work.kernels = launch.graph.kernels
        work.launch_s = launch.info.launch_s
        return work

    def _row(self, stream: _Stream, launch: RowLaunch) -> Steps:
        """Runs a launch in closed form that had to queue."""
        if launch.issued_s > self.env.now:
            yield self.env.timeout(launch.issued_s - self.env.now)
        stream.waiting_for = (WAITS_FOR_EARLIER, launch)
        for ticket in launch.after:
            yield from ticket.wait_done()
        if launch.stopped:
            launch.end = Cause(None, self.env.now)
            launch.finish()
            return
        done = self.env.event()
        launch.on_done = partial(self.env.succeed, done)
        self._begin(stream, launch)
        yield done

    def end_row(self, launch: RowLaunch) -> None:
        """Writes the row of a launch in closed form whose work is done now."""
        work = launch.work
        if work is None or launch.end is not None:
            return
        end_s, rows = self.env.now, self.trace.rows
        rows.numbers.extend(
            (
                launch.id, launch.rank, launch.lane.number, launch.info.number, launch.issued_s,
                launch.ready_s, launch.begun_s, end_s, work.total_s, work.floor_s(), work.replays,
            )
        )  # fmt: skip
        self._add_to_sources(work)
        load = self._loads[launch.rank]
        if load is not None:
            load.add(work.arithmetic_under_load_s, work.others_under_load_s, launch.begun_s, end_s)
        launch.ran = work.replays
        launch.end = launch.lane.free = Cause(None, end_s)

    def _add_to_sources(self, work: BurstCost) -> None:
        """Adds work to the sum of its price's origin."""
        total = self._source_totals.get(id(work.origin))
        if total is None:
            if len(self._source_totals) >= MOST_SOURCE_TOTALS:
                self._count_sources()
            total = self._source_totals[id(work.origin)] = _SourceTotal(work.origin)
        longer_s = work.longer_s
        total.total_s += work.total_s - longer_s
        total.longer_s += longer_s
        total.replays += work.replays

    def _count_sources(self) -> None:
        for total in self._source_totals.values():
            total.origin.count(total.total_s, total.replays, self.trace.rows.sources, total.longer_s)
        self._source_totals.clear()

    def interrupt(self, launch: Launch | RowLaunch) -> None:
        """Ends a launch at its next replay boundary, since an item has arrived in its inbox `until`; one
        replay runs in any case."""
        if isinstance(launch, Launch):
            if launch.is_burst() and launch.piece is not None:
                self.stop(launch)
            else:
                # One replay more, unless the last one has just ended.
                launch.repeat = min(launch.repeat, launch.ticket.ran + 1)
        elif launch.end is not None:
            return
        elif launch.work is None:
            launch.repeat = 1
        elif launch.begun_s < self.env.now:
            self._devices[launch.rank].stop(launch, self.env.now)
            self._set_alarm(launch.rank)
        else:
            self._devices[launch.rank].truncate(launch, 1)
            self._set_alarm(launch.rank)

    def stop_row(self, launch: RowLaunch) -> None:
        """Ends a launch in closed form at its next replay boundary."""
        # A host that waits for the launch must be registered before the launch ends.
        self.schedule_end(launch)
        launch.stopped = True
        device, work = self._devices[launch.rank], launch.work
        if launch.end is not None or work is None:
            return
        if launch.begun_s <= self.env.now and launch in device.running:
            device.stop(launch, self.env.now)
        else:
            # It has not begun: no replay runs.
            device.withdraw(launch)
            launch.end = Cause(None, self.env.now)
            launch.finish()
        self._set_alarm(launch.rank)

    def _replay(self, stream: _Stream, launch: Launch, cause: Cause, replay: int) -> CauseSteps:
        for segment in self._cut(launch, replay):
            if segment.collective:
                cause = yield from self._run_collective(stream, launch, segment, cause, replay)
            else:
                cause = yield from self._run(stream, launch, [segment], cause, replay)
        launch.ticket.ran += 1
        return cause

    def _burst(self, stream: _Stream, launch: Launch, cause: Cause) -> CauseSteps:
        replays = [segment for i in range(launch.repeat) for segment in self._cut(launch, i)]
        return (yield from self._run(stream, launch, replays, cause, 0))

    def _run(
        self, stream: _Stream, launch: Launch, replays: Sequence[Segment], cause: Cause, replay: int
    ) -> CauseSteps:
        id_ = next(self._ids)
        start_s = self.env.now
        replays = self._under_load(launch.rank, replays)
        if len(replays) == 1:
            ends = [replays[0].seconds]
        else:
            ends = list(itertools.accumulate(segment.seconds for segment in replays))
        if not replays[0].publications and self._alone(launch.rank, ends[-1]):
            ops = replays[0].ops
            if len(replays) > 1:
                launch.ticket.ran = len(replays)
                ops = tuple(priced for segment in replays for priced in segment.ops)
            progress = ((start_s, 0.0), (self.env.now, ends[-1]))
            self._record(id_, launch, stream.name, "run", start_s, cause, ops, progress, replay)
            self._add_to_load(launch.rank, replays, start_s)
            return Cause(id_, self.env.now)
        done = self.env.event()
        demand = partial(self._demand, launch, stream.since_s)
        piece = Piece(
            Listed(ends, _Demands(replays, demand)),
            partial(self.env.succeed, done),
            lambda publication: self._publish(launch, publication, Cause(id_, self.env.now)),
            deque(replays[0].publications),
            partial(self.env.succeed_and_run, done),
        )
        piece.begun_s, (piece.arithmetic_s, piece.others_s) = start_s, _work_of(replays)
        launch.piece = piece
        self._start(launch.rank, piece)
        yield done
        launch.piece = None
        ops, ran = replays[0].ops, 1
        if launch.is_burst():
            ran = launch.ticket.ran = piece.work.replays
            ops = tuple(priced for segment in replays[:ran] for priced in segment.ops)
        self._record(id_, launch, stream.name, "run", start_s, cause, ops, piece.progress, replay)
        self._add_to_load(launch.rank, replays[:ran], start_s)
        return Cause(id_, self.env.now)

    def _under_load(self, rank: int, replays: Sequence[Segment]) -> Sequence[Segment]:
        """Returns segments that begin now, as long as the load of the device makes them."""
        load = self._loads[rank]
        if load is None:
            return replays
        if not any(segment.clocked for segment in replays):
            return replays
        running = self._under_way(rank)
        if load.is_cool(self.env.now, running) and not any(segment.arithmetic_s for segment in replays):
            return replays
        parts = [(one.arithmetic_s, one.clocked_s, one.waiting_s, one.seconds) for one in replays]
        factors = load.factors(parts, self.env.now, running)
        if max(factors) == 1.0:
            return replays
        last = len(factors) - 1
        return [slower(segment, factors[min(i, last)]) for i, segment in enumerate(replays)]

    def _add_to_load(self, rank: int, replays: Sequence[Segment], begun_s: float) -> None:
        """Adds segments that have ended now to the load of their device."""
        load = self._loads[rank]
        if load is not None:
            load.add(*_work_of(replays), begun_s, self.env.now)

    def _alone(self, rank: int, work_s: float) -> bool:
        """Advances the clock by `work_s` if the device is idle and nothing can happen before that work is
        done; else does nothing and returns False."""
        return not self._devices[rank].running and self.env.try_advance(work_s)

    def _demand(self, launch: Launch, since_s: float, segment: Segment) -> Demand:
        """The demand of a segment, with the share of the host thread that its launches take."""
        graph_s = sum(other.seconds for other in self._cut(launch, 0))
        launch_s = self._kinds[launch.rank].overheads.whole_launch_s(launch.graph.kernels)
        share = min(1.0, launch_s / graph_s) if graph_s > 0.0 else 0.0
        alone = segment.demand
        return Demand(alone.memory, alone.compute, share, since_s, alone.kernels_per_s)

    def stop(self, launch: Launch) -> None:
        """Ends a repeated launch at its next replay boundary."""
        launch.stopped = True
        if launch.piece is not None and launch.is_burst():
            self._devices[launch.rank].stop(launch.piece, self.env.now)
            self._set_alarm(launch.rank)

    def _start(self, rank: int, piece: Execution) -> None:
        """Starts a piece on a device now, beside the pieces that run there."""
        if self._held is not None and self._held.rank == rank:
            self.schedule_end(self._held)
        self._devices[rank].start(piece, self.env.now)
        self._set_alarm(rank)

    def _set_alarm(self, rank: int) -> None:
        """Schedules `_ring` for when something is next due on a device; voids earlier alarms."""
        device = self._devices[rank]
        if not device.running:
            self._alarms[rank] += 1
            return
        due_s, piece = device.next_due()
        self._alarm(rank, max(0.0, due_s - self.env.now), piece)

    def _alarm(self, rank: int, delay_s: float, piece: Execution) -> None:
        number = self._alarms[rank] = self._alarms[rank] + 1
        if piece is self._held:
            self.env.hold_end(delay_s)
        else:
            self.env.call(delay_s, partial(self._ring, rank, number, piece))

    def _ring(self, rank: int, number: int, piece: Execution) -> None:
        if number != self._alarms[rank]:
            return
        device = self._devices[rank]
        if len(device.running) == 1 and not piece.publications:
            self._alarms[rank] += 1
            device.end_alone(piece, self.env.now)
            # A process that waits for the piece may run at once: see clock.py.
            piece.finish_last()
            return
        device.arrive(piece, self.env.now)
        self._set_alarm(rank)

    def _skip(self, stream: _Stream, launch: Launch, cause: Cause, replay: int) -> CauseSteps:
        start_s = self.env.now
        overheads = self._kinds[launch.rank].overheads
        # What writes flags comes to the device all the same.
        seconds = overheads.gate_s * launch.graph.kernels + (overheads.flags_s if launch.sets else 0.0)
        if not self.env.try_advance(seconds):
            yield self.env.timeout(seconds)
        id_ = next(self._ids)
        progress = [(start_s, 0.0), (self.env.now, seconds)]
        self._record(id_, launch, stream.name, "skipped", start_s, cause, (), progress, replay)
        return Cause(id_, self.env.now)

    def _set(self, stream: _Stream, launch: Launch, cause: Cause, replay: int) -> CauseSteps:
        """Writes the flags of a launch that has run, from the values at its end; that may take its device
        some time."""
        values = {flag: self._evaluate(setting) for flag, setting in launch.sets.items()}
        start_s, seconds = self.env.now, self._kinds[launch.rank].overheads.flags_s
        if seconds > 0.0:
            if not self.env.try_advance(seconds):
                yield self.env.timeout(seconds)
            id_ = next(self._ids)
            progress = [(start_s, 0.0), (self.env.now, seconds)]
            self._record(id_, launch, stream.name, "flags", start_s, cause, (), progress, replay)
            cause = Cause(id_, self.env.now)
        self.flags.update(values)
        return cause

    # -- ranks that meet, signals, flags -----------------------------------------------------------

    def _run_collective(
        self, stream: _Stream, launch: Launch, segment: Segment, cause: Cause, replay: int
    ) -> CauseSteps:
        op = segment.ops[0].op
        members = self._members(launch.rank, op.axis)
        rendezvous = self._rendezvous(op, stream, launch.rank, members)
        rendezvous.arrived.append(launch.rank)
        rendezvous.latest = latest(rendezvous.latest, cause)
        stream.waiting_for = (WAITS_FOR_RANKS, op, len(rendezvous.arrived), len(members))
        if len(rendezvous.arrived) == len(members):
            rendezvous.start_s = self.env.now
            if len(members) == 1 and self.env.try_advance(segment.seconds):
                return self._record_collective(stream, launch, segment, rendezvous, members, replay)
            self.env.call(segment.seconds, lambda: self.env.succeed_and_run(rendezvous.event))
        yield rendezvous.event
        return self._record_collective(stream, launch, segment, rendezvous, members, replay)

    def _record_collective(
        self,
        stream: _Stream,
        launch: Launch,
        segment: Segment,
        rendezvous: _Rendezvous,
        members: tuple[int, ...],
        replay: int,
    ) -> Cause:
        """Records a rank's span of a collective that ends now."""
        id_ = next(self._ids)
        self._add_to_load(launch.rank, (segment,), rendezvous.start_s)
        progress = [(rendezvous.start_s, 0.0), (self.env.now, segment.seconds)]
        self._record(
            id_, launch, stream.name, "collective", rendezvous.start_s, rendezvous.latest, segment.ops,
            progress, replay, rendezvous.id, members,
        )  # fmt: skip
        return Cause(id_, self.env.now)

    def _members(self, rank: int, axis: str) -> tuple[int, ...]:
        key = (rank, axis)
        if key not in self._groups:
            kind = self._kinds[rank]
            first, alone = kind.first, axis in self._lockstep
            members = (rank - first,) if alone else layout.members(kind.mesh, rank - first, axis)
            self._groups[key] = tuple([first + member for member in members])
        return self._groups[key]

    def _rendezvous(self, op: Op, stream: _Stream, rank: int, members: tuple[int, ...]) -> _Rendezvous:
        """Where a rank's next collective along an axis, on a stream, meets the others: the n-th of one rank
        meets the n-th of each other rank. Raises MismatchError if the ops differ or the axis has another
        size."""
        turn = self._turns[op.axis, stream.name, rank]
        self._turns[op.axis, stream.name, rank] += 1
        known = self._rendezvous_of[op.axis, stream.name, members]
        if turn < len(known) and known[turn].op is op:
            return known[turn]
        kind = self._kinds[rank]
        if id(op) not in kind.checked_collectives:
            size = kind.mesh.get(op.axis, 1)
            if size != op.ranks:
                raise MismatchError(
                    f"{op.kind} {op.name} is for {op.ranks} ranks; axis {op.axis!r} has {size}"
                )
            kind.checked_collectives[id(op)] = op
        if turn == len(known):
            known.append(_Rendezvous(next(self._ids), op, self.env.event()))
        other = known[turn].op
        if (other.kind, other.name, other.shape, other.dtype) != (op.kind, op.name, op.shape, op.dtype):
            raise MismatchError(
                f"rank {rank} comes to {op.kind} {op.name}, others are in {other.kind} {other.name}"
            )
        return known[turn]

    def _publish(self, launch: Launch, publication: Publication, cause: Cause) -> None:
        rank, priced = launch.rank, self._kinds[launch.rank].cuts.put(publication)
        cause = latest(cause, self._wire_free[rank])
        id_, start_s, takes_s = next(self._ids), cause.at_s, priced.price.seconds
        self._wire_free[rank] = Cause(id_, start_s + takes_s)

        def arrive() -> None:
            progress = [(start_s, 0.0), (self.env.now, takes_s)]
            self._record(id_, launch, "wire", "wire", start_s, cause, (priced,), progress, 0)
            self.signals.publish(publication.signal, rank, Cause(id_, self.env.now))

        self.env.call(start_s + takes_s - self.env.now, arrive)

    def value_of(self, flag: Flag) -> int:
        """The value of a flag now; 0 if it was never set."""
        return self.flags.get(flag, 0)

    def _evaluate(self, setting: Setting) -> int:
        if isinstance(setting, Condition):
            return int(holds(setting, self.value_of))
        if isinstance(setting, Verdict):
            return setting.yes if self._outcomes[setting.name](*setting.key) else setting.no
        return setting

    # -- prices and records ------------------------------------------------------------------------

    def _cut(self, launch: Launch, replay: int) -> tuple[Segment, ...]:
        """The segments of the launch's graph at the sizes of one replay."""
        return self._kinds[launch.rank].cuts.of(launch.graph, launch.sizes_at(replay))

    def _record(
        self,
        id_: int,
        launch: Launch,
        stream: str,
        state: State,
        start_s: float,
        cause: Cause,
        ops: tuple[PricedOp, ...],
        progress: Sequence[tuple[float, float]],
        replay: int,
        collective_id: int | None = None,
        members: tuple[int, ...] = (),
    ) -> None:
        after: tuple[int, ...] = ()
        if launch.after:
            after = tuple([t.end.span for t in launch.after if t.end and t.end.span is not None])
        span = Span(
            id_, launch.id, launch.rank, stream, launch.graph.name, state, launch.issued.at_s, start_s,
            self.env.now, cause, after, ops, tuple(progress), collective_id, members, replay,
        )  # fmt: skip
        self.trace.spans.append(span)

    def next_launch(self) -> int:
        """Returns the number of the next launch."""
        return next(self._launches)
