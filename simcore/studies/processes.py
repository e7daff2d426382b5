"""Independent pieces of work on several cores, in forked processes.

Each process inherits its parent's memory (above all the cached prices) and returns results that can be
pickled. Results are in the order of the pieces, whichever process finishes first.
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
# Starting processes and returning their results does not pay for work that is shorter.
SHORT_S = 0.25
# The work of the processes: they inherit it, since most of it cannot be pickled.
_work: Callable[[int], Any] | None = None


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _no_use(i: int, result: Any) -> None:
    del i, result


def in_processes(
    work: Callable[[int], R],
    count: int,
    jobs: int,
    done: Callable[[int], None],
    here_s: float = 0.0,
    finished: Callable[[int, R], None] = _no_use,
) -> list[R]:
    """Returns `work` of 0, 1, .. `count` - 1, done in at most `jobs` processes; in this one if `jobs` is 1 or
    the system cannot fork. `done` is called with the number of finished pieces, `finished` with each piece
    and its result, in any order. This process does the first pieces until `here_s` seconds have passed: a
    short study starts no process, and other processes begin with cached prices. `here_s` depends on the
    clock, so a piece must give the same result in any process. Raises the error that a single process would
    meet first, and InputError if a process is killed; on an error the other processes end."""
    begun_s = time.perf_counter()
    alone = jobs <= 1 or "fork" not in get_all_start_methods()
    results: list[R] = []
    while len(results) < count and (
        alone or count - len(results) == 1 or time.perf_counter() - begun_s < here_s
    ):
        results.append(work(len(results)))
        finished(len(results) - 1, results[-1])
        done(len(results))
    if len(results) == count:
        return results
    return results + _forked(work, len(results), count, jobs, done, finished)


def _forked(
    work: Callable[[int], R],
    first: int,
    count: int,
    jobs: int,
    done: Callable[[int], None],
    finished: Callable[[int, R], None],
) -> list[R]:
    """Returns `work` of `first` .. `count` - 1, done in several processes."""
    global _work  # noqa: PLW0603 - a forked process takes over variables, not arguments
    jobs = min(jobs, count - first)
    _work = work
    with ProcessPoolExecutor(jobs, get_context("fork"), initializer=_begin) as pool:
        try:
            futures = {pool.submit(_call, i): i for i in range(first, count)}
            for number, future in enumerate(as_completed(futures), first + 1):
                if future.exception() is not None:
                    break
                finished(futures[future], future.result())
                done(number)
            # Pieces begin in order, so the first error here is the error of a single process.
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
    """Sets a forked process up: only the parent handles Ctrl-C and ends its processes; a process also ends
    if its parent is killed."""
    # Inherited objects stay for good: a garbage collection over them would copy the parent's memory.
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
