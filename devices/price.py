"""Prices of ops on a device: a time from its profile if there is one, else alpha-beta, else the roofline.

    floor     max(flops / peak, hbm_bytes / bandwidth, wire_bytes / link rate)
    roofline  kernel_s + max(flops / (peak * efficiency), hbm_bytes / (bandwidth * efficiency))
    fused     the sum of its parts, unless a profile has a row of it
    iteration a profile's, piecewise linear in the number of its sequences
    fitted    launches * kernel_s + floor / efficiency, two constants a kind (simcore.devices.fit)
    measured  fitted, corrected by measurements near the op's shape (simcore.devices.interpolation)
    linear    linear attention at another shape, by the fits of its method (simcore.devices.linear_fallback)
    alike     unmeasured attention, by measured attention (simcore.devices.attention_fallback)
    narrow    unmeasured products with weights of few bits, by those of bf16 (simcore.devices.narrow)
    blocks    an op that gives its number of blocks: floor stretched to whole waves (simcore.devices.waves)

A price names its source, so that a report can give the share of a run by source.
"""

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from simcore.devices.attention_fallback import price_alike
from simcore.devices.collectives import collective_seconds, crosses_link
from simcore.devices.fitted import FittedProfile
from simcore.devices.linear_fallback import fit_between, is_linear, launches_of
from simcore.devices.narrow import price_narrow
from simcore.devices.profile import Point, Profile, points
from simcore.devices.spec import DeviceSpec, Link
from simcore.devices.waves import stretch
from simcore.input.files import InputError
from simcore.ops.op import MULTIPLIED_AS, Floor, Op, Price, Pricer, Roofline, SourceKind, early_part

# The share of an L2 cache that keeps reused data. An L2 cache in two halves, each of which serves half of the
# multiprocessors, holds data that all of them read twice ("NVIDIA A100 Tensor Core GPU Architecture", on the
# L2 cache; Hopper's is built likewise).
STAYS = 0.5

WAVES = "waves"
# From the most to the least trusted.
TRUST: tuple[SourceKind, ...] = (
    "measured",
    "published",
    "interpolated",
    "carried",
    "extrapolated",
    "roofline",
    "assumed",
)
# Relative rounding error of two sums of the same seconds.
ROUNDING = 1e-9
# Contexts grow token by token in a long run: the cache is bounded, and large enough for many batches.
MEMO = 65536


def roofline(spec: DeviceSpec, *, link: Link | None = None) -> Roofline:
    """Returns a function that gives the least time of an op on a device, in seconds, by its datasheet.

    `link` connects the ranks (default: the device's own). Only the wire bounds a collective: its bytes cross
    memory many times faster. The function raises InputError for a dtype without a peak, and for a collective
    on a device without a link.
    """

    def floor(op: Op) -> Floor:
        if op.parts:
            parts = [(times, floor(part)) for part, times in _counted(op.parts)]
            return Floor(
                sum(times * part.compute_s for times, part in parts),
                sum(times * part.memory_s for times, part in parts),
                sum(times * part.wire_s for times, part in parts),
            )
        work = op.work
        if crosses_link(op):
            return Floor(0.0, 0.0, work.wire_bytes / (link or spec.link()).bytes_per_s)
        compute_s = work.flops / spec.peak_flops_per_s(op.dtype) if work.flops else 0.0
        return Floor(compute_s, work.hbm_bytes / spec.hbm_bytes_per_s, 0.0)

    return floor


@dataclass(frozen=True, slots=True)
class _Tariff:
    """The inputs to a price besides the op."""

    spec: DeviceSpec
    link: Link | None
    profile: Profile | None
    fitted: FittedProfile | None
    table: Mapping[str, tuple[Point, ...]]
    context_tokens: int | None
    floor: Roofline


