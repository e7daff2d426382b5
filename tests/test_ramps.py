"""Bursts in closed form against the same burst priced replay by replay, op by op.

    replay i   sum over ops of price(op at sizes + i * advance)
    work       cumulative sums over replays; demands are quantised shares of each replay

Prices are those of several devices' rooflines and profiles, and of tables that are neither convex nor
monotone; sizes and lengths of bursts are random, and cross the places where an op turns compute bound.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from math import inf, nextafter
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.assembly import assemble
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth, step_sizes
from simcore.ops.op import Floor, Graph, Op, Price, Pricer, Roofline, SourceKind
from simcore.scenario import parse_scenario
from simcore.sim.bursts import NOTHING, Bends, BurstCost, Curve, Origin, Piece, Straight, lines
from simcore.sim.graph_pricer import GraphPricer
from tests.thorough import first, slow

REL = 1e-9
# Shares of a device are told apart in so many steps.
STEPS = 512
Sizes = dict[str, int]


@dataclass(frozen=True)
class Rank:
    """One rank of a server, with its prices."""

    model: ServedDecoder
    price: Pricer
    roofline: Roofline


@cache
def on_device(device: str, model: str, ranks: int, profile: str = "none", whole: bool = False) -> Rank:
    document = {
        "name": "ramps",
        "study": "serving",
        "device": device,
        "model": model,
        "profile": profile,
        "workload": {
            "requests": 1,
            "arrivals": {"kind": "constant", "rate_per_s": 1.0},
            "prompt_tokens": {"kind": "constant", "value": 1},
            "output_tokens": {"kind": "constant", "value": 1},
        },
        "strategies": [{"kind": "continuous_batching"}],
    }
    study: Any = assemble(parse_scenario(document, "ramps"), "ramps").study
    hardware = study.bench.hardware
    decoder = study.bench.model(ranks)
    if whole:
        decoder = ServedDecoder(decoder.config, ranks, decoder.dtypes, decoder.style, whole=True)
    return Rank(decoder, hardware.price(ranks, None, True), hardware.roofline)


# -- tables: anything that is piecewise linear -----------------------------------------------------------

SOURCES: tuple[SourceKind, ...] = ("measured", "published", "interpolated", "roofline", "assumed")


@cache
def table(seed: str, most: float, knots: int = 12) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Places and values, up and down at random, with knots between whole numbers too."""
    random = Random(seed)
    places = sorted(2.0 ** random.uniform(0.0, 24.0) for _ in range(knots))
    places = [round(place) if random.random() < 0.5 else place for place in places]
    deferred = [one for one, other in pairwise([*places, inf]) if one != other]
    return tuple(deferred), tuple(random.uniform(0.05, 1.0) * most for _ in deferred)


def looked_up(at: float, places: tuple[float, ...], values: tuple[float, ...]) -> float:
    """Linear between the places, constant beyond them."""
    after = bisect_right(places, at)
    if after == 0 or after == len(places):
        return values[max(0, after - 1)]
    (x0, x1), (y0, y1) = places[after - 1 : after + 1], values[after - 1 : after + 1]
    return y0 + (at - x0) / (x1 - x0) * (y1 - y0)


def _summed(op: Op, seed: str, most: float) -> float:
    return sum(looked_up(op[name], *table(f"{seed} {op.kind} {name}", most)) for name, _ in op.shape)


def tabulated(seed: int) -> tuple[Pricer, Roofline]:
    """An op's price is a sum of one table for each of its dimensions, and so are its floor's parts."""

    def price(op: Op) -> Price:
        seconds = _summed(op, f"price {seed}", 1e-3)
        source = SOURCES[Random(f"{seed} {op.kind}").randrange(len(SOURCES))]
        return Price(seconds, seconds, seconds, source, "a table")

    def roofline(op: Op) -> Floor:
        return Floor(_summed(op, f"compute {seed}", 8e-4), _summed(op, f"memory {seed}", 1.5e-3), 0.0)

    return price, roofline


@cache
def in_tables(seed: int, ranks: int, whole: bool) -> Rank:
    decoder = on_device("h200-sxm", "llama-3.1-8b", ranks, whole=whole).model
    return Rank(decoder, *tabulated(seed))


