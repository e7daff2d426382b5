"""Reads a user's tables of op times: aiconfigurator's columns, and simcore's own plain CSV.

    gemm                     gemm_dtype, m, n, k, latency                                matmul
    context_attention        attn_dtype, kv_cache_dtype, batch_size, isl, step,          prefill_attention
    generation_attention     num_heads, num_key_value_heads, head_dim, window_size,      decode_attention
                             latency
    ours                     kind, shape ("m=16;n=256;k=4096"), dtype, median_s          any kind in `KINDS`

`latency` is in milliseconds, `median_s` in seconds. A context of aiconfigurator's is isl + step tokens;
message sizes of its collectives count numbers, not bytes. Files named *.parquet are Parquet, others CSV.
Every cell that is used is checked; a row without an op in simcore (another number format, a sliding window,
experts) is left out and counted by its reason.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from simcore.input.files import (
    MOST_DIGITS,
    MOST_TABLE,
    InputError,
    check_plain,
    listed,
    nearest,
    plain,
    read_cells,
    shown,
    unknown_name,
)
from simcore.ops import op as ops
from simcore.ops.op import DTYPE_BYTES, Op

Line = Mapping[str, Any]
Format = Literal["aiconfigurator", "csv"]
FORMATS: tuple[str, ...] = get_args(Format)
# aiconfigurator's names of number formats, and simcore's.
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_b128", "half": "fp16", "float16": "fp16"}
COLLECTIVES: Mapping[str, Callable[..., Op]] = {
    "all_gather": ops.all_gather,
    "all_reduce": ops.all_reduce,
    "reduce_scatter": ops.reduce_scatter,
}
GEMM = ("gemm_dtype", "m", "n", "k", "latency")
ATTENTION = (
    "attn_dtype", "kv_cache_dtype", "batch_size", "isl", "step", "num_heads", "num_key_value_heads",
    "head_dim", "window_size", "latency",
)  # fmt: skip
CONTEXT, GENERATION = "context_attention", "generation_attention"
# By a column that only one table has: the required columns, and the reason if its rows are left out.
TABLES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "gemm_dtype": (GEMM, None),
    "attn_dtype": (ATTENTION, None),
    "nccl_dtype": ((), "collectives: the link of the device file prices them"),
    "allreduce_dtype": ((), "collectives: the link of the device file prices them"),
    "moe_dtype": ((), "mixtures of experts: there is no such op"),
}
OURS = ("kind", "shape", "dtype", "median_s")
# Optional columns. `floor_s` of a points.csv is ignored: it is of its own device, and the floor of the named
# device is computed anew.
OURS_TOO = ("launches", "p10_s", "p90_s", "n", "cache", "warm_s", "role", "floor_s")
# Least values of whole numbers in a table.
LEAST = {
    "m": 1, "n": 1, "k": 1, "batch_size": 1, "isl": 1, "step": 0, "window_size": 0, "num_heads": 1,
    "num_key_value_heads": 1, "head_dim": 1, "num_gpus": 2, "message_size": 1, "launches": 1,
}  # fmt: skip
MOST_ROWS = 1_000_000
# Range of an op's time, in seconds.
LEAST_S, MOST_S = 1e-9, 1e4
# Sizes are multiplied: a larger one is a mistake, and products would overflow a float.
MOST = 1 << 62
_HEADS = ("q_heads", "kv_heads", "head_dim")
# The kinds of a plain CSV: the dimensions of their shapes, and their constructors.
KINDS: Mapping[str, tuple[tuple[str, ...], Callable[..., Op]]] = {
    "activation": (("tokens", "width", "gated"), ops.activation),
    "decode_attention": (("batch", *_HEADS, "context"), ops.decode_attention),
    "embedding": (("tokens", "hidden"), ops.embedding),
    "kv_append": (("tokens", "kv_heads", "head_dim"), ops.kv_append),
    "kv_copy": (("tokens", "width"), ops.kv_copy),
    "matmul": (("m", "n", "k"), partial(ops.matmul, "matmul")),
    "norm": (("tokens", "hidden"), partial(ops.norm, "norm")),
    "prefill_attention": (("tokens", "kv_tokens", "pairs", *_HEADS), ops.prefill_attention),
    "quantize": (("tokens", "width"), partial(ops.quantize, "quantize")),
    "receive_speculation": (("tokens", "width"), ops.receive_speculation),
    "residual": (("tokens", "hidden"), partial(ops.residual, "residual")),
    "rotary": (("tokens", *_HEADS), ops.rotary),
    "sample": (("tokens", "vocab"), ops.sample),
    "speculative_attention": (("batch", *_HEADS, "context", "chunk"), ops.speculative_attention),
}


@dataclass(frozen=True, slots=True)
class Timed:
    """An op and its time in seconds; `where`: the file and the row, counted from 1. If unknown, `p10_s` and
    `p90_s` are the median and `runs` is None."""

    op: Op
    seconds: float
    where: str
    p10_s: float
    p90_s: float
    runs: int | None = None
    launches: int = 1
    cache: str = ""
    warm_s: float | None = None
    checks: bool = False


@dataclass(frozen=True, slots=True)
class OpTable:
    """The content of a file: op times, the number of rows left out by reason, and the processors and software
    of the measurements, if given."""

    path: Path
    timed: Sequence[Timed]
    left_out: Counter[str] = field(default_factory=Counter)
    processors: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


def check_format(name: str | None) -> Format | None:
    """Returns the format of this name, None for None. Raises InputError if there is no such format."""
    for known in get_args(Format):
        if name in (None, known):
            return None if name is None else cast(Format, known)
    raise InputError(f"--format: {unknown_name('format', str(name), FORMATS)}")


def read_table(path: Path, form: Format | None = None) -> OpTable:
    """Reads the op times of a file; its columns decide the format, unless `form` is given. Raises InputError
    with one line if columns are missing or a cell is invalid."""
    names, lines = _read(path)
    own = next((column for column in TABLES if column in names), None)
    if form == "csv" or (form is None and own is None and len({*OURS} & {*names}) > 1):
        return _ours(path, names, lines)
    if own is None:
        known = f"aiconfigurator's have one of {', '.join(TABLES)}; a plain CSV has {', '.join(OURS)}"
        raise InputError(f"{path}: no such columns ({known}); it has {listed(names)}")
    columns, left_out = TABLES[own]
    _check_missing(path, columns, names)
    found, without = list[Timed](), Counter[str]()
    for i, line in enumerate(lines, 1):
        where = f"{path}: row {i}"
        if left_out is None:
            made = gemm_op(line) if own == "gemm_dtype" else _attention_op(line, path, where)
            if isinstance(made, Op):
                seconds = latency_s(line)
                found.append(Timed(made, seconds, where, seconds, seconds))
                continue
        without[left_out or str(made)] += 1
    software = {"framework": ("framework", "version"), "kernel_source": ("kernel_source",)}
    said = {name: ", ".join(_distinct(lines, columns)) for name, columns in software.items()}
    versions = {name: text for name, text in said.items() if text}
    return OpTable(path, found, without, _distinct(lines, ("device",)), versions)


def _distinct(lines: Sequence[Line], columns: Sequence[str]) -> tuple[str, ...]:
    """Returns the distinct combinations of these columns' values, joined by spaces, sorted."""
    each = {" ".join(plain(line[name]) for name in columns if line.get(name)) for line in lines}
    return tuple(sorted(text for text in each if text))


