"""Compiles kernels alongside the measurement, which goes on with ops that need no compiling.

Triton compiles a kernel at its first launch, for a second or more, and keeps it in a folder that all
processes share. Only one process may use the card while times are taken; compiling uses no card. So each op
is tried first with a hook in front of triton's compiler (`jit_cache_hook`). If a kernel is missing, the hook
prevents its launch and sends the description of its compilation to another process. An op that misses a
kernel is put off until the kernel is compiled; triton then finds it in the folder.
"""

import math
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from importlib import import_module
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
import triton

from simcore.kernels.streams import one_stream
from simcore.ops.op import Op
from simcore.validate.timing.card_kernels import ON_CARDS

MOST_PROCESSES = 14
# Cores left to the measurement and to other work.
SPARE_CORES = 2
# Ops that move more launch the same kernels as smaller ops, and take long to try.
MOST_BYTES = 2e9
MOST_TRIES = 100

T = TypeVar("T")
Try = Callable[[Op], object]


def processes(cores: int) -> int:
    """Returns how many processes compile on so many cores.

    >>> processes(1), processes(8), processes(128)
    (1, 6, 14)
    """
    return max(1, min(MOST_PROCESSES, cores - SPARE_CORES))


def as_compiled(
    items: Iterable[T],
    op_of: Callable[[T], Op | None],
    until_s: float,
    tried: Try | None = None,
    whatever: Collection[str] = (),
) -> Iterator[T]:
    """Yields items, each as soon as the kernels of its op are compiled, or at `until_s` (time.perf_counter).
    `op_of`: None for an item that need not wait; `tried`: a function that launches an op once; `whatever`:
    kinds of op that are tried whatever they move, others up to MOST_BYTES."""
    put_off: list[tuple[T, list[Future[None]]]] = []
    ended = 0
    with closing(_Compilers(whatever)) as compilers:
        for item in items:
            # Otherwise the ops tried first, a few of many kinds, would come last.
            if compilers.ended > ended:
                ended = compilers.ended
                yield from _taken(put_off)
            op = op_of(item)
            missing = [] if op is None else compilers.missing(op, tried or launch)
            if missing:
                put_off.append((item, missing))
            else:
                yield item
        while put_off:
            left_s = until_s - time.perf_counter()
            if left_s > 0.0:
                jobs = {job for _, missing in put_off for job in missing if not job.done()}
                wait(jobs, left_s, FIRST_COMPLETED)
                yield from _taken(put_off)
            else:
                yield put_off.pop(0)[0]


def _taken(put_off: list[tuple[T, list[Future[None]]]]) -> Iterator[T]:
    """Removes and yields the items whose kernels are compiled."""
    # Asked once: a job may end between two questions.
    asked = [(each, all(job.done() for job in each[1])) for each in put_off]
    put_off[:] = [each for each, is_there in asked if not is_there]
    yield from [item for (item, _), is_there in asked if is_there]


def launch(op: Op) -> None:
    """Runs an op once on the card. Ignores errors: the measurement of the op raises and notes them again."""
    kernel, device = ON_CARDS[op.kind], torch.device("cuda")
    with suppress(Exception), torch.inference_mode(), one_stream({}):
        kernel.run(op, *kernel.inputs(op, torch.Generator(device).manual_seed(0), device))


class _Compilers:
    """Processes that compile; they start at the first kernel to compile. `whatever`: kinds of op that are
    tried whatever they move; `ended`: how many kernels have been compiled."""

    def __init__(self, whatever: Collection[str] = ()) -> None:
        self._whatever = whatever
        self._pool: ProcessPoolExecutor | None = None
        self._jobs: dict[tuple[str, str, str], Future[None]] = {}
        self.ended = 0
        # By kind of op and number format, how many tried ops had no kernel to compile; -inf: one had.
        self._in_vain: dict[tuple[str, str], float] = defaultdict(float)

    def close(self) -> None:
        """Ends the processes, whatever they compile."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def missing(self, op: Op, tried: Try) -> list[Future[None]]:
        """Returns the compile jobs of the kernels that an op launches; a missing kernel is not launched. If
        MOST_TRIES ops of a kind had no kernel to compile, its other ops are not tried."""
        kind, found = (op.kind, op.dtype), list[Future[None]]()
        large = op.work.hbm_bytes > MOST_BYTES and op.kind not in self._whatever
        if large or self._in_vain[kind] >= MOST_TRIES:
            return found
        self._in_vain[kind] += 1

        def hook(*, fn: Any, compile: Any, **others: object) -> bool:
            del others
            self._in_vain[kind] = -math.inf
            job = self._job(fn.module, fn.name, compile["specialization_data"])
            if job.done():
                return False
            found.append(job)
            return True

        runtime: Any = triton.knobs.runtime
        before, runtime.jit_cache_hook = runtime.jit_cache_hook, hook
        try:
            tried(op)
        finally:
            runtime.jit_cache_hook = before
        return found

    def _job(self, module: str, name: str, specialization: str) -> "Future[None]":
        kernel = module, name, specialization
        if kernel not in self._jobs:
            try:
                self._jobs[kernel] = self._started().submit(compiled, *kernel)
                self._jobs[kernel].add_done_callback(self._end)
            except BrokenProcessPool:
                # The processes ended, perhaps for want of memory: the kernel is compiled at its launch.
                done: Future[None] = Future()
                done.set_result(None)
                return done
        return self._jobs[kernel]

    def _end(self, job: "Future[None]") -> None:
        del job
        self.ended += 1

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            count = processes(len(os.sched_getaffinity(0)))
            self._pool = ProcessPoolExecutor(count, get_context("spawn"), _begun)
        return self._pool


def _begun() -> None:
    """Sets up each process: one thread, and Ctrl-C is left to the measuring process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def compiled(module: str, name: str, specialization: str) -> None:
    """Compiles a kernel of a module from the specialization of triton's hook into triton's folder. Ignores
    errors: they recur at the launch."""
    with suppress(Exception):
        getattr(import_module(module), name).preload(specialization)
