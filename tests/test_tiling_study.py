"""The tiling study end to end on models of a few layers: figures that add up, choices, refusals, files."""

import csv
import json
import re
from dataclasses import replace
from math import fsum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from simcore.assembly import assemble
from simcore.cli import main
from simcore.input.files import InputError
from simcore.machine.machine import LawError
from simcore.machine.trace import Cause, PricedOp, Span, Trace
from simcore.models.long_convolution import LongConvolution
from simcore.ops.op import Op, Price
from simcore.scenario import load_scenario, parse_scenario, resolved
from simcore.sim.tape import record
from simcore.studies.columns import COLUMNS
from simcore.studies.common import Outcome, Row, flat
from simcore.studies.tiling import cases, study
from simcore.studies.tiling import runner as bench
from simcore.studies.tiling.cases import lanes, memory_of, refusal, steps_in_one_launch
from simcore.studies.tiling.implementations import cheapest, ranges
from simcore.studies.tiling.launches import Burst, _ramps
from simcore.studies.tiling.memory import memory
from simcore.studies.tiling.runner import _measured_by_kind
from simcore.studies.tiling.scenario import TilingScenario
from tests.programs import toys
from tests.thorough import first, slow, thorough

PAPERS = sorted((Path(__file__).parent.parent / "scenarios" / "papers").glob("flash_inference_*.yaml"))
IMPLEMENTATIONS = ("conv", "flash_conv", "fft", "flash_fft")
ALL: list[dict[str, Any]] = [
    {"kind": "lazy", "parallel": [True, False]},
    {"kind": "eager", "parallel": [True, False]},
    {"kind": "fractal", "tiles": ["hybrid", *IMPLEMENTATIONS]},
    {"kind": "fractal", "parallel": False},
    {"kind": "fractal", "half_storage": True, "sequential_from": 16},
    {"kind": "generic"},
    {"kind": "generic", "mixer": "linear_attention"},
    {"kind": "relaxed"},
]


def document(**fields: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "study": "tiling",
        "device": "a100-sxm-80gb",
        "profile": "none",
        "model": {"kind": "long_convolution", "layers": 2, "channels": 64},
        "batch": 2,
        "tokens": 64,
        "strategies": ALL,
        **fields,
    }


def outcome(**fields: Any) -> Outcome:
    parts = assemble(parse_scenario(document(**fields), "tiny"), "tiny")
    return parts.study.run(lambda *_: None)


@pytest.fixture(scope="module")
def whole() -> Outcome:
    return outcome(launching="eager", tokens=[48, 64])


def values(found: Outcome, metric: str, **axes: Any) -> dict[str, float]:
    """A metric by label, at the axes that are given."""
    rows = [row for row in found.rows if row.metric == metric]
    own = [row for row in rows if all(getattr(row.axes, name) == value for name, value in axes.items())]
    return {row.axes.label: row.value for row in own if row.value is not None}


def of(found: Outcome, label: str, tokens: int) -> dict[str, Row]:
    own = [row for row in found.rows if (row.axes.label, row.axes.tokens) == (label, tokens)]
    return {row.op_kind or row.metric: row for row in own}


def test_every_strategy_has_every_figure(whole: Outcome) -> None:
    labels = {row.axes.label for row in whole.rows}
    assert labels == {
        *("lazy", "lazy, layer by layer", "eager", "eager, layer by layer"),
        *("fractal, hybrid", *(f"fractal, {name}" for name in IMPLEMENTATIONS)),
        *("fractal, hybrid, layer by layer", "fractal, hybrid, half stored, in sequence from 16"),
        *("generic", "generic, linear attention", "relaxed"),
    }
    metrics = {
        *("total_s", "mixer_s", "block_s", "token_p50_s", "token_p99_s", "token_max_s", "tokens_per_s"),
        *("speedup_over_lazy", "speedup_over_lazy_by_layers", "mixer_speedup_over_lazy"),
        *("mixer_flops", "mixer_hbm_bytes", "flops", "hbm_bytes", "memory_bytes", "launches"),
        "activation_positions_per_token",
    }
    for label in labels:
        assert metrics <= set(of(whole, label, 64))


def test_figures_add_up(whole: Outcome) -> None:
    """With a host that costs nothing the device is never idle: mixer and block are the whole generation."""
    for label in values(whole, "total_s"):
        rows = of(whole, label, 64)
        total_s, mixer_s, block_s = (rows[name].value for name in ("total_s", "mixer_s", "block_s"))
        assert mixer_s + block_s == pytest.approx(total_s, rel=1e-12)
        kinds = [row for name, row in rows.items() if row.metric == "seconds"]
        assert sum(row.value for row in kinds) == pytest.approx(total_s, rel=1e-12)
        assert sum(row.value for row in kinds if row.source.startswith("mixer")) == pytest.approx(mixer_s)
        assert rows["tokens_per_s"].value == pytest.approx(64 / total_s)
        assert rows["token_p50_s"].value <= rows["token_p99_s"].value <= rows["token_max_s"].value
        for row in rows.values():
            assert row.low <= row.value <= row.high, row


def test_op_kinds_are_of_the_mixer_or_of_the_block(whole: Outcome) -> None:
    for label in ("lazy", "eager", "fractal, hybrid"):
        rows = of(whole, label, 64)
        for part in ("mixer", "block"):
            seconds = [r.value or 0.0 for r in rows.values() if r.op_kind and r.source.startswith(part)]
            assert fsum(seconds) == pytest.approx(rows[f"{part}_s"].value, rel=1e-9)