# -- replay by replay ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    """Each replay of a burst, [replays, 4]: seconds, floor, memory and arithmetic at the datasheet's rates;
    seconds by source over all replays; when each replay ends, [replays]."""

    costs: "np.ndarray[Any, np.dtype[np.float64]]"
    sources: Mapping[str, float]
    ends_s: "np.ndarray[Any, np.dtype[np.float64]]"


def one_by_one(
    rank: Rank, graph: Graph, sizes: Sizes, advance: Mapping[str, int] | None, replays: int
) -> Listed:
    """Every op of every replay at its sizes; equal ops at equal sizes are priced once."""
    by = dict.fromkeys(graph.reads, 1) if advance is None else advance
    costs, sources = np.zeros((replays, 4)), dict[str, float]()
    for op, times in Counter(graph.ops).items():
        known: dict[tuple[int, ...], tuple[list[float], str]] = {}
        reads = sorted(op.reads)
        for replay in range(replays):
            now = tuple(sizes[name] + replay * by.get(name, 0) for name in reads)
            if now not in known:
                known[now] = _cost(rank, op.at(dict(zip(reads, now, strict=True))), times)
            cost, source = known[now]
            costs[replay] += cost
            sources[source] = sources.get(source, 0.0) + cost[0]
    return Listed(costs, sources, np.cumsum(costs[:, 0]))


def _cost(rank: Rank, op: Op, times: int) -> tuple[list[float], str]:
    price, floor = rank.price(op), rank.roofline(op)
    least_s = 0.0 if price.source == "assumed" else floor.seconds
    cost = (price.seconds, least_s, floor.memory_s, floor.compute_s)
    return [times * seconds for seconds in cost], price.source


# -- what must be equal ----------------------------------------------------------------------------------


def assert_work(ramp: BurstCost, listed: Listed) -> None:
    """total_s, floor_s, the end of every replay."""
    replays = len(listed.costs)
    assert ramp.replays == replays
    assert ramp.total_s == pytest.approx(listed.ends_s[-1], rel=REL)
    assert ramp.floor_s() == pytest.approx(listed.costs[:, 1].sum(), rel=REL)
    np.testing.assert_allclose([ramp.end_s(i) for i in range(replays)], listed.ends_s, rtol=REL)
    assert ramp.end_s(replays - 1) == ramp.total_s


def assert_inverse(ramp: BurstCost) -> None:
    """The replay at work is the first that ends later, at, before and between all boundaries."""
    last = ramp.replays - 1
    begun_s = 0.0
    for replay in range(ramp.replays):
        end_s = ramp.end_s(replay)
        assert end_s > begun_s
        assert ramp.replay_at(end_s) == min(replay + 1, last)
        assert ramp.replay_at(nextafter(end_s, 0.0)) == replay
        assert ramp.replay_at(begun_s + (end_s - begun_s) / 2) == replay
        begun_s = end_s
    assert ramp.replay_at(0.0) == 0
    assert ramp.replay_at(2.0 * ramp.total_s) == last


def assert_demands(ramp: BurstCost, listed: Listed) -> None:
    """Demands are the shares of each replay, to the nearest step, and change where `next_change` says."""
    ramp.launch_s, ramp.since_s = 1e-4, 3.0
    demands = [ramp.demand(replay) for replay in range(ramp.replays)]
    seconds = listed.costs[:, 0]
    for column, name in ((2, "memory"), (3, "compute")):
        steps = np.minimum(listed.costs[:, column] / seconds, 1.0) * STEPS
        found = np.array([getattr(demand, name) for demand in demands]) * STEPS
        assert (found == np.rint(found)).all()
        assert np.abs(found - steps).max() <= 0.5 + 1e-6
    np.testing.assert_allclose([d.launch for d in demands], np.minimum(1.0, 1e-4 / seconds), rtol=REL)
    assert {demand.since_s for demand in demands} == {3.0}
    assert_changes(ramp, [(demand.memory, demand.compute) for demand in demands])


def assert_changes(ramp: BurstCost, demands: list[tuple[float, float]]) -> None:
    """`next_change` is the last replay of the same demands in a row; a piece's end may cut the row."""
    begins = {piece.first for piece in ramp.pieces}
    changes = last = ramp.replays - 1
    for replay in range(last, -1, -1):
        if replay < last and (demands[replay + 1] != demands[replay] or replay + 1 in begins):
            changes = replay
        assert ramp.next_change(replay) == changes


