"""One position of a long-convolution model through all its layers, in one launch.

    z_l,t = sums_l,t + a_(l-1),t k_l,0                                the red cell
    a_l,t = gelu(z_l,t W_up) W_down         or    z_l,t (a_(l-1),t W)     the block: mlp or gate
    a_0,(t+1) = a_M,t + noise_t                                       where noise is given

(Flash Inference, sections 2.1, 2.3 and 4.) The programs of a launch stay for all layers. They exchange
activations through memory, and no layer waits for a launch; what it needs of weights, taps and sums is on its
way before. How columns are shared out (P programs, D channels, 2 D hidden):

    split     program p makes its share of the hidden units, and what these give to all channels: P partial
              sums of each channel, which everyone adds up. One exchange a layer, of P D words
    columns   program p makes its share of the hidden units, then of the channels: two exchanges a layer, of
              2 D and D words
    gate      program p makes its share of the channels: one exchange a layer, of D words

No counter and no fence tell that a word is there: its lowest bit does. There are two buffers, for exchanges
0, 2, 4, ... and 1, 3, 5, ..., and the bit is another one whenever a buffer is used again, from launch to
launch too; so nobody takes the word of exchange e - 2 for that of e, and nothing is ever emptied. That a word
of e - 2 is no longer needed when it is written over is certain too: whoever writes in exchange e has read all
words of e - 1, and whoever wrote there had read all of e - 2. The bit costs an exchanged number 1.2e-7 of
itself, and makes a NaN of an infinity.

Sums stand where activations will, so a program may write its channels of a level only after all others have
read the sums there: it does so once it has the exchange behind them.

Whoever waits holds a place on a multiprocessor: all programs of a launch need one at the same time. And every
program has a share of every exchange: who had none would be waited for by nobody, and could come too late.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.decoder.checks import check_space, check_written, kind
from kernels.decoder.split_kv import ONE_BY_ONE, tile
from kernels.gpu import PROCESSORS, gpu_of
from kernels.long_convolution.tensors import FORMATS, wide

# A model of so many channels at most is split: of more, adding up partial sums takes longer than an exchange.
SPLIT_CHANNELS = 384
# Programs that a sequence has then.
SPLIT_PROGRAMS = 16
WARPS = 8
# With so many sequences a thread has not the registers for parts of two matrices.
MANY_ROWS = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """How a launch is laid out: `programs` for `rows` sequences, a power of two, of `warps` each; whether
    blocks are `split` (mlp only; see above)."""

    programs: int
    rows: int
    split: bool
    warps: int = WARPS

    def __post_init__(self) -> None:
        if self.programs < 1 or self.rows < 1 or self.rows & (self.rows - 1):
            raise ValueError(f"programs have to be 1 or more, rows a power of two, not {self}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps have to be a power of two, 16 at most, not {self.warps}")


class Workspace(NamedTuple):
    """Where the programs of one model's launches meet: zeros at first, then what the last launch has left.
    Launches that overlap need one each, and after a launch that was broken off a new one is needed.

    int32: words [2, groups of sequences, words of an exchange]; turns [groups], how many exchanges there have
    been, modulo 4.
    """

    words: Tensor
    turns: Tensor


def token_config(*, batch: int, channels: int, gated: bool, processors: int = PROCESSORS) -> TokenConfig:
    """The layout for a model on a GPU of so many multiprocessors.

    A small model waits for exchanges, not for weights: few programs, each sequence with programs of its own
    as far as there is place. A large one waits for weights: as many programs as have an equal share.

    >>> token_config(batch=1, channels=256, gated=False)
    TokenConfig(programs=16, rows=1, split=True, warps=8)
    >>> token_config(batch=4, channels=768, gated=False)
    TokenConfig(programs=96, rows=4, split=False, warps=8)
    """
    if min(batch, channels, processors) < 1:
        raise ValueError(f"no layout for {batch} sequences of {channels} channels")
    if channels <= SPLIT_CHANNELS:
        programs, rows = min(SPLIT_PROGRAMS, processors), 1
        while programs * triton.cdiv(batch, rows) > processors:
            rows *= 2
        return TokenConfig(programs, rows, not gated)
    share = triton.next_power_of_2(triton.cdiv(channels, processors))
    return TokenConfig(triton.cdiv(channels, share), triton.next_power_of_2(batch), False)


def config_for(a: Tensor, matrices: Sequence[Tensor]) -> TokenConfig:
    """The layout for these tensors on the device where they lie."""
    found = token_config(
        batch=a.shape[1], channels=a.shape[3], gated=len(matrices) == 1, processors=gpu_of(a).processors
    )
    return TokenConfig(1, found.rows, found.split, found.warps) if ONE_BY_ONE else found


def workspace(a: Tensor, config: TokenConfig) -> Workspace:
    """A workspace for launches with a [layers + 1, batch, room, channels] and this layout."""
    return Workspace(*(torch.zeros(size, dtype=torch.int32, device=a.device) for size in _shapes(a, config)))


def _shapes(a: Tensor, config: TokenConfig) -> list[tuple[int, ...]]:
    groups = triton.cdiv(a.shape[1], config.rows)
    words = config.rows * a.shape[3] * (config.programs if config.split else 2)
    return [(2, groups, words), (groups,)]


def token_step(
    a: Tensor,
    taps: Tensor,
    matrices: Sequence[Tensor],
    position: Tensor,
    *,
    noise: Tensor | None = None,
    space: Workspace | None = None,
    config: TokenConfig | None = None,
) -> None:
    """All levels of a [layers + 1, batch, room, channels] at `position` (int32 [1], on the device), in place.

    There a holds the input at level 0 and the sums over earlier positions above it. taps [layers, 1 or batch,
    lags, channels], of which the first lag is read. matrices: contiguous (up [layers, channels, 2 channels],
    down [layers, 2 channels, channels]) for a block "mlp", (projection [layers, channels, channels],) for
    "gate". With noise [room, batch, channels] the next input is written as far as there is room. A position
    outside of a changes nothing. a, taps, noise: channels contiguous. Each in fp32, fp16 or bf16; sums are
    made in fp32. space: see Workspace; one is made where none is given.

    Raises ValueError for tensors that do not fit together.
    """
    _check(a, taps, matrices, position, noise)
    config = config or config_for(a, matrices)
    if config.split and len(matrices) == 1:
        raise ValueError("config: a gate has no hidden units that could be split")
    space = space or workspace(a, config)
    check_space(space, _shapes(a, config))
    channels, parts = a.shape[3], config.programs if config.split else 1
    dim = max(16, triton.next_power_of_2(channels))
    share = triton.next_power_of_2(triton.cdiv(channels, config.programs))
    # Who has no share of an exchange is not waited for, and may be late for the next one: none is launched.
    programs = config.programs if config.split else triton.cdiv(channels, share)
    sizes = {
        "CHANNELS": channels,
        "DIM": dim,
        "ROWS": config.rows,
        "SHARE": share,
        "PARTS": parts,
        "PARTS_TILE": tile(parts, config.rows * dim, config.warps),
        "NOISY": noise is not None,
        "num_warps": config.warps,
        "num_stages": 1,
    }
    shared = (
        noise, position, *space, len(taps), a.shape[1], a.shape[2], *a.stride()[:3],
        taps.stride(0), taps.stride(1) if taps.shape[1] > 1 else 0,
        *(noise.stride()[:2] if noise is not None else (0, 0)),
    )  # fmt: skip
    grid = programs, len(space.turns)
    if len(matrices) == 1:
        _gate_kernel[grid](a, taps, *matrices, *shared, **sizes)
    else:
        hidden = triton.next_power_of_2(triton.cdiv(2 * channels, config.programs))
        _mlp_kernel[grid](
            a, taps, *matrices, *shared,
            SPLIT=config.split, HIDDEN_SHARE=hidden if config.split else 2 * share,
            HIDDEN_TILE=tile(1, config.rows * 2 * dim, config.warps), **sizes,
        )  # fmt: skip


def _check(
    a: Tensor, taps: Tensor, matrices: Sequence[Tensor], position: Tensor, noise: Tensor | None
) -> None:
    """Raises ValueError naming what does not fit."""
    if a.dim() != 4 or 0 in a.shape or len(a) < 2 or a.stride(-1) != 1 or a.dtype not in FORMATS:
        raise ValueError(f"a has to be [layers + 1, batch, room, channels] in fp32 or 16 bits, not {kind(a)}")
    check_written("a", a, taps, noise)
    layers, (batch, room, channels) = len(a) - 1, a.shape[1:]
    if (
        taps.dim() != 4
        or (len(taps), taps.shape[3]) != (layers, channels)
        or taps.shape[1] not in (1, batch)
        or not taps.shape[2]
        or taps.stride(-1) != 1
    ):
        raise ValueError(f"taps have to be [{layers}, 1 or {batch}, lags, {channels}], not {kind(taps)}")
    wanted = [(layers, channels, channels)]
    if len(matrices) == 2:
        wanted = [(layers, channels, 2 * channels), (layers, 2 * channels, channels)]
    if [tuple(x.shape) for x in matrices] != wanted or not all(x.is_contiguous() for x in matrices):
        raise ValueError(
            f"matrices have to be contiguous {wanted}, not {', '.join(kind(x) for x in matrices)}"
        )
    if position.dtype != torch.int32 or position.numel() != 1:
        raise ValueError(f"position has to be int32 of one element, not {kind(position)}")
    if noise is not None and (tuple(noise.shape) != (room, batch, channels) or noise.stride(-1) != 1):
        raise ValueError(f"noise has to be [{room}, {batch}, {channels}], not {kind(noise)}")
    for name, x in (("taps", taps), ("noise", noise), *(("matrices", x) for x in matrices)):
        if x is not None and (x.dtype not in FORMATS or x.device != a.device):
            raise ValueError(f"{name}: fp32 or 16 bits on {a.device} is needed, not {kind(x)} on {x.device}")


@triton.jit
def _mlp_kernel(
    a_ptr, taps_ptr, up_ptr, down_ptr, noise_ptr, position_ptr, words_ptr, turns_ptr, layers, batch, room,
    stride_level, stride_sequence, stride_position, stride_tap_layer, stride_tap_sequence,
    stride_noise_position, stride_noise_sequence,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, PARTS_TILE: tl.constexpr, NOISY: tl.constexpr,
    SPLIT: tl.constexpr, HIDDEN_SHARE: tl.constexpr, HIDDEN_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (programs, groups of sequences)."""
    t = tl.load(position_ptr).to(tl.int64)
    if (t < 0) | (t >= room):
        return
    HIDDEN: tl.constexpr = 2 * CHANNELS
    program, group = tl.program_id(0), tl.program_id(1)
    WORDS: tl.constexpr = ROWS * CHANNELS * (PARTS if SPLIT else 2)
    words_ptr += group.to(tl.int64) * WORDS
    buffer = tl.num_programs(1).to(tl.int64) * WORDS
    turn = tl.load(turns_ptr + group)
    row, column = (group * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, DIM)[None, :]
    there = (row < batch) & (column < CHANNELS)
    level_ptr = a_ptr + t * stride_position + row.to(tl.int64) * stride_sequence + column
    tap_ptr = taps_ptr + row.to(tl.int64) * stride_tap_sequence + column
    mine = there & (column // SHARE == program)
    unit = program * HIDDEN_SHARE
    y = tl.load(level_ptr, mask=there, other=0.0).to(tl.float32)
    sums = tl.load(level_ptr + stride_level, mask=there, other=0.0)
    tap = tl.load(tap_ptr, mask=there, other=0.0)
    up = _matrix(up_ptr, 0, unit, CHANNELS, HIDDEN, DIM, HIDDEN_SHARE, True)
    if SPLIT:
        down = _rows_of(down_ptr, 0, unit, HIDDEN, CHANNELS, HIDDEN_SHARE, DIM, True)
    else:
        down = _matrix(down_ptr, 0, program * SHARE, HIDDEN, CHANNELS, 2 * DIM, SHARE, True)
    for layer in range(layers):
        z = sums.to(tl.float32) + y * tap.to(tl.float32)
        hidden = _gelu(_product(z, up, True))
        if not SPLIT:
            to = words_ptr + (turn & 1) * buffer
            _publish(hidden, to, unit, batch - group * ROWS, turn, HIDDEN, ROWS, HIDDEN_SHARE)
        # What the next layer needs comes while this one's words do.
        more = layer + 1 < layers
        above = tl.cast(layer + 1, tl.int64)
        sums = tl.load(level_ptr + (above + 1) * stride_level, mask=there & more, other=0.0)
        tap = tl.load(tap_ptr + above * stride_tap_layer, mask=there & more, other=0.0)
        if ROWS < MANY_ROWS:
            up = _matrix(up_ptr, above, unit, CHANNELS, HIDDEN, DIM, HIDDEN_SHARE, more)
        if SPLIT:
            out = _product(hidden, down, True)
            down = _rows_of(down_ptr, above, unit, HIDDEN, CHANNELS, HIDDEN_SHARE, DIM, more)
            to = words_ptr + (turn & 1) * buffer + program * ROWS * CHANNELS
            _publish(out, to, 0, batch - group * ROWS, turn, CHANNELS, ROWS, DIM)
        else:
            at = words_ptr + (turn & 1) * buffer
            hidden = _gathered(at, batch - group * ROWS, turn, HIDDEN, 2 * DIM, ROWS, 1, HIDDEN_TILE)
            turn += 1
            out = _product(hidden, down, True)
            down = _matrix(down_ptr, above, program * SHARE, HIDDEN, CHANNELS, 2 * DIM, SHARE, more)
            to = words_ptr + (turn & 1) * buffer
            _publish(out, to, program * SHARE, batch - group * ROWS, turn, CHANNELS, ROWS, SHARE)
        if ROWS >= MANY_ROWS:
            up = _matrix(up_ptr, above, unit, CHANNELS, HIDDEN, DIM, HIDDEN_SHARE, more)
        at = words_ptr + (turn & 1) * buffer
        y = _gathered(at, batch - group * ROWS, turn, CHANNELS, DIM, ROWS, PARTS, PARTS_TILE)
        turn += 1
        tl.store(level_ptr + above * stride_level, y.to(a_ptr.dtype.element_ty), mask=mine)
    if NOISY:
        noise_at = noise_ptr + t * stride_noise_position + row.to(tl.int64) * stride_noise_sequence + column
        y += tl.load(noise_at, mask=mine, other=0.0).to(tl.float32)
        tl.store(level_ptr + stride_position, y.to(a_ptr.dtype.element_ty), mask=mine & (t + 1 < room))
    # All have read it: their words of the last exchange were there.
    if program == 0:
        tl.store(turns_ptr + group, turn & 3)


@triton.jit
def _gate_kernel(
    a_ptr, taps_ptr, projection_ptr, noise_ptr, position_ptr, words_ptr, turns_ptr, layers, batch, room,
    stride_level, stride_sequence, stride_position, stride_tap_layer, stride_tap_sequence,
    stride_noise_position, stride_noise_sequence,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr,
    PARTS: tl.constexpr, PARTS_TILE: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    """Grid (programs, groups of sequences)."""
    t = tl.load(position_ptr).to(tl.int64)
    if (t < 0) | (t >= room):
        return
    program, group = tl.program_id(0), tl.program_id(1)
    words_ptr += group.to(tl.int64) * ROWS * CHANNELS * 2
    buffer = tl.num_programs(1).to(tl.int64) * ROWS * CHANNELS * 2
    turn = tl.load(turns_ptr + group)
    row = (group * ROWS + tl.arange(0, ROWS))[:, None]
    every, column = tl.arange(0, DIM)[None, :], program * SHARE + tl.arange(0, SHARE)[None, :]
    mine = (row < batch) & (column < CHANNELS)
    row_ptr = a_ptr + t * stride_position + row.to(tl.int64) * stride_sequence
    level_ptr = row_ptr + column
    tap_ptr = taps_ptr + row.to(tl.int64) * stride_tap_sequence + column
    y = tl.load(row_ptr + every, mask=(row < batch) & (every < CHANNELS), other=0.0).to(tl.float32)
    own = tl.load(level_ptr, mask=mine, other=0.0).to(tl.float32)
    sums = tl.load(level_ptr + stride_level, mask=mine, other=0.0)
    tap = tl.load(tap_ptr, mask=mine, other=0.0)
    weight = _matrix(projection_ptr, 0, program * SHARE, CHANNELS, CHANNELS, DIM, SHARE, True)
    for layer in range(layers):
        gate = _product(y, weight, False)
        own = (sums.to(tl.float32) + own * tap.to(tl.float32)) * gate
        to = words_ptr + (turn & 1) * buffer
        _publish(own, to, program * SHARE, batch - group * ROWS, turn, CHANNELS, ROWS, SHARE)
        # What the next layer needs comes while this one's words do.
        more = layer + 1 < layers
        above = tl.cast(layer + 1, tl.int64)
        tl.store(level_ptr + above * stride_level, own.to(a_ptr.dtype.element_ty), mask=mine)
        sums = tl.load(level_ptr + (above + 1) * stride_level, mask=mine & more, other=0.0)
        tap = tl.load(tap_ptr + above * stride_tap_layer, mask=mine & more, other=0.0)
        weight = _matrix(projection_ptr, above, program * SHARE, CHANNELS, CHANNELS, DIM, SHARE, more)
        y = _gathered(to, batch - group * ROWS, turn, CHANNELS, DIM, ROWS, PARTS, PARTS_TILE)
        turn += 1
    if NOISY:
        noise_at = noise_ptr + t * stride_noise_position + row.to(tl.int64) * stride_noise_sequence + column
        own += tl.load(noise_at, mask=mine, other=0.0).to(tl.float32)
        tl.store(level_ptr + stride_position, own.to(a_ptr.dtype.element_ty), mask=mine & (t + 1 < room))
    # All have read it: their words of the last exchange were there.
    if program == 0:
        tl.store(turns_ptr + group, turn & 3)


@triton.jit
def _matrix(
    ptr, layer, first, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, more
):
    """Columns from `first` on of a layer's matrix [IN, OUT], as [ROWS, COLUMNS]; zeros beyond it, and where
    there is no such layer."""
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    at = ptr + tl.cast(layer, tl.int64) * (IN * OUT) + row * OUT + column
    return tl.load(at, mask=(row < IN) & (column < OUT) & more, other=0.0)


@triton.jit
def _rows_of(
    ptr, layer, first, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, more
):
    """Rows from `first` on of a layer's matrix [IN, OUT], as [ROWS, COLUMNS]; zeros beyond it, and where
    there is no such layer."""
    row, column = first + tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    at = ptr + tl.cast(layer, tl.int64) * (IN * OUT) + row * OUT + column
    return tl.load(at, mask=(row < IN) & (column < OUT) & more, other=0.0)


@triton.jit
def _product(x, weight, FLAT: tl.constexpr):
    """x [rows, in] times weight [in, out], summed in fp32: one row at a time, since a thread has not the
    registers for the sums of more.

    FLAT: the same in two dimensions. The weights then stay in the threads that have loaded them, without a
    way through shared memory, but the products are in many threads, and so is all that is added to them.
    """
    if x.shape[0] == 1 and FLAT:
        only = tl.reshape(x, (x.shape[1],))
        return tl.sum(only[:, None] * weight.to(tl.float32), 0)[None, :]
    elif x.shape[0] == 1:
        return tl.sum(x[:, :, None] * weight.to(tl.float32)[None, :, :], 1)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
        both = tl.join(_product(first, weight, FLAT), _product(second, weight, FLAT))
        return tl.reshape(tl.permute(both, (2, 0, 1)), (x.shape[0], weight.shape[1]))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _bit(turn):
    """The lowest bit of the words of this exchange, from the first one on: 1, 1, 0, 0, 1, 1, ..."""
    return ((turn >> 1) & 1) ^ 1


@triton.jit
def _publish(x, words_ptr, first, rows, turn, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Writes x [ROWS, COLUMNS] for all others into words [ROWS, WIDTH], from column `first` on, as far as
    there are rows and columns."""
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, COLUMNS)[None, :]
    words = (x.to(tl.int32, bitcast=True) & -2) | _bit(turn)
    tl.store(words_ptr + row * WIDTH + column, words, mask=(row < rows) & (column < WIDTH))


@triton.jit
def _gathered(
    words_ptr, rows, turn, WIDTH: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, PARTS_TILE: tl.constexpr,
):  # fmt: skip
    """The sum of all parts [PARTS, ROWS, WIDTH] of this exchange once they are there, [ROWS, DIM].
    PARTS_TILE: so many that no word is in two threads; see `split_kv.tile`."""
    part = tl.arange(0, PARTS_TILE)[:, None, None]
    row, column = tl.arange(0, ROWS)[None, :, None], tl.arange(0, DIM)[None, None, :]
    there = (part < PARTS) & (row < rows) & (column < WIDTH)
    at = words_ptr + (part * ROWS + row) * WIDTH + column
    words = tl.load(at, mask=there, other=0, volatile=True)
    while tl.max((there & ((words & 1) != _bit(turn))).to(tl.int32)) == 1:
        words = tl.load(at, mask=there, other=0, volatile=True)
    return tl.sum(words.to(tl.float32, bitcast=True), 0)


def reference_token_step(
    a: Tensor, taps: Tensor, matrices: Sequence[Tensor], position: int, *, noise: Tensor | None = None
) -> None:
    """As `token_step`, in plain torch and any float dtype; 16-bit numbers are summed in fp32."""
    y = wide(a[0, :, position])
    for layer, tap in enumerate(taps[:, :, 0]):
        z = wide(a[layer + 1, :, position]) + y * wide(tap)
        weights = [wide(matrix[layer]) for matrix in matrices]
        y = z * (y @ weights[0]) if len(weights) == 1 else functional.gelu(z @ weights[0]) @ weights[1]
        a[layer + 1, :, position] = y
    if noise is not None and position + 1 < a.shape[2]:
        a[0, :, position + 1] = y + wide(noise[position])
