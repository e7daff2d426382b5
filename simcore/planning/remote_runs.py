"""Runs made on another machine: what is sent there, and what is done with it there.

    common   of points that share prices: a scenario to put together, the prices known so far
    piece    a run: its scenario, its case, the replica, the end of the prices; the files that it reads
    basis    what results depend on besides: versions of packages, digests of simcore's code and data

Models and prices cannot be pickled, so the other side puts them together again, once for all runs of a
common part. It refuses a run where its basis or a file differs: then its result could differ. Results depend
neither on the runs before nor on the prices known, so they are those of this machine.
"""

import ctypes
import hashlib
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from simcore.assembly import MODELS, PACKAGE, assemble, versions
from simcore.input.files import InputError
from simcore.models.errors import ModelError
from simcore.planning.points import Point
from simcore.planning.runs import Ask, Ran, settle, simulated
from simcore.scenario import parse_scenario, resolved
from simcore.sim.graph_pricer import End, Known, PricedGroups, straight
from simcore.sim.kept import code_digest
from simcore.studies.own import is_own
from simcore.studies.serving.runner import Bench, NewPrices

# Benches that a worker keeps.
MOST_BENCHES = 64
# Between two attempts to end a run; and how many there are: a thread that has left the run is left in peace.
AGAIN_S, MOST_ATTEMPTS = 0.1, 20
# Prices, by ranks and group, as plain numbers: what the sizes are, costs, lines, lines that are packed. The
# classes themselves are pickled in one way by the compiled core and in another by its sources.
Plain = tuple[Any, ...]
Prices = dict[tuple[int, int], dict[str, Plain]]


class Gave(NamedTuple):
    """What a worker gives back. `refused`: why it makes no such run, then without the rest."""

    ran: Ran | None
    prices: Prices
    refused: str = ""


class Ended(Exception):  # noqa: N818 - it is no error
    """The plan of a run has ended."""


@dataclass(frozen=True)
class Piece:
    """A run. `plan`: its plan's name; `where`: what its scenario is called in messages; `fields`: of it, all
    written out; `files`: digests of what it names, by path; `body`: the pickled scenario of the bench, the
    case and the device's name."""

    plan: str
    where: str
    basis: Mapping[str, str]
    fields: Mapping[str, Any]
    files: Mapping[str, str]
    body: bytes
    replica: int
    end: End


# -- what results depend on ----------------------------------------------------------------------------------


# Endings of files that hold data.
DATA = (".yaml", ".csv", ".json")


@cache
def basis() -> dict[str, str]:
    """Returns what results depend on besides their scenario, by name."""
    digest = hashlib.sha256()
    data = (PACKAGE / "devices", MODELS, PACKAGE / "studies")
    files = [path for room in data for path in room.resolve().rglob("*") if path.suffix in DATA]
    for path in sorted(files, key=lambda path: (path.name, str(path))):
        digest.update(path.name.encode() + path.read_bytes())
    return {**versions(), "simcore's code": code_digest() or "unknown", "simcore's data": digest.hexdigest()}


