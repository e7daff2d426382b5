"""Tiny ops, prices and random programs that the tests of the machine share.

A toy op says in its shape what it costs: `hundredths` of a second, and which percentage of that time it
keeps the memory and the arithmetic busy; a random program is spelled by a few bytes, so that hypothesis
shrinks it to the shortest one that still fails.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st

from simcore.machine.machine import Condition, Flag, Machine, Overheads, Program, Setting, Ticket, Verdict
from simcore.machine.trace import Trace
from simcore.ops import op as ops
from simcore.ops.op import Floor, Graph, Op, Price, Publication, Size, Work
from simcore.sim.simulation import Simulation

NO_EARLY = 100


def _no_work(op: Op) -> Work:
    del op
    return Work(0.0, 0.0)


def toy(name: str, hundredths: int | Size, *, memory: int = 0, compute: int = 0, early: int = NO_EARLY) -> Op:
    """A local op of so many hundredths of a second; `memory` and `compute` in percent of its time, and
    `early` the percentage after which its early part leaves."""
    shape = (("hundredths", hundredths), ("memory", memory), ("compute", compute), ("early", early))
    return Op("toy", name, shape, "bf16", _no_work)


def toys(name: str, *hundredths: int, memory: int = 0, compute: int = 0) -> Graph:
    """A graph of toy ops."""
    return Graph(
        name, tuple(toy(f"{name}{i}", h, memory=memory, compute=compute) for i, h in enumerate(hundredths))
    )


def meet(name: str, hundredths: int, ranks: int, axis: str = "tensor") -> Op:
    """A collective of so many hundredths of a second."""
    return ops.all_reduce(name, elements=hundredths, ranks=ranks, axis=axis, dtype="bf16")


def sends(name: str, hundredths: int, *, signal: str, put: int = 0, early: int = NO_EARLY) -> Graph:
    """A graph of one op that publishes `signal` after `early` percent of it; the put takes `put`."""
    hop = ops.put(f"{name} put", elements=put, axis="tensor", dtype="bf16")
    return Graph(name, (toy(name, hundredths, early=early),), (Publication(signal, 0, hop),))


def toy_price(op: Op) -> Price:
    """What the shape says."""
    if op.kind != "toy":
        seconds = op["elements"] / 100
        return Price(seconds, seconds, seconds, "measured", "toy")
    seconds = op["hundredths"] / 100
    early_s = None if op["early"] == NO_EARLY else seconds * op["early"] / 100
    return Price(seconds, seconds, seconds, "measured", "toy", early_s)


def toy_roofline(op: Op) -> Floor:
    """The shares that the shape says; a collective is never faster than half its price."""
    if op.kind != "toy":
        return Floor(0.0, 0.0, op["elements"] / 200)
    seconds = op["hundredths"] / 100
    return Floor(seconds * op["compute"] / 100, seconds * op["memory"] / 100, 0.0)


def by_name(seconds: Mapping[str, float], early: Mapping[str, float] | None = None) -> Callable[[Op], Price]:
    """Prices by the name of an op; everything that is not named is free."""

    def price(op: Op) -> Price:
        s = seconds.get(op.name, 0.0)
        return Price(s, s, s, "assumed", "by name", (early or {}).get(op.name))

    return price


# -- random programs -----------------------------------------------------------------------------


@dataclass(slots=True)
class Choices:
    """Choices read from bytes; when they are used up, always the first."""

    left: Iterator[int]

    def below(self, n: int) -> int:
        return next(self.left, 0) % n

    def one_of(self, *options: object) -> object:
        return options[self.below(len(options))]


@dataclass(slots=True)
class Step:
    """One verb that every rank carries out; costs and sizes may differ from rank to rank."""

    verb: str
    stream: str = "main"
    graphs: tuple[Graph, ...] = ()
    after: tuple[int, ...] = ()
    repeat: int = 1
    size: int = 1
    condition: str = ""
    setting: str = ""
    takes: str = ""
    number: int = 0
    patience_s: float = 0.0

    def can_be_stopped(self) -> bool:
        """Whether no other rank counts on what it does."""
        meets = any(op.ranks > 1 or graph.publishes for graph in self.graphs for op in graph.ops)
        return not meets and self.setting in ("", "loose")


@dataclass(slots=True)
class RandomProgram:
    """A program in which nothing can wait for ever: a wait is only for what comes earlier in it, on
    whatever rank, and launches that ranks must agree on depend on flags on which ranks agree."""

    mesh: dict[str, int]
    overheads: Overheads
    steps: list[Step] = field(default_factory=list)
    arrivals: tuple[tuple[float, int], ...] = ()

    def simulate(self) -> Trace:
        """One run."""
        simulation = Simulation(
            toy_price,
            mesh=self.mesh,
            roofline=toy_roofline,
            overheads=self.overheads,
            outcomes={"odd": lambda key: key % 2 == 1},
        )
        for rank in range(len(simulation.machines)):
            simulation.feed(rank, "fed", self.arrivals)
            simulation.feed(rank, "maybe", self.arrivals)
        return simulation.run(self.program)

    def program(self, m: Machine) -> Program:
        tickets: list[Ticket] = []
        stoppable: list[Ticket] = []
        loose = m.flag("loose")
        for number, step in enumerate(self.steps):
            match step.verb:
                case "launch":
                    tickets.append(_launch(m, step, number, tickets, loose))
                    stoppable += tickets[-1:] if step.can_be_stopped() else []
                case "wait":
                    yield m.wait(*_chosen(tickets, step.after))
                case "read" if tickets:
                    value = yield m.read(loose, tickets[step.number % len(tickets)])
                    m.gauge("read", float(value), 1.0)
                case "pass on":
                    m.send("ring", number, m.along(_axis(m), 1))
                    yield m.recv("ring")
                case "fed":
                    yield m.recv("fed")
                case "maybe":
                    yield m.recv("maybe", timeout_s=step.patience_s)
                case "stop":
                    for ticket in _chosen(stoppable, step.after):
                        ticket.stop()
                case "spawn":
                    tickets.append(m.spawn(_child(m, number, step)))
                case "mark":
                    m.mark(f"mark {number}", _chosen(tickets, step.after))
                case "gauge":
                    m.gauge("level", float(step.number), 9.0)
        m.mark("end", tickets)
        yield m.wait(*tickets)


def _axis(m: Machine) -> str:
    return list(m.mesh)[-1]


def _chosen(tickets: Sequence[Ticket], which: Sequence[int]) -> list[Ticket]:
    return [tickets[i % len(tickets)] for i in which] if tickets else []


def _launch(m: Machine, step: Step, number: int, tickets: Sequence[Ticket], loose: Flag) -> Ticket:
    agreed = m.flag(f"agreed {step.stream}", initial=1)
    theirs = m.flag("loose", rank=m.along(_axis(m), 1))
    when: Condition | None = {
        "agreed": agreed.nonzero(),
        "not agreed": agreed.zero(),
        "loose": loose.above(theirs),
    }.get(step.condition)
    sets: dict[Flag, Setting] = {
        "one": {agreed: 1},
        "verdict": {agreed: Verdict("odd", (number,), yes=0, no=2)},
        "turn": {agreed: agreed.zero()},
        "loose": {loose: loose.above(theirs)},
    }.get(step.setting, {})
    after = _chosen(tickets, step.after)
    if step.takes:
        after.append(m.signal(step.takes, rank=m.along(_axis(m), -1)))
    return m.launch(
        step.graphs[m.rank % len(step.graphs)],
        stream=step.stream,
        after=after,
        sizes={"size": step.size},
        repeat=step.repeat,
        when=when,
        sets=sets,
    )


def _child(m: Machine, number: int, step: Step) -> Program:
    first = m.launch(toys(f"child {number}", 3, memory=60), stream="child")
    yield m.recv("maybe", timeout_s=step.patience_s)
    second = m.launch(toys(f"child {number}", 2, compute=90), stream="child", after=[first])
    yield m.wait(second)


def _local(c: Choices, name: str) -> Op:
    hundredths = Size("size") if c.below(4) == 0 else c.below(9)
    return toy(name, hundredths, memory=(0, 40, 90, 100)[c.below(4)], compute=(0, 30, 100)[c.below(3)])


def _graphs(c: Choices, mesh: Mapping[str, int], stream: str, publishes: bool) -> tuple[Graph, ...]:
    """A graph per rank (by turns): the same collectives, with other local ops between them."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    met = [
        meet(f"meet{i}", c.below(6), mesh[axis], axis)
        for i in range(c.below(3))
        if axes and (axis := axes[c.below(len(axes))])
    ]
    graphs = []
    for rank in range(1 + c.below(2)):
        body: list[Op] = [_local(c, f"op{rank}.{i}") for i in range(c.below(3))]
        publications: tuple[Publication, ...] = ()
        if publishes:
            hop = ops.put("hop", elements=c.below(4), axis="tensor", dtype="bf16")
            early = toy(f"early{rank}", 1 + c.below(5), memory=80, early=20 * c.below(6))
            publications = (Publication(f"to {stream}", len(body), hop),)
            body.append(early)
        for op in met:
            body += [op, *(_local(c, f"op{rank}.{op.name}") for _ in range(c.below(2)))]
        graphs.append(Graph(f"graph on {stream}", tuple(body), publications))
    return tuple(graphs)


