"""Launches of ranks that meet by kernels: all that a host gives before it waits is captured as one graph.

    [hold]  [between]  ops  [between]  ops  ...  [between]

hold brings the verdicts of all launches to the card; between writes the flags of the launch before and
evaluates the gate of the one behind (`flag_kernels`). Nothing of the host stands between two launches, and
ranks wait for each other on their cards alone. Each rank has flags of its own. Those of others it knows from
meetings: a collective tells the flag that its launch reads of another rank.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any

from torch import Tensor

from simcore.machine import mesh as layout
from simcore.machine.machine import MAIN, Condition, Flag, Setting, Verdict
from simcore.ops.op import Graph, Op
from simcore.validate.machines.cuda.cuda_api import CudaApi
from simcore.validate.machines.cuda.flag_kernels import Settings, flags_of, keyless, settings
from simcore.validate.machines.cuda.memory import Memory, StreamLog
from simcore.validate.machines.cuda.parts import CardTicket, RankStream
from simcore.validate.machines.cuda.plan import Plan
from simcore.validate.machines.cuda.stages import executed
from simcore.validate.machines.launches import Launch
from simcore.validate.machines.state import CardState, Told, telling


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One launch of a sequence, without what differs from token to token. `ops`: bound; `sets`: without keys;
    `first`: the place of its first verdict; `told`: its rank's flag, and the one that it reads of another."""

    graph: Graph
    ops: tuple[Op, ...]
    when: Condition | None
    sets: Mapping[Flag, Setting]
    first: int
    told: tuple[Flag, Flag] | None


@dataclass(eq=False)
class SequencePlan:
    """What is captured of a sequence: `plan` keeps the captures, `captured_sizes` are those with which ops
    are bound. `verdicts`: launches and flags that get one, in order. `kept`: by rank, tensors that captured
    graphs read."""

    parts: tuple[Part, ...]
    captured_sizes: Mapping[str, int]
    plan: Plan
    verdicts: tuple[tuple[int, Flag], ...]
    kept: dict[int, list[Any]] = field(default_factory=dict)
    # What launches that fitted last gave: graphs, conditions, settings without verdicts.
    graphs: list[Graph] = field(default_factory=list)
    whens: list[Condition | None] = field(default_factory=list)
    plain: list[Mapping[Flag, Setting] | None] = field(default_factory=list)

    @cached_property
    def decides(self) -> frozenset[int]:
        """The launches that get verdicts."""
        return frozenset(i for i, _ in self.verdicts)

    @cached_property
    def ops(self) -> list[Op]:
        """All its ops."""
        return [op for part in self.parts for op in part.ops]

    @cached_property
    def gates(self) -> int:
        """How many of its launches have a gate."""
        return sum(part.when is not None for part in self.parts)

    def gates_from(self, log: StreamLog, place: int) -> list[tuple[StreamLog, int] | None]:
        """Returns the log entry of each launch's gate, or None, if those of the sequence begin at `place`."""
        turns = count(place)
        return [None if part.when is None else (log, next(turns)) for part in self.parts]

    def fits(self, launches: Sequence[Launch], sizes: Mapping[str, int]) -> bool:
        """Whether launches are the same but for the keys of verdicts and for sizes that are read on cards."""
        if any(sizes.get(name) != value for name, value in self.captured_sizes.items()):
            return False
        # Lists compare what is the same object first: programs give most of it again and again.
        graphs, whens = [x.graph for x in launches], [x.when for x in launches]
        plain = [None if i in self.decides else x.sets for i, x in enumerate(launches)]
        if (graphs, whens, plain) != (self.graphs, self.whens, self.plain):
            return False
        self.graphs, self.whens, self.plain = graphs, whens, plain
        return all(dict(keyless(launches[i].sets)) == self.parts[i].sets for i in self.decides)

    def verdicts_of(self, launches: Sequence[Launch]) -> list[Verdict]:
        """Returns the verdicts of launches that fit."""
        found = [launches[i].sets[flag] for i, flag in self.verdicts]
        return [each for each in found if isinstance(each, Verdict)]


def runs_of(launches: Sequence[Launch]) -> Iterator[list[Launch]]:
    """Yields launches that follow each other on one stream, with no size of two values: those that one graph
    can hold."""
    together, sizes = list[Launch](), dict[str, int]()
    for launch in launches:
        if together and (
            launch.stream != together[0].stream or {**launch.sizes, **sizes} != {**sizes, **launch.sizes}
        ):
            yield together
            together, sizes = [], {}
        together.append(launch)
        sizes |= launch.sizes
    if together:
        yield together


def sizes_of(launches: Sequence[Launch]) -> dict[str, int]:
    """Returns all their sizes."""
    return {name: value for launch in launches for name, value in launch.sizes.items()}


def check_joined(launch: Launch, state: CardState) -> None:
    """Raises ValueError for a launch that ranks which meet by kernels do not run."""
    usual = launch.repeat == 1 and launch.batch is None and launch.stream == MAIN
    if not usual or not all(isinstance(ticket, CardTicket) for ticket in launch.after):
        raise ValueError(
            f"{_at(launch)}: ranks on cards of their own have one stream, repeat no launches, wait for no"
            " host loop, and serve nothing"
        )
    for signal in launch.signals:
        if not state.carries(signal.name):
            raise ValueError(f"{_at(launch)}: no kernel of its ranks awaits the signal {signal.name}")


