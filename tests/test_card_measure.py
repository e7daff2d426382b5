"""How a card's times are put together, on clocks made up: seconds = (graph - start) / calls - other."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from devices.price import roofline
from devices.spec import load_device
from simcore import ops
from validate import bench_timing, card_measure

START_S, OTHER_S = 2.3e-6, 1.1e-6


class Clock:
    """Time goes on by what is slept, and by `step_s` whenever a graph has been replayed."""

    def __init__(self, step_s: float) -> None:
        self.now_s, self.step_s, self.slept_s, self.replays = 0.0, step_s, 0.0, 0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds

    def replay(self) -> None:
        self.now_s += self.step_s
        self.replays += 1


def _between(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel between calls, where graphs are the number of their kernels."""
    monkeypatch.setattr(
        card_measure, "replays_s", lambda nodes, replays, ahead: [START_S + nodes * OTHER_S] * replays
    )
    found = object.__new__(card_measure._Between)
    found._graphs = [(2 * pairs, 2 * pairs) for pairs in card_measure.PAIRS]
    return found


def test_the_start_of_a_graph_is_told_from_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    start_s, other_s = _between(monkeypatch).seconds(again=True)
    assert start_s == pytest.approx(START_S)
    assert other_s == pytest.approx(OTHER_S)


@pytest.mark.parametrize("calls", [1, 4, 24])
def test_the_time_of_a_call_does_not_hang_on_how_many_there_are(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = _between(monkeypatch).seconds(again=True)
    whole_s = START_S + calls * (OTHER_S + 1.5e-6)
    monkeypatch.setattr(card_measure, "replays_s", lambda graph, replays, ahead: [whole_s] * replays)
    graph: Any = None
    assert card_measure._times(graph, calls, other) == pytest.approx([1.5e-6] * card_measure.REPLAYS)


def test_what_is_not_told_from_the_kernel_between_is_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        card_measure, "replays_s", lambda graph, replays, ahead: [START_S + 10 * OTHER_S] * replays
    )
    graph: Any = None
    with pytest.raises(ValueError, match="not told from"):
        card_measure._times(graph, 10, (START_S, OTHER_S))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Clock]:
    clock = Clock(1e-3)
    monkeypatch.setattr(card_measure, "time", clock)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(card_measure.torch.cuda, "current_stream", lambda: stream)
    found = object.__new__(card_measure._Load)
    found._graph, found._share, found._at_s = SimpleNamespace(replay=clock.replay), 0.0, 0.0
    return found, clock


@pytest.mark.parametrize(("queueing_s", "wait_s"), [(2e-4, 3e-4), (1e-3, 1.2e-3), (1.0, 4.8e-3)])
def test_short_graphs_are_timed_with_the_host_ahead(
    queueing_s: float, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is doubled until it lasts longer than queueing does, or may be no longer. 2 GHz."""
    waits = list[float]()

    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return waits[-1] < queueing_s

        def elapsed_time(self, other: "Event") -> float:
            del other
            return 0.05

    monkeypatch.setattr(bench_timing, "event", Event)
    monkeypatch.setattr(bench_timing, "wait", lambda cycles: waits.append(cycles / 2e9))
    monkeypatch.setattr(bench_timing.torch.cuda, "synchronize", lambda: None)
    graph: Any = SimpleNamespace(replay=lambda: None)
    assert bench_timing.replays_s(graph, 2, ahead=True) == pytest.approx([5e-5, 5e-5])
    assert waits[-1] == pytest.approx(wait_s)
    waits.clear()
    bench_timing.replays_s(graph, 2)
    assert waits == pytest.approx([3e-4])


def test_a_card_is_loaded_to_the_same_share_whatever_was_before(load: tuple[Any, Clock]) -> None:
    """1 - exp(-t / MEMORY_S) = LOAD_SHARE from rest; after a pause p only what that has cost."""
    found, clock = load
    found.bring()
    rested_s = -card_measure.MEMORY_S * math.log(1.0 - card_measure.LOAD_SHARE)
    assert clock.now_s == pytest.approx(rested_s, abs=2 * clock.step_s)
    pause_s = 0.02
    clock.now_s += pause_s
    begun_s = clock.now_s
    found.bring()
    kept = card_measure.LOAD_SHARE * math.exp(-pause_s / card_measure.MEMORY_S)
    again_s = card_measure.MEMORY_S * math.log((1.0 - kept) / (1.0 - card_measure.LOAD_SHARE))
    assert clock.now_s - begun_s == pytest.approx(again_s, abs=2 * clock.step_s)
    before = clock.replays
    found.bring()
    assert clock.replays == before


def test_a_card_rests_after_a_load_and_only_then(load: tuple[Any, Clock]) -> None:
    found, clock = load
    found.rest()
    assert clock.slept_s == 0.0
    found.bring()
    found.rest()
    pause_s = card_measure.MEMORY_S * math.log(card_measure.LOAD_SHARE / card_measure.REST_SHARE)
    assert clock.slept_s == pytest.approx(pause_s, rel=0.02)
    found.rest()
    assert clock.slept_s == pytest.approx(pause_s, rel=0.02)


def test_what_computes_for_long_loads_a_card() -> None:
    floor = roofline(load_device("h200-sxm"))

    def product(m: int) -> ops.Op:
        return ops.matmul("product", m=m, n=8192, k=8192, dtype="bf16")

    # 64 rows read for longer than they compute; 1024 compute 139 us at the datasheet's 989 TFLOP/s.
    assert not card_measure.loads(product(64), floor)
    assert card_measure.loads(product(1024), floor)
    assert not card_measure.loads(ops.norm("norm", tokens=1 << 20, hidden=8192, dtype="bf16"), floor)
