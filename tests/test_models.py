"""Decoders: reading of configurations, sharding, and the work of a layer against its closed form."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.models.decoder import (
    MOST_NORMED_ROWS,
    STYLES,
    Decoder,
    Dtypes,
    Style,
    quantized_of,
    why_not,
)
from simcore.models.decoder_config import DecoderConfig, ModelError, config_from_hugging_face, load_config
from simcore.models.mixers import FULL
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Graph, Op
from tests.thorough import slow

MODELS = Path(__file__).parents[1] / "scenarios" / "models"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
GPT_J = {
    "model_type": "gptj",
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "vocab_size": 50400,
    "tie_word_embeddings": False,
}


def read(config: Mapping[str, Any], **changed: Any) -> DecoderConfig:
    merged = {**config, **changed}
    return config_from_hugging_face("toy", {k: v for k, v in merged.items() if v != "missing"})


# -- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-7b", 6.738),
        ("llama-13b", 13.015),
        ("llama-33b", 32.528),
        ("llama-65b", 65.284),
        ("llama-3.1-8b", 8.030),
        ("llama-3.1-70b", 70.551),
        ("llama-2-70b", 68.977),
        ("mistral-7b", 7.248),
        ("codellama-34b", 33.743),
        ("qwen3-32b", 32.762),
        ("gpt-j-6b", 6.050),
    ],
)
def test_parameters_of_published_models(name: str, billions: float) -> None:
    """Without norms and biases, which are less than 0.02 % of any of them."""
    assert load_config(MODELS / f"{name}.json").parameters / 1e9 == pytest.approx(billions, rel=3e-4)


def test_a_layer_counts_each_matrix() -> None:
    layer = read(LLAMA).layer_weights
    assert layer == {
        "qkv": 4096 * (4096 + 2 * 1024),
        "o": 4096 * 4096,
        "gate_up": 2 * 4096 * 14336,
        "down": 14336 * 4096,
    }
    assert read(LLAMA).parameters == 32 * sum(layer.values()) + 2 * 128256 * 4096


def test_tied_embeddings_are_counted_once_and_are_not_the_default() -> None:
    """Hugging Face's LlamaConfig and Qwen3Config: tie_word_embeddings is false where it is missing."""
    apart, tied = read(LLAMA, tie_word_embeddings="missing"), read(LLAMA, tie_word_embeddings=True)
    assert (apart.tied_embeddings, tied.tied_embeddings) == (False, True)
    assert apart.parameters - tied.parameters == 128256 * 4096


def test_what_may_be_missing() -> None:
    assert read(LLAMA).head_dim == 128
    assert read(LLAMA, head_dim=64).head_dim == 64
    assert read(LLAMA, head_dim=None).head_dim == 128
    assert read(LLAMA, num_key_value_heads="missing").kv_heads == 32
    assert read(GPT_J, n_inner=None).intermediate == 4 * 4096
    assert read(LLAMA).gated
    assert not read(LLAMA).parallel_residual


def test_qwen3_has_heads_of_128_where_none_are_given() -> None:
    assert read(LLAMA, model_type="qwen3", hidden_size=5120, num_attention_heads=64).head_dim == 128


