"""Launches noted as rows: each law of them is broken by hand, and they are the spans of the same run.

Also what a burst tells of its kernels, on which its share of a device depends beside others.
"""

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf, nan
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.machine import laws
from simcore.machine.machine import Machine, Overheads, Program, Ticket, Wait
from simcore.machine.trace import ROW, Gauge, Rows, Trace
from simcore.ops.op import Graph, Op, Price, Size, SourceKind
from simcore.sim.bursts import Piece as Replays
from simcore.sim.clock import Clock
from simcore.sim.contention import Rates, alone, max_min_rates, shared_reads
from simcore.sim.graph_pricer import GraphPricer, PricedGroups
from simcore.sim.rows import RowLaunch
from simcore.sim.sharing import IDLE, Listed, Piece, SharedDevice
from simcore.sim.simulation import Simulation
from tests.programs import sends, toy, toy_price, toy_roofline, toys
from tests.thorough import examples

# launch, rank, stream, graph, issued, ready, start, end, work, floor, replays
GOOD = (
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 1.1, 1.0, 0.8, 1.0),
    (1.0, 0.0, 0.0, 0.0, 0.2, 1.1, 1.1, 3.1, 2.0, 2.0, 2.0),
    (2.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 2.5, 1.0, 0.5, 1.0),
    (3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 9.0, 9.0, 3.0),
)


def trace_of(rows: Sequence[Sequence[float]]) -> Trace:
    return Trace(rows=Rows(array("d", [value for row in rows for value in row])))


def with_value(row: int, column: str, value: float) -> Trace:
    rows = [list(values) for values in GOOD]
    rows[row][ROW.index(column)] = value
    return trace_of(rows)


def test_good_rows_break_no_law() -> None:
    assert laws.violations(trace_of(GOOD)) == {}


@pytest.mark.parametrize(
    ("row", "column", "value", "says"),
    [
        (0, "issued_s", 0.2, "launch 0 starts before it was issued"),
        (1, "ready_s", 1.2, "launch 1 starts before what it waits for has ended"),
        (2, "work_s", 2.1, "launch 2 takes less than its work does alone on the device"),
        (3, "end_s", 8.0, "launch 3 takes less than its work does alone on the device"),
        (0, "floor_s", 1.1, "launch 0 is faster than its roofline"),
        # However late in a run: neither is a time of a clock.
        (3, "floor_s", 9.0 + 5e-8, "launch 3 is faster than its roofline"),
        (0, "end_s", 1.3, "launches 0 and 1 of one stream overlap"),
        (3, "issued_s", -1e-3, "negative or not finite"),
        (3, "end_s", float("inf"), "negative or not finite"),
        (3, "work_s", float("nan"), "negative or not finite"),
    ],
)
def test_a_broken_row_is_told_and_no_other(row: int, column: str, value: float, says: str) -> None:
    found = laws.violations(with_value(row, column, value))
    assert list(found) == ["rows"]
    (message,) = found["rows"]
    assert says in message


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [(0, "issued_s", 0.1), (1, "ready_s", 1.1), (2, "work_s", 2.0), (0, "floor_s", 1.0), (1, "end_s", 3.1)],
)
@pytest.mark.parametrize(("off", "holds"), [(1e-12, True), (1e-7, False)])
def test_rows_may_be_off_by_rounding_alone(
    row: int, column: str, value: float, off: float, holds: bool
) -> None:
    """Of times of seconds, doubles are good to a picosecond; a tenth of a microsecond is an error."""
    changed = with_value(row, column, value - off if column == "end_s" else value + off)
    assert (laws.violations(changed) == {}) is holds


def test_rows_may_be_off_by_rounding_however_late_in_a_run() -> None:
    """After a day, of which doubles are good to 15 ps."""
    day_s = 86400.0
    rows = [
        (float(i), 0.0, 0.0, 0.0, day_s, day_s + i, day_s + i, day_s + i + 1.0 + off, 1.0, 1.0, 1.0)
        for i, off in enumerate((1e-8, -1e-8, 0.0))
    ]
    assert laws.violations(trace_of(rows)) == {}


def test_a_row_is_held_to_the_one_before_it_and_not_to_the_first() -> None:
    def follows(number: int, start_s: float, end_s: float) -> tuple[float, ...]:
        return (float(number), 0.0, 0.0, 0.0, 0.0, 0.0, start_s, end_s, 0.0, 0.0, 1.0)

    rows = [follows(0, 0.0, 1.0), follows(1, 1.0, 3.0), follows(2, 2.0, 4.0), follows(3, 4.0, 5.0)]
    assert laws.violations(trace_of(rows)) == {"rows": ["launches 1 and 2 of one stream overlap"]}


def test_streams_of_one_number_on_two_ranks_are_two() -> None:
    rows = [list(values) for values in GOOD]
    rows[3][ROW.index("stream")] = 1.0
    assert laws.violations(trace_of(rows)) == {}


# -- rows and spans of the same programs -----------------------------------------------------------------


