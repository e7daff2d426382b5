"""The command line as a person meets it: files, exit codes, one line for a fault, nothing half-written."""

import csv
import json
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from simcore import cli, rundir
from simcore.cli import main
from tests.child_signals import child_signals
from tests.command_line import call
from tests.thorough import slow, thorough

ROOT = Path(__file__).resolve().parent.parent
QUICK = str(ROOT / "scenarios" / "alspec.yaml")
N150 = str(ROOT / "devices/profiles/n150/alspec-tables")
SETTINGS = ("crossover=[]", "context_tokens=1024", "strategies.1.ranks=2", "strategies.1.hits.value=0.5")
SMALL = [word for setting in SETTINGS for word in ("--set", setting)]
OTHERS = {
    "requests.parquet",
    "levels.parquet",
    "tiles.parquet",
    "cells.parquet",
    "growth.parquet",
    "ladder.csv",
    "prices.csv",
    "predicted_trace.json.gz",
    "predicted_results.csv",
    "predicted_steps.parquet",
    "predicted_requests.parquet",
    "predicted_levels.parquet",
}
FILES = rundir.FILES - OTHERS


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@slow
def test_a_file_name_alone_runs_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(QUICK, *SMALL) == 0
    assert {path.name for path in (here / "runs/alspec/sim").iterdir()} == FILES
    out = capsys.readouterr().out
    assert "is fastest" in out
    assert "runs/alspec/sim/report.html" in out
    # Nothing else is left behind, no draft either.
    assert [path.name for path in (here / "runs/alspec").iterdir()] == ["sim"]


@thorough
def test_the_same_run_gives_the_same_bytes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for name in ("a", "b"):
        assert call("run", QUICK, *SMALL, "--out", name, "--json") == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["answer"]
    for name in FILES - {"provenance.json", "report.html"}:
        assert (here / "a" / name).read_bytes() == (here / "b" / name).read_bytes(), name


@thorough
def test_results_are_tidy(here: Path) -> None:
    assert call(QUICK, *SMALL, "--quiet") == 0
    with (here / "runs/alspec/sim/results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [
        tuple(row[name] for name in ("label", "context_tokens", "batch", "hit_rate", "metric", "op_kind"))
        for row in rows
    ]
    assert len(set(keys)) == len(keys)
    assert {row["study"] for row in rows} == {"decode"}


