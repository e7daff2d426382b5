"""A rank that serves on a card: the KV cache in blocks, and all tokens in one array that the steps read.

    known [places, positions]    the tokens of each request, of its prompt and its answer
    tables [places, blocks]      its blocks of K and V, PAGE tokens each
    step                         places, lengths, ends and first rows of a launch's sequences, and their slots
    states [slots, ..]           of layers of linear attention, a slot a sequence, beside its blocks

The device reads all of these, so one captured step serves all steps of as many rows, and the host need not
know what was chosen. Sizes are rounded up to `SEQUENCES` and `TOKENS`; rows beyond a step's own are padding,
which writes nothing. Rows of decoding sequences come before those of prompts. Each attend in one launch
(`decode_attention`, `ragged_attention`).

Blocks are given out here, a few ahead of the tokens; a schedule counts them but has no numbers of its own.
What has ended, and what was sent back, gives its blocks back when others need them. Each stream has a step of
its own, but prompts on other streams than "main" share one, and run one after another: as many captures as
streams and lengths would take minutes, and one prompt fills a card.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, isnan
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from simcore.input.files import InputError
from simcore.kernels.decoder.activation import activation
from simcore.kernels.decoder.attention import evenly
from simcore.kernels.decoder.choice import choose
from simcore.kernels.decoder.decode_attention import decode_attention
from simcore.kernels.decoder.matmul import product
from simcore.kernels.decoder.norm import norm
from simcore.kernels.decoder.paged_attention import PAGE
from simcore.kernels.decoder.ragged_attention import ragged_attention
from simcore.kernels.decoder.residual import residual
from simcore.kernels.decoder.rotary import angles, rotary_append
from simcore.kernels.decoder.slot_moves import slot_caches, slot_moves
from simcore.kernels.decoder.step_rows import StepRows, keep_chosen, step_room, step_rows, step_tables
from simcore.machine.machine import MAIN, Machine, Program, Ticket
from simcore.models.mixers import STATEFUL
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth, step_sizes
from simcore.ops.op import Graph, Op
from simcore.validate.machines.buffers.cuda_linear import CardLinear
from simcore.validate.machines.buffers.decoder import (
    READS,
    WRITES,
    Weights,
    kv_heads_of,
    layer_after,
    mlp_inputs,
)
from simcore.validate.machines.buffers.linear import LinearPart
from simcore.validate.machines.buffers.served import anonymous, check_totals, prompt_ids
from simcore.validate.machines.state import CardState, torch_dtype
from simcore.workload.requests import Batch, Request

# Blocks of the cache that a decoding sequence is given ahead.
AHEAD = 1
# The step of prompts on other streams than "main".
PROMPTS = "prompts"
# Bytes of pinned memory, and those at whose multiples numbers begin.
RING, ALIGNED = 1 << 27, 16
OF_NUMPY = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}
# Sequences and rows with which steps are captured.
SEQUENCES = (
    *range(1, 9),
    *range(10, 33, 2),
    *range(36, 65, 4),
    *range(72, 129, 8),
    *range(144, 257, 16),
    *range(288, 1025, 32),
    *range(1152, 4097, 128),
)
WITH_PROMPTS = (8, 32, 128, 256, 512, 1024, 2048, 4096)
# Of steps with prompts alone fewer are captured: many prompts at once are rare where sequences decode.
ALONE = (32, 256, 512, 1024, 2048, 4096)
TOKENS = (*range(16, 513, 16), *range(576, 1025, 64), *range(1152, 2049, 128))
# The layer, the sequences of a step, and whether both prompts and decoding sequences are in it.
Key = tuple[int, int, bool]
# Steps of more rows are launched anew each time: the host is then the faster one, and lengths are many.
MOST_CAPTURED = 2048


def rounded(count: int, steps: Sequence[int]) -> int:
    """Returns the least step that is not below a count. Raises InputError beyond the last one.

    >>> rounded(9, (1, 8, 16)), rounded(8, (1, 8, 16))
    (16, 8)
    """
    place = bisect_left(steps, count)
    if place == len(steps):
        raise InputError(
            f"--on cuda: strategies: a step of {count:,} sequences; {steps[-1]:,} at most are allowed"
            " (max_sequences, slots, max_batch, max_instances)"
        )
    return steps[place]


def rounded_rows(rows: int) -> int:
    """Returns the rows with which a step of so many is launched.

    >>> rounded_rows(130), rounded_rows(5000)
    (144, 5120)
    """
    return rounded(rows, TOKENS) if rows <= MOST_CAPTURED else -(-rows // PAGE) * PAGE


@dataclass(slots=True, eq=False)
class Held:
    """A request on the card: its row of `known` and `tables`, its blocks, and the slot of its states (0:
    none). `sent_back`: how often it had been preempted when its blocks were given out."""

    request: Request
    place: int
    blocks: list[int] = field(default_factory=list)
    sent_back: int = 0
    slot: int = 0


class Cache:
    """The KV cache of one rank, k and v [blocks, PAGE, kv_heads, d] of each layer of attention, the states of
    other layers, and the tokens of its requests.

    `positions`: the most tokens of a request; `running`: the requests that run at once at most, on as many
    streams; `places`: those whose tokens are kept; `frequencies`: see `angles`; `keeps_states`: whether
    requests have slots of states. Block 0 and slot 0 are no request's: padding reads them. Raises
    RuntimeError if a schedule runs more than there are blocks, slots or places for.
    """

    def __init__(
        self,
        model: ServedDecoder,
        kv_tokens: int,
        positions: int,
        running: int,
        places: int,
        seed: int,
        device: torch.device | str,
        frequencies: Tensor | None = None,
        *,
        keeps_states: bool = True,
    ) -> None:
        config, self.seed, self.device = model.config, seed, device
        heads = kv_heads_of(config, 0, model.ranks)
        # The last block of a sequence may hold a single token.
        blocks = 1 + ceil(kv_tokens / PAGE) + running
        attends = [layer for layer, mixer in enumerate(config.layer_mixers) if mixer not in STATEFUL]
        self.of_layer = {layer: place for place, layer in enumerate(attends)}
        size = (len(attends), 2, blocks, PAGE, heads.stop - heads.start, config.head_dim)
        self.kv = torch.zeros(size, dtype=torch_dtype(model.dtypes.kv), device=device)
        self.states = list[Tensor]()
        if config.linear is not None:
            act, slots = torch_dtype(model.dtypes.activation), 1 + running if keeps_states else 0
            self.states = LinearPart(config, 0, 1).states(slots, act, device)
        self.slots = running if self.states and keeps_states else 0
        self.vocab, self.positions = config.vocab, positions
        self.known = torch.zeros(places + 1, positions, dtype=torch.int64, device=device)
        self.tables = torch.zeros(places + 1, ceil(positions / PAGE), dtype=torch.int32, device=device)
        # What a shuffle copies, from block to block: K and V of each layer are a cache of their own.
        self.blocks = slot_caches(self.kv.flatten(0, 1), token_dim=1) if attends else None
        self.moves = torch.zeros(blocks, 2, dtype=torch.int32, device=device)
        self.move_count = torch.zeros(1, dtype=torch.int32, device=device)
        # In fp32, because large positions need it.
        every = torch.arange(positions, device=device)
        self.angles = angles(every, config.head_dim, torch.float32, frequencies)
        self._steps = torch.zeros(0, 0, dtype=torch.int32, device=device)
        # "main" and "prompts" besides.
        self.streams, self._streams = running + 2, dict[str, int]()
        # What each stream computes: its launches may still run.
        self.computed: dict[str, Batch] = {}
        self.send = Sender(device)
        self.held: dict[int, Held] = {}
        self.free_blocks, self.free_places, self.free_slots = list[int](), list[int](), list[int]()
        self.reset()

    def reset(self) -> None:
        """Forgets all requests."""
        self.held.clear()
        self.computed.clear()
        self.move_count.zero_()
        self.free_blocks[:] = range(self.kv.shape[2] - 1, 0, -1)
        self.free_places[:] = range(len(self.known) - 1, 0, -1)
        self.free_slots[:] = range(self.slots, 0, -1)

    def step_of(self, stream: str, size: int) -> Tensor:
        """Returns the int32 [size] that hold the steps of a stream. The memory of all streams is zeroed when
        the first one asks: a stream does not wait for what another one writes. Raises RuntimeError for more
        than there are places for."""
        if not self._streams:
            self._steps = torch.zeros(self.streams, size, dtype=torch.int32, device=self.device)
        place = self._streams.setdefault(stream, len(self._streams))
        if place >= self.streams:
            raise RuntimeError(f"more than {self.streams:,} streams serve on a card")
        return self._steps[place]

    def of(self, request: Request, last: int, ahead: int, writes: "Writes") -> Held:
        """Returns a request with blocks for `last` tokens, and up to `ahead` more. `writes`: gets what is to
        be written on the card."""
        held = self.held.get(request.id)
        if held is None:
            if not self.free_places:
                self.take_back()
            if not self.free_places:
                raise RuntimeError(f"no place is left for request {request.id}")
            held = self.held[request.id] = Held(request, self.free_places.pop())
            ids = prompt_ids(request, self.vocab, self.seed)
            writes.prompts.append((held.place, ids.numpy()))
        needed = ceil(last / PAGE) - len(held.blocks)
        if needed > 0:
            if needed + ahead > len(self.free_blocks):
                self.take_back()
            count = max(needed, min(needed + ahead, len(self.free_blocks) // 2))
            count = min(count, self.tables.shape[1] - len(held.blocks))
            if count > len(self.free_blocks):
                raise RuntimeError(f"no block is left for request {request.id} with {last:,} tokens")
            new = [self.free_blocks.pop() for _ in range(count)]
            first = held.place * self.tables.shape[1] + len(held.blocks)
            writes.entries += range(first, first + count)
            writes.blocks += new
            held.blocks += new
        if self.slots and not held.slot:
            if not self.free_slots:
                self.take_back()
            if not self.free_slots:
                raise RuntimeError(f"no slot is left for the states of request {request.id}")
            held.slot = self.free_slots.pop()
        held.sent_back = request.preemptions
        return held

    def take_back(self) -> None:
        """Takes the blocks of requests that have ended, and of those that were sent back, but not of those
        that a stream computes, though they may have ended."""
        here = {request.id for batch in self.computed.values() for request in requests_of(batch)}
        for id_, held in list(self.held.items()):
            if id_ in here:
                continue
            ended = not isnan(held.request.finish_s)
            if ended or held.request.preemptions > held.sent_back:
                self._empty(held)
            if ended:
                self.free_places.append(held.place)
                del self.held[id_]

    def _empty(self, held: Held) -> None:
        """Takes a request's blocks and its slot."""
        self.free_blocks += held.blocks
        self.free_slots += [held.slot] if held.slot else []
        held.blocks, held.slot = [], 0

    def forget_others(self) -> None:
        """Takes places, blocks and slots of sequences of no request."""
        for id_ in [id_ for id_ in self.held if id_ < 0]:
            held = self.held.pop(id_)
            self._empty(held)
            self.free_places.append(held.place)

    def answer(self, request: Request) -> list[int]:
        """Returns the ids that a request was given, as long as others have not taken its place."""
        first = request.prompt_tokens
        found: list[int] = self.known[
            self.held[request.id].place, first : first + request.output_tokens
        ].tolist()
        return found


