"""The buffers of one rank that serves: a KV cache for each request, and its tokens, of prompt and answer.

    rows of a step      prompts' tokens now, then a token of each decoding sequence
    row at position p   reads token p of its request, writes K and V at p, attends over tokens 0 .. p
    token p + 1         argmax of the logits of a prompt's last row, and of each decoding row

A launch says whose tokens it computes (`workload.requests.Batch`); a request's answer is then the same
whoever runs beside it. A launch that does not say so is given sequences of no request, among which its totals
are split evenly. Prompts are random by a seed: a text is the same in all requests that share it.

A request that ends leaves the memory. With prefix caching others begin where it ends: it stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import isnan
from typing import Any

import torch
from torch import Tensor

from simcore.kernels.decoder.attention import evenly
from simcore.machine import mesh as layout
from simcore.models.decoder_config import DecoderConfig
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op, prompts
from simcore.validate.machines.buffers.decoder import Body, Weights, bodies, check_ranks
from simcore.validate.machines.buffers.linear import normal_states
from simcore.validate.machines.state import State, run_kernel, torch_dtype
from simcore.workload.requests import Batch, Request, own_text

# Places among all ids at which a text may begin, and the multiplier that spreads texts over them
# (2^64 over the golden ratio: Fibonacci hashing, Knuth, TAOCP 3, 6.4).
TEXTS, SPREAD = 1 << 20, 0x9E3779B97F4A7C15


def prompt_ids(request: Request, vocab: int, seed: int) -> Tensor:
    """Returns the ids of a request's prompt, int64 [prompt_tokens]: equal where texts are equal. They are
    read-only."""
    ids, parts, first = _all_ids(vocab, seed), [], 0
    for text, end in (*request.content, (own_text(request.id), request.prompt_tokens)):
        last = min(end, request.prompt_tokens)
        if last > first:
            parts.append(_stretch(ids, _place(text), first, last))
            first = last
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@lru_cache(maxsize=4)
def _all_ids(vocab: int, seed: int) -> Tensor:
    """Returns the ids of which each text is a stretch. To draw those of a text when its request comes would
    take the host of a card longer than all else that it does then."""
    return torch.randint(vocab, (2 * TEXTS,), generator=torch.Generator().manual_seed(seed))


def _place(text: int) -> int:
    """Returns where a text begins among all ids."""
    # Texts of requests are negative.
    number = 2 * abs(text) + (text < 0)
    return (number * SPREAD % (1 << 64)) * TEXTS >> 64


def _stretch(ids: Tensor, place: int, first: int, last: int) -> Tensor:
    if place + last <= len(ids):
        return ids[place + first : place + last]
    # A text of more than TEXTS tokens goes on at the beginning.
    return ids[torch.arange(place + first, place + last) % len(ids)]


def anonymous(sizes: Mapping[str, int]) -> Batch:
    """Returns a batch of sequences of no request with the totals of a launch, as even as can be."""
    new, now, cached = [], [], []
    if tokens := sizes.get("prompt_tokens", 0):
        count = prompts(tokens, sizes["prompt_kv"], sizes["prompt_pairs"])
        now, cached = evenly(tokens, count), evenly(sizes["prompt_kv"] - tokens, count)
    sequences = sizes.get("sequences", 0)
    kv = evenly(sizes["kv_tokens"], sequences) if sequences else []
    for i, tokens in enumerate([*(a + b for a, b in zip(now, cached, strict=True)), *kv]):
        new.append(Request(-1 - i, 0.0, tokens, 1, 1))
    first = [(r, a, b) for r, a, b in zip(new, now, cached, strict=False)]
    return Batch(first, [(r, n - 1) for r, n in zip(new[len(first) :], kv, strict=True)])


def check_totals(batch: Batch, sizes: Mapping[str, int]) -> None:
    """Raises ValueError for a batch of other totals than a launch's sizes; slots between others that hold
    nothing are rows without a sequence."""
    now = sum(tokens for _, tokens, _ in batch.prompts)
    all_ = sum(tokens + first for _, tokens, first in batch.prompts)
    count = len(batch.decoding)
    cached = [first for _, _, first in batch.prompts] + [first for _, first in batch.decoding]
    *wanted, sequences = (sizes.get(name, 0) for name in ("prompt_tokens", "prompt_kv", "sequences"))
    fits = [now, all_] == wanted and count <= sequences and (count > 0 or not sequences)
    if not fits or min(cached, default=0) < 0:
        raise ValueError(
            f"batch: {now} prompt tokens of {all_}, {count} sequences, in a launch of {dict(sizes)}"
        )


@dataclass(slots=True, eq=False)
class Held:
    """A request's tokens, and their K and V [layers, 2, capacity, kv_heads, head_dim], of which `cached` are
    there; `states`: after them, of layers of linear attention, [layers] of [1, heads, rank, dim]."""

    request: Request
    tokens: list[int]
    kv: Tensor
    cached: int = 0
    states: Sequence[Tensor] = ()

    def keys_values(self, layer: int, last: int) -> Sequence[Tensor]:
        """Returns views of a layer's K and V of the first `last` tokens, [last, kv_heads, head_dim] each."""
        k, v = self.kv[layer, :, :last]
        return k, v


