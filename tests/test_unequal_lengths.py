"""Decode attention says how long its longest sequence is: schedules, inputs on a card, prices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

from simcore.devices.fitted import FittedProfile
from simcore.devices.interpolation import AS_SPREAD, longest_pct
from simcore.devices.making import Point, as_read, extended, fits
from simcore.devices.price import launches_and_floor, pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.input.files import InputError
from simcore.kernels.decoder.paged_attention import lengths_of, spread
from simcore.machine.machine import Machine
from simcore.models import served_decoder
from simcore.models.served_decoder import decode_sizes, over_mean, step_sizes
from simcore.ops.op import Op, longest, longest_of_spread, paged_attention
from simcore.schedules.continuous_batching import continuous_batching
from simcore.validate.accuracy import unequal_lengths
from simcore.validate.accuracy.unequal_lengths import Case, drawn, line_of, main
from simcore.validate.benchmarks.cases import BORN
from simcore.validate.calibration.cuda_grid import grid, unlike
from simcore.validate.program import write_csv
from simcore.workload.requests import Request
from tests.test_serving_schedules import (
    ROOM,
    STEPWISE,
    Schedule,
    dynamic,
    fusion,
    instances,
    orca,
    serve,
)
from tests.thorough import examples, slow

H200 = load_device("h200-sxm")
HEADS = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16"}


def attention(sequences: int, kv_tokens: int, **over: int) -> Op:
    return paged_attention(sequences=sequences, kv_tokens=kv_tokens, **HEADS, **over)  # type: ignore[arg-type]


# -- lengths -------------------------------------------------------------------------------------------------

# Sequences, and tokens besides the one that each has.
NUMBERS = st.integers(1, 300), st.integers(0, 200_000)


@given(*NUMBERS, st.integers(0, 100_000))
def test_lengths_have_their_sum_and_their_longest(sequences: int, more: int, over: int) -> None:
    total = sequences + more
    lengths = lengths_of(attention(sequences, total, over_mean=over))
    assert len(lengths) == sequences
    assert sum(lengths) == total
    assert max(lengths) == longest(total, sequences, over)
    assert min(lengths) >= 1


@given(*NUMBERS)
def test_lengths_are_spread_evenly_where_an_op_does_not_say(sequences: int, more: int) -> None:
    total = sequences + more
    lengths = lengths_of(attention(sequences, total))
    assert lengths == spread(total, sequences)
    assert sum(lengths) == total
    assert 0 <= max(lengths) - longest_of_spread(total, sequences) <= 1
    # An op that says as much has nearly the same ones: the others of its longest are spread as evenly.
    over = max(0, longest_of_spread(total, sequences) + -total // sequences)
    said = sorted(lengths_of(attention(sequences, total, over_mean=over)))
    off = max(abs(a - b) for a, b in zip(said, sorted(lengths), strict=True))
    assert off <= 2 + 2.0 * total / sequences**2


@given(*NUMBERS, st.integers(1, 200_001))
def test_how_far_the_longest_exceeds_the_mean_is_rounded_and_stays(
    sequences: int, more: int, most: int
) -> None:
    total = sequences + more
    most = max(-(-total // sequences), min(most, more + 1))
    over = over_mean(sequences, total, most)
    exact = most + -total // sequences if sequences > 1 else 0
    # Half a step of two values an octave, up to a fifth.
    assert abs(over - exact) <= exact / 5
    # Each sequence grows by a token from replay to replay of a burst.
    assert over_mean(sequences, total + 7 * sequences, most + 7) == over
    sizes = decode_sizes(sequences, total, most)
    assert sizes["over_mean"] == over == step_sizes(sequences, total, [(3, 0)], 1, most)["over_mean"]


def test_steps_without_sequences_have_no_longest() -> None:
    assert step_sizes(0, 0, [(3, 0)], 1)["over_mean"] == 0
    assert decode_sizes(1, 100, 100)["over_mean"] == 0
    # Places that hold nothing are sequences of a step too.
    assert longest(3, 5, 2) == 1


# -- schedules -----------------------------------------------------------------------------------------------


class Told:
    """A machine that compares the longest sequence of each launch with those of its batch. `beyond`: tokens
    that its sizes count beyond those that are cached."""

    def __init__(self, machine: Machine, beyond: int, most: int, told: list[tuple[int, int]]) -> None:
        self.machine, self.beyond, self.most, self.told = machine, beyond, most, told

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def launch(self, graph: Any, **how: Any) -> Any:
        if graph.name in ("decode", "mixed"):
            sizes, decoding = how["sizes"], how["batch"]().decoding
            most = max(min(cached + self.beyond, self.most) for _, cached in decoding)
            wanted = over_mean(sizes["sequences"], sizes["kv_tokens"], most)
            self.told.append((sizes["over_mean"], wanted))
        return self.machine.launch(graph, **how)


SCHEDULES: Mapping[str, Schedule] = {
    "continuous": partial(continuous_batching, blocks=1000, block_tokens=4, token_budget=24),
    "preempts": partial(continuous_batching, blocks=16, block_tokens=4, token_budget=32, max_sequences=6),
    "whole prompts": partial(continuous_batching, blocks=30, block_tokens=4, prefill="whole"),
    "prompts first": partial(
        continuous_batching, blocks=30, block_tokens=4, token_budget=16, prefill="first", wait_steps=3
    ),
    "known prefixes": partial(
        continuous_batching, blocks=24, block_tokens=4, token_budget=32, prefix_caching=True, ahead=1
    ),
    "iteration": orca(3),
    "dynamic": dynamic(2.0, 3),
    "instances": instances(2),
    "fusion": fusion(3, 64),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_say_how_long_their_longest_sequence_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # To the token.
    monkeypatch.setattr(served_decoder, "FINE_BITS", 64)
    preempted, fused = 0, name == "fusion"
    for seed in range(examples(60)):
        random, told = Random(seed), list[tuple[int, int]]()
        alike = random.randint(2, 12)
        wanted = [
            request(random, i, alike if name == "iteration" else random.randint(1, 20)) for i in range(12)
        ]
        wrap = partial(Told, beyond=2 if fused else 1, most=64 if fused else ROOM, told=told)
        run = serve(SCHEDULES[name], wanted, STEPWISE, wrap=wrap)  # type: ignore[arg-type]
        assert told
        assert all(said == is_ for said, is_ in told)
        preempted += sum(r.preemptions for r in run.requests)
    assert preempted or name != "preempts"


def request(random: Random, number: int, output: int) -> Request:
    return Request(number, random.uniform(0.0, 20.0), random.randint(1, 30), output, output)


# -- prices --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before() -> FittedProfile:
    """The H200's profile without shapes that say how long their longest sequence is."""
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    paged = [p for p in profile.points if p.kind == "paged_attention" and "over_mean" not in p.shape]
    rows = tuple(row for row in profile.fits if row.kind == "paged_attention")
    return replace(profile, points=tuple(paged), fits=rows, renewed=())


