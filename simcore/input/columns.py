"""Reads columns of CSV and Parquet files as arrays of numbers, times and texts, with Arrow.

Every fault is one line (`InputError`) with the file, the column and the record, counted from 1.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from numpy.typing import NDArray

from simcore.input.files import InputError, check_plain, nearest, plain, shown
from simcore.input.records import checked_times, refuse

# The largest recorded trace.
MOST_BYTES, MOST_ROWS = 4_000_000_000, 20_000_000


def columns(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """The named columns of a CSV or Parquet file, as Arrow arrays by name; other columns are not read. Raises
    InputError."""
    check_plain(path, MOST_BYTES)
    if not path.stat().st_size:
        raise InputError(f"{path}: is empty")
    kind = "Parquet" if path.suffix == ".parquet" else "CSV"
    try:
        table = (_parquet if kind == "Parquet" else _csv)(path, list(dict.fromkeys(names)))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not valid {kind}: {plain(' '.join(str(error).split()), 120)}") from None
    return {name: table[name].combine_chunks() for name in names}


def _csv(path: Path, names: list[str]) -> Any:
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    with path.open("rb") as file, pa.csv.open_csv(file, parse_options=parse) as head:
        try:
            held = head.schema.names
        except UnicodeDecodeError:
            raise InputError(f"{path}: its head is not UTF-8 text") from None
        _check_names(path, names, held)
    convert = pa.csv.ConvertOptions(include_columns=names)
    with path.open("rb") as file:
        return pa.csv.read_csv(file, parse_options=parse, convert_options=convert)


def _parquet(path: Path, names: list[str]) -> Any:
    with path.open("rb") as opened, pa.parquet.ParquetFile(opened) as file:
        _check_names(path, names, file.schema_arrow.names)
        # A file of a few bytes may contain any number of rows.
        if (rows := file.metadata.num_rows) > MOST_ROWS:
            raise InputError(f"{path}: has {rows:,} rows; at most {MOST_ROWS:,} are allowed")
        return file.read(columns=names)


def _check_names(path: Path, names: Sequence[str], held: list[str]) -> None:
    for name in names:
        if name not in held:
            raise InputError(f"{path}: no column {shown(name)}{nearest(name, held)}")
        if held.count(name) > 1:
            raise InputError(f"{path}: column {name!r} is there twice")


def times(column: Any, name: str, path: Path) -> NDArray[Any]:
    """A column of times given as numbers, [rows]. Raises InputError."""
    if pa.types.is_temporal(column.type):
        raise InputError(f"{path}: {name} holds dates and times: it needs time_unit: datetime")
    return checked_times(numbers(column, name, path), name, path)


def numbers(column: Any, name: str, path: Path) -> NDArray[Any]:
    """An Arrow array as int64 or float64 [n]. Raises InputError."""
    kind = column.type
    if pa.types.is_boolean(kind) or pa.types.is_temporal(kind):
        raise InputError(f"{path}: {name} must hold numbers, it holds {plain(kind)}")
    wanted = pa.int64() if pa.types.is_integer(kind) else pa.float64()
    return _cast(column, wanted, name, path, "a number")


def figures(column: Any, name: str, path: Path) -> NDArray[np.float64]:
    """A column of finite numbers, [rows], NaN for empty cells. Raises InputError."""
    if not (
        pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or column.type == pa.null()
    ):
        raise InputError(f"{path}: {name} must hold numbers, it holds {plain(column.type)}")
    values = np.asarray(column.cast(pa.float64()).to_numpy(zero_copy_only=False))
    if np.isinf(values).any():
        refuse(int(np.argmax(np.isinf(values))), values, name, path, "a finite number")
    return values


def words(column: Any, name: str, path: Path) -> NDArray[Any]:
    """A column of texts, [rows]. Raises InputError."""
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)) or column.null_count:
        raise InputError(f"{path}: {name} must hold text in each record, it holds {plain(kind)}")
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=object)


def moments(column: Any, name: str, path: Path) -> NDArray[Any]:
    """An Arrow array of dates and times as int64 [n], nanoseconds since 1970. Raises InputError."""
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
                refuse(index, values, name, path, allowed)
        raise InputError(
            f"{path}: {name} must hold {allowed} in each record, not {plain(column.type)}"
        ) from None


def _casts(value: str, wanted: Any) -> bool:
    try:
        pa.scalar(value).cast(wanted)
    except pa.ArrowException:
        return False
    return True
