"""Reads recorded requests: the arrival time and the prompt and answer tokens of each.

    azure     CSV: TIMESTAMP (date and time), ContextTokens, GeneratedTokens   (AzureLLMInferenceTrace)
    mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids    (Mooncake, FAST'25)
    table     CSV or Parquet (a name that ends in .parquet), columns of any name

    time_s = (time - earliest time) / units per second

Every fault is one line (`InputError`) with the file, the column and the record, counted from 1.
`simcore/workload/vllm_bench.py` reads the results of vLLM's benchmark by the same checks.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simcore.input.files import MOST_TEXT, InputError, nearest, read_text
from simcore.input.records import checked_times, from_list, refuse
from simcore.workload.requests import blocks_for
from simcore.workload.spec import MOST_LENGTH

AZURE = {"arrival": "TIMESTAMP", "prompt": "ContextTokens", "output": "GeneratedTokens"}
MOONCAKE = ("timestamp", "input_length", "output_length")
PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9, "datetime": 10**9}
# Thirty years: times that span more were written in another unit.
MOST_SPAN_S = 1e9
# Requests less than a nanosecond after the first count as simultaneous with it.
LEAST_S = 1e-9

Times = NDArray[np.float64]
Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Recorded requests in order of time: `time_s` [n] counts from the first; tokens [n], None if the file
    has none. Arrays are read-only. `hash_ids` [n]: the blocks of each prompt, each identified by its content
    and that of all blocks before it; None if the file has none. `begin_ns`: the first one's date and time, in
    nanoseconds since 1970; None if the file has no dates."""

    time_s: Times
    prompt_tokens: Tokens | None
    output_tokens: Tokens | None
    hash_ids: list[tuple[int, ...]] | None = None
    begin_ns: int | None = None


def read_azure(path: Path) -> Records:
    """Reads an Azure trace. Raises InputError."""
    return read_table(path, AZURE, "datetime")


def read_mooncake(path: Path, block_tokens: int = 512) -> Records:
    """Reads a Mooncake trace. Its hash_ids stand for blocks of `block_tokens` tokens; the last block of a
    prompt may have fewer. Rows without hash_ids share no block. Raises InputError."""
    lines = enumerate(read_text(path, MOST_TEXT).split("\n"), 1)
    rows = [_json_row(line, f"{path}: line {number}", block_tokens) for number, line in lines if line.strip()]
    if not rows:
        raise InputError(f"{path}: holds no requests")
    *numbers, hash_ids = zip(*rows, strict=True)
    times, prompts, outputs = (
        from_list(values, name, path) for values, name in zip(numbers, MOONCAKE, strict=True)
    )
    return records(
        path,
        checked_times(times, MOONCAKE[0], path),
        PER_SECOND["ms"],
        checked_tokens(prompts, MOONCAKE[1], path),
        checked_tokens(outputs, MOONCAKE[2], path),
        list(hash_ids) if any(hash_ids) else None,
    )


def _json_row(line: str, where: str, block_tokens: int) -> tuple[Any, ...]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f"{where}: not valid JSON") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: must be a mapping, {{...}}")
    for name in MOONCAKE:
        if name not in row:
            raise InputError(f"{where}: no {name!r}{nearest(name, row)}")
    return *itemgetter(*MOONCAKE)(row), _hash_ids(row, where, block_tokens)


def _hash_ids(row: Mapping[str, object], where: str, block_tokens: int) -> tuple[int, ...]:
    """The hash_ids of a row; empty if it has none."""
    given, length = row.get("hash_ids"), row[MOONCAKE[1]]
    if given is None:
        return ()
    if not isinstance(given, list) or any(type(one) is not int or not 0 <= one < 2**63 for one in given):
        raise InputError(f"{where}: hash_ids must be a list of whole numbers, at least 0")
    # A length that is no number is reported later, by the check of all lengths.
    if isinstance(length, int) and len(given) != blocks_for(length, block_tokens):
        raise InputError(
            f"{where}: {len(given)} hash_ids; a prompt of {length} tokens has"
            f" {blocks_for(length, block_tokens)} blocks of {block_tokens} (hash_block_tokens)"
        )
    return tuple(given)


