"""What searches and plans look at in made-up worlds, against tapes: which points, with how many requests and
replicas, the verdict on each, and what comes of it. What such answers have to be is in test_planning.py
(edges in closed form, brute force); here is each step on the way, so that none changes unseen. The last tests
ask the same made-up worlds for single facts.

A tape that changes on purpose is written anew by  SIMCORE_UPDATE_TAPES=1  (as_written.py) and read again.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from simcore.planning import plan as plans
from simcore.planning.limits import Limit
from simcore.planning.plan import Plan, run
from simcore.planning.questions import Answered, Tried
from simcore.planning.race import race
from simcore.planning.runs import Ask, Finished, Ran
from simcore.planning.searches import Highest, Judged, drive, fewest, highest
from simcore.planning.verdict import Rule
from simcore.planning.whatif import load_plan
from tests.as_written import are_as_written
from tests.thorough import slow

TAPES = Path(__file__).parent / "tapes" / "planning"

LATE, KEPT = Limit("ttft_p99_s", 1.0, at_most=True), Limit("slo_attainment", 0.9, at_most=False)
RATES = (1e-2, 1e3)


# -- searches ----------------------------------------------------------------------------------------------


class World:
    """A server in closed form, drawn by a seed: its latency is a power of the load with noise, part of it
    common to a replica at all loads; far beyond its edge queues grow, and too few requests show nothing.
    `coarse`: figures are halves and quarters, so that means often lie on a limit, and queues grow by chance
    at any load."""

    def __init__(self, seed: int, *, coarse: bool = False) -> None:
        draw = random.Random(f"world {seed}")
        self.coarse = coarse
        self.seed, self.edge = seed, 10.0 ** draw.uniform(0.0, 1.5)
        self.power, self.noise = draw.choice((0.3, 1.0, 3.0, 12.0)), draw.choice((0.0, 1e-3, 0.03, 0.15, 0.5))
        self.skewed, self.growing = draw.random() < 0.5, draw.choice((1.02, 1.5, 100.0))
        # Requests times as many, so many times the edge: then a steady state is seen.
        self.steady, self.breaks = draw.choice((0.5, 2.0, 1e3)), draw.choice((1.3, 1e3, 1e3))
        self.limits = draw.choice(([LATE], [KEPT], [LATE, KEPT]))
        self.rule = Rule(draw.choice((0.5, 0.8, 0.95)), draw.choice((2, 5, 13, 30, 60)))
        self.begin = self.edge * 10.0 ** draw.uniform(-1.5, 1.5)
        self.same = draw.random() < 0.1
        self.chance = draw.choice((0.0, 0.1, 0.3, 0.45))
        if coarse:
            self.edge = 2.0 ** draw.randrange(5)
            self.begin = self.edge * 2.0 ** draw.randrange(-6, 6)

    def at(self, load: float, times: int = 1) -> Any:
        """Returns the point of a load."""
        return SimpleNamespace(load=load, times=times, same_in_every_run=self.same)

    def ran(self, ask: Ask) -> Ran:
        """Returns a run."""
        point: Any = ask.point
        load = point.load / self.edge
        own = random.Random(f"{self.seed} {ask.replica} {point.load:.9g} {point.times}")
        common = random.Random(f"{self.seed} {ask.replica} {point.times}")
        if load > self.breaks:
            return Ran({}, fault="" if self.seed % 2 else "a law is broken")
        draws = [0.8 * one.gauss() + 0.2 * one.gauss() for one in (own, common)]
        drawn = self.noise * sum(draws) * (0.0 if self.same else 1.0)
        late = load**self.power * (exp(drawn) if self.skewed else 1.0 + drawn)
        kept = min(1.0, max(0.0, 1.0 - 0.1 * load**self.power * (1.0 + drawn)))
        grows = load > self.growing and own.random() < 0.3 * load
        if self.coarse:
            late, kept = round(4.0 * late) / 4.0, round(20.0 * kept) / 20.0
            grows = grows or own.random() < self.chance
        short = point.load > self.steady * self.edge * point.times
        figures = {LATE.metric: late, KEPT.metric: kept, "rejected": float(load > 30.0)}
        return Ran(figures, growing=grows, short=short)

    def made(self, asks: Sequence[Ask]) -> list[Ran]:
        """Returns runs."""
        return [self.ran(ask) for ask in asks]


def look(value: float, judged: Judged) -> str:
    point: Any = judged.point
    more = f"*{point.times}" if point.times > 1 else ""
    verdicts = "".join(f" {name[0]}:{verdict}" for name, verdict in judged.verdicts.items())
    return f"{value:.5g}{more} {judged.verdict} {len(judged.runs)}{verdicts} {judged.why}".strip()


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


def result_and_batches(search: Any, world: World) -> Any:
    """Returns what a search finds, and in which batches it looks."""
    batches: list[str] = []

    def made(asks: Sequence[Ask]) -> list[Ran]:
        points: list[Any] = [ask.point for ask in asks]
        batches.append(f"{points[0].load:.5g}*{points[0].times} {len(asks)}" if asks else "none")
        return world.made(asks)

    (found,) = drive([search], made)
    return found, batches


def highest_of(seed: int, *, coarse: bool) -> Iterator[str]:
    world = World(seed, coarse=coarse)
    search = highest(
        world.at, world.begin, world.limits, world.rule, tolerance=0.01, between=RATES, most_times=16
    )
    found, batches = result_and_batches(search, world)
    assert isinstance(found, Highest)
    ends = " ".join(number(value) for value in (found.holds, found.fails, found.likely))
    yield f"world {seed}, edge {world.edge:.5g}: {ends}"
    yield "  looks " + ", ".join(batches)
    yield from (f"    {look(value, one)}" for value, one in sorted(found.judged.items()))


@slow
@pytest.mark.parametrize("kind", ["fine", "coarse"])
def test_searches_for_a_rate_look_where_the_tape_says(kind: str) -> None:
    worlds = (highest_of(seed, coarse=kind == "coarse") for seed in range(48))
    are_as_written(TAPES / f"highest_{kind}.txt", [line for world in worlds for line in world])


@pytest.mark.parametrize("seed", [5048, 5356])
def test_means_that_lie_on_a_limit_cross_it_there(seed: int) -> None:
    """By fewer replicas at one end than at the other they may lie below it a second time."""
    world = World(seed, coarse=True)
    found, _ = result_and_batches(
        highest(
            world.at, world.begin, world.limits, world.rule, tolerance=0.01, between=RATES, most_times=16
        ),
        world,
    )
    assert found.holds <= found.likely
    assert found.likely in found.judged


def fewest_of(seed: int) -> Iterator[str]:
    world = World(1000 + seed, coarse=seed % 2 == 1)
    need, bound = 30.0 / (1 + seed % 7), (None, 3, 20)[seed % 3]
    search = fewest(
        lambda servers, times: world.at(need * world.edge / servers, times), (1 + seed % 2, 40),
        world.limits, world.rule, lambda: bound, most_times=16,
    )  # fmt: skip
    found, batches = result_and_batches(search, world)
    yield f"world {1000 + seed}, need {need:.4g}, bound {bound}: {found.number} {found.cut}"
    yield "  looks " + ", ".join(batches)
    yield from (f"    {look(servers, one)}" for servers, one in sorted(found.judged.items()))


@slow
def test_searches_for_a_number_look_where_the_tape_says() -> None:
    are_as_written(TAPES / "fewest.txt", [line for seed in range(48) for line in fewest_of(seed)])


def race_of(seed: int) -> Iterator[str]:
    world = World(2000 + seed, coarse=seed % 2 == 1)
    draw = random.Random(f"race {seed}")
    speeds = [1.0, *(draw.choice((1.0, 0.99, 0.95, 0.8, 0.5, 0.1)) for _ in range(5))]

    def way(speed: float) -> Callable[[float, int], Any]:
        return lambda load, times: world.at(load / speed, times)

    search = race(
        [way(speed) for speed in speeds], world.begin, world.limits, world.rule, between=RATES, most_times=8
    )
    found, batches = result_and_batches(search, world)
    yield f"world {2000 + seed}, ways {speeds}"
    yield "  looks " + ", ".join(batches)
    for place, judged in sorted(found.judged.items()):
        out = found.out.get(place)
        ends = "stays" if out is None else f"is out at {out.value:.5g} by {out.by}"
        yield f"  way {place} {ends}"
        yield "    " + ", ".join(f"{value:.5g} {one.verdict}" for value, one in sorted(judged.items()))


@slow
def test_races_look_where_the_tape_says() -> None:
    are_as_written(TAPES / "race.txt", [line for seed in range(24) for line in race_of(seed)])


# -- plans -------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "name": "made-up",
    "study": "serving",
    "device": "h200-sxm",
    "model": "tiny-llama",
    "profile": "none",
    "workload": {
        "requests": 200,
        "arrivals": {"kind": "poisson", "rate_per_s": 40.0},
        "prompt_tokens": {"kind": "uniform", "low": 5, "high": 90},
        "output_tokens": {"kind": "uniform", "low": 2, "high": 9},
    },
    "strategies": [
        {"kind": "continuous_batching", "ranks": [1, 2, 4]},
        {"kind": "dynamic_batching", "window_s": 0.05},
    ],
    "slo": {"ttft_s": 0.5, "e2e_s": 2.0},
}
# One way of running.
SINGLE = {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": 1}]}
TEN_WAYS = [{"kind": "continuous_batching", "token_budget": [8 * n for n in range(1, 11)]}]
RECORDED = {"arrivals": {"kind": "trace", "path": "trace.csv", "format": "azure", "jitter_s": 0.01}}
SETUPS: dict[str, dict[str, Any]] = {
    "devices": {"question": "devices"},
    "devices between": {"question": "devices", "between": [3, 9]},
    "devices of two loads": {"question": "devices", "vary": {"workload.arrivals.rate_per_s": [7.0, 300.0]}},
    "devices, too many": {
        "question": "devices",
        "between": [1, 8],
        "vary": {"workload.arrivals.rate_per_s": [1e3]},
    },
    "a field": {
        "question": "devices",
        "over": "strategies.0.token_budget",
        "between": [1, 300],
        "base": {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": 1}]},
    },
    "cost": {"question": "cost", "cost_per_hour": {"h200-sxm": 3.5}},
    "cost of two devices": {
        "question": "cost",
        "cost_per_hour": {"h200-sxm": 3.5, "a100-sxm-80gb": 0.0},
        "vary": {"device": ["h200-sxm", "a100-sxm-80gb"]},
    },
    "rate": {"question": "rate", "base": {**BASE, "devices": 4}},
    "rate of ten ways": {
        "question": "rate",
        "base": {**BASE, "strategies": TEN_WAYS},
    },
    "rate of ten ways, none left out early": {
        "question": "rate",
        "leave_out_early": False,
        "base": {**BASE, "strategies": TEN_WAYS},
    },
    "rate of a trace": {"question": "rate", "base": {**BASE, "devices": 4, "workload": RECORDED}},
    "rate of ten ways of a trace": {
        "question": "rate",
        "base": {**BASE, "strategies": TEN_WAYS, "workload": RECORDED},
    },
    "strategy": {"question": "strategy", "base": {**BASE, "devices": 4}},
    "grid": {
        "question": "grid",
        "objective": ["fewest_devices", "highest_rate", "lowest_latency", "lowest_energy"],
        "vary": {"devices": [4, 8], "workload.arrivals.rate_per_s": [4.0, 60.0, 200.0]},
    },
    "grid, highest rate": {
        "question": "grid",
        "objective": "highest_rate",
        "vary": {"devices": [4], "workload.arrivals.rate_per_s": [2.0, 8.0, 4.0, 200.0]},
    },
    "grid of one rate": {"question": "grid", "vary": {"devices": [1, 2, 4, 8]}},
    "grid of clients": {
        "question": "grid",
        "base": {
            **BASE,
            "devices": 4,
            "workload": {
                **BASE["workload"],
                "arrivals": {"kind": "closed_loop", "clients": [4, 16], "think_s": 0.1},
            },
        },
    },
    "grid, cost": {
        "question": "grid",
        "objective": "lowest_cost",
        "cost_per_hour": {"h200-sxm": 3.5},
        "vary": {"devices": [3, 4, 8]},
    },
    "constraints": {
        "question": "rate",
        "base": {**BASE, "devices": 4},
        "constraints": {"slo_attainment": 0.95, "ttft_p99.9_s": 0.4, "tpot_mean_s": 0.01},
        "certainty": 0.8,
        "replicas": 12,
    },
}


class MadeUp:
    """Makes runs in closed form: one queue before servers that get faster with their ranks, as the load on
    them has it."""

    def make(self, asks: Sequence[Ask], finished: Finished) -> None:
        """See `Maker`; the last one first, since any order does."""
        for place in reversed(range(len(asks))):
            finished(place, self._ran(asks[place]))

    def _ran(self, ask: Ask) -> Ran:
        case = ask.point.case
        axes = case.axes
        rate = axes.rate_per_s or 1.0
        draw = random.Random(f"{ask.replica} {axes.requests}")
        slower = {"high": 1.1, "value": 1.0, "low": 0.93}[ask.end]
        way = 1.0 if axes.strategy == "continuous_batching" else 1.4
        room = 1.0 + 2.0 / getattr(case.strategy, "token_budget", [64])[0]
        each_s = slower * way * room * 0.03 / case.ranks**0.7
        load = rate * each_s / case.servers
        wait_s = each_s * (0.3 + load**4) * exp(0.1 * draw.gauss())
        figures: dict[str, float | None] = {
            f"{name}_{of}_s": wait_s * more * part
            for name, more in (("ttft", 4.0), ("e2e", 12.0), ("tpot", 0.3), ("itl", 0.4), ("queue", 3.0))
            for of, part in (("mean", 1.0), ("p50", 0.9), ("p95", 2.0), ("p99", 3.0), ("p99.9", 5.0))
        }
        figures |= {
            "slo_attainment": min(1.0, 1.0 / (0.5 + load)), "window_requests": 0.8 * axes.requests,
            "output_throughput_tokens_per_s": 5.5 * min(rate, case.servers / each_s),
        }  # fmt: skip
        return Ran(figures, load > 1.2, shares={"datasheet": 1.0}, short=10.0 * load * rate > axes.requests)

    def close(self) -> None:
        """See `Maker`."""

    def about(self) -> str:
        """See `Maker`."""
        return "a formula"


def planned_in(
    world: MadeUp, document: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Plan:
    """Returns what is found of a plan in a made-up world, by the file plan.yaml of the folder."""
    monkeypatch.setattr(plans, "_maker", lambda *given: world)
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return run(load_plan(path), jobs=1, progress=lambda doing, done, total: None)


def tried_text(one: Tried | None) -> str:
    if one is None:
        return "-"
    case, judged = one.point.case, one.judged
    axes = case.axes
    ways = f"{one.point.device}, {axes.label}, {axes.devices}/{axes.ranks}/{case.servers}"
    load = f"{axes.requests} at {number(axes.rate_per_s)}/s"
    cost = f" costs {number(one.cost_per_hour)}" if one.cost_per_hour is not None else ""
    settings = "".join(f" {value}" for value in one.alternative.settings.values())
    verdict = f"{judged.verdict} {len(judged.runs)}{' short' if judged.short else ''}"
    return f"{ways}, {load},{settings} value {number(one.value)}{cost}: {verdict}"


def answered_text(one: Answered) -> Iterator[str]:
    likely = f", likely {number(one.likely)}" if one.likely is not None else ""
    yield f"    best {tried_text(one.best)}{likely}"
    yield f"    beyond {tried_text(one.next_worse)}"


def plan_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    rows = [f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{5 + i % 80},{2 + i % 8}" for i in range(60)]
    head = "TIMESTAMP,ContextTokens,GeneratedTokens"
    (folder / "trace.csv").write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    plan = planned_in(MadeUp(), {"base": BASE, **SETUPS[name]}, folder, monkeypatch)
    found = plan.result
    yield f"{name}: {plan.simulated} runs, {plan.requests} requests"
    yield from (f"  {tried_text(one)}" for one in found.tried)
    for place, (group, winner) in enumerate(zip(found.groups, found.winners, strict=False)):
        slow, fast = (at.get(place) for at in (found.at_slow_prices, found.at_fast_prices))
        yield f"  group {place}: {tried_text(winner)}"
        yield f"    slow {slow and slow.verdict}, fast {fast and fast.verdict}"
        yield from (line for one in group for line in answered_text(one))
    for pair in found.pairs:
        more = " ".join(number(value) for value in (pair.more, pair.low, pair.high))
        yield f"  {pair.metric} of {pair.b.point.case.axes.label} is {more} more than of {tried_text(pair.a)}"
    yield from (f"  winner {tried_text(one)}" for one in found.winners[len(found.groups) :])
    yield from (
        f"  {text.replace(str(folder / 'plan.yaml'), 'plan')}" for text in (*plan.notes, *plan.warnings)
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow) if "of ten ways" in name else name for name in SETUPS]
)
def test_plans_look_where_the_tape_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = f"plan_{name.replace(', ', '_').replace(' ', '_')}.txt"
    are_as_written(TAPES / file, list(plan_of(name, tmp_path, monkeypatch)))


@slow
def test_pairs_of_a_strategy_have_as_many_requests_as_any_of_them_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the scenario's rate some ways take twice its requests for a steady state, and some none more."""
    base = copy.deepcopy({**BASE, "devices": 4})
    base["workload"]["arrivals"]["rate_per_s"] = 50.0
    document = {"base": base, "question": "strategy"}
    found = planned_in(MadeUp(), document, tmp_path, monkeypatch).result
    took = {one.point.case.axes.requests for one in found.tried if one.value == 50.0}
    assert len(took) > 1
    assert found.pairs
    for pair in found.pairs:
        assert {one.point.case.axes.requests for one in (pair.a, pair.b)} == {max(took)}


