"""The parts of scenario files: strict models, lists that multiply runs, bounded numbers, common fields.

runs of a model = product of the numbers of values in its `Many` fields and in those of the models in it
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from simcore.input.files import Name, shown

T = TypeVar("T")

# More runs than this are a slip of the hand, not a study.
MOST_RUNS = 20_000


class FieldError(ValueError):
    """A fault found by a check of several fields: the field at fault, by its path from the model that checks,
    and the fault in words."""

    def __init__(self, field: str, says: str) -> None:
        super().__init__(f"{field}: {says}")
        self.field = field
        self.says = says


# The discriminators: fields whose value says which model a mapping is.
TAGS = ("kind", "study")


def _tag_described(schema: dict[str, Any]) -> None:
    """Describes the tag of a model in a JSON schema by the docstring of the model."""
    for tag in TAGS:
        if tag in (fields := schema.get("properties", {})) and "description" in schema:
            fields[tag].setdefault("description", " ".join(schema["description"].split()))


class Strict(BaseModel):
    """A mapping of known fields with values of the right type, all finite."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,
        json_schema_extra=_tag_described,
    )


M = TypeVar("M", bound=BaseModel)


def kinds_of(union: Any, tag: str = "kind") -> dict[str, Any]:
    """The members of a union of models by the values of their discriminator."""
    return {
        value: member
        for member in get_args(union)
        for kind in [getattr(member, "__origin__", member).model_fields[tag].annotation]
        for value in (get_args(kind) if get_origin(kind) is Literal else ())
    }


# -- lists that multiply runs ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OneOrMany:
    """Marks a list of alternatives; its JSON schema also allows a single value."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        several = handler(core_schema)
        return {"anyOf": [several["items"], several]}


_MANY = _OneOrMany()


def listed(value: Any) -> list[Any]:
    """Returns the values of a field that takes one or many."""
    return list(value) if isinstance(value, list | tuple) else [value]


def distinct(values: list[T]) -> list[T]:
    """Returns the values. Raises ValueError if a value is given twice."""
    seen: dict[str, int] = {}
    for i, value in enumerate(values):
        first = seen.setdefault(repr(value), i)
        if first != i:
            what = f"[{first}] and [{i}]" if isinstance(value, BaseModel) else shown(value)
            raise ValueError(f"a value is given twice: {what}; each may be given once")
    return values


Many = Annotated[list[T], BeforeValidator(listed), Field(min_length=1), AfterValidator(distinct), _MANY]


def _is_many(field: FieldInfo) -> bool:
    alternatives = (getattr(kind, "__metadata__", ()) for kind in get_args(field.annotation))
    return _MANY in field.metadata or any(_MANY in metadata for metadata in alternatives)


def _multiplying(model: BaseModel) -> Iterator[tuple[str, Any]]:
    """The fields of a model that may multiply it, with their values: lists of alternatives and models."""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if isinstance(value, Strict) or _models(value) or (value is not None and _is_many(field)):
            yield name, value


def _models(value: Any) -> bool:
    """Whether a value is a list of models, each of which may be multiplied."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, Strict) for one in value)


def _count(value: Any) -> int:
    if isinstance(value, Strict):
        return count(value)
    return prod(map(count, value)) if _models(value) else len(value)


def count(model: BaseModel) -> int:
    """How many copies `single_valued` makes of a model."""
    return prod(_count(value) for _, value in _multiplying(model))


def _single(value: Any) -> list[Any]:
    """Returns what stands in the place of a value, in one copy after another."""
    if isinstance(value, Strict):
        return list(single_valued(value))
    if _models(value):
        return [list(chosen) for chosen in product(*map(single_valued, value))]
    return [[one] for one in value]


def single_valued(model: M) -> Iterator[M]:
    """Yields copies of a model in which every list of alternatives, also in the models in it, has one value.
    The last field varies fastest."""
    fields = dict(_multiplying(model))
    for chosen in product(*map(_single, fields.values())):
        # A field that has one value stays as it is: given, or by default.
        update = {name: one for name, one in zip(fields, chosen, strict=True) if one != fields[name]}
        yield model.model_copy(update=update)