@slow
def test_launches_of_several_positions_do_the_same_work_in_less_time() -> None:
    """100 tokens by 16 on an H200's host: six launches and a rest of four."""
    strategies = [{"kind": "lazy"}, {"kind": "eager"}, {"kind": "fractal", "half_storage": [False, True]}]
    fields: dict[str, Any] = {"device": "h200-sxm", "profile": None, "tokens": 100, "strategies": strategies}
    one, several = (outcome(**fields, tokens_per_launch=k) for k in (1, 16))
    for name in ("mixer_flops", "flops", "hbm_bytes", "memory_bytes", "activation_positions_per_token"):
        assert values(several, name) == pytest.approx(values(one, name), rel=1e-12), name
    for name in ("mixer_s", "block_s"):
        assert values(several, name) == pytest.approx(values(one, name), rel=1e-3), name
    # A rest of four is one launch a position, and what comes before or after all of them but one.
    tiles = {"fractal, hybrid": 6 + 6 + 4 + 3, "fractal, hybrid, half stored": 6 + 6 + 4 + 3}
    assert values(several, "launches") == {"lazy": 6 + 4 + 3, "eager": 6 + 4 + 3, **tiles}
    for label, seconds in values(several, "total_s").items():
        assert seconds < 0.8 * values(one, "total_s")[label]
        # Tokens that are seen together have one latency: that of a launch, which most of them are in.
        one_s, most_s = values(one, "token_p50_s")[label], values(several, "token_max_s")[label]
        assert 2 * one_s < most_s
        assert one_s < values(several, "token_p50_s")[label] <= most_s
        assert values(several, "tokens_per_s")[label] == pytest.approx(100 / seconds)


@pytest.mark.parametrize("given", [0, 3, 128, 1000, "x", True, 2.0, [4]])
def test_tokens_per_launch_are_a_power_of_two(given: Any) -> None:
    with pytest.raises(InputError) as caught:
        parse_scenario(document(tokens_per_launch=given), "tiny")
    says = f"tiny: tokens_per_launch: is {given!r} (allowed: 1, 2, 4, 8, 16, 32, 64)"
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"launching": "eager"}, "tokens_per_launch: is 4; with launching: eager each kernel is a launch"),
        ({"strategies": [{"kind": "generic"}]}, "strategies[0]: generic computes one position at a time"),
        ({"strategies": [{"kind": "relaxed"}]}, "strategies[0]: relaxed computes one position at a time"),
        (
            {"strategies": [{"kind": "lazy"}, {"kind": "fractal", "parallel": [True, False]}]},
            "strategies[1].parallel: false computes one position at a time; tokens_per_launch: 4 needs true",
        ),
    ],
)
def test_what_computes_one_position_at_a_time_refuses_several(fields: dict[str, Any], says: str) -> None:
    strategies = [{"kind": "lazy"}, {"kind": "eager"}, {"kind": "fractal"}]
    with pytest.raises(InputError) as caught:
        parse_scenario(document(**{"strategies": strategies, "tokens_per_launch": 4, **fields}), "tiny")
    assert f"tiny: {says}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tape_has_two_launches_of_several_positions() -> None:
    strategies = [{"kind": "lazy"}, {"kind": "fractal"}]
    parts = assemble(parse_scenario(document(strategies=strategies, tokens_per_launch=8), "tiny"), "tiny")
    lines = study.tape(parts.study.bench, record)
    assert lines[0] == "# lazy, 16 positions, 2 layers"
    assert sum("steps_and_tiles 8" in line for line in lines) == 2
    assert sum("rows_and_steps 8" in line for line in lines) == 1


def test_speed_ups_are_ratios_at_the_same_point(whole: Outcome) -> None:
    for tokens in (48, 64):
        total_s, mixer_s = (values(whole, name, tokens=tokens) for name in ("total_s", "mixer_s"))
        for label, gain in values(whole, "speedup_over_lazy", tokens=tokens).items():
            assert gain == total_s["lazy"] / total_s[label]
        for label, gain in values(whole, "mixer_speedup_over_lazy", tokens=tokens).items():
            assert gain == mixer_s["lazy"] / mixer_s[label]


def test_captured_graphs_cost_less_than_launches_one_by_one(whole: Outcome) -> None:
    """A step of m layers is 4 m + 1 kernels: launch_s - kernel_s each, at least, is what capturing saves."""
    eager, graph = whole, outcome(launching="graph", strategies=[{"kind": "fractal"}])
    launch_s, kernel_s = 6.6e-6, 0.94e-6
    for kind, per_token in (("conv_cell", 2), ("matmul", 4), ("activation", 2), ("next_input", 1)):
        one = of(eager, "fractal, hybrid", 64)[kind].value
        other = of(graph, "fractal, hybrid", 64)[kind].value
        assert one - other == pytest.approx(64 * per_token * (launch_s - kernel_s), rel=1e-9)
    total_s = of(graph, "fractal, hybrid", 64)["total_s"].value
    busy_s = sum(of(graph, "fractal, hybrid", 64)[name].value for name in ("mixer_s", "block_s"))
    # The host launches a step once it has seen the last one end, while the device works off a tile.
    assert 0.0 < total_s - busy_s < 64 * launch_s


def stepping(step: str, **fields: Any) -> dict[str, Any]:
    kinds = [
        {"kind": "lazy"},
        {"kind": "fractal"},
        {"kind": "fractal", "parallel": False},
        {"kind": "relaxed"},
    ]
    model = {"kind": "long_convolution", "layers": 2, "channels": 64, "step": step}
    return {"launching": "graph", "tokens": [64], "model": model, "strategies": kinds, **fields}


