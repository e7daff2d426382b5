"""The command line: reads the arguments, calls the parts in order and prints the results.

    scenario.yaml -> Scenario -> schedule + model -> Machine -> trace -> laws, metrics -> report

Results go to stdout and are the same for the same input; progress and wall-clock times go to stderr.
Bad input: one line, exit code 2.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from simcore import api, rundir, terminal
from simcore.api import (
    CARD,
    MACHINES,
    REPEATS,
    TAPE,
    card_for,
    check_real,
    execute,
    prefixed_errors,
    report_builder,
    tape,
)
from simcore.assembly import MODELS, model_names, provenance
from simcore.devices import listing
from simcore.devices.fitted import profile_schema
from simcore.devices.spec import device_names, load_device
from simcore.devices.spec import json_schema as device_schema
from simcore.export import export as export_bench
from simcore.input import shipped
from simcore.input.drafts import write_text
from simcore.input.errors import TRACEBACK
from simcore.input.fields import kinds_of
from simcore.input.files import CONTROL, InputError, listed, nearest, plain, shown
from simcore.machine.machine import LawError
from simcore.models.decoder_config import ModelError, load_config
from simcore.scenario import Scenario, json_schema, load_scenario, resolved, scenario_of_point
from simcore.sim.kept import cache_folder
from simcore.studies.decode.scenario import DecodeStrategies
from simcore.studies.processes import cores
from simcore.studies.serving.engines.presets import described, engine_names, load_engine
from simcore.studies.serving.strategies import ServingStrategies
from simcore.studies.tiling.strategies import TilingStrategies
from simcore.terminal import BROKEN, INTERRUPTED, USAGE

# Default time limits of a card's calibration, and of a quick one.
MINUTES, QUICK_MINUTES = 9.7, 2.8
# What a plan may be asked (simcore/planning/whatif.py).
QUESTIONS = "devices|rate|cost|strategy|grid|break_even"
# Most digits of --jobs.
LONGEST_JOBS = 4
READER_GONE = 141
TERMINATED = 143
HUNG_UP = 129

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # noqa: PLC0415 - a tenth of a second

        typer.echo(f"simcore {version('simcore')}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Predicts how long LLM inference takes. `python -m simcore FILE.yaml` runs a scenario."""
    del version


File = Annotated[
    Path,
    typer.Argument(metavar="FILE.yaml", help="the scenario, or the name of an example", show_default=False),
]
On = Annotated[
    str,
    typer.Option(
        "--on", metavar="sim|cpu|cuda|tape", help="simulate, run on this CPU or card, or print the launches"
    ),
]
Device = Annotated[str, typer.Option("--on", metavar="cpu|cuda", help="the device of this machine")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="replace a field, a.b.0.c=value")]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="the run directory [runs/NAME/MACHINE]", show_default=False),
]
Jobs = Annotated[
    str | None,
    typer.Option("--jobs", metavar="N", help="processes of a simulation [all cores]", show_default=False),
]

