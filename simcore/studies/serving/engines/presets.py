"""Presets of serving engines: they fill in the fields that a strategy with an engine leaves out.

    field of a strategy = the scenario's, else that of the preset's first case that holds on the device, else
                          the preset's own

A preset is a file of `catalog/`, named after the engine and its version; the engine's name alone means the
newest version there. A path means a file of one's own: a preset with a `base` in the catalogue, and those
fields that differ, such as the host time of a service (`simcore calibrate --from` writes one).
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic.dataclasses import dataclass

from simcore.input.errors import fault
from simcore.input.fields import FieldError
from simcore.input.files import STRICT, InputError, Name, is_path, read_yaml, unknown_name, validated
from simcore.studies.own import check_labels
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.serving.strategies import ContinuousBatching, label

ENGINES = Path(__file__).resolve().parent / "catalog"
GIB = 2.0**30
# Fields that a preset must give: the engine's own decisions. The strategy's other fields stay.
DECIDED = (
    "token_budget",
    "max_sequences",
    "block_tokens",
    "order",
    "prefill",
    "ahead",
    "prefix_caching",
    "reserve",
    "preempted",
    "memory",
)
# Fields that a preset may give: they are no decision of an engine, but belong to a version on some machine.
MEASURED = ("host",)
# Fields that are merged field by field.
NESTED = ("memory", *MEASURED)


@dataclass(frozen=True, config=STRICT)
class Case:
    """Fields that are different on devices of at least `memory_gib[0]` and less than `memory_gib[1]` GiB,
    whose names contain none of `except_devices`."""

    memory_gib: tuple[float, float]
    fields: dict[str, Any]
    except_devices: tuple[str, ...] = ()

    def holds(self, device: str, memory_bytes: float) -> bool:
        """Whether the case holds for a device of this name and memory."""
        low, high = self.memory_gib
        return low <= memory_bytes / GIB < high and not any(name in device for name in self.except_devices)


@dataclass(frozen=True, config=STRICT)
class Engine:
    """One version of an engine: `fields` of continuous_batching, `cases` of devices where some differ,
    and where each field comes from (`sources`). `base`: the preset whose fields stand where these have none;
    `engine`: that of the base, if there is one."""

    name: Name
    description: str
    fields: dict[str, Any]
    sources: dict[str, str]
    engine: Name | None = None
    cases: tuple[Case, ...] = ()
    base: Name | None = None

    def __post_init__(self) -> None:
        every = (self.fields, *(case.fields for case in self.cases))
        for name in (name for fields in every for name in fields):
            if name not in (*DECIDED, *MEASURED):
                raise InputError(f"fields: {unknown_name('field', name, (*DECIDED, *MEASURED))}")
        for name in [*self.fields] if self.base else DECIDED:
            if name not in self.fields:
                raise InputError(f"missing key 'fields.{name}'")
            if name not in self.sources:
                raise InputError(f"missing key 'sources.{name}'")
        for fields in every:
            try:
                _strategy(fields)
            except ValidationError as error:
                raise InputError(f"fields.{fault(ContinuousBatching, _document(fields), error)}") from None

    def on(self, device: str, memory_bytes: float) -> dict[str, Any]:
        """Returns the fields on a device of this name and memory."""
        case = next((case for case in self.cases if case.holds(device, memory_bytes)), None)
        return _over(self.fields, case.fields) if case else self.fields

    @property
    def anywhere(self) -> Iterator[ContinuousBatching]:
        """The strategies of this engine on all devices."""
        yield _strategy(self.fields)
        for case in self.cases:
            yield _strategy(_over(self.fields, case.fields))


def described(engine: Engine) -> Iterator[str]:
    """Yields the lines that show an engine in full: its fields, each with its source, and on which devices
    some differ."""
    yield f"{engine.name}: {engine.description}"
    for name, value in engine.fields.items():
        yield f"{name}: {_flow(value)}"
        yield from textwrap.wrap(
            engine.sources.get(name, ""), 100, initial_indent="    ", subsequent_indent="    "
        )
    for case in engine.cases:
        low, high = case.memory_gib
        but = f" but {', '.join(case.except_devices)}" if case.except_devices else ""
        yield f"on devices of {low:g} to {high:g} GiB{but}: {_flow(case.fields)}"


def _flow(value: Any) -> str:
    """Returns a value as YAML has it on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def engine_names() -> list[str]:
    """Returns the names of the presets, by engine, the oldest version first."""
    return sorted((path.stem for path in ENGINES.glob("*.yaml")), key=_by_version)


def _by_version(name: str) -> tuple[str, tuple[int, ...]]:
    engine, _, version = name.rpartition("-")
    return engine, tuple(map(int, re.findall(r"\d+", version)))


def load_engine(name: str) -> Engine:
    """Returns the preset of this name, the newest if it has no version, or that in a file of one's own, with
    its base's fields. Raises InputError if none exists."""
    return _of_file(Path(name)) if is_path(name, ".yaml") else _shipped(name)


