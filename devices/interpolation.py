"""Prices between measured shapes: the fit of two constants, times the measured error of the fit nearby.

    seconds = fitted(launches, w floor_s) exp(c(x))        x = log of each coordinate that shapes differ in
    c(x_i)  = log(measured_i / fitted_i)                   linear between them, coordinate by coordinate
    w       = work of whole tiles / work                   (`whole_tiles`)

The fit covers an op's size, c the effects that two constants cannot cover: waves of programs, layouts that
change with the shape. The coordinate with fewest values comes first: c is linear between its two values
nearest to x that have measurements on both sides of x in the other coordinates, and so on for the next
coordinate at each of them. On a grid this is multilinear; more points along the finest coordinate need no
further points elsewhere. If nothing was measured on one side, c keeps its value from the other side: beyond,
only the fit varies.

Coordinates are the dimensions of a shape, except where a kernel depends only on their product (each program
of attention takes one KV head of any sequence) or only on the number of tiles of rows (one row beyond full
tiles is one more tile); see `coordinates`. Shapes with equal coordinates are measured once.

Tiles of convolutions are measured with operands in the cache up to some size (`operand_bytes`), and from
memory beyond: c jumps there, by half and more. Only points on a tile's own side of the jump give its c; if
they do not surround it, c is as where nothing was measured on one side.

Attention of sequences whose longest is another than of lengths spread evenly has a second correction, d,
beside that of evenly spread lengths of the same total:

    d(x_i)  = log(measured_i / fitted_i) - c(x_i), 0 at 100 %    x also has the longest length, in percent of
                                                                 that of lengths spread evenly (LONGEST)

d is linear in the same way; of as many programs it differs by how many sequences they belong to, and by how
many queries a KV head has. That percentage is its finest coordinate, so beyond the most unequal lengths of so
many sequences d stays. Outside what was measured d is held, and the interval has the price without it too.

The interval is from the errors at shapes that c does not use ("check" in points.csv), of all lines of a kind
and dtype together (`simcore.devices.fit.checked_interval`); without check shapes, from the errors at points
left out one by one, which are about twice as far from other points as a shape between them
(`simcore.devices.fit.interval`).
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked

from simcore.devices.fit import Fit, interval, interval_of
from simcore.devices.prompt_attention import prompt_coordinates, work_over_floor
from simcore.input.files import Count, InputError
from simcore.ops.linear_layer import PROMPTS
from simcore.ops.op import (
    DTYPE_BYTES,
    Op,
    Price,
    Shape,
    SourceKind,
    longest,
    longest_of_spread,
    prompts,
    says_longest,
)

# A shape that differs from every measured one by more than this factor in some dimension is not between them.
FAR = 8.0
# The logarithm of that, and the side of a cell (`_cell`).
CELL = math.log(FAR)
# Products of up to this many rows have a kernel of their own, whose time depends on every row.
FEW_ROWS = 64
# (most rows, step): rows of products are padded to a multiple of step; beyond all, of LAST_STEP.
STEPS, LAST_STEP = ((256, 8), (512, 16), (1024, 64), (4096, 128)), 256
# From this many rows on a product is bound by arithmetic instead of memory.
MANY_ROWS = 256
# Chunk lengths, in tokens, of the methods of linear attention that compute in chunks.
CHUNKS = {
    "linear_attention_lightning": 64,
    "linear_attention_causal_dot_product": 64,
    "linear_attention_fleet": 16,
    PROMPTS: 64,
}
# Share of a partial chunk's time that scales with its rows, since only existing rows are read and written.
ROWS_SHARE = {"linear_attention_lightning": 0.25, "linear_attention_causal_dot_product": 0.25}
TILES = frozenset({"tile_conv", "tile_flash_conv", "tile_fft", "tile_flash_fft"})
COMPLEX_BYTES = 8
# Sides, powers of two, of tiles that are one transform (`is_transformed` of
# simcore.kernels.long_convolution): the spectrum of such a filter has no last bin of its own.
ONE_TRANSFORM, LEAST_SIDE, MOST_SIDE = "tile_flash_fft", 16, 16_384
# Elementwise ops whose programs take rows four at a time: each remainder is a launch of its own kind.
BY_FOUR = ("gate", "next_input")
# The coordinate of shapes that say how long their longest sequence is: percent of the longest of lengths that
# are spread evenly; and the value of these.
LONGEST, AS_SPREAD = "longest_pct", 100
# The coordinates between which d is linear, finest last.
OF_LENGTHS = ("head_dim", "group", "kv_heads", "context", "sequences", LONGEST)
# Logarithms that differ by less count as equal.
SAME = 1e-9
# Most points that are left out one by one, drawn from all.
MOST_LEFT_OUT = 200
Numbers = NDArray[np.float64]
# A measured time of an op, s: less or more is no measurement.
Took = Annotated[float, Field(ge=1e-9, le=1e4)]
# The floor of an op, s.
Least = Annotated[float, Field(gt=0.0, le=1e4)]
# Range of a time from the cache over the time from memory.
WARM = 0.1, 2.0
Role = Literal["fit", "check"]
# Sources of operands, words of points.csv; other words are ignored here.
STAY, COLD = "L2", "cold"
# A coordinate, the coordinate that determines it, and the values of the latter and of the former.
_Line = tuple[int, int, tuple[Numbers, Numbers]]


@checked(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Measured:
    """One measured op: its shape as in "m=16;n=256", and the inputs to a fit; `role`: whether a fit uses it,
    or it only checks prices; `warm_s`: its time with all operands in the cache, if measured; `cache`: the
    source of its operands for `median_s`, in a word."""

    kind: str
    shape: str
    dtype: str
    launches: Count
    floor_s: Least
    median_s: Took
    role: Role = "fit"
    warm_s: Took | None = None
    cache: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise InputError(f"{self.kind} {self.shape}: dtype {self.dtype} is unknown")
        low, high = (share * self.median_s for share in WARM)
        if self.warm_s is not None and not low <= self.warm_s <= high:
            raise InputError(
                f"{self.kind} {self.shape}: warm_s: is {self.warm_s:g}; {low:g} to {high:g}"
                f" ({WARM[0]:g} to {WARM[1]:g} times median_s) is allowed"
            )
        words = [word.partition("=") for word in self.shape.split(";")]
        if len({name for name, _, _ in words}) < len(words) or not all(
            name and value.isdecimal() for name, _, value in words
        ):
            raise InputError(f'{self.kind}: shape: {self.shape!r} is not as in "m=16;n=256"')

        try:
            coordinates(self.kind, self.dimensions)
            operand_bytes(self.kind, self.dimensions)
        except (KeyError, ZeroDivisionError):
            raise InputError(f"{self.kind}: shape: {self.shape!r} is none of this kind") from None

    @cached_property
    def dimensions(self) -> Mapping[str, int]:
        """Its shape, by name."""
        words = (word.partition("=") for word in self.shape.split(";"))
        return {name: int(value) for name, _, value in words}

    @cached_property
    def place(self) -> tuple[object, ...]:
        """Kind, dtype and coordinates: equal for shapes that a card does not distinguish."""
        return _place(self.kind, self.dtype, self.dimensions)


def coordinates(kind: str, shape: Mapping[str, int]) -> Mapping[str, int]:
    """Returns the coordinates in which shapes of a kind are near each other.

    >>> shape = {"batch": 4, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "context": 1024}
    >>> dict(coordinates("decode_attention", shape))
    {'head_dim': 128, 'context': 1024, 'pairs': 32, 'group': 4}
    >>> dict(coordinates("gate", {"rows": 7, "channels": 64}))
    {'rows': 7, 'channels': 64, 'left_over': 4}
    >>> two = {"tokens": 190, "kv_tokens": 190, "pairs": 9120, "heads": 32, "rank": 128, "dim": 128}
    >>> dict(coordinates("linear_attention_prompts", two))
    {'rank': 128, 'dim': 128, 'length': 128, 'pairs': 64}
    """
    own = dict(shape)
    if kind in ("decode_attention", "speculative_attention"):
        batch, queries, heads = (own.pop(name) for name in ("batch", "q_heads", "kv_heads"))
        return {**own, "pairs": batch * heads, "group": queries // heads}
    if kind in OF_OWN:
        return OF_OWN[kind](own)
    if kind == "matmul":
        return {**own, "m": padded_rows(own["m"])}
    if kind.startswith("linear_attention_"):
        batch, heads = own.pop("batch"), own.pop("heads")
        if kind in CHUNKS:
            own["length"] = _begun(own["length"], CHUNKS[kind])
        return {**own, "pairs": batch * heads}
    return {**own, "left_over": own["rows"] % 4 + 1} if kind in BY_FOUR else own


def _paged_coordinates(shape: Mapping[str, int]) -> Mapping[str, int]:
    """Those of lengths spread evenly, and where a shape says its longest sequence what d knows it by too."""
    sequences, tokens, heads = shape["sequences"], shape["kv_tokens"], shape["kv_heads"]
    found = {
        "head_dim": shape["head_dim"],
        "context": tokens // sequences,
        "pairs": sequences * heads,
        "group": shape["q_heads"] // heads,
    }
    if "over_mean" not in shape:
        return found
    pct = longest_pct(tokens, sequences, shape["over_mean"])
    return {**found, "kv_heads": heads, "sequences": sequences, LONGEST: pct}


def longest_pct(kv_tokens: int, sequences: int, over_mean: int) -> int:
    """Returns the length of the longest of some sequences in percent of the longest of as many with as many
    tokens whose lengths are spread evenly.

    >>> longest_pct(4000, 4, 600), longest_pct(4000, 4, 0), longest_pct(4000, 1, 0)
    (100, 63, 100)
    """
    own = longest_of_spread(kv_tokens, sequences)
    return round(AS_SPREAD * longest(kv_tokens, sequences, over_mean) / max(1, own))


def _prompts_in(shape: Mapping[str, int]) -> int:
    return prompts(shape["tokens"], shape["kv_tokens"], shape["pairs"])


def _chunk_coordinates(shape: Mapping[str, int]) -> Mapping[str, int]:
    """Of a program that goes through all rows of a prompt, whole chunks of them at a time."""
    count, chunk = _prompts_in(shape), CHUNKS[PROMPTS]
    length = -(-shape["tokens"] // (count * chunk)) * chunk
    return {"rank": shape["rank"], "dim": shape["dim"], "length": length, "pairs": count * shape["heads"]}


# Kinds with coordinates of their own.
OF_OWN: Mapping[str, Callable[[Mapping[str, int]], Mapping[str, int]]] = {
    "paged_attention": _paged_coordinates,
    "prefill_attention": prompt_coordinates,
    PROMPTS: _chunk_coordinates,
}


def operand_bytes(kind: str, shape: Mapping[str, int]) -> int | None:
    """Returns the bytes of a tile's buffers, each once: inputs and sums of every sequence, and taps of a
    filter or their spectrum (complex fp32). None if the op is no tile.

    >>> shape = {"layers": 1, "batch": 4, "channels": 256, "side": 8, "outputs": 8, "stored_bytes": 4}
    >>> operand_bytes("tile_conv", shape), 4 * 256 * (4 * (8 + 8) + 15)
    (80896, 80896)
    >>> operand_bytes("tile_fft", shape), 4 * 256 * (4 * (8 + 8) + 2 * 9)
    (83968, 83968)
    """
    if kind not in TILES:
        return None
    side, outputs, stored = (shape[name] for name in ("side", "outputs", "stored_bytes"))
    whole = kind == ONE_TRANSFORM and LEAST_SIDE <= side <= MOST_SIDE and side & (side - 1) == 0
    of_filter = (
        COMPLEX_BYTES * (side + (not whole)) if kind.endswith("fft") else stored * (side + outputs - 1)
    )
    return shape["layers"] * shape["channels"] * (stored * shape["batch"] * (side + outputs) + of_filter)


def padded_rows(rows: int) -> int:
    """Returns the rows of a product after padding, as engines pad their batches: cuBLAS chooses its kernel by
    the rows, and 241 rows may take a fifth longer than 248.

    >>> [padded_rows(m) for m in (17, 64, 65, 241, 300, 1000, 3000)]
    [17, 64, 72, 248, 304, 1024, 3072]
    """
    step = next((step for most, step in STEPS if rows <= most), LAST_STEP)
    return rows if rows <= FEW_ROWS else -(-rows // step) * step


def _whole(size: int, tile: int) -> int:
    """Returns the size rounded up to whole tiles; below one tile, unchanged.

    >>> _whole(129, 64), _whole(128, 64), _whole(17, 64)
    (192, 128, 17)
    """
    return size if size <= tile else -(-size // tile) * tile


def _begun(length: int, chunk: int) -> int:
    """Returns the most rows with the same number of chunks and of full chunks. Lengths of only full chunks
    stay apart, because they may be cut into one more group.

    >>> _begun(65, 64), _begun(127, 64), _begun(128, 64)
    (127, 127, 128)
    """
    return length if length % chunk == 0 else -(-length // chunk) * chunk - 1


def whole_tiles(kind: str, shape: Mapping[str, int]) -> float:
    """Returns the work of a shape's whole tiles over its work; 1 if tiles do not matter, as in products bound
    by memory.

    >>> whole_tiles("matmul", {"m": 1536, "n": 8, "k": 8}), whole_tiles("matmul", {"m": 8, "n": 8, "k": 8})
    (1.0, 1.0)
    """
    if kind == "prefill_attention":
        return work_over_floor(shape)
    if kind == "matmul" and shape["m"] > MANY_ROWS:
        return coordinates(kind, shape)["m"] / shape["m"]
    if kind == PROMPTS:
        each = -(-shape["tokens"] // _prompts_in(shape))
        # A number of a state is as long as two of a prompt in 16 bits.
        return _chunked_work(kind, {**shape, "length": each, "states": 2})
    return _chunked_work(kind, shape) if kind in CHUNKS else 1.0


def _chunked_work(kind: str, shape: Mapping[str, int]) -> float:
    """Returns the bytes of whole chunks over the bytes of the actual rows, for a method that computes in
    chunks; the bytes of its state are the same in both.

    >>> shape = {"length": 32, "rank": 64, "dim": 64, "states": 1}
    >>> _chunked_work("linear_attention_lightning", {**shape, "length": 64})
    1.0
    >>> _chunked_work("linear_attention_fleet", {**shape, "length": 72, "block": 64, "states": 0}), 80 / 72
    (1.1111111111111112, 1.1111111111111112)
    >>> twice, states = 2 * 64 * 2 + 2 * 128, 2 * 64 * 128
    >>> shape = {"length": 72, "rank": 64, "dim": 128, "block": 64, "states": 1}
    >>> _chunked_work("linear_attention_fleet", shape) == (80 * twice + states) / (72 * twice + states)
    True
    """
    length, rank, dim = shape["length"], shape["rank"], shape["dim"]
    reads = -(-dim // shape["block"]) if kind == "linear_attention_fleet" else 1
    a_row, states = 2 * rank * reads + 2 * dim, 2 * rank * dim * shape["states"]
    share = ROWS_SHARE.get(kind, 0.0)
    rows = share * length + (1.0 - share) * _whole(length, CHUNKS[kind])
    return (rows * a_row + states) / (length * a_row + states)


def place_of(op: Op) -> tuple[object, ...]:
    """Returns the `Measured.place` of an op whose dimensions are numbers."""
    return _place(op.kind, op.dtype, {name: op[name] for name, _ in op.shape})


def _place(kind: str, dtype: str, shape: Mapping[str, int]) -> tuple[object, ...]:
    return (kind, dtype, *sorted(coordinates(kind, shape).items()))


@dataclass(frozen=True, slots=True)
class _Slices:
    """Points by their next coordinate: its values, ascending, and at each value further slices or, after the
    last coordinate, the number of a point."""

    values: Sequence[float]
    at: Sequence["_Slices | int"]


@dataclass(frozen=True, slots=True)
class _Halves:
    """Points split by whether their operands stay in the cache: the most bytes that stay, the slices of the
    points that stay and of the others, and the half (0 or 1) of each point."""

    staying_bytes: int
    slices: Sequence["_Slices | int"]
    of_point: Sequence[int]

    def of_shape(self, kind: str, shape: Mapping[str, int]) -> int | None:
        """Returns 0 if a shape's operands stay in the cache, 1 if not; None if the op is no tile."""
        works_on = operand_bytes(kind, shape)
        return None if works_on is None else int(works_on > self.staying_bytes)


