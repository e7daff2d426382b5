"""simcore from Python: run a scenario, read its results, compare two runs.

    result = simcore.run("scenario.yaml")        result.answer, .frame(), .requests(), .report("page.html")
    simcore.compare(result, another)

The command line calls the same functions.
"""

import importlib.util
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcore import rundir
from simcore.assembly import SIMULATED, Place, assemble, provenance
from simcore.input.files import InputError, nearest, plain, read_cells, shown
from simcore.input.shipped import found
from simcore.scenario import Scenario, check_no_plan, load_scenario, resolved, scenario_of
from simcore.sim.tape import record
from simcore.studies.columns import COLUMNS
from simcore.studies.common import FIGURE, Outcome, Progress, flat
from simcore.studies.processes import cores

if TYPE_CHECKING:
    import pandas as pd

CARD, TAPE = "cuda", "tape"
MACHINES = ("sim", "cpu", CARD, TAPE)
REAL = ("cpu", CARD)
# Times on a real machine vary: each case runs this often, and the median counts.
REPEATS = 5
REQUESTS = "requests.parquet"
# Kinds of numpy's types that stand for values of Python: truth values, numbers, words, any object.
NUMPY_KINDS = "biufUO"


@dataclass(frozen=True)
class Result:
    """The results of a run. `scenario`: as it ran, all defaults written out; `comparison`: a line for each
    published figure that the run has too; `provenance`: where the figures come from."""

    scenario: Scenario
    outcome: Outcome
    comparison: list[dict[str, Any]]
    provenance: dict[str, Any]

    @property
    def answer(self) -> str:
        """The answer in a sentence."""
        return self.outcome.answer

    @property
    def warnings(self) -> list[str]:
        """The limits of this run's figures, to read before relying on them."""
        return self.outcome.warnings

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All figures, as the lines of results.csv."""
        return [flat(self.scenario.study, row) for row in self.outcome.rows]

    def frame(self) -> "pd.DataFrame":
        """Returns all figures, one per row, with the columns of results.csv; `unit` gives each row's unit."""
        import pandas as pd  # noqa: PLC0415

        return pd.DataFrame(self.rows, columns=list(COLUMNS[self.scenario.study]))

    def requests(self) -> "pd.DataFrame":
        """Returns the requests of a serving run, one per row; times in seconds since the run began. Raises
        InputError if the run has none, as in any other study."""
        import pyarrow as pa  # noqa: PLC0415

        if REQUESTS not in self.outcome.tables:
            raise InputError(f"requests: study {self.scenario.study} has none; serving has")
        frame: pd.DataFrame = pa.table(dict(self.outcome.tables[REQUESTS])).to_pandas()
        return frame

    def write(self, folder: str | Path) -> Path:
        """Writes the run directory with its report, whole or not at all. Raises InputError if it cannot be
        written."""
        with rundir.written_whole(Path(folder)) as draft:
            content = self.scenario.study, resolved(self.scenario), self.outcome, self.comparison
            rundir.write(draft, *content, self.provenance)
            build_report(draft)
        return Path(folder)

    def report(self, path: str | Path) -> Path:
        """Writes only the report, one HTML file, with the folders above it. Raises OSError if it cannot be
        written."""
        with tempfile.TemporaryDirectory() as folder:
            page = self.write(Path(folder) / "run") / "report.html"
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(page, path)
        return Path(path)


