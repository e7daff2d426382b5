"""The machine: what a strategy can ask of the simulator or of real hardware.

A strategy is a plain generator, a `Program`. It calls the machine to ask for something and yields to wait for
it. Write `yield m.wait(...)` in one expression: no other call may come between making a wait and yielding it.

    def greedy_decode(m: Machine, model: Decoder, tokens: int, context: int) -> Program:
        for token in range(tokens):
            step = m.launch(model.token_step, sizes={"context": context + token})
            yield m.wait(step)

Three machines run programs: the simulated one (`simcore.sim.simulation`), the tape, which only prints
(`simcore.sim.tape`), and the real one. A program runs once per rank and never asks which machine it is on.

What a launch means, on every machine:

1. `launch` takes host time; the device may begin before the call returns. Launches on one stream of one rank
   run in order.
2. A launch starts when its stream is free, its `after` tickets are done and the signals named in `after` have
   arrived.
3. `when` is read on the device at that point, before any signal is waited for. If the condition does not
   hold, the launch waits for nothing more, computes nothing and publishes nothing, but each of its kernels
   still reads the flag and returns.
4. A collective in a graph starts when its last rank arrives.
5. At the end of the launch its `sets` are written, all of them from the values of that moment.
6. `repeat=k` is k replays of the graph for one launch by the host. Each size grows by `advance` from replay
   to replay (by 1 if `advance` is left out). `stop()` ends it at the next boundary between two replays, and
   so does an item that arrives in the inbox `until` (one replay runs even if an item is there already).
7. Launches `within` an earlier one are captured with it as one graph, where a machine captures. The host then
   pays for one launch, and for the kernels of each as it comes to them. Gates, flags and signals are as if
   each were a launch of its own.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from simcore.ops.op import Graph

# The stream of launches that name none.
MAIN = "main"
# What a program yields is a wait that its machine made: opaque to the program.
Wait = Any
Program = Generator[Wait, Any, Any]


class DeadlockError(RuntimeError):
    """No event is left, but something still waits; the message says what waits for what."""


class MismatchError(RuntimeError):
    """Ranks met in a collective with different ops, or along an axis of another size."""


class LawError(AssertionError):
    """A run broke a law (`simcore.machine.laws`); the message names the law and the first violations."""


class Ticket(Protocol):
    """A future: a launch, a spawned program or a signal."""

    @property
    def ran(self) -> int:
        """How many replays ran; meaningful after a wait for the ticket."""

    def stop(self) -> None:
        """Asks a repeated launch to end at its next replay boundary."""


class Flag(NamedTuple):
    """A small integer in the memory of one rank that launches read (`when`) and write (`sets`)."""

    name: str
    rank: int

    def nonzero(self) -> "Condition":
        """Holds if the flag is not 0."""
        return Condition(self, "!=", 0)

    def zero(self) -> "Condition":
        """Holds if the flag is 0."""
        return Condition(self, "==", 0)

    def above(self, other: "Flag | int") -> "Condition":
        """Holds if the flag is larger than another flag or a number."""
        return Condition(self, ">", other)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison that a device can make by itself; its value is 1 if it holds, else 0."""

    left: Flag
    comparison: Literal["==", "!=", ">"]
    right: Flag | int


@dataclass(frozen=True, slots=True)
class Verdict:
    """A yes or no that a graph decides from its data. `key` identifies the decision and is the same on
    every rank that takes it (a token and a layer, for instance)."""

    name: str
    key: tuple[int, ...]
    yes: int
    no: int


# What a launch writes to a flag.
Setting = int | Condition | Verdict


def check_within(graph: Graph, within: object, leader: object, repeat: int) -> None:
    """Raises ValueError if a launch cannot be captured with an earlier one: `leader`, the last launch of its
    rank outside of others, or None if its program has waited for something since."""
    if within is None:
        return
    if within is not leader:
        raise ValueError(
            f"graph {graph.name}: within has to be the last launch of this rank that was within none, before"
            " anything is waited for"
        )
    if repeat > 1:
        raise ValueError(f"graph {graph.name}: repeat is {repeat}; within another launch it runs once")


def holds(condition: Condition, value_of: Callable[[Flag], int]) -> bool:
    """Whether a condition holds for the flag values that `value_of` gives."""
    left = value_of(condition.left)
    right = value_of(condition.right) if isinstance(condition.right, Flag) else condition.right
    return {"==": left == right, "!=": left != right, ">": left > right}[condition.comparison]


def _cost(description: str) -> float:
    """A dataclass field for a cost that is 0 by default; file schemas show its description."""
    cost: float = field(default=0.0, metadata={"description": description})
    return cost


