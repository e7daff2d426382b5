"""Parts of the benchmark of kernels on tiny cases without a card: Triton's interpreter, calls in the place
of captured graphs, and a clock that is none. All but the times is checked: inputs, truths, ways, rows."""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from simcore.kernels.decoder.decode_attention import reference_decode_attention
from simcore.validate.benchmarks import convolution, linear_attention, token_step
from simcore.validate.benchmarks import run as bench_run
from simcore.validate.benchmarks.cases import Birth, Case
from simcore.validate.benchmarks.kernels import BY_NAME
from simcore.validate.benchmarks.peers import Candidate, Inputs, Peer
from simcore.validate.benchmarks.run import Bench, Benchmark
from simcore.validate.benchmarks.timing import Card
from tests.test_bench_kernels import Replayed
from tests.thorough import slow

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter is for machines without one"
)
# So small a cache that there are several sets of buffers.
CARD = Card(1 << 12, 4, 4.4e12, "x", 1e-6)
BIRTH = Birth("NVIDIA H200", "580.1", "2", "3", "2026", "1980", "3201", 4.4e12, "x", 1e-6)


class OnCpu(TorchFunctionMode):
    """Whoever asks for a tensor on a card has it on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**(kwargs or {})}
        if str(given.get("device", "")).startswith("cuda"):
            given["device"] = "cpu"
        return func(*args, **given)


class Generator(torch.Generator):
    """One of the CPU."""

    def __new__(cls, device: object = "cpu") -> Any:
        del device
        return super().__new__(cls, "cpu")


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    properties = SimpleNamespace(multi_processor_count=4, L2_cache_size=1 << 12)
    monkeypatch.setattr(torch, "Generator", Generator)
    monkeypatch.setattr(torch, "compile", lambda run, **_: run)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(bench_run, "capture", Replayed)
    monkeypatch.setattr(bench_run, "replayed", lambda graph, calls, *, quick=False: [1e-5 / calls] * 5)
    with torch.no_grad(), OnCpu():
        yield


def ran(name: str, cases: Sequence[Any], folder: Path, peers: Sequence[Peer] = ()) -> list[dict[str, str]]:
    """The table of a part with these cases; none of our own rows is wrong."""
    part, bench = BY_NAME[name], Bench(CARD, BIRTH, folder, True, peers)
    assert isinstance(part, Benchmark)
    bars = replace(part, cases=cases).run(bench)
    assert bench.failed == []
    assert len(bars) == len(part.bars([])) + len(part.goals)
    (path,) = folder.iterdir()
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert all(row["median_s"] and float(row["error"]) <= float(row["reference_error_bar"]) for row in rows)
    return rows


def ways(rows: Sequence[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for row in rows))


@slow
def test_decode_attention_is_right_beside_a_peer(tmp_path: Path) -> None:
    def candidates(case: Case, sets: Sequence[Inputs]) -> Iterator[Candidate]:
        del case
        yield Candidate("", [partial(reference_decode_attention, *one[:4]) for one in sets])

    peer = Peer("peer", "torch", lambda: None, candidates)
    rows = ran("table", [Case(1, 4, 2, 64, dtype="fp16"), Case(2, 4, 1, 32, dtype="fp32")], tmp_path, [peer])
    assert ways(rows) == ["ours", "peer"]
    assert rows[0]["cache_state"] == "cold: rotated over 1 sets of 65536 bytes"


@slow
def test_tiles_are_right_in_all_ways(tmp_path: Path) -> None:
    rows = ran("tiles", [convolution.Tile(2, 8, 4)], tmp_path)
    orders = [f"{name}{order}" for order in ("", ", positions last") for name in ("conv1d", "compiled sum")]
    assert ways(rows) == ["ours, direct", *orders]


@slow
def test_baselines_are_right(tmp_path: Path) -> None:
    lines = [convolution.Line(kind, 2, 8, 16) for kind in ("lazy", "eager")]
    rows = ran("baselines", lines, tmp_path)
    assert ways(rows) == ["ours, row", "eager torch", "compiled", "ours, column"]
    assert [row["op"] for row in rows[::3]] == ["lazy position", "eager position"]


@slow
def test_slots_are_moved_to_the_last_bit(tmp_path: Path) -> None:
    rows = ran("slot_moves", [token_step.Moves(2, 4, 2, 8, 16, 2)], tmp_path)
    assert [(row["implementation"], row["error"]) for row in rows] == [("ours", "0.0"), ("index_copy", "0.0")]


@slow
def test_a_token_carries_its_state_on_in_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_attention, "HEADS", 2)
    monkeypatch.setattr(linear_attention, "WIDTH", 16)
    monkeypatch.setattr(linear_attention, "fla_ways", lambda sets, names: [])
    assert ways(ran("linear_step", [linear_attention.Token(2)], tmp_path)) == ["ours, step"]
