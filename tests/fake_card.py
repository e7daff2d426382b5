"""A card that is none: streams of calls, of which one that can go on does, in an order drawn by a seed.

What is queued runs later, when somebody looks; events and waits order it, and nothing else does. So a machine
that forgets to wait shows it here, sooner or later. Kernels are the references of `cuda.flag_kernels`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from simcore.machine.machine import Condition, Flag, holds
from simcore.validate.machines.cuda.flag_kernels import NUMBER, VERDICT, WITH_FLAG, Settings, StreamMemory

Call = Callable[[], object]
# How often a call may be asked whether it goes on.
MOST_TURNS = 5000


class NotYetError(Exception):
    """A kernel that spins: it is asked again."""


@dataclass(eq=False)
class FakeEvent:
    passed_s: float | None = None


@dataclass(eq=False)
class FakeStream:
    queue: deque[Any] = field(default_factory=deque)
    resume: int = 0


class FakeVerbs:
    """The kernels of `cuda.flag_kernels`, in plain Python. One that spins ends the call that it stands
    in; when that is asked again, what stood before it is passed over (`resume` of them)."""

    def __init__(self) -> None:
        self.tries: dict[int, int] = {}
        self.index = self.resume = 0

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name not in ("gate", "take", "publish", "write_flags", "hold", "between"):
            return found

        def once(*arguments: Any, **named: Any) -> None:
            if self.index >= self.resume:
                found(*arguments, **named)
            self.index += 1

        # Looked up when a launch is put together, called whenever it runs.
        return once

    def gate(
        self,
        flags: Tensor,
        memory: StreamMemory,
        slots: dict[Flag, int],
        condition: Condition | None,
        signals: int,
    ) -> None:
        open_ = condition is None or holds(condition, lambda flag: int(flags[slots[flag]]))
        place = int(memory.cursor[0])
        memory.gate[0] = memory.log[place] = int(open_)
        memory.cursor[0] = place + 1 + signals

    def take(
        self,
        published: Tensor,
        taken: Tensor,
        memory: StreamMemory,
        error: Tensor,
        *,
        back: int,
        code: int,
        most: int,
    ) -> None:
        place = int(memory.cursor[0]) - back
        if not memory.gate[0]:
            memory.log[place] = -1
            return
        turn, key = int(taken[0]), memory.cursor.data_ptr()
        if int(published[0]) <= turn:
            self.tries[key] = self.tries.get(key, 0) + 1
            if self.tries[key] <= most:
                raise NotYetError
            error[0], turn = code, -2
        self.tries.pop(key, None)
        taken[0] += 1
        memory.log[place] = turn

    def publish(self, published: Tensor, gate: Tensor | None) -> None:
        if gate is None or gate[0]:
            published[0] += 1

    def write_flags(
        self, flags: Tensor, seen: Tensor, memory: StreamMemory, found: Settings, *, gated: bool
    ) -> None:
        place = int(memory.cursor[1])
        memory.cursor[1] = place + found.verdicts
        if gated and not memory.gate[0]:
            return
        _written(flags, seen, found, memory.given[place:])

    def hold(self, memory: StreamMemory, held: Tensor) -> None:
        place = int(memory.cursor[1])
        held.copy_(memory.given[place : place + len(held)])
        memory.cursor[1] = place + len(held)

    def between(
        self,
        flags: Tensor,
        seen: Tensor,
        memory: StreamMemory,
        slots: dict[Flag, int],
        *,
        found: Settings | None,
        gated: bool,
        held: Tensor | None,
        first: int,
        condition: Condition | None,
    ) -> None:
        if found is not None and (memory.gate[0] or not gated):
            _written(flags, seen, found, flags[:0] if held is None else held[first:])
        if condition is not None:
            place = int(memory.cursor[0])
            memory.gate[0] = memory.log[place] = int(holds(condition, lambda flag: int(flags[slots[flag]])))
            memory.cursor[0] = place + 1


def _written(flags: Tensor, seen: Tensor, found: Settings, said: Tensor) -> None:
    """Writes settings, with verdicts `said`."""
    values = []
    for _, what, how, one, other, _ in found.rows.tolist():
        if what == NUMBER:
            values.append(one)
        elif what == VERDICT:
            values.append(one if said[how] else other)
        else:
            left, right = int(flags[one]), int(flags[other]) if what == WITH_FLAG else other
            values.append(int((left == right, left != right, left > right)[how - 1]))
    for row, value in zip(found.rows.tolist(), values, strict=True):
        flags[row[0]] = seen[row[0]] = value


class AtOnce:
    """Runs what is submitted at once."""

    def submit(self, call: Callable[..., Any], *given: Any) -> Future[Any]:
        found: Future[Any] = Future()
        try:
            found.set_result(call(*given))
        except Exception as error:
            found.set_exception(error)
        return found


class FakeCudaApi:
    """See `simcore.validate.machines.cuda.cuda_api.CudaApi`. `steps`: how much is done at most whenever
    somebody looks."""

    device = "cpu"

    def __init__(self, seed: int = 0, steps: int = 8) -> None:
        self.verbs: Any = FakeVerbs()
        self.random, self.steps = Random(seed), steps
        self.streams: list[FakeStream] = []

    def stream(self, device: Any = None) -> FakeStream:
        del device
        self.streams.append(FakeStream())
        return self.streams[-1]

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent()
        stream.queue.append(event)
        return event

    def where(self, event: FakeEvent) -> int:
        del event
        return 0

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        stream.queue.append(("wait", event))

    def done(self, event: FakeEvent) -> bool:
        for _ in range(self.random.randrange(self.steps + 1)):
            if event.passed_s is not None or not self.step():
                break
        return event.passed_s is not None

    def elapsed_s(self, before: FakeEvent, after: FakeEvent) -> float:
        assert before.passed_s is not None
        assert after.passed_s is not None
        return after.passed_s - before.passed_s

    def run(self, stream: FakeStream, call: Call) -> None:
        stream.queue.append(call)

    def aside(self, stream: FakeStream) -> Any:
        del stream
        return AtOnce()

    def captured(self, stream: FakeStream, call: Call) -> Call:
        del stream
        return call

    def zeros(self, count: int, device: Any = None) -> Tensor:
        del device
        return torch.zeros(count, dtype=torch.int32)

    host_zeros = zeros

    def ints(self, rows: list[list[int]], device: Any = None) -> Tensor:
        del device
        return torch.tensor(rows, dtype=torch.int32)

    def reset(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        idle = 0
        while idle < 100_000 and any(stream.queue for stream in self.streams):
            idle = 0 if self.step() else idle + 1
        assert not any(stream.queue for stream in self.streams), "the card never ends"

    def step(self) -> bool:
        """One thing on one stream that can be done. False where there is none."""
        able = [stream for stream in self.streams if stream.queue and self._is_able(stream.queue[0])]
        if not able:
            return False
        stream = self.random.choice(able)
        first = stream.queue[0]
        if isinstance(first, FakeEvent):
            first.passed_s = time.perf_counter()
        elif callable(first) and not self._ended(stream, first):
            return True
        stream.queue.popleft()
        return True

    def _ended(self, stream: FakeStream, call: Call) -> bool:
        """Whether a call has come to its end, which it goes towards here."""
        self.verbs.index, self.verbs.resume = 0, stream.resume
        stream.resume = 0
        try:
            call()
        except NotYetError:
            stream.resume = self.verbs.index
            return False
        return True

    @staticmethod
    def _is_able(first: Any) -> bool:
        return not isinstance(first, tuple) or first[1].passed_s is not None


class _Worker:
    """A call in a thread of its own, which runs only from `go_on` to the next `hand_on`."""

    def __init__(self, call: Call) -> None:
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.ended, self.error = False, list[BaseException]()
        # Those of the states when it handed on last.
        self.keys: list[Any] = []
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Call) -> None:
        self.turn.acquire()
        try:
            # torch's modes are a thread's own.
            with torch.inference_mode():
                call()
        except BaseException as error:
            self.error.append(error)
        self.ended = True
        self.back.release()

    def go_on(self) -> None:
        self.turn.release()
        self.back.acquire()
        if self.error:
            raise self.error[0]

    def hand_on(self) -> None:
        self.back.release()
        self.turn.acquire()


class MeetingCudaApi(FakeCudaApi):
    """A card whose kernels wait for those of other streams: `until` goes on once something is true, and
    others run meanwhile. One call runs at a time. `states`: those with which calls work."""

    def __init__(self, seed: int = 0, steps: int = 8) -> None:
        super().__init__(seed, steps)
        self.states: list[Any] = []
        self._workers: dict[FakeStream, _Worker] = {}
        self._at_work: _Worker | None = None

    def until(self, true: Callable[[], bool]) -> None:
        """Called by what is queued."""
        for _ in range(MOST_TURNS):
            if true():
                return
            worker = self._at_work
            assert worker is not None
            worker.hand_on()
            self._at_work = worker
        raise TimeoutError("what a call waits for does not come")

    def _ended(self, stream: FakeStream, call: Call) -> bool:
        worker = self._at_work = self._workers.pop(stream, None) or _Worker(call)
        # The host goes on meanwhile, and works with the same states.
        before = [state.key() for state in self.states]
        self._restore(worker.keys or before)
        try:
            worker.go_on()
        finally:
            worker.keys = [state.key() for state in self.states]
            self._restore(before)
        if not worker.ended:
            self._workers[stream] = worker
        return worker.ended

    def _restore(self, keys: list[Any]) -> None:
        for state, key in zip(self.states, keys, strict=True):
            state.restore(key)
