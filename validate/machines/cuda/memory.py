"""Flags and signals in a card's memory, and the host's view of them.

flags[slot]  int32 on the card          seen[slot]  a copy in pinned memory, written with it
counters     publications of a (name, rank); those of them that a rank has taken
error        the code of a wait that was too long for its signal (0: none)
"""

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from simcore.machine.machine import Flag
from simcore.validate.machines.cuda.cuda_api import CudaApi
from simcore.validate.machines.cuda.flag_kernels import StreamMemory

MOST_FLAGS = MOST_COUNTERS = 4096
# The most gates and turns in the log of one stream in one run, and the most verdicts.
MOST_ENTRIES = 1 << 18


class StreamLog:
    """A stream's memory, and the host's position in it: `logged` places of the log given to launches,
    `given` verdicts written."""

    def __init__(self, memory: StreamMemory) -> None:
        self.memory, self.logged, self.given = memory, 0, 0
        # The same memory in numpy: an access through torch takes longer.
        self._log: NDArray[np.int32] = memory.log.numpy()
        self._given: NDArray[np.int32] = memory.given.numpy()

    def reserve_entries(self, count: int) -> int:
        """Returns the first of `count` places of the log. Raises RuntimeError if the log is full."""
        first, self.logged = self.logged, self.logged + count
        if self.logged > MOST_ENTRIES:
            raise RuntimeError(f"more than {MOST_ENTRIES:,} gates and signals on one stream in one run")
        return first

    def give(self, verdicts: list[bool]) -> None:
        """Writes the verdicts of the next launch that has any. Raises RuntimeError if no room is left."""
        if self.given + len(verdicts) > MOST_ENTRIES:
            raise RuntimeError(f"more than {MOST_ENTRIES:,} verdicts on one stream in one run")
        for verdict in verdicts:
            self._given[self.given] = verdict
            self.given += 1

    def at(self, place: int) -> int:
        """Returns an entry of the log; only after an event behind it has passed."""
        return int(self._log[place])


class Memory:
    """All flags and signals of a machine's ranks; addresses stay, because captured graphs contain them."""

    def __init__(self, api: CudaApi) -> None:
        self.api = api
        self.flags, self.seen = api.zeros(MOST_FLAGS), api.host_zeros(MOST_FLAGS)
        self.counters, self.error = api.zeros(MOST_COUNTERS), api.host_zeros(1)
        self._error: NDArray[np.int32] = self.error.numpy()
        self.slots: dict[Flag, int] = {}
        self.declared: set[Flag] = set()
        self._places: dict[Hashable, int] = {}
        self._logs: dict[Hashable, StreamLog] = {}

    def slot(self, flag: Flag) -> int:
        """Returns the slot of a flag. Raises RuntimeError if there are too many flags."""
        found = self.slots.setdefault(flag, len(self.slots))
        if found >= MOST_FLAGS:
            raise RuntimeError(f"more than {MOST_FLAGS:,} flags")
        return found

    def counter(self, *key: Hashable) -> Tensor:
        """Returns a counter int32 [1], by what it counts. Raises RuntimeError if there are too many."""
        place = self._places.setdefault(key, len(self._places))
        if place >= MOST_COUNTERS:
            raise RuntimeError(f"more than {MOST_COUNTERS:,} signals and their takers")
        return self.counters[place : place + 1]

    def log(self, *stream: Hashable) -> StreamLog:
        """Returns the log of a stream."""
        if stream not in self._logs:
            memory = StreamMemory(
                self.api.zeros(1),
                self.api.zeros(2),
                self.api.host_zeros(MOST_ENTRIES),
                self.api.host_zeros(MOST_ENTRIES),
            )
            self._logs[stream] = StreamLog(memory)
        return self._logs[stream]

    @property
    def failed(self) -> int:
        """The code of a wait that took too long, or 0."""
        return int(self._error[0])

    def reset(self) -> None:
        """Resets all values to the start of a run; no work may be under way."""
        for tensor in (self.flags, self.seen, self.counters, self.error):
            tensor.zero_()
        self.declared.clear()
        for log in self._logs.values():
            log.memory.gate.zero_()
            log.memory.cursor.zero_()
            log.logged = log.given = 0
