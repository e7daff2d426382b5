"""One position of a long-convolution model through all its layers, in one launch.

    z_l,t = sums_l,t + a_(l-1),t k_l,0                                the red cell
    a_l,t = W_down gelu(W_up z_l,t)         or    z_l,t (W a_(l-1),t)     the block: mlp or gate
    a_0,(t+1) = a_M,t + noise_t                                       with noise

(Flash Inference, sections 2.1, 2.3 and 4.) The programs of a launch stay for all layers. They exchange
activations through memory, and no layer waits for a launch; the weights, taps and sums of a layer are in
flight before the layer starts. Of P programs, D channels and 2 D hidden units

    mlp     program p makes its share of the hidden units, then of the channels: two exchanges a layer, of 2 D
            and D words; its result of a channel is already the next layer's z
    gate    program p makes its share of the channels: one exchange a layer, of D words

A step consists mostly of exchanges, so as little work as possible lies between two: a row of a matrix is in
one warp, whose sum waits for no other warp.

No counter and no fence tells that a word has arrived: its lowest bit does. There are two buffers, for
exchanges 0, 2, 4, ... and 1, 3, 5, .... The bit flips whenever a buffer is used again, also from launch to
launch. So no program takes the word of exchange e - 2 for the word of e, and nothing is ever emptied. A word
of e - 2 is also never overwritten too early: a program that writes in exchange e has read all words of e - 1,
and the programs that wrote these had read all words of e - 2. The bit costs an exchanged number up to 1.2e-7
of its value.

Activations overwrite sums, so a program may write its channels of a level only after all other programs have
read the sums there. All programs read the sums of the first level: it is written once the words of a later
exchange have arrived. Of the other levels each program reads only its own sums.

A waiting program holds a place on a multiprocessor: all programs of a launch need a place at the same time.
And every program has a share of every exchange: no other program would wait for one without a share, and it
could come too late.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from simcore.kernels.decoder.checks import check_space, check_written, kind
from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.gpu import PROCESSORS, gpu_of, launching
from simcore.kernels.kernel import Kernel, has_kernel
from simcore.kernels.long_convolution.tensors import FORMATS, normal, wide
from simcore.kernels.streams import shared
from simcore.ops.op import Op

# The numbers of a row that the threads of a warp hold at once, 16 bytes each.
LINE_BYTES = 512
# Channels of a program.
SHARES = (4, 8, 16)
# Words that a warp loads at once. No word of an exchange may be in two warps: only an unspecified one of them
# would wait for it, and the other could go on with the old word.
WARP_WORDS = 128


@dataclass(frozen=True, slots=True)
class TokenConfig:
    """The layout of a launch: `programs` for `rows` sequences, a power of two, of `warps` each."""

    programs: int
    rows: int
    warps: int

    def __post_init__(self) -> None:
        if self.programs < 1 or self.rows < 1 or self.rows & (self.rows - 1):
            raise ValueError(f"programs have to be 1 or more, rows a power of two, not {self}")
        if self.warps not in (1, 2, 4, 8, 16):
            raise ValueError(f"warps have to be a power of two, 16 at most, not {self.warps}")


class Workspace(NamedTuple):
    """The memory through which the programs of one model's launches exchange words: zeros at first, then the
    words of the last launch.

    Launches that overlap need a workspace each, and places on multiprocessors for all their programs
    together. After an aborted launch a new workspace is needed.

    int32: words [2, groups of sequences, words of an exchange]; turns [batch], of which each group's first
    counts the exchanges so far, modulo 4."""

    words: Tensor
    turns: Tensor


def token_config(*, batch: int, channels: int, processors: int = PROCESSORS) -> TokenConfig:
    """Returns the layout for a model on a GPU of so many multiprocessors: as few sequences a program as there
    are places for, and then as few channels.

    >>> token_config(batch=1, channels=256)
    TokenConfig(programs=64, rows=1, warps=2)
    >>> token_config(batch=8, channels=768)
    TokenConfig(programs=48, rows=4, warps=8)
    """
    if min(batch, channels, processors) < 1:
        raise ValueError(f"no layout for {batch} sequences of {channels} channels")
    # For a GPU without places even for one sequence.
    most = max(SHARES[-1], triton.next_power_of_2(triton.cdiv(channels, processors)))
    found = []
    for share in (*SHARES[:-1], most):
        programs = triton.cdiv(channels, share)
        together = processors // programs
        if together:
            rows = triton.next_power_of_2(triton.cdiv(batch, together))
            found.append((rows, share, programs))
    rows, share, programs = min(found)
    return TokenConfig(programs, rows, min(8, share // 2))


def config_for(a: Tensor) -> TokenConfig:
    """Returns the layout for a [layers + 1, batch, room, channels] on its device."""
    found = token_config(batch=a.shape[1], channels=a.shape[3], processors=gpu_of(a).processors)
    return TokenConfig(1, found.rows, found.warps) if ONE_BY_ONE else found


def workspace(a: Tensor, matrices: Sequence[Tensor], config: TokenConfig) -> Workspace:
    """Makes a workspace for launches with a [layers + 1, batch, room, channels] and this layout."""
    shapes = _shapes(a, matrices, config)
    return Workspace(*(torch.zeros(size, dtype=torch.int32, device=a.device) for size in shapes))


def _shapes(a: Tensor, matrices: Sequence[Tensor], config: TokenConfig) -> list[tuple[int, ...]]:
    groups = triton.cdiv(a.shape[1], config.rows)
    return [(2, groups, config.rows * len(matrices) * a.shape[3]), (a.shape[1],)]


@launching
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
    """Computes all levels of a [layers + 1, batch, room, channels] at `position` (int32 [1], on the device),
    in place.

    There a holds the input at level 0 and the sums over earlier positions above it. taps [layers, 1 or batch,
    lags, channels], of which the first lag is read. matrices, outputs first as in torch's linear layers:
    contiguous (up [layers, 2 channels, channels], down [layers, channels, 2 channels]) for a block "mlp",
    (projection [layers, channels, channels],) for "gate". With noise [room, batch, channels] the next input
    is written, if there is room for it. A position outside of a changes nothing. a, taps, noise: channels
    contiguous. Each in fp32, fp16 or bf16; sums are made in fp32. space: see Workspace; by default a new one.

    Raises ValueError for tensors that do not fit together.
    """
    _check(a, taps, matrices, position, noise)
    config = config or config_for(a)
    space = space or workspace(a, matrices, config)
    check_space(space, _shapes(a, matrices, config))
    if any(x.dtype != torch.int32 or x.device != a.device or not x.is_contiguous() for x in space):
        raise ValueError(f"the workspace has to be contiguous int32 on {a.device}")
    channels = a.shape[3]
    share = triton.next_power_of_2(triton.cdiv(channels, config.programs))
    line = LINE_BYTES // matrices[0].element_size()
    words = max(channels, config.warps * WARP_WORDS)
    # No program waits for one without a share of an exchange, which may be late for the next: none is
    # launched.
    grid = triton.cdiv(channels, share), space.words.shape[1]
    processors = gpu_of(a).processors
    if math.prod(grid) > processors:
        raise ValueError(f"config: {math.prod(grid)} programs; {processors} can run at the same time")
    arguments = (
        a, taps, *matrices, noise, position, *space, len(taps), a.shape[1], a.shape[2], *a.stride()[:3],
        taps.stride(0), taps.stride(1) if taps.shape[1] > 1 else 0,
        *(noise.stride()[:2] if noise is not None else (0, 0)),
    )  # fmt: skip
    sizes = {
        "CHANNELS": channels,
        "LINES": triton.next_power_of_2(triton.cdiv(words, line)),
        "LINE": line,
        "ROWS": config.rows,
        "SHARE": share,
        "NOISY": noise is not None,
        "num_warps": config.warps,
        "num_stages": 1,
    }
    if not ONE_BY_ONE:
        # Programs that wait for each other: the driver starts all of them at once, or refuses.
        sizes["launch_cooperative_grid"] = True
    kernel = _gate_kernel if len(matrices) == 1 else _mlp_kernel
    kernel[grid](*arguments, **sizes)


def _check(
    a: Tensor, taps: Tensor, matrices: Sequence[Tensor], position: Tensor, noise: Tensor | None
) -> None:
    """Raises ValueError naming the tensor that does not fit."""
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
        wanted = [(layers, 2 * channels, channels), (layers, channels, 2 * channels)]
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


# The compiler must not know the number of layers: in a loop over a single one it would drop the last
# exchange. Nor the room, so that models of all lengths share a kernel.
@triton.jit(do_not_specialize=["layers", "room"])
def _mlp_kernel(
    a_ptr, taps_ptr, up_ptr, down_ptr, noise_ptr, position_ptr, words_ptr, turns_ptr, layers, batch, room,
    stride_level, stride_sequence, stride_position, stride_tap_layer, stride_tap_sequence,
    stride_noise_position, stride_noise_sequence,
    CHANNELS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr,
    SHARE: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    """Grid (programs, groups of sequences)."""
    t = tl.load(position_ptr).to(tl.int64)
    if (t < 0) | (t >= room):
        return
    HIDDEN: tl.constexpr = 2 * CHANNELS
    program, group = tl.program_id(0), tl.program_id(1)
    words_ptr += group.to(tl.int64) * ROWS * HIDDEN
    buffer = tl.num_programs(1).to(tl.int64) * ROWS * HIDDEN
    rows = batch - group * ROWS
    turn = tl.load(turns_ptr + group)
    level_ptr, tap_ptr, row, column, mine = _own(
        a_ptr, taps_ptr, t, group, program, batch,
        stride_sequence, stride_position, stride_tap_sequence, CHANNELS, ROWS, SHARE,
    )  # fmt: skip
    up = _matrix(up_ptr, 0, program * 2 * SHARE, HIDDEN, CHANNELS, 2 * SHARE, LINES, LINE, True)
    down = _matrix(down_ptr, 0, program * SHARE, CHANNELS, HIDDEN, SHARE, 2 * LINES, LINE, True)
    # All programs make all of the first z.
    all_row, all_column = _everywhere(ROWS, LINES, LINE)
    there = (all_row < rows) & (all_column < CHANNELS)
    sequence = (group * ROWS + all_row).to(tl.int64)
    all_ptr = a_ptr + t * stride_position + sequence * stride_sequence + all_column
    z = tl.load(all_ptr, mask=there, other=0.0).to(tl.float32)
    first_tap = tl.load(taps_ptr + sequence * stride_tap_sequence + all_column, mask=there, other=0.0)
    z = z * first_tap.to(tl.float32) + tl.load(all_ptr + stride_level, mask=there, other=0.0).to(tl.float32)
    y = tl.zeros((ROWS, SHARE), tl.float32)
    for layer in range(layers):
        more = layer + 1 < layers
        above = tl.cast(layer + 1, tl.int64)
        sums = tl.load(level_ptr + (above + 1) * stride_level, mask=mine & more, other=0.0).to(tl.float32)
        tap = tl.load(tap_ptr + above * stride_tap_layer, mask=mine & more, other=0.0).to(tl.float32)
        if layer > 0:
            z = _gathered(words_ptr + (turn & 1) * buffer, rows, turn, CHANNELS, ROWS, LINES, LINE)
            turn += 1
        hidden = _gelu(_product(z, up))
        at = words_ptr + (turn & 1) * buffer
        _publish(hidden, at, program * 2 * SHARE, rows, turn, HIDDEN, ROWS, 2 * SHARE)
        # The next layer's matrix is loaded while this layer's words arrive.
        up = _matrix(up_ptr, above, program * 2 * SHARE, HIDDEN, CHANNELS, 2 * SHARE, LINES, LINE, more)
        every = _gathered(at, rows, turn, HIDDEN, ROWS, 2 * LINES, LINE)
        turn += 1
        y = _product(every, down)
        at = words_ptr + (turn & 1) * buffer
        # Also after the last layer, though no program reads it: every exchange writes all of its words.
        _publish(sums + y * tap, at, program * SHARE, rows, turn, CHANNELS, ROWS, SHARE)
        down = _matrix(down_ptr, above, program * SHARE, CHANNELS, HIDDEN, SHARE, 2 * LINES, LINE, more)
        tl.store(level_ptr + above * stride_level, y.to(a_ptr.dtype.element_ty), mask=mine)
    turn += 1
    if NOISY:
        noise_at = noise_ptr + t * stride_noise_position + row.to(tl.int64) * stride_noise_sequence + column
        y += tl.load(noise_at, mask=mine, other=0.0).to(tl.float32)
        tl.store(level_ptr + stride_position, y.to(a_ptr.dtype.element_ty), mask=mine & (t + 1 < room))
    # All programs have read the turn: their words of the last exchange have arrived.
    if program == 0:
        tl.store(turns_ptr + group, turn & 3)


@triton.jit(do_not_specialize=["layers", "room"])
def _gate_kernel(
    a_ptr, taps_ptr, projection_ptr, noise_ptr, position_ptr, words_ptr, turns_ptr, layers, batch, room,
    stride_level, stride_sequence, stride_position, stride_tap_layer, stride_tap_sequence,
    stride_noise_position, stride_noise_sequence,
    CHANNELS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr,
    SHARE: tl.constexpr, NOISY: tl.constexpr,
):  # fmt: skip
    """Grid (programs, groups of sequences)."""
    t = tl.load(position_ptr).to(tl.int64)
    if (t < 0) | (t >= room):
        return
    program, group = tl.program_id(0), tl.program_id(1)
    words_ptr += group.to(tl.int64) * ROWS * CHANNELS
    buffer = tl.num_programs(1).to(tl.int64) * ROWS * CHANNELS
    rows = batch - group * ROWS
    turn = tl.load(turns_ptr + group)
    level_ptr, tap_ptr, row, column, mine = _own(
        a_ptr, taps_ptr, t, group, program, batch,
        stride_sequence, stride_position, stride_tap_sequence, CHANNELS, ROWS, SHARE,
    )  # fmt: skip
    own = tl.load(level_ptr, mask=mine, other=0.0).to(tl.float32)
    sums = tl.load(level_ptr + stride_level, mask=mine, other=0.0).to(tl.float32)
    tap = tl.load(tap_ptr, mask=mine, other=0.0).to(tl.float32)
    all_row, all_column = _everywhere(ROWS, LINES, LINE)
    all_ptr = a_ptr + t * stride_position + (group * ROWS + all_row).to(tl.int64) * stride_sequence
    y = tl.load(all_ptr + all_column, mask=(all_row < rows) & (all_column < CHANNELS), other=0.0)
    y = y.to(tl.float32)
    weight = _matrix(projection_ptr, 0, program * SHARE, CHANNELS, CHANNELS, SHARE, LINES, LINE, True)
    for layer in range(layers):
        if layer > 0:
            y = _gathered(words_ptr + (turn & 1) * buffer, rows, turn, CHANNELS, ROWS, LINES, LINE)
            turn += 1
        own = (sums + own * tap) * _product(y, weight)
        # The next layer's operands are loaded while this layer's words arrive.
        more = layer + 1 < layers
        above = tl.cast(layer + 1, tl.int64)
        if more:
            at = words_ptr + (turn & 1) * buffer
            _publish(own, at, program * SHARE, rows, turn, CHANNELS, ROWS, SHARE)
        tl.store(level_ptr + above * stride_level, own.to(a_ptr.dtype.element_ty), mask=mine)
        sums = tl.load(level_ptr + (above + 1) * stride_level, mask=mine & more, other=0.0).to(tl.float32)
        tap = tl.load(tap_ptr + above * stride_tap_layer, mask=mine & more, other=0.0).to(tl.float32)
        weight = _matrix(projection_ptr, above, program * SHARE, CHANNELS, CHANNELS, SHARE, LINES, LINE, more)
    if NOISY:
        noise_at = noise_ptr + t * stride_noise_position + row.to(tl.int64) * stride_noise_sequence + column
        own += tl.load(noise_at, mask=mine, other=0.0).to(tl.float32)
        tl.store(level_ptr + stride_position, own.to(a_ptr.dtype.element_ty), mask=mine & (t + 1 < room))
    # All programs have read the turn: their words of the last exchange have arrived.
    if program == 0:
        tl.store(turns_ptr + group, turn & 3)


@triton.jit
def _own(
    a_ptr, taps_ptr, t, group, program, batch, stride_sequence, stride_position, stride_tap_sequence,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Where a program's channels of level 0 and of the first layer's tap are, [ROWS, SHARE] pointers; their
    sequence, their channel and which of them there are."""
    row = (group * ROWS + tl.arange(0, ROWS))[:, None]
    column = program * SHARE + tl.arange(0, SHARE)[None, :]
    level_ptr = a_ptr + t * stride_position + row.to(tl.int64) * stride_sequence + column
    tap_ptr = taps_ptr + row.to(tl.int64) * stride_tap_sequence + column
    return level_ptr, tap_ptr, row, column, (row < batch) & (column < CHANNELS)