def test_gpt_j_keeps_the_names_of_gpt_2() -> None:
    config = read(GPT_J)
    assert (config.hidden, config.layers, config.q_heads, config.kv_heads) == (4096, 28, 16, 16)
    assert (config.head_dim, config.intermediate) == (256, 16384)
    assert (config.gated, config.parallel_residual) == (False, True)
    assert config.layer_weights["gate_up"] == 4096 * 16384
    assert read(GPT_J, n_inner=1000).intermediate == 1000


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"intermediate_size": "missing"}, "intermediate_size or n_inner is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes' (allowed: true, false)"),
        ({"hidden_size": "missing"}, "hidden_size or n_embd is missing"),
        ({"num_hidden_layers": "missing"}, "num_hidden_layers or n_layer is missing"),
        ({"num_attention_heads": "missing"}, "num_attention_heads or n_head is missing"),
        ({"vocab_size": "missing"}, "vocab_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; a whole number from 1 is needed"),
        ({"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 24, "num_key_value_heads": 8}, "head_dim is missing, and hidden_size 4096"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5 does not divide num_attention_heads 32"),
        (
            {"num_local_experts": 8},
            "num_local_experts is set, but mixtures of experts cannot",
        ),
        ({"num_experts": 128}, "num_experts is set"),
        ({"n_routed_experts": 64}, "n_routed_experts is set"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is set, but latent attention cannot be modelled yet"),
        ({"sliding_window": 4096}, "sliding_window is set"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2' (allowed: llama, mistral, qwen2, qwen3, gptj, phi3,"),
        ({"model_type": "missing"}, "model_type is None"),
    ],
)
def test_a_config_that_cannot_be_used_is_refused_by_key(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"^toy: .*{re.escape(says)}"):
        read(LLAMA, **changed)


@pytest.mark.parametrize(("text", "says"), [("{", "not valid JSON"), ("[1]", "holds no JSON object")])
def test_a_file_that_is_no_config_is_refused_by_name(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=rf"model\.json: {says}"):
        load_config(path)
    with pytest.raises(ModelError, match=r"gone\.json: cannot be read"):
        load_config(tmp_path / "gone.json")
    path.write_text(json.dumps(LLAMA))
    assert load_config(path).name == "model"


# -- sharding ------------------------------------------------------------------------------------

TOY = DecoderConfig("toy", 48, 96, 3, 12, 4, 4, 100, tied_embeddings=False)


@pytest.mark.parametrize("ranks", [1, 2, 4, 12])
def test_ranks_that_divide_everything_are_served(ranks: int) -> None:
    assert why_not(TOY, ranks) is None


@pytest.mark.parametrize(
    ("changed", "ranks", "says"),
    [
        ({}, 5, "12 heads, which 5 ranks do not divide"),
        ({}, 3, "4 KV heads, which can be neither split nor repeated over 3 ranks"),
        ({}, 6, "4 KV heads, which can be neither split nor repeated over 6 ranks"),
        ({"intermediate": 90}, 4, "90 MLP columns, which 4 ranks do not divide"),
        ({"hidden": 50}, 4, "hidden size 50, which 4 ranks do not divide"),
    ],
)
def test_ranks_that_do_not_divide_are_refused_with_a_reason(
    changed: dict[str, Any], ranks: int, says: str
) -> None:
    config = replace(TOY, **changed)
    assert why_not(config, ranks) == f"toy has {says}"
    with pytest.raises(ModelError, match=says):
        Decoder(config, ranks=ranks)


def op(graph: Graph, name: str) -> Op:
    (found,) = (o for o in graph.ops if o.name == name)
    return found


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 4), (2, 2), (4, 1), (12, 1)])
def test_kv_heads_are_split_and_then_repeated(ranks: int, kv_heads: int) -> None:
    model = Decoder(TOY, ranks=ranks)
    assert op(model.before, "kv_append")["kv_heads"] == kv_heads
    assert op(model.attend, "attention").at({"context": 9})["kv_heads"] == kv_heads
    assert op(model.before, "qkv")["n"] == (12 // ranks + 2 * kv_heads) * 4
    assert model.kv_bytes(10) == 2 * kv_heads * 4 * 2.0 * 3 * 10


# -- work ----------------------------------------------------------------------------------------

decoders = st.builds(
    lambda style, ranks, batch, gated, parallel: Decoder(
        replace(TOY, gated=gated, parallel_residual=parallel), ranks=ranks, batch=batch, style=style
    ),
    st.sampled_from(STYLES),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
)
fixed = settings(derandomize=True, database=None, max_examples=100)


def matmuls(graph: Graph) -> list[Op]:
    return [part for o in graph.ops for part in (o, *o.parts) if part.kind == "matmul"]


@slow
@fixed
@given(decoders)
def test_matmuls_of_all_ranks_do_two_operations_a_weight_and_token(model: Decoder) -> None:
    """With as many ranks as KV heads at most, so that none is repeated."""
    layer = matmuls(model.before + model.after)
    weights = sum(model.config.layer_weights.values())
    assert sum(o.work.flops for o in layer) * model.ranks == 2 * weights * model.batch
    elements = sum(o["n"] * o["k"] for o in layer)
    assert elements * model.ranks == weights
    activations = sum(2.0 * o["m"] * (o["n"] + o["k"]) for o in layer)
    assert sum(o.work.hbm_bytes for o in layer) == 2.0 * elements + activations


@slow
@fixed
@given(decoders)
def test_the_head_does_two_operations_a_weight_and_token(model: Decoder) -> None:
    (head,) = matmuls(model.head)
    assert head.work.flops * model.ranks == 2 * model.config.vocab * model.config.hidden * model.batch


def test_a_vocabulary_that_ranks_do_not_divide_is_padded() -> None:
    model = Decoder(replace(TOY, vocab=101), ranks=4)
    assert op(model.head, "lm_head")["n"] == 26
    assert op(model.head, "logits_gather")["elements"] == 4 * 26


@pytest.mark.parametrize(("ranks", "seen"), [(1, 100), (4, 100)])
def test_what_is_chosen_from_is_what_was_gathered(ranks: int, seen: int) -> None:
    assert op(Decoder(TOY, ranks=ranks).head, "sample")["vocab"] == seen


@slow
@fixed
@given(decoders, st.integers(1, 50))
def test_attention_reads_its_cache_once(model: Decoder, context: int) -> None:
    """4 operations for a query head, cached token and dimension; the cache, the query and the output."""
    attention = op(model.attend, "attention").at({"context": context}).work
    heads = model.batch * 12 // model.ranks
    assert attention.flops == 4 * heads * context * 4
    cache = model.kv_bytes(context) / model.config.layers
    assert attention.hbm_bytes == cache + 2 * heads * 4 * 2
    verified = op(model.speculate, "attention").at({"context": context}).work
    assert verified.hbm_bytes == attention.hbm_bytes
    assert verified.flops == attention.flops + 4 * heads * 4


@slow
@fixed
@given(decoders)
def test_styles_move_the_same_bytes_or_fewer(model: Decoder) -> None:
    """A layer over n ranks sends (n-1)/n of the residual stream four times (two sums, or two halves of
    each); a parallel layer sums once. Fused, heads are gathered instead of the first sum."""
    n, config = model.ranks, model.config
    sent = sum(o.work.wire_bytes for o in (model.before + model.after).ops)
    passes = 2 if config.parallel_residual else 4
    if model.style == "fused_gather":
        # Heads (12 * 4 wide, as wide as the stream) take the place of a reduce-scatter.
        passes = 3 if config.parallel_residual else 4
    assert sent == pytest.approx(passes * 2.0 * model.batch * config.hidden * (n - 1) / n)


# Ops before attention, and after it, of a layer: on one rank, on several.
COUNTS: dict[tuple[Style, bool, bool], tuple[tuple[int, int], tuple[int, int]]] = {
    ("all_reduce", True, False): ((4, 7), (4, 9)),
    ("scatter_gather", True, False): ((4, 8), (5, 11)),
    ("fused_gather", True, False): ((4, 8), (5, 10)),
    ("all_reduce", False, True): ((4, 5), (4, 6)),
    ("scatter_gather", False, True): ((4, 5), (5, 6)),
    ("fused_gather", False, True): ((4, 5), (5, 6)),
}


@pytest.mark.parametrize(("style", "gated", "parallel"), COUNTS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 3])
def test_a_token_has_its_layers_ops(
    style: Style, gated: bool, parallel: bool, ranks: int, layers: int
) -> None:
    config = replace(TOY, layers=layers, gated=gated, parallel_residual=parallel)
    model = Decoder(config, ranks=ranks, style=style)
    before, after = COUNTS[style, gated, parallel][ranks > 1]
    assert (len(model.before.ops), len(model.attend.ops), len(model.after.ops)) == (before, 1, after)
    head = 3 + (ranks > 1)
    assert len(model.token_step.ops) == 1 + layers * (before + 1 + after) + head
    assert len(model.speculate.ops) == 1 + (ranks > 1)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("ranks", [1, 4])
