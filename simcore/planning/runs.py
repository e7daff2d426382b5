"""Runs of points: simulated in processes or elsewhere, kept on disk, each given back as its figures.

A run is a replica of a point at the prices as they are, or at an end of their intervals. Prices are settled
before the first run: a result then depends neither on the runs before it nor on the process that made it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from simcore.input.files import InputError
from simcore.machine.machine import LawError
from simcore.planning.limits import ALLOWED
from simcore.planning.points import Benches, Point
from simcore.planning.store import Store
from simcore.sim.graph_pricer import End
from simcore.studies.columns import TENANT, WHOLE_RUN
from simcore.studies.processes import in_processes
from simcore.studies.serving.autoscaling import Fleet
from simcore.studies.serving.figures import (
    PERCENTILES,
    Figure,
    gaps,
    latencies,
    steps_in,
    weighted_percentiles,
)
from simcore.studies.serving.replica import figures_of, held, window_of
from simcore.studies.serving.runner import Bench, Case, NewPrices, Result
from simcore.studies.serving.served import Served
from simcore.studies.serving.window import Window

# A window of fewer turnovers has percentiles of latency that are too low: by 10 % at 8 of them, by 4 % at 30.
# A server that still fills in a window of many hardly answers as fast as requests come.
TURNOVERS, MANY_TURNOVERS = 20.0, 80.0
# Percentiles that results.csv has not.
FURTHER = tuple(percent for percent in ALLOWED if percent not in PERCENTILES)


class Ask(NamedTuple):
    """A run that a search wants."""

    point: Point
    replica: int
    end: End = "value"


class Ran(NamedTuple):
    """The figures of a run; None where there is none. `growing`: its queue grew, so that it keeps up with no
    such load. `fault`: why it failed, then without figures. `shares`: device time by source of its prices.
    `short`: too few requests came at its rate for a steady state; `filling`: how much more requests are there
    in the second half of its window, see `Window`; `long`: the window is so long that they should not be."""

    figures: Mapping[str, float | None]
    growing: bool = False
    fault: str = ""
    shares: Mapping[str, float] = {}
    short: bool = False
    filling: float = 0.0
    long: bool = False


# A point by what its runs go by, where that is known; a replica; an end.
Name = tuple[str | Point, int, str]


Finished = Callable[[int, Ran], None]


class Maker(Protocol):
    """Where runs are made."""

    def make(self, asks: Sequence[Ask], finished: Finished) -> None:
        """Makes runs. Hands each one over as soon as it is done, by its place among the asks, in any order.
        Raises InputError if that cannot go on."""

    def close(self) -> None:
        """Leaves nothing running."""

    def about(self) -> str:
        """Returns where it makes them, in words."""


@dataclass(frozen=True)
class InProcesses:
    """Makes runs on this machine, in forked processes."""

    benches: Benches
    jobs: int

    def make(self, asks: Sequence[Ask], finished: Finished) -> None:
        """See `Maker`."""
        for ask in asks:
            # Processes begin with the same prices, and give back what they find.
            settle(ask)
        every = self.benches.every()

        def work(i: int) -> tuple[Ran, list[NewPrices]]:
            ran = simulated(asks[i])
            return ran, [bench.new_prices() for bench in every]

        def take(i: int, gave: tuple[Ran, list[NewPrices]]) -> None:
            ran, prices = gave
            for bench, found in zip(every, prices, strict=True):
                bench.take_over(found)
            finished(i, ran)

        in_processes(work, len(asks), self.jobs, lambda done: None, finished=take)

    def close(self) -> None:
        """See `Maker`; the processes have ended with each call."""

    def about(self) -> str:
        """See `Maker`."""
        return f"this machine, at most {self.jobs} processes"


@dataclass
class Runner:
    """Has the runs made that searches ask for. `simulated`, `requests`: runs made and requests in them;
    `known`: runs taken from the store."""

    maker: Maker
    store: Store
    progress: Callable[[str, int, int], None]
    simulated: int = 0
    known: int = 0
    requests: int = 0
    _seen: dict[Name, Ran] = field(default_factory=dict)
    _asked: int = 0

    def __call__(self, asks: Sequence[Ask]) -> list[Ran]:
        """Returns the results of runs, in the order of the asks; equal ones are made once."""
        wanted = {_name(ask): ask for ask in asks}
        new = {name: ask for name, ask in wanted.items() if name not in self._seen}
        keys = {name: _key(ask) for name, ask in new.items()}
        kept = self.store.load(key for key in keys.values() if key)
        for name, key in keys.items():
            if key in kept:
                self._seen[name] = Ran(*kept[key])
                self.known += 1
        missing = [(name, ask) for name, ask in new.items() if name not in self._seen]
        self._asked += len(new)
        if missing:
            self._make(missing, keys)
        return [self._seen[_name(ask)] for ask in asks]

    def _make(self, missing: Sequence[tuple[Name, Ask]], keys: Mapping[Name, str | None]) -> None:
        done = self._asked - len(missing)

        def finished(i: int, ran: Ran) -> None:
            nonlocal done
            name, ask = missing[i]
            self._seen[name] = ran
            self.simulated += 1
            self.requests += ask.point.case.axes.requests
            if (key := keys[name]) is not None and not ran.fault:
                self.store.save(key, ran)
            done += 1
            self.progress("run", done, self._asked)

        self.maker.make([ask for _, ask in missing], finished)


def _name(ask: Ask) -> Name:
    return ask.point.key or ask.point, ask.replica, ask.end


def _key(ask: Ask) -> str | None:
    return None if ask.point.key is None else f"{ask.point.key}/{ask.replica}/{ask.end}"


def settle(ask: Ask) -> None:
    """Makes the prices of a run, if they are not there yet."""
    for bench, part in ask.point.bench.parts(ask.point.case):
        if (part.ranks, ask.end) not in bench.prices:
            _, graph_pricer = bench.price(part.ranks, ask.end)
            graph_pricer.settle_by_probes()


def simulated(ask: Ask) -> Ran:
    """Makes a run, at settled prices. A fault of it is part of the result."""
    bench, case = ask.point.bench, ask.point.case
    try:
        result = bench.run(case, ask.replica, ask.end)
        window = window_of(bench, case, result)
        figures = {**_of_all_servers(bench, case, result), **figures_of(bench, result, case, window)}
    except (InputError, LawError) as error:
        return Ran({}, fault=f"{case.axes.label}: {error}")
    values = {name: value for name, (value, _) in figures.items() if not name.endswith(WHOLE_RUN)}
    shares = {str(name): seconds for name, seconds in result.trace.rows.sources.items()}
    further = _further(result, window, bench.scenario.slos)
    # A recorded load is what it is, however short and uneven.
    recorded = bool(ask.point.scenario.workload.traces)
    short = window.unrated or (window.turnovers < TURNOVERS and not recorded)
    filling = 0.0 if recorded else window.filling
    long = window.turnovers >= MANY_TURNOVERS
    return Ran({**values, **further}, window.growing, "", shares, short, filling, long)


def _of_all_servers(bench: Bench, case: Case, result: Result) -> Mapping[str, Figure]:
    """Returns what a run takes of devices that all run all the time, by the names that autoscaling has."""
    if case.scaling is not None:
        return {}
    parts = [part for _, part in bench.parts(case)]
    figures = held(Fleet.fixed(sum(part.servers for part in parts)), *result.served.window_s, parts[0].ranks)
    # Servers of a fleet may differ in their devices.
    return {name: each for name, each in figures.items() if not (bench.fleet and name == "device_hours")}


def _further(result: Result, window: Window, tenants: Iterable[str]) -> dict[str, float | None]:
    """Returns the percentiles of latencies that results.csv has not, of all and of each tenant's requests."""
    came = result.served if window.whole else result.served.only(window.came)
    found: dict[str, float | None] = {}
    for percent in FURTHER:
        found |= _percentiles(came, percent, "")
        for place, tenant in enumerate(tenants):
            found |= _percentiles(came.only(came.tenant == place), percent, f"{TENANT}.{tenant}.")
        (gap_s,) = weighted_percentiles(*gaps(steps_in(result.journal, window)), (percent,)) or (None,)
        found[f"itl_p{percent:g}_s"] = gap_s
    return found


def _percentiles(served: Served, percent: float, of: str) -> dict[str, float | None]:
    return {
        f"{of}{name}_p{percent:g}_s": float(np.percentile(seconds, percent)) if len(seconds) else None
        for name, seconds in latencies(served).items()
    }
