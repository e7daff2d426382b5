"""Decoders with real tensors: kernels, tensor parallelism and speculation against direct float64
computations, and the serving schedules on the machine that executes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simcore.kernels.decoder import DECODER, attention
from simcore.kernels.decoder.attention import evenly, prompts_of
from simcore.kernels.decoder.rotary import angles
from simcore.kernels.table import TABLE
from simcore.machine import laws, metrics
from simcore.machine.machine import Program
from simcore.machine.trace import Trace
from simcore.models.decoder import Decoder, Dtypes, Style
from simcore.models.decoder_config import DecoderConfig
from simcore.models.served_decoder import ServedDecoder, prefill_pairs
from simcore.ops import op as ops
from simcore.ops.op import Op, Price
from simcore.schedules.alspec import alspec
from simcore.schedules.alspec_pipelined import alspec_pipelined
from simcore.schedules.concurrent_instances import concurrent_instances
from simcore.schedules.continuous_batching import continuous_batching
from simcore.schedules.dynamic_batching import dynamic_batching
from simcore.schedules.iteration_batching import iteration_batching
from simcore.schedules.temporal_fusion import temporal_fusion
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.sim.simulation import Simulation
from simcore.validate.machines.buffers.decoder import (
    DecoderState,
    Matrices,
    decoder_states,
    shards,
)
from simcore.validate.machines.buffers.served import served_states
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.workload.requests import END, REQUESTS, Journal, Request
from tests.thorough import first, slow

torch.set_num_threads(1)
fixed = settings(derandomize=True, database=None)


def formats(name: str) -> Dtypes:
    """One number format for everything."""
    return Dtypes(name, name, name)


F64, F32 = formats("fp64"), formats("fp32")
CPU = torch.device("cpu")
NEAR = 1e-10


def near(found: Tensor, expected: Tensor, tolerance: float = NEAR) -> None:
    """Equal, relative to the largest number; NaN nowhere."""
    assert found.shape == expected.shape
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


# -- kernels -----------------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds NaN."""
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))


