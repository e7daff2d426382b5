"""Benchmarks of long convolutions: square tiles beside torch's ways, and the rows of the baselines.

    tile      z_(U+v) += sum over u of  y_u k_(U+v-u)          bytes: y and taps read, z read and written
    lazy      z_t     += sum over i < t of  y_i k_(t-i)        bytes: y and taps read
    eager     z_(t+j) += y_t k_j                               bytes: taps read, z read and written

for all layers and channels at once, one sequence, fp32. torch's ways are those that Flash Inference compares
(section 4.1): a transform with cached spectra, a depthwise convolution, and the plain sum, compiled.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from simcore.kernels.long_convolution.triton_direct import direct_tile
from simcore.kernels.long_convolution.triton_fft import (
    LEAST,
    LONGEST_SIDE,
    fft_config_for,
    fft_space,
    fft_tile,
    right_angle_spectrum,
)
from simcore.kernels.long_convolution.triton_rows import (
    RowConfig,
    conv_column,
    conv_row,
    row_config_for,
    row_space,
)
from simcore.kernels.long_convolution.triton_toeplitz import PRECISIONS, toeplitz_config, toeplitz_tile
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import Compared, Goal, within
from simcore.validate.benchmarks.peers import Candidate
from simcore.validate.benchmarks.run import TORCH, Bench, Trial, Way, compare

WORD = 4
# Largest side that is also tried as a direct sum.
DIRECT_SIDE = 128
# Largest side tried as products of Toeplitz and Hankel matrices, whose work is quadratic in the side.
TOEPLITZ_SIDE = 512
# Largest side of torch's sums, whose work also grows with the square: there they take 3 (compiled) and 8
# times (as a convolution) as long as its transforms on an H200. Smallest side of transforms, which still take
# 5 times as long as sums there.
SUM_SIDE, TRANSFORM_SIDE = 512, 16
# Length of a graph, by its floor, that always suffices.
GRAPH_S = 2e-3
ERROR_BARS = {"direct": 1e-5, "transform": 1e-5, "row": 1e-5, "column": 1e-5}
ERROR_BARS |= {"toeplitz tf32x3": 1e-5, "toeplitz tf32": 1e-3, "toeplitz bf16": 1e-2}
MODELS = ((18, 256), (36, 768))
POSITIONS = (1024, 16384, 65536)


@dataclass(frozen=True, slots=True)
class Tile:
    """A square tile of all layers."""

    layers: int
    channels: int
    side: int
    op: ClassVar[str] = "tile"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "dtype": "fp32"}

    @property
    def hbm_bytes(self) -> int:
        """y, 2 side taps, z read and written: each number once."""
        return WORD * self.layers * self.channels * 5 * self.side

    def __str__(self) -> str:
        return f"{self.layers} x {self.channels}, side {self.side}"


@dataclass(frozen=True, slots=True)
class Line:
    """One position of a baseline: `kind` "lazy" or "eager", over `positions` other positions."""

    kind: str
    layers: int
    channels: int
    positions: int

    @property
    def op(self) -> str:
        """The name in tables."""
        return f"{self.kind} position"

    @property
    def columns(self) -> dict[str, object]:
        """Returns its shape, as in tables."""
        return {**asdict(self), "dtype": "fp32"}

    @property
    def hbm_bytes(self) -> int:
        """Lazy reads two numbers for each position; eager reads two and writes one."""
        return WORD * self.layers * self.channels * self.positions * (2 if self.kind == "lazy" else 3)

    def __str__(self) -> str:
        return f"{self.kind}, {self.layers} x {self.channels} at {self.positions}"


# Longest first, so that a run that is cut short includes them.
TILES = tuple(Tile(*model, 1 << power) for model in reversed(MODELS) for power in reversed(range(15)))
LINES = tuple(
    Line(kind, *model, positions) for kind in ("lazy", "eager") for model in MODELS for positions in POSITIONS
)


class Operands(NamedTuple):
    """One set of buffers: y, taps from lag 0 on, z, and the earlier contents of z."""

    y: Tensor
    taps: Tensor
    z: Tensor
    before: Tensor


Add = Callable[[], Tensor]  # adds to the z of one set, and returns it
Ways = Iterator[Way]


def drawn(
    layers: int, channels: int, inputs: int, lags: int, outputs: int, generator: torch.Generator
) -> Operands:
    """Returns random numbers; taps decay, so that all outputs have a similar size."""

    def normal(positions: int) -> Tensor:
        size = layers, 1, positions, channels
        return torch.randn(size, generator=generator, device=generator.device)

    taps = normal(lags) / torch.arange(1, lags + 1, device=generator.device)[:, None]
    before = normal(outputs)
    return Operands(normal(inputs), taps, before.clone(), before)


def tile_truth(one: Operands) -> Tensor:
    """Returns the tile in float64, layer by layer, by a transform long enough that nothing wraps."""
    side = one.y.shape[2]
    order = 4 * side
    found = []
    for y, taps, z in zip(one.y, one.taps, one.before, strict=True):
        bins = torch.fft.rfft(y.double(), order, dim=1) * torch.fft.rfft(taps.double(), order, dim=1)
        found.append(z + torch.fft.irfft(bins, order, dim=1)[:, side : 2 * side])
    return torch.stack(found)


def line_truth(kind: str, one: Operands) -> Tensor:
    """Returns a baseline's position in float64, layer by layer."""
    found = []
    for y, taps, z in zip(one.y.double(), one.taps.double(), one.before.double(), strict=True):
        more = (y * taps[:, 1:].flip(1)).sum(1, keepdim=True) if kind == "lazy" else y * taps[:, 1:]
        found.append(z + more)
    return torch.stack(found)


