"""Continuous batching as engines differ in it, worked by hand: a step takes one second, whatever is in it."""

from functools import partial
from typing import Any

import pytest

from simcore.models.served_decoder import ServedDecoder
from simcore.schedules.continuous_batching import Order, continuous_batching, fcfs, shortest_first
from simcore.schedules.reservation import Reservation, Reserve
from simcore.workload.requests import Request
from tests.test_serving_schedules import STEPWISE, Served, request, serve

BLOCKS = 10_000


def run(*wanted: Request, budget: int = 8, model: ServedDecoder = STEPWISE, **how: Any) -> Served:
    schedule = partial(
        continuous_batching, blocks=how.pop("blocks", BLOCKS), block_tokens=4, token_budget=budget
    )
    return serve(partial(schedule, **how), wanted, model)


def test_a_whole_prompt_waits_for_a_step_that_it_fits_into() -> None:
    prompts = request(0, 0.0, 1, prompt=5), request(1, 0.0, 1, prompt=6)
    # In chunks the second one begins beside the first, with the 3 tokens that are left.
    assert run(*prompts).sizes("prefill", "prompt_tokens") == [8, 3]
    assert run(*prompts, prefill="whole").sizes("prefill", "prompt_tokens") == [5, 6]


def test_a_whole_prompt_longer_than_any_step_is_refused() -> None:
    found = run(request(0, 0.0, 1, prompt=9), request(1, 0.0, 1, prompt=8), prefill="whole")
    assert [r.rejected for r in found.requests] == [True, False]


def test_a_whole_prompt_that_grew_too_long_by_a_preemption_is_computed_alone() -> None:
    prompts = [request(i, 0.0, 12, prompt=8) for i in range(2)]
    # Both begin, and do not both fit: 20 tokens each, 8 blocks of 4 in all.
    found = run(*prompts, budget=16, blocks=8, prefill="whole")
    assert sum(r.preemptions for r in found.requests) >= 1
    assert [r.generated for r in found.requests] == [12, 12]


def test_a_prompt_as_long_as_a_step_waits_until_nobody_decodes() -> None:
    found = run(request(0, 0.0, 4, prompt=4), request(1, 0.5, 1, prompt=8), prefill="whole")
    assert found.sizes("prefill", "prompt_tokens") == [4, 8]
    assert found.sizes("mixed", "tokens") == []
    assert found.requests[1].scheduled_s == found.requests[0].finish_s


def test_prompts_first_make_those_that_decode_stand_still() -> None:
    wanted = request(0, 0.0, 4, prompt=4), request(1, 1.5, 2, prompt=16)
    beside, first = run(*wanted), run(*wanted, prefill="first")
    # Beside it, 7 tokens of the prompt fit into each of two steps, and the last 2 into a third.
    assert beside.sizes("mixed", "prompt_tokens") == [7, 7] + [2] * (len(beside.sizes("mixed", "tokens")) - 2)
    assert beside.requests[0].finish_s == 4.0
    # By itself 8 and 8, while nobody decodes.
    assert first.sizes("mixed", "tokens") == []
    assert first.sizes("prefill", "prompt_tokens") == [4, 8, 8]
    assert first.requests[0].finish_s == 6.0
    assert first.requests[1].first_token_s == 4.0


@pytest.mark.parametrize(("tokens", "first_token_s"), [(100, 6.0), (6, 3.0)])
def test_new_prompts_wait_for_others_while_somebody_decodes(tokens: int, first_token_s: float) -> None:
    wanted = request(0, 0.0, 20, prompt=4), request(1, 1.5, 2, prompt=5)
    found = run(*wanted, wait_steps=3, wait_tokens=tokens)
    # It comes during the second step. It waits three steps, or none where it fills the step with one that
    # decodes, and takes one.
    assert found.requests[1].first_token_s == first_token_s


@pytest.mark.parametrize(("prompt", "waits"), [(6, True), (7, False), (20, False)])
def test_prompts_that_fill_a_step_wait_for_nobody(prompt: int, waits: bool) -> None:
    """A step of 8 tokens, one of which decodes: a longer prompt fills it no more than one of 7 does."""
    wanted = request(0, 0.0, 30, prompt=4), request(1, 1.5, 2, prompt=prompt)
    found = run(*wanted, wait_steps=3, wait_tokens=8)
    assert found.requests[1].scheduled_s == (5.0 if waits else 2.0)


