"""Linear attention of steps that serve, against float64: in Triton's interpreter where there is no GPU,
small; else compiled, up to the shapes of large models."""

import math
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.linear_attention.triton_served import (
    reference_served_chunks,
    served_chunks,
    served_step,
)
from simcore.ops.linear_layer import linear_attention_prompts
from simcore.validate.ladder.rungs import numeric_error
from simcore.validate.timing.card_kernels import HELD, ON_CARDS
from tests.thorough import first, slow

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# Of the norm of the truth: log2 of a decay near 1 has few digits on a GPU. The interpreter does not compute
# in bf16 as a GPU does.
BOUNDS = {torch.float32: 1e-4 if HAS_GPU else 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
DTYPES = list(BOUNDS) if HAS_GPU else [torch.float32, torch.float16]
SHAPES = (
    [(32, 8, 128, 128), (8, 8, 256, 512), (4, 4, 50, 64)] if HAS_GPU else [(4, 2, 16, 24), (2, 2, 12, 16)]
)
MOST_ROWS = 700 if HAS_GPU else 40
pytestmark = [
    *([pytest.mark.gpu] if HAS_GPU else []),
    pytest.mark.skipif(not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"),
]


class Step(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    states: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    decay: Tensor
    out: Tensor

    def copy(self, dtype: torch.dtype | None = None) -> "Step":
        """Floating numbers in another format; what is read stays exact."""
        return Step(*(x.to(dtype or x.dtype, copy=True) if x.is_floating_point() else x for x in self))


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def step(seed: int, dtype: torch.dtype, shape: tuple[int, int, int, int], rows: list[int]) -> Step:
    """Sequences of so many rows, some of which begin here; k and v as they lie in a projection."""
    heads, kv_heads, rank, dim = shape
    generator, draw = torch.Generator(DEVICE).manual_seed(seed), random.Random(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=DEVICE)

    total, padding = sum(rows), 3
    together = drawn(total + padding, (heads + kv_heads) * rank).to(dtype) * rank**-0.5
    qk = together.view(total + padding, heads + kv_heads, rank)
    v = (
        drawn(total + padding, 2 * kv_heads * dim)
        .to(dtype)[:, : kv_heads * dim]
        .unflatten(1, (kv_heads, dim))
    )
    starts = [sum(rows[:s]) for s in range(len(rows) + 1)]
    lengths = [n and n + draw.choice([0, 5]) for n in rows]
    slots = draw.sample(range(1, len(rows) + 3), len(rows))
    states = drawn(len(rows) + 3, heads, rank, dim)
    for slot, length, n in zip(slots, lengths, rows, strict=True):
        if length == n:
            # Whatever was there before: nothing of it may be read.
            states[slot] = math.nan
    decay = 1.0 - 2.0 ** -(2.0 + 7.0 * torch.rand(heads, generator=generator, device=DEVICE))
    out = torch.full((total + padding, heads, dim), math.nan, dtype=dtype, device=DEVICE)
    return Step(
        qk[:, :heads], qk[:, heads:], v, states, ints(slots), ints(starts), ints(lengths), decay, out
    )  # fmt: skip


def off(found: Tensor, truth: Tensor) -> float:
    """How far of the norm of the truth."""
    assert (found.isnan() == truth.isnan()).all()
    return float((found.double() - truth).nan_to_num().norm() / truth.nan_to_num().norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", first(1, range(4)))
def test_chunks_of_sequences_beside_each_other(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """Of any number of rows, and of none; what is beside them stays as it was."""
    draw = random.Random(seed)
    rows = [draw.randint(1, MOST_ROWS), 0, 1, draw.randint(1, 70), 0]
    given = step(seed, dtype, shape, rows)
    exact = given.copy(torch.float64)
    reference_served_chunks(*exact)
    served_chunks(*given)
    assert off(given.out, exact.out) <= BOUNDS[dtype]
    assert off(given.states, exact.states) <= 2e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_of_each_sequence(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """The second and the last have none here."""
    given = step(3, dtype, shape, [1] * 6)
    given.lengths[1::4] = 0
    exact = given.copy(torch.float64)
    for s in (1, 5):
        # As if they had begun and ended before it.
        exact.starts[s + 1 :] -= 1
    moved = [row for row in range(6) if given.lengths[row]]
    for name in ("q", "k", "v"):
        x = getattr(exact, name)
        x[: len(moved)] = x[moved].clone()
    reference_served_chunks(*exact)
    served_step(*given[:5], given.lengths, given.decay, given.out)
    truth = torch.full_like(exact.out, math.nan)
    truth[moved] = exact.out[: len(moved)]
    assert off(given.out, truth) <= BOUNDS[dtype]
    assert off(given.states, exact.states) <= 1e-5


@slow
@pytest.mark.parametrize("dtype", [torch.bfloat16 if HAS_GPU else torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("seed", first(2, range(6)))
def test_where_a_sequence_is_cut_does_not_matter(
    shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int
) -> None:
    """Outputs of 16 bits differ where fp32 sums are close to a middle between two of them, and nowhere else:
    in one of a hundred at most, by one rounding. By rounded states it would be four times the bound."""
    draw, total = random.Random(seed), 2 * MOST_ROWS
    whole = step(seed, dtype, shape, [total])
    whole.lengths.fill_(total)
    parts, done = whole.copy(), 0
    served_chunks(*whole)
    while done < total:
        now = min(draw.randint(1, MOST_ROWS), total - done)
        served_chunks(
            *parts[:5], ints([done, done + now]), ints([done + now]), parts.decay, parts.out
        )  # fmt: skip
        done += now
    rounding = torch.finfo(dtype).eps
    assert off(parts.out, whole.out.double()) <= 0.1 * rounding
    assert off(parts.states, whole.states.double()) <= 1e-4


@slow
@pytest.mark.parametrize("prompts", [1, 3])
def test_what_a_card_times_of_an_op_is_what_a_step_that_serves_computes(prompts: int) -> None:
    """Of rows that do not fill a chunk, from the states that are there."""
    tokens, (heads, _, rank, dim) = prompts * MOST_ROWS + 1, SHAPES[0]
    pairs = prompts * MOST_ROWS * MOST_ROWS // 2
    dtype = "bf16" if HAS_GPU else "fp32"
    op = linear_attention_prompts(
        tokens=tokens, kv_tokens=tokens, pairs=pairs, heads=heads, rank=rank, dim=dim, dtype=dtype
    )
    kernel = ON_CARDS[op.kind]
    given = Step(*kernel.inputs(op, torch.Generator(DEVICE).manual_seed(1), torch.device(DEVICE)))
    assert (len(given.slots), int(given.starts[-1])) == (prompts, tokens)
    assert bool(given.out.isnan().all())
    exact = given.copy(torch.float64)
    kernel.reference(op, *exact)
    assert kernel.run(op, *given) is given.out
    assert off(given.out, exact.out) <= BOUNDS[given.out.dtype]
    assert off(given.states, exact.states) <= 2e-4
    # A ladder's rung of numerics holds the same kernel against the same reference.
    error = numeric_error(op, HELD, DEVICE)
    assert error is not None
    assert error <= 2.0 * BOUNDS[given.out.dtype]


def test_what_does_not_fit_is_named() -> None:
    given = step(0, torch.float32, SHAPES[0], [3])
    for name, bad in (
        ("states", given.states.double()),
        ("slots", given.slots.long()),
        ("starts", given.lengths),
        ("decay", given.decay[:1]),
        ("k has", given.k[:, :1].expand(-1, 3, -1)),
    ):
        field = name.removesuffix(" has")
        changed = given._replace(**{field: bad})
        changed = changed._replace(v=given.v[:, :1].expand(-1, 3, -1)) if field == "k" else changed
        with pytest.raises(ValueError, match=name):
            served_chunks(*changed)
    with pytest.raises(ValueError, match="rows of"):
        served_step(*given[:4], ints([0] * 9), ints([1] * 9), given.decay, given.out)
