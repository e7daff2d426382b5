"""Weights from safetensors beside a config.json: real machines answer with them as a Llama does that reads
the same tensors by their published names; what is no Llama is one line; a simulation reads none."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from simcore.input.files import InputError
from simcore.models.decoder import Decoder, Style
from simcore.models.decoder_config import load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.tensor_parallel import tensor_parallel
from simcore.validate.machines.buffers import checkpoint
from simcore.validate.machines.buffers.cuda_decoder import card_decoder_states
from simcore.validate.machines.buffers.decoder import decoder_states, shards
from simcore.validate.machines.buffers.served import prompt_ids
from simcore.validate.machines.cpu.machine import TorchRun
from simcore.validate.machines.cuda.machine import Card
from simcore.workload.requests import Request
from tests.command_line import call
from tests.fake_card import FakeCudaApi
from tests.llama_files import GQA, LLAMA3, MODELS, Tensors, greedy, logits_of, tensors_of, written
from tests.test_answers import on_card, requests, schedules, served
from tests.test_torch_decoder import F32, F64, NEAR, SEED, near
from tests.thorough import first, slow

pytest.importorskip("safetensors")
HAS_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", first(1, ["continuous", "fusion", "instances"]))
@pytest.mark.parametrize("name", MODELS)
def test_the_cpu_answers_as_the_llama_of_the_files(
    name: str, schedule: str, ranks: int, tmp_path: Path
) -> None:
    config, random = MODELS[name], Random(f"{name} {schedule}")
    tensors = tensors_of(config)
    model = ServedDecoder(written(tmp_path, config, tensors, random.choice([1, 3])), ranks=ranks, dtypes=F64)
    wanted = requests(random, equal=False, count=4)
    given = set()
    for state in served(schedules(random)[schedule], model, wanted):
        for r in wanted:
            prompt = prompt_ids(r, config["vocab_size"], SEED).tolist()
            truth = greedy(config, tensors, prompt, r.output_tokens)
            assert state.answers[r.id][: r.output_tokens] == truth
            given |= {*truth}
    # Else a model that always says the same would do.
    assert len(given) > 5


def last_logits(folder: Path, length: int, dtypes: Any) -> tuple[list[int], Tensor]:
    """A prompt, and the logits after it on the CPU."""
    config = load_config(folder / "config.json")
    request = Request(0, 0.0, length, 1, 1)
    (state,) = served(schedules(Random(0))["instances"], ServedDecoder(config, dtypes=dtypes), [request])
    return prompt_ids(request, config.vocab, SEED).tolist(), state.body.buffers["logits"][-1]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    config, tensors = MODELS[name], tensors_of(MODELS[name], 3)
    written(tmp_path, config, tensors)
    ids, found = last_logits(tmp_path, 90, F64)
    near(found, logits_of(config, tensors, ids)[-1], NEAR)


@slow
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    written(tmp_path, MODELS[name], tensors_of(MODELS[name], 4))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids, found = last_logits(tmp_path, 90, F32)
    with torch.no_grad():
        near(found, theirs(torch.tensor([ids])).logits[0, -1], 1e-4)


@pytest.mark.parametrize("style", ["all_reduce", "scatter_gather", "fused_gather"])
def test_decoding_in_ranks_is_the_llama_of_the_files(style: Style, tmp_path: Path) -> None:
    """From the first position on, where no cache is random."""
    config, tensors = MODELS["llama3"], tensors_of(MODELS["llama3"])
    model = Decoder(written(tmp_path, config, tensors), ranks=2, batch=3, dtypes=F64, style=style)
    states = decoder_states(model, {"tensor": 2}, SEED, 1, 1)
    asked = states[0].body.ids.tolist()
    TorchRun(states, mesh={"tensor": 2}).run(lambda m: tensor_parallel(m, model, tokens=1, context=1))
    found = [state.logits for state in states]
    logits = found[0] if style == "all_reduce" else torch.cat(found, 1)
    near(logits[:, : config["vocab_size"]], torch.cat([logits_of(config, tensors, [i]) for i in asked]))


def test_layers_alone_are_the_first_of_the_files(tmp_path: Path) -> None:
    tensors = tensors_of(GQA)
    config = replace(written(tmp_path, GQA, tensors), layers=1)
    (weights,) = shards(config, F64, 1, "all_reduce", SEED)
    assert len(weights.layers) == 1
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(weights.layers[0]["down"], down.double().T)


@slow
@pytest.mark.skipif(HAS_GPU, reason="the interpreter is for machines without a CUDA device")
@pytest.mark.parametrize("name", first(1, ["llama3", "tied"]))
def test_a_card_answers_as_the_llama_of_the_files(name: str, tmp_path: Path) -> None:
    config, random = {**MODELS[name], "num_hidden_layers": 1}, Random(name)
    tensors = tensors_of(config)
    read = written(tmp_path, config, tensors)
    wanted = requests(random, equal=False, count=3, most=4)
    schedule = schedules(random)["continuous"]
    answers, _ = on_card("fake", schedule, ServedDecoder(read, dtypes=F32), wanted)
    for r in wanted:
        prompt = prompt_ids(r, config["vocab_size"], SEED).tolist()
        assert answers[r.id] == greedy(config, tensors, prompt, r.output_tokens)
    model, tokens = Decoder(read, batch=2, dtypes=F32), 6
    (state,) = card_decoder_states(model, {"tensor": 1}, SEED, 1, tokens, device="cpu", drawn_on="cpu")
    asked = state.buffers["ids"].tolist()
    Card([state], FakeCudaApi(3), mesh={"tensor": 1}).start().run(
        lambda m: tensor_parallel(m, model, tokens=tokens, context=1)
    )
    chosen = state.chosen.T.tolist()
    assert chosen == [greedy(config, tensors, [first], tokens) for first in asked]


# -- what is not read --------------------------------------------------------------------------------------

Q = "model.layers.1.self_attn.q_proj.weight"


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def also(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without(Q), f"model.safetensors: {Q} is missing"),
        (without("lm_head.weight"), "model.safetensors: lm_head.weight is missing"),
        (also(Q, torch.zeros(3, 5)), rf"model.safetensors: {Q} is \[3, 5\]; \[64, 32\] is needed"),
        (also(Q, torch.zeros(64, 32, dtype=torch.int8)), f"{Q} is I8; with weights F64, F32, F16, BF16 are"),
        (also("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)), "q_proj.bias'? is no tensor of the"),
        (also("model.layers.3.input_layernorm.weight", torch.zeros(32)), "layernorm.weight'? is no tensor"),
        (also("transformer.h.0.attn.weight", torch.zeros(2)), "transformer.h.0.attn.weight'? is no tensor"),
    ],
)
def test_tensors_that_are_not_the_models_are_named(
    change: Callable[[Tensors], object], says: str, tmp_path: Path
) -> None:
    tensors = tensors_of(GQA)
    change(tensors)
    config = written(tmp_path, GQA, tensors)
    with pytest.raises(InputError, match=says):
        shards(config, F32, 1, "all_reduce", SEED)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"model_type": "qwen2"},
            "config.json: model_type is 'qwen2'; weights are read of llama and",
        ),
        ({"hidden_act": "gelu"}, "config.json: hidden_act is 'gelu'; with weights silu is computed"),
        ({"rms_norm_eps": 0}, "config.json: rms_norm_eps is 0; a number above 0 is needed"),
        ({"rope_theta": "x"}, "config.json: rope_theta is 'x'; a number above 0 is needed"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type is 'yarn'; with",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic'; with weights default, linear,",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "rope_scaling.factor is None; a number above 0"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1; more than low_freq"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is set"),
        (
            {"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
            "quantization_config is set; weights are read that are not quantized",
        ),
    ],
)
def test_what_would_be_another_model_is_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    config = written(tmp_path, {**GQA, **change}, tensors_of(GQA))
    with pytest.raises(InputError, match=says):
        shards(config, F32, 1, "all_reduce", SEED)


def test_a_head_beside_tied_embeddings_has_to_be_the_embedding(tmp_path: Path) -> None:
    tied, tensors = {**GQA, "tie_word_embeddings": True}, tensors_of(GQA)
    config = written(tmp_path, tied, tensors)
    with pytest.raises(InputError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
        shards(config, F32, 1, "all_reduce", SEED)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    shards(written(tmp_path, tied, tensors), F32, 1, "all_reduce", SEED)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{}", "index.json: weight_map is missing"),
        ('{"weight_map": {"a": "../b"}}', r"weight_map: .*a.* is in '../b'; a file name is needed"),
        ('{"weight_map": {"a": 1}}', "is in 1; a file name is needed"),
        ('{"weight_map": {"a": "b"}}', "index.json: .*a.* is no tensor of the model"),
    ],
)
def test_an_index_that_names_no_files_is_refused(index: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GQA), encoding="utf-8")
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    with pytest.raises(InputError, match=says):
        shards(load_config(tmp_path / "config.json"), F32, 1, "all_reduce", SEED)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    config = written(tmp_path, GQA, tensors_of(GQA), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003\.safetensors: cannot be read"):
        shards(config, F32, 1, "all_reduce", SEED)


def test_without_the_library_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, find = written(tmp_path, GQA, tensors_of(GQA)), importlib.util.find_spec
    monkeypatch.setattr(
        checkpoint.importlib.util, "find_spec", lambda name: None if name == "safetensors" else find(name)
    )
    with pytest.raises(InputError, match=r"needs safetensors: pip install 'simcore\[kernels\]'"):
        shards(config, F32, 1, "all_reduce", SEED)


# -- from the command line ---------------------------------------------------------------------------------


def scenario(folder: Path, study: str) -> str:
    """A scenario of the model in a folder."""
    model = str(folder / "config.json")
    common = {"name": "t", "study": study, "device": "cpu", "model": model, "dtype": "fp32"}
    length = {"kind": "constant", "value": 4}
    serving = {
        "workload": {"requests": 3, "arrivals": {"kind": "poisson", "rate_per_s": 50.0},
                     "prompt_tokens": length, "output_tokens": length},
        "strategies": [{"kind": "continuous_batching", "token_budget": 16, "max_sequences": 2}],
    }  # fmt: skip
    decode = {"context_tokens": 8, "tokens": 2, "strategies": [{"kind": "tensor_parallel", "ranks": 1}]}
    file = folder / "x.yaml"
    file.write_text(yaml.safe_dump({**common, **(serving if study == "serving" else decode)}))
    return str(file)


@slow
@pytest.mark.parametrize("study", ["serving", "decode"])
def test_a_birth_record_says_where_weights_are_from(study: str, tmp_path: Path) -> None:
    written(tmp_path, GQA, tensors_of(GQA))
    out = tmp_path / "out"
    for said in (f"operands random, by seed 0, but weights read from {tmp_path}", "by seed 0, weights too"):
        assert call("run", scenario(tmp_path, study), "--on", "cpu", "--quiet", "--out", str(out)) == 0
        assert json.loads((out / "provenance.json").read_text())["how"].endswith(said)
        (tmp_path / "model.safetensors").unlink(missing_ok=True)


@slow
def test_a_simulation_reads_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path, GQA, {})
    file, out = scenario(tmp_path, "serving"), str(tmp_path / "out")
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    assert call("run", file, "--quiet", "--out", out) == 0
    capsys.readouterr()
    assert call("run", file, "--on", "cpu", "--quiet", "--out", out) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "model.safetensors: cannot be read" in said
