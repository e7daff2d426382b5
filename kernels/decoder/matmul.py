"""Few rows times a large matrix: a decoder's projections during decoding.

    y[m, n] = sum_k x[m, k] W[k, n]  (+ add[m, n]),        m at most 64
    x       as it is;  or its RMS norm, y = (sum_k x[m, k] gain[k] W[k, n]) / sqrt(mean_k x[m, k]^2 + eps);
            or silu(x[m, k]) up[m, k]

The read of W, once, bounds the time. Programs split the columns into tiles and, if there are too few tiles, k
into parts, so that all programs run at once and read equally much; enough blocks of W are then in flight at
any time to hide the latency of memory. The last program to finish a tile sums its parts in order, so that the
result is always the same.

cuBLAS computes more rows, and few where it is faster (`product`). Of more rows it gets a padded number if the
tensor of x has room for them (`simcore.devices.interpolation.padded_rows`); what is in the others does not
matter.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from simcore.devices.interpolation import padded_rows
from simcore.kernels.decoder.activation import gated, reference_activation
from simcore.kernels.decoder.checks import check_gate, check_like, kind
from simcore.kernels.decoder.fastest_product import ours_is_faster
from simcore.kernels.decoder.norm import EPS, reference_norm
from simcore.kernels.decoder.split_kv import launched
from simcore.kernels.decoder.tensors import random_tensor
from simcore.kernels.gpu import PROCESSORS, SHARED_BYTES, gpu_of, launching
from simcore.kernels.kernel import Kernel, by_device
from simcore.kernels.streams import shared, words
from simcore.ops.op import Op

MOST_ROWS = 64
# Bytes of a number of half formats; times were compared with cuBLAS's in bf16, and stand for fp16 too.
HALF_BYTES = 2
# Bytes of one block of W: 16 a thread, 8 times. Bytes that are contiguous in memory: two or more cache lines.
BLOCK_BYTES = 16 * 1024
LINE_BYTES = 256
# Blocks of W that a program reads at least: with fewer, one more part to sum would not pay off.
LEAST_BLOCKS = 4
MOST_STAGES = 8
# Blocks of W that a program asks for before its launch may begin, into the L2 cache: all programs together a
# third of it. Bytes of a cache line.
ASKED_FOR, CACHE_LINE = tl.constexpr(4), 128
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
    operands: int = 1,
) -> MatmulConfig:
    """Returns the layout for x [m, k] times W [k, n] of so many bytes an element; `transposed`: W's columns
    are contiguous; `operands`: tensors that x is made of.

    >>> print(matmul_config(1, 4096, 4096, 2))
    16 rows, blocks of 64 x 128, 8 splits, 6 stages, 4 warps

    Raises ValueError if m is above MOST_ROWS.
    """
    if m > MOST_ROWS:
        raise ValueError(f"{m} rows; this product is made for {MOST_ROWS} at most")
    rows = max(16, triton.next_power_of_2(m))
    along = LINE_BYTES // bytes
    across = BLOCK_BYTES // LINE_BYTES
    columns, depth = (across, along) if transposed else (along, across)
    # Parts are written and read again: with many rows, half the programs with twice the blocks in flight.
    each = 2 if rows <= 32 else 1
    tiles = -(-n // columns)
    splits = max(1, min(each * processors // tiles, -(-k // depth) // LEAST_BLOCKS))
    stage = BLOCK_BYTES + operands * rows * depth * bytes
    stages = min(MOST_STAGES, (shared_bytes // each - 4096) // stage)
    # Products of three tf32 parts need the registers of twice the threads.
    return MatmulConfig(rows, columns, depth, splits, stages, 8 if bytes > 2 else 4)


def is_by_columns(weight: Tensor) -> bool:
    """Whether the columns of a matrix are contiguous, and not its rows."""
    return weight.stride(0) == 1 < weight.stride(1)


def config_for(m: int, weight: Tensor, operands: int = 1) -> MatmulConfig:
    """Returns the layout for m rows, made of so many tensors, times weight [k, n] with its strides, on its
    device."""
    k, n = weight.shape
    transposed = is_by_columns(weight)
    gpu = gpu_of(weight)
    return matmul_config(
        m, n, k, weight.element_size(), gpu.processors, transposed=transposed,
        shared_bytes=gpu.shared_bytes, operands=operands,
    )  # fmt: skip


class Workspace(NamedTuple):
    """The memory through which the parts of one launch, and the sums of squares of what it norms, are summed:
    partials fp32 [...], counters int32 [...],
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
    tiles = -(-n // config.columns)
    # Behind the parts lie the sums of squares that each of them saw.
    return config.splits * m * (n + tiles), tiles


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
    gain: Tensor | None = None,
    up: Tensor | None = None,
    eps: float = EPS,
) -> Tensor:
    """As `matmul`, in plain torch, any float dtype and any number of rows."""
    x = x if gain is None else reference_norm(x, gain, eps=eps)
    x = x if up is None else reference_activation(x, up)
    y = x.to(weight.dtype) @ weight
    return y if add is None else y + add


