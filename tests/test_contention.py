"""Graphs at the same time: the law of contention, the cases' programs on a card that is none and simulated,
constants found again from what the law gave, and the program around them."""

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from simcore.devices.fitted import FittedProfile, read_fitted, write_fitted
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.table import TABLE
from simcore.machine import laws
from simcore.machine.machine import Overheads
from simcore.models.decoder import Decoder, Dtypes
from simcore.models.long_convolution import LongConvolution
from simcore.sim import contention as contention_laws
from simcore.sim.contention import Crowd, Demand, in_rounds, max_min_rates, off_by, shared_reads, throughput
from simcore.validate.accuracy import contention, contention_cases
from simcore.validate.accuracy.contention import read, write
from simcore.validate.accuracy.contention_cases import (
    Case,
    Device,
    Models,
    Row,
    balanced,
    jobs,
    measured,
    predicted,
    seconds_of,
    streams_of,
)
from simcore.validate.calibration import contention_fit
from simcore.validate.calibration import cuda_sharing as card_sharing
from simcore.validate.calibration.contention_fit import (
    Constants,
    cases_of,
    fit,
    judged,
    medians,
    models_of,
    most_reach,
    roles,
    simulated_on,
    together_s,
)
from simcore.validate.calibration.cuda_instances import CardInstancesState, Instances
from simcore.validate.machines.cuda.cuda_api import STREAMS_OF_TORCH, TorchCudaApi
from simcore.validate.machines.cuda.machine import Card
from simcore.validate.machines.cuda.runs import RealCard
from simcore.validate.machines.cuda.states import CardStates
from simcore.validate.program import write_csv
from tests.fake_card import FakeCudaApi
from tests.test_card_decoder import GQA
from tests.test_fit import PROFILE
from tests.thorough import examples, slow, thorough

pytestmark = pytest.mark.usefixtures("hurried")
fixed = settings(derandomize=True, database=None)
emulated = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without one")
H200 = load_device("h200-sxm")
F32 = Dtypes("fp32", "fp32", "fp32")
SMALL = Models(replace(GQA, layers=2), F32, LongConvolution(layers=2, channels=8, tokens=4, dtype="fp32"))
LARGE = Models(
    replace(GQA, layers=2, hidden=4096, intermediate=14336, q_heads=32, kv_heads=8, head_dim=128),
    Dtypes(),
    LongConvolution(layers=18, channels=256, tokens=4, dtype="fp32"),
)
SIMULATED = Device(pricer(H200), roofline(H200), Overheads(launch_s=3e-6))
shares = st.floats(0.0, 1.0)
demands = st.lists(
    st.builds(Demand, shares, shares, kernels_per_s=st.floats(0.0, 1e6)), min_size=1, max_size=5
)  # fmt: skip


# -- the law -------------------------------------------------------------------------------------------------


@settings(fixed, max_examples=examples(150))
@given(demands, st.floats(0.0, 1e-4))
def test_who_holds_the_device_slows_others_and_speeds_nobody_up(
    running: list[Demand], tail_overlap_s: float
) -> None:
    free, held = max_min_rates(running), shared_reads(0.0, 1.0, tail_overlap_s)(running)
    assert all(0.0 < rate <= 1.0 for rate in held)
    # Where all ask for more than there is, who is modest is served first: somebody may even gain.
    assert min(held) <= min(free) + 1e-12
    idle = [max(0.0, 1.0 - max(d.memory, d.compute) - tail_overlap_s * d.kernels_per_s) for d in running]
    for shares_ in ([d.memory for d in running], [d.compute for d in running]):
        if len(running) > 1:
            assert sum(r * (s + i) for r, s, i in zip(held, shares_, idle, strict=True)) <= 1.0 + 1e-9


def asking(memory: float, launch: float, compute: float, kernels_per_s: float) -> st.SearchStrategy[Demand]:
    """Demands of the memory from `memory` on, of others and of kernels up to so much."""
    return st.builds(
        Demand,
        st.floats(memory, 1.0),
        st.floats(0.0, compute),
        st.floats(0.0, launch),
        since_s=st.floats(0.0, 1.0),
        kernels_per_s=st.floats(0.0, kernels_per_s),
    )


asked = asking(0.01, 0.2, 1.0, 1e6)
greedy = asking(0.7, 0.03, 0.03, 300.0)


@slow
@settings(derandomize=True, database=None, max_examples=examples(200))
@given(st.lists(asked, min_size=1, max_size=8), st.randoms(use_true_random=False), st.data())
def test_a_crowd_that_changes_is_the_crowd_as_it_is_now(begin: list[Demand], random: Any, data: Any) -> None:
    """Whoever comes, goes, or asks for something else: rates are those of a list of the same demands."""
    laws_of = [max_min_rates, shared_reads(0.0, 0.8, 3e-6), shared_reads(0.1, 0.9, 1e-5), shared_reads(0.0)]
    laws_of.append(shared_reads(0.0, 0.8, 3e-6, 1.5))
    law = random.choice(laws_of)
    crowd, plain = Crowd(begin), list(begin)
    for _ in range(6):
        for _ in range(random.randint(1, 3)):
            move = random.choice(["join", "leave", "change", "change"])
            at = random.randrange(len(plain))
            if move == "join":
                plain.append(data.draw(asked))
                crowd.join(plain[-1])
            elif move == "change":
                plain[at] = data.draw(asked)
                crowd.change(at, plain[at])
            elif len(plain) > 1:
                del plain[at]
                crowd.leave(at)
        assert list(crowd) == plain
        assert law(crowd) == law(plain)
        # Another law of the same demands leaves nothing behind.
        if random.random() < 0.3:
            law = random.choice(laws_of)