def random_streams(seed: int, stopped: bool) -> Callable[[Machine], Program]:
    """Bursts on three streams, some of which wait for others, some of which may be stopped by what comes."""
    draws = Random(seed)
    plans = [
        (
            Graph(
                f"g{i}",
                tuple(
                    toy(f"op{i} {j}", draws.randint(1, 9), memory=draws.randint(0, 10) * 10,
                        compute=draws.randint(0, 10) * 10)
                    for j in range(draws.randint(1, 3))
                ),
            ),
            draws.choice("abc"),
            draws.randint(1, 5),
            draws.random() < 0.4,
            draws.random() < 0.3 and stopped,
        )
        for i in range(8)
    ]  # fmt: skip

    def program(m: Machine) -> Program:
        tickets = []
        for graph, stream, repeat, waits, stops in plans:
            after = [tickets[-1]] if waits and tickets else []
            until = "stops" if stops else None
            tickets.append(m.launch(graph, stream=stream, after=after, repeat=repeat, until=until))
            if stops:
                yield m.wait(tickets[-1])
        yield m.wait(*tickets)

    return program


@pytest.mark.parametrize(
    "rates", [alone, max_min_rates, shared_reads(0.05, 0.9, 0.002)], ids=["alone", "fair", "turns"]
)
@pytest.mark.parametrize("seed", range(10))
def test_rows_are_the_spans_of_the_same_run(seed: int, rates: Rates) -> None:
    """To 1 % where shares depend on demands, which rows tell apart in steps of a 512th; else to rounding,
    also where what comes ends a burst."""
    found = []
    for rows in (True, False):
        simulation = Simulation(
            toy_price, roofline=toy_roofline, rates=rates, rows=rows,
            overheads=Overheads(launch_s=1e-3, wait_s=5e-4, message_s=1e-4),
        )  # fmt: skip
        simulation.feed(0, "stops", [(0.1 * i, i) for i in range(30)])
        found.append(simulation.run(random_streams(seed, rates is alone)))
    table = found[0].rows.table()
    assert laws.violations(found[0]) == laws.violations(found[1]) == {}
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for span in found[1].spans:
        ends[span.launch] = max(ends.get(span.launch, 0.0), span.end_s)
        starts[span.launch] = min(starts.get(span.launch, np.inf), span.start_s)
    launches = table["launch"].astype(int).tolist()
    assert sorted(launches) == sorted(ends)
    within = 1e-9 if rates is alone else 1e-2
    assert table["end_s"].tolist() == pytest.approx([ends[i] for i in launches], rel=within)
    assert table["start_s"].tolist() == pytest.approx([starts[i] for i in launches], rel=within)


@pytest.mark.parametrize("wait_s", [0.0, 5e-4])
@pytest.mark.parametrize("seed", range(10))
def test_rows_are_the_same_bytes_event_by_event(seed: int, wait_s: float) -> None:
    """Costs are multiples of hundredths, so that much happens at the same moment."""

    def bytes_of() -> tuple[bytes, Rows]:
        simulation = Simulation(
            toy_price, roofline=toy_roofline, rates=alone, rows=True, overheads=Overheads(0.01, wait_s=wait_s)
        )
        simulation.feed(0, "stops", [(0.1 * i, i) for i in range(30)])
        rows = simulation.run(random_streams(seed, True)).rows
        return rows.numbers.tobytes(), replace(rows, numbers=array("d"))

    quick = bytes_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "try_advance", lambda *_: False)
        assert bytes_of() == quick
        patch.setattr(Clock, "can_hold_end", lambda _: False)
        assert bytes_of() == quick


@pytest.mark.parametrize("short_first", [True, False])
def test_a_wait_for_rows_ends_with_the_longest(short_first: bool) -> None:
    """Also where the one that was launched last, and ends first, is named first."""

    def program(m: Machine) -> Program:
        long = m.launch(toys("long", 50), stream="side")
        short = m.launch(toys("short", 1))
        yield m.wait(*((short, long) if short_first else (long, short)))
        assert long.is_done
        assert short.is_done
        assert m.now() >= 0.5

    simulation = Simulation(
        toy_price, roofline=toy_roofline, rates=alone, rows=True, overheads=Overheads(1e-3)
    )
    assert laws.violations(simulation.run(program)) == {}


def test_a_wait_for_a_row_and_a_signal_ends_with_the_signal() -> None:
    """Though the row, launched last and named first, could be worked off at once."""

    def program(m: Machine) -> Program:
        if m.rank:
            m.launch(sends("s", 50, signal="go"))
            yield m.wait()
        else:
            yield m.wait(m.launch(toys("short", 1)), m.signal("go", rank=1))
            assert m.now() >= 0.5

    Simulation(
        toy_price,
        mesh={"tensor": 2},
        roofline=toy_roofline,
        rates=alone,
        rows=True,
        overheads=Overheads(1e-3),
    ).run(program)


@pytest.mark.parametrize("launch_s", [0.0, 1e-3])
def test_what_is_stopped_just_after_its_launch_runs_at_most_once(launch_s: float) -> None:
    def program(m: Machine) -> Program:
        ticket = m.launch(toys("s", 10), repeat=9)
        ticket.stop()
        yield m.wait(ticket)
        assert ticket.ran <= 1
        assert m.now() <= 0.11

    simulation = Simulation(
        toy_price, roofline=toy_roofline, rates=alone, rows=True, overheads=Overheads(launch_s)
    )
    simulation.run(program)