def test_no_step_holds_more_tokens_than_its_budget_to_end_a_wait() -> None:
    """Asked for 9 tokens of steps of 8, a prompt waits its steps, however long it is."""
    wanted = request(0, 0.0, 30, prompt=4), request(1, 1.5, 2, prompt=20)
    assert run(*wanted, wait_steps=3, wait_tokens=9).requests[1].scheduled_s == 5.0


def test_waiting_ends_when_enough_have_come() -> None:
    wanted = [request(0, 0.0, 20, prompt=4), *(request(i, 0.5 + i, 2, prompt=3) for i in (1, 2))]
    found = run(*wanted, wait_steps=10, wait_tokens=7)
    assert [r.first_token_s for r in found.requests[1:]] == [4.0, 4.0]


def test_nobody_waits_where_nobody_decodes() -> None:
    assert run(request(0, 0.0, 1, prompt=4), wait_steps=10, wait_tokens=100).requests[0].finish_s == 1.0


def test_what_comes_while_a_step_runs_misses_the_one_decided_ahead() -> None:
    wanted = request(0, 0.0, 9, prompt=4), request(1, 1.5, 1, prompt=4)
    # It comes during the second step.
    assert run(*wanted).requests[1].scheduled_s == 2.0
    assert run(*wanted, ahead=1).requests[1].scheduled_s == 3.0
    # Where nothing runs nothing was decided.
    alone = run(request(0, 0.0, 1, prompt=4), request(1, 5.0, 1, prompt=4), ahead=1)
    assert alone.requests[1].scheduled_s == 5.0


@pytest.mark.parametrize("order", [fcfs, shortest_first])
@pytest.mark.parametrize(("comes_s", "begins_s"), [(3.5, 10.0), (6.5, 10.0), (7.5, 11.0), (9.5, 13.0)])
def test_a_full_server_sees_in_time_who_comes(comes_s: float, begins_s: float, order: Order) -> None:
    """One of two places is free after ten steps. Who comes in the seventh of them is known three steps
    later, in time; who comes in the eighth begins a step after the place is free."""
    wanted = request(0, 0.0, 10), request(1, 0.0, 30), request(2, comes_s, 2)
    found = run(*wanted, ahead=3, max_sequences=2, order=order)
    assert [r.scheduled_s for r in found.requests] == [0.0, 0.0, begins_s]


def test_a_full_server_is_not_asked_at_every_arrival() -> None:
    """Bursts end where somebody ends, and once more where the last may come that begins then."""
    wanted = [request(0, 0.0, 100), request(1, 0.0, 150), *(request(i, 0.5 + i, 2) for i in range(2, 82))]
    found = run(*wanted, ahead=1, max_sequences=2)
    until_free = [launch for launch in found.launches if launch["graph"] == "decode"][:3]
    assert [launch["repeat"] for launch in until_free[:2]] == [98, 1]


def test_who_takes_the_last_block_decodes_on_in_one_burst() -> None:
    """A prompt of one block of 4 and an answer of another: no third is needed."""
    found = run(request(0, 0.0, 4, prompt=4), blocks=2)
    assert [launch["repeat"] for launch in found.launches if launch["graph"] == "decode"] == [3]


def test_who_comes_while_another_waits_for_blocks_interrupts_nobody() -> None:
    """Three of four blocks are free, of which the first one takes one in the next step: the second one needs
    three. The others come behind it."""
    first, second = request(0, 0.0, 9, prompt=4), request(1, 0.5, 1, prompt=12)
    found = run(first, second, *(request(i, 0.5 + i, 1) for i in range(2, 5)), blocks=4, budget=16)
    assert [launch["repeat"] for launch in found.launches if launch["graph"] == "decode"] == [8]
    assert found.requests[1].scheduled_s == found.requests[0].finish_s == 9.0


def test_nobody_is_looked_for_ahead_where_all_have_come() -> None:
    found = run(request(0, 0.0, 9), request(1, 0.5, 2), ahead=1, max_sequences=1)
    assert [launch["repeat"] for launch in found.launches if launch["graph"] == "decode"] == [8, 1]


def test_a_request_is_refused_whose_longest_answer_no_cache_holds() -> None:
    """Three blocks of 4: 12 tokens, however few of them the answer has in the end."""
    found = run(request(0, 0.0, 1, prompt=4, most=8), request(1, 0.0, 1, prompt=5, most=8), blocks=3)
    assert [r.rejected for r in found.requests] == [False, True]