@slow
def test_a_step_in_one_launch_is_that_of_all_strategies_but_those_that_go_layer_by_layer() -> None:
    found = outcome(**stepping("one_launch"))
    for label in ("lazy", "fractal, hybrid"):
        rows = of(found, label, 64)
        assert rows["token_step"].source.startswith("block")
        assert not {"matmul", "conv_cell", "next_input"} & rows.keys()
    assert "token_step" not in of(found, "relaxed", 64)
    # After its last position nothing comes between layers.
    counts = of(found, "fractal, hybrid, layer by layer", 64)
    assert 0 < counts["token_step"].value < counts["matmul"].value / 32
    assert "a step is one kernel, which stays for all layers: lazy; fractal, hybrid" in found.notes


def test_only_measured_prices_choose_how_a_model_steps() -> None:
    assert "token_step" not in of(outcome(**stepping("auto", strategies=[{"kind": "lazy"}])), "lazy", 64)
    model = LongConvolution(2, 64, 64)

    def priced(one_s: float, source: str) -> Any:
        def price(op: Op) -> Price:
            seconds = one_s if op.kind == "token_step" else 1.0
            return Price(seconds, seconds, seconds, source, "")  # type: ignore[arg-type]

        return price

    # Nine kernels: of two layers a cell, two products and gelu, and the next input.
    assert steps_in_one_launch("auto", model, priced(8.0, "measured"))
    assert not steps_in_one_launch("auto", model, priced(9.0, "measured"))
    assert not steps_in_one_launch("auto", model, priced(8.0, "roofline"))
    assert steps_in_one_launch("one_launch", model, priced(99.0, "roofline"))
    assert not steps_in_one_launch("layers", model, priced(1.0, "measured"))


def test_a_kernel_that_is_launched_by_itself_costs_what_its_launch_takes(whole: Outcome) -> None:
    """What a launch takes for each kernel of its graph is part of it, and is not charged a second time."""
    overheads = {"launch_s": 6.0e-6, "launch_kernel_s": 0.6e-6}
    parted = outcome(launching="eager", tokens=[64], strategies=[{"kind": "lazy"}], overheads=overheads)
    for name in ("total_s", "mixer_s", "block_s"):
        assert of(parted, "lazy", 64)[name].value == pytest.approx(
            of(whole, "lazy", 64)[name].value, rel=1e-9
        )


@slow
@pytest.mark.parametrize(
    ("launching", "profile", "warned"), [("eager", None, 1), ("eager", "none", 0), ("graph", None, 0)]
)
def test_times_of_captured_graphs_are_no_measure_of_kernels_launched_one_by_one(
    launching: str, profile: str | None, warned: int
) -> None:
    given = document(device="h200-sxm", profile=profile, launching=launching, dtype="fp32")
    warnings = assemble(parse_scenario(given, "tiny"), "tiny").warnings
    assert sum("launching: eager" in warning for warning in warnings) == warned


@slow
@pytest.mark.parametrize("tokens", first(1, [127, 33, 512]))
@pytest.mark.parametrize("launching", ["graph", "eager"])
def test_hybrid_is_never_slower_than_one_implementation(tokens: int, launching: str) -> None:
    strategies = [{"kind": "fractal", "tiles": ["hybrid", *IMPLEMENTATIONS], "parallel": [True, False]}]
    found = outcome(tokens=tokens, launching=launching, strategies=strategies, price_interval=False)
    mixer_s = values(found, "mixer_s")
    for suffix in ("", ", layer by layer"):
        best = min(mixer_s[f"fractal, {name}{suffix}"] for name in IMPLEMENTATIONS)
        assert mixer_s[f"fractal, hybrid{suffix}"] <= best * (1 + 1e-12)


@slow
def test_hybrid_takes_convolutions_for_small_tiles_and_transforms_for_large_ones() -> None:
    strategies = [{"kind": "fractal"}]
    parts = assemble(
        parse_scenario(document(tokens=1024, strategies=strategies, price_interval=False), "t"), "t"
    )
    choice = parts.study.bench.tiles(next(cases(parts.study.bench.scenario)))
    assert [name for name, _, _ in ranges(choice)] == ["flash_conv", "flash_fft"]
    found = parts.study.run(lambda *_: None)
    table = found.tables["tiles.parquet"]
    chosen = {
        s: n for s, n, c in zip(table["side"], table["implementation"], table["chosen"], strict=True) if c
    }
    assert chosen == dict(choice)
    for side in chosen:
        prices = {
            name: seconds
            for s, name, seconds in zip(table["side"], table["implementation"], table["seconds"], strict=True)
            if s == side
        }
        assert prices[chosen[side]] == min(prices.values())
    assert f"flash_fft from {ranges(choice)[1][1]} to 512" in found.answer


@thorough
def test_answer_names_the_fastest_and_what_it_gains() -> None:
    fields = {"strategies": [{"kind": "lazy"}, {"kind": "fractal"}], "price_interval": False}
    found = outcome(tokens=2048, **fields)
    gain = values(found, "speedup_over_lazy")["fractal, hybrid"]
    assert gain > 1
    assert found.answer.startswith("fractal, hybrid is fastest: ")
    assert f"{gain:.3g} times as fast as lazy" in found.answer
    assert "its tiles: " in found.answer
    for tokens, is_range in (([1024, 2048], False), ([64, 8192], True)):
        several = outcome(tokens=tokens, **fields)
        gains = [row.value for row in several.rows if row.metric == "speedup_over_lazy" and row.value != 1]
        assert "fractal, hybrid is fastest at all 2 points" in several.answer
        least, most = f"{min(gains):.3g}", f"{max(gains):.3g}"
        # One number where that is all of the range.
        assert is_range == (least != most)
        gained = f"{least} to {most}" if is_range else least
        assert f"points, {gained} times as fast as lazy" in several.answer


