"""Continuous batching against the reference that runs step by step (tests/reference_batching.py)."""

import pytest

from simcore.workload.requests import Request
from tests.reference_batching import Rules, differences, random_workload, reference, strategy
from tests.thorough import first, slow

USUAL, PER_TEST = 150, 50
SEEDS = [range(start, start + PER_TEST) for start in range(0, 2500, PER_TEST)]


@pytest.mark.parametrize("seeds", first(USUAL // PER_TEST, SEEDS), ids=lambda seeds: f"from {seeds[0]}")
def test_strategy_and_reference_serve_alike(seeds: range) -> None:
    for seed in seeds:
        rules, wanted = random_workload(seed)
        assert differences(rules, wanted) == [], f"seed {seed}: {rules}"


@slow
def test_workloads_have_in_them_what_they_are_to_compare() -> None:
    seen = {"queued": 0, "preempted": 0, "rejected": 0, "from cache": 0, "no room": 0, "queued, ahead": 0}
    for seed in range(USUAL):
        rules, wanted = random_workload(seed)
        for found in reference(rules, wanted):
            queued = found.scheduled_s > found.arrival_s + 1.0
            seen["queued"] += queued
            seen["queued, ahead"] += queued and rules.ahead > 0
            seen["preempted"] += found.preemptions > 0
            seen["rejected"] += found.rejected
            seen["no room"] += found.found_no_room
            seen["from cache"] += found.from_cache > 0
    assert min(seen.values()) >= 50, seen


def test_all_that_come_at_one_instant_are_in_the_first_step() -> None:
    wanted = [Request(i, 1.0, 4, 2, 2) for i in range(8)]
    served = strategy(Rules(blocks=100, token_budget=64), wanted)
    assert [r.scheduled_s for r in served] == [1.0] * 8
