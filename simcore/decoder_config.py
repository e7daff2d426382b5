"""What decoder a Hugging Face `config.json` describes.

    weights = layers * (qkv + o + gate and up + down) + embedding (+ LM head, unless it is the same table)

Only what is modelled is accepted: anything else would be priced as a Llama without a word.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A model configuration that cannot be used; the message says which field, and why."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer. `gated`: the MLP has gate and up projections; `parallel_residual`:
    attention and MLP read the same norm and are added together (GPT-J); `qk_norm`: q and k of every head
    are normed (Qwen3)."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool
    gated: bool = True
    parallel_residual: bool = False
    qk_norm: bool = False

    @property
    def layer_weights(self) -> dict[str, int]:
        """Elements of each weight matrix of one layer."""
        up = 2 if self.gated else 1
        return {
            "qkv": self.hidden * (self.q_heads + 2 * self.kv_heads) * self.head_dim,
            "o": self.q_heads * self.head_dim * self.hidden,
            "gate_up": up * self.hidden * self.intermediate,
            "down": self.intermediate * self.hidden,
        }

    @property
    def parameters(self) -> int:
        """Weights in all, norms left out."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * sum(self.layer_weights.values()) + embeddings


# Our field -> the keys under which Hugging Face configs hold it (GPT-J keeps the names of GPT-2).
_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "q_heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
# What is modelled. Anything else would be priced as a Llama without a word.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gptj")
# Attention and MLP side by side, MLP without a gate.
_PARALLEL = ("gptj",)
_QK_NORM = ("qwen3",)
# Where a missing head_dim is not hidden / heads.
_HEAD_DIM: Mapping[str, int] = {"qwen3": 128}
_REFUSED: Mapping[str, str] = {
    "num_local_experts": "mixtures of experts",
    "num_experts": "mixtures of experts",
    "n_routed_experts": "mixtures of experts",
    "kv_lora_rank": "latent attention",
    "sliding_window": "windowed attention",
}


def config_from_hugging_face(name: str, config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    As there, missing num_key_value_heads means as many as heads, missing head_dim hidden/heads (Qwen3: 128),
    missing tie_word_embeddings false, and GPT-J's missing n_inner four times n_embd. Raises ModelError,
    naming the key.
    """
    _check_kind(name, config)
    found = {field_: _integer(name, config, keys) for field_, keys in _KEYS.items()}
    hidden, heads = found["hidden"], found["q_heads"]
    kv_heads = _integer(name, config, ("num_key_value_heads",), heads)
    default_dim = _HEAD_DIM.get(str(config["model_type"]), hidden // heads)
    head_dim = _integer(name, config, ("head_dim",), default_dim)
    if "head_dim" not in config and hidden % heads:
        raise ModelError(
            f"{name}: head_dim is missing, and hidden_size {hidden} does not divide by {heads} heads"
        )
    if heads % kv_heads:
        raise ModelError(
            f"{name}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    parallel = config.get("model_type") in _PARALLEL
    four_times = 4 * hidden if parallel else None
    return DecoderConfig(
        name=name,
        intermediate=_integer(name, config, ("intermediate_size", "n_inner"), four_times),
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied_embeddings=_tied(name, config),
        gated=not parallel,
        parallel_residual=parallel,
        qk_norm=config["model_type"] in _QK_NORM,
        **found,
    )


def _tied(name: str, config: Mapping[str, Any]) -> bool:
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ModelError(f"{name}: tie_word_embeddings is {tied!r} (allowed: true, false)")
    return tied


def _check_kind(name: str, config: Mapping[str, Any]) -> None:
    for key, what in _REFUSED.items():
        # Qwen2 names a window even where it is switched off.
        off = key == "sliding_window" and config.get("use_sliding_window") is False
        if config.get(key) and not off:
            raise ModelError(f"{name}: {key} is set, but {what} cannot be modelled yet")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{name}: model_type is {kind!r} (allowed: {', '.join(MODEL_TYPES)})")


def _integer(name: str, config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if value is None:
        raise ModelError(f"{name}: {' or '.join(keys)} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: {keys[0]} is {value!r}; a whole number from 1 is needed")
    return value


def load_config(path: Path) -> DecoderConfig:
    """Reads a model file. Raises ModelError where it is missing or no JSON object."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: holds no JSON object")
    try:
        return config_from_hugging_face(path.stem, config)
    except ModelError as error:
        raise ModelError(f"{path.name}: {str(error).removeprefix(f'{path.stem}: ')}") from None