def drawn(op: Op, seed: int) -> tuple[Tensor, ...]:
    return DECODER[op.kind].inputs(op, torch.Generator().manual_seed(seed), CPU)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query: q [q_heads, d] over k, v [context, kv_heads, d], head by head."""
    group = q.shape[0] // k.shape[1]
    heads = []
    for head, query in enumerate(q):
        keys, values = k[:, head // group], v[:, head // group]
        scores = (keys * query).sum(-1) / math.sqrt(len(query))
        weights = torch.exp(scores - scores.max())
        heads.append((weights[:, None] * values).sum(0) / weights.sum())
    return torch.stack(heads)


SHAPES = st.tuples(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 9), st.integers(1, 40)
)


@slow
@settings(fixed, max_examples=40)
@given(shape=SHAPES, chunk=st.integers(1, 25), seed=st.integers(0, 2**31))
def test_attention_and_its_speculation(shape: tuple[int, int, int, int, int], chunk: int, seed: int) -> None:
    batch, kv_heads, group, d, context = shape
    sizes = {"batch": batch, "q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": d}
    plain = ops.decode_attention(**sizes, context=context, dtype="fp64")
    speculative = ops.speculative_attention(**sizes, context=context, chunk=chunk, dtype="fp64")
    q, k, v = drawn(plain, seed)
    exact = torch.stack([attend(*(x[0], x[1].transpose(0, 1), x[2].transpose(0, 1)))
                         for x in zip(q, k, v, strict=True)])  # fmt: skip
    near(DECODER["decode_attention"].run(plain, q, k, v), exact)
    ends = sorted({*range(min(chunk, context)), *range(max(0, context - chunk), context)})
    early = torch.stack([attend(x[0], x[1][:, ends].transpose(0, 1), x[2][:, ends].transpose(0, 1))
                         for x in zip(q, k, v, strict=True)])  # fmt: skip
    found, speculated, norms = DECODER["speculative_attention"].run(speculative, q, k, v)
    near(found, exact)
    near(speculated, early)
    expected = torch.stack([(early - exact).square().sum((1, 2)), exact.square().sum((1, 2))])
    assert (norms.sum(-1) - expected).abs().max() <= NEAR * expected.max()


@slow
@settings(fixed, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    new=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    most=st.sampled_from([1, 20, 70, attention.MOST_SCORES]),
    seed=st.integers(0, 2**31),
)
def test_attention_of_many_sequences(
    lengths: list[int], new: list[int], kv_heads: int, group: int, most: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
        patch.setattr(attention, "MOST_SCORES", most)
        heads = {"q_heads": kv_heads * group, "kv_heads": kv_heads, "head_dim": 5, "dtype": "fp64"}
        paged = ops.paged_attention(sequences=len(lengths), kv_tokens=sum(lengths), **heads)  # type: ignore[arg-type]
        q, k, v, _ = drawn(paged, seed)
        out = DECODER["paged_attention"].run(paged, q, k, v, torch.tensor(lengths))
        starts = np.cumsum([0, *lengths])
        expected = [attend(q[i], k[a : a + n], v[a : a + n])
                    for i, (a, n) in enumerate(zip(starts, lengths, strict=False))]  # fmt: skip
        near(out, torch.stack(expected))
        now, before = new[: len(lengths)], [n - 1 for n in lengths]
        pairs = sum(prefill_pairs(n, c) for n, c in zip(now, before, strict=True))
        prefill = ops.prefill_attention(
            tokens=sum(now),
            kv_tokens=sum(now) + sum(before),
            pairs=pairs,
            **heads,  # type: ignore[arg-type]
        )
        q, k, v, *_ = drawn(prefill, seed)
        out = DECODER["prefill_attention"].run(prefill, q, k, v, torch.tensor(now), torch.tensor(before))
        rows, first = [], 0
        for n, c in zip(now, before, strict=True):
            rows += [(first, c + i + 1) for i in range(n)]
            first += n + c
        near(out, torch.stack([attend(q[i], k[a : a + n], v[a : a + n]) for i, (a, n) in enumerate(rows)]))


def test_a_long_prompt_is_computed_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 7 tokens after 3, and of 5, two rows at most; as by one row for each query."""
    monkeypatch.setattr(attention, "MOST_SCORES", 45)
    op = ops.prefill_attention(
        tokens=12, kv_tokens=15, pairs=prefill_pairs(7, 3) + prefill_pairs(5, 0),
        q_heads=2, kv_heads=1, head_dim=5, dtype="fp64",
    )  # fmt: skip
    q, k, v, *_ = drawn(op, 3)
    now, before = torch.tensor([7, 5]), torch.tensor([3, 0])
    out = DECODER["prefill_attention"].run(op, q, k, v, now, before)
    rows = [(0, 3 + i + 1) for i in range(7)] + [(10, i + 1) for i in range(5)]
    near(out, torch.stack([attend(q[i], k[a : a + n], v[a : a + n]) for i, (a, n) in enumerate(rows)]))


@given(prompts=st.integers(1, 20), tokens=st.integers(1, 50), cached=st.integers(0, 50))
@settings(fixed, max_examples=60)
def test_prompts_are_told_from_their_pairs(prompts: int, tokens: int, cached: int) -> None:
    op = ops.prefill_attention(
        tokens=prompts * tokens, kv_tokens=prompts * (tokens + cached), q_heads=1, kv_heads=1, head_dim=1,
        pairs=prompts * prefill_pairs(tokens, cached), dtype="fp32",
    )  # fmt: skip
    assert prompts_of(op) == ([tokens] * prompts, [cached] * prompts)
    assert sum(evenly(tokens, prompts)) == tokens


@pytest.mark.parametrize("seed", range(3))
def test_projections_and_rows(seed: int) -> None:
    op = ops.matmul("m", m=3, n=7, k=5, dtype="fp64")
    x, weight = drawn(op, seed)
    near(DECODER["matmul"].run(op, x, weight), (x[:, :, None] * weight[None]).sum(1))
    op = ops.embedding(tokens=5, hidden=3, dtype="fp64")
    ids, table = drawn(op, seed)
    near(DECODER["embedding"].run(op, ids, table), torch.stack([table[int(i)] for i in ids]))
    op = ops.norm("n", tokens=3, hidden=7, dtype="fp64")
    x, gain = drawn(op, seed)
    rows = [row * gain / math.sqrt(float((row * row).sum()) / 7 + 1e-6) for row in x]
    near(DECODER["norm"].run(op, x, gain), torch.stack(rows))
    op = ops.sample(tokens=5, vocab=11, dtype="fp64")
    (logits,) = drawn(op, seed)
    logits[0] = 1.0
    found = DECODER["sample"].run(op, logits)
    assert found.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]


