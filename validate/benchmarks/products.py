"""Times of this project's kernel for few rows and of cuBLAS, by which `matmul.product` chooses.

    python -m simcore.validate.benchmarks.products [--out kernels/decoder/product_times.csv]

Each of ROWS times each matrix of MATRICES, stored by rows and by columns, bf16: medians of ROUNDS replays in
turns, one call a set of buffers, sets rotated until all are three times the L2 cache. Our results are checked
against float64 before.
"""

import statistics
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from simcore.kernels.decoder.fastest_product import TIMES
from simcore.kernels.decoder.matmul import config_for, matmul, workspace
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import BORN
from simcore.validate.benchmarks.run import SEED, relative_error
from simcore.validate.benchmarks.timing import birth, capture, measure_card, replays_s
from simcore.validate.program import check_out, run, write_csv
from simcore.validate.timing.allocator import take_memory_in_segments

ROWS = (1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 33, 48, 64)
# [k, n] of Llama 3.1 8B and 70B on 1 to 8 ranks, of CodeLlama 34B and Qwen3 14B and 32B, and between them.
MATRICES = (
    (4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 3072), (2048, 4096), (4096, 14336),
    (7168, 4096), (4096, 1536), (1024, 4096), (4096, 7168), (3584, 4096), (4096, 768), (512, 4096),
    (4096, 3584), (1792, 4096), (4096, 128256), (8192, 10240), (8192, 8192), (8192, 57344), (28672, 8192),
    (8192, 5120), (4096, 8192), (8192, 28672), (14336, 8192), (8192, 2560), (2048, 8192), (8192, 14336),
    (7168, 8192), (8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192), (5120, 7168), (5120, 5120),
    (5120, 34816), (17408, 5120), (5120, 10240), (8192, 44032), (22016, 8192), (2048, 2048), (3000, 5000),
)  # fmt: skip
ROUNDS, LEAST_CALLS = 7, 12
ERROR_BAR = 1e-2


def measured(k: int, n: int, l2_bytes: int) -> Iterator[dict[str, object]]:
    """Yields a row for each number of rows and each order of W [k, n] in memory."""
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    draw = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    count = cases.rotation(2 * k * n, l2_bytes)
    weights = [draw((k, n)).mul_(k**-0.5) for _ in range(count)]
    orders = {"rows": weights, "columns": [w.t().contiguous().t() for w in weights]}
    calls = -(-LEAST_CALLS // count) * count
    for rows in ROWS:
        xs = [draw((rows, k)) for _ in range(count)]
        y = torch.empty(rows, n, dtype=torch.bfloat16, device="cuda")
        truth = xs[0].double() @ weights[0].double()
        for order, stored in orders.items():
            config = config_for(rows, stored[0])
            # A name keeps it: a graph holds no memory that was made before it.
            space = workspace([(rows, n, config)], "cuda")
            ours = partial(matmul, out=y, space=space, config=config)
            y.fill_(float("nan"))
            error = relative_error(ours(xs[0], stored[0]), truth)
            if not error < ERROR_BAR:
                raise ValueError(f"{rows} x {k} x {n}, W by {order}: is wrong by {error:.1e}")
            operands = [(xs[i % count], stored[i % count]) for i in range(calls)]
            both = ours, partial(torch.mm, out=y)
            graphs = [capture([partial(call, *each) for each in operands]) for call in both]
            turns = [[replays_s(graph, 1)[0] / calls for graph in graphs] for _ in range(ROUNDS)]
            ours_s, cublas_s = (statistics.median(times) for times in zip(*turns, strict=True))
            yield {
                **{"k": k, "n": n, "order": order, "rows": rows},
                **{"ours_s": f"{ours_s:.4g}", "cublas_s": f"{cublas_s:.4g}"},
            }


def main(out: Annotated[Path, typer.Option(help="a CSV file to write")] = TIMES) -> None:
    """Measures both products and writes their times."""
    check_out(out)
    take_memory_in_segments()
    card = measure_card(lambda text: None)
    born = {name: str(value) for name, value in asdict(birth(card)).items() if name in BORN}
    rows: list[dict[str, object]] = []
    with torch.no_grad():
        for k, n in MATRICES:
            rows += [
                {**row, "dtype": "bf16", "n_replays": ROUNDS, **born} for row in measured(k, n, card.l2_bytes)
            ]
            torch.cuda.empty_cache()
    write_csv(rows, out)
    fast = sum(float(str(row["ours_s"])) < float(str(row["cublas_s"])) for row in rows)
    typer.echo(f"{out}: ours is the faster one in {fast} of {len(rows)}")


if __name__ == "__main__":
    run(main)
