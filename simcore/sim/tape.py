"""The machine that prints: the simulated machine with ops of one second and verbs that cost nothing.

It prints a line for each launch, in the order in which the hosts issue them:

    rank 0  main  between: o attn_residual ... | when priority != 0 | sets holds = priority > rank 1 priority

It serves to read a strategy, and for tests, which compare a strategy's tape with a reviewed tape and its op
counts with a closed form.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from simcore.machine.machine import Condition, Flag, Machine, Program, Setting, Ticket, Verdict, Wait
from simcore.machine.mesh import Mesh
from simcore.models.decoder import TENSOR
from simcore.ops.op import Graph, Op, Price
from simcore.sim.simulation import Outcomes, Simulation
from simcore.workload.requests import END, REQUESTS, Request


def one_second(op: Op) -> Price:
    """Prices every op at one second; an early part leaves after half a second."""
    del op
    return Price(1.0, 1.0, 1.0, "assumed", "tape", early_s=0.5)


@dataclass(slots=True)
class Tape:
    """The launches of a run: printed lines, and (rank, graph, repeat) for counting."""

    lines: list[str] = field(default_factory=list)
    graphs: list[tuple[int, Graph, int]] = field(default_factory=list)

    def op_count(self, rank: int) -> int:
        """Ops launched on a rank, times replays; launches with `when` count in full."""
        return sum(len(graph.ops) * repeat for r, graph, repeat in self.graphs if r == rank)


def record(
    program: Callable[[Machine], Program],
    *,
    mesh: Mesh | None = None,
    outcomes: Outcomes | None = None,
    inbox: Sequence[Request] = (),
) -> Tape:
    """Runs a program on every rank and returns its launches. If `inbox` holds requests, rank 0 gets them as
    they arrive, and only the first rank of each tensor-parallel group runs."""
    simulation = Simulation(one_second, mesh=mesh, outcomes=outcomes, lockstep=(TENSOR,) if inbox else ())
    if inbox:
        arriving: list[tuple[float, object]] = [(request.arrival_s, request) for request in inbox]
        simulation.feed(0, REQUESTS, [*arriving, (arriving[-1][0], END)])
    tape = Tape()
    simulation.run(lambda m: program(_TapeMachine(m, tape)))
    return tape


# At least this many equal layers are folded.
FOLDED = 4


def folded(ops: Sequence[Op]) -> str:
    """The names of ops, in order; a repeated sequence (layers) is written once.

    >>> from simcore.ops.op import norm
    >>> a, b = (norm(name, tokens=1, hidden=1, dtype="bf16") for name in "ab")
    >>> folded([b, a, b, a, b, a, b, a, b])
    '4 x (b a) b'
    """
    words, i = [], 0
    while i < len(ops):
        period = next((p for p in range(1, len(ops) - i) if ops[i + p] is ops[i]), 0)
        times = 1
        while period and _same(ops, i, i + times * period, period):
            times += 1
        if times >= FOLDED:
            words.append(f"{times} x ({' '.join(op.name for op in ops[i : i + period])})")
            i += times * period
        else:
            words.append(ops[i].name)
            i += 1
    return " ".join(words)


def _same(ops: Sequence[Op], i: int, j: int, count: int) -> bool:
    return j + count <= len(ops) and all(ops[i + k] is ops[j + k] for k in range(count))


class _TapeMachine:
    """A machine that passes each launch on and writes it to the tape."""

    def __init__(self, machine: Machine, tape: Tape) -> None:
        self._machine = machine
        self._tape = tape
        self.rank = machine.rank
        self.world = machine.world
        self.mesh = machine.mesh
        self._tickets: dict[int, str] = {}

    def launch(
        self,
        graph: Graph,
        *,
        stream: str = "main",
        after: Sequence[Ticket] = (),
        sizes: Mapping[str, int] | None = None,
        advance: Mapping[str, int] | None = None,
        repeat: int = 1,
        until: str | None = None,
        when: Condition | None = None,
        sets: Mapping[Flag, Setting] | None = None,
        batch: Callable[[], Any] | None = None,
        within: Ticket | None = None,
    ) -> Ticket:
        """Launches the graph and writes a line for it."""
        ticket = self._machine.launch(
            graph, stream=stream, after=after, sizes=sizes, advance=advance, repeat=repeat, until=until,
            when=when, sets=sets, batch=batch, within=within,
        )  # fmt: skip
        parts = [f"rank {self.rank}  {stream}  {graph.name}: {folded(graph.ops) or '-'}"]
        if within is not None:
            parts.append(f"within {self._tickets.get(id(within), 'a launch')}")
        if after:
            parts.append("after " + ", ".join(self._tickets.get(id(t), "a launch") for t in after))
        if read := {name: value for name, value in (sizes or {}).items() if name in graph.needs}:
            parts.append(", ".join(f"{name} {value}" for name, value in read.items()))
        if repeat > 1:
            parts.append(f"repeat {repeat}" + (f" until {until}" if until else ""))
        if when:
            parts.append("when " + self._condition(when))
        if sets:
            parts.append(
                "sets " + ", ".join(f"{self._flag(f)} = {self._setting(v)}" for f, v in sets.items())
            )
        self._tape.lines.append(" | ".join(parts))
        self._tape.graphs.append((self.rank, graph, repeat))
        return self._named(ticket, graph.name)

    def _named(self, ticket: Ticket, name: str) -> Ticket:
        # The tape keeps no tickets: if a new ticket gets the id of a deleted one, its name replaces the old.
        self._tickets[id(ticket)] = name
        return ticket

    def _flag(self, flag: Flag) -> str:
        return flag.name if flag.rank == self.rank else f"rank {flag.rank} {flag.name}"

    def _condition(self, condition: Condition) -> str:
        right = condition.right
        shown = self._flag(right) if isinstance(right, Flag) else str(right)
        return f"{self._flag(condition.left)} {condition.comparison} {shown}"

    def _setting(self, setting: Setting) -> str:
        if isinstance(setting, Condition):
            return self._condition(setting)
        if isinstance(setting, Verdict):
            key = ", ".join(map(str, setting.key))
            return f"{setting.yes} if {setting.name}({key}) else {setting.no}"
        return str(setting)

    def signal(self, name: str, rank: int | None = None) -> Ticket:
        """See Machine."""
        source = self.rank if rank is None else rank
        return self._named(self._machine.signal(name, rank), f"signal {name} of rank {source}")

    def now(self) -> float:
        """See Machine."""
        return self._machine.now()

    def along(self, axis: str, offset: int = 0) -> int:
        """See Machine."""
        return self._machine.along(axis, offset)

    def coordinate(self, axis: str) -> int:
        """See Machine."""
        return self._machine.coordinate(axis)

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """See Machine."""
        return self._machine.flag(name, rank, initial)

    def wait(self, *tickets: Ticket) -> Wait:
        """See Machine."""
        return self._machine.wait(*tickets)

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """See Machine."""
        return self._machine.read(flag, after)

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """See Machine."""
        return self._machine.recv(inbox, timeout_s)

    def poll(self, inbox: str) -> list[Any]:
        """See Machine."""
        return self._machine.poll(inbox)

    def send(self, inbox: str, item: object, rank: int) -> None:
        """See Machine."""
        self._machine.send(inbox, item, rank)

    def spawn(self, program: Program) -> Ticket:
        """See Machine."""
        return self._machine.spawn(program)

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """See Machine."""
        self._machine.mark(name, after)

    def gauge(self, name: str, value: float, limit: float) -> None:
        """See Machine."""
        self._machine.gauge(name, value, limit)
