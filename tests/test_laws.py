"""Laws hold on random programs, and a trace that is broken in one way is caught by the law meant for it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from simcore.machine import laws
from simcore.machine.machine import LawError
from simcore.machine.metrics import critical_path
from simcore.machine.trace import Cause, Gauge, Mark, Message, PricedOp, Span, Trace
from simcore.ops.op import Graph, Price
from simcore.sim.simulation import Simulation
from tests.programs import RandomProgram, random_programs, read_program, sends, toy_price, toys
from tests.thorough import examples, slow

NEAR = 1e-9
# A step that is far above rounding and below the shortest op.
STEP = 1e-3


def check_path(trace: Trace, mark: Mark) -> None:
    """From 0 to the mark, in order, without gap or overlap."""
    path = critical_path(trace, mark)
    assert sum(piece.end_s - piece.start_s for piece in path) == pytest.approx(mark.at_s, rel=NEAR, abs=NEAR)
    ends = [0.0, *(piece.end_s for piece in path)]
    starts = [*(piece.start_s for piece in path), mark.at_s]
    assert starts == pytest.approx(ends, rel=NEAR, abs=NEAR)


def test_laws_hold_on_random_programs() -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples(1000),
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(random_programs())
    def check(program: RandomProgram) -> None:
        trace = program.simulate()
        assert laws.violations(trace) == {}
        assert laws.digest(program.simulate()) == laws.digest(trace)
        for mark in trace.marks:
            check_path(trace, mark)
        seen["programs"] += 1
        seen.update({step.verb for step in program.steps})
        seen.update({span.state for span in trace.spans})
        seen.update(f"{len(program.mesh)} axes" for _ in range(1))
        seen.update({"shared"} if any(len(s.progress) > 2 for s in trace.spans) else ())
        seen.update({"takes"} if any(step.takes for step in program.steps) else ())

    check()
    # What the programs must have met often enough for the laws to mean something.
    for what in (
        "launch", "wait", "read", "pass on", "fed", "maybe", "stop", "spawn", "mark", "gauge",
        "run", "collective", "wire", "skipped", "1 axes", "2 axes", "shared", "takes",
    ):  # fmt: skip
        assert seen[what] >= examples(30), (what, seen)


# -- broken traces -------------------------------------------------------------------------------

Breaks = Callable[[Trace], Iterator[Trace]]
BREAKS: list[tuple[str, Breaks]] = []


def breaks(law: str) -> Callable[[Breaks], Breaks]:
    """Registers a way to break a trace, and the law that must see it."""

    def register(mutation: Breaks) -> Breaks:
        BREAKS.append((law, mutation))
        return mutation

    return register


def with_span(trace: Trace, span: Span) -> Trace:
    return replace(trace, spans=[span if s.id == span.id else s for s in trace.spans])


def received(trace: Trace) -> Iterator[tuple[int, int]]:
    """Indices of two messages of one inbox that were received one after the other, at different times."""
    inboxes: dict[tuple[int, str], list[int]] = {}
    for i, message in enumerate(trace.messages):
        inboxes.setdefault((message.rank, message.inbox), []).append(i)
    for indices in inboxes.values():
        for i, j in pairwise(indices):
            first, second = trace.messages[i].received_s, trace.messages[j].received_s
            if first is not None and second is not None and second > first:
                yield i, j


def with_messages(trace: Trace, changed: dict[int, Message]) -> Trace:
    return replace(trace, messages=[changed.get(i, m) for i, m in enumerate(trace.messages)])


@breaks("conservation")
def lost_message(trace: Trace) -> Iterator[Trace]:
    for i, _ in received(trace):
        yield with_messages(trace, {i: replace(trace.messages[i], received_s=None)})


@breaks("conservation")
def duplicated_message(trace: Trace) -> Iterator[Trace]:
    for message in trace.messages:
        yield replace(trace, messages=[*trace.messages, message])


@breaks("conservation")
def overtaking_message(trace: Trace) -> Iterator[Trace]:
    for i, j in received(trace):
        first, second = trace.messages[i], trace.messages[j]
        yield with_messages(
            trace,
            {
                i: replace(first, received_s=second.received_s),
                j: replace(second, arrived_s=first.arrived_s, received_s=first.received_s),
            },
        )


@breaks("causality")
def received_before_it_came(trace: Trace) -> Iterator[Trace]:
    for i, message in enumerate(trace.messages):
        if message.received_s is not None:
            yield with_messages(trace, {i: replace(message, arrived_s=message.received_s + STEP)})


@breaks("causality")
def started_before_issue(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        yield with_span(trace, replace(span, issued_s=span.start_s + STEP))


@breaks("causality")
def started_before_its_ticket(trace: Trace) -> Iterator[Trace]:
    spans = trace.by_id()
    for span in trace.spans:
        for ticket in span.after:
            if spans[ticket].end_s == span.start_s:
                yield with_span(trace, replace(spans[ticket], end_s=spans[ticket].end_s + STEP))


@breaks("causality")
def waits_for_a_span_that_is_not_there(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        yield with_span(trace, replace(span, after=(10**9,)))


@breaks("causality")
def started_before_its_cause(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        yield with_span(trace, replace(span, cause=replace(span.cause, at_s=span.start_s + STEP)))


@breaks("causality")
def cause_that_had_not_begun(trace: Trace) -> Iterator[Trace]:
    late = max(trace.spans, key=lambda span: span.start_s, default=None)
    for span in trace.spans:
        if late is not None and span.start_s < late.start_s - STEP:
            yield with_span(trace, replace(span, cause=Cause(late.id, span.start_s)))


@breaks("one at a time")
def overlapping_spans(trace: Trace) -> Iterator[Trace]:
    streams: dict[tuple[int, str], list[Span]] = {}
    for span in trace.spans:
        streams.setdefault((span.rank, span.stream), []).append(span)
    for spans in streams.values():
        for first, second in pairwise(sorted(spans, key=lambda s: (s.start_s, s.end_s, s.id))):
            if second.end_s > second.start_s:
                yield with_span(trace, replace(first, end_s=second.start_s + STEP))


@breaks("together")
def rank_that_is_late(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        if span.collective_id is not None:
            yield with_span(trace, replace(span, start_s=span.start_s + STEP, end_s=span.end_s + STEP))


@breaks("together")
def rank_that_begins_early(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        if span.collective_id is not None:
            yield with_span(trace, replace(span, start_s=span.start_s - STEP))


@breaks("together")
def rank_that_leaves_early(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        if span.collective_id is not None and span.end_s > span.start_s + STEP:
            yield with_span(trace, replace(span, end_s=span.end_s - STEP))


@breaks("together")
def rank_that_is_missing(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        if span.collective_id is not None:
            yield replace(trace, spans=[s for s in trace.spans if s.id != span.id])


def with_time(trace: Trace, wrong: float) -> Iterator[Trace]:
    """Each time of a span in turn."""
    for span in trace.spans:
        (first_s, _), *_, (_, last_work_s) = span.progress
        yield with_span(trace, replace(span, issued_s=wrong))
        yield with_span(trace, replace(span, start_s=wrong))
        yield with_span(trace, replace(span, end_s=wrong))
        yield with_span(trace, replace(span, progress=((wrong, 0.0), *span.progress[1:])))
        yield with_span(trace, replace(span, progress=(*span.progress[:-1], (wrong, last_work_s))))
        steps = ((first_s, 0.0), (first_s, 0.0), (wrong, last_work_s))
        yield with_span(trace, replace(span, progress=steps))


@breaks("clock")
def time_that_is_no_number(trace: Trace) -> Iterator[Trace]:
    yield from with_time(trace, math.nan)


@breaks("clock")
def time_that_never_comes(trace: Trace) -> Iterator[Trace]:
    yield from with_time(trace, math.inf)


@breaks("clock")
def time_before_the_start(trace: Trace) -> Iterator[Trace]:
    yield from with_time(trace, -STEP)


@breaks("clock")
def end_before_start(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        yield with_span(trace, replace(span, end_s=span.start_s - STEP, start_s=span.start_s))


@breaks("clock")
def progress_that_runs_back(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        (t0, w0), (t1, w1) = span.progress[0], span.progress[-1]
        if t1 > t0 and w1 > w0:
            yield with_span(trace, replace(span, progress=((t1, w0), (t0, w1))))
            yield with_span(trace, replace(span, progress=((t0, w1), (t1, w0))))
            yield with_span(trace, replace(span, progress=((t0, w0), (t1, math.inf))))


@breaks("roofline")
def faster_than_the_roofline(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        if any(priced.floor_s > STEP and priced.floor_s >= priced.price.seconds for priced in span.ops):
            start = span.start_s
            half = tuple((start + (t - start) / 3, work) for t, work in span.progress)
            # A third of the time: an op that others slow down to a half is too fast then, too.
            if len(span.progress) == 2 and span.end_s - start <= 1.01 * span.progress[-1][1]:
                yield with_span(trace, replace(span, end_s=half[-1][0], progress=half))


@breaks("roofline")
def faster_than_what_it_notes_of_its_work(trace: Trace) -> Iterator[Trace]:
    """A span of one op began late or ended early, and says that its work did not."""
    for span in trace.spans:
        if len(span.ops) == 1 and len(span.progress) == 2 and span.ops[0].floor_s > STEP:
            took_s = 0.9 * span.ops[0].floor_s
            yield with_span(trace, replace(span, start_s=span.end_s - took_s))
            yield with_span(trace, replace(span, end_s=span.start_s + took_s))


@breaks("roofline")
def one_op_of_many_faster_than_its_roofline(trace: Trace) -> Iterator[Trace]:
    for span in trace.spans:
        for i, (priced, start_s, end_s) in enumerate(span.op_times()):
            faster = replace(priced, floor_s=1.01 * (end_s - start_s) + STEP)
            yield with_span(trace, replace(span, ops=(*span.ops[:i], faster, *span.ops[i + 1 :])))


@breaks("roofline")
def an_op_whose_work_the_span_did_not_do(trace: Trace) -> Iterator[Trace]:
    """A span says that it did all work but that of its last op, in the time that this takes."""
    for span in trace.spans:
        if len(span.ops) < 2 or len(span.progress) != 2:
            continue
        last, ((t0, _), (t1, work_s)) = span.ops[-1], span.progress
        less_s = work_s - last.price.seconds
        if t1 - t0 <= 1.01 * work_s and less_s > STEP and last.floor_s > STEP:
            end_s = t0 + less_s
            yield with_span(trace, replace(span, end_s=end_s, progress=((t0, 0.0), (end_s, less_s))))


@breaks("capacity")
def level_above_its_limit(trace: Trace) -> Iterator[Trace]:
    for gauge in trace.gauges:
        for wrong in (gauge.limit + STEP, math.nan):
            changed = replace(gauge, value=wrong)
            yield replace(trace, gauges=[changed if g is gauge else g for g in trace.gauges])


def test_op_times_are_the_same_however_often_progress_is_noted(traces: list[Trace]) -> None:
    spans = [s for t in traces for s in t.spans if len(s.progress) == 2 and len(s.ops) > 1]
    assert len(spans) > 20
    for span in spans:
        (t0, w0), (t1, w1) = span.progress
        noted = replace(span, progress=((t0, w0), ((t0 + t1) / 2, (w0 + w1) / 2), (t1, w1)))
        for one, other in zip(span.op_times(), noted.op_times(), strict=True):
            assert one[0] is other[0]
            assert one[1:] == pytest.approx(other[1:], rel=1e-12)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        # As a real machine leaves it: all that is known is when it ended.
        ((), [(1.0, 5.0), (5.0, 5.0)]),
        (((1.0, 0.0),), [(1.0, 5.0), (5.0, 5.0)]),
        # It stood still for two seconds before its first op, which takes no time.
        (((1.0, 0.0), (3.0, 0.0), (5.0, 2.0)), [(1.0, 3.0), (3.0, 5.0)]),
    ],
)
def test_ops_of_a_span_whose_work_stands_still(progress: Any, expected: Any) -> None:
    took_s = (0.5, 2.0) if len(progress) < 2 else (0.0, 2.0)
    ops = tuple(
        PricedOp(toys("s", 1).ops[0], Price(each_s, each_s, each_s, "assumed", ""), 0.0) for each_s in took_s
    )
    span = Span(0, 0, 0, "main", "g", "run", 0.0, 1.0, 5.0, Cause(None, 0.0), (), ops, progress)
    assert [times for _, *times in span.op_times()] == [list(one) for one in expected]


def of_each_s(each_s: float, count: int, progress: tuple[tuple[float, float], ...]) -> Span:
    """A span of so many ops of equal length."""
    price = Price(each_s, each_s, each_s, "measured", "")
    ops = (PricedOp(toys("s", 1).ops[0], price, each_s),) * count
    when = (0.0, progress[0][0], progress[-1][0])
    return Span(0, 0, 0, "main", "g", "run", *when, Cause(None, 0.0), (), ops, progress)


def test_an_op_ends_when_its_work_is_done_and_the_next_one_waits() -> None:
    """Work stands still from 2 to 4, between two ops."""
    span = of_each_s(1.0, 2, ((1.0, 0.0), (2.0, 1.0), (4.0, 1.0), (5.0, 2.0)))
    assert [times for _, *times in span.op_times()] == [[1.0, 2.0], [2.0, 5.0]]


def test_the_last_op_ends_with_its_span_whatever_the_sum_of_all_is() -> None:
    assert sum([0.1] * 10) < 1.0
    for progress in (((0.0, 0.0), (1.0, 1.0)), ((0.0, 0.0), (0.5, 0.5), (1.0, 1.0))):
        *_, (_, _, end_s) = of_each_s(0.1, 10, progress).op_times()
        assert end_s == 1.0


def test_an_op_may_be_off_by_rounding_however_late_in_a_run() -> None:
    """After a day, of which doubles are good to 15 ps."""
    for off_s, holds in ((1e-8, True), (1e-3, False)):
        span = of_each_s(1.0, 1, ((86400.0, 0.0), (86401.0 - off_s, 1.0)))
        assert (laws.violations(Trace([span])) == {}) is holds


def test_a_short_op_may_be_off_by_no_more_than_rounding_of_a_millisecond() -> None:
    for off_s, holds in ((5e-13, True), (3e-12, False)):
        span = of_each_s(1e-4, 1, ((0.0, 0.0), (1e-4 - off_s, 1e-4)))
        assert (laws.violations(Trace([span])) == {}) is holds


def test_time_may_run_back_by_rounding_however_late_in_a_run() -> None:
    """And early in it, by that of a millisecond."""
    for at_s, back_s, holds in ((86400.0, 1e-8, True), (86400.0, 1e-3, False), (1e-3, 1e-11, False)):
        steps = ((at_s, 0.0), (at_s - back_s, 0.0), (at_s + 1.0, 1.0))
        assert (laws.violations(Trace([of_each_s(1.0, 1, steps)])) == {}) is holds


def good_traces() -> list[Trace]:
    return [read_program(Random(seed).randbytes(160)).simulate() for seed in range(36)]


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return good_traces()


@pytest.mark.parametrize(("law", "mutation"), BREAKS, ids=[mutation.__name__ for _, mutation in BREAKS])
def test_a_broken_trace_is_caught_by_its_law(traces: list[Trace], law: str, mutation: Breaks) -> None:
    tried = 0
    for number, trace in enumerate(traces):
        assert laws.violations(trace) == {}
        for broken, _ in zip(mutation(trace), range(8), strict=False):
            tried += 1
            assert law in laws.violations(broken), f"{mutation.__name__} of trace {number}"
            with pytest.raises(LawError):
                laws.enforce(broken)
    assert tried >= 6


def test_rounding_breaks_no_law(traces: list[Trace]) -> None:
    for trace in traces:
        spans = [
            replace(
                s,
                start_s=s.start_s * (1 - 1e-12),
                end_s=s.end_s * (1 + 1e-12),
                issued_s=s.issued_s * (1 + 1e-12),
            )
            for s in trace.spans
        ]
        assert laws.violations(replace(trace, spans=spans)) == {}


def test_time_may_run_back_by_rounding_before_any_work_is_done() -> None:
    for back_s, holds in ((1e-13, True), (1e-6, False)):
        span = of_each_s(1.0, 1, ((1.0, 0.0), (1.0 - back_s, 0.0), (2.0, 1.0)))
        assert (laws.violations(Trace([span])) == {}) is holds


def test_an_op_that_is_assumed_to_be_free_has_no_roofline(traces: list[Trace]) -> None:
    def assumed(span: Span) -> Span:
        ops = tuple(
            replace(p, floor_s=p.floor_s + 1.0, price=replace(p.price, source="assumed")) for p in span.ops
        )
        return replace(span, ops=ops)

    for trace in traces:
        assert laws.violations(replace(trace, spans=[assumed(span) for span in trace.spans])) == {}


def test_an_op_that_is_assumed_to_be_free_hides_none_behind_it(traces: list[Trace]) -> None:
    seen = 0
    for trace in traces:
        for span in trace.spans:
            if len(span.ops) < 2:
                continue
            first = replace(span.ops[0], price=replace(span.ops[0].price, source="assumed"))
            _, start_s, end_s = list(span.op_times())[-1]
            last = replace(span.ops[-1], floor_s=1.01 * (end_s - start_s) + STEP)
            broken = with_span(trace, replace(span, ops=(first, *span.ops[1:-1], last)))
            assert "roofline" in laws.violations(broken)
            seen += 1
    assert seen


@slow
def test_one_bit_of_difference_is_seen(traces: list[Trace]) -> None:
    seen = 0
    for trace in traces:
        digest = laws.digest(trace)
        bit = [
            *(with_span(trace, replace(s, end_s=math.nextafter(s.end_s, 2.0))) for s in trace.spans[:3]),
            *(
                with_messages(trace, {i: replace(m, arrived_s=math.nextafter(m.arrived_s, 2.0))})
                for i, m in enumerate(trace.messages[:3])
            ),
            *(
                replace(trace, gauges=[replace(g, value=math.nextafter(g.value, 99.0))])
                for g in trace.gauges[:1]
            ),
            *(
                replace(trace, marks=[replace(m, at_s=math.nextafter(m.at_s, 2.0)), *trace.marks[1:]])
                for m in trace.marks[:1]
            ),
        ]
        seen += len(bit)
        assert digest not in {laws.digest(changed) for changed in bit}
        assert laws.repeatable(lambda trace=trace: trace)  # type: ignore[misc]
        runs = iter([trace, *bit[:1]])
        assert not laws.repeatable(lambda runs=runs: next(runs))  # type: ignore[misc]
        assert not laws.repeatable(lambda trace=trace: trace, first=bit[0])  # type: ignore[misc]
    assert seen >= 100


def test_the_message_of_a_broken_law_names_the_first_and_counts_the_rest() -> None:
    gauges = [Gauge(0, "slots", float(i), 5.0, 4.0) for i in range(25)]
    with pytest.raises(LawError, match=r"capacity: rank 0: slots is 5.0, above 4.0.*and 22 more"):
        laws.enforce(Trace(gauges=gauges))


def test_a_level_at_its_limit_is_within_it_and_all_of_few_violations_are_told() -> None:
    assert laws.violations(Trace(gauges=[Gauge(0, "slots", 1.0, 4.0, 4.0)])) == {}
    for count, more in ((3, ""), (4, " and 1 more")):
        with pytest.raises(LawError) as raised:
            laws.enforce(Trace(gauges=[Gauge(0, "slots", float(i), 5.0, 4.0) for i in range(count)]))
        assert str(raised.value).endswith(f"above 4.0, at 2.0 s{more}")


def test_laws_do_not_ask_in_which_order_spans_were_noted(traces: list[Trace]) -> None:
    for trace in traces:
        noted = Random(len(trace.spans)).sample(trace.spans, len(trace.spans))
        assert laws.violations(replace(trace, spans=noted)) == {}


# -- critical paths ------------------------------------------------------------------------------


def test_a_put_that_waits_for_the_wire_is_waiting_for_the_put_before() -> None:
    """Ops of 1 on two streams, puts of 5 and 4: the second leaves at 6, the run ends at 10."""
    simulation = Simulation(toy_price)

    def program(m):  # type: ignore[no-untyped-def]
        m.launch(sends("s", 1, signal="first", put=5), stream="one")
        m.launch(sends("t", 1, signal="second", put=4), stream="two")
        done = m.launch(Graph("last", toys("op", 2).ops), after=[m.signal("second")])
        m.mark("end", [done])
        yield m.wait(done)

    trace = simulation.run(program)
    path = critical_path(trace, trace.marks[0])
    assert [piece.name for piece in path] == ["s", "s put", "t put", "op0"]
    assert [piece.end_s for piece in path] == pytest.approx([0.01, 0.06, 0.10, 0.12])