def factor(op: Op) -> float:
    """How much longer attention takes at its longest than at that of lengths spread evenly; less with more
    queries a KV head."""
    pct = longest_pct(op["kv_tokens"], op["sequences"], op["over_mean"])
    return (pct / AS_SPREAD) ** (1.2 * op["kv_heads"] / op["q_heads"])


def measured(op: Op, seconds: float) -> Point:
    launches, floor_s = launches_and_floor(op, roofline(H200))
    return Point(op, launches, floor_s, seconds, seconds, seconds, 10, "cold")


@pytest.fixture(scope="module")
def after(before: FittedProfile) -> FittedProfile:
    """The same with such shapes, whose times follow a law."""
    price = pricer(H200, profile=before)
    shapes = [op for op in grid(["paged_attention"]) if any(name == "over_mean" for name, _ in op.shape)]
    points = [measured(op, factor(op) * price(op).seconds) for op in shapes]
    new = replace(before, points=tuple(map(as_read, points)), fits=fits(points, {}, 0.0, "memory"))
    return extended(before, new)


SHAPES = [(4, 300), (8, 1025), (24, 700), (32, 3000), (64, 513), (96, 5000), (200, 260)]


def test_a_profile_that_knows_no_longest_goes_on(before: FittedProfile) -> None:
    price = pricer(H200, profile=before)
    for sequences, context in SHAPES:
        plain = price(attention(sequences, sequences * context))
        for over in (0, context, 100 * context):
            assert price(attention(sequences, sequences * context, over_mean=over)) == plain


def test_without_measurements_the_longest_changes_no_price() -> None:
    for price in (pricer(H200), pricer(load_device("a100-sxm-80gb"))):
        assert price(attention(8, 8000, over_mean=900)).seconds == price(attention(8, 8000)).seconds


def test_prices_are_as_before_at_the_longest_of_spread_lengths(
    before: FittedProfile, after: FittedProfile
) -> None:
    old, new = pricer(H200, profile=before), pricer(H200, profile=after)
    for sequences, context in SHAPES:
        total = sequences * context
        plain = old(attention(sequences, total))
        over = longest_of_spread(total, sequences) - context
        assert new(attention(sequences, total)).seconds == plain.seconds
        assert new(attention(sequences, total, over_mean=over)).seconds == pytest.approx(
            plain.seconds, rel=2e-3
        )
    assert new(attention(1, 4097, over_mean=0)).seconds == old(attention(1, 4097)).seconds


