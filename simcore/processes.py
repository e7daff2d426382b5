"""Independent pieces of work on several cores, in forked processes.

Each process begins with all that its parent has worked out by then (prices above all), and hands back what
can be pickled. What comes back stands in the order of the pieces, whichever process was done first.
"""

import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_all_start_methods, get_context, parent_process
from multiprocessing.connection import wait
from threading import Thread
from typing import Any, TypeVar

from simcore.files import InputError

R = TypeVar("R")
# What the processes work on: they find it where their parent left it, for most of it cannot be pickled.
_work: Callable[[int], Any] | None = None


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(work: Callable[[int], R], count: int, jobs: int, done: Callable[[int], None]) -> list[R]:
    """`work` of 0, 1, .. `count` - 1 in at most `jobs` processes; in this one where that is 1 or the system
    cannot fork. `done` is told how many are finished. Raises what `work` raises, and InputError where a
    process is killed; ends all others then."""
    global _work  # noqa: PLW0603 - a forked process takes over variables, not arguments
    jobs = min(jobs, count)
    if jobs <= 1 or "fork" not in get_all_start_methods():
        results = []
        for i in range(count):
            results.append(work(i))
            done(i + 1)
        return results
    _work = work
    with ProcessPoolExecutor(jobs, get_context("fork"), initializer=_begin) as pool:
        try:
            futures = [pool.submit(_call, i) for i in range(count)]
            for finished, future in enumerate(as_completed(futures), 1):
                future.result()
                done(finished)
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