@dataclass(frozen=True, slots=True)
class Correction:
    """c of one fit: points x_i [n, coordinates] and c there [n], its interval, and the coordinates that are
    equal in all points (`alike`). `kind`: of the ops; `axes`: the coordinates that no earlier one determines;
    `lines`: the others, each with the coordinate that determines it and the values of both, sorted by it;
    `shapes`: the measured shapes; `box`: the least and the greatest value of each coordinate; `cells`: those
    with a point in them (`_cell`); `halves`: the points split by whether operands stay in the cache, or None;
    `errors`: log(measured / predicted) of shapes left out one by one, one each even if coordinates are equal;
    empty if not computed. `of_lengths`: d, if it was measured. `holds_last`: whether c stays beyond the
    values of the finest coordinate, where points are on all sides in the others."""

    kind: str
    names: tuple[str, ...]
    alike: Mapping[str, int]
    points: Numbers
    axes: Sequence[int]
    lines: Sequence[_Line]
    corrections: Numbers
    slices: "_Slices | int"
    shapes: frozenset[Shape]
    box: tuple[list[float], list[float]]
    cells: frozenset[tuple[int, ...]]
    low: float
    high: float
    halves: "_Halves | None" = None
    errors: Numbers = field(default_factory=lambda: np.zeros(0))
    of_lengths: "Correction | None" = None
    holds_last: bool = False

    def price(self, fit: Fit, op: Op, launches: int, floor_s: float, detail: str) -> Price | None:
        """Returns the price of an op; None if it differs in a coordinate of `alike`, since nothing was
        measured there.

        The source is "measured" at a measured shape, "interpolated" between measured shapes, else
        "extrapolated". Then both ends of the interval are raised to the power 1 + ln(factor outside, or from
        the nearest measured shape), at least 2 if nothing was measured on some side. An extrapolated price is
        at least its floor (then the source is "roofline"); others may be lower, with operands in a cache.
        """
        # Every dimension is a number here: the fit's floor was computed from them.
        shape = {name: op[name] for name, _ in op.shape}
        own = coordinates(self.kind, shape)
        x = self._at(own)
        if x is None:
            return None
        inside = self._inside(x)
        outside = max([abs(a - b) for a, b in zip(x, inside, strict=True)], default=0.0)
        c, known = self._c(inside, self._near(shape))
        d, unsure = self._d(own)
        c += d
        source: SourceKind = "interpolated"
        if op.shape in self.shapes:
            source = "measured"
        elif outside > 0.0 or not known or self._is_far(x) or self._is_off_line(x):
            away = self._away(x)
            source, detail = "extrapolated", f"{detail}, {math.exp(away):.3g} times from what was measured"
            outside = max(outside, 1.0 if not known else away)
        fitted_s = fit.seconds(launches, whole_tiles(self.kind, shape) * floor_s) * math.exp(c)
        cached = source != "extrapolated" and fitted_s < floor_s
        least_s = 0.0 if cached else floor_s
        power, seconds = 1.0 + outside, max(least_s, fitted_s)
        if fitted_s < least_s:
            source = "roofline"
        wider = math.exp(unsure)
        low_s, high_s = interval_of(fitted_s, least_s, self.low**power / wider, self.high**power * wider)
        return Price(seconds, low_s, high_s, source, detail, cached=cached)

    def _d(self, own: Mapping[str, int]) -> tuple[float, float]:
        """Returns d at these coordinates, 0 where lengths are spread evenly or nothing else was measured; and
        by how much the interval is wider: by all of d outside what was measured, where it is only held."""
        if self.of_lengths is None or own.get(LONGEST, AS_SPREAD) == AS_SPREAD:
            return 0.0, 0.0
        x = self.of_lengths._at(own)
        if x is None:
            return 0.0, 0.0
        inside = self.of_lengths._inside(x)
        d, _ = self.of_lengths._c(inside, self.of_lengths.slices)
        return d, 0.0 if inside == x else abs(d)

    def _at(self, own: Mapping[str, int]) -> list[float] | None:
        """Returns the place of these coordinates; None if they differ from `alike`."""
        if any(own.get(name) != value for name, value in self.alike.items()):
            return None
        return [_log(own[name]) for name in self.names] if own.keys() >= {*self.names} else None

    def _inside(self, x: Sequence[float]) -> list[float]:
        """Returns the place in the box of the points that is nearest to x."""
        return [min(max(at, low), high) for at, low, high in zip(x, *self.box, strict=True)]

    def _away(self, x: Sequence[float]) -> float:
        """Returns how far the nearest point is: the log of the factor in the coordinate that differs most."""
        return float(np.abs(self.points.T - np.array(x)[:, None]).max(0, initial=0.0).min())

    def _is_far(self, x: Sequence[float]) -> bool:
        """Whether every point differs by more than FAR; points in the same cell do not."""
        return _cell(x) not in self.cells and self._away(x) > CELL

    def _near(self, shape: Mapping[str, int]) -> "_Slices | int":
        """Returns the slices of the points that give c of a shape."""
        if self.halves is None:
            return self.slices
        half = self.halves.of_shape(self.kind, shape)
        return self.slices if half is None else self.halves.slices[half]

    def _c(self, x: Sequence[float], near: "_Slices | int", without: int = -1) -> tuple[float, bool]:
        """Returns c at a place inside the box of the points, and whether points on all sides support it."""

        item = self.corrections.item

        def known(i: int) -> float | None:
            return None if i == without else item(i)

        place = [x[axis] for axis in self.axes]
        between = _mixed(near, place, 0, known, len(place) - self.holds_last)
        beside = _mixed(near, place, 0, known, 0) if between is None else between
        return beside or 0.0, between is not None

    def _is_off_line(self, x: Sequence[float]) -> bool:
        """Whether a dependent coordinate differs from its interpolation by the one that determines it."""
        return any(abs(float(np.interp(x[column], *line)) - x[i]) > SAME for i, column, line in self.lines)

    def left_out(self, i: int) -> float:
        """Returns the error of c at a point, computed without that point."""
        near = self.halves.slices[self.halves.of_point[i]] if self.halves else self.slices
        return float(self.corrections[i]) - self._c(self.points[i].tolist(), near, i)[0]

    def error(self, fit: Fit, check: Measured) -> float | None:
        """Returns log(measured / predicted) of a shape; None if this correction does not price it."""
        own = coordinates(self.kind, check.dimensions)
        x = self._at(own)
        if x is None:
            return None
        c, _ = self._c(self._inside(x), self._near(check.dimensions))
        return math.log(check.median_s / _fitted_s(fit, check)) - c - self._d(own)[0]


