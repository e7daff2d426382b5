"""Files that nobody should write, made by seed: what is wrong with them, and where.

document (mappings and lists)    a key misspelt, missing, twice or new; a value of another kind or size
table (lines of cells)           a column misspelt, missing, twice or new; a cell of another kind or size
bytes                            cut, flipped, not UTF-8, with null bytes, empty, far too many
what stands at the path          no plain file at all: a directory, a pipe, a device, a circle of links
"""

import copy
import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml

# Stands for a text that no YAML or JSON writer gives; replaced in the text that was written.
_RAW = "raw~{}~raw"
# fmt: off
NUMBERS = (
    "0", "-1", "-0.0", "1e-320", "5e-324", "1e-9", "1e308", "-1e308", "1e400", ".inf", "-.inf", ".nan",
    "NaN",
    "Infinity", "0.5", "3", "17", "1e21", "1e22", "4294967297", "9223372036854775807",
    "9223372036854775808",
    "-9223372036854775809", "1" + 399 * "0", 400 * "9", 5000 * "7", "0." + 900 * "3", "1e", "0x10", "1_000",
)
WORDS = (
    "null", "~", "true", "false", "''", "no such thing", "bf16", "fp8", "none", '"\\0"', '"a\\0b"',
    '"./\\0/x"',
    '"\\e[31mred\\e[0m"', '"\\r\\nnext"', '"\\x07"', '"\\u202e\\u200b"', '"\\uD800"',
    '"' + 100_000 * "x" + '"',
    '"' + 300 * "\u00e4" + '"', "/dev/zero", "/dev/null", "/dev/stdin", "/", ".", "..", "./", "a/b.yaml",
    "/proc/self/mem", "~root/x.json", '"%s%n{}{0}"', "2024-01-01", "!!python/object:os.system x",
    "!!binary aGk=",
    "*missing", '"' + 5000 * "d/" + '.yaml"',
)
SHAPES = (
    "[]", "{}", "[null]", "[[]]", "[1, 1]", "[1, two]", "{a: 1}", "{1: 2}", "{null: null}", "{? [a]: b}",
    200 * "[" + 200 * "]", 5000 * "[" + 5000 * "]", 60 * "{a: " + "1" + 60 * "}", "&a [*a]", "&a {b: *a}",
    "[" + ", ".join(3000 * ["1"]) + "]", "{" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}",
)
VALUES = (*NUMBERS, *WORDS, *SHAPES)
CELLS = (
    "", " ", "0", "-1", "1e-320", "5e-324", "1e308", "1e999", "nan", "NaN", "inf", "-inf", "null", "x",
    "1,5", "1;2",
    400 * "9", 5000 * "7", "9223372036854775807", "9223372036854775808", "0.5", "1e-9", "1e9", "2",
    "1000000",
    "\x1b[31mred", 100_000 * "y", "\u00e4" * 200, '"', "'", "=1+1", "2023-11-16 18:17:03.9799600",
    "true", "\x00",
    "1_0", "+3", " 4 ", "٣",
)
# fmt: on


def bomb(levels: int = 26, width: int = 2) -> str:
    """A YAML document of half a kilobyte whose aliases stand for width**levels values."""
    lines = ["a0: &a0 [x, x]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join(width * [f'*a{i - 1}'])}]")
    return "\n".join(lines) + "\n"


# -- documents ---------------------------------------------------------------------------------------------


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is in a document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        document = document[part]
    return document


def misspelt(word: str, random: Random) -> str:
    """The word with one letter wrong."""
    at = random.randrange(len(word) or 1)
    return random.choice((word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word + "s", word.upper()))


def changed_document(document: Any, random: Random) -> tuple[Any, str]:
    """A copy of a document with one thing wrong in it, and what it is. Raw texts stand in it as markers."""
    document = copy.deepcopy(document)
    path = random.choice(list(places(document)))
    holder, key = _at(document, path[:-1]), path[-1]
    where = ".".join(map(str, path))
    ways: Sequence[Callable[[Any, Any, Random], str]] = (_value, _value, _number, _number, _key, _list)
    return document, f"{where} {random.choice(ways)(holder, key, random)}"


def _value(holder: Any, key: Any, random: Random) -> str:
    pool = NUMBERS if isinstance(holder[key], int | float) and random.random() < 0.5 else VALUES
    raw = random.choice(pool)
    holder[key] = _RAW.format(raw)
    return f"= {raw[:40]!r}"


def _number(holder: Any, key: Any, random: Random) -> str:
    """Of a number another one that may well be allowed."""
    value = holder[key]
    if not isinstance(value, int | float) or isinstance(value, bool):
        return _value(holder, key, random)
    factor = random.choice((0.0, 1e-9, 0.001, 0.1, 0.5, 1.5, 2, 10, 30))
    holder[key] = int(value * factor) if isinstance(value, int) else value * factor
    return f"= {holder[key]}"


def _key(holder: Any, key: Any, random: Random) -> str:
    how = random.choice(("missing", "misspelt", "extra"))
    if how == "missing" or not isinstance(holder, dict):
        del holder[key]
        return "missing"
    if how == "misspelt":
        wrong = misspelt(str(key), random)
        holder[wrong] = holder.pop(key)
        return f"misspelt {wrong!r}"
    name = random.choice(("extra", "", "a b", "\u00e4", "\x1b[1m", "a\0", 2000 * "k", "source", "0", "name"))
    holder[name] = random.choice((1, None, "x", [1], {"a": 1}))
    return f"beside {name[:20]!r}"