# -- torch's ways ----------------------------------------------------------------------------------------


def by_transform(y: Tensor, cached: Tensor, z: Tensor) -> Tensor:
    """Computes the cyclic transform of order 2 side with cached spectra (App. C)."""
    side = y.shape[2]
    both = torch.fft.irfft(torch.fft.rfft(y, 2 * side, dim=2) * cached, 2 * side, dim=2)
    return z.add_(both[:, :, side:])


def turned(taps: Tensor) -> Tensor:
    """Returns taps as the weights of a depthwise convolution: [layers channels, 1, 2 side - 1]."""
    return taps[:, 0, 1:].flip(1).transpose(1, 2).flatten(0, 1)[:, None].contiguous()


def by_convolution(y: Tensor, weight: Tensor, z: Tensor) -> Tensor:
    """Computes a depthwise convolution with `turned` taps."""
    layers, batch, side, channels = y.shape
    rows = functional.pad(y.permute(1, 0, 3, 2).reshape(batch, layers * channels, side), (side - 1,) * 2)
    made = functional.conv1d(rows, weight, groups=layers * channels)
    return z.add_(made.view(batch, layers, channels, side).permute(1, 0, 3, 2))


def by_sum(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Computes the plain sum over windows of the taps."""
    windows = taps[:, :, 1:].unfold(2, y.shape[2], 1)
    return z.add_((windows * y.flip(2).transpose(2, 3)[:, :, None]).sum(-1))


def by_row(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Lazy: sums all inputs before a position."""
    return z.add_((y * taps[:, :, 1:].flip(2)).sum(2, keepdim=True))


def by_column(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """Eager: adds to all outputs behind a position."""
    return z.addcmul_(y, taps[:, :, 1:])


def _calls(
    add: Callable[[Tensor, Tensor, Tensor], Tensor], sets: Sequence[Operands], filters: Sequence[Tensor]
) -> list[Add]:
    return [partial(add, one.y, k, one.z) for one, k in zip(sets, filters, strict=True)]


def _ours(name: str, config: str, calls: list[Add]) -> Way:
    return Way(name, [Candidate(config, calls)], ERROR_BARS[name])


def _torchs(name: str, calls: list[Add]) -> Way:
    return Way(name, [Candidate("", calls)], version=TORCH)


def _compiled(add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return torch.compile(add, fullgraph=True, dynamic=False)


def positions_last(sets: Sequence[Operands]) -> list[Operands]:
    """Returns views of the same shapes with the positions of a channel adjacent in memory, which suits
    torch's transforms and convolutions."""
    return [Operands(*(x.mT.contiguous().mT for x in one)) for one in sets]


def torch_tiles(sets: Sequence[Operands], side: int, order: str = "") -> Ways:
    """Yields torch's ways to make a tile; `order`: of the operands in memory."""
    taps = [one.taps for one in sets]
    if side >= TRANSFORM_SIDE:
        cached = [torch.fft.rfft(k, dim=2) for k in taps]
        yield _torchs(f"FFT{order}", _calls(by_transform, sets, cached))
        yield _torchs(f"compiled FFT{order}", _calls(_compiled(by_transform), sets, cached))
    if side <= SUM_SIDE:
        yield _torchs(f"conv1d{order}", _calls(by_convolution, sets, [turned(k) for k in taps]))
        yield _torchs(f"compiled sum{order}", _calls(_compiled(by_sum), sets, taps))


def own_tiles(sets: Sequence[Operands], side: int) -> Ways:
    """Yields our tiles: by the sum; in each precision as products of Toeplitz matrices; by transforms."""
    later = [one.taps[:, :, 1:] for one in sets]
    if side <= DIRECT_SIDE:
        yield _ours("direct", "", _calls(direct_tile, sets, later))
    if not LEAST <= side <= LONGEST_SIDE:
        return
    if side <= TOEPLITZ_SIDE:
        for precision in PRECISIONS:
            toeplitz = toeplitz_config(side=side, outputs=side, precision=precision)
            add_products = partial(toeplitz_tile, precision=precision, config=toeplitz)
            yield _ours(f"toeplitz {precision}", str(toeplitz), _calls(add_products, sets, later))
    config = fft_config_for(sets[0].y)
    spectra = [right_angle_spectrum(one.taps, side) for one in sets]
    space = None if config.fused else fft_space(sets[0].y, config)
    yield _ours(
        "transform", str(config), _calls(partial(fft_tile, config=config, space=space), sets, spectra)
    )


def lines_ways(sets: Sequence[Operands], kind: str) -> Ways:
    """Yields our way and torch's ways to a baseline's position."""
    taps, later = [one.taps for one in sets], [one.taps[:, :, 1:] for one in sets]
    if kind == "lazy":
        config = row_config_for(sets[0].y, sets[0].taps)
        row = partial(_row, space=row_space(sets[0].y, config), config=config)
        yield _ours("row", "", _calls(row, sets, later))
    else:
        yield _ours("column", "", _calls(_column, sets, later))
    add = by_row if kind == "lazy" else by_column
    yield _torchs("eager torch", _calls(add, sets, taps))
    yield _torchs("compiled", _calls(_compiled(add), sets, taps))


def _row(y: Tensor, taps: Tensor, z: Tensor, *, space: Tensor, config: RowConfig) -> Tensor:
    conv_row(y, taps, z[:, :, 0], space=space, config=config)
    return z


def _column(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    conv_column(y[:, :, 0], taps, z)
    return z


# -- one case --------------------------------------------------------------------------------------------


def _compared(
    of: Tile | Line,
    sets: Sequence[Operands],
    truths: Sequence[Tensor],
    ways: Ways,
    bench: Bench,
    others_sets: Sequence[Operands] = (),
) -> Compared:
    """`truths`: of the first and last set; `others_sets`: the same numbers in another memory layout.

    Checks begin with the initial z; in a graph each set's z is added to several times."""
    calls = cases.calls_of(len(sets), cases.least_calls(bench.floor_s(of), GRAPH_S))
    in_graph = sets[-1].before + calls // len(sets) * (truths[-1] - sets[-1].before)

    def restore() -> None:
        for one in (*sets, *others_sets):
            one.z.copy_(one.before)

    all_ways = (replace(way, in_graph=in_graph) for way in ways)
    return compare(of, Trial(all_ways, truths, restore, len(sets), of.hbm_bytes, calls), bench)


def tile_case(of: Tile, bench: Bench) -> Compared:
    """Compares our tiles with torch's, torch's in both memory orders."""
    shape = of.layers, of.channels, of.side, 2 * of.side, of.side
    sets = bench.rotated(partial(drawn, *shape), of.hbm_bytes)
    last = positions_last(sets)
    ways = chain(
        own_tiles(sets, of.side),
        torch_tiles(sets, of.side),
        torch_tiles(last, of.side, ", positions last"),
    )
    return _compared(of, sets, [tile_truth(sets[0]), tile_truth(sets[-1])], ways, bench, last)


def line_case(of: Line, bench: Bench) -> Compared:
    """Compares our and torch's ways to a baseline's position."""
    inputs, outputs = (of.positions, 1) if of.kind == "lazy" else (1, of.positions)
    shape = of.layers, of.channels, inputs, of.positions + 1, outputs
    sets = bench.rotated(partial(drawn, *shape), of.hbm_bytes)
    truths = [line_truth(of.kind, sets[0]), line_truth(of.kind, sets[-1])]
    return _compared(of, sets, truths, lines_ways(sets, of.kind), bench)


TILE_GOALS = (
    Goal("tiles never slower than torch's", least=1.0),
    Goal("sides 64 to 1024 2.5 times as fast", of=within("side", 64, 1024), least=2.5),
    Goal("longer sides 1.5 times as fast", of=within("side", 1025), least=1.5),
    Goal(
        "sides 256 to 1024 within 3 times the floor", lambda one: one.over_floor, within("side", 256, 1024),
        most=3.0,
    ),
)  # fmt: skip
LINE_GOALS = (Goal("baselines never slower than torch's", least=1.0),)
