"""simcore from Python: run a scenario, look at what came of it, compare two runs.

    result = simcore.run("scenario.yaml")        result.answer, .frame(), .requests(), .report("page.html")
    simcore.compare(result, another)

The command line runs scenarios by the same functions.
"""

import copy
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simcore import rundir
from simcore.assembly import SIMULATED, Place, assemble, provenance
from simcore.input.files import InputError, nearest, plain
from simcore.input.shipped import file_or_shipped
from simcore.scenario import Scenario, load_scenario, resolved, scenario_of
from simcore.sim.tape import record
from simcore.studies.columns import COLUMNS
from simcore.studies.common import FIGURE, Outcome, Progress, flat
from simcore.studies.processes import cores

if TYPE_CHECKING:
    import pandas as pd

CARD, TAPE = "cuda", "tape"
MACHINES = ("sim", "cpu", CARD, TAPE)
REAL = ("cpu", CARD)
# A real machine never takes the same time twice: of so many runs of a case the median counts.
REPEATS = 5
REQUESTS = "requests.parquet"


@dataclass(frozen=True)
class Result:
    """What came of a run. `scenario`: as it ran, all defaults written out; `comparison`: a line for each
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
        """What to know before one relies on it."""
        return self.outcome.warnings

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All figures: lines of results.csv."""
        return [flat(self.scenario.study, row) for row in self.outcome.rows]

    def frame(self) -> "pd.DataFrame":
        """All figures, one a row: the columns of results.csv. Seconds, bytes and tokens as `unit` says."""
        import pandas as pd  # noqa: PLC0415

        return pd.DataFrame(self.rows, columns=list(COLUMNS[self.scenario.study]))

    def requests(self) -> "pd.DataFrame":
        """The requests of a serving run, one a row; times in seconds since the run began. Raises InputError
        where the study is another."""
        import pyarrow as pa  # noqa: PLC0415

        if REQUESTS not in self.outcome.tables:
            raise InputError(f"requests: study {self.scenario.study} has none; serving has")
        frame: pd.DataFrame = pa.table(dict(self.outcome.tables[REQUESTS])).to_pandas()
        return frame

    def write(self, folder: str | Path) -> Path:
        """Writes the run directory with its report, whole or not at all. Raises InputError where it cannot be
        written."""
        with rundir.written_whole(Path(folder)) as draft:
            content = self.scenario.study, resolved(self.scenario), self.outcome, self.comparison
            rundir.write(draft, *content, self.provenance)
            build_report(draft)
        return Path(folder)

    def report(self, path: str | Path) -> Path:
        """Writes the report alone, one HTML file. Raises OSError where it cannot be written."""
        with tempfile.TemporaryDirectory() as folder:
            page = self.write(Path(folder) / "run") / "report.html"
            shutil.copyfile(page, path)
        return Path(path)


