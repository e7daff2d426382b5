"""The real machine on a CUDA card: the same programs as on the simulated one, in captured graphs on streams.

    launch       cut into stages (`plan.py`), each captured once and replayed; of ranks that meet by kernels,
                 all that a host gives before it waits as one graph (`joined.py`, `sequences.py`)
    after        its stream waits for an event
    when, sets   kernels of one program (`flag_kernels`)
    signal       a counter on the card; a kernel spins until it can take the publication
    collective   on the stream of its group's first rank, for which the streams of the other ranks wait; or
                 by kernels of ranks that see each other's memory (`CardState.joined`)
    repeat       DEPTH replays are queued ahead of the device, with `until` the second one just in time, and
                 beside work of other streams when the first has ended; `stop` and `until` end it behind those

Ranks are streams of one card, or have a card each. All hosts share one thread, so the order of queueing is
known: a launch that has to wait for work that is not queued yet (the last rank of a collective, a ticket's
launch) is held back on the host until that work is queued. Ranks that meet by kernels have one stream each,
and a thread that queues its graphs.

A stage that comes for the first time is launched by Python and then captured: a first run of a program does
that, and its times do not count (`fresh` counts the stages that it captured). Such a run may be a rehearsal,
which passes over a launch that has been replayed REHEARSED times, if nothing but later kernels depends on it.
Memory keeps its addresses from run to run of one `Card`.

`ran` counts the replays that ran, including those that were queued when `stop` came. Ranks that meet have to
launch the same collectives in the same order, even if their flags then skip them.
"""

import itertools
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any

import torch

from simcore.machine import mesh as layout
from simcore.machine.machine import DeadlockError, Flag, Machine, Program, Verdict
from simcore.machine.trace import Cause, Trace
from simcore.ops.op import Graph, Pricer, Roofline
from simcore.sim.garbage import no_collections
from simcore.sim.simulation import WAITS_FOR_EARLIER, WAITS_FOR_SIGNAL, Outcomes, no_floor
from simcore.validate.machines.cuda.cuda_api import CudaApi, seen_together
from simcore.validate.machines.cuda.flag_kernels import flags_of, settings
from simcore.validate.machines.cuda.joined import JoinedQueue
from simcore.validate.machines.cuda.memory import StreamLog
from simcore.validate.machines.cuda.parts import Arrival, CardTicket, RankStream
from simcore.validate.machines.cuda.plan import Plan, Stage, plan_key, stages
from simcore.validate.machines.cuda.records import Clocks, HostMoment, Record, Resolver, Taken
from simcore.validate.machines.cuda.sequences import SequencePlan, check_joined, memories
from simcore.validate.machines.cuda.stages import (
    Nodes,
    StageQueue,
    fill,
    keys_after,
    run_collective_behind,
)
from simcore.validate.machines.cuts import CollectiveMatcher, Rendezvous, skip_ops
from simcore.validate.machines.host import HostSide, mesh_of
from simcore.validate.machines.launches import (
    TURN,
    Device,
    Launch,
    Need,
    SignalTicket,
    Steps,
    Stream,
    Task,
    TorchTicket,
)
from simcore.validate.machines.shares import SharedOut

# Replays that are queued ahead of the device. What an item may end is queued as late as can be, LEAD_S before
# the replay ahead of it ends: what is queued runs, and the item waits for it. Beside other work nobody knows
# how much longer a replay takes; queued by the time of the one before, many newcomers would wait for another.
DEPTH, LEAD_S = 2, 3e-4
# Of how many replays the middle one says how long the next will take.
MIDDLE_OF = 5
# The longest wait for a signal; about the time of one look at its counter.
PATIENCE_S, LOOK_S = 10.0, 1e-6
# Replays of a launch in the rehearsals of a program: all of a run of so many tokens; after REHEARSAL_S only
# as many as capture it, and as many again.
REHEARSED, REHEARSAL_S = 512, 5.0
# An event, the host's time when it passed, and the error of that time.
Look = tuple[Any, float, float]
# Graphs of at most so many ops are compared each time, not remembered by their ids.
FEW_OPS = 8
# The stream on which a host takes signals.
HOSTS = "(host)"
# How soon a thread of Python gets its turn, where several queue work.
TURN_S = 2e-5


