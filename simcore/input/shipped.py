"""The scenarios that come with simcore, by name: from any folder, also if simcore is installed.

name = path below scenarios/ without its ending; its last part is enough if no other scenario ends so
"""

import re
from pathlib import Path

from simcore.input.files import InputError, nearest, plain

SCENARIOS = (Path(__file__).resolve().parents[1] / "scenarios").resolve()
ENDING = ".yaml"
SCHEMA, PLAN_SCHEMA = "simcore.schema.json", "simcore.plan.schema.json"
# Until a full stop, except that of "et al.", or a question mark.
FIRST_SENTENCE = re.compile(r".*?(?:(?<!al)\.|\?)\s|.*")


def names() -> list[str]:
    """The names of all scenarios, those outside of subfolders first."""
    found = [path.relative_to(SCENARIOS).with_suffix("").as_posix() for path in SCENARIOS.rglob(f"*{ENDING}")]
    return sorted(found, key=lambda name: (name.count("/"), name))


def path_of(name: str) -> Path | None:
    """The file of a scenario; None if no scenario, or several, have this name."""
    every = names()
    fitting = [one for one in every if one == name] or [one for one in every if one.endswith(f"/{name}")]
    return SCENARIOS / f"{fitting[0]}{ENDING}" if len(fitting) == 1 else None


def file_or_shipped(given: Path) -> Path:
    """The given file or, if it does not exist, the shipped scenario of that name."""
    return given if given.exists() else path_of(str(given)) or given


def found(given: Path) -> Path:
    """The given file or, if it does not exist, the shipped scenario of that name. Raises InputError if it is
    neither, and looks like a name: a path that is not there is for its reader to refuse."""
    file = file_or_shipped(given)
    folder, *rest = given.parts or (".",)
    of_a_folder = any(name.startswith(f"{folder}/") for name in names()) and not given.parent.exists()
    if (not rest or of_a_folder) and not given.suffix and not file.exists():
        raise InputError(f"{plain(given)}: no such file or example{nearest(str(given), names())}")
    return file


def about(name: str) -> str:
    """The first sentence of the comment at the head of a scenario."""
    head = []
    for line in (SCENARIOS / f"{name}{ENDING}").read_text(encoding="utf-8").splitlines():
        text = line.removeprefix("#").strip()
        if not line.startswith("#") or not text:
            break
        head.append(text)
    return first_sentence(" ".join(head))


def first_sentence(text: str | None) -> str:
    """The first sentence of a text, on one line.

    >>> first_sentence('As Flover (Yao et al. 2023) has  it. More.')
    'As Flover (Yao et al. 2023) has it.'
    """
    return FIRST_SENTENCE.match(" ".join((text or "").split()) + " ")[0].strip()  # type: ignore[index]


def copied(name: str) -> str:
    """A scenario's or a plan's text as a start for one's own, with a line by which editors find the schema
    and can complete and check the file. Raises InputError if there is no such scenario."""
    path = path_of(name)
    if path is None:
        raise InputError(f"{plain(name)}: no such scenario{nearest(name, names())}")
    text = path.read_text(encoding="utf-8")
    return f"# yaml-language-server: $schema={schema_of(text)}\n{text}"


def schema_of(text: str) -> str:
    """The name of the schema beside a copy of a scenario or a plan."""
    return PLAN_SCHEMA if is_plan(text) else SCHEMA


def is_plan(text: str) -> bool:
    """Whether a file's text is that of a plan, not of a scenario."""
    return re.search(r"^bases?:", text, re.MULTILINE) is not None
