"""A decoder, sharded over tensor-parallel ranks, as functions from shapes to graphs.

One decoder layer on each of n ranks (heads and intermediate width divided by n):

    before    norm, qkv projection, rotary embedding, KV append
    attention one query token per sequence over the cached context
    after     output projection, residual, norm, MLP, residual

of linear attention (`simcore.models.mixers`; heads are divided too)

    before    norm, projection of q, k, v and gate, rotary embedding or silu of q and k
    attention one token of each sequence into its state and out of it
    after     norm of the outputs, gate, output projection, residual, norm, MLP, residual

and outside the layers: embedding before the first, norm, LM head and greedy choice after the last.
`style` says how the ranks combine their partial results:

    all_reduce      Megatron: the sum after the output projection and after the MLP
    scatter_gather  reduce-scatter where Megatron reduces, all-gather before the next norm
    fused_gather    as scatter_gather, but heads are gathered inside the output projection

With all_reduce the logits are gathered before the choice; with the others each rank chooses in its slice of
the vocabulary, and the exchange of the winners is left out, as in the tables that these styles come from.

The style also decides what differs between accelerators' software: the gate and up projections are fused with
all_reduce and separate otherwise.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from simcore.models.decoder_config import DecoderConfig, ModelError
from simcore.models.mixers import FULL, LRPE, SLIDING, STATEFUL, LinearMixer
from simcore.ops import linear_layer
from simcore.ops import op as ops
from simcore.ops.op import DTYPE_BYTES, Dim, Graph, Op, Publication, Size, multiplied_as

Style = Literal["all_reduce", "scatter_gather", "fused_gather"]
# Matrices of a layer, and all that are multiplied.
LAYER = ("qkv", "o", "gate", "up", "down")
MATRICES = (*LAYER, "lm_head")
# A layer's products, as engines launch them.
Quantized = Literal["qkv", "o", "gate_up", "down"]
# Formats whose products have inputs of 8 bits; these take as long to make in one as in another.
OF_8_BITS = frozenset(name for name in DTYPE_BYTES if multiplied_as(name) in ("fp8", "int8"))
MADE_AS = "fp8"
STYLES: tuple[Style, ...] = ("all_reduce", "scatter_gather", "fused_gather")
CONTEXT = Size("context")
TENSOR = "tensor"
GROUP = "group"
NORMED_SUM = ("all_reduce", "residual", "norm")
# Of more rows its programs take several each, and from 64 on three launches are faster (two H200).
MOST_NORMED_ROWS = 16
SPECULATED = "speculated"


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Number formats of the weights (`weights`; `each`: by matrix), the KV cache and the activations."""

    weights: str = "bf16"
    kv: str = "bf16"
    activation: str = "bf16"
    each: tuple[tuple[str, str], ...] = ()

    def of(self, matrix: str) -> str:
        """The format of one weight matrix: qkv, o, gate, up, down, lm_head, embedding."""
        return dict(self.each).get(matrix, self.weights)

    def multiplied(self, rates: Collection[str]) -> "Dtypes":
        """These where a device multiplies formats at `rates`: weights in others are read as they are and
        multiplied as activations."""

        def here(name: str) -> str:
            return name if multiplied_as(name) in rates else self.activation

        return replace(
            self, weights=here(self.weights), each=tuple((key, here(name)) for key, name in self.each)
        )


def quantized_of(dtypes: Dtypes, names: Iterable[Quantized]) -> tuple[Quantized, ...]:
    """Those of some products whose inputs have 8 bits."""
    matrices = {"gate_up": ("gate", "up")}
    return tuple(
        name for name in names if OF_8_BITS.intersection(map(dtypes.of, matrices.get(name, (name,))))
    )


def why_not(config: DecoderConfig, ranks: int) -> str | None:
    """Why a model cannot be sharded over `ranks`, or None if it can.

    Heads, MLP columns and the hidden size must divide evenly; KV heads too, unless there are fewer KV heads
    than ranks: then they are replicated evenly.
    """
    if config.q_heads % ranks:
        return f"{config.name} has {config.q_heads} heads, which {ranks} ranks do not divide"
    if config.linear and (reason := _why_not_linear(config.name, config.linear, ranks)):
        return reason
    if max(config.kv_heads, ranks) % min(config.kv_heads, ranks):
        kv = config.kv_heads
        return f"{config.name} has {kv} KV heads, which can be neither split nor repeated over {ranks} ranks"
    if config.intermediate % ranks:
        return f"{config.name} has {config.intermediate} MLP columns, which {ranks} ranks do not divide"
    if config.hidden % ranks:
        return f"{config.name} has hidden size {config.hidden}, which {ranks} ranks do not divide"
    return None


