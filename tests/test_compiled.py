"""The compiled core: never taken for other sources, and nothing but quicker."""

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from simcore import compiled

ROOT = Path(__file__).resolve().parent.parent
COMPILED_ONLY = pytest.mark.skipif(not compiled.folder().is_dir(), reason="the core is not compiled")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with the same sources."""
    for source in compiled.sources():
        copy = tmp_path / source.relative_to(compiled.PACKAGE)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(source.read_bytes())
    return tmp_path


@pytest.mark.parametrize("module", compiled.MODULES)
def test_an_edited_source_is_another_key(module: str, package: Path) -> None:
    assert compiled.key(package) == compiled.key()
    source = package.joinpath(*module.split(".")).with_suffix(".py")
    source.write_bytes(source.read_bytes() + b"\n")
    assert compiled.key(package) != compiled.key()


def test_another_python_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.key()
    monkeypatch.setattr(sys, "version", "another")
    assert compiled.key() != before


@pytest.mark.parametrize("missing", [None, "sim", "ramps"])
def test_all_of_the_core_is_taken_or_nothing(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in compiled.MODULES:
        if module != missing:
            file = tmp_path.joinpath("simcore", *module.split(".")).with_suffix(EXTENSION_SUFFIXES[0])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = list(sys.meta_path)
    assert compiled.use() == (missing is None)
    assert (sys.meta_path == before) == (missing is not None)
    if missing is None:
        found = sys.meta_path[0].find_spec("simcore.sim", None)
        assert found is not None
        assert found.origin == str(tmp_path / f"simcore/sim{EXTENSION_SUFFIXES[0]}")
        assert sys.meta_path[0].find_spec("simcore.cli", None) is None


def test_the_sources_run_where_a_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SOURCES_ONLY, "1")
    monkeypatch.setattr(compiled, "folder", lambda: pytest.fail("looked for"))
    assert not compiled.use()


@COMPILED_ONLY
def test_compiled_core_and_sources_leave_the_same_bytes() -> None:
    told = []
    for words in ([], ["--compiled"]):
        command = [sys.executable, "-m", "tests.digests", "--count", "60", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        told.append(done.stdout.split())
    assert [who for who, _ in told] == ["sources", "compiled"]
    assert told[0][1] == told[1][1]


@COMPILED_ONLY
@pytest.mark.parametrize("words", [["schedules"], ["devices"], ["scenarios/nowhere.yaml"]])
def test_the_command_line_says_the_same(words: list[str]) -> None:
    said = []
    for sources_only in ("1", ""):
        environment = {**os.environ, compiled.SOURCES_ONLY: sources_only}
        command = [sys.executable, "-m", "simcore", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        said.append((done.returncode, done.stdout, done.stderr))
    assert said[0] == said[1]


@COMPILED_ONLY
def test_a_size_that_is_missing_is_told_by_the_compiled_core_too() -> None:
    program = """
from simcore import compiled
assert compiled.use()
from simcore.ops import Graph, Size
from simcore.sim import Simulation
from tests.programs import toy, toy_price
graph = Graph("g", (toy("op", Size("size")),))
Simulation(toy_price).run(lambda m: iter([m.launch(graph, sizes={})]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ValueError: graph g needs sizes that its launch does not give: ['size']" in done.stderr
