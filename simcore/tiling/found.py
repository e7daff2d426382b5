"""What the runs of one case gave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from simcore.tiling.cases import Case
from simcore.tiling.figures import Figures
from simcore.tiling.implementations import Choice


@dataclass(slots=True, eq=False)
class Found:
    """What a case gave. `runs` are figures of time: with prices as they are, then at their ends, where not
    all of them need be known; or of each measured run."""

    case: Case
    tiles: Choice
    counts: Figures
    runs: list[Figures]
    by_kind: list[Mapping[str, float]]
    memory_bytes: float
    sources: Mapping[str, float]
    steps: dict[str, Any]
    measured: bool

    def values(self, name: str) -> list[float]:
        """A figure of time in each run."""
        return [run[name][0] for run in self.runs if name in run]

    def value(self, name: str) -> float:
        """A figure of time: as predicted, or the median of what was measured."""
        return middle(self.values(name), self.measured)


def middle(values: Sequence[float], measured: bool) -> float:
    """The figure that stands for several runs: of predicted ones the first, with prices as they are."""
    return median(values) if measured else values[0]
