"""Reads the trace that a workload replays, and the window of it."""

import math
from functools import lru_cache
from pathlib import Path

import numpy as np

from simcore.input.files import InputError
from simcore.workload.clocks import seconds_after
from simcore.workload.lengths import stamp
from simcore.workload.request_logs import Records, read_azure, read_mooncake, read_table
from simcore.workload.spec import TraceArrivals, Workload
from simcore.workload.time_units import doubt
from simcore.workload.vllm_bench import bench_records

# The time unit of formats whose files do not state one; None: the scenario states it.
UNITS = {"table": None, "mooncake": "ms"}


def in_window(found: Records, arrivals: TraceArrivals) -> tuple[Records, float]:
    """Returns the records from the begin of the window (included) to its end (excluded), so that adjacent
    windows share none, and when it begins, in seconds of the trace. Raises InputError if there are none."""
    start_s, end_s = _window_s(found, arrivals)
    low, high = np.searchsorted(found.time_s, [start_s, end_s])
    if low >= high:
        raise InputError(
            f"workload.arrivals: no request from {_bound(arrivals, 'start', start_s)} to"
            f" {_bound(arrivals, 'end', end_s)}; {arrivals.path} lasts {found.time_s[-1]:g} s{_begin(found)}"
        )
    part = slice(int(low), int(high))
    prompts, outputs, hash_ids = found.prompt_tokens, found.output_tokens, found.hash_ids
    records = Records(
        found.time_s[part],
        None if prompts is None else prompts[part],
        None if outputs is None else outputs[part],
        None if hash_ids is None else hash_ids[part],
    )
    return records, start_s


def _window_s(found: Records, arrivals: TraceArrivals) -> tuple[float, float]:
    start_s, end_s = arrivals.start_s, math.inf if arrivals.end_s is None else arrivals.end_s
    for name in ("start_clock", "end_clock"):
        if getattr(arrivals, name) is not None and found.begin_ns is None:
            needed = "start_s and end_s are needed"
            raise InputError(f"workload.arrivals.{name}: {arrivals.path} has no dates and times; {needed}")
    if arrivals.start_clock is not None and found.begin_ns is not None:
        start_s = seconds_after(arrivals.start_clock, found.begin_ns)
    if arrivals.end_clock is not None and found.begin_ns is not None:
        end_s = seconds_after(arrivals.end_clock, found.begin_ns, start_s)
    return start_s, end_s


def _bound(arrivals: TraceArrivals, end: str, seconds: float) -> str:
    """Returns an end of the window as the scenario has it."""
    clock = getattr(arrivals, f"{end}_clock")
    return f"{end}_s {seconds:g}" if clock is None else f"{end}_clock {clock}"


def _begin(found: Records) -> str:
    if found.begin_ns is None:
        return ""
    return f", from {np.datetime64(found.begin_ns, 'ns').astype('datetime64[s]').item():%Y-%m-%d %H:%M:%S}"


def recorded(arrivals: TraceArrivals) -> Records:
    """Returns a whole trace. Raises InputError if its file cannot be read or makes no sense."""
    if arrivals.columns and arrivals.format != "table":
        raise InputError(f"workload.arrivals.columns: format {arrivals.format} has its own columns")
    columns = tuple(sorted(arrivals.columns.items()))
    try:
        kind, unit, block = arrivals.format, arrivals.time_unit, arrivals.hash_block_tokens
        return _read(arrivals.path, stamp(arrivals.path), kind, columns, unit, block)
    except InputError as error:
        raise InputError(f"workload.arrivals.path: {error}") from None


def doubts(workload: Workload) -> list[str]:
    """Warnings about how a trace was read: times that look like another unit. Raises InputError if the file
    cannot be read."""
    warnings: dict[str, None] = {}
    for given in workload.traces:
        if given.format in UNITS:
            unit = UNITS[given.format] or given.time_unit
            said = doubt(recorded(given).time_s, unit)
            field = "workload.arrivals.time_unit" if given.format == "table" else f"format {given.format}"
            warnings |= {f"{given.path}: {said} ({field} is {unit})": None} if said else {}
    return list(warnings)


# A study draws for every case and replica from the same files.
@lru_cache(maxsize=16)
def _read(
    path: str,
    stamp: tuple[int, int] | None,
    kind: str,
    columns: tuple[tuple[str, str], ...],
    time_unit: str,
    hash_block_tokens: int,
) -> Records:
    if kind == "table":
        return read_table(Path(path), dict(columns), time_unit)
    if kind == "mooncake":
        return read_mooncake(Path(path), hash_block_tokens)
    return {"azure": read_azure, "vllm": bench_records}[kind](Path(path))
