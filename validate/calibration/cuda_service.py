"""Measures what a host does between the steps of a service: the schedule's work, and saying whose tokens a
launch computes.

    idle card between two steps = wait_s + launch of the graph until it begins              (as of any launch)
                                  + batch_s + sequence_s n                                  (of a service)
                                  + prompt_s + each_prompt_s p                              (with prompts)

n: decoding sequences of the later step, p: prompts that end in it. The steps are those of
`continuous_batching` itself, on a card, of requests that come at once, with prompts of several lengths, and
of which in the end one leaves with each step. Each pair of constants is a line through the steps without and
with prompts, by the repeated median (Siegel 1982), which up to half of the steps cannot mislead: other
processes delay some of them. A host's pace changes from second to second, so several runs count together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from simcore.machine.machine import Machine, Overheads, Program
from simcore.machine.trace import Span
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.continuous_batching import continuous_batching
from simcore.validate.calibration.cuda_grid import LLAMA, MODELS
from simcore.validate.machines.buffers.cuda_decoder import card_weights
from simcore.validate.machines.buffers.cuda_served import Cache, CardServedState
from simcore.validate.machines.cuda.cuda_api import CudaApi, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.validate.timing.pace import pace
from simcore.workload.requests import END, REQUESTS, Journal, Request

# Requests, as many of each length of prompt in tokens; the tokens of the shortest answer.
SEQUENCES, PROMPTS, ANSWER, SEED = 160, (1024, 128, 512, 64, 1536, 256, 96, 768), 40, 0
# Runs that count, and those before: the first captures, the second sends its graphs to the card.
RUNS, BEFORE = 5, 2
# Tokens of a step at most, and of a block.
BUDGET, BLOCK = 2048, 16
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
    """Returns the costs of a service, at least 0, where `plain_s` lie before any launch after a wait."""
    alone = [gap for gap in found if gap.prompts is None]
    base_s, sequence_s = _line([(gap.sequences, gap.seconds) for gap in alone])
    longer = [
        (gap.prompts, gap.seconds - base_s - sequence_s * gap.sequences)
        for gap in found
        if gap.prompts is not None
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
        f"{said}; before {len(found)} steps of {LLAMA[0]} by continuous batching, 1 to {SEQUENCES} sequences,"
        f" the card is idle for {decode_us:.0f} us in the median, with prompts {prompts_us:.0f}"
    )


def gaps_on(config: DecoderConfig, api: CudaApi, device: torch.device | str) -> Iterator[Gap]:
    """Runs the service on a card and yields its gaps."""
    model = ServedDecoder(config)
    (weights,) = card_weights(model, SEED, [device], drawn_on=device)
    positions = max(PROMPTS) + ANSWER + SEQUENCES
    cache = Cache(model, SEQUENCES * positions, positions, SEQUENCES, SEQUENCES, SEED, device)
    state = CardServedState(model, weights, cache, SEQUENCES)
    card = Card([state], api)

    def program(m: Machine) -> Program:
        for i in range(SEQUENCES):
            # Those that came first end first, one in each step.
            prompt = PROMPTS[i * len(PROMPTS) // SEQUENCES]
            m.send(REQUESTS, Request(i, 0.0, prompt, ANSWER + i, ANSWER + SEQUENCES), m.rank)
        m.send(REQUESTS, END, m.rank)
        blocks = SEQUENCES * -(-positions // BLOCK)
        yield from continuous_batching(
            m, model, Journal(), blocks=blocks, block_tokens=BLOCK, token_budget=BUDGET
        )

    for i in range(BEFORE + RUNS):
        state.reset()
        trace, _ = pace().keeps(lambda: card.start().run(program))
        if i >= BEFORE:
            yield from gaps(trace.spans)