def _why_not_linear(name: str, linear: LinearMixer, ranks: int) -> str | None:
    if linear.norm == "layer" and ranks > 1:
        return f"{name} norms the outputs of all heads at once, which {ranks} ranks do not"
    if linear.heads % ranks or linear.kv_heads % ranks:
        return f"{name} has {linear.kv_heads} KV heads with a state, which {ranks} ranks do not divide"
    return None


@dataclass(frozen=True)
class Decoder:
    """One rank's share of a decoder at a batch size; its graphs are made once.

    `parts`: a layer is priced as attention and one non-attention part, as published per-layer measurements
    give it; the whole non-attention part then comes after attention. `outside`: with embedding, last norm, LM
    head and greedy choice; without it layers alone, residual stream in and out. `quantized`: products whose
    inputs, if they are of 8 bits, a kernel of its own makes so; those of others the op before does, and
    always those of an `o` that gathers heads itself (fused_gather). `normed_sums`: a sum over ranks takes the
    residual and the norm behind it along, where one graph has all three (`joins_sums`).
    Raises ModelError if the model cannot be sharded over `ranks`. Of a hybrid, whose layers differ, `layer`
    and `token_step` are the graphs; those of one layer for all (`before`, `attend`, `after` and what holds
    them) raise ModelError.
    """

    config: DecoderConfig
    ranks: int = 1
    batch: Dim = 1
    dtypes: Dtypes = field(default_factory=Dtypes)
    style: Style = "all_reduce"
    chunk: int = 128
    parts: bool = False
    outside: bool = True
    quantized: tuple[Quantized, ...] = ()
    normed_sums: bool = False

    def __post_init__(self) -> None:
        if reason := why_not(self.config, self.ranks):
            raise ModelError(reason)

    @staticmethod
    def device_sizes(graph: Graph) -> frozenset[str]:
        """The sizes that kernels of a graph read in the device's memory, so that one captured graph serves
        all their values."""
        return graph.needs & {CONTEXT.name}

    # -- graphs --------------------------------------------------------------------------------------

    @cached_property
    def embed(self) -> Graph:
        """The embedding of the tokens: [batch, hidden]."""
        return Graph("embed", () if self.parts or not self.outside else (self._embedding(),))

    @cached_property
    def before(self) -> Graph:
        """A layer until its attention."""
        return Graph("before", () if self.parts else self._before(self._mixer))

    @cached_property
    def attend(self) -> Graph:
        """Exact attention."""
        return Graph("attend", (self._mixing(self._mixer),))

    @cached_property
    def speculate(self) -> Graph:
        """Speculative attention: publishes the early part, finishes exactly, verifies."""
        return self._speculate("speculate", self._attended)

    @cached_property
    def speculate_ahead(self) -> Graph:
        """Speculative attention without an exchange before it: the residual stream and the layer's K and V go
        with the early part."""
        return self._speculate("speculate_ahead", self._attended + self._residual_and_kv)

    def _speculate(self, name: str, elements: int) -> Graph:
        attention = ops.speculative_attention(chunk=self.chunk, **self._attention_arguments())
        # Two squared norms per sequence, summed over the ranks' heads.
        verify = self._meet(ops.all_reduce, "verify_reduce", 2 * self._sequences, "fp32")
        hop = ops.put("speculated", elements=elements, axis=GROUP, dtype=self.dtypes.activation)
        return Graph(name, (attention, *verify), (Publication(SPECULATED, 0, hop),))

    @cached_property
    def receive(self) -> Graph:
        """Receives the speculated attention output of another group as this rank's x."""
        width = self._q_heads * self.config.head_dim
        op = ops.receive_speculation(tokens=self.batch, width=width, dtype=self.dtypes.activation)
        return Graph("receive", (op,))

    @cached_property
    def after(self) -> Graph:
        """A layer after its attention."""
        mixer = self._mixer
        if self.parts:
            layer = (*self._before(mixer), *self._after(mixer))
            return Graph("after", (self._whole("non_attention", layer),))
        return self._joined(Graph("after", self._after(mixer)))

    @cached_property
    def head(self) -> Graph:
        """Final norm, LM head and greedy choice; with `parts`, all ops outside the layers as one."""
        if not self.outside:
            return Graph("head", ())
        if self.parts:
            return Graph("head", (self._whole("outside_layers", (self._embedding(), *self._head())),))
        return Graph("head", self._head())

    @cached_property
    def between(self) -> Graph:
        """From one attention's output to the next layer's attention, captured as one graph."""
        return self._joined(self.after + self.before)

    @cached_property
    def first(self) -> Graph:
        """From the token to the first layer's attention."""
        return self.embed + self.before

    @cached_property
    def last(self) -> Graph:
        """From the last attention's output to the next token."""
        return self._joined(self.after + self.head)

    @cached_property
    def token_step(self) -> Graph:
        """A whole token in one captured graph."""
        if self.parts:
            step = self.embed
            for _ in range(self.config.layers):
                step = step + self.before + self.attend + self.after
            return replace(step + self.head, name="token_step")
        layers = {mixer: self.layer(mixer) for mixer in {*self.config.layer_mixers}}
        whole = [op for mixer in self.config.layer_mixers for op in layers[mixer]]
        # Positions are of the context, also where nothing attends over it: it is no part of a price.
        first = tuple(ops.placed(op, position=CONTEXT) for op in self.embed.ops)
        begin = self.embed.ops if self.config.attention_layers else first
        return self._joined(Graph("token_step", (*begin, *whole, *self.head.ops)))

    @property
    def joins_sums(self) -> bool:
        """Whether sums take residual and norm along: of few rows, where there are kernels for it."""
        return self.normed_sums and isinstance(self.batch, int) and self.batch <= MOST_NORMED_ROWS

    def _joined(self, graph: Graph) -> Graph:
        """A graph in which sums take residual and norm along, if they do."""
        if not self.joins_sums:
            return graph
        # Layers repeat the same few objects, and so they do here.
        made: dict[tuple[int, ...], Op] = {}
        ops_, at = list[Op](), 0
        while at < len(graph.ops):
            three = graph.ops[at : at + 3]
            if tuple([op.kind for op in three]) != NORMED_SUM:
                ops_.append(graph.ops[at])
                at += 1
                continue
            key = tuple(map(id, three))
            if key not in made:
                made[key] = ops.all_reduce_normed((three[0], three[1], three[2]))
            ops_.append(made[key])
            at += len(NORMED_SUM)
        return replace(graph, ops=tuple(ops_))

    def layer(self, mixer: str, mixing: tuple[Op, ...] | None = None) -> tuple[Op, ...]:
        """The ops of a layer with such a mixer; `mixing` takes the place of its attention's op."""
        own = (self._mixing(mixer),) if mixing is None else mixing
        return (*self._before(mixer), *own, *self._after(mixer))

    @property
    def _mixer(self) -> str:
        """The mixer of all layers. Raises ModelError if they differ."""
        mixers = {*self.config.layer_mixers}
        if len(mixers) != 1:
            raise ModelError(f"{self.config.name}: its layers differ; only token_step has them all")
        return mixers.pop()

    def exchange(self, groups: int) -> Graph:
        """All-gather of priorities between the groups of a speculation, with the residual stream and the
        layer's new K and V, which an idle group has not computed."""
        found = self._exchanges.get(groups)
        if found is None:
            found = self._exchanges[groups] = self._exchange(groups)
        return found

    @cached_property
    def _exchanges(self) -> dict[int, Graph]:
        return {}

    def _exchange(self, groups: int) -> Graph:
        op = ops.exchange_priority(
            elements=self._residual_and_kv, ranks=groups, axis=GROUP, dtype=self.dtypes.activation
        )
        return Graph("exchange", (op,))

    # -- memory --------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of device memory for one rank's weights: its slice of each matrix, the whole embedding (the
        lookup is not split), and its copy of KV heads that are replicated."""
        config, hidden = self.config, self.config.hidden
        columns = config.intermediate // self.ranks
        layers = 0.0
        for mixer in config.layer_mixers:
            projected, heads = self._widths(mixer)
            matrices = {
                "qkv": hidden * projected,
                "o": heads * hidden,
                "gate": hidden * columns if config.gated else 0,
                "up": hidden * columns,
                "down": columns * hidden,
            }
            layers += self._bytes(matrices)
        outside = {"embedding": config.vocab * hidden} if self.outside else {}
        if self.outside and not config.tied_embeddings:
            outside["lm_head"] = math.ceil(config.vocab / self.ranks) * hidden
        return layers + self._bytes(outside)

    def read_bytes(self, context: int) -> float:
        """The least bytes that one rank reads for a token: its weights, its KV cache and its states once,
        without the embedding, which is only looked up, but with the LM head's share of it if both are one
        table."""
        config = self.config
        looked_up = self._bytes({"embedding": config.vocab * config.hidden}) if self.outside else 0.0
        head = {"embedding": math.ceil(config.vocab / self.ranks) * config.hidden}
        tied = self._bytes(head) if self.outside and config.tied_embeddings else 0.0
        return self.weight_bytes - looked_up + tied + self.kv_bytes(context) + self.state_bytes

    def _bytes(self, elements: Mapping[str, int]) -> float:
        return sum(count * DTYPE_BYTES[self.dtypes.of(name)] for name, count in elements.items())

    @property
    def kv_width(self) -> int:
        """Elements that one rank caches per token, in all layers that attend over the whole context."""
        return 2 * self._kv_heads * self.config.head_dim * self.config.attention_layers

    def kv_bytes(self, context: int) -> float:
        """Bytes of device memory for one rank's KV cache at a context length."""
        of_token = 2 * self._kv_heads * self.config.head_dim * DTYPE_BYTES[self.dtypes.kv]
        return of_token * self._sequences * self.config.cached_tokens(context)

    @property
    def state_bytes(self) -> float:
        """Bytes of device memory for one rank's states of linear attention, at any context."""
        return self.config.state_bytes / self.ranks * self._sequences

    # -- ops -----------------------------------------------------------------------------------------

    @property
    def _q_heads(self) -> int:
        return self.config.q_heads // self.ranks

    @property
    def _kv_heads(self) -> int:
        return max(1, self.config.kv_heads // self.ranks)

    @property
    def _sequences(self) -> int:
        """The batch as a number, because speculation is captured for one batch size. Raises ModelError if it
        is a run-time size."""
        if isinstance(self.batch, Size):
            raise ModelError(f"{self.config.name}: speculation needs a batch that is a number")
        return self.batch

    @property
    def _scattered(self) -> bool:
        return self.style != "all_reduce"

    @property
    def _attended(self) -> int:
        """Elements of one rank's attention output."""
        return self._sequences * self._q_heads * self.config.head_dim

    @property
    def _residual_and_kv(self) -> int:
        """Elements of one rank's residual stream and of its new K and V in one layer."""
        width = self.config.hidden // self.ranks if self._scattered else self.config.hidden
        return self._sequences * (width + 2 * self._kv_heads * self.config.head_dim)

    def _meet(self, kind: Any, name: str, elements: Dim, dtype: str | None = None) -> tuple[Op, ...]:
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
        # Published times differ between contexts, so the op has the context in its shape; its work does not
        # depend on it.
        whole = ops.fuse(name, name, parts)
        return replace(whole, shape=(*whole.shape, ("context", CONTEXT)))

    def _norm(self, name: str) -> Op:
        return ops.norm(name, tokens=self.batch, hidden=self.config.hidden, dtype=self.dtypes.activation)

    def _matmul(self, name: str, n: int, k: int) -> Op:
        return ops.matmul(name, m=self.batch, n=n, k=k, dtype=self.dtypes.of(name))

    def _product(self, name: Quantized, n: int, k: int) -> tuple[Op, ...]:
        """A product of a layer, and before it what makes its inputs 8 bits, if a kernel of its own does."""
        return (*self._quantize(name, k), self._matmul(name, n, k))

    def _quantize(self, name: Quantized, width: int) -> tuple[Op, ...]:
        if name not in quantized_of(self.dtypes, self.quantized):
            return ()
        return (ops.quantize(f"{name}_inputs", tokens=self.batch, width=width, dtype=MADE_AS),)

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

    def _widths(self, mixer: str) -> tuple[int, int]:
        """Columns that a layer's input is projected to, and that its mixer gives, on one rank."""
        linear = self.config.linear
        if mixer in STATEFUL and linear is not None:
            return linear.projected // self.ranks, linear.heads * linear.value_dim // self.ranks
        d = self.config.head_dim
        return (self._q_heads + 2 * self._kv_heads) * d, self._q_heads * d

    @property
    def _linear(self) -> LinearMixer:
        """The linear attention of the layers that have it, with one rank's heads."""
        linear = self.config.linear
        if linear is None:
            raise ModelError(f"{self.config.name}: names no linear attention for its layers")
        return replace(linear, heads=linear.heads // self.ranks, kv_heads=linear.kv_heads // self.ranks)

    def linear_shape(self, mixer: str) -> dict[str, int]:
        """Heads, rank and dim of one rank's states in a layer with such a mixer."""
        own = self._linear
        return {"heads": own.heads, "rank": own.rank(mixer), "dim": own.value_dim}

    def _mixing(self, mixer: str) -> Op:
        if mixer == FULL:
            return self._attention()
        if mixer == SLIDING:
            window = Size(CONTEXT.name, most=self.config.window)
            return ops.decode_attention(**{**self._attention_arguments(), "context": window})
        return linear_layer.linear_attention_decode(
            batch=self.batch, dtype=self.dtypes.activation, **self.linear_shape(mixer)
        )

    def _linear_inputs(self, mixer: str) -> tuple[Op, ...]:
        """What is done to q and k before they meet the state."""
        own, act = self._linear, self.dtypes.activation
        if own.inputs == "rotary":
            heads = {"q_heads": own.heads, "kv_heads": own.kv_heads}
            return (ops.rotary(tokens=self.batch, head_dim=own.key_dim, dtype=act, **heads),)
        width = (own.heads + own.kv_heads) * own.key_dim
        turned = (linear_layer.lrpe(tokens=self.batch, width=width, dtype=act),) if mixer == LRPE else ()
        return (linear_layer.silu("qk_silu", tokens=self.batch, width=width, dtype=act), *turned)

    def _linear_outputs(self) -> tuple[Op, ...]:
        """What is done to the mixer's output before it is projected."""
        own, act = self._linear, self.dtypes.activation
        width = own.heads * own.value_dim
        by_head = own.norm == "head"
        rows, columns = (self.batch * own.heads, own.value_dim) if by_head else (self.batch, width)
        normed = ops.norm("heads_norm", tokens=rows, hidden=columns, dtype=act)
        if not own.gated:
            return (normed,)
        if own.gate_activated:
            gate = ops.activation(tokens=self.batch, width=width, gated=True, dtype=act)
            return (normed, replace(gate, name="heads_gate"))
        return (normed, linear_layer.product("heads_gate", tokens=self.batch, width=width, dtype=act))

    def _before(self, mixer: str) -> tuple[Op, ...]:
        if mixer in STATEFUL:
            projection = self._product("qkv", self._widths(mixer)[0], self.config.hidden)
            start = (*self._gather("attn_gather"), self._norm("attn_norm"), *projection)
            return (*start, *self._linear_inputs(mixer))
        config, heads = self.config, {"q_heads": self._q_heads, "kv_heads": self._kv_heads}
        act = self.dtypes.activation
        return (
            *self._gather("attn_gather"),
            self._norm("attn_norm"),
            *self._product("qkv", self._widths(mixer)[0], config.hidden),
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

    def _after(self, mixer: str) -> tuple[Op, ...]:
        if self.config.parallel_residual:
            outputs = self._linear_outputs() if mixer in STATEFUL else ()
            whole = (*outputs, *self._output(mixer), *self._mlp())
            return (*whole, *self._reduce("layer"), self._residual("layer_residual"))
        return (
            *(self._linear_outputs() if mixer in STATEFUL else ()),
            *self._output(mixer),
            *(() if self.style == "fused_gather" and self.ranks > 1 else self._reduce("attn")),
            self._residual("attn_residual"),
            *self._gather("mlp_gather"),
            self._norm("mlp_norm"),
            *self._mlp(),
            *self._reduce("mlp"),
            self._residual("mlp_residual"),
        )

    def _output(self, mixer: str) -> tuple[Op, ...]:
        config, own = self.config, self._widths(mixer)[1]
        if self.style != "fused_gather" or self.ranks == 1:
            return self._product("o", config.hidden, own)
        width = own * self.ranks
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
        inputs = (*self._quantize("gate_up", config.hidden), *inputs)
        sizes: dict[str, Any] = {"tokens": self.batch, "width": width, "dtype": self.dtypes.activation}
        act = ops.activation(gated=config.gated, **sizes)
        if config.gated and not config.activated:
            act = linear_layer.product("activation", **sizes)
        return (*inputs, act, *self._product("down", config.hidden, width))

    def _head(self) -> tuple[Op, ...]:
        vocab = math.ceil(self.config.vocab / self.ranks)
        gathered: tuple[Op, ...] = ()
        if not self._scattered:
            gathered = self._meet(ops.all_gather, "logits_gather", self.batch * vocab * self.ranks)
        seen = vocab * self.ranks if gathered else vocab
        return (
            *self._gather("head_gather"),
            *((self._norm("head_norm"),) if self.config.final_norm else ()),
            self._matmul("lm_head", vocab, self.config.hidden),
            *gathered,
            ops.sample(tokens=self.batch, vocab=seen, dtype=self.dtypes.activation),
        )
