"""The Triton kernels of linear attention against float64: in Triton's interpreter where there is no GPU,
small; else compiled, at random shapes up to those of large models.

Every output is poisoned before, so that what a kernel leaves out shows.
"""

import dataclasses
import math
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.linear_attention.naive import naive
from simcore.kernels.linear_attention.triton_chunked import (
    LEAST_ROWS,
    MOST_ALONE,
    MOST_GROUPS,
    ChunkedConfig,
    chunked_config,
    chunked_linear_attention,
    is_copied,
)
from simcore.kernels.linear_attention.triton_fleet import FleetConfig, fleet_attention
from simcore.kernels.linear_attention.triton_step import (
    StepConfig,
    linear_attention_step,
    reference_linear_attention_step,
    step_config,
)
from simcore.kernels.linear_attention.triton_tensors import Sizes, reference_linear_attention
from tests.thorough import first, slow, thorough

torch.set_num_threads(1)

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# What a kernel may be off, of the norm of the truth.
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# The interpreter does not compute in bf16 as a GPU does.
DTYPES = list(BOUNDS) if HAS_GPU else [torch.float32, torch.float16]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]

Method = Callable[..., tuple[Tensor, Tensor]]


def drawn(dtype: torch.dtype, *size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*size, generator=generator, device=DEVICE) * scale).to(dtype)


