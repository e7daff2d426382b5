"""Makes a profile folder from measured ops: fits them and writes profile.yaml, fits.csv, points.csv.

    a line of fits.csv per kind of op, dtype and condition on its shape    simcore.devices.fit
    a line of points.csv per measured op                                   simcore.devices.interpolation

A folder is written whole or not at all, and replaces no folder with other files.
"""

import csv
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from simcore.devices.fit import fit_two
from simcore.devices.fitted import FITS, POINTS, FitRow, FittedProfile, Renewed, write_fitted
from simcore.devices.interpolation import Measured, Role
from simcore.devices.profile import load_profile
from simcore.input.drafts import folder_draft
from simcore.input.files import InputError, read_cells, read_yaml
from simcore.ops.op import Op, says_longest

FILES = frozenset({"profile.yaml", FITS, POINTS})
# Dimensions that change how an op is computed, not only its amount of work: each value has a fit of its own.
ALIKE = frozenset({"gated", "separable", "decay", "products"})
# Kinds whose kernels change with one dimension (a product with a vector has another kernel than one with a
# matrix): besides a fit of all, there is one for each band of the dimension, both ends included.
OPEN = 1 << 62
BANDS: Mapping[str, tuple[str, tuple[tuple[int, int], ...]]] = {
    "matmul": ("m", ((1, 1), (2, 4), (4, 16), (16, 64), (64, OPEN))),
    "prefill_attention": ("tokens", ((1, 16), (16, 64), (64, OPEN))),
}
LEAST_IN_BAND = 5


@dataclass(frozen=True, slots=True)
class Point:
    """One measured op: `launches` and floor as `simcore.devices.price.launches_and_floor` returns them;
    median, 10th and 90th percentile of `runs` runs in seconds. `cache`: the source of operands; `warm_s`: the
    median with all operands in the cache, None if not measured; `role`: its use, as in
    `simcore.devices.interpolation.Measured`."""

    op: Op
    launches: int
    floor_s: float
    median_s: float
    p10_s: float
    p90_s: float
    runs: int
    cache: str = ""
    warm_s: float | None = None
    role: Role = "fit"

    @property
    def spread(self) -> float:
        """The middle 80 % of the runs, relative to their median."""
        return (self.p90_s - self.p10_s) / self.median_s


def fits(
    points: Sequence[Point],
    around_s: Mapping[str, float],
    op_s: float,
    cache: str,
    narrower: Callable[[Op], Iterable[str]] | None = None,
) -> tuple[FitRow, ...]:
    """Returns a line of fits.csv for each kind and condition, and for each band. Each op takes its kind's
    `around_s` besides its kernel, or `op_s` if the kind has none, in seconds; operands are in `cache`.
    `narrower`: returns an op's further conditions, each with a line of its own (default: BANDS)."""
    groups: dict[tuple[str, str], list[Point]] = {}
    of_fits = [point for point in points if point.role == "fit"]
    # Shapes that say how long their longest sequence is correct the prices of the others (interpolation).
    others = {point.op.kind for point in of_fits if not says_longest(dict(point.op.shape))}
    for point in of_fits:
        if point.op.kind in others and says_longest(dict(point.op.shape)):
            continue
        groups.setdefault((point.op.kind, condition(point.op)), []).append(point)
        for band in (narrower or _bands)(point.op):
            groups.setdefault((point.op.kind, f"{condition(point.op)};{band}"), []).append(point)
    narrow = {key for key, group in groups.items() if ".." in key[1] and len(group) < LEAST_IN_BAND}
    return tuple(
        _row(*key, group, around_s.get(key[0], op_s), cache)
        for key, group in groups.items()
        if key not in narrow
    )


def _row(kind: str, where: str, points: Sequence[Point], besides_s: float, cache: str) -> FitRow:
    found = fit_two([(point.launches, point.floor_s, point.median_s + besides_s) for point in points])
    source = f"{found.n} shapes, operands in {cache}"
    return FitRow(kind=kind, where=where, source=source, **asdict(found))


