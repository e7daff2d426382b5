"""Reads recorded requests: when each one came, and how many tokens its prompt and its answer had.

    azure     CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens   (AzureLLMInferenceTrace)
    mooncake  JSON lines: timestamp (ms), input_length, output_length          (Mooncake, FAST'25)
    table     CSV or Parquet (a name that ends in .parquet), columns of any name

    time_s = (time - earliest time) / units per second

Every fault is one line (`InputError`) with the file, the column and the record, counted from 1.
`simcore/vllm_bench.py` reads the results of vLLM's benchmark by the same checks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from simcore.files import InputError, nearest, read_text
from simcore.workload import MOST_LENGTH

AZURE = {"arrival": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"}
MOONCAKE = ("timestamp", "input_length", "output_length")
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "datetime": 10**9}
# Thirty years: what spans more was written in another unit.
MOST_SPAN_S = 1e9

Times = NDArray[np.float64]
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Recorded requests in order of time: `time_s` [n] counts from the first; tokens [n], None where the
    file has none. Arrays are read-only."""

    time_s: Times
    prompt_tokens: Tokens | None
    output_tokens: Tokens | None


def read_azure(path: Path) -> Records:
    """The requests of an Azure trace. Raises InputError."""
    return read_table(path, AZURE, "datetime")


def read_mooncake(path: Path) -> Records:
    """The requests of a Mooncake trace; hash_ids are not used. Raises InputError."""
    lines = enumerate(read_text(path).split("\n"), 1)
    rows = [_json_row(line, f"{path}: line {number}") for number, line in lines if line.strip()]
    if not rows:
        raise InputError(f"{path}: holds no requests")
    times, prompts, outputs = (
        from_list(values, name, path) for values, name in zip(zip(*rows, strict=True), MOONCAKE, strict=True)
    )
    return records(
        path,
        checked_times(times, MOONCAKE[0], path),
        PER_SECOND["ms"],
        checked_tokens(prompts, MOONCAKE[1], path),
        checked_tokens(outputs, MOONCAKE[2], path),
    )


def _json_row(line: str, where: str) -> tuple[object, ...]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not valid JSON") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: must be a mapping, {{...}}")
    for name in MOONCAKE:
        if name not in row:
            raise InputError(f"{where}: no {name!r}{nearest(name, row)}")
    return itemgetter(*MOONCAKE)(row)  # type: ignore[no-any-return]


def read_table(path: Path, columns: Mapping[str, str], time_unit: str) -> Records:
    """The requests of a CSV or Parquet file. `columns` names those of `arrival` and, where there are such,
    `prompt` and `output`; `time_unit` is a key of `PER_SECOND`. Raises InputError."""
    if "arrival" not in columns:
        raise InputError(f"{path}: columns.arrival is missing: which column says when requests came")
    table = _columns(path, list(columns.values()))
    name = columns["arrival"]
    read = _moments if time_unit == "datetime" else _times
    times = read(table[name], name, path)
    tokens = {
        role: checked_tokens(_numbers(table[columns[role]], columns[role], path), columns[role], path)
        for role in ("prompt", "output")
        if role in columns
    }
    return records(path, times, PER_SECOND[time_unit], tokens.get("prompt"), tokens.get("output"))


def read_lengths(path: Path, column: str) -> Tokens:
    """The lengths in a column of a CSV or Parquet file, each at least 1 token. Raises InputError."""
    values = _numbers(_columns(path, [column])[column], column, path)
    found = checked_tokens(values, column, path, low=1)
    if not len(found):
        raise InputError(f"{path}: column {column!r} is empty")
    found.flags.writeable = False
    return found


def records(
    path: Path, times: NDArray[Any], per_second: int, prompts: Tokens | None, outputs: Tokens | None
) -> Records:
    """Checked columns as `Records`, sorted by time; requests of one time keep their order.

    `times` [n] are whole or broken numbers of 1/per_second s. Raises InputError where there are none, or
    where they span more than `MOST_SPAN_S`.
    """
    if not len(times):
        raise InputError(f"{path}: holds no requests")
    # By Python's numbers: the difference of two int64 may be none.
    span_s = (times.max().item() - times.min().item()) / per_second
    if span_s > MOST_SPAN_S:
        raise InputError(f"{path}: its times span {span_s:.3g} s: is their unit right?")
    # Whole numbers are subtracted as such: nanoseconds since 1970 are too many digits for a float.
    time_s = (times - times.min()) / per_second
    columns: list[NDArray[Any] | None] = [time_s, prompts, outputs]
    if np.any(time_s[1:] < time_s[:-1]):
        order = np.argsort(time_s, kind="stable")
        columns = [None if column is None else column[order] for column in columns]
    for column in columns:
        if column is not None:
            column.flags.writeable = False
    return Records(*columns)  # type: ignore[arg-type]


