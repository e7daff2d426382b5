"""The buffers of one rank that decodes on a card: no buffer moves, and kernels read what changes on the card.

    lengths [batch] int32 = context     the tokens of each sequence, the new token included
    K, V of the new token at position lengths - 1; attention over lengths tokens; chosen[lengths - first] = id

So one captured step is valid for every token. Ranks on cards of their own meet by kernels (`meeting.py`), and
the two groups of a speculation too (`pairing.py`): then ops read the gates of their launches. The kernels are
those of `simcore.kernels.table`, called with their output tensors. Weights, caches and ids are as in
`buffers.decoder`; what is random is drawn on the card unless another generator is asked for. Layouts of
attention are chosen for the capacity of the cache.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from simcore.kernels.decoder.activation import activation
from simcore.kernels.decoder.cache import kv_append, move
from simcore.kernels.decoder.choice import choose
from simcore.kernels.decoder.decode_attention import config_for, decode_attention, workspace
from simcore.kernels.decoder.matmul import product
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.residual import residual
from simcore.kernels.decoder.rotary import angles, rotary
from simcore.kernels.decoder.split_kv import Cache
from simcore.kernels.decoder.token import note
from simcore.kernels.streams import current_gate, shared
from simcore.machine import mesh as layout
from simcore.models.decoder import GROUP, NORMED_SUM, SPECULATED, TENSOR, Decoder, Dtypes
from simcore.models.mixers import FULL, SLIDING, STATEFUL
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Graph, Op
from simcore.validate.machines.buffers.cuda_linear import CardLinear
from simcore.validate.machines.buffers.decoder import (
    READS,
    WRITES,
    Caches,
    Weights,
    beginning,
    check_decoder,
    layer_after,
    mlp_inputs,
    shards,
    states_of,
    together,
)
from simcore.validate.machines.buffers.meeting import Meeting, Waiting, meeting
from simcore.validate.machines.buffers.pairing import Pairing, Speculating, pairing
from simcore.validate.machines.state import CardState, current_told, torch_dtype

CONTEXT = "context"


def _buffers(model: Decoder, weights: Weights, device: torch.device | str) -> dict[str, Tensor]:
    """Returns the activations of one rank by the op that reads them next. x and y [batch, hidden]; turned
    [batch, q_heads + kv_heads, d], the rotated q and k of qkv; gate_up, or gate and up; ids int64 [batch]."""
    config, layer = model.config, weights.layers[0]
    heads = config.q_heads // model.ranks
    attends = [own for own, mixer in zip(weights.layers, config.layer_mixers, strict=True) if mixer == FULL]
    wide = attends[0]["qkv"].shape[1] if attends else 0
    kv_heads = max(0, (wide // config.head_dim - heads) // 2)
    sizes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("x", "normed", "y"), (config.hidden,)),
        "qkv": (wide,),
        "turned": (heads + kv_heads, config.head_dim),
        "heads": (heads * config.head_dim,),
        "inner": (layer["down"].shape[0],),
        "logits": (weights.outside["lm_head"].shape[1],),
        **{name: (layer[name].shape[1],) for name in ("gate_up", "gate", "up") if name in layer},
    }
    act, batch = torch_dtype(model.dtypes.activation), model.batch
    assert isinstance(batch, int)
    found = {name: torch.zeros(batch, *size, dtype=act, device=device) for name, size in sizes.items()}
    return found | {"ids": torch.zeros(batch, dtype=torch.int64, device=device)}


class CardDecoderState(CardState):
    """One rank's buffers for the graphs of `models.decoder.Decoder` on a card; see the head of this file.

    `chosen` int64 [tokens, batch]: ids by token. Captured graphs depend on the rank's current layer. `x`: the
    residual stream with which layers alone begin; it continues from token to token. Raises ValueError if an
    op has to read a gate and its kernel does not.
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
        meeting: Meeting | None = None,
        pairing: tuple[Pairing, int] | None = None,
        *,
        capacity: int,
        states: Sequence[Tensor] = (),
    ) -> None:
        self.model, self.config, self.weights, self.part = model, model.config, weights, part
        self.k, self.v, self.first, self.layer = k, v, first, 0
        self.device = device = k[0].device
        self._meeting, self.joined = meeting, meeting is not None or pairing is not None
        who = f"a rank with part {part} on {device}"
        self._waiting = Waiting(torch.zeros(1, dtype=torch.int32, device=device), who)
        self.lengths = torch.zeros(len(ids), dtype=torch.int32, device=device)
        self.buffers = _buffers(model, weights, device)
        self.linear: CardLinear | None = None
        if model.config.linear is not None:
            act = torch_dtype(model.dtypes.activation)
            self.linear = CardLinear(model.config, part, model.ranks, len(ids), act, states, device)
        self.chosen = torch.zeros(capacity - first, len(ids), dtype=torch.int64, device=device)
        self._speculating = None if pairing is None else self._speculation(*pairing)
        if meeting is not None:
            vocab = self.buffers["logits"].shape[1] * model.ranks
            self.buffers["all_logits"] = self.buffers["logits"].new_zeros(len(ids), vocab)
        self._asked, self._stream = ids.to(device), None if x is None else x.to(device)
        # In fp32, because large positions need it.
        positions = torch.arange(capacity, device=device)
        turns = weights.constants.frequencies
        self._angles = angles(positions, self.config.head_dim, torch.float32, turns)
        self._gains: dict[int, Tensor] = {}
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
            "all_reduce": self._sum,
            "all_gather": self._gather,
            "exchange_priority": self._exchange,
            "speculative_attention": self._speculate,
            "receive_speculation": self._receive,
            "linear_attention_decode": self._mix,
            "silu": self._mix,
            "lrpe": self._mix,
            "product": self._product,
        }
        self.reset()

    def _speculation(self, pairing: Pairing, place: int) -> Speculating:
        q, k = self._queries(self.config.q_heads // self.model.ranks), self.k[0]
        heads = self.buffers["heads"].view(q.shape)
        return Speculating(pairing, place, q, heads, k)

    def reset(self) -> None:
        """Restores the state before the first token; what a run has written to the cache is written again."""
        self.layer = 0
        self.buffers["ids"].copy_(self._asked)
        if self._stream is not None:
            self.buffers["x"].copy_(self._stream)
        self.chosen.fill_(-1)
        if self.linear is not None:
            self.linear.reset()

    def begin_run(self, *, rehearsal: bool, error: Tensor, code: Callable[[str], int]) -> None:
        """Prepares the rank's part of meetings; the first rank of each empties what all send through."""
        if not self.joined:
            return
        self._waiting.begin(rehearsal=rehearsal, error=error, code=code)
        if self._meeting is not None and self.part == 0:
            self._meeting.clear()
        if self._speculating is not None:
            self._speculating.clear()

    # -- the interface of the machine on a card ----------------------------------------------------------

    def carries(self, signal: str) -> bool:
        """Attention itself writes what is speculated into the memory of the rank that waits for it."""
        return signal == SPECULATED and self._speculating is not None

    def tells(self, op: Op) -> bool:
        """Groups tell each other of their priority in an exchange."""
        return op.kind == "exchange_priority"

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        """Returns the context, if the graph depends on it."""
        return Decoder.device_sizes(graph)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """Returns the lengths, which all streams of a rank share, as they share one set of activations."""
        del stream
        return {CONTEXT: self.lengths}

    def key(self) -> int:
        """Returns the current layer."""
        return self.layer

    def restore(self, key: int) -> None:
        """Sets the current layer."""
        self.layer = key

    def execute(self, op: Op) -> None:
        """Runs a local op. Raises ValueError for an op that has no buffers on a card."""
        method = self._methods.get(op.kind)
        if method is None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} has no buffers on a card")
        method(op, current_gate())
        self.skip(op)

    def execute_all(self, ops: Sequence[Op]) -> None:
        """Runs local ops; where ranks meet by kernels and the model says so, a sum with residual and norm by
        one launch."""
        in_one, at = self._meeting is not None and self.model.joins_sums, 0
        while at < len(ops):
            three = ops[at : at + 3]
            if in_one and tuple([op.kind for op in three]) == NORMED_SUM:
                self._sum_and_norm(*three)
                at += 3
            else:
                self.execute(ops[at])
                at += 1

    def skip(self, op: Op) -> None:
        """Goes to the layer after an op; with layers alone the first layer follows the last one."""
        self.layer = layer_after(op, self.layer)
        if not self.model.outside and self.layer == self.config.layers:
            self.layer = 0

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Runs a collective between the ranks of a tensor-parallel group."""
        if current_gate() is not None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} reads no gate")
        source = "y" if op.kind == "all_reduce" else "logits"
        if op.kind != "all_reduce" and op.name != "logits_gather":
            raise ValueError(f"--on cuda: {op.kind} {op.name} has no buffers on a card")
        whole = together(op, [state.buffers[source] for state in states])
        for state in states:
            state.receive(op, whole)

    def receive(self, op: Op, whole: Tensor) -> None:
        """Takes the result of a collective: a sum, or all ranks' logits, which the choice then reads."""
        target = "y" if op.kind == "all_reduce" else "all_logits"
        if target not in self.buffers:
            self.buffers[target] = torch.empty_like(whole)
        self.buffers[target].copy_(whole)

    def _sum(self, op: Op, gate: Tensor | None) -> None:
        x = self._speculated(op).verdict.norms if op.name == "verify_reduce" else self.buffers["y"]
        self._met(op).all_reduce(op, self.layer, self.part, x, self._waiting, gate)

    def _sum_and_norm(self, op: Op, addition: Op, last: Op) -> None:
        gate, layer = current_gate(), self.layer
        meets = self._met(op)
        for done in (op, addition):
            self.skip(done)
        # The gain is that of the layer after the residual.
        meets.all_reduce_normed(
            op, layer, self.part, self.buffers["y"], self.buffers["x"], self._weight(last.name),
            self.weights.constants.eps, self.buffers["normed"], self._waiting, gate=gate,
        )  # fmt: skip
        self.skip(last)

    def _gather(self, op: Op, gate: Tensor | None) -> None:
        x, out = self.buffers["logits"], self.buffers["all_logits"]
        self._met(op).all_gather(op, self.layer, self.part, x, out, self._waiting, gate)

    def _met(self, op: Op) -> Meeting:
        if self._meeting is None:
            raise ValueError(f"--on cuda: ranks that share a card do not meet in {op.kind} {op.name}")
        return self._meeting

    def _speculated(self, op: Op) -> Speculating:
        if self._speculating is None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} is of ranks in pairs")
        return self._speculating

    def _exchange(self, op: Op, gate: Tensor | None) -> None:
        told = current_told()
        if gate is not None or told is None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} tells a flag, and has no gate")
        # Behind the last layer K and V are told once more.
        layer = min(self.layer, self.config.layers - 1)
        k, v, x = self.k[layer], self.v[layer], self.buffers["x"]
        self._speculated(op).exchange(self.layer, x, k, v, self.lengths, told, self._waiting)

    def _speculate(self, op: Op, gate: Tensor | None) -> None:
        """Attends exactly, gives the early part to the other group, and decides by the data."""
        k, v, q = self.k[self.layer], self.v[self.layer], self._queries(op["q_heads"])
        self._speculated(op).attend(q, k, v, self.lengths, op["chunk"], gate)

    def _receive(self, op: Op, gate: Tensor | None) -> None:
        self._speculated(op).receive(self.buffers["heads"], self._waiting, gate)

    def _queries(self, heads: int) -> Tensor:
        return self.buffers["turned"][:, :heads].to(self.k[0].dtype)

    # -- ops -----------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> Tensor:
        return self.weights.of(name, self.layer)

    def _embed(self, op: Op, gate: Tensor | None) -> None:
        table, x, ids = self._weight(op.name), self.buffers["x"], self.buffers["ids"]
        if gate is None and table.dtype == x.dtype:
            torch.index_select(table, 0, ids, out=x)
        else:
            move(table[ids], x, gate=gate)

    @property
    def _stateful(self) -> bool:
        """Whether the current layer is of linear attention."""
        return self.config.linear is not None and self.config.layer_mixers[self.layer] in STATEFUL

    def _own(self, op: Op, gate: Tensor | None) -> CardLinear:
        if self.linear is None or gate is not None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} reads no gate")
        return self.linear

    def _mix(self, op: Op, gate: Tensor | None) -> None:
        own = self._own(op, gate)
        if op.kind == "silu":
            own.silu(op)
        elif op.kind == "lrpe":
            own.widen(op, self.lengths)
        else:
            own.mix(self.layer)

    def _product(self, op: Op, gate: Tensor | None) -> None:
        own = self._own(op, gate)
        if op.name == "heads_gate":
            own.gate(op)
        else:
            torch.mul(*mlp_inputs(self.buffers), out=self.buffers["inner"])

    def _norm(self, op: Op, gate: Tensor | None) -> None:
        if op.name == "qk_norm":
            self._norm_heads(gate)
        elif op.name == "heads_norm":
            self._own(op, gate).norm(op, self.weights.constants.eps)
        else:
            x, eps = self.buffers["x"], self.weights.constants.eps
            norm(x, self._weight(op.name), eps=eps, gate=gate, out=self.buffers["normed"])

    def _norm_heads(self, gate: Tensor | None) -> None:
        gain = self._weight("qk_norm")
        qkv, d = self.buffers["qkv"], self.config.head_dim
        if self.layer not in self._gains:
            self._gains[self.layer] = gain.expand(len(qkv), *gain.shape).reshape(-1, d).clone()
        heads = qkv.view(len(qkv), -1, d)[:, : len(gain)]
        eps = self.weights.constants.eps
        normed = norm(heads.reshape(-1, d), self._gains[self.layer], eps=eps, gate=gate)
        # Behind a gate that is 0 nobody reads these heads.
        heads.copy_(normed.view(heads.shape))

    def _multiply(self, op: Op, gate: Tensor | None) -> None:
        source = self.buffers[READS.get(op.name, "normed")]
        target, weight = self.buffers[WRITES.get(op.name, op.name)], self._weight(op.name)
        if op.name == "lm_head" and not self.config.final_norm:
            source = self.buffers["x"]
        if op.name == "qkv" and self._stateful:
            target = self._own(op, gate).projected
        elif op.name == "o" and self._stateful:
            source = self._own(op, gate).heads
        if op.name == "down" and self.config.parallel_residual:
            # Adds the MLP's output to the attention's.
            residual(product(source, weight, gate=gate, in_step=True), target, gate=gate)
        elif weight.dtype == target.dtype:
            product(source, weight, out=target, gate=gate, in_step=True)
        else:
            move(product(source, weight, gate=gate, in_step=True), target, gate=gate)
        if op.name == "lm_head":
            # Columns beyond the vocabulary are never chosen.
            columns = self.config.vocab - self.part * target.shape[1]
            if columns < target.shape[1]:
                target[:, max(0, columns) :].fill_(-torch.inf)

    def _turn(self, op: Op, gate: Tensor | None) -> None:
        if self._stateful:
            self._own(op, gate).turn(op, self._angles, self.lengths)
            return
        rotary(
            self.buffers["qkv"], *self._angles, q_heads=op["q_heads"], kv_heads=op["kv_heads"],
            lengths=self.lengths, gate=gate, out=self.buffers["turned"],
        )  # fmt: skip

    def _append(self, op: Op, gate: Tensor | None) -> None:
        qkv, kv_heads = self.buffers["qkv"], op["kv_heads"]
        k = self.buffers["turned"][:, -kv_heads:]
        v = qkv.view(len(qkv), -1, self.config.head_dim)[:, -kv_heads:]
        kv_append(k, v, self.k[self.layer], self.v[self.layer], lengths=self.lengths, gate=gate)

    def _attend(self, op: Op, gate: Tensor | None) -> None:
        """Attends with the layout for a full cache and a workspace that the launches of a stream share."""
        k, v = self.k[self.layer], self.v[self.layer]
        q = self._queries(op["q_heads"])
        heads = self.buffers["heads"].view(q.shape)
        config = config_for(q, Cache(k, v, None, None, None))
        key = ("decode attention", q.device, q.shape, k.shape[1], config)
        space = shared(key, lambda: workspace(q, k.shape[1], config))
        out = heads if heads.dtype == q.dtype else None
        made = decode_attention(q, k, v, self.lengths, gate=gate, out=out, space=space, config=config)
        if out is None:
            move(made.flatten(1), self.buffers["heads"], gate=gate)

    def _activate(self, op: Op, gate: Tensor | None) -> None:
        if op.name == "heads_gate":
            self._own(op, gate).gate(op)
            return
        activation(*mlp_inputs(self.buffers), gate=gate, out=self.buffers["inner"])

    def _add(self, op: Op, gate: Tensor | None) -> None:
        del op
        residual(self.buffers["y"], self.buffers["x"], gate=gate)

    def _choose(self, op: Op, gate: Tensor | None) -> None:
        del op
        ids, logits = self.buffers["ids"], self.buffers.get("all_logits", self.buffers["logits"])
        # In rehearsals all logits may be NaN: one of a column beyond the vocabulary must not be chosen.
        whole = self._meeting is not None
        choose(logits[:, : self.config.vocab] if whole else logits, gate=gate, out=ids)
        note(ids, self.lengths, self.first, self.chosen, gate=gate)


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
    devices: Sequence[torch.device | str] | None = None,
) -> list[CardDecoderState]:
    """Returns a state for every rank of a mesh, for `tokens` tokens from `context` on. `drawn_on`: the device
    whose generator draws the numbers; "cpu" draws those of `decoder_states`, billions of them in minutes.
    `weights`: the result of `card_weights`, if already made. `devices`: those of ranks that meet by kernels,
    tensor-parallel ones and the two groups of a speculation; one device may be given several times. Left out,
    all are on `device`, and the machine holds their collectives.

    Raises ValueError if the model is not for as many ranks as the mesh has along "tensor", is made of parts
    that cannot be executed, combines ranks' results otherwise than by all-reduce, or has a number format that
    torch does not compute in; and as `meeting` and `pairing`.
    """
    check_decoder(model, mesh)
    if SLIDING in model.config.layer_mixers:
        raise ValueError(f"--on cuda: {model.config.name} has layers with a window")
    if model.style != "all_reduce" and model.ranks > 1:
        raise ValueError(f"--on cuda: ranks put their results together by all_reduce, not by {model.style}")
    drawn_on = drawn_on or device
    parts = [layout.coordinate(mesh, rank, TENSOR) for rank in range(prod(mesh.values()))]
    if devices is not None and len(devices) != len(parts):
        raise ValueError(f"--on cuda: {len(parts)} ranks on {len(devices)} devices: each rank is on one")
    places = [torch.device(place) for place in devices or [device] * len(parts)]
    if weights is None:
        weights = card_weights(model, seed, places[: model.ranks], drawn_on=drawn_on)
    ids, caches, x = beginning(model, mesh, seed, context, tokens, devices=places, drawn_on=drawn_on)
    met = _met(model, mesh, places, caches) if devices is not None else [(None, None)] * len(parts)
    # A second group has the weights of the first, on its cards.
    own = [
        weights[part] if rank < model.ranks else weights[part].to(places[rank])
        for rank, part in enumerate(parts)
    ]
    return [
        CardDecoderState(
            model,
            own[rank],
            part,
            k,
            v,
            context,
            ids,
            x,
            *meets,
            capacity=context + tokens,
            states=states_of(model, part, torch_dtype(model.dtypes.activation), seed),
        )
        for rank, (part, (k, v), meets) in enumerate(zip(parts, caches, met, strict=True))
    ]


