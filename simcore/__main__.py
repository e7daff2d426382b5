"""`python -m simcore`: see simcore.cli."""

import gc
import os
import signal
import sys
from types import FrameType

from simcore import compiled

# How a signal is told of, as the command line tells of it once it is loaded.
_SAID = {"SIGINT": "interrupted", "SIGTERM": "told to end", "SIGHUP": "hung up"}


def main() -> None:
    """Runs the command line. Whoever is interrupted, told to end or hung up leaves by it, so that nothing is
    left half-written, but for what is to be ignored, as `nohup` has it. While it is being loaded there is
    nothing to leave: the process ends at once, for what is imported may keep an exception to itself."""
    heeded = [number for name in _SAID if (number := _heeded(name)) is not None]
    for number in heeded:
        signal.signal(number, _leave)
    refused = compiled.use()
    from simcore import cli, terminal  # noqa: PLC0415

    try:
        for number in heeded:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _end)
        # What is loaded stays, and so does most of what runs leave: garbage is seldom looked for among it.
        gc.freeze()
        gc.set_threshold(700, 10, 100)
        # Not before: how a line is told belongs to what has just been loaded.
        if refused:
            terminal.note(refused)
        cli.main()
    except KeyboardInterrupt:
        # Between two of these lines.
        _leave(signal.SIGINT, None)


def _heeded(name: str) -> signal.Signals | None:
    """A signal of this system that is not to be ignored."""
    number: signal.Signals | None = getattr(signal, name, None)
    return None if number is None or signal.getsignal(number) == signal.SIG_IGN else number


def _leave(number: int, frame: FrameType | None) -> None:
    """Ends the process as a shell would say it, with 128 and the number of the signal."""
    said = _SAID[signal.Signals(number).name]
    os.write(2, f"error: {said}; nothing is left half-written\n".encode())
    os._exit(128 + number)


def _end(number: int, frame: FrameType | None) -> None:
    """The same by an exception, so that what was begun is cleared away."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
