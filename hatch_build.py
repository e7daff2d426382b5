"""Compiles the core with mypyc while simcore is installed; see simcore/compiled.py.

Without a C compiler, or where anything else is in the way, simcore is installed all the same and says so.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# Runs in a folder that holds a copy of the package; what is compiled goes into `out`.
COMPILE = """
import sys
from mypyc.build import mypycify
from setuptools import setup

flags = ["--ignore-missing-imports", "--follow-imports=silent"]
setup(
    name="core",
    packages=[],
    ext_modules=mypycify([*flags, *sys.argv[1:]]),
    script_args=["-q", "build_ext", "--build-lib", "out"],
)
"""


class CompiledCore(BuildHookInterface[Any]):
    """Adds the compiled core to what is built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is built, or the tree is installed as it is (`pip install -e`)."""
        if self.target_name != "wheel":
            return
        package = Path(self.root) / "simcore"
        compiled = _load(package / "compiled.py")
        place = compiled.folder(package)
        if not place.exists():
            try:
                _compile(package, compiled.sources(package), place)
            except (OSError, subprocess.SubprocessError) as error:
                self.app.display_warning(f"the core is not compiled, and long runs are slower: {error}")
                return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("compiled", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compile(package: Path, sources: list[Path], place: Path) -> None:
    """Leaves what is compiled in a place of its own, whole or not at all. Raises OSError, and
    SubprocessError with what the compiler says last."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            package, Path(folder) / package.name, ignore=shutil.ignore_patterns("native", "__pycache__")
        )
        names = [str(source.relative_to(package.parent)) for source in sources]
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, *names], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            raise subprocess.SubprocessError(" ".join(said))
        # What belongs to sources that are gone.
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        draft = place.with_suffix(".part")
        shutil.copytree(Path(folder) / "out", draft)
        draft.rename(place)
