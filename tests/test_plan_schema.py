"""The JSON schema of plans takes what `plan` takes, and finds the slips that an editor should find."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from simcore.input import shipped
from simcore.input.errors import parsed
from simcore.input.files import InputError
from simcore.planning.schema import plan_schema
from simcore.planning.whatif import Whatif
from tests.command_line import call
from tests.thorough import slow

DOCS = Path(__file__).parents[1] / "docs" / "planning.md"
PLANS = [
    name
    for name in shipped.names()
    if shipped.is_plan((shipped.SCENARIOS / f"{name}{shipped.ENDING}").read_text())
]
BASE = {"study": "serving", "device": "h200-sxm", "model": "llama-3.1-8b"}


@pytest.fixture(scope="module")
def faults() -> Any:
    """What a validator says of a document: a list of messages."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = plan_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema)))
    return lambda document: [error.message for error in validator.iter_errors(document)]


def shipped_plan(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((shipped.SCENARIOS / f"{name}{shipped.ENDING}").read_text())
    return found


@pytest.mark.parametrize("name", PLANS)
def test_plans_that_come_with_simcore_are_valid(name: str, faults: Any) -> None:
    assert len(PLANS) >= 4
    assert faults(shipped_plan(name)) == []


def test_the_plans_of_the_guide_are_valid(faults: Any) -> None:
    texts = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    whole = [text for text in texts if "..." not in text]
    assert whole
    for text in whole:
        assert faults(yaml.safe_load(text)) == []


GOOD: list[dict[str, Any]] = [
    {"vary": {"devices": [1, 2], "device": ["a", "b"], "x": {"range": [1, 9.5], "points": 3}}},
    {"vary": {"x": {"log": [1, 8], "points": 4}}, "together": "latin_hypercube", "points": 7},
    {"constraints": {"ttft_p99_s": 0.5, "e2e_p99.9_s": 9, "slo_attainment": 0.9, "tenant.a.ttft_p99_s": 1}},
    {"objective": "lowest_cost", "cost_per_hour": {"h200-sxm": 3}},
    {"objective": ["lowest_cost", "highest_rate"], "sensitivity": True, "certainty": 0.9, "replicas": 3},
    {"slo": "mlperf/llama3.1-8b/server", "question": "devices", "over": "devices", "between": [1, 9]},
    {"base": "quickstart"},
    # The question says the rate, and `vary` the device.
    {"base": {"study": "serving", "workload": {"arrivals": {"kind": "poisson"}}}, "vary": {"device": ["a"]}},
]
# Slips: the place and what stands there; `plan` refuses each.
BAD: list[tuple[str, Any]] = [
    ("vari", {"devices": [1]}),
    ("question", "device"),
    ("constraints", {"ttft_p9_s": 0.5}),
    ("constraints", {"ttft_p99_s": "fast"}),
    ("vary", {"devices": 3}),
    ("vary", {"devices": []}),
    ("vary", {"devices": {"range": [1, 2, 3], "points": 2}}),
    ("vary", {"devices": {"range": [1, 2], "point": 2}}),
    ("vary", {"devices": {"log": ["a", 2], "points": 2}}),
    ("objective", "fewest"),
    ("objective", ["lowest_cost", "fast"]),
    ("objective", []),
    ("leave_out_early", 1),
    ("certainty", 95),
    ("replicas", 0),
    ("replicas", 2.5),
    ("slo", "mlperf/none"),
    ("together", "product"),
    ("between", [1]),
    ("sensitivity", "yes"),
    ("cost_per_hour", {"h200-sxm": -1}),
    ("base", ""),
    ("base", 7),
    ("base", {**BASE, "devise": 2}),
    ("base", {**BASE, "study": "survey"}),
    ("base", {**BASE, "strategies": [{"kind": "continuous_batching", "tokens": 1}]}),
    ("base", {**BASE, "workload": {"arrivals": {"kind": "poison", "rate_per_s": 1}}}),
]


@pytest.mark.parametrize("fields", GOOD)
def test_what_a_plan_may_say_is_valid(fields: dict[str, Any], faults: Any) -> None:
    plan = {"base": BASE, **fields}
    assert faults(plan) == []
    parsed(Whatif, copy.deepcopy(plan), "x.yaml", "plan")


@pytest.mark.parametrize(("field", "value"), BAD)
def test_a_slip_is_found(field: str, value: Any, faults: Any) -> None:
    assert len(faults({"base": BASE, field: value})) == 1


@pytest.mark.parametrize("name", PLANS)
def test_a_misspelt_field_of_a_shipped_plan_is_found(name: str, faults: Any) -> None:
    plan = shipped_plan(name)
    for field in [*plan]:
        other = {(f"{key}x" if key == field else key): value for key, value in plan.items()}
        assert faults(other)
        with pytest.raises(InputError):
            parsed(Whatif, other, "x.yaml", "plan")
    one = "base" in plan
    for name_, base in {"": plan["base"]}.items() if one else plan["bases"].items():
        for field in [*base]:
            other = {(f"{key}x" if key == field else key): value for key, value in base.items()}
            assert faults(
                {**plan, "base": other} if one else {**plan, "bases": {**plan["bases"], name_: other}}
            )


def test_a_plan_without_a_scenario_is_found(faults: Any) -> None:
    assert len(faults({"question": "rate"})) == 1
    assert faults({"bases": {"a": "quickstart", "b": BASE}, "question": "break_even"}) == []
    assert len(faults({"bases": {"a": {**BASE, "devise": 1}}})) == 1


@slow
@pytest.mark.parametrize("name", ["mlperf_8b", "lcsm_or_attention"])
def test_a_copy_of_a_plan_has_the_schema_of_plans_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init", name) == 0
    first, _, rest = Path(f"{name}.yaml").read_text().partition("\n")
    assert first == "# yaml-language-server: $schema=simcore.plan.schema.json"
    assert rest == (shipped.SCENARIOS / f"capacity/{name}.yaml").read_text()
    assert json.loads(Path("simcore.plan.schema.json").read_text()) == plan_schema()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.yaml", "simcore.plan.schema.json"]


@slow
def test_every_field_of_a_plan_is_in_the_schema() -> None:
    assert set(plan_schema()["properties"]) == set(Whatif.model_fields)
    assert plan_schema()["additionalProperties"] is False