def assert_around(ramp: BurstCost, random: Random) -> None:
    """What holds at some work, asked in any order, is what holds at the replay that is at work then."""
    works_s = [random.uniform(0.0, ramp.total_s) for _ in range(20)]
    for work_s in [0.0, *works_s, *sorted(works_s), ramp.end_s(0), ramp.total_s]:
        until_s, demand = ramp.demand_at(work_s)
        replay = ramp.replay_at(work_s)
        found = ramp.demand(replay)
        assert until_s == ramp.end_s(ramp.next_change(replay))
        assert (demand.memory, demand.compute, demand.since_s) == (found.memory, found.compute, found.since_s)
    # From change to change, as a device goes.
    until_s = 0.0
    while until_s < ramp.total_s:
        replay = ramp.replay_at(until_s)
        until_s, demand = ramp.demand_at(until_s)
        assert until_s == ramp.end_s(ramp.next_change(replay))
        assert demand == ramp.demand(replay)
    # At its end it is still at its last replay.
    assert ramp.demand_at(until_s) == (ramp.total_s, ramp.demand(ramp.replays - 1))


def assert_shortened(make: Callable[[], BurstCost], listed: Listed, random: Random) -> None:
    """What is left out leaves the rest as it was."""
    replays = len(listed.costs)
    for keep in {1, replays - 1, random.randint(1, replays), random.randint(1, replays), replays + 1} - {0}:
        ramp = make()
        ramp.demand_at(0.0)
        ramp.truncate(keep)
        deferred = Listed(listed.costs[:keep], {}, listed.ends_s[:keep])
        assert_work(ramp, deferred)
        assert ramp.next_change(ramp.replays - 1) == ramp.replays - 1
        assert ramp.demand_at(0.0)[0] <= ramp.total_s
    ramp = make()
    ramp.truncate(0)
    assert (ramp.replays, ramp.total_s, ramp.floor_s()) == (0, 0.0, 0.0)


def assert_closed_form(
    rank: Rank, graph: Graph, sizes: Sizes, advance: Mapping[str, int] | None, replays: int, random: Random
) -> Listed:
    """Everything that a ramp tells of a burst."""
    graph_pricer = GraphPricer(rank.price, rank.roofline)

    def make() -> BurstCost:
        return graph_pricer.ramp(graph, sizes, advance, replays)

    listed = one_by_one(rank, graph, sizes, advance, replays)
    ramp = make()
    assert_work(ramp, listed)
    assert_inverse(ramp)
    assert_demands(ramp, listed)
    assert_around(ramp, random)
    assert_shortened(make, listed, random)
    sources: dict[SourceKind, float] = {}
    ramp.origin.count(ramp.total_s, ramp.replays, sources)
    assert sum(sources.values()) == pytest.approx(listed.ends_s[-1], rel=REL)
    return listed


# -- sizes at random -------------------------------------------------------------------------------------


def spread(random: Random, most: int) -> int:
    """1 to `most`, as many of each order of magnitude."""
    return round(most ** random.random())


def decode_burst(random: Random, most_replays: int) -> tuple[Sizes, Sizes, int]:
    sequences = spread(random, 2000)
    context = spread(random, 20_000)
    by = sequences if random.random() < 0.7 else random.randint(0, sequences)
    return decode_sizes(sequences, sequences * context), {"kv_tokens": by}, spread(random, most_replays)


def prompts(random: Random, sequences: int) -> Sizes:
    chunks = [(spread(random, 4000), spread(random, 8000) - 1) for _ in range(spread(random, 20))]
    return step_sizes(sequences, sequences * spread(random, 9000), chunks, random.randint(0, len(chunks)))


DEVICES = (
    ("a100-sxm-80gb", "gpt-j-6b", 1),
    ("a100-sxm-80gb", "llama-13b", 4),
    ("h200-sxm", "llama-3.1-8b", 1),
    ("h200-sxm", "llama-3.1-70b", 4),
    ("h100-sxm", "llama-3.1-8b", 2),
    ("a6000", "mistral-7b", 1),
    ("n150", "llama-3.1-8b", 4),
)