def run(
    scenario: str | Path | Mapping[str, Any],
    on: str = "sim",
    *,
    settings: Sequence[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Result:
    """Runs a scenario: a file, the name of an example, or its content, in which paths are meant from the
    working directory.

    `on`: "sim", "cpu" or "cuda"; `settings`: KEY=VALUE as with --set; `jobs`: processes of a simulation, all
    cores if left out; `progress`: is told what is done, how much of it, of how much. Raises InputError with
    one line that names the field and what is allowed, LawError where a law is broken.
    """
    begun_s = time.perf_counter()
    if on not in MACHINES or on == TAPE:
        raise InputError(f"on: {plain(on)}: no such machine{nearest(on, ['sim', *REAL])}")
    if isinstance(scenario, Mapping):
        where, content = "scenario", copy.deepcopy(dict(scenario))
        asked = scenario_of(content, where, Path.cwd(), settings, on=on)
    else:
        file = file_or_shipped(Path(scenario))
        where = str(file)
        asked = load_scenario(file, settings, on=on)
    silent = progress or (lambda doing, done, total: None)
    command = f"simcore.run({where!r}, on={on!r}, settings={list(settings)!r})"
    return execute(asked, where, on, jobs=jobs, progress=silent, command=command, begun_s=begun_s)


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
    """Runs a scenario that was read. `where`: what it is called where something is wrong with it; `ready` is
    called before anything runs, to refuse what would fail in the end. Raises InputError, LawError."""
    if on in REAL:
        report_builder()
    if jobs is not None and jobs < 1:
        raise InputError(f"jobs: is {jobs}; at least 1 is needed")
    place = replace(SIMULATED, jobs=jobs or cores())
    if on in REAL:
        place = place_of(on, where, scenario, progress)
    parts = assemble(scenario, where, place)
    ready()
    with told_of(where):
        outcome = parts.study.run(progress)
    comparison = parts.study.compare(outcome)
    outcome.warnings = [*(parts.warnings if on == "sim" else []), *outcome.warnings]
    outcome.notes = [*parts.notes, *outcome.notes]
    elapsed_s = time.perf_counter() - begun_s
    origin = provenance(scenario, parts, outcome, command=command, wall_s=elapsed_s, place=place)
    return Result(parts.scenario, outcome, comparison, origin)


def tape(scenario: Scenario, where: str) -> list[str]:
    """What each strategy launches, line by line. Raises InputError."""
    parts = assemble(scenario, where)
    with told_of(where):
        return parts.study.tape(record)


def compare(a: Result, b: Result) -> "pd.DataFrame":
    """Two runs of the same study side by side: a row for each figure that either has, with its columns but
    for `source`, `low` and `high`; `a` and `b` are the values, `ratio` is b / a. Runs on one device each are
    compared whatever it is. Raises InputError where the studies differ."""
    study = a.scenario.study
    if b.scenario.study != study:
        raise InputError(f"compare: studies {study} and {b.scenario.study} have no figures in common")
    frames = a.frame(), b.frame()
    apart = [] if all(frame["device"].nunique() == 1 for frame in frames) else ["device"]
    keys = [name for name in COLUMNS[study] if name not in {*FIGURE, "device"}] + apart + ["unit"]
    one, other = (
        frame[[*keys, "value"]].rename(columns={"value": name})
        for frame, name in zip(frames, ("a", "b"), strict=True)
    )
    merged = one.merge(other, on=keys, how="outer", sort=False)
    return merged.assign(ratio=merged["b"] / merged["a"])


# -- on this machine -------------------------------------------------------------------------------------


def place_of(on: str, where: str, scenario: Scenario, progress: Progress) -> Place:
    """This machine, as a place to run on."""
    check_real(on)
    if on == CARD:
        _, card = card_for(where, scenario, progress)
        return Place(on, card.start, REPEATS, described=card.described)
    from simcore.validate.machines.here import Real, check_formats  # noqa: PLC0415

    check_formats(scenario, where)
    real = Real(REPEATS)
    return Place(on, real.start, REPEATS, described=real.described)


def card_for(where: str, scenario: Scenario, progress: Progress) -> tuple[str, Any]:
    """The card of this machine by its name, and what runs a scenario there. Raises InputError where there is
    none, the scenario is for another one, or asks for what is not run on cards yet."""
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
    with told_of(where):
        compile_for(scenario, where, progress)
    return device, this_machine(REPEATS)


def check_real(on: str) -> None:
    """Raises InputError where this machine is no such device, or lacks what it takes."""
    if on not in REAL:
        raise InputError(f"--on {plain(on)}: no device of this machine{nearest(on, REAL)}")
    # Half a second of importing torch is for those alone who run on a real device.
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"--on {on}: needs torch: pip install 'simcore[kernels]'")


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Puts the scenario's name before what is wrong with it."""
    try:
        yield
    except InputError as error:
        # What is wrong with a name in the scenario is told with the file already.
        told = str(error)
        raise InputError(told if told.startswith(f"{where}: ") else f"{where}: {told}") from None


def report_builder() -> Callable[[Path], Path]:
    """What builds reports, asked for before anything is measured that would be lost without it. Raises
    InputError where a package that it needs is not there."""
    # plotly and pandas take a quarter of a second to import, which `--help` must not pay.
    try:
        from simcore.reports import build  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise InputError(f"reports need the package {error.name}, which is not installed") from None
    return build


def build_report(folder: Path) -> Path:
    """The page of a run directory. Raises ValueError and OSError where none can be made of it, and
    InputError."""
    return report_builder()(folder)