@pytest.mark.parametrize("d", [1, 2, 5, 8])
def test_rotary_turns_pairs(d: int) -> None:
    op = ops.rotary(tokens=3, q_heads=4, kv_heads=2, head_dim=d, dtype="fp64")
    qkv, *_ = drawn(op, d)
    positions = torch.tensor([0, 7, 1001])
    q, k, v = DECODER["rotary"].run(op, qkv, *angles(positions, d, torch.float64))
    heads = qkv.view(3, 8, d)
    turned, half = heads[:, :6].clone(), d // 2
    for t, i in np.ndindex(3, half):
        turn = complex(math.cos(a := int(positions[t]) * 10_000.0 ** (-i / half)), math.sin(a))
        for head in range(6):
            z = complex(heads[t, head, i], heads[t, head, half + i]) * turn
            turned[t, head, i], turned[t, head, half + i] = z.real, z.imag
    near(torch.cat((q, k), 1), turned, 1e-9)
    assert torch.equal(v, heads[:, 6:])


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_in_place(seed: int) -> None:
    op = ops.residual("r", tokens=3, hidden=5, dtype="fp64")
    y, x = drawn(op, seed)
    expected = x + y
    DECODER["residual"].run(op, y, x)
    assert torch.equal(x, expected)
    op = ops.kv_append(tokens=3, kv_heads=2, head_dim=5, dtype="fp64")
    k, v, *_ = drawn(op, seed)
    cache = torch.full((2, 3, 2, 7, 5), torch.nan, dtype=torch.float64)
    DECODER["kv_append"].run(op, k, v, cache[0, :, :, 4], cache[1, :, :, 4])
    assert torch.equal(cache[:, :, :, 4], torch.stack((k, v)))
    assert cache.isnan().sum() == cache.numel() - 2 * k.numel()
    for op in (
        ops.kv_copy(tokens=3, width=5, dtype="fp64"),
        ops.receive_speculation(tokens=3, width=5, dtype="fp64"),
    ):
        source, _ = drawn(op, seed)
        target = torch.full_like(source, torch.nan)
        DECODER[op.kind].run(op, source, target)
        assert torch.equal(source, target)


