"""What steps that serve cost beyond their ops, in_step_s and batch_s, and where a simulation adds them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simcore.assembly import assemble
from simcore.machine.machine import Overheads
from simcore.ops import op as ops
from simcore.ops.op import Op
from simcore.scenario import parse_scenario
from simcore.validate.calibration import cuda_steps as card_steps
from tests.fake_card import FakeCudaApi
from tests.test_torch_decoder import GQA

NODE_S = 6e-7
NORM = ops.norm("norm", tokens=1, hidden=8, dtype="fp32")


def test_what_a_step_takes_beyond_its_ops_is_shared_out_among_them() -> None:
    """A step of n ops of 1 us: start + n (1 us + in_step_s)."""

    def step(sequences: int, tokens: int) -> tuple[float, Sequence[Op], card_steps.Costs]:
        assert tokens > 100
        count = 10 * sequences
        of_host = {"batch_s": 1e-5 * sequences, "prompt_s": 1e-6 * sequences}
        return 2e-6 + count * (1e-6 + NODE_S), [NORM] * count, of_host

    found = list(card_steps.step_costs(step, 2e-6, lambda op: 1e-6))
    each = {"in_step_s": NODE_S, "batch_s": 14e-5, "prompt_s": 14e-6}
    assert card_steps.costs_of(found) == pytest.approx(each)
    assert card_steps.costs_of([{"in_step_s": -1e-7, "batch_s": 1e-4}]) == {"in_step_s": 0.0, "batch_s": 1e-4}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a CUDA device")
def test_steps_are_those_of_the_machine_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    # As few as tell the first launch from the last: the interpreter is slow.
    for name, few in (("LAUNCHES", 2), ("RUNS", 1), ("PROMPT", 20)):
        monkeypatch.setattr(card_steps, name, few)
    monkeypatch.setattr(card_steps, "pace", lambda: SimpleNamespace(keeps=lambda act: (act(), True)))
    step = card_steps.steps_of(replace(GQA, layers=1), FakeCudaApi(), "cpu")
    took_s, found, of_host = step(2, 9)
    assert took_s > 0.0
    assert of_host["batch_s"] > 0.0
    assert {op.kind for op in found} == card_steps.KINDS
    (attention,) = (op for op in found if op.kind == "paged_attention")
    # The last but one of the replays of the last launch or of the one before it.
    assert attention["sequences"] == 2
    assert 18 < attention["kv_tokens"] <= 18 + 2 * 2 * card_steps.REPLAYS


SERVING: dict[str, Any] = {
    "name": "t", "study": "serving", "device": "h200-sxm", "model": "llama-3.1-8b",
    "workload": {
        "requests": 1, "arrivals": {"kind": "constant", "rate_per_s": 1.0},
        "prompt_tokens": {"kind": "constant", "value": 64}, "output_tokens": {"kind": "constant", "value": 2},
    },
    "strategies": [{"kind": "continuous_batching"}],
}  # fmt: skip


NONE = dict.fromkeys(Overheads.__dataclass_fields__.keys() - {"in_graph_s", "in_step_s"}, 0.0)


def mean_s(metric: str, **overheads: float) -> float:
    scenario = parse_scenario({**SERVING, "profile": "none", "overheads": {**NONE, **overheads}}, "t")
    rows = assemble(scenario, "t").study.run(lambda *_: None).rows
    return next(row.value for row in rows if row.metric == metric and row.value is not None)


ttft_s, e2e_s = partial(mean_s, "ttft_mean_s"), partial(mean_s, "e2e_mean_s")


def test_a_launch_that_says_whose_tokens_it_computes_takes_its_host_longer() -> None:
    """One request, alone: its first token comes after one launch."""
    assert ttft_s(batch_s=1e-3) - ttft_s() == pytest.approx(1e-3)


def test_a_launch_with_prompts_takes_its_host_longer_still() -> None:
    """The first token comes after a launch with a prompt, the second after one without."""
    assert ttft_s(prompt_s=1e-3) - ttft_s() == pytest.approx(1e-3)
    assert e2e_s(prompt_s=1e-3) - e2e_s() == pytest.approx(1e-3)
    assert e2e_s(batch_s=1e-3) - e2e_s() == pytest.approx(2e-3)


def test_kernels_of_steps_that_serve_have_a_time_of_their_own() -> None:
    """A scenario that gives the time in graphs alone means these graphs too."""
    of_graphs, of_steps = ttft_s(in_graph_s=1e-6), ttft_s(in_step_s=1e-6)
    assert of_graphs == pytest.approx(of_steps)
    assert ttft_s(in_graph_s=2e-6, in_step_s=1e-6) == pytest.approx(of_steps)
    assert ttft_s(in_graph_s=2e-6, in_step_s=0.0) == pytest.approx(ttft_s(in_step_s=0.0))
    assert of_graphs - ttft_s(in_step_s=0.0) > 1e-4