def _met(
    model: Decoder, mesh: layout.Mesh, places: Sequence[torch.device], caches: Sequence[Caches]
) -> list[tuple[Meeting | None, tuple[Pairing, int] | None]]:
    """Returns how each rank meets its group, if that has others, and its copy in the other group, if there is
    one. Raises ValueError for ranks that meet otherwise."""
    if mesh.get(GROUP, 1) * mesh.get(TENSOR, 1) != len(places) or mesh.get(GROUP, 1) > 2:
        raise ValueError("--on cuda: ranks meet in one group, or in two")
    found: list[tuple[Meeting | None, tuple[Pairing, int] | None]] = []
    groups, pairs = dict[tuple[int, ...], Meeting](), dict[tuple[int, ...], Pairing]()
    for rank in range(len(places)):
        group, pair = layout.members(mesh, rank, TENSOR), layout.members(mesh, rank, GROUP)
        if len(group) > 1 and group not in groups:
            groups[group] = meeting(model, [places[each] for each in group], speculates=len(pair) > 1)
        if len(pair) > 1 and pair not in pairs:
            pairs[pair] = pairing(
                model, [places[each] for each in pair], [caches[each][0][0] for each in pair]
            )
        beside = (pairs[pair], pair.index(rank)) if len(pair) > 1 else None
        found.append((groups.get(group), beside))
    return found


def card_weights(
    model: Decoder | ServedDecoder,
    seed: int,
    devices: Sequence[torch.device | str],
    *,
    drawn_on: torch.device | str = "cuda",
) -> list[Weights]:
    """Returns the weights of each rank on its device, which do not depend on batch and context."""
    return shards(*drawn_of(model), seed, drawn_on, devices)


def drawn_of(model: Decoder | ServedDecoder) -> tuple[Any, Dtypes, int, Any]:
    """Returns all that the weights depend on, apart from the seed."""
    return model.config, model.dtypes, model.ranks, model.style
