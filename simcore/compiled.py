"""The core, compiled: whose modules they are, where they lie, and how a run takes them.

`pip install` compiles the modules of the event loop with mypyc where there is a C compiler (hatch_build.py);
what comes of it lies in `simcore/native/PYTHON-KEY`. KEY is made of their sources, of the sources that these
import, and of the kind of Python, so that a compiled module never stands for what was edited since: then, or
where nothing was compiled, the sources run, with the same results in three times the time of the event loop.

The command line and `simcore.run` take them (`use`), unless a module of the core was imported before.
"""

import hashlib
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent
MODULES = (
    "sim.bursts",
    "schedules.paged_kv",
    "workload.requests",
    "schedules.continuous_batching",
    "schedules.prefix_cache",
    "sim.contention",
    "sim.sharing",
    "sim.rows",
    "sim.host",
    "sim.clock",
    "sim.graph_pricer",
    "machine.trace",
    "sim.simulation",
    "sim.segments",
    "machine.laws",
)
# What these import, and what that imports: mypyc goes by the types there. An item of a NamedTuple is read by
# its index, for one.
IMPORTED = (
    "models.context_limit",
    "models.decoder_config",
    "input.files",
    "machine.machine",
    "machine.mesh",
    "models.errors",
    "models.keys",
    "models.decoder",
    "ops.op",
    "models.quantization",
    "models.quantized_modules",
    "models.served_decoder",
    "models.text_config",
)
# Set to anything, it lets the sources run.
SOURCES_ONLY = "SIMCORE_PURE_PYTHON"
# Written last: names and digests of all that was compiled.
DIGESTS = "DIGESTS"
# How mypyc names the one library with all the code; the modules only point to it.
LIBRARY = "__mypyc"


def _files(modules: Sequence[str], package: Path) -> list[Path]:
    return [package.joinpath(*module.split(".")).with_suffix(".py") for module in modules]


def wanted() -> bool:
    """Whether there is a C compiler, as far as one can tell, and nobody says no."""
    named = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    found = sys.platform == "win32" or shutil.which(named) is not None
    return found and not os.environ.get(SOURCES_ONLY)


def sources(package: Path = PACKAGE) -> list[Path]:
    """The files that are compiled."""
    return _files(MODULES, package)


def key(package: Path = PACKAGE) -> str:
    """What compiled modules go by: sources, Python and machine. Raises OSError where a source is missing."""
    kind = (MODULES, sys.implementation.cache_tag, EXTENSION_SUFFIXES, sys.platform, platform.machine())
    digest = hashlib.sha256(repr(kind).encode())
    for source in _files((*MODULES, *IMPORTED), package):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def folder(package: Path = PACKAGE) -> Path:
    """Where what belongs to the sources lies, if it was compiled."""
    return package / "native" / f"{sys.implementation.cache_tag}-{key(package)}"


def _digests(place: Path) -> str:
    files = sorted(file for file in place.rglob("*") if file.suffix in {".so", ".pyd"})
    return "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()} {file.relative_to(place).as_posix()}\n"
        for file in files
    )


def note_digests(place: Path) -> None:
    """Says that a folder is whole."""
    (place / DIGESTS).write_text(_digests(place), encoding="utf-8")


def whole(place: Path) -> bool:
    """Whether a folder holds all that was compiled."""
    try:
        return (place / DIGESTS).read_text(encoding="utf-8") == _digests(place)
    except (OSError, UnicodeDecodeError):
        return False


def use() -> str:
    """Takes compiled modules from here on, if there are any; what a user has to know of some that cannot be
    taken. To be called before any of them is imported."""
    if os.environ.get(SOURCES_ONLY):
        return ""
    try:
        place = folder()
        if not place.is_dir():
            return ""
    except OSError:
        return ""
    if not whole(place):
        return _refused("files are missing or damaged")
    suffix = EXTENSION_SUFFIXES[0]
    found = {
        ".".join(file.relative_to(place).parts).removesuffix(suffix): file
        for file in place.rglob(f"*{suffix}")
    }
    finder = _Compiled(found)
    sys.meta_path.insert(0, finder)
    try:
        for library in (name for name in found if name.endswith(LIBRARY)):
            import_module(library)
    except ImportError as error:
        sys.meta_path.remove(finder)
        return _refused(" ".join(str(error).split())[:120])
    return ""


def imported() -> bool:
    """Whether a module of the core was imported, compiled or not: then it is too late for `use`."""
    return any(f"{__package__}.{module}" in sys.modules for module in MODULES)


def in_use() -> bool:
    """Whether `use` has taken them."""
    return any(isinstance(finder, _Compiled) for finder in sys.meta_path)


def _refused(why: str) -> str:
    return f"note: the compiled core is not used, the sources run: {why}; install simcore again"


class _Compiled:
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
