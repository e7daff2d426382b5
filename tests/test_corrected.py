"""Corrections by measured shapes against a plain multilinear table, and how far their intervals widen.

Ops are of a made-up kind of two dimensions, whose fit is one second a unit of floor, so that c alone is seen.
"""

from dataclasses import replace
from itertools import product
from math import exp, log
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.devices.fit import Fit
from simcore.devices.interpolation import Correction, Measured, correction
from simcore.input.files import InputError
from simcore.ops.op import Op, Price, Work

FIT = Fit(0.0, 1.0, 0.5, 2.0, 9, 1e-9, 1e3)
FLOOR_S = 1e-3
LOW, HIGH = 0.9, 1.2


def op_at(m: int, n: int) -> Op:
    return Op("made_up", "op", (("m", m), ("n", n)), "bf16", lambda op: Work(0.0, 0.0))


def measured(m: int, n: int, factor: float) -> Measured:
    return Measured("made_up", f"m={m};n={n}", "bf16", 1, FLOOR_S, FLOOR_S * factor)


def near(points: dict[tuple[int, int], float]) -> Correction:
    """Points by their factor over the fit, with an interval of LOW to HIGH."""
    found = correction(FIT, [measured(m, n, factor) for (m, n), factor in points.items()], judged=False)
    return replace(found, low=LOW, high=HIGH)


def priced(of: Correction, m: int, n: int, floor_s: float = FLOOR_S) -> Price:
    found = of.price(FIT, op_at(m, n), 1, floor_s, "c")
    assert found is not None
    return found


def ends(price: Price) -> tuple[float, float]:
    return log(price.low_s / price.seconds) / log(LOW), log(price.high_s / price.seconds) / log(HIGH)


GRID = {(m, n): 2.0 + exp(0.1 * i) for i, (m, n) in enumerate(product((1, 64, 512), (1, 4, 1024)))}


def test_between_slices_the_nearest_that_surround_a_place_count() -> None:
    """At m = 8, n = 32: slice 4 ends before n and slice 16 begins after it; slices 2 and 32 have both sides,
    and so has 1, which is farther."""
    slices = {1: (3, 90), 2: (16, 64), 4: (1, 15), 16: (65, 256), 32: (17, 80)}
    factors = {1: 3.0, 2: 5.0, 4: 7.0, 16: 11.0, 32: 13.0}
    table = near({(m, n): factors[m] for m, ns in slices.items() for n in ns})
    share = log(8 / 2) / log(32 / 2)
    expected = (1.0 - share) * log(5.0) + share * log(13.0)
    assert log(priced(table, 8, 32).seconds / FLOOR_S) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_between_points_of_a_grid_it_is_multilinear_in_logarithms(seed: int) -> None:
    """Against the formula over the four corners around a place, at places of more than three factors off."""
    draws = Random(seed)
    table, grid = near(GRID), {(log(m), log(n)): log(factor) for (m, n), factor in GRID.items()}
    columns = [sorted({place[i] for place in grid}) for i in range(2)]
    for _ in range(50):
        m, n = round(512 ** draws.random()), round(1024 ** draws.random())
        corners, shares = [], []
        for x, values in zip((log(m), log(n)), columns, strict=True):
            after = min(max(int(np.searchsorted(values, x, side="right")), 1), len(values) - 1)
            corners.append((values[after - 1], values[after]))
            shares.append((x - values[after - 1]) / (values[after] - values[after - 1]))
        c = sum(
            (shares[0] if i else 1 - shares[0])
            * (shares[1] if j else 1 - shares[1])
            * grid[corners[0][i], corners[1][j]]
            for i in (0, 1)
            for j in (0, 1)
        )
        assert priced(table, m, n).seconds == pytest.approx(FLOOR_S * exp(c), rel=1e-9)


def test_a_measured_shape_has_its_own_time_and_the_plain_interval() -> None:
    table = near(GRID)
    for (m, n), factor in GRID.items():
        found = priced(table, m, n)
        assert found.source == "measured"
        assert found.seconds == pytest.approx(FLOOR_S * factor)
        assert ends(found) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("m", "source", "power"),
    [
        (8, "interpolated", 1.0),
        (9, "extrapolated", 1.0 + log(9)),
        (10, "extrapolated", 1.0 + log(8.1)),
        (11, "interpolated", 1.0),
    ],
)
def test_what_differs_by_more_than_eight_times_from_all_is_not_between_them(
    m: int, source: str, power: float
) -> None:
    """Between 1 and 81: 8 is eight times 1; 81 is 9 times 9, 8.1 times 10, and less than 8 times 11."""
    found = priced(near({(1, 1): 3.0, (81, 1): 4.0}), m, 1)
    assert found.source == source
    assert ends(found) == pytest.approx((power, power))


