"""Arithmetic takes longer under load: the law by closed forms and by small steps, in the simulator, in
profiles; its fit finds the constants that rows were made with, and those of the card that was measured."""

import csv
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import simcore
from simcore.assembly import assemble
from simcore.devices.fitted import FittedProfile, LimitedPower, write_fitted, write_law
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.machine import laws
from simcore.machine.machine import Machine, Overheads, Program
from simcore.machine.trace import PricedOp
from simcore.ops import op as ops
from simcore.ops.op import Floor, Op, Price, Pricer, Roofline, sum_of_parts
from simcore.scenario import parse_scenario
from simcore.sim.bursts import BurstCost, Piece
from simcore.sim.clock import Clock
from simcore.sim.contention import Demand, Rates, alone, max_min_rates
from simcore.sim.graph_pricer import End, GraphPricer
from simcore.sim.power import BUSY, MOVING, Load, PowerLimit, Shares, clock_shares
from simcore.sim.runs import Run, Setup, span_by_span
from simcore.sim.segments import Cuts, Segment, slower
from simcore.sim.simulation import Simulation
from simcore.studies import serving
from simcore.studies.common import of_whole_runs
from simcore.studies.hardware import at_end
from simcore.studies.one_device import DeviceStudy
from simcore.studies.serving.study import cases
from simcore.validate.accuracy import power
from simcore.validate.calibration import cuda_power, power_fit
from simcore.validate.calibration.power_fit import (
    Beside,
    Row,
    beginning,
    cap_times,
    fit,
    limited_power,
    read_rows,
    series_of,
    steady,
)
from simcore.validate.ladder.climb import OpTimes, climb
from simcore.validate.ladder.rungs import load_bounds
from simcore.validate.machines.here import Real
from simcore.validate.program import write_csv
from tests.programs import sends, toy_price, toy_roofline, toys
from tests.thorough import slow

MEASURED = Path(simcore.__file__).parents[1] / "validate" / "measured" / "h200_power.csv"
LIMIT = PowerLimit(arithmetic=1.6, others=0.75, idle=0.1, over_s=0.04)
shares = st.floats(0.0, 1.0)


@dataclass
class Launch:
    """A launch of so many seconds alone, with its shares of arithmetic, of what else the clock decides, and
    of waiting."""

    seconds: float
    arithmetic: float
    others: float = 0.0
    waiting: float = 0.0
    total_s: float = 0.0

    def run(self, load: Load, start_s: float, *, adds: bool = True) -> float:
        """Runs it; returns its end."""
        arithmetic_s = self.arithmetic * self.seconds
        clocked_s, waiting_s = arithmetic_s + self.others * self.seconds, self.waiting * self.seconds
        (factor,) = load.factors([(arithmetic_s, clocked_s, waiting_s, self.seconds)], start_s)
        self.total_s = self.seconds + (factor - 1.0) * clocked_s
        if adds:
            others_s = self.total_s - factor * (arithmetic_s + waiting_s)
            load.add(factor * arithmetic_s, others_s, start_s, start_s + self.total_s)
        return start_s + self.total_s


# -- the law -------------------------------------------------------------------------------------------------


@slow
@given(shares, shares, st.floats(0.5, 3.0), st.floats(0.0, 0.95), st.floats(0.0, 0.5))
def test_at_the_clock_that_the_law_says_power_is_at_its_limit(
    arithmetic: float, others: float, a: float, b: float, idle: float
) -> None:
    others = min(others, 1.0 - arithmetic)
    factor = PowerLimit(a, b, idle, 1.0).factor(arithmetic, others)
    taken = arithmetic * a / factor**3 + others * b + (1.0 - arithmetic - others) * idle
    assert taken <= 1.0 + 1e-9
    assert factor == 1.0 or taken == pytest.approx(1.0, abs=1e-9)


@slow
@given(shares, shares, shares)
def test_more_arithmetic_is_no_faster(one: float, two: float, others: float) -> None:
    less, more = sorted((one, two))
    at_most = 1.0 - more
    factors = [LIMIT.factor(share, min(others, at_most)) for share in (less, more)]
    assert factors[0] <= factors[1] + 1e-12