@thorough
def test_intervals_of_long_cases_are_sums_that_equal_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of an eager framework's model is never idle, so that sums of prices are its time."""
    monkeypatch.setattr(study, "SHORT", 500)
    fields = {"tokens": 512, "launching": "eager", "strategies": [{"kind": "lazy"}, {"kind": "fractal"}]}
    summed, run = outcome(**fields), outcome(**fields, price_interval=True)
    for one, other in zip(summed.rows, run.rows, strict=True):
        if one.metric.startswith("token_"):
            assert one.low is one.high is None
            assert one.source == "prices as they are"
        else:
            assert (one.low, one.high) == pytest.approx((other.low, other.high), rel=1e-9), one


@pytest.mark.parametrize("asked", [None, False, True])
def test_the_longest_cases_have_intervals_where_sums_are_their_times(
    monkeypatch: pytest.MonkeyPatch, asked: bool | None
) -> None:
    """A device that never idles: sums cost no run. One that does is not run at both ends beyond a length."""
    monkeypatch.setattr(study, "SHORT", 50)
    monkeypatch.setattr(study, "MOST_AT_ENDS", 60)
    for launching in ("eager", "graph"):
        fields = {"tokens": 64, "launching": launching, "strategies": [{"kind": "lazy"}]}
        (total,) = (row for row in outcome(**fields, price_interval=asked).rows if row.metric == "total_s")
        assert (total.low is not None) == (asked is True or (asked is None and launching == "eager"))


@pytest.mark.parametrize(("short", "most", "summed"), [(64, 64, False), (63, 64, True), (63, 63, True)])
def test_up_to_its_first_length_a_case_is_run_at_both_ends_of_prices(
    short: int, most: int, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that never idles: single tokens have no interval where sums of prices are the time."""
    monkeypatch.setattr(study, "SHORT", short)
    monkeypatch.setattr(study, "MOST_AT_ENDS", most)
    found = outcome(tokens=64, launching="eager", strategies=[{"kind": "lazy"}])
    rows = of(found, "lazy", 64)
    assert rows["total_s"].low is not None
    assert (rows["token_max_s"].low is None) == summed


@pytest.mark.parametrize(("most", "is_run"), [(63, False), (64, True)])
def test_up_to_its_second_length_a_case_whose_device_waits_is_run_at_both_ends(
    most: int, is_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "SHORT", 50)
    monkeypatch.setattr(study, "MOST_AT_ENDS", most)
    rows = of(outcome(tokens=64, strategies=[{"kind": "lazy"}]), "lazy", 64)
    assert (rows["total_s"].low is not None) == is_run


@pytest.mark.parametrize("total_s", [1e-3, 1e3])
@pytest.mark.parametrize(("idle_share", "summed"), [(0.0, True), (1e-10, True), (1e-8, False)])
def test_a_device_never_idles_by_its_share_of_the_time(
    total_s: float, idle_share: float, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the second length only a case whose time is a sum of prices has ends."""
    monkeypatch.setattr(study, "SHORT", 50)
    monkeypatch.setattr(study, "MOST_AT_ENDS", 60)
    own = assemble(parse_scenario(document(strategies=[{"kind": "lazy"}]), "t"), "t").study.bench
    case = next(iter(cases(own.scenario)))
    busy = {"step": total_s * (1.0 - idle_share)}
    ran = replace(own.run(case), ended_s=np.array([0.5 * total_s, total_s]), by_kind=busy)
    assert len(study._at_price_ends(own, case, ran)) == (2 if summed else 0)


@pytest.mark.parametrize(("prompt", "tokens", "cut"), [(0, 64, (0, 8)), (3, 64, (3, 11)), (40, 64, (4, 12)),
                                                       (3, 5, (3, 5)), (0, 8, (0, 8))])  # fmt: skip
def test_what_is_checked_generates_so_many_positions_and_has_half_as_many_of_a_prompt(
    prompt: int, tokens: int, cut: tuple[int, int]
) -> None:
    given = document(strategies=[{"kind": "lazy"}], prompt_tokens=prompt, tokens=tokens)
    own = assemble(parse_scenario(given, "t"), "t").study.bench
    axes = study._cut(next(iter(cases(own.scenario))), 8).axes
    assert (axes.prompt_tokens, axes.tokens) == cut


def test_a_long_case_may_generate_a_single_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "SHORT", 50)
    found = outcome(tokens=64, prompt_tokens=63, strategies=[{"kind": "lazy"}])
    total = of(found, "lazy", 64)["total_s"]
    assert total.low is not None
    assert total.low <= total.value <= (total.high or 0.0)


def test_of_measured_runs_the_one_of_median_total_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the first positions tell otherwise. Nothing is run again at ends of prices."""
    own = assemble(parse_scenario(document(), "t"), "t").study.bench
    case = next(iter(cases(own.scenario)))
    usual = own.run(case)
    count = len(usual.ended_s)
    ends = [np.array([*[first_s] * (count - 1), total_s]) for first_s, total_s in ((1, 9), (2, 5), (3, 7))]
    runs = iter([replace(usual, ended_s=ended_s) for ended_s in ends])
    monkeypatch.setattr(own, "device", replace(own.device, start=lambda setup: None, repeats=3))
    monkeypatch.setattr(own, "run", lambda case: next(runs))
    found, first_run = study._case_result(own, case)
    assert first_run.ended_s[-1] == 7.0
    assert found.runs[0]["total_s"][0] == 7.0
    assert sorted(run["total_s"][0] for run in found.runs) == [5.0, 7.0, 9.0]


@thorough
def test_long_cases_whose_device_waits_are_run_at_both_ends_of_prices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for its host between graphs: sums of prices are no time of a run."""
    monkeypatch.setattr(study, "SHORT", 500)
    fields = {"tokens": 512, "strategies": [{"kind": "lazy"}, {"kind": "fractal"}]}
    usual, run = outcome(**fields), outcome(**fields, price_interval=True)
    assert [(one.metric, one.low, one.high) for one in usual.rows] == [
        (one.metric, one.low, one.high) for one in run.rows
    ]
    assert any(one.low is not None for one in usual.rows if one.metric.startswith("token_"))


