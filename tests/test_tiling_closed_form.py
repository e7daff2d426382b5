"""Tilings worked out all at once against the simulated machine, launch by launch.

Prices and what the host takes are multiples of 2^-20 s, of which sums are exact: what comes out has to be
equal to the last bit, whatever order it is summed in.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.assembly import assemble
from simcore.machine.machine import LawError, Machine, Overheads, Program
from simcore.machine.trace import Trace
from simcore.models.long_convolution import LongConvolution
from simcore.ops.op import Floor, Op, Price
from simcore.scenario import parse_scenario
from simcore.schedules.eager import eager
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.schedules.generic_tiling import generic_tiling
from simcore.schedules.lazy import lazy
from simcore.schedules.relaxed_tiling import relaxed_tiling
from simcore.sim.graph_pricer import GraphPricer
from simcore.sim.simulation import Simulation
from simcore.studies.tiling import closed_form
from simcore.studies.tiling import runner as bench
from simcore.studies.tiling.closed_form import can_be_worked_out, costs, traced, worked_out
from simcore.studies.tiling.order import Asked, Order, recorded
from tests.thorough import first, slow

Schedule = Callable[[Machine, LongConvolution, list[float]], Program]
STEP_S = 2.0**-20


def parted(**options: Any) -> Schedule:
    return lambda m, model, ended: fractal_tiling(m, model, ended, **options)


def by_layer(schedule: Callable[..., Program]) -> Schedule:
    return lambda m, model, ended: schedule(m, model, ended, parallel=False)


# Each with whether it takes a prompt.
SCHEDULES: dict[str, tuple[Schedule, bool]] = {
    "lazy": (lazy, True),
    "lazy, layer by layer": (by_layer(lazy), True),
    "eager": (eager, True),
    "eager, layer by layer": (by_layer(eager), True),
    "fractal": (parted(), True),
    "fractal, layer by layer": (parted(parallel=False), True),
    "fractal, half stored": (parted(half_storage=True, sequential_from=4), True),
    "generic": (generic_tiling, False),
    "relaxed": (relaxed_tiling, False),
}


def random_price(random: Random) -> Callable[[Op], Price]:
    """A whole number of steps for each kernel and for each element of its work."""
    fixed, slope = random.choice([0, 1, 7, 60]), random.choice([0, 1, 3])

    def price(op: Op) -> Price:
        steps = fixed + slope * int(op.work.hbm_bytes) // 4 + len(op.kind)
        return Price(steps * STEP_S, steps * STEP_S, steps * STEP_S, "roofline", "")

    return price


def floor(op: Op) -> Floor:
    """Grows with the work, as prices do; arithmetic takes longer than memory."""
    steps = int(op.work.hbm_bytes) // 4
    return Floor(3 * steps * STEP_S, steps * STEP_S, 0.0)


def random_overheads(random: Random) -> Overheads:
    def seconds(most: int) -> float:
        return random.choice([0, random.randint(1, most)]) * STEP_S

    launch_s, return_s = seconds(4000), seconds(100)
    return Overheads(
        launch_s=launch_s,
        launch_kernel_s=seconds(50),
        return_s=min(return_s, launch_s),
        start_s=seconds(300),
        size_s=seconds(40),
        wait_s=seconds(200),
    )


def random_model(random: Random, prompts: bool, several: int = 1) -> LongConvolution:
    tokens = random.randint(1, 80)
    return LongConvolution(
        random.randint(1, 3),
        4,
        tokens,
        batch=random.randint(1, 2),
        prompt=random.choice([0, random.randrange(tokens)]) if prompts else 0,
        block=random.choice(["mlp", "gate"]),
        tokens_per_launch=several,
    )


def simulated(
    schedule: Schedule, model: LongConvolution, price: Callable[[Op], Price], overheads: Overheads
) -> tuple[Trace, list[float]]:
    ended: list[float] = []
    graph_pricer = GraphPricer(price, floor)
    machine = Simulation(
        price, overheads=overheads, rows=True, graph_pricer=graph_pricer, device_sizes=model.device_sizes
    )
    return machine.run(lambda m: schedule(m, model, ended)), ended


def order_of(schedule: Schedule, model: LongConvolution) -> Order:
    asked: Any = Asked(model)
    ended: list[float] = []
    return recorded(lambda m: schedule(m, asked, ended), ended, asked.read)


def at_once(
    order: Order, model: LongConvolution, price: Callable[[Op], Price], overheads: Overheads
) -> tuple[Trace, list[float]]:
    assert can_be_worked_out(order)
    graphs = order.made(model)
    cost = costs(order, graphs, GraphPricer(price, floor), overheads, model.device_sizes)
    times = worked_out(order, cost, overheads.wait_s)
    ended = np.concatenate(([0.0], times.over_s))[order.ended]
    return traced(order, graphs, cost, times), ended.tolist()


def compare(schedule: Schedule, prompts: bool, seed: int, several: int = 1) -> None:
    random = Random(seed)
    model = random_model(random, prompts, several)
    price, overheads = random_price(random), random_overheads(random)
    trace, ended = simulated(schedule, model, price, overheads)
    found, times = at_once(order_of(schedule, model), model, price, overheads)
    assert times == ended
    assert found.rows.graphs == trace.rows.graphs
    assert found.rows.streams == trace.rows.streams
    assert found.rows.sources == trace.rows.sources
    expected = trace.rows.table()
    for name, values in found.rows.table().items():
        np.testing.assert_array_equal(values, expected[name], name)


@pytest.mark.parametrize("seed", first(8, range(40)))
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_worked_out_at_once_is_what_the_machine_gives(name: str, seed: int) -> None:
    compare(*SCHEDULES[name], seed)


@pytest.mark.parametrize("several", [2, 16])
@pytest.mark.parametrize("name", ["lazy", "eager", "fractal", "fractal, half stored"])
def test_so_are_launches_of_several_positions(name: str, several: int) -> None:
    for seed in range(8):
        compare(*SCHEDULES[name], seed, several)


def test_several_positions_cost_one_launch_and_one_wait() -> None:
    """Ops take no time: what is left is what the host does, and starts."""
    launch_s, size_s, wait_s = 30 * STEP_S, 8 * STEP_S, 5 * STEP_S
    overheads = Overheads(launch_s=launch_s, size_s=size_s, wait_s=wait_s)
    model = LongConvolution(2, 4, 64, tokens_per_launch=16)
    for name, expected_s in {
        # Four launches, and three of the tiles between them, each at a position of its own.
        "fractal": (4 + 3) * (launch_s + size_s) + 4 * wait_s,
        # The first position, three launches, and 15 positions one by one, each a row and a step.
        "lazy": (1 + 3 + 15) * (launch_s + size_s + wait_s) + 15 * launch_s,
        # Three launches and 16 positions, all but the last with a column.
        "eager": (3 + 16) * (launch_s + size_s + wait_s) + 15 * launch_s,
    }.items():
        _, ended = simulated(
            SCHEDULES[name][0], model, lambda _: Price(0.0, 0.0, 0.0, "assumed", ""), overheads
        )
        assert ended[-1] == pytest.approx(expected_s, rel=1e-12), name


@slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_chains_that_are_followed_block_by_block_give_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for sweeps in (0, 1, 2):
        monkeypatch.setattr(closed_form, "MOST_SWEEPS", sweeps)
        for seed in range(8):
            compare(*SCHEDULES[name], seed)


def test_a_schedule_that_sees_other_numbers_of_its_model_has_an_order_of_its_own() -> None:
    """What a schedule asks of its model decides which models share its order; channels it never asks for."""
    schedule, _ = SCHEDULES["fractal"]
    model = LongConvolution(2, 4, 24)
    order = order_of(schedule, model)
    assert order.holds(LongConvolution(3, 8, 24, batch=2))
    assert not order.holds(LongConvolution(2, 4, 25))
    assert not order.holds(LongConvolution(2, 4, 24, prompt=1))


def test_what_is_more_than_launches_and_waits_is_left_to_the_machine() -> None:
    model = LongConvolution(1, 4, 8)

    def bursts(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        yield m.wait(m.launch(model.step(), sizes={"position": 0}, repeat=2))
        ended.append(m.now())

    def late(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        before = m.launch(model.step(), sizes={"position": 0})
        yield m.wait(m.launch(model.step(), sizes={"position": 1}))
        yield m.wait(before)
        ended.append(m.now())

    def early(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        step = m.launch(model.step(), sizes={"position": 0})
        ended.append(m.now())
        yield m.wait(step)

    def both(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        steps = [m.launch(model.step(), sizes={"position": i}) for i in range(2)]
        yield m.wait(*steps)
        ended.append(m.now())

    def nothing(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        m.launch(model.step(), sizes={"position": 0})
        yield m.wait()
        ended.append(m.now())

    for schedule in (bursts, late, early, both, nothing):
        assert not can_be_worked_out(order_of(schedule, model))


def test_a_recorder_is_the_only_rank_as_the_machine_is() -> None:
    ranks: list[tuple[int, int]] = []

    def asking(m: Machine, model: LongConvolution, ended: list[float]) -> Program:
        ranks.append((m.rank, m.world))
        yield m.wait(m.launch(model.step(), sizes={"position": 0}))
        ended.append(m.now())

    random, model = Random(0), LongConvolution(1, 4, 8)
    order_of(asking, model)
    simulated(asking, model, random_price(random), random_overheads(random))
    assert ranks[0] == ranks[1]


def written_run(
    host_s: Sequence[float],
    back_s: Sequence[float],
    work_s: Sequence[float],
    waits: Sequence[int],
    waited: Sequence[int],
) -> tuple[Order, closed_form.Costs]:
    count = len(host_s)
    host, back, work, floors = (np.array(s, np.float64) for s in (host_s, back_s, work_s, [0.0] * count))
    before, whom, noted = (np.array(numbers, np.int64) for numbers in (waits, waited, []))
    order = Order((), np.zeros(count, np.int32), (), (), before, whom, noted, {}, True)
    return order, closed_form.Costs(host, back, work, floors, {})


def random_run(random: Random) -> tuple[Order, closed_form.Costs]:
    """Blocks of a few launches, each of which ends with a wait for one of its own but the last; times are
    small whole numbers, so that many are equal."""
    numbers = 0
    waits: list[int] = []
    waited: list[int] = []
    for _ in range(random.randrange(6)):
        first, numbers = numbers, numbers + random.randint(1, 3)
        waits.append(numbers)
        waited.append(random.randrange(first, numbers))
    numbers += random.randint(0 if waits else 1, 3)
    host_s = [random.choice([0, 1, 2, 9]) for _ in range(numbers)]
    back_s = [random.randint(0, seconds) for seconds in host_s]
    work_s = [random.choice([0, 1, 3, 8]) for _ in range(numbers)]
    return written_run(host_s, back_s, work_s, waits, waited)


def launch_by_launch(order: Order, cost: closed_form.Costs, wait_s: float) -> list[list[float]]:
    """One host and one stream, in plain loops."""
    host_s = free_s = 0.0
    columns: list[list[float]] = [[], [], [], []]
    issued_s, start_s, end_s, over_s = columns
    waits = dict(zip(order.waits.tolist(), order.waited.tolist(), strict=True))
    for i in range(len(order.numbers) + 1):
        if i in waits:
            host_s = max(host_s, end_s[waits[i]]) + wait_s
            over_s.append(host_s)
        if i < len(order.numbers):
            host_s += cost.host_s[i]
            issued_s.append(host_s - cost.back_s[i])
            start_s.append(max(free_s, issued_s[-1]))
            free_s = start_s[-1] + cost.work_s[i]
            end_s.append(free_s)
    return columns


@pytest.mark.parametrize("sweeps", [0, 1, 2, closed_form.MOST_SWEEPS])
def test_any_blocks_are_worked_out_as_launch_by_launch(sweeps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_form, "MOST_SWEEPS", sweeps)
    for seed in range(200):
        random = Random(seed)
        order, cost = random_run(random)
        wait_s = float(random.randrange(3))
        found = worked_out(order, cost, wait_s)
        columns = [found.issued_s, found.start_s, found.end_s, found.over_s]
        assert [column.tolist() for column in columns] == launch_by_launch(order, cost, wait_s), seed


def test_the_last_lag_is_compared_with_its_own_not_with_that_before() -> None:
    """The first block leaves 20 s of work to the second, which leaves 20 s to the last; without a lag it
    would leave 19 s."""
    host_s, back_s = (1.0, 0.0, 1.0, 10.0, 1.0), (0.0, 0.0, 0.0, 1.0, 0.0)
    order, cost = written_run(host_s, back_s, (0.0, 20.0, 1.0, 20.0, 1.0), (2, 4), (0, 2))
    found = worked_out(order, cost, 0.0)
    assert found.start_s.tolist() == launch_by_launch(order, cost, 0.0)[1] == [1.0, 1.0, 21.0, 22.0, 42.0]


def test_a_run_is_held_to_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study ends where all that is worked out at once is a millionth later than on the machine, which no
    other law minds."""

    def late(order: Order, cost: closed_form.Costs, wait_s: float) -> closed_form.Times:
        times = worked_out(order, cost, wait_s)
        later = (part * 1.000001 for part in (times.issued_s, times.start_s, times.end_s, times.over_s))
        return closed_form.Times(*later)

    document = {
        "name": "tiny",
        "study": "tiling",
        "device": "a100-sxm-80gb",
        "profile": "none",
        "model": {"kind": "long_convolution", "layers": 2, "channels": 64},
        "tokens": 64,
        "strategies": [{"kind": "fractal"}],
    }
    parts = assemble(parse_scenario(document, "tiny"), "tiny")
    parts.study.run(lambda *_: None)
    monkeypatch.setattr(bench, "worked_out", late)
    with pytest.raises(LawError, match="at once"):
        parts.study.run(lambda *_: None)