def test_who_was_sent_back_computes_its_answer_so_far_too() -> None:
    """Eight blocks hold two prompts of 8 with 8 tokens more each, after which both have 9 of their answers.
    The second one waits until the first has its 12, and then computes 8 + 9 tokens in steps of up to 16."""
    found = run(*(request(i, 0.0, 12, prompt=8) for i in range(2)), budget=16, blocks=8)
    assert [r.preemptions for r in found.requests] == [0, 1]
    assert found.sizes("prefill", "prompt_tokens") == [16, 16, 1]
    assert [r.finish_s for r in found.requests] == [12.0, 16.0]


def test_a_burst_has_the_block_of_its_first_token_at_once_and_others_as_they_come() -> None:
    """A prompt of 4 and five tokens more, in blocks of 4."""
    assert run(request(0, 0.0, 6, prompt=4)).rows("kv_used", "kv_peak") == [(1, 1), (2, 3)]


def test_a_prompt_that_comes_again_is_computed_from_its_last_block_on() -> None:
    wanted = [Request(i, 3.0 * i, 8, 1, 1, content=((i // 2, 8),)) for i in range(3)]
    assert run(*wanted).sizes("prefill", "prompt_tokens") == [8, 8, 8]
    found = run(*wanted, prefix_caching=True)
    # 4 of its 8 tokens are a whole block that does not hold the last token.
    assert found.sizes("prefill", "prompt_tokens") == [8, 4, 8]
    assert found.sizes("prefill", "prompt_kv") == [8, 8, 8]
    assert found.steps["kv_used"].max() == 2


def test_prompts_used_last_are_kept_as_far_as_the_blocks_hold_them() -> None:
    texts = [0, 1, 2, 1, 0]
    wanted = [Request(i, 3.0 * i, 8, 1, 1, content=((text, 8),)) for i, text in enumerate(texts)]
    # Two prompts of two blocks are kept in five.
    assert run(*wanted, prefix_caching=True, blocks=5).sizes("prefill", "prompt_tokens") == [8, 8, 8, 4, 8]


def test_requests_without_a_text_share_nothing() -> None:
    wanted = [request(i, 3.0 * i, 1, prompt=8) for i in range(2)]
    assert run(*wanted, prefix_caching=True).sizes("prefill", "prompt_tokens") == [8, 8]


NO_EVICT, FALLING = Reservation(1.0, 1.0), Reservation(1.0, 0.0, steps=10)


def test_nobody_is_preempted_where_whole_answers_have_room() -> None:
    """Three requests of 4 + 8 tokens take 3 blocks of 4 each: of 7 blocks two run at once, and the third
    begins when they end. Without room for answers all three begin."""
    wanted = [request(i, 0.0, 8, prompt=4) for i in range(3)]
    free = run(*wanted, blocks=7, budget=64)
    assert sum(r.preemptions for r in free.requests) > 0
    kept = run(*wanted, blocks=7, budget=64, reserve=NO_EVICT)
    assert [r.preemptions for r in kept.requests] == [0, 0, 0]
    assert [r.scheduled_s for r in kept.requests] == [0.0, 0.0, 8.0]


@pytest.mark.parametrize(("share", "begins_s"), [(0.0, 3.0), (0.5, 3.0), (0.6, 12.0), (1.0, 12.0)])
def test_a_share_of_the_answers_to_come_has_to_stay_free(share: float, begins_s: float) -> None:
    """At 3 s the first has 4 + 2 tokens in 2 blocks of 4, and 2 more blocks to come. The second wants 3. Of
    6 blocks 4 are free: enough beside half of what is to come, not beside 0.6 of it."""
    wanted = request(0, 0.0, 12, prompt=4), request(1, 2.5, 8, prompt=4)
    found = run(*wanted, blocks=6, budget=64, reserve=Reservation(share, share))
    assert found.requests[1].scheduled_s == begins_s


@pytest.mark.parametrize(
    ("arrival_s", "begins_s"),
    [
        pytest.param(3.5, 4.0, id="after three steps of answers 0.7 of 8 blocks has to stay"),
        pytest.param(2.5, 36.0, id="after two 0.8, and it is asked again at the end of the first"),
    ],
)
def test_a_falling_share_counts_when_a_request_is_asked_for(arrival_s: float, begins_s: float) -> None:
    """The first has 2 blocks of 4 from its second step on, and 8 to come. Of 12 blocks 10 - 8 * share are
    room for the second, which wants 4: a share of 0.75 is enough."""
    wanted = request(0, 0.0, 36, prompt=4), request(1, arrival_s, 12, prompt=4)
    found = run(*wanted, blocks=12, budget=64, reserve=FALLING)
    assert found.requests[1].scheduled_s == begins_s
    assert run(*wanted, blocks=12, budget=64, reserve=NO_EVICT).requests[1].scheduled_s == 36.0


def test_who_found_no_room_is_asked_again_when_somebody_ends() -> None:
    """The third wants 10 of 18 blocks of 4. At 2 s, 13 are free and 5 to come, of which 0.9 have to stay. At
    5 s it were 0.6, which leaves room; it is asked when the first ends."""
    wanted = request(0, 0.0, 8, prompt=8), request(1, 0.0, 20, prompt=4), request(2, 1.5, 20, prompt=20)
    found = run(*wanted, blocks=18, budget=64, reserve=FALLING)
    assert [r.scheduled_s for r in found.requests] == [0.0, 0.0, 8.0]


@pytest.mark.parametrize(
    ("prefill", "begins_s"),
    [
        pytest.param("first", 14.0, id="refused until the second ends"),
        pytest.param("chunked", 3.0, id="asked again after the second's prompt"),
    ],
)
def test_a_step_with_prompts_beside_answers_makes_one_ask_again(prefill: str, begins_s: float) -> None:
    """Of 13 blocks of 4, half of the 8 that are to come of the first have to stay. At 2 s it holds 2, the
    second wants 4, and the third would want 4 of the 3 that are left. At 3 s the second decodes, and half of
    its 3 to come count: 10 - 5.5 are left. Prompts first, the first waits for that of the second."""
    wanted = request(0, 0.0, 36, prompt=4), request(1, 1.5, 12, prompt=4), request(2, 1.6, 12, prompt=4)
    half = Reservation(0.5, 0.49, steps=1000)
    found = run(*wanted, blocks=13, budget=64, prefill=prefill, reserve=half)
    assert [r.scheduled_s for r in found.requests] == [0.0, 2.0, begins_s]


def test_an_idle_server_begins_with_the_whole_share() -> None:
    reserve = Reserve(FALLING, 0.3, since=4, full=True)
    reserve.begin(iteration=9)
    assert (reserve.share(9), reserve.share(10), reserve.full) == (1.0, 0.9, False)


@pytest.mark.parametrize(("last", "begins_s"), [(False, 12.0), (True, 7.0)])
def test_who_is_preempted_waits_first_or_last(last: bool, begins_s: float) -> None:
    """Of 8 blocks of 4, three requests of 16 tokens want 12. The third is preempted at 6 s, where the fourth,
    of one block, would fit. It waits until the third has room again, when the first has ended, or goes
    first."""
    wanted = [request(i, 0.1 * i, 12, prompt=4) for i in range(4)]
    found = run(*wanted, blocks=8, budget=64, max_sequences=3, preempted_last=last)
    assert found.requests[2].preemptions == 1
    assert found.requests[3].scheduled_s == begins_s


def test_room_for_answers_holds_states_too() -> None:
    """4 + 8 tokens are 3 blocks of 4, and 2 of state: in 9 blocks one request has room, in 10 two."""
    wanted = [request(i, 0.0, 8, prompt=4) for i in range(2)]
    for blocks, begins_s in ((9, 8.0), (10, 0.0)):
        found = run(*wanted, blocks=blocks, budget=64, reserve=NO_EVICT, state_blocks=2)
        assert found.requests[1].scheduled_s == begins_s


def test_only_so_many_tokens_of_an_answer_count() -> None:
    wanted = [request(i, 0.0, 40, prompt=4) for i in range(2)]
    short = Reservation(1.0, 1.0, most_tokens=4)
    assert [r.scheduled_s for r in run(*wanted, blocks=12, budget=64, reserve=short).requests] == [0.0, 0.0]
    assert run(*wanted, blocks=12, budget=64, reserve=NO_EVICT).requests[1].scheduled_s == 40.0


def test_after_a_preemption_the_share_is_what_answers_say_so_far() -> None:
    reserve = Reserve(FALLING, 0.1)
    long, short = request(0, 0.0, 100, prompt=4), request(1, 0.0, 50, prompt=4)
    long.generated, long.held, short.generated, short.held = 30, 2, 9, 5
    reserve.preempted([long, short], iteration=7)
    # 35 and 11 tokens by now, and 20 more of each, of 150.
    assert reserve.share(7) == pytest.approx((35 + 11 + 40) / 151)
    assert reserve.share(9) == pytest.approx(86 / 151 - 0.2)
    assert reserve.share(100) == 0.0
    kept = Reserve(NO_EVICT, 1.0)
    kept.preempted([long], iteration=7)
    assert kept.share(7) == 1.0
