"""Plans on a Dask cluster: the same figures as here, whatever becomes of its workers, and what is refused."""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from simcore import cli
from simcore.input.files import InputError
from simcore.planning import dask_cluster, remote_runs
from simcore.planning.plan import Plan, run
from simcore.planning.points import Benches, Point
from simcore.planning.runs import Ask, settle, simulated
from simcore.planning.whatif import load_plan
from simcore.scenario import parse_scenario
from tests.test_planning import BASE
from tests.thorough import slow

GRID = {"base": BASE, "vary": {"devices": [1, 2], "seed": [1, 2]}, "replicas": 5}


OWN = """
from simcore.studies.serving.strategies import ContinuousBatching


class Mine(ContinuousBatching):
    kind: str

    def label(self):
        return "mine"
"""


def planned(folder: Path, document: Any, dask: str | None = None, progress: Any = None) -> Plan:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    asked = load_plan(path, "grid")
    return run(asked, jobs=1, progress=progress or (lambda doing, done, total: None), dask=dask)


def point_of(document: dict[str, Any]) -> Point:
    scenario: Any = parse_scenario(document, "test")
    (point,) = Benches("test", 1).points(scenario)
    return point


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="pip install 'simcore[dask]'")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
    ) as made:
        yield made


# -- what is sent --------------------------------------------------------------------------------------------


@slow
def test_what_is_sent_gives_the_same_run() -> None:
    point = point_of(BASE)
    for end in ("value", "high"):
        ask = Ask(point, 3, end)  # type: ignore[arg-type]
        settle(ask)
        gave = remote_runs.make(remote_runs.common(point), remote_runs.piece("a", ask))
        assert (gave.ran, gave.refused) == (simulated(ask), "")


def test_prices_that_are_sent_are_not_found_again() -> None:
    point = point_of({**BASE, "seed": 5})
    ask = Ask(point, 0)
    settle(ask)
    first = remote_runs.make(remote_runs.common(point), remote_runs.piece("a", ask))
    assert any(first.prices.values())
    point.bench.take_over(remote_runs.from_plain(first.prices))
    again = remote_runs.make(remote_runs.common(point), remote_runs.piece("a", ask))
    assert again.ran == first.ran
    assert not any(again.prices.values())