def test_a_tape_is_printed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", QUICK, "--on", "tape", *SMALL) == 0
    out = capsys.readouterr().out
    assert "rank 3  main  speculate: attention verify_reduce" in out
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["run", "a/quickstartt"], "a/quickstartt: cannot be read: No such file or directory"),
        (
            ["run", "quickstartt"],
            "quickstartt: no such file or example; did you mean 'quickstart'? (allowed: ",
        ),
        (["plan", "quickstartt"], "quickstartt: no such file or example; did you mean 'quickstart'?"),
        (["validate", "quickstartt"], "quickstartt: no such file or example; did you mean 'quickstart'?"),
        (["run", "h200/servin"], "h200/servin: no such file or example; did you mean 'h200/serving'?"),
        (["run", "nowhere", "--point", "1"], "nowhere: is no run directory of a plan"),
        (["run", "agents_h20"], "did you mean 'capacity/agents_h200'?"),
        (["modles"], "'modles' is neither a file nor a command nor an example; did you mean 'models'?"),
        (["rn", QUICK], "'rn' is neither a file nor a command nor an example; did you mean 'run'?"),
        (
            ["run", QUICK, "--on", "cud"],
            "did you mean 'cuda'? (allowed: sim, cpu, cuda, tape)",
        ),
        (["run", QUICK, "--set", "device=h200"], "did you mean 'h200-sxm'?"),
        (["run", QUICK, "--set", "model=lama-7b"], "did you mean 'llama-7b'?"),
        (["run", QUICK, "--set", "link=nvlnk"], "link: n150: unknown link 'nvlnk'"),
        (["run", QUICK, "--set", "profile=x"], "allowed: alspec-tables"),
        (["run", QUICK, "--set", "batch=8", "--set", "profile=alspec-tables"], "holds for batch 1, not 8"),
        (["run", QUICK, "--set", "strategies.0.ranks=3"], "32 heads, which 3 ranks do not divide"),
        (["run", QUICK, "--set", "strategies.0.ranks=16"], "has ranks 1, 2, 4, 8, not 16"),
        (
            ["run", QUICK, "--set", "device=h200-sxm", "--set", f"profile={N150}"],
            "holds for n150, not h200-sxm",
        ),
        (["run", QUICK, "--set", "published=[alspec]"], "unknown set of figures 'alspec'"),
        (["run", QUICK, "--set", "model=nowhere.json"], "nowhere.json: cannot be read"),
        (["run", QUICK, "--set", "dtype=fp8", "--set", "profile=alspec-tables"], "leave out dtype"),
        (["run", QUICK, "--out", QUICK], "is a file"),
        (["run", QUICK, "--out", "."], "is the current directory"),
        (["run"], "FILE"),
        (["run", QUICK, "--jsno"], "--jsno"),
        (["report", "nowhere"], "is no run directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert call(*words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert list(here.iterdir()) == []


def test_a_directory_of_other_files_is_not_replaced(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").mkdir()
    (here / "mine" / "thesis.tex").write_text("years of work")
    assert call(QUICK, *SMALL, "--out", "mine") == 2
    assert (here / "mine" / "thesis.tex").read_text() == "years of work"
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("mounted", "is a mount point, and cannot be replaced"),
        ("new/run", "{here} cannot be written to"),
    ],
)
def test_where_nothing_can_be_written_is_told_before_the_run(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str, says: str
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "mounted")
    monkeypatch.setattr(os, "access", lambda path, mode: path != here)
    assert call(QUICK, *SMALL, "--out", target) == 2
    assert capsys.readouterr().err == f"error: --out {target}: {says.format(here=here)}\n"
    assert list(here.iterdir()) == []


@thorough
def test_what_a_user_put_into_a_run_directory_stays(here: Path) -> None:
    assert call(QUICK, *SMALL, "--out", "run", "--quiet") == 0
    (here / "run" / "note.txt").write_text("mine")
    assert call(QUICK, *SMALL, "--out", "run", "--quiet") == 2
    assert (here / "run" / "note.txt").read_text() == "mine"


@thorough
def test_an_earlier_run_is_replaced(here: Path) -> None:
    assert call(QUICK, *SMALL, "--out", "run", "--quiet") == 0
    assert call(QUICK, *SMALL, "--out", "run", "--quiet", "--set", "strategies.0.ranks=1") == 0
    assert 'tensor_parallel,"tensor parallel, 4' not in (here / "run" / "results.csv").read_text()
    assert {path.name for path in (here / "run").iterdir()} == FILES


@slow
@pytest.mark.usefixtures("without_report")
def test_a_run_can_be_repeated_from_what_it_left(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the model is a file of one's own, beside a scenario elsewhere."""
    (here / "mine").mkdir()
    model = (ROOT / "scenarios/models/llama-3.1-8b.json").read_text()
    (here / "mine" / "copy.json").write_text(model)
    (here / "mine" / "x.yaml").write_text(Path(QUICK).read_text().replace("llama-3.1-8b", "copy.json"))
    assert call("run", "mine/x.yaml", *SMALL, "--out", "first") == 0
    assert call("run", "first/scenario.yaml", "--out", "second") == 0
    capsys.readouterr()
    for name in ("results.csv", "scenario.yaml", "summary.json"):
        assert (here / "first" / name).read_bytes() == (here / "second" / name).read_bytes(), name


@slow
def test_a_report_of_garbage_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(QUICK, *SMALL, "--out", "run", "--quiet") == 0
    capsys.readouterr()
    for name in ("results.csv", "summary.json", "provenance.json", "timeline.json"):
        kept = (here / "run" / name).read_bytes()
        (here / "run" / name).write_text("garbage{")
        assert call("report", "run") == 2
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert name in printed.err
        (here / "run" / name).write_bytes(kept)


@slow
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m simcore schema | head -0; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, check=True)
    assert found.stdout.decode().strip() in ("0", "141")
    assert found.stderr == b""


