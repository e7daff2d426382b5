"""KV room from its parts, worked out here: memory, weights, activations of the widest step.

room = share of the memory - weights - activations - reserve
"""

from dataclasses import replace
from math import floor
from typing import Any

import pytest

from simcore.input.files import InputError
from simcore.studies.serving.kv_memory import KvMemory, Room, ServerMemory, room_bytes
from simcore.studies.serving.runner import Bench, Case
from simcore.studies.serving.study import cases
from tests.test_serving import bench, document, strategy, workload

PROMPT, OUTPUT = 3000, 500


def case_of(kind: str, places: int, **changes: Any) -> tuple[Bench, Case]:
    table = bench(
        document(
            strategies=[strategy(kind, places, **changes.pop("given", {}))],
            workload=workload(4, prompt=PROMPT, output=OUTPUT),
            **changes,
        )
    )
    return table, next(cases(table))


def room(table: Bench, case: Case) -> Room:
    return table.room(case, table.draw(case, 0))


def activations(table: Bench, tokens: int, rows: int) -> float:
    """Llama-3.1-8B in bf16: of each token twice the hidden state and the MLP's gate and up, of each row the
    logits in fp32."""
    config = table.config
    return tokens * (2 * config.hidden + 2 * config.intermediate) * 2.0 + rows * config.vocab * 4.0


@pytest.mark.parametrize(("budget", "places"), [(512, 64), (8192, 256), (64, 256)])
def test_blocks_are_what_weights_and_activations_of_the_widest_step_leave(budget: int, places: int) -> None:
    table, case = case_of("continuous_batching", places, given={"token_budget": budget})
    model, memory = table.model(1), case.strategy.memory  # type: ignore[union-attr]
    taken = model.weight_bytes + activations(table, budget, min(budget, places)) + memory.reserve_bytes
    left = memory.share * table.hardware.memory_bytes - taken
    block = 16 * model.kv_bytes_per_token
    found = room(table, case)
    assert memory.share_of == "total"
    assert memory.peak == "widest_step"
    assert found.limit == floor(left / block)
    assert found.kv_tokens == 16 * found.limit
    # All of these count: without any of them there would be at least a block more.
    for part in (
        model.weight_bytes,
        activations(table, budget, 0),
        activations(table, 0, min(budget, places)),
    ):
        assert floor((left + part) / block) > found.limit


@pytest.mark.parametrize("kind", ["temporal_fusion", "dynamic_batching", "iteration_batching"])
def test_as_many_slots_fit_as_prompts_and_caches_of_all_of_them_leave(kind: str) -> None:
    """All prompts may be computed at once: the largest number of slots for which it all fits, and no more."""

    table, _ = case_of(kind, 8)
    model = table.model(1)

    def left(slots: int) -> float:
        taken = model.weight_bytes + activations(table, slots * PROMPT, slots)
        caches = slots * (PROMPT + OUTPUT) * model.kv_bytes_per_token
        return 0.9 * table.hardware.memory_bytes - taken - caches

    most = next(n for n in range(1, 1000) if left(n + 1) < 0.0 <= left(n))
    found = room(*case_of(kind, most))
    assert found.kv_tokens == most * (PROMPT + OUTPUT)
    assert found == Room(most, PROMPT + OUTPUT)
    with pytest.raises(InputError, match=f"{most + 1} slots of 3,500 tokens do not fit"):
        room(*case_of(kind, most + 1))


def test_a_share_of_the_memory_and_blocks_that_are_given_go_before_the_rule() -> None:
    table, case = case_of("continuous_batching", 64, memory_share=0.5)
    half = room(table, case).limit * 16 * table.model(1).kv_bytes_per_token
    whole = room(*case_of("continuous_batching", 64, memory_share=0.9))
    more = whole.limit * 16 * table.model(1).kv_bytes_per_token
    assert more - half == pytest.approx(0.4 * table.hardware.memory_bytes, rel=1e-4)
    assert room(*case_of("continuous_batching", 64, kv_blocks=77)).kv_tokens == 77 * 16


def test_one_block_is_room_and_five_slots_are_five_and_what_is_no_number_of_tokens_is_refused() -> None:
    table, _ = case_of("continuous_batching", 64)
    memory = ServerMemory(table.hardware, table.model(1), None, None, PROMPT, PROMPT + OUTPUT)
    assert replace(memory, units=1).blocks(16, tokens=64, rows=64) == Room(1, PROMPT + OUTPUT, 16)
    assert replace(memory, units=5).slots(5) == Room(5, PROMPT + OUTPUT)
    with pytest.raises(InputError, match=r"6 slots of 3,500 tokens do not fit .*; 5 do"):
        replace(memory, units=5).slots(6)
    for name in ("block_tokens", "tokens", "rows"):
        given: dict[str, Any] = {"block_tokens": 16, "tokens": 64, "rows": 64, name: 0}
        with pytest.raises(ValueError, match=f"memory.blocks: {name} is 0; a whole number from 1 on"):
            memory.blocks(**given)


def test_without_room_for_activations_all_that_weights_leave_is_room() -> None:
    table, _ = case_of("continuous_batching", 64)
    left = table.hardware.memory_bytes - table.model(1).weight_bytes
    rule = KvMemory(share=1.0, peak="none")
    assert room_bytes(rule, 1.0, table.hardware, table.model(1), 64, 64) == left


@pytest.mark.parametrize("share_of", ["total", "free", "rest"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_driver_and_libraries_take_depends_on_whether_there_are_several_ranks(
    share_of: Any, ranks: int
) -> None:
    table, _ = case_of("continuous_batching", 64)
    total, model = table.hardware.memory_bytes, table.model(ranks)
    rule = KvMemory(
        share_of=share_of, peak="none", driver_bytes=1e9, group_driver_bytes=3e9,
        reserve_bytes=2e8, group_reserve_bytes=5e8,
    )  # fmt: skip
    driver, taken = (1e9, model.weight_bytes + 2e8) if ranks == 1 else (3e9, model.weight_bytes + 5e8)
    expected = {
        "total": 0.5 * total - taken,
        "free": 0.5 * (total - driver) - taken,
        "rest": 0.5 * (total - driver - taken),
    }
    assert room_bytes(rule, 0.5, table.hardware, model, 64, 64) == pytest.approx(
        expected[share_of], rel=1e-12
    )
