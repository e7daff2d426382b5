"""What the benchmark of linear attention takes for the truth."""

import torch

from simcore.kernels.linear_attention.naive import naive
from simcore.validate.benchmarks import linear_attention as bench
from simcore.validate.benchmarks.linear_attention import Sequences, Token, drawn, truth


def test_the_truth_is_the_explicit_sum() -> None:
    for with_state in (False, True):
        one = drawn(2, 9, torch.Generator().manual_seed(1), with_state=with_state)
        q, k, v = (x.transpose(1, 2) for x in one[:3])
        expected, _ = naive(q, k, v, one.decay, one.before if with_state else None)
        assert float((truth(one) - expected.transpose(1, 2)).norm() / expected.norm()) < 1e-12


def test_equal_tokens_carry_the_state_on() -> None:
    one = drawn(1, 1, torch.Generator().manual_seed(2), with_state=True)
    state = one.before.double()
    for _ in range(3):
        k, v = one.k[:, 0].double(), one.v[:, 0].double()
        state = one.decay.double()[:, None, None] * state + k[..., None] * v[..., None, :]
    expected = torch.einsum("bhr,bhrd->bhd", one.q[:, 0].double(), state)
    found = bench._after(one, 3)[:, 0]
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def test_bytes_are_counted_once() -> None:
    assert Sequences(2, 100).hbm_bytes == 4 * 2 * 2 * 100 * 32 * 128
    assert Token(3).hbm_bytes == 3 * 32 * (2 * 4 * 128 * 128 + 4 * 2 * 128)