@triton.jit
def _ask_for(at):
    """Brings the cache lines at addresses into the L2 cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _matmul_kernel(
    x_ptr, up_ptr, gain_ptr, w_ptr, add_ptr, out_ptr, partial_ptr, counter_ptr, gate_ptr,
    m, n, k, x_row, x_column, up_row, w_row, w_column, add_row, out_row, eps,
    NORMED: tl.constexpr, UP: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
    WHOLE: tl.constexpr, LINE_DEPTH: tl.constexpr, LINE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr, PADDED_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of k for one tile of columns: program (tile, part). WHOLE: k is whole blocks; LINE_DEPTH and
    LINE_COLUMNS: numbers of a cache line along k and along columns, one of them 1."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    blocks = tl.cdiv(k, DEPTH)
    first = split * blocks // SPLITS
    last = (split + 1) * blocks // SPLITS
    if CHAINED:
        gdc_launch_dependents()
        # A launch that its gate may skip should cost little more than a node of the graph.
        if not GATED:
            line = tile * COLUMNS + tl.arange(0, COLUMNS // LINE_COLUMNS) * LINE_COLUMNS
            along = first * DEPTH + tl.arange(0, DEPTH // LINE_DEPTH) * LINE_DEPTH
            for block in range(0, ASKED_FOR):
                deep = tl.minimum(along + block * DEPTH, k - 1)[:, None].to(tl.int64)
                _ask_for(w_ptr + deep * w_row + tl.minimum(line, n - 1)[None, :].to(tl.int64) * w_column)
        gdc_wait()
    if GATED and tl.load(gate_ptr) == 0:
        return

    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    deep = first * DEPTH + tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * x_row + deep[None, :] * x_column
    up_at = up_ptr + row[:, None] * up_row + deep[None, :] if UP else None
    squares = tl.zeros((ROWS,), dtype=tl.float32)
    w_at = w_ptr + deep[:, None].to(tl.int64) * w_row + column[None, :].to(tl.int64) * w_column
    is_row, is_column = row < m, column < n
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(first, last):
        x_inside, w_inside = is_row[:, None], is_column[None, :]
        deep = block * DEPTH + tl.arange(0, DEPTH)
        if not WHOLE:
            x_inside = x_inside & (deep < k)[None, :]
            w_inside = w_inside & (deep < k)[:, None]
        x = tl.load(x_at, mask=x_inside, other=0.0)
        w = tl.load(w_at, mask=w_inside, other=0.0)
        if UP:
            up = tl.load(up_at, mask=x_inside, other=0.0).to(tl.float32)
            x = gated(x.to(tl.float32), up).to(w_ptr.dtype.element_ty)
            up_at += DEPTH
        if NORMED:
            wider = x.to(tl.float32)
            squares += tl.sum(wider * wider, axis=1)
            gain = tl.load(gain_ptr + deep, mask=deep < k, other=0.0).to(tl.float32)
            x = (wider * gain[None, :]).to(w_ptr.dtype.element_ty)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        x_at += DEPTH * x_column
        w_at += DEPTH * w_row

    inside = is_row[:, None] & is_column[None, :]
    at = row[:, None] * n + column[None, :]
    if SPLITS > 1:
        tl.store(partial_ptr + split * m * n + at, total, mask=inside)
        squares_ptr = partial_ptr + SPLITS * m * n + tile * SPLITS * m
        if NORMED:
            tl.store(squares_ptr + split * m + row, squares, mask=is_row)
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
        if NORMED:
            part = tl.arange(0, PADDED_SPLITS)[None, :]
            there = is_row[:, None] & (part < SPLITS)
            each = tl.load(squares_ptr + part * m + row[:, None], mask=there, other=0.0, cache_modifier=".cg")
            squares = tl.sum(each, axis=1)
        tl.store(counter_ptr + tile, 0)
    if NORMED:
        total *= tl.rsqrt(squares / k + eps)[:, None]
    if ADD:
        total += tl.load(add_ptr + row[:, None] * add_row + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row[:, None] * out_row + column[None, :], out, mask=inside)


@launching
def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    gain: Tensor | None = None,
    up: Tensor | None = None,
    add: Tensor | None = None,
    out: Tensor | None = None,
    gate: Tensor | None = None,
    space: Workspace | None = None,
    config: MatmulConfig | None = None,
    eps: float = EPS,
    chained: bool = False,
) -> Tensor:
    """Returns x [m, k], m at most MOST_ROWS, times weight [k, n], in the dtype of the weights: [m, n].

    The weights may be row-major or column-major (a transposed [n, k]). With a `gain` [k] x is replaced by its
    RMS norm, with `up` [m, k], rows contiguous, by silu(x) up, each rounded once to the dtype of the weights;
    fp16 could not hold x times gain, so norm and product are two launches there. `add` [m, n] is added in
    fp32 before rounding; it may be `out` itself for an addition in place. With a `gate` (int32 [1]) of 0
    nothing is written. `space` is a workspace for split layouts, by default that of the stream; `config` the
    layout, by default `matmul_config`'s. `chained`: where the GPU can, the launch starts while the one
    before it ends, asks for its first weights unless a gate may skip it, and waits. Returns `out`, or a new
    tensor. Raises ValueError for sizes that do not fit.
    """
    _check(x, weight, add, out)
    check_gate(gate)
    (m, k), n = x.shape, weight.shape[1]
    if gain is not None and up is not None:
        raise ValueError("x is either normed, by gain, or activated, with up, not both")
    if gain is not None:
        check_like("gain", gain, (k,), gain.dtype)
        if weight.dtype == torch.float16:
            raise ValueError("x times gain may not fit into fp16: norm x before")
    if up is not None:
        check_like("up", up, (m, k), up.dtype)
    config = config or config_for(m, weight, 1 if up is None else 2)
    if config.rows < m:
        raise ValueError(f"a layout of {config.rows} rows for {m}")
    x = x.to(weight.dtype)
    out = torch.empty(m, n, dtype=weight.dtype, device=x.device) if out is None else out
    tiles, partials, counters = triton.cdiv(n, config.columns), None, None
    if config.splits > 1:
        partials, counters = kept_space(m, n, config, x.device) if space is None else space
        least = _needed(m, n, config)
        if partials.numel() < least[0] or counters.numel() < least[1]:
            raise ValueError(f"the workspace is too small for {m} x {n} in {config.splits} parts")
    held, line = config.rows * config.columns // (32 * config.warps), CACHE_LINE // weight.element_size()
    by_columns = is_by_columns(weight)
    _matmul_kernel[(tiles, config.splits)](
        x, up, gain, weight, add, out, partials, counters, gate,
        m, n, k, *x.stride(), 0 if up is None else up.stride(0), *weight.stride(),
        0 if add is None else add.stride(0), out.stride(0), eps,
        NORMED=gain is not None, UP=up is not None, ADD=add is not None, GATED=gate is not None,
        WHOLE=k % config.depth == 0,
        ROWS=config.rows, COLUMNS=config.columns, DEPTH=config.depth,
        SPLITS=config.splits, PADDED_SPLITS=triton.next_power_of_2(config.splits),
        AT_ONCE=min(config.splits, max(1, SUMMED_AT_ONCE // max(1, held))),
        PRECISION="tf32x3" if weight.dtype == torch.float32 else "ieee",
        LINE_DEPTH=min(line, config.depth) if by_columns else 1,
        LINE_COLUMNS=1 if by_columns else min(line, config.columns),
        num_stages=config.stages, **launched(config.warps, chained and gpu_of(weight).chained),
    )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, add: Tensor | None, out: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[0] or 0 in weight.shape:
        raise ValueError(f"x {kind(x)} and weight {kind(weight)} do not fit")
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"weights have to be fp16, bf16 or fp32, not {weight.dtype}")
    size = x.shape[0], weight.shape[1]
    if add is not None:
        check_like("add", add, size, add.dtype)
    if out is not None:
        check_like("out", out, size, weight.dtype)


# -- the op ----------------------------------------------------------------------------------------------


def product(
    x: Tensor,
    weight: Tensor,
    *,
    add: Tensor | None = None,
    out: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """Returns x [m, k] times weight [k, n], plus `add` [m, n] before rounding: for few rows by `matmul` where
    that is faster (`fastest_product`) or has a `gate` (int32 [1]) to read; by cuBLAS else, and for fp8
    weights (x is rounded to fp8 too; the product is bf16, and nothing is added). Writes to `out` [m, n] if
    given, which may be `add`; `add` is in the format of weight. Raises ValueError for tensors that do not
    fit, for a gate with more rows or fp8, and for fp8 with `add`."""
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
        rounded = padded(x).to(weight.dtype)
        y: Tensor = torch._scaled_mm(rounded, weight, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        return y[:m] if out is None else out.copy_(y[:m])
    if add is not None and add.dtype != weight.dtype:
        raise ValueError(f"add has to be {weight.dtype}, as weight, not {kind(add)}")
    if m <= MOST_ROWS or out is not None or add is not None:
        # cuBLAS would give another size to `out`.
        _check(x, weight, add, out)
    if gate is None and is_of_cublas(m, weight):
        # The memory behind `out` may belong to another tensor.
        rows = (padded(x) if out is None and add is None else x).to(weight.dtype)
        return torch.mm(rows, weight, out=out)[:m] if add is None else torch.addmm(add, rows, weight, out=out)
    return matmul(x, weight, add=add, out=out, gate=gate)


def is_of_cublas(m: int, weight: Tensor) -> bool:
    """Whether cuBLAS takes m rows times weight [k, n]: many rows, and few where it is faster."""
    if m > MOST_ROWS or weight.device.type != "cuda" or weight.element_size() > HALF_BYTES:
        return m > MOST_ROWS
    return not ours_is_faster(m, *weight.shape, by_columns=is_by_columns(weight))


def padded(x: Tensor) -> Tensor:
    """Returns x [m, k] with the rows behind it in memory, as many as a product is launched with; x itself if
    its storage ends before."""
    rows = padded_rows(len(x))
    end = x.storage_offset() + (rows - 1) * x.stride(0) + x.shape[1]
    if rows == len(x) or x.stride(1) != 1 or end * x.element_size() > x.untyped_storage().nbytes():
        return x
    return x.as_strided((rows, x.shape[1]), x.stride())


def _run(op: Op, x: Tensor, weight: Tensor) -> Tensor:
    del op
    return product(x, weight)


def _reference(op: Op, x: Tensor, weight: Tensor) -> Tensor:
    """x [m, k] times weight [k, n], in the dtype of the weights: [m, n]. With fp8 weights the product is
    bf16, after x has been rounded to fp8 too."""
    if op.dtype != "fp8":
        return reference_matmul(x, weight)
    rounded = x.to(torch.float8_e4m3fn)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = rounded.to(wide) @ weight.to(wide)
    return y if wide == torch.float64 else y.to(torch.bfloat16)


def _inputs(op: Op, generator: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    if op.dtype == "fp8":
        # The weights are column-major, as tensor cores take them.
        shapes = (padded_rows(op["m"]), op["k"]), (op["n"], op["k"])
        x, weight = (torch.randn(*shape, generator=generator, device=device) for shape in shapes)
        return x.to(torch.bfloat16)[: op["m"]], weight.to(torch.float8_e4m3fn).t()
    x = random_tensor(op, generator, device, padded_rows(op["m"]), op["k"])[: op["m"]]
    return x, random_tensor(op, generator, device, op["k"], op["n"], scale=op["k"] ** -0.5)


MATMUL = Kernel(by_device(_run, _reference), _reference, _inputs)
