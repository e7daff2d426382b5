"""A launch cut into stages, each of which is captured once and replayed.

    [wait]  local | collective | wire  ...  [write_flags]

wait: evaluates the gate and takes signals. It is a stage of its own if there are signals, if several ranks
run in lockstep or if a collective comes first; else the gate is the first node of what follows. wire: puts
what is published to the next rank. write_flags: writes the flags, as the last node of the last stage, or for
several ranks in lockstep as a stage of its own; if a collective is last, its holder writes the flags of all.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from simcore.ops.op import Graph, Op, Publication
from simcore.validate.machines.cuda.flag_kernels import Settings, keyless
from simcore.validate.machines.cuts import Segment, segments
from simcore.validate.machines.launches import Launch

Kind = Literal["wait", "local", "collective", "wire", "write_flags"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Part `index` of a plan: local ops from op `first` of the graph on, a collective or a put; ops are bound
    as they are captured. `gates`: its first node is the gate; `writes_flags`: its last node writes them."""

    index: int
    kind: Kind
    first: int = 0
    ops: tuple[Op, ...] = ()
    publication: Publication | None = None
    gates: bool = False
    writes_flags: bool = False


@dataclass(slots=True, eq=False)
class Plan:
    """The stages of a launch. `captured`: by stage, lane and keys of states, the replay of the stage and the
    key of the first state after it."""

    stages: tuple[Stage, ...]
    gated: bool
    settings: Settings | None
    # Signals by name and rank, with the codes of their errors.
    signals: tuple[tuple[str, int, int], ...]
    # Whether its stages are launched anew each time.
    changes: bool = False
    # The stream whose captured stages it replays.
    home: str = ""
    captured: dict[Hashable, tuple[Callable[[], object], Hashable]] = field(default_factory=dict)

    @property
    def noted(self) -> bool:
        """Whether each replay writes its gate to the log."""
        return self.gated or bool(self.signals)

    @property
    def plain(self) -> bool:
        """Whether nothing else on the card or on a host depends on its having run: it reads and writes no
        flags and signals, and meets no other rank."""
        local = all(stage.kind == "local" and stage.publication is None for stage in self.stages)
        return local and not (self.noted or self.changes) and self.settings is None

    @property
    def writes_flags_in_collective(self) -> bool:
        """Whether the flags are written when the last stage, a collective, ends."""
        return self.settings is not None and self.stages[-1].kind == "collective"


def plan_key(launch: Launch, graph: Graph, captured_sizes: Mapping[str, int], lanes: int) -> Hashable:
    """Returns the key of a plan: the graph, the captured sizes, and all else that its stages depend on."""
    signals = tuple([(signal.name, signal.source) for signal in launch.signals])
    return id(graph), tuple(captured_sizes.values()), launch.when, keyless(launch.sets), signals, lanes


def stages(launch: Launch, sizes: Mapping[str, int], lanes: int) -> tuple[Stage, ...]:
    """Returns the stages of a launch at given sizes, on `lanes` ranks in lockstep."""
    found: list[Stage] = []
    gated = launch.when is not None
    # A signal's place in the log comes after the gate's.
    apart = bool(launch.signals) or (gated and lanes > 1)
    if apart:
        found.append(Stage(0, "wait", gates=True))
    first = 0
    for segment in segments(launch.graph, sizes):
        found += _of_segment(segment, first)
        first += len(segment.ops)
    if gated and not apart:
        if found[0].kind == "local":
            found[0] = replace(found[0], gates=True)
        else:
            found.insert(0, Stage(0, "wait", gates=True))
    if launch.sets and found[-1].kind != "collective":
        if lanes > 1:
            found.append(Stage(0, "write_flags", writes_flags=True))
        else:
            found[-1] = replace(found[-1], writes_flags=True)
    return tuple(replace(stage, index=i) for i, stage in enumerate(found))


def _of_segment(segment: Segment, first: int) -> list[Stage]:
    """Returns one collective, or the local ops, cut after each op that publishes something."""
    if segment.collective:
        return [Stage(0, "collective", first, segment.ops)]
    found, begin = [], 0
    for i in sorted(segment.leaving):
        found.append(Stage(0, "local", first + begin, segment.ops[begin : i + 1]))
        found += [Stage(0, "wire", first + i, publication=each) for each in segment.leaving[i]]
        begin = i + 1
    if begin < len(segment.ops) or not segment.ops:
        found.append(Stage(0, "local", first + begin, segment.ops[begin:]))
    return found
