"""What the parts of the benchmark share: calls that are checked, captured, and timed in turns.

checked   ||out - truth|| / ||truth|| under its bar, truth in float64; outputs filled with NaN before
captured  one call for each set of buffers, checked once more as replayed
in turns  ours, each peer, ours again, each peer again
"""

import gc
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, field, replace
from math import isnan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from simcore.validate.benchmarks import cases
from simcore.validate.benchmarks.cases import Birth, Compared, Row
from simcore.validate.benchmarks.peers import Candidate, Peer
from simcore.validate.benchmarks.timing import Card, capture, one_line, replayed

ROUNDS = 2
# Every run draws the same numbers, so that runs can be compared.
SEED = 0


@dataclass(slots=True)
class Bench:
    """One run: the card, what is asked for, and what went wrong with our own kernels."""

    card: Card
    birth: Birth
    out: Path
    quick: bool
    peers: Sequence[Peer]
    failed: list[str] = field(default_factory=list)

    def save(self, part: str, rows: Sequence[Row], family: str = "decode") -> None:
        """Writes what a part has so far; `family`: of kernels."""
        path = self.out / cases.file_name(self.birth.device, part, family)
        cases.write_atomically(path, cases.csv_text(rows, self.birth))

    def judge(self, row: Row) -> None:
        """Notes one of our own rows that has no time."""
        if row.times is None:
            self.failed.append(f"{row.op} {' '.join(str(v) for v in row.shape.values())}: {row.note}")


@dataclass(slots=True)
class Entry:
    """One implementation in one case: its row, and its captured calls where it is right."""

    row: Row
    graph: torch.cuda.CUDAGraph | None = None
    calls: int = 1
    # What the graph reads and writes: it holds pointers alone.
    keeps: object = None
    rounds: list[list[float]] = field(default_factory=list)


def say(text: str) -> None:
    """One line, at once."""
    print(text, flush=True)


def relative_error(out: Tensor, truth: Tensor) -> float:
    """||out - truth|| / ||truth||; NaN where out has one."""
    return float((out.double().reshape(truth.shape) - truth).norm() / truth.norm())


def tried(
    row: Row,
    candidates: Iterable[Candidate],
    truths: Sequence[Tensor],
    calls: int,
    poison: Callable[[], object],
    in_graph: Tensor | None = None,
) -> Entry:
    """The fastest right one of some candidates, captured; `truths` of the first and last set of buffers.
    `in_graph`: that of the last call in the graph, where it is another, for what adds to what is there."""
    best, best_s, problem = Entry(row), float("inf"), replace(row, note="nothing to try")
    try:
        for candidate in candidates:
            entry = captured(row, candidate, truths, calls, poison, in_graph)
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
) -> Entry:
    """A candidate whose first and last call are right by themselves, and the last in the graph too."""
    try:
        row = replace(row, config=candidate.config)
        row = replace(row, error=_worst_error(candidate, truths, poison))
        if row.wrong:
            return Entry(replace(row, note=f"WRONG: error {row.error:.2e} > {row.error_bar:.0e}"))
        in_order = [candidate.calls[i % len(candidate.calls)] for i in range(calls)]
        kept = list[Tensor]()
        graph = capture([*in_order[:-1], lambda: kept.append(in_order[-1]())])
        poison()
        graph.replay()
        last = truths[-1] if in_graph is None else in_graph
        error = max(row.error or 0.0, relative_error(kept[-1], last), key=nan_last)
        row = replace(row, error=error)
        if row.wrong:
            return Entry(replace(row, note=f"WRONG in a graph: error {row.error:.2e} > {row.error_bar:.0e}"))
        return Entry(row, graph, calls, in_order)
    except Exception as error:
        torch.cuda.synchronize()
        return Entry(replace(row, error=None, note=f"failed: {one_line(error)}"))


def nan_last(error: float) -> float:
    """A key that puts NaN behind all numbers."""
    return float("inf") if isnan(error) else error


def _worst_error(candidate: Candidate, truths: Sequence[Tensor], poison: Callable[[], object]) -> float:
    errors = []
    for call, truth in ((candidate.calls[0], truths[0]), (candidate.calls[-1], truths[-1])):
        poison()
        errors.append(relative_error(call(), truth))
    return max(errors, key=nan_last)


def take_turns(entries: Sequence[Entry], cache_state: str, *, quick: bool) -> list[Row]:
    """Times entries side by side, in rounds; their rows."""
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


Case = Callable[[Any, Bench], tuple[Compared, list[Row]]]


def compared_part(
    name: str, family: str, shapes: Sequence[object], case: Case, bench: Bench
) -> list[Compared]:
    """All cases of a part in which ours may have several ways, a line each; saved after each."""
    found, rows = list[Compared](), list[Row]()
    for of in shapes:
        try:
            one, rest = case(of, bench)
        except Exception as error:
            bench.failed.append(f"{of}: {one_line(error)}")
            say(f"{of} failed: {one_line(error)}")
        else:
            found.append(one)
            rows += [one.ours, *rest, *one.peers]
            bench.save(name, rows, family)
            say(cases.line_of(one, rest))
        free()
    return found


def free() -> None:
    """Gives the memory of the last case back, and what was compiled for it: of one function torch compiles no
    more than a few shapes, and a peer would fail at the next."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def brief(config: Any) -> str:
    """A layout's numbers, a slash between two."""
    return "/".join(str(value) for value in astuple(config))
