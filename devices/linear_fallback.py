"""Prices of linear attention by fits of the same method at other batches, heads and widths.

    launches, floor   of the op itself: both follow from its shape; a row of a mask with decay, made head by
                      head in a loop on the host, counts heads / heads of the fit
    kernel_s          linear in log(pairs), pairs = batch * heads, between the fits that a profile has
    efficiency        a power of the pairs between them
    outside           as at the nearest fit

The loop is LeetDecoding's own (`get_full_mask` in methods/linear_attn.py): a mask takes as long for any
batch.

A fit is for one number of (sequence, head) pairs: of many, a kernel fills more of a device. It takes an op
only if all its other conditions hold. The price is extrapolated; its interval is the wider one of both fits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from simcore.devices.fit import Fit
from simcore.ops.op import Op

# The conditions of a fit that another shape need not meet.
SHAPE = frozenset({"batch", "heads", "rank", "dim"})
FAMILY = "linear_attention_"
Lines = Sequence[tuple[Mapping[str, str], Fit]]


def is_linear(op: Op) -> bool:
    """Whether an op is a method of linear attention."""
    return op.kind.startswith(FAMILY) and any(name == "length" for name, _ in op.shape)


def fit_between(op: Op, lines: Lines) -> tuple[Fit, int, str] | None:
    """Returns the constants for an op of a shape without a fit, the heads that they are for, and what they
    are between, in words; None if no line holds for any shape. `lines`: the conditions and constants of the
    op's kind."""
    own = {**{name: str(value) for name, value in op.shape}, "dtype": op.dtype}
    found: dict[int, Fit] = {}
    heads = 1
    for where, fit in lines:
        others = {name: value for name, value in where.items() if name not in SHAPE}
        numbered = all(where.get(name, "").isdigit() for name in ("batch", "heads"))
        if numbered and all(own.get(name) == value for name, value in others.items()):
            heads = int(where["heads"])
            found.setdefault(int(where["batch"]) * heads, fit)
    if not found:
        return None
    pairs, known = op["batch"] * op["heads"], sorted(found)
    at = min(max(pairs, known[0]), known[-1])
    low = max(each for each in known if each <= at)
    high = min(each for each in known if each >= at)
    share = math.log(at / low) / math.log(high / low) if high > low else 0.0
    return _between(found[low], found[high], share), heads, f"pairs {low} and {high}, of {pairs}"


def launches_of(op: Op, launches: int, heads: int) -> int:
    """Returns how many launches of a fit for `heads` heads an op's `launches` are."""
    rows = sum(part.name == "mask" for part in op.parts) if op["mask_by_rows"] else 0
    return round(launches + rows * (op["heads"] / heads - 1.0))


def _between(a: Fit, b: Fit, share: float) -> Fit:
    return replace(
        a,
        kernel_s=(1.0 - share) * a.kernel_s + share * b.kernel_s,
        efficiency=a.efficiency ** (1.0 - share) * b.efficiency**share,
        low=min(a.low, b.low),
        high=max(a.high, b.high),
        n=a.n + b.n,
        least_floor_s=min(a.least_floor_s, b.least_floor_s),
        most_floor_s=max(a.most_floor_s, b.most_floor_s),
    )
