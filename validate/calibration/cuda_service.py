"""Measures what a host does between the steps of a service: the schedule's work, and saying whose tokens a
launch computes.

    idle card between two steps = wait_s + launch of the graph until it begins              (as of any launch)
                                  + batch_s + sequence_s n                                  (of a service)
                                  + prompt_s + each_prompt_s p                              (with prompts)

n: decoding sequences of the later step, p: prompts that end in it. The steps are those of
`continuous_batching` itself, on a card, of requests that come by the wall clock, first few and then many at
once. Where all come at the beginning and a launch follows each step, the host takes a third of it: in a
service it looks at the card and for requests, for milliseconds, between two launches. Each pair of constants
is a line through the steps without and with prompts, by the repeated median (Siegel 1982), which up to half
of the steps cannot mislead: other processes delay some of them, and an idle server waits for requests. A
host's pace changes from second to second, so several runs count together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

import torch

from simcore.machine.machine import MAIN, Machine, Overheads, Program
from simcore.machine.trace import Span
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.continuous_batching import continuous_batching
from simcore.validate.calibration.cuda_grid import LLAMA, MODELS
from simcore.validate.machines.buffers.cuda_decoder import card_weights
from simcore.validate.machines.buffers.cuda_served import Cache, CardServedState, rehearsal, rounded_rows
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card, CardRun
from simcore.validate.timing.pace import pace
from simcore.workload.requests import END, REQUESTS, Journal, Request

# Requests a second, one after the other, and requests of each; the lengths of prompts in tokens, in turn; the
# least and most tokens of an answer.
RATES_PER_S, REQUESTS_OF_A_RATE = (10.0, 20.0, 40.0), 50
PROMPTS, ANSWERS, SEED = (1024, 128, 512, 64, 256, 96, 768), (24, 160), 0
# Requests that run at once at most.
SEQUENCES = 96
# Runs that count.
RUNS = 3
# Tokens of a step at most, and of a block.
BUDGET, BLOCK = 1024, 16
# Seconds by the names of `machine.Overheads`.
Costs = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Gap:
    """For how long the card was idle before a step, s; the step's decoding sequences, and the prompts that
    end in it, None without prompts."""

    seconds: float
    sequences: int
    prompts: int | None = None


def gaps(spans: Sequence[Span]) -> list[Gap]:
    """Returns the gaps between the launches of one stream."""
    found, before = list[Gap](), None
    for span in sorted(spans, key=lambda span: span.start_s):
        if before is not None and span.launch != before.launch:
            kinds = {priced.op.kind: priced.op for priced in span.ops}
            attend, ends = kinds.get("paged_attention"), None
            sequences = attend["sequences"] if attend else 0
            if "prefill_attention" in kinds:
                ends = kinds["sample"]["tokens"] - sequences
            found.append(Gap(span.start_s - before.end_s, sequences, ends))
        before = span
    return found


def costs_of(found: Sequence[Gap], plain_s: float) -> Costs:
    """Returns the costs of a service, at least 0, where `plain_s` lie before any launch after a wait. Steps
    whose prompts all go on in the next one are left out: their hosts took as long as for one that ends, which
    `each_prompt_s`, of those that end, cannot say."""
    alone = [gap for gap in found if gap.prompts is None]
    base_s, sequence_s = _line([(gap.sequences, gap.seconds) for gap in alone])
    longer = [
        (gap.prompts, gap.seconds - base_s - sequence_s * gap.sequences) for gap in found if gap.prompts
    ]
    prompt_s, each_prompt_s = _line(longer)
    each = {"batch_s": base_s - plain_s, "sequence_s": sequence_s}
    each |= {"prompt_s": prompt_s, "each_prompt_s": each_prompt_s}
    return {name: max(0.0, seconds) for name, seconds in each.items()}


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns where a line through points begins, and its slope, at least 0."""
    # SciPy takes long to import.
    from scipy.stats import siegelslopes  # noqa: PLC0415

    x, y = zip(*points, strict=True)
    slope = max(0.0, float(siegelslopes(y, x).slope))
    return median(b - slope * a for a, b in points), slope


def plain_s(model: ServedDecoder, costs: Costs) -> float:
    """Returns how long a card is idle between two steps if nothing is to be done between them."""
    overheads = Overheads(**costs)
    return overheads.wait_s + overheads.begins_s(overheads.whole_launch_s(model.decode.kernels))


def service_costs_here(costs: Costs) -> tuple[Costs, str]:
    """Returns the costs on this machine beyond those of other launches, and the profile's note about them.
    Raises the card's errors."""
    config = load_config(MODELS / f"{LLAMA[0]}.json")
    found = list(gaps_on(config, TorchCudaApi(), "cuda"))
    each = costs_of(found, plain_s(ServedDecoder(config), costs))
    decode_us, prompts_us = (
        1e6 * median(gap.seconds for gap in found if (gap.prompts is None) == alone)
        for alone in (True, False)
    )
    said = ", ".join(f"{name} {1e6 * seconds:.3g} us" for name, seconds in each.items())
    return each, (
        f"{said}; before {len(found)} steps of {LLAMA[0]} by continuous batching at"
        f" {', '.join(f'{rate:g}' for rate in RATES_PER_S)} requests/s,"
        f" the card is idle for {decode_us:.0f} us in the median, with prompts {prompts_us:.0f}"
    )


def gaps_on(config: DecoderConfig, api: CudaApi, device: torch.device | str) -> Iterator[Gap]:
    """Runs the service on a card and yields its gaps."""
    model, places = ServedDecoder(config), REQUESTS_OF_A_RATE * len(RATES_PER_S)
    (weights,) = card_weights(model, SEED, [device], drawn_on=device)
    positions = rounded_rows(max(PROMPTS)) + ANSWERS[1] + BLOCK
    cache = Cache(model, SEQUENCES * positions, positions, SEQUENCES, places, SEED, device)
    state = CardServedState(model, weights, cache, SEQUENCES)
    card, blocks = Card([state], api), SEQUENCES * -(-positions // BLOCK)
    holds = {"streams": [MAIN], "prompts_apart": False, "step_rows": SEQUENCES, "step_tokens": BUDGET}

    def program(m: Machine) -> Program:
        yield from continuous_batching(
            m, model, Journal(), blocks=blocks, block_tokens=BLOCK, token_budget=BUDGET,
            max_sequences=SEQUENCES,
        )  # fmt: skip

    def served(number: int) -> CardRun:
        state.reset()
        run = card.start()
        run.feed(0, REQUESTS, arrivals(number))
        run.run(program)
        return run

    card.start().run(lambda m: rehearsal(m, model, {**holds, "longest_prompt": max(PROMPTS)}))
    for number in range(RUNS):
        # Requests come once.
        pace().settle()
        yield from gaps(served(number).trace.spans)


def arrivals(number: int) -> Iterator[tuple[float, object]]:
    """Yields the times of a run's requests, s, and the requests; at the end, the end."""
    random, at_s = Random(SEED + number), 0.0
    for i in range(REQUESTS_OF_A_RATE * len(RATES_PER_S)):
        at_s += random.expovariate(RATES_PER_S[i // REQUESTS_OF_A_RATE])
        answer = random.randint(*ANSWERS)
        yield at_s, Request(i, at_s, PROMPTS[i % len(PROMPTS)], answer, answer)
    yield at_s, END
