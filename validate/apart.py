"""A command in a process of its own, which is gone when it is done with, and all that it started with it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from simcore.input.drafts import held_signals

# Seconds to wait for a process that was killed: one in a call of a driver may not end.
DYING_S = 30.0


def exit_code(
    command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None
) -> int | None:
    """Runs a command and returns its exit code, None if it was ended after `limit_s`. However this returns,
    also by Ctrl-C, SIGTERM or SIGHUP, the processes of the command's group have been killed. One that it put
    into a group of its own is not ended. `environment`: by default that of this process."""
    process: subprocess.Popen[bytes] | None = None
    with _signals_raise():
        try:
            # No signal comes between the start and the name for it.
            with held_signals():
                process = subprocess.Popen(command, env=environment, start_new_session=True)
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process is not None:
                with held_signals():
                    _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kills the group of a process and waits for the process."""
    # There is none, or on some systems only ended ones, once all have ended by themselves.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(DYING_S)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise SystemExit with a shell's exit code where they would end this process at
    once."""
    # Handlers can be set, and run, only in the main thread.
    heard = threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP) if heard else ()
    changed = [each for each in both if signal.getsignal(each) == signal.SIG_DFL]
    for each in changed:
        signal.signal(each, _leave)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
