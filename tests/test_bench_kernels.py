"""The benchmark of the decoding kernels, but for the GPU: cases, bars, rotation, tables, what is refused."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from simcore.validate.benchmarks import cases, peers
from simcore.validate.benchmarks import kernels as bench_kernels
from simcore.validate.benchmarks import run as bench_run
from simcore.validate.benchmarks.cases import (
    ANCHORS,
    LONG,
    NARROW,
    OURS,
    TABLE,
    Bar,
    Birth,
    Case,
    Compared,
    Row,
    Times,
)
from simcore.validate.benchmarks.peers import PEERS, Candidate, Peer, present, splits_to_try
from simcore.validate.benchmarks.run import Bench, Benchmark, Trial, Way
from simcore.validate.benchmarks.timing import Card
from simcore.validate.program import named, run
from tests.thorough import slow

L2 = 60 * 2**20
BORN = Birth(
    "NVIDIA H200", "580.1", "2.11.0", "3.6.0", "2026-01-02T03:04:05+00:00", "1980", "3201", 4.4e12, "x", 1e-6
)


def took(micro: float) -> Times:
    return cases.times([[micro * 1e-6] * 20, [micro * 1.01e-6] * 20])


def row(case: Case, name: str, micro: float | None, error: float = 1e-3) -> Row:
    shape = {"batch": case.batch, "context": case.context}
    made = Row(
        op="decode_attention",
        implementation=name,
        version="1",
        shape=shape,
        hbm_bytes=case.hbm_bytes,
        error=error,
        error_bar=4e-3 if name == OURS else cases.PEER_ERROR_BAR,
        brief="64/264/3/4/8",
    )
    return made if micro is None else cases.timed(made, took(micro), "cold")


def compared(case: Case, ours: float | None, *peers: float, error: float = 1e-3) -> Compared:
    theirs = [row(case, peer.name, micro) for peer, micro in zip(PEERS, peers, strict=False)]
    return Compared(str(case), row(case, OURS, ours, error), theirs, case.hbm_bytes / BORN.read_bytes_per_s)


def a_bench(out: Path) -> Bench:
    return Bench(Card(L2, 132, BORN.read_bytes_per_s, "x", 1e-6), BORN, out, True, [])


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def at_floor(case: Case) -> float:
    return 1e6 * case.hbm_bytes / BORN.read_bytes_per_s


def verdicts(bars: list[Bar]) -> list[bool | None]:
    return [bar.met for bar in bars]


# -- cases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*ANCHORS, *TABLE, *cases.VARIANTS], ids=str)
def test_buffers_are_cold(case: Case) -> None:
    read = case.read_bytes
    sets = cases.rotation(read, L2)
    assert (sets - 1) * read >= 3 * L2 or (sets == 1 and read > 4 * L2)
    assert cases.calls_of(sets) % sets == 0
    assert cases.calls_of(sets) >= cases.LEAST_CALLS


def test_bytes_are_those_of_the_floor() -> None:
    assert LONG.kv_bytes == 2 * 8 * 131072 * 128 * 2
    assert 1e6 * LONG.hbm_bytes / 4.42e12 == pytest.approx(121.5, rel=1e-3)
    assert {case.kv_bytes for case in TABLE[: cases.FLAT_ROWS]} == {2 * 2 * 65536 * 128 * 2}
    assert TABLE[-1].kv_bytes == 2 * TABLE[0].kv_bytes
    fp8 = replace(LONG, kv_dtype="fp8")
    assert fp8.kv_bytes == LONG.kv_bytes // 2
    windowed = replace(LONG, sinks=4, window=1020)
    ends = 2 * 32 * 128 * 2
    assert windowed.hbm_bytes - ends == LONG.kv_bytes // 128
    assert replace(LONG, page=16).layout == "pages of 16"


def test_the_anchors_are_twelve_and_have_the_two_with_bars() -> None:
    assert len(set(ANCHORS)) == 12
    assert {NARROW, LONG} <= set(ANCHORS)
    assert [(case.batch, case.context) for case in TABLE[:3]] == [(256, 256), (128, 512), (64, 1024)]


def test_projections_are_those_of_four_widths() -> None:
    shapes = {(p.name, p.k, p.n) for p in cases.PROJECTIONS if p.width == 4 and p.rows == 1}
    assert shapes == {("qkv", 4096, 1536), ("o", 1024, 4096), ("gate+up", 4096, 7168), ("down", 3584, 4096)}


def test_splits_stay_as_long_as_a_block() -> None:
    for case in (*ANCHORS, *TABLE):
        for splits, block, _ in splits_to_try(case, 132):
            assert splits == 1 or case.context // splits >= block


# -- bars ----------------------------------------------------------------------------------------------------


def test_all_anchor_bars_are_met() -> None:
    found = [
        compared(case, 1.04 * at_floor(case), 1.2 * at_floor(case), 1.3 * at_floor(case)) for case in ANCHORS
    ]
    bars = cases.anchor_bars(found)
    assert verdicts(bars) == [True] * 4
    assert "1.154" in bars[0].result
    assert str(bars[0]).strip().startswith("met")


def test_one_slow_shape_misses_its_bar_alone() -> None:
    found = [compared(case, 1.04 * at_floor(case), 1.2 * at_floor(case)) for case in ANCHORS]
    slow = ANCHORS.index(NARROW)
    found[slow] = compared(NARROW, 24.0, 22.0)
    bars = cases.anchor_bars(found)
    assert verdicts(bars) == [True, False, False, True]
    assert str(NARROW) in bars[1].result
    assert "NOT MET" in str(bars[2])


def test_a_wrong_kernel_meets_no_bar() -> None:
    found = [compared(case, at_floor(case), 2 * at_floor(case), error=float("nan")) for case in ANCHORS]
    assert verdicts(cases.anchor_bars(found)) == [False] * 4
    some = [compared(case, at_floor(case), 2 * at_floor(case)) for case in ANCHORS]
    some[0] = compared(ANCHORS[0], 1.0, 2.0, error=5e-3)
    assert verdicts(cases.anchor_bars(some)) == [False, False, True, True]


def test_without_peers_nothing_is_compared() -> None:
    found = [compared(case, at_floor(case)) for case in ANCHORS]
    assert verdicts(cases.anchor_bars(found)) == [None, None, True, True]
    assert verdicts(cases.anchor_bars([])) == [None] * 4
    assert cases.summary(found) == "no ratio to a peer"


def test_flash_decodings_table_is_flat_over_nine_rows() -> None:
    flat = [compared(case, 17 + i) for i, case in enumerate(TABLE)]
    assert verdicts(cases.table_bars([*flat[:9], compared(TABLE[9], 100.0)])) == [True]
    assert verdicts(cases.table_bars([*flat[:8], compared(TABLE[8], 30.0), flat[9]])) == [False]
    assert verdicts(cases.table_bars([*flat[:8], compared(TABLE[8], None), flat[9]])) == [False]
    assert verdicts(cases.table_bars(flat[:5])) == [None]


def speculative_bars(found: list[Compared]) -> list[Bar]:
    return [goal.bar(found) for goal in cases.SPECULATIVE_GOALS]


def speculated(context: int, slower: float | None, share: float | None) -> Compared:
    case = replace(LONG, context=context)
    found = compared(case, None if slower is None else 100.0 * slower, 100.0)
    return replace(found, early=share)


def test_speculative_bars_look_at_long_contexts_alone() -> None:
    found = [speculated(1024, 1.3, 0.9), speculated(8192, 1.04, 0.5), speculated(131072, 1.01, 0.2)]
    assert verdicts(speculative_bars(found)) == [True, True]
    late = replace(speculated(131072, 1.06, 0.3), name="late")
    assert verdicts(speculative_bars([*found, late])) == [False, False]
    wrong = replace(speculated(131072, None, None), name="wrong")
    assert verdicts(speculative_bars([*found, wrong])) == [False, False]
    assert verdicts(speculative_bars([])) == [None, None]


def test_a_skipped_layer_is_cheap() -> None:
    assert verdicts(cases.layer_bars(took(100), took(14))) == [True]
    assert verdicts(cases.layer_bars(took(100), took(15.2))) == [False]
    assert verdicts(cases.layer_bars(took(100), None)) == [False]


# -- rows and tables -----------------------------------------------------------------------------------------


def test_times_are_those_of_all_rounds() -> None:
    found = cases.times([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]])
    assert (found.median_s, found.n, found.first_s, found.second_s) == (3.0, 6, 2.0, 4.0)
    assert (found.p10_s, found.p90_s) == (1.5, 4.5)
    assert found.spread == 1.0


@pytest.mark.parametrize("error", [5e-3, float("nan"), float("inf")])
def test_no_speed_of_a_wrong_result(error: float) -> None:
    found = row(LONG, OURS, 120.0, error)
    assert found.wrong
    assert found.times is None
    assert "WRONG" in found.note
    assert cases.cell(found) == "WRONG"
    assert cases.timed(replace(found, error=None, note=""), took(1.0), "cold").times is None
    assert row(LONG, OURS, 120.0, 4e-3).times is not None


def test_a_table_fits_the_screen_and_names_the_absent() -> None:
    found = [compared(case, 1.2 * at_floor(case), 999.9, 999.9, 999.9, 999.9) for case in (*ANCHORS, *TABLE)]
    found.append(compared(LONG, None))
    found.append(compared(LONG, 120.0, 125.0, error=1.0))
    found = [replace(one, peers=[replace(row, brief="") for row in one.peers]) for one in found]
    lines = [*cases.table(found, BORN.read_bytes_per_s)]
    assert len(lines) == len(found) + 1
    assert all(peer.name in lines[0] for peer in PEERS)
    assert max(map(len, lines)) <= 120
    assert "82.9" in lines[1]
    assert "WRONG" in lines[-1]
    alone = [compared(case, 1.2 * at_floor(case)) for case in cases.VARIANTS]
    assert max(map(len, cases.table(alone, 4.4e12))) <= 120


def test_a_table_has_one_line_for_each_row_and_its_birth(tmp_path: Path) -> None:
    bench = a_bench(tmp_path / "new")
    bench.save("x", [row(LONG, OURS, 120.0), row(LONG, "cuDNN", None), row(LONG, "flash", 140.0, 0.5)])
    read = read_rows(tmp_path / "new" / "h200_decode_kernels_x.csv")
    assert [line["implementation"] for line in read] == [OURS, "cuDNN", "flash"]
    assert [line["median_s"] == "" for line in read] == [False, True, True]
    assert float(read[0]["median_s"]) == took(120.0).median_s
    assert read[0]["device"] == "NVIDIA H200"
    assert read[0]["n"] == "40"
    assert read[2]["note"].startswith("WRONG")


def test_a_file_is_whole_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, path = a_bench(tmp_path), tmp_path / cases.file_name("NVIDIA H200", "table")
    bench.save("table", [row(LONG, OURS, 120.0)])
    first = path.read_text()
    with monkeypatch.context() as patched:
        patched.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
        with pytest.raises(OSError, match="no room"):
            bench.save("table", [row(LONG, OURS, 130.0)])
    assert path.read_text() == first
    assert list(path.parent.iterdir()) == [path]


# -- trying --------------------------------------------------------------------------------------------------


class Replayed:
    """Stands in for a captured graph: the calls, made again."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        calls[0]()
        self.replay()

    def replay(self) -> None:
        for call in self.calls:
            call()


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "capture", Replayed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def replayed(graph: Replayed, calls: int, *, quick: bool = False) -> list[float]:
        del quick
        return [getattr(graph.calls[0], "keywords", {}).get("seconds", 1.0) / calls] * 20

    monkeypatch.setattr(bench_run, "replayed", replayed)