def poisoned(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.full(size, math.nan, dtype=dtype, device=DEVICE)


@pytest.fixture(autouse=True)
def _what_kernels_allocate_is_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def filled(*size: Any, **how: Any) -> Tensor:
        x = empty(*size, **how)
        return x.fill_(math.nan) if x.is_floating_point() else x

    monkeypatch.setattr(torch, "empty", filled)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def decays(heads: int, least: float = 0.7) -> Tensor:
    """Spread evenly from `least` to 1, which is one of them."""
    return torch.linspace(1.0, least, heads, device=DEVICE)


def error(x: Tensor, truth: Tensor) -> float:
    assert x.shape == truth.shape
    assert truth.dtype == torch.float64
    return float((x.double() - truth).norm() / truth.norm().clamp_min(1e-300))


def tokens(
    dtype: torch.dtype, s: Sizes, seed: int = 0, spare: tuple[int, int, int] = (3, 1, 5)
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as views of [batch, length, heads, columns], rows further apart than they have columns."""
    q = drawn(dtype, s.batch, s.length, s.q_heads, s.rank + spare[0], seed=seed)
    k = drawn(dtype, s.batch, s.length, s.kv_heads, s.rank + spare[1], seed=seed + 1, scale=s.rank**-0.5)
    v = drawn(dtype, s.batch, s.length, s.kv_heads, s.dim + spare[2], seed=seed + 2)
    q, k, v = q[..., : s.rank], k[..., : s.rank], v[..., : s.dim]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def check(
    method: Method,
    dtype: torch.dtype,
    s: Sizes,
    *,
    decay: Tensor | None = None,
    start: bool = True,
    lengths: Tensor | None = None,
    seed: int = 0,
    spare: tuple[int, int, int] = (3, 1, 5),
    **how: Any,
) -> None:
    """A method's outputs and final state, written into what is given, against the truth."""
    q, k, v = tokens(dtype, s, seed, spare)
    state = drawn(torch.float32, *s.state[:3], s.dim + 2, seed=seed + 3)[..., : s.dim] if start else None
    out = poisoned(dtype, s.batch, s.length, s.q_heads, s.dim).transpose(1, 2)
    final = poisoned(torch.float32, *s.state)
    found = method(q, k, v, decay, state, lengths=lengths, out=out, final_state=final, **how)
    assert found[0] is out
    assert found[1] is final
    before = None if state is None else state.double()
    truth = reference_linear_attention(q.double(), k.double(), v.double(), decay, before, lengths=lengths)
    assert error(out, truth[0]) < BOUNDS[dtype], (s, how)
    assert error(final, truth[1]) < BOUNDS[dtype], (s, how)


def test_the_reference_is_the_specification() -> None:
    s = Sizes(2, 4, 2, 9, 5, 3)
    q, k, v = (x.double() for x in tokens(torch.float32, s))
    decay, state = decays(2), drawn(torch.float64, *s.state)
    out, last = reference_linear_attention(q, k, v, decay, state)
    spread = [x.repeat_interleave(2, 1) for x in (k, v, state)]
    truth, truth_last = naive(q, spread[0], spread[1], decay.repeat_interleave(2), spread[2])
    assert error(out, truth) < 1e-13
    assert error(last, truth_last[:, ::2]) < 1e-13
    kept = [4, 0]
    cut, cut_last = reference_linear_attention(q, k, v, decay, state, lengths=ints(*kept))
    for b, n in enumerate(kept):
        assert torch.equal(cut[b, :, :n], out[b, :, :n])
        assert not cut[b, :, n:].any()
    assert torch.equal(cut_last[1], state[1])


# -- chunks ------------------------------------------------------------------------------------------------

CHUNKS = [
    (Sizes(1, 1, 1, 1, 16, 16), None),
    (Sizes(1, 2, 2, 33, 16, 16), ChunkedConfig(16, 16, 1, 2, 4)),
    (Sizes(2, 2, 1, 50, 33, 18), ChunkedConfig(16, 32, 3, 2, 4)),
    (Sizes(1, 1, 1, 150, 16, 16), ChunkedConfig(16, 16, 2, 2, 4, pieces=3)),
    (Sizes(2, 4, 2, 40, 20, 40), ChunkedConfig(16, 32, 1, 2, 4)),
    (Sizes(1, 3, 1, 64, 5, 3), ChunkedConfig(16, 16, 4, 2, 4)),
    (Sizes(2, 2, 2, 75, 16, 24), ChunkedConfig(16, 32, 5, 2, 4, summed=2)),
    (Sizes(1, 1, 1, 140, 100, 72), ChunkedConfig(64, 32, 2, 2, 4)),
    (Sizes(2, 4, 2, 75, 20, 24), ChunkedConfig(16, 32, 3, 2, 4, alone=True)),
    (Sizes(2, 4, 2, 99, 20, 24), ChunkedConfig(16, 32, 3, 2, 4, pieces=2)),
]


@pytest.mark.parametrize("dtype", first(1, DTYPES))
@pytest.mark.parametrize("shape", first(4, CHUNKS))
def test_chunks(shape: tuple[Sizes, ChunkedConfig | None], dtype: torch.dtype) -> None:
    sizes, config = shape
    heads = sizes.kv_heads
    for decay, start in ((decays(heads), True), (decays(heads, 0.01).flip(0), False), (None, True)):
        check(chunked_linear_attention, dtype, sizes, decay=decay, start=start, config=config)


@slow
@pytest.mark.parametrize(
    ("groups", "alone", "pieces"), [(1, False, 1), (3, False, 1), (3, True, 1), (2, False, 2)]
)
@pytest.mark.parametrize("size", first(1, [(75, 48), (7, 16), (96, 16)]))
def test_rows_copied_by_descriptors(groups: int, alone: bool, pieces: int, size: tuple[int, int]) -> None:
    """Beyond the end of a sequence are the rows of others, and beyond rank and dim other columns: they count
    for nothing and stay as they are."""
    config = ChunkedConfig(16, 32, groups, 2, 4, alone=alone, copied=True, pieces=pieces)
    s = Sizes(2, 4, 2, *size, 48)
    q, k, v = tokens(torch.float16, s, spare=(16, 0, 32))
    whole = poisoned(torch.float16, s.batch, s.length + 9, s.q_heads, s.dim)
    out = whole[:, : s.length].transpose(1, 2)
    assert all(is_copied(x) for x in (q, k, v, out))
    _, last = chunked_linear_attention(q, k, v, decays(2), out=out, config=config)
    truth = reference_linear_attention(q.double(), k.double(), v.double(), decays(2))
    assert error(out, truth[0]) < BOUNDS[torch.float16]
    assert error(last, truth[1]) < BOUNDS[torch.float16]
    assert whole[:, s.length :].isnan().all()


@pytest.mark.parametrize(
    "shape",
    first(
        1,
        [
            {"groups": 3},
            {"groups": 3, "alone": True},
            {"groups": 2, "pieces": 2},
            {"groups": 1},
            {"groups": 5, "summed": 1},
            {"groups": 3, "pieces": 2, "summed": 9},
        ],
    ),
)
@slow
def test_chunks_of_sequences_that_end_early(shape: dict[str, int]) -> None:
    """Before the first row, within a chunk, at its end, at the end of a group, and beyond the tensor."""
    s = Sizes(7, 2, 1, 80, 16, 16)
    for decay in (decays(1, 0.8), None):
        check(
            chunked_linear_attention, torch.float32, s, decay=decay, lengths=ints(0, 5, 16, 32, 47, 79, 99),
            config=ChunkedConfig(**{"chunk": 16, "columns": 16, "stages": 2, "warps": 4} | shape),
        )  # fmt: skip


@pytest.mark.parametrize(
    "shape", first(1, [{"pieces": 2}, {"pieces": 1}, {"pieces": 3, "summed": 1}, {"alone": True}])
)
@slow
def test_what_a_state_has_forgotten_is_not_read_for_it(shape: dict[str, int]) -> None:
    """A weight is below 2^-40 after 41 rows of one head, and 21 of the other."""
    s = Sizes(1, 2, 2, 400, 16, 16)
    q, k, v = tokens(torch.float32, s)
    decay, config = torch.tensor([0.5, 0.25], device=DEVICE), ChunkedConfig(16, 16, 4, 2, 4, **shape)
    truth = reference_linear_attention(q.double(), k.double(), v.double(), decay)
    out, last = chunked_linear_attention(q, k, v, decay, config=config)
    assert error(out, truth[0]) < BOUNDS[torch.float32]
    assert error(last, truth[1]) < BOUNDS[torch.float32]
    k[:, :, :30] = math.nan
    out, last = chunked_linear_attention(q, k, v, decay, config=config)
    assert not last.isnan().any()
    later = slice(240, None)
    assert error(out[:, :, later], truth[0][:, :, later]) < BOUNDS[torch.float32]


@pytest.mark.parametrize("shape", first(1, [{"pieces": 2}, {"pieces": 1}, {"summed": 1}, {"alone": True}]))
@pytest.mark.parametrize("decay", first(1, [0.5, 1e-13]))
@slow
def test_nothing_but_the_last_row_is_left_of_a_state(decay: float, shape: dict[str, int]) -> None:
    """Of a decay below 2^-40, and of rows as of an initial state; the other head forgets nothing."""
    s, config = Sizes(3, 2, 2, 80, 16, 16), ChunkedConfig(16, 16, 3, 2, 4, **shape)
    for lengths in (None, ints(0, 33, 65)):
        both = torch.tensor([decay, 1.0], device=DEVICE)
        check(chunked_linear_attention, torch.float32, s, decay=both, lengths=lengths, config=config)


def test_an_initial_state_weakens_over_forgotten_pieces() -> None:
    """Of 1e18 of it 1e-6 are left after four pieces; were the first, which is forgotten, left out, 1."""
    s, config = Sizes(1, 1, 1, 256, 16, 16), ChunkedConfig(16, 16, 2, 2, 4, pieces=4)
    q, k, v = tokens(torch.float32, s)
    state, decay = 1e18 * drawn(torch.float32, *s.state), torch.tensor([0.65], device=DEVICE)
    found = chunked_linear_attention(q, k, v, decay, state, config=config)
    truth = reference_linear_attention(q.double(), k.double(), v.double(), decay, state.double())
    assert error(found[0][:, :, 128:], truth[0][:, :, 128:]) < BOUNDS[torch.float32]


@slow
@pytest.mark.parametrize("method", [chunked_linear_attention, fleet_attention])
def test_values_may_be_wider_than_keys(method: Method) -> None:
    """As those of RetNet: heads of 256 columns of keys and 512 of values."""
    s = Sizes(1, 8, 8, 900, 256, 512) if HAS_GPU else Sizes(1, 1, 1, 20, 16, 264)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    check(method, dtype, s, decay=decays(s.kv_heads, 0.9), spare=(0, 0, 0))


@slow
def test_parts_of_a_sequence_go_on_from_a_state() -> None:
    s = Sizes(1, 2, 2, 90, 16, 16)
    (q, k, v), decay = tokens(torch.float32, s), decays(2)
    config = ChunkedConfig(16, 16, 2, 2, 4)
    whole, last = chunked_linear_attention(q, k, v, decay, config=config)
    state, outs = None, []
    for rows in (slice(0, 37), slice(37, 38), slice(38, 90)):
        out, state = chunked_linear_attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], decay, state)
        outs.append(out)
    assert state is not None
    assert error(torch.cat(outs, 2), whole.double()) < 1e-6
    assert error(state, last.double()) < 1e-6