@slow
@settings(derandomize=True, database=None, max_examples=200)
@given(st.lists(greedy, min_size=2, max_size=8), st.lists(greedy, min_size=2, max_size=2), st.data())
def test_even_shares_of_the_memory_are_what_the_law_says(
    begin: list[Demand], more: list[Demand], data: Any
) -> None:
    """Where they are all that holds anybody back, and where not: without the shortcut the law gives the same,
    also after somebody has gone and somebody else has come in between."""
    law = shared_reads(0.0, 0.9, 1e-4)
    crowd, plain = Crowd(begin), list(begin)
    law(crowd)
    for change in (lambda _: None, *[partial(_swap, data, crowd, plain)] * 2):
        change(more.pop() if more else None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contention_laws, "_even_rates", lambda _: None)
            slowly = law(plain)
        assert law(crowd) == pytest.approx(slowly, rel=1e-11)


@settings(derandomize=True, database=None, max_examples=examples(300))
@given(st.lists(st.one_of(greedy, asking(0.5, 0.01, 0.01, 2e4)), min_size=2, max_size=5))
def test_even_shares_are_no_shortcut_past_who_gets_in_between(begin: list[Demand]) -> None:
    """Long kernels beside short ones, which begin in between those."""
    law = shared_reads(0.0, 0.9, 1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contention_laws, "_even_rates", lambda _: None)
        slowly = law(begin)
    assert law(begin) == pytest.approx(slowly, rel=1e-11)


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_that_keeps_one_law_is_the_crowd_as_it_is_now(seed: int) -> None:
    """Where several come, go and change before anybody asks for the rates."""
    draws, law = Random(seed), shared_reads(0.0, 0.9, 1e-5)

    def some() -> Demand:
        return Demand(
            draws.uniform(0.01, 1.0),
            draws.uniform(0.0, 1.0),
            draws.uniform(0.0, 0.2),
            kernels_per_s=draws.uniform(0.0, 1e5),
        )

    plain = [some() for _ in range(3)]
    crowd = Crowd(plain)
    for _ in range(100):
        for _ in range(draws.randint(1, 4)):
            at, move = draws.randrange(len(plain)), draws.choice(["join", "leave", "change"])
            if move == "change":
                plain[at] = some()
                crowd.change(at, plain[at])
            elif move == "leave" and len(plain) > 2:
                del plain[at]
                crowd.leave(at)
            else:
                plain.append(some())
                crowd.join(plain[-1])
        assert law(crowd) == law(plain)


def test_nobody_reads_or_computes_while_another_ones_kernel_keeps_it_out() -> None:
    """Two that read for 90 % of their time, in kernels that keep nobody out, beside one that reads nothing
    and whose kernels keep the others out for half of its time."""
    reads, keeps = Demand(0.9, 0.0, kernels_per_s=1e6), Demand(0.0, 0.0, kernels_per_s=5e5)
    rates = shared_reads(0.0, 1.0, 1e-6)([reads, reads, keeps])
    # Each gets a third of the time; without the limit, they would go at 1/2, 1/2 and 1: 140 % of it.
    assert rates == pytest.approx([1 / 3 / 0.9, 1 / 3 / 0.9, 1 / 3 / 0.5])
    # It may also read a third of the time, and a bit, itself.
    assert shared_reads(0.0, 1.0, 1e-6)([reads, reads, replace(keeps, memory=0.34)]) == pytest.approx(rates)
    computes = replace(reads, memory=0.0, compute=0.9)
    assert shared_reads(0.0, 1.0, 1e-6)([computes, computes, keeps]) == pytest.approx(rates)


def test_who_asks_for_more_of_the_memory_than_kernels_reach_leaves_others_the_rest_of_the_time() -> None:
    """Of 90 % that kernels reach, the first asks for 65.2 and the second for all of the datasheet's rate:
    with half of it each, they go at 69 and 45 %. The second then reads half of the time. But the kernels of
    the first keep it out for 3 parts in 4 of their time, and so go no faster than at 2 in 3."""
    law, mild = shared_reads(0.0, 0.9, 1e-6), Demand(0.6, 0.0, kernels_per_s=1e6)
    first, second = Demand(0.45 / 0.69, 0.0, kernels_per_s=0.25e6), Demand(1.0, 0.0, kernels_per_s=0.37e6)
    expected = [0.5 / 0.75, 0.45]
    assert law([first, second]) == pytest.approx(expected)
    # Also where the second has asked for less before.
    crowd = Crowd([first, mild])
    law(crowd)
    crowd.change(1, second)
    assert law(crowd) == pytest.approx(expected)


def test_arithmetic_is_divided_fairly_where_even_shares_of_the_memory_leave_it_free() -> None:
    """At the rates that the memory allows, 98, 33 and 33 %, they compute for 69 % of the time; but the first
    asks for half of it, of which the others leave it 40 %, since they ask for 30 % each."""
    running = [Demand(0.34, 0.5, kernels_per_s=1e6), *[Demand(1.0, 0.3, kernels_per_s=1e6)] * 2]
    expected = [0.4 / 0.5, 1 / 3, 1 / 3]
    assert max_min_rates(running) == pytest.approx(expected)
    # Kernels of a microsecond keep nobody out.
    assert shared_reads(0.0, 1.0, 1e-6)(running) == pytest.approx(expected)
    # Nor is it another way with the thread that launches them.
    launched = [replace(one, compute=0.0, launch=one.compute) for one in running]
    assert max_min_rates(launched) == pytest.approx(expected)
    assert shared_reads(0.0, 1.0, 1e-6)(launched) == pytest.approx(expected)


def test_beside_a_prompt_more_of_a_step_s_kernels_are_in_a_round() -> None:
    """Kernels of 100 us that arithmetic bounds, and 1.5 of 20 us: a round takes 100 + 1.5 (20 - 4) us."""
    prompt, step = Demand(0.1, 0.9, kernels_per_s=1e4), Demand(0.8, 0.1, kernels_per_s=5e4)
    law = shared_reads(0.0, 1.0, 4e-6, 1.5)
    rates = [100.0 / 124.0, 30.0 / 124.0]
    assert law([prompt, step]) == pytest.approx(rates)
    assert in_rounds([1.0, 1.0], [1e4, 5e4], 4e-6, [1.0, 1.5]) == pytest.approx(rates)
    # Two steps, or two prompts, go one by one.
    for alike in (prompt, step):
        assert law([alike, alike]) == shared_reads(0.0, 1.0, 4e-6)([alike, alike])


