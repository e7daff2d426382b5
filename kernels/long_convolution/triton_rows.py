"""Rows, columns and cells of a long convolution, each of all layers, sequences and channels in one launch.

    row     z_t     += sum over the `inputs` positions i before t of  y_i k_(t-i)             (lazy)
    column  z_(t+j) += y_t k_j                                        for j = 1 .. outputs    (eager)
    cell    z_t     += y_t k_0

The read of y, taps and z, once, bounds the time. Programs split the inputs of a row, so that all read equally
much. The last programs of each block of channels sum their parts in the same launch and in a fixed order: see
`simcore.kernels.decoder.split_kv` for how the words of a part tell that they have arrived. Sequences that
share a filter are taken together, so that its taps are read once.

The position, and how many inputs or outputs count, may be read on the device: a captured graph stays valid
while they move. Layouts: `simcore.kernels.long_convolution.tensors`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.kernels.decoder.checks import check_powers, check_written, kind
from simcore.kernels.decoder.split_kv import HELD, ONE_BY_ONE, empty, launched, take, tile
from simcore.kernels.gpu import PROCESSORS, gpu_of, launching
from simcore.kernels.long_convolution.tensors import FORMATS, put_back, wide

# Two programs a multiprocessor with three blocks of 16 KB of y and taps in flight keep memory busy; BUSY
# programs a multiprocessor are the fewest that do.
EACH, STAGES, WARPS = 2, 4, 4
BUSY = 0.7
BLOCK_BYTES = 16 * 1024
# The most channels of a program, and the most of its sequences that share a filter.
MOST_CHANNELS, MOST_SEQUENCES = 256, 8
MOST_ROWS, MOST_SPLITS, MOST_WAVES = 64, 64, 8
# The cost of starting a program and summing its part, in blocks that it could have read; 1 without a sum.
SUM_BLOCKS = 3
# A cache line: the least bytes of channels of a program, and the least channels of a sum.
LINE_BYTES, LEAST_COLUMNS = 128, 32
# Numbers that a program of a column adds to, and the least of a warp.
COLUMN_NUMBERS, WARP_NUMBERS = 512, 512
# The limit of a grid's second dimension.
MOST_BLOCKS = 65535


@dataclass(frozen=True, slots=True)
class RowConfig:
    """The layout of a row: blocks of `rows` inputs by `channels` of `sequences`, a pipeline of `stages`
    blocks, inputs in `splits` parts; parts summed in `slices` of their numbers by so many `sharers`;
    `chained`: whether the launch starts while the launch before it ends, and then waits for it."""

    rows: int
    channels: int
    sequences: int
    splits: int
    slices: int
    sharers: int
    stages: int = STAGES
    warps: int = WARPS
    chained: bool = False

    def __post_init__(self) -> None:
        check_powers(self, "rows", "channels", "sequences", "slices", "warps")
        if min(self.splits, self.sharers, self.stages) < 1:
            raise ValueError(f"splits, sharers and stages have to be 1 or more in {self}")
        if self.slices > self.channels * self.sequences:
            raise ValueError(f"slices: a layout cannot have {self.slices} of fewer numbers: {self}")


@lru_cache(maxsize=4096)
def row_config(
    *,
    layers: int,
    batch: int,
    inputs: int,
    channels: int,
    bytes: int,
    shared: bool = True,
    processors: int = PROCESSORS,
    chained: bool = True,
) -> RowConfig:
    """Returns the layout for y [layers, batch, inputs, channels] of so many bytes an element; `shared`: one
    filter for all sequences.

    Programs come in waves. A wave takes as long as its longest program, in blocks that it reads, and all
    waves take at least as long as memory does. Parts cost a trip through memory, so narrow blocks of channels
    without parts are preferred if they are enough to keep memory busy.

    >>> found = row_config(layers=18, batch=1, inputs=16384, channels=256, bytes=4)
    >>> found.rows, found.channels, found.splits
    (64, 32, 1)
    >>> found = row_config(layers=1, batch=1, inputs=16384, channels=256, bytes=4)
    >>> found.rows, found.channels, found.splits
    (16, 128, 64)
    """
    together = min(MOST_SEQUENCES, triton.next_power_of_2(batch)) if shared else 1
    slots, best = EACH * processors, None
    width = min(MOST_CHANNELS if together <= 2 else MOST_CHANNELS // 2, triton.next_power_of_2(channels))
    while best is None or width * bytes >= LINE_BYTES:
        rows = power_below(max(2, BLOCK_BYTES // ((together + 1) * width * bytes)))
        rows = min(rows, MOST_ROWS, max(2, triton.next_power_of_2(inputs)))
        groups = layers * cdiv(batch, together) * cdiv(channels, width)
        blocks = max(1, cdiv(inputs, rows))
        least = cdiv(groups, slots)
        for waves in range(least, least + MOST_WAVES):
            splits = min(blocks, MOST_SPLITS, waves * slots // groups)
            each = cdiv(blocks, splits)
            splits = cdiv(blocks, each)
            time = max(cdiv(groups * splits, slots) * each, groups * blocks / (BUSY * processors))
            time += SUM_BLOCKS if splits > 1 else 1
            if best is None or time < best[0]:
                best = time, width, rows, splits, groups
        width //= 2
    _, width, rows, splits, groups = best
    numbers = together * width
    # Summing programs wait for other programs, so places have to be left for programs still to come.
    sharers = max(1, min(splits, processors // 2 // groups, numbers // LEAST_COLUMNS))
    slices = sharers = power_below(sharers)
    while triton.next_power_of_2(splits) * numbers > slices * HELD * WARPS:
        slices *= 2
    return RowConfig(rows, width, together, splits, slices, sharers, STAGES, WARPS, chained)


def cdiv(n: int, by: int) -> int:
    """Returns n / by, rounded up."""
    return -(-n // by)


def power_below(n: int) -> int:
    """Returns the largest power of two that is at most n.

    >>> power_below(1), power_below(7), power_below(8)
    (1, 4, 8)
    """
    return 1 << (n.bit_length() - 1)


def row_config_for(y: Tensor, taps: Tensor) -> RowConfig:
    """Returns the layout for these tensors on their device."""
    layers, batch, inputs, channels = y.shape
    gpu = gpu_of(y)
    return row_config(
        layers=layers,
        batch=batch,
        inputs=inputs,
        channels=channels,
        bytes=y.element_size(),
        shared=taps.shape[1] == 1,
        processors=gpu.processors,
        chained=gpu.chained,
    )


def row_words(y: Tensor, config: RowConfig) -> int:
    """Returns the words of the parts of a row of y [layers, batch, inputs, channels]; 0 without parts."""
    numbers = config.splits * config.sequences * config.channels
    return 0 if config.splits == 1 else _groups(y, config) * numbers


def _groups(y: Tensor, config: RowConfig) -> int:
    layers, batch, _, channels = y.shape
    return layers * cdiv(batch, config.sequences) * cdiv(channels, config.channels)


def row_space(y: Tensor, config: RowConfig) -> Tensor:
    """Makes the memory through which the parts of a row are summed: int32 words, empty before a launch and
    again after it. Launches of any shape that need no more words may share it, but not at the same time;
    after an aborted launch a new one is needed."""
    return empty(y, row_words(y, config))


@launching
def conv_row(
    y: Tensor,
    taps: Tensor,
    z: Tensor,
    *,
    inputs: Tensor | None = None,
    position: Tensor | None = None,
    since: int = 0,
    space: Tensor | None = None,
    config: RowConfig | None = None,
) -> Tensor:
    """Adds terms of y [layers, batch, inputs, channels] to z [layers, batch, channels] in place; returns z.

    taps [layers, 1 or batch, inputs, channels], from lag 1 on. With `inputs` (int32 [1], read on the device)
    only so many last inputs count. With `position` (likewise) y and z are all positions, z [layers, batch,
    positions, channels]: the inputs before that position, or the last `inputs` of them, are added there, but
    none before position `since`. space: see `row_space`; by default a new one. Raises ValueError for tensors
    that do not fit.
    """
    sums = z if position is not None else z[:, :, None] if z.dim() == 3 else z
    check_operands(
        y, taps, sums, sums.shape[2] if sums.dim() == 4 and position is not None else 1, y.shape[2:3]
    )
    check_number("inputs", inputs)
    check_number("position", position)
    if 0 in y.shape:
        return z
    config = config or row_config_for(y, taps)
    if config.sequences > 1 and taps.shape[1] != 1:
        raise ValueError(f"config has {config.sequences} sequences together, which share no filter")
    space = row_space(y, config) if space is None else space
    if space.dtype != torch.int32 or not space.is_contiguous() or space.numel() < row_words(y, config):
        raise ValueError(f"space has to be contiguous int32 of {row_words(y, config)}, not {kind(space)}")
    numbers = config.sequences * config.channels
    columns = numbers // config.slices
    _conv_row_kernel[(_groups(y, config), config.splits)](
        y, taps, sums, inputs, position, space, since,
        y.shape[2], sums.shape[2], y.shape[1], y.shape[3],
        *y.stride()[:3], *filter_strides(taps), *sums.stride()[:3],
        COUNTED=inputs is not None, PLACED=position is not None,
        EVEN=y.shape[1] % config.sequences == 0 and y.shape[3] % config.channels == 0,
        SEQUENCES=config.sequences, ROWS=config.rows, WIDTH=config.channels, STAGES=config.stages,
        SPLIT=config.splits > 1, PARTS=tile(config.splits, columns, config.warps), COLUMNS=columns,
        SLICES=config.slices, SHARERS=1 if ONE_BY_ONE else config.sharers,
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return z


@triton.jit(do_not_specialize=["since", "inputs", "positions"])
def _conv_row_kernel(
    y_ptr, taps_ptr, z_ptr, inputs_ptr, position_ptr, space_ptr, since,
    inputs, positions, batch, channels,
    y_layer, y_sequence, y_row, taps_layer, taps_sequence, taps_row, z_layer, z_sequence, z_row,
    COUNTED: tl.constexpr, PLACED: tl.constexpr, EVEN: tl.constexpr,
    SEQUENCES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
    SLICES: tl.constexpr, SHARERS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (layers * blocks of sequences * blocks of channels, splits)."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    group, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    layer, sequence, channel = place(group, batch, channels, SEQUENCES, WIDTH)
    end, at = inputs, 0
    if PLACED:
        at = tl.load(position_ptr)
        end = tl.minimum(inputs, at)
    first = since
    if COUNTED:
        first = tl.maximum(since, end - tl.maximum(0, tl.load(inputs_ptr)))

    which = (sequence + tl.arange(0, SEQUENCES))[:, None, None]
    row = tl.arange(0, ROWS)[None, :, None]
    column = (channel + tl.arange(0, WIDTH))[None, None, :]
    y_at = y_ptr + layer * y_layer + which.to(tl.int64) * y_sequence + row.to(tl.int64) * y_row + column
    # The first tap of a block is the tap of its first input, the others lie before it.
    taps_at = taps_ptr + layer * taps_layer + sequence.to(tl.int64) * taps_sequence
    taps_at = taps_at + column - row.to(tl.int64) * taps_row
    total = tl.zeros((SEQUENCES, ROWS, WIDTH), tl.float32)
    for start in tl.range(first + split * ROWS, end, splits * ROWS, num_stages=STAGES):
        there = start + row < end
        y_there, taps_there = there, there
        if not EVEN:
            taps_there = there & (column < channels)
            y_there = taps_there & (which < batch)
        y = tl.load(y_at + tl.cast(start, tl.int64) * y_row, mask=y_there, other=0.0)
        taps = tl.load(taps_at + tl.cast(end - 1 - start, tl.int64) * taps_row, mask=taps_there, other=0.0)
        total += y.to(tl.float32) * taps.to(tl.float32)
    part = tl.sum(total, 1)

    z_base = z_ptr + layer * z_layer + tl.cast(at, tl.int64) * z_row
    if not SPLIT:
        which = (sequence + tl.arange(0, SEQUENCES))[:, None]
        column = (channel + tl.arange(0, WIDTH))[None, :]
        there = (which < batch) & (column < channels) & (at >= 0) & (at < positions)
        add(z_base + which.to(tl.int64) * z_sequence + column, part, there)
    else:
        NUMBERS: tl.constexpr = SEQUENCES * WIDTH
        parts_at = space_ptr + group.to(tl.int64) * splits * NUMBERS
        mine = tl.arange(0, SEQUENCES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        tl.store(parts_at + split * NUMBERS + mine, part.to(tl.int32, bitcast=True))
        if split >= splits - SHARERS:
            for share in range(split - (splits - SHARERS), SLICES, SHARERS):
                number = share * COLUMNS + tl.arange(0, COLUMNS)
                z_sequences, z_columns = sequence + number // WIDTH, channel + number % WIDTH
                z_there = (z_sequences < batch) & (z_columns < channels) & (at >= 0) & (at < positions)
                z_at = z_base + z_sequences.to(tl.int64) * z_sequence + z_columns
                # In flight during the wait for the parts.
                z = tl.load(z_at, mask=z_there, other=0.0).to(tl.float32)
                piece = tl.arange(0, PARTS)[:, None]
                words = parts_at + piece * NUMBERS + number[None, :]
                whole = z + tl.sum(take(words, piece < splits), 0)
                tl.store(z_at, whole.to(z_ptr.dtype.element_ty), mask=z_there)


@triton.jit
def place(group, batch, channels, SEQUENCES: tl.constexpr, WIDTH: tl.constexpr):
    """Layer (int64), first sequence and first channel of a group."""
    across, along = tl.cdiv(channels, WIDTH), tl.cdiv(batch, SEQUENCES)
    rest = group // across
    return (rest // along).to(tl.int64), rest % along * SEQUENCES, group % across * WIDTH


@triton.jit
def add(at, more, there):
    """Adds to what is stored, in fp32."""
    total = tl.load(at, mask=there, other=0.0).to(tl.float32) + more
    tl.store(at, total.to(at.dtype.element_ty), mask=there)


# -- columns and cells -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ColumnConfig:
    """The layout of a column: blocks of `rows` outputs by `channels` of `sequences`, one a program."""

    rows: int
    channels: int
    sequences: int
    warps: int = WARPS
    chained: bool = False

    def __post_init__(self) -> None:
        check_powers(self, "rows", "channels", "sequences", "warps")


def column_config(
    *,
    layers: int,
    batch: int,
    outputs: int,
    channels: int,
    shared: bool = True,
    processors: int = PROCESSORS,
    chained: bool = True,
) -> ColumnConfig:
    """Returns the layout for z [layers, batch, outputs, channels]; `shared`: one filter for all sequences.
    Blocks are made smaller as long as there are fewer than two for each multiprocessor.

    >>> column_config(layers=18, batch=1, outputs=1024, channels=256)
    ColumnConfig(rows=2, channels=256, sequences=1, warps=1, chained=True)
    >>> column_config(layers=1, batch=1, outputs=1, channels=768)
    ColumnConfig(rows=1, channels=32, sequences=1, warps=1, chained=True)
    """
    together = min(MOST_SEQUENCES, triton.next_power_of_2(batch)) if shared else 1
    width = min(MOST_CHANNELS, triton.next_power_of_2(channels))
    rows = min(max(1, COLUMN_NUMBERS // (together * width)), triton.next_power_of_2(outputs))

    def programs() -> int:
        across = cdiv(batch, together) * cdiv(channels, width)
        return layers * across * cdiv(outputs, rows)

    while programs() < 2 * processors and max(rows, together, width // LEAST_COLUMNS) > 1:
        if rows > 1:
            rows //= 2
        elif width > LEAST_COLUMNS:
            width //= 2
        else:
            together //= 2
    warps = min(WARPS, max(1, together * rows * width // WARP_NUMBERS))
    return ColumnConfig(rows, width, together, warps, chained)


def column_config_for(taps: Tensor, z: Tensor) -> ColumnConfig:
    """Returns the layout for these tensors on their device."""
    layers, batch, outputs, channels = z.shape
    gpu = gpu_of(z)
    return column_config(
        layers=layers,
        batch=batch,
        outputs=outputs,
        channels=channels,
        shared=taps.shape[1] == 1,
        processors=gpu.processors,
        chained=gpu.chained,
    )


@launching
def conv_column(
    y: Tensor,
    taps: Tensor,
    z: Tensor,
    *,
    outputs: Tensor | None = None,
    position: Tensor | None = None,
    most: int | None = None,
    config: ColumnConfig | None = None,
) -> Tensor:
    """Adds terms of y [layers, batch, channels] to z [layers, batch, outputs, channels] in place; returns z.

    taps [layers, 1 or batch, outputs, channels], from lag 1 on. With `outputs` (int32 [1], read on the
    device) only so many first outputs are added to. With `position` (likewise) y and z are all positions, y
    [layers, batch, positions, channels]: the terms of the input there are added to the positions after it; a
    lag less is enough. `most`: the launch has programs for so many outputs, at least as many as there are.
    Raises ValueError for tensors that do not fit.
    """
    given = y if position is not None else y[:, :, None] if y.dim() == 3 else y
    rows = z.shape[2:3]
    if position is not None and taps.dim() == 4 and taps.shape[2] + 1 == z.shape[2]:
        rows = taps.shape[2:3]
    check_operands(given, taps, z, z.shape[2] if z.dim() == 4 else 0, rows)
    if given.shape[2] != (z.shape[2] if position is not None else 1):
        raise ValueError(f"y {kind(y)} does not fit z {kind(z)}")
    check_number("outputs", outputs)
    check_number("position", position)
    if 0 in z.shape:
        return z
    count = z.shape[2] if most is None else max(1, min(most, z.shape[2]))
    config = config or column_config_for(taps, z[:, :, :count])
    if config.sequences > 1 and taps.shape[1] != 1:
        raise ValueError(f"config has {config.sequences} sequences together, which share no filter")
    groups = z.shape[0] * cdiv(z.shape[1], config.sequences)
    if groups > MOST_BLOCKS:
        raise ValueError(f"z {kind(z)} is more than {MOST_BLOCKS} blocks of layers and sequences")
    blocks = cdiv(count, config.rows) * cdiv(z.shape[3], config.channels)
    _conv_column_kernel[(blocks, groups)](
        given, taps, z, outputs, position,
        z.shape[2], z.shape[1], z.shape[3],
        *given.stride()[:3], *filter_strides(taps), *z.stride()[:3],
        COUNTED=outputs is not None, PLACED=position is not None,
        SEQUENCES=config.sequences, ROWS=config.rows, WIDTH=config.channels,
        **launched(config.warps, config.chained),
    )  # fmt: skip
    return z


@triton.jit(do_not_specialize=["outputs"])
def _conv_column_kernel(
    y_ptr, taps_ptr, z_ptr, outputs_ptr, position_ptr,
    outputs, batch, channels,
    y_layer, y_sequence, y_row, taps_layer, taps_sequence, taps_row, z_layer, z_sequence, z_row,
    COUNTED: tl.constexpr, PLACED: tl.constexpr,
    SEQUENCES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of outputs * blocks of channels, layers * blocks of sequences): programs that run together
    write what lies together."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    across = tl.cdiv(channels, WIDTH)
    start = tl.program_id(0) // across * ROWS
    at, after = 0, 0
    if PLACED:
        at = tl.load(position_ptr)
        after = at + 1
        outputs = tl.where(at < 0, 0, outputs - after)
    if COUNTED:
        outputs = tl.minimum(outputs, tl.load(outputs_ptr))
    if start >= outputs:
        return
    group = tl.program_id(1) * across + tl.program_id(0) % across
    layer, sequence, channel = place(group, batch, channels, SEQUENCES, WIDTH)
    which = (sequence + tl.arange(0, SEQUENCES))[:, None, None]
    row = (start + tl.arange(0, ROWS))[None, :, None]
    column = (channel + tl.arange(0, WIDTH))[None, None, :]
    y_at = y_ptr + layer * y_layer + tl.cast(at, tl.int64) * y_row + which.to(tl.int64) * y_sequence + column
    y = tl.load(y_at, mask=(which < batch) & (column < channels), other=0.0).to(tl.float32)
    taps_at = taps_ptr + layer * taps_layer + sequence.to(tl.int64) * taps_sequence
    taps_at = taps_at + row.to(tl.int64) * taps_row + column
    taps = tl.load(taps_at, mask=(row < outputs) & (column < channels), other=0.0).to(tl.float32)
    z_at = z_ptr + layer * z_layer + which.to(tl.int64) * z_sequence + (after + row).to(tl.int64) * z_row
    add(z_at + column, y * taps, (which < batch) & (row < outputs) & (column < channels))


def conv_cell(y: Tensor, tap: Tensor, z: Tensor, *, config: ColumnConfig | None = None) -> Tensor:
    """Adds y [batch, channels] times tap [1 or batch, channels] to z [batch, channels] in place; returns z.
    Raises ValueError for tensors that do not fit."""
    for name, x in (("y", y), ("tap", tap), ("z", z)):
        if x.dim() != 2:
            raise ValueError(f"{name} has to have two dimensions, not {kind(x)}")
    conv_column(y[None], tap[None, :, None], z[None, :, None], config=config)
    return z


# -- checks and references ---------------------------------------------------------------------------------


def check_operands(y: Tensor, taps: Tensor, z: Tensor, outputs: int, lags: tuple[int, ...]) -> None:
    """Raises ValueError unless y [layers, batch, positions, channels], taps [layers, 1 or batch, lags,
    channels] and z [layers, batch, outputs, channels] fit together."""
    for name, x in (("z", z), ("y", y), ("taps", taps)):
        if x.dim() != 4 or x.dtype not in FORMATS or x.dtype != z.dtype or (x.numel() and x.stride(-1) != 1):
            raise ValueError(
                f"{name} has to be [layers, sequences, positions, channels] in fp32, fp16 or bf16 as z is, "
                f"channels contiguous, not {kind(x)}"
            )
    check_written("z", z, y, taps)
    layers, batch, _, channels = y.shape
    if tuple(z.shape) != (layers, batch, outputs, channels):
        raise ValueError(f"z {kind(z)} does not fit y {kind(y)}")
    if tuple(taps.shape) not in ((layers, 1, *lags, channels), (layers, batch, *lags, channels)):
        raise ValueError(f"taps have to be {[layers, '1 or batch', *lags, channels]}, not {kind(taps)}")


def check_number(name: str, number: Tensor | None) -> None:
    """Raises ValueError unless a number, if given, is one int32."""
    if number is not None and (number.dtype != torch.int32 or number.numel() != 1):
        raise ValueError(f"{name} has to be int32 of one element, not {kind(number)}")


def filter_strides(taps: Tensor) -> tuple[int, int, int]:
    """Returns the strides in elements: layer, sequence (0 if all share a filter), lag."""
    return taps.stride(0), 0 if taps.shape[1] == 1 else taps.stride(1), taps.stride(2)


def reference_conv_row(
    y: Tensor, taps: Tensor, z: Tensor, *, inputs: int | None = None, position: int | None = None
) -> Tensor:
    """As `conv_row` in plain torch, any float dtype."""
    end = y.shape[2] if position is None else position
    count = end if inputs is None else min(inputs, end)
    row = (wide(y[:, :, end - count : end]) * wide(taps[:, :, :count].flip(2))).sum(2)
    (z if position is None else z[:, :, position]).add_(row)
    return z


def reference_conv_column(
    y: Tensor, taps: Tensor, z: Tensor, *, outputs: int | None = None, position: int | None = None
) -> Tensor:
    """As `conv_column` in plain torch, any float dtype."""
    given, after = (y, z) if position is None else (y[:, :, position], z[:, :, position + 1 :])
    count = after.shape[2] if outputs is None else min(outputs, after.shape[2])
    added = after[:, :, :count]
    put_back(wide(added).addcmul_(wide(given)[:, :, None], wide(taps[:, :, :count])), added)
    return z


def reference_conv_cell(y: Tensor, tap: Tensor, z: Tensor) -> Tensor:
    """As `conv_cell` in plain torch, any float dtype."""
    return put_back(wide(z).addcmul_(wide(y), wide(tap)), z)
