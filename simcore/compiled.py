"""The compiled core: which modules are compiled, where the results lie, and how a run uses them.

`pip install` compiles the modules of the event loop with mypyc if there is a C compiler (hatch_build.py),
into `simcore/native/PYTHON-KEY`. KEY is a digest of their sources, of the sources that these import, and of
the kind of Python, so that a compiled module never replaces a source edited since. After an edit, or if
nothing was compiled, the sources run: same results, three times the time of the event loop.

The command line and `simcore.run` use the compiled modules (`use`), unless a module of the core was imported
before.
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
    "schedules.reservation",
    "sim.contention",
    "sim.sharing",
    "sim.power",
    "sim.rows",
    "sim.host",
    "sim.clock",
    "sim.graph_pricer",
    "machine.trace",
    "sim.simulation",
    "sim.segments",
    "machine.laws",
)
# Modules that MODULES import, directly or not: mypyc compiles their types in, for one the index of each item
# of a NamedTuple.
IMPORTED = (
    "schedules.host_calls",
    "models.context_limit",
    "models.decoder_config",
    "input.files",
    "machine.machine",
    "machine.mesh",
    "models.errors",
    "models.keys",
    "models.linear_config",
    "models.mixers",
    "ops.linear_attention",
    "ops.linear_layer",
    "models.decoder",
    "ops.op",
    "models.quantization",
    "models.quantized_modules",
    "models.served_decoder",
    "models.text_config",
)
# If this environment variable is set to anything, the sources run.
SOURCES_ONLY = "SIMCORE_PURE_PYTHON"
# Written last: the names and digests of all compiled files.
DIGESTS = "DIGESTS"
# End of mypyc's name for the one library with all the code; the modules only point to it.
LIBRARY = "__mypyc"


def _files(modules: Sequence[str], package: Path) -> list[Path]:
    return [package.joinpath(*module.split(".")).with_suffix(".py") for module in modules]


def wanted() -> bool:
    """Whether a C compiler seems to be there and SIMCORE_PURE_PYTHON is not set."""
    named = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    found = sys.platform == "win32" or shutil.which(named) is not None
    return found and not os.environ.get(SOURCES_ONLY)


def sources(package: Path = PACKAGE) -> list[Path]:
    """Returns the source files that are compiled."""
    return _files(MODULES, package)


def key(package: Path = PACKAGE) -> str:
    """Returns the digest that names compiled modules: of sources, Python and machine. Raises OSError if a
    source is missing."""
    kind = (MODULES, sys.implementation.cache_tag, EXTENSION_SUFFIXES, sys.platform, platform.machine())
    digest = hashlib.sha256(repr(kind).encode())
    for source in _files((*MODULES, *IMPORTED), package):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def folder(package: Path = PACKAGE) -> Path:
    """Returns the folder of the compiled modules for the current sources; it may not exist."""
    return package / "native" / f"{sys.implementation.cache_tag}-{key(package)}"


def _digests(place: Path) -> str:
    files = sorted(file for file in place.rglob("*") if file.suffix in {".so", ".pyd"})
    return "".join(
        f"{hashlib.sha256(file.read_bytes()).hexdigest()} {file.relative_to(place).as_posix()}\n"
        for file in files
    )


def note_digests(place: Path) -> None:
    """Writes the digests that mark a folder as whole."""
    (place / DIGESTS).write_text(_digests(place), encoding="utf-8")


def whole(place: Path) -> bool:
    """Whether a folder holds all compiled files, unchanged."""
    try:
        return (place / DIGESTS).read_text(encoding="utf-8") == _digests(place)
    except (OSError, UnicodeDecodeError):
        return False


def use() -> str:
    """Makes later imports take the compiled modules, if there are any. Returns a note for the user if they
    cannot be loaded, else an empty string. Call it before any module of the core is imported."""
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
    """Whether `use` has installed the compiled modules."""
    return any(isinstance(finder, _Compiled) for finder in sys.meta_path)


def _refused(why: str) -> str:
    return f"note: the compiled core is not used, the sources run: {why}; install simcore again"


class _Compiled:
    """An import finder for compiled modules."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a compiled module, or None for any other module."""
        del path, target
        file = self._files.get(fullname)
        if file is None:
            return None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, str(file)))