@thorough
def test_figures_that_are_not_of_the_run_are_told_of(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(QUICK, *SMALL) == 0
    # The measured speed-up at 96K, which a run at 1K does not have.
    assert "1 of 5 published figures are not of this run" in capsys.readouterr().out


def test_what_does_not_fit_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strategies = 'strategies=[{"kind": "tensor_parallel"}]'
    words = ["--set", "model=llama-3.1-70b", "--set", strategies, "--set", "baseline=null"]
    assert call(QUICK, *SMALL, *words) == 2
    assert "nothing fits" in capsys.readouterr().err
    assert list(here.iterdir()) == []


SIGNALS = pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 143, "told to end", marks=thorough),
        pytest.param(signal.SIGHUP, 129, "hung up", marks=thorough),
    ],
)
# Said by a process that waits for a signal from here on, and how it ends where none came before its test did.
WAITS, UNHEARD = "waits", 3
# The command line, which waits in the middle of a run: where it is told of the first case that is done.
IN_A_RUN = f"""
import os, sys
from simcore import __main__, terminal

def waits(doing, done, total):
    print({WAITS!r}, flush=True)
    sys.stdin.read()
    os._exit({UNHEARD})

terminal.progress = lambda: waits
__main__.main()
"""
# The same while it is being loaded, by a module that keeps every exception to itself.
IN_AN_IMPORT = f"""
import os, sys

class Waits:
    def find_spec(self, name, path, target=None):
        if name == "simcore.cli":
            try:
                print({WAITS!r}, flush=True)
                sys.stdin.read()
            except BaseException:
                pass
            os._exit({UNHEARD})

sys.meta_path.insert(0, Waits())
from simcore import __main__
__main__.main()
"""
# By the first module of our own.
IN_THE_FIRST = IN_AN_IMPORT.replace("simcore.cli", "simcore.compiled")


def waiting(code: str, here: Path, *, heeded: int = 0, ignored: int = 0) -> subprocess.Popen[str]:
    """A process that runs the command line by some code, and has said that it waits. Of the signal `heeded`
    it has the default, `ignored` is one that it is started to ignore."""
    words = [sys.executable, "-c", code, "run", QUICK, *SMALL]
    before = {number: how for number, how in ((heeded, signal.SIG_DFL), (ignored, signal.SIG_IGN)) if number}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with child_signals(before):
        process = subprocess.Popen(
            words, cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, **pipes
        )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{WAITS}\n"
    return process


