"""The square tile by transforms of order `side`, on tensor cores: real inputs, cached spectra, one launch.

    c(z)  = y(z) k(z)  mod (z^U - i)          U = side,  y of U entries,  k of 2 U
    z_v  += Im c_v                            v = 0 .. outputs - 1

Modulo z^U - i the product r of two real polynomials has the coefficients r_n - r_(n+2U) + i r_(n+U), and
the imaginary parts are what a tile wants (the right-angle convolution, Nussbaumer 1982). So one complex
transform of order U does what Flash Inference's cyclic one of order 2U does (App. C), and nothing has to be
taken apart:

    Y_k = sum_n y_n w^n e^(-2 pi i n k / U)                                w = e^(i pi / 2U)
    c_n = w^-n / U  sum_k Y_k K_k e^(2 pi i n k / U)

With U = N1 N2, n = n1 N2 + n2 and k = k1 + N1 k2 a transform is two matrix products with a twiddle between
(Cooley and Tukey 1965; as products, Bailey 1990): over n1 with the twist w^(n1 N2), then the twiddle
w^n2 e^(-2 pi i n2 k1 / U), then over n2. Channels and the other index are the rows of the products, so that
all of a program's channels share the matrices. Short sides take one product, long ones three launches with
what is between in memory.

What is transformed is fp32; what is multiplied, by `precision`: "tf32x3" (about fp32), "tf32" (rounded to
nearest, not cut off) or "bf16". Layouts: `kernels.long_convolution.tensors`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decoder.checks import check_powers, check_written, kind
from kernels.long_convolution.tensors import FORMATS
from kernels.long_convolution.triton_rows import add

Precision = Literal["tf32x3", "tf32", "bf16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
# Rows or columns of a matrix that a program has in shared memory at once.
AT_ONCE = tl.constexpr(64)
# The least that a matrix product takes of each dimension.
LEAST = 16
# Inputs of a warp whose program makes all of a tile.
INPUTS_A_WARP = 1024
# One product up to here, two in one launch up to there, then three launches.
DENSE_SIDE, FUSED_SIDE, LONGEST_SIDE = 128, 2048, 16384


@dataclass(frozen=True, slots=True)
class FftConfig:
    """How a tile is laid out: side = first * second (`first` 1: one product), `channels` of a program, its
    `warps`, and whether it takes one launch (`fused`); else `rows` of the index that is not transformed."""

    first: int
    second: int
    channels: int
    warps: int
    fused: bool = True
    rows: int = 1

    def __post_init__(self) -> None:
        check_powers(self, "first", "second", "channels", "warps", "rows")

    def __str__(self) -> str:
        launches = "one launch" if self.fused else f"three launches of {self.rows} rows"
        return f"{self.first} x {self.second}, {self.channels} channels, {self.warps} warps, {launches}"


def fft_config(side: int) -> FftConfig:
    """The layout for a side, a power of two from 16 to 16384.

    A program's numbers, re and im, have to fit into its registers beside what becomes of them; two programs a
    multiprocessor while sides are short, so that one computes while the other waits.

    >>> for side in (64, 256, 1024, 8192):
    ...     print(fft_config(side))
    1 x 64, 64 channels, 4 warps, one launch
    16 x 16, 16 channels, 4 warps, one launch
    32 x 32, 8 channels, 8 warps, one launch
    128 x 64, 16 channels, 8 warps, three launches of 4 rows
    """
    if side < LEAST or side & (side - 1) or side > LONGEST_SIDE:
        raise ValueError(f"side has to be a power of two from {LEAST} to {LONGEST_SIDE}, not {side}")
    if side <= DENSE_SIDE:
        return FftConfig(1, side, 64, 4 if side < DENSE_SIDE else 8)
    power = side.bit_length() - 1
    if side <= FUSED_SIDE:
        first, warps = 1 << power // 2, 4 if side <= 512 else 8
        return FftConfig(first, side // first, INPUTS_A_WARP * warps // side, warps)
    # The longer one first: the second has to be there twice, to and fro.
    first = 1 << (power + 1) // 2
    return FftConfig(first, side // first, 16, 8, fused=False, rows=4)


class _Tables(NamedTuple):
    """Matrices of a transform, re and im, fp32: first [2, n1, k1] with the twist, twiddle [2, k1, n2], second
    [2, n2, k2]."""

    first: Tensor
    twiddle: Tensor
    second: Tensor


@lru_cache(maxsize=64)
def _tables(first: int, second: int, device: torch.device) -> _Tables:
    side = first * second
    n1, n2 = torch.arange(first), torch.arange(second)
    # In whole steps of a quarter of the finest angle, so that no angle is rounded before it is taken.
    steps = 4 * side

    def table(quarters: Tensor) -> Tensor:
        angle = quarters.remainder(steps).double() * (2.0 * math.pi / steps)
        return torch.stack((angle.cos(), angle.sin())).to(device=device, dtype=torch.float32)

    return _Tables(
        table(n1[:, None] * second - 4 * second * n1[:, None] * n1),
        table(n2 - 4 * n1[:, None] * n2),
        table(-4 * first * n2[:, None] * n2),
    )


def right_angle_spectrum(taps: Tensor, side: int) -> Tensor:
    """What tiles of a side cache of the taps [layers, 1 or batch, lags, channels] from lag 0 on (those that a
    short filter does not have are 0): fp32 [layers, 1 or batch, 2, side, channels], re and im of each bin."""
    if side < 1 or taps.dim() != 4 or not taps.is_floating_point():
        raise ValueError(f"taps have to be real [layers, 1 or batch, lags, channels], not {kind(taps)}")
    both = torch.nn.functional.pad(
        taps[:, :, : 2 * side].double(), (0, 0, 0, max(0, 2 * side - taps.shape[2]))
    )
    folded = torch.complex(both[:, :, :side], both[:, :, side:])
    n = torch.arange(side, device=taps.device, dtype=torch.float64)
    twist = torch.polar(torch.ones_like(n), n * (math.pi / (2 * side)))
    bins = torch.fft.fft(folded * twist[:, None], dim=2)
    return torch.stack((bins.real, bins.imag), 2).float()


def fft_tile(
    y: Tensor,
    spectrum: Tensor,
    z: Tensor,
    *,
    precision: Precision = "tf32x3",
    config: FftConfig | None = None,
    space: Tensor | None = None,
) -> Tensor:
    """Adds what y [layers, batch, side, channels] gives to z [layers, batch, outputs, channels] in place, by
    the `right_angle_spectrum` of the taps; gives z. outputs <= side. `space`: see `fft_space`; one is made
    where none is given and one is needed. Raises ValueError for tensors that do not fit together."""
    layers, batch, side, channels = _checked(y, spectrum, z)
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; allowed: {', '.join(PRECISIONS)}")
    config = config or fft_config(side)
    if config.first * config.second != side:
        raise ValueError(f"a layout of {config.first} x {config.second} for a side of {side}")
    first, twiddle, second = _tables(config.first, config.second, y.device)
    # Of one filter for all sequences, or one for each.
    each = spectrum.stride(1) if spectrum.shape[1] > 1 else 0
    strides = *y.stride()[:3], spectrum.stride(0), each, *spectrum.stride()[2:4], *z.stride()[:3]
    shape = z.shape[2], channels
    constants: dict[str, Any] = {"PRECISION": precision, "C": config.channels, "num_warps": config.warps}
    blocks = triton.cdiv(channels, config.channels)
    if config.first == 1:
        _dense_kernel[(blocks, batch, layers)](
            y,
            spectrum,
            z,
            second,
            twiddle,
            *shape,
            *strides,
            SIDE=side,
            CHUNK=min(side, AT_ONCE.value),
            **constants,
        )
    elif config.fused:
        _fused_kernel[(blocks, batch, layers)](
            y, spectrum, z, first, twiddle, second, *shape, *strides,
            N1=config.first, N2=config.second, **constants,
        )  # fmt: skip
    else:
        space = fft_space(y, config) if space is None else space
        _check_space(space, y)
        constants |= {"N1": config.first, "N2": config.second, "ROWS": config.rows}
        _forward_kernel[(blocks * (config.second // config.rows), batch, layers)](
            y, space, first, twiddle, channels, *y.stride()[:3], *space.stride()[:3], **constants
        )
        _middle_kernel[(blocks * (config.first // config.rows), batch, layers)](
            space, spectrum, twiddle, second, channels, *space.stride()[:3], *strides[3:7], **constants
        )
        _backward_kernel[(blocks * (config.second // config.rows), batch, layers)](
            space, z, first, *shape, *space.stride()[:3], *z.stride()[:3], **constants
        )
    return z


def fft_space(y: Tensor, config: FftConfig) -> Tensor:
    """What three launches need between them for y [layers, batch, side, channels]: fp32 [layers, batch, 2,
    side, channels]; nothing for one launch."""
    layers, batch, side, channels = y.shape
    return y.new_empty((layers, batch, 2, 0 if config.fused else side, channels), dtype=torch.float32)


def _check_space(space: Tensor, y: Tensor) -> None:
    layers, batch, side, channels = y.shape
    wanted = (layers, batch, 2, side, channels)
    if tuple(space.shape) != wanted or space.dtype != torch.float32 or not space.is_contiguous():
        raise ValueError(f"space has to be contiguous float32 {list(wanted)}, not {kind(space)}")


def _checked(y: Tensor, spectrum: Tensor, z: Tensor) -> tuple[int, int, int, int]:
    if y.dim() != 4 or 0 in y.shape or y.dtype not in FORMATS or y.stride(-1) != 1:
        raise ValueError(
            f"y has to be fp32, fp16 or bf16 [layers, batch, side, channels], channels contiguous, "
            f"not {kind(y)}"
        )
    layers, batch, side, channels = y.shape
    if z.dim() != 4 or z.shape[:2] != y.shape[:2] or z.shape[3] != channels or not 0 < z.shape[2] <= side:
        raise ValueError(f"z has to be [{layers}, {batch}, 1 to {side}, {channels}], not {kind(z)}")
    if z.dtype not in FORMATS or z.stride(-1) != 1:
        raise ValueError(f"z has to be fp32, fp16 or bf16, channels contiguous, not {kind(z)}")
    check_written("z", z, y)
    wanted = [layers, f"1 or {batch}", 2, side, channels]
    shape = spectrum.shape
    fits = spectrum.dim() == 5 and shape[0] == layers and shape[1] in (1, batch)
    if not (fits and tuple(shape[2:]) == (2, side, channels) and spectrum.dtype == torch.float32):
        raise ValueError(f"spectrum has to be float32 {wanted}, not {kind(spectrum)}")
    if spectrum.stride(-1) != 1:
        raise ValueError("the channels of spectrum have to be contiguous")
    return layers, batch, side, channels


# -- products ------------------------------------------------------------------------------------------


@triton.jit
def _operand(x, PRECISION: tl.constexpr):
    """x as products take it."""
    if PRECISION == "bf16":
        return x.to(tl.bfloat16)
    elif PRECISION == "tf32":
        # The matrix units cut the last 13 bits off, which makes all numbers smaller: rounded first.
        bits = x.to(tl.int32, bitcast=True) + 0x1000
        return (bits & -0x2000).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _product(x, matrix, total, PRECISION: tl.constexpr):
    """total + x matrix."""
    x, matrix = _operand(x, PRECISION), _operand(matrix, PRECISION)
    if PRECISION == "bf16":
        return tl.dot(x, matrix, total)
    else:
        return tl.dot(x, matrix, total, input_precision=PRECISION)


@triton.jit
def _complex_product(total_re, total_im, re, im, matrix_re, matrix_im, PRECISION: tl.constexpr):
    """total + (re + i im) times a complex matrix."""
    total_re, total_im = (
        _product(re, matrix_re, total_re, PRECISION),
        _product(im, matrix_re, total_im, PRECISION),
    )
    return _product(-im, matrix_im, total_re, PRECISION), _product(re, matrix_im, total_im, PRECISION)


@triton.jit
def _times(re, im, other_re, other_im):
    return re * other_re - im * other_im, re * other_im + im * other_re


@triton.jit
def _matrix(
    table_ptr, first_row, first_column, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Re and im, [ROWS, COLUMNS] each, of a table [2, N, N] or its transpose, from a place on."""
    row, column = first_row + tl.arange(0, ROWS)[:, None], first_column + tl.arange(0, COLUMNS)[None, :]
    at = column * N + row if TRANSPOSED else row * N + column
    return tl.load(table_ptr + at), tl.load(table_ptr + N * N + at)


