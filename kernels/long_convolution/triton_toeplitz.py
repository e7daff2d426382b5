"""Square tiles of a long convolution as products on tensor cores, all layers, sequences and channels in one
launch.

    z_(U+v) += sum over u < U of  y_u k_(U+v-u)               for v = 0 .. outputs - 1, outputs <= U = side

With v = i b + r and u = p + r each channel's sums are a product of a Toeplitz and a Hankel matrix,

    Z[i, r] = sum over p of  K[i, p] Y[p, r],     K[i, p] = k_(U + i b - p),     Y[p, r] = y_(p + r)

over p from -b + 1 to U - 1, with y zero outside. Both matrices hold each number many times, so neither is
ever made. A warp holds its channels' taps and inputs once, in its threads' registers, and a shuffle makes
each fragment that an instruction takes. From one block of b values of p to the next the rows of K move down
by one, and the inputs by b. Channels that are neighbours in memory are neighbouring registers of a thread, so
that one load takes them all and nothing goes through shared memory.

`tl.dot` would need both matrices whole, each number 8 to 16 times through the cache and shared memory. So the
instruction (mma m16n8k8) is written out. Between two of them a channel of a warp takes 3.5 to 6 shuffles; in
bf16, where two neighbours are one register, half as many.

Products take `precision`: "tf32x3" (about fp32), "tf32" (rounded to nearest, not cut off) or "bf16"; sums are
made in fp32. Layouts: `simcore.kernels.long_convolution.tensors`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_powers, kind
from simcore.kernels.decoder.split_kv import ONE_BY_ONE, launched
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.long_convolution.moved import (
    Moved,
    check_moved,
    is_elsewhere,
    moved_arguments,
    rows_further,
)
from simcore.kernels.long_convolution.register_fft import longer
from simcore.kernels.long_convolution.triton_direct import check_tile, reference_direct_tile
from simcore.kernels.long_convolution.triton_rows import cdiv, filter_strides

Precision = Literal["tf32x3", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

__all__ = [
    "PRECISIONS",
    "Precision",
    "ToeplitzConfig",
    "reference_direct_tile",
    "toeplitz_config",
    "toeplitz_tile",
]

# Threads of a warp, which are 8 by 4 in a fragment, and both a fragment's columns and half its rows.
LANES = tl.constexpr(32)
EIGHT = tl.constexpr(8)
# The most inputs: code grows with them.
LONGEST_SIDE = 1024
# From this side on Z has 16 columns, else 8.
WIDE_SIDE = 256
# The limit of a grid's second and third dimension: blocks of outputs and sequences, and layers.
MOST_BLOCKS = 65535


@dataclass(frozen=True, slots=True)
class ToeplitzConfig:
    """The layout of a tile: a warp makes `rows` (8 or 16) by `width` (8 or 16) outputs of `channels` (2 or 4)
    channels; a program's `warps` have neighbouring channels."""

    width: int
    rows: int
    channels: int = 4
    warps: int = 4
    chained: bool = False

    def __post_init__(self) -> None:
        check_powers(self, "width", "rows", "channels", "warps")
        if {self.width, self.rows} - {8, 16} or self.channels not in (2, 4):
            raise ValueError(f"a warp has 8 or 16 rows and columns, and 2 or 4 channels, not {self}")

    def __str__(self) -> str:
        return f"{self.rows} x {self.width} outputs, {self.channels} channels, {self.warps} warps"


def toeplitz_config(
    *, side: int, outputs: int, precision: Precision = "tf32x3", chained: bool = True
) -> ToeplitzConfig:
    """Returns the layout for a side and so many outputs: as many channels as leave registers for three
    programs a multiprocessor.

    >>> toeplitz_config(side=64, outputs=64)
    ToeplitzConfig(width=8, rows=8, channels=4, warps=4, chained=True)
    >>> toeplitz_config(side=256, outputs=256)
    ToeplitzConfig(width=16, rows=16, channels=2, warps=4, chained=True)
    """
    width = 8 if side < WIDE_SIDE else 16
    channels = 4 if width == 8 or precision == "bf16" else 2
    return ToeplitzConfig(width, 8 if outputs <= 8 * width else 16, channels, chained=chained)


