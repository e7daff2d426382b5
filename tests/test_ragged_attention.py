"""Attention of prompts and decoding sequences side by side against float64: in Triton's interpreter where
there is no GPU, small; else compiled, at sizes of serving, in a captured graph. The cache is NaN wherever no
token of a sequence lies, and so is what a launch has to write."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.decode_attention import reference_decode_attention
from simcore.kernels.decoder.layer import capture
from simcore.kernels.decoder.ragged_attention import (
    RaggedConfig,
    ragged_attention,
    ragged_config,
    reference_ragged_attention,
    tiles,
)
from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from tests.attention_cases import BARS, FP8, error
from tests.thorough import first

torch.set_num_threads(1)
DEVICE = "cpu" if ONE_BY_ONE or not torch.cuda.is_available() else "cuda"
interpreted = pytest.mark.skipif(
    not ONE_BY_ONE, reason="each shape would be compiled: the suite for GPUs has fewer, larger ones"
)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device, or Triton's interpreter is chosen")
SMALL = RaggedConfig(queries=32, block=16, stages=2, warps=4)


@dataclass(frozen=True, slots=True)
class Heads:
    kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    page: int = 16


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of a call: `tensors` are q, k, v, starts, lengths, block_table; `used` rows of q are no
    padding."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any]
    used: int


def made(heads: Heads, now: list[int], cached: list[int], seed: int, *, padding: int = 0) -> Case:
    """Sequences with so many rows `now`, behind so many tokens `cached` before, and padding rows, NaN."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    lengths = [a + b for a, b in zip(now, cached, strict=True)]
    each = [-(-length // heads.page) for length in lengths]
    used, blocks = sum(now), sum(each) + 3

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE)

    q = normal(used + padding, heads.kv_heads * heads.group, heads.head_dim)
    q[used:] = math.nan
    # K and V of a block side by side; block 0 is nobody's, as the entries behind a sequence's end say.
    pool = normal(blocks, 2, heads.page, heads.kv_heads, heads.head_dim)
    order = 1 + torch.randperm(blocks - 1, generator=generator, device=DEVICE)
    table = torch.zeros(len(now), max(each, default=0) + 2, dtype=torch.int32, device=DEVICE)
    free = torch.ones(blocks, heads.page, dtype=torch.bool, device=DEVICE)
    begin = 0
    for sequence, (length, count) in enumerate(zip(lengths, each, strict=True)):
        owned = order[begin : begin + count]
        table[sequence, :count] = owned
        free[owned] = (torch.arange(count * heads.page, device=DEVICE) >= length).view(count, heads.page)
        begin += count
    options: dict[str, Any] = {}
    if heads.kv_dtype == FP8:
        for i, name in enumerate(("k_scale", "v_scale")):
            scale = torch.rand(heads.kv_heads, generator=generator, device=DEVICE) * 0.02 + 0.005
            pool[:, i].div_(scale[:, None]).clamp_(-448, 448)
            options[name] = scale
    pool.transpose(1, 2)[free] = math.nan
    pool = pool.to(heads.kv_dtype or heads.dtype)
    starts = ints(0, *accumulate(now))
    return Case((q.to(heads.dtype), pool[:, 0], pool[:, 1], starts, ints(*lengths), table), options, used)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def truth(case: Case) -> Tensor:
    """In float64, but for a cache of fp8, which its scales belong to."""
    q, k, v, *where = case.tensors
    k, v = (x if x.dtype == FP8 else x.double() for x in (k, v))
    return reference_ragged_attention(q.double(), k, v, *where, **case.options)


def check(case: Case, config: RaggedConfig | None = None) -> None:
    """Within the bar of its format, row by row, padding 0, and nothing left NaN."""
    out = torch.full_like(case.tensors[0], math.nan)
    assert ragged_attention(*case.tensors, **case.options, out=out, config=config) is out
    assert error(out[: case.used], truth(case)[: case.used]) < BARS[out.dtype]
    assert not out[case.used :].count_nonzero()


def drawn(seed: int, sequences: int, most: int) -> tuple[list[int], list[int]]:
    """Rows now, often none or one, and tokens before, often none."""
    rng = np.random.default_rng(seed)
    now = np.where(
        rng.random(sequences) < 0.5, rng.integers(0, 3, sequences), rng.integers(0, most, sequences)
    )
    cached = np.where(rng.random(sequences) < 0.3, 0, rng.integers(0, 2 * most, sequences))
    return now.tolist(), cached.tolist()


SHAPES = [
    Heads(2, 1, 64), Heads(1, 4, 96, torch.float16), Heads(1, 7, 128), Heads(2, 8, 64, torch.float16),
    Heads(1, 16, 128, page=32), Heads(2, 4, 64, torch.float16, FP8), Heads(1, 3, 256, page=48),
    Heads(1, 1, 128),
]  # fmt: skip
LAYOUTS = [
    SMALL,
    RaggedConfig(16, 32, 3, 4),
    RaggedConfig(64, 16, 2, 4, narrow=False),
    RaggedConfig(32, 16, 2, 4, masked=True),
]


@interpreted
@pytest.mark.parametrize("seed", first(6, range(32)))
def test_random_steps(seed: int) -> None:
    now, cached = drawn(seed, 1 + seed % 5, 30)
    case = made(SHAPES[seed % len(SHAPES)], now, cached, seed, padding=seed % 4)
    check(case, LAYOUTS[(seed + seed // 4) % len(LAYOUTS)])


@interpreted
@pytest.mark.parametrize("now", [[0], [1], [0, 0, 5], [1, 1, 1], [33, 0, 1, 16], [64]])
def test_sequences_without_rows_and_rows_at_the_edges_of_tiles(now: list[int]) -> None:
    check(made(Heads(1, 4, 64), now, [3 * i for i in range(len(now))], 1, padding=9), SMALL)


@interpreted
def test_the_default_layout() -> None:
    check(made(Heads(2, 4, 64), [20, 1], [3, 40], 1, padding=1))


@pytest.mark.parametrize("seed", range(8))
def test_the_reference_is_decode_attention_row_by_row(seed: int) -> None:
    now, cached = drawn(seed, 4, 12)
    case = made(Heads(2, 3, 32), now, cached, seed)
    q, k, v, _, lengths, table = case.tensors
    if not case.used:
        return
    sequences = torch.arange(len(now), device=DEVICE).repeat_interleave(torch.tensor(now, device=DEVICE))
    ends = torch.cat([torch.arange(n - r + 1, n + 1) for n, r in zip(lengths.tolist(), now, strict=True)])
    expected = reference_decode_attention(
        q.double(), k.double(), v.double(), ends.to(DEVICE, torch.int32), block_table=table[sequences]
    )
    assert error(truth(case), expected) < 1e-12


def test_a_row_that_attends_no_token_is_0() -> None:
    case = made(Heads(1, 4, 64), [5, 3], [0, 0], 1)
    q, k, v, starts, _, table = case.tensors
    shorter = Case((q, k, v, starts, ints(3, 0), table), {}, case.used)
    check(shorter, SMALL)
    assert not truth(shorter)[[0, 1, 5, 6, 7]].count_nonzero()


@interpreted
@pytest.mark.parametrize("alone", [1, 7, 40])
def test_rows_before_the_first_sequence_stay_as_they_are(alone: int) -> None:
    """Sequences of one row come first and attend elsewhere: for this launch they have none."""
    now, cached = [1] * alone + [5, 0, 33], [3] * alone + [9, 4, 0]
    case = made(Heads(1, 4, 64), now, cached, 1, padding=3)
    q, k, v, starts, *where = case.tensors
    out = torch.full_like(q, math.nan)
    ragged_attention(q, k, v, starts.clamp(min=alone), *where, out=out, config=SMALL)
    assert out[:alone].isnan().all()
    assert error(out[alone : case.used], truth(case)[alone : case.used]) < BARS[q.dtype]
    assert not out[case.used :].count_nonzero()


def test_lengths_beyond_the_table_are_cut() -> None:
    case = made(Heads(1, 4, 64), [4], [28], 1)
    q, k, v, starts, _, table = case.tensors
    cut = table[:, :2]
    out = ragged_attention(q, k, v, starts, ints(99), cut, config=SMALL)
    assert torch.equal(out, ragged_attention(q, k, v, starts, ints(32), cut, config=SMALL))


def test_rows_and_heads_may_lie_apart() -> None:
    case = made(Heads(2, 4, 64), [9, 1], [5, 7], 1)
    q, *others = case.tensors
    around = torch.full((len(q), 12, 70), math.nan, device=DEVICE)
    around[:, 2:10, 3:67] = q
    out = torch.full_like(around, math.nan)
    ragged_attention(around[:, 2:10, 3:67], *others, out=out[:, 2:10, 3:67], config=SMALL)
    assert error(out[:, 2:10, 3:67], truth(case)) < BARS[q.dtype]
    assert int(out.isfinite().sum()) == q.numel()


def test_no_rows() -> None:
    case = made(Heads(1, 4, 64), [0], [5], 1)
    assert ragged_attention(*case.tensors).shape == (0, 4, 64)


def test_each_sequence_has_its_tiles_whatever_the_rows() -> None:
    rng = np.random.default_rng(1)
    for _ in range(200):
        b, now = int(rng.integers(1, 9)), rng.integers(0, 20, rng.integers(1, 6)).tolist()
        starts = [0, *accumulate(now)]
        rows = starts[-1] + int(rng.integers(0, 9))
        firsts = [start // b + s for s, start in enumerate(starts)] + [tiles(rows, len(now), b)]
        counts = [*now, rows - starts[-1]]
        for at, following, count in zip(firsts, firsts[1:], counts, strict=False):
            assert following - at >= -(-count // b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(6, 4, 32)}, "q has to be"),
        ({"q": torch.zeros(6, 3, 64)}, "multiple"),
        ({"q": torch.zeros(6, 4, 64).double()}, "no fp64"),
        ({"k": torch.zeros(4, 16, 2, 32)}, "one shape"),
        ({"k": torch.zeros(9, 8, 2, 64), "v": torch.zeros(9, 8, 2, 64)}, "blocks of 8 tokens"),
        ({"starts": torch.zeros(2, dtype=torch.int32)}, "starts"),
        ({"starts": torch.zeros(3)}, "starts"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths"),
        ({"lengths": torch.zeros(0, dtype=torch.int32)}, "lengths"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "block_table"),
        ({"k_scale": torch.ones(2)}, "together"),
        ({"out": torch.zeros(5, 4, 64)}, "out"),
        ({"config": RaggedConfig(16, 16, 1, 4), "q": torch.zeros(6, 64, 64)}, "queries"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    case = made(Heads(2, 2, 64), [4, 2], [1, 9], 1)
    names = ["q", "k", "v", "starts", "lengths", "block_table"]
    change = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=message):
        ragged_attention(**dict(zip(names, case.tensors, strict=True)) | change)


@pytest.mark.parametrize(
    "wrong", [{"queries": 8}, {"queries": 48}, {"block": 8}, {"stages": 0}, {"warps": 3}]
)
def test_layouts_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RaggedConfig(**{"queries": 32, "block": 16, "stages": 2, "warps": 4} | wrong)


BF16 = torch.bfloat16
LARGE = [
    Heads(8, 4, 128, BF16), Heads(4, 7, 128, BF16), Heads(2, 8, 96, BF16), Heads(4, 1, 64, BF16),
    Heads(2, 16, 256, BF16), Heads(8, 4, 128, BF16, FP8), Heads(8, 4, 128, torch.float16, page=64),
    Heads(2, 4, 128),
]  # fmt: skip


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("heads", LARGE, ids=str)
def test_steps_of_serving_on_a_gpu(heads: Heads) -> None:
    for seed in range(5):
        now, cached = drawn(seed, (1, 3, 8, 33, 64)[seed], 700 if seed < 3 else 60)
        check(made(heads, now, cached, seed, padding=seed * 7))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    "config", [RaggedConfig(64, 64, 2, 4, masked=True), RaggedConfig(128, 128, 2, 8)], ids=str
)
def test_layouts_on_a_gpu(config: RaggedConfig) -> None:
    check(made(LARGE[0], [300, 1, 0, 65], [5, 700, 3, 64], 1, padding=9), config)


@pytest.mark.gpu
@needs_gpu
def test_one_graph_serves_steps_of_many_kinds() -> None:
    rows, sequences = 256, 16
    cases = [
        made(LARGE[0], now, [50] * sequences, 7, padding=rows - sum(now))
        for now in ([16] * 16, [1] * 15 + [200], [0] * 15 + [256], [1] * 9 + [0] * 7)
    ]
    blocks, columns = (max(c.tensors[i].shape[d] for c in cases) for i, d in ((1, 0), (5, 1)))
    held = [x.clone() for x in cases[0].tensors]
    held[1], held[2] = (torch.zeros(blocks, *x.shape[1:], dtype=BF16, device=DEVICE) for x in held[1:3])
    held[5] = torch.zeros(sequences, columns, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(held[0])
    graph = capture(lambda: ragged_attention(*held, out=out), [])
    for case in cases:
        for x, given in zip(held, case.tensors, strict=True):
            x[tuple(slice(size) for size in given.shape)] = given
        out.fill_(math.nan)
        graph.replay()
        assert error(out[: case.used], truth(case)[: case.used]) < BARS[BF16]
        assert not out[case.used :].count_nonzero()


def test_the_default_layouts_fit_every_head() -> None:
    for head_dim in (64, 80, 128, 256):
        for q_bytes, kv_bytes in ((2, 2), (2, 1), (4, 4), (4, 1)):
            assert ragged_config(9, head_dim=head_dim, q_bytes=q_bytes, kv_bytes=kv_bytes).queries >= 16
