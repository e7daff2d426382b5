"""Prices of attention by measured attention: of other lengths, another layout, smaller numbers in the cache.

    paged_attention(s sequences, n tokens in all)    linear between contexts n / s, 64 of them an octave; as
                                                     measured there, or decode_attention(batch s, context)
    a cache of 1-byte numbers, one query a sequence  t = sqrt(t_half t_bf16), inside [t_half, t_bf16]
    a cache of 1-byte numbers, prompts               t = t_bf16

t_bf16 is the time with a cache in bf16, t_half the time in bf16 over half as many tokens, which have the
bytes of the 1-byte cache. A kernel that reads smaller numbers moves half the bytes and spends part of the
gain on converting them: the price is the geometric mean, and the interval reaches from one end to the other.
Prompts are bound by arithmetic and gain nothing.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from simcore.ops import op as ops
from simcore.ops.op import DTYPE_BYTES, Op, Price

Known = Callable[[Op], Price | None]
BF16 = "bf16"
# Contexts per octave between which prices of paged attention are linear.
PARTS = 64


def price_alike(op: Op, known: Known) -> Price | None:
    """Returns the price of attention from the prices in `known` of similar attention; None if it has none."""
    if op.kind == "paged_attention":
        return _paged(op, known)
    if DTYPE_BYTES[op.dtype] != 1.0 or op.kind not in ("decode_attention", "prefill_attention"):
        return None
    whole = known(replace(op, dtype=BF16))
    if whole is None:
        return None
    if op.kind == "prefill_attention":
        return replace(whole, source="extrapolated", detail=f"as with a cache in {BF16}; {whole.detail}")
    half = known(replace(op, dtype=BF16, shape=_half(op)))
    return None if half is None else _between(half, whole)


def _paged(op: Op, known: Known) -> Price | None:
    """Returns the price between two contexts around the mean one. It is linear between them, even if more is
    known in between, so that the time of a burst is a sum of few lines."""
    sequences, kv_tokens = op["sequences"], op["kv_tokens"]
    context = kv_tokens // sequences
    step = max(1, (1 << max(0, context.bit_length() - 1)) // PARTS)
    low = max(1, context // step * step)
    below = _of_context(op, low, known)
    if kv_tokens <= low * sequences:
        return below
    above = _of_context(op, low + step, known)
    if below is None or above is None:
        return None
    share = (kv_tokens - low * sequences) / (step * sequences)
    return replace(
        below,
        seconds=below.seconds + share * (above.seconds - below.seconds),
        low_s=below.low_s + share * (above.low_s - below.low_s),
        high_s=below.high_s + share * (above.high_s - below.high_s),
        cached=below.cached or above.cached,
    )


def _of_context(op: Op, context: int, known: Known) -> Price | None:
    """Returns the price of as many sequences with `context` tokens each in the mean."""
    found = known(_with_tokens(op, context))
    if found is not None:
        return found
    if DTYPE_BYTES[op.dtype] == 1.0:
        whole, half = (
            known(replace(_with_tokens(op, tokens), dtype=BF16)) for tokens in (context, -(-context // 2))
        )
        if whole is not None and half is not None:
            return _between(half, whole)
    decoding = _decoding(op, op["sequences"], context, known)
    return decoding and _of_decoding(decoding)


def _with_tokens(op: Op, context: int) -> Op:
    kv_tokens = op["sequences"] * context
    return replace(
        op, shape=tuple((name, kv_tokens if name == "kv_tokens" else op[name]) for name, _ in op.shape)
    )


def _of_decoding(price: Price) -> Price:
    """Returns the price of unmeasured paged attention, with page lookups and sequences of many lengths: its
    interval is twice as wide in logarithms."""
    return replace(
        price,
        low_s=price.low_s**2 / price.seconds,
        high_s=price.high_s**2 / price.seconds,
        source="extrapolated",
        detail=f"as decode_attention; {price.detail}",
    )


def _decoding(op: Op, batch: int, context: int, known: Known) -> Price | None:
    plain = ops.decode_attention(
        batch=batch,
        q_heads=op["q_heads"],
        kv_heads=op["kv_heads"],
        head_dim=op["head_dim"],
        context=context,
        dtype=op.dtype,
    )
    return known(plain) or price_alike(plain, known)


def _half(op: Op) -> ops.Shape:
    return tuple((name, -(-op[name] // 2) if name == "context" else op[name]) for name, _ in op.shape)


def _between(half: Price, whole: Price) -> Price:
    return Price(
        math.sqrt(half.seconds * whole.seconds),
        min(half.low_s, whole.low_s),
        max(half.high_s, whole.high_s),
        "extrapolated",
        f"between a cache in {BF16} and one of half as many tokens; {whole.detail}",
        cached=half.cached or whole.cached,
    )
