"""The order of a schedule: its launches with their sizes, and its waits, recorded without running it.

A tiling's order depends on a few numbers of its model (tokens, prompt), so one order serves all models with
these numbers: graphs are stored as calls of the model's methods, and made anew for each model.
"""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from simcore.machine.machine import Machine, Program
from simcore.ops.op import Graph

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Made:
    """A graph as a call: the model's method, and its arguments."""

    method: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]

    def of(self, model: Any) -> Graph:
        """Returns the graph of one model."""
        graph: Graph = getattr(model, self.method)(*self.arguments, **dict(self.options))
        return graph


class Asked:
    """A proxy of a model that records. `read`: the numbers that a schedule has read; graphs are `Made`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._made: dict[tuple[Any, ...], Made] = {}
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        found = self._maker(name) if callable(value) else value
        if found is value:
            self.read[name] = value
        # Later reads find the attribute without this method.
        self.__dict__[name] = found
        return found

    def _maker(self, method: str) -> Callable[..., Made]:
        made = self._made

        def make(*arguments: Any, **options: Any) -> Made:
            key = (method, arguments, *options.items())
            found = made.get(key)
            if found is None:
                found = made[key] = Made(method, arguments, tuple(options.items()))
            return found

        return make


@dataclass(frozen=True, eq=False)
class Order:
    """All launches of a schedule on one stream of one rank.

    `numbers` [launches]: the index of each one's graph in `graphs`; `sizes`: by graph, each size [its
    launches]; `advance`: by graph, the `advance` of its first launch. `waits` [waits]: number of launches
    before each wait; `waited` [waits]: the launch that it waits for; `ended` [times that the schedule noted]:
    number of waits before. `read`: the numbers that the schedule read from its model. `plain`: whether the
    schedule only launched plainly and waited for launches since the wait before.
    """

    graphs: tuple[Graph | Made, ...]
    numbers: NDArray[np.int32]
    sizes: tuple[Mapping[str, Ints], ...]
    advance: tuple[Mapping[str, int], ...]
    waits: Ints
    waited: Ints
    ended: Ints
    read: Mapping[str, Any]
    plain: bool

    def holds(self, model: Any) -> bool:
        """Whether the schedule would do the same with another model."""
        return all(getattr(model, name) == value for name, value in self.read.items())

    def made(self, model: Any) -> list[Graph]:
        """Returns its graphs, made by one model."""
        return [graph.of(model) if isinstance(graph, Made) else graph for graph in self.graphs]

    @cached_property
    def launches_of(self) -> list[Ints]:
        """The launches of each graph."""
        order = np.argsort(self.numbers, kind="stable")
        counts = np.bincount(self.numbers, minlength=len(self.graphs))
        return np.split(order, np.cumsum(counts)[:-1])


@dataclass
class _Recorder:
    """A machine that takes no time and records all verbs."""

    rank: int = 0
    world: int = 1
    graphs: list[Any] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)
    numbers: "array[int]" = field(default_factory=lambda: array("i"))
    sizes: list[list[tuple[str, "array[int]"]]] = field(default_factory=list)
    advance: list[Mapping[str, int]] = field(default_factory=list)
    waits: "array[int]" = field(default_factory=lambda: array("q"))
    waited: "array[int]" = field(default_factory=lambda: array("q"))
    plain: bool = True

    def now(self) -> float:
        if self.numbers and (not self.waits or self.waits[-1] != len(self.numbers)):
            self.plain = False
        return float(len(self.waits))

    def launch(
        self,
        graph: Any,
        *,
        sizes: Mapping[str, int] | None = None,
        advance: Mapping[str, int] | None = None,
        **other: Any,
    ) -> int:
        given = sizes or {}
        number = self.known.get(id(graph))
        if number is None:
            number = self.known[id(graph)] = len(self.graphs)
            # Keep the graph, so that no other graph gets its id.
            self.graphs.append(graph)
            self.sizes.append([(name, array("q")) for name in given])
            self.advance.append(advance or {})
        columns = self.sizes[number]
        if len(columns) != len(given):
            raise ValueError("launches of one graph have to give the same sizes")
        for name, column in columns:
            column.append(given[name])
        if other:
            self.plain = False
        self.numbers.append(number)
        return len(self.numbers) - 1

    def wait(self, *tickets: int) -> None:
        if len(tickets) != 1:
            self.plain = False
        self.waits.append(len(self.numbers))
        self.waited.append(tickets[0] if tickets else -1)


def recorded(program: Callable[[Machine], Program], ended_s: list[float], read: Mapping[str, Any]) -> Order:
    """Records the order of a program that notes times in `ended_s`, which then holds counts of waits. Raises
    ValueError if launches of one graph give different numbers of sizes."""
    machine = _Recorder()
    for _ in program(cast(Machine, machine)):
        pass
    waits, waited = np.array(machine.waits, np.int64), np.array(machine.waited, np.int64)
    # Each wait is for a launch since the wait before: then only running launches matter after a wait.
    first = np.concatenate(([0], waits[:-1])) if len(waits) else waits
    own = bool(((waited >= first) & (waited < waits)).all())
    return Order(
        tuple(machine.graphs),
        np.array(machine.numbers, np.int32),
        tuple({name: np.array(column, np.int64) for name, column in columns} for columns in machine.sizes),
        tuple(machine.advance),
        waits,
        waited,
        np.array(ended_s, np.int64),
        dict(read),
        machine.plain and own,
    )
