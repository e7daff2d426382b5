"""Times of ops on one device by two fitted constants per kind: a formula for any model and batch.

A fitted profile is a folder `profiles/<device>/<profile>/`: `profile.yaml` (granularity: fitted) has its
origin, `fits.csv` has a line for each kind of op:

    kind,where,kernel_s,efficiency,low,high,n,least_floor_s,most_floor_s,form,source

`where` has the conditions on an op besides its kind, as in "dtype=fp32;batch=16;m=5..16": its dtype, or a
dimension of its shape, with one value or a range ("65.." has no end). Of the lines that hold, the one with
most conditions is used; of several such, the first. `simcore.devices.fit` explains the numbers.

With granularity `measured` the fitted shapes are used too: they are in `points.csv`, and correct the fit for
ops near them (`simcore.devices.interpolation`).
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import yaml
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from simcore.devices.fit import LEAST_CHECKS, Fit, checked_interval
from simcore.devices.interpolation import Correction, Measured, correction, staying_bytes
from simcore.devices.spec import check_return
from simcore.input.files import (
    STRICT,
    Count,
    InputError,
    NonNegative,
    Positive,
    Seconds,
    Share,
    read_cells,
    read_yaml,
    unknown_name,
    validated,
)
from simcore.machine.machine import Overheads
from simcore.ops.op import DTYPE_BYTES, Op

FITTED, MEASURED = "fitted", "measured"
# The line of a CSV file with the first row.
FIRST_LINE = 2
FITS, POINTS = "fits.csv", "points.csv"
DTYPE = "dtype"
# The dimensions and the format of an op or of a point, by name; and what a line asks of one of them: its
# name, and from which number to which, or the only value.
Own = Mapping[str, object]
Condition = tuple[str, int, int | None, int | str | None]
# Source of operands (column `cache`): the cache, because the op before has just written them.
WRITTEN = "as written"
RANGE = re.compile(r"[0-9]+(\.\.[0-9]*)?")
OVERHEADS = tuple(field.name for field in fields(Overheads))


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class FitRow:
    """One line of `fits.csv`; see the head of this file and `simcore.devices.fit`. `form`: the fitted floor,
    of the roofline ("floor") or of the waves in which a kernel's blocks run ("waves",
    `simcore.devices.waves`)."""

    kind: str
    kernel_s: NonNegative
    efficiency: Positive
    low: NonNegative
    high: Positive
    n: Count
    least_floor_s: NonNegative
    most_floor_s: NonNegative
    source: str
    where: str = ""
    form: Literal["floor", "waves"] = "floor"

    def __post_init__(self) -> None:
        if not self.low <= 1.0 <= self.high:
            raise InputError(f"{self.kind}: low <= 1 <= high does not hold: {self.low}, {self.high}")
        if self.least_floor_s > self.most_floor_s:
            raise InputError(f"{self.kind}: least_floor_s is above most_floor_s")
        parse_where(self.where)

    @property
    def fit(self) -> Fit:
        """The constants and their range."""
        return Fit(
            self.kernel_s,
            self.efficiency,
            self.low,
            self.high,
            self.n,
            self.least_floor_s,
            self.most_floor_s,
        )


@dataclass(frozen=True, config=STRICT)
class Birth:
    """How a profile was measured; None where a table of others does not say."""

    date: str = Field(description="when it was measured")
    processor: str = Field(description="on what")
    threads: Count | None = Field(description="on how many threads of a CPU")
    versions: dict[str, str] = Field(description="with what software, by name")
    points: int = Field(ge=0, description="shapes that were measured: lines of points.csv; of verbs none")
    runs: Count | None = Field(description="runs of each shape")
    spread: NonNegative | None = Field(
        description="width of the middle 80 % of a shape's runs over their median; the median over all shapes"
    )
    rates: dict[str, NonNegative] = Field(
        description="what the machine reached besides, bytes/s or flop/s, for the record"
    )


@dataclass(frozen=True, config=STRICT)
class Renewed:
    """A later measurement of some kinds of op, which has taken the place of an earlier one, or of more of
    their shapes, which stand beside those that stay."""

    kinds: tuple[str, ...] = Field(description="of which kinds of op", min_length=1)
    birth: Birth = Field(description="how they were measured")
    notes: tuple[str, ...] = Field(default=(), description="what to know of that")
    beside: dict[str, Count] = Field(
        default={}, description="shapes beside those that stay, by kind and number format"
    )


# What constants of contention were called in profiles before.
RENAMED = {"leaves_s": "tail_overlap_s", "reach": "bandwidth_share"}


@dataclass(frozen=True, config=STRICT)
class SharedUse:
    """The constants of the law by which graphs on one device slow each other down (`shared_reads` of
    `simcore.sim.contention`), measured."""

    tail_overlap_s: Seconds = Field(description="seconds of each kernel in which another stream's may begin")
    reuse_s: Seconds = Field(description="gap within which instances share weights that they read, s")
    bandwidth_share: Share = Field(description="share of the memory's rate that graphs reach together")
    cases: Count = Field(description="cases that were fitted to")
    judged: Count = Field(description="other cases, by which the law was judged")
    error_pct: NonNegative = Field(description="how far predicted times of those were off, %, the median")
    processor: str = Field(description="on what it was measured")
    date: str = Field(description="when it was measured")
    kernels_between: Positive = Field(
        default=1.0,
        description="in services, kernels of a decode step that get in between two of a prompt",
        le=100.0,
    )


@dataclass(frozen=True, config=STRICT)
class LimitedPower:
    """The constants of the law by which a card at its power cap throttles its clock (`simcore.sim.power`),
    measured; powers in shares of the cap."""

    arithmetic: Positive = Field(
        description="power of ops that arithmetic bounds, at the full clock", le=10.0
    )
    others: NonNegative = Field(description="power of ops that memory bounds", le=1.0)
    idle: NonNegative = Field(description="power of an idle card", le=1.0)
    over_s: Positive = Field(description="time constant of the moving average of power, s")
    cases: Count = Field(description="cases that were fitted to")
    error_pct: NonNegative = Field(description="median error of the times of products in them, %")
    processor: str = Field(description="on what it was measured")
    date: str = Field(description="when it was measured")

    def __post_init__(self) -> None:
        if self.idle > self.others:
            raise InputError(f"idle: is {self.idle:g}; no more than others, {self.others:g}, is allowed")


@dataclass(frozen=True, config=STRICT)
class FittedProfile:
    """The fits of a device."""

    name: str = Field(description="what the profile is called")
    title: str = Field(description="what it holds, in words")
    source: str = Field(description="where its times come from")
    device: str = Field(description="device that it is of")
    granularity: Literal["fitted", "measured"] = Field(
        description="fitted: constants by kind of op (fits.csv); measured: times of shapes too (points.csv)"
    )
    fits: tuple[FitRow, ...] = Field(description="lines of fits.csv")
    overheads: dict[str, Seconds] = Field(
        description="what launches, waits and messages cost, in place of the device's own, s, by name"
    )
    birth: Birth | None = Field(
        default=None, description="how it was measured; null: fitted to others' figures"
    )
    renewed: tuple[Renewed, ...] = Field(
        default=(), description="kinds of op that were measured later than the others, each time by itself"
    )
    notes: tuple[str, ...] = Field(default=(), description="what to know of it")
    points: tuple[Measured, ...] = Field(
        default=(), description="lines of points.csv, with granularity measured"
    )
    contention: SharedUse | None = Field(
        default=None, description="how graphs slow each other down, where several at a time were measured too"
    )
    power: LimitedPower | None = Field(
        default=None, description="how much longer arithmetic takes under load, if that was measured too"
    )

    def __post_init__(self) -> None:
        for name in self.overheads:
            if name not in OVERHEADS:
                raise InputError(f"overheads: {unknown_name('key', name, OVERHEADS)}")
        check_return(self.overheads)
        if not self.fits:
            raise InputError(f"{FITS} has no line")
        if bool(self.points) != (self.granularity == MEASURED):
            raise InputError(f"granularity {self.granularity} with {len(self.points)} lines of {POINTS}")
        seen = set()
        for row in self.fits:
            key = (row.kind, frozenset(parse_where(row.where).items()))
            if key in seen:
                raise InputError(f"{FITS}: {row.kind} {row.where or '(anywhere)'} is given twice")
            seen.add(key)

    @cached_property
    def by_kind(self) -> Mapping[str, tuple[tuple[Mapping[str, str], FitRow], ...]]:
        """The lines of each kind with their conditions, lines with most conditions first."""
        found: dict[str, list[tuple[Mapping[str, str], FitRow]]] = {}
        for row in self.fits:
            found.setdefault(row.kind, []).append((parse_where(row.where), row))
        return {kind: tuple(sorted(rows, key=lambda r: -len(r[0]))) for kind, rows in found.items()}

    @cached_property
    def in_cache(self) -> "FittedProfile":
        """The profile for ops whose operands are in the cache: with the times measured there; the profile
        itself if none was measured."""
        if all(point.warm_s is None for point in self.points):
            return self
        warm = [p if p.warm_s is None else replace(p, median_s=p.warm_s, cache="") for p in self.points]
        return replace(self, points=tuple(warm))

    @cached_property
    def as_written(self) -> frozenset[str]:
        """The kinds measured on operands in the cache that the ops before them had just written."""
        return frozenset(point.kind for point in self.points if point.cache == WRITTEN)

    def row(self, op: Op) -> FitRow | None:
        """Returns the line that holds for an op, or None."""
        return self._line(op.kind, {**dict(op.shape), DTYPE: op.dtype})

    def _line(self, kind: str, own: Own) -> FitRow | None:
        for conditions, row in self._conditions.get(kind, ()):
            if _holds(conditions, own):
                return row
        return None

    @cached_property
    def _conditions(self) -> Mapping[str, Sequence[tuple[Sequence[Condition], FitRow]]]:
        """The lines of `by_kind`, their conditions as `_holds` reads them."""
        return {
            kind: [(_conditions_of(where), row) for where, row in lines]
            for kind, lines in self.by_kind.items()
        }

    def is_general(self, row: FitRow) -> bool:
        """Whether a line is the fallback for ops without a line of their own, while other ops of its kind
        have one: another model's matrices, say. Measurements near such an op do not apply to it."""
        return (row.kind, row.where) in self._general

    @cached_property
    def _general(self) -> frozenset[tuple[str, str]]:
        lines = [(row.kind, row.where, parse_where(row.where)) for row in self.fits if self.points]
        return frozenset(
            (kind, text)
            for kind, text, where in lines
            if any(other == kind and _narrows(narrow, where) for other, _, narrow in lines)
        )

    def correction(self, row: FitRow) -> Correction | None:
        """Returns the correction of a line's fit by the shapes measured where it holds; None if there are
        none, or the line is general. Its interval is from the check shapes of this kind and dtype, if there
        are enough."""
        key = (row.kind, row.where)
        if key not in self._corrections:
            known = self._checked(row.kind, parse_where(row.where).get(DTYPE, ""))
            plain = None if self.is_general(row) else self._plain(row, judged=known is None)
            found = replace(plain, low=known[0], high=known[1]) if plain and known else plain
            self._corrections[key] = found
        return self._corrections[key]

    @cached_property
    def _corrections(self) -> dict[tuple[str, str], Correction | None]:
        """Corrections computed so far: a profile has hundreds of lines, and a run needs few."""
        return {}

    @cached_property
    def _intervals(self) -> dict[tuple[str, str], tuple[float, float] | None]:
        return {}

    def _plain(self, row: FitRow, *, judged: bool) -> Correction | None:
        where = parse_where(row.where)
        every = self._measured.get((row.kind, "fit"), ())
        alike = [self._alike.get((row.kind, *each), ()) for each in where.items() if ".." not in each[1]]
        asked = _conditions_of(where)
        near = [point for point in min(alike, key=len, default=every) if _holds(asked, _own(point))]
        return correction(row.fit, near, judged=judged) if near else None

    @cached_property
    def _alike(self) -> Mapping[tuple[str, str, str], Sequence[Measured]]:
        """The points of the fits, by kind and by the value of each dimension."""
        found: dict[tuple[str, str, str], list[Measured]] = {}
        for point in self.points:
            if point.role == "fit":
                for name, value in _own(point).items():
                    found.setdefault((point.kind, name, str(value)), []).append(point)
        return found

    def _checked(self, kind: str, dtype: str) -> tuple[float, float] | None:
        key = (kind, dtype)
        if key not in self._intervals:
            points = [p for p in self._measured.get((kind, "check"), ()) if p.dtype == dtype]
            errors = [off for _, off in self._errors(points)]
            known = checked_interval(np.array(errors)) if len(errors) >= LEAST_CHECKS else None
            self._intervals[key] = known
        return self._intervals[key]

    def errors(self) -> Iterator[tuple[Measured, float]]:
        """Yields log(measured / predicted) at each check shape, which no fit uses."""
        return self._errors([point for point in self.points if point.role == "check"])

    def _errors(self, checks: Sequence[Measured]) -> Iterator[tuple[Measured, float]]:
        plain: dict[tuple[str, str], Correction | None] = {}
        for point in checks:
            row = self._line(point.kind, _own(point))
            if row is None or self.is_general(row):
                continue
            key = (row.kind, row.where)
            if key not in plain:
                plain[key] = self._plain(row, judged=False)
            near = plain[key]
            off = near.error(row.fit, point) if near else None
            if off is not None:
                yield point, off

    @cached_property
    def _measured(self) -> Mapping[tuple[str, str], Sequence[Measured]]:
        """The points of each kind and role."""
        found: dict[tuple[str, str], list[Measured]] = {}
        for point in self.points:
            found.setdefault((point.kind, point.role), []).append(point)
        return found


