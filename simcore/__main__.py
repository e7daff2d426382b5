"""`python -m simcore`: see simcore.cli."""

import gc
import os
import signal
import sys
from types import FrameType

# The word for each signal in the message; the command line uses the same words once it is loaded.
_SAID = {"SIGINT": "interrupted", "SIGTERM": "told to end", "SIGHUP": "hung up"}


def main() -> None:
    """Runs the command line. SIGINT, SIGTERM and SIGHUP end it by an exception, so that no file is left
    half-written, except a signal that the process ignores, as under `nohup`. During the imports no file is
    open yet: the process ends at once, because an imported module may swallow an exception."""
    heeded = [number for name in _SAID if (number := _heeded(name)) is not None]
    for number in heeded:
        signal.signal(number, _leave)
    from simcore import compiled  # noqa: PLC0415

    refused = compiled.use()
    from simcore import cli, terminal  # noqa: PLC0415

    try:
        for number in heeded:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _end)
        # Imported objects stay, and so do most objects of a run: the garbage collector looks at them rarely.
        gc.freeze()
        gc.set_threshold(700, 10, 100)
        # Not earlier: `terminal.note` has only just been imported.
        if refused:
            terminal.note(refused)
        cli.main()
    except KeyboardInterrupt:
        # Interrupted between two of these lines, outside `cli.main`.
        _leave(signal.SIGINT, None)


def _heeded(name: str) -> signal.Signals | None:
    """Returns the signal of this name, or None if this system lacks it or the process ignores it."""
    number: signal.Signals | None = getattr(signal, name, None)
    return None if number is None or signal.getsignal(number) == signal.SIG_IGN else number


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process at once with a shell's exit code, 128 plus the number of the signal."""
    said = _SAID[signal.Signals(number).name]
    os.write(2, f"error: {said}; nothing is left half-written\n".encode())
    os._exit(128 + number)


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the process with the same code by an exception, so that drafts are removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
