"""The buffers with which the machine on a card runs what a study asks for, and what it cannot run yet.

Decoders have random weights, drawn on the card. A single operator has so many sets of operands that none of
them is in the L2 cache when all others have been read (`cuda_times.operands`), so that its times
are comparable with those of a profile: each launch takes the next one; between two runs those are read that
no launch takes, the last of them by the operator.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from simcore.input.files import InputError
from simcore.kernels.streams import current_gate, one_stream
from simcore.kernels.table import TABLE
from simcore.models.decoder import Decoder
from simcore.models.long_convolution import LongConvolution
from simcore.ops.op import Graph, Op, Publication
from simcore.scenario import Scenario
from simcore.schedules.one_launch import LAUNCHES
from simcore.sim.runs import Setup
from simcore.studies.decode.scenario import DecodeScenario, TensorParallel
from simcore.studies.operators.scenario import DecodeAttentionScenario, LinearAttentionScenario
from simcore.studies.tiling.scenario import TilingScenario
from simcore.validate.calibration.cuda_instances import CardInstancesState, Instances
from simcore.validate.machines.buffers.cuda_decoder import (
    CardDecoderState,
    card_decoder_states,
    card_weights,
    drawn_of,
)
from simcore.validate.machines.buffers.cuda_long_convolution import CardLongConvolutionState
from simcore.validate.machines.buffers.decoder import Weights
from simcore.validate.timing.cuda_times import operands

SEED = 0
TENSOR_PARALLEL = "tensor_parallel"
STUDIES = "decode, tiling, linear_attention and decode_attention"
TILINGS = ("lazy", "eager", "fractal")


class CardOperatorState:
    """Random operands of one operator, set by set; the launches of a run take the first LAUNCHES in turn, and
    `reset` reads all others: to run on each, tens of thousands of kernels for some methods, takes seconds."""

    def __init__(self, op: Op, sets: Sequence[tuple[Tensor, ...]]) -> None:
        self.op, self.sets, self.others = op, list(sets[:LAUNCHES]), list(sets[LAUNCHES:])
        self._next = 0
        self._buffers: dict[Hashable, Any] = {}

    def reset(self) -> None:
        """Reads the sets of operands that no launch takes, the last of them by the operator. Where launches
        take all sets, the next one has not been used for the longest time already."""
        if not self.others:
            return
        self._next = 0
        for others in self.others[:-1]:
            for x in others:
                x.sum()
        with one_stream(self._buffers):
            TABLE[self.op.kind].run(self.op, *self.others[-1])

    def told(self, graph: Graph) -> frozenset[str]:
        """No size is read on the device."""
        del graph
        return frozenset()

    def bound(self, graph: Graph) -> frozenset[str]:
        """All that a graph needs."""
        return graph.needs

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """None: an operator is bound."""
        del stream
        return {}

    def key(self) -> int:
        """Which operands are next."""
        return self._next

    def restore(self, key: int) -> None:
        """These are next."""
        self._next = key

    def execute(self, op: Op) -> None:
        """Runs the operator. Raises ValueError where it would have to read a gate."""
        if current_gate() is not None:
            raise ValueError(f"--on cuda: {op.kind} reads no gate")
        TABLE[op.kind].run(op, *self.sets[self._next])
        self.skip(op)

    def skip(self, op: Op) -> None:
        """The next one takes the next operands."""
        del op
        self._next = (self._next + 1) % len(self.sets)

    def put(self, publication: Publication, to: Any) -> None:
        """Single ops publish nothing."""
        raise AssertionError(f"{publication.signal} is published by no operator")

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Single ops meet nobody."""
        raise AssertionError(f"{op.name} is no operator of one device")


