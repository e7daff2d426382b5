"""Models with states on the machine that computes: logits of a plain float64 model, prompts in any chunks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from simcore.kernels.table import TABLE
from simcore.machine.machine import Program
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.decoder_config import DecoderConfig
from simcore.models.mixers import FULL, LINEAR, LRPE, SLIDING, LinearMixer, decays
from simcore.models.operators import NOT_ATOMIC
from simcore.models.prompt import PROMPT_METHODS, Prompt
from simcore.models.served_decoder import ServedDecoder
from simcore.ops import linear_layer
from simcore.ops.op import Op
from simcore.schedules.continuous_batching import continuous_batching
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.validate.machines.buffers.decoder import Weights, decoder_states, shards
from simcore.validate.machines.buffers.prompts import prompt_state
from simcore.validate.machines.buffers.served import prompt_ids, served_states
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.workload.requests import END, REQUESTS, Journal, Request
from tests.thorough import first, slow

torch.set_num_threads(1)
F64 = Dtypes("fp64", "fp64", "fp64")
SEED, VOCAB, EPS = 0, 60, 1e-6
SHAPE: dict[str, Any] = {
    "hidden": 24, "intermediate": 40, "layers": 3, "q_heads": 4, "kv_heads": 4, "head_dim": 6, "vocab": VOCAB,
}  # fmt: skip
RETNET = DecoderConfig(
    "retnet", **SHAPE, tied_embeddings=True, gated=False, mixers=(LINEAR,) * 3,
    linear=LinearMixer(4, 4, 6, 12), final_norm=False,
)  # fmt: skip
TRANSNORMER = DecoderConfig(
    "transnormer", **SHAPE, tied_embeddings=True, mixers=(LRPE, LINEAR, LINEAR), activated=False,
    linear=LinearMixer(4, 4, 6, 6, inputs="silu", norm="layer", decays="slopes"),
)  # fmt: skip
HYBRID = DecoderConfig(
    "hybrid", **{**SHAPE, "kv_heads": 2}, tied_embeddings=False, mixers=(LINEAR, FULL, LINEAR),
    linear=LinearMixer(4, 2, 6, 6, gated=False),
)  # fmt: skip
WINDOWED = replace(HYBRID, name="windowed", mixers=(SLIDING, LINEAR, FULL), window=4)
MODELS = pytest.mark.parametrize("config", [RETNET, TRANSNORMER, HYBRID], ids=lambda config: config.name)


# -- a plain model -------------------------------------------------------------------------------


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


def turned(x: Tensor) -> Tensor:
    """Rotary embedding of x [tokens, heads, d], rows at positions 0, 1, .."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * rates
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def widened(x: Tensor) -> Tensor:
    """LRPE: [x cos, x sin], with an angle for each head and column."""
    heads, d = x.shape[1:]
    theta = 10_000.0 ** (-2.0 / (heads * d) * torch.arange(heads * d, dtype=torch.float64)).view(heads, d)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * theta
    return torch.cat((x * angle.cos(), x * angle.sin()), -1)


def retained(q: Tensor, k: Tensor, v: Tensor, decay: Sequence[float]) -> Tensor:
    """out_i = sum over j <= i of gamma^(i - j) (q_i k_j) v_j, all positions at once; [tokens, heads, ..]."""
    row = torch.arange(len(q), dtype=torch.float64)
    heads = []
    for head, gamma in enumerate(decay):
        mask = torch.where(row[:, None] >= row, gamma ** (row[:, None] - row), 0.0)
        heads.append((q[:, head] @ k[:, head].T * mask) @ v[:, head])
    return torch.stack(heads, 1)