def _at(launch: Launch) -> str:
    return f"--on cuda: graph {launch.graph.name}"


def _told(launch: Launch, state: CardState, mesh: layout.Mesh) -> tuple[Flag, Flag] | None:
    """Returns a rank's flag of which it tells another in a launch, and the other's, which the launch reads;
    None if it reads none. Raises ValueError for flags that nobody tells, and for signals that nobody
    sends."""
    at = _at(launch)
    if others := [each.signal for each in launch.graph.publishes if not state.carries(each.signal)]:
        raise ValueError(f"{at}: no kernel of its ranks publishes the signal {others[0]}")
    read = [flag for flag in flags_of(launch.when, {}) if flag.rank != launch.rank]
    told = list(dict.fromkeys(flag for flag in flags_of(None, launch.sets) if flag.rank != launch.rank))
    meets = [op for op in launch.graph.ops if state.tells(op)]
    known = [rank for op in meets for rank in layout.members(mesh, launch.rank, op.axis)]
    if wrong := [*read, *told[1:], *(flag for flag in told if flag.rank not in known)]:
        raise ValueError(f"{at}: reads flag {wrong[0].name} of a rank that does not tell it meanwhile")
    return (Flag(told[0].name, launch.rank), told[0]) if told else None


def sequence_plan(
    launches: Sequence[Launch],
    sizes: Mapping[str, int],
    same: Callable[[Graph], Graph],
    state: CardState,
    mesh: layout.Mesh,
) -> SequencePlan:
    """Returns what is captured of these launches; `same`: returns the graph that stands for its equals.
    Raises ValueError as `_told`."""
    parts, verdicts = list[Part](), list[tuple[int, Flag]]()
    told: tuple[Flag, Flag] | None = None
    for i, launch in enumerate(launches):
        # Ranks that meet where none reads the other's flag still tell each other of that told last.
        told = _told(launch, state, mesh) or told
        ops = tuple(op.at(sizes) for op in launch.graph.ops)
        sets = dict(keyless(launch.sets))
        parts.append(Part(same(launch.graph), ops, launch.when, sets, len(verdicts), told))
        verdicts += [(i, flag) for flag, x in launch.sets.items() if isinstance(x, Verdict)]
    captured = {name for launch in launches for name in state.captured_sizes(launch.graph)}
    found = {name: sizes[name] for name in sorted(captured)}
    plan, decides = Plan((), False, None, (), home=launches[0].stream), {i for i, _ in verdicts}
    return SequencePlan(
        tuple(parts), found, plan, tuple(verdicts),
        graphs=[x.graph for x in launches], whens=[x.when for x in launches],
        plain=[None if i in decides else x.sets for i, x in enumerate(launches)],
    )  # fmt: skip


def nodes(
    api: CudaApi, memory: Memory, log: StreamLog, lane: RankStream, plan: SequencePlan
) -> list[Callable[[], object]]:
    """Returns the calls that launch a sequence on a lane, in order."""
    ints = partial(api.ints, device=memory.device)
    kept = plan.kept.setdefault(lane.rank, [])
    held: Tensor | None = None
    found: list[Callable[[], object]] = []
    if plan.verdicts:
        held = api.zeros(len(plan.verdicts), memory.device)
        kept.append(held)
        found.append(partial(api.verbs.hold, log.memory, held))
    between = partial(api.verbs.between, memory.flags, memory.seen, log.memory, memory.slots, held=held)
    before: Part | None = None
    written: Settings | None = None
    for part in plan.parts:
        for flag in (*part.sets, *flags_of(part.when, part.sets)):
            memory.slot(flag)
        if written is not None or part.when is not None:
            found.append(_joint(between, before, written, part.when))
        told = part.told and Told(*(memory.word(flag) for flag in part.told))
        gate = log.memory.gate if part.when is not None else None
        found.append(partial(_executed, lane.state, part.ops, gate, told))
        before, written = part, settings(part.sets, memory.slots, ints) if part.sets else None
        kept.append(written)
    if written is not None:
        found.append(_joint(between, before, written, None))
    return found


def _joint(
    between: Callable[..., object], before: Part | None, written: Settings | None, when: Condition | None
) -> Callable[[], object]:
    gated, first = before is not None and before.when is not None, 0 if before is None else before.first
    return partial(between, found=written, gated=gated, first=first, condition=when)


def _executed(state: Any, ops: Sequence[Op], gate: Tensor | None, told: Told | None) -> None:
    with telling(told):
        executed(state, ops, gate)


def memories(api: CudaApi, states: Sequence[CardState]) -> list[Memory]:
    """Returns the flags and signals of each rank: of all together, or of each apart if ranks are joined."""
    if not any(state.joined for state in states):
        return [Memory(api)] * len(states)
    first = Memory(api, states[0].device)
    return [first, *(Memory(api, state.device, first.error) for state in states[1:])]