# -- checks ----------------------------------------------------------------------------------------


def checked_times(values: NDArray[Any], name: str, path: Path) -> NDArray[Any]:
    """`values` [n], each a number from 0 on. Raises InputError."""
    good = (values >= 0) & (values < np.inf)
    if not good.all():
        _refuse(int(np.argmin(good)), values, name, path, "a number, at least 0")
    return values


def checked_tokens(values: NDArray[Any], name: str, path: Path, low: int = 0) -> Tokens:
    """`values` [n] as whole numbers from `low` to `MOST_LENGTH`. Raises InputError."""
    good = (values >= low) & (values <= MOST_LENGTH)
    if values.dtype.kind == "f":
        good &= np.floor(values) == values
    if not good.all():
        _refuse(int(np.argmin(good)), values, name, path, f"a whole number from {low} to {MOST_LENGTH}")
    return values.astype(np.int64)


def from_list(values: Sequence[object], name: str, path: Path) -> NDArray[Any]:
    """A list out of JSON as an array of numbers. Raises InputError where one of them is none."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths in it
        array = np.empty((0, 0))
    if array.ndim == 1 and array.dtype.kind in "iuf":
        return array
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) >= 2**63:
            _refuse(index, values, name, path, "a number")
    raise InputError(f"{path}: {name}: must be a list of numbers")


def _refuse(index: int, values: Any, name: str, path: Path, allowed: str) -> NoReturn:
    got = str(values[index])[:40]
    raise InputError(f"{path}: record {index + 1}: {name} must be {allowed}, got {got!r}")


# -- columns of tables -----------------------------------------------------------------------------


def _columns(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Columns of a CSV or Parquet file by name, as Arrow arrays; the others are not read."""
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if empty:
        raise InputError(f"{path}: is empty")
    kind = "Parquet" if path.suffix == ".parquet" else "CSV"
    try:
        table = (_parquet if kind == "Parquet" else _csv)(path, list(dict.fromkeys(names)))
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"{path}: not valid {kind}: {reason}") from None
    return {name: table[name].combine_chunks() for name in names}


def _csv(path: Path, names: list[str]) -> Any:
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    with pa.csv.open_csv(path, parse_options=parse) as head:
        try:
            held = head.schema.names
        except UnicodeDecodeError:
            raise InputError(f"{path}: its head is not UTF-8 text") from None
        _check_names(path, names, held)
    convert = pa.csv.ConvertOptions(include_columns=names)
    return pa.csv.read_csv(path, parse_options=parse, convert_options=convert)


def _parquet(path: Path, names: list[str]) -> Any:
    with pa.parquet.ParquetFile(path) as file:
        _check_names(path, names, file.schema_arrow.names)
        return file.read(columns=names)


def _check_names(path: Path, names: Sequence[str], held: list[str]) -> None:
    for name in names:
        if name not in held:
            raise InputError(f"{path}: no column {name!r}{nearest(name, held)}")
        if held.count(name) > 1:
            raise InputError(f"{path}: column {name!r} is there twice")


def _times(column: Any, name: str, path: Path) -> NDArray[Any]:
    if pa.types.is_temporal(column.type):
        raise InputError(f"{path}: {name} holds dates and times: it needs time_unit: datetime")
    return checked_times(_numbers(column, name, path), name, path)


def _numbers(column: Any, name: str, path: Path) -> NDArray[Any]:
    """An Arrow array as int64 or float64 [n]."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        raise InputError(f"{path}: {name} must hold numbers, it holds {kind}")
    wanted = pa.int64() if pa.types.is_integer(kind) else pa.float64()
    return _cast(column, wanted, name, path, "a number")


def _moments(column: Any, name: str, path: Path) -> NDArray[Any]:
    """An Arrow array of dates and times as int64 [n], nanoseconds since 1970."""
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        raise InputError(f"{path}: {name} holds numbers: it needs time_unit: s, ms, us or ns")
    zone = getattr(kind, "tz", None)
    return _cast(column, pa.timestamp("ns", zone), name, path, "a date and time").view(np.int64)


def _cast(column: Any, wanted: Any, name: str, path: Path, allowed: str) -> NDArray[Any]:
    if column.null_count:
        index = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise InputError(f"{path}: record {index + 1}: {name} is empty or NaN")
    try:
        return np.asarray(column.cast(wanted).to_numpy(zero_copy_only=False))
    except pa.ArrowException:
        text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        values = column.to_pylist() if text else []
        for index, value in enumerate(values):
            if not _casts(value, wanted):
                _refuse(index, values, name, path, allowed)
        raise InputError(f"{path}: {name} must hold {allowed} in each record, not {column.type}") from None


def _casts(value: str, wanted: Any) -> bool:
    try:
        pa.scalar(value).cast(wanted)
    except pa.ArrowException:
        return False
    return True
