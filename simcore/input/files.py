"""Reads the files of users: YAML into strict dataclasses, JSON and CSV; every fault is one line.

A line names the file, the field, the allowed values and, for a misspelt name, the nearest one. Unknown keys,
missing keys, wrong types and numbers that are not finite are faults. The dataclasses check other values.

Only plain files are read, up to the greatest size of their kind; a text is UTF-8 without control characters.
A document is also bounded: its depth, its size in all (aliases count each time), the digits of a number.
"""

import csv
import difflib
import errno
import io
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import yaml
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

# defer_build: a validator is made at its first use, because pydantic takes milliseconds for each type.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
# Bounds of all devices: outside of them a unit was mistaken.
PerSecond = Annotated[float, Field(ge=1e3, le=1e21)]
Bytes = Annotated[float, Field(ge=1e3, le=1e18)]
Seconds = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(ge=1e-3, le=1.0)]
Spread = Annotated[float, Field(ge=0.0, le=10.0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]

T = TypeVar("T")

# The greatest size of a file in bytes: configurations, tables of cells, and recorded requests as text.
MOST_CONFIG, MOST_TABLE, MOST_TEXT = 4_000_000, 64_000_000, 256_000_000
# The bounds of a document: depth, values and characters in all, digits of a whole number.
MOST_DEPTH, MOST_VALUES, MOST_CHARACTERS, MOST_DIGITS = 40, 1_000_000, 16_000_000, 40
# The greatest lengths in a message: of a value or name that it repeats, of a list of names, of the line.
LONGEST_VALUE, LONGEST_LIST, LONGEST_LINE = 60, 150, 290
# The most names that are compared to find the nearest one.
MOST_COMPARED = 1000
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
NOT_PLAIN = {
    stat.S_IFDIR: os.strerror(errno.EISDIR),
    stat.S_IFIFO: "is a pipe; a plain file is needed",
    stat.S_IFCHR: "is a device; a plain file is needed",
    stat.S_IFBLK: "is a device; a plain file is needed",
    stat.S_IFSOCK: "is a socket; a plain file is needed",
}


class InputError(ValueError):
    """The user's input makes no sense; the message is one line with the place and the allowed values."""


# The types that PyYAML reads by YAML 1.1, replaced below: there 4.8e12 is a string, 1:30 is 90, 010 is 8, no
# is false, and 2024-01-01 is a date.
OWN_RULES = ("int", "float", "bool", "timestamp")


class _Loader(yaml.SafeLoader):
    """A YAML loader with the scalars of YAML 1.2's core schema that refuses repeated keys."""


def _unique_keys(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    """Makes a mapping; raises ConstructorError for a repeated key, of which PyYAML would keep the last."""
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a field is a word", key.start_mark)
        if key.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown(key.value)} is given twice", key.start_mark
            )
        seen.add(str(key.value))
    return loader.construct_mapping(node, deep=True)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in OWN_RULES]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:map", _unique_keys)
for _name, _pattern, _first in (
    ("int", r"^[-+]?(0|[1-9][0-9]*)$", "-+0123456789"),
    ("float", r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+)$", "-+.0123456789"),
    ("float", r"^([-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$", "-+."),
    ("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF"),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(_pattern), list(_first))


def shown(value: object) -> str:
    """A value as a message repeats it, cut if it is long."""
    # Cut before repr, because a text may have megabytes.
    text = repr(value[: 2 * LONGEST_VALUE] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."


def plain(name: object, most: int = LONGEST_VALUE) -> str:
    """A name as a message repeats it, without quotes, control characters escaped, cut if it is long."""
    text = str(name)[: 2 * most]
    text = text if text.isprintable() else repr(text)[1:-1]
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(text: str) -> str:
    """A message as it is printed: one line, control characters escaped, without its middle if it is long."""
    words = " ".join(text[: 100 * LONGEST_LINE].split())
    line = words if words.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in words)
    if len(line) <= LONGEST_LINE:
        return line
    end = LONGEST_LINE // 2 - 5
    return f"{line[: LONGEST_LINE - end - 5]} ... {line[-end:]}"


def listed(names: Iterable[object]) -> str:
    """Names, separated by commas; of many names the first ones and their number."""
    every = [plain(name) for name in names]
    whole = ", ".join(every)
    if len(whole) <= LONGEST_LIST:
        return whole
    cut = whole[:LONGEST_LIST].rpartition(", ")[0] or whole[:LONGEST_LIST]
    return f"{cut}, ... {len(every)} in all"