# -- which device --------------------------------------------------------------------------------------

TIMES = "times"
MOST_FIGURE = 1e21
DEVICE_NEEDED = "a name, a path, or a mapping of base and change is needed"
FIGURE_NEEDED = (
    f"a number from 0 to {MOST_FIGURE:g}, {{{TIMES}: a factor above 0}}, or a list of either is needed"
)


@dataclass(frozen=True, slots=True)
class OneDevice:
    """The device of one run: a name or a path, and by dotted name the changed figures: a value, or
    {"times": factor}."""

    base: str
    change: Mapping[str, float | Mapping[str, float]]
    name: str | None = None


class DeviceChoice(Strict):
    """A device, or a device with changed figures."""

    base: str = Field(min_length=1, description="name of a device (`simcore devices`), or a path to its YAML")
    change: dict[str, Any] = Field(
        {},
        description="figures to change, by dotted name: a value, or {times: factor}; lists multiply the runs",
    )
    name: Name | None = Field(None, description="what the changed device is called; by default its changes")

    @model_validator(mode="after")
    def _checked(self) -> "DeviceChoice":
        given = list(_dotted(self.change, ()))
        for path, value in given:
            _check_figure(path, value)
        paths = [path for path, _ in given]
        for path in (each for each in paths if paths.count(each) > 1):
            raise FieldError(f"change.{path}", "is given twice; each figure may be given once")
        if self.name and not given:
            raise FieldError("name", f"is {self.name!r}; only a device with a change takes a name of its own")
        if self.name and len(list(self.each())) > 1:
            raise FieldError("name", f"is {self.name!r} for several devices, which lists in change make")
        return self

    def __repr__(self) -> str:
        return repr(self.model_dump())

    @model_serializer
    def _as_given(self) -> Any:
        if not self.change:
            return self.base
        change = dict(_dotted(self.change, ()))
        return {"base": self.base, "change": change, **({"name": self.name} if self.name else {})}

    def each(self) -> Iterator[OneDevice]:
        """Yields a device for each combination of the listed figures; the last figure varies fastest."""
        known = dict(_dotted(self.change, ()))
        for chosen in product(*(_alternatives(value) for value in known.values())):
            yield OneDevice(self.base, dict(zip(known, chosen, strict=True)), self.name)


def _dotted(change: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yields changes by dotted name, also for changes given as nested mappings."""
    for key, value in change.items():
        if isinstance(value, Mapping) and TIMES not in value:
            yield from _dotted(value, (*path, str(key)))
        else:
            yield ".".join((*path, str(key))), value


def _alternatives(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [{TIMES: factor} for factor in listed(value[TIMES])]
    return listed(value)


def _check_figure(path: str, value: Any) -> None:
    """Raises FieldError if a figure cannot have a value."""
    is_factor = isinstance(value, Mapping)
    bare = listed(value[TIMES] if is_factor else value)
    numbers = [one for one in bare if isinstance(one, int | float) and not isinstance(one, bool)]
    right = numbers == bare and all(isfinite(one) and 0.0 <= one <= MOST_FIGURE for one in numbers)
    if not bare or not right or (is_factor and (len(value) > 1 or 0.0 in numbers)):
        raise FieldError(f"change.{path}", f"is {shown(value)}; {FIGURE_NEEDED}")
    try:
        distinct(numbers)
    except ValueError as error:
        raise FieldError(f"change.{path}", str(error)) from None


def _device(value: Any) -> Any:
    """Turns a device given by its name alone into a mapping. Raises ValueError if the value is neither."""
    if isinstance(value, str):
        return {"base": value}
    if not isinstance(value, Mapping | DeviceChoice):
        raise ValueError(f"is {shown(value)}; {DEVICE_NEEDED}")
    return value


@dataclass(frozen=True, slots=True)
class _NameOrChange:
    """Makes a JSON schema also allow a name for a device."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        return {"anyOf": [{"type": "string"}, handler(core_schema)]}


Device = Annotated[DeviceChoice, BeforeValidator(_device), _NameOrChange()]
