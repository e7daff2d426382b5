"""How a card's times are put together, on clocks made up: seconds = (graph - start) / calls - other."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from simcore.devices.interpolation import TILES
from simcore.devices.price import roofline
from simcore.devices.spec import load_device
from simcore.kernels.linear_attention.layer import ON_A_CARD
from simcore.kernels.long_convolution.placed_tiles import PLACED
from simcore.kernels.table import TABLE
from simcore.ops import op as ops
from simcore.ops.convolution import conv_column, conv_row, tile
from simcore.validate.benchmarks import timing as bench_timing
from simcore.validate.timing import cuda_times as card_measure
from simcore.validate.timing.card_kernels import ON_CARDS
from simcore.validate.timing.cuda_times import LINES
from tests.thorough import slow

START_S, OTHER_S = 2.3e-6, 1.1e-6


class Clock:
    """Time goes on by what is slept."""

    def __init__(self) -> None:
        self.now_s = self.slept_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


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


@pytest.mark.parametrize(("queueing_s", "wait_s"), [(2e-4, 3e-4), (1e-3, 1.2e-3), (1.0, None)])
def test_short_graphs_are_timed_with_the_host_ahead(
    queueing_s: float, wait_s: float | None, monkeypatch: pytest.MonkeyPatch
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
    if wait_s is None:
        with pytest.raises(ValueError, match="too slow"):
            bench_timing.replays_s(graph, 2, ahead=True)
    else:
        assert bench_timing.replays_s(graph, 2, ahead=True) == pytest.approx([5e-5, 5e-5])
        assert waits[-1] == pytest.approx(wait_s)
    waits.clear()
    bench_timing.replays_s(graph, 2)
    assert waits == pytest.approx([3e-4])


@pytest.fixture
def heat(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Clock]:
    clock = Clock()
    monkeypatch.setattr(card_measure, "time", clock)
    return card_measure._Heat(), clock


def test_a_card_rests_until_it_was_busy_for_no_more_than_a_share(heat: tuple[Any, Clock]) -> None:
    """1 - exp(-busy / MEMORY_S) of the time at first, and then a share that fades as exp(-t / MEMORY_S)."""
    found, clock = heat
    found.rest()
    assert clock.slept_s == 0.0
    clock.now_s += 0.3
    found.add(0.3)
    share = 1.0 - math.exp(-0.3 / card_measure.MEMORY_S)
    found.rest()
    first_s = card_measure.MEMORY_S * math.log(share / card_measure.REST_SHARE)
    assert clock.slept_s == pytest.approx(first_s)
    found.rest()
    assert clock.slept_s == pytest.approx(first_s)
    # What was at rest meanwhile need not rest again.
    clock.now_s += 0.3
    found.add(0.3)
    clock.now_s += 0.1
    found.rest()
    again = 1.0 - (1.0 - card_measure.REST_SHARE) * math.exp(-0.3 / card_measure.MEMORY_S)
    second_s = card_measure.MEMORY_S * math.log(again / card_measure.REST_SHARE) - 0.1
    assert clock.slept_s == pytest.approx(first_s + second_s)


def test_short_work_between_pauses_needs_no_rest(heat: tuple[Any, Clock]) -> None:
    found, clock = heat
    for _ in range(1000):
        clock.now_s += 0.02
        found.add(0.002)
        found.rest()
    assert clock.slept_s == 0.0


def test_what_computes_for_long_loads_a_card() -> None:
    floor = roofline(load_device("h200-sxm"))

    def product(m: int) -> ops.Op:
        return ops.matmul("product", m=m, n=8192, k=8192, dtype="bf16")

    # 64 rows read for longer than they compute; 1024 compute 139 us at the datasheet's 989 TFLOP/s.
    assert not card_measure.loads(product(64), floor)
    assert card_measure.loads(product(1024), floor)
    assert not card_measure.loads(ops.norm("norm", tokens=1 << 20, hidden=8192, dtype="bf16"), floor)


@slow
@pytest.mark.parametrize(
    ("tokens", "stays", "goes_round"),
    # Two operands and no result, of 8 KiB a token in bf16: sets that fill a quarter of 60 MB, as many as
    # there are calls at most; sets that go three times round the cache, 128 of them at most.
    [(1, 24, 24), (64, 14, 128), (4096, 1, 4)],
)
def test_sets_of_operands_stay_in_the_cache_or_go_round_it(tokens: int, stays: int, goes_round: int) -> None:
    op = ops.residual("residual", tokens=tokens, hidden=4096, dtype="bf16")
    kernel = TABLE["residual"]
    for stay, count in ((True, stays), (False, goes_round)):
        sets = card_measure.operands(kernel, op, 60_000_000, "cpu", stay=stay)
        assert len(sets) == count
        assert len({x.data_ptr() for one in sets for x in one}) == count * len(sets[0])


def test_sets_of_a_tile_are_as_many_as_what_it_works_on_needs() -> None:
    """However it is launched: its tensors may have more positions than it reads and writes."""
    op = tile("flash_conv", layers=1, batch=1, channels=64, side=64, outputs=64, dtype="fp32")
    alone, placed = (card_measure.operands(t[op.kind], op, 300_000, "cpu") for t in (TABLE, ON_CARDS))
    assert sum(x.nbytes for x in placed[0]) > sum(x.nbytes for x in alone[0]) == 255 * 64 * 4
    # Three caches full, and the one in use.
    assert len(alone) == len(placed) == 1 + 14


@pytest.mark.parametrize("count", [65, 100, 127, 128])
def test_sets_of_rows_and_columns_go_round_the_cache(count: int) -> None:
    """With what they read and write, however many positions their tensors have beside that."""
    l2_bytes = 300_000
    shape: dict[str, Any] = {"layers": 1, "batch": 1, "channels": 64, "dtype": "fp32"}
    for op in (conv_row(**shape, inputs=count), conv_column(**shape, outputs=count)):
        sets = card_measure.operands(ON_CARDS[op.kind], op, l2_bytes, "cpu")
        # Inputs or outputs, and weights; of a column the outputs are counted twice, as they are also written.
        assert (len(sets) - 1) * 2 * count * 64 * 4 > 1.9 * l2_bytes


def test_a_card_runs_what_reads_its_place_there_and_all_else_by_the_table() -> None:
    assert {*PLACED} == LINES | TILES
    assert {*ON_A_CARD} == {"linear_attention_prompts"}
    for kind, kernel in ON_CARDS.items():
        wanted = ON_A_CARD[kind].run if kind in ON_A_CARD else TABLE[kind].run
        assert kernel.run is (PLACED[kind].run if kind in PLACED else wanted)
