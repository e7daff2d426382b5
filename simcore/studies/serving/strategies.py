"""The strategies of the study `serving`: the fields, the label, the memory and the program of each.

A strategy is a class of fields that satisfies `ServingStrategy`: one in `ServingStrategies`, or a user's own
(docs/own_strategies.md).
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from simcore.input.fields import FieldError, Many, Strict
from simcore.input.files import InputError
from simcore.machine.machine import MAIN, Machine, Overheads, Program
from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.concurrent_instances import concurrent_instances, instance_stream
from simcore.schedules.continuous_batching import continuous_batching, fcfs, shortest_first
from simcore.schedules.dynamic_batching import dynamic_batching
from simcore.schedules.iteration_batching import iteration_batching
from simcore.schedules.reservation import Reservation
from simcore.schedules.temporal_fusion import temporal_fusion
from simcore.studies.fields import SeveralRanks
from simcore.studies.serving.host_time import NO_HOST_TIME, HostTime
from simcore.studies.serving.kv_memory import KvMemory, Room, ServerMemory
from simcore.workload.requests import Journal

Places = Annotated[int, Field(ge=1, le=65_536)]
MaxBatch = Annotated[Many[Places], Field(description="requests in a batch at most")]
EngineHost = Annotated[HostTime, Field(description="host time of the engine and its front end")]
ORDERS = {"fcfs": fcfs, "shortest_first": shortest_first}


class ServingStrategy(Protocol):
    """A way of serving. When it is used, each field of `Many` values has one value."""

    @property
    def kind(self) -> str:
        """Its kind in a scenario."""

    @property
    def ranks(self) -> list[int]:
        """Devices of a server, each with a slice of the model."""

    @property
    def in_turn(self) -> bool:
        """Whether it begins requests in the order of arrival; a law then checks it."""

    def label(self) -> str:
        """Returns its name in results: a line of text, unique in a scenario."""

    def room(self, memory: ServerMemory) -> Room:
        """Returns its part of a server's memory: `memory.slots(...)` or `memory.blocks(...)`."""

    def program(self, m: Machine, model: ServedDecoder, journal: Journal, room: Room) -> Program:
        """Serves the requests in a server's inbox REQUESTS, until END: sets `scheduled_s`, `first_token_s`
        and `instance` of each request, and reports every step and every finished or rejected request to the
        journal."""


def _side_by_side(prompt_streams: int) -> str:
    """How a label says that prompts are computed beside each other."""
    return f", {prompt_streams} prompt streams" if prompt_streams > 1 else ""


class TemporalFusion(Strict):
    """Requests join a running batch at the next iteration, in one of its slots (Flover)."""

    kind: Literal["temporal_fusion"]
    slots: Many[Places] = Field([32], description="requests that run at once at most")
    shuffle: Many[bool] = Field(
        [True], description="whether those that run are kept together, so that no finished one is computed on"
    )
    prompt_streams: Many[Places] = Field(
        [1],
        description="streams that compute prompts beside the generation, each one prompt after another"
        " (Flover: a stream for each request)",
    )
    ranks: SeveralRanks = [1]
    host: EngineHost = NO_HOST_TIME
    in_turn: ClassVar[bool] = True
    prompts_apart: ClassVar[bool] = True

    def label(self) -> str:
        shuffle = "" if self.shuffle[0] else ", no shuffle"
        return f"temporal fusion, {self.slots[0]} slots{shuffle}{_side_by_side(self.prompt_streams[0])}"

    def room(self, memory: ServerMemory) -> Room:
        return memory.slots(self.slots[0])

    def program(self, m: Machine, model: ServedDecoder, journal: Journal, room: Room) -> Program:
        return temporal_fusion(
            m, model, journal, slots=room.limit, slot_tokens=room.slot_tokens, shuffle=self.shuffle[0],
            prompt_streams=self.prompt_streams[0],
        )  # fmt: skip


class DynamicBatching(Strict):
    """Requests wait until `max_batch` are there or the first has waited `window_s`; a batch ends together."""

    kind: Literal["dynamic_batching"]
    window_s: Many[Annotated[float, Field(ge=0.0, le=1e6)]] = Field(
        description="longest time that the first request of a batch waits for others, s"
    )
    max_batch: MaxBatch = [32]
    ranks: SeveralRanks = [1]
    host: EngineHost = NO_HOST_TIME
    in_turn: ClassVar[bool] = True

    def label(self) -> str:
        return f"dynamic batching, {self.window_s[0]:g} s, up to {self.max_batch[0]}"

    def room(self, memory: ServerMemory) -> Room:
        return memory.slots(self.max_batch[0])

    def program(self, m: Machine, model: ServedDecoder, journal: Journal, room: Room) -> Program:
        return dynamic_batching(
            m, model, journal, window_s=self.window_s[0], max_batch=room.limit, capacity=room.kv_tokens
        )


