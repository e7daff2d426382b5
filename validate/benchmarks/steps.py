"""Benchmarks of the rest of a decode step: projections against cuBLAS, a whole layer, and a whole step.

A step's layers have matrices and caches of their own, so all of it comes from memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from simcore.kernels.decoder.choice import choose, reference_choose
from simcore.kernels.decoder.decode_attention import reference_decode_attention
from simcore.kernels.decoder.layer import (
    Buffers,
    LayerCache,
    LayerWeights,
    advance,
    attend,
    layer_buffers,
    layer_step,
    reference_layer_step,
)
from simcore.kernels.decoder.matmul import config_for, is_of_cublas, product
from simcore.kernels.decoder.norm import norm
from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import OURS, OWN, Bar, Compared
from simcore.validate.benchmarks.peers import Candidate
from simcore.validate.benchmarks.run import (
    ROUNDS,
    SEED,
    TORCH,
    Bench,
    Trial,
    Way,
    compare,
    free,
    nan_last,
    relative_error,
    say,
)
from simcore.validate.benchmarks.timing import capture, replayed


def projection_case(of: cases.Projection, bench: Bench) -> Compared:
    """Compares ours and cuBLAS, each with W stored by rows and by columns."""
    weight_bytes = 2 * of.k * of.n
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    draw = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    xs = [draw((of.rows, of.k)) for _ in range(cases.rotation(weight_bytes, bench.card.l2_bytes))]
    sets = [(x, draw((of.k, of.n)).mul_(of.k**-0.5)) for x in xs]
    y = torch.empty(of.rows, of.n, dtype=torch.bfloat16, device="cuda")
    by_columns = [(x, w.t().contiguous().t()) for x, w in sets]
    orders = (("W by rows", sets), ("W by columns", by_columns))

    def own() -> Iterator[Candidate]:
        for name, operands in orders:
            weight = operands[0][1]
            how = "cuBLAS" if is_of_cublas(of.rows, weight) else str(config_for(of.rows, weight))
            yield Candidate(f"{name}; {how}", [partial(product, x, w, out=y) for x, w in operands], name)

    def cublas() -> Iterator[Candidate]:
        for name, operands in orders:
            yield Candidate(name, [partial(torch.mm, x, w, out=y) for x, w in operands], name)

    ways = [Way("", own(), cases.ERROR_BARS["bf16"]), Way("cuBLAS", cublas(), version=TORCH)]
    truths = [x.double() @ w.double() for x, w in (sets[0], sets[-1])]
    poison = partial(y.fill_, float("nan"))
    return compare(of, Trial(ways, truths, poison, len(sets), weight_bytes), bench)


def layer_parts(of: cases.Layer) -> tuple[Buffers, LayerWeights, LayerCache]:
    """Returns a layer of random matrices, its cache with just enough free room, and the buffers around it."""
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
    """Returns the error of an executed layer, and whether a skipped one left everything unchanged."""
    buffers, weights, cache = layer_parts(of)
    truth = layer_truth(of, buffers, weights, cache)
    before = [x.clone() for x in (buffers.x, cache.k, cache.v)]
    buffers.heads.fill_(float("nan"))
    for value in (0, 1):
        gate.fill_(value)
        layer_step(buffers, weights, cache, gate=gate, attend=partial(attend, gate=gate))
        if value == 0:
            same = all(torch.equal(x, y) for x, y in zip((buffers.x, cache.k, cache.v), before, strict=True))
    return relative_error(buffers.x, truth), same


def layer_truth(of: cases.Layer, buffers: Buffers, weights: LayerWeights, cache: LayerCache) -> Tensor:
    """Returns x after a layer, in float64."""
    doubled = LayerWeights(*(getattr(weights, each.name).double() for each in fields(weights)))
    return reference_layer_step(
        buffers.x.double(),
        doubled,
        LayerCache(cache.k.double(), cache.v.double()),
        buffers.lengths,
        q_heads=of.q_heads,
        attention=reference_decode_attention,
    )


def layer(bench: Bench) -> list[Bar]:
    """Runs the part `layer`: Llama 3.1 8B's, one sequence."""
    of = cases.LAYER
    gate = torch.ones(1, dtype=torch.int32, device="cuda")
    error, same = layer_error(of, gate)
    parts = layer_parts(of)
    calls = cases.calls_of(1)
    row = replace(
        cases.row_of(of, "", OWN, cases.LAYER_ERROR_BAR),
        error=error if same else float("nan"),
        config="; ".join(
            f"{name}: {config_for(of.batch, weight, chained=True)}" for name, weight in matrices(parts[1])
        ),
    )
    executed_row = replace(row, implementation=f"{OURS}, executed")
    skipped_row = replace(row, implementation=f"{OURS}, skipped", hbm_bytes=0)
    run = partial(layer_step, *parts, gate=gate, attend=partial(attend, gate=gate))
    graph, executed, skipped = capture([run] * calls), list[list[float]](), list[list[float]]()
    for _ in range(ROUNDS):
        for value, found in ((1, executed), (0, skipped)):
            gate.fill_(value)
            found.append(replayed(graph, calls, quick=bench.quick))
    state = cases.cold(1, of.hbm_bytes)
    rows = [
        cases.timed(row, cases.times(found), state)
        for row, found in ((executed_row, executed), (skipped_row, skipped))
    ]
    bench.save("layer", rows)
    for row in rows:
        bench.judge(row)
        floor = f"floor {1e6 * bench.floor_s(of):.1f}"
        say(f"{row.implementation}: {cases.cell(row)} us, {floor}, {row.note or row.error}")
    return cases.layer_bars(rows[0].times, rows[1].times)