@thorough
def test_a_decay_close_to_one_keeps_its_digits() -> None:
    """gamma^16 rounded once and multiplied 94 times would be off by many units of the last place."""
    s = Sizes(1, 1, 1, 1500, 16, 16)
    q, k, v = tokens(torch.float32, s)
    k, v = k.abs(), v.abs()
    decay = torch.tensor([1 - 1e-5], device=DEVICE)
    for groups, chunk, alone in ((1, 64, False), (20, 16, False), (2, 64, True)):
        config = ChunkedConfig(chunk, 16, groups, 2, 4, summed=4, alone=alone)
        _, last = chunked_linear_attention(q, k, v, decay, config=config)
        left = decay.double() ** torch.arange(1499, -1, -1, device=DEVICE)
        truth = torch.einsum("n,bhnr,bhnd->bhrd", left, k.double(), v.double())
        assert error(last, truth) < 6e-7


@slow
def test_no_power_overflows_or_loses_a_strong_decay() -> None:
    config = FleetConfig(4, 2, 2, 1)
    for least in (1e-6, 1e-30):
        decay = torch.tensor([least, 0.5], device=DEVICE)
        check(chunked_linear_attention, torch.float32, Sizes(1, 2, 2, 50, 16, 16), decay=decay)
        check(fleet_attention, torch.float32, Sizes(1, 2, 2, 6, 2, 2), decay=decay, config=config)


