"""The ladder's figures against their definitions: percentiles, what is compared, what is tried."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean

import pytest
import torch

from simcore.kernels.kernel import Kernel
from simcore.machine.trace import Cause, PricedOp, Span, Trace
from simcore.ops import op as ops
from simcore.ops.op import Floor, Op, Price
from simcore.studies.common import Axes, Row, Standing
from simcore.validate.ladder.climb import other_best
from simcore.validate.ladder.rungs import (
    Bounds,
    Compared,
    OpPoint,
    _relative,
    compared,
    ladder,
    numeric_error,
    off_pct,
    op_points,
    prices_of,
    spread,
)
from simcore.validate.timing.op_times import plain

BOUNDS = Bounds({"fp32": 1.0}, 60.0, 40.0, 50.0, prices_p95=80.0)
AXES = Axes("tensor_parallel", "tensor parallel", 1, 1, 128, 1)


def normed(tokens: int) -> Op:
    """As traces of real runs have it: without a name."""
    return plain(ops.norm("norm", tokens=tokens, hidden=8, dtype="fp32"))


def covering(errors: Sequence[float], share: float) -> float:
    """The least of the errors that at least this share of them do not exceed."""
    return min(x for x in errors if sum(y <= x for y in errors) >= share * len(errors) - 1e-9)


def test_another_best_by_prediction_is_said() -> None:
    def best(*labels: str) -> list[Standing]:
        return [Standing(f"At {i}", (i,), label, "", (1.0,), 1.0) for i, label in enumerate(labels)]

    assert other_best(best("a", "b"), best("a", "b")) == []
    # A place that was not predicted is no other choice.
    assert other_best(best("a", "b"), best("a")) == []
    said = "another strategy is best by prediction"
    assert other_best(best("a"), best("b")) == [f"{said}: at 0 'b', measured 'a'"]
    (five,) = other_best(best(*"aaaaa"), best(*"bbbab"))
    first = "; ".join(f"at {i} 'b', measured 'a'" for i in range(3))
    assert five == f"{said} in 4 of 5 places: {first}; 1 more"


@pytest.mark.parametrize("count", [1, 2, 3, 19, 20, 21, 40, 59, 60, 100, 101])
def test_95_percent_are_no_further_off_than_the_95th_percentile(count: int) -> None:
    draws = Random(count)
    errors = [draws.choice([5.0, 10.0, 25.0, 400.0]) * draws.random() for _ in range(count)]
    points = [OpPoint(normed(i + 1), None, 1e-3 * (1 + e / 100), 1e-3) for i, e in enumerate(errors)]
    judged, by_p95, *_ = [row for row in ladder(points, [], [], [], BOUNDS) if row["rung"] == 1]
    expected = covering(errors, 0.95)
    assert by_p95["judged_by"] == "p95_pct"
    assert by_p95["p95_pct"] == judged["p95_pct"] == pytest.approx(expected)
    assert by_p95["passed"] is (expected <= 80.0)
    assert judged["worst_pct"] == pytest.approx(max(errors))


def test_an_error_at_its_bound_has_passed_and_an_infinite_one_has_no_share_in_others() -> None:
    points = [OpPoint(normed(i), None, 1.5, 1.0) for i in range(1, 20)]
    never = OpPoint(normed(20), None, 0.0, 1.0)
    bounds = Bounds({}, 50.0, 40.0, 50.0, prices_p95=50.0)
    rows = [row for row in ladder([*points, never], [], [], [], bounds) if row["rung"] == 1]
    assert [row["passed"] for row in rows[:2]] == [True, True]
    assert (rows[0]["p95_pct"], rows[0]["worst_pct"]) == (50.0, math.inf)
    more = [row for row in ladder([*points, never, never], [], [], [], bounds) if row["rung"] == 1]
    assert more[1]["passed"] is False
    assert more[1]["p95_pct"] == math.inf


@pytest.mark.parametrize("value", [0.2, 0.5, 1.0, 3.0])
def test_too_fast_is_as_wrong_as_too_slow(value: float) -> None:
    assert off_pct(value, 1.0) == off_pct(1.0, value) == pytest.approx(100 * (max(value, 1 / value) - 1))
    assert off_pct(0.0, value) == math.inf


def test_kernels_are_judged_dtype_by_dtype_in_their_order() -> None:
    points = [
        OpPoint(replace(normed(1), dtype=dtype), error, 1.0, 1.0)
        for dtype, error in (("fp32", 1e-3), ("bf16", 1e-2))
    ]
    rows = [row for row in ladder(points, [], [], [], BOUNDS) if row["rung"] == 0]
    judged = [(row["what"], row["worst_pct"], row["passed"]) for row in rows[:2]]
    assert judged == [("kernels in bf16", 1.0, False), ("kernels in fp32", pytest.approx(0.1), True)]


def test_parts_of_a_rung_go_by_kind_and_dtype() -> None:
    kinds = [replace(normed(1), kind=kind, dtype=dtype) for kind in "ba" for dtype in ("fp32", "bf16")]
    points = [OpPoint(op, 0.0, 1.0, 1.0) for op in kinds]
    for rung in (0, 1):
        rows = [row for row in ladder(points, [], [], [], BOUNDS) if row["rung"] == rung]
        parts = [(row["label"], row["what"]) for row in rows if row["passed"] is None]
        assert parts == [("a", "bf16"), ("a", "fp32"), ("b", "bf16"), ("b", "fp32")]


def test_what_took_no_time_tells_nothing_of_a_price() -> None:
    points = [OpPoint(normed(1), None, 1.0, 1.0), OpPoint(normed(2), None, 1.0, 0.0)]
    rows = [row for row in ladder(points, [], [], [], BOUNDS) if row["rung"] == 1]
    assert [(row["n"], row["worst_pct"]) for row in rows[:2]] == [(1, 0.0), (1, 0.0)]


# -- prices of a replay ----------------------------------------------------------------------------------


def no_floor(op: Op) -> Floor:
    del op
    return Floor(0.0, 0.0, 1e-9)


def replayed(seconds: Sequence[float]) -> Price:
    return prices_of({normed(1): seconds}, no_floor)(normed(1))


def test_a_replayed_price_is_the_mean_of_what_was_measured_with_their_5th_and_95th_percentile() -> None:
    """Of 0 to 100 the k-th percentile is k, whatever rule it goes by."""
    seconds = [float(i) for i in range(101)]
    Random(3).shuffle(seconds)
    found = replayed(seconds)
    assert (found.low_s, found.seconds, found.high_s) == pytest.approx((5.0, 50.0, 95.0))


@pytest.mark.parametrize(("usual", "odd"), [(1.0, 1e4), (1.0, 1e-4)])
def test_an_interval_is_widened_to_hold_the_mean(usual: float, odd: float) -> None:
    """One pause in a hundred is beyond both percentiles, and the mean with it."""
    seconds = [usual] * 99 + [odd]
    found = replayed(seconds)
    assert found.seconds == pytest.approx(fmean(seconds))
    assert (found.low_s, found.high_s) == pytest.approx(sorted((usual, found.seconds)))
    assert found.low_s <= found.seconds <= found.high_s


def test_below_the_datasheet_a_replayed_price_was_of_operands_in_the_cache() -> None:
    def floor(op: Op) -> Floor:
        del op
        return Floor(0.0, 2.0, 0.0)

    for seconds, cached in ((1.9, True), (2.0, False), (2.1, False)):
        assert prices_of({normed(1): [seconds]}, floor)(normed(1)).cached is cached


def test_what_was_not_run_is_priced_by_those_of_its_kind() -> None:
    """Two shapes that take twice their floor: so does a third."""

    def floor(op: Op) -> Floor:
        return Floor(0.0, 1e-6 * op["tokens"], 0.0)

    times = {normed(n): [2e-6 * n] for n in (10, 1000)}
    assert prices_of(times, floor)(normed(100)).seconds == pytest.approx(2e-4)
    # What was too short for its clock tells nothing of them.
    assert prices_of({**times, normed(20): [0.0]}, floor)(normed(100)).seconds == pytest.approx(2e-4)


def test_what_was_not_run_is_priced_as_usual_if_that_is_closer_times_as_many_as_its_kind() -> None:
    """Times that are no two constants: half the square of the tokens, which the usual price has whole."""

    def squared(op: Op) -> Price:
        seconds = 1e-6 * op["tokens"] ** 2
        return Price(seconds, 0.9 * seconds, 1.2 * seconds, "measured", "usual")

    def floor(op: Op) -> Floor:
        return Floor(0.0, 1e-8 * op["tokens"], 0.0)

    times = {normed(n): [0.5e-6 * n * n] for n in (1, 2, 3, 7, 20, 40)}
    found = prices_of(times, floor, squared)(normed(11))
    assert (found.seconds, found.low_s, found.high_s) == pytest.approx((60.5e-6, 54.45e-6, 72.6e-6))
    assert found.detail == "0.5 times usual"
    # Not below the datasheet, and not where the fit is closer.
    assert prices_of(times, lambda op: Floor(0.0, 1e-4, 0.0), squared)(normed(11)).seconds == 1e-4
    doubled = {normed(n): [2.0 * floor(normed(n)).seconds] for n in (1, 2, 3, 7, 20, 40)}
    fitted, by_usual = (prices_of(doubled, floor, price)(normed(11)) for price in (None, squared))
    assert by_usual == fitted


def test_points_have_the_10th_and_90th_percentile_of_a_run_beside_the_median() -> None:
    seconds = [float(i) for i in range(1, 102)]
    Random(5).shuffle(seconds)
    cause = Cause(None, 0.0)
    spans = [
        Span(i, i, 0, "main", "g", "run", 0.0, 0.0, s, cause, (),
             (PricedOp(normed(3), Price(s, s, s, "measured", ""), 0.0),), ())
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    guess = Price(50.0, 40.0, 60.0, "roofline", "")
    (point,) = op_points([Trace(spans)], lambda op: guess, no_floor, table={}, calibrated=[normed(2)])
    assert (point.p10_s, point.measured_s, point.p90_s, point.n) == (11.0, 51.0, 91.0, 101)
    assert (point.predicted_s, point.held_out, point.error) == (50.0, True, None)
    (known,) = op_points([Trace(spans)], lambda op: guess, no_floor, table={}, calibrated=[normed(3)])
    assert not known.held_out


def test_points_of_a_kind_go_from_the_least_work_to_the_most() -> None:
    def floor(op: Op) -> Floor:
        return Floor(0.0, 1e-6 * op["tokens"], 0.0)

    cause = Cause(None, 0.0)
    price = Price(1.0, 1.0, 1.0, "measured", "")
    spans = [
        Span(i, i, 0, "main", "g", "run", 0.0, 0.0, 1.0, cause, (), (PricedOp(normed(n), price, 0.0),), ())
        for i, n in enumerate((7, 3, 5))
    ]
    points = op_points([Trace(spans)], lambda op: price, floor, table={}, calibrated=[])
    assert [point.op["tokens"] for point in points] == [3, 5, 7]


def test_an_infinity_that_both_have_is_no_error_and_weighs_nothing() -> None:
    truth = torch.tensor([math.inf, 3.0, -math.inf, 4.0], dtype=torch.float64)
    off = torch.tensor([math.inf, 3.0, -math.inf, 4.5])
    assert _relative(off, truth) == pytest.approx(0.5 / 5.0)
    assert _relative(truth.float(), truth) == 0.0
    assert _relative(torch.tensor([math.inf, 3.0, math.inf, 4.0]), truth) == math.inf
    assert _relative(torch.tensor([0.25]), torch.zeros(1, dtype=torch.float64)) == 0.25
    assert _relative(torch.tensor([0.375]), torch.tensor([0.25], dtype=torch.float64)) == 0.5
    assert _relative(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])) == 0.25
    nothing = torch.tensor([], dtype=torch.int64)
    assert _relative(nothing, nothing) == 0.0
    turned = torch.tensor([3.0 + 4.5j], dtype=torch.complex64)
    assert _relative(turned, torch.tensor([3.0 + 4.0j], dtype=torch.complex128)) == pytest.approx(0.1)


def test_what_is_fused_across_a_link_is_not_priced_by_its_parts() -> None:
    """Its parts were measured as launches of their own; a fused op of one rank has their times."""
    addition = ops.residual("residual", tokens=2, hidden=64, dtype="fp32")
    last = ops.norm("norm", tokens=2, hidden=64, dtype="fp32")
    total = ops.all_reduce("sum", elements=128, ranks=2, axis="tensor", dtype="fp32")
    crossing, local = (
        ops.all_reduce_normed((total, addition, last)),
        ops.fuse("both", "both", (addition, last)),
    )
    times = {plain(op): [1e-3] for op in (total, addition, last)}

    def by_link(op: Op) -> Price:
        return Price(5e-6, 4e-6, 6e-6, "roofline", "")

    price = prices_of(times, no_floor, by_link)
    assert price(crossing).seconds == pytest.approx(5e-6)
    assert price(local).seconds == pytest.approx(2e-3)


@pytest.mark.parametrize("off", [(0.25, 0.0), (0.0, 0.25), (0.125, 0.25)])
def test_a_fused_op_is_as_wrong_as_the_worst_of_its_parts(off: tuple[float, float]) -> None:
    """Parts of 2 and 4 tokens, each of which is off by so much."""

    def run(op: Op, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + off[op["tokens"] == 4])

    def inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, ...]:
        del generator
        return (torch.ones(op["tokens"], device=device),)

    table = {normed(2).kind: Kernel(run, lambda op, x: x, inputs)}
    fused = replace(normed(6), kind="fused", parts=(normed(2), normed(4)))
    assert numeric_error(fused, table) == pytest.approx(max(off))
    assert numeric_error(fused, {}) is None


# -- what is compared ------------------------------------------------------------------------------------


def figures(*values: float | None) -> list[Row]:
    return [Row(AXES, f"figure_{i}_s", value, "s") for i, value in enumerate(values)]


def test_times_below_a_hundredth_of_the_longest_are_left_out() -> None:
    measured = figures(1.0, 0.01, 0.0099, 0.5, None)
    pairs = compared(figures(1.1, 0.011, 0.5, None, 1.0), measured)
    assert [pair.measured.value for pair in pairs] == [1.0, 0.01]
    assert [pair.error_pct for pair in pairs] == pytest.approx([10.0, 10.0])
    assert [pair.signed_pct for pair in pairs] == pytest.approx([10.0, 10.0])


def test_what_took_no_time_or_is_no_time_of_a_whole_case_is_not_compared() -> None:
    assert compared(figures(1.0, 2.0), figures(0.0, 0.0)) == []
    assert compared(figures(1.0, 2.0), figures(None, 0.0)) == []
    (ours,), theirs = figures(1.0), figures(1.0)
    for other in (replace(ours, unit="B"), replace(ours, op_kind="matmul"), replace(ours, value=None)):
        assert compared([other], theirs) == []
        assert compared(theirs, [other]) == []
    assert len(compared([ours], theirs)) == 1


def test_the_sign_says_which_of_both_is_longer() -> None:
    (measured,), (fast, slow) = figures(2.0), figures(1.0, 3.0)
    assert [Compared(p, measured).signed_pct for p in (fast, slow)] == pytest.approx([-50.0, 50.0])
    assert [Compared(p, measured).error_pct for p in (fast, slow)] == pytest.approx([100.0, 50.0])


def test_of_a_single_shape_one_is_tried() -> None:
    assert spread(["a"], 1) == ["a"]


@pytest.mark.parametrize("most", [2, 5, 20])
def test_shapes_that_are_tried_are_spread_evenly_from_the_first_to_the_last(most: int) -> None:
    for count in range(1, 60):
        chosen = spread(list(range(count)), most)
        assert len(chosen) == min(most, count)
        assert (chosen[0], chosen[-1]) == (0, count - 1) or count == 1
        steps = [b - a for a, b in pairwise(chosen)]
        assert not steps or (min(steps) >= 1 and max(steps) - min(steps) <= 1)
