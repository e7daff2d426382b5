"""Models as functions from shapes to graphs: a decoder, sharded over tensor-parallel ranks.

One decoder layer, per rank of n (batch b, hidden h, heads and intermediate width divided by n):

    before    norm, qkv projection, rotary embedding, KV append
    attention one query token a sequence over the cached context
    after     output projection, residual, norm, MLP, residual

and outside the layers: embedding before the first, norm, LM head and greedy choice after the last.
`style` says how the ranks put their partial results together:

    all_reduce      Megatron: the sum after the output projection and after the MLP
    scatter_gather  reduce-scatter where Megatron reduces, all-gather before the next norm
    fused_gather    as scatter_gather, but heads are gathered inside the output projection

With all_reduce the logits are gathered before the choice; with the others each rank chooses in its slice of
the vocabulary, and the exchange of the winners is left out, as in the tables that these styles come from.

What differs between accelerators' software (fused gate and up projections with all_reduce, separate
ones otherwise) follows the style too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from simcore import ops
from simcore.ops import DTYPE_BYTES, Graph, Op, Publication, Size

Style = Literal["all_reduce", "scatter_gather", "fused_gather"]
STYLES: tuple[Style, ...] = ("all_reduce", "scatter_gather", "fused_gather")
CONTEXT = Size("context")
TENSOR = "tensor"
GROUP = "group"
SPECULATED = "speculated"


class ModelError(ValueError):
    """A model configuration that cannot be used; the message says which field, and why."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only transformer. `gated`: the MLP has gate and up projections; `parallel_residual`:
    attention and MLP read the same norm and are added together (GPT-J); `qk_norm`: q and k of every head
    are normed (Qwen3)."""

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

    @property
    def layer_weights(self) -> dict[str, int]:
        """Elements of each weight matrix of one layer."""
        up = 2 if self.gated else 1
        return {
            "qkv": self.hidden * (self.q_heads + 2 * self.kv_heads) * self.head_dim,
            "o": self.q_heads * self.head_dim * self.hidden,
            "gate_up": up * self.hidden * self.intermediate,
            "down": self.intermediate * self.hidden,
        }

    @property
    def parameters(self) -> int:
        """Weights in all, norms left out."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * sum(self.layer_weights.values()) + embeddings


# Our field -> the keys under which Hugging Face configs hold it (GPT-J keeps the names of GPT-2).
_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "layers": ("num_hidden_layers", "n_layer"),
    "q_heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
# What is modelled. Anything else would be priced as a Llama without a word.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gptj")
# Attention and MLP side by side, MLP without a gate.
_PARALLEL = ("gptj",)
_QK_NORM = ("qwen3",)
_REFUSED: Mapping[str, str] = {
    "num_local_experts": "mixtures of experts",
    "num_experts": "mixtures of experts",
    "n_routed_experts": "mixtures of experts",
    "kv_lora_rank": "latent attention",
    "sliding_window": "windowed attention",
}


