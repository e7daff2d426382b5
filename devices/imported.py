"""Makes a profile from a user's tables of op times (`simcore.devices.op_tables`).

    each kind of op and dtype      two constants (`simcore.devices.fit`), corrected by the times near an op's
                                   shape (`simcore.devices.interpolation`)
    kinds that no table has        no fit: the roofline prices them

Times faster than the device's datasheet allows are left out if they are few. If more than `MOST_IMPOSSIBLE`
of a kind are such, or a kind's median is over `MOST_SLOW` times the roofline, the unit, the device or the
table is wrong, and nothing is written.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from simcore.devices.fitted import Birth, FittedProfile, parse_where
from simcore.devices.making import Point, as_read, check_target, fits, shape_text, write_whole
from simcore.devices.op_tables import KINDS, Format, OpTable, Timed, read_table
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.spec import DeviceSpec
from simcore.input.files import InputError
from simcore.ops.op import Op

# Most times of a kind, as a share, that may be faster than the device can be.
MOST_IMPOSSIBLE = 0.05
# Most that the median time of a kind may be over the roofline.
MOST_SLOW = 100.0
UNKNOWN = "unknown"
# Fewest errors that are reported.
LEAST_ERRORS = 3
CACHE = "memory or a cache, the table does not say which"
# Dimensions whose values have lines of their own. Other engines' kernels split work over a sequence's heads
# differently: times with equal pairs of sequence and head (`interpolation.coordinates`) differ by up to a
# factor of six in tables of vLLM 0.19 on an H200 (half of them by over 12 %).
OWN_LINES: Mapping[str, tuple[str, ...]] = {
    "decode_attention": ("kv_heads",),
    "speculative_attention": ("kv_heads",),
    "prefill_attention": ("q_heads", "kv_heads"),
}
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Imported:
    """A profile made from tables, and the lines to print about it."""

    profile: FittedProfile
    points: Sequence[Point]
    messages: Sequence[str]


def import_tables(
    paths: Sequence[Path], spec: DeviceSpec, target: Path, *, form: Format | None = None, date: str = UNKNOWN
) -> Imported:
    """Reads the tables and writes the profile folder `target`, whole or not at all. Raises InputError with
    one line if a table or the folder is invalid."""
    check_target(target, spec.name)
    found = profile_of([read_table(path, form) for path in paths], spec, target.resolve().name, date)
    write_whole(found.profile, found.points, target)
    return found


def profile_of(tables: Sequence[OpTable], spec: DeviceSpec, name: str, date: str = UNKNOWN) -> Imported:
    """Makes a device's profile from tables. Raises InputError if they have no usable op times, or times that
    the device cannot have."""
    left_out = sum((table.left_out for table in tables), Counter[str]())
    lines = [f"left out: {count:,} rows of {why}" for why, count in sorted(left_out.items())]
    timed = [each for table in tables for each in table.timed]
    if not timed:
        why = "; ".join(lines) or "there are none"
        raise InputError(f"{', '.join(str(table.path) for table in tables)}: no op times are left ({why})")
    possible, notes = _possible(timed, spec)
    points, more = _points(possible, spec)
    notes = [*lines, *notes, *more, *_not_there(points)]
    files = ", ".join(f"{table.path.name} ({len(table.timed):,} rows)" for table in tables)
    profile = FittedProfile(
        name=name,
        title=f"op times of {len(tables)} table{'s' * (len(tables) > 1)}, not measured by this project",
        source=f"imported: {files}",
        device=spec.name,
        granularity="measured",
        fits=fits(points, {}, 0.0, CACHE, _own_line),
        overheads={},
        birth=_birth(tables, possible, points, date),
        notes=tuple(notes),
        points=tuple(as_read(point) for point in points),
    )
    return Imported(profile, points, [*_judged(profile), *notes])


def _by_kind(timed: Iterable[Timed]) -> Mapping[tuple[str, str], list[Timed]]:
    found: dict[tuple[str, str], list[Timed]] = {}
    for each in timed:
        found.setdefault((each.op.kind, each.op.dtype), []).append(each)
    return dict(sorted(found.items()))


def _possible(timed: Sequence[Timed], spec: DeviceSpec) -> tuple[list[Timed], list[str]]:
    """Returns the times that the device can reach, and notes about the others. Raises InputError if there are
    too many others, or a kind is far too slow."""
    floor, price = roofline(spec), pricer(spec)
    found, notes = list[Timed](), list[str]()
    for (kind, dtype), group in _by_kind(timed).items():
        try:
            least = [floor(each.op).seconds for each in group]
        except InputError as error:
            raise InputError(f"{group[0].where}: {error}") from None
        fast = [(each, least_s) for each, least_s in zip(group, least, strict=True) if each.seconds < least_s]
        if fast:
            says = (
                f"{len(fast):,} of {len(group):,} times of {kind} {dtype} are faster than {spec.name} can be"
            )
            each, least_s = max(fast, key=lambda pair: pair[1] / pair[0].seconds)
            worst = f"{each.seconds:.3g} s, at least {least_s:.3g} s by the datasheet"
            if len(fast) > MOST_IMPOSSIBLE * len(group):
                raise InputError(f"{each.where}: {says} (here {worst}): is it the right unit, device and op?")
            row = each.where.rpartition("/")[2]
            notes.append(f"left out: {says} (the worst, {row}: {worst})")
        slow = median(each.seconds / price(each.op).seconds for each in group)
        if slow > MOST_SLOW:
            says = f"times of {kind} {dtype} are {slow:,.0f} times as long as by the roofline of {spec.name}"
            raise InputError(f"{group[0].where}: {says}, in the median: is it the right unit and device?")
        impossible = {id(each) for each, _ in fast}
        found += [each for each in group if id(each) not in impossible]
    return found, notes


def _points(timed: Sequence[Timed], spec: DeviceSpec) -> tuple[list[Point], list[str]]:
    """Returns a point for each op, with the median of its times, and notes on ops with several times."""
    floor = roofline(spec)
    groups: dict[Key, list[Timed]] = {}
    for each in timed:
        groups.setdefault((each.op.kind, shape_text(each.op), each.op.dtype), []).append(each)
    points = [_point(group, *launches_and_floor(group[0].op, floor)) for group in groups.values()]
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return points, []
    apart = [max(e.seconds for e in group) / min(e.seconds for e in group) for group in several]
    p50, most = float(np.median(apart)), max(apart)
    return points, [
        f"{len(several):,} ops are there several times: their medians count"
        f" (largest / smallest time: median {p50:.2f}, at most {most:.2f})"
    ]


def _point(group: Sequence[Timed], launches: int, floor_s: float) -> Point:
    one = group[0]
    median_s = median(each.seconds for each in group)
    return Point(
        one.op,
        one.launches * launches,
        floor_s,
        median_s,
        min(median_s, *(each.p10_s for each in group)) if len(group) > 1 else one.p10_s,
        max(median_s, *(each.p90_s for each in group)) if len(group) > 1 else one.p90_s,
        sum(each.runs or 1 for each in group),
        one.cache,
        one.warm_s if len(group) == 1 else None,
        "check" if all(each.checks for each in group) else "fit",
    )


def _not_there(points: Sequence[Point]) -> Iterator[str]:
    """Yields a note on the kinds of a decoder's ops that no table has, if any."""
    missing = sorted({*KINDS} - {point.op.kind for point in points})
    if missing:
        yield f"not in the tables, priced by the roofline: {', '.join(missing)}; collectives by the link"