Json = Annotated[bool, typer.Option("--json", help="print the results as JSON")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print the answer only")]


@app.command()
def run(
    file: File,
    on: On = "sim",
    settings: Set = [],  # noqa: B006 - typer needs the default itself
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
    jobs: Jobs = None,
    point: Annotated[
        int | None,
        typer.Option(
            "--point", metavar="N", help="a point of a plan, FILE its directory", show_default=False
        ),
    ] = None,
) -> None:
    """Run a scenario: predict, check the laws, write the run directory and its report."""
    begun_s = time.perf_counter()
    typed = file
    if point is None:
        file = shipped.found(file)
    if on not in MACHINES:
        raise InputError(f"--on {plain(on)}: no such machine{nearest(on, MACHINES)}")
    processes = None if jobs is None else _processes(jobs)
    if point is not None:
        scenario = scenario_of_point(file, point, settings, on=on)
    elif (file / rundir.SCENARIOS).is_file():
        raise InputError(f"{file}: is the run directory of a plan; --point N says which of its points to run")
    else:
        scenario = load_scenario(file, settings, on=on, typed=typed)
    if on == TAPE:
        if out is not None:
            raise InputError("--out: a tape is printed, not written; leave it out with --on tape")
        typer.echo("\n".join(tape(scenario, str(file))))
        return
    target = out or Path("runs") / scenario.name / on
    machine = [] if on == "sim" else ["--on", on]
    machine += [] if point is None else ["--point", str(point)]
    words = ["python", "-m", "simcore", "run", str(file), *machine, *_given(settings, out)]
    result = execute(
        scenario,
        str(file),
        on,
        jobs=processes,
        progress=terminal.progress(),
        command=shlex.join(words),
        ready=lambda: rundir.check_target(target),
        begun_s=begun_s,
    )
    result.write(target)
    if as_json:
        found = {"answer": result.answer, "warnings": result.warnings, "results": result.rows}
        typer.echo(json.dumps({**found, "comparison": result.comparison}, indent=1, allow_nan=False))
    else:
        terminal.show(scenario.study, result.outcome, result.comparison, target, quiet=quiet)
    terminal.note(f"{time.perf_counter() - begun_s:.1f} s")


@app.command()
def plan(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.yaml", help="a plan or a scenario, or the name of an example", show_default=False
        ),
    ],
    question: Annotated[
        str | None,
        typer.Option("--question", metavar=QUESTIONS, help="what is asked [the file's]", show_default=False),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="what the answer hinges on: one thing changed at a time")
    ] = False,
    settings: Set = [],  # noqa: B006 - typer needs the default itself
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
    jobs: Jobs = None,
    dask: Annotated[
        str | None,
        typer.Option(
            "--dask",
            metavar="tcp://HOST:PORT",
            help="make the runs on the workers of this Dask scheduler",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Answer a question by search: how many devices, up to which rate, at what cost, by which strategy."""
    begun_s = time.perf_counter()
    # Only plans need them, and they take a tenth of a second.
    from simcore.planning import commands  # noqa: PLC0415
    from simcore.planning.plan import run as planned  # noqa: PLC0415
    from simcore.planning.whatif import BREAK_EVEN, load_plan  # noqa: PLC0415

    processes = cores() if jobs is None else _processes(jobs)
    if dask is not None and jobs is not None:
        raise InputError("--jobs: is of processes here, and --dask makes no run here; leave one of them out")
    report_builder()
    file = shipped.found(file)
    asked = load_plan(file, question, settings, sensitivity=sensitivity)
    # Answers to several questions about a scenario stay beside each other.
    target = out or Path("runs") / asked.name / (f"plan_{question}" if question else "plan")
    rundir.check_target(target)
    with prefixed_errors(str(file)):
        found = planned(asked, jobs=processes, progress=terminal.progress(), dask=dask)
    words = ["python", "-m", "simcore", "plan", str(file), *(["--question", question] if question else [])]
    words += ["--sensitivity"] * sensitivity + (["--dask", dask] if dask else [])
    command = shlex.join([*words, *_given(settings, out)])
    with rundir.written_whole(target) as folder:
        origin = found.provenance(command, time.perf_counter() - begun_s)
        asked_for, every = asked.as_asked(), found.scenarios()
        rundir.write_plan(folder, asked_for, found.lines, found.summary(), origin, every)
        api.build_report(folder)
    if as_json:
        typer.echo(json.dumps({**found.summary(), "points": found.lines}, indent=1, allow_nan=False))
    else:
        held = {limit.metric: limit.value for limit in asked.limits}
        said = (found.warnings, found.notes)
        if asked.question == BREAK_EVEN:
            table = terminal.leads(found.leads, found.summary()["everywhere"])
        else:
            energy = "lowest_energy" in found.summary()["objectives"]
            table = terminal.judged(found.lines, held, energy=energy)
        how = commands.lines(found.how)
        terminal.show_plan(found.answer, table, len(found.lines), said, target, how, quiet=quiet)
    terminal.note(found.effort())
    terminal.note(f"{time.perf_counter() - begun_s:.1f} s")


@app.command()
def slos() -> None:
    """List the limits that a plan may take by name, each with its source."""
    from simcore.planning.slo import presets  # noqa: PLC0415

    for name, preset in presets().items():
        held = ", ".join(f"{metric}: {value:g}" for metric, value in preset.limits.items())
        typer.echo(terminal.listing(name, f"{held} ({preset.about}; {preset.source})", 32))


@app.command()
def calibrate(
    on: Annotated[str, typer.Option("--on", metavar="cpu|cuda", help="what of this machine")] = "cpu",
    quick: Annotated[bool, typer.Option("--quick", help="a third of the time or less")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="where to write [its profile]", show_default=False),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.1,
            help="of a card: what is not measured by then is left out",
            show_default=f"{MINUTES}, quick {QUICK_MINUTES}",
        ),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kinds",
            metavar="KIND,..",
            help="of a card: these kinds of op (matmul, or matmul:fp8), or verbs, alone [all]",
            show_default=False,
        ),
    ] = None,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="of a card: shapes that its profile lacks alone; what it has stays"),
    ] = False,
    results: Annotated[
        list[Path],
        typer.Option(
            "--from",
            metavar="FILE.json..",
            help="result files of `vllm bench serve` of a service: fit its host time, measure nothing",
        ),
    ] = [],  # noqa: B006 - typer needs the default itself
    more: Annotated[list[Path], typer.Argument(hidden=True)] = [],  # noqa: B006
    scenario: Annotated[
        Path | None,
        typer.Option(
            "--scenario",
            metavar="FILE.yaml",
            help="of --from: the service, as a scenario",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", metavar="NAME", help="of --from: its engine [the scenario's]")
    ] = "",
    settings: Set = [],  # noqa: B006 - typer needs the default itself
) -> None:
    """Measure what ops cost on this machine and write its profile; or fit the host time of a service."""
    if results:
        others = {"--on": on != "cpu", "--quick": quick, "--minutes": minutes is not None}
        others |= {"--kinds": kinds is not None, "--missing": missing}
        if names := [name for name, given in others.items() if given]:
            raise InputError(f"{names[0]}: is for measuring; calibrate --from measures nothing")
        _calibrate_service([*results, *more], scenario, engine, settings, out)
        return
    _check_no_service(more, scenario, engine, settings)
    check_real(on)
    if minutes is not None and not math.isfinite(minutes):
        raise InputError(f"--minutes: is {minutes}; a number of minutes is needed")
    from simcore.validate.calibration import cpu as calibration  # noqa: PLC0415

    if on == CARD:
        # Only a card needs Triton's kernels.
        from simcore.validate.calibration.cuda import calibrate_card  # noqa: PLC0415

        within_s = 60.0 * (minutes or (QUICK_MINUTES if quick else MINUTES))
        target, profile = calibrate_card(
            out, quick, terminal.progress(), within_s=within_s, kinds=kinds, missing=missing
        )
    elif minutes is not None or kinds is not None or missing:
        name = "--minutes" if minutes is not None else "--kinds" if kinds is not None else "--missing"
        raise InputError(f"{name}: is for --on {CARD} only; --on {on} measures all, in half a minute")
    else:
        target = out or calibration.profile_path(on)
        profile = calibration.calibrate(on, target, quick, terminal.progress())
    typer.echo(f"{target}: {len(profile.fits)} fits, {profile.title}")


def _calibrate_service(
    files: Sequence[Path], file: Path | None, engine: str, settings: Sequence[str], out: Path | None
) -> None:
    """Fits the host time of a service to result files, writes an engine's file and says how good it is."""
    from simcore.validate.calibration.service_engine import calibrate_service, check_out  # noqa: PLC0415

    if file is None:
        raise InputError(
            "--scenario: is missing; --from needs the service as a scenario: its device, model, engine"
        )
    named = [f"strategies.0.engine={engine}"] if engine else []
    path = shipped.found(file)
    scenario = load_scenario(path, [*settings, *named], typed=file)
    target = out or Path(f"{scenario.name}-engine.yaml")
    check_out(target, [*files, path])
    found = calibrate_service(files, scenario, str(path), target, terminal.progress())
    for one in found.held_back:
        tpot_ms, ttft_ms = (
            f"{1e3 * measured_s:.4g} ms, predicted {1e3 * predicted_s:.4g} ({pct:+.1f} %)"
            for measured_s, predicted_s, pct in (
                (one.measured.tpot_s, one.predicted.tpot_s, one.tpot_pct),
                (one.measured.ttft_s, one.predicted.ttft_s, one.ttft_pct),
            )
        )
        typer.echo(f"{one.name} held back: TPOT {tpot_ms}; TTFT {ttft_ms}")
    for text in found.notes:
        typer.echo(f"note: {text}")
    typer.echo(
        f"{target}: {found.host}, fitted to {len(files)} run{'s' * (len(files) > 1)};"
        f" use it by `engine: {target}`"
    )


def _check_no_service(
    more: Sequence[Path], scenario: Path | None, engine: str, settings: Sequence[str]
) -> None:
    """Raises InputError if an argument is given that only --from takes."""
    given = {"--scenario": scenario, "--engine": engine, "--set": settings, "a file": more}
    if names := [name for name, value in given.items() if value]:
        raise InputError(f"{names[0]}: is for calibrate --from FILE.json only")


@app.command()
def validate(
    file: File,
    on: Device = "cpu",
    settings: Set = [],  # noqa: B006 - typer needs the default itself
    out: Out = None,
) -> None:
    """Simulate a scenario, run it on this machine, compare rung by rung; exit 1 where a bound is broken."""
    begun_s = time.perf_counter()
    typed, file = file, shipped.found(file)
    check_real(on)
    report_builder()
    from simcore.validate.ladder import climb  # noqa: PLC0415

    scenario = load_scenario(file, settings, on=on, typed=typed)
    target = out or Path("runs") / scenario.name / f"validate-{on}"
    rundir.check_target(target)
    how = _how_to_climb(on, file, scenario)
    with prefixed_errors(str(file)):
        found = climb.climb(scenario, str(file), on=on, repeats=REPEATS, progress=terminal.progress(), **how)
    outcome = found.outcome
    outcome.warnings = [*found.parts.warnings, *outcome.warnings]
    words = ["python", "-m", "simcore", "validate", str(file), "--on", on, *_given(settings, out)]
    wall_s = time.perf_counter() - begun_s
    command = shlex.join(words)
    origin = provenance(scenario, found.parts, outcome, command=command, wall_s=wall_s, place=found.place)
    with rundir.written_whole(target) as folder:
        as_run = resolved(found.parts.scenario)
        rundir.write(folder, scenario.study, as_run, outcome, found.comparison, origin)
        rundir.write_validation(folder, scenario.study, found.rungs, found.prices, found.predicted)
        api.build_report(folder)
    terminal.show_rungs(found.rungs, found.comparison, outcome.warnings, target)
    terminal.note(f"{time.perf_counter() - begun_s:.1f} s")
    if not found.holds:
        raise typer.Exit(BROKEN)


def _how_to_climb(on: str, file: Path, scenario: Scenario) -> dict[str, Any]:
    """Returns the arguments of a climb on a device of this machine: its bounds and, on a card, its machine.
    On a CPU without a profile, measures a quick one first."""
    from simcore.validate.calibration import cpu as calibration  # noqa: PLC0415
    from simcore.validate.ladder import rungs as ladder  # noqa: PLC0415

    if on == CARD:
        from simcore.validate.machines.op_by_op import calibrated, card_here, one_by_one  # noqa: PLC0415

        device, real = card_for(str(file), scenario, terminal.progress())
        ops = one_by_one(real.release, card_here(), calibrated(device, scenario.profile))
        return {"bounds": ladder.load_bounds(device), "device": device, "real": real, "ops": ops}
    from simcore.validate.machines.here import check_formats  # noqa: PLC0415

    check_formats(scenario, str(file))
    bounds = ladder.load_bounds(on)
    if scenario.profile is None and not calibration.profile_path(on).is_dir():
        terminal.note(f"{on} has no profile yet: a quick one is measured first (`calibrate` is better)")
        calibration.calibrate(on, calibration.profile_path(on), True, terminal.progress())
    return {"bounds": bounds}


def _given(settings: Sequence[str], out: Path | None) -> list[str]:
    words = [word for setting in settings for word in ("--set", setting)]
    return [*words, "--out", str(out)] if out else words


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a run directory", show_default=False)],
) -> None:
    """Build the report of a run directory again."""
    every = rundir.EVERY_PLAN if (folder / rundir.POINTS).is_file() else rundir.EVERY_RUN
    for name in (every[-2], rundir.MARK):
        if not (folder / name).is_file():
            raise InputError(f"{folder}: is no run directory: {name} is missing")
    try:
        page = api.build_report(folder)
    except (OSError, ValueError, OverflowError) as error:
        reason = str(error).removeprefix(f"{folder}/")
        raise InputError(f"{folder}: no report can be built: {reason}") from None
    if lacks := [name for name in every if not (folder / name).is_file()]:
        terminal.note(f"note: {folder}: without {listed(lacks)}; the report has only what the rest says")
    typer.echo(page)


RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="a run directory", show_default=False)]


