"""The buffers of the models that the machine on a card runs, and a check for all that it cannot run yet.

Decoders have the weights of their directory, or random ones, drawn on the card. A single operator has so many
sets of operands that none of them is in the L2 cache when all others have been read, unless they are small
(`cuda_times.operands`), so that its times are comparable with those of a profile: each launch takes the next
set; between two runs the sets that no launch takes are read, the last one by the operator.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from simcore.input.files import InputError
from simcore.kernels.decoder.paged_attention import PAGE
from simcore.kernels.streams import current_gate, one_stream
from simcore.kernels.table import TABLE
from simcore.models.decoder import TENSOR, Decoder
from simcore.models.long_convolution import LongConvolution
from simcore.models.prompt import Prompt
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op
from simcore.scenario import Scenario
from simcore.schedules.one_launch import LAUNCHES
from simcore.sim.runs import Setup
from simcore.studies.decode.scenario import AlSpec, DecodeScenario
from simcore.studies.operators.scenario import (
    DecodeAttentionScenario,
    LinearAttentionScenario,
    PromptScenario,
)
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.strategies import TemporalFusion
from simcore.studies.tiling.scenario import TilingScenario
from simcore.validate.calibration.cuda_instances import CardInstancesState, Instances
from simcore.validate.machines.buffers.cuda_decoder import (
    CardDecoderState,
    card_decoder_states,
    card_weights,
    drawn_of,
)
from simcore.validate.machines.buffers.cuda_long_convolution import CardLongConvolutionState
from simcore.validate.machines.buffers.cuda_prompts import CardPromptState
from simcore.validate.machines.buffers.cuda_served import (
    ALONE,
    SEQUENCES,
    WITH_PROMPTS,
    Cache,
    CardServedState,
    rounded,
    rounded_rows,
)
from simcore.validate.machines.buffers.decoder import Weights
from simcore.validate.machines.buffers.long_convolution import Parameters, parameters
from simcore.validate.machines.buffers.prompts import model_of
from simcore.validate.machines.here import check_prompts
from simcore.validate.machines.state import CardState, run_kernel, torch_dtype
from simcore.validate.timing.allocator import memory_for_others
from simcore.validate.timing.cuda_times import operands

SEED = 0
STUDIES = "decode, serving, tiling, linear_attention, decode_attention and prompt"
# Strategies that run, by study.
STRATEGIES = {"decode": ("tensor_parallel", "alspec"), "tiling": ("lazy", "eager", "fractal")}


class CardOperatorState(CardState):
    """Random operands of one operator, in sets; a run's launches take the first LAUNCHES in turn, `reset`
    reads all others: running on each, tens of thousands of kernels for some methods, takes seconds."""

    def __init__(self, op: Op, sets: Sequence[tuple[Tensor, ...]]) -> None:
        self.op, self.sets, self.others = op, list(sets[:LAUNCHES]), list(sets[LAUNCHES:])
        self._next = 0
        self._buffers: dict[Hashable, Any] = {}

    def reset(self) -> None:
        """Reads the sets of operands that no launch takes, the last one by the operator. If launches take all
        sets, the next one has already been unused for the longest time."""
        if not self.others:
            return
        self._next = 0
        for others in self.others[:-1]:
            for x in others:
                x.sum()
        with one_stream(self._buffers):
            run_kernel(self.op, *self.others[-1])

    def key(self) -> int:
        """Returns the number of the next operands."""
        return self._next

    def restore(self, key: int) -> None:
        """Sets the number of the next operands."""
        self._next = key

    def execute(self, op: Op) -> None:
        """Runs the operator. Raises ValueError if it would have to read a gate."""
        if current_gate() is not None:
            raise ValueError(f"--on cuda: {op.kind} reads no gate")
        run_kernel(op, *self.sets[self._next])
        self.skip(op)

    def skip(self, op: Op) -> None:
        """Goes to the next operands."""
        del op
        self._next = (self._next + 1) % len(self.sets)


@contextmanager
def _refused(where: str) -> Iterator[None]:
    """Raises InputError, with `where` in front, for a model or sizes that no buffers are made for; one that
    says where it is from stays as it is."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{where}: {error}") from None


