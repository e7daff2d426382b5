"""Writes files and folders whole or not at all: into a draft beside the target, which then replaces it.

    .NAME-0123abcd        a draft of NAME, a file or a folder, locked while its writer runs
    .NAME-0123abcd/old    the former folder NAME, while the new one replaces it

However a writer ends, the target is the old one or the new one. The next writer of the same target cleans up
after a killed writer: it deletes the drafts, and restores a folder that was set aside.
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
except ImportError:  # on Windows, where the drafts of a killed writer stay
    fcntl = None  # type: ignore[assignment]

DRAFT = re.compile(r"\.(.+)-[0-9a-f]{8}")
OLD = "old"
# The signals that end a run from outside and can be deferred.
ENDINGS = ("SIGINT", "SIGTERM", "SIGHUP")


def draft_of(name: str) -> str | None:
    """The name of the target of a draft with this name; None if it is no name of a draft."""
    found = DRAFT.fullmatch(name)
    return found.group(1) if found else None


@contextmanager
def folder_draft(target: Path, mine: Callable[[str], bool]) -> Iterator[Path]:
    """Gives a new folder, which becomes `target` if the block succeeds; else it is deleted, together with
    parents that did not exist before. `mine`: whether such a folder may have a file of this name; old drafts
    with other files are not deleted. Raises OSError if the folder cannot be written."""
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
    """Gives a new file, which becomes `target` if the block succeeds; else it is deleted. A target that
    exists and is no plain file (a pipe, /dev/stdout) is written directly. Raises InputError if it cannot be
    written."""
    try:
        if target.exists() and not target.is_file():
            if target.is_dir():
                raise InputError(f"{target}: is a directory; a file is needed")
            yield target
            return
        # A link stays; the file that it points to is replaced.
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
    """Writes a text file, UTF-8, whole or not at all. Raises InputError if it cannot be written."""
    with file_draft(target) as draft:
        try:
            # The text may contain a file name that is not UTF-8.
            draft.write_text(text, encoding="utf-8", errors="backslashreplace", newline="\n")
        except OSError as error:
            raise InputError(f"{target}: cannot be written: {error.strerror}") from None


def _remove_empty(folders: list[Path]) -> None:
    for path in folders:
        with suppress(OSError):
            path.rmdir()


def _take_place(target: Path, draft: Path) -> None:
    """Replaces the folder `target` by `draft`; the old folder stays if that fails."""
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
    """Defers Ctrl-C and other signals that end a run until the block is done."""
    held: list[int] = []
    before: dict[int, Any] = {}

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(number)

    # Handlers can be set, and run, only in the main thread.
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


# -- drafts and their locks --------------------------------------------------------------------------------


def _new_folder(target: Path) -> tuple[Path, int]:
    """A new draft folder, and the file descriptor that holds its lock."""
    while True:
        draft = target.with_name(f".{target.name}-{token_hex(4)}")
        draft.mkdir(mode=0o700)
        lock = os.open(draft, os.O_RDONLY)
        if _locked(draft, lock):
            return draft, lock


def _new_file(target: Path) -> tuple[Path, int]:
    """A new, empty draft file, and the file descriptor that holds its lock."""
    while True:
        draft = target.with_name(f".{target.name}-{token_hex(4)}")
        lock = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
        if _locked(draft, lock):
            return draft, lock


def _locked(draft: Path, lock: int) -> bool:
    """Locks a draft. Returns False if another process deleted it just before."""
    if fcntl is not None:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
    if draft.exists():
        return True
    os.close(lock)
    return False


def _sweep(target: Path, mine: Callable[[str], bool]) -> None:
    """Deletes the drafts of a target whose writers are gone; restores a folder that one had set aside."""
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
        # Raises OSError if the writer still runs.
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
