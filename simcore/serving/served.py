"""The requests of a run as columns, for figures that are taken over a million of them at once.

finished = not rejected, and has a finish_s
window   = first arrival to last finish
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.requests import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# The journal's columns (`simcore.requests.STEP`), each [steps].
Steps = Mapping[str, Floats]


@dataclass(slots=True)
class Occupancy:
    """Requests in the system, counted as they come and go, and the area under their number over time: the
    witness of Little's law that knows nothing of the times which requests keep."""

    number: int = 0
    area_s: float = 0.0
    since_s: float = 0.0

    def change(self, at_s: float, by: int) -> None:
        """One comes (+1) or goes (-1)."""
        self.area_s += self.number * (at_s - self.since_s)
        self.number += by
        self.since_s = at_s


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Columns of `Request`, each [requests], in any order. Times in seconds, NaN where they never came."""

    id: Ints
    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    preemptions: Ints
    instance: Ints
    rejected: Bools

    def __len__(self) -> int:
        return len(self.id)

    @property
    def finished(self) -> Bools:
        """Which requests got all their tokens, [requests]."""
        done: Bools = ~self.rejected & np.isfinite(self.finish_s)
        return done

    @property
    def window_s(self) -> tuple[float, float]:
        """First arrival and last finish; twice the first arrival where nothing finished."""
        if not len(self):
            return 0.0, 0.0
        first_s = float(self.arrival_s.min())
        return first_s, float(np.max(self.finish_s, where=self.finished, initial=first_s))


def served(requests: Sequence[Request]) -> Served:
    """The columns of requests."""
    columns: dict[str, NDArray[Any]] = {
        column.name: np.fromiter(map(attrgetter(column.name), requests), _dtype(column.name), len(requests))
        for column in fields(Served)
    }
    return Served(**columns)


def _dtype(name: str) -> type:
    if name == "rejected":
        return np.bool_
    return np.float64 if name.endswith("_s") else np.int64