TRUTHS = (torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([3.0, 4.0], dtype=torch.float64))
OUT = torch.empty(2)


def poison() -> None:
    OUT.fill_(float("nan"))


def right(truth: Tensor, seconds: float = 1.0, off: float = 1.0) -> Tensor:
    del seconds
    return OUT.copy_(truth * off)


def candidate(name: str, **more: float) -> Candidate:
    return Candidate(name, [partial(right, truth, **more) for truth in TRUTHS])


def bare(name: str = OURS) -> Row:
    return replace(row(LONG, name, None), error=None)


@pytest.mark.usefixtures("on_cpu")
def test_the_fastest_right_candidate_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        candidate("slow", seconds=3.0),
        candidate("wrong", off=1.1, seconds=0.1),
        candidate("fast", seconds=2.0),
    ]
    entry = bench_run.tried(bare(), found, TRUTHS, 4, poison)
    assert entry.row.config == "fast"
    assert entry.graph is not None
    assert "WRONG" in capsys.readouterr().out
    (timed,) = bench_run.take_turns([entry], "cold", quick=True)
    assert timed.times is not None
    assert timed.times.median_s == 0.5
    assert timed.times.n == 40


@pytest.mark.usefixtures("on_cpu")
def test_an_output_that_is_not_written_is_wrong() -> None:
    unwritten = Candidate("nothing", [lambda: OUT, lambda: OUT])
    entry = bench_run.tried(bare(), [unwritten], TRUTHS, 4, poison)
    assert entry.graph is None
    assert entry.row.wrong
    (refused,) = bench_run.take_turns([entry], "cold", quick=True)
    assert refused.times is None


