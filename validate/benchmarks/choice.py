"""Benchmarks of choices by price: `method="auto"` of linear attention, Hybrid's tiles.

    regret = time of the choice / time of the fastest - 1

A part measures the ways at a training set of shapes, writes them as a profile of granularity measured
(`interpolation`) and reads it back. Then it draws other shapes, lets the product choose by the profile's
prices, and measures the ways. It skips a way whose datasheet price (`simcore.devices.price`, no profile) is
more than SLOW times the best time so far, because that way will not be the fastest; a chosen way is always
measured. Each time our own kernels are checked against float64.

auto      bf16 with decay: our kernels, and torch's methods
hybrid    fp32: our direct sum and our transform, torch's transform and its depthwise convolution

Drawn sides are trained ones, because sides are few powers of two, but with other layers, batches and
channels; drawn sequences also have other lengths.
"""

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from simcore.devices.fitted import Birth, FittedProfile
from simcore.devices.making import Point, as_read, fits, shape_text, write_whole
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.kernels.kernel import in_double
from simcore.kernels.linear_attention.api import chosen_method, default_device, op_of
from simcore.kernels.table import TABLE
from simcore.ops.convolution import Implementation
from simcore.ops.linear_attention import METHODS, memory_bytes
from simcore.ops.op import Op, Pricer, Roofline
from simcore.studies.tiling.implementations import Lanes, cheapest, sides
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import Bar, Row, Times
from simcore.validate.benchmarks.run import SEED, Bench, relative_error, say
from simcore.validate.benchmarks.timing import capture, one_line, replayed
from simcore.validate.calibration.records import birth_of
from simcore.validate.timing.cuda_times import GRAPH_S, MOST_SETS, calls_over, operands

DRAWN = 200
SLOW = 2.0
MEDIAN_REGRET, P95_REGRET = 0.02, 0.10
# For one way in one shape.
MOST_BYTES = 16 << 30
ROUNDS = 2
# ||out - truth|| / ||truth|| of our own kernels, truth in float64.
ERROR_BARS = {"fp32": 1e-5, "bf16": 1e-2}
CACHE = f"cold: rotated over {MOST_SETS} sets at most"
# One kernel with two names is measured once, under the second.
SAME = {"linear_attention_causal_dot_product": "linear_attention_lightning"}
# Kinds with our own kernel, which may not fail.
OWN = frozenset({*SAME.values(), "linear_attention_fleet", "tile_flash_conv", "tile_flash_fft"})


class Case(Protocol):
    """A shape with several ways to compute it."""

    @property
    def ops(self) -> Mapping[str, Op]:
        """Returns the op of each way by its name, usually fast ones first."""

    def choice(self, price: Pricer) -> str:
        """Returns the way that the product chooses by these prices."""


@dataclass(frozen=True)
class Tile:
    """A square tile; see `simcore.studies.tiling.implementations`."""

    layers: int
    batch: int
    channels: int
    side: int

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """The ops by implementation."""
        names: tuple[Implementation, ...] = ("flash_fft", "flash_conv", "fft", "conv")
        return {f"tile_{name}": self._lanes.tile(name, self.side, self.side) for name in names}

    def choice(self, price: Pricer) -> str:
        """Returns Hybrid's choice for a generation with one tile of this side."""
        lanes = dict.fromkeys(sides(2 * self.side), self._lanes)
        return f"tile_{dict(cheapest(lanes, 2 * self.side, price))[self.side]}"

    @property
    def _lanes(self) -> Lanes:
        return Lanes(self.layers, 1, self.batch, self.channels, "fp32")


@dataclass(frozen=True)
class Sequences:
    """Linear attention over whole sequences, rank equal to dim; `device`: of the tensors."""

    batch: int
    heads: int
    length: int
    width: int
    device: str
    device_name: str

    @cached_property
    def ops(self) -> Mapping[str, Op]:
        """The ops by method."""
        q = self._tokens
        order = ("lightning", *(method for method in METHODS if method != "lightning"))
        return {method: op_of(method, q, q, decay=True) for method in order}

    def choice(self, price: Pricer) -> str:
        """Returns the choice of method="auto"."""
        q, decay = self._tokens, torch.ones(self.heads, device=self.device)
        return chosen_method(q, q, q, decay, device_name=self.device_name, price=price).method

    @property
    def _tokens(self) -> Tensor:
        """A tensor of this shape without memory of its own."""
        one = torch.zeros((), dtype=torch.bfloat16, device=self.device)
        return one.expand(self.batch, self.heads, self.length, self.width)