@pytest.mark.parametrize(
    ("kv_tokens", "source"), [(4095, "measured"), (4096, "roofline"), (9000, "roofline")]
)
def test_a_burst_has_the_source_of_the_sizes_that_it_begins_at(kv_tokens: int, source: SourceKind) -> None:
    """Contexts below 4,096 tokens are measured, longer ones are not: a source changes at a power of two."""
    seconds, roofline = tabulated(3)

    def price(op: Op) -> Price:
        short = dict(op.shape).get("kv_tokens", 0) < 4096
        return replace(seconds(op), source="measured" if short else "roofline")

    rank = Rank(in_tables(3, 1, False).model, price, roofline)
    ramp = GraphPricer(price, roofline).ramp(rank.model.decode, decode_sizes(1, kv_tokens), growth(1), 30)
    sources: dict[SourceKind, float] = {}
    ramp.origin.count(ramp.total_s, ramp.replays, sources)
    assert (sources.get("roofline", 0.0) > 0.0) == (source == "roofline")


@pytest.mark.parametrize("whole", [False, True], ids=["ops", "whole"])
@pytest.mark.parametrize(("device", "model", "ranks"), DEVICES)
def test_bursts_of_decode_steps(device: str, model: str, ranks: int, whole: bool) -> None:
    random = Random(f"{device} {ranks} {whole}")
    rank = on_device(device, model, ranks, whole=whole)
    for most in (1, 3, 40, 40, 300, 300, 2000):
        burst = decode_burst(random, most)
        assert_closed_form(rank, rank.model.decode, *burst, random)


@pytest.mark.parametrize("whole", [False, True], ids=["ops", "whole"])
@pytest.mark.parametrize(("device", "model", "ranks"), DEVICES)
def test_single_steps_of_all_graphs(device: str, model: str, ranks: int, whole: bool) -> None:
    random = Random(f"{device} {ranks} {whole} steps")
    rank = on_device(device, model, ranks, whole=whole)
    decoder = rank.model
    for _ in range(10):
        sequences = spread(random, 600)
        mixed = prompts(random, sequences)
        assert_closed_form(rank, decoder.mixed, mixed, growth(sequences), 1, random)
        assert_closed_form(rank, decoder.prefill, prompts(random, 0), None, 1, random)
        moved = {"tokens": spread(random, 10**6)}
        assert_closed_form(rank, decoder.move, moved, None, 1, random)
        if not decoder.whole:
            # A chunk of a prompt beside answers, again and again: only what is cached grows.
            by = {"kv_tokens": sequences, "prompt_kv": mixed["prompt_tokens"]}
            assert_closed_form(rank, decoder.mixed, mixed, by, spread(random, 60), random)


@pytest.mark.parametrize("sequences", first(1, [100, 150, 300, 900]))
def test_an_iteration_that_turns_from_compute_to_memory_bound(sequences: int) -> None:
    """GPT-J's cache is read at one operation a byte, so a long burst of many sequences crosses the ridge."""
    rank = on_device("a100-sxm-80gb", "gpt-j-6b", 1, whole=True)
    sizes = decode_sizes(sequences, sequences)
    listed = assert_closed_form(rank, rank.model.decode, sizes, growth(sequences), 5000, Random(sequences))
    compute_bound = listed.costs[:, 3] / 0.757 > listed.costs[:, 2] / 0.921
    assert not compute_bound[-1]
    assert compute_bound[0] == (sequences > 100)


@slow
def test_a_profile_of_whole_iterations() -> None:
    rank = on_device("a100-sxm-80gb", "gpt-j-6b", 1, profile="flover-gptj")
    random = Random(8)
    for sequences in (1, 2, 8, 20, 32, 50, 900):
        sizes = decode_sizes(sequences, 30 * sequences)
        assert_closed_form(rank, rank.model.decode, sizes, growth(sequences), 512, random)


def test_a_step_that_costs_nothing() -> None:
    """The profile's passes over prompts are assumed to be free."""
    rank = on_device("a100-sxm-80gb", "gpt-j-6b", 1, profile="flover-gptj")
    ramp = GraphPricer(rank.price, rank.roofline).ramp(rank.model.prefill, prompts(Random(1), 0), None, 1)
    assert (ramp.total_s, ramp.floor_s(), ramp.end_s(0), ramp.replay_at(0.0)) == (0.0, 0.0, 0.0, 0)
    assert (ramp.demand(0).memory, ramp.demand(0).compute, ramp.demand(0).launch) == (0.0, 0.0, 0.0)
    assert ramp.next_change(0) == 0


