"""What the decoding kernels refuse, in one line that names it, and what they bear."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.kernels.decoder.decode_attention import (
    DecodeConfig,
    decode_attention,
    decode_config,
    reference_decode_attention,
    workspace,
)
from simcore.kernels.decoder.matmul import matmul, matmul_config
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.rotary import rotary_append
from simcore.kernels.decoder.speculative_attention import (
    Speculation,
    decide,
    reference_speculative_attention,
    speculation,
    speculative_attention,
    speculative_workspace,
    verdict,
)
from tests.thorough import first, slow

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = DecodeConfig(block=16, splits=3, stages=2, warps=4, slices=1)
ENDS = {"sinks": 3, "window": 5}
LARGEST = 2**31 - 1


def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(sum(size))
    return torch.randn(*size, generator=generator, device=DEVICE).to(dtype)


def tensors(batch: int = 2, heads: int = 4, kv_heads: int = 2, capacity: int = 40) -> tuple[Tensor, ...]:
    cached = batch, kv_heads, capacity, 16
    lengths = torch.full((batch,), capacity - 1, dtype=torch.int32, device=DEVICE)
    return random(batch, heads, 16), random(*cached), random(*cached) + 1, lengths


Q, K, V, LENGTHS = tensors()
MADE = speculation(Q, 2, CONFIG)
TABLE = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize(
    ("words", "arguments", "options"),
    [
        ("one shape and format", (Q, K, V[:, :, :-1], LENGTHS), {}),
        ("one shape and format", (Q, K, V.half(), LENGTHS), {}),
        ("q has to be", (Q[..., :8], K, V, LENGTHS), {}),
        ("q has to be", (Q, K[:, :, :0], V[:, :, :0], LENGTHS), {}),
        ("fp16, bf16 or fp32", (Q.int(), K, V, LENGTHS), {}),
        ("no fp64", (Q.double(), K, V, LENGTHS), {}),
        ("no multiple of 2 KV heads", (random(2, 3, 16), K, V, LENGTHS), {}),
        ("2 queries over 1 sequences", (Q, K[:1], V[:1], LENGTHS), {}),
        ("lengths has to be contiguous int32", (Q, K, V, LENGTHS.long()), {}),
        ("lengths has to be contiguous int32", (Q, K, V, LENGTHS[:, None]), {}),
        ("block_table has to be contiguous int32", (Q, K, V, LENGTHS), {"block_table": TABLE.long()}),
        ("block_table has to be contiguous int32", (Q, K, V, LENGTHS), {"block_table": TABLE[:1]}),
        ("k_scale has to be", (Q, K, V, LENGTHS), {"k_scale": random(1).expand(2), "v_scale": random(2)}),
        ("go together", (Q, K, V, LENGTHS), {"k_scale": random(2)}),
        ("sinks and window", (Q, K, V, LENGTHS), {"sinks": -1, "window": 4}),
        ("out has to be", (Q, K, V, LENGTHS), {"out": Q.half()}),
        ("out has to be", (Q, K, V, LENGTHS), {"out": torch.empty_like(Q).transpose(0, 1)}),
        ("lse has to be contiguous fp32 .2, 4.,", (Q, K, V, LENGTHS), {"lse": Q[..., 0].half()}),
        ("lse has to be contiguous fp32 .2, 4.,", (Q, K, V, LENGTHS), {"lse": random(2, 2)}),
        ("lse has to be contiguous fp32 .2, 4.,", (Q, K, V, LENGTHS), {"lse": random(4, 2).T}),
        ("a gate has to be int32", (Q, K, V, LENGTHS), {"gate": torch.ones(1, device=DEVICE)}),
        ("another shape or layout", (Q, K, V, LENGTHS), {"space": workspace(Q[:1], 2, CONFIG)}),
        (
            "another shape or layout",
            (Q, K, V, LENGTHS),
            {"space": workspace(Q, 2, replace(CONFIG, splits=2))},
        ),
    ],
)
def test_decode_attention_refuses(words: str, arguments: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        decode_attention(*arguments, **{"config": CONFIG} | options)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("workers have to be 1 to 3", {"workers": 0}),
        ("workers have to be 1 to 3", {"workers": 4}),
        ("workers have to be 1 to 32", {"workers": 33, "config": replace(CONFIG, splits=40)}),
        ("0 or more", {"window": -1}),
        ("of one element", {"window": LENGTHS}),
        ("another shape or layout", {"space": speculative_workspace(Q, 2, replace(CONFIG, splits=2))}),
        ("exact has to be", {"into": speculation(Q[:1], 2, CONFIG)}),
        ("norms has to be", {"into": speculation(Q, 2, replace(CONFIG, splits=40, slices=2))}),
        ("norms have to be contiguous", {"into": MADE._replace(norms=MADE.norms.repeat(1, 1, 2)[..., :2])}),
    ],
)
def test_speculative_attention_refuses(words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        speculative_attention(Q, K, V, LENGTHS, **ENDS | {"config": CONFIG} | options)


@pytest.mark.parametrize(
    ("words", "made", "options"),
    [
        ("0 or more", MADE, {"threshold": float("nan")}),
        ("of one element", MADE, {"threshold": LENGTHS}),
        ("threshold fp32", MADE, {"threshold": torch.ones(1, dtype=torch.float64)}),
        ("norms has to be", MADE._replace(norms=MADE.norms.float()), {}),
        ("hits has to be", MADE, {"into": verdict(2, Q.device)._replace(hits=LENGTHS.long())}),
        ("priority has to be", MADE, {"into": verdict(2, Q.device)._replace(priority=LENGTHS)}),
    ],
)
def test_a_verdict_refuses(words: str, made: Speculation, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=words):
        decide(made, **{"threshold": 0.1} | options)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("block: ", lambda: replace(CONFIG, block=48)),
        ("splits: ", lambda: replace(CONFIG, splits=0)),
        ("slices: ", lambda: replace(CONFIG, slices=0)),
        ("warps: ", lambda: replace(CONFIG, warps=3)),
        ("sharers: ", lambda: replace(CONFIG, sharers=0)),
        ("slices: ", lambda: replace(CONFIG, slices=3)),
        ("slices have to be", lambda: decode_attention(*tensors(), config=replace(CONFIG, slices=32))),
        (
            "no layout",
            lambda: decode_config(batch=0, q_heads=1, kv_heads=1, head_dim=1, capacity=1, kv_bytes=2),
        ),
        ("gain has to be", lambda: norm(random(3, 100), random(1, 100))),
        ("residual has to be", lambda: norm(random(3, 100), random(100), residual=random(1, 100))),
        ("do not fit", lambda: matmul(random(3, 40), random(30, 50))),
        ("not torch.float64", lambda: matmul(random(3, 30).double(), random(30, 50).double())),
        (
            "16 rows for 20",
            lambda: matmul(random(20, 30), random(30, 50), config=matmul_config(1, 50, 30, 4)),
        ),
        ("cos has to be", lambda: rotary_append(*turned(cos=random(40, 4)), q_heads=4)),
        ("one shape and format", lambda: rotary_append(*turned(v=V[:, :, :-1]), q_heads=4)),
    ],
)
def test_others_refuse(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=words):
        call()


def turned(cos: Tensor | None = None, v: Tensor = V) -> tuple[Tensor, ...]:
    angles = random(40, 8)
    return random(2, 128), angles if cos is None else cos, angles, LENGTHS, K.clone(), v


@pytest.mark.parametrize("sinks", first(1, [LARGEST, 4, None]))
def test_windows_may_be_larger_than_any_sequence(sinks: int | None) -> None:
    found = decode_attention(Q, K, V, LENGTHS, sinks=sinks, window=LARGEST, config=CONFIG)
    torch.testing.assert_close(found, reference_decode_attention(Q, K, V, LENGTHS))


@slow
def test_lengths_beyond_the_cache_and_below_none_are_cut() -> None:
    beyond = torch.tensor([50, -3], dtype=torch.int32, device=DEVICE)
    cut = beyond.clamp(0, 40)
    found = decode_attention(Q, K, V, beyond, config=CONFIG)
    torch.testing.assert_close(found, reference_decode_attention(Q, K, V, cut))
    below = [torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (-2, 9)]
    made = speculative_attention(Q, K, V, beyond, sinks=below[0], window=below[1], config=CONFIG)
    exact, early, *_ = reference_speculative_attention(Q, K, V, cut, sinks=0, window=9, threshold=0.1)
    torch.testing.assert_close(made.exact, exact)
    torch.testing.assert_close(made.early, early)


def test_no_sequence_gives_nothing() -> None:
    assert decode_attention(Q[:0], K[:0], V[:0], LENGTHS[:0]).shape == (0, 4, 16)


@slow
@pytest.mark.parametrize("slices", first(1, [4, 1, 8, 16]))
def test_narrow_slices_leave_no_word_behind(slices: int) -> None:
    # 16 columns: a slice may be of fewer than a thread loads at once.
    config = replace(CONFIG, slices=slices)
    space = workspace(Q, 2, config)
    found = decode_attention(Q, K, V, LENGTHS, space=space, config=config)
    expected = reference_decode_attention(Q.double(), K.double(), V.double(), LENGTHS)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert all(bool((words == -1).all()) for words in space)
