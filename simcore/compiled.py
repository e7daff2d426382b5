"""The core, compiled: whose modules they are, where they lie, and how a run takes them.

`pip install` compiles the modules of the event loop with mypyc where there is a C compiler (hatch_build.py);
what comes of it lies in `simcore/native/KEY`. KEY is made of their sources and of the Python that runs them,
so that a compiled module never stands for a source that was edited since: then, or where nothing was
compiled, the sources run, with the same results in three times the time of the event loop.

Only the command line takes them (`use`); whoever imports simcore gets the sources.
"""

import ast
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
MODULES = (
    "ramps",
    "paged_kv",
    "requests",
    "schedules.continuous_batching",
    "prefix_cache",
    "contention",
    "sharing",
    "sim_rows",
    "sim_host",
    "clock",
    "tariff",
    "trace",
    "sim",
    "segments",
)
# Set to anything, it lets the sources run.
SOURCES_ONLY = "SIMCORE_PURE_PYTHON"


def sources(package: Path = PACKAGE) -> list[Path]:
    """The files that are compiled."""
    return [package.joinpath(*module.split(".")).with_suffix(".py") for module in MODULES]


def key(package: Path = PACKAGE) -> str:
    """What compiled modules go by: sources, Python and system. Raises OSError where a source is missing."""
    digest = hashlib.sha256(repr((MODULES, sys.version, EXTENSION_SUFFIXES, sys.platform)).encode())
    for source in sources(package):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def folder(package: Path = PACKAGE) -> Path:
    """Where what belongs to the sources lies, if it was compiled."""
    return package / "native" / key(package)


def first_line(module: str, package: Path = PACKAGE) -> str:
    """What a module says it is, in the first line of its source: compiled, it does not."""
    source = package.parent.joinpath(*module.split(".")).with_suffix(".py")
    return (ast.get_docstring(ast.parse(source.read_bytes())) or "").splitlines()[0]


def use() -> bool:
    """Takes compiled modules from here on, and says whether there are any. To be called before any of them
    is imported."""
    if os.environ.get(SOURCES_ONLY):
        return False
    try:
        place = folder()
        found = {
            ".".join(file.relative_to(place).parts).removesuffix(EXTENSION_SUFFIXES[0]): file
            for file in place.rglob(f"*{EXTENSION_SUFFIXES[0]}")
        }
    except OSError:
        return False
    if not {f"simcore.{module}" for module in MODULES} <= found.keys():
        return False
    sys.meta_path.insert(0, _Compiled(found))
    return True


class _Compiled(MetaPathFinder):
    """Finds compiled modules by their names."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is, if it is one of them."""
        del path, target
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))
