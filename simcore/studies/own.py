"""A user's own strategies: `kind: module:Class` in a scenario names a class outside of simcore.

    kind = [folder/]module:Class

The module is looked for in the scenario's folder, then in the current one; `folder` is relative to these. A
kind without a folder may also be on sys.path. docs/own_strategies.md has an example.
"""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import core_schema

from simcore.input.errors import TRACEBACK, fault
from simcore.input.fields import FieldError, Strict, kinds_of, single_valued
from simcore.input.files import LONGEST_LIST, InputError, nearest, plain, shown
from simcore.studies.fields import MOST_RANKS

# Most characters of a label, which is in tables and in every warning.
LONGEST_LABEL = 100
_KIND = re.compile(r"(?:(?P<folder>.*)/)?(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")


class OwnError(InputError):
    """A user's strategy failed; the message is one line with the strategy, the error and its place."""


def is_own(kind: object) -> bool:
    """Whether a kind names a user's class."""
    return isinstance(kind, str) and ":" in kind


def name_of(kind: str) -> str:
    """Returns a kind without the folder of its module."""
    return kind.rpartition("/")[2] if is_own(kind) else kind


def located(kind: Any, folders: Sequence[Path]) -> Any:
    """Returns a kind with the first of the folders that has its module; unchanged if none has it."""
    found = _KIND.fullmatch(kind) if is_own(kind) else None
    if found is None:
        return kind
    for base in folders:
        folder = os.path.normpath(base.absolute() / (found["folder"] or ""))
        if _file(folder, found["module"]):
            return f"{folder}/{name_of(kind)}"
    return kind


def _file(folder: str, module: str) -> str | None:
    """Returns the file of a module in a folder, or None if there is none."""
    path = os.path.join(folder, *module.split("."))
    return next((file for file in (f"{path}.py", f"{path}/__init__.py") if os.path.isfile(file)), None)


def _class_of(kind: str, asked: Sequence[str], shipped: Iterable[str]) -> type[BaseModel]:
    """Returns the class that a kind names. Raises ValueError if there is none, or it lacks a name in
    `asked`."""
    allowed = f"(allowed: {', '.join(shipped)}, or module:Class of your own)"
    found = _KIND.fullmatch(kind)
    if found is None:
        raise ValueError(f"is {shown(kind)} {allowed}")
    module = _module(found["folder"], found["module"], allowed)
    cls = getattr(module, found["name"], None)
    if cls is None:
        classes = [name for name, value in vars(module).items() if _is_model(value)]
        raise ValueError(f"{module.__name__} has no {plain(found['name'])}{nearest(found['name'], classes)}")
    if not _is_model(cls):
        raise ValueError(f"{name_of(kind)} is no class of fields; one of pydantic's BaseModel is needed")
    if lacks := [name for name in asked if name not in cls.model_fields and not hasattr(cls, name)]:
        raise ValueError(f"{name_of(kind)} lacks {', '.join(lacks)}; {', '.join(asked)} are needed")
    model: type[BaseModel] = cls
    return model


def _is_model(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel) and value.__module__ != Strict.__module__


def _module(folder: str | None, name: str, allowed: str) -> Any:
    """Imports a module, from a folder if one is given. Raises ValueError if there is none, its import fails,
    or another module of this name is already imported."""
    own = _file(folder, name) if folder else None
    if own and folder and folder not in sys.path:
        # Last on the path: the folder replaces no installed module.
        sys.path.append(folder)
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(name) if own or not folder else None
    except (Exception, SystemExit) as error:
        if not isinstance(error, ModuleNotFoundError) or not f"{name}.".startswith(f"{error.name}."):
            if _in_full():
                raise
            raise ValueError(f"{plain(name)} cannot be imported: {_says(error, own)}") from None
        module = None
    if module is None:
        where = f"in {folder}" if folder else "beside the scenario, here or on sys.path"
        raise ValueError(f"no module {plain(name)} {where} {allowed}")
    file = getattr(module, "__file__", None) or "built in"
    if own and not (os.path.exists(file) and os.path.samefile(own, file)):
        raise ValueError(f"{plain(name)} is another module already ({file}); rename yours")
    return module


