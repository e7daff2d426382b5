"""Runs cases of a serving scenario: a strategy, a load, a number of devices, a replica.

Every server is a group of `ranks` devices in lockstep; one of them is simulated for all. Servers of a case
are alike, or in a fleet those of each of its groups; all take their requests from one router.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simcore.input.files import InputError
from simcore.machine import laws
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.decoder import TENSOR
from simcore.models.decoder_config import DecoderConfig
from simcore.models.served_decoder import ROWS, ServedDecoder
from simcore.ops.op import Pricer, SourceKind
from simcore.sim import contention
from simcore.sim.garbage import no_collections
from simcore.sim.graph_pricer import End, GraphPricer, Known, PricedGroups
from simcore.sim.runs import Run, Setup
from simcore.sim.simulation import RankKind
from simcore.studies.common import ServingAxes, shares_of
from simcore.studies.hardware import Hardware, at_end
from simcore.studies.own import OwnError, blamed
from simcore.studies.serving import laws as serving_laws
from simcore.studies.serving.autoscaling import Fleet, Rule
from simcore.studies.serving.figures import Figure, over_replicas
from simcore.studies.serving.host_time import NO_HOST_TIME, Feeder, FrontEnds, HostTime, WaysOut
from simcore.studies.serving.kv_memory import Room, ServerMemory
from simcore.studies.serving.offer import choice, offer, router
from simcore.studies.serving.scaler import Scaler
from simcore.studies.serving.scenario import Point, ServingScenario, SharedMemory, Throughput
from simcore.studies.serving.served import Bools, Occupancy, Served, Steps, served
from simcore.studies.serving.strategies import (
    ServingStrategy,
    host_of,
    overheads_of,
    processes,
    prompts_apart,
    streams,
)
from simcore.studies.serving.window import Window
from simcore.workload import arrivals
from simcore.workload.drawn import Drawn, Tenants
from simcore.workload.requests import Journal, Request

SERVER = "server"
# Graph prices by device of a fleet and ranks.
NewPrices = Mapping[tuple[int, int], Mapping[str, Known]]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One strategy at one load; every list field has one value. `scaling`: the rule by which servers start
    and stop, None if all run all the time. `groups`: of a fleet, each of its groups as a case by itself."""

    axes: ServingAxes
    point: Point
    strategy: ServingStrategy
    scaling: Rule | None = None
    groups: "tuple[Case, ...]" = ()

    @property
    def ranks(self) -> int:
        """Devices of a server. Raises ValueError in a fleet whose servers differ in them."""
        if self.axes.ranks is None:
            raise ValueError(f"{self.axes.label}: servers differ in their ranks")
        return self.axes.ranks

    @property
    def servers(self) -> int:
        """Number of groups of devices that each serve independently; with autoscaling, the most."""
        return sum(one.servers for one in self.groups) or self.axes.devices // self.ranks


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Servers of a fleet that are alike. `name`: in words; `base`: their device without its changes; `bench`:
    of their device; `strategies`: returns the strategies of a scenario as they run here."""

    name: str
    base: str
    bench: "Bench"
    servers: int
    ranks: int
    strategies: Callable[[ServingScenario], Sequence[ServingStrategy]]


@dataclass(frozen=True, slots=True, eq=False)
class Servers:
    """Servers of a run that are alike, on the ranks from `first` on. `name`: in words."""

    name: str
    bench: "Bench"
    case: Case
    room: Room
    first: int

    @property
    def ranks(self) -> range:
        """The first rank of each server."""
        return range(self.first, self.first + self.case.axes.devices, self.case.ranks)

    def program(self, m: Machine, journal: Journal) -> Program:
        """Returns the schedule of one server."""
        return self.bench.program(self.case, self.room, m, journal)


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """The results of one run. `groups`: its servers, those that are alike together. `opens`: which requests
    open a session, [requests]; None: no sessions. `fleet`: which servers held their devices when; None in a
    scenario without autoscaling."""

    served: Served
    journal: Steps
    groups: tuple[Servers, ...]
    trace: Trace
    left_out: int
    opens: Bools | None = None
    fleet: Fleet | None = None

    @property
    def room(self) -> Room:
        """The room for KV of a server of the first group."""
        return self.groups[0].room

    @property
    def kv(self) -> tuple[Steps, float]:
        """The journal, and how much KV a server holds at most in it: where that differs between servers, KV
        counts in shares of each one's."""
        limits = [group.room.limit for group in self.groups]
        if len({*limits}) == 1:
            return self.journal, limits[0]
        of = np.repeat(np.array(limits, float), [group.case.axes.devices for group in self.groups])
        limit = of[self.journal["instance"].astype(np.intp)]
        shares = {name: self.journal[name] / limit for name in ("kv_used", "kv_peak")}
        return {**self.journal, **shares}, 1.0