def has_more_rows(prompt: tuple[Request, int, int]) -> bool:
    """Whether more than one token of a prompt is computed now; none has no token."""
    return prompt[1] > 1


def requests_of(batch: Batch) -> Iterator[Request]:
    """Yields the requests of a batch."""
    yield from (request for request, *_ in batch.prompts)
    yield from (request for request, _ in batch.decoding)
    yield from batch.moved


@dataclass(slots=True, eq=False)
class Writes:
    """What a launch writes on the card before it begins: prompts (place, ids), entries of the tables, blocks
    to copy (from, to), and the step."""

    prompts: list[tuple[int, NDArray[np.int64]]] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    moves: list[tuple[int, int]] = field(default_factory=list)
    step: NDArray[np.int32] | None = None


class Burst(NamedTuple):
    """A launch that only decodes: its tokens in all at the replay `replay`, and those that its blocks have
    room for, [sequences] each. Without a batch: no replay goes on by itself."""

    batch: Batch | None
    lengths: NDArray[np.int64]
    rooms: NDArray[np.int64]
    replay: int

    @classmethod
    def of(cls, batch: Batch, held: Sequence[Held], lengths: Sequence[int], replay: int) -> "Burst":
        """Returns the burst of a batch, if all its sequences grow by a token each replay."""
        if batch.prompts:
            return NO_BURST
        grow = all(length < (batch.slot_tokens or inf) for length in lengths)
        rooms = [len(each.blocks) * PAGE for each in held]
        return cls(batch if grow else None, np.array(lengths), np.array(rooms), replay)


