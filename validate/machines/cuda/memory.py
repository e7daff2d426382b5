"""Flags and signals in a card's memory, and the host's view of them. Ranks that meet by kernels have memory
of their own, each on its card: the flags of another rank are there as they were when both met last.

flags[slot]  int32 on the card          seen[slot]  a copy in pinned memory, written with it
counters     publications of a (name, rank); those of them that a rank has taken
error        the code of a wait that was too long for its signal (0: none)
"""

from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from simcore.machine.machine import Flag
from simcore.validate.machines.cuda.cuda_api import CudaApi
from simcore.validate.machines.cuda.flag_kernels import StreamMemory

MOST_FLAGS = MOST_COUNTERS = 4096
# The most gates and turns in the log of one stream in one run, and the most verdicts.
MOST_ENTRIES = 1 << 21


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
    """Flags and signals of a machine's ranks, or of one of them, on a device; addresses stay, because graphs
    that were captured contain them. `error`: that of another memory, if all have one."""

    def __init__(
        self, api: CudaApi, device: torch.device | str | None = None, error: Tensor | None = None
    ) -> None:
        self.api, self.device = api, device
        self.flags, self.seen = api.zeros(MOST_FLAGS, device), api.host_zeros(MOST_FLAGS)
        self.counters = api.zeros(MOST_COUNTERS, device)
        self.error = api.host_zeros(1) if error is None else error
        self._error: NDArray[np.int32] = self.error.numpy()
        self.slots: dict[Flag, int] = {}
        self.declared: set[Flag] = set()
        # Writes of flags' first values: how many, and the event behind them.
        self.written = 0
        self.writing: Any = None
        self._places: dict[Hashable, int] = {}
        self._logs: dict[Hashable, StreamLog] = {}

    def slot(self, flag: Flag) -> int:
        """Returns the slot of a flag. Raises RuntimeError if there are too many flags."""
        found = self.slots.setdefault(flag, len(self.slots))
        if found >= MOST_FLAGS:
            raise RuntimeError(f"more than {MOST_FLAGS:,} flags")
        return found

    def word(self, flag: Flag) -> Tensor:
        """Returns a flag's word, int32 [1]."""
        slot = self.slot(flag)
        return self.flags[slot : slot + 1]

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
                self.api.zeros(1, self.device),
                self.api.zeros(2, self.device),
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
        self.written, self.writing = 0, None
        for log in self._logs.values():
            log.memory.gate.zero_()
            log.memory.cursor.zero_()
            log.logged = log.given = 0
