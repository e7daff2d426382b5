"""What differs in the inputs of two runs, field by field."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcore.reports.comparing.sides import PRICES, Side
from simcore.reports.text import recorded

# What a field is of: what was asked, where it ran, what prices are from, what code it was.
ASKED, WHERE, PRICED, CODE = "asked", "machine", "prices", "code"
ABSENT = object()
NOT_GIVEN, NONE = "not given", "none"


@dataclass(frozen=True)
class Difference:
    """A field that differs. `a`, `b`: its values as text; `of`: what kind of input it is."""

    field: str
    a: str
    b: str
    of: str = ASKED


def differences(a: Side, b: Side) -> list[Difference]:
    """Returns the fields in which two runs differ: what was asked first, then machine, prices and code. A
    field that only one of them knows, without a value, differs in nothing."""
    found = [Difference(*each) for each in _between(a.inputs, b.inputs, "")]
    given = {each.field.rpartition(".")[2] for each in found}
    for name in dict.fromkeys([*a.origin, *b.origin]):
        one, other = a.origin.get(name, ABSENT), b.origin.get(name, ABSENT)
        if not _same(one, other):
            found.append(Difference(name, value_in_words(one), value_in_words(other), kind_of(name)))
    order = (ASKED, WHERE, PRICED, CODE)
    # The device of the prices repeats that of the scenario.
    named_twice = "device" in given
    kept = [each for each in found if not (named_twice and each.field == "device.name")]
    return sorted(kept, key=lambda each: order.index(each.of))


def kind_of(name: str) -> str:
    """Returns what an entry of a provenance is of."""
    own = name.rpartition(": ")[2]
    if own in ("code", "event_loop", "torch") or own.startswith("versions."):
        return CODE
    return PRICED if own.startswith(PRICES) else WHERE


def value_in_words(value: Any) -> str:
    """Returns a value as text; of a mapping or list all of it.

    >>> [value_in_words(value) for value in ([8.0, 24.0], {"kind": "poisson", "rate": 2}, None, True, "bf16")]
    ['[8, 24]', '{kind: poisson, rate: 2}', 'none', 'true', 'bf16']
    """
    if value is ABSENT:
        return NOT_GIVEN
    if value is None:
        return NONE
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(value_in_words, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {value_in_words(part)}" for key, part in value.items()) + "}"
    return recorded(value)


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same; a missing one is the same as an empty one."""
    if one is ABSENT or other is ABSENT:
        return (other if one is ABSENT else one) in (None, {}, [])
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _between(one: Any, other: Any, path: str) -> list[tuple[str, str, str]]:
    """Returns the fields that differ: dotted name and both values as text."""
    if _same(one, other):
        return []
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return [
            found
            for key in dict.fromkeys([*one, *other])
            for found in _between(
                one.get(key, ABSENT), other.get(key, ABSENT), f"{path}.{key}" if path else str(key)
            )
        ]
    if _holds_mappings(one) and _holds_mappings(other):
        return [
            found
            for at, left, right in aligned(one, other)
            for found in _between(left, right, f"{path}.{at}")
        ]
    # A list of one value is that value.
    one, other = ((each[0] if isinstance(each, list) and len(each) == 1 else each) for each in (one, other))
    return [(path, value_in_words(one), value_in_words(other))]


def _holds_mappings(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, Mapping) for each in value)


def aligned(one: Sequence[Any], other: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """Pairs the entries of two lists that are not equal: those of one `kind` in their order, the rest with
    nothing. The number is the place in the second list, or else in the first.

    >>> [(at, b) for at, a, b in aligned([{"kind": "x"}], [{"kind": "y"}, {"kind": "x"}])]
    [(0, {'kind': 'y'})]
    """
    left, right = list(enumerate(one)), list(enumerate(other))
    pairs: list[tuple[int, Any, Any]] = []
    parts: tuple[Callable[[Any], Any], ...] = (lambda value: value, _kind)
    for part in parts:
        for pair in list(left):
            partner = next((each for each in right if part(pair[1]) == part(each[1])), None)
            if partner:
                left.remove(pair)
                right.remove(partner)
                pairs.append((partner[0], pair[1], partner[1]))
    pairs += [(at, value, ABSENT) for at, value in left] + [(at, ABSENT, value) for at, value in right]
    return sorted((pair for pair in pairs if pair[1] != pair[2]), key=lambda pair: pair[0])


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, Mapping) else value