def _list(holder: Any, key: Any, random: Random) -> str:
    """A list where there is none, and the other way round."""
    value = holder[key]
    if isinstance(value, list | dict) and random.random() < 0.7:
        inner = list(value.values()) if isinstance(value, dict) else value
        holder[key] = inner[0] if inner else None
        return "out of its list"
    holder[key] = [value]
    return "in a list"


def yaml_text(document: Any) -> str:
    """The document as YAML, with the raw texts in it as they are."""
    return _unmarked(yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=1 << 30))


def json_text(document: Any) -> str:
    """The document as JSON, with the raw texts in it as they are, JSON or not."""
    return _unmarked(json.dumps(document, ensure_ascii=False))


def _unmarked(text: str) -> str:
    """Raw texts instead of their markers, which the writer may have put in quotes."""
    before, after = _RAW.split("{}")
    while before in text:
        head, _, rest = text.partition(before)
        raw, _, tail = rest.partition(after)
        quote = head[-1:] if head[-1:] in ("'", '"') and tail[:1] == head[-1:] else ""
        if quote:
            head, tail = head[:-1], tail[1:]
            raw = raw.replace("''", "'") if quote == "'" else json.loads(f'"{raw}"')
        text = head + raw + tail
    return text


def twice(text: str, random: Random) -> str:
    """A text in which one line stands twice: a key of a YAML mapping, say."""
    lines = text.splitlines(keepends=True) or [""]
    at = random.randrange(len(lines))
    return "".join([*lines[: at + 1], *lines[at:]])


# -- tables ------------------------------------------------------------------------------------------------


def changed_table(text: str, random: Random) -> tuple[str, str]:
    """A CSV text with one thing wrong in it, and what it is."""
    rows = list(csv.reader(io.StringIO(text)))
    column, at = random.randrange(len(rows[0])), random.randrange(len(rows))
    name = rows[0][column]
    how = random.choice(
        ("cell", "cell", "cell", "cell", "misspelt", "missing", "extra", "more", "fewer", "many", "twice")
    )
    if how == "misspelt":
        rows[0][column] = misspelt(name, random)
    elif how == "missing":
        for row in rows:
            del row[column : column + 1]
    elif how == "extra":
        for i, row in enumerate(rows):
            row.append("1" if i else random.choice(("extra", "", name, "\x1b[1m", 3000 * "c")))
    elif how == "more":
        rows[at].append("1")
    elif how == "fewer":
        del rows[at][column:]
    elif how == "many":
        rows += random.choice((3, 300, 20_000)) * [rows[-1]]
    elif how == "twice":
        rows.insert(at, rows[at])
    else:
        at = random.randrange(min(1, len(rows) - 1), len(rows))
        if column < len(rows[at]):
            rows[at][column] = random.choice(CELLS)
            name = f"{name} = {rows[at][column][:30]!r}"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue(), f"{how}: row {at}, {name}"


# -- bytes, and what is no plain file ----------------------------------------------------------------------


def changed_bytes(content: bytes, random: Random) -> tuple[bytes, str]:
    """Bytes that are spoilt, and how."""
    at = random.randrange(len(content) or 1)
    end = min(len(content), at + random.randrange(1, 40))
    bit = 1 << random.randrange(8)
    ways: dict[str, Callable[[], bytes]] = {
        "cut": lambda: content[:at],
        "empty": lambda: b"",
        "flipped": lambda: content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :],
        "removed": lambda: content[:at] + content[end:],
        "doubled": lambda: content[:end] + content[at:],
        "null byte": lambda: content[:at] + b"\0" + content[at:],
        "not UTF-8": lambda: content[:at] + b"\xff\xfe\x80" + content[at:],
        "escape": lambda: content[:at] + b"\x1b[2J" + content[at:],
        "UTF-16": lambda: content.decode("utf-8", "replace").encode("utf-16"),
        "byte order mark": lambda: b"\xef\xbb\xbf" + content,
        "latin-1": lambda: content[:at] + b"\xe4" + content[at:],
        "line ends": lambda: content.replace(b"\n", b"\r\n"),
        "noise": lambda: random.randbytes(300),
        "brackets": lambda: 100_000 * b"[",
        "braces": lambda: 3000 * b'{"a":',
        "digits": lambda: 6000 * b"9",
        "bomb": lambda: bomb().encode(),
        "wide bomb": lambda: bomb(8, 9).encode(),
    }  # fmt: skip
    how = random.choice(list(ways))
    if how == "flipped" and not content:
        how = "empty"
    return ways[how](), f"{how} at {at}"


def no_plain_file(path: Path, random: Random) -> str:
    """Puts something in the place of a file that is none, and says what."""
    path.unlink(missing_ok=True)
    how = random.choice(
        ("nothing", "directory", "pipe", "/dev/zero", "/dev/null", "circle", "hollow", "link", "sealed")
    )
    if how == "directory":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how.startswith("/dev/"):
        path.symlink_to(how)
    elif how == "circle":
        path.symlink_to(path.name)
    elif how == "hollow":
        # Terabytes of nothing.
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif how == "link":
        path.symlink_to("no/such/file")
    elif how == "sealed":
        path.write_bytes(b"a: 1\n")
        path.chmod(0)
    return how
