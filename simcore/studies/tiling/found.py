"""What the runs of one case gave."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simcore.studies.tiling.cases import Case
from simcore.studies.tiling.figures import Figures
from simcore.studies.tiling.implementations import Choice


@dataclass(slots=True, eq=False)
class Found:
    """What a case gave. `runs` are figures of time: with prices as they are, then at their ends, where not
    all of them need be known; or of each measured run, the one that is reported first. `stays`: see
    `Bench.stays`."""

    case: Case
    tiles: Choice
    counts: Figures
    runs: list[Figures]
    by_kind: list[Mapping[str, float]]
    memory_bytes: float
    sources: Mapping[str, float]
    steps: dict[str, Any]
    measured: bool
    stays: bool

    def values(self, name: str) -> list[float]:
        """A figure of time in each run."""
        return [run[name][0] for run in self.runs if name in run]

    def value(self, name: str) -> float:
        """A figure of time: with prices as they are, or of the measured run that is reported."""
        return self.values(name)[0]
