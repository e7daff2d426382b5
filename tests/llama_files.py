"""Directories of tiny Llamas with random weights, as Hugging Face publishes them; and what such a model
answers, computed in float64 from the tensors by their published names, without any op of the project."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simcore.models.decoder_config import DecoderConfig, load_config

Config = dict[str, Any]
Tensors = dict[str, Tensor]

GQA: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 61, "max_position_embeddings": 512, "tie_word_embeddings": False, "rms_norm_eps": 1e-3,
    "rope_theta": 500.0, "hidden_act": "silu", "torch_dtype": "float32", "attention_bias": False,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
# Long waves, short ones, and some between: all three parts of llama3's scaling.
MODELS: dict[str, Config] = {
    "untied": GQA,
    "tied": {**GQA, "tie_word_embeddings": True, "num_hidden_layers": 2, "num_key_value_heads": 1},
    "llama3": {**GQA, "num_hidden_layers": 2, "rope_scaling": LLAMA3},
    "linear": {**GQA, "num_hidden_layers": 2, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "transformers 5": {**GQA, "num_hidden_layers": 2, "rope_theta": None,
                       "rope_parameters": {**LLAMA3, "rope_theta": 500.0}},
    "mistral": {**GQA, "num_hidden_layers": 2, "model_type": "mistral", "sliding_window": None,
                "architectures": ["MistralForCausalLM"]},
}  # fmt: skip


def tensors_of(config: Config, seed: int = 0) -> Tensors:
    """Random tensors by their published names; norms of rows far from 1, so that eps counts."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator) / math.sqrt(size[-1])

    hidden, inner, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    found = {"model.embed_tokens.weight": 0.3 * drawn(config["vocab_size"], hidden)}
    sizes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": 2.0 * drawn(*size) for name, size in sizes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{at}{name}.weight"] = 1.0 + drawn(hidden)
    found["model.norm.weight"] = 1.0 + drawn(hidden)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = 3.0 * drawn(config["vocab_size"], hidden)
    return found


def written(folder: Path, config: Config, tensors: Tensors, shards: int = 1) -> DecoderConfig:
    """The config of a directory that is written: in one file, or in shards with an index."""
    from safetensors.torch import save_file  # noqa: PLC0415

    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    metadata = {"format": "pt"}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata)
        return load_config(folder / "config.json")
    names, places = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        own = names[i::shards]
        places |= dict.fromkeys(own, file)
        save_file({name: tensors[name] for name in own}, folder / file, metadata)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return load_config(folder / "config.json")


def frequencies(config: Config) -> list[float]:
    """The angle of each pair at position 1; llama3 in the three cases of its publication."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or rope["rope_theta"]
    d, found = config["head_dim"], []
    for i in range(d // 2):
        one = 1.0 / theta ** (2 * i / d)
        if rope.get("type") == "linear":
            one /= rope["factor"]
        elif rope.get("rope_type") == "llama3":
            wave, factor = 2 * math.pi / one, rope["factor"]
            low, high, old = (
                rope[name]
                for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            )
            if wave > old / low:
                one /= factor
            elif wave >= old / high:
                smooth = (old / wave - low) / (high - low)
                one = (1 - smooth) * one / factor + smooth * one
        found.append(one)
    return found


def logits_of(config: Config, tensors: Tensors, ids: list[int]) -> Tensor:
    """The logits [tokens, vocab] in float64 after each of some ids, all at once, under a causal mask."""
    w = {name: tensor.double() for name, tensor in tensors.items()}
    n, d, heads = len(ids), config["head_dim"], config["num_attention_heads"]
    group = heads // config["num_key_value_heads"]
    angle = torch.arange(n).double()[:, None] * torch.tensor(frequencies(config), dtype=torch.float64)
    cos, sin = (torch.cat((x, x), -1) for x in (angle.cos(), angle.sin()))

    def rms(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def split(x: Tensor, name: str, *, turn: bool) -> Tensor:
        y = (x @ w[f"{name}.weight"].T).view(n, -1, d).transpose(0, 1)
        half = torch.cat((-y[..., d // 2 :], y[..., : d // 2]), -1)
        return y * cos + half * sin if turn else y

    x, mask = w["model.embed_tokens.weight"][ids], torch.full((n, n), -torch.inf).triu(1).double()
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        y = rms(x, f"{at}.input_layernorm")
        q, k = (split(y, f"{at}.self_attn.{name}_proj", turn=True) for name in "qk")
        k, v = (z.repeat_interleave(group, 0) for z in (k, split(y, f"{at}.self_attn.v_proj", turn=False)))
        scores = torch.softmax(q @ k.transpose(1, 2) / math.sqrt(d) + mask, -1)
        x = x + (scores @ v).transpose(0, 1).reshape(n, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = rms(x, f"{at}.post_attention_layernorm")
        gate, up = (y @ w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms(x, "model.norm") @ head.T


def greedy(config: Config, tensors: Tensors, prompt: list[int], tokens: int) -> list[int]:
    """The ids that follow a prompt."""
    ids = list(prompt)
    for _ in range(tokens):
        ids.append(int(logits_of(config, tensors, ids)[-1].argmax()))
    return ids[len(prompt) :]
