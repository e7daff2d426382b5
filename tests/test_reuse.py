"""Which ops find their operands in the cache: by hand, and in runs of the simulated machine."""

from typing import Any

import pytest

from simcore.devices.making import Point
from simcore.devices.price import roofline
from simcore.devices.spec import load_device
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.long_convolution import LongConvolution
from simcore.ops import op as ops
from simcore.ops.op import Graph, Op, Price
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.sim.simulation import Simulation
from simcore.validate.machines.op_by_op import measure_alone
from simcore.validate.machines.reuse import found_in_cache
from simcore.validate.timing.op_times import plain


def product(n: int) -> Op:
    return ops.matmul("w", m=1, n=n, k=100, dtype="fp32")


def run(*graphs: Graph, times: int = 3) -> Trace:
    def program(m: Machine) -> Program:
        for _ in range(times):
            for graph in graphs:
                ticket = m.launch(graph)
        yield m.wait(ticket)

    price = Price(1e-6, 1e-6, 1e-6, "measured", "")
    return Simulation(lambda op: price).run(program)


def room(*used: Op) -> int:
    """Bytes of a cache in which these stay."""
    return round(sum(op.work.hbm_bytes for op in used) / 0.5)


def test_what_was_used_not_long_ago_is_in_the_cache() -> None:
    small, large = product(10), product(1000)
    trace = run(Graph("one", (small,)), Graph("other", (large,)))
    both = {plain(small), plain(large)}
    assert found_in_cache(trace, room(small, large)) == both
    assert not found_in_cache(trace, room(small, large) - 2)
    assert not found_in_cache(run(Graph("one", (small,)), times=1), room(small))


def test_layers_alike_have_operands_of_their_own() -> None:
    """Two in one graph are not two uses of the same weights; between uses lies the whole of the graph."""
    layer = product(50)
    trace = run(Graph("two layers", (layer, layer)))
    assert found_in_cache(trace, room(layer, layer)) == {plain(layer)}
    assert not found_in_cache(trace, room(layer, layer) - 2)


def test_most_uses_count() -> None:
    small, large = product(10), product(1000)
    one, other = Graph("one", (small,)), Graph("other", (large,))
    for seldom, stays in ((1, False), (3, True)):
        trace = run(*[one] * seldom, other)
        assert (plain(small) in found_in_cache(trace, room(small))) is stays


@pytest.mark.parametrize(("cache_bytes", "stays"), [(1 << 22, True), (1 << 18, False)])
def test_weights_of_a_small_model_stay_from_step_to_step(cache_bytes: int, stays: bool) -> None:
    model = LongConvolution(layers=4, channels=64, tokens=32, dtype="fp32")
    price = Price(1e-6, 1e-6, 1e-6, "measured", "")
    trace = Simulation(lambda op: price).run(lambda m: fractal_tiling(m, model, []))
    products = {plain(p.op) for s in trace.spans for p in s.ops if p.op.kind == "matmul"}
    assert len(products) == 2
    assert (products <= found_in_cache(trace, cache_bytes)) is stays


def test_ranks_share_the_cache_of_their_card() -> None:
    """And the same shape in another graph is another op."""
    weight = product(50)

    def program(m: Machine) -> Program:
        for _ in range(4):
            ticket = m.launch(Graph(f"rank {m.rank}", (weight,)))
            yield m.wait(ticket)

    price = Price(1e-6, 1e-6, 1e-6, "measured", "")
    trace = Simulation(lambda op: price, mesh={"tensor": 3}).run(program)
    assert found_in_cache(trace, room(*[weight] * 3)) == {plain(weight)}
    assert not found_in_cache(trace, room(*[weight] * 3) - 2)


@pytest.mark.parametrize("stays", [True, False])
def test_ops_take_less_where_a_run_finds_their_operands_in_the_cache(stays: bool) -> None:
    """As far as that was measured; what is predicted of shapes is held against what was measured, cold."""
    sizes = 10, 40, 160
    trace = run(*(Graph(f"{n}", (product(n),)) for n in sizes))
    cache_bytes = room(*(product(n) for n in sizes)) - (0 if stays else 2)

    def measure(kernel: Any, op: Op) -> Point:
        del kernel
        seconds = 1e-6 * op["n"]
        warm_s = None if op["n"] == max(sizes) else 0.75 * seconds
        return Point(op, 1, 1e-9, seconds, seconds, seconds, 5, "cold", warm_s)

    card: Any = None
    found = measure_alone([trace], roofline(load_device("cpu")), card, lambda *_: None, measure=measure)
    saved_s = found.saved_s(trace, cache_bytes)
    expected = {plain(product(n)): 0.25e-6 * n for n in (10, 40)} if stays else {}
    assert saved_s == pytest.approx(expected)
    points = found.op_points(lambda op: Price(9.0, 9.0, 9.0, "assumed", ""), "cpu")
    assert {point.op["n"]: point.measured_s for point in points} == {n: 1e-6 * n for n in sizes}