def pricer(
    spec: DeviceSpec,
    *,
    link: Link | None = None,
    profile: Profile | FittedProfile | None = None,
    ranks: int = 1,
    context_tokens: int | None = None,
) -> Pricer:
    """Returns a function that prices ops on a device and caches the prices.

    `ranks` is the tensor-parallel rank count, which chooses a table's rows. `context_tokens` is the context
    of the run, for ops whose rows depend on it but whose shape lacks it (a whole layer without its attention,
    say). Raises InputError if the profile has no such rank count; the function raises the errors of
    `roofline`, of `collective_seconds` and of unbound sizes.
    """
    given = profile if isinstance(profile, Profile) else None
    fitted = profile if isinstance(profile, FittedProfile) else None
    if given is not None and ranks not in given.ranks:
        have = ", ".join(map(str, given.ranks))
        raise InputError(f"profile {given.name} has ranks {have}, not {ranks}")
    table = points(given, ranks) if given else {}
    tariff = _Tariff(spec, link, given, fitted, table, context_tokens, roofline(spec, link=link))
    # Prices of unmeasured attention ask for the same measured attention again and again.
    known = lru_cache(maxsize=MEMO)(partial(_from_fits, tariff))

    @lru_cache(maxsize=MEMO)
    def price(op: Op) -> Price:
        if fitted is None:
            found = _possible(tariff, op, _from_profile(tariff, op))
        else:
            # By lines between contexts even where it was measured: a burst is then a sum of few of them.
            found = None if op.kind == "paged_attention" else known(op)
            found = found or _not_below(tariff, op, price_alike(op, known))
            found = found or _linear(tariff, op)
        if found is None and (fitted or op.dtype in MULTIPLIED_AS):
            found = price_narrow(op, partial(_plain, tariff), tariff.floor)
        # What is one launch across a link has a price of its own.
        if found is None and op.parts and not crosses_link(op):
            return summed([price(part) for part in op.parts])
        if found is None:
            found = _collective(tariff, op) if crosses_link(op) else _roofline_price(tariff, op)
        if op.kind != "speculative_attention":
            return found
        assumed = given.assumed.get("early_part") if given else None
        if assumed:
            return replace(found, early_s=min(assumed.seconds, found.seconds))
        return _with_early(found, price(early_part(op)))

    return price


def _possible(tariff: _Tariff, op: Op, found: Price | None) -> Price | None:
    """Checks a profile's price and returns it. Raises InputError if it is below the floor, except assumed
    prices, and whole iterations, whose time a profile gives for any context."""
    if found is None or found.source == "assumed" or op.kind == "iteration" or tariff.profile is None:
        return found
    floor_s = tariff.floor(op).seconds
    if found.seconds < floor_s * (1.0 - ROUNDING):
        raise InputError(
            f"profile {tariff.profile.name}: {op.kind} {op.name} takes {found.seconds:.3g} s there;"
            f" {tariff.spec.name} takes {floor_s:.3g} s at least by its datasheet"
        )
    return found


def _not_below(tariff: _Tariff, op: Op, found: Price | None) -> Price | None:
    """Returns a price whose interval does not begin below the floor: one that was widened may."""
    if found is None or found.low_s >= (floor_s := tariff.floor(op).of(found).seconds):
        return found
    return replace(found, low_s=min(found.seconds, floor_s))


def _plain(tariff: _Tariff, op: Op) -> Price | None:
    """Returns the price of a product by the fits or, without a fitted profile, by the roofline; None if there
    are fits but none for this kind."""
    found = _from_fits(tariff, op)
    if found is not None or tariff.fitted is not None:
        return found
    return _roofline_price(tariff, op)


def _with_early(whole: Price, early: Price) -> Price:
    """Adds the early part, for which a hit waits. The price is trusted no more than its early part."""
    seconds = min(early.seconds, whole.seconds)
    if TRUST.index(early.source) <= TRUST.index(whole.source):
        return replace(whole, early_s=seconds)
    scale = whole.seconds / early.seconds if early.seconds > 0.0 else 1.0
    return replace(
        whole,
        early_s=seconds,
        low_s=min(whole.low_s, early.low_s * scale),
        high_s=max(whole.high_s, early.high_s * scale),
        source=early.source,
        detail=f"{whole.detail}; its early part: {early.detail}",
    )


