"""Kernels of a step between two of a prompt: what the law says is counted in its own runs, and by hand."""

from dataclasses import replace
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simcore.assembly import MODELS
from simcore.devices.fitted import FittedProfile
from simcore.devices.price import pricer, roofline
from simcore.devices.profile import load_profile
from simcore.devices.spec import load_device
from simcore.machine.machine import Machine, Program, Ticket
from simcore.models.decoder_config import load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Graph
from simcore.sim.contention import shared_reads
from simcore.sim.runs import Setup, span_by_span
from simcore.validate.calibration import cuda_prompts
from simcore.validate.calibration.cuda_prompts import constant, program, steps_inside, traces_on
from tests.fake_card import FakeCudaApi
from tests.test_torch_decoder import GQA
from tests.thorough import first, slow

MODEL = ServedDecoder(load_config(MODELS / "llama-3.1-8b.json"))


class StepByStep:
    """A machine that repeats nothing: as on a card each step has a span of its own."""

    def __init__(self, m: Machine) -> None:
        self._m = m

    def __getattr__(self, name: str) -> Any:
        return getattr(self._m, name)

    def launch(self, graph: Graph, **how: Any) -> Ticket:
        return self._m.launch(graph, **{**how, "repeat": 1, "until": None})


@slow
@pytest.mark.parametrize("kernels_between", first(1, [1.3, 1.0, 1.7]))
def test_the_law_s_constant_is_counted_in_its_own_runs(kernels_between: float) -> None:
    """To 3 %: between two steps the host takes time, in which a prompt runs alone. Here it takes little."""
    device, profile = load_device("h200-sxm"), load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    setup = Setup(
        model=MODEL,
        price=pricer(device, profile=profile),
        roofline=roofline(device),
        overheads=replace(device.overheads, **{**profile.overheads, "batch_s": 1e-4}),
        rates=shared_reads(0.0, 0.95, 4e-6, kernels_between),
    )

    def step_by_step(m: Machine) -> Program:
        yield from program(StepByStep(m), MODEL, 1200)  # type: ignore[arg-type]

    found = list(steps_inside(span_by_span(setup).run(step_by_step).spans))
    assert len(found) > 60
    assert MODEL.decode.kernels == MODEL.prefill.kernels
    assert median(found) == pytest.approx(kernels_between, rel=0.03)
    assert constant(found, 1.0) == pytest.approx(kernels_between, rel=0.03)


def span(stream: str, start_s: float, end_s: float, sequences: int = 0) -> Any:
    ops = [SimpleNamespace(op=Attention(sequences=sequences))] if sequences else []
    return SimpleNamespace(stream=stream, start_s=start_s, end_s=end_s, ops=ops)


class Attention(dict[str, int]):
    kind = "paged_attention"


def test_steps_within_a_prompt_are_counted_by_hand() -> None:
    """Steps of 4 s alone. Beside the first prompt: half of one, a whole one of 7 s, and three quarters of one
    that ends a second later. The second prompt has a step with the third one; the fourth is alone half of its
    time; beside the fifth other sequences decode, of which none is known alone."""
    steps = [
        span("main", 0.0, 4.0, 3), span("main", 4.0, 9.0, 3), span("main", 9.0, 16.0, 3),
        span("main", 16.0, 22.0, 3), span("main", 30.0, 50.0, 3), span("main", 60.0, 66.0, 3),
        span("main", 70.0, 80.0, 5), span("main", 90.0, 94.0, 3),
    ]  # fmt: skip
    prompts = [
        span("context 0", 6.0, 21.0), span("context 0", 31.0, 39.0), span("context 0", 40.0, 49.0),
        span("context 0", 61.0, 70.0 - 1e-9), span("context 0", 70.5, 79.0),
    ]  # fmt: skip
    assert list(steps_inside([*prompts, *steps])) == pytest.approx([0.5 + 1.0 + 0.75])


def test_too_few_prompts_are_told_and_no_fewer_kernels_than_one() -> None:
    with pytest.raises(ValueError, match="9 prompts ran beside steps all the time; 10 are needed"):
        constant([1.2] * 9, 1.0)
    assert constant([1.2] * 10, 1.5) == pytest.approx(1.8)
    assert constant([0.9] * 10, 1.0) == 1.0


@slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a CUDA device")
def test_the_service_runs_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    few: dict[str, Any] = {"SLOTS": 2, "COUNT": 3, "ANSWER": 2, "PROMPTS": (5, 20), "RUNS": 1, "BEFORE": 1}
    for name, value in few.items():
        monkeypatch.setattr(cuda_prompts, name, value)
    (spans,) = traces_on(replace(GQA, layers=1), FakeCudaApi(), "cpu")
    assert sum(each.stream == "context 0" for each in spans) == 3
    # Each answer has a step of its own at least, beside which another may be computed.
    assert {cuda_prompts._sequences(each) for each in spans if each.stream == "main"} >= {1, 2}