def condition(op: Op) -> str:
    """Returns the condition that ops of one fit share: the dtype, and the dimensions in `ALIKE`."""
    alike = [f"{name}={value}" for name, value in op.shape if name in ALIKE]
    return ";".join([f"dtype={op.dtype}", *alike])


def _bands(op: Op) -> Iterator[str]:
    """Yields the bands of a measured op."""
    name, bands = BANDS.get(op.kind, ("", ()))
    before = None
    for low, high in bands:
        if low <= op[name] <= high:
            # A size on the edge of two bands is fitted in both and priced by the first.
            yield f"{name}={low + (low == before)}..{high if high < OPEN else ''}"
        before = high


# -- the folder ----------------------------------------------------------------------------------------


def check_target(target: Path, device: str) -> None:
    """Raises InputError if a profile of the device cannot be written into `target`, or would replace files
    that no calibration or import has written."""
    if target.resolve() in (Path.cwd(), *Path.cwd().parents):
        raise InputError(f"--out {target}: is where this runs; give a folder of its own")
    if target.exists() and not target.is_dir():
        raise InputError(f"--out {target}: is no directory")
    others = sorted({path.name for path in target.iterdir()} - FILES) if target.is_dir() else []
    if others:
        raise InputError(f"--out {target}: holds {others[0]}, which no calibration or import has written")
    if target.is_dir() and any(target.iterdir()):
        _check_own(target, device)
    parent = next(path for path in (target, *target.absolute().parents) if path.exists())
    try:
        Path(tempfile.mkdtemp(dir=parent)).rmdir()
    except OSError as error:
        raise InputError(f"--out {target}: cannot be written: {error.strerror}") from None


def _check_own(target: Path, device: str) -> None:
    """Raises InputError if the profile in a folder was not made from this device's times."""
    try:
        known = read_yaml(target / "profile.yaml")
        own = isinstance(known, dict) and known.get("device") == device and bool(known.get("birth"))
    except InputError:
        # A profile that cannot be read is unfinished or damaged: it is measured again.
        own = (target / POINTS).exists()
    if not own:
        raise InputError(
            f"--out {target}: holds a profile that no calibration or import of {device} has written"
        )


def write_whole(profile: FittedProfile, points: Sequence[Point], target: Path) -> None:
    """Writes the profile beside the target, then replaces the target: it is always either whole or unchanged.
    Raises InputError if it cannot be written."""
    write_lines(profile, map(cells, points), target)


def write_lines(profile: FittedProfile, lines: Iterable[Sequence[object]], target: Path) -> None:
    """As `write_whole`; `lines`: of points.csv, without its head."""
    try:
        with folder_draft(target, FILES.__contains__) as draft:
            write_fitted(profile, draft)
            _write_points(lines, draft / POINTS)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None


COLUMNS = (
    "kind", "shape", "dtype", "launches", "floor_s", "median_s", "p10_s", "p90_s", "n", "cache", "warm_s",
    "role",
)  # fmt: skip


