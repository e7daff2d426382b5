"""What files may hold: every bound, choice and default that editors are told, against tests/data/schemas.

One that changes on purpose is written anew by  SIMCORE_UPDATE_TAPES=1 python -m pytest tests/test_schemas.py
and told to users in CHANGELOG.md. That values beyond a bound are refused is in test_hostile_inputs.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simcore import cli
from tests.as_written import are_as_written

KNOWN = Path(__file__).parent / "data" / "schemas"
SHOWN = {
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength", "minItems",
    "maxItems", "default", "const", "enum", "pattern", "required",
}  # fmt: skip


def facts(schema: Any, path: str = "") -> Iterator[str]:
    """Yields a line for each place of a schema that has a bound, a choice or a default."""
    if isinstance(schema, list):
        for part in schema:
            yield from facts(part, path)
    if not isinstance(schema, dict):
        return
    own = {name: schema[name] for name in sorted(SHOWN & schema.keys()) if not path.endswith(".properties")}
    if own:
        yield path.replace(".$defs", "").replace(".properties", "").strip(".") + " " + json.dumps(own)
    for name, part in schema.items():
        if name not in own and name not in ("description", "title", "examples"):
            yield from facts(part, path if name in ("anyOf", "oneOf", "allOf") else f"{path}.{name}")


def printed_facts(option: str = "") -> list[str]:
    """Returns the facts of the schema that the command line prints."""
    printed = CliRunner().invoke(cli.app, ["schema", option] if option else ["schema"])
    return sorted(facts(json.loads(printed.output)))


@pytest.mark.parametrize("kind", ["scenario", "device", "profile", "plan"])
def test_bounds_and_defaults_are_those_that_users_were_told(kind: str) -> None:
    found = printed_facts("--" + kind if kind != "scenario" else "")
    if kind == "plan":
        # A plan holds a whole scenario.
        found = sorted(set(found) - set(printed_facts()))
    are_as_written(KNOWN / f"{kind}.txt", found)
