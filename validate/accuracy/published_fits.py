"""Fits to the tables of two papers: the profile rows that follow from published cells.

    point = (launches, floor_s, published seconds) of a cell whose `fitted_by` names the profile
    row   = simcore.devices.fit.fit_two(points of one method in one table)

LeetDecoding's cells have the plain floor, Flash-Decoding's the floor of the waves of their blocks.
Flash-Decoding uses the number of splits that is cheapest by the fit itself, so fit and choice alternate until
the choice is stable.

    python -m simcore.validate.accuracy.published_fits     writes fits.csv of both profiles anew
"""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal

from simcore.devices.fit import Fit, fit_two
from simcore.devices.fitted import FITS, FitRow, FittedProfile
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.spec import DeviceSpec, load_device
from simcore.input.files import InputError
from simcore.models.operators import NOT_ATOMIC, linear_attention_op
from simcore.ops.flash_decoding import method_op, split_count, with_splits
from simcore.ops.op import Op, Pricer
from simcore.validate.program import write_csv

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "validate" / "published"
PROFILES = ROOT / "devices" / "profiles"
A6000, LEETDECODING = "a6000", "leetdecoding-tables"
A100, FLASH_DECODING = "a100-sxm-80gb", "flash-decoding-table"
LEETDECODING_TABLES = ("3", "4", "5", "6", "9")
# Methods that write masks with decay.
MASKED = frozenset({"vanilla", "recursion", "block_based", "lightning_torch"})
# From LeetDecoding's Listing 1 (the tables do not state it); Flash-Decoding's "inputs in f16".
LEETDECODING_DTYPE = "fp32"
FLASH_DECODING_DTYPE = "fp16"
# The choice of splits settles after one or two rounds.
MOST_ROUNDS = 10
FORM: Mapping[str, Literal["floor", "waves"]] = {LEETDECODING: "floor", FLASH_DECODING: "waves"}

Cell = Mapping[str, str]


