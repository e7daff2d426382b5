"""What the benchmark of a token step compares with, and takes for the truth."""

from itertools import pairwise

import pytest
import torch

from simcore.validate.benchmarks.token_step import MOVES, STEPS, Step, by_kernels, drawn, places, truth


@pytest.mark.parametrize("block", ["mlp", "gate"])
def test_torch_makes_the_same_step(block: str) -> None:
    one = drawn(Step(3, 32, 2, block), torch.Generator().manual_seed(1))
    expected = [truth(at) for at in places([one], 2)]
    for t, x in enumerate(expected):
        found = by_kernels(one.a[:, :, t], one.taps, one.matrices)
        assert float((found.double() - x).norm() / x.norm()) < 3e-2
    assert not torch.equal(*expected)


def test_no_step_of_a_graph_meets_another() -> None:
    sets = [drawn(Step(1, 16, 1, "gate"), torch.Generator().manual_seed(i)) for i in range(3)]
    steps = places(sets, 24)
    assert len({(id(at.model), at.position) for at in steps}) == 24
    assert all(a.model is not b.model for a, b in pairwise(steps))


def test_bytes_are_counted_once() -> None:
    step = next(of for of in STEPS if of.block == "mlp" and of.channels == 768)
    assert step.hbm_bytes == 36 * 2 * 768 * 1536 * 2
    of = MOVES[0]
    assert of.hbm_bytes == 2 * (2 * 32) * 1 * (8 * 128 * 128 * 2)