def gemm_op(line: Line) -> Op | str:
    """Returns the product of a row of table gemm, or the reason why there is none."""
    dtype = DTYPES.get(line["gemm_dtype"])
    if dtype is None:
        return f"gemm_dtype {plain(line['gemm_dtype'])}"
    return ops.matmul("matmul", m=line["m"], n=line["n"], k=line["k"], dtype=dtype)


def plain_attention(line: Line, *, prompts: bool) -> Op | str:
    """Returns the attention of a row over isl + step tokens, or the reason why there is none. With `prompts`,
    each sequence has isl new tokens after step cached ones, else one token."""
    dtype = DTYPES.get(line["kv_cache_dtype"])
    if dtype is None or DTYPES.get(line["attn_dtype"]) is None:
        attention, cache = plain(line["attn_dtype"]), plain(line["kv_cache_dtype"])
        return f"attn_dtype {attention} over kv_cache_dtype {cache}"
    if line["window_size"]:
        return "sliding windows"
    heads = {
        "q_heads": line["num_heads"],
        "kv_heads": line["num_key_value_heads"],
        "head_dim": line["head_dim"],
    }
    batch, isl, step = line["batch_size"], line["isl"], line["step"]
    if not prompts:
        return ops.decode_attention(batch=batch, context=isl + step, dtype=dtype, **heads)
    pairs = batch * (isl * step + isl * (isl + 1) // 2)
    return ops.prefill_attention(
        tokens=batch * isl, kv_tokens=batch * (isl + step), pairs=pairs, dtype=dtype, **heads
    )


def _attention_op(line: Line, path: Path, where: str) -> Op | str:
    name = line.get("op_name") or next((name for name in (CONTEXT, GENERATION) if name in path.stem), "")
    if name not in (CONTEXT, GENERATION):
        raise InputError(f"{where}: op_name: {unknown_name('value', str(name), (CONTEXT, GENERATION))}")
    if line["num_heads"] % line["num_key_value_heads"]:
        return "heads that are no multiple of KV heads"
    return plain_attention(line, prompts=name == CONTEXT)


def collective_op(line: Line, axis: str) -> Op | None:
    """Returns the collective of a row with 2-byte numbers; None for any other row."""
    make = COLLECTIVES.get(line["op_name"])
    if make is None or (line.get("nccl_dtype") or line.get("allreduce_dtype")) not in ("half", "bfloat16"):
        return None
    return make("c", elements=line["message_size"], ranks=line["num_gpus"], axis=axis, dtype="bf16")


def latency_s(line: Line) -> float:
    """Returns the time of a row of aiconfigurator's, in seconds."""
    return 1e-3 * float(line["latency"])


# -- files -----------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Sequence[Line]:
    """Returns the rows of a table after checking their cells. Raises InputError for an invalid cell."""
    return _read(path)[1]


def _read(path: Path) -> tuple[list[str], Sequence[Line]]:
    names, lines = _parquet(path) if path.suffix == ".parquet" else _csv(path)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise InputError(f"{path}: column {shown(twice[0])} is there twice")
    if not lines:
        raise InputError(f"{path}: has no rows")
    checked = [name for name in names if name in LEAST]
    # In a plain CSV, column n counts runs and may be empty.
    if "kind" in names:
        checked = []
    for i, line in enumerate(lines, 1):
        for name in checked:
            if type(line[name]) is not int or not LEAST[name] <= line[name] < MOST:
                wanted = f"a whole number from {LEAST[name]} on, below {MOST:.2g}"
                raise InputError(f"{path}: row {i}: {name}: is {shown(line[name])}; it should be {wanted}")
        if "latency" in line:
            _check_latency(line["latency"], f"{path}: row {i}")
    return names, lines


def _check_latency(took: object, where: str) -> None:
    if not isinstance(took, int | float) or isinstance(took, bool) or not 0.0 < took < math.inf:
        raise InputError(f"{where}: latency: is {shown(took)}; it should be milliseconds above 0")
    if not 1e3 * LEAST_S <= took <= 1e3 * MOST_S:
        allowed = f"{1e3 * LEAST_S:g} to {1e3 * MOST_S:g} milliseconds are allowed"
        given = f"{took:g}" if isinstance(took, float) else shown(took)
        raise InputError(f"{where}: latency: is {given}; {allowed}")


def _parquet(path: Path) -> tuple[list[str], Sequence[Line]]:
    check_plain(path, MOST_TABLE)
    try:
        with path.open("rb") as opened, pq.ParquetFile(opened) as file:
            if file.metadata.num_rows > MOST_ROWS:
                raise InputError(
                    f"{path}: has {file.metadata.num_rows:,} rows; at most {MOST_ROWS:,} are allowed"
                )
            for column in file.schema_arrow:
                if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
                    raise InputError(
                        f"{path}: column {shown(column.name)}: holds {plain(column.type)}, no cells"
                    )
            table = file.read()
        found: list[Line] = table.to_pylist()
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: is no table of parquet") from None
    return list(table.schema.names), found


def _csv(path: Path) -> tuple[list[str], Sequence[Line]]:
    names, rows = read_cells(path)
    numbers = {*LEAST, "latency"} if "kind" not in names else set[str]()
    return names, [
        {
            name: _number(cell) if name in numbers else cell.strip()
            for name, cell in zip(names, row, strict=True)
        }
        for row in rows
    ]


def _number(cell: str) -> int | float | str:
    """Returns the number in a cell, or the cell if it is no number."""
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return cell


def _check_missing(path: Path, wanted: Sequence[str], names: Sequence[str]) -> None:
    absent = [name for name in wanted if name not in names]
    if absent:
        s, are = ("s", "are") if len(absent) > 1 else ("", "is")
        raise InputError(f"{path}: column{s} {', '.join(map(repr, absent))}: {are} missing")


# -- a plain CSV -----------------------------------------------------------------------------------------


def _ours(path: Path, names: Sequence[str], lines: Sequence[Line]) -> OpTable:
    for name in names:
        if name not in (*OURS, *OURS_TOO):
            raise InputError(f"{path}: {unknown_name('column', name, (*OURS, *OURS_TOO))}")
    _check_missing(path, OURS, names)
    return OpTable(path, [_timed(line, f"{path}: row {i}") for i, line in enumerate(lines, 1)])


def _timed(line: Line, where: str) -> Timed:
    seconds = _seconds(line, "median_s", where)
    p10_s, p90_s = (_seconds(line, name, where, seconds) for name in ("p10_s", "p90_s"))
    if not p10_s <= seconds <= p90_s:
        raise InputError(f"{where}: p10_s <= median_s <= p90_s does not hold: {p10_s}, {seconds}, {p90_s}")
    if (role := line.get("role") or "fit") not in ("fit", "check"):
        raise InputError(f"{where}: role: {unknown_name('value', role, ('fit', 'check'))}")
    return Timed(
        op_of(line["kind"], line["shape"], line["dtype"], where),
        seconds,
        where,
        p10_s,
        p90_s,
        _whole(line["n"], "n", 1, where) if line.get("n") else None,
        _whole(line["launches"], "launches", 1, where) if line.get("launches") else 1,
        str(line.get("cache") or ""),
        _seconds(line, "warm_s", where) if line.get("warm_s") else None,
        role == "check",
    )


def op_of(kind: str, shape: str, dtype: str, where: str) -> Op:
    """Returns the op of a row of a plain CSV. Raises InputError if it is invalid."""
    if kind not in KINDS:
        raise InputError(f"{where}: kind: {unknown_name('kind', str(kind), KINDS)}")
    if dtype not in DTYPE_BYTES:
        raise InputError(f"{where}: dtype: {unknown_name('dtype', str(dtype), DTYPE_BYTES)}")
    names, make = KINDS[kind]
    sizes = dict(_sizes(str(shape), f"{where}: shape"))
    for name in sizes:
        if name not in names:
            raise InputError(f"{where}: shape: {kind} has no dimension {shown(name)}{nearest(name, names)}")
    if absent := [name for name in names if name not in sizes]:
        raise InputError(f"{where}: shape: {kind} needs {', '.join(absent)} besides, as in {_example(names)}")
    for name, size in sizes.items():
        if size < (least := 0 if name == "gated" else 1) or (name == "gated" and size > 1):
            raise InputError(f"{where}: shape: {name} is {size}; {least} or more is allowed (gated: 0 or 1)")
    if sizes.get("q_heads", kv := sizes.get("kv_heads", 1)) % kv:
        raise InputError(f"{where}: shape: q_heads is no multiple of kv_heads")
    if sizes.get("kv_tokens", sizes.get("tokens", 0)) < sizes.get("tokens", 0):
        raise InputError(f"{where}: shape: kv_tokens is less than tokens, which are among them")
    return make(**{name: sizes[name] for name in names}, dtype=dtype)


def _example(names: Sequence[str]) -> str:
    return '"' + ";".join(f"{name}=..." for name in names) + '"'


def _sizes(shape: str, where: str) -> Iterator[tuple[str, int]]:
    seen = set[str]()
    for word in shape.split(";"):
        name, _, value = (part.strip() for part in word.partition("="))
        if not name or name in seen:
            raise InputError(f'{where}: is {shown(shape)}; it should be as in "m=16;n=256;k=4096"')
        seen.add(name)
        yield name, _whole(value, name, 0, where)


def _whole(cell: object, name: str, least: int, where: str) -> int:
    text = str(cell)
    if not (text.isascii() and text.isdecimal() and len(text) < MOST_DIGITS) or not least <= int(text) < MOST:
        raise InputError(f"{where}: {name}: is {shown(text)}; it should be a whole number from {least} on")
    return int(text)


def _seconds(line: Line, name: str, where: str, default: float | None = None) -> float:
    """Returns the time in a cell; `default` if the cell is empty or missing. Raises InputError."""
    cell = line.get(name)
    if default is not None and cell in (None, ""):
        return default
    try:
        value = float(cell)  # type: ignore[arg-type]  # None and text raise
    except (TypeError, ValueError):
        value = math.nan
    if not LEAST_S <= value <= MOST_S:
        raise InputError(f"{where}: {name}: is {shown(cell)}; {LEAST_S:g} to {MOST_S:g} seconds are allowed")
    return value