@pytest.mark.parametrize("steps", [2, 4, 9, 30])
def test_what_arithmetic_bounds_reads_before_the_others(steps: int) -> None:
    """Kernels of 22 us beside 1.36 of each step, of 13.5: these want more of the memory than there is, but
    the round is as long, and they share what is left."""
    share, left_us, each_us = 0.945, 4.0, 13.5
    prompt, step = (
        Demand(0.45, 0.9, kernels_per_s=1 / 22e-6),
        Demand(share, 1e-3, kernels_per_s=1e6 / each_us),
    )
    found = shared_reads(0.0, share, 1e-6 * left_us, 1.36)([prompt, *[step] * steps])
    round_us = 22.0 + steps * 1.36 * (each_us - left_us)
    assert found[0] == pytest.approx(22.0 / round_us)
    # While a kernel keeps others out, nobody else reads.
    kept = found[0] * (1.0 - left_us / 22.0)
    assert 1.36 * each_us / round_us * steps > 1.0 - kept
    assert found[1:] == pytest.approx([(1.0 - kept) / steps] * steps)


def test_what_comes_first_leaves_one_other_half() -> None:
    """In their round of 22 + 1.36 (13.5 - 4) us the prompt's kernels would take 52 % and the step's 52 %."""
    share, left_us, each_us = 0.945, 4.0, 13.5
    prompt = Demand(0.45, 0.9, kernels_per_s=1 / 22e-6)
    step = Demand(share, 1e-3, kernels_per_s=1e6 / each_us)
    round_us = 22.0 + 1.36 * (each_us - left_us)
    assert (22.0 - left_us) / round_us > 0.5
    assert 1.36 * each_us / round_us > 0.5
    found = shared_reads(0.0, share, 1e-6 * left_us, 1.36)([prompt, step])
    assert found == pytest.approx([0.5 / (1.0 - left_us / 22.0), 0.5])


def test_what_comes_first_gets_no_more_than_an_even_share() -> None:
    """Kernels of 100 us beside nine steps: their round would let them go at 46 %, a tenth of the memory does
    at 21."""
    prompt = Demand(0.45, 0.9, kernels_per_s=1e4)
    step = Demand(0.945, 1e-3, kernels_per_s=1e6 / 13.5)
    found = shared_reads(0.0, 0.945, 4e-6, 1.36)([prompt, *[step] * 9])
    assert 100.0 / (100.0 + 9 * 1.36 * 9.5) > 0.4
    assert found[0] == pytest.approx(0.0945 / 0.45)


def test_kernels_that_leave_less_room_than_the_memory_go_in_rounds() -> None:
    """Four that read for 55 % of their time, in kernels of 10 us of which each leaves 5 to the next one: a
    round takes 4 x 10 - 3 x 5 us. The memory alone would let each go at 45 %."""
    running = [Demand(0.55, 0.0, kernels_per_s=1e5)] * 4
    assert max_min_rates(running) == pytest.approx([0.25 / 0.55] * 4)
    assert shared_reads(0.0, 1.0, 5e-6)(running) == pytest.approx([10 / 25] * 4)


def test_who_computes_is_kept_out_by_kernels_that_find_their_operands_in_the_cache() -> None:
    """Two that each read half of the time, and find 7 parts in 10 of what one of them reads: together the
    memory serves them at its datasheet's rate, though it reaches 65 % of that. So each could go at 90 %. But
    one keeps all others out for so long that the one that computes has not enough of the time left."""
    reach, memory, left = 0.65, 0.5 / 0.9, 0.3
    takes = 1.0 - memory * (1.0 / reach - 1.0)
    keeps = takes - left
    running = [
        Demand(memory, compute, since_s=since_s, kernels_per_s=left * 1e6)
        for compute, since_s in ((0.9, 0.0), (0.05, -math.log(0.7)))
    ]
    rates = shared_reads(1.0, reach, 1e-6)(running)
    assert rates == pytest.approx([(1.0 - 0.9 * keeps) / 0.9, 0.9])


def test_by_itself_the_law_is_the_fair_one_and_nobody_is_faster_than_alone() -> None:
    running = [Demand(1.0, 0.0)] * 2
    assert shared_reads(0.0)(running) == max_min_rates(running) == [0.5, 0.5]
    assert throughput(2.0)(running) == [1.0, 1.0]
    assert off_by(max_min_rates, 2.0)([Demand(1.0, 0.0)] * 3) == pytest.approx([2 / 3] * 3)


def _swap(data: Any, crowd: Crowd, plain: list[Demand], new: Demand | None) -> None:
    if new is None:
        return
    at = data.draw(st.integers(0, len(plain) - 1))
    crowd.leave(at)
    del plain[at]
    crowd.join(new)
    plain.append(new)


@pytest.mark.parametrize("n", [2, 5, 32])
def test_with_an_even_share_of_the_memory_nobody_hangs_on_others(n: int) -> None:
    """Where the memory is all that holds anybody back, rate = reach / (n memory)."""
    demands = [Demand(0.5 + 0.5 * i / n, 0.01, kernels_per_s=100.0) for i in range(n)]
    rates = shared_reads(0.0, 0.9, 1e-2)(demands)
    assert rates == pytest.approx([0.9 / (n * demand.memory) for demand in demands])


def test_what_only_waits_runs_in_turns_or_freely() -> None:
    waiting = [Demand(0.25, 0.0, kernels_per_s=1e5)] * 4
    assert shared_reads(0.0, 1.0)(waiting) == [1.0] * 4
    assert shared_reads(0.0, 1.0, 0.0)(waiting) == pytest.approx([0.25] * 4)
    # Kernels of 10 us, of which each leaves 3.75 to the next one: a round of four.
    assert shared_reads(0.0, 1.0, 3.75e-6)(waiting) == pytest.approx([10.0 / (4 * 10.0 - 3 * 3.75)] * 4)
    # Shorter than what they leave, they keep nobody out.
    assert shared_reads(0.0, 1.0, 1e-5)(waiting) == [1.0] * 4
    # What fills the memory holds nothing besides.
    full = [Demand(1.0, 0.2, kernels_per_s=1e5)] * 2
    assert shared_reads(0.0, 1.0, 0.0)(full) == pytest.approx([0.5, 0.5])
    # Weights that are found in the cache save reading, not waiting.
    assert shared_reads(1.0, 1.0, 0.0)(waiting) == pytest.approx([0.25 / (0.25 / 4 + 0.75) / 4 / 0.25] * 4)


