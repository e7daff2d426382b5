"""The schedules of the serving study: worked by hand, against each other, and launch by launch.

Unit prices make an iteration take one second, so that times can be told without a simulator; random
scenarios run on a roofline device, under every law that a serving run has to keep.
"""

import heapq
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from simcore.devices.price import pricer, roofline
from simcore.devices.spec import load_device
from simcore.machine.machine import Machine, Overheads, Program
from simcore.machine.trace import Trace
from simcore.models.decoder_config import DecoderConfig, load_config
from simcore.models.served_decoder import ServedDecoder
from simcore.ops.op import Op, Price, Pricer, Roofline
from simcore.schedules.concurrent_instances import concurrent_instances
from simcore.schedules.continuous_batching import continuous_batching
from simcore.schedules.dynamic_batching import bursts, dynamic_batching, fitting
from simcore.schedules.iteration_batching import iteration_batching
from simcore.schedules.temporal_fusion import place, temporal_fusion
from simcore.sim.contention import Rates, alone, max_min_rates, shared_reads, throughput
from simcore.sim.simulation import Simulation, no_floor
from simcore.studies.serving import laws
from simcore.studies.serving.served import served
from simcore.workload.requests import END, REQUESTS, STEP, Journal, Request
from tests.thorough import first, slow

MODELS = Path(__file__).parent.parent / "scenarios" / "models"
TINY = DecoderConfig("tiny", 8, 16, 1, 2, 2, 4, 32, False)
WHOLE, STEPWISE = ServedDecoder(TINY, whole=True), ServedDecoder(TINY)
# A slot, and a KV cache, that nothing is too long for.
ROOM = 10_000
COPY_S = 0.25
Schedule = Callable[[Machine, ServedDecoder, Journal], Program]


def unit_price(op: Op, prompt_s: float = 0.0) -> Price:
    """A second an iteration; `prompt_s` a prompt where it is an op; 0.25 s a copied slot of `ROOM` tokens."""
    seconds = {"iteration": 1.0, "embedding": 1.0, "pre_processing": prompt_s}.get(op.kind, 0.0)
    if op.kind == "kv_copy":
        seconds = op["tokens"] / ROOM * COPY_S
    return Price(seconds, seconds, seconds, "assumed", "unit")


def fusion(
    slots: int = 4, slot_tokens: int = ROOM, shuffle: bool = True, prompt_streams: int = 1
) -> Schedule:
    return partial(
        temporal_fusion, slots=slots, slot_tokens=slot_tokens, shuffle=shuffle, prompt_streams=prompt_streams
    )


def dynamic(window_s: float, max_batch: int = 4, capacity: int = 10 * ROOM) -> Schedule:
    return partial(dynamic_batching, window_s=window_s, max_batch=max_batch, capacity=capacity)


def instances(
    max_instances: int = 4, slot_tokens: int | None = None, prompt_streams: int | None = 1
) -> Schedule:
    return partial(
        concurrent_instances,
        max_instances=max_instances,
        slot_tokens=slot_tokens,
        prompt_streams=prompt_streams,
    )


def orca(max_batch: int = 4, slot_tokens: int = ROOM) -> Schedule:
    return partial(iteration_batching, max_batch=max_batch, slot_tokens=slot_tokens)


def request(number: int, arrival_s: float, output: int, prompt: int = 4, most: int | None = None) -> Request:
    return Request(number, arrival_s, prompt, output, output if most is None else most)


def requests(*spelled: tuple[float, int]) -> list[Request]:
    """Requests of (arrival_s, output tokens)."""
    return [request(i, arrival_s, output) for i, (arrival_s, output) in enumerate(spelled)]


@dataclass(frozen=True, slots=True)
class Served:
    """A run: its requests, the journal's columns, the launches as they were asked for, the trace."""

    requests: list[Request]
    steps: Mapping[str, np.ndarray[Any, Any]]
    launches: list[dict[str, Any]]
    trace: Trace

    def times(self) -> list[tuple[float, float, float]]:
        """(scheduled_s, first_token_s, finish_s) of each request."""
        return [(r.scheduled_s, r.first_token_s, r.finish_s) for r in self.requests]

    def rows(self, *columns: str) -> list[tuple[float, ...]]:
        """Columns of the journal, step by step."""
        return list(zip(*(self.steps[column].tolist() for column in columns), strict=True))

    def sizes(self, graph: str, name: str) -> list[int]:
        """A size of every launch of a graph."""
        return [launch["sizes"][name] for launch in self.launches if launch["graph"] == graph]


