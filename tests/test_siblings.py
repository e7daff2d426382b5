"""Prices of ops and cards that nobody measured, by what is like them."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt

import pytest

from simcore.devices.attention_fallback import price_alike
from simcore.devices.in_use import prices_of
from simcore.devices.price import pricer, roofline
from simcore.devices.spec import load_device
from simcore.ops import op as ops
from simcore.ops.op import Op, Price

HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
H100, H200 = load_device("h100-sxm"), load_device("h200-sxm")


def known(op: Op) -> Price | None:
    """Decode and prefill attention in bf16: a microsecond, and a nanosecond a token."""
    if op.dtype != "bf16" or op.kind not in ("decode_attention", "prefill_attention"):
        return None
    tokens = op["batch"] * op["context"] if op.kind == "decode_attention" else op["tokens"]
    seconds = 1e-6 + 1e-9 * tokens
    return Price(seconds, 0.9 * seconds, 1.1 * seconds, "measured", "a table")


def paged(sequences: int, kv_tokens: int, dtype: str = "bf16") -> Op:
    return ops.paged_attention(sequences=sequences, kv_tokens=kv_tokens, dtype=dtype, **HEADS)


@pytest.mark.parametrize("kv_tokens", [400, 401, 403, 4003])
def test_sequences_of_several_lengths_cost_what_their_mean_does(kv_tokens: int) -> None:
    found = price_alike(paged(4, kv_tokens), known)
    assert found is not None
    seconds = 1e-6 + 1e-9 * kv_tokens
    assert found.seconds == pytest.approx(seconds)
    # Nobody measured it: the interval is twice as wide, by its logarithm.
    assert found.low_s == pytest.approx(0.81 * seconds)
    assert found.high_s == pytest.approx(1.21 * seconds)
    assert (found.source, found.detail) == ("extrapolated", "as decode_attention; a table")


def test_no_interval_begins_below_the_datasheet() -> None:
    """Long contexts come near to the floor, and the interval of paged attention is wider than the measured
    one: a run with all prices at the fast end must not be faster than the card."""
    price, floor = prices_of("h200-sxm", "local").pricer(), roofline(H200)
    heads = {"q_heads": 12, "kv_heads": 12, "head_dim": 64}
    at_floor = 0
    for context in (1 << 10, 1 << 13, 1 << 16, 1 << 17):
        op = ops.paged_attention(sequences=8, kv_tokens=8 * context, dtype="bf16", **heads)
        found = price(op)
        least_s = floor(op).of(found).seconds
        assert found.low_s >= least_s
        at_floor += found.low_s == least_s
    assert at_floor


def test_a_smaller_cache_saves_part_of_its_bytes() -> None:
    found = price_alike(paged(4, 4000, "fp8"), known)
    assert found is not None
    whole, half = 1e-6 + 4e-6, 1e-6 + 2e-6
    assert found.seconds == pytest.approx(sqrt(whole * half))
    least_s, most_s = 0.9 * half, 1.1 * whole
    assert (found.low_s, found.high_s) == pytest.approx(
        (least_s**2 / found.seconds, most_s**2 / found.seconds)
    )
    assert found.source == "extrapolated"


def test_prompts_gain_nothing_from_a_smaller_cache() -> None:
    plain = ops.prefill_attention(tokens=64, kv_tokens=64, pairs=2080, dtype="bf16", **HEADS)
    small, asked = replace(plain, dtype="fp8"), known(plain)
    found = price_alike(small, known)
    assert found is not None
    assert asked is not None
    assert (found.seconds, found.source) == (asked.seconds, "extrapolated")


@pytest.mark.parametrize(
    "op", [paged(4, 400, "fp16"), ops.matmul("x", m=1, n=8, k=8, dtype="fp8"), paged(4, 400)]
)
def test_of_what_nothing_is_known_nothing_is_said(op: Op) -> None:
    nothing: Callable[[Op], None] = lambda op: None  # noqa: E731
    assert price_alike(op, nothing) is None


def test_without_a_profile_prices_come_from_the_datasheet() -> None:
    op = ops.matmul("x", m=1, n=8192, k=8192, dtype="bf16")
    found = prices_of("h100-sxm", "none")
    assert found.pricer()(op) == pricer(H100)(op)
    assert found.origin == "datasheet of h100-sxm"
