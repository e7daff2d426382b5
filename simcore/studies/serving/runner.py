"""Runs cases of a serving scenario on one device: a strategy, a load, a number of devices, a replica.

    slots of a server = floor(room of kv_memory / (KV bytes of a token * longest request))

Every server is a group of `ranks` devices, of which one stands for all (they are in lockstep).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.input.files import InputError
from simcore.machine import laws
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.decoder import TENSOR
from simcore.models.decoder_config import DecoderConfig
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Pricer, SourceKind
from simcore.schedules.concurrent_instances import concurrent_instances
from simcore.schedules.continuous_batching import continuous_batching, fcfs, shortest_first
from simcore.schedules.dynamic_batching import dynamic_batching
from simcore.schedules.iteration_batching import iteration_batching
from simcore.schedules.temporal_fusion import temporal_fusion
from simcore.sim import contention
from simcore.sim.garbage import no_collections
from simcore.sim.graph_pricer import End, GraphPricer, Known, PricedGroups
from simcore.sim.runs import Run, Setup
from simcore.studies.common import ServingAxes
from simcore.studies.hardware import Hardware, at_end
from simcore.studies.serving import laws as serving_laws
from simcore.studies.serving.engines import usual
from simcore.studies.serving.kv_memory import blocks_in, room_bytes
from simcore.studies.serving.offer import offer, router
from simcore.studies.serving.scenario import (
    ConcurrentInstances,
    ContinuousBatching,
    DynamicBatching,
    IterationBatching,
    KvMemory,
    Point,
    ServingScenario,
    ServingStrategy,
    SharedMemory,
    TemporalFusion,
    Throughput,
)
from simcore.studies.serving.served import Bools, Occupancy, Served, Steps, served
from simcore.workload import arrivals
from simcore.workload.arrivals import Drawn
from simcore.workload.requests import Journal, Request

SERVER = "server"
ORDERS = {"fcfs": fcfs, "shortest_first": shortest_first}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One strategy at one load, every list of which has one value."""

    axes: ServingAxes
    point: Point
    strategy: ServingStrategy

    @property
    def servers(self) -> int:
        """Groups of devices that each serve alone."""
        return self.axes.devices // self.axes.ranks


@dataclass(frozen=True, slots=True)
class Room:
    """What a server has for KV: `limit` blocks, or slots of `slot_tokens` tokens each; `kv_tokens` in all."""

    limit: int
    slot_tokens: int
    kv_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """What one run left behind. `opens`: which requests open a session, [requests]; None: no sessions."""

    served: Served
    journal: Steps
    room: Room
    trace: Trace
    left_out: int
    opens: Bools | None = None


