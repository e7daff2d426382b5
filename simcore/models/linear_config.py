"""Reads models of linear attention alone from a Hugging Face `config.json`: RetNet and TransNormerLLM.

    retnet       q, k 2048 wide, v and gate twice as wide; rotary embedding; each head normed; MLP
    transnormer  q, k, v and gate as wide as the model; silu of q and k; SimpleRMSNorm; gated MLP without an
                 activation; in the layers of linear_use_lrpe_list q and k become twice as wide

Two authors' names of keys are read for retnet: those of syncdoth/RetNet before and after its revision to
torchscale's names. Configs of TransNormerLLM name no model_type: their class does.
Sources: github.com/syncdoth/RetNet and wac81/toy_retnet_1.3b; OpenNLPLab's modeling_transnormer.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simcore.input.files import shown
from simcore.models.errors import ModelError
from simcore.models.mixers import LINEAR, LRPE, LinearMixer

RETNET, TRANSNORMER = "retnet", "transnormer"
LINEAR_TYPES = (RETNET, TRANSNORMER)
_CLASS = "TransnormerForCausalLM"
_MOST = 100_000_000
_MOST_LAYERS = 10_000
_LAYERS = ("num_layers", "decoder_layers")
# Keys of RetNet's configs: the first names, then torchscale's.
_RETNET: Mapping[str, tuple[str, str]] = {
    "hidden": ("hidden_size", "decoder_embed_dim"),
    "layers": _LAYERS,
    "heads": ("num_heads", "decoder_retention_heads"),
    "values": ("v_dim", "decoder_value_embed_dim"),
    "intermediate": ("ffn_proj_size", "decoder_ffn_embed_dim"),
    "vocab": ("vocab_size", "vocab_size"),
}


# What keys of TransNormerLLM's configs may say.
_TRANSNORMER: Mapping[str, tuple[str, ...]] = {
    "norm_type": ("simplermsnorm",),
    "linear_act_fun": ("swish", "silu"),
}


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What a config says of a model of linear attention alone; fields as in DecoderConfig."""

    hidden: int
    intermediate: int
    vocab: int
    mixers: tuple[str, ...]
    linear: LinearMixer
    tied: bool
    gated: bool
    final_norm: bool
    activated: bool
    notes: tuple[str, ...] = ()


def linear_type(config: Mapping[str, Any]) -> str | None:
    """The type of LINEAR_TYPES of a config, by its model_type, else by its class; None for others."""
    kind = config.get("model_type")
    if kind in LINEAR_TYPES:
        return str(kind)
    classes = config.get("architectures")
    return TRANSNORMER if kind is None and isinstance(classes, list) and _CLASS in classes else None


def linear_shape(name: str, kind: str, config: Mapping[str, Any]) -> LinearShape:
    """The shape that a config of a type of LINEAR_TYPES describes. Raises ModelError, naming the key, also
    for keys by which it is another model than the one that is read."""
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            raise ModelError(f"{name}: {key} is not read of model_type {kind}; leave it out")
    return _retnet(name, config) if kind == RETNET else _transnormer(name, config)


def _retnet(name: str, config: Mapping[str, Any]) -> LinearShape:
    found = {each: _whole(name, config, *keys) for each, keys in _RETNET.items()}
    hidden, heads, values = found["hidden"], found["heads"], found["values"]
    # torchscale's q and k are as wide as the model.
    keys = _whole(name, config, "qk_dim", default=hidden)
    _divides(name, heads, {"qk_dim": keys, "v_dim": values})
    revised = "decoder_embed_dim" in config
    return LinearShape(
        hidden,
        found["intermediate"],
        found["vocab"],
        (LINEAR,) * found["layers"],
        LinearMixer(heads, heads, keys // heads, values // heads),
        # transformers' default, which the revision's class changes.
        tied=_flag(name, config, "tie_word_embeddings", default=not revised),
        gated=_flag(name, config, "use_glu", default=revised),
        final_norm=revised,
        activated=True,
        notes=("biases are left out",) if _flag(name, config, "use_bias_in_mlp", default=False) else (),
    )


def _transnormer(name: str, config: Mapping[str, Any]) -> LinearShape:
    for key, allowed in _TRANSNORMER.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ModelError(f"{name}: {key} is {shown(config[key])} (allowed: {', '.join(allowed)})")
    hidden = _whole(name, config, "decoder_embed_dim")
    layers, heads = _whole(name, config, "decoder_layers"), _whole(name, config, "decoder_attention_heads")
    width = _whole(name, config, "hidden_dim", default=hidden)
    _divides(name, heads, {"hidden_dim": width})
    lrpe = config.get("linear_use_lrpe_list") or [0] * layers
    if not isinstance(lrpe, list) or len(lrpe) != layers or any(each not in (0, 1) for each in lrpe):
        raise ModelError(f"{name}: linear_use_lrpe_list must have a 0 or 1 for each of the {layers} layers")
    d = width // heads
    return LinearShape(
        hidden,
        _whole(name, config, "glu_dim"),
        _whole(name, config, "vocab_size"),
        tuple(LRPE if each else LINEAR for each in lrpe),
        LinearMixer(heads, heads, d, d, inputs="silu", norm="layer", decays="slopes"),
        tied=_flag(name, config, "tie_word_embeddings", default=True),
        gated=True,
        final_norm=True,
        activated=False,
    )


def _divides(name: str, heads: int, widths: Mapping[str, int]) -> None:
    for key, width in widths.items():
        if width % heads:
            raise ModelError(f"{name}: {key} {width} does not divide by {heads} heads")


def _whole(name: str, config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        if default is not None:
            return default
        raise ModelError(f"{name}: {' or '.join(dict.fromkeys(keys))} is missing")
    value, most = config[key], _MOST_LAYERS if key in _LAYERS else _MOST
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{name}: {key} is {shown(value)}; a whole number from 1 to {most:,} is needed")
    return value


def _flag(name: str, config: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{name}: {key} is {shown(value)} (allowed: true, false)")
    return value