def summed(parts: Sequence[Price]) -> Price:
    """Returns the price of parts that run one after the other; an early part is sent once the parts before it
    are done."""
    early_s, before_s = None, 0.0
    for part in parts:
        if early_s is None and part.early_s is not None:
            early_s = before_s + part.early_s
        before_s += part.seconds
    least = max(parts, key=lambda part: TRUST.index(part.source))
    return Price(
        before_s,
        sum(part.low_s for part in parts),
        sum(part.high_s for part in parts),
        least.source,
        f"sum of {len(parts)} parts; least trusted: {least.detail}",
        early_s,
        any(part.cached for part in parts),
    )


def _roofline_price(tariff: _Tariff, op: Op) -> Price:
    floor, spec = tariff.floor(op), tariff.spec
    flops, hbm = spec.flops_efficiency, spec.hbm_efficiency
    idle = stretch(op, spec.processors)

    def at(flops_efficiency: float, hbm_efficiency: float) -> float:
        busy_s = max(floor.compute_s / flops_efficiency, floor.memory_s / hbm_efficiency)
        return spec.kernel_s + busy_s * idle

    bound, efficiency = ("compute", flops) if floor.compute_s > floor.memory_s else ("memory", hbm)
    detail = f"kernel_s + max(compute, memory / efficiency): {bound} bound, efficiency {efficiency.value:.3g}"
    return Price(
        at(flops.value, hbm.value),
        at(flops.high, hbm.high),
        at(flops.low, hbm.low),
        "roofline",
        detail,
    )


def _collective(tariff: _Tariff, op: Op) -> Price:
    link = tariff.link or tariff.spec.link()
    seconds, algorithm = collective_seconds(op, link)
    floor_s = tariff.floor(op).seconds
    # A residual and a norm that go along read and write memory, too.
    seconds = max(seconds, floor_s)
    return Price(
        seconds,
        max(floor_s, seconds * (1.0 - link.relative_error)),
        seconds * (1.0 + link.relative_error),
        "roofline",
        f"alpha-beta, {algorithm} over {link.kind}",
    )


def _from_fits(tariff: _Tariff, op: Op) -> Price | None:
    """Returns the price by two fitted constants, or None if none were fitted to this kind. A fused op has as
    many launches as parts, and the sum of their floors."""
    row = tariff.fitted.row(op) if tariff.fitted else None
    if row is None:
        return None
    launches, floor_s = launches_and_floor(
        op, tariff.floor, tariff.spec.processors if row.form == WAVES else 0
    )
    detail = f"fit of {row.kind} {row.where}".rstrip()
    near = tariff.fitted.correction(row) if tariff.fitted else None
    found = near.price(row.fit, op, launches, floor_s, f"{detail}, corrected") if near else None
    price = found or row.fit.price(launches, floor_s, detail)
    # If the row has a correction that does not cover this shape, the shape is not between measured ones.
    unknown = (near and not found) or (tariff.fitted and tariff.fitted.is_general(row))
    return replace(price, source="extrapolated") if unknown else price


def _linear(tariff: _Tariff, op: Op) -> Price | None:
    """Returns the price of linear attention at a shape without a fit, by the fits of its method at others;
    None for other ops, and without such fits."""
    if tariff.fitted is None or not is_linear(op):
        return None
    lines = [(where, row.fit) for where, row in tariff.fitted.by_kind.get(op.kind, ()) if row.form != WAVES]
    found = fit_between(op, lines)
    if found is None:
        return None
    fit, heads, between = found
    launches, floor_s = launches_and_floor(op, tariff.floor)
    price = fit.price(launches_of(op, launches, heads), floor_s, f"fits of {op.kind} at {between}")
    return replace(price, source="extrapolated")