class Recorder:
    """A machine that writes down what is launched."""

    def __init__(self, machine: Machine, launches: list[dict[str, Any]]) -> None:
        self.machine = machine
        self.launches = launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def launch(self, graph: Any, **how: Any) -> Any:
        self.launches.append({"graph": graph.name, "stream": "main", **how})
        return self.machine.launch(graph, **how)


def serve(
    schedule: Schedule,
    wanted: Sequence[Request],
    model: ServedDecoder = WHOLE,
    *,
    price: Pricer = unit_price,
    floor: Roofline = no_floor,
    rates: Rates = alone,
    overheads: Overheads | None = None,
    wrap: Callable[[Machine], Machine] = lambda m: m,
    rows: bool = True,
    end_after_s: float = 0.0,
) -> Served:
    """Runs a schedule on copies of the requests; END comes with the last of them, or so much later."""
    journal, launches = Journal(), list[dict[str, Any]]()
    own = [replace(r) for r in wanted]
    simulation = Simulation(
        price,
        mesh={"tensor": model.ranks},
        roofline=floor,
        rates=rates,
        overheads=overheads,
        lockstep=("tensor",),
        rows=rows,
    )
    end_s = max((r.arrival_s for r in own), default=0.0) + end_after_s
    simulation.feed(0, REQUESTS, [*((r.arrival_s, r) for r in own), (end_s, END)])
    trace = simulation.run(lambda m: schedule(Recorder(wrap(m), launches), model, journal))
    return Served(own, journal.table(), launches, trace)


# -- by hand -----------------------------------------------------------------------------------------