def preset_of(name: str) -> str:
    """Returns the name of the preset that an engine's name, or a file of one's own, stands for. Raises
    InputError."""
    found = load_engine(name)
    return found.base or found.name


def own_of(name: str) -> Engine | None:
    """Returns what a file of one's own says by itself; None for the name of a preset. Raises InputError."""
    return _read_own(Path(name)) if is_path(name, ".yaml") else None


def _read_own(path: Path) -> Engine:
    """Reads a file of one's own, once unless it changes: a plan asks for it at each of its points."""
    try:
        there = path.stat()
    except OSError:
        # The reader says what is wrong.
        return _own_at(path, path.absolute(), 0, 0)
    return _own_at(path, path.absolute(), there.st_mtime_ns, there.st_size)


@lru_cache(maxsize=64)
def _own_at(path: Path, whole: Path, changed_ns: int, size: int) -> Engine:
    """Reads a file; the other arguments tell one state of it from another."""
    del whole, changed_ns, size
    document = read_yaml(path)
    if isinstance(document, dict) and document.get("base") is None:
        raise InputError(f"{path}: base: is missing; one of {', '.join(engine_names())} is needed")
    own = validated(Engine, document, str(path))
    if own.cases:
        raise InputError(f"{path}: cases: only presets have them; give fields")
    return own


def _of_file(path: Path) -> Engine:
    own = _read_own(path)
    assert own.base is not None
    try:
        base = _shipped(own.base)
    except InputError as error:
        raise InputError(f"{path}: base: {error}") from None
    return replace(
        own,
        engine=base.engine,
        base=base.name,
        fields=_over(base.fields, own.fields),
        cases=tuple(replace(case, fields=_over(case.fields, own.fields)) for case in base.cases),
        sources={**base.sources, **own.sources},
    )


@cache
def _shipped(name: str) -> Engine:
    names = engine_names()
    versions = [each for each in names if each == name or each.rpartition("-")[0] == name]
    if not versions:
        engines = dict.fromkeys(each.rpartition("-")[0] for each in names)
        raise InputError(unknown_name("engine", name, [*engines, *names]))
    path = ENGINES / f"{versions[-1]}.yaml"
    found = validated(Engine, read_yaml(path), str(path))
    if found.name != path.stem:
        raise InputError(f"{path}: name: is {found.name!r}; the file's name is needed")
    return found


def with_engines(scenario: ServingScenario, device: str, memory_bytes: float) -> ServingScenario:
    """Returns the scenario with every field of its engines written out, for a device of this name and memory.

    Raises InputError if an engine is unknown, or two strategies become the same.
    """
    strategies = list(scenario.strategies)
    for place, strategy in enumerate(strategies):
        if isinstance(strategy, ContinuousBatching) and strategy.engine is not None:
            try:
                strategies[place] = _filled(strategy, load_engine(strategy.engine).on(device, memory_bytes))
            except InputError as error:
                raise InputError(f"strategies[{place}].engine: {error}") from None
    if strategies == scenario.strategies:
        return scenario
    found = scenario.model_copy(update={"strategies": strategies})
    try:
        check_labels(enumerate(strategies), label)
    except FieldError as error:
        raise InputError(str(error)) from None
    return found


def pinned(scenario: ServingScenario) -> ServingScenario:
    """Returns the scenario with the version of each of its engines; fields stay open, since they may differ
    between devices. Raises InputError if an engine is unknown."""
    strategies = [
        strategy.model_copy(update={"engine": _pinned_name(strategy.engine)})
        if isinstance(strategy, ContinuousBatching) and strategy.engine
        else strategy
        for strategy in scenario.strategies
    ]
    return scenario.model_copy(update={"strategies": strategies})


def _pinned_name(engine: str) -> str:
    """Returns the name of an engine with its version; a path stays."""
    return engine if is_path(engine, ".yaml") else load_engine(engine).name


def usual(strategy: ContinuousBatching) -> list[ContinuousBatching]:
    """Returns the strategies that show what is unusual about this one: its engine's presets on all devices,
    or the defaults if it has no engine."""
    return list(load_engine(strategy.engine).anywhere) if strategy.engine else [_strategy({})]


def _filled(strategy: ContinuousBatching, fields: Mapping[str, Any]) -> ContinuousBatching:
    assert strategy.engine is not None
    given = {name: getattr(strategy, name) for name in strategy.model_fields_set}
    given |= {name: getattr(strategy, name).model_dump(exclude_unset=True) for name in NESTED}
    plain = _strategy({}).model_dump()
    name = _pinned_name(strategy.engine)
    # A user's class may be a subclass.
    return type(strategy).model_validate({**plain, **_over(fields, given), "engine": name})


def _over(fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `fields` replaced by the given ones; those of NESTED are merged field by field."""
    nested = {
        name: {**fields.get(name, {}), **given.get(name, {})}
        for name in NESTED
        if name in fields or name in given
    }
    return {**fields, **given, **nested}


def _strategy(fields: Mapping[str, Any]) -> ContinuousBatching:
    return ContinuousBatching.model_validate(_document(fields))


def _document(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": "continuous_batching", **fields}
