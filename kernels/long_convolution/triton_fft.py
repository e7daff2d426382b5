"""The square tile by fast transforms of order `side` in registers: real inputs, cached spectra.

    c(z)  = y(z) k(z)  mod (z^U - i)          U = side,  y of U entries,  k of 2 U
    z_v  += Im c_v                            v = 0 .. outputs - 1

Modulo z^U - i the product r of two real polynomials has the coefficients r_n - r_(n+2U) + i r_(n+U), and a
tile needs the imaginary parts (the right-angle convolution, Nussbaumer 1982). So one complex transform of
order U does the work of Flash Inference's cyclic one of order 2U (App. C), and nothing has to be taken apart:

    Y_k = sum_n y_n w^n e^(-2 pi i n k / U)                                w = e^(i pi / 2U)
    c_n = w^-n / U  sum_k Y_k K_k e^(2 pi i n k / U)

If the numbers of a transform fit into the registers of a program (`register_fft`), one launch reads y,
transforms, multiplies, transforms back and adds to z. Longer sides are U = N1 N2, n = n1 N2 + n2,
k = k1 + N1 k2, and take three launches, with the intermediate results in memory: the transform over n1 and
the twiddle w^n2 e^(-2 pi i n2 k1 / U); the transform over n2, the product with the spectrum, the transform
back over k2; the twiddle, and the transform back over k1. The twist w^n is split between constants and
twiddle factors.

All is fp32. Layouts: `simcore.kernels.long_convolution.tensors`.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_powers, check_written, kind
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.gpu import gpu_of, launching
from simcore.kernels.long_convolution.moved import (
    Moved,
    check_moved,
    is_elsewhere,
    moved_arguments,
    rows_further,
)
from simcore.kernels.long_convolution.register_fft import (
    backward,
    cosine,
    factors_at,
    forward,
    log2,
    longer,
    multiplied,
    powers,
    sine,
    times,
)
from simcore.kernels.long_convolution.tensors import FORMATS

# Sides that have transforms; up to FUSED_SIDE in one launch, up to PLAIN_SIDE of two factors.
LEAST, PLAIN_SIDE, FUSED_SIDE, LONGEST_SIDE = 16, 256, 512, 16384
# Channels of a program: a cache line of 128 bytes in fp32, or from LONG_SIDE on half a line, because a whole
# line of channels would fill too many registers.
SECTOR_CHANNELS = tl.constexpr(8)
LINE, HALF_LINE, LONG_SIDE = 32, 16, 256
# Complex numbers that a thread holds with three factors.
HELD = 32
# Intermediate results of three launches that stay in the L2 cache next to all other data, and that stay if
# all other data are marked to leave the cache first.
SPACE_BYTES, KEPT_BYTES = 20_000_000, 40_000_000


@dataclass(frozen=True, slots=True)
class FftConfig:
    """The layout of a tile. In one launch (`fused`) the side is the product of `factors`, two or three; else
    of two, N1 and N2, each transformed by launches of its own. `channels` and `warps` a program. `chained`:
    whether a launch starts while the launch before it ends, prefetches its operands into the L2 cache, and
    then waits for that launch. `layers`: how many layers three launches take at a time, so few that their
    intermediate results stay in that cache; None: all."""

    factors: tuple[int, ...]
    channels: int
    warps: int
    fused: bool = True
    chained: bool = False
    layers: int | None = None

    def __post_init__(self) -> None:
        check_powers(self, "channels", "warps")
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers: a layout cannot have {self.layers}; 1 or more, or None for all")
        least, most = (2, 3) if self.fused else (4, 2)
        powers = all(n >= least and n & (n - 1) == 0 for n in self.factors)
        if not (powers and 2 <= len(self.factors) <= most):
            raise ValueError(
                f"factors have to be 2 to {most} powers of two, {least} or more each, not {self.factors}"
            )

    @property
    def three(self) -> tuple[int, ...]:
        """The factors of one launch, the last one 1 if there are two."""
        return *self.factors, *(1,) * (3 - len(self.factors))

    def __str__(self) -> str:
        launches = "one launch" if self.fused else "three launches"
        factors = " x ".join(map(str, self.factors))
        return f"{factors}, {self.channels} channels, {self.warps} warps, {launches}"


def fft_config(side: int, *, chained: bool = True) -> FftConfig:
    """Returns the layout for a side, a power of two from 16 to 16384.

    >>> for side in (64, 256, 512, 8192):
    ...     print(fft_config(side))
    8 x 8, 32 channels, 8 warps, one launch
    16 x 16, 16 channels, 8 warps, one launch
    8 x 8 x 8, 16 channels, 8 warps, one launch
    64 x 128, 32 channels, 8 warps, three launches
    """
    if not is_transformed(side):
        raise ValueError(f"side has to be a power of two from {LEAST} to {LONGEST_SIDE}, not {side}")
    if side > FUSED_SIDE:
        orders = two_factors(side)
        return FftConfig(orders, LINE, 8 if orders[0] > LINE else 4, fused=False, chained=chained)
    found = two_factors(side) if side <= PLAIN_SIDE else (8, *two_factors(side // 8))
    channels = LINE if side < LONG_SIDE else HALF_LINE
    held = found[-1] if len(found) == 2 else HELD
    warps = max(4, side * channels // (32 * held))
    return FftConfig(found, channels, warps, chained=chained)


def fft_config_for(y: Tensor) -> FftConfig:
    """Returns the layout for y [layers, batch, side, channels] on its device."""
    layers, batch, side, channels = y.shape
    config = fft_config(side, chained=gpu_of(y).chained)
    at_once = SPACE_BYTES // (8 * batch * side * channels)
    return config if config.fused or not 1 < at_once < layers else replace(config, layers=at_once)


def is_transformed(side: int) -> bool:
    """Whether tiles of a side have transforms."""
    return LEAST <= side <= LONGEST_SIDE and side & (side - 1) == 0


def two_factors(order: int) -> tuple[int, int]:
    """Returns two powers of two whose product is the order, the second the larger one if they differ.

    >>> two_factors(256), two_factors(512)
    ((16, 16), (16, 32))
    """
    first = 1 << (order.bit_length() - 1) // 2
    return first, order // first


# Cached for ever, because captured graphs read the tables.
@cache
def _table(steps: int, order: int, twisted: bool, lanes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns for each n < steps the first factor and the step of its factors: e^(i pi n / 2 order) if
    twisted, else 1, and e^(-2 pi i n / order); and the same of their conjugates. fp32 [steps, 4, lanes]."""
    n = torch.arange(steps, dtype=torch.float64)
    first = n * (math.pi / (2 * order) if twisted else 0.0)
    step = n * (-2.0 * math.pi / order)
    there, back = (
        torch.stack((first.cos(), sign * first.sin(), step.cos(), sign * step.sin()), 1).float()
        for sign in (1.0, -1.0)
    )
    return tuple(one[..., None].repeat(1, 1, lanes).to(device) for one in (there, back))  # type: ignore[return-value]