class Card:
    """The lasting parts of runs: the states of all ranks, their streams, captured stages, flags, signals.

    `states`: one a rank, in the order of `mesh` (left out: all along "tensor"); `lockstep` as in TorchRun.
    Raises ValueError if there are not as many states as ranks.
    """

    def __init__(
        self,
        states: Sequence[Any],
        api: CudaApi,
        *,
        mesh: layout.Mesh | None = None,
        lockstep: Sequence[str] = (),
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.mesh = mesh_of(states, mesh)
        self.states, self.api, self.lockstep = list(states), api, tuple(lockstep)
        self.memories = memories(api, self.states)
        self.memory = self.memories[0]
        self.max_polls = max(1, int(patience_s / LOOK_S))
        self.plans: dict[Hashable, Plan] = {}
        self.sequences: dict[Hashable, list[SequencePlan]] = defaultdict(list)
        self._graphs: dict[Graph, Graph] = {}
        self._known: dict[int, tuple[Graph, Graph]] = {}
        self.lanes: dict[tuple[int, str], RankStream] = {}
        self.shared = SharedOut(self.same, no_floor, no_floor)
        # The text of the wait with each error code, at code - 1.
        self.takers: list[str] = []
        # The stream of each device that no rank uses, and that of flags.
        devices = dict.fromkeys(state.device for state in self.states)
        self.own = {device: api.stream(device) for device in devices}
        self.stage_queue = StageQueue(api, self.memory, self.mesh, self.states, self.max_polls)

    def lane(self, rank: int, name: str) -> RankStream:
        """Returns a stream of a rank."""
        found = self.lanes.get((rank, name))
        if found is None:
            found = self.lanes[rank, name] = RankStream(
                rank, name, self.states[rank].on(name), self.api.stream(self.states[rank].device)
            )
        return found

    def reset(self) -> None:
        """Resets flags, signals, events and lanes for a new run; the states are reset by their owners."""
        self.api.reset()
        for memory in dict.fromkeys(self.memories):
            memory.reset()
        # Zeros are written on a stream that the lanes' streams do not wait for.
        self.api.synchronize()
        for lane in self.lanes.values():
            lane.reset()

    def same(self, graph: Graph) -> Graph:
        """Returns the first graph that was equal to this one: programs may make a new one for each launch."""
        known = self._known.get(id(graph))
        if known is not None:
            return known[1]
        found = self._graphs.setdefault(graph, graph)
        if len(graph.ops) > FEW_OPS:
            # Comparing takes long. The graph is kept: otherwise another graph could get its id.
            self._known[id(graph)] = graph, found
        return found

    def code(self, what: str) -> int:
        """Returns the error code of a wait for a signal; `what` describes the wait."""
        self.takers.append(what)
        return len(self.takers)

    def start(
        self,
        *,
        outcomes: Outcomes | None = None,
        roofline: Roofline = no_floor,
        weight: Pricer | None = None,
        warmup_launches: int = 0,
        rehearsal: bool = False,
    ) -> "CardRun":
        """Makes a run, or a rehearsal. `outcomes` and `roofline` as in TorchRun; `weight`: the times of ops
        alone, in proportion to which the time of a graph is shared out (default: the roofline);
        `warmup_launches`: how many launches come before those from which the times of verbs are taken."""
        by = roofline, weight or roofline
        if by != (self.shared.roofline, self.shared.weight):
            self.shared = SharedOut(self.same, *by)
        return CardRun(self, outcomes or {}, self.shared, warmup_launches, rehearsal)


class CardRun(Device):
    """One run of one program on all ranks of a card; the verbs of `simcore.sim.simulation.Simulation`."""

    def __init__(
        self,
        card: Card,
        outcomes: Outcomes,
        shared: SharedOut,
        warmup_launches: int = 0,
        rehearsal: bool = False,
    ) -> None:
        self.card, self.api, self.memory = card, card.api, card.memory
        self.mesh, self.states = card.mesh, card.states
        self._stages = card.stage_queue
        self._host = host = HostSide(self, card.mesh, card.lockstep)
        self.trace, self.machines, self.fed_s = host.trace, host.machines, host.fed_s
        self.now, self.feed = host.now, host.feed
        # Stages that were captured in this run, and by how many seconds the looks at the clocks may be wrong.
        self.fresh, self.clock_error_s = 0, 0.0
        # How many launches a rehearsal has passed over.
        self._rehearsal, self.passed_over = rehearsal, 0
        self._submitted: list[Launch] = []
        self._outcomes, self._shared, self.trace.warmup_launches = outcomes, shared, warmup_launches
        self._streams: dict[tuple[int, str], Stream] = {}
        self.working: list[Task] = []
        self._collectives = CollectiveMatcher(self._host)
        self._records: list[Record] = []
        self._marks: list[tuple[int, str, list[Any]]] = []
        # The ends that the host of each rank has waited for last.
        self._since: dict[int, tuple[Any, ...]] = {}
        self._ids, self._collective_ids = itertools.count(), itertools.count()
        # Publications of a (name, rank) that have been queued; how many a rank takes for certain.
        self._sent: dict[tuple[str, int], int] = defaultdict(int)
        self._takes: dict[tuple[str, int, int], int] = defaultdict(int)
        # The same, with those that a gate may skip.
        self._may_take: dict[tuple[str, int, int], int] = defaultdict(int)
        # The values of tensors that hold sizes, by address.
        self._sizes: dict[int, int] = {}
        # How long the last replays of a graph took on a stream of a rank. Where it takes another time the
        # next time, with fewer sequences, the next replay is queued early or late once.
        self._took_s: dict[tuple[int, str, str], deque[float]] = {}
        # How often each plan, by its id, was queued.
        self._replays: dict[int, int] = defaultdict(int)
        # The last event of launches by their rank and home, if that is not their stream.
        self._homes: dict[tuple[int, str], Any] = {}
        # The last record on each rank's wire.
        self._wires: dict[int, Record] = {}
        self._joined = JoinedQueue(
            card.memories, card.stage_queue, card.sequences, card.same, outcomes, self.now, self._stream,
            partial(self._make_ready, first=False), self._records, self._ids,
        )  # fmt: skip
        # Streams of earlier runs: making them at a first launch would be part of its time.
        for rank, name in tuple(card.lanes):
            if rank in self._host.followers:
                self._stream(rank, name)

    # -- programs --------------------------------------------------------------------------------------

    @property
    def flags(self) -> dict[Flag, int]:
        """The values of all declared flags."""
        return {flag: self.value_of(flag) for each in self.card.memories for flag in each.declared}

    def run(self, program: Callable[[Machine], Program]) -> Trace:
        """Runs one program on every rank (of ranks in lockstep: on the first) until all are done.

        Raises DeadlockError if something still waits when nothing can happen any more, or waits too long for
        a signal on the card.
        """
        before = self._stages.captures
        with torch.inference_mode(), no_collections():
            for state in self.states:
                state.begin_run(rehearsal=self._rehearsal, error=self.memory.error, code=self.card.code)
            self.card.reset()
            first = [seen_together(self.api, stream) for stream in self.card.own.values()]
            try:
                with short_turns(any(state.joined for state in self.states)):
                    self._host.run(program)
            finally:
                self._joined.wait()
                self.api.synchronize()
            self._check()
            last = [seen_together(self.api, stream) for stream in self.card.own.values()]
            self.fresh = self._stages.captures - before
            self.clock_error_s = max(one[2] + other[2] for one, other in zip(first, last, strict=True))
            self._resolve(first, last)
            self.api.synchronize()
        return self.trace

    def _resolve(self, first: Sequence[Look], last: Sequence[Look]) -> None:
        origin_s = self._host.origin_s
        began, ended = ([(event, at_s - origin_s) for event, at_s, _ in each] for each in (first, last))
        clocks = Clocks(self.api, began, ended, self.clock_error_s)
        resolver = Resolver(self.trace, clocks, self._shared)
        resolver.resolve(self._records)
        self.trace.verbs.update(verbs_of(self._submitted[self.trace.warmup_launches :], resolver.cause))
        for rank, name, moments in self._marks:
            resolver.mark(rank, name, moments)

    def _check(self) -> None:
        """Raises DeadlockError if a wait on a card took too long: for a signal, or of joined ranks for each
        other."""
        if code := self.memory.failed:
            self.api.synchronize()
            raise DeadlockError(f"nothing can happen any more: {self.card.takers[code - 1]}")

    # -- the interface for the host's side -------------------------------------------------------------

    def ticket(self) -> CardTicket:
        """Makes a ticket for a launch."""
        return CardTicket(self.api)

    def go_on(self) -> bool:
        """Queues all that can be queued now. Returns whether there was any."""
        went_on = self._joined.go_on()
        for task in tuple(self.working):
            if task.need.ready():
                self._advance(task)
                went_on = True
        return went_on

    def _advance(self, task: Task) -> None:
        """Advances a task as far as possible, a burst by one replay: hosts get a turn after each replay."""
        while task.need.ready():
            if not task.go_on():
                self.working.remove(task)
                return
            if task.need is TURN:
                return

    def _release(self) -> None:
        """Advances the tasks that were held back for work that is queued by now."""
        while held := [task for task in self.working if task.need is not TURN and task.need.ready()]:
            for task in held:
                self._advance(task)

    def under_way(self) -> bool:
        """Whether the card is busy. Raises DeadlockError if a wait for a signal took too long."""
        self._check()
        return self._joined.is_busy or any(self._is_busy(lane) for lane in self.card.lanes.values())

    def _is_busy(self, lane: RankStream) -> bool:
        """Whether a lane has work, or had at the last look: tasks that wait for its end then get a turn."""
        if lane.tail is lane.passed:
            return False
        if self.api.done(lane.tail):
            lane.passed = lane.tail
        return True

    def declare(self, flag: Flag, initial: int) -> None:
        """Declares a flag; its first value is written before anything that is queued from now on."""
        for rank in self._host.followers[flag.rank]:
            memory = self.card.memories[rank]
            if flag in memory.declared:
                continue
            memory.declared.add(flag)
            word = memory.word(flag)
            if initial:
                memory.seen[memory.slot(flag)] = initial
                own = self.card.own[self.states[rank].device]
                self.api.run(own, partial(fill, word, initial))
                # In this order: the threads of lanes look at them.
                memory.writing = self.api.record(own)
                memory.written += 1

    def value_of(self, flag: Flag) -> int:
        """Returns the value that a flag had when the last kernel that wrote it had ended."""
        memory = self.card.memories[flag.rank]
        return int(memory.seen[memory.slot(flag)])

    def moment(self, rank: int) -> HostMoment:
        """Returns the present moment on the host of a rank."""
        return HostMoment(rank, self.now(), self._since.get(rank))

    def waited(self, rank: int, ends: Sequence[Any]) -> None:
        """Notes that what the host of a rank does from now on comes after these ends."""
        if ends:
            self._since[rank] = tuple(ends)

    def mark(self, rank: int, name: str, since: HostMoment, ends: Sequence[Any]) -> None:
        """Keeps a mark until times are known."""
        self._marks.append((rank, name, [since, *ends]))

    def woke(self) -> None:
        """Forgets what hosts waited for last: an item that arrived is now the reason of what they do."""
        self._since.clear()

    def take(self, signal: SignalTicket) -> Steps:
        """Takes a publication on the card, on a stream only for that; returns which one. Raises ValueError
        for ranks whose kernels publish and await signals by themselves."""
        if self.states[signal.waiter].joined:
            raise ValueError(f"--on cuda: the host of a rank on a card of its own cannot await {signal.name}")
        key = (signal.name, signal.source, signal.waiter)
        if not self._has_come(key):
            yield Need(partial(self._has_come, key))
        self._takes[key] += 1
        self._may_take[key] += 1
        lane = self.card.lane(signal.waiter, HOSTS)
        log = self.memory.log(signal.waiter, HOSTS)
        place = log.reserve_entries(2)
        plan = self.card.plans.get(key)
        if plan is None:
            what = f"host of rank {signal.waiter} waits for signal {signal.name} of rank {signal.source}"
            signals = ((signal.name, signal.source, self.card.code(what)),)
            plan = self.card.plans[key] = Plan((), False, None, signals)
        self._stages.queue(lane, plan, "take", (), partial(self._stages.head, lane, log, plan, None), ())
        event = lane.tail = self.api.record(lane.stream)
        if not self.api.done(event):
            yield Need(lambda: self.api.done(event))
        return Taken(signal.name, signal.source, log, place + 1)

    # -- launches ------------------------------------------------------------------------------------------

    def submit(self, launch: Launch) -> None:
        """Queues a launch on the card, unless something before it is held back."""
        launch.since = self._since.get(launch.rank)
        self._submitted.append(launch)
        if self.states[launch.rank].joined:
            check_joined(launch, self.states[launch.rank])
            self._joined.keep(launch)
            return
        stream = self._stream(launch.rank, launch.stream)
        stream.queue.append(launch)
        if stream.task is None:
            task = stream.start(self._execute)
            self.working.append(task)
            self._advance(task)
            self._release()

    def settle(self, rank: int) -> None:
        """Queues what the host of a joined rank has given since it waited last."""
        self._joined.settle(rank)

    def _stream(self, rank: int, name: str) -> Stream:
        stream = self._streams.get((rank, name))
        if stream is None:
            lanes = [self.card.lane(follower, name) for follower in self._host.followers[rank]]
            stream = self._streams[rank, name] = Stream(rank, name, lanes)
        return stream

    def _execute(self, stream: Stream, launch: Launch) -> Steps:
        stream.waiting_for = WAITS_FOR_EARLIER, launch
        for ticket in launch.after:
            if not _is_queued(ticket):
                yield Need(partial(_is_queued, ticket))
        others = {flag.rank for flag in flags_of(launch.when, launch.sets)} - {launch.rank}
        if not others <= self._host.begun:
            # The hosts of these ranks have not begun, so their flags have no first values yet.
            yield Need(lambda: others <= self._host.begun)
        queued: deque[list[Any]] = deque()
        # When the replay that was queued last began, about.
        began_s = 0.0
        for replay in range(launch.repeat):
            if replay:
                yield TURN
            if len(queued) == DEPTH:
                ends = queued.popleft()
                if not self._over(ends):
                    yield Need(partial(self._over, ends))
                now_s = self.now()
                self._note_took(stream, launch, now_s - began_s, first=replay == DEPTH)
                began_s = now_s
            if queued and launch.watches:
                yield Need(partial(self._is_due, stream, launch, began_s, queued[-1]))
            if launch.ticket.stopped or (replay > 0 and launch.curtailed):
                break
            yield from self._replay(stream, launch, replay)
            queued.append([lane.tail for lane in stream.lanes])
            began_s = began_s if replay else self.now()
        self._finish(stream, launch)

    def _note_took(self, stream: Stream, launch: Launch, seconds: float, *, first: bool) -> None:
        """Notes how long a replay took from the end of the one before it, of which `_is_due` takes the middle
        of the last of a burst. What was queued too late began later, and an end may be noticed late; taken as
        a replay's time, such a gap would come back at each that follows."""
        key = stream.rank, stream.name, launch.graph.name
        latest = self._took_s.setdefault(key, deque(maxlen=MIDDLE_OF))
        if first:
            latest.clear()
        latest.append(seconds)

    def _over(self, ends: Sequence[Any]) -> bool:
        return all(map(self.api.done, ends))

    def _is_due(self, stream: Stream, launch: Launch, began_s: float, ends: Sequence[Any]) -> bool:
        """Whether the next replay of a launch that an item may end has to be queued, because the present one,
        which ends at `ends`, is nearly over; or need not be any more."""
        if launch.curtailed or launch.ticket.stopped:
            return True
        if any(self._is_busy(lane) for lane in self.card.lanes.values() if lane not in stream.lanes):
            return self._over(ends)
        latest = sorted(self._took_s.get((stream.rank, stream.name, launch.graph.name), (0.0,)))
        took_s = latest[(len(latest) - 1) // 2]
        return self.now() >= began_s + took_s - LEAD_S or self._over(ends)

    def _finish(self, stream: Stream, launch: Launch) -> None:
        ticket = launch.ticket
        for lane in stream.lanes:
            if lane.tail is not None:
                ticket.ends[lane.rank] = lane.tail
            if lane.last is not None:
                ticket.records.append(lane.last)
        ticket.issued = True

    def _hold_back(self, stream: Stream, launch: Launch) -> Steps:
        """Waits until the publications of its signals are queued: a spinning kernel could block what it waits
        for."""
        for signal in launch.signals:
            key = (signal.name, signal.source, signal.waiter)
            stream.waiting_for = WAITS_FOR_SIGNAL, launch, signal
            if not self._has_come(key):
                yield Need(partial(self._has_come, key))
            self._takes[key] += 1
            self._may_take[key] += 1

    def _has_come(self, key: tuple[str, int, int]) -> bool:
        return self._sent[key[:2]] > self._takes[key]

    def _wait(
        self, stream: Stream, launch: Launch, log: StreamLog, plan: Plan, stage: Stage, place: int
    ) -> Steps:
        """Queues the gate and the waits for signals. If the publications may not be queued yet, the host
        looks at the gate before it queues a kernel that spins."""
        keys = [(signal.name, signal.source, signal.waiter) for signal in launch.signals]
        leader = stream.lanes[0]
        head = partial(self._stages.head, leader, log, plan, launch)
        parts: dict[Hashable, Nodes] = {"gate": lambda: head()[:1], "signals": lambda: head()[1:]}
        if launch.when is None:
            yield from self._hold_back(stream, launch)
            self._stages.alone(stream, plan, stage.index, head)
            return
        if any(self._sent[key[:2]] <= self._may_take[key] for key in keys):
            self._stages.alone(stream, plan, "gate", parts["gate"])
            gate = leader.tail
            if not self.api.done(gate):
                yield Need(lambda: self.api.done(gate))
            if log.at(place):
                yield from self._hold_back(stream, launch)
            self._stages.alone(stream, plan, "signals", parts["signals"])
        else:
            for key in keys:
                self._may_take[key] += 1
            self._stages.alone(stream, plan, stage.index, head)
        # Timing decides which way a replay goes: a first run captures both.
        parts[stage.index] = head
        for which, made in parts.items():
            self._stages.capture(leader, plan, which, (), made, ())

    def _plan(self, stream: Stream, launch: Launch, sizes: Mapping[str, int]) -> Plan:
        captured_sizes = stream.lanes[0].state.bound(launch.graph, sizes)
        key = plan_key(launch, self.card.same(launch.graph), captured_sizes, len(stream.lanes))
        # Each stream has its own codes and memory.
        home = stream.lanes[0].state.home(launch.graph, stream.name)
        found = self.card.plans.get((stream.rank, home, key))
        if found is None:
            for flag in (*launch.sets, *flags_of(launch.when, launch.sets)):
                self.memory.slot(flag)
            made = settings(launch.sets, self.memory.slots, self.api.ints) if launch.sets else None
            of = f"rank {stream.rank} stream {stream.name}: graph {launch.graph.name}"
            signals = tuple(
                (s.name, s.source, self.card.code(f"{of} waits for signal {s.name} of rank {s.source}"))
                for s in launch.signals
            )
            cut = stages(launch, {**sizes, **captured_sizes}, len(stream.lanes))
            changes = stream.lanes[0].state.changes(launch.graph)
            found = Plan(cut, launch.when is not None, made, signals, changes, home)
            self.card.plans[stream.rank, home, key] = found
        return found

    def _begin(self, stream: Stream, launch: Launch, sizes: Mapping[str, int], replay: int) -> None:
        """Tells the states what the launch says besides its graph, once its home is free."""
        begun_s = self.now()
        for lane in stream.lanes:
            home = lane.rank, lane.state.home(launch.graph, lane.name)
            if home[1] != lane.name and self._homes.get(home) is not None:
                self.api.wait(lane.stream, self._homes[home])
            write = lane.state.begin(launch.batch, sizes, replay)
            if write is not None:
                self.api.run(lane.stream, write)
        if launch.batch is not None and not launch.took_s:
            launch.batch_s += self.now() - begun_s

    def _replay(self, stream: Stream, launch: Launch, replay: int) -> Steps:
        sizes = launch.sizes_at(replay)
        self._begin(stream, launch, sizes, replay)
        plan = self._plan(stream, launch, sizes)
        self._replays[id(plan)] += 1
        if self._rehearsal and plan.plain and self._is_rehearsed(stream, plan):
            self._pass_over(stream, launch, plan)
            self.passed_over += 1
            return
        log = self.memory.log(stream.rank, stream.name) if plan.noted or plan.settings else None
        gate, place = None, 0
        if log is not None and plan.noted:
            place = log.reserve_entries(1 + len(plan.signals))
            gate = (log, place) if plan.gated else None
            if gate is not None:
                launch.ticket.gates.append(gate)
        if log is not None and plan.settings is not None and plan.settings.verdicts:
            verdicts = [x for x in launch.sets.values() if isinstance(x, Verdict)]
            log.give([bool(self._outcomes[x.name](*x.key)) for x in verdicts])
        for lane in stream.lanes:
            self._make_ready(lane, launch, sizes, first=replay == 0)
        heads: list[Record | None] = [None] * len(stream.lanes)
        waited: tuple[Any, ...] = launch.after if replay == 0 else ()
        before = [None] * len(stream.lanes)
        if replay == 0 and plan.stages[0].kind == "local":
            before = [self.api.record(lane.stream) for lane in stream.lanes]
        for stage in plan.stages:
            if stage.kind == "collective":
                yield from self._meet(Arrival(stream, launch, plan, stage, replay, gate, heads, waited))
            elif log is not None and stage.kind == "wait":
                yield from self._wait(stream, launch, log, plan, stage, place)
                turns = range(place + 1, place + 1 + len(plan.signals))
                waited += tuple(
                    [Taken(s[0], s[1], log, at) for s, at in zip(plan.signals, turns, strict=True)]
                )
                before = [lane.tail for lane in stream.lanes]
                continue
            elif log is not None and stage.kind == "write_flags":
                self._stages.alone(stream, plan, stage.index, partial(self._flag_writes, log, plan))
            else:
                for i, lane in enumerate(stream.lanes):
                    record = self._stage(lane, launch, log, plan, stage, replay, sizes)
                    record.before, record.gate, record.head = before[i], gate, heads[i]
                    record.waited += waited
                    heads[i] = heads[i] or record
            before, waited = [None] * len(stream.lanes), ()
        self._homes |= {(lane.rank, plan.home): lane.tail for lane in stream.lanes}
        launch.ticket.replays += 1

    def _is_rehearsed(self, stream: Stream, plan: Plan) -> bool:
        """Whether a plan has been queued often enough, and is captured for the states as they are. Of each of
        its captures the first replay sends it to the card."""
        before, captures = self._replays[id(plan)] - 1, len(plan.captured)
        often = before >= REHEARSED or (before >= 2 * captures and self.now() > REHEARSAL_S)
        return often and all(len(keys_after(lane, plan)) == len(plan.stages) for lane in stream.lanes)

    def _pass_over(self, stream: Stream, launch: Launch, plan: Plan) -> None:
        """Queues the events of a launch only: a run that counts then finds as many as it needs."""
        for lane in stream.lanes:
            lane.state.restore(keys_after(lane, plan)[-1])
            self.api.record(lane.stream)
            lane.tail = self.api.record(lane.stream)
        launch.ticket.replays += 1

    def _make_ready(self, lane: RankStream, launch: Launch, sizes: Mapping[str, int], *, first: bool) -> None:
        """Makes a lane wait for tickets and first values of flags; writes the sizes that kernels read."""
        api = self.api
        if first:
            for ticket in launch.after:
                for rank, event in getattr(ticket, "ends", {}).items():
                    if event is not lane.tail and (rank == lane.rank or lane.rank not in ticket.ends):
                        api.wait(lane.stream, event)
        memory = self.card.memories[lane.rank]
        # Read once: the host may declare more meanwhile.
        written = memory.written
        if lane.flags_seen < written:
            api.wait(lane.stream, memory.writing)
            lane.flags_seen = written
        tensors = lane.state.sizes(lane.name)
        device_sizes, counts = lane.state.device_sizes(launch.graph), not launch.took_s
        if lane.state.joined:
            # Launches captured with this one may read sizes that its own graph does not.
            device_sizes, counts = frozenset(tensors.keys() & sizes), lane.rank == launch.rank
        if device_sizes:
            for name in device_sizes:
                value, tensor = sizes[name], tensors[name]
                place = tensor.data_ptr()
                if self._sizes.get(place) != value:
                    begun_s = self.now()
                    api.run(lane.stream, partial(fill, tensor, value))
                    self._sizes[place] = value
                    if counts:
                        launch.size_write_s += self.now() - begun_s
                        # Only the leader's are counted: the time covers all ranks in lockstep.
                        launch.sizes_written += lane.rank == launch.rank

    # -- stages --------------------------------------------------------------------------------------------

    def _stage(
        self,
        lane: RankStream,
        launch: Launch,
        log: StreamLog | None,
        plan: Plan,
        stage: Stage,
        replay: int,
        sizes: Mapping[str, int],
    ) -> Record:
        """Queues a local stage or a put."""
        queued_from_s, states = self.now(), [lane.state]
        if stage.publication is not None:
            other = layout.along(self.mesh, lane.rank, stage.publication.put.axis, 1)
            states.append(self.states[other])
            if lane.rank in self._wires:
                # A rank has one wire: what another of its streams has put there goes first.
                self.api.wait(lane.stream, self._wires[lane.rank].after)
        nodes = partial(self._stages.nodes, lane, launch, log, plan, stage)
        self._stages.queue(lane, plan, stage.index, states, nodes, stage.ops)
        queued_at_s = self.now()
        if launch.queued_at_s is None:
            launch.queued_at_s = queued_at_s
        wire = stage.publication is not None
        record = Record(
            next(self._ids), launch, lane.rank, "wire" if wire else launch.stream, "wire" if wire else "run",
            replay, stage.first, len(stage.ops), sizes, queued_from_s, queued_at_s,
            self.api.record(lane.stream), earlier=lane.last, publication=stage.publication,
        )  # fmt: skip
        if stage.publication is not None:
            self._sent[stage.publication.signal, lane.rank] += 1
            record.waited = (self._wires[lane.rank],) if lane.rank in self._wires else ()
            self._wires[lane.rank] = record
        lane.last, lane.tail = record, record.after
        self._records.append(record)
        return record

    # -- ranks that meet -----------------------------------------------------------------------------------

    def _meet(self, at: Arrival) -> Steps:
        at.events = [self.api.record(lane.stream) for lane in at.stream.lanes]
        for lane, event in zip(at.stream.lanes, at.events, strict=True):
            lane.tail = event
        return self._collectives.meet(at.stage.ops[0], at.stream, at, self._hold)

    def _hold(self, rendezvous: Rendezvous) -> None:
        """Runs the collective of each group of ranks along the axis; the last rank has arrived."""
        arrivals: Mapping[int, Arrival] = rendezvous.arrived
        holders = [self._hold_group(arrivals, *each) for each in self._collectives.groups(rendezvous)]
        writers = [at for at in arrivals.values() if at.writes_flags]
        if writers:
            self._write_flags_together(writers, list(arrivals.values()), holders)
        rendezvous.ends.update(dict.fromkeys(arrivals, True))

    def _hold_group(
        self, arrivals: Mapping[int, Arrival], group: tuple[int, ...], leader_of: Mapping[int, int]
    ) -> RankStream:
        """Queues one group's collective on the stream of its first rank; returns that lane."""
        came = [arrivals[leader_of[rank]] for rank in group]
        places = [
            [lane.rank for lane in at.stream.lanes].index(rank) for at, rank in zip(came, group, strict=True)
        ]
        lanes: list[RankStream] = [at.stream.lanes[place] for at, place in zip(came, places, strict=True)]
        holder, first = lanes[0], came[0]
        for at, place in zip(came[1:], places[1:], strict=True):
            self.api.wait(holder.stream, at.events[place])
        before, queued_from_s = self.api.record(holder.stream), self.now()
        states, op = [self.states[rank] for rank in group], first.stage.ops[0]
        gate = first.gate[0].memory.gate if first.gate is not None else None
        nodes: Nodes = lambda: [partial(run_collective_behind, gate, states, op)]  # noqa: E731
        self._stages.queue(holder, first.plan, first.stage.index, states, nodes, ())
        queued_at_s = self.now()
        for state in states:
            skip_ops(state, [op])
        after, number = self.api.record(holder.stream), next(self._collective_ids)
        waited = tuple([lane.last for lane in lanes]) + tuple(x for at in came for x in at.waited)
        for rank, at, place, lane in zip(group, came, places, lanes, strict=True):
            record = Record(
                next(self._ids), at.launch, rank, at.stream.name, "collective", at.replay, at.stage.first, 1,
                at.launch.sizes_at(at.replay), queued_from_s, queued_at_s, after, before, lane.last, waited,
                at.gate, at.heads[place], collective_id=number, members=group,
            )  # fmt: skip
            at.heads[place] = at.heads[place] or record
            if lane is not holder:
                self.api.wait(lane.stream, after)
            lane.last, lane.tail = record, after
            self._records.append(record)
        return holder

    def _write_flags_together(
        self, writers: Sequence[Arrival], all_: Sequence[Arrival], holders: Sequence[RankStream]
    ) -> None:
        """Writes the flags of all launches that end with a collective, before any of its ranks goes on."""
        holder = holders[0]
        for other in holders[1:]:
            self.api.wait(holder.stream, other.tail)
        for at in writers:
            log = self.memory.log(at.stream.rank, at.stream.name)
            self._stages.queue(
                holder, at.plan, "write_flags", (), partial(self._flag_writes, log, at.plan), ()
            )
        event = self.api.record(holder.stream)
        for lane in (lane for at in all_ for lane in at.stream.lanes):
            if lane is not holder:
                self.api.wait(lane.stream, event)
            lane.tail = event

    def _flag_writes(self, log: StreamLog, plan: Plan) -> list[Callable[[], object]]:
        return [self._stages.write_flags(log, plan)]


@contextmanager
def short_turns(wanted: bool) -> Iterator[None]:
    """Inside, threads of Python get their turns soon, if wanted: those that queue work, while the host looks
    again and again."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(TURN_S if wanted else usual_s)
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)


# Costs that grow with a batch: a run's means have them in them.
EACH = "sequence_s", "each_prompt_s"


def verbs_of(launches: Sequence[Launch], cause: Callable[[Any], Cause]) -> dict[str, float]:
    """Returns the mean seconds of the verbs of a run, if it had any (means add up to their total): launch_s,
    a launch call without what follows; within_s, that of a launch within another; return_s, from when the
    device had the launch to the end of the call; batch_s, saying whose tokens a launch computes; prompt_s,
    how much longer both take with prompts; size_s, the writing of one size; wait_s, from the end for which
    an idle host waited to its next launch. `cause`: gives the time of an end."""
    back_s, waited, idle_s = list[float](), dict[int, Any](), dict[int, float]()
    for launch in launches:
        since, rank = launch.since, launch.rank
        if since is not None and since is not waited.get(rank):
            ended_s = cause(since).at_s
            if ended_s >= idle_s.get(rank, 0.0):
                back_s.append(max(0.0, launch.issued_s - ended_s))
        waited[rank], idle_s[rank] = since, launch.issued_s + launch.took_s
    left_s = [x.issued_s + x.took_s - x.queued_at_s for x in launches if x.queued_at_s is not None]
    # Launches that were held back are given to the device after their calls.
    left_s = [seconds for seconds in left_s if seconds >= 0.0]
    written = sum(x.sizes_written for x in launches)
    each = {"return_s": left_s, "wait_s": back_s}
    found = {name: fmean(seconds) for name, seconds in each.items() if seconds} | _of_launches(launches)
    if launches:
        # The mean of launches includes the host time of kernels.
        found["launch_kernel_s"] = 0.0
    return {**found, "size_s": sum(x.size_write_s for x in launches) / written} if written else found


def _of_launches(launches: Sequence[Launch]) -> dict[str, float]:
    """Returns the means of launch_s, within_s, batch_s and prompt_s; where launches with prompts take no
    longer, or there are no others with batches, the means of all and 0. What EACH takes is in them."""
    inside = [x for x in launches if x.within is not None]
    launches = [x for x in launches if x.within is None]
    with_prompts = [x for x in launches if x.batch is not None and x.batch.prompts]
    others = [x for x in launches if x.batch is None or not x.batch.prompts]
    found = _whole_and_batch(others)
    if with_prompts and "batch_s" in found:
        longer_s = sum(_whole_and_batch(with_prompts).values()) - sum(found.values())
        if longer_s > 0.0:
            return {**found, "prompt_s": longer_s, **dict.fromkeys(EACH, 0.0)}
    found = _whole_and_batch(launches)
    found |= dict.fromkeys(("prompt_s", *EACH), 0.0) if "batch_s" in found else {}
    return found | {"within_s": fmean(x.took_s for x in inside)} if inside else found


def _whole_and_batch(launches: Sequence[Launch]) -> dict[str, float]:
    bare_s = [x.took_s - x.size_write_s - x.batch_s for x in launches]
    batch_s = [x.batch_s for x in launches if x.batch is not None]
    each = {"launch_s": bare_s, "batch_s": batch_s}
    return {name: fmean(seconds) for name, seconds in each.items() if seconds}


def _is_queued(ticket: Any) -> bool:
    return ticket.end is not None if isinstance(ticket, TorchTicket) else bool(ticket.issued)