def launches_and_floor(op: Op, floor: Roofline, processors: int = 0) -> tuple[int, float]:
    """Returns the inputs to a fit: the number of launches of an op, and the sum of their floors in seconds.
    With `processors`, each floor is stretched to the whole waves in which its blocks run."""
    if not op.parts:
        return 1, floor(op).seconds * (stretch(op, processors) if processors else 1.0)
    launches, floor_s = 0, 0.0
    for part, times in _counted(op.parts):
        count, seconds = launches_and_floor(part, floor, processors)
        launches += times * count
        floor_s += times * seconds
    return launches, floor_s


def _counted(parts: Sequence[Op]) -> list[tuple[Op, int]]:
    """Returns the distinct ops and their counts: 100 000 launches repeat a few ops, one object each."""
    distinct = {id(part): part for part in parts}
    counts = Counter(map(id, parts))
    return [(part, counts[key]) for key, part in distinct.items()]


def _from_profile(tariff: _Tariff, op: Op) -> Price | None:
    """Returns the table's or the assumed price of this op, or None if the profile has neither."""
    profile = tariff.profile
    if profile is None or (profile.batch is not None and not _same_batch(op, profile.batch)):
        return None
    row = tariff.table.get(op.name) or tariff.table.get(op.kind)
    if row:
        return _from_points(tariff, op, row)
    assumed = profile.assumed.get(op.name) or profile.assumed.get(op.kind)
    if assumed:
        return Price(assumed.seconds, assumed.seconds, assumed.seconds, "assumed", assumed.why)
    return None


def _same_batch(op: Op, batch: int) -> bool:
    """Whether an op works on one token of each sequence: a prefill must not get a decode's time."""
    own = all(op[name] == batch for name, _ in op.shape if name in ("batch", "tokens", "m", "sequences"))
    return own and all(_same_batch(part, batch) for part in op.parts)


def _from_points(tariff: _Tariff, op: Op, row: tuple[Point, ...]) -> Price:
    if row[0].sequences is not None:
        return _iteration(tariff, op, row)
    if row[0].context_tokens is None:
        return _published(row[0])
    context = _context(op, tariff.context_tokens)
    if context is None:
        raise InputError(f"the profile's {op.name} depends on the context: give the pricer context_tokens")
    by_context = {point.context_tokens or 0: point for point in row}
    if known := _among(by_context, context, "tokens"):
        return known
    nearest = (min if context < min(by_context) else max)(by_context)
    return _extrapolated(tariff, op, by_context[nearest], context)


def _among(points: Mapping[int, Point], at: int, unit: str) -> Price | None:
    """Returns the time at a point, or interpolated between two points; None outside of all points."""
    if at in points:
        return _published(points[at])
    ordered = sorted(points)
    here = bisect(ordered, at)
    if here in (0, len(ordered)):
        return None
    below, above = ordered[here - 1], ordered[here]
    share = (at - below) / (above - below)
    return _interpolated(points[below], points[above], share, f"{below} and {above} {unit}")


def _iteration(tariff: _Tariff, op: Op, row: tuple[Point, ...]) -> Price:
    """Returns the time of a whole iteration at the op's number of sequences, and at least its floor, which is
    higher at long contexts."""
    floor_s = tariff.floor(op).seconds
    found = _by_sequences(row, op["sequences"], floor_s)
    if found.low_s >= floor_s:
        return found
    low_s, seconds, high_s = (max(floor_s, end_s) for end_s in (found.low_s, found.seconds, found.high_s))
    if seconds == found.seconds:
        return replace(found, low_s=low_s)
    detail = f"at least, by the datasheet, at this context; {found.detail}"
    return Price(seconds, low_s, high_s, "extrapolated", detail)


