"""Writes files and folders whole or not at all: into a draft beside the target, which then takes its place.

    .NAME-0123abcd        a draft of NAME, a file or a folder, locked as long as its writer lives
    .NAME-0123abcd/old    the folder NAME that was there before, while the new one takes its place

Whatever ends a writer, the target is the old one or the new one. What a killed writer has left is swept up by
the next that writes the same target: its drafts go, and a folder that it had set aside comes back.
"""

import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from types import FrameType
from typing import Any

from simcore.input.files import InputError

try:
    import fcntl
except ImportError:  # not on Windows, where what a killed writer leaves stays
    fcntl = None  # type: ignore[assignment]

DRAFT = re.compile(r"\.(.+)-[0-9a-f]{8}")
OLD = "old"
# What ends a run from outside and can be put off.
ENDINGS = ("SIGINT", "SIGTERM", "SIGHUP")


def draft_of(name: str) -> str | None:
    """The name of what a file or folder of this name is a draft of; None where it is none."""
    found = DRAFT.fullmatch(name)
    return found.group(1) if found else None


@contextmanager
def folder_draft(target: Path, mine: Callable[[str], bool]) -> Iterator[Path]:
    """A new folder that becomes `target` if all goes well, and vanishes if not, as do parents that were not
    there before. `mine`: whether a file of this name is one that such a folder may have; drafts that hold
    others are not swept up. Raises OSError where nothing can be written there."""
    created = [path for path in target.absolute().parents if not path.exists()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target, mine)
        draft, lock = _new_folder(target)
    except OSError:
        _remove_empty(created)
        raise
    try:
        yield draft
        draft.chmod(0o755)
        _take_place(target, draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        _remove_empty(created)
        raise
    finally:
        os.close(lock)


@contextmanager
def file_draft(target: Path) -> Iterator[Path]:
    """A new file that becomes `target` if all goes well, and vanishes if not. What is there and is no plain
    file (a pipe, /dev/stdout) is written to itself. Raises InputError where nothing can be written there."""
    try:
        if target.exists() and not target.is_file():
            if target.is_dir():
                raise InputError(f"{target}: is a directory; a file is needed")
            yield target
            return
        # A link stays, and what it leads to is replaced.
        whole = target.resolve()
        _sweep(whole, lambda name: False)
        draft, lock = _new_file(whole)
        if whole.exists():
            shutil.copymode(whole, draft)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{target}: cannot be written: {getattr(error, 'strerror', None) or error}"
        ) from None
    try:
        yield draft
        draft.replace(whole)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def write_text(target: Path, text: str) -> None:
    """Writes a text file, UTF-8, whole or not at all. Raises InputError where it cannot be written."""
    with file_draft(target) as draft:
        try:
            # A name of a file that is not UTF-8 may stand in it.
            draft.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror}") from None


def _remove_empty(folders: list[Path]) -> None:
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def _take_place(target: Path, draft: Path) -> None:
    """Puts a folder in the place of another, which stays where it is if that fails."""
    with held_signals():
        if not target.exists():
            draft.rename(target)
            return
        aside, lock = _new_folder(target)
        try:
            target.rename(aside / OLD)
            try:
                draft.rename(target)
            except BaseException:
                (aside / OLD).rename(target)
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            os.close(lock)


@contextmanager
def held_signals() -> Iterator[None]:
    """Ctrl-C and other signals that end a run wait until this is done."""
    held: list[int] = []
    before: dict[int, Any] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    # Handlers run in the main thread alone, whichever thread the system interrupts.
    if threading.current_thread() is threading.main_thread():
        for name in ENDINGS:
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in held[:1]:
            signal.raise_signal(number)


# -- drafts, and whose they are ----------------------------------------------------------------------------


def _new_folder(target: Path) -> tuple[Path, int]:
    """A new draft folder and what locks it."""
    while True:
        draft = target.with_name(f".{target.name}-{token_hex(4)}")
        draft.mkdir(mode=0o700)
        lock = os.open(draft, os.O_RDONLY)
        if _locked(draft, lock):
            return draft, lock


def _new_file(target: Path) -> tuple[Path, int]:
    """A new, empty draft file and what locks it."""
    while True:
        draft = target.with_name(f".{target.name}-{token_hex(4)}")
        lock = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        if _locked(draft, lock):
            return draft, lock


def _locked(draft: Path, lock: int) -> bool:
    """Locks a draft. False where another process swept it up in the moment before."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
    if draft.exists():
        return True
    os.close(lock)
    return False


def _sweep(target: Path, mine: Callable[[str], bool]) -> None:
    """Removes the drafts of a target whose writers are gone; brings back a folder that one had set aside."""
    if fcntl is None:
        return
    for name in sorted(os.listdir(target.parent)):
        draft = target.with_name(name)
        if draft_of(name) == target.name and not draft.is_symlink():
            with suppress(OSError):
                _sweep_one(target, draft, mine)


def _sweep_one(target: Path, draft: Path, mine: Callable[[str], bool]) -> None:
    if not (draft.is_dir() or draft.is_file()):
        return
    lock = os.open(draft, os.O_RDONLY)
    try:
        # Raises OSError where the writer lives.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if draft.is_file():
            draft.unlink()
            return
        inside = {path.name for path in draft.iterdir()}
        if OLD in inside and not target.exists():
            (draft / OLD).rename(target)
        elif not all(name == OLD or mine(name) for name in inside):
            return
        shutil.rmtree(draft)
    finally:
        os.close(lock)
