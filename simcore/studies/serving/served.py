"""The requests of a run as columns, for figures over a million requests at once.

finished = not rejected, and has a finish_s
window   = first arrival to last finish
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.workload.requests import Request

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# Relative rounding error of two sums of the same time.
ROUNDING = 1e-12
# The journal's columns (`simcore.workload.requests.STEP`), each [steps].
Steps = Mapping[str, Floats]


@dataclass(slots=True)
class Occupancy:
    """Times at which the machine let requests in and out: they test Little's law independently of the times
    in the requests. `entered_s`: when each left a front end; the machine lets it in there once more."""

    came_s: list[float] = field(default_factory=list)
    went_s: list[float] = field(default_factory=list)
    entered_s: list[float] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Requests left in the system at the end."""
        return len(self.came_s) - len(self.entered_s) - len(self.went_s)

    @property
    def area_s(self) -> float:
        """Area under the number of requests over time, once all have gone."""
        return math.fsum(self.went_s) + math.fsum(self.entered_s) - math.fsum(self.came_s)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Columns of `Request`, each [requests], in any order. Times in seconds, NaN if never reached. `tenant`:
    the place of each one's tenant in the workload, 0 without tenants."""

    id: Ints
    arrival_s: Floats
    scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    preemptions: Ints
    cached_prompt_tokens: Ints
    waited_for_kv: Ints
    instance: Ints
    rejected: Bools
    tenant: NDArray[np.int16]

    def __len__(self) -> int:
        return len(self.id)

    def only(self, chosen: Bools) -> "Served":
        """Returns the chosen requests; `chosen`: [requests]."""
        return Served(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})

    @property
    def finished(self) -> Bools:
        """Which requests got all their tokens, [requests]."""
        done: Bools = ~self.rejected & np.isfinite(self.finish_s)
        return done

    @property
    def window_s(self) -> tuple[float, float]:
        """First arrival and last finish; twice the first arrival if no request finished."""
        if not len(self):
            return 0.0, 0.0
        first_s = float(self.arrival_s.min())
        return first_s, float(np.max(self.finish_s, where=self.finished, initial=first_s))


def served(requests: Sequence[Request], tenants: NDArray[np.int16] | None = None) -> Served:
    """Returns the columns of requests. A request scheduled at once may be a rounding error before its
    arrival, since both are different sums: its wait is set to 0. `tenants`: by number of the request."""
    columns: dict[str, NDArray[Any]] = {
        column.name: np.fromiter(map(attrgetter(column.name), requests), _dtype(column.name), len(requests))
        for column in fields(Served)
        if column.name != "tenant"
    }
    of = columns["id"]
    columns["tenant"] = np.zeros(len(of), np.int16) if tenants is None else tenants[of]
    scheduled_s, arrival_s = columns["scheduled_s"], columns["arrival_s"]
    early = (scheduled_s < arrival_s) & (arrival_s - scheduled_s <= ROUNDING * arrival_s)
    columns["scheduled_s"] = np.where(early, arrival_s, scheduled_s)
    return Served(**columns)


def _dtype(name: str) -> type:
    if name == "rejected":
        return np.bool_
    return np.float64 if name.endswith("_s") else np.int64