def _by_sequences(row: tuple[Point, ...], sequences: int, floor_s: float) -> Price:
    """Returns the time of an iteration at a number of sequences, at any context."""
    points = {point.sequences or 0: point for point in row}
    if known := _among(points, sequences, "sequences"):
        return known
    if sequences < min(points):
        return _fewer_sequences(row[0], sequences, floor_s)
    return _more_sequences(points, sequences, floor_s)


def _fewer_sequences(smallest: Point, sequences: int, floor_s: float) -> Price:
    """Returns the time of the smallest point, an upper bound for fewer sequences."""
    known = _published(smallest)
    detail = f"{sequences} sequences at the time of {smallest.sequences}, the fewest; {smallest.detail}"
    return replace(known, low_s=min(known.low_s, floor_s), source="extrapolated", detail=detail)


def _more_sequences(points: Mapping[int, Point], sequences: int, floor_s: float) -> Price:
    """Extrapolates beyond the largest point by the slope of the last two, never below the floor. A single
    point has no slope: its interval reaches from the same time to one in proportion."""
    *others, largest = sorted(points)
    end = _published(points[largest])
    low_s, seconds, high_s = end.low_s, end.seconds, end.high_s * sequences / largest
    by = "without a slope"
    if others:
        start, share = _published(points[others[-1]]), (sequences - largest) / (largest - others[-1])
        low_s = end.low_s + share * (end.low_s - start.high_s)
        seconds = end.seconds + share * (end.seconds - start.seconds)
        high_s = end.high_s + share * (end.high_s - start.low_s)
        by = f"by the slope from {others[-1]} on"
    low_s, seconds, high_s = (max(floor_s, value) for value in (low_s, seconds, high_s))
    detail = f"from {largest} to {sequences} sequences {by}; {end.detail}"
    return Price(seconds, low_s, high_s, "extrapolated", detail)


def _context(op: Op, given: int | None) -> int | None:
    """Returns the context that an op attends over: its own, else that of the run."""
    return op["context"] if any(name == "context" for name, _ in op.shape) else given


def _published(point: Point) -> Price:
    low_s = max(0.0, point.seconds - point.plus_minus_s)
    return Price(point.seconds, low_s, point.seconds + point.plus_minus_s, "published", point.detail)


def _interpolated(below: Point, above: Point, share: float, between: str) -> Price:
    a, b = _published(below), _published(above)
    return Price(
        a.seconds + share * (b.seconds - a.seconds),
        a.low_s + share * (b.low_s - a.low_s),
        a.high_s + share * (b.high_s - a.high_s),
        "interpolated",
        f"linear between {between}; {below.detail}",
    )


def _extrapolated(tariff: _Tariff, op: Op, nearest: Point, context: int) -> Price:
    """Shifts the nearest point by memory time: nearest + (M(context) - M(its context)) / efficiency.

    An op without a context in its shape has no difference: it keeps the nearest time.
    """
    floor = tariff.floor(op)
    there = tariff.floor(_with_context(op, nearest.context_tokens or context))
    shift_s = floor.memory_s - there.memory_s
    hbm = tariff.spec.hbm_efficiency
    # Never below the floor, not even far below the smallest context of the table.
    at = [
        max(floor.seconds, nearest.seconds + error_s + shift_s / efficiency)
        for error_s in (-nearest.plus_minus_s, 0.0, nearest.plus_minus_s)
        for efficiency in (hbm.low, hbm.value, hbm.high)
    ]
    return Price(
        max(floor.seconds, nearest.seconds + shift_s / hbm.value),
        min(at),
        max(at),
        "extrapolated",
        f"from {nearest.context_tokens} to {context} tokens by memory time at efficiency {hbm.value:.3g}; "
        f"{nearest.detail}",
    )


def _with_context(op: Op, context: int) -> Op:
    return replace(op, shape=tuple((k, context if k == "context" else v) for k, v in op.shape))