def attended(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Attention of each token over the last `window` ones, itself included."""
    row = torch.arange(len(q))
    hidden = (row > row[:, None]) | (row <= row[:, None] - window)
    heads = []
    for head in range(q.shape[1]):
        scores = (q[:, head] @ k[:, head].T / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, head])
    return torch.stack(heads, 1)


def mixed(config: DecoderConfig, layer: int, projected: Tensor) -> Tensor:
    """The outputs of a layer's mixer [tokens, heads dim] of its projected input."""
    kind, own, tokens = config.layer_mixers[layer], config.linear, len(projected)
    assert own is not None
    attends = kind in (FULL, SLIDING)
    heads, kv = (config.q_heads, config.kv_heads) if attends else (own.heads, own.kv_heads)
    keys, values = (config.head_dim,) * 2 if attends else (own.key_dim, own.value_dim)
    widths = [heads * keys, kv * keys, kv * values]
    q, k, v, gate = projected.split([*widths, projected.shape[1] - sum(widths)], 1)
    q, k, v = q.view(tokens, heads, keys), k.view(tokens, kv, keys), v.view(tokens, kv, values)
    if attends or own.inputs == "rotary":
        q, k = turned(q), turned(k)
    else:
        q, k = functional.silu(q), functional.silu(k)
        q, k = (widened(q), widened(k)) if kind == LRPE else (q, k)
    k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
    if attends:
        return attended(q, k, v, (config.window or tokens) if kind == SLIDING else tokens).flatten(1)
    out = retained(q, k, v, decays(own, layer, config.layers))
    out = rms(out).flatten(1) if own.norm == "head" else rms(out.flatten(1))
    if not own.gated:
        return out
    return out * (functional.silu(gate) if own.gate_activated else gate)


def plain(config: DecoderConfig, weights: Weights, ids: Sequence[int]) -> Tensor:
    """Logits after the last of some tokens, [vocab], all positions of a layer at once."""
    x = weights.outside["embedding"][list(ids)]
    for layer in range(config.layers):
        own = weights.layers[layer]
        x = x + mixed(config, layer, rms(x) * own["attn_norm"] @ own["qkv"]) @ own["o"]
        normed = rms(x) * own["mlp_norm"]
        if config.gated:
            gate, up = (normed @ own["gate_up"]).chunk(2, 1)
            inner = (functional.silu(gate) if config.activated else gate) * up
        else:
            inner = functional.gelu(normed @ own["up"])
        x = x + inner @ own["down"]
    last = rms(x[-1]) * weights.outside["head_norm"] if config.final_norm else x[-1]
    return last @ weights.outside["lm_head"]


def answer(config: DecoderConfig, weights: Weights, prompt: Sequence[int], tokens: int) -> list[int]:
    """The ids that a plain model chooses after a prompt, one after another."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(plain(config, weights, ids).argmax()))
    return ids[len(prompt) :]


# -- decoding ------------------------------------------------------------------------------------


def decoded(config: DecoderConfig, ranks: int, context: int, tokens: int, batch: int = 2) -> Any:
    model = Decoder(config, ranks=ranks, batch=batch, dtypes=F64)
    mesh = {"tensor": ranks}
    states = decoder_states(model, mesh, SEED, context, tokens)
    run = TorchRun(states, mesh=mesh, lockstep=("tensor",))
    run.run(lambda m: tensor_parallel(m, model, tokens=tokens, context=context))
    return states


@pytest.mark.parametrize("config", [RETNET, TRANSNORMER, HYBRID, WINDOWED], ids=lambda config: config.name)
def test_logits_are_those_of_a_plain_model(config: DecoderConfig) -> None:
    """Token by token from the first one on, so that states are all that is carried."""
    (weights,) = shards(config, F64, 1, "all_reduce", SEED)
    model = Decoder(config, batch=2, dtypes=F64)
    states = decoder_states(model, {"tensor": 1}, SEED, 1, 9)
    for state in states[0].states:
        state.zero_()
    first = states[0].body.ids.clone()
    TorchRun(states, mesh={"tensor": 1}).run(lambda m: tensor_parallel(m, model, tokens=9, context=1))
    for sequence in range(2):
        ids = [int(first[sequence]), *(int(states[0].chosen[token][sequence]) for token in range(8))]
        expected = plain(config, weights, ids)
        assert (states[0].logits[sequence] - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("config", [RETNET, HYBRID], ids=lambda config: config.name)
def test_ranks_compute_the_same_logits(config: DecoderConfig) -> None:
    one, two = decoded(config, 1, 7, 3), decoded(config, 2, 7, 3)
    assert torch.allclose(one[0].logits, two[0].logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@MODELS
def test_narrow_formats_keep_their_states_in_fp32(config: DecoderConfig, dtype: str) -> None:
    model = Decoder(config, batch=2, dtypes=Dtypes(dtype, dtype, dtype))
    states = decoder_states(model, {"tensor": 1}, SEED, 5, 2)
    TorchRun(states, mesh={"tensor": 1}).run(lambda m: tensor_parallel(m, model, tokens=2, context=5))
    assert torch.isfinite(states[0].logits).all()
    held = [state for state in states[0].states if state.dim() > 1]
    assert {state.dtype for state in held} == {torch.float32}
    assert sum(state.numel() * 4 for state in held) == 2 * config.state_bytes


# -- serving -------------------------------------------------------------------------------------


def served(
    config: DecoderConfig, wanted: list[Request], schedule: Callable[..., Program]
) -> dict[int, list[int]]:
    model = ServedDecoder(config, dtypes=F64)
    states = served_states(model, {"tensor": 1}, SEED, 4096)
    run = TorchRun(states, mesh={"tensor": 1}, lockstep=("tensor",))
    journal = Journal()
    run.feed(0, REQUESTS, [*((r.arrival_s, r) for r in wanted), (wanted[-1].arrival_s, END)])
    run.run(lambda m: schedule(m, model, journal))
    return states[0].answers


def batching(budget: int, blocks: int = 4096, state_blocks: int = 2) -> Callable[..., Program]:
    return partial(
        continuous_batching, blocks=blocks, block_tokens=4, token_budget=budget, max_sequences=8,
        state_blocks=state_blocks,
    )  # fmt: skip


@MODELS
@pytest.mark.parametrize("budget", first(2, [3, 64, 1, 7]))
def test_answers_are_a_plain_model_s_in_any_chunks(config: DecoderConfig, budget: int) -> None:
    """Three requests beside each other, in chunks of whatever the budget leaves."""
    (weights,) = shards(config, F64, 1, "all_reduce", SEED)
    wanted = [Request(i, 0.0, prompt, 4, 4) for i, prompt in enumerate((11, 2, 5))]
    found = served(config, wanted, batching(max(budget, 3)))
    for request in wanted:
        ids = prompt_ids(request, VOCAB, SEED).tolist()
        assert found[request.id] == answer(config, weights, ids, 4)


@cache
def of_one_whole(config: DecoderConfig, tokens: int) -> dict[int, list[int]]:
    return served(config, [Request(0, 0.0, tokens, 5, 5)], batching(1024))


@slow
@MODELS
@pytest.mark.parametrize("chunk", first(5, [1, 63, 64, 65, 700, 2, 333]))
def test_a_sequence_in_chunks_gives_the_tokens_of_one_whole(config: DecoderConfig, chunk: int) -> None:
    """700 tokens, in chunks of 63 to 700; 130 of them in shorter ones, which are as many steps."""
    tokens = 700 if chunk > 2 else 130
    whole = of_one_whole(config, tokens)
    assert served(config, [Request(0, 0.0, tokens, 5, 5)], batching(chunk)) == whole
    assert len(whole[0]) == 5


@slow
@MODELS
def test_a_preempted_request_answers_as_if_it_never_was(config: DecoderConfig) -> None:
    """Room for the states of two sequences, and soon not for their tokens: 2 (2 + ceil(n / 4)) > 15."""
    wanted = [Request(i, 0.0, 9, 14, 14) for i in range(3)]
    found = served(config, wanted, batching(16, blocks=15))
    assert sum(request.preemptions for request in wanted) > 0
    roomy = [Request(i, 0.0, 9, 14, 14) for i in range(3)]
    assert found == served(config, roomy, batching(16))
    assert sum(request.preemptions for request in roomy) == 0


# -- prompts by method ---------------------------------------------------------------------------


METHODS = [method for method in PROMPT_METHODS if method not in ("original", NOT_ATOMIC)]


@MODELS
@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_a_plain_model_s_logits(config: DecoderConfig, method: str) -> None:
    (weights,) = shards(config, F64, 1, "all_reduce", SEED)
    prompt = Prompt(config, method, 2, 70, "fp64")
    state = prompt_state(prompt, SEED)
    for _ in range(2):
        state.begin(None, {}, 0)
        for op in prompt.op.parts:
            state.execute(op)
        logits = state.served.body.buffers["logits"]
        for number in range(2):
            ids = prompt_ids(Request(number, 0.0, 70, 1, 1), VOCAB, SEED).tolist()
            expected = plain(config, weights, ids)
            assert (logits[number] - expected).abs().max() <= 1e-9 * expected.abs().max()


def test_a_model_s_published_code_does_not_run() -> None:
    with pytest.raises(ValueError, match="published code is priced, and not run here"):
        prompt_state(Prompt(RETNET, "original", 1, 8, "fp64"), SEED)


# -- kernels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    "op",
    [
        linear_layer.linear_attention_decode(batch=3, heads=2, rank=4, dim=6, dtype="fp64"),
        linear_layer.linear_attention_prompts(
            tokens=9, kv_tokens=9, pairs=25, heads=2, rank=4, dim=6, dtype="fp64"
        ),
        linear_layer.lrpe(tokens=3, width=8, dtype="fp64"),
        linear_layer.silu("x", tokens=3, width=8, dtype="fp64"),
        linear_layer.product("x", tokens=3, width=8, dtype="fp64"),
    ],
    ids=lambda op: op.kind,
)
def test_kernels_compute_what_their_references_do(op: Op, dtype: str) -> None:
    op = replace(op, dtype=dtype)
    kernel = TABLE[op.kind]
    given = kernel.inputs(op, torch.Generator().manual_seed(3), torch.device("cpu"))
    exact = [x.double().clone() if x.is_floating_point() else x for x in given]
    expected = kernel.reference(replace(op, dtype="fp64"), *exact)
    found = kernel.run(op, *given)
    tolerance = {"fp64": 1e-12, "fp32": 1e-4, "bf16": 3e-2}[dtype]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()