# -- shapes ----------------------------------------------------------------------------------------------

SIDES = tuple(1 << power for power in range(15))
# Few channels are drawn, because compilation for each takes longer than its measurement.
LAYERS, BATCHES, CHANNELS, DRAWN_CHANNELS = (4, 12, 36), (1, 4), (256, 768), (256, 512, 768)
MOST_NUMBERS = 1 << 26
PAIRS = ((1, 8), (1, 32), (2, 16), (4, 8), (4, 32))
LENGTHS = tuple(1 << power for power in range(6, 15))
WIDTHS = (64, 128)


def trained_tiles() -> list[Tile]:
    """Returns the training set of tiles."""
    found = (Tile(*shape) for shape in product(LAYERS, BATCHES, CHANNELS, SIDES))
    return [tile for tile in found if _fits(tile)]


def _fits(tile: Tile) -> bool:
    return tile.layers * tile.batch * tile.channels * tile.side <= MOST_NUMBERS


def drawn_tiles(count: int, seed: int = SEED) -> list[Tile]:
    """Returns tiles outside the training set."""
    draw, known, found = random.Random(seed), set(trained_tiles()), list[Tile]()
    while len(found) < count:
        layers, batch = draw.randint(LAYERS[0], LAYERS[-1]), draw.randint(BATCHES[0], BATCHES[-1])
        tile = Tile(layers, batch, draw.choice(DRAWN_CHANNELS), draw.choice(SIDES))
        if tile not in known and _fits(tile):
            known.add(tile)
            found.append(tile)
    return found


def trained_sequences(device: str, device_name: str) -> list[Sequences]:
    """Returns the training set of sequences."""
    shapes = product(PAIRS, LENGTHS, WIDTHS)
    return [Sequences(*pair, length, width, device, device_name) for pair, length, width in shapes]


def drawn_sequences(count: int, device: str, device_name: str, seed: int = SEED) -> list[Sequences]:
    """Returns sequences outside the training set, with log-uniform lengths."""
    draw, known, found = random.Random(seed), set(trained_sequences(device, device_name)), list[Sequences]()
    while len(found) < count:
        length = round(math.exp(draw.uniform(math.log(LENGTHS[0]), math.log(LENGTHS[-1]))))
        batch, heads = draw.randint(1, 4), draw.choice((8, 16, 24, 32))
        one = Sequences(batch, heads, length, draw.choice(WIDTHS), device, device_name)
        if one not in known:
            known.add(one)
            found.append(one)
    return found


# -- measuring with any clock ----------------------------------------------------------------------------

Clock = Callable[[Op], Times | None]  # None: it could not be measured


def measured(case: Case, clock: Clock, datasheet: Pricer, chosen: str | None = None) -> dict[str, Times]:
    """Returns the times of the ways that may be fastest; see the head of this file."""
    found, by_kind, best_s = dict[str, Times](), dict[str, Times | None](), math.inf
    for way, op in case.ops.items():
        if way != chosen and datasheet(op).seconds > SLOW * best_s:
            continue
        kind = SAME.get(op.kind, op.kind)
        if kind not in by_kind:
            by_kind[kind] = clock(op)
        times = by_kind[kind]
        if times is not None:
            found[way] = times
            best_s = min(best_s, times.median_s)
    return found


def trained(
    shapes: Sequence[Case], clock: Clock, datasheet: Pricer, floor: Roofline
) -> Iterator[tuple[Case, str, Point]]:
    """Yields a point for each way that may be fastest at each shape."""
    for case in shapes:
        for way, times in measured(case, clock, datasheet).items():
            op = case.ops[way]
            launches, floor_s = launches_and_floor(op, floor)
            point = Point(op, launches, floor_s, times.median_s, times.p10_s, times.p90_s, times.n, CACHE)
            yield case, way, point