NAN = float("nan")
# strategy, model, requests (arrival_s, tokens): (scheduled_s, first_token_s, finish_s) of each
BY_HAND = {
    # A from 0; B joins at 1 and C waits for a slot until both are complete, at 3.
    "fusion": (
        fusion(slots=2),
        WHOLE,
        [(0.0, 3), (0.5, 2), (0.7, 1)],
        [(0.0, 1.0, 3.0), (0.5, 2.0, 3.0), (3.0, 4.0, 4.0)],
    ),
    # Prompts take a second beside the generation: B's, begun at 0.5, misses the iteration from 1 on.
    "fusion, prompts": (
        fusion(slots=2),
        STEPWISE,
        [(0.0, 3), (0.5, 2)],
        [(0.0, 2.0, 4.0), (0.5, 3.0, 4.0)],
    ),
    # The window is from 0 to 2, the batch ends with A; C's window is over before that.
    "dynamic": (
        dynamic(window_s=2.0),
        STEPWISE,
        [(0.0, 3), (1.0, 1), (2.5, 2)],
        [(2.0, 3.0, 5.0), (2.0, 3.0, 3.0), (5.0, 6.0, 7.0)],
    ),
    "dynamic, whole": (
        dynamic(window_s=2.0),
        WHOLE,
        [(0.0, 3), (1.0, 1), (2.5, 2)],
        [(2.0, 3.0, 5.0), (2.0, 3.0, 3.0), (5.0, 6.0, 7.0)],
    ),
    # Flover, Figure 1 (a): who comes at the start of a window of 500 ms waits for all of it; who comes at
    # 510 ms waits for the batch that runs.
    "dynamic, Figure 1": (
        dynamic(window_s=0.5),
        WHOLE,
        [(0.0, 4), (0.2, 4), (0.4, 4), (0.51, 4)],
        [(0.5, 1.5, 4.5), (0.5, 1.5, 4.5), (0.5, 1.5, 4.5), (4.5, 5.5, 8.5)],
    ),
    # A full batch waits for nothing; who is left waits for the rest of its own window after the batch.
    "dynamic, full": (
        dynamic(window_s=3.0, max_batch=2),
        WHOLE,
        [(0.0, 1), (1.0, 1), (1.5, 1)],
        [(1.0, 2.0, 2.0), (1.0, 2.0, 2.0), (4.5, 5.5, 5.5)],
    ),
    # Room for one at a time.
    "dynamic, capacity": (
        dynamic(window_s=9.0, capacity=6),
        WHOLE,
        [(0.0, 2), (1.0, 2)],
        [(1.0, 2.0, 3.0), (10.0, 11.0, 12.0)],
    ),
    "instances": (
        instances(max_instances=2),
        WHOLE,
        [(0.0, 3), (1.0, 2), (1.5, 1)],
        [(0.0, 1.0, 3.0), (1.0, 2.0, 3.0), (3.0, 4.0, 4.0)],
    ),
    "instances, prompts": (
        instances(max_instances=1),
        STEPWISE,
        [(0.0, 3), (1.0, 1)],
        [(0.0, 1.0, 3.0), (3.0, 4.0, 4.0)],
    ),
    # A's prompt, A and B's prompt, both, B and C's prompt, C.
    "iterations": (
        orca(max_batch=2),
        STEPWISE,
        [(0.0, 3), (0.5, 3), (0.6, 3)],
        [(0.0, 1.0, 3.0), (1.0, 2.0, 4.0), (3.0, 4.0, 6.0)],
    ),
    "iterations, whole": (
        orca(max_batch=2),
        WHOLE,
        [(0.0, 3), (0.5, 3), (0.6, 3)],
        [(0.0, 1.0, 3.0), (1.0, 2.0, 4.0), (3.0, 4.0, 6.0)],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_times_are_those_worked_by_hand(name: str) -> None:
    schedule, model, spelled, expected = BY_HAND[name]
    run = serve(schedule, requests(*spelled), model)
    assert np.array(run.times()) == pytest.approx(np.array(expected), abs=1e-12)


def test_two_instances_at_once_run_at_half_speed() -> None:
    """A has two seconds of work left when B, with two, comes: both end at 5."""
    run = serve(instances(2), requests((0.0, 3), (1.0, 2), (1.5, 1)), rates=throughput(0.0))
    assert run.times() == [(0.0, 1.0, 5.0), (1.0, 3.0, 5.0), (5.0, 6.0, 6.0)]


def test_a_batch_is_noted_at_each_length_and_computed_to_the_end() -> None:
    run = serve(dynamic(1.0, max_batch=9), requests((0.0, 5), (0.1, 2), (0.2, 2), (0.3, 3)), STEPWISE)
    assert run.rows("start_s", "end_s", "replays", "decoding", "computed", "first_tokens", "kv_used") == [
        (1.0, 2.0, 1, 0, 0, 4, 4),
        (2.0, 3.0, 1, 4, 4, 0, 4),
        (3.0, 4.0, 1, 2, 4, 0, 4),
        (4.0, 6.0, 2, 1, 4, 0, 4),
    ]
    # Prompts of 4, then four tokens more an iteration, finished requests included.
    assert run.sizes("decode", "kv_tokens") == [20, 24, 28]


def test_first_tokens_of_whole_iterations_come_from_the_first() -> None:
    run = serve(dynamic(1.0), requests((0.0, 3), (0.5, 2)), WHOLE)
    assert run.rows("start_s", "end_s", "replays", "decoding", "computed", "first_tokens") == [
        (1.0, 1.0, 1, 0, 0, 0),
        (1.0, 2.0, 1, 0, 2, 2),
        (2.0, 3.0, 1, 2, 2, 0),
        (3.0, 4.0, 1, 1, 2, 0),
    ]


def test_waiting_counts_who_has_come_when_a_step_begins() -> None:
    run = serve(dynamic(0.0), requests((0.0, 2), (0.2, 1), (1.5, 1), (1.6, 1)), STEPWISE)
    assert run.rows("start_s", "waiting", "kv_used") == [(0.0, 0, 1), (1.0, 1, 1), (2.0, 0, 3)]
    run = serve(instances(1), requests((0.0, 2), (0.2, 1), (1.5, 1)), STEPWISE)
    assert [waiting for (waiting,) in run.rows("waiting")] == [0, 1, 1, 0]


def test_the_hosts_time_is_in_all_times() -> None:
    """Launch 1/4 s, wait 1/8 s, message 1/16 s. Fusion: received, prompt launched, waited for, sent,
    received, iteration launched. Instances: received, prompt launched, waited for, two more launches, of
    which the first runs; or, if prompts have no stream of their own, three launches at once."""
    overheads = Overheads(launch_s=0.25, wait_s=0.125, message_s=0.0625)
    fused = serve(fusion(), requests((0.0, 1)), overheads=overheads, end_after_s=9.0)
    assert fused.times() == [(0.0625, 1.9375, 1.9375)]
    assert fused.rows("start_s", "end_s") == [(0.3125, 0.4375), (0.8125, 1.9375)]
    alone_each = serve(instances(), requests((0.0, 2)), overheads=overheads, end_after_s=9.0)
    assert alone_each.times() == [(0.0625, 1.8125, 2.8125)]
    assert alone_each.rows("start_s", "end_s") == [(0.3125, 0.4375), (0.6875, 1.8125), (1.8125, 2.8125)]
    own = instances(prompt_streams=None)
    at_once = serve(own, requests((0.0, 2)), overheads=overheads, end_after_s=9.0)
    assert at_once.times() == [(0.0625, 1.6875, 2.6875)]
    assert at_once.rows("start_s", "end_s") == [(0.3125, 0.9375), (0.9375, 1.6875), (1.6875, 2.6875)]


def test_who_is_there_when_a_batch_ends_is_read_at_once() -> None:
    """The host reads a message in half a second. The first batch ends at 3.5; B and C are read until 4.5, and
    D, who comes meanwhile, beside the second batch."""
    spelled = requests((0.0, 3), (2.0, 1), (3.0, 1), (3.75, 1))
    run = serve(dynamic(0.0), spelled, overheads=Overheads(message_s=0.5), end_after_s=9.0)
    assert [r.scheduled_s for r in run.requests] == [0.5, 4.5, 4.5, 5.5]


def test_who_comes_while_the_last_of_a_window_is_read_goes_along() -> None:
    """A is read at 0.5. B comes in time and is read at 1.4, after the window; C is there then, D is not."""
    spelled = requests((0.0, 1), (0.9, 1), (1.2, 1), (1.6, 1))
    run = serve(dynamic(1.0), spelled, overheads=Overheads(message_s=0.5), end_after_s=9.0)
    assert [r.scheduled_s for r in run.requests[:3]] == pytest.approx([1.9] * 3)
    assert run.requests[3].scheduled_s > 1.9


def test_a_window_that_is_over_waits_for_nobody() -> None:
    """A is read at 0.5 and B, who has come, at 1, when the window of A is over. C, who comes meanwhile, may
    go along; the half second in which C is read is no time for D to come."""
    spelled = requests((0.0, 1), (0.25, 1), (0.75, 1), (1.25, 1))
    run = serve(dynamic(1.0), spelled, overheads=Overheads(message_s=0.5), end_after_s=9.0)
    first, beside, _, last = (r.scheduled_s for r in run.requests)
    assert first == beside <= 1.5
    assert last > first


# -- temporal fusion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [WHOLE, STEPWISE])
def test_one_request_takes_as_many_iterations_as_tokens(model: ServedDecoder) -> None:
    run = serve(fusion(), requests((0.0, 512)), model)
    steps = run.steps
    giving = (steps["decoding"] > 0) | (steps["first_tokens"] > 0)
    assert steps["replays"][giving].sum() == 512
    assert run.sizes("decode", "kv_tokens") == [5, 6]


def test_a_prompt_is_a_step_that_gives_no_token() -> None:
    columns = "start_s", "end_s", "replays", "decoding", "computed", "prefill_tokens", "first_tokens"
    rows = serve(fusion(), requests((0.0, 1)), STEPWISE).rows(*columns)
    assert rows == [(0.0, 1.0, 1, 0, 0, 4, 0), (1.0, 2.0, 1, 0, 1, 0, 1)]


LATE = [(0.0, 6), (0.1, 2), (0.2, 5)]


def test_without_shuffle_a_finished_slot_is_computed_on() -> None:
    """B's slot lies between the others from 3 on; when A is complete too, C's is the only one."""
    run = serve(fusion(shuffle=False), requests(*LATE))
    generated = [
        row for row in run.rows("end_s", "replays", "decoding", "first_tokens", "computed") if row[4]
    ]
    assert generated == [
        (1.0, 1, 0, 1, 1), (2.0, 1, 1, 2, 3), (3.0, 1, 3, 0, 3), (6.0, 3, 2, 0, 3)
    ]  # fmt: skip
    # Prompts of 4: A at 5; 6 + 5 + 5; then each of the three one more an iteration, B's too.
    assert run.sizes("decode", "kv_tokens") == [5, 16, 19, 22]


def test_shuffle_copies_a_slot_and_leaves_no_hole() -> None:
    run = serve(fusion(), requests(*LATE))
    assert run.sizes("move", "tokens") == [ROOM]
    rows = run.rows("start_s", "end_s", "replays", "decoding", "first_tokens", "computed", "kv_used")
    assert rows[-2:] == [(3.0, 3.25, 1, 0, 0, 0, 3), (3.25, 6.25, 3, 2, 0, 2, 2)]
    assert run.sizes("decode", "kv_tokens")[-1] == 8 + 7


def test_a_finished_slot_grows_no_further_than_it_goes() -> None:
    """B's slot holds 8 tokens and has 6 when it is complete: two iterations on, it is full."""
    wanted = [request(0, 0.0, 12, 1, 7), request(1, 0.1, 2, 4), request(2, 0.2, 5, 2)]
    run = serve(fusion(slot_tokens=8, shuffle=False), wanted)
    assert [launch["advance"]["kv_tokens"] for launch in run.launches if launch["graph"] == "decode"] == [
        1, 3, 3, 3, 2, 1
    ]  # fmt: skip
    assert run.requests[0].generated == 7


def test_shuffle_goes_around_a_prompt_that_is_computed() -> None:
    """D's prompt is computed in slot 3 when B leaves slot 1: C moves, and D not before it joins."""
    price = partial(unit_price, prompt_s=5.0)
    wanted = [request(0, 0.0, 9), request(1, 0.1, 1), request(2, 0.2, 9), request(3, 4.0, 3)]
    run = serve(fusion(slots=5, prompt_streams=4), wanted, price=price)
    assert run.sizes("move", "tokens") == [ROOM, ROOM]
    contexts = [launch["stream"] for launch in run.launches if launch["graph"] == "prefill"]
    assert contexts == ["context 0", "context 1", "context 2", "context 3"]
    assert np.all(run.steps["computed"] <= 3)


@pytest.mark.parametrize(
    ("streams", "ends_s"), [(1, [5.0, 10.0, 15.0]), (2, [5.0, 5.0, 10.0]), (3, [5.0] * 3)]
)
def test_prompts_of_a_stream_come_one_after_another(streams: int, ends_s: list[float]) -> None:
    """Three prompts of 5 s at once, each on the stream with the fewest: a prompt ends when its step does."""
    run = serve(
        fusion(slots=3, prompt_streams=streams),
        [request(i, 0.0, 2) for i in range(3)],
        price=partial(unit_price, prompt_s=5.0),
    )
    prompts = run.steps["prefill_tokens"] > 0
    assert sorted(run.steps["end_s"][prompts]) == pytest.approx(ends_s)


@pytest.mark.parametrize(
    ("used", "slot"), [([0, 0, 0], 0), ([1, 1, 0], 2), ([0, 1, 1], 0), ([1, 0, 1], 1), ([0, 1, 0, 1, 1], 0)]
)
def test_a_new_request_goes_behind_before_or_between_those_in_use(used: list[int], slot: int) -> None:
    assert place([bool(taken) for taken in used]) == slot


# -- what all refuse -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [fusion(slot_tokens=12), dynamic(0.0, capacity=12), instances(2, slot_tokens=12), orca(2, 12)]
)
def test_what_fits_nowhere_is_rejected(schedule: Schedule) -> None:
    run = serve(schedule, [request(0, 0.0, 2, 10), request(1, 0.5, 2, 11), request(2, 0.6, 2, 3)])
    assert [r.rejected for r in run.requests] == [False, True, False]
    assert [np.isfinite(r.finish_s) for r in run.requests] == [True, False, True]
    assert np.isnan(run.requests[1].scheduled_s)


@pytest.mark.parametrize("schedule", [fusion(), dynamic(1.0), instances(), orca()])
def test_no_request_at_all_ends(schedule: Schedule) -> None:
    assert not len(serve(schedule, []).steps["start_s"])


def test_iteration_batching_is_for_answers_of_one_length() -> None:
    with pytest.raises(ValueError, match=r"request 1 has 4 tokens, those before it 3"):
        serve(orca(), requests((0.0, 3), (0.5, 4)))


@pytest.mark.parametrize("model", [WHOLE, STEPWISE], ids=["whole", "stepwise"])
def test_an_iteration_reads_the_contexts_of_those_that_decode(model: ServedDecoder) -> None:
    """Prompts of 4, answers of 3; a second joins. Of a whole model prompts give no token: their requests
    decode at once, over 4 + 1 tokens; else the first token comes with the prompt."""
    run = serve(orca(), requests((0.0, 3), (0.5, 3)), model)
    contexts = [launch["sizes"]["kv_tokens"] for launch in run.launches]
    # Whole: A at 5; A at 6 with B at 5; then A at 7 with B at 6; B at 7. Else A's prompt; A at 5 with B's
    # prompt; A at 6 with B at 5; B at 6.
    assert contexts == ([5, 11, 13, 7] if model.whole else [0, 5, 11, 6])


def test_batches_by_places_and_by_capacity() -> None:
    line = [request(0, 0.0, 5, 10), request(1, 0.0, 2, 10), request(2, 0.0, 9, 1)]
    assert [fitting(line, most, 1000) for most in (1, 2, 9)] == [1, 2, 3]
    # Two take 20 + 2 * 5, three take 21 + 3 * 9.
    assert [fitting(line, 9, capacity) for capacity in (15, 29, 30, 47, 48)] == [1, 1, 2, 2, 3]
    assert fitting([], 4, 10) == 0
    assert bursts([]) == bursts([0]) == []


# -- processor sharing -----------------------------------------------------------------------------------


def processor_sharing(
    arrivals_s: Sequence[float],
    prompts_s: Sequence[float],
    answers_s: Sequence[float],
    gain: float,
    places: int,
    lanes: int | None,
) -> list[float]:
    """When each job ends, where the n that run get (1 + gain (n - 1)) / n of the server each, at most
    `places` are in service, in order of arrival at the lowest free place, and of those of a lane (place
    modulo `lanes`) one prompt runs at a time, first come first served; None: all run."""
    coming = deque(zip(arrivals_s, range(len(prompts_s)), strict=True))
    line, free, place = deque[int](), list(range(places)), dict[int, int]()
    prompts, answers = dict[int, float](), dict[int, float]()
    ends, now_s = [0.0] * len(prompts_s), 0.0

    def running() -> list[tuple[dict[int, float], int]]:
        heads = {place[job] % lanes if lanes else job: job for job in reversed(prompts)}
        return [*((prompts, job) for job in heads.values()), *((answers, job) for job in answers)]

    while coming or prompts or answers:
        now = running()
        rate = (1.0 + gain * (len(now) - 1)) / len(now) if now else 1.0
        next_end_s = now_s + min(of[job] for of, job in now) / rate if now else float("inf")
        until_s = min(next_end_s, coming[0][0] if coming else float("inf"))
        for of, job in now:
            of[job] -= (until_s - now_s) * rate
        now_s = until_s
        if coming and coming[0][0] == now_s:
            line.append(coming.popleft()[1])
        for of, job in [(of, job) for of, job in now if of[job] <= 1e-9]:
            del of[job]
            if of is prompts:
                answers[job] = answers_s[job]
            else:
                ends[job] = now_s
                heapq.heappush(free, place.pop(job))
        while line and free:
            job = line.popleft()
            place[job], prompts[job] = heapq.heappop(free), prompts_s[job]
    return ends


def longer_with_context(op: Op) -> Price:
    """1 s and 10 ms for each cached token an iteration, 50 ms for each token of a prompt."""
    seconds = 0.0
    if op.kind == "iteration":
        seconds = 1.0 + 0.01 * op["kv_tokens"]
    elif op.kind == "pre_processing":
        seconds = 0.05 * op["prompt_tokens"]
    return Price(seconds, seconds, seconds, "assumed", "longer with context")


@pytest.mark.parametrize("gain", [0.0, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("places", [2, 5, 40])
@pytest.mark.parametrize("lanes", [None, 1, 2, 3])
def test_concurrent_instances_share_the_device(gain: float, places: int, lanes: int | None) -> None:
    random = Random(round(gain * 100) + places)
    wanted = random_requests(random, 40, mean_gap_s=12.0)
    of = instances(places, prompt_streams=lanes)
    run = serve(of, wanted, price=longer_with_context, rates=throughput(gain))
    prompts_s = [0.05 * r.prompt_tokens for r in wanted]
    answers_s = [sum(1.0 + 0.01 * (r.prompt_tokens + i + 1) for i in range(r.output_tokens)) for r in wanted]
    expected = processor_sharing([r.arrival_s for r in wanted], prompts_s, answers_s, gain, places, lanes)
    assert [r.finish_s for r in run.requests] == pytest.approx(expected, rel=1e-9)


# -- random scenarios ------------------------------------------------------------------------------------


@cache
def gpt_j(ranks: int = 1, whole: bool = False) -> ServedDecoder:
    return ServedDecoder(load_config(MODELS / "gpt-j-6b.json"), ranks=ranks, whole=whole)


@cache
def a100() -> tuple[Pricer, Roofline]:
    spec = load_device("a100-sxm-80gb")
    return pricer(spec), roofline(spec)


def random_requests(
    random: Random, number: int, mean_gap_s: float, output: int | None = None, longest: int = 60
) -> list[Request]:
    """Requests that come at random; one length of answer if `output` says so."""
    wanted, at_s = [], 0.0
    for i in range(number):
        at_s += random.expovariate(1.0 / mean_gap_s)
        tokens = random.randint(1, longest) if output is None else output
        most = tokens + random.randint(0, 20) * random.randint(0, 1)
        wanted.append(request(i, at_s, tokens, random.randint(1, 300), most))
    return wanted


@dataclass(frozen=True, slots=True)
class Scenario:
    """A random scenario; `kv_limit` in the units of its schedule."""

    schedule: Schedule
    requests: list[Request]
    model: ServedDecoder
    rates: Rates
    overheads: Overheads
    kv_limit: int

    def run(self, **how: Any) -> Served:
        price, floor = a100()
        return serve(
            self.schedule,
            self.requests,
            self.model,
            **{"price": price, "floor": floor, "rates": self.rates, "overheads": self.overheads, **how},
        )


STRATEGIES = ("fusion", "fusion without shuffle", "dynamic", "instances", "iterations", "continuous")
SEEDS = range(12)


def scenario(strategy: str, seed: int, ranks: int = 1) -> Scenario:
    """Half of them overload the server; an iteration takes about 8 ms."""
    random = Random(f"{strategy} {seed}")
    places, slot_tokens = random.randint(1, 8), random.choice([260, 380])
    output = random.randint(1, 60) if strategy == "iterations" else None
    wanted = random_requests(random, 30, random.choice([0.02, 0.1, 0.5]), output)
    rates = random.choice([alone, max_min_rates, throughput(0.1), shared_reads(0.005)])
    overheads = (
        Overheads(launch_s=1e-5, wait_s=2e-5, message_s=5e-6) if random.random() < 0.5 else Overheads()
    )
    blocks, whole = random.choice([40, 300]), strategy != "continuous" and random.random() < 0.4
    schedule: Schedule = {
        "fusion": fusion(places, slot_tokens),
        "fusion without shuffle": fusion(places, slot_tokens, shuffle=False),
        "dynamic": dynamic(random.choice([0.0, 0.05, 0.7]), places, random.choice([400, 4000])),
        "instances": instances(places, slot_tokens),
        "iterations": orca(places, slot_tokens),
        "continuous": partial(continuous_batching, blocks=blocks, token_budget=random.choice([64, 512])),
    }[strategy]
    limit = blocks if strategy == "continuous" else places
    return Scenario(schedule, wanted, gpt_j(ranks, whole), rates, overheads, limit)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_scenarios_keep_the_laws(strategy: str, seed: int) -> None:
    case = scenario(strategy, seed)
    run = case.run()
    assert laws.violations(laws.Run(served(run.requests), run.steps, case.kv_limit)) == {}
    assert sum(not r.rejected for r in run.requests) > 10
    assert all(r.instance == 0 for r in run.requests)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", STRATEGIES[:-1])
def test_everybody_is_served_once_in_turn_and_slots_last(strategy: str, seed: int) -> None:
    """Told from the requests alone: the journal is asked for tokens only."""
    case = scenario(strategy, seed)
    run = case.run()
    done = [r for r in run.requests if not r.rejected]
    assert [r.rejected for r in case.requests] == [False] * len(case.requests)
    assert all(r.arrival_s <= r.scheduled_s < r.first_token_s <= r.finish_s for r in done)
    assert [r.scheduled_s for r in done] == sorted(r.scheduled_s for r in done)
    held: list[float] = []
    for r in done:
        while held and held[0] <= r.scheduled_s + 1e-12:
            heapq.heappop(held)
        heapq.heappush(held, r.finish_s)
        assert len(held) <= case.kv_limit
    steps = run.steps
    tokens = steps["replays"] * steps["decoding"] + steps["first_tokens"]
    assert tokens.sum() == sum(r.output_tokens for r in done)
    assert steps["first_tokens"].sum() == len(done)
    assert steps["prefill_tokens"].sum() == sum(r.prompt_tokens for r in done)
    assert np.all(steps["kv_used"] <= case.kv_limit)
    assert set(steps) == set(STEP)


@pytest.mark.parametrize("seed", SEEDS)
def test_with_shuffle_nothing_is_computed_for_nobody(seed: int) -> None:
    """Where prompts take no time."""

    def free_prompts(op: Op) -> Price:
        return Price(0.0, 0.0, 0.0, "assumed", "free") if op.kind == "pre_processing" else a100()[0](op)

    case = replace(scenario("fusion", seed), model=gpt_j(1, True), overheads=Overheads())
    run = case.run(price=free_prompts)
    steps = run.steps
    assert np.all(steps["computed"] == steps["decoding"] + steps["first_tokens"])


# -- tensor-parallel ranks ---------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_in_lockstep(strategy: str) -> None:
    """Collectives included, on two ranks: all finish, each weight matrix is read by halves."""
    case = scenario(strategy, 5, ranks=2)
    case = replace(case, model=gpt_j(2), overheads=Overheads(), rates=alone)
    run = case.run()
    assert laws.violations(laws.Run(served(run.requests), run.steps, case.kv_limit)) == {}
    alone_s = replace(case, model=gpt_j(1)).run().steps["end_s"].max()
    assert run.steps["end_s"].max() < alone_s


# -- a burst is its launches ---------------------------------------------------------------------------------


class Together:
    """The ticket of launches that are meant as one."""

    def __init__(self, tickets: Sequence[Any]) -> None:
        self.tickets = tickets

    @property
    def ran(self) -> int:
        return sum(ticket.ran for ticket in self.tickets)

    def stop(self) -> None:
        for ticket in self.tickets:
            ticket.stop()


class OneByOne:
    """A machine without bursts: `repeat=k` is k launches, of which those not begun are taken back when an
    item comes into the inbox `until`; the first runs in any case."""

    def __init__(self, machine: Any) -> None:
        self.machine = machine
        self.watched: dict[str, list[Together]] = {}
        deliver = machine.deliver

        def delivered(inbox: str, *what: object, last: bool = False) -> None:
            # Something comes after it here.
            del last
            deliver(inbox, *what)
            for burst in self.watched.pop(inbox, ()):
                for ticket in burst.tickets[1:]:
                    ticket.stop()

        machine.deliver = delivered

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def launch(
        self,
        graph: Any,
        *,
        sizes: Mapping[str, int],
        advance: Mapping[str, int] | None = None,
        repeat: int = 1,
        until: str | None = None,
        **how: Any,
    ) -> Together:
        if until is not None and self.machine._items[until]:
            repeat = 1
        by = dict.fromkeys(sizes, 1) if advance is None else advance
        each = [{name: size + i * by.get(name, 0) for name, size in sizes.items()} for i in range(repeat)]
        burst = Together([self.machine.launch(graph, sizes=now, **how) for now in each])
        if until is not None:
            self.watched.setdefault(until, []).append(burst)
        return burst

    def wait(self, *tickets: Any) -> Any:
        flat = [part for t in tickets for part in (t.tickets if isinstance(t, Together) else [t])]
        return self.machine.wait(*flat)


def assert_equal(left: Served, right: Served) -> None:
    """The same steps in the same order, at the same times but for rounding."""
    assert [r.rejected for r in left.requests] == [r.rejected for r in right.requests]
    assert [r.preemptions for r in left.requests] == [r.preemptions for r in right.requests]
    np.testing.assert_allclose(left.times(), right.times(), rtol=1e-9)
    for name in STEP:
        np.testing.assert_allclose(left.steps[name], right.steps[name], rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("part", first(1, range(8)))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bursts_equal_single_launches(strategy: str, part: int) -> None:
    """40 random scenarios of every schedule."""
    for seed in range(5 * part, 5 * (part + 1)):
        case = replace(scenario(strategy, seed), overheads=Overheads())
        run = case.run()
        assert_equal(run, case.run(wrap=OneByOne))
        bursts = any(launch.get("repeat", 1) > 1 for launch in run.launches)
        assert bursts or case.requests[0].output_tokens < 3, seed


@slow
@pytest.mark.parametrize(("strategy", "seed"), list(zip(STRATEGIES, range(9), strict=False)))
def test_closed_form_equals_every_replay_simulated(strategy: str, seed: int) -> None:
    """Where shares of the device do not depend on demands, which the closed form tells apart in steps."""
    case = replace(scenario(strategy, seed), rates=throughput(0.1))
    assert_equal(case.run(), case.run(rows=False))


@slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_lockstep_bursts_equal_single_launches(strategy: str) -> None:
    case = replace(scenario(strategy, 3), model=gpt_j(2), overheads=Overheads())
    assert_equal(case.run(), case.run(wrap=OneByOne))


class StepByStep:
    """A machine that replays nothing: the schedule decides anew after every step."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.machine, name)

    def launch(self, graph: Any, **how: Any) -> Any:
        return self.machine.launch(graph, **{**how, "repeat": 1})


@pytest.mark.parametrize("seed", first(20, range(60)))
def test_a_burst_decides_nothing_that_steps_would_not(seed: int) -> None:
    """Little memory: sequences are sent back, and admitted again as soon as they may be."""
    random = Random(seed)
    settings = {"blocks": 40, "block_tokens": 4, "token_budget": random.choice([8, 16, 64])}
    wanted = [request(i, 0.0, random.randint(1, 60), random.randint(1, 80)) for i in range(8)]
    schedule: Schedule = partial(continuous_batching, max_sequences=8, **settings)
    bursts = serve(schedule, wanted, STEPWISE)
    steps = serve(schedule, wanted, STEPWISE, wrap=StepByStep)
    assert [r.preemptions for r in bursts.requests] == [r.preemptions for r in steps.requests]
    np.testing.assert_allclose(bursts.times(), steps.times(), rtol=1e-9)