def matrices(weights: LayerWeights) -> list[tuple[str, Tensor]]:
    """Returns a layer's matrices by name."""
    return [(name, getattr(weights, name)) for name in ("qkv", "o", "gate_up", "down")]


# -- a whole step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """A model with its caches, and what a step reads and writes: logits [batch, vocab] by head [hidden,
    vocab], token int64 [batch], and the next x of table [vocab, hidden]."""

    buffers: Buffers
    layers: list[tuple[LayerWeights, LayerCache]]
    gain: Tensor
    head: Tensor
    table: Tensor
    logits: Tensor
    token: Tensor
    # Counted on in place of lengths, so that each step has as many tokens.
    counted: Tensor

    def step(self) -> Tensor:
        """Runs one token of each sequence; returns logits."""
        b = self.buffers
        advance(self.counted)
        for weights, cache in self.layers:
            layer_step(b, weights, cache)
        norm(b.x, self.gain, out=b.normed, chained=True)
        product(b.normed, self.head, out=self.logits, chained=True)
        choose(self.logits, table=self.table, x=b.x, out=self.token, chained=True)
        return self.logits


def whole_model(of: cases.DecodeStep) -> Whole:
    """Returns a model of random matrices and caches, each layer's its own."""
    parts = [layer_parts(of.layer) for _ in range(of.layers)]
    buffers = parts[0][0]
    generator = torch.Generator(device="cuda").manual_seed(SEED)
    head, table = (
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        for size in ((of.layer.hidden, of.vocab), (of.vocab, of.layer.hidden))
    )
    token = torch.arange(of.layer.batch, device="cuda")
    return Whole(
        buffers,
        [(weights, cache) for _, weights, cache in parts],
        parts[0][1].attn_norm,
        head.mul_(of.layer.hidden**-0.5),
        table,
        torch.empty(of.layer.batch, of.vocab, device="cuda", dtype=torch.bfloat16),
        token,
        torch.zeros_like(buffers.lengths),
    )


def first_layer_error(of: cases.Layer) -> float:
    """Returns the error of one layer as the step runs it."""
    buffers, weights, cache = layer_parts(of)
    truth = layer_truth(of, buffers, weights, cache)
    for x in (buffers.normed, buffers.qkv, buffers.q, buffers.heads, buffers.gate_up, buffers.inner):
        x.fill_(float("nan"))
    layer_step(buffers, weights, cache)
    return relative_error(buffers.x, truth)


def decode_step_case(of: cases.DecodeStep, bench: Bench) -> Compared:
    """Measures a step, after a check of a layer of this shape, and of the head by what the graph left."""
    error = first_layer_error(of.layer)
    free()
    model = whole_model(of)
    model.logits.fill_(float("nan"))
    graph = capture([model.step])
    after_head = model.buffers.normed.double() @ model.head.double()
    error = max(error, relative_error(model.logits, after_head), key=nan_last)
    token, x = reference_choose(model.logits, model.table)
    if x is None or not torch.equal(model.token, token) or not torch.equal(model.buffers.x, x):
        error = float("nan")
    row = replace(cases.row_of(of, OURS, OWN, cases.LAYER_ERROR_BAR), error=error)
    found = [replayed(graph, 1, quick=bench.quick) for _ in range(ROUNDS)]
    row = cases.timed(row, cases.times(found), cases.cold(1, of.hbm_bytes))
    bench.judge(row)
    return Compared(str(of), row, (), bench.floor_s(of))
