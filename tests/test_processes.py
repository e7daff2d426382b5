"""Work in several processes: the same results in the same order, and an end that leaves no process behind."""

import os
import signal
import time
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from simcore.cli import app, main
from simcore.input.files import InputError
from simcore.machine.machine import LawError
from simcore.studies.decode import crossover
from simcore.studies.decode import runner as decode_bench
from simcore.studies.operators import study as operators_study
from simcore.studies.processes import in_processes
from simcore.studies.tiling import study as tiling_study
from tests.thorough import first, slow


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_results_stand_in_the_order_of_the_pieces(jobs: int) -> None:
    counts: list[int] = []
    assert in_processes(lambda i: i * i, 7, jobs, counts.append) == [i * i for i in range(7)]
    assert counts == list(range(1, 8))


def test_no_pieces_and_more_processes_than_pieces() -> None:
    assert in_processes(lambda i: i, 0, 4, lambda _: None) == []
    assert in_processes(lambda i: i, 2, 8, lambda _: None) == [0, 1]


def test_pieces_run_in_other_processes() -> None:
    assert os.getpid() not in in_processes(lambda _: os.getpid(), 3, 2, lambda _: None)


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_a_piece_raises_comes_back(jobs: int) -> None:
    def work(i: int) -> int:
        if i == 3:
            raise InputError("piece 3")
        return i

    with pytest.raises(InputError, match="piece 3"):
        in_processes(work, 6, jobs, lambda _: None)
    assert active_children() == []


@slow
def test_of_two_errors_the_one_that_one_process_would_meet_is_raised() -> None:
    def work(i: int) -> int:
        if not i:
            time.sleep(0.2)
        raise InputError(f"piece {i}")

    with pytest.raises(InputError, match="piece 0"):
        in_processes(work, 2, 2, lambda _: None)


def test_what_is_soon_done_starts_no_process() -> None:
    assert {*in_processes(lambda _: os.getpid(), 3, 2, lambda _: None, 60.0)} == {os.getpid()}


@slow
def test_an_error_in_a_process_is_told_as_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Any, case: Any) -> None:
        raise LawError(f"of {case.label}, {case.length}")

    monkeypatch.setattr(operators_study, "SHORT_S", 0.0)
    monkeypatch.setattr(operators_study.Bench, "run", broken)
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump(STUDIES[-1]), encoding="utf-8")
    endings = []
    for jobs in ("1", "3"):
        with pytest.raises(SystemExit) as ended:
            main(["run", str(file), "--jobs", jobs, "--out", str(tmp_path / jobs)])
        endings.append((ended.value.code, capfd.readouterr().err))
        assert not (tmp_path / jobs).exists()
    assert endings[0] == endings[1]
    assert endings[0][0] == 1


def test_a_killed_process_is_told_in_one_line() -> None:
    def work(i: int) -> int:
        if i == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    with pytest.raises(InputError, match="--jobs 2: a process was killed"):
        in_processes(work, 4, 2, lambda _: None)


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    def work(i: int) -> int:
        if i:
            # For longer than any test: only a signal ends it.
            signal.pause()
        return i

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_processes(work, 3, 2, interrupt)
    assert active_children() == []


SCENARIO = {
    "name": "jobs",
    "study": "serving",
    "device": "h200-sxm",
    "model": "llama-3.1-8b",
    "workload": {
        "requests": 6,
        "arrivals": {"kind": "poisson", "rate_per_s": [4, 40]},
        "prompt_tokens": {"kind": "lognormal", "mean": 300, "cv": 0.8, "max": 2048},
        "output_tokens": {"kind": "uniform", "low": 8, "high": 48},
    },
    "strategies": [{"kind": "continuous_batching"}, {"kind": "concurrent_instances", "max_instances": 4}],
    "replicas": 2,
}


OTHERS = {
    "decode": {
        "model": "llama-3.1-8b",
        "context_tokens": [1024, 131072],
        "strategies": [
            {"kind": "tensor_parallel", "ranks": [1, 2]},
            {"kind": "alspec", "ranks": [1, 2], "hits": {"kind": "rate", "value": [0.5, 0.875]}},
        ],
        "crossover": ["hit_rate", "link_latency_s"],
    },
    "tiling": {
        "model": {"kind": "long_convolution", "layers": [2, 3], "channels": 64, "block": "mlp"},
        "batch": [1, 2],
        "tokens": [512, 1024],
        "strategies": [{"kind": "lazy"}, {"kind": "fractal"}],
    },
    "linear_attention": {
        "heads": 4,
        "dim": 64,
        "length": [256, 1024, 4096],
        "batch": [1, 2],
    },
}
MIXED = {
    **SCENARIO,
    "devices": [2, 4],
    "strategies": [
        {"kind": "continuous_batching", "ranks": 2},
        {"kind": "temporal_fusion", "slots": 4},
        {"kind": "continuous_batching", "ranks": 1},
    ],
}
STUDIES = [
    SCENARIO,
    MIXED,
    *({"name": "jobs", "device": "h200-sxm", "study": s, **o} for s, o in OTHERS.items()),
]


@slow
@pytest.mark.usefixtures("without_report")
@pytest.mark.parametrize("scenario", first(1, STUDIES), ids=["serving", "serving by several ranks", *OTHERS])
def test_a_study_leaves_the_same_bytes_by_one_process_and_by_three(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: dict[str, Any]
) -> None:
    # However short the study is.
    for module in (decode_bench, crossover, tiling_study, operators_study):
        monkeypatch.setattr(module, "SHORT_S", 0.0)
    file = tmp_path / "jobs.yaml"
    file.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    for jobs in ("1", "3"):
        ran = CliRunner().invoke(app, ["run", str(file), "--jobs", jobs, "--out", str(tmp_path / jobs)])
        assert ran.exit_code == 0, ran.output
    names = {path.name for path in (tmp_path / "1").iterdir() if path.suffix in (".csv", ".parquet", ".gz")}
    assert {"results.csv", "trace.json.gz"} <= names
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes(), name


@slow
@pytest.mark.usefixtures("without_report")
def test_every_case_has_its_own_figures(tmp_path: Path) -> None:
    """Also where those that find out prices for the others are not the first ones."""

    def results(strategies: list[dict[str, Any]]) -> pd.DataFrame:
        file, out = tmp_path / "mixed.yaml", tmp_path / str(len(strategies))
        file.write_text(yaml.safe_dump({**MIXED, "strategies": strategies}), encoding="utf-8")
        ran = CliRunner().invoke(app, ["run", str(file), "--jobs", "2", "--out", str(out)])
        assert ran.exit_code == 0, ran.output
        rows = pd.read_csv(out / "results.csv")
        case = ["label", "devices", "ranks", "rate_per_s", "metric"]
        return rows[rows["metric"] != "speedup"].set_index(case)["value"].sort_index()

    together = results(MIXED["strategies"])
    alone = pd.concat([results([one]) for one in MIXED["strategies"]]).sort_index()
    assert len(together.index.droplevel("metric").unique()) == 3 * 2 * 2
    pd.testing.assert_series_equal(together, alone)
