"""The buffers of one rank that decodes on a card: each has its place, and what changes is read on the card.

    lengths [batch] int32 = context     how many tokens a sequence has, the new one included
    K, V of the new token at position lengths - 1; attention over lengths tokens; the id chosen at lengths -
    first

So one captured step is right for every token. Kernels are those of `simcore.kernels.table`, called with where
to write. Weights, caches and ids are as in `decoder_state`, drawn on the card unless a generator elsewhere is
asked for. Layouts of attention are chosen for all tokens that the cache has room for.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from simcore.kernels.decoder.activation import activation
from simcore.kernels.decoder.cache import kv_append, move
from simcore.kernels.decoder.decode_attention import DecodeConfig, config_for, decode_attention, workspace
from simcore.kernels.decoder.matmul import product
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.residual import residual
from simcore.kernels.decoder.rotary import angles, rotary
from simcore.kernels.decoder.split_kv import Cache, Workspace
from simcore.kernels.decoder.token import note
from simcore.kernels.streams import current_gate, shared
from simcore.machine import mesh as layout
from simcore.models.decoder import TENSOR, Decoder, Dtypes
from simcore.ops.op import Graph, Op, Publication, Size
from simcore.validate.machines.buffers.decoder import (
    LAYER_ENDS,
    Weights,
    kv_heads_of,
    normal,
    shards,
    torch_dtype,
)

CONTEXT = "context"


@dataclass(slots=True, eq=False)
class Buffers:
    """Activations of one rank, by what reads them next. x and y [batch, hidden]; turned [batch, q_heads +
    kv_heads, d], the q and k of qkv; gate_up, or gate and up, by name; ids int64 [batch]."""

    x: Tensor
    normed: Tensor
    qkv: Tensor
    turned: Tensor
    heads: Tensor
    y: Tensor
    inner: Tensor
    logits: Tensor
    ids: Tensor
    named: dict[str, Tensor] = field(default_factory=dict)


def _buffers(model: Decoder, weights: Weights, device: torch.device | str) -> Buffers:
    config, batch, act = model.config, model.batch, torch_dtype(model.dtypes.activation)
    assert isinstance(batch, int)
    heads = config.q_heads // model.ranks
    layer = weights.layers[0]

    def room(*size: int) -> Tensor:
        return torch.zeros(batch, *size, dtype=act, device=device)

    wide = layer["qkv"].shape[1]
    kv_heads = (wide // config.head_dim - heads) // 2
    return Buffers(
        x=room(config.hidden),
        normed=room(config.hidden),
        qkv=room(wide),
        turned=room(heads + kv_heads, config.head_dim),
        heads=room(heads, config.head_dim),
        y=room(config.hidden),
        inner=room(layer["down"].shape[0]),
        logits=room(weights.outside["lm_head"].shape[1]),
        ids=torch.zeros(batch, dtype=torch.int64, device=device),
        named={name: room(layer[name].shape[1]) for name in ("gate_up", "gate", "up") if name in layer},
    )


class CardDecoderState:
    """One rank's buffers for the graphs of `models.decoder.Decoder` on a card; see the head of this file.

    `chosen` int64 [tokens, batch]: ids by token. What its graphs are captured with is the layer that the rank
    has come to. `x`: the residual stream that layers alone begin with, which goes on from token to token.
    Raises ValueError where an op's kernel does not read the gate that it would have to.
    """

    def __init__(
        self,
        model: Decoder,
        weights: Weights,
        part: int,
        k: list[Tensor],
        v: list[Tensor],
        first: int,
        ids: Tensor,
        x: Tensor | None = None,
    ) -> None:
        self.model, self.config, self.weights, self.part = model, model.config, weights, part
        self.k, self.v, self.first, self.layer = k, v, first, 0
        capacity = k[0].shape[2]
        device = k[0].device
        self.lengths = torch.zeros(len(ids), dtype=torch.int32, device=device)
        self.buffers = _buffers(model, weights, device)
        self.chosen = torch.zeros(capacity - first, len(ids), dtype=torch.int64, device=device)
        self._asked, self._stream = ids, x
        # Read as fp32, as positions of any size want it.
        self._angles = angles(torch.arange(capacity, device=device), self.config.head_dim, torch.float32)
        self._gains: dict[int, Tensor] = {}
        self._whole: Tensor | None = None
        self._methods: Mapping[str, Callable[[Op, Tensor | None], None]] = {
            "embedding": self._embed,
            "norm": self._norm,
            "matmul": self._multiply,
            "rotary": self._turn,
            "kv_append": self._append,
            "decode_attention": self._attend,
            "activation": self._activate,
            "residual": self._add,
            "sample": self._choose,
        }
        self.reset()

    def reset(self) -> None:
        """As before the first token: what a run has written to the cache comes to be written again."""
        self.layer = 0
        self.buffers.ids.copy_(self._asked)
        if self._stream is not None:
            self.buffers.x.copy_(self._stream)
        self.chosen.fill_(-1)

    # -- the protocol of the machine on a card -----------------------------------------------------------

    def told(self, graph: Graph) -> frozenset[str]:
        """The context, where it counts."""
        return Decoder.told(graph)

    def bound(self, graph: Graph) -> frozenset[str]:
        """All others."""
        return graph.needs - self.told(graph)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """The lengths, which all streams of a rank share: it has one set of activations."""
        del stream
        return {CONTEXT: self.lengths}

    def key(self) -> Hashable:
        """The layer."""
        return self.layer

    def restore(self, key: Hashable) -> None:
        """Goes to a layer."""
        assert isinstance(key, int)
        self.layer = key

    def execute(self, op: Op) -> None:
        """A local op. Raises ValueError for one that a card does not do (yet)."""
        method = self._methods.get(op.kind)
        if method is None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} has no buffers on a card")
        method(op, current_gate())
        self.skip(op)

    def skip(self, op: Op) -> None:
        """On to the layer that comes after an op."""
        if op.name == "embedding":
            self.layer = 0
        elif op.name in LAYER_ENDS:
            self.layer += 1
            if not self.model.outside and self.layer == self.config.layers:
                # The next token begins without an embedding.
                self.layer = 0

    def put(self, publication: Publication, to: Any) -> None:
        """Raises ValueError: no speculation on a card yet."""
        raise ValueError(f"--on cuda: {publication.signal} is not published on a card")

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """A collective between the ranks of a tensor-parallel group."""
        if current_gate() is not None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} reads no gate")
        buffers = [state.buffers for state in states]
        match op.kind, op.name:
            case "all_reduce", _:
                total = torch.stack([each.y for each in buffers]).sum(0)
                for each in buffers:
                    each.y.copy_(total)
            case "all_gather", "logits_gather":
                whole = torch.cat([each.logits for each in buffers], 1)
                for state in states:
                    state.gathered(whole)
            case _:
                raise ValueError(f"--on cuda: {op.kind} {op.name} has no buffers on a card")

    def gathered(self, logits: Tensor) -> None:
        """Takes the logits of all ranks, of which the choice is made."""
        if self._whole is None:
            self._whole = torch.empty_like(logits)
        self._whole.copy_(logits)

    # -- ops -----------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        layers, outside = self.weights.layers, self.weights.outside
        return outside[name] if name in outside else layers[self.layer][name]

    def _embed(self, op: Op, gate: Tensor | None) -> None:
        del op
        table, x = self._weight("embedding"), self.buffers.x
        if gate is None and table.dtype == x.dtype:
            torch.index_select(table, 0, self.buffers.ids, out=x)
        else:
            move(table[self.buffers.ids], x, gate=gate)

    def _norm(self, op: Op, gate: Tensor | None) -> None:
        b = self.buffers
        if op.name == "qk_norm":
            self._norm_heads(gate)
            return
        norm(b.x, self._weight(op.name), gate=gate, out=b.normed)

    def _norm_heads(self, gate: Tensor | None) -> None:
        if gate is not None:
            raise ValueError("--on cuda: the norm of heads reads no gate")
        gain = self._weight("qk_norm")
        qkv, d = self.buffers.qkv, self.config.head_dim
        if self.layer not in self._gains:
            self._gains[self.layer] = gain.expand(len(qkv), *gain.shape).reshape(-1, d).clone()
        heads = qkv.view(len(qkv), -1, d)[:, : len(gain)]
        heads.copy_(norm(heads.reshape(-1, d), self._gains[self.layer]).view(heads.shape))

    def _multiply(self, op: Op, gate: Tensor | None) -> None:
        b = self.buffers
        source = {"o": b.heads.flatten(1), "down": b.inner}.get(op.name, b.normed)
        weight, target = self._weight(op.name), b.named.get(op.name)
        match op.name:
            case "lm_head":
                target = b.logits
            case "qkv":
                target = b.qkv
            case "o":
                target = b.y
            case "down" if not self.config.parallel_residual:
                target = b.y
        if target is None:
            # The MLP's part of what the attention has given too.
            residual(product(source, weight, gate=gate), b.y, gate=gate)
        elif weight.dtype == target.dtype:
            product(source, weight, out=target, gate=gate)
        else:
            move(product(source, weight, gate=gate), target, gate=gate)
        if op.name == "lm_head":
            # Columns beyond the vocabulary are never chosen.
            columns = self.config.vocab - self.part * b.logits.shape[1]
            if columns < b.logits.shape[1]:
                b.logits[:, max(0, columns) :].fill_(-torch.inf)

    def _turn(self, op: Op, gate: Tensor | None) -> None:
        b = self.buffers
        rotary(
            b.qkv, *self._angles, q_heads=op["q_heads"], kv_heads=op["kv_heads"], lengths=self.lengths,
            gate=gate, out=b.turned,
        )  # fmt: skip

    def _append(self, op: Op, gate: Tensor | None) -> None:
        b, kv_heads = self.buffers, op["kv_heads"]
        k = b.turned[:, -kv_heads:]
        v = b.qkv.view(len(b.qkv), -1, self.config.head_dim)[:, -kv_heads:]
        kv_append(k, v, self.k[self.layer], self.v[self.layer], lengths=self.lengths, gate=gate)

    def _attend(self, op: Op, gate: Tensor | None) -> None:
        b, k, v = self.buffers, self.k[self.layer], self.v[self.layer]
        q = b.turned[:, : op["q_heads"]]
        if k.dtype != q.dtype:
            q = q.to(k.dtype)
        config, space = self._attention(q, k, v)
        out = b.heads if b.heads.dtype == q.dtype else None
        made = decode_attention(q, k, v, self.lengths, gate=gate, out=out, space=space, config=config)
        if out is None:
            move(made.flatten(1), b.heads.flatten(1), gate=gate)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[DecodeConfig, Workspace]:
        """The layout for a full cache, and a workspace that the launches of a stream share."""
        config = config_for(q, Cache(k, v, None, None, None))
        key = ("decode attention", q.device, q.shape, k.shape[1], config)
        return config, shared(key, lambda: workspace(q, k.shape[1], config))

    def _activate(self, op: Op, gate: Tensor | None) -> None:
        del op
        b = self.buffers
        both = b.named.get("gate_up")
        inputs = both.chunk(2, 1) if both is not None else tuple(b.named.values())
        activation(*inputs, gate=gate, out=b.inner)

    def _add(self, op: Op, gate: Tensor | None) -> None:
        del op
        residual(self.buffers.y, self.buffers.x, gate=gate)

    def _choose(self, op: Op, gate: Tensor | None) -> None:
        del op
        b = self.buffers
        logits = b.logits if self._whole is None else self._whole
        if gate is None:
            torch.argmax(logits, -1, out=b.ids)
        else:
            move(logits.argmax(-1)[:, None], b.ids[:, None], gate=gate)
        note(b.ids, self.lengths, self.first, self.chosen, gate=gate)


def card_decoder_states(
    model: Decoder,
    mesh: layout.Mesh,
    seed: int,
    context: int,
    tokens: int,
    *,
    device: torch.device | str = "cuda",
    drawn_on: torch.device | str | None = None,
    weights: Sequence[Weights] | None = None,
) -> list[CardDecoderState]:
    """A state for every rank of a mesh, for `tokens` tokens from `context` on. `drawn_on`: the device whose
    generator draws the numbers; "cpu" gives those of `decoder_states`, in minutes for billions of them.
    `weights`: those of `card_weights`, if they are there already.

    Raises ValueError where the model is not for as many ranks as the mesh has along "tensor", is made of
    parts that nobody can execute, puts ranks' results together in another way than all-reduces, or is in a
    number format that torch does not compute in.
    """
    if model.ranks != mesh.get(TENSOR, 1):
        raise ValueError(f"a model for {model.ranks} ranks on {mesh.get(TENSOR, 1)} of them")
    if model.parts or isinstance(model.batch, Size):
        raise ValueError("the torch machine needs every op of a layer, and a batch that is a number")
    if model.style != "all_reduce" and model.ranks > 1:
        raise ValueError(f"--on cuda: ranks put their results together by all_reduce, not by {model.style}")
    drawn_on = drawn_on or device
    if weights is None:
        weights = card_weights(model, seed, device=device, drawn_on=drawn_on)
    generator = torch.Generator(drawn_on).manual_seed(seed + 1)
    ids = torch.randint(model.config.vocab, (model.batch,), generator=generator, device=drawn_on).to(device)
    caches = _caches(model, mesh, generator, context, tokens, device)
    x = None
    if not model.outside:
        x = normal(generator, model.batch, model.config.hidden, scale=1.0).to(device)
    return [
        CardDecoderState(model, weights[part], part, k, v, context, ids, x)
        for part, (k, v) in (
            (layout.coordinate(mesh, rank, TENSOR), cache) for rank, cache in enumerate(caches)
        )
    ]


def card_weights(
    model: Decoder, seed: int, *, device: torch.device | str = "cuda", drawn_on: torch.device | str = "cuda"
) -> list[Weights]:
    """The weights of each rank, which do not hang on batch and context."""
    return [_moved(each, device) for each in shards(*drawn_of(model), seed, drawn_on)]


def drawn_of(model: Decoder) -> tuple[Any, Dtypes, int, Any]:
    """What weights go by."""
    return model.config, model.dtypes, model.ranks, model.style


def _moved(weights: Weights, device: torch.device | str) -> Weights:
    def to(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: matrix.to(device) for name, matrix in matrices.items()}

    return Weights(tuple(map(to, weights.layers)), to(weights.outside))


def _caches(
    model: Decoder,
    mesh: layout.Mesh,
    generator: torch.Generator,
    context: int,
    tokens: int,
    device: torch.device | str,
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """K and V of every rank's layers, with `context` - 1 random tokens and room for `tokens` more."""
    config, batch, dtype = model.config, model.batch, torch_dtype(model.dtypes.kv)
    assert isinstance(batch, int)
    found: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(prod(mesh.values()))]
    ranks = [
        kv_heads_of(config, layout.coordinate(mesh, rank, TENSOR), model.ranks) for rank in range(len(found))
    ]
    for _ in range(config.layers):
        for which in range(2):
            for cache, heads in zip(found, ranks, strict=True):
                shape = (batch, heads.stop - heads.start, context + tokens, config.head_dim)
                cache[which].append(torch.zeros(shape, dtype=dtype, device=device))
            # One by one: what all of them are drawn in would leave holes of the size of a cache.
            for i in range(batch):
                drawn = normal(generator, config.kv_heads, context - 1, config.head_dim, scale=1.0)
                for cache, heads in zip(found, ranks, strict=True):
                    cache[which][-1][i, :, : context - 1] = drawn[heads].to(device, dtype)
    return found
