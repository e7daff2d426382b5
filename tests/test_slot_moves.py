"""Moves of cache slots against plain torch, bit by bit: in Triton's interpreter where there is no GPU."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.slot_moves import (
    BLOCK,
    programs_for,
    reference_slot_moves,
    slot_caches,
    slot_moves,
)
from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.schedules.shuffle import shuffle
from tests.thorough import slow

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FORMATS = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]

pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def random_bits(dtype: torch.dtype, *size: int, seed: int) -> Tensor:
    """Any bits at all, those of no number too."""
    generator = torch.Generator().manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    words = torch.randint(0, 256, (*size[:-1], size[-1] * width), generator=generator, dtype=torch.uint8)
    return words.to(DEVICE).view(dtype)


def padded(moves: list[tuple[int, int]], most: int) -> Tensor:
    """Behind the moves that count stands nonsense."""
    rows = moves + [(1 << 30, -5)] * (most - len(moves))
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE).view(-1, 2)


def moved(
    caches: list[Tensor], moves: list[tuple[int, int]], lengths: list[int] | None, token_dim: int = 2
) -> None:
    """Makes the moves with the kernel and checks every bit of all caches."""
    expected = [x.clone() for x in caches]
    reference_slot_moves(expected, moves, lengths=lengths, token_dim=token_dim)
    given = None if lengths is None else ints(*lengths)
    made = slot_caches(caches, token_dim=token_dim)
    slot_moves(made, padded(moves, len(caches[0])), ints(len(moves)), lengths=given)
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(caches, expected, strict=True))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("d", [16, 3])
def test_moves_of_a_shuffle(dtype: torch.dtype, d: int) -> None:
    used = [True, False, False, True, True, False, True]
    _, moves = shuffle(used)
    for lengths in (None, [5, 0, 9, 1, 3, 2, 5]):
        caches = [random_bits(dtype, 7, 2, 9, d, seed=seed) for seed in range(4)]
        moved(caches, moves, lengths)


@slow
def test_random_shuffles() -> None:
    chance = random.Random(1)
    for i in range(30):
        slots, capacity, d = chance.randint(1, 9), chance.randint(1, 6), chance.choice([1, 5, 8])
        _, moves = shuffle([chance.random() < 0.5 for _ in range(slots)])
        lengths = [chance.randint(0, capacity) for _ in range(slots)]
        token_dim = chance.choice([1, 2])
        size = (slots, capacity, 2, d) if token_dim == 1 else (slots, 2, capacity, d)
        caches = [random_bits(torch.float16, *size, seed=i + seed) for seed in range(3)]
        moved(caches, moves, chance.choice([None, lengths]), token_dim)


@slow
def test_slots_longer_than_a_block_of_caches_in_one_tensor() -> None:
    tokens = BLOCK // 8 + 3
    stack = random_bits(torch.float32, 2, 4, 2, tokens, 20, seed=1)[..., :16].contiguous()
    for lengths in (None, [tokens, 0, tokens - 2, 1], [tokens + 9] * 4):
        kept = None if lengths is None else [min(n, tokens) for n in lengths]
        expected = stack.clone()
        reference_slot_moves(expected, [(0, 3), (2, 1)], lengths=kept)
        given = None if lengths is None else ints(*lengths)
        slot_moves(slot_caches(stack), padded([(0, 3), (2, 1)], 2), ints(2), lengths=given)
        assert torch.equal(bits(stack), bits(expected))


def test_slots_may_lie_apart() -> None:
    whole = [random_bits(torch.float16, 8, 2, 5, 3, seed=seed) for seed in range(2)]
    before = [x.clone() for x in whole]
    moved([x[1::2] for x in whole], [(3, 0)], None)
    for x, y in zip(whole, before, strict=True):
        x[1] = y[1]
        assert torch.equal(bits(x), bits(y))


def test_nothing_moves_that_is_not_to() -> None:
    caches = [random_bits(torch.float16, 3, 1, 4, 8, seed=1)]
    before = caches[0].clone()
    made = slot_caches(caches)
    slot_moves(made, padded([(0, 1)], 2), ints(0))
    slot_moves(made, padded([(0, 1)], 2), ints(-1))
    slot_moves(made, ints().view(0, 2), ints(1))
    slot_moves(made, ints(3, 0, 0, 3, -1, 0, 0, -1).view(4, 2), ints(4), lengths=ints(4, 4, 4))
    assert torch.equal(bits(caches[0]), bits(before))


def test_arguments_that_do_not_fit_are_named() -> None:
    x = torch.zeros(3, 2, 4, 8, device=DEVICE)
    for match, caches in (
        ("slots", []),
        ("slots", [x[:, 0, 0]]),
        ("alike", [x, x[:2]]),
        ("alike", [x, x.half()]),
        ("contiguous", [x[..., :4]]),
        ("contiguous", [x.transpose(1, 2)]),
    ):
        with pytest.raises(ValueError, match=match):
            slot_caches(caches)
    given: dict[str, Any] = {"caches": slot_caches([x]), "moves": padded([], 2), "count": ints(0)}
    for match, changed in (
        ("^moves", {"moves": ints(1, 2)}),
        ("^moves", {"moves": padded([], 2).long()}),
        ("^count", {"count": ints(1, 2)}),
        ("^lengths", {"lengths": ints(1, 2)}),
        ("^lengths", {"lengths": ints(1, 2, 3).long()}),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            slot_moves(**given | changed)
        assert "\n" not in str(caught.value)


def test_as_many_programs_as_there_is_to_do() -> None:
    small = slot_caches([torch.zeros(3, 2, 4, 8, device=DEVICE)] * 5)
    assert programs_for(small, 3) == 3 * 5 * 2


class TestGPU:
    pytestmark = gpu

    def test_random_shapes(self) -> None:
        chance = random.Random(2)
        for i in range(120):
            slots, heads, capacity = chance.randint(1, 16), chance.randint(1, 8), chance.randint(1, 900)
            d, dtype = chance.choice([chance.randint(1, 130), 64, 128]), chance.choice(FORMATS)
            caches = [random_bits(dtype, slots, heads, capacity, d, seed=i + seed) for seed in range(3)]
            _, moves = shuffle([chance.random() < 0.5 for _ in range(slots)])
            lengths = [chance.randint(0, capacity) for _ in range(slots)]
            moved(caches, moves, chance.choice([None, lengths]))

    def test_a_captured_launch_reads_moves_whenever_it_runs(self) -> None:
        caches = [random_bits(torch.bfloat16, 16, 8, 256, 128, seed=seed) for seed in range(8)]
        made, moves, count, lengths = slot_caches(caches), padded([], 8), ints(0), ints(*[0] * 16)
        slot_moves(made, moves, count, lengths=lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            slot_moves(made, moves, count, lengths=lengths)
        chance = random.Random(3)
        for _ in range(5):
            _, found = shuffle([chance.random() < 0.5 for _ in range(16)])
            kept = [chance.randint(0, 256) for _ in range(16)]
            moves.copy_(padded(found, 8))
            count.fill_(len(found))
            lengths.copy_(ints(*kept))
            expected = [x.clone() for x in caches]
            reference_slot_moves(expected, found, lengths=kept)
            graph.replay()
            assert all(torch.equal(bits(x), bits(y)) for x, y in zip(caches, expected, strict=True))