@launching
def toeplitz_tile(
    y: Tensor,
    taps: Tensor,
    z: Tensor,
    *,
    precision: Precision = "tf32x3",
    moved: Moved | None = None,
    config: ToeplitzConfig | None = None,
) -> Tensor:
    """Adds the terms of y [layers, batch, side, channels] to z [layers, batch, outputs, channels] in place
    and returns z; with `moved`, so many rows further. side <= 1024, outputs <= side; taps [layers, 1 or
    batch, side + outputs - 1, channels], from lag 1 on. Relative errors: below 1e-5 in tf32x3, 1e-3 in tf32,
    1e-2 in bf16. Raises ValueError for tensors that do not fit."""
    check_tile(y, taps, z)
    check_moved(moved)
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")
    (layers, batch, outputs, channels), side = z.shape, y.shape[2]
    if side > LONGEST_SIDE:
        raise ValueError(f"y has {side} inputs; at most {LONGEST_SIDE}")
    if 0 in z.shape:
        return z
    if y.dtype != torch.float32 and precision == "tf32x3":
        # Numbers of 16 bits lose nothing as tf32.
        precision = "tf32"
    config = config or toeplitz_config(
        side=side, outputs=outputs, precision=precision, chained=gpu_of(z).chained
    )
    blocks = cdiv(outputs, config.rows * config.width)
    grid = (cdiv(channels, config.channels * config.warps), blocks * batch, layers)
    if max(grid[1:]) > MOST_BLOCKS:
        raise ValueError(
            f"z {kind(z)} has more than {MOST_BLOCKS} layers, or blocks of outputs and sequences"
        )
    _toeplitz_tile_kernel[grid](
        y, taps, z, *moved_arguments(moved), outputs, channels,
        *y.stride()[:2], *filter_strides(taps)[:2], *z.stride()[:2],
        # Known to the compiler, a row costs no arithmetic before its load.
        Y_ROW=y.stride(2), TAPS_ROW=taps.stride(2), Z_ROW=z.stride(2),
        SIDE=side, WIDTH=config.width, ROWS=config.rows, CHANNELS=config.channels, WARPS=config.warps,
        EVEN=channels % config.channels == 0, PRECISION=precision, EMULATED=ONE_BY_ONE,
        MOVED=moved is not None, **launched(config.warps, config.chained),
    )  # fmt: skip
    return z