def _narrows(where: Mapping[str, str], than: Mapping[str, str]) -> bool:
    """Whether a line has all conditions of another, and single values of further dimensions."""
    more = {name for name, value in where.items() if ".." not in value} - {*than}
    return bool(more) and all(where.get(name) == value for name, value in than.items())


def _own(point: Measured) -> Own:
    return {**point.dimensions, DTYPE: point.dtype}


def _conditions_of(where: Mapping[str, str]) -> Sequence[Condition]:
    found = list[Condition]()
    for name, wanted in where.items():
        low, dots, high = wanted.partition("..")
        if dots:
            found.append((name, int(low), int(high) if high else None, None))
        else:
            found.append((name, 0, 0, int(wanted) if wanted.isdecimal() else wanted))
    return found


def _holds(conditions: Sequence[Condition], own: Own) -> bool:
    for name, low, high, only in conditions:
        value = own.get(name)
        if only is not None:
            if value != only:
                return False
        elif not isinstance(value, int) or value < low or (high is not None and value > high):
            return False
    return True


def parse_where(text: str) -> dict[str, str]:
    """Returns the conditions in a cell of column `where`. Raises InputError if it is not "name=value;...".

    >>> parse_where("dtype=fp32;m=5..16")
    {'dtype': 'fp32', 'm': '5..16'}
    """
    found: dict[str, str] = {}
    for condition in text.split(";") if text else ():
        name, equals, value = (word.strip() for word in condition.partition("="))
        known = RANGE.fullmatch(value) if name != DTYPE else value in DTYPE_BYTES
        if not (name and equals and known) or name in found:
            raise InputError(f'where: {text!r} is not as in "dtype=fp32;batch=16;m=5..16"')
        found[name] = value
    return found


