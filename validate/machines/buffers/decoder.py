"""The buffers of one rank that decodes: weights, KV cache, and the activations between ops.

    W of rank t of n = slice t of W     columns: qkv, gate, up, lm_head (fused_gather: o); rows: down, else o

Weights are slices of whole ones (`whole_weights`), so that the ranks of a tensor-parallel group together are
the same model whatever their number. An op finds its operands by its name and its layer: the
number of layers whose last residual its rank has executed or skipped since the token's embedding.

The cache holds `context - 1` random tokens when the run begins; token t is written at position context - 1 +
t and attends over context + t tokens, itself included.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simcore.kernels.decoder.rotary import angles
from simcore.machine import mesh as layout
from simcore.models.decoder import TENSOR, Decoder, Dtypes, Style
from simcore.models.decoder_config import DecoderConfig
from simcore.models.mixers import STATEFUL
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op, Publication, Size
from simcore.validate.machines.buffers.checkpoint import read_checkpoint
from simcore.validate.machines.buffers.linear import LinearPart, drawn_states
from simcore.validate.machines.buffers.whole_weights import CONSTANTS, Constants, Matrices, drawn, normal
from simcore.validate.machines.state import State, run_kernel, torch_dtype

# K and V of one rank's layers, [batch, kv_heads, capacity, head_dim] each.
Caches = tuple[list[Tensor], list[Tensor]]
# The ops that end a layer.
LAYER_ENDS = ("mlp_residual", "layer_residual")
# Buffers that products read and write, by op name; others read `normed` and write the one of their name.
READS = {"o": "heads", "down": "inner"}
WRITES = {"lm_head": "logits", "o": "y", "down": "y"}
# Source and target buffers of gathers, by op name; the others gather `x` into `gathered`.
GATHERED = {"logits_gather": ("logits", "logits"), "heads_gather": ("heads", "heads")}


def layer_after(op: Op, layer: int) -> int:
    """Returns the layer of a rank after an op, executed or skipped."""
    return 0 if op.name == "embedding" else layer + (op.name in LAYER_ENDS)


def together(op: Op, parts: Sequence[Tensor]) -> Tensor:
    """Returns the result of a collective from its ranks' parts: their columns side by side, or their sum."""
    return torch.cat(tuple(parts), 1) if op.kind == "all_gather" else torch.stack(tuple(parts)).sum(0)