@app.command()
def compare(
    a: RunDir,
    b: RunDir,
    as_json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR|FILE.html", help="where to write a page", show_default=False),
    ] = None,
) -> None:
    """Compare two runs of one study: what differs in their inputs, and what that does to the results."""
    page = None if out is None else rundir.page_at(out, "compare.html")
    found, lines = api.folders_compared(a, b, page)
    if as_json:
        typer.echo(json.dumps(found, indent=1, allow_nan=False))
    else:
        terminal.show_compared(found, lines, page)


@app.command()
def index(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where runs are")] = Path("runs"),
) -> None:
    """List all runs below a folder on a page, index.html: sorted, searched, with links to their reports."""
    page, runs, broken = api.build_index(folder)
    said = f", {broken:,} of them broken" if broken else ""
    typer.echo(f"{page}: {runs:,} run{'' if runs == 1 else 's'}{said}")


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a run of study serving", show_default=False)],
    target: Annotated[Path, typer.Option("--out", metavar="FILE.json", help="where to write")],
    label: Annotated[str | None, typer.Option("--label", help="which strategy", show_default=False)] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="which load", show_default=False)] = None,
    devices: Annotated[int | None, typer.Option("--devices", help="on how many", show_default=False)] = None,
) -> None:
    """Write the requests of a run as the JSON of `vllm bench serve`."""
    count = export_bench(folder, target, label, rate, devices)
    typer.echo(f"{target}: {count:,} requests")