@dataclass(slots=True)
class CaseResult:
    """The results of a case: for each replica its figures, its window and the number of requests answered in
    it. `rooms`: for KV, of a server of each group. Of the first replica: `at_price_ends` are the figures at
    the fast and the slow end of all prices, `requests` and `levels` the tables, `unseen_gaps` the share of
    the time between tokens that the percentiles of ITL leave out, `trace` its launches, kept for one case
    only. `chance`: intervals of percentiles by the order of requests, if there is only one replica."""

    case: Case
    replicas: list[Mapping[str, Figure]]
    windows: list[Window]
    measured: list[int]
    sources: dict[SourceKind, float]
    rooms: tuple[Room, ...]
    left_out: int
    unseen_gaps: float
    requests: dict[str, Any]
    levels: dict[str, Any]
    trace: Trace | None
    at_price_ends: dict[str, Mapping[str, Figure]] = field(default_factory=dict)
    chance: dict[str, tuple[float, float]] = field(default_factory=dict)

    def value(self, name: str) -> float | None:
        """Returns the mean of a figure over replicas."""
        return over_replicas([{name: replica[name]} for replica in self.replicas])[name][0]


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and caches models and prices. `fleet`: the groups of servers
    that stand in the place of the device, each with a bench; `hardware` is then that of the first."""

    scenario: ServingScenario
    config: DecoderConfig
    hardware: Hardware
    fleet: tuple[Group, ...] = ()
    models: dict[tuple[int, HostTime], ServedDecoder] = field(default_factory=dict)
    prices: dict[tuple[int, End], tuple[Pricer, GraphPricer]] = field(default_factory=dict)
    groups: dict[int, PricedGroups] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The device in words, or the fleet."""
        return " + ".join(group.name for group in self.fleet) or self.hardware.name

    @property
    def benches(self) -> "list[Bench]":
        """The benches of its devices."""
        return [group.bench for group in self.fleet] or [self]

    def parts(self, case: Case) -> "list[tuple[Bench, Case]]":
        """Returns the servers of a case that are alike as a case each, with the bench of their device."""
        return list(zip(self.benches, case.groups, strict=True)) if self.fleet else [(self, case)]

    def of(self, scenario: ServingScenario) -> "Bench":
        """Returns the bench of another scenario with the same model, device and prices."""
        fleet = tuple(replace(one, bench=one.bench.of(_alone(scenario, one))) for one in self.fleet)
        return replace(self, scenario=scenario, fleet=fleet)

    def model(self, ranks: int, host: HostTime = NO_HOST_TIME) -> ServedDecoder:
        """Returns the sharded model, in whose steps an engine's host takes time. Raises ModelError if it
        cannot be sharded so."""
        hardware = self.hardware
        # Hosts that differ in nothing that this model has share its graphs and their prices.
        host = host.of_steps.in_formats(hardware.multiplied)
        if (ranks, host) not in self.models:
            style, ops = hardware.style(ranks), host.ops(ROWS)
            self.models[ranks, host] = ServedDecoder(
                self.config, ranks, hardware.dtypes, style, hardware.whole, ops, host.marks, host.quantizes,
                host.call_s,
            )  # fmt: skip
        return self.models[ranks, host]

    def price(self, ranks: int, end: End) -> tuple[Pricer, GraphPricer]:
        """Returns the prices as they are, or at the `low` or `high` end of their intervals, and the pricer of
        graphs."""
        key = (ranks, end)
        if key not in self.prices:
            plain = self.hardware.price(ranks, None, True)
            if ranks not in self.groups:
                kept = self.hardware.kept
                known = kept.load(ranks) if kept else None
                self.groups[ranks] = PricedGroups(plain, self.hardware.roofline, known)
            graph_pricer = GraphPricer(plain, self.hardware.roofline, end=end, groups=self.groups[ranks])
            self.prices[key] = at_end(plain, end), graph_pricer
        return self.prices[key]

    def settle(self) -> None:
        """Makes no more prices curves that are lines so far."""
        for bench in self.benches:
            for _, graph_pricer in bench.prices.values():
                graph_pricer.settle()

    def new_prices(self) -> NewPrices:
        """Returns the graph prices found since the last call, by device (of a fleet: by group) and ranks."""
        return {
            (place, ranks): groups.fresh()
            for place, bench in enumerate(self.benches)
            for ranks, groups in bench.groups.items()
        }

    def take_over(self, prices: NewPrices) -> None:
        """Adds graph prices that another process has found."""
        for (place, ranks), known in prices.items():
            self.benches[place].groups[ranks].add(known)

    def keep_prices(self) -> None:
        """Saves the known graph prices for other runs."""
        for bench in self.benches:
            if bench.hardware.kept is not None:
                for ranks, groups in bench.groups.items():
                    if groups.grown:
                        bench.hardware.kept.save(ranks, groups.known)

    def draw(self, case: Case, replica: int) -> Drawn:
        """Returns the requests of a case. Raises InputError if a file of it cannot be read."""
        return arrivals.draw(case.point.workload, self.scenario.seed, replica)

    def check_lengths(self, case: Case) -> None:
        """Raises InputError if a request is longer than the model's context limit."""
        limit = self.config.limit
        if limit is None or self.scenario.beyond_model_context:
            return
        for replica in range(self.scenario.replicas):
            drawn = self.draw(case, replica)
            # The workload's longest possible request bounds all requests.
            if drawn.longest_prompt + drawn.max_tokens <= limit.tokens:
                return
            longest = int((drawn.prompt_tokens + drawn.output_tokens).max())
            if reason := limit.exceeded(longest):
                raise InputError(f"workload: the longest request: {reason}")

    def run(self, case: Case, replica: int, end: End = "value", most: int | None = None) -> Result:
        """Runs one simulation, of the first `most` requests if given, and checks its laws. Raises LawError if
        one is broken."""
        run = prepared(self, case, replica, end, most)
        with self.blamed(case):
            run.simulate()
            return run.result()

    def program(self, case: Case, room: Room, m: Machine, journal: Journal) -> Program:
        """Returns the schedule of a case on one machine."""
        model = self.model(case.ranks, host_of(case.strategy))
        return case.strategy.program(m, model, journal, room)

    def room(self, case: Case, drawn: Drawn) -> Room:
        """Returns a server's room for KV. Raises InputError if it is too small for one request."""
        scenario, longest = self.scenario, drawn.longest_prompt + drawn.max_tokens
        memory = ServerMemory(
            self.hardware,
            self.model(case.ranks),
            scenario.memory_share,
            scenario.kv_blocks,
            drawn.longest_prompt,
            longest,
        )
        try:
            with self.blamed(case):
                room = case.strategy.room(memory)
                if not isinstance(room, Room):
                    says = "memory.slots(...) or memory.blocks(...) is needed"
                    raise TypeError(f"room(memory) gave {type(room).__name__}; {says}")
                return room
        except OwnError:
            raise
        except InputError as error:
            raise InputError(f"{case.axes.label}: {error}") from None

    def blamed(self, case: Case) -> AbstractContextManager[None]:
        """See `own.blamed`."""
        return blamed(case.strategy, self.scenario.strategies)