def profile_schema() -> dict[str, Any]:
    """Returns the JSON schema of a fitted or measured profile's profile.yaml, for editors."""
    schema = TypeAdapter(FittedProfile).json_schema()
    for name, row in (("fits", FitRow), ("points", Measured)):
        # These have files of their own.
        del schema["properties"][name], schema["$defs"][row.__name__]
    schema["required"] = [name for name in schema["required"] if name not in ("fits", "points")]
    return schema


def read_fitted(document: Mapping[str, Any], path: Path) -> FittedProfile:
    """Returns the profile in `document`, read from `path`, with the fits.csv beside it and, if it is
    measured, the points.csv. Raises InputError with one line if any of them is invalid."""
    for name, file in (("fits", FITS), ("points", POINTS)):
        if name in document:
            raise InputError(f"{path}: {name}: they belong into {file}")
    document = _with_names_of_today(document)
    given = read_rows(path.parent / FITS, FitRow)
    points = _read_points(path.parent / POINTS) if document.get("granularity") == MEASURED else []
    try:
        profile = validated(FittedProfile, {**document, "fits": given, "points": points}, str(path))
    except InputError as error:
        raise InputError(_in_its_file(str(error), path)) from None
    _check_whole(profile, path.parent)
    return profile


def _with_names_of_today(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a profile with the constants of contention under their names, which older profiles lack."""
    contention = document.get("contention")
    if not isinstance(contention, Mapping):
        return document
    renamed = {RENAMED.get(name, name): value for name, value in contention.items()}
    return {**document, "contention": renamed} if len(renamed) == len(contention) else document


def read_rows(path: Path, kind: Any) -> list[dict[str, str]]:
    """Returns the rows of a CSV file as text; its columns must be fields of a dataclass. Empty cells are left
    out, so that the fields take their defaults. Raises InputError."""
    columns = [field.name for field in fields(kind)]
    head, rows = read_cells(path)
    for name in head:
        if name not in columns:
            raise InputError(f"{path}: {unknown_name('column', name, columns)}")
    return [{key: cell for key, cell in zip(head, row, strict=True) if cell} for row in rows]


def _read_points(path: Path) -> list[dict[str, str]]:
    """Returns the fields of `Measured` in each line; other columns, as the spread of runs, are not read."""
    names = [field.name for field in fields(Measured)]
    head, rows = read_cells(path)
    for name in names:
        if name not in head and name != "warm_s":
            raise InputError(f"{path}: has no column {name}")
    kept = [(name, head.index(name)) for name in names if name in head]
    return [{name: row[at] for name, at in kept if row[at]} for row in rows]


def _in_its_file(message: str, path: Path) -> str:
    """Returns an error's message with the CSV file and line of a faulty fit or point."""
    for name, file in (("fits", FITS), ("points", POINTS)):
        found = re.fullmatch(rf"{re.escape(str(path))}: (.*?)\b{name}\.(\d+)\.?(.*)", message, re.DOTALL)
        if found:
            before, row, after = found.groups()
            return f"{path.parent / file}: line {int(row) + FIRST_LINE}: {before}{after.lstrip(': ')}"
    return message


def _check_whole(profile: FittedProfile, folder: Path) -> None:
    """Raises InputError if a measured profile lacks lines or its birth, or its points contradict each
    other."""
    if profile.granularity != MEASURED:
        return
    if profile.birth is None:
        raise InputError(
            f"{folder / 'profile.yaml'}: birth: is missing; a measured profile says how it was measured"
        )
    said = [profile.birth.points, *(later.birth.points for later in profile.renewed)]
    if len(profile.points) != sum(said):
        points = " + ".join(map(str, said))
        there = f"{len(profile.points)} lines, and profile.yaml says birth.points: {points}"
        raise InputError(f"{folder / POINTS}: {there}")
    for kind in sorted({point.kind for point in profile.points}):
        try:
            staying_bytes([point for point in profile.points if point.kind == kind])
        except InputError as error:
            raise InputError(f"{folder / POINTS}: {kind}: {error}") from None
    missing = {point.kind for point in profile.points} - {row.kind for row in profile.fits}
    if missing:
        raise InputError(
            f"{folder / FITS}: no line for {', '.join(sorted(missing))}, of which {POINTS} has some"
        )


def write_fitted(profile: FittedProfile, folder: Path) -> None:
    """Writes profile.yaml and fits.csv into an existing folder; `read_fitted` reads the same profile, if a
    measured profile's points.csv is there too."""
    document = {key: value for key, value in asdict(profile).items() if key not in ("fits", "points")}
    for name in ("contention", "power", "renewed"):
        if not document[name]:
            del document[name]
    for later in document.get("renewed", ()):
        if not later["beside"]:
            del later["beside"]
    _write_document(document, folder)
    out = io.StringIO()
    names = ("kind", "where", *(f for f in asdict(profile.fits[0]) if f not in ("kind", "where", "source")))
    writer = csv.DictWriter(out, [*names, "source"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in profile.fits)
    (folder / FITS).write_text(out.getvalue(), encoding="utf-8")


def write_law(found: SharedUse | LimitedPower, folder: Path) -> None:
    """Replaces the constants of a law in the profile.yaml of a folder; the rest stays. Raises InputError if
    it is no fitted or measured profile."""
    document = read_yaml(folder / "profile.yaml")
    if not isinstance(document, dict) or document.get("granularity") not in (FITTED, MEASURED):
        raise InputError(f"{folder / 'profile.yaml'}: is no fitted or measured profile")
    name = "contention" if isinstance(found, SharedUse) else "power"
    _write_document({**document, name: asdict(cast(Any, found))}, folder)


def _write_document(document: Mapping[str, Any], folder: Path) -> None:
    text = yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=110)
    part = folder / ".profile.yaml.part"
    part.write_text(text, encoding="utf-8")
    part.replace(folder / "profile.yaml")