def mlp_inputs(buffers: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the inputs of an MLP's activation: gate and up, made by one product or by two, or up alone."""
    if "gate_up" in buffers:
        return buffers["gate_up"].chunk(2, 1)
    return tuple(buffers[name] for name in ("gate", "up") if name in buffers)


# -- weights -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weights:
    """Matrices [in, out] and gains by the name of the op that reads them: of each layer, and outside; and the
    constants that they were trained with."""

    layers: tuple[Matrices, ...]
    outside: Matrices
    constants: Constants = CONSTANTS

    def of(self, name: str, layer: int) -> Tensor:
        """Returns the weight that an op reads, in a layer or outside all layers."""
        return self.outside[name] if name in self.outside else self.layers[layer][name]

    def to(self, device: torch.device | str) -> "Weights":
        """Returns the same weights on a device."""
        layers = tuple(moved(layer, device) for layer in self.layers)
        return replace(self, layers=layers, outside=moved(self.outside, device))


def moved(matrices: Matrices, device: torch.device | str) -> Matrices:
    """Returns matrices on a device."""
    return {name: matrix.to(device) for name, matrix in matrices.items()}


def _columns(matrix: Tensor, part: int, parts: int) -> Tensor:
    width = matrix.shape[1] // parts
    return matrix[:, part * width : (part + 1) * width]


def kv_heads_of(config: DecoderConfig, part: int, parts: int) -> slice:
    """Returns the KV heads of one rank; with more ranks than KV heads, several ranks have the same head."""
    count = max(1, config.kv_heads // parts)
    first = part * config.kv_heads // parts
    return slice(first, first + count)


def _layer_of(
    whole: Matrices,
    config: DecoderConfig,
    dtypes: Dtypes,
    part: int,
    parts: int,
    style: Style,
    *,
    linear: bool = False,
) -> Matrices:
    """Returns one rank's slice of a layer's matrices; `linear`: of linear attention."""
    heads, d = kv_heads_of(config, part, parts), config.head_dim
    kv = slice(heads.start * d, heads.stop * d)
    qkv = torch.cat((_columns(whole["q"], part, parts), whole["k"][:, kv], whole["v"][:, kv]), 1)
    if linear:
        names = ("q", "k", "v", "gate_heads")
        qkv = torch.cat([_columns(whole[name], part, parts) for name in names if name in whole], 1)
    gathers_heads = style == "fused_gather" and parts > 1
    rows = _columns(whole["o"].T, part, parts).T
    found: Matrices = {
        "qkv": qkv,
        "o": _columns(whole["o"], part, parts) if gathers_heads else rows,
        "down": _columns(whole["down"].T, part, parts).T,
    }
    found |= {name: _columns(whole[name], part, parts) for name in ("gate", "up") if name in whole}
    if "gate" in found and style == "all_reduce" and dtypes.of("gate") == dtypes.of("up"):
        found["gate_up"] = torch.cat((found.pop("gate"), found.pop("up")), 1)
    cast_ = {name: found[name].to(torch_dtype(_format(dtypes, name))).contiguous() for name in found}
    act = torch_dtype(dtypes.activation)
    queries = config.q_heads // parts
    norms = {name: whole[name].to(act) for name in ("attn_norm", "mlp_norm")}
    if "q_gain" in whole:
        gains = [whole["q_gain"].expand(queries, d), whole["k_gain"].expand(heads.stop - heads.start, d)]
        norms["qk_norm"] = torch.cat(gains).to(act)
    return cast_ | norms


def _format(dtypes: Dtypes, name: str) -> str:
    return dtypes.of("gate" if name == "gate_up" else name)


def _outside(whole: Matrices, config: DecoderConfig, dtypes: Dtypes, parts: int) -> list[Matrices]:
    """Returns embedding, last norm and LM head of each rank; zeros pad the columns of the LM head."""
    head = whole["lm_head"]
    share = ceil(config.vocab / parts)
    head = torch.cat((head, head.new_zeros(config.hidden, share * parts - config.vocab)), 1)
    embedding = whole["embedding"].to(torch_dtype(dtypes.of("embedding")))
    gain = whole["head_norm"].to(torch_dtype(dtypes.activation))
    return [
        {
            "embedding": embedding,
            "head_norm": gain,
            "lm_head": _columns(head, part, parts).to(torch_dtype(dtypes.of("lm_head"))).contiguous(),
        }
        for part in range(parts)
    ]


def shards(
    config: DecoderConfig,
    dtypes: Dtypes,
    parts: int,
    style: Style,
    seed: int,
    device: torch.device | str = "cpu",
    devices: Sequence[torch.device | str] | None = None,
) -> list[Weights]:
    """Returns the weights of each of `parts` ranks on its one of `devices` (left out: all on `device`): those
    of the model's directory if it holds any, else random by `seed`, drawn on `device` (another one draws
    other numbers). A whole layer exists only until it is cut. Raises InputError for a directory whose weights
    cannot be read."""
    source = read_checkpoint(config, device) if config.weights else drawn(config, seed, device)
    places = devices or [device] * parts
    outside = [
        moved(found, place)
        for found, place in zip(_outside(source.outside(), config, dtypes, parts), places, strict=True)
    ]
    layers: list[list[Matrices]] = [[] for _ in range(parts)]
    for number in range(config.layers):
        whole, linear = source.layer(number), config.layer_mixers[number] in STATEFUL
        for part, place in enumerate(places):
            own = _layer_of(whole, config, dtypes, part, parts, style, linear=linear)
            layers[part].append(moved(own, place))
    return [Weights(tuple(layers[part]), outside[part], source.constants) for part in range(parts)]


# -- all of a decoder except attention --------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Body:
    """A rank's weights and activations; projections, norms, MLP, head, and the collectives between ranks.

    `x` is the residual stream [rows, hidden], or this rank's columns of it if the style scatters it; `y` is
    what the next residual adds; `heads` is the attention's output [rows, q_heads head_dim]. This rank is
    number `part` of `parts`.
    """

    config: DecoderConfig
    dtypes: Dtypes
    style: Style
    weights: Weights
    part: int
    parts: int
    angles: "Angles"
    layer: int = 0
    # The rows that the head reads; None: the last ones.
    last_rows: Tensor | None = None
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    buffers: Matrices = field(default_factory=dict)

    @property
    def scattered(self) -> bool:
        """Whether each rank holds only a part of the columns of x."""
        return self.style != "all_reduce" and self.parts > 1

    @property
    def activation(self) -> torch.dtype:
        """The dtype of activations."""
        return torch_dtype(self.dtypes.activation)

    def execute(self, op: Op) -> None:
        """Runs a local op, except ops that depend on positions and caches."""
        {
            "embedding": self._embed,
            "norm": self._norm,
            "matmul": self._multiply,
            "activation": self._activate,
            "silu": self._silu,
            "product": self._product,
            "residual": self._add,
            "sample": self._choose,
        }[op.kind](op)
        self.skip(op)

    def skip(self, op: Op) -> None:
        """Continues after an op, executed or skipped."""
        self.layer = layer_after(op, self.layer)

    def _weight(self, name: str) -> Tensor:
        return self.weights.of(name, self.layer)

    def _embed(self, op: Op) -> None:
        x = run_kernel(op, self.ids, self._weight(op.name)).to(self.activation)
        self.buffers["x"] = self._own(x) if self.scattered else x

    def _own(self, x: Tensor) -> Tensor:
        return _columns(x, self.part, self.parts).contiguous()

    def _norm(self, op: Op) -> None:
        if op.name == "qk_norm":
            qkv, d = self.buffers["qkv"], self.config.head_dim
            gain = self._weight(op.name)
            normed = qkv.view(len(qkv), -1, d)[:, : len(gain)]
            gains = gain.expand(len(qkv), *gain.shape).reshape(-1, d)
            rows = run_kernel(op, normed.reshape(-1, d), gains, self.weights.constants.eps)
            normed.copy_(rows.view(normed.shape))
            return
        if op.name == "heads_norm":
            heads = self.buffers["heads"]
            rows = heads.reshape(-1, op["hidden"])
            gain = torch.ones(op["hidden"], dtype=rows.dtype, device=rows.device)
            self.buffers["heads"] = run_kernel(op, rows, gain, self.weights.constants.eps).view(heads.shape)
            return
        x = self.buffers["gathered" if self.scattered else "x"]
        if op.name == "head_norm":
            x = self._ending(x, op["tokens"])
        self.buffers["normed"] = run_kernel(op, x, self._weight(op.name), self.weights.constants.eps)

    def _ending(self, x: Tensor, rows: int) -> Tensor:
        """Returns the rows that get a next token."""
        return x[-rows:] if self.last_rows is None else x[self.last_rows]

    def _multiply(self, op: Op) -> None:
        x = self.buffers[READS.get(op.name, "normed")]
        if op.name == "lm_head" and not self.config.final_norm:
            x = self._ending(self.buffers["gathered" if self.scattered else "x"], op["m"])
        y = run_kernel(op, x, self._weight(op.name))
        y, parallel = y.to(self.activation), self.config.parallel_residual
        if op.name == "lm_head":
            # Columns beyond the vocabulary are never chosen.
            y[:, max(0, self.config.vocab - self.part * y.shape[1]) :] = -torch.inf
        elif op.name == "down" and parallel:
            y = self.buffers["y"] + y
        elif op.name == "o" and parallel and y.shape[1] < self.config.hidden:
            # Whole sums of this rank's columns, which the MLP's reduction adds to zeros of other ranks.
            own, y = y, torch.zeros(len(y), self.config.hidden, dtype=y.dtype)
            _columns(y, self.part, self.parts).copy_(own)
        self.buffers[WRITES.get(op.name, op.name)] = y

    def _activate(self, op: Op) -> None:
        if op.name == "heads_gate":
            self.buffers["heads"] = run_kernel(op, self._gate(), self.buffers["heads"])
            return
        self.buffers["inner"] = run_kernel(op, *mlp_inputs(self.buffers))

    @property
    def linear(self) -> LinearPart:
        """The linear attention of layers that have it, with this rank's heads."""
        return LinearPart(self.config, self.part, self.parts)

    def _gate(self) -> Tensor:
        return self.linear.split(self.buffers["qkv"])[2].contiguous()

    def _silu(self, op: Op) -> None:
        qk = self.linear.split(self.buffers["qkv"])[0]
        self.buffers["qk"] = run_kernel(op, qk.flatten(1)).view(qk.shape)

    def _product(self, op: Op) -> None:
        if op.name == "heads_gate":
            self.buffers["heads"] = run_kernel(op, self._gate(), self.buffers["heads"])
            return
        self.buffers["inner"] = run_kernel(op, *mlp_inputs(self.buffers))

    def turn_linear(self, op: Op, cos: Tensor, sin: Tensor) -> None:
        """Turns q and k of a layer of linear attention by the angles of each row [rows, key_dim // 2]."""
        q, k, _ = run_kernel(op, self.linear.for_rotary(self.buffers["qkv"]), cos, sin)
        self.buffers["qk"] = torch.cat((q, k), 1)

    def widen_linear(self, op: Op, positions: Tensor) -> None:
        """Makes q and k of the rows at these positions twice as wide."""
        qk = self.buffers["qk"]
        self.buffers["qk"] = run_kernel(op, qk, *self.linear.angles(positions, qk.dtype))

    def linear_operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k [rows, heads, rank] and v [rows, heads, dim] of a layer of linear attention."""
        linear = self.linear
        return linear.operands(self.buffers["qk"], linear.split(self.buffers["qkv"])[1])

    def _add(self, op: Op) -> None:
        run_kernel(op, self.buffers["y"], self.buffers["x"])

    def _choose(self, op: Op) -> None:
        logits = self.buffers["logits"]
        # If logits are not gathered, each rank continues with the best id of its slice of the vocabulary.
        first = self.part * logits.shape[1] if self.scattered else 0
        self.ids = (run_kernel(op, logits) + first).clamp_max_(self.config.vocab - 1)

    def meet(self, op: Op, bodies: Sequence["Body"]) -> None:
        """Runs a collective between tensor-parallel ranks. Raises ValueError for other kinds."""
        if op.kind not in ("all_reduce", "reduce_scatter", "all_gather"):
            raise ValueError(f"the torch machine has no {op.kind} {op.name}")
        gathers = op.kind == "all_gather"
        source, target = GATHERED.get(op.name, ("x", "gathered")) if gathers else ("y", "y")
        whole = together(op, [body.buffers[source] for body in bodies])
        for body in bodies:
            body.buffers[target] = body._own(whole) if op.kind == "reduce_scatter" else whole


@dataclass(slots=True, eq=False)
class Angles:
    """cos and sin of the rotary angles of positions 0, 1, ..., computed for more positions when needed."""

    head_dim: int
    dtype: torch.dtype
    frequencies: Tensor | None = None
    known: tuple[Tensor, Tensor] | None = None

    def of(self, first: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of `tokens` positions from `first` on, [tokens, head_dim // 2] each."""
        last = first + tokens
        if self.known is None or len(self.known[0]) < last:
            self.known = angles(torch.arange(2 * last), self.head_dim, self.dtype, self.frequencies)
        cos, sin = self.known
        return cos[first:last], sin[first:last]


# -- decode with one batch -------------------------------------------------------------------------------


class _Speculated(NamedTuple):
    """What a group sends to another early: the attention's output and, if the other lacks them, token, layer,
    x, normed, and the layer's new K and V."""

    heads: Tensor
    beside: tuple[int, int, Matrices, Tensor, Tensor] | None


@dataclass(eq=False, repr=False)
class DecoderState(State):
    """One rank's buffers for the graphs of `simcore.models.decoder.Decoder`.

    `k`, `v`: [layers] of [batch, kv_heads, capacity, head_dim]; `start`: the position of the first token;
    `states`: of the layers of linear attention, [layers] of [batch, heads, rank, dim].
    `chosen`: ids [batch] by token, if this rank chose them; `errors`: ||speculated - exact|| / ||exact|| by
    token and layer, the largest over the sequences; `attended_exactly`: whether this rank computed the last
    speculative attention (False: skipped it), `attended_exactly_at`: the same by token, when its id was
    chosen. `first`: the op that begins a token; with layers alone it is not the embedding, and x continues
    from token to token.

    The source of an exchange is the rank that computed x; if both did, one of them from the speculated
    output, it is the rank that attended exactly.
    """

    body: Body
    k: list[Tensor]
    v: list[Tensor]
    start: int
    first: str
    states: list[Tensor] = field(default_factory=list)
    chosen: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[tuple[int, int], float] = field(default_factory=dict)
    attended_exactly: bool = False
    attended_exactly_at: dict[int, bool] = field(default_factory=dict)
    _fresh: bool = False
    _token: int = -1
    _norms: Tensor = field(default_factory=lambda: torch.zeros(0))
    _new: tuple[Tensor, ...] = ()
    _received: deque[_Speculated] = field(default_factory=deque)

    @property
    def logits(self) -> Tensor:
        """Logits of the last token, [batch, vocab] or this rank's columns of it, padded with -inf."""
        return self.body.buffers["logits"]

    @property
    def _position(self) -> int:
        return self.start + self._token

    # -- ops ---------------------------------------------------------------------------------------------

    def execute(self, op: Op) -> None:
        """Runs a local op."""
        own: dict[str, Callable[[Op], None]] = {
            "rotary": self._turn,
            "lrpe": self._widen,
            "kv_append": self._append,
            "decode_attention": self._attend,
            "linear_attention_decode": self._mix,
            "speculative_attention": self._speculate,
            "receive_speculation": self._receive,
        }
        if op.name == self.first:
            self._token += 1
            self.body.layer = 0
        own.get(op.kind, self.body.execute)(op)
        if op.name == "embedding" or op.name in LAYER_ENDS:
            self._fresh = True
        if op.kind == "sample":
            self.chosen[self._token] = self.body.ids
            self.attended_exactly_at[self._token] = self.attended_exactly

    def skip(self, op: Op) -> None:
        """Passes over an op of a launch that its flag skipped."""
        self._token += op.name == "embedding"
        self.body.skip(op)
        if op.name == "embedding" or op.name in LAYER_ENDS:
            self._fresh = False
        if op.kind == "speculative_attention":
            self.attended_exactly = False

    def _turn(self, op: Op) -> None:
        batch = op["tokens"]
        cos, sin = self.body.angles.of(self._position, 1)
        if self.states and self.body.linear.stateful(self.body.layer):
            self.body.turn_linear(op, cos.expand(batch, -1), sin.expand(batch, -1))
            return
        qkv = self.body.buffers["qkv"]
        self._new = run_kernel(op, qkv, cos.expand(batch, -1), sin.expand(batch, -1))

    def _widen(self, op: Op) -> None:
        self.body.widen_linear(op, torch.tensor([self._position]).expand(op["tokens"]))

    def _mix(self, op: Op) -> None:
        state = self.states[self.body.layer]
        decay = self.body.linear.decay(self.body.layer, state.device)
        self._set_heads(run_kernel(op, *self.body.linear_operands(), state, decay))

    def _append(self, op: Op) -> None:
        _, k, v = self._new
        run_kernel(op, k, v, *self._slots())

    def _slots(self) -> list[Tensor]:
        """Returns the places of the new token's K and V in the cache, [batch, kv_heads, head_dim] each."""
        return [cache[self.body.layer][:, :, self._position] for cache in (self.k, self.v)]

    def _operands(self, op: Op) -> tuple[Tensor, ...]:
        # The last tokens: all of them, unless the layer has a window.
        last = self._position + 1
        seen = slice(last - op["context"], last)
        k, v = (cache[self.body.layer][:, :, seen] for cache in (self.k, self.v))
        return self._new[0].to(k.dtype), k, v

    def _attend(self, op: Op) -> None:
        self._set_heads(run_kernel(op, *self._operands(op)))

    def _set_heads(self, heads: Tensor) -> None:
        self.body.buffers["heads"] = heads.flatten(1).to(self.body.activation)

    def _speculate(self, op: Op) -> None:
        exact, speculated, self._norms = run_kernel(op, *self._operands(op))
        self._set_heads(exact)
        self.body.buffers["speculated"] = speculated.flatten(1).to(self.body.activation)
        self.attended_exactly = True
        self._note_error()

    def _note_error(self) -> None:
        difference, exact = self._norms.sum(-1)
        self.errors[self._token, self.body.layer] = float((difference / exact).max().sqrt())

    def hits(self, token: int, layer: int, threshold: float) -> bool:
        """Whether the data say yes: ||speculated - exact|| < threshold ||exact||, for all sequences."""
        return self.errors[token, layer] < threshold

    # -- between ranks -------------------------------------------------------------------------------------

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Runs a collective of all states along an axis."""
        if op.kind == "exchange_priority":
            _exchange(states)
        elif op.name == "verify_reduce":
            total = torch.stack([state._norms for state in states]).sum(0)
            for state in states:
                state._norms = total
                state._note_error()
        else:
            self.body.meet(op, [state.body for state in states])

    def put(self, publication: Publication, to: Any) -> None:
        """Sends the speculated output, in a larger publication also x, normed and the new K and V."""
        buffers, more = self.body.buffers, None
        if publication.put["elements"] > buffers["speculated"].numel():
            beside = {name: buffers[name].clone() for name in ("x", "normed")}
            k, v = (slot.clone() for slot in self._slots())
            more = (self._token, self.body.layer, beside, k, v)
        to._received.append(_Speculated(buffers["speculated"], more))

    def _receive(self, op: Op) -> None:
        heads, beside = self._received.popleft()
        if beside is not None:
            self._token, self.body.layer, buffers, k, v = beside
            self.body.buffers.update(buffers)
            for slot, new in zip(self._slots(), (k, v), strict=True):
                slot.copy_(new)
        x = torch.empty_like(heads)
        run_kernel(op, heads, x)
        self.body.buffers["heads"] = x


def _exchange(states: Sequence[DecoderState]) -> None:
    """Copies residual stream, and the layer's new K and V, from the rank that holds them to the others."""
    fresh = [state for state in states if state._fresh]
    holder = next((state for state in fresh if state.attended_exactly), None) if len(fresh) > 1 else None
    source = holder or fresh[0]
    inside = source.body.layer < source.body.config.layers
    for state in states:
        if state is source:
            continue
        for name in ("x", "normed"):
            state.body.buffers[name] = source.body.buffers[name].clone()
        if inside:
            for slot, new in zip(state._slots(), source._slots(), strict=True):
                slot.copy_(new)


def bodies(
    config: DecoderConfig,
    dtypes: Dtypes,
    style: Style,
    mesh: layout.Mesh,
    seed: int,
    weights: Sequence[Weights] | None = None,
) -> Iterator[Body]:
    """Yields the body of every rank of a mesh: shards along "tensor", copies along the other axes. `weights`:
    those shards, if they are there already."""
    parts, act = mesh.get(TENSOR, 1), torch_dtype(dtypes.activation)
    if weights is None:
        weights = shards(config, dtypes, parts, style, seed)
    for rank in range(prod(mesh.values())):
        part = layout.coordinate(mesh, rank, TENSOR)
        turns = Angles(config.head_dim, act, weights[part].constants.frequencies)
        yield Body(config, dtypes, style, weights[part], part, parts, turns)


def check_ranks(model: Decoder | ServedDecoder, mesh: layout.Mesh) -> None:
    """Raises ValueError if a model is not for as many ranks as a mesh has along "tensor"."""
    if model.ranks != mesh.get(TENSOR, 1):
        raise ValueError(f"a model for {model.ranks} ranks on {mesh.get(TENSOR, 1)} of them")


def check_decoder(model: Decoder, mesh: layout.Mesh) -> None:
    """As `check_ranks`; also raises ValueError for parts that cannot be executed and for a symbolic batch."""
    check_ranks(model, mesh)
    if model.parts or isinstance(model.batch, Size):
        raise ValueError("the torch machine needs every op of a layer, and a batch that is a number")


class Beginning(NamedTuple):
    """The start of a decoder's run: ids [batch], the caches of every rank and, for layers alone, the residual
    stream x [batch, hidden] that the first layer reads."""

    ids: Tensor
    caches: list[Caches]
    x: Tensor | None


def beginning(
    model: Decoder,
    mesh: layout.Mesh,
    seed: int,
    context: int,
    tokens: int,
    *,
    devices: Sequence[torch.device | str],
    drawn_on: torch.device | str,
) -> Beginning:
    """Draws by a seed: caches for `context` + `tokens` tokens, the first `context` - 1 filled, of each rank
    on its device; and the next ids, on the first one. `drawn_on`: the device whose generator draws the
    numbers; another device draws others."""
    config, batch, dtype = model.config, model.batch, torch_dtype(model.dtypes.kv)
    assert isinstance(batch, int)
    generator = torch.Generator(drawn_on).manual_seed(seed + 1)
    ids = torch.randint(config.vocab, (batch,), generator=generator, device=drawn_on).to(devices[0])
    parts = [layout.coordinate(mesh, rank, TENSOR) for rank in range(prod(mesh.values()))]
    ranks = [kv_heads_of(config, part, model.ranks) for part in parts]
    caches: list[Caches] = [([], []) for _ in ranks]
    for mixer in config.layer_mixers:
        for which in range(2):
            if mixer in STATEFUL:
                for cache, device in zip(caches, devices, strict=True):
                    cache[which].append(torch.zeros(0, dtype=dtype, device=device))
                continue
            for cache, heads, device in zip(caches, ranks, devices, strict=True):
                shape = (batch, heads.stop - heads.start, context + tokens, config.head_dim)
                cache[which].append(torch.zeros(shape, dtype=dtype, device=device))
            # One sequence at a time: the memory to draw all of them would leave holes as large as a cache.
            for i in range(batch):
                drawn = normal(generator, config.kv_heads, context - 1, config.head_dim, scale=1.0)
                for cache, heads in zip(caches, ranks, strict=True):
                    held = cache[which][-1]
                    held[i, :, : context - 1] = drawn[heads].to(held.device, dtype)
    x = None if model.outside else normal(generator, batch, config.hidden, scale=1.0).to(devices[0])
    return Beginning(ids, caches, x)


def decoder_states(
    model: Decoder, mesh: layout.Mesh, seed: int, context: int, tokens: int
) -> list[DecoderState]:
    """Returns a state for every rank of a mesh, for `tokens` tokens from `context` on; see this file's head.

    Raises ValueError if the model is not for as many ranks as the mesh has along "tensor", is made of parts
    that cannot be executed, or has a number format that torch does not compute in.
    """
    check_decoder(model, mesh)
    ranks = list(bodies(model.config, model.dtypes, model.style, mesh, seed))
    cpus = ["cpu"] * len(ranks)
    ids, caches, x = beginning(model, mesh, seed, context, tokens, devices=cpus, drawn_on="cpu")
    for body in ranks:
        body.ids = ids.clone()
        if x is not None:
            own = body._own(x) if body.scattered else x.clone()
            body.buffers["x"] = own.to(body.activation)
    first = "embedding" if model.outside else "attn_norm"
    return [
        DecoderState(body, k, v, context - 1, first, states_of(model, body.part, body.activation, seed))
        for body, (k, v) in zip(ranks, caches, strict=True)
    ]


def states_of(model: Decoder, part: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Returns the states of linear attention with which rank `part` of a decoder begins."""
    assert isinstance(model.batch, int)
    return drawn_states(model.config, part, model.ranks, model.batch, dtype, seed)