def test_kernels_get_in_one_after_another() -> None:
    """Closed forms of rounds."""
    # Kernels of 100 and 10 us, of which each leaves 3: one of each a round.
    assert in_rounds([1.0, 1.0], [1e4, 1e5], 3e-6) == pytest.approx([100.0 / 107.0, 10.0 / 107.0])
    # What is shorter than 3 us keeps nobody out: the long one goes as if alone, the short when it may.
    assert in_rounds([1.0, 1.0], [1e4, 5e5], 3e-6) == pytest.approx([1.0, 0.03])
    # Strictly in turns, by kernels, not by time.
    assert in_rounds([1.0, 1.0], [1e4, 1e6], 0.0) == pytest.approx([100.0 / 101.0, 1.0 / 101.0])
    # Kernels that take 40 us in a hundred leave so much room that nobody waits.
    assert in_rounds([0.4, 0.4], [1e4, 1e4], 1e-5) == [1.0, 1.0]


@settings(fixed, max_examples=examples(150))
@given(st.lists(st.tuples(shares, st.floats(0.0, 1e6)), min_size=1, max_size=5), st.floats(0.0, 1e-4))
def test_whoever_is_slowed_is_done_or_kept_out_all_the_time(
    streams: list[tuple[float, float]], tail_overlap_s: float
) -> None:
    takes = [max(1e-3, share) for share, _ in streams]
    kernels_per_s = [max(1.0, per_s) for _, per_s in streams]
    rates = in_rounds(takes, kernels_per_s, tail_overlap_s)
    keeps = [max(0.0, t - tail_overlap_s * k) for t, k in zip(takes, kernels_per_s, strict=True)]
    out = sum(rate * share for rate, share in zip(rates, keeps, strict=True))
    for rate, took, kept in zip(rates, takes, keeps, strict=True):
        assert 0.0 < rate <= 1.0
        whole = rate * took + out - rate * kept
        assert whole == pytest.approx(1.0, abs=1e-8) if rate < 1.0 else whole <= 1.0 + 1e-8
    # Nobody is preferred; kernels of those that keep others out get in equally often.
    turned = in_rounds(takes[::-1], kernels_per_s[::-1], tail_overlap_s)
    assert turned[::-1] == pytest.approx(rates)
    slowed = [r * k for r, k, kept in zip(rates, kernels_per_s, keeps, strict=True) if kept > 0.0 and r < 1.0]
    assert slowed == pytest.approx(slowed[:1] * len(slowed), rel=1e-6)


@settings(fixed, max_examples=examples(150))
@given(demands, st.floats(0.0, 1e-4), st.floats(0.1, 1.0))
def test_rounds_only_slow_and_leave_what_is_short_alone(
    running: list[Demand], tail_overlap_s: float, bandwidth_share: float
) -> None:
    free, law = (
        shared_reads(0.0, bandwidth_share)(running),
        shared_reads(0.0, bandwidth_share, tail_overlap_s)(running),
    )
    assert all(0.0 < slowed <= rate for slowed, rate in zip(law, free, strict=True))
    short = [replace(demand, kernels_per_s=1.0 / max(tail_overlap_s, 1e-6)) for demand in running]
    assert shared_reads(0.0, 1.0, max(tail_overlap_s, 1e-6))(short) == pytest.approx(max_min_rates(running))


# -- programs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["shared weights", "own weights"])
def test_streams_take_what_the_memory_lets_them(kind: Any) -> None:
    """By hand: graphs bound by memory alone, four at a time."""
    case = Case(kind, 1, count=4, context=1024)
    free = replace(SIMULATED, overheads=Overheads())
    step = LARGE.instances(case).graph(0)
    ops = [op.at({"context": 1024}).without_place for op in step.ops]
    memory_s = sum(roofline(H200)(op).memory_s for op in ops)
    alone_s = 1.25 * memory_s
    trace = predicted(case, {"": alone_s}, LARGE, free, shared_reads(0.0, 0.8))
    laws.enforce(trace)
    assert seconds_of(trace, case) == pytest.approx(4 * memory_s / 0.8)
    in_turns = predicted(case, {"": alone_s}, LARGE, free, shared_reads(0.0, 1.0, 0.0))
    assert seconds_of(in_turns, case) == pytest.approx(4 * alone_s)


def test_a_tile_and_a_step_begin_together_and_are_timed_apart() -> None:
    case = balanced(Case("beside", 1, side=64, method="conv"), {"main": 2e-4, "side": 5e-4})
    assert (case.steps, case.tiles) == (30, 12)
    alone = shared_reads(0.0, 1.0)
    trace = predicted(replace(case, tiles=0), {"main": 2e-4}, LARGE, SIMULATED, alone)
    assert seconds_of(trace, case, "main") == pytest.approx(2e-4)
    trace = predicted(case, {"main": 2e-4, "side": 5e-4}, LARGE, SIMULATED, shared_reads(0.0, 1.0, 0.0))
    begun = [min(s.start_s for s in trace.spans if s.stream == name) for name in ("main", "side")]
    assert begun[0] == pytest.approx(begun[1])
    # Kernels in turns: the tiles' long ones wait for short ones, the steps for all of the tiles, which have
    # as much to do. No work is lost.
    step, tile = (job.graph.kernels / times for job, times in zip(jobs(case, LARGE), (30, 12), strict=True))
    tile_s = 5e-4 + tile * 2e-4 / step
    assert tile_s < 5.2e-4
    assert seconds_of(trace, case, "side") == pytest.approx(tile_s)
    assert seconds_of(trace, case, "main") == pytest.approx(4e-4)
    # Where more of each kernel is left to others, steps go on beside tiles, by one kernel for each of theirs.
    left_s = 1.5e-6
    trace = predicted(case, {"main": 2e-4, "side": 5e-4}, LARGE, SIMULATED, shared_reads(0.0, 1.0, left_s))
    round_s = 5e-4 / tile + 2e-4 / step - left_s
    assert seconds_of(trace, case, "side") == pytest.approx(tile * round_s)
    done_s = 12 * tile * 2e-4 / step
    assert seconds_of(trace, case, "main") == pytest.approx((12 * tile * round_s + 30 * 2e-4 - done_s) / 30)