@slow
@SIGNALS
@pytest.mark.parametrize(
    "place", [IN_A_RUN, IN_AN_IMPORT, IN_THE_FIRST], ids=["in a run", "in an import", "in the first import"]
)
def test_interrupted_it_leaves_nothing_behind(
    place: str, number: int, code: int, says: str, tmp_path: Path
) -> None:
    process = waiting(place, tmp_path, heeded=number)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code
    assert errors.strip().endswith(f"error: {says}; nothing is left half-written")
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "cache", "kept"),
    [
        ("plan", "there", "; the same plan goes on from the runs that have ended"),
        ("plan", "none", ""),
        ("run", "there", ""),
    ],
)
def test_an_interrupted_plan_says_what_is_kept(
    command: str, cache: str, kept: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("SIMCORE_CACHE", cache)
    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main([command, QUICK])
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"error: interrupted; nothing is left half-written{kept}\n"


@thorough
def test_a_hang_up_that_is_ignored_ends_nothing(tmp_path: Path) -> None:
    """As `nohup` starts a command. Of two signals that wait the lower number is heard first."""
    process = waiting(IN_A_RUN, tmp_path, heeded=signal.SIGTERM, ignored=signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == 143


@pytest.mark.parametrize("command", ["devices", "engines", "models", "schedules"])
def test_catalogues_are_a_line_each(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert all(len(line.split()) > 2 for line in lines)


def test_the_version_is_that_of_the_package(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capfd.readouterr().out == f"simcore {version('simcore')}\n"


@pytest.mark.parametrize("words", [["-h"], ["run", "-h"], ["profile", "-h"]])
def test_a_short_option_helps(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert call(*words) == 0
    assert "Usage: " in capfd.readouterr().out


def test_shells_complete_commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simcore"])
    monkeypatch.setenv("_SIMCORE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "simcore re")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert call() == 0
    assert capfd.readouterr().out.split() == ["report"]


def test_commands_of_profiles_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("profile") == 0
    printed = capfd.readouterr()
    assert "import" in printed.out
    assert printed.err == ""


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("schema") == 0
    assert json.loads(capsys.readouterr().out)["properties"]["context_tokens"]


@thorough
def test_a_report_is_built_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(QUICK, *SMALL, "--out", "run", "--quiet") == 0
    first = (here / "run" / "report.html").read_bytes()
    (here / "run" / "report.html").unlink()
    capsys.readouterr()
    assert call("report", "run") == 0
    assert (here / "run" / "report.html").read_bytes() == first
    assert capsys.readouterr().err == ""
    (here / "run/summary.json").unlink()
    assert call("report", "run") == 0
    printed = capsys.readouterr().err
    assert printed == "note: run: without summary.json; the report has only what the rest says\n"


@pytest.mark.parametrize("given", ["0", "x", "-3", "1.5", "", "٣", "9" * 5000])
def test_jobs_are_a_whole_number(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "scenarios/quickstart.yaml", f"--jobs={given}"])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: --jobs: is ")
    assert said.endswith("; a whole number from 1 to 9999 is needed\n")
    assert len(said) < 300


def test_a_whole_number_with_a_point_is_told_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "scenarios/quickstart.yaml", "--out", str(tmp_path / "run"), "--set"]
    for given, example in (("1e3", ": 1000"), ("1e300", ""), ("2.5", "")):
        with pytest.raises(SystemExit) as ended:
            main([*words, f"workload.requests={given}"])
        assert ended.value.code == 2
        assert capsys.readouterr().err.endswith(f"; a whole number is needed{example}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("error", "code"), [(KeyError("x"), 1), (OSError(28, "No space left", "f"), 2)])
def test_a_fault_of_simcore_is_told_from_bad_input(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(words: Any) -> int:
        raise error

    monkeypatch.setattr(cli, "_run_app", fails)
    with pytest.raises(SystemExit) as ended:
        main(["devices"])
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert ("a fault of simcore" in said) == (code == 1)
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "command"),
    [
        ("t/p.yaml", "python -m simcore plan t/p.yaml"),
        ("my t/p.yaml", "python -m simcore plan 'my t/p.yaml'"),
        ("capacity/agents_h200", "python -m simcore plan capacity/agents_h200"),
    ],
)
@pytest.mark.parametrize("command_of", ["run", "validate"])
def test_a_plan_is_named_as_it_was_typed(
    here: Path, capsys: pytest.CaptureFixture[str], typed: str, command: str, command_of: str
) -> None:
    for folder in ("t", "my t"):
        (here / folder).mkdir()
        (here / folder / "p.yaml").write_text("base: quickstart\n")
    assert call(command_of, typed) == 2
    assert capsys.readouterr().err.endswith(f"is a plan, which `plan` answers: {command}\n")