def _mixed(
    node: "_Slices | int", x: Sequence[float], level: int, known: Callable[[int], float | None], held: int
) -> float | None:
    """Interpolates c at x in the slices, from a coordinate on; None if they do not surround x. `known`: c of
    a point, or None; `held`: from this coordinate on, slices on one side only give the value of that side."""
    if isinstance(node, int):
        return known(node)
    values, at, place, beside = node.values, node.at, x[level], level >= held
    here = bisect_left(values, place - SAME)
    if here < len(values) and values[here] <= place + SAME:
        exact = _mixed(at[here], x, level + 1, known, held)
        if exact is not None:
            return exact
    low = high = None
    below, above = here, here - 1
    while low is None and below > 0:
        below -= 1
        low = _mixed(at[below], x, level + 1, known, held)
    # Beyond, nothing but a value of one side is wanted.
    while (low is not None or beside) and high is None and above + 1 < len(values):
        above += 1
        high = _mixed(at[above], x, level + 1, known, held)
    if low is not None and high is not None:
        share = (place - values[below]) / (values[above] - values[below])
        return (1.0 - share) * low + share * high
    return (high if low is None else low) if beside else None


def _independent(points: Numbers) -> tuple[list[int], list[_Line]]:
    """Returns the columns that no earlier one determines one to one, and the others with the column that
    does, as a tile's side determines its outputs."""
    kept, lines = list[int](), list[_Line]()
    for i, column in enumerate(points.T):
        before = next((j for j in kept if _follows(points[:, j], column)), None)
        if before is None:
            kept.append(i)
        else:
            order = np.argsort(points[:, before])
            lines.append((i, before, (points[order, before], column[order])))
    return kept, lines


