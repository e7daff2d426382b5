"""Finds the language model in the `config.json` of a model of several modalities.

It is in `text_config`, which leaves out keys that equal the defaults of its class in transformers; dtype,
quantization and tied embeddings may be outside. The parts for images and sound are not priced.
"""

from collections.abc import Mapping
from typing import Any

from simcore.input.files import shown
from simcore.models.errors import ModelError

# Keys outside of text_config that also hold for the language model.
SHARED = ("quantization_config", "compression_config", "torch_dtype", "dtype", "tie_word_embeddings")
# The defaults of the configuration classes of transformers (4.x, models/*/configuration_*.py) for keys that a
# nested config leaves out.
_LLAMA: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL: Mapping[str, Any] = {
    **_LLAMA,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN: Mapping[str, Any] = {
    **_LLAMA,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
NESTED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}


def text_of(name: str, config: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """The config of the language model, and notes for the user on how it was found. Raises ModelError if
    `text_config` is no mapping."""
    inner = config.get("text_config")
    if inner is None:
        vision = [key for key in ("vision_config", "audio_config") if config.get(key)]
        return config, _left_out(vision)
    if not isinstance(inner, dict):
        raise ModelError(f"{name}: text_config is {shown(inner)}; a mapping is needed")
    shared = {key: config[key] for key in SHARED if config.get(key) is not None}
    given = {
        **shared,
        **{key: value for key, value in inner.items() if key not in shared or value is not None},
    }
    defaults = NESTED_DEFAULTS.get(str(inner.get("model_type")), {})
    missing = {key: value for key, value in defaults.items() if key not in given}
    notes = _left_out([key for key in ("vision_config", "audio_config") if config.get(key)])
    if missing:
        taken = ", ".join(f"{key} {value}" for key, value in missing.items())
        notes.append(
            f"text_config leaves out what is transformers' default for {inner['model_type']}: {taken}"
        )
    return {**missing, **given}, notes


def _left_out(parts: list[str]) -> list[str]:
    if not parts:
        return []
    return [f"the language model alone is priced; time and memory of {' and '.join(parts)} are left out"]