@pytest.mark.parametrize("factor", [1.0 - 1e-6, 1.0 + 1e-6])
def test_op_kinds_that_add_up_to_more_or_less_than_what_ran_end_a_study(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds_by_kind = bench.seconds_by_kind

    def spoilt(*of: Any) -> dict[str, float]:
        return {kind: seconds * factor for kind, seconds in seconds_by_kind(*of).items()}

    monkeypatch.setattr(bench, "seconds_by_kind", spoilt)
    with pytest.raises(LawError, match=re.escape(bench.LAW)):
        outcome(strategies=[{"kind": "fractal"}])


def test_a_case_in_which_nothing_takes_time_adds_up() -> None:
    scenario = parse_scenario(document(), "tiny")
    assert isinstance(scenario, TilingScenario)
    case = next(cases(scenario))
    bench._check_sum(case, {}, Trace())


def test_a_prompt_is_in_the_total_and_in_no_token() -> None:
    found = outcome(
        prompt_tokens=20, strategies=[{"kind": "lazy"}, {"kind": "fractal", "half_storage": [False, True]}]
    )
    for label in values(found, "total_s"):
        rows = of(found, label, 64)
        assert rows["tokens_per_s"].value == pytest.approx(44 / rows["total_s"].value)
        assert rows["conv_prefill"].value > 0.0
    steps = found.tables["steps.parquet"]
    assert list(steps["token"][:44]) == list(range(20, 64))
    for label in ("lazy", "fractal, hybrid"):
        own = np.array(steps["label"]) == label
        latency_s = np.diff(steps["end_s"][own])
        assert steps["latency_s"][own][1:] == pytest.approx(latency_s)
        assert steps["latency_s"][own].sum() < steps["end_s"][own][-1]


def test_half_storage_keeps_half() -> None:
    bench = assemble(parse_scenario(document(tokens=1024), "t"), "t").study.bench
    case = next(c for c in cases(bench.scenario) if c.axes.label == "fractal, fft")
    model = bench.model(case)
    whole, half = (memory(model, fractal=True, half_storage=h) for h in (False, True))
    one = memory(model, fractal=True, sequential_from=1)
    elements = 3 * 2 * 64
    assert whole.activations == elements * 1024 * 2 == 2 * half.activations
    assert whole.filters == 2 * 64 * 1024 * 2
    # Spectra of 512, 256, ... 1: side + 1 bins of two fp32; with half stored the largest is not cached.
    assert whole.cached == 2 * 64 * 8 * sum(side + 1 for side in (1 << i for i in range(10)))
    assert half.cached == whole.cached - 2 * 64 * 8 * 513
    assert whole.temporaries == 2 * one.temporaries == 2 * 2 * 64 * 2 * 513 * 8


def test_what_is_kept_and_what_passes_by_hand() -> None:
    """Activations of two layers and their inputs, in two bytes; of a prompt's transform the spectra of
    inputs, taps and product, in one layer: complex numbers of eight bytes."""
    batch, channels = 3, 8
    model = LongConvolution(2, channels, 128, batch=batch, prompt=16, tiles=tuple(
        (1 << i, "flash_conv") for i in range(7)
    ))  # fmt: skip
    whole, half = (memory(model, fractal=True, half_storage=h) for h in (False, True))
    # 16 given positions give to all 128, or to the 16 + 64 that are kept: 143 and 95 in a power of two.
    for found, order in ((whole, 256), (half, 128)):
        assert found.temporaries == (2 * batch + 1) * channels * (order / 2 + 1) * 8
    # Unless it is asked for, all positions are kept.
    for fractal in (False, True):
        assert memory(model, fractal=fractal).activations == 3 * batch * 128 * channels * 2
    assert half.activations == 3 * batch * 80 * channels * 2
    # From a side on tiles go layer by layer: of side 16 both layers at once, or of side 32 one at a time.
    tiled = LongConvolution(2, channels, 64, batch=batch, tiles=tuple((1 << i, "fft") for i in range(6)))
    for first_side, bins in ((16, 1 * 33), (32, 2 * 17), (64, 2 * 33)):
        found = memory(tiled, fractal=True, sequential_from=first_side)
        assert found.temporaries == bins * batch * channels * 2 * 8
    # A single position is its own half: nothing is carried.
    assert memory(LongConvolution(2, channels, 1), fractal=True, half_storage=True).temporaries == 0.0


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_states_of_another_size_than_activations_are_kept_beside_them(rank: int) -> None:
    model = LongConvolution(2, 8, 32, batch=3, mixer="linear_attention", rank=rank)
    activations, states = 3 * 3 * 32 * 8, rank * 2 * 3 * 32 * 8
    found = memory(model, fractal=False).activations
    assert found == 2 * (activations + (states if rank > 1 else 0))


def test_what_is_not_tiled_caches_no_tiles_and_fits_to_the_last_byte() -> None:
    own = assemble(parse_scenario(document(strategies=[{"kind": "lazy"}]), "t"), "t").study.bench
    case = next(iter(cases(own.scenario)))
    model = own.model(case)
    found = memory_of(case, model)
    assert (found.cached, found.temporaries) == (0.0, 0.0)
    assert refusal(case, model, found.total) is None
    assert refusal(case, model, found.total - 1.0) is not None


def test_tiles_from_a_side_on_go_layer_by_layer() -> None:
    given = document(strategies=[{"kind": "fractal", "sequential_from": 16}, {"kind": "fractal"}])
    scenario = parse_scenario(given, "t")
    assert isinstance(scenario, TilingScenario)
    some, all_at_once = cases(scenario)
    found = [(lanes(some, side).together, lanes(some, side).launches) for side in (8, 16, 32)]
    assert found == [(2, 1), (1, 2), (1, 2)]
    assert {(lanes(all_at_once, side).together, lanes(all_at_once, side).launches) for side in (8, 32)} == {
        (2, 1)
    }


@slow
def test_what_does_not_fit_is_left_out_with_what_would_help() -> None:
    model = {"kind": "long_convolution", "layers": 36, "channels": 768}
    fields = {"model": model, "batch": 8, "strategies": [{"kind": "fractal", "tiles": "fft"}]}
    with pytest.raises(
        InputError, match=r"nothing can be run; fractal, fft, 36 layers .*: needs [0-9.]+ GB, more"
    ):
        outcome(**fields, tokens=1 << 17)
    found = outcome(**{**fields, "batch": [1, 512]}, tokens=1 << 11, price_interval=False)
    assert {row.axes.batch for row in found.rows} == {1}
    (warning,) = [text for text in found.warnings if "left out" in text]
    assert "batch 512" in warning
    pattern = (
        r"needs (\S+) GB, .*; half_storage would need (\S+) GB, sequential_from: 1 (\S+) GB, both (\S+) GB"
    )
    match = re.search(pattern, warning)
    assert match is not None
    needed, half, one, both = map(float, match.groups())
    assert both < half < needed
    assert both < one < needed


def test_what_would_help_is_what_it_would_take() -> None:
    given = document(strategies=[{"kind": "fractal", "tiles": "fft"}], tokens=1024)
    bench = assemble(parse_scenario(given, "t"), "t").study.bench
    case = next(iter(cases(bench.scenario)))
    model, _ = bench.launches(case)
    taken = [
        f"{memory(model, fractal=True, **how).total / 1e9:.3g} GB"
        for how in (
            {},
            {"half_storage": True},
            {"sequential_from": 1},
            {"half_storage": True, "sequential_from": 1},
        )
    ]
    assert len(set(taken[:3])) == 3
    text = refusal(case, model, 1.0)
    assert text is not None
    assert re.findall(r"\S+ GB", text) == [taken[0], "1e-09 GB", *taken[1:]]


@slow
def test_each_baseline_that_is_there_counts() -> None:
    found = outcome(strategies=[{"kind": "lazy", "parallel": False}, {"kind": "eager"}])
    metrics = {row.metric for row in found.rows}
    assert "speedup_over_lazy_by_layers" in metrics
    assert "speedup_over_lazy" not in metrics
    assert found.baseline == ""
    assert outcome(strategies=[{"kind": "lazy"}, {"kind": "eager"}]).baseline == "lazy"


def test_seconds_of_a_kind_are_those_between_its_begins_and_ends() -> None:
    trace, times = Trace(), [(1.0, 3.0), (5.0, 5.5)]
    for i, (start_s, end_s) in enumerate(times):
        op = PricedOp(toys("s", 1).ops[0], Price(1.0, 1.0, 1.0, "measured", ""), 0.0)
        when = 0.0, start_s, end_s
        trace.spans.append(Span(i, i, 0, "main", "g", "run", *when, Cause(None, 0.0), (), (op,), ()))
    (seconds,) = _measured_by_kind(trace).values()
    assert seconds == 2.5


def test_launches_are_priced_from_where_each_stretch_begins() -> None:
    """Of sizes that grow by one, leap, and grow by two; none of them leaves its power of two."""
    values = np.array([1, 2, 3, 4, 5, 20, 22, 24, 26, 28, 30, 32, 34])
    order: Any = SimpleNamespace(sizes=[{"n": values}], advance=[{"n": 1}])
    asked: list[Any] = []
    pricer: Any = SimpleNamespace(ramp=lambda *given: asked.append(given))
    graph: Any = SimpleNamespace(reads=("n",))
    firsts = [first for first, _ in _ramps(order, 0, graph, pricer)]
    seen = {}
    for begin, (_, sizes, advance, count) in zip(firsts, asked, strict=True):
        seen |= {begin + k: sizes["n"] + k * advance["n"] for k in range(count)}
    assert [seen[i] for i in range(len(values))] == values.tolist()
    for _, sizes, advance, count in asked:
        assert (sizes["n"] + (count - 1) * advance["n"]).bit_length() == sizes["n"].bit_length()


def test_sizes_that_do_not_tell_how_they_grow_are_priced_one_by_one() -> None:
    values = [5, 5, 5, 9, 13]
    order: Any = SimpleNamespace(sizes=[{"n": np.array(values)}], advance=[{}])
    asked: list[Any] = []
    pricer: Any = SimpleNamespace(ramp=lambda *given: asked.append(given[1:]))
    graph: Any = SimpleNamespace(reads=("n",))
    assert [first for first, _ in _ramps(order, 0, graph, pricer)] == list(range(5))
    assert asked == [({"n": value}, {}, 1) for value in values]


def test_a_burst_that_does_not_grow_ends_as_it_begins() -> None:
    graph = toys("s", 1)
    assert Burst(graph, {"n": 5, "k": 2}, {"k": 3}, 4).last == {"n": 5, "k": 11}


def test_a_moment_before_all_waits_is_the_start() -> None:
    """A schedule of one's own that notes when it begins."""

    def program(m: Any, model: Any, ended: list[float]) -> Any:
        ended.append(m.now())
        for position in range(3):
            yield m.wait(m.launch(model.step(), sizes={"position": position}))
            ended.append(m.now())

    own = assemble(parse_scenario(document(), "t"), "t").study.bench
    strategy: Any = SimpleNamespace(kind="lazy", program=program)
    case = replace(next(iter(cases(own.scenario))), strategy=strategy)
    model, _ = own.launches(case)
    at_once: list[float] = []
    by_machine: list[float] = []
    assert own.at_once(case, model, at_once) is not None
    own.simulated(case, model, by_machine, rows=True)
    assert at_once[0] == by_machine[0] == 0.0
    assert at_once == pytest.approx(by_machine)


def test_what_cannot_be_worked_out_at_once_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = assemble(parse_scenario(document(tokens=64), "t"), "t").study.bench
    case = next(iter(cases(bench.scenario)))
    model, _ = bench.launches(case)
    times: list[list[float]] = [[], []]
    bench.trace(case, model, times[0], rows=True)
    monkeypatch.setattr(type(bench), "at_once", lambda *_, **__: None)
    trace = bench.trace(case, model, times[1], rows=True)
    assert len(trace.rows.table()["launch"]) > 0
    assert times[0] == pytest.approx(times[1], rel=1e-9)


def test_a_run_before_the_run_that_counts_leaves_nothing_in_its_times() -> None:
    """As a real machine makes one."""
    bench = assemble(parse_scenario(document(tokens=64), "t"), "t").study.bench
    case = next(iter(cases(bench.scenario)))
    model, _ = bench.launches(case)
    ended: list[float] = []
    bench.simulated(case, model, ended, rows=True)
    once = list(ended)
    bench.simulated(case, model, ended, rows=True)
    assert ended == once != []


def test_clipped_tiles_are_priced_as_they_are() -> None:
    bench = assemble(parse_scenario(document(tokens=1025), "t"), "t").study.bench
    case = next(c for c in cases(bench.scenario) if c.axes.label == "fractal, hybrid")
    # The tile of side 1024 has one output, which a direct convolution computes at once.
    of_all = {side: lanes(case, side) for side in (1 << i for i in range(11))}
    assert dict(cheapest(of_all, 1025, bench.device.price))[1024] == "flash_conv"
    assert dict(cheapest(of_all, 2048, bench.device.price))[1024] == "flash_fft"


# -- scenario files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": (1 << 22) + 1}, "tokens: is 4194305; 1 to 4,194,304 is allowed"),
        ({"tokens": 8, "prompt_tokens": 8}, "prompt_tokens: is 8; less than tokens, 8, is needed"),
        ({"tokens": [64, 8], "prompt_tokens": 9}, "prompt_tokens: is 9; less than tokens, 8, is needed"),
        ({"batch": 0}, "batch: is 0; 1 to 65,536 is allowed"),
        ({"model": {"kind": "long_convolution", "layers": 2000, "channels": 4}}, "model.layers: is 2000"),
        ({"model": {"kind": "long_convolution", "layers": 2}}, "model.channels: is missing"),
        ({"model": "llama-3.1-8b"}, "model: is 'llama-3.1-8b'; a mapping of fields is needed"),
        ({"strategies": [{"kind": "fractal", "tiles": "flashfft"}]}, "strategies[0].tiles: is 'flashfft'"),
        ({"strategies": [{"kind": "fractl"}]}, "strategies[0].kind: is 'fractl'; did you mean 'fractal'?"),
        (
            {"strategies": [{"kind": "lazy"}, {"kind": "lazy"}]},
            "strategies[1]: is called 'lazy', as strategies[0] is",
        ),
        (
            {"strategies": [{"kind": "generic", "rank": 4}]},
            "strategies[0].rank: is of mixer: linear_attention",
        ),
        ({"prompt_tokens": 4}, "strategies[5]: generic takes no prompt"),
        ({"dtype": "int8"}, "dtype: is 'int8'"),
        ({"launching": "lazy"}, "launching: is 'lazy'"),
        ({"replicas": 3}, "replicas: no such field"),
        ({"batch": list(range(1, 2000))}, "tokens: makes"),
    ],
)
def test_faults_are_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        parse_scenario(document(**fields), "tiny.yaml")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("tiny.yaml: ")


