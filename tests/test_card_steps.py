"""What steps that serve cost beyond their ops, of card and host, and where a simulation adds them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from simcore.assembly import assemble
from simcore.devices.fitted import FittedProfile
from simcore.devices.profile import load_profile
from simcore.machine.machine import Overheads
from simcore.ops import op as ops
from simcore.ops.op import Op
from simcore.scenario import parse_scenario
from simcore.validate.calibration import cuda_service as card_service
from simcore.validate.calibration import cuda_steps as card_steps
from simcore.validate.calibration.cuda_service import Gap
from tests.fake_card import FakeCudaApi
from tests.test_torch_decoder import GQA
from tests.thorough import slow

NODE_S = 6e-7
NORM = ops.norm("norm", tokens=1, hidden=8, dtype="fp32")


def test_what_a_step_takes_beyond_its_ops_is_shared_out_among_them() -> None:
    """A step of n ops of 1 us: start + n (1 us + in_step_s)."""

    def step(sequences: int, tokens: int) -> tuple[float, Sequence[Op]]:
        assert tokens > 100
        count = 10 * sequences
        return 2e-6 + count * (1e-6 + NODE_S), [NORM] * count

    found = list(card_steps.step_costs(step, 2e-6, lambda op: 1e-6))
    assert found == pytest.approx([NODE_S] * len(card_steps.CASES))


@slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a CUDA device")
def test_steps_are_those_of_the_machine_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    # As few as tell the first launch from the last: the interpreter is slow.
    for name, few in (("LAUNCHES", 2), ("REPLAYS", 2), ("RUNS", 1)):
        monkeypatch.setattr(card_steps, name, few)
    monkeypatch.setattr(card_steps, "pace", lambda: SimpleNamespace(keeps=lambda act: (act(), True)))
    step = card_steps.steps_of(replace(GQA, layers=1), FakeCudaApi(), "cpu")
    took_s, found = step(2, 9)
    assert took_s > 0.0
    assert {op.kind for op in found} == card_steps.KINDS
    (attention,) = (op for op in found if op.kind == "paged_attention")
    # The last but one of the replays of the last launch or of the one before it.
    assert attention["sequences"] == 2
    assert 18 < attention["kv_tokens"] <= 18 + 2 * 2 * card_steps.REPLAYS


@slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a CUDA device")
def test_gaps_are_those_between_the_steps_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests that come at once, and then leave one by one: of 32 tokens in the first step 12 are of
    the second prompt, whose rest and the third one end beside the first answer."""
    few_of = {"SEQUENCES": 3, "RATES_PER_S": (1e9,), "REQUESTS_OF_A_RATE": 3, "PROMPTS": (20,), "BUDGET": 32}
    few_of["RUNS"] = 2
    for name, few in few_of.items():
        monkeypatch.setattr(card_service, name, few)
    answers = iter(2 * [3, 4, 5])
    monkeypatch.setattr(card_service.Random, "randint", lambda *_: next(answers))
    monkeypatch.setattr(card_service, "rehearsal", lambda *_: (each for each in ()))
    monkeypatch.setattr(card_service, "pace", lambda: SimpleNamespace(settle=lambda: True))
    found = list(card_service.gaps_on(replace(GQA, layers=1), FakeCudaApi(), "cpu"))
    assert [(gap.sequences, gap.prompts) for gap in found] == 2 * [(1, 2), (3, None), (2, None), (1, None)]
    assert all(gap.seconds >= 0.0 for gap in found)


