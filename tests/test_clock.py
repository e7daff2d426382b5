"""The event clock: what it leaves out, nobody could have told."""

import math
from collections.abc import Callable

import pytest
import simpy
from hypothesis import given, settings

from simcore.machine import laws
from simcore.sim.clock import Clock
from tests.programs import RandomProgram, random_programs
from tests.thorough import examples, slow

fixed = settings(derandomize=True, database=None)


@slow
@settings(fixed, max_examples=examples(400))
@given(program=random_programs())
def test_random_programs_leave_the_same_bytes_event_by_event(program: RandomProgram) -> None:
    """Costs are multiples of hundredths, so that much happens at the same moment."""
    quick = laws.digest(program.simulate())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "try_advance", lambda *_: False)
        assert laws.digest(program.simulate()) == quick


def test_the_clock_goes_on_at_once_only_up_to_the_next_event() -> None:
    clock, seen = Clock(), list[tuple[bool, float]]()

    def steps() -> simpy.events.ProcessGenerator:
        yield clock.timeout(1.0)
        # At 3 something else is due: not before, not at the same time.
        for delay_s in (math.nextafter(2.0, 0.0) - 1.0, 2.0, 2.5, 0.5):
            seen.append((clock.try_advance(delay_s), clock.now))

    clock.drive(steps())
    clock.timeout(3.0)
    clock.run_all()
    assert [went for went, _ in seen] == [True, False, False, True]
    assert seen[-1][1] == pytest.approx(2.5)
    assert clock.now == 3.0


@pytest.mark.parametrize("wrong", [None, 3, "a ticket"])
def test_what_is_yielded_and_is_no_wait_is_told(wrong: object) -> None:
    clock = Clock()

    def steps() -> simpy.events.ProcessGenerator:
        yield wrong  # type: ignore[misc]

    clock.drive(steps())
    with pytest.raises(RuntimeError, match="is yielded, which is no wait"):
        clock.run_all()


def test_whoever_is_woken_beside_others_takes_no_time_before_them() -> None:
    clock, order = Clock(), list[str]()
    event = clock.event()

    def steps(name: str) -> simpy.events.ProcessGenerator:
        yield event
        order.append(name)
        if not clock.try_advance(0.0):
            yield clock.timeout(0.0)
        order.append(name.upper())

    for name in ("a", "b"):
        clock.drive(steps(name))
    event.succeed()
    clock.run_all()
    assert order == ["a", "b", "A", "B"]


def test_what_steps_return_comes_to_whoever_waits_for_them() -> None:
    clock, found = Clock(), list[object]()

    def inner() -> simpy.events.ProcessGenerator:
        yield clock.timeout(2.0)
        return 7

    def outer() -> simpy.events.ProcessGenerator:
        found.append((yield clock.result(inner())))
        found.append(clock.now)

    clock.drive(outer())
    clock.run_all()
    assert found == [7, 2.0]


def test_errors_of_steps_are_raised_and_no_delay_is_negative() -> None:
    clock = Clock()

    def steps() -> simpy.events.ProcessGenerator:
        yield clock.timeout(1.0)
        raise KeyError("broken")

    clock.drive(steps())
    with pytest.raises(KeyError, match="broken"):
        clock.run_all()
    with pytest.raises(ValueError, match="a delay of -"):
        clock.timeout(-1.0)


@pytest.mark.parametrize("begun_s", [0.0, 3.0])
def test_processes_of_simpy_begin_when_they_are_started(begun_s: float) -> None:
    """Also before the clock runs, which then stands at 0."""
    clock, seen = Clock(), list[float]()

    def process() -> simpy.events.ProcessGenerator:
        seen.append(clock.now)
        yield clock.timeout(2.0)
        seen.append(clock.now)

    if begun_s:
        clock.call(begun_s, lambda: clock.process(process()))
    else:
        clock.process(process())
    clock.run_all()
    assert seen == [begun_s, begun_s + 2.0]


@pytest.mark.parametrize("wake", [Clock.succeed, Clock.succeed_and_run])
def test_when_several_were_woken_the_clock_goes_on_at_once_again(
    wake: Callable[[Clock, simpy.Event], None],
) -> None:
    clock, went = Clock(), list[bool]()
    event = clock.event()
    for _ in range(2):
        event.callbacks.append(lambda _: went.append(clock.try_advance(0.0)))
    clock.call(1.0, lambda: wake(clock, event))
    clock.call(2.0, lambda: went.append(clock.try_advance(0.5)))
    clock.run_all()
    assert went == [False, False, True]


def test_nobody_advances_to_a_held_end_or_past_it() -> None:
    clock, went = Clock(), list[bool]()
    clock.call(0.25, lambda: went.extend(clock.try_advance(delay_s) for delay_s in (0.25, 0.5, 2.0, 0.125)))
    clock.hold_end(0.5)
    assert clock.run_to_held_end()
    assert went == [False, False, False, True]
    assert clock.now == 0.5


def test_where_an_event_fails_a_held_end_is_not_reached() -> None:
    """Nor does time go on before the error is raised, as the first thing of its moment."""
    clock, said = Clock(), list[str]()

    def fails() -> None:
        clock.call(0.0, lambda: said.append("another"))
        raise KeyError("broken")

    clock.call(0.25, fails)
    clock.hold_end(0.5)
    assert not clock.run_to_held_end()
    assert clock.now == 0.25
    with pytest.raises(KeyError, match="broken"):
        clock.run_all()
    assert (clock.now, said) == (0.25, [])