@pytest.mark.usefixtures("on_cpu")
def test_a_peer_that_fails_takes_nothing_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def candidates() -> Iterator[Candidate]:
        yield candidate("good")
        raise ImportError("no such\nlibrary")

    def boom() -> Tensor:
        raise RuntimeError("CUDA\nerror")

    failing = Candidate("bad", [boom, boom])
    entries = [
        bench_run.tried(bare("FlashInfer"), candidates(), TRUTHS, 2, poison),
        bench_run.tried(bare("cuDNN"), [failing], TRUTHS, 2, poison),
    ]
    good, bad = bench_run.take_turns(entries, "cold", quick=False)
    assert good.times is not None
    assert bad.times is None
    assert bad.note == "failed: RuntimeError: CUDA error"
    said = capsys.readouterr().out
    assert "no such library" in said
    assert "CUDA error" in said


@slow
@pytest.mark.usefixtures("on_cpu")
def test_the_driver_checks_times_saves_and_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A right case, one whose most exact way is wrong, and one that cannot be made."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def measure(case: Case, bench: Bench) -> Compared:
        if case.context == 3:
            raise RuntimeError("out of memory")
        ways = [
            Way("coarse", [candidate("", seconds=1.0)], 1e-2),
            Way("fine", [candidate("", seconds=2.0, off=1.0 if case.context == 1 else 1.1)], 1e-5),
            Way("peer", [candidate("", seconds=6.0)], version="torch 2"),
        ]
        return bench_run.compare(case, Trial(ways, TRUTHS, poison, 2, 1, 2), bench)

    shapes = [replace(LONG, context=context) for context in (1, 2, 3)]
    goal = cases.Goal("fast", least=2.5)
    part = Benchmark("x", shapes, measure, [goal], tabled=True)
    bench = a_bench(tmp_path)
    (found,) = part.run(bench)
    assert (found.met, found.result) == (False, f"no figure at {shapes[1]}, {shapes[2]}")
    assert goal.bar([]) == Bar("fast", "not measured", None)
    read = read_rows(tmp_path / "h200_decode_kernels_x.csv")
    assert [(line["context"], line["implementation"], line["median_s"] != "") for line in read] == [
        ("1", "ours, fine", True), ("1", "ours, coarse", True), ("1", "peer", True),
        ("2", "ours, fine", False), ("2", "ours, coarse", True), ("2", "peer", True),
        ("3", "ours", False),
    ]  # fmt: skip
    assert [line.rpartition(": ")[2] for line in bench.failed] == ["error 1.00e-01 > 1e-05", "out of memory"]
    said = capsys.readouterr().out
    assert f"{shapes[0]}: 3.00 times as fast" in said
    assert "geometric mean of peer / ours 3.000" in said


