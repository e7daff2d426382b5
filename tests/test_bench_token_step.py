"""What the benchmark of a token step compares with, and takes for the truth."""

import pytest
import torch

from validate.bench_token_step import MOVES, STEPS, Step, by_kernels, drawn, truth


@pytest.mark.parametrize("block", ["mlp", "gate"])
def test_torch_makes_the_same_step(block: str) -> None:
    one = drawn(Step(3, 32, 2, block), torch.Generator().manual_seed(1))
    for times in (1, 2):
        found = by_kernels(one.a, one.taps, one.matrices)
        expected = truth(one, times)
        assert float((found.double() - expected).norm() / expected.norm()) < 3e-2
    assert not torch.equal(truth(one, 1), truth(one, 2))


def test_bytes_are_counted_once() -> None:
    step = next(of for of in STEPS if of.block == "mlp" and of.channels == 768)
    assert step.hbm_bytes == 36 * 2 * 768 * 1536 * 2
    of = MOVES[0]
    assert of.hbm_bytes == 2 * (2 * 32) * 1 * (8 * 128 * 128 * 2)