def enumerated(words: Sequence[str]) -> str:
    """Words as a sentence has them: "a, b and c".

    >>> enumerated(["a", "b", "c"]), enumerated(["a"]), enumerated([])
    ('a, b and c', 'a', '')
    """
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def nearest(name: str, allowed: Iterable[str]) -> str:
    """The end of a message about a name that is not in `allowed`: the nearest allowed name, and all."""
    names = list(allowed)
    near = difflib.get_close_matches(name[: 2 * LONGEST_VALUE], names[:MOST_COMPARED], n=1, cutoff=0.5)
    hint = f"; did you mean {shown(near[0])}?" if near else ""
    return f"{hint} (allowed: {listed(names)})" if names else " (there is none)"


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> str:
    """The message about a name that is not in `allowed`, with the nearest allowed name."""
    return f"unknown {what} {shown(name)}{nearest(name, sorted(allowed))}"


def is_path(name: str, ending: str) -> bool:
    """Whether a name means a user's file instead of a shipped one: it contains '/', or has the ending."""
    return "/" in name or name.endswith(ending)


# -- reading -----------------------------------------------------------------------------------------------


def check_plain(path: Path, most_bytes: int) -> None:
    """Raises InputError if a path leads to no plain file, or to a file of more than `most_bytes` bytes."""
    try:
        state = os.stat(path)
    except (OSError, ValueError) as error:
        # ValueError: a name with a null byte.
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(state.st_mode):
        raise InputError(
            f"{path}: cannot be read: {NOT_PLAIN.get(stat.S_IFMT(state.st_mode), 'no plain file')}"
        )
    if state.st_size > most_bytes:
        raise InputError(
            f"{path}: cannot be read: has {state.st_size:,} bytes; at most {most_bytes:,} are allowed"
        )


def read_text(path: Path, most_bytes: int = MOST_CONFIG) -> str:
    """The text of a plain file. Raises InputError if it cannot be read, is too long, or is no UTF-8 text."""
    check_plain(path, most_bytes)
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes)
        # utf-8-sig: spreadsheets begin a CSV with a byte order mark.
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from None
    if odd := CONTROL.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        raise InputError(f"{path}: line {line}: has a control character ({odd.group()!a}), which no text has")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_cells(path: Path, most_bytes: int = MOST_TABLE) -> tuple[list[str], list[list[str]]]:
    """The head of a CSV file, and its other rows that are not empty. Raises InputError if it cannot be read,
    is no CSV, has a column twice, or a row has another number of cells than the head."""
    rows = csv.reader(io.StringIO(read_text(path, most_bytes)))
    try:
        head = [name.strip() for name in next(rows, [])]
        if len(set(head)) < len(head):
            twice = next(name for name, count in Counter(head).items() if count > 1)
            raise InputError(f"{path}: column {shown(twice)} is there twice")
        found = []
        for row in rows:
            if row and len(row) != len(head):
                cells = f"has not as many cells as there are columns ({len(row)}, not {len(head)})"
                raise InputError(f"{path}: line {rows.line_num}: {cells}")
            found += [row] if row else []
    except csv.Error as error:
        raise InputError(f"{path}: not valid CSV: line {rows.line_num}: {error}") from None
    return head, found


