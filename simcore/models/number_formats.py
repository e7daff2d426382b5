"""The number formats of a run: from a profile's table, the scenario, or the model's checkpoint.

table of one model's op times    its own; nothing else is allowed beside it
scenario: dtype                  for all matrices and the KV cache
scenario: dtypes                 for single matrices, instead of what follows
config.json: quantization_config for the matrices that it names, and the KV cache
otherwise                        bf16
"""

from collections.abc import Mapping

from simcore.models.decoder import Dtypes
from simcore.models.decoder_config import DecoderConfig
from simcore.ops.op import MULTIPLIED_AS, WEIGHT_ONLY_BYTES

PLAIN = "bf16"
# Times: aiconfigurator's operator tables (Apache-2.0), H200, vLLM 0.19, product of 1 x 4096 x 4096.
BLOCKS = (
    "fp8 with scales of blocks is priced between fp8 and bf16; in small products engines may take longer than"
    " for bf16 (vLLM 0.19: 22 us, bf16 13 us, fp8 9 us)"
)


def number_formats(dtype: str | None, dtypes: Mapping[str, str], config: DecoderConfig) -> Dtypes:
    """The formats of a run whose scenario has `dtype` and `dtypes`."""
    quantized = config.quantization if dtype is None else None
    weights = dtype or PLAIN
    each = {**dict(quantized.formats if quantized else ()), **dtypes}
    # A KV cache has no weight groups, so formats with scales of groups do not apply to it.
    like_weights = PLAIN if weights in MULTIPLIED_AS else weights
    kv = each.pop("kv", (quantized and quantized.kv) or like_weights)
    return Dtypes(weights, kv, PLAIN, tuple(sorted(each.items())))


def format_warnings(dtype: str | None, dtypes: Mapping[str, str], config: DecoderConfig) -> list[str]:
    """Warnings: checkpoint formats that the scenario replaces, and notes on how the config was read."""
    texts = list(config.notes)
    quantized = config.quantization
    if quantized is None:
        if config.stored == "float32" and dtype is None:
            texts.append(
                "torch_dtype is float32: weights are taken as bf16, as serving engines load them;"
                " dtype: fp32 prices them as stored"
            )
        return [f"model {config.name}: {text}" for text in texts]
    used = number_formats(dtype, dtypes, config)
    if "fp8_b128" in dict(used.each).values():
        texts.append(BLOCKS)
    if dtype is not None:
        texts.append(f"dtype: {dtype} stands in the place of its quantization_config ({quantized.method})")
    else:
        replaced = sorted(matrix for matrix in dtypes if matrix in dict(quantized.formats))
        if replaced:
            texts.append(
                f"dtypes: {', '.join(replaced)} not as its quantization_config ({quantized.method}) says"
            )
    return [f"model {config.name}: {text}" for text in texts]


def format_notes(dtype: str | None, config: DecoderConfig) -> list[str]:
    """Notes for the reader on formats that come from the checkpoint."""
    quantized, texts = config.quantization, []
    if config.stored == "float16" and dtype is None:
        texts.append("its weights are float16, priced as bf16, which is as wide")
    if quantized is None or dtype is not None:
        return [f"model {config.name}: {text}" for text in texts]
    names: dict[str, list[str]] = {}
    for matrix, format_ in (*quantized.formats, *((("KV cache", quantized.kv),) if quantized.kv else ())):
        names.setdefault(format_, []).append(matrix)
    listed = "; ".join(f"{format_}: {', '.join(matrices)}" for format_, matrices in names.items())
    texts.append(
        f"number formats by its quantization_config ({quantized.method}): {listed}; all else {PLAIN}"
    )
    if any(format_ not in WEIGHT_ONLY_BYTES for _, format_ in quantized.formats):
        texts.append(
            "inputs of products of 8 bits have 8 bits too; what makes them so in an engine is priced where"
            " its host says quantizes"
        )
    return [f"model {config.name}: {text}" for text in texts]
