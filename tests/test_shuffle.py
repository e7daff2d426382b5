"""Flover's memory shuffle against brute force, and against the algorithm as it is printed."""

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simcore.schedules.shuffle import shuffle, window
from tests.thorough import slow

MOST_SLOTS = 14


def patterns() -> Iterator[tuple[bool, ...]]:
    """Every pattern of up to 14 slots, 32767 in all."""
    for slots in range(MOST_SLOTS + 1):
        yield from product((False, True), repeat=slots)


def moves_at(used: Sequence[bool], offset: int) -> int:
    """How many slots in use lie outside the window of their number at this offset."""
    size = sum(used)
    return sum(taken and not offset <= slot < offset + size for slot, taken in enumerate(used))


def brute_force(used: Sequence[bool]) -> tuple[int, int]:
    """(fewest moves, lowest offset with so many)."""
    return min((moves_at(used, offset), offset) for offset in range(len(used) - sum(used) + 1))


def printed(arr: Sequence[bool]) -> int:
    """Algorithm 3 as the paper prints it."""
    non_zero = total_cost = sum(arr)
    min_cost, window_cost, mem_offset = float("inf"), 0, 0
    for i in range(non_zero, len(arr)):
        window_cost += arr[i] - arr[i - non_zero]
        current_cost = total_cost - window_cost
        if current_cost < min_cost:
            min_cost = current_cost
            mem_offset = i - non_zero + 1
    return mem_offset


def check(used: Sequence[bool]) -> None:
    offset, moves = shuffle(used)
    contents = {slot: slot for slot, taken in enumerate(used) if taken}
    for source, target in moves:
        assert target not in contents  # nothing is overwritten
        contents[target] = contents.pop(source)
    assert sorted(contents) == list(range(offset, offset + sum(used)))
    assert sorted(contents.values()) == [slot for slot, taken in enumerate(used) if taken]
    moved = dict(moves)
    assert len(moved) == len(moves)
    assert all(contents[moved.get(slot, slot)] == slot for slot, taken in enumerate(used) if taken)
    assert [source for source, _ in moves] == sorted(moved)
    assert [target for _, target in moves] == sorted(moved.values())


@slow
def test_every_pattern_up_to_14_slots_is_as_brute_force_has_it() -> None:
    for used in patterns():
        offset, moves = shuffle(used)
        assert (len(moves), offset) == brute_force(used), used
        check(used)


@slow
def test_the_printed_algorithm_differs_where_offset_0_is_best_and_nowhere_else() -> None:
    worse = 0
    for used in patterns():
        offset, moves = shuffle(used)
        if offset > 0:
            assert printed(used) == offset, used
        else:
            # It takes offset 0 only where no other window exists.
            assert (printed(used) == 0) == all(used), used
        worse += moves_at(used, printed(used)) > len(moves)
    assert worse == 3440  # of 32767


@pytest.mark.parametrize(
    ("used", "offset", "by_paper"),
    [("1100", 0, 1), ("0000", 0, 1), ("1111", 0, 0), ("0011", 2, 2), ("10", 0, 1), ("01", 1, 1)],
)
def test_small_cases(used: str, offset: int, by_paper: int) -> None:
    slots = [slot == "1" for slot in used]
    assert shuffle(slots) == (offset, [])
    assert printed(slots) == by_paper


def test_the_finished_of_figure_3_are_filled() -> None:
    # Section V-D: requests 2 and 5 end, in slots 4 and 7. How many there are in all is not said: 7 here.
    used = [slot in (2, 3, 5, 6, 8) for slot in range(10)]
    assert window(used) == (2, 7)
    assert shuffle(used) == (2, [(8, 4)])


def test_the_window_runs_from_the_first_to_the_last_slot_in_use() -> None:
    assert window([]) == (0, 0) == window([False, False])
    for used in patterns():
        offset, size = window(used)
        slots = [slot for slot, taken in enumerate(used) if taken]
        assert not slots or (offset, offset + size - 1) == (slots[0], slots[-1])


@slow
@given(st.lists(st.booleans(), max_size=300))
def test_larger_patterns(used: list[bool]) -> None:
    offset, moves = shuffle(used)
    assert (len(moves), offset) == brute_force(used)
    check(used)


@given(st.lists(st.booleans(), max_size=300))
@slow
def test_a_shuffled_region_is_left_alone(used: list[bool]) -> None:
    offset, _ = shuffle(used)
    tight = [offset <= slot < offset + sum(used) for slot in range(len(used))]
    again, moves = shuffle(tight)
    assert moves == []
    assert not any(used) or again == offset
    assert window(tight) == ((offset, sum(used)) if any(used) else (0, 0))
