"""Maps the module names in a quantization config to the matrices of a decoder.

Checkpoints name modules: `model.layers.7.self_attn.q_proj`, `lm_head`, a regular expression after `re:`, a
pattern with `*`, or a part of the path (`self_attn`). A simulated matrix (for example qkv) stands for several
modules in every layer, and has one number format, so all of them must have the same.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from simcore.input.files import shown
from simcore.models.errors import ModelError

LM_HEAD = "lm_head"
REGEX = "re:"
# The most repeats in a regular expression: names of modules have some 50 letters.
MOST_REPEATS = 4
# The paths of decoders in checkpoints, alone and in models of several modalities.
ROOTS = ("model.layers", "language_model.model.layers", "model.language_model.layers", "transformer.h")
HEAD_ROOTS = ("", "language_model.", "model.")

Modules = Mapping[str, tuple[str, ...]]
SEPARATE: Modules = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate": ("mlp.gate_proj",),
    "up": ("mlp.up_proj",),
    "down": ("mlp.down_proj",),
}
# Phi-3 stores matrices that are multiplied together as one.
FUSED: Modules = {
    "qkv": ("self_attn.qkv_proj",),
    "o": ("self_attn.o_proj",),
    "gate": ("mlp.gate_up_proj",),
    "up": ("mlp.gate_up_proj",),
    "down": ("mlp.down_proj",),
}
GPT_J: Modules = {
    "qkv": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "o": ("attn.out_proj",),
    "up": ("mlp.fc_in",),
    "down": ("mlp.fc_out",),
}


@dataclass(frozen=True, slots=True)
class Decoding:
    """The modules of a decoder: its name (for messages), its number of layers, the module names of its
    matrices, and whether the LM head is a matrix of its own."""

    name: str
    layers: int
    modules: Modules
    own_head: bool


def formats_of(
    decoder: Decoding, format_of: Callable[[tuple[str, ...]], str | None], *, head: bool
) -> dict[str, str]:
    """The format of each quantized matrix. `format_of` returns the format of a module, given all names that
    it may have in a checkpoint, or None if it is not quantized. `head`: whether the LM head may be quantized.
    Raises ModelError if the modules of one matrix differ."""
    found: dict[str, str] = {}
    for matrix, modules in decoder.modules.items():
        formats = {format_of(names): names for names in _in_all_layers(decoder.layers, modules)}
        if len(formats) > 1:
            (one, first), (other, second), *_ = formats.items()
            raise ModelError(
                f"{decoder.name}: quantization_config: {first[0]} is {one or 'not quantized'} and {second[0]}"
                f" is {other or 'not quantized'}; {matrix} must have one format in all layers"
            )
        (only,) = formats
        if only is not None:
            found[matrix] = only
    heads = tuple(f"{root}{LM_HEAD}" for root in HEAD_ROOTS)
    own = format_of(heads) if head and decoder.own_head else None
    return found if own is None else {**found, LM_HEAD: own}


def _in_all_layers(layers: int, modules: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for layer in range(layers):
        for module in modules:
            yield tuple(f"{root}.{layer}.{module}" for root in ROOTS)


def matcher(decoder: Decoding, field: str, entries: Iterable[object]) -> Callable[[tuple[str, ...]], bool]:
    """Returns the test whether an entry of a list matches one of the names of a module. Raises ModelError if
    an entry is no text or no valid regular expression."""
    patterns = [_pattern(decoder.name, field, entry) for entry in entries]
    return lambda names: any(pattern(name) for pattern in patterns for name in names)


def _may_take_ages(expression: str) -> bool:
    """Whether a regular expression may backtrack for very long: a repeat around another one, as in (a*)*, or
    many repeats side by side."""
    bare = re.sub(r"\\.|\[[^\]]*\]", "x", expression)
    return len(re.findall(r"[*+{]", bare)) > MOST_REPEATS or bool(re.search(r"[*+{].*\)[*+{]", bare))


def _pattern(name: str, field: str, entry: object) -> Callable[[str], bool]:
    if not isinstance(entry, str) or not entry:
        raise ModelError(f"{name}: {field} has {shown(entry)}; names of modules are needed")
    if entry.startswith(REGEX):
        try:
            expression = re.compile(entry.removeprefix(REGEX))
        except re.error as error:
            raise ModelError(
                f"{name}: {field} has {shown(entry)}, which is no regular expression ({error})"
            ) from None
        if _may_take_ages(entry.removeprefix(REGEX)):
            says = f"at most {MOST_REPEATS} repeats, none of a group with another before its end, are allowed"
            raise ModelError(f"{name}: {field} has {shown(entry)}; {says}")
        return lambda module: expression.match(module) is not None
    if "*" in entry:
        return lambda module: fnmatchcase(module, entry)
    return lambda module: f".{entry}." in f".{module}."