def run(
    scenario: str | Path | Mapping[str, Any],
    on: str = "sim",
    *,
    settings: Sequence[str] | Mapping[str, Any] | str = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Runs a scenario: a file, the name of an example, or its content, with paths relative to the working
    directory; values may be numpy's, arrays of one dimension too.

    `on`: "sim", "cpu" or "cuda"; `settings`: values by dotted path, {"workload.requests": 50}, or KEY=VALUE
    as with --set, one or several; `jobs`: processes of a simulation, all cores if left out; `progress`: is
    called with the current work, the count done and the total. Raises InputError with one line that names
    the field and the allowed values, LawError if a law is broken.
    """
    begun_s = time.perf_counter()
    given = setting_texts(settings)
    if on not in MACHINES or on == TAPE:
        raise InputError(f"on: {plain(on)}: no such machine{nearest(on, ['sim', *REAL])}")
    if isinstance(scenario, Mapping):
        where, content = "scenario", python_values(dict(scenario), "scenario")
        check_no_plan(content, where, "FILE.yaml")
        asked = scenario_of(content, where, Path.cwd(), given, on=on)
    elif not isinstance(scenario, str | PathLike):
        needed = "a path, the name of an example, or a dict of fields is needed"
        raise InputError(f"scenario: is {_said(scenario)}; {needed}")
    else:
        typed = Path(scenario)
        file = found(typed)
        where = str(file)
        asked = load_scenario(file, given, on=on, typed=typed)
    silent = progress or (lambda doing, done, total: None)
    command = f"simcore.run({where!r}, on={on!r}, settings={given!r})"
    return execute(asked, where, on, jobs=jobs, progress=silent, command=command, begun_s=begun_s)


def setting_texts(settings: Any) -> list[str]:
    """Returns settings as KEY=VALUE, each a dotted path and a YAML value. Raises InputError."""
    if isinstance(settings, str):
        return [settings]
    if isinstance(settings, Mapping):
        return [_setting_text(key, value) for key, value in settings.items()]
    needed = 'KEY=VALUE, a list of these, or a dict such as {"workload.requests": 50} is needed'
    if not isinstance(settings, list | tuple):
        raise InputError(f"settings: is {_said(settings)}; {needed}")
    for each in settings:
        if not isinstance(each, str):
            raise InputError(f"settings: holds {_said(each)}; {needed}")
    return list(settings)


def _setting_text(key: Any, value: Any) -> str:
    if not isinstance(key, str) or "=" in key or not all(key.split(".")):
        raise InputError(f"settings: {_said(key)} is no path of a field, such as workload.requests")
    given = python_values(value, "settings", plain(key))
    try:
        # What JSON writes, YAML reads as the same value.
        return f"{key}={json.dumps(given, ensure_ascii=False, allow_nan=False)}"
    except (TypeError, ValueError):
        raise InputError(f"settings: {plain(key)}: is {_said(value)}, which no scenario can hold") from None


def python_values(value: Any, where: str, field: str = "") -> Any:
    """Returns a copy of a scenario's content, or of a part, in Python's own types: numpy's numbers, words and
    arrays of one dimension are replaced. `field`: the dotted path to the part. Raises InputError."""
    try:
        return _python_values(value, where, field)
    except RecursionError:
        raise InputError(f"{where}: holds itself, or is nested too deeply") from None


def _python_values(value: Any, where: str, field: str) -> Any:
    import numpy as np  # noqa: PLC0415

    if isinstance(value, dict):
        inner = f"{field}." if field else ""
        return {key: _python_values(one, where, f"{inner}{key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_python_values(one, where, f"{field}.{place}") for place, one in enumerate(value)]
    if not isinstance(value, np.generic | np.ndarray):
        return value
    if value.ndim > 1 or value.dtype.kind not in NUMPY_KINDS:
        needed = "numbers or words, in one dimension at most, are needed"
        raise InputError(
            f"{where}: {plain(field)}: is numpy's {value.dtype}, of shape {value.shape}; {needed}"
        )
    return _python_values(value.tolist(), where, field) if value.ndim else value.item()


def _said(value: object) -> str:
    """Returns a value as a message repeats it; the lines of a table or an array as one."""
    return " ".join(shown(value).split())


def execute(
    scenario: Scenario,
    where: str,
    on: str,
    *,
    jobs: int | None,
    progress: Progress,
    command: str,
    begun_s: float,
    ready: Callable[[], None] = lambda: None,
) -> Result:
    """Runs a scenario that is already read. `where`: its name in error messages; `ready` is called before
    anything runs, to refuse a run whose results could not be written. Raises InputError, LawError."""
    if on in REAL:
        report_builder()
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs: is {jobs}; at least 1 is needed")
    place = replace(SIMULATED, jobs=jobs or cores())
    if on in REAL:
        place = place_of(on, where, scenario, progress)
    parts = assemble(scenario, where, place)
    ready()
    with prefixed_errors(where):
        outcome = parts.study.run(progress)
    comparison = parts.study.compare(outcome)
    outcome.warnings = [*(parts.warnings if on == "sim" else []), *outcome.warnings]
    outcome.notes = [*parts.notes, *outcome.notes]
    elapsed_s = time.perf_counter() - begun_s
    origin = provenance(scenario, parts, outcome, command=command, wall_s=elapsed_s, place=place)
    return Result(parts.scenario, outcome, comparison, origin)


def tape(scenario: Scenario, where: str) -> list[str]:
    """Returns the launches of each strategy, line by line. Raises InputError."""
    parts = assemble(scenario, where)
    with prefixed_errors(where):
        return parts.study.tape(record)


def compare(a: Result | str | Path, b: Result | str | Path) -> "pd.DataFrame":
    """Compares two runs of the same study, each a result or the path of a run directory: a row for each
    figure of either run, with its columns except `source`, `low` and `high`; `a` and `b` are the values,
    `ratio` is b / a. If each run has one device, the devices may differ. Raises InputError if the studies
    differ, or a directory is no run's."""
    (study, *_), (of_b, *_) = sides = _figures(a, "a"), _figures(b, "b")
    if of_b != study:
        raise InputError(f"compare: studies {study} and {of_b} have no figures in common")
    frames = [frame for _, frame in sides]
    apart = [] if all(frame["device"].nunique() == 1 for frame in frames) else ["device"]
    keys = [name for name in COLUMNS[study] if name not in {*FIGURE, "device"}] + apart + ["unit"]
    one, other = (
        frame[[*keys, "value"]].rename(columns={"value": name})
        for frame, name in zip(frames, ("a", "b"), strict=True)
    )
    merged = one.merge(other, on=keys, how="outer", sort=False)
    return merged.assign(ratio=merged["b"] / merged["a"])


def _figures(given: Any, name: str) -> tuple[str, "pd.DataFrame"]:
    """Returns the study of a run and its figures, as `Result.frame` has them. Raises InputError."""
    if isinstance(given, Result):
        return given.scenario.study, given.frame()
    if not isinstance(given, str | PathLike):
        raise InputError(f"compare: {name} is {_said(given)}; a result, or a run directory's path, is needed")
    import pandas as pd  # noqa: PLC0415

    file = Path(given) / rundir.RESULTS
    if not file.is_file():
        raise InputError(f"{given}: is no run directory: {file.name} is missing")
    head, rows = read_cells(file)
    study = rows[0][head.index("study")] if rows and "study" in head else ""
    if study not in COLUMNS or head != [*COLUMNS[study]]:
        raise InputError(f"{file}: has not the columns of any study's results")
    values = [[_value(study, *cell, str(file)) for cell in zip(head, row, strict=True)] for row in rows]
    return study, pd.DataFrame(values, columns=head)


def _value(study: str, column: str, cell: str, where: str) -> Any:
    """Returns the value in a cell of results.csv, None where a number is empty. Raises InputError."""
    kind = COLUMNS[study][column].type
    if kind == "text":
        return cell
    try:
        return (int(cell) if kind == "integer" else float(cell)) if cell else None
    except ValueError:
        raise InputError(f"{where}: {column}: {shown(cell)} is no number") from None


# -- on this machine -------------------------------------------------------------------------------------


def place_of(on: str, where: str, scenario: Scenario, progress: Progress) -> Place:
    """Returns this machine as a place to run on. Raises InputError if it cannot run the scenario."""
    check_real(on)
    if on == CARD:
        _, card = card_for(where, scenario, progress)
        return Place(on, card.start, REPEATS, described=lambda: card.described)
    from simcore.validate.machines.here import Real, check_formats, check_prompts  # noqa: PLC0415

    check_formats(scenario, where)
    check_prompts(scenario, where)
    real = Real(REPEATS)
    return Place(on, real.start, REPEATS, described=lambda: real.described)


def card_for(where: str, scenario: Scenario, progress: Progress) -> tuple[str, Any]:
    """Returns the name of this machine's card, and the machine that runs a scenario there. Raises InputError
    if there is no card, or the scenario is for another one or uses features that do not run on cards yet."""
    if importlib.util.find_spec("triton") is None:
        raise InputError(f"--on {CARD}: needs triton: pip install 'simcore[kernels]'")
    from simcore.validate.calibration.cuda import this_card  # noqa: PLC0415
    from simcore.validate.machines.cuda.runs import this_machine  # noqa: PLC0415
    from simcore.validate.machines.cuda.states import check_card_runs  # noqa: PLC0415
    from simcore.validate.machines.here import check_formats  # noqa: PLC0415
    from simcore.validate.timing.precompile import compile_for  # noqa: PLC0415

    check_card_runs(scenario, where)
    check_formats(scenario, where, "a card")
    device = this_card()
    given = [(one.base, dict(one.change)) for one in scenario.devices_in_use]
    if given != [(device, {})]:
        asked = resolved(scenario)["device"]
        raise InputError(f"{where}: device: is {asked!r}; the card of this machine is {device!r}")
    begun_s = time.perf_counter()
    with prefixed_errors(where):
        compile_for(scenario, where, progress)
    return device, this_machine(REPEATS, compiling_s=time.perf_counter() - begun_s)


def check_real(on: str) -> None:
    """Raises InputError if `on` is no real device, or torch is not installed."""
    if on not in REAL:
        raise InputError(f"--on {plain(on)}: no device of this machine{nearest(on, REAL)}")
    # Importing torch takes half a second, so only runs on a real device import it.
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"--on {on}: needs torch: pip install 'simcore[kernels]'")