@triton.jit
def _swapped(x, OUTER: tl.constexpr, C: tl.constexpr, INNER: tl.constexpr):
    """[OUTER * C, INNER] as [INNER * C, OUTER]."""
    return tl.reshape(tl.permute(tl.reshape(x, (OUTER, C, INNER)), (2, 1, 0)), (INNER * C, OUTER))


@triton.jit
def _rows(count: tl.constexpr, C: tl.constexpr):
    """Index and channel of each row of a tile of `count` indices: [count * C] each."""
    row = tl.arange(0, count * C)
    return row // C, row % C


# -- one launch ----------------------------------------------------------------------------------------


@triton.jit
def _dense_kernel(
    y_ptr, spectrum_ptr, z_ptr, matrix_ptr, twist_ptr, outputs, channels,
    y_layer, y_sequence, y_position, s_layer, s_filter, s_part, s_bin, z_layer, z_sequence, z_position,
    SIDE: tl.constexpr, C: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C channels, batch, layers): all of a transform in one product."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    channel = (tl.program_id(0) * C + tl.arange(0, C))[:, None]
    there = channel < channels
    y_ptr += layer * y_layer + sequence * y_sequence
    z_ptr += layer * z_layer + sequence * z_sequence
    re, im = tl.zeros((C, SIDE), tl.float32), tl.zeros((C, SIDE), tl.float32)
    for first in tl.static_range(0, SIDE, CHUNK):
        n = first + tl.arange(0, CHUNK)[None, :]
        y = tl.load(y_ptr + n * y_position + channel, mask=there, other=0.0).to(tl.float32)
        twist_re, twist_im = tl.load(twist_ptr + n), tl.load(twist_ptr + SIDE + n)
        matrix_re, matrix_im = _matrix(matrix_ptr, first, 0, SIDE, CHUNK, SIDE, False)
        re, im = _complex_product(re, im, y * twist_re, y * twist_im, matrix_re, matrix_im, PRECISION)
    k = tl.arange(0, SIDE)[None, :]
    s_at = layer * s_layer + sequence * s_filter + k * s_bin + channel
    spectrum_re = tl.load(spectrum_ptr + s_at, mask=there, other=0.0)
    spectrum_im = tl.load(spectrum_ptr + s_at + s_part, mask=there, other=0.0)
    re, im = _times(re, im, spectrum_re, spectrum_im)
    for first in tl.static_range(0, SIDE, CHUNK):
        n = first + tl.arange(0, CHUNK)[None, :]
        nothing = tl.zeros((C, CHUNK), tl.float32)
        # The matrix is symmetric: its conjugate takes back.
        matrix_re, matrix_im = _matrix(matrix_ptr, 0, first, SIDE, SIDE, CHUNK, False)
        c_re, c_im = _complex_product(nothing, nothing, re, im, matrix_re, -matrix_im, PRECISION)
        twist_re, twist_im = tl.load(twist_ptr + n), tl.load(twist_ptr + SIDE + n)
        more = (c_im * twist_re - c_re * twist_im) / SIDE
        add(z_ptr + n * z_position + channel, more, there & (n < outputs))