_VERBS = ("launch",) * 9 + ("wait", "read", "pass on", "fed", "maybe", "stop", "spawn", "mark", "gauge")


def read_program(data: bytes) -> RandomProgram:
    """The program that some bytes spell."""
    c = Choices(iter(data))
    n = 1 + c.below(4)
    mesh = {"group": 2, "tensor": 1 + n // 2} if c.below(3) == 1 else {"tensor": n}
    launch_s, wait_s, message_s, gate_s = (c.below(3) / 200 for _ in range(4))
    overheads = Overheads(launch_s=launch_s, wait_s=wait_s, message_s=message_s, gate_s=gate_s)
    streams = ("main", "side", "third")[: 1 + c.below(3)]
    program = RandomProgram(mesh, overheads)
    sent = dict.fromkeys(streams, 0)
    fed = 0
    for number in range(2 + c.below(8)):
        verb = _VERBS[c.below(len(_VERBS))]
        stream = streams[c.below(len(streams))]
        step = Step(verb, stream, number=number)
        step.after = tuple(c.below(8) for _ in range(c.below(3)))
        step.patience_s = c.below(20) / 100
        if verb == "launch":
            _spell_launch(c, step, streams, sent, mesh)
        fed += verb == "fed"
        program.steps.append(step)
    at_s, arrivals = 0.0, []
    for number in range(fed):
        at_s += c.below(10) / 50
        arrivals.append((at_s, number))
    program.arrivals = tuple(arrivals)
    return program


def _spell_launch(
    c: Choices, step: Step, streams: Sequence[str], sent: dict[str, int], mesh: Mapping[str, int]
) -> None:
    target = streams[c.below(len(streams))]
    publishes = c.below(4) == 1
    step.graphs = _graphs(c, mesh, target, publishes)
    step.size = 1 + c.below(3)
    step.repeat = (1, 1, 2, 4)[c.below(4)]
    if publishes:
        sent[target] += step.repeat
        return
    if sent[step.stream] >= step.repeat:
        sent[step.stream] -= step.repeat
        step.takes = f"to {step.stream}"
    together = any(op.ranks > 1 for op in step.graphs[0].ops)
    conditions = ("", "", "agreed", "not agreed", "loose")
    step.condition = conditions[c.below(4 if together else 5)]
    step.setting = ("", "", "one", "verdict", "turn", "loose")[c.below(6)]
    if step.condition == "loose" and step.setting != "loose":
        step.setting = ""


def random_programs(size: int = 160) -> st.SearchStrategy[RandomProgram]:
    """Random small programs: the fewer bytes, the smaller. (Bytes drawn one by one vary too little.)"""
    spelled = st.builds(
        lambda seed, n: Random(seed).randbytes(n), st.integers(0, 2**32), st.integers(8, size)
    )
    return spelled.map(read_program)
