"""Several devices joined: which place they are ranked at, what is not ranked, and whose what is shown is."""

from typing import Any

import pytest

from simcore import terminal
from simcore.assembly import assemble
from simcore.scenario import parse_scenario
from simcore.studies.common import NOT_RANKED, OperatorAxes, Outcome, Row, Standing
from simcore.studies.several_devices import SeveralDevices, _shared_load
from tests.thorough import slow


def outcome_of(document: dict[str, Any]) -> tuple[SeveralDevices, Outcome]:
    study = assemble(parse_scenario({"name": "several", **document}, "x"), "x").study
    assert isinstance(study, SeveralDevices)
    return study, study.run(lambda *_: None)


def standing(*load: float) -> Standing:
    return Standing("At it", load, "a", "takes it", (1.0,), 1.0)


def test_a_device_counts_once_for_a_place() -> None:
    assert _shared_load([[standing(5.0), standing(5.0), standing(3.0)], [standing(3.0)]]) == (3.0,)
    assert _shared_load([[standing(5.0), standing(3.0)], [standing(5.0)]]) == (5.0,)
    assert _shared_load([[], []]) is None


SERVING = {
    "study": "serving",
    "model": "llama-3.1-8b",
    "device": ["h100-sxm", "h200-sxm"],
    "profile": "none",
    "devices": [1, 2],
    "workload": {
        "requests": 6,
        "arrivals": {"kind": "poisson", "rate_per_s": [2, 4, 8]},
        "prompt_tokens": {"kind": "constant", "value": 64},
        "output_tokens": {"kind": "constant", "value": 4},
    },
    "strategies": [{"kind": "continuous_batching"}],
    "price_interval": False,
}


def test_as_many_requests_a_device_are_not_one_place() -> None:
    """Rate 4 on one device and rate 8 on two are as heavy, and are two places."""
    study, outcome = outcome_of(SERVING)
    for own in study.outcomes.values():
        assert len({one.load for one in own.standings}) == len(own.standings) == 6
    assert outcome.answer.startswith("At 8 requests/s on 1 device, ")
    assert outcome.best_at == {
        "devices": 1, "requests": 6, "rate_per_s": 8.0, "prompt_tokens": 64.0, "output_tokens": 4.0
    }  # fmt: skip
    assert outcome.best.endswith(", h200-sxm")


@slow
def test_the_trace_and_the_baseline_say_whose_they_are() -> None:
    _, outcome = outcome_of(
        {
            "study": "decode",
            "model": "llama-3.1-8b",
            "device": ["h100-sxm", "h200-sxm"],
            "profile": "none",
            "context_tokens": 1024,
            "strategies": [
                {"kind": "tensor_parallel", "ranks": 2},
                {"kind": "alspec", "ranks": 1, "hits": {"kind": "rate", "value": 0.5}},
            ],
            "baseline": {"kind": "tensor_parallel", "ranks": 2},
        }
    )
    assert "h100-sxm" in outcome.trace_title
    assert "timeline and trace are of h100-sxm" in outcome.notes
    assert {span["case"] for span in outcome.timeline} == {"ALSpec, 1+1 devices, 1,024 tokens, h100-sxm"}
    assert outcome.baseline == "tensor parallel, 2 devices, of the same device"
    assert outcome.best_at == {"context_tokens": 1024, "batch": 1}


LINEAR = {
    "study": "linear_attention",
    "device": "h200-sxm",
    "dtype": "bf16",
    "methods": ["lightning", "fleet_torch"],
    "batch": 1,
    "heads": 32,
    "rank": 128,
    "dim": 128,
    "decay": True,
    "length": [128, 2048],
}


def test_methods_by_the_datasheet_alone_are_unranked() -> None:
    """With a decay, Lightning was measured and Fleet's torch version was not: the outcome says so, for all
    who read it. Without one both are priced by the datasheet."""
    outcome = assemble(parse_scenario({"name": "alone", **LINEAR}, "x"), "x").study.run(lambda *_: None)
    unranked = {row.axes.strategy for row in outcome.rows if row.metric == NOT_RANKED}
    assert unranked == {"fleet_torch"}
    assert outcome.unranked == ["FleetAttention (torch)"]
    both = {**LINEAR, "decay": [False, True], "device": ["h200-sxm", "h100-sxm"]}
    _, partly = outcome_of(both)
    assert not partly.unranked
    axes = [row.axes for row in partly.rows if row.metric == NOT_RANKED]
    assert {(one.strategy, one.decay) for one in axes if isinstance(one, OperatorAxes)} == {
        ("fleet_torch", 1)
    }


def operator_outcome(kv_heads: int | None) -> Outcome:
    """Two methods at two lengths: b is faster at both, but cannot be ranked at the first."""
    cases = {
        (name, length): OperatorAxes(name, name, 1, 8, length, 64, kv_heads=kv_heads)
        for name in "ab"
        for length in (1024, 2048)
    }
    taken = {"a": 2e-3, "b": 1e-3}
    rows = [Row(axes, "latency_s", taken[name], "s") for (name, _), axes in cases.items()]
    return Outcome([*rows, Row(cases["b", 1024], NOT_RANKED, 1.0, "")], "")


@pytest.mark.parametrize(("show", "kv_heads"), [(terminal._operators, None), (terminal._points, 2)])
def test_the_screen_marks_the_best_of_those_that_are_ranked(show: Any, kv_heads: int | None) -> None:
    outcome = operator_outcome(kv_heads)

    def marked() -> set[str]:
        table, _ = show(outcome)
        return {str(cell) for column in table.columns for cell in column.cells if "bold" in str(cell)}

    assert marked() == {"[bold green]2[/bold green]", "[bold green]1[/bold green]"}
    outcome.unranked = ["b"]
    assert marked() == {"[bold green]2[/bold green]"}
