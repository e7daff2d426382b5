"""The benchmark's parts about the rest of a decoding step: projections against cuBLAS, and a whole layer."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial

import torch
from torch import Tensor

from simcore.kernels.decoder.decode_attention import reference_decode_attention
from simcore.kernels.decoder.layer import (
    Buffers,
    LayerCache,
    LayerWeights,
    attend,
    layer_buffers,
    layer_step,
    reference_layer_step,
)
from simcore.kernels.decoder.matmul import config_for, matmul
from simcore.kernels.decoder.matmul import workspace as matmul_workspace
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import OURS, Bar, Compared, Row
from simcore.validate.benchmarks.peers import Candidate
from simcore.validate.benchmarks.run import ROUNDS, SEED, Bench, free, relative_error, say, take_turns, tried
from simcore.validate.benchmarks.timing import capture, one_line, replayed


def projection_row(of: cases.Projection, implementation: str, version: str) -> Row:
    """A row without times."""
    return Row(
        op="matmul",
        implementation=implementation,
        version=version,
        shape={
            "name": of.name,
            "width": of.width,
            "rows": of.rows,
            "k": of.k,
            "columns": of.n,
            "dtype": "bf16",
        },
        hbm_bytes=of.hbm_bytes,
        error=None,
        error_bar=cases.ERROR_BARS["bf16"] if version == "simcore" else cases.PEER_ERROR_BAR,
    )


def projection_case(of: cases.Projection, bench: Bench) -> Compared:
    """Ours and cuBLAS, each with W row by row and column by column."""
    weight_bytes = 2 * of.k * of.n
    sets = cases.rotation(weight_bytes, bench.card.l2_bytes)
    generator = torch.Generator(device="cuda").manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    xs = [random(of.rows, of.k) for _ in range(sets)]
    by_rows = [random(of.k, of.n).mul_(of.k**-0.5) for _ in range(sets)]
    by_columns = [w.t().contiguous().t() for w in by_rows]
    y = torch.empty(of.rows, of.n, dtype=torch.bfloat16, device="cuda")
    truths = [xs[i].double() @ by_rows[i].double() for i in (0, -1)]
    orders = (("W by rows", by_rows), ("W by columns", by_columns))

    def own(name: str, weights: Sequence[Tensor]) -> Candidate:
        config = config_for(of.rows, weights[0])
        space = matmul_workspace([(of.rows, of.n, config)], "cuda")
        calls = [
            partial(matmul, x, w, out=y, space=space, config=config) for x, w in zip(xs, weights, strict=True)
        ]
        return Candidate(f"{name}; {config}", calls)

    def cublas(name: str, weights: Sequence[Tensor]) -> Candidate:
        calls = [partial(torch.mm, x, w, out=y) for x, w in zip(xs, weights, strict=True)]
        return Candidate(name, calls)

    def poison() -> None:
        y.fill_(float("nan"))

    calls = cases.calls_of(sets)
    entries = [
        tried(projection_row(of, name, version), (make(*order) for order in orders), truths, calls, poison)
        for name, version, make in ((OURS, "simcore", own), ("cuBLAS", f"torch {torch.__version__}", cublas))
    ]
    rows = take_turns(entries, cases.cold(sets, weight_bytes), quick=bench.quick)
    bench.judge(rows[0])
    return Compared(str(of), rows[0], rows[1:], of.hbm_bytes / bench.card.read_bytes_per_s)


def projections(bench: Bench) -> list[Bar]:
    """The part `projections`."""
    found, lines = list[Compared](), list[list[str]]()
    for of in cases.PROJECTIONS:
        try:
            compared = projection_case(of, bench)
        except Exception as error:
            bench.failed.append(f"{of}: {one_line(error)}")
            say(f"{of} failed: {one_line(error)}")
            free()
            continue
        found.append(compared)
        ours, theirs = compared.ours, compared.peers[0]
        rate = ours.hbm_bytes / ours.times.median_s if ours.times else None
        lines.append(
            [
                compared.name,
                cases.cell(ours),
                cases.number(None if rate is None else rate / 1e12, ".2f"),
                cases.cell(theirs),
                cases.number(compared.ratio, ".3f"),
                cases.number(compared.over_floor, ".2f"),
                cases.number(ours.error, ".1e"),
                f"{ours.config.split(';')[0]}; {theirs.config}",
            ]
        )
        bench.save("projections", [row for each in found for row in (each.ours, *each.peers)])
        free()
    head = [
        "projection, m x k x n",
        "ours",
        "TB/s",
        "cuBLAS",
        "cuBLAS/ours",
        "/floor",
        "error",
        "ours; cuBLAS",
    ]
    say("")
    for line in cases.lines_of(head, lines):
        say(line)
    say(cases.summary(found))
    return []


def layer_parts(of: cases.Layer) -> tuple[Buffers, LayerWeights, LayerCache]:
    """A layer of random matrices, its cache full but for room, and the buffers around it."""
    generator = torch.Generator(device="cuda").manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    def matrix(k: int, n: int) -> Tensor:
        return random(k, n).mul_(k**-0.5)

    heads, kv = of.q_heads * of.head_dim, of.kv_heads * of.head_dim
    weights = LayerWeights(
        attn_norm=1 + 0.1 * random(of.hidden),
        qkv=matrix(of.hidden, heads + 2 * kv),
        o=matrix(heads, of.hidden),
        mlp_norm=1 + 0.1 * random(of.hidden),
        gate_up=matrix(of.hidden, 2 * of.intermediate),
        down=matrix(of.intermediate, of.hidden),
    )
    cache = LayerCache(*(random(of.batch, of.kv_heads, of.context, of.head_dim) for _ in range(2)))
    lengths = torch.full((of.batch,), of.context, dtype=torch.int32, device="cuda")
    buffers = layer_buffers(weights, cache, lengths, q_heads=of.q_heads)
    buffers.x.copy_(random(of.batch, of.hidden))
    return buffers, weights, cache


def layer_error(of: cases.Layer, gate: Tensor) -> tuple[float, bool]:
    """How far an executed layer is off, and whether a skipped one has left everything as it was."""
    buffers, weights, cache = layer_parts(of)
    doubled = LayerWeights(*(getattr(weights, each.name).double() for each in fields(weights)))
    truth = reference_layer_step(
        buffers.x.double(),
        doubled,
        LayerCache(cache.k.double(), cache.v.double()),
        buffers.lengths,
        q_heads=of.q_heads,
        attention=reference_decode_attention,
    )
    before = [x.clone() for x in (buffers.x, cache.k, cache.v)]
    buffers.heads.fill_(float("nan"))
    for value in (0, 1):
        gate.fill_(value)
        layer_step(buffers, weights, cache, gate=gate, attend=partial(attend, gate=gate))
        if value == 0:
            same = all(torch.equal(x, y) for x, y in zip((buffers.x, cache.k, cache.v), before, strict=True))
    return relative_error(buffers.x, truth), same


def layer(bench: Bench) -> list[Bar]:
    """The part `layer`: Llama 3.1 8B's, one sequence."""
    of = cases.LAYER
    gate = torch.ones(1, dtype=torch.int32, device="cuda")
    error, same = layer_error(of, gate)
    parts = layer_parts(of)
    calls = cases.calls_of(1)
    rows = [
        Row(
            op="layer",
            implementation=f"{OURS}, {how}",
            version="simcore",
            shape={**asdict(of), "dtype": "bf16"},
            hbm_bytes=of.hbm_bytes if how == "executed" else 0,
            error=error if same else float("nan"),
            error_bar=cases.LAYER_ERROR_BAR,
            config="; ".join(f"{name}: {layout}" for name, layout in parts[0].layouts.items()),
        )
        for how in ("executed", "skipped")
    ]
    run = partial(layer_step, *parts, gate=gate, attend=partial(attend, gate=gate))
    graph, executed, skipped = capture([run] * calls), list[list[float]](), list[list[float]]()
    for _ in range(ROUNDS):
        for value, found in ((1, executed), (0, skipped)):
            gate.fill_(value)
            found.append(replayed(graph, calls, quick=bench.quick))
    state = cases.cold(1, of.hbm_bytes)
    rows = [
        cases.timed(row, cases.times(found), state)
        for row, found in zip(rows, (executed, skipped), strict=True)
    ]
    bench.save("layer", rows)
    floor_s = of.hbm_bytes / bench.card.read_bytes_per_s
    for row in rows:
        bench.judge(row)
        say(f"{row.implementation}: {cases.cell(row)} us, floor {1e6 * floor_s:.1f}, {row.note or row.error}")
    return cases.layer_bars(rows[0].times, rows[1].times)