class ConcurrentInstances(Strict):
    """Each request runs by itself, up to `max_instances` at a time on one server."""

    kind: Literal["concurrent_instances"]
    max_instances: Many[Places] = Field([32], description="requests that run at once on a server at most")
    processes: Many[bool] = Field(
        [False],
        description="whether a real machine holds each instance in a process of its own, with shared weights"
        " (CUDA IPC); else they are streams of one process, as in all predictions, but that each"
        " process computes its own prompts",
    )
    prompt_streams: Many[Places] = Field(
        [1],
        description="streams that compute prompts beside the answers, each one prompt after another: instance"
        " i's are on stream i modulo so many; not with processes, each of which computes its own",
    )
    ranks: SeveralRanks = [1]
    host: EngineHost = NO_HOST_TIME
    in_turn: ClassVar[bool] = True
    prompts_apart: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_rank_a_process(self) -> "ConcurrentInstances":
        if any(self.processes) and self.ranks != [1]:
            raise FieldError("processes", "is true, which runs with ranks 1 only; give false")
        if any(self.processes) and self.prompt_streams != [1]:
            raise FieldError("prompt_streams", "is given; processes compute their own prompts: leave it out")
        return self

    def label(self) -> str:
        apart = ", a process each" if self.processes[0] else _side_by_side(self.prompt_streams[0])
        return f"concurrent instances, up to {self.max_instances[0]}{apart}"

    def streams(self, room: Room) -> list[str]:
        return [instance_stream(number) for number in range(room.limit)]

    def room(self, memory: ServerMemory) -> Room:
        return memory.slots(self.max_instances[0])

    def program(self, m: Machine, model: ServedDecoder, journal: Journal, room: Room) -> Program:
        return concurrent_instances(
            m, model, journal, max_instances=room.limit, slot_tokens=room.slot_tokens,
            prompt_streams=None if self.processes[0] else self.prompt_streams[0],
        )  # fmt: skip


class IterationBatching(Strict):
    """Requests join a running batch between iterations, up to `max_batch`; for answers of one length."""

    kind: Literal["iteration_batching"]
    max_batch: MaxBatch = [32]
    ranks: SeveralRanks = [1]
    host: EngineHost = NO_HOST_TIME
    in_turn: ClassVar[bool] = True

    def label(self) -> str:
        return f"iteration batching, up to {self.max_batch[0]}"

    def room(self, memory: ServerMemory) -> Room:
        return memory.slots(self.max_batch[0])

    def program(self, m: Machine, model: ServedDecoder, journal: Journal, room: Room) -> Program:
        return iteration_batching(m, model, journal, max_batch=room.limit, slot_tokens=room.slot_tokens)


class AnswerRoom(Strict):
    """Room for answers to come that a request must find before it is admitted."""

    share: Annotated[float, Field(ge=0.0, le=1.0)] = Field(
        1.0,
        description="share of the answers to come of running requests that has to stay free, beside the whole"
        " answer of the new one; 1 without most_tokens: nobody is ever preempted",
    )
    least: Annotated[float, Field(ge=0.0, le=1.0)] | None = Field(
        None,
        description="what the share falls to, as SGLang's new-token ratio; who then finds no room is tried"
        " again when a request has ended; left out, the share stays",
    )
    steps: int = Field(0, ge=0, le=1_000_000, description="steps of answers alone in which it falls to that")
    most_tokens: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="tokens of one answer to come that count at most"
    )

    @model_validator(mode="after")
    def _falls_in_steps(self) -> "AnswerRoom":
        if self.least is not None and self.least > self.share:
            raise FieldError("least", f"is {self.least:g}; at most share, {self.share:g}, is allowed")
        falls = self.least is not None and self.least < self.share
        if falls and not self.steps:
            raise FieldError("steps", "is 0, in which no share falls; least wants 1 or more")
        if self.steps and not falls:
            raise FieldError("least", "is not below share, so that nothing falls; steps wants one that is")
        return self

    @property
    def rule(self) -> Reservation:
        """The rule as the schedule takes it."""
        least = self.share if self.least is None else self.least
        return Reservation(self.share, least, self.steps, self.most_tokens)

    def __str__(self) -> str:
        falling = f" to {self.least:g} in {self.steps:,} steps" if self.steps else ""
        whole = self.share == 1.0 and not falling
        if self.most_tokens is not None:
            share = "" if whole else f"{self.share:g}{falling} of "
            return f"room for {share}the next {self.most_tokens:,} tokens of answers"
        return "room for whole answers" if whole else f"room for {self.share:g}{falling} of answers to come"


