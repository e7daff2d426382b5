"""Prices of attention by measured attention: of other lengths, another layout, smaller numbers in the cache.

    paged_attention(s sequences, n tokens in all)    linear between contexts n / s, 64 of them an octave, at
                                                     the same lengths over the mean; as measured there, or
                                                     decode_attention(batch s, context)
    a cache of 1-byte numbers, one query a sequence  t = sqrt(t_half t_bf16), inside [t_half, t_bf16]
    a cache of 1-byte numbers, prompts               t = t_bf16
    linear_attention_prompts(n tokens of s prompts)  linear_attention_lightning(batch s, length n / s)

t_bf16 is the time with a cache in bf16, t_half the time in bf16 over half as many tokens, which have the
bytes of the 1-byte cache. A kernel that reads smaller numbers moves half the bytes and spends part of the
gain on converting them: the price is the geometric mean, and the interval reaches from one end to the other.
Prompts are bound by arithmetic and gain nothing.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from simcore.ops import op as ops
from simcore.ops.linear_layer import PROMPTS, as_lightning
from simcore.ops.op import DTYPE_BYTES, Op, Price

Known = Callable[[Op], Price | None]
BF16 = "bf16"
# Contexts per octave between which prices of paged attention are linear.
PARTS = 64


def price_alike(op: Op, known: Known) -> Price | None:
    """Returns the price of attention from the prices in `known` of similar attention; None if it has none."""
    if op.kind == "paged_attention":
        return _paged(op, known)
    if op.kind == PROMPTS:
        return _of_chunks(op, known)
    if op.kind == "decode_attention":
        return _of_one_byte(op, known)
    if DTYPE_BYTES[op.dtype] != 1.0 or op.kind != "prefill_attention":
        return None
    whole = known(replace(op, dtype=BF16))
    detail = f"as with a cache in {BF16}; {whole.detail}" if whole else ""
    return whole and replace(whole, source="extrapolated", detail=detail)


def _of_chunks(op: Op, known: Known) -> Price | None:
    """Returns the price of prompts' linear attention, by the kernel that computes it on whole prompts."""
    alike = as_lightning(op)
    found = known(alike)
    detail = f"as {alike.kind} of {alike['batch']} times {alike['length']} tokens"
    return found and replace(found, source="extrapolated", detail=f"{detail}; {found.detail}")


def _of_one_byte(op: Op, known: Known) -> Price | None:
    """Returns the price of one query a sequence over a cache of 1-byte numbers, if it is such a cache."""
    if DTYPE_BYTES[op.dtype] != 1.0:
        return None
    whole = known(replace(op, dtype=BF16))
    half = whole and known(replace(op, dtype=BF16, shape=_half(op)))
    return whole and half and _between(half, whole)


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
    return Price(
        below.seconds + share * (above.seconds - below.seconds),
        below.low_s + share * (above.low_s - below.low_s),
        below.high_s + share * (above.high_s - below.high_s),
        below.source,
        below.detail,
        below.early_s,
        below.cached or above.cached,
        below.left_s,
    )


def _of_context(op: Op, context: int, known: Known) -> Price | None:
    """Returns the price of as many sequences with `context` tokens each in the mean."""
    # Asked for thousands of times a run: a plain op takes half the time of `replace`.
    here = Op(
        op.kind,
        op.name,
        _with(op, "kv_tokens", op["sequences"] * context),
        op.dtype,
        op.formula,
        op.axis,
        op.parts,
        op.place,
    )
    found = known(here) or _of_one_byte(here, known)
    if found is not None:
        return found
    decoding = _decoding(op, op["sequences"], context, known)
    return decoding and _of_decoding(decoding)


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
    """Returns the shape with half as many tokens of each sequence, rounded up."""
    if op.kind == "paged_attention":
        sequences = op["sequences"]
        shape = _with(op, "kv_tokens", sequences * -(-op["kv_tokens"] // (2 * sequences)))
        return tuple((name, op[name] // 2 if name == "over_mean" else size) for name, size in shape)
    return _with(op, "context", -(-op["context"] // 2))


def _with(op: Op, changed: str, size: int) -> ops.Shape:
    return tuple([(name, size if name == changed else value) for name, value in op.shape])


def _between(half: Price, whole: Price) -> Price:
    return Price(
        math.sqrt(half.seconds * whole.seconds),
        min(half.low_s, whole.low_s),
        max(half.high_s, whole.high_s),
        "extrapolated",
        f"between a cache in {BF16} and one of half as many tokens; {whole.detail}",
        cached=half.cached or whole.cached,
    )