@emulated
@thorough
def test_cases_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention_cases, "STEPS", 1)
    monkeypatch.setattr(contention_cases, "MOST_STEPS", 2)
    cases = [replace(case, steps=1) for case in cases_of([1, 3], [9], [4], ["conv"], 1)]
    real = RealCard(1, CardStates(4096, "cpu"), lambda: FakeCudaApi(3))
    rows = [*measured(cases, SMALL, replace(SIMULATED, start=real.start), 1, lambda _: None)]
    assert [(row.case.kind, row.case.count, row.stream) for row in rows] == [
        ("shared weights", 1, ""), ("shared weights", 3, ""), ("own weights", 3, ""),
        ("beside", 1, "main"), ("beside", 1, "side"),
    ]  # fmt: skip
    assert all(0.0 < row.least_s <= row.together_s <= row.most_s and row.alone_s > 0.0 for row in rows)


@emulated
@thorough
def test_a_calibrations_cases_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention_cases, "STEPS", 1)
    monkeypatch.setattr(contention_cases, "MOST_STEPS", 2)
    monkeypatch.setattr(card_sharing, "TRIES", 5)
    cases = [replace(case, steps=1) for case in cases_of([1, 2], [9], [4], ["conv"], 1)]
    monkeypatch.setattr(
        card_sharing, "cases", lambda *, quick: [case for case in cases if case.kind != "own weights"]
    )
    monkeypatch.setattr(card_sharing, "models_of", lambda layers: SMALL)
    real = RealCard(1, CardStates(4096, "cpu"), lambda: FakeCudaApi(3))
    monkeypatch.setattr(card_sharing, "this_machine", lambda repeats: real)
    said: list[str] = []
    profile = replace(PROFILE, device="h200-sxm")
    asked = card_sharing.cases(quick=True)
    rows, notes = card_sharing.rows_here(profile, asked, math.inf, said.append)
    assert (len(said), notes) == (3, [])
    assert roles(rows, True) == ["alone", "fit", "fit", "fit"]
    with pytest.raises(ValueError, match="no case of shared weights to judge by was measured"):
        card_sharing.fitted(rows, profile)


@emulated
@pytest.mark.parametrize("own", [False, True])
@slow
def test_instances_have_weights_of_one_model_or_their_own(own: bool) -> None:
    decoder = Decoder(SMALL.config, dtypes=F32, outside=False)
    found = []
    for count in (1, 3):
        setup: Any = _Setup(Instances(decoder, count, own))
        (state,) = CardStates(4096, "cpu").of(setup)
        assert isinstance(state, CardInstancesState)
        run = Card([state], FakeCudaApi(5)).start()

        def program(m: Any, made: Instances = setup.model) -> Any:
            yield m.wait(
                *(
                    m.launch(made.graph(i), sizes={"context": 9}, stream=made.stream(i))
                    for i in range(made.count)
                )
            )

        laws.enforce(run.run(program))
        found.append([one.buffers["x"].clone() for one in state.states])
        matrices = {id(one.weights) for one in state.states}
        assert len(matrices) == (count if own else 1)
        assert state.key() == (0,) * count
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[1][0], found[1][1])


class _Setup:
    def __init__(self, model: Instances) -> None:
        self.model, self.mesh, self.holds = model, {"tensor": 1}, {"context": 9}


def test_instances_are_of_layers_alone() -> None:
    with pytest.raises(ValueError, match="layers alone"):
        Instances(Decoder(GQA), 2)


# -- fitting and judging -------------------------------------------------------------------------------------

TRUE = Constants(tail_overlap_s=2e-6, reuse_s=0.0, bandwidth_share=0.9)


def rows_by(constants: Constants, streams: Sequence[int] = (1, 2, 4, 8)) -> list[Row]:
    """What the law itself says of cases whose graphs take longer alone than their floors."""
    rows = []
    for asked in cases_of(streams, [1024, 16384], [64, 256], ["flash_conv", "flash_fft"], 1):
        alone_s = {"main": 3e-4, "side": 2e-4} if asked.kind == "beside" else {"": 2.6e-4}
        case = balanced(asked, alone_s)
        for stream, seconds in alone_s.items():
            rows.append(Row(case, stream, seconds, 1.0, 1.0, 1.0, 3))
    found_s = together_s(rows, LARGE, SIMULATED, constants)
    return [replace(row, together_s=s, least_s=s, most_s=s) for row, s in zip(rows, found_s, strict=True)]


@slow
def test_constants_are_found_again_and_the_other_cases_judge_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # From one side, and not to the last digit: each try simulates all cases.
    monkeypatch.setattr(contention_fit, "STARTS_S", contention_fit.STARTS_S[1:])
    monkeypatch.setattr(contention_fit, "MOST_TRIES", 25)
    rows = rows_by(TRUE)
    parts = roles(rows, True)
    assert parts.count("alone") == 2
    assert min(parts.count("fit"), parts.count("judged")) > 5
    chosen = [row for row, role in zip(rows, parts, strict=True) if role == "fit"]
    assert {row.case for row in chosen}.isdisjoint(
        row.case for row, role in zip(rows, parts, strict=True) if role == "judged"
    )
    found = fit(chosen, LARGE, SIMULATED, 0.95)
    assert max(medians(judged(rows, LARGE, SIMULATED, found, True)).values()) < 1.0
    wrong = judged(rows, LARGE, SIMULATED, Constants(math.inf, 0.0, 1.0), True)
    assert medians(wrong)["all"] > 8.0
    # Alone, every law says the same, and what is alone is not judged.
    assert all(each.error_pct < 1e-6 for each in wrong if each.role == "alone")