def test_prices_rise_where_measured_times_rise(after: FittedProfile) -> None:
    price = pricer(H200, profile=after)
    for sequences, context in SHAPES:
        overs = [0, *(round(context * 1.3**i / 8) for i in range(40))]
        seconds = [price(attention(sequences, sequences * context, over_mean=over)).seconds for over in overs]
        assert all(b >= a * (1.0 - 1e-9) for a, b in pairwise(seconds))
        assert seconds[-1] > 1.1 * seconds[0]


def test_prices_follow_what_was_measured(before: FittedProfile, after: FittedProfile) -> None:
    """The law is a straight line in logarithms, so it is met between measured shapes, whatever the heads."""
    old, new = pricer(H200, profile=before), pricer(H200, profile=after)
    for (sequences, context), queries in product(SHAPES, (32, 64)):
        for pct in (70, 90, 130, 200, 280):
            op = unlike(batch=sequences, context=context, longest_pct=pct, **{**HEADS, "q_heads": queries})
            if longest_pct(sequences * context, sequences, op["over_mean"]) == pct:
                plain = replace(op, shape=tuple(item for item in op.shape if item[0] != "over_mean"))
                assert new(op).seconds == pytest.approx(factor(op) * old(plain).seconds, rel=0.02)


def test_an_interval_has_the_price_without_a_correction_that_is_only_held(
    before: FittedProfile, after: FittedProfile
) -> None:
    old, new = pricer(H200, profile=before), pricer(H200, profile=after)
    (sequences, context), widths = SHAPES[-1], []
    for tokens in (sequences * context, 1000 * sequences * context):
        plain = old(attention(sequences, tokens))
        found = new(attention(sequences, tokens, over_mean=2 * tokens // sequences))
        widths.append(math.log(found.high_s / found.low_s) - math.log(plain.high_s / plain.low_s))
        assert tokens == sequences * context or found.low_s <= plain.seconds <= found.high_s
    assert widths[0] < 0.01 < widths[1]


def test_a_burst_is_a_sum_of_few_lines(after: FittedProfile) -> None:
    """Between two contexts a price is linear while all sequences grow."""
    price = pricer(H200, profile=after)
    seconds = [price(attention(8, 8 * (1024 + i), over_mean=640)).seconds for i in range(17)]
    for i in range(1, 16):
        assert seconds[i] == pytest.approx(seconds[0] + i / 16 * (seconds[16] - seconds[0]), rel=1e-12)


def test_fits_are_of_shapes_with_lengths_spread_evenly() -> None:
    even, other = attention(8, 8000), attention(8, 8000, over_mean=5000)
    (row,) = fits([measured(even, 1e-5), measured(other, 9e-5)], {}, 0.0, "memory")
    assert row.n == 1
    (row,) = fits([measured(other, 9e-5)], {}, 0.0, "memory")
    assert row.n == 1


# -- held out ------------------------------------------------------------------------------------------------


def test_cases_are_drawn_by_their_seed_inside_the_ranges() -> None:
    cases = drawn(60, 5)
    assert cases == drawn(60, 5) != drawn(60, 6)
    assert {case.way for case in cases} == {"uniform", "lognormal", "one long"}
    for case in cases:
        count, total = len(case.lengths), sum(case.lengths)
        assert 67 <= total / count <= 65551
        assert case.op["kv_tokens"] == total
        said = longest(total, count, case.op["over_mean"])
        assert abs(said - max(case.lengths)) <= max(case.lengths) / 5 + 1


def test_results_at_unequal_lengths_are_held_against_float64() -> None:
    assert unequal_lengths.error_of(Case("uniform", 4, 1, (300, 20, 131)), torch.device("cpu")) < 4e-3


def written(cases: Sequence[Case], path: Path, off: float) -> Path:
    price = pricer(H200, profile=load_profile("h200-sxm", "local"))
    born = dict.fromkeys(BORN, "x")
    lines = [line_of(case, {"median_s": off * price(case.op).seconds, **born}, price) for case in cases]
    write_csv(lines, path)
    return path


@slow
def test_times_of_an_earlier_run_are_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = {"count": 12, "seed": 3, "device": "h200-sxm", "profile": "local"}
    rows = written(drawn(12, 3), tmp_path / "rows.csv", 1.02)
    main(**asked, again=rows, out=tmp_path / "again.csv")
    said = capsys.readouterr().out
    assert "2.00 %" in said
    assert "as spread evenly" in said
    with pytest.raises(typer.Exit):
        main(**asked, again=written(drawn(12, 3), tmp_path / "far.csv", 1.3))
    for changed in ({"seed": 4}, {"device": ""}):
        with pytest.raises(InputError, match=r"--seed|--device"):
            main(**{**asked, **changed}, again=rows)  # type: ignore[arg-type]
