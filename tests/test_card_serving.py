"""Serving scenarios on a card that is none, from the file to the figures; what a card does not serve is one
line that names the field."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from simcore.assembly import Place, assemble
from simcore.input.files import InputError
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op
from simcore.scenario import Scenario, parse_scenario
from simcore.studies.common import Outcome
from simcore.validate.machines.buffers.cuda_served import (
    ALONE,
    WITH_PROMPTS,
    captured_ops,
    prompt_steps,
    rounded,
    rounded_rows,
)
from simcore.validate.machines.cuda.runs import RealCard
from simcore.validate.machines.cuda.states import CardStates, check_card_runs
from simcore.validate.timing.precompile import launched
from tests.fake_card import FakeCudaApi
from tests.test_torch_decoder import GQA
from tests.thorough import first, slow

HAS_GPU = torch.cuda.is_available()
emulated = pytest.mark.skipif(HAS_GPU, reason="the interpreter is for machines without a CUDA device")
TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "vocab_size": 64, "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}  # fmt: skip
POISSON = {"kind": "poisson", "rate_per_s": 50.0}
STRATEGIES = {
    "continuous": {"kind": "continuous_batching", "token_budget": 16, "max_sequences": 2},
    "fusion": {"kind": "temporal_fusion", "slots": 2},
    "instances": {"kind": "concurrent_instances", "max_instances": 2},
    "dynamic": {"kind": "dynamic_batching", "window_s": 0.001, "max_batch": 2},
    "iteration": {"kind": "iteration_batching", "max_batch": 2},
}


def scenario(folder: Path, strategy: dict[str, Any], **workload: Any) -> Scenario:
    config = folder / "tiny.json"
    config.write_text(json.dumps(TINY), encoding="utf-8")
    lengths = {
        name: {"kind": "constant", "value": n} for name, n in (("prompt_tokens", 10), ("output_tokens", 2))
    }
    document = {
        "name": "t", "study": "serving", "device": "h200-sxm", "model": str(config), "dtype": "fp32",
        "workload": {"requests": 3, "arrivals": POISSON, **lengths, **workload},
        "strategies": [strategy],
    }  # fmt: skip
    return parse_scenario(document, "t")


def ran(of: Scenario) -> tuple[Outcome, RealCard]:
    real = RealCard(1, CardStates(1 << 20, "cpu"), api=FakeCudaApi)
    place = Place("cuda", real.start, 1, described=lambda: real.described)
    return assemble(of, "t", place).study.run(lambda *_: None), real


@slow
@emulated
@pytest.mark.parametrize("name", first(2, ["continuous", "instances", "fusion", "dynamic", "iteration"]))
def test_every_strategy_serves_and_captures_nothing_while_it_counts(name: str, tmp_path: Path) -> None:
    outcome, real = ran(scenario(tmp_path, STRATEGIES[name]))
    found = {row.metric: row.value for row in outcome.rows}
    assert found["ttft_mean_s"] is not None
    assert found["ttft_mean_s"] > 0.0
    assert real.captured == 0
    assert "captured" not in real.described


@slow
@emulated
@pytest.mark.parametrize("requests", first(1, [2, 1]))
@pytest.mark.parametrize("sequences", first(1, [8, 256, 1]))
def test_few_requests_are_served_too(requests: int, sequences: int, tmp_path: Path) -> None:
    strategy = {
        "kind": "continuous_batching",
        "token_budget": 16 if sequences < 64 else 64,
        "max_sequences": min(64, sequences),
    }
    outcome, _ = ran(scenario(tmp_path, strategy, requests=requests))
    assert {row.metric for row in outcome.rows} >= {"ttft_mean_s", "e2e_mean_s"}


@slow
@emulated
def test_clients_that_wait_for_their_answers_are_served(tmp_path: Path) -> None:
    closed = {"kind": "closed_loop", "clients": 1, "think_s": 0.0}
    outcome, _ = ran(scenario(tmp_path, STRATEGIES["continuous"], arrivals=closed))
    assert any(row.metric == "ttft_mean_s" for row in outcome.rows)


CACHED = {"strategies": [{"kind": "continuous_batching", "prefix_caching": True}]}
TWO = {"strategies": [{"kind": "continuous_batching", "ranks": [2]}], "devices": 2}
TURNS = {"turns": {"kind": "constant", "value": 2}, "think_s": 0.1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (CACHED, r"strategies\[0\].prefix_caching: is not run on a card yet; give false"),
        (TWO, r"strategies\[0\].ranks: is 2; --on cuda runs 1"),
        ({"devices": [1, 2]}, "devices: --on cuda serves with 1"),
        (
            {"workload": {"sessions": {**TURNS, "max_context_tokens": 99}}},
            "workload.sessions: are not run on a card yet; leave them out",
        ),
    ],
)
def test_what_a_card_does_not_serve_is_named(change: dict[str, Any], says: str) -> None:
    length = {"kind": "constant", "value": 9}
    arrivals = {"kind": "poisson", "rate_per_s": 5.0}
    workload = {"requests": 4, "arrivals": arrivals, "prompt_tokens": length, "output_tokens": length}
    document: dict[str, Any] = {
        "name": "t", "study": "serving", "device": "h200-sxm", "model": "llama-3.1-8b",
        "strategies": [{"kind": "continuous_batching"}], **change,
        "workload": {**workload, **change.get("workload", {})},
    }  # fmt: skip
    with pytest.raises(InputError, match=says):
        check_card_runs(parse_scenario(document, "t"), "t")


def test_sizes_are_rounded_up_and_more_sequences_are_refused_by_their_fields() -> None:
    for rows in (1, 17, 2048, 2049, 524_288):
        assert rows <= rounded_rows(rows) <= rows + 128
    with pytest.raises(InputError, match=r"5,000 sequences; 8 at most .*max_sequences, slots"):
        rounded(5000, (1, 8))


@pytest.mark.parametrize("counts", [WITH_PROMPTS, ALONE])
def test_steps_are_captured_for_all_that_may_come(counts: Sequence[int]) -> None:
    """Of every number of rows and of sequences up to the most there is one that is not less."""
    steps = prompt_steps(100, 700, counts)
    for rows in range(1, 701):
        for sequences in (1, 3, min(rows, 100)):
            assert (rounded_rows(rows), rounded(sequences, counts)) in steps


@slow
def test_kernels_are_compiled_for_the_captured_sizes(tmp_path: Path) -> None:
    of = scenario(tmp_path, STRATEGIES["continuous"])
    ops: list[Op] = launched(of, "t", lambda *_: None)
    tokens = {op["tokens"] for op in ops if op.kind == "norm"}
    # Two sequences, up to eight in a step with prompts, up to 32 where these are alone, and 16 rows.
    assert tokens == {1, 2, 8, 16, 32}
    assert not {"paged_attention", "prefill_attention", "rotary"} & {op.kind for op in ops}


def test_captured_ops_are_those_of_the_steps() -> None:
    holds = {"step_rows": 2, "step_tokens": 16, "prompts_apart": False}
    model = ServedDecoder(GQA)
    kinds = {op.kind for op in captured_ops(model, holds)}
    assert kinds == {op.kind for graph in (model.decode, model.prefill) for op in graph.ops}


@slow
@emulated
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
def test_a_model_with_states_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it needs is captured before; its kernels of linear attention are not those of single ops."""
    hybrid = {**TINY, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    monkeypatch.setitem(globals(), "TINY", hybrid)
    of = scenario(tmp_path, STRATEGIES["continuous"])
    outcome, real = ran(of)
    assert {row.metric: row.value for row in outcome.rows}["ttft_mean_s"] > 0.0  # type: ignore[operator]
    assert real.captured == 0
    kinds = {op.kind for op in launched(of, "t", lambda *_: None)}
    assert not {kind for kind in kinds if kind.startswith("linear_attention")}
    with pytest.raises(InputError, match="has states of sequences, which continuous_batching alone keeps"):
        ran(scenario(tmp_path, STRATEGIES["fusion"]))