def test_tiles_of_one_side_are_fitted_or_judged_together() -> None:
    cases = cases_of([1, 2, 4, 8], [1024], [64, 256, 1024], ["flash_conv", "flash_fft"], 1)
    rows = [Row(case, stream, 1.0, 1.0, 1.0, 1.0, 1) for case in cases for stream in streams_of(case)]
    found = {(row.case.kind, row.case.count, row.case.side): set[str]() for row in rows}
    for row, role in zip(rows, roles(rows, True), strict=True):
        found[row.case.kind, row.case.count, row.case.side].add(role)
    beside = {side: parts for (kind, _, side), parts in found.items() if kind == "beside"}
    assert beside == {64: {"fit"}, 256: {"judged"}, 1024: {"fit"}}
    assert all(len(parts) == 1 for parts in found.values())


MEASURED = Path(contention.__file__).parents[1] / "measured" / "h200_contention.csv"


@slow
def test_what_an_h200_measured_is_predicted() -> None:
    """By the constants of the committed profile: fitted to other rows, on that card."""
    rows, layers, _ = read(MEASURED)
    models = replace(LARGE, config=models_of(layers).config)

    def errors(constants: Constants) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for each in judged(rows, models, SIMULATED, constants, False):
            if each.role == "judged":
                found.setdefault(each.row.stream or each.row.case.kind, []).append(each.error_pct)
        return found

    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    law = profile.contention
    assert law is not None
    by_law = errors(Constants(law.tail_overlap_s, law.reuse_s, law.bandwidth_share))
    assert set(by_law) == {"shared weights", "own weights", "main", "side"}
    assert {kind for kind, each in by_law.items() if median(each) >= contention.MOST_PCT} == set()
    # Beside tiles of 54 us a step goes on a little, beside those of 249 it stands still: so it does in both.
    *others, slowest = sorted(by_law["main"])
    assert max(others) < contention.MOST_PCT
    assert slowest == pytest.approx(8.35, abs=0.1)
    # Short tiles wait for programs of a step, which the law does not know: some of 8 us take 38 % longer
    # than it says.
    assert max(by_law["side"]) == pytest.approx(37.6, abs=0.1)
    # Max-min shares alone let a step go on beside tiles of side 1024 as if it were alone.
    assert max(errors(Constants(math.inf, 0.0, law.bandwidth_share))["main"]) > 90.0


def of_a_calibration(*, quick: bool) -> list[Row]:
    """The rows of the cases that a calibration measures."""
    rows, _, _ = read(MEASURED)
    found = []
    for case in card_sharing.cases(quick=quick):
        asked = case.kind, case.count, case.context, case.side, case.method
        found += [
            row
            for row in rows
            if (row.case.kind, row.case.count, row.case.context, row.case.side, row.case.method) == asked
        ]
    return found


@thorough
@pytest.mark.parametrize(("quick", "of_all"), [(False, (12, 7, 4)), (True, (7, 3, 3))])
def test_a_calibrations_part_of_the_cases_says_nearly_the_same_of_all(
    quick: bool, of_all: tuple[int, ...]
) -> None:
    """A calibration measures twelve of these rows, a quick one seven: constants that are fitted to every
    second of those."""
    rows, layers, _ = read(MEASURED)
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    some = of_a_calibration(quick=quick)
    found = card_sharing.fitted(some, profile)
    assert (len(some), found.cases, found.judged) == of_all
    models, here = models_of(layers), simulated_on(H200, profile)
    of_law = Constants(found.tail_overlap_s, found.reuse_s, found.bandwidth_share)
    assert max(medians(judged(rows, models, here, of_law, True)).values()) < contention.MOST_PCT


def test_a_quick_calibration_has_fewer_cases_and_both_judge() -> None:
    whole, few = card_sharing.cases(quick=False), card_sharing.cases(quick=True)
    assert set(few) < set(whole)
    for cases in (whole, few):
        rows = [Row(case, stream, 1.0, 1.0, 1.0, 1.0, 2) for case in cases for stream in streams_of(case)]
        found = {(row.case.kind, role) for row, role in zip(rows, roles(rows, True), strict=True)}
        assert {(kind, role) for kind in ("shared weights", "beside") for role in ("fit", "judged")} <= found
    for quick in (True, False):
        each = card_sharing.ops(quick=quick)
        kinds = {op.kind for op in each}
        assert {"decode_attention", "matmul", "tile_flash_fft", "conv_cell"} <= kinds <= set(TABLE)
        assert len({(op.kind, op.shape) for op in each}) == len(each)
        assert not any(op.needs for op in each)


@thorough
def test_graphs_reach_together_no_more_than_reading_alone() -> None:
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    assert profile.birth is not None
    rate = profile.birth.rates["read_bytes_per_s"]
    assert most_reach(H200, profile) == pytest.approx(rate / H200.hbm_bytes_per_s)
    assert most_reach(H200, None) == most_reach(H200, replace(profile, birth=None)) == 1.0
    # Steps that share the card so well that no reach would do.
    beside_s, model = 1e-4, models_of(1)
    rows = [Row(Case("shared weights", 1, count=8, context=1024), "", beside_s, beside_s, 0.0, 0.0, 1)]
    here = simulated_on(H200, profile)
    assert fit(rows, model, here, 0.9, 0.97, 5).bandwidth_share == 0.97
    assert fit(rows, model, here, 0.9, 0.5, 5).bandwidth_share == 0.5
    assert contention._compared(rows, model, here, profile, 0.9, 0.5, True)[0].bandwidth_share == 0.5
    # If reading alone were half as fast, nothing measured would do.
    slow = replace(profile, birth=replace(profile.birth, rates={"read_bytes_per_s": rate / 2}))
    with pytest.raises(ValueError, match=f"bandwidth_share {rate / 2 / H200.hbm_bytes_per_s:.3f}"):
        card_sharing.fitted(of_a_calibration(quick=True), slow)