@pytest.mark.parametrize(("most", "says"), [(12, None), (11, "tokens: makes 12 runs")])
def test_a_scenario_makes_as_many_runs_as_are_allowed(
    most: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simcore.studies.tiling.scenario.MOST_RUNS", most)
    given = document(
        tokens=[8, 16, 32], batch=[1, 2], strategies=[{"kind": "lazy", "parallel": [True, False]}]
    )
    if says is None:
        assert parse_scenario(given, "t")
        return
    with pytest.raises(InputError, match=says):
        parse_scenario(given, "t")


@slow
@pytest.mark.parametrize("path", first(1, PAPERS), ids=lambda path: path.stem)
def test_scenarios_of_the_paper_run_small(path: Path) -> None:
    scenario = load_scenario(path, ["tokens=64", "batch=[1, 2]", "model.channels=32", "price_interval=false"])
    assert isinstance(scenario, TilingScenario)
    parts = assemble(scenario, str(path))
    found = parts.study.run(lambda *_: None)
    assert len({(row.axes.layers, row.axes.batch) for row in found.rows}) >= 2
    lines = parts.study.compare(found)
    assert bool(lines) == bool(scenario.published)
    for line in lines:
        inside = line["reference_low"] <= line["predicted"] <= line["reference_high"]
        assert (line["error_pct"] == 0.0) == inside
    on_cpu = load_scenario(path, on="cpu")
    assert resolved(on_cpu)["device"] == "cpu"


# -- the run directory, and the tape -----------------------------------------------------------------


@slow
@pytest.mark.usefixtures("without_report")
def test_a_run_directory_has_the_files_of_the_study(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(document()))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(path), "--quiet", "--out", str(tmp_path / "out")])
    assert ended.value.code == 0
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert (reader.fieldnames or []) == [*COLUMNS["tiling"]]
    assert {row["study"] for row in rows} == {"tiling"}
    assert {row["block"] for row in rows} == {"mlp"}
    columns = {
        "steps": {"label", "layers", "channels", "tokens", "batch", "token", "end_s", "latency_s"},
        "tiles": {
            *(
                "layers",
                "channels",
                "batch",
                "tokens",
                "side",
                "implementation",
                "seconds",
                "low_s",
                "high_s",
            ),
            "chosen",
        },
        "cells": {
            *("label", "launch", "graph", "op_kind", "layer", "first_input", "last_input", "first_output"),
            *("last_output", "first_lag", "last_lag", "start_s"),
        },
        "growth": {
            *("label", "layers", "channels", "batch", "tokens", "mixer_flops", "mixer_hbm_bytes"),
            *("memory_bytes", "total_s"),
        },
    }
    for name, expected in columns.items():
        assert set(pq.read_table(tmp_path / "out" / f"{name}.parquet").column_names) == expected


