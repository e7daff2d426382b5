"""Prices of graphs kept on disk: computed once for a model on a device, and not in every run.

    folder   $SIMCORE_CACHE, else $XDG_CACHE_HOME/simcore, else ~/.cache/simcore
    file     prices/<sha256 of the key>.npz
    key      everything that a price depends on: the device's figures, the profile's contents, links, what the
             host adds, the number of ranks, the code of simcore and devices, the machine type, the versions
             of Python and NumPy
    content  for each group of ops (graph_pricer.py), identified by its ops: costs by sizes, stretches by
             octave

A price depends on its key and its sizes alone, so a run with kept prices gives the same bytes as a run
without. Files that are broken or cannot be written are ignored. SIMCORE_CACHE=none keeps nothing.
"""

import hashlib
import os
import platform
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from simcore.sim.bursts import Straight
from simcore.sim.graph_pricer import ENDS, MOST_KNOWN, SOURCES, Key, Known, Place, PricedEnds

FORMAT = 5
OFF = "none"
# The least recently used files beyond this number are deleted; a model on a device takes some megabytes.
MOST_FILES = 64
ROOT = Path(__file__).resolve().parents[1]
# The count of numbers in a cost, in a stretch (`graph_pricer.straight`), and in a place without its sizes.
COST, STRETCH, PLACE = 15, 10, 5
# What a broken archive raises besides; the second one of features that it seems to have.
UNREADABLE = (zipfile.BadZipFile, NotImplementedError)
ENDING = ".npz"


@dataclass(frozen=True, slots=True)
class KeptPrices:
    """The prices of one device as a scenario uses it. `key`: a text of all that prices depend on except the
    ranks, the code and the versions; `folder` None keeps nothing."""

    key: str
    folder: Path | None = None

    def load(self, ranks: int) -> dict[str, Known]:
        """The kept prices of each group, by group name; empty if no file is kept or the file is broken."""
        path = self._path(ranks)
        if path is None:
            return {}
        try:
            # Opened here, because NumPy does not close a file that it cannot read.
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = {name: _known(name, arrays) for name in arrays["groups"].tolist()}
            os.utime(path)
        except (OSError, ValueError, KeyError, EOFError, TypeError, IndexError, *UNREADABLE):
            return {}
        return found

    def save(self, ranks: int, groups: Mapping[str, Known]) -> None:
        """Writes the prices of each group over the file kept before; does nothing if it cannot be written."""
        path = self._path(ranks)
        if path is None or not groups:
            return
        arrays: dict[str, Any] = {"groups": np.array(list(groups))}
        for name, known in groups.items():
            arrays.update(_arrays(name, known))
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as draft:
                try:
                    np.savez(draft, **arrays)
                    draft.close()
                    Path(draft.name).replace(path)
                except BaseException:
                    Path(draft.name).unlink(missing_ok=True)
                    raise
            _forget(path.parent)

    def _path(self, ranks: int) -> Path | None:
        code = code_digest()
        if self.folder is None or code is None:
            return None
        words = (FORMAT, platform.python_version(), platform.machine(), np.__version__, code, ranks, self.key)
        name = hashlib.sha256("\n".join(map(str, words)).encode()).hexdigest()
        return self.folder / "prices" / f"{name}{ENDING}"


def cache_folder() -> Path | None:
    """The folder of the cache; None if nothing is to be kept."""
    given = os.environ.get("SIMCORE_CACHE")
    if given is not None:
        return Path(given) if given not in ("", OFF) else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "simcore"
    except RuntimeError:  # no home folder
        return None


@cache
def code_digest() -> str | None:
    """A digest of the code that prices depend on, and of its tables; None if it cannot be read."""
    digest = hashlib.sha256()
    # `devices` may be a link, which rglob does not follow.
    rooms, names = (ROOT, ROOT / "devices"), ("*.py", "products.yaml")
    files = sorted({path for room in rooms for name in names for path in room.rglob(name)})
    try:
        for path in files:
            digest.update(f"{path.name}\n".encode() + path.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if files else None


def _forget(inside: Path) -> None:
    files = sorted(inside.glob(f"*{ENDING}"), key=lambda path: path.stat().st_mtime)
    for path in files[:-MOST_FILES]:
        path.unlink(missing_ok=True)


def _arrays(name: str, known: Known) -> dict[str, Any]:
    """The prices of a group as arrays: for n costs their keys, their numbers and their seconds by source
    [n, sources, ends]; for m places their keys and numbers of lines (-1: too many), and all the lines."""
    costs = list(known.costs.items())[-MOST_KNOWN:]
    shares = np.full((len(costs), len(SOURCES), len(ENDS)), np.nan)
    for i, (_, (_, by_source)) in enumerate(costs):
        for source, seconds in by_source:
            shares[i, SOURCES.index(source)] = seconds
    places = [(place, _count(found)) for place, found in known.lines.items()]
    places += [(place, len(found)) for place, found in known.packed.items()]
    lines = [
        (one.start, one.end, *one.cost, *one.slope) for found in known.lines.values() for one in found or ()
    ]
    of_places = [
        (known.reads.index(grows), ENDS.index(end), octave, curved, count, *others)
        for (grows, others, end, octave, curved), count in places
    ]
    width = len(known.reads)
    return {
        f"{name}.reads": np.array(known.reads, dtype=np.str_),
        f"{name}.keys": np.array([key for key, _ in costs], np.int64).reshape(len(costs), width),
        f"{name}.costs": np.array([each for _, (each, _) in costs], np.float64).reshape(len(costs), COST),
        f"{name}.shares": shares,
        f"{name}.places": np.array(of_places, np.int64).reshape(len(places), PLACE + width),
        f"{name}.lines": np.concatenate(
            [np.array(lines, np.float64).reshape(len(lines), STRETCH), *known.packed.values()]
        ),
    }


def _count(lines: list[Straight] | None) -> int:
    return -1 if lines is None else len(lines)


def _known(name: str, arrays: Mapping[str, Any]) -> Known:
    """The inverse of `_arrays`. Raises ValueError if the arrays are not as `_arrays` makes them."""
    reads = tuple(arrays[f"{name}.reads"].tolist())
    numbers, shares, lines = (arrays[f"{name}.{part}"] for part in ("costs", "shares", "lines"))
    if numbers.shape[1:] != (COST,) or lines.shape[1:] != (STRETCH,):
        raise ValueError("arrays are not what they must be")
    there = np.isfinite(shares).all(2)
    if not (np.isfinite(numbers).all() and np.isfinite(lines).all()):
        raise ValueError("numbers are not finite")
    costs: dict[Key, PricedEnds] = {}
    keys, each, of_source = arrays[f"{name}.keys"].tolist(), numbers.tolist(), shares.tolist()
    for key, row, seconds, known in zip(keys, each, of_source, there.tolist(), strict=True):
        by_source = [(source, tuple(s)) for source, s, ok in zip(SOURCES, seconds, known, strict=True) if ok]
        costs[tuple(key)] = tuple(row), tuple(by_source)
    found = Known(reads, costs)
    done = 0
    for grows, end, octave, curved, count, *others in arrays[f"{name}.places"].tolist():
        place: Place = (reads[grows], tuple(others), ENDS[end], octave, bool(curved))
        if count < 0:
            found.lines[place] = None
        else:
            found.packed[place] = lines[done : done + count]
            done += count
    if done != len(lines):
        raise ValueError("lines are missing")
    return found
