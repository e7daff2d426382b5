"""The interface of one rank's buffers for a real machine: which tensors each op reads and writes.

Methods with a body are defaults, for a model of one rank, which meets no other ranks and publishes nothing.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from simcore.kernels.kernel import DTYPES
from simcore.kernels.table import TABLE
from simcore.ops.op import Graph, Op, Publication


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a number format. Raises ValueError if torch does not compute in it."""
    if name not in DTYPES:
        raise ValueError(f"the torch machine computes in {', '.join(DTYPES)}, not in {name}")
    return DTYPES[name]


def run_kernel(op: Op, *tensors: Any) -> Any:
    """Runs the kernel of an op on some tensors, or sequences of them; returns its result."""
    return TABLE[op.kind].run(op, *tensors)


class Told(NamedTuple):
    """A flag of which ranks tell each other when they meet, int32 [1] each on the card of the rank: its own,
    and where it notes the other's."""

    own: Tensor
    theirs: Tensor


_told: ContextVar[Told | None] = ContextVar("flag that ranks tell each other", default=None)


@contextmanager
def telling(told: Told | None) -> Iterator[None]:
    """Ranks that meet inside tell each other of a flag."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def current_told() -> Told | None:
    """Returns the flag that ranks that meet here tell each other."""
    return _told.get()


class State(Protocol):
    """The buffers of one rank, and which of them an op reads and writes. Ops are bound: all their sizes are
    numbers. A fused op is executed part by part unless `simcore.kernels.table.TABLE` has its kind."""

    def begin(self, batch: Any, sizes: Mapping[str, int], replay: int) -> Callable[[], object] | None:
        """Notes what a launch says besides its graph (`batch`), and the sizes of its next replay. Returns
        what is still to be queued before the replay."""
        del batch, sizes, replay
        return None

    def execute(self, op: Op) -> None:
        """Runs a local op."""

    def meet(self, op: Op, states: Sequence[Any]) -> None:
        """Runs a collective: called once, on the first rank's state, with all states along the axis, in
        order. Raises ValueError for a collective that these buffers do not have."""
        raise ValueError(f"{op.kind} {op.name}: a {type(self).__name__} meets no other rank")

    def skip(self, op: Op) -> None:
        """Passes over an op, local or not, of a launch that its flag skipped."""
        del op

    def put(self, publication: Publication, to: Any) -> None:
        """Writes what is published into the buffers of the next rank along the axis of the put. Raises
        ValueError if nothing can be published."""
        raise ValueError(f"{publication.signal}: a {type(self).__name__} publishes nothing")


class CardState(State, Protocol):
    """The buffers of one rank on a card. A captured op depends on the addresses of its tensors and on the
    state's `key` on the host (for example the current layer), which `skip` advances as `execute` does.

    Ops, `put` and `meet` read `simcore.kernels.streams.current_gate` and change nothing that later ops read
    if it is 0; those without such a kernel raise ValueError if there is a gate.
    """

    # Its device; None: the first one of the machine.
    device: torch.device | str | None = None
    # Whether it meets other ranks by kernels that see their memory, in launches captured whole; else the
    # machine cuts launches at collectives, and holds these.
    joined: bool = False

    def carries(self, signal: str) -> bool:
        """Whether kernels of a joined rank publish and await a signal by themselves, with what it is for."""
        del signal
        return False

    def tells(self, op: Op) -> bool:
        """Whether joined ranks tell each other of a flag in this op (`current_told`)."""
        del op
        return False

    def execute_all(self, ops: Sequence[Op]) -> None:
        """Runs local ops, one behind the other; some states run several of them by one kernel."""
        for op in ops:
            self.execute(op)

    def reset(self) -> None:
        """Restores the state before the first launch of a run."""

    def begin_run(self, *, rehearsal: bool, error: Tensor, code: Callable[[str], int]) -> None:
        """Prepares a run, or a rehearsal, in which no rank waits for others. A rank that waits too long
        writes to `error`, int32 [1], the code of what it waits for."""
        del rehearsal, error, code

    def device_sizes(self, graph: Graph) -> frozenset[str]:
        """Returns the sizes that kernels of a graph read in the device's memory (`sizes`)."""
        del graph
        return frozenset()

    def captured_sizes(self, graph: Graph) -> frozenset[str]:
        """Returns the sizes with which the ops of a graph are captured: other values need another capture."""
        return graph.needs - self.device_sizes(graph)

    def sizes(self, stream: str) -> Mapping[str, Tensor]:
        """Returns int32 tensors by the size that they hold for kernels of a stream, all elements the same."""
        del stream
        return {}

    def on(self, stream: str) -> Any:
        """Returns the buffers for the launches of a stream; by default those of all streams."""
        del stream
        return self

    def home(self, graph: Graph, stream: str) -> str:
        """Returns the stream whose buffers and captured stages a launch uses; launches with the same home run
        one after another. By default its own."""
        del graph
        return stream

    def bound(self, graph: Graph, sizes: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the sizes with which a launch at these sizes is captured; see `captured_sizes`."""
        return {name: sizes[name] for name in sorted(self.captured_sizes(graph))}

    def changes(self, graph: Graph) -> bool:
        """Whether a graph depends on more than its sizes and `key`: it is then never captured."""
        del graph
        return False

    def key(self) -> Hashable:
        """Returns all that the next ops depend on, apart from the ops themselves."""

    def restore(self, key: Any) -> None:
        """Goes back or forward to a key."""
