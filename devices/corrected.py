"""Between measured shapes: what two constants say, times how far measured times lie from that about there.

    seconds = fitted(launches, floor_s) exp(c(x))          x = log of each coordinate that shapes differ in
    c(x)    = c_0 - sum_i w_i |x - x_i|,   sum_i w_i = 0   c(x_i) = log(measured_i / fitted_i)

The fit carries an op's size, c what two constants cannot say: waves of programs, layouts that change with the
shape. Along one dimension c is linear between measured shapes; in more it is the radial interpolation by -r,
which any distinct points determine (Micchelli 1986), so that shapes need not stand on a grid. Outside the box
of the points x is moved to its edge: there the fit alone goes on.

Coordinates are the dimensions of a shape, but where a kernel knows only their product: programs of attention
each take a sequence's KV head, whichever it is (`coordinates`). What is alike in them is measured once.

How far to trust it: the errors at shapes that c was not made of ("check" in points.csv), those of all lines
of a kind together; where there are none, the error at each point of a c that was made without it, w_i /
(M^-1)_ii, M being the matrix of the equations (Rippa 1999), which is about twice as far from others as what
lies between them. Either as an interval by `devices.fit.interval`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked

from devices.fit import MOST_FACTOR, Fit, interval
from simcore.files import Count, InputError, NonNegative, Positive
from simcore.ops import DTYPE_BYTES, Op, Price, SourceKind

__all__ = ["Correction", "Measured", "correction"]

# A shape that differs from every measured one by more than this factor in some dimension is not between them.
FAR = 8.0
Numbers = NDArray[np.float64]
Role = Literal["fit", "check"]


@checked(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Measured:
    """One measured op: its shape as in "m=16;n=256", and what a fit is made of; `role`: whether one is
    made of it, or it only says how far off prices are elsewhere."""

    kind: str
    shape: str
    dtype: str
    launches: Count
    floor_s: NonNegative
    median_s: Positive
    role: Role = "fit"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"{self.kind} {self.shape}: dtype {self.dtype} is unknown")
        words = [word.partition("=") for word in self.shape.split(";")]
        if len({name for name, _, _ in words}) < len(words) or not all(
            name and value.isdecimal() for name, _, value in words
        ):
            raise InputError(f'{self.kind}: shape: {self.shape!r} is not as in "m=16;n=256"')

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Its shape, by name."""
        words = (word.partition("=") for word in self.shape.split(";"))
        return {name: int(value) for name, _, value in words}


