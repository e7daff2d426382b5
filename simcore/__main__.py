"""`python -m simcore`: see simcore.cli."""

import gc
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command line. Ctrl-C while it is still being loaded is an interrupt like any other; who is
    told to end goes the same way, so that nothing is left half-written, but for what is to be ignored, as
    `nohup` has it."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        from simcore import cli  # noqa: PLC0415
    except KeyboardInterrupt:
        print("error: interrupted; nothing is left half-written", file=sys.stderr)
        sys.exit(130)
    # What is loaded stays, and so does most of what runs leave: garbage is seldom looked for among it.
    gc.freeze()
    gc.set_threshold(700, 10, 100)
    cli.main()


def _end(number: int, frame: FrameType | None) -> None:
    """Exits as a shell would say it: with 128 and the number of the signal."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