@dataclass(frozen=True, slots=True)
class Part:
    """A request's `rows` of a step, at positions `first` to `last` - 1; `ends`: it gets a next token."""

    held: Held
    rows: slice
    first: int
    last: int
    ends: bool


@dataclass(eq=False, repr=False)
class ServedState(State):
    """One rank's buffers for the graphs of `simcore.models.served_decoder.ServedDecoder`.

    `kv_tokens`: tokens that the cache has room for, over all requests. `shared_text`: whether prompts may
    begin alike. `answers`: the ids that each request was given, by its number. There is one set of
    activations: launches on several streams may meet other ranks only in lockstep. Raises ValueError if a
    step attends over, appends or moves more tokens than the cache holds.
    """

    body: Body
    kv_tokens: int
    kv_size: tuple[int, int, int]
    dtype: torch.dtype
    seed: int
    shared_text: bool = False
    answers: dict[int, list[int]] = field(default_factory=dict)
    _held: dict[int, Held] = field(default_factory=dict)
    _with_text: dict[int, list[Held]] = field(default_factory=dict)
    _prompts: list[Part] = field(default_factory=list)
    _decoding: list[Part] = field(default_factory=list)
    _moved: list[Held] = field(default_factory=list)
    _slot_tokens: int = 0
    _new: tuple[Tensor, ...] = ()
    _at: list[int] = field(default_factory=list)

    # -- whose tokens a step computes ----------------------------------------------------------------------

    def begin(self, batch: Batch | None, sizes: Mapping[str, int], replay: int) -> None:
        """Notes whose tokens the next replay computes."""
        # Sizes are the replay's own: those of no request begin where it begins.
        batch, ran = (anonymous(sizes), 0) if batch is None else (batch, replay)
        check_totals(batch, sizes)
        self._drop_others(batch)
        rows, most = 0, batch.slot_tokens
        self._prompts, self._decoding = [], []
        for request, tokens, first in batch.prompts:
            held, last = self._of(request, first, first + tokens), first + tokens
            if first == 0:
                # Of a new request, or of one that was preempted: it begins without a state.
                for state in held.states:
                    state.zero_()
            # A sequence of no request has no end.
            ends = last == len(held.tokens) and request.id >= 0
            self._prompts.append(Part(held, slice(rows, rows + tokens), first, last, ends))
            rows += tokens
        for request, cached in batch.decoding:
            first = cached + ran if most is None else min(cached + ran, most - 1)
            part = Part(self._of(request, first, first + 1), slice(rows, rows + 1), first, first + 1, True)
            self._decoding.append(part)
            rows += 1
        self._moved = [self._held[request.id] for request in batch.moved]
        self._slot_tokens = most or 0
        self.body.last_rows = self._last_rows(rows, sizes)

    def take_back_answers(self) -> None:
        """Takes back what all requests were answered: their prompts are computed again."""
        for held in self._held.values():
            del held.tokens[held.request.prompt_tokens :]

    def _last_rows(self, rows: int, sizes: Mapping[str, int]) -> Tensor:
        """Returns the rows that get a next token, filled up to those of the launch by its last one."""
        found = [part.rows.stop - 1 for part in self._parts if part.ends]
        wanted = sizes.get("rows", 0)
        if rows > sizes.get("tokens", rows) or len(found) > wanted:
            raise ValueError(f"{rows} rows, of which {len(found)} get a token, in a launch of {dict(sizes)}")
        return torch.tensor(found + [sizes.get("tokens", 0) - 1] * (wanted - len(found)))

    @property
    def _parts(self) -> list[Part]:
        return [*self._prompts, *self._decoding]

    def _drop_others(self, batch: Batch) -> None:
        """Forgets requests that have ended, unless this batch computes them on or others may begin alike."""
        if self.shared_text:
            return
        here = {r.id for r, *_ in batch.prompts} | {r.id for r, _ in batch.decoding}
        ended = [id_ for id_, held in self._held.items() if not isnan(held.request.finish_s)]
        for id_ in ended:
            if id_ not in here:
                del self._held[id_]

    def _of(self, request: Request, first: int, last: int) -> Held:
        """Returns the tokens and the cache of a request, with room for `last` tokens and `first` of them
        there."""
        held = self._held.get(request.id)
        if held is None:
            room = self._room(max(last, request.prompt_tokens + request.max_tokens))
            states = self.body.linear.states(1, self.body.activation)
            held = self._held[request.id] = Held(request, self._prompt_of(request), room, states=states)
            if self.shared_text:
                for text in (own_text(request.id), *(text for text, _ in request.content)):
                    self._with_text.setdefault(text, []).append(held)
        if last > held.kv.shape[2]:
            room = self._room(2 * last)
            room[:, :, : held.cached] = held.kv[:, :, : held.cached]
            held.kv = room
        if first > held.cached:
            self._fill(held, first)
        while len(held.tokens) < last:
            held.tokens.append(len(held.tokens) % self.body.config.vocab)
        held.cached = last
        return held

    def _prompt_of(self, request: Request) -> list[int]:
        """Returns the ids of a prompt. A text with another request's answer continues as it was answered."""
        ids = prompt_ids(request, self.body.config.vocab, self.seed).tolist()
        first = 0
        for text, last in request.content:
            other = self._held.get(own_text(text))
            if other is not None:
                said = other.tokens[first : min(last, len(ids))]
                ids[first : first + len(said)] = said
            first = last
        return ids

    def _room(self, tokens: int) -> Tensor:
        layers, heads, d = self.kv_size
        return torch.empty(layers, 2, tokens, heads, d, dtype=self.dtype)

    def _fill(self, held: Held, first: int) -> None:
        """Puts the first tokens into a cache that lacks them: as another request has them that begins alike,
        else, for sequences of no request, random ones."""
        text = next((text for text, last in held.request.content if last >= first), None)
        like = [other for other in self._with_text.get(text, ()) if other.cached >= first] if text else []
        missing = held.kv[:, :, held.cached : first]
        if like:
            missing.copy_(like[0].kv[:, :, held.cached : first])
        else:
            generator = torch.Generator().manual_seed(self.seed)
            missing.copy_(torch.randn(missing.shape, generator=generator))
            normal_states(held.states, generator)

    # -- ops -------------------------------------------------------------------------------------------------

    def execute(self, op: Op) -> None:
        """Runs a local op."""
        own: dict[str, Callable[[Op], None]] = {
            "embedding": self._embed,
            "rotary": self._turn,
            "silu": self._silu,
            "lrpe": self._widen,
            "linear_attention_decode": self._mix_decoding,
            "linear_attention_prompts": self._mix_prompts,
            "kv_append": self._append,
            "paged_attention": self._attend_paged,
            "prefill_attention": self._attend_prompts,
            "kv_copy": self._move,
            "sample": self._choose,
        }
        own.get(op.kind, self.body.execute)(op)

    def skip(self, op: Op) -> None:
        """Passes over an op."""
        self.body.skip(op)

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Runs a collective between the ranks of one server."""
        self.body.meet(op, [state.body for state in states])

    def _embed(self, op: Op) -> None:
        ids = [token for part in self._parts for token in part.held.tokens[part.first : part.last]]
        # Slots between others that hold nothing are computed too.
        self.body.ids = torch.tensor(ids + [0] * (op["tokens"] - len(ids)))
        self._at = [at for part in self._parts for at in range(part.first, part.last)]
        self._at += [0] * (op["tokens"] - len(ids))
        self.body.execute(op)

    def _turn(self, op: Op) -> None:
        cos, sin = self.body.angles.of(0, max(self._at) + 1)
        if self._stateful:
            self.body.turn_linear(op, cos[self._at], sin[self._at])
            self._empty_heads()
            return
        self._new = run_kernel(op, self.body.buffers["qkv"], cos[self._at], sin[self._at])
        # The attentions of this layer fill it: first the rows of prompts, then those of decoding sequences.
        self.body.buffers["heads"] = torch.zeros_like(self._new[0]).flatten(1)

    @property
    def _stateful(self) -> bool:
        return self.body.config.linear is not None and self.body.linear.stateful(self.body.layer)

    def _empty_heads(self) -> None:
        """Makes room for the outputs of this layer: of prompts, then of decoding sequences."""
        _, _, v = self.body.linear_operands()
        self.body.buffers["heads"] = torch.zeros_like(v).flatten(1)

    def _silu(self, op: Op) -> None:
        self.body.execute(op)
        self._empty_heads()

    def _widen(self, op: Op) -> None:
        self.body.widen_linear(op, torch.tensor(self._at))

    def _mix_prompts(self, op: Op) -> None:
        now = torch.tensor([part.last - part.first for part in self._prompts])
        self._mix(op, self._prompts, [part.held.states[self.body.layer][0] for part in self._prompts], now)

    def _mix_decoding(self, op: Op) -> None:
        own = [part.held.states[self.body.layer] for part in self._decoding]
        if own:
            together = torch.cat(own)
            self._mix(op, self._decoding, together)
            for state, after in zip(own, together, strict=True):
                state.copy_(after)

    def _mix(self, op: Op, parts: Sequence[Part], states: Tensor | list[Tensor], *lengths: Tensor) -> None:
        """Mixes the rows of some requests with their states."""
        if not parts:
            return
        rows = slice(parts[0].rows.start, parts[-1].rows.stop)
        operands = [x[rows] for x in self.body.linear_operands()]
        decay = self.body.linear.decay(self.body.layer, operands[0].device)
        out = run_kernel(op, *operands, states, *lengths, decay)
        self.body.buffers["heads"][rows] = out.flatten(1).to(self.body.activation)

    def _append(self, op: Op) -> None:
        self._check(op["tokens"], "appends")
        for part in self._parts:
            slots = [x[part.first :] for x in part.held.keys_values(self.body.layer, part.last)]
            run_kernel(op, *(x[part.rows] for x in self._new[1:]), *slots)

    def _check(self, tokens: int, what: str) -> None:
        if tokens > self.kv_tokens:
            raise ValueError(f"a step {what} {tokens:,} tokens; the KV cache has {self.kv_tokens:,}")

    def _attend_paged(self, op: Op) -> None:
        self._attend(op, self._decoding, torch.tensor([part.last for part in self._decoding]))

    def _attend_prompts(self, op: Op) -> None:
        now = torch.tensor([part.last - part.first for part in self._prompts])
        self._attend(op, self._prompts, now, torch.tensor([part.first for part in self._prompts]))

    def _attend(self, op: Op, parts: Sequence[Part], *lengths: Tensor) -> None:
        """Attends with the rows of some requests, each over its own tokens up to the row's."""
        self._check(op["kv_tokens"], "attends over")
        if not parts:
            return
        rows = slice(parts[0].rows.start, parts[-1].rows.stop)
        caches = [part.held.keys_values(self.body.layer, part.last) for part in parts]
        k, v = zip(*caches, strict=True)
        out = run_kernel(op, self._new[0][rows].to(self.dtype), k, v, *lengths)
        self.body.buffers["heads"][rows] = out.flatten(1).to(self.body.activation)

    def _choose(self, op: Op) -> None:
        self.body.execute(op)
        ending = [part for part in self._parts if part.ends]
        for part, chosen in zip(ending, self.body.ids.tolist(), strict=False):
            held = part.held
            held.tokens[part.last :] = [chosen]
            # A slot that is computed on after its request has ended may have been forgotten meanwhile.
            if isnan(held.request.finish_s):
                self.answers[held.request.id] = held.tokens[held.request.prompt_tokens :]

    def _move(self, op: Op) -> None:
        self._check(op["tokens"], "moves")
        for held in self._moved:
            room = self._room(max(self._slot_tokens, held.kv.shape[2]))
            both = min(self._slot_tokens, held.kv.shape[2])
            run_kernel(op, held.kv[:, :, :both], room[:, :, :both])
            held.kv = room


def served_states(
    model: ServedDecoder,
    mesh: layout.Mesh,
    seed: int,
    kv_tokens: int,
    shared_text: bool = False,
    weights: Sequence[Weights] | None = None,
) -> list[ServedState]:
    """Returns a state for every rank of a mesh, each with room for `kv_tokens` tokens; `weights`: of each
    rank along "tensor", if they are there already.

    Raises ValueError if the model is not for as many ranks as the mesh has along "tensor", is priced by whole
    iterations, or has a number format that torch does not compute in.
    """
    check_ranks(model, mesh)
    if model.whole:
        raise ValueError("the torch machine needs every op of an iteration")
    config: DecoderConfig = model.config
    size = config.layers, max(1, config.kv_heads // model.ranks), config.head_dim
    dtype = torch_dtype(model.dtypes.kv)
    return [
        ServedState(body, kv_tokens, size, dtype, seed, shared_text)
        for body in bodies(config, model.dtypes, model.style, mesh, seed, weights)
    ]
