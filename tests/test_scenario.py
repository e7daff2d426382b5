"""Scenario files: what is accepted, what is refused, and that a refusal says where and what is allowed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from simcore.devices.fitted import profile_schema
from simcore.devices.spec import json_schema as device_schema
from simcore.input.files import InputError, parse_yaml
from simcore.planning.schema import plan_schema
from simcore.planning.whatif import load_plan
from simcore.scenario import json_schema, load_scenario, parse_scenario, resolved
from simcore.studies.decode.scenario import variants
from simcore.studies.tiling.strategies import Lazy
from tests.thorough import slow

ROOT = Path(__file__).resolve().parent.parent
GOOD: dict[str, Any] = {
    "name": "x",
    "study": "decode",
    "device": "h100-sxm",
    "model": "llama-3.1-8b",
    "context_tokens": 1024,
    "strategies": [
        {"kind": "tensor_parallel", "ranks": [1, 2]},
        {"kind": "alspec", "ranks": 2, "hits": {"kind": "rate", "value": 0.5}},
    ],
}

KNOWN = "(allowed: decode, serving, tiling, linear_attention, decode_attention, prompt)"


def changed(path: str, value: Any) -> dict[str, Any]:
    document: Any = yaml.safe_load(yaml.safe_dump(GOOD))
    place = document
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part) if part.isdecimal() else part]
    place[int(last) if last.isdecimal() else last] = value
    return dict(document)


@slow
def test_every_scenario_that_comes_with_the_project_is_accepted() -> None:
    files = list((ROOT / "scenarios").rglob("*.yaml"))
    plans = [file for file in files if "study" not in yaml.safe_load(file.read_text())]
    assert len(files) - len(plans) >= 4
    for file in files:
        if file in plans:
            load_plan(file)
        else:
            load_scenario(file)


def test_a_single_value_is_a_list_of_one() -> None:
    scenario = parse_scenario(GOOD, "x.yaml")
    assert scenario.context_tokens == [1024]
    assert [tuple(variants(s)) for s in scenario.strategies] == [
        (("tensor_parallel", 1, 1), ("tensor_parallel", 2, 1)),
        (("alspec", 2, 2),),
    ]


def test_the_resolved_scenario_is_a_scenario_again() -> None:
    scenario = parse_scenario(GOOD, "x.yaml")
    text = yaml.safe_dump(resolved(scenario))
    assert parse_scenario(yaml.safe_load(text), "again") == scenario


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (
            "study",
            "serve",
            f"study: is 'serve'; did you mean 'serving'? {KNOWN}",
        ),
        ("batches", 2, "batches: no such field; did you mean 'batch'?"),
        ("strategies.0.rank", 2, "strategies[0].rank: no such field; did you mean 'ranks'?"),
        ("strategies.1.hits.rate", 2, "strategies[1].hits.rate: no such field"),
        ("strategies.0.kind", "tensor_paralel", "did you mean 'tensor_parallel'?"),
        ("strategies.1.hits.kind", "rates", "strategies[1].hits.kind: is 'rates'; did you mean 'rate'?"),
        ("strategies.1.hits.value", 1.5, "strategies[1].hits.value: is 1.5"),
        ("strategies.1.hits.value", -0.5, "strategies[1].hits.value: is -0.5"),
        ("strategies.1.hits.value", math.nan, "strategies[1].hits.value: is nan"),
        ("strategies.1.hits.draw", "flor", "strategies[1].hits.draw: is 'flor'; did you mean 'floor'?"),
        ("strategies.0.ranks", 0, "strategies[0].ranks: is 0"),
        ("strategies.0.ranks", [1, 0], "strategies[0].ranks[1]: is 0"),
        ("strategies.0.ranks", [2, 2], "strategies[0].ranks: a value is given twice: 2"),
        ("strategies.0.ranks", [], "strategies[0].ranks: is []"),
        ("strategies", [], "strategies: is []"),
        ("context_tokens", 0, "context_tokens: is 0"),
        ("context_tokens", 10**12, "context_tokens: is 1000000000000"),
        ("context_tokens", "1K", "context_tokens: is '1K'"),
        ("context_tokens", 1.5, "context_tokens: is 1.5"),
        ("batch", True, "batch: is True"),
        ("tokens", -1, "tokens: is -1"),
        ("seed", -1, "seed: is -1"),
        ("dtype", "bf61", "dtype: unknown dtype 'bf61'; did you mean 'bf16'?"),
        ("dtypes", {"qkv": "fp9"}, "dtypes.qkv: unknown dtype 'fp9'; did you mean 'fp8'?"),
        ("dtypes", {"qvk": "fp8"}, "dtypes.qvk: no such matrix; did you mean 'qkv'?"),
        ("name", "../escape", "name: is '../escape'"),
        ("crossover", ["contexts"], "crossover[0]: is 'contexts'; did you mean 'context_tokens'?"),
        ("overheads", {"launch": 1}, "overheads.launch: no such field; did you mean 'launch_s'?"),
        ("overheads", {"launch_s": math.inf}, "overheads.launch_s: is inf"),
        ("device", None, "device: is None"),
    ],
)
def test_a_fault_is_one_line_with_field_and_allowed_values(path: str, value: Any, says: str) -> None:
    with pytest.raises(InputError) as raised:
        parse_scenario(changed(path, value), "x.yaml")
    line = str(raised.value)
    assert line.startswith("x.yaml: ")
    assert says in line
    assert "\n" not in line


def test_missing_fields_are_named() -> None:
    for field in ("device", "model", "strategies", "context_tokens", "name"):
        document = {key: value for key, value in GOOD.items() if key != field}
        with pytest.raises(InputError, match=f"{field}: is missing"):
            parse_scenario(document, "x.yaml")


def test_a_misspelt_required_field_is_told_of_as_such() -> None:
    document = {key: value for key, value in GOOD.items() if key != "context_tokens"}
    with pytest.raises(InputError, match="contxt_tokens: no such field; did you mean 'context_tokens'"):
        parse_scenario({**document, "contxt_tokens": 1024}, "x.yaml")


@pytest.mark.parametrize("number", ["1:30", "1:30.5", "010", "0x10", "0b1", "1_000", "2024-01-01", "no"])
def test_numbers_are_those_of_yaml_1_2(tmp_path: Path, number: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "context_tokens": "HERE"}).replace("HERE", number))
    with pytest.raises(InputError, match=f"context_tokens: is '{number}'"):
        load_scenario(file)


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), (".5", 0.5), ("1.", 1.0), ("+2E-3", 2e-3), ("0", 0)]
)
def test_floats_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "overheads": {"launch_s": "HERE"}}).replace("HERE", text))
    assert load_scenario(file).overheads.launch_s == value


def test_an_alias_is_a_value_of_its_own() -> None:
    found = parse_yaml("{a: &a {x: [1, {y: 2}]}, b: *a, c: {<<: *a, z: 3}}", "t")
    found["b"]["x"][1]["y"] = 5
    assert found == {"a": {"x": [1, {"y": 2}]}, "b": {"x": [1, {"y": 5}]}, "c": {"x": [1, {"y": 2}], "z": 3}}


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("name: a\nseed: 1\nseed: 2\n")
    with pytest.raises(InputError, match="'seed' is given twice"):
        load_scenario(file)


def test_a_field_is_a_word() -> None:
    with pytest.raises(InputError, match="1 is no field"):
        parse_scenario({**GOOD, 1: 2}, "x.yaml")


@pytest.mark.parametrize(
    "text", ["", "- a\n- b\n", "just text", "a: [1\n", "a: &x [*x]\n", "[1, 2]: x\n", "5: x\n"]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(InputError):
        load_scenario(file)


def test_settings_reach_into_lists_and_parse_yaml(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    settings = ["strategies.1.hits.value=[0.25, 0.75]", "batch=4", "overheads.launch_s=1e-6"]
    scenario = load_scenario(file, settings)
    assert scenario.strategies[1].hits.value == [0.25, 0.75]  # type: ignore[union-attr]
    assert scenario.batch == [4]
    assert scenario.overheads.launch_s == 1e-6
    for setting, says in (
        ("batch", "KEY=VALUE is needed"),
        ("strategies.7.ranks=1", "7 is no place in a list of 2"),
        ("name.x=1", "leads into a value"),
        ("batch=[1", "not valid YAML"),
    ):
        with pytest.raises(InputError, match=f"--set .*{says}"):
            load_scenario(file, [setting])


@slow
def test_the_schema_describes_every_field() -> None:
    schema = json_schema()
    assert set(GOOD) <= set(schema["properties"])
    assert schema["additionalProperties"] is False


def properties(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """All properties anywhere in a JSON schema, by name."""
    for key, value in schema.items() if isinstance(schema, dict) else enumerate(schema):
        if key == "properties":
            yield from value.items()
        if isinstance(value, dict | list):
            yield from properties(value)


@pytest.mark.parametrize(
    ("schema", "least"),
    [(json_schema(), 250), (device_schema(), 40), (profile_schema(), 20), (plan_schema(), 300)],
)
def test_every_property_of_a_schema_has_a_description_of_a_line(schema: dict[str, Any], least: int) -> None:
    described = [(name, about.get("description", "")) for name, about in properties(schema)]
    assert len(described) >= least
    assert [name for name, text in described if not text.strip() or "\n" in text] == []


def test_what_a_list_of_alternatives_is_stands_at_the_property_not_at_its_items() -> None:
    ranks = json_schema()["$defs"]["TensorParallel"]["properties"]["ranks"]
    assert ranks["description"].startswith("devices of a group")
    assert not [one for one in ranks["anyOf"] if "description" in one]


def test_a_kind_is_described_by_what_it_selects() -> None:
    lazy = json_schema()["$defs"]["Lazy"]
    assert lazy["properties"]["kind"]["description"] == lazy["description"] == Lazy.__doc__
