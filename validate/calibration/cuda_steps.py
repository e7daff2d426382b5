"""Measures what each kernel in the steps of a service takes beyond its price.

    in_step_s   median over cases of ((step - start of a graph) - sum of its ops alone) / its kernels

A case decodes with sequences of unlike lengths; each launch says anew whose tokens it computes, as in a
service when requests come and go, and is then replayed a few times. The kernels are those of the machine that
serves, which read block tables, ids and rows besides what is priced (`buffers.cuda_served`). These come once
a step, and are shared out among the kernels of all layers: of a model of fewer layers they count too little.
The cache has room for ROOM tokens of each sequence, as a service has: with less, attention would be cut into
other parts than those that are priced.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median

import torch

from simcore.kernels.decoder.paged_attention import PAGE, ROOM, spread
from simcore.machine.machine import Machine, Program
from simcore.machine.trace import Trace
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.models.served_decoder import ServedDecoder, decode_sizes, growth
from simcore.ops.op import Op, Roofline
from simcore.validate.benchmarks.timing import Card as Reached
from simcore.validate.calibration.cuda_grid import LLAMA, MODELS
from simcore.validate.calibration.cuda_nodes import alone_here, beyond_ops_s
from simcore.validate.machines.buffers.cuda_decoder import card_weights
from simcore.validate.machines.buffers.cuda_served import Cache, CardServedState
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.validate.timing.pace import pace
from simcore.workload.requests import Batch, Request

# Sequences, and their tokens in the mean. What a step takes beyond its ops depends on its kernels, and these
# on its rows: many cases, of rows with kernels of different kinds.
CASES = (
    (1, 700), (2, 700), (4, 600), (6, 600), (9, 650), (12, 700), (16, 800), (20, 700), (24, 900), (32, 800),
    (48, 1100), (64, 900),
)  # fmt: skip
LAUNCHES, REPLAYS, RUNS, SEED = 12, 4, 3, 0
# What the steps of these ops are made of.
KINDS = frozenset({
    "embedding", "norm", "matmul", "rotary", "kv_append", "paged_attention", "residual", "activation",
    "sample",
})  # fmt: skip

# (sequences, mean tokens) -> the seconds of a step, and its ops.
Step = Callable[[int, int], tuple[float, Sequence[Op]]]


def step_costs(step: Step, start_s: float, alone_s: Callable[[Op], float]) -> Iterator[float]:
    """Yields in_step_s of each case."""
    for case in CASES:
        took_s, ops = step(*case)
        yield beyond_ops_s(took_s, start_s, ops, alone_s)


def profile_note(found: Sequence[float]) -> str:
    """Returns the profile's note about it."""
    cases = ", ".join(f"{sequences} x {tokens}" for sequences, tokens in CASES)
    each = ", ".join(f"{1e6 * seconds:.3g}" for seconds in found)
    return f"in_step_s: {each} us; {LLAMA[0]} with sequences x tokens of {cases}"


def step_costs_here(floor: Roofline, reached: Reached) -> list[float]:
    """Returns in_step_s of each case on this card. Raises the card's errors."""
    config = load_config(MODELS / f"{LLAMA[0]}.json")
    return list(step_costs(steps_of(config, TorchCudaApi(), "cuda"), *alone_here(floor, reached)))


def steps_of(config: DecoderConfig, api: CudaApi, device: torch.device | str) -> Step:
    """Returns a function that runs a case on a card."""
    model = ServedDecoder(config)
    (weights,) = card_weights(model, SEED, [device], drawn_on=device)

    def step(sequences: int, tokens: int) -> tuple[float, Sequence[Op]]:
        lengths = spread(sequences * tokens, sequences)
        positions = max(ROOM, *lengths) + LAUNCHES * REPLAYS
        # Each sequence's last block is not full, and it is given one ahead.
        kv_tokens = sum(lengths) + sequences * (LAUNCHES * REPLAYS + 2 * PAGE)
        state = CardServedState(
            model, weights, Cache(model, kv_tokens, positions, sequences, sequences, SEED, device), sequences
        )
        card = Card([state], api)
        trace = _last_run(card, model, lengths)
        later = sorted(trace.spans, key=lambda span: span.start_s)[len(trace.spans) // 2 :]
        replays = [span for span in later if span.replay]
        ops = [priced.op.without_place for priced in replays[len(replays) // 2].ops]
        return median(x.end_s - x.start_s for x in replays), ops

    return step


def _last_run(card: Card, model: ServedDecoder, lengths: Sequence[int]) -> Trace:
    requests = [Request(i, 0.0, length, LAUNCHES * REPLAYS, 1) for i, length in enumerate(lengths)]

    def program(m: Machine) -> Program:
        for i in range(LAUNCHES):
            cached = [length - 1 + i * REPLAYS for length in lengths]
            decoding = list(zip(requests, cached, strict=True))
            sizes = decode_sizes(len(lengths), sum(cached) + len(lengths), max(cached) + 1)
            yield m.wait(
                m.launch(
                    model.decode, sizes=sizes, advance=growth(len(lengths)), repeat=REPLAYS,
                    batch=partial(Batch, decoding=decoding),
                )
            )  # fmt: skip

    for _ in range(RUNS):
        for state in card.states:
            state.reset()
        trace, _ = pace().keeps(lambda: card.start().run(program))
    return trace
