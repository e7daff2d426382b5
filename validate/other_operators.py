"""Prices of a profile beside operator times that others measured on the same card.

    python -m validate.other_operators DIR --device h200-sxm

DIR holds tables of aiconfigurator (Apache-2.0): latency in ms of cuBLAS products, of FlashAttention as vLLM
calls it, of NCCL's collectives, each its own file. Compared is what is the same op: products in bf16 and fp8
of matrices that the profile was measured at, attention in bf16 with as many heads, collectives of as many
numbers. By sizes, the ratio theirs / ours: median, and the middle 80 %. Times that are shorter than the
datasheet's peak allows are no times of that op, and prices beyond what was measured are guesses: both are
counted, and compared with nothing.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer

from devices.price import pricer, roofline
from devices.profile import load_profile
from devices.spec import load_device
from simcore import ops
from simcore.files import InputError
from simcore.models import TENSOR
from simcore.ops import Op, Pricer, Roofline
from validate.calibrate import NAME
from validate.card_grid import grid
from validate.program import run

DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "half": "fp16"}
# The largest size of each band of a table: rows, tokens, numbers.
BANDS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 1 << 15, 1 << 16, 1 << 17, 1 << 20, 1 << 24)
# Of products: rows, and MB of weights.
ROWS, WEIGHTS_MB = (16, 64, 256, 1024, 8192), (0, 15, 30, 60, 120)
BEYOND = 1 << 40
COLLECTIVES: Mapping[str, Callable[..., Op]] = {
    "all_gather": ops.all_gather,
    "all_reduce": ops.all_reduce,
    "reduce_scatter": ops.reduce_scatter,
}
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Other:
    """One op as others measured it: `size` is what their table goes by here, in `bands`."""

    table: str
    op: Op
    size: int
    seconds: float
    bands: tuple[int, ...] = BANDS


def products(lines: Sequence[Line]) -> Iterator[Other]:
    """Products x W: those of matrices that models have in that format, apart by what those take."""
    known = {(op.dtype, op["n"], op["k"]) for op in grid(["matmul"])}
    for line in lines:
        dtype = DTYPES.get(line["gemm_dtype"])
        if dtype and (dtype, line["n"], line["k"]) in known:
            op = ops.matmul("matmul", m=line["m"], n=line["n"], k=line["k"], dtype=dtype)
            taken_mb = line["n"] * line["k"] * ops.DTYPE_BYTES[dtype] / 1e6
            band = max(least for least in WEIGHTS_MB if least < taken_mb)
            yield Other(f"matmul {dtype}, weights over {band} MB, rows", op, line["m"], _s(line), ROWS)


def decoding(lines: Sequence[Line]) -> Iterator[Other]:
    """Decode attention over isl + step tokens."""
    for line in _attention(lines):
        context = line["isl"] + line["step"]
        op = ops.decode_attention(batch=line["batch_size"], context=context, dtype="bf16", **_heads(line))
        table = f"decode attention bf16, {op['kv_heads']} KV heads, tokens cached in all"
        yield Other(table, op, line["batch_size"] * context, _s(line))


def prompts(lines: Sequence[Line]) -> Iterator[Other]:
    """Attention of prompts of isl tokens, without any cached before."""
    for line in _attention(lines):
        batch, isl = line["batch_size"], line["isl"]
        op = ops.prefill_attention(
            tokens=batch * isl, kv_tokens=batch * isl, pairs=batch * isl * (isl + 1) // 2, dtype="bf16",
            **_heads(line),
        )  # fmt: skip
        yield Other("prefill attention bf16, tokens", op, batch * isl, _s(line))


def _attention(lines: Sequence[Line]) -> Iterator[Line]:
    known = {(op["q_heads"], op["kv_heads"], op["head_dim"]) for op in grid(["rotary"])}
    for line in lines:
        heads = line["num_heads"], line["num_key_value_heads"], line["head_dim"]
        plain = line["attn_dtype"] == line["kv_cache_dtype"] == "bfloat16" and not line["window_size"]
        if plain and heads in known:
            yield line


def _heads(line: Line) -> dict[str, Any]:
    return {
        "q_heads": line["num_heads"],
        "kv_heads": line["num_key_value_heads"],
        "head_dim": line["head_dim"],
    }


def _s(line: Line) -> float:
    return 1e-3 * float(line["latency"])


def collectives(lines: Sequence[Line]) -> Iterator[Other]:
    """Collectives of numbers of 2 bytes: message_size counts numbers (int8 ones take half the time)."""
    for line in lines:
        dtype = line.get("nccl_dtype") or line.get("allreduce_dtype")
        make = COLLECTIVES.get(line["op_name"])
        if dtype in ("half", "bfloat16") and make and line.get("backend", "graph").endswith("graph"):
            ranks, count = line["num_gpus"], line["message_size"]
            op = make("c", elements=count, ranks=ranks, axis=TENSOR, dtype="bf16")
            name = f"{line['op_name']} by {line['kernel_source']}, {ranks} cards, numbers"
            yield Other(name, op, line["message_size"], _s(line))


READERS: dict[str, Callable[[Sequence[Line]], Iterator[Other]]] = {
    "gemm_perf": products,
    "generation_attention_perf": decoding,
    "context_attention_perf": prompts,
    "nccl_perf": collectives,
    "custom_allreduce_perf": collectives,
}
# What whole numbers of a table are at least.
LEAST = {
    "m": 1, "n": 1, "k": 1, "batch_size": 1, "isl": 1, "step": 0, "window_size": 0, "num_heads": 1,
    "num_key_value_heads": 1, "head_dim": 1, "num_gpus": 2, "message_size": 1,
}  # fmt: skip


def read(folder: Path) -> list[Other]:
    """All ops of the tables in a folder that can be compared. Raises InputError where there are none."""
    found: list[Other] = []
    for path in sorted(folder.glob("*.parquet")):
        reader = next((READERS[name] for name in READERS if path.stem.endswith(name)), None)
        if reader is not None:
            try:
                found += reader(_lines(path))
            except KeyError as error:
                raise InputError(f"{path}: column {error}: is missing") from None
    if not found:
        raise InputError(f"{folder}: no table of operators is there (*_gemm_perf.parquet, ...)")
    return found


def _lines(path: Path) -> list[Line]:
    """The lines of a table. Raises InputError for one that is none, or that no measurement can have."""
    try:
        found: list[Line] = pq.read_table(path).to_pylist()
    except (pa.ArrowException, OSError):
        raise InputError(f"{path}: is no table of parquet") from None
    if not found:
        raise InputError(f"{path}: has no rows")
    for i, line in enumerate(found, 1):
        for name in LEAST.keys() & line.keys():
            if type(line[name]) is not int or line[name] < LEAST[name]:
                wanted = f"a whole number from {LEAST[name]} on"
                raise InputError(f"{path}: row {i}: {name}: is {line[name]!r}; it should be {wanted}")
        took = line["latency"]
        if type(took) not in (int, float) or not 0.0 < took < math.inf:
            raise InputError(f"{path}: row {i}: latency: is {took!r}; it should be milliseconds above 0")
    return found


def ratios(others: Sequence[Other], price: Pricer, floor: Roofline) -> list[dict[str, Any]]:
    """A row for each table and band of sizes: n, ratio of theirs to ours (None where n is 0), and of the
    others how many prices are extrapolated, how many times cannot be true."""
    groups: dict[tuple[str, int], list[Other]] = {}
    for other in others:
        band = next((most for most in other.bands if other.size <= most), BEYOND)
        groups.setdefault((other.table, band), []).append(other)
    return [_row(*key, groups[key], price, floor) for key in sorted(groups, key=_by_numbers)]


def _by_numbers(key: tuple[str, int]) -> tuple[list[tuple[str, int]], int]:
    """Numbers within a name in their order: 15 MB before 120."""
    parts = re.findall(r"(\D*)(\d*)", key[0])
    return [(text, int(number or 0)) for text, number in parts], key[1]


def _row(table: str, band: int, others: Sequence[Other], price: Pricer, floor: Roofline) -> dict[str, Any]:
    true = [(other, price(other.op)) for other in others if other.seconds >= floor(other.op).seconds]
    found = [other.seconds / ours.seconds for other, ours in true if ours.source != "extrapolated"]
    p10, middle, p90 = (float(x) for x in np.percentile(found, (10, 50, 90))) if found else (None,) * 3
    return {
        "table": table, "up_to": band, "n": len(found), "p10": p10, "median": middle, "p90": p90,
        "extrapolated": len(true) - len(found), "impossible": len(others) - len(true),
    }  # fmt: skip


def lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The rows as a table of Markdown."""
    yield "| what | up to | n | theirs / ours: median | middle 80 % | extrapolated | cannot be true |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        size = f"{row['up_to']:,}" if row["up_to"] < BEYOND else "more"
        found = row["median"] is not None
        ratio = f"{row['median']:.2f} | {row['p10']:.2f} to {row['p90']:.2f}" if found else "- | -"
        left_out = f"{row['extrapolated'] or ''} | {row['impossible'] or ''}"
        yield f"| {row['table']} | {size} | {row['n']} | {ratio} | {left_out} |"


def main(
    folder: Annotated[Path, typer.Argument(help="the tables")],
    device: Annotated[str, typer.Option(help="of the catalogue")] = "h200-sxm",
    profile: Annotated[str, typer.Option(help="name, or folder, of the profile")] = NAME,
) -> None:
    """Prints how times by others compare with a profile's prices."""
    spec = load_device(device)
    price = pricer(spec, profile=load_profile(device, profile))
    rows = ratios(read(folder), price, roofline(spec))
    for line in lines(rows):
        typer.echo(line)


if __name__ == "__main__":
    run(main)
