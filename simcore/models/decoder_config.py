"""Reads the decoder that a Hugging Face `config.json` describes.

    weights = layers * (qkv + o + gate and up + down) + embedding (+ LM head, unless it is the same table)

Only modelled types are accepted: any other would silently be priced as a Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simcore.input.files import InputError, read_json, shown
from simcore.models.context_limit import ContextLimit, context_limit
from simcore.models.errors import ModelError
from simcore.models.keys import check_attention, check_keys, key_notes
from simcore.models.quantization import Quantization, read_quantization
from simcore.models.quantized_modules import FUSED, GPT_J, SEPARATE, Decoding, Modules
from simcore.models.text_config import text_of

__all__ = ["MODEL_TYPES", "DecoderConfig", "ModelError", "config_from_hugging_face", "load_config"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer. `gated`: the MLP has gate and up projections; `parallel_residual`:
    attention and MLP read the same norm and are added together (GPT-J); `qk_norm`: q and k of every head
    are normed (Qwen3). The following fields do not count when models are compared. `limit`: the longest
    context that the model supports; `quantization`: the number formats of its quantized weights; `stored`:
    the format of the others (for example float16); `weights`: the directory whose safetensors hold its
    weights; `notes`: notes for the user on how the config was read."""

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
    limit: ContextLimit | None = field(default=None, compare=False)
    quantization: Quantization | None = field(default=None, compare=False)
    stored: str | None = field(default=None, compare=False)
    weights: Path | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def layer_weights(self) -> dict[str, int]:
        """The elements of each weight matrix of one layer."""
        up = 2 if self.gated else 1
        return {
            "qkv": self.hidden * (self.q_heads + 2 * self.kv_heads) * self.head_dim,
            "o": self.q_heads * self.head_dim * self.hidden,
            "gate_up": up * self.hidden * self.intermediate,
            "down": self.intermediate * self.hidden,
        }

    @property
    def parameters(self) -> int:
        """The number of all weights except norms."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * sum(self.layer_weights.values()) + embeddings


# Field of DecoderConfig -> its keys in Hugging Face configs (GPT-J uses the names of GPT-2).
_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "q_heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
# The modelled types; any other would silently be priced as a Llama. Granite scales by constants, Phi-3 fuses
# q, k and v into one matrix and gate and up into another, Ministral 3 scales q by its position, Qwen's VL
# models have other rotary positions: the matrix products are the same.
MODEL_TYPES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gptj",
    "phi3",
    "granite",
    "mimo",
    "ministral3",
    "smollm3",
    "qwen2_vl",
    "qwen2_vl_text",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
)
# Attention and MLP side by side, MLP without a gate.
_PARALLEL = ("gptj",)
_QK_NORM = ("qwen3",)
_MODULES: Mapping[str, Modules] = {"phi3": FUSED, "gptj": GPT_J}
# The types whose default head_dim is not hidden / heads.
_HEAD_DIM: Mapping[str, int] = {"qwen3": 128}
# A number above these is a mistake.
_MOST_LAYERS, _MOST = 10_000, 100_000_000
# The types whose embeddings are tied if tie_word_embeddings is missing.
_TIED = ("smollm3",)
# Number formats of checkpoints; all are priced as bf16, which is as wide as fp16.
_STORED = ("bfloat16", "float16", "float32")
# The Model Optimizer's file with the quantization, beside a config.json without it.
_SIDECAR = "hf_quant_config.json"
CONFIG = "config.json"
# The file with all weights beside a config.json, or the one that says which of several files has which.
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def config_from_hugging_face(
    name: str, config: Mapping[str, Any], weights: Path | None = None
) -> DecoderConfig:
    """Reads a Hugging Face `config.json`; of a model of several modalities, its language model. `weights`:
    the directory with its weights.

    Defaults as in transformers: num_key_value_heads as many as heads, head_dim hidden/heads (Qwen3: 128),
    tie_word_embeddings false (SmolLM3: true), GPT-J's n_inner four times n_embd. Raises ModelError, naming
    the key.
    """
    check_keys(name, config)
    text, notes = text_of(name, config)
    check_keys(name, text)
    kind = text.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{name}: model_type is {shown(kind)} (allowed: {', '.join(MODEL_TYPES)})")
    found = {field_: _integer(name, text, keys) for field_, keys in _KEYS.items()}
    limit = context_limit(name, text)
    check_attention(name, text, found["layers"], limit.tokens if limit else None)
    hidden, heads = found["hidden"], found["q_heads"]
    parallel = kind in _PARALLEL
    tied = _tied(name, text)
    decoder = Decoding(name, found["layers"], _MODULES.get(kind, SEPARATE), own_head=not tied)
    return DecoderConfig(
        name=name,
        intermediate=_integer(name, text, ("intermediate_size", "n_inner"), 4 * hidden if parallel else None),
        **_attention_heads(name, text, hidden, heads),
        tied_embeddings=tied,
        gated=not parallel,
        parallel_residual=parallel,
        qk_norm=kind in _QK_NORM,
        limit=limit,
        quantization=_quantization(text, decoder),
        stored=_stored(name, text),
        weights=weights,
        notes=(*notes, *key_notes(text)),
        **found,
    )


def _attention_heads(name: str, config: Mapping[str, Any], hidden: int, heads: int) -> dict[str, int]:
    kv_heads = _integer(name, config, ("num_key_value_heads",), heads)
    own = _HEAD_DIM.get(str(config["model_type"]))
    head_dim = _integer(name, config, ("head_dim",), own or hidden // heads)
    if config.get("head_dim") is None and own is None and hidden % heads:
        raise ModelError(
            f"{name}: head_dim is missing, and hidden_size {hidden} does not divide by {heads} heads"
        )
    if heads % kv_heads:
        raise ModelError(
            f"{name}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    return {"kv_heads": kv_heads, "head_dim": head_dim}


def _quantization(config: Mapping[str, Any], decoder: Decoding) -> Quantization | None:
    found = config.get("quantization_config") or config.get("compression_config")
    return read_quantization(found, decoder) if found is not None and found != {} else None


def _stored(name: str, config: Mapping[str, Any]) -> str | None:
    """The number format of the checkpoint's weights that are not quantized."""
    key = "dtype" if config.get("dtype") is not None else "torch_dtype"
    stored = config.get(key)
    word = stored.removeprefix("torch.") if isinstance(stored, str) else stored
    if word is not None and word not in _STORED:
        raise ModelError(f"{name}: {key} is {shown(stored)} (allowed: {', '.join(_STORED)})")
    return word