def test_graphs_of_a_layer_are_those_of_a_token(style: Style, ranks: int) -> None:
    model = Decoder(TOY, ranks=ranks, style=style)
    layer = (*model.before.ops, *model.attend.ops, *model.after.ops)
    assert model.token_step.ops == (*model.embed.ops, *layer * TOY.layers, *model.head.ops)
    assert model.first.ops == (*model.embed.ops, *model.before.ops)
    assert model.between.ops == (*model.after.ops, *model.before.ops)
    assert model.last.ops == (*model.after.ops, *model.head.ops)
    assert model.token_step.reads == {"context"}


@pytest.mark.parametrize("batch", [1, MOST_NORMED_ROWS, MOST_NORMED_ROWS + 1])
def test_sums_take_residual_and_norm_along(batch: int) -> None:
    """Two a layer, the last one with the norm before the LM head; of more rows none. A layer by itself ends
    with its sum; what follows it in a graph joins it there."""
    plain, joined = (Decoder(TOY, ranks=2, batch=batch, normed_sums=each) for each in (False, True))
    for graph in ("token_step", "after", "between", "last", "first", "before"):
        one, other = getattr(plain, graph).ops, getattr(joined, graph).ops
        apart = [part for op in other for part in (op.parts or (op,))]
        assert apart == [*one]
        found = [tuple(part.name for part in op.parts) for op in other if op.parts]
        sums = sum(op.kind == "all_reduce" for op in one)
        if batch > MOST_NORMED_ROWS or graph in ("first", "before"):
            assert not found
        else:
            assert len(found) == (sums if graph != "after" else sums - 1)
            ends = {
                "after": "mlp_norm",
                "between": "attn_norm",
                "last": "head_norm",
                "token_step": "head_norm",
            }
            assert found[0] == ("attn_reduce", "attn_residual", "mlp_norm")
            assert found[-1][-1] == ends[graph]
    alone = Decoder(TOY, batch=batch, normed_sums=True)
    assert alone.token_step == Decoder(TOY, batch=batch).token_step