def _birth(tables: Sequence[OpTable], timed: Sequence[Timed], points: Sequence[Point], date: str) -> Birth:
    processors = sorted({name for table in tables for name in table.processors})
    versions: dict[str, set[str]] = {}
    for table in tables:
        for name, text in table.versions.items():
            versions.setdefault(name, set()).add(text)
    runs = [each.runs for each in timed]
    known = all(run is not None for run in runs)
    return Birth(
        date=date,
        processor=", ".join(processors) or UNKNOWN,
        threads=None,
        versions={name: "; ".join(sorted(texts)) for name, texts in versions.items()},
        points=len(points),
        runs=min(run for run in runs if run is not None) if known else None,
        # Without percentiles in the rows the spread is 0, which means unknown.
        spread=median(point.spread for point in points) or None,
        rates={},
    )


def _own_line(op: Op) -> Iterator[str]:
    if names := OWN_LINES.get(op.kind):
        yield ";".join(f"{name}={op[name]}" for name in names)


def _judged(profile: FittedProfile) -> Iterator[str]:
    """Yields a line for each kind and dtype: the errors of prices at check shapes or, without these, at
    shapes left out one by one."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in profile.fits:
        near = profile.correction(row)
        key = row.kind, parse_where(row.where)["dtype"]
        errors.setdefault(key, []).extend(() if near is None else near.errors)
    checks = list(profile.errors())
    counts = Counter((point.kind, point.dtype) for point in profile.points)
    for (kind, dtype), left_out in errors.items():
        own = [off for point, off in checks if (point.kind, point.dtype) == (kind, dtype)]
        how, found = ("that only check", own) if own else ("left out one by one", left_out)
        yield f"{kind} {dtype}: {counts[kind, dtype]:,} op times; {_off(found, how)}"


def _off(errors: Sequence[float], how: str) -> str:
    if len(errors) < LEAST_ERRORS:
        return "too few to say how far off prices are"
    p50, p95 = (float(value) for value in np.percentile(100.0 * np.expm1(np.abs(errors)), (50, 95)))
    return f"at {len(errors)} {how} prices are {p50:.1f} % off (median), {p95:.1f} % (95th percentile)"