@dataclass
class Bench:
    """Runs cases of one scenario on one device, and remembers models and prices."""

    scenario: ServingScenario
    config: DecoderConfig
    hardware: Hardware
    models: dict[int, ServedDecoder] = field(default_factory=dict)
    prices: dict[tuple[int, End], tuple[Pricer, GraphPricer]] = field(default_factory=dict)
    groups: dict[int, PricedGroups] = field(default_factory=dict)

    def model(self, ranks: int) -> ServedDecoder:
        """The model, sharded. Raises ModelError where it cannot be."""
        if ranks not in self.models:
            hardware = self.hardware
            self.models[ranks] = ServedDecoder(
                self.config, ranks, hardware.dtypes, hardware.style(ranks), hardware.whole
            )
        return self.models[ranks]

    def price(self, ranks: int, end: End) -> tuple[Pricer, GraphPricer]:
        """Prices as they are, or at the `low` or `high` end of their intervals; and what is known of them."""
        key = (ranks, end)
        if key not in self.prices:
            plain = self.hardware.price(ranks, None, True)
            if ranks not in self.groups:
                kept = self.hardware.kept
                known = kept.load(ranks) if kept else None
                self.groups[ranks] = PricedGroups(plain, self.hardware.roofline, known)
            tariff = GraphPricer(plain, self.hardware.roofline, end=end, groups=self.groups[ranks])
            self.prices[key] = at_end(plain, end), tariff
        return self.prices[key]

    def found_out(self) -> dict[int, dict[str, Known]]:
        """What was found out of prices since this was last asked for, by ranks."""
        return {ranks: groups.fresh() for ranks, groups in self.groups.items()}

    def take_over(self, found: Mapping[int, Mapping[str, Known]]) -> None:
        """Takes over what another process has found out of prices."""
        for ranks, known in found.items():
            self.groups[ranks].add(known)

    def keep_prices(self) -> None:
        """Keeps what is known of prices for other runs."""
        if self.hardware.kept is not None:
            for ranks, groups in self.groups.items():
                if groups.grown:
                    self.hardware.kept.save(ranks, groups.known)

    def draw(self, case: Case, replica: int) -> Drawn:
        """The requests of a case. Raises InputError where a file of it cannot be read."""
        return arrivals.draw(case.point.workload, self.scenario.seed, replica)

    def check_lengths(self, case: Case) -> None:
        """Raises InputError where a request that comes is longer than the model is made for."""
        limit = self.config.limit
        if limit is None or self.scenario.beyond_model_context:
            return
        for replica in range(self.scenario.replicas):
            drawn = self.draw(case, replica)
            # What the workload can ask for bounds what comes.
            if drawn.longest_prompt + drawn.max_tokens <= limit.tokens:
                return
            longest = int((drawn.prompt_tokens + drawn.output_tokens).max())
            if reason := limit.exceeded(longest):
                raise InputError(f"workload: the longest request: {reason}")

    def run(self, case: Case, replica: int, end: End = "value", most: int | None = None) -> Result:
        """One simulation, of the first `most` requests if that is given, its laws checked. Raises LawError
        where one is broken."""
        run = prepared(self, case, replica, end, most)
        run.simulate()
        return run.result()

    def program(self, case: Case, room: Room, m: Machine, journal: Journal) -> Program:
        """The schedule of a case on one machine."""
        model, strategy = self.model(case.axes.ranks), case.strategy
        match strategy:
            case ContinuousBatching():
                return continuous_batching(
                    m,
                    model,
                    journal,
                    blocks=room.limit,
                    block_tokens=strategy.block_tokens,
                    token_budget=strategy.token_budget[0],
                    max_sequences=strategy.max_sequences[0],
                    order=ORDERS[strategy.order[0]],
                    prefill=strategy.prefill[0],
                    wait_steps=strategy.wait_steps,
                    wait_tokens=strategy.wait_tokens,
                    ahead=strategy.ahead,
                    prefix_caching=strategy.prefix_caching,
                )
            case TemporalFusion():
                return temporal_fusion(
                    m,
                    model,
                    journal,
                    slots=room.limit,
                    slot_tokens=room.slot_tokens,
                    shuffle=strategy.shuffle[0],
                )
            case DynamicBatching():
                return dynamic_batching(
                    m,
                    model,
                    journal,
                    window_s=strategy.window_s[0],
                    max_batch=room.limit,
                    capacity=room.limit * room.slot_tokens,
                )
            case ConcurrentInstances():
                slot = room.slot_tokens
                return concurrent_instances(m, model, journal, max_instances=room.limit, slot_tokens=slot)
            case IterationBatching():
                slot = room.slot_tokens
                return iteration_batching(m, model, journal, max_batch=room.limit, slot_tokens=slot)

    def room(self, case: Case, drawn: Drawn) -> Room:
        """What a server has for KV. Raises InputError where that is not enough for one request."""
        longest = drawn.longest_prompt + drawn.max_tokens
        model, strategy = self.model(case.axes.ranks), case.strategy
        if isinstance(strategy, ContinuousBatching):
            rows = min(strategy.token_budget[0], strategy.max_sequences[0])
            free = self._free_bytes(strategy.memory, model, strategy.token_budget[0], rows)
            blocks = self.scenario.kv_blocks or blocks_in(free, model, strategy.block_tokens)
            if blocks < 1:
                raise InputError(_too_small(case, self.hardware.name, free))
            return Room(blocks, longest, blocks * strategy.block_tokens)
        slots = _slots(strategy)
        # All prompts may be computed at once: as one batch, or beside each other.
        free = self._free_bytes(KvMemory(), model, slots * drawn.longest_prompt, slots)
        fitting = self.scenario.kv_blocks or blocks_in(free, model, longest)
        if fitting < slots:
            raise InputError(
                f"{case.axes.label}: {slots} slots of {longest:,} tokens do not fit into the"
                f" {max(0.0, free) / 1e9:.1f} GB that weights, and activations of as many prompts of"
                f" {drawn.longest_prompt:,} tokens, leave; {max(0, fitting)} do"
            )
        return Room(slots, longest, slots * longest)

    def _free_bytes(self, memory: KvMemory, model: ServedDecoder, tokens: int, rows: int) -> float:
        share = self.scenario.memory_share or memory.share
        return room_bytes(memory, share, self.hardware, model, tokens, rows)


