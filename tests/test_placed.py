"""Ops of a position that is read on the device, against float64: in Triton's interpreter where there is no
GPU."""

import math

import pytest
import torch
from torch import Tensor

from kernels.decoder.split_kv import ONE_BY_ONE
from kernels.long_convolution.placed import (
    REFERENCES,
    cell_at,
    next_input_at,
    placed_for,
    store_at,
)
from tests.test_triton_convolution import BOUNDS, DEVICE, DTYPES, HAS_GPU, drawn, ints

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
sizes = pytest.mark.parametrize(
    ("batch", "filters", "room", "channels", "at"),
    [(1, 1, 1, 1, 0), (1, 1, 5, 20, 4), (3, 3, 7, 129, 0), (2, 1, 4, 300, 2)],
)


def close(found: Tensor, truth: Tensor) -> None:
    assert float((found.double() - truth).norm() / truth.norm()) < BOUNDS[found.dtype]


def only_there(level: Tensor, at: int, dtype: torch.dtype) -> Tensor:
    """Numbers at one position, nothing at all others."""
    found = torch.full_like(level, math.nan)
    if at < level.shape[1]:
        found[:, at] = level[:, at]
    return found.to(dtype)


@dtypes
@sizes
def test_cell(batch: int, filters: int, room: int, channels: int, at: int, dtype: torch.dtype) -> None:
    y, z = (only_there(drawn(dtype, batch, room, channels, seed=seed, more=1), at, dtype) for seed in (0, 1))
    tap = drawn(dtype, filters, channels, seed=2, more=1)
    still, out = torch.full((2, batch, channels), math.nan, dtype=dtype, device=DEVICE)
    before = z.clone()
    cell_at(y, tap, z, ints(at), still, out)
    assert torch.equal(still, y[:, at])
    close(out, z[:, at].double() + y[:, at].double() * tap.double())
    assert torch.equal(z.nan_to_num(7.0), before.nan_to_num(7.0))


@dtypes
@sizes
@pytest.mark.parametrize("times", [False, True])
def test_store(
    batch: int, filters: int, room: int, channels: int, at: int, dtype: torch.dtype, times: bool
) -> None:
    del filters
    x, factor = (drawn(dtype, batch, channels, seed=seed, more=1) for seed in (0, 1))
    z = torch.full((batch, room, channels), math.nan, dtype=dtype, device=DEVICE)
    store_at(x, factor if times else None, ints(at), z)
    close(z[:, at], x.double() * (factor.double() if times else 1.0))
    z[:, at] = math.nan
    assert bool(z.isnan().all())


@dtypes
@sizes
def test_next_input(batch: int, filters: int, room: int, channels: int, at: int, dtype: torch.dtype) -> None:
    del filters
    last = only_there(drawn(dtype, batch, room, channels), at, dtype)
    noise = drawn(dtype, room, batch, channels, seed=1, more=1)
    a = torch.full((batch, room, channels), math.nan, dtype=dtype, device=DEVICE)
    next_input_at(last, noise, ints(at), a)
    if at + 1 < room:
        close(a[:, at + 1], last[:, at].double() + noise[at].double())
        a[:, at + 1] = math.nan
    assert bool(a.isnan().all())


@sizes
def test_references_are_the_same_in_plain_torch(
    batch: int, filters: int, room: int, channels: int, at: int
) -> None:
    def levels(seed: int) -> Tensor:
        return drawn(torch.float64, batch, room, channels, seed=seed)

    y, z, tap, where = levels(0), levels(1), drawn(torch.float64, filters, channels, seed=2), ints(at)
    assert placed_for(y) is REFERENCES
    still, out = torch.full((2, batch, channels), math.nan, dtype=torch.float64, device=DEVICE)
    REFERENCES.cell(y, tap, z, where, still, out)
    torch.testing.assert_close(out, z[:, at] + y[:, at] * tap)
    torch.testing.assert_close(still, y[:, at])
    expected = z.clone()
    expected[:, at] = still * out
    REFERENCES.store(still, out, where, z)
    torch.testing.assert_close(z, expected)
    noise, a = drawn(torch.float64, room, batch, channels, seed=3), levels(4)
    expected = a.clone()
    if at + 1 < room:
        expected[:, at + 1] = y[:, at] + noise[at]
    REFERENCES.next_input(y, noise, where, a)
    torch.testing.assert_close(a, expected)


def test_tensors_that_do_not_fit_are_refused() -> None:
    y, z, tap = (torch.zeros(size, device=DEVICE) for size in ((2, 3, 4), (2, 3, 4), (1, 4)))
    still, out = torch.zeros(2, 2, 4, device=DEVICE)
    noise = torch.zeros(3, 2, 4, device=DEVICE)
    with pytest.raises(ValueError, match="position has to be int32"):
        cell_at(y, tap, z, torch.zeros(1, device=DEVICE), still, out)
    with pytest.raises(ValueError, match="do not fit y"):
        cell_at(y, torch.zeros(3, 4, device=DEVICE), z, ints(0), still, out)
    with pytest.raises(ValueError, match="other memory"):
        cell_at(y, tap, z, ints(0), out, out)
    with pytest.raises(ValueError, match="out has to be"):
        cell_at(y, tap, z, ints(0), still, out[:, :3])
    with pytest.raises(ValueError, match="x has to be"):
        store_at(out.half(), None, ints(0), z)
    with pytest.raises(ValueError, match="z has to be"):
        store_at(out, None, ints(0), z[:, :, ::2])
    with pytest.raises(ValueError, match="do not fit a"):
        next_input_at(z, noise[:2], ints(0), y)
    with pytest.raises(ValueError, match="other memory"):
        next_input_at(z, noise, ints(0), z)
