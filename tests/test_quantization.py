"""Number formats of checkpoints: which matrices have which, how many bytes that is, what is refused."""

import random
import re
from typing import Any

import pytest

from simcore.models.decoder import Decoder
from simcore.models.decoder_config import DecoderConfig, ModelError, config_from_hugging_face, load_config
from simcore.models.number_formats import format_notes, format_warnings, number_formats
from simcore.ops.op import DTYPE_BYTES
from tests.checkpoints import BY_NAME, CHECKPOINTS, MODELS, Checkpoint, compressed, scheme

GIB = 2**30
FP8 = "Meta-Llama-3-8B-Instruct-FP8"
AWQ = "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4"
LAYER = ("down", "gate", "o", "qkv", "up")
BF16 = 8_030_000_000 * 2.0


def read(quantization: Any, of: str = AWQ, **changed: Any) -> DecoderConfig:
    return config_from_hugging_face(
        "toy", {**BY_NAME[of].config, **changed, "quantization_config": quantization}
    )


def weight_bytes(config: DecoderConfig, ranks: int = 1) -> float:
    return Decoder(config, ranks=ranks, dtypes=number_formats(None, {}, config)).weight_bytes


def formats(config: DecoderConfig) -> dict[str, str]:
    assert config.quantization is not None
    return dict(config.quantization.formats)


# -- published checkpoints -------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=lambda c: c.name)
def test_weights_take_what_published_checkpoints_do(checkpoint: Checkpoint) -> None:
    """Within 1 % of the tensors of their files, counted one by one, and of what vLLM says that they take."""
    config = config_from_hugging_face("x", checkpoint.config)
    assert formats(config) == dict.fromkeys(LAYER, checkpoint.format)
    assert weight_bytes(config) == pytest.approx(checkpoint.tensors, rel=0.01)
    if checkpoint.gib is not None:
        assert weight_bytes(config) / GIB == pytest.approx(checkpoint.gib, rel=0.01)


def test_what_few_bits_leave_of_a_model() -> None:
    """4 bits, 16 / 128 of scale and 4 / 128 of zero point; embedding and LM head as they were."""
    config = config_from_hugging_face("x", BY_NAME[AWQ].config)
    layers = 32 * sum(config.layer_weights.values())
    outside = 2 * config.vocab * config.hidden
    assert weight_bytes(config) == pytest.approx(layers * (4 + 16 / 128 + 4 / 128) / 8 + 2.0 * outside)


def test_a_rank_has_its_share_of_what_is_quantized() -> None:
    config = config_from_hugging_face("x", BY_NAME[AWQ].config)
    embedding = 2.0 * config.vocab * config.hidden
    assert weight_bytes(config, 4) - embedding == pytest.approx((weight_bytes(config) - embedding) / 4)


def test_the_kv_cache_is_as_the_checkpoint_says() -> None:
    config = config_from_hugging_face("x", BY_NAME["nvidia/Llama-3.1-8B-Instruct-FP8"].config)
    assert number_formats(None, {}, config).kv == "fp8"
    assert number_formats(None, {"kv": "bf16"}, config).kv == "bf16"
    assert number_formats(None, {}, config_from_hugging_face("x", BY_NAME[AWQ].config)).kv == "bf16"