# -- columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (Sizes(1, 1, 1, 1, 16, 16), None),
        (Sizes(1, 2, 2, 40, 16, 16), FleetConfig(8, 16, 16, 4)),
        (Sizes(2, 2, 1, 19, 20, 20), FleetConfig(16, 16, 32, 4)),
        (Sizes(1, 3, 1, 17, 33, 5), None),
    ],
)
def test_fleet(sizes: Sizes, config: FleetConfig | None, dtype: torch.dtype) -> None:
    for start in (True, False):
        check(fleet_attention, dtype, sizes, start=start, config=config)


# The interpreter scans number by number.
@slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_fleet_with_decay(dtype: torch.dtype) -> None:
    config = FleetConfig(4, 2, 4, 1)
    check(fleet_attention, dtype, Sizes(1, 2, 1, 11, 3, 5), decay=decays(1, 0.6), config=config)
    check(fleet_attention, dtype, Sizes(1, 2, 2, 9, 4, 2), decay=decays(2), start=False, config=config)


@slow
def test_fleet_of_sequences_that_end_early() -> None:
    s, lengths = Sizes(5, 2, 1, 10, 2, 2), ints(0, 3, 4, 9, 99)
    for decay in (decays(1, 0.8), None):
        check(
            fleet_attention, torch.float32, s, decay=decay, lengths=lengths, config=FleetConfig(4, 2, 2, 1)
        )  # fmt: skip


# -- steps -------------------------------------------------------------------------------------------------