TAKES = {"": (3e-4, 6e-4), "main": (2.5e-4, 4.9e-4), "side": (5e-5, 5.1e-5)}


def some_rows(
    cases: Sequence[Case], models: Any, device: Any, repeats: int, say: Any, is_over: Any = lambda: False
) -> Any:
    """Whole cases, until it is over."""
    for case in cases:
        if is_over():
            return
        whole = balanced(case, {stream: alone_s for stream, (alone_s, _) in TAKES.items()})
        yield from (Row(whole, stream, *TAKES[stream], 1.0, 1.0, 2) for stream in streams_of(case))
        say(case.text)


@slow
@pytest.mark.parametrize(
    ("done", "says"),
    [
        (
            0,
            "no case of shared weights to fit to was measured; 9 of 9 cases of contention were left out",
        ),
        (2, "no case of shared weights to judge by was measured; 7 of 9"),
        (7, "no case of beside to judge by was measured; 2 of 9"),
        (9, "the law says nothing of them: tail_overlap_s"),
    ],
)
def test_cases_that_there_was_no_time_for_are_left_out(
    done: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[bool] = []
    real: Any = SimpleNamespace(start=None, release=lambda: released.append(True))
    monkeypatch.setattr(card_sharing, "this_machine", lambda repeats: real)
    times = iter([0.0] * done + [2.0])
    monkeypatch.setattr(card_sharing, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    monkeypatch.setattr(card_sharing, "measured", some_rows)
    monkeypatch.setattr(card_sharing, "TRIES", 5)
    profile = replace(PROFILE, device="h200-sxm")
    with pytest.raises(ValueError, match=says):
        card_sharing.shared_use_here(profile, quick=False, end_s=1.0, say=lambda text: None)
    assert released == [True]


def test_cases_that_have_been_measured_count_where_a_later_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = SimpleNamespace(start=None, release=lambda: None)
    monkeypatch.setattr(card_sharing, "this_machine", lambda repeats: real)

    def fails(cases: Sequence[Case], *rest: Any) -> Any:
        yield from some_rows(cases[:4], *rest)
        raise InputError("32 streams do not fit")

    monkeypatch.setattr(card_sharing, "measured", fails)
    asked = card_sharing.cases(quick=False)
    profile = replace(PROFILE, device="h200-sxm")
    rows, notes = card_sharing.rows_here(profile, asked, math.inf, lambda text: None)
    assert [(row.case.kind, row.case.count) for row in rows] == [
        (each.kind, each.count) for each in asked[:4]
    ]
    assert notes == ["5 of 9 cases of contention were left out: InputError: 32 streams do not fit"]


@pytest.mark.parametrize("method", ["flash_conv", "flash_fft"])
def test_a_tile_is_computed_as_its_case_says(method: str) -> None:
    (job,) = jobs(Case("beside", 1, side=64, method=method, steps=0, tiles=1), LARGE)
    assert [op.kind for op in job.graph.ops] == [f"tile_{method}"]


BIRTH = dict.fromkeys(contention.BORN, "x")


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    rows = rows_by(TRUE, (1, 2))
    births = [{**BIRTH, "date_utc": str(i)} for i in range(len(rows))]
    write(judged(rows, LARGE, SIMULATED, TRUE, False), LARGE, births, tmp_path / "rows.csv")
    assert read(tmp_path / "rows.csv") == (rows, 2, births)


@pytest.fixture
def measured_rows(tmp_path: Path) -> Path:
    """Rows of the catalogue's model, by the law with TRUE, and the folder of a profile."""
    assert PROFILE.birth is not None
    profile = replace(PROFILE, device="h200-sxm", birth=replace(PROFILE.birth, processor=BIRTH["device"]))
    folder = tmp_path / "own"
    folder.mkdir()
    write_fitted(profile, folder)
    here = Device(pricer(H200, profile=profile), roofline(H200), Overheads(**{"launch_s": 1e-6}))
    models = models_of(2)
    rows = [
        Row(Case("shared weights", 1, count=count, context=context), "", 2.6e-4, 1.0, 1.0, 1.0, 3)
        for context in (1024, 4096)
        for count in (2, 4)
    ]
    found_s = together_s(rows, models, here, TRUE)
    rows = [replace(row, together_s=s) for row, s in zip(rows, found_s, strict=True)]
    write(judged(rows, models, here, TRUE, False), models, [BIRTH] * len(rows), tmp_path / "rows.csv")
    return tmp_path


def ran(*arguments: str) -> Any:
    app = contention.typer.Typer()
    app.command()(contention.main)
    return CliRunner().invoke(app, [*arguments])


@slow
def test_the_program_writes_what_it_fitted_and_judges_by_it(measured_rows: Path) -> None:
    rows, folder = str(measured_rows / "rows.csv"), measured_rows / "own"
    given_ = ["--measured", rows, "--device", "h200-sxm", "--profile", str(folder)]
    before = ran(*given_)
    assert before.exit_code == 1
    assert "median error, shared weights:" in before.output
    assert "for the profile has none: nobody is kept out" in before.output
    fitted = ran(*given_, "--fit", "--out", str(measured_rows / "again.csv"))
    assert fitted.exit_code == 0, fitted.output
    assert f"written into {folder / 'profile.yaml'}" in fitted.output
    document = yaml.safe_load((folder / "profile.yaml").read_text())
    shared = read_fitted(document, folder / "profile.yaml").contention
    assert shared is not None
    assert (shared.cases, shared.judged, shared.processor) == (2, 2, "x")
    assert shared.error_pct < 8.0
    # Judged by what stands in the profile now.
    again = ran(*given_)
    assert again.exit_code == 0
    assert "of the profile, fitted on x, to some of these rows" in again.output


@slow
def test_what_is_of_another_card_or_misses_the_bar_is_not_written(measured_rows: Path) -> None:
    rows, folder = measured_rows / "rows.csv", measured_rows / "own"
    given_ = ["--measured", str(rows), "--device", "h200-sxm", "--profile", str(folder), "--fit"]
    path, good = folder / "profile.yaml", rows.read_text()
    before = path.read_text()
    # Instances that take longer than one after the other: no constants say that.
    lines = list(csv.DictReader(good.splitlines()))
    for line in lines:
        line["together_s"] = str(30 * float(line["together_s"]))
    write_csv(lines, rows)
    missed = ran(*given_)
    assert missed.exit_code == 1
    assert "missed: shared weights" in missed.output
    assert "(each median should be under 8 %); nothing was written" in missed.output
    assert path.read_text() == before
    # One row, which is fitted to.
    write_csv(list(csv.DictReader(good.splitlines()))[:1], rows)
    assert "nothing was judged" in ran(*given_).output
    assert path.read_text() == before
    lines = list(csv.DictReader(good.splitlines()))
    write_csv([lines[0], *({**line, "device": "another"} for line in lines[1:])], rows)
    refused = ran(*given_)
    assert isinstance(refused.exception, InputError)
    assert "row 2: device: is 'another'; the profile is of 'x'" in str(refused.exception)
    assert path.read_text() == before


def test_bad_options_are_refused(measured_rows: Path) -> None:
    for option, text in (
        ("--streams", "0"),
        ("--streams", "two"),
        ("--methods", "magic"),
        ("--methods", ","),
        ("--sides", "8192"),
    ):
        found = ran("--measured", str(measured_rows / "rows.csv"), option, text, "--device", "h200-sxm")
        assert isinstance(found.exception, InputError)
        assert option in str(found.exception)


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("together_s", "nan", "line 3: together_s: input should be a finite number, got 'nan'"),
        ("alone_s", "-1", "line 3: alone_s: input should be greater than or equal to 0.000000001, got '-1'"),
        ("alone_s", "1e300", "line 3: alone_s: input should be less than or equal to 1000, got '1e300'"),
        ("least_s", "hello", "line 3: least_s: input should be a valid number"),
        ("steps", "-1", "line 3: steps: input should be greater than or equal to 1, got '-1'"),
        ("count", "1000000", "line 3: count: input should be less than or equal to 256, got '1000000'"),
        ("count", "2", "stream: 2 streams, shared weights, batch 1, context 1024: 2 rows; one is needed"),
        ("context", "0", "line 3: context: is 0; it should be 2 or more"),
        ("context", "200000", "line 3: context: input should be less than or equal to 131072"),
        ("count", "2.5", "line 3: count: input should be a valid integer"),
        ("n", "", "line 3: n: input should be a valid integer"),
        ("kind", "x", "line 3: kind: unknown value 'x' \\(allowed: beside, own weights, shared weights\\)"),
        ("stream", "hello", "line 3: unknown stream 'hello'"),
        ("layers", None, "has no column layers"),
    ],
)
def test_measured_rows_are_told_what_is_wrong_with_them(
    column: str, value: str | None, says: str, measured_rows: Path
) -> None:
    with (measured_rows / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    if value is None:
        rows = [{name: cell for name, cell in row.items() if name != column} for row in rows]
    else:
        rows[1][column] = value
    with (measured_rows / "bad.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(InputError, match=says):
        read(measured_rows / "bad.csv")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            ",64,flash_conv,",
            ",33,flash_conv,",
            "line 2: side: is 33, tiles: 1; a power of two, and 1 or more",
        ),
        (",64,flash_conv,", ",0,flash_conv,", "line 2: side: is 0"),
        (",12,1,", ",12,0,", "line 2: side: is 64, tiles: 0"),
        (",flash_conv,", ",flash_con,", "line 2: unknown method 'flash_con'; did you mean 'flash_conv'"),
    ],
)
def test_measured_tiles_are_told_what_is_wrong_with_them(
    old: str, new: str, says: str, tmp_path: Path
) -> None:
    case = Case("beside", 1, side=64, method="flash_conv", tiles=1)
    rows = [Row(case, stream, 1e-4, 1e-4, 1e-4, 1e-4, 2) for stream in streams_of(case)]
    path = tmp_path / "rows.csv"
    write([contention_fit.Judged(row, "judged", 1e-4) for row in rows], LARGE, [BIRTH] * 2, path)
    assert read(path)[0] == rows
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=says):
        read(path)


