"""The longest context that a model supports, as vLLM reads it from the Hugging Face `config.json`.

    longest = the least of max_position_embeddings and its synonyms
    rope scaling linear, dynamic    longest * factor
                 yarn               original_max_position_embeddings * factor
                 llama3, longrope   longest: these configs name the stretched length already

Source: vLLM, `_get_and_verify_max_len` in vllm/config/model.py, which refuses a longer max_model_len.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from simcore.input.files import shown
from simcore.models.errors import ModelError

LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# `rope_parameters` replaces `rope_scaling` since transformers 5.
ROPES = ("rope_parameters", "rope_scaling")
YARN = "yarn"
STRETCHED = ("linear", "dynamic", YARN)
# Multimodal positions (mrope) stretch nothing; "su" is the former name of longrope.
AS_NAMED = ("default", "llama3", "longrope", "su", "mrope")


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The most tokens of a sequence, prompt and answer together; `source`: the fields that set the limit."""

    tokens: int
    source: str

    def exceeded(self, tokens: int) -> str | None:
        """Why a sequence of `tokens` tokens is refused, or None if it is not too long."""
        if tokens <= self.tokens:
            return None
        return (
            f"{tokens:,} tokens are more than the {self.tokens:,} of the model ({self.source});"
            " beyond_model_context: true allows them"
        )


def context_limit(name: str, config: Mapping[str, Any]) -> ContextLimit | None:
    """The limit that a config sets; None if it names no length. Raises ModelError, naming the key."""
    given = {key: _tokens(name, key, config[key]) for key in LENGTHS if config.get(key) is not None}
    if not given:
        return None
    key = min(given, key=lambda key: given[key])
    tokens, source = given[key], key
    for rope in ROPES:
        scaling = scaling_of(name, rope, config.get(rope))
        if not scaling:
            continue
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in (*STRETCHED, *AS_NAMED):
            allowed = ", ".join((*AS_NAMED, *STRETCHED))
            raise ModelError(f"{name}: {rope}.rope_type is {shown(kind)} (allowed: {allowed})")
        if kind not in STRETCHED:
            return ContextLimit(tokens, source)
        factor = _factor(name, rope, scaling.get("factor"))
        original = scaling.get("original_max_position_embeddings") if kind == YARN else None
        if original is not None:
            tokens = _tokens(name, f"{rope}.original_max_position_embeddings", original)
            source = f"{rope}.original_max_position_embeddings"
        return ContextLimit(int(tokens * factor), f"{source} times {rope}.factor {factor:g}, {kind}")
    return ContextLimit(tokens, source)


def scaling_of(name: str, rope: str, value: Any) -> Mapping[str, Any]:
    """Returns how the positions of layers that attend over everything are scaled, by the value of a key of
    `ROPES`; empty if they are not. Raises ModelError, naming the key."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{name}: {rope} is {shown(value)}; a mapping is needed")
    by_layer = value.get("full_attention")
    return by_layer if isinstance(by_layer, dict) else value


def _factor(name: str, rope: str, value: Any) -> float:
    if value is None:
        return 1.0
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or not 1.0 <= value <= 1e6:
        raise ModelError(f"{name}: {rope}.factor is {shown(value)}; a number from 1 is needed")
    return float(value)


def _tokens(name: str, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: {key} is {shown(value)}; a whole number from 1 is needed")
    return value