def check_step(dtype: torch.dtype, s: Sizes, decay: Tensor | None, config: StepConfig | None) -> None:
    q, k, v = (x[:, :, 0] for x in tokens(dtype, s))
    room = poisoned(torch.float32, s.batch, s.rank, s.kv_heads, s.dim + 1)
    state = room.transpose(1, 2)[..., : s.dim]
    state.copy_(drawn(torch.float32, *s.state, seed=9))
    truth_state = state.double()
    out = poisoned(dtype, s.batch, s.q_heads, s.dim + 3)[..., : s.dim]
    assert linear_attention_step(q, k, v, state, decay, out=out, config=config) is out
    truth = reference_linear_attention_step(q.double(), k, v, truth_state, decay)
    assert error(out, truth) < BOUNDS[dtype] / 2
    assert error(state, truth_state) < 1e-6
    assert room[..., s.dim :].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        (Sizes(1, 1, 1, 1, 16, 16), None),
        (Sizes(3, 4, 2, 1, 20, 35), StepConfig(16, 1)),
        (Sizes(2, 6, 2, 1, 128, 70), StepConfig(32, 4)),
        (Sizes(2, 1, 1, 1, 1, 1), None),
    ],
)
def test_step(sizes: Sizes, config: StepConfig | None, dtype: torch.dtype) -> None:
    for decay in (decays(sizes.kv_heads), None):
        check_step(dtype, sizes, decay, config)


def test_steps_are_a_sequence() -> None:
    s = Sizes(2, 2, 1, 6, 16, 20)
    (q, k, v), decay = tokens(torch.float32, s), decays(1, 0.9)
    out, last = chunked_linear_attention(q, k, v, decay)
    state = torch.zeros(s.state, device=DEVICE)
    for i in range(s.length):
        x = linear_attention_step(q[:, :, i], k[:, :, i], v[:, :, i], state, decay)
        assert error(x, out[:, :, i].double()) < 1e-6
    assert error(state, last.double()) < 1e-6


# -- what may be given -------------------------------------------------------------------------------------


S = Sizes(2, 4, 2, 8, 16, 20)


@pytest.mark.parametrize("method", [chunked_linear_attention, fleet_attention])
@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("q", lambda q: q[0]),
        ("q", lambda q: q.double()),
        ("q", lambda q: q.transpose(-1, -2)),
        ("q", lambda q: q[:, :, :0]),
        ("q", lambda q: q.repeat(1, 1, 1, 17)),
        ("k", lambda k: k.half()),
        ("k", lambda k: k[:, :, :7]),
        ("k", lambda k: k[:1]),
        ("k", lambda k: k[..., :15]),
        ("k", lambda k: torch.cat((k, k[:, :1]), 1)),
        ("v", lambda v: v[:, :1]),
        ("v", lambda v: v[:, :, :7]),
        ("decay", lambda decay: decay[:1]),
        ("decay", lambda decay: decay.int()),
        ("state", lambda state: state.half()),
        ("state", lambda state: state[:, :, :15]),
        ("lengths", lambda lengths: lengths.long()),
        ("lengths", lambda lengths: lengths[:1]),
        ("out", lambda out: out.half()),
        ("out", lambda out: out[:, :2]),
        ("final_state", lambda final_state: final_state[..., :1]),
    ],
)
def test_what_does_not_fit_is_named(method: Method, name: str, bad: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (x.contiguous() for x in tokens(torch.float32, S))
    given = {
        "q": q,
        "k": k,
        "v": v,
        "decay": decays(2),
        "state": drawn(torch.float32, *S.state),
        "lengths": ints(8, 3),
        "out": poisoned(torch.float32, *S.out),
        "final_state": poisoned(torch.float32, *S.state),
    }
    with pytest.raises(ValueError, match=f"^{name} has to be"):
        method(**given | {name: bad(given[name])})


def test_the_state_is_not_written_over() -> None:
    q, k, v = tokens(torch.float32, S)
    state = drawn(torch.float32, *S.state)
    with pytest.raises(ValueError, match="final_state has to be other memory"):
        chunked_linear_attention(q, k, v, None, state, final_state=state)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("q", lambda q: q.unsqueeze(0)),
        ("k", lambda k: k[:, :, :15]),
        ("v", lambda v: v[:1]),
        ("decay", lambda decay: decay[:1]),
        ("state", lambda state: state.half()),
        ("out", lambda out: out[:, :1]),
    ],
)
def test_what_does_not_fit_a_step_is_named(name: str, bad: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (x[:, :, 0] for x in tokens(torch.float32, S))
    given = {
        "q": q,
        "k": k,
        "v": v,
        "state": drawn(torch.float32, *S.state),
        "decay": decays(2),
        "out": poisoned(torch.float32, 2, 4, 20),
    }
    linear_attention_step(**given)
    with pytest.raises(ValueError, match=f"^{name} has to be"):
        linear_attention_step(**given | {name: bad(given[name])})


@pytest.mark.parametrize(
    "bad",
    [
        {"chunk": 24},
        {"columns": 8},
        {"groups": 0},
        {"groups": MOST_GROUPS + 1},
        {"stages": 0},
        {"stages": 1},
        {"warps": 3},
        {"pieces": 0},
        {"summed": 0},
    ],
)
def test_a_layout_that_cannot_be_is_named(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(bad))}: a layout cannot have"):
        ChunkedConfig(**{"chunk": 16, "columns": 16, "groups": 1, "stages": 2, "warps": 4} | bad)


