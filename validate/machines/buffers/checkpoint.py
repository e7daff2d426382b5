"""Reads the weights of a Llama from the safetensors beside its Hugging Face `config.json`.

    model.embed_tokens.weight  model.norm.weight  lm_head.weight (not with tied embeddings)
    model.layers.N.             self_attn.{q,k,v,o}_proj.weight  mlp.{gate,up,down}_proj.weight
                                input_layernorm.weight  post_attention_layernorm.weight

Matrices are stored [out, in] and transposed here. Hugging Face turns halves of a head against each other, as
`kernels.decoder.rotary` does, so that no rows change places. Every name and size is checked before the first
tensor is read: a tensor more or less would make another model of it.
"""

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simcore.input.files import InputError, plain, read_json, shown
from simcore.kernels.decoder.norm import EPS
from simcore.models.decoder_config import CONFIG, WEIGHTS, WEIGHTS_INDEX, DecoderConfig
from simcore.models.text_config import text_of
from simcore.validate.machines.buffers.rotary_frequencies import positive, read_frequencies
from simcore.validate.machines.buffers.whole_weights import Constants, Matrices, WholeWeights, layer_sizes

# Types whose weights have these names, and whose layers compute the same.
TYPES = ("llama", "mistral")
FORMATS = ("F64", "F32", "F16", "BF16")
MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
GAINS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
EMBEDDING, HEAD_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Old checkpoints hold what follows from the config.
PASSED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
LARGEST_INDEX = 1 << 26


def _name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}.weight"


def _outside_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of embedding, last norm and, unless it is the embedding, LM head, as stored."""
    table = config.vocab, config.hidden
    own = {} if config.tied_embeddings else {HEAD: table}
    return {EMBEDDING: table, HEAD_NORM: (config.hidden,), **own}


def _layer_shapes(config: DecoderConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a layer's tensors, as stored."""
    sizes = layer_sizes(config)
    found: dict[str, tuple[int, ...]] = {
        _name(layer, module): sizes[name][::-1] for name, module in MATRICES.items()
    }
    return found | {_name(layer, module): (config.hidden,) for module in GAINS.values()}


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Weights in files. `files`: the file of each tensor."""

    config: DecoderConfig
    files: Mapping[str, Path]
    device: torch.device | str
    constants: Constants

    def _read(self, name: str) -> Tensor:
        found: Tensor = _of(self.files[name], lambda file: file.get_tensor(name))
        return found.to(self.device)

    def outside(self) -> Matrices:
        table = self._read(EMBEDDING)
        head = table if self.config.tied_embeddings else self._read(HEAD)
        if self.config.tied_embeddings and HEAD in self.files and not torch.equal(self._read(HEAD), table):
            raise InputError(
                f"{self.files[HEAD]}: {HEAD} is not {EMBEDDING}, but {CONFIG} has tied embeddings"
            )
        return {"embedding": table, "head_norm": self._read(HEAD_NORM), "lm_head": head.T}

    def layer(self, number: int) -> Matrices:
        matrices = {name: self._read(_name(number, module)).T for name, module in MATRICES.items()}
        return matrices | {name: self._read(_name(number, module)) for name, module in GAINS.items()}


def read_checkpoint(config: DecoderConfig, device: torch.device | str) -> WholeWeights:
    """Returns the weights in the directory of a config, `config.weights`. Raises InputError, naming file and
    key or tensor, for those of another architecture, and where safetensors is not installed."""
    directory = config.weights
    assert directory is not None
    if config.linear is not None:
        raise InputError(f"{directory / CONFIG}: weights of models with states are not read")
    if importlib.util.find_spec("safetensors") is None:
        raise InputError(f"{directory}: needs safetensors: pip install 'simcore[kernels]'")
    given, _ = text_of(config.name, read_json(directory / CONFIG))
    constants = _constants(str(directory / CONFIG), given, config)
    source, files = _files(directory)
    _check_tensors(source, files, config, int(given["num_hidden_layers"]))
    return _Checkpoint(config, files, device, constants)


def _constants(where: str, given: Mapping[str, Any], config: DecoderConfig) -> Constants:
    """Returns the constants of a config. Raises InputError for a model that is not a Llama in full."""
    kind, act = given.get("model_type"), given.get("hidden_act", "silu")
    if kind not in TYPES:
        allowed = " and ".join(TYPES)
        raise InputError(f"{where}: model_type is {shown(kind)}; weights are read of {allowed}")
    if config.quantization is not None:
        raise InputError(f"{where}: quantization_config is set; weights are read that are not quantized")
    if act != "silu":
        raise InputError(f"{where}: hidden_act is {shown(act)}; with weights silu is computed")
    eps = positive(where, "rms_norm_eps", given.get("rms_norm_eps", EPS))
    return Constants(eps, read_frequencies(where, given, config.head_dim))


# -- files -------------------------------------------------------------------------------------------------


def _of(path: Path, read: Callable[[Any], Any]) -> Any:
    """Returns what is read from a file. Raises InputError for a file that is none of safetensors."""
    from safetensors import SafetensorError, safe_open  # noqa: PLC0415

    try:
        with safe_open(path, framework="pt") as file:
            return read(file)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read: {plain(error)}") from None


def _files(directory: Path) -> tuple[Path, dict[str, Path]]:
    """Returns the file that says which tensors there are, and the file of each."""
    whole, index = directory / WEIGHTS, directory / WEIGHTS_INDEX
    if whole.is_file():
        return whole, dict.fromkeys(_of(whole, lambda file: list(file.keys())), whole)
    document = read_json(index, LARGEST_INDEX)
    listed = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(listed, dict):
        raise InputError(f"{index}: weight_map is missing: a mapping from tensors to files")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index}: weight_map: {plain(name)} is in {shown(file)}; a file name is needed")
    return index, {name: directory / file for name, file in listed.items()}


def _check_tensors(source: Path, files: Mapping[str, Path], config: DecoderConfig, layers: int) -> None:
    """Raises InputError for a tensor that is missing, of another shape or format, or not this model's. The
    files hold `layers` layers, of which the first `config.layers` are read."""
    wanted = _outside_shapes(config)
    for layer in range(layers):
        wanted |= _layer_shapes(config, layer)
    allowed = {*wanted, HEAD}
    for name in files:
        if name not in allowed and not PASSED.fullmatch(name):
            raise InputError(f"{source}: {plain(name)} is no tensor of the model that {CONFIG} describes")
    for name in wanted:
        if name not in files:
            raise InputError(f"{source}: {name} is missing")
    for path in {*files.values()}:
        own = {name: shape for name, shape in wanted.items() if files[name] == path}
        _of(path, partial(_check_file, path, own))


def _check_file(path: Path, wanted: Mapping[str, tuple[int, ...]], file: Any) -> None:
    held = {*file.keys()}
    for name, shape in wanted.items():
        if name not in held:
            raise InputError(f"{path}: {name} is missing")
        found = file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise InputError(f"{path}: {name} is {found.get_shape()}; {list(shape)} is needed")
        if found.get_dtype() not in FORMATS:
            raise InputError(
                f"{path}: {name} is {found.get_dtype()}; with weights {', '.join(FORMATS)} are read"
            )
