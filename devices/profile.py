"""Times of one model's ops on one device, as published or measured: a table, not a formula.

A profile is a folder `profiles/<device>/<profile>/`: `profile.yaml` describes the runs and the assumed times,
`ops.csv` has the measured times. Several rows may belong to one op of the model; at one context

    seconds(op, ranks, context) = sum of nanoseconds of its rows * 1e-9

A row without a context holds at every context. If a source times only whole decode iterations, the table has
one op, `iteration`, and its rows differ in the number of sequences:

    seconds(iteration, ranks, sequences) = likewise

A profile of granularity `fitted` or `measured` is no table: `simcore.devices.fitted` reads it.
`load_profile` returns either kind.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass as plain_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from simcore.devices.fitted import FITS, FITTED, MEASURED, POINTS, FittedProfile, read_fitted, read_rows
from simcore.input.files import (
    STRICT,
    Count,
    InputError,
    NonNegative,
    is_path,
    read_yaml,
    unknown_name,
    validated,
)
from simcore.ops.op import DTYPE_BYTES

PROFILES = Path(__file__).resolve().parent / "profiles"
# Files that a profile may consist of.
FILES = ("profile.yaml", "ops.csv", FITS, POINTS)
Stamp = tuple[str, int, int, int]
ITERATION = "iteration"
# The units that a profile times: see `Profile` and `simcore.devices.fitted`.
Granularity = Literal["ops", "parts", "iteration"]
GRANULARITIES = (*get_args(Granularity), FITTED, MEASURED)
# Number of profiles that stay in memory.
KEPT = 8
# A scenario's `profile` for no profile.
NO_PROFILE = "none"
WEIGHTS = ("activation", "kv", "qkv", "o", "gate", "up", "down", "lm_head")


# No op takes less or more.
Nanoseconds = Annotated[float, Field(ge=1e-3, le=1e15)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Row:
    """One line of `ops.csv`. `table` is its place in the source, `op_code` the source's name, `op` the name
    of the op in simcore; `how` is "derived" if the time follows from other printed figures; `plus_minus_ns`
    is half of the last printed digit. Only iterations have `sequences`, and their `part` is "whole"."""

    table: str
    ranks: Count
    part: Literal["layer", "outside", "whole"]
    row: Count
    op_code: str
    nanoseconds: Nanoseconds
    op: str
    context_tokens: Count | None = None
    how: Literal["measured", "derived"] = "measured"
    plus_minus_ns: NonNegative = 0.0
    sequences: Count | None = None


@dataclass(frozen=True, config=STRICT)
class Assumed:
    """A time that the source does not give, and the reason for its value."""

    seconds: NonNegative
    why: str


@dataclass(frozen=True, config=STRICT)
class Profile:
    """The times of one model at one batch (None: at any batch, only for iterations).

    `context_tokens` are the contexts at which the tables hold, `chunk_tokens` the chunk of the
    speculative attention, `ranks` the tensor-parallel rank counts that were run. `granularity` is
    "ops", "parts" if only attention and the rest were timed apart, or "iteration" if only whole
    decode iterations were timed. `assumed` is keyed by an op's name or kind ("pre_processing", a prompt's
    pass through the model, say), or "early_part" for the time at which a speculative attention sends its
    early part.
    """

    name: str
    title: str
    source: str
    device: str
    model: str
    batch: Count | None
    context_tokens: tuple[Count, ...]
    granularity: Granularity
    dtypes: dict[str, str]
    chunk_tokens: Count | None
    ranks: tuple[Count, ...]
    assumed: dict[str, Assumed]
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        for key, dtype in self.dtypes.items():
            if key not in WEIGHTS:
                raise InputError(f"dtypes: {unknown_name('key', key, WEIGHTS)}")
            if dtype not in DTYPE_BYTES:
                raise InputError(f"dtypes.{key}: {unknown_name('dtype', dtype, DTYPE_BYTES)}")
        there = sorted({row.ranks for row in self.rows})
        if there != sorted(self.ranks):
            raise InputError(f"ranks says {sorted(self.ranks)}, the rows have {there}")
        self._check_granularity()

    def _check_granularity(self) -> None:
        whole = self.granularity == ITERATION
        if (self.batch is None) != whole:
            raise InputError("batch: is null with granularity iteration, which holds for any, and only then")
        if whole and any(row.op != ITERATION or row.context_tokens for row in self.rows):
            raise InputError("with granularity iteration, rows are of op iteration, without context_tokens")
        if any((row.sequences is not None) != whole for row in self.rows):
            raise InputError("every row has sequences with granularity iteration, and no row otherwise")

    def applies_to(self, model: str, batch: int, ranks: int) -> str | None:
        """Returns None if this profile holds for such a run, else the reason in one line."""
        if model != self.model:
            return f"profile {self.name} holds for model {self.model}, not {model}"
        if self.batch is not None and batch != self.batch:
            return f"profile {self.name} holds for batch {self.batch}, not {batch}"
        if ranks not in self.ranks:
            return f"profile {self.name} has ranks {', '.join(map(str, self.ranks))}, not {ranks}"
        return None


@plain_dataclass(frozen=True, slots=True)
class Point:
    """The time of an op at one context (None: at every context), with half its rounding, in seconds. The time
    of an iteration is at a number of sequences instead."""

    context_tokens: int | None
    seconds: float
    plus_minus_s: float
    detail: str
    sequences: int | None = None


def points(profile: Profile, ranks: int) -> Mapping[str, tuple[Point, ...]]:
    """Returns the points of each op at this rank count, by context or by sequences.

    Raises InputError if an op has rows both with and without a context.
    """
    rows: dict[str, dict[int | None, list[Row]]] = {}
    for row in profile.rows:
        if row.ranks == ranks:
            place = row.context_tokens if row.sequences is None else row.sequences
            rows.setdefault(row.op, {}).setdefault(place, []).append(row)
    for op, places in rows.items():
        if None in places and len(places) > 1:
            raise InputError(f"profile {profile.name}: {op} has rows both with and without a context")
    return {
        op: tuple(_point(places[place]) for place in sorted(places, key=lambda p: p or 0))
        for op, places in rows.items()
    }


def _point(rows: list[Row]) -> Point:
    codes = " + ".join(row.op_code for row in rows)
    derived = "derived from " if any(row.how == "derived" for row in rows) else ""
    table = f"table {rows[0].table}" if rows[0].table.isdecimal() else rows[0].table
    return Point(
        rows[0].context_tokens,
        sum(row.nanoseconds for row in rows) * 1e-9,
        sum(row.plus_minus_ns for row in rows) * 1e-9,
        f"{derived}{table}, {rows[0].ranks} rank{'s' * (rows[0].ranks > 1)}: {codes}",
        rows[0].sequences,
    )


def profile_names(device: str) -> list[str]:
    """Returns the names of the profiles shipped for this device, sorted; none for an unknown device."""
    return sorted(path.parent.name for path in (PROFILES / device).glob("*/profile.yaml"))


def has_profile(device: str, name: str) -> bool:
    """Whether a device has this profile; True for any path, which `load_profile` checks."""
    return is_path(name, ".yaml") or name in profile_names(device)


def load_profile(device: str, name_or_path: str) -> Profile | FittedProfile:
    """Loads a profile of a device; a name with a '/' in it, or that ends in .yaml, is the path of a user's
    profile.yaml or of its folder.

    Raises InputError with one line if the name is unknown or the files are invalid.
    """
    if is_path(name_or_path, ".yaml"):
        given = Path(name_or_path)
        path = given if given.suffix == ".yaml" else given / "profile.yaml"
    elif name_or_path in profile_names(device):
        path = PROFILES / device / name_or_path / "profile.yaml"
    else:
        raise InputError(unknown_name(f"profile of {device}", name_or_path, profile_names(device)))
    profile = _read(path, tuple(_stamps(path.parent)))
    if profile.device != device:
        raise InputError(f"{path}: device: holds for {profile.device}, not {device}")
    return profile


# The profile of a card has some 20,000 points; studies with many cases load it in each case.
@lru_cache(maxsize=KEPT)
def _read(path: Path, stamps: tuple[Stamp, ...]) -> Profile | FittedProfile:
    """Reads the profile at `path`. `stamps` of its files are part of the cache key: a changed profile is read
    again."""
    del stamps
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError(f"{path}: is no profile: keys and values are needed")
    granularity = document.get("granularity")
    if granularity not in GRANULARITIES:
        fault = unknown_name("value", str(granularity or ""), GRANULARITIES)
        raise InputError(f"{path}: granularity: {fault}")
    fitted = granularity in (FITTED, MEASURED)
    return read_fitted(document, path) if fitted else _read_table(document, path)


def _stamps(folder: Path) -> Iterator[Stamp]:
    """Yields name, inode, time of the last change and size of each existing file of a profile."""
    for name in FILES:
        with suppress(OSError):
            stat = (folder / name).stat()
            yield name, stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read_table(document: dict[str, Any], path: Path) -> Profile:
    if "rows" in document:
        raise InputError(f"{path}: rows: they belong into ops.csv")
    rows = read_rows(path.parent / "ops.csv", Row)
    return validated(Profile, {**document, "rows": rows}, str(path))