@dataclass(frozen=True, slots=True)
class Chosen:
    """A drawn shape: the chosen way, the times of the ways, and their predictions."""

    case: Case
    way: str
    times: Mapping[str, Times]
    predicted_s: Mapping[str, float]

    @property
    def best(self) -> str:
        """The fastest way."""
        return min(self.times, key=lambda way: self.times[way].median_s)

    @property
    def regret(self) -> float | None:
        """See the head of this file; None if the choice could not be measured."""
        if self.way not in self.times:
            return None
        return self.times[self.way].median_s / self.times[self.best].median_s - 1.0


def chosen(case: Case, clock: Clock, datasheet: Pricer, price: Pricer) -> Chosen:
    """Returns the choice by a price at a shape, with the times of the ways."""
    way = case.choice(price)
    predicted = {name: price(op).seconds for name, op in case.ops.items()}
    return Chosen(case, way, measured(case, clock, datasheet, way), predicted)


def regret_bars(name: str, found: Sequence[Chosen]) -> list[Bar]:
    """Returns whether choices by price cost little; a choice that cannot be measured fails."""
    regrets = [one.regret for one in found if one.regret is not None]
    at = f"{len(regrets)} of {len(found)} shapes"
    bars = []
    for words, q, limit in (("median", 50, MEDIAN_REGRET), ("95th percentile", 95, P95_REGRET)):
        value = float(np.percentile(regrets, q)) if len(regrets) == len(found) and found else None
        title = f"{name}: {words} of regret under {100 * limit:.0f} %"
        bars.append(cases.bar(title, {at: value} if found else {}, ".2%", below=limit))
    return bars


# -- the profile -----------------------------------------------------------------------------------------


def write_profile(name: str, device: str, points: Sequence[Point], birth: Birth, target: Path) -> None:
    """Writes a profile of granularity measured into a folder that `load_profile` reads."""
    profile = FittedProfile(
        name=name,
        title=f"{birth.processor}, kernels of this project and torch's",
        source=f"measured by python -m simcore.validate.benchmarks.kernels, {len(points)} shapes, "
        "captured graphs",
        device=device,
        granularity="measured",
        # The time of a captured graph already includes its cost around a kernel.
        fits=fits(points, {}, 0.0, CACHE),
        overheads={},
        birth=birth,
        notes=(f"a way is not measured where its datasheet price is over {SLOW:g} times the best time",),
        points=tuple(as_read(point) for point in points),
    )
    write_whole(profile, points, target)


# -- on the device ---------------------------------------------------------------------------------------


def clock_of(bench: Bench) -> Clock:
    """Returns a clock that times an op's kernel of `TABLE` in captured graphs over rotated buffers."""

    def clock(op: Op) -> Times | None:
        try:
            return _timed(op, bench)
        except Exception as error:
            torch.cuda.synchronize()
            say(f"  {op.kind} {shape_text(op)}: {one_line(error)}")
            if op.kind in OWN:
                bench.failed.append(f"{op.kind} {shape_text(op)}: {one_line(error)}")
            return None
        finally:
            torch.cuda.empty_cache()

    return clock


def _timed(op: Op, bench: Bench) -> Times | None:
    """Times an op in a graph of whole rounds over the sets of buffers; None if they need too much memory."""
    if op.kind.startswith("linear_attention") and memory_bytes(op) > MOST_BYTES:
        return None
    kernel = TABLE[op.kind]
    sets = operands(kernel, op, bench.card.l2_bytes)
    if op.kind in OWN:
        _check(op, sets[0])
    calls, took_s = calls_over(kernel, op, sets)
    # A graph of such long calls needs few replays; all replays of a method of 90 ms would take minutes.
    graph, quick = capture(calls), bench.quick or took_s > GRAPH_S
    return cases.times([replayed(graph, len(calls), quick=quick) for _ in range(ROUNDS)])