@cache
def _turn_table(steps: int, order: int, device: torch.device) -> Tensor:
    """Returns for each n < steps e^(i pi n / 2 order), and e^(-2 pi i n / order) to the powers 1, 2, 4 ..
    order / (2 steps), each rounded once: repeated squares in fp32 would be off by more, the higher the power.
    fp32 [steps, numbers, 2]."""
    n = torch.arange(steps, dtype=torch.float64)[:, None]
    step = 2.0 ** torch.arange(log2(order // steps), dtype=torch.float64)
    turns = torch.cat((n * (math.pi / (2 * order)), n * step * (-2.0 * math.pi / order)), 1)
    return torch.stack((turns.cos(), turns.sin()), 2).float().to(device)


def right_angle_spectrum(taps: Tensor, side: int) -> Tensor:
    """Returns the spectrum that tiles of a side cache of the taps [layers, 1 or batch, lags, channels] from
    lag 0 on (lags beyond a short filter are 0): fp32 [layers, 1 or batch, 2, side, channels], re and im of
    each bin. Raises ValueError for other taps."""
    if side < 1 or taps.dim() != 4 or not taps.is_floating_point():
        raise ValueError(f"taps have to be real [layers, 1 or batch, lags, channels], not {kind(taps)}")
    both = torch.nn.functional.pad(
        taps[:, :, : 2 * side].double(), (0, 0, 0, max(0, 2 * side - taps.shape[2]))
    )
    folded = torch.complex(both[:, :, :side], both[:, :, side:])
    n = torch.arange(side, device=taps.device, dtype=torch.float64)
    twist = torch.polar(torch.ones_like(n), n * (math.pi / (2 * side)))
    if taps.is_cuda and is_transformed(side):
        # A capture cannot make tables; it needs this spectrum, which is made before it.
        _tables(fft_config(side), taps.device)
    bins = torch.fft.fft(folded * twist[:, None], dim=2)
    return torch.stack((bins.real, bins.imag), 2).float()


@launching
def fft_tile(
    y: Tensor,
    spectrum: Tensor,
    z: Tensor,
    *,
    moved: Moved | None = None,
    config: FftConfig | None = None,
    space: Tensor | None = None,
) -> Tensor:
    """Adds the terms of y [layers, batch, side, channels] to z [layers, batch, outputs, channels] in place,
    by the `right_angle_spectrum` of the taps; returns z; with `moved`, so many rows further. outputs <= side.
    `space`: see `fft_space`; by default a new one if needed. Raises ValueError for tensors that do not fit
    together."""
    layers, batch, side, channels = _checked(y, spectrum, z)
    check_moved(moved)
    config = config or fft_config_for(y)
    if math.prod(config.factors) != side:
        raise ValueError(f"a layout of {config.factors} for a side of {side}")
    # The strides of one filter for all sequences, or of one for each.
    each = spectrum.stride(1) if spectrum.shape[1] > 1 else 0
    filters = spectrum.stride(0), each, *spectrum.stride()[2:4]
    blocks = triton.cdiv(channels, config.channels)
    constants: dict[str, Any] = {
        "C": config.channels,
        "MOVED": moved is not None,
        **launched(config.warps, config.chained),
    }
    where = moved_arguments(moved)
    tables = _tables(config, y.device)
    if config.fused:
        first, second, third = config.three
        _fused_kernel[(blocks, batch, layers)](
            y, spectrum, z, *where, *tables, z.shape[2], channels, *y.stride()[:3], *filters, *z.stride()[:3],
            A=first, B=second, D=third, WHOLE=z.shape[2] == side, **constants,
        )  # fmt: skip
        return z
    space = fft_space(y, config) if space is None else space
    _check_space(space, y, config)
    at_once = config.layers or layers
    for first in range(0, layers, at_once):
        y_, spectrum_, z_ = (x[first : first + at_once] for x in (y, spectrum, z))
        _three_launches(y_, spectrum_, z_, space, where, tables, config, filters, constants)
    return z


def _three_launches(
    y: Tensor,
    spectrum: Tensor,
    z: Tensor,
    space: Tensor,
    where: tuple[Tensor | None, int, int],
    tables: tuple[Tensor, ...],
    config: FftConfig,
    filters: tuple[int, ...],
    constants: dict[str, Any],
) -> None:
    """Runs a tile of some layers; `where`: `moved_arguments`, `filters`: the strides of spectrum."""
    layers, batch, side, channels = y.shape
    (a1, b1), (a2, b2) = (two_factors(order) for order in config.factors)
    outer, outer_back, inner, inner_back, turns = tables
    constants = {**constants, "N2": a2 * b2, "FIRST": "", "LAST": ""}
    if 8 * layers * batch * side * channels <= KEPT_BYTES:
        constants |= {"FIRST": "evict_first", "LAST": "evict_last"}
    blocks = triton.cdiv(channels, config.channels)
    over_n2, over_k1 = ((blocks * count, batch, layers) for count in (a2 * b2, a1 * b1))
    _forward_kernel[over_n2](
        y, space, *where, outer, turns, channels, *y.stride()[:3], *space.stride()[:3], A=a1, B=b1,
        **constants,
    )  # fmt: skip
    _middle_kernel[over_k1](
        space, spectrum, *where, inner, inner_back, channels, *space.stride()[:3], *filters,
        N1=a1 * b1, A=a2, B=b2, **constants,
    )  # fmt: skip
    _backward_kernel[over_n2](
        space, z, *where, outer_back, turns, z.shape[2], channels, *space.stride()[:3], *z.stride()[:3],
        A=a1, B=b1, WHOLE=z.shape[2] == side, **constants,
    )  # fmt: skip


def _tables(config: FftConfig, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the tables of a layout's launches: `outer` and `inner` factors of `register_fft` and their
    conjugates, and, of three launches, the factors between two."""
    if config.fused:
        _, second, third = config.three
        outer, inner = (second * third, math.prod(config.factors)), (third, second * third)
    else:
        outer, inner = ((two_factors(order)[1], order) for order in config.factors)
    lanes = config.channels
    found = *_table(*outer, True, lanes, device), *_table(*inner, False, lanes, device)
    if config.fused:
        return found
    return *found, _turn_table(config.factors[1], math.prod(config.factors), device)


def fft_space(y: Tensor, config: FftConfig) -> Tensor:
    """Makes the memory of intermediate results of three launches for y [layers, batch, side, channels]: fp32
    [layers at a time, batch, 2, side, channels]; empty for one launch."""
    layers, batch, side, channels = y.shape
    size = min(layers, config.layers or layers), batch, 2, 0 if config.fused else side, channels
    return y.new_empty(size, dtype=torch.float32)


def _check_space(space: Tensor, y: Tensor, config: FftConfig) -> None:
    layers, batch, side, channels = y.shape
    wanted = (min(layers, config.layers or layers), batch, 2, side, channels)
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
    if channels > 1 and spectrum.stride(-1) != 1:
        raise ValueError("the channels of spectrum have to be contiguous")
    return layers, batch, side, channels


# -- what a launch reads and writes --------------------------------------------------------------------


@triton.jit
def _ask(
    block, y_ptr, spectrum_ptr, z_ptr, outputs, channels, y_position, s_part, s_bin, z_position,
    U: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Asks for what a program of one launch will read."""
    row = tl.arange(0, U)[:, None]
    _ask_for(y_ptr, row, y_position, block, channels, C)
    _ask_for(spectrum_ptr, row, s_bin, block, channels, C)
    _ask_for(spectrum_ptr + s_part, row, s_bin, block, channels, C)
    _ask_for(z_ptr, tl.minimum(row, outputs - 1), z_position, block, channels, C)


@triton.jit
def _ask_for(at, row, step, block, channels, C: tl.constexpr):
    """Has rows [rows, 1] of a block of channels brought into the L2 cache, also while the launch before may
    still write them: they are read from there later, as they are then. So a program waits for memory once,
    and not again wherever it comes to what it needs next."""
    # One place in each sector of fp32, none outside of the tensor.
    channel = block * C + SECTOR_CHANNELS * tl.arange(0, max(1, C // SECTOR_CHANNELS))[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l", [at + row.to(tl.int64) * step + tl.minimum(channel, channels - 1)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _inputs(at, step, there, A: tl.constexpr, STAYS: tl.constexpr):
    """Tuples of re and im of A inputs, each a step further, times e^(i pi a / 2 A). STAYS: see `_kept`."""
    re, im = (), ()
    for a in tl.static_range(A):
        y = tl.load(at, mask=there, other=0.0, eviction_policy=STAYS).to(tl.float32)
        re, im = longer(re, y * cosine(a, 4 * A)), longer(im, y * sine(a, 4 * A))
        at += step
    return re, im


@triton.jit
def _sums(
    at, step, there, first, first_step, outputs, WHOLE: tl.constexpr, A: tl.constexpr, STAYS: tl.constexpr
):
    """The A outputs so far, each a step further; first, first_step: their numbers, of which there are
    `outputs` if not all (WHOLE). All are asked for before the first is written: as far as the compiler knows
    the next might lie where it is written."""
    sums = ()
    for a in tl.static_range(A):
        inside = there
        if not WHOLE:
            inside = there & (first + a * first_step < outputs)
        sums = longer(sums, tl.load(at, mask=inside, other=0.0, eviction_policy=STAYS))
        at += step
    return sums


@triton.jit
def _outputs(
    re, im, sums, at, step, there, first, first_step, outputs, WHOLE: tl.constexpr, scale: tl.constexpr,
    A: tl.constexpr, STAYS: tl.constexpr,
):  # fmt: skip
    """Writes `sums` and scale times the imaginary parts, times e^(-i pi a / 2 A)."""
    for a in tl.static_range(A):
        more = im[a] * (scale * cosine(a, 4 * A)) - re[a] * (scale * sine(a, 4 * A))
        total = (sums[a].to(tl.float32) + more).to(at.dtype.element_ty)
        inside = there
        if not WHOLE:
            inside = there & (first + a * first_step < outputs)
        tl.store(at, total, mask=inside, eviction_policy=STAYS)
        at += step


@triton.jit
def _kept(at, part, step, there, N: tl.constexpr, STAYS: tl.constexpr):
    """Tuples of re and im of N complex numbers, each a step further; im is a `part` behind re. STAYS: whether
    what is read or written should leave the L2 cache first or last, or as all else."""
    re, im = (), ()
    for _ in tl.static_range(N):
        re = longer(re, tl.load(at, mask=there, other=0.0, eviction_policy=STAYS))
        im = longer(im, tl.load(at + part, mask=there, other=0.0, eviction_policy=STAYS))
        at += step
    return re, im


@triton.jit
def _keep(re, im, at, part, step, there, N: tl.constexpr, STAYS: tl.constexpr):
    """Writes them."""
    for i in tl.static_range(N):
        tl.store(at, re[i], mask=there, eviction_policy=STAYS)
        tl.store(at + part, im[i], mask=there, eviction_policy=STAYS)
        at += step


@triton.jit(do_not_specialize=["origin", "last"])
def _fused_kernel(
    y_ptr, spectrum_ptr, z_ptr, position_ptr, origin, last,
    outer_ptr, outer_back_ptr, inner_ptr, inner_back_ptr, outputs, channels,
    y_layer, y_sequence, y_position, s_layer, s_filter, s_part, s_bin, z_layer, z_sequence, z_position,
    A: tl.constexpr, B: tl.constexpr, D: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    MOVED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of C channels, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    if MOVED:
        further = rows_further(position_ptr, origin, last)
        y_ptr += further * y_position
        z_ptr += further * z_position
    y_at = y_ptr + layer * y_layer + sequence * y_sequence
    spectrum_at = spectrum_ptr + layer * s_layer + sequence * s_filter
    z_at = z_ptr + layer * z_layer + sequence * z_sequence
    if CHAINED:
        _ask(
            tl.program_id(0), y_at, spectrum_at, z_at, outputs, channels, y_position, s_part, s_bin,
            z_position, A * B * D, C,
        )  # fmt: skip
        gdc_wait()
        gdc_launch_dependents()
    if MOVED:  # noqa: SIM102 (the compiler decides this one)
        if is_elsewhere(position_ptr, origin, last):
            return
    # Inputs n = a B D + m, m = b D + d.
    m, channel, there = _index(tl.program_id(0), channels, B, D, C)
    re, im = _inputs(y_at + m * y_position + channel, B * D * y_position, there, A, "")
    lane = tl.arange(0, D * C)[None, :] % C
    outer = factors_at(outer_ptr, m, lane, C)
    inner = ()
    if D > 1:
        inner = factors_at(inner_ptr, tl.arange(0, D)[:, None], tl.arange(0, A * C)[None, :] % C, C)
    re, im = forward(re, im, outer, inner, A, B, D)
    # Bins k = ka + A kb, of two factors by kb and of three by kd, k = ka + A kb + A B kd.
    ROWS: tl.constexpr = A if D == 1 else B
    EACH: tl.constexpr = 1 if D == 1 else A
    BINS: tl.constexpr = B if D == 1 else D
    k, bin_channel, bin_there = _index(tl.program_id(0), channels, ROWS, EACH, C)
    at = spectrum_at + k * s_bin + bin_channel
    bins_re, bins_im = _kept(at, s_part, ROWS * EACH * s_bin, bin_there, BINS, "")
    re, im = multiplied(re, im, bins_re, bins_im, BINS)
    outer = factors_at(outer_back_ptr, m, lane, C)
    if D > 1:
        inner = factors_at(inner_back_ptr, tl.arange(0, D)[:, None], tl.arange(0, A * C)[None, :] % C, C)
    at = z_at + m * z_position + channel
    sums = _sums(at, B * D * z_position, there, m, B * D, outputs, WHOLE, A, "")
    re, im = backward(re, im, outer, inner, A, B, D)
    scale: tl.constexpr = 1.0 / (A * B * D)
    _outputs(re, im, sums, at, B * D * z_position, there, m, B * D, outputs, WHOLE, scale, A, "")


@triton.jit
def _index(block, channels, ROWS: tl.constexpr, EACH: tl.constexpr, C: tl.constexpr):
    """Of tensors [ROWS, EACH C]: the index row EACH + each, the channel, and whether there is one."""
    element = tl.arange(0, EACH * C)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    channel = block * C + element % C
    # A mask of all elements, as loads need it: of the rows all exist.
    return (row * EACH + element // C).to(tl.int64), channel, (channel < channels) & (row >= 0)


# -- three launches ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["origin", "last"])
def _forward_kernel(
    y_ptr, space_ptr, position_ptr, origin, last, outer_ptr, turns_ptr, channels,
    y_layer, y_sequence, y_position, w_layer, w_sequence, w_part,
    N2: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, MOVED: tl.constexpr,
    CHAINED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Over n1, and the twiddle. Grid (blocks of C channels * n2, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    if MOVED:
        y_ptr += rows_further(position_ptr, origin, last) * y_position
    n2, block = tl.program_id(0) % N2, tl.program_id(0) // N2
    y_ptr += layer * y_layer + sequence * y_sequence
    space_ptr += layer * w_layer + sequence * w_sequence
    if CHAINED:
        _ask_for(y_ptr, n2 + N2 * tl.arange(0, A * B)[:, None], y_position, block, channels, C)
        gdc_wait()
        gdc_launch_dependents()
    if MOVED:  # noqa: SIM102 (the compiler decides this one)
        if is_elsewhere(position_ptr, origin, last):
            return
    b, channel, there = _index(block, channels, B, 1, C)
    at = y_ptr + (b * N2 + n2) * y_position + channel
    re, im = _inputs(at, B * N2 * y_position, there, A, FIRST)
    outer = factors_at(outer_ptr, b, tl.arange(0, C)[None, :], C)
    re, im = forward(re, im, outer, (), A, B, 1)
    k1, channel, there = _index(block, channels, A, 1, C)
    turns_re, turns_im = _turns(turns_ptr, n2, k1, 1, A, B)
    re, im = multiplied(re, im, turns_re, turns_im, B)
    at = space_ptr + (k1 * N2 + n2) * channels + channel
    _keep(re, im, at, w_part, A * N2 * channels, there, B, LAST)


@triton.jit(do_not_specialize=["origin", "last"])
def _middle_kernel(
    space_ptr, spectrum_ptr, position_ptr, origin, last, inner_ptr, inner_back_ptr, channels,
    w_layer, w_sequence, w_part, s_layer, s_filter, s_part, s_bin,
    N1: tl.constexpr, N2: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
    MOVED: tl.constexpr, CHAINED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Over n2, times the spectrum, back over k2. Grid (blocks of C channels * k1, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    k1, block = tl.program_id(0) % N1, tl.program_id(0) // N1
    space_ptr += layer * w_layer + sequence * w_sequence
    spectrum_ptr += layer * s_layer + sequence * s_filter
    if CHAINED:
        bins = k1 + N1 * tl.arange(0, A * B)[:, None]
        _ask_for(spectrum_ptr, bins, s_bin, block, channels, C)
        _ask_for(spectrum_ptr + s_part, bins, s_bin, block, channels, C)
        gdc_wait()
        gdc_launch_dependents()
    if MOVED:  # noqa: SIM102 (the compiler decides this one)
        if is_elsewhere(position_ptr, origin, last):
            return
    b, channel, there = _index(block, channels, B, 1, C)
    lane = tl.arange(0, C)[None, :]
    place, step = space_ptr + (k1 * N2 + b) * channels + channel, B * channels
    re, im = _kept(place, w_part, step, there, A, LAST)
    re, im = forward(re, im, factors_at(inner_ptr, b, lane, C), (), A, B, 1)
    k2, bin_channel, bin_there = _index(block, channels, A, 1, C)
    at = spectrum_ptr + (k1 + N1 * k2) * s_bin + bin_channel
    bins_re, bins_im = _kept(at, s_part, N1 * A * s_bin, bin_there, B, FIRST)
    re, im = multiplied(re, im, bins_re, bins_im, B)
    re, im = backward(re, im, factors_at(inner_back_ptr, b, lane, C), (), A, B, 1)
    _keep(re, im, place, w_part, step, there, A, LAST)


@triton.jit(do_not_specialize=["origin", "last"])
def _backward_kernel(
    space_ptr, z_ptr, position_ptr, origin, last, outer_back_ptr, turns_ptr, outputs, channels,
    w_layer, w_sequence, w_part, z_layer, z_sequence, z_position,
    N2: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, WHOLE: tl.constexpr,
    MOVED: tl.constexpr, CHAINED: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The twiddle taken back, and back over k1. Grid (blocks of C channels * n2, batch, layers)."""
    layer, sequence = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    n2, block = tl.program_id(0) % N2, tl.program_id(0) // N2
    space_ptr += layer * w_layer + sequence * w_sequence
    z_ptr += layer * z_layer + sequence * z_sequence
    if MOVED:
        z_ptr += rows_further(position_ptr, origin, last) * z_position
    if CHAINED:
        rows = tl.minimum(n2 + N2 * tl.arange(0, A * B)[:, None], outputs - 1)
        _ask_for(z_ptr, rows, z_position, block, channels, C)
        gdc_wait()
        gdc_launch_dependents()
    if MOVED:  # noqa: SIM102 (the compiler decides this one)
        if is_elsewhere(position_ptr, origin, last):
            return
    k1, channel, there = _index(block, channels, A, 1, C)
    at = space_ptr + (k1 * N2 + n2) * channels + channel
    re, im = _kept(at, w_part, A * N2 * channels, there, B, FIRST)
    turns_re, turns_im = _turns(turns_ptr, n2, k1, -1, A, B)
    re, im = multiplied(re, im, turns_re, turns_im, B)
    b, channel, there = _index(block, channels, B, 1, C)
    first, step = b * N2 + n2, B * N2
    at = z_ptr + first * z_position + channel
    sums = _sums(at, step * z_position, there, first, step, outputs, WHOLE, A, FIRST)
    re, im = backward(re, im, factors_at(outer_back_ptr, b, tl.arange(0, C)[None, :], C), (), A, B, 1)
    scale: tl.constexpr = 1.0 / (A * B * N2)
    _outputs(re, im, sums, at, step * z_position, there, first, step, outputs, WHOLE, scale, A, FIRST)


@triton.jit
def _turns(turns_ptr, n2, ka, SIGN: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The twiddle factors w^n2 e^(-2 pi i n2 k1 / U) of an n2 and of k1 = ka + A kb, or their conjugates: B
    tensors like ka."""
    at = turns_ptr + 2 * (1 + log2(A * B)) * n2
    re, im = tl.load(at), SIGN * tl.load(at + 1)
    # The power ka by the bits of ka, the powers A kb by the bits of kb.
    for i in tl.static_range(log2(A)):
        at += 2
        with_re, with_im = times(re, im, tl.load(at), SIGN * tl.load(at + 1))
        has = (ka >> i) & 1 != 0
        re, im = tl.where(has, with_re, re), tl.where(has, with_im, im)
    steps_re, steps_im = (), ()
    for _ in tl.static_range(log2(B)):
        at += 2
        steps_re, steps_im = longer(steps_re, tl.load(at)), longer(steps_im, SIGN * tl.load(at + 1))
    return powers(re, im, steps_re, steps_im, B)


def reference_fft_tile(y: Tensor, spectrum: Tensor, z: Tensor) -> Tensor:
    """`fft_tile` in plain torch, in the format of sums, or in float64; returns z."""
    side, dtype = y.shape[2], torch.promote_types(y.dtype, torch.float32)
    n = torch.arange(side, device=y.device, dtype=torch.float64)
    twist = torch.polar(torch.ones_like(n), n * (math.pi / (2 * side)))[:, None].to(dtype.to_complex())
    bins = torch.complex(spectrum[:, :, 0].to(dtype), spectrum[:, :, 1].to(dtype))
    product = torch.fft.fft(y.to(dtype) * twist, dim=2) * bins
    c = torch.fft.ifft(product, dim=2) * twist.conj()
    return z.add_(c.imag[:, :, : z.shape[2]])