@dataclass
class CardStates:
    """Makes the states of set-ups on a card whose L2 cache has `l2_bytes`; keeps the weights of the last
    model, or its parameters, which cases of many batches, contexts and schedules share. `given`: the weights
    of the one model that it serves, if another process has made them."""

    l2_bytes: int
    device: torch.device | str = "cuda"
    given: Weights | None = None
    _weights: tuple[Any, list[list[Weights]]] | None = field(default=None)
    _parameters: tuple[LongConvolution, Parameters] | None = field(default=None)

    def of(self, setup: Setup) -> list[Any]:
        """Returns a state for each rank. Raises InputError for a model that a card does not run yet."""
        match setup.model:
            case Decoder() as model:
                return self._decoder(model, setup)
            case ServedDecoder() as model:
                return [self._served(model, setup)]
            case LongConvolution() as model:
                return [CardLongConvolutionState(model, SEED, self.device, self._parameters_of(model))]
            case Instances() as model:
                return [self._instances(model, setup)]
            case Prompt() as prompt:
                with _refused("--on cuda"):
                    weights = self._weights_of(model_of(prompt), 1, "decoder")[0][0]
                    return [CardPromptState(prompt, weights, SEED, self.device)]
            case Op() as op:
                self.forget()
                return [CardOperatorState(op, operands(TABLE[op.kind], op, self.l2_bytes, self.device))]
            case other:
                raise InputError(f"--on cuda: a {type(other).__name__} is not run on a card yet")

    def forget(self) -> None:
        """Drops weights and parameters."""
        self._weights = self._parameters = None

    def _parameters_of(self, model: LongConvolution) -> Parameters:
        """Returns the parameters of a model of long convolutions, the same for all of its schedules."""
        plain = replace(model, tiles=(), one_launch=False, tokens_per_launch=1)
        if self._parameters is None or self._parameters[0] != plain:
            self.forget()
            drawn = parameters(plain, SEED, torch_dtype(model.dtype)).to(self.device)
            self._parameters = plain, drawn
        return self._parameters[1]

    def weights_for_others(self, model: ServedDecoder) -> Weights:
        """Returns the weights of a model on one rank, in memory that other processes see."""
        self.forget()
        with memory_for_others():
            ((found,),) = self._weights_of(model, 1, "for others")
        return found

    def _weights_of(self, model: Decoder | ServedDecoder, sets: int, kind: str) -> list[list[Weights]]:
        """Returns at least `sets` sets of the weights of all ranks, with consecutive seeds. Keeps them until
        another model or kind is asked for, because two may not fit into memory together."""
        drawn = drawn_of(model), model.config.weights, kind
        if self._weights is None or self._weights[0] != drawn:
            self.forget()
            self._weights = drawn, []
        found = self._weights[1]
        places = self._places(model.ranks)
        while len(found) < sets:
            found.append(card_weights(model, SEED + len(found), places, drawn_on=self.device))
        return found

    def _places(self, ranks: int) -> Sequence[torch.device | str]:
        """Returns the device of each of so many ranks: a card each."""
        if ranks == 1 or torch.device(self.device).type != "cuda":
            return [self.device] * ranks
        return [torch.device("cuda", rank % torch.cuda.device_count()) for rank in range(ranks)]

    def _decoder(self, model: Decoder, setup: Setup) -> list[CardDecoderState]:
        ranks = prod(setup.mesh.values())
        with _refused("--on cuda"):
            (weights,) = self._weights_of(model, 1, "decoder")
            return card_decoder_states(
                model, setup.mesh, SEED, setup.holds["context"], setup.holds["tokens"],
                device=self.device, weights=weights, devices=self._places(ranks) if ranks > 1 else None,
            )  # fmt: skip

    def _served(self, model: ServedDecoder, setup: Setup) -> CardServedState:
        holds = setup.holds
        if setup.mesh.get(TENSOR, 1) != prod(setup.mesh.values()):
            raise InputError("--on cuda: devices: one server runs on a card")
        with _refused("--on cuda: strategies"):
            weights = self.given or self._weights_of(model, 1, "decoder")[0][0]
            tokens, most = min(holds["kv_tokens"], holds["room_tokens"]), holds["step_rows"]
            # Rehearsals run as many as are captured; some that have ended are still computed.
            running = max(rounded(most, WITH_PROMPTS), rounded(most, SEQUENCES))
            positions = max(rounded_rows(holds["longest_prompt"]), holds["longest"]) + PAGE
            turns = weights.constants.frequencies
            cache = Cache(model, tokens, positions, running, running + most, SEED, self.device, turns)
            return CardServedState(model, weights, cache, most)

    def _instances(self, model: Instances, setup: Setup) -> CardInstancesState:
        weights = self._weights_of(model.decoder, model.sets, "instances")
        states: list[CardDecoderState] = []
        for i in range(model.count):
            states += card_decoder_states(
                model.decoder, setup.mesh, SEED + i, setup.holds["context"], 1,
                device=self.device, weights=weights[i % model.sets],
            )  # fmt: skip
        return CardInstancesState(states)