def _check(op: Op, operands: Sequence[Tensor]) -> None:
    """Raises ValueError if the error of our kernel is above its bar."""
    linear = op.kind.startswith("linear_attention")
    reference = TABLE["linear_attention_lightning" if linear else op.kind].reference
    found = TABLE[op.kind].run(op, *(x.clone() for x in operands))
    truth = reference(op, *map(in_double, operands))
    pairs = zip(found, truth, strict=True) if linear else [(found, truth)]
    error = max(relative_error(*pair) for pair in pairs)
    if not error <= ERROR_BARS[op.dtype]:
        raise ValueError(f"WRONG: error {error:.2e} > {ERROR_BARS[op.dtype]:.0e}")


# -- parts -----------------------------------------------------------------------------------------------


def auto(bench: Bench) -> list[Bar]:
    """Runs the part `auto`."""
    device = default_device(torch.device("cuda"))
    drawn = drawn_sequences(DRAWN, "cuda", device)
    return _part("auto", "linear_attention", device, trained_sequences("cuda", device), drawn, bench)


def hybrid(bench: Bench) -> list[Bar]:
    """Runs the part `hybrid`."""
    device = default_device(torch.device("cuda"))
    return _part("hybrid", "convolution", device, trained_tiles(), drawn_tiles(DRAWN), bench)


def _part(
    name: str, family: str, device: str, training: Sequence[Case], drawn: Sequence[Case], bench: Bench
) -> list[Bar]:
    spec = load_device(device)
    datasheet, floor = pricer(spec), roofline(spec)
    clock = clock_of(bench)
    rows, points = list[Row](), list[Point]()
    for _, way, point in trained(training, clock, datasheet, floor):
        points.append(point)
        rows.append(row_of(way, point.op, _times(point), "trained"))
    target = bench.out / "profiles" / device / name
    born = bench.birth
    versions = {"torch": born.torch, "triton": born.triton, "driver": born.driver}
    reached = {"read_bytes_per_s": born.read_bytes_per_s, "node_s": born.node_s}
    birth = birth_of(points, born.device, versions, reached, threads=1)
    write_profile(name, device, points, birth, target)
    say(f"{len(points)} points of {len(training)} shapes in {target}")
    price = pricer(spec, profile=load_profile(device, str(target)))
    found = list[Chosen]()
    for case in drawn:
        one = chosen(case, clock, datasheet, price)
        found.append(one)
        for way, times in one.times.items():
            said = "chosen" if way == one.way else "drawn"
            rows.append(row_of(way, case.ops[way], times, said, one.predicted_s[way]))
    bench.save(name, rows, family)
    for line in lines(found):
        say(line)
    return regret_bars(name, found)


def _times(point: Point) -> Times:
    return Times(point.median_s, point.p10_s, point.p90_s, point.runs, point.median_s, point.median_s)


def row_of(way: str, op: Op, times: Times, role: str, predicted_s: float | None = None) -> Row:
    """Returns a line of a part's table; `role`: trained, drawn, or drawn and chosen."""
    shape = {"shape": shape_text(op), "dtype": op.dtype, "role": role, "predicted_s": predicted_s}
    return Row(
        op=op.kind,
        implementation=way,
        version="simcore" if op.kind in SAME or op.kind in OWN else f"torch {torch.__version__}",
        shape=shape,
        hbm_bytes=int(op.work.hbm_bytes),
        error=None,
        error_bar=cases.PEER_ERROR_BAR,
        times=times,
        cache_state=CACHE,
    )


def lines(found: Sequence[Chosen]) -> list[str]:
    """Describes how often each way was chosen and fastest, the errors of prices, and the worst choices."""
    ways = dict.fromkeys(way for one in found for way in one.times)
    texts = []
    for way in ways:
        off = [one.predicted_s[way] / one.times[way].median_s - 1.0 for one in found if way in one.times]
        texts.append(
            f"{way}: chosen {sum(one.way == way for one in found)} times, fastest "
            f"{sum(one.best == way for one in found if one.times)} times of {len(off)}; "
            f"prices off by {100 * statistics.median(map(abs, off)):.1f} %"
        )
    worst = sorted((one for one in found if one.regret), key=lambda one: -(one.regret or 0.0))
    for one in worst[:5]:
        took, best = (cases.micro(one.times[way]) for way in (one.way, one.best))
        text = shape_text(one.case.ops[one.way])
        texts.append(f"{text}: {one.way} {took} us, {one.best} {best} us")
    return texts
