"""Reads the number formats of matrices from the `quantization_config` of a Hugging Face `config.json`.

    fp8, fbgemm_fp8, modelopt FP8, compressed-tensors float W8A8    fp8, fp8_b128 (scales of blocks)
    compressed-tensors int W8A8                                     int8
    AWQ, GPTQ, AutoRound, compressed-tensors without activations    w4a16, w8a16, _g128, _zp: see ops.op

Other methods are refused, because they would be priced as another format.
Sources: the configs of vLLM's quantization methods (vllm/model_executor/layers/quantization), of transformers
(utils/quantization_config.py) and of compressed-tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcore.input.files import shown
from simcore.models.errors import ModelError
from simcore.models.quantized_modules import LM_HEAD, Decoding, formats_of, matcher
from simcore.ops.op import GROUP_SIZES

FIELD = "quantization_config"
FP8, FP8_BLOCKS, INT8 = "fp8", "fp8_b128", "int8"
BLOCK = [128, 128]
# The group sizes that mean a scale for each column of the matrix.
WHOLE_COLUMN = (None, -1)
LAYOUTS = (
    "dense",
    "naive-quantized",
    "float-quantized",
    "int-quantized",
    "pack-quantized",
    "mixed-precision",
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The number formats of the quantized matrices (qkv, o, gate, up, down, lm_head) and of the KV cache
    (None: as the model's activations). `method`: the config's quant_method."""

    method: str
    formats: tuple[tuple[str, str], ...]
    kv: str | None = None


def read_quantization(config: Any, decoder: Decoding) -> Quantization:
    """Reads a quantization_config. Raises ModelError, naming the field and the allowed values."""
    if not isinstance(config, dict):
        raise ModelError(f"{decoder.name}: {FIELD} is {shown(config)}; a mapping is needed")
    method = _method(config)
    if not isinstance(method, str) or method not in METHODS:
        raise _refused(decoder, "quant_method", method, METHODS)
    formats = METHODS[method](decoder, config)
    return Quantization(method, tuple(sorted(formats.items())), _kv(decoder, config))


def _method(config: Mapping[str, Any]) -> Any:
    producer = config.get("producer")
    if "quant_method" not in config and isinstance(producer, dict):
        return producer.get("name")  # hf_quant_config.json of NVIDIA's Model Optimizer
    return config.get("quant_method")


def _refused(decoder: Decoding, field: str, value: object, allowed: Any) -> ModelError:
    known = ", ".join(map(str, allowed))
    return ModelError(f"{decoder.name}: {FIELD}.{field} is {shown(value)} (allowed: {known})")


def _one_of(decoder: Decoding, config: Mapping[str, Any], field: str, allowed: Sequence[Any]) -> Any:
    value = config.get(field)
    if not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
        raise _refused(decoder, field, value, allowed)
    return value


def _listed(decoder: Decoding, config: Mapping[str, Any], *fields: str) -> Callable[[tuple[str, ...]], bool]:
    """Returns the test whether a module is in one of the lists `fields`."""
    entries: list[object] = []
    for field in fields:
        value = config.get(field)
        entries += [] if value is None else _list(decoder, value, field)
    return matcher(decoder, f"{FIELD}.{fields[0]}", entries)


