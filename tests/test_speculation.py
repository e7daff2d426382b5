"""Laws of hit patterns and of the error bounds of accepted speculations."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from simcore.studies.decode.speculation import (
    CountHits,
    HitPattern,
    LayerHits,
    RateHits,
    balanced,
    high_probability_bound,
    hit_draws,
    linear_bound,
    worst_case_bound,
)
from tests.thorough import slow


def grid(hits: HitPattern, tokens: int, layers: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([[hits(token, layer) for layer in range(layers)] for token in range(tokens)])


def standard_error(rate: float, draws: int) -> float:
    return math.sqrt(rate * (1.0 - rate) / draws)


# -- hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.5, 0.65, 0.875, 1.0])
def test_rate_is_met_within_four_standard_errors(rate: float) -> None:
    draws = grid(RateHits(rate, seed=1), 1000, 32)
    assert abs(draws.mean() - rate) <= 4.0 * standard_error(rate, draws.size)


@slow
def test_draws_of_neighbouring_layers_tokens_and_seeds_are_independent() -> None:
    rate, tokens, layers = 0.5, 500, 130
    first, second = (grid(RateHits(rate, seed), tokens, layers) for seed in (1, 2))
    square, off_diagonal = first[:layers, :layers], np.triu(np.ones((layers, layers), dtype=bool), 1)
    pairs = {
        "layers": (first[:, :-1], first[:, 1:]),
        "blocks of layers": (first[:, :64], first[:, 64:128]),
        "tokens": (first[:-1], first[1:]),
        "seeds": (first, second),
        "token and layer swapped": (square[off_diagonal], square.T[off_diagonal]),
    }
    for name, (a, b) in pairs.items():
        # Of independent pairs half agree.
        assert abs((a == b).mean() - 0.5) <= 4.0 * standard_error(0.5, a.size), name


@slow
def test_layer_frequencies_are_met_within_four_standard_errors() -> None:
    probabilities = tuple(np.linspace(0.0, 1.0, 80).tolist())
    tokens = 2000
    share = grid(LayerHits(probabilities, seed=3), tokens, 80).mean(axis=0)
    for layer, probability in enumerate(probabilities):
        assert abs(share[layer] - probability) <= 4.0 * standard_error(probability, tokens), layer
    assert share[0] == 0.0
    assert share[-1] == 1.0


def test_layer_hits_with_one_probability_are_rate_hits() -> None:
    by_layer, by_rate = LayerHits((0.4,) * 70, seed=9), RateHits(0.4, seed=9)
    assert (grid(by_layer, 20, 70) == grid(by_rate, 20, 70)).all()


def test_what_hits_at_one_rate_hits_at_every_higher_one() -> None:
    low, high = (grid(RateHits(rate, seed=4), 100, 32) for rate in (0.3, 0.7))
    assert (high | ~low).all()
    assert high.sum() > low.sum()


@pytest.mark.parametrize("hits", [RateHits(0.5, 7), LayerHits((0.5,) * 80, 7), CountHits(37, 80)])
def test_answers_do_not_depend_on_the_order_of_questions(hits: HitPattern) -> None:
    questions = [(token, layer) for token in range(40) for layer in range(80)]
    shuffled = [questions[i] for i in np.random.default_rng(0).permutation(len(questions))]
    asked = {question: hits(*question) for question in shuffled}
    copied: HitPattern = pickle.loads(pickle.dumps(hits))
    assert copied == hits
    assert [asked[question] for question in questions] == [copied(*question) for question in questions]


def test_draws_stay_the_same_over_versions() -> None:
    draws = grid(RateHits(0.5, seed=1), 2, 16).astype(int)
    assert ["".join(map(str, row)) for row in draws] == ["0101000011101010", "1100110000011111"]


def test_a_product_at_the_edge_of_an_integer_is_that_integer() -> None:
    """One layer at a rate of 1e-9 is as good as none, however it is rounded."""
    for rounding in ("floor", "ceil", "fractional"):
        assert hit_draws(1e-9, 1, rounding) == [(1.0, CountHits(0, 1))]


def test_the_last_layer_hits_if_any_does() -> None:
    for layers in (1, 4, 7):
        for hits in range(1, layers + 1):
            assert CountHits(hits, layers)(0, layers - 1)


def test_count_is_exact_and_evenly_spread_in_every_token() -> None:
    for layers in (1, 2, 7, 32, 80):
        for count in range(layers + 1):
            rows = grid(CountHits(count, layers), 2, layers)
            assert (rows.sum(axis=1) == count).all()
            if count:
                positions = np.flatnonzero(rows.ravel())
                widest = max([int(positions[0]) + 1, *np.diff(positions).tolist()])
                assert widest <= math.ceil(layers / count), (count, layers)


def counts(draws: list[tuple[float, HitPattern]], layers: int) -> list[tuple[float, int]]:
    return [(weight, int(grid(hits, 1, layers).sum())) for weight, hits in draws]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.29, 0.57, 0.58, 0.65, 0.7, 0.875, 1.0])
@pytest.mark.parametrize("layers", [10, 32, 80, 100])
def test_fractional_draws_have_the_mean_of_the_rate(rate: float, layers: int) -> None:
    draws = counts(hit_draws(rate, layers, "fractional"), layers)
    assert sum(weight for weight, _ in draws) == pytest.approx(1.0, abs=1e-12)
    assert sum(weight * count for weight, count in draws) == pytest.approx(rate * layers, abs=1e-9)
    assert all(abs(count - rate * layers) < 1.0 for _, count in draws)


def test_rounding_follows_appendix_f_and_table_3() -> None:
    assert counts(hit_draws(0.65, 32, "floor"), 32) == [(1.0, 20)]
    assert counts(hit_draws(0.65, 32), 32) == [(1.0, 20)]
    assert counts(hit_draws(0.65, 32, "ceil"), 32) == [(1.0, 21)]
    fractional = counts(hit_draws(0.65, 32, "fractional"), 32)
    assert [count for _, count in fractional] == [20, 21]
    assert [weight for weight, _ in fractional] == pytest.approx([0.2, 0.8], abs=1e-12)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "fractional"])
def test_a_product_that_misses_an_integer_by_rounding_is_that_integer(rounding: Any) -> None:
    for rate, layers, count in [(0.29, 100, 29), (0.57, 100, 57), (0.55, 100, 55), (20.8 / 32, 320, 208)]:
        assert counts(hit_draws(rate, layers, rounding), layers) == [(1.0, count)]
    assert math.floor(0.29 * 100) == 28
    assert math.ceil(0.55 * 100) == 56


# -- bounds --------------------------------------------------------------------------------------


def random_chains() -> list[tuple[list[float], float, float, float]]:
    rng = np.random.default_rng(11)
    return [
        (
            rng.uniform(0.0, 1.0, rng.integers(1, 81)).tolist(),
            *(float(x) for x in rng.uniform(0.0, [0.1, 0.1, 2.0])),
        )
        for _ in range(200)
    ]


def worst_case_recurrence(deltas: list[float], alpha: float, beta: float, f_r: float) -> float:
    """The bound layer by layer, from a common H_1 to H_{N+1} (ALSpec equation 2):

    ||H_{i+1} - H~_{i+1}|| <= (1 + alpha) ((1 + f_r beta) ||H_i - H~_i|| + delta_i)
    """
    deviation = 0.0
    for delta in deltas:
        deviation = (1.0 + alpha) * ((1.0 + f_r * beta) * deviation + delta)
    return deviation


def test_closed_form_equals_the_recurrence() -> None:
    for deltas, alpha, beta, f_r in random_chains():
        closed = worst_case_bound(deltas, alpha, beta, f_r)
        assert closed == pytest.approx(worst_case_recurrence(deltas, alpha, beta, f_r), rel=1e-12)


def test_two_layers_by_hand() -> None:
    # (1.5)^2 (1 + 2 * 0.5) 3 + 1.5 * 4
    assert worst_case_bound([3.0, 4.0], 0.5, 0.5, 2.0) == 19.5
    assert worst_case_recurrence([3.0, 4.0], 0.5, 0.5, 2.0) == 19.5


def test_worst_case_grows_with_every_argument() -> None:
    for deltas, alpha, beta, f_r in random_chains()[:50]:
        base = worst_case_bound(deltas, alpha, beta, f_r)
        assert worst_case_bound([*deltas, 0.1], alpha, beta, f_r) > base
        for layer in range(len(deltas)):
            more = [delta + 0.1 * (i == layer) for i, delta in enumerate(deltas)]
            assert worst_case_bound(more, alpha, beta, f_r) > base
        assert worst_case_bound(deltas, alpha + 0.01, beta, f_r) > base
        if len(deltas) > 1:
            assert worst_case_bound(deltas, alpha, beta + 0.01, f_r) > base
            assert worst_case_bound(deltas, alpha, beta, f_r + 0.01) > base


def test_an_early_error_costs_more_than_a_late_one() -> None:
    costs = [worst_case_bound(list(row), 0.1, 0.1, 1.0) for row in np.eye(8)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == 1.1


def test_a_bound_beyond_floating_point_is_infinite() -> None:
    assert worst_case_bound([1.0] * 80, 0.0, 1.0, 1e10) == math.inf
    assert worst_case_bound([0.0] * 79 + [1.0], 0.0, 1.0, 1e10) == 1.0


@slow
def test_random_chains_stay_below_the_worst_case() -> None:
    rng = np.random.default_rng(5)
    width, layers = 6, 12
    closest = 0.0
    for _ in range(100):
        alpha, beta, f_r = (float(x) for x in rng.uniform(0.05, [0.4, 0.4, 2.0]))
        deltas = rng.uniform(0.0, 0.1, layers)
        exact = approximate = rng.normal(size=width)
        for delta in deltas:
            inner, outer, mlp = (np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(3))
            error = rng.normal(size=width)
            error *= delta / np.linalg.norm(error)
            # Lipschitz constants: sin, tanh and orthogonal matrices 1.
            exact = exact + f_r * beta * outer @ np.tanh(inner @ exact)
            approximate = approximate + f_r * beta * outer @ np.tanh(inner @ approximate) + error
            exact = exact + alpha * np.sin(mlp @ exact)
            approximate = approximate + alpha * np.sin(mlp @ approximate)
        deviation = float(np.linalg.norm(exact - approximate))
        bound = worst_case_bound(deltas.tolist(), alpha, beta, f_r)
        assert deviation <= bound
        closest = max(closest, deviation / bound)
    assert closest > 0.05


def test_aligned_errors_reach_the_worst_case() -> None:
    for deltas, alpha, beta, f_r in random_chains()[:50]:
        exact = approximate = 0.0
        for delta in deltas:
            exact = (1.0 + alpha) * (exact + f_r * beta * exact)
            approximate = (1.0 + alpha) * (approximate + f_r * beta * approximate + delta)
        bound = worst_case_bound(deltas, alpha, beta, f_r)
        assert approximate - exact == pytest.approx(bound, rel=1e-12)


def test_linear_bound_by_hand() -> None:
    # Three layers: exponents 3, 2, 1 of (1 + alpha) and 2, 1, 0 of (1 + f_r beta).
    assert linear_bound(3, 0.25, 0.5, 0.5, 2.0) == 2.0 * (3 + 6 * 0.25 + 3 * 0.25)
    assert linear_bound(40, 0.0, 0.0, 1.0, 0.5) == worst_case_bound([0.5] * 40, 0.0, 0.0, 1.0) == 20.0


@pytest.mark.parametrize("layers", [1, 2, 32, 80])
@pytest.mark.parametrize("scale", [1e-5, 1e-4, 1e-3, 1e-2])
def test_linear_bound_falls_short_by_the_second_order_only(layers: int, scale: float) -> None:
    for alpha, f_r_beta in [(scale, 0.0), (0.0, scale), (scale, 3.0 * scale)]:
        exact = worst_case_bound([0.1] * layers, alpha, 1.0, f_r_beta)
        short = exact - linear_bound(layers, alpha, 1.0, f_r_beta, 0.1)
        z = layers * (alpha + f_r_beta)
        assert -1e-12 * exact <= short <= 0.1 * layers * z * z * math.exp(z) / 2.0 + 1e-12 * exact


def test_halving_the_constants_quarters_the_linear_error() -> None:
    def short(scale: float) -> float:
        return worst_case_bound([1.0] * 32, scale, scale, 1.0) - linear_bound(32, scale, scale, 1.0, 1.0)

    assert short(1e-4) / short(5e-5) == pytest.approx(4.0, rel=0.01)


def test_the_papers_last_line_is_no_first_order_approximation() -> None:
    layers, alpha, f_r_beta, delta = 32, 1e-6, 1e-6, 1.0
    printed = (layers + layers**2 / 2) * (alpha + f_r_beta) * delta
    exact = worst_case_bound([delta] * layers, alpha, f_r_beta, 1.0)
    assert printed < 1e-3 * exact
    assert linear_bound(layers, alpha, f_r_beta, 1.0, delta) == pytest.approx(exact, rel=1e-8)


def test_linear_bound_grows_with_every_argument() -> None:
    base = linear_bound(32, 0.1, 0.2, 0.3, 0.4)
    assert linear_bound(33, 0.1, 0.2, 0.3, 0.4) > base
    assert linear_bound(32, 0.2, 0.2, 0.3, 0.4) > base
    assert linear_bound(32, 0.1, 0.3, 0.3, 0.4) > base
    assert linear_bound(32, 0.1, 0.2, 0.4, 0.4) > base
    assert linear_bound(32, 0.1, 0.2, 0.3, 0.5) > base


def test_high_probability_bound_grows_with_the_root_of_the_depth() -> None:
    base = high_probability_bound(0.1, 20, 2.0)
    assert high_probability_bound(0.1, 80, 2.0) == pytest.approx(2.0 * base, rel=1e-12)
    assert high_probability_bound(0.2, 20, 2.0) == pytest.approx(2.0 * base, rel=1e-12)
    assert high_probability_bound(0.1, 20, 8.0) == pytest.approx(base / 2.0, rel=1e-12)
    assert high_probability_bound(0.1, 20, 2.0, 0.01) > base


def test_the_printed_seven_is_four_minus_log_of_a_twentieth() -> None:
    assert high_probability_bound(1.0, 1, 1.0) ** 2 == pytest.approx(6.99573, abs=1e-5)
    assert high_probability_bound(0.1, 32, 1.5) == pytest.approx(0.1 * math.sqrt(7 * 32 / 1.5), rel=1e-3)


def test_the_tail_of_the_bound_is_the_failure_probability() -> None:
    for failure in (0.5, 0.05, 1e-6):
        epsilon = high_probability_bound(0.1, 32, 0.7, failure)
        tail = math.exp(4.0) * math.exp(-0.7 * epsilon**2 / (32 * 0.1**2))
        assert tail == pytest.approx(failure, rel=1e-12)


def test_unbiased_errors_exceed_the_bound_more_rarely_than_allowed() -> None:
    # For sums of random signs Azuma's inequality has c = 1/2 and 2 in place of e^4.
    signs = np.random.default_rng(8).choice([-0.1, 0.1], size=(20_000, 32))
    bound = high_probability_bound(0.1, 32, 0.5, 0.05)
    assert (np.abs(signs.sum(axis=1)) >= bound).mean() <= 0.05
    assert bound < worst_case_bound([0.1] * 32, 0.0, 0.0, 0.0)


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rate", lambda: RateHits(1.1, 0)),
        ("rate", lambda: RateHits(math.nan, 0)),
        ("seed", lambda: RateHits(0.5, -1)),
        ("seed", lambda: RateHits(0.5, 2**64)),
        ("seed", lambda: LayerHits((0.5,), 2**64)),
        ("token", lambda: RateHits(0.5, 0)(2**64, 0)),
        ("layer", lambda: RateHits(0.5, 0)(0, 2**64)),
        ("token", lambda: RateHits(0.5, 0)(-1, 0)),
        ("layer", lambda: RateHits(0.5, 0)(0, -1)),
        ("probabilities", lambda: LayerHits((), 0)),
        (r"probabilities\[1\]", lambda: LayerHits((0.5, -0.1), 0)),
        ("seed", lambda: LayerHits((0.5,), -1)),
        ("token", lambda: LayerHits((0.5,), 0)(-1, 0)),
        ("layer", lambda: LayerHits((0.5,), 0)(0, 1)),
        ("hits", lambda: CountHits(33, 32)),
        ("hits", lambda: CountHits(-1, 32)),
        ("hits", lambda: CountHits(20.8, 32)),  # type: ignore[arg-type]
        ("layers", lambda: CountHits(0, 0)),
        ("token", lambda: CountHits(1, 2)(-1, 0)),
        ("layer", lambda: CountHits(1, 2)(0, 2)),
        ("rate", lambda: hit_draws(-0.1, 32)),
        ("layers", lambda: hit_draws(0.5, 0)),
        ("rounding", lambda: hit_draws(0.5, 32, "nearest")),  # type: ignore[arg-type]
        ("deltas", lambda: worst_case_bound([], 0.1, 0.1, 1.0)),
        (r"deltas\[1\]", lambda: worst_case_bound([0.1, -0.1], 0.1, 0.1, 1.0)),
        ("alpha", lambda: worst_case_bound([0.1], -0.1, 0.1, 1.0)),
        ("beta", lambda: worst_case_bound([0.1], 0.1, math.inf, 1.0)),
        ("f_r", lambda: worst_case_bound([0.1], 0.1, 0.1, math.nan)),
        ("layers", lambda: linear_bound(0, 0.1, 0.1, 1.0, 0.1)),
        ("alpha", lambda: linear_bound(2, -0.1, 0.1, 1.0, 0.1)),
        ("beta", lambda: linear_bound(2, 0.1, -0.1, 1.0, 0.1)),
        ("f_r", lambda: linear_bound(2, 0.1, 0.1, -1.0, 0.1)),
        ("delta ", lambda: linear_bound(2, 0.1, 0.1, 1.0, -0.1)),
        ("threshold", lambda: high_probability_bound(-0.1, 32, 1.0)),
        ("layers", lambda: high_probability_bound(0.1, 0, 1.0)),
        ("c ", lambda: high_probability_bound(0.1, 32, 0.0)),
        ("failure_probability", lambda: high_probability_bound(0.1, 32, 1.0, 0.0)),
        ("failure_probability", lambda: high_probability_bound(0.1, 32, 1.0, 1.0)),
    ],
)
def test_refusals_name_the_argument(name: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        call()


def test_balanced_draws_let_the_last_layer_hit_as_often_as_the_others() -> None:
    for hits, layers in ((0, 8), (1, 8), (5, 8), (8, 8), (20, 32)):
        draws = balanced([(1.0, CountHits(hits, layers))])
        assert sum(weight for weight, _ in draws) == pytest.approx(1.0)
        for _, pattern in draws:
            assert sum(pattern(0, layer) for layer in range(layers)) == hits
        often = [sum(weight * pattern(0, layer) for weight, pattern in draws) for layer in range(layers)]
        assert often[-1] == pytest.approx(hits / layers)
    random = RateHits(0.5, 1)
    assert balanced([(1.0, random)]) == [(1.0, random)]
    # What has nothing to balance stands beside what has.
    none, all_, some = (CountHits(hits, 8) for hits in (0, 8, 3))
    draws = balanced([(0.25, none), (0.25, some), (0.375, all_), (0.125, random)])
    assert (draws[0], draws[-2:]) == ((0.25, none), [(0.375, all_), (0.125, random)])
    assert sum(weight for weight, pattern in draws[1:-2] if pattern(0, 7)) == pytest.approx(0.25 * 3 / 8)
    assert sum(weight for weight, _ in draws) == pytest.approx(1.0)
