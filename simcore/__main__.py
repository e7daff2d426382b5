"""`python -m simcore`: see simcore.cli."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while it is still being loaded is an interrupt like any other."""
    try:
        from simcore import cli  # noqa: PLC0415
    except KeyboardInterrupt:
        print("error: interrupted; nothing is left half-written", file=sys.stderr)
        sys.exit(130)
    cli.main()


if __name__ == "__main__":
    main()