@triton.jit
def _fused_kernel(
    y_ptr, spectrum_ptr, z_ptr, first_ptr, twiddle_ptr, second_ptr, outputs, channels,
    y_layer, y_sequence, y_position, s_layer, s_filter, s_part, s_bin, z_layer, z_sequence, z_position,
    N1: tl.constexpr, N2: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C channels, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    start = tl.program_id(0) * C
    n2, channel = _rows(N2, C)
    re, im = _first_half(
        y_ptr + layer * y_layer + sequence * y_sequence, first_ptr, twiddle_ptr, y_position,
        n2, start + channel, channels, N1, N2, PRECISION,
    )  # fmt: skip
    k1, channel = _rows(N1, C)
    matrix_re, matrix_im = _matrix(second_ptr, 0, 0, N2, N2, N2, False)
    nothing = tl.zeros((N1 * C, N2), tl.float32)
    re, im = _swapped(re, N2, C, N1), _swapped(im, N2, C, N1)
    re, im = _complex_product(nothing, nothing, re, im, matrix_re, matrix_im, PRECISION)
    re, im = _by_spectrum(
        re, im, spectrum_ptr + layer * s_layer + sequence * s_filter, s_part, s_bin,
        k1, start + channel, channels, N1, N2,
    )  # fmt: skip
    re, im = _back_over_k2(re, im, second_ptr, twiddle_ptr, k1, 0, N1, N2, N2, PRECISION)
    n2, channel = _rows(N2, C)
    more = _back_over_k1(
        tl.zeros((N2 * C, N1), tl.float32), _swapped(re, N1, C, N2), _swapped(im, N1, C, N2),
        first_ptr, 0, N1, N1, PRECISION,
    )  # fmt: skip
    _added(
        more, z_ptr + layer * z_layer + sequence * z_sequence, z_position,
        n2, start + channel, outputs, channels, N1, N2,
    )  # fmt: skip


@triton.jit
def _first_half(
    y_ptr, first_ptr, twiddle_ptr, y_position, n2, channel, channels,
    N1: tl.constexpr, N2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Over n1, and the twiddle: re and im of [rows (n2, channel), k1]."""
    CHUNK: tl.constexpr = min(N1, AT_ONCE)
    re, im = tl.zeros((n2.shape[0], N1), tl.float32), tl.zeros((n2.shape[0], N1), tl.float32)
    for first in tl.static_range(0, N1, CHUNK):
        n1 = first + tl.arange(0, CHUNK)[None, :]
        at = (n1 * N2 + n2[:, None]) * y_position + channel[:, None]
        y = tl.load(y_ptr + at, mask=(channel < channels)[:, None], other=0.0).to(tl.float32)
        matrix_re, matrix_im = _matrix(first_ptr, first, 0, N1, CHUNK, N1, False)
        re, im = _product(y, matrix_re, re, PRECISION), _product(y, matrix_im, im, PRECISION)
    twiddle_at = tl.arange(0, N1)[None, :] * N2 + n2[:, None]
    return _times(re, im, tl.load(twiddle_ptr + twiddle_at), tl.load(twiddle_ptr + N1 * N2 + twiddle_at))


@triton.jit
def _by_spectrum(
    re, im, spectrum_ptr, s_part, s_bin, k1, channel, channels, N1: tl.constexpr, N2: tl.constexpr
):
    """[rows (k1, channel), k2] times the spectrum."""
    at = (k1[:, None] + N1 * tl.arange(0, N2)[None, :]) * s_bin + channel[:, None]
    there = (channel < channels)[:, None]
    spectrum_re = tl.load(spectrum_ptr + at, mask=there, other=0.0)
    return _times(re, im, spectrum_re, tl.load(spectrum_ptr + at + s_part, mask=there, other=0.0))


@triton.jit
def _back_over_k2(
    re, im, second_ptr, twiddle_ptr, k1, first,
    N1: tl.constexpr, N2: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows (k1, channel), n2] for COUNT n2 from `first` on, with the twiddle taken back."""
    nothing = tl.zeros((k1.shape[0], COUNT), tl.float32)
    # The matrix is symmetric: its conjugate takes back.
    matrix_re, matrix_im = _matrix(second_ptr, 0, first, N2, N2, COUNT, False)
    re, im = _complex_product(nothing, nothing, re, im, matrix_re, -matrix_im, PRECISION)
    at = k1[:, None] * N2 + first + tl.arange(0, COUNT)[None, :]
    scale = 1.0 / (N1 * N2)
    return _times(re, im, tl.load(twiddle_ptr + at) * scale, tl.load(twiddle_ptr + N1 * N2 + at) * -scale)


@triton.jit
def _back_over_k1(
    more, re, im, first_ptr, first, N1: tl.constexpr, COUNT: tl.constexpr, PRECISION: tl.constexpr
):
    """more + the imaginary part of [rows (n2, channel), n1], by COUNT k1 from `first` on."""
    matrix_re, matrix_im = _matrix(first_ptr, first, 0, N1, COUNT, N1, True)
    more = _product(im, matrix_re, more, PRECISION)
    return _product(-re, matrix_im, more, PRECISION)


@triton.jit
def _added(more, z_ptr, z_position, n2, channel, outputs, channels, N1: tl.constexpr, N2: tl.constexpr):
    """Adds [rows (n2, channel), n1] to z."""
    position = tl.arange(0, N1)[None, :] * N2 + n2[:, None]
    there = (channel < channels)[:, None] & (position < outputs)
    add(z_ptr + position * z_position + channel[:, None], more, there)


# -- three launches ------------------------------------------------------------------------------------


@triton.jit
def _block(count: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr):
    """Index and channel of each row of this program, of `count` indices and all channels."""
    index, channel = _rows(ROWS, C)
    here = tl.program_id(0)
    return here % (count // ROWS) * ROWS + index, here // (count // ROWS) * C + channel


@triton.jit
def _forward_kernel(
    y_ptr, space_ptr, first_ptr, twiddle_ptr, channels, y_layer, y_sequence, y_position, w_layer, w_sequence,
    w_part,
    N1: tl.constexpr, N2: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C channels and ROWS of n2, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    n2, channel = _block(N2, ROWS, C)
    re, im = _first_half(
        y_ptr + layer * y_layer + sequence * y_sequence, first_ptr, twiddle_ptr, y_position,
        n2, channel, channels, N1, N2, PRECISION,
    )  # fmt: skip
    k1 = tl.arange(0, N1)[None, :]
    space_ptr += layer * w_layer + sequence * w_sequence
    _keep(space_ptr, re, im, k1 * N2 + n2[:, None], channel[:, None], channels, w_part)


@triton.jit
def _keep(space_ptr, re, im, place, channel, channels, w_part):
    at = place * channels + channel
    tl.store(space_ptr + at, re, mask=channel < channels)
    tl.store(space_ptr + w_part + at, im, mask=channel < channels)


@triton.jit
def _kept(space_ptr, place, channel, channels, w_part):
    at = place * channels + channel
    re = tl.load(space_ptr + at, mask=channel < channels, other=0.0)
    return re, tl.load(space_ptr + w_part + at, mask=channel < channels, other=0.0)


@triton.jit
def _middle_kernel(
    space_ptr, spectrum_ptr, twiddle_ptr, second_ptr, channels,
    w_layer, w_sequence, w_part, s_layer, s_filter, s_part, s_bin,
    N1: tl.constexpr, N2: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C channels and ROWS of k1, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    k1, channel = _block(N1, ROWS, C)
    space_ptr += layer * w_layer + sequence * w_sequence
    CHUNK: tl.constexpr = min(N2, AT_ONCE)
    re, im = tl.zeros((ROWS * C, N2), tl.float32), tl.zeros((ROWS * C, N2), tl.float32)
    for first in tl.static_range(0, N2, CHUNK):
        place = k1[:, None] * N2 + first + tl.arange(0, CHUNK)[None, :]
        part_re, part_im = _kept(space_ptr, place, channel[:, None], channels, w_part)
        matrix_re, matrix_im = _matrix(second_ptr, first, 0, N2, CHUNK, N2, False)
        re, im = _complex_product(re, im, part_re, part_im, matrix_re, matrix_im, PRECISION)
    re, im = _by_spectrum(
        re, im, spectrum_ptr + layer * s_layer + sequence * s_filter, s_part, s_bin,
        k1, channel, channels, N1, N2,
    )  # fmt: skip
    # All that is written over has been read by all threads: the products have waited for it.
    for first in tl.static_range(0, N2, CHUNK):
        place = k1[:, None] * N2 + first + tl.arange(0, CHUNK)[None, :]
        part_re, part_im = _back_over_k2(re, im, second_ptr, twiddle_ptr, k1, first, N1, N2, CHUNK, PRECISION)
        _keep(space_ptr, part_re, part_im, place, channel[:, None], channels, w_part)


@triton.jit
def _backward_kernel(
    space_ptr, z_ptr, first_ptr, outputs, channels, w_layer, w_sequence, w_part, z_layer, z_sequence,
    z_position,
    N1: tl.constexpr, N2: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C channels and ROWS of n2, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    n2, channel = _block(N2, ROWS, C)
    space_ptr += layer * w_layer + sequence * w_sequence
    CHUNK: tl.constexpr = min(N1, AT_ONCE)
    more = tl.zeros((ROWS * C, N1), tl.float32)
    for first in tl.static_range(0, N1, CHUNK):
        place = (first + tl.arange(0, CHUNK)[None, :]) * N2 + n2[:, None]
        re, im = _kept(space_ptr, place, channel[:, None], channels, w_part)
        more = _back_over_k1(more, re, im, first_ptr, first, N1, CHUNK, PRECISION)
    _added(
        more, z_ptr + layer * z_layer + sequence * z_sequence, z_position,
        n2, channel, outputs, channels, N1, N2,
    )  # fmt: skip


def reference_fft_tile(y: Tensor, spectrum: Tensor, z: Tensor) -> Tensor:
    """`fft_tile` in plain torch, as wide as sums are made, or in float64; gives z."""
    side, dtype = y.shape[2], torch.promote_types(y.dtype, torch.float32)
    n = torch.arange(side, device=y.device, dtype=torch.float64)
    twist = torch.polar(torch.ones_like(n), n * (math.pi / (2 * side)))[:, None].to(dtype.to_complex())
    bins = torch.complex(spectrum[:, :, 0].to(dtype), spectrum[:, :, 1].to(dtype))
    product = torch.fft.fft(y.to(dtype) * twist, dim=2) * bins
    c = torch.fft.ifft(product, dim=2) * twist.conj()
    return z.add_(c.imag[:, :, : z.shape[2]])