def check_card_runs(scenario: Scenario, where: str) -> None:
    """Raises InputError for a study or a strategy that the machine on a card does not run yet."""
    if isinstance(scenario, LinearAttentionScenario | DecodeAttentionScenario):
        return
    if isinstance(scenario, PromptScenario):
        check_prompts(scenario, where, "a card")
        if max(scenario.batch) > ALONE[-1]:
            raise InputError(f"{where}: batch: is {max(scenario.batch):,}; --on cuda runs 1 to {ALONE[-1]:,}")
        return
    if isinstance(scenario, ServingScenario):
        _check_serving(scenario, where)
        return
    if not isinstance(scenario, DecodeScenario | TilingScenario):
        raise InputError(
            f"{where}: study: {scenario.study} is not run on a card yet; --on cuda runs {STUDIES}"
        )
    allowed = STRATEGIES[scenario.study]
    for i, strategy in enumerate(scenario.strategies):
        if strategy.kind not in allowed:
            raise InputError(
                f"{where}: strategies[{i}].kind: {strategy.kind} is not run on a card yet;"
                f" --on cuda runs {', '.join(allowed)}"
            )
    cards = torch.cuda.device_count()
    for i, strategy in enumerate(scenario.strategies):
        at = f"{where}: strategies[{i}]"
        # Ranks on one card share its memory and have no link: their times are not those of several cards.
        groups, most = 2 if isinstance(strategy, AlSpec) else 1, max(getattr(strategy, "ranks", (1,)))
        if 0 < cards < groups:
            raise InputError(f"{at}.kind: is alspec, which --on cuda runs on 2 cards or more; there is 1")
        if groups * most > cards > 0:
            fit, of = cards // groups, " in each of 2 groups" if groups > 1 else ""
            how = "on one card" if cards == 1 else "a card each"
            raise InputError(
                f"{at}.ranks: is {most}; --on cuda runs {f'1 to {fit}' if fit > 1 else 1}{of}, {how}"
            )
        if any(getattr(strategy, "half_storage", ())):
            raise InputError(f"{at}.half_storage: is not run on a card yet; give false")


def _check_serving(scenario: ServingScenario, where: str) -> None:
    """Raises InputError for what a card does not serve yet."""
    for i, strategy in enumerate(scenario.strategies):
        at = f"{where}: strategies[{i}]"
        if (most := max(strategy.ranks)) > 1:
            raise InputError(f"{at}.ranks: is {most}; --on cuda runs 1, on one card")
        if isinstance(strategy, TemporalFusion) and (streams := max(strategy.prompt_streams)) > 1:
            raise InputError(f"{at}.prompt_streams: is {streams}; --on cuda computes prompts on 1")
        if getattr(strategy, "prefix_caching", False):
            raise InputError(f"{at}.prefix_caching: is not run on a card yet; give false")
    if scenario.workload.sessions is not None:
        raise InputError(f"{where}: workload.sessions: are not run on a card yet; leave them out")
    if any(count != 1 for count in scenario.devices or ()):
        raise InputError(f"{where}: devices: --on cuda serves with 1, this machine's card")