@triton.jit
def _everywhere(ROWS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr):
    """Row and column of all numbers of all rows, cut into lines: [ROWS, 1, 1] and [1, LINES, LINE]."""
    column = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    return tl.arange(0, ROWS)[:, None, None], column[None, :, :]


@triton.jit
def _matrix(
    ptr, layer, first, OUT: tl.constexpr, IN: tl.constexpr, SHARE: tl.constexpr,
    LINES: tl.constexpr, LINE: tl.constexpr, more,
):  # fmt: skip
    """SHARE rows from `first` on of a layer's matrix [OUT, IN], as [SHARE, LINES, LINE]: a row is in one
    warp. Zeros beyond it, and where there is no such layer."""
    row = first + tl.arange(0, SHARE)[:, None, None]
    column = tl.arange(0, LINES)[None, :, None] * LINE + tl.arange(0, LINE)[None, None, :]
    at = ptr + tl.cast(layer, tl.int64) * (OUT * IN) + row * IN + column
    return tl.load(at, mask=(row < OUT) & (column < IN) & more, other=0.0)


@triton.jit
def _product(x, weight):
    """x [rows, LINES, LINE] times weight [SHARE, LINES, LINE]: [rows, SHARE], summed in fp32, one row at a
    time, since a thread has not the registers for the sums of more."""
    if x.shape[0] == 1:
        return tl.sum(tl.sum(x * weight.to(tl.float32), 1), 1)[None, :]
    else:
        both = tl.reshape(x, (2, x.shape[0] // 2, x.shape[1], x.shape[2]))
        first, second = tl.split(tl.permute(both, (1, 2, 3, 0)))
        made = tl.join(_product(first, weight), _product(second, weight))
        return tl.reshape(tl.permute(made, (2, 0, 1)), (x.shape[0], weight.shape[0]))


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
    words_ptr, rows, turn, WIDTH: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr
):
    """The words [ROWS, WIDTH] of this exchange once they are there, [ROWS, LINES, LINE]; zeros beyond."""
    row, column = _everywhere(ROWS, LINES, LINE)
    there = (row < rows) & (column < WIDTH)
    at = words_ptr + row * WIDTH + column
    words = tl.load(at, mask=there, other=0, volatile=True)
    while tl.max((there & ((words & 1) != _bit(turn))).to(tl.int32)) == 1:
        words = tl.load(at, mask=there, other=0, volatile=True)
    return (words & -2).to(tl.float32, bitcast=True)


def reference_token_step(
    a: Tensor, taps: Tensor, matrices: Sequence[Tensor], position: int, *, noise: Tensor | None = None
) -> None:
    """As `token_step`, in plain torch and in any float dtype; 16-bit numbers are summed in fp32."""
    y = wide(a[0, :, position])
    for layer, tap in enumerate(taps[:, :, 0]):
        z = wide(a[layer + 1, :, position]) + y * wide(tap)
        weights = [wide(matrix[layer]) for matrix in matrices]
        y = (
            z * (y @ weights[0].mT)
            if len(weights) == 1
            else functional.gelu(z @ weights[0].mT) @ weights[1].mT
        )
        a[layer + 1, :, position] = y
    if noise is not None and position + 1 < a.shape[2]:
        a[0, :, position + 1] = y + wide(noise[position])


# -- the op ----------------------------------------------------------------------------------------------


def run_step(op: Op, a: Tensor, taps: Tensor, position: Tensor, noise: Tensor, *matrices: Tensor) -> None:
    """Runs an op `token_step` on the tensors of `token_step`, in place. Launches of a stream share their
    workspace."""
    if not has_kernel(a):
        plain_step(op, a, taps, position, noise, *matrices)
        return
    config = config_for(a)
    key = "token step", a.device, config, a.shape[1], a.shape[3], len(matrices)
    space = shared(key, lambda: workspace(a, matrices, config))
    token_step(a, taps, matrices, position, noise=noise, space=space, config=config)


def plain_step(op: Op, a: Tensor, taps: Tensor, position: Tensor, noise: Tensor, *matrices: Tensor) -> None:
    """`run_step` in plain torch, any float dtype; the host does not wait for the position."""
    del op
    t = position.long()
    levels = a.index_select(2, t)
    reference_token_step(levels, taps, matrices, 0)
    a.index_copy_(2, t, levels)
    after = (t + 1).clamp(max=a.shape[2] - 1)
    new = (wide(levels[-1]) + wide(noise.index_select(0, t)[0])[:, None]).to(a.dtype)
    a[0].index_copy_(1, after, torch.where(after > t, new, a[0].index_select(1, after)))


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """Returns the operands of the first of two positions."""
    layers, batch, d = op["layers"], op["batch"], op["channels"]

    def drawn(*size: int, scale: float) -> Tensor:
        return normal(op, generator, device, *size, scale=scale)

    shapes = [(d, d)] if op["gated"] else [(2 * d, d), (d, 2 * d)]
    matrices = [drawn(layers, *size, scale=size[1] ** -0.5) for size in shapes]
    a, taps = drawn(layers + 1, batch, 2, d, scale=0.5), drawn(layers, 1, 1, d, scale=0.5)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    return a, taps, position, drawn(2, batch, d, scale=0.5), *matrices


TOKEN_STEP = Kernel(run_step, plain_step, _inputs)
