"""Ops of a position that is read on the device, against float64: in Triton's interpreter where there is no
GPU."""

import math

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.long_convolution.placed import (
    REFERENCES,
    cell_at,
    next_input_at,
    placed_for,
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
@pytest.mark.parametrize("first", [True, False])
def test_cell(
    batch: int, filters: int, room: int, channels: int, at: int, dtype: torch.dtype, first: bool
) -> None:
    whole, z = (only_there(drawn(dtype, batch, room, channels, seed=seed), at, dtype) for seed in (0, 1))
    expected = whole[:, at].clone()
    nothing = torch.full_like(whole, math.nan)
    y, level = (nothing[:, 0].clone(), whole) if first else (expected.clone(), nothing)
    tap = drawn(dtype, filters, channels, seed=2, more=1)
    out, before = torch.full_like(expected, math.nan), z.clone()
    cell_at(y, level, tap, z, ints(at), out, first)
    assert torch.equal(y, expected)
    assert torch.equal(level[:, at], expected)
    close(out, z[:, at].double() + expected.double() * tap.double())
    level[:, at] = math.nan
    assert bool(level.isnan().all())
    assert torch.equal(z.nan_to_num(7.0), before.nan_to_num(7.0))


@dtypes
@sizes
def test_next_input(batch: int, filters: int, room: int, channels: int, at: int, dtype: torch.dtype) -> None:
    del filters
    x, noise = drawn(dtype, batch, channels, more=1), drawn(dtype, room, batch, channels, seed=1, more=1)
    last, a = torch.full((2, batch, room, channels), math.nan, dtype=dtype, device=DEVICE)
    next_input_at(x, last, noise, ints(at), a)
    assert torch.equal(last[:, at], x)
    if at + 1 < room:
        close(a[:, at + 1], x.double() + noise[at].double())
        a[:, at + 1] = math.nan
    last[:, at] = math.nan
    assert bool(a.isnan().all())
    assert bool(last.isnan().all())


@sizes
@pytest.mark.parametrize("first", [True, False])
def test_references_are_the_same_in_plain_torch(
    batch: int, filters: int, room: int, channels: int, at: int, first: bool
) -> None:
    def levels(seed: int) -> Tensor:
        return drawn(torch.float64, batch, room, channels, seed=seed)

    level, z, a = levels(0), levels(1), levels(4)
    tap, where = drawn(torch.float64, filters, channels, seed=2), ints(at)
    assert placed_for(z) is REFERENCES
    y, before = drawn(torch.float64, batch, channels, seed=5), level.clone()
    given, out = y.clone(), torch.full_like(y, math.nan)
    REFERENCES.cell(y, level, tap, z, where, out, first)
    y_then = before[:, at] if first else given
    torch.testing.assert_close(out, z[:, at] + y_then * tap)
    torch.testing.assert_close(y, y_then)
    if not first:
        before[:, at] = given
    torch.testing.assert_close(level, before)
    noise, last = drawn(torch.float64, room, batch, channels, seed=3), levels(6)
    expected, kept = a.clone(), last.clone()
    kept[:, at] = out
    if at + 1 < room:
        expected[:, at + 1] = out + noise[at]
    REFERENCES.next_input(out, last, noise, where, a)
    torch.testing.assert_close(a, expected)
    torch.testing.assert_close(last, kept)


def test_tensors_that_do_not_fit_are_refused() -> None:
    level, z, other = torch.zeros(3, 2, 3, 4, device=DEVICE)
    tap, (y, out) = torch.zeros(1, 4, device=DEVICE), torch.zeros(2, 2, 4, device=DEVICE)
    noise, where = torch.zeros(3, 2, 4, device=DEVICE), ints(0)
    with pytest.raises(ValueError, match="position has to be int32"):
        cell_at(y, level, tap, z, torch.zeros(1, device=DEVICE), out, True)
    with pytest.raises(ValueError, match="does not fit level"):
        cell_at(y, level, tap, z[:, :2], where, out, True)
    for wrong in (torch.zeros(3, 4, device=DEVICE), torch.zeros(1, 8, device=DEVICE)[:, ::2]):
        with pytest.raises(ValueError, match="tap has to be"):
            cell_at(y, level, wrong, z, where, out, True)
    with pytest.raises(ValueError, match="other memory"):
        cell_at(out, level, tap, z, where, out, True)
    with pytest.raises(ValueError, match="out has to be"):
        cell_at(y, level, tap, z, where, out[:, :3], False)
    with pytest.raises(ValueError, match="z has to be"):
        cell_at(y, level, tap, z[:, :, ::2], where, out, False)
    with pytest.raises(ValueError, match="x has to be"):
        next_input_at(out.half(), z, noise, where, other)
    with pytest.raises(ValueError, match="does not fit a"):
        next_input_at(out, z[:, :2], noise, where, other)
    for wrong in (noise[:2], torch.zeros(3, 2, 8, device=DEVICE)[..., ::2]):
        with pytest.raises(ValueError, match="noise has to be"):
            next_input_at(out, z, wrong, where, other)
    with pytest.raises(ValueError, match="other memory"):
        next_input_at(out, z, noise, where, z)


@pytest.mark.parametrize("at", [-1, 3, 4])
def test_nothing_is_written_beyond_all_positions(at: int) -> None:
    """The next level lies behind a level's last position."""
    levels = torch.zeros(3, 1, 3, 8, device=DEVICE)
    y, out = torch.ones(2, 1, 8, device=DEVICE)
    cell_at(y, levels[0], y, levels[1], ints(at), out, False)
    next_input_at(y, levels[1], torch.ones(3, 1, 8, device=DEVICE), ints(at), levels[0])
    assert not bool(levels.any())