def _list(decoder: Decoding, value: Any, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise ModelError(f"{decoder.name}: {FIELD}.{field} is {shown(value)}; a list is needed")
    return value


def _all_but(
    decoder: Decoding, dtype: str, skipped: Callable[[tuple[str, ...]], bool], *, head: bool = False
) -> dict[str, str]:
    return formats_of(decoder, lambda names: None if skipped(names) else dtype, head=head)


# -- 8 bits ------------------------------------------------------------------------------------------


def _fp8(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    _one_of(decoder, config, "activation_scheme", (None, "static", "dynamic"))
    _one_of(decoder, config, "fmt", (None, "e4m3", "float8_e4m3fn"))
    blocks = _one_of(decoder, config, "weight_block_size", (None, BLOCK))
    skipped = _listed(decoder, config, "modules_to_not_convert", "ignored_layers")
    return _all_but(decoder, FP8_BLOCKS if blocks else FP8, skipped)


def _fbgemm(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    return _all_but(decoder, FP8, _listed(decoder, config, "modules_to_not_convert"))


def _modelopt(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    inner = _inner(decoder, config)
    _one_of(decoder, inner, "quant_algo", (FP8.upper(),))
    return _all_but(decoder, FP8, _listed(decoder, inner, "ignore", "exclude_modules"), head=True)


def _inner(decoder: Decoding, config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("quantization", config)
    if not isinstance(inner, dict):
        raise ModelError(f"{decoder.name}: {FIELD}.quantization is {shown(inner)}; a mapping is needed")
    return inner


# -- weights alone -----------------------------------------------------------------------------------


def _weight_only(
    decoder: Decoding,
    bits: Any,
    group: Any,
    zero_point: bool,
    fields: tuple[str, str] = ("bits", "group_size"),
) -> str:
    """The name of a weight-only format. Raises ModelError for bits and groups without a format here."""
    if type(bits) is not int or bits not in (4, 8):
        raise _refused(decoder, fields[0], bits, (4, 8))
    if group in WHOLE_COLUMN:
        return f"w{bits}a16"
    if type(group) is not int or group not in GROUP_SIZES:
        raise _refused(decoder, fields[1], group, (*GROUP_SIZES, -1))
    return f"w{bits}a16_g{group}{'_zp' if zero_point else ''}"


def _awq(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    bits, group = (
        config.get("bits", config.get("w_bit")),
        config.get("group_size", config.get("q_group_size")),
    )
    if bits != 4:
        raise _refused(decoder, "bits", bits, (4,))
    zero_point = _one_of(decoder, {"zero_point": True, **config}, "zero_point", (True, False))
    dtype = _weight_only(decoder, bits, group, zero_point)
    return _all_but(decoder, dtype, _listed(decoder, config, "modules_to_not_convert"))


def _gptq(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    """The formats of GPTQ, whose checkpoints hold zero points, symmetric or not."""
    if config.get("dynamic"):
        raise ModelError(
            f"{decoder.name}: {FIELD}.dynamic gives modules formats of their own, which is not read"
        )
    head = _one_of(decoder, {"lm_head": False, **config}, "lm_head", (True, False))
    dtype = _weight_only(decoder, config.get("bits"), config.get("group_size"), True)
    if chosen := config.get("modules_in_block_to_quantize"):
        names = [
            name for group in _list(decoder, chosen, "modules_in_block_to_quantize") for name in _flat(group)
        ]
        wanted = matcher(decoder, f"{FIELD}.modules_in_block_to_quantize", names)
        return formats_of(
            decoder, lambda names: dtype if wanted(names) or LM_HEAD in names else None, head=head
        )
    return _all_but(decoder, dtype, _listed(decoder, config, "modules_to_not_convert"), head=head)


def _flat(group: Any) -> list[Any]:
    return group if isinstance(group, list) else [group]


def _auto_round(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    packing = config.get("packing_format", "auto_round:auto_gptq")
    if not isinstance(packing, str) or not packing.endswith(("gptq", "awq")):
        raise _refused(decoder, "packing_format", packing, ("auto_round:auto_gptq", "auto_round:auto_awq"))
    for field in ("extra_config", "dynamic"):
        if config.get(field):
            raise ModelError(
                f"{decoder.name}: {FIELD}.{field} gives modules formats of their own, which is not read"
            )
    _one_of(decoder, {"data_type": "int", **config}, "data_type", ("int",))
    dtype = _weight_only(decoder, config.get("bits"), config.get("group_size"), True)
    return _all_but(decoder, dtype, _listed(decoder, config, "modules_to_not_convert"))


# -- compressed-tensors ------------------------------------------------------------------------------


def _compressed(decoder: Decoding, config: Mapping[str, Any]) -> dict[str, str]:
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise ModelError(f"{decoder.name}: {FIELD}.sparsity_config: sparse weights cannot be modelled yet")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(
            f"{decoder.name}: {FIELD}.config_groups is {shown(groups)}; a mapping of groups is needed"
        )
    _layout(decoder, config, "format")
    skipped = _listed(decoder, config, "ignore")
    schemes = [_group(decoder, f"config_groups.{key}", group) for key, group in groups.items()]

    def format_of(names: tuple[str, ...]) -> str | None:
        if skipped(names):
            return None
        # A group that names the module takes precedence over a group of all linear modules.
        named = (dtype for wanted, _, dtype in schemes if wanted(names))
        every = (dtype for _, linear, dtype in schemes if linear)
        return next(named, None) or next(every, None)

    return formats_of(decoder, format_of, head=True)


def _layout(decoder: Decoding, config: Mapping[str, Any], field: str) -> None:
    layout = config.get("format")
    if layout is not None and layout not in LAYOUTS:
        raise _refused(decoder, field, layout, LAYOUTS)


def _group(decoder: Decoding, field: str, group: Any) -> tuple[Callable[[tuple[str, ...]], bool], bool, str]:
    """The test whether a group names a module, whether it means all linear modules, and their format."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ModelError(f"{decoder.name}: {FIELD}.{field}.weights is missing; a mapping is needed")
    _layout(decoder, group, f"{field}.format")
    targets = group.get("targets", ["Linear"])
    others = [target for target in _list(decoder, targets, f"{field}.targets") if target != "Linear"]
    named = matcher(decoder, f"{FIELD}.{field}.targets", others)
    if group.get("output_activations"):
        raise ModelError(f"{decoder.name}: {FIELD}.{field}.output_activations cannot be modelled yet")
    return (
        named,
        len(others) < len(targets),
        _scheme(decoder, field, group["weights"], group.get("input_activations")),
    )


def _scheme(decoder: Decoding, field: str, weights: Mapping[str, Any], activations: Any) -> str:
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    strategy, group = weights.get("strategy"), weights.get("group_size")
    if kind not in ("int", "float"):
        raise _refused(decoder, f"{field}.weights.type", kind, ("int", "float"))
    if kind == "float" and bits != 8:
        raise _refused(decoder, f"{field}.weights.num_bits", bits, ("8 where type is float",))
    if not activations:
        if kind == "float":
            return "w8a16"
        if strategy == "block":
            raise _refused(decoder, f"{field}.weights.strategy", strategy, ("tensor", "channel", "group"))
        fields = f"{field}.weights.num_bits", f"{field}.weights.group_size"
        return _weight_only(decoder, bits, group, weights.get("symmetric") is False, fields)
    same = isinstance(activations, dict) and (activations.get("num_bits", 8), activations.get("type", "int"))
    if same != (bits, kind) or bits != 8:
        raise ModelError(
            f"{decoder.name}: {FIELD}.{field}.input_activations with weights of {bits} bits of type {kind}"
            " cannot be modelled (allowed: both of 8 bits and of one type, or none)"
        )
    if kind == "float" and strategy == "block":
        if weights.get("block_structure") not in (BLOCK, tuple(BLOCK), "128x128"):
            structure = weights.get("block_structure")
            raise _refused(decoder, f"{field}.weights.block_structure", structure, (BLOCK,))
        return FP8_BLOCKS
    if strategy not in (None, "tensor", "channel") or group not in WHOLE_COLUMN:
        allowed = ("tensor", "channel", *(("block",) if kind == "float" else ()))
        raise _refused(decoder, f"{field}.weights.strategy", strategy or f"groups of {group}", allowed)
    return FP8 if kind == "float" else INT8


# -- KV cache ----------------------------------------------------------------------------------------


def _kv(decoder: Decoding, config: Mapping[str, Any]) -> str | None:
    """The format of the KV cache, or None if the config names none."""
    algorithm = config.get("kv_cache_quant_algo") or _inner(decoder, config).get("kv_cache_quant_algo")
    if algorithm is not None:
        if algorithm not in ("FP8", "INT8"):
            raise _refused(decoder, "kv_cache_quant_algo", algorithm, ("FP8", "INT8", None))
        return str(algorithm).lower()
    scheme = config.get("kv_cache_scheme")
    if not scheme:
        return None
    if not isinstance(scheme, dict):
        raise ModelError(f"{decoder.name}: {FIELD}.kv_cache_scheme is {shown(scheme)}; a mapping is needed")
    found = (scheme.get("num_bits", 8), scheme.get("type", "int"))
    if found not in ((8, "float"), (8, "int")):
        raise _refused(
            decoder, "kv_cache_scheme", f"{found[0]} bits, {found[1]}", ("8 bits, float", "8 bits, int")
        )
    return FP8 if found[1] == "float" else INT8


METHODS: Mapping[str, Callable[[Decoding, Mapping[str, Any]], dict[str, str]]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
}
