"""Independent pieces of work on several cores, in forked processes.

Each process begins with all that its parent has worked out by then (prices above all), and hands back what
can be pickled. What comes back stands in the order of the pieces, whichever process was done first.
"""

import gc
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_all_start_methods, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

from simcore.input.files import InputError

R = TypeVar("R")
# Starting processes, and handing back what they found, costs more than it brings where all is soon done.
SHORT_S = 0.25
# What the processes work on: they find it where their parent left it, for most of it cannot be pickled.
_work: Callable[[int], Any] | None = None


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(
    work: Callable[[int], R], count: int, jobs: int, done: Callable[[int], None], here_s: float = 0.0
) -> list[R]:
    """`work` of 0, 1, .. `count` - 1 in at most `jobs` processes; in this one where that is 1 or the system
    cannot fork. `done` is told how many are finished. The first pieces are done here until `here_s` seconds
    have passed: a study that is short starts no process, and others begin with the prices that were asked
    for. Only where a piece gives the same whoever does it may that depend on the clock. Raises the error
    that one process would meet first, and InputError where a process is killed; ends all others then."""
    begun_s = time.perf_counter()
    alone = jobs <= 1 or "fork" not in get_all_start_methods()
    results: list[R] = []
    while len(results) < count and (
        alone or count - len(results) == 1 or time.perf_counter() - begun_s < here_s
    ):
        results.append(work(len(results)))
        done(len(results))
    return results if len(results) == count else results + _forked(work, len(results), count, jobs, done)


def _forked(
    work: Callable[[int], R], first: int, count: int, jobs: int, done: Callable[[int], None]
) -> list[R]:
    """`work` of `first` .. `count` - 1 in several processes."""
    global _work  # noqa: PLW0603 - a forked process takes over variables, not arguments
    jobs = min(jobs, count - first)
    _work = work
    with ProcessPoolExecutor(jobs, get_context("fork"), initializer=_begin) as pool:
        try:
            futures = [pool.submit(_call, i) for i in range(first, count)]
            for finished, future in enumerate(as_completed(futures), first + 1):
                if future.exception() is not None:
                    break
                done(finished)
            # Pieces begin in their order, so that the first error of these is the one of a single process.
            return [future.result() for future in futures]
        except BrokenProcessPool:
            killed = "a process was killed, perhaps for want of memory"
            raise InputError(f"--jobs {jobs}: {killed}; --jobs 1 takes the least") from None
        except BaseException:
            for process in active_children():
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        finally:
            _work = None


def _call(i: int) -> Any:
    assert _work is not None
    return _work(i)


def _begin() -> None:
    """The parent alone hears Ctrl-C and ends its processes; they end too where it is killed."""
    # What the parent has worked out stays there for good: to walk over it would copy its memory.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, number):
            signal.signal(getattr(signal, number), signal.SIG_DFL)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
