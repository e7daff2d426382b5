"""A wheel has nothing but simcore at its top, all of it, and works beside packages of others."""

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from simcore.compiled import SOURCES_ONLY
from tests.thorough import first, slow, thorough

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("devices", "kernels", "reports", "scenarios", "validate")
# Imports every module of simcore, but for those that begin a program.
EVERY_MODULE = """
import importlib, pkgutil, sys
import simcore

def unknown(name):
    raise

for module in pkgutil.walk_packages(simcore.__path__, "simcore.", onerror=unknown):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in sys.argv[1:]:
    assert importlib.import_module(name).of_others == name
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"simcore", *sys.argv[1:]}))
"""


def built(kind: str, tree: Path, out: Path) -> Path:
    """What hatchling makes of a tree."""
    words = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    environment = {**os.environ, SOURCES_ONLY: "1"}
    subprocess.run(words, cwd=tree, env=environment, capture_output=True, check=True)
    (file,) = out.iterdir()
    return file


def of_the_repository(out: Path) -> Path:
    return built("wheel", ROOT, out / "wheel")


def of_a_source_archive(out: Path) -> Path:
    """As `python -m build` makes it: from the archive, which has no links."""
    with tarfile.open(built("sdist", ROOT, out / "sdist")) as archive:
        archive.extractall(out, filter="data")
    (tree,) = out.glob("simcore-*")
    return built("wheel", tree, out / "wheel")


def files_of(folder: Path, name: str) -> set[str]:
    """Code and data of a folder, as they are called in a wheel."""
    suffixes = {".py", ".yaml", ".json", ".csv", ".html", ".css", ".js"}
    paths = (path for path in folder.rglob("*") if path.suffix in suffixes)
    within = {path.relative_to(folder).as_posix() for path in paths}
    return {
        f"{name}/{path}" for path in within if "profiles/cpu/" not in path and not path.startswith("native/")
    }


@slow
@pytest.mark.parametrize("made", first(1, [of_the_repository, of_a_source_archive]))
def test_a_wheel_has_all_of_simcore_and_nothing_beside_it(
    made: Callable[[Path], Path], tmp_path: Path
) -> None:
    pytest.importorskip("hatchling")
    with zipfile.ZipFile(made(tmp_path)) as wheel:
        names = wheel.namelist()
    assert len(names) == len(set(names))
    information = {name for name in names if name.startswith("simcore-")}
    assert {name.partition("/")[0] for name in {*names} - information} == {"simcore"}
    assert {name.partition("/")[0] for name in information} == {"simcore-0.1.0.dist-info"}
    wanted = files_of(ROOT / "simcore", "simcore").union(
        *(files_of(ROOT / f, f"simcore/{f}") for f in FOLDERS)
    )
    assert len(wanted) > 300
    assert wanted <= {*names}
    assert not [name for name in names if "__pycache__" in name or "/native/" in name]


@thorough
def test_an_installation_works_beside_packages_of_others(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    with zipfile.ZipFile(of_the_repository(tmp_path)) as wheel:
        wheel.extractall(site)
    for name in FOLDERS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(f"of_others = {name!r}\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(site), SOURCES_ONLY: "1"}

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said("-c", EVERY_MODULE, *FOLDERS).split() == sorted(("simcore", *FOLDERS))
    assert "quickstart" in said("-m", "simcore", "examples")
    said("-m", "simcore", "init", "decoder_layer")
    small = ["--set", "batch=[1]", "--set", "context_tokens=[1024]", "--set", "tokens=1", "--quiet"]
    said("-m", "simcore", "decoder_layer.yaml", *small, "--out", "run")
    assert (here / "run/report.html").is_file()
    assert "--profile" in said("-m", "simcore.validate.engines.compare", "--help")
