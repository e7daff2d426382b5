"""What the documents say is there: files they link to, programs they call, scenarios they show."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from simcore import cli
from simcore.devices.spec import load_device
from simcore.planning.whatif import load_plan
from simcore.scenario import scenario_of

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
MOST_WORDS = {"README.md": 1500, "ARCHITECTURE.md": 3000, "docs/own_strategies.md": 499}


def blocks(document: Path, kind: str) -> Iterator[str]:
    yield from re.findall(rf"^```{kind}\n(.*?)^```$", document.read_text(encoding="utf-8"), re.M | re.S)


def programs(document: Path, folder: Path) -> Path:
    """A folder with the programs of a document that begin with the name of their file."""
    for block in blocks(document, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            (folder / name[1]).write_text(block)
    return folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, _ = target.partition("#")
        if not target.startswith("http") and path:
            assert (document.parent / path).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_program_that_is_called_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for module in re.findall(r"python -m ((?:simcore\.|validate|tests)[\w.]*)", text):
        assert module.startswith(("simcore.", "tests.")), module
        assert importlib.util.find_spec(module.rstrip(".")) is not None, module
    for word in re.findall(r"python -m simcore ([a-z]+)(?=[ `\]|])", text):
        assert word in cli.COMMANDS, word


@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_scenario_and_device_that_is_shown_is_a_right_one(document: Path, tmp_path: Path) -> None:
    for block in blocks(document, "yaml"):
        content = yaml.safe_load(block)
        if "study" in content and "strategies" in content:
            scenario_of(content, document.name, programs(document, tmp_path))
        elif "base" in content and "question" in content:
            path = tmp_path / "plan.yaml"
            path.write_text(block)
            assert list(load_plan(path).settings(0))
        elif "memory_bytes" in content:
            path = tmp_path / f"{content['name']}.yaml"
            path.write_text(block)
            load_device(str(path))


def test_documents_that_are_read_whole_are_short() -> None:
    for name, most in MOST_WORDS.items():
        assert len((ROOT / name).read_text(encoding="utf-8").split()) <= most
