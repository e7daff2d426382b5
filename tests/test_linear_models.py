"""Models of linear attention and hybrids: their configs; work and memory of a layer in closed form."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.assembly import assemble
from simcore.input.files import InputError
from simcore.models.decoder import STYLES, Decoder, Dtypes, Style, why_not
from simcore.models.decoder_config import DecoderConfig, ModelError, config_from_hugging_face, load_config
from simcore.models.mixers import FULL, LINEAR, LRPE, SLIDING, LinearMixer, decays
from simcore.models.served_decoder import ServedDecoder, decode_sizes, step_sizes
from simcore.ops import linear_layer
from simcore.ops.op import Graph, Op, Size, UnboundSizeError
from simcore.scenario import parse_scenario
from tests.thorough import slow

MODELS = Path(__file__).parents[1] / "scenarios" / "models"
RETNET = json.loads((MODELS / "toy-retnet-1.3b.json").read_text(encoding="utf-8"))
TRANSNORMER = json.loads((MODELS / "transnormerllm-7b.json").read_text(encoding="utf-8"))
HYBRID = json.loads((MODELS / "hybrid-8b.json").read_text(encoding="utf-8"))
# A RetNet with the widths of keys and values apart, and a hybrid with fewer KV heads than heads.
TOY = DecoderConfig(
    "toy", 48, 96, 3, 4, 4, 8, 100, tied_embeddings=True, gated=False, mixers=(LINEAR,) * 3,
    linear=LinearMixer(4, 4, 8, 16), final_norm=False,
)  # fmt: skip
MIXED = DecoderConfig(
    "mixed", 48, 96, 4, 4, 2, 12, 100, tied_embeddings=False, mixers=(LINEAR, LINEAR, LINEAR, FULL),
    linear=LinearMixer(4, 2, 12, 12, gated=False),
)  # fmt: skip
fixed = settings(derandomize=True, database=None, max_examples=60)


def read(config: Mapping[str, Any], **changed: Any) -> DecoderConfig:
    merged = {**config, **changed}
    return config_from_hugging_face("toy", {k: v for k, v in merged.items() if v != "missing"})


# -- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("toy-retnet-1.3b", 5.36 / 4),  # its pytorch_model.bin: 5.36 GB in fp32
        ("transnormerllm-7b", (9.88 + 9.91 + 7.55) / 4),  # its three files in fp32
        ("hybrid-8b", 8.030),  # Llama 3.1 8B: a linear layer has the matrices of the layer that it replaces
    ],
)
def test_parameters_are_those_of_the_published_checkpoints(name: str, billions: float) -> None:
    assert load_config(MODELS / f"{name}.json").parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_retnet_by_both_authors_keys() -> None:
    config = read(RETNET)
    assert (config.hidden, config.layers, config.intermediate, config.vocab) == (2048, 24, 4096, 64000)
    assert config.linear == LinearMixer(8, 8, 256, 512)
    assert (config.gated, config.final_norm, config.tied_embeddings) == (False, False, True)
    revised = {
        "model_type": "retnet", "vocab_size": 33620, "decoder_embed_dim": 1280, "decoder_ffn_embed_dim": 2560,
        "decoder_value_embed_dim": 2560, "decoder_layers": 12, "decoder_retention_heads": 8,
    }  # fmt: skip
    other = read(revised)
    assert other.linear == LinearMixer(8, 8, 160, 320)
    assert (other.gated, other.final_norm, other.tied_embeddings) == (True, True, False)
    assert other.layer_mixers == (LINEAR,) * 12


def test_a_transnormer_is_known_by_its_class_where_it_names_no_type() -> None:
    config = read(TRANSNORMER, model_type="missing")
    assert config == read(TRANSNORMER)
    assert config.layer_mixers == (LRPE, *(LINEAR,) * 29)
    assert config.linear is not None
    assert [config.linear.rank(kind) for kind in (LRPE, LINEAR)] == [256, 128]
    # 29 layers of 32 heads of 128 by 128, and one of 256 by 128, in fp32.
    assert config.state_bytes == (29 + 2) * 32 * 128 * 128 * 4


def test_a_hybrid_names_the_mixer_of_each_layer() -> None:
    config, full = read(HYBRID), read(HYBRID, layer_types="missing")
    assert config.layer_mixers == (LINEAR, LINEAR, LINEAR, FULL) * 8
    assert config.linear == LinearMixer(32, 8, 128, 128, gated=False)
    assert config.parameters == full.parameters
    assert (full.linear, full.mixers) == (None, ())
    cut = config.first_layers(2)
    assert (cut.layers, cut.layer_mixers) == (2, (LINEAR, LINEAR))
    with_window = read(HYBRID, sliding_window=10**6, layer_types=["sliding_attention", LINEAR] * 16)
    assert with_window.layer_mixers == (FULL, LINEAR) * 16


def test_layers_with_a_window_attend_over_no_more_than_that() -> None:
    """And keep no more K and V: of Llama's shape 4 KiB a token and layer."""
    types = [FULL, SLIDING, LINEAR, SLIDING] * 8
    config = read(HYBRID, layer_types=types, sliding_window=4096)
    assert (config.layer_mixers, config.window) == (tuple(types), 4096)
    (op_,) = [each for each in Decoder(config).layer(SLIDING) if each.kind == "decode_attention"]
    assert [op_.at({"context": n})["context"] for n in (1, 4096, 4097, 10**6)] == [1, 4096, 4096, 4096]
    model = Decoder(config, batch=3)
    for context in (100, 4096, 50_000):
        assert model.kv_bytes(context) == 3 * 4096 * (8 * context + 16 * min(context, 4096))
    with pytest.raises(ModelError, match="toy: layers with a window are not served yet"):
        ServedDecoder(config).decode  # noqa: B018