def coordinates(kind: str, shape: Mapping[str, int]) -> Mapping[str, int]:
    """By what shapes of a kind lie near each other.

    >>> shape = {"batch": 4, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "context": 1024}
    >>> dict(coordinates("decode_attention", shape))
    {'head_dim': 128, 'context': 1024, 'pairs': 32, 'group': 4}
    """
    own = dict(shape)
    if kind in ("decode_attention", "speculative_attention"):
        batch, queries, heads = (own.pop(name) for name in ("batch", "q_heads", "kv_heads"))
        return {**own, "pairs": batch * heads, "group": queries // heads}
    if kind == "prefill_attention":
        # Programs each take rows of a query head; keys and values come from the cache.
        cached = own.pop("kv_tokens") - own["tokens"]
        return {**own, "cached": cached, "group": own["q_heads"] // own.pop("kv_heads")}
    if kind.startswith("linear_attention_"):
        batch, heads = own.pop("batch"), own.pop("heads")
        return {**own, "pairs": batch * heads}
    return own


@dataclass(frozen=True, slots=True)
class Correction:
    """c of one fit: points x_i [n, coordinates] with weights w [n], its interval, and the coordinates in
    which all points are alike; `kind`: of the ops."""

    kind: str
    names: tuple[str, ...]
    alike: Mapping[str, int]
    points: Numbers
    weights: Numbers
    constant: float
    low: float
    high: float

    def price(self, fit: Fit, op: Op, launches: int, floor_s: float, detail: str) -> Price | None:
        """The price of an op, never below its floor; None for one that differs in what is alike, of which
        nothing was measured.

        At a measured shape "measured", "interpolated" between them; else "extrapolated", where both ends of
        the interval are raised to the power 1 + ln(how many times outside).
        """
        # Every dimension is a number by now: the fit's floor was made of them.
        own = coordinates(self.kind, {name: op[name] for name, _ in op.shape})
        if any(own.get(name) != value for name, value in self.alike.items()):
            return None
        x = np.array([_log(own[name]) for name in self.names])
        low, high = self.points.min(0), self.points.max(0)
        inside = np.clip(x, low, high)
        outside = float(np.abs(x - inside).max(initial=0.0))
        away = np.abs(self.points - x).max(1, initial=0.0).min()
        source: SourceKind = "interpolated" if away > 0.0 else "measured"
        if outside > 0.0 or away > math.log(FAR):
            source, detail = "extrapolated", f"{detail}, {math.exp(away):.3g} times from what was measured"
        fitted_s = fit.seconds(launches, floor_s) * self._factor(inside)
        power, seconds = 1.0 + outside, max(floor_s, fitted_s)
        if fitted_s < floor_s:
            source = "roofline"
        low_s = min(seconds, max(floor_s, fitted_s * max(self.low**power, 1.0 / MOST_FACTOR)))
        high_s = max(seconds, fitted_s * min(self.high**power, MOST_FACTOR))
        return Price(seconds, low_s, high_s, source, detail)

    def _factor(self, x: Numbers) -> float:
        return math.exp(self.constant - float(self.weights @ np.linalg.norm(self.points - x, axis=1)))

    def error(self, fit: Fit, check: Measured) -> float:
        """log(measured / predicted) of a shape."""
        shape = coordinates(self.kind, check.dimensions)
        x = np.array([_log(shape[name]) for name in self.names])
        inside = np.clip(x, self.points.min(0), self.points.max(0))
        return math.log(check.median_s / (fit.seconds(check.launches, check.floor_s) * self._factor(inside)))


def correction(fit: Fit, measured: Sequence[Measured]) -> Correction:
    """c of a fit from the shapes it was made of; see the head of this file. Of several shapes of the same
    coordinates the mean counts. Raises InputError where there are none, they have not the same dimensions, or
    one is there twice."""
    if not measured:
        raise InputError("a correction needs at least one measured shape")
    if len({point.shape for point in measured}) < len(measured):
        raise InputError(f"{measured[0].kind}: a shape is measured twice")
    kind = measured[0].kind
    shapes = [coordinates(kind, point.dimensions) for point in measured]
    if any(shape.keys() != shapes[0].keys() for shape in shapes):
        raise InputError(f"{measured[0].kind}: shapes differ in which dimensions they have")
    names = tuple(name for name in shapes[0] if len({shape[name] for shape in shapes}) > 1)
    alike = {name: size for name, size in shapes[0].items() if name not in names}
    every = np.array([[_log(shape[name]) for name in names] for shape in shapes]).reshape(len(shapes), -1)
    ratios = np.log([point.median_s / fit.seconds(point.launches, point.floor_s) for point in measured])
    points, place = np.unique(every, axis=0, return_inverse=True)
    found = np.bincount(place.ravel(), ratios) / np.bincount(place.ravel())
    n = len(points)
    matrix = np.ones((n + 1, n + 1))
    matrix[:n, :n] = -np.linalg.norm(points[:, None] - points[None], axis=2)
    matrix[n, n] = 0.0
    inverse = np.linalg.inv(matrix).astype(np.float64)
    solved: Numbers = inverse[:, :n] @ found
    weights, constant = solved[:n], float(solved[n])
    errors = weights / np.diagonal(inverse)[:n] if n > 1 else np.zeros(n)
    return Correction(kind, names, alike, points, weights, constant, *interval(errors))


def _log(size: int) -> float:
    """Of a size, 0 for a 0."""
    return math.log(max(1, size))