def test_a_tile_without_its_step_is_refused(tmp_path: Path) -> None:
    whole = MEASURED.read_text(encoding="utf-8").splitlines(keepends=True)
    beside = next(i for i, line in enumerate(whole) if line.startswith("beside"))
    (tmp_path / "half.csv").write_text("".join(whole[:beside] + whole[beside + 1 :]), encoding="utf-8")
    with pytest.raises(InputError, match=r"stream: 64 x flash_conv of 32 .*: stream 'main': 0 rows; one is"):
        read(tmp_path / "half.csv")


def test_a_device_is_named_and_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = ran("--device", "h200-sxm")
    assert isinstance(found.exception, InputError)
    assert "torch finds no CUDA device here" in str(found.exception)


def test_files_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    for content, says in (
        (b"", "has no column kind"),
        (b"kind\n\xff\n", "not UTF-8 text"),
        (b"kind,batch\nbeside,1\n", "has no column count"),
    ):
        (tmp_path / "bad.csv").write_bytes(content)
        with pytest.raises(InputError, match=says):
            read(tmp_path / "bad.csv")


# -- streams -------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_there_are_more_streams_than_torch_has() -> None:
    for _ in range(2):
        api = TorchCudaApi()
        streams = [api.stream() for _ in range(STREAMS_OF_TORCH + 10)]
        assert len({stream.cuda_stream for stream in streams}) == len(streams)
        total = torch.zeros(len(streams), device="cuda")
        torch.cuda.synchronize()
        for i, stream in enumerate(streams):
            add = partial(total[i].add_, i)
            api.run(stream, add)
            api.captured(stream, add)()
        api.synchronize()
        assert total.tolist() == [2.0 * i for i in range(len(streams))]