@dataclass(slots=True, eq=False)
class Prepared:
    """A run before its event loop, and after it."""

    bench: Bench
    case: Case
    room: Room
    journal: Journal
    simulation: Run
    requests: list[Request]
    occupancy: Occupancy
    left_out: int
    opens: Bools | None

    def simulate(self) -> None:
        """The event loop."""
        with no_collections():
            self.simulation.run(lambda m: self.bench.program(self.case, self.room, m, self.journal))

    def result(self) -> Result:
        """What the run left behind. Raises LawError where a law is broken."""
        laws.enforce(self.simulation.trace)
        found = Result(
            served(self.requests),
            self.journal.table(),
            self.room,
            self.simulation.trace,
            self.left_out,
            self.opens,
        )
        in_turn = getattr(self.case.strategy, "order", ["fcfs"])[0] == "fcfs"
        run = serving_laws.Run(found.served, found.journal, self.room.limit, in_turn, self.occupancy)
        serving_laws.enforce(run)
        return found


def prepared(bench: Bench, case: Case, replica: int, end: End = "value", most: int | None = None) -> Prepared:
    """A run up to its event loop: requests drawn, machine and servers there."""
    drawn = bench.draw(case, replica)
    room = bench.room(case, drawn)
    drawn = drawn if most is None else drawn.first(most)
    journal = Journal()
    price, tariff = bench.price(case.axes.ranks, end)
    setup = Setup(
        model=bench.model(case.axes.ranks),
        price=price,
        mesh={SERVER: case.servers, TENSOR: case.axes.ranks},
        roofline=bench.hardware.roofline,
        overheads=bench.hardware.overheads,
        rates=_rates(bench.scenario, bench.hardware, end),
        lockstep=(TENSOR,),
        rows=True,
        tariff=tariff,
        case=repr((case.axes, replica)),
        title=_title(case.axes),
        holds={"kv_tokens": len(drawn.prompt_tokens) * (drawn.longest_prompt + drawn.max_tokens)},
    )
    simulation = bench.hardware.start(setup)
    to = router(bench.scenario.routing, case.servers, case.axes.ranks, _kv_tokens(case.strategy, room))
    requests = offer(simulation, case.point.workload, drawn, to, journal)
    occupancy = _counted(simulation, journal)
    opens = None if drawn.turns is None else drawn.turns.opens
    return Prepared(bench, case, room, journal, simulation, requests, occupancy, drawn.left_out, opens)


def _kv_tokens(strategy: ServingStrategy, room: Room) -> int:
    """Tokens that a server has room for."""
    unit = strategy.block_tokens if isinstance(strategy, ContinuousBatching) else room.slot_tokens
    return room.limit * unit


def _title(axes: ServingAxes) -> str:
    load = "closed loop" if axes.rate_per_s is None else f"{axes.rate_per_s:.3g} {axes.arriving}/s"
    return f"{axes.label}, {load}, {axes.requests:,} requests"


