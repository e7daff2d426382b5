"""Memory of a server for its KV cache, by the rule of its engine.

With M bytes of device memory, W of weights, P of activations at their peak, R of libraries while the engine
measures its peak, and D of contexts and communicators before the measurement:

    total   room = share M - W - P - R               vLLM
    free    room = share (M - D) - W - P - R         SGLang, whose activations take the rest (P = R = 0)
    rest    room = share (M - D - W - P - R)         TensorRT-LLM

    KV blocks = floor(room / (block_tokens * KV bytes of a token));  KV tokens = blocks * block_tokens
    states    = ceil(state bytes of a sequence / bytes of a block)        blocks of each sequence besides

The blocks of a model of linear attention alone, which has no KV, hold a state each.

All sizes are per rank: each rank of a group holds its own heads of the same blocks.
"""

from dataclasses import dataclass, field
from math import ceil, floor
from typing import Annotated, Literal

from pydantic import Field

from simcore.input.fields import Strict
from simcore.input.files import InputError
from simcore.models.served_decoder import ServedDecoder
from simcore.studies.hardware import Hardware
from simcore.workload.requests import blocks_for

MemoryShare = Annotated[float, Field(gt=0.0, le=1.0)]
Taken = Annotated[float, Field(ge=0.0, le=1e18)]


class KvMemory(Strict):
    """What of a device a server may fill with KV."""

    share: MemoryShare = Field(default=0.9, description="share of the memory that share_of names")
    share_of: Literal["total", "free", "rest"] = Field(
        default="total",
        description="total: all memory, as vLLM; free: what is free before the model is there, as SGLang;"
        " rest: what the model leaves, as TensorRT-LLM",
    )
    driver_bytes: Taken = Field(default=0.0, description="held before the engine looks what is free, bytes")
    group_driver_bytes: Taken = Field(
        default=0.0, description="driver_bytes where a server has several ranks, of each"
    )
    reserve_bytes: Taken = Field(default=0.0, description="taken by libraries while the engine runs, bytes")
    group_reserve_bytes: Taken = Field(
        default=0.0, description="reserve_bytes where a server has several ranks, of each"
    )
    peak: Literal["widest_step", "profile_run", "none"] = Field(
        default="widest_step",
        description="activations that are left room for: of the largest step, of the run that vLLM profiles,"
        " or none",
    )
    splits_embedding: bool = Field(
        default=False, description="whether ranks hold a part of the embedding each, not all"
    )


@dataclass(frozen=True, slots=True)
class Room:
    """A server's room for KV: `limit` blocks of `block_tokens` tokens each or, if that is None, slots of
    `slot_tokens`, the tokens of the longest request. `step_tokens`, `step_rows`: of its largest step;
    `state_blocks`: blocks that the states of a sequence take besides, if it has `states`."""

    limit: int
    slot_tokens: int
    block_tokens: int | None = None
    step_tokens: int = field(default=1, compare=False)
    step_rows: int = field(default=1, compare=False)
    state_blocks: int = 0
    states: bool = False

    @property
    def kv_tokens(self) -> int:
        """Total tokens."""
        return self.limit * (self.block_tokens or self.slot_tokens)

    @property
    def sequences(self) -> int:
        """How many sequences as long as the longest request it holds."""
        if self.block_tokens is None:
            return self.limit
        return self.limit // (self.state_blocks + blocks_for(self.slot_tokens, self.block_tokens))

    def __str__(self) -> str:
        if self.block_tokens is None:
            return f"{self.limit:,} slots of {self.slot_tokens:,} tokens"
        return f"{self.limit:,} KV blocks of {self.block_tokens} tokens, {self.kv_tokens:,} tokens in all,"


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """The memory of one server, in which a strategy reserves room for KV. `share` and `units` (blocks or
    slots): given by the scenario instead of the rule's, or None; `longest_prompt`, `longest`: tokens of the
    longest possible prompt and request."""

    hardware: Hardware
    model: ServedDecoder
    share: float | None
    units: int | None
    longest_prompt: int
    longest: int

    def slots(self, count: int) -> Room:
        """Reserves `count` slots, each for the longest request. Raises InputError if they do not fit,
        ValueError if `count` is no number of slots."""
        _whole("slots", count=count)
        if self.model.state_bytes_per_sequence:
            name = self.model.config.name
            raise InputError(f"{name} has states of sequences, which continuous_batching alone keeps")
        # All prompts may be computed at once: as one batch, or concurrently.
        free = self._free_bytes(KvMemory(), count * self.longest_prompt, count)
        fitting = self.units or blocks_in(free, self.model, self.longest)
        if fitting < count:
            raise InputError(
                f"{count} slots of {self.longest:,} tokens do not fit into the {max(0.0, free) / 1e9:.1f} GB"
                f" that weights, and activations of as many prompts of {self.longest_prompt:,} tokens, leave;"
                f" {max(0, fitting)} do"
            )
        return Room(count, self.longest, step_tokens=count * self.longest_prompt, step_rows=count)

    def blocks(self, block_tokens: int, *, tokens: int, rows: int, rule: KvMemory | None = None) -> Room:
        """Reserves as many blocks as fit beside a step of `tokens` tokens, of which `rows` get a next token.
        Raises InputError if none fits, ValueError if an argument is no whole number from 1 on."""
        _whole("blocks", block_tokens=block_tokens, tokens=tokens, rows=rows)
        free = self._free_bytes(rule or KvMemory(), tokens, rows)
        if self.model.kv_bytes_per_token == 0.0:
            # A block is a state, and no sequence takes a second one.
            block_tokens = max(1, self.longest)
        limit = self.units or floor(free / block_bytes(self.model, block_tokens))
        if limit < 1:
            device = self.hardware.name
            raise InputError(
                f"weights and activations do not fit into the memory of {device}"
                if free <= 0.0
                else f"the {free / 1e9:.3f} GB that are left hold no KV block"
            )
        state = state_blocks(self.model, block_tokens)
        has_states = self.model.state_bytes_per_sequence > 0.0
        return Room(limit, self.longest, block_tokens, tokens, rows, state, has_states)

    def _free_bytes(self, rule: KvMemory, tokens: int, rows: int) -> float:
        return room_bytes(rule, self.share or rule.share, self.hardware, self.model, tokens, rows)