def test_a_sidecar_of_the_model_optimizer_counts(tmp_path: Any) -> None:
    plain = (MODELS / "llama-3.1-8b.json").read_text()
    (tmp_path / "config.json").write_text(plain)
    (tmp_path / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization":'
        ' {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    )
    config = load_config(tmp_path / "config.json")
    assert formats(config) == dict.fromkeys(LAYER, "fp8")
    assert config.quantization is not None
    assert config.quantization.kv == "fp8"


# -- which modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ignored", "left"),
    [
        (["lm_head"], LAYER),
        ([], (*LAYER, "lm_head")),
        (["re:.*lm_head", "re:.*self_attn.*"], ("down", "gate", "up")),
        (["lm_head", "re:.*down_proj$"], ("gate", "o", "qkv", "up")),
        (["lm_head", "re:visual.*"], LAYER),
        (["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(32))], ("gate", "o", "qkv", "up")),
    ],
)
def test_ignored_modules_stay_as_they_were(ignored: list[str], left: tuple[str, ...]) -> None:
    quantization = compressed(scheme(8, "float", "tensor"), scheme(8, "float", "tensor"), "float-quantized")
    assert set(formats(read({**quantization, "ignore": ignored}))) == set(left)


def test_a_tied_head_is_the_embedding() -> None:
    quantization = compressed(
        scheme(8, "int", "channel"), scheme(8, "int", "token"), "int-quantized", ignore=[]
    )
    assert "lm_head" not in formats(read(quantization, tie_word_embeddings=True))


def test_groups_may_be_of_several_formats() -> None:
    quantization = compressed(scheme(8, "float", "tensor"), scheme(8, "float", "tensor"), "mixed-precision")
    attention = {**quantization["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}
    mlp = {"targets": ["Linear"], "weights": scheme(4, "int", "group", group_size=64, symmetric=False)}
    found = formats(read({**quantization, "config_groups": {"a": mlp, "b": attention}}))
    assert found == {"qkv": "fp8", "o": "fp8", **dict.fromkeys(("gate", "up", "down"), "w4a16_g64_zp")}


def test_phi_3_keeps_several_matrices_as_one() -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": False}
    config = read({**quantization, "modules_to_not_convert": ["gate_up_proj"]}, model_type="phi3")
    assert formats(config) == dict.fromkeys(("down", "o", "qkv"), "w4a16_g128")


# -- what is refused -------------------------------------------------------------------------------

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
W8A8 = compressed(scheme(8, "int", "channel"), scheme(8, "int", "token"), "int-quantized")


def with_weights(**changed: Any) -> dict[str, Any]:
    return compressed({**scheme(4, "int", "group", group_size=128), **changed}, None, "pack-quantized")


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ("fp8", "quantization_config is 'fp8'; a mapping is needed"),
        ({"load_in_4bit": True}, "quantization_config.quant_method is None (allowed: fp8, "),
        (
            {"quant_method": "bitsandbytes"},
            "quantization_config.quant_method is 'bitsandbytes' (allowed: fp8",
        ),
        ({"quant_method": "gguf"}, "quant_method is 'gguf'"),
        ({"quant_method": ["fp8"]}, "quant_method is ['fp8']"),
        ({**GPTQ, "bits": 3}, "quantization_config.bits is 3 (allowed: 4, 8)"),
        ({**GPTQ, "bits": 2}, "bits is 2"),
        ({**GPTQ, "bits": "4"}, "bits is '4'"),
        ({**GPTQ, "bits": True}, "bits is True"),
        ({**GPTQ, "group_size": 256}, "group_size is 256 (allowed: 32, 64, 128, -1)"),
        ({**GPTQ, "group_size": 0}, "group_size is 0"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "quantization_config.dynamic gives modules formats of their own"),
        ({**GPTQ, "lm_head": "no"}, "lm_head is 'no' (allowed: True, False)"),
        ({"quant_method": "awq", "bits": 5, "group_size": 128}, "bits is 5 (allowed: 4)"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": 1}, "zero_point is 1"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size is [64, 64]"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme is 'none'"),
        ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers is 'lm_head'; a list"),
        ({"quant_method": "fp8", "ignored_layers": [1]}, "has 1; names of modules are needed"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4' (allowed: FP8)"),
        ({**W8A8, "ignore": ["re:("]}, "which is no regular expression"),
        ({**W8A8, "ignore": ["re:(.*)*x"]}, "at most 4 repeats"),
        ({**W8A8, "ignore": ["re:" + 9 * ".*" + "x"]}, "at most 4 repeats"),
        ({**W8A8, "config_groups": {}}, "config_groups is {}; a mapping of groups is needed"),
        ({**W8A8, "format": "marlin-24"}, "quantization_config.format is 'marlin-24' (allowed: dense, "),
        ({**W8A8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights cannot be modelled"),
        ({**W8A8, "ignore": ["model.layers.3.mlp.down_proj"]}, "down must have one format in all layers"),
        ({**W8A8, "ignore": ["re:.*q_proj"]}, "qkv must have one format in all layers"),
        ({**W8A8, "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme is '4 bits, float'"),
        (with_weights(num_bits=6), "config_groups.group_0.weights.num_bits is 6 (allowed: 4, 8)"),
        (with_weights(group_size=16), "config_groups.group_0.weights.group_size is 16"),
        (with_weights(type="float"), "weights.num_bits is 4 (allowed: 8 where type is float)"),
        (
            compressed(scheme(4, "int", "channel"), scheme(8, "int", "token"), "pack-quantized"),
            "input_activations with weights of 4 bits of type int cannot be modelled",
        ),
        (
            compressed(scheme(8, "float", "block"), scheme(8, "float", "token"), "float-quantized"),
            "weights.block_structure is None (allowed: [128, 128])",
        ),
    ],
)
def test_what_has_no_price_is_refused_by_its_field(quantization: Any, says: str) -> None:
    with pytest.raises(ModelError, match=f"^toy: .*{re.escape(says)}") as raised:
        read(quantization)
    assert "\n" not in str(raised.value)


# -- what a scenario says instead ------------------------------------------------------------------


def test_a_scenarios_dtype_stands_in_the_place_of_the_checkpoints() -> None:
    config = config_from_hugging_face("x", BY_NAME[AWQ].config)
    taken = number_formats("bf16", {}, config)
    assert (taken.weights, taken.kv, taken.each) == ("bf16", "bf16", ())
    assert format_warnings("bf16", {}, config) == [
        "model x: dtype: bf16 stands in the place of its quantization_config (awq)"
    ]
    assert format_notes("bf16", config) == []


def test_a_scenarios_dtypes_replace_what_they_name() -> None:
    config = config_from_hugging_face("x", BY_NAME[AWQ].config)
    taken = number_formats(None, {"kv": "fp8", "down": "bf16"}, config)
    assert (taken.kv, taken.of("down"), taken.of("qkv")) == ("fp8", "bf16", "w4a16_g128_zp")
    assert format_warnings(None, {"kv": "fp8"}, config) == []
    assert "down" in format_warnings(None, {"kv": "fp8", "down": "bf16"}, config)[0]


def test_formats_that_the_checkpoint_gives_are_told() -> None:
    config = config_from_hugging_face("x", BY_NAME[AWQ].config)
    assert format_warnings(None, {}, config) == []
    (note,) = format_notes(None, config)
    assert "w4a16_g128_zp: down, gate, o, qkv, up; all else bf16" in note


@pytest.mark.parametrize(("stored", "warned"), [("float32", 1), ("torch.float32", 1), ("bfloat16", 0)])
def test_a_checkpoint_in_32_bits_is_taken_as_16(stored: str, warned: int) -> None:
    config = config_from_hugging_face(
        "x", {**BY_NAME[AWQ].config, "quantization_config": None, "torch_dtype": stored}
    )
    assert number_formats(None, {}, config).weights == "bf16"
    assert len(format_warnings(None, {}, config)) == warned
    assert format_warnings("fp32", {}, config) == []


# -- any config ------------------------------------------------------------------------------------


def any_quantization(draw: random.Random) -> dict[str, Any]:
    group = draw.choice([-1, 32, 64, 128])
    ignore = draw.choice([[], ["lm_head"], ["lm_head", "re:.*self_attn.*"], ["re:.*down_proj"]])
    activations = draw.choice([None, "same"])
    kind, bits = draw.choice([("int", 4), ("int", 8), ("float", 8)])
    if activations and bits == 8:
        weights = compressed(scheme(8, kind, "channel"), scheme(8, kind, "token"), "int-quantized")
    else:
        symmetric = draw.random() < 0.5
        weights = compressed(
            scheme(bits, kind, "group", group_size=group, symmetric=symmetric), None, "pack-quantized"
        )
    return draw.choice(
        [
            {**weights, "ignore": ignore},
            {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": draw.random() < 0.5},
            {"quant_method": "gptq", "bits": draw.choice([4, 8]), "group_size": group, "lm_head": True},
            {"quant_method": "auto-round", "bits": 4, "group_size": group, "modules_to_not_convert": ignore},
            {"quant_method": "fp8", "weight_block_size": draw.choice([None, [128, 128]])},
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ignore},
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ignore},
        ]
    )


@pytest.mark.parametrize("seed", range(200))
def test_no_quantization_takes_more_than_bf16_or_less_than_its_bits(seed: int) -> None:
    draw = random.Random(seed)
    dim, kv_heads = draw.choice([64, 80, 128]), draw.choice([1, 2, 8])
    heads = kv_heads * draw.choice([1, 2, 4, 7])
    config = {
        "model_type": draw.choice(["llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "mimo"]),
        "hidden_size": 64 * draw.randint(1, 64),
        "intermediate_size": 64 * draw.randint(1, 200),
        "num_hidden_layers": draw.randint(1, 12),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": draw.randint(1, 50_000),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    plain = config_from_hugging_face("x", config)
    found = config_from_hugging_face("x", {**config, "quantization_config": any_quantization(draw)})
    assert found == plain
    taken, whole = weight_bytes(found), weight_bytes(plain)
    assert whole == 2.0 * plain.parameters
    assert 3.9 / 16 * whole <= taken < whole
    for _, dtype in formats(found).items():
        assert 3.9 <= 8 * DTYPE_BYTES[dtype] < 16


@pytest.mark.parametrize("seed", range(50))
def test_unknown_methods_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    known = ["bitsandbytes", "gguf", "hqq", "aqlm", "quark", "torchao", "eetq", "mxfp4", "exl2", "bitnet"]
    method = draw.choice([*known, "".join(draw.choices("abcdefgh48", k=6))])
    with pytest.raises(ModelError, match=r"quant_method is .* \(allowed: "):
        read({"quant_method": method, "bits": draw.choice([2, 3, 4, 8])})


JUNK: list[Any] = [None, [], {}, "", "x", -1, 0, 2.5, float("nan"), 10**30, True, ["a", 1], [[]], {"a": {}}]
FIELDS = ("bits", "group_size", "ignore", "ignored_layers", "modules_to_not_convert", "kv_cache_scheme")
MORE = ("dynamic", "modules_in_block_to_quantize", "sparsity_config", "config_groups", "format", "producer")


@pytest.mark.parametrize("seed", range(300))
def test_a_config_with_junk_is_read_or_refused_in_one_line(seed: int) -> None:
    draw = random.Random(seed)
    config = {**draw.choice(CHECKPOINTS).config, "num_hidden_layers": 2}
    quantization = dict(config["quantization_config"])
    if draw.random() < 0.5:
        quantization[draw.choice([*quantization, *FIELDS, *MORE])] = draw.choice(JUNK)
    else:
        config[draw.choice([*config, "text_config", "layer_types", "head_dim", "dtype"])] = draw.choice(JUNK)
    said = ""
    try:
        found = config_from_hugging_face("toy", {**config, "quantization_config": quantization})
        assert found.parameters > 0
    except ModelError as error:
        said = str(error)
    assert not said or said.startswith("toy: ")
    assert "\n" not in said