def test_layouts_fill_the_gpu_and_no_more() -> None:
    for batch, heads, length in ((1, 32, 128), (1, 32, 2048), (1, 1, 100_000), (16, 32, 2048), (1, 8, 300)):
        for rank, dim in ((16, 16), (128, 128), (256, 256), (64, 200)):
            for size in (2, 4):
                s = Sizes(batch, heads, heads, length, rank, dim)
                c = chunked_config(s, element_bytes=size)
                programs = batch * heads * -(-dim // c.columns)
                assert c.groups == 1 or programs * c.groups <= 132
                assert c.groups <= MOST_ALONE or not c.alone
                assert c.groups == 1 or c.alone or c.rows(length, copied=True) >= LEAST_ROWS
                assert c.columns >= 16
                assert rank * c.columns <= 16384
    assert step_config(Sizes(1, 1, 1, 1, 256, 256)).columns == 16


# -- on a GPU ----------------------------------------------------------------------------------------------


def random_sizes(rng: random.Random) -> Sizes:
    kv_heads, group = rng.choice([1, 2, 3, 8]), rng.choice([1, 1, 2, 4])
    return Sizes(
        rng.choice([1, 1, 2, 5]),
        kv_heads * group,
        kv_heads,
        rng.choice([1, 17, 63, 64, 65, 128, 300, 1000, 1024, 1500]),
        rng.choice([16, 32, 50, 64, 100, 128, 128, 192, 256]),
        rng.choice([16, 32, 50, 64, 100, 128, 128, 192, 256]),
    )


class TestGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("seed", range(120))
    def test_chunks_of_any_shape(self, seed: int) -> None:
        rng = random.Random(seed)
        s, dtype = random_sizes(rng), rng.choice(DTYPES)
        decay = rng.choice([None, decays(s.kv_heads, rng.choice([0.01, 0.9, 0.999]))])
        lengths = ints(*(rng.randint(0, s.length) for _ in range(s.batch)))
        lengths[0] = s.length
        check(
            chunked_linear_attention, dtype, s, decay=decay, start=rng.random() < 0.5,
            lengths=rng.choice([None, lengths]), seed=seed,
        )  # fmt: skip

    @pytest.mark.parametrize("seed", range(40))
    def test_chunks_of_aligned_rows(self, seed: int) -> None:
        rng = random.Random(seed)
        drawn_sizes, dtype = random_sizes(rng), rng.choice([torch.float16, torch.bfloat16])
        rank, dim = rng.choice([48, 64, 128, 128, 192]), rng.choice([48, 64, 96, 128, 256])
        s = Sizes(*dataclasses.astuple(drawn_sizes)[:4], rank, dim)
        decay = rng.choice([None, decays(s.kv_heads, rng.choice([0.01, 0.9, 0.999]))])
        check(
            chunked_linear_attention, dtype, s, decay=decay, start=rng.random() < 0.5, seed=seed,
            spare=(16, 32, 0),
        )  # fmt: skip

    @pytest.mark.parametrize("columns", [64, 128])
    @pytest.mark.parametrize("groups", [1, 3, 16])
    @pytest.mark.parametrize("alone", [False, True])
    @pytest.mark.parametrize(("copied", "stages"), [(False, 3), (True, 3), (True, 4)])
    def test_wide_programs(self, groups: int, columns: int, alone: bool, copied: bool, stages: int) -> None:
        s = Sizes(2, 8, 4, 1999, 128, 128)
        for pieces, decay in product((1, 3), (decays(4, 0.98), decays(4, 0.5), None)):
            config = ChunkedConfig(
                64, columns, groups, stages, columns // 16, True, alone=alone, copied=copied, pieces=pieces
            )
            check(chunked_linear_attention, torch.bfloat16, s, decay=decay, config=config, spare=(0, 0, 0))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("groups", [1, 2, 4, 9, 16])
    @pytest.mark.parametrize(("chained", "alone"), [(False, False), (True, False), (True, True)])
    def test_groups_of_chunks(self, groups: int, chained: bool, alone: bool, dtype: torch.dtype) -> None:
        s = Sizes(1, 8, 8, 2048, 128, 128)
        chunk = 32 if dtype == torch.float32 else 64
        config = ChunkedConfig(chunk, 32, groups, 2, 4, chained, alone=alone)
        check(chunked_linear_attention, dtype, s, decay=decays(8, 0.98), config=config)

    @pytest.mark.parametrize("seed", range(40))
    def test_fleet_of_any_shape(self, seed: int) -> None:
        rng = random.Random(seed)
        s, dtype = random_sizes(rng), rng.choice(DTYPES)
        decay = rng.choice([None, decays(s.kv_heads, rng.choice([0.01, 0.9, 0.999]))])
        check(fleet_attention, dtype, s, decay=decay, start=rng.random() < 0.5, seed=seed)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("batch", [1, 3, 64])
    def test_steps_of_large_models(self, batch: int, dtype: torch.dtype) -> None:
        for rank, dim in ((128, 128), (64, 256), (256, 64), (100, 50)):
            check_step(dtype, Sizes(batch, 32, 32, 1, rank, dim), decays(32), None)
            check_step(dtype, Sizes(batch, 32, 8, 1, rank, dim), None, None)

    @pytest.mark.parametrize(
        "sizes",
        [Sizes(8, 32, 32, 1000, 128, 128), Sizes(1, 8, 8, 5000, 128, 256), Sizes(1, 32, 8, 3000, 128, 128)],
    )
    def test_large_shapes(self, sizes: Sizes) -> None:
        decay = decays(sizes.kv_heads, 0.98)
        check(chunked_linear_attention, torch.bfloat16, sizes, decay=decay, spare=(0, 0, 0))

    @pytest.mark.parametrize("spare", [(3, 1, 5), (0, 0, 0)])
    def test_a_long_sequence_is_its_parts(self, spare: tuple[int, int, int]) -> None:
        s = Sizes(1, 32, 32, 20_000, 128, 128)
        (q, k, v), decay = tokens(torch.bfloat16, s, spare=spare), decays(32, 0.99)
        out, last = chunked_linear_attention(q, k, v, decay)
        again = chunked_linear_attention(q, k, v, decay)
        assert torch.equal(out, again[0])
        assert torch.equal(last, again[1])
        state = None
        for start in range(0, s.length, 1000):
            rows = slice(start, start + 1000)
            part, state = chunked_linear_attention(q[:, :, rows], k[:, :, rows], v[:, :, rows], decay, state)
            assert error(part, out[:, :, rows].double()) < BOUNDS[torch.bfloat16]
        assert state is not None
        assert error(state, last.double()) < BOUNDS[torch.bfloat16]