class ContinuousBatching(Strict):
    """Each step takes tokens of prompts and of answers, up to a budget; the KV cache is kept in blocks (vLLM,
    SGLang, TensorRT-LLM)."""

    kind: Literal["continuous_batching"]
    engine: Annotated[str, Field(min_length=1, max_length=4096)] | None = Field(
        None,
        description="engine (`simcore engines`), or a path to a YAML file with a base among them, whose"
        " fields stand for those that are not given",
    )
    token_budget: Many[Annotated[int, Field(ge=1, le=10_000_000)]] = Field(
        [2048], description="tokens of a step at most, of prompts and answers together"
    )
    max_sequences: Many[Places] = Field([256], description="requests that run at once on a server at most")
    block_tokens: int = Field(16, ge=1, le=65_536, description="tokens of a block of the KV cache")
    order: Many[Literal["fcfs", "shortest_first"]] = Field(
        ["fcfs"], description="who is next: first come first served, or the shortest first"
    )
    prefill: Many[Literal["chunked", "whole", "first"]] = Field(
        ["chunked"],
        description="chunked: prompts in chunks beside answers, as vLLM; whole: not cut, as TensorRT-LLM;"
        " first: in steps of their own, as SGLang",
    )
    wait_steps: int = Field(
        0, ge=0, le=1_000_000, description="steps that new prompts wait at most until there are wait_tokens"
    )
    wait_tokens: int = Field(
        0, ge=0, le=10_000_000, description="tokens of a step with new prompts for which they wait no longer"
    )
    ahead: int = Field(
        0,
        ge=0,
        le=1000,
        description="steps decided while one runs, as engines do that overlap host and device",
    )
    prefix_caching: bool = Field(
        False, description="whether the beginning of a prompt is taken from blocks that are known from before"
    )
    reserve: AnswerRoom | None = Field(
        None,
        description="room for answers to come that a request must find before it is admitted, as in"
        " TensorRT-LLM and SGLang; null: none, as in vLLM, which preempts instead",
    )
    preempted: Literal["first", "last"] = Field(
        "first",
        description="where preempted requests wait: before all others, as in vLLM, or after, as in SGLang",
    )
    memory: KvMemory = Field(KvMemory(), description="what the KV cache may take of a device")
    ranks: SeveralRanks = [1]
    host: EngineHost = NO_HOST_TIME

    @model_serializer(mode="wrap")
    def _as_said(self, whole: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Unset fields are the engine's, which depend on the device: a default here would count as set.
        found: dict[str, Any] = whole(self)
        said = found if self.engine is None else self.model_fields_set
        return {name: value for name, value in found.items() if name in said}

    @model_validator(mode="after")
    def _waits_for_tokens(self) -> "ContinuousBatching":
        if self.wait_steps and not self.wait_tokens:
            raise FieldError("wait_tokens", "is 0, which no prompt waits for; wait_steps wants 1 or more")
        if self.wait_tokens and not self.wait_steps:
            raise FieldError("wait_steps", "is 0, so that no prompt waits; wait_tokens wants 1 or more")
        return self

    @property
    def in_turn(self) -> bool:
        return self.order[0] == "fcfs"

    def label(self) -> str:
        return ", ".join(
            [_engine_name(self.engine), f"{self.token_budget[0]:,} tokens a step", *_unusual(self)]
        )

    def room(self, memory: ServerMemory) -> Room:
        tokens = self.token_budget[0]
        rows = min(tokens, self.max_sequences[0])
        if self.prefix_caching and memory.model.state_bytes_per_sequence:
            name = memory.model.config.name
            raise InputError(f"prefix_caching: is true, and {name} has states, which blocks of a prefix lack")
        return memory.blocks(self.block_tokens, tokens=tokens, rows=rows, rule=self.memory)

    def program(self, m: Machine, model: ServedDecoder, journal: Journal, room: Room) -> Program:
        return continuous_batching(
            m,
            model,
            journal,
            blocks=room.limit,
            block_tokens=room.block_tokens or self.block_tokens,
            token_budget=self.token_budget[0],
            max_sequences=self.max_sequences[0],
            order=ORDERS[self.order[0]],
            prefill=self.prefill[0],
            wait_steps=self.wait_steps,
            wait_tokens=self.wait_tokens,
            ahead=self.ahead,
            prefix_caching=self.prefix_caching,
            reserve=None if self.reserve is None else self.reserve.rule,
            preempted_last=self.preempted == "last",
            state_blocks=room.state_blocks,
        )


def _engine_name(engine: str | None) -> str:
    """Returns an engine in words; of a file of one's own, the file's name."""
    return "continuous batching" if engine is None else PurePath(engine).name.removesuffix(".yaml")


def _unusual(strategy: ContinuousBatching) -> list[str]:
    """Returns the settings of continuous batching that differ from the defaults, or from its engine's."""
    # Presets are of this class.
    from simcore.studies.serving.engines.presets import usual  # noqa: PLC0415

    shipped = usual(strategy)

    def odd(name: str) -> bool:
        return all(getattr(strategy, name) != getattr(each, name) for each in shipped)

    words = []
    if strategy.engine or odd("max_sequences"):
        words.append(f"up to {strategy.max_sequences[0]}")
    if odd("block_tokens"):
        words.append(f"blocks of {strategy.block_tokens}")
    if odd("order"):
        words.append("shortest first" if strategy.order == ["shortest_first"] else "first come first served")
    if odd("prefill"):
        words.append(f"prompts {strategy.prefill[0]}")
    if odd("ahead"):
        words.append(f"{strategy.ahead} step{'s' if strategy.ahead != 1 else ''} ahead")
    if odd("prefix_caching"):
        words.append("prefix caching" if strategy.prefix_caching else "no prefix caching")
    if odd("wait_steps"):
        words.append(f"waiting {strategy.wait_steps} steps for {strategy.wait_tokens:,} tokens")
    if odd("reserve"):
        words.append("no room for answers to come" if strategy.reserve is None else str(strategy.reserve))
    if odd("preempted"):
        words.append(f"preempted wait {strategy.preempted}")
    if odd("host"):
        # Without its engine's kernels it has those of the profile.
        words.append(str(strategy.host) if strategy.host != NO_HOST_TIME else "no host time, plain kernels")
    if odd("memory"):
        words.append(_memory(strategy.memory, [each.memory for each in shipped]))
    return words


def _memory(memory: KvMemory, shipped: Sequence[KvMemory]) -> str:
    """Returns how a rule for memory differs from the usual ones."""
    plain = [each for each in shipped if each.model_copy(update={"share": memory.share}) == memory]
    share = f"{memory.share:g} of the memory"
    return share if plain else f"{share}, by a rule of its own"


# The strategies: add a new kind here.
ServingStrategies = (
    TemporalFusion | DynamicBatching | ConcurrentInstances | IterationBatching | ContinuousBatching
)


def streams(strategy: ServingStrategy, room: Room) -> list[str]:
    """Returns the streams on which a strategy decodes: "main", unless its `streams(room)` says others."""
    own = getattr(strategy, "streams", None)
    return [MAIN] if own is None else own(room)


def prompts_apart(strategy: ServingStrategy) -> bool:
    """Whether a strategy computes each prompt by itself, on a stream other than "main": no, unless its
    `prompts_apart` says so."""
    return bool(getattr(strategy, "prompts_apart", False))


def processes(strategy: ServingStrategy) -> bool:
    """Whether a real machine runs each of a strategy's streams in a process of its own: no, unless its
    `processes` says so."""
    found = getattr(strategy, "processes", False)
    return any(found) if isinstance(found, list) else bool(found)


def host_of(strategy: ServingStrategy) -> HostTime:
    """Returns the host time of a strategy's engine: none, unless its `host` says so."""
    found: HostTime = getattr(strategy, "host", NO_HOST_TIME)
    return found


def overheads_of(strategy: ServingStrategy, machine: Overheads, ours: Collection[str]) -> Overheads:
    """Returns the costs of a machine's calls as a strategy has them. Between the steps of a named engine is
    what its `host` says, in place of `ours`: costs of this project's own schedule."""
    if getattr(strategy, "engine", None) is None:
        return machine
    return replace(machine, **dict.fromkeys(ours, 0.0))


def label(strategy: ServingStrategy) -> str:
    """Returns the label of a variant, with the fields that tell it from others."""
    ranks, host = strategy.ranks[0], host_of(strategy)
    # Continuous batching says where its host is not that of its engine.
    own = "" if host == NO_HOST_TIME or isinstance(strategy, ContinuousBatching) else f", {host}"
    return strategy.label() + own + (f", TP{ranks}" if ranks > 1 else "")


def engine_of(strategy: ServingStrategy) -> str | None:
    """Returns the engine that a strategy names, or None."""
    return strategy.engine if isinstance(strategy, ContinuousBatching) else None