@dataclass
class CardStates:
    """Makes the states of set-ups on a card whose L2 cache has `l2_bytes`; keeps the weights of the last
    model, which cases of many batches and contexts share."""

    l2_bytes: int
    device: torch.device | str = "cuda"
    _weights: tuple[Any, list[Weights]] | None = field(default=None)

    def of(self, setup: Setup) -> list[Any]:
        """A state for each rank. Raises InputError for a model that a card does not run yet."""
        match setup.model:
            case Decoder() as model:
                return self._decoder(model, setup)
            case LongConvolution() as model:
                self.forget()
                return [CardLongConvolutionState(model, SEED, self.device)]
            case Instances() as model:
                return [self._instances(model, setup)]
            case Op() as op:
                self.forget()
                return [CardOperatorState(op, operands(TABLE[op.kind], op, self.l2_bytes, self.device))]
            case other:
                raise InputError(f"--on cuda: a {type(other).__name__} is not run on a card yet")

    def _decoder(self, model: Decoder, setup: Setup) -> list[Any]:
        holds = setup.holds
        try:
            return list(
                card_decoder_states(
                    model, setup.mesh, SEED, holds["context"], holds["tokens"],
                    device=self.device, weights=self._weights_of(model),
                )
            )  # fmt: skip
        except ValueError as error:
            raise InputError(f"--on cuda: {error}") from None

    def forget(self) -> None:
        """Weights are let go."""
        self._weights = None

    def _instances(self, model: Instances, setup: Setup) -> CardInstancesState:
        holds, decoder = setup.holds, model.decoder
        drawn = drawn_of(decoder), "instances"
        if self._weights is None or self._weights[0] != drawn:
            self.forget()
            self._weights = drawn, []
        weights = self._weights[1]
        while len(weights) < model.sets:
            seed = SEED + len(weights)
            weights += card_weights(decoder, seed, device=self.device, drawn_on=self.device)
        states: list[CardDecoderState] = []
        for i in range(model.count):
            states += card_decoder_states(
                decoder, setup.mesh, SEED + i, holds["context"], 1,
                device=self.device, weights=[weights[i % model.sets]],
            )  # fmt: skip
        return CardInstancesState(states)

    def _weights_of(self, model: Decoder) -> list[Weights]:
        if self._weights is None or self._weights[0] != drawn_of(model):
            # Two models may not have room beside each other.
            self.forget()
            self._weights = (
                drawn_of(model),
                card_weights(model, SEED, device=self.device, drawn_on=self.device),
            )
        return self._weights[1]


def check_card_runs(scenario: Scenario, where: str) -> None:
    """Raises InputError for a study or a strategy that the machine on a card does not run yet."""
    if isinstance(scenario, LinearAttentionScenario | DecodeAttentionScenario):
        return
    if isinstance(scenario, TilingScenario):
        _check_tilings(scenario, where)
        return
    if not isinstance(scenario, DecodeScenario):
        raise InputError(
            f"{where}: study: {scenario.study} is not run on a card yet; --on cuda runs {STUDIES}"
        )
    for i, strategy in enumerate(scenario.strategies):
        if not isinstance(strategy, TensorParallel):
            raise InputError(
                f"{where}: strategies[{i}].kind: {strategy.kind} is not run on a card yet;"
                f" --on cuda runs {TENSOR_PARALLEL}"
            )
    # Ranks that share one card share its memory, and have no link: theirs are not the times of several cards.
    for i, strategy in enumerate(scenario.strategies):
        if isinstance(strategy, TensorParallel) and (most := max(strategy.ranks)) > 1:
            raise InputError(f"{where}: strategies[{i}].ranks: is {most}; --on cuda runs 1, on one card")


def _check_tilings(scenario: TilingScenario, where: str) -> None:
    for i, strategy in enumerate(scenario.strategies):
        if strategy.kind not in TILINGS:
            allowed = ", ".join(TILINGS)
            raise InputError(
                f"{where}: strategies[{i}].kind: {strategy.kind} is not run on a card yet;"
                f" --on cuda runs {allowed}"
            )
        if any(getattr(strategy, "half_storage", ())):
            raise InputError(f"{where}: strategies[{i}].half_storage: is not run on a card yet; give false")