def read_yaml(path: Path) -> Any:
    """The document in a YAML file. Raises InputError if it cannot be read or parsed."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """The document in a YAML text. Raises InputError if it cannot be parsed or is too large."""
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measured(node, {})
        return _unshared(loader.construct_document(node))
    except RecursionError:
        raise InputError(f"{where}: not valid YAML: {TOO_DEEP}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "a broken document"
        raise InputError(f"{where}: not valid YAML{line}: {plain(problem, LONGEST_LIST)}") from None


def _unshared(value: Any) -> Any:
    """A document with a value of its own for every alias, so that a change of one changes no other."""
    if isinstance(value, dict):
        return {key: _unshared(one) for key, one in value.items()}
    return [_unshared(one) for one in value] if isinstance(value, list) else value


TOO_DEEP = f"nested more than {MOST_DEPTH} deep"
TOO_MUCH = f"more than {MOST_VALUES:,} values or {MOST_CHARACTERS:,} characters, aliases counted each time"


def _measured(node: yaml.Node, known: dict[int, tuple[int, int, int] | None]) -> tuple[int, int, int]:
    """Values, characters and depth of a YAML node with every alias written out. `known`: by node, the result,
    or None while it is being measured. Raises MarkedYAMLError if the node is too large."""
    size = known.get(id(node), (0, 0, 0))
    if size is None:
        raise yaml.MarkedYAMLError(problem="an alias stands for what it is in", problem_mark=node.start_mark)
    if size[0]:
        return size
    known[id(node)] = None
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node)
        size = 1, len(node.value), 0
    else:
        inside = [part for pair in node.value for part in (pair if isinstance(pair, tuple) else (pair,))]
        sizes = [_measured(part, known) for part in inside]
        values, characters = (sum(size[i] for size in sizes) for i in (0, 1))
        size = 1 + values, characters, 1 + max((depth for _, _, depth in sizes), default=0)
    known[id(node)] = size
    if size[2] > MOST_DEPTH or size[0] > MOST_VALUES or size[1] > MOST_CHARACTERS:
        problem = TOO_DEEP if size[2] > MOST_DEPTH else TOO_MUCH
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return size


def _check_scalar(node: yaml.ScalarNode) -> None:
    if odd := CONTROL.search(node.value):
        problem = f"a control character ({odd.group()!a}), which no value has"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    if node.tag.endswith(":int") and len(node.value) > MOST_DIGITS:
        problem = f"a number of {len(node.value)} digits; at most {MOST_DIGITS} are allowed"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def read_json(path: Path, most_bytes: int = MOST_CONFIG) -> Any:
    """The document in a JSON file. Raises InputError if it cannot be read or parsed."""
    return parse_json(read_text(path, most_bytes), str(path))


def parse_json(text: str, where: str) -> Any:
    """The document in a JSON text. Raises InputError if it cannot be parsed, has a key twice, contains
    control characters or numbers of too many digits, or is nested too deep."""
    try:
        document = json.loads(text, object_pairs_hook=_once, parse_int=_whole)
        _check_value(document, 0)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON in line {error.lineno}: {error.msg}") from None
    except RecursionError:
        raise InputError(f"{where}: not valid JSON: {TOO_DEEP}") from None
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON: {error}") from None
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} is given twice")
        found[key] = value
    return found


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; at most {MOST_DIGITS} are allowed")
    return int(digits)


def _check_value(value: object, depth: int) -> None:
    if isinstance(value, str):
        if odd := CONTROL.search(value):
            raise ValueError(f"a control character ({odd.group()!a}), which no value has")
    elif isinstance(value, dict | list):
        if depth >= MOST_DEPTH:
            raise ValueError(TOO_DEEP)
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_value(each, depth + 1)


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """The validator of a type, cached because pydantic takes milliseconds to make one."""
    return TypeAdapter(kind)


def validated(kind: type[T], document: object, where: str) -> T:
    """`document` as a `kind`, a pydantic dataclass. Raises InputError with the worst fault."""
    try:
        # From JSON, where strict mode takes a list for a tuple and a string for a number key.
        found: T = adapter(cast("Hashable", kind)).validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        raise InputError(f"{where}: {_line(kind, error)}") from None
    return found


def worst(error: ValidationError) -> Any:
    """The fault to report: an unknown key before a missing one, because it may be that key misspelt."""
    faults = error.errors(include_url=False)
    unknown = (f for f in faults if f["type"] in ("extra_forbidden", "unexpected_keyword_argument"))
    return next(unknown, faults[0]) if faults[0]["type"] == "missing" else faults[0]


def missing(error: ValidationError) -> list[tuple[int | str, ...]]:
    """The locations of all missing keys."""
    return [fault["loc"] for fault in error.errors(include_url=False) if fault["type"] == "missing"]


def _line(kind: type, error: ValidationError) -> str:
    first = worst(error)
    location = tuple(plain(part) for part in first["loc"] if part != "[key]")
    field = ".".join(location)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "unexpected_keyword_argument":
        return unknown_name("key", field, [".".join((*location[:-1], n)) for n in _keys(kind, location[:-1])])
    if first["type"] == "missing":
        names = [".".join(map(str, location)) for location in missing(error)]
        return f"missing key{'s' * (len(names) > 1)} {listed(map(repr, names))}"
    if first["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", message)
        return f"{field}: {unknown_name('value', str(first['input']), allowed)}"
    if first["type"] == "value_error":
        return f"{field}: {message}" if field else message
    return f"{field or 'document'}: {message[0].lower()}{message[1:]}, got {shown(str(first['input']))}"


def _keys(kind: type, location: tuple[str, ...]) -> list[str]:
    """The keys of the dataclass at `location` inside `kind`."""
    here: Any = kind
    for part in location:
        if is_dataclass(here):
            here = get_type_hints(here)[part]
        else:
            # In a mapping or a sequence the part leads to a value.
            here = next((a for a in get_args(here) if is_dataclass(a)), here)
        # Of an optional dataclass, the dataclass.
        if get_origin(here) in (Union, UnionType):
            here = next((a for a in get_args(here) if is_dataclass(a)), here)
    return [f.name for f in fields(here)] if is_dataclass(here) else []
