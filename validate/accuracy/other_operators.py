"""Compares a profile's prices with operator times from elsewhere on the same card.

    python -m simcore.validate.accuracy.other_operators DIR --device h200-sxm

DIR holds tables of aiconfigurator (Apache-2.0), each its own file: latency in ms of cuBLAS products, of
FlashAttention as called by vLLM, and of NCCL's collectives. Only equal ops are compared: products in bf16 and
fp8 of matrices that the profile was measured at, attention in bf16 with the same heads, collectives of the
same count. By size: the ratio theirs / ours, its median and middle 80 %. A time shorter than the datasheet's
peak allows cannot be of that op, and a price beyond the measured range is a guess; both are counted and not
compared.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from simcore.devices.op_tables import Line, collective_op, gemm_op, latency_s, plain_attention, read_lines
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.models.decoder import TENSOR
from simcore.ops import op as ops
from simcore.ops.op import Op, Pricer, Roofline
from simcore.validate.calibration.cuda_grid import grid
from simcore.validate.calibration.records import NAME
from simcore.validate.program import markdown, run

# The largest size of each band of a table: rows, tokens, numbers.
BANDS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 1 << 15, 1 << 16, 1 << 17, 1 << 20, 1 << 24)
# For products: rows, and MB of weights.
ROWS, WEIGHTS_MB = (16, 64, 256, 1024, 8192), (0, 15, 30, 60, 120)
BEYOND = 1 << 40


@dataclass(frozen=True, slots=True)
class Other:
    """One op measured elsewhere; `size`: the dimension by which its table is split into `bands`."""

    table: str
    op: Op
    size: int
    seconds: float
    bands: tuple[int, ...] = BANDS


def products(lines: Sequence[Line]) -> Iterator[Other]:
    """Yields products x W of matrices that models have in that format, split by the size of W."""
    known = {(op.dtype, op["n"], op["k"]) for op in grid(["matmul"])}
    for line in lines:
        op = gemm_op(line)
        if isinstance(op, Op) and (op.dtype, op["n"], op["k"]) in known:
            taken_mb = op["n"] * op["k"] * ops.DTYPE_BYTES[op.dtype] / 1e6
            band = max(least for least in WEIGHTS_MB if least < taken_mb)
            yield Other(
                f"matmul {op.dtype}, weights over {band} MB, rows", op, op["m"], latency_s(line), ROWS
            )


def decoding(lines: Sequence[Line]) -> Iterator[Other]:
    """Yields decode attention over isl + step tokens."""
    for line, op in _attention(lines, prompts=False):
        table = f"decode attention bf16, {op['kv_heads']} KV heads, tokens cached in all"
        yield Other(table, op, op["batch"] * op["context"], latency_s(line))


def prompts(lines: Sequence[Line]) -> Iterator[Other]:
    """Yields attention of prompts of isl tokens, without cached tokens."""
    for line, op in _attention(lines, prompts=True):
        yield Other("prefill attention bf16, tokens", op, op["tokens"], latency_s(line))


def _attention(lines: Sequence[Line], *, prompts: bool) -> Iterator[tuple[Line, Op]]:
    """Yields attention in bf16 with the heads of a model."""
    known = {(op["q_heads"], op["kv_heads"], op["head_dim"]) for op in grid(["rotary"])}
    for line in lines:
        op = plain_attention(line, prompts=prompts)
        if not isinstance(op, Op) or op.dtype != "bf16" or line["attn_dtype"] != line["kv_cache_dtype"]:
            continue
        if (op["q_heads"], op["kv_heads"], op["head_dim"]) in known:
            yield line, op


def collectives(lines: Sequence[Line]) -> Iterator[Other]:
    """Yields collectives of 2-byte numbers: message_size counts numbers (int8 ones take half the time)."""
    for line in lines:
        op = collective_op(line, TENSOR)
        if op and line.get("backend", "graph").endswith("graph"):
            name = f"{line['op_name']} by {line['kernel_source']}, {op['ranks']} cards, numbers"
            yield Other(name, op, op["elements"], latency_s(line))


READERS: dict[str, Callable[[Sequence[Line]], Iterator[Other]]] = {
    "gemm_perf": products,
    "generation_attention_perf": decoding,
    "context_attention_perf": prompts,
    "nccl_perf": collectives,
    "custom_allreduce_perf": collectives,
}


def read(folder: Path) -> list[Other]:
    """Returns all comparable ops of the tables in a folder. Raises InputError if there are none."""
    found: list[Other] = []
    for path in sorted(folder.glob("*.parquet")):
        reader = next((READERS[name] for name in READERS if path.stem.endswith(name)), None)
        if reader is not None:
            try:
                found += reader(read_lines(path))
            except KeyError as error:
                raise InputError(f"{path}: column {error}: is missing") from None
    if not found:
        raise InputError(f"{folder}: no table of operators is there (*_gemm_perf.parquet, ...)")
    return found


def ratios(others: Sequence[Other], price: Pricer, floor: Roofline) -> list[dict[str, Any]]:
    """Returns a row for each table and band of sizes: n, ratio of theirs to ours (None if n is 0), the number
    of extrapolated prices and of impossible times among the others."""
    groups: dict[tuple[str, int], list[Other]] = {}
    for other in others:
        band = next((most for most in other.bands if other.size <= most), BEYOND)
        groups.setdefault((other.table, band), []).append(other)
    return [_row(*key, groups[key], price, floor) for key in sorted(groups, key=_by_numbers)]


def _by_numbers(key: tuple[str, int]) -> tuple[list[tuple[str, int]], int]:
    """Sorts numbers within a name by value: 15 MB before 120."""
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
    """Yields the rows as a table in Markdown."""
    table: list[list[object]] = [
        ["what", "up to", "n", "theirs / ours: median", "middle 80 %", "extrapolated", "cannot be true"]
    ]
    for row in rows:
        size = f"{row['up_to']:,}" if row["up_to"] < BEYOND else "more"
        ratio = [f"{row['median']:.2f}", f"{row['p10']:.2f} to {row['p90']:.2f}"] if row["n"] else ["-", "-"]
        left_out = row["extrapolated"] or "", row["impossible"] or ""
        table.append([row["table"], size, row["n"], *ratio, *left_out])
    yield from markdown(table)


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
