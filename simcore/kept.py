"""Prices of graphs kept on disk: worked out once for a model on a device, and not in every run.

    folder $SIMCORE_CACHE, else $XDG_CACHE_HOME/simcore, else ~/.cache/simcore
    file   prices/<sha256 of the key>.npz
    key    everything that a price goes by: the device's figures, the profile's contents, links, what the host
           adds, the rank, the code of simcore and devices, the versions of Python and NumPy
    of     each group of ops (tariff.py), told apart by what its ops are: costs by sizes, stretches by octave

A price depends on its key and its sizes alone, so that a run by kept prices gives the same bytes as one
without. What is found broken, or cannot be written, is left aside. SIMCORE_CACHE=none keeps nothing.
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

from simcore.ramps import Straight
from simcore.tariff import ENDS, MOST_KNOWN, SOURCES, Key, Known, Place, PricedEnds

FORMAT = 1
OFF = "none"
# So many files are kept, of which the one that was used least lately goes first; a model on a device takes
# some megabytes.
MOST_FILES = 64
ROOT = Path(__file__).resolve().parent
# Costs of a group: seconds by end, floor, memory, arithmetic; of a stretch: from, to, first cost, slope.
COST, STRETCH = 6, 10
ENDING = ".npz"


@dataclass(frozen=True, slots=True)
class KeptPrices:
    """The prices of one device as a scenario uses it; `key`: the text of all that they go by but the code."""

    key: str
    folder: Path | None = None

    def load(self, ranks: int) -> dict[str, Known]:
        """What is known of each group, by its name; nothing where none is kept, or what is kept is broken."""
        path = self._path(ranks)
        if path is None:
            return {}
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = {name: _known(name, arrays) for name in arrays["groups"].tolist()}
            os.utime(path)
        except (OSError, ValueError, KeyError, EOFError, TypeError, IndexError, zipfile.BadZipFile):
            return {}
        return found

    def save(self, ranks: int, groups: Mapping[str, Known]) -> None:
        """Keeps what is known of each group, in the place of what was kept before."""
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
    """Where prices are kept; None where they are not to be."""
    given = os.environ.get("SIMCORE_CACHE")
    if given is not None:
        return Path(given) if given not in ("", OFF) else None
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "simcore"
    except RuntimeError:  # nobody's home
        return None


@cache
def code_digest() -> str | None:
    """A digest of the code that prices go by; None where it cannot be read."""
    digest = hashlib.sha256()
    files = sorted(path for room in (ROOT, ROOT.parent / "devices") for path in room.rglob("*.py"))
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
    """What is known of a group, as arrays: of n costs their keys, numbers and seconds by source [n, sources,
    ends]; of m stretches where they are, how many lines (-1: too many), and these."""
    costs = list(known.costs.items())[-MOST_KNOWN:]
    shares = np.zeros((len(costs), len(SOURCES), len(ENDS)))
    there = np.zeros((len(costs), len(SOURCES)), bool)
    for i, (_, priced) in enumerate(costs):
        for e, (_, of_source) in enumerate(priced):
            for source, seconds in of_source:
                shares[i, SOURCES.index(source), e] = seconds
                there[i, SOURCES.index(source)] = True
    numbers = [(p[0][0][0], p[1][0][0], p[2][0][0], *p[0][0][1:]) for _, p in costs]
    width = len(costs[0][0]) if costs else 0
    places = [
        (known.reads.index(grows), ENDS.index(end), octave, curved, _count(found), *others)
        for (grows, others, end, octave, curved), found in known.lines.items()
    ]
    lines = [
        (one.start, one.end, *one.cost, *one.slope)
        for found in known.lines.values()
        for one in (found if found is not None else ())
    ]
    return {
        f"{name}.reads": np.array(known.reads, dtype=np.str_),
        f"{name}.keys": np.array([key for key, _ in costs], np.int64).reshape(len(costs), width),
        f"{name}.costs": np.array(numbers, np.float64).reshape(len(costs), COST),
        f"{name}.shares": shares,
        f"{name}.there": there,
        f"{name}.places": np.array(places, np.int64).reshape(len(places), 5 + len(known.reads)),
        f"{name}.lines": np.array(lines, np.float64).reshape(len(lines), STRETCH),
    }


def _known(name: str, arrays: Mapping[str, Any]) -> Known:
    """The reverse of `_arrays`. Raises ValueError where it is none."""
    reads = tuple(arrays[f"{name}.reads"].tolist())
    numbers, shares, there = (arrays[f"{name}.{part}"] for part in ("costs", "shares", "there"))
    lines = arrays[f"{name}.lines"]
    if not all(np.isfinite(each).all() for each in (numbers, shares, lines)):
        raise ValueError("numbers are not finite")
    costs: dict[Key, PricedEnds] = {}
    rows = zip(
        arrays[f"{name}.keys"].tolist(), numbers.tolist(), shares.tolist(), there.tolist(), strict=True
    )
    for key, (value_s, low_s, high_s, *rest), seconds, known in rows:
        least_s, memory_s, compute_s = rest
        sources = [i for i, is_there in enumerate(known) if is_there]
        of_ends = (
            ((ending_s, least_s, memory_s, compute_s), tuple([(SOURCES[i], seconds[i][e]) for i in sources]))
            for e, ending_s in enumerate((value_s, low_s, high_s))
        )
        first, second, third = of_ends
        costs[tuple(key)] = first, second, third
    found: dict[Place, list[Straight] | None] = {}
    every = lines.tolist()
    done = 0
    for grows, end, octave, curved, count, *others in arrays[f"{name}.places"].tolist():
        place = (reads[grows], tuple(others), ENDS[end], octave, bool(curved))
        found[place] = [_straight(line) for line in every[done : done + count]] if count >= 0 else None
        done += max(0, count)
    if done != len(every):
        raise ValueError("lines are missing")
    return Known(reads, costs, found)


def _count(lines: list[Straight] | None) -> int:
    return -1 if lines is None else len(lines)


def _straight(line: list[float]) -> Straight:
    start, end, c0, c1, c2, c3, m0, m1, m2, m3 = line
    return Straight(int(start), int(end), (c0, c1, c2, c3), (m0, m1, m2, m3))