# -- tables ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True], ids=["ops", "whole"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("seed", first(1, range(5)))
def test_bursts_by_tables(seed: int, ranks: int, whole: bool) -> None:
    """Neither convex nor monotone; and by source, each op having one of its own."""
    random = Random(f"{seed} {ranks} {whole} tables")
    rank = in_tables(seed, ranks, whole)
    for most in (5, 60, 600, 5000):
        sizes, by, replays = decode_burst(random, most)
        listed = assert_closed_form(rank, rank.model.decode, sizes, by, replays, random)
        sources: dict[SourceKind, float] = {}
        ramp = GraphPricer(rank.price, rank.roofline).ramp(rank.model.decode, sizes, by, replays)
        ramp.origin.count(ramp.total_s, ramp.replays, sources)
        assert sources == pytest.approx(listed.sources, rel=REL, abs=REL * listed.ends_s[-1])


@pytest.mark.parametrize(
    "bends",
    [
        # Up and down again within a power of two, through its middle, its first and its last quarter.
        [(1024, 3), (1280, 7), (1536, 4), (1792, 1), (2047, 5)],
        [(1024, 1), (1536, 1), (1792, 2), (2047, 1)],
        [(1024, 2), (1280, 1), (1536, 2), (2047, 2)],
        # Only in the middle: its quarters lie on the line between its ends.
        [(1024, 2), (1279, 2), (1535, 3), (1791, 2), (2047, 2)],
        # Only in its second quarter, only in its third.
        [(1024, 2), (1279, 3), (1535, 2), (2047, 2)],
        [(1024, 2), (1535, 2), (1791, 3), (2047, 2)],
        [(1024, 2), (2046, 2), (2047, 9)],
        [(1024, 9), (1025, 2), (2047, 2)],
    ],
)
def test_bends_within_a_power_of_two(bends: list[tuple[int, float]]) -> None:
    model = in_tables(0, 1, True).model
    places, values = zip(*bends, strict=True)

    def price(op: Op) -> Price:
        seconds = 1e-3 * looked_up(op["kv_tokens"], places, values)
        return Price(seconds, seconds, seconds, "measured", "a table")

    rank = Rank(model, price, lambda op: Floor(0.0, price(op).seconds / 2, 0.0))
    for sequences, replays in ((1, 1600), (7, 200)):
        sizes = decode_sizes(sequences, 900)
        assert_closed_form(rank, model.decode, sizes, growth(sequences), replays, Random(0))


@slow
@pytest.mark.parametrize("seed", first(1, range(6)))
def test_several_sizes_that_grow_or_shrink_apart(seed: int) -> None:
    """Rows of projections and of the head, cached tokens: no op reads two of them."""
    random = Random(f"{seed} apart")
    for rank in (in_tables(seed, 4, False), on_device("h200-sxm", "llama-3.1-8b", 4)):
        for replays in (2, 30, 200):
            sizes = {name: random.randint(3 * replays, 4000) for name in rank.model.mixed.reads}
            names = ("tokens", "rows", "kv_tokens", "prompt_kv")
            by = {name: random.choice([-3, -1, 0, 1, 7]) for name in random.sample(names, 3)}
            sizes["kv_tokens"] *= 40
            assert_closed_form(rank, rank.model.mixed, sizes, by, replays, random)


@pytest.mark.parametrize("seed", first(2, range(4)))
@pytest.mark.parametrize("whole", [False, True], ids=["ops", "whole"])
def test_sizes_that_one_op_reads_together(seed: int, whole: bool) -> None:
    """Without `advance` every size grows by one: attention reads two of them."""
    random = Random(f"{seed} {whole} together")
    for rank in (in_tables(seed, 1, whole), on_device("h200-sxm", "llama-3.1-8b", 1, whole=whole)):
        for graph in (rank.model.decode, rank.model.prefill, rank.model.mixed, rank.model.move):
            sizes = {name: spread(random, 5000) for name in graph.reads}
            assert_closed_form(rank, graph, sizes, None, random.randint(2, 50), random)


def test_a_burst_of_a_graph_that_reads_nothing_that_grows() -> None:
    rank = in_tables(0, 1, False)
    sizes = decode_sizes(7, 900)
    listed = assert_closed_form(rank, rank.model.decode, sizes, {"kv_tokens": 0}, 5000, Random(0))
    assert np.ptp(listed.costs[:, 0]) == 0.0


