"""Scenarios: reads a YAML file into a Scenario, or raises an error of one line.

A field means the same in every study. A list in a field multiplies the runs:

    runs = product over fields of the number of values given

Names (device, profile, model, published data) are resolved by simcore.assembly, not here.
"""

import copy
import os.path
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from simcore.input.errors import parsed
from simcore.input.files import InputError, is_path, parse_yaml, plain, read_yaml, shown
from simcore.studies.decode.scenario import DecodeScenario
from simcore.studies.operators.scenario import (
    DecodeAttentionScenario,
    LinearAttentionScenario,
    PromptScenario,
)
from simcore.studies.own import located
from simcore.studies.serving.scenario import ServingScenario
from simcore.studies.tiling.scenario import TilingScenario

CPU = "cpu"
Scenario = (
    DecodeScenario
    | ServingScenario
    | TilingScenario
    | LinearAttentionScenario
    | DecodeAttentionScenario
    | PromptScenario
)
_BY_STUDY = Annotated[Scenario, Field(discriminator="study")]


def field_names() -> list[str]:
    """Returns the fields of scenarios of all studies."""
    return list(dict.fromkeys(name for study in get_args(Scenario) for name in study.model_fields))


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a scenario file, for editors."""
    schema = TypeAdapter(_BY_STUDY).json_schema()
    meanings: dict[str, dict[str, list[str]]] = {}
    for study in get_args(Scenario):
        (name,) = get_args(study.model_fields["study"].annotation)
        for field, about in schema["$defs"][study.__name__]["properties"].items():
            meanings.setdefault(field, {}).setdefault(about["description"], []).append(name)
    # The fields stand at the top level too: else an editor reports a misspelt field as a file of no study.
    known = {}
    for field, texts in meanings.items():
        descriptions = [
            text if len(of) == len(get_args(Scenario)) else f"{text} (study {' or '.join(of)})"
            for text, of in texts.items()
        ]
        known[field] = {"description": "; ".join(descriptions)}
    return {**schema, "type": "object", "properties": known, "additionalProperties": False}


def load_scenario(
    path: Path, settings: Sequence[str] = (), *, on: str = "sim", typed: Path | None = None
) -> Scenario:
    """Reads a scenario file; see `scenario_of`. Its paths are relative to its folder, else to the current
    one. `typed`: the file as the user named it, if not by its path. Raises InputError."""
    document = read_yaml(path)
    if not isinstance(document, dict):
        raise InputError(f"{path}: holds no scenario: a mapping of fields is needed")
    check_no_plan(document, str(path), shlex.quote(str(typed or path)))
    return scenario_of(document, str(path), path.absolute().parent, settings, on=on)


def check_no_plan(document: Mapping[str, Any], where: str, file: str) -> None:
    """Raises InputError if a document is a plan. `file`: its file, as the command line would take it."""
    if not document.keys().isdisjoint({"base", "bases"}) and "study" not in document:
        raise InputError(f"{where}: is a plan, which `plan` answers: python -m simcore plan {file}")


def scenario_of_point(
    folder: Path, number: int, settings: Sequence[str] = (), *, on: str = "sim"
) -> Scenario:
    """Returns the scenario of a point of a plan, by its number in the plan's run directory. Raises
    InputError."""
    path = folder / "scenarios.json"
    if not path.is_file():
        raise InputError(f"{folder}: is no run directory of a plan with points that can run: no {path.name}")
    documents = read_yaml(path)
    count = len(documents) if isinstance(documents, list) else 0
    if not 1 <= number <= count:
        raise InputError(f"--point {number}: no such point (1 to {count:,})")
    return scenario_of(documents[number - 1], f"{path}: point {number}", folder, settings, on=on)


def scenario_of(
    document: dict[str, Any], where: str, folder: Path, settings: Sequence[str] = (), *, on: str = "sim"
) -> Scenario:
    """Returns a scenario from its content, which is changed in place. `where`: its name in messages;
    `folder`: its paths are relative to it. `settings` are KEY=VALUE, each a dotted path and a YAML value;
    `on` is the machine of the run: on the CPU the fields under `on_cpu` replace others.

    Raises InputError with one line: where, field, allowed values, the nearest name.
    """
    _check_on_cpu(document, where, folder)
    if on == CPU:
        _move_to_cpu(document, where)
        if any(setting.startswith("on_cpu") for setting in settings):
            raise InputError(f"--set on_cpu: with --on {CPU} its fields are set by their own names")
    for setting in settings:
        set_field(document, setting)
    if any(setting.startswith("on_cpu") for setting in settings):
        _check_on_cpu(document, where, folder)
    if on == CPU and document.get("fleets"):
        raise InputError(f"{where}: fleets: are simulated; a real machine, as --on cpu names it, runs none")
    if on == CPU and document.get("device") != CPU:
        raise InputError(
            f"{where}: device: is {shown(document.get('device'))}; --on cpu runs on device: cpu"
            " (say so under on_cpu, with a model small enough, or give --set device=cpu)"
        )
    return parse_scenario(_with_paths(document, folder), where)


def parse_scenario(document: Mapping[str, Any], where: str) -> Scenario:
    """Returns a scenario from the content of a file. Raises InputError."""
    scenario: Scenario = parsed(_BY_STUDY, document, where)
    return scenario


# Fields that may hold a name or a path, and the ending of a path; a field `path` always holds a path.
_PATHS: Mapping[str, str] = {"device": ".yaml", "profile": ".yaml", "model": ".json", "published": ".csv"}


def _with_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the document with all its paths absolute."""
    found = {
        key: _absolute(document[key], folder, ending) for key, ending in _PATHS.items() if key in document
    }
    workload = document.get("workload")
    if isinstance(workload, dict):
        found["workload"] = _with_inner_paths(workload, folder)
        tenants = workload.get("tenants")
        if isinstance(tenants, list):
            found["workload"]["tenants"] = [_with_inner_paths(one, folder) for one in tenants]
    fleets = document.get("fleets")
    if isinstance(fleets, list):
        found["fleets"] = [
            [_group(one, folder) for one in fleet] if isinstance(fleet, list) else fleet for fleet in fleets
        ]
    strategies = document.get("strategies")
    if isinstance(strategies, list):
        found["strategies"] = [_of_strategy(strategy, folder) for strategy in strategies]
    return {**document, **found}