@dataclass(frozen=True, slots=True)
class OrOwn:
    """Marks a union of strategies, discriminated by kind, in which a user's class is allowed too. `asks`: the
    Protocol that the class must satisfy."""

    asks: type

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        shipped = [*kinds_of(source)]

        def validated(given: Any, inner: Callable[[Any], Any]) -> Any:
            kind = given.get("kind") if isinstance(given, Mapping) else None
            if not isinstance(kind, str) or not is_own(kind):
                return inner(given)
            try:
                cls = _class_of(kind, [name for name in vars(self.asks) if name[0] != "_"], shipped)
            except ValueError as error:
                raise FieldError("kind", str(error)) from None
            return _filled(cls, given)

        # A user's class is serialized by its own fields.
        any_kind = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(validated, handler(source), serialization=any_kind)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        own = {"type": "object", "required": ["kind"]}
        kind = {"type": "string", "pattern": ":", "description": "module:Class of your own"}
        return {"anyOf": [handler(core), {**own, "properties": {"kind": kind}}]}


def _filled(cls: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    """Returns a user's strategy with the given fields. Raises FieldError."""
    for field in given:
        if field not in cls.model_fields:
            raise FieldError(plain(field), f"no such field{nearest(str(field), cls.model_fields)}")
    try:
        found = cls.model_validate(dict(given))
    except ValidationError as error:
        field, _, says = fault(cls, given, error, "kind").partition(": ")
        raise FieldError(field, says) from None
    except (Exception, SystemExit) as error:
        if _in_full():
            raise
        raise FieldError("kind", _message(given["kind"], cls, error)) from None
    ranks = getattr(found, "ranks", [1])
    whole = isinstance(ranks, list) and ranks and all(type(one) is int for one in ranks)
    if not whole or not all(1 <= one <= MOST_RANKS for one in ranks):
        said = f"a list of whole numbers from 1 to {MOST_RANKS} is needed"
        raise FieldError("ranks", f"is {shown(ranks)}; {said}")
    return found


def check_labels(strategies: Iterable[tuple[int, Any]], label: Callable[[Any], str]) -> None:
    """Raises FieldError if two variants of strategies have the same label, since labels tell figures apart.
    `strategies`: each with its place in the scenario."""
    seen: dict[str, int] = {}
    for place, strategy in strategies:
        for variant in single_valued(strategy):
            name = _label(variant, label, place)
            if name in seen:
                says = f"is called {name!r}, as strategies[{seen[name]}] is; each label may be given once"
                raise FieldError(f"strategies[{place}]", says)
            seen[name] = place


def _label(variant: Any, label: Callable[[Any], str], place: int) -> str:
    field = f"strategies[{place}].kind"
    try:
        name, again = variant.label(), variant.label()
    except (Exception, SystemExit) as error:
        if not is_own(variant.kind) or _in_full():
            raise
        raise FieldError(field, _message(variant.kind, type(variant), error)) from None
    text = isinstance(name, str) and name.isprintable() and name.strip()
    if not text or name != again or (is_own(variant.kind) and len(name) > LONGEST_LABEL):
        says = f"has the label {shown(name)}; a line of up to {LONGEST_LABEL} characters is needed"
        raise FieldError(field, f"{name_of(variant.kind)} {says}, the same at each call")
    return label(variant)


@contextmanager
def blamed(strategy: Any, strategies: Sequence[Any]) -> Iterator[None]:
    """Raises OwnError with the strategy's name for any error in the block, a broken law too, if the strategy
    is a user's own. Other errors, and each InputError, pass through."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        if strategy is None or not is_own(strategy.kind) or _in_full():
            raise
        place = next((i for i, one in enumerate(strategies) if strategy in single_valued(one)), 0)
        message = _message(strategy.kind, type(strategy), error)
        raise OwnError(f"strategies[{place}].kind: {message}") from error


def _in_full() -> bool:
    return bool(os.environ.get(TRACEBACK))


def _message(kind: str, cls: type, error: BaseException) -> str:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return f"{name_of(kind)}: {_says(error, file)}"


def _says(error: BaseException, file: str | None) -> str:
    """Returns an error in words, with the last line of `file` in its traceback."""
    try:
        says = f"{type(error).__name__}: {plain(error, LONGEST_LIST)}"
    except Exception:
        says = type(error).__name__
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f"{says} ({Path(file).name}, line {lines[-1]})" if file and lines else says