@dataclass(frozen=True, slots=True)
class Overheads:
    """The costs of the machine's calls, in seconds. `Graph.kernels` counts the kernels of a graph;
    `simcore.assembly.in_graphs` decides for which ops `in_graph_s` applies."""

    launch_s: float = _cost("host time of a launch, s")
    launch_kernel_s: float = _cost("host time that each kernel of its graph adds to a launch, s")
    return_s: float = _cost("part of a launch's host time after the device has been given the graph, s")
    start_s: float = _cost("from when an idle device has been given a graph until its first kernel begins, s")
    within_s: float = _cost("host time of a launch captured within an earlier one, but for its kernels, s")
    size_s: float = _cost("host time of a size in device memory that differs from the launch before, s")
    batch_s: float = _cost("host time of a launch beyond the others' if it says whose tokens it computes, s")
    sequence_s: float = _cost("host time of such a launch for each decoding sequence in it, s")
    prompt_s: float = _cost("host time of such a launch beyond the others' if prompts are in it, s")
    each_prompt_s: float = _cost("host time of such a launch for each prompt that ends in it, s")
    wait_s: float = _cost("host time of coming back from a wait or a read, s")
    message_s: float = _cost("host time of one send or receive, s")
    gate_s: float = _cost("device time of a kernel that reads its flag and returns, s")
    flags_s: float = _cost("device time of writing the flags that a launch sets, s")
    in_graph_s: float = _cost("device time of a kernel beyond its price if others stand before it, s")
    in_step_s: float = _cost("the same in steps that serve, s (of a device 0: as in_graph_s)")

    def whole_launch_s(self, kernels: int) -> float:
        """Host time of a launch of a graph with `kernels` kernels."""
        return self.launch_s + self.launch_kernel_s * kernels

    def within_launch_s(self, kernels: int) -> float:
        """Host time of a launch within an earlier one, of a graph with `kernels` kernels."""
        return self.within_s + self.launch_kernel_s * kernels

    def begins_s(self, launch_s: float) -> float:
        """Seconds from the call of a launch, which takes `launch_s`, until its first kernel may begin."""
        return max(0.0, launch_s - self.return_s) + self.start_s


class Machine(Protocol):
    """One rank of a machine. Times are seconds since the run began.

    `mesh` names the axes along which ranks are laid out, the last one varying fastest, as in
    {"group": 2, "tensor": 4}; a collective meets along one axis.
    """

    rank: int
    world: int
    mesh: Mapping[str, int]

    def now(self) -> float:
        """The time on this host's clock, in seconds."""

    def along(self, axis: str, offset: int = 0) -> int:
        """The rank `offset` places further along `axis`, wrapping around."""

    def coordinate(self, axis: str) -> int:
        """This rank's place along `axis`; 0 for an axis that the mesh does not have."""

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
        """Queues a graph on a stream, asynchronously. `sizes`: values of the graph's symbolic dimensions.
        `batch`: what the buffers of a real machine have to know besides (`workload.requests.Batch`), with the
        same totals; called at the launch, and only there. `within`: the first launch of a captured sequence,
        all of which the program gives, each once, before it waits for anything or begins another."""

    def flag(self, name: str, rank: int | None = None, initial: int = 0) -> Flag:
        """A flag of this rank, or of another; it holds `initial` until a launch sets it."""

    def signal(self, name: str, rank: int | None = None) -> Ticket:
        """The next publication of this name by `rank` that this rank has not waited for yet. The n-th wait
        that is carried out takes the n-th publication."""

    def wait(self, *tickets: Ticket) -> Wait:
        """Yield it: the host blocks until all tickets are done."""

    def read(self, flag: Flag, after: Ticket) -> Wait:
        """Yield it: the host gets the flag's value once `after` is done."""

    def recv(self, inbox: str, timeout_s: float | None = None) -> Wait:
        """Yield it: the host gets the next item of its inbox, or None after `timeout_s`."""

    def poll(self, inbox: str) -> list[Any]:
        """Takes all items that are in an inbox now; does not wait."""

    def send(self, inbox: str, item: object, rank: int) -> None:
        """Puts an item into the inbox of a rank's host."""

    def spawn(self, program: Program) -> Ticket:
        """Starts one more host loop on this rank; all its host loops share one host thread."""

    def mark(self, name: str, after: Sequence[Ticket] = ()) -> None:
        """Records in the trace when the host is at this call and the tickets are done; costs nothing."""

    def gauge(self, name: str, value: float, limit: float) -> None:
        """Records a level and the limit that it must not exceed (KV slots in use); costs nothing."""