def test_activations() -> None:
    gated = ops.activation(tokens=3, width=5, gated=True, dtype="fp64")
    gate, up = drawn(gated, 1)
    near(DECODER["activation"].run(gated, gate, up), gate / (1 + torch.exp(-gate)) * up)
    plain = ops.activation(tokens=3, width=5, gated=False, dtype="fp64")
    (x,) = drawn(plain, 1)
    near(DECODER["activation"].run(plain, x), x * (1 + torch.erf(x / math.sqrt(2))) / 2)


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
def test_every_kind_that_is_launched_has_a_kernel_in_every_format(dtype: str) -> None:
    config = replace(GQA, qk_norm=True)
    sizes = {"context": 9, "tokens": 7, "rows": 3, "sequences": 2, "kv_tokens": 11, "over_mean": 0}
    sizes |= {"prompt_tokens": 5, "prompt_kv": 8, "prompt_pairs": 20}
    model, served = Decoder(config, dtypes=formats(dtype), chunk=2), ServedDecoder(config)
    served = replace(served, dtypes=model.dtypes)
    graphs = [model.token_step, model.speculate, model.receive, served.mixed, served.move]
    kinds = {op.kind: op.at(sizes) for graph in graphs for op in graph.ops}
    # Machines compute in no format of 8 bits, which alone have `quantize`.
    assert set(DECODER) == {*kinds, "quantize"}
    assert DECODER.keys() <= TABLE.keys()
    for kind, op in kinds.items():
        tensors = drawn(op, 3)
        out = DECODER[kind].run(op, *tensors)
        wide = [x.double() if x.is_floating_point() else x for x in drawn(op, 3)]
        truth = DECODER[kind].reference(op, *wide)
        several = isinstance(out, tuple)
        for one, other in zip(out if several else (out,), truth if several else (truth,), strict=True):
            if one is not None and kind != "sample":
                near(one.double(), other, {"fp64": 1e-12, "fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}[dtype])


# -- a decoder, computed directly -----------------------------------------------------------------------

GQA = DecoderConfig("gqa", 32, 24, 3, 8, 2, 6, 53, tied_embeddings=False)
CONFIGS = {
    "gqa": GQA,
    "tied, normed heads": replace(GQA, layers=2, tied_embeddings=True, qk_norm=True, kv_heads=4),
    "parallel": replace(GQA, layers=2, gated=False, parallel_residual=True, kv_heads=8),
}
SEED, CONTEXT, BATCH = 5, 11, 3


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x * gain / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def turned(x: Tensor, position: int) -> Tensor:
    half = x.shape[-1] // 2
    turn = position * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((z.real, z.imag), -1)


class Dense:
    """The whole model on one rank, sequence by sequence, without any op of the project."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.weights = shards(config, F64, 1, "all_reduce", SEED)[0]
        (state,) = decoder_states(Decoder(config, batch=BATCH, dtypes=F64), {"tensor": 1}, SEED, CONTEXT, 0)
        self.ids = state.body.ids.tolist()
        caches = zip(state.k, state.v, strict=True)
        self.cache = [[x[:, :, : CONTEXT - 1].transpose(1, 2) for x in pair] for pair in caches]

    def decode(
        self, tokens: int, hits: Callable[[int, int], bool] = lambda *_: False, chunk: int = 1
    ) -> tuple[list[list[int]], Tensor]:
        """Ids of each token, and the logits [batch, vocab] of the last. Where a speculation hits, attention
        is over the first and last chunk."""
        self.hits, self.chunk = hits, chunk
        found, logits = [], []
        ids, caches = self.ids, [list(zip(*pair, strict=True)) for pair in self.cache]
        for token in range(tokens):
            logits = [self._step(ids[b], CONTEXT - 1 + token, caches, b) for b in range(BATCH)]
            ids = [int(row.argmax()) for row in logits]
            found.append(ids)
        return found, torch.stack(logits)

    def _step(self, id_: int, position: int, caches: Any, b: int) -> Tensor:
        c, outside = self.config, self.weights.outside
        x = outside["embedding"][id_]
        for layer, (w, cache) in enumerate(zip(self.weights.layers, caches, strict=True)):
            normed = rms(x, w["attn_norm"])
            heads = (normed @ w["qkv"]).view(-1, c.head_dim)
            q, k, v = heads.split([c.q_heads, c.kv_heads, c.kv_heads])  # type: ignore[no-untyped-call]
            if c.qk_norm:
                q, k = rms(q, w["qk_norm"][: c.q_heads]), rms(k, w["qk_norm"][c.q_heads :])
            q, k = turned(q, position), turned(k, position)
            keys, values = cache[b]
            cache[b] = torch.cat((keys, k[None])), torch.cat((values, v[None]))
            seen = list(range(position + 1))
            if self.hits(position + 1 - CONTEXT, layer) and 2 * self.chunk < len(seen):
                seen = seen[: self.chunk] + seen[-self.chunk :]
            out = attend(q, *(x[seen] for x in cache[b])).flatten() @ w["o"]
            if c.parallel_residual:
                x = x + out + self._mlp(normed, w)
            else:
                x = x + out
                x = x + self._mlp(rms(x, w["mlp_norm"]), w)
        return rms(x, outside["head_norm"]) @ outside["lm_head"]

    def _mlp(self, x: Tensor, w: Matrices) -> Tensor:
        if not self.config.gated:
            inner = x @ w["up"]
            return (inner * (1 + torch.erf(inner / math.sqrt(2))) / 2) @ w["down"]
        gate, up = (x @ w["gate_up"]).chunk(2)
        return (gate / (1 + torch.exp(-gate)) * up) @ w["down"]


def decode(
    model: Decoder, mesh: dict[str, int], schedule: Callable[..., Program], tokens: int, **how: Any
) -> tuple[list[DecoderState], Trace]:
    states = decoder_states(model, mesh, SEED, CONTEXT, tokens)
    run = TorchRun(states, mesh=mesh, **how)
    trace = run.run(lambda m: schedule(m, model, tokens=tokens, context=CONTEXT))
    laws.enforce(trace)
    found = metrics.tokens(trace)
    assert [token.index for token in found] == list(range(tokens))
    for token in found:
        assert sum(seconds for *_, seconds in token.stretches) == pytest.approx(token.latency_s)
    return states, trace


def right(states: Sequence[DecoderState], token: int) -> DecoderState:
    """Whose choice of a token counts, of ranks that together are one model or several copies of it: where two
    copies went on from an attention, the one that made it exactly. (Around a ring the data do not tell: there
    the rank that marked the token.)"""
    chose = [state for state in states if token in state.chosen]
    return next((state for state in chose if state.attended_exactly_at[token]), chose[0])


def answer(states: Sequence[DecoderState]) -> list[Tensor]:
    """The ids [batch] of every token that was decoded."""
    tokens = sorted({token for state in states for token in state.chosen})
    return [right(states, token).chosen[token] for token in tokens]


def same_as_dense(
    states: Sequence[DecoderState], config: DecoderConfig, tokens: int, *speculation: Any
) -> None:
    ids, logits = Dense(config).decode(tokens, *speculation)
    assert [chosen.tolist() for chosen in answer(states)] == ids
    near(right(states, tokens - 1).logits[:, : config.vocab], logits)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_tensor_parallel_is_the_dense_model(name: str, ranks: int) -> None:
    model = Decoder(CONFIGS[name], ranks=ranks, batch=BATCH, dtypes=F64)
    states, trace = decode(model, {"tensor": ranks}, tensor_parallel, 3)
    same_as_dense(states, CONFIGS[name], 3)
    for state in states:
        near(state.logits[:, :53], states[0].logits[:, :53])
        assert (state.logits[:, 53:] == -torch.inf).all()
    ran = [p.op.name for s in trace.spans for p in s.ops]
    assert ran.count("attention") == 3 * ranks * CONFIGS[name].layers


@pytest.mark.parametrize("style", ["scatter_gather", "fused_gather"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_other_styles_compute_the_same_logits(name: str, ranks: int, style: Style) -> None:
    """Each rank has those of its slice of the vocabulary; only the first token has the same input."""
    model = Decoder(CONFIGS[name], ranks=ranks, batch=BATCH, dtypes=F64, style=style)
    states, _ = decode(model, {"tensor": ranks}, tensor_parallel, 1)
    near(torch.cat([state.logits for state in states], 1)[:, :53], Dense(CONFIGS[name]).decode(1)[1])


def test_lockstep_decodes_the_same() -> None:
    model = Decoder(GQA, ranks=2, batch=BATCH, dtypes=F64)
    states, _ = decode(model, {"tensor": 2}, tensor_parallel, 2, lockstep=("tensor",))
    same_as_dense(states, GQA, 2)


def pattern(bits: int) -> Callable[[int, int], bool]:
    return lambda token, layer: bool(bits >> (3 * token + layer) & 1)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", first(1, CONFIGS))
def test_speculation_that_always_misses_decodes_the_same(name: str, ranks: int, overlap: bool) -> None:
    model = Decoder(CONFIGS[name], ranks=ranks, batch=BATCH, dtypes=F64, chunk=2)
    schedule = partial(alspec, overlap_last_layer=overlap)
    outcomes = {"hit": lambda token, layer: False}
    states, _ = decode(model, {"group": 2, "tensor": ranks}, schedule, 3, outcomes=outcomes)
    same_as_dense(states, CONFIGS[name], 3)
    # What was speculated is not what is exact, so that going on from it would show.
    assert min(states[0].errors.values()) > 1e-3


@slow
@settings(fixed, max_examples=12)
@given(bits=st.integers(0, 2**9 - 1), overlap=st.booleans(), name=st.sampled_from(list(CONFIGS)))
def test_speculation_over_the_whole_context_decodes_the_same(bits: int, overlap: bool, name: str) -> None:
    """Two chunks hold every token, so what is speculated is exact, whoever goes on."""
    model = Decoder(CONFIGS[name], batch=BATCH, dtypes=F64, chunk=7)
    schedule = partial(alspec, overlap_last_layer=overlap)
    states, _ = decode(model, {"group": 2, "tensor": 1}, schedule, 3, outcomes={"hit": pattern(bits)})
    same_as_dense(states, CONFIGS[name], 3)


@slow
@settings(fixed, max_examples=20)
@given(bits=st.integers(0, 2**9 - 1), overlap=st.booleans(), name=st.sampled_from(list(CONFIGS)))
def test_speculation_decodes_what_its_hits_left_out(bits: int, overlap: bool, name: str) -> None:
    model = Decoder(CONFIGS[name], batch=BATCH, dtypes=F64, chunk=2)
    schedule = partial(alspec, overlap_last_layer=overlap)
    states, _ = decode(model, {"group": 2, "tensor": 1}, schedule, 3, outcomes={"hit": pattern(bits)})
    same_as_dense(states, CONFIGS[name], 3, pattern(bits), 2)


def test_a_hit_goes_on_from_what_was_speculated() -> None:
    """With tokens left out it is not the dense model any more; with a miss at the same place it is."""
    model = Decoder(GQA, ranks=2, batch=BATCH, dtypes=F64, chunk=1)
    mesh, logits = {"group": 2, "tensor": 2}, Dense(GQA).decode(1)[1]
    for layer in range(3):
        states, _ = decode(model, mesh, alspec, 1, outcomes={"hit": lambda _, i, at=layer: i == at})
        off = (right(states, 0).logits[:, :53] - logits).abs().max()
        assert off / logits.abs().max() > 1e-3
        errors = [s.errors[0, layer] for s in states if (0, layer) in s.errors]
        assert len(set(errors)) == 1
        state = next(s for s in states if (0, layer) in s.errors)
        assert state.hits(0, layer, errors[0] * 1.01)
        assert not state.hits(0, layer, errors[0])


def test_the_error_is_that_of_all_heads() -> None:
    one, _ = decode(
        Decoder(GQA, batch=BATCH, dtypes=F64, chunk=2), {"group": 2, "tensor": 1}, alspec, 1,
        outcomes={"hit": lambda *_: False},
    )  # fmt: skip
    two, _ = decode(
        Decoder(GQA, ranks=4, batch=BATCH, dtypes=F64, chunk=2), {"group": 2, "tensor": 4}, alspec, 1,
        outcomes={"hit": lambda *_: False},
    )  # fmt: skip
    assert two[3].errors == pytest.approx(one[0].errors, rel=1e-9)


@slow
@pytest.mark.parametrize("groups", [2, 3, 4])
def test_speculation_around_a_ring_decodes_a_first_token(groups: int) -> None:
    """The first token alone: later ones would need K and V of layers that other groups of the ring computed,
    which the schedule does not model."""
    model = Decoder(GQA, batch=BATCH, dtypes=F64, chunk=2)
    for bits in range(8):
        states, trace = decode(model, {"group": groups}, alspec_pipelined, 1, outcomes={"hit": pattern(bits)})
        (mark,) = trace.marks
        same_as_dense([states[mark.rank]], GQA, 1, pattern(bits), 2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_smaller_formats_run(dtype: str) -> None:
    model = Decoder(GQA, ranks=2, batch=BATCH, dtypes=formats(dtype))
    states, _ = decode(model, {"tensor": 2}, tensor_parallel, 1)
    near(states[0].logits[:, :53].double(), Dense(GQA).decode(1)[1], {"fp32": 1e-5, "bf16": 0.1}[dtype])


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Decoder(GQA, ranks=2), "a model for 2 ranks on 1"),
        (Decoder(GQA, parts=True), "every op of a layer"),
        (Decoder(GQA, dtypes=Dtypes("bfp8")), "not in bfp8"),
    ],
)
def test_what_cannot_be_executed_is_refused(model: Decoder, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        decoder_states(model, {"tensor": 1}, SEED, CONTEXT, 1)


# -- serving ------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[int], Callable[..., Program]]] = {
    "temporal_fusion": lambda places: partial(temporal_fusion, slots=places, slot_tokens=16),
    "dynamic_batching": lambda places: partial(
        dynamic_batching, window_s=0.002, max_batch=places, capacity=16 * places
    ),
    "concurrent_instances": lambda places: partial(concurrent_instances, max_instances=places),
    "iteration_batching": lambda places: partial(iteration_batching, max_batch=places, slot_tokens=16),
    "continuous_batching": lambda places: partial(
        continuous_batching, blocks=8 * places, block_tokens=2, token_budget=16, max_sequences=places
    ),
}


def asked(name: str) -> list[Request]:
    lengths = [4] * 5 if name == "iteration_batching" else [3, 5, 1, 4, 2]
    return [Request(i, 0.001 * i, 3 + 2 * i, n, n) for i, n in enumerate(lengths)]


def serve(run: Any, schedule: Callable[..., Program], model: ServedDecoder, wanted: list[Request]) -> Journal:
    journal = Journal()
    run.feed(0, REQUESTS, [*((r.arrival_s, r) for r in wanted), (wanted[-1].arrival_s, END)])
    run.run(lambda m: schedule(m, model, journal))
    return journal


def torch_served(model: ServedDecoder, kv_tokens: int = 64) -> TorchRun:
    mesh = {"tensor": model.ranks}
    return TorchRun(served_states(model, mesh, SEED, kv_tokens), mesh=mesh, lockstep=("tensor",))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("places", first(1, [3, 1]))
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_serve_everybody(name: str, places: int, ranks: int) -> None:
    model, wanted = ServedDecoder(CONFIGS["gqa"], ranks=ranks, dtypes=F32), asked(name)
    run = torch_served(model)
    journal = serve(run, SCHEDULES[name](places), model, wanted)
    laws.enforce(run.trace)
    for r in wanted:
        assert r.arrival_s <= r.scheduled_s < r.first_token_s <= r.finish_s <= run.now()
    steps = journal.table()
    assert (np.diff(steps["end_s"]) >= 0.0).all()
    assert (steps["start_s"] < steps["end_s"]).all()
    tokens = sum(r.output_tokens for r in wanted)
    assert (steps["replays"] * steps["decoding"]).sum() + steps["first_tokens"].sum() == tokens
    assert steps["prefill_tokens"].sum() == sum(r.prompt_tokens for r in wanted)
    busy_s = sum(p.price.seconds for s in run.trace.spans for p in s.ops)
    assert run.trace.rows.sources == {"measured": pytest.approx(busy_s)}
    assert {s.rank for s in run.trace.spans} == set(range(ranks))


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_at_a_time_steps_are_those_of_the_simulated_machine(name: str) -> None:
    """With one place no time decides: who is served is who came first."""
    model, schedule = ServedDecoder(CONFIGS["gqa"], dtypes=F32), SCHEDULES[name](1)
    run = torch_served(model)
    real = serve(run, schedule, model, asked(name)).table()
    simulation = Simulation(lambda op: Price(1e-4, 1e-4, 1e-4, "assumed", "even"))
    simulated = serve(simulation, schedule, model, asked(name)).table()
    for column in ("replays", "decoding", "computed", "prefill_tokens", "first_tokens", "kv_used"):
        assert real[column].tolist() == simulated[column].tolist()

    def log(trace: Trace) -> list[tuple[str, Any]]:
        spans = sorted(trace.spans, key=lambda s: (s.start_s, s.id))
        return [(s.graph, (p.op.name, p.op.shape)) for s in spans for p in s.ops]

    assert log(run.trace) == log(simulation.trace)


def test_slots_are_moved_and_prompts_join() -> None:
    model = ServedDecoder(CONFIGS["gqa"], dtypes=F32)
    wanted = [Request(i, 0.0, 4, n, n) for i, n in enumerate([9, 2, 9])]
    run = torch_served(model)
    serve(run, SCHEDULES["temporal_fusion"](3), model, wanted)
    assert [p.op["tokens"] for s in run.trace.spans for p in s.ops if p.op.kind == "kv_copy"] == [16]
    assert all(r.finish_s > 0.0 for r in wanted)


def test_more_than_the_cache_holds_is_refused() -> None:
    model = ServedDecoder(CONFIGS["gqa"], dtypes=F32)
    with pytest.raises(ValueError, match=r"attends over 12 tokens; the KV cache has 8|appends"):
        serve(
            torch_served(model, 8), SCHEDULES["concurrent_instances"](1), model, [Request(0, 0.0, 12, 2, 2)]
        )
    with pytest.raises(ValueError, match="every op of an iteration"):
        served_states(ServedDecoder(GQA, whole=True), {"tensor": 1}, SEED, 8)
    with pytest.raises(ValueError, match="a model for 2 ranks on 1"):
        served_states(ServedDecoder(GQA, ranks=2), {"tensor": 1}, SEED, 8)