@contextmanager
def prefixed_errors(where: str) -> Iterator[None]:
    """Puts the scenario's name in front of an InputError's message."""
    try:
        yield
    except InputError as error:
        # An error about a name in the scenario already begins with the file.
        message = str(error)
        raise InputError(message if message.startswith(f"{where}: ") else f"{where}: {message}") from None


def report_builder() -> Callable[[Path], Path]:
    """Returns the function that builds reports. Call it before measuring: a missing package then costs no
    measurement. Raises InputError if a package that reports need is not installed."""
    # plotly and pandas take a quarter of a second to import, which `--help` must not pay.
    try:
        from simcore.reports import build  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InputError(f"reports need the package {error.name}, which is not installed") from None
    return build


def folders_compared(a: Path, b: Path, page: Path | None) -> tuple[dict[str, Any], list[Any]]:
    """Compares two run directories, and writes a page of it if one is named. Returns the comparison as JSON's
    types, and the lines of the terminal's table. Raises InputError."""
    report_builder()
    from simcore import reports  # noqa: PLC0415

    return reports.comparison(a, b, page)


def build_index(folder: Path) -> tuple[Path, int, int]:
    """Writes the list of all run directories below a folder. Returns its path, and how many are listed and
    how many of these are broken. Raises InputError."""
    report_builder()
    from simcore import reports  # noqa: PLC0415

    page, entries = reports.build_index(folder)
    return page, len(entries), sum(bool(each.broken) for each in entries)


def build_report(folder: Path) -> Path:
    """Builds the report of a run directory and returns its path. Raises ValueError and OSError if the
    directory allows no report, and InputError if a package is missing."""
    return report_builder()(folder)