def differs(theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    """Returns in words in what the basis of a worker differs from that of a plan; empty if in nothing."""
    for name, value in ours.items():
        if (there := theirs.get(name)) != value:
            if name.startswith("simcore"):
                return f"has another version of {name}"
            return f"has {name} {there}, and the plan {value}"
    return ""


def files_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the digest of each file or folder that a scenario names. Raises OSError."""
    return {path: _digest(path, _state(Path(path))) for path in sorted(_paths(fields))}


def _paths(value: Any) -> Iterator[str]:
    """Yields the paths in a scenario; of a user's own class that of its module."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _paths(each)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            yield from _paths(each)
    elif isinstance(value, str) and value.startswith("/"):
        if is_own(value):
            folder, _, name = value.rpartition("/")
            yield str(Path(folder, *name.partition(":")[0].split(".")).with_suffix(".py"))
        else:
            yield value


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and time of change of a file, or of each file of a folder."""
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return tuple((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in files)


@lru_cache(maxsize=1024)
def _digest(path: str, state: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for name, _, _ in state:
        digest.update(str(Path(name).relative_to(path)).encode() + Path(name).read_bytes())
    return digest.hexdigest()


def as_plain(prices: NewPrices) -> Prices:
    """Returns prices as plain numbers."""

    def lines(known: Known) -> dict[Any, Any]:
        return {
            place: found and [(one.start, one.end, *one.cost, *one.slope) for one in found]
            for place, found in known.lines.items()
        }

    return {
        of: {name: (each.reads, each.costs, lines(each), each.packed) for name, each in groups.items()}
        for of, groups in prices.items()
    }


def from_plain(prices: Prices) -> NewPrices:
    """The inverse of `as_plain`."""

    def known(reads: Any, costs: Any, lines: Any, packed: Any) -> Known:
        # Compiled code takes lists only, and what is sent comes as tuples.
        found = {place: each and [straight(list(one)) for one in each] for place, each in lines.items()}
        return Known(reads, costs, found, packed)

    return {of: {name: known(*each) for name, each in groups.items()} for of, groups in prices.items()}


# -- sent ----------------------------------------------------------------------------------------------------


def common(point: Point) -> bytes:
    """Returns what the runs of all points with the prices of this one have in common; its prices have to be
    settled."""
    known = as_plain(
        {
            (place, ranks): groups.known
            for place, bench in enumerate(point.bench.benches)
            for ranks, groups in bench.groups.items()
        }
    )
    return pickle.dumps((resolved(point.scenario), point.where, point.fleet, known))


def piece(plan: str, ask: Ask) -> bytes:
    """Returns a run as it is sent."""
    point, fields = ask.point, resolved(ask.point.scenario)
    body = pickle.dumps((point.bench.scenario, point.case, point.device))
    files = files_of(fields)
    return pickle.dumps(Piece(plan, point.where, basis(), fields, files, body, ask.replica, ask.end))


# -- on the other side ---------------------------------------------------------------------------------------


@dataclass
class _Here:
    """What a worker's process is doing. `thread`: that of the run under way, `plan`: whose it is; `ended`:
    plans that have ended."""

    plan: str = ""
    thread: int = 0
    ended: set[str] = field(default_factory=set)


_one_at_a_time = threading.Lock()
_watched = threading.Lock()
_here = _Here()
# By digest of their common part.
_benches: dict[bytes, Bench] = {}


def make(shared: bytes, sent: bytes) -> Gave:
    """Makes a run as it was sent; one at a time in a process, whose runs share models and prices."""
    wanted: Piece = pickle.loads(sent)
    with _one_at_a_time, _under_way(wanted.plan):
        if why := differs(basis(), wanted.basis) or _lacks(wanted):
            return Gave(None, {}, why)
        try:
            # First: a user's own class, which is imported by it, is pickled by its name.
            parse_scenario(dict(wanted.fields), wanted.where)
            bench = _bench(shared)
        except (InputError, ModelError) as error:
            return Gave(None, {}, f"says: {error}")
        scenario, case, device = pickle.loads(wanted.body)
        point = Point(bench.of(scenario), case, scenario, device)
        ask = Ask(point, wanted.replica, wanted.end)
        settle(ask)
        return Gave(simulated(ask), as_plain(bench.new_prices()))


def _lacks(wanted: Piece) -> str:
    for path, digest in wanted.files.items():
        try:
            here = _digest(path, _state(Path(path)))
        except OSError:
            return f"has no {path}, which the scenario names"
        if here != digest:
            return f"has another {path}, which the scenario names"
    return ""


def _bench(shared: bytes) -> Bench:
    """Returns the bench of a common part, with the prices that came with it."""
    name = hashlib.sha256(shared).digest()
    if name not in _benches:
        fields, where, fleet, known = pickle.loads(shared)
        parts = assemble(parse_scenario(fields, where), where, first_fleet=fleet)
        study: Any = parts.study
        bench: Bench = study.bench
        for (place, ranks), groups in from_plain(known).items():
            own = bench.benches[place]
            price = own.hardware.price(ranks, None, True)
            own.groups[ranks] = PricedGroups(price, own.hardware.roofline, groups)
        if len(_benches) >= MOST_BENCHES:
            _benches.clear()
        _benches[name] = bench
    return _benches[name]


@contextmanager
def _under_way(plan: str) -> Iterator[None]:
    """Lets `end` end the block. Raises Ended if the plan has ended."""
    try:
        with _watched:
            if plan in _here.ended:
                raise Ended(plan)
            _here.plan, _here.thread = plan, threading.get_ident()
        yield
    finally:
        _over()


def _over() -> None:
    """Notes that no run is under way, also where its end comes at this moment."""
    try:
        with _watched:
            _here.plan = ""
    except Ended:
        _over()
        raise


def end(plan: str) -> None:
    """Ends the run of a plan that is under way in this process, from another thread, and makes none that
    comes later."""
    with _watched:
        _here.ended.add(plan)
    threading.Thread(target=_end_run, args=(plan,), daemon=True).start()


def _end_run(plan: str) -> None:
    """Ends a run, again until it is over: whoever may not fail, such as a callback of the garbage collector,
    swallows an exception that comes there."""
    for _ in range(MOST_ATTEMPTS):
        with _watched:
            if _here.plan != plan:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(_here.thread), ctypes.py_object(Ended))
        time.sleep(AGAIN_S)
