"""The frequencies of a rotary embedding, as a Hugging Face `config.json` gives them.

    f_i = theta^(-2i/d)                                      rope_theta
    linear    f_i / factor
    llama3    (1 - s) f_i / factor + s f_i,   s = (original f_i / 2 pi - low) / (high - low), from 0 to 1

with low_freq_factor, high_freq_factor and original_max_position_embeddings. Other scalings also change scores
or go by the length of a sequence, and are refused. Source: transformers, modeling_rope_utils.py.
"""

from collections.abc import Mapping
from math import isfinite, pi
from typing import Any

from torch import Tensor

from simcore.input.files import InputError, shown
from simcore.kernels.decoder.rotary import BASE, frequencies_of
from simcore.models.context_limit import ROPES, scaling_of

SCALINGS = ("default", "linear", "llama3")


def read_frequencies(where: str, config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Returns the angle of each pair of a head at position 1, fp64 [head_dim // 2]. Raises InputError, naming
    the key, for a rotary embedding that is not computed here."""
    key = next((key for key in ROPES if config.get(key)), ROPES[-1])
    rope = scaling_of(where, key, config.get(key))
    if config.get("partial_rotary_factor", rope.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise InputError(f"{where}: partial_rotary_factor is set, but whole heads are turned here")
    theta = positive(where, "rope_theta", rope.get("rope_theta", config.get("rope_theta", BASE)))
    found, kind = frequencies_of(head_dim, theta), rope.get("rope_type", rope.get("type", "default"))
    if kind not in SCALINGS:
        allowed = ", ".join(SCALINGS)
        raise InputError(f"{where}: {key}.rope_type is {shown(kind)}; with weights {allowed} are computed")
    if kind == "default":
        return found

    def number(name: str) -> float:
        return positive(where, f"{key}.{name}", rope.get(name))

    factor = number("factor")
    if kind == "linear":
        return found / factor
    low, high = number("low_freq_factor"), number("high_freq_factor")
    if high <= low:
        raise InputError(f"{where}: {key}.high_freq_factor is {high:g}; more than low_freq_factor is needed")
    turns = number("original_max_position_embeddings") * found / (2 * pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * found / factor + kept * found


def positive(where: str, key: str, value: Any) -> float:
    """Returns a number above 0. Raises InputError, naming the key, for anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not isfinite(value) or value <= 0:
        raise InputError(f"{where}: {key} is {shown(value)}; a number above 0 is needed")
    return float(value)