def read_table(path: Path, columns: Mapping[str, str], time_unit: str) -> Records:
    """Reads a CSV or Parquet file. `columns` names the columns of `arrival` and, if there are any, of
    `prompt` and `output`; `time_unit` is a key of `PER_SECOND`. Raises InputError."""
    if "arrival" not in columns:
        raise InputError(f"{path}: columns.arrival is missing: which column says when requests came")
    # Imported here because Arrow takes longer to import than everything else that `--help` needs.
    from simcore.input import columns as tables  # noqa: PLC0415

    table = tables.columns(path, list(columns.values()))
    name = columns["arrival"]
    read = tables.moments if time_unit == "datetime" else tables.times
    times = read(table[name], name, path)
    tokens = {
        role: checked_tokens(tables.numbers(table[columns[role]], columns[role], path), columns[role], path)
        for role in ("prompt", "output")
        if role in columns
    }
    found = records(path, times, PER_SECOND[time_unit], tokens.get("prompt"), tokens.get("output"))
    return replace(found, begin_ns=int(times.min())) if time_unit == "datetime" else found


def read_lengths(path: Path, column: str) -> Tokens:
    """Reads a column of lengths of a CSV or Parquet file, each at least 1 token. Raises InputError."""
    from simcore.input import columns as tables  # noqa: PLC0415

    values = tables.numbers(tables.columns(path, [column])[column], column, path)
    found = checked_tokens(values, column, path, low=1)
    if not len(found):
        raise InputError(f"{path}: column {column!r} is empty")
    found.flags.writeable = False
    return found


def records(
    path: Path,
    times: NDArray[Any],
    per_second: int,
    prompts: Tokens | None,
    outputs: Tokens | None,
    hash_ids: list[tuple[int, ...]] | None = None,
) -> Records:
    """Makes `Records` of checked columns, sorted by time; requests of the same time keep their order.

    `times` [n] are integers or floats, in units of 1/per_second s. Raises InputError if there are none, or if
    they span more than `MOST_SPAN_S`.
    """
    if not len(times):
        raise InputError(f"{path}: holds no requests")
    # In Python's integers, because the difference of two int64 may overflow.
    span_s = (times.max().item() - times.min().item()) / per_second
    if span_s > MOST_SPAN_S:
        raise InputError(f"{path}: its times span {span_s:.3g} s: is their unit right?")
    # Integers are subtracted as integers: nanoseconds since 1970 have too many digits for a float.
    time_s = (times - times.min()) / per_second
    # No step of a server is that short, and rates from such times would overflow.
    time_s = np.where(time_s < LEAST_S, 0.0, time_s)
    columns: list[NDArray[Any] | None] = [time_s, prompts, outputs]
    if np.any(time_s[1:] < time_s[:-1]):
        order = np.argsort(time_s, kind="stable")
        columns = [None if column is None else column[order] for column in columns]
        hash_ids = None if hash_ids is None else [hash_ids[i] for i in order.tolist()]
    for column in columns:
        if column is not None:
            column.flags.writeable = False
    sorted_s, *tokens = columns
    return Records(sorted_s, tokens[0], tokens[1], hash_ids)  # type: ignore[arg-type]


# -- checks ----------------------------------------------------------------------------------------


def checked_tokens(values: NDArray[Any], name: str, path: Path, low: int = 0) -> Tokens:
    """`values` [n] as whole numbers from `low` to `MOST_LENGTH`. Raises InputError."""
    good = (values >= low) & (values <= MOST_LENGTH)
    if values.dtype.kind == "f":
        good &= np.floor(values) == values
    if not good.all():
        refuse(int(np.argmin(good)), values, name, path, f"a whole number from {low} to {MOST_LENGTH}")
    return values.astype(np.int64)