def _follows(first: Numbers, second: Numbers) -> bool:
    """Whether two columns determine each other."""
    both = len(np.unique(np.stack((first, second), 1), axis=0))
    return both == len(np.unique(first)) == len(np.unique(second))


def _sliced(points: Numbers, of: Sequence[int], level: int) -> "_Slices | int":
    """Returns the slices of the points with these numbers, from a coordinate on."""
    if level == points.shape[1]:
        return of[0]
    by_value: dict[float, list[int]] = {}
    for i in of:
        by_value.setdefault(float(points[i, level]), []).append(i)
    values = sorted(by_value)
    return _Slices(values, [_sliced(points, by_value[value], level + 1) for value in values])


def correction(fit: Fit, measured: Sequence[Measured], *, judged: bool = True) -> Correction:
    """Computes c of a fit from its shapes; see the head of this file. Shapes with equal coordinates count by
    their mean. `judged`: with an interval by points left out, which takes a while; else both ends are 1.
    Raises InputError if there are no shapes, they differ in their dimensions, or one occurs twice."""
    if not measured:
        raise InputError("a correction needs at least one measured shape")
    if len({point.shape for point in measured}) < len(measured):
        raise InputError(f"{measured[0].kind}: a shape is measured twice")
    unlike = [point for point in measured if says_longest(point.dimensions)]
    if 0 < len(unlike) < len(measured):
        others = [point for point in measured if not says_longest(point.dimensions)]
        even = correction(fit, others, judged=judged)
        return replace(
            even,
            shapes=even.shapes.union(tuple(point.dimensions.items()) for point in unlike),
            of_lengths=_of_lengths(even, fit, unlike),
        )
    kind = measured[0].kind
    shapes = [coordinates(kind, point.dimensions) for point in measured]
    if any(shape.keys() != shapes[0].keys() for shape in shapes):
        raise InputError(f"{measured[0].kind}: shapes differ in which dimensions they have")
    values = {name: len({shape[name] for shape in shapes}) for name in shapes[0]}
    names = tuple(sorted((name for name in values if values[name] > 1), key=lambda name: values[name]))
    alike = {name: size for name, size in shapes[0].items() if name not in names}
    every = np.array([[_log(shape[name]) for name in names] for shape in shapes]).reshape(len(shapes), -1)
    ratios = np.log([point.median_s / _fitted_s(fit, point) for point in measured])
    points, place = np.unique(every, axis=0, return_inverse=True)
    axes, lines = _independent(points)
    found: Numbers = np.bincount(place.ravel(), ratios) / np.bincount(place.ravel())
    slices = _sliced(points[:, axes], range(len(points)), 0)
    shapes_ = frozenset(tuple(point.dimensions.items()) for point in measured)
    box, cells = (points.min(0).tolist(), points.max(0).tolist()), frozenset(map(_cell, points.tolist()))
    # Stored by coordinate, since a price reads all points.
    points = np.asfortranarray(points)
    plain = Correction(kind, names, alike, points, axes, lines, found, slices, shapes_, box, cells, 1.0, 1.0)
    most = staying_bytes(measured)
    if most is not None:
        of_point = np.zeros(len(points), int)
        of_point[place.ravel()] = [(operand_bytes(kind, p.dimensions) or 0) > most for p in measured]
        each = [_sliced(points[:, axes], np.flatnonzero(of_point == half).tolist(), 0) for half in (0, 1)]
        plain = replace(plain, halves=_Halves(most, each, of_point.tolist()))
    if not judged:
        return plain
    tried = np.random.default_rng(0).permutation(len(measured))[:MOST_LEFT_OUT]
    of = place.ravel()[tried]
    # Differences between shapes with equal coordinates are errors too, besides the error of their place.
    errors = ratios[tried] - found[of]
    if len(points) > 1:
        errors = errors + np.array([plain.left_out(int(i)) for i in of])
    low, high = interval(errors)
    return replace(plain, low=low, high=high, errors=errors)


