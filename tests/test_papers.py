"""The papers' figures, through the whole path from YAML to results: simulated, not by the formula."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from simcore.assembly import assemble
from simcore.scenario import load_scenario
from simcore.studies import decode
from simcore.studies.common import Outcome
from simcore.studies.published import compare
from tests.thorough import first, slow, thorough

ROOT = Path(__file__).resolve().parent.parent


@cache
def ran(file: str, *settings: str) -> tuple[Outcome, list[dict[str, Any]]]:
    path = ROOT / "scenarios" / file
    parts = assemble(load_scenario(path, settings), str(path))
    outcome = decode.run(parts.study.bench, lambda doing, done, total: None)
    return outcome, compare(outcome.rows, parts.study.published, parts.study.fitted)[0]


def values(outcome: Outcome, metric: str) -> dict[tuple[str, int, int | None], float]:
    return {
        (row.axes.strategy, row.axes.ranks, row.axes.context_tokens): row.value
        for row in outcome.rows
        if row.metric == metric and row.value is not None
    }


def test_n150_token_latency_at_1k_is_fixed_plus_32_layers() -> None:
    """ALSpec Tables 4 to 7: 31.65, 21.03, 14.83, 16.08 ms on 1, 2, 4, 8 chips, within 0.1 %."""
    only = 'strategies=[{"kind": "tensor_parallel", "ranks": [1, 2, 4, 8]}]'
    outcome, _ = ran("papers/alspec_n150.yaml", only, "context_tokens=1024", "crossover=[]")
    latency = values(outcome, "token_latency_s")
    for ranks, milliseconds in ((1, 31.65), (2, 21.03), (4, 14.83), (8, 16.08)):
        found_ms = latency["tensor_parallel", ranks, 1024] * 1e3
        assert found_ms == pytest.approx(milliseconds, rel=1e-3)
    # And exactly what the rows of the tables add up to, in nanoseconds.
    exact_ns = {
        1: 2313703 + 32 * (846747 + 69853),
        2: 1207678 + 32 * (555015 + 64309),
        4: 638529 + 32 * (387584 + 56024),
        8: 384460 + 32 * (440451 + 50096),
    }
    for ranks, nanoseconds in exact_ns.items():
        assert latency["tensor_parallel", ranks, 1024] * 1e9 == pytest.approx(nanoseconds, rel=1e-12)


@slow
def test_table_3_tensor_parallel_and_projected_alspec() -> None:
    """ALSpec Table 3: both columns, all five contexts, within 0.5 %; the first is met by construction."""
    outcome, comparison = ran("papers/alspec_h100_table3.yaml")
    rate = values(outcome, "tokens_per_s_per_user")
    contexts = (1024, 32768, 65536, 98304, 131072)
    for context, tensor_parallel, projected in zip(
        contexts, (244.6, 214.2, 191.4, 178.2, 169.3), (262.0, 246.0, 237.8, 224.9, 217.5), strict=True
    ):
        assert rate["tensor_parallel", 4, context] == pytest.approx(tensor_parallel, rel=5e-3)
        assert rate["alspec", 4, context] == pytest.approx(projected, rel=5e-3)
    roles = {(line["strategy"], line["role"]) for line in comparison}
    assert roles == {("tensor_parallel", "fitted"), ("alspec", "projected")}


@thorough
def test_table_3_needs_the_fractional_number_of_hits() -> None:
    """20.8 of 32 hits: with 20 or 21 the projected column at 128K is missed by more than the fraction's
    rounding, so the agreement above has power."""
    for draw, hits in (("floor", 20), ("ceil", 21)):
        outcome, _ = ran(
            "papers/alspec_h100_table3.yaml", f"strategies.1.hits.draw={draw}", "context_tokens=131072"
        )
        latency_s = values(outcome, "token_latency_s")["alspec", 4, 131072]
        fixed_s = 1.0 / 169.3 - 32 * 164e-6
        expected_s = fixed_s + hits * 101e-6 + (32 - hits) * 164e-6
        assert latency_s == pytest.approx(expected_s, rel=1e-4)
        assert abs(1.0 / latency_s - 217.5) > 0.25


@pytest.mark.parametrize("context", first(1, [131072, 1024]))
@slow
def test_the_critical_path_adds_up_to_the_latency_in_every_row(context: int) -> None:
    outcome, _ = ran("alspec.yaml", "crossover=[]", f"context_tokens={context}")
    parts: dict[Any, float] = {}
    for row in outcome.rows:
        if row.metric == "critical_path_s" and row.value is not None:
            parts[row.axes] = parts.get(row.axes, 0.0) + row.value
    latency = {row.axes: row.value for row in outcome.rows if row.metric == "token_latency_s"}
    assert parts.keys() == latency.keys()
    for axes, seconds in parts.items():
        assert seconds == pytest.approx(latency[axes], rel=1e-9)


def alspec(ranks: int, hits: str) -> str:
    return f'strategies=[{{"kind": "alspec", "ranks": {ranks}, "hits": {{{hits}}}}}]'


@thorough
def test_overlapping_the_last_layer_gains_and_never_loses() -> None:
    strategy = alspec(2, '"kind": "rate", "value": [0.0, 0.5, 1.0]')
    common = ("crossover=[]", "tokens=3", "baseline=null", "context_tokens=[1024, 131070]")
    outcome, _ = ran("alspec.yaml", strategy, *common)
    gains = [row.value for row in outcome.rows if row.metric == "overlap_gain_s"]
    assert len(gains) == 6
    assert all(gain is not None and gain > -1e-12 for gain in gains)
    assert max(gain for gain in gains if gain is not None) > 1e-5


def test_where_nothing_hits_nothing_overlaps() -> None:
    """On a device whose exchanges cost something, too. Of several ranks the last layer's sum takes the norm
    before the LM head along where no exchange lies between, which saves two launches of a microsecond."""
    for ranks, context, most_s in ((1, 131_072, 1e-12), (4, 1_048_576, 4e-6)):
        outcome, _ = ran("h200/alspec_long_context.yaml", "crossover=[]", f"context_tokens={context}",
                         "baseline=null", alspec(ranks, '"kind": "rate", "value": [0.0, 0.5]'))  # fmt: skip
        gains = {row.axes.hit_rate: row.value for row in outcome.rows if row.metric == "overlap_gain_s"}
        assert gains[0.0] is not None
        assert -1e-12 < gains[0.0] < most_s
        assert gains[0.5] is not None
        assert gains[0.5] > gains[0.0] + 1e-6


@slow
def test_what_a_profile_takes_as_free_is_priced_beside() -> None:
    outcome, _ = ran("alspec.yaml", "crossover=[]", "context_tokens=1024")
    latency = values(outcome, "token_latency_s")
    priced = values(outcome, "latency_if_priced_s")
    assert priced["alspec", 4, 1024] > latency["alspec", 4, 1024] + 32 * 15e-6
    assert latency["alspec", 4, 1024] < latency["tensor_parallel", 4, 1024] < priced["alspec", 4, 1024]
    assert any("takes as free: exchange, receive" in warning for warning in outcome.warnings)
    assert "with nothing free, and behind tensor parallelism at 1,024 tokens" in outcome.answer


@slow
def test_what_is_fused_hides_its_communication_and_says_so() -> None:
    outcome, _ = ran("papers/alspec_h100_table3.yaml")
    rows = [row for row in outcome.rows if row.metric == "exposed_communication_s"]
    assert rows
    assert all(row.value is None and "non_attention" in row.source for row in rows)


@thorough
def test_at_a_crossover_both_are_equally_fast() -> None:
    """To within the 1 % of the search."""
    strategy = alspec(2, '"kind": "rate", "value": 0.5')
    common = ("context_tokens=131072", "baseline=null")
    outcome, _ = ran("alspec.yaml", strategy, "crossover=[hit_rate]", *common)
    rate = next(row.value for row in outcome.rows if row.metric == "crossover_hit_rate")
    assert rate is not None
    assert 0.5 < rate < 1.0
    again, _ = ran("alspec.yaml", strategy.replace("0.5", f"{rate}"), "crossover=[]", *common)
    speedup = next(row.value for row in again.rows if row.metric == "speedup_over_tensor_parallel")
    assert speedup == pytest.approx(1.0, abs=1e-2)


@slow
@pytest.mark.parametrize(("rate", "low", "high"), [(0.25, 0.0, 0.5), (0.75, 0.5, 1.0)])
def test_a_rate_of_hits_crosses_where_its_link_latency_does(rate: float, low: float, high: float) -> None:
    """At the link latency at which it is as fast as tensor parallelism with so many hits, it is so with as
    many as the search in hits finds, to 1 %."""
    common = ("context_tokens=8192", "baseline=null", "profile=none", "published=[]")

    def ring(hits: float, crossover: str, device: str) -> Outcome:
        strategy = f'{{"kind": "alspec_pipelined", "groups": 2, "hits": {{"kind": "rate", "value": {hits}}}}}'
        return ran("alspec.yaml", f"strategies=[{strategy}]", f"crossover={crossover}", device, *common)[0]

    at_s = next(
        row.value
        for row in ring(rate, "[link_latency_s]", "device=h100-sxm").rows
        if row.metric == "crossover_link_latency_s"
    )
    device = f'device={{"base": "h100-sxm", "change": {{"links.nvlink.latency_s": {at_s}}}}}'
    found = next(
        row.value for row in ring(rate, "[hit_rate]", device).rows if row.metric == "crossover_hit_rate"
    )
    assert found is not None
    assert low < found < high
    again = ring(found, "[]", device)
    speedup = next(row.value for row in again.rows if row.metric == "speedup_over_tensor_parallel")
    assert speedup == pytest.approx(1.0, abs=1e-2)


@thorough
def test_random_hits_agree_with_counted_ones_within_four_standard_errors() -> None:
    """Mean of 64 replicas at 50 % hits against 16 of 32; 4 standard errors of the mean."""
    random = alspec(1, '"kind": "rate", "value": 0.5, "draw": "random"')
    common = ("crossover=[]", "context_tokens=65536", "baseline=null")
    outcome, _ = ran("alspec.yaml", random, "replicas=64", *common)
    row = next(row for row in outcome.rows if row.metric == "token_latency_s")
    counted, _ = ran("alspec.yaml", random.replace("random", "floor"), *common)
    exact = values(counted, "token_latency_s")["alspec", 1, 65536]
    standard_error = next(row.value for row in outcome.rows if row.metric == "standard_error_s")
    assert row.value is not None
    assert standard_error is not None
    assert abs(row.value - exact) < 4.0 * standard_error
    assert standard_error < 0.02 * exact


@thorough
def test_published_hits_come_with_score_and_bounds() -> None:
    strategy = (
        'strategies=[{"kind": "alspec", "ranks": 4,'
        ' "hits": {"kind": "published", "task": "gsm8k-cot", "threshold": [0.05, 0.1]}}]'
    )
    outcome, _ = ran("alspec.yaml", strategy, "crossover=[]", "baseline=null", "context_tokens=1024")
    found = {(row.axes.hit_rate, row.metric): row.value for row in outcome.rows}
    assert found[0.494, "hits_score"] == 0.806
    assert found[0.789, "hits_score"] == 0.799
    assert found[0.789, "baseline_score"] == 0.823
    assert found[0.789, "error_bound_worst_case"] == pytest.approx(3.2)
    assert found[0.789, "error_bound_high_probability"] == pytest.approx(0.1 * (6.9957 * 32) ** 0.5, rel=1e-4)


@thorough
def test_where_pricing_flips_the_winner_the_answer_is_conditional() -> None:
    strategies = (
        'strategies=[{"kind": "tensor_parallel", "ranks": [4, 8]},'
        ' {"kind": "alspec", "ranks": 4, "hits": {"kind": "rate", "value": 0.5}}]'
    )
    outcome, _ = ran("alspec.yaml", "crossover=[]", "context_tokens=[1024, 32768]", strategies)
    assert "is fastest, if what its profile takes as free is so: 16.00 ms" in outcome.answer
    assert "behind tensor parallelism at 1,024, 32,768 tokens" in outcome.answer


@slow
def test_an_early_part_that_is_assumed_is_among_what_is_free() -> None:
    outcome, _ = ran("papers/alspec_h100_table3.yaml")
    assert any("takes as free: early part, exchange" in warning for warning in outcome.warnings)
    assert "4.60 ms" in outcome.answer
    assert "5.03 ms with nothing free" in outcome.answer


@slow
def test_a_crossover_that_cannot_be_searched_says_why() -> None:
    strategy = alspec(2, '"kind": "rate", "value": 0.5, "draw": "random"')
    crossover = "crossover=[context_tokens, hit_rate, link_latency_s]"
    outcome, _ = ran("alspec.yaml", strategy, crossover, "context_tokens=1024", "baseline=null")
    found = {row.metric: (row.value, row.source) for row in outcome.rows if row.metric.startswith("cross")}
    assert found == {
        "crossover_context_tokens": (None, "it takes two contexts at which both fit"),
        "crossover_hit_rate": (None, "hits are drawn at random: give a rate that is counted"),
        "crossover_link_latency_s": (None, "the profile fixes what collectives take"),
    }


@slow
def test_a_crossover_is_searched_up_to_the_longest_context_that_is_asked_for() -> None:
    strategy = alspec(2, '"kind": "rate", "value": 0.5')
    outcome, _ = ran("alspec.yaml", strategy, "crossover=[context_tokens]", "context_tokens=[1024, 4096]")
    (row,) = (row for row in outcome.rows if row.metric == "crossover_context_tokens")
    assert "1,024 to 4,096 tokens" in row.source or (row.value is not None and 1024 <= row.value <= 4096)
