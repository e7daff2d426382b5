"""Serving models with states: their memory, chunks that carry them, preemption that drops them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simcore.assembly import assemble
from simcore.input.files import InputError
from simcore.models.decoder_config import load_config
from simcore.models.served_decoder import ServedDecoder, step_sizes
from simcore.ops.linear_layer import state_bytes
from simcore.scenario import load_scenario, parse_scenario
from simcore.studies.serving.kv_memory import Room, block_bytes, held_bytes, state_blocks
from simcore.studies.serving.runner import Bench, Result
from simcore.studies.serving.study import cases
from tests.thorough import slow

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "scenarios" / "models"
DOCUMENT: dict[str, Any] = {
    "name": "x", "study": "serving", "device": "h200-sxm", "model": "hybrid-8b",
    "workload": {
        "requests": 24,
        "arrivals": {"kind": "constant", "interval_s": 0.01},
        "prompt_tokens": {"kind": "uniform", "low": 300, "high": 700},
        "output_tokens": {"kind": "uniform", "low": 100, "high": 300},
    },
    "strategies": [{"kind": "continuous_batching", "token_budget": 256}],
}  # fmt: skip
# A state of hybrid-8b is 48 MiB, a block of 16 tokens 512 KiB.
STATE_BLOCKS = 96


def bench_of(**changed: Any) -> Bench:
    study: Any = assemble(parse_scenario({**DOCUMENT, **changed}, "x.yaml"), "x.yaml").study
    bench: Bench = study.bench
    return bench


def ran(**changed: Any) -> Result:
    bench = bench_of(**changed)
    (case,) = cases(bench)
    return bench.run(case, 0)


# -- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "block", "state"),
    [
        ("hybrid-8b", 16 * 32 * 2**10, STATE_BLOCKS),
        ("llama-3.1-8b", 16 * 128 * 2**10, 0),
        ("toy-retnet-1.3b", 24 * 8 * 256 * 512 * 4, 0),
    ],
)
def test_a_block_and_the_states_of_a_sequence(name: str, block: int, state: int) -> None:
    """A block of a model without KV is the state of one sequence: heads * rank * dim * 4 bytes a layer."""
    model = ServedDecoder(load_config(MODELS / f"{name}.json"))
    assert (block_bytes(model, 16), state_blocks(model, 16)) == (block, state)
    assert held_bytes(Room(7, 100, 16, state_blocks=state), model) == 7 * block
    assert state_bytes(8, 256, 512) == 8 * 256 * 512 * 4


def test_a_server_s_room_for_states() -> None:
    """What the weights and a step's activations leave, in blocks of 512 KiB; of a RetNet in whole states."""
    for name in ("hybrid-8b", "toy-retnet-1.3b"):
        bench = bench_of(model=name)
        (case,) = cases(bench)
        room, model = bench.room(case, bench.draw(case, 0)), bench.model(1)
        left = 0.9 * bench.hardware.memory_bytes - model.weight_bytes - model.activation_bytes(256, 256)
        assert room.limit == left // block_bytes(model, room.block_tokens or 0)
        assert room.states
        longest = 700 + 300
        if name == "hybrid-8b":
            assert room.sequences == room.limit // (STATE_BLOCKS + -(-longest // 16))
        else:
            assert room.sequences == room.limit
            assert room.block_tokens == longest


def test_the_smaller_state_holds_more_sequences_than_kv_of_long_contexts() -> None:
    """At 1,000 tokens a state is dearer than KV: 2,016 tokens of the hybrid's attention have its bytes."""
    model = ServedDecoder(load_config(MODELS / "hybrid-8b.json"))
    full = ServedDecoder(load_config(MODELS / "llama-3.1-8b.json"))
    even = model.state_bytes_per_sequence / (full.kv_bytes_per_token - model.kv_bytes_per_token)
    assert even == 512.0


# -- serving -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "of_state", "of_tokens"),
    [pytest.param("hybrid-8b", 96, 16, marks=slow), ("toy-retnet-1.3b", 0, 1000)],
)
def test_blocks_held_are_states_and_tokens_of_those_that_run(
    model: str, of_state: int, of_tokens: int
) -> None:
    """In the last step only those that decode hold any: all others were given back."""
    result = ran(model=model)
    assert result.served.finished.all()
    assert result.journal["kv_peak"].max() <= result.room.limit
    running, used = result.journal["decoding"][-1], result.journal["kv_used"][-1]
    assert running > 0
    assert running * (of_state + 1) <= used <= running * (of_state + -(-1000 // of_tokens))


def test_no_more_sequences_run_than_states_fit() -> None:
    """Three states of a RetNet: three sequences at a time, however short; none is ever preempted."""
    result = ran(model="toy-retnet-1.3b", kv_blocks=3)
    assert result.served.finished.all()
    assert result.served.preemptions.sum() == 0
    assert result.journal["kv_peak"].max() == 3
    assert result.journal["decoding"].max() == 3


@slow
def test_a_preempted_request_drops_its_state_and_is_computed_again() -> None:
    """Room for the states of two hybrids and for less than their tokens: 2 (96 + ceil(n / 16)) > 290."""
    result = ran(kv_blocks=290)
    served = result.served
    assert served.finished.all()
    assert served.preemptions.sum() > 0
    assert result.journal["kv_peak"].max() <= 290
    assert result.journal["decoding"].max() == 2
    # All prompt tokens, and those of dropped sequences again.
    assert result.journal["prefill_tokens"].sum() > served.prompt_tokens.sum()


def test_a_request_whose_state_and_tokens_never_fit_is_rejected() -> None:
    result = ran(kv_blocks=STATE_BLOCKS + 30)
    longest = result.served.prompt_tokens + result.served.output_tokens.max()
    assert result.served.rejected[longest > 30 * 16].any()
    assert not np.isfinite(result.served.finish_s[result.served.rejected]).any()


@slow
@settings(derandomize=True, database=None, max_examples=40)
@given(st.integers(1, 2000), st.lists(st.integers(1, 700), min_size=1, max_size=8))
def test_chunks_carry_a_state_in_and_out(prompt: int, sizes: list[int]) -> None:
    """Each chunk reads and writes the state once, and moves its tokens' q, k, v and out: chunks of a prompt
    together move what the whole does, and a state in and out for each further chunk."""
    model = ServedDecoder(load_config(MODELS / "hybrid-8b.json"))
    op = next(op for op in model.prefill.ops if op.kind == "linear_attention_prompts")
    chunks, done = [], 0
    for size in [*sizes, prompt]:
        now = min(size, prompt - done)
        if now:
            chunks.append(op.at(step_sizes(0, 0, [(now, done)], 1)).work.hbm_bytes)
            done += now
    whole = op.at(step_sizes(0, 0, [(prompt, 0)], 1)).work.hbm_bytes
    assert sum(chunks) == whole + (len(chunks) - 1) * 2 * state_bytes(32, 128, 128)


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (
            {"kind": "temporal_fusion"},
            "hybrid-8b has states of sequences, which continuous_batching alone keeps",
        ),
        (
            {"kind": "continuous_batching", "prefix_caching": True},
            "prefix_caching: is true, and hybrid-8b has states",
        ),
    ],
)
def test_a_strategy_that_keeps_no_states_is_refused(strategy: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as caught:
        ran(strategies=[strategy])
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shipped_scenario_is_a_right_one() -> None:
    assert load_scenario(ROOT / "scenarios" / "h200" / "hybrid_serving.yaml").model == "hybrid-8b"
