"""Hit patterns of speculation, and bounds of an accepted speculation's error (ALSpec, ICML 2025).

A hit pattern decides, for token t and layer l, whether the approximate attention is accepted:

    RateHits    hit(t, l) = u(seed, t, l) < rate               one rate for all layers
    LayerHits   hit(t, l) = u(seed, t, l) < probabilities[l]   one probability a layer
    CountHits   hit(t, l) = floor((l + 1) h / N) > floor(l h / N)   exactly h of N layers, evenly spread

u is uniform on [0, 1) from a counter-based generator, so that a pattern is a pure function of its arguments:
the order of the calls and their callers change nothing.

An accepted output A~_i differs from the exact A_i by at most delta_i. Over N layers the deviation e_i
of the hidden state grows as (equation 2; alpha bounds the feed-forward part, f_r beta the attention)

    e_{i+1} <= (1 + alpha) ((1 + f_r beta) e_i + delta_i),   e_1 = 0
    e_{N+1} <= sum_i (1 + alpha)^(N-i+1) (1 + f_r beta)^(N-i) delta_i    (equations 1 and 3)

Deviations have the unit of delta, whatever norm that is; the constants have none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np

HitPattern = Callable[[int, int], bool]
Rounding = Literal["floor", "ceil", "fractional"]

_STREAM = int.from_bytes(b"hits")
_BLOCK = 64
_DRAWS_PER_COUNT = 4
_NEAR_INTEGER = 1e-9


def _check_count(name: str, value: int, low: int = 0, high: float = math.inf) -> None:
    if not isinstance(value, (int, np.integer)) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_number(name: str, value: float, *, positive: bool = False) -> None:
    if not math.isfinite(value) or value < 0.0 or (positive and value == 0.0):
        raise ValueError(f"{name} must be finite and {'above' if positive else 'at least'} 0, got {value!r}")


def _check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")


# -- hit patterns --------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _uniforms(seed: int, token: int, block: int) -> tuple[float, ...]:
    # One generator serves a whole block of layers: its start costs more than 64 draws.
    count = block * (_BLOCK // _DRAWS_PER_COUNT)
    generator = np.random.Philox(
        key=np.array([seed, _STREAM], dtype=np.uint64),
        counter=np.array([count, token, 0, 0], dtype=np.uint64),
    )
    return tuple((raw >> 11) * 2.0**-53 for raw in generator.random_raw(_BLOCK).tolist())


def _uniform(seed: int, token: int, layer: int) -> float:
    _check_count("token", token, 0, 2**64 - 1)
    _check_count("layer", layer, 0, 2**64 - 1)
    return _uniforms(seed, token, layer // _BLOCK)[layer % _BLOCK]


@dataclass(frozen=True, slots=True)
class RateHits:
    """Every speculation hits with the same probability `rate`, independently of all others.

    The draws do not depend on the rate: a hit at one rate is a hit at every higher one. Raises
    ValueError if `rate` is outside [0, 1] or `seed` is not an integer of 64 bits.
    """

    rate: float
    seed: int

    def __post_init__(self) -> None:
        _check_probability("rate", self.rate)
        _check_count("seed", self.seed, 0, 2**64 - 1)

    def __call__(self, token: int, layer: int) -> bool:
        """Whether the speculation of this token and layer, both counted from 0, hits."""
        return _uniform(self.seed, token, layer) < self.rate


@dataclass(frozen=True, slots=True)
class LayerHits:
    """Speculations of layer l hit with probability `probabilities[l]` (ALSpec section 2, figure 3b:
    the final layers accept more often than the others).

    Draws are those of `RateHits` with the same seed. Raises ValueError if a probability is outside
    [0, 1], if there is none, or if a layer has none.
    """

    probabilities: tuple[float, ...]
    seed: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "probabilities", tuple(self.probabilities))
        if not self.probabilities:
            raise ValueError("probabilities must hold one probability a layer, got none")
        for layer, probability in enumerate(self.probabilities):
            _check_probability(f"probabilities[{layer}]", probability)
        _check_count("seed", self.seed, 0, 2**64 - 1)

    def __call__(self, token: int, layer: int) -> bool:
        """Whether the speculation of this token and layer, both counted from 0, hits."""
        _check_count("layer", layer, 0, len(self.probabilities) - 1)
        return _uniform(self.seed, token, layer) < self.probabilities[layer]


@dataclass(frozen=True, slots=True)
class CountHits:
    """Exactly `hits` of `layers` speculations hit in every token, as evenly spread as integers allow:
    the distance between two hits is at most ceil(layers / hits) layers.

    The paper's latency formula counts hits in this way (ALSpec appendix F). `shift` moves the pattern to
    earlier layers, cyclically: without it the last layer hits if any layer does. Raises ValueError if `hits`
    is not an integer from 0 to `layers`, or a layer does not exist.
    """

    hits: int
    layers: int
    shift: int = 0

    def __post_init__(self) -> None:
        _check_count("layers", self.layers, 1)
        _check_count("shift", self.shift)
        _check_count("hits", self.hits, 0, self.layers)

    def __call__(self, token: int, layer: int) -> bool:
        """Whether the speculation of this token and layer, both counted from 0, hits."""
        _check_count("token", token)
        _check_count("layer", layer, 0, self.layers - 1)
        place = (layer + self.shift) % self.layers
        return (place + 1) * self.hits // self.layers > place * self.hits // self.layers


def hit_draws(rate: float, layers: int, rounding: Rounding = "floor") -> list[tuple[float, HitPattern]]:
    """Returns the hit rate `rate` as exact counts over `layers` layers: (weight, pattern), weights adding to
    1.

    "floor" rounds rate * layers down, as the formula of ALSpec appendix F does (an upper bound of the
    latency), "ceil" up; "fractional" gives both, weighted so that the mean count is rate * layers, as in
    the projection of ALSpec table 3 (0.65 of 32 layers: 20.8). A product within 1e-9 of an integer is that
    integer, which floating-point products often miss. A mean latency is the weighted mean of the patterns'
    latencies. Raises ValueError on arguments out of range.
    """
    _check_probability("rate", rate)
    _check_count("layers", layers, 1)
    count = rate * layers
    nearest = round(count)
    if abs(count - nearest) <= _NEAR_INTEGER:
        count = float(nearest)
    low, high = math.floor(count), math.ceil(count)
    if rounding == "floor":
        return [(1.0, CountHits(low, layers))]
    if rounding == "ceil":
        return [(1.0, CountHits(high, layers))]
    if rounding != "fractional":
        raise ValueError(f"rounding must be floor, ceil or fractional, got {rounding!r}")
    if low == high:
        return [(1.0, CountHits(low, layers))]
    return [(high - count, CountHits(low, layers)), (count - low, CountHits(high, layers))]


def balanced(draws: Sequence[tuple[float, HitPattern]]) -> list[tuple[float, HitPattern]]:
    """Returns counted draws in which the last layer hits as often as the others: with weight hits / layers.

    The last layer matters more than others if its attention overlaps the LM head. Other patterns are
    returned unchanged.
    """
    found: list[tuple[float, HitPattern]] = []
    for weight, pattern in draws:
        if not isinstance(pattern, CountHits) or pattern.hits in (0, pattern.layers):
            found.append((weight, pattern))
            continue
        share = pattern.hits / pattern.layers
        found.append((weight * share, replace(pattern, shift=0)))
        found.append((weight * (1.0 - share), replace(pattern, shift=1)))
    return found


# -- bounds of an accepted speculation's error ---------------------------------------------------


def _check_constants(alpha: float, beta: float, f_r: float) -> None:
    _check_number("alpha", alpha)
    _check_number("beta", beta)
    _check_number("f_r", f_r)


def _check_deltas(deltas: Sequence[float]) -> None:
    if not len(deltas):
        raise ValueError("deltas must hold one deviation a layer, got none")
    for layer, delta in enumerate(deltas):
        _check_number(f"deltas[{layer}]", delta)


def worst_case_bound(deltas: Sequence[float], alpha: float, beta: float, f_r: float) -> float:
    """Returns the largest deviation of the last hidden state, in the unit of `deltas` (ALSpec equations 1
    and 3).

    `deltas[i]` bounds ||A~ - A|| of the i-th layer, first layer first (0 if the speculation was rejected);
    `alpha`, `beta` and `f_r` are the Lipschitz constants of the feed-forward part, of the attention's
    input and of attention at the given magnitude R of its input. The paper calls the result epsilon. It
    is reached if all errors point the same way, and inf if it overflows floating point (attention's
    constant grows like R^2 e^(R^2)). Raises ValueError on a negative or infinite argument, or no layer.
    """
    _check_deltas(deltas)
    _check_constants(alpha, beta, f_r)
    layers = len(deltas)
    try:
        return math.fsum(
            (1.0 + alpha) ** (layers - i + 1) * (1.0 + f_r * beta) ** (layers - i) * delta
            for i, delta in enumerate(deltas, start=1)
            if delta > 0.0
        )
    except OverflowError:
        return math.inf


def linear_bound(layers: int, alpha: float, beta: float, f_r: float, delta: float) -> float:
    """Returns `worst_case_bound` to first order in alpha and f_r beta, every layer within `delta`:

        delta (N + alpha N (N + 1) / 2 + f_r beta N (N - 1) / 2),   N = layers

    It never exceeds the exact bound and, with z = N (alpha + f_r beta), falls short of it by at most
    delta N z^2 e^z / 2.

    The paper (appendix A.2) ends in (N + N^2 / 2) (alpha + f_r beta) delta. That does not follow from
    its line before, sum_i (1 + (N - i) (alpha + f_r beta)) delta: there the 1 of every layer stands
    alone and sums to N delta, while the printed form multiplies it by (alpha + f_r beta) as well, so
    that it gives 0 for alpha = beta = 0 where the exact bound is N delta. That line has also lost the
    one more power of (1 + alpha) of equation 3, a first-order term alpha N delta; it is kept here.

    Raises ValueError on a negative or infinite argument, or no layer.
    """
    _check_count("layers", layers, 1)
    _check_constants(alpha, beta, f_r)
    _check_number("delta", delta)
    after = layers * (layers - 1) / 2
    return delta * (layers + alpha * (after + layers) + f_r * beta * after)


def high_probability_bound(
    threshold: float, layers: int, c: float, failure_probability: float = 0.05
) -> float:
    """Returns the bound of ||H~_N - H_N|| / ||H||, except with `failure_probability` (ALSpec appendix A.3):

        threshold sqrt((4 - ln failure_probability) layers / c)

    printed for 0.05 as lambda sqrt(7 N / c). `threshold` is the verification threshold lambda, `c` the
    universal constant of Naor's inequality of the Azuma type, for which the paper gives no number. It
    holds only if errors have mean 0 given the layers before, which the paper assumes without proof,
    and, since it only adds errors up, if no layer amplifies errors of the layers before.

    Raises ValueError if `threshold` is negative, `layers` is not a positive integer, `c` is not
    positive or the probability does not lie inside (0, 1).
    """
    _check_number("threshold", threshold)
    _check_count("layers", layers, 1)
    _check_number("c", c, positive=True)
    if not 0.0 < failure_probability < 1.0:
        raise ValueError(f"failure_probability must lie inside (0, 1), got {failure_probability!r}")
    return threshold * math.sqrt((4.0 - math.log(failure_probability)) * layers / c)