@dataclass(slots=True, eq=False)
class Prepared:
    """A run, before or after its event loop."""

    bench: Bench
    case: Case
    groups: tuple[Servers, ...]
    journal: Journal
    simulation: Run
    requests: list[Request]
    occupancy: Occupancy
    left_out: int
    opens: Bools | None
    tenants: Tenants | None
    scaler: Scaler | None = None
    ways_out: WaysOut | None = None

    def simulate(self) -> None:
        """Runs the event loop."""
        with no_collections():
            self.simulation.run(self._program)

    def _program(self, m: Machine) -> Program:
        servers = next(one for one in reversed(self.groups) if one.first <= m.rank)

        def serve() -> Program:
            return servers.program(m, self.journal)

        return serve() if self.scaler is None else self.scaler.program(m, serve)

    @property
    def fleet(self) -> Fleet | None:
        """See `Result`."""
        if self.scaler is not None:
            return self.scaler.fleet
        return Fleet.fixed(self.case.servers) if self.bench.scenario.scales else None

    def result(self) -> Result:
        """Returns the results of the run. Raises LawError if a law is broken."""
        laws.enforce(self.simulation.trace)
        found = Result(
            served(self.requests, None if self.tenants is None else self.tenants.of),
            self.journal.table(),
            self.groups,
            self.simulation.trace,
            self.left_out,
            self.opens,
            self.fleet,
        )
        journal, kv_limit = found.kv
        run = serving_laws.Run(
            found.served,
            journal,
            kv_limit,
            {rank for group in self.groups if not group.case.strategy.in_turn for rank in group.ranks},
            self.occupancy,
            found.fleet,
            # Only servers that are alike start and stop.
            self.groups[0].case.ranks,
            0.0 if self.ways_out is None else self.ways_out.later_s,
            {rank for group in self.groups if _is_late(group.case.strategy) for rank in group.ranks},
        )
        serving_laws.enforce(run)
        return found


