"""The fault of a scenario in one line that names the field as its user wrote it.

    field.path[0].name: is X; what is allowed

The models' annotations give the allowed values: this file follows them, and the document beside them, along
the location that pydantic gives. It knows no study.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from simcore.input.fields import FieldError, kinds_of
from simcore.input.files import InputError, adapter, listed, missing, nearest, plain, shown, worst

# The environment variable that makes errors in simcore or in a user's strategy show a traceback.
TRACEBACK = "SIMCORE_TRACEBACK"


class FieldFaultError(InputError):
    """A fault of a document's content. `path`: of the value that is at fault, as the message has it; empty if
    values do not fit together. `unknown`: there is no such field."""

    path: str = ""
    unknown: bool = False

    def at(self, path: str, *, unknown: bool) -> "FieldFaultError":
        """Returns itself as a fault of a path."""
        self.path, self.unknown = path, unknown
        return self


@dataclass(frozen=True, slots=True)
class _Place:
    """A place in a document: its path, its value, and the annotation of the allowed values."""

    path: str
    given: Any
    kind: Any

    def inside(self, name: str) -> str:
        """The path of field `name` at this place."""
        text = plain(name) if name.isprintable() else shown(name)
        return f"{self.path}.{text}" if self.path else text


def fault(kind: Any, document: Any, error: ValidationError, whole: str = "scenario") -> str:
    """The line for the first fault of a document that should be a `kind`: a pydantic model, or a union of
    models with a discriminator. `whole`: the name in the line if no field is at fault."""
    first = worst(error)
    place = _walked(kind, document, first["loc"])
    name, context = first["type"], first.get("ctx", {})
    if name == "extra_forbidden":
        fields = _fields(_walked(kind, document, first["loc"][:-1]).kind)
        return f"{place.path}: no such field{nearest(str(first['loc'][-1]), fields)}"
    if name in ("union_tag_not_found", "union_tag_invalid"):
        return _untagged(place, context["discriminator"].strip("'"))
    if name == "value_error" and isinstance(context["error"], FieldError):
        return f"{place.inside(context['error'].field)}: {context['error'].says}"
    if name == "missing":
        return _missing(kind, document, error)
    return f"{place.path or whole}: {_says(first, place, context)}"


def parsed(kind: Any, document: Mapping[Any, Any], where: str, whole: str = "scenario") -> Any:
    """Returns the content of a file as its model. `where`: its name in messages; `whole`: what it is. Raises
    InputError with one line."""
    for key in document:
        if not isinstance(key, str):
            raise InputError(f"{where}: {shown(key)} is no field: a field is a word")
    try:
        return adapter(kind).validate_python(dict(document))
    except ValidationError as error:
        first = worst(error)
        found = FieldFaultError(f"{where}: {fault(kind, document, error, whole)}")
        path = _walked(kind, document, first["loc"]).path
        raise found.at(path, unknown=first["type"] == "extra_forbidden") from None


def _missing(kind: Any, document: Any, error: ValidationError) -> str:
    """The line for all missing fields."""
    paths = dict.fromkeys(_walked(kind, document, location).path for location in missing(error))
    return f"{listed(paths)}: {'are' if len(paths) > 1 else 'is'} missing"


def _says(first: Mapping[str, Any], place: _Place, context: Mapping[str, Any]) -> str:
    """The fault of one value, in words."""
    name, given = first["type"], first["input"]
    if name == "value_error":
        return str(context["error"])
    if name == "literal_error":
        allowed = re.findall(r"'([^']*)'", str(context["expected"]))
        if first["loc"][-1] == "[key]":
            return f"no such field{nearest(str(given), allowed)}"
        return f"is {shown(given)}{nearest(str(given), allowed)}"
    if name == "int_type" and isinstance(given, float) and given.is_integer() and abs(given) < _WRITTEN_OUT:
        # YAML reads 1e3 and 1000.0 alike.
        return f"is {shown(given)}; a whole number is needed: {given:.0f}"
    if name == "model_attributes_type" and (kinds := _tagged(place.kind)):
        _, tag = _parts(place.kind)
        return f"is {shown(given)}; {_MAPPING}, with {tag}: {listed(kinds)}"
    within = _range(place.kind) if name in _BEYOND else ""
    message = _WORDS.get(name) or within or first["msg"][0].lower() + first["msg"][1:]
    return f"is {shown(given)}; {message.replace('input should', 'it should')}"


# A whole number below this is written without a point.
_WRITTEN_OUT = 1e15
_MAPPING = "a mapping of fields is needed"
_WORDS: Mapping[str, str] = {
    "too_short": "at least one value is needed",
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "dict_type": _MAPPING,
    "invalid_key": "a field is a word",
    "list_type": "a list is needed",
    "tuple_type": "a list is needed",
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "bool_type": "true or false is needed",
    "string_type": "text is needed",
    "string_too_short": "text is needed",
    "finite_number": "a finite number is needed",
    "string_pattern_mismatch": "letters, digits, '.', '_' and '-' are allowed, a letter or digit first",
}


_BEYOND = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def _range(kind: Any) -> str:
    """Which numbers an annotation allows, in words; empty if their range has but one end."""
    ends = {name: getattr(each, name) for each in _metadata(kind) for name in _ENDS if hasattr(each, name)}
    low, high = (next((name for name in names if name in ends), None) for names in (_ENDS[:2], _ENDS[2:]))
    if low is None or high is None:
        return ""
    return f"{_ENDS_SAID[low]}{_number(ends[low])} to {_ENDS_SAID[high]}{_number(ends[high])} is allowed"


_ENDS = ("ge", "gt", "le", "lt")
_ENDS_SAID = {"ge": "", "gt": "above ", "le": "", "lt": "below "}


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _metadata(kind: Any) -> list[Any]:
    """What an annotation says of its values, without None."""
    found = list[Any]()
    while True:
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            found += [
                each for one in more for each in (one.metadata if isinstance(one, FieldInfo) else [one])
            ]
        elif (rest := _without_none(kind)) is not kind:
            kind = rest
        else:
            return found


def _untagged(place: _Place, tag: str) -> str:
    """The line for a mapping whose discriminator `tag` is missing or unknown."""
    allowed = list(_tagged(place.kind))
    given = place.given if isinstance(place.given, Mapping) else {}
    field = place.inside(tag)
    if tag in given:
        return f"{field}: is {shown(given[tag])}{nearest(str(given[tag]), allowed)}"
    near = difflib.get_close_matches(tag, [key for key in given if isinstance(key, str)], n=1, cutoff=0.6)
    if near:
        return f"{place.inside(near[0])}: no such field; did you mean {tag!r}?"
    return f"{field}: is missing (allowed: {listed(allowed)})"


# -- annotations and document, side by side ----------------------------------------------------------


def _walked(kind: Any, document: Any, location: Sequence[int | str]) -> _Place:
    place = _Place("", document, kind)
    for part in location:
        place = _step(place, part)
    return place


def _step(place: _Place, part: int | str) -> _Place:
    """The place to which a part of a pydantic location leads. The document has neither the tag of a union nor
    the index of a single value given instead of a list."""
    tagged = _tagged(place.kind)
    if part in tagged:
        return _Place(place.path, place.given, tagged[str(part)])
    if part == "[key]":
        return place
    kind, given = _bare(place.kind), place.given
    if get_origin(kind) is list and isinstance(part, int):
        item = get_args(kind)[0]
        if isinstance(given, list | tuple):
            return _Place(f"{place.path}[{part}]", given[part], item)
        return _Place(place.path, given, item)
    inner = given.get(part) if isinstance(given, Mapping) else None
    return _Place(place.inside(str(part)), inner, _field(kind, str(part)))


def _field(kind: Any, name: str) -> Any:
    """The annotation of a field of a model, or of the values of a mapping."""
    if _is_model(kind) and name in kind.model_fields:
        info = kind.model_fields[name]
        # The discriminator of a union may be in the field instead of in its annotation.
        return Annotated[info.annotation, info]
    return get_args(kind)[1] if get_origin(kind) is dict else Any


def _fields(kind: Any) -> list[str]:
    """The names of the fields of a model; none for anything else."""
    bare = _bare(kind)
    return list(bare.model_fields) if _is_model(bare) else []


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _parts(kind: Any) -> tuple[Any, str | None]:
    """An annotation without its metadata and without None, and its discriminator, if any."""
    tag = None
    while True:
        if get_origin(kind) is Annotated:
            kind, *metadata = get_args(kind)
            found = [m.discriminator for m in metadata if isinstance(m, FieldInfo) and m.discriminator]
            tag = str(found[0]) if found else tag
        elif (rest := _without_none(kind)) is not kind:
            kind = rest
        else:
            return kind, tag


def _without_none(kind: Any) -> Any:
    if get_origin(kind) in (Union, UnionType) and type(None) in get_args(kind):
        return Union[tuple(arg for arg in get_args(kind) if arg is not type(None))]  # noqa: UP007
    return kind


def _bare(kind: Any) -> Any:
    return _parts(kind)[0]


def _tagged(kind: Any) -> dict[str, Any]:
    """The members of a union by the value of its discriminator; none for anything else."""
    bare, tag = _parts(kind)
    return {} if tag is None else kinds_of(bare, tag)
