"""Autoscaling: how many of the servers hold their devices, by a rule that looks every `check_s` seconds.

    wanted    open requests   ceil(open requests of the ready servers / target)
              utilisation     ceil(seconds for which they had an open request since the last check
                                   / seconds since it / target)
    number    = the highest `wanted` of the last keep_s seconds, at least min_servers, at most all
    a server    starting, start_s long -> ready -> draining, until its last request is answered -> off

A server holds its devices from the begin of its start until it is off. Seconds of servers, over the run from
the first arrival to the last answer:

    server_s            = integral of the number of servers that hold their devices
    device_hours        = server_s * ranks / 3600
    device_time_saved   = 1 - server_s / (servers * duration_s)

The rule of open requests is Kubernetes' for a target of average concurrency, without its tolerance of 10 %;
`keep_s` is its stabilisation window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from simcore.input.fields import Many, Strict
from simcore.studies.serving.levels import most_at_once
from simcore.studies.serving.served import Floats

# A rounding error must not want one server more.
ROUNDING = 1e-9
Seconds = Annotated[float, Field(ge=0.0, le=1e6)]
Pause = Annotated[float, Field(ge=0.01, le=1e6)]
Fewest = Annotated[int, Field(ge=1, le=1024)]


class FixedFleet(Strict):
    """All servers run all the time."""

    kind: Literal["none"]


class _Scaled(Strict):
    """The fields of every rule."""

    min_servers: Many[Fewest] = Field([1], description="servers that run at least, from the begin on")
    start_s: Many[Seconds] = Field(
        [60.0], description="from when a server is started until it takes requests, s; it holds its devices"
    )
    check_s: Many[Pause] = Field([10.0], description="from one check to the next, s")
    keep_s: Many[Seconds] = Field(
        [0.0], description="for how long fewer servers must have been wanted before some are stopped, s"
    )

    def _settings(self) -> str:
        """Returns the settings that are not the default ones, in words."""
        words = [
            (float(self.min_servers[0]), 1.0, "at least {:.12g}"),
            (self.start_s[0], 60.0, "{:.12g} s to start"),
            (self.check_s[0], 10.0, "a check each {:.12g} s"),
            (self.keep_s[0], 0.0, "kept {:.12g} s"),
        ]
        return "".join(f", {text.format(value)}" for value, usual, text in words if value != usual)


class ByOpenRequests(_Scaled):
    """As many servers as give each `target` open requests."""

    kind: Literal["open_requests"]
    target: Many[Annotated[float, Field(ge=1e-6, le=1e6)]] = Field(
        description="open requests that a server shall have: sent to it and not answered yet"
    )

    def label(self) -> str:
        """Returns its name in results."""
        one = self.target[0] == 1.0
        return f"autoscaled to {self.target[0]:.12g} open request{'' if one else 's'}{self._settings()}"

    def wanted(self, open_requests: int, busy_s: float, elapsed_s: float) -> int:
        """Returns the servers that it wants; `busy_s`: see `ByUtilisation`."""
        del busy_s, elapsed_s
        return ceil(open_requests / self.target[0] - ROUNDING)


class ByUtilisation(_Scaled):
    """As many servers as keep each busy for `target` of the time."""

    kind: Literal["utilisation"]
    target: Many[Annotated[float, Field(ge=1e-6, le=1.0)]] = Field(
        description="share of the time for which a server shall have an open request, one or many"
    )

    def label(self) -> str:
        """Returns its name in results."""
        return f"autoscaled to {100.0 * self.target[0]:.12g} % busy{self._settings()}"

    def wanted(self, open_requests: int, busy_s: float, elapsed_s: float) -> int:
        """Returns the servers that it wants. `busy_s`: seconds for which ready servers had an open request,
        all together, in the `elapsed_s` seconds since the last check."""
        del open_requests
        return ceil(busy_s / elapsed_s / self.target[0] - ROUNDING)


Rule = ByOpenRequests | ByUtilisation
Autoscaling = FixedFleet | ByOpenRequests | ByUtilisation


@dataclass(slots=True)
class Stint:
    """One stretch in which a server holds its devices, s: its start, when it takes requests, when it takes no
    more, and when its devices are free; infinite if that does not come."""

    server: int
    started_s: float
    ready_s: float
    stopped_s: float = inf
    freed_s: float = inf


@dataclass(frozen=True, slots=True, eq=False)
class Fleet:
    """Which of `servers` servers held their devices when, in a run. The columns are those of `Stint`, each
    [stints], in order of start."""

    servers: int
    server: Floats
    started_s: Floats
    ready_s: Floats
    stopped_s: Floats
    freed_s: Floats

    @classmethod
    def of(cls, servers: int, stints: Sequence[Stint]) -> "Fleet":
        """Returns the fleet of these stints."""
        names = ("server", "started_s", "ready_s", "stopped_s", "freed_s")
        return cls(servers, *(np.array([getattr(one, name) for one in stints], float) for name in names))

    @classmethod
    def fixed(cls, servers: int) -> "Fleet":
        """Returns the fleet all of whose servers run all the time."""
        return cls.of(servers, [Stint(server, 0.0, 0.0) for server in range(servers)])

    def held_s(self, begin_s: float, end_s: float) -> float:
        """Returns the seconds between two times for which servers held their devices, all together."""
        always = (self.started_s <= begin_s) & (self.freed_s >= end_s)
        part_s = self.freed_s.clip(begin_s, end_s) - self.started_s.clip(begin_s, end_s)
        return float(always.sum()) * (end_s - begin_s) + float(part_s[~always].sum())

    def mean(self, begin_s: float, end_s: float) -> float:
        """Returns the mean number of servers that held their devices between two times, or at one."""
        if end_s > begin_s:
            return self.held_s(begin_s, end_s) / (end_s - begin_s)
        return float(self.at(np.array([begin_s]))[0])

    def at(self, times_s: Floats) -> Floats:
        """Returns the number of servers that hold their devices at times, [times]."""
        begun = np.searchsorted(np.sort(self.started_s), times_s, side="right")
        ended = np.searchsorted(np.sort(self.freed_s), times_s, side="right")
        return (begun - ended).astype(np.float64)

    def most(self, begin_s: float, end_s: float) -> float:
        """Returns the most servers that held their devices at once between two times."""
        inside = (self.started_s <= end_s) & (self.freed_s >= begin_s)
        return most_at_once(self.started_s[inside], self.freed_s[inside])

    def starts(self, begin_s: float, end_s: float) -> int:
        """Returns how many servers were started between two times."""
        return int(((self.started_s > begin_s) & (self.started_s <= end_s)).sum())