def test_costs_of_a_service_are_found_again_though_a_third_of_its_steps_is_delayed() -> None:
    """1 ms + 5 us a sequence, with prompts 0.3 ms + 50 us a prompt more; 0.4 ms lie before any launch."""

    def gap(n: int, prompts: int | None) -> Gap:
        longer_s = 0.0 if prompts is None else 3e-4 + 5e-5 * prompts
        return Gap(1e-3 + 5e-6 * n + longer_s + (2e-3 if n % 3 == 0 else 0.0), n, prompts)

    made = [gap(n, prompts) for n in range(1, 60) for prompts in (None, 1 + n % 7)]
    # Parts of prompts that end none take as long as one that ends, and are left out.
    made += [replace(gap(n, 1), prompts=0) for n in range(1, 60)]
    each = {"batch_s": 6e-4, "sequence_s": 5e-6, "prompt_s": 3e-4, "each_prompt_s": 5e-5}
    assert card_service.costs_of(made, 4e-4) == pytest.approx(each)
    # Never below 0.
    none = dict.fromkeys(each, 0.0)
    faster = [Gap(1e-4 / n, n, None if n > 5 else n) for n in range(1, 12)]
    assert card_service.costs_of(faster, 1.0) == none | {"prompt_s": pytest.approx(0.0, abs=1e-4)}


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
    return mean_of(metric, profile="none", overheads={**NONE, **overheads})


def mean_of(metric: str, **fields: Any) -> float:
    rows = assemble(parse_scenario({**SERVING, **fields}, "t"), "t").study.run(lambda *_: None).rows
    return next(row.value for row in rows if row.metric == metric and row.value is not None)


ttft_s, e2e_s = partial(mean_s, "ttft_mean_s"), partial(mean_s, "e2e_mean_s")


def test_a_launch_that_says_whose_tokens_it_computes_takes_its_host_longer() -> None:
    """One request, alone: its first token comes after one launch."""
    assert ttft_s(batch_s=1e-3) - ttft_s() == pytest.approx(1e-3)


@slow
def test_a_named_engine_has_its_own_host_and_not_that_of_this_project() -> None:
    """One prompt and one more token. What the scenario states holds for every strategy."""
    profile = load_profile("h200-sxm", "local")
    assert isinstance(profile, FittedProfile)
    ours = profile.overheads
    engine = [{"kind": "continuous_batching", "engine": "vllm-0.19", "host": {}}]
    plain = [{"kind": "continuous_batching", "token_budget": 8192, "max_sequences": 256}]
    between_s = 2 * ours["batch_s"] + ours["prompt_s"] + ours["each_prompt_s"] + ours["sequence_s"]
    found_s = [mean_of("e2e_mean_s", strategies=each) for each in (plain, engine)]
    assert found_s[0] - found_s[1] == pytest.approx(between_s)
    stated = {name: ours[name] for name in ("batch_s", "sequence_s", "prompt_s", "each_prompt_s")}
    found_s[1] = mean_of("e2e_mean_s", strategies=engine, overheads=stated)
    assert found_s[0] == pytest.approx(found_s[1])


def test_each_decoding_sequence_takes_the_host_of_a_launch_longer() -> None:
    """The prompt's step has none, the second token's has one."""
    assert ttft_s(sequence_s=1e-3) == ttft_s()
    assert e2e_s(sequence_s=1e-3) - e2e_s() == pytest.approx(1e-3)


def test_a_launch_with_prompts_takes_its_host_longer_still() -> None:
    """The first token comes after a launch with a prompt, the second after one without."""
    assert ttft_s(prompt_s=1e-3) - ttft_s() == pytest.approx(1e-3)
    assert e2e_s(prompt_s=1e-3) - e2e_s() == pytest.approx(1e-3)
    assert e2e_s(batch_s=1e-3) - e2e_s() == pytest.approx(2e-3)


def test_each_prompt_that_ends_takes_the_host_of_its_launch_longer() -> None:
    """The one request's prompt ends in one step."""
    assert ttft_s(each_prompt_s=1e-3) - ttft_s() == pytest.approx(1e-3)
    assert e2e_s(each_prompt_s=1e-3) - e2e_s() == pytest.approx(1e-3)


def test_kernels_of_steps_that_serve_have_a_time_of_their_own() -> None:
    """A scenario that gives the time in graphs alone means these graphs too."""
    of_graphs, of_steps = ttft_s(in_graph_s=1e-6), ttft_s(in_step_s=1e-6)
    assert of_graphs == pytest.approx(of_steps)
    assert ttft_s(in_graph_s=2e-6, in_step_s=1e-6) == pytest.approx(of_steps)
    assert ttft_s(in_graph_s=2e-6, in_step_s=0.0) == pytest.approx(ttft_s(in_step_s=0.0))
    assert of_graphs - ttft_s(in_step_s=0.0) > 1e-4
