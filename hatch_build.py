"""Compiles the core with mypyc while simcore is installed; see simcore/compiled.py.

Without a C compiler, or where anything else is in the way, simcore is installed all the same, and its sources
run. pip keeps the reason to itself unless it is asked (`pip -v`); every run says in its provenance which of
the two ran.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NEEDED = ["mypy>=1.13", "setuptools>=70"]
# Runs in a folder that holds a copy of the package; what is compiled goes into `out`. At a higher level the
# compiler takes up to twice as long, and services are simulated no faster. To judge the indentation of 13 MB,
# as Python's own flags ask, takes as long again. Types are those of simcore alone: the packages beside it,
# numpy among them, are objects to the compiled core anyway, and would be read for minutes.
COMPILE = """
import sys
from mypyc.build import mypycify
from setuptools import setup

flags = ["--ignore-missing-imports", "--follow-imports=silent", "--no-site-packages"]
extensions = mypycify([*flags, *sys.argv[1:]], debug_level="0", opt_level="1")
if sys.platform != "win32":
    for extension in extensions:
        extension.extra_compile_args.append("-Wno-misleading-indentation")
setup(
    name="core",
    packages=[],
    ext_modules=extensions,
    script_args=["-q", "build_ext", "--build-lib", "out"],
)
"""


class CompiledCore(BuildHookInterface[Any]):
    """Adds the compiled core to what is built."""

    def dependencies(self) -> list[str]:
        """What it takes to compile; nothing where nothing is going to be compiled."""
        return NEEDED if _load(self.root).wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is built (its compiled core goes into the wheel alone), or the tree is installed as
        it is (`pip install -e`: into the tree)."""
        compiled = _load(self.root)
        if not compiled.wanted():
            return
        package = Path(self.root) / "simcore"
        place = compiled.folder(package)
        try:
            if version == "editable":
                if not compiled.whole(place):
                    _into_the_tree(compiled, package, place)
            else:
                # Gone with this object, once the wheel is built.
                self._folder = tempfile.TemporaryDirectory()
                out = Path(self._folder.name) / place.name
                _compile(compiled, package, out)
                build_data["force_include"][str(out)] = str(place.relative_to(self.root))
        except (OSError, subprocess.SubprocessError) as error:
            self.app.display_warning(f"the core is not compiled, and long runs are slower: {error}")
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _load(root: str) -> Any:
    """`simcore.compiled` of a tree, which is not installed yet."""
    spec = importlib.util.spec_from_file_location("compiled", Path(root) / "simcore" / "compiled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _into_the_tree(compiled: Any, package: Path, place: Path) -> None:
    """Leaves the compiled core in its place, whole or not at all, and takes away what this Python had of
    sources that are gone. Another installation may do the same meanwhile."""
    place.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".draft-") as draft:
        out = Path(draft) / place.name
        _compile(compiled, package, out)
        shutil.rmtree(place, ignore_errors=True)
        try:
            out.rename(place)
        except OSError:
            if not compiled.whole(place):
                raise
    for other in place.parent.glob(f"{place.name.rpartition('-')[0]}-*"):
        if other != place:
            shutil.rmtree(other, ignore_errors=True)


def _compile(compiled: Any, package: Path, out: Path) -> None:
    """Compiles the core into a folder that is not there yet. Raises OSError, and SubprocessError with what
    the compiler says."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            package, Path(folder) / package.name, ignore=shutil.ignore_patterns("native", "__pycache__")
        )
        names = [str(source.relative_to(package.parent)) for source in compiled.sources(package)]
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, *names], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["it does not say why"]
            raise subprocess.SubprocessError(next((line for line in said if "error:" in line), said[-1]))
        shutil.copytree(Path(folder) / "out", out)
    compiled.note_digests(out)