def _write_points(lines: Iterable[Sequence[object]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)


# Before the number of shapes that a source keeps where others were measured later.
STAY = ", of which stay "
# Before what stands beside the shapes that a source keeps.
BESIDE = "; beside them: "
# What stands for the costs of verbs beside kinds of op.
VERBS = "verbs"


def is_among(kinds: Collection[str], kind: str, dtype: str) -> bool:
    """Whether ops of a kind in a number format are meant: kinds are named whole, or in one format, as in
    "matmul:fp8"."""
    return kind in kinds or in_format(kind, dtype) in kinds


def in_format(kind: str, dtype: str) -> str:
    """Returns the name of a kind of op in one number format."""
    return f"{kind}:{dtype}"


def whole_kind(name: str) -> str:
    """Returns the kind of op of its name, which may have a number format."""
    return name.partition(":")[0]


def measured_of(profile: FittedProfile, kinds: Collection[str]) -> set[str]:
    """Returns those of some kinds of op that a profile has points of, and VERBS if it has costs of them."""
    verbs = {VERBS} if profile.overheads else set[str]()
    each = {(point.kind, point.dtype) for point in profile.points}
    return ({kind for kind, _ in each} | {in_format(*one) for one in each} | verbs) & {*kinds}


def renewed(before: FittedProfile, later: FittedProfile, kinds: Collection[str]) -> FittedProfile:
    """Returns a profile with a later one's fits and points of some kinds of op, and for VERBS its costs, in
    place of its own; kinds of which the later one has none stay. Raises InputError if it is of another
    device, or was not measured."""
    if before.birth is None or later.birth is None or before.device != later.device:
        raise InputError(f"{before.name}: was not measured on {later.device}, so that no kind can be renewed")
    kinds = measured_of(later, kinds)
    kept = [point for point in before.points if not is_among(kinds, point.kind, point.dtype)]
    new = [point for point in later.points if is_among(kinds, point.kind, point.dtype)]
    births = _births_of(kept, before.renewed, kinds)
    own = len(kept) - sum(each.birth.points for each in births)
    births.append(Renewed(tuple(sorted(kinds)), replace(later.birth, points=len(new)), later.notes))
    birth = replace(before.birth, points=own)
    if not own:
        # All of it was measured anew: the first of these is its birth then.
        birth = births.pop(next(i for i, each in enumerate(births) if each.birth.points)).birth
    said = [
        f"{'beside them' if each.beside else ', '.join(each.kinds)}: {each.birth.date.partition('T')[0]}"
        + (f", {each.birth.points} shapes" if each.birth.points else "")
        for each in births
    ]
    costs = later.overheads if VERBS in kinds else {}
    return replace(
        before,
        source="; ".join([f"{before.source.partition(STAY)[0].partition(BESIDE)[0]}{STAY}{own}", *said]),
        fits=(
            *(row for row in before.fits if not is_among(kinds, row.kind, _format_of(row))),
            *(row for row in later.fits if is_among(kinds, row.kind, _format_of(row))),
        ),
        points=(*kept, *new),
        overheads={**before.overheads, **costs},
        birth=birth,
        renewed=tuple(births),
    )


def _births_of(kept: Sequence[Measured], renewed: Sequence[Renewed], kinds: Collection[str]) -> list[Renewed]:
    """Returns the births of what stays of measurements of some kinds. A kind in one format may have been
    measured after the whole: each point is of the last that names it, but for those beside others."""
    births = list[Renewed]()
    left = Counter(in_format(point.kind, point.dtype) for point in kept)
    for each in reversed(renewed):
        names = tuple(name for name in each.kinds if not {name, whole_kind(name)} & {*kinds})
        if each.beside:
            own = {name: each.beside[name] for name in names}
        else:
            own = {name: left[name] for name in left if left[name] and {name, whole_kind(name)} & {*names}}
        left.subtract(own)
        if own or VERBS in names:
            beside = own if each.beside else {}
            stay = tuple(name for name in names if name == VERBS or _has(own, name))
            birth = replace(each.birth, points=sum(own.values()))
            births.insert(0, Renewed(stay, birth, each.notes, beside))
    return births


def _has(names: Iterable[str], kind: str) -> bool:
    """Whether a kind of op, whole or in one format, is among names with formats."""
    return any(kind in (name, whole_kind(name)) for name in names)


def extended(before: FittedProfile, later: FittedProfile) -> FittedProfile:
    """Returns a profile with a later one's points beside its own, and lines of fits for conditions of which
    it had none. Raises InputError if it is of another device, was not measured, or has some of the points."""
    if before.birth is None or later.birth is None or before.device != later.device:
        raise InputError(
            f"{before.name}: was not measured on {later.device}, so that nothing stands beside it"
        )
    has = {(point.kind, point.shape, point.dtype) for point in before.points}
    twice = [point for point in later.points if (point.kind, point.shape, point.dtype) in has]
    if twice:
        raise InputError(f"{before.name}: has {twice[0].kind} {twice[0].shape} already")
    beside = dict(sorted(Counter(in_format(point.kind, point.dtype) for point in later.points).items()))
    birth = replace(later.birth, points=len(later.points))
    lines = {(row.kind, row.where) for row in before.fits}
    date = birth.date.partition("T")[0]
    return replace(
        before,
        source=f"{before.source}{BESIDE}{date}, {birth.points} shapes",
        fits=(*before.fits, *(row for row in later.fits if (row.kind, row.where) not in lines)),
        points=(*before.points, *later.points),
        renewed=(*before.renewed, Renewed(tuple(beside), birth, later.notes, beside)),
    )


def _format_of(row: FitRow) -> str:
    """Returns the number format of a line of fits; its condition begins with it (`condition`)."""
    return row.where.partition(";")[0].removeprefix("dtype=")


def write_renewed(
    target: Path, later: FittedProfile, lines: Iterable[Sequence[object]], kinds: Collection[str]
) -> FittedProfile:
    """Renews kinds of op of the profile folder `target`, see `renewed`; returns the profile. `lines`: of the
    later one's points.csv. Raises InputError if there is no such profile."""
    before = _measured_in(target, later.device)
    profile, kinds = renewed(before, later, kinds), measured_of(later, kinds)
    at_kind, at_format = COLUMNS.index("kind"), COLUMNS.index("dtype")
    kept = [row for row in _lines_of(target) if not is_among(kinds, row[at_kind], row[at_format])]
    new = (line for line in lines if is_among(kinds, *map(str, (line[at_kind], line[at_format]))))
    write_lines(profile, [*kept, *new], target)
    return profile


def _lines_of(target: Path) -> list[list[str]]:
    """Returns the lines of a profile's points.csv, in the order of `COLUMNS`."""
    head, old = read_cells(target / POINTS)
    columns = [head.index(name) if name in head else None for name in COLUMNS]
    return [["" if at is None else row[at] for at in columns] for row in old]


def write_extended(target: Path, later: FittedProfile, lines: Iterable[Sequence[object]]) -> FittedProfile:
    """Adds what a profile lacked to the one in the folder `target`, see `extended`; returns it. `lines`: of
    the later one's points.csv. Raises InputError if there is no such profile."""
    profile = extended(_measured_in(target, later.device), later)
    write_lines(profile, [*_lines_of(target), *lines], target)
    return profile


def _measured_in(target: Path, device: str) -> FittedProfile:
    """Returns the measured profile in a folder. Raises InputError if there is none."""
    found = load_profile(device, str(target / "profile.yaml"))
    if not isinstance(found, FittedProfile):
        raise InputError(f"{target}: holds no measured profile")
    return found


def cells(point: Point) -> list[object]:
    """Returns the cells of a line of points.csv, in the order of `COLUMNS`."""
    op, warm_s = point.op, "" if point.warm_s is None else point.warm_s
    return [
        op.kind, shape_text(op), op.dtype, point.launches, point.floor_s, point.median_s, point.p10_s,
        point.p90_s, point.runs, point.cache, warm_s, point.role,
    ]  # fmt: skip


def as_read(point: Point) -> Measured:
    """Returns a point as it is in a profile read from files."""
    op = point.op
    times = point.floor_s, point.median_s, point.role, point.warm_s, point.cache
    return Measured(op.kind, shape_text(op), op.dtype, point.launches, *times)


def shape_text(op: Op) -> str:
    """Returns a shape as the text of one cell, as in "m=16;n=256"."""
    return ";".join(f"{name}={value}" for name, value in op.shape)
