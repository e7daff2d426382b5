"""Measures what the steps of a service cost beyond their ops and launches: of the card, and of its host.

    in_step_s   median over cases of ((step - start of a graph) - sum of its ops alone) / its kernels
    batch_s     median over cases of the host time in which a launch says whose tokens it computes

A case decodes with sequences of unlike lengths; each launch says anew whose tokens it computes, as in a
service when requests come and go, and is then replayed a few times. The kernels are those of the machine that
serves, which read block tables, ids and rows besides what is priced (`buffers.cuda_served`). These come once
a step, and are shared out among the kernels of LAYERS layers: of a model of more layers they count too much.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from simcore.kernels.decoder.paged_attention import PAGE, spread
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

# Sequences, and their tokens in the mean.
CASES = ((2, 700), (6, 600), (12, 700), (24, 900), (48, 1100))
LAYERS, LAUNCHES, REPLAYS, RUNS, SEED = 8, 12, 4, 3, 0
# What the steps of these ops are made of.
KINDS = frozenset({
    "embedding", "norm", "matmul", "rotary", "kv_append", "paged_attention", "residual", "activation",
    "sample",
})  # fmt: skip

# (sequences, mean tokens) -> the seconds of a step and its ops; the host's seconds of a batch.
Step = Callable[[int, int], tuple[float, Sequence[Op], float]]


def step_costs(step: Step, start_s: float, alone_s: Callable[[Op], float]) -> Iterator[tuple[float, float]]:
    """Yields in_step_s and batch_s of each case."""
    for case in CASES:
        took_s, ops, batch_s = step(*case)
        yield beyond_ops_s(took_s, start_s, ops, alone_s), batch_s


def costs_of(found: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Returns both from all cases, at least 0, in seconds by name."""
    in_step_s, batch_s = (max(0.0, median(each)) for each in zip(*found, strict=True))
    return {"in_step_s": in_step_s, "batch_s": batch_s}


def profile_note(found: Sequence[tuple[float, float]]) -> str:
    """Returns the profile's note about them."""
    cases = ", ".join(f"{sequences} x {tokens}" for sequences, tokens in CASES)
    nodes, batches = (", ".join(f"{1e6 * x:.3g}" for x in each) for each in zip(*found, strict=True))
    of = f"{LAYERS} layers of {LLAMA[0]} with sequences x tokens of {cases}"
    return f"in_step_s: {nodes} us, batch_s: {batches} us; {of}"


def step_costs_here(floor: Roofline, reached: Reached) -> list[tuple[float, float]]:
    """Returns both of each case on this card, in seconds. Raises the card's errors."""
    config = replace(load_config(MODELS / f"{LLAMA[0]}.json"), layers=LAYERS)
    return list(step_costs(steps_of(config, TorchCudaApi(), "cuda"), *alone_here(floor, reached)))


def steps_of(config: DecoderConfig, api: CudaApi, device: torch.device | str) -> Step:
    """Returns a function that runs a case on a card."""
    model = ServedDecoder(config)
    (weights,) = card_weights(model, SEED, device=device, drawn_on=device)

    def step(sequences: int, tokens: int) -> tuple[float, Sequence[Op], float]:
        lengths = spread(sequences * tokens, sequences)
        positions = max(lengths) + LAUNCHES * REPLAYS
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
        return median(x.end_s - x.start_s for x in replays), ops, trace.verbs["batch_s"]

    return step


def _last_run(card: Card, model: ServedDecoder, lengths: Sequence[int]) -> Trace:
    requests = [Request(i, 0.0, length, LAUNCHES * REPLAYS, 1) for i, length in enumerate(lengths)]

    def program(m: Machine) -> Program:
        for i in range(LAUNCHES):
            cached = [length - 1 + i * REPLAYS for length in lengths]
            decoding = list(zip(requests, cached, strict=True))
            sizes = decode_sizes(len(lengths), sum(cached) + len(lengths))
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