def config_from_hugging_face(name: str, config: Mapping[str, Any]) -> DecoderConfig:
    """Reads a Hugging Face `config.json`.

    As there, missing num_key_value_heads means as many as heads, missing head_dim hidden/heads, and GPT-J's
    missing n_inner four times n_embd. Raises ModelError, naming the key.
    """
    _check_kind(name, config)
    found = {field_: _integer(name, config, keys) for field_, keys in _KEYS.items()}
    hidden, heads = found["hidden"], found["q_heads"]
    kv_heads = _integer(name, config, ("num_key_value_heads",), heads)
    head_dim = _integer(name, config, ("head_dim",), hidden // heads)
    if "head_dim" not in config and hidden % heads:
        raise ModelError(
            f"{name}: head_dim is missing, and hidden_size {hidden} does not divide by {heads} heads"
        )
    if heads % kv_heads:
        raise ModelError(
            f"{name}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}"
        )
    parallel = config.get("model_type") in _PARALLEL
    four_times = 4 * hidden if parallel else None
    return DecoderConfig(
        name=name,
        intermediate=_integer(name, config, ("intermediate_size", "n_inner"), four_times),
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied_embeddings=_tied(name, config),
        gated=not parallel,
        parallel_residual=parallel,
        qk_norm=config["model_type"] in _QK_NORM,
        **found,
    )


def _tied(name: str, config: Mapping[str, Any]) -> bool:
    tied = config.get("tie_word_embeddings", True)
    if not isinstance(tied, bool):
        raise ModelError(f"{name}: tie_word_embeddings is {tied!r} (allowed: true, false)")
    return tied


def _check_kind(name: str, config: Mapping[str, Any]) -> None:
    for key, what in _REFUSED.items():
        # Qwen2 names a window even where it is switched off.
        off = key == "sliding_window" and config.get("use_sliding_window") is False
        if config.get(key) and not off:
            raise ModelError(f"{name}: {key} is set, but {what} cannot be modelled yet")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise ModelError(f"{name}: model_type is {kind!r} (allowed: {', '.join(MODEL_TYPES)})")


def _integer(name: str, config: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int:
    value = next((config[key] for key in keys if config.get(key) is not None), default)
    if value is None:
        raise ModelError(f"{name}: {' or '.join(keys)} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{name}: {keys[0]} is {value!r}; a whole number from 1 is needed")
    return value


def load_config(path: Path) -> DecoderConfig:
    """Reads a model file. Raises ModelError where it is missing or no JSON object."""
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is no JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: holds no JSON object")
    try:
        return config_from_hugging_face(path.stem, config)
    except ModelError as error:
        raise ModelError(f"{path.name}: {str(error).removeprefix(f'{path.stem}: ')}") from None


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Number formats: of the weights (`weights`, or one by one), of the KV cache, of activations."""

    weights: str = "bf16"
    kv: str = "bf16"
    activation: str = "bf16"
    each: tuple[tuple[str, str], ...] = ()

    def of(self, matrix: str) -> str:
        """Format of one weight matrix: qkv, o, gate, up, down, lm_head, embedding."""
        return dict(self.each).get(matrix, self.weights)


def why_not(config: DecoderConfig, ranks: int) -> str | None:
    """Why a model cannot be sharded over `ranks`, or None where it can.

    Heads and MLP columns must divide evenly; KV heads do too, or are replicated where ranks exceed them.
    """
    if config.q_heads % ranks:
        return f"{config.name} has {config.q_heads} heads, which {ranks} ranks do not divide"
    if max(config.kv_heads, ranks) % min(config.kv_heads, ranks):
        kv = config.kv_heads
        return f"{config.name} has {kv} KV heads, which can be neither split nor repeated over {ranks} ranks"
    if config.intermediate % ranks:
        return f"{config.name} has {config.intermediate} MLP columns, which {ranks} ranks do not divide"
    if config.hidden % ranks:
        return f"{config.name} has hidden size {config.hidden}, which {ranks} ranks do not divide"
    return None


@dataclass(frozen=True)
class Decoder:
    """One rank's share of a decoder at a batch size; its graphs are made once.

    `parts`: the layer is priced as attention and one non-attention part, as published per-layer
    measurements give it; all of the latter then stands after attention.
    Raises ModelError where the model cannot be sharded over `ranks`.
    """

    config: DecoderConfig
    ranks: int = 1
    batch: int = 1
    dtypes: Dtypes = field(default_factory=Dtypes)
    style: Style = "all_reduce"
    chunk: int = 128
    parts: bool = False

    def __post_init__(self) -> None:
        if reason := why_not(self.config, self.ranks):
            raise ModelError(reason)

    # -- graphs --------------------------------------------------------------------------------------

    @cached_property
    def embed(self) -> Graph:
        """The embedding of the tokens: [batch, hidden]."""
        return Graph("embed", () if self.parts else (self._embedding(),))

    @cached_property
    def before(self) -> Graph:
        """A layer up to its attention."""
        return Graph("before", () if self.parts else self._before())

    @cached_property
    def attend(self) -> Graph:
        """Exact attention."""
        return Graph("attend", (self._attention(),))

    @cached_property
    def speculate(self) -> Graph:
        """Speculative attention: publishes the early part, finishes exactly, verifies."""
        return self._speculate("speculate", self._attended)

    @cached_property
    def speculate_ahead(self) -> Graph:
        """The same for a group that has met no other before: residual stream, K and V of the layer go with
        the early part."""
        return self._speculate("speculate_ahead", self._attended + self._residual_and_kv)

    def _speculate(self, name: str, elements: int) -> Graph:
        attention = ops.speculative_attention(chunk=self.chunk, **self._attention_arguments())
        # Two squared norms a sequence; each rank has those of its own heads.
        verify = self._meet(ops.all_reduce, "verify_reduce", 2 * self.batch, "fp32")
        hop = ops.put("speculated", elements=elements, axis=GROUP, dtype=self.dtypes.activation)
        return Graph(name, (attention, *verify), (Publication(SPECULATED, 0, hop),))

    @cached_property
    def receive(self) -> Graph:
        """Takes the speculated attention output of another group as this rank's x."""
        width = self._attended // self.batch
        op = ops.receive_speculation(tokens=self.batch, width=width, dtype=self.dtypes.activation)
        return Graph("receive", (op,))

    @cached_property
    def after(self) -> Graph:
        """A layer from its attention's output on."""
        if self.parts:
            return Graph("after", (self._whole("non_attention", (*self._before(), *self._after())),))
        return Graph("after", self._after())

    @cached_property
    def head(self) -> Graph:
        """Final norm, LM head and greedy choice; with `parts`, everything outside the layers as one."""
        if self.parts:
            return Graph("head", (self._whole("outside_layers", (self._embedding(), *self._head())),))
        return Graph("head", self._head())

    @cached_property
    def between(self) -> Graph:
        """From one attention's output to the next layer's attention, captured as one."""
        return self.after + self.before

    @cached_property
    def first(self) -> Graph:
        """From the token to the first layer's attention."""
        return self.embed + self.before

    @cached_property
    def last(self) -> Graph:
        """From the last attention's output to the next token."""
        return self.after + self.head

    @cached_property
    def token_step(self) -> Graph:
        """A whole token: everything in one captured graph."""
        step = self.embed
        for _ in range(self.config.layers):
            step = step + self.before + self.attend + self.after
        return replace(step + self.head, name="token_step")

    def exchange(self, groups: int) -> Graph:
        """All-gather of priorities between the groups of a speculation, with the residual stream and the
        layer's new K and V, which a group that idled has not computed."""
        op = ops.exchange_priority(
            elements=self._residual_and_kv, ranks=groups, axis=GROUP, dtype=self.dtypes.activation
        )
        return Graph("exchange", (op,))

    # -- memory --------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Device memory that one rank's weights take: its slice of each matrix, the embedding whole (its
        lookup is not split), KV heads that are repeated over ranks on each."""
        config, hidden = self.config, self.config.hidden
        columns = config.intermediate // self.ranks
        heads = (self._q_heads + 2 * self._kv_heads) * config.head_dim
        layer = {
            "qkv": hidden * heads,
            "o": self._q_heads * config.head_dim * hidden,
            "gate": hidden * columns if config.gated else 0,
            "up": hidden * columns,
            "down": columns * hidden,
        }
        outside = {"embedding": config.vocab * hidden}
        if not config.tied_embeddings:
            outside["lm_head"] = math.ceil(config.vocab / self.ranks) * hidden
        return config.layers * self._bytes(layer) + self._bytes(outside)

    def _bytes(self, elements: Mapping[str, int]) -> float:
        return sum(count * DTYPE_BYTES[self.dtypes.of(name)] for name, count in elements.items())

    def kv_bytes(self, context: int) -> float:
        """Device memory that one rank's KV cache takes at a context length."""
        per_token = 2.0 * self._kv_heads * self.config.head_dim * DTYPE_BYTES[self.dtypes.kv]
        return per_token * self.config.layers * self.batch * context

    # -- ops -----------------------------------------------------------------------------------------

    @property
    def _q_heads(self) -> int:
        return self.config.q_heads // self.ranks

    @property
    def _kv_heads(self) -> int:
        return max(1, self.config.kv_heads // self.ranks)

    @property
    def _scattered(self) -> bool:
        return self.style != "all_reduce"

    @property
    def _attended(self) -> int:
        """Elements of one rank's attention output."""
        return self.batch * self._q_heads * self.config.head_dim

    @property
    def _residual_and_kv(self) -> int:
        """Elements of one rank's residual stream and of its new K and V of one layer."""
        width = self.config.hidden // self.ranks if self._scattered else self.config.hidden
        return self.batch * (width + 2 * self._kv_heads * self.config.head_dim)

    def _meet(self, kind: Any, name: str, elements: int, dtype: str | None = None) -> tuple[Op, ...]:
        """A collective over the tensor axis, or nothing on one rank."""
        if self.ranks == 1:
            return ()
        dtype = dtype or self.dtypes.activation
        return (kind(name, elements=elements, ranks=self.ranks, axis=TENSOR, dtype=dtype),)

    def _gather(self, name: str) -> tuple[Op, ...]:
        return self._meet(ops.all_gather, name, self.batch * self.config.hidden) if self._scattered else ()

    def _reduce(self, block: str) -> tuple[Op, ...]:
        elements = self.batch * self.config.hidden
        if self._scattered:
            return self._meet(ops.reduce_scatter, f"{block}_scatter", elements)
        return self._meet(ops.all_reduce, f"{block}_reduce", elements)

    def _whole(self, name: str, parts: tuple[Op, ...]) -> Op:
        # Published times of it differ between contexts: the op reads the context, its work does not.
        whole = ops.fuse(name, name, parts)
        return replace(whole, shape=(*whole.shape, ("context", CONTEXT)))

    def _norm(self, name: str) -> Op:
        return ops.norm(name, tokens=self.batch, hidden=self.config.hidden, dtype=self.dtypes.activation)

    def _matmul(self, name: str, n: int, k: int) -> Op:
        return ops.matmul(name, m=self.batch, n=n, k=k, dtype=self.dtypes.of(name))

    def _residual(self, name: str) -> Op:
        width = self.config.hidden // self.ranks if self._scattered else self.config.hidden
        return ops.residual(name, tokens=self.batch, hidden=width, dtype=self.dtypes.activation)

    def _embedding(self) -> Op:
        return ops.embedding(tokens=self.batch, hidden=self.config.hidden, dtype=self.dtypes.of("embedding"))

    def _attention_arguments(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "q_heads": self._q_heads,
            "kv_heads": self._kv_heads,
            "head_dim": self.config.head_dim,
            "context": CONTEXT,
            "dtype": self.dtypes.kv,
        }

    def _attention(self) -> Op:
        return ops.decode_attention(**self._attention_arguments())

    def _before(self) -> tuple[Op, ...]:
        config, heads = self.config, {"q_heads": self._q_heads, "kv_heads": self._kv_heads}
        width = (self._q_heads + 2 * self._kv_heads) * config.head_dim
        act = self.dtypes.activation
        return (
            *self._gather("attn_gather"),
            self._norm("attn_norm"),
            self._matmul("qkv", width, config.hidden),
            *self._qk_norm(),
            ops.rotary(tokens=self.batch, head_dim=config.head_dim, dtype=act, **heads),
            ops.kv_append(
                tokens=self.batch, kv_heads=self._kv_heads, head_dim=config.head_dim, dtype=self.dtypes.kv
            ),
        )

    def _qk_norm(self) -> tuple[Op, ...]:
        if not self.config.qk_norm:
            return ()
        rows = self.batch * (self._q_heads + self._kv_heads)
        return (ops.norm("qk_norm", tokens=rows, hidden=self.config.head_dim, dtype=self.dtypes.activation),)

    def _after(self) -> tuple[Op, ...]:
        if self.config.parallel_residual:
            return (*self._output(), *self._mlp(), *self._reduce("layer"), self._residual("layer_residual"))
        return (
            *self._output(),
            *(() if self.style == "fused_gather" and self.ranks > 1 else self._reduce("attn")),
            self._residual("attn_residual"),
            *self._gather("mlp_gather"),
            self._norm("mlp_norm"),
            *self._mlp(),
            *self._reduce("mlp"),
            self._residual("mlp_residual"),
        )

    def _output(self) -> tuple[Op, ...]:
        config = self.config
        if self.style != "fused_gather" or self.ranks == 1:
            return (self._matmul("o", config.hidden, self._q_heads * config.head_dim),)
        width = config.q_heads * config.head_dim
        heads = self._meet(ops.all_gather, "heads_gather", self.batch * width)
        columns = self._matmul("o", config.hidden // self.ranks, width)
        return (ops.fuse("all_gather_matmul", "o_fused", (*heads, columns)),)

    def _mlp(self) -> tuple[Op, ...]:
        config = self.config
        width = config.intermediate // self.ranks
        inputs: tuple[Op, ...]
        if not config.gated:
            inputs = (self._matmul("up", width, config.hidden),)
        elif self._scattered or self.dtypes.of("gate") != self.dtypes.of("up"):
            inputs = tuple(self._matmul(name, width, config.hidden) for name in ("gate", "up"))
        else:
            both = ops.matmul(
                "gate_up", m=self.batch, n=2 * width, k=config.hidden, dtype=self.dtypes.of("gate")
            )
            inputs = (both,)
        act = ops.activation(tokens=self.batch, width=width, gated=config.gated, dtype=self.dtypes.activation)
        return (*inputs, act, self._matmul("down", config.hidden, width))

    def _head(self) -> tuple[Op, ...]:
        vocab = math.ceil(self.config.vocab / self.ranks)
        gathered: tuple[Op, ...] = ()
        if not self._scattered:
            gathered = self._meet(ops.all_gather, "logits_gather", self.batch * vocab * self.ranks)
        seen = vocab * self.ranks if gathered else vocab
        return (
            *self._gather("head_gather"),
            self._norm("head_norm"),
            self._matmul("lm_head", vocab, self.config.hidden),
            *gathered,
            ops.sample(tokens=self.batch, vocab=seen, dtype=self.dtypes.activation),
        )
