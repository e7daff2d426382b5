"""Long convolutions and linear attention as operators of torch: what torch checks, exported and compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor

import simcore.kernels.torch_sequence_ops  # noqa: F401  (registers the operators)
from simcore.kernels.linear_attention.naive import naive
from simcore.kernels.long_convolution.triton_fft import right_angle_spectrum
from tests.thorough import first, slow

torch.set_num_threads(1)
OPS = torch.ops.simcore
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def random(device: str, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator(device).manual_seed(sum(size)), device=device)


def calls(device: str) -> dict[str, tuple[Tensor, ...]]:
    """Arguments by operator."""
    q, k, v = random(device, 2, 4, 19, 16), random(device, 2, 2, 19, 16), random(device, 2, 2, 19, 32)
    decay, state = torch.tensor([0.9, 0.95], device=device), random(device, 2, 2, 16, 32)
    lengths = torch.tensor([19, 7], dtype=torch.int32, device=device)
    y, taps, z = random(device, 2, 1, 32, 20), random(device, 2, 1, 64, 20), random(device, 2, 1, 31, 20)
    return {
        "linear_attention": (q, k, v, decay, state, lengths),
        "linear_attention_step": (q[:, :, 0], k[:, :, 0], v[:, :, 0], state, decay),
        "direct_tile": (y, taps[:, :, 1:63], z),
        "fft_tile": (y, right_angle_spectrum(taps, 32), z),
        "conv_row": (y, taps[:, :, 1:33], z[:, :, 0]),
        "conv_column": (y[:, :, 0], taps[:, :, 1:32], z),
    }


@slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", first(1, calls("cpu")))
def test_torch_finds_nothing_wrong(name: str, device: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, calls(device)[name], test_utils=CHECKS)


@pytest.mark.parametrize("device", DEVICES)
def test_linear_attention_is_the_explicit_sum(device: str) -> None:
    q, k, v, decay, state, _ = calls(device)["linear_attention"]
    twice = (x.repeat_interleave(2, 1) for x in (k, v))
    expected, last = naive(q, *twice, decay.repeat_interleave(2), state.repeat_interleave(2, 1))
    out, found = OPS.linear_attention(q, k, v, decay, state)
    assert float((out - expected).norm() / expected.norm()) < 1e-5
    assert float((found - last[:, ::2]).norm() / last[:, ::2].norm()) < 1e-5
    stepped = state.clone()
    for i in range(q.shape[2]):
        one = OPS.linear_attention_step(q[:, :, i], k[:, :, i], v[:, :, i], stepped, decay)
        assert float((one - expected[:, :, i]).norm() / expected[:, :, i].norm()) < 1e-5


@pytest.mark.parametrize("device", DEVICES)
def test_both_tiles_are_one(device: str) -> None:
    y, taps, z = calls(device)["direct_tile"]
    by_sum, by_transform = z.clone(), z.clone()
    OPS.direct_tile(y, taps, by_sum)
    OPS.fft_tile(y, calls(device)["fft_tile"][1], by_transform)
    assert float((by_sum - by_transform).norm() / by_sum.norm()) < 1e-5
    assert not torch.equal(by_sum, z)


class Mixer(torch.nn.Module):
    """A position by the lazy sum, and a sequence by linear attention."""

    def forward(self, y: Tensor, taps: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        z = torch.zeros_like(y[:, :, 0])
        OPS.conv_row(y, taps, z)
        out, state = OPS.linear_attention(q, k, v)
        return z.tanh(), out + 1.0, state


@slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_mixer_is_exported_and_compiled(device: str) -> None:
    torch._dynamo.reset()
    y, taps, _ = calls(device)["conv_row"]
    inputs = (y, taps, *calls(device)["linear_attention"][:3])
    expected = Mixer()(*inputs)
    program = torch.export.export(Mixer(), inputs)
    compiled: Any = torch.compile(Mixer(), fullgraph=True, backend="aot_eager")
    for found in (program.module()(*inputs), compiled(*inputs)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