@app.command()
def schema(
    device: Annotated[bool, typer.Option("--device", help="of device files")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="of a profile's profile.yaml")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="of plans (what-if files)")] = False,
) -> None:
    """Print the JSON schema of scenario files, for editors; or of another kind of file."""
    if device + profile + plan > 1:
        raise InputError("--device, --profile, --plan: one of them at a time")
    if plan:
        found = _plan_schema()
    else:
        found = device_schema() if device else profile_schema() if profile else json_schema()
    typer.echo(json.dumps(found, indent=1))


def _plan_schema() -> dict[str, Any]:
    # Plans are imported where they are needed: they would double the time of `--help`.
    from simcore.planning.schema import plan_schema  # noqa: PLC0415

    return plan_schema()


@app.command()
def devices(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.yaml", help="one of them, in full", show_default=False)
    ] = None,
) -> None:
    """List the devices of the catalogue; or show one with every figure and its source."""
    if name is None:
        found = listing.lines([load_device(each) for each in device_names()])
    else:
        found = listing.described(load_device(name))
    for line in found:
        typer.echo(line)


@app.command()
def examples() -> None:
    """List the scenarios that come with simcore; each runs by its name."""
    for name in shipped.names():
        typer.echo(terminal.listing(name, shipped.about(name), 38))


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="of an example", show_default=False)],
) -> None:
    """Copy an example into this folder, to begin with, and beside it the schema by which editors know its
    fields."""
    text = shipped.copied(name)
    target = Path(f"{name.rpartition('/')[2]}.yaml")
    if target.exists():
        raise InputError(f"{target}: is there already, and stays as it is")
    found = _plan_schema() if shipped.is_plan(text) else json_schema()
    write_text(Path(shipped.schema_of(text)), json.dumps(found, indent=1) + "\n")
    write_text(target, text)
    typer.echo(f"{target}: python -m simcore {target}")