def _whole(method: str, **numbers: object) -> None:
    """Raises ValueError if a number is no whole number from 1 on."""
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"memory.{method}: {name} is {number!r}; a whole number from 1 on is needed")


def room_bytes(
    memory: KvMemory, share: float, hardware: Hardware, model: ServedDecoder, tokens: int, rows: int
) -> float:
    """Returns the bytes that the KV cache of one rank may take; negative if weights and activations do not
    fit.

    `share` replaces the rule's own. `tokens`, `rows`: of the largest step; a row gets a next token.
    """
    group = model.ranks > 1
    driver = memory.group_driver_bytes if group else memory.driver_bytes
    weights = model.split_weight_bytes if memory.splits_embedding else model.weight_bytes
    reserve = memory.group_reserve_bytes if group else memory.reserve_bytes
    taken = weights + _peak_bytes(memory, hardware, model, tokens, rows) + reserve
    if memory.share_of == "total":
        return share * hardware.memory_bytes - taken
    if memory.share_of == "free":
        return share * (hardware.memory_bytes - driver) - taken
    return share * (hardware.memory_bytes - driver - taken)


def block_bytes(model: ServedDecoder, block_tokens: int) -> float:
    """Returns the bytes of a block of a rank: its tokens' KV or, of a model without KV, the states of one
    sequence."""
    return model.kv_bytes_per_token * block_tokens or model.state_bytes_per_sequence


def state_blocks(model: ServedDecoder, block_tokens: int) -> int:
    """Returns how many blocks the states of a sequence take beside those of its tokens; 0 where blocks are
    states."""
    if model.kv_bytes_per_token == 0.0:
        return 0
    return ceil(model.state_bytes_per_sequence / block_bytes(model, block_tokens))


def held_bytes(room: Room, model: ServedDecoder) -> float:
    """Returns the bytes of a rank that a server's room takes."""
    if room.block_tokens is None:
        return room.kv_tokens * model.kv_bytes_per_token
    return room.limit * block_bytes(model, room.block_tokens)


def blocks_in(room: float, model: ServedDecoder, block_tokens: int) -> int:
    """Returns the number of KV blocks of `block_tokens` tokens in `room` bytes of a rank."""
    return floor(room / (model.kv_bytes_per_token * block_tokens))


def _peak_bytes(memory: KvMemory, hardware: Hardware, model: ServedDecoder, tokens: int, rows: int) -> float:
    if memory.peak == "widest_step":
        return model.activation_bytes(tokens, rows)
    if memory.peak == "profile_run":
        return model.profile_bytes(tokens, rows, hardware.processors)
    return 0.0
