"""Measures how many kernels of a decode step get in between two of a prompt that is computed beside it.

    kernels_between = median over prompts of   steps decoded while the prompt ran
                                               x kernels of a step / kernels of a prompt

The prompts are those of temporal fusion itself, on a card: as soon as a place is free, a prompt is computed
on a stream of its own while the others decode. A step that began before a prompt, or ends after it, was as
fast as alone outside of it, so the share that ran inside is

    1 - (seconds of the step outside of the prompt) / (seconds of such a step alone)

Layers without attention over the prompt are no substitute: as many rows over two cached tokens each have
attention of another kind, which leaves room for nearly a whole step.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

import torch

from simcore.machine.machine import MAIN, Machine, Program
from simcore.machine.trace import Span
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.temporal_fusion import temporal_fusion
from simcore.validate.calibration.cuda_grid import LLAMA, MODELS
from simcore.validate.machines.buffers.cuda_decoder import card_weights
from simcore.validate.machines.buffers.cuda_served import Cache, CardServedState, rounded_rows
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.workload.requests import END, REQUESTS, Journal, Request

# Places, and requests; the lengths of prompts in tokens, in turn; the tokens of the shortest answer.
SLOTS, COUNT, ANSWER, SEED = 8, 80, 60, 0
PROMPTS = (256, 512, 192, 1024, 320, 768, 448, 640, 384, 896)
# Runs that count, and those before: the first captures, the second sends its graphs to the card.
RUNS, BEFORE = 2, 2
# A prompt counts if steps ran beside it for this share of its time, and if so many did.
BUSY, FEWEST = 0.9, 10


def kernels_between_here() -> tuple[float, str]:
    """Returns the constant of this card, at least 1, and a note about it. Raises the card's errors, and
    ValueError if too few prompts ran beside steps all the time."""
    config = load_config(MODELS / f"{LLAMA[0]}.json")
    model = ServedDecoder(config)
    found = [each for spans in traces_on(config, TorchCudaApi(), "cuda") for each in steps_inside(spans)]
    ratio = model.decode.kernels / model.prefill.kernels
    return constant(found, ratio), (
        f"kernels_between: {median(found):.3g} steps of {LLAMA[0]} in the median ran within a prompt of"
        f" {min(PROMPTS)} to {max(PROMPTS)} tokens, {len(found)} prompts, 1 to {SLOTS} sequences"
    )


def constant(found: Sequence[float], ratio: float) -> float:
    """Returns the constant from the steps within each prompt. `ratio`: kernels of a step over those of a
    prompt. Raises ValueError for fewer prompts than FEWEST."""
    if len(found) < FEWEST:
        raise ValueError(f"{len(found)} prompts ran beside steps all the time; {FEWEST} are needed")
    return max(1.0, median(found) * ratio)


def steps_inside(spans: Sequence[Span]) -> Iterator[float]:
    """Yields how many decode steps ran within each prompt that others ran beside all the time, of the spans
    of a run. Steps beside two prompts tell nothing of either."""
    steps = sorted((s for s in spans if s.stream == MAIN and _sequences(s)), key=lambda s: s.start_s)
    prompts = sorted((s for s in spans if s.stream != MAIN), key=lambda s: s.start_s)
    alone_s = _alone_s(steps, prompts)
    for prompt in prompts:
        beside = [step for step in steps if _meet(step, prompt)]
        shared = any(_meet(step, other) for step in beside for other in prompts if other is not prompt)
        if shared or not beside or any(_sequences(s) not in alone_s for s in beside):
            continue
        inside_s = [min(s.end_s, prompt.end_s) - max(s.start_s, prompt.start_s) for s in beside]
        if sum(inside_s) < BUSY * (prompt.end_s - prompt.start_s):
            continue
        outside_s = [s.end_s - s.start_s - inside for s, inside in zip(beside, inside_s, strict=True)]
        yield sum(
            1.0 - min(1.0, out_s / alone_s[_sequences(s)]) for s, out_s in zip(beside, outside_s, strict=True)
        )


def _alone_s(steps: Sequence[Span], prompts: Sequence[Span]) -> dict[int, float]:
    """Returns the median seconds of a step beside no prompt, by its sequences."""
    found: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        if not any(_meet(step, prompt) for prompt in prompts):
            found[_sequences(step)].append(step.end_s - step.start_s)
    return {sequences: median(seconds) for sequences, seconds in found.items()}


def _sequences(step: Span) -> int:
    """Returns the sequences of a decode step; 0 of another span."""
    return next((each.op["sequences"] for each in step.ops if each.op.kind == "paged_attention"), 0)


def _meet(one: Span, other: Span) -> bool:
    return one.start_s < other.end_s and other.start_s < one.end_s


def traces_on(config: DecoderConfig, api: CudaApi, device: torch.device | str) -> Iterator[Sequence[Span]]:
    """Runs temporal fusion on a card and yields the spans of each run that counts."""
    model = ServedDecoder(config)
    (weights,) = card_weights(model, SEED, [device], drawn_on=device)
    positions = rounded_rows(max(PROMPTS) + ANSWER + COUNT)
    cache = Cache(model, COUNT * positions, positions, SLOTS, COUNT, SEED, device)
    state = CardServedState(model, weights, cache, SLOTS)
    card = Card([state], api)
    for i in range(BEFORE + RUNS):
        state.reset()
        trace = card.start().run(lambda m: program(m, model, positions))
        if i >= BEFORE:
            yield trace.spans


def program(m: Machine, model: ServedDecoder, slot_tokens: int) -> Program:
    """Serves requests that come at once, one prompt after the other; their answers end one by one."""
    for i in range(COUNT):
        answer = ANSWER + i % SLOTS
        m.send(REQUESTS, Request(i, 0.0, PROMPTS[i % len(PROMPTS)], answer, answer), m.rank)
    m.send(REQUESTS, END, m.rank)
    yield from temporal_fusion(m, model, Journal(), slots=SLOTS, slot_tokens=slot_tokens)