@pytest.mark.parametrize("share", [0.1, 0.35, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("beside", ["memory", "rest"])
def test_short_launches_in_turn_come_to_the_clock_of_their_mean(share: float, beside: str) -> None:
    """A period is a fortieth of `over_s`, so shares hardly move in it."""
    load, now_s, period_s = Load(LIMIT), 0.0, LIMIT.over_s / 40
    for _ in range(800):
        product, other_s = Launch(share * period_s, 1.0), (1.0 - share) * period_s
        now_s = product.run(load, now_s)
        if beside == "memory":
            Launch(other_s, 0.0).run(load, now_s)
        now_s += other_s
    factor = product.total_s / (share * period_s)
    taken = product.total_s / (product.total_s + other_s)
    expected = LIMIT.factor(taken, 1.0 - taken if beside == "memory" else 0.0)
    assert factor == pytest.approx(expected, rel=0.005)


@slow
@given(st.floats(1e-4, 0.5), shares, shares, shares, shares, st.floats(0.0, 0.2))
def test_a_launch_counts_the_mean_of_its_time(
    seconds: float, own: float, waits: float, a0: float, b0: float, gap_s: float
) -> None:
    """Shares by small steps of time, from what was before."""
    b0 = min(b0, 1.0 - a0)
    waits = min(waits, 1.0 - own)
    other = 1.0 - own - waits
    load, before_s = Load(LIMIT), 0.3
    # Launches that leave these shares at 0.3 s: each adds its own over the whole past.
    worth = 1.0 - math.exp(-before_s / LIMIT.over_s)
    share = a0 / (a0 + b0) if a0 + b0 else 0.0
    load.add(before_s * share, before_s * (1.0 - share), 0.0, before_s)
    a, b = (a0 / (a0 + b0) if a0 + b0 else 0.0) * worth, (b0 / (a0 + b0) if a0 + b0 else 1.0) * worth
    steps = 4000
    rest = math.exp(-gap_s / LIMIT.over_s)
    a, b = a * rest, b * rest
    means = [0.0, 0.0]
    fades = math.exp(-seconds / steps / LIMIT.over_s)
    half = math.exp(-seconds / steps / LIMIT.over_s / 2)
    for _ in range(steps):
        means[0] += (own + (a - own) * half) / steps
        means[1] += (other + (b - other) * half) / steps
        a, b = own + (a - own) * fades, other + (b - other) * fades
    (factor,) = load.factors([(own * seconds, own * seconds, waits * seconds, seconds)], before_s + gap_s)
    assert factor == pytest.approx(LIMIT.factor(*means), rel=1e-4)


def test_a_card_that_rests_is_as_fast_as_ever() -> None:
    load = Load(LIMIT)
    end_s = Launch(1.0, 1.0).run(load, 0.0)
    assert load.factors([(1e-3, 1e-3, 0.0, 1e-3)], end_s)[0] > 1.15
    assert load.factors([(1e-3, 1e-3, 0.0, 1e-3)], end_s + 30 * LIMIT.over_s) == [1.0]


@given(shares, shares, st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_no_cap_makes_anything_faster(
    arithmetic: float, others: float, of_arithmetic: float, of_others: float, idle: float
) -> None:
    """Caps below what other ops take, too."""
    assert PowerLimit(of_arithmetic, of_others, idle, 0.04).factor(arithmetic, others) >= 1.0


def test_what_has_no_arithmetic_is_slow_until_the_card_is_cool() -> None:
    """However short its replays, in one burst or in many."""
    arithmetic = Launch(0.5, 1.0)
    ends = []
    for parts in ([4000], [200] * 20):
        load = Load(LIMIT)
        now_s = arithmetic.run(load, 0.0)
        for count in parts:
            factors = load.factors([(0.0, 2e-5, 0.0, 1e-4)] * count, now_s)
            took_s = [1e-4 + 2e-5 * (factor - 1.0) for factor in factors]
            end_s = now_s + sum(took_s) + (count - len(took_s)) * took_s[-1]
            load.add(0.0, end_s - now_s, now_s, end_s)
            now_s = end_s
        ends.append(now_s - arithmetic.total_s)
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert ends[0] > 0.4 * (1.0 + 0.2 * 0.01)


@slow
@given(shares, shares, st.floats(0.0, 0.3), st.floats(1e-4, 0.5), shares)
def test_what_has_no_arithmetic_keeps_its_time_on_a_cool_card(
    share: float, others: float, gap_s: float, seconds: float, other: float
) -> None:
    load = Load(PowerLimit(arithmetic=1.6, others=others, idle=0.1, over_s=0.04))
    at_s = Launch(0.3, share).run(load, 0.0) + gap_s
    if load.is_cool(at_s):
        assert load.factors([(0.0, other * seconds, 0.0, seconds)] * 20, at_s)[0] == 1.0
    if share * math.exp(-gap_s / LIMIT.over_s) * (1.0 - math.exp(-0.3 / LIMIT.over_s)) * 1.6 > 1.0:
        assert not load.is_cool(at_s)


def test_launches_beside_each_other_count_together() -> None:
    """Two that take their turns on the device for a second leave what one of both would."""
    one, two = Load(LIMIT), Load(LIMIT)
    one.add(0.7, 0.2, 0.0, 1.0)
    two.add(0.35, 0.1, 0.0, 1.0)
    two.add(0.35, 0.1, 0.0, 1.0)
    factors = [load.factors([(1e-3, 1e-3, 0.0, 1e-3)], 1.0)[0] for load in (one, two)]
    assert factors[0] == pytest.approx(factors[1], rel=1e-9)
    assert factors[0] > 1.05
    # While both run, and once both have ended.
    running = [(0.0, 0.35, 0.1)] * 2
    assert Load(LIMIT).factors([(1e-3, 1e-3, 0.0, 1e-3)], 1.0, running) == pytest.approx(factors[:1])


@slow
def test_what_waits_takes_the_power_of_an_idle_card() -> None:
    """Arithmetic after a second of work that waits half its time, and after one of half as much work."""
    waits, rests = Load(LIMIT), Load(LIMIT)
    Launch(1.0, 0.0, waiting=0.5).run(waits, 0.0)
    step_s = LIMIT.over_s / 1000
    for i in range(round(1.0 / step_s)):
        Launch(0.5 * step_s, 0.0).run(rests, (i + 0.5) * step_s)
    busy = Load(LIMIT)
    Launch(1.0, 0.0).run(busy, 0.0)
    product = [(0.1, 0.1, 0.0, 0.1)]
    factors = [load.factors(product, 1.0)[0] for load in (waits, rests, busy)]
    assert factors[0] == pytest.approx(factors[1], rel=1e-3)
    assert 1.0 < factors[0] < factors[2] - 0.02


def test_a_burst_takes_as_long_as_its_replays_one_by_one() -> None:
    """Whatever its planned length: what was planned and never ran does not slow down what ran."""
    load, now_s, ends = Load(LIMIT), 0.0, []
    for _ in range(9):
        now_s = Launch(0.02, 0.6, 0.1, 0.05).run(load, now_s)
        ends.append(now_s)
    for planned in (9, 500):
        growing = (1e-12, 0.0, 0.0, 0.0)
        piece = Piece(0, planned, 0.0, (0.02, 0.01, 0.0, 0.0), growing)
        work = BurstCost([piece], arithmetic_s=0.012, clocked_s=0.014, waiting_s=0.001)
        work.slow(Load(LIMIT).factors([(0.012, 0.014, 0.001, 0.02)] * planned, 0.0))
        assert [work.end_s(i) for i in range(9)] == pytest.approx(ends, rel=1e-9)
        assert [work.replay_at(end - 1e-6) for end in ends] == [*range(9)]
        work.truncate(9)
        assert work.total_s == pytest.approx(ends[-1], rel=1e-9)
        assert work.longer_s == pytest.approx(ends[-1] - 9 * 0.02, rel=1e-6)
        assert work.arithmetic_under_load_s == pytest.approx(9 * 0.012 + 12 / 14 * work.longer_s)
        assert work.others_under_load_s == pytest.approx(
            work.total_s - 13 / 12 * work.arithmetic_under_load_s
        )
        assert work.floor_s() == pytest.approx(0.09)


def test_slower_replays_ask_for_as_much_arithmetic_and_move_as_many_bytes() -> None:
    piece = Piece(0, 5, 0.0, (1.0, 0.5, 0.25, 0.75), (0.0, 0.0, 0.0, 0.0))
    work = BurstCost([piece], arithmetic_s=0.2, clocked_s=0.5)
    before = work.demand(0)
    work.slow([1.0, 1.1, 1.2])
    assert [work.demand(i).compute for i in range(5)] == pytest.approx([before.compute] * 5, abs=2e-3)
    took_s = [1.0, 1.05, 1.1, 1.1, 1.1]
    assert [work.demand(i).memory for i in range(5)] == pytest.approx([0.25 / s for s in took_s], abs=2e-3)
    assert [work.end_s(i) for i in range(5)] == pytest.approx([1.0, 2.05, 3.15, 4.25, 5.35])


# -- in the simulator ----------------------------------------------------------------------------------------


def simulated(
    program: Callable[[Machine], Program],
    limit: PowerLimit | None,
    *,
    rows: bool = True,
    rates: Rates = alone,
) -> Any:
    simulation = Simulation(
        toy_price, roofline=toy_roofline, rates=rates, rows=rows, overheads=Overheads(1e-3, wait_s=5e-4),
        power=limit,
    )  # fmt: skip
    return simulation.run(program)


def in_turn(m: Machine) -> Program:
    for i in range(40):
        yield m.wait(m.launch(toys(f"a{i % 3}", 3, 1, compute=80)))
        yield m.wait(m.launch(toys(f"b{i % 2}", 2, memory=90), repeat=2))


@slow
def test_launches_take_as_long_as_the_law_says() -> None:
    found, plain = (simulated(in_turn, limit).rows.table() for limit in (LIMIT, None))
    load = Load(LIMIT)
    for i, (start_s, end_s) in enumerate(zip(found["start_s"], found["end_s"], strict=True)):
        now_s = start_s
        # Of the second kind, twice 0.02 s, traffic takes 90 %.
        for launch in [Launch(0.04, 1.0)] if i % 2 == 0 else [Launch(0.02, 0.0, 0.1)] * 2:
            now_s = launch.run(load, now_s)
        assert now_s == pytest.approx(end_s, rel=1e-9)
    longer = (found["end_s"] - found["start_s"]) / (plain["end_s"] - plain["start_s"])
    assert longer[60] > 1.03
    assert 1.0 + 0.01 * (longer[60] - 1.0) < longer[61] < 1.0 + 0.1 * (longer[60] - 1.0)


@pytest.mark.parametrize("rows", [True, False])
def test_laws_hold_under_load(rows: bool) -> None:
    assert laws.violations(simulated(in_turn, LIMIT, rows=rows)) == {}


@pytest.mark.parametrize("rates", [alone, max_min_rates], ids=["alone", "fair"])
@pytest.mark.parametrize("seed", range(6))
def test_spans_take_as_long_as_rows(seed: int, rates: Rates) -> None:
    """To 1 % where shares depend on demands, which rows tell apart in steps of a 512th."""
    rows = simulated(on_streams(seed), LIMIT, rates=rates).rows.table()
    trace = simulated(on_streams(seed), LIMIT, rows=False, rates=rates)
    assert laws.violations(trace) == {}
    ends: dict[int, float] = {}
    for span in trace.spans:
        ends[span.launch] = max(ends.get(span.launch, 0.0), span.end_s)
        if span.ops:
            assert span.progress[-1][1] == pytest.approx(sum(each.price.seconds for each in span.ops))
    expected = [ends[launch] for launch in rows["launch"].astype(int).tolist()]
    within = 1e-9 if rates is alone else 1e-2
    assert rows["end_s"].tolist() == pytest.approx(expected, rel=within)


@pytest.mark.parametrize("seed", range(6))
def test_sources_of_prices_add_up_under_load(seed: int) -> None:
    rows = simulated(on_streams(seed), LIMIT).rows
    assert sum(rows.sources.values()) == pytest.approx(rows.table()["work_s"].sum(), rel=1e-9)


def test_launches_issued_ahead_begin_at_the_clock_of_their_beginning() -> None:
    """A host that runs ahead of the device: what ends before a launch begins counts."""

    def program(m: Machine) -> Program:
        tickets = [m.launch(toys(f"a{i}", 9, compute=80), stream=f"s{i}") for i in range(6)]
        yield m.wait(*tickets)

    ends = []
    for rows in (True, False):
        simulation = Simulation(
            toy_price, roofline=toy_roofline, rates=alone, rows=rows, overheads=Overheads(0.1), power=LIMIT
        )
        trace = simulation.run(program)
        ends.append(trace.rows.table()["end_s"].tolist() if rows else [span.end_s for span in trace.spans])
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
    assert ends[0][1] - 0.2 > 0.095


@pytest.mark.parametrize("rows", [True, False])
def test_what_is_interrupted_before_it_begins_runs_once(rows: bool) -> None:
    def program(m: Machine) -> Program:
        long = m.launch(toys("b", 90, memory=80), stream="side")
        burst = m.launch(toys("a", 2, compute=80), repeat=9, until="stops")
        yield m.wait(long, burst)
        assert burst.ran == 1

    simulation = Simulation(
        toy_price, roofline=toy_roofline, rates=alone, rows=rows, overheads=Overheads(0.1), power=LIMIT
    )
    simulation.feed(0, "stops", [(0.15, 0)])
    simulation.run(program)


def test_streams_that_end_at_one_instant_go_on_alike() -> None:
    def program(m: Machine) -> Program:
        for _ in range(8):
            pair = [m.launch(toys("a", 3, compute=80), stream=name) for name in ("left", "right")]
            yield m.wait(*pair)

    simulation = Simulation(
        toy_price, roofline=toy_roofline, rates=alone, rows=True, overheads=Overheads(), power=LIMIT
    )
    ends = simulation.run(program).rows.table()["end_s"]
    assert ends[::2] == pytest.approx(ends[1::2], rel=1e-9)


def test_what_memory_bounds_takes_as_long_as_ever() -> None:
    def program(m: Machine) -> Program:
        for _ in range(30):
            yield m.wait(m.launch(toys("b", 5, memory=90, compute=80)))

    both = [simulated(program, limit).rows.numbers.tobytes() for limit in (LIMIT, None)]
    assert both[0] == both[1]


def on_streams(seed: int) -> Callable[[Machine], Program]:
    """Launches on three streams, some in line, some at once."""

    def program(m: Machine) -> Program:
        random = Random(seed)
        tickets = []
        for i in range(60):
            graph = toys(f"g{i % 7}", 1 + i % 7, compute=80 if i % 7 < 4 else 0, memory=70)
            stream = random.choice(["main", "side", "third"])
            tickets.append(m.launch(graph, stream=stream, repeat=random.choice([1, 1, 3])))
            if random.random() < 0.6:
                yield m.wait(*tickets[-2:])
        yield m.wait(*tickets)

    return program


def over_another(m: Machine) -> Program:
    long = m.launch(toys("m", 9, memory=90), stream="side", repeat=5)
    yield m.wait(m.launch(toys("p", 5, compute=80)))
    yield m.wait(m.launch(toys("q", 12, compute=80)))
    yield m.wait(long)


def test_what_runs_beside_a_launch_counts_as_far_as_it_has_come() -> None:
    found = simulated(over_another, LIMIT).rows.table()
    order = found["launch"].argsort()
    begun = found["start_s"][order].tolist()
    took_s = (found["end_s"] - found["start_s"])[order].tolist()
    assert begun[0] + took_s[0] > begun[2] + took_s[2]
    load, factors = Load(LIMIT), []
    for i, seconds in ((1, 0.05), (2, 0.12)):
        # All of the first so far is traffic.
        running = [(begun[0], 0.0, begun[i] - begun[0])]
        factors += load.factors([(seconds, seconds, 0.0, seconds)], begun[i], running)
        assert took_s[i] == pytest.approx(factors[-1] * seconds, rel=1e-9)
        load.add(took_s[i], 0.0, begun[i], begun[i] + took_s[i])
    assert factors[1] > 1.1


@slow
def test_spans_of_a_service_take_as_long_as_rows() -> None:
    """Attention over a cache grows from replay to replay, which toys do not."""
    document = {
        "name": "load", "study": "serving", "device": "h200-sxm", "model": "llama-3.1-8b", "dtype": "bf16",
        "workload": {
            "requests": 12,
            "arrivals": {"kind": "poisson", "rate_per_s": 30.0},
            "prompt_tokens": {"kind": "constant", "value": 700},
            "output_tokens": {"kind": "constant", "value": 40},
        },
        "strategies": [{"kind": "continuous_batching"}],
    }  # fmt: skip
    study = assemble(parse_scenario(document, "here"), "here").study
    assert isinstance(study, DeviceStudy)
    rows = study.bench
    assert isinstance(rows, serving.Bench)
    spans = replace(rows, hardware=replace(rows.hardware, start=span_by_span))
    cool = replace(rows, hardware=replace(rows.hardware, power=None), prices={}, groups={})
    (case,) = cases(rows)
    ends = [bench.run(case, 0).served.finish_s for bench in (rows, spans, cool)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    assert ends[0].sum() > 1.003 * ends[2].sum()


@pytest.mark.parametrize("seed", range(6))
def test_rows_under_load_are_the_same_event_by_event(seed: int) -> None:
    quick = simulated(on_streams(seed), LIMIT).rows.numbers
    assert quick != simulated(on_streams(seed), None).rows.numbers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "try_advance", lambda *_: False)
        assert simulated(on_streams(seed), LIMIT).rows.numbers == quick


def test_only_what_comes_after_arithmetic_leaves_later() -> None:
    def priced(name: str, compute: int) -> PricedOp:
        op = toys(name, 100, compute=compute).ops[0]
        return PricedOp(op, toy_price(op), 0.0)

    memory, product = priced("m", 0), priced("p", 90)
    put = sends("s", 1, signal="go").publishes[0]
    whole = Segment(
        (memory, product, memory), 3.0, Demand(0.5, 0.5), False, ((1.0, put), (1.5, put), (2.5, put)), 1.0,
        1.0, {id(product): 1.0},
    )  # fmt: skip
    found = slower(whole, 1.2)
    assert [each.price.seconds for each in found.ops] == pytest.approx([1.0, 1.2, 1.0])
    assert (found.seconds, found.arithmetic_s, found.clocked_s) == pytest.approx((3.2, 1.2, 1.2))
    assert [at_s for at_s, _ in found.publications] == pytest.approx([1.0, 1.6, 2.7])
    assert (found.demand.memory, found.demand.compute) == pytest.approx((0.5 * 3.0 / 3.2, 0.5))
    # Slowed down in two steps, and an op of which half is arithmetic.
    half = replace(whole, clocked={id(product): 0.5}, arithmetic_s=0.5, clocked_s=0.5, waiting_s=0.25)
    twice = slower(slower(half, 1.2), 1.5)
    assert twice.waiting_s == pytest.approx(0.25 * 1.2 * 1.5)
    assert twice.ops[1].price.seconds == pytest.approx(0.5 + 0.5 * 1.2 * 1.5)
    assert twice.arithmetic_s == pytest.approx(0.5 * 1.2 * 1.5)


def parts_by(price: Pricer, floor: Roofline) -> Callable[[Op], tuple[float, Floor]]:
    return lambda part: (price(part).seconds, floor(part).of(price(part)))


def test_the_arithmetic_of_a_fused_op_is_that_of_its_parts() -> None:
    memory, product = (toys(name, 100, compute=share).ops[0] for name, share in (("m", 0), ("p", 90)))
    one = Op("fused", "fused", product.shape, product.dtype, sum_of_parts, "", (memory, product, product))
    bound, idle = Floor(1.0, 0.0, 0.0), Floor(0.0, 1.0, 0.0)

    def price(op: Op) -> Price:
        return replace(toy_price(op), seconds={"m": 3.0, "p": 1.0}[op.name[0]])

    of_part = parts_by(price, toy_roofline)
    # Whatever bounds the whole.
    traffic_s = toy_roofline(memory).of(price(memory)).memory_s
    for floor in (bound, idle):
        waiting_s = max(0.0, 3.0 - traffic_s / MOVING)
        found = clock_shares(one, 5.0, floor, of_part)
        assert found == pytest.approx((0.4, 1.0 - traffic_s / 5.0, waiting_s / 5.0))
    # What crosses a link is one whole, and waits by no clock.
    across = clock_shares(replace(one, axis="tensor"), 5.0, bound, of_part)
    assert across == pytest.approx((1.0 / 5.0 / BUSY["bf16"], 1.0, 0.0))
    assert clock_shares(replace(memory, axis="tensor"), 3.0, idle, of_part) == (0.0, 0.0, 0.0)
    assert clock_shares(product, 1.0, bound, of_part) == (1.0, 1.0, 0.0)
    least = Floor(0.0, 2.4, 0.0)
    assert clock_shares(memory, 3.0, least, of_part) == pytest.approx((0.0, 0.2, 1.0 - 0.8 / MOVING))
    assert clock_shares(memory, 2.4 / MOVING, least, of_part) == pytest.approx((0.0, 1.0 - MOVING, 0.0))


def test_what_multiplies_less_in_its_time_counts_less() -> None:
    """Products that arithmetic bounds, at BUSY of peak, at half of that and beyond: the clock decides all."""
    (product,) = toys("p", 100, compute=90).ops

    def shares(seconds: float) -> Shares:
        return clock_shares(product, seconds, Floor(1.0, 0.5, 0.0), lambda part: (0.0, Floor(0.0, 0.0, 0.0)))

    assert shares(1.0 / BUSY["bf16"]) == pytest.approx((1.0, 1.0, 0.0))
    assert shares(2.0 / BUSY["bf16"]) == pytest.approx((0.5, 1.0, 0.0))
    assert shares(1.0) == (1.0, 1.0, 0.0)


def test_busy_and_moving_are_shares_of_peak_of_the_products_of_the_law() -> None:
    """Those of `cuda_power` at the prices of the card whose profile has the law."""
    spec = load_device("h200-sxm")
    price, floor = pricer(spec, profile=load_profile("h200-sxm", "local")), roofline(spec)
    op = cuda_power.PRODUCT
    assert floor(op).compute_s / price(op).seconds == pytest.approx(BUSY[op.dtype], rel=0.005)
    few = ops.matmul("gate_up", m=cuda_power.FEW_ROWS, n=cuda_power.WIDE, k=cuda_power.DEEP, dtype="bf16")
    assert floor(few).memory_s / price(few).seconds == pytest.approx(MOVING, rel=0.005)


def prompts(model: str, length: int) -> Any:
    document = {
        "name": "prompts", "study": "prompt", "device": "h200-sxm", "model": model, "dtype": "bf16",
        "methods": ["lightning"], "length": [length],
    }  # fmt: skip
    study = assemble(parse_scenario(document, "here"), "here").study
    assert isinstance(study, DeviceStudy)
    return study.bench


def shares_of(bench: Any) -> Shares:
    (case,), price, floor = bench.cases(), bench.device.price, bench.device.roofline
    op = bench.op(case)
    seconds = price(op).seconds
    return clock_shares(op, seconds, floor(op).of(price(op)), parts_by(price, floor))


@slow
def test_the_share_of_arithmetic_does_not_jump_with_the_length() -> None:
    """Where the whole prompt turns from bound by memory to bound by arithmetic."""
    shares = [shares_of(prompts("toy-retnet-1.3b", length))[0] for length in range(256, 449, 32)]
    assert min(shares) > 0.3
    assert max(abs(a - b) for a, b in pairwise(shares)) < 0.15


@pytest.mark.parametrize("length", [512, 683, 1024, 1931])
def test_launches_on_a_card_that_heats_up_count_by_their_mean(length: int) -> None:
    """What the device did not take of a latency is the host's: the same as without a cap, some 20 us."""
    bench = prompts("hybrid-8b", length)
    (case,) = bench.cases()
    found = bench.run(case)
    assert 0.0 < found.latency_s - found.price.seconds < 1e-4
    assert found.low_s < found.latency_s < found.high_s
    assert found.price.seconds >= bench.device.price(bench.op(case)).seconds


@pytest.mark.parametrize("model", ["hybrid-8b", "toy-retnet-1.3b"])
def test_long_prompts_one_after_another_take_as_long_as_the_law_says(model: str) -> None:
    """f = factor(a, 1 - a - w) with a = f x / (1 + (f - 1) c) and w = f y / (1 + (f - 1) c), x, c and y being
    the shares of arithmetic, of what the clock decides and of waiting at rest: within 1 %, as the first of
    several launches begins at rest."""
    bench = prompts(model, 30000)
    (case,), limit = bench.cases(), bench.device.power
    rest_s, (share, clocked, waiting) = bench.device.price(bench.op(case)).seconds, shares_of(bench)
    factor = 1.0
    for _ in range(100):
        busy, waits = (factor * each / (1.0 + (factor - 1.0) * clocked) for each in (share, waiting))
        factor = limit.factor(busy, 1.0 - busy - waits)
    assert (0.5 < share < clocked < 0.95, factor > 1.02) == (True, True)
    wanted_s = rest_s * (1.0 + (factor - 1.0) * clocked)
    assert bench.run(case).latency_s == pytest.approx(wanted_s, rel=0.01)
    assert bench.seconds(case) == pytest.approx(bench.run(case).latency_s)


@pytest.mark.parametrize(("end", "times"), [("value", 1.0), ("low", 0.5), ("high", 3.0)])
def test_arithmetic_is_of_the_prices_end(end: End, times: float) -> None:
    def price(op: Op) -> Price:
        found = toy_price(op)
        return replace(found, low_s=0.5 * found.seconds, high_s=3.0 * found.seconds)

    # Of what arithmetic bounds, as many operations at each end, and no more than all of the time.
    graph = toys("a", 2, 3, compute=40)
    work = GraphPricer(price, toy_roofline, end=end).ramp(graph, {}, None, 4)
    (segment,) = Cuts(at_end(price, end), toy_roofline).of(graph, {})
    assert work.arithmetic_s == pytest.approx(0.05 * min(times, 0.4 / BUSY["bf16"]))
    assert work.clocked_s == pytest.approx(times * 0.05)
    assert (segment.arithmetic_s, segment.clocked_s) == pytest.approx((work.arithmetic_s, work.clocked_s))
    # Of what memory bounds, all beyond the traffic of 60 %, which is as long at each end.
    graph = toys("b", 2, 3, memory=60)
    work = GraphPricer(price, toy_roofline, end=end).ramp(graph, {}, None, 4)
    (segment,) = Cuts(at_end(price, end), toy_roofline).of(graph, {})
    assert work.clocked_s == pytest.approx(max(0.0, times - 0.6) * 0.05)
    assert segment.clocked_s == pytest.approx(work.clocked_s)
    assert (work.arithmetic_s, segment.arithmetic_s) == (0.0, 0.0)


def test_attention_over_a_cache_is_traffic() -> None:
    """Its sizes grow from replay to replay: rows would have no constant."""
    paged = ops.paged_attention(
        sequences=4, kv_tokens=4000, q_heads=32, kv_heads=8, head_dim=128, dtype="bf16"
    )
    memory = Floor(1e-6, 5e-6, 0.0)
    assert clock_shares(paged, 1e-5, memory, lambda part: (0.0, memory)) == (0.0, 0.0, 0.0)
    product = ops.matmul("qkv", m=4, n=4096, k=4096, dtype="bf16")
    found = clock_shares(product, 1e-5, memory, lambda part: (0.0, memory))
    assert found == pytest.approx((0.0, 0.5, 1.0 - 0.5 / MOVING))
    # Linear attention multiplies while it moves little.
    chunks = Op("linear_attention_decode", "attention", product.shape, "bf16", sum_of_parts)
    assert clock_shares(chunks, 1e-5, memory, lambda part: (0.0, memory)) == (0.0, 0.5, 0.0)


def test_of_formats_that_keep_their_time_what_is_beyond_the_floor_slows_down() -> None:
    """On both sides of where arithmetic begins to bound."""
    product = ops.matmul("qkv", m=200, n=4096, k=4096, dtype="fp32")
    for floor in (Floor(5e-6, 4.999e-6, 0.0), Floor(4.999e-6, 5e-6, 0.0)):
        found = clock_shares(product, 1e-5, floor, lambda part, floor=floor: (0.0, floor))
        assert found == pytest.approx((0.0, 0.5, 1.0 - 0.5 / MOVING))


@pytest.mark.parametrize("rows", [True, False])
def test_what_is_stopped_under_load_has_taken_as_long_as_what_ran(rows: bool) -> None:
    def stopped(planned: int) -> float:
        def program(m: Machine) -> Program:
            ticket = m.launch(toys("a", 2, compute=80), repeat=planned, until="stops")
            yield m.wait(ticket)
            ran.append((ticket.ran, m.now()))

        ran: list[tuple[int, float]] = []
        simulation = Simulation(
            toy_price, roofline=toy_roofline, rates=alone, rows=rows, overheads=Overheads(), power=LIMIT
        )
        simulation.feed(0, "stops", [(0.09, 0)])
        simulation.run(program)
        assert ran[0][0] == 5
        return ran[0][1]

    assert stopped(500) == pytest.approx(stopped(5), rel=1e-9)


# -- in services ---------------------------------------------------------------------------------------------


def a_scenario(rate_per_s: float, requests: int = 60, **changes: Any) -> dict[str, Any]:
    return {
        "name": "load", "study": "serving", "device": "h200-sxm", "model": "llama-3.1-8b", "dtype": "bf16",
        "workload": {
            "requests": requests,
            "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
            "prompt_tokens": {"kind": "constant", "value": 1000},
            "output_tokens": {"kind": "constant", "value": 16},
        },
        "strategies": [{"kind": "continuous_batching"}],
        **changes,
    }  # fmt: skip


def limit_of(document: dict[str, Any]) -> PowerLimit | None:
    study = assemble(parse_scenario(document, "here"), "here").study
    assert isinstance(study, DeviceStudy)
    found: PowerLimit | None = study.bench.hardware.power
    return found


def test_the_limit_is_of_the_card_that_was_measured() -> None:
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    assert profile.power is not None
    limit = limit_of(a_scenario(1.0))
    assert limit == PowerLimit(
        profile.power.arithmetic, profile.power.others, profile.power.idle, profile.power.over_s
    )
    changed = {"base": "h200-sxm", "change": {"hbm_bytes_per_s": 6e12}}
    assert limit_of(a_scenario(1.0, device=changed)) == limit
    capped = {"base": "h200-sxm", "change": {"board_power_w": {"times": 0.5}}}
    half = limit_of(a_scenario(1.0, device=capped))
    assert limit is not None
    assert half == PowerLimit(2 * limit.arithmetic, 2 * limit.others, 2 * limit.idle, limit.over_s)
    # A card of as many watts, to which prices are carried, has the same cap; of others, and of a datasheet,
    # nothing is known.
    assert limit_of(a_scenario(1.0, device="h100-sxm")) == limit
    less = {"base": "h100-sxm", "change": {"board_power_w": {"times": 0.5}}}
    assert limit_of(a_scenario(1.0, device=less)) == half
    assert limit_of(a_scenario(1.0, device="b200-sxm")) is None
    assert limit_of(a_scenario(1.0, profile="none")) is None


@pytest.mark.parametrize(("watts", "says"), [(650.0, ""), (300.0, "they would slow down too")])
def test_a_cap_below_what_memory_takes_is_warned_of(watts: float, says: str) -> None:
    device = {"base": "h200-sxm", "change": {"board_power_w": watts}}
    warnings = assemble(parse_scenario(a_scenario(1.0, device=device), "here"), "here").warnings
    assert any("board_power_w" in warning for warning in warnings) == bool(says)
    assert says in "".join(warnings)


def test_a_cap_below_an_idle_card_is_refused() -> None:
    device = {"base": "h200-sxm", "change": {"board_power_w": 50.0}}
    with pytest.raises(InputError, match=r"board_power_w: 50 W is no more than an idle card takes, 97\.1 W"):
        assemble(parse_scenario(a_scenario(1.0, device=device), "here"), "here")


@slow
def test_provenances_say_which_cap_was_taken() -> None:
    found = simcore.run(a_scenario(2.0)).provenance["power_cap"]
    assert found["measured_on"] == "h200-sxm"
    assert found["formats"] == ["bf16", "fp16", "fp8", "int8"]
    assert found["arithmetic"] > 1.0
    carried = simcore.run(a_scenario(2.0, device="h100-sxm"))
    assert carried.provenance["power_cap"] == found
    assert not any("throttles" in text for text in carried.warnings)
    other = simcore.run(a_scenario(2.0, device="b200-sxm"))
    assert other.provenance["power_cap"] is None
    assert any("near saturation it is predicted too fast beside h200-sxm" in text for text in other.warnings)
    plain = simcore.run(a_scenario(2.0, profile="none"))
    assert plain.provenance["power_cap"] is None
    assert not any("throttles" in text for text in plain.warnings)


def test_an_idle_card_takes_no_more_than_a_busy_one() -> None:
    with pytest.raises(ValueError, match=r"idle: is 0\.9; no more than others, 0\.7"):
        LimitedPower(1.5, 0.7, 0.9, 0.05, 20, 0.5, "a card", "2026-11-29")


def duration_s(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, limited: bool) -> float:
    with monkeypatch.context() as patch:
        if not limited:
            patch.setattr("simcore.assembly._power_limit", lambda *_: None)
        frame = simcore.run(document).frame()
    return float(frame[frame["metric"] == "duration_s"]["value"].iloc[0])


@slow
def test_a_service_full_of_prompts_is_slower_and_one_at_rest_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    full, rests = a_scenario(1000.0, 30), a_scenario(2.0, 10)
    loaded = duration_s(full, monkeypatch, True) / duration_s(full, monkeypatch, False)
    assert 1.05 < loaded < 1.2
    assert duration_s(rests, monkeypatch, True) == duration_s(rests, monkeypatch, False)
    full["dtype"] = "fp8"
    in_fp8 = duration_s(full, monkeypatch, True) / duration_s(full, monkeypatch, False)
    assert 1.05 < in_fp8 < 1.2
    # As what it is multiplied as; int8 has price and rate of fp8.
    for dtype, least, most in (("int8", in_fp8, in_fp8), ("fp8_b128", 1.02, in_fp8), ("w4a16", 1.05, 1.2)):
        full["dtype"] = dtype
        slower = duration_s(full, monkeypatch, True) / duration_s(full, monkeypatch, False)
        assert least - 1e-6 <= slower <= most + 1e-6, dtype


# -- fits and files ------------------------------------------------------------------------------------------


def rows_of(limit: PowerLimit, error: float = 0.0) -> list[Row]:
    """Rows as a card with this limit would give them, with random errors."""
    random, rows = Random(3), []
    cases: list[tuple[float, float, Beside]] = [
        *((share / 10, 0.04, "memory") for share in range(1, 10)),
        *((share, 0.04, "rest") for share in (0.9, 0.8, 0.7, 0.4)),
        (0.7, 0.16, "memory"),
    ]
    for share, period_s, beside in cases:
        row = Row("steady", "bf16", beside, period_s, share, 0.0, 0, 1.0, 20)
        for _ in range(30):
            row = replace(row, times=steady(limit, row))
        rows.append(replace(row, times=row.times * math.exp(random.gauss(0.0, error))))
    afters: tuple[Beside, ...] = ("rest", "memory")
    for series, beside in enumerate(afters, 1):
        begun = [Row("begins", "bf16", beside, 1.2e-3, 1.0, 0.0, series, 1.0, 2)] * 120
        now_s = 0.0
        for row, times in zip(begun, beginning(limit, begun), strict=True):
            rows.append(replace(row, at_s=now_s, times=times * math.exp(random.gauss(0.0, error))))
            now_s += row.period_s * times
    return rows


@slow
@pytest.mark.parametrize("limit", [LIMIT, PowerLimit(1.4, 0.6, 0.2, 0.06), PowerLimit(2.0, 0.5, 0.05, 0.02)])
def test_a_fit_finds_the_constants_of_its_rows(limit: PowerLimit) -> None:
    found = fit(rows_of(limit))
    for name in ("arithmetic", "others", "idle", "over_s"):
        assert getattr(found, name) == pytest.approx(getattr(limit, name), rel=0.03, abs=0.01), name
    noisy = limited_power(rows_of(limit, 0.005), "a card", "2026-11-29")
    assert noisy.arithmetic == pytest.approx(limit.arithmetic, rel=0.05)
    assert noisy.error_pct < 1.0


@pytest.mark.parametrize("times", [0.97, *(pytest.param(times, marks=slow) for times in (0.9, 1.0, 1.15))])
def test_the_cap_of_a_card_is_found_beside_that_of_another(times: float) -> None:
    rows = rows_of(LIMIT.lower(times))
    assert cap_times(LIMIT, rows) == pytest.approx(times, rel=1e-3)
    assert cap_times(LIMIT, rows_of(LIMIT.lower(times), 0.005)) == pytest.approx(times, rel=0.02)
    # Of fp8 no row counts: its times are not in those of the profile.
    fp8 = [replace(row, dtype="fp8", times=2.0) for row in rows]
    assert cap_times(LIMIT, [*rows, *fp8]) == pytest.approx(times, rel=1e-3)


class Swinging:
    """A card whose products take 1.1 times their time for 0.7 s, then 1.4 times for 0.3 s, and so on."""

    alone_s = {"bf16": 6e-4, "memory": 6e-5}  # noqa: RUF012

    def __init__(self) -> None:
        self.now_s = 0.0

    def graph(self, name: str, count: int) -> SimpleNamespace:
        return SimpleNamespace(replay=partial(self._run, name, count))

    def _run(self, name: str, count: int) -> None:
        for _ in range(count):
            times = (1.1 if self.now_s % 1.0 < 0.7 else 1.4) if name == "bf16" else 1.0
            self.now_s += times * self.alone_s[name]

    def event(self) -> SimpleNamespace:
        mark = SimpleNamespace(at_s=0.0, synchronize=lambda: None)
        mark.record = lambda: setattr(mark, "at_s", self.now_s)
        mark.elapsed_time = lambda later: 1e3 * (later.at_s - mark.at_s)
        return mark


@pytest.mark.parametrize(("share", "beside"), [(1.0, "memory"), (0.5, "memory"), (0.3, "rest")])
def test_of_a_clock_that_swings_the_mean_counts(
    share: float, beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.19 of the time at rest; most products take 1.1."""
    card: Any = Swinging()

    def sleep(seconds: float) -> None:
        card.now_s += seconds

    monkeypatch.setattr(cuda_power, "event", card.event)
    monkeypatch.setattr(cuda_power.time, "sleep", sleep)
    monkeypatch.setattr(cuda_power.torch.cuda, "synchronize", lambda: None)
    row = cuda_power.steady(card, "bf16", share, 0.04, beside)
    assert row.times == pytest.approx(0.7 * 1.1 + 0.3 * 1.4, rel=0.01)
    taken_s = row.times * round(share * 0.04 / 6e-4) * 6e-4
    assert row.period_s == pytest.approx(taken_s + (1.0 - share) * 0.04, rel=0.02)
    assert row.share == pytest.approx(taken_s / row.period_s, rel=1e-6)


def test_a_card_s_cap_is_that_of_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """`validate` takes CAP_CASES for CAP_SECONDS each, and finds the cap that they are made of."""
    asked = []

    def steady(
        products: object, name: str, share: float, period_s: float, beside: Beside, *, seconds: float
    ) -> Row:
        asked.append((share, period_s, beside))
        assert (products, name, seconds) == ("the products", "bf16", cuda_power.CAP_SECONDS)
        row = Row("steady", name, beside, period_s, share, 0.0, 0, 1.0, 9)
        for _ in range(9):
            row = replace(row, times=power_fit.steady(LIMIT.lower(1.04), row))
        return row

    monkeypatch.setattr(cuda_power, "Products", lambda price, fp8: "the products")
    monkeypatch.setattr(cuda_power, "steady", steady)
    price: Any = None
    assert cuda_power.cap_times(LIMIT, price) == pytest.approx(1.04, rel=2e-3)
    assert tuple(asked) == cuda_power.CAP_CASES


class Capped(Real):
    """A machine that is simulated at the cap of the profile's card, and says that its own is half of that."""

    def cap_times(self, limit: PowerLimit, price: Pricer) -> float:
        assert limit.arithmetic > 1.0
        assert price(cuda_power.PRODUCT).seconds > 0.0
        return 2.0

    def start(self, setup: Setup) -> Run:
        run = span_by_span(setup)
        self.started.setdefault(setup.case, []).append(run.trace)
        return run


@slow
def test_a_service_is_predicted_for_the_card_that_runs_it() -> None:
    """Measured here by the profile's card; predicted as by a simulation with half the board's power."""
    given_ = {**a_scenario(30.0, 20), "name": "capped"}
    scenario = parse_scenario(given_, "here")
    found = climb(
        scenario, "here", on="cuda", repeats=1, bounds=load_bounds("h200-sxm"), progress=lambda *_: None,
        real=Capped(), ops=lambda traces, price, floor, progress: OpTimes([], price), device="h200-sxm",
    )  # fmt: skip
    half = {"base": "h200-sxm", "change": {"board_power_w": {"times": 0.5}}}
    (row,) = [row for row in found.comparison if row["metric"] == "e2e_mean_s"]
    with_half = assemble(parse_scenario({**given_, "device": half}, "here"), "here")
    rows = of_whole_runs(with_half.study.run(lambda *_: None).rows)
    (wanted,) = [each.value for each in rows if each.metric == "e2e_mean_s"]
    assert row["predicted"] == pytest.approx(wanted, rel=1e-9)
    assert row["predicted"] > 1.02 * row["reference"]


def test_rows_that_determine_nothing_are_refused() -> None:
    rows = rows_of(LIMIT)
    with pytest.raises(ValueError, match="beginnings, are needed"):
        fit([row for row in rows if row.kind == "steady"])
    with pytest.raises(ValueError, match="beside rest"):
        fit([row for row in rows if row.beside == "memory"])
    with pytest.raises(ValueError, match="no limit of power was seen"):
        fit([replace(row, times=1.0) for row in rows])


@slow
def test_the_profile_has_the_constants_of_the_recorded_rows() -> None:
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    assert profile.power is not None
    found = limited_power(read_rows(MEASURED), profile.power.processor, profile.power.date)
    for name in ("arithmetic", "others", "idle", "over_s", "error_pct"):
        assert getattr(profile.power, name) == pytest.approx(getattr(found, name), rel=1e-3), name
    assert profile.power.cases == found.cases
    assert found.error_pct < 1.0


@slow
def test_after_rest_a_card_keeps_its_clock_for_a_while() -> None:
    """What was measured, the median of three beginnings: 51 ms after rest, 18 after products of few rows; the
    law says when, to 10 ms."""
    rows = read_rows(MEASURED)
    limit = fit(rows)
    for beside in ("rest", "memory"):
        begun = [own for own in series_of(rows) if own[0].beside == beside]
        measured = [next(row.at_s for row in own[1:] if row.times > 1.08) for own in begun]
        ours = [
            next(row.at_s for row, times in zip(own, beginning(limit, own), strict=True) if times > 1.08)
            for own in begun
        ]
        assert 0.01 < min(measured) < max(measured) < 0.1
        assert median(ours) == pytest.approx(median(measured), abs=0.01)


def test_constants_of_limited_power_are_written_and_read(tmp_path: Path) -> None:
    profile = load_profile("a6000", "leetdecoding-tables")
    assert isinstance(profile, FittedProfile)
    write_fitted(profile, tmp_path)
    power_ = LimitedPower(1.5, 0.7, 0.1, 0.05, 20, 0.5, "A6000", "2026-11-29")
    write_law(power_, tmp_path)
    again = load_profile("a6000", str(tmp_path / "profile.yaml"))
    assert isinstance(again, FittedProfile)
    assert again.power == power_


# -- the program ---------------------------------------------------------------------------------------------


def judged(*words: str) -> Any:
    app = typer.Typer()
    app.command()(power.main)
    return CliRunner().invoke(app, [*words])


@slow
def test_recorded_rows_are_judged_without_a_card(tmp_path: Path) -> None:
    found = judged("--measured", str(MEASURED), "--device", "h200-sxm", "--out", str(tmp_path / "rows.csv"))
    assert found.exit_code == 0, found.output
    assert "error: median 0." in found.output
    assert read_rows(tmp_path / "rows.csv") == read_rows(MEASURED)


def test_rows_of_one_card_are_not_fitted_into_the_profile_of_another(tmp_path: Path) -> None:
    with MEASURED.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    rows[7]["device"] = "NVIDIA A100"
    write_csv(rows, tmp_path / "rows.csv")
    found = judged("--measured", str(tmp_path / "rows.csv"), "--device", "h200-sxm", "--fit")
    assert isinstance(found.exception, InputError)
    assert "row 8: device: is 'NVIDIA A100'" in str(found.exception)


@slow
def test_fitted_constants_are_written_into_a_profile(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(Path(simcore.__file__).parents[1] / "devices" / "profiles" / "h200-sxm" / "local", folder)
    given_ = ["--measured", str(MEASURED), "--device", "h200-sxm", "--profile", str(folder), "--fit"]
    write_law(LimitedPower(1.2, 0.5, 0.3, 0.1, 1, 9.0, "NVIDIA H200", "2026"), folder)
    found = judged(*given_)
    assert found.exit_code == 0, found.output
    assert str(folder) in found.output
    ours, shipped = (load_profile("h200-sxm", name) for name in (str(folder), "local"))
    assert isinstance(ours, FittedProfile)
    assert isinstance(shipped, FittedProfile)
    assert ours.power is not None
    assert shipped.power is not None
    assert ours.power.arithmetic == pytest.approx(shipped.power.arithmetic, rel=1e-3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--quick", "--measured", str(MEASURED), "--device", "h200-sxm"], "--quick: is for a card"),
        (["--device", "h200-sxm"], "--device: is for rows of --measured"),
        (["--measured", str(MEASURED), "--device", "h200-sx"], "did you mean 'h200-sxm'"),
        (["--measured", "none.csv", "--device", "h200-sxm"], "none.csv"),
    ],
)
def test_options_that_do_not_go_together_are_told(words: list[str], says: str) -> None:
    found = judged(*words)
    assert isinstance(found.exception, InputError)
    assert says in str(found.exception)


def test_a_case_that_comes_twice_is_told(tmp_path: Path) -> None:
    """Twice the same rows would be fitted with other constants."""
    rows = [asdict(row) for row in read_rows(MEASURED)]
    write_csv([*rows, rows[-1]], tmp_path / "rows.csv")
    with pytest.raises(InputError, match=f"line {len(rows) + 2}: is the case of line {len(rows) + 1} again"):
        read_rows(tmp_path / "rows.csv")


def test_rows_without_a_steady_case_are_told(tmp_path: Path) -> None:
    write_csv([asdict(row) for row in rows_of(LIMIT) if row.kind == "begins"], tmp_path / "rows.csv")
    with pytest.raises(InputError, match="has no row of kind steady"):
        read_rows(tmp_path / "rows.csv")


@slow
@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("times", "nan", "times: 'nan' is no number above 0"),
        ("share", "1.5", "share: is 1.5, more than 1"),
        ("kind", "stedy", "kind: 'stedy' .allowed: steady, begins"),
        ("beside", "", "beside: '' .allowed: memory, rest"),
        ("dtype", "foo", "dtype: 'foo' .allowed: bf16, fp16, fp8"),
        ("n", "0.5", "n: '0.5' is no whole number"),
        ("at_s", "-1", "at_s: '-1' is no number above 0"),
    ],
)
def test_a_wrong_cell_is_told(column: str, value: str, says: str, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [asdict(row) for row in rows_of(LIMIT)[:3]]
    rows[1][column] = value
    write_csv(rows, tmp_path / "rows.csv")
    with pytest.raises(InputError, match=f"line 3: {says}"):
        read_rows(tmp_path / "rows.csv")
    with (tmp_path / "rows.csv").open() as file:
        lines = [*csv.reader(file)]
    with (tmp_path / "few.csv").open("w", newline="") as file:
        csv.writer(file).writerows([line[1:] for line in lines])
    with pytest.raises(InputError, match="has no column kind"):
        read_rows(tmp_path / "few.csv")


def test_times_of_recorded_rows_are_what_they_seem() -> None:
    rows = read_rows(MEASURED)
    alone_ = [row.times for row in rows if row.beside == "rest" and row.kind == "steady" and row.share < 0.5]
    assert alone_ == pytest.approx([1.0] * len(alone_), abs=0.01)
    assert max(row.times for row in rows if row.kind == "steady") > 1.1


@slow
def test_a_decode_step_of_many_sequences_is_slower_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    document: dict[str, Any] = {
        "name": "steps", "study": "decode", "device": "h200-sxm", "model": "llama-3.1-8b", "dtype": "bf16",
        "context_tokens": [256], "batch": [1, 512], "tokens": 12, "strategies": [{"kind": "tensor_parallel"}],
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("simcore.assembly._power_limit", lambda *_: None)
        plain = simcore.run(document).frame()
    found = simcore.run(document).frame()
    both = [
        frame[frame["metric"] == "token_latency_s"].set_index("batch")["value"] for frame in (plain, found)
    ]
    assert both[1][1] == both[0][1]
    assert 1.02 < both[1][512] / both[0][512] < 1.17


def all_arithmetic(op: Op) -> Floor:
    return Floor(op["hundredths"] / 125, 0.0, 0.0) if op.kind == "toy" else toy_roofline(op)


def test_what_a_slower_segment_publishes_leaves_later() -> None:
    def program(m: Machine) -> Program:
        if m.rank:
            yield m.wait(m.launch(toys("a", 20)))
            m.launch(sends("s", 10, signal="go", early=50))
            yield m.wait()
        else:
            yield m.wait(m.signal("go", rank=1))
            assert m.now() == pytest.approx(expected_s, rel=1e-9)

    for limit in (LIMIT, None):
        load, first = Load(limit or PowerLimit(0.1, 0.1, 0.1, 1.0)), Launch(0.2, 1.0)
        begun_s = first.run(load, 0.0)
        second = Launch(0.1, 1.0)
        expected_s = begun_s + (second.run(load, begun_s) - begun_s) / 2
        simulation = Simulation(toy_price, roofline=all_arithmetic, mesh={"tensor": 2}, power=limit)
        assert laws.violations(simulation.run(program)) == {}