PROFILE = "profile"
profile_app = typer.Typer(no_args_is_help=True, help="Profiles: what ops cost on a device.")
app.add_typer(profile_app, name=PROFILE)


@profile_app.command("import")
def import_profile(
    tables: Annotated[
        list[Path], typer.Argument(metavar="TABLE...", help="Parquet or CSV files", show_default=False)
    ],
    device: Annotated[str, typer.Option("--device", metavar="NAME|FILE.yaml", help="the device they are of")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="the profile folder to write")],
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="aiconfigurator|csv", help="[by the columns]", show_default=False),
    ] = None,
    date: Annotated[str, typer.Option("--date", help="when they were measured")] = "unknown",
) -> None:
    """Make a profile of tables of op times: aiconfigurator's, or a CSV with kind, shape, dtype, median_s."""
    # pyarrow takes a while to import.
    from simcore.devices.imported import import_tables  # noqa: PLC0415
    from simcore.devices.op_tables import check_format  # noqa: PLC0415

    spec = load_device(device)
    found = import_tables(tables, spec, out, form=check_format(form), date=date)
    for line in found.messages:
        typer.echo(line)
    typer.echo(f"{out}: {len(found.points):,} op times of {spec.name}; use it by `profile: {out}/`")


@app.command()
def engines(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.yaml", help="one of them, in full", show_default=False)
    ] = None,
) -> None:
    """List the serving engines whose defaults a strategy may take; or show one with every field and its
    source."""
    if name is not None:
        found = described(load_engine(name))
    else:
        found = (terminal.listing(each, load_engine(each).description, 19) for each in engine_names())
    for line in found:
        typer.echo(line)


