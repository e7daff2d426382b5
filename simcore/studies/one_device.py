"""A study put together for one device."""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from simcore.studies.common import Outcome, Progress, on_device
from simcore.studies.published import compare


def _nothing(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    del lines
    return []


@dataclass(frozen=True)
class DeviceStudy:
    """A study put together for one device, with the published figures of this device.

    `module`: of the study, with `run` and `tape` of its `bench`; `fitted`: names of the profile and constants
    in use that may be fitted to figures; `laws`: the laws that the study checks itself; `joined`: merges
    figures that are published several times; `notes`: makes notes from the lines of comparison.csv.
    """

    module: ModuleType
    bench: Any
    device: str
    published: Sequence[Any]
    fitted: AbstractSet[str] = frozenset()
    laws: tuple[str, ...] = ()
    joined: Callable[[Sequence[Any]], Sequence[Any]] = tuple
    notes: Callable[[Sequence[Mapping[str, Any]]], list[str]] = _nothing

    def run(self, progress: Progress) -> Outcome:
        """See Study."""
        return on_device(self.module.run(self.bench, progress), self.device)

    def tape(self, record: Callable[..., Any]) -> list[str]:
        """See Study."""
        lines: list[str] = self.module.tape(self.bench, record)
        return lines

    def compare(self, outcome: Outcome) -> list[dict[str, Any]]:
        """See Study."""
        lines, alone = compare(outcome.rows, self.joined(self.published), self.fitted)
        if alone:
            of = f"{len(alone)} of {len(self.published)} published figures"
            outcome.warnings.append(f"{of} are not of this run (the first: {alone[0]})")
        outcome.notes += self.notes(lines)
        return lines