def test_what_is_stopped_in_line_never_begins() -> None:
    """Behind a graph that runs on, and ends at its next boundary: what was stopped in line takes no time."""

    def program(m: Machine) -> Program:
        ticket = m.launch(toys("s", 10), repeat=9)
        queued = m.launch(toys("s", 10), repeat=5)
        yield m.recv("in", timeout_s=0.25)
        queued.stop()
        ticket.stop()
        yield m.wait(queued)
        yield m.wait(ticket)
        assert (ticket.ran, queued.ran) == (3, 0)
        assert m.now() == pytest.approx(0.3)

    simulation = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=True)
    assert laws.violations(simulation.run(program)) == {}


def test_what_is_stopped_as_it_begins_runs_as_often_beside_others_as_alone() -> None:
    ran = []
    for beside in (False, True):

        def program(m: Machine, beside: bool = beside) -> Program:
            if beside:
                m.launch(toys("long", 100), stream="side")
            yield m.recv("never", timeout_s=0.25)
            ticket = m.launch(toys("s", 10), repeat=3)
            ticket.stop()
            yield m.wait(ticket)
            ran.append((ticket.ran, m.now()))

        simulation = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=True)
        assert laws.violations(simulation.run(program)) == {}
    assert ran[0] == ran[1]
    assert ran[0][0] == 1
    assert ran[0][1] == pytest.approx(0.35)


def test_what_is_stopped_before_it_begins_leaves_nothing_behind() -> None:
    """A device begins half a second after it was given a graph: what was stopped until then runs not once,
    has no row, and does not slow what comes after it."""

    def program(m: Machine) -> Program:
        ticket = m.launch(toys("gone", 10, memory=100), stream="side", repeat=9)
        yield m.recv("never", timeout_s=0.25)
        ticket.stop()
        yield m.wait(ticket)
        assert (ticket.ran, m.now()) == (0, 0.25)
        yield m.wait(m.launch(toys("next", 50, memory=100)))
        assert m.now() == pytest.approx(0.25 + 0.5 + 0.5)

    simulation = Simulation(toy_price, roofline=toy_roofline, overheads=Overheads(start_s=0.5), rows=True)
    table = simulation.run(program).rows.table()
    assert table["end_s"].tolist() == pytest.approx([1.25])


def random_hosts(seed: int, *, stopping: bool = True) -> Callable[[Machine], Program]:
    """Host loops that launch and wait beside each other; some stop what another one waits for, wait for it
    too, let others come after it, send to it or look at what has come."""

    def loop(m: Machine, draws: Random, tickets: list[Ticket], streams: str) -> Program:
        for number in range(draws.randint(2, 6)):
            graph = toys(f"g{draws.randint(1, 4)}", draws.randint(1, 9))
            until = draws.choice([None, "stops"])
            after = draws.sample(tickets, min(len(tickets), draws.choice([0, 0, 0, 1])))
            ticket = m.launch(
                graph, stream=draws.choice(streams), repeat=draws.randint(1, 5), until=until, after=after
            )
            tickets.append(ticket)
            match draws.choice(
                ["wait", "wait", "wait", *["stop"] * stopping, "share", "send", "poll", "pause"]
            ):
                case "wait":
                    yield m.wait(ticket)
                case "stop":
                    draws.choice(tickets).stop()
                case "share":
                    yield m.wait(draws.choice(tickets))
                case "send":
                    m.send("stops", number, m.along("tensor", draws.randint(0, 1)))
                case "poll":
                    m.gauge("came", float(len(m.poll("stops"))), 99.0)
                case _:
                    yield m.recv("pause", timeout_s=draws.randint(0, 9) / 100)
            m.gauge("here", float(ticket.ran), 9.0)

    def program(m: Machine) -> Program:
        draws, tickets = Random(seed + m.rank), list[Ticket]()
        loops = [
            m.spawn(loop(m, Random(draws.random()), tickets, draws.choice(["a", "ab", "abc"])))
            for _ in range(draws.randint(0, 2))
        ]
        yield from loop(m, draws, tickets, "a")
        yield m.wait(*loops, *tickets)

    return program


def two_ranks(overheads: Overheads, rates: Rates, *, rows: bool) -> Simulation:
    """A machine that both hosts are told to stop on, now and then."""
    simulation = Simulation(
        toy_price, mesh={"tensor": 2}, roofline=toy_roofline, rates=rates, rows=rows, overheads=overheads
    )
    for rank in (0, 1):
        simulation.feed(rank, "stops", [(0.07 * i, i) for i in range(20)])
    return simulation


def hosts_of(seed: int) -> tuple[bytes, list[Gauge], float]:
    """What random hosts on two ranks leave behind."""
    draws = Random(seed)
    overheads = Overheads(draws.choice([0.0, 0.01]), wait_s=draws.choice([0.0, 0.005]))
    simulation = two_ranks(overheads, alone, rows=True)
    trace = simulation.run(random_hosts(seed))
    assert laws.violations(trace) == {}
    return trace.rows.numbers.tobytes(), trace.gauges, simulation.env.now


@pytest.mark.parametrize("seed", [7, 25, 47, *range(5)])
def test_hosts_wait_as_long_for_rows_as_for_spans(seed: int) -> None:
    """Beside each other on a device; by seeds that saw a launch begin on a device before others came."""
    found = []
    for rows in (True, False):
        draws = Random(seed)
        overheads = Overheads(draws.choice([0.007, 0.0113]), wait_s=draws.choice([0.0, 0.0053]))
        trace = two_ranks(overheads, max_min_rates, rows=rows).run(random_hosts(seed, stopping=False))
        found.append(sorted((gauge.rank, gauge.name, gauge.at_s) for gauge in trace.gauges))
    assert [one[:2] for one in found[0]] == [one[:2] for one in found[1]]
    assert [one[2] for one in found[0]] == pytest.approx([one[2] for one in found[1]], abs=1e-6)


