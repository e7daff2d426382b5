"""A launch cut into stages, each of which is captured once and replayed.

    [wait]  local | collective | wire  ...  [settle]

wait: the gate is evaluated, signals are taken; it is a stage of its own where signals are waited for or
several ranks are led, else the gate is the first node of what follows. wire: what is published goes to the
next rank. settle: flags are written; the last node of the last stage, but where that is a collective (then
whoever holds it writes the flags of all that met) or where several ranks are led.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from simcore.ops.op import Graph, Op, Publication
from simcore.validate.machines.cuda.flag_kernels import Settings, keyless
from simcore.validate.machines.cuts import Segment, segments
from simcore.validate.machines.launches import Launch

Kind = Literal["wait", "local", "collective", "wire", "settle"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Part `index` of a plan: ops `first` to `first + count - 1` of the graph, bound as they are captured.
    `gates`, `settles`: its first node evaluates the gate, its last one writes the flags."""

    index: int
    kind: Kind
    first: int = 0
    ops: tuple[Op, ...] = ()
    publication: Publication | None = None
    gates: bool = False
    settles: bool = False


@dataclass(slots=True, eq=False)
class Plan:
    """The stages of a launch; what has been captured of them, by stage, lane and what else it depends on, and
    what its ranks' states are then like."""

    stages: tuple[Stage, ...]
    gated: bool
    settings: Settings | None
    # Signals by name and rank, with the codes of their errors.
    signals: tuple[tuple[str, int, int], ...]
    captured: dict[Hashable, tuple[Callable[[], object], Hashable]] = field(default_factory=dict)

    @property
    def noted(self) -> bool:
        """Whether each replay notes its gate in the log."""
        return self.gated or bool(self.signals)

    @property
    def settles_in_meeting(self) -> bool:
        """Whether whoever holds its last collective writes its flags."""
        return self.settings is not None and self.stages[-1].kind == "collective"


def plan_key(launch: Launch, graph: Graph, bound: Mapping[str, int], lanes: int) -> Hashable:
    """What a plan goes by: the graph, the sizes that are captured with it, and what it hangs on."""
    signals = tuple([(signal.name, signal.source) for signal in launch.signals])
    return id(graph), tuple(bound.values()), launch.when, keyless(launch.sets), signals, lanes


def stages(launch: Launch, sizes: Mapping[str, int], lanes: int) -> tuple[Stage, ...]:
    """The stages of a launch at given sizes, on so many ranks that are led together."""
    found: list[Stage] = []
    gated = launch.when is not None
    # A signal's place in the log comes after that of a gate.
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
            found.append(Stage(0, "settle", settles=True))
        else:
            found[-1] = replace(found[-1], settles=True)
    return tuple(replace(stage, index=i) for i, stage in enumerate(found))


def _of_segment(segment: Segment, first: int) -> list[Stage]:
    """One collective, or local ops up to each that publishes something."""
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
