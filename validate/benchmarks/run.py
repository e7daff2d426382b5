"""The driver of all benchmarks: checks, captures and times calls in turns; saves and judges rows.

checked   ||out - truth|| / ||truth|| under its bar, truth in float64; outputs filled with NaN before
captured  one call for each set of buffers, checked once more as replayed
in turns  ours, each peer, ours again, each peer again
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import isnan, nan
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import OURS, OWN, Bar, Birth, Compared, Goal, Row, Shape
from simcore.validate.benchmarks.peers import Candidate, Peer
from simcore.validate.benchmarks.timing import Card, capture, one_line, replayed
from simcore.validate.program import write_csv

T = TypeVar("T")

ROUNDS = 2
# Every run draws the same numbers, so that runs are comparable.
SEED = 0
TORCH = f"torch {torch.__version__}"


@dataclass(slots=True)
class Bench:
    """One run: the card, the options, and the failures of our own kernels."""

    card: Card
    birth: Birth
    out: Path
    quick: bool
    peers: Sequence[Peer]
    failed: list[str] = field(default_factory=list)

    def save(self, part: str, rows: Sequence[Row], family: str = "decode") -> None:
        """Writes a part's rows so far; `family`: of kernels."""
        self.out.mkdir(parents=True, exist_ok=True)
        lines = [cases.cells(row, self.birth) for row in rows]
        write_csv(lines, self.out / cases.file_name(self.birth.device, part, family))

    def judge(self, row: Row) -> None:
        """Notes one of our own rows if it has no time."""
        if row.times is None:
            self.failed.append(f"{row.op} {' '.join(str(v) for v in row.shape.values())}: {row.note}")

    def floor_s(self, of: Shape) -> float:
        """Returns the seconds that moving a case's bytes takes."""
        return of.hbm_bytes / self.card.read_bytes_per_s

    def rotated(self, draw: Callable[[torch.Generator], T], set_bytes: int) -> list[T]:
        """Returns enough sets of buffers to keep each of them out of the cache until its turn."""
        generator = torch.Generator(device="cuda").manual_seed(SEED)
        return [draw(generator) for _ in range(cases.rotation(set_bytes, self.card.l2_bytes))]


def say(text: str) -> None:
    """Prints one line at once."""
    print(text, flush=True)


# -- one implementation ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Entry:
    """One implementation in one case: its row, and its captured calls if it is right."""

    row: Row
    graph: torch.cuda.CUDAGraph | None = None
    calls: int = 1
    # The graph's tensors, because a graph holds only pointers.
    keeps: object = None
    rounds: list[list[float]] = field(default_factory=list)


ErrorOf = Callable[[Tensor, Tensor], float]


def relative_error(out: Tensor, truth: Tensor) -> float:
    """Returns ||out - truth|| / ||truth||; NaN if `out` has one."""
    return float((out.double().reshape(truth.shape) - truth).norm() / truth.norm())


def worst_sequence(out: Tensor, truth: Tensor) -> float:
    """Returns the largest `relative_error` of one sequence; out and truth are [batch, ...]. The output of a
    long sequence is small: among short ones, no norm over all of them would show that it is wrong.

    >>> worst_sequence(torch.tensor([[100.0], [0.0]]), torch.tensor([[100.0], [1.0]]))
    1.0
    """
    pairs = zip(out.double().reshape(truth.shape), truth, strict=True)
    return max((relative_error(*pair) for pair in pairs), key=nan_last)


def tried(
    row: Row,
    candidates: Iterable[Candidate],
    truths: Sequence[Tensor],
    calls: int,
    poison: Callable[[], object],
    in_graph: Tensor | None = None,
    error_of: ErrorOf = relative_error,
) -> Entry:
    """Captures the fastest right candidate; `truths` of the first and last set of buffers. `in_graph`: the
    truth of the graph's last call, if it differs because calls add to earlier contents."""
    best, best_s, problem = Entry(row), float("inf"), replace(row, note="nothing to try")
    try:
        for candidate in candidates:
            entry = captured(row, candidate, truths, calls, poison, in_graph, error_of)
            if entry.graph is None:
                problem = entry.row
                say(f"  {row.implementation} {candidate.config}: {problem.note}")
                continue
            found_s = statistics.median(replayed(entry.graph, calls, quick=True))
            if found_s < best_s:
                best, best_s = entry, found_s
    except Exception as error:
        problem = replace(row, note=f"failed: {one_line(error)}")
        say(f"  {row.implementation}: {problem.note}")
    return Entry(problem) if best.graph is None else best


def captured(
    row: Row,
    candidate: Candidate,
    truths: Sequence[Tensor],
    calls: int,
    poison: Callable[[], object],
    in_graph: Tensor | None = None,
    error_of: ErrorOf = relative_error,
) -> Entry:
    """Captures a candidate if its first and last call are right alone, and the last also in the graph."""
    try:
        row = replace(row, config=candidate.config, brief=candidate.brief)
        row = replace(row, error=_worst_error(candidate, truths, poison, error_of))
        if row.wrong:
            return Entry(replace(row, note=f"WRONG: error {row.error:.2e} > {row.error_bar:.0e}"))
        in_order = [candidate.calls[i % len(candidate.calls)] for i in range(calls)]
        kept = list[Tensor]()
        graph = capture([*in_order[:-1], lambda: kept.append(in_order[-1]())])
        poison()
        graph.replay()
        last = truths[-1] if in_graph is None else in_graph
        error = max(row.error or 0.0, error_of(kept[-1], last), key=nan_last)
        row = replace(row, error=error)
        if row.wrong:
            return Entry(replace(row, note=f"WRONG in a graph: error {row.error:.2e} > {row.error_bar:.0e}"))
        return Entry(row, graph, calls, in_order)
    except Exception as error:
        torch.cuda.synchronize()
        return Entry(replace(row, error=None, note=f"failed: {one_line(error)}"))


