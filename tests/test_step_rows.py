"""What the device works out of a serving step's rows and keeps of its choice: in Triton's interpreter where
there is no GPU; else compiled. All of it is whole numbers, so kernel and reference agree exactly."""

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.layer import capture
from simcore.kernels.decoder.split_kv import ONE_BY_ONE
from simcore.kernels.decoder.step_rows import (
    BLOCK,
    keep_chosen,
    reference_keep_chosen,
    reference_step_rows,
    step_room,
    step_rows,
    step_tables,
)

torch.set_num_threads(1)
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = pytest.mark.skipif(
    not HAS_GPU and not ONE_BY_ONE, reason="no GPU, and no interpreter in its place"
)
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
CAPACITY = 50


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def tokens(slots: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Each token tells its place."""
    return torch.arange(slots * CAPACITY, device=DEVICE).to(dtype).view(slots, CAPACITY)


def drawn(seed: int, sequences: int, most: int) -> dict[str, Tensor]:
    """Sequences with no row, one, or many, in slots of their own, some of more tokens than there is room."""
    rng = np.random.default_rng(seed)
    now = np.where(
        rng.random(sequences) < 0.5, rng.integers(0, 2, sequences), rng.integers(0, most, sequences)
    )
    lengths = np.minimum(now + rng.integers(0, CAPACITY, sequences), CAPACITY + 1)
    slots = rng.permutation(2 * sequences)[:sequences]
    return {
        "starts": ints(0, *accumulate(now.tolist())),
        "lengths": ints(*np.maximum(lengths, now).tolist()),
        "slots": ints(*slots.tolist()),
        "known": tokens(2 * sequences, torch.int32 if seed % 2 else torch.int64),
    }


def told(case: dict[str, Tensor], rows: int) -> None:
    found, expected = (step_room(rows, len(case["lengths"]), case["known"]) for _ in range(2))
    for x in found:
        x.fill_(-7)
    assert step_rows(**case, out=found) is found
    reference_step_rows(**case, out=expected)
    for name, x, y in zip(found._fields, found, expected, strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("seed", range(20))
def test_rows_of_random_steps(seed: int) -> None:
    case = drawn(seed, 1 + seed, 1 + 2 * seed)
    told(case, max(1, int(case["starts"][-1])) + (0, 5, BLOCK)[seed % 3])


def test_rows_by_hand() -> None:
    """A decoding sequence, an unused entry, the second chunk of a prompt, unused entries, padding."""
    known = tokens(8)
    out = step_room(6, 5, known)
    step_rows(ints(0, 1, 1, 4, 4, 4), ints(9, 0, 5, 0, 0), ints(7, 0, 3, 0, 0), known, out=out)
    assert out.sequences.tolist() == [0, 2, 2, 2, 0, 0]
    assert out.lengths.tolist() == [9, 3, 4, 5, 0, 0]
    assert out.ids.tolist() == [7 * CAPACITY + 8, *(3 * CAPACITY + i for i in (2, 3, 4)), 0, 0]
    assert out.last_rows.tolist() == [0, 0, 3, 3, 3]


def test_more_sequences_than_rows() -> None:
    case = drawn(3, BLOCK + 9, 2)
    told(case, max(1, int(case["starts"][-1])))


@pytest.mark.parametrize("blocks", [1, 17, BLOCK + 3])
@pytest.mark.parametrize("sequences", [1, 12])
def test_tables_of_a_step(sequences: int, blocks: int) -> None:
    """Rows of tables that are part of wider ones, some of them taken twice."""
    wide = torch.randint(1000, (9, blocks + 5), dtype=torch.int32, device=DEVICE)
    slots = ints(*np.random.default_rng(blocks).integers(0, 9, sequences).tolist())
    tables = wide[:, 2 : 2 + blocks]
    assert torch.equal(step_tables(tables, slots), tables[slots.long()])


def test_tables_that_do_not_fit() -> None:
    square = ints(*range(12)).view(3, 4)
    for tables in (tokens(3), ints(1, 2, 3), square.t(), square[:, :0]):
        with pytest.raises(ValueError, match="tables have to be"):
            step_tables(tables, ints(0))
    with pytest.raises(ValueError, match="slots"):
        step_tables(square, torch.zeros(1, dtype=torch.int64, device=DEVICE))


@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_chosen_tokens_are_kept(seed: int, advance: bool) -> None:
    case = drawn(seed, (1, 3, 8, BLOCK + 3)[seed % 4], 9)
    sequences = len(case["lengths"])
    ids = torch.arange(sequences, device=DEVICE) - 1000
    ends = ints(*np.random.default_rng(seed).integers(0, 2, sequences).tolist())
    other = {name: x.clone() for name, x in case.items()}
    keep_chosen(ids, ends=ends, advance=advance, **case)
    reference_keep_chosen(ids, ends=ends, advance=advance, **other)
    for name, x in case.items():
        assert torch.equal(x, other[name]), name


def test_a_burst_reads_what_it_has_chosen() -> None:
    """Two steps of the same launches: the second one's token is the first one's choice, one place further."""
    known, starts, lengths, slots = tokens(4), ints(0, 1, 2, 2), ints(3, 8, 0), ints(2, 1, 0)
    out, ends = step_room(4, 3, known), ints(1, 1, 1)
    for chosen in (-1, -2, -3):
        step_rows(starts, lengths, slots, known, out=out)
        keep_chosen(
            torch.full((3,), chosen, device=DEVICE), starts, lengths, slots, ends, known, advance=True
        )
    assert out.ids.tolist() == [-2, -2, 0, 0]
    assert lengths.tolist() == [6, 11, 0]
    assert known[2, 3:6].tolist() == known[1, 8:11].tolist() == [-1, -2, -3]
    assert torch.equal(known[0], tokens(4)[0])


@pytest.mark.parametrize("name", ["starts", "lengths", "slots", "known"])
def test_tensors_that_do_not_fit_are_named(name: str) -> None:
    wrong = {
        "starts": [ints(0, 1), ints(0, 1, 2).long()],
        "lengths": [ints()],
        "slots": [ints(0)],
        "known": [torch.zeros(3, 4, device=DEVICE), ints(*range(12)).view(3, 4).t()],
    }
    fits = {"starts": ints(0, 1, 2), "lengths": ints(1, 2), "slots": ints(0, 1), "known": tokens(2)}
    for value in wrong[name]:
        case = fits | {name: value}
        with pytest.raises(ValueError, match=f"^{name}"):
            step_rows(**case, out=step_room(2, 2, tokens(2)))
        with pytest.raises(ValueError, match=f"^{name}"):
            keep_chosen(torch.zeros(2, dtype=torch.int64, device=DEVICE), ends=ints(1, 1), **case)


def test_room_that_does_not_fit_is_named() -> None:
    case: dict[str, Any] = drawn(1, 2, 3)
    room = step_room(4, 2, case["known"])
    for name, x in (("lengths", room.lengths[:3]), ("ids", room.ids.float()), ("last_rows", room.ids[:1])):
        with pytest.raises(ValueError, match=f"^{name}"):
            step_rows(**case, out=room._replace(**{name: x}))
    for name, change in (("ids", {"ids": ints(1, 2)}), ("ends", {"ends": ints(1)})):
        given = {"ids": torch.zeros(2, dtype=torch.int64, device=DEVICE), "ends": ints(1, 1), **case} | change
        with pytest.raises(ValueError, match=f"^{name}"):
            keep_chosen(**given)


class TestGPU:
    pytestmark = gpu

    def test_one_graph_serves_all_steps(self) -> None:
        sequences, rows = 64, 512
        held = drawn(0, sequences, 8)
        out = step_room(rows, sequences, held["known"])
        ids, ends = torch.arange(sequences, device=DEVICE) - 1000, ints(*[1, 0] * 32)

        def launch() -> None:
            step_rows(**held, out=out)
            keep_chosen(ids, ends=ends, advance=True, **held)

        graph = capture(launch, list(held.values()))
        for seed in (2, 4, 6, 8):
            other = drawn(seed, sequences, 8)
            for name, x in other.items():
                held[name].copy_(x)
            expected = step_room(rows, sequences, held["known"])
            reference_step_rows(**other, out=expected)
            reference_keep_chosen(ids, ends=ends, advance=True, **other)
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(out, expected, strict=True))
            assert all(torch.equal(x, held[name]) for name, x in other.items())
