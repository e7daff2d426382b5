"""Measures the time of a kernel in a captured graph beyond its time alone (`in_graph_s` of `Overheads`).

    in_graph_s = median over cases of ((step - start of a graph) - sum of its ops alone) / its kernels

A step is the step of a few layers of a decoder, run as in studies. Ops alone follow one small kernel
(`cuda_times`). In a step they follow kernels of many kinds, whose code and memory pages have displaced theirs
in the card's caches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

from simcore.kernels.table import TABLE
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.decoder import TENSOR, Decoder
from simcore.models.decoder_config import load_config
from simcore.ops.op import Op, Roofline
from simcore.validate.benchmarks.timing import Card as Reached
from simcore.validate.calibration.cuda_grid import LLAMA, MODELS
from simcore.validate.machines.buffers.cuda_decoder import card_decoder_states, card_weights
from simcore.validate.machines.cuda.cuda_api import TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.validate.timing import cuda_times as card_measure

# Batches and contexts; tokens of a run, of which the second half counts; runs, of which the last counts.
CASES = ((1, 1021), (4, 3989), (16, 1531), (32, 2039))
LAYERS, TOKENS, RUNS, SEED = 8, 24, 3, 0
KINDS = frozenset({
    "norm", "matmul", "rotary", "kv_append", "decode_attention", "residual", "activation",
})  # fmt: skip

# (sequences, tokens of context) -> the seconds of a step, and its ops.
Step = Callable[[int, int], tuple[float, Sequence[Op]]]


def beyond_ops_s(took_s: float, start_s: float, ops: Sequence[Op], alone_s: Callable[[Op], float]) -> float:
    """Returns the seconds that each kernel of a graph takes beyond its time alone."""
    return (took_s - start_s - sum(map(alone_s, ops))) / sum(op.kernels for op in ops)


def node_costs(step: Step, start_s: float, alone_s: Callable[[Op], float]) -> Iterator[float]:
    """Yields in_graph_s of each case."""
    for case in CASES:
        took_s, ops = step(*case)
        yield beyond_ops_s(took_s, start_s, ops, alone_s)


def node_cost(found: Sequence[float]) -> float:
    """Returns in_graph_s from several cases, at least 0: if a step takes less than its ops, they share costs
    that each has alone."""
    return max(0.0, median(found))


def profile_note(found: Sequence[float]) -> str:
    """Returns the profile's note about it."""
    each = ", ".join(f"{1e6 * seconds:.2f}" for seconds in found)
    cases = ", ".join(f"{batch} x {context}" for batch, context in CASES)
    return f"in_graph_s: {each} us, {LAYERS} layers of {LLAMA[0]} at batch x context of {cases}"


def alone_here(floor: Roofline, reached: Reached) -> tuple[float, Callable[[Op], float]]:
    """Returns the start of a graph on this card, and a function that gives the time of an op alone, measured
    once, both in seconds. They raise the card's errors."""

    @cache
    def alone_s(op: Op) -> float:
        return card_measure.measured(TABLE[op.kind], op, floor, reached).median_s

    start_s, _ = card_measure.between().seconds(again=True)
    return start_s, alone_s


def node_costs_here(floor: Roofline, reached: Reached) -> list[float]:
    """Returns in_graph_s of each case on this card. Raises the card's errors."""
    return list(node_costs(_steps(), *alone_here(floor, reached)))


def _steps() -> Step:
    config = replace(load_config(MODELS / f"{LLAMA[0]}.json"), layers=LAYERS)
    weights = card_weights(Decoder(config, outside=False), SEED, ["cuda"])

    def step(batch: int, context: int) -> tuple[float, Sequence[Op]]:
        model = Decoder(config, batch=batch, outside=False)
        states = card_decoder_states(model, {TENSOR: 1}, SEED, context, TOKENS, weights=weights)
        return of_later_tokens(run_on(Card(states, TorchCudaApi()), model, context))

    return step


def run_on(card: Card, model: Decoder, context: int) -> Trace:
    """Returns the last run of a decoder on a card."""

    def program(m: Machine) -> Program:
        # The program waits only for the last ticket, so that a step includes no time of the host.
        tickets = [m.launch(model.token_step, sizes={"context": context + i}) for i in range(TOKENS)]
        yield m.wait(tickets[-1])

    for _ in range(RUNS):
        state: Any
        for state in card.states:
            state.reset()
        trace = card.start().run(program)
    return trace


def of_later_tokens(trace: Trace) -> tuple[float, Sequence[Op]]:
    """Returns the median time of a token's graph in the second half of a run, and the ops of the token in the
    middle of that half."""
    later = sorted(trace.spans, key=lambda span: span.start_s)[TOKENS // 2 :]
    ops = [priced.op.without_place for priced in later[len(later) // 2].ops]
    return median(span.end_s - span.start_s for span in later), ops