@pytest.mark.parametrize("first", ["still", "growing"])
def test_a_size_that_grows_by_nothing_is_told_from_one_that_grows(first: str) -> None:
    rank = in_tables(0, 1, False)
    graph_pricer = GraphPricer(rank.price, rank.roofline)
    sizes = dict.fromkeys(rank.model.mixed.reads, 900)
    bursts = [{"kv_tokens": 0, "rows": 5}, {"kv_tokens": 9, "rows": 5}]
    for by in bursts if first == "still" else reversed(bursts):
        ramp = graph_pricer.ramp(rank.model.mixed, sizes, by, 50)
        assert_work(ramp, one_by_one(rank, rank.model.mixed, sizes, by, 50))


def test_what_is_forgotten_is_asked_for_again() -> None:
    """More mixtures of sizes than a pricer remembers, which are 4,096: the first are priced as before."""
    rank = in_tables(1, 1, True)
    graph_pricer = GraphPricer(rank.price, rank.roofline)

    def total_s(tokens: int) -> float:
        return graph_pricer.ramp(rank.model.move, {"tokens": tokens}, {}, 10).total_s

    first = [total_s(tokens) for tokens in range(1, 6)]
    for tokens in range(6, 4200):
        total_s(tokens)
    assert [total_s(tokens) for tokens in range(1, 6)] == first


@slow
def test_curves_do_not_mix_graphs_or_sizes() -> None:
    """One pricer for many graphs and sizes in any order gives what a fresh one does."""
    random = Random(5)
    rank = in_tables(2, 4, False)
    shared = GraphPricer(rank.price, rank.roofline)
    graphs = (rank.model.decode, rank.model.mixed)
    for _ in range(60):
        graph, sequences = random.choice(graphs), random.choice([1, 2, 50])
        sizes = prompts(random, sequences) | {"kv_tokens": spread(random, 10**5)}
        by, replays = {"kv_tokens": random.choice([1, 3, sequences])}, spread(random, 300)
        fresh = GraphPricer(rank.price, rank.roofline).ramp(graph, sizes, by, replays)
        ramp = shared.ramp(graph, sizes, by, replays)
        assert ramp.total_s == pytest.approx(fresh.total_s, rel=REL)
        assert ramp.floor_s() == pytest.approx(fresh.floor_s(), rel=REL)


def test_a_price_that_is_a_curve_is_taken_as_short_lines() -> None:
    """As prices between measured points are; that it bends everywhere is found out once for its kind. Six in
    ten thousand is what a price may be off: a tenth of what two calibrations of a card differ by."""
    asked: list[int] = []

    def cost(size: int) -> tuple[float, float, float, float]:
        asked.append(size)
        return (1e-6 * size**1.3, 1e-7 * size, 1e-7 * size, 0.0)

    bends = Bends()
    for _ in range(2):
        curve = Curve(partial(lines, cost), bends)
        for size in (1, 100, 5000, 5001, 8191, 100_000):
            stretch = curve.at(size)
            found = stretch.cost[0] + (size - stretch.start) * stretch.slope[0]
            assert found == pytest.approx(1e-6 * size**1.3, rel=6e-4)
    assert bends.curved
    first, asked[:] = len(asked), []
    Curve(partial(lines, cost), bends).at(5000)
    assert len(asked) < first / 10


@pytest.mark.parametrize("power", [0.3, 1.3, 2.0])
def test_a_curve_is_taken_as_lines_within_three_hundredths_of_a_percent(power: float) -> None:
    """At every size, a hundredth of that for what lies between the sizes that are looked at."""
    curve = Curve(partial(lines, lambda size: (size**power, 0.0, 0.0, 0.0)))
    for size in range(1, 1 << 13):
        stretch = curve.at(size)
        found = stretch.cost[0] + (size - stretch.start) * stretch.slope[0]
        assert found == pytest.approx(size**power, rel=3e-4 * 1.01)


def test_a_small_bend_is_kept_where_there_are_few() -> None:
    """One much smaller than what a curve may be off."""
    curve = Curve(partial(lines, lambda size: (size + 1e-5 * max(0, size - 3000), 0.0, 0.0, 0.0)))
    for size in range(2048, 4096):
        stretch = curve.at(size)
        found = stretch.cost[0] + (size - stretch.start) * stretch.slope[0]
        assert found == pytest.approx(size + 1e-5 * max(0, size - 3000), rel=REL)