def test_a_layer_in_parts_has_the_work_of_the_whole() -> None:
    for style in STYLES:
        whole, parts = (Decoder(TOY, ranks=2, style=style, parts=p) for p in (False, True))
        bound = {"context": 9}
        for graph, of_parts in (
            (whole.before + whole.after, parts.after),
            (whole.embed + whole.head, parts.head),
        ):
            (one,) = of_parts.ops
            work = one.at(bound).work
            assert work.flops == sum(o.work.flops for o in graph.ops)
            assert work.hbm_bytes == sum(o.work.hbm_bytes for o in graph.ops)
            assert work.wire_bytes == pytest.approx(sum(o.work.wire_bytes for o in graph.ops))
        assert not parts.embed.ops + parts.before.ops


# -- memory --------------------------------------------------------------------------------------


def test_weights_take_their_bytes() -> None:
    config = read(LLAMA)
    assert Decoder(config).weight_bytes == 2.0 * config.parameters
    # The embedding's lookup is not split: each rank has the whole table.
    table = 128256 * 4096
    assert Decoder(config, ranks=8).weight_bytes == 2.0 * ((config.parameters - table) / 8 + table)
    tied = replace(config, tied_embeddings=True)
    assert Decoder(tied, ranks=8).weight_bytes == 2.0 * ((config.parameters - 2 * table) / 8 + table)
    # Of a vocabulary that ranks do not divide one has a row more.
    odd = replace(config, vocab=1001)
    without = replace(odd, tied_embeddings=True)
    assert Decoder(odd, ranks=8).weight_bytes - Decoder(without, ranks=8).weight_bytes == 2.0 * 126 * 4096
    mixed = Dtypes(weights="fp8", each=(("gate", "bfp4"), ("lm_head", "bf16")))
    layer = config.layer_weights
    gate_and_up = (0.5625 + 1.0) * layer["gate_up"] / 2
    expected = 32 * (layer["qkv"] + layer["o"] + layer["down"] + gate_and_up)
    assert Decoder(config, dtypes=mixed).weight_bytes == expected + (2.0 + 1.0) * table


def test_gate_and_up_of_different_formats_are_two_projections() -> None:
    config = read(LLAMA)
    fused = Decoder(config, dtypes=Dtypes(each=(("gate", "fp8"), ("up", "fp8"))))
    assert [(op.name, op.dtype) for op in matmuls_of(fused)] == [("gate_up", "fp8")]
    split = Decoder(config, dtypes=Dtypes(each=(("gate", "fp8"),)))
    assert [(op.name, op.dtype) for op in matmuls_of(split)] == [("gate", "fp8"), ("up", "bf16")]


def matmuls_of(model: Decoder) -> list[Op]:
    return [op for op in model.after.ops if op.name in ("gate", "up", "gate_up")]


