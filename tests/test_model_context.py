"""How long a context a model is made for, which attention and which models are not modelled."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simcore.assembly import assemble
from simcore.cli import main
from simcore.input.files import InputError
from simcore.models.context_limit import context_limit
from simcore.models.decoder_config import DecoderConfig, ModelError, config_from_hugging_face, load_config
from simcore.scenario import parse_scenario
from simcore.studies.decode.cases import cases
from tests.thorough import slow

MODELS = Path(__file__).resolve().parent.parent / "scenarios" / "models"
LLAMA: dict[str, Any] = json.loads((MODELS / "llama-3.1-8b.json").read_text())
NO_ROPE = {key: value for key, value in LLAMA.items() if key != "rope_scaling"}


def read(**changed: Any) -> DecoderConfig:
    return config_from_hugging_face("toy", {**LLAMA, **changed})


def limit(**changed: Any) -> int | None:
    found = context_limit("toy", {**NO_ROPE, "max_position_embeddings": 4096, **changed})
    return found.tokens if found else None


# -- lengths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        (None, 4096),
        ({"rope_type": "default"}, 4096),
        ({"type": "linear", "factor": 4.0}, 16384),
        ({"type": "dynamic", "factor": 2.5}, 10240),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 2.0}, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 4096),
        ({"type": "su", "factor": 32.0}, 4096),
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, 4096),
        ({"full_attention": {"rope_type": "linear", "factor": 8}}, 32768),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_positions_stretch_the_longest_context_as_vllm_takes_it(
    key: str, rope: Any, tokens: int
) -> None:
    assert limit(**{key: rope}) == tokens


def test_the_least_of_several_lengths_counts() -> None:
    assert limit(max_sequence_length=2048) == 2048
    assert limit(model_max_length=8192) == 4096
    assert limit(max_position_embeddings=None) is None
    assert limit(max_position_embeddings=None, n_positions=512) == 512


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_position_embeddings": "4096"}, "max_position_embeddings is '4096'; a whole number from 1"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; a mapping is needed"),
        ({"rope_scaling": {"type": "ntk"}}, "rope_scaling.rope_type is 'ntk' (allowed: default, llama3,"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "rope_scaling.factor is '4'"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor is nan"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, "rope_scaling.factor is -1; a number from 1"),
        (
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "embeddings is 0",
        ),
    ],
)
def test_lengths_that_make_no_sense_are_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"^toy: .*{re.escape(says)}"):
        limit(**changed)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 131_072),
        ("qwen2.5-7b", 131_072),
        ("qwen3-8b", 40_960),
        ("qwen3-14b", 40_960),
        ("qwen3-32b", 40_960),
        ("mistral-7b", 32_768),
        ("mistral-small-24b", 32_768),
        ("phi-4", 16_384),
        ("granite-3.3-8b", 131_072),
        ("codellama-34b", 16_384),
        ("llama-7b", 2048),
        ("llama-65b", 2048),
        ("llama-2-70b", 4096),
        ("gpt-j-6b", 2048),
    ],
)
def test_the_catalogues_models_have_their_lengths(name: str, tokens: int) -> None:
    config = load_config(MODELS / f"{name}.json")
    assert config.limit is not None
    assert config.limit.tokens == tokens
    assert config.notes == ()


# -- windows, other attention, other models ----------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"sliding_window": None},
        {"sliding_window": 131_072},
        {"sliding_window": 262_144, "model_type": "phi3"},
        {"sliding_window": 4096, "use_sliding_window": False, "model_type": "qwen2"},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32, "model_type": "qwen2"},
        {"sliding_window": 4096, "model_type": "qwen2"},
        {"layer_types": ["full_attention"] * 32},
        {"layer_types": ["full_attention"] * 31 + ["sliding_attention"], "sliding_window": 131_072},
        {"attention_bias": True, "mlp_bias": True},
    ],
)
def test_a_window_that_leaves_nothing_out_is_none(changed: dict[str, Any]) -> None:
    assert read(**changed).notes == ()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sliding_window": 4096, "model_type": "mistral"}, "sliding_window is set to 4096, but windowed"),
        ({"sliding_window": 2047, "model_type": "phi3"}, "sliding_window is set to 2047"),
        (
            {
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 21,
                "model_type": "qwen2",
            },
            "sliding_window is set to 4096",
        ),
        ({"sliding_window": "no"}, "sliding_window is 'no'; a whole number from 1, or null, is needed"),
        (
            {"layer_types": ["full_attention"] * 31 + ["sliding_attention"]},
            "layer_types has 'sliding_attention', and sliding_window names no window",
        ),
        ({"layer_types": ["mamba"] * 32}, "layer_types has 'mamba'"),
        ({"layer_types": ["full_attention"]}, "layer_types must have one of the 32 layers each"),
        ({"layer_types": "full_attention"}, "layer_types must have"),
        ({"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual-chunk attention cannot be modelled"),
        ({"sparse_attention_config": {"stride": 64}}, "sparse attention cannot be modelled"),
        ({"index_topk": 2048}, "index_topk is set, but sparse attention"),
        ({"mamba_d_state": 128}, "layers that keep a state cannot be modelled"),
        ({"num_experts": 64}, "mixtures of experts"),
        ({"is_encoder_decoder": True}, "an encoder beside the decoder"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "MLX's quantized weights"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64' (allowed: bfloat16, float16, float32)"),
        ({"dtype": 16}, "dtype is 16"),
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text' (allowed: llama, "),
        ({"text_config": "llama"}, "text_config is 'llama'; a mapping is needed"),
        ({"text_config": {"model_type": "gemma3_text"}}, "model_type is 'gemma3_text'"),
        ({"text_config": {**LLAMA, "num_local_experts": 16}}, "mixtures of experts"),
    ],
)
def test_what_would_be_priced_as_another_model_is_refused(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=f"^toy: .*{re.escape(says)}") as raised:
        read(**changed)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kind", ["phi3", "granite", "mimo", "ministral3", "smollm3", "qwen2_5_vl"])
def test_models_of_the_same_products_are_read(kind: str) -> None:
    assert read(model_type=kind) == read()


def test_layers_that_guess_further_tokens_are_told() -> None:
    (note,) = read(model_type="mimo", num_nextn_predict_layers=1).notes
    assert note.startswith("num_nextn_predict_layers 1: layers that guess further tokens are left out")


def test_keys_that_nobody_knows_are_told() -> None:
    (note,) = read(engram_tables=3, wavelets=True, off=False, nothing=None).notes
    assert note == "not known, and priced as if they were not there: engram_tables, wavelets"


def test_keys_of_formats_that_nobody_knows_are_told() -> None:
    """A typo would make plain fp8 of blocks."""
    given = {"quant_method": "fp8", "weight_blocksize": [128, 128], "fmt": "e4m3"}
    (note,) = read(quantization_config=given).notes
    assert note == "not known, and priced as if they were not there: quantization_config.weight_blocksize"
    assert not read(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}).notes


def test_the_language_model_inside_others_is_read() -> None:
    outside = {"model_type": "mistral3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1024}}
    found = config_from_hugging_face("toy", {**outside, "text_config": {**LLAMA, "torch_dtype": None}})
    assert found == read()
    assert found.notes == (
        "the language model alone is priced; time and memory of vision_config are left out",
    )
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    quantized = config_from_hugging_face(
        "toy", {**outside, "text_config": LLAMA, "quantization_config": quantization}
    )
    assert quantized.quantization is not None


def test_what_a_nested_config_leaves_out_is_its_classs_default() -> None:
    """LLaVA 1.5 7B's text_config: Vicuna 7B, of which little differs from LlamaConfig's defaults."""
    text = {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064}
    found = config_from_hugging_face("toy", {"model_type": "llava", "text_config": text})
    assert (found.hidden, found.intermediate, found.layers, found.kv_heads) == (4096, 11008, 32, 32)
    assert "text_config leaves out" in found.notes[0]
    # Mistral's class has a window where none is named.
    mistral = {"model_type": "mistral", "vocab_size": 32064, "max_position_embeddings": 32768}
    with pytest.raises(ModelError, match="sliding_window is set to 4096"):
        config_from_hugging_face("toy", {"model_type": "llava_next", "text_config": mistral})
    whole = config_from_hugging_face("toy", {"text_config": {**mistral, "sliding_window": None}})
    assert whole.kv_heads == 8


# -- scenarios ---------------------------------------------------------------------------------------

DECODE: dict[str, Any] = {
    "name": "x",
    "study": "decode",
    "device": "h200-sxm",
    "model": "codellama-34b",
    "context_tokens": [1024, 16384],
    "strategies": [{"kind": "tensor_parallel"}],
}
SERVING: dict[str, Any] = {
    "name": "x",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-7b",
    "workload": {
        "requests": 4,
        "arrivals": {"kind": "constant", "rate_per_s": 10},
        "prompt_tokens": {"kind": "constant", "value": 2000},
        "output_tokens": {"kind": "constant", "value": 48},
    },
    "strategies": [{"kind": "continuous_batching"}],
    "price_interval": False,
}


def decode_cases(**changed: Any) -> int:
    study: Any = assemble(parse_scenario({**DECODE, **changed}, "x.yaml"), "x.yaml").study
    return len(cases(study.bench))


def test_contexts_beyond_the_model_are_refused_by_its_field() -> None:
    assert decode_cases() == 2
    says = (
        "context_tokens: 16,385: 16,385 tokens are more than the 16,384 of the model"
        " (max_position_embeddings); beyond_model_context: true allows them"
    )
    with pytest.raises(InputError, match=re.escape(says)):
        decode_cases(context_tokens=16385)
    with pytest.raises(InputError, match=r"context_tokens: 16,384 with tokens 2: 16,385 tokens are more"):
        decode_cases(tokens=2)
    assert decode_cases(context_tokens=100_000, tokens=2, beyond_model_context=True) == 1


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dtypes": {"kv": "w4a16_g128"}}, "dtypes.kv: is 'w4a16_g128', a format of weights"),
        ({"dtype": "w4a16_g99"}, "dtype: unknown dtype 'w4a16_g99'"),
        ({"beyond_model_context": "yes"}, "beyond_model_context: is 'yes'"),
    ],
)
def test_slips_in_these_fields_are_told(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        parse_scenario({**DECODE, **changed}, "x.yaml")


def test_weights_alone_leave_the_cache_as_it_is() -> None:
    study: Any = assemble(parse_scenario({**DECODE, "dtype": "w4a16_g128"}, "x.yaml"), "x.yaml").study
    assert (study.bench.hardware.dtypes.weights, study.bench.hardware.dtypes.kv) == ("w4a16_g128", "bf16")


def serve(tmp_path: Path, **changed: Any) -> int:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**SERVING, **changed}))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--quiet", "--out", str(tmp_path / "run")])
    return int(ended.value.code or 0)


@slow
@pytest.mark.usefixtures("without_report")
def test_requests_beyond_the_model_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(tmp_path) == 0
    longer = {**SERVING["workload"], "output_tokens": {"kind": "constant", "value": 49}}
    assert serve(tmp_path, workload=longer) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert (
        "workload: the longest request: 2,049 tokens are more than the 2,048 of the model"
        " (max_position_embeddings); beyond_model_context: true allows them"
    ) in said[-1]
    assert serve(tmp_path, workload=longer, beyond_model_context=True) == 0


@pytest.mark.usefixtures("without_report")
@slow
def test_the_longest_request_that_comes_decides(tmp_path: Path) -> None:
    """Not the longest that could: of four draws up to 100,000 with a mean of 50, none is near 2,048."""
    drawn = {"kind": "lognormal", "mean": 50, "cv": 0.5, "max": 100_000}
    work = {**SERVING["workload"], "prompt_tokens": drawn, "output_tokens": drawn}
    assert serve(tmp_path, workload=work) == 0


@slow
def test_a_quantized_model_is_served(tmp_path: Path) -> None:
    """Its formats stand in the run's provenance and notes; more KV blocks are left than in bf16."""
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    (tmp_path / "awq.json").write_text(json.dumps({**LLAMA, "quantization_config": quantization}))
    assert serve(tmp_path, model=str(tmp_path / "awq.json")) == 0
    origin = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert origin["formats"] == "bf16; w4a16_g128_zp: down, gate, o, qkv, up"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert any("quantization_config (awq)" in note for note in summary["notes"])


def test_a_real_machine_refuses_formats_that_it_does_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    tiny = json.loads((MODELS / "tiny-llama.json").read_text())
    (tmp_path / "awq.json").write_text(json.dumps({**tiny, "quantization_config": quantization}))
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**DECODE, "device": "cpu", "model": "awq.json", "context_tokens": 64}))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(file), "--on", "cpu", "--quiet", "--out", str(tmp_path / "run")])
    assert ended.value.code == 2
    assert "model: its quantization_config (awq)" in capsys.readouterr().err