def cells(name: str) -> list[Cell]:
    """Returns the lines of a file of published figures."""
    with (PUBLISHED / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _fit_row(
    profile: str, kind: str, where: str, points: Sequence[tuple[int, float, float]], source: str
) -> FitRow:
    return FitRow(kind=kind, where=where, form=FORM[profile], source=source, **asdict(fit_two(points)))


# -- LeetDecoding, Tables 3 to 6 and 9 -------------------------------------------------------------


def leetdecoding_op(cell: Cell) -> Op:
    """Returns the op of a cell. The paper's times show that masks with decay are made row by row."""
    sizes = {name: int(cell[name]) for name in ("batch", "heads", "length", "rank", "dim")}
    return linear_attention_op(
        cell["method"],
        **sizes,
        dtype=LEETDECODING_DTYPE,
        decay=cell["decay"] == "1",
        mask_by_rows=True,
        states=False,
    )


def leetdecoding_fits() -> list[FitRow]:
    """Returns a row for each method and table, and those of a model's other ops; skips FleetAttention in
    Table 9, a repeat of Tables 3 to 6."""
    floor = roofline(load_device(A6000))
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for table in LEETDECODING_TABLES:
        for cell in cells(f"leetdecoding_table{table}"):
            again = table == "9" and cell["method"] != NOT_ATOMIC
            if cell["fitted_by"] == LEETDECODING and cell["metric"] == "latency_s" and not again:
                groups.setdefault((cell["method"], cell["batch"], cell["decay"]), []).append(cell)
    rows = []
    for (method, batch, decay), found in groups.items():
        ops = [leetdecoding_op(cell) for cell in found]
        points = [
            (*launches_and_floor(op, floor), float(cell["value"]))
            for op, cell in zip(ops, found, strict=True)
        ]
        own = ";atomic=0" if method == NOT_ATOMIC else ""
        lengths = ", ".join(cell["length"] for cell in found)
        source = f"{found[0]['source']}, at lengths {lengths}"
        # The way in which masks with decay are made determines the number of launches.
        masked = ";mask_by_rows=1" if decay == "1" and method in MASKED else ""
        sizes = "".join(f";{name}={found[0][name]}" for name in ("heads", "rank", "dim"))
        where = f"batch={batch};decay={decay}{masked}{sizes};states=0;dtype={LEETDECODING_DTYPE}{own}"
        rows.append(_fit_row(LEETDECODING, ops[0].kind, where, points, source))
    return [*rows, *model_fits(rows)]


# The ops of a model besides its methods, priced by vanilla's constants of Table 3: of all that the tables
# time, vanilla without decay is products and element-wise launches alone, one after another.
MODEL_OPS = (
    "matmul",
    "embedding",
    "norm",
    "rotary",
    "activation",
    "residual",
    "sample",
    "silu",
    "lrpe",
    "product",
    "batched_matmul",
    "elementwise",
)
# Of other products than those that were timed: as for a fit to two points.
MODEL_INTERVAL = 2.0


def model_fits(rows: Sequence[FitRow]) -> list[FitRow]:
    """Returns a row for each of MODEL_OPS, with the constants of vanilla in Table 3 among `rows`."""
    (vanilla,) = (row for row in rows if row.kind.endswith("_vanilla") and "batch=1;decay=0" in row.where)
    source = f"{vanilla.source}: its products and element-wise launches"
    where, low = f"dtype={LEETDECODING_DTYPE}", 1.0 / MODEL_INTERVAL
    return [
        replace(vanilla, kind=kind, where=where, low=low, high=MODEL_INTERVAL, source=source)
        for kind in MODEL_OPS
    ]


# -- Flash-Decoding, the micro-benchmark -----------------------------------------------------------


def flash_decoding_op(cell: Cell) -> Op:
    """Returns the op of a cell, Flash-Decoding's with one split."""
    return method_op(
        cell["method"],
        batch=int(cell["batch"]),
        q_heads=int(cell["heads"]),
        kv_heads=int(cell["kv_heads"]),
        head_dim=int(cell["dim"]),
        context=int(cell["length"]),
        dtype=FLASH_DECODING_DTYPE,
    )


def flash_decoding_fits() -> list[FitRow]:
    """Returns a row for each of FlashAttention-2 and Flash-Decoding, from every second row of the table."""
    spec = load_device(A100)
    rows = []
    for method in ("flash_attention_2", "flash_decoding"):
        found = [
            cell
            for cell in cells("flash_decoding_a100")
            if cell["method"] == method and cell["fitted_by"] == FLASH_DECODING
        ]
        rows.append(_settled(spec, method, found))
    return rows


def _settled(spec: DeviceSpec, method: str, found: Sequence[Cell]) -> FitRow:
    """Returns the fit whose choice of splits is that of its points. Raises InputError if none settles."""
    base = [flash_decoding_op(cell) for cell in found]
    heads = ";".join(f"{name}={base[0][name]}" for name in ("q_heads", "kv_heads", "head_dim"))
    where = f"{heads};dtype={FLASH_DECODING_DTYPE}"
    contexts = ", ".join(cell["length"] for cell in found)
    source = f"{found[0]['source']}, at seqlen {contexts}"
    price = pricer(spec)
    chosen: list[Op] = []
    for _ in range(MOST_ROUNDS):
        ops = list(_split(base, price, spec.processors))
        points = [
            (*launches_and_floor(op, roofline(spec), spec.processors), float(cell["value"]))
            for op, cell in zip(ops, found, strict=True)
        ]
        row = _fit_row(FLASH_DECODING, base[0].kind, where, points, source)
        if ops == chosen:
            return row
        chosen, price = ops, pricer(spec, profile=_alone(row, spec.name))
    raise InputError(f"{method}: the number of splits does not settle")


def _split(ops: Iterable[Op], price: Pricer, processors: int) -> Iterable[Op]:
    for op in ops:
        yield with_splits(op, split_count(op, price, processors)) if op.kind == "flash_decoding" else op


def _alone(row: FitRow, device: str) -> FittedProfile:
    return FittedProfile("draft", "draft", "draft", device, "fitted", (row,), {})


# -- both ------------------------------------------------------------------------------------------


def rounded(row: FitRow) -> FitRow:
    """Returns a row with its numbers rounded to 6 digits, as in the file."""
    numbers = {name: float(f"{getattr(row, name):.6g}") for name in Fit.__dataclass_fields__ if name != "n"}
    return FitRow(**{**asdict(row), **numbers})


def write(folder: Path, rows: Sequence[FitRow]) -> None:
    """Writes fits.csv."""
    names = ("kind", "where", *Fit.__dataclass_fields__, "form", "source")
    write_csv([{name: getattr(rounded(row), name) for name in names} for row in rows], folder / FITS)


if __name__ == "__main__":
    write(PROFILES / A6000 / LEETDECODING, leetdecoding_fits())
    write(PROFILES / A100 / FLASH_DECODING, flash_decoding_fits())
