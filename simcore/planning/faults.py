"""Faults of values that a plan puts into its scenarios, named as its file names them.

    vary.FIELD: ..     between: ..     over: FIELD: no such field     fields.NAME.BASE: PATH: no such field

A value that no other field could put right is refused. A combination that cannot be (ranks that do not divide
devices) is no such fault: it is left out.
"""

from collections.abc import Mapping
from typing import Any

from simcore.input.errors import FieldFaultError
from simcore.input.files import InputError
from simcore.planning.whatif import Asked

# Fields that hold a name, also those of a fleet's groups, which is looked up after the fields were read; the
# last two are names of a device.
NAMES, OF_DEVICE = ("device", "model"), ("profile", "link")


def as_written(path: str) -> str:
    """Returns a dotted path as messages about a scenario have it.

    >>> as_written("strategies.1.hits.value")
    'strategies[1].hits.value'
    """
    first, *parts = path.split(".")
    return first + "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in parts)


def of_value(asked: Asked, base: str, settings: Mapping[str, Any], error: ValueError) -> InputError | None:
    """Returns the fault of a varied or searched value, None if the error is none. `base`: whose scenario it
    is of; `settings`: the varied values."""
    where, message = f"{asked.every[base].where}: ", str(error)
    if not message.startswith(where):
        return None
    message = message.removeprefix(where)
    over = [] if asked.whatif.over is None else [asked.whatif.over]
    for name in [*settings, *over]:
        for path in asked.paths(name, base):
            written = as_written(path)
            last = written.rpartition(".")[2]
            named = last in NAMES or (last in OF_DEVICE and "device" not in settings)
            if not _is_of(error, written) and not (named and message.startswith(f"{written}: ")):
                continue
            of = f"{base}: " if base else ""
            if not (isinstance(error, FieldFaultError) and error.unknown):
                field = "between" if name in over else f"vary.{name}"
            elif name in asked.whatif.fields:
                field, of = f"fields.{name}.{base}", ""
            else:
                field = "over" if name in over else "vary"
            if message.startswith(written) and field == f"vary.{path}":
                rest, _, says = message.removeprefix(written).partition(": ")
                return InputError(f"{asked.file}: {field}{rest}: {of}{says}")
            return InputError(f"{asked.file}: {field}: {of}{message}")
    return None


def _is_of(error: ValueError, written: str) -> bool:
    path = error.path if isinstance(error, FieldFaultError) else ""
    return bool(path) and (_under(path, written) or _under(written, path))


def _under(path: str, other: str) -> bool:
    """Whether a path is another one, or leads into it."""
    return path == other or path.startswith((f"{other}.", f"{other}["))