def _of_lengths(even: Correction, fit: Fit, measured: Sequence[Measured]) -> Correction | None:
    """Computes d from shapes that say how long their longest sequence is, beside `even`, the correction of
    evenly spread lengths; shapes that `even` does not know are left out."""
    found: dict[tuple[float, ...], list[float]] = {}
    for point in measured:
        own = coordinates(point.kind, point.dimensions)
        off = even.error(fit, point)
        if off is not None:
            at = tuple(_log(own[name]) for name in OF_LENGTHS)
            found.setdefault(at, []).append(off)
            found[(*at[:-1], _log(AS_SPREAD))] = [0.0]
    if not found:
        return None
    points = np.asfortranarray(sorted(found))
    d = np.array([np.mean(found[tuple(at)]) for at in points.tolist()])
    slices, cells = _sliced(points, range(len(points)), 0), frozenset(map(_cell, points.tolist()))
    box, axes = (points.min(0).tolist(), points.max(0).tolist()), range(len(OF_LENGTHS))
    shapes = frozenset[Shape]()
    return Correction(
        even.kind, OF_LENGTHS, {}, points, axes, (), d, slices, shapes, box, cells, 1.0, 1.0, holds_last=True
    )


def staying_bytes(measured: Iterable[Measured]) -> int | None:
    """Returns the most bytes of operands of a kind of tile that stayed in the cache; None if the points do
    not say, or all are on one side. Raises InputError if some stayed and smaller ones did not."""
    sizes: dict[str, list[int]] = {STAY: [], COLD: []}
    for point in measured:
        works_on = operand_bytes(point.kind, point.dimensions)
        if works_on is not None and point.cache in sizes:
            sizes[point.cache].append(works_on)
    stay, cold = sizes.values()
    if not stay or not cold:
        return None
    if max(stay) >= min(cold):
        raise InputError(
            f"cache: a tile of {max(stay):,} bytes is {STAY} and one of {min(cold):,} {COLD}; larger ones are"
            f" {COLD}"
        )
    return max(stay)


def _fitted_s(fit: Fit, point: Measured) -> float:
    return fit.seconds(point.launches, whole_tiles(point.kind, point.dimensions) * point.floor_s)


def _log(size: int) -> float:
    """Returns the logarithm of a size, 0 for size 0."""
    return math.log(max(1, size))


def _cell(x: Sequence[float]) -> tuple[int, ...]:
    """Returns the cell of a place: in a cell, no coordinates differ by more than FAR."""
    return tuple([math.floor(at / CELL) for at in x])