def test_what_is_far_is_far_from_every_point() -> None:
    """Places between four corners with few points beside them: nothing else makes a place unknown."""
    draw = Random(3)
    corners = {(m, n): 2.0 for m in (1, 10**6) for n in (1, 10**6)}
    points = {**corners, **{(draw.randint(1, 10**6), draw.randint(1, 10**6)): 2.0 for _ in range(9)}}
    table, far = near(points), 0
    for _ in range(500):
        m, n = (int(exp(draw.uniform(0.0, log(10**6)))) for _ in range(2))
        is_far = min(max(abs(log(m / a)), abs(log(n / b))) for a, b in points) > log(8.0)
        assert (priced(table, m, n).source == "extrapolated") == is_far
        far += is_far
    assert 50 < far < 450


@pytest.mark.parametrize("factor", [2, 3, 50])
def test_outside_an_interval_widens_by_how_many_times(factor: int) -> None:
    """Raised to the power 1 + ln(times outside); c stays as it is at the nearest point."""
    table = near({(10, 1): 3.0, (20, 1): 4.0})
    beyond = priced(table, 20 * factor, 1)
    assert beyond.source == "extrapolated"
    assert beyond.seconds == pytest.approx(4.0 * FLOOR_S)
    assert ends(beyond) == pytest.approx((1.0 + log(factor),) * 2)
    if factor <= 10 and 10 % factor == 0:
        before = priced(table, 10 // factor, 1)
        assert before.seconds == pytest.approx(3.0 * FLOOR_S)
        assert ends(before) == pytest.approx((1.0 + log(factor),) * 2)


def test_where_one_side_is_unknown_the_interval_is_at_least_squared() -> None:
    """Of four corners three were measured: the fourth is inside the box, and nothing beyond it is known."""
    table = near({(1, 1): 3.0, (1, 2): 3.5, (2, 1): 4.0})
    corner = priced(table, 2, 2)
    assert corner.source == "extrapolated"
    assert ends(corner) == pytest.approx((2.0, 2.0))
    # Twice outside is less than that, ten times outside is more.
    assert ends(priced(table, 2, 4)) == pytest.approx((2.0, 2.0))
    assert ends(priced(table, 2, 20)) == pytest.approx((1.0 + log(10),) * 2)
    # Where both sides are known it is as wide as it is.
    assert ends(priced(near({(1, 1): 3.0, (1, 2): 3.5, (2, 1): 4.0, (2, 2): 5.0}), 2, 2)) == pytest.approx(
        (1.0, 1.0)
    )


def test_no_interval_is_wider_than_a_thousand_times() -> None:
    far = priced(near({(1, 1): 3.0, (2, 1): 4.0}), 10**12, 1, floor_s=1e-9)
    assert far.high_s == pytest.approx(4e-9 * min(HIGH ** (1 + log(10**12 / 2)), 1e3))
    wide = replace(near({(1, 1): 3.0, (2, 1): 4.0}), low=0.01, high=50.0)
    found = wide.price(FIT, op_at(200, 1), 1, FLOOR_S, "c")
    assert found is not None
    assert found.high_s == pytest.approx(1e3 * found.seconds)
    assert found.low_s == FLOOR_S


def test_between_points_a_price_may_be_below_its_floor_and_beyond_them_not() -> None:
    """Operands that lie in a cache are read faster than from memory."""
    table = near({(10, 1): 0.5, (20, 1): 0.5})
    between, beyond = priced(table, 14, 1), priced(table, 40, 1)
    assert between.cached
    assert between.seconds == pytest.approx(0.5 * FLOOR_S)
    assert between.low_s == pytest.approx(0.5 * LOW * FLOOR_S)
    assert not beyond.cached
    assert (beyond.source, beyond.seconds, beyond.low_s) == ("roofline", FLOOR_S, FLOOR_S)
    # At the floor itself it is the fit that says so.
    exact = near({(10, 1): 1.0, (20, 1): 1.0})
    assert priced(exact, 40, 1).source == "extrapolated"
    assert not priced(exact, 14, 1).cached


def test_shapes_of_the_same_coordinates_count_by_their_mean() -> None:
    """Of attention a card knows the sequences and heads by their product alone."""
    shapes = [(2, 8, 4), (4, 4, 2)]
    factors = [2.0, 3.0]
    points = [
        Measured("decode_attention", f"batch={b};q_heads={q};kv_heads={h};head_dim=64;context=32", "bf16", 1,
                 FLOOR_S, FLOOR_S * factor)
        for (b, q, h), factor in zip(shapes, factors, strict=True)
    ]  # fmt: skip
    found = correction(FIT, points, judged=False)
    op = Op("decode_attention", "a", (("batch", 8), ("q_heads", 2), ("kv_heads", 1), ("head_dim", 64),
            ("context", 32)), "bf16", lambda op: Work(0.0, 0.0))  # fmt: skip
    price = found.price(FIT, op, 1, FLOOR_S, "c")
    assert price is not None
    assert price.seconds == pytest.approx(FLOOR_S * (2.0 * 3.0) ** 0.5)


def test_the_interval_is_of_points_left_out_one_by_one() -> None:
    """On a line of equal steps, each inner point by the mean of its neighbours, the ends by theirs."""
    factors = [2.0, 2.2, 2.1, 2.5, 2.4]
    points = [measured(2**i, 1, factor) for i, factor in enumerate(factors)]
    found = correction(FIT, points)
    logs = [log(factor) for factor in factors]
    expected = [
        logs[0] - logs[1],
        *(logs[i] - (logs[i - 1] + logs[i + 1]) / 2 for i in (1, 2, 3)),
        logs[4] - logs[3],
    ]
    assert sorted(found.errors) == pytest.approx(sorted(expected))
    assert found.low < 1.0 < found.high


def test_two_points_say_of_each_other_how_far_off_they_are() -> None:
    found = correction(FIT, [measured(1, 1, 2.0), measured(2, 1, 3.0)])
    assert sorted(found.errors) == pytest.approx([log(2 / 3), log(3 / 2)])
    # Not judged, nothing is said.
    plain = correction(FIT, [measured(1, 1, 2.0)], judged=False)
    assert (plain.low, plain.high, plain.errors.size) == (1.0, 1.0, 0)


def cube(m: int, n: int, k: int, factor: float = 2.0) -> Measured:
    return Measured("made_up", f"m={m};n={n};k={k}", "bf16", 1, FLOOR_S, FLOOR_S * factor)


def test_a_dimension_that_follows_another_is_no_further_coordinate() -> None:
    """n is m wherever it was measured, at either k: between, that is enough; off that line it is not."""
    found = correction(FIT, [cube(2**i, 2**i, k) for i in range(4) for k in (1, 3)], judged=False)
    for m, n, k, source in (
        (3, 3, 1, "interpolated"),
        (3, 3, 2, "interpolated"),
        (4, 4, 2, "interpolated"),
        (3, 4, 1, "extrapolated"),
        (4, 3, 1, "extrapolated"),
    ):
        op = replace(op_at(m, n), shape=(("m", m), ("n", n), ("k", k)))
        price = found.price(FIT, op, 1, FLOOR_S, "c")
        assert price is not None
        assert price.source == source, (m, n, k)
        assert price.seconds == pytest.approx(2.0 * FLOOR_S), (m, n, k)


def test_a_dimension_of_few_values_does_not_follow_one_of_many() -> None:
    """m decides n, and n does not decide m: both are coordinates, and n = 1 says nothing of m = 8."""
    found = near({(1, 1): 2.0, (2, 1): 2.0, (4, 2): 4.0, (8, 2): 4.0})
    assert priced(found, 8, 1).source == "extrapolated"
    assert priced(found, 6, 2).source == "interpolated"


def test_shapes_of_other_dimensions_are_not_mixed_and_not_priced() -> None:
    with pytest.raises(InputError, match="made_up: shapes differ in which dimensions they have"):
        correction(FIT, [measured(1, 1, 2.0), cube(1, 1, 1)])
    table = near({(1, 1): 2.0, (2, 1): 3.0})
    assert table.price(FIT, replace(op_at(1, 1), shape=(("n", 1),)), 1, FLOOR_S, "c") is None
    assert table.error(FIT, Measured("made_up", "n=1", "bf16", 1, FLOOR_S, FLOOR_S)) is None


@pytest.mark.parametrize(
    "shape", ["m=16;n", "m=16;n=", "m=16;=2", "m=16;m=16", "m=16;n=-1", "m=16;n=2.5", ""]
)
def test_a_shape_is_names_with_numbers(shape: str) -> None:
    with pytest.raises(ValueError, match=r"shape: .* is not as in"):
        Measured("made_up", shape, "bf16", 1, FLOOR_S, FLOOR_S)


@pytest.mark.parametrize("field", ["median_s", "floor_s"])
def test_times_of_hours_are_no_measurements_and_those_of_a_nanosecond_are(field: str) -> None:
    for seconds, allowed in ((1e-9, True), (9999.0, True), (10_001.0, False), (0.0, False), (-1.0, False)):
        times: dict[str, Any] = {"median_s": FLOOR_S, "floor_s": FLOOR_S, field: seconds}
        if allowed:
            assert getattr(Measured("made_up", "m=1", "bf16", 1, **times), field) == seconds
        else:
            with pytest.raises(ValueError, match=field):
                Measured("made_up", "m=1", "bf16", 1, **times)


@pytest.mark.parametrize("times", [0.1, 2.0, 0.0999, 2.001])
def test_a_time_from_the_cache_may_be_a_tenth_to_twice_the_median(times: float) -> None:
    """Both bounds are allowed."""
    if 0.1 <= times <= 2.0:
        assert replace(measured(1, 1, 1.0), warm_s=times * FLOOR_S).warm_s == times * FLOOR_S
    else:
        with pytest.raises(ValueError, match=r"0\.1 to 2 times median_s"):
            replace(measured(1, 1, 1.0), warm_s=times * FLOOR_S)
