"""Laws of continuous batching over random workloads at tight memory, told from requests and launches alone.

A step takes one second, whatever is in it, so that who is behind whom shows in the order of the ends.
"""

from functools import cache, partial
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.models.served_decoder import prefill_pairs
from simcore.schedules.continuous_batching import Prefill, continuous_batching
from simcore.workload.requests import Request, blocks_for
from tests.test_serving_schedules import STEPWISE, Served, request, serve

BLOCK = 4
SEEDS = range(40)


def run(wanted: list[Request], blocks: int, budget: int, **how: Any) -> Served:
    schedule = partial(continuous_batching, blocks=blocks, block_tokens=BLOCK, token_budget=budget, **how)
    return serve(schedule, wanted, STEPWISE)


def ready(wanted: list[Request], step: int) -> int:
    """Tokens of prompts that have come when a step begins."""
    return sum(r.prompt_tokens for r in wanted if r.arrival_s <= step)


@cache
def alike(seed: int) -> tuple[Served, int]:
    """Requests that are all alike, in a cache that holds a few of them; and its blocks."""
    draws = Random(seed)
    prompt, output = draws.randint(2, 12), draws.randint(4, 20)
    blocks = blocks_for(prompt + output, BLOCK) + draws.randint(0, 8)
    at_s, wanted = 0.0, list[Request]()
    for i in range(12):
        wanted.append(request(i, at_s, output, prompt=prompt))
        at_s += draws.choice([0.0, 0.0, 1.0, 3.0])
    return run(wanted, blocks, draws.choice([8, 32])), blocks


@pytest.mark.parametrize("seed", SEEDS)
def test_of_requests_that_are_alike_nobody_overtakes_whoever_is_sent_back(seed: int) -> None:
    """First come, first served: who came first has as many tokens as who came later, at any time."""
    found, _ = alike(seed)
    assert [r.finish_s for r in found.requests] == sorted(r.finish_s for r in found.requests)
    assert [r.first_token_s for r in found.requests] == sorted(r.first_token_s for r in found.requests)
    assert all(r.generated == r.output_tokens for r in found.requests)


def test_several_were_sent_back_at_once() -> None:
    """Without that the law above says nothing of their order: iterations that need more than one place."""
    together = 0
    for seed in SEEDS:
        found, _ = alike(seed)
        waiting = found.steps["waiting"]
        come = np.array([sum(r.arrival_s <= s for r in found.requests) for s in found.steps["start_s"]])
        begun = np.array([sum(r.scheduled_s <= s for r in found.requests) for s in found.steps["start_s"]])
        # Who waits and was scheduled before has been sent back.
        together += int(np.max(waiting - (come - begun)) >= 2)
    assert together >= 5


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_and_budget_hold_at_every_step(seed: int) -> None:
    found, blocks = alike(seed)
    assert found.steps["kv_peak"].max() <= blocks
    budget = max(launch["sizes"]["tokens"] for launch in found.launches)
    assert budget <= (32 if budget > 8 else 8)


# -- a full server wastes nothing ------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["chunked", "first"])
@pytest.mark.parametrize("seed", range(12))
def test_a_step_is_full_or_nobody_is_left_out_of_it(prefill: Prefill, seed: int) -> None:
    """With memory and places to spare: prompt tokens of a step = min(budget left, tokens that wait)."""
    draws = Random(seed)
    budget = draws.randint(3, 20)
    wanted = [
        request(i, 2.0 * draws.randint(0, 4), draws.randint(1, 6), draws.randint(1, 30)) for i in range(8)
    ]
    wanted.sort(key=lambda r: r.arrival_s)
    found = run(wanted, 1000, budget, prefill=prefill)
    assert sum(len(r) > 0 for r in (found.sizes("prefill", "tokens"), found.sizes("mixed", "tokens"))) >= 1
    done = 0
    for launch, start_s, decoding in zip(
        found.launches, found.steps["start_s"], found.steps["decoding"], strict=True
    ):
        sizes = launch["sizes"]
        now = sizes.get("prompt_tokens", 0)
        left = ready(wanted, start_s) - done
        assert decoding <= budget
        assert now == min(left, budget - (int(decoding) if prefill == "chunked" else 0)) or (
            # The places are as many as the budget has tokens.
            len([r for r in found.requests if r.scheduled_s <= start_s < r.finish_s]) >= budget
        )
        done += now
    assert done == sum(r.prompt_tokens for r in wanted)


@pytest.mark.parametrize(("places", "budget"), [(3, 64), (64, 3), (1, 64), (5, 5)])
def test_no_more_at_once_than_places_or_tokens_of_a_step(places: int, budget: int) -> None:
    wanted = [request(i, 0.0, 9, prompt=1) for i in range(12)]
    found = run(wanted, 1000, budget, max_sequences=places)
    assert found.steps["decoding"].max() == min(places, budget)


@pytest.mark.parametrize("chunk", [3, 5, 8])
def test_work_of_prompts_is_that_of_all_pairs(chunk: int) -> None:
    """However a prompt is cut, its chunks attend to each of its tokens' predecessors once."""
    found = run([request(0, 0.0, 1, prompt=17)], 100, chunk)
    chunks = found.sizes("prefill", "prompt_tokens")
    assert chunks == [chunk] * (17 // chunk) + ([17 % chunk] if 17 % chunk else [])
    assert sum(found.sizes("prefill", "prompt_pairs")) == prefill_pairs(17, 0) == 17 * 18 // 2
    assert found.sizes("prefill", "prompt_kv") == np.cumsum(chunks).tolist()


# -- waiting for others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [1, 2, 5, 50])
def test_prompts_wait_no_longer_than_they_may_nor_than_somebody_decodes(wait: int) -> None:
    """A has its last token at 6, B comes during the second step: it is scheduled `wait` steps later, or
    once A has ended."""
    found = run([request(0, 0.0, 6), request(1, 1.5, 2)], 100, 64, wait_steps=wait, wait_tokens=100)
    assert found.requests[0].finish_s == 6.0
    assert found.requests[1].scheduled_s == min(2.0 + wait, 6.0)
    assert [r.generated for r in found.requests] == [6, 2]


@pytest.mark.parametrize(("prompt", "wait_tokens", "waited"), [(20, 8, 0), (7, 8, 0), (6, 8, 5), (20, 9, 5)])
def test_prompts_wait_until_a_step_would_have_so_many_tokens(
    prompt: int, wait_tokens: int, waited: int
) -> None:
    """Of steps of 8 tokens: that of the one who decodes counts, and no step ever has 9."""
    wanted = [request(0, 0.0, 9, 4), request(1, 1.5, 2, prompt)]
    found = run(wanted, 100, 8, wait_steps=5, wait_tokens=wait_tokens)
    assert found.requests[1].scheduled_s == 2.0 + waited


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_burst_ends_where_somebody_who_came_before_gets_in_line(ahead: int) -> None:
    found = run([request(0, 0.0, 30), request(1, 1.5, 2)], 100, 64, ahead=ahead)
    assert found.requests[1].scheduled_s == 2.0 + ahead