def _tied(name: str, config: Mapping[str, Any]) -> bool:
    tied = config.get("tie_word_embeddings", config.get("model_type") in _TIED)
    if not isinstance(tied, bool):
        raise ModelError(f"{name}: tie_word_embeddings is {shown(tied)} (allowed: true, false)")
    return tied


def _integer(name: str, config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if value is None:
        raise ModelError(f"{name}: {' or '.join(keys)} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: {keys[0]} is {shown(value)}; a whole number from 1 is needed")
    most = _MOST_LAYERS if keys == _KEYS["layers"] else _MOST
    if value > most:
        raise ModelError(f"{name}: {keys[0]} is {value:.6g}; at most {most:,} is allowed")
    return value


def load_config(path: Path) -> DecoderConfig:
    """Reads a model file; weights beside a `config.json` are noted, not read. Raises ModelError if it is
    missing, no JSON object, or not modelled."""
    config = _read_json(path)
    published = path.name == CONFIG
    beside = path.with_name(_SIDECAR)
    if published and "quantization_config" not in config and beside.is_file():
        config = {**config, "quantization_config": _read_json(beside)}
    has_weights = published and any(path.with_name(file).is_file() for file in (WEIGHTS, WEIGHTS_INDEX))
    try:
        return config_from_hugging_face(path.stem, config, path.parent if has_weights else None)
    except ModelError as error:
        raise ModelError(f"{path.name}: {str(error).removeprefix(f'{path.stem}: ')}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path)
    except InputError as error:
        raise ModelError(str(error)) from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return config
