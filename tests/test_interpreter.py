"""Triton's interpreter, as tests/interpreter.py makes it: it combines numbers in order, format kept."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from simcore.kernels.decoder.split_kv import ONE_BY_ONE

pytestmark = pytest.mark.skipif(not ONE_BY_ONE, reason="Triton's interpreter is not chosen")
SHAPE = (4, 8, 2)


@triton.jit
def _halved_and_added(a, b):
    return a / 2 + b


@triton.jit
def _halved_and_counted(a, count, b, more):
    return a / 2 + b, count + more


@triton.jit
def _block(ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    a, b, c = tl.arange(0, A)[:, None, None], tl.arange(0, B)[None, :, None], tl.arange(0, C)[None, None, :]
    at = (a * B + b) * C + c
    return tl.load(ptr + at), at


@triton.jit
def _reduce(x_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, AXIS: tl.constexpr):
    x, at = _block(x_ptr, A, B, C)
    found = tl.reduce(x, AXIS, _halved_and_added, keep_dims=True)
    # Each number of the block gets what its row came to.
    tl.store(out_ptr + at, found + tl.zeros_like(x))


@triton.jit
def _reduce_two(
    x_ptr,
    count_ptr,
    out_ptr,
    counts_ptr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    AXIS: tl.constexpr,
):
    x, at = _block(x_ptr, A, B, C)
    count, _ = _block(count_ptr, A, B, C)
    found, total = tl.reduce((x, count), AXIS, _halved_and_counted)
    tl.store(out_ptr + at, tl.expand_dims(found, AXIS) + tl.zeros_like(x))
    tl.store(counts_ptr + at, tl.expand_dims(total, AXIS) + tl.zeros_like(count))


@triton.jit
def _scan(
    x_ptr,
    out_ptr,
    A: tl.constexpr,
    B: tl.constexpr,
    C: tl.constexpr,
    AXIS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    x, at = _block(x_ptr, A, B, C)
    tl.store(out_ptr + at, tl.associative_scan(x, AXIS, _halved_and_added, reverse=REVERSE))


@triton.jit
def _reduce_row(x_ptr, out_ptr, N: tl.constexpr):
    tl.store(out_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, N)), 0, _halved_and_added))


def drawn(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (100 * x).to(dtype)


def scanned(x: torch.Tensor, axis: int) -> Any:
    """One number after another, in its own format."""
    found = x.numpy().copy()
    for at in itertools.product(*(range(n) for n in found.shape)):
        if at[axis]:
            before = tuple(i - (one == axis) for one, i in enumerate(at))
            found[at] = found[before] / found.dtype.type(2) + found[at]
    return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_blocks_are_combined_in_order(axis: int, dtype: torch.dtype) -> None:
    x, out = drawn(dtype), torch.empty(SHAPE, dtype=dtype)
    steps = scanned(x, axis)
    last = np.broadcast_to(np.take(steps, [-1], axis), SHAPE)
    _reduce[(1,)](x, out, *SHAPE, axis)
    np.testing.assert_array_equal(out.numpy(), last)
    count = torch.arange(x.numel(), dtype=torch.int32).view(SHAPE)
    out.zero_()
    counts = torch.empty_like(count)
    _reduce_two[(1,)](x, count, out, counts, *SHAPE, axis)
    np.testing.assert_array_equal(out.numpy(), last)
    assert torch.equal(counts, count.sum(axis, keepdim=True).expand(SHAPE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_blocks_are_scanned_in_order(axis: int, dtype: torch.dtype) -> None:
    x, out = drawn(dtype), torch.empty(SHAPE, dtype=dtype)
    _scan[(1,)](x, out, *SHAPE, axis, False)
    np.testing.assert_array_equal(out.numpy(), scanned(x, axis))
    _scan[(1,)](x, out, *SHAPE, axis, True)
    np.testing.assert_array_equal(out.numpy(), np.flip(scanned(x.flip(axis), axis), axis))


def test_a_row_is_combined_in_order() -> None:
    x, out = drawn(torch.float32).flatten(), torch.empty(1)
    _reduce_row[(1,)](x, out, x.numel())
    assert float(out) == scanned(x, 0)[-1]
