"""Few rows times a large matrix: a decoder's projections during decoding.

    y[m, n] = sum_k x[m, k] W[k, n]  (+ add[m, n]),        m at most 64
    out     y;  or of W's halves, gate and up, silu(y_gate) y_up
    fp8 with scales of blocks   x = x8[m, k] a[m, k / 128],   W = W8[k, n] b[k / 128, n / 128]

The read of W, once, bounds the time. Programs split the columns into tiles and, if there are too few tiles, k
into parts, so that programs run at once and read equally much; enough blocks of W are then in flight at
any time to hide the latency of memory. The last program to finish a tile sums its parts in order, so that the
result is always the same.

cuBLAS computes more rows, and few where it is faster (`product`). Of more rows it gets a padded number if the
tensor of x has room for them (`simcore.devices.interpolation.padded_rows`); what is in the others does not
matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.devices.interpolation import padded_rows
from simcore.kernels.decoder.activation import gated, reference_activation
from simcore.kernels.decoder.checks import check_gate, check_like, kind
from simcore.kernels.decoder.fastest_product import ours_is_faster
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import PROCESSORS, SHARED_BYTES, gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.kernels.streams import shared, words
from simcore.ops.op import FP8_BLOCK, Op

MOST_ROWS = 64
# Products of fp8 whose scales are of blocks, by tensor cores that take so many rows at least.
BLOCKS, LEAST_ROWS_OF_FP8 = "fp8_b128", 64
OF_FP8 = ("fp8", BLOCKS)
STAGES_OF_BLOCKS = 4
# Up to so many rows two programs a multiprocessor are quicker. cuBLAS takes whole fours of rows, and reads as
# fast where columns fill the card: more than so many, by rows few and many (H200, 30 November 2026).
FEW_ROWS_OF_BLOCKS, ROWS_OF_CUBLAS, FILLED = 16, 4, (8192, 5120)
# Bytes of a number of half formats; times were compared with cuBLAS's in bf16, and stand for fp16 too.
HALF_BYTES = 2
# Bytes of one block of W: 16 a thread, 8 times. Bytes that are contiguous in memory: two or more cache lines.
BLOCK_BYTES = 16 * 1024
LINE_BYTES = 256
# Blocks of W that a program reads at least: with fewer, one more part to sum would not pay off.
LEAST_BLOCKS = 4
MOST_STAGES = 8
# A layout with one program a multiprocessor has to fill so many of its waves' places: with 0.73 two were
# quicker, with 0.85 and more one.
LEAST_ALONE = 0.8
# Numbers of the parts that a thread holds at once during their sum.
SUMMED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """The layout of a launch: blocks of W [depth, columns], x padded to `rows`, k in `splits` parts, `stages`
    blocks in flight in each program, `warps` a program."""

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int
    warps: int

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, blocks of {self.depth} x {self.columns}, {self.splits} splits, "
            f"{self.stages} stages, {self.warps} warps"
        )


def matmul_config(
    m: int,
    n: int,
    k: int,
    bytes: int,
    processors: int = PROCESSORS,
    *,
    transposed: bool = False,
    shared_bytes: int = SHARED_BYTES,
    chained: bool = False,
    scaled: bool = False,
) -> MatmulConfig:
    """Returns the layout for x [m, k] times W [k, n] of so many bytes an element; `transposed`: W's columns
    are contiguous; `chained`: the launch starts while the one before it ends; `scaled`: in fp8 with scales of
    blocks, and blocks of W are those of its scales.

    >>> print(matmul_config(1, 4096, 4096, 2))
    16 rows, blocks of 64 x 128, 8 splits, 6 stages, 4 warps

    Raises ValueError if m is above MOST_ROWS.
    """
    if m > MOST_ROWS:
        raise ValueError(f"{m} rows; this product is made for {MOST_ROWS} at most")
    rows = LEAST_ROWS_OF_FP8 if scaled else max(16, triton.next_power_of_2(m))
    along = LINE_BYTES // bytes
    across = BLOCK_BYTES // LINE_BYTES
    columns, depth = (across, along) if transposed else (along, across)
    if scaled:
        columns, depth = FP8_BLOCK, FP8_BLOCK
    # Parts are written and read again: with many rows, half the programs with twice the blocks in flight.
    many = m > FEW_ROWS_OF_BLOCKS if scaled else rows > 32
    tiles = -(-n // columns)
    most = -(-k // depth) // LEAST_BLOCKS
    alone = tiles * max(1, min(processors // tiles, most))
    waves = -(-alone // processors)
    # Beside a launch that is about to end there is room for one program, and then each has more on its way.
    each = 1 if many or (chained and alone >= LEAST_ALONE * waves * processors) else 2
    splits = max(1, min(each * processors // tiles, most))
    stage = BLOCK_BYTES + rows * depth * bytes
    stages = min(STAGES_OF_BLOCKS if scaled else MOST_STAGES, (shared_bytes // each - 4096) // stage)
    # Products of three tf32 parts, and sums of scaled blocks, need the registers of twice the threads.
    return MatmulConfig(rows, columns, depth, splits, stages, 8 if bytes > 2 or (scaled and many) else 4)


def is_by_columns(weight: Tensor) -> bool:
    """Whether the columns of a matrix are contiguous, and not its rows."""
    return weight.stride(0) == 1 < weight.stride(1)


def config_for(m: int, weight: Tensor, *, chained: bool = False, scaled: bool = False) -> MatmulConfig:
    """Returns the layout for m rows times weight [k, n] with its strides, on its device; `scaled`: in fp8
    with scales of blocks."""
    k, n = weight.shape
    transposed = is_by_columns(weight)
    gpu = gpu_of(weight)
    return matmul_config(
        m, n, k, weight.element_size(), gpu.processors, transposed=transposed,
        shared_bytes=gpu.shared_bytes, chained=chained, scaled=scaled,
    )  # fmt: skip


class Scales(NamedTuple):
    """What fp8 numbers are multiplied by: x's fp32 [m, k / 128], weight's fp32 [k / 128, n / 128]."""

    x: Tensor
    weight: Tensor


class Workspace(NamedTuple):
    """The memory through which the parts of one launch are summed: partials fp32 [...], counters int32 [...],
    zero before a launch and again after it. Launches that overlap need a workspace each."""

    partials: Tensor
    counters: Tensor


def workspace(
    launches: Iterable[tuple[int, int, MatmulConfig]], device: torch.device | str | None = None
) -> Workspace:
    """Makes a workspace that is large enough for launches of (m, n, config) one after another."""
    parts = counters = 0
    for launch in launches:
        if launch[2].splits > 1:
            parts, counters = map(max, (parts, counters), _needed(*launch))
    return Workspace(
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _needed(m: int, n: int, config: MatmulConfig) -> tuple[int, int]:
    """Returns the partial sums and the counters of a launch in several parts."""
    return config.splits * m * n, -(-n // config.columns)


def kept_space(m: int, n: int, config: MatmulConfig, device: torch.device) -> Workspace:
    """Returns a workspace in words that belong to a device and its stream; without a GPU, a new one."""
    if device.type != "cuda":
        return workspace([(m, n, config)], device)
    parts, counters = _needed(m, n, config)
    partials = words(device, "parts of products", parts, 0).view(torch.float32)
    return Workspace(partials, words(device, "counters of products", counters, 0))


def reference_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    add: Tensor | None = None,
    activated: bool = False,
) -> Tensor:
    """As `matmul`, in plain torch, any float dtype and any number of rows."""
    y = x.to(weight.dtype) @ weight
    y = reference_activation(*y.chunk(2, 1)) if activated else y
    return y if add is None else y + add


@triton.jit
def _matmul_kernel(
    x_ptr, w_ptr, add_ptr, out_ptr, partial_ptr, counter_ptr, gate_ptr, a_ptr, b_ptr,
    m, n, k, width, x_row, x_column, w_row, w_column, add_row, out_row, a_row, a_block, b_block, b_column,
    ADD: tl.constexpr, ACTIVATED: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of k for one tile of columns: program (tile, part). `width` columns of out, of which a tile
    has WIDE; ACTIVATED: out's columns j are of W's columns j and width + j. WHOLE: k is whole blocks.
    SCALED: tiles and blocks are those of the scales a [row, block] and b [block, tile]."""
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return
    WIDE: tl.constexpr = COLUMNS // 2 if ACTIVATED else COLUMNS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    blocks = tl.cdiv(k, DEPTH)
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS

    row = tl.arange(0, ROWS)
    out_column = tile * WIDE + tl.arange(0, COLUMNS)
    column = out_column
    if ACTIVATED:
        of_tile = tl.arange(0, COLUMNS)
        out_column = tile * WIDE + of_tile % WIDE
        column = of_tile // WIDE * width + out_column
    deep = first * DEPTH + tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * x_row + deep[None, :] * x_column
    w_at = w_ptr + deep[:, None].to(tl.int64) * w_row + column[None, :].to(tl.int64) * w_column
    is_row, is_column = row < m, out_column < width
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(first, last):
        x_inside, w_inside = is_row[:, None], is_column[None, :]
        if not WHOLE:
            deep = block * DEPTH + tl.arange(0, DEPTH)
            x_inside = x_inside & (deep < k)[None, :]
            w_inside = w_inside & (deep < k)[:, None]
        x = tl.load(x_at, mask=x_inside, other=0.0)
        w = tl.load(w_at, mask=w_inside, other=0.0)
        if SCALED:
            a = tl.load(a_ptr + row * a_row + block * a_block, mask=is_row, other=0.0)
            b = tl.load(b_ptr + block * b_block + tile * b_column)
            total += tl.dot(x, w) * (a * b)[:, None]
        else:
            total = tl.dot(x, w, total, input_precision=PRECISION)
        x_at += DEPTH * x_column
        w_at += DEPTH * w_row

    if SPLITS > 1:
        inside = is_row[:, None] & is_column[None, :]
        at = row[:, None] * n + column[None, :]
        tl.store(partial_ptr + split * m * n + at, total, mask=inside)
        # All threads have stored their numbers before the program counts itself in.
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for several in range(0, SPLITS, AT_ONCE):
            for one in tl.static_range(AT_ONCE):
                part = several + one
                there = inside & (part < SPLITS)
                # Other programs wrote the parts: read past the cache of this multiprocessor.
                total += tl.load(partial_ptr + part * m * n + at, mask=there, other=0.0, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)
    if ACTIVATED:
        gate, up = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, WIDE)), (0, 2, 1)))
        total = gated(gate, up)
    out_column = tile * WIDE + tl.arange(0, WIDE)
    inside = is_row[:, None] & (out_column < width)[None, :]
    if ADD:
        add = tl.load(add_ptr + row[:, None] * add_row + out_column[None, :], mask=inside, other=0.0)
        total += add.to(tl.float32)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * out_row + out_column[None, :], out, mask=inside)