def _is_late(strategy: ServingStrategy) -> bool:
    """Whether a prompt may enter the engine after a shorter one that came after it."""
    return host_of(strategy).prompt_token_late_s > 0.0


def prepared(bench: Bench, case: Case, replica: int, end: End = "value", most: int | None = None) -> Prepared:
    """Prepares a run up to its event loop: draws the requests, makes the machine and the servers."""
    drawn = bench.draw(case, replica)
    groups = _servers(bench, case, drawn)
    drawn = drawn if most is None else drawn.first(most)
    journal = Journal()
    first, *others = [_kind(group, end) for group in groups]
    setup = Setup(
        model=groups[0].bench.model(groups[0].case.ranks),
        price=first.price,
        mesh=first.mesh,
        roofline=first.roofline,
        overheads=first.overheads,
        rates=first.rates,
        lockstep=(TENSOR,),
        rows=True,
        graph_pricer=first.graph_pricer,
        power=first.power,
        others=others,
        case=repr((case.axes, replica)),
        title=_title(case.axes),
        holds={
            "kv_tokens": len(drawn.prompt_tokens) * (drawn.longest_prompt + drawn.max_tokens),
            "shared_text": drawn.shared_text,
            "longest": drawn.longest_prompt + drawn.max_tokens,
            "room_tokens": groups[0].room.kv_tokens,
            "longest_prompt": drawn.longest_prompt,
            "step_tokens": min(groups[0].room.step_tokens, len(drawn.prompt_tokens) * drawn.longest_prompt),
            "step_rows": min(groups[0].room.step_rows, len(drawn.prompt_tokens)),
            "streams": streams(groups[0].case.strategy, groups[0].room),
            "prompts_apart": prompts_apart(groups[0].case.strategy),
            "processes": processes(groups[0].case.strategy),
        },
    )
    simulation = bench.hardware.start(setup)
    ranks = [rank for group in groups for rank in group.ranks]
    kv_tokens = [group.room.kv_tokens for group in groups for _ in group.ranks]
    hosts = {rank: host_of(group.case.strategy) for group in groups for rank in group.ranks}
    fronted = any(host.in_front for host in hosts.values())
    feeder = FrontEnds(simulation, hosts) if fronted else simulation
    scaler = None
    if case.scaling is not None:
        scaler = Scaler(feeder, case.scaling, ranks, choice(bench.scenario.routing, kv_tokens))
    to = scaler or router(bench.scenario.routing, ranks, kv_tokens)
    requests = offer(feeder, case.point.workload, drawn, to, journal)
    occupancy = _counted(simulation, feeder, journal)
    ways = None
    if any(host.answer_token_s for host in hosts.values()):
        assert journal.answered is not None
        journal.answered = ways = WaysOut(journal, hosts, journal.answered)
    opens = None if drawn.turns is None else drawn.turns.opens
    left, tenants = drawn.left_out, drawn.tenants
    return Prepared(
        bench, case, groups, journal, simulation, requests, occupancy, left, opens, tenants, scaler, ways
    )