def test_cells_cover_the_triangle(whole: Outcome) -> None:
    """32 positions of the first layer: 528 pairs, each covered once by each strategy."""
    table = whole.tables["cells.parquet"]
    labels = np.array(table["label"])
    for label in dict.fromkeys(table["label"]):
        pairs = set()
        count = 0
        for row in np.flatnonzero(labels == label):
            inputs = range(int(table["first_input"][row]), int(table["last_input"][row]) + 1)
            lags = not np.isnan(table["first_lag"][row])
            name = "lag" if lags else "output"
            spread = range(int(table[f"first_{name}"][row]), int(table[f"last_{name}"][row]) + 1)
            own = [(i, i + j if lags else j) for i in inputs for j in spread]
            own = [(i, j) for i, j in own if j < 32]
            count += len(own)
            pairs.update(own)
        assert count == len(pairs) == 32 * 33 // 2, label


@slow
def test_growth_goes_up_to_the_length() -> None:
    found = outcome(tokens=1000, strategies=[{"kind": "lazy"}, {"kind": "fractal"}], price_interval=False)
    table = found.tables["growth.parquet"]
    assert table["tokens"] == [256, 512, 1000] * 2
    total_s = values(found, "total_s")
    assert [table["total_s"][2], table["total_s"][5]] == [total_s["lazy"], total_s["fractal, hybrid"]]
    lazy = table["mixer_flops"][:3]
    assert lazy == [2 * 2 * 64 * length * (length + 1) for length in (256, 512, 1000)]