@pytest.mark.parametrize("guessed", [None, 0, 10**6])
@pytest.mark.parametrize("seed", range(40))
def test_a_piece_knows_how_long_its_demand_stays_the_same(
    seed: int, guessed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside every replay by itself; also what grows much, shrinks, or asks for more than there is, and where
    the first guess is wrong."""
    if guessed is not None:
        monkeypatch.setattr(Replays, "_leaves", lambda *_: guessed)
    draws = Random(seed)
    count = draws.choice([1, 2, 7, 40, 300])
    seconds, floor_s = draws.uniform(0.1, 1.0), draws.random()
    # Up to a third more than there is.
    cost = seconds, floor_s, seconds * draws.uniform(0.0, 1.3), seconds * draws.uniform(0.0, 1.3)
    growth = tuple(draws.choice([0.0, 1e-6, 1e-3, -1e-4]) * draws.random() for _ in range(4))
    piece = Replays(0, count, 0.0, cost, growth)  # type: ignore[arg-type]
    every = [piece.demand_step(i) for i in range(count)]
    for i in range(0, count, max(1, count // 20)):
        last = i
        while last + 1 < count and every[last + 1] == every[i]:
            last += 1
        assert piece.last_like(i) == last


# First those that saw faults which others did not.
SEEDS = (16, 20, 86, 177, 940)


@pytest.mark.parametrize("seed", [*SEEDS, *range(examples(60))])
def test_hosts_that_work_events_off_leave_the_same_bytes(seed: int) -> None:
    quick = hosts_of(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "can_hold_end", lambda _: False)
        assert hosts_of(seed) == quick


@pytest.mark.parametrize("seed", [14, 26, 58, 1, 2])
def test_a_waiter_that_runs_at_once_leaves_the_same_bytes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that is woken in its turn; the first seeds have a launch stopped at the moment it begins."""
    found = hosts_of(seed)
    monkeypatch.setattr(RowLaunch, "finish_last", RowLaunch.finish)
    assert hosts_of(seed) == found


def test_a_host_works_events_off_where_it_waits_alone() -> None:
    """Not one event more than what is fed, however often that cuts a burst short."""
    came = [0.0]

    def program(m: Machine) -> Program:
        for _ in range(5):
            step = m.launch(toys("step", 3), repeat=50, until="stops")
            yield m.wait(step)
            came.append(m.now())
            m.poll("stops")

    simulation = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=True)
    simulation.feed(0, "stops", [(0.1 * (i + 1), i) for i in range(5)])
    events, timeout = [], simulation.env.timeout
    simulation.env.timeout = lambda *a: events.append(a) or timeout(*a)  # type: ignore
    simulation.run(program)
    assert came[1:] == pytest.approx([0.12, 0.21, 0.30, 0.42, 0.51])
    assert len(events) == 5


@pytest.mark.parametrize("rows", [True, False])
def test_what_only_waits_for_another_launch_takes_no_event_of_time(rows: bool) -> None:
    def program(m: Machine) -> Program:
        first = m.launch(toys("first", 50), stream="side")
        yield m.wait(m.launch(toys("second", 25), after=[first]))
        assert (m.now(), events) == (0.75, [])

    simulation = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=rows)
    events, timeout = list[Any](), simulation.env.timeout
    simulation.env.timeout = lambda *a: events.append(a) or timeout(*a)  # type: ignore
    simulation.run(program)


@pytest.mark.parametrize("hundredths", [(25, 75), (75, 25)])
@pytest.mark.parametrize("stream", ["main", "0", "1"])
def test_a_row_tells_when_the_last_of_what_it_waited_for_was_done(
    hundredths: tuple[int, int], stream: str
) -> None:
    """One of them was done before the launch, and one was not; its own stream may be that of either."""

    def program(m: Machine) -> Program:
        both = [m.launch(toys(f"g{i}", n), stream=str(i)) for i, n in enumerate(hundredths)]
        yield m.recv("never", timeout_s=0.5)
        yield m.wait(m.launch(toys("next", 25), stream=stream, after=both))

    trace = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=True).run(program)
    last = {name: column[-1] for name, column in trace.rows.table().items()}
    assert (last["ready_s"], last["start_s"], last["end_s"]) == (0.75, 0.75, 1.0)


@pytest.mark.parametrize("stopped", [False, True])
def test_to_come_after_what_is_done_already_changes_nothing_to_the_last_bit(stopped: bool) -> None:
    def left(*, ordered: bool) -> tuple[list[float], list[int]]:
        ran = []

        def program(m: Machine) -> Program:
            first = m.launch(toys("first", 7))
            yield m.wait(first)
            for _ in range(30):
                ticket = m.launch(toys("next", 3), repeat=3, after=[first] if ordered else [])
                if stopped:
                    ticket.stop()
                yield m.wait(ticket)
                ran.append(ticket.ran)

        simulation = Simulation(
            toy_price, roofline=toy_roofline, rates=alone, rows=True, overheads=Overheads(launch_s=0.0113)
        )
        return simulation.run(program).rows.numbers.tolist(), ran

    assert left(ordered=True) == left(ordered=False)


