"""A command in a process of its own is gone when it is done with, and so is what it started.

What it started holds a pipe open for writing. Once that has ended, a reader meets the end of the pipe.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simcore.validate.apart import exit_code
from simcore.validate.benchmarks import kernels as bench_kernels
from simcore.validate.benchmarks.generation import Row, in_a_process
from tests.thorough import slow

ROOT = Path(__file__).resolve().parents[1]
UP = b"up\n"
PATIENCE_S, LATE_S = 20.0, 0.4


class Pipe:
    """A pipe in the file system that a child's child holds."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.starts = f"{{ echo up; exec sleep 60; }} > '{path}' &\n"

    def command(self, then: str = "wait") -> list[str]:
        """A command that starts the child and waits for it, or does something else."""
        return ["sh", "-c", f"{self.starts}{then}"]

    def read(self) -> bytes:
        """What comes next, once the pipe was opened; nothing if all that could write have ended."""
        assert select.select([self.reader], [], [], PATIENCE_S)[0], "nothing comes, and no end"
        return os.read(self.reader, len(UP))


@pytest.fixture
def pipe(tmp_path: Path) -> Pipe:
    return Pipe(tmp_path / "pipe")


def test_exit_codes_are_those_of_the_command() -> None:
    found = [exit_code(["sh", "-c", then], 60.0) for then in ("exit 0", "exit 3", "kill -9 $$")]
    assert found == [0, 3, -signal.SIGKILL]


def test_a_command_has_the_environment_that_it_is_given() -> None:
    assert exit_code(["sh", "-c", "exit $CODE"], 60.0, {**os.environ, "CODE": "7"}) == 7


@pytest.mark.parametrize(("then", "code"), [("wait", None), ("sleep 0.2; exit 3", 3)], ids=["late", "ended"])
@slow
def test_what_a_command_started_ends_with_it(pipe: Pipe, then: str, code: int | None) -> None:
    assert exit_code(pipe.command(then), LATE_S if code is None else 60.0) == code
    assert (pipe.read(), pipe.read()) == (UP, b"")


@slow
def test_what_a_method_started_ends_with_it(pipe: Pipe) -> None:
    row = Row("continuous", "transformers 5", "tiny", "fp32", 2, 5)
    assert in_a_process(pipe.command(), row, LATE_S) == "not done after 0.4 s"
    assert (pipe.read(), pipe.read()) == (UP, b"")


@slow
def test_what_a_part_started_ends_with_it(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{pipe.starts}wait\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert not bench_kernels.run_apart(["table"], [], LATE_S)
    assert capsys.readouterr().out == "FAILED part table: not done after 0 s\n"
    assert (pipe.read(), pipe.read()) == (UP, b"")


@pytest.mark.parametrize(("codes", "right"), [("00", True), ("01", False), ("20", False)])
def test_all_parts_run_whether_one_fails_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str, right: bool
) -> None:
    # The words are: -m MODULE --parts NAME.
    python, ran = tmp_path / "python", tmp_path / "ran"
    python.write_text(f"#!/bin/sh\necho $4 >> '{ran}'\nexit ${{4#*-}}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    parts = [f"{place}-{code}" for place, code in enumerate(codes)]
    assert bench_kernels.run_apart(parts, [], 60.0) is right
    assert ran.read_text(encoding="utf-8").split() == parts


# A program of this package, which has the default of each signal whatever the tests are started to ignore.
PARENT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)
from simcore.validate.apart import exit_code
from simcore.validate.program import run

def main() -> None:
    exit_code(["sh", "-c", sys.stdin.read()], 60.0)

run(main)
"""


@slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_program_that_is_ended_leaves_nothing_running(pipe: Pipe, number: int, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
    ) as parent:
        assert parent.stdin is not None
        parent.stdin.write(pipe.command()[-1].encode())
        parent.stdin.close()
        assert pipe.read() == UP
        parent.send_signal(number)
        assert parent.wait(PATIENCE_S) == code
    assert pipe.read() == b""


def test_a_programs_signals_are_as_before() -> None:
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in watched]
    assert exit_code(["true"], 60.0) == 0
    assert [signal.getsignal(number) for number in watched] == before