def _counted(simulation: Run, journal: Journal) -> Occupancy:
    """Counts requests as they come into the machine and as they are answered."""
    occupancy, told = Occupancy(simulation.fed_s), journal.answered
    went = occupancy.went_s.append

    def answered(request: Request, at_s: float) -> None:
        went(at_s)
        if told is not None:
            told(request, at_s)

    journal.answered = answered
    return occupancy


def _too_small(case: Case, device: str, free: float) -> str:
    if free <= 0.0:
        return f"{case.axes.label}: weights and activations do not fit into the memory of {device}"
    return f"{case.axes.label}: the {free / 1e9:.3f} GB that are left hold no KV block"


def _slots(strategy: ServingStrategy) -> int:
    match strategy:
        case TemporalFusion():
            return strategy.slots[0]
        case ConcurrentInstances():
            return strategy.max_instances[0]
        case DynamicBatching() | IterationBatching():
            return strategy.max_batch[0]
        case ContinuousBatching():
            return strategy.max_sequences[0]


def _rates(scenario: ServingScenario, hardware: Hardware, end: End) -> contention.Rates:
    match scenario.contention:
        case SharedMemory(reuse_s=reuse_s):
            law = contention.shared_reads(reuse_s, hardware.memory_reach[end], hardware.leaves_s)
            return contention.off_by(law, hardware.contention_error[end])
        case Throughput(gain=gain):
            return contention.throughput(gain)
        case _:
            return contention.alone


def price_shares(sources: Mapping[SourceKind, float]) -> dict[str, float]:
    """Share of the predicted device time by where its price comes from."""
    total = sum(sources.values())
    return {name: seconds / total for name, seconds in sorted(sources.items())} if total else {}


def label(strategy: ServingStrategy, ranks: int) -> str:
    """What a variant is called, by what tells it from others."""
    given: dict[str, Any] = strategy.model_dump()
    words = [getattr(strategy, "engine", None) or strategy.kind.replace("_", " ")]
    match strategy:
        case TemporalFusion():
            words += [f"{given['slots'][0]} slots", *([] if given["shuffle"][0] else ["no shuffle"])]
        case DynamicBatching():
            words += [f"{given['window_s'][0]:g} s, up to {given['max_batch'][0]}"]
        case ConcurrentInstances():
            words += [f"up to {given['max_instances'][0]}"]
        case IterationBatching():
            words += [f"up to {given['max_batch'][0]}"]
        case ContinuousBatching():
            words += [f"{given['token_budget'][0]:,} tokens a step"]
            words += _unusual(strategy)
    return ", ".join([*words, *([f"TP{ranks}"] if ranks > 1 else [])])


def _unusual(strategy: ContinuousBatching) -> list[str]:
    """The settings of continuous batching that are not the defaults, or not its engine's."""
    shipped = usual(strategy)

    def odd(name: str) -> bool:
        return all(getattr(strategy, name) != getattr(each, name) for each in shipped)

    words = []
    if strategy.engine or odd("max_sequences"):
        words.append(f"up to {strategy.max_sequences[0]}")
    if odd("block_tokens"):
        words.append(f"blocks of {strategy.block_tokens}")
    if odd("order"):
        words.append("shortest first" if strategy.order == ["shortest_first"] else "first come first served")
    if odd("prefill"):
        words.append(f"prompts {strategy.prefill[0]}")
    if odd("ahead"):
        words.append(f"{strategy.ahead} step{'s' if strategy.ahead != 1 else ''} ahead")
    if odd("prefix_caching"):
        words.append("prefix caching" if strategy.prefix_caching else "no prefix caching")
    if odd("wait_steps"):
        words.append(f"waiting {strategy.wait_steps} steps")
    if odd("memory"):
        words.append(_memory(strategy.memory, [each.memory for each in shipped]))
    return words


def _memory(memory: KvMemory, shipped: Sequence[KvMemory]) -> str:
    """How a rule for memory differs from those that are usual."""
    plain = [each for each in shipped if each.model_copy(update={"share": memory.share}) == memory]
    share = f"{memory.share:g} of the memory"
    return share if plain else f"{share}, by a rule of its own"