@pytest.mark.parametrize("over", [None, "strategies.0.token_budget"])
def test_doublings_meet_the_greatest_number_that_is_tried(
    over: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing holds, no odd number is left to try beyond the last power of two."""
    document: dict[str, Any] = {
        "question": "devices",
        "base": SINGLE,
        "constraints": {"ttft_p99_s": 1e-9},
    }
    document |= {"over": over} if over else {}
    found = planned_in(MadeUp(), document, tmp_path, monkeypatch).result
    assert found.winners == [None]
    assert [one.value for one in found.tried] == [2**i for i in range(17 if over else 11)]


def test_where_no_rate_holds_there_is_no_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {"question": "rate", "base": {**BASE, "devices": 4}, "constraints": {"ttft_p99_s": 1e-9}}
    plan = planned_in(MadeUp(), document, tmp_path, monkeypatch)
    assert plan.result.winners == [None]
    assert [one.best for one in plan.result.groups[0]] == [None] * 4
    assert plan.answer.startswith("Nothing that was tried keeps")


def test_another_field_than_devices_may_need_thousands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Budgets(MadeUp):
        """The latency is 1 s at 5,000 tokens, and less with more."""

        def _ran(self, ask: Ask) -> Ran:
            return Ran({"ttft_p99_s": 5000.0 / getattr(ask.point.case.strategy, "token_budget", [1])[0]})

    document = {"question": "devices", "over": "strategies.0.token_budget", "base": SINGLE}
    document |= {"constraints": {"ttft_p99_s": 1.0}}
    (winner,) = planned_in(Budgets(), document, tmp_path, monkeypatch).result.winners
    assert winner is not None
    assert winner.value == 5000


def test_servers_too_large_for_the_devices_that_are_searched_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = {**BASE, "strategies": [{"kind": "continuous_batching", "ranks": [1, 4]}]}
    document = {"question": "devices", "between": [1, 3], "base": base}
    plan = planned_in(MadeUp(), document, tmp_path, monkeypatch)
    assert {one.point.case.ranks for one in plan.result.tried} == {1}
    assert plan.result.winners != [None]


@pytest.mark.parametrize(("power", "most_s", "end"), [(0.0, 1.0, 1e6), (0.01, 1e-9, 1e-6)])
def test_rates_from_one_in_a_million_seconds_to_a_million_a_second_are_searched(
    power: float, most_s: float, end: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all hold, and where none does though each comes nearer."""

    class Steady(MadeUp):
        """A latency that is a power of the rate."""

        def _ran(self, ask: Ask) -> Ran:
            return Ran({"ttft_p99_s": 0.1 * (ask.point.case.axes.rate_per_s or 0.0) ** power})

    document = {"question": "rate", "base": SINGLE, "constraints": {"ttft_p99_s": most_s}}
    found = planned_in(Steady(), document, tmp_path, monkeypatch).result
    rates = [one.value for one in found.tried if one.value is not None]
    assert (max(rates) if power == 0.0 else min(rates)) == end


def test_a_way_of_running_is_searched_up_to_the_cost_of_a_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server of four devices is enough; of single devices 20 would be: four of them cost as much."""

    class Twenty(MadeUp):
        def _ran(self, ask: Ask) -> Ran:
            case = ask.point.case
            return Ran({"ttft_p99_s": 0.5 if case.ranks == 4 or case.servers >= 20 else 2.0})

    ways = [[{"kind": "continuous_batching", "ranks": ranks}] for ranks in (1, 4)]
    document = {"question": "cost", "cost_per_hour": {"h200-sxm": 3.0}, "vary": {"strategies": ways}}
    document |= {"base": BASE, "constraints": {"ttft_p99_s": 1.0}}
    found = planned_in(Twenty(), document, tmp_path, monkeypatch).result
    tried = {ranks: [one.value for one in found.tried if one.point.case.ranks == ranks] for ranks in (1, 4)}
    assert tried == {1: [1, 2, 3], 4: [1]}
    (winner,) = found.winners
    assert winner is not None
    assert (winner.point.case.axes.devices, winner.cost_per_hour) == (4, 12.0)


def test_the_fewest_devices_may_cost_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of one kind for 5 an hour each, or four of another for 1."""

    class ThreeOrFour(MadeUp):
        def _ran(self, ask: Ask) -> Ran:
            needed = 3 if ask.point.device.startswith("h200") else 4
            return Ran({"ttft_p99_s": 0.5 if ask.point.case.servers >= needed else 2.0})

    devices = {"h200-sxm": 5.0, "a100-sxm-80gb": 1.0}
    document = {"base": {**SINGLE, "device": list(devices)}, "cost_per_hour": devices}
    document |= {"constraints": {"ttft_p99_s": 1.0}}
    for question, best in (("devices", (3, 15.0)), ("cost", (4, 4.0))):
        asked = {**document, "question": question}
        (winner,) = planned_in(ThreeOrFour(), asked, tmp_path, monkeypatch).result.winners
        assert winner is not None
        assert (winner.point.case.axes.devices, winner.cost_per_hour) == best


@pytest.mark.parametrize(("slower", "verdict", "given_up"), [(1.02, "holds", False), (1.2, "unsure", True)])
def test_price_ends_are_given_up_where_pairs_say_that_they_will_not_hold(
    slower: float, verdict: str, given_up: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.85 s of 1 s, a fifth more or less by replica. A fifth slower it would be unsure to the last look, as
    the best point's replicas say after the first ones."""

    class Noisy(MadeUp):
        def _ran(self, ask: Ask) -> Ran:
            noise = exp(0.2 * random.Random(f"noise {ask.replica}").gauss())
            value = 0.85 * noise * (slower if ask.end == "high" else 1.0)
            return Ran({"ttft_p99_s": value, "window_requests": 1e3})

    document = {"base": BASE, "question": "devices", "constraints": {"ttft_p99_s": 1.0}, "replicas": 40}
    plan = planned_in(Noisy(), document, tmp_path, monkeypatch)
    slow, best = plan.result.at_slow_prices[0], plan.result.winners[0]
    assert best is not None
    assert best.judged.holds
    assert slow.verdict == verdict
    assert (slow.verdict == "unsure" and len(slow.runs) < 40) == given_up