def test_growth_is_of_the_first_point_of_a_label() -> None:
    found = outcome(tokens=[32, 300], batch=[3, 1, 2], strategies=[{"kind": "lazy"}], price_interval=False)
    table = found.tables["growth.parquet"]
    assert list(zip(table["tokens"], table["batch"], strict=True)) == [(256, 3), (300, 3)]


@thorough
def test_steps_of_long_runs_keep_the_slowest_token_of_each_stretch() -> None:
    found = outcome(tokens=5000, strategies=[{"kind": "fractal"}], price_interval=False)
    steps = found.tables["steps.parquet"]
    assert len(steps["token"]) == 1667
    assert steps["token"][-1] == 4999
    assert steps["latency_s"].max() == of(found, "fractal, hybrid", 5000)["token_max_s"].value
    assert steps["end_s"][-1] == of(found, "fractal, hybrid", 5000)["total_s"].value


@slow
def test_the_tape_prints_every_strategy() -> None:
    lines = assemble(parse_scenario(document(), "t"), "t").study.tape(record)
    heads = [line for line in lines if line.startswith("# ")]
    assert len(heads) == 14
    assert heads[0] == "# lazy, 8 positions, 2 layers"
    assert any("tile 4 4" in line for line in lines)


@pytest.mark.parametrize(("prompt", "done"), [(1, 1), (3, 3), (4, 4), (16, 4)])
def test_a_tape_has_a_prompt_and_at_least_as_many_generated_positions(prompt: int, done: int) -> None:
    """Of 8 positions: the prompt is computed up to its last one, and the others step by step."""
    given = document(strategies=[{"kind": "lazy"}], prompt_tokens=prompt)
    _, *launched = assemble(parse_scenario(given, "t"), "t").study.tape(record)
    steps = [line for line in launched if "main  step: " in line]
    assert f"| position {done - 1}" in launched[0]
    assert [line.rpartition(" ")[2] for line in steps] == [str(t) for t in range(done, 8)]


def test_flat_rows_have_all_columns(whole: Outcome) -> None:
    assert [*flat("tiling", whole.rows[0])] == [*COLUMNS["tiling"]]


@slow
def test_without_prices_ends_a_predicted_time_has_no_interval() -> None:
    without, with_ = (
        {row.metric: row for row in outcome(tokens=64, price_interval=each).rows} for each in (False, True)
    )
    assert (without["total_s"].low, without["total_s"].high) == (None, None)
    assert with_["total_s"].low is not None
    assert with_["total_s"].value == without["total_s"].value


@slow
def test_a_single_step_in_one_launch_has_no_mixer_and_an_unmeasured_one_is_warned_of() -> None:
    of = {"model.step": "one_launch", "tokens": 1, "device": "cpu"}
    scenario = load_scenario(
        Path("scenarios/h200/tiles.yaml"), [f"{name}={value}" for name, value in of.items()]
    )
    outcome = assemble(scenario, "x").study.run(lambda *_: None)
    assert not any(row.metric == "mixer_speedup_over_lazy" for row in outcome.rows)
    assert any(
        "model.step: a step in one launch was never measured on cpu" in line for line in outcome.warnings
    )
    measured = load_scenario(Path("scenarios/h200/tiles.yaml"), ["tokens=8"])
    assert not any(
        "model.step" in line for line in assemble(measured, "x").study.run(lambda *_: None).warnings
    )
