"""The log-sum-exp of decoding's attention, by which results over several sets of tokens are joined: of both
layouts, against float64."""

import math
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.dealt_parts import DealtConfig, dealt_config
from simcore.kernels.decoder.decode_attention import (
    DecodeConfig,
    decode_attention,
    reference_decode_attention,
)
from simcore.kernels.gpu import gpu_of
from tests.attention_cases import BARS, FP8, Case, Shape, error, make_case, some_lengths, truth_and_logs
from tests.test_dealt_parts import laid_out as dealt
from tests.test_documents import ROOT, blocks
from tests.test_triton_attention import (
    DEVICE,
    GPU_BLOCKS,
    GPU_FORMATS,
    GPU_HEAD_DIMS,
    HEADS,
    check,
    in_float64,
    interpreted,
    laid_out,
    needs_gpu,
    poisoned,
    small_case,
    small_config,
)
from tests.thorough import first, slow

torch.set_num_threads(1)
Config = DecodeConfig | DealtConfig | None
# Scores are sums in fp32, whatever the format of their numbers.
LOG_BAR = 1e-4


def near(found: Tensor, expected: Tensor) -> None:
    """Logs within their bar, -inf where nothing is attended."""
    torch.testing.assert_close(found.double(), expected, rtol=LOG_BAR, atol=LOG_BAR)


def attended(case: Case, config: Config) -> tuple[Tensor, Tensor]:
    """What a launch gives and its logs, checked."""
    out, lse = poisoned(case), torch.full_like(case.tensors[0][..., 0], math.nan, dtype=torch.float32)
    lse = lse.contiguous()
    decode_attention(*case.tensors, **case.options, out=out, lse=lse, config=config)
    expected, logs = truth_and_logs(case)
    check(out, expected)
    # Of each query token too.
    assert error(out.flatten(0, -3), expected.flatten(0, -3)) < BARS[out.dtype]
    near(lse, logs)
    assert not out[logs.isneginf()].any()
    return out, lse


@interpreted
@pytest.mark.parametrize("seed", first(4, range(16)))
def test_logs_of_random_shapes(seed: int) -> None:
    """Every group, head dimension, format, table and window of the tests of attention."""
    case, random = small_case(seed), Random(f"logs {seed}")
    programs, slices = random.choice([1, 2, 3, 5, 7, 12]), random.choice([1, 2, 4])
    for config in (small_config(seed), dealt(programs, slices)):
        out, _ = attended(case, config)
        # Whoever asks for no logs has the same.
        assert torch.equal(decode_attention(*case.tensors, **case.options, config=config), out)


@pytest.mark.parametrize("seed", range(24))
def test_logs_of_the_reference_are_the_truth(seed: int) -> None:
    reference_is_the_truth(small_case(seed))


def reference_is_the_truth(case: Case) -> None:
    expected, logs = truth_and_logs(case)
    lse = torch.full_like(logs, math.nan)
    found = reference_decode_attention(*in_float64(case), **case.options, lse=lse)
    assert error(found, expected) < 1e-12
    torch.testing.assert_close(lse, logs, rtol=1e-12, atol=1e-12)


@interpreted
@pytest.mark.parametrize("parts", first(4, [1, 8, 9, 6, 2, 10, 17]))
def test_logs_of_a_head_of_so_many_parts(parts: int) -> None:
    """Whole, by several queries at once up to eight, by slices beyond."""
    shape = Shape(kv_heads=1, group=5, head_dim=64, block=16)
    attended(make_case(shape, [16 * parts - 3], parts, device=DEVICE), dealt(99, 2))


@pytest.mark.parametrize("config", [laid_out(16, 1), laid_out(16, 3), dealt(5)])
def test_nothing_is_attended(config: Config) -> None:
    case = make_case(Shape(2, 3, 64), [0, 0], 1, capacity=20, device=DEVICE)
    assert attended(case, config)[1].isneginf().all()
    case = make_case(Shape(2, 3, 64), [20, 0], 1, device=DEVICE, sinks=0, window=0)
    assert attended(case, config)[1].isneginf().all()


def joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Attention over all tokens, of results and logs over sets of them."""
    outs, logs = torch.stack([out.double() for out, _ in parts]), torch.stack([lse for _, lse in parts])
    total = logs.double().logsumexp(0)
    weights = (logs - total.nan_to_num(neginf=0.0)).exp()
    return (weights[..., None] * outs).sum(0), total


def halves(case: Case, at: int) -> list[Case]:
    """The first tokens of a contiguous cache, and the rest of them."""
    q, k, v, lengths = case.tensors
    first = lengths.clamp(max=at)
    return [
        Case(case.shape, (q, k[:, :, :at], v[:, :, :at], first), {}),
        Case(case.shape, (q, k[:, :, at:], v[:, :, at:], lengths - first), {}),
    ]


@slow
@pytest.mark.parametrize("config", [laid_out(16, 3), dealt(5)])
def test_two_parts_of_a_context_are_joined_by_their_logs(config: Config) -> None:
    shape = Shape(kv_heads=2, group=3, head_dim=80)
    case = make_case(shape, [60, 20, 0, 41], 4, device=DEVICE)
    found, logs = joined([attended(part, config) for part in halves(case, 23)])
    whole, expected = truth_and_logs(case)
    assert error(found, whole) < BARS[torch.float32]
    near(logs, expected)


@interpreted
def test_the_example_of_the_documents_joins_two_parts() -> None:
    (example,) = (block for block in blocks(ROOT / "docs" / "kernels.md", "python") if "lse=" in block)
    case = make_case(Shape(kv_heads=2, group=3, head_dim=64), [60, 20, 0, 41], 4)
    near_part, far_part = halves(case, 23)
    names: dict[str, Any] = {"torch": torch, "decode_attention": decode_attention}
    names |= zip(("q", "k", "v", "lengths"), near_part.tensors, strict=True)
    names |= zip(("q", "other_k", "other_v", "other_lengths"), far_part.tensors, strict=True)
    exec(example, names)
    assert error(names["out"], truth_and_logs(case)[0]) < BARS[torch.float32]


@pytest.mark.parametrize("config", [laid_out(16, 1), laid_out(16, 3), dealt(5)])
def test_a_closed_gate_leaves_logs_as_they_were(config: Config) -> None:
    case = make_case(Shape(1, 2, 64), [40, 0], 1, device=DEVICE)
    lse = torch.full((2, 2), math.nan, device=DEVICE)
    gate = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    decode_attention(*case.tensors, lse=lse, gate=gate, config=config)
    assert bool(lse.isnan().all())
    gate.fill_(1)
    decode_attention(*case.tensors, lse=lse, gate=gate, config=config)
    near(lse, truth_and_logs(case)[1])


# -- on a GPU ----------------------------------------------------------------------------------------------


def gpu_layouts(case: Case) -> list[Config]:
    """Split alike, and cut by the lengths."""
    shape, gpu = case.shape, gpu_of(case.tensors[0])
    parts = dealt_config(
        head_dim=shape.head_dim, kv_bytes=shape.stored.itemsize, gpu=gpu, pairs=24, capacity=4096
    )
    return [laid_out(32, 1, stages=2), laid_out(32, 7, 2, stages=2), parts]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("index", range(12))
def test_logs_on_a_gpu(index: int) -> None:
    rng = np.random.default_rng([index, 21])
    (dtype, kv_dtype), (kv_heads, group) = GPU_FORMATS[index % 6], HEADS[index % 10]
    block = int(rng.choice(GPU_BLOCKS))
    shape = Shape(kv_heads, group, int(rng.choice(GPU_HEAD_DIMS)), dtype, kv_dtype, block)
    ends = {"sinks": int(rng.integers(2, 15)), "window": 2 * int(rng.integers(8, 700)) + 1}
    for batch in (1, 7, 40):
        lengths = some_lengths(rng, batch, 4096)
        case = make_case(
            shape, lengths, index, capacity=4096, device=DEVICE, **(ends if index % 4 == 1 else {})
        )
        for config in gpu_layouts(case):
            attended(case, config)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_two_parts_of_a_context_are_joined_on_a_gpu(kv_dtype: torch.dtype | None) -> None:
    shape = Shape(kv_heads=8, group=4, head_dim=128, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    case = make_case(shape, [5000, 0, 1, 2049, 2048], 4, device=DEVICE)
    whole, expected = truth_and_logs(case)
    for config in gpu_layouts(case):
        parts = [Case(case.shape, part.tensors, case.options) for part in halves(case, 2048)]
        found, logs = joined([attended(part, config) for part in parts])
        assert error(found, whole) < BARS[torch.bfloat16]
        near(logs, expected)
