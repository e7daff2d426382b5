"""The compiled core: never taken for other sources, and nothing but quicker."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import yaml

from simcore import compiled
from tests.thorough import first, slow, thorough

ROOT = Path(__file__).resolve().parent.parent
COMPILED_ONLY = pytest.mark.skipif(not compiled.whole(compiled.folder()), reason="the core is not compiled")


GOES_BY = (*compiled.MODULES, *compiled.IMPORTED)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with the same sources."""
    for module in GOES_BY:
        source = source_of(module)
        copy = tmp_path / source.relative_to(compiled.PACKAGE)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(source.read_bytes())
    return tmp_path


def source_of(module: str, package: Path = compiled.PACKAGE) -> Path:
    return package.joinpath(*module.split(".")).with_suffix(".py")


def imports_of(module: str) -> set[str]:
    """The modules of simcore that one imports, for its types alone too."""
    found = set()
    for node in ast.walk(ast.parse(source_of(module).read_bytes())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    names = (name.removeprefix("simcore.") for name in found if name.startswith("simcore."))
    return {name for name in names if source_of(name).is_file()}


@slow
def test_the_key_goes_by_all_that_the_core_imports() -> None:
    reached, left = set(compiled.MODULES), set(compiled.MODULES)
    while left:
        left = {name for module in left for name in imports_of(module)} - reached
        reached |= left
    assert reached == set(GOES_BY)


@pytest.mark.parametrize("module", GOES_BY)
def test_an_edited_source_is_another_key(module: str, package: Path) -> None:
    assert compiled.key(package) == compiled.key()
    source = source_of(module, package)
    source.write_bytes(source.read_bytes() + b"\n")
    assert compiled.key(package) != compiled.key()


def test_another_python_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = compiled.key()
    monkeypatch.setattr(sys.implementation, "cache_tag", "another")
    assert compiled.key() != before


def put(place: Path, missing: str | None) -> None:
    """What stands for a compiled core, but for one module of it."""
    for module in compiled.MODULES:
        if module != missing:
            file = place.joinpath("simcore", *module.split(".")).with_suffix(EXTENSION_SUFFIXES[0])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"code")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a core is looked for."""
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path / "core")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path / "core"


def test_the_whole_core_is_taken_and_nothing_else(place: Path) -> None:
    put(place, None)
    compiled.note_digests(place)
    assert not compiled.in_use()
    assert compiled.use() == ""
    assert compiled.in_use()
    found = sys.meta_path[0].find_spec("simcore.sim.simulation", None)
    assert found is not None
    assert found.origin == str(place / f"simcore/sim/simulation{EXTENSION_SUFFIXES[0]}")
    assert sys.meta_path[0].find_spec("simcore.cli", None) is None


def cut(file: Path) -> None:
    file.write_bytes(b"cod")


def spoil(file: Path) -> None:
    """As long as before."""
    file.write_bytes(b"\0" * file.stat().st_size)


@pytest.mark.parametrize(
    "harm", [cut, spoil, Path.unlink, lambda file: file.with_name(f"x{file.name}").touch()]
)
@pytest.mark.parametrize("module", ["sim/simulation", "sim/bursts"])
def test_a_damaged_core_is_refused_in_one_line(
    module: str, harm: Callable[[Path], None], place: Path
) -> None:
    put(place, None)
    compiled.note_digests(place)
    harm(place / f"simcore/{module}{EXTENSION_SUFFIXES[0]}")
    before = list(sys.meta_path)
    assert compiled.use() == (
        "note: the compiled core is not used, the sources run: "
        "files are missing or damaged; install simcore again"
    )
    assert sys.meta_path == before


def test_a_core_that_cannot_be_loaded_is_refused(place: Path) -> None:
    put(place, None)
    (place / f"5af3{compiled.LIBRARY}{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    compiled.note_digests(place)
    before = list(sys.meta_path)
    said = compiled.use()
    assert sys.meta_path == before
    assert said.startswith("note: the compiled core is not used, the sources run: ")
    assert "\n" not in said
    assert len(said) < 300


@thorough
@pytest.mark.parametrize("closed", [False, True])
def test_what_is_refused_is_told_on_stderr_alone(closed: bool) -> None:
    program = """