def test_another_file_or_version_is_refused(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": %d, "input_length": 20, "output_length": 5}\n'
    trace.write_text("".join(line % at for at in range(0, 4000, 100)))
    arrivals = {"kind": "trace", "format": "mooncake", "path": str(trace)}
    document = {**BASE, "workload": {"arrivals": arrivals}}
    ask = Ask(point_of(document), 0)
    settle(ask)
    shared, sent = remote_runs.common(ask.point), remote_runs.piece("a", ask)
    assert remote_runs.make(shared, sent).refused == ""
    trace.write_text(trace.read_text() + line % 5000)
    assert remote_runs.make(shared, sent).refused == f"has another {trace}, which the scenario names"
    trace.unlink()
    assert remote_runs.make(shared, sent).refused == f"has no {trace}, which the scenario names"
    wanted: remote_runs.Piece = pickle.loads(sent)
    other = pickle.dumps(replace(wanted, files={}, basis={**wanted.basis, "numpy": "1.0"}))
    assert "has numpy" in remote_runs.make(shared, other).refused


@pytest.fixture
def without_garbage() -> Iterator[None]:
    """What comes in hypothesis's callback of the garbage collector would be lost, with a warning."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_garbage")
def test_a_run_under_way_ends_with_its_plan() -> None:
    many = {**BASE["workload"], "requests": 300_000}
    ask = Ask(point_of({**BASE, "workload": many}), 0)
    settle(ask)
    shared, sent = remote_runs.common(ask.point), remote_runs.piece("ended", ask)
    raised: list[str] = []

    def make() -> None:
        try:
            remote_runs.make(shared, sent)
        except remote_runs.Ended as ended:
            raised.append(type(ended).__name__)

    thread = threading.Thread(target=make)
    thread.start()
    while remote_runs._here.plan != "ended":
        time.sleep(0.01)
    time.sleep(0.2)
    remote_runs.end("ended")
    thread.join(timeout=30.0)
    assert not thread.is_alive()
    make()
    assert raised == ["Ended", "Ended"]


@pytest.mark.usefixtures("without_garbage")
def test_a_run_ends_though_its_end_was_swallowed_once() -> None:
    swallowed: list[bool] = []

    def make() -> None:
        with suppress(remote_runs.Ended), remote_runs._under_way("swallowed"):
            while len(swallowed) < 2:
                try:
                    while True:
                        time.sleep(0.001)
                except remote_runs.Ended:
                    swallowed.append(True)

    thread = threading.Thread(target=make)
    thread.start()
    while remote_runs._here.plan != "swallowed":
        time.sleep(0.001)
    remote_runs.end("swallowed")
    thread.join(timeout=30.0)
    assert len(swallowed) == 2
    assert remote_runs._here.plan == ""


# -- on a cluster --------------------------------------------------------------------------------------------


@slow
def test_a_cluster_finds_what_one_process_finds(cluster: Any, tmp_path: Path) -> None:
    here, there = planned(tmp_path, GRID), planned(tmp_path, GRID, cluster.scheduler_address)
    assert here.lines == there.lines
    assert here.summary() == there.summary()
    assert there.simulated == here.simulated
    assert there.made_by == "Dask, 2 workers"


@slow
@pytest.mark.usefixtures("own_modules")
def test_a_strategy_of_ones_own_runs_there_by_its_file(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "own_there.py").write_text(OWN)
    document = {**GRID, "base": {**BASE, "strategies": [{"kind": "own_there:Mine"}]}, "replicas": 2}
    there = planned(tmp_path, document, cluster.scheduler_address)
    assert {line["label"] for line in there.lines} == {"mine"}
    assert there.lines == planned(tmp_path, document).lines
    before = remote_runs.files_of({"kind": f"{tmp_path}/own_there:Mine"})
    (tmp_path / "own_there.py").write_text(OWN + "\n# changed\n")
    after = remote_runs.files_of({"kind": f"{tmp_path}/own_there:Mine"})
    assert [*before] == [*after] == [str(tmp_path / "own_there.py")]
    assert before != after


@slow
def test_the_command_line_with_the_compiled_core_takes_runs_from_a_cluster(
    cluster: Any, tmp_path: Path
) -> None:
    """Tests run the sources; the command line runs what was compiled, in which types are strict."""
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(GRID))
    words = [sys.executable, "-m", "simcore", "plan", "p.yaml", "--quiet"]
    for out, more in (("there", ["--dask", cluster.scheduler_address]), ("here", ["--jobs", "1"])):
        done = subprocess.run(
            [*words, "--out", out, *more],
            cwd=tmp_path,
            env={**os.environ, "SIMCORE_CACHE": "none"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "there/points.csv").read_bytes() == (tmp_path / "here/points.csv").read_bytes()


@slow
def test_a_worker_that_dies_loses_no_run(cluster: Any, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(doing: str, done: int, total: int) -> None:
        if done == 2:
            killed.append(next(iter(cluster.workers.values())).process.pid)
            os.kill(killed[0], signal.SIGKILL)

    there = planned(tmp_path, GRID, cluster.scheduler_address, kill_one)
    assert killed
    assert there.lines == planned(tmp_path, GRID).lines


@slow
def test_a_plan_that_is_ended_leaves_no_task_and_keeps_its_runs(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIMCORE_CACHE", str(tmp_path / "cache"))

    def interrupt(doing: str, done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        planned(tmp_path, GRID, cluster.scheduler_address, interrupt)
    for _ in range(100):
        if not cluster.scheduler.tasks:
            break
        time.sleep(0.1)
    assert not cluster.scheduler.tasks
    again = planned(tmp_path, GRID, cluster.scheduler_address)
    assert again.known == 5
    monkeypatch.setenv("SIMCORE_CACHE", "none")
    assert again.lines == planned(tmp_path, GRID).lines


@slow
def test_a_worker_with_other_code_is_refused(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = remote_runs.basis()
    for name, says in (("simcore's code", "has another version of simcore's code"), ("numpy", "has numpy ")):
        monkeypatch.setattr(dask_cluster, "basis", lambda name=name: {**ours, name: "other"})
        with pytest.raises(InputError, match=f"--dask tcp://.*: worker tcp://.* {says}"):
            planned(tmp_path, GRID, cluster.scheduler_address)


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address", ["", "localhost", "tcp://:80", "http://a:80", "tcp://a:0", "tcp://a:99999"]
)
def test_an_address_that_is_none_is_one_line(address: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no address; tcp://HOST:PORT of a Dask scheduler is needed"):
        planned(tmp_path, GRID, address)


def test_without_dask_the_line_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r"Dask is not installed: pip install 'simcore\[dask\]'"):
        planned(tmp_path, GRID, "tcp://127.0.0.1:8786")


@slow
def test_where_no_scheduler_is_the_plan_ends_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="pip install 'simcore[dask]'")
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 0.5)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(InputError, match="no scheduler answers there"):
            planned(tmp_path, GRID, address)


def test_jobs_are_of_processes_here(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(GRID))
    words = ["plan", str(path), "--jobs", "2", "--dask", "tcp://a:1"]
    assert "leave one of them out" in str(CliRunner().invoke(cli.app, words).exception)