def test_hosts_begin_together() -> None:
    """Though each could work its launch off at once."""

    def program(m: Machine) -> Program:
        yield m.wait(m.launch(toys("g", 10 + m.rank), repeat=2))

    simulation = Simulation(toy_price, mesh={"tensor": 3}, roofline=toy_roofline, rates=alone, rows=True)
    assert simulation.run(program).rows.table()["start_s"].tolist() == [0.0] * 3


@pytest.mark.parametrize("woken", [1, 2])
def test_who_is_woken_beside_another_one_holds_nothing_back(woken: int) -> None:
    """What is worked off then would come before the other one's turn."""
    clock, asked = Clock(), []
    clock.timeout(1.0).callbacks += [lambda _: asked.append(clock.can_hold_end()) for _ in range(woken)]
    clock.run_all()
    assert asked == [woken == 1] * woken


def test_the_fault_of_one_host_is_not_raised_in_another_ones_wait() -> None:
    """The first works events off while it waits, the other one's among them."""

    def program(m: Machine) -> Program:
        if m.rank == 0:
            try:
                yield m.wait(m.launch(toys("long", 9), repeat=100))
            except ZeroDivisionError:
                return
        yield m.recv("nothing", timeout_s=0.1)
        assert 1 // 0

    simulation = Simulation(toy_price, mesh={"tensor": 2}, roofline=toy_roofline, rates=alone, rows=True)
    with pytest.raises(ZeroDivisionError):
        simulation.run(program)


@pytest.mark.parametrize("rows", [True, False])
def test_of_faults_at_one_moment_the_first_is_raised(rows: bool) -> None:
    """Also where a third host works the events off while it waits."""

    def program(m: Machine) -> Program:
        if m.rank == 0:
            yield m.wait(m.launch(toys("long", 9), repeat=100))
        yield m.recv("nothing", timeout_s=0.1)
        raise (KeyError, IndexError)[m.rank - 1](m.rank)

    simulation = Simulation(toy_price, mesh={"tensor": 3}, roofline=toy_roofline, rates=alone, rows=rows)
    with pytest.raises(KeyError):
        simulation.run(program)


def test_who_may_wait_for_ever_does_so() -> None:
    """Like one that nobody sends anything, but that it ends by itself."""

    def program(m: Machine) -> Program:
        found = yield m.recv("nothing", timeout_s=inf)
        assert found is None

    simulation = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=True)
    simulation.run(program)
    assert simulation.env.now == inf


@pytest.mark.parametrize("delay_s", [-1.0, nan])
def test_a_delay_that_is_none_is_refused(delay_s: float) -> None:
    with pytest.raises(ValueError, match="a delay of"):
        Clock().timeout(delay_s)


def receive(m: Machine) -> Program:
    yield m.recv("in")


def mark(m: Machine) -> Program:
    m.mark("here")
    yield m.recv("in")


def spawn(m: Machine) -> Program:
    yield m.wait(m.spawn(receive(m)))


def send(m: Machine) -> Program:
    m.send("out", 1, 0)
    yield m.recv("in")


def end(m: Machine) -> Program:
    yield from ()


def other(m: Machine) -> Program:
    yield m.wait(m.launch(toys("other", 200), stream="side"))


@pytest.mark.parametrize("then", [receive, mark, spawn, send, end, other])
def test_what_a_host_does_not_wait_for_runs_all_the_same(then: Callable[[Machine], Program]) -> None:
    """From the moment at which it was launched, whatever its host does next."""

    def program(m: Machine) -> Program:
        m.launch(toys("first", 5), repeat=2)
        yield from then(m)

    simulation = Simulation(toy_price, roofline=toy_roofline, rows=True, rates=alone)
    simulation.feed(0, "in", [(1.0, "item")])
    table = simulation.run(program).rows.table()
    assert (table["start_s"][0], table["end_s"][0]) == (0.0, pytest.approx(0.1))


def test_what_is_launched_before_a_loop_is_spawned_runs_whenever_its_host_waits() -> None:
    """Here both wait for something that the host began to receive before the launch."""

    def loop(item: Wait) -> Program:
        yield item

    def program(m: Machine) -> Program:
        item = m.recv("in")
        m.launch(toys("first", 5), repeat=2)
        m.spawn(loop(item))
        yield item

    simulation = Simulation(toy_price, roofline=toy_roofline, rows=True, rates=alone)
    simulation.feed(0, "in", [(1.0, "item")])
    assert simulation.run(program).rows.table()["start_s"].tolist() == [0.0]


@pytest.mark.parametrize("rows", [True, False])
@pytest.mark.parametrize("hundredths", [(3, 7), (7, 3), (5, 5)])
def test_a_host_that_waits_for_two_goes_on_when_both_are_done(
    hundredths: tuple[int, int], rows: bool
) -> None:
    went_on = []

    def program(m: Machine) -> Program:
        yield m.wait(
            *(m.launch(toys(name, n), stream=name) for name, n in zip("ab", hundredths, strict=True))
        )
        went_on.append(m.now())

    Simulation(toy_price, rows=rows).run(program)
    assert went_on == [pytest.approx(max(hundredths) / 100)]


