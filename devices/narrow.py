"""Prices of unmeasured products with weights of few bits, by measured products.

    weights of b bytes   t = sqrt(t_few t_bf16)
                         t_few = max(t_bf16 over n b / 2 columns, t_bf16 floor / floor_bf16)
    int8                 t = t_fp8, if the device multiplies both at one rate
    fp8_b128             t = sqrt(t_fp8 t_bf16)

Products of bf16 over n b / 2 columns read the same bytes; `floor` is the roofline, which keeps a product
bound by arithmetic from an impossible gain. A kernel that widens weights on the way moves fewer bytes and
spends part of the gain on widening them: the price is the geometric mean, and the interval reaches from one
end to the other. Scales of blocks are applied between the products of blocks: never faster than fp8.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from simcore.ops.op import DTYPE_BYTES, Op, Price, Roofline, Shape, SourceKind

Known = Callable[[Op], Price | None]
BF16, FP8, INT8, FP8_BLOCKS = "bf16", "fp8", "int8", "fp8_b128"
# Columns are rounded up to whole tiles, as in products that are launched in practice.
TILE = 64


def price_narrow(op: Op, known: Known, floor: Roofline) -> Price | None:
    """Returns the price of a product from the prices in `known` of products in bf16 and fp8; None if it has
    none, or the op is no product of narrow weights."""
    if op.kind != "matmul" or DTYPE_BYTES[op.dtype] >= DTYPE_BYTES[BF16]:
        return None
    wide = replace(op, dtype=BF16)
    whole = known(wide)
    if whole is None:
        return None
    if op.dtype in (INT8, FP8_BLOCKS):
        fp8 = replace(op, dtype=FP8)
        measured = known(fp8)
        if measured is not None and op.dtype == FP8_BLOCKS:
            return _between(
                measured, whole, measured.seconds, floor(op).seconds, "products of fp8 and of bf16"
            )
        if measured is not None and floor(fp8) == floor(op):
            return replace(measured, source=_trust(measured), detail=f"as fp8; {measured.detail}")
    few = known(replace(wide, shape=_fewer_columns(op)))
    if few is None:
        return None
    gained = floor(op).seconds / floor(wide).seconds
    fast_s = max(few.seconds, gained * whole.seconds)
    return _between(few, whole, fast_s, floor(op).seconds, "bf16 over as many bytes and over as many columns")


def _fewer_columns(op: Op) -> Shape:
    share = DTYPE_BYTES[op.dtype] / DTYPE_BYTES[BF16]
    columns = min(op["n"], TILE * math.ceil(op["n"] * share / TILE))
    return tuple((name, columns if name == "n" else op[name]) for name, _ in op.shape)


def _between(fast: Price, slow: Price, fast_s: float, least_s: float, what: str) -> Price:
    """Returns the geometric mean of two prices, with `fast_s` for the faster one; never below the floor
    `least_s`."""
    fast_s = max(least_s, min(fast_s, slow.seconds))
    return Price(
        math.sqrt(fast_s * slow.seconds),
        max(least_s, min(fast_s * fast.low_s / fast.seconds, slow.low_s)),
        slow.high_s,
        _trust(slow),
        f"between {what}; {slow.detail}",
        cached=fast.cached or slow.cached,
    )


def _trust(price: Price) -> SourceKind:
    return "roofline" if price.source == "roofline" else "extrapolated"
