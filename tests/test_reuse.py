"""Which ops find their operands in the cache: by hand, and in runs of the simulated machine."""

from types import SimpleNamespace
from typing import Any

import pytest

from devices.price import STAYS, roofline
from devices.spec import load_device
from simcore import ops
from simcore.long_convolution import LongConvolution
from simcore.machine import Machine, Program
from simcore.ops import Graph, Op, Price
from simcore.schedules.fractal_tiling import fractal_tiling
from simcore.sim import Simulation
from simcore.trace import Trace
from validate.isolated import measure_alone
from validate.measure import Point
from validate.reuse import found_in_cache
from validate.traces import plain


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
    return round(sum(op.work.hbm_bytes for op in used) / STAYS)


def test_what_was_used_not_long_ago_is_in_the_cache() -> None:
    small, large = product(10), product(1000)
    trace = run(Graph("one", (small,)), Graph("other", (large,)))
    both = {plain(small), plain(large)}
    assert found_in_cache([trace], room(small, large)) == both
    assert not found_in_cache([trace], room(small, large) - 2)
    assert not found_in_cache([run(Graph("one", (small,)), times=1)], room(small))


def test_layers_alike_have_operands_of_their_own() -> None:
    """Two in one graph are not two uses of the same weights; between uses lies the whole of the graph."""
    layer = product(50)
    trace = run(Graph("two layers", (layer, layer)))
    assert found_in_cache([trace], room(layer, layer)) == {plain(layer)}
    assert not found_in_cache([trace], room(layer, layer) - 2)


def test_most_uses_count() -> None:
    small, large = product(10), product(1000)
    one, other = Graph("one", (small,)), Graph("other", (large,))
    for seldom, stays in ((1, False), (3, True)):
        trace = run(*[one] * seldom, other)
        assert (plain(small) in found_in_cache([trace], room(small))) is stays


@pytest.mark.parametrize(("cache_bytes", "stays"), [(1 << 22, True), (1 << 18, False)])
def test_weights_of_a_small_model_stay_from_step_to_step(cache_bytes: int, stays: bool) -> None:
    model = LongConvolution(layers=4, channels=64, tokens=32, dtype="fp32")
    price = Price(1e-6, 1e-6, 1e-6, "measured", "")
    trace = Simulation(lambda op: price).run(lambda m: fractal_tiling(m, model, []))
    products = {plain(p.op) for s in trace.spans for p in s.ops if p.op.kind == "matmul"}
    assert len(products) == 2
    assert (products <= found_in_cache([trace], cache_bytes)) is stays


@pytest.mark.parametrize("stays", [True, False])
def test_a_replay_is_charged_for_what_is_in_the_cache_as_from_there(stays: bool) -> None:
    """Of ops that were measured in both ways; what lies between two shapes is as those are."""
    sizes = 10, 40, 160
    trace = run(*(Graph(f"{n}", (product(n),)) for n in sizes))
    floor = roofline(load_device("cpu"))
    all_bytes = room(*(product(n) for n in sizes))
    card: Any = SimpleNamespace(l2_bytes=all_bytes if stays else all_bytes - 2)

    def measure(kernel: Any, op: Op) -> Point:
        del kernel
        seconds = 1e-6 * op["n"]
        warm_s = None if op["n"] == max(sizes) else 0.5 * seconds
        return Point(op, 1, 1e-9, seconds, seconds, seconds, 5, "cold", warm_s)

    found = measure_alone([trace], floor, card, lambda *_: None, measure=measure)
    price = found.prices(lambda op: Price(9.0, 9.0, 9.0, "assumed", ""))
    share = 0.5 if stays else 1.0
    assert price(product(10)).seconds == pytest.approx(1e-5 * share)
    assert price(product(160)).seconds == pytest.approx(1.6e-4)
    assert price(product(20)).seconds == pytest.approx(2e-5 * share)
    # What is predicted of shapes is held against what was measured, cold.
    points = found.op_points(lambda op: Price(9.0, 9.0, 9.0, "assumed", ""), "cpu")
    assert {point.op["n"]: point.measured_s for point in points} == {n: 1e-6 * n for n in sizes}
