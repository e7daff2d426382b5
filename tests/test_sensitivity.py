"""What a plan's answer hinges on: the factors of a scenario, their swings, and where a limit breaks."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from simcore.planning.factors import factors
from simcore.planning.plan import Plan, run
from simcore.planning.sensitivity import PRICES, STEPS, Swing, hinges
from simcore.planning.whatif import load_plan
from tests.test_planning import BASE, planned, silent
from tests.thorough import slow

GRID = {"base": BASE, "question": "grid", "constraints": {"e2e_p99_s": 0.2}, "replicas": 8}


def fields(**workload: Any) -> dict[str, Any]:
    """The fields of a scenario with one case, as far as factors read them."""
    given = {
        "arrivals": {"kind": "poisson", "rate_per_s": [10.0], "interval_s": None, "span_intervals": None},
        "prompt_tokens": {"kind": "constant", "value": [100]},
        "output_tokens": {"kind": "lognormal", "mean": 50.0, "cv": 0.5, "max": 200},
    }
    return {"device": "h200-sxm", "workload": {**given, **workload}}


def puts(document: dict[str, Any], link: str | None = None) -> dict[str, Any]:
    """What each factor puts at its greater multiple."""
    return {one.name: one.puts(one.high) for one in factors(document, link)}


def test_each_factor_puts_its_multiple() -> None:
    found = puts(fields(), "nvlink")
    assert found["load"]["workload.arrivals.rate_per_s"] == pytest.approx(11.0)
    assert found["burstiness"] == {"workload.arrivals": {"kind": "gamma", "rate_per_s": 10.0, "cv": 2.0}}
    assert found["prompts' lengths"] == {"workload.prompt_tokens": {"kind": "constant", "value": [120]}}
    scaled = {"kind": "lognormal", "mean": 60.0, "cv": 0.5, "max": 240}
    assert found["answers' lengths"] == {"workload.output_tokens": scaled}
    assert found["memory bandwidth"] == {"device.change": {"hbm_bytes_per_s": {"times": 1.1}}}
    assert found["link latency"] == {"device.change": {"links.nvlink.latency_s": {"times": 2.0}}}


def test_what_a_scenario_has_not_is_no_factor() -> None:
    trace = {"kind": "trace", "path": "x.csv", "format": "azure", "rate_scale": [3.0]}
    found = puts(fields(arrivals=trace, prompt_tokens=None, output_tokens=None))
    assert set(found) == {"load", "memory bandwidth", "arithmetic", "host time"}
    assert found["load"] == {"workload.arrivals.rate_scale": pytest.approx(3.3)}
    even = {"kind": "constant", "rate_per_s": [10.0], "interval_s": None}
    assert "burstiness" not in puts(fields(arrivals=even))
    clients = puts(fields(arrivals={"kind": "closed_loop", "clients": [20], "think_s": 0.0}))
    assert clients["clients"] == {"workload.arrivals.clients": 22}
    assert puts(fields(distinct_prompts=7))["prompts that differ"] == {"workload.distinct_prompts": 14}


def test_a_change_of_the_device_goes_on_from_what_is_changed() -> None:
    document = fields()
    document["device"] = {
        "base": "h200-sxm",
        "change": {"hbm_bytes_per_s": 4e12, "flops_per_s": {"times": 2}},
    }
    found = puts(document)
    assert found["memory bandwidth"]["device.change"]["hbm_bytes_per_s"] == pytest.approx(4.4e12)
    assert found["memory bandwidth"]["device.change"]["flops_per_s"] == {"times": 2}
    assert found["arithmetic"]["device.change"]["flops_per_s"] == {"times": pytest.approx(2.2)}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return planned(tmp_path_factory.mktemp("swings"), {**GRID, "sensitivity": True})


@slow
def test_a_swing_is_that_of_a_plan_with_the_change(plan: Plan, tmp_path: Path) -> None:
    """More load, and a slower host: the same figures as of a plan that has them from the start."""
    swings = {(swing.factor, swing.times): swing for swing in plan.swings}
    busier = {**BASE["workload"], "arrivals": {"kind": "poisson", "rate_per_s": 220.0}}
    slower = {"base": "h200-sxm", "change": {"overheads": {"times": 2.0}}}
    for place, change in ((("load", 1.1), {"workload": busier}), (("host time", 2.0), {"device": slower})):
        alone = planned(tmp_path, {**GRID, "base": {**BASE, **change}})
        swing = swings[place]
        # Both see the same replicas as far as they go.
        (judged,) = [one.judged for one in alone.result.tried]
        values = judged.values("e2e_p99_s")
        assert swing.value == pytest.approx(fmean(values), rel=1e-9)
        assert swing.verdict == judged.verdict


def test_swings_go_the_way_that_physics_says(plan: Plan) -> None:
    more = {(swing.factor, swing.times or swing.change): swing.more or 0.0 for swing in plan.swings}
    for factor in ("load", "answers' lengths", "burstiness"):
        low, high = sorted((times, value) for (name, times), value in more.items() if name == factor)
        assert low[1] < 0.0 < high[1]
    for factor in ("memory bandwidth", "arithmetic"):
        low, high = sorted((times, value) for (name, times), value in more.items() if name == factor)
        assert low[1] >= 0.0 >= high[1]
    assert more[PRICES, "fast end"] <= 0.0 <= more[PRICES, "slow end"]


def test_the_widest_swing_comes_first_and_no_warning_of_a_change_stays(plan: Plan) -> None:
    widths = [abs(swing.more or 0.0) for swing in plan.swings]
    assert max(widths) in widths[:2]
    assert not any("carried over" in warning for warning in plan.warnings)
    assert len(plan.origins) == 1


@slow
def test_a_limit_breaks_where_bisection_says(tmp_path: Path) -> None:
    """With a limit 10 % above the median of answers of 100 tokens: the point holds one step of the bisection
    below the place where it breaks, and not at it."""

    def asked(tokens: int, limit_s: float, **more: Any) -> Plan:
        calm = {"arrivals": {"kind": "poisson", "rate_per_s": 5.0}}
        workload = {**BASE["workload"], **calm, "output_tokens": {"kind": "constant", "value": tokens}}
        base = {**BASE, "workload": workload}
        return planned(tmp_path, {**GRID, "base": base, "constraints": {"e2e_p50_s": limit_s}, **more})

    median_s = asked(100, 10.0).result.tried[0].judged.mean("e2e_p50_s")
    assert median_s is not None
    broken = asked(100, 1.1 * median_s, sensitivity=True)
    swing = next(one for one in broken.swings if (one.factor, one.times) == ("answers' lengths", 1.2))
    assert broken.result.tried[0].judged.holds
    assert swing.verdict == "fails"
    assert swing.breaks_at is not None
    assert 1.0 < swing.breaks_at <= 1.2
    assert f"answers' lengths x {swing.breaks_at:.3g}" in broken.answer
    for times, holds in ((swing.breaks_at, False), (swing.breaks_at / 1.2 ** (1.0 / 2**STEPS), True)):
        assert asked(round(100 * times), 1.1 * median_s).result.tried[0].judged.holds == holds


def test_words_name_only_swings_that_are_sure() -> None:
    def swing(factor: str, more: float, half: float, breaks_at: float | None = None) -> Swing:
        return Swing(
            0, factor, "x 1.1", 1.1, "ttft_p99_s", 1.0, 1.0 + more, more, more - half, more + half,
            "holds", "", breaks_at,
        )  # fmt: skip

    text = hinges([swing("load", 0.3, 0.1), swing("host time", 0.2, 0.3), swing("lengths", 0.1, 0.01, 1.07)])
    assert text == (
        " p99 TTFT hinges most on load (x 1.1: +30 %); lengths (x 1.1: +10 %)."
        " It would no longer hold for sure with lengths x 1.07."
    )
    assert hinges([]) == ""


def test_nothing_that_holds_has_no_swings(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({**GRID, "constraints": {"e2e_p99_s": 1e-4}}))
    found = run(load_plan(path, sensitivity=True), jobs=1, progress=silent)
    assert found.swings == []
    assert "sensitivity" not in found.summary()