def nan_last(error: float) -> float:
    """Sort key that puts NaN behind all numbers."""
    return float("inf") if isnan(error) else error


def _worst_error(
    candidate: Candidate, truths: Sequence[Tensor], poison: Callable[[], object], error_of: ErrorOf
) -> float:
    errors = []
    for call, truth in ((candidate.calls[0], truths[0]), (candidate.calls[-1], truths[-1])):
        poison()
        errors.append(error_of(call(), truth))
    return max(errors, key=nan_last)


def take_turns(entries: Sequence[Entry], cache_state: str, *, quick: bool) -> list[Row]:
    """Times entries in alternating rounds; returns their rows."""
    for _ in range(ROUNDS):
        for entry in entries:
            if entry.graph is not None:
                try:
                    entry.rounds.append(replayed(entry.graph, entry.calls, quick=quick))
                except Exception as error:
                    entry.graph, entry.row = None, replace(entry.row, note=f"failed: {one_line(error)}")
    return [
        entry.row if entry.graph is None else cases.timed(entry.row, cases.times(entry.rounds), cache_state)
        for entry in entries
    ]


# -- one case --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Way:
    """One implementation of a case. `name`: empty if it is our only one; `version`: package and version;
    `in_graph`: see `tried`."""

    name: str
    candidates: Iterable[Candidate]
    error_bar: float = cases.PEER_ERROR_BAR
    version: str = OWN
    in_graph: Tensor | None = None

    @property
    def label(self) -> str:
        """The name in tables."""
        return self.name if self.version != OWN else ", ".join(filter(None, (OURS, self.name)))


@dataclass(frozen=True, slots=True)
class Trial:
    """A case ready to run: our and the peers' ways; `truths` of the first and last set of buffers; a function
    called before each check; number of sets, bytes of each. `calls`: of a graph, default cases.calls_of;
    `error_of`: an output and its truth."""

    ways: Iterable[Way]
    truths: Sequence[Tensor]
    poison: Callable[[], object]
    sets: int
    set_bytes: int
    calls: int = 0
    cache_state: str = ""
    error_of: ErrorOf = relative_error


def compare(of: Shape, trial: Trial, bench: Bench) -> Compared:
    """Checks all ways, then times them in turns. Of our ways with the lowest error bar the fastest counts."""
    calls, entries = trial.calls or cases.calls_of(trial.sets), []
    for way in trial.ways:
        row = cases.row_of(of, way.label, way.version, way.error_bar)
        entries.append(
            tried(row, way.candidates, trial.truths, calls, trial.poison, way.in_graph, trial.error_of)
        )
    state = trial.cache_state or cases.cold(trial.sets, trial.set_bytes)
    rows = take_turns(entries, state, quick=bench.quick)
    ours = [row for row in rows if row.version == OWN]
    for row in ours:
        bench.judge(row)
    least = min(row.error_bar for row in ours)
    best = min((row for row in ours if row.error_bar == least), key=lambda row: row.median_s or float("inf"))
    peers = [row for row in rows if row.version != OWN]
    return Compared(str(of), best, peers, bench.floor_s(of), [row for row in ours if row is not best])


# -- a part ----------------------------------------------------------------------------------------------


class Part(Protocol):
    """A part that --parts can name."""

    @property
    def name(self) -> str:
        """The name in --parts."""

    def run(self, bench: Bench) -> list[Bar]:
        """Measures, saves, and returns the bars."""


@dataclass(frozen=True, slots=True)
class Other:
    """A part with its own way of comparison."""

    name: str
    run: Callable[[Bench], list[Bar]]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Cases of one kind beside peers. `measure`: compares in one case; `goals`: for each case, `bars`: for
    all cases together; `family`: of kernels, and `file`: in the table's name (default the part's name);
    `tabled`: whether to print a table at the end."""

    name: str
    cases: Sequence[Shape]
    measure: Callable[[Any, Bench], Compared]
    goals: Sequence[Goal] = ()
    family: str = "decode"
    file: str = ""
    bars: Callable[[Sequence[Compared]], list[Bar]] = lambda found: []
    tabled: bool = False

    def run(self, bench: Bench) -> list[Bar]:
        """Runs all cases; prints a line and saves after each."""
        found = list[Compared]()
        for of in self.cases:
            try:
                found.append(self.measure(of, bench))
            except Exception as error:
                bench.failed.append(f"{of}: {one_line(error)}")
                say(f"  failed: {one_line(error)}")
                row = replace(cases.row_of(of, OURS, OWN, nan), note=f"failed: {one_line(error)}")
                found.append(Compared(str(of), row, (), bench.floor_s(of)))
            bench.save(self.file or self.name, [row for one in found for row in one.rows], self.family)
            say(str(found[-1]))
            for row in found[-1].rows:
                if row.times and row.note:
                    say(f"  {row.label}: {row.note}")
            free()
        if self.tabled:
            lines = cases.table(found, bench.card.read_bytes_per_s)
            for line in (
                "",
                *lines,
                "us; % of read bandwidth; ratio: fastest peer / ours",
                cases.summary(found),
            ):
                say(line)
        return [*self.bars(found), *(goal.bar(found) for goal in self.goals)]


def free() -> None:
    """Frees the memory of the last case, and compiled functions: torch compiles one function for only a few
    shapes, and a peer would fail at the next."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def brief(config: Any) -> str:
    """Returns a layout's numbers, separated by slashes."""
    return "/".join(str(value) for value in astuple(config))