@launching
def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    add: Tensor | None = None,
    activated: bool = False,
    out: Tensor | None = None,
    gate: Tensor | None = None,
    space: Workspace | None = None,
    config: MatmulConfig | None = None,
    chained: bool = False,
    scales: Scales | None = None,
) -> Tensor:
    """Returns x [m, k], m at most MOST_ROWS, times weight [k, n], in the dtype of the weights: [m, n].

    The weights may be row-major or column-major (a transposed [n, k]). `activated`: their columns are those
    of a gate and then as many of what it lets through, and silu(gate) up [m, n / 2] is returned, rounded
    once. `add`, shaped as what is returned, is added in fp32 before rounding; it may be `out` itself for an
    addition in place. With a `gate` (int32 [1]) of 0 nothing is written. `space` is a workspace for split
    layouts, by default that of the stream; `config` the layout, by default `matmul_config`'s. `chained`:
    where the GPU can, the launch starts while the one before it ends, and waits. `scales`: those of x and
    weight, which are fp8 then, and what is returned is bf16. Returns `out`, or a new tensor. Raises
    ValueError for sizes that do not fit.
    """
    width = _check(x, weight, add, out, activated=activated, scales=scales)
    check_gate(gate)
    (m, k), n = x.shape, weight.shape[1]
    chained = chained and gpu_of(weight).chained
    config = config or config_for(m, weight, chained=chained, scaled=scales is not None)
    if config.rows < m:
        raise ValueError(f"a layout of {config.rows} rows for {m}")
    if scales is not None and (config.columns, config.depth) != (FP8_BLOCK, FP8_BLOCK):
        raise ValueError(f"blocks of {config.depth} x {config.columns} are not those of the scales")
    x = x.to(weight.dtype)
    out = torch.empty(m, width, dtype=_returned(weight), device=x.device) if out is None else out
    partials, counters = None, None
    if config.splits > 1:
        partials, counters = kept_space(m, n, config, x.device) if space is None else space
        least = _needed(m, n, config)
        if partials.numel() < least[0] or counters.numel() < least[1]:
            raise ValueError(f"the workspace is too small for {m} x {n} in {config.splits} parts")
    held = config.rows * config.columns // (32 * config.warps)
    wide = config.columns // 2 if activated else config.columns
    _matmul_kernel[(triton.cdiv(width, wide), config.splits)](
        x, weight, add, out, partials, counters, gate, *(scales or (None, None)),
        m, n, k, width, *x.stride(), *weight.stride(), 0 if add is None else add.stride(0), out.stride(0),
        *((0, 0, 0, 0) if scales is None else (*scales.x.stride(), *scales.weight.stride())),
        ADD=add is not None, ACTIVATED=activated, GATED=gate is not None, SCALED=scales is not None,
        WHOLE=k % config.depth == 0,
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth, SPLITS=config.splits,
        AT_ONCE=min(config.splits, max(1, SUMMED_AT_ONCE // max(1, held))),
        PRECISION="tf32x3" if weight.dtype == torch.float32 else "ieee",
        num_stages=config.stages, **launched(config.warps, chained),
    )  # fmt: skip
    return out


def _check(
    x: Tensor,
    weight: Tensor,
    add: Tensor | None,
    out: Tensor | None,
    *,
    activated: bool = False,
    scales: Scales | None = None,
) -> int:
    """Returns the columns of what is computed."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or 0 in weight.shape:
        raise ValueError(f"x {kind(x)} and weight {kind(weight)} do not fit")
    if scales is not None:
        _check_scales(x, weight, scales)
        if activated or add is not None:
            raise ValueError("nothing is added to a product with scales of blocks, and it is not activated")
    elif weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"weights have to be fp16, bf16 or fp32, not {weight.dtype}")
    if activated and weight.shape[1] % 2:
        raise ValueError(f"{weight.shape[1]} columns are no gate and as many more")
    size = x.shape[0], weight.shape[1] // 2 if activated else weight.shape[1]
    if add is not None:
        check_like("add", add, size, add.dtype)
    if out is not None:
        check_like("out", out, size, _returned(weight))
    return size[1]


def _returned(weight: Tensor) -> torch.dtype:
    """Returns the format of a product by its weights'."""
    return torch.bfloat16 if weight.dtype == torch.float8_e4m3fn else weight.dtype


def _check_scales(x: Tensor, weight: Tensor, scales: Scales) -> None:
    """Raises ValueError for what is no product of fp8 with scales of whole blocks."""
    (m, k), n = x.shape, weight.shape[1]
    if {x.dtype, weight.dtype} != {torch.float8_e4m3fn} or k % FP8_BLOCK or n % FP8_BLOCK:
        raise ValueError(f"x {kind(x)} and weight {kind(weight)} are no whole blocks of {FP8_BLOCK} in fp8")
    if x.stride(1) != 1 or not (is_by_columns(weight) or weight.is_contiguous()):
        raise ValueError(
            f"rows of x have to be contiguous, and rows or columns of weight: {kind(x)}, {kind(weight)}"
        )
    blocks = k // FP8_BLOCK
    wanted = ("x", scales.x, (m, blocks)), ("weight", scales.weight, (blocks, n // FP8_BLOCK))
    for name, found, shape in wanted:
        if found.shape != shape or found.dtype != torch.float32:
            raise ValueError(f"scales of {name} have to be fp32 {list(shape)}, not {kind(found)}")


# -- the op ----------------------------------------------------------------------------------------------


def product(
    x: Tensor,
    weight: Tensor,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
    gate: Tensor | None = None,
    chained: bool = False,
    in_step: bool = False,
) -> Tensor:
    """Returns x [m, k] times weight [k, n], plus `add` [m, n] before rounding: for few rows by `matmul`, with
    `chained`, where that is faster (`fastest_product`: by itself or, `in_step`, among a step's other kernels)
    or has a `gate` (int32 [1]) to read; by cuBLAS else, and for fp8 weights (x is rounded to fp8 if it is not
    yet; cuBLAS accumulates fast, as engines let it; the product is bf16, and nothing is added). Writes to
    `out` [m, n] if given, which may be `add`; `add` is in the format of weight. Raises ValueError for tensors
    that do not fit, for a gate with more rows or fp8, and for fp8 with `add`."""
    m, n = x.shape[0], weight.shape[1]
    fp8 = weight.dtype == torch.float8_e4m3fn
    if gate is not None and (fp8 or m > MOST_ROWS):
        raise ValueError(
            f"no product {m} x {n} of {weight.dtype} reads a gate: only of {MOST_ROWS} rows, not fp8"
        )
    if fp8 and add is not None:
        raise ValueError("nothing is added to a product of fp8 weights")
    if fp8:
        one = shared(("one", x.device), lambda: torch.ones((), device=x.device))
        scaled: Any = torch._scaled_mm
        rounded = padded(x).to(weight.dtype)
        y: Tensor = scaled(
            rounded, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
        return y[:m] if out is None else out.copy_(y[:m])
    if add is not None and add.dtype != weight.dtype:
        raise ValueError(f"add has to be {weight.dtype}, as weight, not {kind(add)}")
    if m <= MOST_ROWS or out is not None or add is not None:
        # cuBLAS would give another size to `out`.
        _check(x, weight, add, out)
    if gate is None and is_of_cublas(m, weight, in_step=in_step):
        # The memory behind `out` may belong to another tensor.
        rows = (padded(x) if out is None and add is None else x).to(weight.dtype)
        return torch.mm(rows, weight, out=out)[:m] if add is None else torch.addmm(add, rows, weight, out=out)
    return matmul(x, weight, add=add, out=out, gate=gate, chained=chained)


def product_of_blocks(x: Tensor, weight: Tensor, scales: Scales) -> Tensor:
    """Returns x [m, k] times weight [k, n] in bf16, both fp8 with scales of blocks, k and n whole blocks of
    128, weight column-major: by `matmul` or cuBLAS, whichever is faster; for the latter, which has them for
    compute capability 9.0 alone, x is padded to whole fours of rows. Raises ValueError for tensors that do
    not fit."""
    if not is_by_columns(weight) and weight.shape[1] > 1:
        raise ValueError(f"weight has to be column-major, not {kind(weight)} with strides {weight.stride()}")
    (m, n), whole = (len(x), weight.shape[1]), _rows_of_cublas(len(x))
    if m <= MOST_ROWS and (m < ROWS_OF_CUBLAS or n <= FILLED[m > FEW_ROWS_OF_BLOCKS]):
        return matmul(x, weight, scales=scales)
    _check(x, weight, None, None, scales=scales)
    blocks, columns = scales.weight.shape
    rows = _with_rows(x, whole)
    of_x, of_weight = scales
    if of_x.stride() != (1, whole):
        of_x = of_x.new_zeros(blocks, whole).t()
        of_x[:m] = scales.x
    if of_weight.stride() != (1, _aligned(blocks)):
        of_weight = of_weight.new_empty(columns, _aligned(blocks)).t()[:blocks]
        of_weight.copy_(scales.weight)
    y: Tensor = scaled_mm(
        rows, weight, of_x.as_strided((whole, blocks), (1, whole)), ScalingType.BlockWise1x128,
        of_weight.as_strided((_aligned(blocks), columns), of_weight.stride()), ScalingType.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )  # fmt: skip
    return y[:m]


def _rows_of_cublas(m: int) -> int:
    """Returns the rows with which cuBLAS is launched for m of them, where scales are of blocks."""
    return -(-padded_rows(m) // ROWS_OF_CUBLAS) * ROWS_OF_CUBLAS


def _aligned(blocks: int) -> int:
    """Returns the scales of a column of blocks of weights in cuBLAS's layout."""
    return -(-blocks // 4) * 4


def is_of_cublas(m: int, weight: Tensor, *, in_step: bool = False) -> bool:
    """Whether cuBLAS takes m rows times weight [k, n]: many rows, and few where it is faster."""
    if m > MOST_ROWS or weight.device.type != "cuda" or weight.element_size() > HALF_BYTES:
        return m > MOST_ROWS
    return not ours_is_faster(
        m, *weight.shape, by_columns=is_by_columns(weight), in_step=in_step,
        processors=gpu_of(weight).processors,
    )  # fmt: skip


def padded(x: Tensor) -> Tensor:
    """Returns x [m, k] with the rows behind it in memory, as many as a product is launched with; x itself if
    its storage ends before."""
    return x if (found := _behind(x, padded_rows(len(x)))) is None else found


def _behind(x: Tensor, rows: int) -> Tensor | None:
    """Returns x [m, k] with as many rows behind it in memory as make `rows`; None if its storage ends
    before."""
    end = x.storage_offset() + (rows - 1) * x.stride(0) + x.shape[1]
    if rows == len(x) or x.stride(1) != 1 or end * x.element_size() > x.untyped_storage().nbytes():
        return None
    return x.as_strided((rows, x.shape[1]), x.stride())


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """Returns x [m, k] with as many rows as make `rows`: those behind it in memory, or new ones."""
    if rows == len(x):
        return x
    found = _behind(x, rows)
    return torch.cat([x, x.new_zeros(rows - len(x), x.shape[1])]) if found is None else found


def _run(op: Op, x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
    if op.dtype == BLOCKS:
        return product_of_blocks(x, weight, Scales(*scales))
    return product(x, weight, in_step=True)


def _reference(op: Op, x: Tensor, weight: Tensor, *scales: Tensor) -> Tensor:
    """x [m, k] times weight [k, n], in the dtype of the weights: [m, n]. With fp8 weights x is fp8 too, and
    the product is bf16."""
    if op.dtype not in OF_FP8:
        return reference_matmul(x, weight)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x, weight = x.to(torch.float8_e4m3fn).to(wide), weight.to(wide)
    if scales:
        x = x * scales[0].to(wide).repeat_interleave(FP8_BLOCK, 1)
        blocks = scales[1].to(wide).repeat_interleave(FP8_BLOCK, 0)
        weight = weight * blocks.repeat_interleave(FP8_BLOCK, 1)
    y = x @ weight
    return y if wide == torch.float64 else y.to(torch.bfloat16)


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    m, n, k = (op[name] for name in ("m", "n", "k"))
    if op.dtype not in OF_FP8:
        x = random_tensor(op, generator, device, padded_rows(m), k)[:m]
        return x, random_tensor(op, generator, device, k, n, scale=k**-0.5)
    # The weights are column-major, as tensor cores take them.
    rows = _rows_of_cublas(m) if op.dtype == BLOCKS else padded_rows(m)
    shapes = (rows, k), (n, k)
    x, weight = (torch.randn(*shape, generator=generator, device=device) for shape in shapes)
    matrices = x.to(torch.float8_e4m3fn)[:m], weight.to(torch.float8_e4m3fn).t()
    if op.dtype != BLOCKS:
        return matrices
    if k % FP8_BLOCK or n % FP8_BLOCK:
        raise ValueError(f"{k} x {n} weights are no whole blocks of {FP8_BLOCK}")
    blocks = k // FP8_BLOCK
    sizes = (blocks, rows), (n // FP8_BLOCK, _aligned(blocks))
    of_x, of_weight = (0.5 + torch.rand(*size, generator=generator, device=device) for size in sizes)
    return *matrices, of_x.t()[:m], of_weight.t()[:blocks]


MATMUL = Kernel(by_device(_run, _reference), _reference, _inputs)