@app.command()
def models() -> None:
    """List the models of the catalogue."""
    for name in model_names():
        config = load_config(MODELS / f"{name}.json")
        text = (
            f"{_count(config.parameters)} weights, {config.layers} layers, hidden {config.hidden},"
            f" {config.q_heads} heads, {config.kv_heads} KV heads"
            + (f", {config.limit.tokens:,} tokens" if config.limit else "")
            + (f", states of {config.state_bytes / 2**20:.3g} MiB a sequence" if config.linear else "")
        )
        typer.echo(terminal.listing(name, text, 18))


def _count(number: float) -> str:
    """Returns a large number in words, in G or M."""
    return f"{number / 1e9:.1f} G" if number >= 1e9 else f"{number / 1e6:.1f} M"


@app.command()
def schedules() -> None:
    """List the strategies."""
    for union in (DecodeStrategies, ServingStrategies, TilingStrategies):
        for kind, model in kinds_of(union).items():
            typer.echo(terminal.listing(kind, shipped.first_sentence(model.__doc__), 21))


COMMANDS = (*(each.callback.__name__ for each in app.registered_commands if each.callback), PROFILE)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point. Exits with 0, 1 (a law is broken, or another fault of simcore), 2 (bad input),
    129 (SIGHUP), 130 (SIGINT), 141 (the reader of the output has closed the pipe) or 143 (SIGTERM)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        # Characters that the locale cannot encode are escaped.
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _run_app(_with_command(words))
    except (InputError, ModelError) as error:
        code = terminal.failed(str(error), USAGE)
    except LawError as error:
        code = terminal.failed(f"a law is broken, which is a fault of simcore: {error}", BROKEN)
    except BrokenPipeError:
        # The rest of the buffer must not be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = READER_GONE
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        code = terminal.failed(*terminal.message_and_code(error))
    sys.exit(code)


def _processes(text: str) -> int:
    """Returns the number of processes that `--jobs` gives. Raises InputError if it is no number in range."""
    if not (text.isascii() and text.isdecimal() and len(text) <= LONGEST_JOBS and int(text) > 0):
        raise InputError(f"--jobs: is {shown(text)}; a whole number from 1 to {'9' * LONGEST_JOBS} is needed")
    return int(text)


def _with_command(words: Sequence[str]) -> list[str]:
    """Returns the arguments with their command: a file or an example alone means `run`. Raises InputError if
    the first word is neither a command nor a file nor an example, or a word has a control character."""
    for word in words:
        # A lone surrogate stands for a byte that is not UTF-8, which file names may have.
        if (odd := CONTROL.search(word)) and odd.group().isascii():
            raise InputError(f"{shown(word)}: has a control character, which no name or value has")
    if [*words] in ([], [PROFILE]):
        return [*words, "--help"]
    if words[0].startswith("-") or words[0] in COMMANDS:
        return list(words)
    first = words[0]
    if first.endswith((".yaml", ".yml")) or "/" in first or Path(first).is_file() or shipped.path_of(first):
        return ["run", *words]
    known = [*COMMANDS, *shipped.names()]
    raise InputError(f"{shown(first)} is neither a file nor a command nor an example{nearest(first, known)}")


def _run_app(words: Sequence[str]) -> int:
    try:
        called = Path(sys.argv[0]).stem
        name = called if called == "simcore" else "python -m simcore"
        code = int(app(words, prog_name=name, standalone_mode=False) or 0)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except SystemExit as ended:
        # typer itself exits with 130 after Ctrl-C and with 1 if its output pipe is closed.
        code = READER_GONE if ended.code == 1 else int(ended.code or 0)
    ended_by = {INTERRUPTED: "interrupted", TERMINATED: "told to end", HUNG_UP: "hung up"}.get(code)
    return terminal.failed(f"{ended_by}; {_left(words)}", code) if ended_by else code


def _left(words: Sequence[str]) -> str:
    """What an interrupted command leaves."""
    kept = words[0] == "plan" and cache_folder() is not None
    return "nothing is left half-written" + kept * "; the same plan goes on from the runs that have ended"
