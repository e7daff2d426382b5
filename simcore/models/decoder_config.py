"""Reads the decoder that a Hugging Face `config.json` describes.

    weights = layers * (qkv + o + gate and up + down) + embedding (+ LM head, unless it is the same table)

Only modelled types are accepted: any other would silently be priced as a Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simcore.input.files import InputError, read_json, shown
from simcore.models.context_limit import ContextLimit, context_limit
from simcore.models.errors import ModelError
from simcore.models.keys import check_attention, check_keys, key_notes, window_of
from simcore.models.linear_config import LINEAR_TYPES, LinearShape, linear_shape, linear_type
from simcore.models.mixers import FULL, LINEAR, SLIDING, STATEFUL, LinearMixer
from simcore.models.quantization import Quantization, read_quantization
from simcore.models.quantized_modules import FUSED, GPT_J, SEPARATE, Decoding, Modules
from simcore.models.text_config import text_of

__all__ = ["MODEL_TYPES", "DecoderConfig", "ModelError", "config_from_hugging_face", "load_config"]


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer. `gated`: the MLP has gate and up projections; `parallel_residual`:
    attention and MLP read the same norm and are added together (GPT-J); `qk_norm`: q and k of every head
    are normed (Qwen3). `mixers`: what mixes the tokens of each layer (`simcore.models.mixers`); empty: full
    attention in all; `linear`: the linear attention of the layers that have it; `window`: tokens that layers
    of sliding attention attend over. `final_norm`: whether a norm
    follows the last layer; `activated`: whether the MLP's gate goes through an activation. The following
    fields do not count when models are compared. `limit`: the longest context that the model supports;
    `quantization`: the number formats of its quantized weights; `stored`: the format of the others (for
    example float16); `weights`: the directory whose safetensors hold its weights; `notes`: notes for the user
    on how the config was read."""

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
    mixers: tuple[str, ...] = ()
    linear: LinearMixer | None = None
    window: int | None = None
    final_norm: bool = True
    activated: bool = True
    limit: ContextLimit | None = field(default=None, compare=False)
    quantization: Quantization | None = field(default=None, compare=False)
    stored: str | None = field(default=None, compare=False)
    weights: Path | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def layer_mixers(self) -> tuple[str, ...]:
        """What mixes the tokens of each layer."""
        return self.mixers or (FULL,) * self.layers

    @property
    def attention_layers(self) -> int:
        """The number of layers with a KV cache."""
        return self.layer_mixers.count(FULL)

    def cached_tokens(self, context: int) -> int:
        """How many tokens all layers keep K and V of, at a context length."""
        kept = min(context, self.window or context)
        return self.attention_layers * context + self.layer_mixers.count(SLIDING) * kept

    @property
    def state_bytes(self) -> float:
        """Bytes of the states of one sequence, in all layers that have one."""
        if self.linear is None:
            return 0.0
        return sum(self.linear.state_bytes(kind) for kind in self.layer_mixers if kind in STATEFUL)

    def first_layers(self, layers: int) -> "DecoderConfig":
        """The model with its first layers alone."""
        return replace(self, layers=layers, mixers=self.mixers[:layers])

    @property
    def layer_weights(self) -> dict[str, int]:
        """The elements of each weight matrix of one layer of full attention."""
        return self.weights_of(FULL)

    def weights_of(self, mixer: str) -> dict[str, int]:
        """The elements of each weight matrix of one layer with such a mixer."""
        up = 2 if self.gated else 1
        projected, heads = (self.q_heads + 2 * self.kv_heads) * self.head_dim, self.q_heads * self.head_dim
        if mixer in STATEFUL and self.linear is not None:
            projected, heads = self.linear.projected, self.linear.heads * self.linear.value_dim
        return {
            "qkv": self.hidden * projected,
            "o": heads * self.hidden,
            "gate_up": up * self.hidden * self.intermediate,
            "down": self.intermediate * self.hidden,
        }

    @property
    def matrices(self) -> int:
        """The number of weights in the matrices of all layers."""
        return sum(sum(self.weights_of(mixer).values()) for mixer in self.layer_mixers)

    @property
    def parameters(self) -> int:
        """The number of all weights except norms and biases."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.matrices + embeddings


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
    kind = linear_type(text) or text.get("model_type")
    if kind in LINEAR_TYPES:
        return _of_shape(name, text, linear_shape(name, str(kind), text), weights)
    if kind not in MODEL_TYPES:
        allowed = ", ".join((*MODEL_TYPES, *LINEAR_TYPES))
        raise ModelError(f"{name}: model_type is {shown(kind)} (allowed: {allowed})")
    found = {field_: _integer(name, text, keys) for field_, keys in _KEYS.items()}
    limit = context_limit(name, text)
    mixers = check_attention(name, text, found["layers"], limit.tokens if limit else None)
    hidden, heads = found["hidden"], found["q_heads"]
    parallel = kind in _PARALLEL
    tied = _tied(name, text)
    decoder = Decoding(name, found["layers"], _MODULES.get(kind, SEPARATE), own_head=not tied)
    attention = _attention_heads(name, text, hidden, heads)
    return DecoderConfig(
        name=name,
        intermediate=_integer(name, text, ("intermediate_size", "n_inner"), 4 * hidden if parallel else None),
        **attention,
        tied_embeddings=tied,
        mixers=mixers,
        linear=_as_attention(heads, attention) if LINEAR in mixers else None,
        window=window_of(name, text, found["layers"]) if SLIDING in mixers else None,
        final_norm=True,
        activated=True,
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


def _as_attention(heads: int, attention: Mapping[str, int]) -> LinearMixer:
    """The linear attention of a hybrid whose linear layers have the projections of its others (Liger, Lan et
    al. 2025; LoLCATs, Zhang et al. 2024): the same matrices, and a state a query head."""
    d = attention["head_dim"]
    return LinearMixer(heads, attention["kv_heads"], d, d, gated=False)


def _of_shape(
    name: str, config: Mapping[str, Any], shape: LinearShape, weights: Path | None
) -> DecoderConfig:
    """The model of linear attention alone that a config of a type of LINEAR_TYPES describes."""
    linear = shape.linear
    return DecoderConfig(
        name=name,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        layers=len(shape.mixers),
        q_heads=linear.heads,
        kv_heads=linear.kv_heads,
        head_dim=linear.key_dim,
        vocab=shape.vocab,
        tied_embeddings=shape.tied,
        gated=shape.gated,
        mixers=shape.mixers,
        linear=linear,
        final_norm=shape.final_norm,
        activated=shape.activated,
        limit=context_limit(name, config),
        stored=_stored(name, config),
        weights=weights,
        notes=shape.notes,
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
