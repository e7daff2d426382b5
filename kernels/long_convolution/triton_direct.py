"""Square tiles of a long convolution by direct sums, all layers, sequences and channels in one launch.

    z_(U+v) += sum over u < U of  y_u k_(U+v-u)               for v = 0 .. outputs - 1, outputs <= U = side

A thread has one channel, with `sums` sums in registers and as many inputs at a time. For R sums and R inputs
it needs R inputs and 2 R - 1 taps, half of which it has from the inputs before, so that 2 R loads serve R^2
products. Threads of a program have other sums and sequences of the same channels, and find their inputs and
taps in the cache. While a block of inputs is summed, the next block is in flight.

Layouts: `simcore.kernels.long_convolution.tensors`; sums are made in fp32.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_powers, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import PROCESSORS, gpu_of, launching
from simcore.kernels.long_convolution.moved import (
    Moved,
    check_moved,
    is_elsewhere,
    moved_arguments,
    rows_further,
)
from simcore.kernels.long_convolution.register_fft import longer
from simcore.kernels.long_convolution.tensors import put_back, wide
from simcore.kernels.long_convolution.triton_rows import (
    cdiv,
    check_operands,
    filter_strides,
    power_below,
)

# Channels of a warp: one a thread.
LANES = 32
# The most sums of a thread; with as many inputs and twice as many taps they fill half its registers.
MOST_SUMS = 16
# The fewest warps that keep a multiprocessor busy, and the most of a program.
BUSY_WARPS, MOST_WARPS = 4, 4
# The most programs of one warp that a multiprocessor should have to start.
MOST_PROGRAMS = 16
# The limit of a grid's second and third dimension: blocks of sums and sequences, and layers.
MOST_BLOCKS = 65535


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """The layout of a tile: a program has `blocks` blocks of `sums` outputs, of `sequences` sequences and
    `channels` channels, one in each thread."""

    sums: int
    blocks: int
    sequences: int
    channels: int
    chained: bool = False

    def __post_init__(self) -> None:
        check_powers(self, "sums", "blocks", "sequences", "channels")

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return max(1, self.blocks * self.sequences * self.channels // LANES)


def direct_config(
    *,
    layers: int,
    batch: int,
    outputs: int,
    channels: int,
    processors: int = PROCESSORS,
    chained: bool = True,
) -> DirectConfig:
    """Returns the layout for z [layers, batch, outputs, channels]: as many sums a thread as leave enough
    threads to keep a GPU busy, because more sums a thread need fewer loads.

    >>> direct_config(layers=18, batch=1, outputs=64, channels=256)
    DirectConfig(sums=16, blocks=1, sequences=1, channels=32, chained=True)
    >>> direct_config(layers=18, batch=1, outputs=16, channels=256)
    DirectConfig(sums=4, blocks=1, sequences=1, channels=32, chained=True)
    >>> direct_config(layers=36, batch=1, outputs=16, channels=768)
    DirectConfig(sums=16, blocks=1, sequences=1, channels=32, chained=True)
    """
    rows = layers * batch * cdiv(channels, LANES)
    sums = min(MOST_SUMS, triton.next_power_of_2(outputs))
    while sums > 4 and rows * cdiv(outputs, sums) < BUSY_WARPS * processors:
        sums //= 2
    together, width = min(MOST_WARPS, power_below(batch)), LANES
    programs = rows * cdiv(outputs, sums) // together
    while together * width < MOST_WARPS * LANES and programs * LANES > MOST_PROGRAMS * processors * width:
        width *= 2
    # One block a program: neighbouring programs also find in the cache the data that other blocks read.
    return DirectConfig(sums, 1, together, width, chained)


def direct_config_for(z: Tensor) -> DirectConfig:
    """Returns the layout for z [layers, batch, outputs, channels] on its device."""
    layers, batch, outputs, channels = z.shape
    gpu = gpu_of(z)
    return direct_config(
        layers=layers,
        batch=batch,
        outputs=outputs,
        channels=channels,
        processors=gpu.processors,
        chained=gpu.chained,
    )


@launching
def direct_tile(
    y: Tensor, taps: Tensor, z: Tensor, *, moved: Moved | None = None, config: DirectConfig | None = None
) -> Tensor:
    """Adds the terms of y [layers, batch, side, channels] to z [layers, batch, outputs, channels] in place
    and returns z; with `moved`, so many rows further. At most as many outputs as inputs; taps [layers, 1 or
    batch, side + outputs - 1, channels], from lag 1 on. Raises ValueError for tensors that do not fit."""
    check_tile(y, taps, z)
    check_moved(moved)
    if 0 in z.shape:
        return z
    config = config or direct_config_for(z)
    (layers, batch, outputs, channels), side = z.shape, y.shape[2]
    across = config.sums * config.blocks
    grid = (
        cdiv(channels, config.channels),
        cdiv(outputs, across) * cdiv(batch, config.sequences),
        layers,
    )
    if max(grid[1:]) > MOST_BLOCKS:
        raise ValueError(
            f"z {kind(z)} has more than {MOST_BLOCKS} layers, or blocks of outputs and sequences"
        )
    whole = outputs % across == 0 and side % config.sums == 0
    _direct_tile_kernel[grid](
        y, taps, z, *moved_arguments(moved), outputs, batch, channels,
        *y.stride()[:2], *filter_strides(taps)[:2], *z.stride()[:2],
        # Known to the compiler, a row costs no arithmetic before its load.
        Y_ROW=y.stride(2), TAPS_ROW=taps.stride(2), Z_ROW=z.stride(2),
        SIDE=side, SUMS=config.sums, BLOCKS=config.blocks, SEQUENCES=config.sequences, WIDTH=config.channels,
        WHOLE=whole and batch % config.sequences == 0 and channels % config.channels == 0,
        MOVED=moved is not None, **launched(config.warps, config.chained),
    )  # fmt: skip
    return z


def check_tile(y: Tensor, taps: Tensor, z: Tensor) -> None:
    """Raises ValueError unless y, taps and z of a tile fit together."""
    side, outputs = (x.shape[2] if x.dim() == 4 else 0 for x in (y, z))
    check_operands(y, taps, z, outputs, (max(0, side + outputs - 1),))
    if not 0 < outputs <= side:
        raise ValueError(f"z has {outputs} outputs; a tile of side {side} has 1 to {side}")


@triton.jit(do_not_specialize=["origin", "last"])
def _direct_tile_kernel(
    y_ptr, taps_ptr, z_ptr, position_ptr, origin, last, outputs, batch, channels,
    y_layer, y_sequence, taps_layer, taps_sequence, z_layer, z_sequence,
    Y_ROW: tl.constexpr, TAPS_ROW: tl.constexpr, Z_ROW: tl.constexpr,
    SIDE: tl.constexpr, SUMS: tl.constexpr, BLOCKS: tl.constexpr, SEQUENCES: tl.constexpr,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr, MOVED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, blocks of outputs * blocks of sequences, layers). Every number is a tensor
    [BLOCKS * SEQUENCES, WIDTH], one element a thread; those that a thread has several of are tuples."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if MOVED:
        if is_elsewhere(position_ptr, origin, last):
            return
        further = rows_further(position_ptr, origin, last)
        y_ptr += further * Y_ROW
        z_ptr += further * Z_ROW
    across = tl.cdiv(outputs, BLOCKS * SUMS)
    layer = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    part = tl.arange(0, BLOCKS * SEQUENCES)[:, None]
    first = (tl.program_id(1) % across * BLOCKS + part % BLOCKS) * SUMS
    sequence = tl.program_id(1) // across * SEQUENCES + part // BLOCKS
    inside = (column < channels) & (sequence < batch)
    # The product of input u and output v takes tap SIDE - 1 - u + v. For a block of inputs, the last of them
    # first, the first output takes the taps `low`; from the second output on also taps of `high`.
    tap = SIDE - SUMS + first
    lags = SIDE + outputs - 1

    y_at = y_ptr + layer * y_layer + sequence.to(tl.int64) * y_sequence + column
    taps_at = taps_ptr + layer * taps_layer + sequence.to(tl.int64) * taps_sequence + column
    taps_at += tap.to(tl.int64) * TAPS_ROW
    z_at = z_ptr + layer * z_layer + sequence.to(tl.int64) * z_sequence + column
    z_at += first.to(tl.int64) * Z_ROW
    high = _rows(taps_at + SUMS * TAPS_ROW, TAPS_ROW, tap + SUMS, lags, inside, SUMS - 1, WHOLE)
    high = longer(high, tl.zeros((BLOCKS * SEQUENCES, WIDTH), tl.float32))
    low = _rows(taps_at, TAPS_ROW, tap, lags, inside, SUMS, WHOLE)
    y = _rows(y_at, Y_ROW, 0 * first, SIDE, inside, SUMS, WHOLE)
    sums = _rows(z_at, Z_ROW, first, outputs, inside, SUMS, WHOLE)
    for u in tl.range(SUMS, SIDE, SUMS):
        y_at += SUMS * Y_ROW
        taps_at -= SUMS * TAPS_ROW
        next_y = _rows(y_at, Y_ROW, u + 0 * first, SIDE, inside, SUMS, WHOLE)
        next_low = _rows(taps_at, TAPS_ROW, tap - u, lags, inside, SUMS, WHOLE)
        sums = _products_added(sums, y, low + high, SUMS)
        y, high, low = next_y, low, next_low
    sums = _products_added(sums, y, low + high, SUMS)
    for v in tl.static_range(SUMS):
        tl.store(z_at + v * Z_ROW, sums[v].to(z_ptr.dtype.element_ty), mask=inside & (first + v < outputs))


@triton.jit
def _rows(at, STRIDE: tl.constexpr, first, end, inside, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """COUNT rows from `at` on, in fp32; `first` is the number of the first of them: those below 0 and from
    `end` on are zeros."""
    rows = ()
    for i in tl.static_range(COUNT):
        if WHOLE:
            x = tl.load(at + i * STRIDE)
        else:
            there = inside & (first + i >= 0) & (first + i < end)
            x = tl.load(at + i * STRIDE, mask=there, other=0.0)
        rows = longer(rows, x.to(tl.float32))
    return rows


@triton.jit
def _products_added(sums, y, taps, SUMS: tl.constexpr):
    """Adds to each sum v the products of all inputs u with taps SUMS - 1 - u + v."""
    for u in tl.static_range(SUMS):
        added = ()
        for v in tl.static_range(SUMS):
            added = longer(added, sums[v] + y[u] * taps[SUMS - 1 - u + v])
        sums = added
    return sums


def reference_direct_tile(y: Tensor, taps: Tensor, z: Tensor) -> Tensor:
    """As `direct_tile` in plain torch, any float dtype, one input after another."""
    side, outputs = y.shape[2], z.shape[2]
    y, taps, total = wide(y), wide(taps), wide(z)
    for u in range(side):
        total.addcmul_(y[:, :, u : u + 1], taps[:, :, side - 1 - u : side - 1 - u + outputs])
    return put_back(total, z)