@triton.jit(do_not_specialize=["origin", "last"])
def _toeplitz_tile_kernel(
    y_ptr, taps_ptr, z_ptr, position_ptr, origin, last, outputs, channels,
    y_layer, y_sequence, taps_layer, taps_sequence, z_layer, z_sequence,
    Y_ROW: tl.constexpr, TAPS_ROW: tl.constexpr, Z_ROW: tl.constexpr,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, WARPS: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr, MOVED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of channels, blocks of outputs * batch, layers). Every number is a tensor [32 WARPS], one
    element a thread in the threads' order, which what is written out relies on; those that a thread has
    several of are tuples.

    Blocks of p are taken eight at a time: for as many, taps that come in at the top row of K are in the
    threads of one register, and the inputs of all lie in a few."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    if MOVED:
        if is_elsewhere(position_ptr, origin, last):
            return
        further = rows_further(position_ptr, origin, last)
        y_ptr += further * Y_ROW
        z_ptr += further * Z_ROW
    BLOCKS: tl.constexpr = (SIDE + WIDTH - 1) // WIDTH + 1
    # The last round may have nine: then all its rows of K are rows that came in.
    ROUNDS: tl.constexpr = (BLOCKS + EIGHT - 2) // EIGHT
    across = tl.cdiv(outputs, ROWS * WIDTH)
    layer, sequence = tl.program_id(2).to(tl.int64), (tl.program_id(1) // across).to(tl.int64)
    thread = tl.arange(0, LANES * WARPS)
    lane = thread % LANES
    row, column = lane // 4, lane % 4
    channel = (tl.program_id(0) * WARPS + thread // LANES) * CHANNELS
    first = tl.program_id(1) % across * (ROWS * WIDTH)

    y_at = y_ptr + layer * y_layer + sequence * y_sequence + channel
    taps_at = taps_ptr + layer * taps_layer + sequence * taps_sequence + channel
    z_at = z_ptr + layer * z_layer + sequence * z_sequence + channel
    left, lags = channels - channel, SIDE + outputs - 1
    # The tap of the first column of K in the first block of p, for rows from this thread's row on.
    tap = SIDE - 1 + first + WIDTH * (row + 1) - column
    middle = _taps(taps_at, tap, lags, left, TAPS_ROW, WIDTH, CHANNELS, EVEN, PRECISION)
    # With 8 rows `high` is not used. Yet it is no empty tuple: Triton 3.6 takes two calls for the same if all
    # elements are alike and only the ends of tuples among them differ, as in the first and the last round.
    high = middle
    if ROWS == 16:
        high = _taps(taps_at, tap + EIGHT * WIDTH, lags, left, TAPS_ROW, WIDTH, CHANNELS, EVEN, PRECISION)
    low = _taps(taps_at, tap - EIGHT * WIDTH, lags, left, TAPS_ROW, WIDTH, CHANNELS, EVEN, PRECISION)
    inputs = _inputs(
        y_at, lane - WIDTH, left, Y_ROW, SIDE, WIDTH, CHANNELS, EVEN, min(EIGHT + 1, BLOCKS), PRECISION
    )
    sums = _nothing(lane, CHANNELS * (WIDTH // 2) * (2 if PRECISION == "tf32x3" else 1))
    for i in tl.static_range(ROUNDS):
        # In flight during this round's sums: the next round's numbers, and at the end the outputs to add to.
        if i + 1 < ROUNDS:
            next_low = _taps(
                taps_at, tap - (i + 2) * EIGHT * WIDTH, lags, left, TAPS_ROW, WIDTH, CHANNELS, EVEN,
                PRECISION,
            )  # fmt: skip
            next_inputs = _inputs(
                y_at, lane + ((i + 1) * EIGHT - 1) * WIDTH, left, Y_ROW, SIDE, WIDTH, CHANNELS, EVEN,
                min(EIGHT + 1, BLOCKS - (i + 1) * EIGHT), PRECISION,
            )  # fmt: skip
            for s in tl.range(0, EIGHT):
                sums = _summed(
                    sums, high, middle, low, inputs, lane, s, WIDTH, ROWS, CHANNELS, PRECISION, EMULATED
                )
            high, middle, low, inputs = middle, low, next_low, next_inputs
        else:
            before = _outputs(z_at, first, row, column, outputs, left, Z_ROW, WIDTH, ROWS, CHANNELS, EVEN)
            for s in tl.range(0, BLOCKS - i * EIGHT):
                sums = _summed(
                    sums, high, middle, low, inputs, lane, s, WIDTH, ROWS, CHANNELS, PRECISION, EMULATED
                )
            _store(
                z_at, sums, before, first, row, column, outputs, left, Z_ROW, WIDTH, ROWS, CHANNELS, EVEN,
                PRECISION,
            )  # fmt: skip


# -- memory ------------------------------------------------------------------------------------------------


@triton.jit
def _nothing(like, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = longer(zeros, tl.zeros(like.shape, tl.float32))
    return zeros


@triton.jit
def _there(there, left, CHANNELS: tl.constexpr, EVEN: tl.constexpr):
    """Which of a thread's neighbouring channels are there: all or none where that is known."""
    if EVEN:
        return (there & (left > 0))[:, None]
    else:
        return there[:, None] & (tl.arange(0, CHANNELS)[None, :] < left[:, None])


@triton.jit
def _loaded(at, there, left, CHANNELS: tl.constexpr, EVEN: tl.constexpr):
    """CHANNELS neighbours, a tuple, in fp32; zeros where nothing is."""
    at = at[:, None] + tl.arange(0, CHANNELS)[None, :]
    x = tl.load(at, mask=_there(there, left, CHANNELS, EVEN), other=0.0).to(tl.float32)
    if CHANNELS == 2:
        return tl.split(x)
    else:
        even, odd = tl.split(tl.reshape(x, (at.shape[0], 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _taps(
    at, tap, lags, left, ROW: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A row of K a thread, every fourth column of a block in each channel, as `_registers`."""
    taps = ()
    for k in tl.static_range(WIDTH // 8):
        here = tap - 8 * k
        taps = taps + _registers(at, here, here - 4, lags, left, ROW, CHANNELS, EVEN, PRECISION)
    return taps


@triton.jit
def _inputs(
    at, first, left, ROW: tl.constexpr, SIDE: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    EVEN: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The inputs of COUNT blocks, one after the other: those of 32 threads, then the next. In bf16 each
    beside the one four behind it."""
    inputs = ()
    for k in tl.static_range(((COUNT + 1) * WIDTH - 1 + LANES - 1) // LANES):
        here = first + LANES * k
        if PRECISION == "bf16":
            inputs = inputs + _registers(at, here, here + 4, SIDE, left, ROW, CHANNELS, EVEN, PRECISION)
        else:
            inputs = inputs + _numbers(at, here, SIDE, left, ROW, CHANNELS, EVEN, PRECISION)
    return inputs


@triton.jit
def _registers(
    at, first, second, end, left, ROW: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Two numbers of each channel as int32: all firsts, then all seconds; in bf16 both in one."""
    low = _numbers(at, first, end, left, ROW, CHANNELS, EVEN, PRECISION)
    high = _numbers(at, second, end, left, ROW, CHANNELS, EVEN, PRECISION)
    if PRECISION == "bf16":
        both = ()
        for c in tl.static_range(CHANNELS):
            both = longer(both, ((low[c] >> 16) & 0xFFFF) | high[c])
        return both
    else:
        return low + high


@triton.jit
def _numbers(
    at, here, end, left, ROW: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The bits of number `here` of each channel, rounded as products take it; 0 below 0 and from `end` on."""
    there = (here >= 0) & (here < end)
    numbers = ()
    found = _loaded(at + here.to(tl.int64) * ROW, there, left, CHANNELS, EVEN)
    for c in tl.static_range(CHANNELS):
        bits = found[c].to(tl.int32, bitcast=True)
        # Infinities and NaNs stay as they are: the rounding would overflow their bits.
        finite = (bits & 0x7F800000) != 0x7F800000
        if PRECISION == "bf16":
            bits = tl.where(finite, bits + 0x7FFF + ((bits >> 16) & 1), bits) & -0x10000
        elif PRECISION == "tf32":
            # The matrix units cut off the last 13 bits, which makes all numbers smaller: round first.
            bits = tl.where(finite, bits + 0x1000, bits) & -0x2000
        numbers = longer(numbers, bits)
    return numbers


@triton.jit
def _output(first, row, column, k: tl.constexpr, WIDTH: tl.constexpr):
    """Which output is number k of a thread: of a product, then of the next 8 columns."""
    return first + WIDTH * (row + EIGHT * (k % 4 // 2)) + EIGHT * (k // 4) + 2 * column + k % 2


@triton.jit
def _outputs(
    at, first, row, column, outputs, left, ROW: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What is in z, of all channels of each output."""
    found = ()
    for k in tl.static_range(WIDTH // 2):
        if k % 4 < ROWS // 4:
            here = _output(first, row, column, k, WIDTH)
            found = found + _loaded(at + here.to(tl.int64) * ROW, here < outputs, left, CHANNELS, EVEN)
        else:
            found = found + _nothing(row, CHANNELS)
    return found


@triton.jit
def _store(
    at, sums, before, first, row, column, outputs, left, ROW: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`before` and the sums to z."""
    EACH: tl.constexpr = len(sums) // CHANNELS
    for k in tl.static_range(WIDTH // 2):
        if k % 4 < ROWS // 4:
            total = ()
            for c in tl.static_range(CHANNELS):
                x = sums[c * EACH + k]
                if PRECISION == "tf32x3":
                    x += sums[c * EACH + WIDTH // 2 + k]
                total = longer(total, x + before[k * CHANNELS + c])
            here = _output(first, row, column, k, WIDTH)
            there = _there(here < outputs, left, CHANNELS, EVEN)
            z_at = (at + here.to(tl.int64) * ROW)[:, None] + tl.arange(0, CHANNELS)[None, :]
            tl.store(z_at, _together(total, CHANNELS).to(at.dtype.element_ty), mask=there)


@triton.jit
def _together(x, CHANNELS: tl.constexpr):
    """A tuple of neighbours as a tensor [threads, CHANNELS]."""
    if CHANNELS == 2:
        return tl.join(x[0], x[1])
    else:
        return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (x[0].shape[0], 4))


# -- products ----------------------------------------------------------------------------------------------


@triton.jit
def _summed(
    sums, high, middle, low, inputs, lane, s, WIDTH: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """The sums with block s of p added, of a round that begins with rows `middle` (and `high` above the
    eighth) of K; rows of `low` come in."""
    EACH: tl.constexpr = len(sums) // CHANNELS
    NB: tl.constexpr = WIDTH // EIGHT
    came_in, turned = lane // 4 >= EIGHT - s, (lane - 4 * s) & (LANES - 1)
    start = WIDTH * s
    added = ()
    for c in tl.static_range(CHANNELS):
        # As many inputs from `start` on as a warp has threads, each in the thread of its number modulo 32.
        window = inputs[c]
        for k in tl.static_range(1, len(inputs) // CHANNELS):
            window = tl.where(lane + LANES * (k - 1) < start, inputs[k * CHANNELS + c], window)
        hankel = ()
        for k in tl.static_range(2 * NB - 1):
            from_lane = start + EIGHT * k + lane % 4 + lane // 4
            hankel = hankel + _inputs_of(window, from_lane, PRECISION, EMULATED)
        mine = ()
        for k in tl.static_range(EACH):
            mine = longer(mine, sums[c * EACH + k])
        for k in tl.static_range(NB):
            toeplitz = _rows_of(high, middle, low, came_in, turned, k, c, CHANNELS, ROWS, PRECISION, EMULATED)
            mine = _times(mine, toeplitz, hankel, k, NB, PRECISION, EMULATED)
        added = added + mine
    return added


@triton.jit
def _inputs_of(window, from_lane, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """A fragment of Y."""
    x = _shuffled(window, from_lane & (LANES - 1), EMULATED)
    if PRECISION == "bf16":
        return (x,)
    else:
        return _operand((x, _shuffled(window, (from_lane + 4) & (LANES - 1), EMULATED)), PRECISION)


@triton.jit
def _rows_of(
    high, middle, low, came_in, turned, k: tl.constexpr, c: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    """Fragment k of a block of K: the registers of rows 0 to 7, then those of rows 8 to 15."""
    EACH: tl.constexpr = 1 if PRECISION == "bf16" else 2
    fragment = ()
    for j in tl.static_range(k * EACH * CHANNELS + c, (k + 1) * EACH * CHANNELS, CHANNELS):
        fragment = longer(fragment, _shuffled(tl.where(came_in, low[j], middle[j]), turned, EMULATED))
    for j in tl.static_range(k * EACH * CHANNELS + c, (k + 1) * EACH * CHANNELS, CHANNELS):
        if ROWS == 16:
            fragment = longer(fragment, _shuffled(tl.where(came_in, middle[j], high[j]), turned, EMULATED))
        else:
            fragment = longer(fragment, tl.zeros_like(turned))
    return _operand(fragment, PRECISION)


@triton.jit
def _operand(fragment, PRECISION: tl.constexpr):
    """Registers of a fragment as products take them, then for tf32x3 what they lose."""
    if PRECISION == "tf32x3":
        big, small = (), ()
        for k in tl.static_range(len(fragment)):
            bits = fragment[k] & -0x2000
            lost = fragment[k].to(tl.float32, bitcast=True) - bits.to(tl.float32, bitcast=True)
            big, small = longer(big, bits), longer(small, lost.to(tl.int32, bitcast=True))
        return big + small
    else:
        return fragment


@triton.jit
def _times(
    sums, toeplitz, hankel, k: tl.constexpr, NB: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr
):
    """The sums of one channel with the products of fragment k added."""
    # Registers of a fragment of the Hankel matrix, and of the lost parts of both.
    EACH: tl.constexpr = len(hankel) // (2 * NB - 1)
    LOST_A: tl.constexpr = len(toeplitz) // 2
    LOST_B: tl.constexpr = EACH // 2
    big, small = (), ()
    for n in tl.static_range(NB):
        big = big + _mma(_quad(sums, n), toeplitz, hankel, 0, (k + n) * EACH, PRECISION, EMULATED)
        if PRECISION == "tf32x3":
            # In separate sums: the matrix units cut sums off, and each further product adds to that error.
            more = _mma(_quad(sums, NB + n), toeplitz, hankel, LOST_A, (k + n) * EACH, PRECISION, EMULATED)
            small = small + _mma(more, toeplitz, hankel, 0, (k + n) * EACH + LOST_B, PRECISION, EMULATED)
    return big + small


@triton.jit
def _quad(sums, k: tl.constexpr):
    return sums[4 * k], sums[4 * k + 1], sums[4 * k + 2], sums[4 * k + 3]


@triton.jit
def _shuffled(x, from_lane, EMULATED: tl.constexpr):
    """What other threads of the warp have in x."""
    if EMULATED:
        warps: tl.constexpr = x.shape[0] // LANES
        found = tl.gather(tl.reshape(x, (warps, LANES)), tl.reshape(from_lane, (warps, LANES)), 1)
        return tl.reshape(found, (warps * LANES,))
    else:
        return tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
            "=r,r,r", [x, from_lane], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _mma(c, a, b, A: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr, EMULATED: tl.constexpr):
    """c + a b of [16, 8], [8, 8] and [16, 8], from register A of a and B of b on. Thread (g, t) has columns t
    and t + 4 of row g of a, then of row g + 8; rows t and t + 4 of column g of b (in bf16 both in a register:
    the instruction has 2 t and 2 t + 1 there, and the order does not matter where both have the same); and
    columns 2 t and 2 t + 1 of row g of c, then of row g + 8."""
    if EMULATED and PRECISION == "bf16":
        first, second, third = a[A], a[A + 1], b[B]
        rows = first << 16, first & -0x10000, second << 16, second & -0x10000
        return _emulated_mma(c, rows, (third << 16, third & -0x10000))
    elif EMULATED:
        return _emulated_mma(c, (a[A], a[A + 1], a[A + 2], a[A + 3]), (b[B], b[B + 1]))
    elif PRECISION == "bf16":
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
            "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
            "=f,=f,=f,=f,r,r,r,f,f,f,f", [a[A], a[A + 1], b[B], c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip
    else:
        # The instruction takes rows g and g + 8 of a column, then of the next column.
        return tl.inline_asm_elementwise(
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{$0, $1, $2, $3}, {$4, $6, $5, $7}, {$8, $9}, {$10, $11, $12, $13};",
            "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
            [a[A], a[A + 1], a[A + 2], a[A + 3], b[B], b[B + 1], c[0], c[1], c[2], c[3]],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _emulated_mma(c, a, b):
    """The same without the instruction."""
    SHAPE: tl.constexpr = (c[0].shape[0] // LANES, 8, 4)
    upper = tl.join(_placed(a[0], SHAPE), _placed(a[1], SHAPE))
    lower = tl.join(_placed(a[2], SHAPE), _placed(a[3], SHAPE))
    left = tl.reshape(tl.permute(tl.join(upper, lower), (0, 4, 1, 3, 2)), (SHAPE[0], 16, 8))
    right = tl.permute(tl.join(_placed(b[0], SHAPE), _placed(b[1], SHAPE)), (0, 3, 2, 1))
    right = tl.reshape(right, (SHAPE[0], 8, 8))
    product = tl.sum(left[:, :, :, None] * right[:, None], 2)
    product = tl.permute(tl.reshape(product, (SHAPE[0], 2, 8, 4, 2)), (0, 2, 3, 4, 1))
    upper, lower = tl.split(product)
    c0, c1 = tl.split(upper)
    c2, c3 = tl.split(lower)
    flat: tl.constexpr = (c[0].shape[0],)
    return (
        c[0] + tl.reshape(c0, flat),
        c[1] + tl.reshape(c1, flat),
        c[2] + tl.reshape(c2, flat),
        c[3] + tl.reshape(c3, flat),
    )


@triton.jit
def _placed(bits, SHAPE: tl.constexpr):
    return tl.reshape(bits.to(tl.float32, bitcast=True), SHAPE)
