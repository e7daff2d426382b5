"""The JSON schema of plan files, by which editors complete and check them."""

from typing import Any

from pydantic import TypeAdapter

from simcore.input.fields import TAGS
from simcore.planning.limits import STUDY, metric_text, names
from simcore.planning.slo import preset_names
from simcore.planning.whatif import Whatif
from simcore.scenario import json_schema
from simcore.studies.columns import TENANT, metric

NUMBER, NAME = {"type": "number"}, {"type": "string", "minLength": 1}


def plan_schema() -> dict[str, Any]:
    """Returns the JSON schema of a plan's file. Its scenario may lack fields, since `vary` or the question
    can have them."""
    schema = TypeAdapter(Whatif).json_schema()
    scenario = _partial(json_schema())
    base = {"anyOf": [NAME, scenario]}
    schema["$defs"] = {**scenario.pop("$defs"), **schema["$defs"], "PlanBase": base}
    fields, ref = schema["properties"], {"$ref": "#/$defs/PlanBase"}
    fields["base"]["anyOf"] = [ref]
    # Both are by names, which their patterns say.
    for pattern in fields["bases"]["patternProperties"]:
        fields["bases"]["patternProperties"][pattern] = ref
    paths = schema["$defs"]["PlanPaths"] = {"anyOf": [NAME, {"type": "array", "items": NAME, "minItems": 1}]}
    for of_base in fields["fields"]["patternProperties"].values():
        of_base["additionalProperties"] = paths
    schema["anyOf"] = [{"required": ["base"]}, {"required": ["bases"]}]
    fields["constraints"] |= {
        "properties": {
            name: {**NUMBER, "description": metric(STUDY, name).meaning or metric_text(name)}
            for name in names()
        },
        "patternProperties": {rf"^{TENANT}\..": NUMBER},
        "additionalProperties": False,
    }
    fields["slo"]["anyOf"] = [{"enum": list(preset_names())}, {"type": "null"}]
    return schema


def _partial(schema: Any) -> Any:
    """Returns a schema of which only tags are required: those say which kind of mapping is meant."""
    if isinstance(schema, list):
        return [_partial(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _partial(value) for key, value in schema.items()}
    if isinstance(required := kept.get("required"), list):
        kept["required"] = [name for name in required if name in TAGS]
    return kept