def test_sizes_that_end_at_a_most() -> None:
    size = Size("n", most=10)
    assert [size.at(n) for n in (3, 10, 11)] == [3, 10, 10]
    assert [(size * 2).at(n) for n in (3, 11)] == [6, 20]
    assert [(size + 2).at(n) for n in (3, 11)] == [5, 10]


@pytest.mark.parametrize(
    ("config", "changed", "says"),
    [
        (RETNET, {"num_heads": "missing"}, "num_heads or decoder_retention_heads is missing"),
        (RETNET, {"qk_dim": 2047}, "qk_dim 2047 does not divide by 8 heads"),
        (RETNET, {"v_dim": "4096"}, "v_dim is '4096'; a whole number from 1 to 100,000,000 is needed"),
        (RETNET, {"num_layers": 10**6}, "num_layers is 1000000; a whole number from 1 to 10,000 is needed"),
        (RETNET, {"tie_word_embeddings": 1}, "tie_word_embeddings is 1 (allowed: true, false)"),
        (
            TRANSNORMER,
            {"linear_use_lrpe_list": [1, 0]},
            "linear_use_lrpe_list must have a 0 or 1 for each of",
        ),
        (TRANSNORMER, {"glu_dim": "missing"}, "glu_dim is missing"),
        (HYBRID, {"layer_types": [LINEAR] * 31}, "layer_types must have one of the 32 layers each"),
        (
            HYBRID,
            {"layer_types": [LINEAR, "mamba"] * 16},
            "layer_types has 'mamba' (allowed: full_attention, sliding_attention, linear_attention)",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_key(
    config: Mapping[str, Any], changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(ModelError, match=f"^toy: .*{re.escape(says)}"):
        read(config, **changed)


def test_decays_of_heads() -> None:
    """RetNet's from 1 - 1/32 to 1 - 1/512; TransNormerLLM's slopes halve from head to head of eight, and
    vanish in the last layer."""
    retnet = decays(LinearMixer(8, 8, 1, 1), 5, 24)
    assert (retnet[0], retnet[-1]) == (pytest.approx(31 / 32), pytest.approx(511 / 512))
    slopes = [-log(each) for each in decays(LinearMixer(8, 8, 1, 1, decays="slopes"), 0, 24)]
    assert [a / b for a, b in pairwise(slopes)] == [pytest.approx(2.0)] * 7
    assert decays(LinearMixer(8, 8, 1, 1, decays="slopes"), 23, 24)[0] == pytest.approx(exp(-5e-6))


# -- work ----------------------------------------------------------------------------------------


def op(ops: tuple[Op, ...], name: str) -> Op:
    (found,) = (each for each in ops if each.name == name)
    return found


def test_a_step_of_one_layer_in_closed_form() -> None:
    """A multiply for gamma S, a multiply-add for k^T v and one for q S; the state in fp32, read and written;
    q, k, v and out."""
    step = linear_layer.linear_attention_decode(batch=3, heads=8, rank=256, dim=512, dtype="bf16")
    assert step.work.flops == 3 * 8 * 5 * 256 * 512
    assert step.work.hbm_bytes == 3 * 8 * (2 * 4 * 256 * 512 + 2 * (2 * 256 + 2 * 512))


@fixed
@given(st.integers(1, 5), st.integers(1, 900), st.integers(0, 900))
def test_chunks_of_equal_prompts_in_closed_form(count: int, tokens: int, cached: int) -> None:
    sizes = step_sizes(0, 0, [(tokens, cached)] * count, 0)
    chunk = linear_layer.linear_attention_prompts(
        tokens=sizes["prompt_tokens"], kv_tokens=sizes["prompt_kv"], pairs=sizes["prompt_pairs"],
        heads=8, rank=16, dim=32, dtype="bf16",
    )  # fmt: skip
    assert linear_layer.prompts_of(chunk) == count
    states = 2 * count * 8 * 16 * 32 * 4
    assert chunk.work.hbm_bytes == states + 2 * count * tokens * 8 * 2 * (16 + 32)
    stand_in = linear_layer.as_lightning(chunk)
    assert (stand_in["batch"], stand_in["length"], stand_in["states"]) == (count, tokens, 1)


@pytest.mark.parametrize("config", [TOY, MIXED, read(RETNET), read(TRANSNORMER), read(HYBRID)])
def test_matrices_of_a_token_are_the_weights_once(config: DecoderConfig) -> None:
    """Two operations a weight; the embedding is looked up, and its table is the head's too if it is tied."""
    step = Decoder(config).token_step
    products = [each for each in step.ops if each.kind == "matmul"]
    head = config.vocab * config.hidden
    assert sum(each["n"] * each["k"] for each in products) == config.matrices + head
    tied = 0 if config.tied_embeddings else head
    assert config.parameters == config.matrices + head + tied
    assert Decoder(config).weight_bytes == 2.0 * config.parameters


def test_a_token_of_linear_layers_reads_no_context() -> None:
    """Whatever the context: no op of a model of linear attention alone depends on it."""
    for config in (TOY, read(TRANSNORMER)):
        assert Decoder(config).token_step.reads == frozenset()
        assert Decoder(config, batch=4).kv_bytes(1000) == 0.0
    assert Decoder(MIXED).token_step.reads == {"context"}
    with pytest.raises(UnboundSizeError):
        op(Decoder(MIXED).token_step.ops, "attention").work  # noqa: B018


def test_states_take_their_bytes() -> None:
    """heads * rank * dim * 4 a sequence and layer, beside 2 kv_heads head_dim numbers a token and layer."""
    assert TOY.state_bytes == 3 * 4 * 8 * 16 * 4
    assert MIXED.state_bytes == 3 * 4 * 12 * 12 * 4
    model = Decoder(MIXED, ranks=2, batch=5)
    assert model.state_bytes == 5 * MIXED.state_bytes / 2
    assert model.kv_bytes(10) == 1 * 2 * 1 * 12 * 2.0 * 5 * 10
    assert model.read_bytes(10) == pytest.approx(
        model.weight_bytes - 2.0 * 100 * 48 + model.kv_bytes(10) + model.state_bytes
    )
    served = ServedDecoder(MIXED, 2)
    assert served.kv_bytes_per_token == 2 * 1 * 12 * 2.0
    assert served.state_bytes_per_sequence == MIXED.state_bytes / 2
    # Llama 3.1 8B has 128 KiB a token; the hybrid a fourth of it, and 24 states of 2 MiB.
    hybrid = read(HYBRID)
    assert ServedDecoder(hybrid).kv_bytes_per_token == 32 * 1024
    assert ServedDecoder(hybrid).state_bytes_per_sequence == 48 * 2**20


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("config", [TOY, MIXED])
def test_ranks_share_heads_and_states(config: DecoderConfig, style: Style) -> None:
    """Of n ranks each does an n-th of a layer's products, and of the work on its states."""
    whole, part = Decoder(config, style=style), Decoder(config, ranks=2, style=style)
    for kind in ("matmul", "linear_attention_decode"):
        flops = [
            sum(o.work.flops for each in model.token_step.ops for o in (each, *each.parts) if o.kind == kind)
            for model in (whole, part)
        ]
        assert flops[0] == pytest.approx(2 * flops[1])
    assert why_not(config, 2) is None
    assert str(why_not(replace(MIXED, kv_heads=4), 4)).endswith(
        "KV heads with a state, which 4 ranks do not divide"
    )


def test_a_norm_over_all_heads_takes_one_rank() -> None:
    at_once = "toy norms the outputs of all heads at once, which 2 ranks do not"
    assert (why_not(read(TRANSNORMER), 1), why_not(read(TRANSNORMER), 2)) == (None, at_once)


def test_graphs_of_one_layer_for_all_are_refused_where_layers_differ() -> None:
    for name in ("before", "attend", "after", "between"):
        with pytest.raises(ModelError, match="mixed: its layers differ; only token_step has them all"):
            getattr(Decoder(MIXED), name)
    model = Decoder(TOY)
    layer = (*model.before.ops, *model.attend.ops, *model.after.ops)
    whole = tuple(each.without_place for each in model.token_step.ops)
    assert whole == (*model.embed.ops, *layer * 3, *model.head.ops)
    # Positions are of the context all the same.
    assert (model.token_step.needs, model.token_step.reads) == ({"context"}, frozenset())


def test_layers_of_the_three_shapes() -> None:
    def names(config: DecoderConfig, mixer: str) -> list[str]:
        return [each.name for each in Decoder(config).layer(mixer)]

    mlp = ["mlp_norm", "gate_up", "activation", "down", "mlp_residual"]
    inside = ["linear_attention", "heads_norm"]
    assert names(read(RETNET), LINEAR) == [
        "attn_norm", "qkv", "rotary", *inside, "heads_gate", "o", "attn_residual",
        "mlp_norm", "up", "activation", "down", "mlp_residual",
    ]  # fmt: skip
    first = names(read(TRANSNORMER), LRPE)
    assert first == ["attn_norm", "qkv", "qk_silu", "lrpe", *inside, "heads_gate", "o", "attn_residual", *mlp]
    assert names(read(TRANSNORMER), LINEAR) == [name for name in first if name != "lrpe"]
    assert names(read(HYBRID), LINEAR) == ["attn_norm", "qkv", "rotary", *inside, "o", "attn_residual", *mlp]
    assert names(read(HYBRID), FULL)[:5] == ["attn_norm", "qkv", "rotary", "kv_append", "attention"]
    kinds = {each.name: each.kind for each in Decoder(read(TRANSNORMER)).layer(LINEAR)}
    assert (kinds["heads_gate"], kinds["activation"]) == ("product", "product")
    assert "head_norm" not in [each.name for each in Decoder(read(RETNET)).head.ops]


@slow
@fixed
@given(st.integers(1, 6), st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_a_served_step_has_the_ops_of_its_parts(sequences: int, prompts: list[int]) -> None:
    """A step with prompts beside decoding sequences: as one with prompts, and the sequences' states."""
    model = ServedDecoder(MIXED)
    sizes = step_sizes(sequences, 9 * sequences, [(tokens, 0) for tokens in prompts], 1)

    def of(graph: Graph, kind: str) -> list[Op]:
        return [each.at(sizes) for each in graph.ops if each.kind == kind]

    for kind, graphs in (
        ("linear_attention_decode", (model.decode, model.mixed)),
        ("linear_attention_prompts", (model.prefill, model.mixed)),
    ):
        first, second = (of(graph, kind) for graph in graphs)
        assert (first, len(first)) == (second, 3)
    state = of(model.decode, "linear_attention_decode")[0]
    alone = Decoder(MIXED, batch=sequences, dtypes=Dtypes()).layer(LINEAR)
    assert state.work == op(alone, "linear_attention").work
    assert model.decode.needs <= decode_sizes(1, 1).keys()


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        (
            "toy-retnet-1.3b",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is not read",
        ),
        ("transnormerllm-7b", {"norm_type": "layernorm"}, "norm_type is 'layernorm' .allowed: simplermsnorm"),
        ("transnormerllm-7b", {"linear_act_fun": "elu"}, "linear_act_fun is 'elu' .allowed: swish, silu"),
    ],
)
def test_a_config_of_another_model_is_refused(
    kind: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    shipped = Path(__file__).resolve().parent.parent / "scenarios" / "models" / f"{kind}.json"
    (tmp_path / "config.json").write_text(json.dumps({**json.loads(shipped.read_text()), **changes}))
    with pytest.raises(ModelError, match=says):
        load_config(tmp_path / "config.json")


@slow
def test_a_second_model_is_not_asked_beyond_its_context() -> None:
    scenario = {
        "name": "t", "study": "decode", "device": "h200-sxm", "model": "hybrid-8b", "rival_model": "llama-7b",
        "context_tokens": [1024, 4096], "batch": 1,
        "strategies": [{"kind": "tensor_parallel", "ranks": [1]}],
    }  # fmt: skip
    with pytest.raises(InputError, match=r"context_tokens: 4,096: rival_model: .* more than the 2,048"):
        assemble(parse_scenario(scenario, "t"), "t").study.run(lambda *_: None)
    assemble(parse_scenario({**scenario, "beyond_model_context": True}, "t"), "t").study.run(lambda *_: None)
