"""What the replicas of a serving case gave."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from simcore.machine.trace import Trace
from simcore.ops.op import SourceKind
from simcore.studies.serving.figures import Figure, over_replicas
from simcore.studies.serving.kv_memory import Room
from simcore.studies.serving.runner import Case
from simcore.studies.serving.window import Window


@dataclass(slots=True)
class Found:
    """What the replicas of a case gave: of each its figures, its window and how many requests of that were
    answered. `ends` are the figures of the first replica at the fast and the slow
    end of all prices; `requests` and `levels` its tables, `unseen_gaps` the share of the time between tokens
    that the percentiles of ITL leave out, `trace` what it launched, kept of one case only;
    `chance` intervals of percentiles by the order of requests, where there is one replica only."""

    case: Case
    replicas: list[Mapping[str, Figure]]
    windows: list[Window]
    measured: list[int]
    sources: dict[SourceKind, float]
    room: Room
    left_out: int
    unseen_gaps: float
    requests: dict[str, Any]
    levels: dict[str, Any]
    trace: Trace | None
    ends: dict[str, Mapping[str, Figure]] = field(default_factory=dict)
    chance: dict[str, tuple[float, float]] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """The mean of a figure over replicas."""
        return over_replicas([{name: replica[name]} for replica in self.replicas])[name][0]