# -- kernels of a burst ----------------------------------------------------------------------------------


def growing(kernels: int) -> Graph:
    return Graph("grows", tuple(toy(f"op{i}", Size("hundredths"), memory=50) for i in range(kernels)))


def by_hundredths(op: Op) -> Price:
    seconds = op["hundredths"] / 100
    return Price(seconds, seconds, seconds, "measured", "toy")


def test_kernels_in_a_second_alone_are_those_of_a_replay_over_its_time() -> None:
    """Replays of 4 kernels of 10, 11, 12 .. hundredths each: 4 kernels in 0.40, 0.44, 0.48 s."""
    work = GraphPricer(by_hundredths, toy_roofline).ramp(growing(4), {"hundredths": 10}, {"hundredths": 1}, 9)
    work.kernels, work.launch_s = 4, 0.02
    for replay in range(9):
        seconds = 4 * (0.10 + 0.01 * replay)
        found = work.demand(replay)
        assert found.kernels_per_s == pytest.approx(4 / seconds)
        assert found.launch == pytest.approx(0.02 / seconds)


@pytest.mark.parametrize("kernels", [1, 3, 12])
def test_many_small_kernels_stand_behind_long_ones(kernels: int) -> None:
    """In rounds of one kernel each with those of a whole second, however many of them are a replay."""
    small = toys("small", *(12 // kernels for _ in range(kernels)))
    long = toys("long", 100)

    def program(m: Machine) -> Program:
        m.launch(long, stream="side", repeat=200)
        yield m.wait(m.launch(small, repeat=10))

    rates = shared_reads(1e-9, 1.0, 1e-6)
    simulation = Simulation(toy_price, roofline=toy_roofline, rates=rates, rows=True)
    table = simulation.run(program).rows.table()
    end_s = float(table["end_s"][np.isclose(table["work_s"], 1.2)][0])
    # Ten replays of so many kernels, each of which waits for a long one.
    assert end_s == pytest.approx(10 * kernels * (1.0 + 0.12 / kernels), rel=1e-3)


@pytest.mark.parametrize("comes_s", [0.3, 0.4])
def test_what_is_cut_short_before_it_begins_puts_nobody_off(comes_s: float) -> None:
    """Something comes while the host still launches the second, or as it begins: the first ends at its time
    all the same."""

    def program(m: Machine) -> Program:
        first = m.launch(toys("first", 15), stream="side")
        yield m.wait(first, m.launch(toys("second", 10), repeat=3, until="in"))

    simulation = Simulation(
        toy_price, roofline=toy_roofline, overheads=Overheads(launch_s=0.2), rows=True, rates=alone
    )
    simulation.feed(0, "in", [(comes_s, "item")])
    table = simulation.run(program).rows.table()
    assert table["start_s"].tolist() == pytest.approx([0.2, 0.4])
    assert table["end_s"].tolist() == pytest.approx([0.35, 0.5])


def test_sources_of_prices_add_up_to_the_work_replay_by_replay() -> None:
    """Of each, 5 replays: 10 hundredths that were measured, and 3 that are assumed."""

    def price(op: Op) -> Price:
        return replace(toy_price(op), source="assumed" if op["hundredths"] == 3 else "measured")

    def program(m: Machine) -> Program:
        graph = toys("g", 3, 4, 6)
        yield m.wait(m.launch(graph, repeat=3))
        yield m.wait(m.launch(graph, repeat=2))

    trace = Simulation(price, roofline=toy_roofline, rows=True).run(program)
    assert trace.rows.sources == {"measured": pytest.approx(0.5), "assumed": pytest.approx(0.15)}

    def grows(m: Machine) -> Program:
        graph = Graph("grows", (toy("fixed", 3), toy("growing", Size("n"))))
        yield m.wait(m.launch(graph, sizes={"n": 4}, repeat=3))

    trace = Simulation(price, roofline=toy_roofline, rows=True).run(grows)
    assert trace.rows.sources == {
        "measured": pytest.approx(0.04 + 0.05 + 0.06),
        "assumed": pytest.approx(0.09),
    }


def test_what_runs_once_ends_at_its_price_to_the_last_bit_whatever_comes() -> None:
    """Also where it says that an item ends it; taken up again at the item, some ends would be rounded."""
    for hundredths, comes in product((11, 21, 29), range(1, 10)):

        def program(m: Machine, hundredths: int = hundredths) -> Program:
            yield m.wait(m.launch(toys("g", hundredths), until="stops"))

        simulation = Simulation(toy_price, roofline=toy_roofline, rates=alone, rows=True)
        simulation.feed(0, "stops", [(comes / 100, "item")])
        assert simulation.run(program).rows.table()["end_s"].tolist() == [hundredths / 100]


def curved(op: Op) -> Price:
    """As prices between measured points are."""
    seconds = 1e-3 * op["hundredths"] ** 1.3
    return Price(seconds, seconds, seconds, "measured", "toy")


def test_a_single_replay_costs_its_price_however_that_bends() -> None:
    """Bursts take a curve as short lines; one replay is no burst."""
    graph_pricer = GraphPricer(curved, toy_roofline)
    for size in (5, 77, 1001, 5000, 70_003):
        assert graph_pricer.ramp(growing(1), {"hundredths": size}, None, 1).total_s == 1e-3 * size**1.3


def test_once_settled_prices_do_not_depend_on_what_was_asked_before() -> None:
    """A graph whose price bends here and not there is taken the same, whichever is asked for first."""

    def bends_late(op: Op) -> Price:
        size = op["hundredths"]
        return curved(op) if size > 1000 else by_hundredths(op)

    sizes = (40, 70_000)
    found = []
    for order in (sizes, sizes[::-1]):
        graph_pricer = GraphPricer(bends_late, toy_roofline)
        graph_pricer.settle()
        # One graph, whose groups are first seen once prices are settled.
        graph = growing(2)
        total_s = {
            size: graph_pricer.ramp(graph, {"hundredths": size}, {"hundredths": 1}, 20).total_s
            for size in order
        }
        found.append([total_s[size] for size in sizes])
    assert found[0] == found[1]


def kinked(op: Op) -> Price:
    """A ten-thousandth more from 48 and from 96 on: lines of their own, which a curve takes as one."""
    size = op["hundredths"]
    seconds = 1e-3 * size * (1.0001 if size >= 96 else 1.00005 if size >= 48 else 1.0)
    return Price(seconds, seconds, seconds, "measured", "toy")


def of_kinked(since: int, until: int, price: Callable[[Op], Price] = kinked) -> float:
    """Seconds at all sizes from `since` to before `until`."""
    return sum(price(toy("x", size)).seconds for size in range(since, until))


def bends_within(low: float, high: float) -> Callable[[Op], Price]:
    """Kinked, and a curve between two sizes."""
    return lambda op: curved(op) if low <= op["hundredths"] < high else kinked(op)


def test_settled_prices_are_curves_only_where_they_are() -> None:
    """Lines near sizes that were no curve before stay exact, whatever is read after."""
    graph_pricer = GraphPricer(bends_within(1000, inf), toy_roofline)
    before, after = growing(1), growing(1)

    def total_s(graph: Graph, size: int) -> float:
        return graph_pricer.ramp(graph, {"hundredths": size}, {"hundredths": 1}, 20).total_s

    assert total_s(before, 40) == pytest.approx(of_kinked(40, 60), rel=1e-9)
    graph_pricer.settle()
    for graph in (before, after):
        total_s(graph, 70_000)
        assert total_s(graph, 90) == pytest.approx(of_kinked(90, 110), rel=1e-9)
    assert total_s(after, 40) == pytest.approx(of_kinked(40, 60), rel=1e-9)


@pytest.mark.parametrize(("low", "high", "exact"), [(1000, 100_000, True), (131_072, inf, False)])
def test_prices_probed_at_long_contexts_are_curves_everywhere_or_nowhere(
    low: float, high: float, exact: bool
) -> None:
    """From 131,072 on a bend counts; between, and whatever is read first, it does not."""
    for sizes in ((40, 70_000), (70_000, 40)):
        graph_pricer = GraphPricer(bends_within(low, high), toy_roofline)
        graph_pricer.settle_by_probes()
        graph = growing(1)
        total_s = {
            size: graph_pricer.ramp(graph, {"hundredths": size}, {"hundredths": 1}, 20).total_s
            for size in sizes
        }
        plain_s = of_kinked(40, 60)
        assert (total_s[40] == pytest.approx(plain_s, rel=1e-9)) == exact
        assert total_s[40] == pytest.approx(plain_s, rel=6e-4)


def in_two(name: str = "pair") -> Graph:
    """An op that reads two sizes."""
    plain = toy(name, Size("hundredths"), memory=50)
    return Graph("two", (replace(plain, shape=(*plain.shape, ("rows", Size("rows")))),))


def test_the_probe_is_of_some_sequences_and_not_of_none() -> None:
    """Without rows the price is no curve, with rows it is."""

    def price(op: Op) -> Price:
        return curved(op) if op["hundredths"] > 1000 and op["rows"] else kinked(op)

    graph_pricer = GraphPricer(price, toy_roofline)
    graph_pricer.settle_by_probes()
    sizes = {"hundredths": 40, "rows": 3}
    total_s = graph_pricer.ramp(in_two(), sizes, {"hundredths": 1}, 20).total_s
    assert total_s != pytest.approx(of_kinked(40, 60), rel=1e-9)


def test_that_prices_are_curves_is_found_out_once_and_only_where_they_are_read() -> None:
    """For all values of what does not grow; a second burst in the same power of two asks for nothing."""
    asked: list[int] = []

    def price(op: Op) -> Price:
        asked.append(op["hundredths"])
        return curved(op)

    def asks(size: int, rows: int) -> int:
        asked.clear()
        graph_pricer.ramp(graph, {"hundredths": size, "rows": rows}, {"hundredths": 1}, 20)
        return len(asked)

    groups, graph = PricedGroups(price, toy_roofline), in_two()
    graph_pricer = GraphPricer(price, toy_roofline, groups=groups)
    first = asks(5000, 1)
    assert 4096 <= min(asked) <= max(asked) < 8192
    (known,) = groups.known.values()
    places = set(known.lines)
    assert asks(5001, 1) == 0
    # Nor does another pricer that knows what this one found.
    other = GraphPricer(price, toy_roofline, groups=groups)
    other.ramp(graph, {"hundredths": 5002, "rows": 1}, {"hundredths": 1}, 20)
    assert set(known.lines) == places
    assert 0 < asks(5000, 2) < first / 5
    assert 0 < asks(10_000, 1) < first / 5


@pytest.mark.parametrize("replays", range(1, 12))
@pytest.mark.parametrize("advance", [None, 1, 3, -1])
def test_a_burst_ends_where_its_price_jumps(replays: int, advance: int | None) -> None:
    """At a power of two, and within one: whatever of it lies beyond is priced there."""

    def price(op: Op) -> Price:
        size = op["hundredths"]
        seconds = 1e-3 * size * (1.0 if size < 48 else 2.0 if size < 64 else 5.0)
        return Price(seconds, seconds, seconds, "measured", "toy")

    graph_pricer, graph = GraphPricer(price, toy_roofline), growing(1)
    by = 1 if advance is None else advance
    for begin in (42, 58, 66, 52):
        sizes = [begin + i * by for i in range(replays)]
        found = graph_pricer.ramp(
            graph, {"hundredths": begin}, None if advance is None else {"hundredths": by}, replays
        )
        assert found.total_s == pytest.approx(sum(price(toy("x", size)).seconds for size in sizes))


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_a_burst_has_the_source_of_most_of_its_price(size: int) -> None:
    """Of two ops at its first size: of one that takes longer, and of one that is measured at size 1 alone."""

    def price(op: Op) -> Price:
        long = op.name == "op1"
        known: SourceKind = "measured" if op["hundredths"] < 2 else "extrapolated"
        seconds = 1e-3 * op["hundredths"] * (3.0 if long else 1.0)
        return Price(seconds, seconds, seconds, known if long else "roofline", "toy")

    cost = GraphPricer(price, toy_roofline).ramp(growing(2), {"hundredths": size}, {"hundredths": 1}, 5)
    sources: dict[SourceKind, float] = {}
    cost.origin.count(cost.total_s, 5, sources)
    assert sources == {"measured" if size == 1 else "extrapolated": pytest.approx(cost.total_s)}


def test_two_sizes_of_one_op_grow_beside_one_that_does_not() -> None:
    def price(op: Op) -> Price:
        seconds = 1e-6 * op["hundredths"] * op["rows"] * op["width"]
        return Price(seconds, seconds, seconds, "measured", "toy")

    plain = in_two().ops[0]
    graph = Graph("three", (replace(plain, shape=(*plain.shape, ("width", Size("width")))),))
    sizes = {"hundredths": 40, "rows": 3, "width": 7}
    found = GraphPricer(price, toy_roofline).ramp(graph, sizes, {"hundredths": 1, "rows": 2}, 9)
    assert found.total_s == pytest.approx(sum(1e-6 * (40 + i) * (3 + 2 * i) * 7 for i in range(9)))


# -- boundaries ------------------------------------------------------------------------------------------


def pieces(ends: list[float], finish: Callable[[], None] = lambda: None) -> Piece:
    """Work whose replays end so, and that asks for nothing."""
    return Piece(Listed(ends, [IDLE] * len(ends)), finish, print, deque())


@pytest.mark.parametrize("apart", [1e-3, 1e-6, 1e-8])
def test_what_is_further_apart_than_rounding_is_not_taken_as_one(apart: float) -> None:
    """Pieces that end within a hundred-millionth of each other end one after the other, each at its time."""
    device, ends = SharedDevice(alone), dict[str, float]()
    clock = [0.0]
    for name, work_s in (("first", 1.0), ("second", 1.0 + apart)):
        device.start(pieces([work_s], partial(lambda n: ends.update({n: clock[0]}), name)), 0.0)
    while device.running:
        clock[0], piece = device.next_due()
        device.arrive(piece, clock[0])
    assert list(ends) == ["first", "second"]
    assert ends["second"] - ends["first"] == pytest.approx(apart, rel=1e-4)


@pytest.mark.parametrize("past", [1e-2, 1e-6, 1e-8])
def test_a_stop_just_past_a_boundary_lets_the_next_replay_end(past: float) -> None:
    """And one just before a boundary, or on it, ends there."""
    for stopped_s, ran in ((1.0 - past, 1), (1.0, 1), (1.0 + past, 2)):
        device = SharedDevice(alone)
        piece = pieces([1.0, 2.0, 3.0])
        device.start(piece, 0.0)
        device.stop(piece, stopped_s)
        assert piece.work.replays == ran
        assert device.next_due()[0] == pytest.approx(ran, abs=1e-12)


@pytest.mark.parametrize("begun_s", [0.0, 1e3, 1e5])
def test_a_stop_on_a_boundary_lets_no_further_replay_end_however_late_in_a_run(begun_s: float) -> None:
    """Times of a clock that has run for a day are good to a hundred-thousandth of a microsecond."""
    for tenths in range(1, 100):
        device = SharedDevice(alone)
        piece = pieces([0.1 * (i + 1) for i in range(100)])
        device.start(piece, begun_s)
        device.stop(piece, begun_s + 0.1 * tenths)
        assert piece.work.replays == tenths


def test_a_piece_that_is_told_nothing_for_its_last_end_ends_as_ever() -> None:
    said = list[str]()
    for last in (None, lambda: said.append("last")):
        Piece(Listed([1.0], [IDLE]), lambda: said.append("ends"), print, deque(), last).finish_last()
    assert said == ["ends", "last"]