def test_absent_peers_are_named() -> None:
    def absent() -> None:
        raise ImportError("no module")

    lines: list[str] = []
    peers = [
        Peer(name, "pip", ready, lambda *_: iter(()))
        for name, ready in (("a", absent), ("b", list), ("c", list))
    ]
    assert [peer.name for peer in present(peers, ["c"], lines.append)] == ["b"]
    assert lines == ["a is not here: ImportError: no module", "c is left out"]


# -- the command ---------------------------------------------------------------------------------------------


def error_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that the program ends with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["kernels", *words])
    with pytest.raises(SystemExit) as ended:
        run(bench_kernels.main)
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (2, 1)
    return said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--parts", "anchors"), "CUDA device"),
        (("--parts", "anchors,tabel"), "--parts: unknown name 'tabel'; did you mean 'table'"),
        (("--parts", ","), "--parts: names none"),
        (("--without", "cuDNM"), "--without: unknown name 'cuDNM'; did you mean 'cuDNN'"),
        (("--apart", "0"), "--apart: has to be a number of seconds above 0"),
        (("--apart", "inf"), "--apart: has to be a number of seconds above 0"),
        (("--out", __file__), "is no folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in error_line(monkeypatch, capsys, *words)


def test_parts_are_in_the_order_that_is_asked_for() -> None:
    assert named("--parts", "table,anchors", bench_kernels.BY_NAME) == ["table", "anchors"]
    assert len(bench_kernels.BY_NAME) == len(bench_kernels.PARTS) + 4 == 21
    assert all(f"\n{name} " in str(bench_kernels.__doc__) for name in bench_kernels.BY_NAME)


@pytest.mark.parametrize("case", cases.RAGGED, ids=str)
def test_lengths_are_drawn_alike_at_every_call(case: cases.Case) -> None:
    lengths = case.lengths
    assert lengths == replace(case).lengths
    assert len(lengths) == case.batch
    assert lengths[0] == max(lengths) == case.context
    assert min(lengths) >= 1
    assert case.read_bytes == 4 * case.kv_heads * case.head_dim * sum(lengths) < case.kv_bytes
    assert replace(case, drawn="").read_bytes == case.kv_bytes


def test_a_planned_peer_is_told_each_sequences_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []
    wrapper = SimpleNamespace(plan=lambda *given, **_: planned.extend(given))
    monkeypatch.setattr(peers, "_flashinfer_space", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensor = partial(torch.tensor, device="cpu")
    monkeypatch.setattr(torch, "tensor", lambda data, dtype, device: tensor(data, dtype=dtype))
    case = cases.Case(3, 4, 2, 64, drawn="uniform")
    peers._planned(lambda *_, **__: wrapper, case, 16, for_graphs=False)
    first, pages, last = (x.tolist() for x in planned[:3])
    assert all(1 <= tokens <= 16 for tokens in last)
    for i, length in enumerate(case.lengths):
        own = pages[first[i] : first[i + 1]]
        assert own == list(range(4 * i, 4 * i + len(own)))
        assert 16 * (len(own) - 1) + last[i] == length


def test_a_long_sequence_that_is_wrong_is_seen_among_short_ones() -> None:
    """Its output is small. One norm over all would be below the bar of a peer."""
    truth = torch.cat([torch.full((1, 4, 8), 1e-2), torch.ones(31, 4, 8)]).double()
    out = truth.clone()
    out[0] = 0
    assert bench_run.relative_error(out, truth) < cases.PEER_ERROR_BAR < bench_run.worst_sequence(out, truth)
    assert bench_run.worst_sequence(truth, truth) == 0.0
    out[3, 1, 1] = torch.nan
    assert isnan(bench_run.worst_sequence(out, truth))


def test_another_way_of_ours_has_a_line_of_its_own() -> None:
    found = compared(ANCHORS[0], 24.0, 22.0)
    assert found.ours.times
    best_s = min(row.median_s for row in found.peers if row.median_s)
    rest = replace(
        found.ours,
        implementation="ours, split alike",
        times=replace(found.ours.times, median_s=0.5 * best_s),
    )
    text = cases.summary([replace(found, rest=[rest])])
    assert text.splitlines()[-1] == f"of peer / split alike 2.000; worst 2.000 at {ANCHORS[0]}"
    assert "split alike" in "\n".join(cases.table([replace(found, rest=[rest])], 3e12))
