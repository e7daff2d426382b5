"""How the programs of this package end: bad input is one line on stderr and exit code 2."""

import csv
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import typer

from simcore.input.drafts import file_draft
from simcore.input.files import InputError, unknown_name
from simcore.terminal import INTERRUPTED, USAGE, failed, message_and_code, note


def check_out(path: Path | None) -> None:
    """Raises InputError if a file could not be written; programs call it before long work."""
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        why = "is a folder" if path.is_dir() else "its folder is not there"
        raise InputError(f"--out {path}: {why}")
    # The file replaces its target at the end; this cannot replace a device.
    if path.exists() and not path.is_file():
        raise InputError(f"--out {path}: is no plain file")


def named(option: str, words: str, allowed: Collection[str], *, needed: bool = False) -> list[str]:
    """Returns the comma-separated names of an option. Raises InputError for a name that is not allowed, and
    for an empty list if one is `needed`."""
    found = [word for word in words.split(",") if word]
    if needed and not found:
        raise InputError(f"{option}: names none; allowed: {', '.join(allowed)}")
    for name in found:
        if name not in allowed:
            raise InputError(f"{option}: {unknown_name('name', name, allowed)}")
    return found


def partial_of(path: Path) -> Path:
    """Returns the file that keeps lines as they are measured, until the result at `path` is complete."""
    return path.with_name(f".{path.name}-partial.csv")


def write_csv(rows: Sequence[Mapping[str, object]], path: Path) -> None:
    """Writes rows with the same names as a CSV file, completely or not at all."""
    with file_draft(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields a table in plain text: the first and the last column left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        middle = (text.rjust(width) for text, width in zip(line[1:-1], widths[1:-1], strict=True))
        yield "  ".join([line[0].ljust(widths[0]), *middle, line[-1]]).rstrip()


def markdown(lines: Sequence[Sequence[object]]) -> Iterator[str]:
    """Yields a table in Markdown, with its head first."""
    for number, line in enumerate(lines):
        yield f"| {' | '.join(map(str, line))} |"
        if not number:
            yield "|---" * len(line) + "|"


def run(main: Callable[..., None]) -> None:
    """Runs a function as a program; typer parses its parameters."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        code = app(standalone_mode=False)
    except SystemExit as ended:
        code = ended.code
    except InputError as error:
        code = failed(str(error), USAGE)
    except Exception as error:
        code = failed(*message_and_code(error))
    # After Ctrl-C typer returns 130.
    if code == INTERRUPTED:
        note("interrupted")
    sys.exit(code or 0)