NO_BURST = Burst(None, np.zeros(0, np.int64), np.zeros(0, np.int64), 0)


class CardServedState(CardState):
    """The step of one stream; see the head of this file. `most`: sequences of a step at most.

    Raises ValueError for a model whose results are combined in a way that a card does not run."""

    def __init__(
        self, model: ServedDecoder, weights: Weights, cache: Cache, most: int, stream: str = MAIN
    ) -> None:
        if model.whole or model.ranks > 1:
            raise ValueError("one rank serves on a card, with every op of an iteration")
        self.model, self.config, self.weights, self.cache = model, model.config, weights, cache
        self.stream, self.layer, self.streams = stream, 0, dict[str, CardServedState]()
        self.most = max(rounded(most, steps) for steps in (SEQUENCES, WITH_PROMPTS, ALONE))
        self.step = cache.step_of(stream, (5 if cache.slots else 4) * self.most + 1)
        self.linear: CardLinear | None = None
        if self.config.linear is not None:
            act = torch_dtype(model.dtypes.activation)
            self.linear = CardLinear(self.config, 0, 1, 0, act, cache.states, cache.device)
        self.buffers: dict[str, Tensor] = {}
        self._bound: Mapping[str, int] = {}
        self._count, self._returned = 0, list[int]()
        self._burst = NO_BURST
        self._rows: StepRows | None = None
        self._both = False
        self._methods: Mapping[str, Callable[[Op], None]] = {
            "embedding": self._embed,
            "norm": self._norm,
            "matmul": self._multiply,
            "rotary": self._turn,
            "kv_append": self._pass,
            "prefill_attention": self._attend_prompts,
            "paged_attention": self._attend_decoding,
            "activation": self._activate,
            "residual": self._add,
            "sample": self._choose,
            "kv_copy": self._move,
            "silu": self._silu,
            "lrpe": self._widen,
            "product": self._product,
            "linear_attention_prompts": self._mix_prompts,
            "linear_attention_decode": self._mix_decoding,
        }

    def on(self, stream: str) -> "CardServedState | SplitState":
        """Returns the steps of a stream."""
        return self if stream == self.stream else SplitState(self._other, stream)

    def _other(self, stream: str) -> "CardServedState":
        if stream not in self.streams:
            self.streams[stream] = CardServedState(self.model, self.weights, self.cache, self.most, stream)
        return self.streams[stream]

    def reset(self) -> None:
        """Forgets all requests."""
        self.cache.reset()
        for state in (self, *self.streams.values()):
            state.layer, state._burst = 0, NO_BURST
            state._returned.clear()

    # -- whose tokens a step computes ----------------------------------------------------------------------

    def begin(
        self, batch: Batch | None, sizes: Mapping[str, int], replay: int
    ) -> Callable[[], object] | None:
        """Gives out blocks for the next replay; returns the call that writes its step, if the card does not
        have it already: a replay goes on where the one before it ended."""
        if replay and batch is not None and batch is self._burst.batch:
            return self._go_on(self._burst, replay)
        writes, cache = Writes(), self.cache
        if batch is None:
            cache.forget_others()
        batch, ran = (anonymous(sizes), 0) if batch is None else (batch, replay)
        check_totals(batch, sizes)
        cache.computed[self.stream] = batch
        cache.free_blocks += self._returned
        self._returned.clear()
        # Prompts get their blocks first: decoding sequences get some ahead of what they need.
        prompts, more, ends, rows = self._prompts_of(batch, writes)
        decoding, lengths = self._decoding_of(batch, ran, writes)
        # Rows of decoding sequences come first.
        held, ones = [*decoding, *prompts], [1] * len(decoding)
        lengths, ends, rows = lengths + more, ones + ends, ones + rows
        if batch.moved:
            self._give_other_blocks(batch, writes)
        writes.step = self._step_of(held, lengths, ends, rows)
        self._burst = Burst.of(batch, decoding, lengths, ran)
        self._bound = self._bound_to(batch, len(held), sizes)
        # Steps are whole: each begins with the first layer.
        self.layer = 0
        self._count = self._bound.get("rows", 0)
        self._both = bool(batch.prompts and batch.decoding)
        return partial(self._write, writes)

    def _prompts_of(self, batch: Batch, writes: Writes) -> tuple[list[Held], list[int], list[int], list[int]]:
        """Returns the prompts of a batch, those of one row first (`_attend_prompts`), with blocks for their
        tokens; and of each its tokens in all, whether it comes to its end, and its rows."""
        found, lengths, ends, rows = list[Held](), list[int](), list[int](), list[int]()
        for request, tokens, first in sorted(batch.prompts, key=has_more_rows):
            found.append(self.cache.of(request, first + tokens, 0, writes))
            lengths.append(first + tokens)
            # A sequence of no request has no end.
            last = request.prompt_tokens + request.generated
            ends.append(int(first + tokens == last and request.id >= 0))
            rows.append(tokens)
        return found, lengths, ends, rows

    def _decoding_of(self, batch: Batch, ran: int, writes: Writes) -> tuple[list[Held], list[int]]:
        """Returns the decoding sequences of a batch after `ran` replays, with blocks for their tokens; and
        these tokens. It is most of the host's work in a step of many sequences."""
        cache, found, lengths = self.cache, list[Held](), list[int]()
        known, ahead, most = cache.held, self._ahead(batch), batch.slot_tokens or cache.positions
        for request, cached in batch.decoding:
            last = min(cached + 1 + ran, most)
            held = known.get(request.id)
            if held is None or last > len(held.blocks) * PAGE:
                held = cache.of(request, last, ahead if request.id >= 0 else 0, writes)
            else:
                held.sent_back = request.preemptions
            found.append(held)
            lengths.append(last)
        return found, lengths

    def _ahead(self, batch: Batch) -> int:
        return min(AHEAD, len(self.cache.free_blocks) // (4 * max(1, len(batch.decoding))))

    def _go_on(self, burst: "Burst", replay: int) -> Callable[[], object] | None:
        """Gives out blocks where sequences go beyond theirs; the card has the step itself."""
        assert burst.batch is not None
        lasts = burst.lengths + (replay - burst.replay)
        writes, ahead = Writes(), self._ahead(burst.batch)
        for i in np.flatnonzero(lasts > burst.rooms).tolist():
            held = self.cache.of(burst.batch.decoding[i][0], int(lasts[i]), ahead, writes)
            burst.rooms[i] = len(held.blocks) * PAGE
        self.layer = 0
        return partial(self._write, writes) if writes.entries else None

    def _step_of(
        self, held: list[Held], lengths: list[int], ends: list[int], rows: list[int]
    ) -> NDArray[np.int32]:
        count, most, found = len(held), self.most, np.zeros(len(self.step), np.int32)
        each = np.array(([one.place for one in held], lengths, ends, rows), np.int32)
        found[: 3 * most].reshape(3, most)[:, :count] = each[:3]
        each[3].cumsum(out=found[3 * most + 1 : 3 * most + 1 + count])
        found[3 * most + 1 + count : 4 * most + 1] = found[3 * most + count]
        if self.cache.slots:
            found[4 * most + 1 : 4 * most + 1 + count] = [one.slot for one in held]
        return found

    def _bound_to(self, batch: Batch, sequences: int, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the sizes with which a step is captured; its totals of the cache stand for any."""
        if not batch.prompts and not batch.decoding:
            # It moves slots.
            return {}
        if not batch.prompts:
            # Slots between others that hold nothing are computed too.
            count = rounded(max(sequences, sizes["tokens"]), SEQUENCES)
            return decode_sizes(count, count)
        tokens = rounded_rows(sizes["tokens"])
        count = rounded(sequences, WITH_PROMPTS if batch.decoding else ALONE)
        totals = dict.fromkeys(
            ("sequences", "kv_tokens", "prompt_tokens", "prompt_kv", "prompt_pairs"), tokens
        )
        return {**totals, "tokens": tokens, "rows": count, "over_mean": 0}

    def _write(self, writes: Writes) -> None:
        cache = self.cache
        for place, ids in writes.prompts:
            cache.known[place, : len(ids)].copy_(cache.send(ids), non_blocking=True)
        if writes.entries:
            both = cache.send(np.array(writes.entries + writes.blocks, np.int64))
            entries, blocks = both.to(cache.device, non_blocking=True).chunk(2)
            cache.tables.view(-1).index_copy_(0, entries, blocks.int())
        if moves := writes.moves:
            pairs = cache.send(np.array(moves, np.int32).ravel())
            cache.moves.view(-1)[: len(pairs)].copy_(pairs, non_blocking=True)
            cache.move_count.copy_(cache.send(np.array([len(moves)], np.int32)), non_blocking=True)
        if writes.step is not None:
            self.step.copy_(cache.send(writes.step), non_blocking=True)

    def _give_other_blocks(self, batch: Batch, writes: Writes) -> None:
        """Gives requests that are moved as many other blocks as their slots have."""
        tokens = batch.slot_tokens or 0
        for request in batch.moved:
            # The whole slot is copied, also what no token is in yet.
            held = self.cache.of(request, tokens, 0, Writes())
            old, held.blocks = held.blocks, []
            # Blocks are given ahead, so there may be one more than a slot has.
            self.cache.of(request, max(tokens, len(old) * PAGE), 0, writes)
            writes.moves += zip(old, held.blocks, strict=True)
            # Not before the copy has read them.
            self._returned += old

    # -- the interface of the machine on a card --------------------------------------------------------------

    def bound(self, graph: Graph, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the sizes with which the step that has begun is captured; of moves any will do."""
        if "kv_copy" in graph.kinds:
            return {"tokens": PAGE}
        return {name: self._bound[name] for name in sorted(graph.needs)}

    def changes(self, graph: Graph) -> bool:
        """Whether a graph is launched anew each time: steps of many rows."""
        del graph
        return self._bound.get("tokens", 0) > MOST_CAPTURED

    def key(self) -> Key:
        """Returns the current layer, the sequences of the step, and whether prompts and others are in it."""
        return self.layer, self._count, self._both

    def restore(self, key: Key) -> None:
        """Sets all three."""
        self.layer, self._count, self._both = key

    def execute(self, op: Op) -> None:
        """Runs an op. Raises ValueError for one that has no buffers on a card."""
        method = self._methods.get(op.kind)
        if method is None:
            raise ValueError(f"--on cuda: {op.kind} {op.name} has no buffers on a card")
        method(op)
        self.skip(op)

    def skip(self, op: Op) -> None:
        """Goes to the layer after an op."""
        self.layer = layer_after(op, self.layer)

    # -- ops ------------------------------------------------------------------------------------------------

    def _of_step(self, which: int, count: int) -> Tensor:
        return self.step[which * self.most : which * self.most + count]

    def _weight(self, name: str) -> Tensor:
        return self.weights.of(name, self.layer)

    @property
    def _stateful(self) -> bool:
        """Whether the current layer is of linear attention."""
        return self.linear is not None and self.layer not in self.cache.of_layer

    @property
    def _own(self) -> CardLinear:
        assert self.linear is not None
        return self.linear

    @property
    def _kv(self) -> tuple[Tensor, Tensor]:
        k, v = self.cache.kv[self.cache.of_layer[self.layer]]
        return k, v

    def _pass(self, op: Op) -> None:
        """Does nothing: the rotary embedding has written K and V."""

    def _embed(self, op: Op) -> None:
        tokens = op["tokens"]
        rows = step_room(tokens, self._count, self.cache.known)
        starts = self._of_step(3, self._count + 1)
        self._places, self._lengths = self._of_step(0, self._count), self._of_step(1, self._count)
        self._starts, self._prompt_starts, self._ragged = starts, starts, False
        if self.cache.slots:
            self._slots = self.step[4 * self.most + 1 :][: self._count]
        if self._both:
            # Sequences of one row attend as in a decode step, others from the rows behind them.
            alone = starts.diff() == 1
            self._own_lengths = torch.where(alone, self._lengths, 0)[:tokens]
            self._prompt_starts = torch.maximum(starts, alone.sum(dtype=torch.int32))
        self._rows = step_rows(starts, self._lengths, self._places, self.cache.known, out=rows)
        self._table = step_tables(self.cache.tables, self._places)
        act = torch_dtype(self.model.dtypes.activation)
        self.buffers = {"x": self._weight(op.name)[rows.ids].to(act)}

    def every_row_ends(self) -> None:
        """The head of the present step reads all rows, whatever ends."""
        assert self._rows is not None
        every = torch.arange(len(self._rows.ids), dtype=torch.int32, device=self.cache.device)
        self._rows = self._rows._replace(last_rows=every)

    def _norm(self, op: Op) -> None:
        x, eps = self.buffers["x"], self.weights.constants.eps
        assert self._rows is not None
        if op.name == "heads_norm":
            self._own.norm(op, eps)
            return
        gain = self._weight(op.name)
        if op.name == "qk_norm":
            qkv, d = self.buffers["qkv"], self.config.head_dim
            heads = qkv.view(len(qkv), -1, d)[:, : len(gain)]
            gains = gain.expand(len(qkv), *gain.shape).reshape(-1, d).contiguous()
            heads.copy_(norm(heads.reshape(-1, d), gains, eps=eps).view(heads.shape))
            return
        if op.name == "head_norm":
            x = x.index_select(0, self._rows.last_rows)
        self.buffers["normed"] = norm(x, gain, eps=eps)

    def _multiply(self, op: Op) -> None:
        if op.name == "o" and self._stateful:
            x = self._own.heads
        elif op.name == "lm_head" and not self.config.final_norm:
            assert self._rows is not None
            x = self.buffers["x"].index_select(0, self._rows.last_rows)
        else:
            x = self.buffers[READS.get(op.name, "normed")]
        y = product(x, self._weight(op.name), in_step=True)
        y = y.to(torch_dtype(self.model.dtypes.activation))
        if op.name == "qkv" and self._stateful:
            self._own.take(y)
            return
        if op.name == "down" and self.config.parallel_residual:
            y += self.buffers["y"]
        if op.name == "lm_head" and y.shape[1] > self.config.vocab:
            # Columns beyond the vocabulary are never chosen.
            y[:, self.config.vocab :].fill_(-torch.inf)
        self.buffers[WRITES.get(op.name, op.name)] = y

    def _turn(self, op: Op) -> None:
        assert self._rows is not None
        if self._stateful:
            self._own.turn(op, self.cache.angles, self._rows.lengths)
            return
        k, v = self._kv
        self._q = rotary_append(
            self.buffers["qkv"], *self.cache.angles, self._rows.lengths, k, v,
            q_heads=op["q_heads"], block_table=self._table, sequences=self._rows.sequences,
        )  # fmt: skip

    def _attend_prompts(self, op: Op) -> None:
        """Attends with prompts, and with the decoding sequences of the same step: these have the first rows.
        They attend before, because entries behind theirs write zeros where the rows of prompts begin."""
        del op
        k, v = self._kv
        q = self._q.to(k.dtype)
        out = torch.empty_like(q)
        if self._both:
            own = len(self._own_lengths)
            decode_attention(
                q[:own], k, v, self._own_lengths, block_table=self._table[:own], out=out[:own]
            )  # fmt: skip
        ragged_attention(q, k, v, self._prompt_starts, self._lengths, self._table, out=out)
        self._ragged = True
        self._set_heads(out)

    def _attend_decoding(self, op: Op) -> None:
        del op
        if self._ragged:
            return
        k, v = self._kv
        out = decode_attention(self._q.to(k.dtype), k, v, self._lengths, block_table=self._table)
        self._set_heads(out)

    def _silu(self, op: Op) -> None:
        self._own.silu(op)

    def _widen(self, op: Op) -> None:
        assert self._rows is not None
        self._own.widen(op, self._rows.lengths)

    def _mix_prompts(self, op: Op) -> None:
        """Mixes chunks of prompts, and the decoding sequences of the same step, as `_attend_prompts`."""
        del op
        if self._both:
            own = len(self._own_lengths)
            self._own.mix(self.layer, self._slots[:own], self._own_lengths)
        self._own.mix_chunks(self.layer, self._slots, self._prompt_starts, self._lengths)
        self._ragged = True

    def _mix_decoding(self, op: Op) -> None:
        del op
        if not self._ragged:
            self._own.mix(self.layer, self._slots, self._lengths)

    def _product(self, op: Op) -> None:
        if op.name == "heads_gate":
            self._own.gate(op)
        else:
            self.buffers["inner"] = torch.mul(*mlp_inputs(self.buffers))

    def _set_heads(self, out: Tensor) -> None:
        self.buffers["heads"] = out.flatten(1).to(torch_dtype(self.model.dtypes.activation))

    def _activate(self, op: Op) -> None:
        if op.name == "heads_gate":
            self._own.gate(op)
            return
        self.buffers["inner"] = activation(*mlp_inputs(self.buffers))

    def _add(self, op: Op) -> None:
        del op
        residual(self.buffers["y"], self.buffers["x"])

    def _choose(self, op: Op) -> None:
        del op
        count = self._count
        ids = choose(self.buffers["logits"])
        keep_chosen(
            ids, self._starts, self._lengths, self._places, self._of_step(2, count), self.cache.known,
            advance=not self._ragged,
        )  # fmt: skip

    def _move(self, op: Op) -> None:
        """Copies the blocks of whole slots, of all layers."""
        del op
        assert self.cache.blocks is not None
        slot_moves(self.cache.blocks, self.cache.moves, self.cache.move_count)


class SplitState(CardState):
    """The steps of a stream other than "main": its own for decoding, and one for the prompts of all such
    streams. `of`: returns the steps of a stream, which are made when they are first asked for, as a stream
    that computes prompts alone never does."""

    def __init__(self, of: Callable[[str], CardServedState], stream: str) -> None:
        self._of, self._stream, self._now = of, stream, of(PROMPTS)

    def reset(self) -> None:
        """Does nothing: the state of "main" resets all."""

    def home(self, graph: Graph, stream: str) -> str:
        """Returns the stream of all prompts for a prompt, else the own one."""
        return PROMPTS if "prefill_attention" in graph.kinds else stream

    def begin(
        self, batch: Batch | None, sizes: Mapping[str, int], replay: int
    ) -> Callable[[], object] | None:
        """As `CardServedState.begin`."""
        self._now = self._of(PROMPTS if sizes.get("prompt_tokens", 0) else self._stream)
        return self._now.begin(batch, sizes, replay)

    def bound(self, graph: Graph, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """As `CardServedState.bound`."""
        return self._now.bound(graph, sizes)

    def changes(self, graph: Graph) -> bool:
        """As `CardServedState.changes`."""
        return self._now.changes(graph)

    def key(self) -> tuple[bool, Key]:
        """Returns which of the steps it is, and that step's key."""
        return self._now is self._of(PROMPTS), self._now.key()

    def restore(self, key: tuple[bool, Key]) -> None:
        """Sets both."""
        self._now = self._of(PROMPTS if key[0] else self._stream)
        self._now.restore(key[1])

    def execute(self, op: Op) -> None:
        """Runs an op of the present step."""
        self._now.execute(op)

    def skip(self, op: Op) -> None:
        """Goes to the layer after an op."""
        self._now.skip(op)


class Sender:
    """Puts numbers where a device reads them while the host goes on: into RING bytes of pinned memory, used
    in turn; before it begins anew, the host waits for the device."""

    def __init__(self, device: torch.device | str) -> None:
        self.device, self.next = torch.device(device), 0
        pins = self.device.type == "cuda"
        self.ring = torch.empty(RING if pins else 0, dtype=torch.uint8, pin_memory=pins)
        self._bytes = self.ring.numpy()

    def __call__(self, x: NDArray[Any]) -> Tensor:
        """Returns a tensor of these numbers, [count], to be copied from. Raises ValueError for more bytes
        than an eighth of the ring, and for more than one dimension."""
        if x.ndim != 1:
            raise ValueError(f"{x.ndim} dimensions; numbers are sent as one")
        if self.device.type != "cuda":
            return torch.from_numpy(x)
        if x.nbytes > RING // 8:
            raise ValueError(f"{x.nbytes:,} bytes at once; {RING // 8:,} are the most")
        if self.next + x.nbytes > RING:
            torch.cuda.synchronize()
            self.next = 0
        place = slice(self.next, self.next + x.nbytes)
        self._bytes[place] = x.view(np.uint8)
        # Numbers of 8 bytes begin at multiples of 8.
        self.next += -(-x.nbytes // ALIGNED) * ALIGNED
        return self.ring[place].view(OF_NUMPY[x.dtype])


def decoding_steps(most: int) -> list[int]:
    """Returns the sequences with which decode steps of up to `most` sequences are captured."""
    return [each for each in SEQUENCES if each <= rounded(most, SEQUENCES)]


def prompt_steps(most: int, tokens: int, counts: Sequence[int] = WITH_PROMPTS) -> list[tuple[int, int]]:
    """Returns the rows and sequences with which steps with prompts are captured: up to `most` sequences, as
    many as one of `counts`, and `tokens` rows."""
    rows = [each for each in TOKENS if each <= rounded_rows(min(tokens, MOST_CAPTURED))]
    return [(row, count) for row in rows for count in counts if count <= rounded(min(most, row), counts)]


def captured_ops(model: ServedDecoder, holds: Mapping[str, Any]) -> Iterator[Op]:
    """Yields the ops of all captured steps."""
    decode, prefill = (
        dict.fromkeys(op.without_place for op in graph.ops) for graph in (model.decode, model.prefill)
    )
    for count in decoding_steps(holds["step_rows"]):
        sizes = decode_sizes(count, count)
        yield from (op.at(sizes) for op in decode)
    for rows, count in dict.fromkeys((*_prompt_steps_of(holds, ALONE), *_prompt_steps_of(holds))):
        sizes = step_sizes(0, 0, [(rows, 0)], count)
        yield from (op.at(sizes) for op in prefill)


def _prompt_steps_of(holds: Mapping[str, Any], counts: Sequence[int] = WITH_PROMPTS) -> list[tuple[int, int]]:
    if holds["prompts_apart"]:
        return prompt_steps(1, holds["longest_prompt"], counts)
    return prompt_steps(holds["step_rows"], holds["step_tokens"], counts)


def rehearsal(m: Machine, model: ServedDecoder, holds: Mapping[str, Any]) -> Program:
    """Launches every step that is captured, twice: the first time captures it, and the second sends the graph
    to the card, which takes its host up to a millisecond. `holds`: of the set-up."""
    for _ in range(2):
        yield from _every_step(m, model, holds)


def _every_step(m: Machine, model: ServedDecoder, holds: Mapping[str, Any]) -> Program:
    """Launches moves of no slot; decoding steps, on streams other than "main" of one sequence; and steps with
    prompts, either alone on streams of their own or in batches; and the largest step, if that is not
    captured."""
    if model.config.linear is None:
        # Who has states moves no slots.
        yield m.wait(m.launch(model.move, sizes={"tokens": PAGE}))
    for stream in holds["streams"]:
        for count in decoding_steps(holds["step_rows"] if stream == MAIN else 1):
            sizes = decode_sizes(count, 2 * count)
            yield m.wait(m.launch(model.decode, stream=stream, sizes=sizes, advance=growth(count)))
    # As many run at once as the cache has places for.
    apart, most = holds["prompts_apart"], rounded(holds["step_rows"], WITH_PROMPTS)
    for rows, most_here in _prompt_steps_of(holds, ALONE):
        count = 1 if apart else min(rows, most_here, most)
        yield m.wait(_prompts(m, model, rows, count, PROMPTS if apart else MAIN))
    for rows, most_here in [] if apart else _prompt_steps_of(holds):
        if (count := min(rows, most_here)) > 1:
            prompts = [(each, 0) for each in evenly(rows - 1, count - 1)]
            yield m.wait(m.launch(model.mixed, sizes=step_sizes(1, 2, prompts, count - 1), advance=growth(1)))
    rows, count = holds["step_tokens"], holds["step_rows"]
    if not apart and rows > MOST_CAPTURED:
        yield m.wait(_prompts(m, model, rows, count, MAIN))


def _prompts(m: Machine, model: ServedDecoder, rows: int, count: int, stream: str) -> Ticket:
    sizes = step_sizes(0, 0, [(each, 0) for each in evenly(rows, count)], count)
    return m.launch(model.prefill, stream=stream, sizes=sizes)
