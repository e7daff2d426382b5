"""Measures products in fp8 as engines run them, and as they do not, beside the prices of this card's profile.

    python -m simcore.validate.accuracy.fp8_products --out rows.csv          on a card, 4 min

    rounded  inputs in bf16, rounded to fp8 by a kernel before the product, without fast accumulation
    alone    inputs in fp8: the op before has rounded them
    priced   the same, with fast accumulation (`use_fast_accum`), which engines set; as the profile has it

    at rest      median of launches of eight products, each after a rest
    under load   mean product of LOAD_S without a pause, of LOADED rows

Of two models' matrices, several of each in turn, so that no product finds its own in the L2 cache. Each way
is compared with a float64 product of the same rounded inputs before it is timed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, get_args

import torch
import typer
from torch import Tensor

from simcore.devices.price import pricer
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.decoder.matmul import product
from simcore.ops.op import Pricer, matmul
from simcore.validate.accuracy.contention import fitted_profile
from simcore.validate.accuracy.power import BORN
from simcore.validate.benchmarks.timing import birth, measure_card
from simcore.validate.calibration.cuda import this_card
from simcore.validate.calibration.cuda_power import Products, steady
from simcore.validate.program import check_out, markdown, run, write_csv
from simcore.validate.timing.cuda_times import has_fp8

Way = Literal["rounded", "alone", "priced"]
# (columns, inputs) of a model's matrices.
SHAPES: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "llama-3.1-8b": {"gate_up": (28_672, 4_096), "down": (4_096, 14_336), "qkv": (6_144, 4_096)},
    "llama-3.1-70b": {
        "gate_up": (57_344, 8_192), "down": (8_192, 28_672), "qkv": (10_240, 8_192), "o": (8_192, 8_192),
    },
}  # fmt: skip
ROWS = (512, 1_024, 2_048, 4_096)
# Under load: these alone.
LOADED, LOADED_MATRICES, LOAD_S, PERIOD_S = 2_048, ("gate_up", "down"), 2.5, 0.04
# Bytes of all matrices of a shape at least, several times the L2 cache; and how many there are.
IN_TURN_BYTES, FEWEST, MOST = 200_000_000, 2, 8
CHECKED, TOLERANCE, SEED = 8, 2e-2, 3
CACHE = "matrices in turn, 200 MB and more of them"


@dataclass(frozen=True, slots=True)
class Measured:
    """One product, one way; times in seconds, `load_s` None if it was not measured. `error`: of the largest
    value of the reference."""

    model: str
    matrix: str
    m: int
    n: int
    k: int
    way: Way
    price_s: float
    rest_s: float
    load_s: float | None
    error: float


def ways(
    m: int, n: int, k: int, device: str, generator: torch.Generator
) -> tuple[dict[Way, list[Any]], dict[Way, float]]:
    """Returns the calls of each way, and each one's error."""

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    x, one = drawn(m, k).to(torch.bfloat16), torch.ones((), device=device)
    rounded = x.to(torch.float8_e4m3fn)
    count = max(FEWEST, min(MOST, -(-IN_TURN_BYTES // (n * k))))
    weights = [drawn(n, k).mul_(k**-0.5).to(torch.float8_e4m3fn).t() for _ in range(count)]
    scaled: Any = partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    calls: dict[Way, list[Any]] = {
        "rounded": [partial(_rounded_first, scaled, x, weight) for weight in weights],
        "alone": [partial(scaled, rounded, weight) for weight in weights],
        "priced": [partial(product, rounded, weight) for weight in weights],
    }
    reference = rounded[:CHECKED].double() @ weights[0].double()
    most = reference.abs().max()
    errors = {
        way: float((each[0]()[:CHECKED].double() - reference).abs().max() / most)
        for way, each in calls.items()
    }
    return calls, errors


def _rounded_first(scaled: Any, x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = scaled(x.to(weight.dtype), weight)
    return y


def measured(price: Pricer) -> Iterator[Measured]:
    """Measures every product on this card. Raises ValueError if one of them is wrong."""
    products, generator = Products(price, fp8=False), torch.Generator("cuda").manual_seed(SEED)
    for model, shapes in SHAPES.items():
        for matrix, (n, k) in shapes.items():
            for m in ROWS:
                price_s = price(matmul(matrix, m=m, n=n, k=k, dtype="fp8")).seconds
                calls, errors = ways(m, n, k, "cuda", generator)
                for way in get_args(Way):
                    if not errors[way] < TOLERANCE:
                        raise ValueError(f"{model} {matrix}, {m} rows, {way}: wrong by {errors[way]:.2g}")
                    rest_s = products.add(way, calls[way])
                    load_s = None
                    if m == LOADED and matrix in LOADED_MATRICES:
                        load_s = rest_s * steady(products, way, 1.0, PERIOD_S, "memory", seconds=LOAD_S).times
                    yield Measured(model, matrix, m, n, k, way, price_s, rest_s, load_s, errors[way])


def lines(rows: list[Measured]) -> Iterator[str]:
    """Yields the printed table: times in those of the price, median over matrices, by way and rows."""
    found = [("way", *(f"{m:,} rows" for m in ROWS), "under load")]
    for way in get_args(Way):
        own = [row for row in rows if row.way == way]
        rest = [median(row.rest_s / row.price_s for row in own if row.m == m) for m in ROWS]
        load = median(row.load_s / row.price_s for row in own if row.load_s is not None)
        found.append((way, *(f"{times:.3f}" for times in (*rest, load))))
    return markdown(found)


def main(
    out: Annotated[Path | None, typer.Option(help="where to write all rows, as CSV")] = None,
    profile: Annotated[str, typer.Option(help="whose prices")] = "local",
) -> None:
    """Measures products in fp8 in three ways, in times of their prices."""
    check_out(out)
    if not torch.cuda.is_available() or not has_fp8():
        raise InputError("no CUDA device that multiplies fp8 is here")
    name = this_card()
    born = {**asdict(birth(measure_card(lambda text: None))), "cache_state": CACHE}
    kept, rows = {key: str(born[key]) for key in ("cache_state", *BORN)}, list[Measured]()
    for row in measured(pricer(load_device(name), profile=fitted_profile(name, profile))):
        rows.append(row)
        if out is not None:
            # As they come: a run of minutes may be cut off.
            write_csv([{**asdict(each), **kept} for each in rows], out)
    for line in lines(rows):
        typer.echo(line)


if __name__ == "__main__":
    run(main)