def test_what_is_known_to_be_a_curve_is_not_asked_for_its_lines() -> None:
    asked = list[tuple[int, bool]]()

    def found(octave: int, curved: bool) -> list[Straight]:
        asked.append((octave, curved))
        return [Straight(1 << octave >> 1, (1 << octave) - 1, NOTHING, NOTHING)]

    curve = Curve(found, Bends(curved=True, settled=True))
    for size in (5, 6, 300, 7):
        curve.at(size)
    assert asked == [(3, True), (9, True)]


def test_a_burst_asks_replay_by_replay_for_its_share_of_a_growing_time() -> None:
    """Replays of 1, 2, 3 s, half a second of memory each: a half, a quarter, a sixth to the next step."""
    ramp = BurstCost([Piece(0, 3, 0.0, (1.0, 0.5, 0.5, 0.0), (1.0, 0.5, 0.0, 0.0))])
    found = [ramp.demand_at(work_s) for work_s in (0.0, 1.0, 3.0, 6.0)]
    assert [until_s for until_s, _ in found] == [1.0, 3.0, 6.0, 6.0]
    assert [demand.memory for _, demand in found] == [0.5, 0.25, 85 / STEPS, 85 / STEPS]
    # A half, one and one and a half.
    assert ramp.floor_s() == 3.0


def test_the_replay_at_work_is_found_from_any_guess() -> None:
    """Rounding puts the first guess a replay too early or too late, at the first and the last replay too."""
    random = Random(6)
    for _ in range(300):
        count, first_s = random.choice([2, 3, 5, 20]), 10 ** random.uniform(-6.0, 0.0)
        steeper_s = random.choice([10 ** random.uniform(-12.0, 2.0), -random.random() / count])
        pieces = [Piece(0, count, 0.0, (first_s, 0.0, 0.0, 0.0), (first_s * steeper_s, 0.0, 0.0, 0.0))]
        assert_inverse(BurstCost(pieces))


def test_replays_that_ask_for_nothing_are_alike_even_if_the_first_takes_no_time() -> None:
    piece = Piece(0, 6, 0.0, NOTHING, (1e-3, 0.0, 0.0, 0.0))
    assert [piece.last_like(i) for i in range(6)] == [5] * 6


@pytest.mark.parametrize("end", ["value", "low", "high"])
def test_shares_by_source_add_up_to_the_time_at_each_end(end: Any) -> None:
    """Every second of a step has a source, at its prices and at both ends of their intervals."""
    rank = on_device("h200-sxm", "llama-3.1-8b", 1, "local")
    sizes = step_sizes(8, 8 * 700, [(256, 0)], 1)
    cost = GraphPricer(rank.price, rank.roofline, end=end).ramp(rank.model.mixed, sizes, None, 1)
    sources: dict[SourceKind, float] = {}
    cost.origin.count(cost.total_s, 1, sources)
    assert sum(sources.values()) == pytest.approx(cost.total_s, rel=REL)
    assert all(0.0 < seconds <= cost.total_s * (1.0 + REL) for seconds in sources.values())


def test_a_price_without_any_line_is_taken_pair_by_pair_until_there_are_too_many() -> None:
    """Any two neighbours lie on a line: 2,048 pairs from 4,096 on, twice as many from 8,192 on."""
    random = Random(3)
    prices = [random.uniform(1.0, 2.0) for _ in range(1 << 14)]
    curve = Curve(partial(lines, lambda size: (prices[size], 0.0, 0.0, 0.0)))
    for size in range(4096, 8192, 7):
        stretch = curve.at(size)
        found = stretch.cost[0] + (size - stretch.start) * stretch.slope[0]
        assert found == pytest.approx(prices[size], rel=REL)
    with pytest.raises(ValueError, match="over 2048 times between 8192 and 16383"):
        curve.at(10_000)


def test_a_burst_of_one_source_counts_its_time_to_the_bit() -> None:
    """Not what its fixed part and the remainder add up to again."""
    random = Random(4)
    for _ in range(50):
        fixed_s, total_s, replays = random.random(), random.uniform(100.0, 200.0), random.randint(1, 99)
        sources: dict[SourceKind, float] = {}
        Origin((("measured", fixed_s),), "measured").count(total_s, replays, sources)
        assert sources == {"measured": total_s}