def _group(given: Any, folder: Path) -> Any:
    """Returns a group of servers of a fleet with all its paths absolute."""
    if not isinstance(given, dict):
        return given
    paths = {key: _absolute(given[key], folder, _PATHS[key]) for key in ("device", "profile") if key in given}
    return {**given, **paths}


def _with_inner_paths(given: Any, folder: Path) -> Any:
    """Returns a mapping with the paths in its values absolute."""
    if not isinstance(given, dict):
        return given
    return {key: _with_path(value, folder) for key, value in given.items()}


def _of_strategy(strategy: Any, folder: Path) -> Any:
    """Returns a strategy with the path of its engine absolute; if its kind is a user's class, with the folder
    of the module in it."""
    if not isinstance(strategy, dict):
        return strategy
    found = {}
    if "kind" in strategy:
        found["kind"] = located(strategy["kind"], (folder, Path()))
    if "engine" in strategy:
        found["engine"] = _absolute(strategy["engine"], folder, ".yaml")
    return {**strategy, **found}


def _with_path(value: Any, folder: Path) -> Any:
    if not isinstance(value, dict) or not value.get("path"):
        return value
    return {**value, "path": _absolute(value["path"], folder, "")}


def _absolute(name: Any, folder: Path, ending: str) -> Any:
    """Makes a path absolute: relative to the scenario's folder, or to the current one if it exists only
    there."""
    if isinstance(name, list):
        return [_absolute(each, folder, ending) for each in name]
    if isinstance(name, dict) and "base" in name:
        return {**name, "base": _absolute(name["base"], folder, ending)}
    if not isinstance(name, str) or not is_path(name, ending):
        return name
    beside = folder / name
    # If it is in neither place, the error names the first.
    here = os.path.exists(name) and not os.path.exists(beside)
    return str((Path(name) if here else beside).absolute())


def _check_on_cpu(document: dict[str, Any], where: str, folder: Path) -> None:
    """Raises InputError if the scenario is invalid without `on_cpu`, or with its fields in place."""
    if not document.get("on_cpu"):
        return
    # Errors outside `on_cpu` are reported first.
    parse_scenario(_with_paths({**document, "on_cpu": {}}, folder), where)
    moved = copy.deepcopy(document)
    _move_to_cpu(moved, where)
    parse_scenario(_with_paths(moved, folder), f"{where}: on_cpu")


def _move_to_cpu(document: dict[str, Any], where: str) -> None:
    """Replaces fields by those under `on_cpu`, in place."""
    instead = document.pop("on_cpu", {})
    if not isinstance(instead, dict):
        raise InputError(
            f"{where}: on_cpu: is {shown(instead)}; a mapping of dotted paths to values is needed"
        )
    for key, value in instead.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise InputError(
                f"{where}: on_cpu: {shown(key)} is no path of a field, such as workload.requests"
            )
        put(document, key, value, f"{where}: on_cpu: {key}")


# A place of a list in brackets: strategies[1].ranks.
PLACE = re.compile(r"\[(\d+)\]")


def set_field(document: dict[str, Any], setting: str) -> None:
    """Sets a field by KEY=VALUE as with --set, in place. Raises InputError."""
    key, equals, text = setting.partition("=")
    option = f"--set {plain(setting)}"
    if not equals or not all(PLACE.sub(r".\1", key).split(".")):
        raise InputError(f"{option}: KEY=VALUE is needed, such as --set seed=2")
    put(document, key, parse_yaml(text, option), option)


def put(document: dict[str, Any], key: str, value: Any, setting: str) -> None:
    """Sets a field by its path, in place: with dots, or places of lists in brackets, as messages have them.
    `setting`: what messages begin with. Raises InputError."""
    place: Any = document
    *path, last = PLACE.sub(r".\1", key).split(".")
    if path[:1] == ["device"]:
        _open_device(document, path[1:2])
    for part in path:
        place = _inside(place, part, setting)
    if isinstance(place, list):
        _inside(place, last, setting)
        place[int(last)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise InputError(f"{setting}: {key} leads into a value, not into a field")


def _open_device(document: dict[str, Any], number: list[str]) -> None:
    """Turns a device given only by name into a mapping, so that its figures can be changed."""
    known = document.get("device")
    if isinstance(known, str):
        document["device"] = {"base": known}
    elif isinstance(known, list) and number and number[0].isdecimal() and int(number[0]) < len(known):
        each = known[int(number[0])]
        known[int(number[0])] = {"base": each} if isinstance(each, str) else each


def _inside(place: Any, part: str, setting: str) -> Any:
    if isinstance(place, list):
        if part.isdecimal() and int(part) < len(place):
            return place[int(part)]
        raise InputError(f"{setting}: {part} is no place in a list of {len(place)} (counted from 0)")
    if isinstance(place, dict):
        return place.setdefault(part, {})
    raise InputError(f"{setting}: {part} leads into a value, not into a field")


def resolved(scenario: Scenario) -> dict[str, Any]:
    """Returns a scenario with every default written out, as the run directory has it."""
    return scenario.model_dump(mode="json")