import sys
from simcore import __main__, compiled
compiled.use = lambda: "note: refused"
sys.argv = ["simcore", "schedules"]
__main__.main()
"""
    shell = f'exec "$0" -c "$1" {"2>&-" if closed else ""}'
    command = ["sh", "-c", shell, sys.executable, program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ("" if closed else "note: refused\n")
    assert done.stdout.startswith("tensor_parallel ")


def test_whether_it_is_to_be_compiled_goes_by_the_compiler_and_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my-cc").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(compiled.SOURCES_ONLY, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("CC", "my-cc -O2")
    assert compiled.wanted()
    monkeypatch.setenv(compiled.SOURCES_ONLY, "1")
    assert not compiled.wanted()
    monkeypatch.delenv(compiled.SOURCES_ONLY)
    monkeypatch.setenv("CC", "no-cc")
    assert not compiled.wanted()


def test_where_nothing_was_compiled_nothing_is_said(place: Path) -> None:
    assert not place.exists()
    assert compiled.use() == ""
    assert not compiled.in_use()


def test_the_sources_run_where_a_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SOURCES_ONLY, "1")
    monkeypatch.setattr(compiled, "folder", lambda: pytest.fail("looked for"))
    assert not compiled.use()


@slow
@COMPILED_ONLY
def test_compiled_core_and_sources_leave_the_same_bytes() -> None:
    printed = []
    for words in ([], ["--compiled"]):
        command = [sys.executable, "-m", "tests.digests", "--count", "60", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        printed.append(done.stdout.split())
    assert [who for who, _ in printed] == ["sources", "compiled"]
    assert printed[0][1] == printed[1][1]


@slow
@COMPILED_ONLY
@pytest.mark.parametrize("words", first(1, [["scenarios/nowhere.yaml"], ["devices"], ["schedules"]]))
def test_the_command_line_says_the_same(words: list[str]) -> None:
    said = []
    for sources_only in ("1", ""):
        environment = {**os.environ, compiled.SOURCES_ONLY: sources_only}
        command = [sys.executable, "-m", "simcore", *words]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        said.append((done.returncode, done.stdout, done.stderr))
    assert said[0] == said[1]


@thorough
@COMPILED_ONLY
def test_a_run_of_the_command_line_is_the_same_and_says_who_ran(tmp_path: Path) -> None:
    length = {"kind": "uniform", "low": 5, "high": 90}
    scenario = {
        "name": "small",
        "study": "serving",
        "device": "h200-sxm",
        "model": "llama-3.1-8b",
        "workload": {
            "requests": 60,
            "arrivals": {"kind": "poisson", "rate_per_s": 40},
            "prompt_tokens": length,
            "output_tokens": length,
        },
        "strategies": [{"kind": "continuous_batching"}, {"kind": "concurrent_instances", "max_instances": 4}],
    }
    (tmp_path / "scenario.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    results, ran = [], []
    for sources_only in ("1", ""):
        out = tmp_path / f"run{sources_only}"
        command = [sys.executable, "-m", "simcore", "run", str(tmp_path / "scenario.yaml"), "--out", str(out)]
        environment = {**os.environ, compiled.SOURCES_ONLY: sources_only, "PYTHONPATH": str(ROOT)}
        subprocess.run(command, env=environment, capture_output=True, check=True)
        results.append((out / "results.csv").read_bytes())
        ran.append(json.loads((out / "provenance.json").read_bytes())["event_loop"])
    assert ran == ["sources", "compiled"]
    assert results[0] == results[1]


@slow
@COMPILED_ONLY
@pytest.mark.parametrize(("first", "ran"), [("", "compiled"), ("import simcore.sim.bursts", "sources")])
def test_from_python_the_compiled_core_runs_unless_a_module_of_it_was_imported(first: str, ran: str) -> None:
    program = f"""
{first}
import simcore
scenario = {{"name": "x", "study": "decode", "device": "a100-sxm-80gb", "model": "tiny-llama",
             "context_tokens": 16, "strategies": [{{"kind": "tensor_parallel"}}]}}
print(simcore.run(scenario).provenance["event_loop"])
"""
    environment = {**os.environ, compiled.SOURCES_ONLY: "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [ran]


@COMPILED_ONLY
@slow
def test_a_size_that_is_missing_is_told_by_the_compiled_core_too() -> None:
    program = """
from simcore import compiled
assert not compiled.use()
assert compiled.in_use()
from simcore.ops.op import Graph, Size
from simcore.sim.simulation import Simulation
from tests.programs import toy, toy_price
graph = Graph("g", (toy("op", Size("size")),))
Simulation(toy_price).run(lambda m: iter([m.launch(graph, sizes={})]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "ValueError: graph g needs sizes that its launch does not give: ['size']" in done.stderr