def test_a_kernel_of_its_own_makes_inputs_8_bits_where_the_op_before_does_not() -> None:
    """Before the products that are named, as wide as their inputs, and only where these have 8 bits."""
    dtypes = Dtypes("fp8", each=(("down", "bf16"),))
    config = read(LLAMA)
    plain = Decoder(config, ranks=2, batch=3, dtypes=dtypes)
    own = replace(plain, quantized=("qkv", "gate_up", "down"))
    kinds = [(op.kind, op.name) for op in own.layer(FULL)]
    made = [name for kind, name in kinds if kind == "quantize"]
    assert made == ["qkv_inputs", "gate_up_inputs"]
    for name in made:
        assert kinds[kinds.index(("quantize", name)) + 1] == ("matmul", name.removesuffix("_inputs"))
    assert {op["width"] for op in own.layer(FULL) if op.kind == "quantize"} == {config.hidden}
    assert [op for op in own.layer(FULL) if op.kind != "quantize"] == [*plain.layer(FULL)]
    (narrow,) = (op for op in replace(own, quantized=("o",)).layer(FULL) if op.kind == "quantize")
    assert (narrow["tokens"], narrow["width"]) == (3, config.hidden // 2)
    in_bf16 = Dtypes("bf16")
    assert replace(own, dtypes=in_bf16).layer(FULL) == replace(plain, dtypes=in_bf16).layer(FULL)
    # One of the two is enough.
    for matrix in ("gate", "up"):
        other = Dtypes("fp8", each=((matrix, "bf16"),))
        assert quantized_of(other, ("gate_up", "o")) == ("gate_up", "o")
    # One input, whether gate and up are one product or two.
    apart = replace(own, style="scatter_gather", dtypes=Dtypes("int8"))
    names = [op.name for op in apart.layer(FULL) if op.kind in ("quantize", "matmul")]
    assert names == ["qkv_inputs", "qkv", "o", "gate_up_inputs", "gate", "up", "down_inputs", "down"]


def test_qwen3_norms_q_and_k_of_every_head() -> None:
    model = Decoder(load_config(MODELS / "qwen3-32b.json"), ranks=8)
    norm = next(op for op in model.before.ops if op.name == "qk_norm")
    assert (norm["tokens"], norm["hidden"]) == (64 // 8 + 8 // 8, 128)
    assert not any(op.name == "qk_norm" for op in Decoder(read(LLAMA)).before.ops)


def test_a_cache_takes_its_bytes() -> None:
    """Llama 3.1 8B: 128 KiB a token in bf16."""
    config = read(LLAMA)
    assert Decoder(config).kv_bytes(1) == 128 * 1024
    assert Decoder(config, ranks=4, batch=3).kv_bytes(10) == 128 * 1024 * 10 * 3 / 4
    assert Decoder(config, dtypes=Dtypes(kv="fp8")).kv_bytes(1) == 64 * 1024


@slow
@fixed
@given(decoders, st.sampled_from([1, 2, 4, 12]))
def test_weights_in_memory_are_those_that_matmuls_read(model: Decoder, ranks: int) -> None:
    """Also where there are more ranks than KV heads, so that some are on several ranks."""
    model = replace(model, ranks=ranks, config=replace(model.config, vocab=12 * 9))
    layer = sum(2 * o["n"] * o["k"] for o in matmuls(model.before + model.after))
    table = 2 * model.config.vocab * model.config.hidden
    tables = table / ranks + table
    assert model.weight_bytes == pytest.approx(model.config.layers * layer + tables)


def test_layers_alone_have_neither_embedding_nor_head() -> None:
    layers = Decoder(TOY, outside=False)
    assert layers.weight_bytes == 2.0 * 3 * sum(TOY.layer_weights.values())
    assert layers.read_bytes(10) == layers.weight_bytes + layers.kv_bytes(10)


def test_a_token_reads_its_rank_s_part_of_a_table_that_is_also_the_head() -> None:
    """Of a vocabulary that ranks do not divide, with one row of zeros more."""
    tied = replace(TOY, vocab=101, tied_embeddings=True)
    layers = 2.0 * 3 * sum(TOY.layer_weights.values()) / 4
    assert Decoder(tied, ranks=4).read_bytes(0) == layers + 2.0 * 26 * 48
    assert Decoder(replace(tied, tied_embeddings=False), ranks=4).read_bytes(0) == layers + 2.0 * 26 * 48


@pytest.mark.parametrize(("style", "width"), [("all_reduce", 48), ("scatter_gather", 12)])
def test_groups_exchange_a_rank_s_residual_stream_and_its_new_keys_and_values(
    style: Style, width: int
) -> None:
    """Summed up, each of 4 ranks has all of the stream; scattered, a fourth."""
    model = Decoder(TOY, ranks=4, batch=5, style=style)
    (op_,) = model.exchange(3).ops
    assert op_["elements"] == 3 * 5 * (width + 2 * 1 * 4)
    assert {o["hidden"] for o in model.after.ops if o.kind == "residual"} == {width}


@pytest.mark.parametrize("ranks", [1, 2, 4, 12])
def test_a_server_attends_with_the_heads_of_its_decoder(ranks: int) -> None:
    (own,) = Decoder(TOY, ranks=ranks).attend.ops
    for graph in (ServedDecoder(TOY, ranks).decode, ServedDecoder(TOY, ranks).prefill):
        served = next(op for op in graph.ops if "attention" in op.kind)
        assert [served[name] for name in ("q_heads", "kv_heads", "head_dim")] == [
            own[name] for name in ("q_heads", "kv_heads", "head_dim")
        ]