def _servers(bench: Bench, case: Case, drawn: Drawn) -> tuple[Servers, ...]:
    """Returns the servers of a case, those that are alike together. Raises InputError if the room for KV of
    some is too small for one request."""
    found: list[Servers] = []
    first = 0
    for place, (own, part) in enumerate(bench.parts(case)):
        name = bench.fleet[place].name if bench.fleet else bench.name
        found.append(Servers(name, own, part, own.room(part, drawn), first))
        first += part.axes.devices
    return tuple(found)


def _kind(servers: Servers, end: End) -> RankKind:
    """Returns the ranks of servers that are alike as the machine needs them."""
    bench, case = servers.bench, servers.case
    price, graph_pricer = bench.price(case.ranks, end)
    return RankKind(
        price=price,
        mesh={SERVER: case.servers, TENSOR: case.ranks},
        roofline=bench.hardware.roofline,
        overheads=overheads_of(case.strategy, bench.hardware.overheads, bench.hardware.of_our_schedule),
        rates=_rates(bench.scenario, bench.hardware, end),
        graph_pricer=graph_pricer,
        power=bench.hardware.power,
    )


# What a fleet's groups have of their own: the rest is the scenario's.
_OF_GROUP = ("device", "fleets", "devices", "profile", "link", "strategies", "autoscaling")


def _alone(scenario: ServingScenario, group: Group) -> ServingScenario:
    """Returns the scenario of a group of a fleet, with what a scenario of the fleet says of all."""
    own = {name: getattr(group.bench.scenario, name) for name in _OF_GROUP}
    return scenario.model_copy(update=own)


def _title(axes: ServingAxes) -> str:
    load = "closed loop" if axes.rate_per_s is None else f"{axes.rate_per_s:.3g} {axes.arriving}/s"
    return f"{axes.label}, {load}, {axes.requests:,} requests"


def _counted(simulation: Run, feeder: Feeder, journal: Journal) -> Occupancy:
    """Records the times at which requests enter the machine and are answered."""
    occupancy, listener = Occupancy(simulation.fed_s), journal.answered
    if isinstance(feeder, FrontEnds):
        occupancy.entered_s = feeder.entered_s
    went = occupancy.went_s.append

    def answered(request: Request, at_s: float) -> None:
        went(at_s)
        if listener is not None:
            listener(request, at_s)

    journal.answered = answered
    return occupancy


def _rates(scenario: ServingScenario, hardware: Hardware, end: End) -> contention.Rates:
    match scenario.contention:
        case SharedMemory(reuse_s=reuse_s):
            law = contention.shared_reads(
                reuse_s,
                hardware.memory_bandwidth_share[end],
                hardware.tail_overlap_s,
                hardware.kernels_between,
            )
            return contention.off_by(law, hardware.contention_error[end])
        case Throughput(gain=gain):
            return contention.throughput(gain)
        case _:
            return contention.alone


def price_shares(sources: Mapping[SourceKind, float]) -> dict[str, float]:
    """Returns the share of the predicted device time by source of its price."""
    return dict(sorted(shares_of(sources.items()).items()))
